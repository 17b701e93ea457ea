//! The only door to the agent: what the API may ask, one method a verb. Requests are checked here
//! and become events or questions to the authority; nothing here decides about a session.

mod backup;
mod breaker;
mod content;
mod delta;
mod drain;
mod export;
mod holds;
mod layers;
mod ledger;
mod preserved;
mod seed;
mod sessions;
mod unbelieved;
mod workspaces;

pub use delta::Told;
pub use ledger::Listed;
pub(super) use sessions::denied;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::effects::text;
use super::failure::{Caller, Failure};
use super::host::Host;
use super::slot::Slot;
use crate::failpoint;
use crate::model::code::Code;
use crate::model::ids::{SessionId, WorkspaceId};
use crate::model::journal::Entry;
use crate::model::view::{EvidenceReport, PathText, RestoredChain, SpaceView, StatusView};
use crate::upper::{bundle, remove};

/// How long a request waits for what it set in motion, unless it says otherwise.
const PATIENCE: Duration = Duration::from_secs(60);

/// A handle to the running agent; cheap to clone.
#[derive(Clone)]
pub struct Agent(pub(super) Arc<Host>);

/// How a sign of life is vouched for.
#[derive(Clone, Debug)]
pub enum Sign {
    /// The lease token.
    Token(String),
    /// The session's own socket.
    Socket,
}

/// Takes away what a verb put together on its way. What stays is the next start's: what the verb
/// answers does not hang on it.
fn drop_scratch(path: &Path) {
    let may = failpoint::fails("agent.scratch.before").map_err(text);
    let take = || bundle::sweep_noted(path).and_then(|()| remove::remove_scratch(path));
    let dropped = may.and_then(|()| take().map_err(text));
    failpoint::hit("agent.scratch.after");
    if let Err(why) = dropped {
        tracing::warn!("{} stays until the next start: {why}", path.display());
    }
}

impl Agent {
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Arc<Host>) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let host = Arc::clone(&self.0);
        tokio::task::spawn_blocking(move || work(&host))
            .await
            .unwrap_or_else(|e| Err(Failure::new(Code::Internal, e.to_string())))
    }

    /// Resolves a unique id prefix, with or without `s-`.
    pub async fn session_id(&self, prefix: &str) -> Result<SessionId, Failure> {
        if let Ok(id) = prefix.parse() {
            return Ok(id);
        }
        let ids = self.0.slots().into_iter().map(|slot| slot.id);
        unique(prefix, "s-", ids, Code::UnknownSession)
    }

    fn slot(&self, id: SessionId) -> Result<Arc<Slot>, Failure> {
        self.0
            .slot(id)
            .ok_or_else(|| Failure::new(Code::UnknownSession, format!("no session {id} on this host that is not closed; `overfence session list` shows them")))
    }

    /// Entries after `since`.
    pub async fn evidence(
        &self,
        since: u64,
        limit: usize,
        session: Option<SessionId>,
    ) -> Result<Vec<Entry>, Failure> {
        self.blocking(move |host| match session {
            None => host.store.evidence_since(since, limit).map_err(internal),
            Some(id) => {
                host.store.evidence_of(id).map_err(internal).map(|entries| {
                    entries.into_iter().filter(|e| e.seq > since).take(limit).collect()
                })
            }
        })
        .await
    }

    /// Recomputes the chain and compares it with the anchors.
    pub async fn evidence_verify(&self) -> Result<EvidenceReport, Failure> {
        self.blocking(|host| {
            let report = host.store.verify_evidence().map_err(internal)?;
            Ok(EvidenceReport {
                ok: report.fault.is_none(),
                entries: report.entries,
                head: report.head,
                anchors: report.anchors,
                newest_anchor: report.newest_anchor.map(|a| a.seq),
                restores: report
                    .restores
                    .into_iter()
                    .map(|a| RestoredChain { entry: a.seq, time: a.time })
                    .collect(),
                anchors_set_aside: report.set_aside,
                fault: report.fault.map(|f| format!("entry {}: {}", f.seq, f.why)),
            })
        })
        .await
    }

    /// Wakes at each committed evidence entry; the value is its sequence number.
    pub fn evidence_watch(&self) -> tokio::sync::watch::Receiver<u64> {
        self.0.store.subscribe()
    }

    /// The agent's own state.
    pub async fn status(&self) -> Result<StatusView, Failure> {
        let host = &self.0;
        let counts = host.counts().into_iter();
        let sessions = counts.map(|(state, n)| (state.to_string(), n)).collect();
        let known = self.blocking(|host| Ok(workspaces::all(host))).await?;
        let (held, trouble) = match known {
            Ok(known) => {
                let held = known.into_iter().filter(|w| w.hold.is_some()).map(|w| w.id.to_string());
                (held.collect(), host.shown().authority_trouble.clone())
            }
            Err(failure) => (vec![], Some(failure.to_string())),
        };
        let space = host.store.reserve().space();
        let mounts = crate::kernel::ns::mounts();
        let shown = host.shown();
        Ok(StatusView {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            host: host.id.to_string(),
            ready: shown.ready,
            draining: host.draining(),
            breaker: host.tripped().map(|open| open.why),
            authority: "sqlite".to_owned(),
            authority_trouble: trouble,
            sessions,
            held,
            reconcile: shown.reconcile.clone(),
            state_dir: PathText::of(&host.paths.state),
            cgroup: PathText::of(&host.paths.cgroups),
            mount_namespace: mounts.name,
            mount_trouble: mounts.trouble,
            preserved_bytes: shown.preserved_bytes,
            space: SpaceView {
                free: space.free,
                reserve: space.held,
                reserve_wanted: space.wanted,
                short: space.short(),
            },
        })
    }

    /// OpenMetrics text.
    pub fn metrics(&self) -> String {
        for slot in self.0.slots() {
            self.0.gate_count(&mut slot.lock());
        }
        self.0.gate_count_lost();
        self.0.metrics.text(self.0.store.reserve().space(), self.0.tripped().is_some())
    }

    /// The public key of mount tickets.
    pub fn ticket_key(&self) -> String {
        self.0.store.keys().ticket.public().to_text()
    }

    /// Tells that the thread that serves the sockets inside the sessions goes round.
    pub fn sockets_go_round(&self) {
        self.0.pulse.beat(crate::agent::pulse::Part::Sockets);
    }

    /// Ends the agent's threads and tasks; sessions and their mounts go on.
    pub fn stop(&self) {
        self.0.stop();
        // So that what is put back while no agent runs is compared with the last that was done.
        let store = &self.0.store;
        if let Err(fault) = store.marks().flush().and_then(|()| store.anchor()) {
            tracing::warn!("the evidence was not anchored: {}", text(fault));
        }
    }

    fn session_view(&self, slot: &Slot) -> crate::model::view::SessionView {
        self.0.session_view(slot)
    }
}

fn internal<E: std::error::Error>(fault: E) -> Failure {
    Failure::new(Code::Internal, text(fault))
}

/// A failure of the room of uppers, with its stable code.
fn of_upper(fault: crate::upper::Error) -> Failure {
    Failure::new(fault.code(), text(fault))
}

pub(super) fn unavailable<E: std::error::Error>(fault: E) -> Failure {
    Failure::new(Code::AuthorityUnavailable, text(fault))
}

fn workspace_id(text: &str) -> Result<WorkspaceId, Failure> {
    text.parse()
        .map_err(|e: crate::model::ids::InvalidId| Failure::new(Code::BadRequest, e.to_string()))
}

/// Candidates that an ambiguous id names.
const SHOWN: usize = 8;

/// The one id that starts so.
fn unique<I: ToString + Copy>(
    prefix: &str,
    kind: &str,
    ids: impl Iterator<Item = I>,
    none: Code,
) -> Result<I, Failure> {
    let bare = prefix.strip_prefix(kind).unwrap_or(prefix);
    if bare.is_empty() {
        return Err(Failure::new(Code::BadRequest, "an id is wanted, or the beginning of one"));
    }
    let full = format!("{kind}{bare}");
    let found: Vec<_> = ids.filter(|id| id.to_string().starts_with(&full)).collect();
    match found[..] {
        [id] => Ok(id),
        [] => Err(Failure::new(none, format!("{} Nothing starts with {full:?}.", none.meaning()))),
        _ => {
            let mut names: Vec<_> = found.iter().take(SHOWN).map(I::to_string).collect();
            if found.len() > SHOWN {
                names.push(format!("{} more", found.len() - SHOWN));
            }
            let text = format!("{prefix:?} fits {}; give more of it", names.join(", "));
            Err(Failure::new(Code::AmbiguousId, text))
        }
    }
}

/// Everything that a caller decides is recorded with who the kernel says they are.
fn actor(by: &Caller) -> String {
    by.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ambiguous_id_names_its_candidates() {
        let ids: Vec<SessionId> = (0..10).map(|_| SessionId::fresh()).collect();
        let ask = |prefix: &str, n: usize| {
            unique(prefix, "s-", ids[..n].iter().copied(), Code::UnknownSession)
        };
        assert_eq!(ask(&ids[3].to_string(), 10).unwrap(), ids[3]);
        let two = ask("s-0", 2).unwrap_err();
        assert_eq!(two.code, Code::AmbiguousId);
        assert_eq!(two.message, format!("\"s-0\" fits {}, {}; give more of it", ids[0], ids[1]));
        assert!(ask("0", 10).unwrap_err().message.ends_with(", 2 more; give more of it"));
        assert_eq!(ask("s-x", 10).unwrap_err().code, Code::UnknownSession);
        assert_eq!(ask("s-", 10).unwrap_err().code, Code::BadRequest);
    }
}
