//! What has passed, without a clock or a file; and the freeze of one cgroup.

use std::fmt;
use std::path::PathBuf;

use crate::failpoint;
use crate::kernel::At as _;
use crate::kernel::Result;
use crate::kernel::cgroup::{self, Cgroup, Purpose, Stamp};
use crate::kernel::clock;
use crate::kernel::deadlines::{Deadline, Entry};
use crate::model::ids::{BootId, Generation, SessionId};
use crate::model::time::{BootInstant, BootNs};

/// An entry whose session must not run any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passed {
    /// What to freeze, if the entry still says it.
    pub cgroup: Option<PathBuf>,
    /// Under which generation; [`Generation::NONE`] when the entry does not say.
    pub generation: Generation,
    /// Why.
    pub why: Why,
}

/// Why an entry has passed. The same at every pass: it is put into words only where it is said.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Why {
    /// By the clock.
    Deadline {
        /// Whose entry.
        session: SessionId,
        /// Its generation.
        generation: Generation,
        /// The deadline.
        at: BootInstant,
    },
    /// It is of another boot.
    OtherBoot {
        /// Whose entry.
        session: SessionId,
        /// Its generation.
        generation: Generation,
    },
    /// Neither of its slots can be believed.
    Unreadable {
        /// Which entry.
        index: usize,
    },
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deadline { session, generation, at } => {
                write!(f, "{session} generation {generation}, deadline {at} passed")
            }
            Self::OtherBoot { session, generation } => {
                write!(f, "{session} generation {generation}, deadline of another boot")
            }
            Self::Unreadable { index } => write!(f, "entry {index} cannot be read"),
        }
    }
}

/// What one look at the table gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scan {
    /// To be frozen now.
    pub passed: Vec<Passed>,
    /// The earliest deadline that is yet to come.
    pub next: Option<BootNs>,
}

/// Sorts entries of a table of `boot` into those that have passed at `now` and the next one that
/// will. Deadlines of another boot, and of a table that does not say its boot, have passed; so
/// have entries that cannot be read.
pub fn scan(
    entries: impl IntoIterator<Item = Entry>,
    boot: Option<BootId>,
    now: &BootInstant,
) -> Scan {
    let mut scan = Scan { passed: vec![], next: None };
    for entry in entries {
        match entry {
            Entry::Free => {}
            Entry::Torn { index, cgroup } => scan.passed.push(Passed {
                cgroup,
                generation: Generation::NONE,
                why: Why::Unreadable { index },
            }),
            Entry::Valid(Deadline { session, generation, deadline, cgroup }) => {
                let why = match boot.map(|boot| BootInstant { boot, ns: deadline }) {
                    Some(instant) if !instant.passed(now) => {
                        scan.next = Some(scan.next.map_or(deadline, |next| next.min(deadline)));
                        continue;
                    }
                    Some(at) if at.boot == now.boot => Why::Deadline { session, generation, at },
                    _ => Why::OtherBoot { session, generation },
                };
                scan.passed.push(Passed { cgroup: Some(cgroup), generation, why });
            }
        }
    }
    scan
}

/// What came of a freeze.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// The wish is written.
    Written,
    /// There is no such cgroup: nothing runs in it.
    NoCgroup,
    /// The entry does not say what to freeze.
    Unnamed,
}

impl Passed {
    /// Whether the wish that an earlier pass wrote is there still: one descriptor and one read, since
    /// there may be many of these ahead of the next deadline.
    pub(super) fn stands(&self) -> bool {
        let Some(path) = &self.cgroup else { return false };
        cgroup::wish_at(path).is_ok_and(|wish| wish == Some(true))
    }

    /// Stamps and freezes; what was thawed since it was stamped is written down for the agent, which
    /// knows whether it was stopped by then. A fence's stamp stays: it says more than a deadline's. A stamp that
    /// cannot be read or written does not keep the freeze.
    pub(super) fn freeze(&self) -> Result<Answer> {
        let Some(path) = &self.cgroup else { return Ok(Answer::Unnamed) };
        let Some(cgroup) = Cgroup::open(path)? else { return Ok(Answer::NoCgroup) };
        let own = Stamp { purpose: Purpose::Deadline, generation: self.generation };
        let stamped = match cgroup.read_stamp() {
            Ok(Some(stamp)) if stamp == own || stamp.purpose == Purpose::Fence => {
                // Stopped before, and not any more: once it is frozen again nobody else can see that.
                cgroup.wish().and_then(|stands| match stands {
                    true => Ok(()),
                    false => cgroup.note_thaw(clock::now()),
                })
            }
            _ => {
                let may = failpoint::fails("keeper.stamp.before").at("stamp cgroup", path);
                let answer = may.and_then(|()| cgroup.stamp(&own));
                failpoint::hit("keeper.stamp.after");
                answer
            }
        };
        failpoint::fails("keeper.freeze.before").at("write cgroup.freeze of", path)?;
        cgroup.write_freeze(true)?;
        failpoint::hit("keeper.freeze.after");
        stamped.map(|()| Answer::Written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ids::SessionId;
    use uuid::Uuid;

    const BOOT: BootId = BootId(Uuid::from_u128(1));
    const OTHER: BootId = BootId(Uuid::from_u128(2));
    const NOW: BootInstant = BootInstant { boot: BOOT, ns: BootNs(1_000) };

    fn entry(n: u128, at: u64) -> Entry {
        Entry::Valid(Deadline {
            session: SessionId::from_u128(n),
            generation: Generation(7),
            deadline: BootNs(at),
            cgroup: format!("/c/{n}").into(),
        })
    }

    fn cgroups(scan: &Scan) -> Vec<&str> {
        scan.passed.iter().filter_map(|p| p.cgroup.as_deref()?.to_str()).collect()
    }

    #[test]
    fn a_deadline_passes_at_its_instant_and_the_next_one_is_the_earliest() {
        let entries =
            [entry(1, 999), entry(2, 1_000), entry(3, 2_000), entry(4, 1_001), Entry::Free];
        let scan = scan(entries, Some(BOOT), &NOW);
        assert_eq!(cgroups(&scan), ["/c/1", "/c/2"]);
        assert_eq!(scan.next, Some(BootNs(1_001)));
        assert!(scan.passed.iter().all(|p| p.generation == Generation(7)));
    }

    #[test]
    fn deadlines_of_another_boot_or_of_none_have_passed() {
        for boot in [Some(OTHER), None] {
            let scan = scan([entry(1, u64::MAX), entry(2, 0)], boot, &NOW);
            assert_eq!((cgroups(&scan), scan.next), (vec!["/c/1", "/c/2"], None), "{boot:?}");
            let why = scan.passed[0].why.to_string();
            assert!(why.contains("another boot"), "{why}");
        }
    }

    #[test]
    fn what_cannot_be_read_has_passed() {
        let torn = [
            Entry::Torn { index: 3, cgroup: Some("/c/torn".into()) },
            Entry::Torn { index: 4, cgroup: None },
        ];
        let scan = scan(torn, Some(BOOT), &NOW);
        assert_eq!(scan.passed.len(), 2);
        assert_eq!(cgroups(&scan), ["/c/torn"]);
        assert!(scan.passed.iter().all(|p| p.generation == Generation::NONE));
        assert_ne!(scan.passed[0].why, scan.passed[1].why);
        assert_eq!(scan.passed[1].freeze().unwrap(), Answer::Unnamed);
    }
}
