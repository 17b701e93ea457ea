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

mod partial;
mod read;
mod write;

use serde::{Deserialize, Serialize};

use super::layer::Escaped;
use super::store::LayerInfo;
use crate::model::head::{Digest, Head, HeadAt};
use crate::model::ids::{Generation, HostId, LeaseId, SessionId, WorkspaceId};

pub use partial::{sweep, sweep_noted};
pub(super) use read::Reader;
pub use read::{diff, import, inspect, unpack_into, verify};
pub use write::{Readers, export, refuse_taken};

/// The manifest annotation that carries the provenance.
pub const PROVENANCE: &str = "overfence.provenance";
const SIZE: &str = "overfence.layer.uncompressed-bytes";
const ENTRIES: &str = "overfence.layer.entries";
/// The statement every bundle makes.
pub const STATEMENT: &str = "These bytes are unacknowledged local state of a session that lost its \
    lease. What of them no publication holds is part of no head; nothing merges them by itself.";

/// No JSON file in a bundle is longer than this.
const MAX_JSON: u64 = 4 << 20;

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
    /// Whether the upper could not change while it was captured (`read-only` was proved), and did not.
    pub stable: bool,
    /// The layer that a second reading gave, where it was not stable. Another one: it changed meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_again: Option<Digest>,
    /// Files that changed while they were captured.
    #[serde(default)]
    pub changed: u64,
    /// Sockets, which a layer cannot carry.
    #[serde(default)]
    pub skipped_sockets: u64,
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

fn sha256(bytes: &[u8]) -> Digest {
    use sha2::Digest as _;
    Digest(sha2::Sha256::digest(bytes).into())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::round_trip::capture_dir;
    use super::super::store::LayerStore;
    use super::super::{Error, Result};
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
            read_again: None,
            changed: 0,
            skipped_sockets: 0,
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
