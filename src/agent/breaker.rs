//! The breaker as the agent runs it: each step that loses a lease is counted, each effect that kills
//! or removes is asked about, and what changed is made durable by a thread that may wait for a disk.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::effects::text;
use super::host::Host;
use crate::kernel::clock;
use crate::model::breaker::{Breaker, Tripped, stops};
use crate::model::facts::Fact;
use crate::model::journal::Draft;
use crate::model::session::{Session, State};
use crate::model::step::Effect;

/// See the module.
#[derive(Debug, Default)]
pub struct Shared {
    rule: Mutex<Breaker>,
    /// One writer of the record at a time, so that an older one never takes a newer one's place.
    saving: Mutex<()>,
    unsaved: AtomicBool,
    /// While the agent starts: how many sessions were let write when the last one ended. They are
    /// looked at one after the other.
    starting: AtomicU64,
}

impl Shared {
    fn rule(&self) -> MutexGuard<'_, Breaker> {
        self.rule.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn writes(state: State) -> bool {
    matches!(state, State::Active | State::Releasing)
}

/// An entry of the evidence.
fn entry(kind: &str, actor: &str, detail: serde_json::Value) -> Draft {
    Draft {
        kind: kind.to_owned(),
        workspace: None,
        session: None,
        generation: None,
        actor: actor.to_owned(),
        detail,
    }
}

impl Host {
    /// Takes up what the former agent left, before any session is looked at. A record that is not
    /// believed is an open breaker.
    pub(super) fn recall_breaker(&self, sessions: &[&Session]) -> Result<(), String> {
        let open = self.store.breaker().map_err(text)?.unwrap_or_else(|unreadable| {
            Some(Tripped {
                since: jiff::Timestamp::now().to_string(),
                lost: 0,
                of: 0,
                doubt_alone: false,
                waiting: std::collections::BTreeSet::new(),
                why: unreadable.to_string(),
            })
        });
        let stopped = sessions.iter().filter(|s| s.boot == self.boot && !s.holds_lease());
        // One that was lost and is not proved frozen was lost as the former agent ended.
        let lost_at = |s: &Session| {
            let proofs = [Fact::Gated, Fact::Frozen].iter().filter_map(|f| s.facts.0.get(f));
            let first = proofs.map(|proof| proof.at).min();
            first.or_else(|| (s.state == State::Fencing).then(clock::now))
        };
        let mut losses: Vec<_> = stopped.filter_map(|s| Some((lost_at(s)?, *s))).collect();
        losses.sort_by_key(|(at, s)| (*at, s.id));
        let mut breaker = Breaker::with(open);
        let closed = self.store.breaker_closed().map_err(text)?;
        let closed = closed.filter(|closed| closed.boot == self.boot).map(|closed| closed.ns);
        breaker.recall(losses.into_iter(), closed, clock::now());
        let writing = sessions.iter().filter(|s| writes(s.state)).count();
        let writing = u64::try_from(writing).unwrap_or(u64::MAX);
        self.breaker.starting.store(writing + breaker.counted(), Ordering::SeqCst);
        *self.breaker.rule() = breaker;
        Ok(())
    }

    /// All sessions were looked at.
    pub(super) fn judge_breaker(self: &Arc<Self>) {
        self.breaker.starting.store(0, Ordering::SeqCst);
        let writing = self.writing();
        let mut rule = self.breaker.rule();
        if rule.judge_recalled(writing, &jiff::Timestamp::now().to_string()) {
            self.opened(rule);
        }
    }

    /// How many sessions are let write.
    fn writing(&self) -> u64 {
        let counts = self.counts();
        [State::Active, State::Releasing].iter().filter_map(|state| counts.get(state)).sum()
    }

    /// It is open since this moment: says so, and has it recorded.
    fn opened(self: &Arc<Self>, rule: MutexGuard<'_, Breaker>) {
        if let Some(open) = rule.tripped() {
            self.metrics.breaker_opened();
            tracing::error!("the breaker is open: {}; nothing is killed or removed", open.why);
        }
        self.record_soon(rule);
    }

    fn record_soon(self: &Arc<Self>, rule: MutexGuard<'_, Breaker>) {
        drop(rule);
        self.breaker.unsaved.store(true, Ordering::SeqCst);
        let host = Arc::clone(self);
        self.runtime.spawn_blocking(move || host.save_breaker());
    }

    /// Why the breaker is open, if it is.
    pub fn tripped(&self) -> Option<Tripped> {
        self.breaker.rule().tripped().cloned()
    }

    /// Whether this effect waits until the breaker is closed.
    pub(super) fn breaker_stops(&self, effect: &Effect, s: &Session) -> bool {
        stops(effect, s) && self.breaker.rule().tripped().is_some()
    }

    /// Counts a session that stepped from `from`. Waits for nothing: the deadline timer comes here.
    pub(super) fn breaker_sees(self: &Arc<Self>, from: State, s: &Session) {
        match (writes(from), writes(s.state)) {
            (false, true) => return self.breaker.rule().regained(s.id),
            (true, false) => {}
            (true, true) | (false, false) => return,
        }
        let now_writing = self.writing();
        let mut rule = self.breaker.rule();
        let writing = match self.breaker.starting.load(Ordering::SeqCst) {
            0 => now_writing,
            // Of those that are not looked at yet the record says that they are let write.
            before => before.saturating_sub(rule.counted() + 1),
        };
        let was_open = rule.tripped().is_some();
        match rule.lost(s, writing, clock::now(), &jiff::Timestamp::now().to_string()) {
            true if was_open => self.record_soon(rule),
            true => self.opened(rule),
            false => {}
        }
    }

    /// Makes durable what changed, if anything did.
    pub(super) fn save_breaker(&self) {
        let _turn = self.breaker.saving.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.breaker.unsaved.swap(false, Ordering::SeqCst) {
            return;
        }
        let Some(open) = self.tripped() else { return };
        let detail = serde_json::to_value(&open).unwrap_or_default();
        let entry = entry("breaker_opened", "agent", detail);
        if let Err(fault) = self.store.set_breaker(Some(&open), Some(&entry)) {
            // It is open all the same; the next pass tries again.
            self.breaker.unsaved.store(true, Ordering::SeqCst);
            tracing::error!("the open breaker is not recorded: {}", text(fault));
        }
    }

    /// Asks the authority for each doubted session that opened it, and closes it when all have an
    /// answer. Blocks.
    pub(super) fn close_answered_breaker(&self) {
        self.save_breaker();
        let waiting = self.breaker.rule().waiting();
        let mut answered = Vec::new();
        for id in waiting {
            let answer = self.slot(id).map(|slot| self.authority.get(&slot.workspace));
            if let Some(Err(fault)) = answer {
                tracing::info!("the breaker stays open: {}", text(fault));
                break;
            }
            answered.push(id);
        }
        if !answered.is_empty() && self.breaker.rule().answered(&answered) {
            let why = "the authority answered for each session that was in doubt";
            if let Err(fault) = self.shut_breaker("agent", why) {
                tracing::error!("the breaker stays open, for that is not recorded: {fault}");
            }
        }
    }

    /// Closes it, once that is recorded; whether it was open. Blocks.
    pub(super) fn shut_breaker(&self, actor: &str, reason: &str) -> Result<bool, String> {
        let _turn = self.breaker.saving.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = self.tripped() else { return Ok(false) };
        let detail = serde_json::json!({ "reason": reason, "was": open });
        self.store
            .set_breaker(None, Some(&entry("breaker_closed", actor, detail)))
            .map_err(text)?;
        self.breaker.unsaved.store(false, Ordering::SeqCst);
        self.breaker.rule().close();
        tracing::warn!("the breaker is closed by {actor}: {reason}");
        Ok(true)
    }
}
