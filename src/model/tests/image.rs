//! Stopping an image's file system, state by event: when it is done, when it is lifted, and what waits
//! for that.

use std::time::Duration;

use super::super::backing::Backing;
use super::super::facts::{Fact, Holder};
use super::super::ids::{Generation, LeaseId};
use super::super::limits::Size;
use super::super::session::{
    CloseMode, Disposition, FenceWish, Loss, OnBusy, Policy, Session, State, UpperFreeze, Work,
};
use super::super::step::{Effect, Event, Found, Purpose, step};
use super::super::time::BootNs;
use super::{boot, key, proof, session};

const FENCE: Effect = Effect::Freeze { purpose: Purpose::Fence };
const OFF: UpperFreeze = UpperFreeze::Off;
const ON: UpperFreeze = UpperFreeze::On;
const LIFTING: UpperFreeze = UpperFreeze::Lifting;

#[track_caller]
fn then(s: &mut Session, event: Event, freeze: UpperFreeze, effects: &[Effect]) {
    let got = step(s, &event);
    assert_eq!(got.refused, None, "{event:?}");
    assert_eq!((s.upper_freeze, got.effects.as_slice()), (freeze, effects), "{event:?}");
}

fn frozen() -> Event {
    Event::Frozen { proof: proof(1) }
}

fn busy() -> Event {
    Event::Busy { proof: proof(2), holders: vec![] }
}

fn stands() -> Event {
    Event::UpperFrozen { proof: proof(3) }
}

fn goes() -> Event {
    Event::UpperThawed { proof: proof(20) }
}

fn tick(at: u64) -> Event {
    Event::Tick { now: BootNs(at), held: false }
}

fn asked(to: Fact) -> Event {
    let wish = FenceWish { to, on_busy: None };
    Event::FenceAsked { wish, by: "op".into(), reason: "why".into(), now: BootNs(4) }
}

fn active(on_busy: OnBusy, upper: Backing) -> Session {
    let after = Duration::from_nanos(10);
    let policy = Policy { on_busy, seal_after: after, kill_after: after, ..Policy::default() };
    Session { policy, upper, ..session(State::Active) }
}

fn image() -> Backing {
    Backing::Image { size: Size(1 << 30) }
}

/// Stopped, busy since 2, its upper standing.
fn standing(on_busy: OnBusy) -> Session {
    let mut s = active(on_busy, image());
    step(&mut s, &Event::LeaseLost { loss: Loss::Reboot, revoke: false });
    then(&mut s, frozen(), OFF, &[Effect::ReadOnly]);
    then(&mut s, busy(), ON, &[Effect::Show, Effect::FreezeUpper]);
    then(&mut s, stands(), ON, &[]);
    assert_eq!(s.facts.names(), ["frozen", "upper-frozen"]);
    s
}

#[test]
fn it_stands_only_once_read_only_was_refused_and_only_in_an_image() {
    assert!(Effect::FreezeUpper.irreversible() && Effect::ThawUpper.irreversible());
    let s = standing(OnBusy::Hold);
    assert_eq!(s.state, State::Preserved);
    let mut s = active(OnBusy::Hold, Backing::Directory);
    step(&mut s, &Event::LeaseLost { loss: Loss::Reboot, revoke: false });
    step(&mut s, &frozen());
    then(&mut s, busy(), OFF, &[Effect::Show]);
    let mut s = active(OnBusy::Hold, image());
    step(&mut s, &Event::LeaseLost { loss: Loss::Reboot, revoke: false });
    step(&mut s, &frozen());
    let granted = Event::ReadOnly { proof: proof(2), empty: false };
    then(&mut s, granted, OFF, &[Effect::Show]);
}

/// It met an error: it takes no writes and refuses its sync for ever, so nothing waits for that.
#[test]
fn one_that_met_an_error_is_as_far_as_it_goes() {
    let refused = || Event::Busy { proof: proof(2), holders: vec![Holder::stopped_file_system()] };
    let mut s = active(OnBusy::Hold, image());
    step(&mut s, &Event::LeaseLost { loss: Loss::Reboot, revoke: false });
    step(&mut s, &frozen());
    then(&mut s, refused(), OFF, &[Effect::Show]);
    assert_eq!((s.state, s.facts.names()), (State::Preserved, vec!["frozen"]));
    then(&mut s, tick(9), OFF, &[Effect::ReadOnly]);
    let again = step(&mut s, &refused());
    assert_eq!((again.effects.as_slice(), again.record), ([].as_slice(), false), "no news");

    let mut s = active(OnBusy::Hold, image());
    step(&mut s, &asked(Fact::Killed));
    step(&mut s, &frozen());
    then(&mut s, refused(), OFF, &[Effect::Kill]);
    then(&mut s, Event::Killed { proof: proof(3) }, OFF, &[Effect::ReadOnly]);
    then(&mut s, refused(), OFF, &[Effect::Show]);
    assert_eq!(s.state, State::Preserved);

    for mode in [CloseMode::Keep, CloseMode::Checkpoint, CloseMode::Discard] {
        let mut s = active(OnBusy::Hold, image());
        step(&mut s, &Event::CloseAsked { mode, key: key(1) });
        step(&mut s, &Event::Killed { proof: proof(4) });
        then(&mut s, refused(), OFF, &[Effect::Release]);
        let told = s.trouble.clone().unwrap();
        assert!(told.contains("stopped after an error"), "{told}");
        step(&mut s, &Event::Released);
        let gone = mode == CloseMode::Discard;
        assert_eq!(s.state, if gone { State::Deleting } else { State::Preserved }, "{mode:?}");
    }
}

#[test]
fn a_tick_asks_again_whether_it_stands_and_lifts_nothing() {
    let mut s = standing(OnBusy::Hold);
    let got = step(&mut s, &tick(1000));
    assert_eq!((got.effects.as_slice(), got.record), ([Effect::FreezeUpper].as_slice(), false));
    then(&mut s, Event::UpperFreezeLost { seen: "ok".into() }, ON, &[]);
    then(&mut s, stands(), ON, &[]);
}

#[test]
fn what_would_wait_for_it_comes_after_it_goes() {
    let mut s = standing(OnBusy::Hold);
    then(&mut s, asked(Fact::Killed), LIFTING, &[Effect::ThawUpper]);
    // What was on its way proves nothing any more.
    step(&mut s, &stands());
    assert!(!s.facts.has(Fact::UpperFrozen));
    then(&mut s, goes(), OFF, &[Effect::Kill]);
    then(&mut s, Event::Killed { proof: proof(21) }, OFF, &[Effect::ReadOnly]);

    let mut s = standing(OnBusy::Hold);
    then(&mut s, asked(Fact::ReadOnly), LIFTING, &[Effect::ThawUpper]);
    then(&mut s, goes(), OFF, &[Effect::ReadOnly]);
    then(&mut s, busy(), ON, &[Effect::FreezeUpper]);

    let mut s = standing(OnBusy::Hold);
    then(&mut s, asked(Fact::Sealed), LIFTING, &[Effect::ThawUpper]);
    then(&mut s, goes(), OFF, &[Effect::Seal, Effect::ReadOnly]);

    let mut s = standing(OnBusy::Hold);
    then(&mut s, asked(Fact::Gone), LIFTING, &[Effect::ThawUpper]);
    then(&mut s, goes(), OFF, &[Effect::Kill]);
}

#[test]
fn policy_lifts_it_when_its_time_has_come() {
    for (on_busy, next) in
        [(OnBusy::Kill, vec![Effect::Kill]), (OnBusy::Seal, vec![Effect::Seal, Effect::ReadOnly])]
    {
        let mut s = standing(on_busy);
        let got = step(&mut s, &tick(11));
        assert_eq!(got.effects, [Effect::FreezeUpper], "{on_busy:?}");
        then(&mut s, tick(12), LIFTING, &[Effect::ThawUpper]);
        then(&mut s, goes(), OFF, &next);
    }
}

#[test]
fn a_removal_and_a_readmission_lift_it_first() {
    let mut s = standing(OnBusy::Hold);
    let disposition = Disposition::Discard { who: "op".into() };
    then(&mut s, Event::Disposed { disposition }, LIFTING, &[Effect::ThawUpper]);
    then(&mut s, goes(), OFF, &[Effect::Kill]);

    let mut s = standing(OnBusy::Hold);
    let readmitted = Event::Readmitted {
        lease: LeaseId::from_u128(9),
        generation: Generation(2),
        ends: BootNs(1),
        authorised_by: "op".into(),
        reason: "r".into(),
    };
    then(&mut s, readmitted, LIFTING, &[Effect::ThawUpper]);
    assert_eq!(s.work, Some(Work::Resume));
    then(&mut s, goes(), OFF, &[Effect::ReadWrite]);
}

#[test]
fn a_foreign_thaw_lifts_it_so_that_the_freeze_can_be_proved() {
    let mut s = standing(OnBusy::Hold);
    then(&mut s, Event::ForeignThaw { seen: "0".into() }, LIFTING, &[FENCE, Effect::ThawUpper]);
    then(&mut s, goes(), OFF, &[FENCE]);
    then(&mut s, frozen(), OFF, &[Effect::ReadOnly]);
    then(&mut s, busy(), ON, &[Effect::FreezeUpper]);
    let mut s = standing(OnBusy::Hold);
    then(&mut s, Event::FreezeLate { blockers: vec![] }, LIFTING, &[Effect::ThawUpper]);
}

#[test]
fn a_start_goes_on_with_what_was_under_way() {
    let same = Event::Recovered(Found { boot: boot(1), lease_good: false, fence_stamped: true });
    let mut s = standing(OnBusy::Hold);
    let got = step(&mut s, &same);
    assert_eq!(
        got.effects,
        [FENCE, Effect::Revoke { reason: Loss::Reboot.to_string() }, Effect::FreezeUpper]
    );
    then(&mut s, asked(Fact::Killed), LIFTING, &[Effect::ThawUpper]);
    let got = step(&mut s, &same);
    assert!(got.effects.contains(&Effect::ThawUpper), "{got:?}");
    then(&mut s, tick(5), LIFTING, &[Effect::ThawUpper]);
    let reboot = Event::Recovered(Found { boot: boot(2), lease_good: false, fence_stamped: false });
    step(&mut s, &reboot);
    assert_eq!(s.upper_freeze, OFF);
}

#[test]
fn what_is_not_to_be_published_stays_with_its_session() {
    let refused = |k| Event::CaptureRefused { key: key(k), why: "damaged".into() };
    let mut s = active(OnBusy::Hold, image());
    step(&mut s, &Event::CheckpointAsked { key: key(1), live: false });
    step(&mut s, &frozen());
    assert!(step(&mut s, &refused(2)).effects.is_empty(), "that of another");
    assert_eq!(step(&mut s, &refused(1)).effects, [Effect::Thaw]);
    step(&mut s, &Event::Thawed { proof: proof(3) });
    assert_eq!((s.state, &s.work, s.trouble.as_deref()), (State::Active, &None, Some("damaged")));
    step(&mut s, &Event::CloseAsked { mode: CloseMode::Checkpoint, key: key(3) });
    step(&mut s, &Event::Killed { proof: proof(4) });
    step(&mut s, &Event::ReadOnly { proof: proof(5), empty: false });
    assert_eq!(step(&mut s, &refused(3)).effects, [Effect::Release]);
    step(&mut s, &Event::Released);
    assert_eq!((s.state, &s.disposition), (State::Preserved, &None));
}

#[test]
fn one_that_cannot_be_stopped_is_tried_again_after_read_only() {
    let mut s = active(OnBusy::Hold, image());
    step(&mut s, &Event::LeaseLost { loss: Loss::Reboot, revoke: false });
    step(&mut s, &frozen());
    step(&mut s, &busy());
    let failed = Event::Failed { what: "freeze_upper".into(), why: "EIO".into() };
    then(&mut s, failed, OFF, &[]);
    assert_eq!((s.state, s.trouble.is_some()), (State::Preserved, true));
    then(&mut s, tick(9), OFF, &[Effect::ReadOnly]);
    then(&mut s, busy(), ON, &[Effect::FreezeUpper]);
}
