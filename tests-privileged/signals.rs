//! What a fence shows to who watches from outside: each metric and the health line, before and after.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::agent_process::{Host, has, id_of, path_of};
use crate::host::{Place, Test, paced, paced_ttl};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "every_metric_and_the_health_line_follow_a_fence", run: followed },
        Test { name: "a_holder_that_keeps_a_fence_up_is_counted", run: busy },
        Test { name: "a_silent_authority_is_counted", run: doubted },
    ]
}

/// A host that sweeps once a second.
fn watched(place: &Place, more: &str) -> Host {
    let mut host = Host::new(place, "h");
    let config = std::fs::read_to_string(&host.config).unwrap();
    std::fs::write(&host.config, format!("{config}[preserve]\nsweep = \"1s\"\n{more}")).unwrap();
    assert!(host.start(None));
    host
}

/// The samples by name and labels, without the prefix `overfence_`.
struct Samples(BTreeMap<String, f64>);

impl Samples {
    fn of(host: &Host) -> Self {
        let answer = host.http("GET", "/metrics", "");
        assert_eq!(answer.status, 200);
        let lines = answer.body.lines().filter(|line| !line.starts_with('#'));
        Self(
            lines
                .map(|line| {
                    let (name, value) = line.rsplit_once(' ').unwrap();
                    let name = name.strip_prefix("overfence_").expect("the prefix");
                    (name.to_owned(), value.parse().unwrap())
                })
                .collect(),
        )
    }

    /// One that is there from the start.
    fn get(&self, name: &str) -> f64 {
        *self.0.get(name).unwrap_or_else(|| panic!("no {name} in {:#?}", self.0))
    }

    /// How many sessions are in a state; a state without any has no sample.
    fn sessions(&self, state: &str) -> f64 {
        self.0.get(&format!("sessions{{state=\"{state}\"}}")).copied().unwrap_or(0.0)
    }

    /// The counters that went up since `before`, and by how much.
    fn rose(&self, before: &Self) -> BTreeMap<&str, f64> {
        let counters = self.0.iter().filter(|(name, _)| {
            name.split('{').next().is_some_and(|n| n.ends_with("_total") || n.ends_with("_count"))
        });
        counters
            .map(|(name, now)| (&**name, now - before.0.get(name).unwrap_or(&0.0)))
            .filter(|(_, by)| *by != 0.0)
            .collect()
    }
}

/// Waits for a health line, which the next sweep writes.
fn line(host: &Host, wanted: &str) {
    let begun = Instant::now();
    loop {
        let answer = host.http("GET", "/healthz", "");
        if answer.status == 200 && answer.body == format!("{wanted}\n") {
            return;
        }
        let late = begun.elapsed() > paced(Duration::from_secs(20));
        assert!(!late, "{wanted:?} does not come, it is {answer:?}: {}", host.log());
        std::thread::sleep(Duration::from_millis(10));
    }
}

const PROVED_FROZEN: &str = "fences_total{fact=\"frozen\",result=\"proved\"}";
/// Where the kernel has the lease gate.
const PROVED_GATED: &str = "fences_total{fact=\"gated\",result=\"proved\"}";
const PROVED_READ_ONLY: &str = "fences_total{fact=\"read-only\",result=\"proved\"}";
const BUSY_READ_ONLY: &str = "fences_total{fact=\"read-only\",result=\"busy\"}";
const PROVED_KILLED: &str = "fences_total{fact=\"killed\",result=\"proved\"}";
const PROVED_GONE: &str = "fences_total{fact=\"gone\",result=\"proved\"}";
const REFUSED: &str = "publications_refused_total{reason=\"stale_generation\"}";
const MISSING: &str = "fences_missing{fact=\"read-only\"}";
const MISSED: &str = "lease_renewal_failures_total";

/// The counters without those of effects, which count what the agent does besides, and without the one
/// that counts for all agents of the host, those of other tests among them.
fn of_fences<'s>(samples: &'s Samples, before: &Samples) -> BTreeMap<&'s str, f64> {
    let mut rose = samples.rose(before);
    let others = |name: &str| name == "write_refusals_lost_total";
    rose.retain(|name, _| !name.starts_with("effects_total") && !others(name));
    rose
}

fn followed(place: &Place) {
    let host = watched(place, "");
    line(&host, "reconciled 0 session(s): renewed=0 fenced=0 preserved=0 deleted=0 held=0");
    let start = Samples::of(&host);
    for name in [
        MISSED,
        PROVED_FROZEN,
        PROVED_READ_ONLY,
        BUSY_READ_ONLY,
        PROVED_KILLED,
        PROVED_GONE,
        REFUSED,
        "fences_total{fact=\"frozen\",result=\"late\"}",
        "publications_refused_total{reason=\"lease_expired\"}",
        "fence_seconds_count",
        "foreign_thaws_total",
        "removed_bytes_total",
        "active_writer_leases",
        "preserved_bytes",
    ] {
        assert_eq!(start.get(name), 0.0, "{name}");
    }
    assert_eq!(start.get("reserve_bytes"), f64::from(16 << 20));
    assert_eq!(start.get("reserve_wanted_bytes"), f64::from(16 << 20));
    assert!(start.get("state_free_bytes") > 0.0);

    let opened = host.open("w", &paced_ttl(4));
    let stale = id_of(&opened);
    let bytes = vec![7; 100_000];
    std::fs::write(path_of(&opened["session"], "merged").join("f"), &bytes).unwrap();
    line(&host, "reconciled 1 session(s): renewed=1 fenced=0 preserved=0 deleted=0 held=0");
    let writing = Samples::of(&host);
    assert_eq!(writing.get("active_writer_leases"), 1.0);
    assert_eq!((writing.sessions("active"), writing.sessions("preserved")), (1.0, 0.0));
    assert_eq!(writing.get("preserved_bytes"), 0.0);
    assert_eq!(of_fences(&writing, &start), BTreeMap::new());

    host.until(&stale, |view| view["state"] == "PRESERVED");
    line(&host, "reconciled 1 session(s): renewed=0 fenced=0 preserved=1 deleted=0 held=0");
    let fenced = Samples::of(&host);
    let mut rose =
        vec![("fence_seconds_count", 1.0), (PROVED_FROZEN, 1.0), (PROVED_READ_ONLY, 1.0)];
    if opened["session"]["gate"]["state"] == "complete" {
        rose.push((PROVED_GATED, 1.0));
    }
    assert_eq!(of_fences(&fenced, &writing), rose.into_iter().collect());
    let took = fenced.get("fence_seconds_sum");
    assert!(took > 0.0 && took < paced(Duration::from_secs(1)).as_secs_f64(), "{took}");
    assert_eq!(fenced.get("active_writer_leases"), 0.0);
    assert_eq!((fenced.sessions("active"), fenced.sessions("preserved")), (0.0, 1.0));
    assert!(fenced.get("preserved_bytes") >= 100_000.0, "{}", fenced.get("preserved_bytes"));
    let status = host.must(&["status"]);
    assert_eq!(status["preserved_bytes"].as_f64(), Some(fenced.get("preserved_bytes")));
    let said = "reconciled 1 session(s): renewed=0 fenced=0 preserved=1 deleted=0 held=0";
    assert_eq!(status["reconcile"], said);
    let reconciled = "reconcile_last_success_timestamp_seconds";
    assert!(start.get(reconciled) < writing.get(reconciled));
    assert!(writing.get(reconciled) < fenced.get(reconciled));
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let age = now.as_secs_f64() - fenced.get(reconciled);
    assert!(age < paced(Duration::from_secs(5)).as_secs_f64(), "{age}");

    // Somebody else writes, and the stale one tries to publish.
    let next = id_of(&host.open("w", "60s"));
    assert_eq!(host.ask(&["session", "checkpoint", &stale]).0, 4);
    line(&host, "reconciled 2 session(s): renewed=1 fenced=0 preserved=1 deleted=0 held=0");
    let refused = Samples::of(&host);
    assert_eq!(of_fences(&refused, &fenced), [(REFUSED, 1.0)].into());
    assert_eq!(refused.get("active_writer_leases"), 1.0);

    host.must(&["preserved", "discard", &stale, "--yes"]);
    line(&host, "reconciled 2 session(s): renewed=1 fenced=0 preserved=0 deleted=1 held=0");
    line(&host, "reconciled 1 session(s): renewed=1 fenced=0 preserved=0 deleted=0 held=0");
    let removed = Samples::of(&host);
    let rose = of_fences(&removed, &refused);
    // Removal wants the cgroup proved empty first, though nobody ran in it.
    assert_eq!(
        rose.keys().copied().collect::<Vec<_>>(),
        [PROVED_GONE, PROVED_KILLED, "removed_bytes_total"]
    );
    assert!(rose["removed_bytes_total"] >= 100_000.0, "{rose:#?}");
    assert_eq!(removed.get("preserved_bytes"), 0.0);
    let failed = removed.0.iter().filter(|(name, _)| name.contains("result=\"failed\""));
    assert_eq!(failed.map(|(_, n)| n).sum::<f64>(), 0.0, "{:#?}", removed.0);
    host.must(&["session", "close", &next]);
}

fn busy(place: &Place) {
    let host = watched(place, "");
    let opened = host.open("w", "60s");
    let id = id_of(&opened);
    line(&host, "reconciled 1 session(s): renewed=1 fenced=0 preserved=0 deleted=0 held=0");
    let before = Samples::of(&host);
    assert_eq!(before.get(MISSING), 0.0);
    let held = std::fs::File::create(path_of(&opened["session"], "merged").join("held")).unwrap();
    // Its policy has something left to do: it kills, after an hour.
    host.must(&["fence", &id, "--on-busy", "kill", "--reason", "test"]);
    host.until(&id, |view| !view["holders"].as_array().unwrap().is_empty());
    line(&host, "reconciled 1 session(s): renewed=0 fenced=1 preserved=0 deleted=0 held=0");
    // That line may be from a pass that found it on the way there.
    let begun = Instant::now();
    let stuck = loop {
        let seen = Samples::of(&host);
        if seen.sessions("fencing") == 0.0 {
            break seen;
        }
        assert!(begun.elapsed() < paced(Duration::from_secs(20)), "no later pass: {}", host.log());
        std::thread::sleep(Duration::from_millis(10));
    };
    let rose = of_fences(&stuck, &before);
    assert_eq!(rose[PROVED_FROZEN], 1.0, "{rose:#?}");
    assert!(rose[BUSY_READ_ONLY] >= 1.0 && !rose.contains_key(PROVED_READ_ONLY), "{rose:#?}");
    assert_eq!((stuck.sessions("fenced"), stuck.get("active_writer_leases")), (1.0, 0.0));
    assert_eq!(stuck.get(MISSING), 1.0);
    drop(held);
    host.until(&id, |view| has(view, "read-only"));
    line(&host, "reconciled 1 session(s): renewed=0 fenced=0 preserved=1 deleted=0 held=0");
    let done = Samples::of(&host);
    assert_eq!(of_fences(&done, &stuck)[PROVED_READ_ONLY], 1.0);
    assert_eq!(done.get(MISSING), 0.0);
    host.must(&["fence", &id, "--to", "killed", "--reason", "test", "--wait"]);
    assert_eq!(of_fences(&Samples::of(&host), &done)[PROVED_KILLED], 1.0);
    host.must(&["preserved", "discard", &id, "--yes"]);
}

/// The authority's file is locked by somebody else: it does not answer, and the deadline fences.
fn doubted(place: &Place) {
    let host = watched(place, "[fence]\nafter_doubt = \"hold\"\n");
    let opened = host.open("w", &paced_ttl(3));
    let id = id_of(&opened);
    let beat = || host.ask(&["lease", "beat", &id, "--token", opened["token"].as_str().unwrap()]);
    let before = Samples::of(&host);
    let lock = rusqlite::Connection::open(host.dir.join("state/overfence.db")).unwrap();
    lock.execute_batch("BEGIN IMMEDIATE").unwrap();
    let begun = Instant::now();
    while Samples::of(&host).get("fence_seconds_count") == 0.0 {
        beat();
        assert!(begun.elapsed() < paced(Duration::from_secs(10)), "no fence: {}", host.log());
        std::thread::sleep(Duration::from_millis(100));
    }
    let fenced = Samples::of(&host);
    let rose = of_fences(&fenced, &before);
    assert!(rose[MISSED] >= 1.0, "{rose:#?}");
    assert_eq!(rose[PROVED_FROZEN], 1.0, "{rose:#?}");
    lock.execute_batch("ROLLBACK").unwrap();
    let view: Value = host.until(&id, |view| view["state"] == "PRESERVED");
    assert_eq!(view["generation"], 1, "{view:#}");
    assert_eq!(of_fences(&Samples::of(&host), &fenced).get(MISSED), None);
    host.must(&["preserved", "discard", &id, "--yes"]);
}
