//! File handles (name_to_handle_at(2)): by them overlay notes of a copied-up file which lower file it
//! was. A handle is only compared here, never opened.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd as _};

use rustix::io::Errno;

/// The kernel's bound on a handle.
const MAX_HANDLE: usize = 128;

/// A handle: its type and its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handle {
    /// What the file system calls this form.
    pub kind: u8,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

#[repr(C)]
struct Buffer {
    bytes: u32,
    kind: i32,
    handle: [u8; MAX_HANDLE],
}

/// The handle of what `fd` is open on (O_PATH too); `None` where the file system has none.
pub fn of(fd: impl AsFd) -> rustix::io::Result<Option<Handle>> {
    let mut buffer = Buffer { bytes: MAX_HANDLE as u32, kind: 0, handle: [0; MAX_HANDLE] };
    let mut mount = 0_i32;
    let empty = CString::default();
    // SAFETY: `buffer` has the layout of `struct file_handle` with room for as many bytes as it says,
    // `empty` and `mount` are valid for the length of the call.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            fd.as_fd().as_raw_fd(),
            empty.as_ptr(),
            &raw mut buffer,
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    if answer != 0 {
        let errno = Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO);
        return match errno {
            Errno::OPNOTSUPP | Errno::OVERFLOW | Errno::NOSYS | Errno::PERM => Ok(None),
            other => Err(other),
        };
    }
    let used = usize::try_from(buffer.bytes).unwrap_or(0).min(MAX_HANDLE);
    let kind = u8::try_from(buffer.kind).ok();
    Ok(kind.map(|kind| Handle { kind, bytes: buffer.handle[..used].to_vec() }))
}

/// The handle in overlay's `origin` mark (`struct ovl_fb` of fs/overlayfs/overlayfs.h): version,
/// magic, length, flags, type, 16 bytes of uuid, the handle. `None` if it is not of that form.
pub fn in_origin(mark: &[u8]) -> Option<Handle> {
    match mark {
        [0, 0xfb, len, _flags, kind, rest @ ..]
            if usize::from(*len) == mark.len() && rest.len() > 16 =>
        {
            Some(Handle { kind: *kind, bytes: rest[16..].to_vec() })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_one_handle_by_all_its_names() {
        let tmp = tempfile::tempdir().unwrap();
        let (a, b, c) = (tmp.path().join("a"), tmp.path().join("b"), tmp.path().join("c"));
        std::fs::write(&a, b"x").unwrap();
        std::fs::hard_link(&a, &b).unwrap();
        std::fs::write(&c, b"x").unwrap();
        let of = |path| super::of(std::fs::File::open(path).unwrap()).unwrap();
        assert_eq!(of(&a), of(&b));
        if of(&a).is_some() {
            assert_ne!(of(&a), of(&c));
        }
    }

    #[test]
    fn an_origin_mark_is_read_and_a_foreign_one_is_not() {
        let mut mark = vec![0, 0xfb, 25, 0, 7];
        mark.extend([9; 16]);
        mark.extend([1, 2, 3, 4]);
        assert_eq!(in_origin(&mark), Some(Handle { kind: 7, bytes: vec![1, 2, 3, 4] }));
        for bad in [&b""[..], &mark[..24], &[1, 0xfb, 5, 0, 7], &[0, 0xfb, 5, 0, 7]] {
            assert_eq!(in_origin(bad), None);
        }
    }
}
