//! The reconciler's clock: observe, classify, and feed what was seen to the state machine as
//! events. Every tick retries what is pending; every sweep checks facts against the kernel,
//! witnesses time for grace windows, and lets sessions come back that were fenced only for doubt.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::effects::text;
use super::host::Host;
use super::keep;
use super::pulse::Part;
use super::slot::Slot;
use crate::authority::PRUNED;
use crate::failpoint;
use crate::kernel::rivals::Scope;
use crate::kernel::{clock, overlay};
use crate::model::classify::{Observed, Plan, Record, classify, of_running};
use crate::model::facts::Fact;
use crate::model::ledger::Which;
use crate::model::session::{Session, State};
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
    let mut looks = spawn_looks(&host, Looks { members: started, uppers: started });
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
        if looks.is_finished() {
            let next = (&mut looks).await.unwrap_or(Looks { members: now, uppers: now });
            looks = spawn_looks(&host, next);
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

/// When the next looks at all stopped sessions are due.
#[derive(Clone, Copy)]
struct Looks {
    members: BootNs,
    uppers: BootNs,
}

fn spawn_looks(host: &Arc<Host>, due: Looks) -> tokio::task::JoinHandle<Looks> {
    let host = Arc::clone(host);
    tokio::task::spawn_blocking(move || {
        let begun = clock::now();
        let mut next = due;
        if begun >= due.members {
            for slot in host.unsettled() {
                keep::gather(&host, &slot);
            }
            let now = clock::now();
            next.members = now.plus(TICK.max(now.since(begun) * keep::REST));
        }
        next.uppers = keep::uppers(&host, due.uppers);
        next
    })
}

async fn pass(host: Arc<Host>, witnessed: Option<Duration>, started: BootNs) {
    let worker = Arc::clone(&host);
    let store = tokio::task::spawn_blocking(move || {
        if let Some(why) = worker.store.trouble() {
            // It can record nothing more, so it would hold what it froze and renew nothing. The next
            // agent reads what is there, and a good lease is not disturbed by that.
            tracing::error!("the store is not believed any more: {why}; ending");
            std::process::exit(1);
        }
        worker.store.hold_room();
    });
    if let Err(fault) = store.await {
        tracing::error!("the reserve was not looked at: {fault}");
    }
    resume_doubted(&host).await;
    let worker = Arc::clone(&host);
    if let Err(fault) = tokio::task::spawn_blocking(move || worker.close_answered_breaker()).await {
        tracing::error!("the breaker was not looked at: {fault}");
    }
    if host.shown().lost_revert {
        let worker = Arc::clone(&host);
        match tokio::task::spawn_blocking(move || worker.resolve_reverts()).await {
            Ok(Ok(())) => {}
            Ok(Err(why)) => tracing::warn!("a revert's outcome is not known yet: {why}"),
            Err(fault) => tracing::error!("a revert's outcome was not asked for: {fault}"),
        }
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

/// How long the ledger keeps what became of a publication.
const KEPT: Duration = Duration::from_secs(90 * 86_400);
/// How often it is looked for what is older.
const PRUNE: Duration = Duration::from_secs(3600);

/// Counts what has no known outcome; now and then forgets what is old.
fn ledger(host: &Host) -> Result<(), String> {
    let open = Which { workspace: None, open: true, limit: usize::MAX };
    host.resolve_reverts()?;
    let publications = host.authority.publications(&open).map_err(text)?.len();
    let requests = host.authority.requests(&open).map_err(text)?.len();
    host.metrics.unresolved(publications, requests);
    let now = clock::now();
    if host.shown().pruned.is_some_and(|last| now.since(last) < PRUNE) {
        return Ok(());
    }
    let before = jiff::Timestamp::now().as_duration().unsigned_abs().saturating_sub(KEPT);
    let before_ms = u64::try_from(before.as_millis()).unwrap_or(0);
    failpoint::hit("authority.prune.before");
    let pruned = host.authority.prune(before_ms).map_err(text)?;
    failpoint::hit("authority.prune.after");
    if pruned > 0 {
        tracing::info!("forgot {pruned} publication(s) that were answered over 90 days ago");
    }
    // More of the same is left where a call removed all it may.
    host.shown().pruned = (pruned < PRUNED).then_some(now);
    Ok(())
}

fn sweep_now(host: &Arc<Host>, witnessed: Duration, started: BootNs) -> Result<(), String> {
    host.store.marks().flush().map_err(text)?;
    host.store.anchor().map_err(text)?;
    // What the authority does not answer now keeps no session from being looked at.
    if let Err(why) = ledger(host) {
        tracing::warn!("the ledger was not looked at: {why}");
    }
    // Time with the breaker open does not count, either.
    let tripped = host.tripped().is_some();
    let may_delete = !tripped && clock::now().since(started) >= host.config.preserve.min_notice;
    let mut states: BTreeMap<State, u64> = BTreeMap::new();
    let mut missing: BTreeMap<Fact, u64> = BTreeMap::new();
    let (mut fenced, mut held, mut bytes) = (0, 0, 0);
    host.gate_look();
    keep::gather_by_namespace(host);
    keep::rivals(host, Scope::Everywhere);
    for slot in host.slots() {
        super::watch::look(host, &slot);
        check_read_only(host, &slot);
        super::seal::check(host, &slot);
        super::gate::check(host, &slot);
        let before = slot.session();
        // Nor does time on HOLD, nor what came before it was seen here to be preserved.
        let counts = announces(&before) && !tripped && !host.store.marks().held(&slot.workspace);
        let witnessed = if counts { witnessed } else { Duration::ZERO };
        // First said, then counted: a crash in between says it again, and swallows nothing.
        announce(host, &slot, &before, witnessed)?;
        let add_ms = u64::try_from(witnessed.as_millis()).unwrap_or(u64::MAX);
        let may_delete = goes(host, &before, witnessed, may_delete);
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
    host.sweep_loops();
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

/// Whether a session's bytes go now, by the reconciler's table: the authority is asked only of one whose
/// grace is over with what was `witnessed`.
fn goes(host: &Host, s: &Session, witnessed: Duration, may_delete: bool) -> bool {
    let record = Record::of(s, witnessed, false);
    if record != Record::Due {
        return false;
    }
    let seen = Observed { record, held: !may_delete, ..of_running(s, host.boot, false) };
    classify(seen, host.authority_says(s).answer).1 == Plan::Remove
}

/// Whether the end of grace is what a session waits for: then it is announced, and time counts.
fn announces(s: &Session) -> bool {
    s.state == State::Preserved && s.unknown.is_empty()
}

/// Says that a deletion by grace comes near with what was `witnessed` and is not counted yet: once at
/// each of [`NOTICES`].
fn announce(host: &Host, slot: &Arc<Slot>, s: &Session, witnessed: Duration) -> Result<(), String> {
    if !announces(s) {
        return Ok(());
    }
    let left = s.grace_ends().saturating_sub(s.witnessed);
    let first = s.witnessed.is_zero() && !witnessed.is_zero();
    let Some(left) = notice(left, left.saturating_sub(witnessed), first) else { return Ok(()) };
    failpoint::hit("agent.notice.before");
    let view = host.preserved_view(slot);
    let detail = serde_json::json!({
        "left_ms": view.grace_left_ms, "not_before": view.not_before, "owner": view.owner,
        "bytes": view.bytes, "entries": view.entries,
    });
    let left = crate::config::duration::text(left);
    tracing::warn!(OVERFENCE_SESSION = %slot.id, OVERFENCE_WORKSPACE = %slot.workspace, "{} bytes of {} are deleted in {left} of witnessed time: export, keep or discard them", view.bytes, view.owner);
    let entry = super::slot::draft("deletion_ahead", s, "agent", detail);
    let journal = crate::model::journal::Journal { sessions: vec![], entries: vec![entry] };
    host.store.record(&journal, crate::store::Durability::Lazy).map_err(text)?;
    failpoint::hit("agent.notice.after");
    Ok(())
}

/// How much of grace is left when its end is announced, the longest first.
const NOTICES: [Duration; 2] = [Duration::from_secs(24 * 3600), Duration::from_secs(3600)];

/// The notice that is due when so much of grace `was` left and so much `is` now; of a grace that is
/// shorter from the start, at the `first` sweep.
fn notice(was: Duration, is: Duration, first: bool) -> Option<Duration> {
    let due = NOTICES.into_iter().filter(|notice| is <= *notice && (was > *notice || first));
    due.min()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deletion_is_announced_a_day_and_an_hour_before() {
        let hours = |n: u64| Duration::from_secs(n * 3600);
        let minutes = |n: u64| Duration::from_secs(n * 60);
        for (was, is, first, want) in [
            (hours(72), hours(71), true, None),
            (hours(25), hours(24), false, Some(hours(24))),
            (hours(24), hours(23), false, None),
            (hours(2), minutes(59), false, Some(hours(1))),
            (minutes(59), minutes(58), false, None),
            // Time that was missed: the nearer one says all.
            (hours(30), minutes(5), false, Some(hours(1))),
            // Shorter than a day from the start, and than an hour.
            (hours(6), hours(6), true, Some(hours(24))),
            (minutes(5), minutes(4), true, Some(hours(1))),
            // `preserved keep` makes it longer again, and it is announced again.
            (hours(48), hours(47), false, None),
        ] {
            assert_eq!(notice(was, is, first), want, "{was:?} {is:?}");
        }
    }
}
