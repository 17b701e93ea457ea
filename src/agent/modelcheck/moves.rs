//! What can happen next: people, the kernel, the keeper, time.

use super::executor::{crash, stamp};
use super::world::{Host, MARGIN, Wire, World};
use super::{Bug, Model};
use crate::model::ids::PublicationKey;
use crate::model::session::{CloseMode, Disposition, Loss, State};
use crate::model::step::{Effect, Event, Purpose};

/// How an effect turns out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// As wished.
    Done,
    /// The freeze is not complete yet.
    Slow,
    /// A writer holds a descriptor.
    Busy,
    /// The authority did it, the answer was lost.
    AnswerLost,
    /// Done, and the agent died before it heard.
    Crash,
}

/// One thing that happens; the number is the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Move {
    Clock,
    Keeper(usize),
    FreezeCompletes(usize),
    Write(usize),
    ForeignThaw(usize),
    ForeignRemount(usize),
    Notice(usize),
    Persist(usize),
    Perform(usize, Outcome),
    Crash(usize),
    Reboot(usize),
    Restart(usize),
    Deadline(usize),
    Renew(usize),
    Arrive(usize, usize),
    Deliver(usize, usize),
    Lose(usize, usize),
    Open(usize),
    OpenLost(usize),
    Readmit(usize),
    ReadmitLost(usize),
    Fence(usize),
    Discard(usize),
    Checkpoint(usize),
    Close(usize),
    Tick(usize),
    Begin(usize),
    Carry(usize, usize),
    Drop(usize, usize),
}

fn asks_authority(effect: &Effect) -> bool {
    matches!(
        effect,
        Effect::Revoke { .. } | Effect::Releasing | Effect::Release | Effect::Resolve { .. }
    )
}

fn keeper_acts(w: &World, h: &Host) -> bool {
    let k = &h.kernel;
    h.entry.is_some_and(|(_, deadline)| w.now >= deadline) && k.alive && !k.frozen
}

impl Model {
    /// Everything that can happen in `w`.
    pub fn moves(&self, w: &World, out: &mut Vec<Move>) {
        let h = &w.hosts[0];
        if !self.scope.fine && h.up && (!h.effects.is_empty() || h.saved != h.live) {
            self.effect_moves(w, 0, out);
            return;
        }
        // The keeper runs at each deadline: time does not pass it by, unless the machine pauses.
        let behind = w.hosts.iter().any(|h| keeper_acts(w, h));
        if w.now < self.scope.clock && (!behind || self.scope.paused) {
            out.push(Move::Clock);
        }
        for i in 0..w.hosts.len() {
            self.kernel_moves(w, i, out);
            self.agent_moves(w, i, out);
            self.people_moves(w, i, out);
        }
    }

    fn kernel_moves(&self, w: &World, i: usize, out: &mut Vec<Move>) {
        let (h, k, left) = (&w.hosts[i], &w.hosts[i].kernel, &w.left);
        if keeper_acts(w, h) {
            out.push(Move::Keeper(i));
        }
        if k.alive && k.wish && !k.frozen {
            out.push(Move::FreezeCompletes(i));
        }
        if k.can_write() && left.writes > 0 && i == 0 {
            out.push(Move::Write(i));
        }
        if left.foreign > 0 && k.mounted && h.up && h.notice.is_none() {
            if k.frozen && k.alive {
                out.push(Move::ForeignThaw(i));
            }
            if k.read_only {
                out.push(Move::ForeignRemount(i));
            }
        }
        for n in 0..h.asks.len() {
            out.push(Move::Carry(i, n));
            if left.lost > 0 {
                out.push(Move::Drop(i, n));
            }
        }
        for (n, wire) in h.wire.iter().enumerate() {
            match wire {
                Wire::Renew { .. } | Wire::Publish { .. } => {
                    out.push(Move::Arrive(i, n));
                    if left.lost > 0 && i == 0 {
                        out.push(Move::Lose(i, n));
                    }
                }
                Wire::RenewAnswer { .. } | Wire::PublishAnswer { .. } | Wire::Packed { .. } => {
                    out.push(Move::Deliver(i, n));
                    if left.lost > 0 && i == 0 {
                        out.push(Move::Lose(i, n));
                    }
                }
            }
        }
    }

    fn agent_moves(&self, w: &World, i: usize, out: &mut Vec<Move>) {
        let (h, left) = (&w.hosts[i], &w.left);
        if !h.up {
            out.push(Move::Restart(i));
            return;
        }
        let Some(s) = &h.live else { return };
        self.effect_moves(w, i, out);
        if s.holds_lease() {
            if w.now >= h.deadline {
                out.push(Move::Deadline(i));
            } else if left.renewals > 0 && s.state == State::Active {
                out.push(Move::Renew(i));
            }
        }
        if h.effects.is_empty() {
            out.push(Move::Tick(i));
        }
        if h.notice.is_some() {
            out.push(Move::Notice(i));
        }
    }

    /// What is pending for the session, and the crash that may come between any two effects.
    fn effect_moves(&self, w: &World, i: usize, out: &mut Vec<Move>) {
        let (h, left) = (&w.hosts[i], &w.left);
        if h.live.is_none() {
            return;
        }
        if left.crashes > 0 && i == 0 {
            out.push(Move::Crash(i));
        }
        if left.reboots > 0 && i == 0 {
            out.push(Move::Reboot(i));
        }
        let saved = h.saved == h.live;
        let front = h.effects.first();
        let blocked = front.is_some_and(Effect::irreversible)
            && !saved
            && self.bug != Some(Bug::EffectBeforeRecord);
        if !saved && front.is_none_or(Effect::irreversible) {
            out.push(Move::Persist(i));
        }
        if let Some(effect) = front
            && !blocked
        {
            out.push(Move::Perform(i, Outcome::Done));
            if left.crashes > 0 {
                out.push(Move::Perform(i, Outcome::Crash));
            }
            if left.lost > 0 && asks_authority(effect) {
                out.push(Move::Perform(i, Outcome::AnswerLost));
            }
            if left.slow > 0 && matches!(effect, Effect::Freeze { .. }) && h.kernel.alive {
                out.push(Move::Perform(i, Outcome::Slow));
            }
            if left.busy > 0 && *effect == Effect::ReadOnly && h.kernel.alive && !h.kernel.read_only
            {
                out.push(Move::Perform(i, Outcome::Busy));
            }
        }
    }

    fn people_moves(&self, w: &World, i: usize, out: &mut Vec<Move>) {
        let (h, left) = (&w.hosts[i], &w.left);
        if !h.up {
            return;
        }
        let Some(s) = &h.live else {
            if left.acquisitions > 0 {
                out.push(Move::Open(i));
                if left.lost > 0 && i == 0 {
                    out.push(Move::OpenLost(i));
                }
            }
            return;
        };
        if left.acquisitions > 0 && s.readmittable().is_ok() {
            out.push(Move::Readmit(i));
            if left.lost > 0 && i == 0 {
                out.push(Move::ReadmitLost(i));
            }
        }
        if s.state == State::Active && left.fences > 0 {
            out.push(Move::Fence(i));
        }
        if left.discards > 0 && matches!(s.state, State::Fenced | State::Preserved) {
            out.push(Move::Discard(i));
        }
        if left.begins[i] > 0 && s.may_start_work().is_ok() {
            out.push(Move::Begin(i));
        }
        if left.keys[i] > 0 && s.may_start_work().is_ok() && s.work.is_none() {
            out.push(Move::Checkpoint(i));
            out.push(Move::Close(i));
        }
    }

    /// The world after `m`, or `None` when `m` changes nothing.
    pub fn play(&self, before: &World, m: Move) -> Option<World> {
        let mut w = before.clone();
        match m {
            Move::Clock => {
                w.now += 1;
                let now = w.instant();
                if let Some(l) = &w.workspace.lease
                    && l.state.may_publish()
                    && l.expires.passed(&now)
                {
                    w.lapsed.insert(l.generation);
                }
            }
            Move::Keeper(i) => {
                let h = &mut w.hosts[i];
                let (generation, _) = h.entry?;
                stamp(h, Purpose::Deadline, generation);
                h.kernel.wish = true;
                h.kernel.frozen = true;
                h.kernel.meddled = false;
                h.kernel.fenced = h.kernel.fenced.max(generation);
            }
            Move::FreezeCompletes(i) => w.hosts[i].kernel.frozen = true,
            Move::Write(i) => {
                w.left.writes -= 1;
                w.hosts[i].kernel.content += 1;
            }
            Move::ForeignThaw(i) => {
                w.left.foreign -= 1;
                w.hosts[i].kernel.wish = false;
                w.hosts[i].kernel.frozen = false;
                w.hosts[i].kernel.meddled = true;
                w.hosts[i].notice = Some(Event::ForeignThaw { seen: String::new() });
            }
            Move::ForeignRemount(i) => {
                w.left.foreign -= 1;
                w.hosts[i].kernel.read_only = false;
                w.hosts[i].kernel.content += 1;
                w.hosts[i].notice = Some(Event::ReadOnlyLost { seen: String::new() });
            }
            Move::Notice(i) => {
                let event = w.hosts[i].notice.take()?;
                w.feed(i, event, self.bug);
            }
            Move::Persist(i) => w.persist(i),
            Move::Perform(i, outcome) => self.perform(&mut w, i, outcome),
            Move::Crash(i) => {
                w.left.crashes -= 1;
                crash(&mut w.hosts[i]);
            }
            Move::Reboot(i) => {
                w.left.reboots -= 1;
                let h = &mut w.hosts[i];
                crash(h);
                h.boot += 1;
                h.entry = None;
                let k = &mut h.kernel;
                (k.alive, k.mounted, k.frozen, k.wish, k.read_only) = Default::default();
            }
            Move::Restart(i) => self.restart(&mut w, i)?,
            Move::Deadline(i) => self.lose_by_deadline(&mut w, i),
            Move::Renew(i) => {
                w.left.renewals -= 1;
                let s = w.hosts[i].live.clone()?;
                let (lease, generation, sent) = (s.lease, s.generation, w.now);
                w.hosts[i].wire.push(Wire::Renew { lease, generation, sent, orphan: false });
            }
            Move::Arrive(i, n) => self.arrive(&mut w, i, n),
            Move::Deliver(i, n) => self.deliver(&mut w, i, n),
            Move::Lose(i, n) => self.lose(&mut w, i, n),
            Move::Open(i) => {
                w.left.acquisitions -= 1;
                let got = w.acquire(i, None, self.bug)?;
                w.admit(i, got);
            }
            Move::OpenLost(i) => {
                w.left.acquisitions -= 1;
                w.left.lost -= 1;
                w.acquire(i, None, self.bug)?;
            }
            Move::Readmit(i) => {
                w.left.acquisitions -= 1;
                let at = w.hosts[i].live.as_ref()?.expected.clone();
                let got = w.acquire(i, Some(at), self.bug)?;
                w.hosts[i].deadline = w.now + w.ttl - MARGIN;
                let event = Event::Readmitted {
                    lease: got.lease.id,
                    generation: got.lease.generation,
                    ends: got.lease.ends.ns,
                    authorised_by: String::new(),
                    reason: String::new(),
                };
                w.feed(i, event, self.bug);
            }
            Move::ReadmitLost(i) => {
                w.left.acquisitions -= 1;
                w.left.lost -= 1;
                let at = w.hosts[i].live.as_ref()?.expected.clone();
                w.acquire(i, Some(at), self.bug)?;
            }
            Move::Fence(i) => {
                w.left.fences -= 1;
                let loss = Loss::Operator { by: String::new(), reason: String::new() };
                w.feed(i, Event::LeaseLost { loss, revoke: true }, self.bug);
            }
            Move::Discard(i) => {
                w.left.discards -= 1;
                let disposition = Disposition::Discard { who: String::new() };
                w.feed(i, Event::Disposed { disposition }, self.bug);
            }
            Move::Checkpoint(i) => {
                let key = key(&mut w, i);
                w.feed(i, Event::CheckpointAsked { key, live: false }, self.bug);
            }
            Move::Close(i) => {
                let key = key(&mut w, i);
                let h = &mut w.hosts[i];
                if self.bug == Some(Bug::CleanFromLiveCapture) {
                    h.early = Some(h.kernel.content);
                }
                w.feed(i, Event::CloseAsked { mode: CloseMode::Checkpoint, key }, self.bug);
            }
            Move::Begin(i) => self.begin(&mut w, i),
            Move::Carry(i, n) => self.carry(&mut w, i, n),
            Move::Drop(i, n) => {
                w.left.lost -= 1;
                w.hosts[i].asks.remove(n);
            }
            Move::Tick(i) => {
                w.feed(
                    i,
                    Event::Tick { now: crate::model::time::BootNs(0), held: false },
                    self.bug,
                );
            }
        }
        // Host 1 does what its events ask for at once: its effects touch nothing of host 0, only
        // its requests do, and those stay apart.
        while w.hosts[1].up && !w.hosts[1].effects.is_empty() {
            w.persist(1);
            self.perform(&mut w, 1, Outcome::Done);
        }
        w.persist(1);
        (w != *before).then_some(w)
    }
}

fn key(w: &mut World, i: usize) -> PublicationKey {
    w.left.keys[i] -= 1;
    PublicationKey::from_u128(10 * i as u128 + u128::from(w.left.keys[i]))
}
