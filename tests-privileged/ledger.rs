//! I7 through the command line: outcomes that are lost, and requests that cannot be taken back. What
//! counts is what is stored in the end: nothing overwritten, nothing twice, and the reason on record.

mod refusals;
mod stale;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::agent_process::{Host, id_of, path_of};
use crate::host::{Place, Test, paced, paced_ttl};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "i7_an_answer_lost_before_the_commit", run: lost_before },
        Test { name: "i7_an_answer_lost_after_the_commit", run: lost_after },
        Test { name: "i7_a_close_whose_answer_is_lost", run: lost_close },
        Test { name: "i7_a_killed_agent_resolves_what_it_had_sent", run: killed_while_sent },
        Test { name: "i7_the_next_writer_is_told_first", run: takeover },
        Test { name: "i7_a_revert_whose_answer_is_lost", run: lost_revert },
        Test { name: "i7_a_request_is_sent_once_by_two_writers", run: sent_once },
        Test { name: "i7_requests_from_inside_a_session", run: inside },
        Test { name: "i9_no_request_is_begun_in_doubt", run: doubt },
        Test { name: "i8_killed_at_every_step_of_the_ledger", run: killed_at_every_step },
        Test { name: "i1_refusals_are_in_history_evidence_and_metrics", run: refusals::run },
        Test { name: "i1_a_stale_writer_is_told_the_truth_by_every_verb", run: stale::verbs },
        Test { name: "what_is_settled_is_not_given_to_anybody", run: stale::assigned },
    ]
}

/// A switch for a failpoint: the answers are lost while it is on.
struct Switch(PathBuf);

impl Switch {
    fn off(host: &Host, name: &str) -> Self {
        Self(host.dir.join(name))
    }
    fn on(self) -> Self {
        std::fs::write(&self.0, "").unwrap();
        self
    }
    fn over(&self) {
        std::fs::remove_file(&self.0).unwrap();
    }
    fn plan(&self, point: &str) -> String {
        format!("lose={point}@{}", self.0.display())
    }
}

fn wait(host: &Host, what: &str, fits: impl Fn() -> bool) {
    let begun = Instant::now();
    while !fits() {
        let limit = paced(Duration::from_secs(30));
        assert!(begun.elapsed() < limit, "in vain: {what}\n{}", host.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn write(opened: &Value, name: &str, text: &str) {
    std::fs::write(path_of(&opened["session"], "merged").join(name), text).unwrap();
}

/// Code and complaint of a verb that does not succeed.
fn refused(host: &Host, args: &[&str]) -> (i32, String) {
    let out = host.run(args);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!out.status.success(), "{args:?} was taken: {said}");
    (out.status.code().unwrap(), said)
}

fn publications(host: &Host, all: bool) -> Vec<Value> {
    let all: &[&str] =
        if all { &["publication", "list", "--all"] } else { &["publication", "list"] };
    host.must(all).as_array().unwrap().clone()
}

fn requests(host: &Host, all: bool) -> Vec<Value> {
    let all: &[&str] = if all { &["request", "list", "--all"] } else { &["request", "list"] };
    host.must(all).as_array().unwrap().clone()
}

/// What a new session of the workspace finds in a file, as the head has it.
fn stored(host: &Host, name: &str) -> Option<String> {
    let opened = host.open("w", &paced_ttl(60));
    let text = std::fs::read_to_string(path_of(&opened["session"], "merged").join(name)).ok();
    host.must(&["session", "close", &id_of(&opened)]);
    text
}

fn history(host: &Host, kind: &str) -> usize {
    let rows = host.must(&["workspace", "history", "w"]);
    rows.as_array().unwrap().iter().filter(|row| row["kind"] == kind).count()
}

fn version(host: &Host) -> u64 {
    host.must(&["workspace", "status", "w"])["version"].as_u64().unwrap()
}

/// What became of each publication that a session offered, in the order in which it was known.
fn outcomes(host: &Host, id: &str) -> Vec<(String, String)> {
    let entries = host.must(&["evidence", "show", "--session", id]);
    let told = entries.as_array().unwrap().iter().filter_map(|e| {
        let event = &e["detail"]["event"];
        (event["event"] == "published").then(|| {
            let word = |name: &str| event[name].as_str().unwrap().to_owned();
            (word("key"), word("outcome"))
        })
    });
    told.collect()
}

fn settled(host: &Host, id: &str) -> Value {
    host.until(id, |view| view["unknown"].as_array().unwrap().is_empty())
}

fn lost_before(place: &Place) {
    let mut host = Host::new(place, "h");
    let (sent, resolved) = (Switch::off(&host, "sent"), Switch::off(&host, "resolved"));
    let plan = format!(
        "{};{}",
        sent.plan("authority.publish.before"),
        resolved.plan("authority.resolve.before")
    );
    assert!(host.start(Some(&plan)));
    let opened = host.open("w", &paced_ttl(60));
    let id = id_of(&opened);
    write(&opened, "f", "lost");
    let (sent, resolved) = (sent.on(), resolved.on());
    let (code, said) = refused(&host, &["session", "checkpoint", &id]);
    assert!(code == 4 && said.contains("unknown_publication"), "{code}: {said}");
    // In a queue of its own, with who sees to it; nothing else says that it failed.
    let queue = publications(&host, false);
    assert_eq!(queue.len(), 1, "{queue:#?}");
    assert_eq!((&queue[0]["state"], &queue[0]["session"]), (&"UNKNOWN".into(), &id.clone().into()));
    assert_eq!(queue[0]["assignee"], host.must(&["workspace", "status", "w"])["owner"]);
    let key = queue[0]["key"].as_str().unwrap().to_owned();
    host.must(&["publication", "assign", &key, "ann"]);
    assert_eq!(host.must(&["publication", "show", &key[..12]])["assignee"], "ann");
    assert_eq!(version(&host), 0);
    // It keeps no other publication from going through.
    sent.over();
    write(&opened, "f", "kept");
    assert_eq!(host.must(&["session", "checkpoint", &id])["at"]["version"], 1);
    assert_eq!(publications(&host, false).len(), 1);
    // Once the authority answers, the key is buried: it can never be committed late.
    resolved.over();
    settled(&host, &id);
    assert_eq!(publications(&host, false), Vec::<Value>::new());
    let row = host.must(&["publication", "resolve", &key]);
    assert_eq!((&row["state"], &row["why"]), (&"REJECTED".into(), &"key_buried".into()));
    host.must(&["session", "close", &id, "--checkpoint"]);
    assert_eq!((version(&host), history(&host, "published")), (1, 1));
    assert_eq!(history(&host, "buried"), 1);
    let told = outcomes(&host, &id);
    let of_it: Vec<_> = told.iter().filter(|(of, _)| *of == key).map(|(_, word)| &**word).collect();
    assert_eq!(of_it, ["unknown", "refused"], "{told:?}");
    assert_eq!(told.iter().filter(|(_, word)| word == "committed").count(), 1, "{told:?}");
    assert_eq!(stored(&host, "f").as_deref(), Some("kept"));
    assert_eq!(host.must(&["evidence", "verify"])["ok"], true);
}

fn lost_after(place: &Place) {
    let mut host = Host::new(place, "h");
    let (sent, resolved) = (Switch::off(&host, "sent"), Switch::off(&host, "resolved"));
    let plan = format!(
        "{};{}",
        sent.plan("authority.publish.after"),
        resolved.plan("authority.resolve.before")
    );
    assert!(host.start(Some(&plan)));
    let opened = host.open("w", &paced_ttl(60));
    let id = id_of(&opened);
    write(&opened, "f", "first");
    let (sent, resolved) = (sent.on(), resolved.on());
    let (code, said) = refused(&host, &["session", "checkpoint", &id]);
    assert!(code == 4 && said.contains("unknown_publication"), "{code}: {said}");
    // It is committed, though nobody was told: unknown is not failed.
    assert_eq!(version(&host), 1);
    let view = host.must(&["session", "inspect", &id]);
    let key = view["unknown"][0].as_str().unwrap().to_owned();
    assert_eq!(view["expected"]["version"], 0);
    // Nor is it done again under another key: the authority sees that this writer is behind.
    sent.over();
    write(&opened, "f", "second");
    let (code, said) = refused(&host, &["session", "checkpoint", &id]);
    assert!(code == 4 && said.contains("version_mismatch"), "{code}: {said}");
    assert_eq!((version(&host), history(&host, "published")), (1, 1));
    resolved.over();
    let view = settled(&host, &id);
    assert_eq!(view["expected"]["version"], 1);
    assert_eq!(host.must(&["publication", "show", &key])["state"], "COMMITTED");
    assert_eq!(host.must(&["session", "checkpoint", &id])["at"]["version"], 2);
    host.must(&["session", "close", &id, "--checkpoint"]);
    assert_eq!((version(&host), history(&host, "published")), (2, 2));
    assert_eq!(history(&host, "buried"), 0);
    let told = outcomes(&host, &id);
    let of_it: Vec<_> = told.iter().filter(|(of, _)| *of == key).map(|(_, word)| &**word).collect();
    assert_eq!(of_it, ["unknown", "committed"], "{told:?}");
    assert_eq!(told.iter().filter(|(_, word)| word == "committed").count(), 2, "{told:?}");
    assert_eq!(stored(&host, "f").as_deref(), Some("second"));
    // What was committed first was not overwritten: it is the version before.
    host.must(&["workspace", "revert", "-w", "w", "--to", "1"]);
    assert_eq!((stored(&host, "f").as_deref(), version(&host)), (Some("first"), 3));
}

/// A close is neither done nor failed while nobody knows. Once it turns out that everything was
/// published, nothing is kept; if not, all of it is.
fn lost_close(place: &Place) {
    for (n, point, happened) in
        [(0, "authority.publish.before", false), (1, "authority.publish.after", true)]
    {
        let mut host = Host::new(place, &format!("h{n}"));
        let (sent, resolved) = (Switch::off(&host, "sent"), Switch::off(&host, "resolved"));
        let plan = format!("{};{}", sent.plan(point), resolved.plan("authority.resolve.before"));
        assert!(host.start(Some(&plan)));
        let opened = host.open("w", &paced_ttl(60));
        let id = id_of(&opened);
        write(&opened, "f", "at the end");
        let (sent, resolved) = (sent.on(), resolved.on());
        let (code, said) = refused(&host, &["session", "close", &id, "--checkpoint"]);
        assert!(code == 4 && said.contains("unknown_publication"), "{code}: {said}");
        let view = host.must(&["session", "inspect", &id]);
        let key = view["unknown"][0].as_str().unwrap();
        assert!(said.contains(&format!("overfence publication show {key}")), "{said}");
        assert!(view["trouble"].as_str().unwrap().contains(key), "{view:#}");
        sent.over();
        resolved.over();
        if happened {
            wait(&host, "it ends clean", || {
                host.must(&["session", "list"]) == Value::Array(vec![])
            });
            assert_eq!(stored(&host, "f").as_deref(), Some("at the end"));
        } else {
            let view = settled(&host, &id);
            assert_eq!(view["state"], "PRESERVED", "{view:#}");
            let kept = std::fs::read_to_string(path_of(&view, "upper").join("f")).unwrap();
            assert_eq!(kept, "at the end");
            assert!(view["trouble"].as_str().unwrap().contains("was not committed"), "{view:#}");
            assert_eq!(stored(&host, "f"), None);
        }
        assert_eq!(version(&host), u64::from(happened));
        assert_eq!(history(&host, "published"), usize::from(happened));
    }
}

/// kill -9 on either side of the commit: the next agent asks before anything else is offered.
fn killed_while_sent(place: &Place) {
    for (point, committed) in
        [("authority.publish.before", 0_u64), ("authority.publish.after", 1_u64)]
    {
        let mut host = Host::new(place, point.rsplit('.').next().unwrap());
        assert!(host.start(Some(&format!("die={point}"))));
        let opened = host.open("w", &paced_ttl(60));
        let id = id_of(&opened);
        write(&opened, "f", "first");
        let (code, _) = refused(&host, &["session", "checkpoint", &id]);
        assert_eq!(code, 6, "{point}");
        host.kill_agent();
        assert!(host.start(None), "{}", host.log());
        let view =
            host.until(&id, |v| v["work"].is_null() && v["unknown"].as_array().unwrap().is_empty());
        assert_eq!(view["expected"]["version"], committed, "{point}");
        assert_eq!(version(&host), committed, "{point}");
        assert_eq!(publications(&host, false), Vec::<Value>::new());
        let states: Vec<_> =
            publications(&host, true).iter().map(|row| row["state"].clone()).collect();
        let wanted = if committed == 1 { "COMMITTED" } else { "REJECTED" };
        assert_eq!(states, [wanted], "{point}");
        host.must(&["session", "close", &id, "--checkpoint"]);
        assert_eq!((version(&host), history(&host, "published")), (1, 1), "{point}");
        assert_eq!(stored(&host, "f").as_deref(), Some("first"), "{point}");
        host.stop();
    }
}

fn begin(host: &Host, id: &str, task: &str, key: &str) -> Value {
    host.must(&["request", "begin", id, "--task", task, "--key", key])
}

fn takeover(place: &Place) {
    let mut host = Host::new(place, "h");
    let (sent, resolved) = (Switch::off(&host, "sent"), Switch::off(&host, "resolved"));
    let plan = format!(
        "{};{}",
        sent.plan("authority.publish.before"),
        resolved.plan("authority.resolve.before")
    );
    assert!(host.start(Some(&plan)));
    let opened = host.open("w", &paced_ttl(60));
    let id = id_of(&opened);
    assert_eq!(opened["unresolved"], Value::Array(vec![]));
    write(&opened, "f", "of a");
    begin(&host, &id, "invoice-7", "k1");
    let (_sent, resolved) = (sent.on(), resolved.on());
    refused(&host, &["session", "checkpoint", &id]);
    let key = publications(&host, false)[0]["key"].as_str().unwrap().to_owned();
    host.must(&["fence", &id, "--reason", "test", "--wait"]);
    // The answer to the opening comes before the new writer can publish anything.
    let next =
        host.must(&["session", "open", "-w", "w", "--owner", "bob", "--ttl", &paced_ttl(60)]);
    let told: BTreeSet<(String, String)> = next["unresolved"]
        .as_array()
        .unwrap()
        .iter()
        .map(|left| {
            let text = |name: &str| left[name].as_str().unwrap().to_owned();
            assert_eq!(left["generation"], 1);
            (text("kind"), text("key"))
        })
        .collect();
    let wanted = [("publication", key.as_str()), ("request", "k1")];
    assert_eq!(told, wanted.map(|(kind, key)| (kind.to_owned(), key.to_owned())).into());
    let rows = host.must(&["workspace", "history", "w"]);
    let record = rows.as_array().unwrap().iter().find(|row| row["kind"] == "acquired").unwrap();
    assert_eq!(record["detail"]["unresolved"], next["unresolved"]);
    assert_eq!(requests(&host, false)[0]["state"], "UNKNOWN");
    // What is open of the former writer does not keep the new one from publishing.
    let _ = std::fs::remove_file(host.dir.join("sent"));
    write(&next, "f", "of b");
    assert_eq!(host.must(&["session", "checkpoint", &id_of(&next)])["at"]["version"], 1);
    resolved.over();
    settled(&host, &id);
    assert_eq!(host.must(&["publication", "show", &key])["why"], "key_buried");
    host.must(&["session", "close", &id_of(&next), "--checkpoint"]);
    assert_eq!((version(&host), history(&host, "published")), (1, 1));
    assert_eq!(stored(&host, "f").as_deref(), Some("of b"));
    // The former writer's bytes are where they were.
    let view = host.must(&["session", "inspect", &id]);
    assert_eq!(std::fs::read_to_string(path_of(&view, "upper").join("f")).unwrap(), "of a");
}

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

fn sent_once(place: &Place) {
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

fn inside(place: &Place) {
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

fn doubt(place: &Place) {
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

/// The points around what the ledger makes durable, each with a verb that passes it.
const POINTS: [(&str, &str); 5] = [
    ("authority.enter", "checkpoint"),
    ("authority.begin", "begin"),
    ("authority.settle", "settle"),
    ("authority.reassign", "reassign"),
    ("authority.prune", "start"),
];

/// Every verb of the ledger, once.
fn all_verbs(host: &Host, sent: Switch, resolved: Switch) {
    let opened = host.open("w", &paced_ttl(60));
    let id = id_of(&opened);
    write(&opened, "f", "lost");
    let (sent, resolved) = (sent.on(), resolved.on());
    refused(host, &["session", "checkpoint", &id]);
    let key = publications(host, false)[0]["key"].as_str().unwrap().to_owned();
    host.must(&["publication", "assign", &key, "ann"]);
    host.must(&["publication", "resolve", &key]);
    resolved.over();
    sent.over();
    begin(host, &id, "t", "k");
    host.must(&["request", "assign", "k", "ann", "-w", "w"]);
    host.must(&["request", "ack", "k", "done", "-w", "w"]);
    host.must(&["session", "close", &id, "--discard", "--yes"]);
}

fn killed_at_every_step(place: &Place) {
    // What is passed is what is killed at below, or in another test.
    let mut host = Host::new(place, "count");
    let (sent, resolved) = (Switch::off(&host, "sent"), Switch::off(&host, "resolved"));
    let log = host.dir.join("points");
    let plan = format!(
        "log={};{};{}",
        log.display(),
        sent.plan("authority.publish.before"),
        resolved.plan("authority.resolve.before")
    );
    assert!(host.start(Some(&plan)));
    all_verbs(&host, sent, resolved);
    let text = std::fs::read_to_string(&log).unwrap();
    let passed: BTreeSet<&str> = text
        .lines()
        .filter_map(|l| l.split(' ').nth(1))
        .filter(|point| point.starts_with("authority."))
        .map(|point| point.rsplit_once('.').unwrap().0)
        .collect();
    let elsewhere =
        ["authority.publish", "authority.resolve", "authority.assign", "authority.doubt"];
    let known = POINTS.iter().map(|(point, _)| *point).chain(elsewhere).collect();
    assert_eq!(passed, known);
    host.stop();
    for (point, verb) in POINTS {
        for when in ["before", "after"] {
            killed_at(place, &format!("{point}.{when}"), verb, when == "after");
        }
    }
}

fn killed_at(place: &Place, point: &str, verb: &str, happened: bool) {
    // A socket's path is short.
    let mut host = Host::new(place, &format!("{verb}{}", u8::from(happened)));
    if verb == "start" {
        let ready = host.start(Some(&format!("die={point}")));
        wait(&host, "it dies in its first sweep", || !ready || host.ask(&["status"]).0 == 6);
        host.kill_agent();
        assert!(host.start(None), "{point}: {}", host.log());
        host.must(&["workspace", "create", "w"]);
        host.stop();
        return;
    }
    // Everything up to the step with an agent that does not die.
    assert!(host.start(None));
    let opened = host.open("w", &paced_ttl(60));
    let id = id_of(&opened);
    write(&opened, "f", "bytes");
    if verb != "begin" && verb != "checkpoint" {
        begin(&host, &id, "t", "k");
    }
    host.kill_agent();
    assert!(host.start(Some(&format!("die={point}"))), "{point}: {}", host.log());
    let step: Vec<&str> = match verb {
        "checkpoint" => vec!["session", "checkpoint", &id],
        "begin" => vec!["request", "begin", &id, "--task", "t", "--key", "k"],
        "settle" => vec!["request", "ack", "k", "done", "-w", "w"],
        _ => vec!["request", "assign", "k", "ann", "-w", "w"],
    };
    let (code, said) = refused(&host, &step);
    assert_eq!(code, 6, "{point}: {said}");
    host.kill_agent();
    assert!(host.start(None), "{point}: {}", host.log());
    if verb == "checkpoint" {
        // It was prepared, or sent and never answered: given up, and the bytes are published later.
        let idle = |v: &Value| v["work"].is_null() && v["unknown"].as_array().unwrap().is_empty();
        host.until(&id, idle);
        assert_eq!(publications(&host, false), Vec::<Value>::new(), "{point}");
        host.must(&["session", "close", &id, "--checkpoint"]);
        assert_eq!((version(&host), history(&host, "published")), (1, 1), "{point}");
        assert_eq!(stored(&host, "f").as_deref(), Some("bytes"), "{point}");
        host.stop();
        return;
    }
    let before = requests(&host, true);
    let row = before.first();
    match verb {
        "begin" => assert_eq!(row.is_some(), happened, "{point}"),
        "settle" => assert_eq!(row.unwrap()["state"] == "SETTLED", happened, "{point}"),
        _ => assert_eq!(row.unwrap()["assignee"] == "ann", happened, "{point}"),
    }
    // The same again does it once.
    let again = host.must(&step);
    if verb == "begin" {
        let wanted = if happened { "repeated" } else { "begun" };
        assert_eq!(again["result"], wanted, "{point}");
    }
    assert_eq!(requests(&host, true).len(), 1, "{point}");
    assert_eq!(host.must(&["evidence", "verify"])["ok"], true, "{point}");
    host.must(&["session", "close", &id, "--discard", "--yes"]);
    host.stop();
}

fn lost_revert(place: &Place) {
    for (n, point, happened) in
        [(0, "authority.publish.before", false), (1, "authority.publish.after", true)]
    {
        let mut host = Host::new(place, &format!("h{n}"));
        let (sent, resolved) =
            (Switch::off(&host, "sent").on(), Switch::off(&host, "resolved").on());
        assert!(host.start(None));
        for text in ["one", "two"] {
            let opened = host.open("w", &paced_ttl(60));
            write(&opened, "f", text);
            host.must(&["session", "close", &id_of(&opened), "--checkpoint"]);
        }
        host.kill_agent();
        let plan = format!("{};{}", sent.plan(point), resolved.plan("authority.resolve.before"));
        assert!(host.start(Some(&plan)));
        let ask = ["workspace", "revert", "-w", "w", "--to", "1", "--reason", "a bad build"];
        let (code, said) = refused(&host, &ask);
        assert_eq!(code, 4, "{said}");
        assert!(said.contains("unknown_publication"), "{said}");
        // It is in the ledger as any other, with somebody to see to it: open, unless the authority's
        // own row says already what became of it.
        let row = publications(&host, true).remove(0);
        let key = row["key"].as_str().unwrap();
        assert!(said.contains(key), "{said}: {row:#}");
        let state = if happened { "COMMITTED" } else { "UNKNOWN" };
        assert_eq!((&row["state"], row["assignee"].is_string()), (&state.into(), true), "{row:#}");
        // The next writer learns of what is open before its first publication.
        let next = host.open("w", &paced_ttl(60));
        let told = next["unresolved"].as_array().map_or(0, Vec::len);
        assert_eq!(told, usize::from(!happened), "{next:#}");
        host.must(&["session", "close", &id_of(&next)]);
        resolved.over();
        wait(&host, "the revert is resolved", || publications(&host, false).is_empty());
        sent.over();
        let row = host.must(&["publication", "show", key]);
        let expected = if happened { ("COMMITTED", 3, "one") } else { ("REJECTED", 2, "two") };
        assert_eq!(row["state"], expected.0, "{row:#}");
        assert_eq!((version(&host), stored(&host, "f").unwrap()), (expected.1, expected.2.into()));
        assert_eq!(history(&host, "published") as u64, expected.1);
        let told = host.must(&["evidence", "show"]);
        let resolved = told.as_array().unwrap().iter().filter(|e| e["kind"] == "resolve");
        assert_eq!(resolved.count(), usize::from(!happened), "{told:#}");
        // What is buried stays so, and another revert goes through.
        host.must(&["workspace", "revert", "-w", "w", "--to", if happened { "2" } else { "1" }]);
        let all = publications(&host, true);
        assert_eq!(all.len(), 4, "{all:?}");
        assert_eq!(all[0]["state"], "COMMITTED");
    }
}
