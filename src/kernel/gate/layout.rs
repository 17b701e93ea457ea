//! The entries as the programs and every agent of this layout see them: a BPF array that both map.
//! Whoever changes `struct entry` in `gate.bpf.c` changes it here, and raises [`LAYOUT`].
//!
//! A later layout only appends to an entry, and keeps the names of the maps, the header, and what each
//! field says: so every version can renew, shut and remove what another one entered. One that cannot
//! keep to that has another [`MAGIC`]. How long and how many its entries are, the kernel says.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use super::hooks::Row;
use crate::model::ids::SessionId;

/// The layout of the maps and of their names below bpffs.
pub(super) const LAYOUT: u32 = 2;
const MAGIC: u64 = u64::from_le_bytes(*b"ovf-gate");

/// A wish: no writable shared mapping, whatever the lease says.
pub(super) const DENY_SHARED: u32 = 1;

/// A superblock that nobody has.
const DEAD: u64 = 1;

/// One session's entry.
#[repr(C)]
pub(super) struct Raw {
    /// CLOCK_BOOTTIME, nanoseconds; refused from then on.
    pub deadline: AtomicU64,
    pub generation: AtomicU64,
    /// The newest generation known; above `generation` the session is superseded.
    pub newest: AtomicU64,
    pub root_ino: AtomicU64,
    /// As the kernel counts it; 0 in a free entry.
    pub dev: AtomicU32,
    pub wishes: AtomicU32,
    pub shared: AtomicU32,
    /// When a refusal was told last, as the programs count.
    told: AtomicU32,
    /// Whose it is.
    session: [AtomicU64; 2],
    /// The overlay's, as the programs met it; [`DEAD`] after its death.
    superblock: AtomicU64,
    /// By [`Row`].
    pub refused: [AtomicU64; Row::ALL.len()],
}

const _: () = assert!(size_of::<Raw>() == 136);

impl Raw {
    pub(super) fn session(&self) -> [u64; 2] {
        self.session.each_ref().map(|word| word.load(Ordering::Relaxed))
    }

    /// Whether an overlay lives, or may live, that it is for.
    pub(super) fn is_needed(&self) -> bool {
        self.dev.load(Ordering::SeqCst) != 0 && self.superblock.load(Ordering::SeqCst) != DEAD
    }

    /// Whether a call met the overlay, so that the programs know it by this entry.
    pub(super) fn is_met(&self) -> bool {
        ![0, DEAD].contains(&self.superblock.load(Ordering::SeqCst))
    }

    /// Whatever was in it, nothing is let through from now on.
    pub(super) fn shut(&self, generation: u64, root_ino: u64, session: SessionId) {
        self.deadline.store(0, Ordering::SeqCst);
        self.generation.store(generation, Ordering::Relaxed);
        for (word, value) in self.session.iter().zip(words(session)) {
            word.store(value, Ordering::Relaxed);
        }
        let zero = [&self.newest, &self.superblock].into_iter().chain(&self.refused);
        zero.for_each(|word| word.store(0, Ordering::Relaxed));
        for word in [&self.wishes, &self.shared, &self.told] {
            word.store(0, Ordering::Relaxed);
        }
        self.root_ino.store(root_ino, Ordering::SeqCst);
    }
}

/// A session's id as an entry holds it.
pub(super) fn words(session: SessionId) -> [u64; 2] {
    let id = session.as_u128();
    [(id >> 64) as u64, id as u64]
}

/// The array, mapped.
pub(super) struct Table {
    start: *const u8,
    /// Bytes from one entry to the next, and how many there are, with the header.
    stride: usize,
    count: u32,
}

// SAFETY: the mapping is process-wide, lives until drop, and is reached only through atomics.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

impl Table {
    /// `map` is the array, of so many entries of so many bytes; the kernel refuses what is longer than
    /// it. `None`: no such entries are ours.
    pub(super) fn new(map: impl AsFd, stride: u32, count: u32) -> rustix::io::Result<Option<Self>> {
        let (stride, align) = (stride as usize, align_of::<Raw>());
        if stride < size_of::<Raw>() || !stride.is_multiple_of(align) || count < 2 {
            return Ok(None);
        }
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let (null, size) = (std::ptr::null_mut(), stride * count as usize);
        // SAFETY: a fresh mapping at an address of the kernel's choice; a BPF array never shrinks.
        let start = unsafe { rustix::mm::mmap(null, size, prot, MapFlags::SHARED, map, 0) }?;
        Ok(Some(Self { start: start.cast_const().cast(), stride, count }))
    }

    /// An entry; the header for one that is out of range, which no map holds.
    pub(super) fn at(&self, index: u32) -> &Raw {
        let index = if index < self.count { index as usize } else { 0 };
        // SAFETY: within the mapping, which is page-aligned, `count` times `stride` bytes long, and
        // alive as long as self; `stride` keeps the alignment and holds a Raw. Atomics may change
        // under a shared reference, also by programs and other processes; all of Raw is atomics.
        unsafe { &*self.start.add(index * self.stride).cast() }
    }

    /// The entries, without the header.
    pub(super) fn entries(&self) -> impl Iterator<Item = (u32, &Raw)> {
        (1..self.count).map(|at| (at, self.at(at)))
    }

    /// The entries that were ever taken, without the header.
    pub(super) fn used(&self) -> impl Iterator<Item = (u32, &Raw)> {
        let last = self.at(0).shared.load(Ordering::SeqCst);
        self.entries().take_while(move |(at, _)| *at <= last)
    }

    /// An entry for another overlay: one that is free, or, when none is, one whose overlay is dead.
    pub(super) fn free(&self) -> Option<(u32, &Raw)> {
        let free = self.entries().find(|(_, raw)| raw.dev.load(Ordering::SeqCst) == 0);
        free.or_else(|| self.entries().find(|(_, raw)| !raw.is_needed()))
    }

    /// How many refusals reached nobody: the programs count what the ring had no room for, and agents
    /// what they took and could not place.
    pub(super) fn lost(&self) -> &AtomicU64 {
        &self.at(0).refused[0]
    }

    /// To be called before an entry is taken, so that nobody overlooks it.
    pub(super) fn take(&self, at: u32) {
        self.at(0).shared.fetch_max(at, Ordering::SeqCst);
    }

    /// Writes the header.
    pub(super) fn sign(&self, missing: &[Row], pins: u64) {
        let header = self.at(0);
        let bits = missing.iter().fold(0, |bits, row| bits | 1 << *row as u64);
        header.newest.store(bits, Ordering::Relaxed);
        header.root_ino.store(pins, Ordering::Relaxed);
        header.generation.store(u64::from(LAYOUT), Ordering::Relaxed);
        header.deadline.store(MAGIC, Ordering::SeqCst);
    }

    /// The header, if it is one of ours, of whatever layout.
    pub(super) fn header(&self) -> Option<Header> {
        let header = self.at(0);
        let known = header.deadline.load(Ordering::SeqCst) == MAGIC;
        let bits = header.newest.load(Ordering::Relaxed);
        let missing = Row::ALL.into_iter().filter(|row| bits & 1 << *row as u64 != 0).collect();
        let pins = header.root_ino.load(Ordering::Relaxed);
        known.then_some(Header { missing, pins })
    }
}

/// What is said of the programs that are attached, in the place of the first entry.
pub(super) struct Header {
    /// The rows that they leave unchecked.
    pub missing: Vec<Row>,
    /// How many files are pinned for them.
    pub pins: u64,
}

impl Drop for Table {
    fn drop(&mut self) {
        let size = self.stride * self.count as usize;
        // SAFETY: exactly what mmap gave; no reference to it outlives self.
        let _ = unsafe { rustix::mm::munmap(self.start.cast_mut().cast(), size) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An array that is not the kernel's.
    fn table(stride: u32, count: u32) -> Option<Table> {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let memory = rustix::fs::memfd_create("table", flags).unwrap();
        rustix::fs::ftruncate(&memory, u64::from(stride) * u64::from(count)).unwrap();
        Table::new(memory, stride, count).unwrap()
    }

    #[test]
    fn longer_entries_of_a_later_layout_are_ours_too() {
        assert!(table(128, 4).is_none(), "shorter than ours");
        assert!(table(140, 4).is_none(), "not aligned");
        assert!(table(136, 1).is_none(), "a header alone");
        let table = table(152, 4).unwrap();
        assert!(table.header().is_none());
        table.sign(&[Row::Acl], 28);
        let header = table.header().unwrap();
        assert_eq!((header.missing, header.pins), (vec![Row::Acl], 28));
        let id = SessionId::fresh();
        table.at(3).shut(7, 42, id);
        // SAFETY: within the mapping.
        let third =
            unsafe { std::slice::from_raw_parts(table.start.add(3 * 152).cast::<u64>(), 8) };
        assert_eq!([third[1], third[3]], [7, 42]);
        assert_eq!(third[6..8], words(id));
        assert_eq!(table.entries().map(|(at, _)| at).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(std::ptr::eq(table.at(4), table.at(0)), "what no map holds is the header");
    }

    #[test]
    fn an_entry_is_free_or_at_last_of_a_dead_overlay() {
        let table = table(136, 4).unwrap();
        let free = || table.free().map(|(at, _)| at);
        assert_eq!(free(), Some(1));
        for (at, raw) in table.entries() {
            raw.dev.store(at, Ordering::SeqCst);
        }
        assert_eq!(free(), None);
        table.at(2).superblock.store(0xffff_8880_0000_0000, Ordering::SeqCst);
        assert!(table.at(2).is_met());
        assert_eq!(free(), None);
        table.at(2).superblock.store(DEAD, Ordering::SeqCst);
        assert!(!table.at(2).is_met());
        assert_eq!(free(), Some(2));
        table.at(3).dev.store(0, Ordering::SeqCst);
        assert_eq!(free(), Some(3), "one that is free comes first");
    }
}
