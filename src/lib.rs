//! `overfence` stops stale writers: each writer of a workspace gets its own overlay mount and its
//! own sealed cgroup under a lease with a fencing generation; when the lease is lost the writer is
//! stopped in the kernel, the stop is proved step by step, and its bytes are kept for a grace
//! window.
//!
//! The rooms, and who may call whom (nothing points up):
//!
//! ```text
//! main -> cli, agent, keeper      cli -> api types, workload      api -> agent
//! agent -> authority, store, upper, kernel, model                 everything -> model
//! ```

pub mod agent;
pub mod api;
pub mod authority;
pub mod cli;
pub mod config;
pub mod failpoint;
#[cfg(test)]
mod golden;
pub mod keeper;
pub mod kernel;
pub mod model;
pub mod progress;
pub mod store;
pub mod upper;
pub mod workload;
