//! I5: kept bytes come back because a named person said so: by a bundle, or by a readmission of a
//! session that has no process to run on. Both open a new session under a current lease, and what it
//! shows is what the former one showed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::agent_process::{Host, id_of, path_of};
use crate::delta::tree;
use crate::host::{Place, Test};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "i5_a_bundle_comes_back_under_a_lease_and_publishes", run: comes_back },
        Test { name: "what_was_published_and_deleted_stays_deleted", run: own_publication },
        Test {
            name: "i5_a_bundle_that_both_sides_changed_is_refused_with_the_paths",
            run: conflict,
        },
        Test { name: "a_bundle_on_a_head_that_went_on_elsewhere_shows_both", run: both },
        Test { name: "a_bundle_that_is_not_right_leaves_nothing", run: wrong },
        Test { name: "a_killed_session_is_readmitted_on_a_copy", run: killed },
        Test { name: "a_session_of_an_earlier_boot_is_readmitted_on_a_copy", run: rebooted },
        Test { name: "a_readmission_wants_the_head_as_it_was", run: moved },
        Test { name: "as_written_in_operations", run: as_written },
        Test { name: "i8_an_apply_killed_at_every_effect_leaves_all_or_nothing", run: crash_apply },
        Test { name: "i8_a_readmission_killed_at_every_effect_loses_no_byte", run: crash_readmit },
    ]
}

const BY: [&str; 4] = ["--authorised-by", "ann", "--reason", "wanted after all"];

fn sh(dir: &Path, script: &str) {
    let status =
        Command::new("bash").args(["-euc", script]).current_dir(dir).stdin(Stdio::null()).status();
    assert!(status.unwrap().success(), "{script}");
}

fn started(place: &Place, name: &str) -> Host {
    let mut host = Host::new(place, name);
    assert!(host.start(None), "{}", host.log());
    host
}

/// A workspace with a first layer, and a session of it.
fn opened(host: &Host) -> Value {
    let lower = host.dir.join("lower");
    std::fs::create_dir(&lower).unwrap();
    sh(
        &lower,
        "mkdir -p d/e gone/x anew; echo 1 > d/f; echo 2 > d/e/g; echo 3 > gone/x/y; echo 4 > anew/old
         echo 5 > same; echo 6 > theirs; ln same hard; ln -s same soft",
    );
    let lower = lower.to_str().unwrap().to_owned();
    host.must(&["session", "open", "-w", "w", "--create", "--lower", &lower, "--ttl", "1h"])
}

const CHANGES: &str = "echo more >> d/f; rm -r gone anew; mkdir anew; echo 7 > anew/new; rm soft
    ln -s d/f soft; chmod 700 d/e; echo 8 > fresh; ln fresh second; mkfifo pipe; truncate -s 1G holes
    python3 -c 'import os; os.setxattr(\"d/f\", \"user.who\", b\"ann\")'; echo 9 > $'odd\\n\\xff'";

fn merged(opened: &Value) -> PathBuf {
    path_of(&opened["session"], "merged")
}

/// Everything a tree shows, but for the content of holes.
fn shows(top: &Path) -> Vec<String> {
    // A directory's size and links are its file system's.
    let list = "find . -mindepth 1 \\( -type d -printf '%p %y %m %U:%G\\n' \\
        -o -printf '%p %y %m %U:%G %n %s %l\\n' \\) | sort
        find . '(' -type f -o -type d ')' -print0 | sort -z | python3 -c 'import os, sys
for name in sys.stdin.buffer.read().split(bytes(1))[:-1]:
    print(name, [(key, os.getxattr(name, key)) for key in os.listxattr(name) if key.startswith(\"user.\")])'
        find . -type f ! -name holes -exec sha256sum {} + | sort";
    let out = Command::new("bash").args(["-euc", list]).current_dir(top).output().unwrap();
    assert!(out.status.success(), "{out:?}");
    String::from_utf8_lossy(&out.stdout).lines().map(str::to_owned).collect()
}

fn stop(host: &Host, id: &str, to: &str) {
    host.ask(&["fence", id, "--to", to, "--reason", "test", "--wait"]);
    host.until(id, |view| view["state"] == "PRESERVED");
}

fn export(host: &Host, id: &str) -> String {
    let dest = host.dir.join("bundle");
    host.must(&["preserved", "export", id, "--dest", dest.to_str().unwrap()]);
    dest.to_str().unwrap().to_owned()
}

fn apply(host: &Host, bundle: &str) -> Value {
    host.must(&[&["bundle", "apply", bundle, "-w", "w", "--ttl", "1h"], &BY[..]].concat())
}

/// A session whose bytes lie in a bundle alone.
fn bundled(host: &Host) -> String {
    let first = opened(host);
    sh(&merged(&first), CHANGES);
    stop(host, &id_of(&first), "read-only");
    let bundle = export(host, &id_of(&first));
    host.must(&["preserved", "discard", &id_of(&first), "--yes"]);
    bundle
}

/// Nothing of a copy that was under way.
fn nothing_staged(host: &Host) {
    let begun = std::time::Instant::now();
    while std::fs::read_dir(host.dir.join("state/exports")).unwrap().count() > 0 {
        assert!(begun.elapsed() < std::time::Duration::from_secs(20), "something was left");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

fn comes_back(place: &Place) {
    let host = started(place, "h");
    let first = opened(&host);
    sh(&merged(&first), CHANGES);
    let before = shows(&merged(&first));
    stop(&host, &id_of(&first), "read-only");
    let bundle = export(&host, &id_of(&first));
    host.must(&["preserved", "discard", &id_of(&first), "--yes"]);
    let back = apply(&host, &bundle);
    let id = id_of(&back);
    assert_ne!(id, id_of(&first));
    assert_eq!(back["session"]["state"], "ACTIVE");
    assert_eq!(back["session"]["generation"], 2);
    assert_eq!(shows(&merged(&back)), before, "it shows what the former session showed");
    assert_eq!(back["session"]["seeded"]["authorised_by"], "ann");
    assert_eq!(back["session"]["seeded"]["session"].as_str().unwrap(), id_of(&first));
    // Who stands for it, and who the kernel says asked.
    let entries = host.must(&["evidence", "show", "--session", &id]);
    let entry = entries.as_array().unwrap().iter().find(|e| e["kind"] == "acquire").unwrap();
    let seeded = &entry["detail"]["seeded"];
    assert_eq!(
        (seeded["authorised_by"].as_str(), seeded["reason"].as_str()),
        (Some("ann"), Some(BY[3]))
    );
    assert!(seeded["bundle"].as_str().unwrap().starts_with("sha256:"), "{entry:#}");
    assert!(entry["actor"].as_str().unwrap().starts_with("uid 0"), "{entry:#}");
    // Nothing is published by itself; it holds uncommitted bytes like any other writer.
    assert_eq!(host.must(&["workspace", "status", "w"])["version"], 1);
    assert_eq!(host.ask(&["session", "close", &id]).0, 4);
    host.must(&["session", "checkpoint", &id]);
    host.must(&["session", "close", &id]);
    let next = host.must(&["session", "open", "-w", "w"]);
    assert_eq!(next["session"]["base"]["version"], 2);
    assert_eq!(shows(&merged(&next)), before);
    host.must(&["session", "close", &id_of(&next)]);
    nothing_staged(&host);
    assert_eq!(host.must(&["evidence", "verify"])["ok"], true);
}

/// The session publishes, and takes away again what it published: in its upper nothing tells of that.
fn own_publication(place: &Place) {
    for way in ["bundle", "readmit"] {
        let host = started(place, way);
        let first = opened(&host);
        let id = id_of(&first);
        sh(
            &merged(&first),
            "echo p > published; mkdir -p both/a; echo q > both/a/b; echo r > d/e/r",
        );
        host.must(&["session", "checkpoint", &id]);
        sh(&merged(&first), "rm published d/e/r; rm -r both/a; echo k > both/k");
        let before = shows(&merged(&first));
        stop(&host, &id, if way == "bundle" { "read-only" } else { "killed" });
        let back = match way {
            "bundle" => {
                let bundle = export(&host, &id);
                host.must(&["preserved", "discard", &id, "--yes"]);
                id_of(&apply(&host, &bundle))
            }
            _ => {
                host.must(&[&["readmit", &id], &BY[..]].concat())["id"].as_str().unwrap().to_owned()
            }
        };
        let view = host.must(&["session", "inspect", &back]);
        assert_eq!(shows(&path_of(&view, "merged")), before, "{way}");
        host.must(&["session", "close", &back, "--checkpoint"]);
        let next = host.must(&["session", "open", "-w", "w"]);
        assert_eq!(shows(&merged(&next)), before, "{way}: what was deleted is back");
        host.must(&["session", "close", &id_of(&next)]);
        if way == "readmit" {
            host.must(&["preserved", "discard", &id, "--yes"]);
        }
    }
}

fn publish(host: &Host, script: &str) {
    let other = host.must(&["session", "open", "-w", "w", "--ttl", "1h"]);
    sh(&merged(&other), script);
    host.must(&["session", "close", &id_of(&other), "--checkpoint"]);
}

fn conflict(place: &Place) {
    let host = started(place, "h");
    let bundle = bundled(&host);
    publish(&host, "echo theirs > d/f; echo x >> gone/x/y; echo theirs > fresh; echo 1 > theirs");
    let before = host.must(&["workspace", "status", "w"]);
    let args = [&["bundle", "apply", &bundle, "-w", "w"], &BY[..]].concat();
    let out = host.run(&args);
    assert_eq!(out.status.code(), Some(4), "{out:?}");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    let named: Vec<_> = said.lines().filter_map(|line| line.strip_prefix("  ")).collect();
    assert_eq!(named, ["d/f", "fresh", "gone"], "{said}");
    assert!(said.contains("conflict"), "{said}");
    // Nothing moved: no session, no generation, no copy.
    let after = host.must(&["workspace", "status", "w"]);
    assert_eq!(
        (&after["generation"], &after["version"]),
        (&before["generation"], &before["version"])
    );
    assert_eq!(host.must(&["session", "list"]), Value::Array(vec![]));
    nothing_staged(&host);
}

fn both(place: &Place) {
    let host = started(place, "h");
    let bundle = bundled(&host);
    publish(&host, "echo 66 > theirs; echo n > d/e/theirs; chmod 711 d");
    let back = apply(&host, &bundle);
    let tree = tree(&merged(&back));
    let content = |path: &str| String::from_utf8(tree[path.as_bytes()].1.clone()).unwrap();
    assert_eq!(content("theirs"), "66\n");
    assert_eq!(content("d/e/theirs"), "n\n");
    assert_eq!(content("d/f"), "1\nmore\n");
    assert_eq!(content("fresh"), "8\n");
    assert!(!tree.contains_key(&b"gone"[..]) && !tree.contains_key(&b"anew/old"[..]));
    // Each side's change of a directory's mode.
    assert_eq!((tree[&b"d"[..]].0, tree[&b"d/e"[..]].0), (0o711, 0o700));
    host.must(&["session", "close", &id_of(&back), "--checkpoint"]);
    assert_eq!(host.must(&["workspace", "status", "w"])["version"], 3);
}

fn wrong(place: &Place) {
    let host = started(place, "h");
    let bundle = bundled(&host);
    host.must(&["workspace", "create", "other"]);
    let ask = |bundle: &str, workspace: &str, by: &[&str]| {
        host.ask(&[&["bundle", "apply", bundle, "-w", workspace], by].concat()).0
    };
    assert_eq!(ask(&bundle, "other", &BY), 2, "a bundle of another workspace");
    assert_eq!(ask("/nowhere", "w", &BY), 3);
    assert_eq!(ask("/etc", "w", &BY), 1);
    assert_eq!(ask(&bundle, "w", &["--authorised-by", " ", "--reason", "x"]), 2);
    assert_eq!(ask(&bundle, "w", &[]), 2, "nobody stands for it");
    assert_eq!(ask(&bundle, "w", &[&BY[..], &["--force"]].concat()), 2);
    // Somebody writes: their lease is not taken.
    let writer = host.must(&["session", "open", "-w", "w"]);
    assert_eq!(ask(&bundle, "w", &BY), 4);
    assert_eq!(host.must(&["session", "inspect", &id_of(&writer)])["state"], "ACTIVE");
    host.must(&["session", "close", &id_of(&writer)]);
    // A byte of its layer is another, beyond what the first names need.
    let blobs = std::fs::read_dir(Path::new(&bundle).join("blobs/sha256")).unwrap();
    let mut blobs: Vec<_> = blobs.map(|b| b.unwrap().path()).collect();
    blobs.retain(|b| std::fs::read(b).unwrap().starts_with(&[0x28, 0xb5, 0x2f, 0xfd]));
    let mut bytes = std::fs::read(&blobs[0]).unwrap();
    let at = bytes.len() - 20;
    bytes[at] ^= 1;
    std::fs::write(&blobs[0], bytes).unwrap();
    assert_eq!(ask(&bundle, "w", &BY), 1);
    assert_eq!(host.must(&["session", "list"]), Value::Array(vec![]));
    assert_eq!(std::fs::read_dir(host.dir.join("state/sessions")).unwrap().count(), 0);
    nothing_staged(&host);
}

fn killed(place: &Place) {
    let host = started(place, "h");
    let first = opened(&host);
    let id = id_of(&first);
    sh(&merged(&first), CHANGES);
    let before = shows(&merged(&first));
    stop(&host, &id, "killed");
    let back = host.must(&[&["readmit", &id], &BY[..]].concat());
    let new = back["id"].as_str().unwrap();
    assert_ne!(new, id);
    assert_eq!((&back["state"], &back["generation"]), (&"ACTIVE".into(), &2.into()));
    assert_eq!(back["owner"], first["session"]["owner"]);
    assert_eq!(shows(&path_of(&back, "merged")), before);
    assert_eq!(back["seeded"]["session"].as_str(), Some(&*id));
    // Who held the lease goes on with the token they have.
    let token = host.dir.join("token");
    std::fs::write(&token, first["token"].as_str().unwrap()).unwrap();
    let beat = serde_json::json!({ "token": first["token"] }).to_string();
    assert_eq!(host.http("POST", &format!("/v1/sessions/{new}/beat"), &beat).status, 200);
    // What was kept stays kept, until somebody decides.
    assert_eq!(host.must(&["session", "inspect", &id])["state"], "PRESERVED");
    let again = host.ask(&[&["readmit", &id], &BY[..]].concat());
    assert_eq!(again.0, 4, "its successor writes");
    host.must(&["session", "close", new, "--checkpoint"]);
    host.must(&["preserved", "discard", &id, "--yes"]);
    let next = host.must(&["session", "open", "-w", "w"]);
    assert_eq!(shows(&merged(&next)), before);
    host.must(&["session", "close", &id_of(&next)]);
}

/// What a reboot is to an agent: another boot id, and no mount of before.
fn reboot(host: &mut Host, merged: &Path) {
    host.kill_agent();
    nix::mount::umount(merged).unwrap();
    let id = host.dir.join("boot_id");
    std::fs::write(&id, format!("{}\n", uuid::Uuid::now_v7())).unwrap();
    let flags = nix::mount::MsFlags::MS_BIND;
    let of_kernel = "/proc/sys/kernel/random/boot_id";
    nix::mount::mount(Some(&id), of_kernel, None::<&str>, flags, None::<&str>).unwrap();
    assert!(host.start(None), "{}", host.log());
}

fn rebooted(place: &Place) {
    let mut host = started(place, "h");
    let first = opened(&host);
    let id = id_of(&first);
    sh(&merged(&first), CHANGES);
    let before = shows(&merged(&first));
    reboot(&mut host, &merged(&first));
    let view = host.until(&id, |view| view["state"] == "PRESERVED");
    assert_eq!(view["loss"], "the host started again");
    let back = host.must(&[&["readmit", &id], &BY[..]].concat());
    assert_eq!(back["state"], "ACTIVE", "{back:#}");
    assert_ne!(back["id"].as_str(), Some(&*id));
    let new = back["id"].as_str().unwrap();
    assert_eq!(shows(&path_of(&back, "merged")), before);
    host.must(&["session", "close", new, "--checkpoint"]);
    host.must(&["preserved", "discard", &id, "--yes"]);
    let next = host.must(&["session", "open", "-w", "w"]);
    assert_eq!(shows(&merged(&next)), before);
    host.must(&["session", "close", &id_of(&next)]);
}

fn moved(place: &Place) {
    let host = started(place, "h");
    let first = opened(&host);
    let id = id_of(&first);
    sh(&merged(&first), "echo mine > mine");
    stop(&host, &id, "killed");
    publish(&host, "echo theirs > theirs");
    let before = host.must(&["workspace", "status", "w"]);
    let out = host.run(&[&["readmit", &id], &BY[..]].concat());
    assert_eq!(out.status.code(), Some(4));
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(said.contains("head_moved") && said.contains("bundle apply"), "{said}");
    // A refused lease, and no refused publication.
    let row = host.must(&["workspace", "history", "w", "--limit", "1"])[0].clone();
    assert_eq!((&row["kind"], &row["session"]), (&"refused".into(), &id.clone().into()));
    let refused = (&row["detail"]["verb"], &row["detail"]["code"]);
    assert_eq!(refused, (&"acquire".into(), &"head_moved".into()));
    let metrics = host.http("GET", "/metrics", "").body;
    assert!(!metrics.contains("reason=\"head_moved\""), "{metrics}");
    assert_eq!(host.must(&["workspace", "status", "w"]), before);
    // The way out that it names.
    let bundle = export(&host, &id);
    let back = apply(&host, &bundle);
    let tree = tree(&merged(&back));
    assert_eq!(
        (&tree[&b"mine"[..]].1, &tree[&b"theirs"[..]].1),
        (&b"mine\n".to_vec(), &b"theirs\n".to_vec())
    );
    host.must(&["session", "close", &id_of(&back), "--checkpoint"]);
    host.must(&["preserved", "discard", &id, "--yes"]);
}

/// The shell blocks of "Bring kept bytes back" in docs/OPERATIONS.md, in order.
fn documented() -> Vec<String> {
    let text = include_str!("../docs/OPERATIONS.md");
    let (_, section) = text.split_once("## Bring kept bytes back\n").expect("the section");
    let (section, _) = section.split_once("\n## ").expect("a section behind it");
    let blocks = section.split("```sh\n").skip(1);
    blocks.map(|rest| rest.split_once("```").expect("an end").0.to_owned()).collect()
}

fn as_written(place: &Place) {
    let host = started(place, "h");
    let bundle = bundled(&host);
    let blocks = documented();
    assert_eq!(blocks.len(), 2);
    let run = |script: &str, stale: &str| {
        let path = std::env::var("PATH").unwrap();
        let bin = host.dir.join("bin");
        std::fs::create_dir_all(&bin).unwrap();
        let _ = std::os::unix::fs::symlink(&host.binary, bin.join("overfence"));
        let out = Command::new("bash")
            .args(["-euc", script])
            .env("PATH", format!("{}:{path}", bin.display()))
            .env("OVERFENCE_SOCKET", host.dir.join("run/overfence.sock"))
            .envs([("BUNDLE", &*bundle), ("WORKSPACE", "w"), ("STALE", stale)])
            .envs([("NAME", "ann"), ("REASON", "the document's test")])
            .env("PLACE", &host.dir)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert!(out.status.success(), "{script}\n{out:?}");
    };
    run(&blocks[0], "");
    assert_eq!(host.must(&["workspace", "status", "w"])["version"], 2);
    let again = host.must(&["session", "open", "-w", "w", "--ttl", "1h"]);
    sh(&merged(&again), "echo x > x");
    stop(&host, &id_of(&again), "killed");
    run(&blocks[1], &id_of(&again));
    assert_eq!(host.must(&["workspace", "status", "w"])["version"], 3);
    assert_eq!(host.must(&["session", "list"]), Value::Array(vec![]));
}

/// The points passed between two counts of a log of failpoints, each the first time it is passed.
fn points(log: &Path, from: usize) -> Vec<(u64, String)> {
    let text = std::fs::read_to_string(log).unwrap();
    let mut known = BTreeSet::new();
    let lines = text.lines().skip(from).map(|line| line.trim_end_matches(" can fail"));
    let lines = lines.map(|line| line.split_once(' ').unwrap());
    lines
        .filter(|(_, name)| known.insert((*name).to_owned()))
        .map(|(hit, name)| (hit.parse().unwrap(), name.to_owned()))
        .collect()
}

fn passed(log: &Path) -> usize {
    std::fs::read_to_string(log).unwrap().lines().count()
}

/// Does `act` once to learn the points on its way, then once for each of them with an agent that is
/// killed there; after each, `holds` is asked of a host that started again.
fn killed_at_each(
    place: &Place,
    prepare: impl Fn(&Host) -> String,
    act: impl Fn(&Host, &str) -> i32,
    holds: impl Fn(&Host, &str, &str),
) {
    let mut counting = started(place, "count");
    let log = counting.dir.join("points");
    let with = prepare(&counting);
    counting.kill_agent();
    assert!(counting.start(Some(&format!("log={}", log.display()))));
    let from = passed(&log);
    let by_start: BTreeSet<_> = points(&log, 0).into_iter().map(|(_, name)| name).collect();
    assert_eq!(act(&counting, &with), 0, "{}", counting.log());
    let todo = points(&log, from);
    counting.stop();
    for wanted in ["seed.stage.before", "seed.stage.after", "seed.move.before", "seed.move.after"] {
        assert!(todo.iter().any(|(_, name)| name == wanted), "{wanted} is not passed: {todo:?}");
    }
    eprintln!("{} points", todo.len());
    for (n, (hit, name)) in todo.iter().enumerate() {
        let mut host = started(place, &format!("k{n}"));
        let with = prepare(&host);
        host.kill_agent();
        // What a start passes, too, is met by its number: a sweep may shift that a little.
        let named = !by_start.contains(name);
        let plan = if named { format!("die={name}") } else { format!("die={hit}") };
        if host.start(Some(&plan)) {
            let code = act(&host, &with);
            // A kill is seen by the client before it is by who waits for the process.
            let begun = std::time::Instant::now();
            while !host.dead() && begun.elapsed() < std::time::Duration::from_secs(2) {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            assert!(
                !named || host.dead(),
                "{name}: {code}, it was not killed there: {}",
                host.log()
            );
        }
        host.kill_agent();
        assert!(host.start(None), "{name}: {}", host.log());
        holds(&host, &with, name);
        nothing_staged(&host);
        assert_eq!(host.must(&["evidence", "verify"])["ok"], true, "{name}");
        host.stop();
    }
}

/// What is there of a session that was being opened: all of it, or nothing.
fn settled(host: &Host, but: Option<&str>) -> Option<Value> {
    let begun = std::time::Instant::now();
    loop {
        let all = host.must(&["session", "list"]);
        let all: Vec<_> =
            all.as_array().unwrap().iter().filter(|s| s["id"].as_str() != but).collect();
        let moving = all.iter().any(|s| s["state"] != "ACTIVE" && s["state"] != "PRESERVED");
        if !moving {
            assert!(all.len() <= 1, "{all:#?}");
            return all.first().map(|s| (*s).clone());
        }
        assert!(begun.elapsed() < std::time::Duration::from_secs(20), "{all:#?}\n{}", host.log());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

const SMALL: &str = "echo mine > mine; rm d/f";

fn crash_apply(place: &Place) {
    killed_at_each(
        place,
        |host| {
            let first = opened(host);
            sh(&merged(&first), SMALL);
            stop(host, &id_of(&first), "read-only");
            let bundle = export(host, &id_of(&first));
            host.must(&["preserved", "discard", &id_of(&first), "--yes"]);
            bundle
        },
        |host, bundle| {
            host.ask(&[&["bundle", "apply", bundle, "-w", "w", "--ttl", "1h"], &BY[..]].concat()).0
        },
        |host, bundle, name| {
            if let Some(there) = settled(host, None) {
                // Known here, it is whole; what was told to nobody holds its lease all the same.
                assert_eq!(there["state"], "ACTIVE", "{name}: {there:#}");
                assert_eq!(
                    std::fs::read(path_of(&there, "merged").join("mine")).unwrap(),
                    b"mine\n"
                );
                assert!(!path_of(&there, "merged").join("d/f").exists());
                let id = there["id"].as_str().unwrap();
                host.must(&["session", "close", id, "--discard", "--yes"]);
            }
            assert_eq!(host.must(&["workspace", "status", "w"])["version"], 1, "{name}");
            // The bundle is as it was, and can be applied.
            let back = apply(host, bundle);
            assert_eq!(std::fs::read(merged(&back).join("mine")).unwrap(), b"mine\n", "{name}");
            host.must(&["session", "close", &id_of(&back), "--discard", "--yes"]);
            let left = std::fs::read_dir(host.dir.join("state/sessions")).unwrap().count();
            assert_eq!(left, 0, "{name}");
        },
    );
}

fn crash_readmit(place: &Place) {
    killed_at_each(
        place,
        |host| {
            let first = opened(host);
            sh(&merged(&first), SMALL);
            stop(host, &id_of(&first), "killed");
            id_of(&first)
        },
        |host, id| host.ask(&[&["readmit", id], &BY[..]].concat()).0,
        |host, id, name| {
            // I4: the bytes are where they were.
            let view = host.until(id, |view| view["state"] == "PRESERVED");
            assert_eq!(
                std::fs::read(path_of(&view, "upper").join("mine")).unwrap(),
                b"mine\n",
                "{name}"
            );
            if let Some(there) = settled(host, Some(id)) {
                assert_eq!(there["state"], "ACTIVE", "{name}: {there:#}");
                assert_eq!(
                    std::fs::read(path_of(&there, "merged").join("mine")).unwrap(),
                    b"mine\n"
                );
                let new = there["id"].as_str().unwrap();
                host.must(&["session", "close", new, "--discard", "--yes"]);
            }
            let back = host.must(&[&["readmit", id], &BY[..]].concat());
            assert_eq!(
                std::fs::read(path_of(&back, "merged").join("mine")).unwrap(),
                b"mine\n",
                "{name}"
            );
            host.must(&["session", "close", back["id"].as_str().unwrap(), "--discard", "--yes"]);
            host.must(&["preserved", "discard", id, "--yes"]);
        },
    );
}
