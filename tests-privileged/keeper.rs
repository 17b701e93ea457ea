//! The second line: what nobody renews is frozen, without an agent.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use overfence::keeper::PASS;
use overfence::kernel::cgroup::{Cgroup, Purpose, Stamp};
use overfence::kernel::clock;
use overfence::kernel::deadlines::{Deadline, Table};
use overfence::kernel::launch::{Fork, exit_now, fork};
use overfence::model::ids::{Generation, SessionId};
use overfence::model::time::BootNs;

use crate::agent_process::{Host, has, id_of, path_of};
use crate::host;

pub fn tests() -> Vec<host::Test> {
    macro_rules! tests {
        ($($name:ident),* $(,)?) => { vec![$(host::Test { name: stringify!($name), run: $name }),*] };
    }
    tests![
        i9_a_deadline_is_kept_without_an_agent,
        i3_a_fence_keeps_its_stamp_and_a_checkpoint_does_not,
        an_unreadable_entry_is_frozen_and_a_vanished_file_changes_nothing,
        of_a_torn_entry_the_whole_slot_counts,
        i3_a_thaw_that_the_keeper_undoes_first_is_recorded,
        i9_a_crowd_that_was_stopped_earlier_delays_no_deadline,
        i9_a_keeper_that_nobody_hears_freezes_all_the_same,
    ]
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < host::paced(Duration::from_secs(15)), "waited in vain: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// A keeper in a process of its own.
struct Keeper(Pid);

impl Keeper {
    /// Starts it; what it says goes to the file `keeper.log` beside the deadlines.
    fn start(deadlines: &Path) -> Self {
        match fork().unwrap() {
            Fork::Parent(pid) => Self(pid),
            Fork::Child => {
                let log = std::fs::File::create(deadlines.with_file_name("keeper.log")).unwrap();
                rustix::stdio::dup2_stderr(&log).unwrap();
                let Err(e) = overfence::keeper::run(deadlines);
                eprintln!("{e}");
                exit_now(1)
            }
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        kill(self.0, Signal::SIGKILL).unwrap();
        waitpid(self.0, None).unwrap();
    }
}

struct Session {
    cgroup: Cgroup,
    entry: Deadline,
    writer: std::process::Child,
}

impl Session {
    /// A cgroup with a process in it that counts, for ever.
    fn new(host: &host::Place, name: &str, deadline: BootNs) -> Self {
        let path = host.cgroup.join(name);
        let cgroup = Cgroup::create(&path).unwrap();
        let count = host.dir.join(name);
        let script = "echo $$ > $0/cgroup.procs; while :; do echo x >> $1; sleep 0.01; done";
        let writer = std::process::Command::new("/bin/sh")
            .arg("-c")
            .arg(script)
            .args([&path, &count])
            .spawn()
            .unwrap();
        until("the writer writes", || count.exists());
        let session = SessionId::fresh();
        let entry = Deadline { session, generation: Generation(3), deadline, cgroup: path };
        Self { cgroup, entry, writer }
    }

    fn frozen(&self) -> bool {
        self.cgroup.state().unwrap().is_frozen()
    }

    fn until(&mut self, table: &mut Table, deadline: BootNs) {
        self.entry.deadline = deadline;
        table.set(&self.entry).unwrap();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.writer.kill().unwrap();
        self.writer.wait().unwrap();
    }
}

fn soon(span: Duration) -> BootNs {
    clock::now().plus(span)
}

const LONG: Duration = Duration::from_secs(1000);

fn i9_a_deadline_is_kept_without_an_agent(host: &host::Place) {
    let path = host.dir.join("deadlines");
    // Before there is a file: it waits for one.
    let keeper = Keeper::start(&path);
    std::thread::sleep(PASS);
    let mut kept = Session::new(host, "kept", soon(LONG));
    let mut lost = Session::new(host, "lost", soon(LONG));
    let mut table = Table::create_or_open(&path).unwrap();
    kept.until(&mut table, soon(LONG));
    let deadline = soon(Duration::from_millis(730));
    lost.until(&mut table, deadline);

    clock::sleep_until(deadline.minus(Duration::from_millis(5)));
    let early = lost.frozen() && clock::now() < deadline;
    assert!(!early, "frozen before its deadline");
    until("it is frozen", || lost.frozen());
    let late = clock::now().since(deadline);
    println!("frozen {late:?} after the deadline");
    assert!(late < host::paced(Duration::from_secs(1)));
    let stamp = Stamp { purpose: Purpose::Deadline, generation: Generation(3) };
    assert_eq!(lost.cgroup.read_stamp().unwrap(), Some(stamp));
    assert!(!kept.frozen() && kept.cgroup.read_stamp().unwrap().is_none());

    // Whoever thaws it against its deadline has it for a pass.
    for _ in 0..3 {
        lost.cgroup.write_freeze(false).unwrap();
        let thawed = Instant::now();
        until("it is frozen again", || lost.frozen());
        let had = thawed.elapsed();
        assert!(had < PASS + host::paced(Duration::from_millis(200)), "it had {had:?}");
    }
    // Where it may, it is locked in memory; where it may not, it says so.
    let status = std::fs::read_to_string(format!("/proc/{}/status", keeper.0)).unwrap();
    let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap().trim();
    let said = std::fs::read_to_string(path.with_file_name("keeper.log")).unwrap();
    let may = caps::has_cap(None, caps::CapSet::Effective, caps::Capability::CAP_IPC_LOCK).unwrap();
    assert!(locked != "0 kB" || !may, "VmLck {locked}: {said}");
    assert!(locked != "0 kB" || said.contains("not locked in memory"), "VmLck {locked}: {said}");
    // Renewed and thawed, it runs; the keeper does not thaw by itself.
    lost.until(&mut table, soon(LONG));
    std::thread::sleep(PASS * 3);
    assert!(lost.frozen(), "the keeper thawed");
    lost.cgroup.write_freeze(false).unwrap();
    std::thread::sleep(PASS * 3);
    assert!(!lost.frozen(), "frozen although renewed");
    // Removed: nobody's business any more.
    let deadline = soon(host::paced(Duration::from_millis(500)));
    kept.until(&mut table, deadline);
    table.remove(kept.entry.session).unwrap();
    assert!(clock::now() < deadline, "too slow to remove it before its deadline");
    clock::sleep_until(deadline);
    std::thread::sleep(PASS * 3);
    assert!(!kept.frozen(), "frozen although removed");
    // And it passes again, without the one who wrote the file.
    lost.until(&mut table, soon(Duration::from_millis(50)));
    drop(table);
    until("it is frozen the second time", || lost.frozen());
    let said = || std::fs::read_to_string(path.with_file_name("keeper.log")).unwrap();
    let line = format!("frozen: {} generation 3", lost.entry.session);
    until("it says so", || said().matches(&line).count() == 2);
    std::thread::sleep(PASS * 3);
    assert_eq!(said().matches(&line).count(), 2, "once each time it passed: {}", said());
}

fn i3_a_fence_keeps_its_stamp_and_a_checkpoint_does_not(host: &host::Place) {
    let path = host.dir.join("deadlines");
    let mut table = Table::create_or_open(&path).unwrap();
    let mut sessions = vec![];
    for (name, purpose) in [("fenced", Purpose::Fence), ("captured", Purpose::Checkpoint)] {
        let session = Session::new(host, name, soon(Duration::ZERO));
        session.cgroup.stamp(&Stamp { purpose, generation: Generation(3) }).unwrap();
        table.set(&session.entry).unwrap();
        sessions.push(session);
    }
    let _keeper = Keeper::start(&path);
    until("both are frozen", || sessions.iter().all(Session::frozen));
    let purposes: Vec<Purpose> =
        sessions.iter().map(|s| s.cgroup.read_stamp().unwrap().unwrap().purpose).collect();
    assert_eq!(purposes, [Purpose::Fence, Purpose::Deadline]);
}

fn an_unreadable_entry_is_frozen_and_a_vanished_file_changes_nothing(host: &host::Place) {
    let path: PathBuf = host.dir.join("deadlines");
    let session = Session::new(host, "a", soon(LONG));
    let mut table = Table::create_or_open(&path).unwrap();
    table.set(&session.entry).unwrap();
    let keeper = Keeper::start(&path);
    std::thread::sleep(PASS * 3);
    assert!(!session.frozen(), "frozen although its entry is good");
    // Gone from the path: what is mapped still holds, and is not passed for that.
    std::fs::rename(&path, host.dir.join("away")).unwrap();
    std::thread::sleep(PASS * 3);
    assert!(!session.frozen(), "frozen because the file vanished");
    // Garbled where the deadline is, in the entry's only slot.
    let file = std::fs::File::options().write(true).open(host.dir.join("away")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0xff; 4], 4096 + 16).unwrap();
    until("what cannot be read is frozen", || session.frozen());
    let stamp = Stamp { purpose: Purpose::Deadline, generation: Generation::NONE };
    assert_eq!(session.cgroup.read_stamp().unwrap(), Some(stamp));
    drop(keeper);
}

/// Where the file has its first entry, and how long a slot is; see `kernel::deadlines`.
const HEADER: u64 = 4096;
const SLOT: u64 = 384;

/// An entry has two slots, written in turn; a crash tears one at most, a bad disk both.
fn of_a_torn_entry_the_whole_slot_counts(host: &host::Place) {
    let path: PathBuf = host.dir.join("deadlines");
    let mut table = Table::create_or_open(&path).unwrap();
    // The first slot of each is older. Only that of `lost` has passed.
    let (mut kept, mut lost) =
        (Session::new(host, "kept", soon(LONG)), Session::new(host, "lost", soon(LONG)));
    kept.until(&mut table, soon(LONG));
    lost.until(&mut table, soon(Duration::ZERO));
    kept.until(&mut table, soon(LONG));
    lost.until(&mut table, soon(LONG));
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let tear = |entry: u64, slot: u64| {
        let at = HEADER + (2 * entry + slot) * SLOT + 16;
        std::os::unix::fs::FileExt::write_all_at(&file, &[0xff; 4], at).unwrap();
    };
    let _keeper = Keeper::start(&path);
    std::thread::sleep(PASS * 3);
    assert!(!kept.frozen() && !lost.frozen(), "frozen although the newer slot is good");
    tear(0, 1);
    tear(1, 1);
    until("the older slot, which passed, counts", || lost.frozen());
    let stamp = Stamp { purpose: Purpose::Deadline, generation: Generation(3) };
    assert_eq!(lost.cgroup.read_stamp().unwrap(), Some(stamp));
    std::thread::sleep(PASS * 3);
    assert!(!kept.frozen(), "frozen although the older slot is good");
    // The next renewal takes the torn slot's place.
    kept.until(&mut table, soon(LONG));
    tear(0, 0);
    std::thread::sleep(PASS * 3);
    assert!(!kept.frozen(), "frozen although the slot written last is good");
    tear(0, 1);
    until("both are bad", || kept.frozen());
    let stamp = Stamp { purpose: Purpose::Deadline, generation: Generation::NONE };
    assert_eq!(kept.cgroup.read_stamp().unwrap(), Some(stamp));
}

fn i3_a_thaw_that_the_keeper_undoes_first_is_recorded(place: &host::Place) {
    let mut host = Host::new(place, "host");
    host.start_keeper();
    assert!(host.start(None), "{}", host.log());
    let id = id_of(&host.open("w", "60s"));
    // Who writes nothing and is there to be thawed.
    let sleeper = ["session", "exec", &id, "--", "sh", "-c", "sleep 1000 >/dev/null 2>&1 &"];
    assert!(host.run(&sleeper).status.success());
    host.must(&["fence", &id, "--reason", "test", "--wait"]);
    let cgroup = path_of(&host.until(&id, |v| has(v, "frozen")), "cgroup");
    let agent = Pid::from_raw(host.agent_pid().try_into().unwrap());
    kill(agent, Signal::SIGSTOP).unwrap();
    let stands = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap().contains(") T ")
    };
    let tasks = format!("/proc/{agent}/task");
    until("all of the agent stands", || std::fs::read_dir(&tasks).unwrap().all(stands));
    std::fs::write(cgroup.join("cgroup.freeze"), "0").unwrap();
    let frozen = || Cgroup::open(&cgroup).unwrap().unwrap().state().unwrap().is_frozen();
    until("the keeper freezes it again", frozen);
    kill(agent, Signal::SIGCONT).unwrap();
    let recorded = || {
        let entries = host.must(&["evidence", "show", "--session", &id]);
        let events = entries.as_array().unwrap().iter().map(|entry| &entry["detail"]["event"]);
        let seen: Vec<_> = events.filter(|event| event["event"] == "foreign_thaw").collect();
        seen.iter().any(|event| event["seen"].as_str().unwrap().contains("the keeper"))
    };
    until("the agent records it", recorded);
    assert!(frozen());
    host.must(&["preserved", "discard", &id, "--yes"]);
    host.stop();
}

/// The verb itself, in a process of its own.
struct Verb(Child);

impl Verb {
    fn start(host: &Host, out: impl Into<Stdio>, failpoints: Option<&str>) -> Self {
        let mut command = Command::new(&host.binary);
        command.arg("keeper").arg("--config").arg(&host.config);
        if let Some(plan) = failpoints {
            command.env("OVERFENCE_FAILPOINTS", plan);
        }
        Self(command.stdin(Stdio::null()).stderr(out).spawn().unwrap())
    }
}

impl Drop for Verb {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn table_of(host: &Host) -> Table {
    std::fs::create_dir_all(host.dir.join("run")).unwrap();
    Table::create_or_open(&host.dir.join("run/deadlines")).unwrap()
}

const CROWD: usize = 500;

fn i9_a_crowd_that_was_stopped_earlier_delays_no_deadline(place: &host::Place) {
    let host = Host::new(place, "host");
    let mut table = table_of(&host);
    // Entries before that of the one which passes last: a pass in the table's order comes to it in the end.
    let crowd: Vec<Cgroup> = (0..CROWD)
        .map(|n| {
            let cgroup = place.cgroup.join(format!("old{n}"));
            let (session, generation) = (SessionId::fresh(), Generation(1));
            let deadline = soon(Duration::ZERO);
            let entry = Deadline { session, generation, deadline, cgroup: cgroup.clone() };
            table.set(&entry).unwrap();
            Cgroup::create(&cgroup).unwrap()
        })
        .collect();
    let points = host.dir.join("points");
    let plan = format!("log={}", points.display());
    let _keeper = Verb::start(&host, Stdio::null(), Some(&plan));
    until("all are stopped", || crowd.iter().all(|cgroup| cgroup.wish().unwrap()));
    let writes = || {
        let log = std::fs::read_to_string(&points).unwrap();
        log.lines().filter(|line| line.contains("keeper.freeze.before")).count()
    };
    let stands = || {
        let before = writes();
        std::thread::sleep(PASS * 5);
        assert_eq!(writes(), before, "what stands was written again");
        before
    };
    assert_eq!(stands(), CROWD);
    let mut lost = Session::new(place, "lost", soon(LONG));
    let mut late = Vec::new();
    for _ in 0..5 {
        let deadline = soon(PASS * 10 + host::paced(Duration::from_millis(330)));
        lost.until(&mut table, deadline);
        // A pass that read the earlier entry would freeze it: until none does any more.
        let quiet = clock::now().plus(PASS * 4);
        while clock::now() < quiet {
            if lost.cgroup.wish().unwrap() {
                lost.cgroup.write_freeze(false).unwrap();
            }
            std::thread::sleep(PASS / 10);
        }
        until("the one more is frozen", || lost.frozen());
        let now = clock::now();
        assert!(now >= deadline, "frozen before its deadline");
        late.push(now.since(deadline));
        stands();
    }
    println!("beside {CROWD} that were stopped earlier, after the deadline: {late:?}");
    assert!(late.iter().all(|late| *late < host::paced(Duration::from_secs(2))), "{late:?}");
    // One of the crowd that somebody thaws has that for one pass, and a new one in its place is stopped.
    crowd[7].write_freeze(false).unwrap();
    until("it is frozen again", || crowd[7].wish().unwrap());
    assert!(crowd[7].last_thaw().unwrap().is_some(), "it was not written down");
    stands();
    let path = crowd[8].path().to_owned();
    std::fs::remove_dir(&path).unwrap();
    std::thread::sleep(PASS * 2);
    let anew = Cgroup::create(&path).unwrap();
    until("the new one is stopped", || anew.wish().unwrap());
    let stamp = Stamp { purpose: Purpose::Deadline, generation: Generation(1) };
    until("it is stamped", || anew.read_stamp().unwrap() == Some(stamp));
    stands();
}

fn i9_a_keeper_that_nobody_hears_freezes_all_the_same(place: &host::Place) {
    let full = || Stdio::from(std::fs::File::options().write(true).open("/dev/full").unwrap());
    let (_unread, stuck) = std::io::pipe().unwrap();
    // Full to the last byte, so that the next one waits.
    rustix::io::ioctl_fionbio(&stuck, true).unwrap();
    while rustix::io::write(&stuck, b"x").is_ok() {}
    rustix::io::ioctl_fionbio(&stuck, false).unwrap();
    let (gone, nobody) = std::io::pipe().unwrap();
    drop(gone);
    for (name, out) in [("full", full()), ("stuck", stuck.into()), ("nobody", nobody.into())] {
        let host = Host::new(place, name);
        let mut table = table_of(&host);
        let mut keeper = Verb::start(&host, out, None);
        for n in 0..3 {
            let deadline = soon(host::paced(Duration::from_millis(300)));
            let session = Session::new(place, &format!("{name}{n}"), deadline);
            table.set(&session.entry).unwrap();
            until("it is frozen", || session.frozen());
            println!("{name}: frozen {:?} after the deadline", clock::now().since(deadline));
        }
        assert_eq!(keeper.0.try_wait().unwrap(), None, "{name}: the keeper ended");
    }
}
