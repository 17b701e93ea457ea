//! Gigabytes of somebody else's dirty data on the file system of the uppers: making an overlay
//! read-only syncs all of them. Freezing, renewing and asking are measured without them, and while
//! such a sync is under way.

use std::fs::{self, File};
use std::io::{Seek as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use overfence::kernel::clock;
use overfence::model::facts::Fact;
use overfence::model::time::BootNs;
use overfence::model::view::{Fenced, Opened, SessionView, StatusView};
use serde_json::json;

use crate::figures::{Samples, heading, ratio, text};
use crate::host::Place;
use crate::rig::{Rig, Sleepers, since};

const N: usize = 100;
const GIB: u64 = 1 << 30;
/// Written again and again, and never synced by who writes it.
const DIRTY: u64 = 3 * GIB;
const LONG: Duration = Duration::from_secs(3600);
/// Of the session that is renewed all the time; its deadline is what a late renewal would meet.
const TTL: Duration = Duration::from_secs(3);

pub fn run(place: &Place) {
    let rig = Rig::new(place);
    let mut sleepers = Sleepers::default();
    let mut open = |name: &str| -> Opened {
        let opened = rig.open(name, LONG, None);
        sleepers.add_to(&opened.session);
        opened
    };
    let [quiet, beside]: [Vec<Opened>; 2] =
        ["quiet", "dirty"].map(|kind| (0..N).map(|i| open(&format!("{kind}-{i}"))).collect());
    let syncing = open("syncing");
    let renewed = rig.open_for("process", "renewed", TTL, None);
    let sign = rig.inside(&renewed.session.id).with_file_name("init.beat");
    let sign = File::create(sign).unwrap();
    let over = AtomicBool::new(false);
    let written = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let _end = EndOf(&over);
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                sign.write_all_at(&clock::now().0.to_ne_bytes(), 0).unwrap();
                std::thread::sleep(TTL / 10);
            }
        });
        heading("no dirty data");
        let before = measure(&rig, &quiet);
        scope.spawn(|| dirty(&place.dir.join("dirty"), &over, &written));
        while written.load(Ordering::Relaxed) < 2 * GIB {
            std::thread::sleep(Duration::from_millis(20));
        }
        let (begun, now) = (Instant::now(), dirty_now());
        let _: Fenced = rig.post(&syncing.session.id, "fence", &json!({ "to": "read-only" }));
        let waits = || !has(&rig.session(&syncing.session.id), Fact::ReadOnly);
        heading(&format!(
            "{:.1} GiB dirty, read-only of another session asked",
            now as f64 / GIB as f64
        ));
        let still_before = waits();
        let after = measure(&rig, &beside);
        let still_after = waits();
        println!(
            "  that session was {} as the measurement began and {} as it ended",
            word(still_before),
            word(still_after)
        );
        while waits() {
            std::thread::sleep(Duration::from_millis(20));
        }
        println!("  read-only was proved {} after it was asked for", text(begun.elapsed()));
        for (what, (quiet, beside)) in WHAT.iter().zip(before.iter().zip(&after)) {
            println!("  {what}: {:.2} x the median without", ratio(beside.p(50), quiet.p(50)));
        }
        let view = rig.session(&renewed.session.id);
        println!(
            "  the session of TTL {TTL:?} is {} in generation {}; {} renewal(s) without an answer",
            view.state,
            view.generation,
            missed(&rig)
        );
    });
}

/// Ends the threads, also when something panics.
struct EndOf<'o>(&'o AtomicBool);

impl Drop for EndOf<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn word(waits: bool) -> &'static str {
    if waits { "not read-only yet" } else { "read-only" }
}

fn has(view: &SessionView, fact: Fact) -> bool {
    view.facts.iter().any(|f| f.fact == fact)
}

fn missed(rig: &Rig) -> String {
    let text = rig.host.http("GET", "/metrics", "").body;
    let name = "overfence_lease_renewal_failures_total ";
    text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("?").to_owned()
}

/// What the kernel has to write yet.
fn dirty_now() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let of = |key: &str| -> u64 {
        let line = text.lines().find(|line| line.starts_with(key)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    (of("Dirty:") + of("Writeback:")) * 1024
}

fn dirty(path: &Path, over: &AtomicBool, written: &AtomicU64) {
    let mut file = File::create(path).unwrap();
    let block = vec![0x5a; 4 << 20];
    while !over.load(Ordering::Relaxed) {
        if file.stream_position().unwrap() >= DIRTY {
            file.rewind().unwrap();
        }
        file.write_all(&block).unwrap();
        written.fetch_add(block.len() as u64, Ordering::Relaxed);
    }
}

const WHAT: [&str; 3] = ["fence to frozen", "session inspect", "status"];

fn measure(rig: &Rig, sessions: &[Opened]) -> [Samples; 3] {
    let (mut fence, mut inspect, mut status) = (vec![], vec![], vec![]);
    for opened in sessions {
        let id = &opened.session.id;
        let asked = clock::now();
        let fenced: Fenced = rig.post(id, "fence", &json!({ "to": "frozen" }));
        let proof = fenced.session.facts.iter().find(|f| f.fact == Fact::Frozen);
        let proof = proof.map(|f| BootNs(f.boot_ns));
        // An idle process is frozen at once; one that is not counts until it is seen to be.
        fence.push(proof.unwrap_or_else(|| until_frozen(rig, id)).since(asked));
        let asked = clock::now();
        let _ = rig.session(id);
        inspect.push(since(asked));
        let asked = clock::now();
        let _: StatusView = rig.client.get("/v1/status").unwrap();
        status.push(since(asked));
    }
    let all = [fence, inspect, status].map(Samples::new);
    for (what, samples) in WHAT.iter().zip(&all) {
        samples.line(&format!("{what}, through the API"));
    }
    all
}

fn until_frozen(rig: &Rig, id: &str) -> BootNs {
    loop {
        if let Some(at) = crate::rig::frozen(&rig.session(id)) {
            return at;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
