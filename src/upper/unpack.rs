//! Unpacks a layer into a directory that becomes a read-only lower of overlay mounts.
//!
//! The archive may be hostile: each parent is reached component by component from the top, a
//! symlink on the way or a step out of the tree is refused, and nothing that exists is opened but
//! directories. Deletions become overlay's own marks: a character device 0:0 for a whiteout,
//! `trusted.overlay.opaque=y` for an opaque directory.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek as _, SeekFrom, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;

use super::changes::{Changes, Format, opaque_mark};
use super::pack::meta_of;
use super::place::Place;
use super::tarfmt::{Entries, Entry, Kind, Meta};
use super::tree::{Step, Walk, reopen};
use super::{At as _, Error, Result, path_of};
use crate::kernel::proc_path;
use crate::kernel::walk::{Dir, Info};

/// Splits a path into directory and last component.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|b| *b == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (b"", path),
    }
}

/// Unpacks a tar stream into an empty directory. Returns the stream's entries. Nothing is synced.
pub(super) fn unpack(input: impl Read, tree: BorrowedFd<'_>) -> Result<u64> {
    unpack_checked(input, tree, &mut |_| Ok(()))
}

/// Unpacks an archive: what the fuzz target runs. Returns how many entries there were.
pub fn fuzz_unpack(archive: &[u8], tree: BorrowedFd<'_>) -> Result<u64> {
    unpack(archive, tree)
}

/// [`unpack`] that asks `check` before each entry.
pub(super) fn unpack_checked(
    input: impl Read,
    tree: BorrowedFd<'_>,
    check: &mut dyn FnMut(&Entry) -> Result<()>,
) -> Result<u64> {
    let mut target = Target { place: Place::top(tree)?, times: HashMap::new() };
    let mut entries = Entries::new(input);
    let mut count = 0;
    while let Some(entry) = entries.next_entry()? {
        count += 1;
        check(&entry)?;
        match entry.kind {
            Kind::Whiteout => target.whiteout(&entry.path)?,
            Kind::Opaque => {
                target.place.go_to(&entry.path, true)?;
                make_opaque(target.place.dir())?;
            }
            _ => target.plain(entry, &mut entries)?,
        }
    }
    entries.drain()?;
    target.finish()?;
    Ok(count)
}

struct Target {
    /// The directory of the last entry.
    place: Place,
    /// Directory times by inode, set when nothing more is made in them.
    times: HashMap<u64, (i64, u32)>,
}

impl Target {
    /// What has this name in the directory at hand now.
    fn present(&self, name: &Path) -> Result<Option<Info>> {
        match self.place.dir().stat(name.as_os_str()) {
            Ok(info) => Ok(Some(info)),
            Err(e) if e.errno() == Some(Errno::NOENT) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    fn plain<R: Read>(&mut self, entry: Entry, entries: &mut Entries<R>) -> Result<()> {
        let Entry { path, kind, meta } = entry;
        let shown = path_of(&path);
        if path.is_empty() {
            self.place.go_to(b"", false)?;
            return self.own_directory(&meta);
        }
        let (dir, name) = split(&path);
        let name = path_of(name);
        if kind == Kind::Directory {
            return self.directory(&path, &meta);
        }
        let linked = match &kind {
            Kind::HardLink { target } => {
                let (dir, name) = split(target);
                self.place.go_to(dir, false)?;
                let name = path_of(name).to_owned();
                match self.present(&name)? {
                    Some(info) if info.kind != FileType::Directory && !info.is_whiteout() => {}
                    _ => return Err(Error::hostile(&path, "it links to no earlier file")),
                }
                if target == &path {
                    return Err(Error::hostile(&path, "it links to itself"));
                }
                Some((reopen(self.place.dir(), self.place.path())?, name))
            }
            _ => None,
        };
        self.place.go_to(dir, true)?;
        match self.present(name)? {
            None => {}
            Some(info) if info.kind == FileType::Directory => {
                return Err(Error::hostile(&path, "it replaces an earlier directory"));
            }
            Some(_) => {
                rustix::fs::unlinkat(self.place.dir(), name, AtFlags::empty())
                    .at("replace", shown)?;
            }
        }
        let near = self.place.dir().as_fd();
        let node = |kind, device| {
            rustix::fs::mknodat(near, name, kind, Mode::from_raw_mode(0o600), device)
                .at("make", shown)
        };
        match &kind {
            // The caller's and those above.
            Kind::Directory | Kind::Whiteout | Kind::Opaque => {}
            Kind::File { size } => return self.file(&path, name, *size, &meta, entries),
            Kind::HardLink { .. } => {
                if let Some((dir, target)) = linked {
                    rustix::fs::linkat(dir, target, near, name, AtFlags::empty())
                        .at("link", shown)?;
                }
                return Ok(());
            }
            Kind::Symlink { target } => {
                rustix::fs::symlinkat(path_of(target), near, name).at("make", shown)?;
            }
            Kind::Fifo => node(FileType::Fifo, 0)?,
            Kind::CharDevice { major, minor } => {
                node(FileType::CharacterDevice, rustix::fs::makedev(*major, *minor))?;
            }
            Kind::BlockDevice { major, minor } => {
                node(FileType::BlockDevice, rustix::fs::makedev(*major, *minor))?;
            }
        }
        dress(near, name, &meta, shown, matches!(kind, Kind::Symlink { .. }))?;
        rustix::fs::utimensat(near, name, &times(&meta), AtFlags::SYMLINK_NOFOLLOW)
            .at("set times of", shown)
    }

    fn directory(&mut self, path: &[u8], meta: &Meta) -> Result<()> {
        let (dir, name) = split(path);
        let name = path_of(name);
        self.place.go_to(dir, true)?;
        let was = self.present(name)?;
        if was.is_none_or(|info| info.kind != FileType::Directory) {
            if was.is_some() {
                rustix::fs::unlinkat(self.place.dir(), name, AtFlags::empty())
                    .at("replace", path_of(path))?;
            }
            rustix::fs::mkdirat(self.place.dir(), name, Mode::from_raw_mode(0o700))
                .at("make", path_of(path))?;
        }
        self.place.go_to(path, false)?;
        if was.is_some_and(|info| info.is_whiteout()) {
            // Deleted and made anew: it hides what lies below it.
            make_opaque(self.place.dir())?;
        }
        self.own_directory(meta)
    }

    /// Gives the directory at hand its own owner and so on.
    fn own_directory(&mut self, meta: &Meta) -> Result<()> {
        let dir = self.place.dir();
        dress(dir.as_fd(), Path::new("."), meta, self.place.path(), false)?;
        let ino = dir.own_stat()?.ino;
        self.times.insert(ino, (meta.mtime_s, meta.mtime_ns));
        Ok(())
    }

    fn file<R: Read>(
        &mut self,
        path: &[u8],
        name: &Path,
        size: u64,
        meta: &Meta,
        entries: &mut Entries<R>,
    ) -> Result<()> {
        let shown = path_of(path);
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(self.place.dir(), name, flags, Mode::from_raw_mode(0o600))
            .at("make", shown)?;
        let mut file = File::from(fd);
        let mut buffer = vec![0; 1 << 16];
        for run in entries.runs() {
            file.seek(SeekFrom::Start(run.at)).at("write", shown)?;
            let mut content = entries.content().take(run.len);
            loop {
                let got = content.read(&mut buffer).at("read the layer for", shown)?;
                match &buffer[..got] {
                    [] => break,
                    zeros if zeros.iter().all(|b| *b == 0) => {
                        file.seek(SeekFrom::Current(got as i64)).at("write", shown)?;
                    }
                    bytes => file.write_all(bytes).at("write", shown)?,
                }
            }
        }
        file.set_len(size).at("write", shown)?;
        dress(self.place.dir().as_fd(), name, meta, shown, false)?;
        rustix::fs::futimens(&file, &times(meta)).at("set times of", shown)
    }

    fn whiteout(&mut self, path: &[u8]) -> Result<()> {
        let (dir, name) = split(path);
        let name = path_of(name);
        self.place.go_to(dir, true)?;
        match self.present(name)? {
            // The layer has the name too: it is new here, and hides what was below.
            Some(info) if info.kind == FileType::Directory => {
                make_opaque(&self.place.dir().child(name.as_os_str())?)
            }
            Some(_) => Ok(()),
            None => rustix::fs::mknodat(
                self.place.dir(),
                name,
                FileType::CharacterDevice,
                Mode::empty(),
                rustix::fs::makedev(0, 0),
            )
            .at("make the whiteout", path_of(path)),
        }
    }

    /// Sets the times of all directories; those the layer did not name get the epoch.
    fn finish(mut self) -> Result<()> {
        self.place.go_to(b"", false)?;
        let top = self.place.dir();
        let stamp = |ino: u64| {
            let (mtime_s, mtime_ns) = self.times.get(&ino).copied().unwrap_or_default();
            times(&Meta { mtime_s, mtime_ns, ..Meta::default() })
        };
        let mut walk = Walk::new(top)?;
        while let Some(step) = walk.step()? {
            let Step::Name(entry) = step else { continue };
            let info = walk.here().stat(&entry.name)?;
            if info.kind == FileType::Directory {
                let path = walk.here().path().join(&entry.name);
                let flags = AtFlags::SYMLINK_NOFOLLOW;
                rustix::fs::utimensat(walk.here(), &*entry.name, &stamp(info.ino), flags)
                    .at("set times of", path)?;
                walk.enter(&entry)?;
            }
        }
        let ino = top.own_stat()?.ino;
        rustix::fs::futimens(top, &stamp(ino)).at("set times of", "")
    }
}

/// Gives a new session's upper the owner, mode, attributes and time of the topmost layer's top
/// directory. Overlay shows the upper's own for the merged top, so without this a session would not
/// see what an earlier one published there.
pub fn copy_top(layer: BorrowedFd<'_>, upper: BorrowedFd<'_>) -> Result<()> {
    let Some(top) = Changes::new(layer, Format::Trusted)?.next() else { return Ok(()) };
    let meta = meta_of(&top?);
    dress(upper, Path::new("."), &meta, Path::new(""), false)?;
    rustix::fs::futimens(upper, &times(&meta)).at("set times of", "")
}

fn times(meta: &Meta) -> Timestamps {
    let time = Timespec { tv_sec: meta.mtime_s, tv_nsec: meta.mtime_ns.into() };
    Timestamps { last_access: time, last_modification: time }
}

fn make_opaque(dir: &Dir) -> Result<()> {
    rustix::fs::fsetxattr(dir, opaque_mark(), b"y", XattrFlags::empty())
        .at("make opaque", dir.path())
}

/// Sets owner, mode and attributes of something just made. The order matters: a change of owner
/// drops setuid bits and capabilities.
pub(super) fn dress(
    dir: BorrowedFd<'_>,
    name: &Path,
    meta: &Meta,
    shown: &Path,
    symlink: bool,
) -> Result<()> {
    let (uid, gid) = (Uid::from_raw(meta.uid), Gid::from_raw(meta.gid));
    rustix::fs::chownat(dir, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
        .at("set the owner of", shown)?;
    if !symlink {
        rustix::fs::chmodat(dir, name, Mode::from_raw_mode(meta.mode), AtFlags::empty())
            .at("set the mode of", shown)?;
    }
    let is_caps = |key: &&Vec<u8>| key.as_slice() == b"security.capability";
    let (last, first): (Vec<_>, Vec<_>) = meta.xattrs.iter().partition(|(key, _)| is_caps(key));
    let at = proc_path(dir).join(name);
    for (key, value) in first.into_iter().chain(last) {
        rustix::fs::lsetxattr(&at, path_of(key), value, XattrFlags::empty())
            .at("set an attribute of", shown)?;
    }
    Ok(())
}
