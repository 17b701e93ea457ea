//! `overfence preserved`

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::context::Context;
use super::{parse, session, table};
use crate::agent::failure::Failure;
use crate::api::client::{Client, path};
use crate::model::view::{ExportSession, Exported, KeepSession, PreservedView, SessionView};

/// What can be done with preserved deltas.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// List them: whose, how much, how long still.
    List,
    /// Write one as a patch bundle. Removes nothing, unless --dispose says so.
    Export(Export),
    /// Give the bytes of one up: they are deleted.
    Discard {
        /// The session, by its id or a unique prefix.
        session: String,
        /// Do not ask before deleting.
        #[arg(long)]
        yes: bool,
    },
    /// Keep one longer than the grace window.
    Keep {
        /// The session, by its id or a unique prefix.
        session: String,
        /// A span such as 48h, or a time such as 2027-01-31T12:00:00Z.
        #[arg(long, value_name = "T", value_parser = parse::until)]
        until: parse::Until,
    },
}

/// `preserved export`
#[derive(Debug, Args)]
pub struct Export {
    /// The session, by its id or a unique prefix.
    session: String,
    /// The directory to make; else one below the configured bundles directory.
    #[arg(long, value_name = "DIR")]
    dest: Option<PathBuf>,
    /// Delete the delta once the bundle is read back and verified.
    #[arg(long)]
    dispose: bool,
    /// Do not ask before deleting.
    #[arg(long)]
    yes: bool,
}

/// Does it.
pub(super) fn main(context: &Context, verb: Verb) -> Result<(), Failure> {
    let client = context.client()?;
    match verb {
        Verb::List => {
            let all: Vec<PreservedView> = client.get(&path(&["preserved"]))?;
            context.show(&all, |all| list(all))
        }
        Verb::Export(wish) => {
            let mut id = wish.session;
            if wish.dispose {
                let doomed = named(&client, &id)?;
                let what = format!("This exports and then deletes {}", doomed.words);
                context.confirm(&what, wish.yes)?;
                id = doomed.session;
            }
            let dest = wish.dest.as_deref().map(parse::path_text).transpose()?;
            let body = ExportSession { dest, dispose: wish.dispose };
            let done: Exported = client.post(&path(&["sessions", &id, "export"]), &body)?;
            context.show(&done, exported)
        }
        Verb::Discard { session, yes } => {
            let doomed = named(&client, &session)?;
            context.confirm(&format!("This deletes {}", doomed.words), yes)?;
            let place = path(&["sessions", &doomed.session, "discard"]);
            let view: SessionView = client.post(&place, &serde_json::json!({}))?;
            context.show(&view, session::one)
        }
        Verb::Keep { session, until } => {
            let body = KeepSession { for_ms: parse::ms(until.0) };
            let place = path(&["sessions", &session, "keep"]);
            let view: SessionView = client.post(&place, &body)?;
            context.show(&view, session::one)
        }
    }
}

/// What would be deleted: the whole id, so that the answer given is for this one.
struct Doomed {
    session: String,
    words: String,
}

fn named(client: &Client, prefix: &str) -> Result<Doomed, Failure> {
    let view = session::get(client, prefix)?;
    let all: Vec<PreservedView> = client.get(&path(&["preserved"]))?;
    let size = match all.iter().find(|delta| delta.session == view.id) {
        Some(delta) => format!("{} in {} entries", table::bytes(delta.bytes), delta.entries),
        None => "what".into(),
    };
    let words = format!(
        "{size} that {} wrote to {} in session {} (generation {}), kept in {}",
        view.owner, view.workspace, view.id, view.generation, view.upper.0
    );
    Ok(Doomed { session: view.id, words })
}

fn list(all: &[PreservedView]) -> String {
    table::rows(
        ["SESSION", "WORKSPACE", "OWNER", "GENERATION", "SIZE", "FACTS", "GRACE", "NEXT", "REASON"],
        all.iter().map(|delta| {
            [
                delta.session.clone(),
                delta.workspace.clone(),
                delta.owner.clone(),
                delta.generation.to_string(),
                table::bytes(delta.bytes),
                table::or_dash(Some(table::joined(&delta.facts))),
                table::ms(delta.grace_left_ms),
                delta.next.clone(),
                delta.reason.clone(),
            ]
        }),
    )
}

fn exported(done: &Exported) -> String {
    let yes = |is: bool| Some(if is { "yes" } else { "no" }.to_owned());
    table::facts([
        ("bundle", Some(done.path.0.clone())),
        ("digest", Some(done.digest.to_string())),
        ("layer", done.layer.map(|layer| layer.to_string())),
        ("verified", yes(done.verified)),
        ("stable", yes(done.stable)),
        ("session", Some(format!("{} ({})", done.session.id, done.session.state))),
    ])
}
