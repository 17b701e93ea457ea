//! The client's side: wait for the command, be stopped and signalled in its stead.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd, siginfo};

use super::control::{Word, hear, say};
use super::record::Lock;
use super::{Error, Exit, Result, io_at};

/// Signals that are meant for the command when they are sent to the client.
const PASSED_ON: [Signal; 9] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGWINCH,
    Signal::SIGCONT,
    Signal::SIGTSTP,
];

/// Those that end the start of a command which has none to receive them yet.
const ENDING: [Signal; 4] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];

/// A client that takes its signals by descriptor, from before the command starts until it is
/// dropped.
pub(super) struct Watch {
    signals: SignalFd,
    before: SigSet,
}

impl Watch {
    /// Begins to hold signals back.
    pub(super) fn begin() -> Result<Self> {
        let passed: SigSet = PASSED_ON.into_iter().collect();
        let at = || io_at("watch the signals of", "/proc/self");
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let signals = SignalFd::with_flags(&passed, flags).map_err(at())?;
        let before = passed.thread_swap_mask(SigmaskHow::SIG_BLOCK).map_err(at())?;
        Ok(Self { signals, before })
    }

    /// Waits until there is something to read while nothing runs yet.
    ///
    /// # Errors
    /// [`Error::Interrupted`] when a signal says to give up. A frozen session may keep a start
    /// waiting for ever.
    pub(super) fn before_start(&self, fd: &impl AsFd) -> Result<()> {
        let doing = "wait for the start of";
        loop {
            let readable = self.wait(fd).map_err(io_at(doing, "the command"))?;
            while let Some(info) =
                self.signals.read_signal().map_err(io_at(doing, "the command"))?
            {
                let given = ENDING.into_iter().find(|s| *s as u32 == info.ssi_signo);
                if let Some(signal) = given {
                    return Err(Error::Interrupted {
                        signal: number(&info),
                        name: signal.as_str(),
                    });
                }
            }
            if readable {
                return Ok(());
            }
        }
    }

    /// Has the tender start the command, and waits for its end. The lock is held until the
    /// command is a process of the session: that keeps an init from leaving.
    pub(super) fn attend(&self, control: &UnixStream, lock: Lock) -> Result<Exit> {
        let go = say(control, Word::Go);
        go.and_then(|()| self.to_the_end(control, lock)).map_err(io_at("wait for", "the command"))
    }

    fn to_the_end(&self, control: &UnixStream, lock: Lock) -> io::Result<Exit> {
        let mut starting = Some(lock);
        loop {
            let heard = self.wait(control)?;
            while let Some(info) = self.signals.read_signal()? {
                pass_on(control, &info, starting.is_some());
            }
            if heard {
                match hear(control)? {
                    Some(Word::Started) => starting = None,
                    Some(Word::Exited(code)) => return Ok(Exit::Code(code)),
                    Some(Word::Killed(signal)) => return Ok(Exit::Signal(signal)),
                    Some(Word::Stopped) => stop_too(control)?,
                    Some(_) => {}
                    None => return Ok(Exit::Lost),
                }
            }
        }
    }

    /// Waits for the descriptor or a signal; whether the descriptor has something.
    fn wait(&self, fd: &impl AsFd) -> io::Result<bool> {
        let mut set = [
            PollFd::new(fd.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut set, PollTimeout::NONE) {
            Ok(_) => Ok(set[0].any().unwrap_or(false)),
            Err(Errno::EINTR) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Cannot fail: the mask is one that this thread had.
        let _ = self.before.thread_set_mask();
    }
}

fn number(info: &siginfo) -> u8 {
    u8::try_from(info.ssi_signo).unwrap_or(0)
}

/// What the terminal sends goes to the whole foreground group, the command among it; passing it
/// on would make it arrive twice. What a process sends was sent to the client alone; and what
/// comes while the command starts may have been too early for it.
fn pass_on(control: &UnixStream, info: &siginfo, starting: bool) {
    const SI_KERNEL: i32 = 0x80;
    if starting || info.ssi_code != SI_KERNEL {
        // A tender that is gone says so through the end of the stream.
        let _ = say(control, Word::Signal(number(info)));
    }
}

/// The shell must see its job stopped; when it is continued, so is the command, which may be in
/// a process group of its own by now.
fn stop_too(control: &UnixStream) -> io::Result<()> {
    raise(Signal::SIGSTOP)?;
    let _ = say(control, Word::Signal(Signal::SIGCONT as u8));
    Ok(())
}
