//! What can go wrong in the store.

use std::path::PathBuf;

/// A failure of the host's durable state.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file operation failed.
    #[error("{op} {} failed; check the disk and its permissions", path.display())]
    Io {
        /// What was tried.
        op: &'static str,
        /// On what.
        path: PathBuf,
        /// The answer.
        #[source]
        source: std::io::Error,
    },
    /// Another agent has the state directory.
    #[error("another agent runs on {}: it holds the lock; stop it first", path.display())]
    Locked {
        /// The lock file.
        path: PathBuf,
    },
    /// One statement failed; nothing of its job is kept.
    #[error("the store refused a statement ({op}); nothing of it was kept")]
    Sql {
        /// What was done.
        op: &'static str,
        /// The answer.
        #[source]
        source: rusqlite::Error,
    },
    /// The transaction was rolled back before its commit, for instance because the disk is full.
    #[error("the store rolled the transaction back: {why}; nothing was kept, free space and retry")]
    RolledBack {
        /// The answer.
        why: String,
    },
    /// The commit failed: whether it lasts is known only after the store was opened again.
    #[error("the answer of a commit was lost: {why}; the agent ends, and the next one reads again")]
    CommitLost {
        /// The answer.
        why: String,
    },
    /// The store is not believed any more.
    #[error(
        "the store is not believed any more: {why}; the agent ends, and the next one reads again"
    )]
    NotBelieved {
        /// What happened first.
        why: String,
    },
    /// The database was written by a newer overfence.
    #[error("{} has schema {found}, this build knows {known}; use the newer build", path.display())]
    Schema {
        /// The database.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// A key is missing, damaged, or not the one the records were made with.
    #[error(
        "key {}: {why}; bring the right key back, a new one would make every record unreadable",
        path.display()
    )]
    Key {
        /// The key file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A record does not verify or does not parse.
    #[error("record {id} in {table} is not believed: {why}")]
    Record {
        /// The table.
        table: &'static str,
        /// The record.
        id: String,
        /// What is wrong.
        why: String,
    },
    /// A file of lines is damaged other than by a torn last line.
    #[error("{} line {line}: {why}; compare it with a backup before you go on", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        why: String,
    },
    /// A witness file is gone although the database is there.
    #[error(
        "{} is missing although the database is there; bring it back, or create it empty to go on \
         without what it witnessed",
        path.display()
    )]
    WitnessMissing {
        /// The file.
        path: PathBuf,
    },
    /// A backup cannot be made there, or put back.
    #[error("backup {}: {why}", path.display())]
    Backup {
        /// The backup, or the file in it.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A signed statement could not be made or does not verify.
    #[error("signed statement: {why}")]
    Statement {
        /// What is wrong.
        why: String,
    },
    /// A record could not be written as JSON.
    #[error("a {what} could not be written as text")]
    Text {
        /// Which kind.
        what: &'static str,
        /// The answer.
        #[source]
        source: serde_json::Error,
    },
}

impl Error {
    pub(crate) fn sql(op: &'static str) -> impl FnOnce(rusqlite::Error) -> Self {
        move |source| Self::Sql { op, source }
    }

    pub(crate) fn io(
        op: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { op, path, source }
    }
}
