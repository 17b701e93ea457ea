//! One row for each way to change a file: before the deadline it goes through, after it the answer is
//! EROFS and nothing is different. What was opened before the deadline stays open.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::ways::{Call, Way, ways};

/// A gated overlay, and what its upper's file system can do.
pub struct Ground<'a> {
    pub merged: &'a Path,
    pub open: &'a dyn Fn(),
    pub shut: &'a dyn Fn(),
    /// Ways that are to go through here, though not everywhere.
    pub must: &'a [&'a str],
    /// Ways that are not for this file system.
    pub without: &'a [&'a str],
}

/// All that is below a directory: names, bytes, owner, mode, times, attributes.
fn seen(dir: &Path) -> BTreeMap<PathBuf, String> {
    let mut all = BTreeMap::new();
    for path in std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).chain([dir.to_owned()]) {
        let meta = std::fs::symlink_metadata(&path).unwrap();
        let mut text = format!(
            "{:o} {}:{} {} {} {}.{} {}.{}",
            meta.mode(),
            meta.uid(),
            meta.gid(),
            meta.size(),
            meta.nlink(),
            meta.mtime(),
            meta.mtime_nsec(),
            meta.ctime(),
            meta.ctime_nsec(),
        );
        if meta.is_file() {
            let digest = std::fs::read(&path)
                .unwrap()
                .iter()
                .fold(7u64, |d, b| d.wrapping_mul(31).wrapping_add((*b).into()));
            text.push_str(&format!(" {digest:x}"));
            let file = File::open(&path).unwrap();
            text.push_str(&format!(" {:?}", rustix::fs::ioctl_getflags(&file)));
        }
        if !meta.is_symlink() {
            let mut names = [0; 1024];
            let n = rustix::fs::listxattr(&path, &mut names[..]).unwrap();
            for name in names[..n].split(|b| *b == 0).filter(|n| !n.is_empty()) {
                let mut value = [0; 256];
                let n = rustix::fs::getxattr(&path, name, &mut value[..]).unwrap();
                text.push_str(&format!(" {}={:?}", String::from_utf8_lossy(name), &value[..n]));
            }
        }
        if meta.is_dir() && path != dir {
            all.append(&mut seen(&path));
        }
        all.insert(path, text);
    }
    all
}

fn answer(call: &mut Call) -> Result<(), Errno> {
    call().map_err(|e| Errno::from_io_error(&e).unwrap())
}

/// A row: before the deadline, after it, and after a new one; and whether it holds.
fn row(ground: &Ground, dir: &Path, way: &Way) -> (bool, String) {
    (ground.open)();
    std::fs::create_dir(dir).unwrap();
    let mut call = (way.make)(dir);
    let before = answer(&mut call);
    (ground.shut)();
    let was = seen(dir);
    let after = answer(&mut call);
    let same = seen(dir) == was;
    (ground.open)();
    let again = answer(&mut call);
    let must = ground.must.contains(&way.name);
    let fits = |answer: &Result<(), Errno>| match answer {
        Ok(()) => true,
        Err(Errno::NOSYS) => !way.is_known(),
        Err(e) => !must && way.cannot.contains(e),
    };
    let unknown = !way.is_known() && before == Err(Errno::NOSYS) && after == before;
    let good = fits(&before) && (after == Err(Errno::ROFS) || unknown) && same && fits(&again);
    let name = |e: &Errno| format!("{:?}", nix::errno::Errno::from_raw(e.raw_os_error()));
    let word = |a: &Result<(), Errno>| a.as_ref().map_or_else(name, |()| "ok".to_owned());
    let row = format!(
        "{:42} before: {:10} after: {:10} again: {:10} {}",
        way.name,
        word(&before),
        word(&after),
        word(&again),
        if same { "unchanged" } else { "CHANGED" },
    );
    (good, row)
}

/// All rows, printed.
pub fn each(ground: &Ground) {
    let all = ways();
    let named = |name: &&&str| !all.iter().any(|way| way.name == **name);
    let unknown: Vec<_> = ground.must.iter().chain(ground.without).filter(named).collect();
    assert!(unknown.is_empty(), "no such ways: {unknown:?}");
    let here = all.iter().filter(|way| !ground.without.contains(&way.name));
    let rows: Vec<_> = here
        .enumerate()
        .map(|(n, way)| row(ground, &ground.merged.join(format!("way-{n}")), way))
        .collect();
    let all: Vec<_> = rows.iter().map(|(_, row)| row.as_str()).collect();
    println!("{}", all.join("\n"));
    let wrong: Vec<_> = rows.iter().filter(|(good, _)| !good).map(|(_, r)| r.as_str()).collect();
    assert!(
        wrong.is_empty(),
        "{} of {} rows do not hold:\n{}",
        wrong.len(),
        rows.len(),
        wrong.join("\n")
    );
}
