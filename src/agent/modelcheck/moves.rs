//! What can happen next: the executor's rules, the keeper, the kernel, the network and people.

use super::world::{Host, Invariant, MARGIN, Shared, Wire, World, boot, layer, proof};
use super::{Bug, Model};
use crate::model::code::Code;
use crate::model::facts::{Fact, Holder};
use crate::model::ids::{Generation, PublicationKey};
use crate::model::lease::{Bound, LeaseState};
use crate::model::session::{CloseMode, Disposition, Loss, Session, State};
use crate::model::step::{Effect, Event, Found, Published, Purpose};
use crate::model::workspace::{KeyState, Publish, Refusal};

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
}

const FENCE: Effect = Effect::Freeze { purpose: Purpose::Fence };

fn asks_authority(effect: &Effect) -> bool {
    matches!(effect, Effect::Revoke { .. } | Effect::Release | Effect::Resolve { .. })
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
        for (n, wire) in h.wire.iter().enumerate() {
            match wire {
                Wire::Renew { .. } | Wire::Publish { .. } => {
                    out.push(Move::Arrive(i, n));
                    if left.lost > 0 && i == 0 {
                        out.push(Move::Lose(i, n));
                    }
                }
                Wire::RenewAnswer { .. } | Wire::PublishAnswer { .. } => {
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
                w.feed(i, Event::CheckpointAsked { key }, self.bug);
            }
            Move::Close(i) => {
                let key = key(&mut w, i);
                let h = &mut w.hosts[i];
                if self.bug == Some(Bug::CleanFromLiveCapture) {
                    h.early = Some(h.kernel.content);
                }
                w.feed(i, Event::CloseAsked { mode: CloseMode::Checkpoint, key }, self.bug);
            }
            Move::Tick(i) => {
                w.feed(i, Event::Tick { now: crate::model::time::BootNs(0) }, self.bug);
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

    /// Does the first pending effect. The answer is fed in before the next effect starts.
    fn perform(&self, w: &mut World, i: usize, outcome: Outcome) {
        let effect = w.hosts[i].effects.remove(0);
        let Some(s) = w.hosts[i].live.clone() else { return };
        match outcome {
            Outcome::Crash => w.left.crashes -= 1,
            Outcome::AnswerLost => w.left.lost -= 1,
            Outcome::Slow => w.left.slow -= 1,
            Outcome::Busy => w.left.busy -= 1,
            Outcome::Done => {}
        }
        let answer = self.effect(w, i, &s, &effect, outcome);
        match (outcome, answer) {
            (Outcome::Crash, _) => crash(&mut w.hosts[i]),
            (Outcome::AnswerLost, _) if !matches!(effect, Effect::Resolve { .. }) => {
                let (what, why) = (effect.name().to_owned(), String::new());
                w.feed(i, Event::Failed { what, why }, self.bug);
            }
            (_, Some(event)) => w.feed(i, event, self.bug),
            (_, None) => {}
        }
    }

    fn effect(
        &self,
        w: &mut World,
        i: usize,
        s: &Session,
        effect: &Effect,
        outcome: Outcome,
    ) -> Option<Event> {
        let failed = || Event::Failed { what: effect.name().to_owned(), why: String::new() };
        match effect {
            Effect::Build => {
                w.build(i);
                Some(Event::Opened)
            }
            Effect::Freeze { purpose } => {
                let h = &mut w.hosts[i];
                if !h.kernel.mounted {
                    return Some(Event::Frozen { proof: proof() });
                }
                stamp(h, *purpose, s.generation);
                h.kernel.wish = true;
                if *effect == FENCE {
                    h.kernel.fenced = h.kernel.fenced.max(s.generation);
                }
                if outcome == Outcome::Slow {
                    if self.bug == Some(Bug::FactBeforeKernel) {
                        return Some(Event::Frozen { proof: proof() });
                    }
                    return Some(Event::FreezeLate { blockers: Vec::new() });
                }
                h.kernel.frozen = true;
                h.kernel.meddled = false;
                Some(Event::Frozen { proof: proof() })
            }
            Effect::Thaw => self.thaw(w, i, s.generation).or_else(|| Some(failed())),
            Effect::ReadOnly => {
                let k = &mut w.hosts[i].kernel;
                if !k.mounted {
                    return Some(failed());
                }
                if outcome == Outcome::Busy {
                    let holders: Vec<Holder> = Vec::new();
                    return Some(Event::Busy { proof: proof(), holders });
                }
                k.read_only = true;
                Some(Event::ReadOnly { proof: proof() })
            }
            Effect::ReadWrite => {
                w.hosts[i].kernel.read_only = false;
                Some(Event::Writable { proof: proof() })
            }
            Effect::Kill => {
                w.hosts[i].kernel.alive = false;
                Some(Event::Killed { proof: proof() })
            }
            Effect::Revoke { .. } | Effect::Release => {
                let state = match effect {
                    Effect::Release => LeaseState::Released,
                    _ => LeaseState::Revoked,
                };
                let ended = w.workspace.end(s.lease, s.generation, state, "");
                if let Ok((next, ())) = ended {
                    w.workspace = Shared::new(next);
                }
                // A stale lease needs no giving back.
                Some(Event::Released)
            }
            Effect::Capture { key } => {
                let h = &w.hosts[i];
                let content = h.early.unwrap_or(h.kernel.content);
                let layer = (content > 0).then(|| layer(i, content));
                Some(Event::Captured { key: *key, layer })
            }
            Effect::Publish { key, layer } => {
                let wish = Publish {
                    workspace: s.workspace.clone(),
                    lease: s.lease,
                    generation: s.generation,
                    session: s.id,
                    expected: s.expected.clone(),
                    key: *key,
                    layer: *layer,
                };
                w.hosts[i].open.insert(*key);
                w.hosts[i].wire.push(Wire::Publish { wish, orphan: false });
                None
            }
            Effect::Resolve { key, .. } => {
                let state = w.keys.entry(*key).or_insert(KeyState::Unused);
                if *state == KeyState::Unused {
                    *state = KeyState::Buried;
                }
                let answer = match state.clone() {
                    _ if outcome == Outcome::AnswerLost => {
                        Published::Unknown { why: String::new() }
                    }
                    KeyState::Committed { at, .. } => Published::Committed { at },
                    KeyState::Unused | KeyState::Buried => {
                        let refusal = Refusal { code: Code::KeyBuried, current: None };
                        Published::Refused { refusal }
                    }
                };
                Some(Event::Published { key: *key, outcome: answer })
            }
            Effect::ProveGone => {
                let k = &mut w.hosts[i].kernel;
                if k.alive {
                    return Some(failed());
                }
                k.mounted = false;
                Some(Event::Gone { proof: proof() })
            }
            Effect::Remove => {
                let unmounted = !w.hosts[i].kernel.mounted;
                w.break_unless(unmounted, Invariant::I6);
                let allowed = w.may_remove(i);
                w.break_unless(allowed, Invariant::I4);
                w.hosts[i].kernel.directory = false;
                w.hosts[i].entry = None;
                Some(Event::Removed { bytes: 0, entries: 0 })
            }
            Effect::Show => None,
        }
    }

    /// A thaw asks the stamp and the deadline; what speaks against it keeps the freeze.
    fn thaw(&self, w: &mut World, i: usize, generation: Generation) -> Option<Event> {
        let h = &mut w.hosts[i];
        let ours = match h.kernel.stamp {
            None => true,
            Some((Purpose::Checkpoint, g)) => g <= generation,
            Some((Purpose::Fence | Purpose::Deadline, g)) => g < generation,
        };
        let blind = self.bug == Some(Bug::ThawWithoutStamp);
        if !blind && (!ours || w.now >= h.deadline) {
            return None;
        }
        h.entry = Some((generation, h.deadline));
        let undone = h.kernel.frozen && h.kernel.fenced >= generation;
        h.kernel.wish = false;
        h.kernel.frozen = false;
        h.kernel.stamp = None;
        h.kernel.runs_under = generation;
        w.break_unless(!undone, Invariant::I3);
        Some(Event::Thawed { proof: proof() })
    }

    fn restart(&self, w: &mut World, i: usize) -> Option<()> {
        let now = w.now;
        let instant = w.instant();
        let h = &mut w.hosts[i];
        h.up = true;
        h.live = h.saved.clone();
        let s = h.live.clone()?;
        // The agent's memory of the deadline is the keeper's entry.
        let entry = h.entry.filter(|(g, _)| *g == s.generation);
        h.deadline = entry.map_or(0, |(_, d)| d);
        let agrees = w
            .workspace
            .live_lease(&instant)
            .is_some_and(|l| l.id == s.lease && l.generation == s.generation);
        let lease_good = entry.is_some_and(|(_, d)| now < d) && agrees;
        // What changed while nobody watched is observed before anything is decided.
        let k = &w.hosts[i].kernel;
        let same_boot = s.boot == boot(w.hosts[i].boot);
        let thawed = same_boot && s.facts.has(Fact::Frozen) && k.alive && !k.frozen;
        let writable = same_boot && s.facts.has(Fact::ReadOnly) && k.mounted && !k.read_only;
        if thawed {
            w.feed(i, Event::ForeignThaw { seen: String::new() }, self.bug);
        }
        if writable {
            w.feed(i, Event::ReadOnlyLost { seen: String::new() }, self.bug);
        }
        let fence_stamped = same_boot
            && w.hosts[i]
                .kernel
                .stamp
                .is_some_and(|(p, g)| p == Purpose::Fence && g == s.generation);
        let found = Found { boot: boot(w.hosts[i].boot), lease_good, fence_stamped };
        w.feed(i, Event::Recovered(found), self.bug);
        Some(())
    }

    fn lose_by_deadline(&self, w: &mut World, i: usize) {
        let Some(s) = &w.hosts[i].live else { return };
        let (loss, revoke) = match &s.doubt {
            Some(cause) => (Loss::Doubt { cause: cause.clone() }, false),
            None => (Loss::Expired { bound: Bound::Grant }, true),
        };
        w.feed(i, Event::LeaseLost { loss, revoke }, self.bug);
    }

    /// A request reaches the authority.
    fn arrive(&self, w: &mut World, i: usize, n: usize) {
        let now = w.instant();
        match w.hosts[i].wire.remove(n) {
            Wire::Renew { lease, generation, sent, orphan } => {
                let mut asked = (*w.workspace).clone();
                if self.bug == Some(Bug::RenewRevives)
                    && let Some(l) = &mut asked.lease
                {
                    l.expires.ns = now.ns.plus(std::time::Duration::from_nanos(1));
                }
                let granted = match asked.renew(lease, generation, &now) {
                    Ok((next, _)) => {
                        w.workspace = Shared::new(next);
                        true
                    }
                    Err(_) => false,
                };
                if !orphan {
                    w.hosts[i].wire.push(Wire::RenewAnswer { sent, granted });
                }
            }
            Wire::Publish { wish, orphan } => {
                let key = wish.key;
                let state = w.keys.get(&key).cloned().unwrap_or(KeyState::Unused);
                let mut asked = wish.clone();
                if self.bug == Some(Bug::GenerationNotCompared)
                    && let Some(l) = &w.workspace.lease
                {
                    asked.generation = w.workspace.generation;
                    (asked.lease, asked.session) = (l.id, l.session);
                }
                let answer = match w.workspace.publish(&asked, &state, &now) {
                    Ok((next, at)) => {
                        let moved = next.at != w.workspace.at;
                        let right = may_commit(w, &wish, &state);
                        w.break_unless(!moved || right, Invariant::I1);
                        let made = KeyState::Committed { layer: wish.layer, at: at.clone() };
                        w.keys.insert(key, made);
                        w.workspace = Shared::new(next);
                        Ok(at)
                    }
                    Err(refusal) => Err(Refusal { current: None, ..refusal }),
                };
                if !orphan {
                    w.hosts[i].wire.push(Wire::PublishAnswer { key, answer });
                }
            }
            answer @ (Wire::RenewAnswer { .. } | Wire::PublishAnswer { .. }) => {
                w.hosts[i].wire.insert(n, answer);
            }
        }
    }

    /// An answer reaches the agent.
    fn deliver(&self, w: &mut World, i: usize, n: usize) {
        match w.hosts[i].wire.remove(n) {
            Wire::RenewAnswer { sent, granted } => {
                let (now, ttl) = (w.now, w.ttl);
                let h = &mut w.hosts[i];
                let Some(s) = &h.live else { return };
                if !s.holds_lease() {
                    return;
                }
                if !granted {
                    let (generation, code) = (Generation::NONE, Code::StaleGeneration);
                    let loss = Loss::Superseded { generation, owner: None, code };
                    w.feed(i, Event::LeaseLost { loss, revoke: false }, self.bug);
                } else if now >= h.deadline {
                    // Too late: what the deadline ended is not revived by an answer.
                    self.lose_by_deadline(w, i);
                } else {
                    let late = self.bug == Some(Bug::DeadlineFromAnswer);
                    let from = if late { now } else { sent };
                    h.deadline = h.deadline.max(from + ttl - MARGIN);
                    h.entry = Some((s.generation, h.deadline));
                    w.feed(i, Event::Renewed, self.bug);
                }
            }
            Wire::PublishAnswer { key, answer } => {
                let outcome = match answer {
                    Ok(at) => Published::Committed { at },
                    Err(refusal) => Published::Refused { refusal },
                };
                w.feed(i, Event::Published { key, outcome }, self.bug);
            }
            Wire::Renew { .. } | Wire::Publish { .. } => {}
        }
    }

    /// A request or an answer is lost; a request may be lost on the way or after it was done.
    fn lose(&self, w: &mut World, i: usize, n: usize) {
        w.left.lost -= 1;
        match w.hosts[i].wire.remove(n) {
            Wire::Renew { orphan: false, .. } | Wire::RenewAnswer { .. } => {
                let cause = String::new();
                w.feed(i, Event::RenewalMissed { cause }, self.bug);
            }
            // The agent gave up waiting; the request itself may still arrive.
            Wire::Publish { wish, orphan: false } => {
                let key = wish.key;
                w.hosts[i].wire.push(Wire::Publish { wish, orphan: true });
                self.no_answer(w, i, key);
            }
            Wire::PublishAnswer { key, .. } => self.no_answer(w, i, key),
            Wire::Renew { orphan: true, .. } | Wire::Publish { orphan: true, .. } => {}
        }
    }

    fn no_answer(&self, w: &mut World, i: usize, key: PublicationKey) {
        let outcome = if self.bug == Some(Bug::UnknownIsFailed) {
            let refusal = Refusal { code: Code::AuthorityUnavailable, current: None };
            Published::Refused { refusal }
        } else {
            Published::Unknown { why: String::new() }
        };
        w.feed(i, Event::Published { key, outcome }, self.bug);
    }
}

fn key(w: &mut World, i: usize) -> PublicationKey {
    w.left.keys[i] -= 1;
    PublicationKey::from_u128(10 * i as u128 + u128::from(w.left.keys[i]))
}

/// A fence's stamp is not overwritten by a weaker one of the same generation.
fn stamp(h: &mut Host, purpose: Purpose, generation: Generation) {
    let keep = matches!(h.kernel.stamp, Some((p, g))
        if g >= generation && p != Purpose::Checkpoint && purpose != Purpose::Fence);
    if !keep {
        h.kernel.stamp = Some((purpose, generation));
    }
}

/// The publication predicate, written down a second time and apart from the product.
fn may_commit(w: &World, wish: &Publish, key: &KeyState) -> bool {
    let now = w.instant();
    let Some(lease) = &w.workspace.lease else { return false };
    *key == KeyState::Unused
        && lease.id == wish.lease
        && lease.generation == wish.generation
        && w.workspace.generation == wish.generation
        && matches!(lease.state, LeaseState::Active | LeaseState::Releasing)
        && now.ns < lease.expires.ns
        && !w.lapsed.contains(&wish.generation)
        && lease.session == wish.session
        && wish.expected == w.workspace.at
        && w.workspace.hold.is_none()
}

fn crash(h: &mut Host) {
    h.up = false;
    h.live = None;
    h.effects.clear();
    h.notice = None;
    h.wire.retain_mut(|wire| match wire {
        Wire::Renew { orphan, .. } | Wire::Publish { orphan, .. } => {
            *orphan = true;
            true
        }
        Wire::RenewAnswer { .. } | Wire::PublishAnswer { .. } => false,
    });
}
