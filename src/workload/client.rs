//! The client's side: wait for the command, be stopped and signalled in its stead.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd, siginfo};

use super::control::{Word, hear, say};
use super::record::Lock;
use super::{Error, Exit, Result, Standing, io_at};

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

/// While a session stands frozen, its client asks this often whether that is for good: the freeze
/// comes before the record of why.
const ASK_EVERY: u16 = 500;

/// A client that takes its signals by descriptor, from before the command starts until it is
/// dropped, and sees the session's cgroup freeze.
pub(super) struct Watch<'a> {
    signals: SignalFd,
    before: SigSet,
    events: Option<File>,
    ask: RefCell<&'a mut dyn FnMut() -> Standing>,
}

/// What ended a wait.
enum Woken {
    /// The descriptor has something.
    Readable,
    /// A signal, or the cgroup has news.
    Otherwise,
    /// The session stands frozen, and its lease is lost.
    Lost,
}

impl<'a> Watch<'a> {
    /// Begins to hold signals back. `ask` is asked whenever `cgroup` stands frozen.
    pub(super) fn begin(cgroup: &Path, ask: &'a mut dyn FnMut() -> Standing) -> Result<Self> {
        let passed: SigSet = PASSED_ON.into_iter().collect();
        let at = || io_at("watch the signals of", "/proc/self");
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let signals = SignalFd::with_flags(&passed, flags).map_err(at())?;
        let before = passed.thread_swap_mask(SigmaskHow::SIG_BLOCK).map_err(at())?;
        // Without the file nothing is seen to freeze; that the cgroup is gone shows elsewhere.
        let events = File::open(cgroup.join("cgroup.events")).ok();
        Ok(Self { signals, before, events, ask: RefCell::new(ask) })
    }

    /// Waits until there is something to read while nothing runs yet.
    ///
    /// # Errors
    /// [`Error::Interrupted`] when a signal says to give up; [`Error::Lost`].
    pub(super) fn before_start(&self, fd: &impl AsFd) -> Result<()> {
        let doing = "wait for the start of";
        loop {
            let woken = self.wait(fd).map_err(io_at(doing, "the command"))?;
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
            match woken {
                Woken::Readable => return Ok(()),
                Woken::Otherwise => {}
                Woken::Lost => return Err(Error::Lost),
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
            let woken = self.wait(control)?;
            while let Some(info) = self.signals.read_signal()? {
                pass_on(control, &info, starting.is_some());
                let ending = ENDING.iter().any(|signal| *signal as u32 == info.ssi_signo);
                if ending && self.is_stopped() {
                    return Ok(Exit::Signal(number(&info)));
                }
            }
            match woken {
                Woken::Otherwise => continue,
                Woken::Lost => return Ok(Exit::Lost),
                Woken::Readable => {}
            }
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

    fn standing(&self) -> Standing {
        (self.ask.borrow_mut())()
    }

    /// Whether the session is stopped and not only held for a moment: nothing in it hears signals.
    fn is_stopped(&self) -> bool {
        let frozen = self.events.as_ref().and_then(frozen) == Some(true);
        frozen && self.standing() != Standing::Passing
    }

    /// Waits for the descriptor, a signal, or news of the cgroup.
    fn wait(&self, fd: &impl AsFd) -> io::Result<Woken> {
        // Read before the wait: a change after the read ends the wait at once.
        let frozen = self.events.as_ref().and_then(frozen);
        let patience = match frozen {
            Some(true) if self.standing() == Standing::Lost => return Ok(Woken::Lost),
            Some(true) => PollTimeout::from(ASK_EVERY),
            Some(false) | None => PollTimeout::NONE,
        };
        let mut set = vec![
            PollFd::new(fd.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
        ];
        if let (Some(events), Some(_)) = (&self.events, frozen) {
            set.push(PollFd::new(events.as_fd(), PollFlags::POLLPRI));
        }
        match poll(&mut set, patience) {
            Ok(_) if set[0].any().unwrap_or(false) => Ok(Woken::Readable),
            Ok(_) | Err(Errno::EINTR) => Ok(Woken::Otherwise),
            Err(e) => Err(e.into()),
        }
    }
}

/// Whether the kernel says `frozen 1`; `None` when the cgroup is gone.
fn frozen(events: &File) -> Option<bool> {
    let mut text = [0; 256];
    let len = events.read_at(&mut text, 0).ok()?;
    Some(text[..len].split(|&byte| byte == b'\n').any(|line| line == b"frozen 1"))
}

impl Drop for Watch<'_> {
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
/// a process group of its own by now. Without a terminal there is no shell that would continue it:
/// a command that somebody stops is then waited for, until it goes on or its lease is lost.
fn stop_too(control: &UnixStream) -> io::Result<()> {
    if File::open("/dev/tty").is_err() {
        return Ok(());
    }
    raise(Signal::SIGSTOP)?;
    let _ = say(control, Word::Signal(Signal::SIGCONT as u8));
    Ok(())
}
