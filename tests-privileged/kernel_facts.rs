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
use overfence::kernel::idmap::IdMap;
use overfence::kernel::overlay::{self, Mounted, ReadOnly, Spec, Style, Unmount};
use overfence::kernel::{Error, clock, doctor, holders, mountinfo, ns, walk};
use overfence::model::facts::Holder;
use overfence::model::ids::{Generation, SessionId};
use rustix::io::Errno;

use crate::host::{Place, Test};

macro_rules! tests {
    ($($name:ident),* $(,)?) => { vec![$(Test { name: stringify!($name), run: $name }),*] };
}

mod cgroups;
mod death;
mod overlays;

pub fn tests() -> Vec<Test> {
    [overlays::tests(), cgroups::tests(), death::tests()].into_iter().flatten().collect()
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

/// Asks for read-only until it is granted: descriptors die a little after their process.
fn granted(root: &OwnedFd) -> overfence::model::facts::Proof {
    let begun = Instant::now();
    loop {
        match overlay::remount_ro(root).unwrap() {
            ReadOnly::Granted(proof) => return proof,
            ReadOnly::Refused(proof) => panic!("{proof:?}"),
            ReadOnly::Busy(proof) => assert!(begun.elapsed() < seconds(5), "{proof:?}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn is_busy(answer: &ReadOnly) -> bool {
    matches!(answer, ReadOnly::Busy(proof) if proof.answer == "EBUSY")
}
