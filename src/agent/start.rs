//! From a configuration to a running agent.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::effects::text;
use super::handle::Agent;
use super::host::{Host, Parts, SessionSocket};
use super::paths::Paths;
use crate::authority::sqlite::SqliteAuthority;
use crate::config::Config;
use crate::kernel::deadlines::Table;
use crate::kernel::{cgroup, clock, ns, overlay, unit};
use crate::model::code::Code;
use crate::store::Store;
use crate::upper::store::LayerStore;

/// Real-time priority of the deadline timer, below the keeper's.
const PRIORITY: i32 = 10;

/// Why the agent did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// It mounts, freezes and kills.
    #[error("the agent needs root: start it as root, or by systemd")]
    NotRoot,
    /// Two would freeze each other's sessions, and set each other's deadlines.
    #[error(
        "another agent runs on {}: stop it first, or give this one a state directory, a runtime \
         directory and a cgroup of its own", path.display()
    )]
    InUse {
        /// The runtime directory, or the cgroup of its sessions.
        path: PathBuf,
    },
    /// A directory could not be made.
    #[error("cannot make {path}")]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A thread could not be started.
    #[error("cannot start the thread {name}")]
    Thread {
        /// Which.
        name: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The kernel cannot do it, or not there.
    #[error("this host cannot run it; `overfence doctor` shows what is missing")]
    Kernel(#[from] crate::kernel::Error),
    /// The state is in use, damaged, or not believed.
    #[error("the state directory cannot be used")]
    Store(#[from] crate::store::Error),
    /// Layers.
    #[error("the layer store cannot be used")]
    Upper(#[from] crate::upper::Error),
    /// Recovery of sessions.
    #[error("recovery failed: {0}")]
    Recovery(String),
}

impl StartError {
    /// The code that the command answers with.
    pub const fn code(&self) -> Code {
        match self {
            Self::NotRoot => Code::Denied,
            Self::InUse { .. } | Self::Store(crate::store::Error::Locked { .. }) => Code::Busy,
            _ => Code::Internal,
        }
    }
}

/// Starts the agent: when this returns, everything stale has `freeze=1` written. Session sockets
/// come out of the receiver for the API to serve.
pub async fn start(
    config: Config,
) -> Result<(Agent, tokio::sync::mpsc::UnboundedReceiver<SessionSocket>), StartError> {
    let runtime = tokio::runtime::Handle::current();
    let (sockets, served) = tokio::sync::mpsc::unbounded_channel();
    let host = tokio::task::spawn_blocking(move || prepare(config, runtime, sockets))
        .await
        .map_err(|e| StartError::Recovery(e.to_string()))??;
    for (name, body) in [
        ("deadlines", super::deadlines::run as fn(&Arc<Host>) -> crate::kernel::Result<()>),
        ("watch", super::watch::run),
        ("refusals", super::gate::run),
    ] {
        let host = Arc::clone(&host);
        let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            if name == "deadlines" {
                // Refused where the host gives no real-time time: the timer is then a few
                // milliseconds late under load.
                if let Err(fault) = crate::kernel::launch::schedule_fifo(PRIORITY) {
                    tracing::warn!("no real-time scheduling: {fault}");
                }
            }
            if let Err(fault) = body(&host) {
                // Without it no lease is enforced by the agent: end, and let the keeper and the
                // next agent take over.
                tracing::error!("{name}: {}", text(fault));
                std::process::abort();
            }
        });
        spawned.map_err(|source| StartError::Thread { name, source })?;
    }
    // Renewals have a runtime of their own: whatever waits for a disk takes no thread from them.
    let failed = |source| StartError::Thread { name: "renew", source };
    let renewals = tokio::runtime::Builder::new_current_thread().enable_time().build();
    let (renewals, renewing) = (renewals.map_err(failed)?, Arc::clone(&host));
    std::thread::Builder::new()
        .name("renew".to_owned())
        .spawn(move || renewals.block_on(super::renew::run(renewing)))
        .map_err(failed)?;
    tokio::spawn(super::sweep::run(Arc::clone(&host)));
    tokio::spawn(super::tell::run(Arc::clone(&host)));
    tokio::spawn(super::scrub::run(Arc::clone(&host)));
    host.shown().ready = true;
    Ok((Agent(host), served))
}

fn prepare(
    config: Config,
    runtime: tokio::runtime::Handle,
    sockets: tokio::sync::mpsc::UnboundedSender<SessionSocket>,
) -> Result<Arc<Host>, StartError> {
    if !rustix::process::geteuid().is_root() {
        return Err(StartError::NotRoot);
    }
    let boot = clock::boot_id()?;
    let parent = match &config.cgroup {
        Some(parent) => parent.clone(),
        None => unit::sessions_parent()?,
    };
    let paths = Paths::new(&config, &cgroup::find_root()?, &parent);
    make(&config.runtime_dir, 0o755)?;
    let table = one_agent(&config.runtime_dir, Table::create_or_open(&paths.deadlines))?;
    make(&paths.cgroups, 0o755)?;
    let claim = one_agent(&paths.cgroups, cgroup::claim(&paths.cgroups))?;
    make(&paths.state, 0o700)?;
    let files = super::paths::of_store(&config);
    let store = Arc::new(Store::open(&files, Arc::new(move || now(boot)))?);
    for (dir, mode) in [
        (&paths.sessions, 0o700),
        (&paths.trash, 0o700),
        (&paths.bundles, 0o700),
        (&paths.exports, 0o700),
        (&paths.empty, 0o755),
        (&paths.runtime, 0o700),
    ] {
        make(dir, mode)?;
    }
    match overlay::preflight(&paths.sessions, &[]) {
        // A full disk is no reason to leave the sessions that run without an agent.
        Err(fault) if fault.errno() == Some(rustix::io::Errno::NOSPC) => {
            tracing::error!("no session can be opened: {}", text(fault));
        }
        answer => answer?,
    }
    // Sessions that run go on all the same, and their leases are enforced.
    if let Some(why) = ns::mounts().trouble {
        tracing::error!("{why}");
    }
    // Before any session is mounted, so that the cell never holds one.
    ns::make_cell(&paths.cell, &paths.sessions)?;
    let parts = Parts {
        layers: LayerStore::open(&paths.layers)?,
        table,
        claim,
        authority: Arc::new(SqliteAuthority::new(Arc::clone(&store))),
        config,
        paths,
        boot,
        store,
        runtime,
        sockets,
    };
    let host = Host::new(parts)?;
    let started = host.recover().map_err(StartError::Recovery)?;
    tracing::info!(
        "adopted {} session(s), {} stale, {} unreadable",
        started.adopted,
        started.stale,
        started.unreadable
    );
    Ok(host)
}

fn now(boot: crate::model::ids::BootId) -> crate::model::time::BootInstant {
    crate::model::time::BootInstant { boot, ns: clock::now() }
}

fn one_agent<T>(path: &Path, answer: crate::kernel::Result<T>) -> Result<T, StartError> {
    answer.map_err(|fault| match fault.errno() {
        Some(rustix::io::Errno::AGAIN) => StartError::InUse { path: path.to_owned() },
        _ => fault.into(),
    })
}

fn make(path: &Path, mode: u32) -> Result<(), StartError> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
        .map_err(|source| StartError::Directory { path: path.to_owned(), source })
}
