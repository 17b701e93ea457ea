//! The rules of the authority: one workspace record, and what may happen to it. Every backend
//! (SQLite, memory, etcd) applies these same functions inside its own transaction; none edits a
//! record by another way.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::code::Code;
use super::head::{Digest, Head, HeadAt};
use super::ids::{
    Generation, HostId, LeaseId, Owner, PublicationKey, SessionId, Version, WorkspaceId,
};
use super::lease::{HolderKind, Lease, LeaseState};
pub use super::ledger::KeyState;
use super::ledger::Unresolved;
use super::request::Begin;
use super::session::Session;
use super::time::BootInstant;

/// One workspace as the authority keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Workspace {
    /// Its name.
    pub id: WorkspaceId,
    /// Who answers for it.
    pub owner: Owner,
    /// How to reach them; free text.
    pub contact: String,
    /// Selectors.
    pub labels: BTreeMap<String, String>,
    /// Version and head.
    pub at: HeadAt,
    /// Which session published the top layer, so that its next checkpoint replaces that layer.
    pub top: Option<SessionId>,
    /// The highest generation ever issued.
    pub generation: Generation,
    /// The last lease, in whatever state.
    pub lease: Option<Lease>,
    /// Why it is on HOLD, if it is.
    pub hold: Option<String>,
    /// A tombstone keeps the generation of a deleted workspace.
    pub deleted: bool,
    /// Keys up to this one that have no row any more were forgotten, whatever they did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forgotten: Option<PublicationKey>,
}

/// What a refusal tells about the present state.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Current {
    /// Owner of the present (or last) lease.
    pub owner: Option<Owner>,
    /// Session of that lease.
    pub session: Option<SessionId>,
    /// State of that lease.
    pub lease_state: Option<LeaseState>,
    /// Highest generation issued.
    pub generation: Generation,
    /// Version and head.
    pub at: HeadAt,
    /// Why it is on HOLD, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<String>,
}

/// The highest that a witness outside the authority ever saw of a workspace (I2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Seen {
    /// Generation.
    pub generation: Generation,
    /// Version.
    pub version: Version,
}

impl Seen {
    /// The higher of both, each for itself.
    pub fn max(self, other: Self) -> Self {
        Self {
            generation: self.generation.max(other.generation),
            version: self.version.max(other.version),
        }
    }

    /// Why an authority that answers `found` is not believed, if it is not.
    pub fn against(&self, found: &Self) -> Option<String> {
        let told = |what: &str, found: &dyn fmt::Display, seen: &dyn fmt::Display| {
            format!("the authority answers {what} {found}, but {seen} was seen on this host")
        };
        if found.generation < self.generation {
            return Some(told("generation", &found.generation, &self.generation));
        }
        let behind = found.version < self.version;
        behind.then(|| told("version", &found.version, &self.version))
    }
}

/// Nothing was changed, and this is why.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error)]
#[error("{}: {}{}", code.as_str(), code.meaning(), shown(current))]
pub struct Refusal {
    /// The stable reason.
    pub code: Code,
    /// The present state; absent when the workspace is unknown.
    pub current: Option<Current>,
}

fn shown(current: &Option<Current>) -> String {
    match current {
        None => String::new(),
        Some(c) => {
            let hold = c
                .hold
                .as_ref()
                .map(|why| format!(" On HOLD: {why}. `overfence workspace repair` lifts it."));
            let head = match c.at.head.0.last() {
                Some(top) => format!("{top} on {} more", c.at.head.0.len() - 1),
                None => "empty".to_owned(),
            };
            let owner = c.owner.as_ref().map_or("nobody", |o| o.as_str());
            let (generation, version) = (c.generation, c.at.version);
            format!(
                "{} Now: generation {generation}, owner {owner}, version {version}, head {head}.",
                hold.unwrap_or_default()
            )
        }
    }
}

/// Why a predecessor's lease ended, told to the next owner.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Predecessor {
    /// Who held it.
    pub owner: Owner,
    /// Its generation.
    pub generation: Generation,
    /// Its session.
    pub session: SessionId,
    /// On which host.
    pub host: HostId,
    /// How its lease stood when the new one was granted.
    pub state: LeaseState,
    /// Why it ended.
    pub why: String,
}

/// A wish for a lease.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Acquire {
    /// Which workspace.
    pub workspace: WorkspaceId,
    /// Id of the new lease.
    pub lease: LeaseId,
    /// Who asks.
    pub owner: Owner,
    /// On which host.
    pub host: HostId,
    /// For which session.
    pub session: SessionId,
    /// Whose life it will follow.
    pub holder: HolderKind,
    /// Time to live of a grant.
    #[serde(rename = "ttl_ms", with = "super::time::millis")]
    pub ttl: Duration,
    /// Longest life.
    #[serde(rename = "max_lifetime_ms", with = "super::time::millis")]
    pub max_lifetime: Duration,
    /// A live predecessor is revoked, for this reason, instead of being refused.
    pub force: Option<String>,
    /// A readmission: granted only while version and head are still these.
    pub only_at: Option<HeadAt>,
    /// What witnesses outside the authority saw: a workspace below it is put on HOLD instead.
    #[serde(default)]
    pub seen: Seen,
}

/// What an acquisition gave.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Acquired {
    /// The new lease.
    pub lease: Lease,
    /// What the session mounts and expects.
    pub at: HeadAt,
    /// Who wrote before.
    pub predecessor: Option<Predecessor>,
    /// What former writers left without a known outcome; the authority fills it in.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unresolved: Vec<Unresolved>,
}

/// A writer, as the publication predicate looks at it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Writer {
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
}

impl Writer {
    /// The one that a session is.
    pub fn of(s: &Session) -> Self {
        Self {
            workspace: s.workspace.clone(),
            lease: s.lease,
            generation: s.generation,
            session: s.id,
            expected: s.expected.clone(),
        }
    }
}

/// A wish to advance the head by one layer. The authority checks all of it in one transaction.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Publish {
    /// Which workspace.
    pub workspace: WorkspaceId,
    /// Under which lease.
    pub lease: LeaseId,
    /// With which fencing token.
    pub generation: Generation,
    /// From which session.
    pub session: SessionId,
    /// What the session last saw committed.
    pub expected: HeadAt,
    /// The same key always gets the same answer.
    pub key: PublicationKey,
    /// The session's layer; of a whole head its top, or zeros.
    pub layer: Digest,
    /// A whole head in the place of one layer more: an earlier one comes back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole: Option<Head>,
    /// Of a whole head, which version had it: for the history, and no part of any rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reverts_to: Option<Version>,
}

impl Publish {
    /// The layers that the head would name.
    pub fn layers(&self) -> impl Iterator<Item = Digest> + '_ {
        let whole = self.whole.iter().flat_map(|head| head.0.iter().copied());
        let one = self.whole.is_none().then_some(self.layer);
        whole.chain(one)
    }

    /// What `s` asks when it offers `layer` now.
    pub fn of(s: &Session, key: PublicationKey, layer: Digest) -> Self {
        Self {
            workspace: s.workspace.clone(),
            lease: s.lease,
            generation: s.generation,
            session: s.id,
            expected: s.expected.clone(),
            key,
            layer,
            whole: None,
            reverts_to: None,
        }
    }
}

/// Versions of a workspace whose layers are kept, the present one among them.
pub const KEPT: usize = 10;

/// Every reason for which [`Workspace::publish`] refuses.
pub const PUBLISH_REFUSALS: [Code; 14] = [
    Code::StaleGeneration,
    Code::LeaseExpired,
    Code::LeaseRevoked,
    Code::LeaseReleased,
    Code::LeaseMismatch,
    Code::SessionMismatch,
    Code::VersionMismatch,
    Code::HeadMismatch,
    Code::WorkspaceHeld,
    Code::UnknownWorkspace,
    Code::KeyUsed,
    Code::KeyBuried,
    Code::KeyForgotten,
    Code::LayerBuried,
];

/// The old workspace and what became of it.
pub type Ruled<T> = Result<(Workspace, T), Refusal>;

impl Workspace {
    /// A new workspace; `tombstone` is the record of a deleted one of the same name, whose
    /// generation and count of versions live on.
    pub fn new(id: WorkspaceId, owner: Owner, tombstone: Option<&Workspace>) -> Self {
        let version = tombstone.map_or(Version(0), |t| Version(t.at.version.0.saturating_add(1)));
        Self {
            id,
            owner,
            contact: String::new(),
            labels: BTreeMap::new(),
            at: HeadAt { version, ..HeadAt::default() },
            top: None,
            generation: tombstone.map_or(Generation::NONE, |t| t.generation),
            lease: None,
            hold: None,
            deleted: false,
            forgotten: tombstone.and_then(|t| t.forgotten),
        }
    }

    /// What a refusal shows.
    pub fn current(&self) -> Current {
        Current {
            owner: self.lease.as_ref().map(|l| l.owner.clone()),
            session: self.lease.as_ref().map(|l| l.session),
            lease_state: self.lease.as_ref().map(|l| l.state),
            generation: self.generation,
            at: self.at.clone(),
            hold: self.hold.clone(),
        }
    }

    /// What a witness would keep of it.
    pub fn seen(&self) -> Seen {
        Seen { generation: self.generation, version: self.at.version }
    }

    /// A refusal that shows the present state.
    pub fn refuse(&self, code: Code) -> Refusal {
        Refusal { code, current: Some(self.current()) }
    }

    fn usable(&self) -> Result<(), Refusal> {
        if self.hold.is_some() {
            return Err(self.refuse(Code::WorkspaceHeld));
        }
        if self.deleted {
            return Err(Refusal { code: Code::UnknownWorkspace, current: None });
        }
        Ok(())
    }

    /// Whether the present lease is live: its state may publish and it has not run out.
    pub fn live_lease(&self, now: &BootInstant) -> Option<&Lease> {
        self.lease.as_ref().filter(|l| l.state.may_publish() && !l.expires.passed(now))
    }

    /// Grants a lease with a new generation, or refuses.
    pub fn acquire(&self, wish: &Acquire, now: &BootInstant) -> Ruled<Acquired> {
        self.usable()?;
        // A readmitted session takes over from itself; everybody else's live lease stands in the
        // way unless it is taken by force, which a readmission never does.
        let own = |live: &Lease| wish.only_at.is_some() && live.session == wish.session;
        let forced = wish.force.is_some() && wish.only_at.is_none();
        if self.live_lease(now).is_some_and(|live| live.id == wish.lease || !(own(live) || forced))
        {
            return Err(self.refuse(Code::LeaseHeld));
        }
        if wish.only_at.as_ref().is_some_and(|at| *at != self.at) {
            return Err(self.refuse(Code::HeadMoved));
        }
        let Some(generation) = self.generation.next() else {
            return Err(self.refuse(Code::WorkspaceHeld));
        };
        let predecessor = self.lease.as_ref().map(|l| {
            let (state, why) = match (l.state.may_publish(), l.expires.passed(now), &wish.force) {
                (true, true, _) => (LeaseState::Expired, "it ran out".to_owned()),
                (true, false, force) => {
                    (LeaseState::Revoked, force.clone().unwrap_or_else(|| "taken over".to_owned()))
                }
                (false, _, _) => (l.state, l.why_ended.clone().unwrap_or_default()),
            };
            let (owner, host) = (l.owner.clone(), l.host);
            Predecessor { owner, generation: l.generation, session: l.session, host, state, why }
        });
        let lease = Lease {
            id: wish.lease,
            generation,
            owner: wish.owner.clone(),
            host: wish.host,
            session: wish.session,
            state: LeaseState::Active,
            holder: wish.holder,
            ttl: wish.ttl,
            expires: BootInstant {
                boot: now.boot,
                ns: now.ns.plus(wish.ttl.min(wish.max_lifetime)),
            },
            ends: BootInstant { boot: now.boot, ns: now.ns.plus(wish.max_lifetime) },
            why_ended: None,
        };
        let next = Self { generation, lease: Some(lease.clone()), ..self.clone() };
        let unresolved = Vec::new();
        Ok((next, Acquired { lease, at: self.at.clone(), predecessor, unresolved }))
    }

    /// Whether `lease` with `generation` is the present one and still authorises its session.
    fn authorised(
        &self,
        lease: LeaseId,
        generation: Generation,
        now: &BootInstant,
    ) -> Result<&Lease, Refusal> {
        self.usable()?;
        if generation != self.generation {
            return Err(self.refuse(Code::StaleGeneration));
        }
        let Some(present) = self.lease.as_ref().filter(|l| l.id == lease) else {
            return Err(self.refuse(Code::LeaseMismatch));
        };
        match present.state {
            LeaseState::Active | LeaseState::Releasing if present.expires.passed(now) => {
                Err(self.refuse(Code::LeaseExpired))
            }
            LeaseState::Active | LeaseState::Releasing => Ok(present),
            LeaseState::Released => Err(self.refuse(Code::LeaseReleased)),
            LeaseState::Expired => Err(self.refuse(Code::LeaseExpired)),
            LeaseState::Revoked => Err(self.refuse(Code::LeaseRevoked)),
        }
    }

    /// Extends a live lease by its TTL, never past its end. A lease that ran out is not revived:
    /// only a new acquisition with a new generation gives authority again.
    pub fn renew(&self, lease: LeaseId, generation: Generation, now: &BootInstant) -> Ruled<Lease> {
        let present = self.authorised(lease, generation, now)?;
        let ns = now.ns.plus(present.ttl).min(present.ends.ns);
        let renewed = Lease { expires: BootInstant { boot: now.boot, ns }, ..present.clone() };
        Ok((Self { lease: Some(renewed.clone()), ..self.clone() }, renewed))
    }

    /// Marks a live lease as closing; it may still publish.
    pub fn releasing(
        &self,
        lease: LeaseId,
        generation: Generation,
        now: &BootInstant,
    ) -> Ruled<()> {
        let present = self.authorised(lease, generation, now)?;
        let marked = Lease { state: LeaseState::Releasing, ..present.clone() };
        Ok((Self { lease: Some(marked), ..self.clone() }, ()))
    }

    /// Ends a lease. Ending one that ended already keeps how it ended; ending one that was
    /// superseded is refused as stale.
    pub fn end(
        &self,
        lease: LeaseId,
        generation: Generation,
        state: LeaseState,
        why: &str,
    ) -> Ruled<()> {
        if generation != self.generation {
            return Err(self.refuse(Code::StaleGeneration));
        }
        let Some(present) = self.lease.as_ref().filter(|l| l.id == lease) else {
            return Err(self.refuse(Code::LeaseMismatch));
        };
        if !present.state.may_publish() || state.may_publish() {
            return Ok((self.clone(), ()));
        }
        let ended = Lease { state, why_ended: Some(why.to_owned()), ..present.clone() };
        Ok((Self { lease: Some(ended), ..self.clone() }, ()))
    }

    /// What is known of a key that has no row.
    pub fn without_row(&self, key: PublicationKey) -> KeyState {
        match self.forgotten {
            Some(newest) if key <= newest => KeyState::Forgotten,
            Some(_) | None => KeyState::Unused,
        }
    }

    /// Whether a writer may do what lasts: all conditions of I1 but the key's.
    fn may_commit(
        &self,
        (lease, generation, session): (LeaseId, Generation, SessionId),
        expected: &HeadAt,
        now: &BootInstant,
    ) -> Result<(), Refusal> {
        let present = self.authorised(lease, generation, now)?;
        if present.session != session {
            return Err(self.refuse(Code::SessionMismatch));
        }
        if expected.version != self.at.version {
            return Err(self.refuse(Code::VersionMismatch));
        }
        if expected.head != self.at.head {
            return Err(self.refuse(Code::HeadMismatch));
        }
        Ok(())
    }

    /// What a writer that lost its lease is told when it asks all the same: what speaks against it by
    /// the predicate, or that the lease is lost where nothing here says so yet.
    pub fn refuse_writer(&self, who: &Writer, now: &BootInstant) -> Refusal {
        match self.may_commit((who.lease, who.generation, who.session), &who.expected, now) {
            Err(refusal) => refusal,
            Ok(()) => self.refuse(Code::LeaseLost),
        }
    }

    /// Whether an external request may be begun: the publication predicate, without a key.
    pub fn may_begin(&self, wish: &Begin, now: &BootInstant) -> Result<(), Refusal> {
        self.may_commit((wish.lease, wish.generation, wish.session), &wish.expected, now)
    }

    /// The publication predicate (I1): all conditions, or nothing changes.
    pub fn publish(&self, wish: &Publish, key: &KeyState, now: &BootInstant) -> Ruled<HeadAt> {
        match key {
            KeyState::Committed { layer, at }
                if *layer == wish.layer
                    && wish.whole.as_ref().is_none_or(|head| *head == at.head) =>
            {
                return Ok((self.clone(), at.clone()));
            }
            KeyState::Committed { .. } => return Err(self.refuse(Code::KeyUsed)),
            KeyState::Rejected { code } => return Err(self.refuse(*code)),
            KeyState::Buried => return Err(self.refuse(Code::KeyBuried)),
            KeyState::Forgotten => return Err(self.refuse(Code::KeyForgotten)),
            KeyState::Unused | KeyState::Prepared | KeyState::Sent | KeyState::Unknown { .. } => {}
        }
        self.may_commit((wish.lease, wish.generation, wish.session), &wish.expected, now)?;
        let (head, top) = match &wish.whole {
            Some(head) => (head.clone(), None),
            None => {
                let mut head = self.at.head.clone();
                if self.top == Some(wish.session) {
                    head.0.pop();
                }
                (head.with(wish.layer), Some(wish.session))
            }
        };
        let at = HeadAt { version: Version(self.at.version.0 + 1), head };
        Ok((Self { at: at.clone(), top, ..self.clone() }, at))
    }

    /// Puts the workspace on HOLD; nothing is granted or published until it is repaired.
    pub fn held(&self, why: &str) -> Self {
        Self { hold: Some(why.to_owned()), ..self.clone() }
    }

    /// Lifts a HOLD above `seen`: the next generation is higher than any that was seen, and what the
    /// head is now gets a version that no other head ever had. Whatever lease there was is over.
    pub fn repaired(&self, seen: &Seen) -> Self {
        let mut new =
            Self { hold: None, generation: self.generation.max(seen.generation), ..self.clone() };
        if new.at.version < seen.version {
            new.at.version = Version(seen.version.0.saturating_add(1));
            new.top = None;
        }
        if let Some(lease) = new.lease.as_mut().filter(|lease| lease.state.may_publish()) {
            lease.state = LeaseState::Revoked;
            lease.why_ended = Some("it did not outlast the HOLD of its workspace".to_owned());
        }
        new
    }
}
