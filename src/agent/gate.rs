//! The lease gate of this host, and each session's entry in it. Where the host has no gate everything
//! goes on without: no session is refused for it, and `session inspect` says why it is absent.

mod up;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use self::up::{Up, is_busy, no_gate};
use super::effects::{Answered, THAW, text};
use super::host::Host;
use super::slot::{Inner, Slot};
use crate::config::{GateUse, SharedMappings};
use crate::kernel::cgroup::Outcome;
use crate::kernel::clock;
use crate::kernel::gate::{Entry, Gate, Refusal, Refusals};
use crate::kernel::overlay;
use crate::model::facts::Fact;
use crate::model::journal::Journal;
use crate::model::session::{Loss, State};
use crate::model::step::Event;
use crate::model::time::BootNs;
use crate::model::view::{GateView, RefusedCall};
use crate::store::Durability;

/// The gate as far as there is one, whoever put it up.
pub(super) struct HostGate {
    up: Mutex<Up>,
    wish: GateUse,
    adopting: Mutex<()>,
    losses: Mutex<Losses>,
    /// This agent is the one that is told of refusals.
    told: AtomicBool,
}

/// What became of the gate's count of refusals that reached nobody.
#[derive(Debug, Default)]
struct Losses {
    /// The maps that `counted` is of.
    maps: u32,
    /// What of the count is in the metrics.
    counted: u64,
    /// What of that is not in the log yet, and when it was said last.
    unsaid: u64,
    said: Option<BootNs>,
}

impl HostGate {
    /// Adopts what stands, or puts it up.
    pub(super) fn raise(wish: GateUse) -> Self {
        let up = Up::find(wish, &Up::default());
        up.tell();
        Self {
            up: Mutex::new(up),
            wish,
            adopting: Mutex::default(),
            losses: Mutex::default(),
            told: AtomicBool::new(false),
        }
    }

    fn up(&self) -> Up {
        self.up.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn get(&self) -> Option<Arc<Gate>> {
        self.up().gate
    }

    /// Puts it up again, once somebody took it away.
    fn again(&self) -> Up {
        let found = Up::find(self.wish, &self.up());
        self.up.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&found);
        found
    }
}

/// What the gate refused of a session.
#[derive(Debug, Default)]
pub struct Refused {
    /// What of its counters is in the metrics.
    counted: [u64; 8],
    last: Option<RefusedCall>,
    /// When one was recorded last.
    recorded: Option<BootNs>,
}

/// A stale writer may go on trying for days: the evidence holds one in this time, and the log one line.
const RECORD: Duration = Duration::from_secs(60);

impl Host {
    /// Enters a new overlay, before a path leads to it. It is shut until its deadline is set.
    pub(super) fn gate_enter(&self, slot: &Slot, root: &OwnedFd) {
        let up = self.gate.up();
        let Some(gate) = up.takes() else { return };
        let generation = slot.lock().session.generation;
        let enter = |up: &Up, gate: &Gate| {
            let entry = gate.enter(root, slot.id, generation)?;
            // Programs that lost their pins refuse a probe for a moment yet.
            if up.stands() {
                return Ok(entry);
            }
            gate.leave(&entry)?;
            Err(no_gate("it was taken away by somebody".to_owned()))
        };
        let entered = enter(&up, gate).or_else(|first| {
            // Whose turn it is now is not waited for once more: a lease runs out meanwhile.
            if is_busy(&first) || up.stands() {
                return Err(first);
            }
            tracing::warn!(OVERFENCE_SESSION = %slot.id, "{}; putting it up again", text(first));
            let up = self.gate_again();
            let none = || no_gate(up.why.clone().unwrap_or_default());
            enter(&up, up.takes().ok_or_else(none)?)
        });
        let mut inner = slot.lock();
        self.gate_put(&mut inner, entered.map_err(text));
        self.gate_follow(&inner, inner.deadline().0);
    }

    /// Finds the entry of an overlay that is mounted already. One that has none is entered now, as far
    /// as it can be. Whether it was this agent's turn in time.
    pub(super) fn gate_adopt(&self, slot: &Slot, root: &OwnedFd) -> bool {
        // Two would enter it twice. The slot is not locked: others may have to be waited for.
        let _one = self.gate.adopting.lock().unwrap_or_else(PoisonError::into_inner);
        let up = self.gate.up();
        let Some(gate) = &up.gate else { return true };
        let (id, generation, holds) = {
            let inner = slot.lock();
            (slot.id, inner.session.generation, inner.session.holds_lease())
        };
        // The lease may be renewed while others are waited for.
        let deadline = || {
            let inner = slot.lock();
            if inner.session.holds_lease() { inner.deadline().0 } else { BootNs(0) }
        };
        let found = match gate.find(root, id) {
            // Of one that is stopped it stays, shut, until its overlay is dead.
            Ok(Some(entry)) if up.frees && holds => match gate.leave(&entry) {
                Ok(()) => Ok(None),
                Err(fault) => {
                    tracing::error!(OVERFENCE_SESSION = %id, "{}", text(fault));
                    Ok(Some(entry))
                }
            },
            Ok(None) => match up.takes() {
                Some(gate) => gate.enter_live(root, id, generation, deadline).map(Some),
                None => Ok(None),
            },
            found => found,
        };
        let in_turn = !found.as_ref().is_err_and(is_busy);
        let mut inner = slot.lock();
        match found.map_err(text).transpose() {
            Some(entry) => self.gate_put(&mut inner, entry),
            None => drop(self.gate_drop(&mut inner)),
        }
        // As it is by now.
        match inner.session.holds_lease() {
            true => self.gate_follow(&inner, inner.deadline().0),
            false => self.gate_shut(&inner),
        }
        in_turn
    }

    /// What a session has of the gate from now on, or why it has nothing.
    fn gate_put(&self, inner: &mut Inner, entry: Result<Entry, String>) {
        let known = inner.gate_absent.take();
        self.gate_drop(inner);
        match entry {
            Ok(entry) => {
                entry.deny_shared(self.config.fence.shared_mappings == SharedMappings::Deny);
                inner.gate = Some(entry);
            }
            Err(why) => {
                let s = &inner.session;
                // It is tried again, and said once.
                if known.as_ref() != Some(&why) {
                    tracing::error!(OVERFENCE_SESSION = %s.id, OVERFENCE_WORKSPACE = %s.workspace, "{why}");
                }
                inner.gate_absent = Some(why);
            }
        }
    }

    /// Another entry counts from its own beginning.
    fn gate_drop(&self, inner: &mut Inner) -> Option<Entry> {
        self.gate_count(inner);
        inner.refused.counted = [0; 8];
        inner.gate_absent = None;
        inner.gate.take()
    }

    /// The deadline that the kernel compares with follows the lease's.
    pub(super) fn gate_follow(&self, inner: &Inner, deadline: BootNs) {
        if let Some(entry) = inner.gate.as_ref().filter(|_| inner.session.holds_lease()) {
            let deadline = if self.gate.up().frees { BootNs(u64::MAX) } else { deadline };
            entry.open(inner.session.generation, deadline);
        }
    }

    /// Refuses a lost session's writes from now on.
    pub(super) fn gate_shut(&self, inner: &Inner) {
        let Some(entry) = &inner.gate else { return };
        entry.shut();
        if let Some(Loss::Superseded { generation, .. }) = &inner.session.loss {
            entry.supersede(*generation);
        }
    }

    /// Removes the entry of a session whose superblock is dead.
    pub(super) fn gate_leave(&self, slot: &Slot) -> Result<(), String> {
        let Some(gate) = self.gate.get() else { return Ok(()) };
        let held = self.gate_drop(&mut slot.lock());
        // Of a gate that was taken away there is nothing to remove.
        let held = held.filter(|held| held.map() == gate.map());
        if let Some(entry) = held.or_else(|| gate.find_by_id(slot.id)) {
            gate.leave(&entry).map_err(text)?;
        }
        // Drained, but for what went on by itself: this may have been the last one.
        if self.draining() {
            self.gate_lower();
        }
        Ok(())
    }

    /// Somebody may have taken it away, or had its turn as this agent began: it is put up, and each
    /// overlay looked for in it anew.
    pub(super) fn gate_look(&self) {
        if self.draining() {
            return;
        }
        let up = self.gate.up();
        if !up.stands() {
            let what = match up.busy {
                true => "another agent had its turn with the lease gate",
                false => "the lease gate was taken away by somebody",
            };
            match self.gate_again().why {
                None => tracing::error!("{what}; it is up again"),
                Some(why) => tracing::error!("{what}: {why}"),
            }
        }
        // Also those that were being opened meanwhile.
        self.gate_move();
    }

    fn gate_again(&self) -> Up {
        let up = self.gate.again();
        self.gate_move();
        up
    }

    /// Looks anew for each overlay whose entry is of a gate that was taken away, whose programs are gone,
    /// and for each that has none. One of those that is read-only is entered once it is not.
    fn gate_move(&self) {
        let up = self.gate.up();
        let Some(gate) = &up.gate else { return };
        for slot in self.slots() {
            let mounted = {
                let inner = slot.lock();
                let lacks = up.takes().is_some() && !inner.session.facts.has(Fact::ReadOnly);
                let stale = inner.gate.as_ref().map_or(lacks, |entry| entry.map() != gate.map());
                inner.mounted.clone().filter(|_| stale)
            };
            // Nor has the next one its turn.
            if mounted.is_some_and(|mounted| !self.gate_adopt(&slot, &mounted.root)) {
                return;
            }
        }
    }

    /// Takes the gate away, if no session of anybody needs it.
    pub(super) fn gate_lower(&self) {
        let Some(gate) = self.gate.get() else { return };
        match gate.lower() {
            Ok(true) => tracing::info!("the lease gate is taken away"),
            Ok(false) => tracing::info!("the lease gate stays: a session needs it"),
            Err(fault) => tracing::error!("{}", text(fault)),
        }
    }

    /// What is shown of it.
    pub(super) fn gate_view(&self, inner: &Inner) -> GateView {
        let absent = |why| GateView { state: "absent".to_owned(), why, ..GateView::default() };
        let up = self.gate.up();
        let (gate, entry) = match (&up.gate, &inner.gate) {
            (Some(gate), Some(entry)) if gate.map() == entry.map() => (gate, entry),
            (_, Some(_)) => {
                return absent(Some("what it was entered in was taken away".to_owned()));
            }
            (_, None) => {
                let why = inner.gate_absent.clone().or(up.why);
                return absent(why.or_else(|| Some("it has no overlay in the gate".to_owned())));
            }
        };
        let missing = gate.missing();
        let refused = entry.refused().into_iter().filter(|(_, n)| *n > 0);
        GateView {
            state: if missing.is_empty() { "complete" } else { "partial" }.to_owned(),
            missing: missing.into_iter().map(str::to_owned).collect(),
            why: up.why,
            shared_mappings: entry.shared(),
            refused: refused.map(|(row, n)| (row.to_owned(), n)).collect(),
            last: inner.refused.last.clone(),
            told: self.gate.told.load(Ordering::Relaxed),
            lost: gate.lost(),
        }
    }

    /// Brings the metrics up to a session's counters.
    pub(super) fn gate_count(&self, inner: &mut Inner) {
        let Some(entry) = &inner.gate else { return };
        for ((op, now), counted) in entry.refused().into_iter().zip(&mut inner.refused.counted) {
            self.metrics.writes_refused(op, now.saturating_sub(*counted));
            *counted = now.max(*counted);
        }
    }

    /// Brings the metrics up to how many refusals reached nobody: all since the gate was put up, also
    /// before this agent. The log has it now and then.
    pub(super) fn gate_count_lost(&self) {
        let Some(gate) = self.gate.get() else { return };
        let mut losses = self.gate.losses.lock().unwrap_or_else(PoisonError::into_inner);
        if losses.maps != gate.map() {
            (losses.maps, losses.counted) = (gate.map(), 0);
        }
        let more = gate.lost().saturating_sub(losses.counted);
        losses.counted += more;
        losses.unsaid += more;
        self.metrics.refusals_lost(more);
        let now = clock::now();
        if losses.unsaid > 0 && losses.said.is_none_or(|last| now.since(last) >= RECORD) {
            tracing::warn!(
                "{} refusal(s) by the lease gate are counted and not told: there were too many, nobody \
                 read them, or they were of sessions of another agent",
                losses.unsaid
            );
            (losses.unsaid, losses.said) = (0, Some(now));
        }
    }

    /// Takes in a refusal: shown at once, recorded now and then.
    fn gate_told(&self, gate: &Gate, refusal: Refusal) {
        // Of another agent of this host, or of a session that is gone by now.
        let Some(slot) = self.slot(refusal.session) else { return gate.lose() };
        let mut inner = slot.lock();
        let now = clock::now();
        let call = RefusedCall {
            boot_ns: refusal.at.0,
            deadline: refusal.deadline.0,
            generation: refusal.generation.0,
            op: refusal.op.to_owned(),
            pid: refusal.pid,
            command: refusal.command,
            inode: refusal.inode,
        };
        inner.refused.last = Some(call.clone());
        if inner.refused.recorded.is_some_and(|last| now.since(last) < RECORD) {
            return;
        }
        inner.refused.recorded = Some(now);
        let counts: BTreeMap<_, _> =
            inner.gate.iter().flat_map(Entry::refused).filter(|(_, n)| *n > 0).collect();
        let detail = serde_json::json!({ "call": call, "refused": counts });
        let entry = super::slot::draft("write_refused", &inner.session, "kernel", detail);
        drop(inner);
        let journal = Journal { sessions: vec![], entries: vec![entry] };
        if let Err(fault) = self.store.record(&journal, Durability::Lazy) {
            tracing::error!(OVERFENCE_SESSION = %slot.id, "a refused write is not recorded: {}", text(fault));
        }
    }

    /// Whether nothing of a session whose lease is lost can write any more, but for calls that began
    /// before: the gate is complete, refused a probe and refuses one now, and no mapping and no loop
    /// device passes it. `Err`: what speaks against it.
    pub(super) fn gate_stops(&self, inner: &Inner) -> Result<(), String> {
        let known = self.gate_alone(inner) && inner.session.facts.has(Fact::Gated);
        if !known || inner.session.has_loop() {
            return Err("the gate does not stop all its writes any more".to_owned());
        }
        self.gate_refuses(inner)
    }

    /// Asks the kernel: what is known may be older than what root took away since.
    fn gate_refuses(&self, inner: &Inner) -> Result<(), String> {
        let (Some(entry), Some(mounted)) = (&inner.gate, &inner.mounted) else {
            return Err("the gate is not there any more".to_owned());
        };
        if !self.gate_whole() {
            return Err(
                "the gate's programs are not pinned any more, or not all of them".to_owned()
            );
        }
        // A read-only superblock refuses before the programs do.
        let read_only = inner.session.facts.has(Fact::ReadOnly)
            && overlay::is_read_only(&mounted.root).map_err(text)?;
        match read_only || entry.prove(&mounted.root).map_err(text)?.is_some() {
            true => Ok(()),
            false => Err("the write probe was not refused by the gate".to_owned()),
        }
    }

    /// Whether each way to change a file is checked, and will be: programs that lost their pins refuse for
    /// a moment yet.
    fn gate_whole(&self) -> bool {
        self.gate.get().is_some_and(|gate| gate.missing().is_empty() && gate.stands())
    }

    fn gate_alone(&self, inner: &Inner) -> bool {
        let map = self.gate.get().filter(|gate| gate.missing().is_empty()).map(|gate| gate.map());
        inner.gate.as_ref().is_some_and(|entry| Some(entry.map()) == map && !entry.shared())
    }

    /// Asks for the proof that a lost session's writes are refused.
    pub(super) fn gate_proved(&self, inner: &Inner) -> Option<Event> {
        let (entry, mounted) = (inner.gate.as_ref()?, inner.mounted.as_ref()?);
        let known = !stopped(inner.session.state) || inner.session.facts.has(Fact::Gated);
        if known || !self.gate_whole() {
            return None;
        }
        match entry.prove(&mounted.root) {
            Ok(proof) => proof.map(|proof| Event::Gated { proof, alone: self.gate_alone(inner) }),
            Err(fault) => {
                tracing::warn!(OVERFENCE_SESSION = %inner.session.id, "{}", text(fault));
                None
            }
        }
    }

    /// Lets a fenced session's processes run on. The keeper forgets it first, which would freeze it
    /// again. Under the slot's lock: what is noticed or wanted meanwhile comes after it.
    pub(super) fn run_on(self: &Arc<Self>, slot: &Arc<Slot>) -> Answered {
        let cgroup = self.cgroup(slot)?;
        let mut inner = slot.lock();
        if !inner.session.may_run_on() {
            return Ok(vec![]);
        }
        if let Err(seen) = self.gate_stops(&inner) {
            return Ok(vec![Event::GateLost { seen }]);
        }
        self.table().remove(slot.id).map_err(text)?;
        let event = match cgroup.thaw(THAW).map_err(text)? {
            Outcome::Proved(proof) => Event::RunsOn { proof },
            Outcome::Late(_) => return Err("it does not run on yet".to_owned()),
        };
        self.apply_locked(&mut inner, event, "agent");
        Ok(vec![])
    }
}

/// How long a thread waits for the next refusal before it looks whether the agent stops.
const PATIENCE: Duration = Duration::from_secs(1);

/// The body of the thread that is told of refusals. Where another agent of this host is, or where there
/// is no gate, it has nothing to do: the counters tell.
pub(super) fn run(host: &Arc<Host>) -> crate::kernel::Result<()> {
    let mut reading: Option<(Arc<Gate>, Refusals)> = None;
    while !host.stopping() {
        // Somebody took it away: it is put up again by a sweep.
        let Some(gate) = host.gate.get() else {
            drop(reading.take());
            host.gate.told.store(false, Ordering::Relaxed);
            std::thread::sleep(PATIENCE);
            continue;
        };
        let same = reading.as_ref().is_some_and(|(of, _)| Arc::ptr_eq(of, &gate));
        if !same {
            // Its lock first: it may be on the same directory.
            drop(reading.take());
            // No reason to end an agent that enforces leases without it, too.
            reading = gate
                .refusals()
                .inspect_err(|fault| tracing::debug!("refusals are not told: {fault}"))
                .ok()
                .flatten()
                .map(|refusals| (Arc::clone(&gate), refusals));
            host.gate.told.store(reading.is_some(), Ordering::Relaxed);
        }
        host.gate_count_lost();
        let Some((_, refusals)) = &mut reading else {
            std::thread::sleep(PATIENCE);
            continue;
        };
        match refusals.next(PATIENCE) {
            Ok(Some(refusal)) => host.gate_told(&gate, refusal),
            Ok(None) => {}
            Err(errno) => tracing::error!("refusals are not told: {errno}"),
        }
    }
    Ok(())
}

const fn stopped(state: State) -> bool {
    matches!(state, State::Fencing | State::Fenced | State::Preserved)
}

/// Somebody may have taken the gate away. A read-only superblock refuses the probe by itself; what it
/// answers says nothing of the gate then.
pub(super) fn check(host: &Arc<Host>, slot: &Arc<Slot>) {
    let inner = slot.lock();
    if !stopped(inner.session.state) || inner.session.facts.has(Fact::ReadOnly) {
        return;
    }
    let had = inner.session.facts.has(Fact::Gated);
    let event = match &inner.mounted {
        None => None,
        Some(_) if had => {
            // A mapping may have been made while it was away.
            let asked = match inner.session.may_run_on() {
                true => host.gate_stops(&inner),
                false => host.gate_refuses(&inner),
            };
            asked.err().map(|seen| Event::GateLost { seen })
        }
        Some(_) => host.gate_proved(&inner),
    };
    drop(inner);
    if let Some(event) = event {
        host.apply(slot, event, "foreign");
    }
}
