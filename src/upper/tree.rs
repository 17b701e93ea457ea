//! Goes through a directory tree depth first, in byte order, with one descriptor open at a time.
//!
//! A tree may be tens of thousands of levels deep and its paths longer than the kernel takes, so
//! nothing here recurses, holds a descriptor for each level, or resolves a path again: the way up
//! is `..`, believed only if device and inode are those the descent started from.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::{At as _, Error, Result, Shown};
use crate::kernel::walk::{Dir, Entry};

/// Which directory this is, whatever its name is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DirId {
    dev: u64,
    ino: u64,
}

impl DirId {
    pub(super) fn of(dir: &Dir) -> Result<Self> {
        let info = dir.own_stat()?;
        Ok(Self { dev: info.dev, ino: info.ino })
    }
}

/// Opens a fresh description of the same directory, with `path` for messages.
pub(super) fn reopen(fd: impl AsFd, path: &Path) -> Result<Dir> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let own = rustix::fs::openat(fd, c".", flags, Mode::empty()).at("open directory", path)?;
    Ok(Dir::from_fd(own, path))
}

/// Opens the directory above `dir`, which must be `want`.
pub(super) fn ascend(dir: &Dir, want: DirId) -> Result<Dir> {
    let above = dir.path().parent().unwrap_or(Path::new(""));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let fd: OwnedFd = loop {
        match rustix::fs::openat2(dir, c"..", flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            answer => break answer.at("go up from", dir.path())?,
        }
    };
    let up = Dir::from_fd(fd, above);
    if DirId::of(&up)? == want {
        Ok(up)
    } else {
        Err(Error::Changed { path: Shown::from(dir.path()) })
    }
}

/// One step of a walk.
#[derive(Debug)]
pub(super) enum Step {
    /// A name in the current directory.
    Name(Entry),
    /// A directory that was entered is done; the current directory is the one above it.
    Left,
}

struct Level {
    names: std::vec::IntoIter<Entry>,
    id: DirId,
}

/// A walk: yields names, descends where it is told to.
pub(super) struct Walk {
    here: Dir,
    levels: Vec<Level>,
}

impl Walk {
    /// Starts at the top directory; paths are relative to it.
    pub(super) fn new(top: impl AsFd) -> Result<Self> {
        let here = reopen(top, Path::new(""))?;
        let level = Level { names: here.sorted()?.into_iter(), id: DirId::of(&here)? };
        Ok(Self { here, levels: vec![level] })
    }

    /// The directory that the last [`Step::Name`] is in; its path is relative to the top.
    pub(super) fn here(&self) -> &Dir {
        &self.here
    }

    /// Goes into a directory whose name was the last step.
    pub(super) fn enter(&mut self, entry: &Entry) -> Result<()> {
        let child = self.here.child(&entry.name)?;
        let level = Level { names: child.sorted()?.into_iter(), id: DirId::of(&child)? };
        self.levels.push(level);
        self.here = child;
        Ok(())
    }

    /// The next step; `None` once the top directory is done.
    pub(super) fn step(&mut self) -> Result<Option<Step>> {
        let Some(level) = self.levels.last_mut() else { return Ok(None) };
        if let Some(entry) = level.names.next() {
            return Ok(Some(Step::Name(entry)));
        }
        self.levels.pop();
        let Some(above) = self.levels.last() else { return Ok(None) };
        self.here = ascend(&self.here, above.id)?;
        Ok(Some(Step::Left))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt as _;

    fn all(top: &Path) -> Vec<Vec<u8>> {
        let mut walk = Walk::new(std::fs::File::open(top).unwrap()).unwrap();
        let mut seen = Vec::new();
        while let Some(step) = walk.step().unwrap() {
            if let Step::Name(entry) = step {
                seen.push(walk.here().path().join(&entry.name).as_os_str().as_bytes().to_vec());
                if entry.kind == rustix::fs::FileType::Directory {
                    walk.enter(&entry).unwrap();
                }
            }
        }
        seen
    }

    #[test]
    fn parents_come_before_children_in_byte_order() {
        let tmp = tempfile::tempdir().unwrap();
        for dir in ["b/y", "b/x/z", "a"] {
            std::fs::create_dir_all(tmp.path().join(dir)).unwrap();
        }
        std::fs::write(tmp.path().join("b.f"), b"").unwrap();
        let want: [&[u8]; 6] = [b"a", b"b", b"b/x", b"b/x/z", b"b/y", b"b.f"];
        assert_eq!(all(tmp.path()), want);
    }

    #[test]
    fn a_directory_moved_away_during_the_walk_is_noticed() {
        let tmp = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(tmp.path().join("a/b")).unwrap();
        let mut walk = Walk::new(std::fs::File::open(tmp.path()).unwrap()).unwrap();
        for _ in 0..2 {
            let Some(Step::Name(entry)) = walk.step().unwrap() else { panic!("no name") };
            walk.enter(&entry).unwrap();
        }
        std::fs::rename(tmp.path().join("a/b"), tmp.path().join("b")).unwrap();
        assert!(matches!(walk.step(), Err(Error::Changed { .. })));
    }
}
