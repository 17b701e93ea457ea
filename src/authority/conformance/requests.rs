//! I7 for what is asked of others: begun under the predicate, once, and settled once.

use super::*;
use crate::model::ids::RequestKey;
use crate::model::ledger::Which;
use crate::model::request::{Begin, Begun, MAX_OPEN, Outcome, Request, RequestState};

fn begin_wish(a: &Acquired, task: &str, key: &str) -> Begin {
    Begin {
        workspace: ws(),
        lease: a.lease.id,
        generation: a.lease.generation,
        session: a.lease.session,
        expected: a.at.clone(),
        task: task.parse().unwrap(),
        key: key.parse().unwrap(),
        about: "charge 5".to_owned(),
        host: a.lease.host,
        owner: a.lease.owner.clone(),
        assignee: "ann".parse().unwrap(),
    }
}

fn begin(f: &dyn Fixture, wish: &Begin) -> Result<Begun, Refusal> {
    f.authority().begin(wish, no_rider()).unwrap()
}

fn rows(f: &dyn Fixture, open: bool) -> Vec<Request> {
    let which = Which { workspace: Some(ws()), open, limit: usize::MAX };
    f.authority().requests(&which).unwrap()
}

fn told(outcome: Outcome) -> Settlement {
    let (by, how) = ("test".to_owned(), "ack".to_owned());
    Settlement { outcome, by, how, note: "ref 17".to_owned() }
}

fn settle(f: &dyn Fixture, key: &str, outcome: Outcome) -> Result<Request, Refusal> {
    let key: RequestKey = key.parse().unwrap();
    f.authority().settle(&ws(), &key, &told(outcome), no_rider()).unwrap()
}

pub(super) fn begun(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    let good = begin_wish(&a, "t", "k");
    let with = |change: &dyn Fn(&mut Begin)| {
        let mut wish = good.clone();
        change(&mut wish);
        wish
    };
    for (bad, code) in [
        (with(&|w| w.workspace = "nowhere".parse().unwrap()), Code::UnknownWorkspace),
        (with(&|w| w.generation = Generation(9)), Code::StaleGeneration),
        (with(&|w| w.lease = LeaseId::from_u128(9)), Code::LeaseMismatch),
        (with(&|w| w.session = SessionId::from_u128(9)), Code::SessionMismatch),
        (with(&|w| w.expected.version = Version(9)), Code::VersionMismatch),
        (with(&|w| w.expected.head = Head(vec![])), Code::HeadMismatch),
    ] {
        let before = record(f);
        let refusal = begin(f, &bad).unwrap_err();
        assert_eq!(refusal.code, code);
        assert_eq!((record(f), rows(f, false)), (before, vec![]));
        let last = f.authority().history(&bad.workspace, 1).unwrap().remove(0).what;
        assert!(
            matches!(&last, Happening::Refused { verb, code: c, .. } if verb == "begin" && *c == code)
        );
    }
    let Begun::Begun(row) = begin(f, &good).unwrap() else { panic!("it is the first") };
    assert_eq!(rows(f, true), std::slice::from_ref(&row));
    assert_eq!((row.state, row.generation), (RequestState::Open, Generation(1)));
    assert_eq!(row.assignee, "ann".parse().unwrap());
    assert_eq!(begin(f, &good).unwrap(), Begun::Repeated(row.clone()));
    let (task, key) = (row.task.clone(), row.key.clone());
    let (session, generation) = (row.session, row.generation);
    let resumed = false;
    assert_eq!(newest(f), Happening::Begun { task, key, session, generation, resumed });
    let to = "bob".parse().unwrap();
    let given = f.authority().reassign(&ws(), &row.key, &to, no_rider()).unwrap().unwrap();
    assert_eq!(rows(f, true), [given]);
    // A lease that ended begins nothing, not even what it began before.
    end(f, &a, LeaseState::Revoked, "why").unwrap();
    assert_eq!(begin(f, &good).unwrap_err().code, Code::LeaseRevoked);
    assert_eq!(begin(f, &begin_wish(&a, "t2", "k2")).unwrap_err().code, Code::LeaseRevoked);
    // What it may have sent is unknown from then on, whether anybody takes over or not.
    let states: Vec<_> = rows(f, false).iter().map(|row| row.state).collect();
    assert_eq!(states, [RequestState::Unknown]);
    settle(f, "k", Outcome::Done).unwrap();
    let late =
        f.authority().reassign(&ws(), &row.key, &"eve".parse().unwrap(), no_rider()).unwrap();
    assert_eq!(late.unwrap_err().code, Code::AlreadySettled);
}

pub(super) fn one_key_a_task(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    let Begun::Begun(first) = begin(f, &begin_wish(&a, "t", "k")).unwrap() else { panic!() };
    assert_eq!(begin(f, &begin_wish(&a, "t", "k2")).unwrap(), Begun::Taken(first.clone()));
    assert_eq!(begin(f, &begin_wish(&a, "t2", "k")).unwrap(), Begun::KeyUsed(first.clone()));
    let other = Begin { about: "charge 50".to_owned(), ..begin_wish(&a, "t", "k") };
    assert_eq!(begin(f, &other).unwrap(), Begun::KeyUsed(first.clone()));
    let last = newest(f);
    assert!(matches!(last, Happening::Refused { code: Code::KeyUsed, .. }), "{last:?}");
    // Done stays done; what did not happen may be tried under another key.
    let done = settle(f, "k", Outcome::Done).unwrap();
    assert_eq!(begin(f, &begin_wish(&a, "t", "k2")).unwrap(), Begun::Taken(done.clone()));
    assert_eq!(begin(f, &begin_wish(&a, "t", "k")).unwrap(), Begun::Repeated(done));
    begin(f, &begin_wish(&a, "u", "k3")).unwrap();
    settle(f, "k3", Outcome::NotDone).unwrap();
    let again = begin(f, &begin_wish(&a, "u", "k4")).unwrap();
    assert!(matches!(again, Begun::Begun(_)), "{again:?}");
    for n in 1..MAX_OPEN {
        let wish = begin_wish(&a, &format!("many{n}"), &format!("m{n}"));
        assert!(matches!(begin(f, &wish).unwrap(), Begun::Begun(_)), "{n}");
    }
    assert_eq!(begin(f, &begin_wish(&a, "more", "more")).unwrap(), Begun::TooMany);
    assert_eq!(rows(f, true).len(), MAX_OPEN);
}

pub(super) fn resumed(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    let Begun::Begun(first) = begin(f, &begin_wish(&a, "t", "k")).unwrap() else { panic!() };
    let forced = Acquire { force: Some("gone".to_owned()), ..super::wish(2) };
    let b = f.authority().acquire(&forced, no_rider()).unwrap().unwrap();
    // The new writer is told before it can do anything.
    let told = &b.unresolved[0];
    assert_eq!((told.kind.as_str(), told.key.as_str()), ("request", "k"));
    assert_eq!((told.task.as_deref(), told.generation), (Some("t"), Some(Generation(1))));
    assert_eq!(rows(f, true)[0].state, RequestState::Unknown);
    // The old one may not go on with it, nor begin it anew under another key.
    for wish in [begin_wish(&a, "t", "k"), begin_wish(&a, "t", "k2"), begin_wish(&a, "u", "k3")] {
        assert_eq!(begin(f, &wish).unwrap_err().code, Code::StaleGeneration);
    }
    let Begun::Taken(_) = begin(f, &begin_wish(&b, "t", "k2")).unwrap() else { panic!() };
    let Begun::Resumed(row) = begin(f, &begin_wish(&b, "t", "k")).unwrap() else { panic!() };
    assert_eq!((row.generation, row.session), (first.generation, first.session));
    assert_eq!(row.resumed, Some(Generation(2)));
    assert_eq!(begin(f, &begin_wish(&b, "t", "k")).unwrap(), Begun::Resumed(row));
    assert_eq!(rows(f, false).len(), 1, "it is one request");
    // The answer comes to whoever it comes to.
    let done = settle(f, "k", Outcome::Done).unwrap();
    assert_eq!(begin(f, &begin_wish(&b, "t", "k")).unwrap(), Begun::Resumed(done));
}

pub(super) fn settled(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    assert_eq!(settle(f, "k", Outcome::Done).unwrap_err().code, Code::NotFound);
    begin(f, &begin_wish(&a, "t", "k")).unwrap();
    let done = settle(f, "k", Outcome::Done).unwrap();
    assert_eq!(
        (done.state, done.settled.clone()),
        (RequestState::Settled, Some(told(Outcome::Done)))
    );
    let (task, key) = (done.task.clone(), done.key.clone());
    assert_eq!(newest(f), Happening::Settled { task, key, told: told(Outcome::Done) });
    let history = f.authority().history(&ws(), 99).unwrap();
    assert_eq!(settle(f, "k", Outcome::Done).unwrap(), done);
    assert_eq!(settle(f, "k", Outcome::NotDone).unwrap_err().code, Code::AlreadySettled);
    assert_eq!(rows(f, false), [done]);
    assert_eq!(f.authority().history(&ws(), 99).unwrap(), history);
    assert_eq!(rows(f, true), []);
}

pub(super) fn one_of_many(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    let answers: Vec<_> = std::thread::scope(|scope| {
        let tries: Vec<_> = (0..8)
            .map(|n| {
                let wish = begin_wish(&a, "t", &format!("k{n}"));
                scope.spawn(move || begin(f, &wish).unwrap())
            })
            .collect();
        tries.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let first = answers.iter().filter(|answer| matches!(answer, Begun::Begun(_))).count();
    let taken = answers.iter().filter(|answer| matches!(answer, Begun::Taken(_))).count();
    assert_eq!((first, taken, rows(f, false).len()), (1, 7, 1));
}
