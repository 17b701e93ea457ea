//! Goes through an upper with one thread, which handles the directories, and hands their files out
//! to a few more. By descriptor, following nothing and crossing no mount; the way up is `..`,
//! believed only if it leads where the descent came from.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::FileType;

use super::super::walk::Dir;
use super::super::{Error, Result};
use super::Stop;
use crate::failpoint;

/// Names handed out at once, and how many such lots may wait: both bound memory, the second also
/// the descriptors that are open.
const LOT: usize = 128;
const WAITING: usize = 32;
/// More do not help: the flags go through one journal.
const THREADS: usize = 4;

/// What is done with each directory and each file.
pub(super) trait Visit: Sync {
    /// The failpoint after each lot of files.
    const LOT: &'static str;
    fn directory(&self, dir: &Dir) -> Result<()>;
    fn file(&self, dir: &Dir, name: &OsStr) -> Result<()>;
}

/// When a directory's turn comes: before its names are read, or after all in it were handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Before,
    After,
}

/// What cannot carry a flag, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    symlinks: u64,
    fifos: u64,
    sockets: u64,
    devices: u64,
}

impl Left {
    fn count(&mut self, kind: FileType) {
        match kind {
            FileType::Symlink => self.symlinks += 1,
            FileType::Fifo => self.fifos += 1,
            FileType::Socket => self.sockets += 1,
            _ => self.devices += 1,
        }
    }
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = [
            (self.symlinks, "symlink(s)"),
            (self.fifos, "fifo(s)"),
            (self.sockets, "socket(s)"),
            (self.devices, "device(s) or whiteout(s)"),
        ];
        let some: Vec<_> =
            kinds.iter().filter(|(n, _)| *n > 0).map(|(n, kind)| format!("{n} {kind}")).collect();
        match some.is_empty() {
            true => f.write_str("nothing is without the flag"),
            false => write!(f, "without the flag, which they cannot carry: {}", some.join(", ")),
        }
    }
}

struct Lot {
    dir: Arc<Dir>,
    names: Vec<OsString>,
}

/// What the threads tell each other.
struct Shared<'a> {
    stop: Stop<'a>,
    ended: AtomicBool,
    fault: Mutex<Option<Error>>,
}

impl Shared<'_> {
    fn over(&self) -> bool {
        if !self.ended.load(Ordering::Relaxed) && (self.stop)() {
            self.ended.store(true, Ordering::Relaxed);
        }
        self.ended.load(Ordering::Relaxed)
    }

    /// The first one counts.
    fn fail(&self, fault: Error) {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(fault);
        self.ended.store(true, Ordering::Relaxed);
    }
}

/// Visits the directory at `top` and all that is in it. `None` if it was stopped.
pub(super) fn walk(
    top: &Path,
    order: Order,
    visit: &impl Visit,
    stop: Stop<'_>,
) -> Result<Option<Left>> {
    let top = Dir::open(top)?;
    let shared = Shared { stop, ended: AtomicBool::new(false), fault: Mutex::new(None) };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(THREADS));
    let (give, take) = sync_channel(WAITING);
    let take = Mutex::new(take);
    let left = std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| work(&take, visit, &shared));
        }
        // The last sender goes with it, so that the others end.
        let descent = Descent { order, visit, give, shared: &shared, left: Left::default() };
        descent.run(top).unwrap_or_else(|fault| {
            shared.fail(fault);
            Left::default()
        })
    });
    match shared.fault.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(fault) => Err(fault),
        None => Ok((!shared.ended.into_inner()).then_some(left)),
    }
}

/// Takes lots until there are no more; once it is over they are taken and dropped, so that who
/// gives never waits.
fn work<V: Visit>(take: &Mutex<Receiver<Lot>>, visit: &V, shared: &Shared<'_>) {
    loop {
        let lot = take.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Lot { dir, names }) = lot else { return };
        if shared.over() {
            continue;
        }
        for name in &names {
            if let Err(fault) = visit.file(&dir, name) {
                shared.fail(fault);
                break;
            }
        }
        failpoint::hit(V::LOT);
    }
}

/// A directory on the way down.
struct Level {
    /// The one above it.
    above: (u64, u64),
    /// Subdirectories of the one above that are still to be entered.
    waiting: Vec<OsString>,
}

struct Descent<'a, V> {
    order: Order,
    visit: &'a V,
    give: SyncSender<Lot>,
    shared: &'a Shared<'a>,
    left: Left,
}

impl<V: Visit> Descent<'_, V> {
    /// One descriptor is open at a time, whatever the depth, and those of the lots that wait.
    fn run(mut self, top: Dir) -> Result<Left> {
        let mut here = Arc::new(top);
        let mut levels: Vec<Level> = Vec::new();
        let mut waiting = self.enter(&here)?;
        let mut far = Far::default();
        while !self.shared.over() {
            if let Some(name) = waiting.pop() {
                let info = here.own_stat()?;
                let child = match here.child(&name) {
                    // Somebody outside took it away, which a sealed one does not let happen.
                    Err(e) if e.errno() == Some(rustix::io::Errno::NOENT) => continue,
                    child => Arc::new(far.below(child?, &here, levels.len())),
                };
                let names = self.enter(&child)?;
                let above = (info.dev, info.ino);
                levels.push(Level { above, waiting: std::mem::replace(&mut waiting, names) });
                here = child;
                continue;
            }
            if self.order == Order::After {
                self.visit.directory(&here)?;
            }
            let Some(level) = levels.pop() else { break };
            here = Arc::new(far.above(here.parent(level.above)?, levels.len()));
            waiting = level.waiting;
        }
        Ok(self.left)
    }

    /// Hands out the files of a directory and gives its subdirectories.
    fn enter(&mut self, dir: &Arc<Dir>) -> Result<Vec<OsString>> {
        if self.order == Order::Before {
            self.visit.directory(dir)?;
        }
        let (mut below, mut names) = (Vec::new(), Vec::new());
        for entry in dir.entries()? {
            let entry = entry?;
            let kind = match entry.kind {
                FileType::Unknown => dir.stat(&entry.name)?.kind,
                known => known,
            };
            match kind {
                FileType::Directory => below.push(entry.name),
                FileType::RegularFile => names.push(entry.name),
                other => self.left.count(other),
            }
            if names.len() == LOT {
                self.hand_out(dir, std::mem::take(&mut names));
            }
        }
        if !names.is_empty() {
            self.hand_out(dir, names);
        }
        Ok(below)
    }

    fn hand_out(&self, dir: &Arc<Dir>, names: Vec<OsString>) {
        // They take until there is nobody to give.
        let _ = self.give.send(Lot { dir: Arc::clone(dir), names });
    }
}

/// Keeps paths, which are for messages here, from growing with the depth of a hostile tree: the depth
/// and the path of the last directory that is called by its whole one.
#[derive(Default)]
struct Far(Option<(usize, PathBuf)>);

impl Far {
    const NAME: &'static str = "(far below)";

    fn below(&mut self, child: Dir, here: &Dir, depth: usize) -> Dir {
        if self.0.is_none() && child.path().as_os_str().len() > 4096 {
            self.0 = Some((depth, here.path().to_owned()));
        }
        match self.0 {
            Some(_) => child.renamed(Path::new(Self::NAME)),
            None => child,
        }
    }

    fn above(&mut self, up: Dir, depth: usize) -> Dir {
        match self.0.take() {
            Some((known, path)) if known == depth => up.renamed(&path),
            Some(far) => {
                self.0 = Some(far);
                up.renamed(Path::new(Self::NAME))
            }
            None => up,
        }
    }
}
