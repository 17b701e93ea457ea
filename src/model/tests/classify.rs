//! Each cell of the reconciler's table: what must never be, what the step that follows does, and the
//! page that shows them.

use std::fmt::Write as _;

use super::super::classify::{Answer, Class, Observed, Plan, Record, classify, loss};
use super::super::code::Code;
use super::super::ids::Generation;
use super::super::session::{Disposition, Loss, Session, State};
use super::super::step::{Effect, Event, Found, step};
use super::super::workspace::Workspace;
use super::{boot, proof, session};
use crate::model::facts::Fact;

/// All that can be observed of a record.
fn seen_of(record: Record) -> impl Iterator<Item = Observed> {
    (0..16u8).map(move |n| Observed {
        record,
        rebooted: n & 1 != 0,
        in_time: n & 2 != 0,
        fence_stamped: n & 4 != 0,
        held: n & 8 != 0,
    })
}

fn cells() -> impl Iterator<Item = (Observed, Answer, Class, Plan)> {
    Record::ALL.into_iter().flat_map(seen_of).flat_map(|seen| {
        Answer::ALL.into_iter().map(move |answer| {
            let (class, plan) = classify(seen, answer);
            (seen, answer, class, plan)
        })
    })
}

fn held(record: Record) -> bool {
    matches!(record, Record::Held | Record::Doubted)
}

/// What no cell may say, whatever else the table becomes.
#[test]
fn no_cell_runs_or_removes_what_it_must_not() {
    assert_eq!(cells().count(), 14 * 16 * 6);
    for (seen, answer, class, plan) in cells() {
        let cell = format!("{seen:?} {answer:?}: {class:?} {plan:?}");
        let speaks_against = !matches!(answer, Answer::Agrees | Answer::Silent);
        // I3, I9: nothing of a lost lease runs on, and no silence lets anything run that is stopped.
        if matches!(plan, Plan::Run | Plan::Wait) {
            assert!(matches!(class, Class::Authorised | Class::Doubt), "{cell}");
            assert!(!seen.rebooted, "{cell}");
            if held(seen.record) {
                assert!(seen.in_time && !seen.fence_stamped && !speaks_against, "{cell}");
            } else {
                assert_eq!(seen.record, Record::Opening, "{cell}");
            }
        }
        // Who runs without doubt has the authority's word.
        if plan == Plan::Run && held(seen.record) {
            assert_eq!(answer, Answer::Agrees, "{cell}");
        }
        // Who may have written and is not stopped yet is stopped, kept stopped, or goes on as above.
        if held(seen.record) {
            let stopped = if seen.rebooted { Plan::Keep } else { Plan::Stop };
            assert!([Plan::Run, Plan::Wait, stopped].contains(&plan), "{cell}");
        }
        // I4: what is removed was decided before, or its grace is over, nothing is wrong at large, and
        // the authority says that its lease is over.
        if plan == Plan::Remove {
            assert!(!seen.held, "{cell}");
            assert_eq!(class, Class::SafeToDelete, "{cell}");
            match seen.record {
                Record::Deleting | Record::Trashed => {}
                Record::Due => {
                    assert!(matches!(answer, Answer::Ended | Answer::Newer), "{cell}");
                }
                _ => panic!("{cell}"),
            }
        }
        // Nobody can have written what is rolled back.
        if plan == Plan::RollBack {
            let cut_off = seen.record == Record::Opening && seen.rebooted;
            assert!(cut_off || seen.record == Record::CutOff, "{cell}");
        }
        // What no record explains, or none that is believed, only a person decides on.
        let unknown = matches!(seen.record, Record::Absent | Record::Unreadable);
        assert_eq!(plan == Plan::Person, unknown, "{cell}");
        assert_eq!(class == Class::Orphan, seen.record == Record::Absent, "{cell}");
        // A newer generation has a name of its own for whoever is not preserved yet.
        if class == Class::StaleGeneration {
            assert_eq!(answer, Answer::Newer, "{cell}");
        }
        if class == Class::PreservedDelta {
            assert_eq!(plan, Plan::Keep, "{cell}");
        }
    }
}

/// A boot that is over, more time witnessed, or an open breaker never make a plan bolder.
#[test]
fn what_speaks_against_it_makes_no_plan_bolder() {
    let bold = |plan| match plan {
        Plan::Leave | Plan::Person | Plan::Keep | Plan::Rest | Plan::Stop => 0,
        Plan::Wait => 1,
        Plan::Run | Plan::RollBack | Plan::Remove => 2,
    };
    for (seen, answer, _, plan) in cells() {
        let worse = [
            Observed { fence_stamped: true, ..seen },
            Observed { in_time: false, ..seen },
            Observed { held: true, ..seen },
        ];
        for other in worse {
            let then = classify(other, answer).1;
            assert!(bold(then) <= bold(plan), "{seen:?} {answer:?}: {plan:?}, {other:?}: {then:?}");
        }
        // Silence is never bolder than a word that agrees, nor is distrust than silence for who runs.
        if held(seen.record) {
            let silent = classify(seen, Answer::Silent).1;
            assert!(bold(silent) <= bold(classify(seen, Answer::Agrees).1), "{seen:?}");
            let doubted = classify(seen, Answer::NotBelieved).1;
            assert!(bold(doubted) <= bold(silent), "{seen:?}");
        }
    }
}

/// Sessions whose record is of this kind.
fn sessions(record: Record) -> Vec<Session> {
    let of = |state| {
        let mut s = session(state);
        if !s.holds_lease() {
            s.loss = Some(Loss::Doubt { cause: "c".into() });
        }
        if matches!(state, State::Fenced | State::Preserved | State::Deleting) {
            s.facts.prove(Fact::Frozen, proof(1));
        }
        s
    };
    match record {
        Record::Absent | Record::Trashed | Record::Unreadable => vec![],
        Record::Opening | Record::CutOff => vec![of(State::Opening)],
        Record::Held => vec![of(State::Active), of(State::Releasing)],
        Record::Doubted => [State::Active, State::Releasing]
            .map(|state| Session { doubt: Some("d".into()), ..of(state) })
            .into(),
        Record::Fencing => vec![of(State::Fencing)],
        Record::Fenced => vec![of(State::Fenced)],
        Record::Preserved => vec![of(State::Preserved)],
        Record::Due => {
            let s = of(State::Preserved);
            vec![Session { witnessed: s.grace_ends(), ..s }]
        }
        Record::Deleting => {
            vec![Session { disposition: Some(Disposition::Grace), ..of(State::Deleting) }]
        }
        Record::Closed => vec![of(State::Closed)],
        Record::Quarantined => vec![of(State::Quarantined)],
    }
}

/// An agent start does by its steps what the cell says: the table is of the code, not beside it.
#[test]
fn a_start_does_what_the_cell_says() {
    let mut compared = 0;
    for (seen, answer, _, plan) in cells() {
        // A start finds no session that this agent is making.
        for before in sessions(seen.record).into_iter().filter(|_| seen.record != Record::Opening) {
            let mut s = before.clone();
            assert_eq!(Record::of(&s, Default::default(), true), seen.record);
            let cell = format!("{seen:?} {answer:?}: {plan:?}");
            let found = Found {
                boot: boot(if seen.rebooted { 2 } else { 1 }),
                lease_good: matches!(plan, Plan::Run | Plan::Wait),
                fence_stamped: seen.fence_stamped,
            };
            let effects = step(&mut s, &Event::Recovered(found)).effects;
            let has = |wanted: &[&str]| effects.iter().any(|e| wanted.contains(&e.name()));
            let freezes = effects.first().map(Effect::name) == Some("freeze");
            match plan {
                Plan::Run | Plan::Wait => {
                    assert!(
                        s.holds_lease() && !has(&["freeze", "kill", "revoke", "remove"]),
                        "{cell}"
                    );
                }
                Plan::Stop => {
                    assert!(s.state == State::Fencing && freezes, "{cell}");
                    assert!(!has(&["thaw", "kill", "remove", "prove_gone"]), "{cell}");
                }
                Plan::Keep => {
                    assert!(!s.holds_lease(), "{cell}");
                    assert!(!has(&["thaw", "read_write", "kill", "remove"]), "{cell}");
                    assert!(seen.rebooted || freezes, "{cell}");
                    // Nothing was decided by it.
                    assert_eq!(s.disposition, None, "{cell}");
                }
                Plan::RollBack => {
                    assert_eq!(s.disposition, Some(Disposition::NeverOpened), "{cell}");
                    assert!(s.state == State::Deleting && has(&["release"]), "{cell}");
                }
                // The breaker stands before each effect, whatever the step wants.
                Plan::Remove | Plan::Rest => match seen.record {
                    // By the sweep, once this start's notice is over.
                    Record::Due => assert!(!has(&["kill", "remove"]), "{cell}"),
                    _ => assert!(has(&["kill", "prove_gone", "remove"]), "{cell}"),
                },
                Plan::Leave => {
                    assert_eq!((&s, effects.len()), (&before, 0), "{cell}");
                }
                Plan::Person => panic!("{cell}"),
            }
            compared += 1;
        }
    }
    assert_eq!(compared, 12 * 16 * 6);
}

/// The end of grace takes what the cell lets go, and nothing else.
#[test]
fn a_sweep_deletes_by_grace_what_the_cell_lets_go() {
    for record in [Record::Preserved, Record::Due] {
        for (seen, answer) in seen_of(record).flat_map(|s| Answer::ALL.map(|a| (s, a))) {
            let mut s = sessions(record).remove(0);
            let may_delete = classify(seen, answer).1 == Plan::Remove;
            step(&mut s, &Event::Witnessed { add_ms: 0, may_delete });
            let goes = s.state == State::Deleting;
            let wanted = record == Record::Due && !seen.held;
            let heard = matches!(answer, Answer::Ended | Answer::Newer);
            assert_eq!(goes, wanted && heard, "{seen:?} {answer:?}");
        }
    }
    // An UNKNOWN publication, or a `keep`, and it is not due.
    let due = || sessions(Record::Due).remove(0);
    let of = |s: &Session| Record::of(s, Default::default(), false);
    assert_eq!(of(&due()), Record::Due);
    let mut s = due();
    s.unknown.insert(super::key(1), super::layer(1));
    assert_eq!(of(&s), Record::Preserved);
    let mut s = due();
    s.keep_until = Some(u64::MAX);
    assert_eq!(of(&s), Record::Preserved);
}

/// What the authority's record of a workspace is to a session of it.
#[test]
fn an_answer_is_read_from_the_workspace() {
    use super::super::lease::{Lease, LeaseState};
    use super::super::time::{BootInstant, BootNs};
    let s = session(State::Active);
    let at = |ns| BootInstant { boot: boot(1), ns: BootNs(ns) };
    let lease = Lease {
        id: s.lease,
        generation: s.generation,
        owner: s.owner.clone(),
        host: s.host,
        session: s.id,
        state: LeaseState::Active,
        holder: s.holder,
        ttl: s.ttl,
        expires: at(100),
        ends: at(1000),
        why_ended: None,
    };
    let mut w = Workspace::new(s.workspace.clone(), s.owner.clone(), None);
    (w.generation, w.lease) = (s.generation, Some(lease));
    assert_eq!(Answer::of(Some(&w), &s, &at(99)), Answer::Agrees);
    assert_eq!(Answer::of(Some(&w), &s, &at(100)), Answer::Ended);
    assert_eq!(loss(Answer::Ended, Some(&w)), None);
    w.lease.as_mut().unwrap().state = LeaseState::Revoked;
    assert_eq!(Answer::of(Some(&w), &s, &at(99)), Answer::Ended);
    assert!(matches!(loss(Answer::Ended, Some(&w)), Some(Loss::Revoked { .. })));
    w.generation = Generation(2);
    assert_eq!(Answer::of(Some(&w), &s, &at(99)), Answer::Newer);
    let newer = loss(Answer::Newer, Some(&w));
    assert!(
        matches!(
            newer,
            Some(Loss::Superseded { generation: Generation(2), code: Code::StaleGeneration, .. })
        ),
        "{newer:?}"
    );
    w.hold = Some("why".into());
    assert_eq!(Answer::of(Some(&w), &s, &at(99)), Answer::OnHold);
    // Below what the session itself knows, and not there at all.
    w.generation = Generation(0);
    assert_eq!(Answer::of(Some(&w), &s, &at(99)), Answer::NotBelieved);
    assert_eq!(Answer::of(None, &s, &at(99)), Answer::NotBelieved);
}

const HEAD: &str = "# What the reconciler decides

Printed from `src/model/classify.rs` by its test; `make test` compares them. There is no other place where this
is decided: the start of an agent, each sweep, `gc` and what `session list` shows ask it.

A cell is *class*: plan. Columns are the authority's answers on the session's lease: it is live (**agrees**); over, and none newer was
granted (**ended**); a newer generation was granted (**newer**); the workspace is on HOLD (**on hold**); the
answer does not verify or lies below what the session knows (**not believed**); there is none (**silent**).
Rows are what was found on the host, as far as it matters for that record: the session's boot is over
(*rebooted*); the deadline in the keeper's table lies ahead (*in time*); the cgroup's stamp says that a fence of this generation
began (*fence stamped*); the breaker is open, or the agent has not run for `min_notice` (*held*).

| plan | what is done |
|---|---|
| run | it runs on under its lease |
| wait | it runs on until its deadline and begins nothing new (I9) |
| stop | frozen at once; its bytes are kept |
| keep | it stays stopped; what is not proved is asked for again; its bytes are kept |
| roll back | nobody can have written: the lease is given back, what was made of it goes |
| remove | kill, umount, the kernel's proof, removal |
| rest | as remove, but not now |
| person | frozen where it has a cgroup; nothing of it is removed until a person decides; a record that is not believed puts its workspace on HOLD |
| leave | nothing |

A disposition that a person gave is an event (`preserved discard`, `export --dispose`), not an observation: it makes the record
*deleting*, and is carried out whatever the authority answers. The end of grace is nobody's decision; so
the bytes stay as long as the authority is silent, on HOLD, not believed, or says that the lease is live.
";

fn words(record: Record) -> (&'static str, &'static str) {
    match record {
        Record::Absent => ("none", "a directory or cgroup that no record explains"),
        Record::Trashed => ("none, in the trash", "its removal was decided, and cut off"),
        Record::Unreadable => ("not believed", "it does not verify"),
        Record::Opening => ("opening", "OPENING, being made by this agent"),
        Record::CutOff => ("cut off", "OPENING, by an agent that is no more"),
        Record::Held => ("held", "ACTIVE or RELEASING"),
        Record::Doubted => ("doubted", "the same, with a missed renewal and none granted since"),
        Record::Fencing => ("fencing", "FENCING"),
        Record::Fenced => ("fenced", "FENCED"),
        Record::Preserved => ("preserved", "PRESERVED"),
        Record::Due => ("due", "PRESERVED, grace over, no publication UNKNOWN"),
        Record::Deleting => ("deleting", "DELETING"),
        Record::Closed => ("closed", "CLOSED"),
        Record::Quarantined => ("quarantined", "QUARANTINED"),
    }
}

const FACTS: [&str; 4] = ["rebooted", "in time", "fence stamped", "held"];

fn facts(seen: &Observed) -> [bool; 4] {
    [seen.rebooted, seen.in_time, seen.fence_stamped, seen.held]
}

/// The rows of one record: facts as text, then a cell for each answer. Rows that differ only in a fact
/// that does not matter beside the others are one.
fn rows(record: Record) -> Vec<([Option<bool>; 4], [String; 6])> {
    let cell = |seen, answer| {
        let (class, plan) = classify(seen, answer);
        format!("{}: {}", class.name(), plan.name())
    };
    let mut rows: Vec<([Option<bool>; 4], [String; 6])> = seen_of(record)
        .map(|seen| (facts(&seen).map(Some), Answer::ALL.map(|answer| cell(seen, answer))))
        .collect();
    // Two rows that differ in one fact alone and say the same are one row without it.
    for fact in [3, 2, 1, 0] {
        let mut merged: Vec<([Option<bool>; 4], [String; 6])> = Vec::new();
        for (key, cells) in rows {
            let mut wide = key;
            wide[fact] = None;
            let twin = merged.iter_mut().find(|(other, said)| {
                let mut other = *other;
                other[fact].take().is_some() && other == wide && *said == cells
            });
            match twin {
                Some((other, _)) => other[fact] = None,
                None => merged.push((key, cells)),
            }
        }
        rows = merged;
    }
    rows
}

#[test]
fn the_table_is_in_the_docs() {
    let mut page = HEAD.to_owned();
    for record in Record::ALL {
        let (name, meaning) = words(record);
        let rows = rows(record);
        // Each observation is in exactly one row, and the row says what the function says.
        for seen in seen_of(record) {
            let fits = |key: &[Option<bool>; 4]| {
                key.iter().zip(facts(&seen)).all(|(want, is)| want.is_none_or(|want| want == is))
            };
            let found: Vec<_> = rows.iter().filter(|(key, _)| fits(key)).collect();
            assert_eq!(found.len(), 1, "{seen:?}");
            for (answer, cell) in Answer::ALL.into_iter().zip(&found[0].1) {
                let (class, plan) = classify(seen, answer);
                assert_eq!(*cell, format!("{}: {}", class.name(), plan.name()));
            }
        }
        writeln!(page, "\n## Record: {name}\n\n{meaning}\n").unwrap();
        let same = |cells: &[String; 6]| cells.iter().all(|cell| *cell == cells[0]);
        if rows.iter().all(|(_, cells)| same(cells)) {
            page.push_str("| on the host | whatever is answered |\n|---|---|\n");
        } else {
            page.push_str("| on the host | agrees | ended | newer | on hold | not believed | silent |\n|---|---|---|---|---|---|---|\n");
        }
        for (key, cells) in &rows {
            let told = key.iter().zip(FACTS).filter_map(|(want, name)| {
                want.map(|is| if is { name.to_owned() } else { format!("not {name}") })
            });
            let told = told.collect::<Vec<_>>().join(", ");
            let told = if told.is_empty() { "whatever is found".to_owned() } else { told };
            let cells =
                if rows.iter().all(|(_, cells)| same(cells)) { &cells[..1] } else { &cells[..] };
            writeln!(page, "| {told} | {} |", cells.join(" | ")).unwrap();
        }
    }
    crate::golden::check("docs/RECONCILER.md", &page);
}
