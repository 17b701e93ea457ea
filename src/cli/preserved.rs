//! `overfence preserved`

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::context::Context;
use super::{parse, progress, session, table};
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
        #[arg(value_parser = parse::name)]
        session: String,
        /// Do not ask before deleting.
        #[arg(long)]
        yes: bool,
    },
    /// Keep one longer than the grace window.
    Keep {
        /// The session, by its id or a unique prefix.
        #[arg(value_parser = parse::name)]
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
    #[arg(value_parser = parse::name)]
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
            context.list(&all, "preserved deltas", list)
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
            let (place, whose) = (path(&["sessions", &id, "export"]), path(&["sessions", &id]));
            let done: Exported = progress::post(context, &client, &place, &body, &whose)?;
            context.show(&done, exported)
        }
        Verb::Discard { session, yes } => {
            let doomed = named(&client, &session)?;
            context.confirm(&format!("This deletes {}", doomed.words), yes)?;
            let (id, nothing) = (&doomed.session, serde_json::json!({}));
            let (place, whose) = (path(&["sessions", id, "discard"]), path(&["sessions", id]));
            let view: SessionView = progress::post(context, &client, &place, &nothing, &whose)?;
            context.show(&view, session::one)
        }
        Verb::Keep { session, until } => {
            let body = KeepSession { for_ms: parse::ms(until.0) };
            let place = path(&["sessions", &session, "keep"]);
            let view: PreservedView = client.post(&place, &body)?;
            context.show(&view, kept)
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
        [
            "SESSION",
            "WORKSPACE",
            "OWNER",
            "GENERATION",
            "SIZE",
            "FILES",
            "FACTS",
            "NEXT",
            "NOT BEFORE",
            "REASON",
        ],
        all.iter().map(|delta| {
            [
                delta.session.clone(),
                delta.workspace.clone(),
                delta.owner.clone(),
                delta.generation.to_string(),
                table::bytes(delta.bytes),
                delta.entries.to_string(),
                table::or_dash(Some(table::joined(&delta.facts))),
                delta.next.clone(),
                when(delta),
                delta.reason.clone(),
            ]
        }),
    )
}

/// Grace left in witnessed time, and the earliest hour that comes to.
fn when(delta: &PreservedView) -> String {
    match &delta.not_before {
        None => "-".into(),
        Some(at) => format!("{} (in {})", table::minute(at), table::ms(delta.grace_left_ms)),
    }
}

fn kept(delta: &PreservedView) -> String {
    table::facts([
        ("session", Some(delta.session.clone())),
        ("workspace", Some(delta.workspace.clone())),
        ("size", Some(format!("{} in {} entries", table::bytes(delta.bytes), delta.entries))),
        ("grace left", Some(format!("{} of witnessed time", table::ms(delta.grace_left_ms)))),
        ("next", Some(delta.next.clone())),
        ("not before", Some(when(delta))),
    ])
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_will_happen_and_when_is_shown() {
        let mut delta = PreservedView {
            session: "s-1".into(),
            workspace: "w".into(),
            owner: "a".into(),
            generation: 1,
            reason: "r".into(),
            facts: vec![],
            bytes: 3,
            entries: 1,
            grace_left_ms: 172_800_000,
            next: "removed".into(),
            not_before: Some("2027-01-31T12:00:30.123Z".into()),
        };
        let shown = kept(&delta);
        assert!(shown.contains("grace left  2d of witnessed time\n"), "{shown}");
        assert!(shown.contains("not before  2027-01-31 12:00Z (in 2d)\n"), "{shown}");
        let row = list(std::slice::from_ref(&delta));
        assert!(row.contains("removed  2027-01-31 12:00Z (in 2d)  r"), "{row}");
        delta.not_before = None;
        assert!(list(&[delta]).contains("removed  -           r"));
    }
}
