//! The patch bundle: the offline form of a preserved upper.
//!
//! ```text
//! <bundle>/
//!     oci-layout
//!     index.json                one manifest
//!     blobs/sha256/<digest>     manifest, config, and one layer: the captured upper
//! ```
//!
//! An OCI image layout, so `skopeo copy oci:<bundle>` and plain `tar --zstd -x` read it. The
//! [`Provenance`] is the manifest's annotation [`PROVENANCE`], JSON as a string: it goes wherever
//! the manifest goes and is covered by its digest. Nothing in a bundle is executed, and reading one
//! treats it as hostile: sizes are bounded, no symlink is followed, every digest is computed again.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use oci_spec::image::{
    Arch, Descriptor, DescriptorBuilder, ImageConfiguration, ImageConfigurationBuilder, ImageIndex,
    ImageIndexBuilder, ImageManifest, ImageManifestBuilder, MediaType, OciLayout, OciLayoutBuilder,
    Os, RootFsBuilder,
};
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::blob::{check_entries, read_blob};
use super::layer::Escaped;
use super::store::{LayerInfo, LayerStore, create, write_durable};
use super::tarfmt::{Entries, Entry, Kind};
use super::unpack::unpack;
use super::{
    At as _, Error, Result, Shown, Stop, Stoppable, path_of, remove, sync_dir, unique_name,
};
use crate::failpoint;
use crate::kernel::walk::Dir;
use crate::model::head::{Digest, Head, HeadAt};
use crate::model::ids::{Generation, HostId, LeaseId, SessionId, WorkspaceId};
use crate::model::view::{Change, DiffRow, FileKind, Mark, PathText, Told};

/// The manifest annotation that carries the provenance.
pub const PROVENANCE: &str = "overfence.provenance";
const SIZE: &str = "overfence.layer.uncompressed-bytes";
const ENTRIES: &str = "overfence.layer.entries";
/// The statement every bundle makes.
pub const STATEMENT: &str = "These bytes are unacknowledged local state of a session that lost its \
    lease. What of them no publication holds is part of no head; nothing merges them by itself.";

/// How the name of one begins that is not whole yet.
const PARTIAL: &str = ".overfence-bundle-";

/// No JSON file in a bundle is longer than this.
const MAX_JSON: u64 = 4 << 20;

/// Who may read a bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readers {
    /// Its owner, root, alone: where bundles of everybody lie beside each other.
    Owner,
    /// Who may read other files made there: the modes are left to the umask and to the directory,
    /// which somebody chose for this one.
    Usual,
}

impl Readers {
    /// The mode of directories.
    fn dirs(self) -> u32 {
        match self {
            Self::Owner => 0o700,
            Self::Usual => 0o777,
        }
    }

    /// The mode of files.
    fn files(self) -> u32 {
        self.dirs() & 0o666
    }
}

/// Where a bundle's bytes come from, and why they were not published.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// What was written.
    pub workspace: WorkspaceId,
    /// The session whose upper this is.
    pub session: SessionId,
    /// The lease it wrote under.
    pub lease: LeaseId,
    /// The fencing generation of that lease.
    pub generation: Generation,
    /// Where it ran.
    pub host: HostId,
    /// The layers it was mounted on, lowest first.
    pub base: Head,
    /// The version and head it last saw committed.
    pub expected: HeadAt,
    /// Why it was fenced.
    pub reason: String,
    /// When the session was opened.
    pub opened_at: jiff::Timestamp,
    /// When its lease ended.
    pub lease_ended_at: Option<jiff::Timestamp>,
    /// When the bundle was made.
    pub exported_at: jiff::Timestamp,
    /// [`STATEMENT`].
    pub statement: String,
    /// Whether the upper could not change while it was captured (`read-only` was proved).
    pub stable: bool,
    /// Names that are escaped in the layer, so that nobody unpacks a deletion that was none.
    #[serde(default)]
    pub escaped: Escaped,
    /// The session's entries of the evidence chain.
    pub evidence: serde_json::Value,
}

/// A bundle as its manifest describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Bundle {
    /// Digest of the manifest: names the bundle with everything in it.
    pub manifest: Digest,
    /// Where the bytes come from.
    pub provenance: Provenance,
    /// The one layer.
    pub layer: LayerInfo,
}

/// Writes a bundle of a layer, which was read back when it was stored, to `dest`, which must not exist. A
/// copy of the layer is read back before the bundle gets its name; on any error nothing is left, under
/// this name or another.
pub fn export(
    store: &LayerStore,
    layer: Digest,
    provenance: &Provenance,
    dest: &Path,
    readers: Readers,
    stop: Stop<'_>,
) -> Result<Bundle> {
    let info = store.info(layer)?;
    refuse_taken(dest)?;
    let above = match dest.parent() {
        Some(above) if !above.as_os_str().is_empty() => above,
        _ => Path::new("."),
    };
    let partial = unique_name(above, PARTIAL)?;
    failpoint::fails("upper.bundle.before").at("make", &partial)?;
    std::fs::DirBuilder::new().mode(readers.dirs()).create(&partial).at("make", &partial)?;
    let copied = write(store, &info, provenance, &partial, readers, stop);
    let written =
        copied.map_err(|error| if stop.over() { Error::Stopped } else { error }).and_then(|()| {
            failpoint::fails("upper.bundle.rename.before").at("rename into place", dest)?;
            match rustix::fs::renameat_with(CWD, &partial, CWD, dest, RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) => Err(Error::Exists { path: Shown::from(dest) }),
                answer => answer.at("rename into place", dest),
            }
        });
    if let Err(error) = written {
        // The first error is the one to tell.
        let _ = remove::remove_tree(&partial);
        return Err(error);
    }
    sync_dir(above)?;
    failpoint::hit("upper.bundle.after");
    inspect(dest)
}

/// Takes away what a crash inside [`export`] left in a directory of bundles.
pub fn sweep(bundles: &Path) -> Result<()> {
    let entries = match std::fs::read_dir(bundles) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        answer => answer.at("list", bundles)?,
    };
    for entry in entries {
        let entry = entry.at("list", bundles)?;
        if entry.file_name().as_encoded_bytes().starts_with(PARTIAL.as_bytes()) {
            remove::remove_tree(&entry.path())?;
        }
    }
    Ok(())
}

/// [`Error::Exists`] if something has this name: a bundle never takes a place that is taken.
pub fn refuse_taken(dest: &Path) -> Result<()> {
    match dest.symlink_metadata() {
        Ok(_) => Err(Error::Exists { path: Shown::from(dest) }),
        Err(_) => Ok(()),
    }
}

fn write(
    store: &LayerStore,
    info: &LayerInfo,
    provenance: &Provenance,
    dir: &Path,
    readers: Readers,
    stop: Stop<'_>,
) -> Result<()> {
    let blobs = dir.join("blobs/sha256");
    std::fs::DirBuilder::new()
        .mode(readers.dirs())
        .recursive(true)
        .create(&blobs)
        .at("make", &blobs)?;

    let from = store.blob_path(info.diff_id);
    let to = blobs.join(info.blob_digest.hex());
    // The very file that was read back, where it may have the same readers.
    let linked = readers == Readers::Owner && std::fs::hard_link(&from, &to).is_ok();
    match linked {
        true => stop.did(info.size_compressed, 0),
        false => copy_blob(&from, &to, info, readers, stop)?,
    }

    let built = || -> oci_spec::Result<_> {
        let rootfs = RootFsBuilder::default().diff_ids(vec![info.diff_id.to_string()]).build()?;
        ImageConfigurationBuilder::default()
            .os(Os::Linux)
            .architecture(Arch::default())
            .created(provenance.exported_at.to_string())
            .rootfs(rootfs)
            .build()
    };
    let config = made(built(), dir)?;
    let config = put(&blobs, readers, MediaType::ImageConfig, &config)?;
    let provenance = serde_json::to_string(provenance)
        .map_err(std::io::Error::from)
        .at("encode the provenance of", dir)?;
    let built = || -> oci_spec::Result<_> {
        let layer = DescriptorBuilder::default()
            .media_type(MediaType::ImageLayerZstd)
            .digest(oci_digest(info.blob_digest)?)
            .size(info.size_compressed)
            .annotations(HashMap::from([
                (SIZE.to_owned(), info.size_uncompressed.to_string()),
                (ENTRIES.to_owned(), info.entries.to_string()),
            ]))
            .build()?;
        ImageManifestBuilder::default()
            .schema_version(2u32)
            .media_type(MediaType::ImageManifest)
            .config(config)
            .layers(vec![layer])
            .annotations(HashMap::from([(PROVENANCE.to_owned(), provenance)]))
            .build()
    };
    let manifest = made(built(), dir)?;
    let manifest = put(&blobs, readers, MediaType::ImageManifest, &manifest)?;
    let built = || {
        ImageIndexBuilder::default()
            .schema_version(2u32)
            .media_type(MediaType::ImageIndex)
            .manifests(vec![manifest])
            .build()
    };
    let index = made(built(), dir)?;
    write_durable(&dir.join("index.json"), readers.files(), &json(&index, dir)?)?;
    let layout = OciLayoutBuilder::default().image_layout_version("1.0.0").build();
    let layout = made(layout, dir)?;
    write_durable(&dir.join("oci-layout"), readers.files(), &json(&layout, dir)?)?;
    sync_dir(&blobs)?;
    sync_dir(&dir.join("blobs"))?;
    sync_dir(dir)
}

/// Copies the layer, and reads the copy back.
fn copy_blob(
    from: &Path,
    to: &Path,
    info: &LayerInfo,
    readers: Readers,
    stop: Stop<'_>,
) -> Result<()> {
    let source = File::open(from).at("open", from)?;
    let mut copy = create(to, readers.files())?;
    std::io::copy(&mut Stoppable { inner: &source, stop }, &mut copy)
        .at("copy the layer to", to)?;
    copy.sync_all().at("fsync", to)?;
    let copy = File::open(to).at("open", to)?;
    // They were counted as they were copied.
    let uncounted = || stop.over();
    read_blob(Stoppable { inner: copy, stop: &uncounted }, info, check_entries)
}

fn json(value: &impl Serialize, dir: &Path) -> Result<Vec<u8>> {
    let bytes = serde_json::to_vec(value).map_err(std::io::Error::from).at("encode", dir)?;
    match bytes.len() as u64 <= MAX_JSON {
        true => Ok(bytes),
        false => Err(Error::Bundle {
            path: Shown::from(dir),
            why: "its provenance is longer than 4 MiB; export with less evidence".to_owned(),
        }),
    }
}

/// Writes a JSON blob under its digest.
fn put(
    blobs: &Path,
    readers: Readers,
    kind: MediaType,
    value: &impl Serialize,
) -> Result<Descriptor> {
    let bytes = json(value, blobs)?;
    let digest = sha256(&bytes);
    write_durable(&blobs.join(digest.hex()), readers.files(), &bytes)?;
    let digest = made(oci_digest(digest), blobs)?;
    Ok(Descriptor::new(kind, bytes.len() as u64, digest))
}

fn made<T>(outcome: oci_spec::Result<T>, dir: &Path) -> Result<T> {
    outcome.map_err(std::io::Error::other).at("encode the bundle", dir)
}

fn oci_digest(digest: Digest) -> oci_spec::Result<oci_spec::image::Digest> {
    digest.to_string().parse()
}

fn sha256(bytes: &[u8]) -> Digest {
    use sha2::Digest as _;
    Digest(sha2::Sha256::digest(bytes).into())
}

/// A bundle being read.
pub(super) struct Reader {
    top: Dir,
    path: PathBuf,
}

impl Reader {
    pub(super) fn open(path: &Path) -> Result<Self> {
        Ok(Self { top: Dir::open(path)?, path: path.to_owned() })
    }

    pub(super) fn refuse<T>(&self, what: &str, why: impl Into<String>) -> Result<T> {
        Err(Error::Bundle { path: Shown::from(&*self.path.join(what)), why: why.into() })
    }

    fn small(&self, dir: &Dir, name: &str) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        File::from(dir.open_file(name.as_ref())?)
            .take(MAX_JSON + 1)
            .read_to_end(&mut bytes)
            .at("read", dir.path().join(name))?;
        match bytes.len() as u64 > MAX_JSON {
            true => self.refuse(name, "it is longer than 4 MiB"),
            false => Ok(bytes),
        }
    }

    fn parse<T: DeserializeOwned>(&self, name: &str, bytes: &[u8]) -> Result<T> {
        serde_json::from_slice(bytes)
            .or_else(|e| self.refuse(name, format!("it is not the expected JSON ({e})")))
    }

    fn blobs(&self) -> Result<Dir> {
        Ok(self.top.child("blobs".as_ref())?.child("sha256".as_ref())?)
    }

    fn digest(&self, descriptor: &Descriptor) -> Result<Digest> {
        let text = descriptor.digest().to_string();
        text.parse().or_else(|_| self.refuse("blobs", format!("{text} is no sha256 digest")))
    }

    /// Reads a JSON blob and checks it against its descriptor.
    fn blob<T: DeserializeOwned>(&self, descriptor: &Descriptor, kind: MediaType) -> Result<T> {
        let name = self.digest(descriptor)?.hex();
        if *descriptor.media_type() != kind {
            return self.refuse(&name, format!("it is not of type {kind}"));
        }
        let bytes = self.small(&self.blobs()?, &name)?;
        if bytes.len() as u64 != descriptor.size() || sha256(&bytes).hex() != name {
            return self.refuse(&name, "its size or digest is not what is said of it");
        }
        self.parse(&name, &bytes)
    }

    /// The one element of a list.
    fn one<'d>(&self, what: &str, list: &'d [Descriptor]) -> Result<&'d Descriptor> {
        match list {
            [one] => Ok(one),
            _ => self.refuse("", format!("it has {} {what}, not one", list.len())),
        }
    }

    /// The descriptor of the one manifest, the manifest, and the configuration.
    fn manifest(&self) -> Result<(Descriptor, ImageManifest, ImageConfiguration)> {
        let layout: OciLayout = self.parse("oci-layout", &self.small(&self.top, "oci-layout")?)?;
        if layout.image_layout_version() != "1.0.0" {
            return self.refuse("oci-layout", "only layout version 1.0.0 is known");
        }
        let index: ImageIndex = self.parse("index.json", &self.small(&self.top, "index.json")?)?;
        let named = self.one("manifests", index.manifests())?;
        let manifest: ImageManifest = self.blob(named, MediaType::ImageManifest)?;
        let config: ImageConfiguration = self.blob(manifest.config(), MediaType::ImageConfig)?;
        Ok((named.clone(), manifest, config))
    }

    /// The layers of an image, lowest first, and the digests of their tars.
    pub(super) fn image(&self) -> Result<(Vec<Descriptor>, Vec<Digest>)> {
        let (_, manifest, config) = self.manifest()?;
        let diff_ids: Vec<Digest> = config
            .rootfs()
            .diff_ids()
            .iter()
            .map(|id| id.parse().or_else(|_| self.refuse("", "a diff id is no digest")))
            .collect::<Result<_>>()?;
        let layers = manifest.layers().clone();
        match layers.len() == diff_ids.len() {
            true => Ok((layers, diff_ids)),
            false => self.refuse("", "its manifest and its config name different layers"),
        }
    }

    /// A blob as it lies there, unread.
    pub(super) fn raw(&self, descriptor: &Descriptor) -> Result<File> {
        let name = self.digest(descriptor)?.hex();
        Ok(File::from(self.blobs()?.open_file(name.as_ref())?))
    }

    fn bundle(&self) -> Result<Bundle> {
        let (named, manifest, config) = self.manifest()?;
        let layer = self.one("layers", manifest.layers())?;
        if *layer.media_type() != MediaType::ImageLayerZstd {
            return self.refuse("", "its layer is not a zstd tar layer");
        }
        let diff_id = match &config.rootfs().diff_ids()[..] {
            [one] => one.parse().or_else(|_| self.refuse("", "its diff id is no digest"))?,
            _ => return self.refuse("", "its config does not name exactly one layer"),
        };
        let annotation = |map: &Option<HashMap<String, String>>, key: &str| match map
            .as_ref()
            .and_then(|m| m.get(key))
        {
            Some(value) => Ok(value.clone()),
            None => self.refuse("", format!("its annotation {key} is missing")),
        };
        let number = |key: &str| {
            let text = annotation(layer.annotations(), key)?;
            text.parse().or_else(|_| self.refuse("", format!("{key} is no number")))
        };
        let provenance = annotation(manifest.annotations(), PROVENANCE)?;
        Ok(Bundle {
            manifest: self.digest(&named)?,
            provenance: self.parse("provenance", provenance.as_bytes())?,
            layer: LayerInfo {
                diff_id,
                blob_digest: self.digest(layer)?,
                size_uncompressed: number(SIZE)?,
                size_compressed: layer.size(),
                entries: number(ENTRIES)?,
            },
        })
    }

    fn layer(&self, info: &LayerInfo) -> Result<File> {
        Ok(File::from(self.blobs()?.open_file(info.blob_digest.hex().as_ref())?))
    }
}

/// Reads what a bundle says of itself: manifest, config and provenance, digests checked; the layer
/// is not read. Needs neither agent nor root.
pub fn inspect(path: &Path) -> Result<Bundle> {
    Reader::open(path)?.bundle()
}

/// Reads a bundle whole: all digests and sizes, and each entry of the layer; counts the bytes of its
/// compressed layer. Needs neither agent nor root.
pub fn verify(path: &Path, stop: Stop<'_>) -> Result<Bundle> {
    let reader = Reader::open(path)?;
    let bundle = reader.bundle()?;
    let layer = Stoppable { inner: reader.layer(&bundle.layer)?, stop };
    read_blob(layer, &bundle.layer, check_entries)
        .map_err(|error| if stop.over() { Error::Stopped } else { error })?;
    Ok(bundle)
}

/// Unpacks a bundle's layer into an empty directory, which becomes an upper: verified as by [`verify`]
/// on the way, and whole only if this returns `Ok`. Needs root.
pub fn unpack_into(path: &Path, upper: BorrowedFd<'_>, stop: Stop<'_>) -> Result<Bundle> {
    let reader = Reader::open(path)?;
    let bundle = reader.bundle()?;
    let layer = Stoppable { inner: reader.layer(&bundle.layer)?, stop };
    let outcome = read_blob(layer, &bundle.layer, |tar| unpack(tar, upper));
    outcome.map_err(|error| if stop.over() { Error::Stopped } else { error })?;
    Ok(bundle)
}

/// Hands what a bundle changes to `each`, row by row, until that says `false`; the layer is verified
/// on the way, which is whole only if this returns `Ok`. What a name is to the base is what the
/// exporter said. Needs neither agent nor root.
pub fn diff(path: &Path, mut each: impl FnMut(DiffRow) -> bool) -> Result<()> {
    let reader = Reader::open(path)?;
    let bundle = reader.bundle()?;
    let mut left = false;
    let outcome = read_blob(reader.layer(&bundle.layer)?, &bundle.layer, |tar| {
        let mut entries = Entries::new(tar);
        let (mut count, mut told) = (0, None);
        while let Some(entry) = entries.next_entry()? {
            count += 1;
            // The marker of a directory of which everything was told says nothing new.
            if entry.kind == Kind::Opaque && told.as_ref() == Some(&entry.path) {
                continue;
            }
            if entry.kind == Kind::Directory && entry.meta.told.is_some() {
                told = Some(entry.path.clone());
            }
            let Some(row) = row(entry) else { continue };
            if !each(row) {
                left = true;
                return Err(Error::Stopped);
            }
        }
        entries.drain()?;
        Ok(count)
    });
    if left { Ok(()) } else { outcome }
}

/// What an entry changes; `None` for a top directory of which nothing is told to have changed.
fn row(entry: Entry) -> Option<DiffRow> {
    let (kind, bytes) = match &entry.kind {
        Kind::Directory | Kind::Opaque => (Some(FileKind::Directory), 0),
        Kind::File { size } => (Some(FileKind::File), *size),
        // Of which kind is the first name's to say.
        Kind::HardLink { .. } => (entry.meta.told.as_ref().and_then(|told| told.kind), 0),
        Kind::Symlink { .. } => (Some(FileKind::Symlink), 0),
        Kind::Whiteout => (None, 0),
        Kind::Fifo => (Some(FileKind::Fifo), 0),
        Kind::CharDevice { .. } => (Some(FileKind::CharDevice), 0),
        Kind::BlockDevice { .. } => (Some(FileKind::BlockDevice), 0),
    };
    let gone = entry.kind == Kind::Whiteout;
    let marks = if entry.kind == Kind::Opaque { vec![Mark::Opaque] } else { vec![] };
    let told = entry.meta.told.filter(|_| entry.kind != Kind::Opaque);
    let unknown =
        Told { change: Change::Unknown, kind, was: None, marks, differs: vec![], hides: 0 };
    let mut told = told.unwrap_or(unknown);
    // What the entry itself says wins.
    told.kind = kind;
    if gone {
        told.change = Change::Deleted;
    } else if told.change == Change::Deleted {
        told.change = Change::Unknown;
    }
    let plain = matches!(told.change, Change::Added | Change::Touched | Change::Unknown);
    if entry.path.is_empty() && plain && told.marks.is_empty() {
        return None;
    }
    Some(DiffRow { path: PathText::of(path_of(&entry.path)), bytes, told })
}

/// Puts a bundle's layer into the layer store, checked as by [`verify`].
pub fn import(path: &Path, store: &LayerStore) -> Result<Bundle> {
    let reader = Reader::open(path)?;
    let bundle = reader.bundle()?;
    let info = bundle.layer;
    store.import(reader.layer(&info)?, info.diff_id, info.size_uncompressed)?;
    Ok(bundle)
}

#[cfg(test)]
mod tests {
    use super::super::round_trip::capture_dir;
    use super::*;
    use crate::model::ids::Version;
    use crate::progress::{Amount, Counted, Progress};

    struct Case {
        tmp: tempfile::TempDir,
        store: LayerStore,
        layer: Digest,
    }

    fn export_to(
        store: &LayerStore,
        layer: Digest,
        provenance: &Provenance,
        dest: &Path,
    ) -> Result<Bundle> {
        export(store, layer, provenance, dest, Readers::Owner, &|| false)
    }

    fn case() -> Case {
        let tmp = tempfile::tempdir().unwrap();
        let source = tmp.path().join("source");
        std::fs::create_dir(&source).unwrap();
        std::fs::write(source.join("file"), b"unpublished bytes").unwrap();
        let store = LayerStore::open(&tmp.path().join("layers")).unwrap();
        let layer = capture_dir(&source, &store).unwrap().diff_id;
        Case { tmp, store, layer }
    }

    fn provenance() -> Provenance {
        Provenance {
            workspace: "team/repo".parse().unwrap(),
            session: SessionId::from_u128(1),
            lease: LeaseId::from_u128(2),
            generation: Generation(7),
            host: HostId::from_u128(3),
            base: Head(vec![Digest([1; 32])]),
            expected: HeadAt { version: Version(4), head: Head(vec![Digest([1; 32])]) },
            reason: "expired \u{2014} \"quoted\"\n".to_owned(),
            opened_at: jiff::Timestamp::from_second(1_700_000_000).unwrap(),
            lease_ended_at: None,
            exported_at: jiff::Timestamp::from_second(1_700_000_100).unwrap(),
            statement: STATEMENT.to_owned(),
            stable: true,
            escaped: Escaped::default(),
            evidence: serde_json::json!([{"seq": 1, "hash": "ab"}]),
        }
    }

    #[test]
    fn a_bundle_reads_back_what_was_put_in() {
        let case = case();
        let dest = case.tmp.path().join("bundle");
        let made = export_to(&case.store, case.layer, &provenance(), &dest).unwrap();
        assert_eq!(inspect(&dest).unwrap(), made);
        assert_eq!(verify(&dest, &|| false).unwrap(), made);
        assert_eq!(made.provenance, provenance());
        let other = LayerStore::open(&case.tmp.path().join("other")).unwrap();
        import(&dest, &other).unwrap();
        assert_eq!(other.list().unwrap(), [case.layer]);
        let error = export_to(&case.store, case.layer, &provenance(), &dest).unwrap_err();
        assert!(matches!(error, Error::Exists { .. }));
        let names: Vec<_> = std::fs::read_dir(case.tmp.path())
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .filter(|n| n.to_string_lossy().starts_with('.'))
            .collect();
        assert!(names.is_empty(), "left behind: {names:?}");
    }

    #[test]
    fn what_is_written_and_read_is_counted_to_its_end() {
        let case = case();
        let dest = case.tmp.path().join("bundle");
        let (written, read) = (Progress::default(), Progress::default());
        let counted = |progress| Counted { stop: || false, progress };
        let (owner, told) = (Readers::Owner, provenance());
        let made =
            export(&case.store, case.layer, &told, &dest, owner, &counted(&written)).unwrap();
        verify(&dest, &counted(&read)).unwrap();
        let whole = Amount { bytes: made.layer.size_compressed, entries: 0 };
        assert_eq!([written.done(), read.done()], [whole, whole]);
        let stopped = verify(&dest, &|| true);
        assert!(matches!(stopped, Err(Error::Stopped)), "{stopped:?}");
    }

    #[test]
    fn any_flipped_byte_of_any_blob_is_noticed() {
        let case = case();
        let dest = case.tmp.path().join("bundle");
        let made = export_to(&case.store, case.layer, &provenance(), &dest).unwrap();
        let blobs = dest.join("blobs/sha256");
        let mut tried = 0;
        for entry in std::fs::read_dir(&blobs).unwrap() {
            let path = entry.unwrap().path();
            let good = std::fs::read(&path).unwrap();
            for at in 0..good.len() {
                let mut bad = good.clone();
                bad[at] ^= 0x20;
                std::fs::write(&path, bad).unwrap();
                assert!(verify(&dest, &|| false).is_err(), "byte {at} of {}", path.display());
                tried += 1;
            }
            std::fs::write(&path, [&good[..], b" "].concat()).unwrap();
            assert!(verify(&dest, &|| false).is_err(), "a byte more in {}", path.display());
            std::fs::write(&path, &good[..good.len() - 1]).unwrap();
            assert!(verify(&dest, &|| false).is_err(), "a byte less in {}", path.display());
            std::fs::write(&path, good).unwrap();
        }
        assert!(tried > 1000, "only {tried} bytes");
        assert_eq!(verify(&dest, &|| false).unwrap(), made);
    }

    #[test]
    fn a_bundle_cannot_point_elsewhere_or_at_too_much() {
        let case = case();
        let dest = case.tmp.path().join("bundle");
        let made = export_to(&case.store, case.layer, &provenance(), &dest).unwrap();
        let blob = dest.join("blobs/sha256").join(made.layer.blob_digest.hex());
        let away = case.tmp.path().join("away");
        std::fs::rename(&blob, &away).unwrap();
        std::os::unix::fs::symlink(&away, &blob).unwrap();
        assert!(verify(&dest, &|| false).is_err(), "a symlink was followed");
        std::fs::remove_file(&blob).unwrap();
        assert!(verify(&dest, &|| false).is_err(), "the layer is missing");
        std::fs::rename(&away, &blob).unwrap();
        verify(&dest, &|| false).unwrap();
        let index = dest.join("index.json");
        let good = std::fs::read(&index).unwrap();
        let long = [&good[..], &vec![b' '; MAX_JSON as usize][..]].concat();
        for bad in [&b"{}"[..], b"", b"{\"schemaVersion\":2,\"manifests\":[]}", &long] {
            std::fs::write(&index, bad).unwrap();
            assert!(matches!(inspect(&dest), Err(Error::Bundle { .. })));
        }
    }

    #[test]
    fn an_unknown_layer_or_too_much_evidence_leaves_nothing() {
        let case = case();
        let dest = case.tmp.path().join("bundle");
        let error = export_to(&case.store, Digest([9; 32]), &provenance(), &dest).unwrap_err();
        assert!(matches!(error, Error::NoLayer(_)));
        let evidence = serde_json::Value::String("x".repeat(MAX_JSON as usize));
        let fat = Provenance { evidence, ..provenance() };
        assert!(export_to(&case.store, case.layer, &fat, &dest).is_err());
        let left = std::fs::read_dir(case.tmp.path()).unwrap().count();
        assert_eq!(left, 2, "source and layers alone stay");
    }
}
