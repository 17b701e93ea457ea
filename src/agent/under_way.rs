//! Long work that is under way on this host, for who asks how far it is. Nothing is decided by it, but
//! that an upper is not compared with its print while a seal changes it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::host::Host;
use super::slot::Slot;
use crate::kernel::clock;
use crate::model::ids::{SessionId, WorkspaceId};
use crate::model::time::BootNs;
use crate::model::view::{ProgressView, SealingView};
use crate::progress::{Amount, Progress, What};

/// All of it, oldest first.
#[derive(Debug, Default)]
pub struct UnderWay(Mutex<Vec<Arc<Job>>>);

/// Whose work it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whose {
    /// A session's.
    Session(SessionId),
    /// Nobody's yet: a session of this workspace will be opened on it.
    Workspace(WorkspaceId),
}

#[derive(Debug)]
struct Job {
    what: What,
    whose: Whose,
    begun: BootNs,
    progress: Progress,
}

/// Takes a job off the list, however it ends.
struct Ended<'u>(&'u UnderWay, Arc<Job>);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.jobs().retain(|job| !Arc::ptr_eq(job, &self.1));
    }
}

impl UnderWay {
    fn jobs(&self) -> MutexGuard<'_, Vec<Arc<Job>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does a piece of work with its progress shown.
    pub fn showing<T>(
        &self,
        what: What,
        whose: Whose,
        total: Amount,
        work: impl FnOnce(&Progress) -> T,
    ) -> T {
        let progress = Progress::default();
        progress.expect(total);
        let job = Arc::new(Job { what, whose, begun: clock::now(), progress });
        self.jobs().push(Arc::clone(&job));
        let ended = Ended(self, job);
        work(&ended.1.progress)
    }

    fn newest(&self, whose: &Whose, fits: impl Fn(What) -> bool) -> Option<Arc<Job>> {
        self.jobs().iter().rev().find(|job| job.whose == *whose && fits(job.what)).cloned()
    }

    /// What began last of somebody's.
    pub fn of(&self, whose: &Whose) -> Option<ProgressView> {
        let job = self.newest(whose, |_| true)?;
        Some(job.progress.view(job.what, clock::now().since(job.begun)))
    }

    /// A session's seal, or its end.
    pub fn sealing(&self, session: SessionId) -> Option<SealingView> {
        let fits = |what| matches!(what, What::Seal | What::Unseal);
        let job = self.newest(&Whose::Session(session), fits)?;
        let (done, total) = (job.progress.done().entries, job.progress.total().entries);
        Some(SealingView { what: job.what.word().to_owned(), done, total })
    }
}

impl Host {
    /// Does a session's work with its progress shown; `total` is what there is to do, as far as it is
    /// known.
    pub(super) fn showing<T>(
        &self,
        slot: &Slot,
        what: What,
        total: Amount,
        work: impl FnOnce(&Progress) -> T,
    ) -> T {
        self.under_way.showing(what, Whose::Session(slot.id), total, work)
    }
}

impl Slot {
    /// How much is in the upper, as it was found when it was counted or captured last.
    pub(super) fn measured(&self) -> Amount {
        let inner = self.lock();
        let counted = inner.size.map(|(bytes, entries)| Amount { bytes, entries });
        counted.or(inner.captured).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_is_shown_as_long_as_it_goes_on() {
        let all = UnderWay::default();
        let (one, other) = (SessionId::fresh(), SessionId::fresh());
        let whose = Whose::Session(one);
        let total = Amount { bytes: 0, entries: 9 };
        all.showing(What::Seal, whose.clone(), total, |progress| {
            progress.did(0, 2);
            let shown = SealingView { what: "seal".into(), done: 2, total: 9 };
            assert_eq!(all.sealing(one), Some(shown.clone()));
            assert_eq!(all.of(&whose).unwrap().total_entries, Some(9));
            all.showing(What::Capture, whose.clone(), Amount::default(), |_| {
                assert_eq!(all.of(&whose).unwrap().what, "capture");
                assert_eq!(all.sealing(one), Some(shown));
            });
            assert_eq!(all.of(&whose).unwrap().what, "seal");
            assert_eq!((all.of(&Whose::Session(other)), all.sealing(other)), (None, None));
        });
        assert_eq!((all.of(&whose), all.sealing(one)), (None, None));
    }

    #[test]
    fn one_that_panics_is_not_shown_for_ever() {
        let all = UnderWay::default();
        let whose = Whose::Workspace("w".parse().unwrap());
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            all.showing(What::Seed, whose.clone(), Amount::default(), |_| panic!("on purpose"));
        }));
        assert!(caught.is_err());
        assert_eq!(all.of(&whose), None);
    }
}
