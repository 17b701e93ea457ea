//! The executor: performs what `model::step` asks for and feeds back what the kernel and the
//! authority answered. The reconciler, the timers, the watches and the API produce nothing but
//! events.
//!
//! What runs here, and what each takes and gives:
//!
//! ```text
//! deadlines (thread, real time)   earliest local deadline      -> freeze, LeaseLost
//! watch     (thread)              cgroup.events of all sessions, mounts -> ForeignThaw, ReadOnlyLost
//! renew     (task)                signs of life                 -> Renewed, RenewalMissed, LeaseLost
//! sweep     (task)                every second and every 30 s   -> Tick, Witnessed, readmission by policy
//! scrub     (task)                every day                     -> damaged layers named
//! keep      (blocking, now and then)  where processes are, mounts, uppers -> MovedOut, UpperChanged
//! tell      (task)                all of these going round      -> WATCHDOG=1 and STATUS= to systemd
//! worker    (blocking, one a session while it has work)         effects -> their answers
//! handle    (any task)            requests of the API           -> wishes
//! ```
//!
//! It may use authority, store, upper, kernel, model, and the types by which the workload room is
//! told where to place a command.

mod admission;
mod agenda;
mod backup;
mod breaker;
mod census;
mod deadlines;
mod effects;
mod external;
pub mod failure;
mod gate;
mod gather;
pub mod handle;
mod host;
mod image;
mod keep;
mod metrics;
#[cfg(test)]
mod modelcheck;
mod named;
mod open;
mod paths;
mod pulse;
mod recover;
mod renew;
mod scrub;
mod seal;
mod show;
mod shutdown;
mod slot;
mod start;
mod sweep;
mod tell;
mod under_way;
mod users;
mod view;
mod watch;
mod witness;

pub use backup::restore;
pub use handle::{Agent, Sign};
pub use host::SessionSocket;
pub use shutdown::end_sessions;
pub use start::{StartError, start};
pub use tell::manager;
