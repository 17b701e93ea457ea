//! Reads the stored layers, one after the other, so that damage is found before somebody needs them. What
//! is found is named: in the evidence, once, in the log and as a metric; a damaged layer is not mounted.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::effects::text;
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
    let known = host.layers.is_damaged(layer);
    let outcome = host.layers.verify(layer, &|| host.stopping());
    host.metrics.layers_damaged(host.layers.damaged());
    let fault = match outcome {
        Ok(_) | Err(Error::Stopped | Error::NoLayer(_)) => return,
        Err(fault) => fault,
    };
    let why = text(fault);
    if known {
        return;
    }
    if !host.layers.is_damaged(layer) {
        tracing::error!("whether layer {layer} is whole is not known: {why}");
        return;
    }
    // Which heads name it is not known while the authority is silent: then it is null, not none.
    let named = host.authority.list().map(|all| {
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
    if let Err(fault) = host.store.record(&journal, Durability::Full) {
        tracing::error!("{}", text(fault));
    }
}
