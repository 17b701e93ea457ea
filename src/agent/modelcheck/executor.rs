//! The executor's rules and the network: how an effect is done, what a start finds, what reaches
//! the authority and what comes back.

use super::moves::Outcome;
use super::world::{Host, Invariant, MARGIN, Shared, Wire, World, boot, layer, proof};
use super::{Bug, Model};
use crate::model::code::Code;
use crate::model::facts::{Fact, Holder};
use crate::model::ids::{Generation, PublicationKey};
use crate::model::lease::{Bound, LeaseState};
use crate::model::session::{Loss, Session, State};
use crate::model::step::{Effect, Event, Found, Published, Purpose};
use crate::model::workspace::{KeyState, Publish, Refusal};

impl Model {
    /// Does the first pending effect. The answer is fed in before the next effect starts.
    pub(super) fn perform(&self, w: &mut World, i: usize, outcome: Outcome) {
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
            // Making a session is one deed of the agent's `open`, no effect of a step; here it
            // stands in the queue as the first thing to show, so that a crash can come before.
            Effect::Show if s.state == State::Opening => {
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
                if *purpose == Purpose::Fence {
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
                Some(Event::ReadOnly { proof: proof(), empty: false })
            }
            Effect::ReadWrite => {
                w.hosts[i].kernel.read_only = false;
                Some(Event::Writable { proof: proof() })
            }
            Effect::Seal => {
                w.hosts[i].kernel.sealed = true;
                Some(Event::Sealed { proof: proof() })
            }
            Effect::Unseal => {
                let k = &mut w.hosts[i].kernel;
                (k.sealed, k.read_only) = (false, false);
                Some(Event::Unsealed { proof: proof() })
            }
            // No model has the policy for it.
            Effect::RunOn => Some(failed()),
            Effect::Kill => {
                w.hosts[i].kernel.alive = false;
                Some(Event::Killed { proof: proof() })
            }
            Effect::Releasing => {
                let marked = w.workspace.releasing(s.lease, s.generation, &w.instant());
                if let Ok((next, ())) = marked {
                    w.workspace = Shared::new(next);
                }
                None
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
                if self.scope.clones && s.state == State::Active && content > 0 {
                    w.hosts[i].gathered = Some((*key, content));
                    return Some(Event::Gathered { key: *key });
                }
                let layer = (content > 0).then(|| layer(i, content));
                Some(Event::Captured { key: *key, layer })
            }
            Effect::Pack { key, .. } => {
                let h = &mut w.hosts[i];
                let Some((_, gathered)) = h.gathered.take_if(|(of, _)| of == key) else {
                    return Some(failed());
                };
                h.wire.push(Wire::Packed { key: *key, layer: layer(i, gathered) });
                None
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
                    whole: None,
                    reverts_to: None,
                };
                w.hosts[i].open.insert(*key);
                w.hosts[i].wire.push(Wire::Publish { wish, orphan: false });
                None
            }
            Effect::Resolve { key, .. } => {
                let state = w.keys.entry(*key).or_insert(KeyState::Unused);
                if *state == KeyState::Unused || state.is_open() {
                    *state = KeyState::Buried;
                }
                let answer = match state.clone() {
                    _ if outcome == Outcome::AnswerLost => {
                        Published::Unknown { why: String::new() }
                    }
                    KeyState::Committed { at, .. } => Published::Committed { at },
                    KeyState::Rejected { code } => {
                        Published::Refused { refusal: Refusal { code, current: None } }
                    }
                    KeyState::Unused
                    | KeyState::Prepared
                    | KeyState::Sent
                    | KeyState::Unknown { .. }
                    | KeyState::Forgotten
                    | KeyState::Buried => {
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
            // The model's uppers are directories.
            Effect::FreezeUpper | Effect::ThawUpper | Effect::Show => None,
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
        // A writer that is let run finds its upper writable.
        let undone = (h.kernel.frozen && h.kernel.fenced >= generation) || h.kernel.sealed;
        h.kernel.wish = false;
        h.kernel.frozen = false;
        h.kernel.stamp = None;
        h.kernel.runs_under = generation;
        w.break_unless(!undone, Invariant::I3);
        Some(Event::Thawed { proof: proof() })
    }

    pub(super) fn restart(&self, w: &mut World, i: usize) -> Option<()> {
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

    pub(super) fn lose_by_deadline(&self, w: &mut World, i: usize) {
        let Some(s) = &w.hosts[i].live else { return };
        let (loss, revoke) = match &s.doubt {
            Some(cause) => (Loss::Doubt { cause: cause.clone() }, false),
            None => (Loss::Expired { bound: Bound::Grant }, true),
        };
        w.feed(i, Event::LeaseLost { loss, revoke }, self.bug);
    }

    /// A request reaches the authority.
    pub(super) fn arrive(&self, w: &mut World, i: usize, n: usize) {
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
                    Err(refusal) => {
                        if state == KeyState::Unused {
                            let rejected = KeyState::Rejected { code: refusal.code };
                            w.keys.insert(key, rejected);
                        }
                        Err(Refusal { current: None, ..refusal })
                    }
                };
                if !orphan {
                    w.hosts[i].wire.push(Wire::PublishAnswer { key, answer });
                }
            }
            answer @ (Wire::RenewAnswer { .. }
            | Wire::PublishAnswer { .. }
            | Wire::Packed { .. }) => {
                w.hosts[i].wire.insert(n, answer);
            }
        }
    }

    /// An answer reaches the agent.
    pub(super) fn deliver(&self, w: &mut World, i: usize, n: usize) {
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
                    let loss = Loss::Superseded { generation, owner: None, code, forced_by: None };
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
            Wire::Packed { key, layer } => {
                w.feed(i, Event::Captured { key, layer: Some(layer) }, self.bug);
            }
            Wire::Renew { .. } | Wire::Publish { .. } => {}
        }
    }

    /// A request or an answer is lost; a request may be lost on the way or after it was done.
    pub(super) fn lose(&self, w: &mut World, i: usize, n: usize) {
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
            // The disk was full.
            Wire::Packed { .. } => {
                let (what, why) = (Effect::PACK.to_owned(), String::new());
                w.feed(i, Event::Failed { what, why }, self.bug);
            }
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

/// A fence's stamp is not overwritten by a weaker one of the same generation.
pub(super) fn stamp(h: &mut Host, purpose: Purpose, generation: Generation) {
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

pub(super) fn crash(h: &mut Host) {
    h.up = false;
    h.live = None;
    h.effects.clear();
    h.notice = None;
    h.gathered = None;
    h.asks.retain(|ask| matches!(ask, super::begins::Ask::Wish(_)));
    h.wire.retain_mut(|wire| match wire {
        Wire::Renew { orphan, .. } | Wire::Publish { orphan, .. } => {
            *orphan = true;
            true
        }
        Wire::RenewAnswer { .. } | Wire::PublishAnswer { .. } | Wire::Packed { .. } => false,
    });
}
