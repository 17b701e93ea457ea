//! `overfence workspace hold`, `repair` and `delete`

use clap::Args;

use super::context::Context;
use super::{parse, workspace};
use crate::agent::failure::Failure;
use crate::api::client::{Client, path};
use crate::model::code::Code;
use crate::model::view::{DeleteWorkspace, HoldWorkspace, RepairWorkspace, WorkspaceView};

/// `workspace hold`
#[derive(Debug, Args)]
pub struct Hold {
    /// The workspace.
    #[arg(short, long, value_name = "WS", value_parser = parse::name)]
    workspace: String,
    /// Why; it is shown in every refusal.
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

/// `workspace repair`
#[derive(Debug, Args)]
pub struct Repair {
    /// The workspace.
    #[arg(short, long, value_name = "WS", value_parser = parse::name)]
    workspace: String,
    /// The generation to go on from: at least the highest that was ever seen. The next lease gets
    /// the one after it.
    #[arg(long, value_name = "N")]
    accept_generation: u64,
    /// Why it is believed again; goes into history and evidence.
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

/// `workspace delete`
#[derive(Debug, Args)]
pub struct Delete {
    /// The workspace.
    #[arg(short, long, value_name = "WS", value_parser = parse::name)]
    workspace: String,
    /// Why; goes into history and evidence.
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
    /// Do not ask before deleting.
    #[arg(long)]
    yes: bool,
}

pub(super) fn hold(context: &Context, client: &Client, wish: Hold) -> Result<(), Failure> {
    let body = HoldWorkspace { reason: wish.reason };
    let place = path(&["workspaces", &wish.workspace, "hold"]);
    context.show(&client.post::<WorkspaceView>(&place, &body)?, workspace::one)
}

pub(super) fn repair(context: &Context, client: &Client, wish: Repair) -> Result<(), Failure> {
    let body = RepairWorkspace { accept_generation: wish.accept_generation, reason: wish.reason };
    let place = path(&["workspaces", &wish.workspace, "repair"]);
    context.show(&client.post::<WorkspaceView>(&place, &body)?, workspace::one)
}

pub(super) fn delete(context: &Context, client: &Client, wish: Delete) -> Result<(), Failure> {
    let view: WorkspaceView = client.get(&path(&["workspaces", &wish.workspace]))?;
    let what = format!(
        "This deletes workspace {} of {}: version {}, {} layer(s). Its name, history and generation \
         {} stay known",
        view.id,
        view.owner,
        view.version,
        view.head.len(),
        view.generation
    );
    if let Some(why) = &view.hold {
        let why = format!("workspace {} is on HOLD and is not deleted: {why}", view.id);
        return Err(Failure::new(Code::WorkspaceHeld, why));
    }
    context.confirm(&what, wish.yes)?;
    let body = DeleteWorkspace { reason: wish.reason };
    let place = path(&["workspaces", &wish.workspace, "delete"]);
    context.show(&client.post::<WorkspaceView>(&place, &body)?, workspace::one)
}
