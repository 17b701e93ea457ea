//! Captures an upper, or a plain directory, as one OCI layer in the layer store.
//!
//! Canonical: the same upper gives the same diff id (sha256 of the uncompressed tar), whenever and
//! wherever it is captured. Entries come in byte order, parents before children, a directory before
//! its opaque marker; of a file with several names the first carries the bytes and the others link
//! to it. The top directory itself is an entry (`./`), since the merged top has its mode and owner.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::blob::{Hashed, Sink, read_back};
use super::changes::{Changes, Format};
use super::diff::Judge;
use super::gather::Aside;
use super::lowers::Lowers;
use super::pack::{Pack, Tally};
use super::print::Printer;
use super::store::{LayerInfo, LayerStore};
use super::tarfmt::{self, Writer};
use super::{At as _, Error, Result, Shown, Stop, path_of};
use crate::kernel::mount_attr::without_devices;
use crate::model::head::Digest;

/// What is captured.
#[derive(Clone, Copy, Debug)]
pub enum Source<'fd> {
    /// An overlay upper, its marks read in this format.
    Upper(BorrowedFd<'fd>, Format),
    /// A plain directory that becomes a first layer; overlay marks in it are refused.
    Directory(BorrowedFd<'fd>),
}

/// Whether the writers are stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writers {
    /// They may run: a file that changes while it is read fails the capture.
    Running,
    /// They are frozen: the kernel may still finish a write that had begun; such files are counted.
    Frozen,
}

/// A layer that is in the store, durable, and how it came there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Captured {
    /// Digest of the uncompressed tar: the layer's name in heads.
    pub diff_id: Digest,
    /// Digest of the compressed file.
    pub blob_digest: Digest,
    /// Bytes of the uncompressed tar.
    pub size_uncompressed: u64,
    /// Bytes of the compressed file.
    pub size_compressed: u64,
    /// Entries in the tar, whiteouts and opaque markers among them.
    pub entries: u64,
    /// Sockets left out: a layer cannot carry them.
    pub skipped_sockets: u64,
    /// Files that changed while they were read, with the writers frozen.
    pub changed: u64,
    /// Names that stand escaped in the archive.
    pub escaped: Escaped,
    /// How long it took.
    pub took: Duration,
}

/// Names that mean a deletion in an archive, or look like an escaped one, and were escaped
/// (docs/adr/0009).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Escaped {
    /// How many entries have such a name in their path.
    pub entries: u64,
    /// The first of them: the true path, for people, and the path in the archive.
    pub first: Vec<[String; 2]>,
}

impl Escaped {
    /// Paths of this many bytes in all are listed.
    const LISTED: usize = 64 << 10;

    pub(super) fn note(&mut self, path: &[u8], listed: &mut usize) {
        let archived = tarfmt::escaped(path);
        if *archived == *path {
            return;
        }
        self.entries += 1;
        *listed += path.len() + archived.len();
        if *listed <= Self::LISTED {
            self.first.push([path, &archived].map(|path| Shown::bytes(path).to_string()));
        }
    }
}

/// Captures `source` into `store`. When it returns, the layer is durable. Once `stop` says so it ends
/// with [`Error::Stopped`] and leaves nothing.
///
/// Memory is bounded but for the names of the directories on the way to where it is, which are
/// sorted, and the first names of files with several, of which there are at most 256 MiB.
pub fn capture(
    source: Source<'_>,
    writers: Writers,
    store: &LayerStore,
    stop: Stop<'_>,
) -> Result<Captured> {
    captured(source, store, stop, |(changes, plain), tally, file| {
        pack_into(file, changes, |out| Pack::new(out, plain, writers, stop, tally))
    })
}

/// As [`capture`], for a bundle: each entry says what it is to `base`, the layers that the upper was
/// mounted on. The layer is another one than without. It is read back from its file, whole, as it is
/// written, and `printer` has seen everything in it when this returns a layer.
pub fn capture_told(
    source: Source<'_>,
    base: Option<Lowers>,
    printer: &mut Printer,
    writers: Writers,
    store: &LayerStore,
    stop: Stop<'_>,
) -> Result<Captured> {
    captured(source, store, stop, |(changes, plain), tally, file| {
        let judge = base.map(|base| Judge::new(base, stop));
        read_back(file, stop, |file| {
            pack_into(file, changes.printed(printer), |out| Pack {
                judge,
                ..Pack::new(out, plain, writers, stop, tally)
            })
        })
    })
}

fn captured(
    source: Source<'_>,
    store: &LayerStore,
    stop: Stop<'_>,
    pack: impl FnOnce((Changes<'_>, bool), &mut Tally, &File) -> Result<LayerInfo>,
) -> Result<Captured> {
    let begun = Instant::now();
    let changes = changes_of(source)?;
    let mut tally = Tally::default();
    let packed = store.add(|file| pack(changes, &mut tally, file));
    let info = packed.map_err(|error| if stop.over() { Error::Stopped } else { error })?;
    Ok(tally.captured(info, begun))
}

fn pack_into<'t, F: Write>(
    file: F,
    changes: Changes<'_>,
    pack: impl FnOnce(Writer<Sink<F>>) -> Pack<'t, Sink<F>>,
) -> Result<LayerInfo> {
    let sink = Sink::new(file).at("compress", path_of(b"the layer"))?;
    let mut pack = pack(Writer::new(sink));
    pack.all(changes)?;
    let entries = pack.tally.entries;
    let ended = pack.out.finish().and_then(|sink| sink.finish(entries));
    ended.at("write", path_of(b"the layer"))
}

/// The name that a layer of `source` would have, whose writers may run; nothing is stored. With `base` that
/// of [`capture_told`].
///
/// # Errors
/// As [`capture`]; [`Error::Changed`] if a file changed while it was read.
pub fn diff_id(source: Source<'_>, base: Option<Lowers>, stop: Stop<'_>) -> Result<Digest> {
    let (changes, plain) = changes_of(source)?;
    let mut tally = Tally::default();
    let mut tar = Hashed::new(io::sink());
    let out = Writer::new(&mut tar);
    let judge = base.map(|base| Judge::new(base, stop));
    let mut pack = Pack { judge, ..Pack::new(out, plain, Writers::Running, stop, &mut tally) };
    pack.all(changes)?;
    pack.out.finish().at("hash", path_of(b"the layer"))?;
    Ok(tar.finish().1)
}

/// Writes the tar of `source` to `spool`, but for the content of what goes into `aside`. The names of
/// those files stand there as of empty ones.
pub(super) fn spool(
    source: Source<'_>,
    writers: Writers,
    spool: impl Write,
    aside: &mut Aside,
    tally: &mut Tally,
    stop: Stop<'_>,
) -> Result<()> {
    let (changes, plain) = changes_of(source)?;
    let out = Writer::new(spool);
    let mut pack = Pack { aside: Some(aside), ..Pack::new(out, plain, writers, stop, tally) };
    pack.all(changes)?;
    let end = pack.out.finish().and_then(|mut spool| spool.flush());
    end.at("write", path_of(b"what is gathered"))
}

fn changes_of(source: Source<'_>) -> Result<(Changes<'static>, bool)> {
    Ok(match source {
        Source::Upper(fd, format) => (Changes::reading(fd, format, without_devices(fd))?, false),
        // What is mounted in it is met, and refused: a layer without it is not what somebody sees there.
        Source::Directory(fd) => (Changes::reading(fd, Format::Trusted, None)?, true),
    })
}
