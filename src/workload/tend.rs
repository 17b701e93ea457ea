//! Tending a command: collect the dead, pass signals on, give signs of life, say how it ended.
//! Done by the session's init for the command of `run`, and by a companion outside for each
//! command of `exec`.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::beat::Beat;
use super::control::{Word, hear, say};
use super::record::Stat;

/// How often a closing session is looked at for whether anybody is left.
const LOOK: Duration = Duration::from_millis(20);

/// What a tender does once its command has ended.
#[derive(Debug)]
pub(super) enum Afterwards {
    /// Ends, too: a companion.
    Leave,
    /// Stays until no other process is left in its pid namespace: the init of `run`. Leaves under
    /// the record's lock, so that nobody joins who would be killed by it.
    StayForOthers(File),
    /// Stays until the session is closed: an init without a command of its own.
    Stay,
}

/// A tender at work.
pub(super) struct Tender {
    /// The command, while it lives.
    pub(super) command: Option<Pid>,
    /// The client, while it is there.
    pub(super) client: Client,
    /// Signs of life for the command, or, without one, for the commands of `exec`.
    pub(super) beat: Option<Beat>,
    /// When to leave.
    pub(super) afterwards: Afterwards,
}

impl Tender {
    /// Tends until it is time to leave. Every signal must be blocked. SIGTERM to an init comes from
    /// the agent: the session is closed, and everybody in it is asked to end.
    pub(super) fn tend(mut self) -> io::Result<()> {
        let is_init = !matches!(self.afterwards, Afterwards::Leave);
        let mut signals = SigSet::empty();
        signals.add(Signal::SIGCHLD);
        if is_init {
            signals.add(Signal::SIGTERM);
        }
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let signals = SignalFd::with_flags(&signals, flags)?;
        let mut closing = false;
        loop {
            // Before looking: a death after this makes the descriptor readable again.
            while let Some(signal) = signals.read_signal()? {
                if signal.ssi_signo == Signal::SIGTERM as u32 {
                    closing = true;
                    // All of the session but its init.
                    let _ = kill(Pid::from_raw(-1), Signal::SIGTERM);
                }
            }
            self.collect();
            if closing
                && matches!(self.afterwards, Afterwards::Stay)
                && other_processes()?.is_empty()
            {
                return Ok(());
            }
            let other = match (self.command, &self.afterwards) {
                (None, Afterwards::Leave) => {
                    self.client.tell_end();
                    return Ok(());
                }
                (None, Afterwards::StayForOthers(lock)) => match leave(lock, &mut self.client)? {
                    None => return Ok(()),
                    other => other,
                },
                _ => None,
            };
            // Without a command of its own the holder is what `exec` placed here.
            let stays = matches!(self.afterwards, Afterwards::Stay);
            if let Some(beat) = &mut self.beat {
                beat.give(|| match self.command {
                    Some(command) => is_running(command),
                    None => {
                        stays && other_processes().is_ok_and(|all| all.into_iter().any(is_running))
                    }
                });
            }
            let beat =
                self.beat.as_ref().filter(|_| stays || self.command.is_some()).map(Beat::wait);
            // What `exec` placed here is nobody's child in here, and dies without a word.
            let beat = if closing { Some(beat.map_or(LOOK, |beat| beat.min(LOOK))) } else { beat };
            let fds = [
                Some(signals.as_fd()),
                self.client.line.as_ref().map(|c| c.as_fd()),
                other.as_ref().map(|o| o.as_fd()),
            ];
            if wait(&fds, beat)? {
                self.listen();
            }
        }
    }

    /// Collects every dead child; pid 1 gets those of others, too.
    fn collect(&mut self) {
        let flags = WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED;
        while let Ok(status) = waitpid(None, Some(flags)) {
            let word = match status {
                WaitStatus::StillAlive => return,
                WaitStatus::Exited(_, code) => Word::Exited(u8::try_from(code & 0xff).unwrap_or(1)),
                WaitStatus::Signaled(_, signal, _) => {
                    Word::Killed(u8::try_from(signal as i32).unwrap_or(0))
                }
                WaitStatus::Stopped(..) => Word::Stopped,
                _ => continue,
            };
            if status.pid() != self.command {
                continue;
            }
            if word == Word::Stopped {
                self.client.tell(word);
            } else {
                self.command = None;
                self.client.ended = Some(word);
            }
        }
    }

    fn listen(&mut self) {
        let Some(client) = &self.client.line else { return };
        match hear(client) {
            Ok(Some(Word::Signal(number))) => {
                if let (Some(command), Ok(signal)) =
                    (self.command, Signal::try_from(i32::from(number)))
                {
                    let _ = kill(command, signal);
                }
            }
            Ok(Some(_)) => {}
            // Gone or out of its mind: the command goes on without it.
            Ok(None) | Err(_) => self.client.line = None,
        }
    }
}

/// Waits for any of the descriptors or for `limit`; whether the second one has something.
fn wait(fds: &[Option<BorrowedFd<'_>>; 3], limit: Option<Duration>) -> io::Result<bool> {
    let mut set: Vec<PollFd> =
        fds.iter().flatten().map(|&fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
    // A millisecond more: rounded down, the last one would be spent in turns of no wait at all.
    let limit = limit.map_or(PollTimeout::NONE, |span| {
        let millis = i32::try_from(span.as_millis()).unwrap_or(i32::MAX).saturating_add(1);
        PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)
    });
    match poll(&mut set, limit) {
        Ok(_) => {}
        Err(Errno::EINTR) => return Ok(false),
        Err(e) => return Err(e.into()),
    }
    Ok(fds[1].is_some() && set[1].any().unwrap_or(false))
}

/// The client's end of the line, and what it has yet to hear.
#[derive(Default)]
pub(super) struct Client {
    line: Option<UnixStream>,
    ended: Option<Word>,
}

impl Client {
    pub(super) const fn at(line: UnixStream) -> Self {
        Self { line: Some(line), ended: None }
    }

    fn tell(&mut self, word: Word) {
        if self.line.as_ref().is_some_and(|line| say(line, word).is_err()) {
            self.line = None;
        }
    }

    /// Tells how the command ended, once, and hangs up.
    fn tell_end(&mut self) {
        if let Some(word) = self.ended.take() {
            self.tell(word);
            self.line = None;
        }
    }
}

/// Leaves unless another process is left, which comes back. The client hears the end after that
/// was settled, so that it may start the next command at once. The lock is only ever held for the
/// moments in which a client starts something.
fn leave(mut lock: &File, client: &mut Client) -> io::Result<Option<OwnedFd>> {
    lock.lock()?;
    let other = other_process()?;
    if other.is_none() {
        lock.write_all(b"left\n")?;
    }
    lock.unlock()?;
    client.tell_end();
    Ok(other)
}

/// A living process of this pid namespace that is not its init, by descriptor. Commands of `exec`
/// are nobody's children here, so waiting for children does not find them.
fn other_process() -> io::Result<Option<OwnedFd>> {
    for pid in other_processes()? {
        let Some(pid) = rustix::process::Pid::from_raw(pid.as_raw()) else { continue };
        // It may have ended since it was listed.
        if let Ok(fd) = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) {
            return Ok(Some(fd));
        }
    }
    Ok(None)
}

fn other_processes() -> io::Result<Vec<Pid>> {
    let mut others = vec![];
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        let dead = pid == 1 || Stat::of(pid).is_ok_and(|s| s.state == 'Z');
        others.extend(i32::try_from(pid).ok().filter(|_| !dead).map(Pid::from_raw));
    }
    Ok(others)
}

fn is_running(pid: Pid) -> bool {
    u32::try_from(pid.as_raw())
        .ok()
        .and_then(|pid| Stat::of(pid).ok())
        .is_some_and(|stat| !matches!(stat.state, 'T' | 't' | 'Z' | 'X'))
}
