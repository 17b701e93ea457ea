//! Which layers the records need, and the burial of those that nothing needs: before the object of a
//! layer is removed, its name is buried here, in a transaction in which nothing names it. From then
//! on nothing can, until whoever removes it says that it is gone. So a head never names a layer that is
//! being taken away, whatever a collector read before.

use std::collections::{BTreeMap, BTreeSet};

use super::verbs::{Backend, Rows, finish};
use super::{Error, Happening, Rider, WorkspaceId};
use crate::model::head::{Digest, Head};
use crate::model::ids::Version;
use crate::model::ledger::Which;
use crate::model::workspace::{KEPT, Workspace};
use crate::store::{Durability, Error as Fault};

/// What the records need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pins {
    /// The layers, and who needs each.
    pub layers: BTreeMap<Digest, String>,
    /// Which version of each workspace was looked at.
    seen: BTreeMap<WorkspaceId, Version>,
}

/// Layers, as far as records name them. Each call but [`Layers::pins`] is one transaction.
pub trait Layers: Send + Sync {
    /// The layers of heads, of the last [`KEPT`] versions of each workspace, and of publications
    /// whose outcome is open.
    ///
    /// # Errors
    /// See [`Error`]. A record that does not verify is one that may need any layer.
    fn pins(&self) -> Result<Pins, Error>;

    /// Buries those of `candidates` that nothing needs now; `pins` is what was needed a moment ago.
    /// Gives those that it buried.
    fn bury(
        &self,
        candidates: &[Digest],
        pins: &Pins,
        rider: Rider<'_, Vec<Digest>>,
    ) -> Result<Vec<Digest>, Error>;

    /// All that are buried.
    fn buried(&self) -> Result<Vec<Digest>, Error>;

    /// The objects are gone, or stay: who has such a layer may name it again.
    fn exhume(&self, layers: &[Digest]) -> Result<(), Error>;
}

impl<B: Backend> Layers for B {
    fn pins(&self) -> Result<Pins, Error> {
        let mut pins = Pins::default();
        // Not all in one transaction: others want theirs.
        for workspace in self.read(|rows| all(rows))? {
            let kept = self.read(|rows| kept(rows, &workspace.id))?;
            pins.note(workspace, kept);
        }
        for (layer, key) in self.read(|rows| open(rows))? {
            pins.layers.entry(layer).or_insert_with(|| format!("publication {key} is open"));
        }
        Ok(pins)
    }

    fn bury(
        &self,
        candidates: &[Digest],
        pins: &Pins,
        rider: Rider<'_, Vec<Digest>>,
    ) -> Result<Vec<Digest>, Error> {
        let buried = self.transact(Durability::Full, |rows| {
            let mut needed: BTreeSet<Digest> = pins.layers.keys().copied().collect();
            for workspace in all(rows)? {
                if pins.seen.get(&workspace.id) != Some(&workspace.at.version) {
                    needed.extend(kept(rows, &workspace.id)?.into_iter().flat_map(|head| head.0));
                }
                needed.extend(workspace.at.head.0);
            }
            needed.extend(open(rows)?.into_iter().map(|(layer, _)| layer));
            let mut buried = Vec::new();
            for layer in candidates.iter().filter(|layer| !needed.contains(layer)) {
                rows.set_buried(*layer, true)?;
                buried.push(*layer);
            }
            finish(rows, rider, Ok(buried))
        })?;
        Ok(buried.unwrap_or_default())
    }

    fn buried(&self) -> Result<Vec<Digest>, Error> {
        self.read(|rows| rows.buried())
    }

    fn exhume(&self, layers: &[Digest]) -> Result<(), Error> {
        self.transact(Durability::Full, |rows| {
            layers.iter().try_for_each(|layer| rows.set_buried(*layer, false))
        })
    }
}

impl Pins {
    fn note(&mut self, workspace: Workspace, kept: Vec<Head>) {
        let Workspace { id, at, .. } = workspace;
        for layer in at.head.0 {
            self.layers.entry(layer).or_insert_with(|| format!("the head of {id}"));
        }
        for layer in kept.into_iter().flat_map(|head| head.0) {
            self.layers.entry(layer).or_insert_with(|| format!("an earlier version of {id}"));
        }
        self.seen.insert(id, at.version);
    }
}

/// The workspaces that there are. One that does not verify may name anything.
fn all(rows: &mut dyn Rows) -> Result<Vec<Workspace>, Fault> {
    let mut there = Vec::new();
    for found in rows.all()? {
        let found = found.map_err(|bad| Fault::Record {
            table: "workspaces",
            id: bad.id,
            why: format!("{}; it may need any layer, so none is removed", bad.why),
        })?;
        if !found.deleted {
            there.push(found);
        }
    }
    Ok(there)
}

/// The heads of the last versions.
fn kept(rows: &mut dyn Rows, id: &WorkspaceId) -> Result<Vec<Head>, Fault> {
    // Refusals and the like stand in between.
    let mut limit = KEPT * 8;
    loop {
        let told = rows.rows(id, limit)?;
        let all = told.len() < limit;
        let mut heads = BTreeMap::new();
        for row in told {
            match row.what {
                Happening::Created { at, .. }
                | Happening::Published { at, .. }
                | Happening::Repaired { at, .. }
                    if heads.len() < KEPT || heads.contains_key(&at.version) =>
                {
                    heads.insert(at.version, at.head);
                }
                _ => {}
            }
        }
        if all || heads.len() >= KEPT {
            return Ok(heads.into_values().collect());
        }
        limit = limit.saturating_mul(8);
    }
}

/// The layers of publications that may still be committed.
fn open(rows: &mut dyn Rows) -> Result<Vec<(Digest, super::PublicationKey)>, Fault> {
    let which = Which { workspace: None, open: true, limit: usize::MAX };
    let rows = rows.publications(&which)?;
    let asked = rows.into_iter().filter_map(|row| Some((row.key, row.asked?)));
    Ok(asked
        .flat_map(|(key, asked)| asked.layers().map(|l| (l, key)).collect::<Vec<_>>())
        .collect())
}

/// Whether one of these is being removed.
pub(super) fn any_buried(
    rows: &mut dyn Rows,
    layers: impl IntoIterator<Item = Digest>,
) -> Result<bool, Fault> {
    for layer in layers {
        if rows.is_buried(layer)? {
            return Ok(true);
        }
    }
    Ok(false)
}
