//! A copy of the database that can be put back, and how it takes its place.
//!
//! ```text
//! <backup>/
//! ├── overfence.db      one moment of the running database, in one file without a log beside it
//! └── keys/             record.key and ticket.key, only if that was asked for
//!
//! <state>/
//! ├── overfence.db.new        being copied from a backup; rubbish after a crash
//! ├── overfence.db.restored   whole and durable, with the record of the restore and the line for the
//! │                           anchors: the next start puts both in their place
//! └── replaced-<time>/        the database that was there
//! ```
//!
//! High-water marks and anchors are in no backup: they are what notices that an old one came back.

use std::cell::Cell;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags, OptionalExtension as _};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::anchors::{self, Anchors};
use super::error::Error;
use super::files;
use super::keys::Keys;
use super::marks::Marks;
use super::records::Tx;
use super::schema;
use super::store::{Paths, Store, take_lock};
use crate::failpoint;
use crate::model::head::{Digest, HeadAt};
use crate::model::ids::WorkspaceId;
use crate::model::journal::Draft;
use crate::model::time::BootInstant;
use crate::model::workspace::{KEPT, Workspace};

const DATABASE: &str = "overfence.db";
const NEW: &str = "overfence.db.new";
const RESTORED: &str = "overfence.db.restored";
/// In the table `meta` of a restored database: the line for the anchors that its restore made.
const TURN: &str = "turn";
const KEYS: [&str; 2] = ["record.key", "ticket.key"];

/// What a copy of the database is, as it is read out of the copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copied {
    /// Of which host's store.
    pub host: String,
    /// Last entry of the evidence chain in it.
    pub entries: u64,
    /// Digest of the file.
    pub database: Digest,
    /// The key of its records.
    pub record_key: String,
    /// The key of its statements.
    pub ticket_key: String,
    /// Whether both keys are beside it.
    pub keys: bool,
    /// The layers of its heads, and of the versions that a head can be set back to.
    pub layers: Vec<Digest>,
}

fn bad(path: &Path, why: impl Into<String>) -> Error {
    Error::Backup { path: path.to_owned(), why: why.into() }
}

impl Store {
    /// Copies the database as it is at one moment, and both keys if `with_keys`, into a directory.
    /// Writers go on meanwhile. What it gives was read back from the disk.
    ///
    /// # Errors
    /// Something could not be written, or came back as something else.
    pub fn copy_into(&self, dir: &Path, with_keys: bool) -> Result<Copied, Error> {
        let copy = dir.join(DATABASE);
        files::touch_private(&copy)?;
        let from = read_only(&self.paths().state.join(DATABASE))?;
        failpoint::fails("store.copy.before")
            .map_err(|errno| Error::io("copy", &copy)(errno.into()))?;
        // In one read transaction, so it is one moment; and without what was deleted.
        let target = copy.to_str().ok_or_else(|| bad(&copy, "SQLite takes no such name"))?;
        from.execute("VACUUM INTO ?", [target]).map_err(Error::sql("copy"))?;
        settle(&copy)?;
        if with_keys {
            let keys = dir.join("keys");
            files::make_dir(&keys)?;
            for name in KEYS {
                let from = self.paths().keys.join(name);
                let text = std::fs::read(&from).map_err(Error::io("read", &from))?;
                files::replace(&keys.join(name), &text, 0o600)?;
            }
        }
        failpoint::hit("store.copy.after");
        let found = Copied::read(dir)?;
        let own = [self.keys().record.id(), self.keys().ticket.id()];
        match [found.record_key.as_str(), found.ticket_key.as_str()] == own {
            true => Ok(found),
            false => Err(bad(&copy, "it came back with other keys")),
        }
    }
}

fn read_only(path: &Path) -> Result<Connection, Error> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(path, flags).map_err(Error::sql("open"))?;
    conn.busy_timeout(std::time::Duration::from_secs(5)).map_err(Error::sql("busy_timeout"))?;
    Ok(conn)
}

/// Makes a file durable, and has the kernel forget it, so that who reads it asks the disk.
fn settle(path: &Path) -> Result<(), Error> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    file.sync_all().map_err(Error::io("fsync", path))?;
    // Some file systems cannot forget.
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    Ok(())
}

fn digest_of(path: &Path) -> Result<Digest, Error> {
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 16]);
    loop {
        match file.read(&mut buffer).map_err(Error::io("read", path))? {
            0 => return Ok(Digest(hash.finalize().into())),
            n => hash.update(&buffer[..n]),
        }
    }
}

impl Copied {
    /// Reads the copy in a directory: SQLite's own check, its schema, its keys.
    ///
    /// # Errors
    /// It is damaged, of a newer overfence, or not there.
    pub fn read(dir: &Path) -> Result<Self, Error> {
        let path = dir.join(DATABASE);
        let database = digest_of(&path)?;
        let conn = read_only(&path)?;
        let damaged = |e: rusqlite::Error| bad(&path, format!("it is damaged: {e}"));
        let sound: String =
            conn.query_row("PRAGMA integrity_check", [], |r| r.get(0)).map_err(damaged)?;
        if sound != "ok" {
            return Err(bad(&path, format!("it is damaged: {sound}")));
        }
        schema::check(&conn, &path)?;
        let meta = |name: &str| {
            let found: Option<String> = conn
                .query_row("SELECT value FROM meta WHERE key = ?", [name], |r| r.get(0))
                .optional()
                .map_err(damaged)?;
            found.ok_or_else(|| bad(&path, format!("it does not say its {name}")))
        };
        let entries = conn
            .query_row("SELECT coalesce(max(seq), 0) FROM evidence", [], |r| r.get::<_, i64>(0))
            .map_err(damaged)?;
        let (record_key, ticket_key) = (meta("record_key")?, meta("ticket_key")?);
        let keys = dir.join("keys");
        let with_keys = keys.try_exists().map_err(Error::io("look for", &keys))?;
        let copied = Self {
            host: meta("host")?,
            entries: entries.cast_unsigned(),
            database,
            record_key,
            ticket_key,
            keys: with_keys,
            layers: layers(&conn).map_err(damaged)?,
        };
        if with_keys {
            copied.fits(&keys, &Keys::open(&keys, false)?)?;
        }
        Ok(copied)
    }

    /// Whether these are the keys its records were made with.
    fn fits(&self, dir: &Path, keys: &Keys) -> Result<(), Error> {
        for (file, found, wanted) in [
            ("record.key", keys.record.id(), &self.record_key),
            ("ticket.key", keys.ticket.id(), &self.ticket_key),
        ] {
            if found != wanted {
                return Err(bad(
                    &dir.join(file),
                    format!("it is {found}, the backup's is {wanted}"),
                ));
            }
        }
        Ok(())
    }
}

/// Every workspace of a copy that can be read. Whether its code fits is for the agent to say.
fn workspaces(conn: &Connection) -> rusqlite::Result<Vec<(WorkspaceId, Option<Workspace>)>> {
    let mut all = conn.prepare("SELECT id, record FROM workspaces ORDER BY id")?;
    let rows = all.query_map([], |r| Ok((r.get::<_, String>(0)?, r.get::<_, String>(1)?)))?;
    let mut found = Vec::new();
    for row in rows {
        let (id, text) = row?;
        if let Ok(id) = id.parse() {
            found.push((id, serde_json::from_str(&text).ok()));
        }
    }
    Ok(found)
}

/// The layers of heads and of the kept versions.
fn layers(conn: &Connection) -> rusqlite::Result<Vec<Digest>> {
    /// Of a row of the history, the version and head it gave, if it gave one.
    #[derive(Deserialize)]
    struct Gave {
        at: Option<HeadAt>,
    }
    let mut named = std::collections::BTreeSet::new();
    let mut history =
        conn.prepare("SELECT record FROM history WHERE workspace = ? ORDER BY seq DESC")?;
    for (id, known) in workspaces(conn)? {
        let Some(known) = known.filter(|w| !w.deleted) else { continue };
        named.extend(known.at.head.0);
        let mut versions = std::collections::BTreeSet::new();
        let rows = history.query_map([id.as_str()], |r| r.get::<_, String>(0))?;
        for row in rows {
            let Ok(Gave { at: Some(at) }) = serde_json::from_str(&row?) else { continue };
            versions.insert(at.version);
            if versions.len() > KEPT {
                break;
            }
            named.extend(at.head.0);
        }
    }
    Ok(named.into_iter().collect())
}

/// A state directory without an agent, and none comes as long as this lives.
pub struct Vacant<'a> {
    paths: &'a Paths,
    _lock: File,
}

impl<'a> Vacant<'a> {
    /// Takes the directory, which it makes if it is missing.
    ///
    /// # Errors
    /// An agent runs on it.
    pub fn take(paths: &'a Paths) -> Result<Self, Error> {
        files::make_dir(&paths.state)?;
        let lock = take_lock(&paths.state.join("lock"))?;
        // An earlier restore comes to its end first.
        finish(paths)?;
        Ok(Self { paths, _lock: lock })
    }

    /// Puts a copy that was read in the place of the database, which is kept beside it, and `told` at
    /// the end of its evidence. Marks, anchors and keys that are there stay as they are: no generation
    /// goes down, since the next start compares. The anchors get one line more, from which on they speak
    /// of this chain, and say so if the database that is there knew more. Where marks or anchors are
    /// missing every workspace is put on HOLD in new ones.
    ///
    /// Nothing is changed for good before the one rename that decides; a crash after it is finished by
    /// whoever comes next.
    ///
    /// # Errors
    /// A key is missing or another's, or something could not be written: the database is as it was.
    pub fn restore(
        self,
        from: &Path,
        copied: &Copied,
        told: &Draft,
        now: BootInstant,
    ) -> Result<Restored, Error> {
        let there = |path: &Path| path.try_exists().map_err(Error::io("look for", path));
        let blind = !there(&self.paths.high_water)? || !there(&self.paths.anchors)?;
        let keys = self.keys(from, copied)?;
        let held = if blind { self.hold_all(from)? } else { 0 };
        let (new, ready) = (self.paths.state.join(NEW), self.paths.state.join(RESTORED));
        std::fs::copy(from.join(DATABASE), &new).map_err(Error::io("copy to", &new))?;
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&new, private).map_err(Error::io("chmod", &new))?;
        settle(&new)?;
        let found = digest_of(&new)?;
        if found != copied.database {
            return Err(bad(&new, format!("it came back as {found}, not {}", copied.database)));
        }
        failpoint::hit("store.restore_record.before");
        self.tell(&new, &keys, told, (copied.entries, now))?;
        settle(&new)?;
        failpoint::hit("store.restore_record.after");
        failpoint::hit("store.restore.before");
        std::fs::rename(&new, &ready).map_err(Error::io("rename to", &ready))?;
        files::sync_parent(&ready)?;
        failpoint::hit("store.restore.after");
        Ok(Restored { replaced: finish(self.paths)?, held })
    }

    /// Writes who puts the copy back into the copy, with the line for the anchors: they are there with
    /// it or not at all.
    fn tell(
        &self,
        copy: &Path,
        keys: &Keys,
        told: &Draft,
        (entries, now): (u64, BootInstant),
    ) -> Result<(), Error> {
        let anchors = Anchors::open(&self.paths.anchors, false, keys.ticket.public())?;
        let mut conn = Connection::open(copy).map_err(Error::sql("open"))?;
        // What a crash leaves of it is rubbish: no log may lie beside the next one.
        conn.pragma_update(None, "journal_mode", "MEMORY").map_err(Error::sql("pragma"))?;
        let whole = conn.transaction().map_err(Error::sql("begin"))?;
        let tx = Tx { conn: &whole, now, key: &keys.record, appended: Cell::new(0) };
        let against = anchors.against(&tx)?.or_else(|| self.knows_more(entries));
        tx.append(told)?;
        tx.set_meta(TURN, &anchors.turn(&keys.ticket, tx.evidence_head()?, against)?)?;
        whole.commit().map_err(Error::sql("commit"))?;
        conn.close().map_err(|(_, fault)| Error::sql("close")(fault))
    }

    /// The keys that are there have to be the copy's; those beside it fill an empty place.
    fn keys(&self, from: &Path, copied: &Copied) -> Result<Keys, Error> {
        let (place, offered) = (&self.paths.keys, from.join("keys"));
        let missing: Vec<_> = KEYS.iter().filter(|name| !place.join(name).exists()).collect();
        if let Some(first) = missing.first() {
            if !copied.keys || missing.len() < KEYS.len() {
                let why = "it is missing, and no key is made anew: bring it back first";
                return Err(bad(&place.join(first), why));
            }
            files::make_dir(place)?;
            for name in KEYS {
                let (from, to) = (offered.join(name), place.join(name));
                let text = std::fs::read(&from).map_err(Error::io("read", &from))?;
                failpoint::hit("store.restore_key.before");
                files::replace(&to, &text, 0o600)?;
                failpoint::hit("store.restore_key.after");
            }
        }
        let keys = Keys::open(place, false)?;
        copied.fits(place, &keys)?;
        Ok(keys)
    }

    /// What the database that is there knows beyond a copy of so many entries. The newest anchor may be
    /// half a minute older than that.
    fn knows_more(&self, entries: u64) -> Option<String> {
        let newest = || -> rusqlite::Result<i64> {
            let flags = OpenFlags::SQLITE_OPEN_READ_WRITE;
            let there = Connection::open_with_flags(self.paths.state.join(DATABASE), flags)?;
            there.query_row("SELECT coalesce(max(seq), 0) FROM evidence", [], |row| row.get(0))
        };
        match newest() {
            Ok(newest) if newest.cast_unsigned() <= entries => None,
            Ok(newest) => Some(format!(
                "its database is older than what was witnessed: the backup ends at evidence entry \
                 {entries}, the database that was there at {newest}"
            )),
            Err(fault) => Some(format!(
                "nobody knows what was decided since the backup: the database that was there \
                 cannot be read ({fault})"
            )),
        }
    }

    /// Marks every workspace of the copy as held here: the next start tells the authority.
    fn hold_all(&self, from: &Path) -> Result<u64, Error> {
        files::touch_private(&self.paths.anchors)?;
        let marks = Marks::open(&self.paths.high_water, true)?;
        let conn = read_only(&from.join(DATABASE))?;
        let mut held = 0;
        for (id, known) in workspaces(&conn).map_err(Error::sql("read workspaces"))? {
            if let Some(known) = &known {
                marks.note(&id, known.seen())?;
            }
            if known.is_none_or(|known| !known.deleted) {
                marks.hold(&id, true)?;
                held += 1;
            }
        }
        marks.flush()?;
        Ok(held)
    }
}

/// What a restore did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    /// Where the database that was there is now.
    pub replaced: Option<PathBuf>,
    /// Workspaces put on HOLD since no witness was there to compare them with.
    pub held: u64,
}

/// Brings a restore that was decided to its end: the anchors get its line, the database that is there is
/// moved aside with its log, which would be played into the other one, and the restored one takes its
/// place.
pub(super) fn finish(paths: &Paths) -> Result<Option<PathBuf>, Error> {
    let state = &paths.state;
    let (ready, place) = (state.join(RESTORED), state.join(DATABASE));
    let made = match std::fs::metadata(&ready).and_then(|found| found.modified()) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        answer => answer.map_err(Error::io("look for", &ready))?,
    };
    let turn: Option<String> = read_only(&ready)?
        .query_row("SELECT value FROM meta WHERE key = ?", [TURN], |r| r.get(0))
        .optional()
        .map_err(Error::sql("read meta"))?;
    if let Some(line) = turn {
        let keys = Keys::open(&paths.keys, false)?;
        anchors::write_turn(&paths.anchors, keys.ticket.public(), &line)?;
    }
    // The same name however often a crash makes this begin anew.
    let made = jiff::Timestamp::try_from(made).map_err(|e| bad(&ready, e.to_string()))?;
    let aside = state.join(format!("replaced-{}", made.strftime("%Y%m%dT%H%M%S%6fZ")));
    let mut moved = aside.exists();
    failpoint::hit("store.set_aside.before");
    for name in ["overfence.db-wal", "overfence.db-shm", DATABASE] {
        let from = state.join(name);
        if !from.try_exists().map_err(Error::io("look for", &from))? {
            continue;
        }
        files::make_dir(&aside)?;
        std::fs::rename(&from, aside.join(name)).map_err(Error::io("move away", &from))?;
        moved = true;
    }
    if moved {
        files::sync_parent(&aside.join(DATABASE))?;
    }
    std::fs::rename(&ready, &place).map_err(Error::io("rename to", &place))?;
    files::sync_parent(&place)?;
    failpoint::hit("store.set_aside.after");
    Ok(moved.then_some(aside))
}
