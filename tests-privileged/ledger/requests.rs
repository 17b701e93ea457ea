//! Requests that cannot be taken back.

use std::path::PathBuf;

use serde_json::Value;

use super::{begin, history, refused, requests, stored, version, wait, write};
use crate::agent_process::{Host, id_of, path_of};
use crate::host::{Place, paced_ttl};

/// Something outside, that gives no receipt but can be asked by key.
struct Far(PathBuf);

impl Far {
    fn send(&self, key: &str) {
        use std::io::Write as _;
        let mut file = std::fs::File::options().create(true).append(true).open(&self.0).unwrap();
        writeln!(file, "{key}").unwrap();
    }
    fn got(&self) -> Vec<String> {
        let text = std::fs::read_to_string(&self.0).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

pub(super) fn sent_once(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let far = Far(host.dir.join("far"));
    let a = host.must(&[
        "session",
        "open",
        "-w",
        "w",
        "--create",
        "--owner",
        "ann",
        "--ttl",
        &paced_ttl(60),
    ]);
    let first = id_of(&a);
    write(&a, "f", "published by a");
    host.must(&["session", "checkpoint", &first]);
    write(&a, "f", "of a, with what it sent");
    let begun = begin(&host, &first, "invoice-7", "k1");
    assert_eq!((&begun["result"], &begun["request"]["state"]), (&"begun".into(), &"OPEN".into()));
    assert_eq!(begun["request"]["assignee"], "ann");
    far.send("k1");
    // The same again may have been sent; another key for the same task, or the key for another one,
    // is not to be.
    assert_eq!(begin(&host, &first, "invoice-7", "k1")["result"], "repeated");
    for (task, key, word) in [("invoice-7", "k2", "task_taken"), ("invoice-8", "k1", "key_used")] {
        let args = ["request", "begin", &first, "--task", task, "--key", key];
        let (code, said) = refused(&host, &args);
        assert!(code == 4 && said.contains(word) && said.contains("key k1"), "{code}: {said}");
        let body = format!("{{\"task\":{task:?},\"key\":{key:?}}}");
        let answer = host.http("POST", &format!("/v1/sessions/{first}/requests"), &body);
        let problem: Value = serde_json::from_str(&answer.body).unwrap();
        assert_eq!((answer.status, &problem["request"]["key"]), (409, &"k1".into()));
    }
    // The writer is lost before the answer came. Nothing of it is taken back.
    host.must(&["fence", &first, "--reason", "test", "--wait"]);
    let b = host.must(&["session", "open", "-w", "w", "--owner", "bob", "--ttl", &paced_ttl(60)]);
    let second = id_of(&b);
    let at_b = path_of(&b["session"], "merged").join("f");
    assert_eq!(std::fs::read_to_string(at_b).unwrap(), "published by a");
    for (task, key) in [("invoice-7", "k1"), ("invoice-9", "k9")] {
        let args = ["request", "begin", &first, "--task", task, "--key", key];
        let (code, said) = refused(&host, &args);
        let whole = code == 4 && said.contains("stale_generation") && said.contains("bob");
        assert!(whole, "{code}: {said}");
    }
    let stale = ["request", "begin", &second, "--task", "t", "--key", "k", "--generation", "1"];
    let (code, said) = refused(&host, &stale);
    assert!(code == 4 && said.contains("stale_generation"), "{code}: {said}");
    let (code, said) =
        refused(&host, &["request", "begin", &second, "--task", "invoice-7", "--key", "k2"]);
    assert!(code == 4 && said.contains("task_taken"), "{code}: {said}");
    let resumed = begin(&host, &second, "invoice-7", "k1");
    assert_eq!(
        (&resumed["result"], &resumed["request"]["generation"]),
        (&"resumed".into(), &1.into())
    );
    assert_eq!(resumed["request"]["session"], first.as_str());
    if !far.got().contains(&"k1".to_owned()) {
        far.send("k1");
    }
    host.must(&["request", "assign", "k1", "carol", "-w", "w"]);
    assert_eq!(requests(&host, false)[0]["assignee"], "carol");
    let done = host.must(&["request", "ack", "k1", "done", "-w", "w", "--note", "ref 17"]);
    assert_eq!((&done["state"], &done["outcome"]), (&"SETTLED".into(), &"done".into()));
    assert_eq!(requests(&host, false), Vec::<Value>::new());
    // Told once: the same again is the same, another outcome is refused, and the task is over.
    host.must(&["request", "resolve", "k1", "done", "-w", "w", "--reason", "asked them"]);
    let (code, said) = refused(
        &host,
        &["request", "resolve", "k1", "not-done", "-w", "w", "--reason", "no trace"],
    );
    assert!(code == 4 && said.contains("already_settled"), "{code}: {said}");
    let (code, _) = refused(&host, &["request", "ack", "k7", "done", "-w", "w"]);
    assert_eq!(code, 3);
    // What did not take place may be asked for again, under another key.
    begin(&host, &second, "invoice-8", "k8");
    host.must(&["request", "resolve", "k8", "not-done", "-w", "w", "--reason", "never arrived"]);
    assert_eq!(begin(&host, &second, "invoice-8", "k8b")["result"], "begun");
    far.send("k8b");
    host.must(&["request", "ack", "k8b", "done", "-w", "w"]);
    assert_eq!(far.got(), ["k1", "k8b"], "something was sent twice");
    // Who did what, and why, is on record.
    let evidence = host.must(&["evidence", "show", "--limit", "1000"]);
    let kinds: Vec<_> =
        evidence.as_array().unwrap().iter().filter_map(|e| e["kind"].as_str()).collect();
    let count = |kind: &str| kinds.iter().filter(|k| **k == kind).count();
    assert!(count("request_begin") >= 9 && count("request_settle") >= 4, "{kinds:?}");
    assert_eq!((history(&host, "begun"), history(&host, "settled")), (4, 3));
    let text = host.http("GET", "/metrics", "").body;
    for line in [
        "overfence_requests_refused_total{reason=\"stale_generation\"} 3",
        "overfence_requests_refused_total{reason=\"task_taken\"} 3",
    ] {
        assert!(text.lines().any(|l| l == line), "no {line:?} in {text}");
    }
    // Each request that was refused, with who asked and why.
    for (session, generation, code) in
        [(&first, 1, "stale_generation"), (&second, 1, "stale_generation")]
    {
        let refused = |e: &&Value| {
            let asked = &e["detail"]["asked"];
            (&asked["session"], &asked["generation"]) == (&(&**session).into(), &generation.into())
                && e["detail"]["answer"]["Err"]["code"] == code
        };
        assert!(evidence.as_array().unwrap().iter().any(|e| refused(&e)), "{code}: {evidence:#}");
    }
    // What is stored: what each published under its own lease, and nothing of the one that was lost.
    assert_eq!(version(&host), 1);
    write(&b, "f", "of b");
    host.must(&["session", "close", &second, "--checkpoint"]);
    assert_eq!((version(&host), history(&host, "published")), (2, 2));
    assert_eq!(stored(&host, "f").as_deref(), Some("of b"));
    let kept = path_of(&a["session"], "upper").join("f");
    assert_eq!(std::fs::read_to_string(kept).unwrap(), "of a, with what it sent");
    assert_eq!(host.must(&["evidence", "verify"])["ok"], true);
}

/// What the workload asks through its own socket.
fn within(host: &Host, id: &str, args: &[&str]) -> std::process::Output {
    let mut all = vec!["session", "exec", id, "--", "/run/overfence/overfence"];
    all.extend(args);
    host.run(&all)
}

pub(super) fn inside(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let other = host.must(&["session", "open", "-w", "other", "--create", "--ttl", &paced_ttl(60)]);
    begin(&host, &id_of(&other), "of-others", "o1");
    let opened = host.open("w", &paced_ttl(60));
    let id = id_of(&opened);
    let answer = |args: &[&str]| -> Value {
        let out = within(&host, &id, args);
        assert!(out.status.success(), "{args:?}: {out:?}\n{}", host.log());
        serde_json::from_slice(&out.stdout).unwrap()
    };
    let begun = answer(&["request", "begin", "--task", "t", "--key", "k", "--about", "a mail"]);
    assert_eq!(
        (&begun["result"], &begun["request"]["session"]),
        (&"begun".into(), &id.clone().into())
    );
    let seen = answer(&["request", "list"]);
    assert_eq!((seen.as_array().unwrap().len(), &seen[0]["key"]), (1, &"k".into()));
    let out = within(&host, &id, &["request", "begin", "--task", "t", "--key", "k2"]);
    assert_eq!(out.status.code(), Some(4), "{out:?}");
    assert!(String::from_utf8_lossy(&out.stderr).contains("task_taken"), "{out:?}");
    let done = answer(&["request", "ack", "k", "done", "--note", "202"]);
    assert_eq!((&done["outcome"], &done["settled_by"]), (&"done".into(), &id.clone().into()));
    // Another workspace's are not its affair, and neither is what a person decides.
    let out = within(&host, &id, &["request", "ack", "o1", "done"]);
    assert_eq!(out.status.code(), Some(3), "{out:?}");
    for verb in [
        &["request", "resolve", "o1", "done", "-w", "other", "--reason", "x"][..],
        &["request", "assign", "o1", "me", "-w", "other"],
        &["request", "begin", &id, "--task", "t", "--key", "k3"],
        &["publication", "list"],
    ] {
        let out = within(&host, &id, verb);
        assert_eq!(out.status.code(), Some(6), "{verb:?}: {out:?}");
    }
    assert_eq!(requests(&host, false)[0]["state"], "OPEN");
    // More than is kept is refused, not cut.
    let long = "x".repeat(300);
    let out =
        within(&host, &id, &["request", "begin", "--task", "t9", "--key", "k9", "--about", &long]);
    assert_eq!(out.status.code(), Some(2), "{out:?}");
    assert_eq!(requests(&host, true).len(), 2);
}

pub(super) fn doubt(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let opened = host.open("w", &paced_ttl(30));
    let id = id_of(&opened);
    begin(&host, &id, "t", "k");
    let beat = || host.ask(&["lease", "beat", &id, "--token", opened["token"].as_str().unwrap()]);
    // The authority's file is locked by somebody else: it does not answer.
    let lock = rusqlite::Connection::open(host.dir.join("state/overfence.db")).unwrap();
    lock.execute_batch("BEGIN IMMEDIATE").unwrap();
    wait(&host, "doubt", || {
        beat();
        !host.must(&["session", "inspect", &id])["doubt"].is_null()
    });
    for (task, key) in [("t", "k"), ("t2", "k2")] {
        let (code, said) = refused(&host, &["request", "begin", &id, "--task", task, "--key", key]);
        assert!(code == 4 && said.contains("doubt"), "{code}: {said}");
    }
    lock.execute_batch("ROLLBACK").unwrap();
    wait(&host, "doubt is over", || {
        beat();
        host.must(&["session", "inspect", &id])["doubt"].is_null()
    });
    assert_eq!(requests(&host, true).len(), 1);
    let result = begin(&host, &id, "t2", "k2")["result"].clone();
    assert_eq!(result, "begun");
}
