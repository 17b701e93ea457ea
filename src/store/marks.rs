//! High-water marks: the highest generation and version this host ever saw of each workspace, and
//! whether it put it on HOLD, in a file apart from the database, so that going back to an older
//! database shows (I2).
//!
//! One line a change: `WORKSPACE GENERATION VERSION held|free CHECK`, appended and fsynced;
//! rewritten whole when most of it is outdated. Of generation and version the highest line counts, of
//! the HOLD the last. Files of before there were versions have `WORKSPACE GENERATION CHECK`, too.
//! Raise a mark after the authority granted the generation and before anything runs under it.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use sha2::{Digest as _, Sha256};

use super::error::Error;
use super::files;
use crate::failpoint;
use crate::model::ids::{Generation, Version, WorkspaceId};
use crate::model::workspace::{Seen, Workspace};

/// A record that its mark speaks against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Below {
    /// Which workspace.
    pub workspace: WorkspaceId,
    /// Why it is not believed.
    pub why: String,
}

/// What is known of one workspace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Mark {
    seen: Seen,
    held: bool,
}

/// The marks of a host.
pub struct Marks {
    path: PathBuf,
    state: Mutex<State>,
    synced: Condvar,
}

struct State {
    file: File,
    highest: BTreeMap<WorkspaceId, Mark>,
    lines: usize,
    written: u64,
    durable: u64,
    syncing: bool,
    broken: Option<String>,
}

fn check_of(body: &str) -> String {
    hex::encode(&Sha256::digest(body.as_bytes())[..8])
}

fn line(workspace: &WorkspaceId, mark: Mark) -> String {
    let Seen { generation, version } = mark.seen;
    let hold = if mark.held { HELD } else { FREE };
    let body = format!("{workspace} {generation} {version} {hold}");
    format!("{body} {}\n", check_of(&body))
}

const HELD: &str = "held";
const FREE: &str = "free";

fn parse(line: &str) -> Option<(WorkspaceId, Mark)> {
    let (body, check) = line.rsplit_once(' ')?;
    if check_of(body) != check {
        return None;
    }
    let fields: Vec<&str> = body.split(' ').collect();
    let (workspace, generation, version, held) = match fields[..] {
        [workspace, generation] => (workspace, generation, "0", false),
        [workspace, generation, version, HELD] => (workspace, generation, version, true),
        [workspace, generation, version, FREE] => (workspace, generation, version, false),
        _ => return None,
    };
    let generation = Generation(generation.parse().ok()?);
    let version = Version(version.parse().ok()?);
    Some((workspace.parse().ok()?, Mark { seen: Seen { generation, version }, held }))
}

/// What a file of marks holds, and whether its end was torn.
fn read(bytes: &[u8], path: &Path) -> Result<(BTreeMap<WorkspaceId, Mark>, usize, bool), Error> {
    // A power loss may leave the end of the file without its last line, or as zeros.
    let end = bytes.iter().rposition(|b| *b != 0).map_or(0, |i| i + 1);
    let (whole, rest) = match bytes[..end].iter().rposition(|b| *b == b'\n') {
        Some(i) => (&bytes[..i], &bytes[i + 1..]),
        None => (&bytes[..0], bytes),
    };
    let mut highest = BTreeMap::<WorkspaceId, Mark>::new();
    let mut count = 0;
    if !whole.is_empty() {
        for raw in whole.split(|b| *b == b'\n') {
            count += 1;
            let Some((workspace, read)) = std::str::from_utf8(raw).ok().and_then(parse) else {
                let why = "the line does not match its check".to_owned();
                return Err(Error::Damaged { path: path.to_owned(), line: count, why });
            };
            let mark = highest.entry(workspace).or_default();
            *mark = Mark { seen: mark.seen.max(read.seen), held: read.held };
        }
    }
    Ok((highest, count, !rest.is_empty()))
}

impl Marks {
    /// Reads the marks; makes an empty file only at the first start.
    ///
    /// # Errors
    /// The file is missing although it is not the first start, or damaged.
    pub fn open(path: &Path, first_start: bool) -> Result<Self, Error> {
        let there = path.try_exists().map_err(Error::io("look for", path))?;
        if !there && !first_start {
            return Err(Error::WitnessMissing { path: path.to_owned() });
        }
        files::touch_private(path)?;
        let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
        let (highest, lines, torn) = read(&bytes, path)?;
        let mut state = State {
            file: append_to(path)?,
            highest,
            lines,
            written: 0,
            durable: 0,
            syncing: false,
            broken: None,
        };
        if torn || state.wasteful() {
            state.compact(path)?;
        }
        Ok(Self { path: path.to_owned(), state: Mutex::new(state), synced: Condvar::new() })
    }

    /// Raises the mark of a workspace, for all who ask [`Marks::highest`] from now on; it is durable
    /// once [`Marks::raise`] says so. What is lower changes nothing.
    ///
    /// # Errors
    /// As [`Marks::raise`].
    pub fn note(&self, workspace: &WorkspaceId, seen: Seen) -> Result<(), Error> {
        self.write(workspace, |mark| Mark { seen: mark.seen.max(seen), ..mark }).map(drop)
    }

    /// Raises the mark of a workspace and returns when that is durable; many at once share one
    /// fsync. What is lower changes nothing.
    ///
    /// # Errors
    /// It is not known to be durable; every later raise fails too until the store is opened anew.
    pub fn raise(&self, workspace: &WorkspaceId, seen: Seen) -> Result<(), Error> {
        let state = self.write(workspace, |mark| Mark { seen: mark.seen.max(seen), ..mark })?;
        self.settle(state)
    }

    /// Remembers that a workspace was put on HOLD here, or that this was lifted, and returns when
    /// that is durable.
    ///
    /// # Errors
    /// As [`Marks::raise`].
    pub fn hold(&self, workspace: &WorkspaceId, held: bool) -> Result<(), Error> {
        let state = self.write(workspace, |mark| Mark { held, ..mark })?;
        self.settle(state)
    }

    /// Makes what was noted so far durable.
    ///
    /// # Errors
    /// As [`Marks::raise`].
    pub fn flush(&self) -> Result<(), Error> {
        self.settle(self.lock())
    }

    fn settle<'a>(&'a self, mut state: MutexGuard<'a, State>) -> Result<(), Error> {
        // Also a mark that was there already may still be on its way to the disk.
        let mine = state.written;
        while state.durable < mine {
            state.believed(&self.path)?;
            state = if state.syncing {
                self.synced.wait(state).unwrap_or_else(PoisonError::into_inner)
            } else {
                self.sync(state)
            };
        }
        failpoint::hit("store.mark.after");
        Ok(())
    }

    fn write(
        &self,
        workspace: &WorkspaceId,
        change: impl FnOnce(Mark) -> Mark,
    ) -> Result<MutexGuard<'_, State>, Error> {
        let mut state = self.lock();
        state.believed(&self.path)?;
        let old = state.highest.get(workspace).copied().unwrap_or_default();
        let new = change(old);
        if new != old {
            let may = failpoint::fails("store.mark.before").map_err(std::io::Error::from);
            let line = line(workspace, new);
            if let Err(error) = may.and_then(|()| state.append(line.as_bytes())) {
                return Err(Error::io("write", &self.path)(error));
            }
            state.highest.insert(workspace.clone(), new);
            state.lines += 1;
            state.written += 1;
        }
        Ok(state)
    }

    /// Makes all that is written durable, with the lock given up meanwhile.
    fn sync<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let target = state.written;
        let answer = if state.wasteful() {
            state.compact(&self.path).map_err(|e| e.to_string())
        } else {
            match state.file.try_clone() {
                Ok(file) => {
                    state.syncing = true;
                    drop(state);
                    let answer = file.sync_data();
                    state = self.lock();
                    state.syncing = false;
                    answer.map_err(|e| e.to_string())
                }
                Err(error) => Err(error.to_string()),
            }
        };
        match answer {
            Ok(()) => state.durable = state.durable.max(target),
            Err(why) => state.broken = Some(why),
        }
        self.synced.notify_all();
        state
    }

    /// Why the file is not believed any more, if it is not.
    pub fn trouble(&self) -> Option<String> {
        let why = self.lock().broken.clone();
        why.map(|why| format!("{}: {why}", self.path.display()))
    }

    /// The highest that was seen of a workspace; nothing if it has no mark.
    pub fn highest(&self, workspace: &WorkspaceId) -> Seen {
        self.lock().highest.get(workspace).map(|mark| mark.seen).unwrap_or_default()
    }

    /// Whether this host put a workspace on HOLD.
    pub fn held(&self, workspace: &WorkspaceId) -> bool {
        self.lock().highest.get(workspace).is_some_and(|mark| mark.held)
    }

    /// The records of an authority (all of them, tombstones too) that lie below their mark or forgot
    /// a HOLD, and the marks that have no record. Such a workspace goes on HOLD.
    pub fn check(&self, workspaces: &[Workspace]) -> Vec<Below> {
        let known: BTreeMap<_, _> = workspaces.iter().map(|w| (&w.id, w)).collect();
        let state = self.lock();
        let below = state.highest.iter().filter_map(|(workspace, mark)| {
            let record = known.get(workspace);
            let found = record.map(|w| w.seen()).unwrap_or_default();
            let forgotten = mark.held && record.is_none_or(|w| w.hold.is_none());
            let forgotten = forgotten.then(|| FORGOTTEN.to_owned());
            let why = mark.seen.against(&found).or(forgotten)?;
            Some(Below { workspace: workspace.clone(), why })
        });
        below.collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn wasteful(&self) -> bool {
        self.lines > 1024 && self.lines > 4 * self.highest.len()
    }

    /// Appends a line whole. What a full disk took of it is cut off again, so that it can be tried
    /// once there is room; if it cannot be, the file is not believed any more.
    fn append(&mut self, line: &[u8]) -> std::io::Result<()> {
        let whole = self.file.metadata()?.len();
        self.file.write_all(line).inspect_err(|error| {
            if self.file.set_len(whole).is_err() {
                self.broken = Some(error.to_string());
            }
        })
    }

    fn believed(&self, path: &Path) -> Result<(), Error> {
        match &self.broken {
            None => Ok(()),
            Some(why) => Err(Error::NotBelieved { why: format!("{}: {why}", path.display()) }),
        }
    }

    fn compact(&mut self, path: &Path) -> Result<(), Error> {
        let text: String = self.highest.iter().map(|(w, mark)| line(w, *mark)).collect();
        failpoint::fails("store.mark_compact.before")
            .map_err(|e| Error::io("replace", path)(e.into()))?;
        files::replace(path, text.as_bytes(), 0o600)?;
        failpoint::hit("store.mark_compact.after");
        self.file = append_to(path)?;
        self.lines = self.highest.len();
        Ok(())
    }
}

const FORGOTTEN: &str = "it was put on HOLD on this host, and the authority does not know of it";

fn append_to(path: &Path) -> Result<File, Error> {
    OpenOptions::new().append(true).open(path).map_err(Error::io("open", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::head::HeadAt;

    fn ws(n: usize) -> WorkspaceId {
        format!("w{n}").parse().unwrap()
    }

    fn seen(generation: u64) -> Seen {
        Seen { generation: Generation(generation), version: Version(0) }
    }

    fn mark(generation: u64) -> Mark {
        Mark { seen: seen(generation), held: false }
    }

    fn fresh() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("high-water");
        (dir, path)
    }

    #[test]
    fn two_hundred_raise_at_once_and_all_are_there_after_a_restart() {
        let (_dir, path) = fresh();
        let marks = Marks::open(&path, true).unwrap();
        std::thread::scope(|scope| {
            for n in 0..200 {
                let marks = &marks;
                scope.spawn(move || {
                    for generation in [1, 3, 2] {
                        marks.raise(&ws(n % 50), seen(generation + n as u64)).unwrap();
                    }
                });
            }
        });
        let again = Marks::open(&path, false).unwrap();
        for n in 0..50 {
            assert_eq!(again.highest(&ws(n)), seen(n as u64 + 150 + 3));
            assert_eq!(again.highest(&ws(n)), marks.highest(&ws(n)));
        }
        assert_eq!(again.highest(&ws(99)), Seen::default());
    }

    #[test]
    fn records_below_their_mark_and_missing_ones_are_found() {
        let (_dir, path) = fresh();
        let marks = Marks::open(&path, true).unwrap();
        for (n, generation, version) in
            [(1, 5, 2), (2, 5, 2), (3, 5, 0), (4, 2, 0), (5, 1, 3), (6, 1, 1), (7, 1, 1)]
        {
            let seen = Seen { generation: Generation(generation), version: Version(version) };
            marks.raise(&ws(n), seen).unwrap();
        }
        marks.hold(&ws(6), true).unwrap();
        marks.hold(&ws(7), true).unwrap();
        marks.hold(&ws(7), false).unwrap();
        let record = |n, generation, version| Workspace {
            generation: Generation(generation),
            at: HeadAt { version: Version(version), head: Default::default() },
            ..Workspace::new(ws(n), "ann".parse().unwrap(), None)
        };
        let known = [
            record(1, 5, 2),
            record(2, 6, 3),
            record(3, 4, 9),
            record(5, 9, 2),
            record(6, 1, 1),
            record(7, 1, 1),
            record(9, 1, 1),
        ];
        let told = |marks: &Marks| -> Vec<(WorkspaceId, String)> {
            marks.check(&known).into_iter().map(|below| (below.workspace, below.why)).collect()
        };
        let behind = |what, found, seen| {
            format!("the authority answers {what} {found}, but {seen} was seen on this host")
        };
        let expected = [
            (ws(3), behind("generation", 4, 5)),
            (ws(4), behind("generation", 0, 2)),
            (ws(5), behind("version", 2, 3)),
            (ws(6), FORGOTTEN.to_owned()),
        ];
        assert_eq!(told(&marks), expected);
        assert_eq!(told(&Marks::open(&path, false).unwrap()), expected, "after a restart");
        let held = Workspace { hold: Some("x".into()), ..record(6, 1, 1) };
        assert!(!marks.check(&[held]).iter().any(|below| below.workspace == ws(6)));
    }

    #[test]
    fn a_file_of_before_there_were_versions_is_read_on() {
        let (_dir, path) = fresh();
        let old = |body: &str| format!("{body} {}\n", check_of(body));
        std::fs::write(&path, old("w1 7") + &old("team/repo 3") + &old("w1 6")).unwrap();
        let marks = Marks::open(&path, false).unwrap();
        assert_eq!(marks.highest(&ws(1)), seen(7));
        assert_eq!(marks.highest(&"team/repo".parse().unwrap()), seen(3));
        marks.raise(&ws(1), seen(8)).unwrap();
        assert_eq!(Marks::open(&path, false).unwrap().highest(&ws(1)), seen(8));
        for body in ["w1", "w1 7 1", "w1 7 1 perhaps", "w1 x 1 free", "w1 7 1 free more"] {
            std::fs::write(&path, old(body)).unwrap();
            assert!(matches!(Marks::open(&path, false), Err(Error::Damaged { .. })), "{body}");
        }
    }

    #[test]
    fn a_torn_end_is_dropped_and_other_damage_is_named() {
        let (_dir, path) = fresh();
        let whole = line(&ws(1), mark(7)) + &line(&ws(2), mark(8));
        let torn = &line(&ws(1), mark(9))[..9];
        for tail in ["", torn, "\0\0\0", "w1 9\0\0"] {
            std::fs::write(&path, format!("{whole}{tail}")).unwrap();
            let marks = Marks::open(&path, false).unwrap();
            let both = [marks.highest(&ws(1)), marks.highest(&ws(2))];
            assert_eq!(both, [seen(7), seen(8)], "{tail:?}");
            marks.raise(&ws(1), seen(10)).unwrap();
            assert_eq!(Marks::open(&path, false).unwrap().highest(&ws(1)), seen(10));
        }
        for (damaged, number) in [
            (whole.replacen("w1 7", "w1 6", 1), 1),
            (whole.replacen("w2 8", "w3 8", 1), 2),
            (format!("\n{whole}"), 1),
            (format!("{torn}\n{whole}"), 1),
        ] {
            std::fs::write(&path, &damaged).unwrap();
            let error = Marks::open(&path, false).err().unwrap();
            assert!(
                matches!(error, Error::Damaged { line, .. } if line == number),
                "{damaged:?}: {error}"
            );
        }
    }

    #[test]
    fn a_long_file_is_rewritten_and_loses_nothing() {
        let (_dir, path) = fresh();
        let marks = Marks::open(&path, true).unwrap();
        let text: String = (1..=1500).map(|g| line(&ws(1), mark(g))).collect();
        std::fs::write(&path, text).unwrap();
        drop(marks);
        let marks = Marks::open(&path, false).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), line(&ws(1), mark(1500)));
        marks.lock().lines = 5000;
        marks.raise(&ws(2), seen(1)).unwrap();
        marks.raise(&ws(3), seen(1)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), 3, "rewritten while running, then appended to:\n{text}");
        assert_eq!(Marks::open(&path, false).unwrap().highest(&ws(3)), seen(1));
    }

    #[test]
    fn a_missing_file_is_made_only_at_the_first_start() {
        let (_dir, path) = fresh();
        assert!(matches!(Marks::open(&path, false), Err(Error::WitnessMissing { .. })));
        assert!(!path.exists());
    }
}
