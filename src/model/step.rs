//! The state machine: `step(session, event) -> effects`. Pure: no clock, no I/O. The executor
//! performs the effects and feeds what came back in again as events; the API, the timers, the
//! watches and the reconciler produce nothing but events.
//!
//! ```text
//! OPENING --> ACTIVE --(lease lost)--> FENCING --> FENCED --> PRESERVED --(disposition)--> DELETING --> CLOSED
//!    |          | ^ \                                             |                            ^
//!    |          | |  +--> RELEASING --(committed, clean)----------|----------------------------+
//!    |          | |           \--(lost)--> FENCING   \--(refused, unknown, keep)--> PRESERVED  |
//!    |          | +--- readmitted ---------------------+                                       |
//!    +--(failed open)----------------------------------------------------------------------->--+
//! ```

use serde::{Deserialize, Serialize};

use super::code::Code;
use super::facts::{Blocker, Fact, Holder, Proof, Stray};
use super::head::{Digest, HeadAt};
use super::ids::{BootId, Generation, LeaseId, PublicationKey};
use super::session::{
    CloseMode, Disposition, FenceWish, Loss, OnBusy, OnFence, OnSlowFreeze, Session, Stage, State,
    UpperFreeze, Work,
};
use super::time::BootNs;
use super::workspace::Refusal;

/// Removal tries after which a session is quarantined instead of tried for ever.
pub const MAX_TRIES: u32 = 20;

/// What became of a publication.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Published {
    /// The head moved to this.
    Committed {
        /// Version and head made.
        at: HeadAt,
    },
    /// Nothing changed.
    Refused {
        /// Why, and the present state.
        refusal: Refusal,
    },
    /// The answer was lost.
    Unknown {
        /// What was lost.
        why: String,
    },
}

/// What an agent start found of a session.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Found {
    /// The present boot.
    pub boot: BootId,
    /// Whether the lease holds: the deadline entry lies ahead and the authority agrees.
    pub lease_good: bool,
    /// The cgroup's stamp says that a fence of this generation began. A freeze comes ahead of its
    /// record, so the stamp may know of a fence that the record does not.
    pub fence_stamped: bool,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// Mount, cgroup and ticket stand.
    Opened,
    /// They could not be made.
    OpenFailed {
        /// Why.
        why: String,
    },
    /// The agent started and found this.
    Recovered(Found),
    /// A renewal was granted; ends doubt.
    Renewed,
    /// A renewal did not succeed; the first of a row raises doubt.
    RenewalMissed {
        /// What happened.
        cause: String,
    },
    /// The lease is lost.
    LeaseLost {
        /// Why.
        loss: Loss,
        /// The authority still holds it as live and must be told.
        revoke: bool,
    },
    /// `frozen` is proved.
    Frozen {
        /// The kernel's answer.
        proof: Proof,
    },
    /// `frozen` was not reached in time; `freeze=1` stays.
    FreezeLate {
        /// Who does not freeze.
        blockers: Vec<Blocker>,
    },
    /// The lease gate refuses its writes.
    Gated {
        /// The kernel's answer.
        proof: Proof,
        /// Nothing that its processes do passes it, but for calls that began before.
        #[serde(default)]
        alone: bool,
    },
    /// The gate let a probe pass: somebody took it away.
    GateLost {
        /// What was answered.
        seen: String,
    },
    /// An operator wants it stopped.
    FenceAsked {
        /// How far.
        wish: FenceWish,
        /// Who.
        by: String,
        /// Why.
        reason: String,
        /// Now.
        now: BootNs,
    },
    /// Its processes run on, behind the gate, on our wish.
    RunsOn {
        /// The kernel's answer.
        proof: Proof,
    },
    /// Somebody else thawed it.
    ForeignThaw {
        /// What was read.
        seen: String,
    },
    /// Somebody moved processes of it out of its cgroup; those that could be were brought back.
    MovedOut {
        /// Which.
        strays: Vec<Stray>,
    },
    /// The overlay is read-only and the probe got EROFS.
    ReadOnly {
        /// The kernel's answer.
        proof: Proof,
        /// Whether the upper holds nothing, read after that.
        empty: bool,
    },
    /// Read-only was refused.
    Busy {
        /// The kernel's answer.
        proof: Proof,
        /// Who holds it.
        holders: Vec<Holder>,
    },
    /// Somebody made it writable again, or put a second overlay on its upper.
    ReadOnlyLost {
        /// What was read.
        seen: String,
    },
    /// Somebody changed the upper of a read-only session, past its overlay.
    UpperChanged {
        /// What was found.
        seen: String,
    },
    /// The files and directories of the upper carry the flag.
    Sealed {
        /// The kernel's answer, and what it is worth there.
        proof: Proof,
    },
    /// Somebody took the seal off.
    SealLost {
        /// What was read.
        seen: String,
    },
    /// No flag of ours is on the upper any more, and what it holds can be written.
    Unsealed {
        /// The kernel's answer.
        proof: Proof,
    },
    /// The image's file system stands.
    UpperFrozen {
        /// The kernel's answer.
        proof: Proof,
    },
    /// Somebody had set it going.
    UpperFreezeLost {
        /// What was answered.
        seen: String,
    },
    /// The image's file system goes again, on our wish.
    UpperThawed {
        /// The kernel's answer.
        proof: Proof,
    },
    /// The overlay is writable again, on our wish.
    Writable {
        /// The kernel's answer.
        proof: Proof,
    },
    /// The session runs again.
    Thawed {
        /// The kernel's answer.
        proof: Proof,
    },
    /// `populated 0` after `cgroup.kill`.
    Killed {
        /// The kernel's answer.
        proof: Proof,
    },
    /// The superblock died.
    Gone {
        /// The kernel's answer.
        proof: Proof,
    },
    /// The directory and the cgroup are removed.
    Removed {
        /// Bytes freed.
        bytes: u64,
        /// Entries removed.
        entries: u64,
    },
    /// An effect did not succeed; it is tried again at the next tick.
    Failed {
        /// Which.
        what: String,
        /// The answer.
        why: String,
    },
    /// A checkpoint is asked for.
    CheckpointAsked {
        /// Its publication key.
        key: PublicationKey,
        /// Without stopping the session: what it changes meanwhile ends the checkpoint.
        live: bool,
    },
    /// A close is asked for.
    CloseAsked {
        /// What happens to the bytes.
        mode: CloseMode,
        /// Key for its publication.
        key: PublicationKey,
    },
    /// What the layer is made of lies aside: writers change nothing of it any more.
    Gathered {
        /// For which publication.
        key: PublicationKey,
    },
    /// The upper is a layer, fsynced.
    Captured {
        /// For which publication it was taken: a late capture never stands for another one.
        key: PublicationKey,
        /// Its diff id; `None` when the upper is empty.
        layer: Option<Digest>,
    },
    /// What the upper shows is not to be published, now or later.
    CaptureRefused {
        /// For which publication it was to be taken.
        key: PublicationKey,
        /// Why.
        why: String,
    },
    /// The authority answered, or did not.
    Published {
        /// Which publication.
        key: PublicationKey,
        /// The answer.
        #[serde(flatten)]
        outcome: Published,
    },
    /// The lease is given back: the authority said so, or that another one took its place.
    Released,
    /// The authority gave a new lease; a person or the doubt policy authorised it.
    Readmitted {
        /// The new lease.
        lease: LeaseId,
        /// The new fencing token.
        generation: Generation,
        /// End of the lease.
        ends: BootNs,
        /// Who authorised it.
        authorised_by: String,
        /// Why.
        reason: String,
    },
    /// A decision on the bytes.
    Disposed {
        /// Which.
        disposition: Disposition,
    },
    /// The bytes are kept at least until this much time is witnessed.
    Kept {
        /// Milliseconds of witnessed time since it was preserved.
        until_ms: u64,
        /// Who wants it.
        by: String,
    },
    /// A sweep witnessed some time.
    Witnessed {
        /// How much, milliseconds.
        add_ms: u64,
        /// Whether deletion by grace is allowed now (time since start, breaker, hold).
        may_delete: bool,
    },
    /// Time passed; pending things are tried again.
    Tick {
        /// Now.
        now: BootNs,
        /// The breaker is open: nothing is killed or removed.
        held: bool,
    },
    /// The breaker is open and keeps an effect from being done; a tick asks for it again once it
    /// is closed.
    Held {
        /// Which effect.
        what: String,
    },
}

/// What a step gave.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Step {
    /// What to do now, in this order.
    pub effects: Vec<Effect>,
    /// The event was a wish that is not allowed now; nothing changed.
    pub refused: Option<Code>,
    /// Worth an entry in the evidence. Repetitions are not.
    pub record: bool,
}

impl Step {
    fn go(effects: impl IntoIterator<Item = Effect>) -> Self {
        Self { effects: effects.into_iter().collect(), refused: None, record: true }
    }
    fn quiet(effects: impl IntoIterator<Item = Effect>) -> Self {
        Self { record: false, ..Self::go(effects) }
    }
    fn refuse(code: Code) -> Self {
        Self { refused: Some(code), record: true, ..Self::default() }
    }
    /// Nothing to do; the answer is still evidence.
    fn note() -> Self {
        Self::go([])
    }
}

const FENCE: Effect = Effect::Freeze { purpose: Purpose::Fence };

/// One step. The session is changed in place; the caller keeps the old one if it needs it.
pub fn step(s: &mut Session, event: &Event) -> Step {
    let mut step = taken(s, event);
    image::lift_first(s, &mut step);
    step
}

fn taken(s: &mut Session, event: &Event) -> Step {
    match event {
        Event::Opened => on_opened(s),
        Event::OpenFailed { why } => on_open_failed(s, why),
        Event::Recovered(found) => recover(s, found),
        Event::Renewed => {
            // One that comes after the end ends no doubt any more.
            if s.holds_lease() && s.doubt.take().is_some() {
                Step::go([Effect::Show])
            } else {
                Step::quiet([])
            }
        }
        Event::RenewalMissed { cause } => on_renewal_missed(s, cause),
        Event::LeaseLost { loss, revoke } => lose(s, loss.clone(), *revoke),
        Event::FenceAsked { wish, by, reason, now } => on_fence_asked(s, wish, by, reason, *now),
        Event::Gated { proof, alone } => on_gated(s, proof, *alone),
        Event::GateLost { .. } => on_gate_lost(s),
        Event::RunsOn { .. } => on_runs_on(s),
        Event::Frozen { proof } => on_frozen(s, proof),
        Event::FreezeLate { blockers } => on_freeze_late(s, blockers),
        Event::ForeignThaw { .. } => on_foreign_thaw(s),
        Event::MovedOut { .. } => on_moved_out(s),
        Event::ReadOnly { proof, empty } => on_read_only(s, proof, *empty),
        Event::Busy { proof, holders } => on_busy(s, proof, holders),
        Event::ReadOnlyLost { .. } => on_read_only_lost(s),
        Event::UpperChanged { seen } => on_upper_changed(s, seen),
        Event::Sealed { proof } => on_sealed(s, proof),
        Event::SealLost { .. } => on_seal_lost(s),
        Event::Unsealed { .. } => on_unsealed(s),
        Event::UpperFrozen { proof } => on_upper_frozen(s, proof),
        Event::UpperFreezeLost { .. } => on_upper_freeze_lost(s),
        Event::UpperThawed { proof } => on_upper_thawed(s, proof),
        Event::Writable { .. } => on_writable(s),
        Event::Thawed { .. } => on_thawed(s),
        Event::Killed { proof } => on_killed(s, proof),
        Event::Gone { proof } => on_gone(s, proof),
        Event::Removed { .. } => on_removed(s),
        Event::Failed { what, why } => on_failed(s, what, why),
        Event::CheckpointAsked { key, live } => on_checkpoint_asked(s, *key, *live),
        Event::CloseAsked { mode, key } => on_close_asked(s, *mode, *key),
        Event::Gathered { key } => on_gathered(s, *key),
        Event::Captured { key, layer } => on_captured(s, *key, *layer),
        Event::CaptureRefused { key, why } => on_capture_refused(s, *key, why),
        Event::Published { key, outcome } => on_published(s, *key, outcome),
        Event::Released => on_released(s),
        Event::Readmitted { lease, generation, ends, .. } => {
            on_readmitted(s, *lease, *generation, *ends)
        }
        Event::Disposed { disposition } => on_disposed(s, disposition.clone()),
        Event::Kept { until_ms, .. } => on_kept(s, *until_ms),
        Event::Witnessed { add_ms, may_delete } => on_witnessed(s, *add_ms, *may_delete),
        Event::Tick { now, held } => on_tick(s, *now, *held),
        Event::Held { what } => on_held(s, what),
    }
}

mod effect;
mod fence;
mod foreign;
mod gate;
mod hold;
mod image;
mod lifecycle;
mod removal;
mod seal;

pub use effect::{Effect, Purpose};
use fence::{
    lose, on_busy, on_fence_asked, on_foreign_thaw, on_freeze_late, on_frozen, on_read_only,
    on_read_only_lost, on_tick, writable_again,
};
use foreign::{on_moved_out, on_upper_changed};
use gate::{on_gate_lost, on_gated, on_runs_on, run_on};
use hold::{
    on_capture_refused, on_captured, on_checkpoint_asked, on_close_asked, on_gathered,
    on_published, on_readmitted, on_released, on_thawed, on_writable,
};
use image::{on_upper_freeze_lost, on_upper_frozen, on_upper_thawed};
use lifecycle::{on_failed, on_held, on_open_failed, on_opened, on_renewal_missed, recover};
use removal::{on_disposed, on_gone, on_kept, on_killed, on_removed, on_witnessed};
use seal::{on_seal_lost, on_sealed, on_unsealed, seal};

fn begin_deleting(s: &mut Session, why: Disposition) -> Step {
    s.disposition = Some(why);
    s.state = State::Deleting;
    s.trouble = None;
    abandon_work(s);
    s.tries = 0;
    Step::go([Effect::Kill])
}

/// How the trouble of a checkpoint begins that may simply be asked for again.
pub const GIVEN_UP: &str = "the checkpoint was given up";

/// Drops what is under way; a publication whose answer is still out becomes UNKNOWN, so that its
/// bytes stay until the authority resolved it. So does one that was only prepared: the ledger may
/// know of it, and somebody has to end it there.
fn abandon_work(s: &mut Session) {
    if let Some(
        Work::Checkpoint {
            key,
            stage: Stage::Publishing { layer } | Stage::Thawing { layer: Some(layer) },
            ..
        }
        | Work::Close { key, stage: Stage::Publishing { layer }, .. },
    ) = s.work.take()
    {
        s.unknown.insert(key, layer);
    }
}

/// Ends the frozen part of a checkpoint. It is under way until the thaw is confirmed: the next one
/// must not be thawed by this one's thaw.
fn thaw_then(s: &mut Session, key: PublicationKey, layer: Option<Digest>) -> Step {
    s.work = Some(Work::Checkpoint { key, stage: Stage::Thawing { layer }, tainted: false });
    Step::go([Effect::Thaw])
}

fn resolve_unknown(s: &Session) -> impl Iterator<Item = Effect> {
    s.unknown.clone().into_iter().map(|(key, layer)| Effect::Resolve { key, layer })
}

fn preserve(s: &mut Session) -> [Effect; 1] {
    s.state = State::Preserved;
    abandon_work(s);
    [Effect::Show]
}

/// Whether nothing can have written since the last process ended: the ground on which a capture
/// may make a close clean (I4).
fn writerless(s: &Session) -> bool {
    s.facts.has(Fact::Killed) && s.facts.has(Fact::ReadOnly)
}

/// The overlay is, or was, writable again: what was captured may not be all there is.
fn not_read_only(s: &mut Session) {
    s.facts.drop(Fact::ReadOnly);
    if s.disposition == Some(Disposition::Clean) {
        s.disposition = None;
    }
    if let Some(Loss::Closed { offered, .. }) = &mut s.loss {
        *offered = None;
    }
}
