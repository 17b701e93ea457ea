//! Backups taken while writers run, put back, and what a host then believes. By the real binary.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use crate::agent_process::{Host, id_of, path_of};
use crate::host::{Place, Test, paced_ttl};
use crate::runbook;

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "a_backup_under_load_comes_back_on_an_emptied_host", run: emptied },
        Test { name: "i2_a_restore_never_lowers_a_generation", run: lowers_nothing },
        Test { name: "i2_what_was_decided_since_a_backup_holds_everything", run: decided_since },
        Test { name: "a_restore_that_cannot_be_right_changes_nothing", run: refused },
        Test { name: "the_evidence_goes_on_over_a_restore", run: evidence_goes_on },
        Test { name: "a_damaged_layer_spoils_no_backup_of_the_others", run: partial },
        Test { name: "i8_a_backup_survives_a_kill_at_every_effect", run: killed_taking },
        Test { name: "i8_a_restore_survives_a_kill_at_every_effect", run: killed_restoring },
    ]
}

fn started(place: &Place, name: &str) -> Host {
    let mut host = Host::new(place, name);
    assert!(host.start(None), "{}", host.log());
    host
}

fn publish(host: &Host, workspace: &str, file: &str) -> u64 {
    let opened = host.open(workspace, &paced_ttl(60));
    fs::write(path_of(&opened["session"], "merged").join(file), file).unwrap();
    host.must(&["session", "close", &id_of(&opened), "--checkpoint"]);
    opened["session"]["generation"].as_u64().unwrap()
}

/// The section of docs/OPERATIONS.md: what it says for a backup (0) and for a restore (1).
fn written(n: usize) -> String {
    let blocks = runbook::blocks("## Backup and restore\n");
    assert_eq!(blocks.len(), 2);
    blocks[n].script.clone()
}

fn backup_of(host: &Host) -> PathBuf {
    host.dir.join("backup")
}

fn shell(host: &Host, script: &str, failpoints: &str) -> Output {
    let (path, here) = (std::env::var("PATH").unwrap(), host.binary.parent().unwrap().display());
    Command::new("bash")
        .args(["-euc", script])
        .env("PATH", format!("{here}:{path}"))
        .env("OVERFENCE_SOCKET", host.dir.join("run/overfence.sock"))
        .env("OVERFENCE_FAILPOINTS", failpoints)
        .env("BACKUP", backup_of(host))
        .env("CONFIG", &host.config)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn done(host: &Host, script: &str) -> String {
    let out = shell(host, script, "");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{script}: {said}\n{}", host.log());
    String::from_utf8_lossy(&out.stdout).into_owned() + &said
}

fn not_done(host: &Host, script: &str, code: i32, why: &str) {
    let out = shell(host, script, "");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(code), "{script}: {said}");
    assert!(said.contains(why), "no {why:?}: {said}");
}

fn hold_of(host: &Host, name: &str) -> String {
    host.must(&["workspace", "status", name])["hold"].as_str().unwrap_or_default().to_owned()
}

fn repair(host: &Host, name: &str, generation: u64) -> Value {
    let generation = generation.to_string();
    let ask = ["workspace", "repair", "-w", name, "--accept-generation", &generation];
    host.must(&[&ask[..], &["--reason", "restored"]].concat())
}

/// No anchor has seen it yet when the agent dies; the database that is replaced knows.
fn decided_since(place: &Place) {
    for since in [false, true] {
        let mut host = started(place, &format!("h{since}"));
        publish(&host, "w", "f");
        done(&host, &written(0));
        if since {
            host.must(&["workspace", "create", "later"]);
        }
        host.kill_agent();
        done(&host, &written(1));
        assert!(host.start(None), "{}", host.log());
        let hold = hold_of(&host, "w");
        assert_eq!(hold.contains("the backup ends at evidence entry"), since, "{hold:?}");
        if since {
            repair(&host, "w", 1);
        }
        assert_eq!(publish(&host, "w", "g"), 2);
        assert_eq!(host.must(&["evidence", "verify"])["ok"], true);
    }
}

fn names_in(dir: &Path) -> Vec<String> {
    let all = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut all: Vec<_> = all.collect();
    all.sort();
    all
}

fn emptied(place: &Place) {
    let mut host = started(place, "h");
    for workspace in ["a", "b"] {
        publish(&host, workspace, "0");
    }
    host.must(&["workspace", "create", "gone"]);
    host.must(&["workspace", "delete", "-w", "gone", "--yes"]);
    // Two writers publish as fast as they can while the backups are taken.
    let (enough, keys) = (AtomicBool::new(false), " --with-keys");
    let script = written(0).trim_end().to_owned() + keys;
    std::thread::scope(|scope| {
        let writers = ["a", "b"].map(|workspace| {
            let (host, enough) = (&host, &enough);
            scope.spawn(move || {
                let mut file = 0;
                while !enough.load(Ordering::Relaxed) {
                    file += 1;
                    publish(host, workspace, &file.to_string());
                }
                file
            })
        });
        for _ in 0..3 {
            let _ = fs::remove_dir_all(backup_of(&host));
            done(&host, &script);
        }
        enough.store(true, Ordering::Relaxed);
        for writer in writers {
            assert!(writer.join().unwrap() > 0);
        }
    });
    let highest =
        ["a", "b"].map(|w| host.must(&["workspace", "status", w])["generation"].as_u64().unwrap());
    host.stop();
    let backup = backup_of(&host);
    for (path, mode) in [
        (backup.clone(), 0o700),
        (backup.join("overfence.db"), 0o600),
        (backup.join("keys"), 0o700),
    ] {
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode, "{path:?}");
    }
    assert_eq!(names_in(&backup), ["backup.json", "keys", "layers", "overfence.db"]);

    let mut new = Host::new(place, "new");
    fs::rename(&backup, backup_of(&new)).unwrap();
    let said = done(&new, &written(1));
    assert!(said.contains("put on hold") && said.contains("layers added"), "{said}");
    assert!(new.start(None), "{}", new.log());
    for (workspace, highest) in ["a", "b"].into_iter().zip(highest) {
        assert!(hold_of(&new, workspace).contains("put on HOLD on this host"));
        assert_eq!(new.ask(&["session", "open", "-w", workspace]).0, 4);
        // The operator knows of a generation that no file here does.
        let w = repair(&new, workspace, highest);
        assert_eq!(new.must(&["workspace", "verify", "-w", workspace])["ok"], true);
        let opened = new.open(workspace, &paced_ttl(60));
        assert_eq!(opened["session"]["generation"], highest + 1);
        // Every version put one file more into it.
        let shown = names_in(&path_of(&opened["session"], "merged"));
        assert_eq!(shown.len() as u64, w["version"].as_u64().unwrap(), "{shown:?} {w:#}");
        new.must(&["session", "close", &id_of(&opened)]);
    }
    assert_eq!(new.ask(&["workspace", "status", "gone"]).0, 3);
    // Earlier versions came along, too.
    new.must(&["workspace", "revert", "-w", "a", "--to", "1"]);
    assert_eq!(new.must(&["evidence", "verify"])["ok"], true);
    let taken = new.must(&["evidence", "show"]);
    let taken = taken.as_array().unwrap().iter().filter(|e| e["kind"] == "backup");
    assert!(taken.clone().all(|e| e["detail"]["keys"] == true) && taken.count() == 3);
}

fn lowers_nothing(place: &Place) {
    let mut host = started(place, "h");
    publish(&host, "w", "one");
    publish(&host, "other", "one");
    // Taken in the middle of somebody's work.
    let opened = host.open("busy", &paced_ttl(60));
    fs::write(path_of(&opened["session"], "merged").join("f"), "f").unwrap();
    done(&host, &written(0));
    not_done(&host, &written(0), 4, "exists already");
    assert!(!backup_of(&host).join("keys").exists(), "no secret but for who asked for it");
    let secret = fs::read_to_string(host.dir.join("state/keys/record.key")).unwrap();
    let secret = secret.split_whitespace().last().unwrap();
    assert!(!host.log().contains(secret));
    assert_eq!(publish(&host, "w", "two"), 2);
    let stale = host.open("w", &paced_ttl(600));
    assert_eq!(stale["session"]["generation"], 3);
    fs::write(path_of(&stale["session"], "merged").join("stale"), "x").unwrap();
    // Not beside a running agent.
    not_done(&host, &written(1), 4, "another agent runs");
    host.kill_agent();
    assert!(done(&host, &written(1)).contains("every workspace is on HOLD"));
    assert!(host.start(None), "{}", host.log());
    assert!(
        hold_of(&host, "w").contains("generation 1, but 3 was seen"),
        "{}",
        hold_of(&host, "w")
    );
    for name in ["other", "busy"] {
        assert!(hold_of(&host, name).contains("older than what was witnessed"), "{name}");
    }
    // The writer of then is stopped, and its bytes are there.
    let view = host.until(&id_of(&opened), |v| v["state"] == "PRESERVED");
    assert_eq!(fs::read_to_string(path_of(&view, "upper").join("f")).unwrap(), "f");
    // The writer that the backup knows nothing of publishes nothing, by none of the ways.
    assert_eq!(host.ask(&["session", "checkpoint", &id_of(&stale)]).0, 3);
    let w = host.must(&["workspace", "status", "w"]);
    assert_eq!((&w["version"], &w["may_publish"]), (&1.into(), &false.into()), "{w:#}");
    let ask = ["workspace", "repair", "-w", "w", "--accept-generation", "2", "--reason", "x"];
    assert_eq!(host.ask(&ask).0, 4);
    let w = repair(&host, "w", 3);
    assert_eq!((&w["version"], &w["generation"]), (&3.into(), &3.into()), "{w:#}");
    assert_eq!(publish(&host, "w", "four"), 4);
    assert_eq!(host.ask(&["session", "checkpoint", &id_of(&stale)]).0, 3);
    repair(&host, "other", 1);
    assert_eq!(publish(&host, "other", "two"), 2);
    repair(&host, "busy", 1);
    host.must(&["readmit", &id_of(&opened), "--authorised-by", "ann", "--reason", "restored"]);
    host.must(&["session", "close", &id_of(&opened), "--checkpoint"]);
    // What was replaced is kept.
    let state = host.dir.join("state");
    let kept: Vec<_> =
        names_in(&state).into_iter().filter(|name| name.starts_with("replaced-")).collect();
    assert!(kept.len() == 1 && state.join(&kept[0]).join("overfence.db").exists(), "{kept:?}");
    host.kill_agent();
    assert!(host.start(None));
    for name in ["w", "other", "busy"] {
        assert_eq!(hold_of(&host, name), "", "{name}: repaired for good");
    }
}

/// What is done to a file.
type Spoil<'a> = &'a dyn Fn(&Path);

fn refused(place: &Place) {
    let mut host = started(place, "h");
    publish(&host, "w", "one");
    done(&host, &written(0));
    publish(&host, "w", "two");
    let foreign = started(place, "foreign");
    let copy = host.dir.join("foreign").display().to_string();
    foreign.must(&["backup", "--dest", &copy, "--with-keys"]);
    let inside = foreign.dir.join("state/backup").display().to_string();
    assert_eq!(foreign.ask(&["backup", "--dest", &inside]).0, 2);
    drop(foreign);
    host.kill_agent();
    let state = host.dir.join("state");
    let before = (fs::read(state.join("overfence.db")).unwrap(), names_in(&state));
    let backup = backup_of(&host);
    let spoilt = |file: &str, how: Spoil<'_>, why: &str, code: i32| {
        let path = if file.starts_with("state") { host.dir.join(file) } else { backup.join(file) };
        let good = fs::read(&path).unwrap();
        how(&path);
        not_done(&host, &written(1), code, why);
        let _ = fs::remove_file(&path);
        fs::write(&path, good).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    };
    let remove = |path: &Path| fs::remove_file(path).unwrap();
    let flip = |path: &Path| {
        let mut bytes = fs::read(path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    let layer = names_in(&backup.join("layers")).remove(0);
    let blob = format!("layers/{layer}/layer.tar.zst");
    spoilt("overfence.db", &flip, "backup_refused", 1);
    spoilt("overfence.db", &|path| fs::write(path, "").unwrap(), "backup_refused", 1);
    spoilt("backup.json", &|path| fs::write(path, "{}").unwrap(), "no such note", 1);
    spoilt("backup.json", &remove, "no whole backup", 3);
    // Nobody waits for who would write into it.
    let fifo = |path: &Path| {
        fs::remove_file(path).unwrap();
        nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    };
    for name in ["overfence.db", "backup.json", &blob, &format!("layers/{layer}/layer.json")] {
        spoilt(name, &fifo, "neither a file nor a directory", 1);
    }
    spoilt(&blob, &flip, &layer, 1);
    spoilt(&blob, &remove, &layer, 1);
    spoilt("state/keys/record.key", &remove, "no key is made anew", 1);
    not_done(&host, &written(1).replace("$BACKUP", &copy), 1, "the backup's is");
    not_done(&host, &written(1).replace(" --yes", ""), 2, "Nothing was done");
    assert_eq!((fs::read(state.join("overfence.db")).unwrap(), names_in(&state)), before);
    assert!(host.start(None));
    assert_eq!(hold_of(&host, "w"), "", "nothing was changed");
    assert_eq!(publish(&host, "w", "three"), 3);
}

fn verified(host: &Host) -> Value {
    let report = host.must(&["evidence", "verify"]);
    assert_eq!((&report["ok"], &report["fault"]), (&true.into(), &Value::Null), "{report:#}");
    report
}

/// The files of the database.
fn database_of(host: &Host) -> Vec<(PathBuf, Option<Vec<u8>>)> {
    let all = ["overfence.db", "overfence.db-wal", "overfence.db-shm"];
    all.map(|name| host.dir.join("state").join(name))
        .into_iter()
        .map(|path| (path.clone(), fs::read(path).ok()))
        .collect()
}

fn put_back(host: &Host, files: &[(PathBuf, Option<Vec<u8>>)]) {
    for (path, bytes) in files {
        assert!(path.starts_with(&host.dir));
        let _ = fs::remove_file(path);
        if let Some(bytes) = bytes {
            fs::write(path, bytes).unwrap();
        }
    }
}

fn evidence_goes_on(place: &Place) {
    let mut host = started(place, "h");
    publish(&host, "w", "one");
    done(&host, &written(0));
    let taken = fs::read_to_string(backup_of(&host).join("backup.json")).unwrap();
    let taken: Value = serde_json::from_str(&taken).unwrap();
    let last = taken["copied"]["entries"].as_u64().unwrap();
    publish(&host, "w", "two");
    host.must(&["workspace", "hold", "-w", "w", "--reason", "x"]);
    repair(&host, "w", 2);
    assert_eq!(verified(&host)["restores"], serde_json::json!([]));
    host.stop();
    let anchors = host.dir.join("state/evidence-anchors");
    let before = fs::read_to_string(&anchors).unwrap();
    let database = host.dir.join("state/overfence.db");
    let old = database_of(&host);
    done(&host, &written(1));
    assert!(host.start(None), "{}", host.log());
    let report = verified(&host);
    assert_eq!(report["restores"][0]["entry"], last + 1, "{report:#}");
    assert!(report["anchors_set_aside"].as_u64().unwrap() > 0, "{report:#}");
    let table = done(&host, "overfence evidence verify");
    assert!(table.contains(&format!("goes on from a backup at entry {}", last + 1)), "{table}");
    assert!(table.contains("set aside"), "{table}");
    // No anchor is taken away.
    assert!(fs::read_to_string(&anchors).unwrap().starts_with(&before));
    let told = host.must(&["evidence", "show", "--since", &last.to_string(), "--limit", "1"]);
    let entry = &told[0];
    assert_eq!((&entry["kind"], &entry["seq"]), (&"restore".into(), &(last + 1).into()));
    assert!(entry["actor"].as_str().unwrap().starts_with("uid 0"), "{entry:#}");
    let detail = &entry["detail"];
    assert_eq!(detail["from"], backup_of(&host).to_str().unwrap(), "{entry:#}");
    assert_eq!((&detail["taken_at"], &detail["entries"]), (&taken["time"], &last.into()));
    // Everything is held as ever; after a repair and more work it is as whole.
    assert!(hold_of(&host, "w").contains("was seen"));
    repair(&host, "w", 2);
    publish(&host, "w", "three");
    verified(&host);
    host.stop();
    assert!(host.start(None), "{}", host.log());
    assert_eq!(hold_of(&host, "w"), "", "it is said once");
    verified(&host);
    host.stop();
    // The database of before the restore, by hand: not what is witnessed now.
    let restored = database_of(&host);
    put_back(&host, &old);
    let marks = fs::read(host.dir.join("state/high-water")).unwrap();
    let witnessed = fs::read(&anchors).unwrap();
    assert!(host.start(None), "{}", host.log());
    assert!(!hold_of(&host, "w").is_empty());
    let (code, report) = host.ask(&["evidence", "verify"]);
    assert_eq!((code, &report["ok"]), (1, &false.into()), "{report:#}");
    assert_eq!(
        report["fault"].as_str().unwrap().split(':').next(),
        Some(&*format!("entry {}", last + 1))
    );
    host.stop();
    // A record of before the restore, and one of after it.
    for seq in [last - 1, last + 2] {
        put_back(&host, &restored);
        fs::write(&anchors, &witnessed).unwrap();
        fs::write(host.dir.join("state/high-water"), &marks).unwrap();
        let db = rusqlite::Connection::open(&database).unwrap();
        let changed = db
            .execute("UPDATE evidence SET body = replace(body, '\"actor\":\"', '\"actor\":\"x') WHERE seq = ?", [seq.cast_signed()]);
        assert_eq!(changed.unwrap(), 1);
        drop(db);
        assert!(host.start(None), "{}", host.log());
        let (code, report) = host.ask(&["evidence", "verify"]);
        assert_eq!((code, &report["ok"]), (1, &false.into()), "{seq}: {report:#}");
        assert!(
            report["fault"]
                .as_str()
                .unwrap()
                .contains(&format!("entry {seq}: its text was altered"))
        );
        host.stop();
    }
}

fn partial(place: &Place) {
    let mut host = started(place, "h");
    publish(&host, "w", "one");
    let w = publish_view(&host, "w", "two");
    publish(&host, "other", "one");
    let layers = host.dir.join("state/layers");
    let top = w["head"].as_array().unwrap().last().unwrap().as_str().unwrap()[7..].to_owned();
    let blob = layers.join(&top).join("layer.tar.zst");
    let good = fs::read(&blob).unwrap();
    fs::write(&blob, [&good[..good.len() - 1], &[!good[good.len() - 1]]].concat()).unwrap();
    let out = shell(&host, &(written(0).trim_end().to_owned() + " -o json"), "");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(8), "{said}\n{}", host.log());
    assert!(said.contains("partial") && said.contains(&top), "{said}");
    let made: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((made["layers"].as_u64(), made["left_out"].as_array().unwrap().len()), (Some(2), 1));
    let note = fs::read_to_string(backup_of(&host).join("backup.json")).unwrap();
    let note: Value = serde_json::from_str(&note).unwrap();
    assert_eq!(note["left_out"], made["left_out"]);
    assert!(note["left_out"][0]["layer"].as_str().unwrap().ends_with(&top), "{note:#}");
    let there = names_in(&backup_of(&host).join("layers"));
    assert!(there.len() == 2 && !there.contains(&top), "{there:?}");
    // Whoever met it first told it.
    let told = host.must(&["evidence", "show"]);
    let told = told.as_array().unwrap().iter().filter(|e| e["kind"] == "layer_damaged");
    assert_eq!((told.count(), host.metric("layers_damaged")), (1, 1));
    // One that is not there at all is left out as well, and no other note is believed.
    fs::remove_dir_all(layers.join(&top)).unwrap();
    let other = written(0).replace("$BACKUP", "$BACKUP-2");
    not_done(&host, &other, 8, &top);
    host.kill_agent();
    let strange = host.dir.join("backup-2/backup.json");
    let text = fs::read_to_string(&strange).unwrap();
    let zeros = "0".repeat(64);
    fs::write(
        &strange,
        text.replacen(
            &format!("\"layer\": \"sha256:{top}"),
            &format!("\"layer\": \"sha256:{zeros}"),
            1,
        ),
    )
    .unwrap();
    not_done(&host, &written(1).replace("$BACKUP", "$BACKUP-2"), 1, "none of its own");
    // Put back, everything else works, and what is missing is named again.
    not_done(&host, &written(1), 8, &top);
    assert!(host.start(None), "{}", host.log());
    for (name, generation) in [("w", 2), ("other", 1)] {
        if !hold_of(&host, name).is_empty() {
            repair(&host, name, generation);
        }
    }
    publish(&host, "other", "two");
    let (code, said) = host.ask(&["session", "open", "-w", "w"]);
    assert_eq!(code, 4, "{said:#}");
    host.must(&["workspace", "revert", "-w", "w", "--to", "1"]);
    publish(&host, "w", "three");
}

fn publish_view(host: &Host, workspace: &str, file: &str) -> Value {
    publish(host, workspace, file);
    host.must(&["workspace", "status", workspace])
}

/// The points that a command comes to after the agent's start.
fn points(log: &Path) -> usize {
    fs::read_to_string(log).unwrap_or_default().lines().count()
}

fn killed_taking(place: &Place) {
    let mut counting = started(place, "count");
    publish(&counting, "w", "one");
    counting.kill_agent();
    let log = counting.dir.join("points");
    assert!(counting.start(Some(&format!("log={}", log.display()))));
    let before = points(&log);
    done(&counting, &written(0));
    let all = points(&log);
    counting.stop();
    let told = fs::read_to_string(&log).unwrap();
    for name in ["agent.backup.before", "store.copy.before", "agent.backup.rename.before"] {
        assert!(told.contains(name), "{told}");
    }
    // One host lives through all of them: the next one begins where the last one was killed.
    let mut host = started(place, "h");
    publish(&host, "w", "one");
    host.kill_agent();
    for hit in before + 1..=all {
        let whole = host.start(Some(&format!("die={hit}")));
        let whole = whole && shell(&host, &written(0), "").status.success();
        host.kill_agent();
        let there = backup_of(&host).exists();
        assert!(there || !whole, "{hit}");
        assert!(host.start(None), "{hit}: {}", host.log());
        if !there {
            // Under its final name there is a whole one, or none; the next one is taken all the same.
            done(&host, &written(0));
        }
        assert!(!host.dir.join("backup.partial").exists());
        host.kill_agent();
        done(&host, &written(1));
        fs::remove_dir_all(backup_of(&host)).unwrap();
        assert!(host.start(None), "{hit}: {}", host.log());
        if !hold_of(&host, "w").is_empty() {
            repair(&host, "w", 1);
        }
        host.kill_agent();
    }
}

fn killed_restoring(place: &Place) {
    let prepared = |name: &str| {
        let mut host = started(place, name);
        publish(&host, "w", "one");
        done(&host, &written(0));
        publish(&host, "w", "two");
        host.kill_agent();
        // One layer is lost, so that it comes from the backup.
        let layer = names_in(&backup_of(&host).join("layers")).remove(0);
        fs::remove_dir_all(host.dir.join("state/layers").join(layer)).unwrap();
        host
    };
    let counting = prepared("count");
    let log = counting.dir.join("points");
    assert!(shell(&counting, &written(1), &format!("log={}", log.display())).status.success());
    let told = fs::read_to_string(&log).unwrap();
    for name in [
        "upper.layer.rename.before",
        "store.restore_record.before",
        "store.restore.before",
        "store.turn.before",
        "store.set_aside.before",
    ] {
        assert!(told.contains(name), "{told}");
    }
    let decided = told.lines().position(|line| line.ends_with("store.restore.after")).unwrap() + 1;
    for hit in 1..=points(&log) {
        let mut host = prepared(&format!("k{hit}"));
        assert!(!shell(&host, &written(1), &format!("die={hit}")).status.success(), "{hit}");
        // Half of it is never believed: the agent has the one database or the other.
        assert!(host.start(None), "{hit}: {}", host.log());
        let w = host.must(&["workspace", "status", "w"]);
        let expected = if hit < decided { (2, true) } else { (1, false) };
        assert_eq!((w["version"].as_u64().unwrap(), w["hold"].is_null()), expected, "{hit} {w:#}");
        assert_eq!(verified(&host)["restores"].as_array().unwrap().is_empty(), hit < decided);
        host.kill_agent();
        // Done again, it is done; and nothing is believed that is older than what was seen.
        done(&host, &written(1));
        assert!(host.start(None), "{hit}: {}", host.log());
        assert!(hold_of(&host, "w").contains("generation 1, but 2 was seen"), "{hit}");
        repair(&host, "w", 2);
        let report = verified(&host);
        let last = report["restores"].as_array().unwrap().last();
        assert!(last.is_some_and(|one| one["entry"].as_u64() > Some(0)), "{hit}: {report:#}");
        assert_eq!(host.must(&["workspace", "verify", "-w", "w"])["ok"], true);
        assert_eq!(publish(&host, "w", "three"), 3, "{hit}");
        host.stop();
    }
}
