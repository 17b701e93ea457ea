//! External requests: what a writer asks of something that overfence does not control. The row is
//! there before the request is sent, and stays until somebody says what became of it: no generation
//! takes back what an earlier one sent.
//!
//! Lease, generation and external task are three things. A *task* is what is to happen outside, once; a
//! *key* is what the far side gets with it, to tell a repetition from a second wish.

use serde::{Deserialize, Serialize};

use super::head::HeadAt;
use super::ids::{Generation, HostId, LeaseId, Owner, RequestKey, SessionId, TaskId, WorkspaceId};

/// Open requests of one workspace at most: each has to be seen to by somebody.
pub const MAX_OPEN: usize = 256;

/// A wish to send a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Begin {
    /// Of which workspace.
    pub workspace: WorkspaceId,
    /// Under which lease.
    pub lease: LeaseId,
    /// With which fencing token.
    pub generation: Generation,
    /// From which session.
    pub session: SessionId,
    /// What the session last saw committed.
    pub expected: HeadAt,
    /// What is to happen outside.
    pub task: TaskId,
    /// The key it is sent with.
    pub key: RequestKey,
    /// What it is, for people; part of the content that a repeated key has to match.
    pub about: String,
    /// On which host.
    pub host: HostId,
    /// For whom.
    pub owner: Owner,
    /// Who is to see to it.
    pub assignee: Owner,
}

/// What happened outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It took place.
    Done,
    /// It did not take place, and never will by this key.
    NotDone,
}

impl Outcome {
    /// Its name on the command line and in the API.
    pub fn word(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::NotDone => "not-done",
        }
    }
}

/// How far a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum RequestState {
    /// It may have been sent; nobody has said what became of it.
    Open,
    /// The same, and its writer lost the workspace meanwhile.
    Unknown,
    /// The outcome is known.
    Settled,
}

/// Who said what became of a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Settlement {
    /// What happened.
    pub outcome: Outcome,
    /// Who said so: a session, or the peer that the kernel named.
    pub by: String,
    /// `ack` (the far side answered) or `resolve` (a person looked).
    pub how: String,
    /// A reference, or the reason.
    pub note: String,
}

/// One external request.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Request {
    /// Of which workspace.
    pub workspace: WorkspaceId,
    /// What is to happen outside.
    pub task: TaskId,
    /// The key it is sent with.
    pub key: RequestKey,
    /// What it is, for people.
    pub about: String,
    /// Who began it.
    pub session: SessionId,
    /// Under which lease.
    pub lease: LeaseId,
    /// With which fencing token.
    pub generation: Generation,
    /// On which host.
    pub host: HostId,
    /// For whom.
    pub owner: Owner,
    /// Who is to see to it while it is open.
    pub assignee: Owner,
    /// How far it is.
    pub state: RequestState,
    /// What became of it, once that is known.
    pub settled: Option<Settlement>,
    /// The newest generation that asked for it again under the same key.
    pub resumed: Option<Generation>,
    /// When it began, RFC 3339.
    pub began_at: String,
    /// When it was last changed, RFC 3339.
    pub changed_at: String,
}

impl Request {
    /// The row of a request that begins now.
    pub fn new(wish: &Begin, now: &str) -> Self {
        Self {
            workspace: wish.workspace.clone(),
            task: wish.task.clone(),
            key: wish.key.clone(),
            about: wish.about.clone(),
            session: wish.session,
            lease: wish.lease,
            generation: wish.generation,
            host: wish.host,
            owner: wish.owner.clone(),
            assignee: wish.assignee.clone(),
            state: RequestState::Open,
            settled: None,
            resumed: None,
            began_at: now.to_owned(),
            changed_at: now.to_owned(),
        }
    }

    /// Whether its outcome is still to come.
    pub fn is_open(&self) -> bool {
        self.state != RequestState::Settled
    }

    /// Whether it keeps others from beginning its task under another key: it may have happened.
    fn binds_its_task(&self) -> bool {
        self.settled.as_ref().is_none_or(|s| s.outcome == Outcome::Done)
    }
}

/// What a begin was answered, its conditions met.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "result", content = "request", rename_all = "snake_case")]
pub enum Begun {
    /// It is the first of its task and key: send it.
    Begun(Request),
    /// The same generation asked under this key before: it may have been sent.
    Repeated(Request),
    /// An older generation asked under this key before: it may have been sent.
    Resumed(Request),
    /// The task was begun under another key: this one is not to be sent.
    Taken(Request),
    /// The key was used for another task, or the same with another description.
    KeyUsed(Request),
    /// Too many are open.
    TooMany,
}

/// What is answered to a begin that the predicate lets through. `of_key` is the row of its key,
/// `of_task` are those of its task, `open` counts the workspace's open ones.
pub fn begin(
    wish: &Begin,
    of_key: Option<&Request>,
    of_task: &[Request],
    open: usize,
    now: &str,
) -> Begun {
    if let Some(known) = of_key {
        if (&known.task, &known.about) != (&wish.task, &wish.about) {
            return Begun::KeyUsed(known.clone());
        }
        let newest = known.resumed.unwrap_or(known.generation).max(known.generation);
        if wish.generation <= newest {
            return match known.generation == wish.generation {
                true => Begun::Repeated(known.clone()),
                false => Begun::Resumed(known.clone()),
            };
        }
        let mut row = known.clone();
        row.resumed = Some(wish.generation);
        row.changed_at = now.to_owned();
        return Begun::Resumed(row);
    }
    if let Some(first) = of_task.iter().find(|row| row.binds_its_task()) {
        return Begun::Taken(first.clone());
    }
    if open >= MAX_OPEN {
        return Begun::TooMany;
    }
    Begun::Begun(Request::new(wish, now))
}

/// The row with its outcome; `None` where another outcome was told before.
pub fn settle(row: &Request, settlement: Settlement, now: &str) -> Option<Request> {
    match &row.settled {
        Some(before) if before.outcome == settlement.outcome => Some(row.clone()),
        Some(_) => None,
        None => Some(Request {
            state: RequestState::Settled,
            settled: Some(settlement),
            changed_at: now.to_owned(),
            ..row.clone()
        }),
    }
}

/// The row once its writer lost the workspace.
pub fn lost(row: &Request, now: &str) -> Request {
    match row.state {
        RequestState::Open => {
            Request { state: RequestState::Unknown, changed_at: now.to_owned(), ..row.clone() }
        }
        RequestState::Unknown | RequestState::Settled => row.clone(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn wish(task: u8, key: u8, generation: u64) -> Begin {
        Begin {
            workspace: "w".parse().unwrap(),
            lease: LeaseId::from_u128(generation.into()),
            generation: Generation(generation),
            session: SessionId::from_u128(generation.into()),
            expected: HeadAt::default(),
            task: format!("t{task}").parse().unwrap(),
            key: format!("k{key}").parse().unwrap(),
            about: String::new(),
            host: HostId::from_u128(1),
            owner: "o".parse().unwrap(),
            assignee: "o".parse().unwrap(),
        }
    }

    #[derive(Clone, Debug)]
    enum Ask {
        Begin { task: u8, key: u8 },
        Takeover,
        Settle { key: u8, done: bool },
    }

    fn asks() -> impl Strategy<Value = Vec<Ask>> {
        let ask = prop_oneof![
            4 => (0..3_u8, 0..4_u8).prop_map(|(task, key)| Ask::Begin { task, key }),
            1 => Just(Ask::Takeover),
            2 => (0..4_u8, any::<bool>()).prop_map(|(key, done)| Ask::Settle { key, done }),
        ];
        proptest::collection::vec(ask, 0..60)
    }

    proptest! {
        /// Whatever is begun, taken over and settled: of one task, at most one key may be out or
        /// done at any time; a row's key, task and first generation never change; an outcome told
        /// is never changed.
        #[test]
        fn i7_of_one_task_one_key_is_out(asks in asks()) {
            let mut rows: Vec<Request> = Vec::new();
            let mut generation = 1;
            for ask in asks {
                let before = rows.clone();
                match ask {
                    Ask::Begin { task, key } => {
                        let wish = wish(task, key, generation);
                        let known = rows.iter().find(|r| r.key == wish.key).cloned();
                        let same: Vec<_> =
                            rows.iter().filter(|r| r.task == wish.task).cloned().collect();
                        let open = rows.iter().filter(|r| r.is_open()).count();
                        match begin(&wish, known.as_ref(), &same, open, "now") {
                            Begun::Begun(row) => {
                                prop_assert!(known.is_none());
                                rows.push(row);
                            }
                            Begun::Resumed(row) => {
                                prop_assert!(row.generation < Generation(generation));
                                prop_assert_eq!(row.resumed, Some(Generation(generation)));
                                rows.retain(|r| r.key != row.key);
                                rows.push(row);
                            }
                            Begun::Repeated(row) => {
                                prop_assert_eq!(row.generation, Generation(generation));
                            }
                            Begun::Taken(first) => {
                                prop_assert_eq!(&first.task, &wish.task);
                                prop_assert!(first.key != wish.key);
                            }
                            Begun::KeyUsed(first) => prop_assert!(first.task != wish.task),
                            Begun::TooMany => prop_assert!(false, "far from it"),
                        }
                    }
                    Ask::Takeover => {
                        generation += 1;
                        rows = rows.iter().map(|r| lost(r, "now")).collect();
                        prop_assert!(rows.iter().all(|r| r.state != RequestState::Open));
                    }
                    Ask::Settle { key, done } => {
                        let outcome = if done { Outcome::Done } else { Outcome::NotDone };
                        let name: RequestKey = format!("k{key}").parse().unwrap();
                        if let Some(row) = rows.iter_mut().find(|r| r.key == name) {
                            let told = Settlement {
                                outcome,
                                by: "x".to_owned(),
                                how: "ack".to_owned(),
                                note: String::new(),
                            };
                            match settle(row, told, "now") {
                                Some(new) => {
                                    prop_assert_eq!(new.settled.as_ref().unwrap().outcome, outcome);
                                    *row = new;
                                }
                                None => {
                                    let before = row.settled.as_ref().unwrap().outcome;
                                    prop_assert!(before != outcome);
                                }
                            }
                        }
                    }
                }
                for old in &before {
                    let new = rows.iter().find(|r| r.key == old.key).expect("no row goes");
                    prop_assert_eq!((&new.task, new.generation), (&old.task, old.generation));
                    prop_assert!(old.settled.is_none() || new.settled == old.settled);
                }
                for row in &rows {
                    let out = rows.iter().filter(|r| r.task == row.task && r.binds_its_task());
                    prop_assert!(out.count() <= 1, "one task is out twice");
                }
            }
        }
    }

    #[test]
    fn no_more_than_can_be_seen_to() {
        let wish = wish(1, 1, 1);
        assert!(matches!(begin(&wish, None, &[], MAX_OPEN - 1, "now"), Begun::Begun(_)));
        assert_eq!(begin(&wish, None, &[], MAX_OPEN, "now"), Begun::TooMany);
    }
}
