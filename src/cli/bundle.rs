//! `overfence bundle`

use std::path::PathBuf;

use clap::Subcommand;
use serde::Serialize;

use super::context::Context;
use super::table;
use crate::agent::failure::Failure;
use crate::model::code::Code;
use crate::model::head::Digest;
use crate::upper::bundle::{self, Provenance};

/// What can be done with bundles.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Print what a bundle says of itself; its layer is not read.
    Inspect {
        /// The bundle's directory.
        path: PathBuf,
    },
    /// Read a bundle whole: every digest, size and entry.
    Verify {
        /// The bundle's directory.
        path: PathBuf,
    },
}

/// A bundle, as shown.
#[derive(Serialize)]
struct BundleView {
    /// Whether the layer was read.
    verified: bool,
    /// The layer's name.
    layer: Digest,
    /// Digest of its compressed file.
    blob: Digest,
    /// Bytes, uncompressed.
    bytes: u64,
    /// Entries in it.
    entries: u64,
    /// Where the bytes come from.
    provenance: Provenance,
}

/// Does it.
pub(super) fn main(context: &Context, verb: Verb) -> Result<(), Failure> {
    let (path, verified) = match verb {
        Verb::Inspect { path } => (path, false),
        Verb::Verify { path } => (path, true),
    };
    let read = if verified { bundle::verify(&path) } else { bundle::inspect(&path) };
    let bundle = read.map_err(|fault| {
        use std::error::Error as _;
        let source = fault.source().map(|source| format!(" ({source})")).unwrap_or_default();
        let code = if path.exists() { Code::BundleInvalid } else { Code::NotFound };
        Failure::new(code, format!("{}: {fault}{source}", path.display()))
    })?;
    let view = BundleView {
        verified,
        layer: bundle.layer.diff_id,
        blob: bundle.layer.blob_digest,
        bytes: bundle.layer.size_uncompressed,
        entries: bundle.layer.entries,
        provenance: bundle.provenance,
    };
    context.show(&view, shown)
}

fn shown(view: &BundleView) -> String {
    let from = &view.provenance;
    table::facts([
        (
            "bundle",
            Some(if view.verified { "every byte verified" } else { "layer not read" }.into()),
        ),
        ("workspace", Some(from.workspace.to_string())),
        ("session", Some(from.session.to_string())),
        ("generation", Some(format!("{} (lease {})", from.generation, from.lease))),
        ("host", Some(from.host.to_string())),
        ("base", Some(from.base.to_string())),
        ("expected", Some(format!("version {}", from.expected.version))),
        ("layer", Some(view.layer.to_string())),
        ("content", Some(format!("{} in {} entries", table::bytes(view.bytes), view.entries))),
        ("fenced", Some(from.reason.clone())),
        ("opened", Some(from.opened_at.to_string())),
        ("lease ended", from.lease_ended_at.map(|at| at.to_string())),
        ("exported", Some(from.exported_at.to_string())),
        ("stable", Some(if from.stable { "yes" } else { "no: it could change meanwhile" }.into())),
        ("escaped names", (from.escaped.entries > 0).then(|| escaped(from))),
        ("statement", Some(from.statement.clone())),
    ])
}

/// Whoever unpacks the layer by other means finds these names changed.
fn escaped(from: &Provenance) -> String {
    let first: Vec<_> = from
        .escaped
        .first
        .iter()
        .take(5)
        .map(|[path, stored]| format!("{path} as {stored}"))
        .collect();
    format!("{} in the layer: {}", from.escaped.entries, first.join(", "))
}
