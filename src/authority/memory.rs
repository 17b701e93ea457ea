//! An authority without a disk, for models and tests: the same verbs over a state that can be
//! cloned.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::verbs::{Backend, Rows};
use super::{
    Error, Happening, HistoryRow, Journal, PRUNED, PublicationKey, Unreadable, Workspace,
    WorkspaceId,
};
use crate::model::head::Digest;
use crate::model::ids::{RequestKey, TaskId};
use crate::model::ledger::{Publication, Which};
use crate::model::request::Request;
use crate::model::time::BootInstant;
use crate::store::{Clock, Durability, Error as Fault};

/// Everything a [`MemoryAuthority`] knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Records.
    pub workspaces: BTreeMap<WorkspaceId, Workspace>,
    /// The ledger of publications.
    pub publications: BTreeMap<(WorkspaceId, PublicationKey), Publication>,
    /// External requests, in the order in which they were begun.
    pub requests: Vec<Request>,
    /// History, oldest first; its time is the boot clock's, so that a model is deterministic.
    pub history: Vec<(WorkspaceId, HistoryRow)>,
    /// Layers that no head may name.
    pub buried: BTreeSet<Digest>,
    /// What riders wrote.
    pub journals: Vec<Journal>,
}

/// See the module.
pub struct MemoryAuthority {
    state: Mutex<State>,
    clock: Clock,
}

impl MemoryAuthority {
    /// An authority that starts from `state`.
    pub fn new(state: State, clock: Clock) -> Self {
        Self { state: Mutex::new(state), clock }
    }

    /// A copy of all it knows.
    pub fn state(&self) -> State {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Backend for MemoryAuthority {
    fn transact<R>(
        &self,
        _: Durability,
        job: impl FnOnce(&mut dyn Rows) -> Result<R, Fault>,
    ) -> Result<R, Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut work = Work { state: state.clone(), now: (self.clock)() };
        let answer = job(&mut work)?;
        *state = work.state;
        Ok(answer)
    }

    fn read<R>(&self, job: impl FnOnce(&mut dyn Rows) -> Result<R, Fault>) -> Result<R, Error> {
        Ok(job(&mut Work { state: self.state(), now: (self.clock)() })?)
    }
}

struct Work {
    state: State,
    now: BootInstant,
}

impl Rows for Work {
    fn now(&self) -> BootInstant {
        self.now
    }

    fn load(&mut self, id: &WorkspaceId) -> Result<Option<Workspace>, Fault> {
        Ok(self.state.workspaces.get(id).cloned())
    }

    fn save(&mut self, workspace: &Workspace) -> Result<(), Fault> {
        self.state.workspaces.insert(workspace.id.clone(), workspace.clone());
        Ok(())
    }

    fn wall(&self) -> jiff::Timestamp {
        jiff::Timestamp::UNIX_EPOCH + Duration::from_nanos(self.now.ns.0)
    }

    fn publication(
        &mut self,
        id: &WorkspaceId,
        key: PublicationKey,
    ) -> Result<Option<Publication>, Fault> {
        Ok(self.state.publications.get(&(id.clone(), key)).cloned())
    }

    fn put_publication(&mut self, row: &Publication) -> Result<(), Fault> {
        self.state.publications.insert((row.workspace.clone(), row.key), row.clone());
        Ok(())
    }

    fn publications(&mut self, which: &Which) -> Result<Vec<Publication>, Fault> {
        let fits = |row: &&Publication| {
            which.workspace.as_ref().is_none_or(|id| *id == row.workspace)
                && (!which.open || row.state.is_open())
        };
        let mut all: Vec<_> = self.state.publications.values().filter(fits).cloned().collect();
        all.sort_by_key(|row| std::cmp::Reverse(row.key));
        all.truncate(which.limit);
        Ok(all)
    }

    fn prune(
        &mut self,
        id: &WorkspaceId,
        before_ms: u64,
    ) -> Result<(Option<PublicationKey>, usize), Fault> {
        let end = PublicationKey::first_at(before_ms);
        let decided = |row: &Publication| row.changed_at.parse::<jiff::Timestamp>().ok();
        let old = self.state.publications.iter().filter(|((of, key), row)| {
            let before = |t: jiff::Timestamp| {
                u64::try_from(t.as_millisecond()).is_ok_and(|ms| ms < before_ms)
            };
            of == id && *key < end && !row.state.is_open() && decided(row).is_some_and(before)
        });
        let keys: Vec<_> = old.map(|(of, _)| of.clone()).take(PRUNED).collect();
        for key in &keys {
            self.state.publications.remove(key);
        }
        Ok((keys.last().map(|(_, key)| *key), keys.len()))
    }

    fn request(&mut self, id: &WorkspaceId, key: &RequestKey) -> Result<Option<Request>, Fault> {
        let mine = |row: &&Request| row.workspace == *id && row.key == *key;
        Ok(self.state.requests.iter().find(mine).cloned())
    }

    fn requests_of(&mut self, id: &WorkspaceId, task: &TaskId) -> Result<Vec<Request>, Fault> {
        let mine = |row: &&Request| row.workspace == *id && row.task == *task;
        Ok(self.state.requests.iter().filter(mine).cloned().collect())
    }

    fn put_request(&mut self, row: &Request) -> Result<(), Fault> {
        let mine = |old: &&mut Request| old.workspace == row.workspace && old.key == row.key;
        match self.state.requests.iter_mut().find(mine) {
            Some(old) => *old = row.clone(),
            None => self.state.requests.push(row.clone()),
        }
        Ok(())
    }

    fn requests(&mut self, which: &Which) -> Result<Vec<Request>, Fault> {
        let fits = |row: &&Request| {
            which.workspace.as_ref().is_none_or(|id| *id == row.workspace)
                && (!which.open || row.is_open())
        };
        let newest = self.state.requests.iter().rev().filter(fits);
        Ok(newest.take(which.limit).cloned().collect())
    }

    fn log(&mut self, id: &WorkspaceId, what: Happening) -> Result<(), Fault> {
        let time = self.wall().to_string();
        self.state.history.push((id.clone(), HistoryRow { time, what }));
        Ok(())
    }

    fn journal(&mut self, journal: &Journal) -> Result<(), Fault> {
        if *journal != Journal::default() {
            self.state.journals.push(journal.clone());
        }
        Ok(())
    }

    fn all(&mut self) -> Result<Vec<Result<Workspace, Unreadable>>, Fault> {
        Ok(self.state.workspaces.values().cloned().map(Ok).collect())
    }

    fn rows(&mut self, id: &WorkspaceId, limit: usize) -> Result<Vec<HistoryRow>, Fault> {
        let mine = self.state.history.iter().rev().filter(|(of, _)| of == id);
        Ok(mine.take(limit).map(|(_, row)| row.clone()).collect())
    }

    fn is_buried(&mut self, layer: Digest) -> Result<bool, Fault> {
        Ok(self.state.buried.contains(&layer))
    }

    fn buried(&mut self) -> Result<Vec<Digest>, Fault> {
        Ok(self.state.buried.iter().copied().collect())
    }

    fn set_buried(&mut self, layer: Digest, buried: bool) -> Result<(), Fault> {
        match buried {
            true => self.state.buried.insert(layer),
            false => self.state.buried.remove(&layer),
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authority::Authority;
    use crate::authority::conformance::{Fixture, TestClock, run};

    struct Memory {
        authority: MemoryAuthority,
        clock: TestClock,
    }

    impl Fixture for Memory {
        fn authority(&self) -> &dyn Authority {
            &self.authority
        }
        fn clock(&self) -> &TestClock {
            &self.clock
        }
        fn written(&self) -> Vec<String> {
            let journals = self.authority.state().journals;
            journals.into_iter().flat_map(|j| j.entries).map(|d| d.kind).collect()
        }
    }

    #[test]
    fn memory_conforms() {
        run(&|| {
            let clock = TestClock::default();
            let authority = MemoryAuthority::new(State::default(), clock.clock());
            Box::new(Memory { authority, clock })
        });
    }
}
