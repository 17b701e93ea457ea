//! The layer store: layers by the digest of their uncompressed tar, each as a compressed file and,
//! once a mount has wanted it, as a tree.
//!
//! ```text
//! layers/<hex of the diff id>/
//!     layer.tar.zst    durable before the directory has its name
//!     layer.json       LayerInfo
//!     tree/            unpacked at the first mount; read-only from then on
//!     complete         made last: the tree is whole, durable, and its digest was the name
//!     damaged          what a verification found; the layer is not mounted while it is there
//! layers/equal/        what deep heads are mounted through; see `equal`
//! layers/.tmp-*/       being made or removed, or gathered for a layer; see `gather`
//! ```
//!
//! Several threads may use one store; each tree is made by one of them. One process at a time may.
//! A layer that is added cannot be removed until whoever added it has said where it is named
//! ([`LayerStore::settle`]); one that is being removed is added again only after it is gone.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::blob::{Sink, check_entries, read_blob};
use super::damage::damaged;
use super::tarfmt::Entries;
use super::turns::{Doomed, Turns};
use super::unpack::unpack;
use super::{At as _, Error, Result, Stop, Stoppable, path_of, remove, sync_dir, unique_name};
use crate::failpoint;
use crate::kernel::reflink;
use crate::model::head::Digest;

const BLOB: &str = "layer.tar.zst";
const INFO: &str = "layer.json";
pub(super) const TREE: &str = "tree";
pub(super) const COMPLETE: &str = "complete";
const TEMPORARY: &str = ".tmp-";
/// Bytes that are copied without asking whether to stop.
const PIECE: u64 = 64 << 20;

/// What is known of a stored layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerInfo {
    /// Digest of the uncompressed tar: the layer's name.
    pub diff_id: Digest,
    /// Digest of the compressed file.
    pub blob_digest: Digest,
    /// Bytes of the uncompressed tar.
    pub size_uncompressed: u64,
    /// Bytes of the compressed file.
    pub size_compressed: u64,
    /// Entries in the tar.
    pub entries: u64,
}

/// The layers of this host.
#[derive(Debug)]
pub struct LayerStore {
    dir: PathBuf,
    /// Marks are changed by one at a time; and which missing layers were told.
    pub(super) marking: Mutex<BTreeSet<Digest>>,
    pub(super) turns: Turns,
}

impl LayerStore {
    /// Opens the store at `<state>/layers`, making the directory (0700) if it is missing.
    pub fn open(dir: &Path) -> Result<Self> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).at("make", dir)?;
        Ok(Self { dir: dir.to_owned(), marking: Mutex::default(), turns: Turns::default() })
    }

    /// Removes what a crash left half made or half removed. Only at start, before any other call.
    ///
    /// # Errors
    /// The first of those that could not be removed; the others are.
    pub fn sweep(&self) -> Result<u64> {
        let (mut swept, mut failed) = (0, None);
        for entry in std::fs::read_dir(&self.dir).at("list", &self.dir)? {
            let entry = entry.at("list", &self.dir)?;
            if !entry.file_name().to_string_lossy().starts_with(TEMPORARY) {
                continue;
            }
            // A crash may have left a run mounted that was to become an equivalence.
            let merged = entry.path().join(super::equal::MERGED);
            let unmounted = match merged.exists() {
                true => crate::kernel::overlay::unmount(&merged).map(drop).map_err(Error::from),
                false => Ok(()),
            };
            match unmounted.and_then(|()| remove::remove_tree(&entry.path())) {
                Ok(_) => swept += 1,
                Err(fault) => failed = failed.or(Some(fault)),
            }
        }
        failed.map_or(Ok(swept), Err)
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(super) fn of(&self, diff_id: Digest) -> PathBuf {
        self.dir.join(diff_id.hex())
    }

    /// What is known of a layer. [`Error::NoLayer`] if it is not here.
    pub fn info(&self, diff_id: Digest) -> Result<LayerInfo> {
        let path = self.of(diff_id).join(INFO);
        let read = || -> std::io::Result<Vec<u8>> {
            let mut text = Vec::new();
            open(&path)?.read_to_end(&mut text)?;
            Ok(text)
        };
        let text = match read() {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Err(Error::NoLayer(diff_id));
            }
            answer => answer.at("read", &path)?,
        };
        match serde_json::from_slice::<LayerInfo>(&text) {
            Ok(info) if info.diff_id == diff_id => Ok(info),
            Ok(info) => Err(damaged(diff_id, format!("{INFO} describes {}", info.diff_id))),
            Err(e) => Err(damaged(diff_id, format!("{INFO} cannot be read as JSON ({e})"))),
        }
    }

    /// All layers, sorted by digest.
    pub fn list(&self) -> Result<Vec<Digest>> {
        let mut all = Vec::new();
        for entry in std::fs::read_dir(&self.dir).at("list", &self.dir)? {
            let name = entry.at("list", &self.dir)?.file_name();
            if let Ok(id) = format!("sha256:{}", name.to_string_lossy()).parse() {
                all.push(id);
            }
        }
        all.sort();
        Ok(all)
    }

    /// The compressed file of a layer.
    pub fn blob_path(&self, diff_id: Digest) -> PathBuf {
        self.of(diff_id).join(BLOB)
    }

    /// The lower directory of a layer, if its tree is complete.
    pub fn lower_path(&self, diff_id: Digest) -> Result<PathBuf> {
        let dir = self.of(diff_id);
        if let Some((why, _)) = self.mark_of(diff_id) {
            return Err(damaged(diff_id, why));
        }
        if dir.join(COMPLETE).exists() {
            return Ok(dir.join(TREE));
        }
        Err(match dir.exists() {
            true => Error::NotComplete(diff_id),
            false => Error::NoLayer(diff_id),
        })
    }

    /// Says that layers which were added are named where they are needed, or are not needed.
    pub fn settle(&self, layers: impl IntoIterator<Item = Digest>) {
        self.turns.settle(layers);
    }

    /// Keeps a layer from being added, so that it can be removed; not while somebody who added it has
    /// still to say where it is named.
    pub fn doom(&self, layer: Digest) -> Option<Doomed<'_>> {
        self.turns.doom(layer)
    }

    /// Adds the layer that `write` puts into a file. A layer that is here already is kept as it is. It
    /// stays at least until it is settled.
    pub(super) fn add(&self, write: impl FnOnce(&File) -> Result<LayerInfo>) -> Result<LayerInfo> {
        let temporary = unique_name(&self.dir, TEMPORARY)?;
        failpoint::fails("upper.layer.before").at("make", &temporary)?;
        std::fs::DirBuilder::new().mode(0o700).create(&temporary).at("make", &temporary)?;
        let outcome = self.add_in(&temporary, write);
        if outcome.is_err() || temporary.exists() {
            // The first error is the one to tell; what stays is taken away by the next sweep.
            let _ = remove::remove_tree(&temporary);
        }
        failpoint::hit("upper.layer.after");
        outcome
    }

    fn add_in(
        &self,
        temporary: &Path,
        write: impl FnOnce(&File) -> Result<LayerInfo>,
    ) -> Result<LayerInfo> {
        let path = temporary.join(BLOB);
        let blob = create(&path, 0o600)?;
        let info = write(&blob)?;
        blob.sync_all().at("fsync", &path)?;
        let text = serde_json::to_vec_pretty(&info)
            .map_err(std::io::Error::from)
            .at("encode", temporary.join(INFO))?;
        write_durable(&temporary.join(INFO), 0o600, &text)?;
        sync_dir(temporary)?;
        self.turns.add(info.diff_id);
        self.place(temporary, info).inspect_err(|_| self.settle([info.diff_id]))
    }

    fn place(&self, temporary: &Path, info: LayerInfo) -> Result<LayerInfo> {
        let place = self.of(info.diff_id);
        failpoint::fails("upper.layer.rename.before").at("rename into place", &place)?;
        match std::fs::rename(temporary, &place) {
            // Same content: keep the first. A directory is never empty here.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOTEMPTY | libc::EEXIST)) => {
                return self.info(info.diff_id);
            }
            answer => answer.at("rename into place", &place)?,
        }
        failpoint::hit("upper.layer.rename.after");
        sync_dir(&self.dir)?;
        Ok(info)
    }

    /// Adds a compressed layer from elsewhere, for instance from a bundle or another host. Its
    /// digest must be `expected`, and its tar at most `max_uncompressed` bytes long.
    pub fn import(
        &self,
        blob: impl Read,
        expected: Digest,
        max_uncompressed: u64,
    ) -> Result<LayerInfo> {
        let what = || format!("the layer offered as {expected}");
        self.add(|file| {
            let mut sink = Sink::new(file).at("compress", path_of(b"the layer"))?;
            let tar = zstd::Decoder::new(blob).at("decompress", path_of(b"the layer"))?;
            // Checked while it is copied; one byte more than allowed tells a longer one.
            let limited = tar.take(max_uncompressed.saturating_add(1));
            let mut copied = Copied { from: limited, to: &mut sink };
            let mut entries = Entries::new(&mut copied);
            let count = entries.check_all()?;
            entries.drain()?;
            let info = sink.finish(count).at("write", path_of(b"the layer"))?;
            if info.size_uncompressed > max_uncompressed {
                let why = format!("it is longer than {max_uncompressed} bytes");
                return Err(Error::Corrupt { what: what(), why });
            }
            if info.diff_id != expected {
                let why = format!("its content has digest {}", info.diff_id);
                return Err(Error::Corrupt { what: what(), why });
            }
            Ok(info)
        })
    }

    /// Takes a layer over from another store as it lies there, and reads it back from the disk; what
    /// does not come back whole does not stay. One that is here already is left as it is, and read.
    ///
    /// # Errors
    /// It is not there, or damaged there or here; [`Error::Stopped`].
    pub fn copy_from(&self, other: &Self, diff_id: Digest, stop: Stop<'_>) -> Result<LayerInfo> {
        let (info, path) = (other.info(diff_id)?, other.blob_path(diff_id));
        let ours = !self.of(diff_id).exists();
        let copied = self.add(|file| {
            let (from, mut to) = (open(&path).at("open", &path)?, file);
            // By pieces, between which somebody may want it to end.
            while std::io::copy(&mut (&from).take(PIECE), &mut to).at("copy", &path)? > 0 {
                if stop.over() {
                    return Err(Error::Stopped);
                }
            }
            Ok(info)
        })?;
        let copy = self.blob_path(diff_id);
        let copy = open(&copy).at("open", &copy)?;
        // So that what is read was on the disk; some file systems cannot forget.
        let _ = rustix::fs::fadvise(&copy, 0, None, rustix::fs::Advice::DontNeed);
        let read = self.check_file(&copied, stop);
        if read.is_err() && ours {
            self.settle([diff_id]);
            // The first error is the one to tell.
            let _ = self.doom(diff_id).map(|doomed| self.remove(&doomed));
        }
        read.map(|()| copied)
    }

    /// Reads the compressed file of a layer against both of its digests, and changes nothing.
    pub fn check(&self, diff_id: Digest, stop: Stop<'_>) -> Result<LayerInfo> {
        let info = self.info(diff_id)?;
        self.check_file(&info, stop)?;
        Ok(info)
    }

    fn check_file(&self, info: &LayerInfo, stop: Stop<'_>) -> Result<()> {
        let path = self.blob_path(info.diff_id);
        let read = open(&path)
            .at("open", &path)
            .and_then(|blob| read_blob(Stoppable { inner: blob, stop }, info, check_entries));
        read.map_err(|error| match (stop.over(), error.errno()) {
            (true, _) => Error::Stopped,
            // Nothing was written: it is the layer that cannot be read.
            (_, Some(Errno::IO | Errno::BADMSG | Errno::UCLEAN)) => {
                damaged(info.diff_id, format!("it cannot be read: {error}"))
            }
            _ => error.in_layer(info.diff_id),
        })
    }

    /// Unpacks a layer into an empty directory, which becomes an upper.
    pub fn unpack_into(
        &self,
        diff_id: Digest,
        upper: BorrowedFd<'_>,
        stop: Stop<'_>,
    ) -> Result<()> {
        let (info, path) = (self.info(diff_id)?, self.blob_path(diff_id));
        let read = open(&path).at("open", &path).and_then(|blob| {
            read_blob(Stoppable { inner: blob, stop }, &info, |tar| unpack(tar, upper))
        });
        read.map_err(|error| match stop.over() {
            true => Error::Stopped,
            false => error.in_layer(diff_id),
        })
    }

    /// Makes the tree of a layer if it is not complete, and returns its path. The content is
    /// checked against the layer's digest on the way. What others wait for is only this very layer's:
    /// unpacking one may take long by the doing of whoever wrote it.
    ///
    /// # Errors
    /// It is missing or damaged; [`Error::Stopped`].
    pub fn ensure_tree(&self, diff_id: Digest, stop: Stop<'_>) -> Result<PathBuf> {
        // A thread that died here left an incomplete tree, which is what this function repairs.
        let _one = self.turns.unpack(diff_id);
        match self.lower_path(diff_id) {
            Err(Error::NotComplete(_)) => {}
            other => return other,
        }
        let info = self.info(diff_id)?;
        let (dir, tree) = (self.of(diff_id), self.of(diff_id).join(TREE));
        if tree.exists() {
            remove::remove_tree(&tree)?;
        }
        failpoint::fails("upper.tree.before").at("make", &tree)?;
        std::fs::create_dir(&tree).at("make", &tree)?;
        let top = File::open(&tree).at("open", &tree)?;
        let outcome = open(&dir.join(BLOB)).at("open", dir.join(BLOB)).and_then(|blob| {
            let blob = Stoppable { inner: blob, stop };
            read_blob(blob, &info, |tar| unpack(tar, top.as_fd()))
        });
        if let Err(error) = outcome {
            // As above: the error counts; an incomplete tree is made anew in any case.
            let _ = remove::remove_tree(&tree);
            return Err(match stop.over() {
                true => Error::Stopped,
                false => error.in_layer(diff_id),
            });
        }
        rustix::fs::syncfs(&top).at("sync the file system of", &tree)?;
        write_durable(&dir.join(COMPLETE), 0o600, b"")?;
        sync_dir(&dir)?;
        failpoint::hit("upper.tree.after");
        Ok(tree)
    }

    /// Whether files of the file system that `dir` is on can be cloned into the store.
    pub(super) fn can_clone(&self, dir: BorrowedFd<'_>) -> bool {
        File::open(&self.dir).is_ok_and(|own| reflink::works(dir, own))
    }

    /// An empty directory (0700) of the caller's own, which removes it; else the next
    /// [`LayerStore::sweep`] does.
    pub(super) fn scratch(&self) -> Result<PathBuf> {
        let path = unique_name(&self.dir, TEMPORARY)?;
        std::fs::DirBuilder::new().mode(0o700).create(&path).at("make", &path)?;
        Ok(path)
    }

    /// Removes a layer. The caller has proved that nothing names it and that no mount uses it.
    pub fn remove(&self, doomed: &Doomed<'_>) -> Result<()> {
        let diff_id = doomed.layer;
        let (place, doomed) = (self.of(diff_id), unique_name(&self.dir, TEMPORARY)?);
        failpoint::fails("upper.layer.remove.before").at("rename away", &place)?;
        match std::fs::rename(&place, &doomed) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Err(Error::NoLayer(diff_id));
            }
            answer => answer.at("rename away", &place)?,
        }
        sync_dir(&self.dir)?;
        remove::remove_behind(&doomed)?;
        failpoint::hit("upper.layer.remove.after");
        Ok(())
    }
}

/// A reader that writes what it reads to a second place.
struct Copied<'s, R, W> {
    from: R,
    to: &'s mut W,
}

impl<R: Read, W: std::io::Write> Read for Copied<'_, R, W> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = self.from.read(buffer)?;
        self.to.write_all(&buffer[..n])?;
        Ok(n)
    }
}

/// Opens a file to read. Should somebody have put a fifo in its place, nobody waits for its writer: it is
/// an empty file, and so not what was wanted.
fn open(path: &Path) -> std::io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path)
}

/// Makes a new file with this mode, as far as the umask lets it.
pub(super) fn create(path: &Path, mode: u32) -> Result<File> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true).mode(mode).open(path).at("make", path)
}

/// Makes a new file with these bytes and fsyncs it; its name is the caller's to sync.
pub(super) fn write_durable(path: &Path, mode: u32, bytes: &[u8]) -> Result<()> {
    let mut file = create(path, mode)?;
    file.write_all(bytes).at("write", path)?;
    file.sync_all().at("fsync", path)
}
