//! The one clock of every deadline: CLOCK_BOOTTIME, which runs on in suspend, with the boot id,
//! since its numbers mean nothing in another boot.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;

use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::io::Errno;
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec,
};

use sha2::Digest as _;

use super::{At as _, Error, Result};
use crate::model::ids::BootId;
use crate::model::time::{BootInstant, BootNs};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const PID_NAMESPACE: &str = "/proc/self/ns/pid";
/// The inode of the first pid namespace, in all kernels.
const INITIAL_PID_NAMESPACE: u64 = 0xEFFF_FFFC;
/// The first process of the pid namespace.
const FIRST: &str = "/proc/1/stat";

/// Nanoseconds on CLOCK_BOOTTIME.
pub fn now() -> BootNs {
    let t = rustix::time::clock_gettime(ClockId::Boottime);
    // The kernel never gives negative seconds for this clock.
    let seconds = u64::try_from(t.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(t.tv_nsec).unwrap_or(0);
    BootNs(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
}

/// Microseconds from `begun` to now.
pub(crate) fn micros_since(begun: BootNs) -> u64 {
    u64::try_from(now().since(begun).as_micros()).unwrap_or(u64::MAX)
}

/// The id of this boot. In a pid namespace of its own, as containers have, it is the id of that
/// namespace's life: its end takes every process and mount along, as a reboot does.
pub fn boot_id() -> Result<BootId> {
    let text = std::fs::read_to_string(BOOT_ID).at("read", BOOT_ID)?;
    let garbled = |path: &str, reason| Error::Garbled { path: path.into(), reason };
    let boot = uuid::Uuid::try_parse(text.trim()).map_err(|e| garbled(BOOT_ID, e.to_string()))?;
    let namespace = std::fs::metadata(PID_NAMESPACE).at("stat", PID_NAMESPACE)?.ino();
    if namespace == INITIAL_PID_NAMESPACE {
        return Ok(BootId(boot));
    }
    let text = std::fs::read_to_string(FIRST).at("read", FIRST)?;
    let begun = start_time(&text).ok_or_else(|| garbled(FIRST, text.clone()))?;
    Ok(BootId(life_id(boot, namespace, begun)))
}

/// The start time in a process's `stat`, as written there. The name before it can hold anything.
fn start_time(stat: &str) -> Option<&str> {
    stat.rsplit_once(") ")?.1.split(' ').nth(19)
}

/// One id of one life of a pid namespace: its number is used again, together with its first
/// process's start never within a boot.
fn life_id(boot: uuid::Uuid, namespace: u64, begun: &str) -> uuid::Uuid {
    let digest = sha2::Sha256::digest(format!("{boot} {namespace} {begun}"));
    let mut id = [0; 16];
    id.copy_from_slice(&digest[..16]);
    uuid::Builder::from_custom_bytes(id).into_uuid()
}

/// Now, in a form that can be stored.
pub fn instant() -> Result<BootInstant> {
    Ok(BootInstant { boot: boot_id()?, ns: now() })
}

/// Sleeps until `then`; returns at once if it has passed. Signals do not shorten it.
pub fn sleep_until(then: BootNs) {
    while now() < then {
        // Only EINTR is possible for a clock that exists, and the loop answers it.
        let _ = rustix::thread::clock_nanosleep_absolute(ClockId::Boottime, &timespec(then));
    }
}

pub(crate) fn timespec(t: BootNs) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(t.0 / 1_000_000_000).unwrap_or(i64::MAX),
        // Below 10^9.
        tv_nsec: (t.0 % 1_000_000_000) as _,
    }
}

/// Polls `fd` for `events` until it answers or `then` comes; `None` waits for ever. Returns
/// whether it answered.
pub(crate) fn poll_until(
    fd: BorrowedFd<'_>,
    events: PollFlags,
    then: Option<BootNs>,
) -> rustix::io::Result<bool> {
    let mut fds = [PollFd::from_borrowed_fd(fd, events)];
    loop {
        let left = then.map(|t| timespec(BootNs(t.0.saturating_sub(now().0))));
        match rustix::event::poll(&mut fds, left.as_ref()) {
            Err(Errno::INTR) => {}
            answer => return Ok(answer? > 0),
        }
    }
}

/// Wakes a thread that waits in [`BootTimer::wait_or`] or polls [`AsFd`].
#[derive(Debug)]
pub struct Waker(OwnedFd);

impl Waker {
    /// A waker nobody has woken yet.
    pub fn new() -> Result<Self> {
        rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(Self)
            .at("make an eventfd for", "a waker")
    }

    /// Wakes; several wakes before the next drain are one.
    pub fn wake(&self) {
        // EAGAIN means the counter is full: it is awake already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Takes the pending wake; whether there was one.
    pub fn drain(&self) -> bool {
        rustix::io::read(&self.0, &mut [0u8; 8]).is_ok()
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Woke {
    /// The armed instant came.
    Due,
    /// Somebody called [`Waker::wake`].
    Called,
}

/// A timer at absolute instants of CLOCK_BOOTTIME.
#[derive(Debug)]
pub struct BootTimer(OwnedFd);

impl BootTimer {
    /// A timer that is not armed.
    pub fn new() -> Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        rustix::time::timerfd_create(TimerfdClockId::Boottime, flags)
            .map(Self)
            .at("make a timerfd on", "CLOCK_BOOTTIME")
    }

    /// Arms it; an instant that has passed is due at once.
    pub fn arm(&self, then: BootNs) -> Result<()> {
        // Zero would disarm.
        self.set(BootNs(then.0.max(1)))
    }

    /// Disarms it.
    pub fn disarm(&self) -> Result<()> {
        self.set(BootNs(0))
    }

    fn set(&self, then: BootNs) -> Result<()> {
        let once = Itimerspec {
            it_interval: Timespec { tv_sec: 0, tv_nsec: 0 },
            it_value: timespec(then),
        };
        rustix::time::timerfd_settime(&self.0, TimerfdTimerFlags::ABSTIME, &once)
            .map(|_| ())
            .at("set the timerfd on", "CLOCK_BOOTTIME")
    }

    /// Waits until the timer is due or the waker was woken (which wins); takes the wake.
    pub fn wait_or(&self, waker: &Waker) -> Result<Woke> {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN), PollFd::new(&waker.0, PollFlags::IN)];
        loop {
            match rustix::event::poll(&mut fds, None) {
                Err(Errno::INTR) => continue,
                answer => answer.at("wait on", "a timer and a waker")?,
            };
            if waker.drain() {
                return Ok(Woke::Called);
            }
            if rustix::io::read(&self.0, &mut [0u8; 8]).is_ok() {
                return Ok(Woke::Due);
            }
        }
    }
}

impl AsFd for BootTimer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_sleep_ends_at_its_instant() {
        let then = now().plus(Duration::from_millis(5));
        sleep_until(then);
        assert!(now() >= then);
        sleep_until(BootNs(0));
    }

    #[test]
    fn a_timer_is_due_at_its_instant_and_a_waker_comes_first() {
        let (timer, waker) = (BootTimer::new().unwrap(), Waker::new().unwrap());
        let then = now().plus(Duration::from_millis(3));
        timer.arm(then).unwrap();
        assert_eq!(timer.wait_or(&waker).unwrap(), Woke::Due);
        assert!(now() >= then);
        timer.arm(BootNs(0)).unwrap();
        waker.wake();
        waker.wake();
        assert_eq!(timer.wait_or(&waker).unwrap(), Woke::Called);
        assert_eq!(timer.wait_or(&waker).unwrap(), Woke::Due, "both wakes were taken as one");
    }

    #[test]
    fn a_disarmed_timer_stays_silent() {
        let timer = BootTimer::new().unwrap();
        timer.arm(now().plus(Duration::from_millis(2))).unwrap();
        timer.disarm().unwrap();
        let until = Some(now().plus(Duration::from_millis(10)));
        assert!(!poll_until(timer.as_fd(), PollFlags::IN, until).unwrap());
    }

    #[test]
    fn each_life_of_a_container_has_an_id_of_its_own() {
        let stat = "1 (a) b) S 0 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4242 9 10";
        assert_eq!(start_time(stat), Some("4242"));
        assert_eq!(start_time("1 (sh) S 0"), None);
        let boot = uuid::Uuid::from_u128(7);
        let id = life_id(boot, 1, "2");
        assert_eq!(id, life_id(boot, 1, "2"));
        let others = [life_id(boot, 1, "3"), life_id(boot, 2, "2"), life_id(id, 1, "2"), boot];
        assert!(!others.contains(&id));
        assert_eq!(boot_id().unwrap(), boot_id().unwrap());
    }

    #[test]
    fn instants_of_this_boot_compare() {
        let (a, b) = (instant().unwrap(), instant().unwrap());
        assert_eq!(a.boot, b.boot);
        assert!(a.passed(&b));
    }
}
