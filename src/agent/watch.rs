//! Watching the sealed cgroups: one inotify descriptor for all of them. A wake-up says only that
//! something changed; what holds is read again.

use std::sync::Arc;
use std::time::Duration;

use super::host::Host;
use super::pulse::Part;
use super::slot::Slot;
use crate::kernel::clock;
use crate::model::facts::Fact;
use crate::model::session::{Stage, State, Work};
use crate::model::step::Event;

const WAIT: Duration = Duration::from_millis(500);

/// The thread's body; ends when the agent stops.
pub fn run(host: &Arc<Host>) -> crate::kernel::Result<()> {
    while !host.stopping() {
        host.pulse.beat(Part::Watch);
        if host.events.wait(Some(clock::now().plus(WAIT)))? {
            for id in host.events.woken()? {
                if let Some(slot) = host.slot(id) {
                    look(host, &slot);
                }
            }
        }
    }
    Ok(())
}

/// Reads a session's cgroup and tells what speaks against its facts.
pub fn look(host: &Arc<Host>, slot: &Arc<Slot>) {
    let inner = slot.lock();
    let s = &inner.session;
    let expected = match s.state {
        State::Fenced | State::Preserved => s.facts.has(Fact::Frozen) && !s.facts.has(Fact::Killed),
        State::Active => matches!(s.work, Some(Work::Checkpoint { stage: Stage::Capturing, .. })),
        State::Opening
        | State::Releasing
        | State::Fencing
        | State::Deleting
        | State::Closed
        | State::Quarantined => false,
    };
    let Some(cgroup) = inner.cgroup.clone().filter(|_| expected) else { return };
    // A frozen process that is traced flips `frozen` for a moment; the wish is what a foreign
    // hand changes, and what has to be written again.
    let since = s.facts.0.get(&Fact::Frozen).map(|proof| proof.at);
    let seen = match cgroup.state() {
        Ok(state) if state.is_frozen() => match cgroup.last_thaw() {
            // The keeper was there first.
            Ok(Some(thaw)) if since.is_some_and(|since| thaw > since) => {
                format!("freeze 0 at {} ns since boot; the keeper froze it again", thaw.0)
            }
            _ => return,
        },
        Ok(state) => state.to_string(),
        Err(fault) => super::effects::text(fault),
    };
    drop(inner);
    host.apply(slot, Event::ForeignThaw { seen }, "foreign");
}
