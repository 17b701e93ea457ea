//! The embedded authority: tables in the host's own database, so that an acquisition, the session
//! record and the evidence of it are one transaction.

mod ledger;

use std::sync::Arc;

use rusqlite::OptionalExtension as _;

use super::verbs::{Backend, Rows};
use super::{
    Error, Happening, HistoryRow, Journal, PublicationKey, Unreadable, Workspace, WorkspaceId,
};
use crate::model::head::Digest;
use crate::model::ids::{RequestKey, TaskId};
use crate::model::ledger::{Publication, Which};
use crate::model::request::Request;
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
            | Fault::Backup { .. }
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

    fn read<R>(&self, job: impl FnOnce(&mut dyn Rows) -> Result<R, Fault>) -> Result<R, Error> {
        Ok(self.store.read(|tx| job(&mut Table { tx }))?)
    }
}

struct Table<'a> {
    tx: &'a Tx<'a>,
}

const WORKSPACES: &str = "workspaces";
const HISTORY: &str = "history";
const BURIED: &str = "buried";

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
            .prepare_cached(
                // In place: what is not changed, the index above all, is not written again.
                "INSERT INTO workspaces (id, record, mac) VALUES (?, ?, ?)
                 ON CONFLICT (id) DO UPDATE SET record = excluded.record, mac = excluded.mac",
            )
            .and_then(|mut s| s.execute((id, text, mac)))
            .map_err(sql("write workspace"))?;
        Ok(())
    }

    fn wall(&self) -> jiff::Timestamp {
        jiff::Timestamp::now()
    }

    fn publication(
        &mut self,
        id: &WorkspaceId,
        key: PublicationKey,
    ) -> Result<Option<Publication>, Fault> {
        ledger::publication(self.tx, id, key)
    }

    fn put_publication(&mut self, row: &Publication) -> Result<(), Fault> {
        ledger::put_publication(self.tx, row)
    }

    fn publications(&mut self, which: &Which) -> Result<Vec<Publication>, Fault> {
        ledger::publications(self.tx, which)
    }

    fn prune(
        &mut self,
        id: &WorkspaceId,
        before_ms: u64,
    ) -> Result<(Option<PublicationKey>, usize), Fault> {
        ledger::prune(self.tx, id, before_ms)
    }

    fn request(&mut self, id: &WorkspaceId, key: &RequestKey) -> Result<Option<Request>, Fault> {
        ledger::request(self.tx, id, key)
    }

    fn requests_of(&mut self, id: &WorkspaceId, task: &TaskId) -> Result<Vec<Request>, Fault> {
        ledger::requests_of(self.tx, id, task)
    }

    fn put_request(&mut self, row: &Request) -> Result<(), Fault> {
        ledger::put_request(self.tx, row)
    }

    fn requests(&mut self, which: &Which) -> Result<Vec<Request>, Fault> {
        ledger::requests(self.tx, which)
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

    fn is_buried(&mut self, layer: Digest) -> Result<bool, Fault> {
        // Whoever may edit the table may also remove layers: a row alone speaks against a name.
        self.tx
            .conn
            .prepare_cached("SELECT 1 FROM buried WHERE id = ?")
            .and_then(|mut s| s.exists([layer.to_string()]))
            .map_err(sql("read burials"))
    }

    fn buried(&mut self) -> Result<Vec<Digest>, Fault> {
        let mut statement = self
            .tx
            .conn
            .prepare_cached("SELECT id, record, mac FROM buried ORDER BY id")
            .map_err(sql("read burials"))?;
        let rows = statement.query_map([], |r| r.try_into()).map_err(sql("read burials"))?;
        rows.map(|row| {
            let (id, text, mac): (String, String, Vec<u8>) = row.map_err(sql("read burials"))?;
            self.tx.unseal(BURIED, &id, &text, &mac)
        })
        .collect()
    }

    fn set_buried(&mut self, layer: Digest, buried: bool) -> Result<(), Fault> {
        let id = layer.to_string();
        let written = match buried {
            true => {
                let (text, mac) = self.tx.seal(BURIED, &id, &layer)?;
                self.tx
                    .conn
                    .prepare_cached(
                        "INSERT OR REPLACE INTO buried (id, record, mac) VALUES (?, ?, ?)",
                    )
                    .and_then(|mut s| s.execute((&id, text, mac)))
            }
            false => self
                .tx
                .conn
                .prepare_cached("DELETE FROM buried WHERE id = ?")
                .and_then(|mut s| s.execute([&id])),
        };
        written.map(drop).map_err(sql("write burial"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authority::conformance::{Fixture, TestClock, run};
    use crate::authority::{
        Authority, Code, Digest, Generation, KeyState, LeaseId, Ledger as _, NewWorkspace, Publish,
        Refusal, Renewal, Seen, SessionId, Version, no_rider,
    };
    use crate::store::Paths;

    fn named(id: &str) -> NewWorkspace {
        NewWorkspace {
            id: id.parse().unwrap(),
            owner: "ann".parse().unwrap(),
            contact: String::new(),
            labels: Default::default(),
            layers: vec![],
        }
    }

    struct Embedded {
        store: Arc<Store>,
        authority: SqliteAuthority,
        clock: TestClock,
        dir: tempfile::TempDir,
    }

    fn embedded() -> Embedded {
        let (dir, clock) = (tempfile::tempdir().unwrap(), TestClock::default());
        let store = Arc::new(Store::open(&Paths::under(dir.path()), clock.clock()).unwrap());
        Embedded { authority: SqliteAuthority::new(Arc::clone(&store)), store, clock, dir }
    }

    impl Fixture for Embedded {
        fn authority(&self) -> &dyn Authority {
            &self.authority
        }
        fn clock(&self) -> &TestClock {
            &self.clock
        }
        fn written(&self) -> Vec<String> {
            let entries = self.store.evidence_since(0, 99).unwrap();
            entries.into_iter().map(|e| e.draft.kind).collect()
        }
    }

    #[test]
    fn sqlite_conforms() {
        run(&|| Box::new(embedded()));
    }

    /// What the build before the ledger left: an answer and nothing else beside each key.
    #[test]
    fn i7_keys_of_an_older_build_keep_their_answer() {
        use crate::model::head::{Digest, Head, HeadAt};
        use crate::model::ids::{LeaseId, SessionId, Version};
        use crate::model::workspace::Publish;

        let host = embedded();
        let paths = Paths::under(host.dir.path());
        let id: WorkspaceId = "w".parse().unwrap();
        let new = NewWorkspace {
            id: id.clone(),
            owner: "ann".parse().unwrap(),
            contact: String::new(),
            labels: Default::default(),
            layers: vec![],
        };
        host.authority.create(&new, no_rider()).unwrap().unwrap();
        let at = HeadAt { version: Version(1), head: Head(vec![Digest([1; 32])]) };
        let committed = KeyState::Committed { layer: Digest([1; 32]), at: at.clone() };
        let (one, two) = (PublicationKey::from_u128(1), PublicationKey::from_u128(2));
        host.store
            .transact(Durability::Full, |tx| {
                for (key, state) in [(one, &committed), (two, &KeyState::Buried)] {
                    let (text, mac) = tx.seal("publications", &format!("w {key}"), state)?;
                    let row = (key.to_string(), text, mac);
                    tx.conn
                        .execute(
                            "INSERT INTO publications (workspace, key, record, mac)
                             VALUES ('w', ?, ?, ?)",
                            row,
                        )
                        .map_err(sql("as it was"))?;
                }
                tx.conn
                    .execute_batch(
                        "DROP TABLE buried; DROP TABLE requests; DROP INDEX publications_open;
                         ALTER TABLE publications DROP COLUMN open;
                         ALTER TABLE publications DROP COLUMN decided;
                         PRAGMA user_version = 1;",
                    )
                    .map_err(sql("as it was"))
            })
            .unwrap();
        let Embedded { store, authority, clock, dir } = host;
        drop((authority, store));
        let store = Arc::new(Store::open(&paths, clock.clock()).unwrap());
        let authority = SqliteAuthority::new(Arc::clone(&store));
        assert_eq!(authority.resolve(&id, one, no_rider()).unwrap(), committed);
        assert_eq!(authority.resolve(&id, two, no_rider()).unwrap(), KeyState::Buried);
        let wish = Publish {
            workspace: id.clone(),
            lease: LeaseId::from_u128(1),
            generation: crate::model::ids::Generation(1),
            session: SessionId::from_u128(1),
            expected: HeadAt::default(),
            key: one,
            layer: Digest([1; 32]),
            whole: None,
            reverts_to: None,
        };
        assert_eq!(authority.publish(&wish, no_rider()).unwrap().unwrap(), at);
        let other = Publish { layer: Digest([2; 32]), ..wish };
        let refusal = authority.publish(&other, no_rider()).unwrap().unwrap_err();
        assert_eq!(refusal.code, crate::model::code::Code::KeyUsed);
        let open = Which { workspace: None, open: true, limit: 9 };
        assert_eq!(authority.publications(&open).unwrap(), []);
        // Their 90 days begin with the migration.
        let now = u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap();
        assert_eq!(authority.prune(now - 90 * 86_400_000).unwrap(), 0);
        assert_eq!(authority.prune(now + 60_000).unwrap(), 2);
        assert_eq!(authority.resolve(&id, one, no_rider()).unwrap(), KeyState::Forgotten);
        drop(dir);
    }

    #[test]
    fn an_altered_record_is_not_believed_and_the_others_are() {
        let host = embedded();
        for id in ["a", "b"] {
            host.authority.create(&named(id), no_rider()).unwrap().unwrap();
        }
        let other = rusqlite::Connection::open(host.dir.path().join("overfence.db")).unwrap();
        let altered = other
            .execute(
                "UPDATE workspaces SET record = replace(record, 'ann', 'eve') WHERE id='a'",
                [],
            )
            .unwrap();
        assert_eq!(altered, 1);
        let (a, b): (WorkspaceId, WorkspaceId) = ("a".parse().unwrap(), "b".parse().unwrap());
        let error = host.authority.get(&a).unwrap_err();
        assert!(
            matches!(&error, Error::NotBelieved { why } if why.contains("record a")),
            "{error}"
        );
        assert!(host.authority.get(&b).unwrap().is_some());
        assert_eq!(host.authority.list().unwrap().len(), 1);
        assert_eq!(host.authority.unreadable().unwrap()[0].id, "a");
        // It is on HOLD as it is: whatever rule is asked says so, with the reason.
        let why = "its record does not verify";
        let held = |refusal: Refusal| {
            assert_eq!(refusal.code, Code::WorkspaceHeld);
            assert!(refusal.to_string().contains(why), "{refusal}");
        };
        held(host.authority.create(&named("a"), no_rider()).unwrap().unwrap_err());
        held(host.authority.delete(&a, "x", no_rider()).unwrap().unwrap_err());
        let lease = LeaseId::from_u128(1);
        held(host.authority.releasing(&a, lease, Generation(1)).unwrap().unwrap_err());
        let renewal = Renewal { workspace: a.clone(), lease, generation: Generation(1) };
        held(host.authority.renew(&[renewal]).unwrap().remove(0).unwrap_err());
        host.authority.hold(&a, "x", no_rider()).unwrap();
        // A genuine record moved to another name is not believed either.
        other
            .execute_batch(
                "DELETE FROM workspaces WHERE id='a';
                 INSERT INTO workspaces SELECT 'a', record, mac FROM workspaces WHERE id='b'",
            )
            .unwrap();
        assert!(matches!(host.authority.get(&a), Err(Error::NotBelieved { .. })));
        // A repair makes it again from its history; one without such a history stays as it is.
        let seen = Seen { generation: Generation(7), version: Version(0) };
        let before = PublicationKey::fresh();
        let repaired = host.authority.repair(&a, &seen, "looked", no_rider()).unwrap().unwrap();
        // A key of before may have been pruned: whether it was went with the record.
        assert_eq!(repaired.without_row(before), KeyState::Forgotten);
        assert_eq!((repaired.owner.as_str(), repaired.generation), ("ann", Generation(7)));
        assert_eq!(host.authority.get(&a).unwrap(), Some(repaired));
        other
            .execute_batch("UPDATE workspaces SET mac = x'00'; UPDATE history SET mac = x'00'")
            .unwrap();
        held(host.authority.repair(&b, &seen, "looked", no_rider()).unwrap().unwrap_err());
    }

    #[test]
    fn a_publication_whose_key_does_not_verify_puts_its_workspace_on_hold() {
        let host = embedded();
        host.authority.create(&named("a"), no_rider()).unwrap().unwrap();
        let key = PublicationKey::from_u128(1);
        let id: WorkspaceId = "a".parse().unwrap();
        host.authority.resolve(&id, key, no_rider()).unwrap();
        let other = rusqlite::Connection::open(host.dir.path().join("overfence.db")).unwrap();
        other.execute_batch("UPDATE publications SET mac = x'00'").unwrap();
        let wish = Publish {
            workspace: id.clone(),
            lease: LeaseId::from_u128(1),
            generation: Generation(0),
            session: SessionId::from_u128(1),
            expected: Default::default(),
            key,
            layer: Digest([1; 32]),
            whole: None,
            reverts_to: None,
        };
        let refusal = host.authority.publish(&wish, no_rider()).unwrap().unwrap_err();
        assert_eq!(refusal.code, Code::WorkspaceHeld);
        let hold = host.authority.get(&id).unwrap().unwrap().hold.unwrap();
        assert!(hold.contains("does not verify"), "{hold}");
    }
}
