//! What a step asks for. Effects are idempotent: a crash is recovered by doing them again.

use serde::{Deserialize, Serialize};

use super::super::head::Digest;
use super::super::ids::PublicationKey;

/// Why a freeze is ours; stamped on the cgroup before the freeze.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Purpose {
    /// For the time of a capture.
    Checkpoint,
    /// The lease is lost.
    Fence,
    /// The keeper or the deadline timer found the deadline passed.
    Deadline,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "effect", rename_all = "snake_case")]
pub enum Effect {
    /// Stamp, `freeze=1`, re-read.
    Freeze {
        /// The stamp.
        purpose: Purpose,
    },
    /// Keeper's entry, `freeze=0`, re-read stamp and deadline, freeze again if either speaks
    /// against it.
    Thaw,
    /// Let the processes of a fenced session run on, if the lease gate stops all their writes.
    RunOn,
    /// Remount the superblock read-only and probe.
    ReadOnly,
    /// Remount it writable.
    ReadWrite,
    /// Set the immutable flag on what is in the upper.
    Seal,
    /// Take off every flag that a seal set, and ask whether writes work again.
    Unseal,
    /// Stop the image's file system, as a file system (FIFREEZE).
    FreezeUpper,
    /// Set it going again (FITHAW).
    ThawUpper,
    /// End the session's processes.
    Kill,
    /// Tell the authority that the lease is over.
    Revoke {
        /// Why.
        reason: String,
    },
    /// Upper to layer.
    Capture {
        /// For which publication.
        key: PublicationKey,
    },
    /// Make the layer while the session runs.
    Pack {
        /// For which publication.
        key: PublicationKey,
        /// Of the upper as it is, and not of what was gathered of it.
        live: bool,
    },
    /// Offer the layer to the authority.
    Publish {
        /// The key.
        key: PublicationKey,
        /// The layer.
        layer: Digest,
    },
    /// Find the commit of a key or bury it.
    Resolve {
        /// The key.
        key: PublicationKey,
        /// The layer.
        layer: Digest,
    },
    /// Tell the authority that the lease is about to be given back; it may still publish.
    Releasing,
    /// Give the lease back.
    Release,
    /// Umount and ask the kernel whether the superblock died.
    ProveGone,
    /// Remove directory, cgroup and keeper entry.
    Remove,
    /// Rewrite ticket and session.json for the workload.
    Show,
}

impl Effect {
    /// Effects whose intent must be durable before they are done (I3). Freezing is reversible
    /// and comes ahead of its record; a seal is reversible too, but only by who knows of it.
    pub const fn irreversible(&self) -> bool {
        match self {
            Self::Kill
            | Self::Revoke { .. }
            | Self::Publish { .. }
            | Self::Resolve { .. }
            | Self::Releasing
            | Self::Release
            | Self::ProveGone
            | Self::Remove
            | Self::ReadWrite
            | Self::Seal
            | Self::Unseal
            | Self::FreezeUpper
            | Self::ThawUpper
            | Self::RunOn
            | Self::Thaw => true,
            Self::Freeze { .. }
            | Self::ReadOnly
            | Self::Capture { .. }
            | Self::Pack { .. }
            | Self::Show => false,
        }
    }

    /// Effects that would wait for a stopped file system of the upper, or let others wait for it.
    pub const fn wants_a_running_upper(&self) -> bool {
        match self {
            Self::ReadOnly
            | Self::ReadWrite
            | Self::Seal
            | Self::Unseal
            | Self::Kill
            | Self::Thaw
            | Self::RunOn
            | Self::ProveGone
            | Self::Remove => true,
            Self::Freeze { .. }
            | Self::FreezeUpper
            | Self::ThawUpper
            | Self::Revoke { .. }
            | Self::Capture { .. }
            | Self::Pack { .. }
            | Self::Publish { .. }
            | Self::Resolve { .. }
            | Self::Releasing
            | Self::Release
            | Self::Show => false,
        }
    }

    /// The name of [`Effect::Pack`].
    pub const PACK: &str = "pack";
    /// The name of [`Effect::Resolve`].
    pub const RESOLVE: &str = "resolve";
    /// What a removal waits for, before it begins: that nobody reads the upper any more.
    pub const READERS: &str = "wait_for_readers";

    /// All names, for the test that each effect can be crashed at.
    pub const NAMES: &[&str] = &[
        "freeze",
        "thaw",
        "run_on",
        "read_only",
        "read_write",
        "seal",
        "unseal",
        "freeze_upper",
        "thaw_upper",
        "kill",
        "revoke",
        "capture",
        Self::PACK,
        "publish",
        Self::RESOLVE,
        "releasing",
        "release",
        "prove_gone",
        "remove",
        "show",
    ];

    /// Its name in failpoints, metrics and messages.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Freeze { .. } => "freeze",
            Self::Thaw => "thaw",
            Self::RunOn => "run_on",
            Self::ReadOnly => "read_only",
            Self::ReadWrite => "read_write",
            Self::Seal => "seal",
            Self::Unseal => "unseal",
            Self::FreezeUpper => "freeze_upper",
            Self::ThawUpper => "thaw_upper",
            Self::Kill => "kill",
            Self::Revoke { .. } => "revoke",
            Self::Capture { .. } => "capture",
            Self::Pack { .. } => Self::PACK,
            Self::Publish { .. } => "publish",
            Self::Resolve { .. } => Self::RESOLVE,
            Self::Releasing => "releasing",
            Self::Release => "release",
            Self::ProveGone => "prove_gone",
            Self::Remove => "remove",
            Self::Show => "show",
        }
    }
}
