//! Everything that is asked of the kernel, and the only room with `unsafe`.
//!
//! Synchronous, without a runtime: descriptors in, descriptors out. A function returns what the
//! kernel *answered*, with the question in a [`crate::model::facts::Proof`] where a fence rests on
//! it; nothing here decides what follows. May use `model` (types) and `failpoint`, no other room.
//!
//! What this room puts on disk or into kernel file systems:
//!
//! ```text
//! <cgroup root>/.../<session>/          made by `cgroup::Cgroup::create`, removed by rmdir only
//!     (xattr) trusted.overfence.stamp   why we froze it and under which generation
//!     (xattr) trusted.overfence.ticket  digest of the ticket that sealed it
//! <run>/deadlines                       `deadlines::Table`: the agent writes, the keeper reads
//! <run>/cell                            `ns::make_cell`: a pinned mount namespace (nsfs bind)
//! /sys/fs/bpf/overfence                 `gate`: the programs that check the lease, and their maps
//! <session>/seal                        `seal`: what carried the flag before we set ours
//! <session>/image, <session>/disk       `image`: a file system of the session's own, and its mount
//! <probe directory>/.overfence-probe-*  `overlay::preflight`, `gone::index_probe`, `doctor`:
//!                                       removed again before they return
//! ```
//!
//! Kernel documents followed: Documentation/filesystems/overlayfs.rst,
//! Documentation/admin-guide/cgroup-v2.rst, fsopen(2), mount_setattr(2), openat2(2), inotify(7).

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::io::Errno;

pub mod background;
pub mod blockers;
pub mod cgroup;
pub mod clock;
pub mod deadlines;
pub mod doctor;
pub mod events;
pub mod gate;
pub mod gone;
pub mod handle;
pub mod holders;
pub mod idmap;
pub mod image;
pub mod launch;
pub mod limits;
pub mod members;
pub(crate) mod mount_attr;
pub mod mountinfo;
pub mod ns;
pub mod overlay;
pub mod reflink;
pub mod rivals;
pub mod seal;
mod slots;
mod statmount;
pub mod unit;
pub mod walk;

/// What the kernel refused, or what it answered that cannot be worked with.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A call failed; the source says how.
    #[error("cannot {op} {}", path.display())]
    Call {
        /// What was tried, a verb phrase.
        op: &'static str,
        /// On what.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: Errno,
    },
    /// A mount was refused and the kernel said why in words.
    #[error("cannot {op} {}: kernel log: {log:?}", path.display())]
    Refused {
        /// What was tried.
        op: &'static str,
        /// On what.
        path: PathBuf,
        /// The messages on the mount context, often empty on older kernels.
        log: String,
        /// The kernel's answer.
        #[source]
        source: Errno,
    },
    /// Only cgroup v1 is mounted.
    #[error(
        "no cgroup v2 hierarchy is mounted on this host; fencing needs its freezer: boot with \
         systemd.unified_cgroup_hierarchy=1, or mount cgroup2 at /sys/fs/cgroup/unified"
    )]
    V1Only,
    /// A limit was asked for that needs a controller which the sessions' cgroups do not have.
    #[error("no limit by the cgroup controller `{controller}`: {reason}")]
    NoController {
        /// `memory`, `pids` or `cpu`.
        controller: &'static str,
        /// Where it is missing, and how to have it.
        reason: String,
    },
    /// The lease gate is not to be had, or not for one session.
    #[error("no lease gate: {reason}")]
    NoGate {
        /// Why.
        reason: String,
    },
    /// Another agent has its turn with the lease gate, and does not end it.
    #[error("another agent has had the lock on {} for {} s (lslocks names it: let it go on, or end it)", lock.display(), waited.as_secs())]
    GateBusy {
        /// What is locked.
        lock: PathBuf,
        /// How long it was waited for.
        waited: std::time::Duration,
    },
    /// No file system could be made in an image.
    #[error("cannot make a file system in {}: {reason}", path.display())]
    Mkfs {
        /// The image.
        path: PathBuf,
        /// What mkfs.ext4 said, or what is missing.
        reason: String,
    },
    /// The running kernel lacks something.
    #[error("this kernel does not have {feature}; `overfence doctor` lists what is needed")]
    TooOld {
        /// The missing feature.
        feature: &'static str,
    },
    /// Two directories of one overlay lie within each other.
    #[error(
        "{} and {} overlap; an overlay needs its layers, upper and work apart from each other",
        a.display(), b.display()
    )]
    Overlap {
        /// One directory.
        a: PathBuf,
        /// The other.
        b: PathBuf,
    },
    /// A directory cannot carry an upper.
    #[error("{} cannot hold an upper: {reason}", path.display())]
    BadUpper {
        /// The directory.
        path: PathBuf,
        /// Why, and what to use instead.
        reason: String,
    },
    /// The kernel accepted a mount that is not the one asked for.
    #[error("the mount at {} is not what was asked for: {reason}", path.display())]
    WrongMount {
        /// Where.
        path: PathBuf,
        /// What differs.
        reason: String,
    },
    /// A file of ours or of the kernel could not be understood.
    #[error("{} cannot be understood: {reason}", path.display())]
    Garbled {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A value does not fit a fixed limit.
    #[error("{what} does not fit: {reason}")]
    Limit {
        /// What was given.
        what: String,
        /// The limit it breaks.
        reason: String,
    },
}

impl Error {
    /// The errno behind this error, if the kernel gave one.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Call { source, .. } | Self::Refused { source, .. } => Some(*source),
            _ => None,
        }
    }
}

/// Results of this room.
pub type Result<T> = std::result::Result<T, Error>;

/// Adds what was tried, and on what, to an errno.
pub(crate) trait At<T> {
    fn at(self, op: &'static str, path: impl AsRef<Path>) -> Result<T>;
}

impl<T> At<T> for rustix::io::Result<T> {
    fn at(self, op: &'static str, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|source| Error::Call { op, path: path.as_ref().to_owned(), source })
    }
}

impl<T> At<T> for std::io::Result<T> {
    fn at(self, op: &'static str, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|e| Error::Call {
            op,
            path: path.as_ref().to_owned(),
            source: Errno::from_io_error(&e).unwrap_or(Errno::IO),
        })
    }
}

/// A path that names what `fd` is open on, for calls that take no descriptor.
pub(crate) fn proc_path(fd: impl std::os::fd::AsFd) -> PathBuf {
    use std::os::fd::AsRawFd as _;
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))
}

/// Opens anew what `fd` holds, which may be an O_PATH descriptor.
pub(crate) fn reopen(
    fd: impl std::os::fd::AsFd,
    flags: rustix::fs::OFlags,
) -> rustix::io::Result<OwnedFd> {
    use std::os::fd::AsRawFd as _;
    // Held open: a hundred thousand files of an upper would walk to it from the root. A child that was
    // forked has descriptors of its own.
    static OWN: OnceLock<(u32, OwnedFd)> = OnceLock::new();
    let mode = rustix::fs::Mode::empty();
    let number = fd.as_fd().as_raw_fd();
    let (process, fds) = match OWN.get() {
        Some(own) => own,
        None => {
            let dir = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
            let fds = rustix::fs::open("/proc/self/fd", dir, mode)?;
            OWN.get_or_init(|| (std::process::id(), fds))
        }
    };
    match *process == std::process::id() {
        true => rustix::fs::openat(fds, rustix::path::DecInt::new(number), flags, mode),
        false => rustix::fs::open(proc_path(fd), flags, mode),
    }
}

/// The magic number of the file system that `fd` is on; all of them have 32 bits, while the width
/// and sign of the kernel's field differ between architectures.
pub(crate) fn fs_magic(fd: impl std::os::fd::AsFd) -> rustix::io::Result<u64> {
    rustix::fs::fstatfs(fd).map(|fs| fs.f_type as u64 & 0xffff_ffff)
}
