//! The breaker: killing and deleting stop when something is wrong at large. It opens when, within
//! [`WINDOW`], at least [`LEAST`] and over half of the sessions that were let write lose their
//! leases. A reboot, a drain and what a person asked for do not count. Freezing and renewing never
//! stop. Opened by doubt alone it closes once the authority has answered for each of the doubted;
//! else a person closes it.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ids::SessionId;
use super::session::{Disposition, Loss, Session, State, UNKNOWN};
use super::step::Effect;
use super::time::BootNs;

/// Losses within this time are seen together.
pub const WINDOW: Duration = Duration::from_secs(60);
/// So many losses at least: a small host that loses all of its few sessions is no mass failure.
pub const LEAST: usize = 10;

/// Why it is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tripped {
    /// Wall-clock time of the opening, RFC 3339.
    pub since: String,
    /// Leases lost within the window.
    pub lost: u64,
    /// Of so many sessions that were let write.
    pub of: u64,
    /// Each of them was lost for doubt, so that the authority's answers close it.
    pub doubt_alone: bool,
    /// Doubted sessions for which the authority has not answered since.
    pub waiting: BTreeSet<SessionId>,
    /// In words.
    pub why: String,
}

/// How a loss counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Doubt,
    Other,
}

/// Whether a loss is one that nobody asked for.
fn kind(loss: &Loss) -> Option<Kind> {
    match loss {
        Loss::Doubt { .. } => Some(Kind::Doubt),
        Loss::Expired { .. } | Loss::Superseded { forced_by: None, .. } => Some(Kind::Other),
        // A crash took the reason along: nobody is known to have asked for it.
        Loss::Operator { by, .. } if by == UNKNOWN => Some(Kind::Other),
        Loss::Superseded { forced_by: Some(_), .. }
        | Loss::Revoked { .. }
        | Loss::Operator { .. }
        | Loss::Reboot
        | Loss::Closed { .. }
        | Loss::ReadmitFailed { .. } => None,
    }
}

/// Whether an effect destroys what could not be brought back, and so waits while the breaker is
/// open. Who closes a session of a good lease ends its processes on purpose; in one that was never
/// opened there is nothing, and what is left of it would keep others out.
pub fn stops(effect: &Effect, s: &Session) -> bool {
    let nothing = s.disposition == Some(Disposition::NeverOpened);
    match effect {
        Effect::Kill => s.state != State::Releasing && !nothing,
        Effect::Remove => !nothing,
        Effect::Freeze { .. }
        | Effect::Thaw
        | Effect::RunOn
        | Effect::ReadOnly
        | Effect::ReadWrite
        | Effect::Seal
        | Effect::FreezeUpper
        | Effect::ThawUpper
        | Effect::Unseal
        | Effect::Revoke { .. }
        | Effect::Capture { .. }
        | Effect::Pack { .. }
        | Effect::Publish { .. }
        | Effect::Resolve { .. }
        | Effect::Releasing
        | Effect::Release
        | Effect::ProveGone
        | Effect::Show => false,
    }
}

/// The breaker of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Breaker {
    recent: VecDeque<(BootNs, SessionId, Kind)>,
    /// Those of `recent` that hold a lease again.
    back: BTreeSet<SessionId>,
    open: Option<Tripped>,
}

impl Breaker {
    /// As a former agent left it.
    pub fn with(open: Option<Tripped>) -> Self {
        Self { open, ..Self::default() }
    }

    /// Why it is open, if it is.
    pub fn tripped(&self) -> Option<&Tripped> {
        self.open.as_ref()
    }

    /// A session that was let write lost its lease while `writing` others are let write. Whether
    /// what is to be recorded changed.
    pub fn lost(&mut self, s: &Session, writing: u64, now: BootNs, wall: &str) -> bool {
        let Some(kind) = s.loss.as_ref().and_then(kind) else { return false };
        if self.back.remove(&s.id) {
            self.recent.retain(|(_, id, _)| *id != s.id);
        }
        while self.recent.front().is_some_and(|(at, ..)| now.since(*at) > WINDOW) {
            if let Some((_, id, _)) = self.recent.pop_front() {
                self.back.remove(&id);
            }
        }
        self.recent.push_back((now, s.id, kind));
        match &self.open {
            None => self.judge(writing, wall),
            Some(_) => self.judge_again(s, kind, writing),
        }
    }

    /// Takes up losses of before the agent's start, oldest first: a crash may have come between them
    /// and the record of what follows from them. Those before it was `closed` last were judged.
    pub fn recall<'s>(
        &mut self,
        losses: impl Iterator<Item = (BootNs, &'s Session)>,
        closed: Option<BootNs>,
        now: BootNs,
    ) {
        let new = |at: BootNs| now.since(at) <= WINDOW && closed.is_none_or(|closed| at > closed);
        let recent = losses.filter(|(at, _)| new(*at));
        let counted =
            recent.filter_map(|(at, s)| Some((at, s.id, s.loss.as_ref().and_then(kind)?)));
        self.recent.extend(counted);
    }

    /// Judges what was recalled, once it is known how many are let write. Whether it opened.
    pub fn judge_recalled(&mut self, writing: u64, wall: &str) -> bool {
        self.open.is_none() && self.judge(writing, wall)
    }

    /// A session that had lost its lease holds one again: it is one of those that are let write.
    pub fn regained(&mut self, id: SessionId) {
        if self.recent.iter().any(|(_, lost, _)| *lost == id) {
            self.back.insert(id);
        }
    }

    /// How many of the recent losses are of sessions that are not let write again.
    pub fn counted(&self) -> u64 {
        count(self.recent.len() - self.back.len())
    }

    /// Of how many sessions the recent losses are.
    fn of(&self, writing: u64) -> u64 {
        writing + self.counted()
    }

    fn judge(&mut self, writing: u64, wall: &str) -> bool {
        let (lost, of) = (self.recent.len(), self.of(writing));
        if lost < LEAST || count(lost) * 2 <= of {
            return false;
        }
        let doubted = self.recent.iter().filter(|(.., kind)| *kind == Kind::Doubt);
        let waiting: BTreeSet<_> = doubted.map(|(_, id, _)| *id).collect();
        let doubt_alone = waiting.len() == lost;
        let how = match doubt_alone {
            true => "each for doubt alone",
            false => "not for doubt alone",
        };
        let why = format!(
            "{lost} of {of} sessions lost their leases within {} s, {how}",
            WINDOW.as_secs()
        );
        let (since, lost) = (wall.to_owned(), count(lost));
        self.open = Some(Tripped { since, lost, of, doubt_alone, waiting, why });
        true
    }

    /// It is open already. More doubt is more to wait for; what would have opened it without any
    /// doubt is no longer the authority's to close.
    fn judge_again(&mut self, s: &Session, kind: Kind, writing: u64) -> bool {
        let others = self.recent.iter().filter(|(.., kind)| *kind == Kind::Other).count();
        let of = self.of(writing);
        let Some(open) = &mut self.open else { return false };
        match kind {
            Kind::Doubt => open.doubt_alone && open.waiting.insert(s.id),
            Kind::Other if !open.doubt_alone || others < LEAST || count(others) * 2 <= of => false,
            Kind::Other => {
                open.doubt_alone = false;
                open.why = format!(
                    "{}; then {others} of {of} within {} s, not for doubt",
                    open.why,
                    WINDOW.as_secs()
                );
                true
            }
        }
    }

    /// Those for whom the authority is to answer. Empty as well when only a person closes it.
    pub fn waiting(&self) -> Vec<SessionId> {
        let open = self.open.as_ref().filter(|open| open.doubt_alone);
        open.map(|open| open.waiting.iter().copied().collect()).unwrap_or_default()
    }

    /// The authority answered for these; whether that was the last it was open for.
    pub fn answered(&mut self, ids: &[SessionId]) -> bool {
        let Some(open) = &mut self.open else { return false };
        for id in ids {
            open.waiting.remove(id);
        }
        open.doubt_alone && open.waiting.is_empty()
    }

    /// Closes it, and begins to count anew.
    pub fn close(&mut self) {
        *self = Self::default();
    }
}

fn count(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}
