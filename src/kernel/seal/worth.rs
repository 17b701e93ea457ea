//! What the flag is worth on a file system: asked of a file without a name, whose end leaves
//! nothing behind.
#![allow(unsafe_code)]

use std::fmt;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;

use rustix::fs::{IFlags, Mode, OFlags};
use rustix::io::Errno;

use super::super::{At as _, Result, fs_magic};

/// What the kernel answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Worth {
    magic: u64,
    /// A write by a descriptor that was open for writing before the flag.
    descriptor: Option<Errno>,
    /// A store into a writable shared mapping that was made, and used, before the flag.
    mapping: Option<Errno>,
}

impl fmt::Display for Worth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |answer: Option<Errno>| match answer {
            Some(Errno::PERM) => "is refused (EPERM)".to_owned(),
            Some(Errno::FAULT) => "faults (SIGBUS)".to_owned(),
            Some(other) => format!("is refused ({other})"),
            None => "GOES ON".to_owned(),
        };
        write!(
            f,
            "on {}, writing by a descriptor opened before {}, by a mapping made before {}",
            name(self.magic),
            word(self.descriptor),
            word(self.mapping)
        )
    }
}

fn name(magic: u64) -> String {
    match magic {
        0xef53 => "ext4".to_owned(),
        0x5846_5342 => "xfs".to_owned(),
        0x9123_683e => "btrfs".to_owned(),
        0x0102_1994 => "tmpfs".to_owned(),
        other => format!("a file system of type {other:#x}"),
    }
}

/// Asks in `dir`, which is on the file system in question.
pub(super) fn ask(dir: &Path) -> Result<Worth> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR)
        .at("make a file without a name in", dir)?;
    let page = Page::of(&file).at("map a file without a name in", dir)?;
    page.store().at("store into a mapping in", dir)?;
    let before = rustix::fs::ioctl_getflags(&file).at("read the flags of a file in", dir)?;
    rustix::fs::ioctl_setflags(&file, before | IFlags::IMMUTABLE)
        .at("set the immutable flag, which a seal needs, on a file in", dir)?;
    let descriptor = rustix::io::pwrite(&file, b"x", 0).err();
    let mapping = page.store().err();
    rustix::fs::ioctl_setflags(&file, before).at("clear the immutable flag of a file in", dir)?;
    let magic = fs_magic(&file).at("ask for the type of the file system of", dir)?;
    Ok(Worth { magic, descriptor, mapping })
}

/// One page of a file, mapped shared and writable.
struct Page(*mut libc::c_void);

const SIZE: usize = 4096;

impl Page {
    fn of(file: &OwnedFd) -> rustix::io::Result<Self> {
        rustix::fs::ftruncate(file, SIZE as u64)?;
        let prot = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        let flags = rustix::mm::MapFlags::SHARED;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours; no
        // reference into it is ever made.
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), SIZE, prot, flags, file, 0) }.map(Self)
    }

    /// A store by the kernel on our behalf, as it reads into the mapping: what would be a signal to
    /// us is an error to it.
    fn store(&self) -> rustix::io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let zero = rustix::fs::open(c"/dev/zero", flags, Mode::empty())?;
        // SAFETY: one byte of a mapping of ours, alive over the call, to which no reference exists.
        let done = unsafe { libc::read(zero.as_raw_fd(), self.0, 1) };
        match done {
            1 => Ok(()),
            _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone, of this length, and unmapped only here.
        let _ = unsafe { rustix::mm::munmap(self.0, SIZE) };
    }
}
