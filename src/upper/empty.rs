//! Deletes what is in a directory, by descriptor: without following a symlink, crossing a mount or
//! recursing, with one descriptor and a bounded list of names for each level.

use std::ffi::{OsStr, OsString};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::mpsc::sync_channel;

use rustix::fs::{AtFlags, FileType, IFlags};
use rustix::io::Errno;

use super::tree::{DirId, ascend, reopen};
use super::{Error, Result};
use crate::kernel::walk::{Dir, Entry, Info};
use crate::progress::Progress;

/// Subdirectories listed at once before going into them: bounds memory in deep trees, and how
/// often a wide directory is listed again.
pub(super) const BATCH: usize = 64;

/// Names read before the first of them goes. They go in the order of their inodes, which is how those lie
/// on the disk: a directory's own order is that of a hash, and touches each block of inodes again and again.
const TOGETHER: usize = 16_384;

/// Names that are looked at before the first of them goes, and how often a thread may be so much ahead.
const PIECE: usize = 64;
const AHEAD: usize = 8;

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
        let info = here.stat(&level.name)?;
        remove_name(&here, &level.name, &info, removed)?;
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
        while full.len() < BATCH {
            let mut some = Vec::new();
            for entry in entries.by_ref().take(TOGETHER) {
                some.push(entry?);
            }
            if some.is_empty() {
                break;
            }
            some.retain(|entry| Some(&*entry.name) != keep);
            some.sort_unstable_by_key(|entry| entry.ino);
            looked_at(dir, &some, |entry, info| {
                match remove_name(dir, &entry.name, &info, removed) {
                    Ok(()) => deleted = true,
                    Err(e) if info.kind == FileType::Directory && not_empty(&e) => {
                        full.push(entry.name.clone());
                    }
                    Err(e) => return Err(e),
                }
                Ok(full.len() < BATCH)
            })?;
        }
        // A listing during which names go may miss some: list again until nothing is seen.
        if !full.is_empty() || !deleted {
            return Ok(full);
        }
    }
}

/// Tells what each name is, until `remove` wants no more. Where there are many, a thread looks ahead: it
/// writes nothing, so that nobody waits for it, and looking is a seventh of a removal.
fn looked_at(
    dir: &Dir,
    some: &[Entry],
    mut remove: impl FnMut(&Entry, Info) -> Result<bool>,
) -> Result<()> {
    let look =
        |piece: &[Entry]| piece.iter().map(|entry| dir.stat(&entry.name)).collect::<Vec<_>>();
    std::thread::scope(|scope| {
        let (give, seen) = sync_channel(AHEAD);
        let ahead = some.len() > PIECE * AHEAD
            && std::thread::Builder::new()
                .name("look ahead".to_owned())
                .spawn_scoped(scope, move || {
                    some.chunks(PIECE).all(|piece| give.send(look(piece)).is_ok())
                })
                .is_ok();
        for piece in some.chunks(PIECE) {
            let infos = match ahead {
                true => seen.recv().unwrap_or_else(|_| look(piece)),
                false => look(piece),
            };
            for (entry, info) in piece.iter().zip(infos) {
                if !remove(entry, info?)? {
                    return Ok(());
                }
            }
        }
        Ok(())
    })
}

fn not_empty(e: &Error) -> bool {
    matches!(e.errno(), Some(Errno::NOTEMPTY | Errno::EXIST))
}

fn remove_name(dir: &Dir, name: &OsStr, info: &Info, removed: &Progress) -> Result<()> {
    let directory = info.kind == FileType::Directory;
    // It was looked at before others of its names went.
    let freed = directory || info.nlink <= 1 || dir.stat(name)?.nlink <= 1;
    unlink(dir, name, if directory { AtFlags::REMOVEDIR } else { AtFlags::empty() })?;
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
