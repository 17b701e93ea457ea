//! The tables of the ledger. `open` and `decided` are beside the record only to find rows by; what
//! counts is the record, whose code covers it.

use rusqlite::types::ToSql;
use rusqlite::{OptionalExtension as _, Params};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::super::{PRUNED, PublicationKey, WorkspaceId};
use super::sql;
use crate::model::ids::{RequestKey, TaskId};
use crate::model::ledger::{KeyState, Publication, Which};
use crate::model::request::Request;
use crate::store::{Error as Fault, Tx};

const PUBLICATIONS: &str = "publications";
const REQUESTS: &str = "requests";

/// A row as this build writes it, or as the one did that kept nothing but the answer.
#[derive(Deserialize)]
#[serde(untagged)]
enum Stored {
    Row(Publication),
    Answer(KeyState),
}

/// A statement's rows: what their codes are over, their text, and their codes.
fn sealed(
    tx: &Tx<'_>,
    statement: &str,
    params: impl Params,
) -> Result<Vec<(String, String, Vec<u8>)>, Fault> {
    let mut statement = tx.conn.prepare_cached(statement).map_err(sql("read ledger"))?;
    let rows = statement.query_map(params, |r| r.try_into()).map_err(sql("read ledger"))?;
    rows.map(|row| row.map_err(sql("read ledger"))).collect()
}

fn opened<T: DeserializeOwned>(
    tx: &Tx<'_>,
    table: &'static str,
    (id, text, mac): &(String, String, Vec<u8>),
) -> Result<T, Fault> {
    tx.unseal(table, id, text, mac)
}

fn publication_of(tx: &Tx<'_>, found: &(String, String, Vec<u8>)) -> Result<Publication, Fault> {
    let bad =
        |why: &str| Fault::Record { table: PUBLICATIONS, id: found.0.clone(), why: why.to_owned() };
    match opened(tx, PUBLICATIONS, found)? {
        Stored::Row(row) => Ok(row),
        Stored::Answer(state) => {
            let (id, key) = found.0.split_once(' ').ok_or_else(|| bad("its id has two parts"))?;
            let id = id.parse().map_err(|_| bad("its workspace is none"))?;
            let key = key.parse().map_err(|_| bad("its key is none"))?;
            Ok(Publication { state, ..Publication::new(id, key, None, "") })
        }
    }
}

/// How many rows SQLite is asked for.
fn most(which: &Which) -> i64 {
    i64::try_from(which.limit).unwrap_or(i64::MAX)
}

fn of(which: &Which) -> Option<&str> {
    which.workspace.as_ref().map(WorkspaceId::as_str)
}

pub(super) fn publication(
    tx: &Tx<'_>,
    id: &WorkspaceId,
    key: PublicationKey,
) -> Result<Option<Publication>, Fault> {
    let found = tx
        .conn
        .prepare_cached(
            "SELECT workspace || ' ' || key, record, mac FROM publications
             WHERE workspace = ? AND key = ?",
        )
        .and_then(|mut s| s.query_row((id.as_str(), key.to_string()), |r| r.try_into()).optional())
        .map_err(sql("read publication"))?;
    found.map(|found| publication_of(tx, &found)).transpose()
}

pub(super) fn put_publication(tx: &Tx<'_>, row: &Publication) -> Result<(), Fault> {
    let (id, key) = (row.workspace.as_str(), row.key.to_string());
    let (text, mac) = tx.seal(PUBLICATIONS, &format!("{id} {key}"), row)?;
    let decided = row.changed_at.parse().map_or(0, jiff::Timestamp::as_millisecond);
    let values: [&dyn ToSql; 6] = [&id, &key, &text, &mac, &row.state.is_open(), &decided];
    tx.conn
        .prepare_cached(
            "INSERT INTO publications (workspace, key, record, mac, open, decided)
             VALUES (?, ?, ?, ?, ?, ?)
             ON CONFLICT (workspace, key) DO UPDATE SET record = excluded.record,
                 mac = excluded.mac, open = excluded.open, decided = excluded.decided",
        )
        .and_then(|mut s| s.execute(values))
        .map_err(sql("write publication"))?;
    Ok(())
}

pub(super) fn publications(tx: &Tx<'_>, which: &Which) -> Result<Vec<Publication>, Fault> {
    let statement = match which.open {
        true => {
            "SELECT workspace || ' ' || key, record, mac FROM publications
             WHERE open = 1 AND (?1 IS NULL OR workspace = ?1) ORDER BY key DESC LIMIT ?2"
        }
        false => {
            "SELECT workspace || ' ' || key, record, mac FROM publications
             WHERE ?1 IS NULL OR workspace = ?1 ORDER BY key DESC LIMIT ?2"
        }
    };
    let found = sealed(tx, statement, (of(which), most(which)))?;
    found.iter().map(|found| publication_of(tx, found)).collect()
}

pub(super) fn prune(
    tx: &Tx<'_>,
    id: &WorkspaceId,
    before_ms: u64,
) -> Result<(Option<PublicationKey>, usize), Fault> {
    let before = i64::try_from(before_ms).unwrap_or(i64::MAX);
    let end = PublicationKey::first_at(before_ms).to_string();
    let most = i64::try_from(PRUNED).unwrap_or(i64::MAX);
    let mut statement = tx
        .conn
        .prepare_cached(
            "SELECT key FROM publications WHERE workspace = ? AND key < ? AND open = 0
             AND decided < ? ORDER BY key LIMIT ?",
        )
        .map_err(sql("find old publications"))?;
    let keys = statement
        .query_map((id.as_str(), end, before, most), |r| r.get::<_, String>(0))
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(sql("find old publications"))?;
    for key in &keys {
        tx.conn
            .prepare_cached("DELETE FROM publications WHERE workspace = ? AND key = ?")
            .and_then(|mut s| s.execute((id.as_str(), key)))
            .map_err(sql("remove publication"))?;
    }
    let newest = keys.last().map(|key| {
        key.parse().map_err(|e: crate::model::ids::InvalidId| Fault::Record {
            table: PUBLICATIONS,
            id: key.clone(),
            why: e.to_string(),
        })
    });
    Ok((newest.transpose()?, keys.len()))
}

pub(super) fn request(
    tx: &Tx<'_>,
    id: &WorkspaceId,
    key: &RequestKey,
) -> Result<Option<Request>, Fault> {
    let found = sealed(
        tx,
        "SELECT workspace || ' ' || key, record, mac FROM requests WHERE workspace = ? AND key = ?",
        (id.as_str(), key.as_str()),
    )?;
    found.first().map(|found| opened(tx, REQUESTS, found)).transpose()
}

pub(super) fn requests_of(
    tx: &Tx<'_>,
    id: &WorkspaceId,
    task: &TaskId,
) -> Result<Vec<Request>, Fault> {
    let found = sealed(
        tx,
        "SELECT workspace || ' ' || key, record, mac FROM requests
         WHERE workspace = ? AND task = ? ORDER BY seq",
        (id.as_str(), task.as_str()),
    )?;
    found.iter().map(|found| opened(tx, REQUESTS, found)).collect()
}

pub(super) fn put_request(tx: &Tx<'_>, row: &Request) -> Result<(), Fault> {
    let (id, key) = (row.workspace.as_str(), row.key.as_str());
    let (text, mac) = tx.seal(REQUESTS, &format!("{id} {key}"), row)?;
    let values: [&dyn ToSql; 6] = [&id, &key, &row.task.as_str(), &row.is_open(), &text, &mac];
    tx.conn
        .prepare_cached(
            "INSERT INTO requests (workspace, key, task, open, record, mac)
             VALUES (?, ?, ?, ?, ?, ?)
             ON CONFLICT (workspace, key) DO UPDATE SET open = excluded.open,
                 record = excluded.record, mac = excluded.mac",
        )
        .and_then(|mut s| s.execute(values))
        .map_err(sql("write request"))?;
    Ok(())
}

pub(super) fn requests(tx: &Tx<'_>, which: &Which) -> Result<Vec<Request>, Fault> {
    let statement = match which.open {
        true => {
            "SELECT workspace || ' ' || key, record, mac FROM requests
             WHERE open = 1 AND (?1 IS NULL OR workspace = ?1) ORDER BY seq DESC LIMIT ?2"
        }
        false => {
            "SELECT workspace || ' ' || key, record, mac FROM requests
             WHERE ?1 IS NULL OR workspace = ?1 ORDER BY seq DESC LIMIT ?2"
        }
    };
    let found = sealed(tx, statement, (of(which), most(which)))?;
    found.iter().map(|found| opened(tx, REQUESTS, found)).collect()
}
