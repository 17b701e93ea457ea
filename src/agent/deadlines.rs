//! The agent's own deadline timer: a thread of its own on CLOCK_BOOTTIME, real-time scheduled
//! where that is allowed, so that a lost lease is a freeze within a millisecond whatever the rest
//! of the agent does. The keeper is the second line and needs no agent.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::agenda::Agenda;
use super::host::Host;
use super::pulse::Part;
use super::slot::Slot;
use crate::kernel::cgroup::Stamp;
use crate::kernel::clock::{self, BootTimer, Waker};
use crate::model::ids::SessionId;
use crate::model::lease::Bound;
use crate::model::session::Loss;
use crate::model::step::{Event, Purpose};
use crate::model::time::BootNs;

/// A timer that fires this late means that the agent did not run: signs of life may have been
/// missed, so the holder is not blamed.
const STALLED: Duration = Duration::from_millis(500);

/// Deadlines by time, and what wakes their thread.
#[derive(Debug)]
pub struct Deadlines {
    agenda: Mutex<Agenda>,
    waker: Waker,
}

impl Deadlines {
    /// None yet.
    pub fn new() -> crate::kernel::Result<Self> {
        Ok(Self { agenda: Mutex::default(), waker: Waker::new()? })
    }

    fn agenda(&self) -> std::sync::MutexGuard<'_, Agenda> {
        self.agenda.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets a session's deadline.
    pub fn set(&self, id: SessionId, at: BootNs) {
        if self.agenda().set(id, at) {
            self.waker.wake();
        }
    }

    /// Forgets a session.
    pub fn remove(&self, id: SessionId) {
        self.agenda().remove(id);
    }

    /// Wakes the thread, so that it sees that the agent stops.
    pub fn wake(&self) {
        self.waker.wake();
    }
}

/// The thread's body; ends when the agent stops.
pub fn run(host: &Arc<Host>) -> crate::kernel::Result<()> {
    let timer = BootTimer::new()?;
    while !host.stopping() {
        let first = host.deadlines.agenda().first();
        match first {
            Some(at) => timer.arm(at)?,
            None => timer.disarm()?,
        }
        timer.wait_or(&host.deadlines.waker)?;
        host.deadlines.waker.drain();
        host.pulse.beat(Part::Deadlines);
        let now = clock::now();
        let due = host.deadlines.agenda().take_due(now);
        // The wish is written for all of them first, then each is asked for its proof.
        let due: Vec<_> = due
            .into_iter()
            .filter_map(|id| host.slot(id))
            .filter_map(|slot| stop(host, &slot, now))
            .collect();
        for (slot, deadline, loss) in &due {
            let revoke = !matches!(loss, Loss::Doubt { .. });
            let event = Event::LeaseLost { loss: loss.clone(), revoke };
            let mut inner = slot.lock();
            host.apply_locked(&mut inner, event, "agent");
            host.metrics.fenced_after(&inner.session, *deadline);
        }
        if due.is_empty() {
            continue;
        }
        // Only once all of them stand still, and not by this thread: hundreds of workers would
        // compete with the freezes, and starting them would delay the next deadline.
        let waking = Arc::clone(host);
        host.runtime.spawn_blocking(move || due.iter().for_each(|(slot, ..)| waking.wake(slot)));
    }
    Ok(())
}

/// Freezes a session whose deadline passed, unless it was renewed this moment.
fn stop(host: &Host, slot: &Arc<Slot>, now: BootNs) -> Option<(Arc<Slot>, BootNs, Loss)> {
    let mut inner = slot.lock();
    if !inner.session.holds_lease() {
        return None;
    }
    host.hear_init(&mut inner);
    let (deadline, bound) = inner.deadline();
    if deadline > now {
        host.deadlines.set(slot.id, deadline);
        return None;
    }
    if let Some(cgroup) = &inner.cgroup {
        let stamp = Stamp { purpose: Purpose::Deadline, generation: inner.session.generation };
        for answer in [cgroup.stamp(&stamp), cgroup.write_freeze(true)] {
            if let Err(fault) = answer {
                tracing::error!(OVERFENCE_SESSION = %slot.id, OVERFENCE_WORKSPACE = %slot.workspace, "{fault}");
            }
        }
    }
    let loss = why(&inner.session.doubt, bound, inner.lease.signed, now.since(deadline));
    Some((Arc::clone(slot), deadline, loss))
}

/// Whether a passed deadline is the holder's silence or our not knowing.
fn why(doubt: &Option<String>, bound: Bound, signed: bool, late: Duration) -> Loss {
    let unanswered = bound == Bound::Grant && signed;
    match (doubt, bound) {
        (_, Bound::Lifetime) => Loss::Expired { bound },
        (Some(cause), Bound::Holder | Bound::Grant) => Loss::Doubt { cause: cause.clone() },
        (None, Bound::Holder | Bound::Grant) if late >= STALLED || unanswered => {
            Loss::Doubt { cause: "the agent did not run in time".to_owned() }
        }
        // Renewals are withheld when the holder is silent, so a grant that ran out without a sign
        // since is the holder's silence too.
        (None, Bound::Holder | Bound::Grant) => Loss::Expired { bound: Bound::Holder },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_the_holders_and_lateness_is_ours() {
        let late = |ms| Duration::from_millis(ms);
        assert_eq!(
            why(&None, Bound::Holder, false, late(1)),
            Loss::Expired { bound: Bound::Holder }
        );
        assert_eq!(
            why(&None, Bound::Grant, false, late(1)),
            Loss::Expired { bound: Bound::Holder }
        );
        assert!(matches!(why(&None, Bound::Grant, true, late(1)), Loss::Doubt { .. }));
        assert!(matches!(why(&None, Bound::Holder, false, late(800)), Loss::Doubt { .. }));
        assert!(matches!(
            why(&Some("no answer".into()), Bound::Holder, false, late(1)),
            Loss::Doubt { .. }
        ));
        assert_eq!(
            why(&Some("x".into()), Bound::Lifetime, true, late(1)),
            Loss::Expired { bound: Bound::Lifetime }
        );
    }
}
