//! Whether an overlay's superblock is dead. Unmounting, an empty mountinfo and a second mount of
//! the same upper prove nothing while a copy of the mount lives somewhere; these two do:
//!
//! * an inotify watch on the overlay's root, set while it was mounted: IN_UNMOUNT comes when the
//!   superblock dies and not before;
//! * after a restart, when the watch is lost: a probe mount of the same upper with `index=on`, which
//!   the kernel refuses while the instance that claimed the upper lives.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use inotify::{EventMask, Inotify, WatchDescriptor, WatchMask};
use rustix::event::PollFlags;
use rustix::fs::AtFlags;
use rustix::io::Errno;
use rustix::mount::FsOpenFlags;

use super::walk::Dir;
use super::{At as _, Result, clock, proc_path, seal};
use crate::failpoint;
use crate::model::facts::Proof;
use crate::model::ids::SessionId;

/// Another thread can take the event that this one waits for; look again after this long.
const STEP: Duration = Duration::from_millis(5);

/// Whether a superblock died.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gone {
    /// It did.
    Gone(Proof),
    /// No proof so far: somebody keeps it alive.
    StillAlive,
}

/// Watches the overlays of all sessions for their superblocks' death.
#[derive(Debug)]
pub struct UnmountWatch {
    state: Mutex<State>,
    /// The same instance, to wait on without the lock.
    fd: OwnedFd,
}

#[derive(Debug)]
struct State {
    inotify: Inotify,
    watched: HashMap<WatchDescriptor, SessionId>,
    dead: HashMap<SessionId, Proof>,
}

impl UnmountWatch {
    /// A watch on nothing yet.
    pub fn new() -> Result<Self> {
        let inotify = Inotify::init().at("make", "an inotify instance")?;
        let fd = inotify.as_fd().try_clone_to_owned().at("copy", "an inotify descriptor")?;
        let state = State { inotify, watched: HashMap::new(), dead: HashMap::new() };
        Ok(Self { state: Mutex::new(state), fd })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing below panics half-way through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches the overlay whose root this is, before it is unmounted. `root` may be closed
    /// afterwards, and must be for a plain umount to succeed; the watch keeps nothing busy. A
    /// session with several overlays is gone when all of them are.
    pub fn watch(&self, root: &OwnedFd, key: SessionId) -> Result<()> {
        let mut state = self.state();
        // IN_UNMOUNT is reported whatever is asked for; an overlay's root is never deleted.
        let watch = state
            .inotify
            .watches()
            .add(proc_path(root), WatchMask::DELETE_SELF)
            .at("watch", "an overlay's root")?;
        state.dead.remove(&key);
        state.watched.insert(watch, key);
        Ok(())
    }

    /// Whether this session's superblock is watched and has not been seen to die.
    pub fn is_watched(&self, key: SessionId) -> bool {
        self.state().watched.values().any(|k| *k == key)
    }

    /// Forgets a session.
    pub fn forget(&self, key: SessionId) {
        let mut state = self.state();
        state.dead.remove(&key);
        let mut watches = state.inotify.watches();
        state.watched.retain(|watch, k| {
            if *k == key {
                // It fails only if the kernel removed it already.
                let _ = watches.remove(watch.clone());
            }
            *k != key
        });
    }

    /// Takes what the kernel has reported, without waiting: the sessions whose superblocks were
    /// seen to die by this call.
    pub fn poll(&self) -> Result<Vec<SessionId>> {
        let mut state = self.state();
        let mut died = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let events = match state.inotify.read_events(&mut buffer) {
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return Ok(died),
                answer => answer.at("read", "an inotify instance")?,
            };
            for event in events {
                // A watch that was removed for any other reason (IN_IGNORED, an overflowed queue)
                // proves nothing: the session then stays alive here and the probe has to decide.
                if event.mask.contains(EventMask::UNMOUNT)
                    && let Some(key) = state.watched.remove(&event.wd)
                    // A session mounted again while a copy of its first overlay lived has two.
                    && !state.watched.values().any(|other| *other == key)
                {
                    state.dead.insert(key, unmounted());
                    died.push(key);
                }
            }
        }
    }

    /// Waits for a superblock's death, `timeout` at most.
    pub fn wait_gone(&self, key: SessionId, timeout: Duration) -> Result<Gone> {
        let begun = clock::now();
        let until = begun.plus(timeout);
        loop {
            self.poll()?;
            if let Some(proof) = self.state().dead.get(&key) {
                return Ok(Gone::Gone(proof.clone()));
            }
            if clock::now() >= until {
                return Ok(Gone::StillAlive);
            }
            let step = until.min(clock::now().plus(STEP));
            clock::poll_until(self.fd.as_fd(), PollFlags::IN, Some(step))
                .at("wait on", "an inotify instance")?;
        }
    }
}

impl AsFd for UnmountWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn unmounted() -> Proof {
    Proof {
        asked: "inotify watch on the overlay's root".to_owned(),
        answer: "IN_UNMOUNT".to_owned(),
        at: clock::now(),
        took_us: 0,
    }
}

/// What a probe mount was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probe {
    /// EBUSY: an overlay instance that claimed this upper lives.
    Alive,
    /// It could be mounted: no instance holds the claim.
    Dead(Proof),
}

/// Asks by a probe mount whether the instance that claimed `upper` lives. Works in a directory of
/// its own in `scratch`, which has to be on the same mount as the upper. Nobody else may mount the
/// upper meanwhile: the kernel keeps one claim an upper, and a second instance that was mounted
/// with `index=off` beside the first has none.
///
/// What a successful probe writes (overlay xattrs on the upper, its own work directory) is removed
/// again.
pub fn index_probe(upper: &Path, scratch: &Path) -> Result<Probe> {
    let begun = clock::now();
    let name = format!(".overfence-probe-{}-{}", std::process::id(), begun.0);
    let path = scratch.join(&name);
    let mode = rustix::fs::Mode::RWXU;
    rustix::fs::mkdir(&path, mode).at("make a probe directory", &path)?;
    for part in ["work", "lower"] {
        rustix::fs::mkdir(path.join(part), mode).at("make a probe directory", &path)?;
    }
    let upper_dir = Dir::open(upper)?;
    let before = upper_dir.own_xattrs()?;
    let ask = || {
        failpoint::fails("kernel.index-probe.before").at("mount a probe of", upper)?;
        let answer = probe_mount(&upper_dir, &path);
        failpoint::hit("kernel.index-probe.after");
        for (name, _) in upper_dir.own_xattrs()? {
            if !before.iter().any(|(known, _)| *known == name) {
                rustix::fs::fremovexattr(&upper_dir, &*name)
                    .at("remove a probe's xattr of", upper)?;
            }
        }
        Ok(answer)
    };
    let answer = match ask()? {
        // The claim was free, and then the probe was refused an xattr on a sealed upper: asked
        // again without the flag, which nobody is there to profit from.
        Err(Errno::PERM) if seal::holds(upper).unwrap_or(false) => seal::lifted(&upper_dir, ask)??,
        answer => answer,
    };
    remove_tree(&Dir::open(scratch)?, name.as_ref())?;
    match answer {
        Err(Errno::BUSY) => Ok(Probe::Alive),
        Err(e) => Err(e).at("probe-mount", upper),
        Ok(()) => Ok(Probe::Dead(Proof {
            asked: format!("probe mount of {} with index=on", upper.display()),
            answer: "ok".to_owned(),
            at: clock::now(),
            took_us: clock::micros_since(begun),
        })),
    }
}

/// Makes a superblock and lets go of it, without mounting it anywhere.
fn probe_mount(upper: &Dir, scratch: &Path) -> rustix::io::Result<()> {
    let fs = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let set = |key: &str, value: &Path| rustix::mount::fsconfig_set_string(&fs, key, value);
    let open = |name: &str| {
        // Short and without separators, whatever the path is: fsconfig takes 255 bytes.
        rustix::fs::open(
            scratch.join(name),
            rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        )
    };
    let (lower, work) = (open("lower")?, open("work")?);
    set("lowerdir", &proc_path(&lower))?;
    set("upperdir", &proc_path(upper))?;
    set("workdir", &proc_path(&work))?;
    set("index", Path::new("on"))?;
    rustix::mount::fsconfig_create(&fs)
}

/// Removes a tree of our own making, by descriptors.
pub(crate) fn remove_tree(parent: &Dir, name: &std::ffi::OsStr) -> Result<()> {
    let flags = if parent.stat(name)?.kind.is_dir() {
        let dir = parent.child(name)?;
        for entry in dir.sorted()? {
            remove_tree(&dir, &entry.name)?;
        }
        AtFlags::REMOVEDIR
    } else {
        AtFlags::empty()
    };
    rustix::fs::unlinkat(parent, name, flags).at("remove", parent.path().join(name))
}
