//! How far long work is: counted by who does it, shown to who waits for it. Like `failpoint` it is used
//! by every room that has such work. Counting costs two additions without order; nothing waits for
//! it and nothing fails by it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::model::view::ProgressView;

/// What is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The immutable flag is set on what is in an upper.
    Seal,
    /// It is taken off.
    Unseal,
    /// An upper is read and packed into a layer.
    Capture,
    /// A layer is made of what was gathered of an upper.
    Pack,
    /// An upper is compared with what was published of it.
    Compare,
    /// A bundle is written.
    Export,
    /// A bundle is read back, or read.
    Verify,
    /// The upper of a session that does not begin empty is put together.
    Seed,
    /// A session's directory is removed.
    Remove,
}

impl What {
    /// Its name in the API.
    pub fn word(self) -> &'static str {
        match self {
            Self::Seal => "seal",
            Self::Unseal => "unseal",
            Self::Capture => "capture",
            Self::Pack => "pack",
            Self::Compare => "compare",
            Self::Export => "export",
            Self::Verify => "verify",
            Self::Seed => "seed",
            Self::Remove => "remove",
        }
    }
}

/// An amount of work, done or to be done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Bytes: on disk where an upper is read or removed, of a compressed file where that is.
    pub bytes: u64,
    /// Files, directories and whatever else has a name.
    pub entries: u64,
}

/// Counters of one piece of work; any number of threads may add.
#[derive(Debug, Default)]
pub struct Progress {
    bytes: AtomicU64,
    entries: AtomicU64,
    total_bytes: AtomicU64,
    total_entries: AtomicU64,
}

impl Progress {
    /// Adds what was done.
    pub fn did(&self, bytes: u64, entries: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.entries.fetch_add(entries, Ordering::Relaxed);
    }

    /// Says how much there is to do; 0 is what nobody knows.
    pub fn expect(&self, total: Amount) {
        self.total_bytes.store(total.bytes, Ordering::Relaxed);
        self.total_entries.store(total.entries, Ordering::Relaxed);
    }

    /// What was done so far.
    pub fn done(&self) -> Amount {
        let of = |n: &AtomicU64| n.load(Ordering::Relaxed);
        Amount { bytes: of(&self.bytes), entries: of(&self.entries) }
    }

    /// What there is to do, as far as it is known.
    pub fn total(&self) -> Amount {
        let of = |n: &AtomicU64| n.load(Ordering::Relaxed);
        Amount { bytes: of(&self.total_bytes), entries: of(&self.total_entries) }
    }

    /// As it is shown, of work that has taken so long.
    pub fn view(&self, what: What, took: Duration) -> ProgressView {
        let (done, total) = (self.done(), self.total());
        let known = |n: u64| (n > 0).then_some(n);
        ProgressView {
            what: what.word().to_owned(),
            bytes: done.bytes,
            entries: done.entries,
            total_bytes: known(total.bytes),
            total_entries: known(total.entries),
            took_ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

/// Who waits for long work: asked now and then whether it is still wanted, and told what was done.
/// A closure answers the question and counts nothing.
pub trait Waiting: Sync {
    /// Whether it is not wanted any more.
    fn over(&self) -> bool;

    /// Something was done.
    fn did(&self, _bytes: u64, _entries: u64) {}
}

impl<F: Fn() -> bool + Sync> Waiting for F {
    fn over(&self) -> bool {
        self()
    }
}

/// A question whether to stop, with counters.
#[derive(Debug)]
pub struct Counted<'p, F> {
    /// The question.
    pub stop: F,
    /// The counters.
    pub progress: &'p Progress,
}

impl<F: Fn() -> bool + Sync> Waiting for Counted<'_, F> {
    fn over(&self) -> bool {
        (self.stop)()
    }

    fn did(&self, bytes: u64, entries: u64) {
        self.progress.did(bytes, entries);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_shown_and_what_nobody_knows_is_left_out() {
        let progress = Progress::default();
        let counted = Counted { stop: || true, progress: &progress };
        counted.did(3, 1);
        counted.did(4, 0);
        assert!(counted.over());
        let json = |view: ProgressView| serde_json::to_value(view).unwrap();
        let view = json(progress.view(What::Capture, Duration::from_millis(1500)));
        let want =
            serde_json::json!({ "what": "capture", "bytes": 7, "entries": 1, "took_ms": 1500 });
        assert_eq!(view, want);
        progress.expect(Amount { bytes: 70, entries: 0 });
        let view = json(progress.view(What::Verify, Duration::ZERO));
        let want = serde_json::json!({
            "what": "verify", "bytes": 7, "entries": 1, "total_bytes": 70, "took_ms": 0,
        });
        assert_eq!(view, want);
    }

    #[test]
    fn a_closure_is_asked_and_counts_nothing() {
        let stop: &dyn Waiting = &|| false;
        stop.did(1, 1);
        assert!(!stop.over());
    }
}
