//! What the API takes and shows. Flat and stable: these names are the contract that scripts rely
//! on. Times are milliseconds unless the name says otherwise; `*_at` are RFC 3339.

mod bounds;
mod diff;
mod host;
mod ledger;
mod session;
mod workspace;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::head::Digest;
use super::lease::HolderKind;

pub use diff::{Aspect, Change, DiffLine, DiffRow, DiffSummary, FileKind, Mark, Told};
pub use host::{
    BackupHost, BackupView, BreakerView, DrainHost, Drained, EvidenceReport, ExportSession,
    Exported, GcItem, GcReport, KeepSession, LeftOut, PreservedView, ResetBreaker, RestoredChain,
    RestoredView, SpaceView, StatusView,
};
pub use ledger::{
    AssignPublication, AssignRequest, BeginRequest, BegunRequest, PublicationView, RequestView,
    SettleRequest,
};
pub use session::{
    ApplyBundle, Beat, BeatAnswer, CheckpointSession, Checkpointed, CloseSession, FactView,
    FenceSession, Fenced, GateView, OpenSession, Opened, ProgressView, ReadmitSession, RefusedCall,
    RevokeLease, SealingView, SessionView,
};
pub use workspace::{
    DeleteWorkspace, HoldWorkspace, ImportWorkspace, LayerReport, RepairWorkspace, RevertWorkspace,
    WorkspaceReport,
};

/// A problem, as `application/problem+json` (RFC 9457) with a stable code.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// `about:overfence:CODE`.
    #[serde(rename = "type")]
    pub kind: String,
    /// HTTP status.
    pub status: u16,
    /// The stable code.
    pub code: String,
    /// What the code means.
    pub title: String,
    /// What happened, why, and what to do next.
    pub detail: String,
    /// The present owner, generation, head and version, when the authority refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub current: Option<super::workspace::Current>,
    /// The external request that stands in the way, or that was recorded all the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<RequestView>,
}

/// `workspace create`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateWorkspace {
    /// Its name.
    pub id: String,
    /// Who answers for it; the caller's user name if absent.
    #[serde(default)]
    pub owner: Option<String>,
    /// How to reach them; at most 256 bytes.
    #[serde(default, deserialize_with = "bounds::name")]
    pub contact: String,
    /// Selectors: at most 64, keys and values of at most 256 bytes.
    #[serde(default, deserialize_with = "bounds::labels")]
    pub labels: BTreeMap<String, String>,
    /// Host directories captured once as the first layers, lowest first. Absolute paths.
    #[serde(default)]
    pub lowers: Vec<PathText>,
}

/// A path as text; bytes that are not UTF-8 are written `\xNN` and a backslash `\\`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct PathText(pub String);

impl PathText {
    /// Escapes a path.
    pub fn of(path: &std::path::Path) -> Self {
        use std::os::unix::ffi::OsStrExt as _;
        let mut text = String::new();
        for chunk in path.as_os_str().as_bytes().utf8_chunks() {
            text.push_str(&chunk.valid().replace('\\', "\\\\"));
            for byte in chunk.invalid() {
                text.push_str(&format!("\\x{byte:02x}"));
            }
        }
        Self(text)
    }

    /// The path itself, or `None` for a malformed escape.
    pub fn path(&self) -> Option<std::path::PathBuf> {
        use std::os::unix::ffi::OsStringExt as _;
        let mut bytes = Vec::new();
        let mut rest = self.0.as_bytes();
        while let Some((&b, tail)) = rest.split_first() {
            rest = match (b, tail) {
                (b'\\', [b'\\', t @ ..]) => {
                    bytes.push(b'\\');
                    t
                }
                (b'\\', [b'x', hi, lo, t @ ..]) => {
                    let mut one = [0];
                    hex::decode_to_slice([*hi, *lo], &mut one).ok()?;
                    bytes.push(one[0]);
                    t
                }
                (b'\\', _) => return None,
                (other, t) => {
                    bytes.push(other);
                    t
                }
            };
        }
        Some(std::ffi::OsString::from_vec(bytes).into())
    }
}

/// A workspace.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct WorkspaceView {
    /// Its name.
    pub id: String,
    /// Who answers for it.
    pub owner: String,
    /// How to reach them.
    pub contact: String,
    /// Selectors.
    pub labels: BTreeMap<String, String>,
    /// Publications so far.
    pub version: u64,
    /// Layer diff ids, lowest first.
    #[schema(value_type = Vec<String>)]
    pub head: Vec<Digest>,
    /// The highest generation issued: the authoritative one.
    pub generation: u64,
    /// The highest generation that this host ever saw of it; what a repair has to accept at least.
    pub generation_seen: u64,
    /// The present or last lease.
    pub lease: Option<LeaseView>,
    /// Session that may write now.
    pub writer_session: Option<String>,
    /// Whether anybody may publish now.
    pub may_publish: bool,
    /// Why it is on HOLD, if it is.
    pub hold: Option<String>,
    /// Sessions of this host that no longer may publish and still hold bytes.
    pub suspect_sessions: Vec<String>,
    /// How far this host is with an upper for a session that is not open yet: while a bundle is applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<ProgressView>,
}

/// A lease.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct LeaseView {
    /// Its id.
    pub id: String,
    /// The workspace.
    pub workspace: String,
    /// The session.
    pub session: String,
    /// The host.
    pub host: String,
    /// Who holds it.
    pub owner: String,
    /// The fencing token.
    pub generation: u64,
    /// `ACTIVE`, `RELEASING`, `RELEASED`, `EXPIRED`, `REVOKED`.
    pub state: String,
    /// `process` or `beat`.
    #[schema(value_type = String)]
    pub holder: HolderKind,
    /// Time to live of a grant.
    pub ttl_ms: u64,
    /// Until the grant runs out, negative when it has; absent for a lease of another boot.
    pub remaining_ms: Option<i64>,
    /// Why it ended.
    pub why_ended: Option<String>,
}

/// A row of `workspace history`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct HistoryView {
    /// When.
    pub at: String,
    /// `created`, `publication`, `refusal`, `takeover`, `release`, ...
    pub kind: String,
    /// Generation concerned.
    pub generation: u64,
    /// Session concerned.
    pub session: Option<String>,
    /// Of a publication that was a revert, the version whose layers it published once more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reverts_to: Option<u64>,
    /// Everything else.
    #[schema(value_type = Object)]
    pub detail: serde_json::Value,
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;

    #[test]
    fn any_path_survives_the_text_form() {
        for bytes in [&b"/a b"[..], b"/a\\x41", b"/\xff\xfe\\", b"/x\ny:z,w", "/\u{e4}".as_bytes()]
        {
            let path = std::path::Path::new(std::ffi::OsStr::from_bytes(bytes));
            assert_eq!(PathText::of(path).path().as_deref(), Some(path), "{bytes:?}");
        }
        assert_eq!(PathText("/a\\q".into()).path(), None);
    }
}
