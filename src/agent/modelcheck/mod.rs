//! A model check of the product's own `model::step::step` and `Workspace` rules: two hosts, one
//! authority, crashes, lost and late answers, deadlines, a writer that writes whenever the kernel
//! lets it. Every interleaving within a scope is walked; a planted bug must be found.
//!
//! What the executor must do is written down in `moves.rs` as it is modelled:
//! - an irreversible effect is done only after the record was persisted; others may come before;
//! - the effects of one session are done one at a time and each answer is heard before the next
//!   starts; only requests to the authority are on their way meanwhile;
//! - a fence's freeze overtakes what is pending; what was pending before is still done after it;
//! - a thaw asks the stamp and the deadline; an answer to a renewal after the deadline is a loss;
//! - a start observes what changed (thawed, made writable) before it says `Recovered`.

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
}

/// How far the check goes.
#[derive(Clone, Debug)]
pub struct Scope {
    pub left: Left,
    /// Last instant of the clock.
    pub clock: u8,
    /// Host clocks may stand still while the authority's runs on.
    pub paused: bool,
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
        vec![World::new(self.scope.left.clone())]
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
            Property::always("I3", |_: &Model, w: &World| w.broken != Some(Invariant::I3) && w.facts_are_true()),
            Property::always("I4", |_: &Model, w: &World| w.broken != Some(Invariant::I4)),
            Property::always("I6", |_: &Model, w: &World| w.broken != Some(Invariant::I6)),
            Property::always("I7", |_: &Model, w: &World| w.unknown_is_kept()),
            Property::always("I9", |m: &Model, w: &World| m.scope.paused || w.stopped_in_time()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stateright::Model as _;

    fn scope() -> Scope {
        let left = Left {
            crashes: 1,
            lost: 1,
            acquisitions: 2,
            keys: 2,
            writes: 2,
            ..Left::default()
        };
        Scope { left, clock: 4, paused: false }
    }

    fn check(scope: Scope, bug: Option<Bug>) {
        let start = std::time::Instant::now();
        let c = Model { scope, bug }.checker().threads(2).spawn_bfs().join();
        println!("{bug:?}: {} unique, {} states, depth {}, {:?}", c.unique_state_count(), c.state_count(), c.max_depth(), start.elapsed());
        for (name, path) in c.discoveries() {
            println!("{name}: {:?}", path.into_actions());
        }
    }

    #[test]
    fn main_scope() {
        let s = scope();
        for (crashes, lost, keys, acquisitions) in [(0,0,1,1),(0,0,2,2),(0,1,1,2),(1,0,1,1)] {
            let left = Left { crashes, keys, lost, acquisitions, ..s.left.clone() };
            println!("{left:?}");
            check(Scope { left, ..s.clone() }, None);
        }
    }
}
