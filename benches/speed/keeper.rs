//! How late the keeper freezes with the agent killed, idle and beside many processes that want the
//! processor: until its wish is written, and until the kernel has done it.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use overfence::kernel::{clock, launch};
use overfence::model::time::BootNs;

use crate::engines::count;
use crate::figures::{Samples, heading, text};
use crate::host::Place;
use crate::rig::{Rig, Sleepers};

const WAVES: usize = 3;
const N: usize = 100;
const HOGS: usize = 400;
/// Long enough to open all and to start the hogs before the first deadline.
const TTL: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_micros(100);

pub fn run(place: &Place) {
    for hogs in [0, HOGS] {
        heading(&format!(
            "keeper alone, agent killed, {hogs} CPU hogs, seen by a SCHED_FIFO watcher"
        ));
        let mut all = Late::default();
        for wave in 0..WAVES {
            let Late { written, frozen } = lateness(place, &format!("k{hogs}-{wave}"), hogs);
            all.written.extend(written);
            all.frozen.extend(frozen);
        }
        let (written, frozen) = (Samples::new(all.written), Samples::new(all.frozen));
        written.line("deadline to `freeze 1`: the keeper (target p99 < 5 ms)");
        frozen.line("deadline to `frozen 1`: the kernel's part in it");
        println!("  p99 {} of 5 ms", text(written.p(99)));
    }
}

/// How long after its deadline something was seen, once a session.
#[derive(Default)]
struct Late {
    /// The wish in `cgroup.freeze`: how late the keeper is.
    written: Vec<Duration>,
    /// `frozen 1` in `cgroup.events`: until the kernel got to all processes.
    frozen: Vec<Duration>,
}

/// One session's two files.
struct Watched {
    at: BootNs,
    /// `None` once it was seen.
    wish: Option<File>,
    events: File,
}

fn lateness(place: &Place, name: &str, hogs: usize) -> Late {
    let mut rig = Rig::named(place, name);
    // What it says goes to memory, too: this is not about a disk.
    let log = rig.host.dir.join("keeper.log");
    std::os::unix::fs::symlink(rig.host.dir.join("run/keeper.log"), log).unwrap();
    rig.host.start_keeper();
    let mut sleepers = Sleepers::default();
    let sessions: Vec<_> = (0..N)
        .map(|i| {
            let opened = rig.open(&format!("w{i}"), TTL, None);
            sleepers.add_to(&opened.session);
            (rig.deadline(&opened.session.id), opened.session.cgroup.path().unwrap())
        })
        .collect();
    let hogs = Hogs::new(place, hogs);
    rig.host.kill_agent();
    hogs.begin();
    let first = sessions.iter().map(|(at, _)| *at).min().unwrap();
    assert!(clock::now() < first, "a deadline passed before the agent was killed: a slow machine");
    let files: Vec<_> = sessions
        .iter()
        .map(|(at, cgroup)| {
            let open = |name| File::open(cgroup.join(name)).unwrap();
            Watched { at: *at, wish: Some(open("cgroup.freeze")), events: open("cgroup.events") }
        })
        .collect();
    let late = std::thread::scope(|scope| scope.spawn(|| watch(files)).join().unwrap());
    drop(hogs);
    rig.host.stop();
    late
}

/// Above the keeper's priority, and asleep nearly always: what it reads is not what it delays.
fn watch(mut left: Vec<Watched>) -> Late {
    if launch::schedule_fifo(60).is_err() {
        println!("  no real-time scheduling here: the watcher itself may be late");
    }
    let mut late = Late::default();
    let mut buffer = [0; 64];
    let end = clock::now().plus(TTL * 2);
    while !left.is_empty() {
        assert!(clock::now() < end, "{} of {N} were never frozen", left.len());
        // Only those whose time has come or is about to.
        let soon = clock::now().plus(Duration::from_millis(2));
        left.retain_mut(|Watched { at, wish, events }| {
            if *at > soon {
                return true;
            }
            let since = || {
                let now = clock::now();
                assert!(now >= *at, "stopped before its deadline");
                now.since(*at)
            };
            if let Some(file) = wish {
                let len = file.read_at(&mut buffer, 0).unwrap();
                if buffer[..len].starts_with(b"1") {
                    late.written.push(since());
                    *wish = None;
                }
            }
            let len = events.read_at(&mut buffer, 0).unwrap();
            let frozen = buffer[..len].windows(8).any(|w| w == b"frozen 1");
            if frozen {
                late.frozen.push(since());
                // Written and done between the two reads.
                late.written.extend(wish.take().map(|_| since()));
            }
            !frozen
        });
        std::thread::sleep(LOOK);
    }
    late
}

/// Processes that want the processor all the time, in a cgroup of their own, which is frozen until they
/// are to begin; ended by pid.
struct Hogs {
    cgroup: PathBuf,
    all: Vec<Child>,
}

impl Hogs {
    fn new(place: &Place, n: usize) -> Self {
        let cgroup = place.cgroup.join("hogs");
        fs::create_dir_all(&cgroup).unwrap();
        fs::write(cgroup.join("cgroup.freeze"), "1").unwrap();
        let start = |_| {
            Command::new("/bin/sh")
                .args(["-c", "echo $$ > \"$1\"; while :; do :; done", "sh"])
                .arg(cgroup.join("cgroup.procs"))
                .stdin(Stdio::null())
                .spawn()
                .unwrap()
        };
        let hogs = Self { all: (0..n).map(start).collect(), cgroup };
        while count(&hogs.cgroup) < n {
            std::thread::sleep(Duration::from_millis(1));
        }
        hogs
    }

    fn begin(&self) {
        fs::write(self.cgroup.join("cgroup.freeze"), "0").unwrap();
    }
}

impl Drop for Hogs {
    fn drop(&mut self) {
        for hog in &mut self.all {
            let _ = hog.kill();
        }
        for hog in &mut self.all {
            let _ = hog.wait();
        }
    }
}
