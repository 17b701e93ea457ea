//! The evidence: numbered, timed, each entry holding the hash of the one before. Its head is
//! signed into the anchors file, so that cutting off its end, or making the chain anew from some
//! entry on, shows as long as one later anchor is left.
//!
//! The hash is SHA-256 over the entry's JSON text with sorted keys and without `hash`; the text is
//! stored as it was hashed.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rusqlite::{OptionalExtension as _, Row};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;

use super::db::Durability;
use super::error::Error;
use super::files;
use super::keys::{ANCHOR, PublicKey, TicketKey};
use super::records::Tx;
use super::store::Store;
use crate::failpoint;
use crate::model::head::Digest;
use crate::model::ids::SessionId;
use crate::model::journal::{Draft, Entry};

/// A signed statement: the chain had this head.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Anchor {
    /// Last entry then.
    pub seq: u64,
    /// Its hash.
    pub hash: Digest,
    /// When, RFC 3339.
    pub time: String,
}

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

fn now_text() -> String {
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

/// The anchors file.
pub(super) struct Anchors {
    path: PathBuf,
    public: PublicKey,
    state: Mutex<AnchorState>,
}

struct AnchorState {
    file: File,
    /// Length of the file up to the last whole line.
    whole: u64,
    /// Last entry an anchor of this run covers.
    covered: u64,
}

impl Anchors {
    pub(super) fn open(path: &Path, first_start: bool, public: &PublicKey) -> Result<Self, Error> {
        let there = path.try_exists().map_err(Error::io("look for", path))?;
        if !there && !first_start {
            return Err(Error::WitnessMissing { path: path.to_owned() });
        }
        files::touch_private(path)?;
        let file = OpenOptions::new().append(true).open(path).map_err(Error::io("open", path))?;
        let text = std::fs::read(path).map_err(Error::io("read", path))?;
        let whole = text.iter().rposition(|b| *b == b'\n').map_or(0, |i| i as u64 + 1);
        let state = Mutex::new(AnchorState { file, whole, covered: 0 });
        Ok(Self { path: path.to_owned(), public: public.clone(), state })
    }

    fn lock(&self) -> MutexGuard<'_, AnchorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last whole line of the file, unverified; none when there is no line.
    fn last_line(&self) -> Result<Option<String>, Error> {
        let whole = self.lock().whole;
        // A line is a signed statement of fixed parts, some 300 bytes long.
        let from = whole.saturating_sub(4096);
        let mut file = File::open(&self.path).map_err(Error::io("open", &self.path))?;
        let mut tail = Vec::new();
        file.seek(SeekFrom::Start(from))
            .and_then(|_| file.take(whole - from).read_to_end(&mut tail))
            .map_err(Error::io("read", &self.path))?;
        let last = tail.split(|b| *b == b'\n').rfind(|line| !line.is_empty());
        Ok(last.map(|line| String::from_utf8_lossy(line).into_owned()))
    }

    fn append(
        &self,
        key: &TicketKey,
        state: &mut AnchorState,
        (seq, hash): (u64, Digest),
    ) -> Result<(), Error> {
        let line = key.sign(&Anchor { seq, hash, time: now_text() }, ANCHOR)? + "\n";
        // What a crash or a full disk left of a line is cut off first.
        failpoint::fails("store.anchor.before")
            .map_err(std::io::Error::from)
            .and_then(|()| state.file.set_len(state.whole))
            .and_then(|()| state.file.write_all(line.as_bytes()))
            .and_then(|()| state.file.sync_data())
            .map_err(Error::io("write", &self.path))?;
        failpoint::hit("store.anchor.after");
        state.whole += line.len() as u64;
        state.covered = seq;
        Ok(())
    }

    /// All anchors, and the first whole line that is none.
    fn read(&self) -> Result<(Vec<Anchor>, Option<Fault>), Error> {
        let whole = self.lock().whole;
        let file = File::open(&self.path).map_err(Error::io("open", &self.path))?;
        let (mut anchors, mut fault): (Vec<Anchor>, _) = (Vec::new(), None);
        for (number, line) in BufReader::new(file.take(whole)).split(b'\n').enumerate() {
            let line = line.map_err(Error::io("read", &self.path))?;
            match self.public.verify(&String::from_utf8_lossy(&line), ANCHOR) {
                Ok(anchor) => anchors.push(anchor),
                Err(error) => {
                    let why = format!("{} line {}: {error}", self.path.display(), number + 1);
                    let seq = anchors.last().map_or(0, |a| a.seq);
                    fault.get_or_insert(Fault { seq, why });
                }
            }
        }
        Ok((anchors, fault))
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
    /// not the one it witnessed, and whatever was decided after its end is forgotten in it.
    ///
    /// # Errors
    /// The database or the anchors file does not answer.
    pub fn against_anchor(&self) -> Result<Option<String>, Error> {
        let Some(line) = self.anchors.last_line()? else { return Ok(None) };
        let path = self.anchors.path.display();
        let anchor: Anchor = match self.anchors.public.verify(&line, ANCHOR) {
            Ok(anchor) => anchor,
            Err(error) => return Ok(Some(format!("the newest anchor in {path}: {error}"))),
        };
        let Anchor { seq, hash, time } = anchor;
        let there = self.read(|tx| {
            tx.conn
                .prepare_cached("SELECT hash FROM evidence WHERE seq = ?")
                .and_then(|mut s| s.query_row([seq.cast_signed()], |r| r.get(0)).optional())
                .map_err(Error::sql("read evidence"))
        })?;
        let there: Option<String> = there;
        Ok(match there {
            Some(found) if found == hash.to_string() => None,
            Some(_) => Some(format!(
                "its database is not the one that was witnessed: evidence entry {seq} differs from the \
                 one anchored in {path} at {time}"
            )),
            None => Some(format!(
                "its database is older than what was witnessed: it ends before evidence entry {seq}, \
                 anchored in {path} at {time}"
            )),
        })
    }

    /// Recomputes the whole chain and compares it with every anchor.
    ///
    /// # Errors
    /// The database or the anchors file does not answer. What is wrong with the chain is in the
    /// report.
    pub fn verify_evidence(&self) -> Result<Report, Error> {
        let (mut anchors, bad_anchor) = self.anchors.read()?;
        let (count, newest_anchor) = (anchors.len() as u64, anchors.last().cloned());
        anchors.sort_by_key(|a| a.seq);
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
        Ok(Report { entries: check.seq, head, anchors: count, newest_anchor, fault })
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
