//! Renewals: a lease is renewed only if its holder gave a sign of life since the last renewal.
//! All that are due go to the authority in one batch; a batch that is not answered in time, or
//! with an error, puts its sessions in doubt and is tried again.

use std::sync::Arc;
use std::time::Duration;

use super::host::Host;
use super::pulse::Part;
use super::slot::{Inner, Slot, agent_vouches, renewal_due};
use crate::authority::Renewal;
use crate::kernel::clock;
use crate::model::code::Code;
use crate::model::lease::{HolderKind, Lease};
use crate::model::session::{Loss, State};
use crate::model::step::Event;
use crate::model::time::BootNs;
use crate::model::workspace::Refusal;
use crate::workload::Beats;

/// The shortest time from one look at a lease to the next.
const PASS: Duration = Duration::from_millis(50);
/// The longest sleep: a lease that is new while this task sleeps is due after 300 ms at least.
const NAP: Duration = Duration::from_millis(250);

/// Runs until the agent stops.
pub async fn run(host: Arc<Host>) {
    while !host.stopping() {
        host.pulse.beat(Part::Renew);
        let first = host.renewals().first();
        let nap = first.map_or(NAP, |at| at.since(clock::now()).min(NAP));
        // Rounded up to the timer's milliseconds, else it would turn in place before the moment.
        tokio::time::sleep(nap + Duration::from_millis(1)).await;
        let due = due(&host);
        if !due.is_empty() {
            renew(&host, due).await;
        }
    }
}

struct Due {
    slot: Arc<Slot>,
    renewal: Renewal,
    ttl: Duration,
}

/// Looks at the leases whose time has come. One whose holder was silent is looked at again soon.
fn due(host: &Host) -> Vec<Due> {
    let now = clock::now();
    let looked = host.renewals().take_due(now);
    let mut due = Vec::new();
    for slot in looked.into_iter().filter_map(|id| host.slot(id)) {
        let mut inner = slot.lock();
        let s = &inner.session;
        if !matches!(s.state, State::Opening | State::Active | State::Releasing) {
            continue;
        }
        let (opening, ttl) = (s.state == State::Opening, s.ttl);
        let renewal =
            Renewal { workspace: s.workspace.clone(), lease: s.lease, generation: s.generation };
        host.vouch(&mut inner, now);
        host.hear_init(&mut inner);
        let again = now.plus((ttl / 30).max(PASS));
        host.renewals().set(slot.id, inner.lease.next.max(again));
        if inner.lease.signed && !opening && now >= inner.lease.next {
            drop(inner);
            due.push(Due { slot, renewal, ttl });
        }
    }
    due
}

async fn renew(host: &Arc<Host>, due: Vec<Due>) {
    let sent = clock::now();
    for d in &due {
        // Signs that come from now on count for the next renewal.
        let mut inner = d.slot.lock();
        inner.lease.signed = false;
        inner.lease.next = renewal_due(sent, d.ttl);
        host.renewals().set(d.slot.id, inner.lease.next);
    }
    let batch: Vec<_> = due.iter().map(|d| d.renewal.clone()).collect();
    let patience = due.iter().map(|d| d.ttl / 3).min().unwrap_or(PASS).min(Duration::from_secs(5));
    let asked = Arc::clone(host);
    let answer = tokio::task::spawn_blocking(move || asked.authority.renew(&batch));
    let outcome = match tokio::time::timeout(patience, answer).await {
        Ok(Ok(Ok(leases))) => Ok(leases),
        Ok(Ok(Err(fault))) => Err(super::effects::text(fault)),
        Ok(Err(_)) => Err("the renewal was cut off".to_owned()),
        Err(_) => Err(format!("the authority gave no answer within {patience:?}")),
    };
    match outcome {
        Ok(leases) => {
            host.authority_answers(None);
            for (d, lease) in due.iter().zip(leases) {
                match lease {
                    Ok(lease) => granted(host, &d.slot, &lease, sent),
                    Err(refusal) => lost(host, &d.slot, refusal),
                }
            }
        }
        Err(cause) => {
            host.authority_answers(Some(&cause));
            for d in &due {
                missed(host, d, &cause);
            }
        }
    }
}

fn granted(host: &Arc<Host>, slot: &Arc<Slot>, lease: &Lease, sent: BootNs) {
    let mut inner = slot.lock();
    if !inner.session.holds_lease() || inner.session.lease != lease.id {
        return;
    }
    // An answer that comes after the deadline revives nothing: the timer is about to freeze it.
    if clock::now() >= inner.deadline().0 {
        return;
    }
    inner.lease.signs.sent = sent;
    inner.lease.signs.granted = lease.ttl;
    host.refresh_deadline(&inner);
    if let Err(fault) = host.show_locked(&inner) {
        tracing::warn!(OVERFENCE_SESSION = %slot.id, OVERFENCE_WORKSPACE = %slot.workspace, "session.json was not replaced: {fault}");
    }
    drop(inner);
    host.apply(slot, Event::Renewed, "authority");
}

fn lost(host: &Arc<Host>, slot: &Arc<Slot>, refusal: Refusal) {
    // A close of ours gave it back while the renewal was on its way.
    if refusal.code == Code::LeaseReleased && slot.session().state == State::Releasing {
        return;
    }
    let (generation, owner) = match &refusal.current {
        Some(current) => (current.generation, current.owner.clone()),
        None => (slot.session().generation, None),
    };
    let code = refusal.code;
    let loss = Loss::Superseded { generation, owner, code, forced_by: None };
    host.apply(slot, Event::LeaseLost { loss, revoke: false }, "authority");
}

fn missed(host: &Arc<Host>, d: &Due, cause: &str) {
    host.metrics.renewal_failed();
    let mut inner = d.slot.lock();
    // The sign was given; only the authority did not hear of it. Try again soon.
    inner.lease.signed = true;
    inner.lease.next = clock::now().plus((d.ttl / 20).max(PASS));
    host.renewals().set(d.slot.id, inner.lease.next);
    let known = format!(
        "{cause} (last known: generation {}, owner {})",
        inner.session.generation, inner.session.owner
    );
    drop(inner);
    host.apply(&d.slot, Event::RenewalMissed { cause: known }, "authority");
    // At once, and not by the session's worker: that one waits for a record which the same trouble
    // may hold up.
    if let Err(fault) = host.show(&d.slot) {
        tracing::warn!(OVERFENCE_SESSION = %d.slot.id, OVERFENCE_WORKSPACE = %d.slot.workspace, "session.json was not replaced: {fault}");
    }
}

impl Host {
    /// While the agent itself holds a session frozen for a capture, or closes it, its holder cannot
    /// speak: the agent stands in for it.
    pub fn vouch(&self, inner: &mut Inner, now: BootNs) {
        if agent_vouches(inner, now, self.config.checkpoint.max_freeze) {
            inner.lease.signs.holder = now;
            inner.lease.signed = true;
        }
    }

    /// Takes in the last sign of a `process` lease's holder, if it is news. Its init writes down when
    /// it gave one; nobody else can.
    pub fn hear_init(&self, inner: &mut Inner) {
        if inner.session.holder != HolderKind::Process {
            return;
        }
        if inner.beats.is_none() {
            inner.beats = Beats::of(&self.paths.init_of(inner.session.id));
        }
        let sign = inner.beats.as_ref().and_then(Beats::last);
        let Some(sign) = sign.filter(|sign| *sign > inner.lease.signs.holder) else { return };
        // Once the deadline has passed it revives nothing, whenever it was given: the kernel refuses writes
        // since. But it was not silence that ended the lease.
        inner.lease.signed = true;
        if clock::now() < inner.deadline().0 {
            inner.lease.signs.holder = sign;
            self.refresh_deadline(inner);
        }
    }

    /// A sign of life of the holder.
    pub fn sign(&self, slot: &Slot) -> Result<(), Code> {
        let mut inner = slot.lock();
        match inner.session.state {
            State::Opening | State::Active | State::Releasing => {}
            State::Fencing | State::Fenced | State::Preserved => return Err(Code::LeaseLost),
            State::Deleting | State::Closed | State::Quarantined => return Err(Code::WrongState),
        }
        let now = clock::now();
        // A sign that comes after the deadline revives nothing.
        if now >= inner.deadline().0 {
            return Err(Code::LeaseLost);
        }
        inner.lease.signs.holder = now;
        inner.lease.signed = true;
        self.refresh_deadline(&inner);
        Ok(())
    }
}
