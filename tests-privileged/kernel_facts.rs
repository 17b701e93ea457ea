//! The facts of the kernel that the product rests on, one test each, through the product's own
//! calls. A kernel on which one does not hold is noticed here.
#![allow(unsafe_code, clippy::unwrap_used)]

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use overfence::kernel::cgroup::{Cgroup, Outcome, Purpose, Stamp};
use overfence::kernel::deadlines::{Deadline, Entry, Snapshot, Table};
use overfence::kernel::events::CgroupEvents;
use overfence::kernel::gone::{self, Gone, Probe, UnmountWatch};
use overfence::kernel::holders::{self, Question, Wanted};
use overfence::kernel::idmap::IdMap;
use overfence::kernel::overlay::{self, Mounted, ReadOnly, Spec, Style, Unmount};
use overfence::kernel::{Error, cgroup, clock, doctor, mountinfo, ns, walk};
use overfence::model::facts::Holder;
use overfence::model::ids::{Generation, SessionId};
use rustix::io::Errno;

use crate::host::{Place, Test};

macro_rules! tests {
    ($($name:ident),* $(,)?) => { vec![$(Test { name: stringify!($name), run: $name }),*] };
}

pub fn tests() -> Vec<Test> {
    tests![
        read_only_is_refused_while_a_descriptor_is_open_for_write,
        read_only_is_refused_while_a_frozen_task_maps_a_file_shared,
        read_only_is_granted_after_the_kill_and_the_probe_is_erofs,
        a_read_only_mount_alone_stops_nobody,
        the_write_probe_leaves_no_copy_up,
        every_style_takes_any_bytes_in_paths,
        all_lower_layers_are_in_the_mount,
        layers_with_mapped_ids_are_root_on_disk_and_inside,
        a_foreign_mount_is_not_adopted,
        an_upper_on_overlay_is_refused_and_probes_leave_nothing,
        a_work_directory_of_mode_zero_is_removed_by_descriptor,
        a_detached_copy_is_in_no_mountinfo_and_still_writes,
        a_freeze_is_proved_at_once_and_foreign_thaws_show,
        a_call_in_progress_ends_before_frozen,
        a_frozen_task_is_killed,
        stamps_stay_on_the_cgroup,
        removal_takes_nested_cgroups_and_spares_populated_ones,
        unmount_answers_ok_while_a_copy_lives_and_the_watch_waits,
        a_copy_in_another_namespace_keeps_it_alive,
        the_index_probe_tells_alive_from_dead_and_leaves_nothing,
        a_second_mount_of_an_upper_is_allowed_without_index,
        the_events_watch_sees_thaws_and_emptied_cgroups,
        writers_are_named_by_descriptor_and_mapping,
        holders_in_other_namespaces_are_named,
        deadlines_are_read_by_another_process,
        a_deadline_file_has_one_writer_and_survives_it,
        a_cell_has_no_session_in_it,
        all_namespaces_of_a_process_are_joined_at_once,
        the_doctor_finds_what_this_suite_needs_and_leaves_nothing,
    ]
}

/// The directories of one session.
struct Session {
    spec: Spec,
}

impl Session {
    fn new(place: &Place) -> Self {
        Self::with_lowers(&place.dir, &[OsStr::new("lower")])
    }

    fn with_lowers(dir: &Path, lowers: &[&OsStr]) -> Self {
        let make = |name: &OsStr| {
            let path = dir.join(name);
            std::fs::create_dir_all(&path).unwrap();
            path
        };
        let lowers: Vec<PathBuf> = lowers.iter().map(|name| make(name)).collect();
        for (i, lower) in lowers.iter().enumerate() {
            std::fs::write(lower.join(format!("from-{i}")), b"lower").unwrap();
            std::fs::write(lower.join("shared"), i.to_string()).unwrap();
        }
        let spec = Spec {
            lowers,
            upper: make(OsStr::new("s/upper")),
            work: make(OsStr::new("s/work")),
            target: make(OsStr::new("s/merged")),
            mapped: None,
        };
        Self { spec }
    }

    fn mount(&self) -> Mounted {
        overlay::mount(&self.spec).unwrap()
    }

    fn merged(&self, name: &str) -> PathBuf {
        self.spec.target.join(name)
    }

    fn upper(&self, name: &str) -> PathBuf {
        self.spec.upper.join(name)
    }
}

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// A child in a cgroup that has run `prepare`, then waits to be killed; reaped on drop.
struct Child(nix::unistd::Pid);

impl Child {
    fn start(cgroup: Option<&Cgroup>, prepare: impl FnOnce()) -> Self {
        Self::run(cgroup, || {
            prepare();
            || loop {
                nix::unistd::pause();
            }
        })
    }

    /// Runs `first` before this returns and what it gives after.
    fn run<F: FnOnce()>(cgroup: Option<&Cgroup>, first: impl FnOnce() -> F) -> Self {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        // SAFETY: the test's process has one thread, so the child may do anything.
        match unsafe { nix::unistd::fork() }.unwrap() {
            nix::unistd::ForkResult::Child => {
                drop(reader);
                if let Some(cgroup) = cgroup {
                    cgroup.add_self().unwrap();
                }
                let then = first();
                rustix::io::write(&writer, b"x").unwrap();
                drop(writer);
                then();
                std::process::exit(0);
            }
            nix::unistd::ForkResult::Parent { child } => {
                drop(writer);
                let n = rustix::io::read(&reader, &mut [0u8; 1]).unwrap();
                assert_eq!(n, 1, "the child ended before it was ready");
                Self(child)
            }
        }
    }

    fn pid(&self) -> u32 {
        self.0.as_raw().try_into().unwrap()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = nix::sys::signal::kill(self.0, nix::sys::signal::Signal::SIGKILL);
        let _ = nix::sys::wait::waitpid(self.0, None);
    }
}

fn map_shared(path: &Path) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    use rustix::mm::{MapFlags, ProtFlags};
    // SAFETY: a fresh mapping at an address of the kernel's choice; it is never unmapped.
    unsafe {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        rustix::mm::mmap(std::ptr::null_mut(), 4096, prot, MapFlags::SHARED, &file, 0).unwrap();
    }
}

fn sealed(place: &Place) -> Cgroup {
    Cgroup::open(&place.cgroup).unwrap().unwrap()
}

fn proved(outcome: Outcome) -> overfence::model::facts::Proof {
    match outcome {
        Outcome::Proved(proof) => proof,
        Outcome::Late(blockers) => panic!("late: {blockers:?}"),
    }
}

fn is_busy(answer: &ReadOnly) -> bool {
    matches!(answer, ReadOnly::Busy(proof) if proof.answer == "EBUSY")
}

/// Asks for read-only until it is granted: descriptors die a little after their process.
fn granted(root: &OwnedFd) -> overfence::model::facts::Proof {
    let begun = Instant::now();
    loop {
        match overlay::remount_ro(root).unwrap() {
            ReadOnly::Granted(proof) => return proof,
            ReadOnly::Busy(proof) => assert!(begun.elapsed() < seconds(5), "{proof:?}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn read_only_is_refused_while_a_descriptor_is_open_for_write(place: &Place) {
    let (session, cgroup) = (Session::new(place), sealed(place));
    let mounted = session.mount();
    let child = Child::start(Some(&cgroup), || {
        std::mem::forget(std::fs::File::create(session.merged("f")).unwrap());
    });
    assert!(is_busy(&overlay::remount_ro(&mounted.root).unwrap()));
    proved(cgroup.freeze(seconds(2)).unwrap());
    assert!(is_busy(&overlay::remount_ro(&mounted.root).unwrap()), "frozen, still open");
    std::fs::write(session.merged("g"), b"a refused request changes nothing").unwrap();
    drop(child);
    let proof = granted(&mounted.root);
    assert_eq!(proof.answer, "ok, EROFS");
}

fn read_only_is_refused_while_a_frozen_task_maps_a_file_shared(place: &Place) {
    let (session, cgroup) = (Session::new(place), sealed(place));
    let mounted = session.mount();
    std::fs::write(session.merged("f"), [0; 4096]).unwrap();
    let _child = Child::start(Some(&cgroup), || map_shared(&session.merged("f")));
    proved(cgroup.freeze(seconds(2)).unwrap());
    assert!(is_busy(&overlay::remount_ro(&mounted.root).unwrap()));
}

fn read_only_is_granted_after_the_kill_and_the_probe_is_erofs(place: &Place) {
    let (session, cgroup) = (Session::new(place), sealed(place));
    let mounted = session.mount();
    std::fs::write(session.merged("m"), [0; 4096]).unwrap();
    let _child = Child::start(Some(&cgroup), || {
        std::mem::forget(std::fs::File::create(session.merged("f")).unwrap());
        map_shared(&session.merged("m"));
    });
    proved(cgroup.freeze(seconds(2)).unwrap());
    proved(cgroup.kill(seconds(5)).unwrap());
    granted(&mounted.root);
    assert!(overlay::is_read_only(&mounted.root).unwrap());
    let refused = std::fs::write(session.merged("g"), b"x").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    overlay::remount_rw(&mounted.root).unwrap();
    assert!(!overlay::is_read_only(&mounted.root).unwrap());
    std::fs::write(session.merged("g"), b"x").unwrap();
}

fn a_read_only_mount_alone_stops_nobody(place: &Place) {
    let session = Session::new(place);
    let mounted = session.mount();
    let other = place.dir.join("other");
    std::fs::create_dir(&other).unwrap();
    rustix::mount::mount_bind(&session.spec.target, &other).unwrap();
    let flags = rustix::mount::MountFlags::RDONLY | rustix::mount::MountFlags::BIND;
    rustix::mount::mount_remount(&session.spec.target, flags, c"").unwrap();
    assert!(std::fs::write(session.merged("f"), b"x").is_err());
    assert!(!overlay::is_read_only(&mounted.root).unwrap(), "a mount's ro is no fact");
    std::fs::write(other.join("f"), b"x").unwrap();
}

fn the_write_probe_leaves_no_copy_up(place: &Place) {
    let session = Session::new(place);
    let mounted = session.mount();
    assert!(!overlay::is_read_only(&mounted.root).unwrap());
    granted(&mounted.root);
    overlay::remount_rw(&mounted.root).unwrap();
    assert_eq!(std::fs::read_dir(&session.spec.upper).unwrap().count(), 0);
}

fn every_style_takes_any_bytes_in_paths(place: &Place) {
    let name = OsStr::from_bytes(b"a:b,c\\d e\nf\xff=g+");
    for (i, style) in [Style::Descriptors, Style::Appended, Style::Joined].into_iter().enumerate() {
        let mut dir = place.dir.join(format!("{i}")).into_os_string().into_vec();
        dir.extend(b"/x:y,z\\ \n\xfe");
        let session = Session::with_lowers(Path::new(&OsString::from_vec(dir)), &[name]);
        let mounted = match overlay::mount_styled(&session.spec, style) {
            Err(Error::TooOld { .. }) => continue,
            answer => answer.unwrap_or_else(|e| panic!("{style:?}: {e:?}")),
        };
        assert_eq!(std::fs::read(session.merged("from-0")).unwrap(), b"lower", "{style:?}");
        std::fs::write(session.merged("new"), b"x").unwrap();
        assert_eq!(std::fs::read(session.upper("new")).unwrap(), b"x", "{style:?}");
        let adopted = overlay::open_mounted(&session.spec.target, &session.spec.upper).unwrap();
        assert_eq!(adopted.unwrap().s_dev, mounted.s_dev);
        let options = &mountinfo::at(mountinfo::read(None).unwrap(), &session.spec.target).unwrap();
        assert!(options.options.to_string_lossy().contains("nosuid,nodev"), "{options:?}");
        drop(mounted);
        assert_eq!(overlay::unmount(&session.spec.target).unwrap(), Unmount::Done);
        assert_eq!(overlay::unmount(&session.spec.target).unwrap(), Unmount::NotMounted);
    }
}

fn all_lower_layers_are_in_the_mount(place: &Place) {
    let names: Vec<OsString> = (0..120).map(|i| format!("layers/{i:0>60}").into()).collect();
    let names: Vec<&OsStr> = names.iter().map(OsString::as_os_str).collect();
    for (i, style) in [Style::Descriptors, Style::Appended, Style::Joined].into_iter().enumerate() {
        let session = Session::with_lowers(&place.dir.join(format!("{i}")), &names);
        let mounted = match overlay::mount_styled(&session.spec, style) {
            Err(Error::TooOld { .. }) => continue,
            answer => answer.unwrap_or_else(|e| panic!("{style:?}: {e:?}")),
        };
        for n in 0..names.len() {
            assert!(session.merged(&format!("from-{n}")).exists(), "{style:?} lacks layer {n}");
        }
        // The last of the list is the topmost.
        assert_eq!(std::fs::read(session.merged("shared")).unwrap(), b"119", "{style:?}");
        drop(mounted);
    }
    let many: Vec<PathBuf> = (0..300).map(|_| place.dir.join("0/s")).collect();
    let spec = Spec { lowers: many, ..Session::new(place).spec };
    let refused = overlay::mount_styled(&spec, Style::Joined).unwrap_err();
    assert!(matches!(refused, Error::Limit { .. }), "{refused:?}");
}

fn layers_with_mapped_ids_are_root_on_disk_and_inside(place: &Place) {
    let mut session = Session::new(place);
    let map = IdMap { base: 100_000, count: 65536 };
    let begun = Instant::now();
    drop(session.mount());
    let plain = begun.elapsed();
    overlay::unmount(&session.spec.target).unwrap();
    session.spec.mapped = Some(map);
    let begun = Instant::now();
    let mounted = session.mount();
    println!("mount: plain {plain:?}, mapped {:?}", begun.elapsed());
    assert_eq!(std::fs::metadata(session.merged("from-0")).unwrap().uid(), 100_000);
    let user_ns = overfence::kernel::idmap::user_namespace(&map).unwrap();
    let target = session.spec.target.clone();
    let child = Child::run(None, || {
        || {
            let kind = rustix::thread::LinkNameSpaceType::User;
            rustix::thread::move_into_link_name_space(user_ns.as_fd(), Some(kind)).unwrap();
            let root = rustix::process::Uid::ROOT;
            rustix::thread::set_thread_res_gid(
                rustix::process::Gid::ROOT,
                rustix::process::Gid::ROOT,
                rustix::process::Gid::ROOT,
            )
            .unwrap();
            rustix::thread::set_thread_res_uid(root, root, root).unwrap();
            assert_eq!(std::fs::metadata(target.join("from-0")).unwrap().uid(), 0);
            std::fs::write(target.join("new"), b"x").unwrap();
            std::fs::write(target.join("from-0"), b"copied up").unwrap();
            std::fs::create_dir(target.join("d")).unwrap();
            std::fs::remove_file(target.join("shared")).unwrap();
            std::os::unix::fs::chown(target.join("d"), Some(1000), Some(1000)).unwrap();
        }
    });
    let status = nix::sys::wait::waitpid(child.0, None).unwrap();
    std::mem::forget(child);
    assert!(matches!(status, nix::sys::wait::WaitStatus::Exited(_, 0)), "{status:?}");
    for (name, id) in [("new", 0), ("from-0", 0), ("d", 1000)] {
        let meta = std::fs::metadata(session.upper(name)).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (id, id), "{name} on disk");
    }
    let whiteout = walk::stat_path(&session.upper("shared")).unwrap();
    assert!(whiteout.is_whiteout(), "{whiteout:?}");
    let adopted = overlay::open_mounted(&session.spec.target, &session.spec.upper).unwrap();
    assert_eq!(adopted.unwrap().s_dev, mounted.s_dev);
    granted(&mounted.root);
}

fn a_foreign_mount_is_not_adopted(place: &Place) {
    let session = Session::new(place);
    let (target, upper) = (&session.spec.target, &session.spec.upper);
    assert!(overlay::open_mounted(target, upper).unwrap().is_none());
    let mounted = session.mount();
    let other = overlay::open_mounted(target, &session.spec.work);
    assert!(matches!(other, Err(Error::WrongMount { .. })), "{other:?}");
    drop(mounted);
    overlay::unmount(target).unwrap();
    rustix::mount::mount_bind(upper, target).unwrap();
    let other = overlay::open_mounted(target, upper);
    assert!(matches!(other, Err(Error::WrongMount { .. })), "{other:?}");
}

fn an_upper_on_overlay_is_refused_and_probes_leave_nothing(place: &Place) {
    let session = Session::new(place);
    let dir = session.spec.upper.parent().unwrap();
    overlay::preflight(dir, &session.spec.lowers).unwrap();
    assert_eq!(std::fs::read_dir(dir).unwrap().count(), 3, "the probe left something");
    let _mounted = session.mount();
    let refused = overlay::preflight(&session.spec.target, &session.spec.lowers).unwrap_err();
    assert!(matches!(refused, Error::BadUpper { .. }), "{refused:?}");
    assert_eq!(std::fs::read_dir(&session.spec.upper).unwrap().count(), 0);
}

fn a_work_directory_of_mode_zero_is_removed_by_descriptor(place: &Place) {
    let session = Session::new(place);
    drop(session.mount());
    overlay::unmount(&session.spec.target).unwrap();
    let inner = session.spec.work.join("work");
    assert_eq!(std::fs::metadata(&inner).unwrap().permissions().mode() & 0o7777, 0);
    let work = walk::Dir::open(&session.spec.work).unwrap();
    assert!(work.child(OsStr::new("work")).unwrap().sorted().unwrap().is_empty());
    rustix::fs::unlinkat(&work, "work", rustix::fs::AtFlags::REMOVEDIR).unwrap();
    assert!(!inner.exists());
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

/// A child with a copy of the mount namespace.
fn child_elsewhere(cgroup: Option<&Cgroup>) -> Child {
    Child::start(cgroup, || ns::unshare_mounts_private().unwrap())
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

fn a_second_mount_of_an_upper_is_allowed_without_index(place: &Place) {
    let session = Session::new(place);
    let first = session.mount();
    let second = place.dir.join("second");
    std::fs::create_dir(&second).unwrap();
    let spec = Spec { target: second, ..session.spec.clone() };
    let second = overlay::mount(&spec).unwrap();
    assert_ne!(first.s_dev, second.s_dev, "the kernel does not protect an upper");
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

fn holders_of(session: &Session, mounted: &Mounted, place: &Place, wanted: Wanted) -> Vec<Holder> {
    let root = cgroup::find_root().unwrap();
    let inside = Path::new("/").join(place.cgroup.strip_prefix(root).unwrap());
    let question = Question {
        s_dev: mounted.s_dev,
        upper: &session.spec.upper,
        target: &session.spec.target,
        cgroup: &inside,
    };
    holders::find(&question, wanted).unwrap()
}

fn writers_are_named_by_descriptor_and_mapping(place: &Place) {
    let (session, cgroup) = (Session::new(place), sealed(place));
    let mounted = session.mount();
    std::fs::write(session.merged("m"), [0; 4096]).unwrap();
    let _reader = std::fs::File::open(session.merged("from-0")).unwrap();
    assert_eq!(holders_of(&session, &mounted, place, Wanted::Writers), []);
    let inside = Child::start(Some(&cgroup), || {
        std::mem::forget(std::fs::File::create(session.merged("f")).unwrap());
    });
    let outside = Child::start(None, || map_shared(&session.merged("m")));
    let mut found = holders_of(&session, &mounted, place, Wanted::Writers);
    found.sort_by_key(|h| h.how.clone());
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!((&*found[0].how, found[0].pid, found[0].inside), ("descriptor", inside.pid(), true));
    assert_eq!(found[0].what, session.merged("f").display().to_string());
    assert_eq!((&*found[1].how, found[1].pid, found[1].inside), ("mapping", outside.pid(), false));
    let all = holders_of(&session, &mounted, place, Wanted::All);
    assert!(all.len() > found.len(), "readers and our own root: {all:?}");
}

fn holders_in_other_namespaces_are_named(place: &Place) {
    let session = Session::new(place);
    let mounted = session.mount();
    let cwd = |child: &Child, found: &[Holder], how: &str| {
        found.iter().filter(|h| h.pid == child.pid() && h.how == how).count()
    };
    let elsewhere = child_elsewhere(None);
    let within = Child::start(None, || std::env::set_current_dir(&session.spec.target).unwrap());
    let found = holders_of(&session, &mounted, place, Wanted::All);
    assert_eq!(cwd(&elsewhere, &found, "mount"), 1, "{found:?}");
    assert_eq!(cwd(&within, &found, "cwd"), 1, "{found:?}");
    assert_eq!(holders_of(&session, &mounted, place, Wanted::Writers), []);
}

fn deadline(n: u64, cgroup: &Path) -> Deadline {
    Deadline {
        session: SessionId::from_u128(n.into()),
        generation: Generation(n),
        deadline: clock::now(),
        cgroup: cgroup.to_owned(),
    }
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
    // A header that is not ours: a new file takes its place, the mapped one stays whole.
    file.write_all_at(b"x", 0).unwrap();
    drop(table);
    let table = Table::create_or_open(&path).unwrap();
    assert_eq!(table.entries().count(), 0);
    assert!(!snapshot.is_current());
    assert_eq!(snapshot.iter().count(), 0);
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
