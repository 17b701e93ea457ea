//! The embedded authority: tables in the host's own database, so that an acquisition, the session
//! record and the evidence of it are one transaction.

use std::sync::Arc;

use rusqlite::OptionalExtension as _;

use super::verbs::{Backend, Rows};
use super::{
    Error, Happening, HistoryRow, Journal, KeyState, PublicationKey, Unreadable, Workspace,
    WorkspaceId,
};
use crate::model::time::BootInstant;
use crate::store::{Durability, Error as Fault, Store, Tx, unreadable};

/// See the module. Its clock is the store's.
#[derive(Clone, Debug)]
pub struct SqliteAuthority {
    store: Arc<Store>,
}

impl SqliteAuthority {
    /// The authority in `store`'s database.
    pub fn new(store: Arc<Store>) -> Self {
        Self { store }
    }
}

impl From<Fault> for Error {
    fn from(error: Fault) -> Self {
        let why = told(&error);
        match error {
            Fault::CommitLost { .. } => Self::Unknown { why },
            Fault::NotBelieved { .. }
            | Fault::Record { .. }
            | Fault::Key { .. }
            | Fault::Schema { .. }
            | Fault::Damaged { .. }
            | Fault::WitnessMissing { .. }
            | Fault::Statement { .. } => Self::NotBelieved { why },
            Fault::Io { .. }
            | Fault::Locked { .. }
            | Fault::Sql { .. }
            | Fault::RolledBack { .. }
            | Fault::Text { .. } => Self::Unavailable { why },
        }
    }
}

fn told(error: &dyn std::error::Error) -> String {
    match error.source() {
        None => error.to_string(),
        Some(source) => format!("{error}: {}", told(source)),
    }
}

impl Backend for SqliteAuthority {
    fn transact<R>(
        &self,
        durability: Durability,
        job: impl FnOnce(&mut dyn Rows) -> Result<R, Fault>,
    ) -> Result<R, Error> {
        Ok(self.store.transact(durability, |tx| job(&mut Table { tx }))?)
    }
}

struct Table<'a> {
    tx: &'a Tx<'a>,
}

const WORKSPACES: &str = "workspaces";
const PUBLICATIONS: &str = "publications";
const HISTORY: &str = "history";

fn sql(op: &'static str) -> impl FnOnce(rusqlite::Error) -> Fault {
    move |source| Fault::Sql { op, source }
}

impl Rows for Table<'_> {
    fn now(&self) -> BootInstant {
        self.tx.now
    }

    fn load(&mut self, id: &WorkspaceId) -> Result<Option<Workspace>, Fault> {
        let found: Option<(String, Vec<u8>)> = self
            .tx
            .conn
            .prepare_cached("SELECT record, mac FROM workspaces WHERE id = ?")
            .and_then(|mut s| s.query_row([id.as_str()], |r| r.try_into()).optional())
            .map_err(sql("read workspace"))?;
        let Some((text, mac)) = found else { return Ok(None) };
        Ok(Some(self.tx.unseal(WORKSPACES, id.as_str(), &text, &mac)?))
    }

    fn save(&mut self, workspace: &Workspace) -> Result<(), Fault> {
        let id = workspace.id.as_str();
        let (text, mac) = self.tx.seal(WORKSPACES, id, workspace)?;
        self.tx
            .conn
            .prepare_cached("INSERT OR REPLACE INTO workspaces (id, record, mac) VALUES (?, ?, ?)")
            .and_then(|mut s| s.execute((id, text, mac)))
            .map_err(sql("write workspace"))?;
        Ok(())
    }

    fn key(&mut self, id: &WorkspaceId, key: PublicationKey) -> Result<KeyState, Fault> {
        let found: Option<(String, Vec<u8>)> = self
            .tx
            .conn
            .prepare_cached("SELECT record, mac FROM publications WHERE workspace = ? AND key = ?")
            .and_then(|mut s| {
                s.query_row((id.as_str(), key.to_string()), |r| r.try_into()).optional()
            })
            .map_err(sql("read publication"))?;
        let Some((text, mac)) = found else { return Ok(KeyState::Unused) };
        self.tx.unseal(PUBLICATIONS, &format!("{id} {key}"), &text, &mac)
    }

    fn set_key(
        &mut self,
        id: &WorkspaceId,
        key: PublicationKey,
        state: &KeyState,
    ) -> Result<(), Fault> {
        let (text, mac) = self.tx.seal(PUBLICATIONS, &format!("{id} {key}"), state)?;
        self.tx
            .conn
            .prepare_cached(
                "INSERT INTO publications (workspace, key, record, mac) VALUES (?, ?, ?, ?)",
            )
            .and_then(|mut s| s.execute((id.as_str(), key.to_string(), text, mac)))
            .map_err(sql("write publication"))?;
        Ok(())
    }

    fn log(&mut self, id: &WorkspaceId, what: Happening) -> Result<(), Fault> {
        let row = HistoryRow { time: jiff::Timestamp::now().to_string(), what };
        let (text, mac) = self.tx.seal(HISTORY, id.as_str(), &row)?;
        self.tx
            .conn
            .prepare_cached(
                "INSERT INTO history (workspace, time, record, mac) VALUES (?, ?, ?, ?)",
            )
            .and_then(|mut s| s.execute((id.as_str(), &row.time, text, mac)))
            .map_err(sql("write history"))?;
        Ok(())
    }

    fn journal(&mut self, journal: &Journal) -> Result<(), Fault> {
        self.tx.journal(journal)
    }

    fn all(&mut self) -> Result<Vec<Result<Workspace, Unreadable>>, Fault> {
        let mut statement = self
            .tx
            .conn
            .prepare_cached("SELECT id, record, mac FROM workspaces ORDER BY id")
            .map_err(sql("read workspaces"))?;
        let rows = statement.query_map([], |r| r.try_into()).map_err(sql("read workspaces"))?;
        rows.map(|row| {
            let (id, text, mac): (String, String, Vec<u8>) = row.map_err(sql("read workspaces"))?;
            Ok(self.tx.unseal(WORKSPACES, &id, &text, &mac).map_err(|e| unreadable(id, e)))
        })
        .collect()
    }

    fn rows(&mut self, id: &WorkspaceId, limit: usize) -> Result<Vec<HistoryRow>, Fault> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let mut statement = self
            .tx
            .conn
            .prepare_cached(
                "SELECT record, mac FROM history WHERE workspace = ? ORDER BY seq DESC LIMIT ?",
            )
            .map_err(sql("read history"))?;
        let rows = statement
            .query_map((id.as_str(), limit), |r| r.try_into())
            .map_err(sql("read history"))?;
        rows.map(|row| {
            let (text, mac): (String, Vec<u8>) = row.map_err(sql("read history"))?;
            self.tx.unseal(HISTORY, id.as_str(), &text, &mac)
        })
        .collect()
    }
}
