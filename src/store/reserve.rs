//! Room held back for the agent on a file system that workloads fill too: a file of allocated
//! blocks, given back piece by piece when a durable write finds no room, and made again when there
//! is plenty. What is decided about sessions on a full disk, a fence or a removal, is so recorded.
//!
//! A workload may take what is given back before the agent does. What must not fail for that, the
//! store's log, has its room from the start ([`super::db::Db::hold_room`]); the rest is given back in
//! pieces, so that there is a next one.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use super::error::Error;
use crate::failpoint;

/// Its name in the state directory.
pub const NAME: &str = "reserve";
/// Pieces it is given back in.
const PIECES: u64 = 8;
/// With less than this left, in bytes, the next write may fail.
const LOW: u64 = 1 << 20;

/// How much room there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Bytes that root can still write.
    pub free: u64,
    /// Bytes held back now.
    pub held: u64,
    /// Bytes to hold back; 0 when that is switched off, or the file system cannot.
    pub wanted: u64,
    /// Whether a write of some length finds room.
    pub room: bool,
}

impl Space {
    /// Nothing new is to be begun: there is next to no room, or the reserve is in use.
    pub fn short(self) -> bool {
        !self.room || self.held < self.wanted
    }
}

/// The file that holds room back.
#[derive(Debug)]
pub struct Reserve {
    path: PathBuf,
    held: Mutex<Held>,
}

#[derive(Debug)]
struct Held {
    file: Option<File>,
    bytes: u64,
    wanted: u64,
}

impl Reserve {
    /// Takes over the reserve in `state`, or makes it; `wanted` bytes, 0 for none. That there is no
    /// room for it is no error. On a full file system a piece is given back at once: opening the
    /// store needs some.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn open(state: &Path, wanted: u64) -> Result<Self, Error> {
        let path = state.join(NAME);
        if wanted == 0 {
            return match std::fs::remove_file(&path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    Err(Error::io("remove", path)(e))
                }
                _ => Ok(Self { path, held: Mutex::new(Held { file: None, bytes: 0, wanted }) }),
            };
        }
        let opened = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path);
        let file = match opened {
            Err(e) if is_no_room(&e) => None,
            answer => Some(answer.map_err(Error::io("open", &path))?),
        };
        let stat = |f: &File| f.metadata().map_err(Error::io("stat", &path));
        let bytes = match &file {
            // A hole holds nothing back.
            Some(file) => stat(file).map(|meta| meta.len().min(meta.blocks() * 512))?,
            None => 0,
        };
        let held = Mutex::new(Held { file, bytes: bytes.min(wanted), wanted });
        let reserve = Self { path, held };
        if reserve.has_room() {
            reserve.fill(0);
        } else {
            reserve.give();
        }
        Ok(reserve)
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    fn free(&self) -> Option<u64> {
        let stat = rustix::fs::statvfs(self.state()).ok()?;
        Some(stat.f_bfree.saturating_mul(stat.f_frsize))
    }

    /// Whether a write of some length finds room. The numbers say so where there is plenty; else only
    /// a try does: what ext4 keeps for itself counts as free, and what it keeps for root does not.
    fn has_room(&self) -> bool {
        match rustix::fs::statvfs(self.state()) {
            Ok(stat) if stat.f_bavail.saturating_mul(stat.f_frsize) >= LOW => return true,
            Ok(_) => {}
            Err(_) => return true,
        }
        let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        let tried = rustix::fs::open(self.state(), flags, Mode::from_raw_mode(0o600))
            .and_then(|file| rustix::fs::fallocate(file, FallocateFlags::empty(), 0, LOW));
        !matches!(tried, Err(Errno::NOSPC | Errno::DQUOT))
    }

    /// How much room there is. A file system that does not answer counts as one with room.
    pub fn space(&self) -> Space {
        let (free, room) = (self.free().unwrap_or(u64::MAX), self.has_room());
        let held = self.lock();
        Space { free, held: held.bytes, wanted: held.wanted, room }
    }

    /// Does it again as long as want of room is what stops it and a piece can be given back.
    pub fn making_room<R>(&self, mut job: impl FnMut() -> Result<R, Error>) -> Result<R, Error> {
        loop {
            match job() {
                Err(error) if self.relieve(&error) => {}
                answer => return answer,
            }
        }
    }

    /// After a write that failed: if that was for want of room and a piece could be given back,
    /// true, and the write is worth another try.
    pub fn relieve(&self, error: &Error) -> bool {
        let full = match error {
            Error::Io { source, .. } => is_no_room(source),
            Error::Sql { source, .. } => source.sqlite_error().is_some_and(|e| {
                e.code == rusqlite::ErrorCode::DiskFull
                    || e.extended_code == rusqlite::ffi::SQLITE_IOERR_SHMSIZE
            }),
            // SQLite does so when the disk is full; what else does it stays broken.
            Error::RolledBack { .. } => true,
            _ => false,
        };
        full && self.give()
    }

    /// Gives a piece back. False if nothing is held.
    fn give(&self) -> bool {
        let mut held = self.lock();
        let left = held.bytes.saturating_sub((held.wanted / PIECES).max(LOW));
        let Some(file) = held.file.as_ref().filter(|_| held.bytes > 0) else { return false };
        let may = failpoint::fails("store.reserve.before").map_err(std::io::Error::from);
        if let Err(fault) = may.and_then(|()| file.set_len(left)) {
            tracing::error!("{}: {fault}", self.path.display());
            return false;
        }
        failpoint::hit("store.reserve.after");
        tracing::error!(
            "the file system of {} is full; {} of {} bytes held back for the agent are left, and \
             nothing new is begun until there is room",
            self.path.display(),
            left,
            held.wanted
        );
        held.bytes = left;
        true
    }

    /// Makes the reserve whole again once there is plenty of room.
    pub fn refill(&self) {
        let (bytes, wanted) = {
            let held = self.lock();
            (held.bytes, held.wanted)
        };
        if bytes < wanted {
            self.fill(wanted.saturating_mul(2));
        }
    }

    /// Takes what is missing, if as much more as `spare` stays free.
    fn fill(&self, spare: u64) {
        let mut held = self.lock();
        let (wanted, missing) = (held.wanted, held.wanted.saturating_sub(held.bytes));
        let room = self.free().is_none_or(|free| free >= missing.saturating_add(spare));
        if missing == 0 || !room {
            return;
        }
        if held.file.is_none() {
            let made = OpenOptions::new().create_new(true).write(true).mode(0o600).open(&self.path);
            held.file = made.ok();
        }
        let Some(file) = &held.file else { return };
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, wanted) {
            Ok(()) => {
                held.bytes = wanted;
                tracing::info!("{} holds {wanted} bytes back", self.path.display());
            }
            Err(fault @ (Errno::OPNOTSUPP | Errno::NOSYS)) => {
                tracing::warn!("this file system cannot hold room back: {fault}");
                held.wanted = 0;
            }
            Err(fault) => {
                tracing::warn!("nothing can be held back in {}: {fault}", self.path.display());
                // A part of it may have been taken: what is counted is what stays.
                let _ = file.set_len(held.bytes);
            }
        }
    }
}

fn is_no_room(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no_room() -> Error {
        Error::io("write", "f")(std::io::Error::from_raw_os_error(libc::ENOSPC))
    }

    #[test]
    fn it_is_given_back_in_pieces_and_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let size = 16 << 20;
        let blocks = || dir.path().join(NAME).metadata().unwrap().blocks() * 512;
        let reserve = Reserve::open(dir.path(), size).unwrap();
        assert!(blocks() >= size && reserve.space().held == size && !reserve.space().short());
        let other = Error::io("write", "f")(std::io::Error::from_raw_os_error(libc::EIO));
        assert!(!reserve.relieve(&other), "that was not for want of room");
        let mut pieces = 0;
        while reserve.relieve(&no_room()) {
            pieces += 1;
            assert!(reserve.space().short());
            assert!(blocks() <= size - pieces * (2 << 20));
        }
        assert_eq!((pieces, reserve.space().held), (8, 0));
        drop(reserve);
        let reserve = Reserve::open(dir.path(), size).unwrap();
        assert_eq!(reserve.space().held, size, "there is room in this test");
        assert!(reserve.relieve(&no_room()));
        reserve.refill();
        assert!(blocks() >= size && !reserve.space().short());
    }

    #[test]
    fn a_hole_or_another_size_is_made_good_and_off_is_off() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(NAME);
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        Reserve::open(dir.path(), 1 << 20).unwrap();
        assert!(path.metadata().unwrap().blocks() * 512 >= 1 << 20);
        let reserve = Reserve::open(dir.path(), 0).unwrap();
        assert!(!path.exists() && !reserve.relieve(&no_room()) && !reserve.space().short());
    }
}
