//! What others do to a stopped session, besides thaws and remounts.

use super::super::facts::{Fact, Holder};
use super::super::lease::Bound;
use super::super::session::{AfterDoubt, Loss, OnBusy, Policy, Session, State};
use super::super::step::{Effect, Event, Found, Purpose, step};
use super::super::time::BootNs;
use super::{boot, proof, session};

const FENCE: Effect = Effect::Freeze { purpose: Purpose::Fence };

fn stopped(policy: Policy, loss: Loss) -> Session {
    let mut s = Session { policy, ..session(State::Active) };
    step(&mut s, &Event::LeaseLost { loss, revoke: false });
    step(&mut s, &Event::Frozen { proof: proof(1) });
    step(&mut s, &Event::ReadOnly { proof: proof(2), empty: false });
    assert_eq!((s.state, s.facts.names()), (State::Preserved, vec!["frozen", "read-only"]));
    s
}

fn expired() -> Loss {
    Loss::Expired { bound: Bound::Holder }
}

fn second_overlay() -> Event {
    let holder = Holder {
        pid: 7,
        command: "mount".into(),
        how: Holder::OVERLAY.into(),
        what: "/mnt".into(),
        cgroup: String::new(),
        inside: false,
    };
    Event::Busy { proof: proof(3), holders: vec![holder] }
}

#[test]
fn who_was_moved_out_unsays_frozen_and_killed() {
    let mut s = stopped(Policy::default(), expired());
    step(&mut s, &Event::Killed { proof: proof(3) });
    let got = step(&mut s, &Event::MovedOut { strays: vec![] });
    assert_eq!((got.effects, got.record), (vec![FENCE], true));
    assert_eq!(s.facts.names(), ["read-only"]);
    let mut running = session(State::Active);
    assert_eq!(step(&mut running, &Event::MovedOut { strays: vec![] }).effects, []);
}

#[test]
fn a_second_overlay_unsays_read_only_and_is_nothing_to_seal_or_kill() {
    for on_busy in [OnBusy::Hold, OnBusy::Seal, OnBusy::Kill] {
        let mut s = stopped(Policy { on_busy, ..Policy::default() }, expired());
        let lost = Event::ReadOnlyLost { seen: "a second overlay".into() };
        assert_eq!(step(&mut s, &lost).effects, [FENCE, Effect::ReadOnly]);
        assert!(step(&mut s, &second_overlay()).record);
        assert!(!step(&mut s, &second_overlay()).record, "a repetition is no news");
        assert_eq!((s.busy_since, s.holders.len()), (None, 1));
        assert!(!s.facts.has(Fact::ReadOnly));
        let got = step(&mut s, &Event::Tick { now: BootNs(1 << 60), held: false });
        assert_eq!(got.effects, [Effect::ReadOnly]);
        step(&mut s, &Event::ReadOnly { proof: proof(4), empty: false });
        assert!(s.facts.has(Fact::ReadOnly) && s.holders.is_empty());
    }
}

#[test]
fn upon_a_changed_upper_no_policy_lets_it_run() {
    let policy = Policy { after_doubt: AfterDoubt::ResumeIfUnclaimed, ..Policy::default() };
    let mut s = stopped(policy, Loss::Doubt { cause: "no answer".into() });
    assert!(s.resumable_by_policy() && s.may_resume());
    let got = step(&mut s, &Event::UpperChanged { seen: "changed: f".into() });
    assert!(got.record && got.effects.is_empty());
    assert!(!s.resumable_by_policy() && !s.may_resume());
    assert_eq!(s.facts.names(), ["frozen", "read-only"], "what they say holds");
    assert!(s.readmittable().is_ok(), "a person may");
}

#[test]
fn a_seal_outlives_a_reboot_as_its_flags_do() {
    let mut s = stopped(Policy::default(), expired());
    step(&mut s, &Event::Sealed { proof: proof(3) });
    let found = Found { boot: boot(2), lease_good: false, fence_stamped: false };
    step(&mut s, &Event::Recovered(found));
    assert_eq!(s.facts.0.get(&Fact::Sealed), Some(&proof(3)));
    assert!(s.facts.has(Fact::Gone));
    step(&mut s, &Event::SealLost { seen: "no flag".into() });
    assert!(!s.facts.has(Fact::Sealed) && s.facts.has(Fact::Gone));
}
