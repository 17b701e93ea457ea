//! Each way to change a file, one row each: before the deadline it goes through, after it the answer
//! is EROFS and nothing is different. What was opened before the deadline stays open.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Gid, IFlags, Mode, OFlags, RenameFlags, Timestamps,
    Uid, XattrFlags,
};
use rustix::io::{Errno, ReadWriteFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::Scene;

/// A call that is made again and again.
pub type Call = Box<dyn FnMut() -> io::Result<()>>;

/// One way: what is there before it (in a directory of its own), and the call.
#[derive(Clone, Copy)]
pub struct Way {
    name: &'static str,
    make: fn(&Path) -> Call,
    /// What the file system of the tests answers where it cannot do it; the gate answers before that.
    cannot: &'static [Errno],
}

impl Way {
    /// The call, in a new directory, for who makes it for as long as he likes: a plain write where the
    /// file system or the kernel cannot do it.
    pub fn begin(&self, dir: &Path) -> Call {
        std::fs::create_dir(dir).unwrap();
        let mut call = (self.make)(dir);
        match call().map_err(|e| Errno::from_io_error(&e).unwrap()) {
            Ok(()) => call,
            Err(e) if self.cannot.contains(&e) => (ways()[0].make)(dir),
            Err(e) => panic!("{}: {e}", self.name),
        }
    }
}

macro_rules! ways {
    ($($name:literal => $make:expr $(, or $cannot:ident)*;)*) => {
        [$(Way { name: $name, make: $make, cannot: &[$(Errno::$cannot),*] }),*]
    };
}

fn file(dir: &Path) -> File {
    let path = dir.join("file");
    std::fs::write(&path, [b'o'; 8192]).unwrap();
    File::options().read(true).write(true).open(path).unwrap()
}

fn done<T>(answer: Result<T, Errno>) -> io::Result<()> {
    answer.map(drop).map_err(Into::into)
}

/// A name that no call before used.
fn fresh(dir: &Path) -> impl FnMut() -> PathBuf + use<> {
    let dir = dir.to_owned();
    let mut n = 0;
    move || {
        n += 1;
        dir.join(format!("new-{n}"))
    }
}

fn each_new(dir: &Path, call: fn(&Path, &Path) -> io::Result<()>) -> Call {
    let (mut next, dir) = (fresh(dir), dir.to_owned());
    Box::new(move || call(&next(), &dir))
}

/// A call on what is there each time: some are made ahead, while that may be done.
fn each_old(
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
                call(&at(n))?;
            }
            answer => answer?,
        }
        n += 1;
        let _ = make(&at(n + AHEAD - 1));
        Ok(())
    })
}

fn memory() -> File {
    let memory = rustix::fs::memfd_create("bytes", rustix::fs::MemfdFlags::empty()).unwrap();
    let memory = File::from(memory);
    memory.write_all_at(b"new bytes", 0).unwrap();
    memory
}

#[repr(align(4096))]
struct Page([u8; 4096]);

fn open(path: &Path, flags: i32) -> io::Result<()> {
    OpenOptions::new().write(true).custom_flags(flags).open(path).map(drop)
}

/// An access control list: owner rwx, uid 1 rwx, group, mask, others.
const ACL: [u8; 44] = {
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
const ACL_NAME: &str = "system.posix_acl_access";

fn map(fd: &File, prot: ProtFlags) -> io::Result<()> {
    // SAFETY: a fresh mapping at an address of the kernel's choice, which nobody touches.
    unsafe {
        let start = rustix::mm::mmap(std::ptr::null_mut(), 4096, prot, MapFlags::SHARED, fd, 0)?;
        rustix::mm::munmap(start, 4096)?;
    }
    Ok(())
}

/// `struct file_attr`, by file_setattr(2) of 6.17.
fn file_setattr(path: &Path) -> io::Result<()> {
    const FILE_GETATTR: libc::c_long = 468;
    const FILE_SETATTR: libc::c_long = 469;
    const NOATIME: u64 = 0x40;
    let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes())?;
    let mut attributes = [0u64; 3];
    for number in [FILE_GETATTR, FILE_SETATTR] {
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
fn dedupe(from: &File, to: &File) -> io::Result<()> {
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

pub fn ways() -> Vec<Way> {
    use super::queues::{aio, uring};
    Vec::from(ways! {
        "write" => |dir| {
            let file = file(dir);
            Box::new(move || done(rustix::io::write(&file, b"new")))
        };
        "pwritev2" => |dir| {
            let file = file(dir);
            Box::new(move || {
                let bytes = [io::IoSlice::new(b"new")];
                done(rustix::io::pwritev2(&file, &bytes, 1, ReadWriteFlags::DSYNC))
            })
        };
        "append" => |dir| {
            drop(file(dir));
            let file = File::options().append(true).open(dir.join("file")).unwrap();
            Box::new(move || done(rustix::io::write(&file, b"new")))
        };
        "O_DIRECT" => |dir| {
            drop(file(dir));
            let mut options = File::options();
            let file = options.write(true).custom_flags(libc::O_DIRECT).open(dir.join("file")).unwrap();
            Box::new(move || done(rustix::io::pwrite(&file, &Page([b'n'; 4096]).0, 0)))
        };
        "aio" => |dir| {
            let file = file(dir);
            Box::new(move || aio(&file))
        };
        "io_uring" => |dir| {
            let file = file(dir);
            Box::new(move || uring(&file))
        };
        "sendfile" => |dir| {
            let (file, from) = (file(dir), memory());
            Box::new(move || done(rustix::fs::sendfile(&file, &from, Some(&mut 0), 3)))
        };
        "splice" => |dir| {
            let file = file(dir);
            let (from, to): (OwnedFd, OwnedFd) = rustix::pipe::pipe().unwrap();
            Box::new(move || {
                rustix::io::write(&to, b"new")?;
                let flags = rustix::pipe::SpliceFlags::empty();
                let answer = done(rustix::pipe::splice(&from, None, &file, None, 3, flags));
                if answer.is_err() {
                    rustix::io::read(&from, &mut [0; 3])?;
                }
                answer
            })
        };
        "copy_file_range" => |dir| {
            let file = file(dir);
            std::fs::write(dir.join("from"), b"new").unwrap();
            let from = File::open(dir.join("from")).unwrap();
            Box::new(move || {
                let (mut a, mut b) = (0, 0);
                done(rustix::fs::copy_file_range(&from, Some(&mut a), &file, Some(&mut b), 3))
            })
        };
        "clone" => |dir| {
            let file = file(dir);
            std::fs::write(dir.join("from"), [b'n'; 4096]).unwrap();
            let from = File::open(dir.join("from")).unwrap();
            Box::new(move || done(rustix::fs::ioctl_ficlone(&file, &from)))
        }, or OPNOTSUPP, or INVAL, or XDEV;
        "dedupe" => |dir| {
            let file = file(dir);
            std::fs::write(dir.join("from"), [b'o'; 4096]).unwrap();
            let from = File::open(dir.join("from")).unwrap();
            Box::new(move || dedupe(&from, &file))
        }, or OPNOTSUPP, or INVAL, or XDEV;
        "fallocate" => |dir| {
            let file = file(dir);
            let mut end = 8192;
            Box::new(move || {
                end += 4096;
                done(rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, end))
            })
        };
        "punch" => |dir| {
            let file = file(dir);
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            Box::new(move || done(rustix::fs::fallocate(&file, flags, 0, 4096)))
        };
        "truncate" => |dir| {
            drop(file(dir));
            let path = std::ffi::CString::new(dir.join("file").as_os_str().as_encoded_bytes()).unwrap();
            let mut length = 100;
            Box::new(move || {
                length += 1;
                nix::unistd::truncate(path.as_c_str(), length).map_err(Into::into)
            })
        };
        "ftruncate" => |dir| {
            let file = file(dir);
            let mut length = 100;
            Box::new(move || {
                length += 1;
                file.set_len(length)
            })
        };
        "open for writing" => |dir| {
            drop(file(dir));
            let path = dir.join("file");
            Box::new(move || open(&path, 0))
        };
        "O_TRUNC" => |dir| {
            drop(file(dir));
            let path = dir.join("file");
            Box::new(move || done(rustix::fs::open(&path, OFlags::RDONLY | OFlags::TRUNC, Mode::empty())))
        };
        "open of the lower's" => |dir| {
            let lower = dir.parent().unwrap().join("lower-file");
            Box::new(move || open(&lower, 0))
        };
        "reopen" => |dir| {
            let file = file(dir);
            Box::new(move || open(format!("/proc/self/fd/{}", file.as_raw_fd()).as_ref(), 0))
        };
        "O_TMPFILE" => |dir| {
            let dir = dir.to_owned();
            Box::new(move || open(&dir, libc::O_TMPFILE))
        }, or OPNOTSUPP;
        "create" => |dir| each_new(dir, |new, _| File::create_new(new).map(drop));
        "link" => |dir| {
            drop(file(dir));
            each_new(dir, |new, dir| std::fs::hard_link(dir.join("file"), new))
        };
        "symlink" => |dir| each_new(dir, |new, _| std::os::unix::fs::symlink("there", new));
        "mknod" => |dir| each_new(dir, |new, _| {
            done(rustix::fs::mknodat(CWD, new, FileType::Fifo, Mode::RUSR, 0))
        });
        "socket" => |dir| {
            let mut next = fresh(dir);
            // Where it is from: a socket's name has room for 107 bytes.
            let dir = File::open(dir).unwrap();
            Box::new(move || {
                let name = next();
                let name = name.file_name().unwrap().to_str().unwrap();
                let path = format!("/proc/self/fd/{}/{name}", dir.as_raw_fd());
                std::os::unix::net::UnixListener::bind(path).map(drop)
            })
        };
        "mkdir" => |dir| each_new(dir, |new, _| std::fs::create_dir(new));
        "unlink" => |dir| {
            each_old(dir, |old| std::fs::write(old, b"old"), |old| std::fs::remove_file(old))
        };
        "rmdir" => |dir| {
            each_old(dir, |old| std::fs::create_dir(old), |old| std::fs::remove_dir(old))
        };
        "rename" => |dir| {
            each_old(dir, |old| std::fs::write(old, b"old"), |old| {
                std::fs::rename(old, old.with_extension("moved"))
            })
        };
        "rename over" => |dir| {
            drop(file(dir));
            each_old(dir, |old| std::fs::write(old, b"old"), |old| {
                std::fs::rename(old, old.with_file_name("file"))
            })
        };
        "rename exchange" => |dir| {
            drop(file(dir));
            std::fs::write(dir.join("other"), b"other").unwrap();
            let (one, other) = (dir.join("file"), dir.join("other"));
            Box::new(move || {
                done(rustix::fs::renameat_with(CWD, &one, CWD, &other, RenameFlags::EXCHANGE))
            })
        };
        "chmod" => |dir| {
            drop(file(dir));
            let (path, mut bits) = (dir.join("file"), 0o600);
            Box::new(move || {
                bits ^= 0o011;
                done(rustix::fs::chmod(&path, Mode::from_bits_truncate(bits)))
            })
        };
        "fchmod" => |dir| {
            let (file, mut bits) = (file(dir), 0o600);
            Box::new(move || {
                bits ^= 0o011;
                done(rustix::fs::fchmod(&file, Mode::from_bits_truncate(bits)))
            })
        };
        "chown" => |dir| {
            drop(file(dir));
            let (path, mut id) = (dir.join("file"), 1);
            Box::new(move || {
                id += 1;
                done(rustix::fs::chown(&path, Some(Uid::from_raw(id)), Some(Gid::from_raw(id))))
            })
        };
        "chown of a symlink" => |dir| {
            let (path, mut id) = (dir.join("link"), 1);
            std::os::unix::fs::symlink("there", &path).unwrap();
            Box::new(move || {
                id += 1;
                std::os::unix::fs::lchown(&path, Some(id), Some(id))
            })
        };
        "chmod of a fifo" => |dir| {
            let (path, mut bits) = (dir.join("fifo"), 0o600);
            rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap();
            Box::new(move || {
                bits ^= 0o011;
                done(rustix::fs::chmod(&path, Mode::from_bits_truncate(bits)))
            })
        };
        "utimes" => |dir| {
            drop(file(dir));
            let (path, mut time) = (dir.join("file"), 1);
            Box::new(move || {
                time += 1;
                let at = rustix::fs::Timespec { tv_sec: time, tv_nsec: 0 };
                let times = Timestamps { last_access: at, last_modification: at };
                done(rustix::fs::utimensat(CWD, &path, &times, AtFlags::empty()))
            })
        };
        "touch" => |dir| {
            let file = file(dir);
            Box::new(move || {
                let now = rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
                let times = Timestamps { last_access: now, last_modification: now };
                done(rustix::fs::futimens(&file, &times))
            })
        };
        "setxattr" => |dir| {
            let (file, mut value) = (file(dir), 0u8);
            Box::new(move || {
                value = value.wrapping_add(1);
                done(rustix::fs::fsetxattr(&file, "user.test", &[value], XattrFlags::empty()))
            })
        };
        "setxattr trusted" => |dir| {
            let (file, mut value) = (file(dir), 0u8);
            Box::new(move || {
                value = value.wrapping_add(1);
                done(rustix::fs::fsetxattr(&file, "trusted.test", &[value], XattrFlags::empty()))
            })
        };
        "removexattr" => |dir| {
            each_old(dir, |old| {
                std::fs::write(old, b"old")?;
                done(rustix::fs::setxattr(old, "user.test", b"old", XattrFlags::empty()))
            }, |old| done(rustix::fs::removexattr(old, "user.test")))
        };
        "set an ACL" => |dir| {
            each_old(dir, |old| std::fs::write(old, b"old"), |old| {
                done(rustix::fs::setxattr(old, ACL_NAME, &ACL, XattrFlags::empty()))
            })
        };
        "remove an ACL" => |dir| {
            each_old(dir, |old| {
                std::fs::write(old, b"old")?;
                done(rustix::fs::setxattr(old, ACL_NAME, &ACL, XattrFlags::empty()))
            }, |old| done(rustix::fs::removexattr(old, ACL_NAME)))
        };
        "file flags" => |dir| {
            let file = file(dir);
            let mut flags = rustix::fs::ioctl_getflags(&file).unwrap();
            Box::new(move || {
                flags ^= IFlags::NOATIME;
                done(rustix::fs::ioctl_setflags(&file, flags))
            })
        };
        "file_setattr" => |dir| {
            drop(file(dir));
            let path = dir.join("file");
            Box::new(move || file_setattr(&path))
        }, or NOSYS;
        "map shared" => |dir| {
            let file = file(dir);
            Box::new(move || map(&file, ProtFlags::READ | ProtFlags::WRITE))
        };
        // What mprotect could make writable later.
        "map shared to read" => |dir| {
            let file = file(dir);
            Box::new(move || map(&file, ProtFlags::READ))
        };
    })
}

/// All that is in a directory: names, bytes, owner, mode, times, attributes.
fn seen(dir: &Path) -> BTreeMap<PathBuf, String> {
    let mut all = BTreeMap::new();
    for path in std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).chain([dir.to_owned()]) {
        let meta = std::fs::symlink_metadata(&path).unwrap();
        let mut text = format!(
            "{:o} {}:{} {} {} {}.{} {}.{}",
            meta.mode(),
            meta.uid(),
            meta.gid(),
            meta.size(),
            meta.nlink(),
            meta.mtime(),
            meta.mtime_nsec(),
            meta.ctime(),
            meta.ctime_nsec(),
        );
        if meta.is_file() {
            let digest = std::fs::read(&path)
                .unwrap()
                .iter()
                .fold(7u64, |d, b| d.wrapping_mul(31).wrapping_add((*b).into()));
            text.push_str(&format!(" {digest:x}"));
            let file = File::open(&path).unwrap();
            text.push_str(&format!(" {:?}", rustix::fs::ioctl_getflags(&file)));
        }
        if !meta.is_symlink() {
            let mut names = [0; 1024];
            let n = rustix::fs::listxattr(&path, &mut names[..]).unwrap();
            for name in names[..n].split(|b| *b == 0).filter(|n| !n.is_empty()) {
                let mut value = [0; 256];
                let n = rustix::fs::getxattr(&path, name, &mut value[..]).unwrap();
                text.push_str(&format!(" {}={:?}", String::from_utf8_lossy(name), &value[..n]));
            }
        }
        all.insert(path, text);
    }
    all
}

/// Every row before the deadline, after it, and after a new one. Prints the table.
pub fn each(scene: &Scene) {
    let mut wrong = vec![];
    let mut rows = vec![];
    for (n, way) in ways().iter().enumerate() {
        scene.open();
        let dir = scene.merged().join(format!("way-{n}"));
        std::fs::create_dir(&dir).unwrap();
        let mut call = (way.make)(&dir);
        let answer = |call: &mut Call| match call() {
            Ok(()) => Ok(()),
            Err(e) => Err(Errno::from_io_error(&e).unwrap()),
        };
        let fits = |answer: &Result<(), Errno>| match answer {
            Ok(()) => true,
            Err(e) => way.cannot.contains(e),
        };
        let before = answer(&mut call);
        scene.shut();
        let was = seen(&dir);
        let after = answer(&mut call);
        let same = seen(&dir) == was;
        scene.open();
        let again = answer(&mut call);
        let unknown = before == Err(Errno::NOSYS) && after == before;
        let good = fits(&before) && (after == Err(Errno::ROFS) || unknown) && same && fits(&again);
        let name = |e: &Errno| format!("{:?}", nix::errno::Errno::from_raw(e.raw_os_error()));
        let word = |a: &Result<(), Errno>| a.as_ref().map_or_else(name, |()| "ok".to_owned());
        let row = format!(
            "{:20} before: {:10} after: {:10} again: {:10} {}",
            way.name,
            word(&before),
            word(&after),
            word(&again),
            if same { "unchanged" } else { "CHANGED" },
        );
        if !good {
            wrong.push(row.clone());
        }
        rows.push(row);
    }
    println!("{}", rows.join("\n"));
    assert!(
        wrong.is_empty(),
        "{} of {} rows do not hold:\n{}",
        wrong.len(),
        rows.len(),
        wrong.join("\n")
    );
}
