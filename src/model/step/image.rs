//! Stopping the file system that an upper lies in, where it lies in an image of its own. It stops
//! every writer, also one outside the session that keeps the overlay from becoming read-only.
//!
//! Whoever waits for a stopped file system waits uninterruptibly: no freeze and no kill of a process
//! ends before it goes on, and neither does what the agent itself does to it. So it is stopped only
//! once `frozen` is proved, and set going again before anything else is tried: see [`lift_first`].

use super::*;

/// Whether the upper's file system is to be stopped, now that read-only was refused.
fn wanted(s: &Session) -> bool {
    let stopped = s.facts.has(Fact::Frozen) || s.facts.has(Fact::Killed);
    // Who runs on would hang on it.
    let wanted = s.fence.to != Fact::Frozen && !s.may_run_on();
    // What met an error stands by itself, and FIFREEZE would only fail.
    let broken = s.holders.iter().any(Holder::is_stopped_file_system);
    s.upper.size().is_some() && stopped && wanted && !broken
}

/// Adds the stop to what a refused read-only led to, unless something follows at once for which it
/// would have to be lifted again.
pub(super) fn freeze_after(s: &mut Session, step: &mut Step) {
    if s.upper_freeze == UpperFreeze::Off
        && wanted(s)
        && !step.effects.iter().any(Effect::wants_a_running_upper)
    {
        s.upper_freeze = UpperFreeze::On;
        step.effects.push(Effect::FreezeUpper);
    }
}

/// What a tick or a start does about one that is, or was to be, stopped or lifted: done again, it
/// changes nothing, and shows whether somebody else lifted it.
pub(super) fn freeze_again(s: &Session) -> Option<Effect> {
    match s.upper_freeze {
        UpperFreeze::On => wanted(s).then_some(Effect::FreezeUpper),
        UpperFreeze::Lifting => Some(Effect::ThawUpper),
        UpperFreeze::Off => None,
    }
}

/// No effect that would wait for a stopped upper is given out: it is set going instead, and what
/// comes after that is decided anew once it goes. The fact ends before its ground does.
pub(super) fn lift_first(s: &mut Session, step: &mut Step) {
    let Some(first) = step.effects.iter().position(Effect::wants_a_running_upper) else { return };
    if s.upper_freeze == UpperFreeze::Off {
        return;
    }
    step.effects[first] = lift(s);
    step.effects.retain(|effect| !effect.wants_a_running_upper());
}

pub(super) fn lift(s: &mut Session) -> Effect {
    s.facts.drop(Fact::UpperFrozen);
    s.upper_freeze = UpperFreeze::Lifting;
    Effect::ThawUpper
}

pub(super) fn on_upper_frozen(s: &mut Session, proof: &Proof) -> Step {
    match s.state {
        State::Fenced | State::Preserved if s.upper_freeze == UpperFreeze::On => {
            if s.facts.has(Fact::UpperFrozen) {
                return Step::quiet([]);
            }
            s.facts.prove(Fact::UpperFrozen, proof.clone());
            Step::note()
        }
        // Readmitted or disposed of meanwhile: what lifts it is on its way.
        State::Fenced
        | State::Preserved
        | State::Fencing
        | State::Opening
        | State::Active
        | State::Releasing
        | State::Deleting
        | State::Closed
        | State::Quarantined => Step::quiet([]),
    }
}

/// Somebody had set it going; it stands again, and the next answer proves that.
pub(super) fn on_upper_freeze_lost(s: &mut Session) -> Step {
    if !s.facts.has(Fact::UpperFrozen) {
        return Step::quiet([]);
    }
    s.facts.drop(Fact::UpperFrozen);
    Step::note()
}

/// It goes: what was waiting for that comes now.
pub(super) fn on_upper_thawed(s: &mut Session, proof: &Proof) -> Step {
    s.facts.drop(Fact::UpperFrozen);
    s.upper_freeze = UpperFreeze::Off;
    match (s.state, &s.work) {
        (State::Active, Some(Work::Resume)) => Step::go([super::hold::make_writable(s)]),
        (State::Fencing | State::Fenced | State::Preserved, _) => {
            Step { record: true, ..super::fence::on_tick(s, proof.at, false) }
        }
        (State::Deleting, _) => Step::go(super::removal::next_removal(s)),
        (State::Active, Some(Work::Checkpoint { .. } | Work::Close { .. }) | None)
        | (State::Opening | State::Releasing | State::Closed | State::Quarantined, _) => {
            Step::note()
        }
    }
}
