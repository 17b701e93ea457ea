//! A disk that takes long to sync. To make an overlay read-only syncs the whole file system of the
//! uppers, whatever else lies there: who waits for that must keep nobody who freezes, renews or asks.

use std::time::{Duration, Instant};

use crate::agent_process::{Host, has, id_of};
use crate::host::{Place, Test, paced, paced_ttl};

pub fn tests() -> Vec<Test> {
    vec![Test { name: "hundreds_that_wait_for_it_keep_nobody", run: crowd }]
}

/// More than the runtime has threads for what blocks.
const CROWD: usize = 264;

fn crowd(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(Some("stall=effect.read_only.before")), "{}", host.log());
    let wish = |workspace: &str, ttl_ms: u64| {
        format!(
            r#"{{"workspace":"{workspace}","create":{{"id":"{workspace}"}},"ttl_ms":{ttl_ms}}}"#
        )
    };
    let crowd: Vec<String> = (0..CROWD)
        .map(|i| {
            let answer = host.http("POST", "/v1/sessions", &wish(&format!("w{i}"), 3_600_000));
            let opened: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
            id_of(&opened)
        })
        .collect();
    let good = host.open("good", &paced_ttl(2));
    let (good, token) = (id_of(&good), good["token"].as_str().unwrap().to_owned());
    let beat = || {
        let answer = host.http(
            "POST",
            &format!("/v1/sessions/{good}/beat"),
            &format!(r#"{{"token":"{token}"}}"#),
        );
        assert_eq!(answer.status, 200, "{}: {}", answer.body, host.log());
    };
    let mut last_beat = Instant::now();
    let mut beat_if_due = || {
        if last_beat.elapsed() > Duration::from_millis(300) {
            beat();
            last_beat = Instant::now();
        }
    };
    let asked_first = Instant::now();
    for id in &crowd {
        let answer = host.http("POST", &format!("/v1/sessions/{id}/fence"), "{}");
        assert_eq!(answer.status, 200, "{}", answer.body);
        beat_if_due();
    }
    // Three TTLs of the good one, while the first few of the crowd have their turn.
    let begun = Instant::now();
    let mut slowest = Duration::ZERO;
    while begun.elapsed() < paced(Duration::from_secs(6)) {
        beat_if_due();
        let asked = Instant::now();
        assert_eq!(host.http("GET", "/v1/status", "").status, 200);
        slowest = slowest.max(asked.elapsed());
        std::thread::sleep(Duration::from_millis(50));
    }
    eprintln!("slowest status {slowest:?}");
    assert!(slowest < paced(Duration::from_secs(1)), "an answer took {slowest:?}");
    let view = host.must(&["session", "inspect", &good]);
    assert_eq!((&view["state"], &view["doubt"]), (&"ACTIVE".into(), &serde_json::Value::Null));
    let all = host.must(&["session", "list"]);
    let all = all.as_array().unwrap();
    let frozen = all.iter().filter(|view| has(view, "frozen")).count();
    let read_only = all.iter().filter(|view| has(view, "read-only")).count();
    assert_eq!(frozen, CROWD, "not all are proved frozen");
    // One at a time: each takes as long as its stall.
    let turns = asked_first.elapsed().as_secs() / overfence::failpoint::STALL.as_secs();
    eprintln!("{read_only} had their turn in {:?}", asked_first.elapsed());
    assert!(read_only >= 1, "none had its turn: nothing was shown");
    assert!(read_only as u64 <= turns + 1, "{read_only} had their turn where {turns} can");
    host.stop();
}
