//! Sessions whose cgroup is a slice, for container engines with the systemd cgroup driver. systemd
//! makes and removes the slice, the engine places processes in it and confines them; the agent
//! stamps, freezes and kills it as it does a sealed cgroup, and gives it back at the end.

use std::sync::{Arc, MutexGuard};

use super::effects::text;
use super::failure::Failure;
use super::host::Host;
use super::slot::Slot;
use crate::kernel::cgroup::Cgroup;
use crate::model::code::Code;
use crate::model::lease::HolderKind;
use crate::model::limits::Limits;
use crate::model::session::State;
use crate::model::slice::Slice;
use crate::model::view::OpenSession;

fn refusal(slice: &Slice, why: &str) -> Failure {
    Failure::new(Code::BadRequest, format!("{slice}: {why}"))
}

/// Refuses the terms of opening that only a sealed cgroup can keep; the limits that are left: none.
pub fn no_terms(slice: &Slice, wish: &OpenSession) -> Result<Limits, Failure> {
    if wish.limits != Limits::default() {
        let why = "limits of an external session are systemd's: systemctl set-property";
        return Err(refusal(slice, why));
    }
    if wish.holder == Some(HolderKind::Process) {
        let why = "the lease cannot follow a command of overfence's there: use holder beat";
        return Err(refusal(slice, why));
    }
    Ok(Limits::default())
}

impl Host {
    /// Whether a slice can be a session's cgroup: systemd has started it, nothing runs in it, and no
    /// other session of this boot has it, since what a fence freezes and kills is all of it. Nobody
    /// else takes one until the turn is dropped, which is to be after the session is known here.
    pub fn take_slice(&self, slice: &Slice) -> Result<MutexGuard<'_, ()>, Failure> {
        let turn = self.slice_turn();
        let has_it = |other: &Arc<Slot>| {
            let s = &other.lock().session;
            let shared = s.external.as_ref().is_some_and(|theirs| theirs.overlaps(slice));
            // One of an earlier boot has nothing left in it.
            (shared && s.boot == self.boot && s.state != State::Closed).then_some(s.id)
        };
        if let Some(id) = self.slots().iter().find_map(has_it) {
            let why = format!(
                "session {id} has it, or one above or below it: close that, or use another slice"
            );
            return Err(refusal(slice, &why));
        }
        let cgroup = Cgroup::open(&self.paths.hierarchy.join(slice.path()));
        let state = cgroup.and_then(|cgroup| cgroup.map(|cgroup| cgroup.state()).transpose());
        match state.map_err(|e| Failure::new(Code::Internal, text(e)))? {
            None => Err(refusal(slice, &format!("it is not there: systemctl start {slice}"))),
            Some(state) if state.populated => {
                Err(refusal(slice, "something runs in it, which a fence of the session would stop"))
            }
            Some(_) => Ok(turn),
        }
    }
}
