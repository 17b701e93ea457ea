//! Clients of an authority, as careful as they should be or less, and the history of what they did.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use overfence::authority::{Authority, NewWorkspace, Renewal, no_rider};
use overfence::model::code::Code;
use overfence::model::head::{Digest, HeadAt};
use overfence::model::ids::{
    BootId, Generation, HostId, LeaseId, PublicationKey, SessionId, Version, WorkspaceId,
};
use overfence::model::lease::{HolderKind, Lease, LeaseState};
use overfence::model::request::{Begin, Begun};
use overfence::model::time::{BootInstant, BootNs};
use overfence::model::workspace::{Acquire, Publish, Refusal, Workspace};
use stateright::semantics::{ConsistencyTester as _, LinearizabilityTester};

use super::spec::{Op, Ret, Spec};

/// How a client is wrong. Each must be caught.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// Publishes on whatever is current at that moment, instead of what it last saw.
    ReadsThenPublishes,
    /// Publishes under whatever lease is current.
    BorrowsTheLease,
    /// Takes its lease to be good without asking.
    RenewsByItself,
    /// Sends a publication again under another key when the answer is lost.
    SendsAgain,
    /// Begins under whatever lease is current.
    BeginsUnchecked,
    /// Shares a lease that somebody else holds.
    SharesALease,
    /// Tells what was current when it last looked.
    LooksOnce,
    /// Says that it is done before it is.
    AnswersEarly,
}

pub const BUGS: [Bug; 8] = [
    Bug::ReadsThenPublishes,
    Bug::BorrowsTheLease,
    Bug::RenewsByItself,
    Bug::SendsAgain,
    Bug::BeginsUnchecked,
    Bug::SharesALease,
    Bug::LooksOnce,
    Bug::AnswersEarly,
];

pub fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A history that several threads write.
pub struct History {
    tester: Mutex<LinearizabilityTester<u32, Spec>>,
    log: Mutex<Vec<String>>,
    names: Mutex<u32>,
}

impl History {
    pub fn new(through_an_agent: bool) -> Self {
        let tester = LinearizabilityTester::new(Spec::new(through_an_agent));
        Self { tester: Mutex::new(tester), log: Mutex::default(), names: Mutex::new(0) }
    }

    /// A name for a client; one whose answer was lost goes on under another.
    pub fn name(&self) -> u32 {
        let mut names = lock(&self.names);
        *names += 1;
        *names
    }

    pub fn asks(&self, name: u32, op: Op) {
        let mut tester = lock(&self.tester);
        lock(&self.log).push(format!("{name} asks {op:?}"));
        tester.on_invoke(name, op).unwrap();
    }

    pub fn told(&self, name: u32, ret: Ret) {
        let mut tester = lock(&self.tester);
        lock(&self.log).push(format!("{name} told {ret:?}"));
        tester.on_return(name, ret).unwrap();
    }

    /// Everybody may know of a grant.
    pub fn known(&self, name: u32, generation: u64) {
        self.asks(name, Op::Known { generation });
        self.told(name, Ret::Known);
    }

    pub fn fits(&self) -> bool {
        lock(&self.tester).is_consistent()
    }

    pub fn shown(&self) -> String {
        lock(&self.log).join("\n")
    }

    pub fn told_so_far(&self) -> usize {
        lock(&self.log).iter().filter(|line| line.contains(" told ")).count()
    }

    pub fn len(&self) -> usize {
        lock(&self.tester).len()
    }
}

/// A generator of numbers, the same for the same seed.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }
}

/// A clock that stands until somebody lets time go by.
#[derive(Clone, Default)]
pub struct Clock(std::sync::Arc<std::sync::atomic::AtomicU64>);

const TTL: Duration = Duration::from_secs(10);

impl Clock {
    pub fn store(&self) -> overfence::store::Clock {
        let at = self.clone();
        std::sync::Arc::new(move || {
            let ns = 1 + at.0.load(std::sync::atomic::Ordering::SeqCst);
            BootInstant { boot: BootId(uuid::Uuid::from_u128(1)), ns: BootNs(ns) }
        })
    }

    pub fn expire(&self) {
        self.0.fetch_add(2 * TTL.as_nanos() as u64, std::sync::atomic::Ordering::SeqCst);
    }
}

/// One round's workspace. `expire` lets time go by, longer than any lease, between two transactions:
/// a lease is judged once, with the writer's place held, and its commit is seen a little later.
pub struct Round<'a> {
    handles: &'a [&'a dyn Authority],
    expire: &'a (dyn Fn() + Sync),
    pub id: WorkspaceId,
    pub history: History,
    heads: Mutex<BTreeMap<u64, HeadAt>>,
}

impl<'a> Round<'a> {
    pub fn new(handles: &'a [&'a dyn Authority], expire: &'a (dyn Fn() + Sync), id: &str) -> Self {
        let id: WorkspaceId = id.parse().unwrap();
        let new = NewWorkspace {
            id: id.clone(),
            owner: "ann".parse().unwrap(),
            contact: String::new(),
            labels: BTreeMap::new(),
            layers: vec![],
        };
        handles[0].create(&new, no_rider()).unwrap().unwrap();
        let heads = Mutex::new(BTreeMap::from([(0, HeadAt::default())]));
        Self { handles, expire, id, history: History::new(false), heads }
    }

    fn learn(&self, at: &HeadAt) -> u64 {
        lock(&self.heads).insert(at.version.0, at.clone());
        at.version.0
    }

    /// The head of a version; of one that nobody was told of, none that fits.
    fn head(&self, version: u64) -> HeadAt {
        let version = Version(version);
        let known = lock(&self.heads).get(&version.0).cloned();
        known.unwrap_or(HeadAt { version, ..HeadAt::default() })
    }

    /// Clients take turns at the handles.
    fn authority(&self, name: u32) -> &'a dyn Authority {
        self.handles[name as usize % self.handles.len()]
    }

    fn current(&self) -> Workspace {
        self.handles[0].get(&self.id).unwrap().unwrap()
    }
}

/// One client with one thing in flight at a time.
pub struct Client<'a> {
    round: &'a Round<'a>,
    bug: Option<Bug>,
    dice: Dice,
    name: u32,
    lease: Option<Lease>,
    generation: u64,
    version: u64,
    looked: Option<Ret>,
    late: Option<Publish>,
    offered: Option<Op>,
    lost: bool,
}

impl<'a> Client<'a> {
    pub fn new(round: &'a Round<'a>, bug: Option<Bug>, seed: u64) -> Self {
        let (name, dice) = (round.history.name(), Dice::new(seed));
        let (lease, looked, late, offered) = (None, None, None, None);
        let (generation, version, lost) = (0, 0, false);
        Self { round, bug, dice, name, lease, generation, version, looked, late, offered, lost }
    }

    /// Does some of the things that clients do.
    pub fn run(&mut self, ops: usize) {
        for _ in 0..ops {
            let op = self.choose();
            self.round.history.asks(self.name, op);
            if self.dice.below(3) == 0 {
                std::thread::yield_now();
            }
            // At most one answer of a client is lost: each makes the search for an order longer.
            let lost = !self.lost && self.dice.below(12) == 0;
            if lost && self.dice.below(2) == 0 {
                // It never got there.
                self.forget();
                continue;
            }
            let before = (self.lease.clone(), self.generation, self.version);
            let ret = self.ask(op);
            if lost {
                // Nor does it know of what it was given.
                (self.lease, self.generation, self.version) = before;
                if let (Some(Bug::SendsAgain), Op::Publish { layer, .. }) = (self.bug, op) {
                    let at = self.round.current().at;
                    let key = self.key();
                    let wish = self.wish(self.own(), at, key, layer);
                    let _ = self.round.authority(self.name).publish(&wish, no_rider()).unwrap();
                }
                self.forget();
                continue;
            }
            self.round.history.told(self.name, ret);
        }
        if let Some(late) = self.late.take() {
            let _ = self.round.authority(self.name).publish(&late, no_rider()).unwrap();
        }
    }

    /// Nobody knows what became of it: the name stays with what is in flight.
    fn forget(&mut self) {
        self.lost = true;
        self.name = self.round.history.name();
    }

    fn key(&mut self) -> u128 {
        1 + u128::from(self.dice.below(u64::MAX))
    }

    fn choose(&mut self) -> Op {
        let (generation, expected) = (self.generation, self.version);
        if self.generation == 0 {
            return Op::Acquire { force: self.dice.below(2) == 0 };
        }
        match self.dice.below(12) {
            0 => Op::Acquire { force: true },
            1 => Op::Acquire { force: false },
            2 | 3 => Op::Renew { generation },
            4 => Op::Release { generation },
            5 => Op::Revoke { generation },
            6 => Op::Begin { generation, expected, key: u128::from(1 + self.dice.below(2)) },
            7 => Op::Look,
            8 if self.dice.below(3) == 0 => Op::Expire,
            _ => {
                // The same again under its key, answered or not, as long as it is the same lease's.
                if let Some(op @ Op::Publish { generation: by, .. }) = self.offered
                    && by == generation
                    && self.dice.below(3) == 0
                {
                    return op;
                }
                let layer = 1 + u8::try_from(self.dice.below(200)).unwrap();
                let op = Op::Publish { generation, expected, key: self.key(), layer };
                self.offered = Some(op);
                op
            }
        }
    }

    fn own(&self) -> Lease {
        self.lease.clone().unwrap()
    }

    fn wish(&self, lease: Lease, expected: HeadAt, key: u128, layer: u8) -> Publish {
        Publish {
            workspace: self.round.id.clone(),
            lease: lease.id,
            generation: lease.generation,
            session: lease.session,
            expected,
            key: PublicationKey::from_u128(key),
            layer: Digest([layer; 32]),
            whole: None,
            reverts_to: None,
        }
    }

    fn ask(&mut self, op: Op) -> Ret {
        let (round, authority, id) = (self.round, self.round.authority(self.name), &self.round.id);
        let refused = |refusal: Refusal| Ret::Refused(refusal.code);
        let done = |answer: Result<(), Refusal>| answer.map_or_else(refused, |()| Ret::Done);
        match op {
            Op::Acquire { force } => {
                let wish = Acquire {
                    workspace: id.clone(),
                    lease: LeaseId::fresh(),
                    owner: "ann".parse().unwrap(),
                    host: HostId::from_u128(1),
                    session: SessionId::fresh(),
                    holder: HolderKind::Beat,
                    ttl: TTL,
                    max_lifetime: Duration::from_secs(86_400),
                    force: force.then(|| "test".to_owned()),
                    only_at: None,
                    seen: Default::default(),
                };
                match authority.acquire(&wish, no_rider()).unwrap() {
                    Ok(acquired) => {
                        self.version = round.learn(&acquired.at);
                        self.granted(acquired.lease)
                    }
                    Err(refusal) => {
                        let current = round.current();
                        match (self.bug, current.lease) {
                            (Some(Bug::SharesALease), Some(lease)) => {
                                self.version = round.learn(&current.at);
                                self.granted(lease)
                            }
                            _ => refused(refusal),
                        }
                    }
                }
            }
            Op::Renew { .. } if self.bug == Some(Bug::RenewsByItself) => Ret::Done,
            Op::Renew { generation } => {
                let (lease, generation) = (self.own().id, Generation(generation));
                let one = Renewal { workspace: id.clone(), lease, generation };
                authority.renew(&[one]).unwrap().remove(0).map_or_else(refused, |_| Ret::Done)
            }
            Op::Release { generation } | Op::Revoke { generation } => {
                let state = match op {
                    Op::Release { .. } => LeaseState::Released,
                    _ => LeaseState::Revoked,
                };
                let (lease, generation) = (self.own().id, Generation(generation));
                done(authority.end(id, lease, generation, state, "test", no_rider()).unwrap())
            }
            Op::Publish { expected, key, layer, .. } => {
                let (lease, at) = match self.bug {
                    Some(Bug::ReadsThenPublishes) => (self.own(), round.current().at),
                    Some(Bug::BorrowsTheLease) => {
                        (round.current().lease.unwrap(), round.head(expected))
                    }
                    _ => (self.own(), round.head(expected)),
                };
                let wish = self.wish(lease, at, key, layer);
                if self.bug == Some(Bug::AnswersEarly) && self.late.is_none() {
                    self.late = Some(wish);
                    self.version += 1;
                    return Ret::Published { version: self.version };
                }
                match authority.publish(&wish, no_rider()).unwrap() {
                    Ok(at) => {
                        let version = round.learn(&at);
                        self.version = self.version.max(version);
                        Ret::Published { version }
                    }
                    Err(refusal) => refused(refusal),
                }
            }
            Op::Begin { expected, key, .. } => {
                let (lease, at) = match self.bug {
                    Some(Bug::BeginsUnchecked) => {
                        let current = round.current();
                        (current.lease.unwrap(), current.at)
                    }
                    _ => (self.own(), round.head(expected)),
                };
                let wish = Begin {
                    workspace: id.clone(),
                    lease: lease.id,
                    generation: lease.generation,
                    session: lease.session,
                    expected: at,
                    task: "t".parse().unwrap(),
                    key: format!("k{key}").parse().unwrap(),
                    about: String::new(),
                    host: lease.host,
                    owner: lease.owner.clone(),
                    assignee: lease.owner,
                };
                match authority.begin(&wish, no_rider()).unwrap() {
                    Ok(Begun::Begun(_)) => Ret::Begun,
                    Ok(Begun::Repeated(_)) => Ret::Repeated,
                    Ok(Begun::Resumed(_)) => Ret::Resumed,
                    Ok(Begun::Taken(_)) => Ret::Taken,
                    Ok(Begun::KeyUsed(_)) => Ret::Refused(Code::KeyUsed),
                    Ok(Begun::TooMany) => Ret::Refused(Code::TooManyOpen),
                    Err(refusal) => refused(refusal),
                }
            }
            Op::Expire => {
                (round.expire)();
                Ret::Done
            }
            Op::Known { .. } => Ret::Known,
            Op::Look => {
                let current = round.current();
                let (generation, version) = (current.generation.0, current.at.version.0);
                let now = Ret::Seen { generation, version };
                match self.bug {
                    Some(Bug::LooksOnce) => *self.looked.get_or_insert(now),
                    _ => now,
                }
            }
        }
    }

    fn granted(&mut self, lease: Lease) -> Ret {
        self.generation = lease.generation.0;
        self.lease = Some(lease);
        Ret::Granted { generation: self.generation, version: self.version }
    }
}
