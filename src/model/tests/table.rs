//! State by event: what is done, exactly. The traces of flaws that the model check found are
//! here as well, each under the name of what it would have cost.

use super::super::code::Code;
use super::super::facts::Fact;
use super::super::head::{Head, HeadAt};
use super::super::ids::{Generation, LeaseId, Version};
use super::super::session::{
    CloseMode, Disposition, FenceWish, Loss, OnBusy, OnSlowFreeze, Policy, Session, Stage, State,
    Work,
};
use super::super::step::{Effect, Event, Found, MAX_TRIES, Published, Purpose, step};
use super::super::time::BootNs;
use super::super::workspace::Refusal;
use super::{boot, key, layer, proof, session};

const FENCE: Effect = Effect::Freeze { purpose: Purpose::Fence };

/// Feeds `event`, and says the state and the effects that must follow.
#[track_caller]
fn then(s: &mut Session, event: Event, state: State, effects: &[Effect]) {
    let got = step(s, &event);
    assert_eq!(got.refused, None, "{event:?}");
    assert_eq!((s.state, got.effects.as_slice()), (state, effects), "{event:?}");
}

#[track_caller]
fn refused(s: &mut Session, event: Event, code: Code) {
    let before = s.clone();
    assert_eq!(step(s, &event).refused, Some(code), "{event:?}");
    assert_eq!(*s, before);
}

fn operator() -> Loss {
    Loss::Operator { by: "op".into(), reason: "why".into() }
}

fn asked(to: Fact, on_busy: Option<OnBusy>) -> Event {
    let wish = FenceWish { to, on_busy };
    Event::FenceAsked { wish, by: "op".into(), reason: "why".into(), now: BootNs(1) }
}

fn lost(revoke: bool) -> Event {
    Event::LeaseLost { loss: operator(), revoke }
}

fn revoke() -> Effect {
    Effect::Revoke { reason: operator().to_string() }
}

fn frozen() -> Event {
    Event::Frozen { proof: proof(1) }
}

fn thawed() -> Event {
    Event::Thawed { proof: proof(8) }
}

fn read_only() -> Event {
    Event::ReadOnly { proof: proof(2), empty: false }
}

fn busy() -> Event {
    Event::Busy { proof: proof(2), holders: Vec::new() }
}

fn killed() -> Event {
    Event::Killed { proof: proof(3) }
}

fn gone() -> Event {
    Event::Gone { proof: proof(4) }
}

fn committed(n: u8) -> Published {
    let at = HeadAt { version: Version(u64::from(n)), head: Head(vec![layer(n)]) };
    Published::Committed { at }
}

fn refusal(code: Code) -> Published {
    Published::Refused { refusal: Refusal { code, current: None } }
}

fn answered(n: u128, outcome: Published) -> Event {
    Event::Published { key: key(n), outcome }
}

fn captured(n: u128, of: u8) -> Event {
    Event::Captured { key: key(n), layer: Some(layer(of)) }
}

fn capture(n: u128) -> Effect {
    Effect::Capture { key: key(n) }
}

fn publish(n: u128, of: u8) -> Effect {
    Effect::Publish { key: key(n), layer: layer(of) }
}

fn resolve(n: u128, of: u8) -> Effect {
    Effect::Resolve { key: key(n), layer: layer(of) }
}

fn failed(what: &str) -> Event {
    Event::Failed { what: what.into(), why: "EIO".into() }
}

fn tick() -> Event {
    Event::Tick { now: BootNs(10), held: false }
}

fn recovered(lease_good: bool, fence_stamped: bool) -> Event {
    Event::Recovered(Found { boot: boot(1), lease_good, fence_stamped })
}

fn close(s: &mut Session, mode: CloseMode) {
    let told = (mode == CloseMode::Checkpoint).then_some(Effect::Releasing);
    let effects: Vec<_> = told.into_iter().chain([Effect::Kill]).collect();
    then(s, Event::CloseAsked { mode, key: key(1) }, State::Releasing, &effects);
    then(s, killed(), State::Releasing, &[Effect::ReadOnly]);
}

/// A close up to its commit: clean, the lease not yet given back.
fn committed_close() -> Session {
    let mut s = session(State::Active);
    close(&mut s, CloseMode::Checkpoint);
    then(&mut s, read_only(), State::Releasing, &[capture(1)]);
    then(&mut s, captured(1, 5), State::Releasing, &[publish(1, 5)]);
    then(&mut s, answered(1, committed(5)), State::Releasing, &[Effect::Release]);
    assert_eq!(s.disposition, Some(Disposition::Clean));
    s
}

fn publishing() -> Session {
    let mut s = session(State::Active);
    let freeze = Effect::Freeze { purpose: Purpose::Checkpoint };
    then(&mut s, Event::CheckpointAsked { key: key(1), live: false }, State::Active, &[freeze]);
    then(&mut s, frozen(), State::Active, &[capture(1)]);
    then(&mut s, captured(1, 5), State::Active, &[Effect::Thaw]);
    // A thaw that failed is tried again; the layer waits for it.
    then(&mut s, failed("thaw"), State::Active, &[]);
    then(&mut s, tick(), State::Active, &[Effect::Thaw]);
    then(&mut s, thawed(), State::Active, &[publish(1, 5)]);
    s
}

fn preserved() -> Session {
    let mut s = session(State::Active);
    then(&mut s, lost(true), State::Fencing, &[FENCE, revoke(), Effect::Show]);
    then(&mut s, frozen(), State::Fencing, &[Effect::ReadOnly]);
    then(&mut s, read_only(), State::Preserved, &[Effect::Show]);
    s
}

#[test]
fn an_open_ends_active_or_leaves_nothing() {
    let mut s = session(State::Opening);
    then(&mut s, Event::Opened, State::Active, &[]);
    let mut s = session(State::Opening);
    let no = Event::OpenFailed { why: "no".into() };
    then(&mut s, no, State::Deleting, &[Effect::Release, Effect::Kill]);
    assert_eq!(s.disposition, Some(Disposition::NeverOpened));
    let mut s = session(State::Opening);
    then(&mut s, lost(true), State::Deleting, &[Effect::Kill, revoke()]);
    then(&mut s, Event::Opened, State::Deleting, &[]);
}

#[test]
fn a_fence_goes_from_freeze_to_preserved() {
    let mut s = preserved();
    assert_eq!(s.facts.names(), ["frozen", "read-only"]);
    then(&mut s, Event::LeaseLost { loss: Loss::Reboot, revoke: true }, State::Preserved, &[]);
    assert_eq!(s.loss, Some(operator()), "the first reason stays");
    refused(&mut s, Event::CheckpointAsked { key: key(2), live: false }, Code::LeaseLost);
}

#[test]
fn a_fence_meets_a_busy_overlay() {
    let mut s = session(State::Active);
    then(&mut s, lost(false), State::Fencing, &[FENCE, Effect::Show]);
    then(&mut s, frozen(), State::Fencing, &[Effect::ReadOnly]);
    then(&mut s, busy(), State::Preserved, &[Effect::Show]);
    then(&mut s, tick(), State::Preserved, &[Effect::ReadOnly]);

    let policy = Policy {
        on_busy: OnBusy::Kill,
        kill_after: std::time::Duration::from_nanos(8),
        ..Policy::default()
    };
    let mut s = Session { policy, ..session(State::Active) };
    then(&mut s, lost(false), State::Fencing, &[FENCE, Effect::Show]);
    then(&mut s, frozen(), State::Fencing, &[Effect::ReadOnly]);
    then(&mut s, busy(), State::Fenced, &[Effect::Show]);
    then(&mut s, Event::Tick { now: BootNs(9), held: false }, State::Fenced, &[Effect::ReadOnly]);
    then(&mut s, tick(), State::Fenced, &[Effect::Kill]);
    then(&mut s, killed(), State::Fenced, &[Effect::ReadOnly]);
    then(&mut s, read_only(), State::Preserved, &[Effect::Show]);
}

#[test]
fn a_slow_freeze_waits_or_kills() {
    for (on_slow_freeze, next) in [(OnSlowFreeze::Wait, FENCE), (OnSlowFreeze::Kill, Effect::Kill)]
    {
        let policy = Policy { on_slow_freeze, ..Policy::default() };
        let mut s = Session { policy, ..session(State::Active) };
        then(&mut s, lost(false), State::Fencing, &[FENCE, Effect::Show]);
        then(&mut s, Event::FreezeLate { blockers: Vec::new() }, State::Fencing, &[next]);
        assert!(s.facts.names().is_empty());
    }
    // A call that hangs for ever may end by a kill alone: a wish for it does not wait.
    let mut s = session(State::Active);
    then(&mut s, asked(Fact::Killed, None), State::Fencing, &[FENCE, revoke(), Effect::Show]);
    then(&mut s, tick(), State::Fencing, &[FENCE]);
    let late = || Event::FreezeLate { blockers: Vec::new() };
    then(&mut s, late(), State::Fencing, &[Effect::Kill]);
    then(&mut s, failed("kill"), State::Fencing, &[]);
    then(&mut s, tick(), State::Fencing, &[FENCE]);
    then(&mut s, late(), State::Fencing, &[Effect::Kill]);
    then(&mut s, killed(), State::Fenced, &[Effect::ReadOnly]);
    assert_eq!(s.facts.names(), ["killed"]);
}

#[test]
fn a_freeze_that_was_proved_is_not_asked_again_and_keeps_its_time() {
    let mut s = session(State::Active);
    then(&mut s, lost(false), State::Fencing, &[FENCE, Effect::Show]);
    then(&mut s, frozen(), State::Fencing, &[Effect::ReadOnly]);
    then(&mut s, Event::Frozen { proof: proof(7) }, State::Fencing, &[]);
    then(&mut s, Event::Tick { now: BootNs(9), held: false }, State::Fencing, &[Effect::ReadOnly]);
    assert_eq!(s.facts.0.get(&Fact::Frozen), Some(&proof(1)));
}

#[test]
fn what_contradicts_a_fact_takes_it_back() {
    let mut s = preserved();
    then(&mut s, Event::ForeignThaw { seen: "0".into() }, State::Preserved, &[FENCE]);
    assert!(!s.facts.has(Fact::Frozen));
    then(&mut s, frozen(), State::Preserved, &[]);
    let lost = Event::ReadOnlyLost { seen: "rw".into() };
    then(&mut s, lost, State::Preserved, &[FENCE, Effect::ReadOnly]);
    assert!(!s.facts.has(Fact::ReadOnly));
    then(&mut s, read_only(), State::Preserved, &[]);
    then(&mut s, Event::Thawed { proof: proof(9) }, State::Preserved, &[FENCE]);
    assert!(!s.facts.has(Fact::Frozen));
}

#[test]
fn a_remount_that_finished_after_the_loss_takes_read_only_back() {
    let mut s = preserved();
    let late = Event::Writable { proof: proof(9) };
    then(&mut s, late, State::Preserved, &[FENCE, Effect::ReadOnly]);
    assert!(!s.facts.has(Fact::ReadOnly));
}

#[test]
fn a_clean_close_ends_in_nothing() {
    let mut s = committed_close();
    then(&mut s, Event::Released, State::Deleting, &[Effect::Kill]);
    then(&mut s, killed(), State::Deleting, &[Effect::ProveGone]);
    then(&mut s, gone(), State::Deleting, &[Effect::Remove]);
    then(&mut s, Event::Removed { bytes: 1, entries: 1 }, State::Closed, &[]);
    then(&mut s, lost(true), State::Closed, &[]);
}

#[test]
fn a_close_that_is_refused_or_unknown_keeps_the_bytes() {
    for outcome in [refusal(Code::VersionMismatch), Published::Unknown { why: "lost".into() }] {
        let unknown = matches!(outcome, Published::Unknown { .. });
        let mut s = session(State::Active);
        close(&mut s, CloseMode::Checkpoint);
        then(&mut s, read_only(), State::Releasing, &[capture(1)]);
        then(&mut s, captured(1, 5), State::Releasing, &[publish(1, 5)]);
        then(&mut s, answered(1, outcome), State::Releasing, &[Effect::Release]);
        then(&mut s, Event::Released, State::Preserved, &[Effect::Show]);
        assert_eq!(s.unknown.len(), usize::from(unknown));
        let gave_up = Event::Disposed { disposition: Disposition::Discard { who: "op".into() } };
        if unknown {
            refused(&mut s, gave_up.clone(), Code::UnknownPublication);
            then(&mut s, tick(), State::Preserved, &[resolve(1, 5)]);
            then(&mut s, answered(1, refusal(Code::KeyBuried)), State::Preserved, &[]);
        }
        then(&mut s, gave_up, State::Deleting, &[Effect::Kill]);
    }
}

#[test]
fn a_close_that_turns_out_to_be_committed_ends_clean_after_all() {
    let unknown = || {
        let mut s = session(State::Active);
        close(&mut s, CloseMode::Checkpoint);
        then(&mut s, read_only(), State::Releasing, &[capture(1)]);
        then(&mut s, captured(1, 5), State::Releasing, &[publish(1, 5)]);
        let lost = Published::Unknown { why: "lost".into() };
        then(&mut s, answered(1, lost), State::Releasing, &[Effect::Release]);
        assert!(s.trouble.as_ref().unwrap().contains(&key(1).to_string()), "{:?}", s.trouble);
        then(&mut s, Event::Released, State::Preserved, &[Effect::Show]);
        then(&mut s, tick(), State::Preserved, &[resolve(1, 5)]);
        s
    };
    let mut s = unknown();
    then(&mut s, answered(1, committed(5)), State::Deleting, &[Effect::Kill]);
    assert_eq!((&s.disposition, &s.trouble), (&Some(Disposition::Clean), &None));
    let mut s = unknown();
    then(&mut s, answered(1, refusal(Code::KeyBuried)), State::Preserved, &[]);
    assert!(s.trouble.as_ref().unwrap().contains("was not committed"), "{:?}", s.trouble);
    // Somebody wants it kept, somebody may have written to it since, or it is another one's answer.
    let mut s = unknown();
    then(&mut s, Event::Kept { until_ms: 1, by: "op".into() }, State::Preserved, &[]);
    then(&mut s, answered(1, committed(5)), State::Preserved, &[]);
    let mut s = unknown();
    let written = Event::ReadOnlyLost { seen: "rw".into() };
    then(&mut s, written, State::Preserved, &[FENCE, Effect::ReadOnly]);
    then(&mut s, read_only(), State::Preserved, &[]);
    then(&mut s, answered(1, committed(5)), State::Preserved, &[]);
    let mut s = unknown();
    s.altered = Some("seen".into());
    then(&mut s, answered(1, committed(5)), State::Preserved, &[]);
    let mut s = unknown();
    then(&mut s, answered(2, committed(5)), State::Preserved, &[]);
}

#[test]
fn a_readmission_wants_a_new_generation_and_thaws_last() {
    let readmit = |g| Event::Readmitted {
        lease: LeaseId::from_u128(2),
        generation: Generation(g),
        ends: BootNs(1),
        authorised_by: "op".into(),
        reason: "r".into(),
    };
    let mut s = preserved();
    refused(&mut s, readmit(1), Code::StaleGeneration);
    then(&mut s, readmit(2), State::Active, &[Effect::ReadWrite]);
    assert!(s.facts.names().is_empty() && s.loss.is_none());
    then(&mut s, Event::Writable { proof: proof(9) }, State::Active, &[Effect::Show, Effect::Thaw]);
    assert_eq!(s.may_start_work(), Err(Code::Busy));
    then(&mut s, Event::Thawed { proof: proof(9) }, State::Active, &[]);
    assert_eq!(s.may_start_work(), Ok(()));
    let mut s = preserved();
    then(&mut s, killed(), State::Preserved, &[Effect::ReadOnly]);
    refused(&mut s, readmit(2), Code::WrongState);
}

#[test]
fn a_restart_does_pending_things_again() {
    let mut s = session(State::Active);
    then(&mut s, recovered(true, false), State::Active, &[Effect::Thaw, Effect::Show]);
    let mut s = publishing();
    then(&mut s, recovered(true, false), State::Active, &[resolve(1, 5)]);
    let mut s = publishing();
    then(&mut s, recovered(false, false), State::Fencing, &[FENCE, Effect::Show]);
    assert!(s.resumable_by_policy() || s.unknown.contains_key(&key(1)));
    // The authority may not have heard of a fence that was recorded.
    let mut s = preserved();
    then(&mut s, recovered(false, true), State::Preserved, &[FENCE, revoke()]);
    let mut s = session(State::Deleting);
    then(&mut s, recovered(false, false), State::Deleting, &[Effect::Kill]);
}

#[test]
fn a_fence_whose_record_was_lost_is_not_undone_by_policy() {
    for lease_good in [true, false] {
        let mut s = session(State::Active);
        step(&mut s, &recovered(lease_good, true));
        assert_eq!(s.state, State::Fencing);
        assert!(matches!(s.loss, Some(Loss::Operator { .. })));
        then(&mut s, frozen(), State::Fencing, &[Effect::ReadOnly]);
        then(&mut s, read_only(), State::Preserved, &[Effect::Show]);
        assert!(!s.resumable_by_policy());
    }
}

#[test]
fn a_reboot_preserves_and_resolves() {
    let mut s = publishing();
    let found = Found { boot: boot(2), lease_good: false, fence_stamped: false };
    let told = Effect::Revoke { reason: Loss::Reboot.to_string() };
    then(&mut s, Event::Recovered(found), State::Preserved, &[resolve(1, 5), told]);
    assert_eq!(s.facts.names(), ["frozen", "read-only", "killed", "gone"]);
}

#[test]
fn a_failure_while_a_layer_is_offered_does_not_forget_the_offer() {
    let mut s = publishing();
    then(&mut s, failed("publish"), State::Active, &[]);
    then(&mut s, tick(), State::Active, &[]);
    then(&mut s, answered(1, Published::Unknown { why: "lost".into() }), State::Active, &[]);
    assert_eq!(s.unknown.get(&key(1)), Some(&layer(5)));
}

#[test]
fn a_stage_done_twice_does_not_set_a_close_back() {
    for again in [read_only(), busy(), killed(), Event::Released] {
        let mut s = session(State::Active);
        close(&mut s, CloseMode::Checkpoint);
        then(&mut s, read_only(), State::Releasing, &[capture(1)]);
        then(&mut s, captured(1, 5), State::Releasing, &[publish(1, 5)]);
        let offered = Stage::Publishing { layer: layer(5) };
        then(&mut s, again, State::Releasing, &[]);
        let work = Work::Close { mode: CloseMode::Checkpoint, key: key(1), stage: offered };
        assert_eq!(s.work, Some(work));
    }
}

#[test]
fn a_late_capture_never_stands_for_another_publication() {
    let mut s = session(State::Active);
    close(&mut s, CloseMode::Checkpoint);
    then(&mut s, read_only(), State::Releasing, &[capture(1)]);
    // Taken for checkpoint 7, while processes lived.
    then(&mut s, captured(7, 4), State::Releasing, &[]);
    then(&mut s, captured(1, 5), State::Releasing, &[publish(1, 5)]);
}

#[test]
fn a_close_is_not_clean_once_the_overlay_was_writable_again() {
    let again = || Event::ReadOnlyLost { seen: "rw".into() };
    // Before the capture was committed.
    let mut s = session(State::Active);
    close(&mut s, CloseMode::Checkpoint);
    then(&mut s, read_only(), State::Releasing, &[capture(1)]);
    then(&mut s, again(), State::Releasing, &[]);
    then(&mut s, captured(1, 5), State::Releasing, &[publish(1, 5)]);
    then(&mut s, answered(1, committed(5)), State::Releasing, &[Effect::Release]);
    then(&mut s, Event::Released, State::Preserved, &[Effect::Show]);
    // After it, and on the way out.
    let mut s = committed_close();
    then(&mut s, again(), State::Releasing, &[]);
    then(&mut s, Event::Released, State::Preserved, &[Effect::Show]);
    let mut s = committed_close();
    then(&mut s, Event::Released, State::Deleting, &[Effect::Kill]);
    then(&mut s, again(), State::Preserved, &[Effect::ReadOnly, Effect::Show]);
    assert_eq!(s.disposition, None);
    // Found by a refused remount after the lease was lost.
    let mut s = committed_close();
    then(&mut s, lost(false), State::Fencing, &[FENCE, Effect::Show]);
    then(&mut s, frozen(), State::Fencing, &[Effect::ReadOnly]);
    then(&mut s, busy(), State::Preserved, &[Effect::Show]);
    assert_eq!((s.disposition, s.facts.has(Fact::ReadOnly)), (None, false));
}

#[test]
fn nothing_is_unchanged_while_a_publication_is_unknown() {
    // The head may hold layer 6; the upper is back at layer 5, which was committed before.
    let mut s = Session { own_layer: Some(layer(5)), ..session(State::Active) };
    s.unknown.insert(key(9), layer(6));
    close(&mut s, CloseMode::Checkpoint);
    then(&mut s, read_only(), State::Releasing, &[capture(1)]);
    then(&mut s, captured(1, 5), State::Releasing, &[publish(1, 5)]);
}

#[test]
fn a_removal_resolves_what_is_unknown_instead_of_turning_in_circles() {
    let mut s = Session { disposition: Some(Disposition::Clean), ..session(State::Deleting) };
    s.unknown.insert(key(9), layer(6));
    then(&mut s, killed(), State::Deleting, &[Effect::ProveGone]);
    then(&mut s, gone(), State::Deleting, &[resolve(9, 6)]);
    then(&mut s, answered(9, refusal(Code::KeyBuried)), State::Deleting, &[]);
    then(&mut s, tick(), State::Deleting, &[Effect::Remove]);
}

#[test]
fn a_kill_by_policy_is_tried_until_it_is_done() {
    let mut s = session(State::Active);
    then(&mut s, asked(Fact::Killed, None), State::Fencing, &[FENCE, revoke(), Effect::Show]);
    then(&mut s, frozen(), State::Fencing, &[Effect::ReadOnly]);
    then(&mut s, read_only(), State::Fenced, &[Effect::Kill]);
    then(&mut s, failed("kill"), State::Fenced, &[]);
    then(&mut s, tick(), State::Fenced, &[Effect::Kill]);
    then(&mut s, killed(), State::Fenced, &[Effect::ReadOnly]);
    then(&mut s, read_only(), State::Preserved, &[Effect::Show]);
}

#[test]
fn an_operators_wish_is_for_one_fence() {
    let mut s = session(State::Active);
    then(
        &mut s,
        asked(Fact::Frozen, Some(OnBusy::Kill)),
        State::Fencing,
        &[FENCE, revoke(), Effect::Show],
    );
    then(&mut s, frozen(), State::Preserved, &[Effect::Show]);
    // More is wanted now: it is gone for at once, and recorded.
    let step = step(&mut s, &asked(Fact::ReadOnly, None));
    assert_eq!((step.effects.as_slice(), step.record), (&[Effect::ReadOnly][..], true));
    assert_eq!(s.on_busy(), OnBusy::Hold);
    then(&mut s, asked(Fact::ReadOnly, Some(OnBusy::Kill)), State::Preserved, &[Effect::ReadOnly]);
    let readmitted = Event::Readmitted {
        lease: LeaseId::from_u128(9),
        generation: Generation(s.generation.0 + 1),
        ends: BootNs(1),
        authorised_by: "op".into(),
        reason: "r".into(),
    };
    then(&mut s, readmitted, State::Active, &[Effect::ReadWrite]);
    assert_eq!(s.fence, FenceWish::default());
    for state in [State::Deleting, State::Closed, State::Quarantined] {
        refused(&mut session(state), asked(Fact::Killed, None), Code::WrongState);
    }
}

#[test]
fn a_removal_that_fails_for_good_is_quarantined() {
    let mut s = session(State::Deleting);
    for _ in 1..MAX_TRIES {
        then(&mut s, failed("remove"), State::Deleting, &[]);
    }
    then(&mut s, failed("remove"), State::Quarantined, &[]);
    then(&mut s, tick(), State::Quarantined, &[]);
}

#[test]
fn a_removal_that_waits_is_no_removal_that_fails() {
    for what in ["kill", "prove_gone", "wait_for_readers"] {
        let mut s = session(State::Deleting);
        for _ in 0..3 * MAX_TRIES {
            then(&mut s, failed(what), State::Deleting, &[]);
        }
        assert_eq!(s.tries, 0, "{what}");
        assert!(s.trouble.as_ref().is_some_and(|why| why.starts_with(what)), "it is shown");
    }
}

#[test]
fn grace_counts_witnessed_time_and_waits_for_keep_and_unknown() {
    let mut s = preserved();
    s.policy.grace = std::time::Duration::from_millis(5);
    let sweep = |may_delete| Event::Witnessed { add_ms: 5, may_delete };
    then(&mut s, sweep(false), State::Preserved, &[]);
    then(&mut s, Event::Kept { until_ms: 12, by: "op".into() }, State::Preserved, &[]);
    then(&mut s, sweep(true), State::Preserved, &[]);
    s.unknown.insert(key(1), layer(1));
    for _ in 0..3 {
        then(&mut s, sweep(true), State::Preserved, &[]);
    }
    // Of the time meanwhile nothing counted: whoever resolves it finds what was left of grace.
    assert_eq!(s.witnessed.as_millis(), 10);
    s.unknown.clear();
    then(&mut s, sweep(true), State::Deleting, &[Effect::Kill]);
    assert_eq!(s.disposition, Some(Disposition::Grace));
}

#[test]
fn a_close_that_would_keep_nothing_is_clean() {
    for (empty, published, wanted) in [
        (true, false, State::Deleting),
        (false, false, State::Preserved),
        (true, true, State::Preserved),
    ] {
        let mut s = session(State::Active);
        s.own_layer = published.then(|| layer(4));
        close(&mut s, CloseMode::Keep);
        let read_only = Event::ReadOnly { proof: proof(2), empty };
        then(&mut s, read_only, State::Releasing, &[Effect::Release]);
        step(&mut s, &Event::Released);
        assert_eq!(s.state, wanted, "empty {empty}, published {published}");
    }
}

#[test]
fn a_late_renewal_shows_nothing_of_a_closed_session() {
    let mut s = session(State::Closed);
    s.doubt = Some("the authority was silent".into());
    then(&mut s, Event::Renewed, State::Closed, &[]);
}

#[test]
fn a_drained_session_leaves_nothing_but_its_upper() {
    let asked = || Event::FenceAsked {
        wish: FenceWish { to: Fact::Gone, on_busy: None },
        by: "op".into(),
        reason: "why".into(),
        now: BootNs(10),
    };
    // One that ended by a close.
    let mut s = session(State::Active);
    close(&mut s, CloseMode::Keep);
    let read_only = Event::ReadOnly { proof: proof(2), empty: false };
    then(&mut s, read_only, State::Releasing, &[Effect::Release]);
    then(&mut s, Event::Released, State::Preserved, &[Effect::Show]);
    then(&mut s, asked(), State::Preserved, &[Effect::ProveGone]);
    then(&mut s, failed("prove_gone"), State::Preserved, &[]);
    then(&mut s, tick(), State::Preserved, &[Effect::ProveGone]);
    then(&mut s, gone(), State::Preserved, &[]);
    then(&mut s, tick(), State::Preserved, &[]);
    assert!(s.disposition.is_none(), "its bytes are kept");
    // One that was stopped before, frozen, and is held from outside.
    let mut s = session(State::Preserved);
    s.facts.prove(Fact::Frozen, proof(1));
    then(&mut s, asked(), State::Preserved, &[Effect::Kill]);
    then(&mut s, killed(), State::Preserved, &[Effect::ReadOnly]);
    let busy = Event::Busy { proof: proof(2), holders: vec![] };
    then(&mut s, busy, State::Fenced, &[Effect::ProveGone]);
    then(&mut s, gone(), State::Preserved, &[]);
    assert!(s.facts.has(Fact::Killed) && !s.safe_to_delete());
    // One that runs, with something under way.
    let mut s = session(State::Active);
    then(&mut s, asked(), State::Fencing, &[FENCE, revoke(), Effect::Show]);
    then(&mut s, frozen(), State::Fencing, &[Effect::ReadOnly]);
    then(&mut s, self::read_only(), State::Fenced, &[Effect::Kill]);
    then(&mut s, killed(), State::Fenced, &[Effect::ReadOnly]);
    then(&mut s, self::read_only(), State::Fenced, &[Effect::ProveGone]);
    then(&mut s, gone(), State::Preserved, &[]);
}

/// The breaker: what is asked for waits, and nothing else does.
#[test]
fn an_open_breaker_keeps_kill_and_removal_back() {
    let held = || Event::Tick { now: BootNs(10), held: true };
    let mut s = session(State::Active);
    then(&mut s, asked(Fact::Killed, None), State::Fencing, &[FENCE, revoke(), Effect::Show]);
    then(&mut s, held(), State::Fencing, &[FENCE]);
    then(&mut s, frozen(), State::Fencing, &[Effect::ReadOnly]);
    then(&mut s, held(), State::Fencing, &[Effect::ReadOnly]);
    then(&mut s, read_only(), State::Fenced, &[Effect::Kill]);
    let news = step(&mut s, &Event::Held { what: "kill".into() });
    assert!(news.record && news.effects.is_empty());
    assert!(s.trouble.as_deref().unwrap().contains("breaker"), "{:?}", s.trouble);
    assert!(!step(&mut s, &Event::Held { what: "kill".into() }).record, "once is enough");
    then(&mut s, held(), State::Fenced, &[]);
    then(&mut s, tick(), State::Fenced, &[Effect::Kill]);
    then(&mut s, killed(), State::Fenced, &[Effect::ReadOnly]);
    then(&mut s, read_only(), State::Preserved, &[Effect::Show]);

    let discard = || Disposition::Discard { who: "op".into() };
    then(&mut s, Event::Disposed { disposition: discard() }, State::Deleting, &[Effect::Kill]);
    for _ in 0..=MAX_TRIES {
        then(&mut s, Event::Held { what: "remove".into() }, State::Deleting, &[]);
        then(&mut s, held(), State::Deleting, &[]);
    }
    assert_eq!(s.tries, 0, "waiting is no failed removal");
    then(&mut s, tick(), State::Deleting, &[Effect::ProveGone]);
}

#[test]
fn i7_a_key_that_is_not_resolved_yet_ends_nothing_else() {
    let failed = || Event::Failed { what: Effect::RESOLVE.into(), why: "lost".into() };
    let mut s = session(State::Active);
    s.unknown.insert(key(1), layer(1));
    then(
        &mut s,
        Event::CheckpointAsked { key: key(2), live: false },
        State::Active,
        &[Effect::Freeze { purpose: Purpose::Checkpoint }],
    );
    then(&mut s, failed(), State::Active, &[]);
    then(&mut s, frozen(), State::Active, &[capture(2)]);
    then(&mut s, failed(), State::Active, &[]);
    then(&mut s, captured(2, 5), State::Active, &[Effect::Thaw]);
    then(&mut s, thawed(), State::Active, &[publish(2, 5)]);
    then(&mut s, answered(2, committed(5)), State::Active, &[]);
    assert_eq!(s.unknown.keys().collect::<Vec<_>>(), [&key(1)]);
}

#[test]
fn i7_what_was_prepared_and_given_up_is_ended_at_the_authority() {
    let prepared = || {
        let mut s = session(State::Active);
        step(&mut s, &Event::CheckpointAsked { key: key(1), live: false });
        step(&mut s, &frozen());
        then(&mut s, captured(1, 5), State::Active, &[Effect::Thaw]);
        s
    };
    let mut s = prepared();
    let found = Found { boot: s.boot, lease_good: true, fence_stamped: false };
    let event = Event::Recovered(found);
    then(&mut s, event, State::Active, &[Effect::Thaw, resolve(1, 5)]);
    then(&mut s, answered(1, refusal(Code::KeyBuried)), State::Active, &[]);
    then(&mut s, thawed(), State::Active, &[]);
    assert!(s.unknown.is_empty() && s.work.is_none());
    let mut s = prepared();
    step(&mut s, &lost(true));
    assert_eq!(s.unknown.keys().collect::<Vec<_>>(), [&key(1)]);
    assert!(!s.safe_to_delete());
}
