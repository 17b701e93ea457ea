//! Second overlays: mounts of somebody else whose upper is a session's. The kernel allows them and
//! only logs a line; what is written through one lands in the upper, past the session's own overlay.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::hash::Hash;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags};

use super::mountinfo::Mount;
use super::{Result, blockers, holders, mountinfo};
use crate::model::facts::Holder;

/// A session's overlay, while it is mounted.
#[derive(Clone, Debug)]
pub struct Own<K> {
    /// Whose.
    pub key: K,
    /// Device of its superblock.
    pub s_dev: u64,
    /// Its upper.
    pub upper: PathBuf,
}

/// Which mounts are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Those of the caller's mount namespace.
    Here,
    /// Those of every namespace that a process is in.
    Everywhere,
}

/// Second overlays on the uppers of these sessions. Told by the path that the mount shows, or, where
/// another path leads to the same directory, by device and inode; a path is followed only as far as
/// the kernel knows it without asking any file system, so nothing here waits for a server.
pub fn of<K: Copy + Eq + Hash>(own: &[Own<K>], scope: Scope) -> Result<HashMap<K, Vec<Holder>>> {
    let mut found: HashMap<K, Vec<Holder>> = HashMap::new();
    if own.is_empty() {
        return Ok(found);
    }
    let devices: HashSet<u64> = own.iter().map(|o| o.s_dev).collect();
    let paths: HashMap<&Path, K> = own.iter().map(|o| (&*o.upper, o.key)).collect();
    let mut places: Option<HashMap<(u64, u64), K>> = None;
    let mut look = |pid: Option<u32>, mounts: Vec<Mount>| {
        for mount in mounts {
            if !mount.superblock.is("overlay") || devices.contains(&mount.dev) {
                continue;
            }
            let Some(upper) = mount.superblock.option("upperdir").next() else { continue };
            let key = paths.get(Path::new(&upper)).copied().or_else(|| {
                let known = places.get_or_insert_with(|| by_place(own));
                known.get(&place(pid, &upper)?).copied()
            });
            if let Some(key) = key {
                let seen = found.entry(key).or_default();
                let same = |h: &Holder| h.what == shown(&mount, &upper);
                if !seen.iter().any(same) {
                    seen.push(holder(pid, &mount, &upper));
                }
            }
        }
    };
    look(None, mountinfo::read(None)?);
    if scope == Scope::Here {
        return Ok(found);
    }
    let namespace = |pid: &str| std::fs::metadata(format!("/proc/{pid}/ns/mnt")).map(|m| m.ino());
    let mut read: HashSet<u64> = namespace("thread-self").into_iter().collect();
    for pid in holders::processes() {
        if namespace(&pid.to_string()).is_ok_and(|inode| read.insert(inode)) {
            look(Some(pid), mountinfo::read(Some(pid)).unwrap_or_default());
        }
    }
    Ok(found)
}

fn by_place<K: Copy>(own: &[Own<K>]) -> HashMap<(u64, u64), K> {
    own.iter().filter_map(|o| Some((place(None, o.upper.as_os_str())?, o.key))).collect()
}

/// Device and inode of a path as a process sees it, if the kernel has all of it in its cache: the
/// upper of a mounted overlay is, and a file system that asks a server is not asked.
fn place(pid: Option<u32>, path: &OsStr) -> Option<(u64, u64)> {
    let relative = Path::new(path).strip_prefix("/").ok()?;
    let root = match pid {
        Some(pid) => format!("/proc/{pid}/root"),
        None => "/".to_owned(),
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(CWD, root, flags, Mode::empty()).ok()?;
    let resolve = ResolveFlags::CACHED | ResolveFlags::IN_ROOT;
    let found = rustix::fs::openat2(&root, relative, flags, Mode::empty(), resolve).ok()?;
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let x = rustix::fs::statx(found.as_fd(), "", flags, StatxFlags::INO).ok()?;
    Some((rustix::fs::makedev(x.stx_dev_major, x.stx_dev_minor), x.stx_ino))
}

fn shown(mount: &Mount, upper: &OsStr) -> String {
    let Mount { id, point, .. } = mount;
    let ro = if mount.superblock.read_only { "ro" } else { "rw" };
    format!("{}, {ro}, upperdir={}, mount {id}", point.display(), upper.display())
}

fn holder(pid: Option<u32>, mount: &Mount, upper: &OsStr) -> Holder {
    let pid = pid.unwrap_or_else(std::process::id);
    let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    Holder {
        pid,
        command: blockers::parse_stat(&stat).map(|(name, _)| name).unwrap_or_default(),
        how: Holder::OVERLAY.to_owned(),
        what: shown(mount, upper),
        cgroup: String::new(),
        inside: false,
    }
}
