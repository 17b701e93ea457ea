//! What is asked of a workspace as a whole.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{CreateWorkspace, PathText, bounds};

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

/// `workspace import`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImportWorkspace {
    /// The workspace to make; its `lowers`, or an image, become its first layers.
    pub about: CreateWorkspace,
    /// An OCI image layout with one image. Absolute path.
    #[serde(default)]
    pub image: Option<PathText>,
    /// The image's layers, uncompressed, at most; 64 GiB if absent.
    #[serde(default)]
    pub max_bytes: Option<u64>,
}

/// `workspace revert`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RevertWorkspace {
    /// The version whose layers are published once more.
    #[serde(default)]
    pub to: u64,
    /// Why; at most 4,096 bytes.
    #[serde(default, deserialize_with = "bounds::reason")]
    pub reason: String,
}

/// The answer to `workspace verify`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct WorkspaceReport {
    /// The workspace.
    pub workspace: String,
    /// The version whose layers were read.
    pub version: u64,
    /// Whether all of them are whole.
    pub ok: bool,
    /// Each, lowest first.
    pub layers: Vec<LayerReport>,
}

/// What the reading of one layer found.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct LayerReport {
    /// Its diff id.
    pub layer: String,
    /// Whether there is a tree of it, which was read, too.
    pub unpacked: bool,
    /// What is wrong with it.
    pub fault: Option<String>,
}
