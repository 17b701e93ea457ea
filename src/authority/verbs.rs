//! Each verb once, over whatever a backend calls a transaction.

use super::layers;
use super::ledger::{conclude, lose_requests, state_of, taken_over};
use super::{
    Acquire, Acquired, Answer, Authority, Code, Error, Generation, Happening, HeadAt, HistoryRow,
    Journal, KeyState, Lease, LeaseId, LeaseState, NewWorkspace, PublicationKey, Publish, Refusal,
    Renewal, Rider, Seen, Unreadable, Workspace, WorkspaceId, created, not_believed, unknown,
};
use crate::model::head::Digest;
use crate::model::ids::{InvalidId, Owner, RequestKey, TaskId};
use crate::model::ledger::{Publication, Which};
use crate::model::request::Request;
use crate::model::time::BootInstant;
use crate::model::workspace::Ruled;
use crate::store::{Durability, Error as Fault};

pub(super) type Outcome<T> = Result<Result<T, Refusal>, Fault>;

/// The rows of one transaction.
pub(super) trait Rows {
    fn now(&self) -> BootInstant;
    fn load(&mut self, id: &WorkspaceId) -> Result<Option<Workspace>, Fault>;
    fn save(&mut self, workspace: &Workspace) -> Result<(), Fault>;
    /// The wall clock, for people and for how long rows are kept.
    fn wall(&self) -> jiff::Timestamp;
    fn publication(
        &mut self,
        id: &WorkspaceId,
        key: PublicationKey,
    ) -> Result<Option<Publication>, Fault>;
    fn put_publication(&mut self, row: &Publication) -> Result<(), Fault>;
    fn publications(&mut self, which: &Which) -> Result<Vec<Publication>, Fault>;
    /// Removes closed rows whose key was made, and whose answer was given, before a time; those of
    /// the lowest keys, at most `PRUNED`. Gives the highest key removed, and how many were.
    fn prune(
        &mut self,
        id: &WorkspaceId,
        before_ms: u64,
    ) -> Result<(Option<PublicationKey>, usize), Fault>;
    fn request(&mut self, id: &WorkspaceId, key: &RequestKey) -> Result<Option<Request>, Fault>;
    fn requests_of(&mut self, id: &WorkspaceId, task: &TaskId) -> Result<Vec<Request>, Fault>;
    fn put_request(&mut self, row: &Request) -> Result<(), Fault>;
    fn requests(&mut self, which: &Which) -> Result<Vec<Request>, Fault>;
    fn log(&mut self, id: &WorkspaceId, what: Happening) -> Result<(), Fault>;
    fn journal(&mut self, journal: &Journal) -> Result<(), Fault>;
    fn all(&mut self) -> Result<Vec<Result<Workspace, Unreadable>>, Fault>;
    fn rows(&mut self, id: &WorkspaceId, limit: usize) -> Result<Vec<HistoryRow>, Fault>;
    fn is_buried(&mut self, layer: Digest) -> Result<bool, Fault>;
    fn buried(&mut self) -> Result<Vec<Digest>, Fault>;
    fn set_buried(&mut self, layer: Digest, buried: bool) -> Result<(), Fault>;
}

/// What a backend has to bring.
pub(super) trait Backend: Send + Sync {
    /// Runs `job` as one transaction: all of it, or, when it fails, nothing.
    fn transact<R>(
        &self,
        durability: Durability,
        job: impl FnOnce(&mut dyn Rows) -> Result<R, Fault>,
    ) -> Result<R, Error>;

    /// Runs `job`, which changes nothing, on what is committed.
    fn read<R>(&self, job: impl FnOnce(&mut dyn Rows) -> Result<R, Fault>) -> Result<R, Error>;
}

/// The record of a workspace, if it is believed: one that is not is on HOLD as it is.
pub(super) fn loaded(rows: &mut dyn Rows, id: &WorkspaceId) -> Outcome<Option<Workspace>> {
    match rows.load(id) {
        Err(Fault::Record { why, .. }) => Ok(Err(not_believed(&why))),
        answer => answer.map(Ok),
    }
}

/// Applies a rule to the workspace's record and saves what came out, if it changed.
fn rule<T>(
    rows: &mut dyn Rows,
    id: &WorkspaceId,
    rule: impl FnOnce(&Workspace, &BootInstant) -> Ruled<T>,
) -> Outcome<T> {
    let now = rows.now();
    let old = match loaded(rows, id)? {
        Ok(Some(old)) => old,
        Ok(None) => return Ok(Err(unknown())),
        Err(refusal) => return Ok(Err(refusal)),
    };
    match rule(&old, &now) {
        Err(refusal) => Ok(Err(refusal)),
        Ok((new, answer)) => {
            if new != old {
                rows.save(&new)?;
            }
            Ok(Ok(answer))
        }
    }
}

pub(super) fn finish<T>(
    rows: &mut dyn Rows,
    rider: Rider<'_, T>,
    answer: Result<T, Refusal>,
) -> Outcome<T> {
    rows.journal(&rider(&answer))?;
    Ok(answer)
}

fn create(rows: &mut dyn Rows, new: &NewWorkspace) -> Outcome<Workspace> {
    let old = loaded(rows, &new.id)?;
    let made = match old.and_then(|old| created(old.as_ref(), new)) {
        Err(refusal) => return Ok(Err(refusal)),
        Ok(made) => made,
    };
    if layers::any_buried(rows, new.layers.iter().copied())? {
        return Ok(Err(Refusal { code: Code::LayerBuried, current: None }));
    }
    rows.save(&made)?;
    let (owner, generation, at) = (made.owner.clone(), made.generation, made.at.clone());
    rows.log(&new.id, Happening::Created { owner, generation, at })?;
    Ok(Ok(made))
}

fn delete(rows: &mut dyn Rows, id: &WorkspaceId, why: &str) -> Outcome<()> {
    let answer = rule(rows, id, |old, now| {
        let refuse = |code| Err(Refusal { code, current: Some(old.current()) });
        match old {
            old if old.hold.is_some() => refuse(Code::WorkspaceHeld),
            old if old.deleted => Err(unknown()),
            old if old.live_lease(now).is_some() => refuse(Code::LeaseHeld),
            old => Ok((Workspace { deleted: true, ..old.clone() }, old.generation)),
        }
    })?;
    let Ok(generation) = answer else { return Ok(answer.map(drop)) };
    rows.log(id, Happening::Deleted { why: why.to_owned(), generation })?;
    Ok(Ok(()))
}

fn acquire(rows: &mut dyn Rows, wish: &Acquire) -> Outcome<Acquired> {
    if let Ok(old) = loaded(rows, &wish.workspace)? {
        let found = old.as_ref().map(Workspace::seen).unwrap_or_default();
        let held = old.is_some_and(|old| old.hold.is_some());
        if let Some(why) = wish.seen.against(&found).filter(|_| !held) {
            hold(rows, &wish.workspace, &why)?;
        }
    }
    let mut answer = rule(rows, &wish.workspace, |old, now| old.acquire(wish, now))?;
    if let Ok(acquired) = &mut answer {
        acquired.unresolved = taken_over(rows, &wish.workspace, acquired.lease.generation)?;
    }
    let what = match &answer {
        Ok(acquired) => Happening::Acquired {
            owner: wish.owner.clone(),
            host: wish.host,
            session: wish.session,
            lease: wish.lease,
            generation: acquired.lease.generation,
            predecessor: acquired.predecessor.clone(),
            unresolved: acquired.unresolved.clone(),
        },
        Err(refusal) => Happening::Refused {
            verb: "acquire".to_owned(),
            session: wish.session,
            generation: None,
            code: refusal.code,
            current: refusal.current.clone(),
        },
    };
    rows.log(&wish.workspace, what)?;
    Ok(answer)
}

/// What the key's row says does not verify: the workspace goes on HOLD, and the row stays as it is.
fn doubted(rows: &mut dyn Rows, wish: &Publish, why: &str) -> Outcome<HeadAt> {
    if let Err(refusal) = loaded(rows, &wish.workspace)? {
        return Ok(Err(refusal));
    }
    let why = format!("what became of publication {} does not verify: {why}", wish.key);
    hold(rows, &wish.workspace, &why)?;
    rule(rows, &wish.workspace, |old, _| Err(old.refuse(Code::WorkspaceHeld)))
}

fn publish(rows: &mut dyn Rows, wish: &Publish) -> Outcome<HeadAt> {
    let (row, state) = match state_of(rows, &wish.workspace, wish.key) {
        Err(Fault::Record { why, .. }) => return doubted(rows, wish, &why),
        answer => answer?,
    };
    // The same key with other content: whatever the row says, it is not this one's answer.
    let other = row.as_ref().is_some_and(|row| !row.is_about(wish));
    let open = state == KeyState::Unused || state.is_open();
    let buried = open && layers::any_buried(rows, wish.layers())?;
    let answer = rule(rows, &wish.workspace, |old, now| match other {
        true => Err(old.refuse(Code::KeyUsed)),
        false => old.publish(wish, &state, now).and_then(|ruled| match buried {
            true => Err(old.refuse(Code::LayerBuried)),
            false => Ok(ruled),
        }),
    })?;
    match &answer {
        // The same key gets the same answer; it happened once.
        Ok(_) if !open => {}
        Ok(at) => {
            let state = KeyState::Committed { layer: wish.layer, at: at.clone() };
            conclude(rows, wish, row, state)?;
            rows.log(
                &wish.workspace,
                Happening::Published {
                    session: wish.session,
                    generation: wish.generation,
                    key: wish.key,
                    layer: wish.layer,
                    at: at.clone(),
                    reverts_to: wish.reverts_to,
                },
            )?;
        }
        Err(refusal) => {
            if open && !other {
                conclude(rows, wish, row, KeyState::Rejected { code: refusal.code })?;
            }
            rows.log(
                &wish.workspace,
                Happening::Refused {
                    verb: "publish".to_owned(),
                    session: wish.session,
                    generation: Some(wish.generation),
                    code: refusal.code,
                    current: refusal.current.clone(),
                },
            )?;
        }
    }
    Ok(answer)
}

fn resolve(rows: &mut dyn Rows, id: &WorkspaceId, key: PublicationKey) -> Result<KeyState, Fault> {
    let (row, state) = state_of(rows, id, key)?;
    if !(state == KeyState::Unused || state.is_open()) {
        return Ok(state);
    }
    let now = rows.wall().to_string();
    let mut row = row.unwrap_or_else(|| Publication::new(id.clone(), key, None, &now));
    if row.advance(KeyState::Buried, &now) {
        rows.put_publication(&row)?;
    }
    rows.log(id, Happening::Buried { key })?;
    Ok(KeyState::Buried)
}

fn renew_one(rows: &mut dyn Rows, one: &Renewal) -> Outcome<Lease> {
    rule(rows, &one.workspace, |old, now| old.renew(one.lease, one.generation, now))
}

fn hold(rows: &mut dyn Rows, id: &WorkspaceId, why: &str) -> Result<(), Fault> {
    let old = match loaded(rows, id)? {
        Ok(Some(old)) if old.hold.as_deref() == Some(why) => return Ok(()),
        Ok(Some(old)) => old,
        Ok(None) => Workspace { deleted: true, ..Workspace::new(id.clone(), nobody(id)?, None) },
        Err(_) => return rows.log(id, Happening::Held { why: why.to_owned() }),
    };
    rows.save(&old.held(why))?;
    rows.log(id, Happening::Held { why: why.to_owned() })
}

fn nobody(id: &WorkspaceId) -> Result<Owner, Fault> {
    "unknown".parse().map_err(|e: InvalidId| Fault::Record {
        table: "workspaces",
        id: id.to_string(),
        why: e.to_string(),
    })
}

/// The record as the history tells it: what was made, published and repaired last.
fn retold(rows: &mut dyn Rows, id: &WorkspaceId) -> Outcome<Workspace> {
    let told = match rows.rows(id, usize::MAX) {
        Err(Fault::Record { why, .. }) => {
            return Ok(Err(not_believed(&format!("nor does its history: {why}"))));
        }
        told => told?,
    };
    let mut made = Workspace::new(id.clone(), nobody(id)?, None);
    let mut known = false;
    for row in told.into_iter().rev() {
        match row.what {
            Happening::Created { owner, generation, at } => {
                let old = made.generation.max(generation);
                made = Workspace { at, generation: old, ..Workspace::new(id.clone(), owner, None) };
                known = true;
            }
            Happening::Published { at, .. } => made.at = at,
            Happening::Acquired { generation, .. } => {
                made.generation = made.generation.max(generation);
            }
            Happening::Repaired { generation, at, .. } => {
                made.generation = made.generation.max(generation);
                // A row of before repairs told the head has none.
                if at.version > made.at.version {
                    made.at = at;
                }
            }
            Happening::Deleted { .. } => made.deleted = true,
            Happening::Refused { .. }
            | Happening::Buried { .. }
            | Happening::Held { .. }
            | Happening::Begun { .. }
            | Happening::Settled { .. }
            | Happening::Assigned { .. } => {}
        }
    }
    if !known {
        return Ok(Err(not_believed("nor does its history say how it was made")));
    }
    // Which keys were pruned stood in the record alone: of one without a row nothing is said.
    let now = u64::try_from(rows.wall().as_millisecond()).unwrap_or(u64::MAX);
    made.forgotten = Some(PublicationKey::first_at(now.saturating_add(1)));
    Ok(Ok(made))
}

fn repair(rows: &mut dyn Rows, id: &WorkspaceId, seen: &Seen, why: &str) -> Outcome<Workspace> {
    let old = match loaded(rows, id)? {
        Ok(Some(old)) => old,
        Ok(None) => return Ok(Err(unknown())),
        Err(_) => match retold(rows, id)? {
            Ok(old) => old,
            Err(refusal) => return Ok(Err(refusal)),
        },
    };
    let new = old.repaired(seen);
    rows.save(&new)?;
    let (why, generation, at) = (why.to_owned(), new.generation, new.at.clone());
    rows.log(id, Happening::Repaired { why, generation, at })?;
    Ok(Ok(new))
}

impl<B: Backend> Authority for B {
    fn create(&self, new: &NewWorkspace, rider: Rider<'_, Workspace>) -> Answer<Workspace> {
        self.transact(Durability::Full, |rows| {
            let answer = create(rows, new)?;
            finish(rows, rider, answer)
        })
    }

    fn delete(&self, id: &WorkspaceId, why: &str, rider: Rider<'_, ()>) -> Answer<()> {
        self.transact(Durability::Full, |rows| {
            let answer = delete(rows, id, why)?;
            finish(rows, rider, answer)
        })
    }

    fn get(&self, id: &WorkspaceId) -> Result<Option<Workspace>, Error> {
        self.read(|rows| rows.load(id))
    }

    fn list(&self) -> Result<Vec<Workspace>, Error> {
        let all = self.read(|rows| rows.all())?;
        Ok(all.into_iter().filter_map(Result::ok).collect())
    }

    fn unreadable(&self) -> Result<Vec<Unreadable>, Error> {
        let all = self.read(|rows| rows.all())?;
        Ok(all.into_iter().filter_map(Result::err).collect())
    }

    fn history(&self, id: &WorkspaceId, limit: usize) -> Result<Vec<HistoryRow>, Error> {
        self.read(|rows| rows.rows(id, limit))
    }

    fn acquire(&self, wish: &Acquire, rider: Rider<'_, Acquired>) -> Answer<Acquired> {
        self.transact(Durability::Full, |rows| {
            let answer = acquire(rows, wish)?;
            finish(rows, rider, answer)
        })
    }

    fn renew(&self, batch: &[Renewal]) -> Result<Vec<Result<Lease, Refusal>>, Error> {
        self.transact(Durability::Lazy, |rows| {
            batch.iter().map(|one| renew_one(rows, one)).collect()
        })
    }

    fn releasing(&self, id: &WorkspaceId, lease: LeaseId, generation: Generation) -> Answer<()> {
        self.transact(Durability::Full, |rows| {
            rule(rows, id, |old, now| old.releasing(lease, generation, now))
        })
    }

    fn end(
        &self,
        id: &WorkspaceId,
        lease: LeaseId,
        generation: Generation,
        state: LeaseState,
        why: &str,
        rider: Rider<'_, ()>,
    ) -> Answer<()> {
        self.transact(Durability::Full, |rows| {
            let answer = rule(rows, id, |old, _| old.end(lease, generation, state, why))?;
            if answer.is_ok() {
                lose_requests(rows, id, generation)?;
            }
            finish(rows, rider, answer)
        })
    }

    fn publish(&self, wish: &Publish, rider: Rider<'_, HeadAt>) -> Answer<HeadAt> {
        self.transact(Durability::Full, |rows| {
            let answer = publish(rows, wish)?;
            finish(rows, rider, answer)
        })
    }

    fn resolve(
        &self,
        id: &WorkspaceId,
        key: PublicationKey,
        rider: Rider<'_, KeyState>,
    ) -> Result<KeyState, Error> {
        self.transact(Durability::Full, |rows| {
            let found = resolve(rows, id, key)?;
            rows.journal(&rider(&Ok(found.clone())))?;
            Ok(found)
        })
    }

    fn hold(&self, id: &WorkspaceId, why: &str, rider: Rider<'_, ()>) -> Result<(), Error> {
        self.transact(Durability::Full, |rows| {
            hold(rows, id, why)?;
            rows.journal(&rider(&Ok(())))
        })
    }

    fn repair(
        &self,
        id: &WorkspaceId,
        seen: &Seen,
        why: &str,
        rider: Rider<'_, Workspace>,
    ) -> Answer<Workspace> {
        self.transact(Durability::Full, |rows| {
            let answer = repair(rows, id, seen, why)?;
            finish(rows, rider, answer)
        })
    }
}
