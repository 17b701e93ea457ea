//! What starting a process needs beyond safe crates: forking, descriptors across exec, and the
//! scheduling class of the keeper.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};

use nix::unistd::{ForkResult, Pid};

/// Which side of a [`fork`] this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fork {
    /// The caller, with the child's process id.
    Parent(Pid),
    /// The new process.
    Child,
}

/// How many threads this process has.
///
/// # Errors
/// `/proc` is not readable.
pub fn threads() -> io::Result<usize> {
    Ok(std::fs::read_dir("/proc/self/task")?.count())
}

/// Forks. Refused when the process has more than one thread: a lock held by another thread would
/// stay held in the child for ever, and `setns` into a user or pid namespace wants one thread.
///
/// # Errors
/// More than one thread ([`io::ErrorKind::ResourceBusy`]), or what `fork(2)` says.
pub fn fork() -> io::Result<Fork> {
    // In a pid namespace joined by setns, /proc may belong to another one and `self` names
    // nobody; such a process was forked by this function and made no thread since.
    if threads().is_ok_and(|n| n > 1) {
        return Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            "the process has more than one thread",
        ));
    }
    // SAFETY: this process has one thread, so no lock can be held by a thread the child lacks.
    match unsafe { nix::unistd::fork() }? {
        ForkResult::Parent { child } => Ok(Fork::Parent(child)),
        ForkResult::Child => Ok(Fork::Child),
    }
}

/// Ends this process at once with `code`: no destructor, no exit handler, no flush of buffers that
/// were copied by [`fork`].
pub fn exit_now(code: u8) -> ! {
    // SAFETY: `_exit` has no preconditions and does not return.
    unsafe { libc::_exit(i32::from(code)) }
}

/// Marks every descriptor from 3 on to be closed by the next exec (kernel 5.11).
///
/// # Errors
/// What `close_range(2)` says.
pub fn close_all_on_exec() -> io::Result<()> {
    // SAFETY: CLOSE_RANGE_CLOEXEC closes nothing now; it only sets a flag on descriptors.
    let answer =
        unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Takes over a descriptor that was inherited through exec under a known number, and marks it to
/// be closed by the next exec.
///
/// The number must come from the process that did the exec, and be taken once.
///
/// # Errors
/// The number is below 3 or not open.
pub fn inherited(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 3 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: F_GETFD only asks; a closed number gives EBADF.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the number is open, and by this function's contract nobody else owns it here.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
    Ok(fd)
}

/// Has the process that `command` starts killed when the calling thread ends, however that happens.
pub fn end_with_parent(command: &mut std::process::Command) {
    use std::os::unix::process::CommandExt as _;
    let parent = nix::unistd::getpid();
    let bind = move || {
        nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
        // It may have ended before the kernel was told to watch it.
        match nix::unistd::getppid() == parent {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        }
    };
    // SAFETY: the closure makes two system calls and allocates nothing: it is sound after fork.
    unsafe { command.pre_exec(bind) };
}

/// Schedules the calling thread, and no thread or process that it starts, as SCHED_FIFO with
/// `priority` (1 to 99).
///
/// # Errors
/// EPERM without CAP_SYS_NICE or a real-time budget; EINVAL for a priority out of range.
pub fn schedule_fifo(priority: i32) -> io::Result<()> {
    let param = libc::sched_param { sched_priority: priority };
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    // SAFETY: `param` lives through the call, which only reads it; 0 is the calling thread.
    let answer = unsafe { libc::sched_setscheduler(0, policy, &raw const param) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_threads_is_not_forked() {
        // The test runner itself is a second thread.
        assert_eq!(fork().unwrap_err().kind(), io::ErrorKind::ResourceBusy);
    }

    #[test]
    fn standard_and_closed_descriptors_are_not_taken_over() {
        for bad in [-1, 0, 2, 1_000_000] {
            assert_eq!(inherited(bad).unwrap_err().raw_os_error(), Some(libc::EBADF), "{bad}");
        }
    }
}
