//! Shows directories with shifted ids, for workloads whose uid 0 is a mapped one: on disk a file
//! belongs to 0, to processes in the user namespace too, and to the host it belongs to nobody
//! special.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::{Gid, Pid, Uid};
use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags};

use super::{At as _, Error, Result, ns};

/// Ids `0..count` on disk and in the user namespace are `base..base+count` on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdMap {
    /// The host's id of the mapped 0.
    pub base: u32,
    /// How many.
    pub count: u32,
}

impl IdMap {
    /// The line of uid_map and gid_map.
    pub fn line(&self) -> String {
        format!("0 {} {}", self.base, self.count)
    }
}

/// A user namespace with this map for uids and gids, held by its descriptor alone.
pub fn user_namespace(map: &IdMap) -> Result<OwnedFd> {
    let (ours, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map(|(read, write)| (write, read))
        .at("make a pipe for", "a user namespace")?;
    let flags = libc::CLONE_NEWUSER | libc::SIGCHLD;
    // SAFETY: clone without a stack and without CLONE_VM is fork: the child runs on a copy of this
    // memory. It makes three raw system calls, allocates nothing, takes no lock, and ends.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    if pid == 0 {
        let mut byte = 0u8;
        // SAFETY: the descriptors are valid in the child's copy; the buffer is one byte of its
        // own stack; _exit does not return.
        unsafe {
            libc::close(ours.as_raw_fd());
            libc::read(theirs.as_raw_fd(), (&raw mut byte).cast(), 1);
            libc::_exit(0);
        }
    }
    if pid < 0 {
        let e = std::io::Error::last_os_error();
        return Err(e).at("make", "a user namespace");
    }
    let opened = describe(pid, map);
    // The child ends when the last writer is gone.
    drop(ours);
    let child = Pid::from_raw(i32::try_from(pid).unwrap_or(i32::MAX));
    while waitpid(child, Some(WaitPidFlag::__WALL)) == Err(nix::errno::Errno::EINTR) {}
    opened
}

fn describe(pid: i64, map: &IdMap) -> Result<OwnedFd> {
    for name in ["uid_map", "gid_map"] {
        let path = PathBuf::from(format!("/proc/{pid}/{name}"));
        std::fs::write(&path, map.line()).at("write", path)?;
    }
    let path = PathBuf::from(format!("/proc/{pid}/ns/user"));
    std::fs::File::open(&path).map(OwnedFd::from).at("open", path)
}

/// Shows the tree of a detached mount with the ids of a user namespace's map (5.12).
fn set_idmap(tree: &OwnedFd, user_ns: &OwnedFd) -> rustix::io::Result<()> {
    let attr = linux_raw_sys::general::mount_attr {
        attr_set: u64::from(linux_raw_sys::general::MOUNT_ATTR_IDMAP),
        attr_clr: 0,
        propagation: 0,
        // Not negative: an open descriptor.
        userns_fd: user_ns.as_raw_fd() as u64,
    };
    super::mount_attr::set(tree, &attr)
}

/// Runs `work` where these directories are shown mapped and where files it makes belong to the
/// mapped root, which on disk is root: on a thread of its own with a private mount namespace and
/// fsuid, both of which end with it.
pub(crate) fn with_layers_mapped<T: Send>(
    map: &IdMap,
    directories: &[PathBuf],
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    let user_ns = user_namespace(map)?;
    let run = || {
        ns::unshare_mounts_private()?;
        for directory in directories {
            show_mapped(directory, &user_ns)?;
        }
        become_mapped_root(map)?;
        work()
    };
    std::thread::scope(|scope| scope.spawn(run).join()).unwrap_or_else(|_| {
        Err(Errno::CANCELED).at("finish the thread that mounts", "mapped layers")
    })
}

/// Puts a mapped copy of the directory over the directory, in this thread's namespace alone.
fn show_mapped(directory: &Path, user_ns: &OwnedFd) -> Result<()> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let tree = rustix::mount::open_tree(CWD, directory, flags).at("clone", directory)?;
    match set_idmap(&tree, user_ns) {
        Err(Errno::NOSYS) => return Err(Error::TooOld { feature: "mount_setattr (5.12)" }),
        answer => answer.at("map the ids of", directory)?,
    }
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(&tree, "", CWD, directory, flags).at("show mapped", directory)
}

/// The mapped root's ids for files this thread makes; changing them drops the file-system
/// capabilities, which overlay keeps using for as long as it is mounted, so they are raised again.
fn become_mapped_root(map: &IdMap) -> Result<()> {
    nix::unistd::setfsgid(Gid::from_raw(map.base));
    nix::unistd::setfsuid(Uid::from_raw(map.base));
    let mut sets = rustix::thread::capabilities(None).at("read", "capabilities")?;
    sets.effective = sets.permitted;
    rustix::thread::set_capabilities(None, sets).at("raise", "capabilities")
}
