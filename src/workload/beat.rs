//! The sign of life that the init gives for its command: one small request over the session's own
//! socket, which the agent may have made anew since the last one.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike as _};
use std::os::fd::AsRawFd as _;

/// Where the agent listens for this session, inside.
const SOCKET: &str = "/run/overfence/session.sock";

/// Longest wait for the agent: signals and dead children wait as long.
const PATIENCE: Duration = Duration::from_millis(500);

const REQUEST: &[u8] =
    b"POST /v1/beat HTTP/1.1\r\nHost: session\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

/// When to beat. `Instant` stops in a suspend; a deadline that passed meanwhile is the agent's to
/// see, and no beat would change it.
#[derive(Debug)]
pub(super) struct Beat {
    every: Duration,
    next: Instant,
}

impl Beat {
    /// Three beats in each `ttl`, the first at once.
    pub(super) fn new(ttl: Duration) -> Self {
        Self { every: ttl / 3, next: Instant::now() }
    }

    /// How long until the next one is due.
    pub(super) fn wait(&self) -> Duration {
        self.next.saturating_duration_since(Instant::now())
    }

    /// Beats if one is due and the command can vouch for itself. A failure changes nothing: the
    /// agent may be restarting, and it is the agent that counts.
    pub(super) fn give(&mut self, alive: impl FnOnce() -> bool) {
        if !self.wait().is_zero() {
            return;
        }
        self.next = Instant::now() + self.every;
        if alive() {
            let _ = send();
        }
    }
}

fn send() -> io::Result<()> {
    // Not UnixStream::connect: with a full backlog it would wait for ever.
    let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let patience = TimeVal::milliseconds(i64::try_from(PATIENCE.as_millis()).unwrap_or(500));
    setsockopt(&fd, sockopt::SendTimeout, &patience)?;
    setsockopt(&fd, sockopt::ReceiveTimeout, &patience)?;
    connect(fd.as_raw_fd(), &UnixAddr::new(SOCKET)?)?;
    let mut stream = UnixStream::from(fd);
    stream.write_all(REQUEST)?;
    // Wait for the answer's first bytes: a request that is hung up on may not be read.
    let mut answer = [0; 16];
    stream.read(&mut answer).map(drop)
}
