//! One session as the running agent holds it: the record, what is queued for it, and the open
//! descriptors through which the kernel is asked.
//!
//! Everything that happens to a session goes through [`Host::apply`]. A freeze is done there, at
//! once and ahead of its record; every other effect is queued and done by the session's own
//! worker, which first makes the record and the evidence durable. Sessions never wait for each
//! other.

mod worker;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use super::effects::text;
use super::host::Host;
use super::image::Readers;
use super::keep::Kept;
use super::named::Named;
use crate::failpoint;
use crate::kernel::cgroup::{Cgroup, Outcome, Stamp};
use crate::kernel::clock;
use crate::kernel::overlay::Mounted;
use crate::model::code::Code;
use crate::model::facts::Proof;
use crate::model::ids::{PublicationKey, SessionId, WorkspaceId};
use crate::model::journal::{Draft, Journal};
use crate::model::lease::{self, Bound, Signs};
use crate::model::session::{Session, State, Work};
use crate::model::step::{Effect, Event, Published, Purpose, step};
use crate::model::time::BootNs;
use crate::progress::Amount;
use crate::upper::gather::Gathered;
use crate::upper::remove::SessionDirs;
use crate::workload::Beats;

/// How long [`Host::apply`] itself asks for the proof of a freeze; an idle process is frozen in
/// some 30 microseconds. What takes longer is awaited by the session's worker.
const INLINE_FREEZE: Duration = Duration::from_millis(1);

/// A session of this agent.
#[derive(Debug)]
pub struct Slot {
    /// Its id.
    pub id: SessionId,
    /// What it writes.
    pub workspace: WorkspaceId,
    /// Its directories.
    pub dirs: SessionDirs,
    /// Who reads its image while nothing else keeps that mounted.
    pub(super) readers: Mutex<Readers>,
    inner: Mutex<Inner>,
    changed: watch::Sender<u64>,
}

/// What the slot's lock guards.
#[derive(Debug)]
pub struct Inner {
    /// The record.
    pub session: Session,
    /// The local deadline's sources.
    pub lease: LeaseClock,
    /// The signs of its init, once that was started; of a `process` lease.
    pub beats: Option<Beats>,
    /// The sealed cgroup, once it exists.
    pub cgroup: Option<Arc<Cgroup>>,
    /// The overlay's root; holds it busy.
    pub mounted: Option<Arc<Mounted>>,
    /// Directory, cgroup and mount are being made: effects wait until that has ended.
    pub building: bool,
    /// Its entry in the lease gate, where there is one.
    pub gate: Option<crate::kernel::gate::Entry>,
    /// Why it has none, where one was tried.
    pub gate_absent: Option<String>,
    /// What the gate refused of it.
    pub refused: super::gate::Refused,
    /// Device of the overlay's superblock, known also after it was unmounted here.
    pub s_dev: Option<u64>,
    /// Answers to publications, until their askers took them.
    pub answers: BTreeMap<PublicationKey, Published>,
    /// When the present checkpoint froze the session, and for how long the last one did.
    pub frozen_at: Option<BootNs>,
    /// See `frozen_at`.
    pub frozen_for: Duration,
    /// What the next layer is to be made of, once the session runs again.
    pub gathered: Option<(PublicationKey, Gathered)>,
    /// Why the last capture failed, if it did.
    pub capture_code: Option<Code>,
    /// What is known of it for keeping it stopped.
    pub kept: Kept,
    /// Who was found to hold its overlay.
    pub named: Named,
    /// Bytes and entries of the stopped upper, once counted.
    pub size: Option<(u64, u64)>,
    /// How much its last capture found in the upper.
    pub captured: Option<Amount>,
    drafts: Vec<Draft>,
    stored: Option<Session>,
    queue: VecDeque<Effect>,
    working: bool,
    /// What was taken for the record is not durable yet.
    recording: bool,
}

/// See [`Inner::checkpoint`].
pub struct Before {
    session: Session,
    stored: Option<Session>,
    drafts: Vec<Draft>,
    queue: VecDeque<Effect>,
}

/// What the lease's local deadline is counted from.
#[derive(Clone, Copy, Debug)]
pub struct LeaseClock {
    /// Signs, renewal and end.
    pub signs: Signs,
    /// A sign came since the last renewal was sent; without one it is not renewed.
    pub signed: bool,
    /// When the next renewal is due.
    pub next: BootNs,
}

impl LeaseClock {
    /// Fresh from an acquisition that was sent at `sent`.
    pub fn granted(sent: BootNs, ttl: Duration, ends: BootNs) -> Self {
        let signs = Signs { holder: clock::now(), sent, granted: ttl, ends };
        Self { signs, signed: false, next: renewal_due(sent, ttl) }
    }

    /// Rebuilt after an agent restart from the only thing that is known: the deadline.
    pub fn from_deadline(deadline: BootNs, ttl: Duration, ends: BootNs) -> Self {
        let sent = deadline.plus(lease::margin(ttl)).minus(ttl);
        let signs = Signs { holder: sent, sent, granted: ttl, ends };
        Self { signs, signed: false, next: clock::now() }
    }

    /// The local deadline and what sets it.
    pub fn deadline(&self, ttl: Duration) -> (BootNs, Bound) {
        lease::local_deadline(self.signs, ttl)
    }
}

/// When a lease is to be renewed that was granted or renewed at `sent`: after a third of its time,
/// and a little earlier, so that many leases share one commit.
pub fn renewal_due(sent: BootNs, ttl: Duration) -> BootNs {
    let due = sent.plus(ttl / 3);
    let grid = u64::try_from(ttl.as_nanos() / 60).unwrap_or(u64::MAX).max(1);
    BootNs(due.0 - due.0 % grid)
}

impl Inner {
    /// The local deadline and what sets it.
    pub fn deadline(&self) -> (BootNs, Bound) {
        self.lease.deadline(self.session.ttl)
    }

    /// Whether a power loss would lose nothing of it.
    fn is_durable(&self) -> bool {
        self.drafts.is_empty() && !self.recording && self.stored.as_ref() == Some(&self.session)
    }

    /// Whether all that was asked of the session's worker was tried.
    pub fn is_idle(&self) -> bool {
        !self.working && self.queue.is_empty()
    }

    /// What a step changes, to take it back if its record is not committed.
    pub fn checkpoint(&self) -> Before {
        let (session, stored) = (self.session.clone(), self.stored.clone());
        Before { session, stored, drafts: self.drafts.clone(), queue: self.queue.clone() }
    }

    /// Takes steps back.
    pub fn undo(&mut self, before: Before) {
        self.session = before.session;
        self.stored = before.stored;
        self.drafts = before.drafts;
        self.queue = before.queue;
    }

    /// Whether the caller is to be the worker now: there is something to do and nobody does it.
    fn claim_work(&mut self) -> bool {
        let idle = self.queue.is_empty() && self.drafts.is_empty();
        let same = self.stored.as_ref() == Some(&self.session);
        let claimed = !(self.working || self.building || (idle && same));
        self.working |= claimed;
        claimed
    }

    /// Whether something waits to be tried again: at this tick, or at a `patient` one. What its
    /// worker is at is not asked for a second time.
    pub fn pending(&self, patient: bool) -> bool {
        use crate::model::facts::Fact;
        let s = &self.session;
        if self.working {
            return false;
        }
        match s.state {
            State::Fencing | State::Deleting | State::Releasing => true,
            State::Fenced | State::Preserved => {
                let killed = s.facts.has(Fact::Killed);
                let stopped = killed || (s.is_stopped() && s.fence.to < Fact::Killed);
                let stands = s.may_run_on() && s.facts.has(Fact::Frozen);
                let sealed = s.fence.to != Fact::Sealed || s.facts.has(Fact::Sealed);
                let read_only = s.facts.has(Fact::ReadOnly) && s.fence.to != Fact::Gone;
                let proved = s.facts.has(Fact::Gone) || (stopped && read_only && sealed && !stands);
                (!proved && (patient || !stopped)) || !s.unknown.is_empty()
            }
            State::Active => s.thaws() || !s.unknown.is_empty(),
            State::Opening | State::Closed | State::Quarantined => false,
        }
    }
}

impl Slot {
    /// A slot for a record; `stored` says whether the record is durable as it is.
    pub fn new(session: Session, lease: LeaseClock, dirs: SessionDirs, stored: bool) -> Arc<Self> {
        Arc::new(Self {
            id: session.id,
            workspace: session.workspace.clone(),
            dirs,
            readers: Mutex::default(),
            inner: Mutex::new(Inner {
                stored: stored.then(|| session.clone()),
                session,
                lease,
                beats: None,
                cgroup: None,
                mounted: None,
                gate: None,
                gate_absent: None,
                refused: super::gate::Refused::default(),
                s_dev: None,
                building: false,
                answers: BTreeMap::new(),
                frozen_at: None,
                frozen_for: Duration::ZERO,
                gathered: None,
                capture_code: None,
                kept: Kept::default(),
                named: Named::default(),
                size: None,
                captured: None,
                drafts: Vec::new(),
                queue: VecDeque::new(),
                working: false,
                recording: false,
            }),
            changed: watch::Sender::new(0),
        })
    }

    /// The slot's lock. A panic of another thread while it was held leaves a record that was
    /// stepped or not stepped, both of which are whole.
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of the record.
    pub fn session(&self) -> Session {
        self.lock().session.clone()
    }

    /// Wakes at each change.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Waits until `done` says so and the record of it is durable, or the time is over; gives the
    /// record then.
    pub async fn wait_for(
        &self,
        limit: Duration,
        done: impl Fn(&Inner) -> bool,
    ) -> (Session, bool) {
        let mut changes = self.watch();
        let reached = async {
            loop {
                {
                    let inner = self.lock();
                    if done(&inner) && inner.is_durable() {
                        return;
                    }
                }
                // The sender lives as long as `self`.
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        let ok = tokio::time::timeout(limit, reached).await.is_ok();
        (self.session(), ok)
    }

    fn notify(&self) {
        self.changed.send_modify(|n| *n += 1);
    }
}

/// What an event led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// It was taken.
    Taken,
    /// It was a wish that is not allowed now.
    Refused(Code),
}

impl Host {
    /// Feeds an event to a session: step, freeze at once if that follows, queue the rest.
    pub fn apply(self: &Arc<Self>, slot: &Arc<Slot>, event: Event, actor: &str) -> Applied {
        let applied = self.apply_locked(&mut slot.lock(), event, actor);
        self.wake(slot);
        applied
    }

    /// Has a session's worker do what was queued, and tells those who wait.
    pub fn wake(self: &Arc<Self>, slot: &Arc<Slot>) {
        self.wake_worker(slot, &mut slot.lock());
        slot.notify();
    }

    /// [`Host::apply`] for a caller that holds the lock and wakes the worker itself.
    pub fn apply_locked(self: &Arc<Self>, inner: &mut Inner, event: Event, actor: &str) -> Applied {
        let began = inner.session.state;
        let mut events = VecDeque::from([event]);
        let mut applied = Applied::Taken;
        while let Some(event) = events.pop_front() {
            let (from, held) = (inner.session.state, inner.session.holds_lease());
            let done = step(&mut inner.session, &event);
            if let Some(code) = done.refused {
                applied = Applied::Refused(code);
            }
            if held && !inner.session.holds_lease() {
                // What was queued under the lease is not wanted any more.
                inner.queue.clear();
                self.deadlines.remove(inner.session.id);
            }
            if inner.session.state == State::Active {
                inner.size = None;
                inner.kept.forget();
                inner.named.forget();
            }
            self.note(inner, &event);
            for effect in &done.effects {
                match effect {
                    Effect::Freeze { purpose } => {
                        match self.freeze_now(inner, *purpose) {
                            Some(proof) => events.push_back(Event::Frozen { proof }),
                            None => inner.queue.push_back(effect.clone()),
                        }
                        self.leave_to_keeper(inner);
                    }
                    other => inner.queue.push_back(other.clone()),
                }
            }
            if held && !inner.session.holds_lease() {
                // After the freeze: who is stopped in time sees no refusal, and can run on once it is
                // readmitted. At a deadline the gate shuts by itself.
                self.gate_shut(inner);
                events.extend(self.gate_proved(inner));
            }
            if done.record {
                let detail = serde_json::json!({
                    "event": event, "from": from, "to": inner.session.state,
                    "effects": done.effects.iter().map(Effect::name).collect::<Vec<_>>(),
                    "refused": done.refused,
                });
                inner.drafts.push(draft("event", &inner.session, actor, detail));
            }
            self.metrics.event(&event, from, inner.session.state);
        }
        self.settle(&inner.session);
        self.breaker_sees(began, &inner.session);
        applied
    }

    /// From now on the keeper, too, holds a stopped session stopped: its lease may have had time left.
    /// Only once it bears the stamp of the fence, which says why it is stopped if the record is lost.
    fn leave_to_keeper(&self, inner: &Inner) {
        let s = &inner.session;
        let fenced = matches!(s.state, State::Fencing | State::Fenced | State::Preserved);
        if !fenced || inner.cgroup.is_none() {
            return;
        }
        if let Err(fault) = self.enter_deadline(s, clock::now()) {
            tracing::error!(OVERFENCE_SESSION = %s.id, OVERFENCE_WORKSPACE = %s.workspace, "the keeper's entry was not written: {fault}");
        }
    }

    /// Keeps what askers wait for.
    fn note(&self, inner: &mut Inner, event: &Event) {
        match event {
            Event::Published { key, outcome } => {
                inner.answers.insert(*key, outcome.clone());
            }
            Event::Frozen { proof } if inner.session.holds_lease() => {
                inner.frozen_at = Some(proof.at)
            }
            Event::Frozen { .. } => inner.kept.frozen(),
            Event::Thawed { proof } => {
                if let Some(since) = inner.frozen_at.take() {
                    inner.frozen_for = proof.at.since(since);
                }
            }
            _ => {}
        }
    }

    /// Stamps, writes the wish and asks for the proof for a moment. `None`: not proved yet, or
    /// the kernel could not be asked; the worker goes on.
    fn freeze_now(&self, inner: &mut Inner, purpose: Purpose) -> Option<Proof> {
        let cgroup = inner.cgroup.clone()?;
        failpoint::hit("effect.freeze.before");
        let stamp = Stamp { purpose, generation: inner.session.generation };
        let answer = match stamp_and_freeze(&cgroup, &stamp) {
            // Somebody removed it, and perhaps made another one in its place: that one is meant.
            Err(fault) => {
                tracing::error!(OVERFENCE_SESSION = %inner.session.id, OVERFENCE_WORKSPACE = %inner.session.workspace, "{}; opening it anew", text(fault));
                inner.cgroup = None;
                Cgroup::open(cgroup.path()).and_then(|found| match found {
                    Some(new) => {
                        let answer = stamp_and_freeze(&new, &stamp);
                        self.watch_cgroup(inner.session.id, &new);
                        inner.cgroup = Some(Arc::new(new));
                        answer
                    }
                    // The worker makes it again.
                    None => Ok(Outcome::Late(vec![])),
                })
            }
            answer => answer,
        };
        failpoint::hit("effect.freeze.after");
        match answer {
            // Who is outside of it is not frozen by it: the worker asks for them.
            Ok(Outcome::Proved(proof)) => inner.kept.together().then_some(proof),
            Ok(Outcome::Late(_)) => None,
            Err(fault) => {
                tracing::error!(OVERFENCE_SESSION = %inner.session.id, OVERFENCE_WORKSPACE = %inner.session.workspace, "{}", text(fault));
                None
            }
        }
    }
}

fn stamp_and_freeze(cgroup: &Cgroup, stamp: &Stamp) -> crate::kernel::Result<Outcome> {
    // A checkpoint's freeze never takes the place of one that only a new generation lifts.
    let kept = stamp.purpose == Purpose::Checkpoint
        && matches!(cgroup.read_stamp(), Ok(Some(s)) if s.generation == stamp.generation);
    // Without its stamp a freeze would be taken for a foreign one, but it is done anyhow: stopping
    // the writer comes first.
    if !kept && let Err(fault) = cgroup.stamp(stamp) {
        tracing::error!("{}", text(fault));
    }
    cgroup.freeze(INLINE_FREEZE)
}

/// An evidence entry about a session.
pub fn draft(kind: &str, s: &Session, actor: &str, detail: serde_json::Value) -> Draft {
    Draft {
        kind: kind.to_owned(),
        workspace: Some(s.workspace.clone()),
        session: Some(s.id),
        generation: Some(s.generation),
        actor: actor.to_owned(),
        detail,
    }
}

/// What is to be made durable, marked as stored.
pub fn take_journal(inner: &mut Inner) -> Option<Journal> {
    let changed = inner.stored.as_ref() != Some(&inner.session);
    if !changed && inner.drafts.is_empty() {
        return None;
    }
    inner.stored = Some(inner.session.clone());
    let sessions = if changed { vec![inner.session.clone()] } else { Vec::new() };
    Some(Journal { sessions, entries: std::mem::take(&mut inner.drafts) })
}

/// Whether the agent itself stands in for the holder now: it holds the session frozen for a
/// capture, or it is closing it.
pub fn agent_vouches(inner: &Inner, now: BootNs, max_freeze: Duration) -> bool {
    match (&inner.session.state, &inner.session.work) {
        (State::Active, Some(Work::Checkpoint { .. })) => {
            inner.frozen_at.is_some_and(|since| now.since(since) < max_freeze)
        }
        (State::Active, Some(Work::Resume)) | (State::Releasing, _) => true,
        (_, _) => false,
    }
}
