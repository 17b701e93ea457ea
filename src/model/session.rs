//! One mount session: what is recorded of it.

mod policy;

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use policy::{AfterDoubt, FenceWish, OnBusy, OnFence, OnSlowFreeze, Policy};

use super::backing::Backing;
use super::code::Code;
use super::facts::{Blocker, Fact, Facts, Holder};
use super::head::{Digest, HeadAt};
use super::ids::{
    BootId, Generation, HostId, LeaseId, Owner, PublicationKey, SessionId, WorkspaceId,
};
use super::lease::{Bound, HolderKind};
use super::limits::Limits;
use super::slice::Slice;
use super::time::{BootNs, millis};
use super::workspace::Seen;

/// Where a session stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum State {
    /// The lease is granted, mount and cgroup are being made.
    Opening,
    /// The writer may write.
    Active,
    /// Closing by the owner's wish, under its lease.
    Releasing,
    /// The lease is lost; `frozen` is not proved yet.
    Fencing,
    /// `frozen` is proved; policy has something left to do.
    Fenced,
    /// Stopped as far as policy goes; the upper is kept.
    Preserved,
    /// On the way to nothing: kill, umount, proof, removal.
    Deleting,
    /// Nothing is left on the host but the record.
    Closed,
    /// The record or the directory is not believed, or removal failed for good.
    Quarantined,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Opening => "OPENING",
            Self::Active => "ACTIVE",
            Self::Releasing => "RELEASING",
            Self::Fencing => "FENCING",
            Self::Fenced => "FENCED",
            Self::Preserved => "PRESERVED",
            Self::Deleting => "DELETING",
            Self::Closed => "CLOSED",
            Self::Quarantined => "QUARANTINED",
        })
    }
}

/// Who fenced a session whose stamp says so and whose record does not: a crash came between them.
pub const UNKNOWN: &str = "unknown";

/// Why the lease is lost.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "snake_case")]
pub enum Loss {
    /// The local deadline passed.
    Expired {
        /// Which bound set it.
        bound: Bound,
    },
    /// The deadline passed while it was unknown whether the lease still held.
    Doubt {
        /// What raised the doubt.
        cause: String,
    },
    /// Somebody revoked it.
    Revoked {
        /// Who.
        by: String,
        /// Their reason.
        reason: String,
    },
    /// The authority knows a newer generation, or another lease.
    Superseded {
        /// Newest generation.
        generation: Generation,
        /// Its owner.
        owner: Option<Owner>,
        /// The authority's word.
        code: Code,
        /// Who asked for that with `--force`, if somebody did so on this host.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        forced_by: Option<String>,
    },
    /// `overfence fence`.
    Operator {
        /// Who.
        by: String,
        /// Their reason.
        reason: String,
    },
    /// The host started again.
    Reboot,
    /// The owner closed the session and kept its bytes, or its last publication was refused.
    Closed {
        /// What stood in the way of a clean end.
        reason: String,
        /// The publication of all that was in the upper, if that its outcome is unknown is all that
        /// stood in the way.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        offered: Option<PublicationKey>,
    },
    /// A readmission could not be completed.
    ReadmitFailed {
        /// What failed.
        reason: String,
    },
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Expired { bound: Bound::Holder } => {
                f.write_str("the holder gave no sign of life for one TTL")
            }
            Self::Expired { bound: Bound::Grant } => {
                f.write_str("the lease was not renewed in time")
            }
            Self::Expired { bound: Bound::Lifetime } => {
                f.write_str("the lease reached its longest lifetime")
            }
            Self::Doubt { cause } => write!(f, "in doubt until the deadline: {cause}"),
            Self::Revoked { by, reason } => write!(f, "revoked by {by}: {reason}"),
            Self::Superseded { generation, owner, code, forced_by } => {
                let owner = owner.as_ref().map_or("nobody", |o| o.as_str());
                write!(f, "superseded by generation {generation} of {owner} ({code})")?;
                match forced_by {
                    Some(by) => write!(f, ", forced by {by}"),
                    None => Ok(()),
                }
            }
            Self::Operator { by, reason } => write!(f, "fenced by {by}: {reason}"),
            Self::Reboot => f.write_str("the host started again"),
            Self::Closed { reason, offered: _ } => write!(f, "closed: {reason}"),
            Self::ReadmitFailed { reason } => write!(f, "readmission failed: {reason}"),
        }
    }
}

/// How a close treats the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CloseMode {
    /// Publish them first.
    Checkpoint,
    /// Keep them as a preserved delta.
    Keep,
    /// Throw them away.
    Discard,
}

/// What is under way for a session that holds its lease.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "job", rename_all = "snake_case")]
pub enum Work {
    /// A checkpoint of a running session.
    Checkpoint {
        /// Its publication key.
        key: PublicationKey,
        /// How far it is.
        stage: Stage,
        /// Somebody thawed the session while its upper was read: the capture is worth nothing.
        tainted: bool,
    },
    /// A close.
    Close {
        /// What happens to the bytes.
        mode: CloseMode,
        /// Key of its publication, used with [`CloseMode::Checkpoint`].
        key: PublicationKey,
        /// How far it is.
        stage: Stage,
    },
    /// A readmitted session is made writable and thawed.
    Resume,
}

impl Work {
    /// The layer that it is to publish, once that was captured.
    pub fn layer(&self) -> Option<Digest> {
        match self {
            Self::Checkpoint { stage, .. } | Self::Close { stage, .. } => match stage {
                Stage::Thawing { layer } => *layer,
                Stage::Publishing { layer } => Some(*layer),
                Stage::Stopping
                | Stage::Capturing
                | Stage::Gathered
                | Stage::Packing
                | Stage::Ending => None,
            },
            Self::Resume => None,
        }
    }
}

/// Stages of a checkpoint or close.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Waiting for `frozen` (checkpoint) or `populated 0` and read-only (close).
    Stopping,
    /// The upper is read.
    Capturing,
    /// All that makes its layer lies aside; the session is let run again.
    Gathered,
    /// The layer is made of that, and the session runs.
    Packing,
    /// The session is let run again; a layer that is to be published follows.
    Thawing {
        /// The layer.
        layer: Option<Digest>,
    },
    /// The layer is offered to the authority.
    Publishing {
        /// The layer.
        layer: Digest,
    },
    /// The lease is given back.
    Ending,
}

/// The owner's decision on a preserved delta, or what takes its place.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "by", rename_all = "snake_case")]
pub enum Disposition {
    /// A person gave the bytes up.
    Discard {
        /// Who.
        who: String,
    },
    /// The bytes are in a bundle that was read back and verified.
    Exported {
        /// Who.
        who: String,
        /// Manifest digest of the bundle.
        bundle: Digest,
    },
    /// The grace window is over.
    Grace,
    /// Nothing uncommitted was there.
    Clean,
    /// The session never opened; nobody could write.
    NeverOpened,
}

/// As whom a session's commands run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RunAs {
    /// User id, as seen inside.
    pub uid: u32,
    /// Group id, as seen inside.
    pub gid: u32,
    /// Whether ids are shifted by a user namespace; wanted for uid 0.
    pub mapped: bool,
    /// Whether the host's network is shared.
    pub host_network: bool,
}

impl RunAs {
    /// The id that means "leave it as it is" to setresuid(2): nobody's, and dangerous to ask for.
    pub const NOBODYS: u32 = u32::MAX;
}

/// Whether the file system of an image is stopped by us.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UpperFreeze {
    /// It goes.
    #[default]
    Off,
    /// It is to stand, from the intent on.
    On,
    /// It is to go again, until that is confirmed.
    Lifting,
}

/// Whose bytes a session began with, and who stands for that (I5).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Seeded {
    /// The session that wrote them.
    pub session: SessionId,
    /// Its generation.
    pub generation: Generation,
    /// Manifest digest of the bundle they came in; a readmission needs none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bundle: Option<Digest>,
    /// The person who took the responsibility, as they were named.
    pub authorised_by: String,
    /// Why.
    pub reason: String,
}

/// One mount session.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Session {
    /// Its id.
    pub id: SessionId,
    /// What it writes.
    pub workspace: WorkspaceId,
    /// For whom.
    pub owner: Owner,
    /// Where.
    pub host: HostId,
    /// The boot in which its mount and cgroup exist.
    pub boot: BootId,
    /// Its lease.
    pub lease: LeaseId,
    /// Its fencing token.
    pub generation: Generation,
    /// Whose life the lease follows.
    pub holder: HolderKind,
    /// sha256 of the lease token; the token itself is kept nowhere.
    pub token: Digest,
    /// As whom its commands run.
    pub run_as: RunAs,
    /// What they may use at most; records of before there were limits have none.
    #[serde(default)]
    pub limits: Limits,
    /// The slice that is its cgroup, where an engine with the systemd cgroup driver starts its
    /// processes. `None`: a sealed cgroup of the agent's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub external: Option<Slice>,
    /// What its upper lies in; records of before there were images say nothing.
    #[serde(default)]
    pub upper: Backing,
    /// Time to live of a grant.
    #[serde(rename = "ttl_ms", with = "millis")]
    pub ttl: Duration,
    /// The lease's end, however often renewed; CLOCK_BOOTTIME of `boot`.
    pub ends: BootNs,
    /// What is mounted.
    pub base: HeadAt,
    /// What it last saw committed; the publication predicate uses this.
    pub expected: HeadAt,
    /// Its own layer in `expected`, once it published.
    pub own_layer: Option<Digest>,
    /// Selectors.
    pub labels: BTreeMap<String, String>,
    /// The rules it was opened under.
    pub policy: Policy,
    /// How far its fence goes.
    #[serde(default)]
    pub fence: FenceWish,
    /// Where it stands.
    pub state: State,
    /// What is under way.
    pub work: Option<Work>,
    /// What the kernel confirmed of its fence.
    pub facts: Facts,
    /// Set from the first missed renewal until the next good one.
    pub doubt: Option<String>,
    /// Why its lease is lost.
    pub loss: Option<Loss>,
    /// Who kept the overlay from becoming read-only, at the last try.
    pub holders: Vec<Holder>,
    /// When that first happened.
    pub busy_since: Option<BootNs>,
    /// Flags of ours are, or may be, on the upper: from the intent of a seal until its end is
    /// confirmed. Nothing is thawed meanwhile.
    #[serde(default)]
    pub seal: bool,
    /// Whether the upper's file system is, or may be, stopped by us. Nothing that would wait for it
    /// is done meanwhile.
    #[serde(default)]
    pub upper_freeze: UpperFreeze,
    /// Policy has its processes run on, and the lease gate alone stops all that they would write.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub run_on: bool,
    /// Who did not freeze in time.
    pub blockers: Vec<Blocker>,
    /// What somebody changed in the upper, past the overlay, since the session was proved read-only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub altered: Option<String>,
    /// Publications without a known outcome, and the layer each offered. They are resolved at the
    /// authority, never sent again under another key (I7).
    pub unknown: BTreeMap<PublicationKey, Digest>,
    /// The decision on its bytes.
    pub disposition: Option<Disposition>,
    /// Witnessed time since it was preserved.
    #[serde(rename = "witnessed_ms", with = "millis")]
    pub witnessed: Duration,
    /// Kept at least until this much time is witnessed (`preserved keep`).
    #[serde(rename = "keep_until_ms")]
    pub keep_until: Option<u64>,
    /// Tries of the present removal that failed.
    pub tries: u32,
    /// The last thing that went wrong, in words.
    pub trouble: Option<String>,
    /// What it began with, if it did not begin empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seeded: Option<Seeded>,
}

impl Session {
    /// What a witness keeps of its workspace.
    pub fn seen(&self) -> Seen {
        Seen { generation: self.generation, version: self.expected.version }
    }

    /// What happens on EBUSY.
    pub fn on_busy(&self) -> OnBusy {
        self.fence.on_busy.unwrap_or(self.policy.on_busy)
    }

    /// Whether the upper is to be sealed now: it was asked for, or a writer has kept the overlay
    /// from becoming read-only for long enough.
    pub fn wants_seal(&self, now: BootNs) -> bool {
        let due = self.busy_since.is_some_and(|t| now.since(t) >= self.policy.seal_after);
        let wanted = self.fence.to == Fact::Sealed || (self.on_busy() == OnBusy::Seal && due);
        wanted && !self.facts.has(Fact::Sealed)
    }

    /// Whether its processes run on, or are to, after its fence: nobody wants more of them than that
    /// they do not write, and they reach no loop device through which they would.
    pub fn may_run_on(&self) -> bool {
        let over = self.seal || self.is_past_running() || self.has_loop();
        let fenced = matches!(self.state, State::Fenced | State::Preserved) && !over;
        self.run_on && fenced && self.fence.to == Fact::ReadOnly && self.facts.has(Fact::Gated)
    }

    /// Whether, at the last try for read-only, a loop device held a file of the overlay open: what is
    /// written into the device is the kernel's own write into the file, which the lease gate lets pass.
    pub fn has_loop(&self) -> bool {
        self.holders.iter().any(Holder::is_loop)
    }

    /// Whether all its processes are stopped: frozen, dead, or refused each write by the kernel.
    pub fn is_stopped(&self) -> bool {
        let frozen = self.facts.has(Fact::Frozen) || self.facts.has(Fact::Killed);
        frozen || self.may_run_on()
    }

    /// Whether the lease may still be renewed for it.
    pub fn holds_lease(&self) -> bool {
        match self.state {
            State::Opening | State::Active | State::Releasing => true,
            State::Fencing
            | State::Fenced
            | State::Preserved
            | State::Deleting
            | State::Closed
            | State::Quarantined => false,
        }
    }

    /// Whether new work (`exec`, `begin`, checkpoint) may start (I9).
    pub fn may_start_work(&self) -> Result<(), Code> {
        match (self.state, &self.doubt, &self.work) {
            (State::Active, Some(_), _) => Err(Code::Doubt),
            (State::Active, None, Some(Work::Resume)) => Err(Code::Busy),
            (State::Active, None, _) => Ok(()),
            (State::Fencing | State::Fenced | State::Preserved, ..) => Err(Code::LeaseLost),
            (
                State::Opening
                | State::Releasing
                | State::Deleting
                | State::Closed
                | State::Quarantined,
                ..,
            ) => Err(Code::WrongState),
        }
    }

    /// Whether the upper's bytes may be removed once the superblock is proved gone (I4).
    pub fn safe_to_delete(&self) -> bool {
        self.disposition.is_some() && self.unknown.is_empty()
    }

    /// Whether nothing but the end of grace keeps the bytes, and that is reached with so much `more`
    /// witnessed time.
    pub fn grace_is_over(&self, more: Duration) -> bool {
        self.unknown.is_empty() && self.witnessed.saturating_add(more) >= self.grace_ends()
    }

    /// The witnessed time at which grace ends.
    pub fn grace_ends(&self) -> Duration {
        self.policy.grace.max(Duration::from_millis(self.keep_until.unwrap_or(0)))
    }

    /// Whether it is yet open that this session, fenced only for doubt, comes back by policy: it may
    /// not be proved frozen so far.
    pub fn may_resume(&self) -> bool {
        let early = self.state == State::Fencing && !self.facts.has(Fact::Killed);
        let policy = self.policy.after_doubt == AfterDoubt::ResumeIfUnclaimed;
        let doubt = matches!(self.loss, Some(Loss::Doubt { .. })) && self.altered.is_none();
        policy && doubt && (early || self.readmittable().is_ok())
    }

    /// Whether the layer of this publication is made, while the session runs.
    pub fn packs(&self, publication: PublicationKey) -> bool {
        matches!(self.work, Some(Work::Checkpoint { key, stage: Stage::Packing, .. })
            if key == publication)
    }

    /// Whether what was gathered for this publication is wanted still.
    pub fn wants_gathered(&self, publication: PublicationKey) -> bool {
        self.packs(publication)
            || matches!(self.work, Some(Work::Checkpoint { key, stage: Stage::Gathered, .. })
                if key == publication)
    }

    /// Whether it is about to be thawed at the end of a capture.
    pub fn thaws(&self) -> bool {
        matches!(
            self.work,
            Some(Work::Checkpoint { stage: Stage::Gathered | Stage::Thawing { .. }, .. })
        )
    }

    /// Whether nothing is under way and nothing waits to be tried again: it only lives, or is over.
    pub fn is_settled(&self) -> bool {
        match self.state {
            State::Fencing
            | State::Fenced
            | State::Preserved
            | State::Releasing
            | State::Deleting => false,
            State::Active => self.work.is_none() && self.unknown.is_empty(),
            State::Opening | State::Closed | State::Quarantined => true,
        }
    }

    /// Whether this session, fenced only for doubt, may come back by policy. Upon an upper that
    /// somebody else changed a person lets it run, or nobody.
    pub fn resumable_by_policy(&self) -> bool {
        self.policy.after_doubt == AfterDoubt::ResumeIfUnclaimed
            && self.altered.is_none()
            && matches!(self.loss, Some(Loss::Doubt { .. }))
            && self.readmittable().is_ok()
    }

    /// Whether it can be readmitted as a new session, on what it left: its processes are gone, and
    /// nobody can write there any more.
    pub fn readmittable_anew(&self) -> Result<(), Code> {
        match self.state {
            State::Fenced | State::Preserved => {}
            State::Fencing => return Err(Code::Busy),
            State::Opening
            | State::Active
            | State::Releasing
            | State::Deleting
            | State::Closed
            | State::Quarantined => return Err(Code::WrongState),
        }
        if self.disposition.is_some() || self.external.is_some() || !self.is_past_running() {
            return Err(Code::WrongState);
        }
        if !self.unknown.is_empty() {
            return Err(Code::UnknownPublication);
        }
        let proved = self.facts.has(Fact::Gone) || self.facts.has(Fact::ReadOnly);
        if proved { Ok(()) } else { Err(Code::Busy) }
    }

    /// Whether nothing is left that could run on: it was killed, or is of an earlier boot.
    pub fn is_past_running(&self) -> bool {
        self.facts.has(Fact::Killed) || self.facts.has(Fact::Gone)
    }

    /// Whether a readmission is possible as far as this session goes.
    pub fn readmittable(&self) -> Result<(), Code> {
        match self.state {
            State::Fenced | State::Preserved => {}
            State::Fencing => return Err(Code::Busy),
            State::Opening
            | State::Active
            | State::Releasing
            | State::Deleting
            | State::Closed
            | State::Quarantined => return Err(Code::WrongState),
        }
        // A killed session has no process to run on, and one of another boot has no mount.
        if self.facts.has(Fact::Killed) || self.facts.has(Fact::Gone) || self.disposition.is_some()
        {
            return Err(Code::WrongState);
        }
        Ok(())
    }
}
