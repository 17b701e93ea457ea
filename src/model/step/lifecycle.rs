//! Opening, doubt, failures, and what an agent start does with what it finds.

use super::removal::next_removal;
use super::*;
use crate::model::session::UNKNOWN;

pub(super) fn on_opened(s: &mut Session) -> Step {
    match s.state {
        State::Opening => {
            s.state = State::Active;
            // What the workload is shown was written before it was mounted for it.
            Step::note()
        }
        State::Active
        | State::Releasing
        | State::Fencing
        | State::Fenced
        | State::Preserved
        | State::Deleting
        | State::Closed
        | State::Quarantined => Step::quiet([]),
    }
}

pub(super) fn on_open_failed(s: &mut Session, why: &str) -> Step {
    match s.state {
        State::Opening => {
            let mut step = begin_deleting(s, Disposition::NeverOpened);
            s.trouble = Some(why.to_owned());
            step.effects.insert(0, Effect::Release);
            step
        }
        State::Active
        | State::Releasing
        | State::Fencing
        | State::Fenced
        | State::Preserved
        | State::Deleting
        | State::Closed
        | State::Quarantined => Step::quiet([]),
    }
}

pub(super) fn on_renewal_missed(s: &mut Session, cause: &str) -> Step {
    match s.state {
        State::Active | State::Releasing => {
            let first = s.doubt.is_none();
            s.doubt = Some(cause.to_owned());
            if first { Step::go([Effect::Show]) } else { Step::quiet([]) }
        }
        State::Opening
        | State::Fencing
        | State::Fenced
        | State::Preserved
        | State::Deleting
        | State::Closed
        | State::Quarantined => Step::quiet([]),
    }
}

/// An effect gave no result. It is tried again at the next tick; a removal not for ever.
pub(super) fn on_failed(s: &mut Session, what: &str, why: &str) -> Step {
    let text = format!("{what}: {why}");
    let news = s.trouble.as_deref() != Some(text.as_str());
    s.trouble = Some(text);
    // A key that cannot be resolved yet says nothing of what is under way beside it.
    if what == Effect::RESOLVE {
        return Step { record: news, ..Step::default() };
    }
    match s.state {
        State::Deleting => {
            // Waiting for the kernel, for somebody's copy of the mount to go, or for whoever reads the
            // upper, is no failure of ours.
            let waits = [Effect::ProveGone.name(), Effect::Kill.name(), Effect::READERS];
            if !waits.contains(&what) {
                s.tries += 1;
            }
            if s.tries >= MAX_TRIES {
                s.state = State::Quarantined;
                return Step::note();
            }
        }
        State::Active => match s.work {
            // The session runs already, and its bytes stay with it.
            Some(Work::Checkpoint { stage: Stage::Packing, .. }) if what == Effect::PACK => {
                s.work = None;
                return Step::note();
            }
            // A thaw is tried again; a layer that is made or offered ends only by its own answer.
            Some(Work::Checkpoint {
                stage:
                    Stage::Gathered | Stage::Thawing { .. } | Stage::Packing | Stage::Publishing { .. },
                ..
            }) => {}
            Some(Work::Checkpoint { key, .. }) => return thaw_then(s, key, None),
            Some(Work::Resume) => {
                let reason = s.trouble.clone().unwrap_or_default();
                return lose(s, Loss::ReadmitFailed { reason }, true);
            }
            Some(Work::Close { .. }) | None => {}
        },
        // It stands frozen, and the kernel will not make it read-only: as far as it goes.
        State::Fencing if what == Effect::ReadOnly.name() && s.facts.has(Fact::Frozen) => {
            return super::fence::settle(s);
        }
        // It goes: the next refusal of read-only stops it again.
        State::Fenced | State::Preserved if what == Effect::FreezeUpper.name() => {
            s.facts.drop(Fact::UpperFrozen);
            if s.upper_freeze == UpperFreeze::On {
                s.upper_freeze = UpperFreeze::Off;
            }
        }
        // It keeps what it has, its bytes are kept, and the ticks go on trying.
        State::Fenced if what == Effect::Seal.name() => {
            s.state = State::Preserved;
            return Step::go([Effect::Show]);
        }
        State::Opening
        | State::Releasing
        | State::Fencing
        | State::Fenced
        | State::Preserved
        | State::Closed
        | State::Quarantined => {}
    }
    Step { record: news, ..Step::default() }
}

/// The breaker keeps an effect from being done. That is no failure, and no try of it.
pub(super) fn on_held(s: &mut Session, what: &str) -> Step {
    let text = format!("{what}: the breaker is open, nothing is killed or removed");
    let news = s.trouble.as_deref() != Some(text.as_str());
    s.trouble = Some(text);
    Step { record: news, ..Step::default() }
}

/// What a restarted agent does: pending effects are done again, a lease that does not hold is a
/// lost lease, and a reboot ended every process and mount there was.
pub(super) fn recover(s: &mut Session, found: &Found) -> Step {
    if found.boot != s.boot {
        return after_reboot(s, found);
    }
    match s.state {
        State::Opening => on_open_failed(s, "the agent stopped while the session was opening"),
        // A fence began and the agent died ahead of its record. Its reason is lost, so it is a
        // person's until a person says otherwise: no policy undoes it.
        State::Active | State::Releasing if found.fence_stamped => {
            let (by, reason) = (UNKNOWN.to_owned(), "the cgroup's stamp says so".to_owned());
            lose(s, Loss::Operator { by, reason }, true)
        }
        State::Active | State::Releasing if !found.lease_good => {
            lose(s, Loss::Doubt { cause: "the agent was away past the deadline".to_owned() }, false)
        }
        State::Active => match s.work.clone() {
            Some(Work::Checkpoint { key, stage: Stage::Publishing { layer }, .. }) => {
                Step::go([Effect::Resolve { key, layer }])
            }
            Some(Work::Checkpoint { key, stage, .. }) => {
                s.trouble = Some(format!("{GIVEN_UP}: the agent started again"));
                let mut step = thaw_then(s, key, None);
                if let Stage::Thawing { layer: Some(layer) } = stage {
                    // It was prepared; nobody waits for it any more.
                    s.unknown.insert(key, layer);
                    step.effects.push(Effect::Resolve { key, layer });
                }
                step
            }
            Some(Work::Resume) => Step::go([super::hold::make_writable(s)]),
            // Thawing is a question to the stamp: a running session is left as it is.
            Some(Work::Close { .. }) | None => Step::quiet([Effect::Thaw, Effect::Show]),
        },
        State::Releasing => Step::go(resume_close(s)),
        State::Fencing => Step::go([FENCE].into_iter().chain(still_to_tell(s))),
        State::Fenced | State::Preserved => {
            let freeze = (!s.facts.has(Fact::Killed)).then_some(FENCE);
            let upper = super::image::freeze_again(s);
            Step::go(freeze.into_iter().chain(still_to_tell(s)).chain(upper))
        }
        State::Deleting => Step::go(next_removal(s)),
        State::Closed | State::Quarantined => Step::quiet([]),
    }
}

/// The authority may not have heard that the lease is over; being told twice changes nothing.
fn still_to_tell(s: &Session) -> Option<Effect> {
    match &s.loss {
        Some(
            loss @ (Loss::Expired { .. }
            | Loss::Operator { .. }
            | Loss::Reboot
            | Loss::ReadmitFailed { .. }),
        ) => Some(Effect::Revoke { reason: loss.to_string() }),
        Some(
            Loss::Doubt { .. }
            | Loss::Revoked { .. }
            | Loss::Superseded { .. }
            | Loss::Closed { .. },
        )
        | None => None,
    }
}

/// The stage of a close that is to be done again.
pub(super) fn resume_close(s: &Session) -> Option<Effect> {
    match &s.work {
        Some(Work::Close { stage: Stage::Stopping, .. }) if s.facts.has(Fact::Killed) => {
            Some(Effect::ReadOnly)
        }
        Some(Work::Close { stage: Stage::Stopping, .. }) => Some(Effect::Kill),
        Some(Work::Close { key, stage: Stage::Capturing, .. }) => {
            Some(Effect::Capture { key: *key })
        }
        Some(Work::Close { key, stage: Stage::Publishing { layer }, .. }) => {
            Some(Effect::Resolve { key: *key, layer: *layer })
        }
        Some(Work::Close { stage: Stage::Ending, .. }) => Some(Effect::Release),
        // A close never thaws.
        Some(
            Work::Close { stage: Stage::Gathered | Stage::Thawing { .. } | Stage::Packing, .. }
            | Work::Checkpoint { .. }
            | Work::Resume,
        )
        | None => None,
    }
}

/// No process and no mount survives a reboot: that is the strongest proof there is.
fn after_reboot(s: &mut Session, found: &Found) -> Step {
    let proof = Proof {
        asked: "boot id".to_owned(),
        answer: format!("{} (the session's was {})", found.boot, s.boot),
        at: BootNs(0),
        took_us: 0,
    };
    let gone = |s: &mut Session| {
        // Flags on a disk outlive a boot; whether they are there still is looked at beside this.
        s.facts.0.retain(|fact, _| *fact == Fact::Sealed);
        s.upper_freeze = UpperFreeze::Off;
        for fact in [Fact::Frozen, Fact::ReadOnly, Fact::Killed, Fact::Gone] {
            s.facts.prove(fact, proof.clone());
        }
    };
    match s.state {
        State::Opening => {
            gone(s);
            on_open_failed(s, "the host started again while the session was opening")
        }
        State::Active | State::Releasing => {
            let reason = Loss::Reboot.to_string();
            gone(s);
            s.loss = Some(Loss::Reboot);
            s.doubt = None;
            s.state = State::Preserved;
            abandon_work(s);
            let pending: Vec<_> = resolve_unknown(s).collect();
            Step::go(pending.into_iter().chain([Effect::Revoke { reason }]))
        }
        State::Fencing | State::Fenced | State::Preserved => {
            gone(s);
            s.state = State::Preserved;
            Step::go(still_to_tell(s))
        }
        State::Deleting => {
            gone(s);
            Step::go(next_removal(s))
        }
        State::Closed | State::Quarantined => Step::quiet([]),
    }
}
