//! The mount ticket: a public statement that binds a workspace, a session, a lease with its
//! generation, a base head and a sealed cgroup. It is no token; the signature is made in the
//! store room, which keeps the keys.

use serde::{Deserialize, Serialize};

use super::head::HeadAt;
use super::ids::{BootId, Generation, HostId, LeaseId, SessionId, WorkspaceId};

/// What a ticket states.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ticket {
    /// The workspace written.
    pub workspace: WorkspaceId,
    /// The mount session.
    pub session: SessionId,
    /// The host.
    pub host: HostId,
    /// The boot in which mount and cgroup exist.
    pub boot: BootId,
    /// The lease.
    pub lease: LeaseId,
    /// The fencing token.
    pub generation: Generation,
    /// What is mounted.
    pub base: HeadAt,
    /// The sealed cgroup, relative to the cgroup2 root.
    pub cgroup: String,
    /// When it was issued, RFC 3339, for people.
    pub issued: String,
}
