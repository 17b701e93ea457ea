//! Sessions by the time at which something is due for them: the deadline timer and the renewals
//! each have one, so that neither walks all sessions.

use std::collections::{BTreeSet, HashMap};

use crate::model::ids::SessionId;
use crate::model::time::BootNs;

/// At most one time for each session.
#[derive(Debug, Default)]
pub struct Agenda {
    by_time: BTreeSet<(BootNs, SessionId)>,
    of: HashMap<SessionId, BootNs>,
}

impl Agenda {
    /// Sets a session's time; whether it is the first of all now.
    pub fn set(&mut self, id: SessionId, at: BootNs) -> bool {
        if let Some(old) = self.of.insert(id, at) {
            self.by_time.remove(&(old, id));
        }
        self.by_time.insert((at, id));
        self.by_time.first() == Some(&(at, id))
    }

    /// Sets a session's time unless it has one.
    pub fn set_if_none(&mut self, id: SessionId, at: BootNs) {
        if !self.of.contains_key(&id) {
            self.set(id, at);
        }
    }

    /// Forgets a session.
    pub fn remove(&mut self, id: SessionId) {
        if let Some(old) = self.of.remove(&id) {
            self.by_time.remove(&(old, id));
        }
    }

    /// The earliest time.
    pub fn first(&self) -> Option<BootNs> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// Takes out the sessions whose time has come, in order.
    pub fn take_due(&mut self, now: BootNs) -> Vec<SessionId> {
        let mut due = Vec::new();
        while let Some((at, id)) = self.by_time.first().copied().filter(|(at, _)| *at <= now) {
            self.by_time.remove(&(at, id));
            self.of.remove(&id);
            due.push(id);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_come_in_order_and_can_move() {
        let mut agenda = Agenda::default();
        let (a, b) = (SessionId::from_u128(1), SessionId::from_u128(2));
        assert!(agenda.set(a, BootNs(50)));
        assert!(agenda.set(b, BootNs(40)));
        assert!(!agenda.set(b, BootNs(60)), "a comes first now");
        agenda.set_if_none(b, BootNs(10));
        assert_eq!(agenda.first(), Some(BootNs(50)));
        assert_eq!(agenda.take_due(BootNs(55)), vec![a]);
        agenda.remove(b);
        assert_eq!(agenda.take_due(BootNs(100)), vec![]);
    }
}
