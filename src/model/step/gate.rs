//! The fact `gated`. Nothing is done for it and nothing waits for it: the kernel compares each write
//! with the lease by itself. It is proved once the lease is lost, where the host has the gate.

use super::*;

pub(super) fn on_gated(s: &mut Session, proof: &Proof) -> Step {
    match s.state {
        State::Fencing | State::Fenced | State::Preserved if !s.facts.has(Fact::Gated) => {
            s.facts.prove(Fact::Gated, proof.clone());
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

/// The fact ends; the others never stood on it.
pub(super) fn on_gate_lost(s: &mut Session) -> Step {
    if !s.facts.has(Fact::Gated) {
        return Step::quiet([]);
    }
    s.facts.drop(Fact::Gated);
    Step::note()
}
