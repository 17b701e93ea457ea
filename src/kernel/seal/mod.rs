//! The immutable seal: FS_IMMUTABLE on the files and directories of an upper, set and taken off.
//!
//! 1. What carries the flag already is somebody's own. It is listed in the *record*, a file beside
//!    the upper that no workload reaches, before the first flag is set; until the record says
//!    that the seal ended, whatever carries the flag and is not listed carries it by us.
//! 2. Sealing goes from the top down: a directory takes the flag before its names are read, so that
//!    nothing can be made in it, or moved out of it, unseen. Unsealing goes from the bottom up.
//! 3. Each flag is read back and each file and directory is asked for write access (EPERM).
//!
//! Done again after a crash, each ends in the same state. Symlinks, fifos, sockets and devices can
//! carry no flag; they are counted. What the flag is worth is asked of the file system with a file
//! without a name: whether a descriptor opened before still writes, and a mapping.
//!
//! ```text
//! <session>/seal     entries of the upper, inode numbers that had the flag before, whether it ended
//! ```

mod record;
mod tree;
mod verify;
mod worth;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Access, IFlags};
use rustix::io::Errno;

pub use tree::Left;
pub use verify::{Stuck, stuck};

use self::record::Record;
use self::tree::{Order, Visit};
use super::walk::{self, Dir};
use super::{At as _, Error, Result, clock, proc_path};
use crate::failpoint;
use crate::model::facts::Proof;
use crate::progress::{Amount, Progress};

/// The name of the record, beside the upper.
const RECORD: &str = "seal";

/// Says when to give up early.
pub type Stop<'a> = &'a (dyn Fn() -> bool + Sync);

/// The upper of a session and the record beside it.
#[derive(Clone, Debug)]
pub struct Place {
    upper: PathBuf,
    record: PathBuf,
}

impl Place {
    /// For the upper in a session's directory.
    pub fn of(root: &Path, upper: &Path) -> Self {
        Self { upper: upper.to_owned(), record: root.join(RECORD) }
    }

    /// Inode numbers that had the flag before it was sealed; none without a record.
    fn own(&self) -> Result<BTreeSet<u64>> {
        Ok(Record::read(&self.record)?.map(|record| record.own).unwrap_or_default())
    }
}

/// Writes out what the upper's file system holds in memory.
pub fn sync(upper: &Path) -> Result<()> {
    rustix::fs::syncfs(Dir::open(upper)?).at("sync the file system of", upper)
}

/// Seals; files and directories are counted. `None`: it was stopped early; the record stays and the
/// next one goes on.
///
/// # Errors
/// The file system knows no such flag, or something could not be sealed.
pub fn seal(place: &Place, progress: &Progress, stop: Stop<'_>) -> Result<Option<Proof>> {
    let begun = clock::now();
    let worth = worth::ask(place.upper.parent().unwrap_or(&place.upper))?;
    let record = match Record::read(&place.record)? {
        Some(record) if !record.ended => record,
        Some(_) | None => {
            let Some(record) = scan(&place.upper, stop)? else { return Ok(None) };
            failpoint::fails("kernel.seal.record.before").at("write", &place.record)?;
            record.write(&place.record)?;
            failpoint::hit("kernel.seal.record.after");
            record
        }
    };
    progress.expect(Amount { bytes: 0, entries: record.entries });
    let set = Set { progress };
    let Some(left) = tree::walk(&place.upper, Order::Before, &set, stop)? else {
        return Ok(None);
    };
    let (done, own) = (progress.done().entries, record.own.len());
    let had = if own > 0 { format!(" ({own} had it before)") } else { String::new() };
    Ok(Some(Proof {
        asked: "FS_IMMUTABLE on each file and directory of the upper, read back, then faccessat \
                W_OK; a write by a descriptor and a store into a mapping that are older than the \
                flag, on a file of the same file system"
            .to_owned(),
        answer: format!("set on {done}{had}, EPERM; {worth}; {left}"),
        at: clock::now(),
        took_us: clock::micros_since(begun),
    }))
}

/// Takes off what [`seal`] set, and nothing else. Gives how many carry no flag now; `None` if it
/// was stopped early. What had the flag before stays known until the next seal.
///
/// # Errors
/// Something kept its flag.
pub fn unseal(place: &Place, progress: &Progress, stop: Stop<'_>) -> Result<Option<u64>> {
    let record = Record::read(&place.record)?.filter(|record| !record.ended);
    let Some(record) = record else { return Ok(Some(0)) };
    progress.expect(Amount { bytes: 0, entries: record.entries });
    let clear = Clear { progress, own: &record.own };
    let left = tree::walk(&place.upper, Order::After, &clear, stop)?;
    Ok(left.map(|_| progress.done().entries))
}

/// Notes that no flag is ours any more. What had the flag before stays listed: who asks after a
/// crash whether writes work again has to know it.
pub fn end(place: &Place) -> Result<()> {
    match Record::read(&place.record)? {
        Some(record) if !record.ended => Record { ended: true, ..record }.write(&place.record),
        Some(_) | None => Ok(()),
    }
}

/// Whether the upper's top directory still carries the flag: who takes a seal off begins or ends
/// there.
pub fn holds(upper: &Path) -> Result<bool> {
    let flags = rustix::fs::ioctl_getflags(Dir::open(upper)?).at("read the flags of", upper)?;
    Ok(flags.contains(IFlags::IMMUTABLE))
}

/// Runs `ask` with the flag of one directory lifted, for a question that the flag would answer
/// instead of the kernel. Nobody may be able to write there.
pub(super) fn lifted<T>(dir: &Dir, ask: impl FnOnce() -> T) -> Result<T> {
    let flags = rustix::fs::ioctl_getflags(dir).at("read the flags of", dir.path())?;
    rustix::fs::ioctl_setflags(dir, flags - IFlags::IMMUTABLE).at("unseal", dir.path())?;
    let answer = ask();
    rustix::fs::ioctl_setflags(dir, flags).at("seal again", dir.path())?;
    Ok(answer)
}

/// Who carries the flag already, and how many entries there are.
fn scan(upper: &Path, stop: Stop<'_>) -> Result<Option<Record>> {
    let look = Look::default();
    let left = tree::walk(upper, Order::Before, &look, stop)?;
    let own = look.own.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    Ok(left.map(|_| Record { entries: look.entries.into_inner(), own, ended: false }))
}

#[derive(Default)]
struct Look {
    entries: AtomicU64,
    own: std::sync::Mutex<BTreeSet<u64>>,
}

impl Look {
    fn at(&self, fd: impl AsFd, path: &Path) -> Result<()> {
        self.entries.fetch_add(1, Ordering::Relaxed);
        if flags(&fd, path)?.contains(IFlags::IMMUTABLE) {
            let ino = walk::stat_fd(&fd).at("stat", path)?.ino;
            self.own.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(ino);
        }
        Ok(())
    }
}

impl Visit for Look {
    const LOT: &'static str = "kernel.seal.looked.after";

    fn directory(&self, dir: &Dir) -> Result<()> {
        self.at(dir, dir.path())
    }
    fn file(&self, dir: &Dir, name: &OsStr) -> Result<()> {
        match dir.open_file(name) {
            // Not sealed yet: somebody outside may have taken it away.
            Err(e) if e.errno() == Some(Errno::NOENT) => Ok(()),
            file => self.at(file?, &dir.path().join(name)),
        }
    }
}

struct Set<'a> {
    progress: &'a Progress,
}

impl Set<'_> {
    fn at(&self, fd: impl AsFd, path: &Path) -> Result<()> {
        let before = flags(&fd, path)?;
        if !before.contains(IFlags::IMMUTABLE) {
            rustix::fs::ioctl_setflags(&fd, before | IFlags::IMMUTABLE).at("seal", path)?;
        }
        if !flags(&fd, path)?.contains(IFlags::IMMUTABLE) {
            return Err(odd(path, "the flag was set and is not there"));
        }
        match rustix::fs::access(proc_path(&fd), Access::WRITE_OK) {
            Err(Errno::PERM) => {}
            Ok(()) => return Err(odd(path, "it carries the flag, and is granted for writing")),
            Err(e) => return Err(e).at("write-probe", path),
        }
        self.progress.did(0, 1);
        Ok(())
    }
}

impl Visit for Set<'_> {
    const LOT: &'static str = "kernel.seal.set.after";

    fn directory(&self, dir: &Dir) -> Result<()> {
        self.at(dir, dir.path())
    }
    fn file(&self, dir: &Dir, name: &OsStr) -> Result<()> {
        self.at(dir.open_file(name)?, &dir.path().join(name))
    }
}

struct Clear<'a> {
    progress: &'a Progress,
    own: &'a BTreeSet<u64>,
}

impl Clear<'_> {
    fn at(&self, fd: impl AsFd, path: &Path) -> Result<()> {
        let before = flags(&fd, path)?;
        if before.contains(IFlags::IMMUTABLE) && !self.is_own(&fd, path)? {
            rustix::fs::ioctl_setflags(&fd, before - IFlags::IMMUTABLE).at("unseal", path)?;
            if flags(&fd, path)?.contains(IFlags::IMMUTABLE) {
                return Err(odd(path, "the flag was taken off and is there again"));
            }
        }
        self.progress.did(0, 1);
        Ok(())
    }

    fn is_own(&self, fd: impl AsFd, path: &Path) -> Result<bool> {
        let ino = walk::stat_fd(fd).at("stat", path)?.ino;
        Ok(self.own.contains(&ino))
    }
}

impl Visit for Clear<'_> {
    const LOT: &'static str = "kernel.seal.cleared.after";

    fn directory(&self, dir: &Dir) -> Result<()> {
        self.at(dir, dir.path())
    }
    fn file(&self, dir: &Dir, name: &OsStr) -> Result<()> {
        match dir.open_file(name) {
            // What carries the flag cannot be taken away: it lost it under another of its names.
            Err(e) if e.errno() == Some(Errno::NOENT) => Ok(()),
            file => self.at(file?, &dir.path().join(name)),
        }
    }
}

fn flags(fd: impl AsFd, path: &Path) -> Result<IFlags> {
    rustix::fs::ioctl_getflags(fd).at("read the flags of", path)
}

fn odd(path: &Path, reason: &str) -> Error {
    Error::Garbled { path: path.to_owned(), reason: reason.to_owned() }
}
