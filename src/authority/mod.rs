//! The authority: the linearizable store of workspaces, leases, generations, the ledger of
//! publications and external requests, and their history. It may use `store` and `model`; `agent` calls it on a blocking thread.
//!
//! ```text
//! Authority (trait)  <- verbs.rs, ledger.rs, layers.rs: each verb once, over a transaction  <- sqlite.rs, memory.rs
//!                    <- etcd and others may come; all pass conformance.rs
//! ```
//!
//! The rules themselves are in [`crate::model::workspace`]; a verb loads a record, applies one of
//! them, and saves what came out, in one transaction. Nothing else edits a record. What it keeps on
//! disk is drawn in [`crate::store`].

#[cfg(test)]
pub mod conformance;
mod layers;
mod ledger;
pub mod memory;
pub mod sqlite;
mod verbs;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::code::Code;
use crate::model::head::{Digest, Head, HeadAt};
use crate::model::ids::{
    Generation, HostId, LeaseId, Owner, PublicationKey, RequestKey, SessionId, TaskId, Version,
    WorkspaceId,
};
use crate::model::journal::Journal;
use crate::model::lease::{Lease, LeaseState};
use crate::model::ledger::Unresolved;
use crate::model::request::Settlement;
use crate::model::workspace::{
    Acquire, Acquired, Current, KeyState, Predecessor, Publish, Refusal, Seen, Workspace,
};
use crate::store::Unreadable;

pub use layers::{Layers, Pins};
pub use ledger::{Ledger, PRUNED};
pub use memory::MemoryAuthority;
pub use sqlite::SqliteAuthority;

/// The authority gave no answer, or one that is not believed. Nothing is known to have changed,
/// but for [`Error::Unknown`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// It does not answer; nothing changed. Trying again may help.
    #[error("the authority does not answer: {why}; nothing changed, try again")]
    Unavailable {
        /// What happened.
        why: String,
    },
    /// What it says is not believed: a record that does not verify, a store that lost an fsync.
    #[error("the authority is not believed: {why}; an operator must look at it")]
    NotBelieved {
        /// What happened.
        why: String,
    },
    /// The answer of a change was lost; it may or may not have happened.
    #[error("the authority's answer was lost: {why}; resolve it before anything is sent again")]
    Unknown {
        /// What happened.
        why: String,
    },
}

/// Outer: no answer, or not believed. Inner: the rule's refusal.
pub type Answer<T> = Result<Result<T, Refusal>, Error>;

/// Makes, from a verb's outcome, what is written in the same transaction as the verb's change (a
/// refusal has a journal too). It must not call the authority or the store.
pub type Rider<'a, T> = Box<dyn FnOnce(&Result<T, Refusal>) -> Journal + Send + 'a>;

/// A rider that writes nothing.
pub fn no_rider<'a, T>() -> Rider<'a, T> {
    Box::new(|_| Journal::default())
}

/// A wish for a workspace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewWorkspace {
    /// Its name.
    pub id: WorkspaceId,
    /// Who answers for it.
    pub owner: Owner,
    /// How to reach them.
    pub contact: String,
    /// Selectors.
    pub labels: BTreeMap<String, String>,
    /// Its first layers, lowest first, which make version 1; without any it starts empty at
    /// version 0.
    pub layers: Vec<Digest>,
}

/// A wish to extend one lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Renewal {
    /// Of which workspace.
    pub workspace: WorkspaceId,
    /// Which lease.
    pub lease: LeaseId,
    /// Its fencing token.
    pub generation: Generation,
}

/// What happened to a workspace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Happening {
    /// It was made, or made again.
    Created {
        /// By whom.
        owner: Owner,
        /// The generation it starts from; not zero when the name was used before.
        generation: Generation,
        /// Version and head.
        at: HeadAt,
    },
    /// It was deleted; the generation lives on.
    Deleted {
        /// Why.
        why: String,
        /// The highest generation issued.
        generation: Generation,
    },
    /// A lease was granted. With a predecessor this is the takeover record.
    Acquired {
        /// New owner.
        owner: Owner,
        /// On which host.
        host: HostId,
        /// For which session.
        session: SessionId,
        /// The lease.
        lease: LeaseId,
        /// New generation.
        generation: Generation,
        /// Old owner and generation, and why its lease ended.
        predecessor: Option<Predecessor>,
        /// What former writers left without a known outcome.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        unresolved: Vec<Unresolved>,
    },
    /// The head advanced.
    Published {
        /// By which session.
        session: SessionId,
        /// Under which generation.
        generation: Generation,
        /// Under which key.
        key: PublicationKey,
        /// The layer.
        layer: Digest,
        /// What it made.
        at: HeadAt,
        /// It was a revert: the version whose head came back.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reverts_to: Option<Version>,
    },
    /// An acquisition, a publication or an external request was refused.
    Refused {
        /// `acquire`, `publish` or `begin`.
        verb: String,
        /// Who asked.
        session: SessionId,
        /// With which generation; none for an acquisition.
        generation: Option<Generation>,
        /// The reason.
        code: Code,
        /// The present owner and state.
        current: Option<Current>,
    },
    /// A publication key was resolved as not committed.
    Buried {
        /// The key.
        key: PublicationKey,
    },
    /// An external request was begun, or a newer generation asked for it again.
    Begun {
        /// What is to happen outside.
        task: TaskId,
        /// The key it is sent with.
        key: RequestKey,
        /// By which session.
        session: SessionId,
        /// Under which generation.
        generation: Generation,
        /// Whether an older generation had begun it.
        resumed: bool,
    },
    /// The outcome of an external request was told.
    Settled {
        /// What was to happen outside.
        task: TaskId,
        /// The key it was sent with.
        key: RequestKey,
        /// What became of it, and who says so.
        told: Settlement,
    },
    /// An open publication or request was given to somebody.
    Assigned {
        /// Its key.
        key: String,
        /// To whom.
        to: Owner,
    },
    /// It was put on HOLD.
    Held {
        /// Why.
        why: String,
    },
    /// An operator lifted the HOLD.
    Repaired {
        /// Why it is believed again.
        why: String,
        /// The generation it goes on from.
        generation: Generation,
        /// The version and head it goes on from.
        #[serde(default)]
        at: HeadAt,
    },
}

/// One row of a workspace's history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistoryRow {
    /// Wall-clock time, RFC 3339, for people.
    pub time: String,
    /// What happened.
    #[serde(flatten)]
    pub what: Happening,
}

/// See the module. Calls block. Each is one transaction.
pub trait Authority: Ledger + Layers {
    /// Makes a workspace; over a tombstone it goes on from its generation.
    ///
    /// # Errors
    /// See [`Error`], here and below.
    fn create(&self, new: &NewWorkspace, rider: Rider<'_, Workspace>) -> Answer<Workspace>;

    /// Leaves a tombstone. Refused while a lease is live or the workspace is on HOLD.
    fn delete(&self, id: &WorkspaceId, why: &str, rider: Rider<'_, ()>) -> Answer<()>;

    /// One record, tombstones too.
    fn get(&self, id: &WorkspaceId) -> Result<Option<Workspace>, Error>;

    /// All records that verify, tombstones too; the others are [`Authority::unreadable`].
    fn list(&self) -> Result<Vec<Workspace>, Error>;

    /// The records that are not believed.
    fn unreadable(&self) -> Result<Vec<Unreadable>, Error>;

    /// The newest rows of a workspace's history, newest first.
    fn history(&self, id: &WorkspaceId, limit: usize) -> Result<Vec<HistoryRow>, Error>;

    /// Grants a lease with a new generation. A workspace below what the wish's witnesses saw is put
    /// on HOLD in the same transaction, and refused.
    fn acquire(&self, wish: &Acquire, rider: Rider<'_, Acquired>) -> Answer<Acquired>;

    /// Extends leases, all in one transaction that survives the agent's death but not a power
    /// loss.
    fn renew(&self, batch: &[Renewal]) -> Result<Vec<Result<Lease, Refusal>>, Error>;

    /// Marks a lease as closing.
    fn releasing(&self, id: &WorkspaceId, lease: LeaseId, generation: Generation) -> Answer<()>;

    /// Ends a lease as `state`. Ending one that ended already keeps how it ended.
    fn end(
        &self,
        id: &WorkspaceId,
        lease: LeaseId,
        generation: Generation,
        state: LeaseState,
        why: &str,
        rider: Rider<'_, ()>,
    ) -> Answer<()>;

    /// Advances the head by one layer, under the predicate of I1.
    fn publish(&self, wish: &Publish, rider: Rider<'_, HeadAt>) -> Answer<HeadAt>;

    /// Finds the answer that a key got, or buries the key (I7). Never answers a state that is
    /// open, nor [`KeyState::Unused`]; [`KeyState::Forgotten`] says nothing about what it did.
    fn resolve(
        &self,
        id: &WorkspaceId,
        key: PublicationKey,
        rider: Rider<'_, KeyState>,
    ) -> Result<KeyState, Error>;

    /// Puts a workspace on HOLD. One the authority does not know gets a held tombstone, so that
    /// nobody makes it again below a generation that was seen. A record that does not verify is on
    /// HOLD as it is: every rule refuses it with `workspace_held`.
    fn hold(&self, id: &WorkspaceId, why: &str, rider: Rider<'_, ()>) -> Result<(), Error>;

    /// Lifts a HOLD; the next generation is above `seen`, the highest any witness knows. A record
    /// that does not verify is made again from the workspace's history; refused with
    /// `workspace_held` if that does not verify either. Labels and contact are lost with it.
    fn repair(
        &self,
        id: &WorkspaceId,
        seen: &Seen,
        why: &str,
        rider: Rider<'_, Workspace>,
    ) -> Answer<Workspace>;
}

/// The record a creation gives.
fn created(old: Option<&Workspace>, new: &NewWorkspace) -> Result<Workspace, Refusal> {
    if let Some(old) = old {
        let code = if old.hold.is_some() { Code::WorkspaceHeld } else { Code::WorkspaceExists };
        if old.hold.is_some() || !old.deleted {
            return Err(Refusal { code, current: Some(old.current()) });
        }
    }
    let mut made = Workspace::new(new.id.clone(), new.owner.clone(), old);
    (made.contact, made.labels) = (new.contact.clone(), new.labels.clone());
    if !new.layers.is_empty() {
        let version = made.at.version.max(Version(1));
        made.at = HeadAt { version, head: Head(new.layers.clone()) };
    }
    Ok(made)
}

/// The answer for a record that does not verify.
fn not_believed(why: &str) -> Refusal {
    let hold = format!("its record does not verify: {why}");
    let current = Current {
        owner: None,
        session: None,
        lease_state: None,
        generation: Generation::NONE,
        at: HeadAt::default(),
        hold: Some(hold),
    };
    Refusal { code: Code::WorkspaceHeld, current: Some(current) }
}

fn unknown() -> Refusal {
    Refusal { code: Code::UnknownWorkspace, current: None }
}
