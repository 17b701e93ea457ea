//! The anchors file: signed heads of the evidence chain, one a line, oldest first; no line of it is ever
//! taken away.
//!
//! A restore writes a line of its own: the head of the database that it puts in place, which is the
//! entry that records it. Lines before it may speak of entries that this chain has not any more. Which of
//! them still have to fit is [`Lineage`]; without such a line all have to, so that an older database
//! which was put there by hand shows.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::error::Error;
use super::evidence::{Fault, now_text};
use super::files;
use super::keys::{ANCHOR, PublicKey, TicketKey};
use super::records::Tx;
use crate::failpoint;
use crate::model::head::Digest;

/// A signed statement: the chain had this head.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Anchor {
    /// Last entry then.
    pub seq: u64,
    /// Its hash.
    pub hash: Digest,
    /// When, RFC 3339.
    pub time: String,
    /// A restore put this chain there; its last entry then is the restore's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored: Option<Turn>,
}

/// Where the anchors turn to another chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    /// Lines of the file before this one: a copy of it at another place says nothing.
    pub line: u64,
    /// What the newest of them has against the restored chain, if anything: something is forgotten.
    pub against: Option<String>,
}

/// The anchors that a chain has to meet, lowest first.
pub(super) struct Lineage {
    pub(super) anchors: Vec<Anchor>,
    /// Those of them that restores wrote.
    pub(super) restores: Vec<Anchor>,
    /// How many others there are: they speak of what restores replaced.
    pub(super) set_aside: u64,
}

impl Lineage {
    /// Of all anchors in the order of the file. A chain which went through a restore has its record,
    /// as `has` tells; the last restore is one it went through, or the chain is not the restored one.
    /// What stands between two of them came from a backup taken after the one, so the anchors written
    /// after the one, and before any other restore, speak of it up to the record of the other.
    pub(super) fn of(
        all: Vec<Anchor>,
        has: impl Fn(&Anchor) -> Result<bool, Error>,
    ) -> Result<Self, Error> {
        let total = all.len() as u64;
        let (mut anchors, mut restores, mut pending) = (Vec::new(), Vec::new(), Vec::new());
        let (mut end, mut last) = (u64::MAX, true);
        for anchor in all.into_iter().rev() {
            if anchor.restored.is_none() {
                pending.push(anchor);
                continue;
            }
            if last || has(&anchor)? {
                let before = anchor.seq.saturating_sub(1);
                restores.push(anchor.clone());
                pending.push(anchor);
                anchors.extend(pending.drain(..).filter(|anchor| anchor.seq <= end));
                end = before;
            }
            pending.clear();
            last = false;
        }
        anchors.extend(pending.into_iter().filter(|anchor| anchor.seq <= end));
        anchors.sort_by_key(|anchor| anchor.seq);
        restores.reverse();
        let set_aside = total - anchors.len() as u64;
        Ok(Self { anchors, restores, set_aside })
    }
}

/// The anchors file.
pub(super) struct Anchors {
    path: PathBuf,
    public: PublicKey,
    state: Mutex<AnchorState>,
}

pub(super) struct AnchorState {
    file: File,
    /// Length of the file up to the last whole line.
    whole: u64,
    /// Whole lines.
    lines: u64,
    /// Last entry an anchor of this run covers.
    pub(super) covered: u64,
}

impl AnchorState {
    /// Makes a line durable. What a crash or a full disk left of one is cut off first.
    fn write(&mut self, line: &str) -> std::io::Result<()> {
        self.file.set_len(self.whole)?;
        self.file.write_all(line.as_bytes())?;
        self.file.sync_data()?;
        self.whole += line.len() as u64;
        self.lines += 1;
        Ok(())
    }
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
        let lines = text.iter().filter(|b| **b == b'\n').count() as u64;
        let state = Mutex::new(AnchorState { file, whole, lines, covered: 0 });
        Ok(Self { path: path.to_owned(), public: public.clone(), state })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, AnchorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last whole line of the file, unverified; none when there is no line.
    fn last_line(&self) -> Result<Option<String>, Error> {
        let whole = self.lock().whole;
        // A line is a signed statement of fixed parts, some 300 bytes long; a restore's is longer.
        let from = whole.saturating_sub(16 << 10);
        let mut file = File::open(&self.path).map_err(Error::io("open", &self.path))?;
        let mut tail = Vec::new();
        file.seek(SeekFrom::Start(from))
            .and_then(|_| file.take(whole - from).read_to_end(&mut tail))
            .map_err(Error::io("read", &self.path))?;
        let last = tail.split(|b| *b == b'\n').rfind(|line| !line.is_empty());
        Ok(last.map(|line| String::from_utf8_lossy(line).into_owned()))
    }

    pub(super) fn append(
        &self,
        key: &TicketKey,
        state: &mut AnchorState,
        (seq, hash): (u64, Digest),
    ) -> Result<(), Error> {
        let anchor = Anchor { seq, hash, time: now_text(), restored: None };
        let line = key.sign(&anchor, ANCHOR)? + "\n";
        failpoint::fails("store.anchor.before")
            .map_err(std::io::Error::from)
            .and_then(|()| state.write(&line))
            .map_err(Error::io("write", &self.path))?;
        failpoint::hit("store.anchor.after");
        state.covered = seq;
        Ok(())
    }

    /// The line of a restore that is to be the next one here; see [`write_turn`].
    pub(super) fn turn(
        &self,
        key: &TicketKey,
        (seq, hash): (u64, Digest),
        against: Option<String>,
    ) -> Result<String, Error> {
        let restored = Some(Turn { line: self.lock().lines, against });
        key.sign(&Anchor { seq, hash, time: now_text(), restored }, ANCHOR)
    }

    /// What the newest anchor has against a chain; see [`super::Store::against_anchor`].
    pub(super) fn against(&self, tx: &Tx<'_>) -> Result<Option<String>, Error> {
        let Some(line) = self.last_line()? else { return Ok(None) };
        let path = self.path.display();
        let anchor: Anchor = match self.public.verify(&line, ANCHOR) {
            Ok(anchor) => anchor,
            Err(error) => return Ok(Some(format!("the newest anchor in {path}: {error}"))),
        };
        let Anchor { seq, hash, time, restored } = anchor;
        Ok(match tx.hash_at(seq)? {
            Some(found) if found == hash.to_string() => {
                let against = restored.and_then(|turn| turn.against);
                against.map(|why| format!("{why}; a backup was put back at {time}"))
            }
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

    /// All anchors, and the first whole line that is none.
    pub(super) fn read(&self) -> Result<(Vec<Anchor>, Option<Fault>), Error> {
        let whole = self.lock().whole;
        let file = File::open(&self.path).map_err(Error::io("open", &self.path))?;
        let (mut anchors, mut fault): (Vec<Anchor>, _) = (Vec::new(), None);
        for (number, line) in (0..).zip(BufReader::new(file.take(whole)).split(b'\n')) {
            let line = line.map_err(Error::io("read", &self.path))?;
            let read: Result<Anchor, _> =
                self.public.verify(&String::from_utf8_lossy(&line), ANCHOR);
            let elsewhere = |turn: &Turn| turn.line != number;
            let why = match read {
                Ok(Anchor { restored: Some(turn), .. }) if elsewhere(&turn) => {
                    format!(
                        "it is the line of a restore that was written as line {}",
                        turn.line + 1
                    )
                }
                Ok(anchor) => {
                    anchors.push(anchor);
                    continue;
                }
                Err(error) => error.to_string(),
            };
            let why = format!("{} line {}: {why}", self.path.display(), number + 1);
            let seq = anchors.last().map_or(0, |a| a.seq);
            fault.get_or_insert(Fault { seq, why });
        }
        Ok((anchors, fault))
    }
}

/// Writes the line that [`Anchors::turn`] made, unless it is the last one already: a crash may have this
/// begin anew.
pub(super) fn write_turn(path: &Path, public: &PublicKey, line: &str) -> Result<(), Error> {
    let anchors = Anchors::open(path, false, public)?;
    if anchors.last_line()?.as_deref() == Some(line) {
        return Ok(());
    }
    failpoint::fails("store.turn.before")
        .map_err(std::io::Error::from)
        .and_then(|()| anchors.lock().write(&format!("{line}\n")))
        .map_err(Error::io("write", path))?;
    failpoint::hit("store.turn.after");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::ids::BootId;
    use crate::model::journal::{Draft, Journal};
    use crate::model::time::{BootInstant, BootNs};
    use crate::store::{Copied, Durability, Paths, Store, Vacant};

    fn now() -> BootInstant {
        BootInstant { boot: BootId(uuid::Uuid::from_u128(1)), ns: BootNs(7) }
    }

    fn open(dir: &Path) -> Store {
        Store::open(&Paths::under(dir), Arc::new(now)).unwrap()
    }

    fn draft(kind: &str) -> Draft {
        Draft {
            kind: kind.to_owned(),
            workspace: None,
            session: None,
            generation: None,
            actor: "uid 0 (login uid 7)".to_owned(),
            detail: serde_json::json!({ "x": "one" }),
        }
    }

    /// Appends so many entries, and anchors the last.
    fn grow(store: &Store, n: usize) {
        for _ in 0..n {
            let journal = Journal { sessions: vec![], entries: vec![draft("event")] };
            store.record(&journal, Durability::Full).unwrap();
        }
        store.anchor().unwrap();
    }

    fn back_up(store: &Store, to: &Path) {
        std::fs::create_dir(to).unwrap();
        store.copy_into(to, false).unwrap();
    }

    fn restore(dir: &Path, from: &Path) {
        let (paths, copied) = (Paths::under(dir), Copied::read(from).unwrap());
        Vacant::take(&paths).unwrap().restore(from, &copied, &draft("restore"), now()).unwrap();
    }

    /// The first entry that is wrong; restores that the chain went through; anchors set aside.
    fn found(store: &Store) -> (Option<u64>, Vec<u64>, u64) {
        let report = store.verify_evidence().unwrap();
        let restores = report.restores.iter().map(|a| a.seq).collect();
        (report.fault.map(|f| f.seq), restores, report.set_aside)
    }

    /// A host whose chain ran to 9, backups of 3 and 6; restored to 3, then run on to 8.
    fn restored() -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("state");
        let store = open(&dir);
        for name in ["b3", "b6"] {
            grow(&store, 3);
            back_up(&store, &root.path().join(name));
        }
        grow(&store, 3);
        drop(store);
        restore(&dir, &root.path().join("b3"));
        let store = open(&dir);
        assert_eq!(found(&store), (None, vec![4], 2), "anchors of 6 and 9");
        let why = store.against_anchor().unwrap().unwrap();
        assert!(why.starts_with("its database is older than what was witnessed"), "{why}");
        assert!(why.contains("entry 9") && why.contains("a backup was put back"), "{why}");
        let told = store.evidence_since(3, 9).unwrap().remove(0).draft;
        assert_eq!((told.kind.as_str(), told.actor.as_str()), ("restore", "uid 0 (login uid 7)"));
        grow(&store, 4);
        assert_eq!(store.against_anchor().unwrap(), None, "it is said once");
        drop(store);
        (root, dir)
    }

    fn sql(dir: &Path, statement: &str) {
        let conn = rusqlite::Connection::open(dir.join("overfence.db")).unwrap();
        assert_ne!(conn.execute(statement, []).unwrap(), 0, "{statement}");
    }

    #[test]
    fn the_chain_goes_on_over_restores_of_any_backup() {
        let (root, dir) = restored();
        let b8 = root.path().join("b8");
        back_up(&open(&dir), &b8);
        // One of before the first restore that goes further: the first restore is none of its own.
        restore(&dir, &root.path().join("b6"));
        let store = open(&dir);
        assert_eq!(
            found(&store),
            (None, vec![7], 3),
            "anchors of 9, and of the other chain 4 and 8"
        );
        grow(&store, 4);
        drop(store);
        // Back to what was set aside.
        restore(&dir, &b8);
        let store = open(&dir);
        assert_eq!(found(&store), (None, vec![4, 9], 4), "6, 9 of the first; 7, 11 of the third");
        grow(&store, 1);
        assert_eq!(found(&store).0, None);
        assert_eq!(store.verify_evidence().unwrap().anchors, 9, "none is removed");
    }

    #[test]
    fn tampering_before_and_after_a_restore_is_found() {
        for (seq, made_anew) in
            [(2_u32, false), (3, false), (4, false), (6, false), (2, true), (5, true)]
        {
            let (_root, dir) = restored();
            sql(
                &dir,
                &format!(
                    "UPDATE evidence SET body = replace(body, 'one', 'two') WHERE seq = {seq}"
                ),
            );
            if made_anew {
                // By who knows the form: all hashes fit again, up to the end.
                let conn = rusqlite::Connection::open(dir.join("overfence.db")).unwrap();
                let mut prev: Option<String> = None;
                for at in seq..=8 {
                    let body: String = conn
                        .query_row("SELECT body FROM evidence WHERE seq = ?", [at], |r| r.get(0))
                        .unwrap();
                    let mut entry: serde_json::Value = serde_json::from_str(&body).unwrap();
                    if let Some(prev) = prev {
                        entry["prev"] = prev.into();
                    }
                    let body = serde_json::to_string(&entry).unwrap();
                    let hash = Digest(
                        sha2::Digest::finalize(<sha2::Sha256 as sha2::Digest>::new_with_prefix(
                            &body,
                        ))
                        .into(),
                    );
                    let hash = hash.to_string();
                    conn.execute(
                        "UPDATE evidence SET body = ?, hash = ? WHERE seq = ?",
                        (&body, &hash, at),
                    )
                    .unwrap();
                    prev = Some(hash);
                }
            }
            let first = if made_anew { if seq == 2 { 3 } else { 8 } } else { seq };
            assert_eq!(found(&open(&dir)).0, Some(u64::from(first)), "{seq} {made_anew}");
        }
        let (_root, dir) = restored();
        sql(&dir, "DELETE FROM evidence WHERE seq > 4");
        assert_eq!(found(&open(&dir)).0, Some(5), "cut off");
    }

    #[test]
    fn what_was_put_back_by_hand_is_found_after_a_restore_too() {
        let put = |name: &str| {
            let (root, dir) = restored();
            let from = match name {
                "replaced" => {
                    let all = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path());
                    let mut all = all.filter(|p| p.to_string_lossy().contains("replaced-"));
                    all.next().unwrap()
                }
                name => root.path().join(name),
            };
            for name in ["overfence.db-wal", "overfence.db-shm", "overfence.db"] {
                let _ = std::fs::remove_file(dir.join(name));
                if from.join(name).exists() {
                    std::fs::copy(from.join(name), dir.join(name)).unwrap();
                }
            }
            (root, dir)
        };
        for (name, first, why) in [
            ("b3", 4, "is older than"),
            ("b6", 4, "is older than"),
            ("replaced", 4, "is not the one"),
        ] {
            let (_root, dir) = put(name);
            let store = open(&dir);
            assert_eq!(found(&store).0, Some(first), "{name}");
            let told = store.against_anchor().unwrap().unwrap();
            assert!(told.contains(why), "{name}: {told}");
        }
        // Nor does a restore's line say anything where it is copied to.
        let (_root, dir) = put("b3");
        let path = dir.join("evidence.anchors");
        let text = std::fs::read_to_string(&path).unwrap();
        let turn = text.lines().nth(3).unwrap();
        std::fs::write(&path, format!("{text}{turn}\n")).unwrap();
        let report = open(&dir).verify_evidence().unwrap();
        assert!(report.fault.is_some(), "{report:?}");
        let (_root, dir) = restored();
        let path = dir.join("evidence.anchors");
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("{text}{}\n", text.lines().nth(3).unwrap())).unwrap();
        let fault = open(&dir).verify_evidence().unwrap().fault.unwrap();
        assert!(fault.why.contains("written as line 4"), "{}", fault.why);
    }
}
