//! Makes an upper that was copied from elsewhere fit the head that it is to be mounted on.
//!
//! Three states play a part: the *base* that the upper was made on; what its session last saw
//! committed (*expected*: the base, with a layer of the session's own on top once it had published);
//! and the *head* of now. What the upper changes is what differs from expected; what others changed is
//! what differs between expected and head. Where both touch the same name, nothing is done and the
//! names are told.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, Timespec, Timestamps};
use rustix::io::Errno;

use super::changes::{Change as Recorded, Changes, Format, Kind, opaque_mark, without_marks};
use super::diff::{Judge, metadata};
use super::lowers::{Found, Lowers};
use super::pack::meta_of;
use super::tree::reopen;
use super::unpack::dress;
use super::{At as _, Result, Stop, path_of};
use crate::kernel::walk::{self, Dir, Info};
use crate::model::view::{Aspect, Change, FileKind, Mark, PathText, Told};

/// So many paths are told; the rest is counted.
const TOLD: usize = 200;

/// The names that both sides changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conflicts {
    /// The first of them, in order.
    pub paths: Vec<PathText>,
    /// How many there are.
    pub count: u64,
}

impl Conflicts {
    fn note(&mut self, path: &[u8]) {
        self.count += 1;
        if self.paths.len() < TOLD {
            self.paths.push(PathText::of(path_of(path)));
        }
    }
}

/// Hides what the session had published in its `own` layer and took away again: on the base it left
/// no trace in the upper, on top of that layer it would be back.
pub fn hide_given_up(upper: BorrowedFd<'_>, own: &Dir, stop: Stop<'_>) -> Result<()> {
    let mut mine = Lowers::new(vec![reopen(upper, Path::new(""))?]);
    let mut passed: Option<Vec<u8>> = None;
    for change in Changes::new(own.as_fd(), Format::Trusted)? {
        super::go_on(stop)?;
        let change = change?;
        let below = |dir: &Vec<u8>| {
            change.path.strip_prefix(&dir[..]).is_some_and(|rest| rest.starts_with(b"/"))
        };
        if change.path.is_empty()
            || change.kind == Kind::Whiteout
            || passed.as_ref().is_some_and(below)
        {
            continue;
        }
        passed = None;
        let name = path_of(change.name()).as_os_str();
        mine.go_to(&change.path[..change.path.len() - change.name().len()])?;
        let Some(dir) = mine.own() else { continue };
        match dir.stat(name) {
            Err(e) if e.errno() == Some(Errno::NOENT) => {
                hide(dir, name)?;
                passed = Some(change.path);
            }
            Err(e) => return Err(e.into()),
            // The upper's own is all that is seen there.
            Ok(info) if info.kind != FileType::Directory || is_opaque(dir, name)? => {
                passed = Some(change.path);
            }
            Ok(_) => {}
        }
    }
    Ok(())
}

fn is_opaque(dir: &Dir, name: &OsStr) -> Result<bool> {
    let child = dir.child(name)?;
    let mark = walk::xattr(&child, opaque_mark()).at("read xattrs of", child.path())?;
    Ok(mark.as_deref() == Some(b"y"))
}

/// Makes a whiteout; the directory keeps its time.
fn hide(dir: &Dir, name: &OsStr) -> Result<()> {
    let path = dir.path().join(name);
    let info = dir.own_stat()?;
    let device = rustix::fs::makedev(0, 0);
    rustix::fs::mknodat(dir, name, FileType::CharacterDevice, Mode::empty(), device)
        .at("make the whiteout", &path)?;
    let time = Timespec { tv_sec: info.mtime_s, tv_nsec: info.mtime_ns.into() };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::futimens(dir, &times).at("set times of", dir.path())
}

/// Holds an upper made on `expected` against a `head` that went on. Where only one side changed a
/// name, the upper is made to show that side's; any name that both changed leaves it as it is.
///
/// Both views are asked for twice, since they are read in two passes.
pub fn onto(
    upper: BorrowedFd<'_>,
    views: impl Fn() -> Result<(Lowers, Lowers)>,
    stop: Stop<'_>,
) -> Result<Conflicts> {
    let mut conflicts = Conflicts::default();
    let (expected, head) = views()?;
    let mut sides = Sides { judge: Judge::new(expected, stop), head };
    let mut changes = Changes::new(upper, Format::Trusted)?;
    while let Some(change) = changes.next().transpose()? {
        let told = sides.judge.told(&change, changes.here())?;
        if !sides.agree(&change, &told)? {
            conflicts.note(&change.path);
        }
    }
    if conflicts.count > 0 {
        return Ok(conflicts);
    }
    let (expected, head) = views()?;
    let mut sides = Sides { judge: Judge::new(expected, stop), head };
    let mut changes = Changes::new(upper, Format::Trusted)?;
    while let Some(change) = changes.next().transpose()? {
        let told = sides.judge.told(&change, changes.here())?;
        sides.give_way(&change, &told, changes.here())?;
    }
    Ok(conflicts)
}

struct Sides<'s> {
    /// The upper beside what its session expected.
    judge: Judge<'s>,
    head: Lowers,
}

impl Sides<'_> {
    /// Whether at most one side changed this name.
    fn agree(&mut self, change: &Recorded, told: &Told) -> Result<bool> {
        let above = change.path.len() - change.name().len();
        self.head.go_to(&change.path[..above])?;
        if change.path.is_empty() {
            let same = || self.same_directory();
            return Ok(told.change != Change::Metadata || same()?);
        }
        if self.judge.base.is_same(&self.head)? {
            return Ok(true);
        }
        let name = path_of(change.name()).as_os_str();
        let (old, new) = (self.judge.base.find(name)?, self.head.find(name)?);
        let is_dir = |found: &Option<Found>| {
            found.as_ref().is_some_and(|found| found.info.kind == FileType::Directory)
        };
        let opaque = change.kind == (Kind::Directory { opaque: true });
        let (Some(old), Some(new)) = (&old, &new) else {
            return Ok(match (&old, &new) {
                // Nothing was there and nothing is; or both took it away.
                (None, None) => true,
                (Some(_), None) => told.change == Change::Deleted,
                // Both made a directory: what is in them is looked at by its own names.
                (None, Some(_)) if told.kind == Some(FileKind::Directory) => {
                    is_dir(&new) && !opaque
                }
                // Deleted what was not there: it gives way.
                (None, Some(_)) => told.change == Change::Deleted,
                (Some(_), Some(_)) => false,
            });
        };
        let plain_dir = told.kind == Some(FileKind::Directory)
            && told.was == Some(FileKind::Directory)
            && !told.marks.contains(&Mark::Opaque);
        match told.change {
            // A directory with changes below it has to be one still.
            Change::Touched if plain_dir => Ok(new.info.kind == FileType::Directory),
            Change::Touched => Ok(true),
            Change::Metadata if plain_dir => Ok(self.differs(name, old, new)?.is_empty()),
            Change::Added
            | Change::Modified
            | Change::Metadata
            | Change::Type
            | Change::Deleted
            | Change::Unknown => self.same_below(name, old, new),
        }
    }

    fn same_directory(&self) -> Result<bool> {
        let (Some(old), Some(new)) = (self.judge.base.own(), self.head.own()) else {
            return Ok(false);
        };
        let recorded =
            recorded(Kind::Directory { opaque: false }, new.own_stat()?, new.own_xattrs()?);
        Ok(metadata(&recorded, &old.own_stat()?, &without_marks(old.own_xattrs()?)).is_empty())
    }

    /// What differs between what expected and head show of a name, not looking below it.
    fn differs(&self, name: &OsStr, old: &Found, new: &Found) -> Result<Vec<Aspect>> {
        if (old.info.dev, old.info.ino) == (new.info.dev, new.info.ino) {
            return Ok(vec![]);
        }
        let Some(dir) = self.head.dir_of(new) else { return Ok(vec![Aspect::Content]) };
        if old.info.kind != new.info.kind {
            return Ok(vec![Aspect::Content]);
        }
        let kind = match new.info.kind {
            FileType::Directory => Kind::Directory { opaque: false },
            FileType::Symlink => {
                Kind::Symlink(std::os::unix::ffi::OsStringExt::into_vec(dir.read_link(name)?))
            }
            FileType::Fifo => Kind::Fifo,
            FileType::Socket => Kind::Socket,
            FileType::CharacterDevice | FileType::BlockDevice => Kind::Device,
            FileType::RegularFile | FileType::Unknown => Kind::File,
        };
        let mut recorded = recorded(kind, new.info, dir.xattrs(name)?);
        recorded.path = std::os::unix::ffi::OsStrExt::as_bytes(name).to_vec();
        self.judge.differs(&recorded, dir, old)
    }

    /// Whether expected and head show the same at a name, and all below it.
    fn same_below(&mut self, name: &OsStr, old: &Found, new: &Found) -> Result<bool> {
        if !self.differs(name, old, new)?.is_empty() {
            return Ok(false);
        }
        if new.info.kind != FileType::Directory {
            return Ok(true);
        }
        self.enter(name)?;
        let mut levels = vec![None::<std::vec::IntoIter<(std::ffi::OsString, bool)>>];
        let mut same = true;
        while let Some(level) = levels.last_mut() {
            let names = match level {
                Some(names) => names,
                None => {
                    let names = self.judge.base.names()?;
                    // The same directories show the same; else each name is looked at.
                    let known = same && self.judge.base.is_same(&self.head)?;
                    same = same && (known || names == self.head.names()?);
                    let todo = if known || !same { vec![] } else { names };
                    level.insert(todo.into_iter())
                }
            };
            let Some((name, is_dir)) = names.next().filter(|_| same) else {
                levels.pop();
                self.judge.base.leave()?;
                self.head.leave()?;
                continue;
            };
            let (old, new) = (self.judge.base.find(&name)?, self.head.find(&name)?);
            same = match (&old, &new) {
                (Some(old), Some(new)) => self.differs(&name, old, new)?.is_empty(),
                (_, _) => false,
            };
            if is_dir && same {
                self.enter(&name)?;
                levels.push(None);
            }
        }
        Ok(same)
    }

    fn enter(&mut self, name: &OsStr) -> Result<()> {
        self.judge.base.enter(name)?;
        self.head.enter(name)
    }

    /// What the upper did not change it does not hold against the head.
    fn give_way(&mut self, change: &Recorded, told: &Told, here: &Dir) -> Result<()> {
        let above = change.path.len() - change.name().len();
        self.head.go_to(&change.path[..above])?;
        let shown = path_of(&change.path);
        if change.path.is_empty() {
            let (Change::Touched, Some(new)) = (told.change, self.head.own()) else {
                return Ok(());
            };
            let now = recorded(change.kind.clone(), new.own_stat()?, new.own_xattrs()?);
            return become_like(here, change, &now, shown);
        }
        let name = path_of(change.name()).as_os_str();
        if told.change == Change::Deleted && told.was.is_none() {
            return rustix::fs::unlinkat(here, name, AtFlags::empty()).at("remove", shown);
        }
        if told.change != Change::Touched {
            return Ok(());
        }
        if told.kind != Some(FileKind::Directory) {
            return rustix::fs::unlinkat(here, name, AtFlags::empty()).at("remove", shown);
        }
        let Some(new) = self.head.find(name)? else { return Ok(()) };
        let Some(dir) = self.head.dir_of(&new) else { return Ok(()) };
        let now = recorded(change.kind.clone(), new.info, dir.xattrs(name)?);
        become_like(here, change, &now, shown)
    }
}

fn recorded(kind: Kind, info: Info, xattrs: Vec<(std::ffi::OsString, Vec<u8>)>) -> Recorded {
    Recorded { path: vec![], kind, info, xattrs: without_marks(xattrs) }
}

/// Gives a directory of the upper the owner, mode and attributes that the head's has.
fn become_like(here: &Dir, change: &Recorded, now: &Recorded, shown: &Path) -> Result<()> {
    let at = crate::kernel::proc_path(here);
    let gone: BTreeMap<_, _> =
        change.xattrs.iter().filter(|(name, _)| !now.xattrs.contains_key(*name)).collect();
    for name in gone.keys() {
        rustix::fs::removexattr(&at, path_of(name)).at("remove an attribute of", shown)?;
    }
    dress(here.as_fd(), Path::new("."), &meta_of(now), shown, false)
}
