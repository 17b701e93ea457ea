//! What one decision writes: session records and evidence, as one unit. An authority that lives
//! in the same file as the host's store writes it in the same transaction as its own change.

use serde::{Deserialize, Serialize};

use super::head::Digest;
use super::ids::{Generation, SessionId, WorkspaceId};
use super::session::Session;
use super::time::BootNs;

/// An evidence entry before it is numbered, timed and chained.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Draft {
    /// What kind of entry, for instance `event`, `acquire`, `publish`, `agent_start`.
    pub kind: String,
    /// The workspace it is about.
    pub workspace: Option<WorkspaceId>,
    /// The session it is about.
    pub session: Option<SessionId>,
    /// The generation then.
    pub generation: Option<Generation>,
    /// Who asked: `uid 0`, `uid 1000 (login uid 1000)`, `policy:DIGEST`, `agent`.
    pub actor: String,
    /// Everything else; what the kernel or the authority answered.
    pub detail: serde_json::Value,
}

/// An entry of the chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Counts from 1 without a gap.
    pub seq: u64,
    /// Wall-clock time, RFC 3339, for people.
    pub time: String,
    /// CLOCK_BOOTTIME.
    pub boot_ns: BootNs,
    /// The content.
    #[serde(flatten)]
    pub draft: Draft,
    /// Hash of the entry before.
    pub prev: Digest,
    /// Hash over everything above.
    pub hash: Digest,
}

/// Records to write as one unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Journal {
    /// Session records, replacing those of the same id.
    pub sessions: Vec<Session>,
    /// Evidence to append.
    pub entries: Vec<Draft>,
}
