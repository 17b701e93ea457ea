//! What systemd gives to a unit: its place in the cgroup tree, and sockets that were opened for it.

use std::io;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::{At as _, Result, launch};

/// The agent's own unit.
const AGENT: &str = "overfence-agent.service";
/// The unit that owns the sessions' cgroups. It has no process, so that nothing of it restarts.
const SESSIONS: &str = "overfence-sessions.service";
/// The sessions' cgroups where systemd does not run the agent.
const ALONE: &str = "overfence-sessions";

/// Where the sessions' cgroups belong, relative to the cgroup2 root: below the unit that owns them,
/// beside the agent's, whichever slice they are in.
///
/// # Errors
/// `/proc` is not readable.
pub fn sessions_parent() -> Result<PathBuf> {
    let path = "/proc/self/cgroup";
    std::fs::read_to_string(path).at("read", path).map(|text| parent_for(&text))
}

fn parent_for(memberships: &str) -> PathBuf {
    let own = memberships.lines().find_map(|line| line.strip_prefix("0::/")).map(Path::new);
    match own.filter(|own| own.ends_with(AGENT)).and_then(Path::parent) {
        Some(slice) => slice.join(SESSIONS),
        None => ALONE.into(),
    }
}

/// The listening socket that systemd opened for this process, if it opened one (`LISTEN_FDS`).
/// To be asked once.
///
/// # Errors
/// There are several, or it is not a listening UNIX socket.
pub fn listener() -> io::Result<Option<UnixListener>> {
    let mut given = sd_notify::listen_fds()?;
    let Some(fd) = given.next() else { return Ok(None) };
    if given.next().is_some() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "systemd passed several sockets: overfence.socket has one ListenStream",
        ));
    }
    let fd = launch::inherited(fd)?;
    let unix = rustix::net::sockopt::socket_domain(&fd)? == rustix::net::AddressFamily::UNIX;
    if !unix || !rustix::net::sockopt::socket_acceptconn(&fd)? {
        return Err(Errno::INVAL.into());
    }
    let listener = UnixListener::from(fd);
    listener.set_nonblocking(true)?;
    Ok(Some(listener))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_belong_beside_the_agents_unit_and_else_below_the_root() {
        for (memberships, parent) in [
            (
                "0::/system.slice/overfence-agent.service\n",
                "system.slice/overfence-sessions.service",
            ),
            (
                "9:name=systemd:/x\n0::/a.slice/a-b.slice/overfence-agent.service\n",
                "a.slice/a-b.slice/overfence-sessions.service",
            ),
            ("0::/overfence-agent.service\n", "overfence-sessions.service"),
            ("0::/user.slice/user-0.slice/session-1.scope\n", "overfence-sessions"),
            ("0::/system.slice/runner.service\n", "overfence-sessions"),
            ("0::/\n", "overfence-sessions"),
            ("4:memory:/overfence-agent.service\n", "overfence-sessions"),
            ("", "overfence-sessions"),
        ] {
            assert_eq!(parent_for(memberships), Path::new(parent), "{memberships:?}");
        }
    }
}
