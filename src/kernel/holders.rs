//! Names who holds an overlay. It names, it proves nothing: a descriptor in flight in a socket or
//! in an io_uring has no line in /proc, and "held by the kernel, not nameable" is a valid answer.
//!
//! Nothing here waits for a file system's server: what lies on one is told by its mount, which a link in
//! /proc and a mount table name without asking anybody, and the rest is asked with AT_STATX_DONT_SYNC,
//! which FUSE and NFS answer from what they know.
//!
//! Three marks tell that something belongs to the overlay: the device number of its superblock;
//! the mount id it was reached through, since a file of a layer on another file system shows another
//! device; and, for mappings before 6.12, the upper's device with an inode that is in the upper.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, StatxFlags};

use super::walk::Dir;
use super::{Result, blockers, cgroup, mountinfo};
use crate::model::facts::Holder;

/// How many are named: the list goes into the session's record and its evidence, and a workload can
/// open as many descriptors as it likes.
const NAMED: usize = 64;

/// Names who keeps an overlay from becoming read-only: descriptors open for write, shared
/// mappings, loop devices. Never empty: if nobody can be named, the kernel itself is the holder, after
/// the sockets with descriptors in them, which may be what it holds.
///
/// `s_dev` is [`super::overlay::Mounted::s_dev`], `cgroup` the path of the session's cgroup.
pub fn of(s_dev: u64, upper: &Path, cgroup: &Path) -> Result<Vec<Holder>> {
    let Search { mut found, in_flight, .. } = find(s_dev, upper, cgroup, Wanted::Writers)?;
    if found.is_empty() {
        found = in_flight;
        let what = "a descriptor in flight, an io_uring, or a kernel-side user";
        found.push(no_process("kernel", what.to_owned()));
    }
    Ok(found)
}

/// Names everything that /proc and /sys show to use an overlay: besides its writers, readers,
/// working and root directories, and its mounts in every namespace, the agent's own among them.
pub fn all(s_dev: u64, upper: &Path, cgroup: &Path) -> Result<Vec<Holder>> {
    find(s_dev, upper, cgroup, Wanted::All).map(|search| search.found)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Writers,
    All,
}

/// Processes that end meanwhile are left out.
fn find<'s>(s_dev: u64, upper: &'s Path, cgroup: &Path, wanted: Wanted) -> Result<Search<'s>> {
    let pids = processes();
    let mut search = Search {
        s_dev,
        upper,
        cgroup: cgroup::named(cgroup)?,
        wanted,
        namespaces: HashMap::new(),
        mounts: HashSet::new(),
        other_mounts: HashSet::new(),
        inodes: None,
        found: Vec::new(),
        in_flight: Vec::new(),
        more: 0,
    };
    // Mounts first: their ids are a mark for what comes after.
    for pid in &pids {
        search.mounts_seen_by(*pid);
    }
    for pid in &pids {
        search.descriptors_of(*pid);
        search.mappings_of(*pid)?;
        if wanted == Wanted::All {
            search.places_of(*pid);
        }
    }
    search.loop_devices();
    if search.more > 0 {
        search.found.push(no_process("others", format!("{} more", search.more)));
    }
    Ok(search)
}

fn no_process(how: &str, what: String) -> Holder {
    Holder {
        pid: 0,
        command: "kernel".to_owned(),
        how: how.to_owned(),
        what,
        cgroup: String::new(),
        inside: false,
    }
}

/// All processes there are, in order.
pub(super) fn processes() -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let mut pids: Vec<u32> =
        entries.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    pids
}

struct Search<'s> {
    s_dev: u64,
    upper: &'s Path,
    cgroup: PathBuf,
    wanted: Wanted,
    /// The mounts of each mount namespace, by its inode, in the table's order.
    namespaces: HashMap<u64, Vec<Place>>,
    /// Ids of mounts of the overlay in any namespace.
    mounts: HashSet<u64>,
    /// Ids of mounts of anything else.
    other_mounts: HashSet<u64>,
    /// The upper's device and the inodes in it, read only if a mapping asks for them.
    inodes: Option<(u64, HashSet<u64>)>,
    found: Vec<Holder>,
    /// Sockets with descriptors in them.
    in_flight: Vec<Holder>,
    /// How many there are besides.
    more: u64,
}

/// Where something is mounted.
struct Place {
    point: PathBuf,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// The overlay.
    Ours,
    /// A file system that may ask a server.
    Remote,
    /// Any other.
    Local,
}

/// Types of file systems that ask somebody who may not answer.
fn is_remote(mount: &mountinfo::Mount) -> bool {
    let kind = mount.superblock.fs_type.as_bytes();
    let known: [&[u8]; 10] = [
        b"nfs",
        b"nfs4",
        b"cifs",
        b"smb3",
        b"9p",
        b"ceph",
        b"afs",
        b"coda",
        b"virtiofs",
        b"autofs",
    ];
    kind.starts_with(b"fuse") || known.contains(&kind)
}

impl Search<'_> {
    fn add(&mut self, pid: u32, how: &str, what: String) {
        if self.found.len() == NAMED {
            self.more += 1;
            return;
        }
        let holder = self.process(pid, how, what);
        self.found.push(holder);
    }

    fn process(&self, pid: u32, how: &str, what: String) -> Holder {
        let read = |name: &str| std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let command = blockers::parse_stat(&read("stat")).map(|(name, _)| name);
        let cgroup = parse_cgroup(&read("cgroup")).unwrap_or_default();
        let inside = cgroup.starts_with(&self.cgroup);
        Holder {
            pid,
            command: command.unwrap_or_default(),
            how: how.to_owned(),
            what,
            cgroup: cgroup.display().to_string(),
            inside,
        }
    }

    fn mounts_seen_by(&mut self, pid: u32) {
        let Some(namespace) = inode(&format!("/proc/{pid}/ns/mnt")) else { return };
        if self.namespaces.contains_key(&namespace) {
            return;
        }
        let mut places = Vec::new();
        for mount in mountinfo::read(Some(pid)).unwrap_or_default() {
            let kind = match is_remote(&mount) {
                _ if mount.dev == self.s_dev => Kind::Ours,
                true => Kind::Remote,
                false => Kind::Local,
            };
            if kind == Kind::Ours {
                self.mounts.insert(mount.id);
                if self.wanted == Wanted::All {
                    self.add(pid, "mount", mount.point.display().to_string());
                }
            } else {
                self.other_mounts.insert(mount.id);
            }
            places.push(Place { point: mount.point, kind });
        }
        self.namespaces.insert(namespace, places);
    }

    /// What a path is on, as far as its mount namespace's table tells.
    fn kind_at(&self, pid: u32, path: &Path) -> Option<Kind> {
        let places = self.namespaces.get(&inode(&format!("/proc/{pid}/ns/mnt"))?)?;
        let over = places.iter().filter(|place| path.starts_with(&place.point));
        // Of mounts at the same point the last is on top, and the last is what this gives.
        over.max_by_key(|place| place.point.components().count()).map(|place| place.kind)
    }

    fn descriptors_of(&mut self, pid: u32) {
        let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return };
        for entry in entries.flatten() {
            let number = entry.file_name();
            let info = Path::new("/proc").join(pid.to_string()).join("fdinfo").join(&number);
            let info = std::fs::read(info).unwrap_or_default();
            let Some((flags, mount)) = parse_fdinfo(&info) else { continue };
            if let Some(count) = parse_in_flight(&info).filter(|count| *count > 0)
                && self.in_flight.len() < NAMED
            {
                let what = format!(
                    "whose socket (descriptor {}) holds {count} descriptor(s) in flight",
                    number.display()
                );
                let holder = self.process(pid, "in-flight", what);
                self.in_flight.push(holder);
            }
            let writes = flags & 0o3 != 0 && flags & libc::O_PATH as u64 == 0;
            if self.wanted == Wanted::Writers && !writes {
                continue;
            }
            // Only a file of a mount that is in no namespace is asked about. Not one without a name:
            // it may be stale at its server, which is the one thing NFS asks for in any case.
            let ours = self.mounts.contains(&mount)
                || !self.other_mounts.contains(&mount)
                    && !is_nameless(&entry.path())
                    && device(&entry.path()) == Some(self.s_dev);
            if ours {
                self.add(pid, "descriptor", shown(&entry.path()));
            }
        }
    }

    fn mappings_of(&mut self, pid: u32) -> Result<()> {
        let maps = std::fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
        let mut named = HashSet::new();
        for mapping in maps.split(|b| *b == b'\n').filter_map(parse_mapping) {
            // A private or read-only mapping of a file open for write keeps no write access, but
            // mprotect can turn a shared one of it writable: the descriptor's mode decides, and
            // the "s" is all that maps show of it.
            if self.wanted == Wanted::Writers && !mapping.shared {
                continue;
            }
            let ours = mapping.dev == self.s_dev || self.is_in_upper(&mapping)?;
            if ours && named.insert(mapping.inode) {
                self.add(pid, "mapping", mapping.path.display().to_string());
            }
        }
        Ok(())
    }

    fn is_in_upper(&mut self, mapping: &Mapping) -> Result<bool> {
        if mapping.inode == 0 || !mapping.shared {
            return Ok(false);
        }
        let (dev, inodes) = match &mut self.inodes {
            Some(known) => known,
            none => none.insert((Dir::open(self.upper)?.own_stat()?.dev, HashSet::new())),
        };
        if mapping.dev != *dev {
            return Ok(false);
        }
        if inodes.is_empty() {
            collect_inodes(&Dir::open(self.upper)?, inodes)?;
        }
        Ok(inodes.contains(&mapping.inode))
    }

    fn places_of(&mut self, pid: u32) {
        for how in ["cwd", "root"] {
            let path = PathBuf::from(format!("/proc/{pid}/{how}"));
            let Ok(leads_to) = std::fs::read_link(&path) else { continue };
            let ours = match self.kind_at(pid, &leads_to) {
                Some(Kind::Ours) => true,
                Some(Kind::Remote) => false,
                // Perhaps in a mount that is in no namespace any more.
                Some(Kind::Local) | None => {
                    !is_nameless(&path) && device(&path) == Some(self.s_dev)
                }
            };
            if ours {
                self.add(pid, how, leads_to.display().to_string());
            }
        }
    }

    fn loop_devices(&mut self) {
        let Ok(entries) = std::fs::read_dir("/sys/block") else { return };
        let mounts = mountinfo::read(None).unwrap_or_default();
        let points: Vec<_> =
            mounts.iter().filter(|m| m.dev == self.s_dev).map(|m| &m.point).collect();
        for entry in entries.flatten() {
            let Ok(file) = std::fs::read(entry.path().join("loop/backing_file")) else { continue };
            let shown = file.trim_ascii_end();
            let nameless = shown.strip_suffix(DELETED);
            let file = Path::new(OsStr::from_bytes(nameless.unwrap_or(shown)));
            // Nothing is looked up elsewhere, where a server may hang, and what has no name cannot be.
            let near = points.iter().any(|point| file.starts_with(point));
            if near && (nameless.is_some() || device(file) == Some(self.s_dev)) {
                let file = Path::new(OsStr::from_bytes(shown));
                let name = entry.file_name();
                let what = format!("{} backed by {}", name.display(), file.display());
                self.found.push(no_process(Holder::LOOP, what));
            }
        }
    }
}

/// Inode numbers of the regular files below a directory; only these can be mapped.
fn collect_inodes(dir: &Dir, inodes: &mut HashSet<u64>) -> Result<()> {
    for entry in dir.entries()? {
        let entry = entry?;
        match entry.kind {
            FileType::RegularFile => {
                inodes.insert(entry.ino);
            }
            FileType::Directory => match dir.child(&entry.name) {
                Err(e) if e.errno() == Some(rustix::io::Errno::NOENT) => {}
                child => collect_inodes(&child?, inodes)?,
            },
            _ => {}
        }
    }
    Ok(())
}

fn inode(path: &str) -> Option<u64> {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata(path).ok().map(|m| m.ino())
}

/// How the kernel marks a file or directory that has no name any more.
const DELETED: &[u8] = b" (deleted)";

fn is_nameless(link: &Path) -> bool {
    std::fs::read_link(link).is_ok_and(|path| path.as_os_str().as_bytes().ends_with(DELETED))
}

/// The device of what a /proc link leads to, without asking a server that may hang.
fn device(link: &Path) -> Option<u64> {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    let x = rustix::fs::statx(CWD, link, flags, StatxFlags::INO).ok()?;
    Some(rustix::fs::makedev(x.stx_dev_major, x.stx_dev_minor))
}

fn shown(link: &Path) -> String {
    std::fs::read_link(link).map(|p| p.display().to_string()).unwrap_or_default()
}

/// The path on the v2 hierarchy in /proc/PID/cgroup.
pub(super) fn parse_cgroup(text: &[u8]) -> Option<PathBuf> {
    text.split(|b| *b == b'\n')
        .find_map(|line| line.strip_prefix(b"0::"))
        .map(|path| OsStr::from_bytes(path).into())
}

/// Open flags and mount id of /proc/PID/fdinfo/N.
fn parse_fdinfo(text: &[u8]) -> Option<(u64, u64)> {
    let text = std::str::from_utf8(text).ok()?;
    let value = |key| text.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    let flags = u64::from_str_radix(value("flags:")?, 8).ok()?;
    Some((flags, value("mnt_id:")?.parse().ok()?))
}

/// How many descriptors wait in a unix socket, from /proc/PID/fdinfo/N (5.10).
fn parse_in_flight(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?;
    text.lines().find_map(|line| line.strip_prefix("scm_fds:"))?.trim().parse().ok()
}

#[derive(Debug, PartialEq, Eq)]
struct Mapping {
    shared: bool,
    dev: u64,
    inode: u64,
    path: PathBuf,
}

/// One line of /proc/PID/maps.
fn parse_mapping(line: &[u8]) -> Option<Mapping> {
    let mut fields = line.splitn(6, |b| *b == b' ');
    let _range = fields.next()?;
    let shared = fields.next()?.get(3) == Some(&b's');
    let _offset = fields.next()?;
    let (major, minor) = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
    let number = |hex| u32::from_str_radix(hex, 16).ok();
    let dev = rustix::fs::makedev(number(major)?, number(minor)?);
    let inode = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let path = OsStr::from_bytes(fields.next().unwrap_or_default().trim_ascii_start()).into();
    Some(Mapping { shared, dev, inode, path })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_read_with_any_path() {
        let line = b"7f00-7f01 rw-s 00000000 fe:10 42                  /a b\xff (deleted)";
        let want = Mapping {
            shared: true,
            dev: rustix::fs::makedev(0xfe, 0x10),
            inode: 42,
            path: OsStr::from_bytes(b"/a b\xff (deleted)").into(),
        };
        assert_eq!(parse_mapping(line), Some(want));
        let anonymous = parse_mapping(b"7f00-7f01 rw-p 00000000 00:00 0 ").unwrap();
        assert_eq!((anonymous.shared, anonymous.inode), (false, 0));
        assert_eq!(parse_mapping(b""), None);
    }

    #[test]
    fn flags_are_octal_and_the_mount_id_is_not() {
        let text = b"pos:\t0\nflags:\t0100002\nmnt_id:\t31\nino:\t5\n";
        assert_eq!(parse_fdinfo(text), Some((0o100_002, 31)));
        assert_eq!(parse_fdinfo(b"pos:\t0\n"), None);
        assert_eq!(parse_in_flight(b"flags:\t02\nino:\t7\nscm_fds: 3\n"), Some(3));
        assert_eq!(parse_in_flight(text), None);
    }

    #[test]
    fn only_the_v2_line_names_the_cgroup() {
        let text = b"3:cpu:/x\n1:name=systemd:/y\n0::/a/b\n";
        assert_eq!(parse_cgroup(text), Some("/a/b".into()));
        assert_eq!(parse_cgroup(b"3:cpu:/x\n"), None);
    }
}
