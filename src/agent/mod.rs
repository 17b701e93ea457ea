//! (room being built)

pub mod failure;
