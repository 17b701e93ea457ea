//! The reconciler's clock: observe, classify, and feed what was seen to the state machine as
//! events. Every tick retries what is pending; every sweep checks facts against the kernel,
//! witnesses time for grace windows, and lets sessions come back that were fenced only for doubt.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::effects::text;
use super::host::Host;
use super::pulse::Part;
use super::slot::Slot;
use crate::kernel::{clock, overlay};
use crate::model::facts::Fact;
use crate::model::session::State;
use crate::model::step::Event;
use crate::model::time::BootNs;

const TICK: Duration = Duration::from_secs(1);
/// What is stopped already and only lacks a stronger fact is tried again every so many ticks.
const PATIENT: u32 = 5;

/// Runs until the agent stops.
pub async fn run(host: Arc<Host>) {
    let started = clock::now();
    let mut swept = started;
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut pass = tokio::spawn(self::pass(Arc::clone(&host), Some(Duration::ZERO), started));
    let mut ticks: u32 = 0;
    while !host.stopping() {
        tick.tick().await;
        host.pulse.beat(Part::Sweep);
        ticks = ticks.wrapping_add(1);
        let now = clock::now();
        let held = host.tripped().is_some();
        for slot in host.unsettled() {
            if slot.lock().pending(ticks.is_multiple_of(PATIENT)) {
                host.apply(&slot, Event::Tick { now, held }, "agent");
            }
        }
        // What may wait for a disk is not waited for: retries go on meanwhile.
        if !pass.is_finished() {
            continue;
        }
        let since = now.since(swept);
        let due = since >= host.config.preserve.sweep;
        if due {
            swept = now;
        }
        // Time that no sweep watched over does not count: a suspended or stopped agent witnesses
        // at most two intervals.
        let witnessed = due.then(|| since.min(host.config.preserve.sweep * 2));
        pass = tokio::spawn(self::pass(Arc::clone(&host), witnessed, started));
    }
}

async fn pass(host: Arc<Host>, witnessed: Option<Duration>, started: BootNs) {
    let worker = Arc::clone(&host);
    if let Err(fault) = tokio::task::spawn_blocking(move || worker.store.reserve().refill()).await {
        tracing::error!("the reserve was not looked at: {fault}");
    }
    resume_doubted(&host).await;
    let worker = Arc::clone(&host);
    if let Err(fault) = tokio::task::spawn_blocking(move || worker.close_answered_breaker()).await {
        tracing::error!("the breaker was not looked at: {fault}");
    }
    if let Some(witnessed) = witnessed
        && let Err(why) = sweep(&host, witnessed, started).await
    {
        tracing::error!("the sweep did not complete: {why}");
    }
}

async fn sweep(host: &Arc<Host>, witnessed: Duration, started: BootNs) -> Result<(), String> {
    let worker = Arc::clone(host);
    tokio::task::spawn_blocking(move || sweep_now(&worker, witnessed, started))
        .await
        .map_err(|e| e.to_string())?
}

fn sweep_now(host: &Arc<Host>, witnessed: Duration, started: BootNs) -> Result<(), String> {
    host.store.anchor().map_err(text)?;
    // Time with the breaker open does not count, either.
    let held = host.tripped().is_some();
    let may_delete = !held && clock::now().since(started) >= host.config.preserve.min_notice;
    let witnessed = if held { Duration::ZERO } else { witnessed };
    let add_ms = u64::try_from(witnessed.as_millis()).unwrap_or(u64::MAX);
    let mut states: BTreeMap<State, u64> = BTreeMap::new();
    let mut missing: BTreeMap<Fact, u64> = BTreeMap::new();
    let (mut fenced, mut held, mut bytes) = (0, 0, 0);
    for slot in host.slots() {
        super::watch::look(host, &slot);
        check_read_only(host, &slot);
        super::seal::check(host, &slot);
        host.apply(&slot, Event::Witnessed { add_ms, may_delete }, "agent");
        let s = slot.session();
        *states.entry(s.state).or_default() += 1;
        if let Some(fact) = super::view::missing(&s) {
            *missing.entry(fact).or_default() += 1;
        }
        match s.state {
            State::Fencing | State::Fenced => fenced += 1,
            State::Quarantined => held += 1,
            State::Preserved => bytes += host.size_of(&slot).0,
            State::Opening | State::Active | State::Releasing | State::Deleting | State::Closed => {
            }
        }
    }
    let n = |state| states.get(&state).copied().unwrap_or(0);
    let mut shown = host.shown();
    // What was closed is forgotten at once, so that no sweep meets it.
    let deleted = std::mem::take(&mut shown.closed);
    let total = states.values().sum::<u64>() - n(State::Closed) + deleted;
    shown.reconcile = format!(
        "reconciled {total} session(s): renewed={} fenced={fenced} preserved={} deleted={deleted} held={held}",
        n(State::Active) + n(State::Releasing),
        n(State::Preserved),
    );
    host.metrics.reconciled(&states, &missing, bytes);
    shown.preserved_bytes = bytes;
    Ok(())
}

/// A root process may have made a fenced overlay writable again.
pub fn check_read_only(host: &Arc<Host>, slot: &Arc<Slot>) {
    let inner = slot.lock();
    let expected = matches!(inner.session.state, State::Fenced | State::Preserved)
        && inner.session.facts.has(Fact::ReadOnly);
    let Some(mounted) = inner.mounted.clone().filter(|_| expected) else { return };
    drop(inner);
    let seen = match overlay::is_read_only(&mounted.root) {
        Ok(true) => return,
        Ok(false) => "the write probe was granted".to_owned(),
        Err(fault) => text(fault),
    };
    host.apply(slot, Event::ReadOnlyLost { seen }, "foreign");
}

/// `after_doubt = resume-if-unclaimed`: an ordinary acquisition, with the policy as authoriser.
async fn resume_doubted(host: &Arc<Host>) {
    for slot in host.unsettled() {
        if !slot.lock().session.resumable_by_policy() {
            continue;
        }
        let worker = Arc::clone(host);
        let asked = Arc::clone(&slot);
        let by = format!("policy:{}", host.config.digest());
        let reason = "fenced only for doubt, and unclaimed since".to_owned();
        let answer =
            tokio::task::spawn_blocking(move || worker.readmit_now(&asked, &by, &by, &reason))
                .await;
        if let Ok(Err(failure)) = answer {
            tracing::info!(OVERFENCE_SESSION = %slot.id, OVERFENCE_WORKSPACE = %slot.workspace, "not resumed: {failure}");
            // Claimed by somebody else: only a person can bring it back.
            if failure.current.is_some() {
                slot.lock().session.policy.after_doubt = crate::model::session::AfterDoubt::Hold;
            }
        }
    }
}
