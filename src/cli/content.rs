//! `overfence workspace import`, `revert` and `verify`

use std::path::PathBuf;

use clap::Args;

use super::context::Context;
use super::{parse, table, workspace};
use crate::agent::failure::Failure;
use crate::api::client::{Client, path};
use crate::model::code::Code;
use crate::model::view::{
    CreateWorkspace, ImportWorkspace, RevertWorkspace, WorkspaceReport, WorkspaceView,
};

/// `workspace import`
#[derive(Debug, Args)]
pub struct Import {
    /// The workspace to make.
    #[arg(short, long, value_name = "WS", value_parser = parse::name)]
    workspace: String,
    /// A directory, captured as its first layer.
    #[arg(long, value_name = "DIR", required_unless_present = "image", conflicts_with = "image")]
    directory: Option<PathBuf>,
    /// An OCI image layout with one image, whose layers become its first layers.
    #[arg(long, value_name = "DIR")]
    image: Option<PathBuf>,
    /// The image's layers, uncompressed, at most; else 64 GiB.
    #[arg(long, value_name = "N", requires = "image")]
    max_bytes: Option<u64>,
    /// Who answers for it; else the caller.
    #[arg(long, value_name = "NAME")]
    owner: Option<String>,
    /// How to reach them.
    #[arg(long, value_name = "TEXT", default_value = "")]
    contact: String,
    /// A label to select by; may be repeated.
    #[arg(long, value_name = "K=V", value_parser = parse::pair)]
    label: Vec<(String, String)>,
}

/// `workspace revert`
#[derive(Debug, Args)]
pub struct Revert {
    /// The workspace.
    #[arg(short, long, value_name = "WS", value_parser = parse::name)]
    workspace: String,
    /// The version whose layers are published once more, as a new version.
    #[arg(long, value_name = "VERSION")]
    to: u64,
    /// Why; goes into the evidence.
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
}

/// `workspace verify`
#[derive(Debug, Args)]
pub struct Verify {
    /// The workspace.
    #[arg(short, long, value_name = "WS", value_parser = parse::name)]
    workspace: String,
}

pub(super) fn import(context: &Context, client: &Client, wish: Import) -> Result<(), Failure> {
    let about = CreateWorkspace {
        id: wish.workspace,
        owner: wish.owner,
        contact: wish.contact,
        labels: wish.label.into_iter().collect(),
        lowers: parse::path_texts(wish.directory.as_slice())?,
    };
    let image = wish.image.as_deref().map(parse::path_text).transpose()?;
    let body = ImportWorkspace { about, image, max_bytes: wish.max_bytes };
    context.show(&client.post::<WorkspaceView>("/v1/import", &body)?, workspace::one)
}

pub(super) fn revert(context: &Context, client: &Client, wish: Revert) -> Result<(), Failure> {
    let body = RevertWorkspace { to: wish.to, reason: wish.reason };
    let place = path(&["workspaces", &wish.workspace, "revert"]);
    context.show(&client.post::<WorkspaceView>(&place, &body)?, workspace::one)
}

pub(super) fn verify(context: &Context, client: &Client, wish: Verify) -> Result<u8, Failure> {
    let place = path(&["workspaces", &wish.workspace, "verify"]);
    let report: WorkspaceReport = client.post(&place, &serde_json::json!({}))?;
    context.show(&report, |report| {
        table::rows(
            ["LAYER", "UNPACKED", "DAMAGE"],
            report.layers.iter().map(|layer| {
                let unpacked = if layer.unpacked { "yes" } else { "no" };
                [layer.layer.clone(), unpacked.to_owned(), table::or_dash(layer.fault.clone())]
            }),
        )
    })?;
    match report.layers.iter().filter(|layer| layer.fault.is_some()).count() {
        0 => Ok(0),
        n => {
            let text = format!(
                "{n} layer(s) of {} are damaged and are not mounted: bring `layers/` back from \
                 another copy, or revert to a version without them",
                report.workspace
            );
            // It found out what it was to find out, and refused nothing.
            context.complain(&Failure::new(Code::LayerDamaged, text));
            Ok(1)
        }
    }
}
