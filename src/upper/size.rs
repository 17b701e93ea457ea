//! How much a tree holds.

use std::os::fd::AsFd as _;
use std::path::Path;

use rustix::io::Errno;

use super::diff::vanished;
use super::tree::{Step, Walk};
use super::{Error, Result};
use crate::kernel::walk::Dir;

/// Bytes on disk and entries below `dir`; a missing directory holds nothing, nor does what is mounted
/// there or goes meanwhile.
pub fn size(dir: &Path) -> Result<(u64, u64)> {
    let begun = Dir::open(dir).map_err(Error::from).and_then(|dir| Walk::new(dir.as_fd()));
    let mut walk = match begun {
        Err(fault) if fault.errno() == Some(Errno::NOENT) => return Ok((0, 0)),
        answer => answer?,
    };
    let (mut bytes, mut entries) = (0, 0);
    while let Some(step) = walk.step()? {
        let Step::Name(entry) = step else { continue };
        let info = match walk.here().stat(&entry.name).map_err(Error::from) {
            Err(fault) if vanished(&fault) => continue,
            answer => answer?,
        };
        entries += 1;
        bytes += info.blocks * 512;
        if info.kind.is_dir() {
            match walk.enter(&entry) {
                Err(fault) if vanished(&fault) || fault.errno() == Some(Errno::XDEV) => {}
                answer => answer?,
            }
        }
    }
    Ok((bytes, entries))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_below_is_counted_and_no_link_followed() {
        let tmp = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(tmp.path().join("a/b")).unwrap();
        std::fs::write(tmp.path().join("a/b/f"), vec![1; 10_000]).unwrap();
        std::os::unix::fs::symlink("/", tmp.path().join("a/root")).unwrap();
        let (bytes, entries) = size(tmp.path()).unwrap();
        assert_eq!(entries, 4);
        assert!((10_000..100_000).contains(&bytes), "{bytes}");
        assert_eq!(size(&tmp.path().join("none")).unwrap(), (0, 0));
    }
}
