//! `overfence bundle`

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde::Serialize;

use super::context::Context;
use super::diff::Printer;
use super::progress::Local;
use super::{parse, progress, session, table};
use crate::agent::failure::Failure;
use crate::api::client::path;
use crate::model::code::Code;
use crate::model::head::{Digest, Head};
use crate::model::ids::{Generation, SessionId, WorkspaceId};
use crate::model::view::{ApplyBundle, Opened, PathText};
use crate::progress::{Amount, What};
use crate::upper::bundle::{self, Provenance};

/// What can be done with bundles.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Print what a bundle says of itself; its layer is not read.
    Inspect {
        /// The bundle's directory.
        path: PathBuf,
    },
    /// Show what a bundle changes against the layers that it was made on, and verify it on the way.
    Diff {
        /// The bundle's directory.
        path: PathBuf,
    },
    /// Open a session whose upper is a bundle's, made to fit the present head; refused, with the
    /// paths, where both sides changed the same. Asks the agent, and publishes nothing by itself.
    Apply(Box<Apply>),
    /// Read a bundle whole: every digest, size and entry.
    Verify {
        /// The bundle's directory.
        path: PathBuf,
    },
}

/// `bundle apply`
#[derive(Debug, Args)]
pub struct Apply {
    /// The bundle's directory.
    path: PathBuf,
    #[command(flatten)]
    terms: session::Terms,
    /// Whose life the lease follows: the command's, or whoever calls `lease beat`.
    #[arg(long, value_name = "WHO", default_value = "beat")]
    holder: session::Holder,
    /// The person who takes the responsibility.
    #[arg(long, value_name = "NAME")]
    authorised_by: String,
    /// Why; goes into the evidence.
    #[arg(long, value_name = "TEXT")]
    reason: String,
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
        Verb::Apply(wish) => return apply(context, *wish),
        Verb::Diff { path } => return diff(context, &path),
        Verb::Inspect { path } => (path, false),
        Verb::Verify { path } => (path, true),
    };
    let read = bundle::inspect(&path).and_then(|bundle| match verified {
        false => Ok(bundle),
        true => {
            let total = Amount { bytes: bundle.layer.size_compressed, entries: 0 };
            bundle::verify(&path, &Local::new(context, What::Verify, total))
        }
    });
    let bundle = read.map_err(|fault| unread(&path, &fault))?;
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

fn apply(context: &Context, wish: Apply) -> Result<(), Failure> {
    let workspace = wish.terms.workspace.clone();
    let body = ApplyBundle {
        bundle: parse::path_text(&wish.path)?,
        authorised_by: wish.authorised_by,
        reason: wish.reason,
        open: session::wish(wish.terms, wish.holder, None)?,
    };
    let (place, whose) = (path(&["bundles", "apply"]), path(&["workspaces", &workspace]));
    let opened: Opened = progress::post(context, &context.client()?, &place, &body, &whose)
        .map_err(|failure| session::held(&workspace, failure))?;
    context.show(&opened, session::opened)
}

fn unread(path: &Path, fault: &crate::upper::Error) -> Failure {
    use std::error::Error as _;
    let source = fault.source().map(|source| format!(" ({source})")).unwrap_or_default();
    let code = if path.exists() { Code::BundleInvalid } else { Code::NotFound };
    Failure::new(code, format!("{}: {fault}{source}", path.display()))
}

/// Whose changes a diff shows.
#[derive(Serialize)]
struct Of<'b> {
    bundle: PathText,
    workspace: &'b WorkspaceId,
    session: SessionId,
    generation: Generation,
    base: &'b Head,
}

fn diff(context: &Context, path: &Path) -> Result<(), Failure> {
    let bundle = bundle::inspect(path).map_err(|fault| unread(path, &fault))?;
    let from = &bundle.provenance;
    let of = Of {
        bundle: PathText::of(path),
        workspace: &from.workspace,
        session: from.session,
        generation: from.generation,
        base: &from.base,
    };
    let mut printer = Printer::new(context, &of)?;
    let (mut outcome, mut left) = (Ok(()), false);
    let read = bundle::diff(path, |row| match printer.row(&row) {
        Ok(more) => {
            left = !more;
            more
        }
        Err(failure) => {
            outcome = Err(failure);
            false
        }
    });
    match (read, outcome) {
        (Err(fault), _) => Err(printer.broken(unread(path, &fault))),
        (Ok(()), Err(failure)) => Err(printer.broken(failure)),
        (Ok(()), Ok(())) if left => Ok(()),
        (Ok(()), Ok(())) => printer.end(),
    }
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
        ("read again", (!from.stable).then(|| read_again(view))),
        ("changed while read", (from.changed > 0).then(|| format!("{} files", from.changed))),
        ("sockets left out", (from.skipped_sockets > 0).then(|| from.skipped_sockets.to_string())),
        ("escaped names", (from.escaped.entries > 0).then(|| escaped(from))),
        ("statement", Some(from.statement.clone())),
    ])
}

fn read_again(view: &BundleView) -> String {
    match view.provenance.read_again {
        Some(layer) if layer == view.layer => "the same".to_owned(),
        Some(layer) => format!("another layer, {layer}: it changed meanwhile"),
        None => "it could not be: files kept changing".to_owned(),
    }
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
