//! System calls that fail: an effect gives EIO, EMFILE, ENOSPC or EINTR as long as a file names it. Each verb
//! says so or waits, no fact says more than the kernel, the writer is stopped all the same, no byte
//! is lost, and with the cause gone everything goes on.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use serde_json::Value;

use crate::agent_process::{Host, has, id_of, path_of};
use crate::host::{Place, Test, paced, paced_ttl};
use crate::restart::{leftovers, settle};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "every_effect_can_be_made_to_fail", run: counted },
        Test { name: "eio_at_every_effect_is_told_and_survived", run: |p| each(p, libc::EIO) },
        Test { name: "eio_on_the_way_back_is_told_and_survived", run: back },
        Test { name: "emfile_at_every_call_is_told_and_survived", run: |p| each(p, libc::EMFILE) },
        Test {
            name: "enospc_at_every_call_that_takes_room_is_told_and_survived",
            run: |p| each(p, libc::ENOSPC),
        },
        Test { name: "eintr_at_every_call_that_waits_is_told_and_survived", run: interrupted },
        Test { name: "a_start_that_meets_a_fault_says_so_and_the_next_goes_on", run: starts },
        Test { name: "a_removal_that_fails_for_good_is_held_for_a_person", run: held },
        Test { name: "an_agent_without_descriptors_stops_its_writers", run: no_descriptors },
    ]
}

/// How long a verb has to wait once it met a fault, before that goes.
const STANDS: Duration = Duration::from_millis(400);
/// Agents that go through the points beside each other: most of the time is waiting for a tick.
const BESIDE: usize = 5;
/// Points at which nothing can fail by itself, with what fails there instead.
const NOT_ALONE: [(&str, &str); 7] = [
    ("authority.", "store.commit: the authority and the store are one file"),
    ("store.breaker.before", "store.commit"),
    ("effect.freeze.before", "kernel.freeze, which `effect.freeze` is when it is done by a worker"),
    (
        "kernel.image.told.before",
        "it stands in the image: image::what_a_sync_told_is_not_forgotten",
    ),
    ("agent.ready.before", "no effect: it marks the end of a start"),
    ("agent.witness.before", "told by upper.session.create"),
    ("workload.walls.before", "an execve that fails is told by the client"),
];

/// What an agent is to fail at.
struct Fault {
    file: PathBuf,
    point: String,
    errno: i32,
}

impl Fault {
    fn arm(&self) {
        // By a rename: a half-written name is another's.
        let new = self.file.with_extension("new");
        std::fs::write(&new, format!("{} {}", self.point, self.errno)).unwrap();
        std::fs::rename(&new, &self.file).unwrap();
    }

    fn clear(&self) {
        let _ = std::fs::remove_file(&self.file);
    }

    /// A full disk has a code of its own.
    fn is_told_by(&self, text: &str) -> bool {
        let full = self.errno == libc::ENOSPC && text.contains("no_space");
        full || text.contains(&self.text())
    }

    /// As the system's own messages have it.
    fn text(&self) -> String {
        format!("(os error {})", self.errno)
    }
}

fn file_of(host: &Host) -> PathBuf {
    host.dir.join("fault")
}

fn log_of(host: &Host) -> PathBuf {
    host.dir.join("points")
}

fn plan(host: &Host) -> String {
    format!("fail={};log={}", file_of(host).display(), log_of(host).display())
}

/// The points that `log` tells of, and whether each can fail.
fn points(log: &Path) -> BTreeSet<(String, bool)> {
    let text = std::fs::read_to_string(log).unwrap();
    let lines = text.lines().filter_map(|line| line.split_once(' '));
    let points = lines.map(|(_, rest)| match rest.strip_suffix(" can fail") {
        Some(name) => (name.to_owned(), true),
        None => (rest.to_owned(), false),
    });
    points.filter(|(name, _)| name.ends_with(".before")).collect()
}

/// What is done under a fault; see [`life`] and [`second_life`].
type Life = fn(&mut Host, &Fault, usize) -> Vec<String>;

/// Everything that a life without faults passes, with and without an image.
fn passed(place: &Place, name: &str, life: Life) -> BTreeSet<(String, bool)> {
    let mut host = Host::new(place, name);
    let log = host.dir.join("all");
    assert!(host.start(Some(&format!("log={}", log.display()))));
    std::fs::write(&log, "").unwrap();
    for (n, point) in ["none", "none, with an image"].into_iter().enumerate() {
        let never = Fault { file: file_of(&host), point: point.to_owned(), errno: 0 };
        life(&mut host, &never, n);
    }
    host.stop();
    points(&log)
}

fn not_alone(name: &str) -> bool {
    NOT_ALONE.iter().any(|(part, _)| name.starts_with(part))
}

fn counted(place: &Place) {
    let mut passed = passed(place, "count", life);
    passed.extend(self::passed(place, "back", second_life));
    for (name, can_fail) in &passed {
        assert!(*can_fail || not_alone(name), "{name} has no way to fail: failpoint::fails");
    }
    let fail: BTreeSet<_> = passed.iter().filter(|(_, can)| *can).map(|(name, _)| name).collect();
    eprintln!("{} points can fail: {fail:?}", fail.len());
    // What a life consists of: a point that was taken away would be missed by nobody else.
    let effects =
        ["thaw", "read_only", "kill", "capture", "publish", "prove_gone", "remove", "show"];
    for effect in effects.map(|name| format!("effect.{name}.before")) {
        assert!(fail.contains(&effect), "{effect} was not passed");
    }
    let kernel = [
        "mount",
        "umount",
        "remount-ro",
        "cgroup-create",
        "cgroup-remove",
        "freeze",
        "thaw",
        "kill",
    ];
    for effect in kernel.map(|name| format!("kernel.{name}.before")) {
        assert!(fail.contains(&effect), "{effect} was not passed");
    }
}

fn each(place: &Place, errno: i32) {
    let points = passed(place, "count", life);
    let mut points: Vec<_> = points
        .into_iter()
        .filter(|(_, can)| *can)
        .map(|(name, _)| name)
        .filter(|name| !not_alone(name))
        .collect();
    assert!(points.len() > 25, "{points:?}");
    // An effect is what its calls are: once is enough.
    points.retain(|name| errno == libc::EIO || !name.starts_with("effect."));
    points.retain(|name| errno != libc::ENOSPC || takes_room(name));
    assert!(points.len() > 15, "{points:?}");
    go_through(place, &points, errno, life);
}

/// Whether a full disk can stop it: what only ends something or sets a flag needs no block.
fn takes_room(name: &str) -> bool {
    const NEEDS_NONE: [&str; 10] = [
        "kernel.cgroup-remove",
        "kernel.deadline-remove",
        "kernel.freeze",
        "kernel.image.detach",
        "kernel.image.freeze",
        "kernel.image.thaw",
        "kernel.kill",
        "kernel.thaw",
        "kernel.umount",
        "gate.",
    ];
    !NEEDS_NONE.iter().any(|part| name.starts_with(part))
}

/// What sealing, readmission, a bundle brought back and a backup meet besides.
fn back(place: &Place) {
    let known = passed(place, "count", life);
    let points: Vec<_> = passed(place, "back", second_life)
        .into_iter()
        .filter(|point| point.1 && !known.contains(point) && !not_alone(&point.0))
        .map(|(name, _)| name)
        .collect();
    eprintln!("{points:?}");
    for point in ["kernel.seal.record.before", "kernel.remount-rw.before", "seed.move.before"] {
        assert!(points.iter().any(|name| name == point), "{point} was not passed: {points:?}");
    }
    go_through(place, &points, libc::EIO, second_life);
}

/// The calls of an agent that may wait long, or in which the kernel takes a signal.
fn interrupted(place: &Place) {
    let points = ["mount", "umount", "remount-ro", "freeze", "thaw", "kill", "cgroup-remove"];
    let points: Vec<_> = points.iter().map(|name| format!("kernel.{name}.before")).collect();
    go_through(place, &points, libc::EINTR, life);
}

fn go_through(place: &Place, points: &[String], errno: i32, life: Life) {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let shares: Vec<_> = (0..BESIDE.min(points.len()))
            .map(|share| {
                scope.spawn(move || {
                    let mut host = Host::new(place, &format!("f{share}"));
                    assert!(host.start(Some(&plan(&host))), "{}", host.log());
                    for (n, point) in points.iter().enumerate().skip(share).step_by(BESIDE) {
                        let fault = Fault { file: file_of(&host), point: point.clone(), errno };
                        let (begun, from) = (Instant::now(), host.log().len());
                        let told = life(&mut host, &fault, n);
                        let log = host.log()[from..].to_owned();
                        // Who asked hears it, or it is in the log.
                        let heard = told.iter().any(|text| fault.is_told_by(text));
                        let logged = log.contains(&fault.text());
                        eprintln!("{point}: {:?}, heard {heard}, logged {logged}", begun.elapsed());
                        assert!(heard || logged, "{point} failed in silence: {told:?}\n{log}");
                    }
                    host.stop();
                })
            })
            .collect();
        for share in shares {
            share.join().unwrap();
        }
    });
    eprintln!("{} points with errno {errno} in {:?}", points.len(), begun.elapsed());
}

/// Somebody in the session's cgroup.
fn sleeper(session: &Value) -> Child {
    Command::new("/bin/sh")
        .args(["-c", "echo $$ > \"$1\"/cgroup.procs && exec sleep 600", "sh"])
        .arg(path_of(session, "cgroup"))
        .stdin(Stdio::null())
        .spawn()
        .unwrap()
}

/// Open, write, checkpoint, write, fence, export, discard, each under the fault, and again without it
/// where it did not go through. Gives what was told to who asked.
fn life(host: &mut Host, fault: &Fault, n: usize) -> Vec<String> {
    let mut told = Vec::new();
    let workspace = format!("w{n}");
    let ttl = paced_ttl(60);
    // Points of images are met with one; a directory is the plain case.
    let image = fault.point.contains("image");
    let mut open = vec!["session", "open", "-w", &workspace, "--create", "--ttl", &ttl];
    if image {
        open.extend(["--upper", "image", "--size", "64M"]);
    }
    let opened = go(host, fault, &mut told, None, &open).expect("it is opened in the end");
    let (id, session) = (id_of(&opened), opened["session"].clone());
    let (merged, upper) = (path_of(&session, "merged"), path_of(&session, "upper"));
    let mut inside = sleeper(&session);
    std::fs::write(merged.join("one"), "committed").unwrap();
    go(host, fault, &mut told, Some(&id), &["session", "checkpoint", &id]).expect("a checkpoint");
    let wish = path_of(&session, "cgroup").join("cgroup.freeze");
    let runs = || std::fs::read_to_string(&wish).is_ok_and(|text| text == "0\n");
    assert!(until(runs), "{}: it stays frozen after its checkpoint\n{}", fault.point, host.log());
    std::fs::write(merged.join("two"), "precious").unwrap();
    let fence = ["fence", &id, "--reason", "test", "--wait=2s"];
    go(host, fault, &mut told, Some(&id), &fence).expect("a fence");
    let view = host.until(&id, |v| has(v, "read-only"));
    truths(host, fault);
    assert!(has(&view, "frozen"), "{view:#}");
    go(host, fault, &mut told, Some(&id), &["preserved", "export", &id]).expect("an export");
    for (name, bytes) in [("one", "committed"), ("two", "precious")] {
        assert_eq!(std::fs::read_to_string(upper.join(name)).unwrap(), bytes, "{}", fault.point);
    }
    go(host, fault, &mut told, Some(&id), &["preserved", "discard", &id, "--yes"]);
    settle(host, &fault.point);
    inside.wait().unwrap();
    assert_eq!(leftovers(host), Vec::<String>::new(), "{}\n{}", fault.point, host.log());
    let status = host.must(&["workspace", "status", &workspace]);
    assert!(status["version"].as_u64() >= Some(1), "{}: {status:#}", fault.point);
    let report = host.must(&["evidence", "verify"]);
    assert_eq!(report["ok"], true, "{}: {report:#}", fault.point);
    told
}

/// Open, seal, readmit, write, fence, export, bring back, take a backup, each as in [`life`].
fn second_life(host: &mut Host, fault: &Fault, n: usize) -> Vec<String> {
    const BY: [&str; 4] = ["--authorised-by", "op", "--reason", "test"];
    let mut told = Vec::new();
    let workspace = format!("b{n}");
    let ttl = paced_ttl(60);
    let image = ["image", "_upper"].iter().any(|part| fault.point.contains(part));
    let mut open = vec!["session", "open", "-w", &workspace, "--create", "--ttl", &ttl];
    if image {
        open.extend(["--upper", "image", "--size", "64M"]);
    }
    let opened = go(host, fault, &mut told, None, &open).expect("it is opened in the end");
    let (id, session) = (id_of(&opened), opened["session"].clone());
    let (merged, cgroup) = (path_of(&session, "merged"), path_of(&session, "cgroup"));
    let mut inside = sleeper(&session);
    // Held open from outside: it cannot be made read-only, so that it is sealed, or its image frozen.
    let held = std::fs::File::create(merged.join("one")).unwrap();
    let fence = ["fence", &id, "--reason", "test", "--to", "sealed", "--wait=2s"];
    if image {
        // An image is frozen without being asked for, while nobody waits: the fault is met there, or not.
        let from = host.log().len();
        fault.arm();
        host.must(&fence[..4]);
        let met = || {
            let view = host.must(&["session", "inspect", &id]);
            has(&view, "upper-frozen") || host.log()[from..].contains(&fault.text())
        };
        assert!(until(met), "{}: not frozen, and no fault told\n{}", fault.point, host.log());
        truths(host, fault);
        stopped(host, fault, &id);
        fault.clear();
    } else {
        go(host, fault, &mut told, Some(&id), &fence).expect("a fence");
    }
    let stronger = if image { "upper-frozen" } else { "sealed" };
    host.until(&id, |v| has(v, "frozen") && has(v, stronger));
    truths(host, fault);
    drop(held);
    let readmit = [&["readmit", &id][..], &BY].concat();
    go(host, fault, &mut told, Some(&id), &readmit).expect("a readmission");
    let wish = cgroup.join("cgroup.freeze");
    let runs = || std::fs::read_to_string(&wish).is_ok_and(|text| text == "0\n");
    assert!(until(runs), "{}: readmitted and frozen\n{}", fault.point, host.log());
    std::fs::write(merged.join("two"), "precious").unwrap();
    let fence = ["fence", &id, "--reason", "test", "--wait=2s"];
    go(host, fault, &mut told, Some(&id), &fence).expect("a second fence");
    host.until(&id, |v| has(v, "read-only"));
    truths(host, fault);
    let dest = |what: &str| host.dir.join(format!("{what}{n}")).to_str().unwrap().to_owned();
    let (bundle, copy) = (dest("bundle"), dest("copy"));
    let export = ["preserved", "export", &id, "--dest", &bundle];
    go(host, fault, &mut told, Some(&id), &export).expect("an export");
    let apply = ["bundle", "apply", &bundle, "-w", &workspace, "--ttl", &ttl];
    let applied = go(host, fault, &mut told, None, &[&apply[..], &BY].concat());
    let applied = id_of(&applied.expect("it is brought back"));
    let view = host.must(&["session", "inspect", &applied]);
    let two = path_of(&view, "merged").join("two");
    assert_eq!(std::fs::read_to_string(two).unwrap(), "precious", "{}", fault.point);
    go(host, fault, &mut told, None, &["backup", "--dest", &copy]).expect("a backup");
    assert!(Path::new(&copy).is_dir(), "{}: no backup", fault.point);
    let close = ["session", "close", &applied, "--discard", "--yes"];
    go(host, fault, &mut told, Some(&applied), &close);
    host.must(&["preserved", "discard", &id, "--yes"]);
    settle(host, &fault.point);
    inside.wait().unwrap();
    assert_eq!(leftovers(host), Vec::<String>::new(), "{}\n{}", fault.point, host.log());
    assert_eq!(host.must(&["evidence", "verify"])["ok"], true, "{}", fault.point);
    told
}

/// A verb under the fault; once more without it, if it did not go through. `None`: there is nothing left
/// to be asked for.
fn go(
    host: &mut Host,
    fault: &Fault,
    told: &mut Vec<String>,
    id: Option<&str>,
    args: &[&str],
) -> Option<Value> {
    roomy(host, fault);
    std::fs::write(log_of(host), "").unwrap();
    fault.arm();
    let first = ask(host, fault, args);
    fault.clear();
    let json = |out: &Output| serde_json::from_slice(&out.stdout).unwrap_or(Value::Null);
    if first.status.success() {
        return Some(json(&first));
    }
    let said = String::from_utf8_lossy(&first.stderr).into_owned();
    assert!(!said.trim().is_empty(), "{}: {args:?} failed without a word", fault.point);
    assert!(!said.contains("panicked"), "{}: {args:?}: {said}", fault.point);
    told.push(said.clone());
    // A store whose commit was not answered is not believed: the agent ends, as it says, and the next
    // one reads it again. systemd starts that one, and here the test.
    if fault.point.starts_with("store.commit") {
        let begun = Instant::now();
        while !host.dead() {
            assert!(begun.elapsed() < paced(Duration::from_secs(10)), "it goes on: {}", host.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(host.log().contains("not believed any more"), "{}", host.log());
        assert!(host.start(Some(&plan(host))), "{}", host.log());
    }
    settle(host, &fault.point);
    if let Some(id) = id
        && host.ask(&["session", "inspect", id]).0 != 0
    {
        assert!(args.contains(&"--yes"), "{}: it is gone at {args:?}", fault.point);
        return None;
    }
    roomy(host, fault);
    let second = host.run(args);
    let again = String::from_utf8_lossy(&second.stderr);
    // It came to it by itself; a bundle may be there though its record was lost.
    let done = ["wrong_state", "destination_exists"].iter().any(|code| again.contains(code));
    let fits = second.status.success() || done;
    assert!(fits, "{}: {args:?} again: {again}\nfirst: {told:?}\n{}", fault.point, host.log());
    Some(json(&second))
}

/// What the agent gave back of its reserve on a disk that it took for full is there again: until then it
/// opens nothing, as documented.
fn roomy(host: &Host, fault: &Fault) {
    let short = || host.ask(&["status"]).1["space"]["short"] != false;
    let there = fault.errno != libc::ENOSPC || until(|| !short());
    assert!(there, "{}: the reserve is not made again\n{}", fault.point, host.log());
}

/// Asks; what is not answered is answered once the fault is gone.
fn ask(host: &Host, fault: &Fault, args: &[&str]) -> Output {
    let mut asked = host.verb(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let met = || {
        let log = std::fs::read_to_string(log_of(host)).unwrap_or_default();
        let point = format!(" {} can fail", fault.point);
        log.lines().any(|line| line.ends_with(&point))
    };
    let mut since = None;
    let mut stands = true;
    while asked.try_wait().unwrap().is_none() {
        if stands && since.is_none() && met() {
            since = Some(Instant::now());
        }
        if stands && since.is_some_and(|since| since.elapsed() > STANDS) {
            truths(host, fault);
            if args[0] == "fence" {
                stopped(host, fault, args[1]);
            }
            fault.clear();
            stands = false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    if stands {
        truths(host, fault);
        if args[0] == "fence" {
            stopped(host, fault, args[1]);
        }
    }
    asked.wait_with_output().unwrap()
}

/// No fault keeps the writer from being stopped but one of the freeze itself.
fn stopped(host: &Host, fault: &Fault, id: &str) {
    let freeze = host.cgroup.join(id).join("cgroup.freeze");
    let wish = std::fs::read_to_string(&freeze).unwrap();
    let itself = fault.point.contains("freeze.before");
    assert!(wish == "1\n" || itself, "{}: not stopped: {wish}\n{}", fault.point, host.log());
}

/// What is said of each session is what the kernel says.
fn truths(host: &Host, fault: &Fault) {
    let (code, sessions) = host.ask(&["session", "list"]);
    // A store that is not believed shows nothing, which is no untruth.
    let Some(sessions) = sessions.as_array().filter(|_| code == 0) else { return };
    for view in sessions {
        let now = || host.ask(&["session", "inspect", view["id"].as_str().unwrap()]).1;
        let is = |view: &Value, fact: &str| view["facts"].is_array() && has(view, fact);
        let events = path_of(view, "cgroup").join("cgroup.events");
        let events = std::fs::read_to_string(events).unwrap_or_default();
        let lost = !["OPENING", "ACTIVE", "RELEASING"].contains(&view["state"].as_str().unwrap());
        if lost && is(view, "frozen") && !events.is_empty() {
            let frozen = events.contains("frozen 1") || events.contains("populated 0");
            assert!(frozen || !is(&now(), "frozen"), "{}: {events}\n{view:#}", fault.point);
        }
        let mountinfo = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let merged = path_of(view, "merged").display().to_string();
        let mounted = mountinfo.lines().any(|l| l.split(' ').nth(4) == Some(&merged));
        if is(view, "gone") {
            assert!(!mounted, "{}: {view:#}", fault.point);
        } else if is(view, "read-only") && mounted {
            let probe = std::fs::File::create(Path::new(&merged).join("probe"));
            let refused = probe.is_err_and(|e| e.raw_os_error() == Some(libc::EROFS));
            assert!(refused || !is(&now(), "read-only"), "{}: {view:#}", fault.point);
        }
    }
}

fn until(fits: impl Fn() -> bool) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < paced(Duration::from_secs(10)) {
        if fits() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    false
}

/// What a start does by itself, on a new directory and on one with a stopped session in it.
fn starts(place: &Place) {
    let mut host = Host::new(place, "count");
    let log = host.dir.join("all");
    let counting = format!("log={}", log.display());
    assert!(host.start(Some(&counting)));
    let mut all = points(&log);
    let id = id_of(&host.open("w", &paced_ttl(60)));
    host.must(&["fence", &id, "--reason", "test", "--wait"]);
    host.kill_agent();
    std::fs::remove_file(&log).unwrap();
    assert!(host.start(Some(&counting)));
    all.extend(points(&log));
    host.stop();
    let all: Vec<_> = all.into_iter().filter(|(_, can)| *can).map(|(name, _)| name).collect();
    assert!(all.len() >= 3, "{all:?}");
    for (n, point) in all.iter().enumerate() {
        let mut host = Host::new(place, &format!("s{n}"));
        let fault = Fault { file: file_of(&host), point: point.clone(), errno: libc::EIO };
        for fresh in [true, false] {
            fault.arm();
            let ready = host.start(Some(&plan(&host)));
            // It goes on without, or it says why not.
            assert!(ready || host.log().contains(&fault.text()), "{point}: {}", host.log());
            eprintln!("{point}, fresh {fresh}: ready {ready}");
            host.kill_agent();
            fault.clear();
            assert!(host.start(None), "{point}: {}", host.log());
            if fresh {
                let id = id_of(&host.open("w", &paced_ttl(60)));
                host.must(&["fence", &id, "--reason", "test", "--wait"]);
            } else {
                let sessions = host.must(&["session", "list"]);
                assert_eq!(sessions[0]["state"], "PRESERVED", "{point}: {sessions:#}");
                assert!(has(&sessions[0], "frozen"), "{point}: {sessions:#}");
            }
            assert_eq!(host.must(&["evidence", "verify"])["ok"], true, "{point}");
            host.kill_agent();
        }
    }
}

/// The real thing: the agent may open nothing any more, so nobody can even ask it.
fn no_descriptors(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let opened = host.open("w", &paced_ttl(3));
    let (id, session) = (id_of(&opened), opened["session"].clone());
    let mut inside = sleeper(&session);
    std::fs::write(path_of(&session, "merged").join("f"), "precious").unwrap();
    let agent = host.agent_pid();
    let pid = Pid::from_raw(i32::try_from(agent).unwrap());
    let own = getrlimit(Resource::Nofile);
    prlimit(pid, Resource::Nofile, Rlimit { current: Some(3), maximum: own.maximum }).unwrap();
    let events = path_of(&session, "cgroup").join("cgroup.events");
    let frozen = || std::fs::read_to_string(&events).unwrap().contains("frozen 1");
    assert!(until(frozen), "it was not stopped: {}", host.log());
    prlimit(pid, Resource::Nofile, own).unwrap();
    let view = host.until(&id, |v| v["state"] == "PRESERVED" && has(v, "read-only"));
    assert!(has(&view, "frozen"), "{view:#}");
    assert_eq!(host.agent_pid(), agent);
    assert!(!host.dead(), "the agent did not live through it");
    let kept = std::fs::read_to_string(path_of(&session, "upper").join("f")).unwrap();
    assert_eq!(kept, "precious");
    assert_eq!(host.must(&["evidence", "verify"])["ok"], true);
    host.must(&["preserved", "discard", &id, "--yes"]);
    inside.wait().unwrap();
    assert_eq!(leftovers(&host), Vec::<String>::new());
    host.stop();
}

/// Tried again at each tick, but not for ever.
fn held(place: &Place) {
    let mut host = Host::new(place, "h");
    let text = std::fs::read_to_string(&host.config).unwrap();
    std::fs::write(&host.config, format!("{text}[preserve]\nsweep = \"1s\"\n")).unwrap();
    assert!(host.start(Some(&plan(&host))));
    let opened = host.open("w", &paced_ttl(60));
    let (id, upper) = (id_of(&opened), path_of(&opened["session"], "upper"));
    std::fs::write(path_of(&opened["session"], "merged").join("f"), "bytes").unwrap();
    host.must(&["fence", &id, "--reason", "test", "--wait"]);
    let point = "upper.remove.rename.before".to_owned();
    let fault = Fault { file: file_of(&host), point, errno: libc::EIO };
    fault.arm();
    let mut asked = host.verb(&["preserved", "discard", &id, "--yes"]);
    let mut asked = asked.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let view = host.until(&id, |v| v["state"] == "QUARANTINED");
    assert!(view["trouble"].as_str().unwrap().contains(&fault.text()), "{view:#}");
    assert_eq!(view["class"], "QUARANTINED");
    assert_eq!(std::fs::read_to_string(upper.join("f")).unwrap(), "bytes");
    let counted = || host.must(&["status"]).to_string().contains("held=1");
    assert!(until(counted), "{:#}", host.must(&["status"]));
    asked.wait().unwrap();
    fault.clear();
    // Left alone it stays; a person has it tried again.
    assert_eq!(host.must(&["session", "inspect", &id])["state"], "QUARANTINED");
    host.must(&["preserved", "discard", &id, "--yes"]);
    assert!(!upper.exists());
    assert_eq!(leftovers(&host), Vec::<String>::new());
    host.stop();
}
