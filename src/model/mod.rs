//! Pure types and rules: no clock, no I/O, no randomness but the making of ids. Everything else
//! in overfence asks this room what is allowed and what follows.

pub mod facts;
pub mod head;
pub mod ids;
pub mod time;
