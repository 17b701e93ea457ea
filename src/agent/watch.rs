//! Watching the sealed cgroups, one inotify descriptor for all of them, and the mounts. A wake-up says
//! only that something changed; what holds is read again.

use std::sync::Arc;
use std::time::Duration;

use super::host::Host;
use super::keep;
use super::pulse::Part;
use super::slot::Slot;
use crate::kernel::rivals::Scope;
use crate::kernel::{clock, mountinfo};
use crate::model::facts::{Fact, Proof};
use crate::model::session::{Stage, State, Work};
use crate::model::step::Event;

const WAIT: Duration = Duration::from_millis(500);

/// The thread's body; ends when the agent stops.
pub fn run(host: &Arc<Host>) -> crate::kernel::Result<()> {
    let mounts = mountinfo::Changes::new()?;
    let (mut changed, mut next) = (false, clock::now());
    while !host.stopping() {
        host.pulse.beat(Part::Watch);
        if host.events.wait(Some(clock::now().plus(WAIT)))? {
            for id in host.events.woken()? {
                if let Some(slot) = host.slot(id) {
                    look(host, &slot);
                }
            }
        }
        changed |= mounts.any()?;
        let begun = clock::now();
        if changed && begun >= next {
            changed = false;
            for slot in host.unsettled() {
                super::sweep::check_read_only(host, &slot);
            }
            keep::rivals(host, Scope::Here);
            let now = clock::now();
            next = now.plus(now.since(begun) * keep::REST);
        }
    }
    Ok(())
}

/// Reads a session's cgroup and tells what speaks against its facts.
pub fn look(host: &Arc<Host>, slot: &Arc<Slot>) {
    let inner = slot.lock();
    let s = &inner.session;
    let expected = match s.state {
        // Who is about to run on is thawed by us.
        State::Fenced | State::Preserved => {
            s.facts.has(Fact::Frozen) && !s.facts.has(Fact::Killed) && !s.may_run_on()
        }
        State::Active => matches!(s.work, Some(Work::Checkpoint { stage: Stage::Capturing, .. })),
        State::Opening
        | State::Releasing
        | State::Fencing
        | State::Deleting
        | State::Closed
        | State::Quarantined => false,
    };
    let fenced = !s.holds_lease();
    if s.may_run_on() && !s.facts.has(Fact::Frozen) {
        drop(inner);
        stopped_again(host, slot);
        return;
    }
    let Some(cgroup) = inner.cgroup.clone().filter(|_| expected) else {
        drop(inner);
        keep::gather(host, slot);
        return;
    };
    let since = s.facts.0.get(&Fact::Frozen).map(|proof| proof.at);
    drop(inner);
    // A frozen process that is traced flips `frozen` for a moment; the wish is what a foreign
    // hand changes, and what has to be written again.
    let seen = match cgroup.state() {
        Ok(state) if state.is_frozen() => match cgroup.last_thaw() {
            // The keeper was there first.
            Ok(Some(thaw)) if since.is_some_and(|since| thaw > since) => {
                format!("freeze 0 at {} ns since boot; the keeper froze it again", thaw.0)
            }
            answer => {
                if let Err(fault) = answer {
                    tracing::warn!(OVERFENCE_SESSION = %slot.id, "whether the keeper found it thawed: {}", super::effects::text(fault));
                }
                keep::gather(host, slot);
                return;
            }
        },
        Ok(state) => state.to_string(),
        Err(fault) => {
            if fenced {
                made_again(host, slot);
            }
            super::effects::text(fault)
        }
    };
    host.apply(slot, Event::ForeignThaw { seen }, "foreign");
}

/// Who runs on behind the gate may be frozen by a keeper that was in the middle of a pass as its entry
/// was taken away. That is as true as any freeze, and what follows it follows: it runs on. Whoever wants
/// it frozen asks for that.
fn stopped_again(host: &Arc<Host>, slot: &Arc<Slot>) {
    let Some(cgroup) = slot.lock().cgroup.clone() else { return };
    match cgroup.state() {
        Ok(state) if state.is_frozen() => {
            let (asked, answer) = ("cgroup.freeze".to_owned(), state.to_string());
            let proof = Proof { asked, answer, at: clock::now(), took_us: 0 };
            host.apply(slot, Event::Frozen { proof }, "foreign");
        }
        Ok(_) => {}
        Err(fault) => {
            tracing::warn!(OVERFENCE_SESSION = %slot.id, "{}", super::effects::text(fault));
        }
    }
}

/// Somebody removed a stopped session's cgroup, and perhaps made another one: who was in it is taken
/// in again, before an empty one is asked whether it is frozen.
fn made_again(host: &Arc<Host>, slot: &Arc<Slot>) {
    slot.lock().cgroup = None;
    let done = host
        .cgroup(slot)
        .and_then(|cgroup| cgroup.write_freeze(true).map_err(super::effects::text));
    match done {
        Ok(()) => {
            keep::gather(host, slot);
        }
        Err(why) => tracing::error!(OVERFENCE_SESSION = %slot.id, "its cgroup: {why}"),
    }
}
