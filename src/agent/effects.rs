//! Doing what a step asked for. Each effect is idempotent, asks the kernel or the authority, and
//! gives back what was answered as events; none decides anything.

use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;

use super::host::{Host, SessionSocket};
use super::keep;
use super::slot::{Slot, draft};
use crate::failpoint;
use crate::kernel::cgroup::{Cgroup, Outcome};
use crate::kernel::clock;
use crate::kernel::overlay::{self, ReadOnly, Unmount};
use crate::kernel::walk::Dir;
use crate::model::code::Code;
use crate::model::facts::{Fact, Holder, Proof};
use crate::model::head::Digest;
use crate::model::ids::PublicationKey;
use crate::model::journal::Journal;
use crate::model::lease::LeaseState;
use crate::model::session::{Disposition, Loss, Session, State};
use crate::model::step::{Effect, Event, Published, Purpose};
use crate::model::workspace::{KeyState, Publish, Refusal, Seen};
use crate::progress::{Amount, Counted, What};
use crate::upper::changes::{self, Format};
use crate::upper::layer::{self, Captured, Source, Writers};
use crate::upper::remove::{self, ProvedGone};
use crate::upper::store::LayerStore;

/// io_uring and unix-socket teardown lag behind `populated 0`; read-only and umount are retried
/// for this long after a kill.
pub const TEARDOWN: Duration = Duration::from_secs(5);
/// How long a closing session's processes have between TERM and KILL.
const STOP: Duration = Duration::from_secs(2);
pub(super) const THAW: Duration = Duration::from_millis(500);
const KILL: Duration = Duration::from_secs(5);
pub const AGAIN: Duration = Duration::from_millis(10);

pub(super) type Answered = Result<Vec<Event>, String>;

/// One try of an effect.
#[derive(Debug, Default)]
pub struct Try {
    /// For one that syncs: its turn, given back as soon as the kernel answered.
    pub turn: Option<OwnedSemaphorePermit>,
    /// There is no other after it.
    pub last: bool,
}

/// Whether an effect syncs the whole file system that an upper lies in, which takes as long as
/// everything on it: one at a time, and never on a path that freezes, renews or answers.
pub fn syncs(effect: &Effect) -> bool {
    matches!(effect, Effect::ReadOnly | Effect::ProveGone | Effect::Seal | Effect::FreezeUpper)
}

/// Whether no event from it says that it is worth another try. One of a seal says that nobody wants
/// it any more.
pub fn tried_again(effect: &Effect) -> bool {
    matches!(effect, Effect::ReadOnly | Effect::ProveGone)
}

/// An effect that was not begun: it is tried again.
fn undone(effect: &Effect, why: String) -> Event {
    match effect {
        // Nothing was sent; resolving the key says so for good.
        Effect::Publish { key, .. } => {
            Event::Published { key: *key, outcome: Published::Unknown { why } }
        }
        _ => Event::Failed { what: effect.name().to_owned(), why },
    }
}

impl Host {
    /// Performs one effect. A failure is an event like every other answer.
    pub fn perform(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        s: &Session,
        effect: &Effect,
        tried: Try,
    ) -> Vec<Event> {
        if self.breaker_stops(effect, s) {
            return vec![Event::Held { what: effect.name().to_owned() }];
        }
        if matches!(effect, Effect::Kill | Effect::Remove | Effect::Publish { .. })
            && let Err(fault) = self.store.anchor()
        {
            return vec![undone(
                effect,
                format!("the evidence could not be anchored: {}", text(fault)),
            )];
        }
        let begun = clock::now();
        let answer = match failpoint::fails(&format!("effect.{}.before", effect.name())) {
            Err(errno) => match undone(effect, text(errno)) {
                Event::Failed { why, .. } => Err(why),
                event => Ok(vec![event]),
            },
            Ok(()) => self.done(slot, s, effect, tried),
        };
        failpoint::hit(&format!("effect.{}.after", effect.name()));
        self.metrics.effect(effect.name(), answer.is_ok(), clock::now().since(begun));
        answer.unwrap_or_else(|why| {
            tracing::warn!(OVERFENCE_SESSION = %s.id, OVERFENCE_WORKSPACE = %s.workspace, "{}: {why}", effect.name());
            vec![Event::Failed { what: effect.name().to_owned(), why }]
        })
    }

    fn done(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        s: &Session,
        effect: &Effect,
        tried: Try,
    ) -> Answered {
        match effect {
            Effect::Freeze { .. } => self.freeze(slot, s),
            Effect::Thaw => self.thaw(slot),
            Effect::RunOn => self.run_on(slot),
            Effect::ReadOnly => self.read_only(slot, s, tried),
            Effect::ReadWrite => self.read_write(slot),
            Effect::Seal => self.seal(slot, s, tried),
            Effect::Unseal => self.unseal(slot),
            Effect::FreezeUpper => self.freeze_upper(slot),
            Effect::ThawUpper => self.thaw_upper(slot),
            Effect::Kill => self.kill(slot, s),
            Effect::Revoke { reason } => self.revoke(s, reason),
            Effect::Capture { key } => self.capture(slot, s, *key),
            Effect::Pack { key, live: false } => self.pack(slot, *key),
            Effect::Pack { key, live: true } => self.capture_live(slot, s, *key),
            Effect::Publish { key, layer } => self.publish(s, *key, *layer),
            Effect::Resolve { key, .. } => self.resolve(slot, s, *key),
            Effect::Releasing => self.releasing(s),
            Effect::Release => self.release(s),
            Effect::ProveGone => self.prove_gone(slot, tried),
            Effect::Remove => self.remove(slot, s),
            Effect::Show => self.show(slot).map(|()| vec![]),
        }
    }

    /// The cgroup; made again if somebody removed it.
    pub(super) fn cgroup(&self, slot: &Slot) -> Result<Arc<Cgroup>, String> {
        let mut inner = slot.lock();
        if let Some(cgroup) = &inner.cgroup {
            return Ok(Arc::clone(cgroup));
        }
        let path = self.paths.cgroup(&inner.session);
        let cgroup = match Cgroup::open(&path).map_err(text)? {
            Some(cgroup) => cgroup,
            None => self.make_cgroup(&inner.session).map_err(text)?,
        };
        self.watch_cgroup(slot.id, &cgroup);
        let cgroup = Arc::new(cgroup);
        inner.cgroup = Some(Arc::clone(&cgroup));
        Ok(cgroup)
    }

    /// A freeze that `apply` could not prove at once.
    fn freeze(self: &Arc<Self>, slot: &Arc<Slot>, s: &Session) -> Answered {
        let cgroup = self.cgroup(slot)?;
        let begun = clock::now();
        let blockers = keep::left_outside(self, slot);
        let answer = cgroup.freeze(s.policy.freeze_deadline).map_err(|fault| {
            // Somebody removed it: the next try makes it again.
            slot.lock().cgroup = None;
            text(fault)
        })?;
        if !slot.lock().kept.together() {
            // Who is outside holds it up; the next try follows at once.
            clock::sleep_until(begun.plus(s.policy.freeze_deadline));
            return Ok(vec![Event::FreezeLate { blockers }]);
        }
        Ok(vec![match answer {
            Outcome::Proved(proof) => Event::Frozen { proof },
            Outcome::Late(blockers) => Event::FreezeLate { blockers },
        }])
    }

    /// The keeper's entry first, then the thaw, then stamp and deadline are read again. Under the
    /// slot's lock: a lease that is lost meanwhile freezes after this and not before it.
    fn thaw(&self, slot: &Arc<Slot>) -> Answered {
        let cgroup = self.cgroup(slot)?;
        let mut inner = slot.lock();
        if !inner.session.holds_lease() {
            return Ok(vec![]);
        }
        // Its holder could not speak until now.
        self.vouch(&mut inner, clock::now());
        let state = cgroup.state().map_err(text)?;
        if !state.freeze {
            let (asked, answer) = ("cgroup.freeze".to_owned(), state.to_string());
            let proof = Proof { asked, answer, at: clock::now(), took_us: 0 };
            return Ok(vec![Event::Thawed { proof }]);
        }
        let Some(stamp) = cgroup.read_stamp().map_err(text)? else {
            return Err("it is frozen by somebody else, who has to thaw it".to_owned());
        };
        let (deadline, _) = inner.deadline();
        self.enter_deadline(&inner.session, deadline)?;
        let generation = inner.session.generation;
        let own_checkpoint = stamp.generation == generation && stamp.purpose == Purpose::Checkpoint;
        if clock::now() >= deadline || !(own_checkpoint || stamp.generation < generation) {
            return Err(format!("the freeze is stamped `{stamp}`, which this lease does not lift"));
        }
        let answer = cgroup.thaw(THAW).map_err(text)?;
        let again = cgroup.read_stamp().map_err(text)?;
        if clock::now() >= deadline || again != Some(stamp) {
            cgroup.write_freeze(true).map_err(text)?;
            return Err("stamp or deadline spoke against it; frozen again".to_owned());
        }
        cgroup.clear_stamp().map_err(text)?;
        match answer {
            Outcome::Proved(proof) => Ok(vec![Event::Thawed { proof }]),
            Outcome::Late(_) => {
                Err("the kernel did not confirm it: is an ancestor frozen?".to_owned())
            }
        }
    }

    fn read_only(&self, slot: &Slot, s: &Session, tried: Try) -> Answered {
        let Some(mounted) = slot.lock().mounted.clone() else {
            return Err("the overlay is not mounted here".to_owned());
        };
        let answer = overlay::remount_ro(&mounted.root).map_err(text)?;
        drop(tried.turn);
        match answer {
            ReadOnly::Granted(proof) => {
                slot.lock().named.forget();
                let holders = keep::rivals_of(slot);
                if !holders.is_empty() {
                    let answer = format!("{}, but that is not its only overlay", proof.answer);
                    return Ok(vec![Event::Busy { proof: Proof { answer, ..proof }, holders }]);
                }
                let upper = Dir::open(&slot.dirs.upper).map_err(text)?;
                let empty = changes::is_empty(upper.as_fd()).map_err(text)?;
                Ok(vec![Event::ReadOnly { proof, empty }])
            }
            // An answer, not a hiccup: another try would get the same.
            ReadOnly::Refused(proof) => {
                let holders = vec![Holder::stopped_file_system()];
                Ok(vec![Event::Busy { proof, holders }])
            }
            ReadOnly::Busy(_) if s.facts.has(Fact::Killed) && !tried.last => Ok(vec![]),
            ReadOnly::Busy(proof) => {
                let holders = self.holders(slot, mounted.s_dev)?;
                Ok(vec![Event::Busy { proof, holders }])
            }
        }
    }

    fn read_write(&self, slot: &Slot) -> Answered {
        let Some(mounted) = slot.lock().mounted.clone() else {
            return Err("the overlay is not mounted here".to_owned());
        };
        let proof = overlay::remount_rw(&mounted.root).map_err(text)?;
        // While it was read-only it could not be entered.
        if slot.lock().gate.is_none() {
            self.gate_adopt(slot, &mounted.root);
        }
        Ok(vec![Event::Writable { proof }])
    }

    /// A closing session is asked to end first; everybody else is killed at once.
    fn kill(self: &Arc<Self>, slot: &Arc<Slot>, s: &Session) -> Answered {
        let cgroup = self.cgroup(slot)?;
        // A kill meets only who is in there.
        keep::gather(self, slot);
        if s.state == State::Releasing {
            self.ask_to_end(slot, &cgroup);
        }
        match cgroup.kill(KILL).map_err(text)? {
            Outcome::Proved(_) if !keep::gather(self, slot) => {
                Err("killed, but processes of it were outside of its cgroup".to_owned())
            }
            Outcome::Proved(proof) => Ok(vec![Event::Killed { proof }]),
            Outcome::Late(blockers) => Err(format!(
                "killed but not gone: {}",
                blockers
                    .iter()
                    .map(|b| format!("pid {} ({}) {}", b.pid, b.command, b.state))
                    .collect::<Vec<_>>()
                    .join(", ")
            )),
        }
    }

    fn ask_to_end(&self, slot: &Slot, cgroup: &Cgroup) {
        if !super::show::ask_to_end(&self.paths.init_of(slot.id), cgroup.path()) {
            return;
        }
        let until = clock::now().plus(STOP);
        while clock::now() < until && cgroup.state().is_ok_and(|state| state.populated) {
            std::thread::sleep(AGAIN);
        }
    }

    fn revoke(&self, s: &Session, reason: &str) -> Answered {
        let state = match s.loss {
            Some(Loss::Expired { .. } | Loss::Doubt { .. } | Loss::Reboot) => LeaseState::Expired,
            Some(
                Loss::Revoked { .. }
                | Loss::Superseded { .. }
                | Loss::Operator { .. }
                | Loss::Closed { .. }
                | Loss::ReadmitFailed { .. },
            )
            | None => LeaseState::Revoked,
        };
        // A refusal says that it is over already.
        let _ = self.end_lease(s, state, reason)?;
        Ok(vec![])
    }

    fn end_lease(
        &self,
        s: &Session,
        state: LeaseState,
        why: &str,
    ) -> Result<Result<(), Refusal>, String> {
        let rider = |outcome: &Result<(), Refusal>| {
            let detail = serde_json::json!({ "lease": s.lease, "state": state, "why": why, "answer": outcome.as_ref().err().map(|r| r.code) });
            Journal { sessions: vec![], entries: vec![draft("lease_ended", s, "agent", detail)] }
        };
        self.authority
            .end(&s.workspace, s.lease, s.generation, state, why, Box::new(rider))
            .map_err(text)
    }

    /// For others to see; the close goes on whatever is answered.
    fn releasing(&self, s: &Session) -> Answered {
        match self.authority.releasing(&s.workspace, s.lease, s.generation) {
            Ok(Ok(())) => {}
            Ok(Err(refusal)) => tracing::info!(OVERFENCE_SESSION = %s.id, "{refusal}"),
            Err(fault) => tracing::warn!(OVERFENCE_SESSION = %s.id, "{}", text(fault)),
        }
        Ok(vec![])
    }

    fn release(&self, s: &Session) -> Answered {
        match self.end_lease(s, LeaseState::Released, "closed by its owner")? {
            Ok(()) => Ok(vec![Event::Released]),
            // Another lease took its place: it is given back all the more.
            Err(refusal) => {
                tracing::info!(OVERFENCE_SESSION = %s.id, OVERFENCE_WORKSPACE = %s.workspace, "the lease was over already: {refusal}");
                Ok(vec![Event::Released])
            }
        }
    }

    /// What holds of the stop is asked again once the upper was read: a capture of a session that
    /// somebody let run meanwhile is worth nothing.
    fn capture(&self, slot: &Slot, s: &Session, key: PublicationKey) -> Answered {
        // An upper that became empty again after a publication is a layer too: the empty one.
        let own = s.own_layer.is_some();
        // A capture takes long where there is much; a session that is lost meanwhile needs none.
        let stop = || self.stopping() || slot.lock().session.state != s.state;
        if let Some(why) = self.damage(slot)? {
            slot.lock().capture_code = Some(Code::UpperRefused);
            return Ok(vec![Event::CaptureRefused { key, why }]);
        }
        let taken = self.showing(slot, What::Capture, slot.measured(), |progress| {
            let stop = Counted { stop, progress };
            let taken = match self.gather(slot, s, key, own, &stop) {
                Ok(true) => Ok(Event::Gathered { key }),
                Ok(false) => capture_upper(&self.layers, &slot.dirs.upper, own, &stop)
                    .map(|captured| Event::Captured { key, layer: captured.map(|c| c.diff_id) }),
                Err(fault) => Err(fault),
            };
            if taken.is_ok() {
                slot.lock().captured = Some(progress.done());
            }
            taken
        });
        slot.lock().capture_code = taken.as_ref().err().map(crate::upper::Error::code);
        let taken = match taken {
            Ok(taken) => taken,
            // What stopped it has its own effects; nobody waits for this one.
            Err(crate::upper::Error::Stopped) => return Ok(vec![]),
            // Stopped writers do not mend it: another try would find the same.
            Err(e) if e.code() == Code::UpperRefused => {
                return Ok(vec![Event::CaptureRefused { key, why: text(e) }]);
            }
            Err(e) => return Err(text(e)),
        };
        let layer = match &taken {
            Event::Captured { layer, .. } => *layer,
            _ => None,
        };
        self.judged(slot, s, taken).inspect_err(|_| self.layers.settle(layer))
    }

    /// What was read of an upper, and what speaks against it.
    fn judged(&self, slot: &Slot, s: &Session, captured: Event) -> Answered {
        let (cgroup, mounted) = {
            let inner = slot.lock();
            (inner.cgroup.clone(), inner.mounted.clone())
        };
        let spoilt = match (s.state, cgroup, mounted) {
            (State::Active, Some(cgroup), _) => {
                let seen = cgroup.state().map_err(text)?;
                (!seen.is_frozen()).then(|| Event::ForeignThaw { seen: seen.to_string() })
            }
            (State::Releasing, _, Some(mounted)) => {
                let writable = !overlay::is_read_only(&mounted.root).map_err(text)?;
                let seen = "the write probe was granted".to_owned();
                writable.then_some(Event::ReadOnlyLost { seen })
            }
            (_, _, _) => None,
        };
        Ok(spoilt.into_iter().chain([captured]).collect())
    }

    fn publish(&self, s: &Session, key: PublicationKey, layer: Digest) -> Answered {
        let outcome = match self.offer(s, &Publish::of(s, key, layer)) {
            Ok(Ok(at)) => Published::Committed { at },
            Ok(Err(refusal)) => Published::Refused { refusal },
            Err(why) => {
                // For others to see; the session's own record keeps it in any case.
                failpoint::hit("authority.doubt.before");
                let told = self.authority.doubt(&s.workspace, key, &why);
                failpoint::hit("authority.doubt.after");
                if let Err(fault) = told {
                    tracing::warn!(OVERFENCE_SESSION = %s.id, "{}", text(fault));
                }
                Published::Unknown { why }
            }
        };
        Ok(vec![Event::Published { key, outcome }])
    }

    /// Asks the authority to advance the head; its answer goes into the evidence with it.
    pub fn offer(
        &self,
        s: &Session,
        wish: &Publish,
    ) -> Result<Result<crate::model::head::HeadAt, Refusal>, String> {
        let rider = |outcome: &Result<_, Refusal>| {
            let detail = serde_json::json!({ "offered": wish, "answer": outcome });
            Journal { sessions: vec![], entries: vec![draft("publication", s, "agent", detail)] }
        };
        failpoint::lost("authority.publish.before")?;
        let answer = self.authority.publish(wish, Box::new(rider)).map_err(text)?;
        failpoint::lost("authority.publish.after")?;
        match &answer {
            Ok(at) => {
                let seen = Seen { generation: s.generation, version: at.version };
                self.note_published(&s.workspace, seen);
            }
            Err(refusal) => self.metrics.refused(refusal.code),
        }
        Ok(answer)
    }

    fn resolve(&self, slot: &Slot, s: &Session, key: PublicationKey) -> Answered {
        failpoint::lost("authority.resolve.before")?;
        let found = self
            .authority
            .resolve(&s.workspace, key, crate::authority::no_rider())
            .map_err(text)?;
        failpoint::hit("authority.resolve.after");
        let refused = |code| Published::Refused { refusal: Refusal { code, current: None } };
        let outcome = match found {
            KeyState::Committed { at, .. } => Published::Committed { at },
            KeyState::Rejected { code } => refused(code),
            KeyState::Buried => refused(Code::KeyBuried),
            // Forgotten is not "not committed": the bytes stay until a person decides.
            KeyState::Forgotten
            | KeyState::Unused
            | KeyState::Prepared
            | KeyState::Sent
            | KeyState::Unknown { .. } => {
                return Err(format!(
                    "publication {key} is {}: {}",
                    found.word(),
                    Code::KeyForgotten.meaning()
                ));
            }
        };
        super::keep::heard(self, slot, s, key, outcome)
    }

    /// Umount, then the kernel's word that the superblock died.
    fn prove_gone(&self, slot: &Slot, tried: Try) -> Answered {
        // The root descriptor holds the mount busy.
        slot.lock().mounted = None;
        let answer = overlay::unmount(&slot.dirs.merged).map_err(text)?;
        drop(tried.turn);
        match answer {
            Unmount::Done | Unmount::NotMounted => {}
            Unmount::Busy if !tried.last => return Ok(vec![]),
            Unmount::Busy => return Err(self.who_uses_it(slot)),
        }
        if let Some(image) = &slot.dirs.image {
            return self.prove_image_gone(slot, image, tried.last);
        }
        if !slot.dirs.upper.exists() {
            let s = slot.session();
            if s.disposition != Some(Disposition::NeverOpened) && !s.facts.has(Fact::Gone) {
                // It was there: an overlay of it may live on where somebody moved it to.
                return Err(format!(
                    "{} is not there any more, so nothing is proved of its overlay: bring it back",
                    slot.dirs.upper.display()
                ));
            }
            let (asked, answer) =
                ("stat of the upper".to_owned(), "ENOENT, it was never made".to_owned());
            return Ok(vec![Event::Gone {
                proof: Proof { asked, answer, at: clock::now(), took_us: 0 },
            }]);
        }
        match self.gone.prove(slot.id, &slot.dirs, TEARDOWN).map_err(text)? {
            Some(proof) => {
                self.vacate(slot)?;
                Ok(vec![Event::Gone { proof }])
            }
            None => Err(self.who_keeps_it(slot)),
        }
    }

    /// What a session without processes and mount needs no longer: deadline, cgroup, run-time
    /// directory. Done twice it is the same.
    pub(super) fn vacate(&self, slot: &Slot) -> Result<(), String> {
        self.gate_leave(slot)?;
        self.deadlines.remove(slot.id);
        self.table().remove(slot.id).map_err(text)?;
        self.events.remove(slot.id);
        let (cgroup, s) = {
            let mut inner = slot.lock();
            (inner.cgroup.take(), inner.session.clone())
        };
        let cgroup = match cgroup.map(Arc::try_unwrap) {
            Some(Ok(cgroup)) => Some(cgroup),
            // Somebody reads it at this moment; the directory is removed by its path.
            Some(Err(_)) | None => Cgroup::open(&self.paths.cgroup(&s)).map_err(text)?,
        };
        match (cgroup, &s.external) {
            (Some(cgroup), None) => cgroup.remove(TEARDOWN).map_err(text)?,
            // The directory is systemd's, and the slice may be another session's next; after a reboot
            // it may be so already.
            (Some(cgroup), Some(_)) if s.boot == self.boot => cgroup.give_back().map_err(text)?,
            (Some(_), Some(_)) | (None, _) => {}
        }
        super::show::remove(&self.paths, slot.id).map_err(text)?;
        let _ = self.sockets.send(SessionSocket::Gone { session: slot.id });
        Ok(())
    }

    fn remove(&self, slot: &Slot, s: &Session) -> Answered {
        let Some(gone) = ProvedGone::from_facts(s.id, &s.facts) else {
            return Err("the superblock is not proved gone".to_owned());
        };
        if let Some(why) = self.put_image_away(slot)? {
            return Ok(vec![Event::Failed { what: Effect::READERS.to_owned(), why }]);
        }
        // An image is one file, whatever is in it.
        let image = slot.dirs.image.is_some();
        let total = if image { Amount::default() } else { slot.measured() };
        let removed = self.showing(slot, What::Remove, total, |progress| {
            remove::remove(&self.paths.sessions, &gone, &self.paths.trash, progress)
        });
        let removed = removed.map_err(text)?;
        self.vacate(slot)?;
        Ok(vec![Event::Removed { bytes: removed.bytes, entries: removed.entries }])
    }
}

/// Captures a stopped upper; an empty one gives no layer unless that is wanted.
pub fn capture_upper(
    layers: &LayerStore,
    upper: &Path,
    even_empty: bool,
    stop: crate::upper::Stop<'_>,
) -> crate::upper::Result<Option<Captured>> {
    let dir = Dir::open(upper)?;
    if !even_empty && changes::is_empty(dir.as_fd())? {
        return Ok(None);
    }
    let source = Source::Upper(dir.as_fd(), Format::Trusted);
    layer::capture(source, Writers::Frozen, layers, stop).map(Some)
}

/// An error with all its causes, in one line.
pub fn text<E: std::error::Error>(fault: E) -> String {
    let mut line = fault.to_string();
    let mut cause = fault.source();
    while let Some(inner) = cause {
        line.push_str(": ");
        line.push_str(&inner.to_string());
        cause = inner.source();
    }
    line
}
