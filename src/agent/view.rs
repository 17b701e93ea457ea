//! From records to what is shown.

use std::sync::Arc;
use std::time::Duration;

use super::effects::text;
use super::host::Host;
use super::slot::{Inner, Slot};
use super::under_way::Whose;
use crate::kernel::clock;
use crate::model::classify::{Answer, Class, classify, of_running};
use crate::model::facts::Fact;
use crate::model::ids::BootId;
use crate::model::lease::Lease;
use crate::model::session::{OnBusy, Session, State};
use crate::model::view::{
    FactView, LeaseView, PathText, PreservedView, SessionView, WorkspaceView,
};
use crate::model::workspace::Workspace;

impl Host {
    /// A session.
    pub fn session_view(&self, slot: &Slot) -> SessionView {
        let inner = slot.lock();
        let s = &inner.session;
        let processes = inner.cgroup.as_ref().and_then(|c| c.procs().ok()).map_or(0, |p| p.len());
        SessionView {
            id: s.id.to_string(),
            workspace: s.workspace.to_string(),
            owner: s.owner.to_string(),
            state: s.state.to_string(),
            class: class(&inner, self.boot).name().to_owned(),
            lease: s.lease.to_string(),
            generation: s.generation.0,
            holder: s.holder,
            ttl_ms: ms(s.ttl),
            limits: s.limits,
            image: s.upper.size(),
            external: s.external.clone(),
            remaining_ms: s.holds_lease().then(|| remaining(&inner)),
            may_publish: s.holds_lease() && s.state != State::Opening && s.doubt.is_none(),
            doubt: s.doubt.clone(),
            loss: s.loss.as_ref().map(ToString::to_string),
            may_resume: s.may_resume(),
            facts: facts(s),
            gate: Some(self.gate_view(&inner)),
            missing: missing(s).map(|f| f.name().to_owned()),
            sealing: self.under_way.sealing(s.id),
            progress: self.under_way.of(&Whose::Session(s.id)),
            holders: s.holders.clone(),
            blockers: s.blockers.clone(),
            altered: s.altered.clone(),
            base: s.base.clone(),
            expected: s.expected.clone(),
            work: s.work.clone(),
            disposition: s.disposition.clone(),
            unknown: s.unknown.keys().map(ToString::to_string).collect(),
            merged: PathText::of(&slot.dirs.merged),
            upper: PathText::of(&slot.dirs.upper),
            cgroup: PathText::of(&self.paths.cgroup(s)),
            processes: u64::try_from(processes).unwrap_or(u64::MAX),
            labels: s.labels.clone(),
            trouble: s.trouble.clone(),
            runs_on: s.may_run_on() && !s.facts.has(Fact::Frozen),
            seeded: s.seeded.clone(),
        }
    }

    /// Bytes and entries of a stopped session's upper, counted once.
    pub fn size_of(&self, slot: &Slot) -> (u64, u64) {
        if let Some(size) = slot.lock().size {
            return size;
        }
        let counted = self.with_upper(slot, |upper| crate::upper::size::size(upper).map_err(text));
        match counted.and_then(|counted| counted) {
            Ok(size) => {
                slot.lock().size = Some(size);
                size
            }
            Err(fault) => {
                tracing::warn!(OVERFENCE_SESSION = %slot.id, OVERFENCE_WORKSPACE = %slot.workspace, "the upper could not be counted: {fault}");
                (0, 0)
            }
        }
    }

    /// A lease.
    pub fn lease_view(&self, workspace: &Workspace, lease: &Lease) -> LeaseView {
        let left = (lease.expires.boot == self.boot).then(|| signed_left(lease.expires.ns.0));
        LeaseView {
            id: lease.id.to_string(),
            workspace: workspace.id.to_string(),
            session: lease.session.to_string(),
            host: lease.host.to_string(),
            owner: lease.owner.to_string(),
            generation: lease.generation.0,
            state: word(&lease.state),
            holder: lease.holder,
            ttl_ms: ms(lease.ttl),
            remaining_ms: left.filter(|_| lease.state.may_publish()),
            why_ended: lease.why_ended.clone(),
        }
    }

    /// A workspace.
    pub fn workspace_view(&self, w: &Workspace) -> WorkspaceView {
        let now = crate::model::time::BootInstant { boot: self.boot, ns: clock::now() };
        let live = w.live_lease(&now).filter(|_| w.hold.is_none());
        let suspects = self.slots().into_iter().filter_map(|slot| {
            let s = slot.session();
            let suspect = s.workspace == w.id && !s.holds_lease() && s.state != State::Closed;
            suspect.then(|| s.id.to_string())
        });
        WorkspaceView {
            id: w.id.to_string(),
            owner: w.owner.to_string(),
            contact: w.contact.clone(),
            labels: w.labels.clone(),
            version: w.at.version.0,
            head: w.at.head.0.clone(),
            generation: w.generation.0,
            generation_seen: self.store.marks().highest(&w.id).generation.max(w.generation).0,
            lease: w.lease.as_ref().map(|l| self.lease_view(w, l)),
            writer_session: live.map(|l| l.session.to_string()),
            may_publish: live.is_some(),
            hold: w.hold.clone(),
            suspect_sessions: suspects.collect(),
            progress: self.under_way.of(&Whose::Workspace(w.id.clone())),
        }
    }

    /// A preserved delta.
    pub fn preserved_view(&self, slot: &Arc<Slot>) -> PreservedView {
        let s = slot.session();
        let (bytes, entries) = self.size_of(slot);
        let left = s.grace_ends().saturating_sub(s.witnessed);
        let (next, by_itself) = next(&s);
        PreservedView {
            session: s.id.to_string(),
            workspace: s.workspace.to_string(),
            owner: s.owner.to_string(),
            generation: s.generation.0,
            reason: s.loss.as_ref().map(ToString::to_string).unwrap_or_default(),
            facts: s.facts.0.keys().copied().collect(),
            bytes,
            entries,
            grace_left_ms: ms(left),
            next: next.to_owned(),
            not_before: by_itself
                .then(|| jiff::Timestamp::now().checked_add(left).ok())
                .flatten()
                .map(|at| at.to_string()),
        }
    }
}

/// What will happen to a stopped session's bytes, and whether that is once grace is over.
fn next(s: &Session) -> (&'static str, bool) {
    match s.state {
        State::Deleting => ("being removed", false),
        State::Quarantined => ("kept until an operator acts", false),
        _ if !s.unknown.is_empty() => ("kept: a publication has no known outcome", false),
        State::Fencing => ("kept until it is proved frozen", false),
        State::Fenced if s.on_busy() == OnBusy::Kill => ("killed after kill_after", false),
        State::Fenced if s.on_busy() == OnBusy::Seal => ("sealed after seal_after", false),
        State::Fenced => ("kept until it is read-only", false),
        State::Opening | State::Active | State::Releasing | State::Preserved | State::Closed => {
            ("removed", true)
        }
    }
}

fn facts(s: &Session) -> Vec<FactView> {
    s.facts
        .0
        .iter()
        .map(|(fact, proof)| FactView {
            fact: *fact,
            asked: proof.asked.clone(),
            answer: proof.answer.clone(),
            boot_ns: proof.at.0,
            took_us: proof.took_us,
        })
        .collect()
}

/// The strongest fact that the fence goes for and does not have.
pub fn missing(s: &Session) -> Option<Fact> {
    match s.state {
        State::Fencing | State::Fenced | State::Preserved => {
            let wanted = Fact::ALL.into_iter().filter(|f| *f <= s.fence.to);
            // A seal is for who asked for it, no step on the way to a kill.
            let needed = wanted
                .filter(|f| *f != Fact::Sealed || s.fence.to == Fact::Sealed)
                // It takes read-only's place where that is refused, and is missed by nobody.
                .filter(|f| *f != Fact::UpperFrozen)
                // No fence goes for it: it is there, or the host cannot have it.
                .filter(|f| *f != Fact::Gated);
            // Who was killed cannot run: stronger than frozen. After it is gone nothing is missing.
            let (killed, gone) = (s.facts.has(Fact::Killed), s.facts.has(Fact::Gone));
            let there = |f: Fact| {
                s.facts.has(f) || gone || (f == Fact::Frozen && (killed || s.may_run_on()))
            };
            needed.filter(|f| !there(*f)).max()
        }
        State::Opening
        | State::Active
        | State::Releasing
        | State::Deleting
        | State::Closed
        | State::Quarantined => None,
    }
}

/// The reconciler's class of a session, by what is known of it without asking anybody.
fn class(inner: &Inner, boot: BootId) -> Class {
    let s = &inner.session;
    let in_time = clock::now() < inner.deadline().0;
    classify(of_running(s, boot, in_time), Answer::recorded(s)).0
}

fn remaining(inner: &Inner) -> i64 {
    signed_left(inner.deadline().0.0)
}

fn signed_left(at_ns: u64) -> i64 {
    let signed = |ns: u64| i64::try_from(ns / 1_000_000).unwrap_or(i64::MAX);
    signed(at_ns) - signed(clock::now().0)
}

/// A unit enum as its serialised word.
pub fn word<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_value(value).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
}

fn ms(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
