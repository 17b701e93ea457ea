//! Whether a directory can carry uppers, found by trying what overlay will do there.

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, XattrFlags};
use rustix::io::Errno;

use crate::kernel::walk::{self, Dir};
use crate::kernel::{At as _, Error, Result, fs_magic};

/// File systems that overlay refuses as an upper, or takes and then corrupts or cannot sync.
const REFUSED: [(u64, &str); 9] = [
    (0x794c_7630, "overlay: an upper cannot lie on another overlay"),
    (0x6573_5546, "FUSE: its server could stall or change the upper under us"),
    (0x6969, "NFS: it has no trusted xattrs and a server of its own"),
    (0xff53_4d42, "CIFS: it has no whiteouts"),
    (0xfe53_4d42, "SMB: it has no whiteouts"),
    (0x0102_1997, "9p: it has no whiteouts"),
    (0x00c3_6400, "Ceph: it has a server of its own"),
    (0x4d44, "FAT: it has no xattrs"),
    (0x2011_bab0, "exFAT: it has no xattrs"),
];

/// SQLite allocates the index of its log by one byte in each 4,096: with smaller blocks the rest of
/// them is a hole, which the kernel fills when the mapping is written, or cannot.
const BLOCK: u64 = 4096;

/// Refuses a directory in which an upper and its work cannot live, and lowers that overlap with it
/// or with each other. What is tried is removed again.
pub fn preflight(dir: &Path, lowers: &[PathBuf]) -> Result<()> {
    let dir = &*std::fs::canonicalize(dir).at("resolve", dir)?;
    let bad = |reason: String| Error::BadUpper { path: dir.to_owned(), reason };
    let magic = fs_magic(&Dir::open(dir)?).at("statfs", dir)?;
    if let Some((_, why)) = REFUSED.iter().find(|(m, _)| *m == magic) {
        return Err(bad(format!("it is on {why}; use ext4, xfs or btrfs of this host")));
    }
    let block = rustix::fs::statvfs(dir).at("statfs", dir)?.f_frsize;
    if block < BLOCK {
        return Err(bad(format!(
            "its file system has blocks of {block} bytes, and on a full disk the kernel ends (SIGBUS) \
             whoever writes to a mapped file there; make it with blocks of {BLOCK}, for instance by \
             `mkfs.ext4 -b {BLOCK}`"
        )));
    }
    apart(dir, lowers)?;
    let probe = Probe::new(dir)?;
    let tried = try_features(&probe.dir).map_err(|e| match e {
        Tried::Lacks(what) => {
            bad(format!("its file system lacks {what}; use ext4, xfs (ftype=1) or btrfs"))
        }
        Tried::Failed(e) => e,
    });
    let cleaned = probe.remove();
    tried.and(cleaned)
}

enum Tried {
    Lacks(&'static str),
    Failed(Error),
}

impl From<Error> for Tried {
    fn from(e: Error) -> Self {
        Self::Failed(e)
    }
}

fn try_features(dir: &Dir) -> std::result::Result<(), Tried> {
    use std::os::fd::AsFd as _;
    let at = dir.path();
    let lacking = |what| {
        move |e: Errno| match e {
            Errno::OPNOTSUPP | Errno::INVAL | Errno::PERM | Errno::NOSYS => Tried::Lacks(what),
            source => Tried::Failed(Error::Call { op: "probe", path: at.to_owned(), source }),
        }
    };
    rustix::fs::fsetxattr(dir, "trusted.overfence.probe", b"y", XattrFlags::CREATE)
        .map_err(lacking("trusted xattrs"))?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    rustix::fs::openat(dir, "a", flags, Mode::from_raw_mode(0o600)).at("create a file in", at)?;
    rustix::fs::renameat_with(dir, "a", dir, "b", RenameFlags::WHITEOUT)
        .map_err(lacking("RENAME_WHITEOUT"))?;
    if !dir.stat(OsStr::new("a"))?.is_whiteout() {
        return Err(Tried::Lacks("whiteout devices"));
    }
    let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
    rustix::fs::openat(dir.as_fd(), ".", flags, Mode::from_raw_mode(0o600))
        .map_err(lacking("O_TMPFILE"))?;
    let untyped = dir.sorted()?.iter().any(|entry| entry.kind == FileType::Unknown);
    if untyped { Err(Tried::Lacks("d_type in directories")) } else { Ok(()) }
}

/// A directory of the probe's own, removed by name.
struct Probe {
    dir: Dir,
    path: PathBuf,
}

static COUNT: AtomicU32 = AtomicU32::new(0);

impl Probe {
    fn new(parent: &Path) -> Result<Self> {
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!(".overfence-probe-{}-{n}", std::process::id()));
        rustix::fs::mkdir(&path, Mode::RWXU).at("make a probe directory", &path)?;
        Ok(Self { dir: Dir::open(&path)?, path })
    }

    fn remove(self) -> Result<()> {
        for entry in self.dir.sorted()? {
            rustix::fs::unlinkat(&self.dir, &entry.name, AtFlags::empty())
                .at("remove from the probe directory", &self.path)?;
        }
        rustix::fs::rmdir(&self.path).at("remove the probe directory", &self.path)
    }
}

/// No two of these directories are the same or lie within each other, also through bind mounts.
fn apart(dir: &Path, lowers: &[PathBuf]) -> Result<()> {
    let all: Vec<&Path> = lowers.iter().map(PathBuf::as_path).chain([dir]).collect();
    let lines = all.iter().map(|path| ancestors(path)).collect::<Result<Vec<_>>>()?;
    for (i, line) in lines.iter().enumerate() {
        for (j, other) in lines.iter().enumerate() {
            // The first of a line is the directory itself.
            if i != j && other.first().is_some_and(|own| line.contains(own)) {
                return Err(Error::Overlap { a: all[j].to_owned(), b: all[i].to_owned() });
            }
        }
    }
    Ok(())
}

/// Device and inode of a directory and of each one above it.
fn ancestors(path: &Path) -> Result<Vec<(u64, u64)>> {
    let resolved = std::fs::canonicalize(path).at("resolve", path)?;
    if !walk::stat_path(&resolved)?.kind.is_dir() {
        return Err(Errno::NOTDIR).at("use as a layer", path);
    }
    resolved
        .ancestors()
        .map(|above| std::fs::metadata(above).map(|m| (m.dev(), m.ino())).at("stat", above))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_within_each_other_are_refused() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = |name: &str| {
            let path = tmp.path().join(name);
            std::fs::create_dir_all(&path).unwrap();
            path
        };
        let (upper, a, b) = (dir("upper"), dir("a"), dir("b"));
        assert!(apart(&upper, &[a.clone(), b.clone()]).is_ok());
        let inner = dir("a/x");
        let link = tmp.path().join("link");
        std::os::unix::fs::symlink(&a, &link).unwrap();
        for lowers in [vec![a.clone(), inner], vec![a.clone(), a.clone()], vec![a, link]] {
            assert!(matches!(apart(&upper, &lowers), Err(Error::Overlap { .. })), "{lowers:?}");
        }
        assert!(apart(&upper, &[tmp.path().to_owned()]).is_err(), "above the upper");
        assert!(apart(&upper, &[dir("upper/l")]).is_err(), "in the upper");
    }
}
