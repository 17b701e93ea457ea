//! Opening a session: acquire, make, show. Three durable steps and no more: the acquisition with
//! the intent and its evidence; the high-water mark; ACTIVE with its evidence. What fails is
//! rolled back to nothing through the same removal as everything else.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sha2::Digest as _;

use super::effects::{capture_upper, text};
use super::failure::{Caller, Failure};
use super::host::{Host, SessionSocket};
use super::slot::{LeaseClock, Slot, draft};
use crate::kernel::clock;
use crate::kernel::idmap::IdMap;
use crate::kernel::overlay::{self, Spec};
use crate::kernel::walk::Dir;
use crate::model::backing::Backing;
use crate::model::code::Code;
use crate::model::head::{Digest, HeadAt};
use crate::model::ids::{LeaseId, Owner, SessionId, WorkspaceId};
use crate::model::journal::Journal;
use crate::model::lease::{self, HolderKind};
use crate::model::ledger::Unresolved;
use crate::model::limits::Limits;
use crate::model::session::{FenceWish, Loss, Policy, RunAs, Seeded, Session, State, UpperFreeze};
use crate::model::slice::Slice;
use crate::model::step::Event;
use crate::model::view::OpenSession;
use crate::model::workspace::{Acquire, Acquired, Predecessor, Refusal};
use crate::upper::remove;
use crate::upper::store::LayerStore;

/// How long the record of an opened session may take; its lease runs out if it takes longer.
const DURABLE: Duration = Duration::from_secs(10);

/// A session that was opened.
pub struct Made {
    /// Its slot.
    pub slot: Arc<Slot>,
    /// The lease token.
    pub token: String,
    /// The signed ticket.
    pub ticket: String,
    /// Who wrote before.
    pub predecessor: Option<Predecessor>,
    /// What former writers left without a known outcome.
    pub unresolved: Vec<Unresolved>,
}

/// What a session begins with in place of an empty upper.
pub struct Seed {
    /// An upper of ours on the file system of the uppers; it is moved from there.
    pub upper: PathBuf,
    /// The version and head that it fits; granted at no other.
    pub at: HeadAt,
    /// The token of the former session, whose holder goes on with it.
    pub token: Option<Digest>,
    /// For the record.
    pub record: Seeded,
}

/// A checked wish.
pub struct Wish {
    workspace: WorkspaceId,
    owner: Owner,
    holder: HolderKind,
    ttl: Duration,
    max_lifetime: Duration,
    run_as: RunAs,
    limits: Limits,
    external: Option<Slice>,
    upper: Backing,
    policy: Policy,
    force: bool,
    wait: Duration,
    labels: BTreeMap<String, String>,
    seed: Option<Seed>,
}

impl Wish {
    /// Checks a request.
    pub fn check(host: &Host, by: &Caller, wish: OpenSession) -> Result<Self, Failure> {
        let bad = |e: &dyn std::fmt::Display| Failure::new(Code::BadRequest, e.to_string());
        let ttl = wish.ttl_ms.map_or(host.config.lease.ttl, Duration::from_millis);
        let ttl = lease::checked_ttl(ttl).map_err(|e| bad(&e))?;
        let uid = wish.uid.unwrap_or(host.config.workload.uid);
        let gid =
            wish.gid.unwrap_or(if wish.uid.is_some() { uid } else { host.config.workload.gid });
        if [uid, gid].contains(&RunAs::NOBODYS) {
            return Err(bad(&format!("uid {uid}, gid {gid}: {} is no id", RunAs::NOBODYS)));
        }
        let limits = match &wish.external {
            None => wish.limits.or(host.config.limits),
            Some(slice) => super::external::no_terms(slice, &wish)?,
        };
        // Before a lease is taken for a session that could not be bounded.
        host.enable_limits(&limits).map_err(|e| match &e {
            crate::kernel::Error::NoController { .. } => Failure::new(Code::Unsupported, text(e)),
            _ => Failure::new(Code::Internal, text(e)),
        })?;
        let upper = super::admission::upper(&host.config.open, wish.upper, wish.size)?;
        let mut policy = host.config.policy();
        if let Some(on_busy) = wish.on_busy {
            policy.on_busy = on_busy;
        }
        if let Some(ms) = wish.kill_after_ms {
            policy.kill_after = Duration::from_millis(ms);
        }
        if let Some(ms) = wish.seal_after_ms {
            policy.seal_after = Duration::from_millis(ms);
        }
        if let Some(ms) = wish.grace_ms {
            policy.grace = Duration::from_millis(ms);
        }
        let max_lifetime =
            wish.max_lifetime_ms.map_or(host.config.lease.max_lifetime, Duration::from_millis);
        if max_lifetime < ttl {
            let why =
                format!("a longest life of {max_lifetime:?} is shorter than the TTL of {ttl:?}");
            return Err(bad(&format!("{why}: choose a longer one, or a shorter TTL")));
        }
        Ok(Self {
            workspace: wish.workspace.parse().map_err(|e| bad(&e))?,
            owner: wish.owner.unwrap_or_else(|| by.owner()).parse().map_err(|e| bad(&e))?,
            holder: wish.holder.unwrap_or(HolderKind::Beat),
            ttl,
            max_lifetime,
            run_as: RunAs {
                uid,
                gid,
                mapped: uid == 0 || gid == 0,
                host_network: wish.host_network
                    || host.config.workload.network == crate::config::Network::Host,
            },
            limits,
            external: wish.external,
            upper,
            policy,
            force: wish.force,
            wait: wish.wait_ms.map_or(host.config.open.predecessor_wait, Duration::from_millis),
            labels: wish.labels,
            seed: None,
        })
    }

    /// The terms under which a session was opened, once more.
    pub fn again(host: &Host, s: &Session) -> Self {
        Self {
            workspace: s.workspace.clone(),
            owner: s.owner.clone(),
            holder: s.holder,
            ttl: s.ttl,
            max_lifetime: host.config.lease.max_lifetime,
            run_as: s.run_as,
            limits: s.limits,
            external: s.external.clone(),
            upper: s.upper,
            policy: s.policy.clone(),
            force: false,
            wait: host.config.open.predecessor_wait,
            labels: s.labels.clone(),
            seed: None,
        }
    }

    /// The same, with bytes to begin with.
    pub fn seeded(self, seed: Seed) -> Self {
        Self { seed: Some(seed), ..self }
    }
}

impl Host {
    /// Refuses on a full disk: what is begun there fails half way and takes the room that stopping others needs.
    pub fn refuse_when_short(&self) -> Result<(), Failure> {
        let space = self.store.reserve().space();
        if !space.short() {
            return Ok(());
        }
        let why = format!(
            "the file system of {} is full ({} bytes free, {} of {} held back for the agent): no \
             session is opened; remove what is not needed, for instance by `overfence preserved \
             discard` (`overfence preserved list` shows sizes)",
            self.paths.state.display(),
            space.free,
            space.held,
            space.wanted
        );
        Err(Failure::new(Code::NoSpace, why))
    }

    /// Opens a session. Blocks; call it on the blocking pool.
    pub fn open(self: &Arc<Self>, by: &Caller, wish: Wish) -> Result<Made, Failure> {
        self.refuse_when_short()?;
        self.not_draining()?;
        let admitted = self.admit(wish.upper)?;
        let turn = wish.external.as_ref().map(|slice| self.take_slice(slice)).transpose()?;
        let id = SessionId::fresh();
        let token = fresh_token()?;
        let sent = clock::now();
        let acquired = self.acquire(by, &wish, id, &token);
        let (session, acquired) = match acquired {
            Err(failure) if failure.code == Code::AuthorityUnavailable => {
                return self.refuse_when_short().and(Err(failure));
            }
            answer => answer?,
        };
        let clock = LeaseClock::granted(sent, wish.ttl, session.ends);
        let dirs = remove::SessionDirs::of(&self.paths.sessions, id, session.upper);
        let slot = Slot::new(session, clock, dirs, true);
        slot.lock().building = true;
        admitted.adopt(&slot);
        drop(turn);
        let built = self.note_mark(&slot).and_then(|marked| {
            let built = self
                .not_draining()
                .and_then(|()| self.fence_predecessors(&slot, &wish, by))
                .and_then(|()| self.build(&slot, &acquired.at, wish.seed.as_ref()))
                .and_then(|ticket| self.still_newest(&slot).map(|()| ticket));
            self.runtime.block_on(marked).and(built)
        });
        // From here on a rollback finds all there is, and nothing is made behind its back.
        slot.lock().building = false;
        match built {
            Ok(ticket) => {
                self.apply_here(&slot, Event::Opened, &by.to_string());
                // Nobody is told of a session, and nothing runs in it, before ACTIVE is durable.
                let (s, durable) = self.runtime.block_on(slot.wait_for(DURABLE, |_| true));
                if !durable {
                    let why = format!("the record of session {} could not be written", s.id);
                    return Err(Failure::new(Code::AuthorityUnavailable, why));
                }
                if s.state != State::Active {
                    return Err(super::handle::denied(&s, Code::LeaseLost));
                }
                let (predecessor, unresolved) = (acquired.predecessor, acquired.unresolved);
                Ok(Made { slot, token, ticket, predecessor, unresolved })
            }
            Err(failure) => {
                // Its lease is given back before anybody is told: who opens next is not to meet it.
                let failed = Event::OpenFailed { why: failure.message.clone() };
                self.apply_here(&slot, failed, "agent");
                self.refuse_when_short().and(Err(failure))
            }
        }
    }

    fn acquire(
        &self,
        by: &Caller,
        wish: &Wish,
        id: SessionId,
        token: &str,
    ) -> Result<(Session, Acquired), Failure> {
        let ask = Acquire {
            workspace: wish.workspace.clone(),
            lease: LeaseId::fresh(),
            owner: wish.owner.clone(),
            host: self.id,
            session: id,
            holder: wish.holder,
            ttl: wish.ttl,
            max_lifetime: wish.max_lifetime,
            force: wish.force.then(|| format!("taken over by {} with --force", wish.owner)),
            only_at: wish.seed.as_ref().map(|seed| seed.at.clone()),
            seen: self.store.marks().highest(&wish.workspace),
        };
        let mut made = None;
        let rider = |outcome: &Result<Acquired, Refusal>| match outcome {
            Ok(acquired) => {
                let session = self.session_of(wish, id, token, acquired);
                let mut detail = serde_json::json!({ "asked": ask, "granted": acquired });
                if let Some(slice) = &session.external {
                    detail["external"] =
                        serde_json::json!({ "slice": slice, "not_claimed": ["I10"] });
                }
                if let Some(seeded) = &session.seeded {
                    detail["seeded"] = serde_json::json!(seeded);
                }
                let entries = vec![draft("acquire", &session, &by.to_string(), detail)];
                made = Some(session.clone());
                Journal { sessions: vec![session], entries }
            }
            Err(refusal) => Journal { sessions: vec![], entries: vec![refused(by, &ask, refusal)] },
        };
        let acquired = self
            .authority
            .acquire(&ask, Box::new(rider))
            .map_err(|e| Failure::new(Code::AuthorityUnavailable, text(e)))?
            .inspect_err(|refusal| self.held_by_acquisition(&ask, refusal))?;
        let session =
            made.ok_or_else(|| Failure::new(Code::Internal, "the acquisition wrote no record"))?;
        Ok((session, acquired))
    }

    fn session_of(&self, wish: &Wish, id: SessionId, token: &str, acquired: &Acquired) -> Session {
        Session {
            id,
            workspace: wish.workspace.clone(),
            owner: wish.owner.clone(),
            host: self.id,
            boot: self.boot,
            lease: acquired.lease.id,
            generation: acquired.lease.generation,
            holder: wish.holder,
            token: wish.seed.as_ref().and_then(|seed| seed.token).unwrap_or(hash_token(token)),
            run_as: wish.run_as,
            limits: wish.limits,
            external: wish.external.clone(),
            upper: wish.upper,
            ttl: wish.ttl,
            ends: acquired.lease.ends.ns,
            base: acquired.at.clone(),
            expected: acquired.at.clone(),
            own_layer: None,
            labels: wish.labels.clone(),
            policy: wish.policy.clone(),
            fence: FenceWish::default(),
            state: State::Opening,
            work: None,
            facts: crate::model::facts::Facts::default(),
            doubt: None,
            loss: None,
            holders: vec![],
            busy_since: None,
            seal: false,
            upper_freeze: UpperFreeze::Off,
            run_on: false,
            blockers: vec![],
            altered: None,
            unknown: BTreeMap::new(),
            disposition: None,
            witnessed: Duration::ZERO,
            keep_until: None,
            tries: 0,
            trouble: None,
            seeded: wish.seed.as_ref().map(|seed| seed.record.clone()),
        }
    }

    /// Raises the generation's high-water mark; the future is ready when that is durable. The
    /// disk's time and the kernel's pass together: both are done before anything can be written.
    fn note_mark(
        &self,
        slot: &Slot,
    ) -> Result<impl Future<Output = Result<(), Failure>> + use<>, Failure> {
        let failed = |why| Failure::new(Code::AuthorityUnavailable, why);
        let store = Arc::clone(&self.store);
        let (workspace, seen) = (slot.workspace.clone(), slot.lock().session.seen());
        store.note_mark(&workspace, seen).map_err(|e| failed(text(e)))?;
        let raised = self.runtime.spawn_blocking(move || store.raise_mark(&workspace, seen));
        Ok(
            async move {
                raised.await.map_err(text).and_then(|done| done.map_err(text)).map_err(failed)
            },
        )
    }

    /// The former writers of the workspace on this host are stopped before the new one starts.
    fn fence_predecessors(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        wish: &Wish,
        by: &Caller,
    ) -> Result<(), Failure> {
        let own = slot.session();
        let former: Vec<_> = self
            .slots_of(&own.workspace)
            .into_iter()
            .filter(|other| other.lock().session.generation < own.generation)
            .collect();
        for other in &former {
            let loss = Loss::Superseded {
                generation: own.generation,
                owner: Some(own.owner.clone()),
                code: Code::StaleGeneration,
                forced_by: wish.force.then(|| by.to_string()),
            };
            self.apply(other, Event::LeaseLost { loss, revoke: false }, "agent");
            // One that runs on behind the gate does so no longer if the gate went meanwhile.
            super::gate::check(self, other);
        }
        if wish.force {
            return Ok(());
        }
        let wait = async {
            let until = tokio::time::Instant::now() + wish.wait;
            for other in &former {
                let left = until.saturating_duration_since(tokio::time::Instant::now());
                let stopped = |inner: &super::slot::Inner| {
                    if self.gate_stops(inner).is_ok() {
                        return true;
                    }
                    let s = &inner.session;
                    let over = matches!(s.state, State::Closed | State::Quarantined);
                    over || s.facts.has(crate::model::facts::Fact::Frozen)
                        || s.facts.has(crate::model::facts::Fact::Killed)
                };
                let (session, ok) = other.wait_for(left, stopped).await;
                if !ok {
                    let names: Vec<_> = session
                        .blockers
                        .iter()
                        .map(|b| format!("pid {} ({})", b.pid, b.command))
                        .collect();
                    return Err(Failure::new(
                        Code::PredecessorUnfenced,
                        format!(
                            "session {} of generation {} is not proved frozen after {:?} (held up by {}); wait, or use --force",
                            session.id,
                            session.generation,
                            wish.wait,
                            if names.is_empty() {
                                "nobody that can be named".to_owned()
                            } else {
                                names.join(", ")
                            }
                        ),
                    ));
                }
            }
            Ok(())
        };
        self.runtime.block_on(wait)
    }

    /// A takeover that came between our acquisition and our being known here did not see us to
    /// fence us: whoever is not the newest any more does not start. It raised the mark before it
    /// looked for us, and we are known before we look at the mark.
    fn still_newest(&self, slot: &Slot) -> Result<(), Failure> {
        let own = slot.session();
        if self.store.marks().highest(&own.workspace).generation == own.generation {
            return Ok(());
        }
        Err(super::handle::denied(&own, Code::StaleGeneration))
    }

    /// Directories, keeper's entry, cgroup, overlay, ticket: in this order, so that nothing can be
    /// written before it can be stopped.
    fn build(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        at: &HeadAt,
        seed: Option<&Seed>,
    ) -> Result<String, Failure> {
        let io = |doing: &'static str| {
            move |e: std::io::Error| Failure::new(Code::Internal, format!("cannot {doing}: {e}"))
        };
        let lowers = self.lowers(at)?;
        let s = slot.session();
        let dirs = remove::create(&self.paths.sessions, s.id, s.upper)
            .map_err(|e| Failure::new(e.code(), text(e)))?;
        super::witness::note(&dirs.root, &s).map_err(io("note the generation"))?;
        if let (Some(image), Some(size)) = (&dirs.image, s.upper.size()) {
            self.make_image(image, size.0)?;
        }
        super::show::prepare(&self.paths, s.id).map_err(io("make the run-time directory"))?;
        {
            let mut inner = slot.lock();
            // Without it the keeper would know nothing of what is about to run.
            let (deadline, _) = inner.deadline();
            self.enter_deadline(&inner.session, deadline)
                .map_err(|why| Failure::new(Code::Internal, why))?;
            self.refresh_deadline(&inner);
            let cgroup = self.make_cgroup(&s).map_err(|e| Failure::new(Code::Internal, text(e)))?;
            inner.cgroup = Some(Arc::new(cgroup));
        }
        match seed {
            None => self.give_root(&dirs.upper, &lowers, s.run_as)?,
            Some(seed) if dirs.image.is_some() => {
                crate::failpoint::fails("seed.copy.before")
                    .map_err(|e| io("copy the upper")(e.into()))?;
                self.copy_seed(&seed.upper, &dirs.upper)?;
                crate::failpoint::hit("seed.copy.after");
            }
            Some(seed) => {
                crate::failpoint::fails("seed.move.before")
                    .map_err(|e| io("move the upper")(e.into()))?;
                // It takes the place of an empty directory, or fails.
                std::fs::rename(&seed.upper, &dirs.upper).map_err(io("move the upper"))?;
                crate::failpoint::hit("seed.move.after");
            }
        }
        let spec = Spec {
            lowers,
            upper: dirs.upper.clone(),
            work: dirs.work.clone(),
            target: dirs.merged.clone(),
            mapped: s.run_as.mapped.then_some(IdMap {
                base: crate::workload::MAPPED_FIRST,
                count: crate::workload::MAPPED_COUNT,
            }),
        };
        // Before a path leads to it, so that no write can come ahead of the first check.
        let mounted = overlay::mount_with(&spec, |root| self.gate_enter(slot, root))
            .map_err(|e| Failure::new(Code::MountFailed, text(e)))?;
        self.hold_descriptors(slot, mounted).map_err(|e| Failure::new(Code::Internal, e))?;
        self.listen(s.id).map_err(io("listen on the session socket"))?;
        let inner = slot.lock();
        self.show_locked(&inner).map_err(io("write session.json"))?;
        self.issue_ticket(&inner).map_err(|e| Failure::new(Code::Internal, e))
    }

    /// Puts a seed into an image, another file system, where no rename leads: by way of a layer, as
    /// everything else that leaves an upper.
    fn copy_seed(&self, from: &Path, to: &Path) -> Result<(), Failure> {
        let failed = |e: crate::upper::Error| Failure::new(e.code(), text(e));
        let stop = || self.stopping();
        let layers = LayerStore::open(&from.with_file_name("copied")).map_err(failed)?;
        let taken = capture_upper(&layers, from, true, &stop).map_err(failed)?;
        let Some(taken) = taken else { return Ok(()) };
        let to = Dir::open(to).map_err(|e| Failure::new(Code::Internal, text(e)))?;
        layers.unpack_into(taken.diff_id, to.as_fd(), &stop).map_err(failed)
    }

    /// Starts watching a session's overlay and cgroup.
    pub fn hold_descriptors(&self, slot: &Slot, mounted: overlay::Mounted) -> Result<(), String> {
        self.gone.watch(&mounted.root, slot.id).map_err(text)?;
        let mut inner = slot.lock();
        if let Some(cgroup) = &inner.cgroup {
            self.events.add(slot.id, cgroup).map_err(text)?;
        }
        inner.s_dev = Some(mounted.s_dev);
        inner.mounted = Some(Arc::new(mounted));
        Ok(())
    }

    /// Makes the session's socket and hands it to the API.
    pub fn listen(&self, id: SessionId) -> std::io::Result<()> {
        // By descriptor: a socket's path has room for 107 bytes, and a run-time directory may be longer.
        let inside = std::fs::File::open(self.paths.inside_of(id))?;
        let path = PathBuf::from(format!("/proc/self/fd/{}/session.sock", inside.as_raw_fd()));
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let listener = std::os::unix::net::UnixListener::bind(&path)?;
        // Whoever is inside may speak for this session; the socket itself says which one it is.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666))?;
        listener.set_nonblocking(true)?;
        // Without an API (in shutdown) nobody takes it.
        let _ = self.sockets.send(SessionSocket::Made { session: id, listener });
        Ok(())
    }

    /// The read-only layers of a head, unpacked.
    fn lowers(&self, at: &HeadAt) -> Result<Vec<PathBuf>, Failure> {
        if at.head.0.is_empty() {
            return Ok(vec![self.paths.empty.clone()]);
        }
        self.layers.lowers(&at.head.0, &|| self.stopping()).map_err(|fault| match fault.code() {
            Code::LayerDamaged => self.of_layers(fault),
            _ => Failure::new(Code::MountFailed, text(fault)),
        })
    }

    /// The root of the merged tree: as the topmost layer has it, or the workload's own in an empty
    /// workspace, where nobody could write otherwise.
    fn give_root(&self, upper: &Path, lowers: &[PathBuf], run_as: RunAs) -> Result<(), Failure> {
        let failed = |e: String| {
            Failure::new(Code::Internal, format!("cannot set the owner of the upper: {e}"))
        };
        match lowers.last().filter(|top| **top != self.paths.empty) {
            Some(top) => {
                let open = |path: &Path| Dir::open(path).map_err(|e| failed(text(e)));
                let (top, upper) = (open(top)?, open(upper)?);
                crate::upper::copy_top(top.as_fd(), upper.as_fd()).map_err(|e| failed(text(e)))
            }
            None => std::os::unix::fs::chown(upper, Some(run_as.uid), Some(run_as.gid))
                .map_err(|e| failed(e.to_string())),
        }
    }
}

fn refused(by: &Caller, ask: &Acquire, refusal: &Refusal) -> crate::model::journal::Draft {
    crate::model::journal::Draft {
        kind: "acquire".to_owned(),
        workspace: Some(ask.workspace.clone()),
        session: None,
        generation: None,
        actor: by.to_string(),
        detail: serde_json::json!({ "asked": ask, "refused": refusal }),
    }
}

/// A lease token: 256 random bits, shown once.
fn fresh_token() -> Result<String, Failure> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)
        .map_err(|e| Failure::new(Code::Internal, format!("no random bytes: {e}")))?;
    Ok(hex::encode(bytes))
}

/// What is kept of a token.
pub fn hash_token(token: &str) -> Digest {
    Digest(sha2::Sha256::digest(token.as_bytes()).into())
}
