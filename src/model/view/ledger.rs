//! Publications and external requests, as the API takes and shows them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::bounds;
use crate::model::code::Code;
use crate::model::head::Digest;
use crate::model::ledger::{KeyState, Publication};
use crate::model::request::{Outcome, Request};

/// A row of the ledger of publications.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct PublicationView {
    /// Its key.
    pub key: String,
    /// Whose head was to advance.
    pub workspace: String,
    /// `PREPARED`, `SENT`, `UNKNOWN`, `COMMITTED`, `REJECTED`.
    pub state: String,
    /// The code of a refusal (`key_buried`: resolved as not committed), or what was lost.
    pub why: Option<String>,
    /// The layer that was offered.
    #[schema(value_type = Option<String>)]
    pub layer: Option<Digest>,
    /// The version that it made.
    pub version: Option<u64>,
    /// By which session.
    pub session: Option<String>,
    /// Under which generation.
    pub generation: Option<u64>,
    /// For whom.
    pub owner: Option<String>,
    /// Who is to see to it while it is open.
    pub assignee: Option<String>,
    /// When it was entered; empty where an older build did not write that down.
    pub entered_at: String,
    /// When its state last changed.
    pub changed_at: String,
}

impl From<Publication> for PublicationView {
    fn from(row: Publication) -> Self {
        let (asked, word) = (row.asked, row.state.word().to_owned());
        let (why, committed) = match row.state {
            KeyState::Unknown { why } => (Some(why), None),
            KeyState::Rejected { code } => (Some(code.to_string()), None),
            KeyState::Buried => (Some(Code::KeyBuried.to_string()), None),
            KeyState::Committed { layer, at } => (None, Some((layer, at.version.0))),
            KeyState::Unused | KeyState::Prepared | KeyState::Sent | KeyState::Forgotten => {
                (None, None)
            }
        };
        Self {
            key: row.key.to_string(),
            workspace: row.workspace.to_string(),
            state: word,
            why,
            layer: asked.as_ref().map(|a| a.layer).or(committed.map(|(layer, _)| layer)),
            version: committed.map(|(_, version)| version),
            session: asked.as_ref().map(|a| a.session.to_string()),
            generation: asked.as_ref().map(|a| a.generation.0),
            owner: row.owner.map(|o| o.to_string()),
            assignee: row.assignee.map(|o| o.to_string()),
            entered_at: row.entered_at,
            changed_at: row.changed_at,
        }
    }
}

/// `publication assign`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AssignPublication {
    /// To whom; at most 128 characters of a name.
    pub assignee: String,
}

/// `request begin`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BeginRequest {
    /// What is to happen outside, once.
    pub task: String,
    /// The key that it is sent with.
    pub key: String,
    /// What it is, for people; a repeated key has to have the same. At most 256 bytes.
    #[serde(default, deserialize_with = "bounds::name")]
    pub about: String,
    /// Who is to see to it while it is open; the session's owner if absent.
    #[serde(default)]
    pub assignee: Option<String>,
    /// The generation under which the caller believes to write; the session's if absent.
    #[serde(default)]
    pub generation: Option<u64>,
}

/// `request ack` and `request resolve`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SettleRequest {
    /// The key it was sent with.
    pub key: String,
    /// `done` or `not-done`.
    #[schema(value_type = String)]
    pub outcome: Outcome,
    /// What the far side answered, or how it was found out; at most 4096 bytes.
    #[serde(default, deserialize_with = "bounds::reason")]
    pub note: String,
}

/// `request assign`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AssignRequest {
    /// The key it was sent with.
    pub key: String,
    /// To whom.
    pub assignee: String,
}

/// An external request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RequestView {
    /// Of which workspace.
    pub workspace: String,
    /// What is to happen outside.
    pub task: String,
    /// The key it is sent with.
    pub key: String,
    /// What it is, for people.
    pub about: String,
    /// `OPEN`; `UNKNOWN`: its writer lost the workspace meanwhile; `SETTLED`.
    pub state: String,
    /// `done` or `not-done`, once that is known.
    pub outcome: Option<String>,
    /// Who said so.
    pub settled_by: Option<String>,
    /// `ack` or `resolve`.
    pub settled_how: Option<String>,
    /// A reference, or the reason.
    pub note: Option<String>,
    /// Who began it.
    pub session: String,
    /// Under which generation.
    pub generation: u64,
    /// The newest generation that asked for it again under the same key.
    pub resumed_by: Option<u64>,
    /// On which host.
    pub host: String,
    /// For whom.
    pub owner: String,
    /// Who is to see to it while it is open.
    pub assignee: String,
    /// When it began.
    pub began_at: String,
    /// When it was last changed.
    pub changed_at: String,
}

impl From<Request> for RequestView {
    fn from(row: Request) -> Self {
        let state = match row.state {
            crate::model::request::RequestState::Open => "OPEN",
            crate::model::request::RequestState::Unknown => "UNKNOWN",
            crate::model::request::RequestState::Settled => "SETTLED",
        };
        let settled = row.settled;
        let outcome = settled.as_ref().map(|s| s.outcome.word().to_owned());
        Self {
            workspace: row.workspace.to_string(),
            task: row.task.to_string(),
            key: row.key.to_string(),
            about: row.about,
            state: state.to_owned(),
            outcome,
            settled_by: settled.as_ref().map(|s| s.by.clone()),
            settled_how: settled.as_ref().map(|s| s.how.clone()),
            note: settled.map(|s| s.note),
            session: row.session.to_string(),
            generation: row.generation.0,
            resumed_by: row.resumed.map(|g| g.0),
            host: row.host.to_string(),
            owner: row.owner.to_string(),
            assignee: row.assignee.to_string(),
            began_at: row.began_at,
            changed_at: row.changed_at,
        }
    }
}

/// The answer to `request begin`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct BegunRequest {
    /// `begun`: it is recorded, send it. `repeated`: this generation asked under this key before.
    /// `resumed`: an older one did. In these two cases it may have been sent.
    pub result: String,
    /// Its record.
    pub request: RequestView,
}
