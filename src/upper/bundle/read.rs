//! Reading a bundle, which may come from anywhere.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read as _;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use oci_spec::image::{
    Descriptor, ImageConfiguration, ImageIndex, ImageManifest, MediaType, OciLayout,
};
use serde::de::DeserializeOwned;

use super::super::blob::{check_entries, read_blob};
use super::super::store::{LayerInfo, LayerStore};
use super::super::tarfmt::{Entries, Entry, Kind};
use super::super::unpack::unpack;
use super::super::{At as _, Error, Result, Shown, Stop, Stoppable, path_of};
use super::{Bundle, ENTRIES, MAX_JSON, PROVENANCE, SIZE, sha256};
use crate::kernel::walk::Dir;
use crate::model::head::Digest;
use crate::model::view::{Change, DiffRow, FileKind, Mark, PathText, Told};

/// A bundle being read.
pub(in crate::upper) struct Reader {
    top: Dir,
    path: PathBuf,
}

impl Reader {
    pub(in crate::upper) fn open(path: &Path) -> Result<Self> {
        Ok(Self { top: Dir::open(path)?, path: path.to_owned() })
    }

    pub(in crate::upper) fn refuse<T>(&self, what: &str, why: impl Into<String>) -> Result<T> {
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
    pub(in crate::upper) fn image(&self) -> Result<(Vec<Descriptor>, Vec<Digest>)> {
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
    pub(in crate::upper) fn raw(&self, descriptor: &Descriptor) -> Result<File> {
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
