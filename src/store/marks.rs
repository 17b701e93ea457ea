//! High-water marks: the highest generation this host ever saw of each workspace, in a file apart
//! from the database, so that going back to an older database shows (I2).
//!
//! One line a raise: `WORKSPACE GENERATION CHECK`, appended and fsynced; rewritten whole when most
//! of it is outdated. Raise a mark after the authority granted the generation and before anything
//! runs under it.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use sha2::{Digest as _, Sha256};

use super::error::Error;
use super::files;
use crate::failpoint;
use crate::model::ids::{Generation, WorkspaceId};
use crate::model::workspace::Workspace;

/// A record that lies below its mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Below {
    /// Which workspace.
    pub workspace: WorkspaceId,
    /// The mark.
    pub seen: Generation,
    /// What the authority has; none when it does not know the workspace.
    pub found: Generation,
}

/// The marks of a host.
pub struct Marks {
    path: PathBuf,
    state: Mutex<State>,
    synced: Condvar,
}

struct State {
    file: File,
    highest: BTreeMap<WorkspaceId, Generation>,
    lines: usize,
    written: u64,
    durable: u64,
    syncing: bool,
    broken: Option<String>,
}

fn check_of(body: &str) -> String {
    hex::encode(&Sha256::digest(body.as_bytes())[..8])
}

fn line(workspace: &WorkspaceId, generation: Generation) -> String {
    let body = format!("{workspace} {generation}");
    format!("{body} {}\n", check_of(&body))
}

fn parse(line: &str) -> Option<(WorkspaceId, Generation)> {
    let (body, check) = line.rsplit_once(' ')?;
    let (workspace, generation) = body.split_once(' ')?;
    if check_of(body) != check {
        return None;
    }
    Some((workspace.parse().ok()?, Generation(generation.parse().ok()?)))
}

/// What a file of marks holds, and whether its end was torn.
fn read(
    bytes: &[u8],
    path: &Path,
) -> Result<(BTreeMap<WorkspaceId, Generation>, usize, bool), Error> {
    // A power loss may leave the end of the file without its last line, or as zeros.
    let end = bytes.iter().rposition(|b| *b != 0).map_or(0, |i| i + 1);
    let (whole, rest) = match bytes[..end].iter().rposition(|b| *b == b'\n') {
        Some(i) => (&bytes[..i], &bytes[i + 1..]),
        None => (&bytes[..0], bytes),
    };
    let mut highest = BTreeMap::<WorkspaceId, Generation>::new();
    let mut count = 0;
    if !whole.is_empty() {
        for raw in whole.split(|b| *b == b'\n') {
            count += 1;
            let Some((workspace, generation)) = std::str::from_utf8(raw).ok().and_then(parse)
            else {
                let why = "the line does not match its check".to_owned();
                return Err(Error::Damaged { path: path.to_owned(), line: count, why });
            };
            let mark = highest.entry(workspace).or_default();
            *mark = generation.max(*mark);
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
    /// once [`Marks::raise`] says so. A lower generation changes nothing.
    ///
    /// # Errors
    /// As [`Marks::raise`].
    pub fn note(&self, workspace: &WorkspaceId, generation: Generation) -> Result<(), Error> {
        self.write(workspace, generation).map(drop)
    }

    /// Raises the mark of a workspace and returns when that is durable; many at once share one
    /// fsync. A lower generation changes nothing.
    ///
    /// # Errors
    /// It is not known to be durable; every later raise fails too until the store is opened anew.
    pub fn raise(&self, workspace: &WorkspaceId, generation: Generation) -> Result<(), Error> {
        let mut state = self.write(workspace, generation)?;
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
        generation: Generation,
    ) -> Result<MutexGuard<'_, State>, Error> {
        let mut state = self.lock();
        state.believed(&self.path)?;
        if state.highest.get(workspace).is_none_or(|mark| *mark < generation) {
            failpoint::hit("store.mark.before");
            if let Err(error) = state.append(line(workspace, generation).as_bytes()) {
                return Err(Error::io("write", &self.path)(error));
            }
            state.highest.insert(workspace.clone(), generation);
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

    /// The mark of a workspace; none if it has none.
    pub fn highest(&self, workspace: &WorkspaceId) -> Generation {
        self.lock().highest.get(workspace).copied().unwrap_or_default()
    }

    /// The records of an authority (all of them, tombstones too) that lie below their mark, and
    /// the marks that have no record. Such a workspace goes on HOLD.
    pub fn check(&self, workspaces: &[Workspace]) -> Vec<Below> {
        let found: BTreeMap<_, _> = workspaces.iter().map(|w| (&w.id, w.generation)).collect();
        let state = self.lock();
        let below = state.highest.iter().filter_map(|(workspace, seen)| {
            let found = found.get(workspace).copied().unwrap_or_default();
            (found < *seen).then(|| Below { workspace: workspace.clone(), seen: *seen, found })
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
        let text: String = self.highest.iter().map(|(w, g)| line(w, *g)).collect();
        failpoint::hit("store.mark_compact.before");
        files::replace(path, text.as_bytes(), 0o600)?;
        failpoint::hit("store.mark_compact.after");
        self.file = append_to(path)?;
        self.lines = self.highest.len();
        Ok(())
    }
}

fn append_to(path: &Path) -> Result<File, Error> {
    OpenOptions::new().append(true).open(path).map_err(Error::io("open", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ws(n: usize) -> WorkspaceId {
        format!("w{n}").parse().unwrap()
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
                        marks.raise(&ws(n % 50), Generation(generation + n as u64)).unwrap();
                    }
                });
            }
        });
        let again = Marks::open(&path, false).unwrap();
        for n in 0..50 {
            assert_eq!(again.highest(&ws(n)), Generation(n as u64 + 150 + 3));
            assert_eq!(again.highest(&ws(n)), marks.highest(&ws(n)));
        }
        assert_eq!(again.highest(&ws(99)), Generation::NONE);
    }

    #[test]
    fn records_below_their_mark_and_missing_ones_are_found() {
        let (_dir, path) = fresh();
        let marks = Marks::open(&path, true).unwrap();
        for (n, generation) in [(1, 5), (2, 5), (3, 5), (4, 2)] {
            marks.raise(&ws(n), Generation(generation)).unwrap();
        }
        let record = |n, generation| Workspace {
            generation: Generation(generation),
            ..Workspace::new(ws(n), "ann".parse().unwrap(), None)
        };
        let below = marks.check(&[record(1, 5), record(2, 6), record(3, 4), record(9, 1)]);
        let expected = |n, seen, found| Below {
            workspace: ws(n),
            seen: Generation(seen),
            found: Generation(found),
        };
        assert_eq!(below, [expected(3, 5, 4), expected(4, 2, 0)]);
    }

    #[test]
    fn a_torn_end_is_dropped_and_other_damage_is_named() {
        let (_dir, path) = fresh();
        let whole = line(&ws(1), Generation(7)) + &line(&ws(2), Generation(8));
        let torn = &line(&ws(1), Generation(9))[..9];
        for tail in ["", torn, "\0\0\0", "w1 9\0\0"] {
            std::fs::write(&path, format!("{whole}{tail}")).unwrap();
            let marks = Marks::open(&path, false).unwrap();
            let both = [marks.highest(&ws(1)), marks.highest(&ws(2))];
            assert_eq!(both, [Generation(7), Generation(8)], "{tail:?}");
            marks.raise(&ws(1), Generation(10)).unwrap();
            assert_eq!(Marks::open(&path, false).unwrap().highest(&ws(1)), Generation(10));
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
        let text: String = (1..=1500).map(|g| line(&ws(1), Generation(g))).collect();
        std::fs::write(&path, text).unwrap();
        drop(marks);
        let marks = Marks::open(&path, false).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), line(&ws(1), Generation(1500)));
        marks.lock().lines = 5000;
        marks.raise(&ws(2), Generation(1)).unwrap();
        marks.raise(&ws(3), Generation(1)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), 3, "rewritten while running, then appended to:\n{text}");
        assert_eq!(Marks::open(&path, false).unwrap().highest(&ws(3)), Generation(1));
    }

    #[test]
    fn a_missing_file_is_made_only_at_the_first_start() {
        let (_dir, path) = fresh();
        assert!(matches!(Marks::open(&path, false), Err(Error::WitnessMissing { .. })));
        assert!(!path.exists());
    }
}
