//! External requests in the model: one task that is to happen once, which both hosts' writers want to
//! send, each with a key of its own. A begin goes to the authority and comes back like a publication;
//! who is answered `begun` sends, and nothing takes that back.

use super::world::{Invariant, World};
use super::{Bug, Model};
use crate::model::ids::RequestKey;
use crate::model::lease::LeaseState;
use crate::model::request::{self, Begin, Begun};

/// A begin on its way, or its answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Ask {
    Wish(Begin),
    Answer { key: RequestKey, may_send: bool },
}

fn key(host: usize) -> RequestKey {
    format!("k{host}").parse().unwrap()
}

impl Model {
    /// The agent lets a begin through: nothing it knows speaks against it.
    pub(super) fn begin(&self, w: &mut World, i: usize) {
        w.left.begins[i] -= 1;
        let Some(s) = w.hosts[i].live.clone() else { return };
        let wish = Begin {
            workspace: s.workspace.clone(),
            lease: s.lease,
            generation: s.generation,
            session: s.id,
            expected: s.expected.clone(),
            task: "t".parse().unwrap(),
            key: key(i),
            about: String::new(),
            host: s.host,
            owner: s.owner.clone(),
            assignee: s.owner.clone(),
        };
        w.hosts[i].asks.push(Ask::Wish(wish));
    }

    /// The nth of a host's begins goes one step further.
    pub(super) fn carry(&self, w: &mut World, i: usize, n: usize) {
        match w.hosts[i].asks.remove(n) {
            Ask::Wish(wish) => {
                let now = w.instant();
                let allowed = w.workspace.may_begin(&wish, &now).is_ok();
                let mut may_send = false;
                if allowed || self.bug == Some(Bug::BeginUnchecked) {
                    let known = w.requests.iter().find(|row| row.key == wish.key).cloned();
                    let compared = self.bug != Some(Bug::TaskNotCompared);
                    let same = if compared { w.requests.clone() } else { Vec::new() };
                    match request::begin(&wish, known.as_ref(), &same, w.requests.len(), "") {
                        Begun::Begun(row) => {
                            let right = may_commit(w, &wish);
                            w.break_unless(right, Invariant::I1);
                            w.requests.push(row);
                            may_send = true;
                        }
                        Begun::Resumed(row) => {
                            w.requests.retain(|old| old.key != row.key);
                            w.requests.push(row);
                        }
                        Begun::Repeated(_)
                        | Begun::Taken(_)
                        | Begun::KeyUsed(_)
                        | Begun::TooMany => {}
                    }
                }
                // The agent that asked may be gone; then nobody is answered.
                if w.hosts[i].up {
                    w.hosts[i].asks.push(Ask::Answer { key: wish.key, may_send });
                }
            }
            Ask::Answer { key, may_send } => {
                // What the agent knows by now is asked once more ahead of the answer.
                let live = w.hosts[i].live.as_ref();
                if may_send && live.is_some_and(|s| s.may_start_work().is_ok()) {
                    w.sent.insert(key);
                }
            }
        }
    }
}

/// The conditions, written down a second time.
fn may_commit(w: &World, wish: &Begin) -> bool {
    let Some(lease) = &w.workspace.lease else { return false };
    lease.id == wish.lease
        && lease.session == wish.session
        && lease.generation == wish.generation
        && w.workspace.generation == wish.generation
        && matches!(lease.state, LeaseState::Active | LeaseState::Releasing)
        && w.instant().ns < lease.expires.ns
        && !w.lapsed.contains(&wish.generation)
        && wish.expected == w.workspace.at
}

impl World {
    /// What was sent is on record, and the task was sent under one key.
    pub fn sent_once(&self) -> bool {
        let known = |key: &RequestKey| self.requests.iter().any(|row| row.key == *key);
        self.sent.len() <= 1 && self.sent.iter().all(known)
    }
}
