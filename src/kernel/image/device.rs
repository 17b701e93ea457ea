//! Loop devices and the two ioctls that stop a file system.
#![allow(unsafe_code)]

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use linux_raw_sys::loop_device::{
    _bindgen_ty_1 as Flag, LOOP_CLR_FD, LOOP_CONFIGURE, LOOP_CTL_GET_FREE, LOOP_GET_STATUS64,
    loop_config, loop_info64,
};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::super::walk;
use super::super::{At as _, Error, Result};
use crate::failpoint;

const CONTROL: &str = "/dev/loop-control";
/// Somebody else may take the free one first, as often as this.
const TRIES: usize = 64;
/// Of the device and of the file system in it: with blocks as large as any host disk's, direct I/O
/// is possible wherever the file system below can do it at all.
const BLOCK: u32 = 4096;

/// A loop device in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Its name, for instance `loop3`.
    pub name: String,
    /// Its file, as the kernel shows it; ` (deleted)` behind it once that is unlinked.
    pub file: PathBuf,
}

/// A device's path, and whatever keeps it until somebody else does.
pub(super) struct Device {
    path: PathBuf,
    _held: Option<OwnedFd>,
}

impl Device {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

/// The loop device that uses a file.
pub(super) struct User {
    pub(super) bound: Bound,
    /// It said so by the file's inode, and not only by its path.
    sure: bool,
}

impl User {
    /// Its device, for another mount of the same superblock.
    pub(super) fn device(self, file: &Path) -> Result<Device> {
        let name = self.bound.name;
        if self.sure {
            return Ok(Device { path: Path::new("/dev").join(name), _held: None });
        }
        let reason = format!("/dev/{name} cannot be asked, and may be bound to it");
        Err(Error::WrongMount { path: file.to_owned(), reason })
    }
}

fn ioctl<T>(fd: impl AsFd, request: u32, argument: *mut T) -> rustix::io::Result<i32> {
    // SAFETY: the descriptor is open for the call; callers pass a null pointer where the request
    // takes no argument, and else one to a structure of the request's own type that lives through
    // the call.
    let answer = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request.into(), argument) };
    match answer {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        answer => Ok(answer),
    }
}

fn without_argument(fd: impl AsFd, request: u32) -> rustix::io::Result<i32> {
    ioctl::<libc::c_void>(fd, request, std::ptr::null_mut())
}

/// Binds a file to a free loop device that lets go of it when its last user closes it.
pub(super) fn attach(file: &Path) -> Result<Device> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let backing =
        rustix::fs::open(file, flags | OFlags::NOFOLLOW, Mode::empty()).at("open", file)?;
    let control = rustix::fs::open(CONTROL, flags, Mode::empty()).at("open", CONTROL)?;
    failpoint::fails("kernel.image.attach.before").at("bind a loop device to", file)?;
    for _ in 0..TRIES {
        let number = without_argument(&control, LOOP_CTL_GET_FREE).at("find a free", CONTROL)?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = rustix::fs::open(&path, flags, Mode::empty()).at("open", &path)?;
        // SAFETY: these are integers and arrays of integers; all zero is what the kernel asks for
        // in what is not set.
        let mut config: loop_config = unsafe { std::mem::zeroed() };
        config.fd = backing.as_raw_fd().cast_unsigned();
        config.block_size = BLOCK;
        config.info.lo_flags = Flag::LO_FLAGS_AUTOCLEAR as u32 | Flag::LO_FLAGS_DIRECT_IO as u32;
        match ioctl(&device, LOOP_CONFIGURE, &raw mut config) {
            Err(Errno::BUSY) => {}
            answer => {
                answer.at("bind a loop device to", file)?;
                failpoint::hit("kernel.image.attach.after");
                return Ok(Device { path, _held: Some(device) });
            }
        }
    }
    let reason = format!("{TRIES} of them were taken by others at the moment they were free");
    Err(Error::Limit { what: "a loop device".to_owned(), reason })
}

/// All loop devices in use.
pub fn bound() -> Result<Vec<Bound>> {
    let place = "/sys/block";
    let mut found = Vec::new();
    for entry in std::fs::read_dir(place).at("list", place)? {
        let entry = entry.at("list", place)?;
        // Neither a disk nor a free loop device has it.
        let Ok(file) = std::fs::read(entry.path().join("loop/backing_file")) else { continue };
        let name = entry.file_name().to_string_lossy().into_owned();
        let file = OsStr::from_bytes(file.strip_suffix(b"\n").unwrap_or(&file)).into();
        found.push(Bound { name, file });
    }
    Ok(found)
}

/// The loop device that is bound to this file: by its inode, or where the device cannot be asked, by
/// its path.
pub(super) fn backed_by(file: &Path) -> Result<Option<User>> {
    let info = match walk::stat_path(file) {
        Err(e) if e.errno() == Some(Errno::NOENT) => return Ok(None),
        answer => answer?,
    };
    let real = std::fs::canonicalize(file).at("resolve", file)?;
    for bound in bound()? {
        match status(&bound.name) {
            Some(s) if (s.lo_device, s.lo_inode) == (info.dev, info.ino) => {
                return Ok(Some(User { bound, sure: true }));
            }
            None if bound.file == real => return Ok(Some(User { bound, sure: false })),
            Some(_) | None => {}
        }
    }
    Ok(None)
}

/// What a loop device says of itself; `None` once it is free.
fn status(name: &str) -> Option<loop_info64> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let device = rustix::fs::open(Path::new("/dev").join(name), flags, Mode::empty()).ok()?;
    // SAFETY: integers and arrays of integers, which any bytes are.
    let mut status: loop_info64 = unsafe { std::mem::zeroed() };
    ioctl(&device, LOOP_GET_STATUS64, &raw mut status).ok()?;
    Some(status)
}

/// Has a loop device let go of its file, at once or when its last user closes it.
pub fn detach(name: &str) -> Result<()> {
    let path = Path::new("/dev").join(name);
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let device = rustix::fs::open(&path, flags, Mode::empty()).at("open", &path)?;
    failpoint::fails("kernel.image.detach.before").at("detach", &path)?;
    match without_argument(&device, LOOP_CLR_FD) {
        // It did so by itself.
        Err(Errno::NXIO) => {}
        answer => drop(answer.at("detach", &path)?),
    }
    failpoint::hit("kernel.image.detach.after");
    Ok(())
}

/// `_IOWR('X', 119, int)` and the next, of linux/fs.h.
const FIFREEZE: u32 = 0xc004_5877;
const FITHAW: u32 = 0xc004_5878;

pub(super) fn fifreeze(dir: impl AsFd) -> rustix::io::Result<()> {
    without_argument(dir, FIFREEZE).map(drop)
}

pub(super) fn fithaw(dir: impl AsFd) -> rustix::io::Result<()> {
    without_argument(dir, FITHAW).map(drop)
}
