//! The sign of life that the init gives for its command: the time of the last one, in a file beside
//! its record. Only the init has it open, the agent reads it when a renewal or a deadline is due: no
//! message, and nobody is woken for it, on a host that may hold a thousand sessions.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use super::{Place, Result, io_at};
use crate::kernel::clock;
use crate::model::time::BootNs;

/// When the holder of a `process` lease last gave a sign of life; `None` before the first one.
/// `record` is the init's record.
pub fn last_sign(record: &Path) -> Option<BootNs> {
    let bytes = fs::read(record.with_extension("beat")).ok()?;
    let sign = BootNs(u64::from_ne_bytes(bytes.try_into().ok()?));
    // One from the future is no sign of anything.
    (sign <= clock::now()).then_some(sign)
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
        let file = File::create(dir.path().join("init.beat")).unwrap();
        assert_eq!(last_sign(&record), None);
        let mut beat = Beat::new(Duration::from_secs(3600), file.try_clone().unwrap());
        let before = clock::now();
        beat.give(|| false);
        assert_eq!(last_sign(&record), None, "nobody vouched");
        let mut beat = Beat::new(Duration::from_secs(3600), file.try_clone().unwrap());
        beat.give(|| true);
        let sign = last_sign(&record).unwrap();
        assert!(before <= sign && sign <= clock::now());
        beat.give(|| true);
        assert_eq!(last_sign(&record), Some(sign), "the next one is due after 20 minutes");
        for garbage in [&u64::MAX.to_ne_bytes()[..], b"short", b"longer than it"] {
            file.set_len(0).unwrap();
            file.write_all_at(garbage, 0).unwrap();
            assert_eq!(last_sign(&record), None, "{garbage:?}");
        }
    }
}
