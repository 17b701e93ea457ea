//! Sealing the upper of a stopped session, and taking the seal off for a readmission. A removal
//! needs no step of its own: it takes the flags off as it goes.

use super::*;

/// The seal, with its intent in the record. Read-only is tried again right after it.
pub(super) fn seal(s: &mut Session) -> Effect {
    s.seal = true;
    Effect::Seal
}

pub(super) fn on_sealed(s: &mut Session, proof: &Proof) -> Step {
    match s.state {
        State::Fenced | State::Preserved => {
            s.facts.prove(Fact::Sealed, proof.clone());
            s.trouble = None;
            Step { record: true, ..super::fence::settle(s) }
        }
        // Readmitted or disposed of meanwhile; what takes the flags off is on its way.
        State::Fencing
        | State::Opening
        | State::Active
        | State::Releasing
        | State::Deleting
        | State::Closed
        | State::Quarantined => Step::quiet([]),
    }
}

/// The next tick seals again, if it is still wanted.
pub(super) fn on_seal_lost(s: &mut Session) -> Step {
    match s.state {
        State::Fencing | State::Fenced | State::Preserved if s.facts.has(Fact::Sealed) => {
            s.facts.drop(Fact::Sealed);
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

pub(super) fn on_unsealed(s: &mut Session) -> Step {
    s.facts.drop(Fact::Sealed);
    match (s.state, &s.work) {
        (State::Active, Some(Work::Resume)) => {
            s.seal = false;
            Step::go([Effect::ReadWrite])
        }
        // The lease was lost while the flags were taken off; the overlay was made writable too.
        (State::Fencing | State::Fenced | State::Preserved, _) => {
            s.seal = false;
            super::fence::writable_again(s)
        }
        (State::Active, Some(Work::Checkpoint { .. } | Work::Close { .. }) | None) => {
            Step::quiet([])
        }
        (
            State::Opening
            | State::Releasing
            | State::Deleting
            | State::Closed
            | State::Quarantined,
            _,
        ) => Step::quiet([]),
    }
}
