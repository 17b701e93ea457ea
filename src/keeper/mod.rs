//! The second line: freezes each session whose deadline has passed, agent or no agent. No runtime,
//! no database, no socket; real-time scheduled and locked in memory. It never thaws, never kills,
//! never writes anything but a stamp and `cgroup.freeze`. May use `kernel` and `model`.
//!
//! It keeps nothing on disk; it reads one file, which the agent alone writes:
//!
//! ```text
//! <run>/deadlines      see `kernel::deadlines`
//! ```
//!
//! One pass every [`PASS`] and at each deadline, on CLOCK_BOOTTIME:
//!
//! 1. Map the file anew if the path leads to another one; without a file, wait for it. A file that
//!    went away or cannot be believed is no reason to let go of the one that is mapped.
//! 2. Find what has passed: by the clock, of another boot, or unreadable.
//! 3. Stamp each of its cgroups and write `cgroup.freeze=1`, again at every pass: whoever thaws
//!    one against its deadline has it for one pass at most.

mod pass;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::mm::MlockAllFlags;

pub use pass::{Passed, Scan, scan};

use crate::kernel::deadlines::Snapshot;
use crate::kernel::{self, clock, launch};
use crate::model::time::BootInstant;

/// The longest time between two passes.
pub const PASS: Duration = Duration::from_millis(100);

/// Above what hosts commonly run as real-time, below the kernel's own watchdogs.
const PRIORITY: i32 = 50;

/// Keeps watch until it is killed. What it does is on stderr, one line for each change.
///
/// # Errors
/// The boot id cannot be read. Everything else is said and tried again at the next pass.
pub fn run(deadlines: &Path) -> kernel::Result<Infallible> {
    let boot = clock::boot_id()?;
    harden();
    eprintln!("keeper: watching {}", deadlines.display());
    let mut keeper =
        Keeper { deadlines: deadlines.to_owned(), snapshot: None, said: BTreeMap::new() };
    loop {
        let now = BootInstant { boot, ns: clock::now() };
        keeper.map_anew();
        let next = keeper.pass(&now);
        let latest = now.ns.plus(PASS);
        clock::sleep_until(next.map_or(latest, |next| next.min(latest)));
    }
}

/// Asks for what keeps it on time under load; goes on without what is not granted, and says so.
fn harden() {
    if let Err(e) = launch::schedule_fifo(PRIORITY) {
        eprintln!("keeper: not real-time scheduled ({e}): late under load; grant CAP_SYS_NICE");
    }
    if let Err(e) = rustix::mm::mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE) {
        eprintln!(
            "keeper: not locked in memory ({e}): late when the host swaps; raise LimitMEMLOCK"
        );
    }
}

struct Keeper {
    deadlines: PathBuf,
    snapshot: Option<Snapshot>,
    /// What was last said of each subject, so that it is said once.
    said: BTreeMap<PathBuf, String>,
}

impl Keeper {
    fn map_anew(&mut self) {
        if self.snapshot.as_ref().is_some_and(Snapshot::is_current) {
            return;
        }
        let path = self.deadlines.clone();
        match Snapshot::open(&path) {
            Ok(Some(new)) => {
                self.say(&path, "mapped");
                self.snapshot = Some(new);
            }
            Ok(None) if self.snapshot.is_none() => self.say(&path, "waiting for it"),
            Ok(None) => self.say(&path, "gone; going by what it said last"),
            Err(e) => self.say(&path, &with_source(&e)),
        }
    }

    /// One pass; when the next deadline is.
    fn pass(&mut self, now: &BootInstant) -> Option<crate::model::time::BootNs> {
        let snapshot = self.snapshot.as_ref()?;
        let Scan { passed, next } = scan(snapshot.iter(), snapshot.boot(), now);
        let subjects: Vec<PathBuf> = passed.iter().map(Passed::subject).collect();
        let deadlines = self.deadlines.clone();
        // What is renewed or removed is news again when it passes the next time.
        self.said.retain(|subject, _| *subject == deadlines || subjects.contains(subject));
        for (passed, subject) in passed.iter().zip(subjects) {
            match passed.freeze() {
                Ok(pass::Answer::Written) => self.say(&subject, &format!("frozen: {}", passed.why)),
                // An entry is made before its cgroup, and may outlive it.
                Ok(pass::Answer::NoCgroup) => {}
                Ok(pass::Answer::Unnamed) => {
                    self.say(&subject, "unreadable and names no cgroup: nothing to freeze");
                }
                Err(e) => self.say(&subject, &format!("NOT frozen: {}", with_source(&e))),
            }
        }
        next
    }

    fn say(&mut self, subject: &Path, what: &str) {
        if self.said.get(subject).map(String::as_str) != Some(what) {
            eprintln!("keeper: {}: {what}", subject.display());
            self.said.insert(subject.to_owned(), what.to_owned());
        }
    }
}

/// Errors here name path and operation; the cause is their source.
fn with_source(e: &dyn std::error::Error) -> String {
    e.source().map_or_else(|| e.to_string(), |source| format!("{e}: {source}"))
}
