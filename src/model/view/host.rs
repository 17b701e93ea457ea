//! What is kept and what the host has, as the API shows it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{PathText, SessionView};
use crate::model::facts::Fact;
use crate::model::head::Digest;

/// `drain`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DrainHost {
    /// How long to wait for the last session; 60 s if absent.
    #[serde(default)]
    pub wait_ms: Option<u64>,
}

/// `backup`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BackupHost {
    /// The directory to make. Absolute path.
    pub dest: PathText,
    /// Put both keys in, too.
    #[serde(default)]
    pub keys: bool,
}

/// A backup that was made and read back.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct BackupView {
    /// Where.
    pub path: PathText,
    /// Of which host.
    pub host: String,
    /// When, RFC 3339.
    pub time: String,
    /// Last entry of the evidence in it.
    pub entries: u64,
    /// Digest of its database.
    #[schema(value_type = String)]
    pub database: Digest,
    /// Layers in it.
    pub layers: u64,
    /// Bytes of its layers.
    pub bytes: u64,
    /// Whether both keys are in it.
    pub keys: bool,
    /// Layers that its database names and that are not in it: they are damaged or missing on the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOut>,
}

/// A layer that a backup lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LeftOut {
    /// Which.
    #[schema(value_type = String)]
    pub layer: Digest,
    /// What was found when the backup was taken.
    pub why: String,
}

/// A backup that was put in the place of the database.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct RestoredView {
    /// What was put back.
    pub backup: BackupView,
    /// Where the database that was there is now.
    pub replaced: Option<PathText>,
    /// Layers that were missing here and came from the backup.
    pub layers_added: u64,
    /// Workspaces put on HOLD at once, since high-water marks or anchors were missing here.
    pub held: u64,
    /// Layers that the database names now and that are neither in the backup nor whole here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<LeftOut>,
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

/// The breaker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BreakerView {
    /// Whether nothing is killed or removed now.
    pub open: bool,
    /// Since when (RFC 3339).
    pub since: Option<String>,
    /// Why.
    pub why: Option<String>,
    /// Leases lost within a minute when it opened.
    pub lost: u64,
    /// Of so many sessions that were let write.
    pub of: u64,
    /// It was opened by doubt alone, and closes once the authority has answered for each session in
    /// `waiting`; else `breaker reset` closes it.
    pub closes_by_itself: bool,
    /// Doubted sessions for which the authority has not answered since.
    pub waiting: Vec<String>,
}

/// `breaker reset`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResetBreaker {
    /// Why it may be closed; goes into the evidence.
    pub reason: String,
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
    /// The restores that the chain went through, oldest first.
    #[serde(default)]
    pub restores: Vec<RestoredChain>,
    /// Anchors that speak of entries which a restore replaced; they are kept.
    #[serde(default)]
    pub anchors_set_aside: u64,
    /// The first thing that does not fit.
    pub fault: Option<String>,
}

/// Where the chain goes on from a backup.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct RestoredChain {
    /// The entry that records the restore; those before it came from the backup.
    pub entry: u64,
    /// When, RFC 3339.
    pub time: String,
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
    /// Why the breaker is open: nothing is killed or removed. Absent while it is closed.
    #[serde(default)]
    pub breaker: Option<String>,
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
    /// The agent's mount namespace, as `/proc/PID/ns/mnt` names it.
    #[serde(default)]
    pub mount_namespace: String,
    /// Why the host does not see what sessions mount there. Absent if it does.
    #[serde(default)]
    pub mount_trouble: Option<String>,
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
