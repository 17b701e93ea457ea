//! I7: what stands in the ledger, from the intent to the answer, and for how long.

use std::collections::BTreeSet;

use super::*;
use crate::model::journal::Draft;
use crate::model::ledger::{Publication, Which};
use crate::model::workspace::{PUBLISH_REFUSALS, Writer};

fn enter(f: &dyn Fixture, p: &Publish, stage: KeyState) -> Result<(), Refusal> {
    f.authority().enter(p, &"ann".parse().unwrap(), stage, no_rider()).unwrap()
}

fn rows(f: &dyn Fixture, open: bool) -> Vec<Publication> {
    let which = Which { workspace: Some(ws()), open, limit: 99 };
    f.authority().publications(&which).unwrap()
}

fn row(f: &dyn Fixture, key: PublicationKey) -> Publication {
    rows(f, false).into_iter().find(|row| row.key == key).unwrap()
}

/// Each refusal of the predicate: the record is the one before, the history names the reason, the
/// rider was told the same one. Together they are all there are.
///
/// Callers of the API meet some of them, and a test asks for each of those through it
/// (`ledger::i1_refusals_are_in_history_evidence_and_metrics`). The others are asked for here alone: an
/// agent offers its session's own lease, session and head (`lease_mismatch`, `session_mismatch`,
/// `head_mismatch`), of a workspace that is not deleted as long as it has sessions
/// (`unknown_workspace`), under a key that it makes for this offer (`key_used`, `key_forgotten`). What is
/// being removed it is not even let enter (`layer_buried`), which is how [`Ledger::enter`] answers.
pub(super) fn i1_every_reason(f: &dyn Fixture) {
    let mut seen = BTreeSet::new();
    let mut refuse = |p: Publish, code: Code| {
        let before = f.authority().get(&p.workspace).unwrap();
        let written = f.written().len();
        let rider = Box::new(|answer: &Result<HeadAt, Refusal>| {
            let kind = answer.as_ref().unwrap_err().code.to_string();
            let (actor, detail) = ("test".to_owned(), serde_json::Value::Null);
            let (workspace, session, generation) = (None, None, None);
            let draft = Draft { kind, workspace, session, generation, actor, detail };
            Journal { sessions: vec![], entries: vec![draft] }
        });
        let refusal = f.authority().publish(&p, rider).unwrap().unwrap_err();
        assert_eq!(refusal.code, code, "{p:?}");
        assert_eq!(f.authority().get(&p.workspace).unwrap(), before, "{code} changed something");
        let told = f.authority().history(&p.workspace, 1).unwrap().remove(0).what;
        assert!(
            matches!(&told, Happening::Refused { code: c, current, .. }
                if *c == code && *current == refusal.current),
            "{told:?}"
        );
        assert_eq!(f.written()[written..], [code.to_string()]);
        seen.insert(code);
    };
    create(f);
    let a = acquire(f, 1);
    let p = |key: u128| publication(&a, key, 2);
    refuse(Publish { workspace: "nowhere".parse().unwrap(), ..p(1) }, Code::UnknownWorkspace);
    refuse(Publish { generation: Generation(9), ..p(2) }, Code::StaleGeneration);
    refuse(Publish { lease: LeaseId::from_u128(9), ..p(3) }, Code::LeaseMismatch);
    refuse(Publish { session: SessionId::from_u128(9), ..p(4) }, Code::SessionMismatch);
    refuse(Publish { expected: at(7, &[1]), ..p(5) }, Code::VersionMismatch);
    refuse(Publish { expected: at(1, &[9]), ..p(6) }, Code::HeadMismatch);
    resolve(f, PublicationKey::from_u128(7));
    refuse(p(7), Code::KeyBuried);
    enter(f, &p(8), KeyState::Sent).unwrap();
    refuse(Publish { layer: layer(9), ..p(8) }, Code::KeyUsed);
    resolve(f, PublicationKey::from_u128(8));
    f.authority().hold(&ws(), "odd", no_rider()).unwrap();
    refuse(p(10), Code::WorkspaceHeld);
    f.authority().repair(&ws(), &record(f).seen(), "looked at", no_rider()).unwrap().unwrap();
    assert!(f.authority().prune(u64::MAX >> 17).unwrap() > 0);
    refuse(p(1), Code::KeyForgotten);
    // The repair ended the lease that there was.
    let a = acquire(f, 5);
    // What a head or an open row names is not buried; what is buried nothing can name.
    let open = Publish { layer: layer(8), ..publication(&a, 18, 8) };
    enter(f, &open, KeyState::Prepared).unwrap();
    let pins = f.authority().pins().unwrap();
    let all = [layer(1), layer(7), layer(8)];
    assert_eq!(f.authority().bury(&all, &pins, no_rider()).unwrap(), [layer(7)]);
    assert_eq!(f.authority().buried().unwrap(), [layer(7)]);
    let doomed = publication(&a, 19, 7);
    assert_eq!(enter(f, &doomed, KeyState::Sent).unwrap_err().code, Code::LayerBuried);
    refuse(doomed.clone(), Code::LayerBuried);
    let made = NewWorkspace {
        id: "other".parse().unwrap(),
        owner: "ann".parse().unwrap(),
        contact: String::new(),
        labels: BTreeMap::new(),
        layers: vec![layer(7)],
    };
    let refusal = f.authority().create(&made, no_rider()).unwrap().unwrap_err();
    assert_eq!(refusal.code, Code::LayerBuried);
    f.authority().exhume(&[layer(7)]).unwrap();
    assert_eq!(f.authority().buried().unwrap(), []);
    resolve(f, open.key);
    // A key that was refused stays refused; another one goes through, and its layer is needed then,
    // also by who looked before.
    let other = publication(&a, 23, 7);
    assert_eq!(publish(f, &other).unwrap().head.0.last(), Some(&layer(7)));
    assert_eq!(f.authority().bury(&all, &pins, no_rider()).unwrap(), []);
    let pins = f.authority().pins().unwrap();
    assert_eq!(f.authority().bury(&all, &pins, no_rider()).unwrap(), [layer(8)]);
    end(f, &a, LeaseState::Released, "done").unwrap();
    refuse(publication(&a, 20, 2), Code::LeaseReleased);
    let b = acquire(f, 2);
    end(f, &b, LeaseState::Revoked, "why").unwrap();
    refuse(publication(&b, 21, 2), Code::LeaseRevoked);
    let c = acquire(f, 3);
    f.clock().set(1, 1030);
    refuse(publication(&c, 22, 2), Code::LeaseExpired);
    assert_eq!(seen, PUBLISH_REFUSALS.into_iter().collect());
}

pub(super) fn entered(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    let p = publication(&a, 1, 2);
    // What it expects may change until it is sent, and not what it is.
    let early = Publish { expected: at(0, &[]), ..p.clone() };
    enter(f, &early, KeyState::Prepared).unwrap();
    let foreign = Publish { session: SessionId::from_u128(9), ..p.clone() };
    assert_eq!(enter(f, &foreign, KeyState::Sent).unwrap_err().code, Code::KeyUsed);
    for stage in [KeyState::Prepared, KeyState::Sent, KeyState::Prepared] {
        enter(f, &p, stage).unwrap();
    }
    assert_eq!(enter(f, &early, KeyState::Sent).unwrap_err().code, Code::KeyUsed);
    let sent = row(f, p.key);
    assert_eq!((&sent.state, sent.asked.as_ref()), (&KeyState::Sent, Some(&p)));
    // Who answers for the workspace sees to it.
    assert_eq!(sent.assignee, Some("ann".parse().unwrap()));
    let other = Publish { layer: layer(9), ..p.clone() };
    assert_eq!(enter(f, &other, KeyState::Sent).unwrap_err().code, Code::KeyUsed);
    assert_eq!(publish(f, &p).unwrap(), at(2, &[1, 2]));
    let done = KeyState::Committed { layer: p.layer, at: at(2, &[1, 2]) };
    assert_eq!(row(f, p.key).state, done);
    // A late word of the way there takes nothing back.
    enter(f, &p, KeyState::Sent).unwrap();
    f.authority().doubt(&ws(), p.key, "late").unwrap();
    assert_eq!(row(f, p.key).state, done);
    assert_eq!(rows(f, true), []);
    let nowhere = Publish { workspace: "nowhere".parse().unwrap(), ..p };
    assert_eq!(enter(f, &nowhere, KeyState::Sent).unwrap_err().code, Code::UnknownWorkspace);
}

pub(super) fn refused_once(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    let early = Publish { expected: at(2, &[1, 2]), ..publication(&a, 1, 3) };
    assert_eq!(publish(f, &early).unwrap_err().code, Code::VersionMismatch);
    publish(f, &publication(&a, 2, 2)).unwrap();
    // Now it would fit; but it was answered.
    assert_eq!(record(f).at, early.expected);
    assert_eq!(publish(f, &early).unwrap_err().code, Code::VersionMismatch);
    assert_eq!(resolve(f, early.key), KeyState::Rejected { code: Code::VersionMismatch });
    assert_eq!(record(f).at, early.expected);
}

pub(super) fn taken_over(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    enter(f, &publication(&a, 1, 2), KeyState::Prepared).unwrap();
    enter(f, &publication(&a, 2, 3), KeyState::Sent).unwrap();
    publish(f, &publication(&a, 3, 4)).unwrap();
    end(f, &a, LeaseState::Expired, "it ran out").unwrap();
    let b = acquire(f, 2);
    let told: Vec<_> = b.unresolved.iter().map(|u| (u.kind.as_str(), u.key.clone())).collect();
    let key = |n| PublicationKey::from_u128(n).to_string();
    assert_eq!(told, [("publication", key(2)), ("publication", key(1))]);
    assert!(b.unresolved.iter().all(|u| u.generation == Some(Generation(1))));
    assert!(
        matches!(newest(f), Happening::Acquired { unresolved, .. } if unresolved == b.unresolved)
    );
    for n in [1, 2] {
        let state = row(f, PublicationKey::from_u128(n)).state;
        assert!(matches!(state, KeyState::Unknown { .. }), "{state:?}");
    }
    // The one is resolved, the other arrives late: neither moves the head.
    assert_eq!(resolve(f, PublicationKey::from_u128(1)), KeyState::Buried);
    let late = publish(f, &publication(&a, 2, 3)).unwrap_err();
    assert_eq!(late.code, Code::StaleGeneration);
    let rejected = KeyState::Rejected { code: Code::StaleGeneration };
    assert_eq!(resolve(f, PublicationKey::from_u128(2)), rejected);
    assert_eq!(record(f).at, at(2, &[1, 4]));
    end(f, &b, LeaseState::Released, "done").unwrap();
    assert_eq!(acquire(f, 3).unresolved, []);
}

pub(super) fn unknown_blocks_nothing(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    let lost = publication(&a, 1, 2);
    enter(f, &lost, KeyState::Sent).unwrap();
    f.authority().doubt(&ws(), lost.key, "no answer came").unwrap();
    let open = rows(f, true);
    assert_eq!(open[0].state, KeyState::Unknown { why: "no answer came".to_owned() });
    assert_eq!(publish(f, &publication(&a, 2, 3)).unwrap(), at(2, &[1, 3]));
    assert_eq!(rows(f, true), open);
    // What was lost before its commit is not made up for: the head has moved.
    assert_eq!(resolve(f, lost.key), KeyState::Buried);
    assert_eq!(publish(f, &lost).unwrap_err().code, Code::KeyBuried);
    assert_eq!(record(f).at, at(2, &[1, 3]));
}

pub(super) fn forgotten(f: &dyn Fixture) {
    const FAR: u64 = u64::MAX >> 17;
    create(f);
    let a = acquire(f, 1);
    let (old, young) = (publication(&a, 5, 2), PublicationKey::first_at(FAR + 1));
    publish(f, &old).unwrap();
    let young = Publish { key: young, expected: record(f).at, ..publication(&a, 5, 3) };
    publish(f, &young).unwrap();
    assert_eq!(f.authority().prune(0).unwrap(), 0);
    // While anything of the workspace is open, nothing of it is forgotten.
    let open = publication(&a, 6, 9);
    enter(f, &open, KeyState::Sent).unwrap();
    assert_eq!(f.authority().prune(FAR).unwrap(), 0);
    resolve(f, open.key);
    assert_eq!(f.authority().prune(FAR).unwrap(), 2);
    assert_eq!(f.authority().prune(FAR).unwrap(), 0);
    let before = (record(f), rows(f, false));
    assert_eq!(resolve(f, old.key), KeyState::Forgotten);
    assert_eq!(publish(f, &old).unwrap_err().code, Code::KeyForgotten);
    assert_eq!((record(f), rows(f, false)), before, "an absent row is not made up");
    // What was not pruned keeps its answer, and a key of today goes through.
    assert_eq!(publish(f, &young).unwrap(), record(f).at);
    let today = Publish {
        key: PublicationKey::from_u128(7),
        expected: record(f).at,
        ..publication(&a, 7, 4)
    };
    publish(f, &today).unwrap();
    // The horizon outlives the workspace.
    end(f, &a, LeaseState::Released, "done").unwrap();
    f.authority().delete(&ws(), "x", no_rider()).unwrap().unwrap();
    create(f);
    assert_eq!(resolve(f, old.key), KeyState::Forgotten);
}

pub(super) fn assigned(f: &dyn Fixture) {
    create(f);
    let a = acquire(f, 1);
    let p = publication(&a, 1, 2);
    let assign =
        |key, to: &str| f.authority().assign(&ws(), key, &to.parse().unwrap(), no_rider()).unwrap();
    assert_eq!(assign(p.key, "bob").unwrap_err().code, Code::NotFound);
    enter(f, &p, KeyState::Sent).unwrap();
    assert_eq!(assign(p.key, "bob").unwrap().assignee, Some("bob".parse().unwrap()));
    assert_eq!(row(f, p.key).assignee, Some("bob".parse().unwrap()));
    let to = "bob".parse().unwrap();
    assert_eq!(newest(f), Happening::Assigned { key: p.key.to_string(), to });
    publish(f, &p).unwrap();
    let before = newest(f);
    assert_eq!(assign(p.key, "eve").unwrap_err().code, Code::AlreadySettled);
    assert_eq!(row(f, p.key).assignee, Some("bob".parse().unwrap()));
    assert_eq!(newest(f), before);
}

pub(super) fn refused_without_an_offer(f: &dyn Fixture) {
    let refuse = |who: &Writer| {
        let Err(refusal) = f.authority().refuse(who, "publish", no_rider()).unwrap();
        refusal
    };
    create(f);
    let a = acquire(f, 1);
    let writer = |of: &Acquired| Writer {
        workspace: ws(),
        lease: of.lease.id,
        generation: of.lease.generation,
        session: of.lease.session,
        expected: of.at.clone(),
    };
    // Nothing speaks against it here, and still it is not granted anything.
    let early = refuse(&writer(&a));
    assert_eq!(early.code, Code::LeaseLost);
    assert_eq!(early.current.unwrap().generation, a.lease.generation);
    end(f, &a, LeaseState::Revoked, "x").unwrap();
    assert_eq!(refuse(&writer(&a)).code, Code::LeaseRevoked);
    let b = acquire(f, 2);
    let late = refuse(&writer(&a));
    assert_eq!(late.code, Code::StaleGeneration);
    assert_eq!(late.current.as_ref().unwrap().session, Some(b.lease.session));
    let (session, generation) = (a.lease.session, Some(a.lease.generation));
    let (verb, code, current) = ("publish".to_owned(), late.code, late.current);
    assert_eq!(newest(f), Happening::Refused { verb, session, generation, code, current });
    let nowhere = Writer { workspace: "nowhere".parse().unwrap(), ..writer(&a) };
    assert_eq!(refuse(&nowhere).code, Code::UnknownWorkspace);
    assert_eq!(rows(f, false), []);
    assert_eq!(record(f).at, a.at);
}
