//! Layers that nothing needs any more.
//!
//! 1. What is here and nobody needs: no head, kept version or open publication, no session, no
//!    bundle. 2. Each is kept from being added; what came in before that is looked at once more.
//! 3. The authority buries those that no record needs *then*, in one transaction: no head can name them
//!    any more. 4. Their objects go. 5. The burial is lifted: whoever makes such a layer again may name
//!    it. A crash leaves burials, which the next start brings to their end.

use std::collections::BTreeMap;

use super::preserved::item;
use super::{internal, unavailable};
use crate::agent::effects::text;
use crate::agent::failure::Failure;
use crate::agent::host::Host;
use crate::authority::Rider;
use crate::failpoint;
use crate::model::head::Digest;
use crate::model::journal::{Draft, Journal};
use crate::model::session::Work;
use crate::model::view::GcItem;
use crate::upper::{Error as Fault, bundle};

impl Host {
    /// Layers that a session of this host, or a bundle here, needs.
    fn needed_here(&self) -> BTreeMap<Digest, String> {
        let mut needed = BTreeMap::new();
        for slot in self.slots() {
            let s = slot.session();
            let captured = s.work.as_ref().and_then(Work::layer);
            let heads = s.base.head.0.into_iter().chain(s.expected.head.0);
            let others = s.own_layer.into_iter().chain(captured).chain(s.unknown.into_values());
            for layer in heads.chain(others) {
                needed.entry(layer).or_insert_with(|| format!("session {}", s.id));
            }
        }
        let bundles = std::fs::read_dir(&self.paths.bundles).into_iter().flatten().flatten();
        for place in bundles.map(|entry| entry.path()) {
            let Ok(bundle) = bundle::inspect(&place) else { continue };
            let told = bundle.provenance;
            for layer in told.base.0.into_iter().chain(told.expected.head.0) {
                needed.entry(layer).or_insert_with(|| format!("bundle {}", place.display()));
            }
        }
        needed
    }

    /// Removes the layers that nothing needs, or says which those are.
    pub(super) fn gc_layers(
        &self,
        by: &str,
        dry_run: bool,
        items: &mut Vec<GcItem>,
    ) -> Result<(), Failure> {
        let _keeping = self.keeping();
        // Nobody knows on what such a session was mounted.
        let unbelieved = self.unbelieved()?;
        let barred = match (unbelieved.first(), self.tripped()) {
            (Some(bad), _) => Some(format!(
                "the record of session {} does not verify, and it might need any layer",
                bad.id
            )),
            (None, Some(_)) => {
                Some("the breaker is open; `overfence breaker show` says why".to_owned())
            }
            (None, None) => None,
        };
        let pins = self.authority.pins().map_err(unavailable)?;
        let mut here = self.needed_here();
        for known in self.layers.equivalences() {
            let needed =
                |layer: &Digest| pins.layers.contains_key(layer) || here.contains_key(layer);
            if known.run.last().is_some_and(needed) {
                let why = format!("{} layers of a deep head, which it equals,", known.run.len());
                here.entry(known.layer).or_insert(why);
            } else if !dry_run && unbelieved.is_empty() {
                self.layers.forget_equivalence(&known).map_err(internal)?;
            }
        }
        let size = |layer| self.layers.info(layer).map_or(0, |info| info.size_compressed);
        let told = |layer: Digest, verdict: &str, why: &str, bytes| {
            item("layer", &layer.to_string(), verdict, why.to_owned(), bytes)
        };
        let mut going = Vec::new();
        for layer in self.layers.list().map_err(internal)? {
            match pins.layers.get(&layer).or_else(|| here.get(&layer)) {
                // What makes up a workspace is no matter of a collection.
                Some(why) if why.starts_with("the head of ") => {}
                Some(why) => {
                    items.push(told(layer, "keep", &format!("{why} needs it"), size(layer)))
                }
                None => going.push(layer),
            }
        }
        let unneeded = "nothing needs it";
        if dry_run || barred.is_some() {
            let (verdict, why) = match &barred {
                Some(why) => ("keep", why.as_str()),
                None => ("remove", unneeded),
            };
            items.extend(going.into_iter().map(|layer| told(layer, verdict, why, size(layer))));
            return Ok(());
        }
        let mut doomed: Vec<_> =
            going.into_iter().filter_map(|layer| Some((layer, self.layers.doom(layer)?))).collect();
        // Whatever was added before that is named by its session now.
        let mut here = self.needed_here();
        let equal = self.layers.equivalences().into_iter().map(|known| known.layer);
        here.extend(equal.map(|layer| (layer, String::new())));
        doomed.retain(|(layer, _)| !here.contains_key(layer));
        if doomed.is_empty() {
            return Ok(());
        }
        let candidates: Vec<_> = doomed.iter().map(|(layer, _)| *layer).collect();
        failpoint::hit("layers.bury.before");
        let rider: Rider<'_, Vec<Digest>> = Box::new(|buried| {
            let detail = serde_json::json!({ "layers": buried.as_ref().ok() });
            let entry = Draft {
                kind: "layers_buried".to_owned(),
                workspace: None,
                session: None,
                generation: None,
                actor: by.to_owned(),
                detail,
            };
            Journal { sessions: vec![], entries: vec![entry] }
        });
        let buried = self.authority.bury(&candidates, &pins, rider).map_err(unavailable)?;
        failpoint::hit("layers.bury.after");
        let mut gone = Vec::new();
        for (layer, doomed) in doomed.iter().filter(|(layer, _)| buried.contains(layer)) {
            let bytes = size(*layer);
            match self.layers.remove(doomed) {
                Ok(()) => {
                    gone.push(*layer);
                    items.push(told(*layer, "removed", unneeded, bytes));
                }
                // It stays buried: the next start, or the next collection, tries again.
                Err(fault) => items.push(told(*layer, "failed", &text(fault), bytes)),
            }
        }
        failpoint::hit("layers.exhume.before");
        self.authority.exhume(&gone).map_err(unavailable)?;
        failpoint::hit("layers.exhume.after");
        Ok(())
    }

    /// At start: brings removals to their end that a crash cut off.
    pub fn finish_burials(&self) -> Result<(), String> {
        let buried = self.authority.buried().map_err(text)?;
        let mut gone = Vec::new();
        for layer in &buried {
            let Some(doomed) = self.layers.doom(*layer) else { continue };
            match self.layers.remove(&doomed) {
                Ok(()) | Err(Fault::NoLayer(_)) => gone.push(*layer),
                Err(fault) => tracing::error!("layer {layer}: {}", text(fault)),
            }
        }
        match gone.is_empty() {
            true => Ok(()),
            false => self.authority.exhume(&gone).map_err(text),
        }
    }
}
