//! Workspaces and leases.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use super::{Agent, PATIENCE, actor, internal, unavailable, unique, workspace_id};
use crate::agent::failure::{Caller, Failure};
use crate::agent::host::Host;
use crate::agent::slot::Slot;
use crate::agent::view::word;
use crate::authority::{HistoryRow, NewWorkspace};
use crate::kernel::walk::Dir;
use crate::model::code::Code;
use crate::model::head::Digest;
use crate::model::ids::{LeaseId, WorkspaceId};
use crate::model::journal::{Draft, Journal};
use crate::model::lease::{Lease, LeaseState};
use crate::model::session::Loss;
use crate::model::step::Event;
use crate::model::view::{
    CreateWorkspace, Fenced, HistoryView, LeaseView, RevokeLease, WorkspaceView,
};
use crate::model::workspace::{Refusal, Workspace};
use crate::store::Unreadable;
use crate::upper::layer::{self, Source, Writers};

impl Agent {
    /// Creates a workspace; its lowers are captured once, as its first layers.
    pub async fn create_workspace(
        &self,
        by: &Caller,
        wish: CreateWorkspace,
    ) -> Result<WorkspaceView, Failure> {
        let by = by.clone();
        self.blocking(move |host| create(host, &by, wish).map(|w| host.workspace_view(&w))).await
    }

    /// All workspaces.
    pub async fn workspaces(&self) -> Result<Vec<WorkspaceView>, Failure> {
        self.blocking(|host| Ok(all(host)?.iter().map(|w| host.workspace_view(w)).collect())).await
    }

    /// One workspace.
    pub async fn workspace(&self, id: &str) -> Result<WorkspaceView, Failure> {
        let id = workspace_id(id)?;
        self.blocking(move |host| any(host, &id).map(|w| host.workspace_view(&w))).await
    }

    /// Publications, refusals and takeover records, newest first.
    pub async fn history(&self, id: &str, limit: usize) -> Result<Vec<HistoryView>, Failure> {
        let id = workspace_id(id)?;
        self.blocking(move |host| {
            any(host, &id)?;
            let rows = host.authority.history(&id, limit).map_err(unavailable)?;
            Ok(rows.into_iter().map(history_view).collect())
        })
        .await
    }

    /// The present lease of every workspace, or else its last one.
    pub async fn leases(&self) -> Result<Vec<LeaseView>, Failure> {
        self.blocking(|host| {
            let known = host.authority.list().map_err(unavailable)?;
            let leases =
                known.iter().filter_map(|w| w.lease.as_ref().map(|l| host.lease_view(w, l)));
            Ok(leases.collect())
        })
        .await
    }

    /// Takes a lease away. Its session, when it is on this host, is frozen first.
    pub async fn revoke(
        &self,
        by: &Caller,
        lease: &str,
        wish: RevokeLease,
    ) -> Result<Fenced, Failure> {
        let slot = match self.held_here(lease) {
            Some(slot) => slot,
            None => self.holder(lease).await?,
        };
        let reason =
            if wish.reason.is_empty() { "no reason given".to_owned() } else { wish.reason };
        let loss = Loss::Revoked { by: actor(by), reason };
        self.0.apply(&slot, Event::LeaseLost { loss, revoke: true }, &actor(by));
        let wait = wish.wait_ms.map_or(Duration::ZERO, Duration::from_millis).min(PATIENCE);
        slot.wait_for(wait, |inner| inner.session.is_stopped()).await;
        Ok(self.fenced(&slot))
    }

    /// The session that holds a lease, known by its whole id: found without the authority, for
    /// whose answer no freeze waits.
    fn held_here(&self, lease: &str) -> Option<Arc<Slot>> {
        let id: LeaseId = lease.parse().ok()?;
        self.0.slots().into_iter().find(|slot| {
            let inner = slot.lock();
            inner.session.lease == id && inner.session.holds_lease()
        })
    }

    /// The session of a lease that may publish, by the authority's list.
    async fn holder(&self, prefix: &str) -> Result<Arc<Slot>, Failure> {
        let prefix = prefix.to_owned();
        let (workspace, lease) = self.blocking(move |host| find_lease(host, &prefix)).await?;
        if !lease.state.may_publish() {
            let code = match lease.state {
                LeaseState::Released => Code::LeaseReleased,
                LeaseState::Expired => Code::LeaseExpired,
                LeaseState::Revoked | LeaseState::Active | LeaseState::Releasing => {
                    Code::LeaseRevoked
                }
            };
            return Err(Failure::new(
                code,
                format!("lease {} is {} already", lease.id, word(&lease.state)),
            ));
        }
        self.0.slot(lease.session).ok_or_else(|| {
            let text = format!(
                "lease {} of {workspace} is held by a session on another host; revoke it there",
                lease.id
            );
            Failure::new(Code::UnknownSession, text)
        })
    }
}

fn history_view(row: HistoryRow) -> HistoryView {
    let mut detail = serde_json::to_value(&row.what).unwrap_or_default();
    let kind = detail.as_object_mut().and_then(|d| d.remove("what"));
    let field = |name: &str| detail.get(name).cloned();
    HistoryView {
        at: row.time,
        kind: kind.and_then(|k| k.as_str().map(str::to_owned)).unwrap_or_default(),
        generation: field("generation").and_then(|g| g.as_u64()).unwrap_or(0),
        session: field("session").and_then(|s| s.as_str().map(str::to_owned)),
        reverts_to: field("reverts_to").and_then(|version| version.as_u64()),
        detail,
    }
}

/// A workspace that exists.
pub(super) fn find(host: &Host, id: &WorkspaceId) -> Result<Workspace, Failure> {
    let known = any(host, id)?;
    match known.deleted {
        false => Ok(known),
        true => Err(Failure::new(
            Code::WorkspaceHeld,
            format!("workspace {id} is unknown, and on HOLD: {}", known.hold.unwrap_or_default()),
        )),
    }
}

/// A workspace that exists or is on HOLD.
pub(super) fn any(host: &Host, id: &WorkspaceId) -> Result<Workspace, Failure> {
    let known = match host.authority.get(id) {
        Err(crate::authority::Error::NotBelieved { .. }) => {
            let all = host.authority.unreadable().map_err(unavailable)?;
            all.iter().find(|bad| bad.id == id.as_str()).and_then(|bad| stub(host, bad))
        }
        answer => answer.map_err(unavailable)?,
    };
    known.filter(|w| !w.deleted || w.hold.is_some()).ok_or_else(|| {
        Failure::new(
            Code::UnknownWorkspace,
            format!("no workspace {id}; `overfence workspace create {id}` makes one"),
        )
    })
}

/// All that exist or are on HOLD.
pub(super) fn all(host: &Host) -> Result<Vec<Workspace>, Failure> {
    let mut known = host.authority.list().map_err(unavailable)?;
    known.retain(|w| !w.deleted || w.hold.is_some());
    let bad = host.authority.unreadable().map_err(unavailable)?;
    known.extend(bad.iter().filter_map(|bad| stub(host, bad)));
    known.sort_by(|a, b| a.id.cmp(&b.id));
    Ok(known)
}

/// What stands for a record that does not verify: its name, and what was seen of it here.
fn stub(host: &Host, bad: &Unreadable) -> Option<Workspace> {
    let id: WorkspaceId = bad.id.parse().ok()?;
    let seen = host.store.marks().highest(&id);
    let mut stub = Workspace::new(id, "unknown".parse().ok()?, None);
    (stub.generation, stub.at.version) = (seen.generation, seen.version);
    stub.hold = Some(format!("its record does not verify: {}", bad.why));
    Some(stub)
}

fn find_lease(host: &Host, prefix: &str) -> Result<(WorkspaceId, Lease), Failure> {
    let known = host.authority.list().map_err(unavailable)?;
    let leases: Vec<_> = known.into_iter().filter_map(|w| w.lease.map(|l| (w.id, l))).collect();
    let id: LeaseId = unique(prefix, "l-", leases.iter().map(|(_, l)| l.id), Code::UnknownLease)?;
    leases.into_iter().find(|(_, l)| l.id == id).ok_or_else(|| Failure::from(Code::UnknownLease))
}

/// Captures the lowers, then creates the record.
pub(super) fn create(
    host: &Host,
    by: &Caller,
    wish: CreateWorkspace,
) -> Result<Workspace, Failure> {
    create_with(host, by, wish, vec![])
}

/// Refuses the name of a workspace that exists.
pub(super) fn refuse_existing(host: &Host, id: &WorkspaceId) -> Result<(), Failure> {
    if any(host, id).is_ok_and(|w| w.hold.is_none()) {
        return Err(Failure::new(Code::WorkspaceExists, format!("workspace {id} exists")));
    }
    Ok(())
}

/// Captures the lowers on top of `layers`, then creates the record.
pub(super) fn create_with(
    host: &Host,
    by: &Caller,
    wish: CreateWorkspace,
    mut layers: Vec<Digest>,
) -> Result<Workspace, Failure> {
    let created = create_on(host, by, wish, &mut layers);
    // Its head names them, or nothing does.
    host.layers.settle(layers);
    created
}

fn create_on(
    host: &Host,
    by: &Caller,
    wish: CreateWorkspace,
    layers: &mut Vec<Digest>,
) -> Result<Workspace, Failure> {
    let bad = |e: &dyn std::fmt::Display| Failure::new(Code::BadRequest, e.to_string());
    host.refuse_when_short()?;
    let id = workspace_id(&wish.id)?;
    let owner = wish.owner.unwrap_or_else(|| by.owner()).parse().map_err(|e| bad(&e))?;
    refuse_existing(host, &id)?;
    host.refuse_forgotten(&id)?;
    for lower in &wish.lowers {
        let path =
            lower.path().ok_or_else(|| bad(&format!("{:?} is not a well-formed path", lower.0)))?;
        if !path.is_absolute() {
            return Err(bad(&format!("{} is not absolute", path.display())));
        }
        if host.paths.hold_own(&path) {
            return Err(bad(&format!(
                "{} holds keys and sessions of the agent's own: choose another directory",
                path.display()
            )));
        }
        let dir = Dir::open(&path)
            .map_err(|e| Failure::new(Code::UpperRefused, crate::agent::effects::text(e)))?;
        let captured =
            layer::capture(Source::Directory(dir.as_fd()), Writers::Running, &host.layers, &|| {
                host.stopping()
            })
            .map_err(|e| match e.code() {
                Code::Internal => Failure::new(Code::UpperRefused, crate::agent::effects::text(e)),
                _ => super::of_upper(e),
            })?;
        layers.push(captured.diff_id);
    }
    let new = NewWorkspace {
        id: id.clone(),
        owner,
        contact: wish.contact,
        labels: wish.labels,
        layers: layers.clone(),
    };
    let rider = |outcome: &Result<Workspace, Refusal>| {
        let entry = Draft {
            kind: "workspace_create".to_owned(),
            workspace: Some(id.clone()),
            session: None,
            generation: outcome.as_ref().ok().map(|w| w.generation),
            actor: actor(by),
            detail: serde_json::json!({ "answer": outcome }),
        };
        Journal { sessions: vec![], entries: vec![entry] }
    };
    if !new.layers.is_empty() {
        // What was recorded so far is anchored before each move of a head.
        host.store.anchor().map_err(unavailable)?;
    }
    let created = host.authority.create(&new, Box::new(rider)).map_err(internal)??;
    host.note_published(&created.id, created.seen());
    Ok(created)
}
