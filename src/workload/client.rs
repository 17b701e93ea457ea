//! The client's side: wait for the command, be stopped and signalled in its stead.

use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd, siginfo};

use super::control::{Word, hear, say};
use super::{Exit, Result, io_at};

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

/// Waits for the command behind `control`.
///
/// # Errors
/// A system call of the wait itself failed; the command goes on.
pub(super) fn attend(control: &UnixStream) -> Result<Exit> {
    let passed: SigSet = PASSED_ON.into_iter().collect();
    let doing = "wait for the command of";
    let before =
        passed.thread_swap_mask(SigmaskHow::SIG_BLOCK).map_err(io_at(doing, "the session"))?;
    let ended = watch(control, &passed).map_err(io_at(doing, "the session"));
    let restored = before.thread_set_mask().map_err(io_at(doing, "the session"));
    ended.and_then(|exit| restored.map(|()| exit))
}

fn watch(control: &UnixStream, passed: &SigSet) -> io::Result<Exit> {
    let signals = SignalFd::with_flags(passed, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    loop {
        let mut set = [
            PollFd::new(control.as_fd(), PollFlags::POLLIN),
            PollFd::new(signals.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut set, PollTimeout::NONE) {
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(e) => return Err(e.into()),
        }
        let heard = set[0].any().unwrap_or(false);
        while let Some(info) = signals.read_signal()? {
            pass_on(control, &info);
        }
        if heard {
            match hear(control)? {
                Some(Word::Exited(code)) => return Ok(Exit::Code(code)),
                Some(Word::Killed(signal)) => return Ok(Exit::Signal(signal)),
                Some(Word::Stopped) => stop_too(control)?,
                Some(_) => {}
                None => return Ok(Exit::Lost),
            }
        }
    }
}

/// What the terminal sends goes to the whole foreground group, the command among it; passing it
/// on would make it arrive twice. What a process sends was sent to the client alone.
fn pass_on(control: &UnixStream, info: &siginfo) {
    const SI_KERNEL: i32 = 0x80;
    if info.ssi_code != SI_KERNEL
        && let Ok(number) = u8::try_from(info.ssi_signo)
    {
        // A tender that is gone says so through the end of the stream.
        let _ = say(control, Word::Signal(number));
    }
}

/// The shell must see its job stopped; when it is continued, so is the command, which may be in
/// a process group of its own by now.
fn stop_too(control: &UnixStream) -> io::Result<()> {
    raise(Signal::SIGSTOP)?;
    let _ = say(control, Word::Signal(Signal::SIGCONT as u8));
    Ok(())
}
