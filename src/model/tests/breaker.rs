//! When the breaker opens, what it stops, and what closes it.

use std::time::Duration;

use super::super::breaker::{Breaker, stops};
use super::super::code::Code;
use super::super::ids::{Generation, SessionId};
use super::super::lease::Bound;
use super::super::session::{Disposition, Loss, Session, State, UNKNOWN};
use super::super::step::{Effect, Purpose};
use super::super::time::BootNs;
use super::session;

fn doubt() -> Loss {
    Loss::Doubt { cause: "no answer".into() }
}

fn silent() -> Loss {
    Loss::Expired { bound: Bound::Holder }
}

fn lost(n: u128, loss: Loss) -> Session {
    Session { id: SessionId::from_u128(n), loss: Some(loss), ..session(State::Fencing) }
}

fn at(ms: u64) -> BootNs {
    BootNs(0).plus(Duration::from_millis(ms))
}

/// Loses `n` of `of` sessions, one every `apart` ms; the breaker afterwards.
fn after(n: u64, of: u64, apart: u64, loss: &Loss) -> Breaker {
    let mut breaker = Breaker::default();
    for i in 0..n {
        let s = lost(u128::from(i), loss.clone());
        breaker.lost(&s, of - i - 1, at(i * apart), "then");
    }
    breaker
}

#[test]
fn it_opens_at_ten_and_over_half_within_a_minute() {
    for (n, of, apart, opens) in [
        (9, 9, 0, false),
        (10, 10, 0, true),
        (10, 19, 0, true),
        (10, 20, 0, false),
        (11, 20, 0, true),
        (11, 21, 0, true),
        (100, 200, 0, false),
        (101, 200, 0, true),
        (501, 1000, 0, true),
        // The first and the tenth lie a minute apart, and a little more.
        (10, 10, 6_666, true),
        (10, 10, 6_667, false),
        (200, 200, 6_667, false),
    ] {
        let breaker = after(n, of, apart, &doubt());
        assert_eq!(breaker.tripped().is_some(), opens, "{n} of {of}, {apart} ms apart");
    }
}

fn superseded(forced_by: Option<String>) -> Loss {
    let code = Code::StaleGeneration;
    Loss::Superseded { generation: Generation(2), owner: None, code, forced_by }
}

#[test]
fn only_what_nobody_asked_for_counts() {
    let counted = [
        doubt(),
        silent(),
        Loss::Expired { bound: Bound::Lifetime },
        superseded(None),
        // A crash took the reason along.
        Loss::Operator { by: UNKNOWN.to_owned(), reason: "stamp".to_owned() },
    ];
    let (by, reason) = ("op".to_owned(), "why".to_owned());
    let asked = [
        superseded(Some("op".to_owned())),
        Loss::Operator { by: by.clone(), reason: reason.clone() },
        Loss::Revoked { by, reason: reason.clone() },
        Loss::Closed { reason: reason.clone(), offered: None },
        Loss::ReadmitFailed { reason },
        Loss::Reboot,
    ];
    for loss in &counted {
        assert!(after(20, 20, 0, loss).tripped().is_some(), "{loss:?}");
    }
    for loss in &asked {
        assert!(after(20, 20, 0, loss).tripped().is_none(), "{loss:?}");
    }
}

#[test]
fn opened_by_doubt_alone_the_authority_closes_it() {
    let mut breaker = after(10, 10, 0, &doubt());
    let open = breaker.tripped().unwrap();
    assert_eq!((open.lost, open.of, open.doubt_alone), (10, 10, true));
    assert_eq!(open.why, "10 of 10 sessions lost their leases within 60 s, each for doubt alone");
    // One more is one more to wait for.
    assert!(breaker.lost(&lost(77, doubt()), 0, at(5), "later"));
    let waiting = breaker.waiting();
    assert_eq!(waiting.len(), 11);
    assert_eq!(breaker.tripped().unwrap().since, "then");
    assert!(!breaker.answered(&waiting[..10]));
    assert!(breaker.answered(&waiting[10..]));
    breaker.close();
    assert_eq!(breaker, Breaker::default());
    // The old losses do not count again.
    assert!(!breaker.lost(&lost(78, doubt()), 0, at(6), "x"));
}

#[test]
fn anything_else_among_them_is_a_persons_to_close() {
    let mut breaker = after(9, 10, 0, &doubt());
    assert!(breaker.lost(&lost(9, silent()), 0, at(1), "then"));
    assert!(!breaker.tripped().unwrap().doubt_alone);
    assert_eq!(breaker.waiting(), []);
    let all: Vec<_> = (0..10).map(SessionId::from_u128).collect();
    assert!(!breaker.answered(&all), "answers do not close it");

    // Opened by doubt; then as many are lost as open it without any.
    let mut breaker = after(10, 30, 0, &doubt());
    assert!(breaker.tripped().is_none());
    for i in 10..16 {
        breaker.lost(&lost(i, doubt()), 14 - u64::try_from(i - 10).unwrap(), at(1), "then");
    }
    assert!(breaker.tripped().unwrap().doubt_alone);
    for i in 20..29 {
        assert!(!breaker.lost(&lost(i, silent()), 0, at(2), "x"));
    }
    // Nine silent ones of twenty-five; a tenth is no half either.
    assert!(!breaker.lost(&lost(29, silent()), 0, at(3), "x"));
    assert!(breaker.tripped().unwrap().doubt_alone);
    // The doubted are past the window: ten of what is left.
    assert!(breaker.lost(&lost(30, silent()), 0, at(60_002), "x"));
    assert!(!breaker.tripped().unwrap().doubt_alone);
}

#[test]
fn who_is_back_is_counted_once() {
    let mut breaker = after(8, 20, 0, &doubt());
    for n in 0..8 {
        breaker.regained(SessionId::from_u128(n));
    }
    breaker.regained(SessionId::from_u128(500));
    // Lost again: each is still one loss, of twenty sessions.
    for n in 0..8u64 {
        assert!(!breaker.lost(&lost(u128::from(n), doubt()), 19 - n, at(9), "x"));
    }
    assert!(!breaker.lost(&lost(8, doubt()), 11, at(9), "x"));
    assert!(!breaker.lost(&lost(9, doubt()), 10, at(9), "x"), "ten of twenty");
    assert!(breaker.lost(&lost(10, doubt()), 9, at(9), "x"), "eleven of twenty");
    assert_eq!(breaker.tripped().unwrap().of, 20);
}

#[test]
fn it_stops_killing_and_deleting_and_nothing_else() {
    let states = [State::Fencing, State::Fenced, State::Preserved, State::Deleting];
    for state in states {
        let s = super::session(state);
        assert!(stops(&Effect::Kill, &s) && stops(&Effect::Remove, &s), "{state}");
    }
    let closing = super::session(State::Releasing);
    assert!(!stops(&Effect::Kill, &closing), "a close of a good lease goes on");
    for effect in [
        Effect::Freeze { purpose: Purpose::Fence },
        Effect::Thaw,
        Effect::ReadOnly,
        Effect::Release,
        Effect::ProveGone,
        Effect::Show,
    ] {
        for state in states {
            assert!(!stops(&effect, &super::session(state)), "{effect:?} in {state}");
        }
    }
    let mut s = super::session(State::Deleting);
    s.disposition = Some(Disposition::NeverOpened);
    assert!(!stops(&Effect::Kill, &s) && !stops(&Effect::Remove, &s), "there is nothing in it");
    s.disposition = Some(Disposition::Clean);
    assert!(stops(&Effect::Remove, &s));
}

#[test]
fn what_was_lost_before_a_crash_is_judged_after_it() {
    let sessions: Vec<_> = (0..10).map(|n| lost(n, doubt())).collect();
    for (writing, closed, now, opens) in [
        (9, None, 1000, true),
        (10, None, 1000, false),
        (0, None, 60_001, false),
        // All but the first came after it was closed, or all came before.
        (0, Some(at(0)), 1000, false),
        (0, Some(at(1)), 1000, false),
    ] {
        let mut breaker = Breaker::default();
        // The first of them was lost a moment before the others.
        let losses = sessions.iter().enumerate().map(|(i, s)| (at(u64::from(i > 0)), s));
        breaker.recall(losses, closed, at(now));
        assert_eq!(breaker.judge_recalled(writing, "then"), opens, "{writing} {closed:?} {now}");
    }
}
