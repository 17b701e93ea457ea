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
fn a_read_waits_for_no_commit_and_sees_what_is_committed() {
    let (_dir, db) = fresh();
    let names = || db.read(|conn| Ok(listed(conn))).unwrap();
    db.call(Durability::Full, |conn| put(conn, "old")).unwrap();
    let (inside, over) = (Barrier::new(2), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            db.call(Durability::Full, |conn| {
                put(conn, "new")?;
                inside.wait();
                over.wait();
                Ok(())
            })
            .unwrap();
        });
        inside.wait();
        assert_eq!(names(), ["old"]);
        over.wait();
    });
    assert_eq!(names(), ["new", "old"]);
    let refused = db.read(|conn| put(conn, "read")).unwrap_err();
    assert!(refused.to_string().contains("put"), "{refused}");
    assert_eq!(names(), ["new", "old"]);
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

fn listed(conn: &Connection) -> Vec<String> {
    let mut all = conn.prepare("SELECT key FROM meta ORDER BY key").unwrap();
    all.query_map([], |r| r.get(0)).unwrap().map(Result::unwrap).collect()
}

fn keys(db: &Db) -> Vec<String> {
    db.call(Durability::Lazy, |conn| Ok(listed(conn))).unwrap()
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
                conn.execute("INSERT INTO child VALUES ('nobody')", []).map_err(Error::sql("child"))
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
