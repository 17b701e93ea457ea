//! How many sessions are in which state, and which of them a tick may have something to do for.
//! Kept up to date step by step, so that nobody walks a thousand sessions to say so: each of them
//! lies on memory of its own that nothing else touches for seconds.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::model::ids::SessionId;
use crate::model::session::State;

/// See the module.
#[derive(Debug, Default)]
pub struct Census {
    state_of: HashMap<SessionId, State>,
    counts: BTreeMap<State, u64>,
    unsettled: BTreeSet<SessionId>,
}

impl Census {
    /// Takes a session in.
    pub fn enter(&mut self, id: SessionId, state: State, settled: bool) {
        self.strike(id);
        self.state_of.insert(id, state);
        *self.counts.entry(state).or_default() += 1;
        self.update(id, state, settled);
    }

    /// Follows a session to its present state. One that was struck off stays so.
    pub fn update(&mut self, id: SessionId, state: State, settled: bool) {
        let Some(known) = self.state_of.get_mut(&id) else { return };
        let old = std::mem::replace(known, state);
        if old != state {
            self.uncount(old);
            *self.counts.entry(state).or_default() += 1;
        }
        match settled {
            true => self.unsettled.remove(&id),
            false => self.unsettled.insert(id),
        };
    }

    /// Strikes a session off.
    pub fn strike(&mut self, id: SessionId) {
        self.unsettled.remove(&id);
        if let Some(old) = self.state_of.remove(&id) {
            self.uncount(old);
        }
    }

    fn uncount(&mut self, old: State) {
        let left = self.counts.get(&old).map_or(0, |n| n - 1);
        match left {
            0 => self.counts.remove(&old),
            n => self.counts.insert(old, n),
        };
    }

    /// How many sessions are in each state that any is in.
    pub fn counts(&self) -> &BTreeMap<State, u64> {
        &self.counts
    }

    /// Those that a tick may have something to do for.
    pub fn unsettled(&self) -> &BTreeSet<SessionId> {
        &self.unsettled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_session_counts_once_in_the_state_it_is_in() {
        let mut census = Census::default();
        let (a, b) = (SessionId::from_u128(1), SessionId::from_u128(2));
        for id in [a, b] {
            census.enter(id, State::Active, true);
            census.update(id, State::Active, true);
        }
        assert_eq!(census.counts(), &BTreeMap::from([(State::Active, 2)]));
        census.update(a, State::Fencing, false);
        assert_eq!(census.counts(), &BTreeMap::from([(State::Active, 1), (State::Fencing, 1)]));
        assert_eq!(census.unsettled(), &BTreeSet::from([a]));
        for id in [a, a, b] {
            census.strike(id);
            census.update(id, State::Closed, false);
        }
        assert!(census.counts().is_empty() && census.unsettled().is_empty());
    }
}
