//! A stopped upper's print: what a later look at it is compared with. No write, creation, removal,
//! renaming or change of attributes leaves the change times (ctime) of all inodes as they were, and
//! no call sets one.
//!
//! Not noticed: what is written to the raw device; a change within the clock's tick (4 ms before
//! kernel 6.13) of the newest one that the print saw, by whoever changes that very file; stores into a
//! page that is dirty already, until it was written out.

use std::ffi::OsStr;
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::tree::{Step, Walk};
use super::{Result, Stop, go_on};
use crate::kernel::walk::{Dir, Info};
use crate::model::head::Digest;

/// How many changed paths are named.
const NAMED: usize = 5;

/// Everything below a directory, in one line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Print {
    /// How many names there are.
    pub entries: u64,
    /// The newest change time: seconds and nanoseconds since 1970.
    pub newest: (i64, u32),
    /// Over names, inodes and change times. Those of the top directory itself are left out: a proof
    /// that the overlay is dead sets an attribute there and takes it off.
    pub sum: Digest,
}

/// Makes a print of what a walk meets; for one that is made for something else as well.
#[derive(Debug)]
pub struct Printer {
    sum: Sha256,
    entries: u64,
    newest: (i64, u32),
    /// Of the earlier print, if there is one.
    since: Option<(i64, u32)>,
    changed: Vec<String>,
}

impl Printer {
    /// For a first print, or for one that is compared with an earlier one.
    pub fn new(earlier: Option<&Print>) -> Self {
        let since = earlier.map(|print| print.newest);
        Self { sum: Sha256::new(), entries: 0, newest: (0, 0), since, changed: Vec::new() }
    }

    /// A name in the directory at this path.
    pub(super) fn name(&mut self, dir: &Path, name: &OsStr, info: &Info) {
        let ctime = (info.ctime_s, info.ctime_ns);
        self.sum.update(name.as_bytes());
        self.sum.update([b'/']);
        self.sum.update(info.ino.to_le_bytes());
        self.sum.update(ctime.0.to_le_bytes());
        self.sum.update(ctime.1.to_le_bytes());
        self.entries += 1;
        self.newest = self.newest.max(ctime);
        if self.changed.len() <= NAMED && self.since.is_some_and(|since| ctime > since) {
            self.changed.push(dir.join(name).display().to_string());
        }
    }

    /// A directory that was entered is done.
    pub(super) fn left(&mut self) {
        self.sum.update([0]);
    }

    fn print(&self) -> Print {
        let sum = Digest(self.sum.clone().finalize().into());
        Print { entries: self.entries, newest: self.newest, sum }
    }

    /// The print, after a whole walk, and what differs from the earlier one in words: nothing for a first
    /// one. `None`: it is the earlier one.
    pub fn compared(self, earlier: Option<&Print>) -> Option<(Print, String)> {
        let now = self.print();
        let Some(earlier) = earlier else { return Some((now, String::new())) };
        if now == *earlier {
            return None;
        }
        let mut words = Vec::new();
        if !self.changed.is_empty() {
            let more = if self.changed.len() > NAMED { " and more" } else { "" };
            let named = self.changed.len().min(NAMED);
            words.push(format!("changed: {}{more}", self.changed[..named].join(", ")));
        }
        if now.entries != earlier.entries {
            words.push(format!("{} names, there were {}", now.entries, earlier.entries));
        }
        if words.is_empty() {
            words.push("inodes or change times differ, none is newer".to_owned());
        }
        Some((now, words.join("; ")))
    }
}

/// Goes through everything below a directory.
pub fn look(top: &Path, mut printer: Printer, stop: Stop<'_>) -> Result<Printer> {
    let mut walk = Walk::new(Dir::open(top)?.as_fd())?;
    while let Some(step) = walk.step()? {
        let Step::Name(entry) = step else {
            printer.left();
            continue;
        };
        go_on(stop)?;
        let info = walk.here().stat(&entry.name)?;
        printer.name(walk.here().path(), &entry.name, &info);
        if info.kind.is_dir() {
            walk.enter(&entry)?;
        }
    }
    Ok(printer)
}

/// Takes the print of everything below a directory.
pub fn take(top: &Path, stop: Stop<'_>) -> Result<Print> {
    look(top, Printer::new(None), stop).map(|printer| printer.print())
}

/// Compares a directory with an earlier print of it: the present one, and what differs in words.
pub fn compare(top: &Path, earlier: &Print, stop: Stop<'_>) -> Result<Option<(Print, String)>> {
    look(top, Printer::new(Some(earlier)), stop).map(|printer| printer.compared(Some(earlier)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn differs(top: &Path, change: impl FnOnce()) -> String {
        let before = take(top, &|| false).unwrap();
        assert_eq!(compare(top, &before, &|| false).unwrap(), None);
        // A clock's tick, on kernels whose change times are that coarse.
        std::thread::sleep(std::time::Duration::from_millis(15));
        change();
        let (now, words) = compare(top, &before, &|| false).unwrap().expect("noticed");
        assert_eq!(compare(top, &now, &|| false).unwrap(), None);
        words
    }

    #[test]
    fn every_kind_of_change_is_noticed_and_named() {
        let tmp = tempfile::tempdir().unwrap();
        let top = tmp.path();
        std::fs::create_dir_all(top.join("a/b")).unwrap();
        for name in ["a/b/f", "g", "h"] {
            std::fs::write(top.join(name), "bytes").unwrap();
        }
        let f = top.join("a/b/f");
        let mtime = std::fs::metadata(&f).unwrap().modified().unwrap();
        let said = differs(top, || {
            std::fs::write(&f, "other").unwrap();
            let file = std::fs::File::options().write(true).open(&f).unwrap();
            file.set_modified(mtime).unwrap();
        });
        assert_eq!(said, "changed: a/b/f");
        assert!(differs(top, || std::fs::write(top.join("a/new"), "").unwrap()).contains("a/new"));
        let said = differs(top, || std::fs::rename(top.join("g"), top.join("a/g")).unwrap());
        assert!(said.contains("a/g"), "{said}");
        let said = differs(top, || std::fs::remove_file(top.join("h")).unwrap());
        assert_eq!(said, "5 names, there were 6");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        let said = differs(top, || std::fs::set_permissions(&f, mode).unwrap());
        assert_eq!(said, "changed: a/b/f");
        let said = differs(top, || {
            for i in 0..9 {
                std::fs::write(top.join(format!("n{i}")), "").unwrap();
            }
        });
        assert!(said.contains("n4 and more; 14 names"), "{said}");
    }

    #[test]
    fn a_stop_stops_it() {
        let tmp = tempfile::tempdir().unwrap();
        std::fs::write(tmp.path().join("f"), "").unwrap();
        assert!(matches!(take(tmp.path(), &|| true), Err(super::super::Error::Stopped)));
    }
}
