//! What the operator decides: `/etc/overfence/config.toml`, then `conf.d/*.toml` beside it in the
//! order of their names, then the environment. Later wins, key by key; a flag wins over all. An
//! unknown key is an error that names file and line: a policy that is misspelt is a policy that
//! does not hold.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use toml::Table;

use crate::model::backing::{MinFree, UpperKind};
use crate::model::head::Digest;
use crate::model::lease::checked_ttl;
use crate::model::limits::{Limits, Size};
use crate::model::session::{AfterDoubt, OnBusy, OnFence, OnSlowFreeze, Policy};

pub mod duration;
mod keys;
mod layers;

pub use keys::{default_toml, show};
pub use layers::Loaded;

/// Where the configuration is looked for when nobody says otherwise.
pub const PATH: &str = "/etc/overfence/config.toml";

/// Why a configuration is not taken.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("cannot read the configuration {path}; check that it exists and who may read it")]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A file says something that is not understood: bad syntax, unknown key, wrong type.
    #[error(
        "{path}:{line}: {message}; correct or remove it (`overfence config default` shows every key)"
    )]
    File {
        /// The file.
        path: PathBuf,
        /// Counts from 1.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// A variable of the environment is not understood.
    #[error("{variable} in the environment: {message}; correct or unset it")]
    Environment {
        /// Its name.
        variable: String,
        /// What is wrong.
        message: String,
    },
    /// A value that cannot be.
    #[error("{key} (from {origin}): {message}")]
    Value {
        /// The key, dotted.
        key: &'static str,
        /// The file or variable that set it, or `default`.
        origin: String,
        /// What is wrong and what to choose instead.
        message: String,
    },
}

/// The effective configuration. Spans are written with a unit, for instance `"30s"`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Everything durable of this host, 0700.
    pub state_dir: PathBuf,
    /// Sockets and whatever a boot may lose.
    pub runtime_dir: PathBuf,
    /// The API's socket.
    pub socket: PathBuf,
    /// Parent of the sessions' cgroups, relative to the cgroup2 root; without it the agent finds
    /// its place by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<PathBuf>,
    /// The highest generation of each workspace ever seen.
    pub high_water_file: PathBuf,
    /// Signed heads of the evidence chain.
    pub evidence_anchor_file: PathBuf,
    /// Record key and ticket key.
    pub keys_dir: PathBuf,
    /// Where exported bundles go.
    pub bundles_dir: PathBuf,
    /// MiB held back in `state_dir` for the agent on a full disk; 0 for none.
    pub reserve_mib: u64,
    /// Leases.
    pub lease: LeaseKeys,
    /// Fences.
    pub fence: FenceKeys,
    /// Preserved deltas.
    pub preserve: PreserveKeys,
    /// Checkpoints.
    pub checkpoint: CheckpointKeys,
    /// Opening sessions.
    pub open: OpenKeys,
    /// What commands run as.
    pub workload: WorkloadKeys,
    /// What a session may use at most, where its opener does not say.
    pub limits: Limits,
    /// Who may ask.
    pub api: ApiKeys,
}

/// `[lease]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LeaseKeys {
    /// Time to live of a grant, 1 s to 24 h.
    #[serde(with = "duration")]
    pub ttl: Duration,
    /// Longest life of a lease, however often renewed.
    #[serde(with = "duration")]
    pub max_lifetime: Duration,
}

/// `[fence]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FenceKeys {
    /// What becomes of the processes of a session that lost its lease.
    pub on_fence: OnFence,
    /// What to do when read-only is refused.
    pub on_busy: OnBusy,
    /// From the refusal to the kill under `on_busy = "kill"`.
    #[serde(with = "duration")]
    pub kill_after: Duration,
    /// From the refusal to the seal under `on_busy = "seal"`.
    #[serde(with = "duration")]
    pub seal_after: Duration,
    /// How long a freeze may take.
    #[serde(with = "duration")]
    pub freeze_deadline: Duration,
    /// What to do when it takes longer.
    pub on_slow_freeze: OnSlowFreeze,
    /// What to do with a session fenced only for doubt.
    pub after_doubt: AfterDoubt,
    /// Whether the lease gate is used, where the host has it.
    pub gate: GateUse,
    /// What becomes of writable shared mappings, where the lease gate is.
    pub shared_mappings: SharedMappings,
}

/// Whether the kernel compares each write with the lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GateUse {
    /// Where the host has it.
    #[default]
    Use,
    /// Not: the fence alone.
    Off,
}

/// Stores into a mapping are no calls: the lease gate does not see them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SharedMappings {
    /// They may be made; the freeze stops who stores into them.
    #[default]
    Freeze,
    /// They are refused (EACCES) from the start.
    Deny,
}

/// `[preserve]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PreserveKeys {
    /// How long a preserved delta is kept at least, in witnessed time.
    #[serde(with = "duration")]
    pub grace: Duration,
    /// Time after a start before grace deletes anything.
    #[serde(with = "duration")]
    pub min_notice: Duration,
    /// From one sweep to the next.
    #[serde(with = "duration")]
    pub sweep: Duration,
    /// From one reading of all stored layers to the next.
    #[serde(with = "duration")]
    pub scrub: Duration,
}

/// `[checkpoint]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointKeys {
    /// How long the agent speaks for a holder that it keeps frozen for a capture. A capture that takes
    /// longer goes on, and the holder's lease runs out a TTL later.
    #[serde(with = "duration")]
    pub max_freeze: Duration,
}

/// `[open]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OpenKeys {
    /// How long to wait for the former writer's freeze.
    #[serde(with = "duration")]
    pub predecessor_wait: Duration,
    /// What uppers lie in, where the opener does not say.
    pub upper: UpperKind,
    /// What an image holds at most, where the opener does not say.
    pub size: Size,
    /// How much of the state directory's file system an open leaves free.
    pub min_free: MinFree,
    /// The most sessions that are mounted at the same time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_sessions: Option<u64>,
}

/// `[workload]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkloadKeys {
    /// User that commands run as.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Which network they have.
    pub network: Network,
}

/// Which network commands have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// A namespace of its own with nothing but a loopback interface.
    Own,
    /// The host's: opens its abstract sockets and loopback services to the workload.
    Host,
}

/// `[api]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ApiKeys {
    /// Its members operate; that is equivalent to root.
    pub group: String,
    /// Its members read.
    pub view_group: String,
    /// Loopback address of a TCP listener for /metrics and /healthz.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics_listen: Option<SocketAddr>,
}

impl Default for Config {
    fn default() -> Self {
        let (state_dir, runtime_dir) =
            (PathBuf::from("/var/lib/overfence"), PathBuf::from("/run/overfence"));
        Self {
            socket: runtime_dir.join("overfence.sock"),
            cgroup: None,
            high_water_file: state_dir.join("high-water"),
            evidence_anchor_file: state_dir.join("evidence-anchors"),
            keys_dir: state_dir.join("keys"),
            bundles_dir: state_dir.join("bundles"),
            reserve_mib: 16,
            lease: LeaseKeys::default(),
            fence: FenceKeys::default(),
            preserve: PreserveKeys::default(),
            checkpoint: CheckpointKeys::default(),
            open: OpenKeys::default(),
            workload: WorkloadKeys::default(),
            limits: Limits::default(),
            api: ApiKeys::default(),
            state_dir,
            runtime_dir,
        }
    }
}

impl Default for LeaseKeys {
    fn default() -> Self {
        use crate::model::lease::{MAX_LIFETIME_DEFAULT, TTL_DEFAULT};
        Self { ttl: TTL_DEFAULT, max_lifetime: MAX_LIFETIME_DEFAULT }
    }
}

impl Default for FenceKeys {
    fn default() -> Self {
        let Policy {
            on_fence,
            on_busy,
            kill_after,
            seal_after,
            freeze_deadline,
            on_slow_freeze,
            after_doubt,
            grace: _,
        } = Policy::default();
        Self {
            on_fence,
            on_busy,
            kill_after,
            seal_after,
            freeze_deadline,
            on_slow_freeze,
            after_doubt,
            gate: GateUse::default(),
            shared_mappings: SharedMappings::default(),
        }
    }
}

impl Default for PreserveKeys {
    fn default() -> Self {
        Self {
            grace: Policy::default().grace,
            min_notice: Duration::from_secs(3600),
            sweep: Duration::from_secs(30),
            scrub: Duration::from_secs(86_400),
        }
    }
}

impl Default for CheckpointKeys {
    fn default() -> Self {
        Self { max_freeze: Duration::from_secs(60) }
    }
}

impl Default for OpenKeys {
    fn default() -> Self {
        Self {
            predecessor_wait: Duration::from_secs(5),
            upper: UpperKind::Directory,
            size: Size(10 << 30),
            min_free: MinFree::Percent(1),
            max_sessions: None,
        }
    }
}

impl Default for WorkloadKeys {
    fn default() -> Self {
        Self { uid: 1000, gid: 1000, network: Network::Own }
    }
}

impl Default for ApiKeys {
    fn default() -> Self {
        Self {
            group: "overfence".into(),
            view_group: "overfence-view".into(),
            metrics_listen: None,
        }
    }
}

impl Config {
    /// Reads the configuration at `path`, or at [`PATH`], which may be absent; its drop-ins; and
    /// the environment.
    ///
    /// # Errors
    /// Something cannot be read, is not understood, or cannot be.
    pub fn load(path: Option<&Path>) -> Result<Self, Error> {
        Loaded::read(path, std::env::vars_os()).map(|loaded| loaded.config)
    }

    /// Names the effective configuration, as an authoriser (`policy:DIGEST`).
    pub fn digest(&self) -> Digest {
        // A table of a map sorts its keys, so that the text is the same wherever a key was set.
        let text = Table::try_from(self).map(|table| table.to_string()).unwrap_or_default();
        Digest(Sha256::digest(text.as_bytes()).into())
    }

    /// The rules under which sessions are opened.
    pub fn policy(&self) -> Policy {
        Policy {
            on_fence: self.fence.on_fence,
            on_busy: self.fence.on_busy,
            kill_after: self.fence.kill_after,
            seal_after: self.fence.seal_after,
            freeze_deadline: self.fence.freeze_deadline,
            on_slow_freeze: self.fence.on_slow_freeze,
            after_doubt: self.fence.after_doubt,
            grace: self.preserve.grace,
        }
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        for (key, path) in [
            ("state_dir", &self.state_dir),
            ("runtime_dir", &self.runtime_dir),
            ("socket", &self.socket),
            ("high_water_file", &self.high_water_file),
            ("evidence_anchor_file", &self.evidence_anchor_file),
            ("keys_dir", &self.keys_dir),
            ("bundles_dir", &self.bundles_dir),
        ] {
            if !path.is_absolute() {
                return Err((key, format!("{path:?} is not absolute; write it from the root")));
            }
        }
        if self.runtime_dir.starts_with(&self.state_dir)
            || self.state_dir.starts_with(&self.runtime_dir)
        {
            let why = format!("one of it and {:?} is in the other", self.state_dir);
            return Err((
                "runtime_dir",
                format!("{why}; the one is kept, the other ends with a boot"),
            ));
        }
        let plain = |part| matches!(part, std::path::Component::Normal(_));
        if let Some(cgroup) = &self.cgroup
            && (cgroup.as_os_str().is_empty() || !cgroup.components().all(plain))
        {
            let why = "is not below the cgroup2 root; write it without a leading slash and `..`";
            return Err(("cgroup", format!("{cgroup:?} {why}")));
        }
        checked_ttl(self.lease.ttl).map_err(|fault| ("lease.ttl", fault.to_string()))?;
        if self.lease.max_lifetime < self.lease.ttl {
            return Err(("lease.max_lifetime", "it is shorter than lease.ttl".into()));
        }
        for (key, span) in [
            ("fence.freeze_deadline", self.fence.freeze_deadline),
            ("preserve.sweep", self.preserve.sweep),
            ("preserve.scrub", self.preserve.scrub),
            ("checkpoint.max_freeze", self.checkpoint.max_freeze),
        ] {
            if span.is_zero() {
                return Err((key, "it is zero; choose a longer time".into()));
            }
        }
        if let Err(why) = crate::kernel::image::checked_size(self.open.size) {
            return Err(("open.size", why));
        }
        if self.open.max_sessions == Some(0) {
            return Err((
                "open.max_sessions",
                "no session could be opened; choose at least 1".into(),
            ));
        }
        if self.limits.pids == Some(0) {
            return Err(("limits.pids", "no process could run; choose at least 1".into()));
        }
        for (key, id) in [("workload.uid", self.workload.uid), ("workload.gid", self.workload.gid)]
        {
            if id == 0 {
                return Err((key, "commands do not run as the host's root; choose another".into()));
            }
            if id == crate::model::session::RunAs::NOBODYS {
                return Err((key, format!("{id} is no id; choose another")));
            }
        }
        match self.api.metrics_listen {
            Some(address) if !address.ip().is_loopback() => Err((
                "api.metrics_listen",
                format!("{address} is not a loopback address; use 127.0.0.1 or [::1]"),
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
