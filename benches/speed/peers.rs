//! Freezing a stale writer by overfence beside pausing a container by its engine, in one run on one
//! machine. Command line beside command line: from the spawn of the command until a watcher of its own
//! reads `frozen 1` in `cgroup.events`, and until the command's exit.
//!
//! Where nothing else is said each session or container is asked for by a command of its own, and at
//! most so many run at once as there are processors. Starting a thousand containers takes minutes and
//! gigabytes, so that there are fewer of them; `OVERFENCE_BENCH_CONTAINERS=1000` gives them all.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use overfence::kernel::clock;
use overfence::model::time::BootNs;
use overfence::model::view::{Fenced, Opened};
use serde_json::{Value, json};

use crate::engines::{self, Daemons, Engine, count};
use crate::figures::{Samples, heading, ratio, text};
use crate::host::{Place, unified};
use crate::rig::{Rig, since};

/// Rounds of one session or container.
const ROUNDS: usize = 20;
/// Rounds of many at once.
const CROWDS: usize = 3;
const SESSIONS: usize = 1000;
const LONG: Duration = Duration::from_secs(3600);
/// Between two looks of the watcher; what it sees is late by that at most, and by one pass over all
/// that it watches.
const LOOK: Duration = Duration::from_micros(200);

pub fn run(place: &Place) {
    let place = &unified(place);
    let containers = std::env::var("OVERFENCE_BENCH_CONTAINERS");
    let containers = containers.map_or(50, |text| text.parse().expect("a number of containers"));
    let mut daemons = Daemons::default();
    let root = engines::prepare(place).expect("a place for engines");
    let rig = Rig::new(place);
    let mut peers = Vec::new();
    for (name, made) in [
        ("ctr tasks pause", engines::containerd(place, &root, &mut daemons)),
        ("docker pause", engines::docker(place, &mut daemons)),
        ("podman pause", engines::podman(place)),
    ] {
        match made {
            Ok(engine) => peers.push(engine),
            Err(why) => println!("  NOT RUN: {name}: {why}"),
        }
    }
    let mut ran = vec![];
    for processes in [1, 500] {
        heading(&format!("one writer of {processes} process(es), n={ROUNDS}"));
        let ours = one(&rig, processes);
        println!("  median overfence takes, of each peer's, until frozen and until the exit:");
        for engine in &peers {
            match one_of(engine, processes) {
                Ok(theirs) => {
                    println!(
                        "    {:<22} {:.2} and {:.2}   ({})",
                        engine.name,
                        ratio(ours.0.p(50), theirs.0.p(50)),
                        ratio(ours.1.p(50), theirs.1.p(50)),
                        engine.version
                    );
                    ran.push(engine.name);
                }
                Err(why) => println!("  NOT RUN: {}: {why}", engine.name),
            }
        }
    }
    crowd(&rig, &peers, containers);
    assert!(
        !ran.is_empty(),
        "not one peer ran, so nothing was compared; see above for the reasons"
    );
    drop(daemons);
}

/// Reads `cgroup.events` of all, again and again; when each said `frozen 1` first.
struct Watcher {
    over: AtomicBool,
    seen: AtomicUsize,
}

/// Does `act` while a thread of its own watches; from just before it until each was frozen, and
/// until it returned.
fn watched(cgroups: &[PathBuf], act: impl FnOnce()) -> (Vec<Duration>, Duration) {
    let files: Vec<_> =
        cgroups.iter().map(|c| File::open(c.join("cgroup.events")).unwrap()).collect();
    let watcher = Watcher { over: AtomicBool::new(false), seen: AtomicUsize::new(0) };
    std::thread::scope(|scope| {
        let watching = scope.spawn(|| watcher.look(&files));
        let begun = clock::now();
        act();
        let returned = since(begun);
        let begun_waiting = Instant::now();
        while watcher.seen.load(Ordering::Relaxed) < files.len() {
            if begun_waiting.elapsed() > Duration::from_secs(60) {
                watcher.over.store(true, Ordering::Relaxed);
                panic!("{} of {} froze", watcher.seen.load(Ordering::Relaxed), files.len());
            }
            std::thread::sleep(LOOK);
        }
        let at = watching.join().unwrap();
        (at.into_iter().map(|at| at.since(begun)).collect(), returned)
    })
}

impl Watcher {
    fn look(&self, files: &[File]) -> Vec<BootNs> {
        let (mut at, mut left) =
            (vec![BootNs(0); files.len()], (0..files.len()).collect::<Vec<_>>());
        let mut buffer = [0; 64];
        while !left.is_empty() && !self.over.load(Ordering::Relaxed) {
            left.retain(|i| {
                let len = files[*i].read_at(&mut buffer, 0).unwrap_or(0);
                let frozen = buffer[..len].windows(8).any(|w| w == b"frozen 1");
                if frozen {
                    at[*i] = clock::now();
                    self.seen.fetch_add(1, Ordering::Relaxed);
                }
                !frozen
            });
            std::thread::sleep(LOOK);
        }
        at
    }
}

fn done(mut command: Command) {
    let out = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{command:?}: {} {said}", out.status);
}

/// Until frozen, and until the answer.
type Times = (Samples, Samples);

fn lines(what: &str, frozen: Vec<Duration>, returned: Vec<Duration>) -> Times {
    let (frozen, returned) = (Samples::new(frozen), Samples::new(returned));
    frozen.line(&format!("{what}: until frozen 1"));
    returned.line(&format!("{what}: until its exit or answer"));
    (frozen, returned)
}

/// Sleeping processes in a session's cgroup, reaped in the end.
#[derive(Default)]
struct Writers(Vec<Child>);

impl Writers {
    fn add(&mut self, cgroup: &Path, processes: usize) {
        let script = format!(
            "echo $$ > \"$0/cgroup.procs\"; i=1; while [ $i -lt {processes} ]; do sleep 1000000 & i=$((i+1)); done; exec sleep 1000000"
        );
        let mut command = Command::new("/bin/busybox");
        command.args(["sh", "-c", &script]).arg(cgroup).stdin(Stdio::null());
        self.0.push(command.spawn().unwrap());
        while count(cgroup) < processes {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn fence(rig: &Rig, id: &str) -> Command {
    let mut command = Command::new(&rig.host.binary);
    command.env("OVERFENCE_SOCKET", rig.host.dir.join("run/overfence.sock"));
    command.args(["fence", id, "--to", "frozen", "--wait", "--reason", "bench"]);
    command
}

/// A new lease for a session, so that its processes run again.
fn readmit(rig: &Rig, id: &str) {
    let wish = json!({ "authorised_by": "bench", "reason": "bench" });
    let _: Value = rig.post(id, "readmit", &wish);
    while rig.session(id).work.is_some() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn one(rig: &Rig, processes: usize) -> Times {
    let opened = rig.open(&format!("one-{processes}"), LONG, None);
    let (id, cgroup) = (&opened.session.id, opened.session.cgroup.path().unwrap());
    let mut writers = Writers::default();
    writers.add(&cgroup, processes);
    let cgroups = [cgroup];
    let measure = |act: &dyn Fn()| {
        let rounds = (0..ROUNDS).map(|_| {
            let (frozen, returned) = watched(&cgroups, act);
            readmit(rig, id);
            (frozen[0], returned)
        });
        rounds.unzip()
    };
    let (frozen, returned) = measure(&|| {
        rig.post::<Fenced>(id, "fence", &json!({ "to": "frozen", "wait_ms": 30000 }));
    });
    lines("overfence, by its API", frozen, returned);
    let (frozen, returned) = measure(&|| done(fence(rig, id)));
    let times = lines("overfence fence --to frozen --wait", frozen, returned);
    let _: Fenced = rig.post(id, "fence", &json!({ "to": "killed", "wait_ms": 30000 }));
    times
}

fn one_of(engine: &Engine, processes: usize) -> Result<Times, String> {
    let container = engine.start(&format!("one-{processes}"), processes)?;
    let (ids, cgroups) = ([container.id.as_str()], [container.cgroup.clone()]);
    let measure = |act: &dyn Fn()| {
        let rounds = (0..ROUNDS).map(|_| {
            let (frozen, returned) = watched(&cgroups, act);
            engine.resume(&ids);
            (frozen[0], returned)
        });
        rounds.unzip()
    };
    if let Some(socket) = &engine.socket {
        let (frozen, returned) = measure(&|| ask(socket, &container.id));
        lines(&format!("{}, by its API", engine.name), frozen, returned);
    }
    let (frozen, returned) = measure(&|| done(engine.pause(&ids)));
    let times = lines(engine.name, frozen, returned);
    // Its processes are the machine's no longer.
    fs::write(container.cgroup.join("cgroup.kill"), "1").map_err(|e| e.to_string())?;
    Ok(times)
}

/// Docker's `pause` without its command line.
fn ask(socket: &Path, id: &str) {
    let mut stream = UnixStream::connect(socket).unwrap();
    let request = format!(
        "POST /containers/{id}/pause HTTP/1.1\r\nHost: d\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 204"), "{answer}");
}

/// Runs one command for each, as many at once as there are processors.
fn each(ids: &[String], command: impl Fn(&str) -> Command + Sync) {
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(id) = ids.get(next.fetch_add(1, Ordering::Relaxed)) {
                    done(command(id));
                }
            });
        }
    });
}

/// From the first command until the last is frozen, and until the last command's exit.
fn crowds(what: &str, cgroups: &[PathBuf], again: impl Fn(), act: impl Fn()) -> Times {
    let (mut frozen, mut returned) = (Vec::new(), Vec::new());
    for _ in 0..CROWDS {
        let (all, exit) = watched(cgroups, &act);
        frozen.push(all.into_iter().max().unwrap());
        returned.push(exit);
        again();
    }
    lines(&format!("{} x {what}, all", cgroups.len()), frozen, returned)
}

fn crowd(rig: &Rig, peers: &[Engine], containers: usize) {
    heading(&format!("many at once: {SESSIONS} sessions, {containers} containers an engine"));
    let mut writers = Writers::default();
    let begun = Instant::now();
    let fleet: Vec<Opened> = (0..SESSIONS)
        .map(|i| {
            let opened = rig.open(&format!("many-{i}"), LONG, None);
            writers.add(&opened.session.cgroup.path().unwrap(), 1);
            opened
        })
        .collect();
    println!(
        "  {SESSIONS} sessions were opened, with a process each, in {}",
        text(begun.elapsed())
    );
    let all: HashMap<_, _> =
        fleet.iter().map(|o| (o.session.id.clone(), o.session.cgroup.path().unwrap())).collect();
    for n in [containers.min(SESSIONS), SESSIONS] {
        let ids: Vec<_> = fleet[..n].iter().map(|o| o.session.id.clone()).collect();
        let cgroups: Vec<_> = ids.iter().map(|id| all[id].clone()).collect();
        let again = || ids.iter().for_each(|id| readmit(rig, id));
        crowds("overfence fence", &cgroups, again, || each(&ids, |id| fence(rig, id)));
        let again = || ids.iter().for_each(|id| readmit(rig, id));
        crowds("overfence, by its API one after the other", &cgroups, again, || {
            for id in &ids {
                let _: Fenced = rig.post(id, "fence", &json!({ "to": "frozen" }));
            }
        });
    }
    for engine in peers {
        if let Err(why) = crowd_of(engine, containers) {
            println!("  NOT RUN: {} of {containers}: {why}", engine.name);
        }
    }
}

fn crowd_of(engine: &Engine, containers: usize) -> Result<(), String> {
    let begun = Instant::now();
    let made = (0..containers).map(|i| engine.start(&format!("many-{i}"), 1));
    let all: Vec<_> = made.collect::<Result<_, _>>()?;
    let took = begun.elapsed();
    println!(
        "  {}: {containers} containers were started in {}, {} each",
        engine.name,
        text(took),
        text(took / u32::try_from(containers).unwrap_or(1))
    );
    let ids: Vec<_> = all.iter().map(|c| c.id.clone()).collect();
    let short: Vec<&str> = ids.iter().map(String::as_str).collect();
    let cgroups: Vec<_> = all.iter().map(|c| c.cgroup.clone()).collect();
    let again = || engine.resume(&short);
    crowds(engine.name, &cgroups, again, || each(&ids, |id| engine.pause(&[id])));
    if engine.takes_many {
        let what = format!("{} by one command", engine.name);
        crowds(&what, &cgroups, again, || done(engine.pause(&short)));
    }
    for cgroup in &cgroups {
        fs::write(cgroup.join("cgroup.kill"), "1").map_err(|e| e.to_string())?;
    }
    Ok(())
}
