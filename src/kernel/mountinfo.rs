//! Reads /proc/PID/mountinfo (proc_pid_mountinfo(5)). It *names* mounts; it never proves that one
//! is gone: a detached tree (open_tree) has no line anywhere.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use super::statmount::{self, Answer};
use super::{At as _, Error, Result, walk};

/// One mounted tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Mount id; reused after unmount.
    pub id: u64,
    /// Mount id of the tree it is mounted on.
    pub parent: u64,
    /// Device of the file system (makedev form).
    pub dev: u64,
    /// Which directory of the file system is the root of this mount.
    pub root: PathBuf,
    /// Where it is mounted, relative to the reader's root.
    pub point: PathBuf,
    /// Options of this mount (`ro`, `nosuid`, ...).
    pub options: OsString,
    /// What is mounted.
    pub superblock: Superblock,
}

/// A file system instance, which all its mounts share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// File system type.
    pub fs_type: OsString,
    /// Source as the file system shows it.
    pub source: OsString,
    /// Whether it is read-only itself, whatever its mounts are.
    pub read_only: bool,
    /// Its options, still escaped: a value may hold an escaped comma.
    pub(super) options: Vec<u8>,
}

impl Superblock {
    /// Whether `name` is what it shows as its type.
    pub fn is(&self, name: &str) -> bool {
        self.fs_type == OsStr::from_bytes(name.as_bytes())
    }

    /// The values of an option, in order; an option without a value gives "".
    pub fn option<'m>(&'m self, key: &str) -> impl Iterator<Item = OsString> + use<'m> {
        let key = key.as_bytes().to_vec();
        self.options.split(|b| *b == b',').filter_map(move |option| {
            let mut halves = option.splitn(2, |b| *b == b'=');
            let found = halves.next() == Some(&key[..]);
            found.then(|| unescape(halves.next().unwrap_or_default()))
        })
    }
}

/// Parses the text of a mountinfo file.
pub fn parse(text: &[u8]) -> Result<Vec<Mount>> {
    let lines = text.split(|b| *b == b'\n').filter(|line| !line.is_empty());
    lines
        .map(|line| {
            parse_line(line).ok_or_else(|| Error::Garbled {
                path: "mountinfo".into(),
                reason: format!("line {:?}", String::from_utf8_lossy(line)),
            })
        })
        .collect()
}

fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|b| *b == b' ');
    let id = number(fields.next()?)?;
    let parent = number(fields.next()?)?;
    let mut dev = fields.next()?.splitn(2, |b| *b == b':');
    let (major, minor) = (number(dev.next()?)?, number(dev.next()?)?);
    let root = unescape(fields.next()?).into();
    let point = unescape(fields.next()?).into();
    let options = unescape(fields.next()?);
    // Any number of tagged fields, ended by a lone hyphen.
    fields.find(|field| field == b"-")?;
    let fs_type = unescape(fields.next()?);
    // An empty source leaves an empty field, which split keeps.
    let source = unescape(fields.next()?);
    let super_options = fields.next()?.to_vec();
    let read_only = super_options.split(|b| *b == b',').any(|option| option == b"ro");
    let superblock = Superblock { fs_type, source, read_only, options: super_options };
    let dev = rustix::fs::makedev(u32::try_from(major).ok()?, u32::try_from(minor).ok()?);
    Some(Mount { id, parent, dev, root, point, options, superblock })
}

fn number(field: &[u8]) -> Option<u64> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

/// Undoes `\ooo`; a backslash that starts no octal triple stays, as the kernel never writes one.
fn unescape(field: &[u8]) -> OsString {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        match rest {
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..] => {
                plain.push((a - b'0') * 64 + (b - b'0') * 8 + (c - b'0'));
                rest = after;
            }
            _ => {
                plain.push(*first);
                rest = tail;
            }
        }
    }
    OsString::from_vec(plain)
}

/// Reads the mounts that a process sees, `None` for the calling thread.
pub fn read(pid: Option<u32>) -> Result<Vec<Mount>> {
    let path = match pid {
        Some(pid) => PathBuf::from(format!("/proc/{pid}/mountinfo")),
        None => PathBuf::from("/proc/thread-self/mountinfo"),
    };
    parse(&std::fs::read(&path).at("read", &path)?)
}

/// The mounts at or below `path`, deepest first, so that they can be unmounted in this order.
pub fn below(mounts: Vec<Mount>, path: &Path) -> Vec<Mount> {
    let mut found: Vec<_> = mounts.into_iter().filter(|m| m.point.starts_with(path)).collect();
    // Later lines of the same point lie on top of earlier ones.
    found.reverse();
    found.sort_by_key(|m| std::cmp::Reverse(m.point.components().count()));
    found
}

/// The mount on top at exactly `path`, if one is mounted there.
pub fn at(mounts: Vec<Mount>, path: &Path) -> Option<Mount> {
    mounts.into_iter().rfind(|m| m.point == path)
}

/// The superblock below a descriptor: asked for alone where the kernel can, since a table of a
/// thousand overlays takes milliseconds; else looked up in it. `None`: it is not mounted in this
/// namespace.
pub fn superblock_of(fd: impl AsFd) -> Result<Option<Superblock>> {
    match statmount::superblock(fd.as_fd())? {
        Answer::Seen(superblock) => Ok(Some(superblock)),
        Answer::NotMounted => Ok(None),
        Answer::Unknown => in_table(fd.as_fd()),
    }
}

fn in_table(fd: BorrowedFd<'_>) -> Result<Option<Superblock>> {
    let id = walk::stat_fd(fd).at("stat", "a descriptor")?.mount_id;
    Ok(read(None)?.into_iter().find(|mount| mount.id == id).map(|mount| mount.superblock))
}

/// Tells that the mounts of this mount namespace changed: one came or went, or was remounted by
/// mount(2). A file system reconfigured by fsconfig(2), and another namespace, it does not tell of.
#[derive(Debug)]
pub struct Changes(std::fs::File);

impl Changes {
    /// From now on.
    pub fn new() -> Result<Self> {
        // The process's own, and not a thread's: it outlives the thread that opened it.
        let path = "/proc/self/mountinfo";
        std::fs::File::open(path).at("open", path).map(Self)
    }

    /// Whether there was a change since it was asked last. Does not wait.
    pub fn any(&self) -> Result<bool> {
        let now = Some(super::clock::now());
        super::clock::poll_until(self.0.as_fd(), rustix::event::PollFlags::PRI, now)
            .at("wait on", "the mounts")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] = b"22 27 0:21 / /proc rw,relatime - proc proc rw\n\
        50 27 0:45 / /a\\040b\\011c\\012d\\134e rw,nosuid shared:1 master:2 - overlay over ro,\
        lowerdir+=/l\\0541,lowerdir+=/l2,upperdir=/u\\075v,index=off\n\
        51 50 254:1 /x /a\\040b\\011c\\012d\\134e/\xff rw - ext4 /dev/vda rw\n\
        52 27 0:46 / /m rw - tmpfs  rw\n";

    #[test]
    fn escapes_and_foreign_bytes_come_back() {
        let mounts = parse(TEXT).unwrap();
        assert_eq!(mounts.len(), 4);
        assert_eq!(mounts[1].point, Path::new("/a b\tc\nd\\e"));
        assert_eq!(mounts[2].point.as_os_str().as_bytes(), b"/a b\tc\nd\\e/\xff");
        assert_eq!(mounts[2].root, Path::new("/x"));
        assert_eq!(mounts[2].dev, rustix::fs::makedev(254, 1));
        assert_eq!((mounts[3].superblock.source.as_bytes(), mounts[3].parent), (&b""[..], 27));
    }

    #[test]
    fn super_options_keep_commas_of_values_apart() {
        let overlay = &parse(TEXT).unwrap()[1].superblock;
        let lowers: Vec<_> = overlay.option("lowerdir+").collect();
        assert_eq!(lowers, ["/l,1", "/l2"]);
        assert_eq!(overlay.option("upperdir").collect::<Vec<_>>(), ["/u=v"]);
        assert!(overlay.read_only && overlay.is("overlay"));
        assert_eq!(overlay.option("upper").count(), 0);
    }

    #[test]
    fn a_superblock_asked_for_alone_is_the_one_of_the_table() {
        for point in ["/", "/proc", "/dev"] {
            let fd = std::fs::File::open(point).unwrap();
            let in_table = in_table(fd.as_fd()).unwrap().unwrap();
            match statmount::superblock(fd.as_fd()).unwrap() {
                Answer::Seen(mut alone) => {
                    // The table says rw or ro first.
                    let flag: &[u8] = if alone.read_only { b"ro" } else { b"rw" };
                    let rest = std::mem::take(&mut alone.options);
                    alone.options = [flag, &rest]
                        .into_iter()
                        .filter(|o| !o.is_empty())
                        .collect::<Vec<_>>()
                        .join(&b',');
                    assert_eq!(alone, in_table, "{point}");
                }
                Answer::Unknown => {
                    eprintln!("this kernel has no statmount with options and source")
                }
                Answer::NotMounted => panic!("{point} is mounted"),
            }
        }
    }

    #[test]
    fn what_is_below_comes_deepest_and_topmost_first() {
        let line = |id: u64, point: &str| format!("{id} 1 0:1 / {point} rw - tmpfs t rw\n");
        let text =
            [line(1, "/s"), line(2, "/s/a"), line(3, "/s/a"), line(4, "/s/a/b"), line(5, "/sx")];
        let mounts = parse(text.concat().as_bytes()).unwrap();
        let ids: Vec<_> = below(mounts.clone(), Path::new("/s")).iter().map(|m| m.id).collect();
        assert_eq!(ids, [4, 3, 2, 1]);
        assert_eq!(at(mounts, Path::new("/s/a")).map(|m| m.id), Some(3));
    }

    #[test]
    fn a_broken_line_is_an_error_and_not_a_missing_mount() {
        for bad in
            [&b"x"[..], b"1 2 0:1 / /a rw", b"1 2 0:1 / /a rw - tmpfs", b"1 2 01 / /a rw - t s o"]
        {
            assert!(parse(bad).is_err(), "{:?} was taken", String::from_utf8_lossy(bad));
        }
        assert!(!read(None).unwrap().is_empty());
    }
}
