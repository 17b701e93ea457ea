//! From a lost lease to the proof of the freeze, for an idle process.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

use overfence::kernel::{clock, launch};
use overfence::model::time::BootNs;
use overfence::model::view::{Fenced, Opened};
use serde_json::json;

use crate::figures::{Samples, heading, ratio, text};
use crate::host::Place;
use crate::rig::{Rig, Sleepers, since};

/// Everything is measured this often over, so that one bad moment of the machine shows.
const ROUNDS: usize = 3;
const N: usize = 200;
/// Sessions whose deadlines come one after the other, this far apart. So few that the last is open
/// before the first deadline: putting a process into a cgroup holds the kernel's lock of all cgroups
/// for some milliseconds, which every freeze then waits for.
const WAVE: usize = 10;
const APART: Duration = Duration::from_millis(40);
/// The shortest there is; the margin is 100 ms of it.
const TTL: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(3600);

pub fn run(place: &Place) {
    let rig = Rig::new(place);
    let mut medians = Vec::new();
    for round in 1..=ROUNDS {
        heading(&format!("lease lost -> frozen proved, idle process, round {round} of {ROUNDS}"));
        let (plain, timed) = bare(place);
        let by_deadline = Samples::new(by_deadline(&rig));
        let by_fence = Samples::new(by_request(&rig, |rig, opened| {
            let wish = json!({ "reason": "bench" });
            rig.post::<Fenced>(&opened.session.id, "fence", &wish)
        }));
        let by_revocation = Samples::new(by_request(&rig, |rig, opened| {
            let place = format!("/v1/leases/{}/revoke", opened.session.lease);
            rig.client.post::<Fenced>(&place, &json!({})).unwrap()
        }));
        plain.line("bare: write cgroup.freeze, read cgroup.events until frozen");
        timed.line("bare: the same by a SCHED_FIFO thread, from its timer's instant");
        by_deadline.line("from the local deadline (target p99 < 1 ms)");
        by_fence.line("from just before the call of `fence`");
        by_revocation.line("from just before the call of `lease revoke`");
        println!(
            "  medians: deadline {:.1} x the bare timer and freeze, fence {:.1} x, revoke {:.1} x the bare freeze",
            ratio(by_deadline.p(50), timed.p(50)),
            ratio(by_fence.p(50), plain.p(50)),
            ratio(by_revocation.p(50), plain.p(50)),
        );
        medians.push([by_deadline, by_fence, by_revocation].map(|s| s.p(50)));
    }
    for (i, what) in ["deadline", "fence", "revoke"].iter().enumerate() {
        let best = medians.iter().map(|m| m[i]).min().unwrap();
        println!("  {what}: smallest median of {ROUNDS} rounds {}", text(best));
    }
}

/// A cgroup with its control files open.
struct Bare {
    freeze: File,
    events: File,
}

impl Bare {
    fn open(dir: &Path) -> Self {
        let freeze = File::options().write(true).open(dir.join("cgroup.freeze")).unwrap();
        Self { freeze, events: File::open(dir.join("cgroup.events")).unwrap() }
    }

    fn set(&self, wish: &[u8], answer: &str) {
        self.freeze.write_at(wish, 0).unwrap();
        let mut buffer = [0; 64];
        loop {
            let len = self.events.read_at(&mut buffer, 0).unwrap();
            if std::str::from_utf8(&buffer[..len]).unwrap().contains(answer) {
                return;
            }
        }
    }
}

/// The floor: the system calls alone, at once and from a timer.
fn bare(place: &Place) -> (Samples, Samples) {
    let dir = place.cgroup.join("bare");
    std::fs::create_dir_all(&dir).unwrap();
    let mut sleepers = Sleepers::default();
    sleepers.add(&dir);
    let cgroup = Bare::open(&dir);
    let freeze_from = |then: BootNs| {
        cgroup.set(b"1", "frozen 1");
        let took = since(then);
        cgroup.set(b"0", "frozen 0");
        took
    };
    let plain = (0..N)
        .map(|_| {
            std::thread::sleep(Duration::from_millis(2));
            freeze_from(clock::now())
        })
        .collect();
    let timed = std::thread::scope(|scope| {
        let timer = scope.spawn(|| {
            // Refused where root has no real-time time; then the agent's timer has none either.
            let _ = launch::schedule_fifo(10);
            let mut all = Vec::new();
            for _ in 0..N {
                let then = clock::now().plus(Duration::from_millis(5));
                clock::sleep_until(then);
                all.push(freeze_from(then));
            }
            all
        });
        timer.join().unwrap()
    });
    (Samples::new(plain), Samples::new(timed))
}

/// Nobody beats: each lease runs out by itself.
fn by_deadline(rig: &Rig) -> Vec<Duration> {
    let mut all = Vec::new();
    while all.len() < N {
        let mut sleepers = Sleepers::default();
        let wave: Vec<_> = (0..WAVE)
            .map(|i| {
                let opened = rig.open(&format!("deadline-{i}"), TTL, None);
                sleepers.add_to(&opened.session);
                std::thread::sleep(APART);
                (rig.deadline(&opened.session.id), opened.session.id)
            })
            .collect();
        // The sessions are left alone until all of them are fenced.
        let last = wave.iter().map(|(deadline, _)| *deadline).max().unwrap();
        clock::sleep_until(last.plus(APART));
        // A whole host's leases are lost within a minute here, on purpose.
        rig.close_breaker();
        for (deadline, id) in wave {
            all.push(rig.frozen_then_discard(&id).since(deadline));
        }
    }
    all
}

/// Somebody asks for it, through the API.
fn by_request(rig: &Rig, ask: impl Fn(&Rig, &Opened) -> Fenced) -> Vec<Duration> {
    let mut all = Vec::new();
    for i in 0..N {
        let opened = rig.open(&format!("request-{}", i % WAVE), LONG, None);
        let mut sleepers = Sleepers::default();
        sleepers.add_to(&opened.session);
        let asked = clock::now();
        ask(rig, &opened);
        all.push(rig.frozen_then_discard(&opened.session.id).since(asked));
    }
    all
}
