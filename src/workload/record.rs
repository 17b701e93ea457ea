//! Who a session's init is. The record lies outside the directory that the workload sees and is
//! believed only together with the kernel: the process is in the sealed cgroup and was started
//! when the record says.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Error, Place, Result, io_at};

/// A session's init.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct InitRecord {
    /// Its process id on the host.
    pub pid: u32,
    /// When it was started, clock ticks since the boot (field 22 of `/proc/PID/stat`).
    pub start_time: u64,
}

impl InitRecord {
    /// Describes the process `pid`.
    pub(super) fn of(pid: u32) -> io::Result<Self> {
        Ok(Self { pid, start_time: Stat::of(pid)?.start_time })
    }

    /// Whether this very process lives and sits in `cgroup`.
    ///
    /// # Errors
    /// The cgroup's process list cannot be read.
    pub fn lives_in(&self, cgroup: &Path) -> io::Result<bool> {
        let Ok(stat) = Stat::of(self.pid) else { return Ok(false) };
        let own = self.pid.to_string();
        Ok(stat.start_time == self.start_time
            && stat.state != 'Z'
            && fs::read_to_string(cgroup.join("cgroup.procs"))?.lines().any(|pid| pid == own))
    }
}

/// What is used of `/proc/PID/stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stat {
    /// R, S, D, T, t, Z, ...
    pub(super) state: char,
    /// Clock ticks since the boot.
    pub(super) start_time: u64,
}

impl Stat {
    pub(super) fn of(pid: u32) -> io::Result<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        Self::parse(&text).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, text))
    }

    fn parse(text: &str) -> Option<Self> {
        // The command's name, in parentheses, may itself hold spaces and parentheses.
        let (_, rest) = text.rsplit_once(") ")?;
        let mut fields = rest.split(' ');
        let state = fields.next()?.chars().next()?;
        Some(Self { state, start_time: fields.nth(18)?.parse().ok()? })
    }
}

/// Keeps others from looking for, starting or leaving as an init at the same time, until it is
/// dropped. An init that leaves because nothing is left to do writes into the lock's file first:
/// until it is dead, it would be taken for one that can be joined.
pub(super) struct Lock(File);

impl Lock {
    /// Waits for the lock.
    pub(super) fn take(place: &Place) -> Result<Self> {
        let path = beside(place, ".lock");
        let file = open_lock(place)?;
        file.lock().map_err(io_at("take the lock", &path))?;
        Ok(Self(file))
    }

    /// The init that can be joined.
    pub(super) fn init(&self, place: &Place) -> Result<Option<InitRecord>> {
        let meta = self.0.metadata().map_err(io_at("look at", beside(place, ".lock")))?;
        if meta.len() > 0 { Ok(None) } else { live(place) }
    }

    /// Forgets that an earlier init left; a new one is about to start.
    pub(super) fn anew(&self, place: &Place) -> Result<()> {
        self.0.set_len(0).map_err(io_at("empty", beside(place, ".lock")))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Not by closing alone: a forked companion has the same open file.
        let _ = self.0.unlock();
    }
}

/// The lock's file, opened anew: for an init, which takes it by itself when it leaves.
pub(super) fn open_lock(place: &Place) -> Result<File> {
    let path = beside(place, ".lock");
    File::options().create(true).append(true).open(&path).map_err(io_at("open the lock", &path))
}

/// The recorded init, if it lives.
pub(super) fn live(place: &Place) -> Result<Option<InitRecord>> {
    let path = &place.record;
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io_at("read", path)(e)),
    };
    let record: InitRecord = serde_json::from_slice(&bytes)
        .map_err(|source| Error::Record { path: path.clone(), source })?;
    let lives =
        record.lives_in(&place.cgroup).map_err(io_at("list the processes of", &place.cgroup))?;
    Ok(lives.then_some(record))
}

/// Writes the record. The file is replaced as a whole.
pub(super) fn write(place: &Place, record: InitRecord) -> Result<()> {
    let path = &place.record;
    let new = beside(place, ".new");
    let text = format!("{{\"pid\":{},\"start_time\":{}}}\n", record.pid, record.start_time);
    crate::failpoint::fails("workload.record.before").map_err(io_at("write", &new))?;
    fs::write(&new, text).map_err(io_at("write", &new))?;
    fs::rename(&new, path).map_err(io_at("replace", path))?;
    crate::failpoint::hit("workload.record.after");
    Ok(())
}

fn beside(place: &Place, ending: &str) -> PathBuf {
    let mut path = place.record.clone().into_os_string();
    path.push(ending);
    path.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_move_the_fields() {
        let text = "7 (a) b) (c) T 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4242 9 10";
        assert_eq!(Stat::parse(text), Some(Stat { state: 'T', start_time: 4242 }));
        for bad in ["", "7 (a", "7 (a) ", "7 (a) S 1 2"] {
            assert_eq!(Stat::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_process_that_is_not_in_the_cgroup_or_started_later_is_not_the_init() {
        let dir = tempfile::tempdir().unwrap();
        let own = std::process::id();
        let record = InitRecord::of(own).unwrap();
        fs::write(dir.path().join("cgroup.procs"), format!("1\n{own}\n")).unwrap();
        assert!(record.lives_in(dir.path()).unwrap());
        let later = InitRecord { start_time: record.start_time + 1, ..record };
        assert!(!later.lives_in(dir.path()).unwrap());
        fs::write(dir.path().join("cgroup.procs"), format!("1\n{own}0\n")).unwrap();
        assert!(!record.lives_in(dir.path()).unwrap());
    }
}
