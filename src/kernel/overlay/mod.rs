//! Overlay mounts: made, adopted, made read-only as a *superblock* (which is the only read-only
//! that stops a writer in every namespace), and unmounted.
//!
//! A [`Mounted`] holds the mount busy: drop it before [`unmount`].

mod build;
mod preflight;

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{FsPickFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags};

pub use build::Style;
pub use preflight::preflight;

use super::idmap::IdMap;
use super::mountinfo::{self, Superblock};
use super::walk::{self, Info};
use super::{At as _, Error, Result, clock};
use crate::failpoint;
use crate::model::facts::Proof;

/// How the source of every session's overlay begins.
pub const LABEL: &str = "overfence-";

/// One overlay to mount.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The read-only layers, **lowest first**, as in [`crate::model::head::Head`]. At least one:
    /// for an empty head give an empty directory.
    pub lowers: Vec<PathBuf>,
    /// Where writes go.
    pub upper: PathBuf,
    /// The overlay's own work directory, empty, beside the upper on the same mount.
    pub work: PathBuf,
    /// An existing directory to mount on.
    pub target: PathBuf,
    /// For workloads that run as a mapped uid 0: ids on disk are shown shifted by this map.
    pub mapped: Option<IdMap>,
}

/// A mounted overlay, held busy by its root descriptor.
#[derive(Debug)]
pub struct Mounted {
    /// Its root, O_PATH.
    pub root: OwnedFd,
    /// Device number of its superblock (makedev form); reused after the superblock's death.
    pub s_dev: u64,
}

impl Mounted {
    fn new(root: OwnedFd, target: &Path) -> Result<Self> {
        let s_dev = walk::stat_fd(&root).at("stat", target)?.dev;
        Ok(Self { root, s_dev })
    }
}

/// Mounts an overlay with `nosuid,nodev`: builds it detached in the best way this kernel has, puts
/// it in place and reads back that all its layers are in it; if not, it is taken away again.
/// (The kernel describes only mounts that are in a namespace.)
pub fn mount(spec: &Spec) -> Result<Mounted> {
    mount_with(spec, |_| {})
}

/// [`mount`]; `before` is given the overlay's root while no path leads to it.
pub fn mount_with(spec: &Spec, before: impl FnOnce(&OwnedFd)) -> Result<Mounted> {
    failpoint::fails("kernel.mount.before").at("mount an overlay at", &spec.target)?;
    let root = build::detached(spec)?;
    before(&root);
    attach(&root, &spec.target)?;
    failpoint::hit("kernel.mount.after");
    let mounted = Mounted::new(root, &spec.target)?;
    if let Err(fault) = check(spec) {
        drop(mounted);
        unmount(&spec.target)?;
        return Err(fault);
    }
    Ok(mounted)
}

/// As [`mount`], and out of the tree again: what it shows is read by the descriptor alone, and it is
/// gone with that. A crash in between leaves it at the target.
pub fn unattached(spec: &Spec) -> Result<OwnedFd> {
    let Mounted { root, .. } = mount(spec)?;
    rustix::mount::unmount(&spec.target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
        .at("unmount", &spec.target)?;
    Ok(root)
}

/// [`mount`] in one given style, so that a newer kernel can show that the older styles work.
pub fn mount_styled(spec: &Spec, style: Style) -> Result<Mounted> {
    mount_styled_with(spec, style, |_| {})
}

/// [`mount_with`] in one given style.
pub fn mount_styled_with(
    spec: &Spec,
    style: Style,
    before: impl FnOnce(&OwnedFd),
) -> Result<Mounted> {
    let root = build::detached_styled(spec, style)?;
    before(&root);
    attach(&root, &spec.target)?;
    let mounted = Mounted::new(root, &spec.target)?;
    check(spec).map(|()| mounted)
}

/// All layers asked for are in the mount that is on top at the target now.
fn check(spec: &Spec) -> Result<()> {
    let fault = |reason| Error::WrongMount { path: spec.target.clone(), reason };
    let seen = mountinfo::superblock_of(&open_root(&spec.target)?)?
        .ok_or_else(|| fault("nothing is mounted there".to_owned()))?;
    check_label(&seen, &spec.target, &spec.upper)?;
    let shown = layers_shown(&seen);
    if shown != spec.lowers.len() {
        return Err(fault(format!("{shown} of {} lower layers are in it", spec.lowers.len())));
    }
    Ok(())
}

/// The root of what is on top at `target` now.
fn open_root(target: &Path) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(target, flags, Mode::empty()).at("open", target)
}

fn check_label(seen: &Superblock, target: &Path, upper: &Path) -> Result<()> {
    let fault = |reason| Error::WrongMount { path: target.to_owned(), reason };
    if !seen.is("overlay") {
        return Err(fault(format!("it is of type {:?}", seen.fs_type)));
    }
    let want = label(&walk::stat_path(upper)?);
    if seen.source != *want {
        return Err(fault(format!("its source is {:?}, not {want:?}", seen.source)));
    }
    Ok(())
}

/// How many lower layers a mount shows: one option each, or one string with colons between.
fn layers_shown(seen: &Superblock) -> usize {
    use std::os::unix::ffi::OsStrExt as _;
    let one_by_one = seen.option("lowerdir+").count();
    let joined: usize = seen.option("lowerdir").map(|l| count_joined(l.as_bytes())).sum();
    one_by_one + joined
}

fn count_joined(text: &[u8]) -> usize {
    let mut escaped = false;
    let colons = text.iter().filter(|b| {
        let separates = **b == b':' && !escaped;
        escaped = **b == b'\\' && !escaped;
        separates
    });
    1 + colons.count()
}

/// The source we give an overlay, so that it is known again whatever the paths look like from
/// where it was built: device and inode of its upper, which hold for this boot as the mount does.
fn label(upper: &Info) -> String {
    format!("{LABEL}{:x}-{}", upper.dev, upper.ino)
}

/// The overlay that is mounted at `target` on top of this `upper`, after an agent restart; `None`
/// if nothing is mounted there.
pub fn open_mounted(target: &Path, upper: &Path) -> Result<Option<Mounted>> {
    let target = match std::fs::canonicalize(target) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        answer => answer.at("resolve", target)?,
    };
    let Some(mount) = mountinfo::at(mountinfo::read(None)?, &target) else { return Ok(None) };
    check_label(&mount.superblock, &target, upper)?;
    let root = open_root(&target)?;
    if walk::stat_fd(&root).at("stat", &target)?.mount_id != mount.id {
        let reason = "another mount came on top meanwhile".to_owned();
        return Err(Error::WrongMount { path: target, reason });
    }
    Mounted::new(root, &target).map(Some)
}

/// What a request for read-only was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadOnly {
    /// The superblock is read-only and a probe got EROFS: no writer is left in any namespace.
    Granted(Proof),
    /// Somebody still holds it for write; see [`super::holders`].
    Busy(Proof),
    /// Nobody holds it for write, but the file system below the upper refuses the sync that comes next:
    /// it met an error and takes no writes any more. Asked again it answers the same.
    Refused(Proof),
}

/// Asks for a read-only superblock. Syncs the whole file system below the upper: can take
/// seconds, uninterruptibly.
pub fn remount_ro(root: &OwnedFd) -> Result<ReadOnly> {
    let begun = clock::now();
    let proof = |answer: String| Proof {
        asked: "reconfigure overlay superblock ro, then faccessat W_OK".to_owned(),
        answer,
        at: clock::now(),
        took_us: clock::micros_since(begun),
    };
    match failpoint::fails("kernel.remount-ro.before").and_then(|()| reconfigure(root, "ro")) {
        Err(Errno::BUSY) => return Ok(ReadOnly::Busy(proof("EBUSY".to_owned()))),
        // From 6.14 on: writers are looked for first, so there are none, and then it is synced.
        Err(Errno::ROFS) => {
            let why = "EROFS: the upper's file system stopped after an error and cannot be synced";
            return Ok(ReadOnly::Refused(proof(why.to_owned())));
        }
        answer => answer.at("make read-only", "the overlay's superblock")?,
    }
    failpoint::hit("kernel.remount-ro.after");
    if !is_read_only(root)? {
        return Err(Error::WrongMount {
            path: super::proc_path(root),
            reason: "the kernel granted ro, but the superblock is writable".to_owned(),
        });
    }
    Ok(ReadOnly::Granted(proof("ok, EROFS".to_owned())))
}

/// Makes the superblock writable again. Asks nothing else of it.
pub fn remount_rw(root: &OwnedFd) -> Result<Proof> {
    failpoint::fails("kernel.remount-rw.before").at("make writable", "the overlay's superblock")?;
    let begun = clock::now();
    reconfigure(root, "rw").at("make writable", "the overlay's superblock")?;
    failpoint::hit("kernel.remount-rw.after");
    write_probe(root).at("write-probe after rw", "the overlay's root")?;
    Ok(Proof {
        asked: "reconfigure overlay superblock rw, then faccessat W_OK".to_owned(),
        answer: "ok, ok".to_owned(),
        at: clock::now(),
        took_us: clock::micros_since(begun),
    })
}

fn reconfigure(root: &OwnedFd, flag: &str) -> rustix::io::Result<()> {
    let flags = FsPickFlags::FSPICK_EMPTY_PATH | FsPickFlags::FSPICK_CLOEXEC;
    let fs = rustix::mount::fspick(root, "", flags)?;
    rustix::mount::fsconfig_set_flag(fs.as_fd(), flag)?;
    rustix::mount::fsconfig_reconfigure(fs.as_fd())
}

/// Asks for write access without opening anything: an open for write would start a copy-up.
fn write_probe(root: &OwnedFd) -> rustix::io::Result<()> {
    rustix::fs::accessat(root, ".", Access::WRITE_OK, AtFlags::empty())
}

/// Whether a write is refused *and* it is the superblock that refuses it: a read-only mount would
/// answer the probe the same and stop nobody who has another mount.
pub fn is_read_only(root: &OwnedFd) -> Result<bool> {
    match write_probe(root) {
        // EPERM: the superblock lets it pass, a sealed upper does not.
        Ok(()) | Err(Errno::PERM) => return Ok(false),
        Err(Errno::ROFS) => {}
        Err(e) => return Err(e).at("write-probe", "the overlay's root"),
    }
    let seen = mountinfo::superblock_of(root)?;
    seen.map(|superblock| superblock.read_only).ok_or_else(|| Error::WrongMount {
        path: super::proc_path(root),
        reason: "it is not mounted in this namespace any more".to_owned(),
    })
}

/// What unmounting was answered. None of these says that the superblock is gone: see
/// [`super::gone`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmount {
    /// It was unmounted here.
    Done,
    /// Nothing was mounted there.
    NotMounted,
    /// Somebody in this namespace uses it.
    Busy,
}

/// Unmounts what is on top at `target`, never lazily: detaching proves nothing. Can sync the whole
/// file system below the upper.
pub fn unmount(target: &Path) -> Result<Unmount> {
    failpoint::fails("kernel.umount.before").at("unmount", target)?;
    let answer = match rustix::mount::unmount(target, UnmountFlags::NOFOLLOW) {
        Ok(()) => Unmount::Done,
        Err(Errno::INVAL | Errno::NOENT) => Unmount::NotMounted,
        Err(Errno::BUSY) => Unmount::Busy,
        Err(e) => return Err(e).at("unmount", target),
    };
    failpoint::hit("kernel.umount.after");
    Ok(answer)
}

/// A detached copy of what is mounted at `target`; it keeps the superblock alive.
pub fn clone_tree(target: &Path) -> Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    rustix::mount::open_tree(CWD, target, flags).at("clone the mount at", target)
}

/// Puts a detached mount at `target`, in the namespace the caller is in now.
pub fn attach(tree: &OwnedFd, target: &Path) -> Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(tree, "", CWD, target, flags).at("mount at", target)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joined_layers_are_counted_by_their_separators() {
        for (text, n) in [(&b"/a"[..], 1), (b"/a:/b", 2), (b"/a\\:b:/c", 2), (b"/a\\\\:/b", 2)] {
            assert_eq!(count_joined(text), n, "{:?}", String::from_utf8_lossy(text));
        }
    }
}
