//! Takes the layers of an OCI image layout into the layer store.
//!
//! The layout is treated as hostile: it is read by descriptor and no symlink in it is followed; the
//! digest of each blob and of each layer's tar is computed again; each layer is unpacked into a
//! directory of the store's own, by the same walk as for any layer, and captured from there. So what a
//! head names is a canonical layer of ours, whatever wrote the image; and a refused one leaves nothing.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufReader, Read};
use std::os::fd::AsFd as _;
use std::path::Path;

use oci_spec::image::{Descriptor, MediaType};
use sha2::{Digest as _, Sha256};

use super::blob::Hashed;
use super::bundle::Reader;
use super::changes::Format;
use super::layer::{Captured, Source, Writers, capture};
use super::store::LayerStore;
use super::tarfmt::{Entry, Kind};
use super::unpack::unpack_checked;
use super::{At as _, Error, Result, Stop, Stoppable, go_on, path_of, remove};
use crate::failpoint;
use crate::kernel::walk::Dir;
use crate::model::head::Digest;

/// Layers of one image at most; a mount takes no more.
const MAX_LAYERS: usize = 500;
/// Entries of one layer at most.
const MAX_ENTRIES: usize = 10_000_000;

/// One layer of an image, and what it became here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// Digest of its tar in the image.
    pub foreign: Digest,
    /// The layer in the store.
    pub layer: Captured,
}

/// Takes all layers of the one image in the layout at `path`, lowest first. Their tars have
/// `max_bytes` at most, all together.
///
/// # Errors
/// [`Error::Bundle`]: it is no such layout, or names what it has not; [`Error::Hostile`] and
/// [`Error::Corrupt`]: a layer is not what it should be.
pub fn import(
    path: &Path,
    store: &LayerStore,
    max_bytes: u64,
    stop: Stop<'_>,
) -> Result<Vec<Imported>> {
    let reader = Reader::open(path)?;
    let (layers, diff_ids) = reader.image()?;
    if layers.len() > MAX_LAYERS {
        return reader.refuse("", format!("it has more than {MAX_LAYERS} layers"));
    }
    let mut left = max_bytes;
    let mut all = Vec::new();
    for (layer, foreign) in layers.iter().zip(diff_ids) {
        match one(&reader, store, layer, foreign, left, stop) {
            Ok((captured, bytes)) => {
                left -= bytes;
                all.push(Imported { foreign, layer: captured });
            }
            Err(fault) => {
                store.settle(all.into_iter().map(|one| one.layer.diff_id));
                return Err(fault);
            }
        }
    }
    Ok(all)
}

fn one(
    reader: &Reader,
    store: &LayerStore,
    layer: &Descriptor,
    foreign: Digest,
    left: u64,
    stop: Stop<'_>,
) -> Result<(Captured, u64)> {
    check_blob(reader, layer, stop)?;
    let blob = Stoppable { inner: BufReader::new(reader.raw(layer)?), stop };
    let tar: Box<dyn Read + '_> = match layer.media_type() {
        MediaType::ImageLayer => Box::new(blob),
        MediaType::ImageLayerGzip => Box::new(flate2::read::MultiGzDecoder::new(blob)),
        MediaType::ImageLayerZstd => {
            Box::new(zstd::Decoder::new(blob).at("decompress", path_of(b"the layer"))?)
        }
        other => return reader.refuse("", format!("a layer is of type {other}")),
    };
    let scratch = store.scratch()?;
    let may = failpoint::fails("upper.image.before").at("unpack into", &scratch);
    let unpacked = may.and_then(|()| unpacked(&scratch, tar, foreign, left, stop));
    let outcome = unpacked.and_then(|bytes| {
        let tree = Dir::open(&scratch)?;
        let source = Source::Upper(tree.as_fd(), Format::Trusted);
        Ok((capture(source, Writers::Running, store, stop)?, bytes))
    });
    // The first error is the one to tell; what stays is taken away by the sweep at start.
    let _ = remove::remove_tree(&scratch);
    failpoint::hit("upper.image.after");
    outcome.map_err(|error| if stop.over() { Error::Stopped } else { error })
}

/// Reads the compressed file once for its digest: nothing is unpacked from another file.
fn check_blob(reader: &Reader, layer: &Descriptor, stop: Stop<'_>) -> Result<()> {
    let file = Stoppable { inner: reader.raw(layer)?, stop };
    let mut blob = Hashed::new(file.take(layer.size().saturating_add(1)));
    std::io::copy(&mut blob, &mut std::io::sink()).at("read", path_of(b"the layer"))?;
    let (_, digest, size) = blob.finish();
    match digest.to_string() == layer.digest().to_string() && size == layer.size() {
        true => Ok(()),
        false => reader.refuse(
            &format!("blobs/{}", layer.digest()),
            "its size or digest is not what is said of it",
        ),
    }
}

fn unpacked(
    scratch: &Path,
    tar: impl Read,
    foreign: Digest,
    left: u64,
    stop: Stop<'_>,
) -> Result<u64> {
    let top = File::open(scratch).at("open", scratch)?;
    let mut tar = Hashed::new(tar.take(left.saturating_add(1)));
    let mut names = Names::default();
    let outcome = unpack_checked(&mut tar, top.as_fd(), &mut |entry| {
        go_on(stop)?;
        names.note(entry)
    });
    let (_, found, bytes) = tar.finish();
    if bytes > left {
        let why = "the layers are longer than what was allowed (`--max-bytes`)".to_owned();
        return Err(Error::Corrupt { what: "the image".to_owned(), why });
    }
    outcome?;
    match found == foreign {
        true => Ok(bytes),
        false => Err(Error::Corrupt {
            what: format!("the layer offered as {foreign}"),
            why: format!("its content has digest {found}"),
        }),
    }
}

/// What a layer named so far: a second entry of a name could show one thing to who checks and
/// another to who unpacks.
#[derive(Default)]
struct Names(HashSet<[u8; 16]>);

impl Names {
    fn note(&mut self, entry: &Entry) -> Result<()> {
        let class = match entry.kind {
            Kind::Whiteout => b'w',
            Kind::Opaque => b'o',
            _ => b'p',
        };
        let hash = Sha256::new().chain_update([class]).chain_update(&entry.path).finalize();
        let mut short = [0; 16];
        short.copy_from_slice(&hash[..16]);
        if !self.0.insert(short) {
            return Err(Error::hostile(&entry.path, "the layer has it twice"));
        }
        match self.0.len() > MAX_ENTRIES {
            true => Err(Error::hostile(&entry.path, "the layer has too many entries")),
            false => Ok(()),
        }
    }
}
