//! `overfence demo`: the story of a stale writer, told on this host's kernel. It starts an agent
//! and a keeper of its own and does everything else as an operator would, by this binary's own
//! verbs. What each step claims is confirmed by a checker that reads the kernel and the
//! authority's file itself.
//!
//! ```text
//! story    the first steps, takeover the others -> ask, writer, check, files
//! host     the place it happens in, cleared afterwards
//! leftover what a killed demo left, removed by the next
//! ask      the verbs, as child processes
//! writer   a confined command that is fed line by line
//! check    the checker on the kernel: nothing of kernel, agent, store or authority
//! files    the checker on files, likewise
//! report   what is shown
//! ```
//!
//! On disk, and gone afterwards unless `--keep` was said:
//!
//! ```text
//! /var/tmp/overfence-demo-<pid>/
//!     owner                                     locked while the demo lives
//!     config.toml  agent.log  keeper.log
//!     state/  run/                              the agent's
//! <cgroup2>/<own cgroup>/overfence-demo-<pid>/  the agent's sessions are below
//! ```

mod ask;
mod check;
mod files;
mod host;
mod leftover;
mod report;
mod story;
mod takeover;
mod writer;

use clap::Args;

use super::context::Context;
use crate::agent::failure::Failure;
use host::Place;
use report::Report;

/// `demo`
#[derive(Debug, Args)]
pub struct Demo {
    /// Keep the throwaway directory and say where it is.
    #[arg(long)]
    keep: bool,
}

/// Tells the story; 0 when every step and every check held.
pub(super) fn main(context: &Context, wish: &Demo) -> Result<u8, Failure> {
    let mut place = Place::make()?;
    let mut report = Report::new(context);
    for found in &place.found {
        context.note(&format!("overfence: {found}"));
    }
    report.begin(&place)?;
    let told = place.start().and_then(|()| story::tell(&place, &mut report));
    if let Err(why) = told {
        report.fault(place.interrupted().unwrap_or(why));
    }
    for left in place.clear(wish.keep) {
        report.fault(left);
    }
    report.end(wish.keep.then_some(place.dir.as_path()))
}
