//! One suite that every backend passes. Tests are named after the invariants they watch.

mod leases;
mod ledger;
mod publications;
mod requests;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::model::ids::BootId;
use crate::model::lease::HolderKind;
use crate::model::time::{BootInstant, BootNs};
use crate::store::Clock;

/// An authority under test.
pub trait Fixture: Sync {
    /// The authority.
    fn authority(&self) -> &dyn Authority;
    /// Its clock.
    fn clock(&self) -> &TestClock;
    /// Kinds of the evidence that riders wrote, in order.
    fn written(&self) -> Vec<String>;
}

/// A clock that a test sets.
#[derive(Clone)]
pub struct TestClock(Arc<std::sync::Mutex<BootInstant>>);

impl Default for TestClock {
    fn default() -> Self {
        let clock = Self(Arc::new(std::sync::Mutex::new(instant(1, 0))));
        clock.set(1, 1000);
        clock
    }
}

fn instant(boot: u128, seconds: u64) -> BootInstant {
    let boot = BootId(uuid::Uuid::from_u128(boot));
    BootInstant { boot, ns: BootNs(seconds * 1_000_000_000) }
}

impl TestClock {
    /// Sets boot and seconds.
    pub fn set(&self, boot: u128, seconds: u64) {
        *self.0.lock().unwrap() = instant(boot, seconds);
    }

    /// The clock a backend takes.
    pub fn clock(&self) -> Clock {
        let at = Arc::clone(&self.0);
        Arc::new(move || *at.lock().unwrap())
    }
}

type Test = (&'static str, fn(&dyn Fixture));

const TESTS: &[Test] = &[
    ("a workspace is made once", leases::made_once),
    ("I2 generations grow, also over delete and re-create", leases::i2_generations_grow),
    ("I2 of competing acquisitions one wins", leases::i2_one_of_many),
    ("I2 a lapsed lease is not revived", leases::i2_lapsed_is_not_revived),
    ("I2 a lease of another boot is over", leases::i2_other_boot),
    ("I2 an unknown workspace on HOLD is not made anew", leases::i2_held_unknown),
    ("I2 a repair goes on above what was seen", leases::i2_repair),
    ("I2 below what a host saw it goes on HOLD", leases::i2_below_what_was_seen),
    ("I1 each single mismatch is refused and changes nothing", publications::i1_each_mismatch),
    ("I1 of competing publications one wins", publications::i1_one_of_many),
    ("I1 a whole head comes back as one publication", publications::i1_whole_head),
    ("I1 a closing lease may publish, an ended one may not", publications::i1_ended),
    ("I7 the same key gets the same answer", publications::i7_same_answer),
    ("I7 a buried key stays unusable", publications::i7_buried),
    ("I1 every reason to refuse is reached and leaves all as it is", ledger::i1_every_reason),
    ("I7 a publication is entered before it is sent", ledger::entered),
    ("I7 a refused key keeps its answer", ledger::refused_once),
    ("I7 a takeover shows what is open", ledger::taken_over),
    ("I7 an unknown row does not block others", ledger::unknown_blocks_nothing),
    ("I7 a pruned key is forgotten, not uncommitted", ledger::forgotten),
    ("open rows have an assignee", ledger::assigned),
    ("a writer without a lease is refused without an offer", ledger::refused_without_an_offer),
    ("I7 a request is durable under the predicate", requests::begun),
    ("I7 one task is out once", requests::one_key_a_task),
    ("I7 a request is resumed by a newer generation", requests::resumed),
    ("I7 an outcome is told once", requests::settled),
    ("I7 of competing begins one is first", requests::one_of_many),
    ("a takeover is recorded whole", leases::takeover_record),
    ("readmission wants the head unmoved", leases::readmission),
    ("a batch of renewals answers each", leases::renewals),
    ("a rider is written exactly when its change is", publications::riders),
    ("a live workspace is not deleted", leases::delete_refused),
];

/// Runs the suite, each test on a fixture of its own.
pub fn run(make: &dyn Fn() -> Box<dyn Fixture>) {
    let failed: Vec<&str> = TESTS
        .iter()
        .filter(|(name, test)| {
            let fixture = make();
            eprintln!("conformance: {name}");
            catch_unwind(AssertUnwindSafe(|| test(&*fixture))).is_err()
        })
        .map(|(name, _)| *name)
        .collect();
    assert!(failed.is_empty(), "not conforming: {failed:#?}");
}

fn ws() -> WorkspaceId {
    "team/repo".parse().unwrap()
}

fn layer(n: u8) -> Digest {
    Digest([n; 32])
}

fn at(version: u64, layers: &[u8]) -> HeadAt {
    let head = Head(layers.iter().map(|n| layer(*n)).collect());
    HeadAt { version: Version(version), head }
}

fn create(f: &dyn Fixture) -> Workspace {
    let new = NewWorkspace {
        id: ws(),
        owner: "ann".parse().unwrap(),
        contact: "ann@host".to_owned(),
        labels: BTreeMap::from([("k".to_owned(), "v".to_owned())]),
        layers: vec![layer(1)],
    };
    f.authority().create(&new, no_rider()).unwrap().unwrap()
}

fn wish(n: u128) -> Acquire {
    Acquire {
        workspace: ws(),
        lease: LeaseId::from_u128(n),
        owner: format!("owner-{n}").parse().unwrap(),
        host: HostId::from_u128(7),
        session: SessionId::from_u128(n),
        holder: HolderKind::Beat,
        ttl: Duration::from_secs(30),
        max_lifetime: Duration::from_secs(100),
        force: None,
        only_at: None,
        seen: Seen::default(),
    }
}

fn acquire(f: &dyn Fixture, n: u128) -> Acquired {
    f.authority().acquire(&wish(n), no_rider()).unwrap().unwrap()
}

fn refused(f: &dyn Fixture, wish: &Acquire) -> Code {
    f.authority().acquire(wish, no_rider()).unwrap().unwrap_err().code
}

fn publication(a: &Acquired, key: u128, new: u8) -> Publish {
    Publish {
        workspace: ws(),
        lease: a.lease.id,
        generation: a.lease.generation,
        session: a.lease.session,
        expected: a.at.clone(),
        key: PublicationKey::from_u128(key),
        layer: layer(new),
        whole: None,
        reverts_to: None,
    }
}

fn publish(f: &dyn Fixture, p: &Publish) -> Result<HeadAt, Refusal> {
    f.authority().publish(p, no_rider()).unwrap()
}

fn resolve(f: &dyn Fixture, key: PublicationKey) -> KeyState {
    f.authority().resolve(&ws(), key, no_rider()).unwrap()
}

fn record(f: &dyn Fixture) -> Workspace {
    f.authority().get(&ws()).unwrap().unwrap()
}

fn newest(f: &dyn Fixture) -> Happening {
    f.authority().history(&ws(), 1).unwrap().remove(0).what
}

fn end(f: &dyn Fixture, a: &Acquired, state: LeaseState, why: &str) -> Result<(), Refusal> {
    let (lease, generation) = (a.lease.id, a.lease.generation);
    f.authority().end(&ws(), lease, generation, state, why, no_rider()).unwrap()
}

fn renewal(a: &Acquired) -> Renewal {
    Renewal { workspace: ws(), lease: a.lease.id, generation: a.lease.generation }
}
