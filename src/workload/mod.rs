//! The confined place in which a command runs. Works in the client's process (`overfence run`,
//! `overfence session exec`), as root and with one thread; bubblewrap makes the walls, overfence
//! itself is pid 1 inside, further commands join by `setns`. May use `kernel` and `model`.
//!
//! ```text
//! client ─ fork ─> joins the sealed cgroup ─ exec ─> bubblewrap ─ clone ─> session-init (pid 1)
//!    \                                              (monitor)                └─ fork ─> command
//!     \─ fork ─> companion: joins the cgroup, setns ─ fork ─> command of `session exec`
//! ```
//!
//! The client stays outside the sealed cgroup: it is there to say what happened when everything
//! in it is frozen or killed. The terminal, the process group and the session are the client's
//! own all the way down.
//!
//! What is kept on disk:
//!
//! ```text
//! <state_dir>/etc-<digest>/     the /etc that workloads see; made again when the host's changes
//! <record>                      who the session's init is (JSON), replaced by rename
//! <record>.lock                 held while an init is looked for or started
//! <record, ending .beat>        when the holder of a `process` lease last gave a sign of life
//! <run_dir>/overfence           empty; the binary is bound over it inside
//! ```

mod beat;
mod client;
mod control;
mod etc;
mod filters;
mod init;
mod join;
mod launch;
mod probe;
mod record;
mod shed;
mod tend;
mod walls;

use std::ffi::OsString;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::model::ids::{Generation, SessionId, WorkspaceId};
use crate::model::session::RunAs;
use crate::model::time::millis;

pub use beat::Beats;
pub use filters::Unfilterable;
pub use init::init_main;
pub use probe::walls as try_walls;
pub use record::InitRecord;

/// The uid and gid of a command when nobody says otherwise.
pub const DEFAULT_UID: u32 = 1000;

/// How a mapped session's ids lie on the host's: 0 inside is [`MAPPED_FIRST`] outside.
pub const MAPPED_FIRST: u32 = 100_000;

/// How many ids a mapped session has.
pub const MAPPED_COUNT: u32 = 65_536;

/// Everything needed to place a command in a session. Made by the agent, sent as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The session.
    pub session: SessionId,
    /// Its workspace.
    pub workspace: WorkspaceId,
    /// The fencing token under which it was opened, told to the command.
    pub generation: Generation,
    /// The sealed cgroup's directory.
    pub cgroup: PathBuf,
    /// Where the overlay is mounted on the host; `/workspace` inside.
    pub merged: PathBuf,
    /// The session's own directory on the host (ticket, session.json, session.sock);
    /// `/run/overfence` inside, read-only.
    pub run_dir: PathBuf,
    /// The file that says who the init is. Outside `run_dir`: the workload must not see it.
    pub record: PathBuf,
    /// A pinned mount namespace that never holds sessions. `None`: the client's own is copied.
    pub cell: Option<PathBuf>,
    /// Where the prepared `/etc` is kept.
    pub state_dir: PathBuf,
    /// Who the command is.
    pub user: User,
    /// Whether uid 0 inside is [`MAPPED_FIRST`] outside, through a user namespace of its own.
    pub mapped: bool,
    /// Which network it has.
    pub network: Network,
    /// Whose life the lease follows.
    pub holder: Holder,
    /// Time to live of the lease, milliseconds; the init beats three times in it.
    #[serde(rename = "ttl_ms", with = "millis")]
    pub ttl: Duration,
    /// The overfence binary that becomes pid 1. Of the same build as the client: the client puts
    /// its own here, and what is read from JSON without it is the reader's own.
    #[serde(skip, default = "own_binary")]
    pub binary: PathBuf,
}

fn own_binary() -> PathBuf {
    std::env::current_exe().unwrap_or_else(|_| PathBuf::from("/proc/self/exe"))
}

/// The ids of a command, as seen inside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Supplementary group ids.
    #[serde(default)]
    pub groups: Vec<u32>,
}

impl Default for User {
    fn default() -> Self {
        Self { uid: DEFAULT_UID, gid: DEFAULT_UID, groups: vec![] }
    }
}

/// Which network a session has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Network {
    /// A namespace of its own with nothing but a loopback interface.
    Own,
    /// The host's. Opens the host's abstract unix sockets and loopback services.
    Host,
}

/// Whose life the lease follows, as far as the init is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Holder {
    /// The init beats while its command lives and is not stopped; in a session that was opened
    /// without one, while anything that `exec` placed there does.
    Process,
    /// Somebody else beats; the init does not.
    Beat,
}

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// Program and arguments; a program without a slash is looked up in the session's `PATH`.
    pub argv: Vec<OsString>,
    /// Variables on top of the session's own few; nothing is inherited from the caller.
    #[serde(default)]
    pub env: Vec<(OsString, OsString)>,
    /// The directory to start in; `/workspace` when not given.
    #[serde(default)]
    pub cwd: Option<PathBuf>,
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// With this code. 126 and 127 may also mean that it could not be started, as in a shell.
    Code(u8),
    /// By this signal.
    Signal(u8),
    /// Without an answer: the session was killed or frozen for good around it.
    Lost,
}

impl Exit {
    /// The code to pass on, as a shell would: 128 + n for signal n, 137 for a killed session.
    pub const fn code(self) -> u8 {
        match self {
            Self::Code(code) => code,
            Self::Signal(n) => 128_u8.wrapping_add(n),
            Self::Lost => 137,
        }
    }
}

/// How a session stands whose cgroup is frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Its lease holds: the freeze passes.
    Passing,
    /// It is stopped and may come back, or nobody can say.
    Stopped,
    /// Its lease is lost, and it does not come back by itself.
    Lost,
}

/// Why a command could not be placed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// uid 0 without a user namespace of its own would be the host's root.
    #[error("uid 0 would be the host's root: use another user, or a session with mapped ids")]
    UnmappedRoot,
    /// An id that the session's user namespace does not have.
    #[error("id {id} is outside the session's mapped ids: use one below {MAPPED_COUNT}")]
    Unmapped {
        /// The id.
        id: u32,
    },
    /// The session was frozen for good before the command started.
    #[error("the session's lease was lost before the command started")]
    Lost,
    /// An id that would change nothing, so that the host's root stayed.
    #[error("{id} is no id: use another user")]
    NoId {
        /// The id.
        id: u32,
    },
    /// No program was given.
    #[error("nothing to run: give a command after --")]
    NoCommand,
    /// The session has an init already.
    #[error("session {session} has a command already: use `overfence session exec {session}`")]
    Running {
        /// The session.
        session: SessionId,
    },
    /// bubblewrap is missing.
    #[error("{} is missing: install the package bubblewrap", walls::BUBBLEWRAP)]
    NoBubblewrap,
    /// The walls could not be built.
    #[error("session {session} could not be confined, so nothing was run: {said}")]
    Walls {
        /// The session.
        session: SessionId,
        /// What bubblewrap or the process before it said.
        said: String,
    },
    /// The filters could not be built.
    #[error(transparent)]
    Filters(#[from] Unfilterable),
    /// The companion of an `exec` did not get into the session.
    #[error("session {session} could not be joined: {said}")]
    Join {
        /// The session.
        session: SessionId,
        /// What it said.
        said: String,
    },
    /// A record that is no record.
    #[error("{path} does not say who the session's init is; close the session and open it again")]
    Record {
        /// The record's file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
    /// A signal came before the command ran; it was not started.
    #[error("interrupted by {name} before the command was started")]
    Interrupted {
        /// Its number.
        signal: u8,
        /// Its name.
        name: &'static str,
    },
    /// A system call failed.
    #[error("cannot {doing} {path}")]
    Io {
        /// What was done, as a verb.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
}

/// This room's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The command's parent takes a process group of its own, in the same terminal session. The command
/// stays in the client's, which is the terminal's foreground; but when the client ends (the lease
/// is lost), the group does not become an orphaned one, whose stopped members the kernel would hang
/// up: a stopped writer is to be there still when it is readmitted.
fn leave_the_group() -> io::Result<()> {
    let own = nix::unistd::Pid::from_raw(0);
    nix::unistd::setpgid(own, own).map_err(io::Error::from)
}

/// Puts path and operation to a system error.
fn io_at<E: Into<io::Error>>(
    doing: &'static str,
    path: impl Into<PathBuf>,
) -> impl FnOnce(E) -> Error {
    move |e| Error::Io { doing, path: path.into(), source: e.into() }
}

/// Starts the session's init with `command` as its child and waits for the command. Daemons that
/// it leaves behind keep the init; they end with the session.
///
/// # Errors
/// Nothing was run, or (after a start) the wait itself failed.
pub fn run(place: &Place, command: &Command) -> Result<Exit> {
    run_until(place, command, &mut || Standing::Passing)
}

/// As [`run`]; `ask` is asked, again and again, while the session stands frozen. When it says
/// [`Standing::Lost`] the client leaves the command as it stands: the answer is [`Exit::Lost`]. While
/// it says [`Standing::Stopped`], a signal that asks the client to end does so at once: the answer
/// is that signal, and the command hears of it when it runs again.
///
/// # Errors
/// As [`run`].
pub fn run_until(
    place: &Place,
    command: &Command,
    ask: &mut dyn FnMut() -> Standing,
) -> Result<Exit> {
    check(place, command)?;
    let lock = record::Lock::take(place)?;
    if lock.init(place)?.is_some() {
        return Err(Error::Running { session: place.session });
    }
    conduct(place, ask, lock, |lock, watch| launch::init(place, Some(command), lock, watch))
}

/// Runs `command` in the session, beside whatever runs there; starts the session's init first if
/// it has none. Two callers at once start one.
///
/// # Errors
/// Nothing was run, or (after a start) the wait itself failed.
pub fn exec(place: &Place, command: &Command) -> Result<Exit> {
    exec_until(place, command, &mut || Standing::Passing)
}

/// As [`exec`], with the question of [`run_until`].
///
/// # Errors
/// As [`exec`].
pub fn exec_until(
    place: &Place,
    command: &Command,
    ask: &mut dyn FnMut() -> Standing,
) -> Result<Exit> {
    check(place, command)?;
    let lock = record::Lock::take(place)?;
    conduct(place, ask, lock, |lock, watch| {
        let init = match lock.init(place)? {
            Some(init) => init,
            None => {
                let control = launch::init(place, None, lock, watch)?;
                control::say(&control, control::Word::Go)
                    .map_err(io_at("start the init of", place.session.to_string()))?;
                lock.init(place)?.ok_or_else(|| Error::Walls {
                    session: place.session,
                    said: "its init ended as soon as it had started".to_owned(),
                })?
            }
        };
        join::companion(place, init, command, watch)
    })
}

/// Prepares a command, has it started, waits for it. A signal before it runs is its end.
fn conduct(
    place: &Place,
    ask: &mut dyn FnMut() -> Standing,
    lock: record::Lock,
    prepare: impl FnOnce(&record::Lock, &client::Watch) -> Result<UnixStream>,
) -> Result<Exit> {
    let watch = client::Watch::begin(&place.cgroup, ask)?;
    let ended = prepare(&lock, &watch).and_then(|control| watch.attend(&control, lock));
    match ended {
        Err(Error::Interrupted { signal, .. }) => Ok(Exit::Signal(signal)),
        Err(Error::Lost) => Ok(Exit::Lost),
        other => other,
    }
}

/// The session's init, if it lives.
///
/// # Errors
/// The record or `/proc` cannot be read.
pub fn live_init(place: &Place) -> Result<Option<InitRecord>> {
    record::live(place)
}

fn check(place: &Place, command: &Command) -> Result<()> {
    if command.argv.is_empty() {
        return Err(Error::NoCommand);
    }
    let ids = [place.user.uid, place.user.gid];
    if let Some(&id) = ids.iter().chain(&place.user.groups).find(|&&id| id == RunAs::NOBODYS) {
        return Err(Error::NoId { id });
    }
    if place.mapped {
        match ids.iter().chain(&place.user.groups).find(|&&id| id >= MAPPED_COUNT) {
            Some(&id) => Err(Error::Unmapped { id }),
            None => Ok(()),
        }
    } else if place.user.uid == 0 || place.user.gid == 0 || place.user.groups.contains(&0) {
        Err(Error::UnmappedRoot)
    } else {
        Ok(())
    }
}
