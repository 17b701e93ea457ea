//! How a request to the agent fails: a stable code, a message that says what to do next, and the
//! authority's present state where it refused.

use crate::model::code::Code;
use crate::model::view::RequestView;
use crate::model::workspace::{Current, Refusal};

/// A request that did not succeed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The stable code.
    pub code: Code,
    /// What happened, why, and what to do next.
    pub message: String,
    /// Owner, generation, head and version as the authority has them.
    pub current: Option<Box<Current>>,
    /// The external request that stands in the way, or that was recorded all the same.
    pub request: Option<Box<RequestView>>,
}

impl Failure {
    /// A failure with a message of its own.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), current: None, request: None }
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self {
            code: refusal.code,
            message: refusal.to_string(),
            current: refusal.current.map(Box::new),
            request: None,
        }
    }
}

impl From<Code> for Failure {
    fn from(code: Code) -> Self {
        Self::new(code, code.meaning())
    }
}

/// Who asks, as the kernel says (SO_PEERCRED) and not as they claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Effective user id of the peer.
    pub uid: u32,
    /// Effective group id of the peer.
    pub gid: u32,
    /// Its process id.
    pub pid: u32,
    /// The login uid of /proc/PID/loginuid, where it is set.
    pub login_uid: Option<u32>,
}

impl std::fmt::Display for Caller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "uid {}", self.uid)?;
        match self.login_uid {
            Some(login) => write!(f, " (login uid {login})"),
            None => Ok(()),
        }
    }
}

impl Caller {
    /// Who runs this process, for what is done without an agent.
    pub fn own() -> Self {
        let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
        Self::of(uid, gid, std::process::id())
    }

    /// A process with these ids. Its login uid is read from `/proc` and is for the record only, for
    /// the process may have gone since.
    pub fn of(uid: u32, gid: u32, pid: u32) -> Self {
        let login_uid = std::fs::read_to_string(format!("/proc/{pid}/loginuid"))
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .filter(|&uid| uid != u32::MAX);
        Self { uid, gid, pid, login_uid }
    }

    /// The caller's user name, or `uid-N`: who owns what they ask for without saying whose it is.
    pub fn owner(&self) -> String {
        nix::unistd::User::from_uid(self.uid.into())
            .ok()
            .flatten()
            .map_or_else(|| format!("uid-{}", self.uid), |user| user.name)
    }
}
