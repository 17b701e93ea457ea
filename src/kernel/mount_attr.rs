//! Changing what a mount lets one do, by descriptor (5.12).
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};

use linux_raw_sys::general::{
    AT_EMPTY_PATH, MOUNT_ATTR__ATIME, MOUNT_ATTR_NOATIME, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOSYMFOLLOW,
    mount_attr,
};
use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};

/// Changes a mount.
pub(super) fn set(tree: &OwnedFd, attr: &mount_attr) -> rustix::io::Result<()> {
    // SAFETY: the path is a NUL-terminated literal, the structure lives through the call and its
    // size is given; the kernel only reads both.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            AT_EMPTY_PATH,
            &raw const *attr,
            size_of_val(attr),
        )
    };
    if answer == 0 {
        return Ok(());
    }
    Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}

/// A directory through a mount of its own, which is nowhere in the tree: no device is opened through
/// it and no symlink followed, whatever anybody puts there; what is mounted in it is not seen. Reading
/// leaves no time of access, which would be a write for each file. `None` to whoever may not mount.
pub(crate) fn without_devices(dir: impl AsFd) -> Option<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    let tree = open_tree(dir, "", flags).ok()?;
    let attr = mount_attr {
        attr_set: u64::from(MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSYMFOLLOW | MOUNT_ATTR_NOATIME),
        attr_clr: u64::from(MOUNT_ATTR__ATIME),
        propagation: 0,
        userns_fd: 0,
    };
    set(&tree, &attr).ok()?;
    Some(tree)
}
