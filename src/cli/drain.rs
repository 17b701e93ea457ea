//! `overfence drain`

use std::time::Duration;

use clap::Args;

use super::context::Context;
use super::{parse, table};
use crate::agent::failure::Failure;
use crate::model::code::Code;
use crate::model::view::{DrainHost, Drained, SessionView};

/// `drain`
#[derive(Debug, Args)]
pub struct Drain {
    /// How long to wait for the last session; what is left then goes on by itself.
    #[arg(long, value_name = "T", default_value = "60s", value_parser = parse::span)]
    wait: Duration,
    /// Do not ask first.
    #[arg(long)]
    yes: bool,
}

/// Does it.
pub(super) fn main(context: &Context, wish: &Drain) -> Result<(), Failure> {
    let client = context.client()?;
    let sessions: Vec<SessionView> = client.get("/v1/sessions")?;
    context.confirm(
        &format!(
            "This ends every writer of this host: {} session(s). What they wrote and did not publish \
             is kept. No session can be opened until the agent is started again",
            sessions.len()
        ),
        wish.yes,
    )?;
    let wait_ms = u64::try_from(wish.wait.as_millis()).ok();
    let drained: Drained = client.post("/v1/drain", &DrainHost { wait_ms })?;
    context.show(&drained, rows)?;
    match drained.left.first() {
        None => Ok(()),
        Some(one) => Err(Failure::new(
            Code::Partial,
            format!(
                "{} session(s) are not down yet, {} is {}: {}",
                drained.left.len(),
                one.id,
                one.state,
                one.trouble
                    .as_deref()
                    .unwrap_or("`overfence session inspect` shows what it waits for"),
            ),
        )),
    }
}

fn rows(drained: &Drained) -> String {
    let all = drained.preserved.iter().chain(&drained.left);
    let rows = table::rows(
        ["SESSION", "WORKSPACE", "STATE", "FACTS"],
        all.map(|session| {
            let facts = session.facts.iter().map(|fact| fact.fact);
            [
                session.id.clone(),
                session.workspace.clone(),
                session.state.to_string(),
                table::or_dash(Some(table::joined(facts))),
            ]
        }),
    );
    let (closed, preserved, left) = (drained.closed, drained.preserved.len(), drained.left.len());
    format!("{rows}{closed} closed, {preserved} preserved, {left} left\n")
}
