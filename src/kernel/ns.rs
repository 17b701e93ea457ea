//! Mount namespaces, and joining those of a session.
//!
//! The *cell* is a pinned mount namespace that never holds a session's overlay. A workload's
//! namespaces are copied from it, so that sessions neither pin each other nor make each other's
//! start slower.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use nix::sched::CloneFlags;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, UnmountFlags};
use rustix::process::{Pid, PidfdFlags};
use rustix::thread::{CpuSet, LinkNameSpaceType, ThreadNameSpaceType};

use super::{At as _, Result, fs_magic, mountinfo, proc_path};
use crate::failpoint;

/// File-system magic of namespace files.
const NSFS: u64 = 0x6e73_6673;

/// The mount namespace of a process, beside that of pid 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounts {
    /// As `/proc/PID/ns/mnt` names it; empty if that cannot be read.
    pub name: String,
    /// Why pid 1 does not see what is mounted there, or why that is not known; `None` if it does.
    pub trouble: Option<String>,
}

/// Where mounts of this process are seen.
pub fn mounts() -> Mounts {
    let link = |path: &str| match std::fs::read_link(path) {
        Ok(name) => Ok(name.display().to_string()),
        Err(fault) => Err(format!("{path}: {fault}")),
    };
    compare(link("/proc/self/ns/mnt"), link("/proc/1/ns/mnt"))
}

/// The target of a link, or why it cannot be read.
type Link = std::result::Result<String, String>;

fn compare(own: Link, first: Link) -> Mounts {
    let trouble = match (&own, &first) {
        (Err(why), _) | (_, Err(why)) => Some(why.clone()),
        (Ok(own), Ok(first)) => (own != first).then(|| {
            "not pid 1's mount namespace: sessions opened there are invisible to the host; look for \
             PrivateTmp=, ProtectSystem= and the like in the unit"
                .to_owned()
        }),
    };
    Mounts { name: own.unwrap_or_default(), trouble }
}

/// Gives the calling thread a mount namespace of its own from which nothing propagates, and its own
/// root and working directory. It ends with the thread, or when the last descriptor of it closes.
pub fn unshare_mounts_private() -> Result<()> {
    let flags = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_FS;
    nix::sched::unshare(flags)
        .map_err(|e| Errno::from_raw_os_error(e as i32))
        .at("copy", "the mount namespace")?;
    let flags = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", flags).at("make private", "/")
}

/// Runs `work` on a thread with a private copy of the mount namespace: nobody else sees what it mounts,
/// and what it left mounted ends with the thread, or with the process.
pub(super) fn in_a_copy<T: Send>(
    what: &'static str,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    let run = || {
        unshare_mounts_private()?;
        work()
    };
    std::thread::scope(|scope| scope.spawn(run).join())
        .unwrap_or_else(|_| Err(Errno::CANCELED).at("finish the thread that mounts", what))
}

/// Detaches every session's overlay and image, whichever agent's, in the mount namespace the caller is in,
/// which has to be a private copy: a copy that keeps one keeps its superblock alive, and its agent
/// could not prove it gone.
pub fn drop_sessions() -> Result<()> {
    for mount in mountinfo::read(None)? {
        let ours = mount.superblock.source.as_bytes().starts_with(super::overlay::LABEL.as_bytes());
        let overlay = ours && mount.superblock.is("overlay");
        if overlay || super::image::is_disk(&mount) {
            let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
            rustix::mount::unmount(&mount.point, flags).at("drop from the copy", mount.point)?;
        }
    }
    Ok(())
}

/// Copies the mount namespace without any session's overlay and without what is mounted below
/// `drop_below`, and pins the copy at
/// `pin` (a file, made if need be). A cell already pinned there stays as it is.
pub fn make_cell(pin: &Path, drop_below: &Path) -> Result<OwnedFd> {
    if let Some(cell) = open_cell(pin)? {
        return Ok(cell);
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(pin, flags, Mode::from_raw_mode(0o600)).at("make the pin", pin)?;
    // Nor in a mount that propagates to others (EINVAL, too), as all of a host of systemd does: the
    // pin lies on a private mount of itself.
    rustix::mount::mount_bind(pin, pin).at("bind to itself", pin)?;
    rustix::mount::mount_change(pin, MountPropagationFlags::PRIVATE).at("make private", pin)?;
    // A namespace can be pinned only in one with a lower id (EINVAL else), which rules out loops.
    // Newer kernels (6.18) hand out ids by CPU, in batches: a copy made later on another CPU can
    // have a lower one. On the CPU that made ours it has a higher one, so each is tried.
    let all = rustix::thread::sched_getaffinity(None).at("read", "the CPU affinity")?;
    let each = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).map(Some);
    for cpu in std::iter::once(None).chain(each) {
        let cell = copy_without(drop_below, cpu)?;
        failpoint::fails("kernel.cell.before").at("pin the cell at", pin)?;
        match rustix::mount::mount_bind(proc_path(&cell), pin) {
            Err(Errno::INVAL) => {}
            answer => {
                failpoint::hit("kernel.cell.after");
                return answer.at("pin the cell at", pin).map(|()| cell);
            }
        }
    }
    Err(Errno::INVAL).at("pin the cell at", pin)
}

/// A copy of the mount namespace, made by a thread of its own (on one CPU, if given).
fn copy_without(drop_below: &Path, cpu: Option<usize>) -> Result<OwnedFd> {
    let copy = || {
        if let Some(cpu) = cpu {
            let mut only = CpuSet::new();
            only.set(cpu);
            rustix::thread::sched_setaffinity(None, &only).at("move to", format!("CPU {cpu}"))?;
        }
        unshare_mounts_private()?;
        drop_sessions()?;
        for mount in mountinfo::below(mountinfo::read(None)?, drop_below) {
            if mount.point != drop_below {
                let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
                rustix::mount::unmount(&mount.point, flags)
                    .at("drop from the cell", mount.point)?;
            }
        }
        let own = "/proc/thread-self/ns/mnt";
        std::fs::File::open(own).map(OwnedFd::from).at("open", own)
    };
    std::thread::scope(|scope| scope.spawn(copy).join())
        .unwrap_or_else(|_| Err(Errno::CANCELED).at("finish the thread that makes", "the cell"))
}

/// The cell pinned at `pin`, `None` if none is.
pub fn open_cell(pin: &Path) -> Result<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = match rustix::fs::open(pin, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        answer => answer.at("open the cell at", pin)?,
    };
    let magic = fs_magic(&fd).at("statfs", pin)?;
    Ok((magic == NSFS).then_some(fd))
}

/// Takes the pin away; the namespace lives on while something is in it.
pub fn drop_cell(pin: &Path) -> Result<()> {
    failpoint::fails("kernel.cell-drop.before").at("unpin the cell at", pin)?;
    // The namespace, and the private mount that it lies on.
    loop {
        match rustix::mount::unmount(pin, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            Err(Errno::INVAL | Errno::NOENT) => break,
            Err(e) => return Err(e).at("unpin the cell at", pin),
        }
    }
    failpoint::hit("kernel.cell-drop.after");
    Ok(())
}

/// Moves the calling thread into a mount namespace. Other threads stay where they are; the
/// thread's root and working directory become those of the namespace.
pub fn enter(ns: BorrowedFd<'_>) -> Result<()> {
    // setns refuses a thread that shares its root and working directory with others.
    nix::sched::unshare(CloneFlags::CLONE_FS)
        .map_err(|e| Errno::from_raw_os_error(e as i32))
        .at("unshare", "root and working directory")?;
    rustix::thread::move_into_link_name_space(ns, Some(LinkNameSpaceType::Mount))
        .at("enter", "a mount namespace")
}

/// A descriptor of a process, which its pid's reuse does not fool.
pub fn pidfd(pid: u32) -> Result<OwnedFd> {
    let what = || PathBuf::from(format!("pid {pid}"));
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(Errno::SRCH).at("open", what())?;
    rustix::process::pidfd_open(pid, PidfdFlags::empty()).at("open", what())
}

/// Whether the process of a pidfd has not ended.
pub fn is_alive(pidfd: &OwnedFd) -> Result<bool> {
    use rustix::event::PollFlags;
    super::clock::poll_until(pidfd.as_fd(), PollFlags::IN, Some(crate::model::time::BootNs(0)))
        .map(|ended| !ended)
        .at("poll", "a pidfd")
}

/// Joins all namespaces of a process at once, its user namespace too if that is not the caller's
/// own. No other thread may exist. The pid namespace takes children, not the caller.
pub fn join(pidfd: &OwnedFd, user: bool) -> Result<()> {
    let mut all = ThreadNameSpaceType::MOUNT
        | ThreadNameSpaceType::PROCESS_ID
        | ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION
        | ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME
        | ThreadNameSpaceType::NETWORK
        | ThreadNameSpaceType::CONTROL_GROUP;
    if user {
        all |= ThreadNameSpaceType::USER;
    }
    rustix::thread::move_into_thread_name_spaces(pidfd.as_fd(), all)
        .at("join", "the session's namespaces")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_pid_1s_or_it_is_said_why_not() {
        type Given = std::result::Result<&'static str, &'static str>;
        let seen = |own: Given, first: Given| {
            let owned = |name: Given| name.map(str::to_owned).map_err(str::to_owned);
            let mounts = compare(owned(own), owned(first));
            (mounts.name, mounts.trouble.unwrap_or_default())
        };
        assert_eq!(seen(Ok("mnt:[1]"), Ok("mnt:[1]")), ("mnt:[1]".into(), String::new()));
        let (name, trouble) = seen(Ok("mnt:[2]"), Ok("mnt:[1]"));
        assert!(name == "mnt:[2]" && trouble.contains("PrivateTmp="), "{name}: {trouble}");
        assert_eq!(seen(Ok("mnt:[2]"), Err("denied")), ("mnt:[2]".into(), "denied".into()));
        assert_eq!(seen(Err("denied"), Ok("mnt:[1]")), (String::new(), "denied".into()));
    }

    #[test]
    fn the_name_is_that_of_the_kernel() {
        let name = mounts().name;
        assert!(name.starts_with("mnt:[") && name.ends_with(']'), "{name}");
    }
}
