//! Losing the lease, and stopping the writer as far as policy goes.

use super::*;

/// The lease is lost. The freeze comes first, ahead of every record and of the authority.
pub(super) fn lose(s: &mut Session, loss: Loss, revoke: bool) -> Step {
    // Only a newer generation supersedes; a takeover that lost the race says nothing about this one.
    if let Loss::Superseded { generation, code: Code::StaleGeneration, .. } = &loss
        && *generation <= s.generation
    {
        return Step::quiet([]);
    }
    match s.state {
        State::Active | State::Releasing => {
            s.state = State::Fencing;
            abandon_work(s);
            s.doubt = None;
            let reason = loss.to_string();
            s.loss = Some(loss);
            let told = revoke.then_some(Effect::Revoke { reason });
            Step::go([FENCE].into_iter().chain(told).chain([Effect::Show]))
        }
        // Nobody can have written yet: roll the open back instead.
        State::Opening => {
            let told = revoke.then(|| Effect::Revoke { reason: loss.to_string() });
            s.loss = Some(loss);
            let mut step = begin_deleting(s, Disposition::NeverOpened);
            step.effects.extend(told);
            step
        }
        // Lost already; the first reason stays.
        State::Fencing
        | State::Fenced
        | State::Preserved
        | State::Deleting
        | State::Closed
        | State::Quarantined => Step::quiet([]),
    }
}

/// An operator's fence: how far it goes is part of the record, as everything that leads to a kill.
pub(super) fn on_fence_asked(
    s: &mut Session,
    wish: &FenceWish,
    by: &str,
    reason: &str,
    now: BootNs,
) -> Step {
    if matches!(s.state, State::Deleting | State::Closed | State::Quarantined) {
        return Step::refuse(Code::WrongState);
    }
    s.fence = wish.clone();
    if s.holds_lease() {
        let loss = Loss::Operator { by: by.to_owned(), reason: reason.to_owned() };
        return lose(s, loss, true);
    }
    // Tried again on a person's wish: an outside writer may have gone since.
    if s.upper_freeze == UpperFreeze::On
        && wish.to == Fact::ReadOnly
        && !s.facts.has(Fact::ReadOnly)
    {
        return Step::go([Effect::ReadOnly]);
    }
    // Fenced already; a stronger fact may be wanted now.
    Step { record: true, ..on_tick(s, now, false) }
}

pub(super) fn on_frozen(s: &mut Session, proof: &Proof) -> Step {
    match s.state {
        State::Active => match &mut s.work {
            Some(Work::Checkpoint { key, stage: stage @ Stage::Stopping, .. }) => {
                *stage = Stage::Capturing;
                Step::go([Effect::Capture { key: *key }])
            }
            // A freeze of ours that its owner no longer needs: a checkpoint was given up.
            Some(_) | None => Step::quiet([]),
        },
        // Asked again while it holds: when it was first proved stays.
        State::Fencing if s.facts.has(Fact::Frozen) => Step::quiet([]),
        State::Fencing => {
            s.facts.prove(Fact::Frozen, proof.clone());
            s.blockers.clear();
            if s.fence.to == Fact::Frozen {
                return Step::go(preserve(s));
            }
            Step::go([Effect::ReadOnly])
        }
        State::Fenced | State::Preserved if s.facts.has(Fact::Frozen) => Step::quiet([]),
        State::Fenced | State::Preserved => {
            s.facts.prove(Fact::Frozen, proof.clone());
            s.blockers.clear();
            if s.facts.has(Fact::ReadOnly) || s.fence.to == Fact::Frozen {
                Step::go(run_on(s))
            } else {
                Step::go([Effect::ReadOnly])
            }
        }
        State::Opening
        | State::Releasing
        | State::Deleting
        | State::Closed
        | State::Quarantined => Step::quiet([]),
    }
}

pub(super) fn on_freeze_late(s: &mut Session, blockers: &[Blocker]) -> Step {
    match s.state {
        State::Active => match s.work {
            Some(Work::Checkpoint { key, stage: Stage::Stopping, .. }) => {
                s.trouble = Some(format!("{GIVEN_UP}: the session did not freeze in time"));
                thaw_then(s, key, None)
            }
            Some(_) | None => Step::quiet([]),
        },
        State::Fencing | State::Fenced | State::Preserved => {
            let news = s.blockers != blockers;
            s.blockers = blockers.to_vec();
            // Some calls that never end, a kill ends: who asked for one does not wait for the freeze.
            let next = match s.policy.on_slow_freeze {
                // They may be those who wait for the upper that we stopped.
                _ if s.upper_freeze != UpperFreeze::Off => super::image::lift(s),
                OnSlowFreeze::Wait if s.fence.to < Fact::Killed => FENCE,
                OnSlowFreeze::Wait | OnSlowFreeze::Kill => Effect::Kill,
            };
            if news { Step::go([next]) } else { Step::quiet([next]) }
        }
        State::Opening
        | State::Releasing
        | State::Deleting
        | State::Closed
        | State::Quarantined => Step::quiet([]),
    }
}

pub(super) fn on_foreign_thaw(s: &mut Session) -> Step {
    match s.state {
        State::Active => match &mut s.work {
            Some(Work::Checkpoint { tainted, .. }) => {
                *tainted = true;
                Step::note()
            }
            Some(_) | None => Step::quiet([]),
        },
        State::Fencing | State::Fenced | State::Preserved => {
            s.facts.drop(Fact::Frozen);
            // Who writes into a stopped upper waits for it, and does not freeze meanwhile.
            let stopped = s.upper_freeze != UpperFreeze::Off;
            let lifted = stopped.then(|| super::image::lift(s));
            Step::go([FENCE].into_iter().chain(lifted))
        }
        State::Opening
        | State::Releasing
        | State::Deleting
        | State::Closed
        | State::Quarantined => Step::quiet([]),
    }
}

pub(super) fn on_read_only(s: &mut Session, proof: &Proof, empty: bool) -> Step {
    match s.state {
        State::Fencing | State::Fenced | State::Preserved => {
            s.facts.prove(Fact::ReadOnly, proof.clone());
            s.holders.clear();
            s.busy_since = None;
            settle(s)
        }
        State::Releasing => {
            s.facts.prove(Fact::ReadOnly, proof.clone());
            s.holders.clear();
            match &mut s.work {
                Some(Work::Close { mode, key, stage: stage @ Stage::Stopping }) => match mode {
                    CloseMode::Checkpoint => {
                        *stage = Stage::Capturing;
                        Step::go([Effect::Capture { key: *key }])
                    }
                    // Nothing was written, or nothing is left of it: nothing is to be kept. What
                    // an earlier checkpoint published stays published.
                    CloseMode::Keep => {
                        *stage = Stage::Ending;
                        let clean = empty && s.own_layer.is_none() && s.facts.has(Fact::Killed);
                        s.disposition = clean.then_some(Disposition::Clean);
                        Step::go([Effect::Release])
                    }
                    CloseMode::Discard => {
                        *stage = Stage::Ending;
                        Step::go([Effect::Release])
                    }
                },
                // Done again, the stage is past: it is never set back, what it offered would be
                // forgotten (I7).
                Some(Work::Close { .. } | Work::Checkpoint { .. } | Work::Resume) | None => {
                    Step::note()
                }
            }
        }
        State::Opening | State::Active | State::Deleting | State::Closed | State::Quarantined => {
            Step::quiet([])
        }
    }
}

pub(super) fn on_busy(s: &mut Session, proof: &Proof, holders: &[Holder]) -> Step {
    match s.state {
        State::Fencing | State::Fenced | State::Preserved => {
            // A second overlay is no writer of the session's: policy has nothing to seal or kill.
            let held = holders.is_empty() || !holders.iter().all(Holder::is_overlay);
            let news = (held && s.busy_since.is_none()) || s.holders != holders;
            let stood = s.is_stopped();
            s.holders = holders.to_vec();
            if held {
                s.busy_since.get_or_insert(proof.at);
            }
            not_read_only(s);
            let mut next = settle(s);
            super::image::freeze_after(s, &mut next);
            // A loop device came up under who runs on behind the gate, which does not see its writes.
            if stood && !s.is_stopped() && !s.is_past_running() {
                next.effects.insert(0, FENCE);
            }
            Step { record: next.record && news, ..next }
        }
        // All processes of the session ended, yet somebody outside holds it: it cannot be
        // captured as clean, so the bytes are kept.
        State::Releasing => {
            let Some(Work::Close { stage: stage @ Stage::Stopping, mode, .. }) = &mut s.work else {
                return Step::note();
            };
            *stage = Stage::Ending;
            if *mode != CloseMode::Discard {
                *mode = CloseMode::Keep;
            }
            s.holders = holders.to_vec();
            let stopped = holders.iter().find(|holder| holder.is_stopped_file_system());
            s.trouble = Some(match stopped {
                Some(stopped) => stopped.to_string(),
                None => "the overlay is held for writing from outside the session".to_owned(),
            });
            Step::go([Effect::Release])
        }
        State::Opening | State::Active | State::Deleting | State::Closed | State::Quarantined => {
            Step::quiet([])
        }
    }
}

/// After freeze and read-only gave their answers: is anything left for policy to do?
pub(super) fn settle(s: &mut Session) -> Step {
    let (killed, sealed) = (s.facts.has(Fact::Killed), s.facts.has(Fact::Sealed));
    // The close had published everything after the last process ended; only the lease was lost
    // before it could be given back.
    if s.disposition == Some(Disposition::Clean) && writerless(s) {
        return begin_deleting(s, Disposition::Clean);
    }
    if s.fence.to >= Fact::Killed && !killed {
        s.state = State::Fenced;
        return Step::go([Effect::Kill]);
    }
    if s.fence.to == Fact::Gone && !s.facts.has(Fact::Gone) {
        s.state = State::Fenced;
        return Step::go([Effect::ProveGone]);
    }
    // Only the first time: what did not work is tried again by the ticks.
    if s.fence.to == Fact::Sealed && !sealed && s.state == State::Fencing {
        s.state = State::Fenced;
        return Step::go([seal(s)]);
    }
    let pending = match s.on_busy() {
        OnBusy::Hold => false,
        // Who is preserved already stays so: a seal is no end of anything.
        OnBusy::Seal => !sealed && s.state != State::Preserved,
        OnBusy::Kill => !killed,
    };
    let wanted = s.fence.to == Fact::Sealed && !sealed && s.state == State::Fenced;
    let next = match wanted || (pending && s.busy_since.is_some()) {
        true => State::Fenced,
        false => State::Preserved,
    };
    let show = (s.state != next).then_some(Effect::Show);
    s.state = next;
    Step::go(show.into_iter().chain(run_on(s)))
}

/// The overlay of a lost session is writable. In FENCING read-only is tried by itself, once
/// `frozen` is proved.
pub(super) fn writable_again(s: &mut Session) -> Step {
    not_read_only(s);
    let retry = (s.state != State::Fencing).then_some(Effect::ReadOnly);
    Step::go([FENCE].into_iter().chain(retry))
}

pub(super) fn on_read_only_lost(s: &mut Session) -> Step {
    match s.state {
        State::Fencing | State::Fenced | State::Preserved => writable_again(s),
        // The close can no longer end clean; what it published stays published.
        State::Releasing => {
            not_read_only(s);
            Step::note()
        }
        // On the way out because it was clean, and it is clean no longer: its bytes are kept.
        State::Deleting
            if s.disposition == Some(Disposition::Clean) && !s.facts.has(Fact::Gone) =>
        {
            not_read_only(s);
            let reason = "the overlay was made writable while it was removed".to_owned();
            s.loss.get_or_insert(Loss::Closed { reason, offered: None });
            s.state = State::Preserved;
            Step::go([Effect::ReadOnly, Effect::Show])
        }
        State::Opening | State::Active | State::Deleting | State::Closed | State::Quarantined => {
            Step::quiet([])
        }
    }
}

/// Pending things are tried again; nothing here is worth a record until its answer comes.
pub(super) fn on_tick(s: &mut Session, now: BootNs, held: bool) -> Step {
    match s.state {
        // No kill from a freeze that is neither proved nor late.
        State::Fencing if s.fence.to >= Fact::Killed && s.facts.has(Fact::Frozen) && !held => {
            Step::go([Effect::Kill])
        }
        State::Fencing if s.facts.has(Fact::Frozen) => Step::quiet([Effect::ReadOnly]),
        State::Fencing => Step::quiet([FENCE]),
        State::Fenced | State::Preserved => {
            let killed = s.facts.has(Fact::Killed);
            if s.facts.has(Fact::Gone) {
                return Step::quiet(resolve_unknown(s));
            }
            let due = s.on_busy() == OnBusy::Kill
                && s.busy_since.is_some_and(|t| now.since(t) >= s.policy.kill_after);
            // Who runs on is frozen again before more is done.
            let runs_on = s.may_run_on() && !due && !s.wants_seal(now);
            if !killed && !s.facts.has(Fact::Frozen) && !runs_on {
                return Step::quiet([FENCE]);
            }
            if !killed && !held && (s.fence.to >= Fact::Killed || due) {
                return Step::go([Effect::Kill]);
            }
            if s.fence.to == Fact::Gone && killed {
                return Step::quiet(resolve_unknown(s).chain([Effect::ProveGone]));
            }
            // Not for a try that others would use to write: a person's wish lifts it, or policy.
            let wants_ro = s.fence.to != Fact::Frozen
                && !s.facts.has(Fact::ReadOnly)
                && s.upper_freeze == UpperFreeze::Off;
            let begun = s.seal;
            let sealing = s.wants_seal(now).then(|| seal(s));
            let record = sealing.is_some() && !begun;
            let again = super::image::freeze_again(s).filter(|_| sealing.is_none());
            let next = resolve_unknown(s).chain(sealing).chain(again);
            let last = wants_ro.then_some(Effect::ReadOnly);
            let step = Step::quiet(next.chain(last).chain(run_on(s).filter(|_| runs_on)));
            Step { record, ..step }
        }
        State::Deleting if held => Step::quiet([]),
        State::Deleting => Step::quiet(super::removal::next_removal(s)),
        State::Releasing => match s.work {
            // A failed stage of a close is done again.
            Some(Work::Close { .. }) if s.trouble.is_some() => {
                Step::quiet(super::lifecycle::resume_close(s))
            }
            Some(_) | None => Step::quiet([]),
        },
        State::Active => Step::quiet(resolve_unknown(s).chain(s.thaws().then_some(Effect::Thaw))),
        State::Opening | State::Closed | State::Quarantined => Step::quiet([]),
    }
}
