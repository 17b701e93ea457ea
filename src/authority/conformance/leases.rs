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

pub(super) fn i2_repair(f: &dyn Fixture) {
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
    assert_eq!(publish(f, &publication(&a, 2, 2)).unwrap_err().code, Code::StaleGeneration);
    f.clock().set(1, 5000);
    assert_eq!(acquire(f, 3).lease.generation, Generation(41));
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
