//! `overfence breaker`

use clap::{Args, Subcommand};

use super::context::Context;
use super::table;
use crate::agent::failure::Failure;
use crate::model::view::{BreakerView, ResetBreaker};

/// `breaker`
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Whether it is open, and why.
    Show,
    /// Close it: what waits to be killed or removed is, from now on.
    Reset(Reset),
}

/// `breaker reset`
#[derive(Debug, Args)]
pub struct Reset {
    /// What was wrong, and why it is over; goes into the evidence.
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

/// Does it.
pub(super) fn main(context: &Context, verb: Verb) -> Result<(), Failure> {
    let client = context.client()?;
    let view: BreakerView = match verb {
        Verb::Show => client.get("/v1/breaker")?,
        Verb::Reset(Reset { reason }) => {
            client.post("/v1/breaker/reset", &ResetBreaker { reason })?
        }
    };
    context.show(&view, |view| {
        let closes = match (view.open, view.closes_by_itself) {
            (false, _) => None,
            (true, true) => Some(format!(
                "once the authority has answered for {} session(s)",
                view.waiting.len()
            )),
            (true, false) => Some("overfence breaker reset --reason TEXT".to_owned()),
        };
        let state = if view.open { "open: nothing is killed or removed" } else { "closed" };
        table::facts([
            ("breaker", Some(state.to_owned())),
            ("since", view.since.clone()),
            ("why", view.why.clone()),
            ("closes", closes),
        ])
    })
}
