//! A file system whose server never answers one kind of request, and a writer that is caught in it.

use std::os::fd::AsRawFd as _;

use super::*;

/// linux/fuse.h: what is asked, as far as the mount of one directory with one file needs it.
mod asked {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const INTERRUPT: u32 = 36;
    pub const BATCH_FORGET: u32 = 42;
}

pub use asked::{OPEN, READ};

/// With these a reader waits for a page, from which a kill wakes it, and not for the answer.
const READAHEAD: u32 = 1 << 17;
const ASYNC_READ: u32 = 1;

const ROOT: u64 = 1;
const FILE: u64 = 2;

/// Mounts it and serves, all but requests of the kind `unanswered`. A
/// name is good for one look. With the server's end every request fails.
pub fn server(at: &Path, unanswered: Option<u32>) -> ! {
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
    let options = std::ffi::CString::new(options).unwrap();
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("writers", at, "fuse", flags, Some(options.as_c_str())).unwrap();
    let mut buffer = vec![0; 1 << 20];
    let mut told = false;
    loop {
        let n = (&device).read(&mut buffer).unwrap();
        let word = |at: usize| u32::from_ne_bytes(buffer[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_ne_bytes(buffer[at..at + 8].try_into().unwrap());
        assert!(n >= 40);
        let (opcode, unique, node) = (word(4), long(8), long(16));
        let answer: Result<Vec<u8>, i32> = match opcode {
            opcode if Some(opcode) == unanswered => continue,
            asked::INIT => Ok(words(&[7, 31, READAHEAD, ASYNC_READ, 0, 1 << 17, 1])
                .into_iter()
                .chain([0; 36])
                .collect()),
            asked::LOOKUP if buffer[40..].starts_with(b"bytes\0") => {
                Ok([longs(&[FILE, 0, 0, 3600, 0]), attributes(FILE)].concat())
            }
            asked::LOOKUP => Err(libc::ENOENT),
            asked::GETATTR => Ok([longs(&[3600, 0]), attributes(node)].concat()),
            // The kernel's wish to interrupt it is not granted.
            asked::INTERRUPT | asked::FORGET | asked::BATCH_FORGET => continue,
            asked::OPEN | asked::OPENDIR => Ok(longs(&[0, 0])),
            asked::READDIR | asked::RELEASE | asked::RELEASEDIR => Ok(vec![]),
            asked::STATFS => {
                Ok([longs(&[0; 5]), words(&[4096, 255, 4096, 0]), vec![0; 24]].concat())
            }
            _ => Err(libc::ENOSYS),
        };
        let (error, body) = match answer {
            Ok(body) => (0, body),
            Err(errno) => (-errno, vec![]),
        };
        let length = u32::try_from(16 + body.len()).unwrap();
        let head = [words(&[length, error.cast_unsigned()]), longs(&[unique])].concat();
        (&device).write_all(&[head, body].concat()).unwrap();
        if !told {
            ready();
            told = true;
        }
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|l| l.to_ne_bytes()).collect()
}

/// struct fuse_attr.
fn attributes(node: u64) -> Vec<u8> {
    let (mode, size) =
        if node == ROOT { (libc::S_IFDIR | 0o755, 0) } else { (libc::S_IFREG | 0o644, 4096) };
    [longs(&[node, size, 8, 0, 0, 0]), words(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0])].concat()
}

/// Holds a file of its own open for write, and hangs in another.
pub fn caught(own: &Path, other: &Path) -> ! {
    let mut file = append(own);
    file.write_all(&stamp()).unwrap();
    ready();
    let _ = std::fs::read(other);
    write_on(&file)
}
