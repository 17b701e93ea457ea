//! Tables and their migrations. The schema version is `PRAGMA user_version`.

use std::path::Path;

use rusqlite::Connection;

use super::error::Error;

/// Step N brings a database of version N to N + 1. Steps are only ever appended.
const STEPS: &[&str] = &["
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
"];

/// Brings the database to the newest version; each step is one transaction.
pub(super) fn migrate(conn: &Connection, path: &Path) -> Result<(), Error> {
    let known = u32::try_from(STEPS.len()).unwrap_or(u32::MAX);
    let found: u32 = conn
        .query_row("PRAGMA user_version", [], |row| row.get(0))
        .map_err(Error::sql("read user_version"))?;
    if found > known {
        return Err(Error::Schema { path: path.to_owned(), found, known });
    }
    for (step, version) in STEPS.iter().zip(1_u32..).skip(found as usize) {
        conn.execute_batch(&format!("BEGIN; {step} PRAGMA user_version = {version}; COMMIT;"))
            .map_err(Error::sql("migrate"))?;
    }
    Ok(())
}
