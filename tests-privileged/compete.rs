//! Two takeovers compete: separate processes over the socket of one agent, and below it, at the
//! authority (`handles.rs`), two handles of one store and two processes past its lock. One owner each
//! time, no generation twice, and stored is what the owner published and nothing else.
//! `OVERFENCE_ROUNDS=10000` is the full number.

mod handles;

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::agent_process::{Host, ask_at, id_of, path_of};
use crate::host::{Place, Test, paced, rounds};

/// Says to the program that it is a rival; its value is a socket, or the directory of a store.
const RIVAL: &str = "OVERFENCE_TEST_RIVAL";

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "i1_takeovers_of_two_processes_leave_one_owner", run: processes },
        Test { name: "i2_takeovers_by_two_handles_leave_one_owner", run: handles::of_one_store },
        Test { name: "i2_takeovers_past_the_lock_leave_one_owner", run: handles::past_the_lock },
        Test { name: "one_process_has_a_state_directory", run: handles::locked },
    ]
}

/// Becomes a rival: asks what it is told to, line by line, and tells what was answered.
pub fn rival_if_asked() {
    let Some(at) = std::env::var_os(RIVAL).map(PathBuf::from) else { return };
    if at.is_dir() {
        handles::rival(&at);
    }
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let answer = ask_at(&at, "POST", "/v1/sessions", &line).unwrap();
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
    fn new(at: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(RIVAL, at)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (ask, told) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, ask, told: BufReader::new(told).lines() }
    }

    fn ask(&mut self, wish: &Value) {
        writeln!(self.ask, "{wish}").unwrap();
    }

    fn told(&mut self) -> Value {
        serde_json::from_str(&self.told.next().unwrap().unwrap()).unwrap()
    }

    fn end(mut self) {
        drop(self.ask);
        assert!(self.child.wait().unwrap().success());
    }
}

/// What each owner leaves: the file `owner`, with its generation in it.
struct Content<'a> {
    host: &'a Host,
    /// Of which generation the head has it, if somebody published.
    head: Option<String>,
    acknowledged: Vec<u64>,
    refused: usize,
}

impl Content<'_> {
    fn version(&self) -> u64 {
        self.host.must(&["workspace", "status", "w"])["version"].as_u64().unwrap()
    }

    fn publish(&self, id: &str) -> (u16, Value) {
        let answer = self.host.http("POST", &format!("/v1/sessions/{id}/checkpoint"), "{}");
        (answer.status, serde_json::from_str(&answer.body).unwrap())
    }

    /// The new owner sees what was published last, of whomever; it writes, and now and then publishes.
    fn owned(&mut self, session: &Value, publishes: bool) {
        let file = path_of(session, "merged").join("owner");
        assert_eq!(std::fs::read_to_string(&file).ok(), self.head, "{session:#}");
        let generation = session["generation"].as_u64().unwrap();
        std::fs::write(&file, generation.to_string()).unwrap();
        if !publishes {
            return;
        }
        let (status, told) = self.publish(session["id"].as_str().unwrap());
        assert_eq!((status, &told["outcome"]), (200, &"committed".into()), "{told:#}");
        self.acknowledged.push(generation);
        assert_eq!(told["at"]["version"], self.acknowledged.len(), "{told:#}");
        self.head = Some(generation.to_string());
        // What comes after it stays its own.
        std::fs::write(file, format!("{generation} and not published")).unwrap();
    }

    /// A former owner publishes nothing, and has what it wrote.
    fn lost(&mut self, session: &Value) {
        let generation = session["generation"].to_string();
        let kept = std::fs::read_to_string(path_of(session, "upper").join("owner")).unwrap();
        assert!(kept == generation || kept == format!("{generation} and not published"), "{kept}");
        let (status, told) = self.publish(session["id"].as_str().unwrap());
        assert_eq!((status, &told["code"]), (409, &"stale_generation".into()), "{told:#}");
        self.refused += 1;
        let after = std::fs::read_to_string(path_of(session, "upper").join("owner")).unwrap();
        assert_eq!((after, self.version()), (kept, self.acknowledged.len() as u64));
    }

    /// All of it is on record, and stored is what was acknowledged and nothing else.
    fn judge(&self) {
        let opened = self.host.open("w", "60s");
        let file = path_of(&opened["session"], "merged").join("owner");
        assert_eq!(std::fs::read_to_string(file).ok(), self.head);
        self.host.must(&["session", "close", &id_of(&opened), "--discard", "--yes"]);
        let acknowledged: BTreeSet<_> = self.acknowledged.iter().map(u64::to_string).collect();
        let layers = std::fs::read_dir(self.host.dir.join("state/layers")).unwrap();
        let stored = layers.filter_map(|layer| {
            std::fs::read_to_string(layer.unwrap().path().join("tree/owner")).ok()
        });
        let stored: Vec<_> = stored.collect();
        assert!(!stored.is_empty());
        for one in &stored {
            assert!(acknowledged.contains(one), "nobody published {one}");
        }
        assert_eq!(stored.iter().collect::<BTreeSet<_>>().len(), stored.len(), "{stored:?}");
        let all = self.host.must(&["workspace", "history", "w", "--limit", "1000000"]);
        let all = all.as_array().unwrap();
        let mut published: Vec<_> = all.iter().filter(|row| row["kind"] == "published").collect();
        published.reverse();
        let by: Vec<_> = published.iter().map(|row| row["generation"].as_u64().unwrap()).collect();
        assert_eq!(
            (by, self.version()),
            (self.acknowledged.clone(), self.acknowledged.len() as u64)
        );
        let refused = |row: &&Value| row["detail"]["verb"] == "publish";
        assert_eq!(all.iter().filter(refused).count(), self.refused);
        let name = "publications_refused_total{reason=\"stale_generation\"}";
        assert_eq!(self.host.metric(name), self.refused as u64);
        assert_eq!(self.host.must(&["evidence", "verify"])["ok"], true);
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
    // Odd, so that both who took it and who found it free publish; seldom, so that no head gets deep.
    let every = (rounds / 40).max(5) | 1;
    let (head, acknowledged) = (None, Vec::new());
    let mut content = Content { host: &host, head, acknowledged, refused: 0 };
    let (mut issued, mut owner) = (BTreeSet::new(), None::<Value>);
    let (mut both, mut newest) = (0, 0);
    for round in 0..rounds {
        // By turns over somebody who holds it, and over nobody.
        let force = owner.is_some();
        let wish = json!({ "workspace": "w", "force": force, "ttl_ms": 600_000 });
        for rival in &mut rivals {
            rival.ask(&wish);
        }
        let told = rivals.each_mut().map(Rival::told);
        let granted: Vec<_> = told.iter().filter(|told| told["session"].is_object()).collect();
        assert!(!granted.is_empty(), "round {round}: nobody got it: {told:#?}\n{}", host.log());
        for refused in told.iter().filter(|told| !told["session"].is_object()) {
            let code = refused["code"].as_str().unwrap_or_default();
            // A grant that was taken over while it was still being opened comes to nothing.
            let expected: &[_] =
                if force { &["lease_lost", "stale_generation"] } else { &["lease_held"] };
            assert!(expected.contains(&code), "round {round}: {refused:#}");
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
        if active.len() == 1 {
            assert_eq!(active[0], last["session"]["id"], "round {round}");
            content.owned(&last["session"], round % every == 0);
        }
        owner = match owner {
            None => Some(last["session"].clone()),
            Some(former) => {
                content.lost(&former);
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
    let (published, refused) = (content.acknowledged.len(), content.refused);
    println!(
        "{rounds} rounds, {both} times both got it in turn, {published} published, {refused} refused, {took:?}"
    );
    assert!(published as u64 >= rounds / every, "{published}");
    rivals.into_iter().for_each(Rival::end);
    // Nothing is left of the losers once somebody decided about them.
    let begun = Instant::now();
    if let Some(owner) = owner {
        host.must(&["session", "close", owner["id"].as_str().unwrap(), "--discard", "--yes"]);
    }
    content.judge();
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
