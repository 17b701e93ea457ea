//! One SQLite file, one connection that writes, with group commit, and one that only reads: what is
//! asked does not wait for a commit's way to the disk.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use rusqlite::{Connection, ErrorCode, OpenFlags};

use super::error::Error;
use super::{files, schema};
use crate::failpoint;

/// How long-lasting a commit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Durability {
    /// Survives the agent's death, not a power loss (no fsync). For what a reboot ends anyway.
    Lazy,
    /// Survives a power loss.
    Full,
}

/// Jobs in one transaction at most, so that the first of them does not wait for ever.
const BATCH: usize = 128;

#[derive(Clone)]
enum Fate {
    Committed,
    RolledBack(String),
    Lost(String),
}

/// Jobs that share a commit, and what became of it.
struct Batch {
    durability: Durability,
    fate: OnceLock<Fate>,
}

struct Writer {
    conn: Connection,
    open: Option<Arc<Batch>>,
    jobs: usize,
    changes_before: u64,
    synchronous: Option<Durability>,
}

/// Bytes of the log whose room is held: SQLite copies the log into the database and begins it anew
/// after 4 MB. As much again is for a disk that is full when it wants to.
const LOG: u64 = 8 << 20;

/// The database. Calls block; do not call from inside a job.
pub struct Db {
    writer: Mutex<Writer>,
    reader: Mutex<Connection>,
    broken: OnceLock<String>,
    decided: Condvar,
    waiting: AtomicUsize,
    commits: AtomicU64,
}

impl Db {
    /// Opens or makes the database at `path` and brings its schema up to date.
    ///
    /// # Errors
    /// Not a database, a newer schema, or the disk does not answer.
    pub fn open(path: &Path) -> Result<Self, Error> {
        files::touch_private(path)?;
        let conn = Connection::open(path).map_err(Error::sql("open"))?;
        conn.busy_timeout(std::time::Duration::from_secs(5)).map_err(Error::sql("busy_timeout"))?;
        for (name, value) in [("journal_mode", "WAL"), ("foreign_keys", "ON")] {
            conn.pragma_update(None, name, value).map_err(Error::sql("pragma"))?;
        }
        conn.pragma_update(None, "synchronous", "FULL").map_err(Error::sql("pragma"))?;
        schema::migrate(&conn, path)?;
        let writer = Writer {
            conn,
            open: None,
            jobs: 0,
            changes_before: 0,
            synchronous: Some(Durability::Full),
        };
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let reader = Connection::open_with_flags(path, flags).map_err(Error::sql("open"))?;
        Ok(Self {
            writer: Mutex::new(writer),
            reader: Mutex::new(reader),
            broken: OnceLock::new(),
            decided: Condvar::new(),
            waiting: AtomicUsize::new(0),
            commits: AtomicU64::new(0),
        })
    }

    /// Takes room on the disk for the commits to come, before there are writers to race for it.
    ///
    /// # Errors
    /// There is none.
    pub fn hold_room(&self) -> Result<(), Error> {
        // No commit lengthens the log meanwhile.
        let writer = self.lock();
        let mut log = writer.conn.path().unwrap_or_default().to_owned();
        log.push_str("-wal");
        files::lengthen(Path::new(&log), LOG)
    }

    /// Why it is not believed any more, if it is not.
    pub fn trouble(&self) -> Option<String> {
        self.broken.get().cloned()
    }

    /// Commits that changed something, since open.
    pub fn commits(&self) -> u64 {
        self.commits.load(Ordering::Relaxed)
    }

    /// Runs `job` in a savepoint of the open transaction and answers once that is committed. An
    /// error of the job undoes the job alone.
    ///
    /// # Errors
    /// The job's own error; [`Error::RolledBack`] when the whole transaction was undone;
    /// [`Error::CommitLost`] when the commit's outcome is not known; [`Error::NotBelieved`] ever
    /// after that.
    pub fn call<R>(
        &self,
        durability: Durability,
        job: impl FnOnce(&Connection) -> Result<R, Error>,
    ) -> Result<R, Error> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut writer = self.lock();
        self.waiting.fetch_sub(1, Ordering::SeqCst);

        // A lazy batch cannot be raised inside its transaction; what it holds is committed first.
        if writer.open.as_ref().is_some_and(|b| b.durability < durability) {
            self.commit(&mut writer);
        }
        self.believed()?;
        let batch = join(&mut writer, durability)?;
        // A panic of one job must not take the batch of the others with it.
        let outcome = catch_unwind(AssertUnwindSafe(|| in_savepoint(&mut writer.conn, job)));
        if let Ok(Err(fault)) = &outcome
            && let Some(why) = self.damage(fault)
        {
            let _ = writer.conn.execute_batch("ROLLBACK");
            self.settle(&mut writer, Fate::RolledBack(why));
        } else if writer.conn.is_autocommit() {
            let why = "SQLite undid it, the disk may be full".to_owned();
            self.settle(&mut writer, Fate::RolledBack(why));
        } else if self.waiting.load(Ordering::SeqCst) == 0 || writer.jobs >= BATCH {
            self.commit(&mut writer);
        }
        let fate = self.await_fate(writer, &batch);
        let answer = outcome.unwrap_or_else(|panic| resume_unwind(panic));
        match fate {
            Fate::Committed => answer,
            Fate::RolledBack(why) => Err(Error::RolledBack { why }),
            Fate::Lost(why) => Err(Error::CommitLost { why }),
        }
    }

    /// Runs `job` on what is committed now, beside whatever is being written.
    ///
    /// # Errors
    /// The job's own error; [`Error::NotBelieved`] as in [`Db::call`].
    pub fn read<R>(&self, job: impl FnOnce(&Connection) -> Result<R, Error>) -> Result<R, Error> {
        self.believed()?;
        // A job that panics leaves a transaction that is undone with it.
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        let snapshot = reader.transaction().map_err(Error::sql("begin"))?;
        job(&snapshot).inspect_err(|fault| {
            self.damage(fault);
        })
    }

    fn believed(&self) -> Result<(), Error> {
        self.broken.get().map_or(Ok(()), |why| Err(Error::NotBelieved { why: why.clone() }))
    }

    /// Why the store is not believed any more after this error, if it is not.
    fn damage(&self, error: &Error) -> Option<String> {
        let Error::Sql { op, source } = error else { return None };
        let damaged = matches!(
            source.sqlite_error_code(),
            Some(ErrorCode::SystemIoFailure | ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase)
        );
        damaged.then(|| self.broken.get_or_init(|| format!("{op}: {source}")).clone())
    }

    fn lock(&self) -> MutexGuard<'_, Writer> {
        // No code of ours leaves the writer half changed when it panics: jobs are caught.
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn commit(&self, writer: &mut Writer) {
        if writer.open.is_none() {
            return;
        }
        let changed = writer.conn.total_changes() != writer.changes_before;
        let may = if changed { failpoint::fails("store.commit.before") } else { Ok(()) };
        let committed = may.map_err(lost).and_then(|()| writer.conn.execute_batch("COMMIT"));
        let fate = match committed {
            Ok(()) => {
                if changed {
                    self.commits.fetch_add(1, Ordering::Relaxed);
                    failpoint::hit("store.commit.after");
                }
                Fate::Committed
            }
            Err(error) => {
                if !writer.conn.is_autocommit() {
                    let _ = writer.conn.execute_batch("ROLLBACK");
                }
                // A full disk takes no commit frame, so nothing can come back; after any other
                // failure (an fsync above all) the frame may or may not be on the disk.
                if error.sqlite_error_code() == Some(ErrorCode::DiskFull) {
                    Fate::RolledBack(error.to_string())
                } else {
                    Fate::Lost(self.broken.get_or_init(|| format!("commit: {error}")).clone())
                }
            }
        };
        self.settle(writer, fate);
    }

    fn settle(&self, writer: &mut Writer, fate: Fate) {
        if let Some(batch) = writer.open.take() {
            let _ = batch.fate.set(fate);
        }
        self.decided.notify_all();
    }

    fn await_fate(&self, mut writer: MutexGuard<'_, Writer>, batch: &Batch) -> Fate {
        loop {
            if let Some(fate) = batch.fate.get() {
                return fate.clone();
            }
            writer = self.decided.wait(writer).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// What SQLite answers when a commit's system call fails, but for want of room.
fn lost(errno: rustix::io::Errno) -> rusqlite::Error {
    let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_IOERR_FSYNC);
    rusqlite::Error::SqliteFailure(code, Some(format!("disk I/O error: {errno}")))
}

/// Joins the open transaction or begins one. Fails only where none is open.
fn join(writer: &mut Writer, durability: Durability) -> Result<Arc<Batch>, Error> {
    writer.jobs += 1;
    if let Some(batch) = &writer.open {
        return Ok(Arc::clone(batch));
    }
    if writer.synchronous != Some(durability) {
        writer.synchronous = None;
        let level = match durability {
            Durability::Full => "FULL",
            Durability::Lazy => "NORMAL",
        };
        writer.conn.pragma_update(None, "synchronous", level).map_err(Error::sql("synchronous"))?;
        writer.synchronous = Some(durability);
    }
    writer.conn.execute_batch("BEGIN IMMEDIATE").map_err(Error::sql("begin"))?;
    writer.changes_before = writer.conn.total_changes();
    writer.jobs = 1;
    let batch = Arc::new(Batch { durability, fate: OnceLock::new() });
    writer.open = Some(Arc::clone(&batch));
    Ok(batch)
}

fn in_savepoint<R>(
    conn: &mut Connection,
    job: impl FnOnce(&Connection) -> Result<R, Error>,
) -> Result<R, Error> {
    let savepoint = conn.savepoint().map_err(Error::sql("savepoint"))?;
    let answer = job(&savepoint)?;
    savepoint.commit().map_err(Error::sql("release savepoint"))?;
    Ok(answer)
}

#[cfg(test)]
mod tests;
