//! Writers at full speed over many deadlines. Each reads CLOCK_BOOTTIME, then makes its call: of those
//! that were accepted none may have been begun after the deadline.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use overfence::kernel::clock;
use overfence::model::time::BootNs;

use super::ways::Call;

const MS: u64 = 1_000_000;

thread_local! {
    static BEGUN: Cell<u64> = const { Cell::new(0) };
}

/// Says that the call begins now: before each call, and again by what comes between.
pub fn stamp() {
    BEGUN.set(clock::now().0);
}

/// Makes a call: whether it was accepted, when it began, and when it had ended.
pub fn timed(call: &mut Call) -> (bool, u64, u64) {
    stamp();
    let answer = call();
    let ended = clock::now().0;
    let accepted = match answer {
        Ok(()) => true,
        Err(e) if e.raw_os_error() == Some(libc::EROFS) => false,
        Err(e) => panic!("it was answered {e}"),
    };
    (accepted, BEGUN.get(), ended)
}

/// What all writers know of the deadline that is in force: a number for it, odd while it may be
/// waited for, and the deadline.
#[derive(Default)]
pub struct Term {
    pub number: AtomicU64,
    pub deadline: AtomicU64,
    pub over: AtomicBool,
}

/// What was seen around the deadlines.
#[derive(Debug, Default, Clone)]
pub struct Seen {
    pub deadlines: u64,
    pub accepted: u64,
    pub refused: u64,
    /// Accepted in the last millisecond before a deadline.
    pub just_before: u64,
    /// Refused in the first millisecond after one.
    pub just_after: u64,
    /// Accepted although begun after it.
    pub late: u64,
    /// Refused although it was over before the deadline.
    pub early: u64,
    /// The least time from the beginning of an accepted write to its deadline, nanoseconds.
    pub nearest_accepted: u64,
    /// The least time from a deadline to the end of a refused write, nanoseconds.
    pub nearest_refused: u64,
}

impl Seen {
    pub fn new() -> Self {
        Self { nearest_accepted: u64::MAX, nearest_refused: u64::MAX, ..Self::default() }
    }

    pub fn add(&mut self, other: &Self) {
        self.accepted += other.accepted;
        self.refused += other.refused;
        self.just_before += other.just_before;
        self.just_after += other.just_after;
        self.late += other.late;
        self.early += other.early;
        self.nearest_accepted = self.nearest_accepted.min(other.nearest_accepted);
        self.nearest_refused = self.nearest_refused.min(other.nearest_refused);
    }

    /// One write, begun and ended then, under this deadline.
    pub fn count(&mut self, accepted: bool, begun: u64, ended: u64, deadline: u64) {
        match accepted {
            true if begun >= deadline => self.late += 1,
            true => {
                self.accepted += 1;
                self.nearest_accepted = self.nearest_accepted.min(deadline - begun);
                self.just_before += u64::from(deadline - begun <= MS);
            }
            false if ended < deadline => self.early += 1,
            false => {
                self.refused += 1;
                self.nearest_refused = self.nearest_refused.min(ended - deadline);
                self.just_after += u64::from(ended - deadline <= MS);
            }
        }
    }

    /// What makes a run count, and what it has to show.
    pub fn judge(&self) {
        println!(
            "{} deadlines: {} accepted ({} in the last ms before), {} refused ({} in the first ms \
             after), {} accepted late, {} refused early; nearest accepted {} ns before, nearest \
             refused {} ns after",
            self.deadlines,
            self.accepted,
            self.just_before,
            self.refused,
            self.just_after,
            self.late,
            self.early,
            self.nearest_accepted,
            self.nearest_refused,
        );
        assert_eq!(self.late, 0, "accepted, though begun after the deadline: {self:?}");
        assert_eq!(self.early, 0, "refused, though over before the deadline: {self:?}");
        assert!(self.just_before > 0 && self.just_after > 0, "nothing was seen near: {self:?}");
    }
}

/// Makes a call until it is over.
pub fn call_on(term: &Term, mut call: Call) -> Seen {
    let mut seen = Seen::new();
    while !term.over.load(Ordering::SeqCst) {
        let number = term.number.load(Ordering::SeqCst);
        if number.is_multiple_of(2) {
            std::thread::yield_now();
            continue;
        }
        let deadline = term.deadline.load(Ordering::SeqCst);
        // Far from it nothing is to be seen, and others want the processor.
        if deadline.saturating_sub(clock::now().0) > 40 * MS {
            clock::sleep_until(BootNs(deadline - 30 * MS));
        }
        if clock::now().0 > deadline.saturating_add(60 * MS) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let (accepted, begun, ended) = timed(&mut call);
        // One that saw the deadline move says nothing.
        if term.number.load(Ordering::SeqCst) == number {
            seen.count(accepted, begun, ended, deadline);
        }
    }
    seen
}

/// How long a deadline is waited for after it passed.
pub const AFTER: Duration = Duration::from_millis(3);
