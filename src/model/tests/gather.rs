//! A checkpoint in two steps: gathered while the session stands, packed while it runs.

use super::super::code::Code;
use super::super::facts::Fact;
use super::super::ids::PublicationKey;
use super::super::lease::Bound;
use super::super::session::{CloseMode, Loss, Session, Stage, State, Work};
use super::super::step::{Effect, Event, Found, Published, Purpose, step};
use super::super::time::BootNs;
use super::{boot, key, layer, proof, session};

const PACK: Effect = Effect::Pack { key: PublicationKey::from_u128(1), live: false };

#[track_caller]
fn then(s: &mut Session, event: Event, state: State, effects: &[Effect]) {
    let got = step(s, &event);
    assert_eq!(got.refused, None, "{event:?}");
    assert_eq!((s.state, got.effects.as_slice()), (state, effects), "{event:?}");
}

fn tick() -> Event {
    Event::Tick { now: BootNs(10), held: false }
}

fn failed(what: &str) -> Event {
    Event::Failed { what: what.into(), why: "EIO".into() }
}

fn thawed() -> Event {
    Event::Thawed { proof: proof(8) }
}

fn captured(n: u128) -> Event {
    Event::Captured { key: key(n), layer: Some(layer(5)) }
}

fn stage(s: &Session) -> Option<Stage> {
    match s.work {
        Some(Work::Checkpoint { stage, .. }) => Some(stage),
        _ => None,
    }
}

/// A checkpoint whose upper is about to be read.
fn capturing() -> Session {
    let mut s = session(State::Active);
    let freeze = Effect::Freeze { purpose: Purpose::Checkpoint };
    then(&mut s, Event::CheckpointAsked { key: key(1), live: false }, State::Active, &[freeze]);
    let capture = Effect::Capture { key: key(1) };
    then(&mut s, Event::Frozen { proof: proof(1) }, State::Active, &[capture]);
    s
}

fn packing() -> Session {
    let mut s = capturing();
    then(&mut s, Event::Gathered { key: key(1) }, State::Active, &[Effect::Thaw]);
    then(&mut s, thawed(), State::Active, &[PACK]);
    assert!(s.packs(key(1)) && !s.packs(key(2)));
    s
}

#[test]
fn it_is_thawed_once_all_is_gathered_and_published_once_it_is_packed() {
    let mut s = capturing();
    assert!(!s.wants_gathered(key(1)));
    then(&mut s, Event::Gathered { key: key(2) }, State::Active, &[]);
    then(&mut s, Event::Gathered { key: key(1) }, State::Active, &[Effect::Thaw]);
    assert!(s.wants_gathered(key(1)) && !s.packs(key(1)));
    // A thaw that failed is tried again; what was gathered waits for it.
    then(&mut s, failed("thaw"), State::Active, &[]);
    then(&mut s, tick(), State::Active, &[Effect::Thaw]);
    then(&mut s, thawed(), State::Active, &[PACK]);
    // Nothing of this is done twice, and nobody else's failure ends it.
    for event in [tick(), thawed(), Event::Gathered { key: key(1) }, failed("show"), captured(2)] {
        then(&mut s, event, State::Active, &[]);
        assert_eq!(stage(&s), Some(Stage::Packing));
    }
    let again = step(&mut s, &Event::CheckpointAsked { key: key(2), live: false });
    assert_eq!(again.refused, Some(Code::Busy));
    let publish = Effect::Publish { key: key(1), layer: layer(5) };
    then(&mut s, captured(1), State::Active, &[publish]);
    assert_eq!(stage(&s), Some(Stage::Publishing { layer: layer(5) }));
}

#[test]
fn what_was_published_before_is_not_published_again() {
    let mut s = packing();
    s.own_layer = Some(layer(5));
    then(&mut s, captured(1), State::Active, &[]);
    assert_eq!((s.work, s.trouble), (None, None));
    // Not while an earlier publication may have changed that.
    let mut s = packing();
    s.own_layer = Some(layer(5));
    s.unknown.insert(key(9), layer(6));
    let publish = Effect::Publish { key: key(1), layer: layer(5) };
    then(&mut s, captured(1), State::Active, &[publish]);
}

#[test]
fn who_is_thawed_by_others_while_it_is_gathered_gives_it_up() {
    let thaw = || Event::ForeignThaw { seen: "0".into() };
    let mut s = capturing();
    then(&mut s, thaw(), State::Active, &[]);
    then(&mut s, Event::Gathered { key: key(1) }, State::Active, &[Effect::Thaw]);
    assert!(!s.wants_gathered(key(1)));
    then(&mut s, thawed(), State::Active, &[]);
    assert!(s.work.is_none() && s.trouble.as_deref().unwrap().contains("somebody else"));
    // Once it is gathered, nobody spoils it any more.
    let mut s = capturing();
    then(&mut s, Event::Gathered { key: key(1) }, State::Active, &[Effect::Thaw]);
    then(&mut s, thaw(), State::Active, &[]);
    then(&mut s, thawed(), State::Active, &[PACK]);
    then(&mut s, thaw(), State::Active, &[]);
    then(&mut s, captured(1), State::Active, &[Effect::Publish { key: key(1), layer: layer(5) }]);
}

#[test]
fn a_layer_that_could_not_be_made_leaves_the_session_running() {
    let mut s = packing();
    then(&mut s, failed("pack"), State::Active, &[]);
    assert_eq!((s.work.clone(), s.trouble.as_deref()), (None, Some("pack: EIO")));
    then(&mut s, captured(1), State::Active, &[]);
}

#[test]
fn a_lease_that_is_lost_while_it_is_packed_publishes_nothing() {
    for with in [capturing as fn() -> Session, packing] {
        let mut s = with();
        let lost = Event::LeaseLost { loss: Loss::Reboot, revoke: false };
        let fence = Effect::Freeze { purpose: Purpose::Fence };
        then(&mut s, lost, State::Fencing, &[fence, Effect::Show]);
        for event in [Event::Gathered { key: key(1) }, captured(1), failed("pack")] {
            then(&mut s, event, State::Fencing, &[]);
        }
        assert!(s.unknown.is_empty() && !s.wants_gathered(key(1)));
        then(&mut s, Event::Frozen { proof: proof(1) }, State::Fencing, &[Effect::ReadOnly]);
        assert!(s.facts.has(Fact::Frozen));
    }
}

#[test]
fn an_agent_that_died_on_the_way_gives_it_up_and_thaws() {
    let gathered = || {
        let mut s = capturing();
        then(&mut s, Event::Gathered { key: key(1) }, State::Active, &[Effect::Thaw]);
        s
    };
    for mut s in [gathered(), packing()] {
        let found = Found { boot: boot(1), lease_good: true, fence_stamped: false };
        then(&mut s, Event::Recovered(found), State::Active, &[Effect::Thaw]);
        then(&mut s, thawed(), State::Active, &[]);
        assert!(s.work.is_none() && s.unknown.is_empty());
        assert!(s.trouble.unwrap().contains("the agent started again"));
    }
}

#[test]
fn a_closing_session_is_never_thawed_for_it() {
    let mut s = session(State::Active);
    step(&mut s, &Event::CloseAsked { mode: CloseMode::Checkpoint, key: key(1) });
    step(&mut s, &Event::Killed { proof: proof(3) });
    let ro = Event::ReadOnly { proof: proof(2), empty: false };
    then(&mut s, ro, State::Releasing, &[Effect::Capture { key: key(1) }]);
    then(&mut s, Event::Gathered { key: key(1) }, State::Releasing, &[]);
    then(
        &mut s,
        captured(1),
        State::Releasing,
        &[Effect::Publish { key: key(1), layer: layer(5) }],
    );
    then(
        &mut s,
        Event::Published { key: key(1), outcome: Published::Unknown { why: "lost".into() } },
        State::Releasing,
        &[Effect::Release],
    );
}

#[test]
fn records_from_before_there_were_two_steps_are_read() {
    let hex = layer(5).hex();
    for (text, want) in [
        ("\"stopping\"".to_owned(), Stage::Stopping),
        ("\"capturing\"".to_owned(), Stage::Capturing),
        ("{\"thawing\":{\"layer\":null}}".to_owned(), Stage::Thawing { layer: None }),
        (
            format!("{{\"thawing\":{{\"layer\":\"sha256:{hex}\"}}}}"),
            Stage::Thawing { layer: Some(layer(5)) },
        ),
        (
            format!("{{\"publishing\":{{\"layer\":\"sha256:{hex}\"}}}}"),
            Stage::Publishing { layer: layer(5) },
        ),
        ("\"ending\"".to_owned(), Stage::Ending),
    ] {
        let id = key(1);
        let text = format!(
            "{{\"job\":\"checkpoint\",\"key\":{},\"stage\":{text},\"tainted\":true}}",
            serde_json::to_string(&id).unwrap()
        );
        let work: Work = serde_json::from_str(&text).unwrap();
        assert_eq!(work, Work::Checkpoint { key: id, stage: want, tainted: true });
    }
}

#[test]
fn a_live_one_stops_nobody_and_is_given_up_if_the_upper_is_not_of_one_moment() {
    let live = || {
        let mut s = session(State::Active);
        let pack = Effect::Pack { key: key(1), live: true };
        then(&mut s, Event::CheckpointAsked { key: key(1), live: true }, State::Active, &[pack]);
        assert!(s.packs(key(1)) && !s.facts.has(Fact::Frozen));
        s
    };
    let publish = Effect::Publish { key: key(1), layer: layer(5) };
    then(&mut live(), captured(1), State::Active, &[publish]);
    let mut s = live();
    let refused = |n| Event::CaptureRefused { key: key(n), why: "f changed".into() };
    then(&mut s, refused(2), State::Active, &[]);
    assert_eq!(stage(&s), Some(Stage::Packing));
    then(&mut s, refused(1), State::Active, &[]);
    assert_eq!((s.work.clone(), s.trouble.as_deref()), (None, Some("f changed")));
    // What was read before the loss is offered by nobody after it.
    let mut s = live();
    let loss = Loss::Expired { bound: Bound::Grant };
    step(&mut s, &Event::LeaseLost { loss, revoke: false });
    assert_eq!(s.state, State::Fencing);
    then(&mut s, captured(1), State::Fencing, &[]);
    // Who may not begin to work may not do it live either.
    let refused = step(&mut s, &Event::CheckpointAsked { key: key(2), live: true });
    assert_eq!(refused.refused, Some(Code::LeaseLost));
}
