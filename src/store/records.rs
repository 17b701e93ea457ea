//! Records: JSON text with a code over it, read and written inside one transaction.

use std::cell::Cell;

use rusqlite::{Connection, OptionalExtension as _};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::Error;
use super::keys::RecordKey;
use crate::model::journal::Journal;
use crate::model::session::Session;
use crate::model::time::BootInstant;

/// A record that is there but not believed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("record {id} is not believed: {why}")]
pub struct Unreadable {
    /// Its id as the table has it.
    pub id: String,
    /// What is wrong.
    pub why: String,
}

/// One transaction of the store.
pub struct Tx<'a> {
    /// For statements of the caller's own tables.
    pub conn: &'a Connection,
    /// When it began.
    pub now: BootInstant,
    pub(super) key: &'a RecordKey,
    pub(super) appended: Cell<u64>,
}

impl Tx<'_> {
    /// A record as text and its code.
    pub fn seal(
        &self,
        table: &'static str,
        id: &str,
        record: &impl Serialize,
    ) -> Result<(String, [u8; 32]), Error> {
        let text = serde_json::to_string(record)
            .map_err(|source| Error::Text { what: "record", source })?;
        let mac = self.key.seal(table, id, &text);
        Ok((text, mac))
    }

    /// The record a text holds, if its code fits.
    ///
    /// # Errors
    /// [`Error::Record`].
    pub fn unseal<T: DeserializeOwned>(
        &self,
        table: &'static str,
        id: &str,
        text: &str,
        mac: &[u8],
    ) -> Result<T, Error> {
        let bad = |why: String| Error::Record { table, id: id.to_owned(), why };
        if !self.key.fits(table, id, text, mac) {
            return Err(bad("its code does not fit its text".to_owned()));
        }
        serde_json::from_str(text).map_err(|e| bad(e.to_string()))
    }

    /// Writes the records and the evidence of one decision.
    pub fn journal(&self, journal: &Journal) -> Result<(), Error> {
        for session in &journal.sessions {
            self.put_session(session)?;
        }
        for draft in &journal.entries {
            self.append(draft)?;
        }
        Ok(())
    }

    fn put_session(&self, session: &Session) -> Result<(), Error> {
        let id = session.id.to_string();
        let (text, mac) = self.seal("sessions", &id, session)?;
        self.conn
            .prepare_cached(
                "INSERT INTO sessions (id, record, mac) VALUES (?, ?, ?)
                 ON CONFLICT (id) DO UPDATE SET record = excluded.record, mac = excluded.mac",
            )
            .and_then(|mut s| s.execute((&id, &text, &mac)))
            .map_err(Error::sql("write session"))?;
        Ok(())
    }

    pub(super) fn sessions(&self) -> Result<Vec<Result<Session, Unreadable>>, Error> {
        let mut statement = self
            .conn
            .prepare_cached("SELECT id, record, mac FROM sessions ORDER BY id")
            .map_err(Error::sql("read sessions"))?;
        let rows = statement
            .query_map([], |r| Ok((r.get::<_, String>(0)?, r.get::<_, String>(1)?, r.get(2)?)))
            .map_err(Error::sql("read sessions"))?;
        rows.map(|row| {
            let (id, text, mac): (_, _, Vec<u8>) = row.map_err(Error::sql("read sessions"))?;
            Ok(self.unseal("sessions", &id, &text, &mac).map_err(|e| unreadable(id, e)))
        })
        .collect()
    }

    pub(super) fn meta(&self, key: &str) -> Result<Option<String>, Error> {
        self.conn
            .query_row("SELECT value FROM meta WHERE key = ?", [key], |r| r.get(0))
            .optional()
            .map_err(Error::sql("read meta"))
    }

    pub(super) fn remove_meta(&self, key: &str) -> Result<(), Error> {
        self.conn
            .execute("DELETE FROM meta WHERE key = ?", [key])
            .map_err(Error::sql("write meta"))?;
        Ok(())
    }

    pub(super) fn set_meta(&self, key: &str, value: &str) -> Result<(), Error> {
        self.conn
            .execute("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", (key, value))
            .map_err(Error::sql("write meta"))?;
        Ok(())
    }
}

/// What a record that failed to open is called.
pub fn unreadable(id: String, error: Error) -> Unreadable {
    let why = match error {
        Error::Record { why, .. } => why,
        other => other.to_string(),
    };
    Unreadable { id, why }
}
