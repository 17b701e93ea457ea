//! What the service manager and the journal are told. Without systemd there is nobody to tell, and
//! an answer is never waited for.

use std::sync::Arc;
use std::time::Duration;

use sd_notify::NotifyState;

use super::host::Host;
use crate::model::ids::SessionId;
use crate::model::journal::{Draft, Journal};
use crate::model::session::Session;

/// How often the status line is looked at, and the watchdog fed at least.
const ROUND: Duration = Duration::from_secs(5);
/// The watchdog is fed so many times within its limit.
const FEEDS: u32 = 4;

/// Says one thing to systemd.
pub fn manager(state: NotifyState<'_>) {
    // What cannot be sent is missed by systemd itself, which then acts as it was told to.
    let _ = sd_notify::notify(&[state]);
}

/// Feeds the watchdog while every part of the agent goes round, and keeps the status line true;
/// runs until the agent stops.
pub async fn run(host: Arc<Host>) {
    let limit = sd_notify::watchdog_enabled();
    let mut round = tokio::time::interval(limit.map_or(ROUND, |limit| limit / FEEDS).min(ROUND));
    let (mut said, mut missed) = (String::new(), 0);
    while !host.stopping() {
        round.tick().await;
        let silent = limit.and_then(|_| host.pulse.ask().err());
        // It has no rounds of its own: it sleeps until a deadline.
        host.deadlines.wake();
        let mut now = line(&host);
        match silent {
            None => {
                missed = 0;
                manager(NotifyState::Watchdog);
            }
            // Once is no news: a part may take longer for a round than this one.
            Some(silent) => {
                missed += 1;
                if missed > 1 {
                    now = format!("waiting for {} to go round", silent.join(", "));
                }
            }
        }
        if now != said {
            manager(NotifyState::Status(&now));
            said = now;
        }
    }
}

/// The host in a line: sessions by state, and whether the authority answers.
pub fn line(host: &Host) -> String {
    let states = host.counts();
    let mut line = match states.is_empty() {
        true => "no session".to_owned(),
        false => states.iter().map(|(s, n)| format!("{n} {s}")).collect::<Vec<_>>().join(", "),
    };
    if let Some(trouble) = &host.shown().authority_trouble {
        line.push_str("; the authority: ");
        line.push_str(trouble);
    }
    if let Some(open) = host.tripped() {
        line.push_str("; the breaker is open: ");
        line.push_str(&open.why);
    }
    line
}

/// One line in the journal for each change of state that has just become durable.
pub fn journal(records: &Journal, session: &Session) {
    for (id, change) in records.entries.iter().filter_map(change) {
        let loss = session.loss.as_ref().map(|loss| format!(": {loss}")).unwrap_or_default();
        tracing::info!(
            OVERFENCE_SESSION = %id,
            OVERFENCE_WORKSPACE = %session.workspace,
            OVERFENCE_GENERATION = %session.generation,
            "{id} of {}, generation {}: {change}{loss}", session.workspace, session.generation,
        );
    }
}

fn change(entry: &Draft) -> Option<(SessionId, String)> {
    let word = |key: &str| entry.detail.get(key)?.as_str();
    let (from, to) = (word("from")?, word("to")?);
    (from != to).then_some((entry.session?, format!("{from} -> {to}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changes_of_state_are_news() {
        let entry = |session, from: &str, to: &str| Draft {
            kind: "event".to_owned(),
            workspace: None,
            session,
            generation: None,
            actor: "agent".to_owned(),
            detail: serde_json::json!({ "from": from, "to": to }),
        };
        let id = SessionId::from_u128(1);
        let news = change(&entry(Some(id), "ACTIVE", "FENCING"));
        assert_eq!(news, Some((id, "ACTIVE -> FENCING".to_owned())));
        assert_eq!(change(&entry(Some(id), "ACTIVE", "ACTIVE")), None);
        assert_eq!(change(&entry(None, "ACTIVE", "FENCING")), None);
        let other = Draft { detail: serde_json::json!({}), ..entry(Some(id), "", "") };
        assert_eq!(change(&other), None);
    }
}
