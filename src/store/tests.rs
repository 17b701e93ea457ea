//! Tests of the store as a whole.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use super::*;
use crate::authority::{Authority as _, NewWorkspace, SqliteAuthority, no_rider};
use crate::model::head::{Digest, HeadAt};
use crate::model::ids::{BootId, Generation, HostId, LeaseId, PublicationKey, SessionId};
use crate::model::journal::{Draft, Journal};
use crate::model::lease::HolderKind;
use crate::model::session::{Policy, Session, State};
use crate::model::ticket::Ticket;
use crate::model::time::{BootInstant, BootNs};
use crate::model::workspace::{Acquire, Seen};

fn boot() -> BootId {
    BootId(uuid::Uuid::from_u128(1))
}

fn clock() -> Clock {
    Arc::new(|| BootInstant { boot: boot(), ns: BootNs(42) })
}

fn open(dir: &Path) -> Result<Store, Error> {
    Store::open(&Paths::under(dir), clock())
}

fn session(n: u128) -> Session {
    Session {
        id: SessionId::from_u128(n),
        workspace: "w".parse().unwrap(),
        owner: "ann".parse().unwrap(),
        host: HostId::from_u128(1),
        boot: boot(),
        lease: LeaseId::from_u128(n),
        generation: Generation(1),
        holder: HolderKind::Beat,
        token: crate::model::head::Digest([7; 32]),
        limits: Default::default(),
        external: None,
        upper: Default::default(),
        run_as: crate::model::session::RunAs {
            uid: 1000,
            gid: 1000,
            mapped: false,
            host_network: false,
        },
        ttl: std::time::Duration::from_secs(30),
        ends: BootNs(9),
        base: HeadAt::default(),
        expected: HeadAt::default(),
        own_layer: None,
        labels: BTreeMap::new(),
        policy: Policy::default(),
        fence: crate::model::session::FenceWish::default(),
        state: State::Opening,
        work: None,
        facts: Default::default(),
        doubt: None,
        loss: None,
        holders: Vec::new(),
        busy_since: None,
        seal: false,
        upper_freeze: Default::default(),
        run_on: false,
        blockers: Vec::new(),
        altered: None,
        unknown: BTreeMap::from([(PublicationKey::from_u128(5), Digest([6; 32]))]),
        disposition: None,
        witnessed: std::time::Duration::ZERO,
        keep_until: None,
        tries: 0,
        trouble: None,
        seeded: None,
    }
}

fn seen(generation: u64) -> Seen {
    Seen { generation: Generation(generation), version: Default::default() }
}

fn draft(n: u128) -> Draft {
    Draft {
        kind: format!("event-{n}"),
        workspace: Some("w".parse().unwrap()),
        session: Some(SessionId::from_u128(n)),
        generation: Some(Generation(1)),
        actor: "uid 0".to_owned(),
        detail: serde_json::json!({"z": [1, "ä\n"], "a": {"y": null, "b": u64::MAX, "f": 0.1}}),
    }
}

fn journal(n: u128) -> Journal {
    Journal { sessions: vec![session(n)], entries: vec![draft(n)] }
}

fn copy(from: &Path, to: &Path) {
    for part in ["", "keys"] {
        std::fs::create_dir_all(to.join(part)).unwrap();
        for entry in std::fs::read_dir(from.join(part)).unwrap().map(Result::unwrap) {
            if entry.file_type().unwrap().is_file() {
                std::fs::copy(entry.path(), to.join(part).join(entry.file_name())).unwrap();
            }
        }
    }
}

fn sql(dir: &Path, statement: &str) {
    let other = rusqlite::Connection::open(dir.join("overfence.db")).unwrap();
    assert_ne!(other.execute(statement, []).unwrap(), 0, "{statement}");
}

fn fault(store: &Store) -> (u64, String) {
    let fault = store.verify_evidence().unwrap().fault.expect("a fault");
    (fault.seq, fault.why)
}

#[test]
fn a_restart_keeps_everything() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).unwrap();
    let host = store.host();
    for n in 1..=3 {
        store.record(&journal(n), Durability::Full).unwrap();
    }
    let id = SessionId::from_u128(1);
    store.marks().raise(&"w".parse().unwrap(), seen(4)).unwrap();
    store.anchor().unwrap();
    let (sessions, entries) = (store.sessions().unwrap(), store.evidence_since(0, 99).unwrap());
    let report = store.verify_evidence().unwrap();
    drop(store);

    let store = open(dir.path()).unwrap();
    assert_eq!(store.host(), host);
    assert_eq!(store.sessions().unwrap(), sessions);
    assert_eq!(sessions, [1, 2, 3].map(|n| Ok(session(n))));
    assert_eq!(store.evidence_since(0, 99).unwrap(), entries);
    assert_eq!(store.evidence_since(1, 1).unwrap(), entries[1..2]);
    assert_eq!(store.evidence_of(id).unwrap(), entries[..1]);
    assert_eq!(*store.subscribe().borrow(), 3);
    assert_eq!(store.marks().highest(&"w".parse().unwrap()), seen(4));
    assert_eq!(store.verify_evidence().unwrap(), report);
    assert_eq!((report.entries, report.anchors, report.fault), (3, 1, None));
    assert_eq!(report.newest_anchor.unwrap().seq, 3);
    for entry in &entries {
        assert_eq!(evidence::hash_of(entry).unwrap(), entry.hash);
        assert_eq!((entry.boot_ns, &entry.draft.detail), (BootNs(42), &draft(1).detail));
    }
}

#[test]
fn what_is_not_committed_is_not_there_and_what_is_answered_is() {
    let (dir, during, after) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let store = open(dir.path()).unwrap();
    store.record(&journal(1), Durability::Full).unwrap();
    let seen = store.subscribe();
    store
        .transact(Durability::Full, |tx| {
            tx.journal(&journal(2))?;
            // The files as a crash at this point would leave them.
            copy(dir.path(), during.path());
            assert_eq!(*seen.borrow(), 1, "told before it was committed");
            Ok(())
        })
        .unwrap();
    assert_eq!(*seen.borrow(), 2);
    copy(dir.path(), after.path());
    for (place, count) in [(during.path(), 1), (after.path(), 2)] {
        let found = open(place).unwrap();
        assert_eq!(found.sessions().unwrap().len(), count);
        let report = found.verify_evidence().unwrap();
        assert_eq!((report.entries, report.fault), (count as u64, None));
    }
    // A job that fails takes its evidence with it, and the chain goes on where it was.
    let failed = store.transact(Durability::Full, |tx| {
        tx.journal(&journal(3))?;
        tx.set_meta("host", "x")?;
        Err::<(), _>(Error::NotBelieved { why: "the test".to_owned() })
    });
    assert!(failed.is_err());
    store.record(&journal(4), Durability::Lazy).unwrap();
    let kinds: Vec<_> =
        store.evidence_since(0, 9).unwrap().into_iter().map(|e| e.draft.kind).collect();
    assert_eq!(kinds, ["event-1", "event-2", "event-4"]);
    assert_eq!(store.verify_evidence().unwrap().fault, None);
    assert_eq!(*seen.borrow(), 3);
}

#[test]
fn an_altered_session_is_named_and_the_others_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).unwrap();
    for n in 1..=2 {
        store.record(&journal(n), Durability::Full).unwrap();
    }
    let (first, second) = (SessionId::from_u128(1), SessionId::from_u128(2));
    sql(
        dir.path(),
        &format!(
            "UPDATE sessions SET record = replace(record, 'OPENING', 'CLOSED') WHERE id='{first}'"
        ),
    );
    let found = store.sessions().unwrap();
    assert_eq!(found[0].as_ref().unwrap_err().id, first.to_string());
    assert_eq!(found[1], Ok(session(2)));
    // A genuine record under another id.
    sql(
        dir.path(),
        &format!(
            "UPDATE sessions SET (record, mac) = (SELECT record, mac FROM sessions
             WHERE id='{second}') WHERE id='{first}'"
        ),
    );
    assert!(store.sessions().unwrap()[0].is_err());
}

#[test]
fn each_kind_of_tampering_with_evidence_is_found() {
    let table: [(&str, u64, &str); 6] = [
        ("UPDATE evidence SET body = replace(body, 'uid 0', 'uid 9') WHERE seq=3", 3, "altered"),
        (
            "UPDATE evidence SET hash = (SELECT hash FROM evidence WHERE seq=2) WHERE seq=3",
            3,
            "altered",
        ),
        ("DELETE FROM evidence WHERE seq=3", 3, "missing"),
        ("DELETE FROM evidence WHERE seq=1", 1, "missing"),
        ("DELETE FROM evidence WHERE seq>3", 4, "ends before entry 5"),
        ("DELETE FROM evidence", 1, "ends before entry 5"),
    ];
    for (statement, seq, word) in table {
        let dir = tempfile::tempdir().unwrap();
        let store = open(dir.path()).unwrap();
        for n in 1..=5 {
            store.record(&journal(n), Durability::Full).unwrap();
        }
        store.anchor().unwrap();
        assert_eq!(store.verify_evidence().unwrap().fault, None);
        sql(dir.path(), statement);
        let (at, why) = fault(&store);
        assert_eq!(at, seq, "{statement}: {why}");
        assert!(why.contains(word), "{statement}: {why}");
    }
}

#[test]
fn an_altered_entry_with_a_right_hash_breaks_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).unwrap();
    for n in 1..=3 {
        store.record(&journal(n), Durability::Full).unwrap();
    }
    let mut entry = store.evidence_since(1, 1).unwrap().remove(0);
    entry.draft.actor = "uid 9".to_owned();
    let hash = evidence::hash_of(&entry).unwrap();
    sql(
        dir.path(),
        &format!(
            "UPDATE evidence SET hash = '{hash}', body = replace(body, 'uid 0', 'uid 9')
             WHERE seq=2"
        ),
    );
    let (at, why) = fault(&store);
    assert!(at == 3 && why.contains("does not follow"), "{at} {why}");
}

#[test]
fn a_chain_made_anew_and_altered_anchors_are_found() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let store = open(dir.path()).unwrap();
    copy(dir.path(), other.path());
    for n in 1..=3 {
        store.record(&journal(n), Durability::Full).unwrap();
        store.anchor().unwrap();
        store.anchor().unwrap();
    }
    assert_eq!(store.verify_evidence().unwrap().anchors, 3, "one a head");
    let anchors = dir.path().join("evidence.anchors");
    let text = std::fs::read_to_string(&anchors).unwrap();

    // Somebody with all the keys wrote another story of the same length.
    let forged = open(other.path()).unwrap();
    for n in 4..=6 {
        forged.record(&journal(n), Durability::Full).unwrap();
    }
    assert_eq!(forged.verify_evidence().unwrap().fault, None);
    std::fs::write(other.path().join("evidence.anchors"), &text).unwrap();
    drop(forged);
    let (at, why) = fault(&open(other.path()).unwrap());
    assert!(at == 1 && why.contains("made anew"), "{at} {why}");

    drop(store);
    let lines: Vec<&str> = text.lines().collect();
    // Anchors are written anew from the second on, but for one bit.
    let mut bytes = text.clone().into_bytes();
    let middle = lines[0].len() + 1 + lines[1].len() / 2;
    bytes[middle] = if bytes[middle] == b'A' { b'B' } else { b'A' };
    std::fs::write(&anchors, bytes).unwrap();
    let store = open(dir.path()).unwrap();
    let (at, why) = fault(&store);
    assert!(at == 1 && why.contains("line 2"), "{at} {why}");
    drop(store);

    // The end of a write that a crash tore is cut off by the next anchor.
    std::fs::write(&anchors, format!("{text}{}", &lines[0][..99])).unwrap();
    let store = open(dir.path()).unwrap();
    assert_eq!(store.verify_evidence().unwrap().fault, None);
    store.record(&journal(9), Durability::Lazy).unwrap();
    store.anchor().unwrap();
    let report = store.verify_evidence().unwrap();
    assert_eq!((report.anchors, report.fault), (4, None));
}

#[test]
fn one_agent_a_state_directory() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).unwrap();
    let error = open(dir.path()).err().unwrap();
    assert!(matches!(error, Error::Locked { .. }), "{error}");
    assert!(error.to_string().contains("another agent"));
    drop(store);
    open(dir.path()).unwrap();
}

#[test]
fn a_key_is_never_made_twice() {
    let (dir, foreign) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    drop(open(dir.path()).unwrap());
    drop(open(foreign.path()).unwrap());
    for name in ["record.key", "ticket.key"] {
        let path = dir.path().join("keys").join(name);
        let good = std::fs::read(&path).unwrap();
        let wanted = |word: &str| {
            let error = open(dir.path()).err().unwrap();
            assert!(matches!(error, Error::Key { .. }), "{error}");
            assert!(error.to_string().contains(word), "{error}");
        };
        std::fs::remove_file(&path).unwrap();
        wanted("missing");
        assert!(!path.exists());
        std::fs::copy(foreign.path().join("keys").join(name), &path).unwrap();
        wanted("the database was made with");
        std::fs::write(&path, "nonsense").unwrap();
        wanted("not a line");
        std::fs::write(&path, &good).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        wanted("chmod 600");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        open(dir.path()).unwrap();
    }
    for witness in ["high-water", "evidence.anchors"] {
        std::fs::remove_file(dir.path().join(witness)).unwrap();
        let error = open(dir.path()).err().unwrap();
        assert!(matches!(error, Error::WitnessMissing { .. }), "{error}");
        std::fs::write(dir.path().join(witness), "").unwrap();
    }
    open(dir.path()).unwrap();
}

#[test]
fn files_are_for_the_agent_alone() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let store = open(&state).unwrap();
    store.record(&journal(1), Durability::Full).unwrap();
    let mode =
        |name: &str| std::fs::metadata(state.join(name)).unwrap().permissions().mode() & 0o7777;
    for (name, expected) in [
        ("", 0o700),
        ("keys", 0o700),
        ("keys/record.key", 0o600),
        ("keys/ticket.key", 0o600),
        ("keys/ticket.pub", 0o644),
        ("overfence.db", 0o600),
        ("overfence.db-wal", 0o600),
        ("high-water", 0o600),
        ("evidence.anchors", 0o600),
    ] {
        assert_eq!(mode(name), expected, "{name}");
    }
}

#[test]
fn tickets_verify_with_the_public_key_alone_and_nothing_else_does() {
    let (dir, foreign) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let store = open(dir.path()).unwrap();
    let ticket = Ticket {
        workspace: "w".parse().unwrap(),
        session: SessionId::from_u128(1),
        host: store.host(),
        boot: boot(),
        lease: LeaseId::from_u128(1),
        generation: Generation(3),
        base: HeadAt::default(),
        cgroup: "overfence/s-1".to_owned(),
        issued: "2026-11-29T00:00:00Z".to_owned(),
    };
    let token = store.keys().ticket.sign_ticket(&ticket).unwrap();
    assert!(token.starts_with("v4.public."));
    let text = std::fs::read_to_string(dir.path().join("keys/ticket.pub")).unwrap();
    let public = keys::PublicKey::parse(&text).unwrap();
    assert_eq!(public.verify_ticket(&token).unwrap(), ticket);

    let other = open(foreign.path()).unwrap();
    assert!(other.keys().ticket.public().verify_ticket(&token).is_err());
    let mut altered = token.clone().into_bytes();
    altered[40] ^= 1;
    assert!(public.verify_ticket(&String::from_utf8(altered).unwrap()).is_err());
    assert!(public.verify_ticket("").is_err());
    store.record(&journal(1), Durability::Full).unwrap();
    store.anchor().unwrap();
    let anchor = std::fs::read_to_string(dir.path().join("evidence.anchors")).unwrap();
    assert!(public.verify_ticket(anchor.trim()).is_err(), "an anchor is no ticket");

    let shown = format!("{:?} {store:?}", store.keys());
    for name in ["record.key", "ticket.key"] {
        let text = std::fs::read_to_string(dir.path().join("keys").join(name)).unwrap();
        let secret = text.split_whitespace().last().unwrap();
        assert!(!shown.contains(&secret[..16]), "{shown}");
    }
}

#[test]
fn an_acquisition_with_its_session_and_evidence_is_one_commit() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(open(dir.path()).unwrap());
    let authority = SqliteAuthority::new(Arc::clone(&store));
    let new = NewWorkspace {
        id: "w".parse().unwrap(),
        owner: "ann".parse().unwrap(),
        contact: String::new(),
        labels: BTreeMap::new(),
        layers: vec![],
    };
    authority.create(&new, no_rider()).unwrap().unwrap();
    let wish = Acquire {
        workspace: new.id.clone(),
        lease: LeaseId::from_u128(1),
        owner: new.owner.clone(),
        host: store.host(),
        session: SessionId::from_u128(1),
        holder: HolderKind::Beat,
        ttl: std::time::Duration::from_secs(30),
        max_lifetime: std::time::Duration::from_secs(99),
        force: None,
        only_at: None,
        seen: Default::default(),
    };
    let before = store.db().commits();
    authority.acquire(&wish, Box::new(|_| journal(1))).unwrap().unwrap();
    assert_eq!(store.db().commits() - before, 1);
    assert_eq!(store.sessions().unwrap(), [Ok(session(1))]);
    assert_eq!(store.evidence_since(0, 9).unwrap().len(), 1);
    assert_eq!(store.db().commits() - before, 1, "reads commit nothing");
}

/// Run only as the child of the test below, which kills it.
#[test]
#[ignore = "a child process of a_kill_between_any_two_effects_keeps_what_was_answered"]
fn crash_child() {
    let dir = std::path::PathBuf::from(std::env::var_os("STORE_CRASH_DIR").unwrap());
    let store = open(&dir).unwrap();
    for n in 1..=3_u64 {
        store.record(&journal(n.into()), Durability::Full).unwrap();
        std::fs::write(dir.join("answered-record"), n.to_string()).unwrap();
        store.marks().raise(&"w".parse().unwrap(), seen(n)).unwrap();
        std::fs::write(dir.join("answered-mark"), n.to_string()).unwrap();
        store.anchor().unwrap();
        std::fs::write(dir.join("answered-anchor"), n.to_string()).unwrap();
    }
}

#[test]
fn a_kill_between_any_two_effects_keeps_what_was_answered() {
    let run = |dir: &Path, plan: &str| {
        std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "store::tests::crash_child", "--ignored", "--test-threads=1"])
            .env("STORE_CRASH_DIR", dir)
            .env(crate::failpoint::VARIABLE, plan)
            .output()
            .unwrap()
    };
    let first = tempfile::tempdir().unwrap();
    let log = first.path().join("log");
    let whole = run(first.path(), &format!("log={}", log.display()));
    assert!(whole.status.success(), "{whole:?}");
    let points = std::fs::read_to_string(&log).unwrap().lines().count();
    assert!(points >= 18, "{points} points");
    for n in 1..=points {
        let dir = tempfile::tempdir().unwrap();
        let killed = run(dir.path(), &format!("die={n}"));
        assert!(!killed.status.success(), "it outlived point {n}");
        let answered = |what: &str| {
            let text = std::fs::read_to_string(dir.path().join(format!("answered-{what}")));
            text.map_or(0, |t| t.parse::<u64>().unwrap())
        };
        let store = open(dir.path()).unwrap();
        let report = store.verify_evidence().unwrap();
        assert_eq!(report.fault, None, "point {n}");
        assert!(report.entries >= answered("record"), "point {n}");
        assert_eq!(store.sessions().unwrap().len() as u64, report.entries, "point {n}");
        assert!(store.sessions().unwrap().iter().all(Result::is_ok));
        assert!(
            store.marks().highest(&"w".parse().unwrap()).generation.0 >= answered("mark"),
            "point {n}"
        );
        assert!(report.anchors >= answered("anchor"), "point {n}");
        store.record(&journal(100), Durability::Full).unwrap();
        store.anchor().unwrap();
        assert_eq!(store.verify_evidence().unwrap().fault, None, "point {n}, afterwards");
    }
}
