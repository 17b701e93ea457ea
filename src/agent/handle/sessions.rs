//! Sessions: open, show, beat, checkpoint, close, fence, readmit.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use super::{Agent, Sign, actor, internal, of_upper, unavailable, workspace_id, workspaces};
use crate::agent::failure::{Caller, Failure};
use crate::agent::host::Host;
use crate::agent::keep;
use crate::agent::open::{Wish, hash_token};
use crate::agent::slot::{Applied, Inner, LeaseClock, Slot, draft, take_journal};
use crate::agent::{view, witness};
use crate::kernel::clock;
use crate::kernel::walk::Dir;
use crate::model::code::Code;
use crate::model::facts::Fact;
use crate::model::ids::{LeaseId, PublicationKey, SessionId};
use crate::model::journal::Journal;
use crate::model::lease::HolderKind;
use crate::model::session::{CloseMode, Disposition, FenceWish, Loss, Session, State, Work};
use crate::model::step::{Event, GIVEN_UP, Published};
use crate::model::view::{
    BeatAnswer, CheckpointSession, Checkpointed, CloseSession, FenceSession, Fenced, OpenSession,
    Opened, ReadmitSession, SessionView,
};
use crate::model::workspace::{Acquire, Acquired, Refusal};
use crate::progress::{Counted, What};
use crate::store::Durability;
use crate::upper::changes::{self, Format};
use crate::upper::layer::{self, Source};
use crate::workload::{self, Place};

/// Captures and removals of large uppers take their time.
const LONG: Duration = Duration::from_secs(3600);

impl Agent {
    /// Opens a session; creates the workspace first if that is wished and it is missing.
    pub async fn open(&self, by: &Caller, wish: OpenSession) -> Result<Opened, Failure> {
        let by = by.clone();
        let made = self
            .blocking(move |host| {
                host.refuse_when_short()?;
                if let Some(create) = wish.create.clone() {
                    match workspaces::create(host, &by, create) {
                        Err(f) if f.code != Code::WorkspaceExists => return Err(f),
                        Ok(_) | Err(_) => {}
                    }
                }
                let wish = Wish::check(host, &by, wish)?;
                host.open(&by, wish)
            })
            .await?;
        let session = self.session_view(&made.slot);
        Ok(Opened {
            session,
            token: made.token,
            ticket: made.ticket,
            predecessor: made.predecessor,
            unresolved: made.unresolved,
        })
    }

    /// All sessions that are not closed.
    pub async fn sessions(&self) -> Result<Vec<SessionView>, Failure> {
        let open = self.0.slots().into_iter().filter(|slot| slot.session().state != State::Closed);
        Ok(open.map(|slot| self.session_view(&slot)).collect())
    }

    /// One session.
    pub async fn session(&self, id: SessionId) -> Result<SessionView, Failure> {
        let slot = self.slot(id)?;
        // What is shown is what the last try found; the next one looks anew.
        slot.lock().named.ask();
        Ok(self.session_view(&slot))
    }

    /// Everything the client needs to place a command; refused when no new work may start.
    pub async fn permit(&self, by: &Caller, id: SessionId) -> Result<Place, Failure> {
        let slot = self.slot(id)?;
        let s = slot.session();
        s.may_start_work().map_err(|code| denied(&s, code))?;
        if let Some(slice) = &s.external {
            let why = format!("session {id} is external: what runs in {slice} its engine starts");
            return Err(Failure::new(Code::WrongState, why));
        }
        let entry =
            draft("exec", &s, &actor(by), serde_json::json!({ "pid": by.pid, "run_as": s.run_as }));
        let journal = Journal { sessions: vec![], entries: vec![entry] };
        self.blocking(move |host| {
            host.store.record(&journal, Durability::Lazy).map_err(unavailable)
        })
        .await?;
        let paths = &self.0.paths;
        Ok(Place {
            session: id,
            workspace: s.workspace.clone(),
            generation: s.generation,
            cgroup: paths.cgroup(&s),
            merged: slot.dirs.merged.clone(),
            run_dir: paths.inside_of(id),
            record: paths.init_of(id),
            cell: Some(paths.cell.clone()),
            state_dir: paths.state.clone(),
            user: workload::User { uid: s.run_as.uid, gid: s.run_as.gid, groups: vec![] },
            mapped: s.run_as.mapped,
            network: if s.run_as.host_network {
                workload::Network::Host
            } else {
                workload::Network::Own
            },
            holder: match s.holder {
                HolderKind::Process => workload::Holder::Process,
                HolderKind::Beat => workload::Holder::Beat,
            },
            ttl: s.ttl,
            binary: std::env::current_exe().unwrap_or_default(),
        })
    }

    /// A sign of life.
    pub async fn beat(&self, id: SessionId, sign: Sign) -> Result<BeatAnswer, Failure> {
        let slot = self.slot(id)?;
        // Not by a copy of the record: a thousand sessions beat a hundred times a second.
        let (holder, known) = {
            let inner = slot.lock();
            (inner.session.holder, inner.session.token)
        };
        match (sign, holder) {
            (Sign::Token(token), HolderKind::Beat) => {
                // Digests of equal length are compared; what their timing tells is of a hash.
                if hash_token(&token) != known {
                    return Err(Code::BadToken.into());
                }
            }
            (Sign::Socket, HolderKind::Beat) => {}
            (Sign::Token(_) | Sign::Socket, HolderKind::Process) => {
                return Err(Failure::new(
                    Code::Denied,
                    "this lease follows its session's command: only the session's init speaks for it",
                ));
            }
        }
        self.0.sign(&slot).map_err(|code| denied(&slot.session(), code))?;
        let inner = slot.lock();
        Ok(BeatAnswer {
            state: if inner.session.doubt.is_some() { "doubt" } else { "active" }.to_owned(),
            generation: inner.session.generation.0,
            remaining_ms: i64::try_from(inner.deadline().0.since(clock::now()).as_millis())
                .unwrap_or(i64::MAX),
        })
    }

    /// Captures the upper and publishes it. A session that lost its lease is offered to the
    /// authority all the same: the refusal is the authority's and goes into its history.
    pub async fn checkpoint(
        &self,
        by: &Caller,
        id: SessionId,
        wish: CheckpointSession,
    ) -> Result<Checkpointed, Failure> {
        let slot = self.slot(id)?;
        let key = PublicationKey::fresh();
        let s = slot.session();
        if matches!(s.state, State::Fencing | State::Fenced | State::Preserved) {
            return Err(self.refused_by_authority(by, s).await);
        }
        let live = wish.live;
        if !live && s.may_start_work().is_ok() && s.work.is_none() {
            let asked = Arc::clone(&slot);
            self.blocking(move |host| {
                host.write_out(&asked);
                Ok(())
            })
            .await?;
        }
        taken(&slot, self.0.apply(&slot, Event::CheckpointAsked { key, live }, &actor(by)))?;
        let done = |inner: &Inner| !under_way(&inner.session, key);
        let (s, ok) = slot.wait_for(LONG, done).await;
        if !ok {
            return Err(Failure::new(
                Code::TimedOut,
                "the checkpoint goes on; `session inspect` shows it",
            ));
        }
        let (answer, frozen_for, code) = {
            let mut inner = slot.lock();
            let frozen_for = if live { Duration::ZERO } else { inner.frozen_for };
            (inner.answers.remove(&key), frozen_for, inner.capture_code)
        };
        let outcome = match answer {
            Some(Published::Committed { .. }) => "committed",
            Some(Published::Refused { refusal }) => return Err(refusal.into()),
            Some(Published::Unknown { why }) => return Err(unknown(key, &why)),
            None if !s.holds_lease() => return Err(denied(&s, Code::LeaseLost)),
            None => match s.trouble {
                Some(why) if why.starts_with(GIVEN_UP) => {
                    return Err(Failure::new(Code::Busy, format!("{why}; ask again")));
                }
                Some(why) => return Err(Failure::new(code.unwrap_or(Code::Internal), why)),
                None => "unchanged",
            },
        };
        Ok(Checkpointed {
            outcome: outcome.to_owned(),
            key: key.to_string(),
            layer: s.own_layer,
            at: s.expected,
            frozen_ms: u64::try_from(frozen_for.as_millis()).unwrap_or(u64::MAX),
        })
    }

    async fn refused_by_authority(&self, by: &Caller, s: Session) -> Failure {
        let who = actor(by);
        let asked = self.blocking(move |host| {
            let refusal = host.refuse_writer(&s, "publish", &who, serde_json::json!({}))?;
            host.metrics.refused(refusal.code);
            Ok(stale(&s, refusal))
        });
        asked.await.unwrap_or_else(|failure| failure)
    }

    /// Ends a session by its owner's wish.
    pub async fn close(
        &self,
        by: &Caller,
        id: SessionId,
        wish: CloseSession,
    ) -> Result<SessionView, Failure> {
        let slot = self.slot(id)?;
        let s = slot.session();
        if matches!(s.state, State::Fencing | State::Fenced | State::Preserved) {
            return Err(match wish.mode {
                Some(CloseMode::Checkpoint) => self.refused_by_authority(by, s).await,
                Some(CloseMode::Keep | CloseMode::Discard) | None => denied(&s, Code::LeaseLost),
            });
        }
        let mode = match wish.mode {
            Some(mode) => mode,
            None => {
                let asked = Arc::clone(&slot);
                if !self.blocking(move |host| host.is_as_published(&asked)).await? {
                    return Err(denied(&slot.session(), Code::UncommittedBytes));
                }
                // Should something be written before the session's end, it is published, not lost.
                CloseMode::Checkpoint
            }
        };
        let key = PublicationKey::fresh();
        taken(&slot, self.0.apply(&slot, Event::CloseAsked { mode, key }, &actor(by)))?;
        let over = |inner: &Inner| {
            matches!(
                inner.session.state,
                State::Closed | State::Preserved | State::Fenced | State::Quarantined
            ) || inner.session.state == State::Deleting && inner.session.trouble.is_some()
        };
        let (s, ok) = slot.wait_for(LONG, over).await;
        if !ok {
            return Err(Failure::new(
                Code::TimedOut,
                "the close goes on; `session inspect` shows it",
            ));
        }
        let (answer, code) = {
            let mut inner = slot.lock();
            (inner.answers.remove(&key), inner.capture_code)
        };
        if s.state != State::Closed && mode != CloseMode::Keep {
            return Err(match answer {
                Some(Published::Refused { refusal }) => refusal.into(),
                Some(Published::Unknown { why }) => unknown(key, &why),
                Some(Published::Committed { .. }) | None => Failure::new(
                    code.filter(|code| *code != Code::Internal).unwrap_or(Code::Partial),
                    format!(
                        "session {id} is {}: {}",
                        s.state,
                        s.trouble.or(s.loss.map(|l| l.to_string())).unwrap_or_default()
                    ),
                ),
            });
        }
        Ok(self.session_view(&slot))
    }

    /// Stops a session by an operator's wish: freezes first, then revokes.
    pub async fn fence(
        &self,
        by: &Caller,
        id: SessionId,
        wish: FenceSession,
    ) -> Result<Fenced, Failure> {
        let slot = self.slot(id)?;
        let to = wish.to.unwrap_or(Fact::ReadOnly);
        if !to.is_aim() {
            return Err(Failure::new(
                Code::BadRequest,
                "a fence goes to frozen, read-only, sealed or killed; `upper-frozen` comes by itself where the upper is an image and read-only is refused; what is gone is removed by `preserved discard`",
            ));
        }
        let reason =
            if wish.reason.is_empty() { "no reason given".to_owned() } else { wish.reason };
        let event = Event::FenceAsked {
            wish: FenceWish { to, on_busy: wish.on_busy },
            by: actor(by),
            reason,
            now: clock::now(),
        };
        slot.lock().named.ask();
        taken(&slot, self.0.apply(&slot, event, &actor(by)))?;
        let wait = wish.wait_ms.map_or(Duration::ZERO, Duration::from_millis).min(LONG);
        slot.wait_for(wait, |inner| {
            let s = &inner.session;
            // Busy is an answer once it was tried after this was asked, and not only before. A kill comes
            // after the first refusal, and read-only is tried once more after it.
            let tried = to <= Fact::ReadOnly || s.facts.has(Fact::Killed);
            let busy = s.busy_since.is_some() && tried && inner.is_idle();
            // Read-only goes on being tried beside a seal that was asked for.
            let sealed = to == Fact::Sealed && s.facts.has(Fact::Sealed);
            !s.holds_lease() && (sealed || view::missing(s).is_none()) || busy
        })
        .await;
        Ok(self.fenced(&slot))
    }

    /// [`Agent::fence`] for the session that writes a workspace.
    pub async fn fence_workspace(
        &self,
        by: &Caller,
        workspace: &str,
        wish: FenceSession,
    ) -> Result<Fenced, Failure> {
        let id = workspace_id(workspace)?;
        let mut all = self.0.slots_of(&id).into_iter();
        let writer = all.find(|slot| slot.lock().session.holds_lease());
        match writer {
            Some(slot) => self.fence(by, slot.id, wish).await,
            None => Err(Failure::new(
                Code::UnknownSession,
                format!("nobody writes workspace {id} on this host"),
            )),
        }
    }

    pub(super) fn fenced(&self, slot: &Slot) -> Fenced {
        let session = self.session_view(slot);
        let effective = slot.session().is_stopped();
        Fenced { result: if effective { "effective" } else { "pending" }.to_owned(), session }
    }

    /// Gives a fenced session a new lease and generation and lets it run on.
    pub async fn readmit(
        &self,
        by: &Caller,
        id: SessionId,
        wish: ReadmitSession,
    ) -> Result<SessionView, Failure> {
        super::seed::authorised(&wish.authorised_by, &wish.reason, "a readmission")?;
        let slot = self.slot(id)?;
        if slot.lock().session.is_past_running() {
            return self.readmit_anew(by, &slot, wish).await;
        }
        let (asked, who) = (Arc::clone(&slot), actor(by));
        self.blocking(move |host| {
            // Who takes the responsibility finds it in the evidence.
            keep::upper(host, &asked);
            host.readmit_now(&asked, &who, &wish.authorised_by, &wish.reason)
        })
        .await?;
        let settled = |inner: &Inner| inner.session.work != Some(Work::Resume);
        // A seal that has to come off takes its time.
        let (s, ok) = slot.wait_for(LONG, settled).await;
        match (ok, s.state) {
            (false, _) => Err(Failure::new(
                Code::TimedOut,
                "the readmission goes on; `session inspect` shows it",
            )),
            (true, State::Active) => Ok(self.session_view(&slot)),
            (true, _) => Err(Failure::new(
                Code::Partial,
                format!("session {id} is {}: {}", s.state, s.trouble.unwrap_or_default()),
            )),
        }
    }
}

impl Host {
    /// Whether a session that may be running left nothing in its upper that is not committed. Its
    /// bytes are compared, by a layer's name: a checkpoint's traces tell nothing of what came after it.
    fn is_as_published(&self, slot: &Slot) -> Result<bool, Failure> {
        let own = slot.session().own_layer;
        let upper = Dir::open(&slot.dirs.upper).map_err(internal)?;
        if own.is_none() {
            return changes::is_empty(upper.as_fd()).map_err(internal);
        }
        let source = Source::Upper(upper.as_fd(), Format::Trusted);
        let read = self.showing(slot, What::Compare, slot.measured(), |progress| {
            layer::diff_id(source, None, &Counted { stop: || self.stopping(), progress })
        });
        match read {
            Ok(now) => Ok(Some(now) == own),
            Err(crate::upper::Error::Changed { .. }) => Ok(false),
            Err(fault) => Err(of_upper(fault)),
        }
    }

    /// The acquisition of a readmission and the session's new record, in one transaction.
    pub fn readmit_now(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        actor: &str,
        by: &str,
        reason: &str,
    ) -> Result<(), Failure> {
        self.not_draining()?;
        let mut inner = slot.lock();
        let before = inner.session.clone();
        before.readmittable().map_err(|code| denied(&before, code))?;
        let ask = Acquire {
            workspace: before.workspace.clone(),
            lease: LeaseId::fresh(),
            owner: before.owner.clone(),
            host: self.id,
            session: before.id,
            holder: before.holder,
            ttl: before.ttl,
            max_lifetime: self.config.lease.max_lifetime,
            force: None,
            only_at: Some(before.expected.clone()),
            seen: self.store.marks().highest(&before.workspace),
        };
        let sent = clock::now();
        let undo = inner.checkpoint();
        let granted = {
            let inner = &mut *inner;
            let rider = |outcome: &Result<Acquired, Refusal>| {
                let Ok(acquired) = outcome else { return Journal::default() };
                let event = Event::Readmitted {
                    lease: acquired.lease.id,
                    generation: acquired.lease.generation,
                    ends: acquired.lease.ends.ns,
                    authorised_by: by.to_owned(),
                    reason: reason.to_owned(),
                };
                self.apply_locked(inner, event, actor);
                take_journal(inner).unwrap_or_default()
            };
            self.authority.acquire(&ask, Box::new(rider))
        };
        match granted {
            Ok(Ok(_)) => {}
            Ok(Err(refusal)) => {
                self.held_by_acquisition(&ask, &refusal);
                return Err(refusal.into());
            }
            Err(fault) => {
                // What the rider stepped was not committed.
                inner.undo(undo);
                self.settle(&inner.session);
                return Err(unavailable(fault));
            }
        };
        inner.lease = LeaseClock::granted(sent, inner.session.ttl, inner.session.ends);
        // It has its lease: what fails from here on gives that back, and nobody runs on.
        if let Err(failure) = self.begin_again(slot, &inner) {
            let loss = Loss::ReadmitFailed { reason: failure.message.clone() };
            self.apply_locked(&mut inner, Event::LeaseLost { loss, revoke: true }, "agent");
            self.wake_worker(slot, &mut inner);
            return Err(failure);
        }
        self.refresh_deadline(&inner);
        self.wake_worker(slot, &mut inner);
        Ok(())
    }

    /// What a readmitted session needs before it may run.
    fn begin_again(&self, slot: &Slot, inner: &Inner) -> Result<(), Failure> {
        let s = &inner.session;
        self.store.raise_mark(&s.workspace, s.seen()).map_err(unavailable)?;
        witness::note(&slot.dirs.root, s).map_err(internal)?;
        self.issue_ticket(inner).map_err(|e| Failure::new(Code::Internal, e))?;
        Ok(())
    }
}

fn under_way(s: &Session, key: PublicationKey) -> bool {
    matches!(&s.work, Some(Work::Checkpoint { key: k, .. }) if *k == key)
}

fn taken(slot: &Slot, applied: Applied) -> Result<(), Failure> {
    match applied {
        Applied::Taken => Ok(()),
        Applied::Refused(code) => Err(denied(&slot.session(), code)),
    }
}

fn unknown(key: PublicationKey, why: &str) -> Failure {
    let text = format!(
        "publication {key} has no known outcome yet: {why}; it is asked for again, \
         `overfence publication show {key}` tells how it stands"
    );
    Failure::new(Code::UnknownPublication, text)
}

/// What becomes of the bytes of a session that lost its lease is for a person to say.
const STALE: &str = " `overfence preserved export` saves its bytes, `preserved discard` gives them \
    up, `readmit` lets a frozen one run on.";

/// The authority's refusal of a session that lost its lease.
pub(super) fn stale(s: &Session, refusal: Refusal) -> Failure {
    let message = format!("session {} is {}: {refusal}{STALE}", s.id, s.state);
    Failure { message, ..refusal.into() }
}

/// A refusal by the session's own state, with what is known of it.
pub(in crate::agent) fn denied(s: &Session, code: Code) -> Failure {
    let why = match (&s.loss, &s.doubt) {
        (Some(loss), _) => format!(" {loss}."),
        (None, Some(doubt)) => format!(" {doubt}."),
        (None, None) => String::new(),
    };
    let next = match code {
        Code::LeaseLost => STALE,
        Code::Doubt => " Wait for the authority, or for the deadline.",
        _ => "",
    };
    let kept = matches!(s.disposition, Some(Disposition::Clean))
        .then_some(" Nothing uncommitted is left.")
        .unwrap_or_default();
    Failure::new(
        code,
        format!("session {} is {}: {}{why}{kept}{next}", s.id, s.state, code.meaning()),
    )
}
