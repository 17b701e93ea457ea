//! What all parts of the agent share: the configuration, the authority, the store, the sessions,
//! and the few things of the kernel that are held once a host.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use tokio::sync::Semaphore;

use super::agenda::Agenda;
use super::census::Census;
use super::deadlines::Deadlines;
use super::effects::text;
use super::metrics::Metrics;
use super::paths::Paths;
use super::pulse::Pulse;
use super::slot::{Inner, Slot};
use crate::authority::Authority;
use crate::config::Config;
use crate::kernel::cgroup::{self, Cgroup};
use crate::kernel::deadlines::{Deadline, Table};
use crate::kernel::events::CgroupEvents;
use crate::kernel::gone::{Gone, Probe, UnmountWatch, index_probe};
use crate::kernel::limits;
use crate::model::facts::Proof;
use crate::model::ids::{BootId, HostId, SessionId, WorkspaceId};
use crate::model::limits::Limits;
use crate::model::session::{Session, State};
use crate::model::time::BootNs;
use crate::store::Store;
use crate::upper::remove::SessionDirs;
use crate::upper::store::LayerStore;

/// Images that are synced at the same time.
const IMAGES: usize = 8;

/// What the API is told of the sockets inside sessions.
#[derive(Debug)]
pub enum SessionSocket {
    /// One to serve; it takes the place of an earlier one of the session.
    Made {
        /// Whose.
        session: SessionId,
        /// Bound, and not blocking.
        listener: std::os::unix::net::UnixListener,
    },
    /// The session is no more.
    Gone {
        /// Which.
        session: SessionId,
    },
}

/// Shared by all threads and tasks of the agent.
pub struct Host {
    /// The effective configuration.
    pub config: Config,
    /// Where things are.
    pub paths: Paths,
    /// This host.
    pub id: HostId,
    /// This boot.
    pub boot: BootId,
    /// The host's durable state.
    pub store: Arc<Store>,
    /// Who decides.
    pub authority: Arc<dyn Authority>,
    /// Captured layers.
    pub layers: LayerStore,
    /// The agent's deadline timer.
    pub deadlines: Deadlines,
    /// When each lease is to be looked at for its renewal.
    pub(super) renewals: Mutex<Agenda>,
    /// Watches overlays until their superblocks die.
    pub gone: GoneProver,
    /// Watches the sealed cgroups.
    pub events: CgroupEvents,
    /// Has the kernel compare each write with its session's lease, where it can.
    pub(super) gate: super::gate::HostGate,
    /// Counters.
    pub metrics: Metrics,
    /// Whether the agent's own parts go round.
    pub pulse: Pulse,
    /// Whether killing and deleting stop.
    pub(super) breaker: super::breaker::Shared,
    /// Long work that is under way.
    pub(super) under_way: super::under_way::UnderWay,
    /// Where blocking work is run.
    pub runtime: tokio::runtime::Handle,
    pub(super) sockets: tokio::sync::mpsc::UnboundedSender<SessionSocket>,
    pub(super) state: Mutex<HostState>,
    sessions: RwLock<BTreeMap<SessionId, Arc<Slot>>>,
    census: Mutex<Census>,
    table: Mutex<Table>,
    _claim: OwnedFd,
    /// One turn for operations that sync the file system of all uppers in directories; see `effects`.
    pub(super) sync: Arc<Semaphore>,
    /// Turns for those that sync one image alone: each has its own session's worker to itself, and
    /// this only bounds the threads that wait.
    pub(super) image_sync: Arc<Semaphore>,
    /// Opens that were admitted and have no slot yet.
    pub(super) opening: Mutex<usize>,
    /// Turns for reading whole uppers for somebody who only looks.
    pub(super) diffs: Arc<Semaphore>,
    /// Held while layers are removed, or copied into a backup.
    keeping: Mutex<()>,
    /// Held while a slice is looked at and taken.
    slices: Mutex<()>,
    stopping: AtomicBool,
    draining: AtomicBool,
}

/// What changes and is shown.
#[derive(Debug, Default)]
pub struct HostState {
    /// Everything stale has `freeze=1` written.
    pub ready: bool,
    /// Why the authority does not answer, if it does not.
    pub authority_trouble: Option<String>,
    /// The last reconcile in a line.
    pub reconcile: String,
    /// Bytes in preserved deltas at the last sweep.
    pub preserved_bytes: u64,
    /// Sessions that were closed since the last sweep.
    pub closed: u64,
    /// A revert's answer was lost: it is asked for at each tick, not at each sweep only.
    pub lost_revert: bool,
    /// When old publications were last forgotten.
    pub pruned: Option<BootNs>,
}

/// What [`Host::new`] is made of.
pub struct Parts {
    /// See [`Host::config`].
    pub config: Config,
    /// See [`Host::paths`].
    pub paths: Paths,
    /// See [`Host::boot`].
    pub boot: BootId,
    /// See [`Host::store`].
    pub store: Arc<Store>,
    /// See [`Host::authority`].
    pub authority: Arc<dyn Authority>,
    /// See [`Host::layers`].
    pub layers: LayerStore,
    /// The keeper's table.
    pub table: Table,
    /// What makes this the only agent of the cgroups: see [`crate::kernel::cgroup::claim`].
    pub claim: OwnedFd,
    /// See [`Host::runtime`].
    pub runtime: tokio::runtime::Handle,
    /// Takes session sockets.
    pub sockets: tokio::sync::mpsc::UnboundedSender<SessionSocket>,
}

impl Host {
    /// Puts the parts together; starts nothing.
    pub fn new(parts: Parts) -> crate::kernel::Result<Arc<Self>> {
        let Parts { config, paths, boot, store, authority, layers, table, claim, runtime, sockets } =
            parts;
        let gate = super::gate::HostGate::raise(config.fence.gate);
        Ok(Arc::new(Self {
            id: store.host(),
            gone: GoneProver { watch: UnmountWatch::new()?, scratch: paths.state.clone() },
            config,
            paths,
            boot,
            store,
            authority,
            layers,
            deadlines: Deadlines::new()?,
            renewals: Mutex::default(),
            events: CgroupEvents::new()?,
            gate,
            metrics: Metrics::new(),
            pulse: Pulse::default(),
            breaker: super::breaker::Shared::default(),
            under_way: super::under_way::UnderWay::default(),
            runtime,
            sockets,
            state: Mutex::default(),
            sessions: RwLock::default(),
            census: Mutex::default(),
            table: Mutex::new(table),
            _claim: claim,
            sync: Arc::new(Semaphore::new(1)),
            image_sync: Arc::new(Semaphore::new(IMAGES)),
            opening: Mutex::default(),
            diffs: Arc::new(Semaphore::new(2)),
            keeping: Mutex::new(()),
            slices: Mutex::new(()),
            stopping: AtomicBool::new(false),
            draining: AtomicBool::new(false),
        }))
    }

    /// Whether the agent is to stop.
    pub fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Ends the threads and tasks; sessions and their mounts go on.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.deadlines.wake();
    }

    /// Whether sessions are being taken down and new ones refused.
    pub fn draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Refuses new sessions from now on, as long as this agent runs.
    pub fn start_draining(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    /// A session by its id.
    pub fn slot(&self, id: SessionId) -> Option<Arc<Slot>> {
        self.sessions.read().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    /// All sessions that are not closed.
    pub fn slots(&self) -> Vec<Arc<Slot>> {
        self.sessions.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// The sessions of a workspace that are not closed.
    pub fn slots_of(&self, workspace: &WorkspaceId) -> Vec<Arc<Slot>> {
        let sessions = self.sessions.read().unwrap_or_else(PoisonError::into_inner);
        sessions.values().filter(|slot| slot.workspace == *workspace).cloned().collect()
    }

    /// Layers that something names are neither removed nor copied into a backup by anybody else.
    pub fn keeping(&self) -> MutexGuard<'_, ()> {
        self.keeping.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn census(&self) -> MutexGuard<'_, Census> {
        self.census.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sessions that a tick may have something to do for.
    pub fn unsettled(&self) -> Vec<Arc<Slot>> {
        let ids = self.census().unsettled().clone();
        ids.into_iter().filter_map(|id| self.slot(id)).collect()
    }

    /// How many sessions are in each state that any is in.
    pub fn counts(&self) -> BTreeMap<State, u64> {
        self.census().counts().clone()
    }

    /// Keeps [`Host::unsettled`] and [`Host::counts`] true; to be called after each step.
    pub fn settle(&self, session: &Session) {
        self.census().update(session.id, session.state, session.is_settled());
    }

    /// Adds a session.
    pub fn adopt(&self, slot: &Arc<Slot>) {
        let inner = slot.lock();
        self.census().enter(slot.id, inner.session.state, inner.session.is_settled());
        drop(inner);
        self.sessions
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(slot.id, Arc::clone(slot));
    }

    /// Drops a closed session.
    pub fn forget(&self, id: SessionId) {
        let known = self.sessions.write().unwrap_or_else(PoisonError::into_inner).remove(&id);
        self.census().strike(id);
        if known.is_some() {
            self.shown().closed += 1;
        }
    }

    /// The keeper's table; the agent alone writes it.
    pub fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The turn for taking a slice.
    pub fn slice_turn(&self) -> MutexGuard<'_, ()> {
        self.slices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is shown of the host.
    pub fn shown(&self) -> MutexGuard<'_, HostState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers whether the authority answers.
    pub fn authority_answers(&self, trouble: Option<&str>) {
        self.shown().authority_trouble = trouble.map(str::to_owned);
    }

    /// Enters a deadline into the keeper's table.
    pub fn enter_deadline(&self, s: &Session, deadline: BootNs) -> Result<(), String> {
        let entry = Deadline {
            session: s.id,
            generation: s.generation,
            deadline,
            cgroup: self.paths.cgroup(s),
        };
        self.table().set(&entry).map_err(text)
    }

    /// When leases are to be looked at.
    pub fn renewals(&self) -> MutexGuard<'_, Agenda> {
        self.renewals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the keeper and the timer a deadline that moved, and that there is a lease to renew.
    pub fn refresh_deadline(&self, inner: &Inner) {
        let (deadline, _) = inner.deadline();
        if let Err(fault) = self.enter_deadline(&inner.session, deadline) {
            tracing::error!(OVERFENCE_SESSION = %inner.session.id, OVERFENCE_WORKSPACE = %inner.session.workspace, "the keeper's entry was not written: {fault}");
        }
        self.gate_follow(inner, deadline);
        self.deadlines.set(inner.session.id, deadline);
        self.renewals().set_if_none(inner.session.id, inner.lease.next);
    }

    /// Makes a session's cgroup with its limits, and its parent if that was removed: systemd does
    /// so with the directory of a unit that has no process.
    ///
    /// A slice that systemd removed is made again, too: whatever may be started in it later then
    /// meets the freeze.
    pub fn make_cgroup(&self, s: &Session) -> crate::kernel::Result<Cgroup> {
        let path = self.paths.cgroup(s);
        if s.external.is_some() {
            cgroup::make_parent(&path)?;
            return Cgroup::create(&path);
        }
        self.enable_limits(&s.limits)?;
        self.events.add_parent(&self.paths.cgroups)?;
        let cgroup = Cgroup::create(&path)?;
        limits::apply(cgroup.path(), &s.limits)?;
        Ok(cgroup)
    }

    /// Watches the cgroup that a session has now, in place of one that it had.
    pub fn watch_cgroup(&self, id: SessionId, cgroup: &Cgroup) {
        self.events.remove(id);
        if let Err(fault) = self.events.add(id, cgroup) {
            tracing::error!(OVERFENCE_SESSION = %id, "its cgroup is not watched: {}", text(fault));
        }
    }

    /// Has what limits need in the sessions' cgroups, or says what is missing.
    pub fn enable_limits(&self, limits: &Limits) -> crate::kernel::Result<()> {
        let parent = &self.paths.cgroups;
        cgroup::make_parent(parent)?;
        limits::enable(&self.paths.hierarchy, parent, limits)
    }

    /// A session's cgroup as the hierarchy names it, as in `/proc/PID/cgroup`.
    pub fn cgroup_in_hierarchy(&self, s: &Session) -> String {
        let path = self.paths.cgroup(s);
        let below = path.strip_prefix(&self.paths.hierarchy).unwrap_or(&path);
        format!("/{}", below.display())
    }
}

/// Proves that an overlay's superblock died.
pub struct GoneProver {
    watch: UnmountWatch,
    scratch: PathBuf,
}

impl GoneProver {
    /// Watches a mounted overlay.
    pub fn watch(&self, root: &std::os::fd::OwnedFd, id: SessionId) -> crate::kernel::Result<()> {
        self.watch.watch(root, id)
    }

    /// Whether a watched overlay is not seen to die in this time. One that is not watched is not
    /// known to live.
    pub fn is_alive(&self, id: SessionId, patience: Duration) -> crate::kernel::Result<bool> {
        let watched = self.watch.is_watched(id);
        Ok(watched && self.watch.wait_gone(id, patience)? == Gone::StillAlive)
    }

    /// Looks for a session's end no more.
    pub fn forget(&self, id: SessionId) {
        self.watch.forget(id);
    }

    /// By the watch if there was one while it was mounted, else by a probe mount of the upper.
    pub fn prove(
        &self,
        id: SessionId,
        dirs: &SessionDirs,
        patience: Duration,
    ) -> crate::kernel::Result<Option<Proof>> {
        let watched = self.watch.is_watched(id);
        let wait = if watched { patience } else { Duration::ZERO };
        let proof = match self.watch.wait_gone(id, wait)? {
            Gone::Gone(proof) => Some(proof),
            Gone::StillAlive if watched => None,
            Gone::StillAlive => match index_probe(&dirs.upper, &self.scratch)? {
                Probe::Dead(proof) => Some(proof),
                Probe::Alive => None,
            },
        };
        if proof.is_some() {
            self.watch.forget(id);
        }
        Ok(proof)
    }
}
