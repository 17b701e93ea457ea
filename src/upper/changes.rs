//! What an upper records: entries made or modified, whiteouts, opaque directories.
//!
//! Follows Documentation/filesystems/overlayfs.rst. Overlay marks come in two formats, by the
//! mount option `userxattr`. On mounts without it, ours, `user.overlay.*` is an ordinary attribute,
//! which the owner of a file may set; it is carried as such and means nothing. On the others a
//! `trusted.overlay.*` mark is another tool's and is refused, since one of the two readings would
//! resurrect deleted files.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;

use rustix::fs::FileType;
use rustix::io::Errno;

use super::print::Printer;
use super::tree::{Step, Walk, reopen};
use super::{At as _, Error, Result, Shown, path_of};
use crate::kernel::walk::{Dir, Entry, Info, xattrs_of_open};

/// Where overlay keeps its marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Format {
    /// `trusted.overlay.*`: the default of overlay mounts, and of all of ours.
    #[default]
    Trusted,
    /// `user.overlay.*`: mounts with `userxattr`.
    User,
}

impl Format {
    fn prefix(self) -> &'static [u8] {
        match self {
            Self::Trusted => b"trusted.overlay.",
            Self::User => b"user.overlay.",
        }
    }
}

/// The attributes of one object have at most this many bytes, names and values: xfs and btrfs let its owner
/// set hundreds of MiB.
const MAX_XATTRS: usize = 4 << 20;

/// Extended attributes by name.
pub type Xattrs = BTreeMap<Vec<u8>, Vec<u8>>;

/// One thing an upper records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Path relative to the upper, without leading slash; empty for the upper itself.
    pub path: Vec<u8>,
    /// What it is.
    pub kind: Kind,
    /// Owner, mode, times and so on.
    pub info: Info,
    /// Extended attributes, overlay's own left out.
    pub xattrs: Xattrs,
}

/// The kinds of changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A directory; `opaque` hides what lower layers have in it.
    Directory {
        /// Whether it hides the lower directory of the same name.
        opaque: bool,
    },
    /// A regular file.
    File,
    /// A symlink and where it points.
    Symlink(Vec<u8>),
    /// A named pipe.
    Fifo,
    /// A socket; a layer cannot carry it.
    Socket,
    /// A character or block device; its number is in `info.rdev`.
    Device,
    /// The name was deleted.
    Whiteout,
}

impl Change {
    /// The last component of the path.
    pub fn name(&self) -> &[u8] {
        self.path.rsplit(|b| *b == b'/').next().unwrap_or(&self.path)
    }
}

impl std::fmt::Display for Change {
    /// One line for people: `-` deleted, `!` directory replaced, `+` made or modified.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (sign, end) = match &self.kind {
            Kind::Whiteout => ('-', ""),
            Kind::Directory { opaque: true } => ('!', "/"),
            Kind::Directory { opaque: false } => ('+', "/"),
            Kind::File | Kind::Symlink(_) | Kind::Fifo | Kind::Socket | Kind::Device => ('+', ""),
        };
        write!(f, "{sign} {}{end}", Shown::bytes(&self.path))
    }
}

/// Overlay's marks on one object.
#[derive(Debug, Default, PartialEq, Eq)]
struct Marks {
    opaque: bool,
    /// The directory holds whiteouts of the xattr form.
    has_xattr_whiteouts: bool,
    whiteout: bool,
}

/// What the kernel told, unless that is more than anybody is to hold in memory.
fn attributes(
    path: &[u8],
    told: rustix::io::Result<Vec<(OsString, Vec<u8>)>>,
) -> Result<Vec<(OsString, Vec<u8>)>> {
    match told {
        Err(Errno::TOOBIG) => Err(Error::NotPortable {
            path: Shown::bytes(path),
            why: "its attributes have more than 4 MiB; remove some of them".to_owned(),
        }),
        told => told.at("read xattrs of", path_of(path)),
    }
}

/// Splits overlay's marks from the other attributes.
fn marks(path: &[u8], format: Format, all: Vec<(OsString, Vec<u8>)>) -> Result<(Marks, Xattrs)> {
    let refuse = |why: String| Err(Error::NotPortable { path: Shown::bytes(path), why });
    let (mut marks, mut rest) = (Marks::default(), Xattrs::new());
    for (name, value) in all {
        let name = name.as_bytes();
        let shown = Shown::bytes(name);
        // On our mounts `user.overlay.*` is an attribute like others, and anybody's to set.
        if format == Format::User && name.starts_with(Format::Trusted.prefix()) {
            return refuse(format!(
                "it carries {shown}, a mark of the other overlay format; remove that attribute"
            ));
        }
        let Some(mark) = name.strip_prefix(format.prefix()) else {
            rest.insert(name.to_vec(), value);
            continue;
        };
        match (mark, &value[..]) {
            (b"opaque", b"y") => marks.opaque = true,
            (b"opaque", b"x") => marks.has_xattr_whiteouts = true,
            (b"whiteout", _) => marks.whiteout = true,
            // Bookkeeping that means nothing outside of its own mount, and copied-up inode flags.
            (b"origin" | b"impure" | b"nlink" | b"upper" | b"uuid" | b"protattr", _) => {}
            _ => {
                return refuse(format!(
                    "it carries {shown}, so its content is in another layer; the upper was \
                     mounted with redirect_dir, metacopy or an option newer than this build"
                ));
            }
        }
    }
    Ok((marks, rest))
}

/// The changes in an upper in byte order, parents before children.
pub struct Changes<'p> {
    walk: Walk,
    format: Format,
    /// For each level: whether its directory holds whiteouts of the xattr form.
    xattr_whiteouts: Vec<bool>,
    top: Option<Change>,
    live: bool,
    reading: bool,
    /// Keeps the mount that is walked through.
    apart: Option<OwnedFd>,
    file: Option<File>,
    printer: Option<&'p mut Printer>,
}

impl<'p> Changes<'p> {
    /// Starts to walk an upper. The first change is the upper's own top directory, whose owner,
    /// mode and times the merged top directory has.
    pub fn new(upper: BorrowedFd<'_>, format: Format) -> Result<Self> {
        let dir = reopen(upper, std::path::Path::new(""))?;
        let xattrs = attributes(b"", xattrs_of_open(&dir, MAX_XATTRS))?;
        let (marks, xattrs) = marks(b"", format, xattrs)?;
        let kind = Kind::Directory { opaque: marks.opaque };
        let top = Change { path: Vec::new(), kind, info: dir.own_stat()?, xattrs };
        Ok(Self {
            walk: Walk::new(upper)?,
            format,
            xattr_whiteouts: vec![marks.has_xattr_whiteouts],
            top: Some(top),
            live: false,
            reading: false,
            apart: None,
            file: None,
            printer: None,
        })
    }

    /// For who reads all files: each is opened as it is met, for [`Changes::file`]. `apart` is the same
    /// directory through a mount of its own, see `mount_attr::without_devices`.
    pub(super) fn reading(
        upper: BorrowedFd<'_>,
        format: Format,
        apart: Option<OwnedFd>,
    ) -> Result<Self> {
        let changes = match &apart {
            Some(apart) => Self::new(apart.as_fd(), format)?,
            None => Self::new(upper, format)?,
        };
        Ok(Self { reading: true, apart, ..changes })
    }

    /// The file that the change returned last describes, opened.
    pub(super) fn file(&mut self) -> Option<File> {
        self.file.take()
    }

    /// For an upper that is written to meanwhile: what is gone when it is looked at is passed over.
    pub(super) fn live(self) -> Self {
        Self { live: true, ..self }
    }

    /// Makes a print of the upper on the way.
    pub(super) fn printed(self, printer: &'p mut Printer) -> Self {
        Self { printer: Some(printer), ..self }
    }

    /// The directory that holds the change returned last; for a directory, itself.
    pub(super) fn here(&self) -> &Dir {
        self.walk.here()
    }

    fn advance(&mut self) -> Result<Option<Change>> {
        if let Some(top) = self.top.take() {
            return Ok(Some(top));
        }
        loop {
            match self.walk.step()? {
                None => return Ok(None),
                Some(Step::Left) => {
                    self.xattr_whiteouts.pop();
                    if let Some(printer) = &mut self.printer {
                        printer.left();
                    }
                }
                Some(Step::Name(entry)) => match self.change(&entry) {
                    Err(fault) if self.live && super::diff::vanished(&fault) => {}
                    seen => return seen.map(Some),
                },
            }
        }
    }

    fn change(&mut self, entry: &Entry) -> Result<Change> {
        let here = self.walk.here();
        let path = here.path().join(&entry.name).as_os_str().as_bytes().to_vec();
        let shown = || here.path().join(&entry.name);
        let regular = entry.kind == FileType::RegularFile;
        let at_once = match &self.apart {
            Some(_) if regular => here.open_at_once(&entry.name),
            Some(_) | None => None,
        };
        let mut print = |info: &Info| {
            if let Some(printer) = &mut self.printer {
                printer.name(here.path(), &entry.name, info);
            }
        };
        let (info, xattrs) = match at_once {
            Some((file, info)) => {
                print(&info);
                let xattrs = xattrs_of_open(&file, MAX_XATTRS);
                self.file = Some(file.into());
                (info, xattrs)
            }
            None => {
                let held = here.hold(&entry.name)?;
                print(&held.info);
                if held.info.is_whiteout() {
                    let (kind, info) = (Kind::Whiteout, held.info);
                    return Ok(Change { path, kind, info, xattrs: Xattrs::new() });
                }
                if self.reading && held.info.kind == FileType::RegularFile {
                    self.file = Some(held.open().at("open file", shown())?.into());
                }
                (held.info, held.xattrs(MAX_XATTRS))
            }
        };
        let (marks, xattrs) = marks(&path, self.format, attributes(&path, xattrs)?)?;
        if marks.whiteout {
            if info.kind == FileType::RegularFile
                && info.size == 0
                && self.xattr_whiteouts.last() == Some(&true)
            {
                return Ok(Change { path, kind: Kind::Whiteout, info, xattrs });
            }
            return Err(Error::NotPortable {
                path: Shown::bytes(&path),
                why: "it is marked as a whiteout but is not an empty file in a directory that \
                      says it has such; overlay shows it as a file"
                    .to_owned(),
            });
        }
        let kind = match info.kind {
            FileType::Directory => Kind::Directory { opaque: marks.opaque },
            FileType::RegularFile => Kind::File,
            FileType::Symlink => Kind::Symlink(here.read_link(&entry.name)?.as_bytes().to_vec()),
            FileType::Fifo => Kind::Fifo,
            FileType::Socket => Kind::Socket,
            FileType::CharacterDevice | FileType::BlockDevice => Kind::Device,
            FileType::Unknown => {
                return Err(Error::NotPortable {
                    path: Shown::bytes(&path),
                    why: "the kernel does not say what kind of file it is".to_owned(),
                });
            }
        };
        if info.kind == FileType::Directory {
            self.walk.enter(entry)?;
            self.xattr_whiteouts.push(marks.has_xattr_whiteouts);
        }
        Ok(Change { path, kind, info, xattrs })
    }
}

impl Iterator for Changes<'_> {
    type Item = Result<Change>;

    fn next(&mut self) -> Option<Self::Item> {
        self.advance().transpose()
    }
}

/// Whether an upper records nothing.
pub fn is_empty(upper: BorrowedFd<'_>) -> Result<bool> {
    let dir = reopen(upper, std::path::Path::new(""))?;
    let mut entries = dir.entries()?;
    match entries.next() {
        None => Ok(true),
        Some(entry) => entry.map(|_| false).map_err(Error::from),
    }
}

/// Whether an attribute is one of overlay's own marks, in either format.
pub(super) fn is_overlay_mark(name: &[u8]) -> bool {
    [Format::Trusted, Format::User].iter().any(|f| name.starts_with(f.prefix()))
}

/// Whether an attribute means nothing to our mounts, but is a mark to those with `userxattr`. Whoever
/// owns a file may set such.
pub(super) fn is_foreign_mark(name: &[u8]) -> bool {
    name.starts_with(Format::User.prefix())
}

/// Attributes without overlay's own marks, as those of a [`Change`] of an upper of ours.
pub(super) fn without_marks(all: Vec<(std::ffi::OsString, Vec<u8>)>) -> Xattrs {
    let named = all.into_iter().map(|(name, value)| (name.as_bytes().to_vec(), value));
    named.filter(|(name, _)| !name.starts_with(Format::Trusted.prefix())).collect()
}

/// The name of the mark by which overlay notes of which lower file a file is a copy.
pub(super) fn origin_mark() -> &'static OsStr {
    OsStr::new("trusted.overlay.origin")
}

/// The name of the mark that makes a directory opaque on mounts without `userxattr`.
pub(super) fn opaque_mark() -> &'static OsStr {
    OsStr::new("trusted.overlay.opaque")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn set(path: &Path, name: &str, value: &[u8]) {
        rustix::fs::lsetxattr(path, name, value, rustix::fs::XattrFlags::empty()).unwrap();
    }

    fn list(top: &Path, format: Format) -> Result<Vec<String>> {
        let dir = std::fs::File::open(top).unwrap();
        Changes::new(dir.as_fd(), format)?.map(|c| c.map(|c| c.to_string())).collect()
    }

    #[test]
    fn an_upper_is_empty_until_something_is_in_it() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = std::fs::File::open(tmp.path()).unwrap();
        assert!(is_empty(dir.as_fd()).unwrap());
        std::fs::write(tmp.path().join("f"), b"").unwrap();
        assert!(!is_empty(dir.as_fd()).unwrap());
    }

    #[test]
    fn both_whiteout_forms_and_user_opaque_are_read() {
        let tmp = tempfile::tempdir().unwrap();
        std::fs::create_dir(tmp.path().join("d")).unwrap();
        set(&tmp.path().join("d"), "user.overlay.opaque", b"x");
        std::fs::write(tmp.path().join("d/gone"), b"").unwrap();
        set(&tmp.path().join("d/gone"), "user.overlay.whiteout", b"y");
        std::fs::create_dir(tmp.path().join("o")).unwrap();
        set(&tmp.path().join("o"), "user.overlay.opaque", b"y");
        let want = ["+ (top directory)/", "+ d/", "- d/gone", "! o/"];
        assert_eq!(list(tmp.path(), Format::User).unwrap(), want);
        // To a mount without `userxattr` they are attributes like others.
        let want = ["+ (top directory)/", "+ d/", "+ d/gone", "+ o/"];
        assert_eq!(list(tmp.path(), Format::Trusted).unwrap(), want);
    }

    #[test]
    fn a_whiteout_mark_where_overlay_ignores_it_is_refused() {
        let tmp = tempfile::tempdir().unwrap();
        std::fs::write(tmp.path().join("f"), b"").unwrap();
        set(&tmp.path().join("f"), "user.overlay.whiteout", b"y");
        assert!(matches!(list(tmp.path(), Format::User), Err(Error::NotPortable { .. })));
    }

    #[test]
    fn metacopy_and_redirect_are_refused_by_path() {
        for mark in ["metacopy", "redirect", "from-the-future"] {
            let tmp = tempfile::tempdir().unwrap();
            std::fs::write(tmp.path().join("file"), b"").unwrap();
            set(&tmp.path().join("file"), &format!("user.overlay.{mark}"), b"/x");
            let error = list(tmp.path(), Format::User).unwrap_err().to_string();
            assert!(error.starts_with("file cannot") && error.contains(mark), "{error}");
        }
    }
}
