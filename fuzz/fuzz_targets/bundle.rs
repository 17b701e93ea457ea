//! Reads arbitrary bytes as a bundle: three lines are its manifest, configuration and
//! provenance, what follows is the tar of its layer. Digests, sizes and counts are made to fit, so that
//! not all ends at the first of them.
#![no_main]

mod sums;

use std::fs;
use std::path::Path;

use overfence::upper::{bundle, fuzz_entries};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let place = tempfile::tempdir_in("/dev/shm").unwrap();
    let blobs = place.path().join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let mut parts = input.splitn(4, |&byte| byte == b'\n');
    let mut next = || parts.next().unwrap_or_default();
    let (manifest, config, provenance, tar) = (next(), next(), next(), sums::fitted(next()));
    let config = fitted(config, |config| {
        set(config.get_mut("rootfs"), "diff_ids", json!([digest(&tar)]));
    });
    let layer = zstd::encode_all(&*tar, 1).unwrap();
    let manifest = fitted(manifest, |manifest| {
        put(&blobs, &config, manifest.get_mut("config"));
        let annotations = json!({
            "overfence.layer.uncompressed-bytes": tar.len().to_string(),
            "overfence.layer.entries": fuzz_entries(&tar).unwrap_or(0).to_string(),
        });
        set(manifest.pointer_mut("/layers/0"), "annotations", annotations);
        put(&blobs, &layer, manifest.pointer_mut("/layers/0"));
        let provenance = json!(String::from_utf8_lossy(provenance));
        set(manifest.get_mut("annotations"), bundle::PROVENANCE, provenance);
    });
    let mut named = json!({ "mediaType": "application/vnd.oci.image.manifest.v1+json" });
    put(&blobs, &manifest, Some(&mut named));
    let index = json!({ "schemaVersion": 2, "manifests": [named] });
    fs::write(place.path().join("index.json"), index.to_string()).unwrap();
    fs::write(place.path().join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    let read = bundle::inspect(place.path());
    let verified = bundle::verify(place.path(), &|| false);
    let shown = bundle::diff(place.path(), |_| true);
    assert_eq!(verified.is_ok(), read.is_ok() && shown.is_ok(), "{verified:?} {read:?} {shown:?}");
});

/// A text with what has to fit put in, if it is JSON.
fn fitted(text: &[u8], fit: impl FnOnce(&mut Value)) -> Vec<u8> {
    let Ok(mut value) = serde_json::from_slice::<Value>(text) else { return text.to_vec() };
    fit(&mut value);
    serde_json::to_vec(&value).unwrap()
}

fn set(object: Option<&mut Value>, key: &str, value: Value) {
    if let Some(Value::Object(object)) = object {
        object.insert(key.to_owned(), value);
    }
}

/// Puts a blob where its digest says, and both digest and length into what names it.
fn put(blobs: &Path, bytes: &[u8], mut named: Option<&mut Value>) {
    let digest = digest(bytes);
    fs::write(blobs.join(&digest["sha256:".len()..]), bytes).unwrap();
    set(named.as_deref_mut(), "digest", json!(digest));
    set(named, "size", json!(bytes.len()));
}

fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}
