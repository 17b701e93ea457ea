//! Sessions as the API takes and shows them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{CreateWorkspace, PathText, bounds};
use crate::model::backing::UpperKind;
use crate::model::facts::{Blocker, Fact, Holder};
use crate::model::head::{Digest, HeadAt};
use crate::model::lease::HolderKind;
use crate::model::ledger::Unresolved;
use crate::model::limits::{Limits, Size};
use crate::model::session::{CloseMode, Disposition, OnBusy, Seeded, Work};
use crate::model::slice::Slice;
use crate::model::workspace::Predecessor;

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
    /// What its upper lies in: `directory`, or `image`, a file system of its own; as configured if
    /// absent.
    // An agent of before it knew images refuses what it does not know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub upper: Option<UpperKind>,
    /// What an image holds at most ("2G"); as configured if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub size: Option<Size>,
    /// The slice of a container engine with the systemd cgroup driver that becomes the session's
    /// cgroup: started, empty, and no other session's. What runs there is the engine's to confine.
    // An agent of before it knew slices refuses what it does not know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
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
    /// From the EBUSY to the seal under `seal`.
    #[serde(default)]
    pub seal_after_ms: Option<u64>,
    /// Grace window for the delta.
    #[serde(default)]
    pub grace_ms: Option<u64>,
    /// Selectors: at most 64, keys and values of at most 256 bytes.
    #[serde(default, deserialize_with = "bounds::labels")]
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
    pub predecessor: Option<Predecessor>,
    /// Publications and external requests that former writers left without a known outcome.
    #[serde(default)]
    #[schema(value_type = Vec<Object>)]
    pub unresolved: Vec<Unresolved>,
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
    /// The size of the image that its upper lies in ("2G"); absent for a directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub image: Option<Size>,
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
    /// Whether the kernel compares each of its writes with the lease; not told by older agents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate: Option<GateView>,
    /// The strongest fact that policy still wants and that is missing.
    pub missing: Option<String>,
    /// How far a seal, or its end, is: while one is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sealing: Option<SealingView>,
    /// How far work is that takes long, a seal among it: while some is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<ProgressView>,
    /// Who keeps the overlay from becoming read-only.
    #[schema(value_type = Vec<Object>)]
    pub holders: Vec<Holder>,
    /// Who does not freeze.
    #[schema(value_type = Vec<Object>)]
    pub blockers: Vec<Blocker>,
    /// What somebody changed in the upper, past the overlay, since it was proved read-only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub altered: Option<String>,
    /// What was mounted.
    #[schema(value_type = Object)]
    pub base: HeadAt,
    /// What it last saw committed.
    #[schema(value_type = Object)]
    pub expected: HeadAt,
    /// What is under way.
    #[schema(value_type = Option<Object>)]
    pub work: Option<Work>,
    /// The decision on its bytes.
    #[schema(value_type = Option<Object>)]
    pub disposition: Option<Disposition>,
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
    /// Fenced, its processes run on: the lease gate refuses each of their writes.
    #[serde(default)]
    pub runs_on: bool,
    /// Whose bytes it began with, if it did not begin empty: a bundle's, or a former session's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub seeded: Option<Seeded>,
}

/// The lease gate, as one session has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GateView {
    /// `complete`, `partial` or `absent`.
    pub state: String,
    /// Of a partial one: the ways to change a file that are not checked.
    pub missing: Vec<String>,
    /// Why it is absent; or why it goes on as an earlier agent put it up.
    pub why: Option<String>,
    /// A writable shared mapping was made, or may have been: stores into it pass the gate.
    pub shared_mappings: bool,
    /// Calls that were refused, by the way in which they would have changed a file.
    pub refused: BTreeMap<String, u64>,
    /// The last one that was told.
    pub last: Option<RefusedCall>,
    /// Whether this agent is the one of its host that is told; else counters are all that it has.
    pub told: bool,
    /// Refused calls of all sessions of the host that were to be told and reached nobody, since the
    /// gate was put up.
    pub lost: u64,
}

/// A call that the lease gate refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RefusedCall {
    /// When, nanoseconds on CLOCK_BOOTTIME.
    pub boot_ns: u64,
    /// The deadline that had passed, or when the lease was lost before it, nanoseconds on
    /// CLOCK_BOOTTIME; 0: not known. Ahead of `boot_ns` where a mapping was denied under a good lease.
    pub deadline: u64,
    /// The session's generation then.
    pub generation: u64,
    /// The way in which a file was to be changed.
    pub op: String,
    /// Process id on the host.
    pub pid: u32,
    /// The command's name.
    pub command: String,
    /// Inode number of the file or directory in the overlay.
    pub inode: u64,
}

/// A seal, or its end, under way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SealingView {
    /// `seal` or `unseal`.
    pub what: String,
    /// Files and directories that are done.
    pub done: u64,
    /// How many there are; 0 while they are counted.
    pub total: u64,
}

/// Long work under way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProgressView {
    /// `seal`, `unseal`, `capture`, `pack`, `compare`, `export`, `verify`, `seed` or `remove`; others may
    /// come.
    pub what: String,
    /// Bytes that are done: on disk for `capture`, `pack`, `compare` and `remove`, of the compressed
    /// layer for `export`, `verify` and `seed`.
    pub bytes: u64,
    /// Files, directories and other names that are done.
    pub entries: u64,
    /// How many bytes there are, by what was measured last; absent where that is not known without
    /// looking.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// How many entries there are, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_entries: Option<u64>,
    /// Milliseconds since it began.
    pub took_ms: u64,
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

/// `session checkpoint`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CheckpointSession {
    /// Without freezing the session; refused (`busy`) if anything in its upper changes meanwhile.
    #[serde(default)]
    pub live: bool,
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
    /// Why; at most 4,096 bytes.
    #[serde(default, deserialize_with = "bounds::reason")]
    pub reason: String,
    /// Wait until the fact is proved or policy has nothing left to do; milliseconds.
    #[serde(default)]
    pub wait_ms: Option<u64>,
}

/// `lease revoke`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RevokeLease {
    /// Why; at most 4,096 bytes.
    #[serde(default, deserialize_with = "bounds::reason")]
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
    /// The person who takes the responsibility; at most 256 bytes.
    #[serde(deserialize_with = "bounds::name")]
    pub authorised_by: String,
    /// Why; at most 4,096 bytes.
    #[serde(deserialize_with = "bounds::reason")]
    pub reason: String,
}

/// `bundle apply`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ApplyBundle {
    /// The bundle's directory, on the agent's host.
    pub bundle: PathText,
    /// The person who takes the responsibility; at most 256 bytes.
    #[serde(deserialize_with = "bounds::name")]
    pub authorised_by: String,
    /// Why; at most 4,096 bytes.
    #[serde(deserialize_with = "bounds::reason")]
    pub reason: String,
    /// The terms of the new session; `force` is refused.
    pub open: OpenSession,
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
