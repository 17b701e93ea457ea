//! The breaker's record: there while it is open, one row of `meta` with a code over it.

use super::db::Durability;
use super::error::Error;
use super::records::{Unreadable, unreadable};
use super::store::Store;
use crate::failpoint;
use crate::model::breaker::Tripped;
use crate::model::journal::Draft;

const KEY: &str = "breaker";

impl Store {
    /// Why the breaker is open, if it is.
    ///
    /// # Errors
    /// The database does not answer. Inside: the record is there and not believed.
    pub fn breaker(&self) -> Result<Result<Option<Tripped>, Unreadable>, Error> {
        self.read(|tx| {
            let Some(value) = tx.meta(KEY)? else { return Ok(Ok(None)) };
            let (mac, text) = value.split_once(' ').unwrap_or(("", &value));
            let mac = hex::decode(mac).unwrap_or_default();
            let record = tx.unseal("meta", KEY, text, &mac);
            Ok(record.map(Some).map_err(|e| unreadable(KEY.to_owned(), e)))
        })
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
                    Some(open) => {
                        let (text, mac) = tx.seal("meta", KEY, open)?;
                        tx.set_meta(KEY, &format!("{} {text}", hex::encode(mac)))?;
                    }
                    None => tx.remove_meta(KEY)?,
                }
                entry.map_or(Ok(()), |entry| tx.append(entry))
            })
        })?;
        failpoint::hit("store.breaker.after");
        Ok(())
    }
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
        store.set_breaker(None, None).unwrap();
        assert_eq!(store.breaker().unwrap(), Ok(None));
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
