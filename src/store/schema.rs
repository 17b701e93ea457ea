//! Tables and their migrations. The schema version is `PRAGMA user_version`.

use std::path::Path;

use rusqlite::Connection;

use super::error::Error;

/// Step N brings a database of version N to N + 1. Steps are only ever appended.
const STEPS: &[&str] = &[
    "
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    CREATE TABLE workspaces (id TEXT PRIMARY KEY, record TEXT NOT NULL, mac BLOB NOT NULL) STRICT;
    CREATE TABLE publications (
        workspace TEXT NOT NULL, key TEXT NOT NULL, record TEXT NOT NULL, mac BLOB NOT NULL,
        PRIMARY KEY (workspace, key)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE history (
        seq INTEGER PRIMARY KEY, workspace TEXT NOT NULL, time TEXT NOT NULL,
        record TEXT NOT NULL, mac BLOB NOT NULL
    ) STRICT;
    CREATE INDEX history_of_workspace ON history (workspace, seq);
    CREATE TABLE sessions (id TEXT PRIMARY KEY, record TEXT NOT NULL, mac BLOB NOT NULL) STRICT;
    CREATE TABLE evidence (
        seq INTEGER PRIMARY KEY, session TEXT, workspace TEXT, body TEXT NOT NULL,
        hash TEXT NOT NULL
    ) STRICT;
    CREATE INDEX evidence_of_session ON evidence (session, seq);
",
    "
    ALTER TABLE publications ADD COLUMN open INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE publications ADD COLUMN decided INTEGER NOT NULL DEFAULT 0;
    UPDATE publications SET decided = CAST(strftime('%s', 'now') AS INTEGER) * 1000;
    CREATE INDEX publications_open ON publications (workspace, key) WHERE open = 1;
    CREATE TABLE requests (
        seq INTEGER PRIMARY KEY, workspace TEXT NOT NULL, key TEXT NOT NULL, task TEXT NOT NULL,
        open INTEGER NOT NULL, record TEXT NOT NULL, mac BLOB NOT NULL, UNIQUE (workspace, key)
    ) STRICT;
    CREATE INDEX requests_of_task ON requests (workspace, task);
    CREATE INDEX requests_open ON requests (workspace, seq) WHERE open = 1;
",
    "
    CREATE TABLE buried (id TEXT PRIMARY KEY, record TEXT NOT NULL, mac BLOB NOT NULL) STRICT;
",
];

/// Refuses a database of a newer overfence.
pub(super) fn check(conn: &Connection, path: &Path) -> Result<u32, Error> {
    let known = u32::try_from(STEPS.len()).unwrap_or(u32::MAX);
    let found: u32 = conn
        .query_row("PRAGMA user_version", [], |row| row.get(0))
        .map_err(Error::sql("read user_version"))?;
    match found > known {
        true => Err(Error::Schema { path: path.to_owned(), found, known }),
        false => Ok(found),
    }
}

/// Brings the database to the newest version; each step is one transaction.
pub(super) fn migrate(conn: &Connection, path: &Path) -> Result<(), Error> {
    migrate_to(conn, path, STEPS.len())
}

fn migrate_to(conn: &Connection, path: &Path, last: usize) -> Result<(), Error> {
    let found = check(conn, path)?;
    for (step, version) in STEPS[..last].iter().zip(1_u32..).skip(found as usize) {
        conn.execute_batch(&format!("BEGIN; {step} PRAGMA user_version = {version}; COMMIT;"))
            .map_err(Error::sql("migrate"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_database_of_each_earlier_version_becomes_the_newest() {
        let shape = |conn: &Connection| {
            let mut all =
                conn.prepare("SELECT name, sql FROM sqlite_schema ORDER BY name").unwrap();
            let rows =
                all.query_map([], |r| Ok((r.get::<_, String>(0)?, r.get::<_, Option<String>>(1)?)));
            // ALTER TABLE leaves its own blanks.
            let words = |sql: Option<String>| {
                sql.map(|s| s.split_whitespace().collect::<Vec<_>>().join(" "))
            };
            rows.unwrap()
                .map(|r| r.map(|(name, sql)| (name, words(sql))).unwrap())
                .collect::<Vec<_>>()
        };
        let path = Path::new("memory");
        let fresh = Connection::open_in_memory().unwrap();
        migrate(&fresh, path).unwrap();
        for version in 1..=STEPS.len() {
            let old = Connection::open_in_memory().unwrap();
            migrate_to(&old, path, version).unwrap();
            old.execute_batch(
                "INSERT INTO publications (workspace, key, record, mac) VALUES ('w', 'k', 'r', x'00');
                 INSERT INTO workspaces VALUES ('w', 'r', x'00');",
            )
            .unwrap();
            for _ in 0..2 {
                migrate(&old, path).unwrap();
            }
            assert_eq!(shape(&old), shape(&fresh), "from {version}");
            let kept: (String, i64) = old
                .query_row("SELECT record, open FROM publications", [], |r| r.try_into())
                .unwrap();
            assert_eq!(kept, ("r".to_owned(), 0), "from {version}");
        }
        let old = Connection::open_in_memory().unwrap();
        migrate_to(&old, path, 1).unwrap();
        old.execute_batch(
            "INSERT INTO publications (workspace, key, record, mac) VALUES ('w', 'k', 'r', x'00');",
        )
        .unwrap();
        migrate(&old, path).unwrap();
        let decided: i64 =
            old.query_row("SELECT decided FROM publications", [], |r| r.get(0)).unwrap();
        let now = jiff::Timestamp::now().as_millisecond();
        assert!((now - 60_000..=now).contains(&decided), "its 90 days begin now: {decided}");
    }
}
