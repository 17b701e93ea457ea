//! I2: what comes back older than this host saw it, or does not verify, is not believed. Files are
//! put back while no agent runs, records are edited, keys are lost; the agent is the real one.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::agent_process::{Host, has, id_of, path_of};
use crate::host::{Place, Test, paced, paced_ttl};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "i2_an_older_copy_without_a_later_grant_is_noticed", run: no_grant_since },
        Test { name: "i2_what_an_anchor_saw_is_not_forgotten", run: anchored },
        Test { name: "i2_a_hold_is_not_forgotten", run: hold_forgotten },
        Test { name: "i7_a_request_is_not_forgotten", run: request_forgotten },
        Test { name: "i2_marks_that_are_put_back_catch_up", run: older_marks },
        Test { name: "i2_a_session_directory_and_a_bundle_are_witnesses", run: other_witnesses },
        Test { name: "i2_all_witnesses_rolled_back_together_are_not_noticed", run: not_noticed },
        Test { name: "i2_each_acquisition_asks_the_witness", run: at_acquisition },
        Test { name: "i2_an_edited_record_is_a_hold_and_is_made_again", run: edited },
        Test { name: "i2_an_unreadable_session_holds_its_workspace", run: edited_session },
        Test { name: "i2_deleted_and_made_again_goes_on_counting", run: made_again },
        Test { name: "i2_without_its_keys_a_host_grants_nothing", run: keys },
        Test { name: "i2_a_database_that_is_gone_puts_every_mark_on_hold", run: no_database },
        Test { name: "the_section_on_hold_is_run_as_written", run: as_written },
        Test { name: "an_operators_hold_freezes_and_a_repair_lets_go_on", run: by_hand },
        Test { name: "i8_hold_repair_and_delete_survive_a_kill_at_every_effect", run: killed },
    ]
}

const DATABASE: [&str; 3] = ["overfence.db", "overfence.db-wal", "overfence.db-shm"];
const MARKS: [&str; 2] = ["high-water", "evidence-anchors"];

fn started(place: &Place, name: &str) -> Host {
    let mut host = Host::new(place, name);
    assert!(host.start(None), "{}", host.log());
    host
}

fn state(host: &Host) -> PathBuf {
    host.dir.join("state")
}

/// Copies files of the state directory aside; the agent is stopped.
fn save(host: &Host, files: &[&str]) {
    for name in files {
        let _ = std::fs::copy(state(host).join(name), host.dir.join(name));
    }
}

/// Puts them back as they were.
fn put_back(host: &Host, files: &[&str]) {
    for name in files {
        let _ = std::fs::remove_file(state(host).join(name));
        let _ = std::fs::copy(host.dir.join(name), state(host).join(name));
    }
}

/// SIGTERM, as systemd stops it.
fn end(host: &mut Host) {
    let pid = rustix::process::Pid::from_raw(host.agent_pid().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let begun = Instant::now();
    while !host.dead() {
        assert!(
            begun.elapsed() < paced(Duration::from_secs(20)),
            "it does not end: {}",
            host.log()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    host.kill_agent();
}

fn workspace(host: &Host, name: &str) -> Value {
    host.must(&["workspace", "status", name])
}

fn hold_of(host: &Host, name: &str) -> String {
    workspace(host, name)["hold"].as_str().unwrap_or_default().to_owned()
}

/// A verb that has to be refused with this exit code; gives what it said.
fn refused(host: &Host, code: i32, args: &[&str]) -> String {
    let out = host.run(args);
    let said = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(code), "{args:?}: {said}\n{}", host.log());
    said
}

/// Opening it is refused, with the reason of its HOLD.
fn is_held(host: &Host, name: &str, why: &str) {
    assert!(hold_of(host, name).contains(why), "{:#}\n{}", workspace(host, name), host.log());
    let said = refused(host, 4, &["session", "open", "-w", name, "--ttl", &paced_ttl(60)]);
    assert!(said.contains("workspace_held") && said.contains(why), "{said}");
    let held = host.must(&["status"])["held"].clone();
    assert!(held.as_array().unwrap().contains(&name.into()), "{held}");
}

fn repair(host: &Host, name: &str, generation: u64) -> Value {
    let accepted = generation.to_string();
    host.must(&[
        "workspace",
        "repair",
        "-w",
        name,
        "--accept-generation",
        &accepted,
        "--reason",
        "looked at it",
    ])
}

/// One session from its opening to its end; publishes a file of this name.
fn publish(host: &Host, name: &str, file: &str) -> u64 {
    let opened = host.open(name, &paced_ttl(60));
    std::fs::write(path_of(&opened["session"], "merged").join(file), file).unwrap();
    host.must(&["session", "close", &id_of(&opened), "--checkpoint"]);
    opened["session"]["generation"].as_u64().unwrap()
}

/// What the workspace's next session finds: the names of its files, each with its own name in it.
fn stored(host: &Host, name: &str) -> Vec<String> {
    let opened = host.open(name, &paced_ttl(60));
    let merged = path_of(&opened["session"], "merged");
    let names = std::fs::read_dir(&merged).unwrap();
    let mut names: Vec<_> =
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    for file in &names {
        assert_eq!(std::fs::read_to_string(merged.join(file)).unwrap(), *file);
    }
    host.must(&["session", "close", &id_of(&opened)]);
    names.sort();
    names
}

/// Why a workspace is on HOLD, or what was refused for it, and who lifted it stand in its history.
fn traced(host: &Host, name: &str, kind: &str, why: &str) {
    let rows = host.must(&["workspace", "history", name]);
    let of = |kind: &str, why: &str| {
        let mut rows = rows.as_array().unwrap().iter();
        rows.any(|row| row["kind"] == kind && row.to_string().contains(why))
    };
    assert!(of(kind, why) && of("repaired", "looked at it"), "{kind} {why}: {rows:#}");
}

fn no_grant_since(place: &Place) {
    let mut host = started(place, "h");
    let opened = host.open("w", &paced_ttl(120));
    let (id, merged) = (id_of(&opened), path_of(&opened["session"], "merged"));
    std::fs::write(merged.join("one"), "one").unwrap();
    host.must(&["session", "checkpoint", &id]);
    host.kill_agent();
    save(&host, &DATABASE);
    assert!(host.start(None));
    // The same lease goes on: no generation is granted, but a version is published.
    std::fs::write(merged.join("two"), "two").unwrap();
    assert_eq!(host.must(&["session", "checkpoint", &id])["at"]["version"], 2);
    host.kill_agent();
    put_back(&host, &DATABASE);
    assert!(host.start(None), "{}", host.log());
    is_held(&host, "w", "version 1, but 2 was seen on this host");
    let view = host.until(&id, |v| v["state"] == "PRESERVED");
    assert!(has(&view, "frozen") && has(&view, "read-only"), "{view:#}");
    // It publishes nothing, and does not come back before the repair.
    refused(&host, 4, &["session", "checkpoint", &id]);
    let who = ["--authorised-by", "ann", "--reason", "x"];
    let said = refused(&host, 4, &[&["readmit", &id], &who[..]].concat());
    assert!(said.contains("workspace_held"), "{said}");
    let said = refused(
        &host,
        4,
        &["workspace", "repair", "-w", "w", "--accept-generation", "0", "--reason", "x"],
    );
    assert!(said.contains("below 1") && said.contains("high-water"), "{said}");
    // One that leaves no next one would make the name useless for ever.
    let last = u64::MAX.to_string();
    let ask = ["workspace", "repair", "-w", "w", "--accept-generation", &last, "--reason", "x"];
    assert!(refused(&host, 2, &ask).contains("never issued"));
    let w = repair(&host, "w", 1);
    // Version 2 was another head: this one gets a version that nobody saw.
    assert_eq!((w["version"].as_u64(), w["hold"].is_null()), (Some(3), true), "{w:#}");
    assert_eq!(w["head"].as_array().unwrap().len(), 1);
    // What the session saw committed is gone: its bytes come back through a bundle only.
    let said = refused(&host, 4, &[&["readmit", &id], &who[..]].concat());
    assert!(said.contains("head_moved"), "{said}");
    assert_eq!(publish(&host, "w", "three"), 2);
    host.kill_agent();
    assert!(host.start(None));
    assert_eq!(hold_of(&host, "w"), "", "a repair is for good");
    traced(&host, "w", "held", "version 1, but 2 was seen on this host");
    // What went back is in no head, and where it was written.
    assert_eq!(stored(&host, "w"), ["one", "three"]);
    assert_eq!(std::fs::read_to_string(path_of(&view, "upper").join("two")).unwrap(), "two");
    host.must(&["preserved", "discard", &id, "--yes"]);
    let told = host.must(&["workspace", "history", "w"]);
    let versions: Vec<_> =
        told.as_array().unwrap().iter().filter(|r| r["kind"] == "published").collect();
    assert_eq!(versions[0]["detail"]["at"]["version"], 4, "{told:#}");
}

fn anchored(place: &Place) {
    let mut host = started(place, "h");
    for name in ["a", "b"] {
        host.must(&["workspace", "create", name]);
    }
    end(&mut host);
    save(&host, &DATABASE);
    assert!(host.start(None));
    // Neither a generation nor a version moves.
    host.must(&["workspace", "delete", "-w", "a", "--yes"]);
    host.kill_agent();
    put_back(&host, &DATABASE);
    assert!(host.start(None), "{}", host.log());
    for name in ["a", "b"] {
        is_held(&host, name, "older than what was witnessed");
    }
    host.kill_agent();
    assert!(host.start(None));
    for name in ["a", "b"] {
        is_held(&host, name, "older than what was witnessed");
        repair(&host, name, 0);
        assert_eq!(publish(&host, name, "x"), 1);
    }
    host.kill_agent();
    assert!(host.start(None));
    assert_eq!((hold_of(&host, "a"), hold_of(&host, "b")), (String::new(), String::new()));
    let told = host.must(&["evidence", "show"]);
    let kinds: Vec<_> = told.as_array().unwrap().iter().map(|e| e["kind"].clone()).collect();
    assert!(kinds.contains(&"rollback_noticed".into()), "{kinds:?}");
}

/// What may have been sent since the copy was made is not begun again as if it were new.
fn request_forgotten(place: &Place) {
    let mut host = started(place, "h");
    let id = id_of(&host.open("w", "600s"));
    end(&mut host);
    save(&host, &DATABASE);
    assert!(host.start(None));
    let begin = ["request", "begin", &id, "--task", "pay", "--key", "k"];
    assert_eq!(host.must(&begin)["result"], "begun");
    host.kill_agent();
    put_back(&host, &DATABASE);
    assert!(host.start(None), "{}", host.log());
    assert!(hold_of(&host, "w").contains("older than what was witnessed"), "{}", host.log());
    assert!(refused(&host, 4, &begin).contains("workspace_held"));
    assert_eq!(host.must(&["request", "list", "--all"]), serde_json::json!([]));
}

fn hold_forgotten(place: &Place) {
    let mut host = started(place, "h");
    host.must(&["workspace", "create", "w"]);
    host.must(&["workspace", "create", "other"]);
    end(&mut host);
    save(&host, &["overfence.db", "overfence.db-wal", "overfence.db-shm", "evidence-anchors"]);
    assert!(host.start(None));
    host.must(&["workspace", "hold", "-w", "w", "--reason", "an odd build"]);
    is_held(&host, "w", "an odd build");
    end(&mut host);
    put_back(&host, &["overfence.db", "overfence.db-wal", "overfence.db-shm", "evidence-anchors"]);
    assert!(host.start(None));
    is_held(&host, "w", "put on HOLD on this host");
    assert_eq!(hold_of(&host, "other"), "");
    repair(&host, "w", 0);
    host.kill_agent();
    assert!(host.start(None));
    assert_eq!(hold_of(&host, "w"), "");
}

fn older_marks(place: &Place) {
    let mut host = started(place, "h");
    publish(&host, "w", "one");
    end(&mut host);
    save(&host, &MARKS);
    assert!(host.start(None));
    assert_eq!(publish(&host, "w", "two"), 2);
    end(&mut host);
    put_back(&host, &MARKS);
    save(&host, &DATABASE);
    // The authority knows more than they do: it is believed, and they learn.
    assert!(host.start(None));
    assert_eq!(hold_of(&host, "w"), "");
    assert_eq!(publish(&host, "w", "three"), 3);
    host.kill_agent();
    put_back(&host, &DATABASE);
    assert!(host.start(None));
    is_held(&host, "w", "generation 2, but 3 was seen");
    // A damaged or missing file is no empty one.
    host.kill_agent();
    for damage in ["w 9 9 free 0000000000000000\n", ""] {
        let marks = state(&host).join("high-water");
        let good = std::fs::read(&marks).unwrap();
        match damage {
            "" => std::fs::remove_file(&marks).unwrap(),
            text => std::fs::write(&marks, text).unwrap(),
        }
        assert!(!host.start(None), "it started without its witness");
        std::fs::write(&marks, good).unwrap();
    }
    assert!(host.start(None));
    is_held(&host, "w", "generation 2, but 3 was seen");
}

/// A stopped session of generation 2; database and marks go back to generation 1.
fn all_back(place: &Place, name: &str, between: impl FnOnce(&Host, &str)) -> (Host, String) {
    let mut host = started(place, name);
    publish(&host, "w", "one");
    end(&mut host);
    let all = [&DATABASE[..], &MARKS[..]].concat();
    save(&host, &all);
    assert!(host.start(None));
    let opened = host.open("w", &paced_ttl(60));
    let id = id_of(&opened);
    std::fs::write(path_of(&opened["session"], "merged").join("two"), "2").unwrap();
    host.must(&["fence", &id, "--reason", "test", "--wait"]);
    between(&host, &id);
    end(&mut host);
    put_back(&host, &all);
    assert!(host.start(None), "{}", host.log());
    (host, id)
}

fn other_witnesses(place: &Place) {
    let (host, id) = all_back(place, "directory", |_, _| ());
    is_held(&host, "w", "generation 1, but 2 was seen");
    let ask = ["workspace", "repair", "-w", "w", "--accept-generation", "1", "--reason", "x"];
    let said = refused(&host, 4, &ask);
    assert!(said.contains("below 2"), "{said}");
    repair(&host, "w", 2);
    assert_eq!(publish(&host, "w", "three"), 3);
    assert_eq!(stored(&host, "w"), ["one", "three"]);
    traced(&host, "w", "held", "generation 1, but 2 was seen");
    let directory = state(&host).join("sessions").join(&id);
    assert!(directory.join("upper/two").exists(), "what it wrote is there still");
    drop(host);
    let (host, _) = all_back(place, "bundle", |host, id| {
        host.must(&["preserved", "export", id, "--dispose", "--yes"]);
        let gone = state(host).join("sessions").join(id);
        let begun = Instant::now();
        while gone.exists() {
            assert!(begun.elapsed() < paced(Duration::from_secs(30)), "{}", host.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    is_held(&host, "w", "generation 1, but 2 was seen");
}

/// What THREAT_MODEL.md says cannot be noticed, so that it says no more and no less.
fn not_noticed(place: &Place) {
    let (host, _) = all_back(place, "h", |host, id| {
        host.must(&["preserved", "discard", id, "--yes"]);
    });
    assert_eq!(hold_of(&host, "w"), "");
    assert_eq!(publish(&host, "w", "two"), 2, "the generation that was used before");
}

/// What stands in the database for workspace `w`.
fn record(host: &Host) -> (String, Vec<u8>) {
    let database = rusqlite::Connection::open(state(host).join("overfence.db")).unwrap();
    database
        .query_row("SELECT record, mac FROM workspaces WHERE id = 'w'", [], |r| {
            Ok((r.get(0)?, r.get(1)?))
        })
        .unwrap()
}

fn edit(host: &Host, statement: &str, values: &[&dyn rusqlite::ToSql]) {
    let database = rusqlite::Connection::open(state(host).join("overfence.db")).unwrap();
    database.busy_timeout(Duration::from_secs(10)).unwrap();
    assert_eq!(database.execute(statement, values).unwrap(), 1, "{statement}");
}

/// The record that was put back says nothing of a HOLD; the next acquisition puts it on one again.
fn is_held_by_record(host: &Host) {
    let said = refused(host, 4, &["session", "open", "-w", "w", "--ttl", &paced_ttl(60)]);
    assert!(said.contains("workspace_held"), "{said}");
}

fn at_acquisition(place: &Place) {
    let mut host = started(place, "h");
    publish(&host, "w", "one");
    let (old, mac) = record(&host);
    publish(&host, "w", "two");
    // Genuine, and older: nothing but a witness can tell. The agent runs.
    edit(&host, "UPDATE workspaces SET record = ?, mac = ? WHERE id = 'w'", &[&old, &mac]);
    let said = refused(&host, 4, &["session", "open", "-w", "w", "--ttl", &paced_ttl(60)]);
    assert!(said.contains("generation 1, but 2 was seen"), "{said}");
    is_held(&host, "w", "generation 1, but 2 was seen");
    // Also when the HOLD itself is taken off behind the agent's back.
    host.kill_agent();
    edit(&host, "UPDATE workspaces SET record = ?, mac = ? WHERE id = 'w'", &[&old, &mac]);
    assert!(host.start(None));
    is_held(&host, "w", "generation 1, but 2 was seen");
    // A name whose record is gone is not given out anew.
    edit(&host, "DELETE FROM workspaces WHERE id = 'w'", &[]);
    let said = refused(&host, 4, &["workspace", "create", "w"]);
    assert!(said.contains("generation 0, but 2 was seen"), "{said}");
    edit(&host, "UPDATE workspaces SET record = ?, mac = ? WHERE id = 'w'", &[&old, &mac]);
    is_held_by_record(&host);
    let w = repair(&host, "w", 7);
    assert_eq!((w["generation"].as_u64(), w["version"].as_u64()), (Some(7), Some(3)));
    assert_eq!(publish(&host, "w", "three"), 8);
    traced(&host, "w", "held", "generation 1, but 2 was seen");
    assert_eq!(stored(&host, "w"), ["one", "three"]);
    assert_eq!(workspace(&host, "w")["version"], 4);
}

fn edited(place: &Place) {
    let mut host = started(place, "h");
    host.start_keeper();
    host.must(&["workspace", "create", "w", "--owner", "ann", "--label", "a=b"]);
    publish(&host, "w", "one");
    let head = workspace(&host, "w")["head"].clone();
    let opened = host.open("w", &paced_ttl(3));
    let id = id_of(&opened);
    std::fs::write(path_of(&opened["session"], "merged").join("two"), "two").unwrap();
    edit(
        &host,
        "UPDATE workspaces SET record = replace(record, '\"ann\"', '\"eve\"') WHERE id = 'w'",
        &[],
    );
    // The writer meets it at its next renewal, and is stopped.
    is_held(&host, "w", "does not verify");
    host.until(&id, |v| v["state"] == "PRESERVED");
    assert_eq!(workspace(&host, "w")["generation"], 2, "what was seen of it here");
    for ask in [
        &["session", "checkpoint", &id][..],
        &["workspace", "delete", "-w", "w", "--yes"],
        &["workspace", "create", "w"],
        &["readmit", &id, "--authorised-by", "ann", "--reason", "x"],
    ] {
        let said = refused(&host, 4, ask);
        assert!(said.contains("does not verify"), "{ask:?}: {said}");
    }
    let listed = host.must(&["workspace", "list"]);
    assert!(listed[0]["hold"].as_str().unwrap().contains("does not verify"), "{listed:#}");
    host.kill_agent();
    assert!(host.start(None));
    is_held(&host, "w", "does not verify");
    let w = repair(&host, "w", 2);
    assert_eq!((&w["owner"], &w["head"]), (&"ann".into(), &head), "{w:#}");
    assert_eq!(w["version"], 1, "nothing that was published is missing: {w:#}");
    host.must(&["readmit", &id, "--authorised-by", "ann", "--reason", "looked at it"]);
    let view = host.must(&["session", "inspect", &id]);
    assert_eq!((&view["state"], &view["generation"]), (&"ACTIVE".into(), &3.into()));
    traced(&host, "w", "refused", "does not verify");
    assert_eq!(host.must(&["evidence", "verify"])["ok"], true);
    // Nothing of it was stored meanwhile, and nothing of it is lost.
    assert_eq!(workspace(&host, "w")["head"], head);
    host.must(&["session", "close", &id, "--checkpoint"]);
    assert_eq!((stored(&host, "w"), workspace(&host, "w")["version"].as_u64()), {
        (vec!["one".to_owned(), "two".to_owned()], Some(2))
    });
}

fn edited_session(place: &Place) {
    let mut host = started(place, "h");
    let opened = host.open("w", &paced_ttl(60));
    let id = id_of(&opened);
    host.must(&["workspace", "create", "other"]);
    host.kill_agent();
    edit(
        &host,
        "UPDATE sessions SET record = replace(record, 'ACTIVE', 'CLOSED') WHERE id = ?",
        &[&id],
    );
    assert!(host.start(None));
    is_held(&host, "w", &id);
    let events = path_of(&opened["session"], "cgroup").join("cgroup.freeze");
    assert_eq!(std::fs::read_to_string(events).unwrap(), "1\n");
    assert_eq!(hold_of(&host, "other"), "");
    repair(&host, "w", 1);
    host.kill_agent();
    assert!(host.start(None));
    assert_eq!(hold_of(&host, "w"), "", "a repair is for good");
    assert_eq!(publish(&host, "w", "two"), 2);
}

fn made_again(place: &Place) {
    let mut host = started(place, "h");
    publish(&host, "w", "one");
    let opened = host.open("w", &paced_ttl(60));
    let id = id_of(&opened);
    std::fs::write(path_of(&opened["session"], "merged").join("two"), "2").unwrap();
    let delete = ["workspace", "delete", "-w", "w", "--reason", "done with it"];
    let sure = [&delete[..], &["--yes"]].concat();
    let said = refused(&host, 4, &sure);
    assert!(said.contains("workspace_in_use") && said.contains(&id), "{said}");
    host.must(&["fence", &id, "--reason", "test", "--wait"]);
    let said = refused(&host, 4, &sure);
    assert!(said.contains(&id) && said.contains("preserved discard"), "{said}");
    host.must(&["preserved", "discard", &id, "--yes"]);
    let said = refused(&host, 2, &delete);
    assert!(said.contains("version 1") && said.contains("--yes"), "{said}");
    assert_eq!(workspace(&host, "w")["generation"], 2);
    assert_eq!(host.must(&sure)["generation"], 2);
    refused(&host, 3, &["workspace", "status", "w"]);
    refused(&host, 3, &sure);
    refused(&host, 3, &["session", "open", "-w", "w", "--ttl", &paced_ttl(60)]);
    assert_eq!(host.must(&["workspace", "list"]), Value::Array(vec![]));
    host.kill_agent();
    assert!(host.start(None));
    host.must(&["workspace", "create", "w"]);
    let w = workspace(&host, "w");
    assert_eq!((&w["generation"], &w["version"]), (&2.into(), &2.into()), "{w:#}");
    assert_eq!(publish(&host, "w", "three"), 3);
    let told = host.must(&["workspace", "history", "w"]);
    let kinds: Vec<_> = told.as_array().unwrap().iter().map(|r| r["kind"].clone()).collect();
    assert!(kinds.contains(&"deleted".into()), "{kinds:?}");
}

fn keys(place: &Place) {
    let mut host = started(place, "h");
    host.start_keeper();
    publish(&host, "w", "one");
    let opened = host.open("w", &paced_ttl(3));
    let keys = state(&host).join("keys");
    for (name, wrong) in [
        ("record.key", None),
        ("ticket.key", None),
        ("record.key", Some(format!("record {} {}\n", "record-0", "ab".repeat(32)))),
        ("record.key", Some("nonsense".to_owned())),
    ] {
        host.kill_agent();
        let path = keys.join(name);
        let right = std::fs::read(&path).unwrap();
        match &wrong {
            None => std::fs::remove_file(&path).unwrap(),
            Some(text) => std::fs::write(&path, text).unwrap(),
        }
        let before = record(&host);
        assert!(!host.start(None), "it started with {name} {wrong:?}");
        assert!(host.log().contains(name), "{}", host.log());
        match &wrong {
            None => assert!(!path.exists(), "a new key was made"),
            Some(text) => assert_eq!(&std::fs::read_to_string(&path).unwrap(), text),
        }
        assert_eq!(record(&host), before);
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::write(&path, right).unwrap();
        std::fs::set_permissions(&path, mode).unwrap();
    }
    // Nobody renewed meanwhile: the keeper stopped the writer at its deadline.
    let events = path_of(&opened["session"], "cgroup").join("cgroup.events");
    let begun = Instant::now();
    while !std::fs::read_to_string(&events).unwrap().contains("frozen 1") {
        assert!(begun.elapsed() < paced(Duration::from_secs(10)), "the keeper did not freeze");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(host.start(None), "{}", host.log());
    assert_eq!(hold_of(&host, "w"), "");
    // It goes on above what there was.
    let next = host.must(&["session", "open", "-w", "w", "--force"]);
    assert!(next["session"]["generation"].as_u64().unwrap() > 2, "{next:#}");
}

fn no_database(place: &Place) {
    let mut host = started(place, "h");
    for name in ["a", "b"] {
        publish(&host, name, "one");
    }
    end(&mut host);
    for name in DATABASE {
        let _ = std::fs::remove_file(state(&host).join(name));
    }
    assert!(host.start(None), "{}", host.log());
    for name in ["a", "b"] {
        is_held(&host, name, "generation 0, but 1 was seen");
        let said = refused(&host, 4, &["workspace", "create", name]);
        assert!(said.contains("workspace_held"), "{said}");
    }
    repair(&host, "a", 1);
    refused(&host, 3, &["workspace", "status", "a"]);
    assert_eq!(publish(&host, "a", "two"), 2);
}

fn by_hand(place: &Place) {
    let host = started(place, "h");
    let opened = host.open("w", &paced_ttl(60));
    let id = id_of(&opened);
    std::fs::write(path_of(&opened["session"], "merged").join("one"), "1").unwrap();
    assert!(
        refused(&host, 3, &["workspace", "hold", "-w", "x", "--reason", "x"]).contains("unknown")
    );
    refused(&host, 2, &["workspace", "hold", "-w", "w", "--reason", " "]);
    let repair_it = ["workspace", "repair", "-w", "w", "--accept-generation", "1", "--reason", "x"];
    assert!(refused(&host, 4, &repair_it).contains("not on HOLD"));
    host.must(&["workspace", "hold", "-w", "w", "--reason", "a leaked credential"]);
    let view = host.until(&id, |v| v["state"] == "PRESERVED");
    assert!(view["loss"].as_str().unwrap().contains("a leaked credential"), "{view:#}");
    assert!(has(&view, "frozen") && has(&view, "read-only"));
    is_held(&host, "w", "a leaked credential");
    let said = refused(&host, 4, &["workspace", "hold", "-w", "w", "--reason", "another"]);
    assert!(said.contains("a leaked credential"), "{said}");
    assert!(refused(&host, 4, &["session", "checkpoint", &id]).contains("a leaked credential"));
    // `run` says so, too, with the code that is overfence's own.
    let said = refused(&host, 125, &["run", "-w", "w", "--", "true"]);
    assert!(said.contains("a leaked credential"), "{said}");
    repair(&host, "w", 1);
    host.must(&["readmit", &id, "--authorised-by", "ann", "--reason", "rotated"]);
    host.must(&["session", "close", &id, "--checkpoint"]);
    let w = workspace(&host, "w");
    assert_eq!((&w["version"], &w["generation"]), (&1.into(), &2.into()));
    let kinds: Vec<String> = host
        .must(&["evidence", "show"])
        .as_array()
        .unwrap()
        .iter()
        .map(|e| e["kind"].as_str().unwrap().to_owned())
        .collect();
    for kind in ["hold", "workspace_repair"] {
        assert!(kinds.iter().any(|k| k == kind), "{kinds:?}");
    }
}

/// What was acknowledged before the agent died.
#[derive(Debug, Default)]
struct Acknowledged {
    held: bool,
    repaired: bool,
    deleted: bool,
}

fn scenario(host: &Host) -> Acknowledged {
    let ok = |args: &[&str]| host.ask(args).0 == 0;
    let mut done = Acknowledged::default();
    if !ok(&["workspace", "create", "w"]) {
        return done;
    }
    done.held = ok(&["workspace", "hold", "-w", "w", "--reason", "why"]);
    let repair = ["workspace", "repair", "-w", "w", "--accept-generation", "5", "--reason", "x"];
    done.repaired = done.held && ok(&repair);
    done.deleted = done.repaired && ok(&["workspace", "delete", "-w", "w", "--yes"]);
    done
}

fn killed(place: &Place) {
    let mut counting = Host::new(place, "count");
    let log = counting.dir.join("points");
    assert!(counting.start(Some(&format!("log={}", log.display()))));
    let ready = std::fs::read_to_string(&log).unwrap().lines().count();
    assert!(scenario(&counting).deleted, "{}", counting.log());
    counting.stop();
    let points: Vec<_> =
        std::fs::read_to_string(&log).unwrap().lines().map(str::to_owned).collect();
    let named = |what: &str| points[ready..].iter().filter(|line| line.contains(what)).count();
    assert!(named("store.mark.before") >= 3 && named("store.anchor.before") >= 3, "{points:?}");
    for hit in ready + 1..=points.len() {
        let mut host = Host::new(place, &format!("k{hit}"));
        let ready = host.start(Some(&format!("die={hit}")));
        let done = if ready { scenario(&host) } else { Acknowledged::default() };
        host.kill_agent();
        assert!(host.start(None), "{hit}: {}", host.log());
        let all = host.must(&["workspace", "list"]);
        let w = &all[0];
        if done.deleted {
            assert!(w.is_null(), "{hit}: {done:?}: {w:#}");
        } else if done.repaired {
            assert!(w.is_null() || w["generation"] == 5 && w["hold"].is_null(), "{hit}: {w:#}");
        } else if done.held {
            assert!(w["generation"] == 5 || !w["hold"].is_null(), "{hit}: {done:?}: {w:#}");
        }
        // Whatever it is now, it is not stuck: repaired if need be, it goes on above.
        if !w["hold"].is_null() {
            repair(&host, "w", 5);
        }
        if w.is_null() {
            host.must(&["workspace", "create", "w"]);
        }
        let opened = host.open("w", &paced_ttl(60));
        host.must(&["session", "close", &id_of(&opened)]);
        assert_eq!(host.must(&["evidence", "verify"])["ok"], true, "{hit}");
        host.stop();
    }
    eprintln!("killed and recovered at {} points", points.len() - ready);
}

/// The section HOLD of docs/OPERATIONS.md, word by word.
fn as_written(place: &Place) {
    let mut host = started(place, "h");
    publish(&host, "w", "one");
    end(&mut host);
    save(&host, &DATABASE);
    assert!(host.start(None));
    publish(&host, "w", "two");
    end(&mut host);
    put_back(&host, &DATABASE);
    assert!(host.start(None));
    host.must(&["workspace", "create", "other"]);
    let blocks = crate::runbook::blocks("## HOLD\n");
    let headings: Vec<_> = blocks.iter().map(|block| &*block.heading).collect();
    assert_eq!(headings, ["Put a workspace on HOLD", "Look at it", "Repair it"]);
    let shell = |workspace: &str, script: &str| {
        let (path, here) =
            (std::env::var("PATH").unwrap(), host.binary.parent().unwrap().display());
        let out = std::process::Command::new("bash")
            .args(["-euc", script])
            .env("PATH", format!("{here}:{path}"))
            .env("OVERFENCE_SOCKET", host.dir.join("run/overfence.sock"))
            .env("WORKSPACE", workspace)
            .env("REASON", "the document's test")
            .stdin(std::process::Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(out.status.success(), "{script}: {said}{}", String::from_utf8_lossy(&out.stderr));
        said
    };
    // By hand for one, by the witnesses for the other.
    assert!(shell("other", &blocks[0].script).contains("the document's test"));
    for name in ["w", "other"] {
        let said = shell(name, &blocks[1].script);
        assert!(said.contains("on hold"), "{said}");
        assert!(shell(name, &blocks[2].script).contains("true"));
    }
    assert_eq!(publish(&host, "w", "three"), 3, "above the generation that went missing");
    assert_eq!(publish(&host, "other", "one"), 1);
}
