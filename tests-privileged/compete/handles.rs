//! Takeovers at the authority itself. It is one database in one directory, which one process has under a
//! lock; so two handles are two of one store, on one connection, from threads of one agent. What keeps
//! them apart without that is the database's own transactions: two processes race past the lock, which
//! a test takes away and no product does.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use overfence::authority::{Authority as _, NewWorkspace, Rider, SqliteAuthority, no_rider};
use overfence::model::code::Code;
use overfence::model::head::{Digest, Head, HeadAt};
use overfence::model::ids::{HostId, LeaseId, PublicationKey, SessionId, WorkspaceId};
use overfence::model::journal::{Draft, Journal};
use overfence::model::lease::{HolderKind, LeaseState};
use overfence::model::workspace::{Acquire, Acquired, Publish, Refusal};
use overfence::store::{Paths, Store};
use serde_json::{Value, json};

use super::Rival;
use crate::agent_process::{Host, id_of};
use crate::host::{Place, paced_ttl, rounds};
use crate::linear;

fn new(id: &WorkspaceId) -> NewWorkspace {
    NewWorkspace {
        id: id.clone(),
        owner: "ann".parse().unwrap(),
        contact: String::new(),
        labels: BTreeMap::new(),
        layers: vec![],
    }
}

fn wish(id: &WorkspaceId, force: bool) -> Acquire {
    Acquire {
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
    }
}

pub fn of_one_store(place: &Place) {
    let store = Store::open(&Paths::under(&place.dir.join("store")), linear::clock()).unwrap();
    let store = Arc::new(store);
    let handles = [SqliteAuthority::new(Arc::clone(&store)), SqliteAuthority::new(store)];
    let id: &WorkspaceId = &"w".parse().unwrap();
    handles[0].create(&new(id), no_rider()).unwrap().unwrap();
    let (rounds, begun) = (rounds(200), Instant::now());
    let start = Barrier::new(2);
    let answers: Mutex<Vec<Result<Acquired, Refusal>>> = Mutex::default();
    std::thread::scope(|scope| {
        for (n, handle) in handles.iter().enumerate() {
            let (start, answers) = (&start, &answers);
            scope.spawn(move || {
                let mut issued = BTreeSet::new();
                for round in 0..rounds {
                    let force = round % 2 == 1;
                    let wish = wish(id, force);
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
    id: &WorkspaceId,
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

/// The layer that a generation publishes.
fn layer(generation: u64) -> Digest {
    let mut bytes = [7; 32];
    bytes[..8].copy_from_slice(&generation.to_le_bytes());
    Digest(bytes)
}

fn written<'a, T>(kind: &str, id: &WorkspaceId) -> Rider<'a, T> {
    let draft = Draft {
        kind: kind.to_owned(),
        workspace: Some(id.clone()),
        session: None,
        generation: None,
        actor: "test".to_owned(),
        detail: Value::Null,
    };
    Box::new(move |_| Journal { sessions: vec![], entries: vec![draft] })
}

/// A process with a store of its own on the same files: takes the workspace, publishes on what the grant
/// showed, at once or when it is told to, and gives it back.
pub fn rival(dir: &Path) -> ! {
    let store = match dir.join("lock").exists() {
        true => linear::past_the_lock(dir, linear::clock()),
        false => Store::open(&Paths::under(dir), linear::clock()).unwrap(),
    };
    let authority = SqliteAuthority::new(Arc::new(store));
    println!("{}", json!({ "ready": true }));
    let mut had: Option<Acquired> = None;
    for line in std::io::stdin().lines() {
        let asked: Value = serde_json::from_str(&line.unwrap()).unwrap();
        let id: WorkspaceId = asked["workspace"].as_str().unwrap().parse().unwrap();
        let answer = match (asked["ask"].as_str().unwrap(), &had) {
            ("create", _) => {
                authority.create(&new(&id), no_rider()).unwrap().unwrap();
                json!({})
            }
            ("take", _) => {
                let wish = wish(&id, asked["force"] == true);
                match authority.acquire(&wish, written("take", &id)).unwrap() {
                    Err(refusal) => json!({ "refused": refusal.code }),
                    Ok(acquired) => {
                        let acquired = had.insert(acquired);
                        match asked["publish"] == true {
                            true => publish(&authority, &id, acquired),
                            false => json!({ "generation": acquired.lease.generation.0 }),
                        }
                    }
                }
            }
            ("publish", Some(acquired)) => publish(&authority, &id, acquired),
            ("give", Some(Acquired { lease, .. })) => {
                let (generation, state) = (lease.generation, LeaseState::Released);
                let rider = written("give", &id);
                let ended = authority.end(&id, lease.id, generation, state, "test", rider);
                json!({ "ended": ended.unwrap().is_ok() })
            }
            (asked, had) => panic!("{asked} with {had:?}"),
        };
        println!("{answer}");
    }
    std::process::exit(0);
}

fn publish(authority: &SqliteAuthority, id: &WorkspaceId, acquired: &Acquired) -> Value {
    let lease = &acquired.lease;
    let wish = Publish {
        workspace: id.clone(),
        lease: lease.id,
        generation: lease.generation,
        session: lease.session,
        expected: acquired.at.clone(),
        key: PublicationKey::fresh(),
        layer: layer(lease.generation.0),
        whole: None,
        reverts_to: None,
    };
    let generation = lease.generation.0;
    match authority.publish(&wish, written("publish", id)).unwrap() {
        Ok(at) => json!({ "generation": generation, "version": at.version.0 }),
        Err(refusal) => json!({ "generation": generation, "not_published": refusal.code }),
    }
}

/// So many rounds on one workspace: a head gets no deeper.
const EACH: u64 = 50;

pub fn past_the_lock(place: &Place) {
    let dir = place.dir.join("store");
    std::fs::create_dir(&dir).unwrap();
    let mut rivals = [0, 1].map(|_| {
        let mut rival = Rival::new(&dir);
        assert_eq!(rival.told()["ready"], true);
        rival
    });
    let (rounds, begun) = (rounds(60), Instant::now());
    let mut owners: BTreeMap<String, Owners> = BTreeMap::new();
    for round in 0..rounds {
        let workspace = format!("w{}", round / EACH);
        if round % EACH == 0 {
            rivals[0].ask(&json!({ "ask": "create", "workspace": workspace }));
            rivals[0].told();
        }
        // By turns over nobody, where one gets it, and by force, where both do.
        let force = round % 2 == 1;
        // Both hold a grant, one of them the later, before either publishes.
        let apart = round % 4 == 3;
        let mut both = |wish: Value| {
            rivals.iter_mut().for_each(|rival| rival.ask(&wish));
            rivals.each_mut().map(Rival::told)
        };
        let ask = |ask: &str| json!({ "ask": ask, "workspace": workspace });
        let mut take = ask("take");
        (take["force"], take["publish"]) = (force.into(), (!apart).into());
        let mut told = both(take);
        if apart {
            told = both(ask("publish"));
            assert!(told.iter().any(|one| one["not_published"].is_string()), "{told:?}");
        }
        owners.entry(workspace.clone()).or_default().took(&told, force);
        if force {
            // Only the present lease is there to be given back.
            let given = both(ask("give"));
            let ended = given.iter().filter(|one| one["ended"] == true).count();
            assert_eq!(ended, 1, "round {round}: {given:?}");
        }
    }
    rivals.into_iter().for_each(Rival::end);
    let store = Arc::new(Store::open(&Paths::under(&dir), linear::clock()).unwrap());
    let authority = SqliteAuthority::new(Arc::clone(&store));
    let (mut published, mut refused) = (0, 0);
    for (workspace, owners) in &owners {
        owners.judge(&authority, &workspace.parse().unwrap());
        (published, refused) = (published + owners.layers.len(), refused + owners.refused);
    }
    let report = store.verify_evidence().unwrap();
    assert_eq!(report.fault, None, "one chain, written by two");
    println!("{rounds} rounds, {published} published, {refused} not, {:?}", begun.elapsed());
}

/// What was acknowledged in one workspace.
#[derive(Default)]
struct Owners {
    generations: BTreeSet<u64>,
    /// By version.
    layers: BTreeMap<u64, Digest>,
    refused: usize,
}

impl Owners {
    fn took(&mut self, told: &[Value; 2], force: bool) {
        let granted: Vec<_> = told.iter().filter_map(|one| one["generation"].as_u64()).collect();
        assert_eq!(granted.len(), if force { 2 } else { 1 }, "{told:?}");
        let before = self.generations.last().copied().unwrap_or(0);
        for generation in &granted {
            assert!(*generation > before, "{before} was issued before: {told:?}");
            assert!(self.generations.insert(*generation), "issued twice: {told:?}");
        }
        let newest = granted.iter().max().copied();
        for one in told {
            match (one["generation"].as_u64(), one["version"].as_u64()) {
                (None, _) => assert_eq!(one["refused"], "lease_held", "{told:?}"),
                (Some(generation), Some(version)) => {
                    let before = self.layers.insert(version, layer(generation));
                    assert_eq!(before, None, "version {version} was made twice: {told:?}");
                }
                (generation, None) => {
                    // The owner publishes; the other one only as long as it was the owner.
                    assert!(generation < newest, "{told:?}");
                    assert_eq!(one["not_published"], "stale_generation", "{told:?}");
                    self.refused += 1;
                }
            }
        }
    }

    /// The record, the head and the history say what was acknowledged, in the order of the versions.
    fn judge(&self, authority: &SqliteAuthority, id: &WorkspaceId) {
        let record = authority.get(id).unwrap().unwrap();
        assert_eq!(Some(&record.generation.0), self.generations.last());
        assert_eq!(self.generations.len() as u64, record.generation.0, "a generation is missing");
        let layers: Vec<_> = self.layers.values().copied().collect();
        let versions: Vec<_> = self.layers.keys().copied().collect();
        assert_eq!(versions, (1..=layers.len() as u64).collect::<Vec<_>>());
        let HeadAt { version, head } = record.at;
        assert_eq!((version.0, head), (layers.len() as u64, Head(layers.clone())));
        let rows = authority.history(id, usize::MAX).unwrap();
        let rows = rows.iter().map(|row| serde_json::to_value(row).unwrap());
        let rows: Vec<Value> = rows.collect();
        let of = |what: &str| rows.iter().filter(|row| row["what"] == what).count();
        assert_eq!((of("published"), of("acquired")), (layers.len(), self.generations.len()));
        let refused = rows.iter().filter(|row| row["verb"] == "publish").count();
        assert_eq!(refused, self.refused);
    }
}

/// No second process has the state directory, not even by another socket; the first one goes on.
pub fn locked(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None), "{}", host.log());
    let opened = host.open("w", &paced_ttl(60));
    let state = host.dir.join("state");
    let refused = Store::open(&Paths::under(&state), linear::clock()).unwrap_err();
    let said = refused.to_string();
    assert!(said.contains("another agent runs on") && said.contains("stop it first"), "{said}");
    // Another agent, with all else of its own.
    let text = std::fs::read_to_string(&host.config).unwrap();
    let run = host.dir.join("run");
    let other = host.dir.join("elsewhere");
    let text = text.replace(&format!("{run:?}"), &format!("{other:?}"));
    assert!(text.contains("elsewhere"), "{text}");
    let config = host.dir.join("second.toml");
    std::fs::write(&config, text).unwrap();
    let second = std::process::Command::new(&host.binary)
        .args(["agent", "--config"])
        .arg(&config)
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(!second.status.success(), "{said}");
    assert!(said.contains("another agent runs on") && said.contains("stop it first"), "{said}");
    assert!(!other.join("overfence.sock").exists());
    host.must(&["session", "checkpoint", &id_of(&opened)]);
    host.must(&["session", "close", &id_of(&opened), "--discard", "--yes"]);
}
