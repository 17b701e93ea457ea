//! Builds an overlay that is mounted nowhere yet. The three styles are the three ways kernels take
//! layers; the first that the running kernel knows is used.

use std::ffi::OsStr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, OpenTreeFlags, UnmountFlags,
};

use super::{Spec, label};
use crate::kernel::walk::{self, Info};
use crate::kernel::{At as _, Error, Result, idmap, ns, proc_path};

/// Alterations of files that an unaware reader of the upper would misread are switched off.
const OPTIONS: [(&str, &str); 3] = [("redirect_dir", "off"), ("metacopy", "off"), ("index", "off")];

/// fsconfig(2) takes strings of up to 255 bytes.
const STRING_MAX: usize = 255;
/// mount(2) takes a page of options, with the NUL.
const PAGE: usize = 4096;

/// How layers are handed to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// As descriptors (6.13): any bytes in names, no limit but the kernel's 500 layers.
    Descriptors,
    /// As `lowerdir+` strings (6.8).
    Appended,
    /// As one `lowerdir=` string through mount(2).
    Joined,
}

impl Style {
    const ALL: [Self; 3] = [Self::Descriptors, Self::Appended, Self::Joined];
}

/// A layer, held open so that it is the one that was looked at.
struct Layer {
    fd: OwnedFd,
    path: PathBuf,
}

struct Layers {
    /// Topmost first, as overlay wants them.
    lowers: Vec<Layer>,
    upper: Layer,
    work: Layer,
    label: String,
}

/// Why a build did not succeed.
enum Fault {
    /// This kernel does not know the style.
    Unknown,
    Real(Error),
}

impl From<Error> for Fault {
    fn from(e: Error) -> Self {
        Self::Real(e)
    }
}

/// Builds in the best style the kernel has.
pub(super) fn detached(spec: &Spec) -> Result<OwnedFd> {
    prepared(spec, &Style::ALL)
}

/// Builds in one style.
pub(super) fn detached_styled(spec: &Spec, style: Style) -> Result<OwnedFd> {
    prepared(spec, &[style])
}

fn prepared(spec: &Spec, styles: &[Style]) -> Result<OwnedFd> {
    if spec.lowers.is_empty() {
        let reason = "an overlay has at least one, give an empty directory".to_owned();
        return Err(Error::Limit { what: "a list of no lower layers".to_owned(), reason });
    }
    match &spec.mapped {
        None => any_style(spec, styles),
        Some(map) => {
            let directories = directories(spec)?;
            idmap::with_layers_mapped(map, &directories, || any_style(spec, styles))
        }
    }
}

/// The directories that have to be shown mapped: each layer, and the one that upper and work share,
/// since these must stay on one mount.
fn directories(spec: &Spec) -> Result<Vec<PathBuf>> {
    let bad =
        |reason: &str| Error::BadUpper { path: spec.upper.clone(), reason: reason.to_owned() };
    let shared = spec.upper.parent().ok_or_else(|| bad("it is the root directory"))?;
    if spec.work.parent() != Some(shared) {
        return Err(bad("its work directory has to lie in the same directory"));
    }
    Ok(spec.lowers.iter().cloned().chain([shared.to_owned()]).collect())
}

fn any_style(spec: &Spec, styles: &[Style]) -> Result<OwnedFd> {
    let layers = open_layers(spec)?;
    for style in styles {
        let built = match style {
            Style::Descriptors | Style::Appended => by_fsconfig(&layers, *style),
            // With mapped layers it is in a copy already.
            Style::Joined if spec.mapped.is_some() => {
                by_mount(&layers, &spec.target).map_err(Fault::Real)
            }
            Style::Joined => ns::in_a_copy("an overlay", || {
                // Those of the copy: a kernel may take layers of the caller's namespace alone.
                by_mount(&open_layers(spec)?, &spec.target)
            })
            .map_err(Fault::Real),
        };
        match built {
            Err(Fault::Unknown) => {}
            Err(Fault::Real(e)) => return Err(e),
            Ok(root) => return Ok(root),
        }
    }
    Err(Error::TooOld { feature: "this way to mount an overlay" })
}

fn open_layers(spec: &Spec) -> Result<Layers> {
    let open = |path: &PathBuf| {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty()).at("open layer", path)?;
        Ok::<_, Error>(Layer { fd, path: path.clone() })
    };
    let lowers = spec.lowers.iter().rev().map(open).collect::<Result<Vec<_>>>()?;
    let (upper, work) = (open(&spec.upper)?, open(&spec.work)?);
    let info = stat(&upper)?;
    if info.mount_id != stat(&work)?.mount_id {
        let reason = format!("{} is on another mount; keep both together", work.path.display());
        return Err(Error::BadUpper { path: upper.path, reason });
    }
    Ok(Layers { lowers, upper, work, label: label(&info) })
}

fn stat(layer: &Layer) -> Result<Info> {
    walk::stat_fd(&layer.fd).at("stat", &layer.path)
}

/// Whether overlay reads options as they come. Before 6.5 it did not: any key is taken, up to a page
/// in all, and what is not known is refused (and logged by the kernel) only by the mount.
fn reads_options(upper: &Path) -> Result<bool> {
    let fs = context(upper)?;
    Ok(rustix::mount::fsconfig_set_string(fs.as_fd(), "overfence", "no such option").is_err())
}

fn context(upper: &Path) -> Result<OwnedFd> {
    rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)
        .at("open a context for overlay", upper)
}

fn by_fsconfig(layers: &Layers, style: Style) -> std::result::Result<OwnedFd, Fault> {
    let upper = &layers.upper.path;
    if style == Style::Appended && !reads_options(upper)? {
        return Err(Fault::Unknown);
    }
    let fs = context(upper)?;
    let fs = fs.as_fd();
    // The first lower tells whether the kernel knows the style.
    let mut known = false;
    for lower in &layers.lowers {
        match give(fs, "lowerdir+", lower, style) {
            Err(_) if !known => return Err(Fault::Unknown),
            answer => answer.map_err(|e| refused(fs, e, "add layer", &lower.path))?,
        }
        known = true;
    }
    for (key, layer) in [("upperdir", &layers.upper), ("workdir", &layers.work)] {
        give(fs, key, layer, style)
            .map_err(|e| refused(fs, e, "set upper or work", &layer.path))?;
    }
    for (key, value) in OPTIONS.into_iter().chain([("source", &*layers.label)]) {
        rustix::mount::fsconfig_set_string(fs, key, value)
            .map_err(|e| refused(fs, e, "set the options of", upper))?;
    }
    rustix::mount::fsconfig_create(fs).map_err(|e| refused(fs, e, "mount overlay with", upper))?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    rustix::mount::fsmount(fs, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
        .at("mount overlay with", upper)
        .map_err(Fault::Real)
}

fn give(fs: BorrowedFd<'_>, key: &str, layer: &Layer, style: Style) -> rustix::io::Result<()> {
    if style == Style::Descriptors {
        return rustix::mount::fsconfig_set_fd(fs, key, &layer.fd);
    }
    // upperdir and workdir are unescaped by the kernel, lowerdir+ is taken as it is.
    let name = match key {
        "lowerdir+" => layer.path.as_os_str().as_bytes().to_vec(),
        _ => escape(&layer.path),
    };
    if name.len() > STRING_MAX {
        return rustix::mount::fsconfig_set_string(fs, key, proc_path(&layer.fd));
    }
    rustix::mount::fsconfig_set_string(fs, key, OsStr::from_bytes(&name))
}

/// The error with what the kernel logged on the context, which says more than an errno.
fn refused(fs: BorrowedFd<'_>, source: Errno, op: &'static str, path: &Path) -> Error {
    let mut log = Vec::new();
    let mut line = [0; 512];
    while let Ok(len) = rustix::io::read(fs, &mut line) {
        if len == 0 {
            break;
        }
        log.push(String::from_utf8_lossy(&line[..len]).trim().to_owned());
    }
    Error::Refused { op, path: path.to_owned(), log: log.join("; "), source }
}

/// mount(2) at the target, then only a detached copy of it stays. In a private copy of the mount
/// namespace: for everybody else no path leads to it, and a crash in between leaves nothing mounted.
fn by_mount(layers: &Layers, target: &Path) -> Result<OwnedFd> {
    let options = joined_options(layers)?;
    let options = std::ffi::CString::new(options).map_err(|_| Error::Limit {
        what: "a layer's path".to_owned(),
        reason: "it holds a NUL".to_owned(),
    })?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount(&*layers.label, target, "overlay", flags, Some(&*options))
        .at("mount overlay at", target)?;
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let copy = rustix::mount::open_tree(CWD, target, flags).at("clone the mount at", target);
    rustix::mount::unmount(target, UnmountFlags::NOFOLLOW).at("unmount", target)?;
    copy
}

/// With true paths if they fit a page, else with the short names of our descriptors.
fn joined_options(layers: &Layers) -> Result<Vec<u8>> {
    let with = |name: &dyn Fn(&Layer) -> Vec<u8>| {
        let mut text = b"lowerdir=".to_vec();
        text.extend(layers.lowers.iter().map(name).collect::<Vec<_>>().join(&b':'));
        for (key, layer) in [("upperdir", &layers.upper), ("workdir", &layers.work)] {
            text.extend([b",", key.as_bytes(), b"=", &name(layer)].concat());
        }
        for (key, value) in OPTIONS {
            text.extend(format!(",{key}={value}").into_bytes());
        }
        text
    };
    let by_path = with(&|layer| escape(&layer.path));
    let text = if by_path.len() < PAGE {
        by_path
    } else {
        with(&|layer| proc_path(&layer.fd).as_os_str().as_bytes().to_vec())
    };
    if text.len() >= PAGE {
        return Err(Error::Limit {
            what: format!("an overlay of {} lower layers", layers.lowers.len()),
            reason: "this kernel takes 4096 bytes of mount options; use fewer layers, or 6.8 and \
                     later"
                .to_owned(),
        });
    }
    Ok(text)
}

/// Escapes what separates options and layers.
fn escape(path: &Path) -> Vec<u8> {
    let mut text = Vec::new();
    for b in path.as_os_str().as_bytes() {
        if b"\\:,".contains(b) {
            text.push(b'\\');
        }
        text.push(*b);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separators_are_escaped_and_nothing_else() {
        assert_eq!(escape(Path::new("/a b\n,c:d\\e")), b"/a b\n\\,c\\:d\\\\e");
    }
}
