//! The host's durable state. It may use `model` and the file system, nothing else; `agent` and
//! the embedded authority write through it.
//!
//! ```text
//! /var/lib/overfence/             0700
//! ├── lock                        flock: one agent a state directory
//! ├── reserve                     room held back for the agent; see `reserve`
//! ├── overfence.db                SQLite, WAL; readable with `sqlite3`
//! │   ├── meta          key                    -> value         host id, ids of the two keys, the open breaker
//! │   ├── workspaces    id                     -> record, mac   the embedded authority
//! │   ├── publications  workspace, key         -> record, mac   the ledger; open, decided to find by
//! │   ├── requests      seq; workspace, key, task, open -> record, mac   external requests
//! │   ├── buried        layer                  -> record, mac   no head may name it: it is being removed
//! │   ├── history       seq; workspace, time   -> record, mac   granted, published, refused
//! │   ├── sessions      id                     -> record, mac
//! │   └── evidence      seq; session, workspace -> body, hash   the chain
//! ├── evidence.anchors            signed heads of the chain, one a line (path configurable)
//! ├── high-water                  highest generation and version seen of each workspace, and HOLDs
//! │                               (path configurable)
//! ├── replaced-<time>/            the database that a restore replaced
//! └── keys/                       0700 (path configurable)
//!     ├── record.key              0600  HMAC-SHA256 over each record
//!     ├── ticket.key              0600  Ed25519, PASETO v4.public
//!     └── ticket.pub              0644
//! ```
//!
//! Records are JSON text; `mac` is HMAC-SHA256 under the record key over table, id and text, so
//! that a record edited, or moved to another id, is not believed. Going back to an *older* record
//! of the same id is what the high-water marks notice.
//!
//! # Concurrency
//! One connection behind one lock. A caller runs its job in a savepoint of the open transaction;
//! whoever finds nobody waiting behind it commits for all who ran since the last commit. So jobs
//! that come together share one fsync, and each still gets its own answer, after the commit.

mod anchors;
mod backup;
mod breaker;
mod db;
mod error;
pub mod evidence;
mod files;
pub mod keys;
pub mod marks;
mod records;
pub mod reserve;
mod schema;
#[allow(clippy::module_inception)]
mod store;

pub use backup::{Copied, Restored, Vacant};
pub use db::{Db, Durability};
pub use error::Error;
pub use records::{Tx, Unreadable, unreadable};
pub use store::{Clock, Paths, Store};

#[cfg(test)]
mod tests;
