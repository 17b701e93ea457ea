//! The seal, state by event: when it is done, when it is taken off, and what it never does.

use std::time::Duration;

use super::super::code::Code;
use super::super::facts::Fact;
use super::super::ids::{Generation, LeaseId};
use super::super::session::{Disposition, FenceWish, Loss, OnBusy, Policy, Session, State, Work};
use super::super::step::{Effect, Event, Found, Purpose, step};
use super::super::time::BootNs;
use super::{boot, proof, session};

const FENCE: Effect = Effect::Freeze { purpose: Purpose::Fence };

#[track_caller]
fn then(s: &mut Session, event: Event, state: State, effects: &[Effect]) {
    let got = step(s, &event);
    assert_eq!(got.refused, None, "{event:?}");
    assert_eq!((s.state, got.effects.as_slice()), (state, effects), "{event:?}");
}

fn policy(on_busy: OnBusy) -> Policy {
    let (seal_after, kill_after) = (Duration::from_nanos(10), Duration::from_nanos(10));
    Policy { on_busy, seal_after, kill_after, ..Policy::default() }
}

/// Stopped, and busy since 2.
fn busy_under(on_busy: OnBusy) -> Session {
    let mut s = Session { policy: policy(on_busy), ..session(State::Active) };
    step(&mut s, &Event::LeaseLost { loss: Loss::Reboot, revoke: false });
    then(&mut s, frozen(), State::Fencing, &[Effect::ReadOnly]);
    let next = if on_busy == OnBusy::Hold { State::Preserved } else { State::Fenced };
    then(&mut s, busy(), next, &[Effect::Show]);
    s
}

fn frozen() -> Event {
    Event::Frozen { proof: proof(1) }
}

fn busy() -> Event {
    Event::Busy { proof: proof(2), holders: vec![] }
}

fn tick(at: u64) -> Event {
    Event::Tick { now: BootNs(at), held: false }
}

fn sealed() -> Event {
    Event::Sealed { proof: proof(12) }
}

fn unsealed() -> Event {
    Event::Unsealed { proof: proof(20) }
}

fn seal_failed() -> Event {
    Event::Failed { what: "seal".into(), why: "ENOTTY".into() }
}

fn readmitted(s: &Session) -> Event {
    Event::Readmitted {
        lease: LeaseId::from_u128(9),
        generation: Generation(s.generation.0 + 1),
        ends: BootNs(1),
        authorised_by: "op".into(),
        reason: "r".into(),
    }
}

fn asked(to: Fact) -> Event {
    let wish = FenceWish { to, on_busy: None };
    Event::FenceAsked { wish, by: "op".into(), reason: "why".into(), now: BootNs(3) }
}

/// Sealed by policy, and still busy.
fn sealed_session() -> Session {
    let mut s = busy_under(OnBusy::Seal);
    then(&mut s, tick(12), State::Fenced, &[Effect::Seal, Effect::ReadOnly]);
    then(&mut s, sealed(), State::Preserved, &[Effect::Show]);
    then(&mut s, busy(), State::Preserved, &[]);
    s
}

#[test]
fn a_busy_overlay_is_sealed_after_its_time_and_not_before() {
    let mut s = busy_under(OnBusy::Seal);
    then(&mut s, tick(11), State::Fenced, &[Effect::ReadOnly]);
    assert!(!s.seal);
    let got = step(&mut s, &tick(12));
    assert_eq!(got.effects, [Effect::Seal, Effect::ReadOnly]);
    assert!(got.record && s.seal, "the intent is in the record before the first flag");
    assert!(Effect::Seal.irreversible() && Effect::Unseal.irreversible());
    assert!(!s.facts.has(Fact::Sealed), "asked is not proved");
    then(&mut s, sealed(), State::Preserved, &[Effect::Show]);
    assert_eq!(s.facts.names(), ["frozen", "sealed"]);
    then(&mut s, tick(40), State::Preserved, &[Effect::ReadOnly]);
}

#[test]
fn timers_of_a_policy_that_was_not_chosen_never_run() {
    for on_busy in [OnBusy::Hold, OnBusy::Kill] {
        let mut s = busy_under(on_busy);
        let got = step(&mut s, &tick(1000));
        assert!(!got.effects.contains(&Effect::Seal), "{on_busy:?}: {got:?}");
        assert!(!s.seal);
    }
    let mut s = busy_under(OnBusy::Seal);
    let got = step(&mut s, &tick(1000));
    assert!(!got.effects.contains(&Effect::Kill), "{got:?}");
}

#[test]
fn read_only_makes_a_seal_needless() {
    let mut s = busy_under(OnBusy::Seal);
    let read_only = Event::ReadOnly { proof: proof(5), empty: false };
    then(&mut s, read_only, State::Preserved, &[Effect::Show]);
    then(&mut s, tick(1000), State::Preserved, &[]);
    assert!(!s.seal);
}

#[test]
fn an_operator_has_it_sealed_at_once() {
    let mut s = Session { policy: policy(OnBusy::Hold), ..session(State::Active) };
    step(&mut s, &asked(Fact::Sealed));
    then(&mut s, frozen(), State::Fencing, &[Effect::ReadOnly]);
    then(&mut s, busy(), State::Fenced, &[Effect::Seal]);
    then(&mut s, sealed(), State::Preserved, &[Effect::Show]);

    let mut s = busy_under(OnBusy::Hold);
    then(&mut s, asked(Fact::Sealed), State::Preserved, &[Effect::Seal, Effect::ReadOnly]);
    then(&mut s, sealed(), State::Preserved, &[]);
    // A kill that is asked for asks for no seal.
    let mut s = Session { policy: policy(OnBusy::Hold), ..session(State::Active) };
    step(&mut s, &asked(Fact::Killed));
    then(&mut s, frozen(), State::Fencing, &[Effect::ReadOnly]);
    then(&mut s, busy(), State::Fenced, &[Effect::Kill]);
    assert!(!s.seal);
}

#[test]
fn a_seal_that_fails_keeps_the_bytes_and_is_tried_again() {
    let mut s = busy_under(OnBusy::Seal);
    step(&mut s, &tick(12));
    then(&mut s, seal_failed(), State::Preserved, &[Effect::Show]);
    assert_eq!(s.trouble.as_deref(), Some("seal: ENOTTY"));
    // The answer to what was queued behind it starts no second try at once.
    then(&mut s, busy(), State::Preserved, &[]);
    let again = step(&mut s, &tick(13));
    assert_eq!(again.effects, [Effect::Seal, Effect::ReadOnly]);
    assert!(!again.record, "a repetition");
    then(&mut s, sealed(), State::Preserved, &[]);
    assert_eq!((s.trouble, s.facts.names()), (None, vec!["frozen", "sealed"]));
}

#[test]
fn no_seal_ahead_of_a_proved_freeze() {
    let mut s = busy_under(OnBusy::Seal);
    then(&mut s, Event::ForeignThaw { seen: "0".into() }, State::Fenced, &[FENCE]);
    then(&mut s, tick(1000), State::Fenced, &[FENCE]);
    assert!(!s.seal);
}

#[test]
fn a_seal_that_somebody_took_off_is_no_fact_and_is_done_again() {
    let mut s = sealed_session();
    then(&mut s, Event::SealLost { seen: "no flag".into() }, State::Preserved, &[]);
    assert_eq!(s.facts.names(), ["frozen"]);
    assert!(s.seal, "some of its flags may be there");
    then(&mut s, tick(1000), State::Preserved, &[Effect::Seal, Effect::ReadOnly]);
}

#[test]
fn readmission_takes_the_seal_off_first() {
    let mut s = sealed_session();
    let event = readmitted(&s);
    then(&mut s, event, State::Active, &[Effect::Unseal]);
    assert!(s.seal && !s.facts.has(Fact::Sealed));
    // Heard late; nothing runs on a sealed upper.
    then(&mut s, Event::Writable { proof: proof(3) }, State::Active, &[]);
    then(&mut s, sealed(), State::Active, &[]);
    assert!(s.facts.names().is_empty());
    then(&mut s, unsealed(), State::Active, &[Effect::ReadWrite]);
    assert!(!s.seal);
    let writable = Event::Writable { proof: proof(21) };
    then(&mut s, writable, State::Active, &[Effect::Show, Effect::Thaw]);
    then(&mut s, Event::Thawed { proof: proof(22) }, State::Active, &[]);
}

#[test]
fn a_seal_that_does_not_come_off_is_no_readmission() {
    let mut s = sealed_session();
    let event = readmitted(&s);
    then(&mut s, event, State::Active, &[Effect::Unseal]);
    let stuck = Event::Failed { what: "unseal".into(), why: "1 file is stuck".into() };
    let got = step(&mut s, &stuck);
    assert_eq!((s.state, got.effects.first()), (State::Fencing, Some(&FENCE)));
    assert!(s.seal, "what is left of it is known of");
    assert!(matches!(&s.loss, Some(Loss::ReadmitFailed { reason }) if reason.contains("stuck")));
    // Once it is stopped again it can be tried again.
    then(&mut s, frozen(), State::Fencing, &[Effect::ReadOnly]);
    then(&mut s, busy(), State::Fenced, &[Effect::Show]);
    let event = readmitted(&s);
    then(&mut s, event, State::Active, &[Effect::Unseal]);
}

#[test]
fn a_lease_lost_while_the_seal_comes_off_leaves_a_stopped_session() {
    let mut s = sealed_session();
    let event = readmitted(&s);
    then(&mut s, event, State::Active, &[Effect::Unseal]);
    step(&mut s, &Event::LeaseLost { loss: Loss::Reboot, revoke: false });
    then(&mut s, frozen(), State::Fencing, &[Effect::ReadOnly]);
    then(&mut s, busy(), State::Fenced, &[Effect::Show]);
    then(&mut s, unsealed(), State::Fenced, &[FENCE, Effect::ReadOnly]);
    assert!(!s.seal && !s.facts.has(Fact::Sealed));
}

#[test]
fn a_crash_takes_up_where_it_was() {
    let found = |lease_good| Found { boot: boot(1), lease_good, fence_stamped: false };
    let mut s = busy_under(OnBusy::Seal);
    step(&mut s, &tick(12));
    then(
        &mut s,
        Event::Recovered(found(false)),
        State::Fenced,
        &[FENCE, Effect::Revoke { reason: Loss::Reboot.to_string() }],
    );
    then(&mut s, tick(13), State::Fenced, &[Effect::Seal, Effect::ReadOnly]);
    then(&mut s, sealed(), State::Preserved, &[Effect::Show]);
    let event = readmitted(&s);
    then(&mut s, event, State::Active, &[Effect::Unseal]);
    assert_eq!(s.work, Some(Work::Resume));
    then(&mut s, Event::Recovered(found(true)), State::Active, &[Effect::Unseal]);
}

#[test]
fn a_sealed_session_is_removed_as_any_other() {
    let mut s = sealed_session();
    let disposition = Disposition::Discard { who: "op".into() };
    then(&mut s, Event::Disposed { disposition }, State::Deleting, &[Effect::Kill]);
    then(&mut s, Event::Killed { proof: proof(30) }, State::Deleting, &[Effect::ProveGone]);
    then(&mut s, Event::Gone { proof: proof(31) }, State::Deleting, &[Effect::Remove]);
    let mut s = sealed_session();
    let refused = step(
        &mut s,
        &Event::CloseAsked { mode: super::super::session::CloseMode::Discard, key: super::key(1) },
    );
    assert_eq!(refused.refused, Some(Code::LeaseLost));
}

#[test]
fn a_seal_stands_beside_the_other_facts() {
    use Fact::{Frozen, Gone, Killed, ReadOnly, Sealed};
    for (has, wanted, covers) in [
        (Fact::Gated, Fact::Gated, true),
        (Fact::Gated, Fact::Frozen, false),
        (Fact::Killed, Fact::Gated, false),
        (Fact::Gone, Fact::Gated, true),
        (Sealed, Sealed, true),
        (Sealed, Frozen, true),
        (Sealed, ReadOnly, false),
        (Killed, Sealed, false),
        (Killed, ReadOnly, true),
        (ReadOnly, Sealed, false),
        (ReadOnly, Frozen, true),
        (Frozen, ReadOnly, false),
        (Gone, Sealed, true),
    ] {
        assert_eq!(has.covers(wanted), covers, "{has} for {wanted}");
    }
}
