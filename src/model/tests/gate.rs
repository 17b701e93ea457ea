//! Who runs on behind the lease gate, event by event.

use std::time::Duration;

use super::super::facts::Fact;
use super::super::ids::{Generation, LeaseId};
use super::super::session::{FenceWish, Loss, OnBusy, OnFence, Policy, Session, State, Work};
use super::super::step::{Effect, Event, Found, Purpose, step};
use super::super::time::BootNs;
use super::{boot, loop_device, proof, session};

const FENCE: Effect = Effect::Freeze { purpose: Purpose::Fence };

#[track_caller]
fn then(s: &mut Session, event: Event, effects: &[Effect]) {
    let got = step(s, &event);
    assert_eq!((got.refused, got.effects.as_slice()), (None, effects), "{event:?}");
}

fn active(on_fence: OnFence, on_busy: OnBusy) -> Session {
    let after = Duration::from_nanos(10);
    let policy =
        Policy { on_fence, on_busy, seal_after: after, kill_after: after, ..Policy::default() };
    Session { policy, ..session(State::Active) }
}

fn gated(alone: bool) -> Event {
    Event::Gated { proof: proof(2), alone }
}

fn frozen() -> Event {
    Event::Frozen { proof: proof(1) }
}

fn busy() -> Event {
    Event::Busy { proof: proof(3), holders: vec![] }
}

/// The kernel itself holds it, by a loop device on a file in it.
fn looped() -> Event {
    Event::Busy { proof: proof(3), holders: vec![loop_device()] }
}

fn runs() -> Event {
    Event::RunsOn { proof: proof(4) }
}

fn tick(at: u64) -> Event {
    Event::Tick { now: BootNs(at), held: false }
}

fn asked(to: Fact) -> Event {
    let wish = FenceWish { to, on_busy: None };
    Event::FenceAsked { wish, by: "op".into(), reason: "why".into(), now: BootNs(5) }
}

/// Up to the answer to read-only, which comes last.
fn lost(s: &mut Session, alone: bool) {
    let loss = Loss::Revoked { by: "op".into(), reason: "why".into() };
    then(s, Event::LeaseLost { loss, revoke: false }, &[FENCE, Effect::Show]);
    then(s, frozen(), &[Effect::ReadOnly]);
    then(s, gated(alone), &[]);
}

/// Fenced, and running on.
fn running(on_busy: OnBusy) -> Session {
    let mut s = active(OnFence::ReadOnlyRun, on_busy);
    lost(&mut s, true);
    then(&mut s, busy(), &[Effect::Show, Effect::RunOn]);
    assert!(s.is_stopped() && s.facts.has(Fact::Frozen));
    then(&mut s, runs(), &[]);
    assert!(s.is_stopped() && !s.facts.has(Fact::Frozen) && s.facts.has(Fact::Gated));
    s
}

#[test]
fn who_is_gated_alone_runs_on_by_policy() {
    let mut s = running(OnBusy::Hold);
    assert_eq!(s.state, State::Preserved);
    // It is left running, and read-only tried again: it may have closed what it held.
    then(&mut s, tick(50), &[Effect::ReadOnly]);
    then(&mut s, Event::ReadOnly { proof: proof(6), empty: false }, &[]);
    then(&mut s, tick(60), &[]);
    assert!(s.may_run_on());
    // A keeper was late, or an agent started.
    then(&mut s, frozen(), &[Effect::RunOn]);
    then(&mut s, runs(), &[]);

    for (on_fence, alone) in [(OnFence::ReadOnlyRun, false), (OnFence::Freeze, true)] {
        let mut s = active(on_fence, OnBusy::Hold);
        lost(&mut s, alone);
        then(&mut s, busy(), &[Effect::Show]);
        then(&mut s, tick(50), &[Effect::ReadOnly]);
        assert!(s.facts.has(Fact::Frozen) && !s.may_run_on(), "{on_fence:?}, {alone}");
    }
}

#[test]
fn more_than_that_freezes_it_first() {
    for to in [Fact::Frozen, Fact::Sealed, Fact::Killed] {
        let mut s = running(OnBusy::Hold);
        then(&mut s, asked(to), &[FENCE]);
        assert!(!s.may_run_on(), "{to}");
    }
    for (on_busy, next) in [(OnBusy::Seal, Effect::Seal), (OnBusy::Kill, Effect::Kill)] {
        let mut s = running(on_busy);
        then(&mut s, tick(12), &[Effect::ReadOnly]);
        then(&mut s, tick(13), &[FENCE]);
        then(&mut s, frozen(), &[Effect::ReadOnly]);
        assert_eq!(step(&mut s, &tick(14)).effects[0], next);
    }
}

/// What its processes write into the device, the kernel writes into the file, and the gate sees nothing.
#[test]
fn who_can_write_by_a_loop_device_stays_frozen() {
    let mut s = active(OnFence::ReadOnlyRun, OnBusy::Hold);
    lost(&mut s, true);
    then(&mut s, looped(), &[Effect::Show]);
    then(&mut s, tick(50), &[Effect::ReadOnly]);
    then(&mut s, looped(), &[]);
    assert!(s.facts.has(Fact::Frozen) && s.run_on && !s.may_run_on());
    // It was detached.
    then(&mut s, busy(), &[Effect::RunOn]);
    then(&mut s, runs(), &[]);
    // It is there again: whoever ran on is stopped.
    then(&mut s, looped(), &[FENCE]);
    assert!(!s.may_run_on());
    then(&mut s, frozen(), &[Effect::ReadOnly]);
    then(&mut s, looped(), &[]);
    then(&mut s, Event::ReadOnly { proof: proof(6), empty: false }, &[Effect::RunOn]);

    // Between the decision and the thaw.
    let mut s = active(OnFence::ReadOnlyRun, OnBusy::Hold);
    lost(&mut s, true);
    then(&mut s, busy(), &[Effect::Show, Effect::RunOn]);
    then(&mut s, looped(), &[]);
    then(&mut s, runs(), &[FENCE]);
}

#[test]
fn a_gate_that_goes_leaves_it_frozen() {
    let mut s = running(OnBusy::Hold);
    then(&mut s, Event::GateLost { seen: "ok".into() }, &[FENCE]);
    then(&mut s, frozen(), &[Effect::ReadOnly]);
    then(&mut s, busy(), &[]);
    // It is up again, and then it runs on.
    then(&mut s, gated(true), &[]);
    then(&mut s, tick(9), &[Effect::ReadOnly, Effect::RunOn]);

    // An end stays one.
    for end in [State::Closed, State::Quarantined] {
        let mut s = running(OnBusy::Hold);
        s.state = end;
        then(&mut s, Event::GateLost { seen: "ok".into() }, &[]);
    }

    // What was noticed while it was being let run comes first.
    let mut s = active(OnFence::ReadOnlyRun, OnBusy::Hold);
    lost(&mut s, true);
    then(&mut s, busy(), &[Effect::Show, Effect::RunOn]);
    then(&mut s, asked(Fact::Frozen), &[]);
    then(&mut s, runs(), &[FENCE]);
}

#[test]
fn a_start_freezes_it_and_a_readmission_has_it_write() {
    let mut s = running(OnBusy::Hold);
    let found = Found { boot: boot(1), lease_good: false, fence_stamped: true };
    then(&mut s, Event::Recovered(found), &[FENCE]);
    then(&mut s, frozen(), &[Effect::ReadOnly]);
    then(&mut s, busy(), &[Effect::RunOn]);
    then(&mut s, runs(), &[]);
    let readmitted = Event::Readmitted {
        lease: LeaseId::from_u128(9),
        generation: Generation(9),
        ends: BootNs(1),
        authorised_by: "op".into(),
        reason: "why".into(),
    };
    then(&mut s, readmitted, &[Effect::ReadWrite]);
    assert_eq!((s.run_on, s.work), (false, Some(Work::Resume)));
}
