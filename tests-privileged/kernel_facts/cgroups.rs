//! Freezing, killing, stamps, and the deadlines that cause them.

use super::*;

pub(super) fn tests() -> Vec<Test> {
    tests![
        a_freeze_is_proved_at_once_and_foreign_thaws_show,
        a_call_in_progress_ends_before_frozen,
        a_frozen_task_is_killed,
        stamps_stay_on_the_cgroup,
        removal_takes_nested_cgroups_and_spares_populated_ones,
        the_events_watch_sees_thaws_and_emptied_cgroups,
        deadlines_are_read_by_another_process,
        a_deadline_file_has_one_writer_and_survives_it,
        what_a_real_time_thread_starts_is_not_real_time,
    ]
}

fn deadline(n: u64, cgroup: &Path) -> Deadline {
    Deadline {
        session: SessionId::from_u128(n.into()),
        generation: Generation(n),
        deadline: clock::now(),
        cgroup: cgroup.to_owned(),
    }
}

fn a_freeze_is_proved_at_once_and_foreign_thaws_show(place: &Place) {
    let cgroup = sealed(place);
    let _child = Child::start(Some(&cgroup), || {});
    let mut times = Vec::new();
    for _ in 0..50 {
        let proof = proved(cgroup.freeze(seconds(2)).unwrap());
        assert!(proof.answer.starts_with("freeze 1, frozen 1"), "{proof:?}");
        times.push(proof.took_us);
        assert!(cgroup.state().unwrap().is_frozen());
        proved(cgroup.thaw(seconds(2)).unwrap());
        assert!(!cgroup.state().unwrap().is_frozen());
        // Lets the task leave the freezer's trap; while it is in it, freezing again is free.
        std::thread::sleep(Duration::from_millis(2));
    }
    times.sort_unstable();
    println!("freeze of one idle process: median {} us, worst {} us", times[25], times[49]);
    assert!(times[25] < 5_000, "median {} us", times[25]);
    let empty = Cgroup::create(&place.cgroup.join("empty")).unwrap();
    proved(empty.freeze(seconds(1)).unwrap());
}

fn a_call_in_progress_ends_before_frozen(place: &Place) {
    let cgroup = sealed(place);
    let out = place.dir.join("big");
    // One write of 256 MiB takes many milliseconds; a freeze in its middle waits for all of it.
    let size = 256 << 20;
    let _child = Child::run(Some(&cgroup), || {
        let bytes = vec![1u8; size];
        let file = std::fs::File::create(&out).unwrap();
        move || {
            rustix::io::write(&file, &bytes).unwrap();
            loop {
                nix::unistd::pause();
            }
        }
    });
    let idle = Child::start(Some(&cgroup), || {});
    while std::fs::metadata(&out).unwrap().len() == 0 {
        std::thread::yield_now();
    }
    let before = std::fs::metadata(&out).unwrap().len();
    let late = cgroup.freeze(Duration::from_millis(5)).unwrap();
    if let Outcome::Late(blockers) = &late {
        let pids: Vec<u32> = blockers.iter().map(|b| b.pid).collect();
        assert!(!pids.contains(&idle.pid()), "a frozen task is named: {blockers:?}");
    }
    proved(cgroup.freeze(seconds(30)).unwrap());
    let after = std::fs::metadata(&out).unwrap().len();
    println!("size when asked {before}, when frozen {after}, at first {late:?}");
    assert_eq!(after, size as u64, "frozen in the middle of a write, which began at {before}");
    assert!(cgroup.state().unwrap().is_frozen());
}

fn a_frozen_task_is_killed(place: &Place) {
    let cgroup = sealed(place);
    let child = Child::start(Some(&cgroup), || {});
    proved(cgroup.freeze(seconds(2)).unwrap());
    assert_eq!(cgroup.procs().unwrap(), [child.pid()]);
    let pidfd = ns::pidfd(child.pid()).unwrap();
    assert!(ns::is_alive(&pidfd).unwrap());
    let proof = proved(cgroup.kill(seconds(5)).unwrap());
    assert!(proof.answer.ends_with("populated 0"), "{proof:?}");
    assert!(!ns::is_alive(&pidfd).unwrap());
}

fn stamps_stay_on_the_cgroup(place: &Place) {
    let cgroup = sealed(place);
    assert_eq!(cgroup.read_stamp().unwrap(), None);
    for purpose in [Purpose::Checkpoint, Purpose::Fence] {
        let stamp = Stamp { purpose, generation: Generation(7) };
        cgroup.stamp(&stamp).unwrap();
        assert_eq!(sealed(place).read_stamp().unwrap(), Some(stamp));
    }
    let digest = overfence::model::head::Digest([7; 32]);
    cgroup.set_ticket(&digest).unwrap();
    cgroup.clear_stamp().unwrap();
    cgroup.clear_stamp().unwrap();
    assert_eq!(sealed(place).read_stamp().unwrap(), None);
    assert_eq!(sealed(place).ticket().unwrap(), Some(digest));
    rustix::fs::setxattr(
        &place.cgroup,
        "trusted.overfence.stamp",
        b"pause 1",
        rustix::fs::XattrFlags::empty(),
    )
    .unwrap();
    assert!(matches!(cgroup.read_stamp(), Err(Error::Garbled { .. })));
}

fn removal_takes_nested_cgroups_and_spares_populated_ones(place: &Place) {
    let outer = Cgroup::create(&place.cgroup.join("outer")).unwrap();
    let inner = Cgroup::create(&place.cgroup.join("outer/inner")).unwrap();
    let child = Child::start(Some(&inner), || {});
    assert_eq!(outer.procs().unwrap(), [child.pid()]);
    let again = Cgroup::open(outer.path()).unwrap().unwrap();
    let refused = again.remove(Duration::from_millis(5)).unwrap_err();
    assert_eq!(refused.errno(), Some(Errno::BUSY), "{refused}");
    proved(outer.kill(seconds(5)).unwrap());
    drop(child);
    outer.remove(seconds(5)).unwrap();
    assert!(Cgroup::open(&place.cgroup.join("outer")).unwrap().is_none());
}

fn the_events_watch_sees_thaws_and_emptied_cgroups(place: &Place) {
    let events = CgroupEvents::new().unwrap();
    let (a, b) = (SessionId::from_u128(1), SessionId::from_u128(2));
    let make = |name| Cgroup::create(&place.cgroup.join(name)).unwrap();
    let (first, second) = (make("first"), make("second"));
    events.add(a, &first).unwrap();
    events.add(b, &second).unwrap();
    let woken = || {
        let until = Some(clock::now().plus(seconds(2)));
        assert!(events.wait(until).unwrap(), "no event came");
        events.woken().unwrap()
    };
    let child = Child::start(Some(&first), || {});
    assert_eq!(woken(), [a], "populated");
    proved(first.freeze(seconds(2)).unwrap());
    assert_eq!(woken(), [a], "frozen");
    // Somebody else thaws it.
    std::fs::write(first.path().join("cgroup.freeze"), "0").unwrap();
    assert_eq!(woken(), [a], "thawed");
    assert!(!first.state().unwrap().is_frozen());
    drop(child);
    assert_eq!(woken(), [a], "emptied");
    assert!(!first.state().unwrap().populated);
    events.remove(a);
    assert_eq!(events.woken().unwrap(), []);
    let _child = Child::start(Some(&first), || {});
    assert!(!events.wait(Some(clock::now().plus(Duration::from_millis(30)))).unwrap());
    assert_eq!(events.woken().unwrap(), []);
}

fn deadlines_are_read_by_another_process(place: &Place) {
    let path = place.dir.join("deadlines");
    assert!(Snapshot::open(&path).unwrap().is_none());
    let mut table = Table::create_or_open(&path).unwrap();
    let (asks, tells) = (rustix::pipe::pipe().unwrap(), rustix::pipe::pipe().unwrap());
    // The other process maps the file before anything is in it and counts entries when asked.
    let _keeper = Child::run(None, || {
        let snapshot = Snapshot::open(&path).unwrap().unwrap();
        assert_eq!(snapshot.boot(), Some(clock::boot_id().unwrap()));
        let (asks, tells) = (&asks.0, &tells.1);
        move || {
            while rustix::io::read(asks, &mut [0u8; 1]) == Ok(1) {
                let valid = |e: &Entry| matches!(e, Entry::Valid(d) if d.generation.0 > 1);
                let count = snapshot.iter().filter(valid).count();
                rustix::io::write(tells, &[u8::try_from(count).unwrap()]).unwrap();
            }
        }
    });
    let seen = || {
        rustix::io::write(&asks.1, b"?").unwrap();
        let mut count = [0u8];
        rustix::io::read(&tells.0, &mut count).unwrap();
        count[0]
    };
    assert_eq!(seen(), 0);
    table.set(&deadline(1, &place.cgroup)).unwrap();
    table.set(&deadline(2, &place.cgroup)).unwrap();
    assert_eq!(seen(), 1);
    table.set(&Deadline { generation: Generation(9), ..deadline(1, &place.cgroup) }).unwrap();
    assert_eq!(seen(), 2);
    table.remove(SessionId::from_u128(2)).unwrap();
    assert_eq!(seen(), 1);
    let size = std::fs::metadata(&path).unwrap();
    assert!(size.blocks() * 512 < 64 * 1024, "not sparse: {} blocks", size.blocks());
}

fn a_deadline_file_has_one_writer_and_survives_it(place: &Place) {
    let path = place.dir.join("deadlines");
    let mut table = Table::create_or_open(&path).unwrap();
    let first = deadline(1, &place.cgroup);
    table.set(&first).unwrap();
    let second = Table::create_or_open(&path).err().unwrap();
    assert_eq!(second.errno(), Some(Errno::WOULDBLOCK));
    let snapshot = Snapshot::open(&path).unwrap().unwrap();
    drop(table);
    let mut table = Table::create_or_open(&path).unwrap();
    assert_eq!(table.entries().collect::<Vec<_>>(), [Entry::Valid(first.clone())]);
    assert!(snapshot.is_current());
    // Both slots of the entry torn: taken as passed, until the agent clears it.
    table.set(&first).unwrap();
    use std::os::unix::fs::FileExt as _;
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    for slot in [4096, 4096 + 384] {
        file.write_all_at(&[0xff], slot + 8).unwrap();
    }
    let torn = Entry::Torn { index: 0, cgroup: Some(place.cgroup.clone()) };
    assert_eq!(snapshot.iter().collect::<Vec<_>>(), [torn]);
    assert_eq!(table.clear_torn().unwrap(), 1);
    assert_eq!(snapshot.iter().count(), 0);
    // A file that does not tell how many entries were used is read whole, and told by the next agent.
    table.set(&first).unwrap();
    table.set(&deadline(2, &place.cgroup)).unwrap();
    let used = || {
        let mut word = [0; 8];
        std::fs::File::open(&path).unwrap().read_exact_at(&mut word, 64).unwrap();
        u64::from_ne_bytes(word)
    };
    assert_eq!(used(), 2);
    file.write_all_at(&[0; 8], 64).unwrap();
    assert_eq!(snapshot.iter().count(), 2);
    drop(table);
    let table = Table::create_or_open(&path).unwrap();
    assert_eq!((used(), snapshot.iter().count()), (2, 2));
    // A header that is not ours: a new file takes its place, the mapped one stays whole.
    file.write_all_at(b"x", 0).unwrap();
    drop(table);
    let table = Table::create_or_open(&path).unwrap();
    assert_eq!(table.entries().count(), 0);
    assert!(!snapshot.is_current());
    assert_eq!(snapshot.iter().count(), 2);
}

/// proc_pid_stat(5): the scheduling policy of the calling thread.
fn policy() -> u32 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let fields = stat.rsplit_once(") ").unwrap().1;
    fields.split(' ').nth(38).unwrap().parse().unwrap()
}

fn what_a_real_time_thread_starts_is_not_real_time(_: &Place) {
    const FIFO: u32 = 1;
    let seen = std::thread::spawn(|| {
        overfence::kernel::launch::schedule_fifo(1).unwrap();
        (policy(), std::thread::spawn(policy).join().unwrap())
    });
    assert_eq!(seen.join().unwrap(), (FIFO, 0));
}
