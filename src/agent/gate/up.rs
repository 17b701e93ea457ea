//! What there is of the lease gate on this host, how it is adopted or put up, and whether it stands.

use std::sync::Arc;

use crate::agent::effects::text;
use crate::config::GateUse;
use crate::kernel::Error;
use crate::kernel::gate::{self, Gate};

/// What stands of it.
#[derive(Clone, Default)]
pub(super) struct Up {
    /// What can be renewed, shut and left.
    pub gate: Option<Arc<Gate>>,
    /// Why it is not this agent's own: no programs of it are attached. Entries of an older one go on.
    pub why: Option<String>,
    /// It is no business of this agent's any more: who has a lease is let out of it.
    pub frees: bool,
    /// It is looked for again while it does not stand.
    pub wanted: bool,
    /// Another agent had its turn, which ends some time.
    pub busy: bool,
}

pub(super) const fn no_gate(reason: String) -> Error {
    Error::NoGate { reason }
}

pub(super) const fn is_busy(fault: &Error) -> bool {
    matches!(fault, Error::GateBusy { .. })
}

impl Up {
    /// Adopts what stands, or puts it up. Where it cannot be told what stands, `known` is kept.
    pub fn find(wish: GateUse, known: &Self) -> Self {
        let raised = match wish {
            GateUse::Use => Gate::raise(),
            GateUse::Off => Err(no_gate("it is switched off (fence.gate = \"off\")".to_owned())),
        };
        let fault = match raised {
            Ok(gate) => {
                return Self { gate: Some(Arc::new(gate)), wanted: true, ..Self::default() };
            }
            Err(fault) => fault,
        };
        let busy = is_busy(&fault);
        let why = gate::why(&fault);
        // Programs that are attached go on comparing: somebody has to move their deadlines.
        let (gate, wanted) = match Gate::adopt() {
            Ok(gate) => (gate.map(Arc::new), known.wanted && wish == GateUse::Use),
            Err(fault) => {
                tracing::error!("what is pinned of the lease gate cannot be used: {}", text(fault));
                (known.gate.clone(), true)
            }
        };
        let frees = wish == GateUse::Off || gate::is_clock_shifted();
        Self { gate, why: Some(why), frees, wanted, busy }
    }

    /// The gate, if new overlays are entered.
    pub fn takes(&self) -> Option<&Arc<Gate>> {
        self.gate.as_ref().filter(|gate| !self.frees && gate.takes())
    }

    /// Whether it is there as it was found.
    pub fn stands(&self) -> bool {
        match &self.gate {
            _ if self.busy => false,
            Some(gate) if self.wanted => gate.stands(),
            // A part of it may have been gone before.
            Some(gate) => gate.is_pinned(),
            None => !self.wanted,
        }
    }

    pub fn tell(&self) {
        let missing = self.gate.as_ref().map(|gate| gate.missing().join(", "));
        match (missing.as_deref(), &self.why) {
            (Some(""), None) => tracing::info!("the lease gate is complete"),
            (Some(missing), None) => tracing::warn!("the lease gate misses {missing}"),
            (None, why) => tracing::info!("no lease gate: {}", why.as_deref().unwrap_or_default()),
            (Some(_), Some(why)) => {
                tracing::warn!("the lease gate goes on as an earlier agent put it up: {why}");
            }
        }
    }
}
