//! I2 and what goes with it: workspaces, leases, generations.

use super::*;

pub(super) fn made_once(f: &dyn Fixture) {
    assert_eq!(f.authority().get(&ws()).unwrap(), None);
    let made = create(f);
    assert_eq!(made.at, at(1, &[1]));
    assert_eq!((made.contact.as_str(), made.labels["k"].as_str()), ("ann@host", "v"));
    assert_eq!(record(f), made);
    assert_eq!(f.authority().list().unwrap(), std::slice::from_ref(&made));
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

pub(super) fn i2_generations_grow(f: &dyn Fixture) {
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
    assert_eq!(made.at, at(2, &[1]), "no two heads of a name have one version");
    // The old token opens nothing in the new workspace, before and after its first lease.
    let stale = Publish { expected: made.at, ..publication(&before, 1, 2) };
    assert_eq!(publish(f, &stale).unwrap_err().code, Code::LeaseMismatch);
    let after = acquire(f, 10);
    assert_eq!(Some(after.lease.generation), before.lease.generation.next());
    let again = Publish { key: PublicationKey::from_u128(2), ..stale };
    assert_eq!(publish(f, &again).unwrap_err().code, Code::StaleGeneration);
}

pub(super) fn i2_one_of_many(f: &dyn Fixture) {
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

pub(super) fn i2_lapsed_is_not_revived(f: &dyn Fixture) {
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

pub(super) fn i2_other_boot(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    // Earlier on the new boot's clock than the lease began on the old one's.
    f.clock().set(2, 1);
    let refusal = f.authority().renew(&[renewal(&a)]).unwrap().remove(0).unwrap_err();
    assert_eq!(refusal.code, Code::LeaseExpired);
    assert_eq!(publish(f, &publication(&a, 1, 2)).unwrap_err().code, Code::LeaseExpired);
    assert_eq!(acquire(f, 2).lease.generation, Generation(2));
}

pub(super) fn i2_held_unknown(f: &dyn Fixture) {
    f.authority().hold(&ws(), "the mark says 5, no record", no_rider()).unwrap();
    assert_eq!(refused(f, &wish(1)), Code::WorkspaceHeld);
    let new = NewWorkspace {
        id: ws(),
        owner: "ann".parse().unwrap(),
        contact: String::new(),
        labels: BTreeMap::new(),
        layers: vec![],
    };
    let refusal = f.authority().create(&new, no_rider()).unwrap().unwrap_err();
    assert_eq!(refusal.code, Code::WorkspaceHeld);
    let seen = Seen { generation: Generation(5), version: Version(3) };
    let repaired = f.authority().repair(&ws(), &seen, "looked at", no_rider()).unwrap().unwrap();
    assert!(repaired.deleted, "it comes back as the tombstone that it is");
    assert_eq!(refused(f, &wish(1)), Code::UnknownWorkspace);
    assert_eq!(create(f).at, at(5, &[1]));
    assert_eq!(acquire(f, 1).lease.generation, Generation(6));
}

/// An authority that lost what a host saw is told so by that host's next acquisition.
pub(super) fn i2_below_what_was_seen(f: &dyn Fixture) {
    let seen = |generation, version| Seen {
        generation: Generation(generation),
        version: Version(version),
    };
    create(f);
    let a = acquire(f, 1);
    end(f, &a, LeaseState::Released, "done").unwrap();
    // What it knows is no news to it, nor is less.
    for (n, known) in [(2, seen(1, 1)), (3, seen(0, 0)), (4, seen(3, 0))] {
        let a = f.authority().acquire(&Acquire { seen: known, ..wish(n) }, no_rider());
        end(f, &a.unwrap().unwrap(), LeaseState::Released, "done").unwrap();
    }
    for (known, what) in [(seen(5, 0), "generation 4, but 5"), (seen(0, 2), "version 1, but 2")] {
        let before = record(f);
        let ask = Acquire { seen: known, force: Some("now".to_owned()), ..wish(9) };
        let refusal = f.authority().acquire(&ask, no_rider()).unwrap().unwrap_err();
        assert_eq!(refusal.code, Code::WorkspaceHeld);
        assert!(refusal.to_string().contains(what), "{refusal}");
        let why = record(f).hold.expect("it is on HOLD at the authority, too");
        assert!(why.contains(what), "{why}");
        assert_eq!(record(f), before.held(&why), "nothing else changed");
        assert_eq!(refused(f, &wish(10)), Code::WorkspaceHeld, "also to who saw nothing");
        f.authority().repair(&ws(), &before.seen(), "looked at", no_rider()).unwrap().unwrap();
    }
    let elsewhere: WorkspaceId = "elsewhere".parse().unwrap();
    let ask = Acquire { workspace: elsewhere.clone(), seen: seen(1, 0), ..wish(11) };
    assert_eq!(refused(f, &ask), Code::WorkspaceHeld);
    let tombstone = f.authority().get(&elsewhere).unwrap().unwrap();
    assert!(tombstone.deleted && tombstone.hold.is_some());
}

pub(super) fn i2_repair(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    f.authority().hold(&ws(), "below its mark", no_rider()).unwrap();
    f.authority().hold(&ws(), "below its mark", no_rider()).unwrap();
    assert_eq!(newest(f), Happening::Held { why: "below its mark".to_owned() });
    assert_eq!(f.authority().history(&ws(), 9).unwrap().len(), 3, "said once");
    assert_eq!(refused(f, &wish(2)), Code::WorkspaceHeld);
    assert_eq!(publish(f, &publication(&a, 1, 2)).unwrap_err().code, Code::WorkspaceHeld);
    let refusal = f.authority().renew(&[renewal(&a)]).unwrap().remove(0).unwrap_err();
    assert_eq!(refusal.code, Code::WorkspaceHeld);
    let refusal = f.authority().delete(&ws(), "x", no_rider()).unwrap().unwrap_err();
    assert_eq!(refusal.code, Code::WorkspaceHeld);
    let seen = Seen { generation: Generation(40), version: Version(7) };
    let repaired = f.authority().repair(&ws(), &seen, "marks say 40", no_rider()).unwrap().unwrap();
    assert_eq!(record(f), repaired);
    assert_eq!((repaired.generation, &repaired.hold), (Generation(40), &None));
    // Versions up to 7 are spoken for: the head that is left gets one of its own.
    assert_eq!(repaired.at, at(8, &[1]));
    assert_eq!(repaired.lease.as_ref().unwrap().state, LeaseState::Revoked);
    let told = Happening::Repaired {
        why: "marks say 40".to_owned(),
        generation: Generation(40),
        at: at(8, &[1]),
    };
    assert_eq!(newest(f), told);
    assert_eq!(publish(f, &publication(&a, 2, 2)).unwrap_err().code, Code::StaleGeneration);
    assert_eq!(acquire(f, 3).lease.generation, Generation(41));
    // A lease of the accepted generation itself does not outlast the HOLD either.
    f.authority().hold(&ws(), "again", no_rider()).unwrap();
    f.authority().repair(&ws(), &record(f).seen(), "x", no_rider()).unwrap().unwrap();
    assert_eq!(record(f).generation, Generation(41));
    assert_eq!(acquire(f, 4).lease.generation, Generation(42));
}

pub(super) fn takeover_record(f: &dyn Fixture) {
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
        unresolved: vec![],
    };
    assert_eq!(row.what, expected);
    assert_eq!(second.predecessor, Some(predecessor));
    end(f, &second, LeaseState::Released, "closed by its owner").unwrap();
    let third = acquire(f, 3).predecessor.unwrap();
    assert_eq!((third.state, third.why.as_str()), (LeaseState::Released, "closed by its owner"));
}

pub(super) fn readmission(f: &dyn Fixture) {
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

pub(super) fn renewals(f: &dyn Fixture) {
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

pub(super) fn delete_refused(f: &dyn Fixture) {
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
