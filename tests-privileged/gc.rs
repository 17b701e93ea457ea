//! Layers that nothing needs are removed, and no other ones. By the real binary.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde_json::Value;

use crate::agent_process::{Host, id_of, path_of};
use crate::host::{Place, Test, paced_ttl, rounds};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "i1_no_head_names_a_layer_that_gc_takes", run: raced },
        Test { name: "gc_takes_what_nothing_needs", run: needed },
        Test { name: "i8_gc_survives_a_kill_at_every_effect", run: killed },
    ]
}

fn started(place: &Place, name: &str) -> Host {
    let mut host = Host::new(place, name);
    assert!(host.start(None), "{}", host.log());
    host
}

fn layers(host: &Host) -> BTreeSet<String> {
    let all = fs::read_dir(host.dir.join("state/layers")).unwrap();
    all.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

fn head(w: &Value) -> Vec<String> {
    let all = w["head"].as_array().unwrap().iter();
    all.map(|layer| layer.as_str().unwrap().trim_start_matches("sha256:").to_owned()).collect()
}

/// The same bytes, names and times, so the same layer.
fn write_same(merged: &Path) {
    fs::write(merged.join("f"), "the same").unwrap();
    let mut touch = Command::new("touch");
    touch.args(["-d", "@1000000000"]).arg(merged.join("f")).arg(merged);
    assert!(touch.status().unwrap().success());
}

fn publish(host: &Host, workspace: &str, file: &str) -> Value {
    let opened = host.open(workspace, &paced_ttl(60));
    fs::write(path_of(&opened["session"], "merged").join(file), file).unwrap();
    host.must(&["session", "close", &id_of(&opened), "--checkpoint"]);
    host.must(&["workspace", "status", workspace])
}

fn post(host: &Host, path: &str) -> Value {
    let answer = host.http("POST", path, "{}");
    assert!(answer.status < 300, "{path}: {} {}\n{}", answer.status, answer.body, host.log());
    serde_json::from_str(&answer.body).unwrap()
}

fn raced(place: &Place) {
    let host = started(place, "h");
    let (writing, removed) = (AtomicBool::new(true), AtomicU64::new(0));
    let rounds = rounds(60);
    let begun = std::time::Instant::now();
    std::thread::scope(|scope| {
        let collector = scope.spawn(|| {
            while writing.load(Ordering::Relaxed) {
                for item in post(&host, "/v1/gc")["items"].as_array().unwrap() {
                    assert_ne!(item["verdict"], "failed", "{item:#}");
                    if item["kind"] == "layer" && item["verdict"] == "removed" {
                        removed.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        });
        // Two writers of two workspaces make the same layer over and over, and give it up again.
        let writers = ["a", "b"].map(|workspace| {
            let host = &host;
            scope.spawn(move || {
                let opened = host.open(workspace, &paced_ttl(3600));
                let (id, merged) = (id_of(&opened), path_of(&opened["session"], "merged"));
                let checkpoint = || {
                    let at = post(host, &format!("/v1/sessions/{id}/checkpoint"))["at"].clone();
                    for layer in head(&at) {
                        let place = host.dir.join("state/layers").join(&layer);
                        assert!(place.join("layer.tar.zst").exists(), "{workspace}: {at:#}");
                    }
                };
                for round in 0..rounds {
                    write_same(&merged);
                    checkpoint();
                    fs::write(merged.join("f"), round.to_string()).unwrap();
                    checkpoint();
                }
                write_same(&merged);
                host.must(&["session", "close", &id, "--checkpoint"]);
            })
        });
        let ended = writers.map(|writer| writer.join());
        writing.store(false, Ordering::Relaxed);
        collector.join().unwrap();
        for writer in ended {
            writer.unwrap();
        }
    });
    let removed = removed.into_inner();
    println!("{rounds} rounds of each writer, {removed} layers removed, {:?}", begun.elapsed());
    assert!(removed > 0, "nothing was raced");
    let (a, b) =
        (host.must(&["workspace", "status", "a"]), host.must(&["workspace", "status", "b"]));
    assert_eq!(head(&a), head(&b));
    for workspace in ["a", "b"] {
        assert_eq!(host.must(&["workspace", "verify", "-w", workspace])["ok"], true);
        let rows = host.must(&["workspace", "history", workspace]);
        let refused = rows.as_array().unwrap().iter().filter(|row| row["kind"] == "refused");
        assert_eq!(refused.count(), 0, "no publication was refused for a collection's sake");
    }
}

fn needed(place: &Place) {
    let host = started(place, "h");
    // Each close is a version; a session that goes on replaces its own layer.
    let opened = host.open("w", &paced_ttl(600));
    let (id, merged) = (id_of(&opened), path_of(&opened["session"], "merged"));
    let mut versions = Vec::new();
    for n in 0..12 {
        fs::write(merged.join("f"), n.to_string()).unwrap();
        host.must(&["session", "checkpoint", &id]);
        versions.push(head(&host.must(&["workspace", "status", "w"])).remove(0));
    }
    host.must(&["session", "close", &id, "--checkpoint"]);
    let dry = host.must(&["gc", "--dry-run"]);
    let verdicts = |report: &Value, verdict: &str| -> BTreeSet<String> {
        let all = report["items"].as_array().unwrap().iter();
        let layers = all.filter(|i| i["kind"] == "layer" && i["verdict"] == verdict);
        layers.map(|i| i["id"].as_str().unwrap()["sha256:".len()..].to_owned()).collect()
    };
    let oldest: BTreeSet<_> = versions[..2].iter().cloned().collect();
    assert_eq!(verdicts(&dry, "remove"), oldest, "{dry:#}");
    assert!(oldest.is_subset(&layers(&host)), "a dry run removes nothing");
    // A stopped session needs what it was mounted on, whatever became of the workspace.
    let stale = host.open("w", &paced_ttl(600));
    fs::write(path_of(&stale["session"], "merged").join("stale"), "x").unwrap();
    host.must(&["fence", &id_of(&stale), "--reason", "test", "--wait"]);
    host.must(&["workspace", "revert", "-w", "w", "--to", "5"]);
    for n in 0..12 {
        publish(&host, "w", &n.to_string());
    }
    let report = host.must(&["gc"]);
    let removed = verdicts(&report, "removed");
    assert!(oldest.is_subset(&removed), "{report:#}");
    assert!(!removed.contains(&versions[11]), "the base of a preserved session: {report:#}");
    assert!(!removed.contains(&versions[4]), "in the head again: {report:#}");
    assert_eq!(verdicts(&report, "keep").iter().filter(|l| **l == versions[11]).count(), 1);
    assert!(layers(&host).is_disjoint(&removed));
    assert!(report["bytes_freed"].as_u64().unwrap() > 0);
    assert_eq!(host.must(&["workspace", "verify", "-w", "w"])["ok"], true);
    // What a bundle was made on stays as long as the bundle.
    host.must(&["preserved", "export", &id_of(&stale), "--dispose", "--yes"]);
    let kept = host.must(&["gc"]);
    assert!(!verdicts(&kept, "removed").contains(&versions[11]), "{kept:#}");
    let bundles = host.dir.join("state/bundles");
    fs::remove_dir_all(&bundles).unwrap();
    fs::create_dir(&bundles).unwrap();
    let last = host.must(&["gc"]);
    assert!(verdicts(&last, "removed").contains(&versions[11]), "{last:#}");
    // A version of before cannot come back, and that is said; a kept one does.
    let out = host.run(&["workspace", "revert", "-w", "w", "--to", "1"]);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!out.status.success() && said.contains(&versions[0]), "{said}");
    host.must(&["workspace", "revert", "-w", "w", "--to", "20"]);
    // A deleted workspace needs nothing.
    host.must(&["workspace", "delete", "-w", "w", "--yes"]);
    host.must(&["gc"]);
    assert_eq!(layers(&host), BTreeSet::new());
    let told = host.must(&["evidence", "show"]);
    assert!(told.as_array().unwrap().iter().any(|e| e["kind"] == "layers_buried"));
}

fn killed(place: &Place) {
    let prepared = |name: &str| {
        let mut host = started(place, name);
        let opened = host.open("w", &paced_ttl(60));
        write_same(&path_of(&opened["session"], "merged"));
        host.must(&["session", "close", &id_of(&opened), "--checkpoint"]);
        host.must(&["workspace", "delete", "-w", "w", "--yes"]);
        publish(&host, "kept", "f");
        host.kill_agent();
        host
    };
    let points = |log: &Path| fs::read_to_string(log).unwrap_or_default().lines().count();
    let mut counting = prepared("count");
    let log = counting.dir.join("points");
    assert!(counting.start(Some(&format!("log={}", log.display()))));
    let before = points(&log);
    counting.must(&["gc"]);
    let all = points(&log);
    counting.stop();
    assert!(all - before >= 6, "{}", fs::read_to_string(&log).unwrap());
    for hit in before + 1..=all {
        let mut host = prepared(&format!("k{hit}"));
        if host.start(Some(&format!("die={hit}"))) {
            host.ask(&["gc"]);
        }
        host.kill_agent();
        assert!(host.start(None), "{hit}: {}", host.log());
        assert_eq!(host.must(&["workspace", "verify", "-w", "kept"])["ok"], true, "{hit}");
        // The same content is made again, whatever the collection had come to.
        let opened = host.open("again", &paced_ttl(60));
        write_same(&path_of(&opened["session"], "merged"));
        host.must(&["session", "close", &id_of(&opened), "--checkpoint"]);
        assert_eq!(host.must(&["workspace", "verify", "-w", "again"])["ok"], true, "{hit}");
        host.must(&["gc"]);
        assert_eq!(layers(&host).len(), 2, "{hit}: {:?}", layers(&host));
        host.stop();
    }
}
