//! `overfence workspace`

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::context::Context;
use super::words::words;
use super::{content, hold, parse, progress, table};
use crate::agent::failure::Failure;
use crate::api::client::path;
use crate::model::view::{CreateWorkspace, HistoryView, WorkspaceView};

/// What can be done with workspaces.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Create one.
    Create(Create),
    /// List them.
    List {
        /// Only those with this label; may be repeated.
        #[arg(long, value_name = "K=V", value_parser = parse::pair)]
        selector: Vec<(String, String)>,
    },
    /// Show head, version, generation, lease, writer and suspects of one.
    Status {
        /// Its name.
        #[arg(value_parser = parse::name)]
        workspace: String,
    },
    /// Show its publications, refusals and takeovers.
    History {
        /// Its name.
        #[arg(value_parser = parse::name)]
        workspace: String,
        /// At most so many rows.
        #[arg(long, value_name = "N", default_value_t = 100)]
        limit: usize,
    },
    /// Make one of a directory or an OCI image layout.
    Import(content::Import),
    /// Publish the layers of an earlier version once more, as a new version.
    Revert(content::Revert),
    /// Read each layer of its head, and name what is damaged.
    Verify(content::Verify),
    /// Put one on HOLD: its writer is frozen, and nothing is granted or published until it is
    /// repaired.
    Hold(hold::Hold),
    /// Lift a HOLD, above the highest generation that was ever seen.
    Repair(hold::Repair),
    /// Delete one that has neither sessions nor preserved deltas. Its generation lives on.
    Delete(hold::Delete),
}

/// `workspace create`
#[derive(Debug, Args)]
pub struct Create {
    /// Its name: letters, digits and . _ - / @ +
    #[arg(value_parser = parse::name)]
    workspace: String,
    #[command(flatten)]
    about: About,
}

/// What a new workspace is made of.
#[derive(Debug, Args)]
pub(super) struct About {
    /// A host directory captured once as its first layer; may be repeated, lowest first.
    #[arg(long, value_name = "DIR")]
    pub(super) lower: Vec<PathBuf>,
    /// Who answers for it; else the caller.
    #[arg(long, value_name = "NAME")]
    pub(super) owner: Option<String>,
    /// How to reach them.
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(super) contact: String,
    /// A label to select by; may be repeated.
    #[arg(long, value_name = "K=V", value_parser = parse::pair)]
    pub(super) label: Vec<(String, String)>,
}

/// Does it.
pub(super) fn main(context: &Context, verb: Verb) -> Result<u8, Failure> {
    let client = context.client()?;
    match verb {
        Verb::Create(Create { workspace, about }) => {
            let wish = CreateWorkspace {
                id: workspace,
                owner: about.owner,
                contact: about.contact,
                labels: about.label.into_iter().collect(),
                lowers: parse::path_texts(&about.lower)?,
            };
            let made: WorkspaceView = client.post(&path(&["workspaces"]), &wish)?;
            context.show(&made, one)
        }
        Verb::List { selector } => {
            let mut all: Vec<WorkspaceView> = client.get(&path(&["workspaces"]))?;
            all.retain(|workspace| parse::selected(&workspace.labels, &selector));
            context.list(&all, "workspaces", list)
        }
        Verb::Status { workspace } => {
            let view: WorkspaceView = client.get(&path(&["workspaces", &workspace]))?;
            context.show(&view, one)
        }
        Verb::History { workspace, limit } => {
            let place = path(&["workspaces", &workspace, "history"]);
            let rows: Vec<HistoryView> = client.get(&format!("{place}?limit={limit}"))?;
            context.list(&rows, "history", history)
        }
        Verb::Import(wish) => content::import(context, &client, wish),
        Verb::Revert(wish) => content::revert(context, &client, wish),
        Verb::Verify(wish) => return content::verify(context, &client, wish),
        Verb::Hold(wish) => hold::hold(context, &client, wish),
        Verb::Repair(wish) => hold::repair(context, &client, wish),
        Verb::Delete(wish) => hold::delete(context, &client, wish),
    }?;
    Ok(0)
}

fn list(all: &[WorkspaceView]) -> String {
    table::rows(
        ["WORKSPACE", "VERSION", "GENERATION", "WRITER", "LEASE", "LEFT", "SUSPECT", "HOLD"],
        all.iter().map(|workspace| {
            let lease = workspace.lease.as_ref();
            [
                workspace.id.clone(),
                workspace.version.to_string(),
                workspace.generation.to_string(),
                table::or_dash(workspace.writer_session.clone()),
                table::or_dash(lease.map(|lease| lease.state.clone())),
                table::left(lease.and_then(|lease| lease.remaining_ms)),
                workspace.suspect_sessions.len().to_string(),
                table::or_dash(workspace.hold.clone()),
            ]
        }),
    )
}

pub(super) fn one(workspace: &WorkspaceView) -> String {
    let lease = workspace.lease.as_ref();
    let head = match workspace.head.last() {
        None => "(empty)".into(),
        Some(top) => format!("{} layer(s), top {top}", workspace.head.len()),
    };
    table::facts([
        ("workspace", Some(workspace.id.clone())),
        ("owner", Some(workspace.owner.clone())),
        ("contact", Some(workspace.contact.clone())),
        ("labels", Some(table::labels(&workspace.labels))),
        ("version", Some(workspace.version.to_string())),
        ("head", Some(head)),
        ("generation", Some(workspace.generation.to_string())),
        (
            "seen here",
            (workspace.generation_seen != workspace.generation)
                .then(|| format!("generation {}", workspace.generation_seen)),
        ),
        ("writer", Some(table::or_dash(workspace.writer_session.clone()))),
        ("may publish", Some(if workspace.may_publish { "yes" } else { "no" }.into())),
        ("lease", lease.map(|lease| format!("{} {} of {}", lease.id, lease.state, lease.owner))),
        ("left", lease.and_then(|lease| lease.remaining_ms).map(|ms| table::left(Some(ms)))),
        ("ended", lease.and_then(|lease| lease.why_ended.clone())),
        ("suspect", Some(table::joined(&workspace.suspect_sessions))),
        ("on hold", workspace.hold.clone()),
        ("under way", workspace.progress.as_ref().map(progress::row)),
    ])
}

fn history(rows: &[HistoryView]) -> String {
    table::rows(
        ["WHEN", "WHAT", "GENERATION", "SESSION", "DETAIL"],
        rows.iter().map(|row| {
            [
                table::ago(&row.at),
                match row.reverts_to {
                    Some(version) => format!("{}, a revert to version {version}", row.kind),
                    None => row.kind.clone(),
                },
                // What concerns no generation.
                table::or_dash((row.generation > 0).then(|| row.generation.to_string())),
                table::or_dash(row.session.clone()),
                words(&row.kind, &row.detail),
            ]
        }),
    )
}
