//! Linearizability: what concurrent clients are told, lost answers among them, can be put into one order
//! that a workspace allows (`spec.rs`), checked by stateright's tester. Clients that are wrong on
//! purpose are caught by the same check, and so are authorities with a fault in them (`faulty.rs`).
//! `OVERFENCE_ROUNDS` makes it more rounds.

mod clients;
mod faulty;
mod killed;
mod spec;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use overfence::authority::{Authority, SqliteAuthority};
use overfence::store::{Durability, Paths, Store};

use crate::host::{Place, Test, rounds};
use clients::{BUGS, Bug, Client, Clock, Round};
use faulty::{FAULTS, Fault, Faulty};

/// A clock that stands, for a store.
pub fn clock() -> overfence::store::Clock {
    Clock::default().store()
}

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "i1_two_handles_are_linearizable", run: two_handles },
        Test { name: "i1_two_connections_past_the_lock_are_linearizable", run: two_connections },
        Test { name: "planted_bugs_are_not_linearizable", run: planted },
        Test { name: "faults_of_an_authority_are_not_linearizable", run: faults },
        Test { name: "wrong_answers_of_an_agent_are_not_linearizable", run: killed::table },
        Test { name: "i8_an_agent_that_is_killed_is_linearizable", run: killed::killed },
    ]
}

/// Three clients for a few steps; whether what they saw can be put into one order.
fn round(
    handles: &[&dyn Authority],
    expire: &(dyn Fn() + Sync),
    n: u64,
    bug: Option<Bug>,
) -> Result<usize, String> {
    let round = &Round::new(handles, expire, &format!("w{n}"));
    std::thread::scope(|scope| {
        for client in 0..3 {
            let mut client = Client::new(round, bug, n * 3 + client);
            scope.spawn(move || client.run(5));
        }
    });
    let history = &round.history;
    if history.fits() { Ok(history.len()) } else { Err(history.shown()) }
}

fn sqlite(dir: &Path, clock: &Clock) -> Arc<Store> {
    Arc::new(Store::open(&Paths::under(dir), clock.store()).unwrap())
}

/// Another store on the same files. The lock allows none ([`crate::compete`]), so it is taken away, as no
/// product does: what the database itself promises is to be seen without it.
pub fn past_the_lock(dir: &Path, clock: overfence::store::Clock) -> Store {
    std::fs::remove_file(dir.join("lock")).unwrap();
    Store::open(&Paths::under(dir), clock).unwrap()
}

/// Two handles of one store: what one agent's threads have, one connection behind one lock.
fn two_handles(place: &Place) {
    let (clock, dir) = (Clock::default(), place.dir.join("store"));
    let store = sqlite(&dir, &clock);
    among(&clock, [Arc::clone(&store), store]);
}

/// Two connections to one database, which nothing keeps apart but its transactions.
fn two_connections(place: &Place) {
    let (clock, dir) = (Clock::default(), place.dir.join("store"));
    let first = sqlite(&dir, &clock);
    let second = Arc::new(past_the_lock(&dir, clock.store()));
    among(&clock, [first, second]);
}

fn among(clock: &Clock, stores: [Arc<Store>; 2]) {
    let handles = stores.each_ref().map(|store| SqliteAuthority::new(Arc::clone(store)));
    let handles: Vec<&dyn Authority> = handles.iter().map(|h| h as &dyn Authority).collect();
    let expire = || {
        let passed = stores[0].transact(Durability::Lazy, |_| {
            clock.expire();
            Ok(())
        });
        passed.unwrap();
    };
    let (begun, rounds) = (Instant::now(), rounds(60));
    let mut ops = 0;
    for n in 0..rounds {
        match round(&handles, &expire, n, None) {
            Ok(seen) => ops += seen,
            Err(shown) => panic!("round {n} cannot be put into an order:\n{shown}"),
        }
    }
    println!("{rounds} rounds, {ops} steps, {:?}", begun.elapsed());
    assert!(ops as u64 >= rounds * 12, "steps are missing");
}

/// A round on an authority of its own, without a disk.
fn alone(n: u64, bug: Option<Bug>, fault: Option<Fault>) -> Result<usize, String> {
    let clock = Clock::default();
    let authority = Faulty::new(clock.store(), fault);
    round(&[&authority], &|| clock.expire(), n, bug)
}

/// And it is what was planted that is caught.
fn without() {
    for n in 0..400 {
        if let Err(shown) = alone(n, None, None) {
            panic!("round {n} cannot be put into an order:\n{shown}");
        }
    }
}

/// Clients that are wrong.
fn planted(_: &Place) {
    for bug in BUGS {
        let caught = (0..3000).find(|n| alone(*n, Some(bug), None).is_err());
        println!("{bug:?}: caught in round {caught:?}");
        assert!(caught.is_some(), "{bug:?} was not caught");
    }
    without();
}

/// Clients that are right, of an authority that is wrong.
fn faults(_: &Place) {
    for fault in FAULTS {
        let caught = (0..3000).find(|n| alone(*n, None, Some(fault)).is_err());
        println!("{fault:?}: caught in round {caught:?}");
        assert!(caught.is_some(), "{fault:?} was not caught");
    }
    without();
}
