//! A stopped upper's print: what a later look at it is compared with. No write, creation, removal,
//! renaming or change of attributes leaves the change times (ctime) of all inodes as they were, and
//! no call sets one.
//!
//! Not noticed: what is written to the raw device; a change within the clock's tick (4 ms before
//! kernel 6.13) of the newest one that the print saw, by whoever changes that very file; stores into a
//! page that is dirty already, until it was written out.

use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::tree::{Step, Walk};
use super::{Error, Result, Stop};
use crate::kernel::walk::Dir;
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

/// A print, and what was changed after `since`.
fn look(top: &Path, since: Option<(i64, u32)>, stop: Stop<'_>) -> Result<(Print, Vec<String>)> {
    let mut walk = Walk::new(Dir::open(top)?.as_fd())?;
    let mut sum = Sha256::new();
    let (mut entries, mut newest, mut changed) = (0_u64, (0, 0), Vec::new());
    while let Some(step) = walk.step()? {
        let Step::Name(entry) = step else {
            sum.update([0]);
            continue;
        };
        if stop.over() {
            return Err(Error::Stopped);
        }
        let info = walk.here().stat(&entry.name)?;
        let ctime = (info.ctime_s, info.ctime_ns);
        sum.update(entry.name.as_bytes());
        sum.update([b'/']);
        sum.update(info.ino.to_le_bytes());
        sum.update(ctime.0.to_le_bytes());
        sum.update(ctime.1.to_le_bytes());
        entries += 1;
        newest = newest.max(ctime);
        if since.is_some_and(|since| ctime > since) {
            changed.push(walk.here().path().join(&entry.name).display().to_string());
            changed.truncate(NAMED + 1);
        }
        if info.kind.is_dir() {
            walk.enter(&entry)?;
        }
    }
    Ok((Print { entries, newest, sum: Digest(sum.finalize().into()) }, changed))
}

/// Takes the print of everything below a directory.
pub fn take(top: &Path, stop: Stop<'_>) -> Result<Print> {
    look(top, None, stop).map(|(print, _)| print)
}

/// Compares a directory with an earlier print of it: the present one, and what differs in words.
pub fn compare(top: &Path, earlier: &Print, stop: Stop<'_>) -> Result<Option<(Print, String)>> {
    let (now, changed) = look(top, Some(earlier.newest), stop)?;
    if now == *earlier {
        return Ok(None);
    }
    let mut words = Vec::new();
    if !changed.is_empty() {
        let more = if changed.len() > NAMED { " and more" } else { "" };
        let named = changed.len().min(NAMED);
        words.push(format!("changed: {}{more}", changed[..named].join(", ")));
    }
    if now.entries != earlier.entries {
        words.push(format!("{} names, there were {}", now.entries, earlier.entries));
    }
    if words.is_empty() {
        words.push("inodes or change times differ, none is newer".to_owned());
    }
    Ok(Some((now, words.join("; "))))
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
        assert!(matches!(take(tmp.path(), &|| true), Err(Error::Stopped)));
    }
}
