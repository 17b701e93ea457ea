//! After a seal: does the overlay let its files be written again? It copies the flag when it
//! instantiates an inode, so what was looked up while it was sealed stays unwritable until that
//! inode is dropped: by a remount if nobody uses it, else when who uses it lets go.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::super::walk::{self, Dir};
use super::super::{At as _, Result, proc_path};
use super::{Place, Stop};

/// How the overlay keeps a flag that was set through it.
const PROTATTR: &str = "trusted.overlay.protattr";
/// Paths of stuck files that are named.
const NAMED: usize = 5;

/// What the overlay does not let be written, though nothing of the upper forbids it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stuck {
    /// How many files and directories were asked for.
    pub asked: u64,
    /// How many of them are stuck.
    pub stuck: u64,
    /// The first of them, below the overlay's root.
    pub first: Vec<PathBuf>,
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} files and directories can still not be written, since somebody looked them \
             up while they were sealed and uses them; end that and readmit again:",
            self.stuck, self.asked
        )?;
        for path in &self.first {
            write!(f, " /{}", path.display())?;
        }
        Ok(())
    }
}

/// Asks, through the overlay with this root, for write access to each file and directory that is
/// in the upper; opens none of them, so that nothing is copied up. `None` if it was stopped.
pub fn stuck(place: &Place, root: &OwnedFd, stop: Stop<'_>) -> Result<Option<Stuck>> {
    let mut asker = Asker { own: place.own()?, top: &place.upper, found: Stuck::default() };
    let mut here = Dir::open(&place.upper)?;
    let mut shown = reach(root, OsStr::new(".")).at("reach", "the overlay's root")?;
    let mut levels: Vec<((u64, u64), Vec<OsString>)> = Vec::new();
    asker.ask(&here, &shown, here.path())?;
    let mut waiting = asker.ask_below(&here, &shown)?;
    loop {
        if stop() {
            return Ok(None);
        }
        if let Some(name) = waiting.pop() {
            let child = here.child(&name)?;
            let below = match reach(&shown, &name) {
                Err(Errno::XDEV | Errno::NOENT) => continue,
                answer => answer.at("reach through the overlay", child.path())?,
            };
            let info = here.own_stat()?;
            let names = asker.ask_below(&child, &below)?;
            levels.push(((info.dev, info.ino), std::mem::replace(&mut waiting, names)));
            (here, shown) = (child, below);
            continue;
        }
        let Some((above, names)) = levels.pop() else { return Ok(Some(asker.found)) };
        here = here.parent(above)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        shown = rustix::fs::openat(&shown, c"..", flags, Mode::empty())
            .at("go up through the overlay to", here.path())?;
        waiting = names;
    }
}

struct Asker<'a> {
    own: BTreeSet<u64>,
    top: &'a Path,
    found: Stuck,
}

impl Asker<'_> {
    /// Asks for all in a directory; gives its subdirectories.
    fn ask_below(&mut self, dir: &Dir, shown: &OwnedFd) -> Result<Vec<OsString>> {
        let mut below = Vec::new();
        for entry in dir.entries()? {
            let entry = entry?;
            let kind = match entry.kind {
                FileType::Unknown => dir.stat(&entry.name)?.kind,
                known => known,
            };
            if !matches!(kind, FileType::Directory | FileType::RegularFile) {
                continue;
            }
            let path = dir.path().join(&entry.name);
            match reach(shown, &entry.name) {
                Ok(seen) => self.ask(dir.open_path(&entry.name)?, &seen, &path)?,
                // Another mount is on it, or it went meanwhile.
                Err(Errno::XDEV | Errno::NOENT) => continue,
                Err(e) => return Err(e).at("reach through the overlay", &path),
            }
            if kind == FileType::Directory {
                below.push(entry.name);
            }
        }
        Ok(below)
    }

    fn ask(&mut self, real: impl AsFd, seen: &OwnedFd, path: &Path) -> Result<()> {
        self.found.asked += 1;
        match rustix::fs::access(proc_path(seen), Access::WRITE_OK) {
            // EACCES: its owner is not in the overlay's id map, and it was never to be written.
            Ok(()) | Err(Errno::ACCESS) => return Ok(()),
            Err(Errno::PERM) => {}
            Err(e) => return Err(e).at("write-probe through the overlay", path),
        }
        let ino = walk::stat_fd(&real).at("stat", path)?.ino;
        let marks = walk::xattr(&real, OsStr::new(PROTATTR)).at("read xattrs of", path)?;
        // The owner's own flag, set in the upper or through the overlay.
        if self.own.contains(&ino) || marks.is_some_and(|marks| marks.contains(&b'i')) {
            return Ok(());
        }
        self.found.stuck += 1;
        if self.found.first.len() < NAMED {
            self.found.first.push(path.strip_prefix(self.top).unwrap_or(path).to_owned());
        }
        Ok(())
    }
}

/// Names an object of the overlay without opening it, and without crossing a mount.
fn reach(dir: &OwnedFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
    loop {
        match rustix::fs::openat2(dir, name, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            answer => return answer,
        }
    }
}
