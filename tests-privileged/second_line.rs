//! Agent and keeper beside each other: each does the other's work when it is dead, stopped or starved.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use overfence::kernel::clock;
use overfence::model::time::BootNs;
use serde_json::Value;

use crate::agent_process::{Host, has, id_of, path_of};
use crate::host::{Place, Test, paced, paced_ttl};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "without_a_keeper_the_agent_fences", run: agent_alone },
        Test { name: "i9_both_killed_and_the_keeper_back_first", run: keeper_first },
        Test { name: "i9_both_killed_and_the_agent_back_first", run: agent_first },
        Test { name: "i9_a_stopped_agent_is_no_reprieve", run: stopped },
        Test { name: "i9_a_starved_agent_is_no_reprieve", run: starved },
    ]
}

/// One session that nobody beats for, and a process in it that counts.
struct Lost {
    id: String,
    freeze: PathBuf,
    events: PathBuf,
    count: PathBuf,
    deadline: BootNs,
    writer: Child,
}

impl Lost {
    fn open(host: &Host, ttl: u64) -> Self {
        let opened = host.open("w", &paced_ttl(ttl));
        let (id, view) = (id_of(&opened), &opened["session"]);
        let (cgroup, merged) = (path_of(view, "cgroup"), path_of(view, "merged"));
        let count = merged.with_file_name("upper").join("count");
        let script =
            "echo $$ > $0/cgroup.procs; cd $1; while :; do echo x >> count; sleep 0.01; done";
        let writer = Command::new("/bin/sh")
            .args(["-c".as_ref(), script.as_ref(), cgroup.as_os_str(), merged.as_os_str()])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        until("the writer writes", || count.exists());
        let shown = host.dir.join("run/sessions").join(&id).join("inside/session.json");
        let shown: Value = serde_json::from_slice(&std::fs::read(shown).unwrap()).unwrap();
        Self {
            id,
            freeze: cgroup.join("cgroup.freeze"),
            events: cgroup.join("cgroup.events"),
            count,
            deadline: BootNs(shown["deadline"].as_u64().unwrap()),
            writer,
        }
    }

    fn frozen(&self) -> bool {
        read(&self.events).contains("frozen 1")
    }

    /// Waits for the freeze; how long after the deadline it was seen.
    fn late(&self) -> Duration {
        // By a thread that no hog keeps from looking, where the host gives real-time time.
        let look = || {
            let _ = overfence::kernel::launch::schedule_fifo(60);
            self.look()
        };
        std::thread::scope(|scope| scope.spawn(look).join().unwrap())
    }

    fn look(&self) -> Duration {
        clock::sleep_until(self.deadline.minus(Duration::from_millis(20)));
        let early = self.frozen() && clock::now() < self.deadline;
        assert!(!early, "frozen before its deadline");
        until("it is frozen", || self.frozen());
        let late = clock::now().since(self.deadline);
        eprintln!("frozen {late:?} after the deadline");
        late
    }

    fn written(&self) -> u64 {
        std::fs::metadata(&self.count).unwrap().len()
    }

    /// Nothing is written any more.
    fn still(&self) {
        let before = self.written();
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(self.written(), before, "it writes on");
    }
}

impl Drop for Lost {
    fn drop(&mut self) {
        let _ = self.writer.kill();
        let _ = std::fs::write(&self.freeze, "0");
        let _ = self.writer.wait();
    }
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < paced(Duration::from_secs(30)), "waited in vain: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// What a host bears whose processors others want, too; how late it is on a quiet one the bench says.
fn bearable() -> Duration {
    paced(Duration::from_millis(500))
}

fn agent_alone(place: &Place) {
    let mut host = Host::new(place, "h");
    host.start_keeper();
    assert!(host.start(None));
    let lost = Lost::open(&host, 2);
    host.kill_keeper();
    assert!(lost.late() < bearable());
    let view = host.until(&lost.id, |v| has(v, "frozen"));
    assert!(view["loss"].as_str().unwrap().contains("no sign of life"), "{view:#}");
    lost.still();
    // It comes back, and finds what it would have done.
    host.start_keeper();
    std::fs::write(&lost.freeze, "0").unwrap();
    until("it is frozen again", || lost.frozen());
}

fn keeper_first(place: &Place) {
    let mut host = Host::new(place, "h");
    host.start_keeper();
    assert!(host.start(None));
    let lost = Lost::open(&host, 3);
    host.stop();
    clock::sleep_until(lost.deadline.plus(Duration::from_millis(300)));
    // Nobody was there to see it pass: that is what is left when both are dead.
    assert!(!lost.frozen(), "who froze it?");
    let begun = Instant::now();
    host.start_keeper();
    until("the keeper freezes it", || lost.frozen());
    eprintln!("frozen {:?} after the keeper was started", begun.elapsed());
    lost.still();
    assert!(host.start(None));
    fenced_or_resumed(&host, &lost);
}

fn agent_first(place: &Place) {
    let mut host = Host::new(place, "h");
    host.start_keeper();
    assert!(host.start(None));
    let lost = Lost::open(&host, 3);
    host.stop();
    clock::sleep_until(lost.deadline.plus(Duration::from_millis(300)));
    assert!(!lost.frozen(), "who froze it?");
    assert!(host.start(None));
    // Everything stale is frozen before the agent says that it is ready.
    fenced_or_resumed(&host, &lost);
    host.start_keeper();
}

/// Either it stands, or it runs under a new generation; never under the one that ran out.
fn fenced_or_resumed(host: &Host, lost: &Lost) {
    // An agent that got no time until now has to come to it.
    until("the end of its lease is in the evidence", || {
        let entries = host.must(&["evidence", "show", "--session", &lost.id]);
        let mut events = entries.as_array().unwrap().iter().map(|e| &e["detail"]["event"]["event"]);
        events.any(|event| ["frozen", "lease_lost", "recovered"].iter().any(|end| event == end))
    });
    let view = host.until(&lost.id, |v| has(v, "frozen") || v["generation"] == 2);
    if view["generation"] == 1 {
        assert_ne!(view["state"], "ACTIVE", "{view:#}");
        assert_eq!(view["may_publish"], false);
    }
}

fn signal(pid: u32, signal: nix::sys::signal::Signal) {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
    nix::sys::signal::kill(pid, signal).unwrap();
}

/// Stopped as by a debugger, or by a host that is suspended in parts.
fn stopped(place: &Place) {
    let mut host = Host::new(place, "h");
    host.start_keeper();
    assert!(host.start(None));
    let lost = Lost::open(&host, 2);
    signal(host.agent_pid(), nix::sys::signal::Signal::SIGSTOP);
    assert!(lost.late() < bearable());
    lost.still();
    clock::sleep_until(lost.deadline.plus(paced(Duration::from_secs(1))));
    assert!(lost.frozen());
    signal(host.agent_pid(), nix::sys::signal::Signal::SIGCONT);
    fenced_or_resumed(&host, &lost);
}

/// So many others want the processors, and the agent gets only what nobody wants.
const HOGS: usize = 40;

fn starved(place: &Place) {
    let mut host = Host::new(place, "h");
    host.start_keeper();
    assert!(host.start(None));
    let lost = Lost::open(&host, 6);
    let pid = host.agent_pid().to_string();
    let idle = Command::new("chrt").args(["--all-tasks", "--idle", "--pid", "0", &pid]).status();
    assert!(idle.unwrap().success());
    let cgroup = place.cgroup.join("hogs");
    std::fs::create_dir(&cgroup).unwrap();
    let mut hogs: Vec<_> = (0..HOGS)
        .map(|_| {
            Command::new("/bin/sh")
                .args(["-c", "echo $$ > \"$1/cgroup.procs\"; while :; do :; done", "sh"])
                .arg(&cgroup)
                .spawn()
                .unwrap()
        })
        .collect();
    let late = lost.late();
    lost.still();
    for hog in &mut hogs {
        hog.kill().unwrap();
    }
    for hog in &mut hogs {
        hog.wait().unwrap();
    }
    assert!(late < bearable(), "{late:?}");
    fenced_or_resumed(&host, &lost);
}
