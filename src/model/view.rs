//! What the API takes and shows. Flat and stable: these names are the contract that scripts rely
//! on. Times are milliseconds unless the name says otherwise; `*_at` are RFC 3339.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::facts::{Blocker, Fact, Holder};
use super::head::{Digest, HeadAt};
use super::lease::HolderKind;
use super::limits::Limits;
use super::session::{CloseMode, OnBusy};
use super::slice::Slice;

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
    /// How to reach them.
    #[serde(default)]
    pub contact: String,
    /// Selectors.
    #[serde(default)]
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
    /// Everything else.
    #[schema(value_type = Object)]
    pub detail: serde_json::Value,
}

/// `session open`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OpenSession {
    /// The workspace to write.
    pub workspace: String,
    /// Create the workspace first if there is none.
    #[serde(default)]
    pub create: Option<CreateWorkspace>,
    /// Who writes; the caller's user name if absent.
    #[serde(default)]
    pub owner: Option<String>,
    /// Time to live of the lease, 1 s to 24 h; 30 s if absent.
    #[serde(default)]
    pub ttl_ms: Option<u64>,
    /// Longest life of the lease, however often renewed; 24 h if absent.
    #[serde(default)]
    pub max_lifetime_ms: Option<u64>,
    /// Whose life the lease follows; `beat` if absent.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub holder: Option<HolderKind>,
    /// The user the workload runs as, by number; the configured one if absent. 0 is mapped.
    #[serde(default)]
    pub uid: Option<u32>,
    /// Its group.
    #[serde(default)]
    pub gid: Option<u32>,
    /// Share the host's network.
    #[serde(default)]
    pub host_network: bool,
    /// What it may use at most: `memory` ("512M"), `pids`, `cpu` ("1.5"); as configured if absent.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub limits: Limits,
    /// The slice of a container engine with the systemd cgroup driver that becomes the session's
    /// cgroup: started, empty, and no other session's. What runs there is the engine's to confine.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub external: Option<Slice>,
    /// Revoke a live predecessor, and do not wait for its freeze.
    #[serde(default)]
    pub force: bool,
    /// How long to wait for the predecessor's freeze; 5 s if absent.
    #[serde(default)]
    pub wait_ms: Option<u64>,
    /// What to do on EBUSY.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub on_busy: Option<OnBusy>,
    /// From the EBUSY to the kill under `kill`.
    #[serde(default)]
    pub kill_after_ms: Option<u64>,
    /// Grace window for the delta.
    #[serde(default)]
    pub grace_ms: Option<u64>,
    /// Selectors.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

/// The answer to `session open`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Opened {
    /// The session.
    pub session: SessionView,
    /// The lease token: shown once, stored hashed.
    pub token: String,
    /// The signed mount ticket; public.
    pub ticket: String,
    /// Who wrote before, if anybody did.
    #[schema(value_type = Option<Object>)]
    pub predecessor: Option<super::workspace::Predecessor>,
}

/// A session.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct SessionView {
    /// Its id.
    pub id: String,
    /// What it writes.
    pub workspace: String,
    /// For whom.
    pub owner: String,
    /// `OPENING`, `ACTIVE`, `RELEASING`, `FENCING`, `FENCED`, `PRESERVED`, `DELETING`, `CLOSED`,
    /// `QUARANTINED`.
    pub state: String,
    /// The reconciler's class.
    pub class: String,
    /// Its lease.
    pub lease: String,
    /// Its fencing token.
    pub generation: u64,
    /// `process` or `beat`.
    #[schema(value_type = String)]
    pub holder: HolderKind,
    /// Time to live of a grant.
    pub ttl_ms: u64,
    /// What it may use at most: `memory` ("512M"), `pids`, `cpu` ("1.5").
    #[serde(default)]
    #[schema(value_type = Object)]
    pub limits: Limits,
    /// The engine's slice that is its cgroup, if it is not a sealed one; confinement (I10) is then
    /// not claimed.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub external: Option<Slice>,
    /// Until the local deadline, negative when it passed; absent once the lease is lost.
    pub remaining_ms: Option<i64>,
    /// Whether it may publish now, as far as this host knows.
    pub may_publish: bool,
    /// Why it is in doubt, if it is.
    pub doubt: Option<String>,
    /// Why its lease is lost, if it is.
    pub loss: Option<String>,
    /// Whether it may come back by itself: it was stopped for doubt alone, and policy resumes it
    /// unless somebody took the workspace.
    #[serde(default)]
    pub may_resume: bool,
    /// Proved facts, with what was asked and answered.
    pub facts: Vec<FactView>,
    /// The strongest fact that policy still wants and that is missing.
    pub missing: Option<String>,
    /// Who keeps the overlay from becoming read-only.
    #[schema(value_type = Vec<Object>)]
    pub holders: Vec<Holder>,
    /// Who does not freeze.
    #[schema(value_type = Vec<Object>)]
    pub blockers: Vec<Blocker>,
    /// What was mounted.
    #[schema(value_type = Object)]
    pub base: HeadAt,
    /// What it last saw committed.
    #[schema(value_type = Object)]
    pub expected: HeadAt,
    /// What is under way.
    #[schema(value_type = Option<Object>)]
    pub work: Option<super::session::Work>,
    /// The decision on its bytes.
    #[schema(value_type = Option<Object>)]
    pub disposition: Option<super::session::Disposition>,
    /// Publications without a known outcome.
    pub unknown: Vec<String>,
    /// Where the overlay is mounted.
    pub merged: PathText,
    /// Its upper.
    pub upper: PathText,
    /// Its sealed cgroup.
    pub cgroup: PathText,
    /// Processes in it now.
    pub processes: u64,
    /// Selectors.
    pub labels: BTreeMap<String, String>,
    /// The last thing that went wrong.
    pub trouble: Option<String>,
}

/// One proved fact.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct FactView {
    /// Its name.
    #[schema(value_type = String)]
    pub fact: Fact,
    /// What was asked of the kernel.
    pub asked: String,
    /// What it said.
    pub answer: String,
    /// CLOCK_BOOTTIME nanoseconds of the answer.
    pub boot_ns: u64,
    /// From request to answer, microseconds.
    pub took_us: u64,
}

/// The answer to `session checkpoint`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Checkpointed {
    /// `committed` or `unchanged`.
    pub outcome: String,
    /// The key.
    pub key: String,
    /// The layer, when there is one.
    #[schema(value_type = Option<String>)]
    pub layer: Option<Digest>,
    /// Version and head after it.
    #[schema(value_type = Object)]
    pub at: HeadAt,
    /// How long the session stood frozen for the capture.
    pub frozen_ms: u64,
}

/// `session close`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CloseSession {
    /// What happens to uncommitted bytes; without it a session that has some is not closed.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub mode: Option<CloseMode>,
}

/// `fence`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FenceSession {
    /// The strongest fact to go for; `read-only` if absent.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub to: Option<Fact>,
    /// What to do on EBUSY.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub on_busy: Option<OnBusy>,
    /// Why.
    #[serde(default)]
    pub reason: String,
    /// Wait until the fact is proved or policy has nothing left to do; milliseconds.
    #[serde(default)]
    pub wait_ms: Option<u64>,
}

/// `drain`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DrainHost {
    /// How long to wait for the last session; 60 s if absent.
    #[serde(default)]
    pub wait_ms: Option<u64>,
}

/// What became of a host's sessions.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Drained {
    /// How many left nothing to keep.
    pub closed: u64,
    /// Down: no process, cgroup or mount; their bytes are kept.
    pub preserved: Vec<SessionView>,
    /// Not down yet.
    pub left: Vec<SessionView>,
}

/// `lease revoke`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RevokeLease {
    /// Why.
    #[serde(default)]
    pub reason: String,
    /// Wait for `frozen`, milliseconds.
    #[serde(default)]
    pub wait_ms: Option<u64>,
}

/// The answer to `fence` and `lease revoke`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Fenced {
    /// `effective`, or `pending` until the kernel confirmed `frozen`.
    pub result: String,
    /// The session as it stands.
    pub session: SessionView,
}

/// `readmit`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReadmitSession {
    /// The person who takes the responsibility.
    pub authorised_by: String,
    /// Why.
    pub reason: String,
}

/// `lease beat` with the token.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Beat {
    /// The lease token.
    pub token: String,
}

/// What a beat tells.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct BeatAnswer {
    /// `active` or `doubt`.
    pub state: String,
    /// The fencing token.
    pub generation: u64,
    /// Until the local deadline.
    pub remaining_ms: i64,
}

/// `preserved export`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportSession {
    /// Directory to make; absent: below the state directory's `bundles/`.
    #[serde(default)]
    pub dest: Option<PathText>,
    /// Authorise removal once the bundle is verified.
    #[serde(default)]
    pub dispose: bool,
}

/// The answer to `preserved export`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Exported {
    /// Where the bundle is.
    pub path: PathText,
    /// Its manifest digest.
    #[schema(value_type = String)]
    pub digest: Digest,
    /// The layer in it.
    #[schema(value_type = Option<String>)]
    pub layer: Option<Digest>,
    /// Whether it was read back and verified.
    pub verified: bool,
    /// Whether it was taken of a frozen and read-only upper.
    pub stable: bool,
    /// The session afterwards.
    pub session: SessionView,
}

/// `preserved keep`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KeepSession {
    /// Keep at least this much longer, in witnessed time.
    pub for_ms: u64,
}

/// A preserved delta.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct PreservedView {
    /// The session.
    pub session: String,
    /// The workspace.
    pub workspace: String,
    /// Whose bytes.
    pub owner: String,
    /// The stale fencing token.
    pub generation: u64,
    /// Why the lease was lost.
    pub reason: String,
    /// Proved facts.
    #[schema(value_type = Vec<String>)]
    pub facts: Vec<Fact>,
    /// Bytes in the upper.
    pub bytes: u64,
    /// Entries in the upper.
    pub entries: u64,
    /// Until grace ends, in witnessed time.
    pub grace_left_ms: u64,
    /// What will happen next, in words.
    pub next: String,
    /// Not before this (RFC 3339): witnessed time runs no faster than the wall's. Absent when
    /// nothing happens by itself.
    pub not_before: Option<String>,
}

/// One thing `gc` did, would do, or may not do.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct GcItem {
    /// `session`, `layer`, `trash`, `directory`, `cgroup`.
    pub kind: String,
    /// Which.
    pub id: String,
    /// `remove`, `removed`, `keep`, `failed`.
    pub verdict: String,
    /// Why.
    pub reason: String,
    /// Bytes freed or to be freed.
    pub bytes: u64,
}

/// The answer to `gc`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct GcReport {
    /// Whether nothing was touched.
    pub dry_run: bool,
    /// Everything looked at.
    pub items: Vec<GcItem>,
    /// Bytes freed.
    pub bytes_freed: u64,
}

/// `evidence verify`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct EvidenceReport {
    /// Whether chain and anchors agree.
    pub ok: bool,
    /// Entries read.
    pub entries: u64,
    /// Hash of the last one.
    #[schema(value_type = Option<String>)]
    pub head: Option<Digest>,
    /// Anchors checked.
    pub anchors: u64,
    /// Sequence number of the newest anchor.
    pub newest_anchor: Option<u64>,
    /// The first thing that does not fit.
    pub fault: Option<String>,
}

/// `status`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct StatusView {
    /// Version of the agent.
    pub version: String,
    /// The host's id.
    pub host: String,
    /// Whether everything stale has `freeze=1` written.
    pub ready: bool,
    /// Whether sessions are being taken down and new ones refused.
    #[serde(default)]
    pub draining: bool,
    /// `sqlite`.
    pub authority: String,
    /// Whether the authority answers, or why not.
    pub authority_trouble: Option<String>,
    /// Sessions by state.
    pub sessions: BTreeMap<String, u64>,
    /// Workspaces on HOLD.
    pub held: Vec<String>,
    /// The last reconcile, in a line.
    pub reconcile: String,
    /// Where the state is kept.
    pub state_dir: PathText,
    /// Where the sessions' cgroups are.
    pub cgroup: PathText,
    /// Bytes in preserved deltas at the last sweep.
    pub preserved_bytes: u64,
    /// Room on the file system of the state directory.
    pub space: SpaceView,
}

/// Room on the file system of the state directory, in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SpaceView {
    /// What root can still write.
    pub free: u64,
    /// Held back for the agent now.
    pub reserve: u64,
    /// To be held back; 0 when that is switched off.
    pub reserve_wanted: u64,
    /// Whether new sessions are refused (`no_space`).
    pub short: bool,
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
