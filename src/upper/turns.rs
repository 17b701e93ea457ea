//! Who has a layer of a store in hand at this moment, so that no two are in each other's way.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::model::head::Digest;

/// The turns of one store.
#[derive(Debug, Default)]
pub(super) struct Turns {
    held: Mutex<Held>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Held {
    /// Added, and named by nothing yet; how often.
    fresh: BTreeMap<Digest, usize>,
    /// Being removed.
    doomed: BTreeSet<Digest>,
    /// Their trees are being made.
    unpacking: BTreeSet<Digest>,
}

/// A layer that nobody adds as long as this lives; see `LayerStore::doom`.
#[derive(Debug)]
pub struct Doomed<'a> {
    turns: &'a Turns,
    pub(super) layer: Digest,
}

impl Drop for Doomed<'_> {
    fn drop(&mut self) {
        self.turns.held().doomed.remove(&self.layer);
        self.turns.changed.notify_all();
    }
}

/// The one turn to make a layer's tree; those of other layers are made beside it.
#[derive(Debug)]
pub(super) struct Unpacking<'a> {
    turns: &'a Turns,
    layer: Digest,
}

impl Drop for Unpacking<'_> {
    fn drop(&mut self) {
        self.turns.held().unpacking.remove(&self.layer);
        self.turns.changed.notify_all();
    }
}

impl Turns {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `take` can be done.
    fn wait(&self, mut take: impl FnMut(&mut Held) -> bool) {
        let mut held = self.held();
        while !take(&mut held) {
            held = self.changed.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A layer is added, once nobody removes it any more; it stays until it is settled.
    pub(super) fn add(&self, layer: Digest) {
        self.wait(|held| {
            let free = !held.doomed.contains(&layer);
            if free {
                *held.fresh.entry(layer).or_default() += 1;
            }
            free
        });
    }

    /// What was added is named, or is not needed.
    pub(super) fn settle(&self, layers: impl IntoIterator<Item = Digest>) {
        let mut held = self.held();
        for layer in layers {
            if let Some(n) = held.fresh.get_mut(&layer) {
                *n = n.saturating_sub(1);
                if *n == 0 {
                    held.fresh.remove(&layer);
                }
            }
        }
    }

    /// Keeps a layer from being added, unless one that was added is still to be settled.
    pub(super) fn doom(&self, layer: Digest) -> Option<Doomed<'_>> {
        let mut held = self.held();
        if held.fresh.contains_key(&layer) || !held.doomed.insert(layer) {
            return None;
        }
        Some(Doomed { turns: self, layer })
    }

    /// Waits for the turn to make a layer's tree.
    pub(super) fn unpack(&self, layer: Digest) -> Unpacking<'_> {
        self.wait(|held| held.unpacking.insert(layer));
        Unpacking { turns: self, layer }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::RecvTimeoutError;
    use std::time::Duration;

    use crate::upper::round_trip::capture_dir;
    use crate::upper::store::LayerStore;

    #[test]
    fn a_layer_that_takes_long_to_unpack_holds_up_no_other() {
        let tmp = tempfile::tempdir().unwrap();
        let store = &LayerStore::open(&tmp.path().join("layers")).unwrap();
        let [slow, other] = ["a", "b"].map(|name| {
            let source = tmp.path().join(name);
            std::fs::create_dir(&source).unwrap();
            std::fs::write(source.join(name), name).unwrap();
            capture_dir(&source, store).unwrap().diff_id
        });
        let turn = store.turns.unpack(slow);
        std::thread::scope(|scope| {
            let (tell, told) = std::sync::mpsc::channel();
            for layer in [other, slow] {
                let tell = tell.clone();
                scope.spawn(move || {
                    let tree = store.ensure_tree(layer, &|| false).map(|tree| tree.is_dir());
                    tell.send((layer, tree.unwrap())).unwrap();
                });
            }
            let first = told.recv_timeout(Duration::from_secs(60));
            let second = told.recv_timeout(Duration::from_millis(100));
            // Before anything is asserted: a scope waits for its threads.
            drop(turn);
            assert_eq!(first, Ok((other, true)));
            assert_eq!(second, Err(RecvTimeoutError::Timeout), "its own waits for its turn");
            assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok((slow, true)));
        });
    }

    #[test]
    fn an_unpacking_that_nobody_wants_any_more_ends_and_leaves_no_tree() {
        let tmp = tempfile::tempdir().unwrap();
        let (source, layers) = (tmp.path().join("a"), tmp.path().join("layers"));
        std::fs::create_dir(&source).unwrap();
        std::fs::write(source.join("f"), vec![7; 1 << 20]).unwrap();
        let store = LayerStore::open(&layers).unwrap();
        let layer = capture_dir(&source, &store).unwrap().diff_id;
        let outcome = store.ensure_tree(layer, &|| true);
        assert!(matches!(outcome, Err(crate::upper::Error::Stopped)), "{outcome:?}");
        assert!(!store.is_damaged(layer));
        assert!(!layers.join(layer.hex()).join("tree").exists());
        store.ensure_tree(layer, &|| false).unwrap();
    }
}
