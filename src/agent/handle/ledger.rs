//! Publications and external requests: what may be out without a known outcome.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use super::sessions::stale;
use super::{Agent, actor, denied, unavailable, unique, workspace_id};
use crate::agent::effects::text;
use crate::agent::failure::{Caller, Failure};
use crate::agent::host::Host;
use crate::agent::keep;
use crate::agent::slot::{Slot, draft};
use crate::failpoint;
use crate::model::code::Code;
use crate::model::ids::{Generation, Owner, PublicationKey, RequestKey, SessionId, WorkspaceId};
use crate::model::journal::{Draft, Journal};
use crate::model::ledger::{KeyState, Publication, Which};
use crate::model::request::{Begin, Begun, Request, Settlement};
use crate::model::session::{Session, Stage, Work};
use crate::model::step::Published;
use crate::model::view::{
    AssignPublication, AssignRequest, BeginRequest, BegunRequest, PublicationView, RequestView,
    SettleRequest,
};
use crate::model::workspace::{Refusal, Writer};

/// How long a begin waits for a publication of its own session to be answered.
const TURN: Duration = Duration::from_secs(5);
/// Rows that a list shows.
const SHOWN: usize = 10_000;

/// Whose rows, and which.
#[derive(Clone, Debug, Default)]
pub struct Listed {
    /// Of this workspace alone.
    pub workspace: Option<String>,
    /// Also those whose outcome is known.
    pub all: bool,
}

impl Listed {
    fn which(self) -> Result<Which, Failure> {
        let workspace = self.workspace.as_deref().map(workspace_id).transpose()?;
        Ok(Which { workspace, open: !self.all, limit: SHOWN })
    }
}

fn bad(fault: &dyn std::fmt::Display) -> Failure {
    Failure::new(Code::BadRequest, fault.to_string())
}

impl Agent {
    /// Publications whose outcome is still to come, or all that are remembered.
    pub async fn publications(&self, listed: Listed) -> Result<Vec<PublicationView>, Failure> {
        let which = listed.which()?;
        self.blocking(move |host| {
            let rows = host.authority.publications(&which).map_err(unavailable)?;
            Ok(rows.into_iter().map(PublicationView::from).collect())
        })
        .await
    }

    /// One publication.
    pub async fn publication(&self, prefix: &str) -> Result<PublicationView, Failure> {
        let prefix = prefix.to_owned();
        self.blocking(move |host| Ok(publication(host, &prefix)?.into())).await
    }

    /// Finds what became of a publication, or buries its key, so that it never becomes anything.
    pub async fn resolve_publication(
        &self,
        by: &Caller,
        prefix: &str,
    ) -> Result<PublicationView, Failure> {
        let (prefix, who) = (prefix.to_owned(), actor(by));
        self.blocking(move |host| {
            let row = publication(host, &prefix)?;
            host.resolve_by_hand(&row, &who)?;
            publication(host, &row.key.to_string()).map(PublicationView::from)
        })
        .await
    }

    /// Gives an open publication to somebody.
    pub async fn assign_publication(
        &self,
        by: &Caller,
        prefix: &str,
        wish: AssignPublication,
    ) -> Result<PublicationView, Failure> {
        let to: Owner = wish.assignee.parse().map_err(|e| bad(&e))?;
        let (prefix, who) = (prefix.to_owned(), actor(by));
        self.blocking(move |host| {
            let row = publication(host, &prefix)?;
            let rider = |answer: &Result<Publication, Refusal>| {
                let answer = answer.as_ref().map(|_| "assigned").map_err(|refusal| refusal.code);
                let detail =
                    serde_json::json!({ "publication": row.key, "to": to, "answer": answer });
                note("assign", &row.workspace, &who, detail)
            };
            failpoint::hit("authority.assign.before");
            let answer = host.authority.assign(&row.workspace, row.key, &to, Box::new(rider));
            failpoint::hit("authority.assign.after");
            Ok(answer.map_err(unavailable)??.into())
        })
        .await
    }

    /// External requests whose outcome is still to come, or all.
    pub async fn requests(&self, listed: Listed) -> Result<Vec<RequestView>, Failure> {
        let which = listed.which()?;
        self.blocking(move |host| {
            let rows = host.authority.requests(&which).map_err(unavailable)?;
            Ok(rows.into_iter().map(RequestView::from).collect())
        })
        .await
    }

    /// What a session may see: the open requests of its workspace, and all of its own.
    pub async fn requests_of(&self, id: SessionId) -> Result<Vec<RequestView>, Failure> {
        let slot = self.slot(id)?;
        let workspace = Some(slot.workspace.to_string());
        let mut all = self.requests(Listed { workspace, all: true }).await?;
        let own = id.to_string();
        all.retain(|row| row.session == own || row.state != "SETTLED");
        Ok(all)
    }

    /// Records that a session is about to ask something of somebody else. Answered once that is
    /// durable at the authority; refused, it is not to be sent.
    pub async fn begin_request(
        &self,
        by: &str,
        id: SessionId,
        wish: BeginRequest,
    ) -> Result<BegunRequest, Failure> {
        let slot = self.slot(id)?;
        // While a layer of its own is being offered, nobody can say which head it expects.
        slot.wait_for(TURN, |inner| !is_publishing(&inner.session)).await;
        let s = slot.session();
        let begin = wish_of(&s, wish)?;
        let lost = match s.may_start_work() {
            Ok(()) => false,
            Err(Code::LeaseLost) => true,
            Err(code) => return Err(denied(&s, code)),
        };
        let (asked, who) = (Arc::clone(&slot), by.to_owned());
        if lost {
            let refused = self.blocking(move |host| {
                let refusal = host.refuse_writer(
                    &s,
                    "begin",
                    &who,
                    serde_json::json!({ "task": begin.task, "key": begin.key }),
                )?;
                host.metrics.request_refused(refusal.code);
                Ok(stale(&s, refusal))
            });
            return Err(refused.await.unwrap_or_else(|failure| failure));
        }
        let answer = self.blocking(move |host| host.begin(&asked, &s, &begin, &who)).await;
        let now = slot.session();
        match answer {
            Ok(begun) => match now.may_start_work() {
                Ok(()) => Ok(begun),
                // Doubt came meanwhile. It is recorded, and not to be sent; somebody settles it.
                Err(code) => {
                    let failure = denied(&now, code);
                    Err(Failure { request: Some(Box::new(begun.request)), ..failure })
                }
            },
            refused => refused,
        }
    }

    /// Records what became of a request, as the far side answered.
    pub async fn ack_request(
        &self,
        by: &str,
        workspace: &str,
        wish: SettleRequest,
    ) -> Result<RequestView, Failure> {
        self.settle(by, "ack", workspace, wish).await
    }

    /// Records what became of a request, as a person found out.
    pub async fn resolve_request(
        &self,
        by: &Caller,
        workspace: &str,
        wish: SettleRequest,
    ) -> Result<RequestView, Failure> {
        if wish.note.trim().is_empty() {
            return Err(bad(&"how it was found out is wanted: --reason TEXT"));
        }
        self.settle(&actor(by), "resolve", workspace, wish).await
    }

    async fn settle(
        &self,
        by: &str,
        how: &str,
        workspace: &str,
        wish: SettleRequest,
    ) -> Result<RequestView, Failure> {
        let id = workspace_id(workspace)?;
        let key: RequestKey = wish.key.parse().map_err(|e| bad(&e))?;
        let (by, how) = (by.to_owned(), how.to_owned());
        let told = Settlement { outcome: wish.outcome, by, how, note: wish.note };
        self.blocking(move |host| {
            let detail = |answer: &Result<Request, Refusal>| {
                let answer = answer.as_ref().map(|row| row.state).map_err(|r| r.code);
                serde_json::json!({ "key": key, "told": told, "answer": answer })
            };
            let rider = |answer: &_| note("request_settle", &id, &told.by, detail(answer));
            failpoint::hit("authority.settle.before");
            let answer = host.authority.settle(&id, &key, &told, Box::new(rider));
            host.store.anchor().map_err(unavailable)?;
            failpoint::hit("authority.settle.after");
            match answer.map_err(unavailable)? {
                Ok(row) => Ok(row.into()),
                Err(refusal) => Err(about_request(host, &id, &key, refusal)),
            }
        })
        .await
    }

    /// Gives an open request to somebody.
    pub async fn assign_request(
        &self,
        by: &Caller,
        workspace: &str,
        wish: AssignRequest,
    ) -> Result<RequestView, Failure> {
        let id = workspace_id(workspace)?;
        let key: RequestKey = wish.key.parse().map_err(|e| bad(&e))?;
        let to: Owner = wish.assignee.parse().map_err(|e| bad(&e))?;
        let who = actor(by);
        self.blocking(move |host| {
            let rider = |answer: &Result<Request, Refusal>| {
                let answer = answer.as_ref().map(|_| "assigned").map_err(|refusal| refusal.code);
                let detail = serde_json::json!({ "request": key, "to": to, "answer": answer });
                note("assign", &id, &who, detail)
            };
            failpoint::hit("authority.reassign.before");
            let answer = host.authority.reassign(&id, &key, &to, Box::new(rider));
            failpoint::hit("authority.reassign.after");
            match answer.map_err(unavailable)? {
                Ok(row) => Ok(row.into()),
                Err(refusal) => Err(about_request(host, &id, &key, refusal)),
            }
        })
        .await
    }
}

impl Host {
    /// Asks the authority to refuse a session that lost its lease: its word names who owns the workspace
    /// now, and its history and the evidence have it. Blocks.
    pub(super) fn refuse_writer(
        &self,
        s: &Session,
        verb: &str,
        by: &str,
        about: serde_json::Value,
    ) -> Result<Refusal, Failure> {
        let who = Writer::of(s);
        let rider = |answer: &Result<Infallible, Refusal>| {
            let refusal = answer.as_ref().err();
            let detail =
                serde_json::json!({ "asked": who, "about": about, "answer": { "Err": refusal } });
            let kind = if verb == "publish" { "publication" } else { "request_begin" };
            Journal { sessions: vec![], entries: vec![draft(kind, s, by, detail)] }
        };
        let lost = |why| Failure::new(Code::AuthorityUnavailable, why);
        failpoint::lost("authority.refuse.before").map_err(lost)?;
        let answer = self.authority.refuse(&who, verb, Box::new(rider)).map_err(unavailable)?;
        failpoint::hit("authority.refuse.after");
        let Err(refusal) = answer;
        Ok(refusal)
    }

    /// The begin itself. Blocks.
    fn begin(
        &self,
        slot: &Slot,
        s: &Session,
        begin: &Begin,
        by: &str,
    ) -> Result<BegunRequest, Failure> {
        self.refuse_when_short()?;
        let rider = |answer: &Result<Begun, Refusal>| {
            let detail = serde_json::json!({ "asked": begin, "answer": answer });
            let entries = vec![draft("request_begin", s, by, detail)];
            Journal { sessions: vec![], entries }
        };
        let lost = |why| Failure::new(Code::AuthorityUnavailable, why);
        failpoint::lost("authority.begin.before").map_err(lost)?;
        let answer = self.authority.begin(begin, Box::new(rider)).map_err(unavailable)?;
        // It may be sent from here on: an older copy of the database that knows nothing of it must show.
        let recorded = |why| {
            let key = &begin.key;
            lost(format!("{why}: it may be recorded; say it again with the same key {key}"))
        };
        self.store.anchor().map_err(|fault| recorded(text(fault)))?;
        failpoint::lost("authority.begin.after").map_err(recorded)?;
        let refused = |code: Code, request: Option<Request>| {
            self.metrics.request_refused(code);
            let detail = match &request {
                Some(first) => format!(
                    " First: key {}, generation {}, {:?}, assigned to {}.",
                    first.key, first.generation, first.state, first.assignee
                ),
                None => String::new(),
            };
            let message =
                format!("request {} of task {}: {}{detail}", begin.key, begin.task, code.meaning());
            let request = request.map(|row| Box::new(row.into()));
            Err(Failure { request, ..Failure::new(code, message) })
        };
        let told = |result: &str, row: Request| {
            Ok(BegunRequest { result: result.to_owned(), request: row.into() })
        };
        match answer {
            Err(refusal) => {
                self.metrics.request_refused(refusal.code);
                tracing::info!(OVERFENCE_SESSION = %slot.id, OVERFENCE_WORKSPACE = %slot.workspace, "request {} refused: {refusal}", begin.key);
                Err(refusal.into())
            }
            Ok(Begun::Begun(row)) => told("begun", row),
            Ok(Begun::Repeated(row)) => told("repeated", row),
            Ok(Begun::Resumed(row)) => told("resumed", row),
            Ok(Begun::Taken(first)) => refused(Code::TaskTaken, Some(first)),
            Ok(Begun::KeyUsed(first)) => refused(Code::KeyUsed, Some(first)),
            Ok(Begun::TooMany) => refused(Code::TooManyOpen, None),
        }
    }

    /// Resolves a key, and tells the session that waits for it, if it is one of this host.
    fn resolve_by_hand(self: &Arc<Self>, row: &Publication, by: &str) -> Result<(), Failure> {
        let (id, key) = (&row.workspace, row.key);
        let slot = row.asked.as_ref().and_then(|asked| self.slot(asked.session));
        if slot.as_ref().is_some_and(|slot| offers(&slot.session(), key)) {
            let why = format!("publication {key} is being offered now; its answer comes by itself");
            return Err(Failure::new(Code::Busy, why));
        }
        let rider = |found: &Result<KeyState, Refusal>| {
            let detail = serde_json::json!({ "key": key, "found": found.as_ref().ok() });
            note("resolve", id, by, detail)
        };
        failpoint::hit("authority.resolve.before");
        let found = self.authority.resolve(id, key, Box::new(rider)).map_err(unavailable)?;
        failpoint::hit("authority.resolve.after");
        let refused = |code| Published::Refused { refusal: Refusal { code, current: None } };
        let outcome = match found {
            KeyState::Committed { at, .. } => Published::Committed { at },
            KeyState::Rejected { code } => refused(code),
            KeyState::Buried => refused(Code::KeyBuried),
            KeyState::Unused
            | KeyState::Prepared
            | KeyState::Sent
            | KeyState::Unknown { .. }
            | KeyState::Forgotten => return Err(Code::KeyForgotten.into()),
        };
        if let Some(slot) = slot.filter(|slot| slot.session().unknown.contains_key(&key)) {
            let heard = keep::heard(self, &slot, &slot.session(), key, outcome);
            for event in heard.map_err(|why| Failure::new(Code::Internal, why))? {
                self.apply(&slot, event, by);
            }
        }
        Ok(())
    }
}

fn is_publishing(s: &Session) -> bool {
    matches!(
        s.work,
        Some(
            Work::Checkpoint { stage: Stage::Publishing { .. }, .. }
                | Work::Close { stage: Stage::Publishing { .. }, .. }
        )
    )
}

/// Whether the session is at this very publication.
fn offers(s: &Session, key: PublicationKey) -> bool {
    match &s.work {
        Some(Work::Checkpoint { key: k, .. } | Work::Close { key: k, .. }) => *k == key,
        Some(Work::Resume) | None => false,
    }
}

/// The publication whose key starts so.
fn publication(host: &Host, prefix: &str) -> Result<Publication, Failure> {
    let all = Which { workspace: None, open: false, limit: usize::MAX };
    let rows = host.authority.publications(&all).map_err(unavailable)?;
    let key = unique(prefix, "p-", rows.iter().map(|row| row.key), Code::NotFound)?;
    rows.into_iter().find(|row| row.key == key).ok_or_else(|| Code::NotFound.into())
}

fn wish_of(s: &Session, wish: BeginRequest) -> Result<Begin, Failure> {
    let assignee = wish.assignee.map(|name| name.parse()).transpose().map_err(|e| bad(&e))?;
    Ok(Begin {
        workspace: s.workspace.clone(),
        lease: s.lease,
        generation: wish.generation.map_or(s.generation, Generation),
        session: s.id,
        expected: s.expected.clone(),
        task: wish.task.parse().map_err(|e| bad(&e))?,
        key: wish.key.parse().map_err(|e| bad(&e))?,
        about: wish.about,
        host: s.host,
        owner: s.owner.clone(),
        assignee: assignee.unwrap_or_else(|| s.owner.clone()),
    })
}

/// A refusal about one request, with its record where there is one.
fn about_request(host: &Host, id: &WorkspaceId, key: &RequestKey, refusal: Refusal) -> Failure {
    let which = Which { workspace: Some(id.clone()), open: false, limit: usize::MAX };
    let row = match host.authority.requests(&which) {
        Ok(rows) => rows.into_iter().find(|row| row.key == *key),
        Err(fault) => {
            tracing::warn!(OVERFENCE_WORKSPACE = %id, "{}", text(fault));
            None
        }
    };
    let message = match (&row, refusal.code) {
        (None, Code::NotFound) => format!(
            "no request {key} in workspace {id}; `overfence request list -w {id} --all` shows them"
        ),
        (Some(Request { settled: Some(before), .. }), _) => format!(
            "request {key} was settled as {} by {} ({}): {}",
            before.outcome.word(),
            before.by,
            before.how,
            refusal.code.meaning()
        ),
        _ => return refusal.into(),
    };
    let request = row.map(|row| Box::new(row.into()));
    Failure { request, ..Failure::new(refusal.code, message) }
}

/// A decision about a workspace as evidence.
fn note(kind: &str, id: &WorkspaceId, actor: &str, detail: serde_json::Value) -> Journal {
    let entry = Draft {
        kind: kind.to_owned(),
        workspace: Some(id.clone()),
        session: None,
        generation: None,
        actor: actor.to_owned(),
        detail,
    };
    Journal { sessions: vec![], entries: vec![entry] }
}
