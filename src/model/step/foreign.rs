//! What others do to a session that is stopped, besides thawing it and making it writable.

use super::*;

/// Who was outside may have run: nothing is called frozen, or killed, before it is asked again.
pub(super) fn on_moved_out(s: &mut Session) -> Step {
    match s.state {
        State::Fencing | State::Fenced | State::Preserved => {
            s.facts.drop(Fact::Frozen);
            s.facts.drop(Fact::Killed);
            Step::go([FENCE])
        }
        State::Opening
        | State::Active
        | State::Releasing
        | State::Deleting
        | State::Closed
        | State::Quarantined => Step::quiet([]),
    }
}

/// It cannot be undone, and no fact says anything else: it is shown, and no policy lets the session
/// run on upon it.
pub(super) fn on_upper_changed(s: &mut Session, seen: &str) -> Step {
    match s.state {
        State::Fencing | State::Fenced | State::Preserved => {
            s.altered = Some(seen.to_owned());
            Step::note()
        }
        State::Opening
        | State::Active
        | State::Releasing
        | State::Deleting
        | State::Closed
        | State::Quarantined => Step::quiet([]),
    }
}
