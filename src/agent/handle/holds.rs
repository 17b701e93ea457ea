//! Putting workspaces on HOLD, repairing and deleting them.

use super::workspaces::{any, find};
use super::{Agent, actor, unavailable, workspace_id};
use crate::agent::effects::text;
use crate::agent::failure::{Caller, Failure};
use crate::agent::host::Host;
use crate::model::code::Code;
use crate::model::ids::{Generation, WorkspaceId};
use crate::model::journal::{Draft, Journal};
use crate::model::session::{Loss, State};
use crate::model::step::Event;
use crate::model::view::{DeleteWorkspace, HoldWorkspace, RepairWorkspace, WorkspaceView};
use crate::model::workspace::{Refusal, Seen, Workspace};

/// One entry about a workspace, and nothing else.
pub(super) fn entry(
    kind: &str,
    id: &WorkspaceId,
    by: &Caller,
    detail: serde_json::Value,
) -> Journal {
    entry_by(kind, id, &actor(by), detail)
}

/// The same, by who has no connection to the agent.
pub(super) fn entry_by(
    kind: &str,
    id: &WorkspaceId,
    actor: &str,
    detail: serde_json::Value,
) -> Journal {
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

/// A reason that says something.
fn reason(text: &str, verb: &str) -> Result<String, Failure> {
    match text.trim() {
        "" => Err(Failure::new(Code::BadRequest, format!("a {verb} wants --reason TEXT"))),
        said => Ok(said.to_owned()),
    }
}

impl Agent {
    /// Puts a workspace on HOLD: its writer is frozen first, then nothing is granted or published
    /// until somebody repairs it.
    pub async fn hold_workspace(
        &self,
        by: &Caller,
        id: &str,
        wish: HoldWorkspace,
    ) -> Result<WorkspaceView, Failure> {
        let id = workspace_id(id)?;
        let (by, why) = (actor(by), reason(&wish.reason, "hold")?);
        self.blocking(move |host| {
            let known = any(host, &id)?;
            if let Some(already) = &known.hold {
                let why = format!("workspace {id} is on HOLD already: {already}");
                return Err(Failure::new(Code::WorkspaceHeld, why));
            }
            for slot in host.slots_of(&id) {
                let reason = format!("its workspace was put on HOLD: {why}");
                let loss = Loss::Operator { by: by.clone(), reason };
                host.apply(&slot, Event::LeaseLost { loss, revoke: false }, &by);
            }
            host.hold(&id, &why, &by)?;
            host.store.anchor().map_err(unavailable)?;
            any(host, &id).map(|w| host.workspace_view(&w))
        })
        .await
    }

    /// Lifts a HOLD above everything that was seen.
    pub async fn repair_workspace(
        &self,
        by: &Caller,
        id: &str,
        wish: RepairWorkspace,
    ) -> Result<WorkspaceView, Failure> {
        let id = workspace_id(id)?;
        let why = reason(&wish.reason, "repair")?;
        let by = by.clone();
        self.blocking(move |host| repair(host, &by, &id, Generation(wish.accept_generation), &why))
            .await
    }

    /// Deletes a workspace; its generation lives on in a tombstone.
    pub async fn delete_workspace(
        &self,
        by: &Caller,
        id: &str,
        wish: DeleteWorkspace,
    ) -> Result<WorkspaceView, Failure> {
        let id = workspace_id(id)?;
        let by = by.clone();
        self.blocking(move |host| {
            let known = find(host, &id)?;
            unused(host, &id)?;
            let why = if wish.reason.is_empty() { "no reason given" } else { &wish.reason };
            let rider = |answer: &Result<(), Refusal>| {
                let detail = serde_json::json!({ "why": why, "at": known.at, "answer": answer });
                entry("workspace_delete", &id, &by, detail)
            };
            host.authority.delete(&id, why, Box::new(rider)).map_err(unavailable)??;
            host.store.anchor().map_err(unavailable)?;
            let known = host.authority.get(&id).map_err(unavailable)?;
            known.map(|w| host.workspace_view(&w)).ok_or_else(|| Code::UnknownWorkspace.into())
        })
        .await
    }
}

/// Refuses while a session of it holds bytes on this host, or may still write some.
fn unused(host: &Host, id: &WorkspaceId) -> Result<(), Failure> {
    let slots = host.slots_of(id).into_iter().map(|slot| slot.session());
    let left = slots.filter(|s| s.state != State::Closed);
    let left = left.map(|s| format!("{} ({})", s.id, s.state));
    // Nobody knows what such a one wrote.
    let unbelieved = host.unbelieved_of(id)?.into_iter();
    let unbelieved = unbelieved.map(|bad| format!("{} (its record does not verify)", bad.id));
    let left: Vec<_> = left.chain(unbelieved).collect();
    if left.is_empty() {
        return Ok(());
    }
    let named = left[..left.len().min(5)].join(", ");
    let more = if left.len() > 5 { format!(" and {} more", left.len() - 5) } else { String::new() };
    let why = format!(
        "workspace {id} has sessions or preserved deltas on this host: {named}{more}. Close them \
         (`session close`), or decide about their bytes (`preserved export --dispose`, `preserved \
         discard`) first"
    );
    Err(Failure::new(Code::WorkspaceInUse, why))
}

fn repair(
    host: &Host,
    by: &Caller,
    id: &WorkspaceId,
    accepted: Generation,
    why: &str,
) -> Result<WorkspaceView, Failure> {
    let known = any(host, id)?;
    if known.hold.is_none() {
        let why = format!("workspace {id} is not on HOLD: there is nothing to repair");
        return Err(Failure::new(Code::WrongState, why));
    }
    let (mut seen, mut who) = host.highest_seen(id);
    if known.generation > seen.generation {
        (seen.generation, who) = (known.generation, "the authority's own record".to_owned());
    }
    if accepted < seen.generation {
        let why = format!(
            "generation {accepted} is below {}, which {who} has seen: accept {} or more",
            seen.generation, seen.generation
        );
        return Err(Failure::new(Code::StaleGeneration, why));
    }
    if accepted > Generation::CREDIBLE.max(seen.generation) {
        let why = format!(
            "generation {accepted} was never issued, and would leave none to issue: the highest that \
             was seen is {}",
            seen.generation
        );
        return Err(Failure::new(Code::BadRequest, why));
    }
    let seen = Seen { generation: accepted, ..seen };
    let rider = |answer: &Result<Workspace, Refusal>| {
        let detail = serde_json::json!({
            "was": known.hold, "accepted": accepted, "seen_by": who, "why": why, "answer": answer,
        });
        entry("workspace_repair", id, by, detail)
    };
    let new = host.authority.repair(id, &seen, why, Box::new(rider)).map_err(unavailable)??;
    host.store.raise_mark(id, new.seen()).map_err(unavailable)?;
    host.store.mark_hold(id, false).map_err(unavailable)?;
    // A repair that a restored database forgets must show.
    if let Err(fault) = host.store.anchor() {
        tracing::error!(OVERFENCE_WORKSPACE = %id, "{}", text(fault));
    }
    Ok(host.workspace_view(&new))
}
