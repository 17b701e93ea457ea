//! The breaker's record: there while it is open, one row of `meta` with a code over it.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::db::Durability;
use super::error::Error;
use super::records::Tx;
use super::records::{Unreadable, unreadable};
use super::store::Store;
use crate::failpoint;
use crate::model::breaker::Tripped;
use crate::model::journal::Draft;
use crate::model::time::BootInstant;

const KEY: &str = "breaker";
/// When it was closed last.
const CLOSED: &str = "breaker-closed";

impl Store {
    /// Why the breaker is open, if it is.
    ///
    /// # Errors
    /// The database does not answer. Inside: the record is there and not believed.
    pub fn breaker(&self) -> Result<Result<Option<Tripped>, Unreadable>, Error> {
        self.read(|tx| Ok(sealed(tx, KEY)?.map_err(|e| unreadable(KEY.to_owned(), e))))
    }

    /// When it was closed last, by a person or by the authority's answers. A record that is not believed
    /// says nothing.
    ///
    /// # Errors
    /// The database does not answer.
    pub fn breaker_closed(&self) -> Result<Option<BootInstant>, Error> {
        self.read(|tx| Ok(sealed(tx, CLOSED)?.unwrap_or(None)))
    }

    /// Writes why the breaker is open, or that it is closed, with the evidence of it if that is
    /// news.
    ///
    /// # Errors
    /// See [`Store::record`].
    pub fn set_breaker(&self, open: Option<&Tripped>, entry: Option<&Draft>) -> Result<(), Error> {
        failpoint::hit("store.breaker.before");
        self.reserve().making_room(|| {
            self.once(Durability::Full, |tx| {
                match open {
                    Some(open) => seal(tx, KEY, open)?,
                    None => {
                        tx.remove_meta(KEY)?;
                        seal(tx, CLOSED, &tx.now)?;
                    }
                }
                entry.map_or(Ok(()), |entry| tx.append(entry))
            })
        })?;
        failpoint::hit("store.breaker.after");
        Ok(())
    }
}

fn seal(tx: &Tx<'_>, key: &str, record: &impl Serialize) -> Result<(), Error> {
    let (text, mac) = tx.seal("meta", key, record)?;
    tx.set_meta(key, &format!("{} {text}", hex::encode(mac)))
}

/// Inside: it is there and not believed.
fn sealed<T: DeserializeOwned>(tx: &Tx<'_>, key: &str) -> Result<Result<Option<T>, Error>, Error> {
    let Some(value) = tx.meta(key)? else { return Ok(Ok(None)) };
    let (mac, text) = value.split_once(' ').unwrap_or(("", &value));
    let mac = hex::decode(mac).unwrap_or_default();
    Ok(tx.unseal("meta", key, text, &mac).map(Some))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use super::*;
    use crate::model::ids::{BootId, SessionId};
    use crate::model::time::{BootInstant, BootNs};
    use crate::store::Paths;

    #[test]
    fn it_outlives_the_agent_and_an_edited_one_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths::under(&dir.path().join("state"));
        let now = BootInstant { boot: BootId(uuid::Uuid::from_u128(1)), ns: BootNs(1) };
        let open = || Store::open(&paths, Arc::new(move || now)).unwrap();
        let tripped = Tripped {
            since: "then".into(),
            lost: 10,
            of: 11,
            doubt_alone: true,
            waiting: BTreeSet::from([SessionId::from_u128(3)]),
            why: "why".into(),
        };
        let store = open();
        assert_eq!(store.breaker().unwrap(), Ok(None));
        store.set_breaker(Some(&tripped), None).unwrap();
        drop(store);
        let store = open();
        assert_eq!(store.breaker().unwrap(), Ok(Some(tripped.clone())));
        assert_eq!(store.breaker_closed().unwrap(), None);
        store.set_breaker(None, None).unwrap();
        assert_eq!(store.breaker().unwrap(), Ok(None));
        assert_eq!(store.breaker_closed().unwrap(), Some(now));
        store.set_breaker(Some(&tripped), None).unwrap();
        drop(store);
        // Whoever edits it to close by itself does not get so far.
        let db = rusqlite::Connection::open(dir.path().join("state/overfence.db")).unwrap();
        let edit = "UPDATE meta SET value = replace(value, ':10', ':12') WHERE key = 'breaker'";
        assert_eq!(db.execute(edit, []).unwrap(), 1);
        drop(db);
        let why = open().breaker().unwrap().unwrap_err();
        assert!(why.to_string().contains("is not believed"), "{why}");
    }
}
