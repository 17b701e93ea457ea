//! `overfence status`

use super::context::Context;
use super::table;
use crate::agent::failure::Failure;
use crate::model::view::{SpaceView, StatusView};

/// Shows how the agent is.
pub(super) fn main(context: &Context) -> Result<(), Failure> {
    let status: StatusView = context.client()?.get("/v1/status")?;
    context.show(&status, |status| {
        let sessions = status.sessions.iter().map(|(state, n)| format!("{n} {state}"));
        table::facts([
            ("agent", Some(format!("{} on {}", status.version, status.host))),
            ("ready", Some(if status.ready { "yes" } else { "no" }.into())),
            ("draining", status.draining.then(|| "new sessions are refused".into())),
            ("breaker", status.breaker.as_ref().map(|why| format!("open: {why}"))),
            ("authority", Some(status.authority.clone())),
            ("trouble", status.authority_trouble.clone()),
            ("mounts", status.mount_trouble.clone()),
            ("sessions", Some(table::or_dash(Some(table::joined(sessions))))),
            ("preserved", Some(table::bytes(status.preserved_bytes))),
            ("room", Some(room(&status.space))),
            ("on hold", Some(table::joined(&status.held))),
            ("last pass", Some(status.reconcile.clone())),
            ("state", Some(status.state_dir.0.clone())),
            ("cgroups", Some(status.cgroup.0.clone())),
        ])
    })
}

fn room(space: &SpaceView) -> String {
    let held = match space.reserve_wanted {
        0 => "nothing held back".to_owned(),
        wanted => {
            format!("{} of {} held back", table::bytes(space.reserve), table::bytes(wanted))
        }
    };
    let short = if space.short { ": FULL, no session is opened" } else { "" };
    format!("{} free, {held}{short}", table::bytes(space.free))
}
