//! The end of all sessions when the host goes down, for systemd to call once the agent and the
//! keeper have ended. Left to itself a shutdown asks everybody to end and then waits for 90 s, since
//! what is frozen cannot answer. Nothing is recorded here: that the host went down ends every lease,
//! and the next start finds the uppers.

use std::path::Path;
use std::time::Duration;

use super::show;
use crate::kernel::cgroup::{Cgroup, Outcome};
use crate::kernel::clock;
use crate::kernel::deadlines::{Deadline, Entry, Snapshot};

/// How long writers get to end by themselves after SIGTERM.
const STOP: Duration = Duration::from_secs(5);
/// How long the kernel gets to end those that were killed.
const KILL: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_millis(20);

/// Asks each session in the keeper's table to end, kills what does not, and says how many there
/// were.
///
/// # Errors
/// The table cannot be read; or what is still there at the end.
pub fn end_sessions(runtime_dir: &Path) -> crate::kernel::Result<usize> {
    let Some(table) = Snapshot::open(&runtime_dir.join("deadlines"))? else { return Ok(0) };
    let mut cgroups = Vec::new();
    for entry in table.iter() {
        let (cgroup, session) = match entry {
            Entry::Free => continue,
            Entry::Valid(Deadline { cgroup, session, .. }) => (Some(cgroup), Some(session)),
            Entry::Torn { cgroup, .. } => (cgroup, None),
        };
        let Some(cgroup) = cgroup else { continue };
        let Some(cgroup) = Cgroup::open(&cgroup)? else { continue };
        if let Some(session) = session {
            let init = runtime_dir.join("sessions").join(session.to_string()).join("init.json");
            show::ask_to_end(&init, cgroup.path());
        }
        cgroups.push(cgroup);
    }
    let busy = |cgroup: &Cgroup| {
        // What is frozen does not end by being asked.
        cgroup.state().is_ok_and(|state| state.populated && !state.freeze)
    };
    let until = clock::now().plus(STOP);
    while clock::now() < until && cgroups.iter().any(busy) {
        std::thread::sleep(AGAIN);
    }
    for cgroup in &cgroups {
        if let Outcome::Late(left) = cgroup.kill(KILL)? {
            let names: Vec<_> = left.iter().map(|b| format!("{} ({})", b.pid, b.command)).collect();
            eprintln!("{}: killed, and not gone: {}", cgroup.path().display(), names.join(", "));
        }
    }
    Ok(cgroups.len())
}
