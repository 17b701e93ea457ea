//! Deletes what is in a directory, by descriptor: without following a symlink, crossing a mount or
//! recursing, with one descriptor and a bounded list of names for each level.

use std::ffi::{OsStr, OsString};
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, IFlags};
use rustix::io::Errno;

use super::tree::{DirId, ascend, reopen};
use super::{Error, Result};
use crate::kernel::walk::Dir;
use crate::progress::Progress;

/// Subdirectories listed at once before going into them: bounds memory in deep trees, and how
/// often a wide directory is listed again.
pub(super) const BATCH: usize = 64;

/// Names read before the first of them goes. They go in the order of their inodes, which is how those lie
/// on the disk: a directory's own order is that of a hash, and touches each block of inodes again and again.
const TOGETHER: usize = 16_384;

/// A directory on the way down.
struct Level {
    /// The name of the directory we are in, in the one above it.
    name: OsString,
    /// The one above it.
    above: DirId,
    /// Subdirectories of the one above that are still to be entered.
    waiting: Vec<OsString>,
}

/// Deletes everything in `top` but the name `keep`; the directory itself stays. Paths in errors
/// are those of `top`.
pub(super) fn empty(top: Dir, keep: Option<&OsStr>, removed: &Progress) -> Result<()> {
    let mut here = top;
    let mut levels: Vec<Level> = Vec::new();
    let mut waiting: Vec<OsString> = Vec::new();
    loop {
        if waiting.is_empty() {
            waiting = sweep(&here, keep.filter(|_| levels.is_empty()), removed)?;
        }
        if let Some(name) = waiting.pop() {
            let above = DirId::of(&here)?;
            let child = shorten(here.child(&name)?)?;
            levels.push(Level { name, above, waiting: std::mem::take(&mut waiting) });
            here = child;
            continue;
        }
        let Some(level) = levels.pop() else { return Ok(()) };
        here = ascend(&here, level.above)?;
        remove_name(&here, &level.name, AtFlags::REMOVEDIR, removed)?;
        waiting = level.waiting;
    }
}

/// Keeps paths, which are for messages here, from growing with the depth of a hostile tree.
fn shorten(dir: Dir) -> Result<Dir> {
    match dir.path().as_os_str().len() > 4096 {
        true => reopen(&dir, Path::new("(far below)")),
        false => Ok(dir),
    }
}

/// Deletes all that is no directory, and empty directories. Returns up to [`BATCH`] directories
/// that hold something; none only if nothing but `keep` is left.
fn sweep(dir: &Dir, keep: Option<&OsStr>, removed: &Progress) -> Result<Vec<OsString>> {
    loop {
        let (mut full, mut deleted) = (Vec::new(), false);
        let listing = reopen(dir, dir.path())?;
        let mut entries = listing.entries()?;
        'listing: loop {
            let mut some = Vec::new();
            for entry in entries.by_ref().take(TOGETHER) {
                some.push(entry?);
            }
            if some.is_empty() {
                break;
            }
            some.sort_unstable_by_key(|entry| entry.ino);
            for entry in some {
                if Some(&*entry.name) == keep {
                    continue;
                }
                let kind = match entry.kind {
                    FileType::Unknown => dir.stat(&entry.name)?.kind,
                    known => known,
                };
                let flags = match kind {
                    FileType::Directory => AtFlags::REMOVEDIR,
                    _ => AtFlags::empty(),
                };
                match remove_name(dir, &entry.name, flags, removed) {
                    Ok(()) => deleted = true,
                    Err(e) if kind == FileType::Directory && not_empty(&e) => {
                        full.push(entry.name);
                        if full.len() == BATCH {
                            break 'listing;
                        }
                    }
                    Err(e) => return Err(e),
                }
            }
        }
        // A listing during which names go may miss some: list again until nothing is seen.
        if !full.is_empty() || !deleted {
            return Ok(full);
        }
    }
}

fn not_empty(e: &Error) -> bool {
    matches!(e.errno(), Some(Errno::NOTEMPTY | Errno::EXIST))
}

fn remove_name(dir: &Dir, name: &OsStr, flags: AtFlags, removed: &Progress) -> Result<()> {
    let info = dir.stat(name)?;
    unlink(dir, name, flags)?;
    let freed = info.nlink <= 1 || info.kind == FileType::Directory;
    removed.did(if freed { info.blocks * 512 } else { 0 }, 1);
    Ok(())
}

/// Unlinks a name; if it or its directory is immutable or append-only, clears that first.
pub(super) fn unlink(dir: &Dir, name: &OsStr, flags: AtFlags) -> Result<()> {
    let answer = match rustix::fs::unlinkat(dir, name, flags) {
        Err(Errno::PERM | Errno::ACCESS) => {
            unlock(dir);
            match flags.contains(AtFlags::REMOVEDIR) {
                true => dir.child(name).map(|child| unlock(&child)).unwrap_or_default(),
                false => dir.open_file(name).map(|file| unlock(&file)).unwrap_or_default(),
            }
            rustix::fs::unlinkat(dir, name, flags)
        }
        answer => answer,
    };
    answer.map_err(|source| dir.error("remove", name, source).into())
}

/// Clears the flags that forbid removal. That it did not work is told by the next attempt.
fn unlock(fd: impl AsFd) {
    let lock = IFlags::IMMUTABLE | IFlags::APPEND;
    if let Ok(flags) = rustix::fs::ioctl_getflags(&fd)
        && flags.intersects(lock)
    {
        let _ = rustix::fs::ioctl_setflags(&fd, flags - lock);
    }
}
