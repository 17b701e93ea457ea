//! Reads the stored layers, one after the other, so that damage is found before somebody needs them. What
//! is found, here or by whoever else meets it first, is named: in the evidence, once, in the log and as a
//! metric; a damaged layer is not mounted.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::effects::text;
use super::failure::Failure;
use super::host::Host;
use crate::kernel::clock;
use crate::model::head::Digest;
use crate::model::journal::{Draft, Journal};
use crate::store::Durability;
use crate::upper::Error;

/// The first round waits for so long after a start, in which others have work to do.
const FIRST: Duration = Duration::from_secs(600);
/// How many times as long as a layer took it is rested before the next: readers are in no hurry.
const REST: u32 = 10;
const REST_AT_LEAST: Duration = Duration::from_millis(100);

/// Runs until the agent stops.
pub async fn run(host: Arc<Host>) {
    let every = host.config.preserve.scrub;
    host.metrics.layers_damaged(host.layers.damaged());
    tokio::time::sleep(every.min(FIRST)).await;
    loop {
        let begun = clock::now();
        let listed = host.layers.list().unwrap_or_else(|fault| {
            tracing::error!("the stored layers cannot be listed, none is read: {}", text(fault));
            vec![]
        });
        let mut left = VecDeque::from(listed);
        while let Some(layer) = left.pop_front() {
            let (reader, at) = (Arc::clone(&host), clock::now());
            let read = tokio::task::spawn_blocking(move || scrub(&reader, layer));
            if let Err(fault) = read.await {
                tracing::error!("layer {layer} was not read: {fault}");
            }
            let took = clock::now().since(at);
            tokio::time::sleep((took * REST).max(REST_AT_LEAST)).await;
        }
        tokio::time::sleep(every.saturating_sub(clock::now().since(begun))).await;
    }
}

/// Reads one layer; tells of damage when it is new.
fn scrub(host: &Host, layer: Digest) {
    let outcome = host.layers.verify(layer, &|| host.stopping());
    host.metrics.layers_damaged(host.layers.damaged());
    match outcome {
        Ok(_) | Err(Error::Stopped | Error::NoLayer(_)) => {}
        Err(_) if host.layers.is_damaged(layer) => host.tell_damage(layer),
        Err(fault) => {
            tracing::error!("whether layer {layer} is whole is not known: {}", text(fault));
        }
    }
}

impl Host {
    /// A request's failure for want of a layer that something here needs. Damage that nobody met
    /// before is marked and told.
    pub fn of_layers(&self, fault: Error) -> Failure {
        match &fault {
            Error::Damaged { layer, .. } => {
                if !self.layers.is_damaged(*layer) {
                    // What it finds is marked; the failure is the one that was met.
                    let _ = self.layers.verify(*layer, &|| self.stopping());
                }
                self.tell_damage(*layer);
            }
            Error::NoLayer(layer) => self.tell_damage(*layer),
            _ => {}
        }
        Failure::new(fault.code(), text(fault))
    }

    /// Tells of a layer that is marked as damaged, or is missing, unless somebody told of it.
    pub fn tell_damage(&self, layer: Digest) {
        let noted = self.layers.tell_damage(layer, |why| self.record_damage(layer, why));
        if let Err(fault) = noted {
            tracing::error!("layer {layer}: {}", text(fault));
        }
        self.metrics.layers_damaged(self.layers.damaged());
    }

    fn record_damage(&self, layer: Digest, why: &str) -> bool {
        // Which heads name it is not known while the authority is silent: then it is null, not none.
        let named = self.authority.list().map(|all| {
            let named = all.into_iter().filter(|w| w.at.head.0.contains(&layer)).map(|w| w.id);
            named.collect::<Vec<_>>()
        });
        let named = named.inspect_err(|fault| tracing::error!("{fault}")).ok();
        tracing::error!("layer {layer} is damaged: {why}; heads that name it: {named:?}");
        let entry = Draft {
            kind: "layer_damaged".to_owned(),
            workspace: named.as_ref().and_then(|all| all.first().cloned()),
            session: None,
            generation: None,
            actor: "agent".to_owned(),
            detail: serde_json::json!({ "layer": layer, "why": why, "heads": named }),
        };
        let journal = Journal { sessions: vec![], entries: vec![entry] };
        let recorded = self.store.record(&journal, Durability::Full);
        recorded.inspect_err(|fault| tracing::error!("{fault}")).is_ok()
    }
}
