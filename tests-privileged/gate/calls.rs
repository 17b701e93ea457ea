//! What the ways to change a file are made of: files to be there before, and calls that rustix has not.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::IFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::stamps::stamp;
use super::ways::Call;

pub fn file(dir: &Path) -> File {
    let path = dir.join("file");
    std::fs::write(&path, [b'o'; 8192]).unwrap();
    File::options().read(true).write(true).open(path).unwrap()
}

pub fn done<T>(answer: Result<T, Errno>) -> io::Result<()> {
    answer.map(drop).map_err(Into::into)
}

/// A name that no call before used.
pub fn fresh(dir: &Path) -> impl FnMut() -> PathBuf + use<> {
    let dir = dir.to_owned();
    let mut n = 0;
    move || {
        n += 1;
        dir.join(format!("new-{n}"))
    }
}

pub fn each_new(dir: &Path, call: fn(&Path, &Path) -> io::Result<()>) -> Call {
    let (mut next, dir) = (fresh(dir), dir.to_owned());
    Box::new(move || call(&next(), &dir))
}

/// A call on what is there each time: some are made ahead, while that may be done.
pub fn each_old(
    dir: &Path,
    make: fn(&Path) -> io::Result<()>,
    call: fn(&Path) -> io::Result<()>,
) -> Call {
    const AHEAD: usize = 8;
    let dir = dir.to_owned();
    let at = move |n: usize| dir.join(format!("old-{n}"));
    (0..AHEAD).for_each(|n| make(&at(n)).unwrap());
    let mut n = 0;
    Box::new(move || {
        match call(&at(n)) {
            // The deadline had passed when it, or a part of it, was to be made.
            Err(e) if e.raw_os_error() != Some(libc::EROFS) => {
                make(&at(n))?;
                stamp();
                call(&at(n))?;
            }
            answer => answer?,
        }
        n += 1;
        let _ = make(&at(n + AHEAD - 1));
        Ok(())
    })
}

pub fn memory() -> File {
    let memory = rustix::fs::memfd_create("bytes", rustix::fs::MemfdFlags::empty()).unwrap();
    let memory = File::from(memory);
    memory.write_all_at(b"new bytes", 0).unwrap();
    memory
}

/// As direct I/O wants it.
#[repr(align(4096))]
pub struct Page(pub [u8; 4096]);

pub fn open(path: &Path, flags: i32) -> io::Result<()> {
    OpenOptions::new().write(true).custom_flags(flags).open(path).map(drop)
}

/// An access control list: owner rwx, uid 1 rwx, group, mask, others.
pub const ACL: [u8; 44] = {
    let mut list = [0; 44];
    let entries: [(u8, u8, u32); 5] =
        [(1, 7, u32::MAX), (2, 7, 1), (4, 5, u32::MAX), (16, 7, u32::MAX), (32, 5, u32::MAX)];
    list[0] = 2;
    let mut i = 0;
    while i < 5 {
        let (tag, permissions, id) = entries[i];
        list[4 + i * 8] = tag;
        list[6 + i * 8] = permissions;
        let id = id.to_le_bytes();
        let mut j = 0;
        while j < 4 {
            list[8 + i * 8 + j] = id[j];
            j += 1;
        }
        i += 1;
    }
    list
};
pub const ACL_NAME: &str = "system.posix_acl_access";

pub fn map(fd: &File, prot: ProtFlags) -> io::Result<()> {
    // SAFETY: a fresh mapping at an address of the kernel's choice, which nobody touches.
    unsafe {
        let start = rustix::mm::mmap(std::ptr::null_mut(), 4096, prot, MapFlags::SHARED, fd, 0)?;
        rustix::mm::munmap(start, 4096)?;
    }
    Ok(())
}

/// `struct file_attr`, by file_setattr(2) of 6.17.
pub fn file_setattr(path: &Path) -> io::Result<()> {
    const FILE_GETATTR: libc::c_long = 468;
    const FILE_SETATTR: libc::c_long = 469;
    const NOATIME: u64 = 0x40;
    let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes())?;
    let mut attributes = [0u64; 3];
    for number in [FILE_GETATTR, FILE_SETATTR] {
        stamp();
        // SAFETY: a string that ends with NUL and 24 bytes, both alive during the call.
        let answer = unsafe {
            let (path, to) = (path.as_ptr(), attributes.as_mut_ptr());
            libc::syscall(number, libc::AT_FDCWD, path, to, 24, 0)
        };
        if answer < 0 {
            return Err(io::Error::last_os_error());
        }
        attributes[0] ^= NOATIME;
    }
    Ok(())
}

/// `struct file_dedupe_range` with one destination: the answer stands in it.
pub fn dedupe(from: &File, to: &File) -> io::Result<()> {
    const FIDEDUPERANGE: libc::c_ulong = 0xc018_9436;
    let to = u64::try_from(to.as_raw_fd()).unwrap();
    let mut range: [u64; 7] = [0, 4096, 1, to, 0, 0, 0];
    // SAFETY: the structure is as long as one destination needs, and lives during the call.
    let answer = unsafe { libc::ioctl(from.as_raw_fd(), FIDEDUPERANGE, range.as_mut_ptr()) };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    match range[6] as u32 as i32 {
        status if status < 0 => Err(io::Error::from_raw_os_error(-status)),
        _ => Ok(()),
    }
}

/// `struct fsxattr`, read and written back with another flag.
pub fn fssetxattr(file: &File) -> io::Result<()> {
    const GET: libc::c_ulong = 0x801c_581f;
    const SET: libc::c_ulong = 0x401c_5820;
    const NOATIME: u32 = 0x40;
    let mut attributes = [0u32; 7];
    for request in [GET, SET] {
        stamp();
        // SAFETY: 28 bytes, alive during the call.
        let answer = unsafe { libc::ioctl(file.as_raw_fd(), request, attributes.as_mut_ptr()) };
        if answer < 0 {
            return Err(io::Error::last_os_error());
        }
        attributes[0] ^= NOATIME;
    }
    Ok(())
}

/// File flags by the entry of 32-bit programs, which has a hook of its own.
#[cfg(target_arch = "x86_64")]
pub fn compat_flags(file: &File, flags: IFlags) -> io::Result<()> {
    const IOCTL: i64 = 54;
    const FS_IOC32_SETFLAGS: i64 = 0x4004_6602;
    if !Path::new("/proc/sys/abi/vsyscall32").exists() {
        // It would be killed.
        return Err(Errno::NOSYS.into());
    }
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT;
    // SAFETY: a fresh mapping below 4 GiB, unmapped below and touched by nobody else.
    let at = unsafe {
        libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ | libc::PROT_WRITE, kind, -1, 0)
    };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the page is ours and writable.
    unsafe { at.cast::<u32>().write(flags.bits()) };
    stamp();
    let answer: i64;
    // SAFETY: ioctl(file, FS_IOC32_SETFLAGS, page), as 32-bit programs make it; the kernel reads four
    // bytes of the page. RBX, which the compiler keeps for itself, has its value again afterwards.
    unsafe {
        std::arch::asm!(
            "xchg rbx, {file}",
            "int 0x80",
            "xchg rbx, {file}",
            file = inout(reg) i64::from(file.as_raw_fd()) => _,
            inlateout("rax") IOCTL => answer,
            in("rcx") FS_IOC32_SETFLAGS,
            in("rdx") at,
            lateout("r8") _,
            lateout("r9") _,
            lateout("r10") _,
            lateout("r11") _,
            options(nostack),
        );
        libc::munmap(at, 4096);
    }
    // Its answer has 32 bits.
    match answer as i32 {
        errno if errno < 0 => Err(io::Error::from_raw_os_error(-errno)),
        _ => Ok(()),
    }
}
