//! I7 through the command line: outcomes that are lost, and requests that cannot be taken back. What
//! counts is what is stored in the end: nothing overwritten, nothing twice, and the reason on record.

mod lost;
mod refusals;
mod requests;
mod stale;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::agent_process::{Host, id_of, path_of};
use crate::host::{Place, Test, paced, paced_ttl};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "i7_an_answer_lost_before_the_commit", run: lost::before },
        Test { name: "i7_an_answer_lost_after_the_commit", run: lost::after },
        Test { name: "i7_a_close_whose_answer_is_lost", run: lost::close },
        Test { name: "i7_a_killed_agent_resolves_what_it_had_sent", run: lost::killed },
        Test { name: "i7_the_next_writer_is_told_first", run: takeover },
        Test { name: "i7_a_revert_whose_answer_is_lost", run: lost::revert },
        Test { name: "i7_a_request_is_sent_once_by_two_writers", run: requests::sent_once },
        Test { name: "i7_requests_from_inside_a_session", run: requests::inside },
        Test { name: "i9_no_request_is_begun_in_doubt", run: requests::doubt },
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

/// Failpoints with which [`with_lost_answer`] works.
pub fn losing(host: &Host) -> String {
    let switch = Switch::off(host, "answers-are-lost");
    let (sent, resolved) = ("authority.publish.before", "authority.resolve.before");
    format!("{};{}", switch.plan(sent), switch.plan(resolved))
}

/// Has a session publish under a key whose outcome is open until `then` is done with it.
pub fn with_lost_answer(host: &Host, opened: &Value, then: impl FnOnce(&str)) {
    let switch = Switch::off(host, "answers-are-lost").on();
    write(opened, "lost", "lost");
    let (code, said) = refused(host, &["session", "checkpoint", &id_of(opened)]);
    assert!(code == 4 && said.contains("unknown_publication"), "{code}: {said}");
    then(publications(host, false)[0]["key"].as_str().unwrap());
    switch.over();
    wait(host, "it is resolved", || publications(host, false).is_empty());
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
