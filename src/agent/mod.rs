//! (room being built)

pub mod failure;
pub mod handle;
