//! What is in an overlay upper: its changes, their capture into one OCI layer, the layer store,
//! the patch bundle, and the removal of a session's directory.
//!
//! Synchronous. May use `kernel` (walking by descriptor), `model` (ids, digests, facts) and
//! `failpoint`; knows no lease, no database and no runtime. Everything that is read here, an upper
//! as well as a bundle, was written by somebody hostile: directories are entered by descriptor,
//! archives are read entry by entry with every size bounded, and nothing is ever executed.
//!
//! What this room keeps on disk below the state directory:
//!
//! ```text
//! sessions/<session id>/           `remove::create`, removed only by `remove::remove`
//!     marker -> <session id>       nothing without it is ever removed
//!     upper/ work/ merged/ run/    the overlay's directories and the session's own /run/overfence
//! sessions/.new-<session id>/      being made; `remove::sweep_unfinished` takes it away at start
//! trash/<session id>/              being removed; `remove::empty_trash` goes on with it at start
//! layers/<hex of the diff id>/
//!     layer.tar.zst                the layer, zstd; durable before anything names it
//!     layer.json                   `store::LayerInfo`: digests and sizes
//!     tree/                        the layer unpacked: a read-only lower of overlay mounts
//!     complete                     written last: `tree/` is whole and durable
//!     damaged                      why it must not be mounted, if something was found
//! layers/.tmp-*/                   being made, gathered or removed; `LayerStore::sweep` takes it away
//! ```
//!
//! A tree without `complete` is made again; a layer directory appears by one rename. So a crash at
//! any point leaves either the old state or rubbish that the sweeps at start know by name.
//!
//! Not carried by a layer: sockets (counted), inode flags such as immutable, access times.

mod blob;
pub mod bundle;
pub mod changes;
mod damage;
pub mod diff;
mod empty;
pub mod equal;
pub mod gather;
pub mod image;
pub mod layer;
pub mod lowers;
mod pack;
mod place;
pub mod print;
pub mod rebase;
pub mod remove;
#[cfg(test)]
mod round_trip;
mod runs;
pub mod size;
pub mod store;
mod tarfmt;
mod tree;
mod turns;
mod unpack;

pub use tarfmt::fuzz_entries;
pub use unpack::{copy_top, fuzz_unpack};

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::kernel;
use crate::model::code::Code;
use crate::model::head::Digest;
use crate::progress::Waiting;

/// A path for people: valid UTF-8 as it is, control characters and other bytes escaped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown(String);

impl Shown {
    /// Escapes the bytes of a path.
    pub fn bytes(path: &[u8]) -> Self {
        let mut text = String::new();
        for chunk in path.utf8_chunks() {
            for c in chunk.valid().chars() {
                match c.is_control() {
                    true => text.extend(c.escape_default()),
                    false => text.push(c),
                }
            }
            for byte in chunk.invalid() {
                text.push_str(&format!("\\x{byte:02x}"));
            }
        }
        if text.is_empty() { Self("(top directory)".to_owned()) } else { Self(text) }
    }
}

impl From<&Path> for Shown {
    fn from(path: &Path) -> Self {
        Self::bytes(path.as_os_str().as_bytes())
    }
}

impl std::fmt::Display for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// What went wrong in this room.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A call failed; the source says how.
    #[error("cannot {op} {path}")]
    Call {
        /// What was tried, a verb phrase.
        op: &'static str,
        /// On what.
        path: Shown,
        /// The answer.
        #[source]
        source: std::io::Error,
    },
    /// Something in the upper has no faithful form in a layer.
    #[error("{path} cannot go into a layer: {why}")]
    NotPortable {
        /// Path inside the upper.
        path: Shown,
        /// Why, and what to do.
        why: String,
    },
    /// The upper was written to while it was read.
    #[error("{path} changed while it was read; checkpoint again, or freeze the session first")]
    Changed {
        /// Path inside the upper.
        path: Shown,
    },
    /// An archive entry that a layer must not contain.
    #[error("entry {path} is refused: {why}; the archive is damaged or hostile")]
    Hostile {
        /// Path as the archive gives it.
        path: Shown,
        /// The rule it breaks.
        why: String,
    },
    /// Stored bytes are not what their name says.
    #[error("{what} is damaged: {why}; restore it from another copy")]
    Corrupt {
        /// Which object.
        what: String,
        /// What differs.
        why: String,
    },
    /// A stored layer is not what its name says.
    #[error(
        "layer {layer} is damaged: {why}; bring its directory below `layers/` back from another copy (a \
         backup has one), or revert to a version without it"
    )]
    Damaged {
        /// Which layer.
        layer: Digest,
        /// What was found.
        why: String,
    },
    /// The store has no such layer.
    #[error(
        "layer {0} is not in this host's layer store; bring its directory below `layers/` back from \
         another copy (a backup has one), or revert to a version without it"
    )]
    NoLayer(Digest),
    /// The layer is there but its tree was never finished.
    #[error("layer {0} is not unpacked yet; it is unpacked at the next mount")]
    NotComplete(Digest),
    /// A patch bundle that breaks the form.
    #[error("bundle {path} is refused: {why}")]
    Bundle {
        /// The bundle, or the file in it.
        path: Shown,
        /// The rule it breaks.
        why: String,
    },
    /// Who asked does not want it any more.
    #[error("it was stopped before its end, and nothing of it is left")]
    Stopped,
    /// The target is taken.
    #[error("{path} exists already and is left alone; choose another name")]
    Exists {
        /// The taken path.
        path: Shown,
    },
    /// The directory is not the session's: it has no marker or another's.
    #[error("{path} is not removed: {why}; look at it by hand")]
    Unmarked {
        /// The directory.
        path: Shown,
        /// What the marker says.
        why: String,
    },
    /// Somebody else removes it at this moment.
    #[error("{path} is being removed already; wait for that to end")]
    Removing {
        /// The directory.
        path: Shown,
    },
    /// Something is mounted below.
    #[error("{path} is not removed: mounted at {mounts}; unmount it first")]
    Mounted {
        /// The directory.
        path: Shown,
        /// The mount points found.
        mounts: String,
    },
}

impl Error {
    /// The errno behind this error, where the kernel gave one.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Call { source, .. } => Errno::from_io_error(source),
            _ => None,
        }
    }

    /// The stable code it is answered with.
    pub fn code(&self) -> Code {
        match self {
            Self::NotPortable { .. } => Code::UpperRefused,
            Self::Exists { .. } => Code::DestinationExists,
            Self::Changed { .. } | Self::Stopped | Self::Removing { .. } => Code::Busy,
            Self::Bundle { .. } => Code::BundleInvalid,
            Self::Call { .. } if self.errno() == Some(Errno::NOSPC) => Code::NoSpace,
            Self::Damaged { .. } | Self::NoLayer(_) | Self::NotComplete(_) => Code::LayerDamaged,
            Self::Call { .. }
            | Self::Hostile { .. }
            | Self::Corrupt { .. }
            | Self::Unmarked { .. }
            | Self::Mounted { .. } => Code::Internal,
        }
    }

    /// What the reading of a stored layer met, as damage of that layer where its bytes are wrong or not
    /// there.
    fn in_layer(self, layer: Digest) -> Self {
        let own = format!("layer {layer}");
        let why = match &self {
            Self::Corrupt { what, why } if *what == own => why.clone(),
            Self::Corrupt { what, why } => format!("{what}: {why}"),
            Self::Hostile { path, why } => format!("entry {path}: {why}"),
            // A decoder's complaint has no errno.
            Self::Call { source, .. } if matches!(self.errno(), None | Some(Errno::NOENT)) => {
                format!("{self}: {source}")
            }
            _ => return self,
        };
        Self::Damaged { layer, why }
    }

    fn hostile(path: &[u8], why: impl Into<String>) -> Self {
        Self::Hostile { path: Shown::bytes(path), why: why.into() }
    }
}

impl From<kernel::Error> for Error {
    fn from(error: kernel::Error) -> Self {
        match error {
            kernel::Error::Call { op, path, source } => {
                Self::Call { op, path: Shown::from(&*path), source: source.into() }
            }
            other => Self::Call {
                op: "walk",
                path: Shown::bytes(b""),
                source: std::io::Error::other(other),
            },
        }
    }
}

/// Asked now and then by long work whether it is still wanted, and told how far it is.
pub type Stop<'a> = &'a dyn Waiting;

/// [`Error::Stopped`] once `stop` says so.
fn go_on(stop: Stop<'_>) -> Result<()> {
    if stop.over() { Err(Error::Stopped) } else { Ok(()) }
}

/// A reader that fails once it is not wanted any more, and counts its bytes.
struct Stoppable<'s, R> {
    inner: R,
    stop: Stop<'s>,
}

impl<R: std::io::Read> std::io::Read for Stoppable<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        go_on(self.stop).map_err(std::io::Error::other)?;
        let n = self.inner.read(buffer)?;
        self.stop.did(n as u64, 0);
        Ok(n)
    }
}

/// Results of this room.
pub type Result<T> = std::result::Result<T, Error>;

/// Adds what was tried, and on what, to an answer.
trait At<T> {
    fn at(self, op: &'static str, path: impl AsRef<Path>) -> Result<T>;
}

impl<T, E: Into<std::io::Error>> At<T> for std::result::Result<T, E> {
    fn at(self, op: &'static str, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|e| Error::Call { op, path: Shown::from(path.as_ref()), source: e.into() })
    }
}

/// The path of bytes that came from a file system or an archive.
fn path_of(bytes: &[u8]) -> &Path {
    Path::new(std::ffi::OsStr::from_bytes(bytes))
}

/// Makes the names in a directory durable.
fn sync_dir(dir: &Path) -> Result<()> {
    let file = std::fs::File::open(dir).at("open", dir)?;
    file.sync_all().at("fsync", dir)
}

/// A name in `dir` that nothing else has: `<prefix><random hex>`.
fn unique_name(dir: &Path, prefix: &str) -> Result<PathBuf> {
    let random = getrandom::u64()
        .map_err(|e| std::io::Error::other(e.to_string()))
        .at("draw a random name in", dir)?;
    Ok(dir.join(format!("{prefix}{random:016x}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_names_are_shown_escaped() {
        for (bytes, want) in [
            (&b"plain/name"[..], "plain/name"),
            ("\u{e4}".as_bytes(), "\u{e4}"),
            (b"a\nb", "a\\nb"),
            (b"\xff\x01", "\\xff\\u{1}"),
            (b"", "(top directory)"),
        ] {
            assert_eq!(Shown::bytes(bytes).to_string(), want);
        }
    }
}
