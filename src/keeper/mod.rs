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
//! 3. Stamp the cgroups of what has passed since the last pass and write `cgroup.freeze=1`. Nothing else
//!    comes before that.
//! 4. Look at those that passed earlier, and write again where somebody took the wish away: whoever thaws
//!    one against its deadline has it for one pass, or, beside a crowd and a run of deadlines, until its
//!    turn comes. The next deadline goes first.
//! 5. Say what changed, by a thread of its own: see `voice`.

mod pass;
mod voice;

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::mm::MlockAllFlags;

use pass::Answer;
pub use pass::{Passed, Scan, Why, scan};
use voice::Voice;

use crate::kernel::deadlines::Snapshot;
use crate::kernel::{self, clock, launch};
use crate::model::time::{BootInstant, BootNs};

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
    let voice = Voice::onto(std::io::stderr());
    harden(&voice);
    voice.say(&format!("watching {}", deadlines.display()));
    let mut keeper = Keeper {
        deadlines: deadlines.to_owned(),
        snapshot: None,
        mapped: String::new(),
        known: HashMap::new(),
        turn: 0,
        voice,
    };
    loop {
        let now = BootInstant { boot, ns: clock::now() };
        keeper.map_anew();
        let next = keeper.pass(&now);
        let latest = now.ns.plus(PASS);
        clock::sleep_until(next.map_or(latest, |next| next.min(latest)));
    }
}

/// Asks for what keeps it on time under load; goes on without what is not granted, and says so.
fn harden(voice: &Voice) {
    if let Err(e) = launch::schedule_fifo(PRIORITY) {
        voice.say(&format!("not real-time scheduled ({e}): late under load; grant CAP_SYS_NICE"));
    }
    if let Err(e) = rustix::mm::mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE) {
        let hint = "late when the host swaps; raise LimitMEMLOCK";
        voice.say(&format!("not locked in memory ({e}): {hint}"));
    }
}

struct Keeper {
    deadlines: PathBuf,
    snapshot: Option<Snapshot>,
    /// What was last said of the file.
    mapped: String,
    /// What came of each entry that had passed by the last pass, so that it is said once.
    known: HashMap<Why, Came>,
    /// Where among those a pass goes on that follows one that was cut short.
    turn: usize,
    voice: Voice,
}

/// So many of an earlier pass are looked at in each: some 20 us each, so that no run of deadlines leaves one
/// that somebody thawed to itself.
const AT_LEAST: usize = 16;

/// What came of a freeze; the error in words.
type Came = Result<Answer, String>;

impl Keeper {
    fn map_anew(&mut self) {
        if self.snapshot.as_ref().is_some_and(Snapshot::is_current) {
            return;
        }
        let what = match Snapshot::open(&self.deadlines) {
            Ok(Some(new)) => {
                self.snapshot = Some(new);
                "mapped".to_owned()
            }
            Ok(None) if self.snapshot.is_none() => "waiting for it".to_owned(),
            Ok(None) => "gone; going by what it said last".to_owned(),
            Err(e) => with_source(&e),
        };
        if self.mapped != what {
            self.voice.say(&format!("{}: {what}", self.deadlines.display()));
            self.mapped = what;
        }
    }

    /// One pass; when the next deadline is.
    fn pass(&mut self, now: &BootInstant) -> Option<BootNs> {
        let snapshot = self.snapshot.as_ref()?;
        let Scan { passed, next } = scan(snapshot.iter(), snapshot.boot(), now);
        let (old, new): (Vec<&Passed>, Vec<&Passed>) =
            passed.iter().partition(|passed| self.known.contains_key(&passed.why));
        let mut came: Vec<(&Passed, Came)> = new.into_iter().map(|p| (p, freeze(p))).collect();
        came.extend(self.again(&old, next));
        // What is renewed or removed is news again when it passes the next time.
        let still: HashSet<&Why> = passed.iter().map(|passed| &passed.why).collect();
        self.known.retain(|why, _| still.contains(why));
        for (passed, came) in came {
            if self.known.get(&passed.why) != Some(&came) {
                if let Some(words) = words(passed, &came) {
                    self.voice.say(&words);
                }
                self.known.insert(passed.why.clone(), came);
            }
        }
        next
    }

    /// Those of an earlier pass, until the `next` deadline has come, and [`AT_LEAST`] in any case: who is
    /// left out comes first at the pass after this.
    fn again<'p>(&mut self, old: &[&'p Passed], next: Option<BootNs>) -> Vec<(&'p Passed, Came)> {
        let from = self.turn.min(old.len());
        let in_time = |n: usize| n < AT_LEAST || next.is_none_or(|next| clock::now() < next);
        let turns = old[from..].iter().chain(&old[..from]).enumerate();
        let came: Vec<_> = turns
            .take_while(|(n, _)| in_time(*n))
            .map(|(_, passed)| match self.known.get(&passed.why) {
                Some(Ok(Answer::Written)) if passed.stands() => (*passed, Ok(Answer::Written)),
                Some(_) | None => (*passed, freeze(passed)),
            })
            .collect();
        self.turn = match came.len() < old.len() {
            true => (from + came.len()) % old.len(),
            false => 0,
        };
        came
    }
}

fn freeze(passed: &Passed) -> Came {
    passed.freeze().map_err(|e| with_source(&e))
}

/// What is said of it, if anything.
fn words(passed: &Passed, came: &Came) -> Option<String> {
    let what = match came {
        Ok(Answer::Written) => format!("frozen: {}", passed.why),
        // An entry is made before its cgroup, and may outlive it.
        Ok(Answer::NoCgroup) => return None,
        Ok(Answer::Unnamed) => "unreadable and names no cgroup: nothing to freeze".to_owned(),
        Err(why) => format!("NOT frozen: {why}"),
    };
    Some(match &passed.cgroup {
        Some(cgroup) => format!("{}: {what}", cgroup.display()),
        None => format!("({}): {what}", passed.why),
    })
}

/// Errors here name path and operation; the cause is their source.
fn with_source(e: &dyn std::error::Error) -> String {
    e.source().map_or_else(|| e.to_string(), |source| format!("{e}: {source}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ids::{BootId, Generation, SessionId};

    fn old(n: u128) -> Passed {
        let (session, generation) = (SessionId::from_u128(n), Generation(1));
        let at = BootInstant { boot: BootId(uuid::Uuid::from_u128(1)), ns: BootNs(1) };
        let cgroup = Some(format!("/proc/no-such-cgroup/{n}").into());
        Passed { cgroup, generation, why: Why::Deadline { session, generation, at } }
    }

    fn keeper(voice: Voice) -> Keeper {
        let (deadlines, mapped, known) = ("/nowhere".into(), String::new(), HashMap::new());
        Keeper { deadlines, snapshot: None, mapped, known, turn: 0, voice }
    }

    /// Not so long that all of them are looked at before it has come, whatever the host.
    const SOON: Duration = Duration::from_millis(2);

    #[test]
    fn those_of_earlier_passes_wait_for_a_deadline_and_none_is_left_out_for_ever() {
        let mut keeper = keeper(Voice::onto(std::fs::File::open("/dev/null").unwrap()));
        let all: Vec<Passed> = (0..10_000).map(old).collect();
        let all: Vec<&Passed> = all.iter().collect();
        let came = keeper.again(&all, Some(BootNs(0)));
        assert_eq!(came.len(), AT_LEAST, "a deadline that has come goes before the others");
        let mut seen = HashSet::new();
        let (mut passes, mut cut_short) = (0, 0);
        while seen.len() < all.len() {
            let came = keeper.again(&all, Some(clock::now().plus(SOON)));
            cut_short += usize::from(came.len() < all.len());
            assert!(came.iter().all(|(_, came)| *came == Ok(Answer::NoCgroup)));
            seen.extend(came.into_iter().map(|(passed, _)| passed.why.clone()));
            passes += 1;
            assert!(passes <= all.len(), "the same ones again and again");
        }
        eprintln!("{passes} passes, {cut_short} of them cut short");
        keeper.turn = all.len() - 1;
        let came = keeper.again(&all, None);
        assert_eq!((came.len(), keeper.turn), (all.len(), 0));
        assert_eq!(came[0].0, all[all.len() - 1], "it goes on where it was cut short");
        // Fewer than before.
        keeper.turn = all.len() - 1;
        assert_eq!(keeper.again(&all[..3], None).len(), 3);
    }

    #[test]
    fn what_is_said_names_the_cgroup_or_the_entry() {
        let passed = old(7);
        let said = words(&passed, &Ok(Answer::Written)).unwrap();
        assert!(said.starts_with("/proc/no-such-cgroup/7: frozen: s-"), "{said}");
        assert_eq!(words(&passed, &Ok(Answer::NoCgroup)), None);
        let failed = words(&passed, &Err("EIO".to_owned())).unwrap();
        assert_eq!(failed, "/proc/no-such-cgroup/7: NOT frozen: EIO");
        let unnamed = Passed { cgroup: None, why: Why::Unreadable { index: 3 }, ..passed };
        let said = words(&unnamed, &Ok(Answer::Unnamed)).unwrap();
        assert!(said.starts_with("(entry 3 cannot be read): "), "{said}");
    }
}
