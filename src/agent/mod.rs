//! (room being built)
#[cfg(test)]
mod modelcheck;
