//! A model check of the product's own `model::step::step` and `Workspace` rules: two hosts, one
//! authority, crashes, lost and late answers, deadlines, a writer that writes whenever the kernel
//! lets it. Every interleaving within a scope is walked; a planted bug must be found.
//!
//! What the executor must do is written down in `executor.rs` as it is modelled:
//! - an irreversible effect is done only after the record was persisted; others may come before;
//! - the effects of one session are done one at a time and each answer is heard before the next
//!   starts; only requests to the authority are on their way meanwhile;
//! - a fence's freeze overtakes what is pending; what was pending before is still done after it;
//! - a thaw asks the stamp and the deadline; an answer to a renewal after the deadline is a loss;
//! - a layer is packed beside everything else, from what was gathered while the writer stood;
//! - a start observes what changed (thawed, made writable) before it says `Recovered`.

// All of this room is a test.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod begins;
mod executor;
mod moves;
mod world;

use stateright::{Checker, Property};

use moves::Move;
use world::{Invariant, Left, World};

/// Errors a careful engineer could make; each must be caught.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The authority does not compare generation and lease.
    GenerationNotCompared,
    /// An acquisition keeps the generation.
    GenerationReused,
    /// A renewal revives a lease that ran out.
    RenewRevives,
    /// The deadline counts from the answer instead of from the sending.
    DeadlineFromAnswer,
    /// A thaw does not ask the stamp.
    ThawWithoutStamp,
    /// `frozen` is reported when it was asked for.
    FactBeforeKernel,
    /// A lost answer is taken for a refusal.
    UnknownIsFailed,
    /// The capture that makes a close clean was taken while processes lived.
    CleanFromLiveCapture,
    /// Removal starts before the superblock is gone.
    RemoveBeforeGone,
    /// The command starts before ACTIVE is recorded.
    WriterBeforeRecord,
    /// Irreversible effects do not wait for the record.
    EffectBeforeRecord,
    /// The authority takes a begin from whoever asks.
    BeginUnchecked,
    /// The authority compares the keys of requests, and not their tasks.
    TaskNotCompared,
}

/// How far the check goes.
#[derive(Clone, Debug)]
pub struct Scope {
    pub left: Left,
    /// Last instant of the clock.
    pub clock: u8,
    /// How long a grant lasts.
    pub ttl: u8,
    /// Host 0 has no session at first.
    pub empty: bool,
    /// A busy overlay is sealed.
    pub seal: bool,
    /// The upper's file system clones files: a checkpoint thaws ahead of its layer.
    pub clones: bool,
    /// Host clocks may stand still while the authority's runs on.
    pub paused: bool,
    /// Everything else may happen between two effects of host 0, not only its crash.
    pub fine: bool,
}

/// The model that stateright walks.
#[derive(Clone, Debug)]
pub struct Model {
    pub scope: Scope,
    pub bug: Option<Bug>,
}

impl stateright::Model for Model {
    type State = World;
    type Action = Move;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self.scope.left.clone(), self.scope.ttl, self.scope.empty, self.scope.seal)]
    }

    fn actions(&self, w: &World, out: &mut Vec<Move>) {
        if w.broken.is_none() {
            self.moves(w, out);
        }
    }

    fn next_state(&self, w: &World, m: Move) -> Option<World> {
        self.play(w, m)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("I1", |_: &Model, w: &World| w.broken != Some(Invariant::I1)),
            Property::always("I2", |_: &Model, w: &World| w.broken != Some(Invariant::I2)),
            Property::always("I3", |_: &Model, w: &World| {
                w.broken != Some(Invariant::I3) && w.facts_are_true()
            }),
            Property::always("I4", |_: &Model, w: &World| w.broken != Some(Invariant::I4)),
            Property::always("I6", |_: &Model, w: &World| w.broken != Some(Invariant::I6)),
            Property::always("I7", |_: &Model, w: &World| w.unknown_is_kept() && w.sent_once()),
            Property::always("I9", |m: &Model, w: &World| m.scope.paused || w.stopped_in_time()),
        ]
    }
}

mod tests {
    use stateright::Model as _;

    use super::*;

    fn walk(scope: Scope, bug: Option<Bug>) -> impl Checker<Model> {
        Model { scope, bug }.checker().threads(2).spawn_bfs().join()
    }

    /// Walks everything in the scope and says how much that was.
    fn holds(name: &str, scope: Scope) {
        let start = std::time::Instant::now();
        let seen = walk(scope, None);
        let (states, depth) = (seen.unique_state_count(), seen.max_depth());
        println!("{name}: {states} states, depth {depth}, {:.1?}", start.elapsed());
        assert!(seen.is_done());
        let broken = seen.discoveries().into_iter().next();
        assert!(broken.is_none(), "{name}: {:?}", broken.map(|(i, path)| (i, path.into_actions())));
    }

    /// The planted bug is found, and by this invariant.
    fn caught(bug: Bug, invariant: &'static str, scope: Scope) {
        let found = Model { scope, bug: Some(bug) }
            .checker()
            .threads(2)
            .finish_when(stateright::HasDiscoveries::AnyOf([invariant].into()))
            .spawn_bfs()
            .join();
        let names: Vec<_> = found.discoveries().into_keys().collect();
        println!("{bug:?}: {names:?} after {} states", found.unique_state_count());
        assert!(names.contains(&invariant), "{bug:?} was caught by {names:?}");
    }

    fn scope(left: Left) -> Scope {
        let (empty, seal, clones, paused, fine) = (false, false, false, false, false);
        Scope { left, clock: 2, ttl: 2, empty, seal, clones, paused, fine }
    }

    /// Three generations, a publication of each host, a writer that goes on writing.
    fn both() -> Left {
        Left { acquisitions: 2, keys: [1, 1], writes: 1, ..Left::default() }
    }

    /// Two generations, one publication, for what needs other things beside.
    fn small() -> Left {
        Left { acquisitions: 1, keys: [1, 0], writes: 1, ..Left::default() }
    }

    #[test]
    fn holds_with_a_crash_and_a_lost_answer() {
        holds("crash, lost", scope(Left { crashes: 1, lost: 1, writes: 0, ..both() }));
    }

    #[test]
    fn holds_with_a_crash_and_a_writer() {
        holds("crash, write", scope(Left { crashes: 1, ..both() }));
    }

    #[test]
    fn holds_with_a_lost_answer_and_a_writer() {
        holds("lost, write", scope(Left { lost: 1, ..both() }));
    }

    #[test]
    fn holds_between_any_two_effects() {
        holds("fine", Scope { fine: true, ..scope(Left { crashes: 1, ..small() }) });
    }

    #[test]
    fn holds_while_a_layer_is_made_and_its_session_runs() {
        let beside = |left| Scope { clones: true, ..scope(left) };
        holds("packing, crash", beside(Left { crashes: 1, ..both() }));
        holds("packing, lost", beside(Left { lost: 1, ..both() }));
        holds("packing, two keys", beside(Left { keys: [2, 0], crashes: 1, ..small() }));
    }

    #[test]
    fn holds_while_a_layer_is_made_between_any_two_effects() {
        let left = Left { crashes: 1, ..small() };
        holds("packing, fine", Scope { clones: true, fine: true, ..scope(left) });
        let left = Left { fences: 1, foreign: 1, acquisitions: 0, ..small() };
        holds("packing, foreign", Scope { clones: true, ..scope(left) });
    }

    #[test]
    fn holds_with_two_publications_of_one_session() {
        holds("two keys", scope(Left { keys: [2, 0], lost: 1, ..small() }));
    }

    #[test]
    fn holds_with_a_reboot_and_a_discard() {
        holds("reboot", scope(Left { reboots: 1, discards: 1, ..small() }));
    }

    #[test]
    fn holds_while_a_session_opens() {
        let left = Left { crashes: 1, lost: 1, fences: 1, ..small() };
        holds("opening", Scope { empty: true, ..scope(left) });
    }

    #[test]
    fn holds_with_renewals_and_a_longer_clock() {
        let left = Left { renewals: 1, lost: 1, keys: [0, 0], ..small() };
        holds("renewal", Scope { clock: 5, ttl: 3, ..scope(left) });
    }

    #[test]
    fn holds_with_an_operator_and_foreign_hands() {
        let left = Left { fences: 1, foreign: 1, slow: 1, busy: 1, ..small() };
        holds("foreign", scope(Left { writes: 0, acquisitions: 0, ..left.clone() }));
        holds("operator", scope(Left { crashes: 1, foreign: 0, keys: [0, 0], ..left }));
    }

    /// A writer that keeps its overlay busy, an operator, a readmission.
    fn sealing() -> Scope {
        let left = Left { fences: 1, busy: 1, crashes: 1, keys: [0, 0], ..small() };
        Scope { seal: true, ..scope(left) }
    }

    #[test]
    fn holds_with_a_seal_and_a_crash() {
        holds("seal", sealing());
    }

    #[test]
    fn holds_with_a_seal_a_reboot_and_a_discard() {
        let left = Left { reboots: 1, discards: 1, crashes: 0, ..sealing().left };
        holds("seal, reboot", Scope { left, ..sealing() });
    }

    #[test]
    fn finds_a_seal_ahead_of_its_record() {
        caught(Bug::EffectBeforeRecord, "I3", sealing());
    }

    #[test]
    fn holds_in_a_machine_that_was_paused() {
        holds("paused", Scope { paused: true, ..scope(Left { lost: 1, ..small() }) });
    }

    /// Both writers want to send the same, and the first loses the workspace on the way.
    fn asking() -> Scope {
        let left = Left { begins: [2, 1], fences: 1, keys: [0, 0], writes: 0, ..small() };
        scope(left)
    }

    #[test]
    fn holds_with_requests_a_crash_and_a_lost_answer() {
        holds("requests", scope(Left { crashes: 1, lost: 1, ..asking().left }));
    }

    #[test]
    fn holds_with_requests_and_publications() {
        holds("requests, keys", scope(Left { keys: [1, 0], fences: 0, ..asking().left }));
    }

    #[test]
    fn finds_a_begin_that_nobody_checked() {
        caught(Bug::BeginUnchecked, "I1", asking());
    }

    #[test]
    fn finds_a_task_that_is_sent_under_two_keys() {
        caught(Bug::TaskNotCompared, "I7", asking());
    }

    #[test]
    fn finds_a_generation_that_is_not_compared() {
        caught(Bug::GenerationNotCompared, "I1", scope(both()));
    }

    #[test]
    fn finds_a_generation_that_is_given_twice() {
        caught(Bug::GenerationReused, "I2", scope(both()));
    }

    #[test]
    fn finds_a_renewal_that_revives() {
        let left = Left { renewals: 1, ..small() };
        caught(Bug::RenewRevives, "I1", Scope { clock: 3, ..scope(left) });
    }

    #[test]
    fn finds_a_deadline_counted_from_the_answer() {
        let left = Left { renewals: 1, keys: [0, 0], ..small() };
        caught(Bug::DeadlineFromAnswer, "I9", Scope { clock: 4, ttl: 3, ..scope(left) });
    }

    #[test]
    fn finds_a_thaw_that_does_not_ask_the_stamp() {
        caught(Bug::ThawWithoutStamp, "I3", scope(Left { crashes: 1, ..small() }));
    }

    #[test]
    fn finds_a_fact_ahead_of_the_kernel() {
        caught(Bug::FactBeforeKernel, "I3", scope(Left { slow: 1, ..small() }));
    }

    #[test]
    fn finds_an_unknown_taken_for_failed() {
        caught(Bug::UnknownIsFailed, "I7", scope(Left { lost: 1, ..small() }));
    }

    #[test]
    fn finds_a_clean_close_captured_while_processes_lived() {
        let left = Left { writes: 1, ..small() };
        caught(Bug::CleanFromLiveCapture, "I4", Scope { fine: true, ..scope(left) });
    }

    #[test]
    fn finds_a_removal_ahead_of_its_proof() {
        caught(Bug::RemoveBeforeGone, "I6", scope(small()));
    }

    #[test]
    fn finds_a_writer_ahead_of_its_record() {
        let left = Left { crashes: 1, ..small() };
        caught(Bug::WriterBeforeRecord, "I4", Scope { empty: true, ..scope(left) });
    }

    #[test]
    fn finds_an_effect_ahead_of_its_record() {
        caught(Bug::EffectBeforeRecord, "I7", scope(Left { crashes: 1, ..small() }));
    }
}
