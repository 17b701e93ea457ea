//! From a decision to nothing: kill, umount, proof, removal.

use std::time::Duration;

use super::*;

pub(super) fn on_killed(s: &mut Session, proof: &Proof) -> Step {
    match s.state {
        State::Releasing => {
            s.facts.prove(Fact::Killed, proof.clone());
            match s.work {
                Some(Work::Close { stage: Stage::Stopping, .. }) => Step::go([Effect::ReadOnly]),
                Some(_) | None => Step::note(),
            }
        }
        State::Fencing | State::Fenced | State::Preserved => {
            s.facts.prove(Fact::Killed, proof.clone());
            s.blockers.clear();
            if s.state == State::Fencing {
                s.state = State::Fenced;
            }
            Step::go([Effect::ReadOnly])
        }
        State::Deleting => {
            s.facts.prove(Fact::Killed, proof.clone());
            Step::go([Effect::ProveGone])
        }
        State::Opening | State::Active | State::Closed | State::Quarantined => Step::quiet([]),
    }
}

pub(super) fn on_gone(s: &mut Session, proof: &Proof) -> Step {
    match s.state {
        State::Deleting => {
            s.facts.prove(Fact::Gone, proof.clone());
            s.tries = 0;
            Step::go(next_removal(s))
        }
        // Nothing is left of it on the host but its upper.
        State::Fencing | State::Fenced | State::Preserved => {
            s.facts.prove(Fact::Gone, proof.clone());
            s.state = State::Preserved;
            s.trouble = None;
            Step::note()
        }
        State::Opening | State::Active | State::Releasing | State::Closed | State::Quarantined => {
            Step::quiet([])
        }
    }
}

/// The next step of a removal, from what is proved. A publication without a known outcome is
/// resolved first; its answer lets the next tick go on.
pub(super) fn next_removal(s: &Session) -> Vec<Effect> {
    if !s.facts.has(Fact::Killed) {
        vec![Effect::Kill]
    } else if !s.facts.has(Fact::Gone) {
        vec![Effect::ProveGone]
    } else if !s.safe_to_delete() {
        resolve_unknown(s).collect()
    } else {
        vec![Effect::Remove]
    }
}

pub(super) fn on_removed(s: &mut Session) -> Step {
    match s.state {
        State::Deleting => {
            s.state = State::Closed;
            s.trouble = None;
            Step::note()
        }
        State::Opening
        | State::Active
        | State::Releasing
        | State::Fencing
        | State::Fenced
        | State::Preserved
        | State::Closed
        | State::Quarantined => Step::quiet([]),
    }
}

pub(super) fn on_disposed(s: &mut Session, disposition: Disposition) -> Step {
    match s.state {
        State::Fenced | State::Preserved => {
            if !s.unknown.is_empty() {
                return Step::refuse(Code::UnknownPublication);
            }
            // The newer decision takes the place of an earlier `keep`.
            s.keep_until = None;
            begin_deleting(s, disposition)
        }
        State::Deleting | State::Closed => Step::refuse(Code::WrongState),
        // Removal failed too often; a person decides that it is tried again.
        State::Quarantined if s.disposition.is_some() => begin_deleting(s, disposition),
        State::Opening | State::Active | State::Releasing | State::Fencing | State::Quarantined => {
            Step::refuse(Code::WrongState)
        }
    }
}

pub(super) fn on_kept(s: &mut Session, until_ms: u64) -> Step {
    match s.state {
        State::Fencing | State::Fenced | State::Preserved => {
            s.keep_until = Some(until_ms);
            Step::note()
        }
        State::Opening
        | State::Active
        | State::Releasing
        | State::Deleting
        | State::Closed
        | State::Quarantined => Step::refuse(Code::WrongState),
    }
}

/// Only time that a sweep witnessed counts towards the end of grace; and none while a publication is
/// UNKNOWN, when no end of grace is near that could be announced.
pub(super) fn on_witnessed(s: &mut Session, add_ms: u64, may_delete: bool) -> Step {
    match s.state {
        State::Preserved if !s.unknown.is_empty() => Step::quiet([]),
        State::Preserved => {
            s.witnessed = s.witnessed.saturating_add(Duration::from_millis(add_ms));
            if may_delete && s.grace_is_over(Duration::ZERO) {
                return begin_deleting(s, Disposition::Grace);
            }
            Step::quiet([])
        }
        State::Opening
        | State::Active
        | State::Releasing
        | State::Fencing
        | State::Fenced
        | State::Deleting
        | State::Closed
        | State::Quarantined => Step::quiet([]),
    }
}
