//! A session's worker: the record first, then one effect, until nothing is left. At most one runs for
//! a session; each effect's answers are events again.

use std::sync::Arc;

use super::{Applied, Inner, Slot, take_journal};
use crate::agent::effects::{AGAIN, TEARDOWN, Try, syncs, text, tried_again};
use crate::agent::host::Host;
use crate::agent::{gather, keep, tell};
use crate::failpoint;
use crate::kernel::clock;
use crate::model::journal::Journal;
use crate::model::ledger::{KeyState, stage_of};
use crate::model::session::{Session, Stage, State, Work};
use crate::model::step::{Effect, Event};
use crate::model::workspace::Refusal;
use crate::store::Durability;

impl Host {
    /// [`Host::apply`] for a caller that may block and waits for the record anyhow: it is the
    /// session's worker meanwhile, if none runs.
    pub fn apply_here(self: &Arc<Self>, slot: &Arc<Slot>, event: Event, actor: &str) -> Applied {
        let mut inner = slot.lock();
        let applied = self.apply_locked(&mut inner, event, actor);
        let claimed = inner.claim_work();
        drop(inner);
        slot.notify();
        if claimed {
            self.work(slot);
        }
        applied
    }

    /// Starts the session's worker if there is something to do and none runs.
    pub fn wake_worker(self: &Arc<Self>, slot: &Arc<Slot>, inner: &mut Inner) {
        if inner.claim_work() {
            let (host, slot) = (Arc::clone(self), Arc::clone(slot));
            self.runtime.spawn_blocking(move || host.work(&slot));
        }
    }

    /// The worker: record first, then one effect, until nothing is left.
    fn work(self: &Arc<Self>, slot: &Arc<Slot>) {
        loop {
            keep::remember(self, slot);
            gather::forget(slot);
            let mut inner = slot.lock();
            let journal = take_journal(&mut inner);
            let effect = inner.queue.pop_front();
            if journal.is_none() && effect.is_none() {
                inner.working = false;
                if inner.session.state == State::Closed {
                    self.forget(slot.id);
                }
                drop(inner);
                slot.notify();
                return;
            }
            let session = inner.session.clone();
            inner.recording = journal.is_some();
            drop(inner);
            if let Some(journal) = journal {
                if let Err(fault) = self.enter(&session, &journal) {
                    // Nothing irreversible without its record: both wait for the next tick.
                    tracing::error!(OVERFENCE_SESSION = %slot.id, OVERFENCE_WORKSPACE = %slot.workspace, "the record could not be written: {fault}");
                    let mut inner = slot.lock();
                    inner.stored = None;
                    inner.recording = false;
                    let mut entries = journal.entries;
                    entries.append(&mut inner.drafts);
                    inner.drafts = entries;
                    if let Some(effect) = effect {
                        inner.queue.push_front(effect);
                    }
                    inner.working = false;
                    return;
                }
                tell::journal(&journal, &session);
            }
            slot.lock().recording = false;
            slot.notify();
            match effect {
                Some(effect) if syncs(&effect) => {
                    // It may be long until its turn comes: no thread waits for it.
                    let work = Arc::clone(self).work_in_turn(Arc::clone(slot), session, effect);
                    self.runtime.spawn(work);
                    return;
                }
                Some(effect @ Effect::Pack { .. }) => {
                    // The session runs meanwhile, and its worker has to be there for it.
                    let work = Arc::clone(self).work_beside(Arc::clone(slot), session, effect);
                    self.runtime.spawn(work);
                }
                Some(effect) => self.do_and_hear(slot, &session, &effect),
                None => {}
            }
        }
    }

    fn do_and_hear(self: &Arc<Self>, slot: &Arc<Slot>, session: &Session, effect: &Effect) {
        for event in self.perform(slot, session, effect, Try::default()) {
            let captured = match &event {
                Event::Captured { layer, .. } => *layer,
                _ => None,
            };
            self.apply(slot, event, "agent");
            // The session names it now, or nobody will.
            self.layers.settle(captured);
        }
    }

    /// One effect that takes long and keeps the session's worker from nothing.
    async fn work_beside(self: Arc<Self>, slot: Arc<Slot>, session: Session, effect: Effect) {
        let (host, asked, what) = (Arc::clone(&self), Arc::clone(&slot), effect.name().to_owned());
        let done =
            tokio::task::spawn_blocking(move || host.do_and_hear(&asked, &session, &effect)).await;
        if let Err(fault) = done {
            self.apply(&slot, Event::Failed { what, why: fault.to_string() }, "agent");
        }
    }

    /// The worker while one effect has to wait for its turn; it goes on with the rest after that.
    async fn work_in_turn(self: Arc<Self>, slot: Arc<Slot>, session: Session, effect: Effect) {
        let until = clock::now().plus(TEARDOWN);
        let (session, effect) = (Arc::new(session), Arc::new(effect));
        loop {
            let turns = if slot.dirs.image.is_some() { &self.image_sync } else { &self.sync };
            let turn = Arc::clone(turns).acquire_owned().await.ok();
            let tried = Try { turn, last: clock::now() >= until };
            let (host, asked) = (Arc::clone(&self), Arc::clone(&slot));
            let (session, effect) = (Arc::clone(&session), Arc::clone(&effect));
            let answered = tokio::task::spawn_blocking(move || {
                let events = host.perform(&asked, &session, &effect, tried);
                let answered = !(events.is_empty() && tried_again(&effect));
                for event in events {
                    host.apply(&asked, event, "agent");
                }
                if answered {
                    host.work(&asked);
                }
                answered
            });
            match answered.await {
                Ok(false) => tokio::time::sleep(AGAIN).await,
                Ok(true) => return,
                Err(fault) => {
                    // It panicked, or the agent stops: the next tick tries again.
                    tracing::error!(OVERFENCE_SESSION = %slot.id, OVERFENCE_WORKSPACE = %slot.workspace, "its worker ended: {fault}");
                    slot.lock().working = false;
                    return;
                }
            }
        }
    }
}

impl Host {
    /// Makes a step durable. What is going to be offered, or is offered next, is entered in the
    /// ledger with it, in one transaction.
    fn enter(&self, s: &Session, journal: &Journal) -> Result<(), String> {
        let alone = || self.store.record(journal, durability(s, journal)).map_err(text);
        let Some((wish, stage)) = stage_of(s).filter(|_| !journal.sessions.is_empty()) else {
            return alone();
        };
        let sent = stage == KeyState::Sent;
        let rider = |_: &Result<(), Refusal>| journal.clone();
        failpoint::hit("authority.enter.before");
        let entered = self.authority.enter(&wish, &s.owner, stage, Box::new(rider));
        failpoint::hit("authority.enter.after");
        match entered.map_err(text) {
            Ok(Ok(())) => Ok(()),
            // The record stands; the offer itself will be refused for the same reason.
            Ok(Err(refusal)) => {
                tracing::warn!(OVERFENCE_SESSION = %s.id, "not entered in the ledger: {refusal}");
                Ok(())
            }
            // Nothing is sent that the ledger does not know. A thaw need not wait for it.
            Err(why) if sent => Err(why),
            Err(_) => alone(),
        }
    }
}

/// Decisions survive a power loss. Witnessed time and the like need not, nor need a checkpoint that is
/// not offered yet: its session ends with the power, and a freeze is not to wait for the disk.
fn durability(s: &Session, journal: &Journal) -> Durability {
    let not_offered = matches!(
        s.work,
        Some(Work::Checkpoint {
            stage: Stage::Stopping
                | Stage::Capturing
                | Stage::Gathered
                | Stage::Packing
                | Stage::Thawing { .. },
            ..
        })
    );
    match journal.entries.is_empty() || (s.state == State::Active && not_offered) {
        true => Durability::Lazy,
        false => Durability::Full,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::head::Digest;
    use crate::model::ids::PublicationKey;
    use crate::model::tests::session;

    #[test]
    fn a_checkpoint_waits_for_the_disk_once_it_is_offered() {
        let mut s = session(State::Active);
        let entries = vec![super::super::draft("checkpoint", &s, "a test", serde_json::json!({}))];
        let told = Journal { sessions: vec![s.clone()], entries };
        let noted = Journal { entries: vec![], ..told.clone() };
        let layer = Digest([5; 32]);
        for (stage, wanted) in [
            (Stage::Stopping, Durability::Lazy),
            (Stage::Capturing, Durability::Lazy),
            (Stage::Gathered, Durability::Lazy),
            (Stage::Packing, Durability::Lazy),
            (Stage::Thawing { layer: Some(layer) }, Durability::Lazy),
            (Stage::Publishing { layer }, Durability::Full),
        ] {
            let key = PublicationKey::from_u128(1);
            s.work = Some(Work::Checkpoint { key, stage, tainted: false });
            assert_eq!(durability(&s, &told), wanted, "{stage:?}");
            assert_eq!(durability(&s, &noted), Durability::Lazy, "{stage:?}");
        }
        // A loss is a decision, whatever it found under way.
        s.work = Some(Work::Checkpoint {
            key: PublicationKey::from_u128(1),
            stage: Stage::Capturing,
            tainted: false,
        });
        s.state = State::Fencing;
        assert_eq!(durability(&s, &told), Durability::Full);
        (s.state, s.work) = (State::Active, None);
        assert_eq!(durability(&s, &told), Durability::Full);
    }
}
