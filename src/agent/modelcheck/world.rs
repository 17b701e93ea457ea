//! What the model is made of: hosts with a kernel, a durable record and a volatile agent, one
//! authority, and the requests on the way between them. Times and contents are small numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use super::Bug;
use super::begins::Ask;
use crate::model::facts::{Fact, Proof};
use crate::model::head::{Digest, HeadAt};
use crate::model::ids::{
    BootId, Generation, HostId, LeaseId, Owner, PublicationKey, RequestKey, SessionId, WorkspaceId,
};
use crate::model::lease::{HolderKind, Lease};
use crate::model::request::Request;
use crate::model::session::{Disposition, OnBusy, Policy, RunAs, Session, Stage, State, Work};
use crate::model::step::{Effect, Event, Purpose, Step, step};
use crate::model::time::{BootInstant, BootNs};
use crate::model::workspace::{Acquire, Acquired, KeyState, Publish, Refusal, Workspace};

/// The local deadline comes this much ahead of the end of a grant.
pub const MARGIN: u8 = 1;

/// Which property an action broke; the others are read off the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Invariant {
    /// One publisher.
    I1,
    /// Generations never go back and are never given twice.
    I2,
    /// A fact reported is true; a fence is not undone without a new generation.
    I3,
    /// No uncommitted byte is deleted.
    I4,
    /// Nothing is removed before the superblock is gone.
    I6,
}

/// A shared value whose hash is taken once: a state has many successors that leave it as it is.
#[derive(Clone, Debug)]
pub struct Shared<T>(Arc<T>, u64);

impl<T: Hash> Shared<T> {
    pub fn new(value: T) -> Self {
        let mut hasher = DefaultHasher::new();
        value.hash(&mut hasher);
        Self(Arc::new(value), hasher.finish())
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: PartialEq> PartialEq for Shared<T> {
    fn eq(&self, other: &Self) -> bool {
        self.1 == other.1 && (Arc::ptr_eq(&self.0, &other.0) || self.0 == other.0)
    }
}

impl<T: Eq> Eq for Shared<T> {}

impl<T> Hash for Shared<T> {
    fn hash<H: Hasher>(&self, to: &mut H) {
        self.1.hash(to);
    }
}

/// How often each thing may still happen.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Left {
    pub crashes: u8,
    pub reboots: u8,
    pub lost: u8,
    pub acquisitions: u8,
    pub keys: [u8; 2],
    pub renewals: u8,
    pub fences: u8,
    pub discards: u8,
    pub foreign: u8,
    pub slow: u8,
    pub busy: u8,
    pub writes: u8,
    pub begins: [u8; 2],
}

/// What the kernel knows of a session: its cgroup, its overlay, its upper.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Kernel {
    pub alive: bool,
    /// The command was started: only after ACTIVE was recorded.
    pub started: bool,
    /// `cgroup.freeze`.
    pub wish: bool,
    /// `cgroup.events: frozen`.
    pub frozen: bool,
    pub stamp: Option<(Purpose, Generation)>,
    pub read_only: bool,
    /// Flags of ours are on the upper; they outlive a reboot.
    pub sealed: bool,
    pub mounted: bool,
    /// The upper: how many writes it has seen. It outlives a reboot.
    pub content: u8,
    pub directory: bool,
    /// The generation under which the writer runs.
    pub runs_under: Generation,
    /// The highest generation that was fenced here; nothing may thaw it.
    pub fenced: Generation,
    /// Root thawed it by hand; the next freeze ends that.
    pub meddled: bool,
}

impl Kernel {
    /// The command starts, and writes at once.
    pub fn start(&mut self) {
        self.started = true;
        self.content = self.content.max(1);
    }

    pub fn can_write(&self) -> bool {
        self.alive
            && self.started
            && self.mounted
            && !self.frozen
            && !self.read_only
            && !self.sealed
    }
}

/// A request to the authority or its answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Wire {
    Renew {
        lease: LeaseId,
        generation: Generation,
        sent: u8,
        orphan: bool,
    },
    RenewAnswer {
        sent: u8,
        granted: bool,
    },
    Publish {
        wish: Publish,
        orphan: bool,
    },
    PublishAnswer {
        key: PublicationKey,
        answer: Result<HeadAt, Refusal>,
    },
    /// No request: a layer is made of what was gathered, beside everything else.
    Packed {
        key: PublicationKey,
        layer: Digest,
    },
}

/// One host: its agent (volatile), what it recorded (durable), its kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Host {
    /// The running agent's session; `None` while the agent is down or has none.
    pub live: Option<Shared<Session>>,
    /// The record as last persisted.
    pub saved: Option<Shared<Session>>,
    /// Whether the agent runs.
    pub up: bool,
    /// Effects not done yet.
    pub effects: Vec<Effect>,
    pub wire: Vec<Wire>,
    /// The deadline in the agent's memory.
    pub deadline: u8,
    /// The keeper's entry: generation and deadline.
    pub entry: Option<(Generation, u8)>,
    pub kernel: Kernel,
    /// What a watch saw and the agent has not heard yet.
    pub notice: Option<Event>,
    pub boot: u8,
    /// The upper as it was gathered; it goes with the agent.
    pub gathered: Option<(PublicationKey, u8)>,
    /// Planted bug: the upper as it was while processes lived.
    pub early: Option<u8>,
    /// Publications sent from here whose outcome the agent was not told.
    pub open: BTreeSet<PublicationKey>,
    /// Publications whose failure was reported to the session.
    pub failed: BTreeSet<PublicationKey>,
    /// Begins of external requests on their way.
    pub asks: Vec<Ask>,
}

/// Everything.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    pub now: u8,
    /// A grant lasts this long on the authority's clock.
    pub ttl: u8,
    pub workspace: Shared<Workspace>,
    pub keys: BTreeMap<PublicationKey, KeyState>,
    /// The authority's rows of external requests.
    pub requests: Vec<Request>,
    /// Keys under which something went out, for good.
    pub sent: BTreeSet<RequestKey>,
    pub hosts: [Host; 2],
    pub left: Left,
    /// Leases seen run out: they may never publish again.
    pub lapsed: BTreeSet<Generation>,
    /// Sessions are opened with `on_busy = seal`, at once.
    pub seal: bool,
    /// Which property an action broke.
    pub broken: Option<Invariant>,
}

pub fn proof() -> Proof {
    Proof { asked: String::new(), answer: String::new(), at: BootNs(0), took_us: 0 }
}

pub fn boot(n: u8) -> BootId {
    BootId(Uuid::from_u128(n.into()))
}

/// The layer that `host`'s upper makes after `content` writes.
pub fn layer(host: usize, content: u8) -> Digest {
    let mut raw = [0; 32];
    raw[0] = u8::try_from(host).unwrap_or(u8::MAX);
    raw[1] = content;
    Digest(raw)
}

pub fn owner() -> Owner {
    "o".parse().unwrap()
}

impl World {
    /// Host 0 runs a session under generation 1, or, when `empty`, has none yet; host 1 wants the
    /// workspace.
    pub fn new(left: Left, ttl: u8, empty: bool, seal: bool) -> Self {
        let id: WorkspaceId = "w".parse().unwrap();
        let mut world = Self {
            now: 0,
            ttl,
            workspace: Shared::new(Workspace::new(id, owner(), None)),
            keys: BTreeMap::new(),
            requests: Vec::new(),
            sent: BTreeSet::new(),
            hosts: [Host { up: true, ..Host::default() }, Host { up: true, ..Host::default() }],
            left,
            lapsed: BTreeSet::new(),
            seal,
            broken: None,
        };
        if empty {
            return world;
        }
        let got = world.acquire(0, None, None).expect("a new workspace is free");
        world.admit(0, got);
        world.hosts[0].effects.clear();
        world.build(0);
        world.feed(0, Event::Opened, None);
        world.persist(0);
        world
    }

    /// Makes the record durable; a command starts only under a durable ACTIVE.
    pub fn persist(&mut self, host: usize) {
        let h = &mut self.hosts[host];
        h.saved.clone_from(&h.live);
        if h.saved.as_ref().is_some_and(|s| s.state == State::Active) && h.kernel.mounted {
            h.kernel.start();
        }
    }

    /// The authority's clock.
    pub fn instant(&self) -> BootInstant {
        BootInstant { boot: boot(0), ns: BootNs(u64::from(self.now)) }
    }

    pub fn break_unless(&mut self, holds: bool, which: Invariant) {
        if !holds {
            self.broken.get_or_insert(which);
        }
    }

    /// Asks the authority for a lease.
    pub fn acquire(
        &mut self,
        host: usize,
        only_at: Option<HeadAt>,
        bug: Option<Bug>,
    ) -> Option<Acquired> {
        let n = u128::from(self.workspace.generation.0) + 1;
        let wish = Acquire {
            workspace: self.workspace.id.clone(),
            lease: LeaseId::from_u128(n),
            owner: owner(),
            host: HostId::from_u128(host as u128),
            session: SessionId::from_u128(host as u128),
            holder: HolderKind::Beat,
            ttl: Duration::from_nanos(self.ttl.into()),
            max_lifetime: Duration::from_secs(1),
            force: None,
            only_at,
            seen: Default::default(),
        };
        let (mut next, mut got) = self.workspace.acquire(&wish, &self.instant()).ok()?;
        if bug == Some(Bug::GenerationReused) && self.workspace.generation > Generation::NONE {
            next.generation = self.workspace.generation;
            got.lease.generation = next.generation;
            next.lease = Some(got.lease.clone());
        }
        let rises = next.generation > self.workspace.generation;
        self.break_unless(rises, Invariant::I2);
        self.workspace = Shared::new(next);
        Some(got)
    }

    /// A new session on `host`, its record made with the acquisition.
    pub fn admit(&mut self, host: usize, got: Acquired) {
        let Lease { id, generation, session, .. } = got.lease;
        let record = Shared::new(Session {
            id: session,
            workspace: self.workspace.id.clone(),
            owner: owner(),
            host: HostId::from_u128(host as u128),
            boot: boot(self.hosts[host].boot),
            lease: id,
            generation,
            holder: HolderKind::Beat,
            token: layer(0, 0),
            run_as: RunAs { uid: 1, gid: 1, mapped: false, host_network: false },
            limits: Default::default(),
            external: None,
            upper: Default::default(),
            ttl: Duration::from_nanos(self.ttl.into()),
            ends: BootNs(0),
            base: got.at.clone(),
            expected: got.at,
            own_layer: None,
            labels: BTreeMap::new(),
            policy: self.policy(),
            fence: crate::model::session::FenceWish::default(),
            state: State::Opening,
            work: None,
            facts: Default::default(),
            doubt: None,
            loss: None,
            holders: Vec::new(),
            busy_since: None,
            seal: false,
            upper_freeze: Default::default(),
            run_on: false,
            blockers: Vec::new(),
            altered: None,
            unknown: BTreeMap::new(),
            disposition: None,
            witnessed: Duration::ZERO,
            keep_until: None,
            tries: 0,
            trouble: None,
            seeded: None,
        });
        let deadline = self.now + self.ttl - MARGIN;
        let h = &mut self.hosts[host];
        h.live = Some(record.clone());
        h.saved = Some(record);
        h.deadline = deadline;
        h.effects = vec![Effect::Show];
    }

    fn policy(&self) -> Policy {
        let on_busy = if self.seal { OnBusy::Seal } else { OnBusy::Hold };
        Policy { on_busy, seal_after: Duration::ZERO, ..Policy::default() }
    }

    /// Mount, cgroup and ticket; the keeper's entry is there before the cgroup.
    pub fn build(&mut self, host: usize) {
        let h = &mut self.hosts[host];
        let Some(s) = &h.live else { return };
        h.entry = Some((s.generation, h.deadline));
        h.kernel = Kernel {
            alive: true,
            mounted: true,
            directory: true,
            runs_under: s.generation,
            ..Kernel::default()
        };
    }

    /// Feeds an event to the product's own state machine and queues what it wants done.
    pub fn feed(&mut self, host: usize, event: Event, bug: Option<Bug>) {
        let h = &mut self.hosts[host];
        let Some(live) = &h.live else { return };
        if let Event::Published { key, outcome } = &event {
            use crate::model::step::Published::{Committed, Refused, Unknown};
            match outcome {
                Committed { .. } => {
                    h.open.remove(key);
                }
                Refused { .. } => {
                    h.open.remove(key);
                    h.failed.insert(*key);
                }
                Unknown { .. } => {}
            }
        }
        let mut s = Session::clone(live);
        let before = s.generation;
        if bug == Some(Bug::WriterBeforeRecord) && event == Event::Opened {
            h.kernel.start();
        }
        let Step { effects, .. } = step(&mut s, &event);
        let after = s.generation;
        if bug == Some(Bug::RemoveBeforeGone) && effects == [Effect::ProveGone] {
            h.effects.push(Effect::Remove);
        }
        h.live = Some(Shared::new(s));
        for effect in effects {
            match effect {
                // A display, without consequence here.
                Effect::Show => {}
                e if h.effects.contains(&e) => {}
                e @ Effect::Freeze { purpose: Purpose::Fence } => h.effects.insert(0, e),
                e => h.effects.push(e),
            }
        }
        self.break_unless(after >= before, Invariant::I2);
    }

    /// Whether the session's facts are true, or a watch has a correction under way.
    pub fn facts_are_true(&self) -> bool {
        self.hosts.iter().all(|h| {
            let Some(s) = &h.live else { return true };
            let k = &h.kernel;
            let excused = h.notice.is_some();
            (!s.facts.has(Fact::Frozen) || k.frozen || !k.alive || excused)
                && (!s.facts.has(Fact::ReadOnly) || k.read_only || !k.mounted || excused)
                && (!s.facts.has(Fact::Sealed) || k.sealed || !k.directory)
                && (!s.facts.has(Fact::Killed) || !k.alive)
                && (!s.facts.has(Fact::Gone) || !k.mounted)
        })
    }

    /// A key reported failed is never committed; a key sent is known until its outcome is.
    pub fn unknown_is_kept(&self) -> bool {
        self.hosts.iter().all(|h| {
            let committed =
                |k: &PublicationKey| matches!(self.keys.get(k), Some(KeyState::Committed { .. }));
            let Some(s) = h.live.as_ref().or(h.saved.as_ref()) else { return true };
            let offered = match s.work {
                Some(
                    Work::Checkpoint { key, stage: Stage::Publishing { .. }, .. }
                    | Work::Close { key, stage: Stage::Publishing { .. }, .. },
                ) => Some(key),
                _ => None,
            };
            let known = |k: &PublicationKey| s.unknown.contains_key(k) || offered == Some(*k);
            !h.failed.iter().any(committed) && h.open.iter().all(known)
        })
    }

    /// No writer runs under a lease that the authority let lapse.
    pub fn stopped_in_time(&self) -> bool {
        let lapsed = |g: Generation| {
            self.lapsed.contains(&g)
                || self.workspace.lease.as_ref().is_some_and(|l| {
                    l.generation == g && l.state.may_publish() && l.expires.passed(&self.instant())
                })
        };
        self.hosts
            .iter()
            .all(|h| h.kernel.meddled || !(h.kernel.can_write() && lapsed(h.kernel.runs_under)))
    }

    /// Whether every write into the upper of `host` is in a committed layer, or was given up.
    pub fn may_remove(&self, host: usize) -> bool {
        let h = &self.hosts[host];
        let Some(s) = &h.live else { return false };
        let given_up = matches!(
            s.disposition,
            Some(Disposition::Discard { .. } | Disposition::Exported { .. } | Disposition::Grace)
        );
        let mine = layer(host, h.kernel.content);
        let committed = self
            .keys
            .values()
            .any(|k| matches!(k, KeyState::Committed { layer, .. } if *layer == mine));
        h.open.is_empty() && (given_up || h.kernel.content == 0 || committed || h.notice.is_some())
    }
}
