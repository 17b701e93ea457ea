//! A thousand sessions: what opening, holding and losing them costs, and what a command in one
//! more of them waits for.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use overfence::kernel::clock;
use overfence::model::time::BootNs;
use overfence::model::view::{Opened, SessionView};

use crate::figures::{Samples, heading, text};
use crate::host::Place;
use crate::rig::{Rig, Sleepers, frozen, since};

const SESSIONS: usize = 1000;
const TTL: Duration = Duration::from_secs(30);
const IDLE: Duration = Duration::from_secs(30);
const STARTS: usize = 30;
/// Opens whose median stands for a number of sessions.
const WINDOW: usize = 10;

pub fn run(place: &Place) {
    let rig = Rig::new(place);
    let mounts = mount_count(&rig);
    heading("overfence run: from the call until the command runs, with no other session");
    starts(&rig, "alone");

    heading(&format!("{SESSIONS} sessions, TTL {TTL:?}, one sleeping process each"));
    let beats = Beats::default();
    std::thread::scope(|scope| {
        scope.spawn(|| beats.give());
        let _end = EndOf(&beats);
        fleet(&rig, &beats, mounts);
    });
}

/// Ends the beats, also when something panics.
struct EndOf<'b>(&'b Beats);

impl Drop for EndOf<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Relaxed);
    }
}

fn fleet(rig: &Rig, beats: &Beats, mounts: usize) {
    let mut sleepers = Sleepers::default();
    let mut fleet: Vec<Opened> = Vec::new();
    let mut took = Vec::new();
    // All leases end at one instant, far enough away: it is set once it is known how fast this
    // machine opens.
    let mut end = None;
    while fleet.len() < SESSIONS {
        let i = fleet.len();
        if i == WINDOW {
            let median = Samples::new(took.clone()).p(50);
            let opening = median * u32::try_from(SESSIONS).unwrap() * 3;
            end = Some(clock::now().plus(opening + IDLE + Duration::from_secs(60)));
        }
        let lifetime = end.map(|end: BootNs| end.since(clock::now()));
        let begun = Instant::now();
        let opened = rig.open_for("process", &format!("fleet-{i}"), TTL, lifetime);
        took.push(begun.elapsed());
        sleepers.add_to(&opened.session);
        beats.add(&rig.inside(&opened.session.id).with_file_name("init.beat"));
        fleet.push(opened);
        if [10, 100, 500, SESSIONS].contains(&fleet.len()) {
            let last = Samples::new(took[took.len() - WINDOW..].to_vec());
            println!(
                "  open of the {WINDOW} sessions up to {:>4}: median {}",
                fleet.len(),
                text(last.p(50))
            );
        }
    }
    let end = end.expect("there are more sessions than a window");
    println!("  {} mounts more in the agent's namespace", mount_count(rig) - mounts);
    idle(rig, beats);
    heading(&format!(
        "overfence run: from the call until the command runs, with {SESSIONS} sessions"
    ));
    starts(rig, "crowd");
    lose(rig, &fleet[WINDOW..], end);
}

/// Signs of life as each session's init writes them: three in each TTL.
#[derive(Default)]
struct Beats {
    due: Mutex<VecDeque<(Instant, File)>>,
    given: AtomicUsize,
    over: AtomicBool,
}

impl Beats {
    fn add(&self, file: &Path) {
        self.due.lock().unwrap().push_back((Instant::now(), File::create(file).unwrap()));
    }

    fn give(&self) {
        while !self.over.load(Ordering::Relaxed) {
            let mut all = self.due.lock().unwrap();
            let next = match all.front() {
                Some((at, _)) if *at <= Instant::now() => all.pop_front(),
                _ => None,
            };
            drop(all);
            let Some((at, file)) = next else {
                std::thread::sleep(Duration::from_millis(2));
                continue;
            };
            file.write_all_at(&clock::now().0.to_ne_bytes(), 0).unwrap();
            self.given.fetch_add(1, Ordering::Relaxed);
            self.due.lock().unwrap().push_back((at + TTL / 3, file));
        }
    }
}

fn mount_count(rig: &Rig) -> usize {
    let path = format!("/proc/{}/mountinfo", rig.host.agent_pid());
    fs::read_to_string(path).unwrap().lines().count()
}

/// What an agent costs whose sessions do nothing but live.
fn idle(rig: &Rig, beats: &Beats) {
    let proc = format!("/proc/{}", rig.host.agent_pid());
    // What its threads ran, in nanoseconds: ticks are too coarse for what sleeps nearly always.
    let cpu = || -> u64 {
        let threads = fs::read_dir(format!("{proc}/task")).unwrap();
        let of = |thread: std::io::Result<fs::DirEntry>| {
            let ran =
                fs::read_to_string(thread.unwrap().path().join("schedstat")).unwrap_or_default();
            ran.split_whitespace().next().map_or(0, |ns| ns.parse::<u64>().unwrap())
        };
        threads.map(of).sum()
    };
    let mut cold = Cold::new();
    let (begun, before, given) = (Instant::now(), cpu(), beats.given.load(Ordering::Relaxed));
    std::thread::sleep(IDLE);
    let used = (cpu() - before) as f64 / 1e9;
    let given = beats.given.load(Ordering::Relaxed) - given;
    let status = fs::read_to_string(format!("{proc}/status")).unwrap();
    let of = |key: &str| {
        let line = status.lines().find(|l| l.starts_with(key)).unwrap_or_default();
        line.split_once(':').map_or("", |(_, value)| value.trim()).to_owned()
    };
    let span = begun.elapsed();
    println!(
        "  agent: RSS {} (peak {}; target < 64 MiB), {} threads, CPU {:.2} % of a core over {} \
         with {given} beats (target < 1 %)",
        of("VmRSS"),
        of("VmHWM"),
        of("Threads"),
        100.0 * used / span.as_secs_f64(),
        text(span),
    );
    println!(
        "  a page of memory that lay untouched for as long: {} a touch here; touched again: {}",
        text(cold.touch()),
        text(cold.touch()),
    );
}

/// Pages that nobody touches meanwhile: what an idle session's memory costs when its turn comes. On a
/// virtual machine whose host takes such pages away that is most of what an idle agent uses.
struct Cold(Vec<u8>);

impl Cold {
    const PAGE: usize = 4096;
    const PAGES: usize = 4000;

    fn new() -> Self {
        Self(vec![1; Self::PAGES * Self::PAGE])
    }

    /// The mean of one touch, in an order that nobody foresees.
    fn touch(&mut self) -> Duration {
        let begun = Instant::now();
        for i in 0..Self::PAGES {
            // 1637 and 4000 have no common divisor: each page once.
            let page = i * 1637 % Self::PAGES;
            let byte = std::hint::black_box(&mut self.0[page * Self::PAGE]);
            *byte = byte.wrapping_add(1);
        }
        begun.elapsed() / u32::try_from(Self::PAGES).unwrap()
    }
}

/// `overfence run` beside a plain exec: the command says when it runs.
fn starts(rig: &Rig, name: &str) {
    let wall = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let started = |mut command: Command| {
        let before = wall();
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let at = said.trim().parse().unwrap_or_else(|_| {
            panic!("{}: {said}{}", output.status, String::from_utf8_lossy(&output.stderr))
        });
        Duration::from_nanos(at).saturating_sub(before)
    };
    const DATE: [&str; 2] = ["/bin/date", "+%s%N"];
    let (mut plain, mut ours, mut inside) = (Vec::new(), Vec::new(), Vec::new());
    let session = rig.open(&format!("{name}-exec"), Duration::from_secs(3600), None).session.id;
    for i in 0..=STARTS {
        let overfence = || {
            let mut command = Command::new(&rig.host.binary);
            command.env("OVERFENCE_SOCKET", rig.host.dir.join("run/overfence.sock"));
            command
        };
        let mut bare = Command::new(DATE[0]);
        bare.arg(DATE[1]);
        let mut run = overfence();
        run.args(["run", "-w", &format!("{name}-run"), "--create", "--on-exit", "discard", "--"]);
        run.args(DATE);
        let mut exec = overfence();
        exec.args(["session", "exec", &session, "--"]).args(DATE);
        let (bare, run, exec) = (started(bare), started(run), started(exec));
        // The first ones make the workspace and the session's init.
        if i > 0 {
            plain.push(bare);
            ours.push(run);
            inside.push(exec);
        }
    }
    let [plain, ours, inside] = [plain, ours, inside].map(Samples::new);
    plain.line("plain exec of the same command");
    inside.line("session exec");
    ours.line("run: open with its fsyncs, walls, command");
    println!(
        "  run costs {} over the plain exec, at the median (target < 20 ms)",
        text(ours.p(50).saturating_sub(plain.p(50)))
    );
}

/// All leases end at once.
fn lose(rig: &Rig, fleet: &[Opened], end: BootNs) {
    clock::sleep_until(
        end.minus(overfence::model::lease::margin(TTL)).minus(Duration::from_secs(1)),
    );
    heading(&format!("{} sessions lose their leases at once", fleet.len()));
    let deadlines: Vec<_> = fleet.iter().map(|o| rig.deadline(&o.session.id)).collect();
    let (first, last) = (*deadlines.iter().min().unwrap(), *deadlines.iter().max().unwrap());
    println!("  their deadlines lie within {}", text(last.since(first)));
    assert!(since(last).is_zero(), "the deadline passed before it was waited for: a slow machine");
    clock::sleep_until(last.plus(Duration::from_secs(5)));
    let proofs: Vec<_> = loop {
        let views: Vec<SessionView> = rig.client.get("/v1/sessions").unwrap();
        let of = |opened: &Opened| {
            let view = views.iter().find(|view| view.id == opened.session.id)?;
            frozen(view)
        };
        if let Some(all) = fleet.iter().map(of).collect() {
            break all;
        }
        std::thread::sleep(Duration::from_millis(500));
    };
    let each = proofs.iter().zip(&deadlines).map(|(at, deadline)| at.since(*deadline)).collect();
    Samples::new(each).line("each from its own deadline to frozen proved");
    let all = proofs.iter().max().unwrap();
    println!(
        "  from the last deadline to the last proof {} (target < 1 s); from the first {}",
        text(all.since(last)),
        text(all.since(first)),
    );
}
