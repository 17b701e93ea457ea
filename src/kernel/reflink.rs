//! Clones of files that share their blocks until one of them is written (FICLONE), where a file system
//! has them: xfs, btrfs.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

use rustix::fs::{Mode, OFlags};

/// Whether files of the file system that `from` is on can be cloned to where `to` is, both of them
/// directories. Tried with two files that never have a name.
pub fn works(from: impl AsFd, to: impl AsFd) -> bool {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let nameless = |dir| rustix::fs::openat(dir, c".", flags, Mode::RUSR | Mode::WUSR);
    match (nameless(from.as_fd()), nameless(to.as_fd())) {
        (Ok(from), Ok(to)) => rustix::fs::ioctl_ficlone(&to, &from).is_ok(),
        (Err(_), _) | (_, Err(_)) => false,
    }
}

/// Makes `to`, an empty file, a clone of `from`: what that holds at one moment, and nothing that is
/// written afterwards. What of it is not on the disk yet is written there first.
///
/// # Errors
/// The file system has no clones, or none of this file.
pub fn clone(from: &File, to: &File) -> io::Result<()> {
    Ok(rustix::fs::ioctl_ficlone(to, from)?)
}

/// Writes a file's content out and waits for it; its metadata is left as it is, and nothing is made
/// durable by that.
///
/// # Errors
/// The kernel's: an I/O error, or no file that has content.
pub fn write_out(file: impl AsFd) -> io::Result<()> {
    let how = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: the descriptor is open as long as it is borrowed; nothing else is passed but numbers.
    match unsafe { libc::sync_file_range(file.as_fd().as_raw_fd(), 0, 0, how) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn what_is_no_directory_has_no_clones_and_what_has_no_content_is_not_written_out() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("f");
        let mut file = File::create(&path).unwrap();
        file.write_all(b"bytes").unwrap();
        let top = File::open(tmp.path()).unwrap();
        assert!(!works(&file, &top) && !works(&top, &file));
        write_out(&file).unwrap();
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert_eq!(write_out(reader).unwrap_err().raw_os_error(), Some(libc::ESPIPE));
        // Nothing of a try stays.
        works(&top, &top);
        assert_eq!(std::fs::read_dir(tmp.path()).unwrap().count(), 1);
    }
}
