//! I1 and I7: who may publish, and what a publication key says.

use super::*;
use crate::model::journal::Draft;

pub(super) fn i1_each_mismatch(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    let good = publication(&a, 1, 2);
    let p = |change: &dyn Fn(&mut Publish)| {
        let mut p = good.clone();
        change(&mut p);
        p
    };
    // Each under a key of its own: the first answer to a key is its only one.
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
    for (n, (mut bad, code)) in (10..).zip(table) {
        bad.key = PublicationKey::from_u128(n);
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
    // None of them stands in the way of the right one.
    assert_eq!(publish(f, &good).unwrap(), at(2, &[1, 2]));
    assert_eq!(record(f).at, at(2, &[1, 2]));
    // The same session's next layer takes the place of its last.
    let next = Publish { expected: at(2, &[1, 2]), ..publication(&a, 2, 3) };
    assert_eq!(publish(f, &next).unwrap(), at(3, &[1, 3]));
}

pub(super) fn i1_one_of_many(f: &dyn Fixture) {
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

pub(super) fn i1_ended(f: &dyn Fixture) {
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

pub(super) fn i7_same_answer(f: &dyn Fixture) {
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
    let found = resolve(f, p.key);
    assert_eq!(found, KeyState::Committed { layer: layer(2), at: made });
    assert_eq!(newest(f).clone(), {
        let current = Some(record(f).current());
        let (session, generation) = (p.session, Some(p.generation));
        let (verb, code) = ("publish".to_owned(), Code::KeyUsed);
        Happening::Refused { verb, session, generation, code, current }
    });
}

pub(super) fn i7_buried(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    let p = publication(&a, 1, 2);
    for _ in 0..2 {
        assert_eq!(resolve(f, p.key), KeyState::Buried);
    }
    assert_eq!(newest(f), Happening::Buried { key: p.key });
    assert_eq!(publish(f, &p).unwrap_err().code, Code::KeyBuried);
    assert_eq!(record(f).at, at(1, &[1]));
    // Whoever comes first decides, and both see the same.
    for n in 100..116 {
        let race = Publish { expected: record(f).at, ..publication(&a, n, 7) };
        let (sent, found) = std::thread::scope(|scope| {
            let sent = scope.spawn(|| publish(f, &race));
            let found = resolve(f, race.key);
            (sent.join().unwrap(), found)
        });
        match found {
            KeyState::Committed { at, .. } => assert_eq!(sent.unwrap(), at),
            KeyState::Buried => assert_eq!(sent.unwrap_err().code, Code::KeyBuried),
            open => panic!("a resolved key is {open:?}"),
        }
    }
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

pub(super) fn riders(f: &dyn Fixture) {
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

/// A revert: the same predicate, another content.
pub(super) fn i1_whole_head(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    publish(f, &publication(&a, 1, 2)).unwrap();
    end(f, &a, LeaseState::Released, "done").unwrap();
    let b = acquire(f, 2);
    let back = Publish { whole: Some(at(1, &[1]).head), ..publication(&b, 2, 1) };
    let late = Publish { expected: at(1, &[1]), key: PublicationKey::from_u128(9), ..back.clone() };
    assert_eq!(publish(f, &late).unwrap_err().code, Code::VersionMismatch);
    assert_eq!(record(f).at, at(2, &[1, 2]));
    assert_eq!(publish(f, &back).unwrap(), at(3, &[1]));
    assert_eq!(publish(f, &back).unwrap(), at(3, &[1]), "the same key, the same answer");
    let other = Publish { whole: Some(at(2, &[1, 2]).head), ..back.clone() };
    assert_eq!(publish(f, &other).unwrap_err().code, Code::KeyUsed);
    // Its top layer is nobody's to replace: the next publication comes on top, of the same session too.
    let next = Publish { expected: at(3, &[1]), ..publication(&b, 3, 4) };
    assert_eq!(publish(f, &next).unwrap(), at(4, &[1, 4]));
    let empty = Publish {
        expected: at(4, &[1, 4]),
        whole: Some(Default::default()),
        ..publication(&b, 4, 0)
    };
    assert_eq!(publish(f, &empty).unwrap(), at(5, &[]));
}
