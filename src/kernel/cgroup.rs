//! The sealed execution cgroup: made, stamped, frozen, killed, removed. `cgroup.freeze` is a wish
//! and `cgroup.events` the fact, so every answer here is read back.
//!
//! The control files stay open for the life of a [`Cgroup`]: between a lost lease and the proof of
//! the freeze lie one pwrite and a few preads.

use std::ffi::OsStr;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use rustix::fs::{FileType, FlockOperation, Mode, OFlags, XattrFlags};
use rustix::io::Errno;

use super::walk::{self, Dir};
use super::{At as _, Error, Result, blockers, clock, fs_magic, mountinfo};
use crate::failpoint;
use crate::model::facts::{Blocker, Proof};
use crate::model::head::Digest;
use crate::model::ids::Generation;
pub use crate::model::step::Purpose;
use crate::model::time::BootNs;

const STAMP: &str = "trusted.overfence.stamp";
const TICKET: &str = "trusted.overfence.ticket";
const THAWED: &str = "trusted.overfence.thawed";

/// How long an answer is awaited by reading again without giving the CPU away. Not longer: a
/// real-time thread keeps the very tasks from running that have to reach the freezer.
const TIGHT: Duration = Duration::from_micros(50);
/// After that, the shortest and the longest pause between two reads; in between it is an eighth of
/// what was waited so far. The kernel holds its notifications back to one per 10 ms and file, so
/// reading again is never later than waiting for one.
const PAUSE: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(10));

/// Makes this process the only agent of the sessions below `parent`, as long as the descriptor is open.
///
/// # Errors
/// [`Errno::AGAIN`]: another one is.
pub fn claim(parent: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let claim = rustix::fs::open(parent, flags, Mode::empty()).at("open", parent)?;
    rustix::fs::flock(&claim, FlockOperation::NonBlockingLockExclusive)
        .at("become the only agent of the sessions in", parent)?;
    Ok(claim)
}

/// What we write on a cgroup before we freeze it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stamp {
    /// Why.
    pub purpose: Purpose,
    /// Under which generation.
    pub generation: Generation,
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let purpose = match self.purpose {
            Purpose::Checkpoint => "checkpoint",
            Purpose::Fence => "fence",
            Purpose::Deadline => "deadline",
        };
        write!(f, "{purpose} {}", self.generation)
    }
}

impl FromStr for Stamp {
    type Err = String;
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let fault = || format!("stamp {text:?} is not `<purpose> <generation>`");
        let (purpose, generation) = text.split_once(' ').ok_or_else(fault)?;
        let purpose = match purpose {
            "checkpoint" => Purpose::Checkpoint,
            "fence" => Purpose::Fence,
            "deadline" => Purpose::Deadline,
            _ => return Err(fault()),
        };
        let generation = Generation(generation.parse().map_err(|_| fault())?);
        Ok(Self { purpose, generation })
    }
}

/// What the kernel says of a cgroup now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CgroupState {
    /// `cgroup.freeze`: somebody wishes it frozen.
    pub freeze: bool,
    /// `cgroup.events` frozen: it is.
    pub frozen: bool,
    /// `cgroup.events` populated: a live process is in it or below.
    pub populated: bool,
}

impl CgroupState {
    /// Whether nothing in it can run and nothing will by itself.
    pub fn is_frozen(&self) -> bool {
        self.freeze && (self.frozen || !self.populated)
    }
}

impl fmt::Display for CgroupState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { freeze, frozen, populated } = *self;
        let n = u8::from;
        write!(f, "freeze {}, frozen {}, populated {}", n(freeze), n(frozen), n(populated))
    }
}

/// Whether the kernel gave its answer within the deadline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It did.
    Proved(Proof),
    /// It did not yet; the wish stays written, and these processes hold it up. It can also be
    /// empty: they went on in between.
    Late(Vec<Blocker>),
}

/// A cgroup v2 directory with its control files open.
#[derive(Debug)]
pub struct Cgroup {
    dir: OwnedFd,
    freeze: OwnedFd,
    events: OwnedFd,
    kill: OwnedFd,
    path: PathBuf,
}

/// The mount point of the cgroup v2 hierarchy, wherever this host has it.
pub fn find_root() -> Result<PathBuf> {
    find_mount().map(|mount| mount.point)
}

fn find_mount() -> Result<mountinfo::Mount> {
    let mounts = mountinfo::read(None)?;
    let whole = |m: &&mountinfo::Mount| m.root == Path::new("/");
    let v2: Vec<_> = mounts.iter().filter(|m| m.superblock.is("cgroup2")).collect();
    // A bind of a part of the hierarchy may come first; prefer the whole.
    let found = v2.iter().copied().find(whole).or(v2.first().copied());
    found.cloned().ok_or(Error::V1Only)
}

/// A cgroup's directory as `/proc/PID/cgroup` names it. What is mounted can be a part of the
/// hierarchy, bound into a container.
pub fn named(directory: &Path) -> Result<PathBuf> {
    let mount = find_mount()?;
    Ok(mount.root.join(directory.strip_prefix(&mount.point).unwrap_or(directory)))
}

/// The directory of the calling process's own cgroup.
pub fn own() -> Result<PathBuf> {
    let path = "/proc/self/cgroup";
    let text = std::fs::read_to_string(path).at("read", path)?;
    let name = text.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/");
    let mount = find_mount()?;
    match Path::new(name).strip_prefix(&mount.root) {
        Ok(below) => Ok(mount.point.join(below)),
        Err(_) => Err(Error::Garbled {
            path: path.into(),
            reason: format!("{name} is not in what is mounted at {}", mount.point.display()),
        }),
    }
}

/// Makes what sealed cgroups are made in, with what it is in itself; one that is there stays.
pub fn make_parent(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).at("make cgroup", path)
}

impl Cgroup {
    /// Makes a cgroup, or opens the one that is there already: doing it twice is the same.
    pub fn create(path: &Path) -> Result<Self> {
        failpoint::fails("kernel.cgroup-create.before").at("make cgroup", path)?;
        match rustix::fs::mkdir(path, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(e).at("make cgroup", path),
        }
        failpoint::hit("kernel.cgroup-create.after");
        Self::open(path)?.ok_or(Errno::NOENT).at("open cgroup", path)
    }

    /// Opens a cgroup, `None` if there is none.
    pub fn open(path: &Path) -> Result<Option<Self>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = match rustix::fs::open(path, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            answer => answer.at("open cgroup", path)?,
        };
        let control = |name: &'static str, flags: OFlags| match rustix::fs::openat(
            &dir,
            name,
            flags | OFlags::CLOEXEC,
            Mode::empty(),
        ) {
            // The root has none of these, and a kernel before 5.14 has no cgroup.kill.
            Err(Errno::NOENT) if is_cgroup2(&dir) => Err(Error::TooOld { feature: name }),
            answer => answer.at("open a control file of cgroup", path),
        };
        let freeze = control("cgroup.freeze", OFlags::RDWR)?;
        let events = control("cgroup.events", OFlags::RDONLY)?;
        let kill = control("cgroup.kill", OFlags::WRONLY)?;
        Ok(Some(Self { dir, freeze, events, kill, path: path.to_owned() }))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the cgroup and what is nested in it, by rmdir alone: a populated one stays and the
    /// answer is EBUSY. Killed processes leave a moment later than `populated 0` says, so EBUSY is
    /// tried again for `patience`.
    pub fn remove(self, patience: Duration) -> Result<()> {
        failpoint::fails("kernel.cgroup-remove.before").at("remove cgroup", &self.path)?;
        let until = clock::now().plus(patience);
        loop {
            match remove_below(&self.path) {
                Ok(()) => break,
                Err(Errno::BUSY | Errno::NOTEMPTY) if clock::now() < until => {
                    clock::sleep_until(clock::now().plus(Duration::from_millis(1)));
                }
                Err(e) => return Err(e).at("remove cgroup", &self.path),
            }
        }
        failpoint::hit("kernel.cgroup-remove.after");
        Ok(())
    }

    /// Leaves it as it was before it was a session's: no stamp, no ticket, no freeze. Nothing of the
    /// session runs in it any more.
    pub fn give_back(self) -> Result<()> {
        failpoint::fails("kernel.cgroup-give-back.before")
            .at("remove a stamp of cgroup", &self.path)?;
        for name in [STAMP, TICKET] {
            match rustix::fs::fremovexattr(&self.dir, name) {
                Ok(()) | Err(Errno::NODATA) => {}
                Err(e) => return Err(e).at("remove a stamp of cgroup", &self.path),
            }
        }
        self.write_freeze(false)?;
        failpoint::hit("kernel.cgroup-give-back.after");
        Ok(())
    }

    /// Writes why it is about to be frozen; replaces an earlier stamp.
    pub fn stamp(&self, stamp: &Stamp) -> Result<()> {
        self.write_xattr(STAMP, &stamp.to_string())
    }

    /// Takes the stamp off, after a thaw.
    pub fn clear_stamp(&self) -> Result<()> {
        match rustix::fs::fremovexattr(&self.dir, STAMP) {
            Ok(()) | Err(Errno::NODATA) => Ok(()),
            Err(e) => Err(e).at("remove the stamp of cgroup", &self.path),
        }
    }

    /// The stamp, if it has one.
    pub fn read_stamp(&self) -> Result<Option<Stamp>> {
        self.read_xattr(STAMP)
    }

    /// Writes the digest of the ticket that seals it.
    pub fn set_ticket(&self, digest: &Digest) -> Result<()> {
        self.write_xattr(TICKET, &digest.to_string())
    }

    /// The digest of the ticket that seals it.
    pub fn ticket(&self) -> Result<Option<Digest>> {
        self.read_xattr(TICKET)
    }

    /// Writes down that it was found thawed at `at`, for who looks only after it is frozen again.
    pub fn note_thaw(&self, at: BootNs) -> Result<()> {
        self.write_xattr(THAWED, &at.0.to_string())
    }

    /// When it was last found thawed.
    pub fn last_thaw(&self) -> Result<Option<BootNs>> {
        Ok(self.read_xattr(THAWED)?.map(BootNs))
    }

    fn write_xattr(&self, name: &'static str, text: &str) -> Result<()> {
        rustix::fs::fsetxattr(&self.dir, name, text.as_bytes(), XattrFlags::empty())
            .at("write a stamp on cgroup", &self.path)
    }

    fn read_xattr<T: FromStr<Err: fmt::Display>>(&self, name: &'static str) -> Result<Option<T>> {
        let raw = walk::xattr(&self.dir, OsStr::new(name)).at("read a stamp of", &self.path)?;
        let Some(raw) = raw else { return Ok(None) };
        let text = String::from_utf8_lossy(&raw);
        text.parse().map(Some).map_err(|e: T::Err| Error::Garbled {
            path: self.path.clone(),
            reason: format!("{name}: {e}"),
        })
    }

    /// Writes the wish and asks nothing.
    pub fn write_freeze(&self, freeze: bool) -> Result<()> {
        let wish: &[u8] = if freeze { b"1" } else { b"0" };
        rustix::io::pwrite(&self.freeze, wish, 0)
            .map(|_| ())
            .at("write cgroup.freeze of", &self.path)
    }

    /// What the kernel says now.
    pub fn state(&self) -> Result<CgroupState> {
        let mut buffer = [0; 256];
        let len = rustix::io::pread(&self.events, &mut buffer, 0)
            .at("read cgroup.events of", &self.path)?;
        let (populated, frozen) = parse_events(&buffer[..len]).ok_or_else(|| Error::Garbled {
            path: self.path.join("cgroup.events"),
            reason: String::from_utf8_lossy(&buffer[..len]).into_owned(),
        })?;
        // The wish is read after the fact: a thaw between the two reads is not taken for frozen.
        Ok(CgroupState { freeze: self.wish()?, frozen, populated })
    }

    /// Whether it is wished frozen, by whomever.
    pub fn wish(&self) -> Result<bool> {
        read_wish(&self.freeze).at("read cgroup.freeze of", &self.path)
    }

    /// Freezes it and waits for the proof, `deadline` from now at most. A system call in progress
    /// runs to its end first. When late, the wish stays written.
    pub fn freeze(&self, deadline: Duration) -> Result<Outcome> {
        failpoint::fails("kernel.freeze.before").at("write cgroup.freeze of", &self.path)?;
        let begun = clock::now();
        self.write_freeze(true)?;
        let proof = self.await_state(begun, deadline, "cgroup.freeze=1", CgroupState::is_frozen)?;
        failpoint::hit("kernel.freeze.after");
        self.outcome(proof)
    }

    /// Thaws it and waits until the kernel says `frozen 0`; late when an ancestor is frozen.
    pub fn thaw(&self, deadline: Duration) -> Result<Outcome> {
        failpoint::fails("kernel.thaw.before").at("write cgroup.freeze of", &self.path)?;
        let begun = clock::now();
        self.write_freeze(false)?;
        let thawed = |state: &CgroupState| !state.freeze && !state.frozen;
        let proof = self.await_state(begun, deadline, "cgroup.freeze=0", thawed)?;
        failpoint::hit("kernel.thaw.after");
        Ok(proof.map_or_else(|| Outcome::Late(Vec::new()), Outcome::Proved))
    }

    /// Kills everything in it and below, and waits for `populated 0`. Works on a frozen cgroup.
    pub fn kill(&self, deadline: Duration) -> Result<Outcome> {
        failpoint::fails("kernel.kill.before").at("write cgroup.kill of", &self.path)?;
        let begun = clock::now();
        rustix::io::pwrite(&self.kill, b"1", 0).at("write cgroup.kill of", &self.path)?;
        let proof = self.await_state(begun, deadline, "cgroup.kill=1", |s| !s.populated)?;
        failpoint::hit("kernel.kill.after");
        self.outcome(proof)
    }

    fn outcome(&self, proof: Option<Proof>) -> Result<Outcome> {
        match proof {
            Some(proof) => Ok(Outcome::Proved(proof)),
            None => Ok(Outcome::Late(blockers::of(&self.procs()?))),
        }
    }

    /// Reads again at once, then in growing pauses; the state is read a last time after the deadline.
    fn await_state(
        &self,
        begun: BootNs,
        deadline: Duration,
        asked: &str,
        reached: impl Fn(&CgroupState) -> bool,
    ) -> Result<Option<Proof>> {
        let until = begun.plus(deadline);
        loop {
            let state = self.state()?;
            let now = clock::now();
            if reached(&state) {
                return Ok(Some(Proof {
                    asked: format!("{asked} on {}", self.path.display()),
                    answer: state.to_string(),
                    at: now,
                    took_us: clock::micros_since(begun),
                }));
            }
            if now >= until {
                return Ok(None);
            }
            let spent = now.since(begun);
            if spent < TIGHT {
                std::hint::spin_loop();
            } else {
                let pause = (spent / 8).clamp(PAUSE.0, PAUSE.1);
                clock::sleep_until(until.min(now.plus(pause)));
            }
        }
    }

    /// The processes in it and in cgroups nested in it. A process that moves meanwhile may be seen
    /// twice or not at all.
    pub fn procs(&self) -> Result<Vec<u32>> {
        let mut pids = Vec::new();
        collect_procs(&Dir::open(&self.path)?, &mut pids)?;
        pids.sort_unstable();
        pids.dedup();
        Ok(pids)
    }

    /// Moves the calling process (all its threads) into it. A frozen cgroup freezes it.
    pub fn add_self(&self) -> Result<()> {
        self.add(0)
    }

    /// Takes a process in from wherever it is; one that has ended is fine. Where cgroups below have
    /// controllers, which keeps this one from having processes, into one below that is made for it.
    pub fn take_in(&self, pid: u32) -> Result<()> {
        let answer = match self.add(pid) {
            Err(e) if e.errno() == Some(Errno::BUSY) => {
                let leaf = self.path.join("taken-in");
                match rustix::fs::mkdir(&leaf, Mode::from_raw_mode(0o755)) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(e) => return Err(e).at("make cgroup", leaf),
                }
                let path = leaf.join("cgroup.procs");
                std::fs::write(&path, pid.to_string()).at("move a process by writing", path)
            }
            answer => answer,
        };
        match answer {
            Err(e) if e.errno() == Some(Errno::SRCH) => Ok(()),
            answer => answer,
        }
    }

    /// Moves a process into it; 0 is the caller.
    pub fn add(&self, pid: u32) -> Result<()> {
        let path = self.path.join("cgroup.procs");
        std::fs::write(&path, pid.to_string()).at("move a process by writing", path)
    }
}

/// [`Cgroup::wish`] of the cgroup at `path`, without opening all of it; `None` if there is none.
pub fn wish_at(path: &Path) -> Result<Option<bool>> {
    let file = path.join("cgroup.freeze");
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::open(&file, flags, Mode::empty()) {
        Err(Errno::NOENT) => Ok(None),
        answer => answer.and_then(|freeze| read_wish(&freeze)).map(Some).at("read", &file),
    }
}

fn read_wish(freeze: &OwnedFd) -> rustix::io::Result<bool> {
    let mut wish = [0; 4];
    let len = rustix::io::pread(freeze, &mut wish, 0)?;
    Ok(wish[..len].starts_with(b"1"))
}

fn is_cgroup2(dir: &OwnedFd) -> bool {
    const CGROUP2_SUPER_MAGIC: u64 = 0x6367_7270;
    fs_magic(dir) == Ok(CGROUP2_SUPER_MAGIC)
}

fn parse_events(text: &[u8]) -> Option<(bool, bool)> {
    let text = std::str::from_utf8(text).ok()?;
    let value = |key: &str| {
        text.lines().find_map(|line| match line.split_once(' ')? {
            (k, "0") if k == key => Some(false),
            (k, "1") if k == key => Some(true),
            _ => None,
        })
    };
    Some((value("populated")?, value("frozen")?))
}

fn collect_procs(dir: &Dir, pids: &mut Vec<u32>) -> Result<()> {
    let path = dir.path().join("cgroup.procs");
    match std::fs::read_to_string(&path) {
        Ok(text) => pids.extend(text.lines().filter_map(|line| line.parse::<u32>().ok())),
        // A threaded cgroup lists its processes at the head of its threaded tree, read before.
        Err(e) if e.raw_os_error() == Some(Errno::OPNOTSUPP.raw_os_error()) => {}
        // Removed while we read.
        Err(e) if e.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => {}
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        Err(e) => return Err(e).at("read", path),
    }
    for entry in dir.entries()? {
        let entry = entry?;
        if entry.kind == FileType::Directory {
            match dir.child(&entry.name) {
                Err(e) if e.errno() == Some(Errno::NOENT) => {}
                child => collect_procs(&child?, pids)?,
            }
        }
    }
    Ok(())
}

/// Removes a cgroup after those nested in it; one that is gone already is fine.
fn remove_below(path: &Path) -> rustix::io::Result<()> {
    let errno = |e: Error| e.errno().unwrap_or(Errno::IO);
    let answer = Dir::open(path).and_then(|dir| dir.sorted()).map_err(errno).and_then(|entries| {
        for entry in entries.iter().filter(|e| e.kind == FileType::Directory) {
            remove_below(&path.join(&entry.name))?;
        }
        rustix::fs::rmdir(path)
    });
    if answer == Err(Errno::NOENT) { Ok(()) } else { answer }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_whatever_their_order() {
        assert_eq!(parse_events(b"populated 1\nfrozen 0\n"), Some((true, false)));
        assert_eq!(parse_events(b"frozen 1\nnew 7\npopulated 0\n"), Some((false, true)));
        assert_eq!(parse_events(b"populated 1\n"), None);
        assert_eq!(parse_events(b"populated 1\nfrozen x\n"), None);
    }

    #[test]
    fn a_stamp_round_trips_and_a_foreign_one_is_refused() {
        for purpose in [Purpose::Checkpoint, Purpose::Fence, Purpose::Deadline] {
            let stamp = Stamp { purpose, generation: Generation(u64::MAX) };
            assert_eq!(stamp.to_string().parse(), Ok(stamp));
        }
        for bad in ["", "fence", "fence x", "pause 1", "fence -1"] {
            assert!(bad.parse::<Stamp>().is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn frozen_needs_the_wish_and_the_fact() {
        let state = |freeze, frozen, populated| CgroupState { freeze, frozen, populated };
        assert!(state(true, true, true).is_frozen());
        assert!(state(true, false, false).is_frozen());
        assert!(!state(true, false, true).is_frozen());
        assert!(!state(false, true, true).is_frozen(), "frozen by an ancestor: not ours to report");
    }
}
