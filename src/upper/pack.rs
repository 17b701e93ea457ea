//! Writes the changes of an upper as a canonical tar.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant;

use rustix::fs::FileType;

use super::changes::{Change, Changes, Kind, is_foreign_mark};
use super::diff::Judge;
use super::gather::Aside;
use super::layer::{Captured, Escaped, Writers};
use super::runs::{self, copy_run};
use super::store::LayerInfo;
use super::tarfmt::{self, MAX_PATH, Meta, Writer};
use super::{At as _, Error, Result, Shown, Stop, path_of};
use crate::kernel::walk::{Dir, Info, stat_fd};
use crate::model::view::Told;

/// First names of files with several are held until the last one was seen; bytes of them at most.
const MAX_LINKED: usize = 256 << 20;
/// Changes that the walk hands over together, and how often it may be so much ahead. A file is open
/// for each.
const TOGETHER: usize = 32;
const AHEAD: usize = 2;
/// With so many bytes of paths and attributes they are handed over as well.
const HELD: usize = 1 << 20;

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

pub(super) struct Pack<'t, W: Write> {
    pub(super) out: Writer<W>,
    pub(super) plain: bool,
    pub(super) writers: Writers,
    pub(super) stop: Stop<'t>,
    pub(super) judge: Option<Judge<'t>>,
    /// Where large files are cloned to instead of being read.
    pub(super) aside: Option<&'t mut Aside>,
    pub(super) tally: &'t mut Tally,
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
    mut changes: Changes<'_>,
    mut judge: Option<Judge<'_>>,
    stop: Stop<'_>,
    give: &SyncSender<Result<Vec<Met>>>,
) {
    let mut next = || {
        super::go_on(stop)?;
        let Some(change) = changes.next().transpose()? else { return Ok(None) };
        let told = told(&mut judge, &change, changes.here())?;
        Ok(Some(Met { change, told, file: changes.file() }))
    };
    loop {
        let (mut some, mut held, mut end) = (Vec::with_capacity(TOGETHER), 0, None);
        while some.len() < TOGETHER && held < HELD && end.is_none() {
            match next() {
                Ok(Some(met)) => {
                    held += met.change.path.len();
                    held += met.change.xattrs.iter().map(|(k, v)| k.len() + v.len()).sum::<usize>();
                    some.push(met);
                }
                last => end = Some(last.err()),
            }
        }
        // What was met before an error comes before it.
        let taken = give.send(Ok(some)).is_ok();
        if let Some(Some(error)) = end {
            let _ = give.send(Err(error));
            return;
        }
        if end.is_some() || !taken {
            return;
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

impl<'t, W: Write> Pack<'t, W> {
    /// One that tells nothing of a base, and reads all files.
    pub(super) fn new(
        out: Writer<W>,
        plain: bool,
        writers: Writers,
        stop: Stop<'t>,
        tally: &'t mut Tally,
    ) -> Self {
        Self { out, plain, writers, stop, judge: None, aside: None, tally }
    }

    /// Packs all changes. A thread of its own goes ahead through the tree, since for small files that
    /// takes as long as the rest.
    pub(super) fn all(&mut self, changes: Changes<'_>) -> Result<()> {
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
        self.out.entry(path, kind, meta)
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
    }?;
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
    use super::super::changes::Format;
    use super::*;
    use std::io;
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
