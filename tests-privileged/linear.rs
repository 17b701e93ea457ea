//! Linearizability: what concurrent clients are told, lost answers among them, can be put into one order
//! that a workspace allows (`spec.rs`), checked by stateright's tester. Clients that are wrong on
//! purpose are caught by the same check. `OVERFENCE_ROUNDS` makes it more rounds.

mod clients;
mod spec;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use overfence::authority::memory::{MemoryAuthority, State};
use overfence::authority::{Authority, SqliteAuthority};
use overfence::model::code::Code;
use overfence::store::{Durability, Paths, Store};
use serde_json::{Value, json};

use crate::agent_process::{Host, id_of};
use crate::host::{Place, Test, paced, rounds};
use clients::{BUGS, Bug, Client, Clock, Dice, History, Round};
use spec::{Op, Ret};

/// A clock that stands, for a store.
pub fn clock() -> overfence::store::Clock {
    Clock::default().store()
}

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "i1_two_handles_are_linearizable", run: two_handles },
        Test { name: "planted_bugs_are_not_linearizable", run: planted },
        Test { name: "i8_an_agent_that_is_killed_is_linearizable", run: killed },
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

fn two_handles(place: &Place) {
    let (clock, dir) = (Clock::default(), place.dir.join("store"));
    let store = sqlite(&dir, &clock);
    let handles =
        [SqliteAuthority::new(Arc::clone(&store)), SqliteAuthority::new(Arc::clone(&store))];
    let handles: Vec<&dyn Authority> = handles.iter().map(|h| h as &dyn Authority).collect();
    let expire = || {
        let passed = store.transact(Durability::Lazy, |_| {
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
fn alone(n: u64, bug: Option<Bug>) -> Result<usize, String> {
    let clock = Clock::default();
    let authority = MemoryAuthority::new(State::default(), clock.store());
    round(&[&authority], &|| clock.expire(), n, bug)
}

fn planted(_: &Place) {
    for bug in BUGS {
        let caught = (0..3000).find(|n| alone(*n, Some(bug)).is_err());
        println!("{bug:?}: caught in round {caught:?}");
        assert!(caught.is_some(), "{bug:?} was not caught");
    }
    // And it is the bugs that are caught.
    for n in 0..400 {
        if let Err(shown) = alone(n, None) {
            panic!("round {n} cannot be put into an order:\n{shown}");
        }
    }
}

/// A client of a running agent that may be killed under it.
struct Caller<'a> {
    host: &'a Host,
    workspace: String,
    history: &'a History,
    dice: Dice,
    name: u32,
    session: Option<(String, u64)>,
}

impl Caller<'_> {
    fn ask(&self, method: &str, path: &str, body: Value) -> Option<(u16, Value)> {
        let answer = self.host.try_http(method, path, &body.to_string())?;
        Some((answer.status, serde_json::from_str(&answer.body).ok()?))
    }

    fn step(&mut self) {
        let op = match (&self.session, self.dice.below(5)) {
            (_, 0) => Op::Look,
            (None, n) => Op::Acquire { force: n % 2 == 0 },
            (Some(_), 1) => Op::Acquire { force: true },
            (Some((_, generation)), 2 | 3) => {
                Op::Publish { generation: *generation, expected: 0, key: 0, layer: 0 }
            }
            (Some((_, generation)), _) => Op::Release { generation: *generation },
        };
        self.history.asks(self.name, op);
        match self.perform(op) {
            Some(ret) => self.history.told(self.name, ret),
            None => self.name = self.history.name(),
        }
    }

    fn perform(&mut self, op: Op) -> Option<Ret> {
        let refused = |body: &Value| {
            let code = body["code"].as_str().unwrap_or_default();
            // Of any other complaint nobody can say that nothing happened: it is a lost answer.
            let nothing = match op {
                Op::Acquire { .. } => code == "lease_held",
                _ => matches!(
                    code,
                    "stale_generation"
                        | "lease_expired"
                        | "lease_revoked"
                        | "lease_released"
                        | "version_mismatch"
                        | "head_mismatch"
                ),
            };
            nothing.then_some(Ret::Refused(Code::WrongState))
        };
        let current = self.session.clone().map(|(id, _)| id).unwrap_or_default();
        match op {
            Op::Acquire { force } => {
                let body =
                    json!({ "workspace": self.workspace, "force": force, "ttl_ms": 600_000 });
                let (status, body) = self.ask("POST", "/v1/sessions", body)?;
                if status >= 300 {
                    return refused(&body);
                }
                let generation = body["session"]["generation"].as_u64()?;
                self.session = Some((id_of(&body), generation));
                let version = body["session"]["base"]["version"].as_u64()?;
                Some(Ret::Granted { generation, version })
            }
            Op::Publish { .. } => {
                let merged = self.host.dir.join("state/sessions").join(&current).join("merged");
                let _ = std::fs::write(merged.join("f"), self.dice.below(u64::MAX).to_string());
                let path = format!("/v1/sessions/{current}/checkpoint");
                let (status, body) = self.ask("POST", &path, json!({}))?;
                if status >= 300 {
                    return refused(&body);
                }
                Some(Ret::Published { version: body["at"]["version"].as_u64()? })
            }
            Op::Release { .. } => {
                let path = format!("/v1/sessions/{current}/close");
                let (status, body) = self.ask("POST", &path, json!({ "mode": "discard" }))?;
                self.session = None;
                if status < 300 { Some(Ret::Done) } else { refused(&body) }
            }
            _ => {
                let path = format!("/v1/workspaces/{}", self.workspace);
                let (_, body) = self.ask("GET", &path, json!({}))?;
                let generation = body["generation"].as_u64()?;
                Some(Ret::Seen { generation, version: body["version"].as_u64()? })
            }
        }
    }
}

fn killed(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None), "{}", host.log());
    let (begun, rounds) = (Instant::now(), rounds(6).min(200));
    let mut told = 0;
    for n in 0..rounds {
        let workspace = format!("w{n}");
        host.must(&["workspace", "create", &workspace]);
        let history = History::new(true);
        let (dead, pid) = (AtomicBool::new(false), host.agent_pid());
        std::thread::scope(|scope| {
            let callers: Vec<_> = (0..3)
                .map(|client| {
                    let (host, history, dead) = (&host, &history, &dead);
                    let workspace = workspace.clone();
                    scope.spawn(move || {
                        let (dice, name) = (Dice::new(n * 3 + client), history.name());
                        let session = None;
                        let mut caller = Caller { host, workspace, history, dice, name, session };
                        for _ in 0..6 {
                            caller.step();
                            if dead.load(Ordering::SeqCst) {
                                break;
                            }
                        }
                    })
                })
                .collect();
            // In the middle of what comes after the first few answers.
            let waited = Instant::now();
            while history.told_so_far() < 3 + (n % 5) as usize
                && waited.elapsed() < paced(Duration::from_secs(10))
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            std::thread::sleep(Duration::from_millis(7 * (n % 9)));
            dead.store(true, Ordering::SeqCst);
            let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            for caller in callers {
                caller.join().unwrap();
            }
        });
        host.kill_agent();
        assert!(host.start(None), "{}", host.log());
        // What the next one answers is part of the history.
        let w = host.must(&["workspace", "status", &workspace]);
        let name = history.name();
        history.asks(name, Op::Look);
        let (generation, version) = (w["generation"].as_u64(), w["version"].as_u64());
        let (generation, version) = (generation.unwrap(), version.unwrap());
        history.told(name, Ret::Seen { generation, version });
        told += history.told_so_far();
        assert!(history.fits(), "round {n} cannot be put into an order:\n{}", history.shown());
    }
    println!("{rounds} rounds, {told} answers, {:?}", begun.elapsed());
    assert!(told as u64 > rounds * 3, "hardly anything was answered");
}
