//! Captures an upper, or a plain directory, as one OCI layer in the layer store.
//!
//! Canonical: the same upper gives the same diff id (sha256 of the uncompressed tar), whenever and
//! wherever it is captured. Entries come in byte order, parents before children, a directory before
//! its opaque marker; of a file with several names the first carries the bytes and the others link
//! to it. The top directory itself is an entry (`./`), since the merged top has its mode and owner.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use rustix::fs::FileType;
use serde::{Deserialize, Serialize};

use super::blob::{Hashed, Sink, read_back};
use super::changes::{Change, Changes, Format, Kind, is_foreign_mark};
use super::diff::Judge;
use super::gather::Aside;
use super::lowers::Lowers;
use super::runs::{self, copy_run};
use super::store::{LayerInfo, LayerStore};
use super::tarfmt::{self, MAX_PATH, Meta, Writer};
use super::{At as _, Error, Result, Shown, Stop, path_of};
use crate::kernel::walk::{Dir, Info, stat_fd};
use crate::model::head::Digest;
use crate::model::view::Told;

/// First names of files with several are held until the last one was seen; bytes of them at most.
const MAX_LINKED: usize = 256 << 20;
/// Changes that the walk hands over together, and how often it may be so much ahead. A file is open
/// for each.
const TOGETHER: usize = 32;
const AHEAD: usize = 4;

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

    fn note(&mut self, path: &[u8], listed: &mut usize) {
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
        let judge = None;
        pack_into(file, changes, |out| Pack {
            out,
            plain,
            writers,
            stop,
            judge,
            aside: None,
            tally,
        })
    })
}

/// As [`capture`], for a bundle: each entry says what it is to `base`, the layers that the upper was
/// mounted on. The layer is another one than without. It is read back from its file, whole, as it is
/// written.
pub fn capture_told(
    source: Source<'_>,
    base: Option<Lowers>,
    writers: Writers,
    store: &LayerStore,
    stop: Stop<'_>,
) -> Result<Captured> {
    captured(source, store, stop, |(changes, plain), tally, file| {
        let judge = base.map(|base| Judge::new(base, stop));
        read_back(file, stop, |file| {
            pack_into(file, changes, |out| Pack {
                out,
                plain,
                writers,
                stop,
                judge,
                aside: None,
                tally,
            })
        })
    })
}

fn captured(
    source: Source<'_>,
    store: &LayerStore,
    stop: Stop<'_>,
    pack: impl FnOnce((Changes, bool), &mut Tally, &File) -> Result<LayerInfo>,
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
    changes: Changes,
    pack: impl FnOnce(Writer<Sink<F>>) -> Pack<'t, Sink<F>>,
) -> Result<LayerInfo> {
    let sink = Sink::new(file).at("compress", path_of(b"the layer"))?;
    let mut pack = pack(Writer::new(sink));
    pack.all(changes)?;
    let entries = pack.tally.entries;
    let ended = pack.out.finish().and_then(|sink| sink.finish(entries));
    ended.at("write", path_of(b"the layer"))
}

/// The name that a layer of `source` would have, whose writers may run; nothing is stored.
///
/// # Errors
/// As [`capture`]; [`Error::Changed`] if a file changed while it was read.
pub fn diff_id(source: Source<'_>, stop: Stop<'_>) -> Result<Digest> {
    let (changes, plain) = changes_of(source)?;
    let mut tally = Tally::default();
    let mut tar = Hashed::new(io::sink());
    let out = Writer::new(&mut tar);
    let (writers, judge) = (Writers::Running, None);
    let mut pack = Pack { out, plain, writers, stop, judge, aside: None, tally: &mut tally };
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
    let mut pack = Pack { out, plain, writers, stop, judge: None, aside: Some(aside), tally };
    pack.all(changes)?;
    let end = pack.out.finish().and_then(|mut spool| spool.flush());
    end.at("write", path_of(b"what is gathered"))
}

fn changes_of(source: Source<'_>) -> Result<(Changes, bool)> {
    Ok(match source {
        Source::Upper(fd, format) => (Changes::reading(fd, format)?, false),
        Source::Directory(fd) => (Changes::reading(fd, Format::Trusted)?, true),
    })
}

#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) entries: u64,
    sockets: u64,
    changed: u64,
    escaped: Escaped,
    listed: usize,
}

impl Tally {
    /// What there is to say of a layer in the store.
    pub(super) fn captured(self, info: LayerInfo, begun: Instant) -> Captured {
        Captured {
            diff_id: info.diff_id,
            blob_digest: info.blob_digest,
            size_uncompressed: info.size_uncompressed,
            size_compressed: info.size_compressed,
            entries: info.entries,
            skipped_sockets: self.sockets,
            changed: self.changed,
            escaped: self.escaped,
            took: begun.elapsed(),
        }
    }
}

struct Pack<'t, W: Write> {
    out: Writer<W>,
    plain: bool,
    writers: Writers,
    stop: Stop<'t>,
    judge: Option<Judge<'t>>,
    /// Where large files are cloned to instead of being read.
    aside: Option<&'t mut Aside>,
    tally: &'t mut Tally,
}

/// The first name of a file with several, and how many others are still to come.
struct Linked {
    first: Vec<u8>,
    others: u32,
}

/// A change, as the walk met it.
struct Met {
    change: Change,
    told: Option<Told>,
    file: Option<File>,
}

/// Hands over the changes, some at a time, until nobody takes them any more.
fn walk(
    mut changes: Changes,
    mut judge: Option<Judge<'_>>,
    stop: Stop<'_>,
    give: &SyncSender<Result<Vec<Met>>>,
) {
    loop {
        let mut some = Vec::with_capacity(TOGETHER);
        let met = loop {
            let met = super::go_on(stop).and_then(|()| {
                let Some(change) = changes.next().transpose()? else { return Ok(None) };
                let told = told(&mut judge, &change, changes.here())?;
                Ok(Some(Met { change, told, file: changes.file() }))
            });
            match met {
                Ok(Some(met)) => some.push(met),
                Ok(None) => break Ok(false),
                Err(error) => break Err(error),
            }
            if some.len() == TOGETHER {
                break Ok(true);
            }
        };
        // What was met before an error comes before it.
        if give.send(Ok(some)).is_err() {
            return;
        }
        match met {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => {
                let _ = give.send(Err(error));
                return;
            }
        }
    }
}

/// What the change is to the base. A base that cannot be read keeps nobody's bytes from being
/// saved: from there on nothing is told.
fn told(judge: &mut Option<Judge<'_>>, change: &Change, here: &Dir) -> Result<Option<Told>> {
    let Some(asked) = judge.as_mut().filter(|_| change.kind != Kind::Socket) else {
        return Ok(None);
    };
    match asked.told(change, here) {
        Ok(told) => Ok(Some(told)),
        Err(Error::Stopped) => Err(Error::Stopped),
        Err(_) => {
            *judge = None;
            Ok(None)
        }
    }
}

impl<W: Write> Pack<'_, W> {
    /// Packs all changes. A thread of its own goes ahead through the tree, since for small files that
    /// takes as long as the rest.
    fn all(&mut self, changes: Changes) -> Result<()> {
        let (give, met) = sync_channel(AHEAD);
        let (judge, stop) = (self.judge.take(), self.stop);
        std::thread::scope(|scope| {
            std::thread::Builder::new()
                .name("walk".to_owned())
                .spawn_scoped(scope, move || walk(changes, judge, stop, &give))
                .at("start a thread for", path_of(b"the layer"))?;
            self.met(met)
        })
    }

    fn met(&mut self, met: Receiver<Result<Vec<Met>>>) -> Result<()> {
        // By device and inode.
        let mut linked = HashMap::<(u64, u64), Linked>::new();
        let mut held = 0;
        for some in met {
            for Met { change, told, file } in some? {
                self.check(&change)?;
                // In the measure of `size`, so that what that found is the end of it.
                let own = u64::from(!change.path.is_empty());
                let on_disk = change.info.blocks * 512 * own;
                self.stop.did(0, own);
                let info = &change.info;
                let (major, minor) = (rustix::fs::major(info.rdev), rustix::fs::minor(info.rdev));
                let kind = match &change.kind {
                    Kind::Whiteout => {
                        let meta = Meta { told, ..Meta::default() };
                        self.entry(&change.path, &tarfmt::Kind::Whiteout, &meta)?;
                        continue;
                    }
                    Kind::Socket => {
                        self.tally.sockets += 1;
                        continue;
                    }
                    Kind::Directory { .. } => tarfmt::Kind::Directory,
                    Kind::File => tarfmt::Kind::File { size: info.size },
                    Kind::Symlink(target) => tarfmt::Kind::Symlink { target: target.clone() },
                    Kind::Fifo => tarfmt::Kind::Fifo,
                    Kind::Device if info.kind == FileType::BlockDevice => {
                        tarfmt::Kind::BlockDevice { major, minor }
                    }
                    Kind::Device => tarfmt::Kind::CharDevice { major, minor },
                };
                let meta = Meta { told, ..meta_of(&change) };
                if info.nlink > 1 && kind != tarfmt::Kind::Directory {
                    let file = (info.dev, info.ino);
                    if let Some(known) = linked.get_mut(&file) {
                        let link = tarfmt::Kind::HardLink { target: known.first.clone() };
                        // All names of a file have one mode, owner, time and set of attributes.
                        self.entry(
                            &change.path,
                            &link,
                            &Meta { xattrs: Default::default(), ..meta },
                        )?;
                        known.others = known.others.saturating_sub(1);
                        if known.others == 0 {
                            held -= known.first.len();
                            linked.remove(&file);
                        }
                        self.stop.did(on_disk, 0);
                        continue;
                    }
                    held += change.path.len();
                    if held > MAX_LINKED {
                        return Err(Error::NotPortable {
                            path: Shown::bytes(&change.path),
                            why:
                                "the names of files with several names are longer than 256 MiB in \
                              all; remove some of those links"
                                    .to_owned(),
                        });
                    }
                    linked.insert(
                        file,
                        Linked { first: change.path.clone(), others: info.nlink - 1 },
                    );
                }
                match kind {
                    tarfmt::Kind::File { .. } => {
                        // It was opened when it was met.
                        let Some(file) = file else {
                            return Err(Error::Changed { path: Shown::bytes(&change.path) });
                        };
                        self.file(&change, &file, &meta)?;
                    }
                    other => {
                        self.entry(&change.path, &other, &meta)?;
                        self.stop.did(on_disk, 0);
                    }
                }
                if change.kind == (Kind::Directory { opaque: true }) {
                    // It says nothing but its name.
                    self.entry(&change.path, &tarfmt::Kind::Opaque, &Meta::default())?;
                }
            }
        }
        Ok(())
    }

    fn check(&self, change: &Change) -> Result<()> {
        let refuse = |why: &str| {
            Err(Error::NotPortable { path: Shown::bytes(&change.path), why: why.to_owned() })
        };
        if change.path.len() > MAX_PATH {
            return refuse("its path is longer than 1 MiB; move it up, or shorten names above it");
        }
        if change.path.is_empty() && change.kind == (Kind::Directory { opaque: true }) {
            return refuse("the upper itself is marked opaque, which a mount would not show");
        }
        let marked = matches!(change.kind, Kind::Whiteout | Kind::Directory { opaque: true });
        if self.plain && marked {
            return refuse(
                "it is an overlay whiteout or opaque directory, so this is an upper and no plain \
                 directory; capture what the overlay shows instead",
            );
        }
        if self.plain && change.xattrs.keys().any(|name| is_foreign_mark(name)) {
            return refuse(
                "it has a `user.overlay.` attribute, so this may be the upper of a mount with \
                 userxattr; capture what the overlay shows instead, or remove the attribute",
            );
        }
        Ok(())
    }

    fn count(&mut self, path: &[u8]) {
        self.tally.entries += 1;
        self.tally.escaped.note(path, &mut self.tally.listed);
    }

    fn entry(&mut self, path: &[u8], kind: &tarfmt::Kind, meta: &Meta) -> Result<()> {
        self.count(path);
        self.out.entry(path, kind, meta).at("write", path_of(b"the layer"))
    }

    fn file(&mut self, change: &Change, file: &File, meta: &Meta) -> Result<()> {
        let path = path_of(&change.path);
        let size = change.info.size;
        self.count(&change.path);
        let on_disk = change.info.blocks * 512;
        let whole = match &mut self.aside {
            Some(aside) if aside.wants(on_disk) => {
                aside.put(change, file, meta, &mut self.out, self.stop)?
            }
            Some(_) | None => {
                content(&mut self.out, &change.path, file, size, on_disk, meta, self.stop)?
            }
        };
        let after = stat_fd(file).at("stat", path)?;
        // What is no run may have been cut off.
        let whole = whole && after.size >= size;
        if !whole || after.ino != change.info.ino || after.dev != change.info.dev {
            return Err(Error::Changed { path: Shown::from(path) });
        }
        if stamp(&change.info) != stamp(&after) {
            match self.writers {
                Writers::Running => return Err(Error::Changed { path: Shown::from(path) }),
                Writers::Frozen => self.tally.changed += 1,
            }
        }
        Ok(())
    }
}

/// Writes the entry of a file of `size` bytes, `on_disk` of them on the disk, and those of its bytes that
/// are not zero. False if it has become shorter.
pub(super) fn content<W: Write>(
    out: &mut Writer<W>,
    path: &[u8],
    file: &File,
    size: u64,
    on_disk: u64,
    meta: &Meta,
    stop: Stop<'_>,
) -> Result<bool> {
    let shown = path_of(path);
    let runs = runs::of(file, size, stop).at("read", shown)?;
    match runs::is_whole(&runs, size) {
        true => out.entry(path, &tarfmt::Kind::File { size }, meta),
        false => out.sparse(path, size, &runs, meta),
    }
    .at("write", path_of(b"the layer"))?;
    let mut whole = true;
    for run in &runs {
        whole = whole && copy_run(file, *run, out, stop).at("copy into the layer", shown)?;
    }
    // Its bytes were counted as they passed; what they take on disk besides is a few.
    let read: u64 = runs.iter().map(|run| run.len).sum();
    stop.did(on_disk.saturating_sub(read), 0);
    out.pad().at("write", path_of(b"the layer"))?;
    Ok(whole)
}

/// What changes when a file's bytes do.
fn stamp(info: &Info) -> (u64, i64, u32, i64, u32) {
    (info.size, info.mtime_s, info.mtime_ns, info.ctime_s, info.ctime_ns)
}

pub(super) fn meta_of(change: &Change) -> Meta {
    let info = &change.info;
    Meta {
        mode: info.mode,
        uid: info.uid,
        gid: info.gid,
        mtime_s: info.mtime_s,
        mtime_ns: info.mtime_ns,
        xattrs: change.xattrs.clone(),
        told: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;

    /// Packs the file `f` whose description was read before `meddle` ran.
    fn pack(writers: Writers, meddle: impl FnOnce(&std::path::Path)) -> (Result<()>, Tally) {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("f");
        std::fs::write(&path, b"0123456789").unwrap();
        let top = File::open(tmp.path()).unwrap();
        let mut changes = Changes::new(top.as_fd(), Format::Trusted).unwrap();
        let change = changes.nth(1).unwrap().unwrap();
        meddle(&path);
        let file = changes.here().open_file("f".as_ref()).unwrap();
        let mut tally = Tally::default();
        let out = Writer::new(io::sink());
        let stop = &|| false;
        let (judge, aside) = (None, None);
        let tally_to = &mut tally;
        let mut pack = Pack { out, plain: false, writers, stop, judge, aside, tally: tally_to };
        let outcome = pack.file(&change, &file.into(), &meta_of(&change));
        (outcome, tally)
    }

    #[test]
    fn a_file_that_changes_while_it_is_read_is_noticed() {
        // The time is set by hand: before Linux 6.13 two writes in one tick look the same.
        let rewrite = |p: &std::path::Path| {
            std::fs::write(p, b"9876543210").unwrap();
            super::super::round_trip::touch(p, 5, 5);
        };
        let cut = |p: &std::path::Path| std::fs::write(p, b"012").unwrap();
        let replace = |p: &std::path::Path| {
            std::fs::rename(p, p.with_extension("old")).unwrap();
            std::fs::write(p, b"0123456789").unwrap();
        };
        assert!(pack(Writers::Running, |_| ()).0.is_ok());
        assert!(matches!(pack(Writers::Running, rewrite).0, Err(Error::Changed { .. })));
        let (outcome, tally) = pack(Writers::Frozen, rewrite);
        assert!(outcome.is_ok() && tally.changed == 1, "{outcome:?}");
        for writers in [Writers::Running, Writers::Frozen] {
            assert!(matches!(pack(writers, cut).0, Err(Error::Changed { .. })));
            assert!(matches!(pack(writers, replace).0, Err(Error::Changed { .. })));
        }
    }
}
