//! A capture in two steps, where the upper's file system can clone files into the layer store: its
//! writers have to stand still for the first one only (docs/adr/0028).
//!
//! What is *gathered* is the tar of the layer, but for the content of large files, of each of which a
//! clone is kept. It is *packed* afterwards: the same bytes in the same order as a capture in one step
//! would have given, and so the same layer.
//!
//! ```text
//! layers/.tmp-*/      goes with the `Gathered`; what a crash leaves is swept at start
//!     spool           the tar; a large file stands there as an empty one
//!     0, 1, 2, ...    the clones, in the order of the tar
//! ```

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::time::Instant;

use super::blob::Sink;
use super::changes::Change;
use super::layer::{self, Captured, Source, Writers};
use super::pack::{self, Tally};
use super::runs::copy_run;
use super::store::{LayerStore, create};
use super::tarfmt::{self, Entries, Meta, Run, Writer};
use super::tree::{Step, Walk};
use super::{At as _, Error, Result, Stop, go_on, path_of, remove};
use crate::failpoint;
use crate::kernel::reflink;
use crate::kernel::walk::{Info, stat_fd};

/// Files with this many bytes on the disk are cloned; what is much smaller is read sooner than it is
/// cloned (docs/adr/0028).
const LARGE: u64 = 256 << 10;
const SPOOL: &str = "spool";

/// Makes a new and empty file a clone of another one.
type MakeClone = fn(&File, &File) -> io::Result<()>;

/// Files that are kept as they are at this moment, to be read later.
#[derive(Debug)]
pub(super) struct Aside {
    dir: PathBuf,
    least: u64,
    clone: MakeClone,
    /// Where the entry of the nth file stands in the spool.
    entries: Vec<Range<u64>>,
    /// Bytes on the disk of all of them.
    on_disk: u64,
}

impl Aside {
    /// Whether a file is large enough.
    pub(super) fn wants(&self, on_disk: u64) -> bool {
        on_disk >= self.least
    }

    /// Keeps a clone of a file and writes its entry to the spool; its content as well, if there is no
    /// clone of this one file. False if it has become shorter.
    pub(super) fn put<W: Write>(
        &mut self,
        change: &Change,
        file: &File,
        meta: &Meta,
        out: &mut Writer<W>,
        stop: Stop<'_>,
    ) -> Result<bool> {
        let (size, on_disk) = (change.info.size, change.info.blocks * 512);
        let place = self.dir.join(self.entries.len().to_string());
        let to = create(&place, 0o600)?;
        let may = failpoint::fails("upper.clone.before").map_err(io::Error::from);
        let cloned = may.and_then(|()| (self.clone)(file, &to));
        failpoint::hit("upper.clone.after");
        if cloned.is_err() {
            // One without checksums among others with them, for instance. Reading it tells what is wrong
            // with it, if anything is; what was made is in the way of the next one.
            drop(to);
            std::fs::remove_file(&place).at("remove", &place)?;
            return pack::content(out, &change.path, file, size, on_disk, meta, stop);
        }
        let got = to.metadata().at("stat", &place)?.len();
        if got > size {
            to.set_len(size).at("cut", &place)?;
        }
        let from = out.written();
        out.entry(&change.path, &tarfmt::Kind::File { size: 0 }, meta)?;
        self.entries.push(from..out.written());
        self.on_disk += on_disk;
        stop.did(on_disk, 0);
        Ok(got >= size)
    }
}

/// What a layer is to be made of. Its writers may go on.
#[derive(Debug)]
pub struct Gathered {
    aside: Aside,
    tally: Tally,
    begun: Instant,
}

impl Drop for Gathered {
    fn drop(&mut self) {
        // What stays is taken away by the sweep at start.
        let _ = remove::remove_tree(&self.aside.dir);
    }
}

/// Gathers `source`, whose writers are stopped for as long as this takes. `None`: its file system has no
/// clones, or is not the store's, and nothing was done; it is to be captured in one step.
///
/// # Errors
/// As [`layer::capture`].
pub fn gather(
    source: Source<'_>,
    writers: Writers,
    store: &LayerStore,
    stop: Stop<'_>,
) -> Result<Option<Gathered>> {
    let (Source::Upper(top, _) | Source::Directory(top)) = source;
    match store.can_clone(top) {
        true => gather_by(reflink::clone, LARGE, source, writers, store, stop).map(Some),
        false => Ok(None),
    }
}

fn gather_by(
    clone: MakeClone,
    least: u64,
    source: Source<'_>,
    writers: Writers,
    store: &LayerStore,
    stop: Stop<'_>,
) -> Result<Gathered> {
    let begun = Instant::now();
    failpoint::fails("upper.gather.before").at("gather in", store.dir())?;
    let aside = Aside { dir: store.scratch()?, least, clone, entries: Vec::new(), on_disk: 0 };
    let mut gathered = Gathered { aside, tally: Tally::default(), begun };
    let spool = gathered.aside.dir.join(SPOOL);
    let Gathered { aside, tally, .. } = &mut gathered;
    let outcome = create(&spool, 0o600).and_then(|file| {
        let spool = BufWriter::with_capacity(1 << 16, file);
        layer::spool(source, writers, spool, aside, tally, stop)
    });
    failpoint::hit("upper.gather.after");
    outcome.map_err(|error| if stop.over() { Error::Stopped } else { error })?;
    Ok(gathered)
}

impl Gathered {
    /// How many bytes have to be read for its layer.
    pub fn bytes(&self) -> u64 {
        let spool = std::fs::metadata(self.aside.dir.join(SPOOL));
        self.aside.on_disk + spool.map_or(0, |spool| spool.len())
    }

    /// Makes the layer of it. When this returns, the layer is durable. Once `stop` says so it ends with
    /// [`Error::Stopped`] and leaves nothing.
    pub fn pack(mut self, store: &LayerStore, stop: Stop<'_>) -> Result<Captured> {
        let packed = store.add(|file| {
            let mut sink = Sink::new(file).at("compress", path_of(b"the layer"))?;
            self.play(&mut Writer::new(&mut sink), stop)?;
            sink.finish(self.tally.entries).at("write", path_of(b"the layer"))
        });
        let info = packed.map_err(|error| if stop.over() { Error::Stopped } else { error })?;
        Ok(std::mem::take(&mut self.tally).captured(info, self.begun))
    }

    fn play<W: Write>(&self, out: &mut Writer<W>, stop: Stop<'_>) -> Result<()> {
        let name = self.aside.dir.join(SPOOL);
        let spool = File::open(&name).at("open", &name)?;
        let copied = |part: Range<u64>, out: &mut Writer<W>| {
            let run = Run { at: part.start, len: part.end - part.start };
            let whole = copy_run(&spool, run, out, stop).at("copy", &name)?;
            if whole { Ok(()) } else { Err(lost()) }
        };
        let mut done = 0;
        for (n, entry) in self.aside.entries.iter().enumerate() {
            copied(done..entry.start, out)?;
            let mut header = vec![0; usize::try_from(entry.end - entry.start).unwrap_or(0)];
            spool.read_exact_at(&mut header, entry.start).at("read", &name)?;
            let known = Entries::new(&header[..]).next_entry()?.ok_or_else(lost)?;
            let place = self.aside.dir.join(n.to_string());
            let clone = File::open(&place).at("open", &place)?;
            let Info { size, blocks, .. } = stat_fd(&clone).at("stat", &place)?;
            let (path, meta) = (&known.path, &known.meta);
            if !pack::content(out, path, &clone, size, blocks * 512, meta, stop)? {
                return Err(lost());
            }
            // Its blocks are nobody else's once the file is written again. If it does not go now it goes
            // with the rest.
            let _ = std::fs::remove_file(&place);
            done = entry.end;
        }
        copied(done..spool.metadata().at("stat", &name)?.len(), out)
    }
}

fn lost() -> Error {
    let why = "it is not what was written there".to_owned();
    Error::Corrupt { what: "what was gathered for a layer".to_owned(), why }
}

/// Writes the content of large files of an upper to the disk, where they can be cloned: a clone of what
/// is not there yet waits for it. Its writers run; what changes meanwhile, or cannot be written, is left
/// for the gathering to meet.
pub fn write_out(upper: BorrowedFd<'_>, store: &LayerStore, stop: Stop<'_>) -> Result<()> {
    if !store.can_clone(upper) {
        return Ok(());
    }
    let mut walk = Walk::new(upper)?;
    let mut last = None;
    while let Some(step) = walk.step()? {
        go_on(stop)?;
        let Step::Name(entry) = step else { continue };
        let Ok(info) = walk.here().stat(&entry.name) else { continue };
        if info.kind.is_dir() {
            let _ = walk.enter(&entry);
        } else if info.kind.is_file()
            && info.size >= LARGE
            && let Ok(file) = walk.here().open_file(&entry.name)
        {
            let _ = reflink::write_out(&file);
            last = Some(File::from(file));
        }
    }
    // Else the agent's next record, under the freeze, would wait for what the disk has in its cache.
    let _ = last.map(|file| file.sync_data());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::round_trip::{furnish, nodes, plant};
    use super::*;
    use proptest::prelude::*;
    use std::os::fd::AsFd as _;
    use std::path::Path;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::SystemTime;

    /// Stands in for a clone where the file system has none.
    fn copy(from: &File, to: &File) -> io::Result<()> {
        let mut at = 0;
        let mut buffer = [0; 8192];
        loop {
            match from.read_at(&mut buffer, at)? {
                0 => return Ok(()),
                n => to.write_all_at(&buffer[..n], at)?,
            }
            at = to.metadata()?.len();
        }
    }

    fn refuse(_: &File, to: &File) -> io::Result<()> {
        to.write_all_at(b"half", 0)?;
        Err(io::Error::from_raw_os_error(libc::EINVAL))
    }

    fn refuse_each_second(from: &File, to: &File) -> io::Result<()> {
        static CALLS: AtomicU32 = AtomicU32::new(0);
        match CALLS.fetch_add(1, Ordering::SeqCst) % 2 {
            0 => refuse(from, to),
            _ => copy(from, to),
        }
    }

    /// A writer that the freeze met in the middle of a call goes on for a moment.
    fn with_more(from: &File, to: &File) -> io::Result<()> {
        copy(from, to)?;
        to.write_all_at(b"more", to.metadata()?.len())
    }

    fn touched(from: &File, to: &File) -> io::Result<()> {
        copy(from, to)?;
        from.set_modified(SystemTime::UNIX_EPOCH)
    }

    fn cut(_: &File, _: &File) -> io::Result<()> {
        Ok(())
    }

    struct Case {
        tmp: tempfile::TempDir,
        store: LayerStore,
    }

    impl Case {
        fn new() -> Self {
            let tmp = tempfile::tempdir().unwrap();
            std::fs::create_dir(tmp.path().join("source")).unwrap();
            let store = LayerStore::open(&tmp.path().join("layers")).unwrap();
            Self { tmp, store }
        }

        fn source(&self) -> PathBuf {
            self.tmp.path().join("source")
        }

        fn gather(&self, clone: MakeClone, least: u64, writers: Writers) -> Result<Gathered> {
            let top = File::open(self.source()).unwrap();
            let source = Source::Directory(top.as_fd());
            gather_by(clone, least, source, writers, &self.store, &|| false)
        }

        fn captured(&self) -> Captured {
            let top = File::open(self.source()).unwrap();
            let source = Source::Directory(top.as_fd());
            layer::capture(source, Writers::Running, &self.store, &|| false).unwrap()
        }

        /// What lies in the store beside layers.
        fn left(&self) -> usize {
            let all = std::fs::read_dir(self.store.dir()).unwrap();
            all.filter(|e| e.as_ref().unwrap().file_name().as_encoded_bytes()[0] == b'.').count()
        }
    }

    /// Files with holes, one of them with a second name, beside what every tree has.
    fn with_holes(top: &Path, at: &[(u64, u8)], size: u64) {
        furnish(top);
        let file = File::create(top.join("holes")).unwrap();
        for (at, byte) in at {
            file.write_all_at(&[*byte; 5000], at % size).unwrap();
        }
        file.set_len(size).unwrap();
        std::fs::hard_link(top.join("holes"), top.join("dir/again")).unwrap();
        File::create(top.join("nothing")).unwrap().set_len(size).unwrap();
    }

    fn same(a: &Captured, b: &Captured) {
        assert_eq!(Captured { took: a.took, ..b.clone() }, *a);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn any_tree_gives_the_layer_of_one_step(
            nodes in nodes(),
            at in prop::collection::vec((any::<u64>(), any::<u8>()), 0..6),
            size in 1_u64..400_000,
        ) {
            let case = Case::new();
            with_holes(&case.source(), &at, size);
            plant(&case.source(), nodes);
            let whole = case.captured();
            for (clone, least) in [
                (copy as MakeClone, 0),
                (copy, 8192),
                (copy, u64::MAX),
                (with_more, 0),
                (refuse, 0),
                (refuse_each_second, 1),
            ] {
                let gathered = case.gather(clone, least, Writers::Running).unwrap();
                same(&gathered.pack(&case.store, &|| false).unwrap(), &whole);
                assert_eq!(case.left(), 0);
            }
        }
    }

    #[test]
    fn what_is_written_after_it_is_in_no_layer() {
        let case = Case::new();
        with_holes(&case.source(), &[(100_000, 7)], 300_000);
        let whole = case.captured();
        let gathered = case.gather(copy, 0, Writers::Frozen).unwrap();
        assert_eq!(gathered.aside.entries.len(), 6, "each file once, whatever names it has");
        assert_eq!(case.left(), 1);
        for path in ["holes", "sparse", "dir/file"] {
            std::fs::write(case.source().join(path), b"other bytes").unwrap();
        }
        std::fs::remove_file(case.source().join("nothing")).unwrap();
        same(&gathered.pack(&case.store, &|| false).unwrap(), &whole);
        assert_ne!(case.captured().diff_id, whole.diff_id);
        drop(case.gather(copy, 0, Writers::Frozen).unwrap());
        assert_eq!(case.left(), 0, "nothing stays of what is not packed");
    }

    #[test]
    fn a_file_that_changes_while_it_is_cloned_is_noticed() {
        let case = Case::new();
        std::fs::write(case.source().join("f"), b"0123456789").unwrap();
        let changed = |outcome: Result<Gathered>| match outcome {
            Err(Error::Changed { path }) => path.to_string() == "f",
            _ => false,
        };
        for writers in [Writers::Running, Writers::Frozen] {
            assert!(changed(case.gather(cut, 0, writers)));
        }
        assert!(changed(case.gather(touched, 0, Writers::Running)));
        std::fs::write(case.source().join("f"), b"9876543210").unwrap();
        let gathered = case.gather(touched, 0, Writers::Frozen).unwrap();
        assert_eq!(gathered.pack(&case.store, &|| false).unwrap().changed, 1);
        assert_eq!(case.left(), 0);
    }

    #[test]
    fn one_that_is_not_wanted_any_more_leaves_nothing() {
        let case = Case::new();
        with_holes(&case.source(), &[(0, 1), (200_000, 2)], 300_000);
        let top = File::open(case.source()).unwrap();
        let mut ends = [0, 0];
        for asked in 0..200_u32 {
            let left = AtomicU32::new(asked);
            let less = |n: u32| Some(n.saturating_sub(1));
            let stop = || left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less) == Ok(0);
            let source = Source::Directory(top.as_fd());
            let gathered = gather_by(copy, 0, source, Writers::Frozen, &case.store, &stop);
            match gathered.and_then(|gathered| gathered.pack(&case.store, &stop)) {
                Err(Error::Stopped) => ends[0] += 1,
                other => {
                    other.unwrap();
                    ends[1] += 1;
                }
            }
            assert_eq!(case.left(), 0, "{asked}");
        }
        assert!(ends[0] > 20 && ends[1] > 20, "{ends:?}");
    }

    #[test]
    fn what_was_gathered_and_is_damaged_makes_no_layer() {
        let case = Case::new();
        with_holes(&case.source(), &[(0, 1)], 300_000);
        for damage in ["spool", "0"] {
            let gathered = case.gather(copy, 0, Writers::Frozen).unwrap();
            let file = File::options().write(true).open(gathered.aside.dir.join(damage)).unwrap();
            match damage {
                // The header of the first file that was cloned.
                "spool" => file.write_all_at(b"x", gathered.aside.entries[0].start).unwrap(),
                _ => std::fs::remove_file(gathered.aside.dir.join(damage)).unwrap(),
            }
            assert!(gathered.pack(&case.store, &|| false).is_err(), "{damage}");
            assert_eq!((case.left(), case.store.list().unwrap().len()), (0, 0));
        }
    }

    #[test]
    fn without_clones_nothing_is_gathered_and_nothing_left() {
        let case = Case::new();
        let top = File::open(case.source()).unwrap();
        // A file system of the kernel's own.
        let elsewhere = File::open("/proc").unwrap();
        let source = Source::Directory(elsewhere.as_fd());
        let outcome = gather(source, Writers::Running, &case.store, &|| false).unwrap();
        assert!(outcome.is_none());
        write_out(elsewhere.as_fd(), &case.store, &|| false).unwrap();
        write_out(top.as_fd(), &case.store, &|| false).unwrap();
        assert_eq!(case.left(), 0);
    }
}
