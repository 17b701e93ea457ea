//! One suite that every backend passes. Tests are named after the invariants they watch.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::model::ids::BootId;
use crate::model::journal::Draft;
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
    ("a workspace is made once", made_once),
    ("I2 generations grow, also over delete and re-create", i2_generations_grow),
    ("I2 of competing acquisitions one wins", i2_one_of_many),
    ("I2 a lapsed lease is not revived", i2_lapsed_is_not_revived),
    ("I2 a lease of another boot is over", i2_other_boot),
    ("I2 an unknown workspace on HOLD is not made anew", i2_held_unknown),
    ("I2 a repair goes on above what was seen", i2_repair),
    ("I1 each single mismatch is refused and changes nothing", i1_each_mismatch),
    ("I1 of competing publications one wins", i1_one_of_many),
    ("I1 a closing lease may publish, an ended one may not", i1_ended),
    ("I7 the same key gets the same answer", i7_same_answer),
    ("I7 a buried key stays unusable", i7_buried),
    ("a takeover is recorded whole", takeover_record),
    ("readmission wants the head unmoved", readmission),
    ("a batch of renewals answers each", renewals),
    ("a rider is written exactly when its change is", riders),
    ("a live workspace is not deleted", delete_refused),
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
    }
}

fn publish(f: &dyn Fixture, p: &Publish) -> Result<HeadAt, Refusal> {
    f.authority().publish(p, no_rider()).unwrap()
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

fn made_once(f: &dyn Fixture) {
    assert_eq!(f.authority().get(&ws()).unwrap(), None);
    let made = create(f);
    assert_eq!(made.at, at(1, &[1]));
    assert_eq!((made.contact.as_str(), made.labels["k"].as_str()), ("ann@host", "v"));
    assert_eq!(record(f), made);
    assert_eq!(f.authority().list().unwrap(), [made.clone()]);
    let again = NewWorkspace {
        id: ws(),
        owner: "bob".parse().unwrap(),
        contact: String::new(),
        labels: BTreeMap::new(),
        layers: vec![],
    };
    let refusal = f.authority().create(&again, no_rider()).unwrap().unwrap_err();
    assert_eq!(refusal.code, Code::WorkspaceExists);
    assert_eq!(record(f), made);
    let empty = NewWorkspace { id: "empty".parse().unwrap(), ..again };
    assert_eq!(f.authority().create(&empty, no_rider()).unwrap().unwrap().at, at(0, &[]));
}

fn i2_generations_grow(f: &dyn Fixture) {
    let mut last = create(f).generation;
    for n in 1..=4 {
        // The same owner, too, gets a new one.
        let a = f
            .authority()
            .acquire(&Acquire { owner: "ann".parse().unwrap(), ..wish(n) }, no_rider())
            .unwrap()
            .unwrap();
        assert!(a.lease.generation > last);
        last = a.lease.generation;
        end(f, &a, LeaseState::Released, "done").unwrap();
    }
    let before = acquire(f, 8);
    end(f, &before, LeaseState::Released, "done").unwrap();
    f.authority().delete(&ws(), "no longer wanted", no_rider()).unwrap().unwrap();
    assert!(record(f).deleted);
    assert_eq!(refused(f, &wish(9)), Code::UnknownWorkspace);
    let made = create(f);
    assert_eq!(made.generation, before.lease.generation);
    // The old token opens nothing in the new workspace, before and after its first lease.
    let stale = Publish { expected: made.at, ..publication(&before, 1, 2) };
    assert_eq!(publish(f, &stale).unwrap_err().code, Code::LeaseMismatch);
    let after = acquire(f, 10);
    assert_eq!(Some(after.lease.generation), before.lease.generation.next());
    assert_eq!(publish(f, &stale).unwrap_err().code, Code::StaleGeneration);
}

fn i2_one_of_many(f: &dyn Fixture) {
    create(f);
    let won: Vec<u128> = std::thread::scope(|scope| {
        let tries: Vec<_> = (1..=8)
            .map(|n| scope.spawn(move || (n, f.authority().acquire(&wish(n), no_rider()).unwrap())))
            .collect();
        let answers = tries.into_iter().map(|t| t.join().unwrap());
        answers
            .filter_map(|(n, answer)| match answer {
                Ok(_) => Some(n),
                Err(refusal) => {
                    assert_eq!(refusal.code, Code::LeaseHeld);
                    None
                }
            })
            .collect()
    });
    assert_eq!(won.len(), 1);
    assert_eq!(record(f).lease.unwrap().session, SessionId::from_u128(won[0]));
    assert_eq!(record(f).generation, Generation(1));
    // Forced takeovers all succeed, each with a generation of its own.
    let mut given: Vec<u64> = std::thread::scope(|scope| {
        let tries: Vec<_> = (11..=18)
            .map(|n| {
                let wish = Acquire { force: Some("mine now".to_owned()), ..wish(n) };
                scope.spawn(move || f.authority().acquire(&wish, no_rider()).unwrap().unwrap())
            })
            .collect();
        tries.into_iter().map(|t| t.join().unwrap().lease.generation.0).collect()
    });
    given.sort_unstable();
    assert_eq!(given, (2..=9).collect::<Vec<_>>());
}

fn i2_lapsed_is_not_revived(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    f.clock().set(1, 1020);
    let renewed = f.authority().renew(&[renewal(&a)]).unwrap().remove(0).unwrap();
    assert_eq!(renewed.expires, instant(1, 1050));
    assert_eq!(record(f).lease.unwrap(), renewed);
    f.clock().set(1, 1049);
    f.authority().renew(&[renewal(&a)]).unwrap().remove(0).unwrap();
    f.clock().set(1, 1078);
    let last = f.authority().renew(&[renewal(&a)]).unwrap().remove(0).unwrap();
    assert_eq!(last.expires, instant(1, 1100), "never past the longest lifetime");
    f.clock().set(1, 1100);
    let before = record(f);
    let refusal = f.authority().renew(&[renewal(&a)]).unwrap().remove(0).unwrap_err();
    assert_eq!(refusal.code, Code::LeaseExpired);
    assert_eq!(publish(f, &publication(&a, 1, 2)).unwrap_err().code, Code::LeaseExpired);
    assert_eq!(record(f), before);
    let b = acquire(f, 2);
    assert_eq!(b.predecessor.unwrap().state, LeaseState::Expired);
}

fn i2_other_boot(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    // Earlier on the new boot's clock than the lease began on the old one's.
    f.clock().set(2, 1);
    let refusal = f.authority().renew(&[renewal(&a)]).unwrap().remove(0).unwrap_err();
    assert_eq!(refusal.code, Code::LeaseExpired);
    assert_eq!(publish(f, &publication(&a, 1, 2)).unwrap_err().code, Code::LeaseExpired);
    assert_eq!(acquire(f, 2).lease.generation, Generation(2));
}

fn i2_held_unknown(f: &dyn Fixture) {
    f.authority().hold(&ws(), "the mark says 5, no record").unwrap();
    let new = NewWorkspace {
        id: ws(),
        owner: "ann".parse().unwrap(),
        contact: String::new(),
        labels: BTreeMap::new(),
        layers: vec![],
    };
    let refusal = f.authority().create(&new, no_rider()).unwrap().unwrap_err();
    assert_eq!(refusal.code, Code::WorkspaceHeld);
    f.authority().repair(&ws(), Generation(5), "looked at").unwrap().unwrap();
    create(f);
    assert_eq!(acquire(f, 1).lease.generation, Generation(6));
}

fn i2_repair(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    f.authority().hold(&ws(), "below its mark").unwrap();
    f.authority().hold(&ws(), "below its mark").unwrap();
    assert_eq!(newest(f), Happening::Held { why: "below its mark".to_owned() });
    assert_eq!(f.authority().history(&ws(), 9).unwrap().len(), 3, "said once");
    assert_eq!(refused(f, &wish(2)), Code::WorkspaceHeld);
    assert_eq!(publish(f, &publication(&a, 1, 2)).unwrap_err().code, Code::WorkspaceHeld);
    let refusal = f.authority().renew(&[renewal(&a)]).unwrap().remove(0).unwrap_err();
    assert_eq!(refusal.code, Code::WorkspaceHeld);
    let refusal = f.authority().delete(&ws(), "x", no_rider()).unwrap().unwrap_err();
    assert_eq!(refusal.code, Code::WorkspaceHeld);
    let repaired = f.authority().repair(&ws(), Generation(40), "marks say 40").unwrap().unwrap();
    assert_eq!((repaired.generation, repaired.hold), (Generation(40), None));
    assert_eq!(publish(f, &publication(&a, 1, 2)).unwrap_err().code, Code::StaleGeneration);
    f.clock().set(1, 5000);
    assert_eq!(acquire(f, 3).lease.generation, Generation(41));
}

fn i1_each_mismatch(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    let good = publication(&a, 1, 2);
    let p = |change: &dyn Fn(&mut Publish)| {
        let mut p = good.clone();
        change(&mut p);
        p
    };
    let table: [(Publish, Code); 8] = [
        (p(&|p| p.lease = LeaseId::from_u128(99)), Code::LeaseMismatch),
        (p(&|p| p.generation = Generation(0)), Code::StaleGeneration),
        (p(&|p| p.generation = Generation(2)), Code::StaleGeneration),
        (p(&|p| p.session = SessionId::from_u128(99)), Code::SessionMismatch),
        (p(&|p| p.expected.version = Version(0)), Code::VersionMismatch),
        (p(&|p| p.expected.version = Version(2)), Code::VersionMismatch),
        (p(&|p| p.expected.head = Head(vec![layer(9)])), Code::HeadMismatch),
        (p(&|p| p.workspace = "team/other".parse().unwrap()), Code::UnknownWorkspace),
    ];
    let before = record(f);
    for (bad, code) in table {
        let refusal = publish(f, &bad).unwrap_err();
        assert_eq!(refusal.code, code, "{bad:?}");
        assert_eq!(record(f), before, "{bad:?} changed something");
        let mine = f.authority().history(&bad.workspace, 1).unwrap().remove(0).what;
        let expected = Happening::Refused {
            verb: "publish".to_owned(),
            session: bad.session,
            generation: Some(bad.generation),
            code,
            current: refusal.current.clone(),
        };
        assert_eq!(mine, expected);
        if code != Code::UnknownWorkspace {
            let owner = refusal.current.unwrap().owner.unwrap();
            assert_eq!(owner.as_str(), "owner-1", "a refusal names the present owner");
        }
    }
    // A refusal leaves the key unused, so the right publication still goes through.
    assert_eq!(publish(f, &good).unwrap(), at(2, &[1, 2]));
    assert_eq!(record(f).at, at(2, &[1, 2]));
    // The same session's next layer takes the place of its last.
    let next = Publish { expected: at(2, &[1, 2]), ..publication(&a, 2, 3) };
    assert_eq!(publish(f, &next).unwrap(), at(3, &[1, 3]));
}

fn i1_one_of_many(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    let answers: Vec<_> = std::thread::scope(|scope| {
        let tries: Vec<_> = (1..=8)
            .map(|n: u8| {
                let p = publication(&a, u128::from(n), n + 10);
                scope.spawn(move || publish(f, &p))
            })
            .collect();
        tries.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(answers.iter().filter(|a| a.is_ok()).count(), 1);
    for refusal in answers.iter().filter_map(|a| a.as_ref().err()) {
        assert_eq!(refusal.code, Code::VersionMismatch);
    }
    assert_eq!(record(f).at.version, Version(2));
}

fn i1_ended(f: &dyn Fixture) {
    create(f);
    let states = [
        (LeaseState::Released, Code::LeaseReleased),
        (LeaseState::Expired, Code::LeaseExpired),
        (LeaseState::Revoked, Code::LeaseRevoked),
    ];
    for (n, (state, code)) in (1..).zip(states) {
        let a = acquire(f, n);
        f.authority().releasing(&ws(), a.lease.id, a.lease.generation).unwrap().unwrap();
        let closing = publish(f, &publication(&a, n, n as u8 + 10)).unwrap();
        end(f, &a, state, "the reason").unwrap();
        // Ending it again in another way keeps the first.
        end(f, &a, LeaseState::Expired, "another").unwrap();
        let lease = record(f).lease.unwrap();
        assert_eq!((lease.state, lease.why_ended.as_deref()), (state, Some("the reason")));
        let late = Publish { expected: closing, ..publication(&a, n + 50, 60) };
        assert_eq!(publish(f, &late).unwrap_err().code, code);
        let refusal = f.authority().renew(&[renewal(&a)]).unwrap().remove(0).unwrap_err();
        assert_eq!(refusal.code, code);
    }
    let (old, new) = (acquire(f, 70), LeaseId::from_u128(71));
    let stale = f.authority().end(&ws(), new, Generation(1), LeaseState::Revoked, "", no_rider());
    assert_eq!(stale.unwrap().unwrap_err().code, Code::StaleGeneration);
    assert_eq!(record(f).lease.unwrap(), old.lease);
}

fn i7_same_answer(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    let p = publication(&a, 1, 2);
    let made = publish(f, &p).unwrap();
    let rows = f.authority().history(&ws(), 99).unwrap().len();
    let before = record(f);
    assert_eq!(publish(f, &p).unwrap(), made);
    // Also when the lease is long gone and somebody else wrote.
    end(f, &a, LeaseState::Released, "done").unwrap();
    let b = acquire(f, 2);
    publish(f, &publication(&b, 2, 3)).unwrap();
    assert_eq!(publish(f, &p).unwrap(), made);
    assert_eq!(record(f).at, at(3, &[1, 2, 3]));
    assert_eq!(before.at, made);
    assert_eq!(f.authority().history(&ws(), 99).unwrap().len(), rows + 2, "no row for a repeat");
    let other = Publish { layer: layer(9), ..p.clone() };
    assert_eq!(publish(f, &other).unwrap_err().code, Code::KeyUsed);
    let found = f.authority().resolve(&ws(), p.key).unwrap();
    assert_eq!(found, KeyState::Committed { layer: layer(2), at: made });
    assert_eq!(newest(f).clone(), {
        let current = Some(record(f).current());
        let (session, generation) = (p.session, Some(p.generation));
        let (verb, code) = ("publish".to_owned(), Code::KeyUsed);
        Happening::Refused { verb, session, generation, code, current }
    });
}

fn i7_buried(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    let p = publication(&a, 1, 2);
    for _ in 0..2 {
        assert_eq!(f.authority().resolve(&ws(), p.key).unwrap(), KeyState::Buried);
    }
    assert_eq!(newest(f), Happening::Buried { key: p.key });
    assert_eq!(publish(f, &p).unwrap_err().code, Code::KeyBuried);
    assert_eq!(record(f).at, at(1, &[1]));
    // Whoever comes first decides, and both see the same.
    for n in 100..116 {
        let race = Publish { expected: record(f).at, ..publication(&a, n, 7) };
        let (sent, found) = std::thread::scope(|scope| {
            let sent = scope.spawn(|| publish(f, &race));
            let found = f.authority().resolve(&ws(), race.key).unwrap();
            (sent.join().unwrap(), found)
        });
        match found {
            KeyState::Committed { at, .. } => assert_eq!(sent.unwrap(), at),
            KeyState::Buried => assert_eq!(sent.unwrap_err().code, Code::KeyBuried),
            KeyState::Unused => panic!("a resolved key is never unused"),
        }
    }
}

fn takeover_record(f: &dyn Fixture) {
    create(f);
    let first = acquire(f, 1);
    assert_eq!(first.predecessor, None);
    assert_eq!(refused(f, &wish(2)), Code::LeaseHeld);
    let refusal = newest(f);
    assert!(
        matches!(&refusal, Happening::Refused { verb, code: Code::LeaseHeld, current: Some(c), .. }
            if verb == "acquire" && c.owner == Some("owner-1".parse().unwrap())),
        "{refusal:?}"
    );
    let forced = Acquire { force: Some("ann went home".to_owned()), ..wish(2) };
    let second = f.authority().acquire(&forced, no_rider()).unwrap().unwrap();
    let row = f.authority().history(&ws(), 1).unwrap().remove(0);
    assert!(row.time.parse::<jiff::Timestamp>().is_ok(), "{}", row.time);
    let predecessor = Predecessor {
        owner: "owner-1".parse().unwrap(),
        generation: Generation(1),
        session: SessionId::from_u128(1),
        host: HostId::from_u128(7),
        state: LeaseState::Revoked,
        why: "ann went home".to_owned(),
    };
    let expected = Happening::Acquired {
        owner: "owner-2".parse().unwrap(),
        host: HostId::from_u128(7),
        session: SessionId::from_u128(2),
        lease: LeaseId::from_u128(2),
        generation: Generation(2),
        predecessor: Some(predecessor.clone()),
    };
    assert_eq!(row.what, expected);
    assert_eq!(second.predecessor, Some(predecessor));
    end(f, &second, LeaseState::Released, "closed by its owner").unwrap();
    let third = acquire(f, 3).predecessor.unwrap();
    assert_eq!((third.state, third.why.as_str()), (LeaseState::Released, "closed by its owner"));
}

fn readmission(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    let back = Acquire { only_at: Some(a.at.clone()), ..wish(2) };
    assert_eq!(refused(f, &back), Code::LeaseHeld);
    let forced = Acquire { force: Some("no".to_owned()), ..back.clone() };
    assert_eq!(refused(f, &forced), Code::LeaseHeld, "a readmission never revokes");
    end(f, &a, LeaseState::Expired, "it ran out").unwrap();
    let b = f.authority().acquire(&back, no_rider()).unwrap().unwrap();
    publish(f, &publication(&b, 1, 2)).unwrap();
    end(f, &b, LeaseState::Released, "done").unwrap();
    assert_eq!(refused(f, &Acquire { lease: LeaseId::from_u128(3), ..back }), Code::HeadMoved);
}

fn renewals(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    let bad = Renewal { generation: Generation(9), ..renewal(&a) };
    let gone = Renewal { workspace: "nowhere".parse().unwrap(), ..renewal(&a) };
    f.clock().set(1, 1010);
    let answers = f.authority().renew(&[bad, renewal(&a), gone]).unwrap();
    let codes: Vec<_> = answers.iter().map(|a| a.as_ref().map_err(|r| r.code)).collect();
    assert_eq!(codes[0], Err(Code::StaleGeneration));
    assert_eq!(codes[1].map(|l| l.expires), Ok(instant(1, 1040)));
    assert_eq!(codes[2], Err(Code::UnknownWorkspace));
    assert_eq!(f.authority().renew(&[]).unwrap(), []);
}

fn note<'a, T>(kind: &'a str) -> Rider<'a, T> {
    Box::new(move |outcome| {
        let kind = format!("{kind}-{}", if outcome.is_ok() { "ok" } else { "refused" });
        let draft = Draft {
            kind,
            workspace: Some(ws()),
            session: None,
            generation: None,
            actor: "test".to_owned(),
            detail: serde_json::Value::Null,
        };
        Journal { sessions: Vec::new(), entries: vec![draft] }
    })
}

fn riders(f: &dyn Fixture) {
    create(f);
    let authority = f.authority();
    let a = authority.acquire(&wish(1), note("first")).unwrap().unwrap();
    authority.acquire(&wish(2), note("second")).unwrap().unwrap_err();
    assert_eq!(f.written(), ["first-ok", "second-refused"]);
    let before = (record(f), authority.history(&ws(), 99).unwrap());
    let dies = catch_unwind(AssertUnwindSafe(|| {
        let _ = authority.publish(&publication(&a, 1, 2), Box::new(|_| panic!("as a test wants")));
    }));
    assert!(dies.is_err());
    assert_eq!((record(f), authority.history(&ws(), 99).unwrap()), before);
    assert_eq!(f.written(), ["first-ok", "second-refused"]);
    authority.publish(&publication(&a, 1, 2), note("third")).unwrap().unwrap();
    let (lease, generation) = (a.lease.id, a.lease.generation);
    authority
        .end(&ws(), lease, generation, LeaseState::Released, "", note("fourth"))
        .unwrap()
        .unwrap();
    assert_eq!(f.written(), ["first-ok", "second-refused", "third-ok", "fourth-ok"]);
}

fn delete_refused(f: &dyn Fixture) {
    let gone = |code| {
        let refusal = f.authority().delete(&ws(), "x", no_rider()).unwrap().unwrap_err();
        assert_eq!(refusal.code, code);
    };
    gone(Code::UnknownWorkspace);
    create(f);
    let a = acquire(f, 1);
    gone(Code::LeaseHeld);
    end(f, &a, LeaseState::Released, "done").unwrap();
    f.authority().delete(&ws(), "x", no_rider()).unwrap().unwrap();
    gone(Code::UnknownWorkspace);
    let generation = Generation(1);
    assert_eq!(newest(f), Happening::Deleted { why: "x".to_owned(), generation });
}
