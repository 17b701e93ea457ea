//! One descriptor that wakes when the kernel has news of any session's cgroup: frozen, thawed,
//! populated, emptied. It says who to look at again, never what happened: events are merged and
//! held back, so the state is read afterwards. That a cgroup was removed its own files do not report
//! (6.18), only the directory above it does.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use inotify::{EventMask, Inotify, WatchDescriptor, WatchMask};
use rustix::event::PollFlags;

use super::cgroup::Cgroup;
use super::{At as _, Result, clock};
use crate::model::ids::SessionId;
use crate::model::time::BootNs;

/// Watches `cgroup.events` of many sessions.
#[derive(Debug)]
pub struct CgroupEvents {
    state: Mutex<State>,
    /// The same instance, to wait on without the lock.
    fd: OwnedFd,
}

#[derive(Debug)]
struct State {
    inotify: Inotify,
    watched: HashMap<WatchDescriptor, SessionId>,
    parents: HashSet<WatchDescriptor>,
}

impl CgroupEvents {
    /// A watch on nothing yet.
    pub fn new() -> Result<Self> {
        let inotify = Inotify::init().at("make", "an inotify instance")?;
        let fd = inotify.as_fd().try_clone_to_owned().at("copy", "an inotify descriptor")?;
        Ok(Self {
            state: Mutex::new(State { inotify, watched: HashMap::new(), parents: HashSet::new() }),
            fd,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing below panics half-way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches a session's cgroup. Look at its state once after this: what changed before is not
    /// reported.
    pub fn add(&self, session: SessionId, cgroup: &Cgroup) -> Result<()> {
        let path = cgroup.path().join("cgroup.events");
        let mut state = self.state();
        let watch = state.inotify.watches().add(&path, WatchMask::MODIFY).at("watch", path)?;
        state.watched.insert(watch, session);
        Ok(())
    }

    /// Watches a directory of sessions' cgroups for the removal of one, each of which is named for its
    /// session. Done again it is the same, or watches a directory that was made anew.
    pub fn add_parent(&self, directory: &Path) -> Result<()> {
        let mut state = self.state();
        let watch =
            state.inotify.watches().add(directory, WatchMask::DELETE).at("watch", directory)?;
        state.parents.insert(watch);
        Ok(())
    }

    /// Watches it no more.
    pub fn remove(&self, session: SessionId) {
        let mut state = self.state();
        let mut watches = state.inotify.watches();
        state.watched.retain(|watch, s| {
            if *s == session {
                // It fails only if the cgroup is gone and the watch with it.
                let _ = watches.remove(watch.clone());
            }
            *s != session
        });
    }

    /// The sessions to look at again, without waiting; all of them if the kernel had to drop
    /// events.
    pub fn woken(&self) -> Result<Vec<SessionId>> {
        let mut state = self.state();
        let mut woken = BTreeSet::new();
        let mut buffer = [0; 8192];
        loop {
            let events = match state.inotify.read_events(&mut buffer) {
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                answer => answer.at("read", "an inotify instance")?,
            };
            for event in events {
                if event.mask.contains(EventMask::Q_OVERFLOW) {
                    woken.extend(state.watched.values().copied());
                }
                woken.extend(state.watched.get(&event.wd).copied());
                if state.parents.contains(&event.wd) {
                    let name = event.name.and_then(|name| name.to_str());
                    woken.extend(name.and_then(|name| name.parse::<SessionId>().ok()));
                }
            }
        }
        Ok(woken.into_iter().collect())
    }

    /// Waits until there may be news, or `until`; whether there is.
    pub fn wait(&self, until: Option<BootNs>) -> Result<bool> {
        clock::poll_until(self.fd.as_fd(), PollFlags::IN, until)
            .at("wait on", "an inotify instance")
    }
}

impl AsFd for CgroupEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
