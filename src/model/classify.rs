//! The reconciler's table: from what the record says, what is found on the host and what the authority
//! answers, to what a session is and what is done about it. This is the one place where that is
//! decided; an agent start, the sweeps and what is shown ask it. `docs/RECONCILER.md` is printed
//! from it.
//!
//! A plan says what is to be done, [`super::step::step`] by which effects; a test holds each cell
//! against the step that follows.

use std::time::Duration;

use super::code::Code;
use super::ids::BootId;
use super::lease::LeaseState;
use super::session::{Loss, Session, State, UNKNOWN};
use super::time::BootInstant;
use super::workspace::Workspace;

/// What the record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Record {
    /// There is none for this directory, or this cgroup.
    Absent,
    /// There is none, and the directory is in the trash: its removal was decided, and cut off.
    Trashed,
    /// It does not verify.
    Unreadable,
    /// OPENING, by this agent.
    Opening,
    /// OPENING, by an agent that is no more.
    CutOff,
    /// ACTIVE or RELEASING.
    Held,
    /// The same, in doubt: a renewal was missed and none was granted since.
    Doubted,
    /// FENCING.
    Fencing,
    /// FENCED.
    Fenced,
    /// PRESERVED.
    Preserved,
    /// PRESERVED, its grace is over and no publication of it is UNKNOWN.
    Due,
    /// DELETING.
    Deleting,
    /// CLOSED.
    Closed,
    /// QUARANTINED.
    Quarantined,
}

impl Record {
    /// All there are.
    pub const ALL: [Self; 14] = [
        Self::Absent,
        Self::Trashed,
        Self::Unreadable,
        Self::Opening,
        Self::CutOff,
        Self::Held,
        Self::Doubted,
        Self::Fencing,
        Self::Fenced,
        Self::Preserved,
        Self::Due,
        Self::Deleting,
        Self::Closed,
        Self::Quarantined,
    ];

    /// Of a session whose record verifies. `more` is time that was witnessed and is not in it yet;
    /// `starting` says that the agent which wrote the record is no more.
    pub fn of(s: &Session, more: Duration, starting: bool) -> Self {
        match s.state {
            State::Opening if starting => Self::CutOff,
            State::Opening => Self::Opening,
            State::Active | State::Releasing if s.doubt.is_some() => Self::Doubted,
            State::Active | State::Releasing => Self::Held,
            State::Fencing => Self::Fencing,
            State::Fenced => Self::Fenced,
            State::Preserved if s.grace_is_over(more) => Self::Due,
            State::Preserved => Self::Preserved,
            State::Deleting => Self::Deleting,
            State::Closed => Self::Closed,
            State::Quarantined => Self::Quarantined,
        }
    }
}

/// Record and host, as they were found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observed {
    /// The record.
    pub record: Record,
    /// The session's boot is over: no process and no mount of it can be there.
    pub rebooted: bool,
    /// The deadline in the keeper's table lies ahead. Without an entry of its generation it does not.
    pub in_time: bool,
    /// The cgroup's stamp says that a fence of this generation began.
    pub fence_stamped: bool,
    /// Nothing is removed now: the breaker is open, or the agent has not run for `min_notice`.
    pub held: bool,
}

/// What the authority says of the session's lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Answer {
    /// It is live.
    Agrees,
    /// It is over, and no newer one was granted.
    Ended,
    /// A newer generation was granted.
    Newer,
    /// The workspace is on HOLD.
    OnHold,
    /// The answer does not verify, or lies below what the session itself knows.
    NotBelieved,
    /// It gives none.
    Silent,
}

impl Answer {
    /// All there are.
    pub const ALL: [Self; 6] =
        [Self::Agrees, Self::Ended, Self::Newer, Self::OnHold, Self::NotBelieved, Self::Silent];

    /// From the authority's record of the session's workspace.
    pub fn of(workspace: Option<&Workspace>, s: &Session, now: &BootInstant) -> Self {
        match workspace {
            None => Self::NotBelieved,
            Some(w) if w.generation < s.generation => Self::NotBelieved,
            Some(w) if w.hold.is_some() => Self::OnHold,
            Some(w) if w.generation > s.generation => Self::Newer,
            Some(w) if w.live_lease(now).is_some_and(|lease| lease.id == s.lease) => Self::Agrees,
            Some(_) => Self::Ended,
        }
    }

    /// What the session's own record knows of it: nothing newer is asked for to show a session.
    pub fn recorded(s: &Session) -> Self {
        match &s.loss {
            Some(Loss::Superseded { .. }) => Self::Newer,
            Some(_) => Self::Ended,
            None if s.doubt.is_some() => Self::Silent,
            None => Self::Agrees,
        }
    }
}

/// What a session is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Its lease holds.
    Authorised,
    /// It is not known whether its lease still holds; until the deadline it runs.
    Doubt,
    /// Somebody else has the workspace under a newer generation.
    StaleGeneration,
    /// Its lease is over.
    LeaseLost,
    /// It is stopped, and holds bytes that no publication holds.
    PreservedDelta,
    /// Its bytes may go.
    SafeToDelete,
    /// No record explains it.
    Orphan,
    /// Its record is not believed, or its removal failed for good.
    Quarantined,
}

impl Class {
    /// As it is shown.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Authorised => "AUTHORISED",
            Self::Doubt => "DOUBT",
            Self::StaleGeneration => "STALE_GENERATION",
            Self::LeaseLost => "LEASE_LOST",
            Self::PreservedDelta => "PRESERVED_DELTA",
            Self::SafeToDelete => "SAFE_TO_DELETE",
            Self::Orphan => "ORPHAN",
            Self::Quarantined => "QUARANTINED",
        }
    }
}

/// What is done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Plan {
    /// It runs on under its lease.
    Run,
    /// It runs on until its deadline, and begins nothing new.
    Wait,
    /// It is frozen at once, and its bytes are kept.
    Stop,
    /// It stays stopped; what is not proved is asked for again; its bytes are kept.
    Keep,
    /// Nobody can have written: its lease is given back, and what was made of it goes.
    RollBack,
    /// It goes: kill, umount, proof, removal.
    Remove,
    /// It is to go, and does not now.
    Rest,
    /// It is frozen where it has a cgroup; nothing of it is removed, until a person decides.
    Person,
    /// Nothing.
    Leave,
}

impl Plan {
    /// In a word or two, as the table has it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Wait => "wait",
            Self::Stop => "stop",
            Self::Keep => "keep",
            Self::RollBack => "roll back",
            Self::Remove => "remove",
            Self::Rest => "rest",
            Self::Person => "person",
            Self::Leave => "leave",
        }
    }
}

/// Class and plan of what was observed.
pub const fn classify(seen: Observed, answer: Answer) -> (Class, Plan) {
    let lost = match answer {
        Answer::Newer => Class::StaleGeneration,
        Answer::Agrees | Answer::Ended | Answer::OnHold | Answer::NotBelieved | Answer::Silent => {
            Class::LeaseLost
        }
    };
    let going = if seen.held { Plan::Rest } else { Plan::Remove };
    match seen.record {
        Record::Absent => (Class::Orphan, Plan::Person),
        Record::Trashed | Record::Deleting => (Class::SafeToDelete, going),
        Record::Unreadable => (Class::Quarantined, Plan::Person),
        Record::Opening if !seen.rebooted => (Class::Authorised, Plan::Run),
        Record::Opening | Record::CutOff => (Class::SafeToDelete, Plan::RollBack),
        // A reboot ends every lease of the host, and every process that could write under one.
        Record::Held | Record::Doubted if seen.rebooted => (lost, Plan::Keep),
        // A fence that began is not taken back by anybody's silence, nor by an old answer.
        Record::Held | Record::Doubted if seen.fence_stamped || !seen.in_time => (lost, Plan::Stop),
        Record::Held | Record::Doubted => match (answer, seen.record) {
            (Answer::Agrees, Record::Held) => (Class::Authorised, Plan::Run),
            // Only a renewal ends doubt. The deadline is this host's own and needs no answer.
            (Answer::Agrees | Answer::Silent, _) => (Class::Doubt, Plan::Wait),
            (Answer::Ended | Answer::Newer | Answer::OnHold | Answer::NotBelieved, _) => {
                (lost, Plan::Stop)
            }
        },
        Record::Fencing | Record::Fenced => (lost, Plan::Keep),
        Record::Preserved => (Class::PreservedDelta, Plan::Keep),
        // The end of grace is nobody's decision: whatever speaks against it, or cannot be asked,
        // keeps the bytes.
        Record::Due => match answer {
            Answer::Ended | Answer::Newer if !seen.held => (Class::SafeToDelete, Plan::Remove),
            Answer::Ended | Answer::Newer => (Class::SafeToDelete, Plan::Rest),
            Answer::Agrees | Answer::OnHold | Answer::NotBelieved | Answer::Silent => {
                (Class::PreservedDelta, Plan::Keep)
            }
        },
        Record::Closed => (Class::SafeToDelete, Plan::Leave),
        Record::Quarantined => (Class::Quarantined, Plan::Leave),
    }
}

/// Why a lease is lost that the authority says is over, where it says why. Without a word of it the
/// loss is doubt, which policy may end by a new lease.
pub fn loss(answer: Answer, workspace: Option<&Workspace>) -> Option<Loss> {
    let w = workspace?;
    match answer {
        Answer::Newer => {
            let owner = w.lease.as_ref().map(|lease| lease.owner.clone());
            let (generation, code) = (w.generation, Code::StaleGeneration);
            Some(Loss::Superseded { generation, owner, code, forced_by: None })
        }
        Answer::Ended => {
            let revoked = w.lease.as_ref().filter(|lease| lease.state == LeaseState::Revoked)?;
            let reason = revoked.why_ended.clone().unwrap_or_default();
            Some(Loss::Revoked { by: UNKNOWN.to_owned(), reason })
        }
        Answer::Agrees | Answer::OnHold | Answer::NotBelieved | Answer::Silent => None,
    }
}

/// What is observed of a session that this agent has in hand, `in_time` of whose lease it knows.
pub fn of_running(s: &Session, boot: BootId, in_time: bool) -> Observed {
    Observed {
        record: Record::of(s, Duration::ZERO, false),
        rebooted: s.boot != boot,
        in_time,
        fence_stamped: false,
        held: false,
    }
}
