//! What the workload sees of its own session below `/run/overfence`, and who its init is.
//!
//! `session.json` is replaced as a whole at each renewal, at doubt, at a readmission and when the
//! lease is lost, so that a workload can pass its generation on to other storage and can stop by
//! itself. The directory is bound inside, so that files replaced in it appear there.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

use super::effects::text;
use super::host::Host;
use super::paths::Paths;
use super::slot::{Inner, Slot};
use crate::model::ids::SessionId;
use crate::model::session::State;
use crate::model::ticket::Ticket;
use crate::workload::InitRecord;

#[derive(Serialize)]
struct Shown<'s> {
    workspace: &'s str,
    session: String,
    generation: u64,
    /// CLOCK_BOOTTIME nanoseconds.
    deadline: u64,
    boot: String,
    /// `active`, `doubt` or `lost`.
    state: &'static str,
}

/// Makes the run-time directories of a session: one the workload sees and one it does not.
pub fn prepare(paths: &Paths, id: SessionId) -> io::Result<()> {
    let inside = paths.inside_of(id);
    fs::create_dir_all(&inside)?;
    fs::set_permissions(paths.runtime_of(id), fs::Permissions::from_mode(0o700))?;
    fs::set_permissions(&inside, fs::Permissions::from_mode(0o755))
}

/// Removes them.
pub fn remove(paths: &Paths, id: SessionId) -> io::Result<()> {
    match fs::remove_dir_all(paths.runtime_of(id)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Who the session's init was when it was last started.
fn init_in(record: &Path) -> io::Result<Option<InitRecord>> {
    match fs::read(record) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Sends SIGTERM to the init of that record if it lives in `cgroup`; whether it was sent.
pub fn ask_to_end(record: &Path, cgroup: &Path) -> bool {
    let Ok(Some(init)) = init_in(record) else { return false };
    let Ok(pid) = i32::try_from(init.pid) else { return false };
    let term = nix::sys::signal::Signal::SIGTERM;
    init.lives_in(cgroup).unwrap_or(false)
        && nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), term).is_ok()
}

fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = fs::File::create(&new)?;
    file.write_all(content)?;
    // On the descriptor: this is done at each renewal of each session.
    file.set_permissions(fs::Permissions::from_mode(0o644))?;
    fs::rename(&new, path)
}

impl Host {
    /// Rewrites what the workload sees.
    pub fn show(&self, slot: &Arc<Slot>) -> Result<(), String> {
        self.show_locked(&slot.lock()).map_err(text)
    }

    /// [`Host::show`] for a caller that holds the lock.
    pub fn show_locked(&self, inner: &Inner) -> io::Result<()> {
        let s = &inner.session;
        let state = match (s.state, &s.doubt) {
            (State::Opening | State::Active | State::Releasing, None) => "active",
            (State::Opening | State::Active | State::Releasing, Some(_)) => "doubt",
            (
                State::Fencing
                | State::Fenced
                | State::Preserved
                | State::Deleting
                | State::Closed
                | State::Quarantined,
                _,
            ) => "lost",
        };
        let shown = Shown {
            workspace: s.workspace.as_str(),
            session: s.id.to_string(),
            generation: s.generation.0,
            deadline: inner.deadline().0.0,
            boot: s.boot.to_string(),
            state,
        };
        let mut content = serde_json::to_vec_pretty(&shown)?;
        content.push(b'\n');
        replace(&self.paths.inside_of(s.id).join("session.json"), &content)
    }

    /// Signs the session's mount ticket, stamps its digest on the cgroup and shows it inside.
    pub fn issue_ticket(&self, inner: &Inner) -> Result<String, String> {
        let s = &inner.session;
        let ticket = Ticket {
            workspace: s.workspace.clone(),
            session: s.id,
            host: s.host,
            boot: s.boot,
            lease: s.lease,
            generation: s.generation,
            base: s.base.clone(),
            cgroup: self.cgroup_in_hierarchy(s),
            issued: jiff::Timestamp::now().to_string(),
        };
        let signed = self.store.keys().ticket.sign_ticket(&ticket).map_err(text)?;
        if let Some(cgroup) = &inner.cgroup {
            use sha2::Digest as _;
            let digest = crate::model::head::Digest(sha2::Sha256::digest(signed.as_bytes()).into());
            cgroup.set_ticket(&digest).map_err(text)?;
        }
        replace(&self.paths.inside_of(s.id).join("ticket"), signed.as_bytes()).map_err(text)?;
        Ok(signed)
    }
}
