//! The ledger of publications: one row a key, from the intent to the answer (I7).
//!
//! ```text
//! PREPARED --> SENT --> COMMITTED | REJECTED
//!      \         \--> UNKNOWN --(resolved)--> COMMITTED | REJECTED (buried)
//!       \-------------^
//! ```
//!
//! The first final answer to a key is its only answer. An absent key is no answer: it is unused, or
//! it was forgotten, which the workspace's own record tells apart.

use serde::{Deserialize, Serialize};

use super::code::Code;
use super::head::{Digest, HeadAt};
use super::ids::{Generation, Owner, PublicationKey, WorkspaceId};
use super::request::Request;
use super::session::{Session, Stage, Work};
use super::workspace::Publish;

/// What became of a publication key.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeyState {
    /// Never seen.
    Unused,
    /// The layer is durable and is going to be offered.
    Prepared,
    /// The offer is on its way, or its answer is.
    Sent,
    /// The answer was lost. It may have been committed.
    Unknown {
        /// What was lost.
        why: String,
    },
    /// Committed: this layer, giving this version and head.
    Committed {
        /// The layer published.
        layer: Digest,
        /// What it made.
        at: HeadAt,
    },
    /// The predicate refused it; nothing changed, and never will by this key.
    Rejected {
        /// Why.
        code: Code,
    },
    /// Resolved as not committed; it stays unusable.
    Buried,
    /// Its row was removed after its time: whether it was committed is not known any more.
    Forgotten,
}

impl KeyState {
    /// Whether the outcome is still to come.
    pub const fn is_open(&self) -> bool {
        match self {
            Self::Prepared | Self::Sent | Self::Unknown { .. } => true,
            Self::Unused
            | Self::Committed { .. }
            | Self::Rejected { .. }
            | Self::Buried
            | Self::Forgotten => false,
        }
    }

    /// How far it is, so that no row goes back: a late entry of an earlier stage changes nothing.
    const fn stage(&self) -> u8 {
        match self {
            Self::Unused => 0,
            Self::Prepared => 1,
            Self::Sent => 2,
            Self::Unknown { .. } => 3,
            Self::Committed { .. } | Self::Rejected { .. } | Self::Buried | Self::Forgotten => 4,
        }
    }

    /// The word of the documentation.
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Unused => "UNUSED",
            Self::Prepared => "PREPARED",
            Self::Sent => "SENT",
            Self::Unknown { .. } => "UNKNOWN",
            Self::Committed { .. } => "COMMITTED",
            Self::Rejected { .. } | Self::Buried => "REJECTED",
            Self::Forgotten => "FORGOTTEN",
        }
    }
}

/// One row of the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Publication {
    /// Whose head was to advance.
    pub workspace: WorkspaceId,
    /// The key.
    pub key: PublicationKey,
    /// What was asked. Absent where the key was buried before anything was entered under it, and
    /// in rows that an older build wrote.
    pub asked: Option<Publish>,
    /// For whom.
    pub owner: Option<Owner>,
    /// Who is to see to it while it is open.
    pub assignee: Option<Owner>,
    /// How far it is.
    pub state: KeyState,
    /// When it was entered, RFC 3339.
    pub entered_at: String,
    /// When `state` was last changed, RFC 3339.
    pub changed_at: String,
}

impl Publication {
    /// A fresh row.
    pub fn new(
        workspace: WorkspaceId,
        key: PublicationKey,
        asked: Option<&Publish>,
        now: &str,
    ) -> Self {
        Self {
            workspace,
            key,
            asked: asked.cloned(),
            owner: None,
            assignee: None,
            state: KeyState::Unused,
            entered_at: now.to_owned(),
            changed_at: now.to_owned(),
        }
    }

    /// Whether `wish` is what this row is about. Where only the layer is known, that decides.
    pub fn is_about(&self, wish: &Publish) -> bool {
        match (&self.asked, &self.state) {
            (Some(asked), _) => asked == wish,
            (None, KeyState::Committed { layer, .. }) => *layer == wish.layer,
            (None, _) => true,
        }
    }

    /// Whether it can be entered as `wish`. While it is only prepared nothing was asked yet, and
    /// what its session expects may still change: an earlier publication of it was resolved.
    pub fn may_become(&self, wish: &Publish) -> bool {
        let same = |asked: &Publish| {
            (asked.session, asked.lease, asked.layer) == (wish.session, wish.lease, wish.layer)
        };
        let prepared = self.state == KeyState::Prepared;
        self.is_about(wish) || prepared && self.asked.as_ref().is_some_and(same)
    }

    /// Brings it forward; an earlier stage, or any after the last, changes nothing.
    pub fn advance(&mut self, state: KeyState, now: &str) -> bool {
        let forward = state.stage() > self.state.stage();
        if forward {
            self.state = state;
            self.changed_at = now.to_owned();
        }
        forward
    }
}

/// What a session's record says is to be entered before the next effect: the layer that is going to
/// be offered, or is offered now.
pub fn stage_of(s: &Session) -> Option<(Publish, KeyState)> {
    let (key, layer, state) = match &s.work {
        Some(Work::Checkpoint { key, stage: Stage::Thawing { layer: Some(layer) }, .. }) => {
            (*key, *layer, KeyState::Prepared)
        }
        Some(
            Work::Checkpoint { key, stage: Stage::Publishing { layer }, .. }
            | Work::Close { key, stage: Stage::Publishing { layer }, .. },
        ) => (*key, *layer, KeyState::Sent),
        Some(Work::Checkpoint { .. } | Work::Close { .. } | Work::Resume) | None => return None,
    };
    Some((Publish::of(s, key, layer), state))
}

/// Which rows of a ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Which {
    /// Of this workspace alone.
    pub workspace: Option<WorkspaceId>,
    /// Only those whose outcome is still to come.
    pub open: bool,
    /// At most so many, newest key first.
    pub limit: usize,
}

/// A step that a former writer left without a known outcome, as the takeover record tells it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Unresolved {
    /// `publication` or `request`.
    pub kind: String,
    /// The key.
    pub key: String,
    /// The external task; of a request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<String>,
    /// Under which generation it was begun.
    pub generation: Option<Generation>,
    /// Who sees to it.
    pub assignee: Option<Owner>,
    /// Since when, RFC 3339.
    pub since: String,
}

impl From<&Publication> for Unresolved {
    fn from(row: &Publication) -> Self {
        Self {
            kind: "publication".to_owned(),
            key: row.key.to_string(),
            task: None,
            generation: row.asked.as_ref().map(|asked| asked.generation),
            assignee: row.assignee.clone(),
            since: row.entered_at.clone(),
        }
    }
}

impl From<&Request> for Unresolved {
    fn from(row: &Request) -> Self {
        Self {
            kind: "request".to_owned(),
            key: row.key.to_string(),
            task: Some(row.task.to_string()),
            generation: Some(row.generation),
            assignee: Some(row.assignee.clone()),
            since: row.began_at.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn states() -> Vec<KeyState> {
        vec![
            KeyState::Prepared,
            KeyState::Sent,
            KeyState::Unknown { why: "lost".to_owned() },
            KeyState::Committed { layer: Digest([1; 32]), at: HeadAt::default() },
            KeyState::Rejected { code: Code::StaleGeneration },
            KeyState::Buried,
        ]
    }

    #[test]
    fn i7_a_row_goes_forward_and_ends_once() {
        for from in states() {
            for to in states() {
                let mut row = Publication::new(
                    "w".parse().unwrap(),
                    PublicationKey::from_u128(1),
                    None,
                    "then",
                );
                assert!(row.advance(from.clone(), "then"));
                let moved = row.advance(to.clone(), "now");
                let later = match (&from, &to) {
                    (KeyState::Prepared, KeyState::Prepared) => false,
                    (KeyState::Prepared, _) => true,
                    (KeyState::Sent, KeyState::Prepared | KeyState::Sent) => false,
                    (KeyState::Sent, _) => true,
                    (KeyState::Unknown { .. }, to) => !to.is_open(),
                    (_, _) => false,
                };
                assert_eq!(moved, later, "{from:?} -> {to:?}");
                assert_eq!(row.state, if moved { to } else { from.clone() });
            }
        }
    }

    #[test]
    fn open_is_what_has_no_answer() {
        let open: Vec<_> = states().into_iter().filter(KeyState::is_open).collect();
        assert_eq!(open, states()[..3]);
        assert!(!KeyState::Unused.is_open() && !KeyState::Forgotten.is_open());
    }
}
