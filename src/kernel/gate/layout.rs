//! The entries as the programs and every agent of this layout see them: a BPF array that both map.
//! Whoever changes `struct entry` in `gate.bpf.c` changes it here, and raises [`LAYOUT`].

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use super::hooks::Row;
use crate::model::ids::SessionId;

/// The layout of the maps and of their names below bpffs.
pub(super) const LAYOUT: u32 = 2;
/// Entries; the first is the header.
pub(super) const ENTRIES: u32 = 16384;
const MAGIC: u64 = u64::from_le_bytes(*b"ovf-gate");
const SIZE: usize = ENTRIES as usize * size_of::<Raw>();

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
pub(super) struct Table(*const Raw);

// SAFETY: the mapping is process-wide, lives until drop, and is reached only through atomics.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

impl Table {
    /// `map` is the array; the kernel refuses what is longer than it.
    pub(super) fn new(map: impl AsFd) -> rustix::io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice; a BPF array never shrinks.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), SIZE, prot, MapFlags::SHARED, map, 0)
        }?;
        Ok(Self(start.cast_const().cast()))
    }

    fn all(&self) -> &[Raw] {
        // SAFETY: page-aligned, SIZE bytes long, and alive as long as self. Atomics may change under
        // a shared reference, also by programs and other processes; all of Raw is atomics.
        unsafe { std::slice::from_raw_parts(self.0, ENTRIES as usize) }
    }

    /// An entry; the header for one that is out of range, which no map holds.
    pub(super) fn at(&self, index: u32) -> &Raw {
        let all = self.all();
        all.get(index as usize).unwrap_or(&all[0])
    }

    /// The entries, without the header.
    pub(super) fn entries(&self) -> impl Iterator<Item = (u32, &Raw)> {
        (1..).zip(&self.all()[1..])
    }

    /// The entries that were ever taken, without the header.
    pub(super) fn used(&self) -> impl Iterator<Item = (u32, &Raw)> {
        let last = self.at(0).shared.load(Ordering::SeqCst);
        self.entries().take_while(move |(at, _)| *at <= last)
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

    /// The header, if it is one of this layout.
    pub(super) fn header(&self) -> Option<Header> {
        let header = self.at(0);
        let known = header.deadline.load(Ordering::SeqCst) == MAGIC
            && header.generation.load(Ordering::Relaxed) == u64::from(LAYOUT);
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
        // SAFETY: exactly what mmap gave; no reference to it outlives self.
        let _ = unsafe { rustix::mm::munmap(self.0.cast_mut().cast(), SIZE) };
    }
}
