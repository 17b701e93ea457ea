//! Two takeovers compete: separate processes over the socket, and two handles of one authority. One
//! owner each time, and no generation twice. `OVERFENCE_ROUNDS=10000` is the full number.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use overfence::authority::{Authority as _, NewWorkspace, SqliteAuthority, no_rider};
use overfence::model::code::Code;
use overfence::model::ids::{HostId, LeaseId, SessionId};
use overfence::model::lease::{HolderKind, LeaseState};
use overfence::model::workspace::{Acquire, Acquired, Refusal};
use overfence::store::{Paths, Store};
use serde_json::{Value, json};

use crate::agent_process::{Host, ask_at, id_of};
use crate::host::{Place, Test, paced, rounds};

/// Says to the program that it is a rival; its value is the socket.
const RIVAL: &str = "OVERFENCE_TEST_RIVAL";

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "i1_takeovers_of_two_processes_leave_one_owner", run: processes },
        Test { name: "i2_takeovers_by_two_handles_leave_one_owner", run: handles },
    ]
}

/// Becomes a rival: asks what it is told to, line by line, and tells what was answered.
pub fn rival_if_asked() {
    let Some(socket) = std::env::var_os(RIVAL).map(PathBuf::from) else { return };
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let answer = ask_at(&socket, "POST", "/v1/sessions", &line).unwrap();
        println!("{}", serde_json::from_str::<Value>(&answer.body).unwrap());
    }
    std::process::exit(0);
}

struct Rival {
    child: Child,
    ask: ChildStdin,
    told: Lines<BufReader<ChildStdout>>,
}

impl Rival {
    fn new(socket: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(RIVAL, socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (ask, told) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, ask, told: BufReader::new(told).lines() }
    }

    fn told(&mut self) -> Value {
        serde_json::from_str(&self.told.next().unwrap().unwrap()).unwrap()
    }

    fn end(mut self) {
        drop(self.ask);
        assert!(self.child.wait().unwrap().success());
    }
}

fn processes(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None), "{}", host.log());
    host.must(&["workspace", "create", "w"]);
    let ask = |method: &str, path: &str, body: Value| {
        let answer = host.http(method, path, &body.to_string());
        let told: Value = serde_json::from_str(&answer.body).unwrap_or_default();
        assert!(answer.status < 300, "{path}: {told:#}\n{}", host.log());
        told
    };
    let socket = host.dir.join("run/overfence.sock");
    let mut rivals = [Rival::new(&socket), Rival::new(&socket)];
    let (rounds, begun) = (rounds(20), Instant::now());
    let (mut issued, mut owner) = (BTreeSet::new(), None::<String>);
    let (mut both, mut newest) = (0, 0);
    for round in 0..rounds {
        // By turns over somebody who holds it, and over nobody.
        let force = owner.is_some();
        let wish = json!({ "workspace": "w", "force": force, "ttl_ms": 600_000 });
        for rival in &mut rivals {
            writeln!(rival.ask, "{wish}").unwrap();
        }
        let told = rivals.each_mut().map(Rival::told);
        let granted: Vec<_> = told.iter().filter(|told| told["session"].is_object()).collect();
        assert!(!granted.is_empty(), "round {round}: nobody got it: {told:#?}\n{}", host.log());
        for refused in told.iter().filter(|told| !told["session"].is_object()) {
            let code = refused["code"].as_str().unwrap_or_default();
            // A grant that was taken over while it was still being opened comes to nothing.
            let expected = if force { "lease_lost stale_generation" } else { "lease_held" };
            assert!(expected.contains(code), "round {round}: {refused:#}");
        }
        assert!(force || granted.len() == 1, "round {round}: two owners: {told:#?}");
        both += usize::from(granted.len() == 2);
        for one in &granted {
            let generation = one["session"]["generation"].as_u64().unwrap();
            assert!(issued.insert(generation), "round {round}: {generation} was issued before");
        }
        let last = granted.iter().max_by_key(|one| one["session"]["generation"].as_u64()).unwrap();
        let w = ask("GET", "/v1/workspaces/w", json!({}));
        let generation = w["generation"].as_u64().unwrap();
        assert!(generation > newest, "round {round}: {w:#}");
        newest = generation;
        // One owner: who got the highest generation, unless that one came to nothing itself.
        if w["writer_session"].is_string() {
            assert_eq!(
                w["writer_session"], last["session"]["id"],
                "round {round}: {told:#?} {w:#}"
            );
            assert_eq!(last["session"]["generation"], generation, "round {round}");
        }
        let sessions = ask("GET", "/v1/sessions", json!({}));
        let active = sessions.as_array().unwrap().iter().filter(|s| s["state"] == "ACTIVE");
        let active: Vec<_> = active.map(|s| s["id"].clone()).collect();
        assert!(active.len() <= 1, "round {round}: {active:?}");
        owner = match owner {
            None => Some(id_of(last)),
            Some(_) => {
                // So many lost leases open the breaker, which would keep the losers' directories.
                ask("POST", "/v1/breaker/reset", json!({ "reason": "test" }));
                // Who was stopped is kept until somebody decides.
                for lost in sessions.as_array().unwrap() {
                    if lost["state"] == "PRESERVED" {
                        let path = format!("/v1/sessions/{}/discard", lost["id"].as_str().unwrap());
                        ask("POST", &path, json!({}));
                    }
                }
                if active.len() == 1 {
                    let path = format!("/v1/sessions/{}/close", active[0].as_str().unwrap());
                    ask("POST", &path, json!({ "mode": "discard" }));
                }
                None
            }
        };
    }
    let took = begun.elapsed();
    println!("{rounds} rounds, {both} times both got it in turn, {took:?}");
    rivals.into_iter().for_each(Rival::end);
    // Nothing is left of the losers once somebody decided about them.
    let begun = Instant::now();
    if let Some(id) = owner {
        host.must(&["session", "close", &id, "--discard", "--yes"]);
    }
    loop {
        let left = host.must(&["session", "list"]);
        let left = left.as_array().unwrap();
        if left.is_empty() {
            break;
        }
        for lost in left.iter().filter(|s| s["state"] == "PRESERVED") {
            host.must(&["preserved", "discard", lost["id"].as_str().unwrap(), "--yes"]);
        }
        assert!(begun.elapsed() < paced(Duration::from_secs(60)), "{}", host.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn handles(place: &Place) {
    let clock = super::linear::clock();
    let store = Store::open(&Paths::under(&place.dir.join("store")), clock).unwrap();
    let store = Arc::new(store);
    let handles = [SqliteAuthority::new(Arc::clone(&store)), SqliteAuthority::new(store)];
    let id = "w".parse().unwrap();
    let new = NewWorkspace {
        id,
        owner: "ann".parse().unwrap(),
        contact: String::new(),
        labels: Default::default(),
        layers: vec![],
    };
    handles[0].create(&new, no_rider()).unwrap().unwrap();
    let (rounds, begun) = (rounds(200), Instant::now());
    let start = Barrier::new(2);
    let answers: Mutex<Vec<Result<Acquired, Refusal>>> = Mutex::default();
    std::thread::scope(|scope| {
        for (n, handle) in handles.iter().enumerate() {
            let (start, answers, id) = (&start, &answers, &new.id);
            scope.spawn(move || {
                let mut issued = BTreeSet::new();
                for round in 0..rounds {
                    let force = round % 2 == 1;
                    let wish = Acquire {
                        workspace: id.clone(),
                        lease: LeaseId::fresh(),
                        owner: "ann".parse().unwrap(),
                        host: HostId::from_u128(1),
                        session: SessionId::fresh(),
                        holder: HolderKind::Beat,
                        ttl: Duration::from_secs(60),
                        max_lifetime: Duration::from_secs(86_400),
                        force: force.then(|| "test".to_owned()),
                        only_at: None,
                        seen: Default::default(),
                    };
                    start.wait();
                    let answer = handle.acquire(&wish, no_rider()).unwrap();
                    answers.lock().unwrap().push(answer);
                    start.wait();
                    if n == 0 {
                        judge(handle, id, force, &mut issued, &mut answers.lock().unwrap());
                    }
                    start.wait();
                }
            });
        }
    });
    println!("{rounds} rounds, {:?}", begun.elapsed());
}

/// One owner; after a forced round it gives the workspace back.
fn judge(
    handle: &SqliteAuthority,
    id: &overfence::model::ids::WorkspaceId,
    force: bool,
    issued: &mut BTreeSet<u64>,
    answers: &mut Vec<Result<Acquired, Refusal>>,
) {
    let answers = std::mem::take(answers);
    let granted: Vec<_> = answers.iter().flatten().map(|got| &got.lease).collect();
    assert_eq!(granted.len(), if force { 2 } else { 1 }, "{answers:#?}");
    for refusal in answers.iter().filter_map(|answer| answer.as_ref().err()) {
        assert_eq!(refusal.code, Code::LeaseHeld);
    }
    for lease in &granted {
        assert!(issued.insert(lease.generation.0), "issued before: {}", lease.generation);
    }
    let newest = granted.iter().max_by_key(|lease| lease.generation).unwrap();
    let owner = handle.get(id).unwrap().unwrap();
    let lease = owner.lease.unwrap();
    assert_eq!((lease.id, owner.generation), (newest.id, newest.generation));
    if force {
        let (generation, state) = (lease.generation, LeaseState::Released);
        handle.end(id, lease.id, generation, state, "test", no_rider()).unwrap().unwrap();
    }
}
