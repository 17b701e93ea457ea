//! The lease gate of this host, and each session's entry in it. Where the host has no gate everything
//! goes on without: no session is refused for it, and `session inspect` says why it is absent.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::effects::{Answered, THAW, text};
use super::host::Host;
use super::slot::{Inner, Slot};
use crate::config::{GateUse, SharedMappings};
use crate::kernel::cgroup::Outcome;
use crate::kernel::clock;
use crate::kernel::gate::{self, Entry, Gate, Refusal, Refusals};
use crate::kernel::overlay;
use crate::model::facts::Fact;
use crate::model::journal::Journal;
use crate::model::session::{Loss, State};
use crate::model::step::Event;
use crate::model::time::BootNs;
use crate::model::view::{GateView, RefusedCall};
use crate::store::Durability;

/// The gate, or why there is none.
pub(super) struct HostGate {
    gate: Mutex<Result<Arc<Gate>, String>>,
    /// The host can have it: it is put up again should it go.
    wanted: bool,
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
        let gate = match wish {
            GateUse::Use => Gate::raise().map(Arc::new).map_err(|fault| gate::why(&fault)),
            GateUse::Off => Err("it is switched off (fence.gate = \"off\")".to_owned()),
        };
        match &gate {
            Ok(gate) if gate.missing().is_empty() => tracing::info!("the lease gate is complete"),
            Ok(gate) => tracing::warn!("the lease gate misses {}", gate.missing().join(", ")),
            Err(why) => tracing::info!("no lease gate: {why}"),
        }
        Self {
            wanted: gate.is_ok(),
            gate: Mutex::new(gate),
            losses: Mutex::default(),
            told: AtomicBool::new(false),
        }
    }

    fn get(&self) -> Result<Arc<Gate>, String> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts it up again, once somebody took it away.
    fn again(&self) -> Result<Arc<Gate>, String> {
        let gate = Gate::raise().map(Arc::new).map_err(|fault| gate::why(&fault));
        self.gate.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&gate);
        gate
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
        let Ok(gate) = self.gate.get() else { return };
        let generation = slot.lock().session.generation;
        let entered = gate.enter(root, slot.id, generation).or_else(|first| {
            tracing::warn!(OVERFENCE_SESSION = %slot.id, "{}; putting it up again", text(first));
            let gate =
                self.gate.again().map_err(|reason| crate::kernel::Error::NoGate { reason })?;
            gate.enter(root, slot.id, generation)
        });
        match entered {
            Ok(entry) => {
                if self.config.fence.shared_mappings == SharedMappings::Deny {
                    entry.deny_shared();
                }
                let mut inner = slot.lock();
                inner.gate = Some(entry);
                self.gate_follow(&inner, inner.deadline().0);
            }
            Err(fault) => {
                tracing::error!(OVERFENCE_SESSION = %slot.id, OVERFENCE_WORKSPACE = %slot.workspace, "{}", text(fault));
            }
        }
    }

    /// Finds the entry of an overlay that is mounted already. One that has none is entered now: what
    /// was mapped before that is not known.
    pub(super) fn gate_adopt(&self, slot: &Slot, root: &OwnedFd) {
        let Ok(gate) = self.gate.get() else { return };
        let mut inner = slot.lock();
        let (id, generation) = (slot.id, inner.session.generation);
        let found = gate.find(root, id).and_then(|found| match found {
            Some(entry) => Ok(entry),
            None => gate.enter(root, id, generation).inspect(Entry::assume_shared),
        });
        match found {
            Ok(entry) => inner.gate = Some(entry),
            Err(fault) => {
                tracing::error!(OVERFENCE_SESSION = %id, OVERFENCE_WORKSPACE = %slot.workspace, "{}", text(fault));
            }
        }
        match inner.session.holds_lease() {
            true => self.gate_follow(&inner, inner.deadline().0),
            false => self.gate_shut(&inner),
        }
    }

    /// The deadline that the kernel compares with follows the lease's.
    pub(super) fn gate_follow(&self, inner: &Inner, deadline: BootNs) {
        if let Some(entry) = inner.gate.as_ref().filter(|_| inner.session.holds_lease()) {
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
        let Ok(gate) = self.gate.get() else { return Ok(()) };
        let held = {
            let mut inner = slot.lock();
            self.gate_count(&mut inner);
            inner.gate.take()
        };
        match held.or_else(|| gate.find_by_id(slot.id)) {
            Some(entry) => gate.leave(&entry).map_err(text),
            None => Ok(()),
        }
    }

    /// Somebody may have taken it away: it is put up again, and each overlay looked for in it anew.
    pub(super) fn gate_look(&self) {
        let stands = self.gate.get().is_ok_and(|gate| gate.stands());
        if stands || !self.gate.wanted || self.draining() {
            return;
        }
        match self.gate.again() {
            Ok(_) => tracing::error!("the lease gate was taken away by somebody; it is up again"),
            Err(why) => tracing::error!("the lease gate was taken away by somebody: {why}"),
        }
        for slot in self.slots() {
            let mounted = {
                let mut inner = slot.lock();
                inner.gate = None;
                inner.mounted.clone()
            };
            if let Some(mounted) = mounted {
                self.gate_adopt(&slot, &mounted.root);
            }
        }
    }

    /// Takes the gate away, if no session of anybody needs it.
    pub(super) fn gate_lower(&self) {
        let Ok(gate) = self.gate.get() else { return };
        match gate.lower() {
            Ok(true) => tracing::info!("the lease gate is taken away"),
            Ok(false) => tracing::info!("the lease gate stays: a session needs it"),
            Err(fault) => tracing::error!("{}", text(fault)),
        }
    }

    /// What is shown of it.
    pub(super) fn gate_view(&self, inner: &Inner) -> GateView {
        let absent = |why| GateView { state: "absent".to_owned(), why, ..GateView::default() };
        match (self.gate.get(), &inner.gate) {
            (Err(why), _) => absent(Some(why)),
            (Ok(_), None) => absent(Some("it has no overlay in the gate".to_owned())),
            (Ok(gate), Some(entry)) => {
                let missing = gate.missing();
                let refused = entry.refused().into_iter().filter(|(_, n)| *n > 0);
                GateView {
                    state: if missing.is_empty() { "complete" } else { "partial" }.to_owned(),
                    missing: missing.into_iter().map(str::to_owned).collect(),
                    why: None,
                    shared_mappings: entry.shared(),
                    refused: refused.map(|(row, n)| (row.to_owned(), n)).collect(),
                    last: inner.refused.last.clone(),
                    told: self.gate.told.load(Ordering::Relaxed),
                    lost: gate.lost(),
                }
            }
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
        let Ok(gate) = self.gate.get() else { return };
        let mut losses = self.gate.losses.lock().unwrap_or_else(PoisonError::into_inner);
        if losses.maps != gate.maps() {
            (losses.maps, losses.counted) = (gate.maps(), 0);
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
        // A read-only superblock refuses before the programs do. They have to be there all the same.
        let read_only = inner.session.facts.has(Fact::ReadOnly)
            && overlay::is_read_only(&mounted.root).map_err(text)?;
        let refused = match read_only {
            true => self.gate.get().is_ok_and(|gate| gate.stands()),
            false => entry.prove(&mounted.root).map_err(text)?.is_some(),
        };
        match refused {
            true => Ok(()),
            false => Err("the write probe was not refused by the gate".to_owned()),
        }
    }

    fn gate_alone(&self, inner: &Inner) -> bool {
        let whole = self.gate.get().is_ok_and(|gate| gate.missing().is_empty());
        whole && inner.gate.as_ref().is_some_and(|entry| !entry.shared())
    }

    /// Asks for the proof that a lost session's writes are refused.
    pub(super) fn gate_proved(&self, inner: &Inner) -> Option<Event> {
        let (entry, mounted) = (inner.gate.as_ref()?, inner.mounted.as_ref()?);
        if !stopped(inner.session.state) || inner.session.facts.has(Fact::Gated) {
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
        let Ok(gate) = host.gate.get() else {
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
    let lost = |seen: String| had.then_some(Event::GateLost { seen });
    let event = match (&inner.gate, &inner.mounted) {
        (Some(entry), Some(mounted)) if had => match entry.prove(&mounted.root) {
            Ok(Some(_)) => None,
            Ok(None) => lost("the write probe was not refused by the gate".to_owned()),
            Err(fault) => lost(text(fault)),
        },
        (Some(_), Some(_)) => host.gate_proved(&inner),
        (None, Some(_)) => lost("the gate is not there any more".to_owned()),
        (_, None) => None,
    };
    drop(inner);
    if let Some(event) = event {
        host.apply(slot, event, "foreign");
    }
}
