//! Operations of all kinds on a tree, drawn by lot, and what the tree shows afterwards.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use rustix::fs::{CWD, FallocateFlags, IFlags, Mode, OFlags};

/// A small generator of our own: the seed in a message is all that is needed to see it again.
pub struct Random(pub u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }

    /// Few names, so that operations meet.
    fn path(&mut self) -> PathBuf {
        const NAMES: [&str; 5] = ["a", "b", "c", ".wh.x", "n\n\u{e4}"];
        (0..=self.below(3)).map(|_| NAMES[self.below(5) as usize]).collect()
    }
}

/// One operation, to be done to any tree.
#[derive(Clone, Debug)]
pub enum Act {
    Dir(PathBuf),
    Write(PathBuf, u64),
    Append(PathBuf),
    Hole(PathBuf, u64),
    Remove(PathBuf),
    RemoveAll(PathBuf),
    Rename(PathBuf, PathBuf),
    Link(PathBuf, PathBuf),
    Symlink(PathBuf, u64),
    Fifo(PathBuf),
    Mode(PathBuf, u32),
    Owner(PathBuf, u32),
    Attribute(PathBuf, u64),
    Time(PathBuf, u64),
    /// Two files change places.
    Exchange(PathBuf, PathBuf),
    /// Room, to so many bytes and past the end.
    Room(PathBuf, u64),
    /// A hole where the file was.
    Punch(PathBuf, u64),
    /// A file without a name, which is then given one.
    Nameless(PathBuf, u64),
    Bare(PathBuf),
    /// An access control list that lets one more user read, or not.
    List(PathBuf, u8),
    /// A flag of the file's: no time of its last access is kept.
    Flag(PathBuf),
    /// A byte, by a shared mapping.
    Map(PathBuf, u8),
    Device(PathBuf, u32),
    Capability(PathBuf),
    RenameDir(PathBuf, PathBuf),
}

pub fn act(random: &mut Random) -> Act {
    let path = random.path();
    match random.below(30) {
        0..=2 => Act::Dir(path),
        3..=6 => Act::Write(path, random.below(20_000)),
        7 => Act::Append(path),
        8 => Act::Hole(path, random.below(1 << 30)),
        9 => Act::Remove(path),
        10..=11 => Act::RemoveAll(path),
        12..=13 => Act::Rename(path, random.path()),
        14 => Act::Link(path, random.path()),
        15 => Act::Symlink(path, random.below(3)),
        16 => Act::Fifo(path),
        17 => Act::Mode(path, 0o600 + random.below(64) as u32),
        18 => Act::Owner(path, random.below(4) as u32),
        20 => Act::Exchange(path, random.path()),
        21 if random.below(2) == 0 => Act::Room(path, 1 + random.below(30_000)),
        21 => Act::Punch(path, 1 + random.below(10_000)),
        22 => Act::Nameless(path, random.below(20_000)),
        23 => Act::Bare(path),
        24 => Act::List(path, random.below(8) as u8),
        25 => Act::Flag(path),
        26 => Act::Map(path, random.below(256) as u8),
        27 => Act::Device(path, 1 + random.below(9) as u32),
        28 => Act::Capability(path),
        29 => Act::RenameDir(path, random.path()),
        _ if random.below(2) == 0 => Act::Attribute(path, random.below(3)),
        _ => Act::Time(path, random.below(1 << 31)),
    }
}

/// Why something was not done: what the kernel answered, or nothing where it was not asked.
pub type Undone = Option<i32>;

fn errno(e: std::io::Error) -> Undone {
    e.raw_os_error()
}

fn no(e: rustix::io::Errno) -> Undone {
    Some(e.raw_os_error())
}

/// Does it; what would mean something else in another tree is left out.
pub fn done(top: &Path, act: &Act) -> Result<(), Undone> {
    let at = |path: &PathBuf| top.join(path);
    let is = |path: &PathBuf, fits: fn(&std::fs::Metadata) -> bool| {
        at(path).symlink_metadata().is_ok_and(|meta| fits(&meta)).then_some(()).ok_or(None)
    };
    let file = |path: &PathBuf| is(path, std::fs::Metadata::is_file);
    let no_dir =
        |path: &PathBuf| is(path, std::fs::Metadata::is_dir).map_or(Ok(()), |()| Err(None));
    // No operation goes through a symlink, which would mean something else in each tree.
    let real = |path: &PathBuf| {
        path.parent().is_none_or(|above| above.ancestors().all(|part| !top.join(part).is_symlink()))
    };
    if !paths(act).into_iter().all(real) {
        return Err(None);
    }
    match act {
        Act::Dir(p) => std::fs::create_dir(at(p)).map_err(errno),
        Act::Write(p, n) => {
            is(p, |m| !m.is_file() && !m.is_dir()).map_or(Ok(()), |()| Err(None))?;
            std::fs::write(at(p), vec![b'x'; *n as usize]).map_err(errno)
        }
        Act::Append(p) => {
            file(p)?;
            let mut file = File::options().append(true).open(at(p)).map_err(errno)?;
            std::io::Write::write_all(&mut file, b"more").map_err(errno)
        }
        Act::Hole(p, n) => {
            file(p).or_else(|_| at(p).symlink_metadata().map_or(Ok(()), |_| Err(None)))?;
            let mut options = File::options();
            let file = options.create(true).truncate(false).write(true).open(at(p));
            let file = file.map_err(errno)?;
            file.set_len(*n + 9).map_err(errno)?;
            file.write_all_at(b"somewhere", *n).map_err(errno)
        }
        Act::Remove(p) => std::fs::remove_file(at(p)).map_err(errno),
        Act::RemoveAll(p) => {
            is(p, std::fs::Metadata::is_dir)?;
            std::fs::remove_dir_all(at(p)).map_err(errno)
        }
        // A directory of a lower layer is not renamed (redirect_dir=off): EXDEV. It is left out.
        Act::Rename(a, b) => {
            no_dir(a)?;
            no_dir(b)?;
            std::fs::rename(at(a), at(b)).map_err(errno)
        }
        Act::Exchange(a, b) => {
            no_dir(a)?;
            no_dir(b)?;
            let flags = rustix::fs::RenameFlags::EXCHANGE;
            rustix::fs::renameat_with(CWD, at(a), CWD, at(b), flags).map_err(no)
        }
        Act::Link(a, b) => {
            file(a)?;
            std::fs::hard_link(at(a), at(b)).map_err(errno)
        }
        Act::Symlink(p, n) => std::os::unix::fs::symlink(format!("to-{n}"), at(p)).map_err(errno),
        Act::Fifo(p) => {
            nix::unistd::mkfifo(&at(p), nix::sys::stat::Mode::S_IRWXU).map_err(|e| Some(e as i32))
        }
        Act::Mode(p, mode) => {
            is(p, |m| !m.is_symlink())?;
            std::fs::set_permissions(at(p), std::fs::Permissions::from_mode(*mode)).map_err(errno)
        }
        Act::Owner(p, id) => {
            std::os::unix::fs::lchown(at(p), Some(*id), Some(id + 1)).map_err(errno)
        }
        Act::Attribute(p, n) => {
            is(p, |m| m.is_file() || m.is_dir())?;
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::lsetxattr(at(p), "user.of", n.to_string().as_bytes(), flags).map_err(no)
        }
        Act::Bare(p) => {
            is(p, |m| m.is_file() || m.is_dir())?;
            rustix::fs::lremovexattr(at(p), "user.of").map_err(no)
        }
        Act::Time(p, s) => {
            file(p)?;
            let time = UNIX_EPOCH + Duration::new(*s, 123_456_789);
            File::open(at(p)).and_then(|f| f.set_modified(time)).map_err(errno)
        }
        Act::Room(p, n) => {
            file(p)?;
            let file = File::options().write(true).open(at(p)).map_err(errno)?;
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, *n).map_err(no)
        }
        Act::Punch(p, n) => {
            file(p)?;
            let file = File::options().write(true).open(at(p)).map_err(errno)?;
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&file, flags, 0, *n).map_err(no)
        }
        Act::Nameless(p, n) => nameless(&at(p), *n),
        Act::List(p, permissions) => {
            is(p, |m| m.is_file() || m.is_dir())?;
            let list = list(*permissions);
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::lsetxattr(at(p), LIST, &list, flags).map_err(no)
        }
        Act::Flag(p) => {
            file(p)?;
            let file = File::open(at(p)).map_err(errno)?;
            let flags = rustix::fs::ioctl_getflags(&file).map_err(no)?;
            rustix::fs::ioctl_setflags(&file, flags ^ IFlags::NOATIME).map_err(no)
        }
        Act::Map(p, byte) => {
            file(p)?;
            map(&at(p), *byte)
        }
        Act::Device(p, minor) => {
            use nix::sys::stat::{Mode, SFlag, makedev, mknod};
            // Of the numbers that no driver has.
            let device = makedev(240, u64::from(*minor));
            mknod(&at(p), SFlag::S_IFCHR, Mode::S_IRUSR, device).map_err(|e| Some(e as i32))
        }
        Act::Capability(p) => {
            file(p)?;
            // Revision 2, effective: cap_net_raw permitted.
            let mut value = [0; 20];
            (value[0], value[3], value[5]) = (1, 2, 0x20);
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::lsetxattr(at(p), CAPABILITY, &value, flags).map_err(no)
        }
        Act::RenameDir(a, b) => {
            is(a, std::fs::Metadata::is_dir)?;
            if a == b {
                return Err(None);
            }
            std::fs::rename(at(a), at(b)).map_err(errno)
        }
    }
}

const CAPABILITY: &str = "security.capability";
const LIST: &str = "system.posix_acl_access";

/// The names that an operation is about.
pub fn paths(act: &Act) -> Vec<&PathBuf> {
    match act {
        Act::Rename(a, b) | Act::RenameDir(a, b) | Act::Link(a, b) | Act::Exchange(a, b) => {
            vec![a, b]
        }
        Act::Dir(a)
        | Act::Write(a, _)
        | Act::Append(a)
        | Act::Hole(a, _)
        | Act::Remove(a)
        | Act::RemoveAll(a)
        | Act::Symlink(a, _)
        | Act::Fifo(a)
        | Act::Mode(a, _)
        | Act::Owner(a, _)
        | Act::Attribute(a, _)
        | Act::Time(a, _)
        | Act::Room(a, _)
        | Act::Punch(a, _)
        | Act::Nameless(a, _)
        | Act::Bare(a)
        | Act::List(a, _)
        | Act::Flag(a)
        | Act::Map(a, _)
        | Act::Device(a, _)
        | Act::Capability(a) => vec![a],
    }
}

/// By O_TMPFILE where the overlay has it (not on 6.1), otherwise as any other file.
fn nameless(path: &Path, n: u64) -> Result<(), Undone> {
    let above = path.parent().ok_or(None)?;
    let (flags, mode) = (OFlags::WRONLY | OFlags::TMPFILE, Mode::from_raw_mode(0o640));
    let bytes = vec![b'n'; n as usize];
    match rustix::fs::open(above, flags, mode) {
        Ok(made) => {
            let made = File::from(made);
            made.write_all_at(&bytes, 0).map_err(errno)?;
            let from = format!("/proc/self/fd/{}", made.as_raw_fd());
            let through = rustix::fs::AtFlags::SYMLINK_FOLLOW;
            rustix::fs::linkat(CWD, from, CWD, path, through).map_err(no)
        }
        Err(rustix::io::Errno::OPNOTSUPP) => {
            let mut options = File::options();
            options.write(true).create_new(true).mode(0o640);
            let made = options.open(path).map_err(errno)?;
            made.write_all_at(&bytes, 0).map_err(errno)
        }
        Err(e) => Err(no(e)),
    }
}

/// Owner rw, uid 1 as told, group r, mask rwx, others nothing.
fn list(permissions: u8) -> Vec<u8> {
    let mut list = vec![2, 0, 0, 0];
    let none = u32::MAX;
    for (tag, may, id) in
        [(1u16, 6u16, none), (2, permissions.into(), 1), (4, 4, none), (16, 7, none), (32, 0, none)]
    {
        list.extend(tag.to_le_bytes());
        list.extend(may.to_le_bytes());
        list.extend(id.to_le_bytes());
    }
    list
}

/// Stores a byte at the file's beginning through a shared mapping.
fn map(path: &Path, byte: u8) -> Result<(), Undone> {
    use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};
    let file = File::options().read(true).write(true).open(path).map_err(errno)?;
    // A store behind its end would end us.
    if file.metadata().map_err(errno)?.len() == 0 {
        return Err(None);
    }
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping of a page that the file has; nobody else writes to the file meanwhile.
    unsafe {
        let at = rustix::mm::mmap(std::ptr::null_mut(), 1, prot, MapFlags::SHARED, &file, 0);
        let at = at.map_err(no)?;
        at.cast::<u8>().write_volatile(byte);
        let synced = rustix::mm::msync(at, 1, MsyncFlags::SYNC);
        rustix::mm::munmap(at, 1).map_err(no)?;
        synced.map_err(no)
    }
}

/// What a tree shows: every name with all that a user of it can see, but for what the kernel alone
/// decides. Times of what no operation set are the clock's.
pub fn shows(top: &Path) -> Vec<String> {
    let (mut all, mut todo) = (Vec::new(), vec![PathBuf::new()]);
    while let Some(dir) = todo.pop() {
        for entry in std::fs::read_dir(top.join(&dir)).unwrap() {
            let path = dir.join(entry.unwrap().file_name());
            let full = top.join(&path);
            let meta = full.symlink_metadata().unwrap();
            let set = meta.mtime_nsec() == 123_456_789;
            let time = if meta.is_file() && set { meta.mtime() } else { 0 };
            let content = if meta.is_dir() {
                todo.push(path.clone());
                String::new()
            } else if meta.is_file() {
                // One byte in a gigabyte: its end tells it.
                let file = File::open(&full).unwrap();
                let mut end = [0; 16];
                let tail = meta.len().min(16);
                file.read_exact_at(&mut end[..tail as usize], meta.len() - tail).unwrap();
                let small = (meta.len() < 1 << 16).then(|| std::fs::read(&full).unwrap());
                format!(
                    "{} {end:?} {}",
                    meta.len(),
                    small.map_or(0, |b| b.iter().map(|b| u64::from(*b)).sum())
                )
            } else if meta.is_symlink() {
                std::fs::read_link(&full).unwrap().display().to_string()
            } else {
                String::new()
            };
            let attributes = ["user.of", CAPABILITY, LIST].map(|name| {
                let mut value = [0; 64];
                let length = rustix::fs::lgetxattr(&full, name, &mut value).unwrap_or(0);
                hex::encode(&value[..length])
            });
            let links = if meta.is_file() { meta.nlink() } else { 1 };
            all.push(format!(
                "{path:?} {:o} {}:{} {} {links} {time} {attributes:?} {content}",
                meta.mode(),
                meta.uid(),
                meta.gid(),
                meta.rdev(),
            ));
        }
    }
    all.sort();
    all
}
