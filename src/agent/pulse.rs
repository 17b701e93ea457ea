//! Proof that the agent's own threads and tasks go round: each answers, once a round, the last
//! question that was put to all of them. A part that hangs does not answer, and systemd's watchdog
//! is then not fed. Work that may wait for a disk is none of these rounds, so that a slow disk is
//! no reason to be ended.

use std::sync::atomic::{AtomicU64, Ordering};

/// What has to go round for sessions to be fenced and renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The deadline timer.
    Deadlines,
    /// The watch on the sealed cgroups.
    Watch,
    /// Renewals.
    Renew,
    /// The reconciler's clock.
    Sweep,
    /// The sockets inside the sessions, by which holders beat.
    Sockets,
}

const PARTS: [(Part, &str); 5] = [
    (Part::Deadlines, "deadlines"),
    (Part::Watch, "watch"),
    (Part::Renew, "renew"),
    (Part::Sweep, "sweep"),
    (Part::Sockets, "sockets"),
];

/// The question's number, and the last one that each part answered.
#[derive(Debug, Default)]
pub struct Pulse {
    asked: AtomicU64,
    answered: [AtomicU64; PARTS.len()],
}

impl Pulse {
    /// Answers for a part; called once a round.
    pub fn beat(&self, part: Part) {
        self.answered[part as usize].store(self.asked.load(Ordering::Acquire), Ordering::Release);
    }

    /// Puts the next question if all have answered the last one; else names who has not.
    pub fn ask(&self) -> Result<(), Vec<&'static str>> {
        let asked = self.asked.load(Ordering::Acquire);
        let silent: Vec<_> = PARTS
            .iter()
            .filter(|(part, _)| self.answered[*part as usize].load(Ordering::Acquire) < asked)
            .map(|(_, name)| *name)
            .collect();
        if !silent.is_empty() {
            return Err(silent);
        }
        self.asked.store(asked + 1, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_silent_part_is_named_until_it_goes_round() {
        let pulse = Pulse::default();
        assert_eq!(pulse.ask(), Ok(()), "nobody was asked before");
        pulse.beat(Part::Deadlines);
        pulse.beat(Part::Renew);
        pulse.beat(Part::Sockets);
        assert_eq!(pulse.ask(), Err(vec!["watch", "sweep"]));
        pulse.beat(Part::Watch);
        assert_eq!(pulse.ask(), Err(vec!["sweep"]));
        pulse.beat(Part::Sweep);
        assert_eq!(pulse.ask(), Ok(()));
        let all = PARTS.map(|(_, name)| name).to_vec();
        assert_eq!(pulse.ask(), Err(all), "an old answer answers no new question");
    }
}
