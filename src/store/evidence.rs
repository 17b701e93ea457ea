//! The evidence: numbered, timed, each entry holding the hash of the one before. Its head is
//! signed into the anchors file, so that cutting off its end, or making the chain anew from some
//! entry on, shows as long as one later anchor is left.
//!
//! The hash is SHA-256 over the entry's JSON text with sorted keys and without `hash`; the text is
//! stored as it was hashed.

use std::sync::atomic::Ordering;

use rusqlite::{OptionalExtension as _, Row};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;

use super::anchors::Lineage;
pub use super::anchors::{Anchor, Turn};
use super::db::Durability;
use super::error::Error;
use super::records::Tx;
use super::store::Store;
use crate::model::head::Digest;
use crate::model::ids::SessionId;
use crate::model::journal::{Draft, Entry};

/// Where the chain is broken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The first entry that is wrong or missing.
    pub seq: u64,
    /// What is wrong.
    pub why: String,
}

/// What a verification found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Entries that verified.
    pub entries: u64,
    /// Hash of the last of them.
    pub head: Option<Digest>,
    /// Anchors whose signature fits.
    pub anchors: u64,
    /// The newest of them.
    pub newest_anchor: Option<Anchor>,
    /// The anchors of the restores that the chain went through, oldest first: the entry of each is
    /// its record, and what is before it came from a backup.
    pub restores: Vec<Anchor>,
    /// Anchors that speak of entries which a restore replaced.
    pub set_aside: u64,
    /// The first thing that is wrong.
    pub fault: Option<Fault>,
}

/// The hash an entry must have.
///
/// # Errors
/// The entry cannot be written as JSON.
pub fn hash_of(entry: &Entry) -> Result<Digest, Error> {
    Ok(digest(&body_of(entry)?))
}

fn body_of(entry: &Entry) -> Result<String, Error> {
    let text = |source| Error::Text { what: "evidence entry", source };
    let mut value = serde_json::to_value(entry).map_err(text)?;
    if let Some(map) = value.as_object_mut() {
        map.remove("hash");
    }
    value.sort_all_objects();
    serde_json::to_string(&value).map_err(text)
}

fn digest(body: &str) -> Digest {
    Digest(Sha256::digest(body.as_bytes()).into())
}

const FIRST: (u64, Digest) = (0, Digest([0; 32]));

pub(super) fn now_text() -> String {
    jiff::Timestamp::now().to_string()
}

/// A row as stored: number, text, hash.
type Stored = (u64, String, String);

fn stored(row: &Row<'_>) -> rusqlite::Result<Stored> {
    Ok((row.get::<_, i64>(0)?.cast_unsigned(), row.get(1)?, row.get(2)?))
}

fn entry_of((seq, body, hash): &Stored) -> Result<Entry, Error> {
    let bad = |why: String| Error::Record { table: "evidence", id: seq.to_string(), why };
    let mut value: serde_json::Value =
        serde_json::from_str(body).map_err(|e| bad(e.to_string()))?;
    if let Some(map) = value.as_object_mut() {
        map.insert("hash".to_owned(), serde_json::Value::String(hash.clone()));
    }
    serde_json::from_value(value).map_err(|e| bad(e.to_string()))
}

impl Tx<'_> {
    /// Number and hash of the last entry.
    pub(super) fn evidence_head(&self) -> Result<(u64, Digest), Error> {
        let last = self
            .conn
            .prepare_cached("SELECT seq, body, hash FROM evidence ORDER BY seq DESC LIMIT 1")
            .and_then(|mut s| s.query_row([], stored).optional())
            .map_err(Error::sql("read evidence"))?;
        let Some((seq, _, hash)) = last else { return Ok(FIRST) };
        let hash = hash.parse().map_err(|e: crate::model::ids::InvalidId| Error::Record {
            table: "evidence",
            id: seq.to_string(),
            why: e.to_string(),
        })?;
        Ok((seq, hash))
    }

    /// The hash of an entry, as it stands there.
    pub(super) fn hash_at(&self, seq: u64) -> Result<Option<String>, Error> {
        self.conn
            .prepare_cached("SELECT hash FROM evidence WHERE seq = ?")
            .and_then(|mut s| s.query_row([seq.cast_signed()], |r| r.get(0)).optional())
            .map_err(Error::sql("read evidence"))
    }

    /// Appends an entry. The head is read from the table, so that an append that is undone leaves
    /// no trace in memory either.
    pub(super) fn append(&self, draft: &Draft) -> Result<(), Error> {
        let (last, prev) = self.evidence_head()?;
        let seq = last + 1;
        let (time, boot_ns) = (now_text(), self.now.ns);
        let entry = Entry { seq, time, boot_ns, draft: draft.clone(), prev, hash: Digest([0; 32]) };
        let body = body_of(&entry)?;
        let hash = digest(&body).to_string();
        let session = draft.session.map(|s| s.to_string());
        let workspace = draft.workspace.as_ref().map(|w| w.as_str());
        self.conn
            .prepare_cached(
                "INSERT INTO evidence (seq, session, workspace, body, hash) VALUES (?, ?, ?, ?, ?)",
            )
            .and_then(|mut s| s.execute((seq.cast_signed(), session, workspace, body, hash)))
            .map_err(Error::sql("append evidence"))?;
        self.appended.set(seq);
        Ok(())
    }

    fn entries(
        &self,
        sql: &str,
        by: &dyn rusqlite::ToSql,
        limit: usize,
    ) -> Result<Vec<Entry>, Error> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let mut statement = self.conn.prepare_cached(sql).map_err(Error::sql("read evidence"))?;
        let rows = statement
            .query_map(rusqlite::params![by, limit], stored)
            .map_err(Error::sql("read evidence"))?;
        rows.map(|row| entry_of(&row.map_err(Error::sql("read evidence"))?)).collect()
    }
}

/// Recomputes a chain, entry by entry.
struct Check {
    seq: u64,
    hash: Digest,
    /// Anchors still to be met, lowest first.
    anchors: std::iter::Peekable<std::vec::IntoIter<Anchor>>,
}

impl Check {
    fn next(&mut self, (seq, body, hash): &Stored) -> Result<(), Fault> {
        let want = self.seq + 1;
        let fault = |why: &str| Err(Fault { seq: want, why: why.to_owned() });
        if *seq != want {
            return fault("the entry is missing");
        }
        let computed = digest(body);
        if computed.to_string() != *hash {
            return fault("its text was altered: the hash does not fit");
        }
        let Ok(entry) = entry_of(&(*seq, body.clone(), hash.clone())) else {
            return fault("its text is no entry");
        };
        if entry.seq != want {
            return fault("its text has another number");
        }
        if entry.prev != self.hash {
            return fault("it does not follow the entry before");
        }
        (self.seq, self.hash) = (want, computed);
        while let Some(anchor) = self.anchors.next_if(|a| a.seq == want) {
            if anchor.hash != computed {
                return fault("an anchor has another hash: the chain was made anew");
            }
        }
        Ok(())
    }
}

impl Store {
    /// Entries after `seq`, oldest first.
    ///
    /// # Errors
    /// The database does not answer, or an entry cannot be read.
    pub fn evidence_since(&self, seq: u64, limit: usize) -> Result<Vec<Entry>, Error> {
        let sql = "SELECT seq, body, hash FROM evidence WHERE seq > ? ORDER BY seq LIMIT ?";
        self.read(|tx| tx.entries(sql, &seq.cast_signed(), limit))
    }

    /// All entries of a session, oldest first.
    ///
    /// # Errors
    /// The database does not answer, or an entry cannot be read.
    pub fn evidence_of(&self, session: SessionId) -> Result<Vec<Entry>, Error> {
        let sql = "SELECT seq, body, hash FROM evidence WHERE session = ? ORDER BY seq LIMIT ?";
        self.read(|tx| tx.entries(sql, &session.to_string(), usize::MAX))
    }

    /// The number of the last committed entry, as it grows.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.head.subscribe()
    }

    /// Makes the chain's present head durable, signed, in the anchors file. Calls that come
    /// together share one write.
    ///
    /// # Errors
    /// The anchor is not durable: an irreversible effect must wait.
    pub fn anchor(&self) -> Result<(), Error> {
        self.reserve().making_room(|| self.anchor_once())
    }

    fn anchor_once(&self) -> Result<(), Error> {
        let want = *self.head.borrow();
        let mut state = self.anchors.lock();
        if state.covered >= want {
            return Ok(());
        }
        let head = self.read(|tx| tx.evidence_head())?;
        // An anchor must not outlive the entry it names, or a power loss would look like a cut.
        if head.0 > self.durable.load(Ordering::SeqCst) {
            let text = head.0.to_string();
            self.once(Durability::Full, |tx| tx.set_meta("anchored", &text))?;
            self.durable.fetch_max(head.0, Ordering::SeqCst);
        }
        self.anchors.append(&self.keys().ticket, &mut state, head)
    }

    /// What the newest anchor has against the chain as it is now: that it ends before the anchored
    /// entry, or has another one there. Such a database is older than what this host witnessed, or
    /// not the one it witnessed, and whatever was decided after its end is forgotten in it. A restore
    /// says of itself what it forgot.
    ///
    /// # Errors
    /// The database or the anchors file does not answer.
    pub fn against_anchor(&self) -> Result<Option<String>, Error> {
        self.read(|tx| self.anchors.against(tx))
    }

    /// Recomputes the whole chain and compares it with every anchor that speaks of it: those of a
    /// chain which a restore replaced are counted, and set aside.
    ///
    /// # Errors
    /// The database or the anchors file does not answer. What is wrong with the chain is in the
    /// report.
    pub fn verify_evidence(&self) -> Result<Report, Error> {
        let (all, bad_anchor) = self.anchors.read()?;
        let (count, newest_anchor) = (all.len() as u64, all.last().cloned());
        let Lineage { anchors, restores, set_aside } = self.read(|tx| {
            let has = |a: &Anchor| Ok(tx.hash_at(a.seq)? == Some(a.hash.to_string()));
            Lineage::of(all, has)
        })?;
        let mut check = Check { seq: 0, hash: FIRST.1, anchors: anchors.into_iter().peekable() };
        let mut fault = None;
        // In pages, so that writers get in between.
        while fault.is_none() {
            let page = self.page(check.seq)?;
            if page.is_empty() {
                break;
            }
            fault = page.iter().find_map(|row| check.next(row).err());
        }
        if fault.is_none()
            && let Some(anchor) = check.anchors.next()
        {
            let why = format!("the chain ends before entry {}, which is anchored", anchor.seq);
            fault = Some(Fault { seq: check.seq + 1, why });
        }
        let head = (check.seq > 0).then_some(check.hash);
        let fault = fault.or(bad_anchor);
        let entries = check.seq;
        Ok(Report { entries, head, anchors: count, newest_anchor, restores, set_aside, fault })
    }

    fn page(&self, after: u64) -> Result<Vec<Stored>, Error> {
        self.read(|tx| {
            let mut statement = tx
                .conn
                .prepare_cached(
                    "SELECT seq, body, hash FROM evidence WHERE seq > ? ORDER BY seq LIMIT 500",
                )
                .map_err(Error::sql("read evidence"))?;
            let rows = statement
                .query_map([after.cast_signed()], stored)
                .map_err(Error::sql("read evidence"))?;
            rows.collect::<Result<_, _>>().map_err(Error::sql("read evidence"))
        })
    }
}
