//! Small durable file operations the room's parts share.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use super::error::Error;

/// Makes a directory, 0700, with its parents, unless it is there.
pub(super) fn make_dir(path: &Path) -> Result<(), Error> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(Error::io("create directory", path))?;
    sync_parent(path)
}

/// Makes an empty file, 0600, unless it is there.
pub(super) fn touch_private(path: &Path) -> Result<(), Error> {
    OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(path)
        .map(drop)
        .map_err(Error::io("create", path))?;
    sync_parent(path)
}

/// Makes the names in the directory of `path` durable.
pub(super) fn sync_parent(path: &Path) -> Result<(), Error> {
    let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(dir).and_then(|d| d.sync_all()).map_err(Error::io("fsync directory", dir))
}

/// Puts `content` at `path` whole or not at all: temporary file, fsync, rename, fsync.
pub(super) fn replace(path: &Path, content: &[u8], mode: u32) -> Result<(), Error> {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let new = Path::new(&name);
    let _ = std::fs::remove_file(new);
    OpenOptions::new()
        .create_new(true)
        .write(true)
        .mode(mode)
        .open(new)
        .and_then(|mut f| {
            f.write_all(content)?;
            f.sync_all()
        })
        .map_err(Error::io("write", new))?;
    std::fs::rename(new, path).map_err(Error::io("rename to", path))?;
    sync_parent(path)
}

/// Makes the file at `path` at least `bytes` long with blocks of its own, all zeros where it had no
/// bytes. Written, not allocated: what is overwritten then needs no change of the file's metadata.
pub(super) fn lengthen(path: &Path, bytes: u64) -> Result<(), Error> {
    let fill = || {
        let file = OpenOptions::new().write(true).open(path)?;
        let (old, zeros) = (file.metadata()?.len(), vec![0; 1 << 20]);
        let mut at = old;
        while at < bytes {
            let piece = usize::try_from(bytes - at).unwrap_or(usize::MAX).min(zeros.len());
            if let Err(fault) = file.write_all_at(&zeros[..piece], at) {
                // Room that was not enough is for others.
                let _ = file.set_len(old);
                return Err(fault);
            }
            at += piece as u64;
        }
        if old < bytes { file.sync_all() } else { Ok(()) }
    };
    fill().map_err(Error::io("lengthen", path))
}
