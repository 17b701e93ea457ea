//! I8: any crash is survived. The agent is killed while sessions run, stand frozen and are empty,
//! and between any two of its effects; what it acknowledged holds, and nothing unexplained is left.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::agent_process::{Host, has, id_of, path_of};
use crate::host::{Place, Test, paced, paced_ttl};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "i8_kill_9_disturbs_no_good_lease", run: undisturbed },
        Test { name: "i9_the_keeper_freezes_when_the_agent_is_dead", run: keeper_alone },
        Test { name: "i9_a_stopped_agent_is_doubt_and_resumes_unclaimed", run: stopped_agent },
        Test { name: "i8_every_effect_has_a_failpoint", run: |p| counted(p, DIRECTORY) },
        Test { name: "i8_every_effect_on_an_image_has_a_failpoint", run: |p| counted(p, IMAGE) },
        Test { name: "i8_killed_at_every_effect_1", run: |p| killed_at_every(p, 0, DIRECTORY) },
        Test { name: "i8_killed_at_every_effect_2", run: |p| killed_at_every(p, 1, DIRECTORY) },
        Test { name: "i8_killed_at_every_effect_3", run: |p| killed_at_every(p, 2, DIRECTORY) },
        Test { name: "i8_killed_at_every_effect_4", run: |p| killed_at_every(p, 3, DIRECTORY) },
        Test {
            name: "i8_killed_at_every_effect_on_an_image_1",
            run: |p| killed_at_every(p, 0, IMAGE),
        },
        Test {
            name: "i8_killed_at_every_effect_on_an_image_2",
            run: |p| killed_at_every(p, 1, IMAGE),
        },
        Test {
            name: "i8_killed_at_every_effect_on_an_image_3",
            run: |p| killed_at_every(p, 2, IMAGE),
        },
        Test {
            name: "i8_killed_at_every_effect_on_an_image_4",
            run: |p| killed_at_every(p, 3, IMAGE),
        },
        Test { name: "i2_an_older_authority_is_not_believed", run: rolled_back },
    ]
}

const SHARES: usize = 4;

/// Flags of an open.
type Upper = &'static [&'static str];
const DIRECTORY: Upper = &[];
const IMAGE: Upper = &["--upper", "image", "--size", "64M"];
/// Points at which an image makes a difference.
const WITH_IMAGE: [&str; 9] = [
    "kernel.image",
    "freeze_upper",
    "thaw_upper",
    "prove_gone",
    "umount",
    "remove",
    "session.create",
    "kernel.mount",
    "effect.read_only",
];

fn writer(view: &Value, script: &str) -> Child {
    let procs = path_of(view, "cgroup").join("cgroup.procs");
    Command::new("/bin/sh")
        .arg("-c")
        .arg("echo $$ > \"$1\" && cd \"$2\" && eval \"$3\"")
        .args([
            "sh".as_ref(),
            procs.as_os_str(),
            path_of(view, "merged").as_os_str(),
            script.as_ref(),
        ])
        .stdin(Stdio::null())
        .spawn()
        .unwrap()
}

fn grows(path: &Path) -> bool {
    let size = || std::fs::metadata(path).map(|m| m.len()).unwrap_or(0);
    let (before, begun) = (size(), Instant::now());
    while begun.elapsed() < paced(Duration::from_secs(2)) {
        if size() > before {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

const WRITES: &str = "while :; do echo x >> log; sleep 0.01; done";

fn undisturbed(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let running = host.open("running", "60s");
    let mut child = writer(&running["session"], WRITES);
    let log = path_of(&running["session"], "upper").join("log");
    assert!(grows(&log));
    let fenced = host.open("fenced", "60s");
    let mut held = writer(&fenced["session"], WRITES);
    host.ask(&["fence", &id_of(&fenced), "--reason", "test", "--wait"]);
    let empty = host.open("empty", "60s");
    for _ in 0..3 {
        host.kill_agent();
        assert!(grows(&log), "the writer was disturbed by the agent's death");
        assert!(host.start(None));
        let view = host.must(&["session", "inspect", &id_of(&running)]);
        assert_eq!(
            (view["state"].as_str(), view["generation"].as_u64()),
            (Some("ACTIVE"), Some(1))
        );
        assert!(grows(&log), "the writer was disturbed by the agent's start");
        let view = host.until(&id_of(&fenced), |v| v["state"] == "PRESERVED" && has(v, "frozen"));
        let events =
            std::fs::read_to_string(path_of(&view, "cgroup").join("cgroup.events")).unwrap();
        assert!(events.contains("frozen 1"), "{events}");
        assert_eq!(host.must(&["session", "inspect", &id_of(&empty)])["state"], "ACTIVE");
    }
    assert_eq!(host.must(&["evidence", "verify"])["ok"], true);
    // The adopted session goes on to its end: publish and close.
    host.must(&["session", "close", &id_of(&running), "--checkpoint"]);
    child.wait().unwrap();
    assert_eq!(host.must(&["workspace", "status", "running"])["version"], 1);
    host.must(&["preserved", "discard", &id_of(&fenced), "--yes"]);
    held.wait().unwrap();
    host.must(&["session", "close", &id_of(&empty)]);
    assert_eq!(leftovers(&host), Vec::<String>::new());
}

fn keeper_alone(place: &Place) {
    let mut host = Host::new(place, "h");
    host.start_keeper();
    assert!(host.start(None));
    let opened = host.open("w", &paced_ttl(2));
    let mut child = writer(&opened["session"], WRITES);
    let log = path_of(&opened["session"], "upper").join("log");
    assert!(grows(&log));
    host.kill_agent();
    let events = path_of(&opened["session"], "cgroup").join("cgroup.events");
    let begun = Instant::now();
    while !std::fs::read_to_string(&events).unwrap().contains("frozen 1") {
        assert!(begun.elapsed() < paced(Duration::from_secs(5)), "the keeper did not freeze");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!grows(&log), "bytes land although the cgroup is frozen");
    assert!(host.start(None));
    let view = host.until(&id_of(&opened), |v| has(v, "frozen") || v["state"] == "ACTIVE");
    // The agent was away past the deadline: doubt, and nobody claimed the workspace, so it comes
    // back under a new generation.
    let view = if view["state"] == "ACTIVE" {
        view
    } else {
        host.until(&id_of(&opened), |v| v["state"] == "ACTIVE")
    };
    assert_eq!(view["generation"], 2, "{view:#}");
    assert!(grows(&log));
    host.must(&["session", "close", &id_of(&opened), "--discard", "--yes"]);
    child.wait().unwrap();
}

fn stopped_agent(place: &Place) {
    let mut host = Host::new(place, "h");
    host.start_keeper();
    assert!(host.start(None));
    let opened = host.open("w", &paced_ttl(2));
    let mut child = writer(&opened["session"], WRITES);
    let agent = nix::unistd::Pid::from_raw(i32::try_from(host.agent_pid()).unwrap());
    nix::sys::signal::kill(agent, nix::sys::signal::Signal::SIGSTOP).unwrap();
    let events = path_of(&opened["session"], "cgroup").join("cgroup.events");
    let begun = Instant::now();
    while !std::fs::read_to_string(&events).unwrap().contains("frozen 1") {
        assert!(begun.elapsed() < paced(Duration::from_secs(5)), "the keeper did not freeze");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_secs(1));
    nix::sys::signal::kill(agent, nix::sys::signal::Signal::SIGCONT).unwrap();
    let view = host.until(&id_of(&opened), |v| v["generation"] == 2 && v["state"] == "ACTIVE");
    let log = path_of(&view, "upper").join("log");
    assert!(grows(&log), "it does not write again");
    let entries = host.must(&["evidence", "show", "--session", &id_of(&opened)]);
    let by = entries
        .as_array()
        .unwrap()
        .iter()
        .find(|e| e["detail"]["event"]["event"] == "readmitted")
        .unwrap();
    assert!(
        by["detail"]["event"]["authorised_by"].as_str().unwrap().starts_with("policy:sha256:"),
        "{by:#}"
    );
    host.must(&["session", "close", &id_of(&opened), "--discard", "--yes"]);
    child.wait().unwrap();
}

/// What happened before the agent died, as far as it was acknowledged.
#[derive(Default, Debug)]
struct Acknowledged {
    generation: u64,
    published: Option<u64>,
    session: Option<String>,
    discarded: bool,
    second: bool,
}

/// Open, write, checkpoint, fence, export, discard, and open and close another one; stops at the
/// first verb that is not answered.
fn scenario(host: &Host, upper: Upper) -> Acknowledged {
    let mut done = Acknowledged::default();
    let told = |out: (i32, Value)| (out.0 == 0 || out.0 == 8).then_some(out.1);
    let ttl = paced_ttl(60);
    let open = [&["session", "open", "-w", "w", "--create", "--ttl", &ttl], upper].concat();
    let Some(opened) = told(host.ask(&open)) else {
        return done;
    };
    let id = id_of(&opened);
    done.generation = opened["session"]["generation"].as_u64().unwrap();
    done.session = Some(id.clone());
    std::fs::write(path_of(&opened["session"], "merged").join("one"), "committed").unwrap();
    let Some(answer) = told(host.ask(&["session", "checkpoint", &id])) else { return done };
    done.published = answer["at"]["version"].as_u64();
    std::fs::write(path_of(&opened["session"], "merged").join("two"), "precious").unwrap();
    // Whoever holds it open for writing keeps it from becoming read-only: an image is stopped then.
    let held = (upper == IMAGE).then(|| {
        let file = path_of(&opened["session"], "merged").join("two");
        std::fs::File::options().append(true).open(file).unwrap()
    });
    if told(host.ask(&["fence", &id, "--reason", "test", "--wait"])).is_none() {
        return done;
    }
    if told(host.ask(&["preserved", "export", &id])).is_none() {
        return done;
    }
    drop(held);
    if told(host.ask(&["preserved", "discard", &id, "--yes"])).is_none() {
        return done;
    }
    done.discarded = true;
    let Some(second) = told(host.ask(&open)) else {
        return done;
    };
    done.generation = second["session"]["generation"].as_u64().unwrap();
    done.session = Some(id_of(&second));
    done.second = told(host.ask(&["session", "close", &id_of(&second)])).is_some();
    done
}

fn counted(place: &Place, upper: Upper) {
    let mut host = Host::new(place, "h");
    let log = host.dir.join("points");
    assert!(host.start(Some(&format!("log={}", log.display()))));
    let done = scenario(&host, upper);
    assert!(done.second, "{done:?}\n{}", host.log());
    let text = std::fs::read_to_string(&log).unwrap();
    let points: BTreeSet<&str> = text.lines().filter_map(|l| l.split(' ').nth(1)).collect();
    eprintln!("{} failpoints hit, {} of them different", text.lines().count(), points.len());
    // Effects that this scenario does not lead to have tests of their own.
    let mut elsewhere = vec!["read_write", "resolve", "seal", "unseal", "run_on", "pack"];
    if upper != IMAGE {
        elsewhere.extend(["freeze_upper", "thaw_upper"]);
    }
    for effect in overfence::model::step::Effect::NAMES {
        for when in ["before", "after"] {
            let point = format!("effect.{effect}.{when}");
            assert!(
                points.contains(&*point) || elsewhere.contains(effect),
                "{point} was never passed"
            );
        }
    }
    assert_eq!(leftovers(&host), Vec::<String>::new());
}

fn killed_at_every(place: &Place, share: usize, upper: Upper) {
    let mut counting = Host::new(place, "count");
    let log = counting.dir.join("points");
    assert!(counting.start(Some(&format!("log={}", log.display()))));
    assert!(scenario(&counting, upper).second);
    counting.stop();
    let text = std::fs::read_to_string(&log).unwrap();
    // Representatives of each point: the first and the last time it is passed. An emulated host,
    // where each takes seconds, has the first alone.
    let both = paced(Duration::from_secs(1)) == Duration::from_secs(1);
    let mut chosen = BTreeSet::new();
    // What an image adds; the rest is gone through with a directory.
    let wanted = |name: &str| upper != IMAGE || WITH_IMAGE.iter().any(|part| name.contains(part));
    let names = text.lines().filter_map(|l| l.split(' ').nth(1));
    for name in names.filter(|name| wanted(name)).collect::<BTreeSet<_>>() {
        let hits: Vec<u64> = text
            .lines()
            .filter(|l| l.split(' ').nth(1) == Some(name))
            .map(|l| l.split(' ').next().unwrap().parse().unwrap())
            .collect();
        chosen.insert(hits[0]);
        if both {
            chosen.insert(hits[hits.len() - 1]);
        }
    }
    let mine: Vec<u64> = chosen
        .into_iter()
        .enumerate()
        .filter(|(n, _)| n % SHARES == share)
        .map(|(_, hit)| hit)
        .collect();
    for hit in &mine {
        killed_at(place, *hit, upper);
    }
    eprintln!("killed and recovered at {} points", mine.len());
}

fn killed_at(place: &Place, hit: u64, upper: Upper) {
    let mut host = Host::new(place, &format!("k{hit}"));
    let ready = host.start(Some(&format!("die={hit}")));
    let done = if ready { scenario(&host, upper) } else { Acknowledged::default() };
    host.kill_agent();
    assert!(host.start(None), "hit {hit}: the agent does not start again: {}", host.log());
    settle(&host, &format!("hit {hit}"));
    let context = || format!("hit {hit}, {done:?}\n{}", host.log());
    // I2 and I1: what was acknowledged holds.
    let (code, w) = host.ask(&["workspace", "status", "w"]);
    if done.generation > 0 {
        assert_eq!(code, 0, "{}", context());
        assert!(w["generation"].as_u64().unwrap() >= done.generation, "{}", context());
    }
    if let Some(version) = done.published {
        assert!(w["version"].as_u64().unwrap() >= version, "{}", context());
    }
    let sessions = host.must(&["session", "list"]);
    let find = |id: &str| sessions.as_array().unwrap().iter().find(|s| s["id"] == id).cloned();
    if let (Some(id), false) = (&done.session, done.discarded) {
        match find(id) {
            // I4: the bytes are there, or the discard that was under way took them.
            Some(s) => {
                let upper = path_of(&s, "upper");
                let gone = s["state"] == "DELETING" || s["disposition"]["by"] == "discard";
                // Without an overlay an image is not mounted.
                let kept = match has(&s, "gone") {
                    true => upper.with_file_name("").with_file_name("image"),
                    false => upper.join("one"),
                };
                assert!(kept.exists() || gone, "{kept:?} {}", context());
            }
            None => {
                let entries = host.must(&["evidence", "show", "--session", id]);
                let disposed = entries
                    .as_array()
                    .unwrap()
                    .iter()
                    .any(|e| e["detail"]["event"]["event"] == "disposed");
                assert!(disposed, "bytes are gone without a decision: {}", context());
            }
        }
    }
    if done.discarded && !done.second {
        let first = sessions.as_array().unwrap().iter().filter(|s| s["generation"] == 1).count();
        assert_eq!(first, 0, "{}", context());
    }
    assert_eq!(host.must(&["evidence", "verify"])["ok"], true, "{}", context());
    assert_eq!(leftovers(&host), Vec::<String>::new(), "{}", context());
    // The host goes on: everything can be ended and a new writer starts.
    for s in sessions.as_array().unwrap() {
        end(&host, s["id"].as_str().unwrap());
    }
    let next = host.open("w", &paced_ttl(60));
    assert!(next["session"]["generation"].as_u64().unwrap() > done.generation, "{}", context());
    host.must(&["session", "close", &id_of(&next)]);
    assert_eq!(leftovers(&host), Vec::<String>::new(), "{}", context());
    host.stop();
}

/// Waits until nothing is under way.
pub fn settle(host: &Host, what: &str) {
    let begun = Instant::now();
    loop {
        let sessions = host.must(&["session", "list"]);
        let moving = sessions.as_array().unwrap().iter().any(|s| {
            let state = s["state"].as_str().unwrap();
            ["OPENING", "FENCING", "DELETING", "RELEASING", "CLOSED"].contains(&state)
                || !s["work"].is_null()
                || !s["unknown"].as_array().unwrap().is_empty()
        });
        if !moving {
            return;
        }
        assert!(
            begun.elapsed() < paced(Duration::from_secs(20)),
            "{what} does not settle: {sessions:#}\n{}",
            host.log()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn end(host: &Host, id: &str) {
    let view = host.must(&["session", "inspect", id]);
    if view["state"] == "ACTIVE" {
        host.must(&["session", "close", id, "--discard", "--yes"]);
    } else {
        host.must(&["preserved", "discard", id, "--yes"]);
    }
}

/// Mounts, cgroups, directories and run-time directories that no session explains.
pub fn leftovers(host: &Host) -> Vec<String> {
    let begun = Instant::now();
    loop {
        let known: BTreeSet<String> = host
            .must(&["session", "list"])
            .as_array()
            .unwrap()
            .iter()
            .map(|s| s["id"].as_str().unwrap().to_owned())
            .collect();
        let mut left = Vec::new();
        let explained = |name: &str| known.contains(name);
        for dir in
            [host.dir.join("state/sessions"), host.dir.join("run/sessions"), host.cgroup.clone()]
        {
            for entry in std::fs::read_dir(&dir).unwrap().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                if entry.file_type().unwrap().is_dir() && !explained(&name) {
                    left.push(entry.path().display().to_string());
                }
            }
        }
        left.extend(
            std::fs::read_dir(host.dir.join("state/trash"))
                .unwrap()
                .flatten()
                .map(|e| e.path().display().to_string()),
        );
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let state = host.dir.join("state").display().to_string();
        for line in
            mounts.lines().filter(|l| l.split(' ').nth(4).is_some_and(|m| m.starts_with(&state)))
        {
            if !known.iter().any(|id| line.contains(id.as_str())) {
                left.push(line.to_owned());
            }
        }
        let loops = crate::image::loops(&host.dir);
        left.extend(loops.into_iter().filter(|l| !known.iter().any(|id| l.contains(id.as_str()))));
        if left.is_empty() || begun.elapsed() > paced(Duration::from_secs(3)) {
            return left;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// I2: the authority file is put back to an older copy; the mark in its own file knows better.
fn rolled_back(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let first = host.open("w", &paced_ttl(60));
    host.must(&["session", "close", &id_of(&first)]);
    host.kill_agent();
    let state = host.dir.join("state");
    let copies = ["overfence.db", "overfence.db-wal", "overfence.db-shm"];
    for name in copies {
        let _ = std::fs::copy(state.join(name), host.dir.join(name));
    }
    assert!(host.start(None));
    let second = host.open("w", &paced_ttl(60));
    assert_eq!(second["session"]["generation"], 2);
    host.must(&["session", "close", &id_of(&second)]);
    host.kill_agent();
    for name in copies {
        let _ = std::fs::remove_file(state.join(name));
        let _ = std::fs::copy(host.dir.join(name), state.join(name));
    }
    assert!(host.start(None), "{}", host.log());
    let w = host.must(&["workspace", "status", "w"]);
    assert!(w["hold"].as_str().unwrap().contains("generation 1"), "{w:#}");
    let (code, _) = host.ask(&["session", "open", "-w", "w", "--ttl", &paced_ttl(60)]);
    assert_eq!(code, 4, "a workspace on HOLD was opened");
}
