//! HTTP/JSON over a UNIX socket: who asks is known from the kernel, what may be asked is written
//! in `openapi.json`. May use `agent` through its handle, `config` and `model`; decides nothing
//! about leases or fences itself.
//!
//! ```text
//! server          connections: peer credentials, rights, limits, orderly end
//!  └─ routes      one file a noun; each handler is one call of the agent's handle
//! once            a request that carries a key is done once
//! session_socket  the socket inside a session: a sign of life and nothing else
//! client          the other end, for the command line
//! ```
//!
//! Kept on disk: nothing but the socket itself, which [`bind`] replaces.

pub mod client;
mod once;
mod peer;
mod problem;
mod routes;
mod server;
mod session_socket;

pub use peer::{Group, Rights, Roster, rights};
pub use problem::{failure_of, problem_of};
pub use routes::{TicketKey, openapi};
pub use server::{bind, serve, serve_metrics};
pub use session_socket::serve_sessions;
