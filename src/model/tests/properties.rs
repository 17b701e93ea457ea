//! Random events, also ones that no executor would send in that order: the record must stay
//! honest whatever comes.

use proptest::prelude::*;

use super::super::backing::Backing;
use super::super::code::Code;
use super::super::facts::Fact;
use super::super::head::{Head, HeadAt};
use super::super::ids::{Generation, LeaseId, PublicationKey, Version};
use super::super::lease::Bound;
use super::super::limits::Size;
use super::super::session::{
    CloseMode, Disposition, FenceWish, Loss, OnBusy, OnFence, OnSlowFreeze, Policy, Session, Stage,
    State, UpperFreeze, Work,
};
use super::super::step::{Effect, Event, Found, Published, Purpose, Step, step};
use super::super::time::BootNs;
use super::super::workspace::Refusal;
use super::{boot, key, layer, loop_device, proof, session};

const FACTS: [Fact; 7] = Fact::ALL;

const FENCE: Effect = Effect::Freeze { purpose: Purpose::Fence };
const ON_BUSY: [OnBusy; 3] = [OnBusy::Hold, OnBusy::Seal, OnBusy::Kill];

fn losses() -> impl Strategy<Value = Loss> {
    prop_oneof![
        Just(Loss::Expired { bound: Bound::Grant }),
        Just(Loss::Doubt { cause: "no answer".into() }),
        Just(Loss::Revoked { by: "op".into(), reason: "r".into() }),
        Just(Loss::Operator { by: "op".into(), reason: "r".into() }),
        Just(Loss::Superseded {
            generation: Generation(9),
            owner: None,
            code: Code::StaleGeneration,
            forced_by: None,
        }),
    ]
}

fn outcomes() -> impl Strategy<Value = Published> {
    prop_oneof![
        (1u64..4, 0u8..3).prop_map(|(v, l)| Published::Committed {
            at: HeadAt { version: Version(v), head: Head(vec![layer(l)]) }
        }),
        Just(Published::Unknown { why: "lost".into() }),
        prop_oneof![
            Just(Code::StaleGeneration),
            Just(Code::VersionMismatch),
            Just(Code::KeyBuried)
        ]
        .prop_map(|code| Published::Refused { refusal: Refusal { code, current: None } }),
    ]
}

fn dispositions() -> impl Strategy<Value = Disposition> {
    prop_oneof![
        Just(Disposition::Discard { who: "op".into() }),
        Just(Disposition::Exported { who: "op".into(), bundle: layer(7) }),
    ]
}

/// Any event; proofs are numbered by [`numbered`] so that a fact can be traced to its answer.
fn events() -> impl Strategy<Value = Event> {
    let p = || proof(0);
    let modes =
        prop_oneof![Just(CloseMode::Checkpoint), Just(CloseMode::Keep), Just(CloseMode::Discard)];
    let to = proptest::sample::select(FACTS.as_slice());
    let on_busy = proptest::option::of(proptest::sample::select(ON_BUSY.as_slice()));
    let fence = prop_oneof![
        (to, on_busy).prop_map(|(to, on_busy)| Event::FenceAsked {
            wish: FenceWish { to, on_busy },
            by: "op".into(),
            reason: "r".into(),
            now: BootNs(1),
        }),
        (losses(), any::<bool>()).prop_map(|(loss, revoke)| Event::LeaseLost { loss, revoke }),
        any::<bool>().prop_map(move |alone| Event::Gated { proof: proof(0), alone }),
        Just(Event::RunsOn { proof: p() }),
        Just(Event::GateLost { seen: "ok".into() }),
        Just(Event::Frozen { proof: p() }),
        Just(Event::FreezeLate { blockers: Vec::new() }),
        Just(Event::ForeignThaw { seen: "0".into() }),
        Just(Event::MovedOut { strays: Vec::new() }),
        Just(Event::UpperChanged { seen: "a file".into() }),
        Just(Event::ReadOnly { proof: p(), empty: false }),
        any::<bool>().prop_map(move |looped| Event::Busy {
            proof: p(),
            holders: looped.then(loop_device).into_iter().collect(),
        }),
        Just(Event::ReadOnlyLost { seen: "rw".into() }),
        Just(Event::Writable { proof: p() }),
        Just(Event::Sealed { proof: p() }),
        Just(Event::SealLost { seen: "no flag".into() }),
        Just(Event::Unsealed { proof: p() }),
        Just(Event::UpperFrozen { proof: p() }),
        Just(Event::UpperFreezeLost { seen: "ok".into() }),
        Just(Event::UpperThawed { proof: p() }),
        Just(Event::Thawed { proof: p() }),
        Just(Event::Killed { proof: p() }),
        Just(Event::Gone { proof: p() }),
    ];
    let work = prop_oneof![
        (0u128..3, any::<bool>())
            .prop_map(|(k, live)| Event::CheckpointAsked { key: key(k), live }),
        (modes, 0u128..3).prop_map(|(mode, k)| Event::CloseAsked { mode, key: key(k) }),
        (0u128..3).prop_map(|k| Event::Gathered { key: key(k) }),
        (0u128..3, proptest::option::of(0u8..3))
            .prop_map(|(k, l)| Event::Captured { key: key(k), layer: l.map(layer) }),
        (0u128..3, outcomes()).prop_map(|(k, outcome)| Event::Published { key: key(k), outcome }),
        (0u128..3).prop_map(|k| Event::CaptureRefused { key: key(k), why: "damaged".into() }),
        Just(Event::Released),
        (1u64..6).prop_map(|g| Event::Readmitted {
            lease: LeaseId::from_u128(g.into()),
            generation: Generation(g),
            ends: BootNs(1),
            authorised_by: "op".into(),
            reason: "r".into(),
        }),
    ];
    let rest = prop_oneof![
        Just(Event::Opened),
        Just(Event::OpenFailed { why: "no".into() }),
        (1u128..3, any::<bool>(), any::<bool>()).prop_map(|(b, lease_good, fence_stamped)| {
            Event::Recovered(Found { boot: boot(b), lease_good, fence_stamped })
        }),
        Just(Event::Renewed),
        Just(Event::RenewalMissed { cause: "timeout".into() }),
        Just(Event::Removed { bytes: 1, entries: 1 }),
        proptest::sample::select(
            ["thaw", "pack", "seal", "unseal", "freeze_upper", "thaw_upper"].as_slice()
        )
        .prop_map(|what| Event::Failed { what: what.into(), why: "EIO".into() }),
        dispositions().prop_map(|disposition| Event::Disposed { disposition }),
        (0u64..9).prop_map(|until_ms| Event::Kept { until_ms, by: "op".into() }),
        (0u64..4, any::<bool>())
            .prop_map(|(add_ms, may_delete)| Event::Witnessed { add_ms, may_delete }),
        (0u64..9, any::<bool>())
            .prop_map(|(n, held)| Event::Tick { now: BootNs(n * 1_000_000), held }),
        Just(Event::Held { what: "kill".into() }),
    ];
    prop_oneof![3 => fence, 3 => work, 2 => rest]
}

fn policies() -> impl Strategy<Value = Policy> {
    let on_busy = proptest::sample::select(ON_BUSY.as_slice());
    (on_busy, any::<bool>(), any::<bool>()).prop_map(|(on_busy, slow, run)| Policy {
        on_fence: if run { OnFence::ReadOnlyRun } else { OnFence::Freeze },
        on_busy,
        seal_after: std::time::Duration::from_millis(1),
        on_slow_freeze: if slow { OnSlowFreeze::Kill } else { OnSlowFreeze::Wait },
        kill_after: std::time::Duration::from_millis(1),
        grace: std::time::Duration::from_millis(5),
        ..Policy::default()
    })
}

/// Gives the proof in `event` the number `n`.
fn numbered(mut event: Event, n: u64) -> Event {
    match &mut event {
        Event::Frozen { proof: p }
        | Event::ReadOnly { proof: p, .. }
        | Event::Busy { proof: p, .. }
        | Event::Writable { proof: p }
        | Event::Sealed { proof: p }
        | Event::Unsealed { proof: p }
        | Event::UpperFrozen { proof: p }
        | Event::UpperThawed { proof: p }
        | Event::Thawed { proof: p }
        | Event::Killed { proof: p }
        | Event::Gone { proof: p } => *p = proof(n),
        _ => {}
    }
    event
}

struct Seen<'a> {
    before: &'a Session,
    after: &'a Session,
    event: &'a Event,
    step: &'a Step,
}

type Held = Result<(), TestCaseError>;

/// A fact appears only in the step whose event carries that fact's own answer.
fn invariant_facts_come_from_the_kernel(s: &Seen<'_>) -> Held {
    for fact in FACTS {
        let (old, new) = (s.before.facts.0.get(&fact), s.after.facts.0.get(&fact));
        if new.is_none() || new == old {
            continue;
        }
        let rebooted = matches!(s.event, Event::Recovered(found) if found.boot != s.before.boot);
        prop_assert!(old.is_none() || rebooted, "{fact} was proved again by {:?}", s.event);
        let proved = match (s.event, fact) {
            (Event::Gated { proof, .. }, Fact::Gated)
            | (Event::Frozen { proof }, Fact::Frozen)
            | (Event::ReadOnly { proof, .. }, Fact::ReadOnly)
            | (Event::Sealed { proof }, Fact::Sealed)
            | (Event::UpperFrozen { proof }, Fact::UpperFrozen)
            | (Event::Killed { proof }, Fact::Killed | Fact::Frozen)
            | (Event::Gone { proof }, Fact::Gone) => new == Some(proof),
            _ => rebooted,
        };
        prop_assert!(proved, "{fact} came from {:?}", s.event);
    }
    Ok(())
}

/// A fact that an event contradicts is gone after it.
fn invariant_contradicted_facts_go(s: &Seen<'_>) -> Held {
    let fact = match s.event {
        Event::ForeignThaw { .. }
        | Event::Thawed { .. }
        | Event::RunsOn { .. }
        | Event::MovedOut { .. } => Fact::Frozen,
        Event::ReadOnlyLost { .. } | Event::Writable { .. } | Event::Busy { .. } => Fact::ReadOnly,
        Event::GateLost { .. } => Fact::Gated,
        Event::SealLost { .. } | Event::Unsealed { .. } => Fact::Sealed,
        Event::UpperFreezeLost { .. } | Event::UpperThawed { .. } => Fact::UpperFrozen,
        _ => return Ok(()),
    };
    let fenced = matches!(s.after.state, State::Fencing | State::Fenced | State::Preserved);
    prop_assert!(!(fenced && s.after.facts.has(fact)), "{fact} outlived {:?}", s.event);
    Ok(())
}

fn invariant_no_thaw_without_a_lease(s: &Seen<'_>) -> Held {
    let thaws = s.step.effects.iter().any(|e| matches!(e, Effect::Thaw | Effect::ReadWrite));
    prop_assert!(!thaws || s.after.holds_lease(), "a lost session was thawed: {:?}", s.step);
    Ok(())
}

/// Who runs on without a lease does so behind the gate, by policy, and nobody wants it stopped.
fn invariant_who_runs_on_is_gated(s: &Seen<'_>) -> Held {
    let a = s.after;
    let policy = a.policy.on_fence == OnFence::ReadOnlyRun && a.fence.to == Fact::ReadOnly;
    let runs = s.step.effects.contains(&Effect::RunOn) || a.may_run_on();
    let behind = policy && a.facts.has(Fact::Gated) && !a.holds_lease() && !a.seal && !a.has_loop();
    prop_assert!(!runs || behind, "{:?} let it run on", s.event);
    // Nobody else runs while nothing is about to stop them.
    let stands = a.is_stopped() || a.is_past_running();
    let fenced = matches!(a.state, State::Fenced | State::Preserved);
    let lost = fenced && s.before.is_stopped() && !stands;
    prop_assert!(!lost || s.step.effects.contains(&FENCE), "{:?} left it running", s.event);
    Ok(())
}

/// What runs finds its upper writable: flags of ours are known of until they are off.
fn invariant_no_thaw_of_a_sealed_upper(s: &Seen<'_>) -> Held {
    let runs = s.step.effects.iter().any(|e| matches!(e, Effect::Thaw | Effect::ReadWrite));
    prop_assert!(!(runs && s.after.seal), "a sealed upper was let run: {:?}", s.step);
    let seals = s.step.effects.contains(&Effect::Seal);
    prop_assert!(!seals || s.after.seal, "a seal without its intent");
    prop_assert!(!s.after.facts.has(Fact::Sealed) || !s.after.holds_lease());
    let forgot = s.before.seal && !s.after.seal;
    prop_assert!(!forgot || matches!(s.event, Event::Unsealed { .. }), "{:?}", s.event);
    Ok(())
}

/// Nothing that would wait for a stopped upper is done while it may stand, and it stands only with
/// its intent, where there is an image, and where nobody in the session runs.
fn invariant_a_stopped_upper_is_lifted_first(s: &Seen<'_>) -> Held {
    let waits = s.step.effects.iter().any(Effect::wants_a_running_upper);
    let off = s.after.upper_freeze == UpperFreeze::Off;
    prop_assert!(!waits || off, "{:?}", s.step);
    if s.step.effects.contains(&Effect::FreezeUpper) {
        let stopped = s.after.facts.has(Fact::Frozen) || s.after.facts.has(Fact::Killed);
        prop_assert!(stopped && s.after.upper.size().is_some());
        prop_assert_eq!(s.after.upper_freeze, UpperFreeze::On);
        prop_assert!(matches!(s.after.state, State::Fenced | State::Preserved));
    }
    let thaws = s.step.effects.contains(&Effect::ThawUpper);
    prop_assert!(!thaws || s.after.upper_freeze == UpperFreeze::Lifting);
    let stands = s.after.facts.has(Fact::UpperFrozen);
    prop_assert!(!stands || s.after.upper_freeze == UpperFreeze::On, "{:?}", s.event);
    let forgot = s.before.upper_freeze != UpperFreeze::Off && off;
    let rebooted = matches!(s.event, Event::Recovered(found) if found.boot != s.before.boot);
    let refused = matches!(s.event, Event::Failed { what, .. } if what == "freeze_upper")
        && s.before.upper_freeze == UpperFreeze::On;
    let thawed = matches!(s.event, Event::UpperThawed { .. });
    prop_assert!(!forgot || thawed || refused || rebooted, "{:?}", s.event);
    Ok(())
}

/// A layer is made of what was gathered only while the session is let write, and one that is not made
/// yet is offered to nobody.
fn invariant_who_packs_holds_the_lease(s: &Seen<'_>) -> Held {
    let packs = s.step.effects.iter().any(|e| matches!(e, Effect::Pack { .. }));
    prop_assert!(!packs || s.after.state == State::Active, "{:?}", s.event);
    let published = s.step.effects.iter().find_map(|e| match e {
        Effect::Publish { key, layer } => Some((*key, *layer)),
        _ => None,
    });
    if let Some((k, made)) = published {
        let was_made =
            matches!(s.event, Event::Captured { key, layer } if (*key, *layer) == (k, Some(made)));
        let waited = s.before.work.as_ref().and_then(Work::layer) == Some(made);
        prop_assert!(was_made || waited, "{:?}", s.event);
    }
    Ok(())
}

fn invariant_remove_only_what_is_safe_and_gone(s: &Seen<'_>) -> Held {
    if s.step.effects.contains(&Effect::Remove) {
        prop_assert_eq!(s.after.state, State::Deleting);
        prop_assert!(s.after.safe_to_delete() && s.after.facts.has(Fact::Gone));
    }
    Ok(())
}

/// Without a proved freeze only effects that keep the bytes and the authority's order are done.
fn invariant_unproved_freeze_removes_nothing(s: &Seen<'_>) -> Held {
    if s.after.state == State::Fencing && !s.after.facts.has(Fact::Frozen) {
        for e in &s.step.effects {
            let may = match e {
                Effect::Freeze { .. } | Effect::Revoke { .. } | Effect::Show => true,
                // Who waits for a stopped upper does not freeze.
                Effect::ThawUpper => true,
                Effect::Kill => {
                    matches!(s.event, Event::FreezeLate { .. })
                        && (s.after.policy.on_slow_freeze == OnSlowFreeze::Kill
                            || s.after.fence.to >= Fact::Killed)
                }
                _ => false,
            };
            prop_assert!(may, "{e:?} from an unproved freeze");
        }
    }
    Ok(())
}

fn invariant_deleting_has_a_disposition(s: &Seen<'_>) -> Held {
    prop_assert!(s.after.state != State::Deleting || s.after.disposition.is_some());
    Ok(())
}

/// Clean means: nothing could write since, nothing is unknown about what was captured.
fn invariant_clean_is_writerless(s: &Seen<'_>) -> Held {
    let clean = s.after.disposition == Some(Disposition::Clean);
    let held = matches!(s.after.state, State::Releasing | State::Fencing);
    let grounds = s.after.facts.has(Fact::Killed) && s.after.facts.has(Fact::ReadOnly);
    prop_assert!(!(clean && held) || grounds);
    Ok(())
}

fn offered(s: &Session) -> Option<PublicationKey> {
    match s.work {
        Some(
            Work::Checkpoint { key, stage: Stage::Publishing { .. }, .. }
            | Work::Close { key, stage: Stage::Publishing { .. }, .. },
        ) => Some(key),
        _ => None,
    }
}

/// A publication is open until a definite answer to its own key.
fn invariant_unknown_is_not_forgotten(s: &Seen<'_>) -> Held {
    let open: Vec<_> = s.before.unknown.keys().copied().chain(offered(s.before)).collect();
    for k in open {
        let answered = matches!(s.event, Event::Published { key, outcome }
            if *key == k && !matches!(outcome, Published::Unknown { .. }));
        let known = s.after.unknown.contains_key(&k) || offered(s.after) == Some(k);
        prop_assert!(answered || known, "{k} was forgotten by {:?}", s.event);
    }
    Ok(())
}

fn invariant_first_loss_stays(s: &Seen<'_>) -> Held {
    let readmitted = matches!(s.event, Event::Readmitted { .. });
    if s.before.loss.is_some() && !readmitted {
        prop_assert_eq!(&s.before.loss, &s.after.loss);
    }
    Ok(())
}

fn invariant_generation_only_rises(s: &Seen<'_>) -> Held {
    prop_assert!(s.after.generation >= s.before.generation);
    let back = !s.before.holds_lease() && s.after.holds_lease();
    prop_assert!(!back || s.after.generation > s.before.generation);
    Ok(())
}

fn invariant_a_refusal_changes_nothing(s: &Seen<'_>) -> Held {
    if s.step.refused.is_some() {
        prop_assert_eq!(s.before, s.after);
        prop_assert!(s.step.effects.is_empty());
    }
    Ok(())
}

/// The freeze comes first when a lease is lost.
fn invariant_a_loss_freezes_first(s: &Seen<'_>) -> Held {
    let lost = matches!(s.before.state, State::Active | State::Releasing)
        && s.after.state == State::Fencing;
    let first = s.step.effects.first();
    prop_assert!(!lost || matches!(first, Some(Effect::Freeze { .. })), "{:?}", s.step);
    Ok(())
}

fn invariant_ends_stay(s: &Seen<'_>) -> Held {
    if matches!(s.before.state, State::Closed | State::Quarantined) {
        prop_assert_eq!(s.before.state, s.after.state);
        prop_assert!(s.step.effects.is_empty());
    }
    Ok(())
}

fn invariant_records_round_trip(s: &Seen<'_>) -> Held {
    let text = serde_json::to_string(s.after).unwrap();
    prop_assert_eq!(&serde_json::from_str::<Session>(&text).unwrap(), s.after);
    let text = serde_json::to_string(s.event).unwrap();
    prop_assert_eq!(&serde_json::from_str::<Event>(&text).unwrap(), s.event);
    for e in &s.step.effects {
        let text = serde_json::to_string(e).unwrap();
        prop_assert_eq!(&serde_json::from_str::<Effect>(&text).unwrap(), e);
    }
    Ok(())
}

const INVARIANTS: [fn(&Seen<'_>) -> Held; 18] = [
    invariant_facts_come_from_the_kernel,
    invariant_contradicted_facts_go,
    invariant_no_thaw_without_a_lease,
    invariant_no_thaw_of_a_sealed_upper,
    invariant_who_runs_on_is_gated,
    invariant_a_stopped_upper_is_lifted_first,
    invariant_who_packs_holds_the_lease,
    invariant_remove_only_what_is_safe_and_gone,
    invariant_unproved_freeze_removes_nothing,
    invariant_deleting_has_a_disposition,
    invariant_clean_is_writerless,
    invariant_unknown_is_not_forgotten,
    invariant_first_loss_stays,
    invariant_generation_only_rises,
    invariant_a_refusal_changes_nothing,
    invariant_a_loss_freezes_first,
    invariant_ends_stay,
    invariant_records_round_trip,
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 800, ..ProptestConfig::default() })]

    #[test]
    fn every_invariant_holds_after_every_event(
        policy in policies(),
        in_image in any::<bool>(),
        events in proptest::collection::vec(events(), 1..40),
    ) {
        let image = Backing::Image { size: Size(1 << 30) };
        let upper = if in_image { image } else { Backing::Directory };
        let mut s = Session { policy, upper, ..session(State::Active) };
        for (n, event) in events.into_iter().enumerate() {
            let event = numbered(event, n as u64 + 1);
            let before = s.clone();
            let step = step(&mut s, &event);
            let seen = Seen { before: &before, after: &s, event: &event, step: &step };
            for invariant in INVARIANTS {
                invariant(&seen)?;
            }
        }
    }
}
