//! An authority without a disk, for models and tests: the same verbs over a state that can be
//! cloned.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::verbs::{Backend, Rows};
use super::{
    Error, Happening, HistoryRow, Journal, KeyState, PublicationKey, Unreadable, Workspace,
    WorkspaceId,
};
use crate::model::time::BootInstant;
use crate::store::{Clock, Durability, Error as Fault};

/// Everything a [`MemoryAuthority`] knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Records.
    pub workspaces: BTreeMap<WorkspaceId, Workspace>,
    /// What became of publication keys.
    pub keys: BTreeMap<(WorkspaceId, PublicationKey), KeyState>,
    /// History, oldest first; its time is the boot clock's, so that a model is deterministic.
    pub history: Vec<(WorkspaceId, HistoryRow)>,
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

    fn key(&mut self, id: &WorkspaceId, key: PublicationKey) -> Result<KeyState, Fault> {
        let found = self.state.keys.get(&(id.clone(), key));
        Ok(found.cloned().unwrap_or(KeyState::Unused))
    }

    fn set_key(
        &mut self,
        id: &WorkspaceId,
        key: PublicationKey,
        state: &KeyState,
    ) -> Result<(), Fault> {
        self.state.keys.insert((id.clone(), key), state.clone());
        Ok(())
    }

    fn log(&mut self, id: &WorkspaceId, what: Happening) -> Result<(), Fault> {
        let time = jiff::Timestamp::UNIX_EPOCH + Duration::from_nanos(self.now.ns.0);
        let time = time.to_string();
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
