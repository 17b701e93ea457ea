//! Makes and removes a session's directory.
//!
//! Removal takes the directory out of `sessions/` by one rename into the root-only trash, then
//! deletes by descriptor: no component is a symlink, no step crosses a mount, and the way up is
//! believed only if it leads where the descent came from. The marker goes last, so that a crash
//! leaves in the trash what `empty_trash` takes up again.
//!
//! Whether a session *may* be removed is the caller's to decide; that its overlay's superblock is
//! dead is asked for as a [`ProvedGone`].

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FlockOperation, RenameFlags};
use rustix::io::Errno;

use super::empty::{empty, unlink};
use super::tree::reopen;
use super::{At as _, Error, Result, Shown};
use crate::failpoint;
use crate::kernel::background;
use crate::kernel::image::Image;
use crate::kernel::mountinfo;
use crate::kernel::walk::Dir;
use crate::model::backing::Backing;
use crate::model::facts::{Fact, Facts};
use crate::model::ids::SessionId;
use crate::progress::{Amount, Progress};

/// A symlink whose target is the session id. A symlink, because its target lies in the inode: it
/// comes into being with its name, by one journalled step, and needs no fsync of its own.
const MARKER: &str = "marker";
const MAKING: &str = ".new-";

/// The directories of one session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionDirs {
    /// `<sessions>/<id>` (0700).
    pub root: PathBuf,
    /// The overlay's upper (0755), in an image's file system if there is one.
    pub upper: PathBuf,
    /// The overlay's work directory (0700).
    pub work: PathBuf,
    /// Where the overlay is mounted (0755).
    pub merged: PathBuf,
    /// The image that upper and work lie in, if they do.
    pub image: Option<Image>,
}

impl SessionDirs {
    /// The paths of a session with an upper of this kind; touches nothing.
    pub fn of(sessions: &Path, id: SessionId, upper: Backing) -> Self {
        Self::at(sessions.join(id.to_string()), upper)
    }

    fn at(root: PathBuf, upper: Backing) -> Self {
        let image = upper.size().map(|_| Image::below(&root));
        let inside = image.as_ref().map_or(&root, |image| &image.disk);
        Self {
            upper: inside.join("upper"),
            work: inside.join("work"),
            merged: root.join("merged"),
            image,
            root,
        }
    }
}

/// Makes the directories of a new session, with their marker; of one with an image all but those
/// that lie in it. The session's record, durable
/// before this is called, is what explains them after a crash: nothing is fsynced here. [`Error::Exists`] if the id
/// was ever used: a session's directory is never used again.
pub fn create(sessions: &Path, id: SessionId, upper: Backing) -> Result<SessionDirs> {
    let dirs = SessionDirs::of(sessions, id, upper);
    if dirs.root.symlink_metadata().is_ok() {
        return Err(Error::Exists { path: Shown::from(&*dirs.root) });
    }
    let new = SessionDirs::at(sessions.join(format!("{MAKING}{id}")), upper);
    failpoint::fails("upper.session.create.before").at("make", &new.root)?;
    let make = |path: &Path, mode| {
        std::fs::DirBuilder::new().mode(mode).create(path).at("make", path)?;
        // The umask must not decide who can enter.
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))
            .at("set the mode of", path)
    };
    make(&new.root, 0o700)?;
    match &new.image {
        Some(image) => make(&image.disk, 0o700)?,
        None => {
            make(&new.upper, 0o755)?;
            make(&new.work, 0o700)?;
        }
    }
    make(&new.merged, 0o755)?;
    let marker = new.root.join(MARKER);
    std::os::unix::fs::symlink(id.to_string(), &marker).at("make", &marker)?;
    let flags = RenameFlags::NOREPLACE;
    rustix::fs::renameat_with(CWD, &new.root, CWD, &dirs.root, flags)
        .at("rename into place", &dirs.root)?;
    failpoint::hit("upper.session.create.after");
    Ok(dirs)
}

/// Takes away what a crash inside [`create`] left. Only empty directories and the marker are
/// removed; anything else there is not ours and stays, as an error.
pub fn sweep_unfinished(sessions: &Path) -> Result<u64> {
    let mut swept = 0;
    for entry in std::fs::read_dir(sessions).at("list", sessions)? {
        let entry = entry.at("list", sessions)?;
        if !entry.file_name().as_bytes().starts_with(MAKING.as_bytes()) {
            continue;
        }
        let new = SessionDirs::at(entry.path(), Backing::Directory);
        let gone = |outcome: std::io::Result<()>, path: &Path| match outcome {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
            other => other.at("remove", path),
        };
        for dir in [&new.upper, &new.work, &new.merged, &Image::below(&new.root).disk] {
            gone(std::fs::remove_dir(dir), dir)?;
        }
        let marker = new.root.join(MARKER);
        gone(std::fs::remove_file(&marker), &marker)?;
        gone(std::fs::remove_dir(&new.root), &new.root)?;
        swept += 1;
    }
    Ok(swept)
}

/// The proof that a session's overlay is dead in the kernel, which removal asks for.
#[derive(Debug)]
pub struct ProvedGone {
    session: SessionId,
}

impl ProvedGone {
    /// The token for a session, if `gone` is among its proved facts.
    pub fn from_facts(session: SessionId, facts: &Facts) -> Option<Self> {
        facts.has(Fact::Gone).then_some(Self { session })
    }
}

/// What a removal removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Bytes on disk; a file with several names counts with its last one.
    pub bytes: u64,
    /// Files, directories and other names.
    pub entries: u64,
}

impl From<Amount> for Removed {
    fn from(done: Amount) -> Self {
        Self { bytes: done.bytes, entries: done.entries }
    }
}

/// Removes the directory of a session whose overlay is proved gone. `trash` is on the same file
/// system (root only; made if missing). What is gone already is counted in `progress`.
pub fn remove(
    sessions: &Path,
    gone: &ProvedGone,
    trash: &Path,
    progress: &Progress,
) -> Result<Removed> {
    let id = gone.session;
    let path = sessions.join(id.to_string());
    if path.symlink_metadata().is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound) {
        return go_on(trash, id, progress);
    }
    check_marker(&Dir::open(&path)?, id)?;
    refuse_mounts_below(&path)?;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(trash).at("make", trash)?;
    let (from, to) = (Dir::open(sessions)?, Dir::open(trash)?);
    let name = id.to_string();
    failpoint::fails("upper.remove.rename.before").at("move to the trash", &path)?;
    rustix::fs::renameat_with(&from, &*name, &to, &*name, RenameFlags::NOREPLACE)
        .at("move to the trash", &path)?;
    rustix::fs::fsync(&to).at("fsync", trash)?;
    rustix::fs::fsync(&from).at("fsync", sessions)?;
    failpoint::hit("upper.remove.rename.after");
    remove_trashed(&to, OsStr::new(&name), progress)
}

/// A removal done again: the directory is in the trash already, or nowhere.
fn go_on(trash: &Path, id: SessionId, progress: &Progress) -> Result<Removed> {
    match trash.join(id.to_string()).symlink_metadata() {
        Ok(_) => remove_trashed(&Dir::open(trash)?, OsStr::new(&id.to_string()), progress),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Removed::default()),
        Err(e) => Err(e).at("look into", trash),
    }
}

/// Goes on with removals that a crash cut off; what is in the trash was decided before. Entries
/// that are not a marked session are an error and stay.
pub fn empty_trash(trash: &Path) -> Result<Removed> {
    let mut total = Removed::default();
    for name in trashed(trash)? {
        let one = finish_removal(trash, &name)?;
        total.bytes += one.bytes;
        total.entries += one.entries;
    }
    Ok(total)
}

/// What lies in the trash, by name.
pub fn trashed(trash: &Path) -> Result<Vec<OsString>> {
    match trash.exists() {
        true => Ok(Dir::open(trash)?.sorted()?.into_iter().map(|entry| entry.name).collect()),
        false => Ok(Vec::new()),
    }
}

/// Goes on with one removal that a crash cut off. What somebody else has removed by now is gone and
/// nothing is left to count; [`Error::Removing`] if somebody else is at it.
pub fn finish_removal(trash: &Path, name: &OsStr) -> Result<Removed> {
    let path = trash.join(name);
    if path.symlink_metadata().is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound) {
        return Ok(Removed::default());
    }
    refuse_mounts_below(&path)?;
    remove_trashed(&Dir::open(trash)?, name, &Progress::default())
}

fn remove_trashed(trash: &Dir, name: &OsStr, progress: &Progress) -> Result<Removed> {
    let path = trash.path().join(name);
    let unmarked = |why: &str| Error::Unmarked { path: Shown::from(&*path), why: why.to_owned() };
    let id: SessionId = name
        .to_str()
        .and_then(|n| n.parse().ok())
        .ok_or_else(|| unmarked("its name is no session id"))?;
    let Some(dir) = alone(trash, name, &path)? else { return Ok(Removed::default()) };
    failpoint::fails("upper.remove.before").at("remove", &path)?;
    // The marker goes last; an empty directory is one whose marker went already.
    if dir.entries()?.next().is_some() {
        check_marker(&dir, id)?;
        let top = reopen(&dir, &path)?;
        // Running sessions have the disk first.
        background::run(|| empty(top, Some(OsStr::new(MARKER)), progress))
            .at("start a thread for removing", &path)??;
        unlink(&dir, OsStr::new(MARKER), AtFlags::empty())?;
        progress.did(0, 1);
    }
    unlink(trash, name, AtFlags::REMOVEDIR)?;
    progress.did(0, 1);
    rustix::fs::fsync(trash).at("fsync", trash.path())?;
    failpoint::hit("upper.remove.after");
    Ok(progress.done().into())
}

/// Opens what is to be removed for this thread alone: two walks of one tree take each other's names
/// away. `None` if it is gone.
fn alone(trash: &Dir, name: &OsStr, path: &Path) -> Result<Option<Dir>> {
    let gone = |e: &crate::kernel::Error| e.errno() == Some(Errno::NOENT);
    let dir = match trash.child(name) {
        Err(e) if gone(&e) => return Ok(None),
        answer => answer?,
    };
    match rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Err(Error::Removing { path: Shown::from(path) }),
        answer => answer.at("lock", path)?,
    }
    // Whoever had it locked may have removed it by now.
    match trash.stat(name) {
        Ok(info) if info.ino == dir.own_stat()?.ino => Ok(Some(dir)),
        Err(e) if !gone(&e) => Err(e.into()),
        Ok(_) | Err(_) => Ok(None),
    }
}

fn check_marker(dir: &Dir, id: SessionId) -> Result<()> {
    let path = dir.path();
    let unmarked = |why: String| Error::Unmarked { path: Shown::from(path), why };
    let target = dir
        .read_link(OsStr::new(MARKER))
        .map_err(|e| unmarked(format!("its marker cannot be read ({e})")))?;
    match target == *id.to_string() {
        true => Ok(()),
        false => {
            Err(unmarked(format!("its marker says {}, not {id}", Shown::bytes(target.as_bytes()))))
        }
    }
}

/// Refuses if this mount namespace has a mount at or below `path`. Mounts elsewhere cannot be
/// seen; the walk does not cross them either.
fn refuse_mounts_below(path: &Path) -> Result<()> {
    let real = match path.canonicalize() {
        // It is gone by now, and nothing is mounted in it.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        answer => answer.at("resolve", path)?,
    };
    let found = mountinfo::below(mountinfo::read(None)?, &real);
    if found.is_empty() {
        return Ok(());
    }
    let points: Vec<_> = found.iter().take(5).map(|m| Shown::from(&*m.point).to_string()).collect();
    Err(Error::Mounted { path: Shown::from(path), mounts: points.join(", ") })
}

/// Removes a directory in which something of hostile making was put together, as a session's is.
pub fn remove_scratch(path: &Path) -> Result<()> {
    match path.symlink_metadata() {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        _ => remove_behind(path).map(drop),
    }
}

/// [`remove_tree`] of what a workload made as large as it liked: running sessions have the disk first.
pub(super) fn remove_behind(path: &Path) -> Result<Removed> {
    background::run(|| remove_tree(path)).at("start a thread for removing", path)?
}

/// Removes a directory of our own making with all that is in it: a layer's tree, a temporary. The
/// same walk as for sessions; the caller vouches for the path.
pub(super) fn remove_tree(path: &Path) -> Result<Removed> {
    let (above, name) = match (path.parent(), path.file_name()) {
        (Some(above), Some(name)) => (above, name),
        _ => return Err(Errno::INVAL).at("remove", path),
    };
    let above = Dir::open(if above.as_os_str().is_empty() { Path::new(".") } else { above })?;
    remove_opened(&above, above.child(name)?, name)
}

/// The same of a directory that is held open, and the one it is in.
pub(super) fn remove_opened(above: &Dir, dir: Dir, name: &OsStr) -> Result<Removed> {
    let progress = Progress::default();
    empty(dir, None, &progress)?;
    unlink(above, name, AtFlags::REMOVEDIR)?;
    Ok(progress.done().into())
}

#[cfg(test)]
pub(super) mod tests;
