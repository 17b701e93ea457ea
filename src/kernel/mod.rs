//! (room being built)
pub mod launch;
