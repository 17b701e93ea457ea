//! Walks a tree that somebody hostile wrote, by descriptors only: no component is a symlink, no
//! step leaves the directory above it, none crosses a mount, and nothing but a regular file or a
//! directory is ever opened (opening a device or a fifo can do things).

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;

use super::{At as _, Error, Result, proc_path};

/// No symlink, no mount, no way up.
const INSIDE: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_XDEV)
    .union(ResolveFlags::NO_MAGICLINKS);

/// A directory held open for reading.
#[derive(Debug)]
pub struct Dir {
    fd: OwnedFd,
    path: PathBuf,
}

/// One name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name: any bytes but `/` and NUL.
    pub name: OsString,
    /// What the directory says it is; `Unknown` on file systems without d_type.
    pub kind: FileType,
    /// Inode number as the directory has it.
    pub ino: u64,
}

/// What a name led to, held by a descriptor that opened nothing (O_PATH): whoever has the name
/// afterwards, this stays what it was.
#[derive(Debug)]
pub struct Held {
    handle: OwnedFd,
    /// What statx says of it.
    pub info: Info,
}

impl Held {
    /// Opens it for reading; to be asked of regular files only.
    pub fn open(&self) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        super::reopen(&self.handle, flags)
    }

    /// All its extended attributes, sorted by name, if they have no more bytes than `most`; else
    /// [`Errno::TOOBIG`].
    pub fn xattrs(&self, most: usize) -> rustix::io::Result<Vec<(OsString, Vec<u8>)>> {
        let path = proc_path(&self.handle);
        named(&self.handle, grow(|buffer| rustix::fs::listxattr(&path, buffer)), most)
    }
}

/// What statx says of an object, symlinks not followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// File, directory, symlink, device, ...
    pub kind: FileType,
    /// Permission bits with setuid, setgid and sticky (`0o7777`).
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Bytes.
    pub size: u64,
    /// Allocated 512-byte blocks.
    pub blocks: u64,
    /// Hard links.
    pub nlink: u32,
    /// Device of the file system (makedev form).
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// Device a device node stands for (makedev form).
    pub rdev: u64,
    /// Last modification, seconds since 1970.
    pub mtime_s: i64,
    /// and nanoseconds.
    pub mtime_ns: u32,
    /// Last change of the inode, seconds since 1970.
    pub ctime_s: i64,
    /// and nanoseconds.
    pub ctime_ns: u32,
    /// The mount it was reached through.
    pub mount_id: u64,
}

impl Info {
    /// Whether this is an overlay whiteout of the device form.
    pub fn is_whiteout(&self) -> bool {
        self.kind == FileType::CharacterDevice && self.rdev == 0
    }
}

impl Dir {
    /// Opens a directory by a path the caller trusts; only its last component may not be a
    /// symlink.
    pub fn open(path: &Path) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty()).at("open directory", path)?;
        Ok(Self { fd, path: path.to_owned() })
    }

    /// Takes over a descriptor of a directory; `path` is for messages only.
    pub fn from_fd(fd: OwnedFd, path: &Path) -> Self {
        Self { fd, path: path.to_owned() }
    }

    /// The path it was reached by, for messages: it may name something else by now.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its entries in the order the kernel gives them, without `.` and `..`.
    pub fn entries(&self) -> Result<Entries<'_>> {
        let stream = rustix::fs::Dir::read_from(&self.fd).at("list", &self.path)?;
        Ok(Entries { dir: self, stream })
    }

    /// Its entries sorted by the bytes of their names; holds all names of this one directory.
    pub fn sorted(&self) -> Result<Vec<Entry>> {
        let mut all = self.entries()?.collect::<Result<Vec<_>>>()?;
        all.sort_by(|a, b| a.name.as_bytes().cmp(b.name.as_bytes()));
        Ok(all)
    }

    /// Opens a directory in this one.
    pub fn child(&self, name: &OsStr) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let fd = self.open_inside(name, flags, "open directory")?;
        Ok(Self { fd, path: self.path.join(name) })
    }

    /// Opens the directory above this one, which must be `want` (device and inode).
    pub fn parent(&self, want: (u64, u64)) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = INSIDE.difference(ResolveFlags::BENEATH);
        let fd = loop {
            match rustix::fs::openat2(&self.fd, c"..", flags, Mode::empty(), resolve) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                answer => break answer.at("go up from", &self.path)?,
            }
        };
        let up = Self { fd, path: self.path.parent().unwrap_or(Path::new("")).to_owned() };
        let info = up.own_stat()?;
        match (info.dev, info.ino) == want {
            true => Ok(up),
            false => Err(Errno::STALE).at("go up again, it was moved, from", &self.path),
        }
    }

    /// The same directory under another path for messages.
    pub fn renamed(self, path: &Path) -> Self {
        Self { fd: self.fd, path: path.to_owned() }
    }

    /// Opens a regular file in this directory for reading. Anything else is refused (`ELOOP` for a
    /// symlink, `ENXIO` for the rest) without having been opened.
    pub fn open_file(&self, name: &OsStr) -> Result<OwnedFd> {
        let held = self.hold(name)?;
        let refuse = |source| Error::Call { op: "open file", path: self.path.join(name), source };
        match held.info.kind {
            FileType::RegularFile => held.open().map_err(refuse),
            FileType::Symlink => Err(refuse(Errno::LOOP)),
            _ => Err(refuse(Errno::NXIO)),
        }
    }

    /// Opens a regular file at once, where opening anything else does no harm: see
    /// `mount_attr::without_devices`. `None` if it is another thing by now.
    pub(crate) fn open_at_once(&self, name: &OsStr) -> Option<(OwnedFd, Info)> {
        let flags = OFlags::RDONLY | OFlags::NOCTTY | OFlags::NONBLOCK;
        let file = self.open_inside(name, flags, "open file").ok()?;
        let info = stat_fd(&file).ok()?;
        (info.kind == FileType::RegularFile).then_some((file, info))
    }

    /// Whatever has this name, held without being opened.
    pub fn hold(&self, name: &OsStr) -> Result<Held> {
        let handle = self.open_path(name)?;
        let info = stat_fd(&handle).at("stat", self.path.join(name))?;
        Ok(Held { handle, info })
    }

    /// A descriptor that only names the object (O_PATH), whatever it is; opens nothing.
    pub fn open_path(&self, name: &OsStr) -> Result<OwnedFd> {
        self.open_inside(name, OFlags::PATH, "reach")
    }

    /// For calls that are made a million times: the path is put together only if it is told.
    pub(crate) fn error(&self, op: &'static str, name: &OsStr, source: Errno) -> Error {
        Error::Call { op, path: self.path.join(name), source }
    }

    fn open_inside(&self, name: &OsStr, flags: OFlags, op: &'static str) -> Result<OwnedFd> {
        one_component(name, &self.path)?;
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        loop {
            match rustix::fs::openat2(&self.fd, name, flags, Mode::empty(), INSIDE) {
                // A rename or mount elsewhere raced with the BENEATH check: asked to try again.
                Err(Errno::AGAIN | Errno::INTR) => {}
                answer => return answer.map_err(|source| self.error(op, name, source)),
            }
        }
    }

    /// What statx says of a name in this directory.
    pub fn stat(&self, name: &OsStr) -> Result<Info> {
        one_component(name, &self.path)?;
        stat_at(self.fd.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|source| self.error("stat", name, source))
    }

    /// What statx says of this directory.
    pub fn own_stat(&self) -> Result<Info> {
        stat_at(self.fd.as_fd(), OsStr::new(""), AtFlags::EMPTY_PATH).at("stat", &self.path)
    }

    /// Where a symlink in this directory points, as it stands there.
    pub fn read_link(&self, name: &OsStr) -> Result<OsString> {
        one_component(name, &self.path)?;
        rustix::fs::readlinkat(&self.fd, name, Vec::new())
            .map(|target| OsString::from_vec(target.into_bytes()))
            .at("read symlink", self.path.join(name))
    }

    /// All extended attributes of a name in this directory, sorted by name. Works for symlinks,
    /// fifos, sockets and devices too, and opens none of them.
    pub fn xattrs(&self, name: &OsStr) -> Result<Vec<(OsString, Vec<u8>)>> {
        self.hold(name)?.xattrs(usize::MAX).at("read xattrs of", self.path.join(name))
    }

    /// All extended attributes of this directory, sorted by name.
    pub fn own_xattrs(&self) -> Result<Vec<(OsString, Vec<u8>)>> {
        xattrs(&self.fd).at("read xattrs of", &self.path)
    }
}

impl AsFd for Dir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The entries of a directory, one at a time.
pub struct Entries<'d> {
    dir: &'d Dir,
    stream: rustix::fs::Dir,
}

impl Iterator for Entries<'_> {
    type Item = Result<Entry>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let entry = match self.stream.read()? {
                Ok(entry) => entry,
                Err(source) => {
                    return Some(Err(source).at("list", &self.dir.path));
                }
            };
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                return Some(Ok(Entry {
                    name: OsStr::from_bytes(name).to_owned(),
                    kind: entry.file_type(),
                    ino: entry.ino(),
                }));
            }
        }
    }
}

/// One extended attribute of what `fd` is open on (O_PATH too), `None` if it has none such.
pub fn xattr(fd: impl AsFd, name: &OsStr) -> rustix::io::Result<Option<Vec<u8>>> {
    // By the /proc path: f*xattr refuses O_PATH descriptors, and without one neither symlinks nor
    // devices can be asked.
    let path = proc_path(fd);
    grow(|buffer| rustix::fs::getxattr(&path, name, buffer)).map(Some).or_else(|e| match e {
        Errno::NODATA | Errno::OPNOTSUPP => Ok(None),
        e => Err(e),
    })
}

/// All extended attributes of what `fd` is open on (O_PATH too), sorted by name.
pub fn xattrs(fd: impl AsFd) -> rustix::io::Result<Vec<(OsString, Vec<u8>)>> {
    let path = proc_path(&fd);
    named(&fd, grow(|buffer| rustix::fs::listxattr(&path, buffer)), usize::MAX)
}

/// The same of what is open for reading, which spares the kernel a path, if they have no more bytes than
/// `most`; else [`Errno::TOOBIG`].
pub fn xattrs_of_open(fd: impl AsFd, most: usize) -> rustix::io::Result<Vec<(OsString, Vec<u8>)>> {
    named(&fd, grow(|buffer| rustix::fs::flistxattr(&fd, buffer)), most)
}

fn named(
    fd: impl AsFd,
    names: rustix::io::Result<Vec<u8>>,
    most: usize,
) -> rustix::io::Result<Vec<(OsString, Vec<u8>)>> {
    let names = match names {
        Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
        answer => answer?,
    };
    let (mut all, mut bytes) = (Vec::new(), 0);
    for name in names.split(|b| *b == 0).filter(|name| !name.is_empty()) {
        let name = OsStr::from_bytes(name);
        if let Some(value) = xattr(&fd, name)? {
            bytes += name.len() + value.len();
            if bytes > most {
                return Err(Errno::TOOBIG);
            }
            all.push((name.to_owned(), value));
        }
    }
    all.sort();
    Ok(all)
}

/// Calls with growing buffers until the answer fits; the kernel's limit is 64 KiB.
fn grow(call: impl Fn(&mut [u8]) -> rustix::io::Result<usize>) -> rustix::io::Result<Vec<u8>> {
    let mut buffer = vec![0; 512];
    loop {
        match call(&mut buffer) {
            Err(Errno::RANGE) if buffer.len() < 65536 => buffer.resize(buffer.len() * 4, 0),
            Err(e) => return Err(e),
            Ok(len) => {
                buffer.truncate(len);
                return Ok(buffer);
            }
        }
    }
}

/// What statx says of a path the caller trusts, symlinks not followed at its end.
pub fn stat_path(path: &Path) -> Result<Info> {
    stat_at(CWD, path.as_os_str(), AtFlags::SYMLINK_NOFOLLOW).at("stat", path)
}

/// What statx says of what a descriptor is open on.
pub fn stat_fd(fd: impl AsFd) -> rustix::io::Result<Info> {
    stat_at(fd.as_fd(), OsStr::new(""), AtFlags::EMPTY_PATH)
}

fn stat_at(dir: BorrowedFd<'_>, name: &OsStr, flags: AtFlags) -> rustix::io::Result<Info> {
    let mask = StatxFlags::BASIC_STATS | StatxFlags::MNT_ID;
    let x = rustix::fs::statx(dir, name, flags | AtFlags::NO_AUTOMOUNT, mask)?;
    let mode = u32::from(x.stx_mode);
    Ok(Info {
        kind: FileType::from_raw_mode(mode),
        mode: mode & 0o7777,
        uid: x.stx_uid,
        gid: x.stx_gid,
        size: x.stx_size,
        blocks: x.stx_blocks,
        nlink: x.stx_nlink,
        dev: rustix::fs::makedev(x.stx_dev_major, x.stx_dev_minor),
        ino: x.stx_ino,
        rdev: rustix::fs::makedev(x.stx_rdev_major, x.stx_rdev_minor),
        mtime_s: x.stx_mtime.tv_sec,
        mtime_ns: x.stx_mtime.tv_nsec,
        ctime_s: x.stx_ctime.tv_sec,
        ctime_ns: x.stx_ctime.tv_nsec,
        mount_id: x.stx_mnt_id,
    })
}

fn one_component(name: &OsStr, dir: &Path) -> Result<()> {
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes == b"." || bytes == b".." || bytes.contains(&b'/') {
        return Err(Error::Call {
            op: "take as one name in a directory",
            path: dir.join(name),
            source: Errno::INVAL,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Dir) -> Vec<OsString> {
        dir.sorted().unwrap().into_iter().map(|e| e.name).collect()
    }

    #[test]
    fn odd_names_are_listed_in_byte_order() {
        let tmp = tempfile::tempdir().unwrap();
        for name in [&b"b"[..], b"a\nb", b"\xff\xfe", b" ", b"a"] {
            std::fs::write(tmp.path().join(OsStr::from_bytes(name)), b"x").unwrap();
        }
        let dir = Dir::open(tmp.path()).unwrap();
        let want: Vec<_> = [&b" "[..], b"a", b"a\nb", b"b", b"\xff\xfe"]
            .into_iter()
            .map(|n| OsStr::from_bytes(n).to_owned())
            .collect();
        assert_eq!(names(&dir), want);
        assert_eq!(names(&dir), want, "a second listing starts anew");
    }

    #[test]
    fn a_symlink_is_seen_but_never_followed() {
        let tmp = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/etc", tmp.path().join("d")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", tmp.path().join("f")).unwrap();
        let dir = Dir::open(tmp.path()).unwrap();
        assert!(dir.child(OsStr::new("d")).is_err());
        assert_eq!(dir.open_file(OsStr::new("f")).unwrap_err().errno(), Some(Errno::LOOP));
        assert_eq!(dir.stat(OsStr::new("f")).unwrap().kind, FileType::Symlink);
        assert_eq!(dir.read_link(OsStr::new("f")).unwrap(), "/etc/passwd");
        assert_eq!(dir.xattrs(OsStr::new("f")).unwrap(), vec![]);
        assert!(Dir::open(&tmp.path().join("d")).is_err());
    }

    #[test]
    fn names_that_climb_are_refused() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = Dir::open(tmp.path()).unwrap();
        for bad in ["", ".", "..", "a/b", "/etc"] {
            assert!(dir.child(OsStr::new(bad)).is_err(), "{bad:?} was opened");
            assert!(dir.stat(OsStr::new(bad)).is_err(), "{bad:?} was statted");
        }
    }

    #[test]
    fn a_fifo_is_refused_without_being_opened() {
        let tmp = tempfile::tempdir().unwrap();
        let mode = Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(CWD, tmp.path().join("p"), FileType::Fifo, mode, 0).unwrap();
        let dir = Dir::open(tmp.path()).unwrap();
        assert_eq!(dir.open_file(OsStr::new("p")).unwrap_err().errno(), Some(Errno::NXIO));
        assert_eq!(dir.xattrs(OsStr::new("p")).unwrap(), vec![]);
    }

    #[test]
    fn file_bytes_and_user_xattrs_are_read() {
        use std::io::Read as _;
        let tmp = tempfile::tempdir().unwrap();
        let file = tmp.path().join("f");
        std::fs::write(&file, b"bytes").unwrap();
        let big = vec![7; 3000];
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(&file, "user.big", &big, flags).unwrap();
        rustix::fs::setxattr(&file, "user.a", b"", flags).unwrap();
        let dir = Dir::open(tmp.path()).unwrap();
        let mut text = String::new();
        std::fs::File::from(dir.open_file(OsStr::new("f")).unwrap())
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(text, "bytes");
        let all = dir.xattrs(OsStr::new("f")).unwrap();
        assert_eq!(all, vec![("user.a".into(), vec![]), ("user.big".into(), big)]);
        assert_eq!(dir.stat(OsStr::new("f")).unwrap().size, 5);
    }
}
