//! Each way to change a file: what is there before it, and the call.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Gid, IFlags, Mode, OFlags, RenameFlags, Timestamps,
    Uid, XattrFlags,
};
use rustix::io::{Errno, ReadWriteFlags};
use rustix::mm::ProtFlags;

use super::calls::{
    ACL, ACL_NAME, Page, compat_flags, dedupe, done, each_new, each_old, file, file_setattr, fresh,
    fssetxattr, map, memory, open,
};
use super::queues::{aio, uring};
use super::stamps::stamp;

/// A call that is made again and again. What it does ahead of the call itself ends with a stamp.
pub type Call = Box<dyn FnMut() -> io::Result<()>>;

/// One way: what is there before it (in a directory of its own), and the call.
#[derive(Clone, Copy)]
pub struct Way {
    pub name: &'static str,
    pub make: fn(&Path) -> Call,
    /// What some file systems or kernels answer that cannot do it; the gate answers before that.
    pub cannot: &'static [Errno],
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

    /// Whether this kernel has it, whatever the file system.
    pub fn is_known(&self) -> bool {
        match self.name {
            "file_setattr" => release() >= (6, 17),
            // There where it runs 32-bit programs.
            "file flags by a 32-bit call" => Path::new("/proc/sys/abi/vsyscall32").exists(),
            _ => true,
        }
    }
}

/// The kernel's version; a system call that is not known is not told from one that is refused.
fn release() -> (u32, u32) {
    let name = rustix::system::uname();
    let mut numbers = name.release().to_str().unwrap().split('.').map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap(), numbers.next().unwrap())
}

macro_rules! ways {
    ($($name:literal => $make:expr $(, or $cannot:ident)*;)*) => {
        [$(Way { name: $name, make: $make, cannot: &[$(Errno::$cannot),*] }),*]
    };
}

pub fn ways() -> Vec<Way> {
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
                stamp();
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
        "rename into a directory" => |dir| {
            std::fs::create_dir(dir.join("to")).unwrap();
            each_old(dir, |old| std::fs::write(old, b"old"), |old| {
                std::fs::rename(old, old.with_file_name("to").join(old.file_name().unwrap()))
            })
        };
        "rename over in a directory" => |dir| {
            std::fs::create_dir(dir.join("to")).unwrap();
            drop(file(&dir.join("to")));
            each_old(dir, |old| std::fs::write(old, b"old"), |old| {
                std::fs::rename(old, old.with_file_name("to").join("file"))
            })
        };
        "rename exchange of two directories' files" => |dir| {
            let [one, other] = ["one", "other"].map(|name| dir.join(name));
            for side in [&one, &other] {
                std::fs::create_dir(side).unwrap();
                drop(file(side));
            }
            let (one, other) = (one.join("file"), other.join("file"));
            Box::new(move || {
                done(rustix::fs::renameat_with(CWD, &one, CWD, &other, RenameFlags::EXCHANGE))
            })
        };
        "link into a directory" => |dir| {
            drop(file(dir));
            std::fs::create_dir(dir.join("to")).unwrap();
            each_new(dir, |new, dir| {
                std::fs::hard_link(dir.join("file"), dir.join("to").join(new.file_name().unwrap()))
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
        "file flags by a 32-bit call" => |dir| {
            let file = file(dir);
            let mut flags = rustix::fs::ioctl_getflags(&file).unwrap();
            Box::new(move || {
                flags ^= IFlags::NOATIME;
                compat_flags(&file, flags)
            })
        }, or NOSYS;
        "FS_IOC_FSSETXATTR" => |dir| {
            let file = file(dir);
            Box::new(move || fssetxattr(&file))
        }, or OPNOTSUPP, or NOTTY;
        "file_setattr" => |dir| {
            drop(file(dir));
            let path = dir.join("file");
            Box::new(move || file_setattr(&path))
        }, or NOSYS, or OPNOTSUPP;
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
