//! The fact `gated`. Nothing is done for it and nothing waits for it: the kernel compares each write
//! with the lease by itself. It is proved once the lease is lost, where the host has the gate.
//!
//! Where it alone stops all that a session's processes would write, policy may let them run on, after
//! everything else that a fence does was tried. They are frozen first like all others: what was begun
//! before the deadline has ended by then, and whatever goes wrong leaves them frozen.

use super::*;

pub(super) fn on_gated(s: &mut Session, proof: &Proof, alone: bool) -> Step {
    match s.state {
        State::Fencing | State::Fenced | State::Preserved if !s.facts.has(Fact::Gated) => {
            s.facts.prove(Fact::Gated, proof.clone());
            s.run_on = alone && s.policy.on_fence == OnFence::ReadOnlyRun;
            Step::note()
        }
        State::Fencing
        | State::Fenced
        | State::Preserved
        | State::Opening
        | State::Active
        | State::Releasing
        | State::Deleting
        | State::Closed
        | State::Quarantined => Step::quiet([]),
    }
}

/// The fact ends; the others never stood on it. Who ran on behind it is frozen again.
pub(super) fn on_gate_lost(s: &mut Session) -> Step {
    if !s.facts.has(Fact::Gated) {
        return Step::quiet([]);
    }
    s.facts.drop(Fact::Gated);
    let ran_on = std::mem::take(&mut s.run_on);
    let over = matches!(s.state, State::Closed | State::Quarantined);
    let stopped = over || s.facts.has(Fact::Frozen) || s.is_past_running();
    Step::go((ran_on && !stopped).then_some(FENCE))
}

/// What lets its processes run on, once policy has nothing left to do that wants them frozen.
pub(super) fn run_on(s: &Session) -> Option<Effect> {
    (s.may_run_on() && s.facts.has(Fact::Frozen)).then_some(Effect::RunOn)
}

pub(super) fn on_runs_on(s: &mut Session) -> Step {
    match s.state {
        State::Fencing | State::Fenced | State::Preserved => {
            s.facts.drop(Fact::Frozen);
            // Unless more is wanted meanwhile.
            Step::go((!s.may_run_on()).then_some(FENCE))
        }
        State::Opening
        | State::Active
        | State::Releasing
        | State::Deleting
        | State::Closed
        | State::Quarantined => Step::quiet([]),
    }
}
