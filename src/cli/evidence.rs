//! `overfence evidence` and `overfence events`

use std::io::{self, Write as _};

use clap::{Args, Subcommand};

use super::context::Context;
use super::table;
use super::words::words;
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
    /// Only the newest so many.
    #[arg(long, value_name = "N", conflicts_with = "limit")]
    last: Option<usize>,
    /// At most so many, the oldest first; else all.
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Only of this session, by its id or a unique prefix.
    #[arg(long, value_name = "SESSION", value_parser = super::parse::name)]
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
            let entries = entries(&wish, |place| client.get(place))?;
            context.list(&entries, "entries", |entries| entries.iter().map(line).collect())?;
            Ok(0)
        }
        Verb::Verify => {
            let report: EvidenceReport = client.get("/v1/evidence/verify")?;
            context.show(&report, verified)?;
            Ok(u8::from(!report.ok))
        }
    }
}

/// Entries that the agent is asked for at a time.
const PAGE: usize = 256;

/// Everything wished for, page by page.
fn entries(
    wish: &Show,
    get: impl Fn(&str) -> Result<Vec<Entry>, Failure>,
) -> Result<Vec<Entry>, Failure> {
    let (mut all, mut since) = (Vec::new(), wish.since);
    let most = wish.last.or(wish.limit).unwrap_or(usize::MAX);
    while all.len() < most {
        let page = PAGE.min(most - all.len());
        let mut place = format!("/v1/evidence?since={since}&limit={page}");
        if let Some(session) = &wish.session {
            let encoded = crate::api::client::path(&[session]);
            place.push_str(&format!("&session={}", encoded.trim_start_matches("/v1/")));
        }
        // Where the last ones begin is settled by the first page.
        if let Some(last) = wish.last.filter(|_| all.is_empty()) {
            place.push_str(&format!("&last={last}"));
        }
        let got = get(&place)?;
        let Some(newest) = got.last() else { break };
        since = newest.seq;
        let whole = got.len() == page;
        all.extend(got);
        if !whole {
            break;
        }
    }
    Ok(all)
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
    let detail = words(&draft.kind, &draft.detail);
    let (time, actor) = (table::second(&entry.time), table::clean(&draft.actor));
    format!("{} {time} {} {about}{generation} by {actor}: {detail}\n", entry.seq, draft.kind)
}

fn verified(report: &EvidenceReport) -> String {
    table::facts([
        ("chain", Some(if report.ok { "whole" } else { "BROKEN" }.into())),
        ("entries", Some(report.entries.to_string())),
        ("head", report.head.map(|head| head.to_string())),
        ("anchors", Some(report.anchors.to_string())),
        ("newest anchor", report.newest_anchor.map(|seq| format!("entry {seq}"))),
        ("restored", restored(report)),
        ("fault", report.fault.clone()),
    ])
}

/// Where the chain goes on from backups.
fn restored(report: &EvidenceReport) -> Option<String> {
    let told = report.restores.iter().map(|one| {
        format!("goes on from a backup at entry {} ({})", one.entry, table::second(&one.time))
    });
    let mut told: Vec<_> = told.collect();
    if report.anchors_set_aside > 0 {
        let n = report.anchors_set_aside;
        told.push(format!("{n} anchor(s) of what was replaced are set aside"));
    }
    (!told.is_empty()).then(|| told.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::head::Digest;
    use crate::model::journal::Draft;
    use crate::model::time::BootNs;

    fn entry(seq: u64) -> Entry {
        Entry {
            seq,
            time: "2027-01-31T12:00:30.123Z".into(),
            boot_ns: BootNs(1),
            draft: Draft {
                kind: "exec".into(),
                workspace: None,
                session: None,
                generation: None,
                actor: "uid 0".into(),
                detail: serde_json::json!({ "pid": 7 }),
            },
            prev: Digest([0; 32]),
            hash: Digest([0; 32]),
        }
    }

    /// A chain of `n` entries, as the API pages it; which pages were asked for.
    fn shown(n: u64, wish: &Show) -> (Vec<u64>, Vec<String>) {
        let asked = std::cell::RefCell::new(vec![]);
        let all = entries(wish, |place| {
            asked.borrow_mut().push(place.to_owned());
            let number = |name: &str| {
                let (_, rest) = place.split_once(&format!("{name}="))?;
                rest.split('&').next()?.parse::<u64>().ok()
            };
            let since = number("since").unwrap();
            let since = number("last").map_or(since, |last| since.max(n.saturating_sub(last)));
            let limit = usize::try_from(number("limit").unwrap()).unwrap();
            Ok((since + 1..=n).take(limit).map(entry).collect())
        });
        (all.unwrap().iter().map(|entry| entry.seq).collect(), asked.into_inner())
    }

    #[test]
    fn all_pages_are_read() {
        let wish = |since, last, limit| Show { since, last, limit, session: None };
        for (n, wish, first, last, pages) in [
            (0, wish(0, None, None), None, None, 1),
            (255, wish(0, None, None), Some(1), Some(255), 1),
            (256, wish(0, None, None), Some(1), Some(256), 2),
            (1000, wish(0, None, None), Some(1), Some(1000), 4),
            (1000, wish(990, None, None), Some(991), Some(1000), 1),
            (1000, wish(0, None, Some(300)), Some(1), Some(300), 2),
            (1000, wish(0, Some(3), None), Some(998), Some(1000), 1),
            (1000, wish(0, Some(600), None), Some(401), Some(1000), 3),
            (1000, wish(999, Some(600), None), Some(1000), Some(1000), 1),
            (1000, wish(0, Some(0), None), None, None, 0),
        ] {
            let (seqs, asked) = shown(n, &wish);
            assert_eq!(
                (seqs.first().copied(), seqs.last().copied(), asked.len()),
                (first, last, pages),
                "{wish:?}"
            );
            assert!(seqs.is_sorted() && asked.iter().skip(1).all(|page| !page.contains("last")));
        }
        let of_one = Show { session: Some("s-1 &".into()), ..wish(0, None, None) };
        assert!(shown(1, &of_one).1[0].ends_with("&session=s-1%20%26"));
    }

    #[test]
    fn an_entry_is_a_line() {
        assert_eq!(line(&entry(4)), "4 2027-01-31 12:00:30Z exec - by uid 0: pid 7\n");
    }
}
