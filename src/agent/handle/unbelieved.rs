//! Sessions whose record does not verify: nobody runs, removes or brings back such a one, and a person has
//! to be told of it wherever its bytes are asked for.

use super::internal;
use crate::agent::failure::Failure;
use crate::agent::host::Host;
use crate::agent::recover::unknown;
use crate::agent::witness;
use crate::model::classify::{Plan, Record};
use crate::model::ids::{SessionId, WorkspaceId};
use crate::model::view::PreservedView;
use crate::store::Unreadable;
use crate::upper::size;

impl Host {
    /// The records that do not verify, of sessions that nothing else is known of: one that this agent
    /// believed when it started goes on by what it knows.
    pub(super) fn unbelieved(&self) -> Result<Vec<Unreadable>, Failure> {
        let records = self.store.sessions().map_err(internal)?;
        let mut bad: Vec<_> = records.into_iter().filter_map(Result::err).collect();
        bad.retain(|bad| {
            let id = bad.id.parse::<SessionId>();
            id.map_or(true, |id| self.slot(id).is_none())
                && unknown(Record::Unreadable, false) == Plan::Person
        });
        Ok(bad)
    }

    /// Those whose directory says that they wrote this workspace.
    pub(super) fn unbelieved_of(&self, id: &WorkspaceId) -> Result<Vec<Unreadable>, Failure> {
        let mut bad = self.unbelieved()?;
        bad.retain(|bad| {
            let noted = witness::read(&self.paths.sessions.join(&bad.id));
            noted.is_some_and(|(_, workspace)| workspace == *id)
        });
        Ok(bad)
    }

    /// What stands for each of them.
    pub(super) fn unbelieved_views(&self) -> Result<Vec<PreservedView>, Failure> {
        self.unbelieved()?.iter().map(|bad| self.unbelieved_view(bad)).collect()
    }

    /// Its name, and what its directory says.
    fn unbelieved_view(&self, bad: &Unreadable) -> Result<PreservedView, Failure> {
        // Whoever edits a record chooses its name, too.
        let root = bad.id.parse::<SessionId>().ok();
        let root = root.map(|id| self.paths.sessions.join(id.to_string()));
        let noted = root.as_deref().and_then(witness::read);
        let (bytes, entries) = match root.filter(|root| root.exists()) {
            // Its record says where the upper is: what is counted is all that lies there.
            Some(root) => size::size(&root).map_err(internal)?,
            None => (0, 0),
        };
        let nobody = || "unknown".to_owned();
        Ok(PreservedView {
            session: bad.id.clone(),
            workspace: noted.as_ref().map_or_else(nobody, |(_, workspace)| workspace.to_string()),
            owner: nobody(),
            generation: noted.map_or(0, |(generation, _)| generation.0),
            reason: format!("its record does not verify: {}", bad.why),
            facts: vec![],
            bytes,
            entries,
            grace_left_ms: 0,
            next: "quarantined: kept until an operator acts".to_owned(),
            not_before: None,
        })
    }
}
