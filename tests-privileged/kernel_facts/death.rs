//! Whether an overlay is gone, who holds it, and the namespaces that can.

use super::*;

pub(super) fn tests() -> Vec<Test> {
    tests![
        a_detached_copy_is_in_no_mountinfo_and_still_writes,
        unmount_answers_ok_while_a_copy_lives_and_the_watch_waits,
        a_copy_in_another_namespace_keeps_it_alive,
        a_session_mounted_twice_is_gone_when_both_are,
        files_of_a_layer_on_another_file_system_are_told_by_mount,
        the_index_probe_tells_alive_from_dead_and_leaves_nothing,
        writers_are_named_by_descriptor_and_mapping,
        holders_in_other_namespaces_are_named,
        a_cell_has_no_session_in_it,
        all_namespaces_of_a_process_are_joined_at_once,
        the_doctor_finds_what_this_suite_needs_and_leaves_nothing,
    ]
}

/// A child with a copy of the mount namespace.
fn child_elsewhere(cgroup: Option<&Cgroup>) -> Child {
    Child::start(cgroup, || ns::unshare_mounts_private().unwrap())
}

fn assert_nobody(session: &Session, mounted: &Mounted, place: &Place) {
    let found = holders::of(mounted.s_dev, &session.spec.upper, &place.cgroup).unwrap();
    assert!(matches!(&*found, [kernel] if kernel.pid == 0), "{found:?}");
}

fn a_detached_copy_is_in_no_mountinfo_and_still_writes(place: &Place) {
    let session = Session::new(place);
    let s_dev = session.mount().s_dev;
    let copy = overlay::clone_tree(&session.spec.target).unwrap();
    assert_eq!(overlay::unmount(&session.spec.target).unwrap(), Unmount::Done);
    assert!(mountinfo::read(None).unwrap().iter().all(|m| m.dev != s_dev));
    let flags = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY;
    rustix::fs::openat(&copy, "late", flags, rustix::fs::Mode::RWXU).unwrap();
    assert!(session.upper("late").exists());
    overlay::attach(&copy, &session.spec.target).unwrap();
    assert!(session.merged("late").exists());
}

fn unmount_answers_ok_while_a_copy_lives_and_the_watch_waits(place: &Place) {
    let (session, key) = (Session::new(place), SessionId::fresh());
    let watch = UnmountWatch::new().unwrap();
    let mounted = session.mount();
    watch.watch(&mounted.root, key).unwrap();
    assert_eq!(overlay::unmount(&session.spec.target).unwrap(), Unmount::Busy, "our own root");
    drop(mounted);
    let copy = overlay::clone_tree(&session.spec.target).unwrap();
    assert_eq!(overlay::unmount(&session.spec.target).unwrap(), Unmount::Done);
    let short = Duration::from_millis(30);
    assert_eq!(watch.wait_gone(key, short).unwrap(), Gone::StillAlive);
    assert!(watch.is_watched(key));
    drop(copy);
    let Gone::Gone(proof) = watch.wait_gone(key, seconds(5)).unwrap() else { panic!("alive") };
    assert_eq!(proof.answer, "IN_UNMOUNT");
    assert!(!watch.is_watched(key));
    watch.forget(key);
    assert_eq!(watch.wait_gone(key, Duration::ZERO).unwrap(), Gone::StillAlive);
}

fn a_copy_in_another_namespace_keeps_it_alive(place: &Place) {
    let (session, key) = (Session::new(place), SessionId::fresh());
    let watch = UnmountWatch::new().unwrap();
    watch.watch(&session.mount().root, key).unwrap();
    let child = child_elsewhere(None);
    assert_eq!(overlay::unmount(&session.spec.target).unwrap(), Unmount::Done);
    assert_eq!(watch.wait_gone(key, Duration::from_millis(30)).unwrap(), Gone::StillAlive);
    drop(child);
    assert!(matches!(watch.wait_gone(key, seconds(5)).unwrap(), Gone::Gone(_)));
}

fn the_index_probe_tells_alive_from_dead_and_leaves_nothing(place: &Place) {
    let session = Session::new(place);
    let (upper, target) = (&session.spec.upper, &session.spec.target);
    let scratch = upper.parent().unwrap();
    drop(session.mount());
    std::fs::write(session.merged("f"), b"x").unwrap();
    let upper_dir = walk::Dir::open(upper).unwrap();
    let before = upper_dir.own_xattrs().unwrap();
    assert_eq!(gone::index_probe(upper, scratch).unwrap(), Probe::Alive);
    let copy = overlay::clone_tree(target).unwrap();
    overlay::unmount(target).unwrap();
    assert_eq!(gone::index_probe(upper, scratch).unwrap(), Probe::Alive, "a copy lives");
    drop(copy);
    for _ in 0..2 {
        let answer = gone::index_probe(upper, scratch).unwrap();
        assert!(matches!(answer, Probe::Dead(_)), "{answer:?}");
    }
    assert_eq!(upper_dir.own_xattrs().unwrap(), before, "xattrs of the probe stayed");
    assert_eq!(std::fs::read_dir(scratch).unwrap().count(), 3, "the probe left something");
    // And the upper can be mounted again as before.
    drop(session.mount());
    assert_eq!(std::fs::read(session.merged("f")).unwrap(), b"x");
}

fn writers_are_named_by_descriptor_and_mapping(place: &Place) {
    let (session, cgroup) = (Session::new(place), sealed(place));
    let mounted = session.mount();
    std::fs::write(session.merged("m"), [0; 4096]).unwrap();
    let _reader = std::fs::File::open(session.merged("from-0")).unwrap();
    assert_nobody(&session, &mounted, place);
    let inside = Child::start(Some(&cgroup), || {
        std::mem::forget(std::fs::File::create(session.merged("f")).unwrap());
    });
    let outside = Child::start(None, || map_shared(&session.merged("m")));
    let mut found = holders::of(mounted.s_dev, &session.spec.upper, &place.cgroup).unwrap();
    found.sort_by_key(|h| h.how.clone());
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!((&*found[0].how, found[0].pid, found[0].inside), ("descriptor", inside.pid(), true));
    assert_eq!(found[0].what, session.merged("f").display().to_string());
    assert_eq!((&*found[1].how, found[1].pid, found[1].inside), ("mapping", outside.pid(), false));
    let all = holders::all(mounted.s_dev, &session.spec.upper, &place.cgroup).unwrap();
    assert!(all.len() > found.len(), "readers and our own root: {all:?}");
    // What a workload opens goes into a record: it is counted, not listed without end.
    let _many = Child::start(Some(&cgroup), || {
        for n in 0..100 {
            std::mem::forget(std::fs::File::create(session.merged(&format!("many-{n}"))).unwrap());
        }
    });
    let found = holders::of(mounted.s_dev, &session.spec.upper, &place.cgroup).unwrap();
    let (last, named) = found.split_last().unwrap();
    assert_eq!((named.len(), &*last.how, &*last.what), (64, "others", "38 more"), "{last:?}");
}

fn holders_in_other_namespaces_are_named(place: &Place) {
    let session = Session::new(place);
    let mounted = session.mount();
    let cwd = |child: &Child, found: &[Holder], how: &str| {
        found.iter().filter(|h| h.pid == child.pid() && h.how == how).count()
    };
    let elsewhere = child_elsewhere(None);
    let within = Child::start(None, || std::env::set_current_dir(&session.spec.target).unwrap());
    let rooted = Child::start(None, || nix::unistd::chroot(&session.spec.target).unwrap());
    let found = holders::all(mounted.s_dev, &session.spec.upper, &place.cgroup).unwrap();
    assert_eq!(cwd(&rooted, &found, "root"), 1, "{found:?}");
    assert_eq!(cwd(&elsewhere, &found, "mount"), 1, "{found:?}");
    assert_eq!(cwd(&within, &found, "cwd"), 1, "{found:?}");
    assert_nobody(&session, &mounted, place);
}

fn a_cell_has_no_session_in_it(place: &Place) {
    let session = Session::new(place);
    let s_dev = session.mount().s_dev;
    let pin = place.dir.join("cell");
    assert!(ns::open_cell(&pin).unwrap().is_none());
    let cell = ns::make_cell(&pin, &place.dir).unwrap();
    let again = ns::make_cell(&pin, &place.dir).unwrap();
    let inode = |fd: &OwnedFd| walk::stat_fd(fd).unwrap().ino;
    assert_eq!(inode(&cell), inode(&again), "a cell that is there stays");
    drop((cell, again));
    let cell = ns::open_cell(&pin).unwrap().unwrap();
    let shown = || mountinfo::read(None).unwrap().iter().any(|m| m.dev == s_dev);
    assert!(shown());
    // A clone goes into the cell's copy, and the session's mount namespace keeps its own.
    let clone = overlay::clone_tree(&session.spec.target).unwrap();
    std::thread::scope(|scope| {
        let inside = || {
            ns::enter(cell.as_fd()).unwrap();
            ns::unshare_mounts_private().unwrap();
            assert!(!shown(), "the cell holds a session");
            overlay::attach(&clone, &session.spec.target).unwrap();
            std::fs::write(session.merged("from-the-cell"), b"x").unwrap();
            assert!(shown());
        };
        scope.spawn(inside).join().unwrap();
    });
    assert!(session.upper("from-the-cell").exists());
    drop(cell);
    ns::drop_cell(&pin).unwrap();
    ns::drop_cell(&pin).unwrap();
    assert!(ns::open_cell(&pin).unwrap().is_none());
}

fn all_namespaces_of_a_process_are_joined_at_once(_place: &Place) {
    use nix::sched::CloneFlags;
    let kinds = ["mnt", "uts", "ipc", "net", "cgroup"];
    let namespaces =
        |pid: &str| kinds.map(|kind| std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap());
    let init = Child::start(None, || {
        let flags = CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWUTS
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWNET
            | CloneFlags::CLONE_NEWCGROUP;
        nix::sched::unshare(flags).unwrap();
    });
    let pidfd = ns::pidfd(init.pid()).unwrap();
    let joined = Child::start(None, || ns::join(&pidfd, false).unwrap());
    let (theirs, now) =
        (namespaces(&init.pid().to_string()), namespaces(&joined.pid().to_string()));
    assert_eq!(theirs, now);
    let ours = namespaces("self");
    assert!(ours.iter().zip(&now).all(|(a, b)| a != b), "{ours:?} {now:?}");
}

fn the_doctor_finds_what_this_suite_needs_and_leaves_nothing(place: &Place) {
    let mounts = mountinfo::read(None).unwrap().len();
    let answers = doctor::ask(&place.dir, &place.cgroup);
    for answer in &answers {
        println!("{answer:?}");
        assert!(answer.ok || !answer.needed, "{answer:?}");
        assert!(!answer.detail.is_empty(), "{answer:?}");
    }
    assert!(answers.len() > 12);
    assert_eq!(std::fs::read_dir(&place.dir).unwrap().count(), 0, "the doctor left something");
    assert_eq!(mountinfo::read(None).unwrap().len(), mounts);
    let nested = std::fs::read_dir(&place.cgroup).unwrap();
    assert_eq!(nested.flatten().filter(|e| e.path().is_dir()).count(), 0);
    // Where nothing can be made, it says so instead of failing.
    let refused = doctor::ask(Path::new("/proc"), Path::new("/proc"));
    assert!(refused.iter().any(|a| a.needed && !a.ok), "{refused:?}");
}

fn a_session_mounted_twice_is_gone_when_both_are(place: &Place) {
    let (session, key) = (Session::new(place), SessionId::fresh());
    let watch = UnmountWatch::new().unwrap();
    watch.watch(&session.mount().root, key).unwrap();
    let copy = overlay::clone_tree(&session.spec.target).unwrap();
    overlay::unmount(&session.spec.target).unwrap();
    watch.watch(&session.mount().root, key).unwrap();
    drop(copy);
    let short = Duration::from_millis(30);
    assert_eq!(watch.wait_gone(key, short).unwrap(), Gone::StillAlive, "only the first is gone");
    overlay::unmount(&session.spec.target).unwrap();
    assert!(matches!(watch.wait_gone(key, seconds(5)).unwrap(), Gone::Gone(_)));
}

fn files_of_a_layer_on_another_file_system_are_told_by_mount(place: &Place) {
    let lower = place.dir.join("lower");
    std::fs::create_dir(&lower).unwrap();
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("t", &lower, "tmpfs", flags, None).unwrap();
    let session = Session::new(place);
    let mounted = session.mount();
    let file = std::fs::File::open(session.merged("from-0")).unwrap();
    let device = file.metadata().unwrap().dev();
    println!("overlay {:x}, file of a foreign lower {device:x}", mounted.s_dev);
    let name = session.merged("from-0").display().to_string();
    let found = holders::all(mounted.s_dev, &session.spec.upper, &place.cgroup).unwrap();
    assert!(found.iter().any(|h| h.how == "descriptor" && h.what == name), "{found:?}");
    std::mem::forget(std::fs::File::create(session.merged("new")).unwrap());
    let found = holders::of(mounted.s_dev, &session.spec.upper, &place.cgroup).unwrap();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(is_busy(&overlay::remount_ro(&mounted.root).unwrap()));
}
