//! What a stack of read-only layers shows, asked directory by directory, as overlay would merge them:
//! the topmost that has a name decides, a whiteout ends the search, an opaque directory hides those
//! below it.
//!
//! One descriptor for each layer, however deep: those that have the present directory went down into
//! it, and go up again by `..`.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;

use rustix::fs::FileType;
use rustix::io::Errno;

use super::changes::opaque_mark;
use super::tree::{DirId, ascend};
use super::{At as _, Result};
use crate::kernel::walk::{self, Dir, Info};

/// A stack of layers, at one directory.
pub struct Lowers {
    at: Vec<OsString>,
    levels: Vec<Vec<Held>>,
}

/// A layer's directory on the way down.
enum Held {
    Open(Dir),
    /// Its descriptor went on into the level below.
    Below(DirId),
}

/// What has a name in the present directory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) info: Info,
    layer: usize,
}

impl Lowers {
    /// At the top of these layers, **lowest first**, as in a head. None at all shows nothing.
    pub fn new(layers: Vec<Dir>) -> Self {
        Self { at: Vec::new(), levels: vec![layers.into_iter().rev().map(Held::Open).collect()] }
    }

    fn open(&self) -> impl Iterator<Item = (usize, &Dir)> {
        let last = self.levels.last().into_iter().flatten().enumerate();
        last.filter_map(|(n, held)| match held {
            Held::Open(dir) => Some((n, dir)),
            Held::Below(_) => None,
        })
    }

    /// Whether `other` shows the same directories at the same place: all below is then the same.
    pub(super) fn is_same(&self, other: &Self) -> Result<bool> {
        let ids = |of: &Self| of.open().map(|(_, dir)| DirId::of(dir)).collect::<Result<Vec<_>>>();
        Ok(ids(self)? == ids(other)?)
    }

    /// The topmost of the present directory.
    pub(super) fn own(&self) -> Option<&Dir> {
        self.open().next().map(|(_, dir)| dir)
    }

    /// What has this name here.
    pub(super) fn find(&self, name: &OsStr) -> Result<Option<Found>> {
        for (layer, dir) in self.open() {
            match dir.stat(name) {
                Err(e) if e.errno() == Some(Errno::NOENT) => {}
                Err(e) => return Err(e.into()),
                Ok(info) if info.is_whiteout() => return Ok(None),
                Ok(info) => return Ok(Some(Found { info, layer })),
            }
        }
        Ok(None)
    }

    /// The directory in which something was found.
    pub(super) fn dir_of(&self, found: &Found) -> Option<&Dir> {
        self.open().find(|(n, _)| *n == found.layer).map(|(_, dir)| dir)
    }

    /// Goes into a directory; one that is not there shows nothing.
    pub(super) fn enter(&mut self, name: &OsStr) -> Result<()> {
        let mut below = Vec::new();
        for held in self.levels.last_mut().into_iter().flatten() {
            let Held::Open(dir) = held else { continue };
            let child = match dir.stat(name) {
                Err(e) if e.errno() == Some(Errno::NOENT) => continue,
                Err(e) => return Err(e.into()),
                Ok(info) if info.kind == FileType::Directory => dir.child(name)?,
                // A whiteout or a file: it hides what is below.
                Ok(_) => break,
            };
            let id = DirId::of(dir)?;
            let opaque = walk::xattr(&child, opaque_mark()).at("read xattrs of", child.path())?;
            *held = Held::Below(id);
            below.push(Held::Open(child));
            if opaque.as_deref() == Some(b"y") {
                break;
            }
        }
        self.levels.push(below);
        self.at.push(name.to_owned());
        Ok(())
    }

    /// Goes up again.
    pub(super) fn leave(&mut self) -> Result<()> {
        if self.at.pop().is_none() {
            return Ok(());
        }
        let mut children = self.levels.pop().into_iter().flatten();
        for held in self.levels.last_mut().into_iter().flatten() {
            if let Held::Below(id) = held
                && let Some(Held::Open(child)) = children.next()
            {
                *held = Held::Open(ascend(&child, *id)?);
            }
        }
        Ok(())
    }

    /// Goes to the directory of this path, from wherever it is.
    pub(super) fn go_to(&mut self, path: &[u8]) -> Result<()> {
        let wanted = || path.split(|b| *b == b'/').filter(|part| !part.is_empty());
        let common = wanted().zip(&self.at).take_while(|(a, b)| **a == *b.as_bytes()).count();
        while self.at.len() > common {
            self.leave()?;
        }
        for part in wanted().skip(common) {
            self.enter(OsStr::from_bytes(part))?;
        }
        Ok(())
    }

    /// The names here, and which are directories. Holds all names of this one directory.
    pub(super) fn names(&self) -> Result<Vec<(OsString, bool)>> {
        // `None`: deleted by a layer above.
        let mut all = BTreeMap::<OsString, Option<bool>>::new();
        for (_, dir) in self.open() {
            for entry in dir.entries()? {
                let entry = entry?;
                if all.contains_key(&entry.name) {
                    continue;
                }
                let shown = match entry.kind {
                    FileType::Directory => Some(true),
                    FileType::Unknown | FileType::CharacterDevice => {
                        let info = dir.stat(&entry.name)?;
                        (!info.is_whiteout()).then_some(info.kind == FileType::Directory)
                    }
                    _ => Some(false),
                };
                all.insert(entry.name, shown);
            }
        }
        Ok(all.into_iter().filter_map(|(name, dir)| dir.map(|dir| (name, dir))).collect())
    }

    /// How many names below the present directory are not in `kept` at the same place. Both are
    /// where they were afterwards.
    pub(super) fn not_in(&mut self, kept: &mut Self) -> Result<u64> {
        let mut gone = 0;
        let mut levels = vec![self.names()?.into_iter()];
        while let Some(names) = levels.last_mut() {
            let Some((name, is_dir)) = names.next() else {
                levels.pop();
                if !levels.is_empty() {
                    self.leave()?;
                    kept.leave()?;
                }
                continue;
            };
            if kept.find(&name)?.is_none() {
                gone += 1;
            }
            if is_dir {
                self.enter(&name)?;
                kept.enter(&name)?;
                levels.push(self.names()?.into_iter());
            }
        }
        Ok(gone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn lowers(tmp: &Path, names: &[&str]) -> Lowers {
        Lowers::new(names.iter().map(|name| Dir::open(&tmp.join(name)).unwrap()).collect())
    }

    fn names(of: &Lowers) -> Vec<String> {
        let all = of.names().unwrap().into_iter();
        all.map(|(name, dir)| format!("{}{}", name.display(), if dir { "/" } else { "" })).collect()
    }

    #[test]
    fn layers_are_merged_and_left_again() {
        let tmp = tempfile::tempdir().unwrap();
        for dir in ["low/d/deep", "low/e", "high/d", "high/f"] {
            std::fs::create_dir_all(tmp.path().join(dir)).unwrap();
        }
        for file in ["low/d/a", "low/d/deep/x", "low/e/b", "low/f", "high/d/a", "high/d/c"] {
            std::fs::write(tmp.path().join(file), file).unwrap();
        }
        let mut both = lowers(tmp.path(), &["low", "high"]);
        assert_eq!(names(&both), ["d/", "e/", "f/"]);
        both.go_to(b"d/deep").unwrap();
        assert_eq!(names(&both), ["x"]);
        both.go_to(b"d").unwrap();
        assert_eq!(names(&both), ["a", "c", "deep/"]);
        assert_eq!(both.find("a".as_ref()).unwrap().unwrap().info.size, "high/d/a".len() as u64);
        both.go_to(b"f/none").unwrap();
        assert!(both.own().is_none());
        both.go_to(b"e").unwrap();
        assert_eq!(names(&both), ["b"]);
        both.go_to(b"").unwrap();
        assert_eq!(names(&both), ["d/", "e/", "f/"], "the way up leads back in every layer");
        let mut kept = lowers(tmp.path(), &["high"]);
        // d/deep, d/deep/x, e, e/b.
        assert_eq!(both.not_in(&mut kept).unwrap(), 4);
        assert_eq!(both.not_in(&mut Lowers::new(vec![])).unwrap(), 8);
        assert_eq!(names(&both), ["d/", "e/", "f/"]);
        let same = lowers(tmp.path(), &["low", "high"]);
        assert!(both.is_same(&same).unwrap() && !both.is_same(&kept).unwrap());
    }
}
