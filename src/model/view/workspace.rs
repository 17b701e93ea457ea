//! What is asked of a workspace as a whole.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::bounds;

/// `workspace hold`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HoldWorkspace {
    /// Why; shown in every refusal. At most 4,096 bytes.
    #[serde(default, deserialize_with = "bounds::reason")]
    pub reason: String,
}

/// `workspace repair`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RepairWorkspace {
    /// The generation to go on from: the next lease gets the one after it. Not below the highest
    /// that was ever seen.
    #[serde(default)]
    pub accept_generation: u64,
    /// Why it is believed again; at most 4,096 bytes.
    #[serde(default, deserialize_with = "bounds::reason")]
    pub reason: String,
}

/// `workspace delete`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DeleteWorkspace {
    /// Why; at most 4,096 bytes.
    #[serde(default, deserialize_with = "bounds::reason")]
    pub reason: String,
}
