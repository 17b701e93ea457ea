//! statmount(2) (6.8; options and source later): what one mount is, without reading the table of
//! all of them.
#![allow(unsafe_code)]

use std::ffi::{CStr, OsString};
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStringExt as _;

use rustix::fs::{AtFlags, StatxFlags};
use rustix::io::Errno;

use super::mountinfo::Superblock;
use super::{At as _, Error, Result};

/// The same on all architectures that Debian has.
const SYS_STATMOUNT: libc::c_long = 457;
const STATX_MNT_ID_UNIQUE: u32 = 0x4000;

const SB_BASIC: u64 = 0x1;
const FS_TYPE: u64 = 0x20;
const MNT_OPTS: u64 = 0x80;
const SB_SOURCE: u64 = 0x200;
const WANTED: u64 = SB_BASIC | FS_TYPE | MNT_OPTS | SB_SOURCE;

/// Where the strings begin in the kernel's answer, and where in it what we ask for lies.
const STRINGS: usize = 512;
const OPTS_AT: usize = 4;
const MASK_AT: usize = 8;
const FLAGS_AT: usize = 32;
const TYPE_AT: usize = 36;
const SOURCE_AT: usize = 124;
const SB_RDONLY: u32 = 1;

/// `struct mnt_id_req` in its first version.
#[repr(C)]
struct Request {
    size: u32,
    spare: u32,
    mount: u64,
    wanted: u64,
}

/// What the kernel said.
pub enum Answer {
    /// This.
    Seen(Superblock),
    /// It is mounted in another namespace or in none.
    NotMounted,
    /// This kernel cannot be asked.
    Unknown,
}

/// Asks for the superblock of the mount a descriptor was opened through.
pub fn superblock(fd: BorrowedFd<'_>) -> Result<Answer> {
    let unique = StatxFlags::from_bits_retain(STATX_MNT_ID_UNIQUE);
    let seen =
        rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, unique).at("stat", super::proc_path(fd))?;
    if seen.stx_mask & STATX_MNT_ID_UNIQUE == 0 {
        return Ok(Answer::Unknown);
    }
    let request = Request {
        size: size_of::<Request>() as u32,
        spare: 0,
        mount: seen.stx_mnt_id,
        wanted: WANTED,
    };
    let mut answer = vec![0_u8; 4096];
    loop {
        // SAFETY: both point to live memory of the sizes given; the kernel reads the one and
        // writes no more than its length into the other.
        let returned = unsafe {
            libc::syscall(SYS_STATMOUNT, &raw const request, answer.as_mut_ptr(), answer.len(), 0)
        };
        if returned == 0 {
            break;
        }
        match Errno::from_io_error(&std::io::Error::last_os_error()) {
            Some(Errno::OVERFLOW) if answer.len() < 1 << 20 => answer.resize(answer.len() * 4, 0),
            Some(Errno::NOSYS | Errno::PERM) => return Ok(Answer::Unknown),
            Some(Errno::NOENT) => return Ok(Answer::NotMounted),
            other => {
                return Err(other.unwrap_or(Errno::IO))
                    .at("ask for the mount of", super::proc_path(fd));
            }
        }
    }
    parse(&answer).ok_or_else(|| Error::Garbled {
        path: super::proc_path(fd),
        reason: "statmount gave no strings where it says they are".to_owned(),
    })
}

fn parse(answer: &[u8]) -> Option<Answer> {
    let word = |at: usize| Some(u32::from_ne_bytes(answer.get(at..at + 4)?.try_into().ok()?));
    let mask = u64::from_ne_bytes(answer.get(MASK_AT..MASK_AT + 8)?.try_into().ok()?);
    // What is missing is empty, or the kernel is too old to tell it: 6.12 tells options and no source.
    if mask & WANTED != WANTED {
        return Some(Answer::Unknown);
    }
    let text = |at: usize| {
        let start = STRINGS.checked_add(word(at)? as usize)?;
        CStr::from_bytes_until_nul(answer.get(start..)?).ok().map(CStr::to_bytes)
    };
    Some(Answer::Seen(Superblock {
        fs_type: OsString::from_vec(text(TYPE_AT)?.to_vec()),
        source: OsString::from_vec(text(SOURCE_AT)?.to_vec()),
        read_only: word(FLAGS_AT)? & SB_RDONLY != 0,
        options: text(OPTS_AT)?.to_vec(),
    }))
}
