//! One SQLite file, one connection, group commit.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use rusqlite::{Connection, ErrorCode};

use super::error::Error;
use super::{files, schema};
use crate::failpoint;

/// How long-lasting a commit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Durability {
    /// Survives the agent's death, not a power loss (no fsync). For reads, and for what a reboot
    /// ends anyway.
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
    broken: Option<String>,
}

/// Bytes of the log whose room is held: SQLite copies the log into the database and begins it anew
/// after 4 MB. As much again is for a disk that is full when it wants to.
const LOG: u64 = 8 << 20;

/// The database. Calls block; do not call from inside a job.
pub struct Db {
    writer: Mutex<Writer>,
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
            broken: None,
        };
        Ok(Self {
            writer: Mutex::new(writer),
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
        let batch = join(&mut writer, durability)?;
        // A panic of one job must not take the batch of the others with it.
        let outcome = catch_unwind(AssertUnwindSafe(|| in_savepoint(&mut writer.conn, job)));
        if let Some(why) = damage(&outcome) {
            let _ = writer.conn.execute_batch("ROLLBACK");
            writer.broken = Some(why.clone());
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

    fn lock(&self) -> MutexGuard<'_, Writer> {
        // No code of ours leaves the writer half changed when it panics: jobs are caught.
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn commit(&self, writer: &mut Writer) {
        if writer.open.is_none() {
            return;
        }
        let changed = writer.conn.total_changes() != writer.changes_before;
        if changed {
            failpoint::hit("store.commit.before");
        }
        let fate = match writer.conn.execute_batch("COMMIT") {
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
                    let why = format!("commit: {error}");
                    writer.broken = Some(why.clone());
                    Fate::Lost(why)
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

/// Joins the open transaction or begins one. Fails only where none is open.
fn join(writer: &mut Writer, durability: Durability) -> Result<Arc<Batch>, Error> {
    if let Some(why) = &writer.broken {
        return Err(Error::NotBelieved { why: why.clone() });
    }
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

/// Why the store is not believed after this outcome of a job, if it is not.
fn damage<R>(outcome: &std::thread::Result<Result<R, Error>>) -> Option<String> {
    let Ok(Err(Error::Sql { op, source })) = outcome else { return None };
    let damaged = matches!(
        source.sqlite_error_code(),
        Some(ErrorCode::SystemIoFailure | ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase)
    );
    damaged.then(|| format!("{op}: {source}"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;
    use std::sync::Barrier;
    use std::time::{Duration, Instant};

    use super::*;

    fn fresh() -> (tempfile::TempDir, Db) {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::open(&dir.path().join("db")).unwrap();
        (dir, db)
    }

    fn put(conn: &Connection, key: &str) -> Result<(), Error> {
        conn.execute("INSERT INTO meta (key, value) VALUES (?, '')", [key])
            .map(drop)
            .map_err(Error::sql("put"))
    }

    #[test]
    fn the_log_has_its_room_from_the_start_and_loses_nothing_in_a_crash() {
        let (dir, db) = fresh();
        let log = |dir: &Path| std::fs::metadata(dir.join("db-wal")).unwrap();
        db.call(Durability::Full, |conn| put(conn, "before")).unwrap();
        db.hold_room().unwrap();
        let (bytes, blocks) = (log(dir.path()).len(), log(dir.path()).blocks());
        assert!(bytes == LOG && blocks * 512 >= LOG, "{bytes} bytes, {blocks} blocks");
        for i in 0..500 {
            db.call(Durability::Full, |conn| put(conn, &format!("k{i:03}"))).unwrap();
        }
        db.hold_room().unwrap();
        assert_eq!((log(dir.path()).len(), log(dir.path()).blocks()), (bytes, blocks));
        // As a crash leaves it.
        let after = tempfile::tempdir().unwrap();
        for name in ["db", "db-wal"] {
            std::fs::copy(dir.path().join(name), after.path().join(name)).unwrap();
        }
        let again = Db::open(&after.path().join("db")).unwrap();
        assert_eq!(keys(&again).len(), 501);
        again.hold_room().unwrap();
        assert_eq!(log(after.path()).len(), LOG);
    }

    fn keys(db: &Db) -> Vec<String> {
        db.call(Durability::Lazy, |conn| {
            let mut all = conn.prepare("SELECT key FROM meta ORDER BY key").unwrap();
            Ok(all.query_map([], |r| r.get(0)).unwrap().map(Result::unwrap).collect())
        })
        .unwrap()
    }

    /// Lets `others` callers come while a first one holds its batch open for them.
    struct Gathering<'a> {
        db: &'a Db,
        others: usize,
        begun: Barrier,
    }

    impl<'a> Gathering<'a> {
        fn of(db: &'a Db, others: usize) -> Self {
            Self { db, others, begun: Barrier::new(others + 1) }
        }

        /// In the first one's job: waits until all others stand behind it.
        fn hold(&self) {
            self.begun.wait();
            let deadline = Instant::now() + Duration::from_secs(20);
            while self.db.waiting.load(Ordering::SeqCst) < self.others {
                assert!(Instant::now() < deadline, "the others did not come");
                std::thread::yield_now();
            }
        }

        /// In each other one, ahead of its call.
        fn come(&self) {
            self.begun.wait();
        }
    }

    #[test]
    fn jobs_that_come_together_share_one_commit_and_get_their_own_answers() {
        let (_dir, db) = fresh();
        let all = Gathering::of(&db, 8);
        let answers: Vec<Result<usize, Error>> = std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                db.call(Durability::Full, |conn| {
                    all.hold();
                    put(conn, "first").map(|()| 100)
                })
            });
            let rest = (0..8_usize).map(|n| {
                let (db, all) = (&db, &all);
                scope.spawn(move || {
                    all.come();
                    db.call(Durability::Full, |conn| {
                        put(conn, &format!("k{n}"))?;
                        // One of them fails after it wrote.
                        if n == 3 { put(conn, "k3") } else { Ok(()) }?;
                        Ok(n)
                    })
                })
            });
            let rest: Vec<_> = rest.collect();
            std::iter::once(first).chain(rest).map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(answers[0].as_ref().unwrap(), &100);
        for n in 0..8 {
            match &answers[n + 1] {
                Ok(answer) => assert_eq!((*answer, n == 3), (n, false)),
                Err(error) => assert!(n == 3 && matches!(error, Error::Sql { .. }), "{n}: {error}"),
            }
        }
        assert_eq!(keys(&db), ["first", "k0", "k1", "k2", "k4", "k5", "k6", "k7"]);
        assert_eq!(db.commits(), 1);
    }

    #[test]
    fn a_panic_of_one_job_leaves_the_others() {
        let (_dir, db) = fresh();
        let both = Gathering::of(&db, 1);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                db.call(Durability::Full, |conn| {
                    both.hold();
                    put(conn, "first")
                })
            });
            let dies = scope.spawn(|| {
                both.come();
                db.call(Durability::Full, |conn| -> Result<(), Error> {
                    put(conn, "dies")?;
                    panic!("as the test wants")
                })
            });
            first.join().unwrap().unwrap();
            assert!(dies.join().is_err());
        });
        assert_eq!(keys(&db), ["first"]);
    }

    #[test]
    fn lazy_and_full_jobs_run_under_their_own_level() {
        let (_dir, db) = fresh();
        let level = |durability| {
            db.call(durability, |conn| {
                conn.query_row("PRAGMA synchronous", [], |r| r.get::<_, i64>(0))
                    .map_err(Error::sql("read"))
            })
            .unwrap()
        };
        assert_eq!([level(Durability::Full), level(Durability::Lazy)], [2, 1]);
        assert_eq!([level(Durability::Full), level(Durability::Full)], [2, 2]);
        // A full job never rides on a lazy commit; a lazy one may ride on a full commit.
        for (first, second, commits) in
            [(Durability::Lazy, Durability::Full, 2), (Durability::Full, Durability::Lazy, 1)]
        {
            let before = db.commits();
            let name = format!("{first:?}");
            let both = Gathering::of(&db, 1);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    db.call(first, |conn| {
                        both.hold();
                        put(conn, &name)
                    })
                    .unwrap();
                });
                scope.spawn(|| {
                    both.come();
                    db.call(second, |conn| put(conn, &format!("{name} then {second:?}"))).unwrap();
                });
            });
            assert_eq!(db.commits() - before, commits, "{first:?} then {second:?}");
        }
        let before = db.commits();
        assert_eq!(keys(&db).len(), 4);
        assert_eq!(db.commits(), before, "a read is no commit");
    }

    #[test]
    fn after_a_failed_commit_nothing_is_believed_until_it_is_opened_again() {
        let (dir, db) = fresh();
        db.call(Durability::Full, |conn| {
            conn.execute_batch(
                "CREATE TABLE child (
                     parent TEXT REFERENCES meta (key) DEFERRABLE INITIALLY DEFERRED
                 ) STRICT",
            )
            .map_err(Error::sql("table"))
        })
        .unwrap();
        // A violation that only COMMIT notices; to the code above it, an fsync error is the same.
        let both = Gathering::of(&db, 1);
        let (good, bad) = std::thread::scope(|scope| {
            let good = scope.spawn(|| {
                db.call(Durability::Full, |conn| {
                    both.hold();
                    put(conn, "good")
                })
            });
            let bad = scope.spawn(|| {
                both.come();
                db.call(Durability::Full, |conn| {
                    conn.execute("INSERT INTO child VALUES ('nobody')", [])
                        .map_err(Error::sql("child"))
                })
            });
            (good.join().unwrap(), bad.join().unwrap())
        });
        assert!(matches!(good, Err(Error::CommitLost { .. })), "{good:?}");
        assert!(matches!(bad, Err(Error::CommitLost { .. })), "{bad:?}");
        for durability in [Durability::Full, Durability::Lazy] {
            let later = db.call(durability, |conn| put(conn, "later"));
            assert!(matches!(later, Err(Error::NotBelieved { .. })), "{later:?}");
        }
        drop(db);
        let db = Db::open(&dir.path().join("db")).unwrap();
        db.call(Durability::Full, |conn| put(conn, "again")).unwrap();
        assert_eq!(keys(&db), ["again"]);
    }

    #[test]
    fn a_full_disk_is_refused_and_gets_over() {
        let (_dir, db) = fresh();
        let pages = |n: i64| {
            db.call(Durability::Lazy, |conn| {
                conn.query_row(&format!("PRAGMA max_page_count = {n}"), [], |_| Ok(()))
                    .map_err(Error::sql("pages"))
            })
            .unwrap();
        };
        pages(1);
        let error = db.call(Durability::Full, |conn| put(conn, &"x".repeat(1_000_000)));
        assert!(matches!(error, Err(Error::Sql { .. } | Error::RolledBack { .. })), "{error:?}");
        pages(1_000_000);
        db.call(Durability::Full, |conn| put(conn, "fits")).unwrap();
        assert_eq!(keys(&db), ["fits"]);
    }

    #[test]
    fn a_newer_schema_is_left_alone() {
        let (dir, db) = fresh();
        db.call(Durability::Full, |conn| {
            conn.pragma_update(None, "user_version", 99).map_err(Error::sql("version"))
        })
        .unwrap();
        drop(db);
        let error = Db::open(&dir.path().join("db")).err().unwrap();
        assert!(matches!(error, Error::Schema { found: 99, known: 3, .. }), "{error}");
    }
}
