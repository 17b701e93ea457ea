//! The sign of life that the init gives for its command: the time of the last one, in a file beside
//! its record. Only the init has it open, the agent reads it when a renewal or a deadline is due: no
//! message, and nobody is woken for it, on a host that may hold a thousand sessions.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use super::{Place, Result, io_at};
use crate::kernel::clock;
use crate::model::time::BootNs;

/// Where the holder of a `process` lease gives its signs of life.
#[derive(Debug)]
pub struct Beats(File);

impl Beats {
    /// Those of the init that `record` is about; `None` before it was first started.
    pub fn of(record: &Path) -> Option<Self> {
        File::open(record.with_extension("beat")).ok().map(Self)
    }

    /// When it last gave one.
    pub fn last(&self) -> Option<BootNs> {
        // One byte more than there should be.
        let mut bytes = [0; 9];
        let n = self.0.read_at(&mut bytes, 0).ok()?;
        let sign = BootNs(u64::from_ne_bytes(bytes[..n].try_into().ok()?));
        // One from the future is no sign of anything.
        (sign <= clock::now()).then_some(sign)
    }
}

/// The file, for an init that is about to start. A sign of its predecessor stays as it is; without
/// one, room is taken, so that no later sign fails for want of it.
pub(super) fn open(place: &Place) -> Result<File> {
    let path = place.record.with_extension("beat");
    let made = || {
        let file = File::options().create(true).write(true).truncate(false).open(&path)?;
        if file.metadata()?.len() == 0 {
            file.write_all_at(&0_u64.to_ne_bytes(), 0)?;
        }
        Ok::<_, io::Error>(file)
    };
    made().map_err(io_at("make", &path))
}

/// When to beat. `Instant` stops in a suspend; a deadline that passed meanwhile is the agent's to
/// see, and no beat would change it.
#[derive(Debug)]
pub(super) struct Beat {
    every: Duration,
    next: Instant,
    file: File,
}

impl Beat {
    /// Three beats in each `ttl`, the first at once.
    pub(super) fn new(ttl: Duration, file: File) -> Self {
        Self { every: ttl / 3, next: Instant::now(), file }
    }

    /// How long until the next one is due.
    pub(super) fn wait(&self) -> Duration {
        self.next.saturating_duration_since(Instant::now())
    }

    /// Beats if one is due and the command can vouch for itself. A sign that cannot be written is
    /// none: the lease runs out, the command goes on until then.
    pub(super) fn give(&mut self, alive: impl FnOnce() -> bool) {
        if !self.wait().is_zero() {
            return;
        }
        self.next = Instant::now() + self.every;
        if alive() {
            // Eight bytes within a page: read as a whole or not at all.
            let _ = self.file.write_all_at(&clock::now().0.to_ne_bytes(), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sign_is_the_time_at_which_it_was_given() {
        let dir = tempfile::tempdir().unwrap();
        let record = dir.path().join("init.json");
        assert!(Beats::of(&record).is_none());
        let file = File::create(dir.path().join("init.beat")).unwrap();
        let last = || Beats::of(&record).unwrap().last();
        assert_eq!(last(), None);
        let mut beat = Beat::new(Duration::from_secs(3600), file.try_clone().unwrap());
        let before = clock::now();
        beat.give(|| false);
        assert_eq!(last(), None, "nobody vouched");
        let mut beat = Beat::new(Duration::from_secs(3600), file.try_clone().unwrap());
        beat.give(|| true);
        let sign = last().unwrap();
        assert!(before <= sign && sign <= clock::now());
        beat.give(|| true);
        assert_eq!(last(), Some(sign), "the next one is due after 20 minutes");
        for garbage in [&u64::MAX.to_ne_bytes()[..], b"short", b"longer than it"] {
            file.set_len(0).unwrap();
            file.write_all_at(garbage, 0).unwrap();
            assert_eq!(last(), None, "{garbage:?}");
        }
    }
}
