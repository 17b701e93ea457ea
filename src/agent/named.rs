//! Who keeps an overlay from becoming read-only is looked for in all of /proc. Read-only itself is tried
//! again every few seconds for the whole grace, so what was found is kept, and looked for anew only now
//! and then, and at once when there is a reason.

use std::time::Duration;

use super::effects::text;
use super::host::Host;
use super::slot::Slot;
use crate::kernel::{clock, holders};
use crate::model::facts::{Fact, Facts, Holder};
use crate::model::time::BootNs;

/// The shortest time between two searches that nobody asked for, below that between two tries.
const FIRST: Duration = Duration::from_secs(4);
/// The longest; a search that finds what the one before it found doubles the time.
const LONGEST: Duration = Duration::from_secs(60);

/// What the last search for a session found.
#[derive(Debug, Default)]
pub struct Named {
    last: Option<Last>,
}

#[derive(Debug)]
struct Last {
    holders: Vec<Holder>,
    /// The facts that held: a kill or a seal changes who is left.
    facts: Vec<Fact>,
    at: BootNs,
    pause: Duration,
    /// Somebody wants to know.
    asked: bool,
}

impl Named {
    /// What was found last, if that may still be said `now` of holders that are still there.
    pub fn known(&self, facts: &Facts, now: BootNs) -> Option<Vec<Holder>> {
        let last = self.last.as_ref()?;
        let same = !last.asked && facts.0.keys().eq(&last.facts);
        (same && now.since(last.at) < last.pause).then(|| last.holders.clone())
    }

    /// Notes what a search found that was done `now`.
    pub fn found(&mut self, holders: &[Holder], facts: &Facts, now: BootNs) {
        let facts: Vec<Fact> = facts.0.keys().copied().collect();
        let again = self
            .last
            .take()
            .filter(|last| !last.asked && last.holders == holders && last.facts == facts);
        let pause = again.map_or(FIRST, |last| (last.pause * 2).min(LONGEST));
        let holders = holders.to_vec();
        self.last = Some(Last { holders, facts, at: now, pause, asked: false });
    }

    /// A person asks: the next try searches.
    pub fn ask(&mut self) {
        if let Some(last) = &mut self.last {
            last.asked = true;
        }
    }

    /// Nobody holds it any more.
    pub fn forget(&mut self) {
        self.last = None;
    }
}

impl Host {
    /// Who keeps a session's overlay, whose device is `s_dev`, from becoming read-only.
    pub(super) fn holders(&self, slot: &Slot, s_dev: u64) -> Result<Vec<Holder>, String> {
        let (known, s) = {
            let inner = slot.lock();
            (inner.named.known(&inner.session.facts, clock::now()), inner.session.clone())
        };
        // Who runs on behind the gate is frozen by what a search finds: no earlier answer will do.
        let known = known.filter(|known| !s.run_on && known.iter().all(is_there));
        if let Some(holders) = known {
            return Ok(holders);
        }
        let holders = holders::of(s_dev, &slot.dirs.upper, &self.paths.cgroup(&s)).map_err(text)?;
        slot.lock().named.found(&holders, &s.facts, clock::now());
        Ok(holders)
    }
}

/// Whether the process that a holder names still goes by that name.
fn is_there(holder: &Holder) -> bool {
    let comm = || std::fs::read(format!("/proc/{}/comm", holder.pid));
    holder.pid == 0
        || comm().is_ok_and(|c| String::from_utf8_lossy(&c).trim_end() == holder.command)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::facts::Proof;

    const TRY: u64 = 5;

    fn at(seconds: u64) -> BootNs {
        BootNs(seconds * 1_000_000_000)
    }

    fn holder(pid: u32) -> Vec<Holder> {
        let (how, what) = ("descriptor".to_owned(), "5".to_owned());
        let (command, cgroup) = ("sleep".to_owned(), "/x".to_owned());
        vec![Holder { pid, command, how, what, cgroup, inside: false }]
    }

    fn facts(proved: &[Fact]) -> Facts {
        let mut facts = Facts::default();
        for fact in proved {
            let (asked, answer) = (String::new(), String::new());
            facts.prove(*fact, Proof { asked, answer, at: at(0), took_us: 0 });
        }
        facts
    }

    /// One try; whether it searched.
    fn tried(named: &mut Named, facts: &Facts, now: u64, pid: u32, there: bool) -> bool {
        if let Some(holders) = named.known(facts, at(now)).filter(|_| there) {
            assert_eq!(holders, holder(pid), "what is said is not what was found");
            return false;
        }
        named.found(&holder(pid), facts, at(now));
        true
    }

    #[test]
    fn the_same_holder_is_looked_for_ever_more_seldom() {
        let (mut named, frozen) = (Named::default(), facts(&[Fact::Frozen]));
        let tries = (0..3600).step_by(TRY as usize);
        let searched: Vec<u64> =
            tries.filter(|now| tried(&mut named, &frozen, *now, 7, true)).collect();
        assert_eq!(searched[..6], [0, 5, 15, 35, 70, 130]);
        // 720 tries in an hour.
        assert_eq!(searched.len(), 6 + (3595 - 130) / 60);
    }

    #[test]
    fn a_reason_has_it_looked_for_at_once() {
        let frozen = facts(&[Fact::Frozen]);
        let settled = || {
            let mut named = Named::default();
            for now in (0..1000).step_by(TRY as usize) {
                tried(&mut named, &frozen, now, 7, true);
            }
            assert!(!tried(&mut named, &frozen, 1000, 7, true));
            named
        };
        let mut asked = settled();
        asked.ask();
        assert!(tried(&mut asked, &frozen, 1001, 7, true), "a person asked");
        assert!(tried(&mut asked, &frozen, 1006, 7, true), "the pauses begin anew");
        assert!(!tried(&mut asked, &frozen, 1011, 7, true));
        assert!(tried(&mut settled(), &facts(&[Fact::Frozen, Fact::Killed]), 1001, 7, true));
        assert!(tried(&mut settled(), &frozen, 1001, 7, false), "who was named has ended");
        let mut granted = settled();
        granted.forget();
        assert!(tried(&mut granted, &frozen, 1001, 7, true), "it was granted in between");
        // Another one was found: it is looked after as closely as the first.
        let mut other = settled();
        assert!(tried(&mut other, &frozen, 1070, 8, true));
        assert!(tried(&mut other, &frozen, 1075, 8, true));
    }

    #[test]
    fn a_process_is_told_by_its_name() {
        let own = std::fs::read_to_string("/proc/self/comm").unwrap().trim_end().to_owned();
        let pid = std::process::id();
        let holder =
            |pid: u32, command: &str| Holder { command: command.into(), ..holder(pid).remove(0) };
        assert!(is_there(&holder(pid, &own)) && is_there(&holder(0, "kernel")));
        assert!(!is_there(&holder(pid, "somebody")) && !is_there(&holder(u32::MAX, &own)));
    }
}
