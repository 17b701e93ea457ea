//! The rules of a fence: what a session was opened under, and what an operator may ask for instead.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::super::facts::Fact;
use super::super::time::millis;

/// What becomes of the processes of a session that lost its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnFence {
    /// They stay frozen.
    #[default]
    Freeze,
    /// They run on and read, once they are fenced, where the lease gate alone stops all their writes.
    ReadOnlyRun,
}

/// What to do when read-only is refused because a writer still holds a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnBusy {
    /// Stay frozen and go on trying.
    #[default]
    Hold,
    /// Seal the upper after `seal_after`, and go on trying.
    Seal,
    /// Kill after `kill_after`.
    Kill,
}

/// What to do when the freeze is not proved by its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnSlowFreeze {
    /// Keep `freeze=1` and go on watching.
    #[default]
    Wait,
    /// Kill.
    Kill,
}

/// What to do with a session that was fenced only for doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AfterDoubt {
    /// Readmit it if nobody else took the workspace.
    #[default]
    ResumeIfUnclaimed,
    /// Leave it fenced.
    Hold,
}

/// The rules a session was opened under.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Policy {
    /// See [`OnFence`].
    pub on_fence: OnFence,
    /// See [`OnBusy`].
    pub on_busy: OnBusy,
    /// From the EBUSY to the kill under `on_busy = kill`.
    #[serde(rename = "kill_after_ms", with = "millis")]
    pub kill_after: Duration,
    /// From the EBUSY to the seal under `on_busy = seal`.
    #[serde(rename = "seal_after_ms", with = "millis")]
    pub seal_after: Duration,
    /// How long a freeze may take before `on_slow_freeze` acts.
    #[serde(rename = "freeze_deadline_ms", with = "millis")]
    pub freeze_deadline: Duration,
    /// See [`OnSlowFreeze`].
    pub on_slow_freeze: OnSlowFreeze,
    /// See [`AfterDoubt`].
    pub after_doubt: AfterDoubt,
    /// How long a preserved delta is kept, in witnessed time.
    #[serde(rename = "grace_ms", with = "millis")]
    pub grace: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            on_fence: OnFence::Freeze,
            on_busy: OnBusy::Hold,
            kill_after: Duration::from_secs(3600),
            seal_after: Duration::from_secs(30),
            freeze_deadline: Duration::from_millis(500),
            on_slow_freeze: OnSlowFreeze::Wait,
            after_doubt: AfterDoubt::ResumeIfUnclaimed,
            grace: Duration::from_secs(72 * 3600),
        }
    }
}

/// How far one fence goes: an operator may ask for more or less than policy. Forgotten at a
/// readmission.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FenceWish {
    /// The strongest fact it goes for by itself.
    pub to: Fact,
    /// Instead of the policy's.
    pub on_busy: Option<OnBusy>,
}

impl Default for FenceWish {
    fn default() -> Self {
        Self { to: Fact::ReadOnly, on_busy: None }
    }
}
