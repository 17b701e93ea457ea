//! What a delta changes: each thing that an upper records beside what the layers below show at that
//! place. The upper was written by somebody hostile and may be written to meanwhile; the layers are
//! ours and do not change.

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;

use rustix::fs::FileType;
use rustix::io::Errno;

use super::changes::{
    Change as Recorded, Changes, Format, Kind, Xattrs, origin_mark, without_marks,
};
use super::lowers::{Found, Lowers};
use super::tree::reopen;
use super::{At as _, Error, Result, Stop, path_of, runs};
use crate::kernel::handle;
use crate::kernel::walk::{self, Dir, Info};
use crate::model::view::{Aspect, Change, DiffRow, FileKind, Mark, PathText, Told};

/// The rows of a diff, in the byte order of paths, parents before children.
pub struct Diff<'s> {
    changes: Changes<'static>,
    judge: Judge<'s>,
    live: bool,
}

impl<'s> Diff<'s> {
    /// Compares an upper with the layers below it. In a `live` one, names may come and go while they
    /// are looked at: what is gone by then is left out.
    pub fn new(upper: BorrowedFd<'_>, base: Lowers, live: bool, stop: Stop<'s>) -> Result<Self> {
        let mut changes = Changes::new(upper, Format::Trusted)?;
        if live {
            changes = changes.live();
        }
        Ok(Self { changes, judge: Judge::new(base, stop), live })
    }
}

impl Iterator for Diff<'_> {
    type Item = Result<DiffRow>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let change = match self.changes.next()? {
                Ok(change) => change,
                Err(fault) => return Some(Err(fault)),
            };
            match self.judge.told(&change, self.changes.here()) {
                // The top is no change of its own unless something of it is.
                Ok(Told { change: Change::Added | Change::Touched, .. })
                    if change.path.is_empty() => {}
                Ok(told) => return Some(Ok(row(&change, told))),
                Err(fault) if self.live && vanished(&fault) => {}
                Err(fault) => return Some(Err(fault)),
            }
        }
    }
}

/// Whether a name was taken away, or something else put there, since it was listed.
pub(super) fn vanished(fault: &Error) -> bool {
    matches!(fault.errno(), Some(Errno::NOENT | Errno::LOOP | Errno::NOTDIR | Errno::NXIO))
}

fn row(change: &Recorded, told: Told) -> DiffRow {
    let bytes = if change.kind == Kind::File { change.info.size } else { 0 };
    DiffRow { path: PathText::of(path_of(&change.path)), bytes, told }
}

/// Says of each change, in the order of a walk, what it is to the base.
pub(super) struct Judge<'s> {
    pub(super) base: Lowers,
    stop: Stop<'s>,
    /// The outermost opaque directory that the walk is in: what lies below counts with it.
    opaque: Option<Vec<u8>>,
}

impl<'s> Judge<'s> {
    pub(super) fn new(base: Lowers, stop: Stop<'s>) -> Self {
        Self { base, stop, opaque: None }
    }

    /// `here` is the directory that holds the change; for a directory, itself.
    pub(super) fn told(&mut self, change: &Recorded, here: &Dir) -> Result<Told> {
        super::go_on(self.stop)?;
        if change.path.is_empty() {
            return self.top(change);
        }
        let name = path_of(change.name()).as_os_str();
        let above = change.path.len() - change.name().len();
        self.base.go_to(&change.path[..above])?;
        if self.opaque.as_ref().is_some_and(|dir| !below(&change.path, dir)) {
            self.opaque = None;
        }
        let found = self.base.find(name)?;
        let was = found.as_ref().map(|found| kind_of(&found.info));
        let kind = (change.kind != Kind::Whiteout).then(|| kind_of(&change.info));
        let mut told =
            Told { change: Change::Added, kind, was, marks: vec![], differs: vec![], hides: 0 };
        let Some(found) = found else {
            if kind.is_none() {
                told.change = Change::Deleted;
            }
            return Ok(told);
        };
        if kind != was {
            told.change = if kind.is_none() { Change::Deleted } else { Change::Type };
            if was == Some(FileKind::Directory) && self.opaque.is_none() {
                self.base.enter(name)?;
                told.hides = self.base.not_in(&mut Lowers::new(vec![]))?;
                self.base.leave()?;
            }
            return Ok(told);
        }
        told.differs = self.differs(change, here, &found)?;
        if change.kind == (Kind::Directory { opaque: true }) {
            told.marks.push(Mark::Opaque);
            if self.opaque.is_none() {
                self.opaque = Some(change.path.clone());
                self.base.enter(name)?;
                let mut kept = Lowers::new(vec![reopen(here, here.path())?]);
                told.hides = self.base.not_in(&mut kept)?;
                self.base.leave()?;
            }
        } else if kind != Some(FileKind::Directory) {
            if found.info.nlink > 1 {
                told.marks.push(Mark::LinkBroken);
            } else if self.is_another(name, here, &found)? {
                told.marks.push(Mark::Replaced);
            }
        }
        told.change = match () {
            () if told.marks.contains(&Mark::Opaque) => Change::Modified,
            () if told.differs.contains(&Aspect::Content) => Change::Modified,
            () if !told.differs.is_empty() => Change::Metadata,
            () => Change::Touched,
        };
        Ok(told)
    }

    fn top(&mut self, change: &Recorded) -> Result<Told> {
        self.base.go_to(b"")?;
        let kind = Some(FileKind::Directory);
        let mut told = Told {
            change: Change::Added,
            kind,
            was: None,
            marks: vec![],
            differs: vec![],
            hides: 0,
        };
        if let Some(own) = self.base.own() {
            told.was = kind;
            let xattrs = own.own_xattrs()?;
            told.differs = metadata(change, &own.own_stat()?, &without_marks(xattrs));
            told.change = if told.differs.is_empty() { Change::Touched } else { Change::Metadata };
        }
        Ok(told)
    }

    /// What differs of two things of one kind.
    pub(super) fn differs(
        &self,
        change: &Recorded,
        here: &Dir,
        found: &Found,
    ) -> Result<Vec<Aspect>> {
        let Some(dir) = self.base.dir_of(found) else { return Ok(vec![]) };
        let name = path_of(change.name()).as_os_str();
        let (info, old) = (&change.info, &found.info);
        let content = match &change.kind {
            Kind::File if info.size != old.size => true,
            Kind::File => {
                let (new, old) = (here.open_file(name)?, dir.open_file(name)?);
                !same_bytes(&File::from(new), &File::from(old), info.size, self.stop)
                    .at("compare", path_of(&change.path))?
            }
            Kind::Symlink(target) => *target != dir.read_link(name)?.as_bytes(),
            Kind::Device => info.rdev != old.rdev,
            Kind::Directory { .. } | Kind::Fifo | Kind::Socket | Kind::Whiteout => false,
        };
        let mut differs = Vec::new();
        if content {
            differs.push(Aspect::Content);
        }
        differs.extend(metadata(change, old, &without_marks(dir.xattrs(name)?)));
        Ok(differs)
    }

    /// Whether overlay's own note on the upper's file says that it is not a copy of the base's.
    /// Without a note that can be compared, it is a copy.
    fn is_another(&self, name: &std::ffi::OsStr, here: &Dir, found: &Found) -> Result<bool> {
        let Some(dir) = self.base.dir_of(found) else { return Ok(false) };
        let old = dir.open_path(name)?;
        let Some(old) = handle::of(&old).at("ask for the handle of", dir.path().join(name))? else {
            return Ok(false);
        };
        let new = here.open_path(name)?;
        let origin =
            walk::xattr(&new, origin_mark()).at("read xattrs of", here.path().join(name))?;
        Ok(match origin.as_deref() {
            None => true,
            // Copied up from a layer whose handles overlay does not note.
            Some([]) => false,
            Some(mark) => handle::in_origin(mark).is_some_and(|copied| copied != old),
        })
    }
}

fn below(path: &[u8], dir: &[u8]) -> bool {
    path.strip_prefix(dir).is_some_and(|rest| rest.starts_with(b"/"))
}

/// What differs of owner, mode and so on. A directory's time changes with everything in it.
pub(super) fn metadata(change: &Recorded, old: &Info, xattrs: &Xattrs) -> Vec<Aspect> {
    let new = &change.info;
    let timed = new.kind != FileType::Directory;
    [
        (new.mode != old.mode, Aspect::Mode),
        ((new.uid, new.gid) != (old.uid, old.gid), Aspect::Owner),
        (change.xattrs != *xattrs, Aspect::Attributes),
        (timed && (new.mtime_s, new.mtime_ns) != (old.mtime_s, old.mtime_ns), Aspect::Time),
    ]
    .into_iter()
    .filter_map(|(differs, aspect)| differs.then_some(aspect))
    .collect()
}

fn kind_of(info: &Info) -> FileKind {
    match info.kind {
        FileType::Directory => FileKind::Directory,
        FileType::Symlink => FileKind::Symlink,
        FileType::Fifo => FileKind::Fifo,
        FileType::Socket => FileKind::Socket,
        FileType::CharacterDevice => FileKind::CharDevice,
        FileType::BlockDevice => FileKind::BlockDevice,
        FileType::RegularFile | FileType::Unknown => FileKind::File,
    }
}

/// Whether two files of `size` bytes hold the same, holes not read.
pub(super) fn same_bytes(a: &File, b: &File, size: u64, stop: Stop<'_>) -> std::io::Result<bool> {
    let all = runs::of(a, size, stop)?;
    if all != runs::of(b, size, stop)? {
        return Ok(false);
    }
    let (mut one, mut other) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    for run in all {
        let (mut at, end) = (run.at, run.at + run.len);
        while at < end {
            super::go_on(stop).map_err(std::io::Error::other)?;
            let want = usize::try_from(end - at).unwrap_or(usize::MAX).min(one.len());
            let fits = a.read_exact_at(&mut one[..want], at);
            let cut = |e: &std::io::Error| e.kind() == std::io::ErrorKind::UnexpectedEof;
            match fits.and_then(|()| b.read_exact_at(&mut other[..want], at)) {
                // Cut off meanwhile: it is another.
                Err(e) if cut(&e) => return Ok(false),
                answer => answer?,
            }
            if one[..want] != other[..want] {
                return Ok(false);
            }
            at += want as u64;
        }
    }
    Ok(true)
}
