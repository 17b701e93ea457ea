//! `overfence evidence` and `overfence events`

use std::io::{self, Write as _};

use clap::{Args, Subcommand};

use super::context::Context;
use super::table;
use crate::agent::failure::Failure;
use crate::model::code::Code;
use crate::model::journal::Entry;
use crate::model::view::EvidenceReport;

/// What can be done with the evidence.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Show entries, oldest first.
    Show(Show),
    /// Check the chain against its anchors.
    Verify,
}

/// `evidence show`
#[derive(Debug, Args)]
pub struct Show {
    /// Entries after this number.
    #[arg(long, value_name = "N", default_value_t = 0)]
    since: u64,
    /// At most so many.
    #[arg(long, value_name = "N", default_value_t = 256)]
    limit: usize,
    /// Only of this session, by its id or a unique prefix.
    #[arg(long, value_name = "SESSION")]
    session: Option<String>,
}

/// `events`
#[derive(Debug, Args)]
pub struct Events {
    /// Go on as entries come.
    #[arg(long)]
    follow: bool,
    /// Entries after this number.
    #[arg(long, value_name = "N", default_value_t = 0)]
    since: u64,
}

/// Does it.
pub(super) fn main(context: &Context, verb: Verb) -> Result<u8, Failure> {
    let client = context.client()?;
    match verb {
        Verb::Show(wish) => {
            let mut place = format!("/v1/evidence?since={}&limit={}", wish.since, wish.limit);
            if let Some(session) = &wish.session {
                let encoded = crate::api::client::path(&[session]);
                place.push_str(&format!("&session={}", encoded.trim_start_matches("/v1/")));
            }
            let entries: Vec<Entry> = client.get(&place)?;
            context.show(&entries, |entries| entries.iter().map(line).collect())?;
            Ok(0)
        }
        Verb::Verify => {
            let report: EvidenceReport = client.get("/v1/evidence/verify")?;
            context.show(&report, verified)?;
            Ok(u8::from(!report.ok))
        }
    }
}

/// Shows entries as they come.
pub(super) fn events(context: &Context, wish: &Events) -> Result<(), Failure> {
    let place = format!("/v1/events?since={}&follow={}", wish.since, wish.follow);
    let mut strange = None;
    context.client()?.lines(&place, |raw| {
        let text = if context.json() {
            format!("{}\n", String::from_utf8_lossy(raw))
        } else {
            match serde_json::from_slice(raw) {
                Ok(entry) => line(&entry),
                Err(fault) => {
                    strange = Some(fault);
                    return Ok(false);
                }
            }
        };
        let mut out = io::stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(fault) if fault.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            written => written.map(|()| true),
        }
    })?;
    match strange {
        None => Ok(()),
        Some(fault) => Err(Failure::new(
            Code::Internal,
            format!(
                "an entry is not understood: {fault}; are agent and command of the same build?"
            ),
        )),
    }
}

fn line(entry: &Entry) -> String {
    let draft = &entry.draft;
    let about = match (&draft.session, &draft.workspace) {
        (Some(session), _) => session.to_string(),
        (None, Some(workspace)) => workspace.to_string(),
        (None, None) => "-".into(),
    };
    let generation = draft.generation.map(|g| format!(" generation {g}")).unwrap_or_default();
    format!(
        "{} {} {} {about}{generation} by {}: {}\n",
        entry.seq, entry.time, draft.kind, draft.actor, draft.detail
    )
}

fn verified(report: &EvidenceReport) -> String {
    table::facts([
        ("chain", Some(if report.ok { "whole" } else { "BROKEN" }.into())),
        ("entries", Some(report.entries.to_string())),
        ("head", report.head.map(|head| head.to_string())),
        ("anchors", Some(report.anchors.to_string())),
        ("newest anchor", report.newest_anchor.map(|seq| format!("entry {seq}"))),
        ("fault", report.fault.clone()),
    ])
}
