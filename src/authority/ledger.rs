//! The verbs of the ledger: publications before and after they are answered, and external requests.

use std::convert::Infallible;

use super::layers;
use super::verbs::{Backend, Outcome, Rows, finish, loaded};
use super::{
    Answer, Code, Error, Happening, KeyState, Owner, PublicationKey, Publish, Refusal, Rider,
    WorkspaceId, unknown,
};
use crate::model::ids::{Generation, RequestKey, SessionId};
use crate::model::ledger::{Publication, Unresolved, Which};
use crate::model::request::{self, Begin, Begun, Request, Settlement};
use crate::model::workspace::Writer;
use crate::store::{Durability, Error as Fault};

/// What the authority knows of steps whose outcome may be lost. Each call is one transaction and
/// blocks.
pub trait Ledger: Send + Sync {
    /// Enters a publication ahead of its offer, as `Prepared` or `Sent`. A row that is further
    /// already stays as it is; other content under the same key is refused with `key_used`.
    ///
    /// # Errors
    /// See [`Error`], here and below.
    fn enter(
        &self,
        wish: &Publish,
        owner: &Owner,
        stage: KeyState,
        rider: Rider<'_, ()>,
    ) -> Answer<()>;

    /// Says that the answer to a publication was lost.
    fn doubt(&self, id: &WorkspaceId, key: PublicationKey, why: &str) -> Result<(), Error>;

    /// Rows of publications, newest key first.
    fn publications(&self, which: &Which) -> Result<Vec<Publication>, Error>;

    /// Gives an open publication to somebody else. `not_found` without a row, `already_settled` once
    /// its outcome is known.
    fn assign(
        &self,
        id: &WorkspaceId,
        key: PublicationKey,
        to: &Owner,
        rider: Rider<'_, Publication>,
    ) -> Answer<Publication>;

    /// Refuses a writer that lost its lease and asks for `verb` all the same, so that it is told who
    /// owns the workspace now, and the history has it. Nothing else is entered.
    fn refuse(&self, who: &Writer, verb: &str, rider: Rider<'_, Infallible>) -> Answer<Infallible>;

    /// Begins an external request under the publication predicate; who is answered
    /// [`Begun::Begun`] may send it, for its row is durable.
    fn begin(&self, wish: &Begin, rider: Rider<'_, Begun>) -> Answer<Begun>;

    /// Records what became of a request. The first outcome told is the only one: the same one again
    /// changes nothing, another one is refused with `already_settled`. `not_found` without a row.
    fn settle(
        &self,
        id: &WorkspaceId,
        key: &RequestKey,
        told: &Settlement,
        rider: Rider<'_, Request>,
    ) -> Answer<Request>;

    /// Gives an open request to somebody else; refused as [`Ledger::assign`] is.
    fn reassign(
        &self,
        id: &WorkspaceId,
        key: &RequestKey,
        to: &Owner,
        rider: Rider<'_, Request>,
    ) -> Answer<Request>;

    /// Rows of external requests, the latest begun first.
    fn requests(&self, which: &Which) -> Result<Vec<Request>, Error>;

    /// Forgets publications that were made and answered before a time, milliseconds since 1970, of
    /// every workspace without an open row; at most [`PRUNED`] of each. Gives their number.
    fn prune(&self, before_ms: u64) -> Result<usize, Error>;
}

/// Rows that one call of [`Ledger::prune`] removes of one workspace at most.
pub const PRUNED: usize = 1000;

impl<B: Backend> Ledger for B {
    fn enter(
        &self,
        wish: &Publish,
        owner: &Owner,
        stage: KeyState,
        rider: Rider<'_, ()>,
    ) -> Answer<()> {
        // What is sent is known for good before it is. What is only prepared may be forgotten with the
        // power: nobody was asked.
        let durability = match stage {
            KeyState::Prepared => Durability::Lazy,
            _ => Durability::Full,
        };
        self.transact(durability, |rows| {
            let answer = enter(rows, wish, owner, stage)?;
            finish(rows, rider, answer)
        })
    }

    fn doubt(&self, id: &WorkspaceId, key: PublicationKey, why: &str) -> Result<(), Error> {
        self.transact(Durability::Full, |rows| {
            let Some(mut row) = rows.publication(id, key)? else { return Ok(()) };
            if row.advance(KeyState::Unknown { why: why.to_owned() }, &rows.wall().to_string()) {
                rows.put_publication(&row)?;
            }
            Ok(())
        })
    }

    fn publications(&self, which: &Which) -> Result<Vec<Publication>, Error> {
        self.read(|rows| rows.publications(which))
    }

    fn assign(
        &self,
        id: &WorkspaceId,
        key: PublicationKey,
        to: &Owner,
        rider: Rider<'_, Publication>,
    ) -> Answer<Publication> {
        self.transact(Durability::Full, |rows| {
            let answer = match rows.publication(id, key)? {
                None => Err(Refusal { code: Code::NotFound, current: None }),
                Some(row) if !row.state.is_open() => {
                    Err(Refusal { code: Code::AlreadySettled, current: None })
                }
                Some(mut row) => {
                    if row.assignee.as_ref() != Some(to) {
                        row.assignee = Some(to.clone());
                        rows.put_publication(&row)?;
                        let what = Happening::Assigned { key: key.to_string(), to: to.clone() };
                        rows.log(id, what)?;
                    }
                    Ok(row)
                }
            };
            finish(rows, rider, answer)
        })
    }

    fn refuse(&self, who: &Writer, verb: &str, rider: Rider<'_, Infallible>) -> Answer<Infallible> {
        self.transact(Durability::Full, |rows| {
            let now = rows.now();
            let refusal = match loaded(rows, &who.workspace)? {
                Ok(Some(workspace)) => workspace.refuse_writer(who, &now),
                Ok(None) => unknown(),
                Err(refusal) => refusal,
            };
            log_refused(rows, &who.workspace, verb, who.session, who.generation, &refusal)?;
            finish(rows, rider, Err(refusal))
        })
    }

    fn begin(&self, wish: &Begin, rider: Rider<'_, Begun>) -> Answer<Begun> {
        self.transact(Durability::Full, |rows| {
            let answer = begin(rows, wish)?;
            finish(rows, rider, answer)
        })
    }

    fn settle(
        &self,
        id: &WorkspaceId,
        key: &RequestKey,
        told: &Settlement,
        rider: Rider<'_, Request>,
    ) -> Answer<Request> {
        self.transact(Durability::Full, |rows| {
            let answer = settle(rows, id, key, told)?;
            finish(rows, rider, answer)
        })
    }

    fn reassign(
        &self,
        id: &WorkspaceId,
        key: &RequestKey,
        to: &Owner,
        rider: Rider<'_, Request>,
    ) -> Answer<Request> {
        self.transact(Durability::Full, |rows| {
            let answer = match of_key(rows, id, key)? {
                Err(refusal) => Err(refusal),
                Ok(row) if !row.is_open() => {
                    Err(Refusal { code: Code::AlreadySettled, current: None })
                }
                Ok(row) if row.assignee == *to => Ok(row),
                Ok(row) => {
                    let row = Request { assignee: to.clone(), ..row };
                    rows.put_request(&row)?;
                    let what = Happening::Assigned { key: key.to_string(), to: to.clone() };
                    rows.log(id, what)?;
                    Ok(row)
                }
            };
            finish(rows, rider, answer)
        })
    }

    fn requests(&self, which: &Which) -> Result<Vec<Request>, Error> {
        self.read(|rows| rows.requests(which))
    }

    fn prune(&self, before_ms: u64) -> Result<usize, Error> {
        self.transact(Durability::Full, |rows| {
            let mut pruned = 0;
            for workspace in rows.all()?.into_iter().flatten() {
                let open = Which { workspace: Some(workspace.id.clone()), open: true, limit: 1 };
                if !rows.publications(&open)?.is_empty() || !rows.requests(&open)?.is_empty() {
                    continue;
                }
                let (newest, n) = rows.prune(&workspace.id, before_ms)?;
                if let Some(newest) = newest {
                    let mut workspace = workspace;
                    workspace.forgotten = workspace.forgotten.max(Some(newest));
                    rows.save(&workspace)?;
                }
                pruned += n;
            }
            Ok(pruned)
        })
    }
}

/// The row of a key, or what its absence means.
pub(super) fn state_of(
    rows: &mut dyn Rows,
    id: &WorkspaceId,
    key: PublicationKey,
) -> Result<(Option<Publication>, KeyState), Fault> {
    if let Some(row) = rows.publication(id, key)? {
        let state = row.state.clone();
        return Ok((Some(row), state));
    }
    let workspace = rows.load(id)?;
    Ok((None, workspace.map_or(KeyState::Unused, |w| w.without_row(key))))
}

fn enter(rows: &mut dyn Rows, wish: &Publish, owner: &Owner, stage: KeyState) -> Outcome<()> {
    let now = rows.wall().to_string();
    let workspace = match loaded(rows, &wish.workspace)? {
        Ok(Some(workspace)) => workspace,
        Ok(None) => return Ok(Err(unknown())),
        Err(refusal) => return Ok(Err(refusal)),
    };
    let row = rows.publication(&wish.workspace, wish.key)?;
    if row.as_ref().is_some_and(|row| !row.may_become(wish)) {
        return Ok(Err(workspace.refuse(Code::KeyUsed)));
    }
    // From here on its layers stay: a burial leaves what an open row names.
    if row.is_none() && layers::any_buried(rows, wish.layers())? {
        return Ok(Err(workspace.refuse(Code::LayerBuried)));
    }
    let mut row = row.unwrap_or_else(|| fresh(wish, owner, &workspace.owner, &now));
    if row.advance(stage, &now) {
        row.asked = Some(wish.clone());
        rows.put_publication(&row)?;
    }
    Ok(Ok(()))
}

/// The row of a publication that was not entered before.
fn fresh(wish: &Publish, owner: &Owner, assignee: &Owner, now: &str) -> Publication {
    Publication {
        owner: Some(owner.clone()),
        assignee: Some(assignee.clone()),
        ..Publication::new(wish.workspace.clone(), wish.key, Some(wish), now)
    }
}

/// Writes down how a publication ended. An unknown workspace has no ledger.
pub(super) fn conclude(
    rows: &mut dyn Rows,
    wish: &Publish,
    row: Option<Publication>,
    state: KeyState,
) -> Result<(), Fault> {
    let now = rows.wall().to_string();
    let Some(workspace) = rows.load(&wish.workspace)? else { return Ok(()) };
    let of_lease = workspace.lease.as_ref().filter(|l| l.id == wish.lease);
    let owner = of_lease.map_or(&workspace.owner, |l| &l.owner);
    let mut row = row.unwrap_or_else(|| fresh(wish, owner, &workspace.owner, &now));
    if row.advance(state, &now) {
        rows.put_publication(&row)?;
    }
    Ok(())
}

/// What former writers of a workspace left open, now that `newest` is the generation: marked as
/// UNKNOWN, and told to the new one.
pub(super) fn taken_over(
    rows: &mut dyn Rows,
    id: &WorkspaceId,
    newest: Generation,
) -> Result<Vec<Unresolved>, Fault> {
    let now = rows.wall().to_string();
    let open = Which { workspace: Some(id.clone()), open: true, limit: usize::MAX };
    let mut left = Vec::new();
    for mut row in rows.publications(&open)? {
        let former = row.asked.as_ref().map(|asked| asked.generation);
        let why = match former {
            Some(generation) => format!("generation {generation} ended before it was answered"),
            None => "its writer is not known".to_owned(),
        };
        if former.is_none_or(|g| g < newest) && row.advance(KeyState::Unknown { why }, &now) {
            rows.put_publication(&row)?;
        }
        left.push(Unresolved::from(&row));
    }
    if let Some(former) = newest.0.checked_sub(1) {
        lose_requests(rows, id, Generation(former))?;
    }
    left.extend(rows.requests(&open)?.iter().map(Unresolved::from));
    Ok(left)
}

/// The writers of a workspace up to `last` lost it: what they may have sent is UNKNOWN.
pub(super) fn lose_requests(
    rows: &mut dyn Rows,
    id: &WorkspaceId,
    last: Generation,
) -> Result<(), Fault> {
    let now = rows.wall().to_string();
    let open = Which { workspace: Some(id.clone()), open: true, limit: usize::MAX };
    for row in rows.requests(&open)?.iter().filter(|row| row.generation <= last) {
        let lost = request::lost(row, &now);
        if lost != *row {
            rows.put_request(&lost)?;
        }
    }
    Ok(())
}

fn begin(rows: &mut dyn Rows, wish: &Begin) -> Outcome<Begun> {
    let (now, wall) = (rows.now(), rows.wall().to_string());
    let found = rows.load(&wish.workspace)?;
    let allowed = found.ok_or_else(unknown).and_then(|w| w.may_begin(wish, &now).map(|()| w));
    let workspace = match allowed {
        Ok(workspace) => workspace,
        Err(refusal) => {
            log_refused(rows, &wish.workspace, "begin", wish.session, wish.generation, &refusal)?;
            return Ok(Err(refusal));
        }
    };
    let id = &wish.workspace;
    let known = rows.request(id, &wish.key)?;
    let same = rows.requests_of(id, &wish.task)?;
    let open = Which { workspace: Some(id.clone()), open: true, limit: request::MAX_OPEN };
    let open = rows.requests(&open)?.len();
    let begun = request::begin(wish, known.as_ref(), &same, open, &wall);
    match &begun {
        Begun::Begun(row) | Begun::Resumed(row) if known.as_ref() != Some(row) => {
            rows.put_request(row)?;
            let resumed = known.is_some();
            let (task, key) = (row.task.clone(), row.key.clone());
            let (session, generation) = (wish.session, wish.generation);
            rows.log(id, Happening::Begun { task, key, session, generation, resumed })?;
        }
        Begun::Begun(_) | Begun::Repeated(_) | Begun::Resumed(_) => {}
        Begun::Taken(_) | Begun::KeyUsed(_) | Begun::TooMany => {
            let code = match &begun {
                Begun::Taken(_) => Code::TaskTaken,
                Begun::KeyUsed(_) => Code::KeyUsed,
                _ => Code::TooManyOpen,
            };
            let refusal = workspace.refuse(code);
            log_refused(rows, id, "begin", wish.session, wish.generation, &refusal)?;
        }
    }
    Ok(Ok(begun))
}

fn log_refused(
    rows: &mut dyn Rows,
    id: &WorkspaceId,
    verb: &str,
    session: SessionId,
    generation: Generation,
    refusal: &Refusal,
) -> Result<(), Fault> {
    let (verb, generation) = (verb.to_owned(), Some(generation));
    let (code, current) = (refusal.code, refusal.current.clone());
    rows.log(id, Happening::Refused { verb, session, generation, code, current })
}

/// The request of a key that a workspace has.
fn of_key(rows: &mut dyn Rows, id: &WorkspaceId, key: &RequestKey) -> Outcome<Request> {
    if rows.load(id)?.is_none() {
        return Ok(Err(unknown()));
    }
    let row = rows.request(id, key)?;
    Ok(row.ok_or(Refusal { code: Code::NotFound, current: None }))
}

fn settle(
    rows: &mut dyn Rows,
    id: &WorkspaceId,
    key: &RequestKey,
    told: &Settlement,
) -> Outcome<Request> {
    let row = match of_key(rows, id, key)? {
        Err(refusal) => return Ok(Err(refusal)),
        Ok(row) => row,
    };
    let wall = rows.wall().to_string();
    match request::settle(&row, told.clone(), &wall) {
        None => Ok(Err(Refusal { code: Code::AlreadySettled, current: None })),
        Some(new) if new == row => Ok(Ok(row)),
        Some(new) => {
            rows.put_request(&new)?;
            let (task, key, told) = (new.task.clone(), key.clone(), told.clone());
            rows.log(id, Happening::Settled { task, key, told })?;
            Ok(Ok(new))
        }
    }
}
