//! The lease gate: BPF LSM programs that compare each call which would change a file of a session's
//! overlay, as it starts, with that session's generation and deadline. When the deadline passes nobody
//! has to do anything, and nobody has to be alive.
//!
//! ```text
//! /sys/fs/bpf/overfence/
//! └── layout-2/              the version of what follows
//!     ├── devices            hash: device of an overlay -> number of its entry
//!     ├── refusals           ring buffer: what was refused, for the one agent that reads it
//!     ├── entries            array, mapped by agents: deadline, generation, counters; 0 is the header
//!     ├── <digest>/          one set of programs: each attachment, and its program
//!     └── unfinished/        a set that is not attached whole; gone with the next start
//! ```
//!
//! - It outlives the agent and is adopted by the next one, also by one with other programs: those are
//!   attached beside the old ones on the same maps, and the old ones unpinned after that.
//! - An entry is shut when it is made, before its overlay can be reached by a path; a refused write
//!   probe proves that the programs know the overlay by it. Only then it is opened, by a deadline.
//! - It is removed once the superblock is dead, since its device number is used again.
//! - All agents of a host share it; a lock on bpffs makes them take turns.
//! - Where no programs can be attached, what is pinned already is kept all the same ([`Gate::adopt`]): its
//!   deadlines are still to be moved. So it is with another version's layout.
//!
//! What it does not stop: a call that began before the deadline; stores into mappings made before
//! ([`Entry::shared`] says whether there are any); the kernel's own writers, such as a loop device.
//!
//! Kernel documents followed: Documentation/bpf/prog_lsm.rst, bpf(2).
#![allow(unsafe_code)]

mod btf;
mod ground;
mod hooks;
mod layout;
mod pins;
mod refusals;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aya::maps::{HashMap, MapData, MapError};
use rustix::fs::{Access, AtFlags};
use rustix::io::Errno;

use hooks::Row;
use layout::{DENY_SHARED, Raw, Table};
use pins::{Pinned, Turn};
pub use refusals::{Refusal, Refusals};

use super::walk::{self, Info};
use super::{At as _, Error, Result, clock};
use crate::failpoint;
use crate::model::facts::Proof;
use crate::model::ids::{Generation, SessionId};
use crate::model::time::BootNs;

type Devices = HashMap<MapData, u32, u32>;

/// Why there is no gate, in words.
pub fn why(fault: &Error) -> String {
    use std::error::Error as _;
    match fault {
        Error::NoGate { reason } => reason.clone(),
        other => match other.source() {
            Some(source) => format!("{other}: {source}"),
            None => other.to_string(),
        },
    }
}

fn no_gate(reason: String) -> Error {
    Error::NoGate { reason }
}

/// Whether CLOCK_BOOTTIME is another one here than the programs read: no deadline may be set.
pub fn is_clock_shifted() -> bool {
    ground::shifted()
}

/// The maps of a layout.
struct Maps {
    dir: PathBuf,
    table: Table,
    devices: Mutex<Devices>,
    id: u32,
}

/// The gate of this host.
pub struct Gate {
    maps: Arc<Maps>,
    /// A part of the programs is gone.
    torn: bool,
}

impl Gate {
    /// Adopts what is pinned, or attaches it.
    pub fn raise() -> Result<Self> {
        pins::ground().map_err(no_gate)?;
        let gate = Self::of(pins::raise(&Turn::take()?).map_err(no_gate)?);
        gate.free_what_leaked()?;
        Ok(gate)
    }

    /// What is pinned already, as far as its entries can be renewed and removed. Nothing is attached.
    pub fn adopt() -> Result<Option<Self>> {
        let Some(pinned) = pins::adopt().map_err(no_gate)? else { return Ok(None) };
        let mut gate = Self::of(pinned);
        gate.torn = !gate.stands();
        Ok(Some(gate))
    }

    fn of(pinned: Pinned) -> Self {
        let Pinned { dir, table, devices, id } = pinned;
        let maps = Maps { dir, table, devices: Mutex::new(devices), id };
        Self { maps: Arc::new(maps), torn: false }
    }

    /// The kernel's number of the map of its entries: another gate has another one.
    pub fn map(&self) -> u32 {
        self.maps.id
    }

    /// Whether overlays can be entered: not into a layout of another version.
    pub fn takes(&self) -> bool {
        self.maps.dir == pins::layout_dir()
    }

    /// The ways to change a file that are not checked whole; none: it is complete.
    pub fn missing(&self) -> Vec<&'static str> {
        match self.maps.table.header().filter(|_| !self.torn) {
            Some(header) => header.missing.iter().map(|row| row.name()).collect(),
            None => ways().to_vec(),
        }
    }

    /// What is refused, as it happens; `None`: another agent of this host is told.
    pub fn refusals(&self) -> Result<Option<Refusals>> {
        Refusals::open(&self.maps.dir).map_err(no_gate)
    }

    /// Refusals of this host that were to be told and reached nobody, since its maps were made.
    pub fn lost(&self) -> u64 {
        self.maps.table.lost().load(Ordering::Relaxed)
    }

    /// Counts a refusal that was told to somebody who knows nothing of its session.
    pub fn lose(&self) {
        self.maps.table.lost().fetch_add(1, Ordering::Relaxed);
    }

    /// Whether it is still pinned, with a whole set of programs: root may have taken it away.
    pub fn stands(&self) -> bool {
        pins::stands(&self.maps.dir, &self.maps.table, self.maps.id)
    }

    /// Whether its maps are still pinned, whatever became of the programs.
    pub fn is_pinned(&self) -> bool {
        pins::is_pinned(&self.maps.dir, self.maps.id)
    }

    /// Enters an overlay, shut, and proves by a refused write probe that the programs know it. `root`
    /// is its root, best before it is mounted anywhere.
    pub fn enter(&self, root: &OwnedFd, id: SessionId, generation: Generation) -> Result<Entry> {
        let entry = self.make(root, id, generation, None::<fn() -> BootNs>)?;
        match entry.prove(root) {
            Ok(Some(_)) => Ok(entry),
            Ok(None) => {
                self.give_up(&entry)?;
                Err(no_gate("the programs let a write pass that they were to refuse".to_owned()))
            }
            Err(fault) => {
                self.give_up(&entry)?;
                Err(fault)
            }
        }
    }

    /// Leaves an overlay that could not be entered. An entry that stays, which nobody knows of, refuses
    /// nothing: nobody would move its deadline.
    fn give_up(&self, entry: &Entry) -> Result<()> {
        self.leave(entry).inspect_err(|_| {
            entry.raw().deadline.store(u64::MAX, Ordering::SeqCst);
        })
    }

    /// Enters an overlay that is in use, under a deadline from the start: no write of a good lease is
    /// refused. `deadline` is asked once it is entered at once. That the programs know it is proved by a
    /// call that they noted, whatever its answer.
    /// What was mapped before is not known.
    pub fn enter_live(
        &self,
        root: &OwnedFd,
        id: SessionId,
        generation: Generation,
        deadline: impl FnOnce() -> BootNs,
    ) -> Result<Entry> {
        let entry = self.make(root, id, generation, Some(deadline))?;
        let (answer, _) = entry.ask(root);
        if entry.raw().is_met() {
            return Ok(entry);
        }
        self.give_up(&entry)?;
        let why = match answer {
            // By the superblock, before anybody asks the programs.
            Err(Errno::ROFS) => "the overlay is read-only: there is nothing to enter",
            _ => "the programs do not know the overlay",
        };
        Err(no_gate(why.to_owned()))
    }

    /// Takes an entry. Under a deadline it is of an overlay that is in use.
    fn make(
        &self,
        root: &OwnedFd,
        id: SessionId,
        generation: Generation,
        deadline: Option<impl FnOnce() -> BootNs>,
    ) -> Result<Entry> {
        let info = walk::stat_fd(root).at("stat", "the overlay's root")?;
        let dev = kernel_dev(&info)?;
        let _turn = Turn::take()?;
        failpoint::fails("gate.enter.before").map_err(|e| no_gate(e.to_string()))?;
        let free = self.maps.table.free();
        let (at, raw) =
            free.ok_or_else(|| no_gate("all entries are used: close sessions".to_owned()))?;
        self.forget(at, raw)?;
        self.maps.table.take(at);
        raw.shut(generation.0, info.ino, id);
        if let Some(deadline) = deadline {
            raw.shared.store(1, Ordering::SeqCst);
            raw.deadline.store(deadline().0, Ordering::SeqCst);
        }
        raw.dev.store(dev, Ordering::SeqCst);
        let entered = self.devices().insert(dev, at, 0);
        if let Err(fault) = entered {
            raw.dev.store(0, Ordering::SeqCst);
            return Err(no_gate(format!("cannot enter device {dev}: {fault}")));
        }
        failpoint::hit("gate.enter.after");
        Ok(self.entry(at, dev, id))
    }

    fn entry(&self, at: u32, dev: u32, id: SessionId) -> Entry {
        Entry { maps: Arc::clone(&self.maps), at, dev, session: layout::words(id) }
    }

    /// Whatever overlay had it before: nothing leads to it any more.
    fn forget(&self, at: u32, raw: &Raw) -> Result<()> {
        let dev = raw.dev.load(Ordering::SeqCst);
        // The number may be another overlay's by now, with an entry of its own.
        if dev != 0 && self.entry_of(dev)? == Some(at) {
            let removed = self.devices().remove(&dev);
            removed.map_err(|e| no_gate(format!("cannot remove device {dev}: {e}")))?;
        }
        raw.dev.store(0, Ordering::SeqCst);
        Ok(())
    }

    /// The entry that an earlier agent made for the overlay with this root.
    pub fn find(&self, root: &OwnedFd, id: SessionId) -> Result<Option<Entry>> {
        let info = walk::stat_fd(root).at("stat", "the overlay's root")?;
        let dev = kernel_dev(&info)?;
        let Some(at) = self.entry_of(dev)? else { return Ok(None) };
        let raw = self.maps.table.at(at);
        // Another overlay of the same directories may have the number of one that is dead.
        let same = raw.is_needed()
            && raw.session() == layout::words(id)
            && raw.root_ino.load(Ordering::SeqCst) == info.ino
            && raw.dev.load(Ordering::SeqCst) == dev;
        Ok(same.then(|| self.entry(at, dev, id)))
    }

    /// The entry of a session whose overlay is not at hand any more.
    pub fn find_by_id(&self, id: SessionId) -> Option<Entry> {
        let words = layout::words(id);
        let found = self.maps.table.used().find_map(|(at, raw)| {
            let dev = raw.dev.load(Ordering::SeqCst);
            (dev != 0 && raw.session() == words).then_some((at, dev))
        });
        found.map(|(at, dev)| self.entry(at, dev, id))
    }

    /// Removes an entry; its superblock is dead, or was never to be reached.
    pub fn leave(&self, entry: &Entry) -> Result<()> {
        let _turn = Turn::take()?;
        failpoint::fails("gate.leave.before").map_err(|e| no_gate(e.to_string()))?;
        if let Some(raw) = entry.own() {
            self.forget(entry.at, raw)?;
        }
        failpoint::hit("gate.leave.after");
        Ok(())
    }

    /// Takes the gate away from the host, unless somebody's session needs it; whether it did.
    pub fn lower(&self) -> Result<bool> {
        let turn = Turn::take()?;
        let used = self.maps.table.used().any(|(_, raw)| raw.is_needed());
        // Ours is gone, and somebody put up another one: what it needs is in its own table.
        let anothers = !self.is_pinned() && self.maps.dir.join("entries").exists();
        if used || anothers {
            return Ok(false);
        }
        pins::lower(&turn, &self.maps.dir).map_err(no_gate).map(|()| true)
    }

    fn devices(&self) -> std::sync::MutexGuard<'_, Devices> {
        self.maps.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn entry_of(&self, dev: u32) -> Result<Option<u32>> {
        match self.devices().get(&dev, 0) {
            Ok(at) => Ok(Some(at)),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(fault) => Err(no_gate(format!("cannot look up device {dev}: {fault}"))),
        }
    }

    /// What an agent had taken when it died, and had not entered yet.
    fn free_what_leaked(&self) -> Result<()> {
        let _turn = Turn::take()?;
        for (at, raw) in self.maps.table.used() {
            let dev = raw.dev.load(Ordering::SeqCst);
            if dev != 0 && self.entry_of(dev)? != Some(at) {
                raw.dev.store(0, Ordering::SeqCst);
            }
        }
        Ok(())
    }
}

/// As the kernel counts devices inside; a mount without a disk has major 0.
fn kernel_dev(info: &Info) -> Result<u32> {
    let (major, minor) = (rustix::fs::major(info.dev), rustix::fs::minor(info.dev));
    match major {
        0 if minor != 0 => Ok(minor),
        _ => Err(no_gate(format!("device {major}:{minor} is no overlay's"))),
    }
}

/// The programs read a clock that may be a few nanoseconds behind ours (`ktime_get_boot_fast_ns`): what
/// is past for us has to be past for them.
const CLOCKS_APART: Duration = Duration::from_millis(1);

/// What becomes of a deadline when its entry is shut.
fn shut_at(deadline: BootNs, now: BootNs) -> BootNs {
    if deadline <= now { deadline } else { now.minus(CLOCKS_APART) }
}

/// One session's entry. Once it is another session's it answers as an empty one, and takes nothing.
#[derive(Clone)]
pub struct Entry {
    maps: Arc<Maps>,
    at: u32,
    dev: u32,
    session: [u64; 2],
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Entry({} of map {}, device {})", self.at, self.maps.id, self.dev)
    }
}

impl Entry {
    fn raw(&self) -> &Raw {
        self.maps.table.at(self.at)
    }

    /// Nobody takes it while its overlay lives.
    fn own(&self) -> Option<&Raw> {
        let raw = self.raw();
        let own = raw.dev.load(Ordering::SeqCst) == self.dev && raw.session() == self.session;
        own.then_some(raw)
    }

    /// See [`Gate::map`].
    pub fn map(&self) -> u32 {
        self.maps.id
    }

    /// Lets writes pass until `deadline`, under the lease of this generation.
    pub fn open(&self, generation: Generation, deadline: BootNs) {
        let Some(raw) = self.own() else { return };
        if raw.generation.load(Ordering::SeqCst) != generation.0 {
            raw.deadline.store(0, Ordering::SeqCst);
            raw.generation.store(generation.0, Ordering::SeqCst);
        }
        raw.deadline.store(deadline.0, Ordering::SeqCst);
    }

    /// Refuses writes from now on. A deadline that has passed stays, so that refusals can say which it
    /// was; one that has not is moved to a moment ago.
    pub fn shut(&self) {
        if let Some(raw) = self.own() {
            let past = shut_at(BootNs(raw.deadline.load(Ordering::SeqCst)), clock::now());
            raw.deadline.store(past.0, Ordering::SeqCst);
        }
    }

    /// Refuses writes of every generation below this one, whatever deadline is set later.
    pub fn supersede(&self, newest: Generation) {
        if let Some(raw) = self.own() {
            raw.newest.fetch_max(newest.0, Ordering::SeqCst);
        }
    }

    /// Whether a writable shared mapping was made, or may have been: stores into it pass.
    pub fn shared(&self) -> bool {
        self.own().is_some_and(|raw| raw.shared.load(Ordering::SeqCst) != 0)
    }

    /// Whether writable shared mappings are refused from now on, also under a good lease.
    pub fn deny_shared(&self, deny: bool) {
        let Some(raw) = self.own() else { return };
        match deny {
            true => raw.wishes.fetch_or(DENY_SHARED, Ordering::SeqCst),
            false => raw.wishes.fetch_and(!DENY_SHARED, Ordering::SeqCst),
        };
    }

    /// Calls refused, by the way in which they would have changed a file.
    pub fn refused(&self) -> [(&'static str, u64); 8] {
        let raw = self.own();
        Row::ALL.map(|row| {
            let count = raw.map_or(0, |raw| raw.refused[row as usize].load(Ordering::Relaxed));
            (row.name(), count)
        })
    }

    /// Asks for write access to the overlay's root, and how many refusals the gate counted meanwhile.
    /// This one was no writer's: it is neither told nor left in the count.
    fn ask(&self, root: &OwnedFd) -> (rustix::io::Result<()>, u64) {
        let raw = self.raw();
        let counter = &raw.refused[Row::Names as usize];
        let before = counter.load(Ordering::SeqCst);
        let answer = rustix::fs::accessat(root, ".", Access::WRITE_OK, AtFlags::empty());
        let counted = counter.load(Ordering::SeqCst).wrapping_sub(before);
        if answer == Err(Errno::ROFS) && counted > 0 {
            counter.fetch_sub(1, Ordering::SeqCst);
        }
        (answer, counted)
    }

    /// Asks for write access to the overlay's root: the proof is that the gate counted a refusal and
    /// the answer was EROFS. `None`: it was not refused, or by somebody else.
    pub fn prove(&self, root: &OwnedFd) -> Result<Option<Proof>> {
        let begun = clock::now();
        match self.ask(root) {
            (Err(Errno::ROFS), counted) if counted > 0 => Ok(Some(Proof {
                asked: "faccessat W_OK through the overlay; the gate's count of refusals"
                    .to_owned(),
                answer: format!("EROFS, +{counted}"),
                at: clock::now(),
                took_us: clock::micros_since(begun),
            })),
            (Ok(()) | Err(Errno::ROFS), _) => Ok(None),
            (Err(e), _) => Err(e).at("write-probe", "the overlay's root"),
        }
    }
}

/// The ways to change a file that are told apart.
pub fn ways() -> [&'static str; 8] {
    Row::ALL.map(Row::name)
}

/// Whether the kernel takes the programs, and the rows that they would leave unchecked.
pub fn ask() -> Result<Vec<&'static str>> {
    let missing = pins::try_load().map_err(no_gate)?;
    Ok(missing.into_iter().map(Row::name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shut_entry_keeps_the_deadline_that_passed() {
        let now = BootNs(5_000_000);
        for passed in [0, 1, 4_999_999, 5_000_000] {
            assert_eq!(shut_at(BootNs(passed), now), BootNs(passed));
        }
        // Refused also by a clock that is a little behind.
        for ahead in [5_000_001, u64::MAX] {
            assert_eq!(shut_at(BootNs(ahead), now), BootNs(4_000_000));
        }
    }
}
