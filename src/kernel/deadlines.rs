//! The deadlines that the agent writes and the keeper reads, in a file that both map. One writer,
//! readers without locks: an entry has two slots, the older one is overwritten, and a checksum tells
//! a slot that was read or left half-written.
//!
//! ```text
//! 0     header: magic, layout version, capacity, boot id, checksum; how many entries were ever used
//! 4096  entry 0: slot a, slot b
//! 4864  entry 1: ...                          4096 entries, sparse, 3 MiB at most
//! ```
//!
//! A file of another boot or layout is replaced by rename, never truncated: the keeper may have it
//! mapped.
#![allow(unsafe_code)]

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::slots::{self, CAPACITY, ENTRY, FILE, HEADER, SLOT, Slot, USED_AT};
pub use super::slots::{Deadline, Entry};
use super::{At as _, Error, Result, clock, walk};
use crate::failpoint;
use crate::model::ids::{BootId, SessionId};

/// A shared mapping of a whole deadline file.
struct Map {
    start: *const AtomicU64,
    words: usize,
}

// SAFETY: the mapping is process-wide, lives until drop, and is reached only through atomics.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    fn new(file: &OwnedFd, path: &Path, write: bool) -> Result<Self> {
        let size = walk::stat_fd(file).at("stat", path)?.size;
        if size < FILE as u64 {
            let reason = format!("it has {size} bytes instead of {FILE}");
            return Err(Error::Garbled { path: path.to_owned(), reason });
        }
        let prot = if write { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a fresh mapping at an address of the kernel's choice, within the file's size,
        // which nobody shrinks (files are replaced, see above).
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), FILE, prot, MapFlags::SHARED, file, 0)
        }
        .at("map", path)?;
        Ok(Self { start: start.cast_const().cast(), words: FILE / 8 })
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page-aligned, `words` long, and lives as long as self. Atomics
        // may change under a shared reference, also by another process.
        unsafe { std::slice::from_raw_parts(self.start, self.words) }
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) {
        let words = &self.words()[offset / 8..][..bytes.len() / 8];
        for (word, chunk) in words.iter().zip(bytes.chunks_exact_mut(8)) {
            chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        fence(Ordering::Acquire);
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        let words = &self.words()[offset / 8..][..bytes.len() / 8];
        for (word, chunk) in words.iter().zip(bytes.chunks_exact(8)) {
            let mut raw = [0; 8];
            raw.copy_from_slice(chunk);
            word.store(u64::from_ne_bytes(raw), Ordering::Relaxed);
        }
        fence(Ordering::Release);
    }

    fn slot(&self, index: usize, which: usize) -> [u8; SLOT] {
        let mut bytes = [0; SLOT];
        self.read(HEADER + index * ENTRY + which * SLOT, &mut bytes);
        bytes
    }

    /// A written slot never has sequence 0, which is its first word: most entries of a pass are told
    /// to be free by two loads.
    fn entry(&self, index: usize) -> Entry {
        let first = (HEADER + index * ENTRY) / 8;
        let sequence = |word: usize| self.words()[word].load(Ordering::Relaxed);
        if sequence(first) == 0 && sequence(first + SLOT / 8) == 0 {
            return Entry::Free;
        }
        slots::entry(index, &self.slot(index, 0), &self.slot(index, 1))
    }

    /// How many entries, from the first on, may hold something: a pass over all of them reads 3 MiB.
    fn used(&self) -> usize {
        match usize::try_from(self.words()[USED_AT / 8].load(Ordering::Acquire)) {
            Ok(used) if (1..=CAPACITY).contains(&used) => used,
            Ok(_) | Err(_) => CAPACITY,
        }
    }

    /// To be called before an entry is written, so that no reader overlooks it.
    fn raise_used(&self, index: usize) {
        let used = u64::try_from(index + 1).unwrap_or(u64::MAX);
        self.words()[USED_AT / 8].fetch_max(used, Ordering::AcqRel);
    }

    fn boot(&self) -> Option<BootId> {
        let mut header = [0; HEADER];
        self.read(0, &mut header);
        slots::decode_header(&header)
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: exactly what mmap gave; no reference to it outlives self.
        let _ = unsafe { rustix::mm::munmap(self.start.cast_mut().cast(), FILE) };
    }
}

/// The agent's side: the only writer.
pub struct Table {
    map: Map,
    /// Where each session's entry is, and what it holds.
    index: HashMap<SessionId, (usize, Deadline)>,
    /// The entries that nobody has; torn ones are not among them.
    free: BTreeSet<usize>,
    path: PathBuf,
    /// Holds the lock that makes us the only writer.
    _lock: OwnedFd,
}

impl Table {
    /// Opens the file of this boot with all its entries, or makes a new one. A second writer is
    /// refused (EWOULDBLOCK).
    pub fn create_or_open(path: &Path) -> Result<Self> {
        let boot = clock::boot_id()?;
        let lock = open_lock(path)?;
        let map = match open_map(path, true) {
            Ok(Some(map)) if map.boot() == Some(boot) => map,
            Ok(_) | Err(Error::Garbled { .. }) => {
                create(path, boot)?;
                open_map(path, true)?.ok_or(Errno::NOENT).at("open", path)?
            }
            Err(e) => return Err(e),
        };
        let (mut index, mut free) = (HashMap::new(), BTreeSet::new());
        for i in 0..CAPACITY {
            match map.entry(i) {
                Entry::Valid(deadline) => {
                    index.insert(deadline.session, (i, deadline));
                }
                Entry::Free => drop(free.insert(i)),
                Entry::Torn { .. } => {}
            }
            if !free.contains(&i) {
                // An agent before this one may not have told.
                map.raise_used(i);
            }
        }
        Ok(Self { map, index, free, path: path.to_owned(), _lock: lock })
    }

    /// Writes a session's deadline; from here on the keeper enforces it. An entry is written
    /// before its cgroup is made.
    pub fn set(&mut self, deadline: &Deadline) -> Result<()> {
        let index = match self.index.get(&deadline.session) {
            // Most signs of life move no deadline: the lease's own comes first.
            Some((_, same)) if same == deadline => return Ok(()),
            Some((index, _)) => *index,
            None => self.free_index()?,
        };
        failpoint::fails("kernel.deadline-set.before").at("write a deadline in", &self.path)?;
        self.put(index, Some(deadline))?;
        failpoint::hit("kernel.deadline-set.after");
        self.index.insert(deadline.session, (index, deadline.clone()));
        self.free.remove(&index);
        Ok(())
    }

    /// Frees a session's entry: the keeper looks after it no more.
    pub fn remove(&mut self, session: SessionId) -> Result<()> {
        if let Some((index, _)) = self.index.get(&session) {
            let index = *index;
            failpoint::fails("kernel.deadline-remove.before")
                .at("free a deadline in", &self.path)?;
            self.put(index, None)?;
            self.index.remove(&session);
            self.free.insert(index);
            failpoint::hit("kernel.deadline-remove.after");
        }
        Ok(())
    }

    /// Frees the entries that cannot be read; the keeper takes them for passed. To be called once
    /// every living session's deadline has been set again. Returns how many there were.
    pub fn clear_torn(&mut self) -> Result<usize> {
        let torn: Vec<usize> =
            (0..CAPACITY).filter(|i| matches!(self.map.entry(*i), Entry::Torn { .. })).collect();
        // Whoever's they were is entered anew with the next deadline.
        self.index.retain(|_, (index, _)| !torn.contains(index));
        for index in &torn {
            self.put(*index, None)?;
            self.free.insert(*index);
        }
        Ok(torn.len())
    }

    /// All entries that are not free.
    pub fn entries(&self) -> impl Iterator<Item = Entry> {
        used(&self.map)
    }

    fn free_index(&self) -> Result<usize> {
        self.free.first().copied().ok_or_else(|| Error::Limit {
            what: format!("one more session in {}", self.path.display()),
            reason: format!("it has {CAPACITY} entries"),
        })
    }

    /// Overwrites the older slot of an entry.
    fn put(&self, index: usize, deadline: Option<&Deadline>) -> Result<()> {
        let (a, b) = (self.map.slot(index, 0), self.map.slot(index, 1));
        let sequence = |bytes| slots::decode(bytes).map(|slot: Slot| slot.sequence);
        let (a, b) = (sequence(&a), sequence(&b));
        // A slot that cannot be read counts as the older.
        let which = usize::from(a > b);
        let next = a.max(b).unwrap_or(0) + 1;
        let bytes = slots::encode(next, deadline)?;
        self.map.raise_used(index);
        self.map.write(HEADER + index * ENTRY + which * SLOT, &bytes);
        Ok(())
    }
}

/// The keeper's side.
pub struct Snapshot {
    map: Map,
    path: PathBuf,
    inode: (u64, u64),
}

impl Snapshot {
    /// Maps the file, `None` if there is none.
    pub fn open(path: &Path) -> Result<Option<Self>> {
        let info = match walk::stat_path(path) {
            Err(e) if e.errno() == Some(Errno::NOENT) => return Ok(None),
            answer => answer?,
        };
        let Some(map) = open_map(path, false)? else { return Ok(None) };
        if map.boot().is_none() {
            let reason = "its header is not one of this version".to_owned();
            return Err(Error::Garbled { path: path.to_owned(), reason });
        }
        Ok(Some(Self { map, path: path.to_owned(), inode: (info.dev, info.ino) }))
    }

    /// The boot in which the deadlines mean something; those of another boot have passed.
    pub fn boot(&self) -> Option<BootId> {
        self.map.boot()
    }

    /// Whether the path still leads to this file; if not, open it anew.
    pub fn is_current(&self) -> bool {
        walk::stat_path(&self.path).is_ok_and(|now| (now.dev, now.ino) == self.inode)
    }

    /// All entries that are not free, as they are at this moment.
    pub fn iter(&self) -> impl Iterator<Item = Entry> {
        used(&self.map)
    }
}

/// An entry can be read while its older slot is being written: the other one then still holds. Only
/// a reader that is overtaken twice within one read sees both change, so a torn one is read again.
fn used(map: &Map) -> impl Iterator<Item = Entry> {
    (0..map.used()).filter_map(|i| match map.entry(i) {
        Entry::Free => None,
        Entry::Torn { .. } => Some(map.entry(i)).filter(|again| *again != Entry::Free),
        valid => Some(valid),
    })
}

fn open_lock(path: &Path) -> Result<OwnedFd> {
    let path = path.with_extension("lock");
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let lock = rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600)).at("open", &path)?;
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)
        .at("become the only writer by", &path)?;
    Ok(lock)
}

fn open_map(path: &Path, write: bool) -> Result<Option<Map>> {
    let access = if write { OFlags::RDWR } else { OFlags::RDONLY };
    let flags = access | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Err(Errno::NOENT) => Ok(None),
        answer => Map::new(&answer.at("open", path)?, path, write).map(Some),
    }
}

fn create(path: &Path, boot: BootId) -> Result<()> {
    use std::io::Write as _;
    let new = path.with_extension("new");
    let flags =
        OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = rustix::fs::open(&new, flags, Mode::from_raw_mode(0o600)).at("create", &new)?;
    let mut file = File::from(fd);
    file.write_all(&slots::encode_header(boot)).at("write", &new)?;
    file.set_len(FILE as u64).at("extend", &new)?;
    failpoint::fails("kernel.deadlines-create.before").at("put in place", path)?;
    rustix::fs::rename(&new, path).at("put in place", path)?;
    failpoint::hit("kernel.deadlines-create.after");
    Ok(())
}
