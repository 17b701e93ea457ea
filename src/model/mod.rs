//! Pure types and rules: no clock, no I/O, no randomness but the making of ids. Everything else
//! in overfence asks this room what is allowed and what follows.
//!
//! Two of its functions carry the product: [`workspace::Workspace::publish`], the predicate under
//! which a head advances, and [`step::step`], the life of a session.

pub mod backing;
pub mod breaker;
pub mod classify;
pub mod code;
pub mod facts;
pub mod head;
pub mod ids;
pub mod journal;
pub mod lease;
pub mod ledger;
pub mod limits;
pub mod request;
pub mod session;
pub mod slice;
pub mod step;
pub mod ticket;
pub mod time;
pub mod view;
pub mod workspace;

#[cfg(test)]
pub(crate) mod tests;
