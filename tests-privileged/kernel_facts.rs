//! The facts of the kernel that the product rests on, one test each, through the product's own
//! calls. A kernel on which one does not hold is noticed here.
#![allow(unsafe_code)]

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use overfence::kernel::cgroup::{Cgroup, Outcome, Purpose, Stamp};
use overfence::kernel::idmap::IdMap;
use overfence::kernel::overlay::{self, Mounted, ReadOnly, Spec, Style, Unmount};
use overfence::kernel::{Error, mountinfo, ns, walk};
use overfence::model::ids::Generation;
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
    session.spec.mapped = Some(map);
    let mounted = session.mount();
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
    while std::fs::metadata(&out).unwrap().len() == 0 {
        std::thread::yield_now();
    }
    let before = std::fs::metadata(&out).unwrap().len();
    let late = cgroup.freeze(Duration::ZERO).unwrap();
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
