//! Writing a bundle: under another name until it is whole.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use oci_spec::image::{
    Arch, Descriptor, DescriptorBuilder, ImageConfigurationBuilder, ImageIndexBuilder,
    ImageManifestBuilder, MediaType, OciLayoutBuilder, Os, RootFsBuilder,
};
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;
use serde::Serialize;

use super::super::blob::{check_entries, read_blob};
use super::super::store::{LayerInfo, LayerStore, create, write_durable};
use super::super::{At as _, Error, Result, Shown, Stop, Stoppable, sync_dir};
use super::partial::Partial;
use super::{Bundle, ENTRIES, MAX_JSON, PROVENANCE, Provenance, SIZE, inspect, sha256};
use crate::failpoint;
use crate::model::head::Digest;

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
    let partial = Partial::make(store, above, readers.dirs())?;
    let copied = write(store, &info, provenance, &partial.path, readers, stop);
    let written =
        copied.map_err(|error| if stop.over() { Error::Stopped } else { error }).and_then(|()| {
            failpoint::fails("upper.bundle.rename.before").at("rename into place", dest)?;
            match rustix::fs::renameat_with(CWD, &partial.path, CWD, dest, RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) => Err(Error::Exists { path: Shown::from(dest) }),
                answer => answer.at("rename into place", dest),
            }
        });
    if let Err(error) = written {
        partial.give_up();
        return Err(error);
    }
    partial.forget();
    sync_dir(above)?;
    failpoint::hit("upper.bundle.after");
    inspect(dest)
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
