//! Where an unpacking is in the tree that it makes. The next entry of an archive is mostly near the last
//! one: the way there begins here and not at the top, so that a deep tree costs what its entries are, and
//! not its depth for each of them.

use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::Mode;
use rustix::io::Errno;

use super::tree::{DirId, ascend, reopen};
use super::{At as _, Error, Result, path_of};
use crate::kernel::walk::Dir;

/// A directory of a tree, and which ones it is in.
pub(super) struct Place {
    top: Dir,
    /// Where we are. It does not carry its whole path, which would be copied at each step.
    dir: Dir,
    path: Vec<u8>,
    /// The directories above it, the top first, and how much of `path` is each one's.
    above: Vec<(DirId, usize)>,
}

impl Place {
    /// Begins at the top of a tree.
    pub(super) fn top(tree: impl AsFd) -> Result<Self> {
        let top = reopen(tree, Path::new(""))?;
        let dir = reopen(&top, Path::new(""))?;
        Ok(Self { top, dir, path: Vec::new(), above: Vec::new() })
    }

    /// The directory at hand.
    pub(super) fn dir(&self) -> &Dir {
        &self.dir
    }

    /// Its path below the top.
    pub(super) fn path(&self) -> &Path {
        path_of(&self.path)
    }

    /// Goes to the directory at `path`; missing ones on the way are made if `make`. Returns how many were
    /// opened: those that differ from where it began, or all from the top where those are fewer.
    ///
    /// # Errors
    /// Hostile, if something on the way is no directory; of the kernel.
    pub(super) fn go_to(&mut self, path: &[u8], make: bool) -> Result<u64> {
        let shared = shared(&self.path, path);
        let down = self.above.partition_point(|(_, length)| *length < shared);
        let up = self.above.len();
        let mut opened = 0;
        if up - down <= down {
            for (above, _) in self.above.drain(down..).rev() {
                self.dir = ascend(&self.dir, above)?;
                opened += 1;
            }
            self.path.truncate(shared);
        } else {
            self.dir = reopen(&self.top, Path::new(""))?;
            self.above.clear();
            self.path.clear();
            opened += 1;
        }
        while self.path.len() < path.len() {
            let from = self.path.len() + usize::from(!self.path.is_empty());
            let rest = &path[from..];
            let name = &rest[..rest.iter().position(|b| *b == b'/').unwrap_or(rest.len())];
            let above = (DirId::of(&self.dir)?, self.path.len());
            self.dir = self.enter(name, make, path)?;
            self.above.push(above);
            self.path.extend_from_slice(&path[self.path.len()..from + name.len()]);
            opened += 1;
        }
        Ok(opened)
    }

    /// Opens a directory in this one, on the way to `path`.
    fn enter(&self, name: &[u8], make: bool, path: &[u8]) -> Result<Dir> {
        let name = path_of(name).as_os_str();
        let child = match self.dir.child(name) {
            Err(e) if make && e.errno() == Some(Errno::NOENT) => {
                let mode = Mode::from_raw_mode(0o755);
                rustix::fs::mkdirat(&self.dir, name, mode).at("make", path_of(path))?;
                self.dir.child(name)
            }
            other => other,
        };
        child.map(|dir| dir.renamed(Path::new(""))).map_err(|e| match e.errno() {
            Some(Errno::LOOP | Errno::NOTDIR | Errno::XDEV | Errno::NOENT) => {
                Error::hostile(path, "on the way to it is something that is no directory")
            }
            _ => e.into(),
        })
    }
}

/// How many bytes of both paths name the same directories.
fn shared(a: &[u8], b: &[u8]) -> usize {
    // Paths are long where trees are deep: by pieces first.
    const PIECE: usize = 256;
    let pieces = a.chunks(PIECE).zip(b.chunks(PIECE)).take_while(|(a, b)| a == b).count();
    let begun = (pieces * PIECE).min(a.len()).min(b.len());
    let rest = a[begun..].iter().zip(&b[begun..]).take_while(|(a, b)| a == b).count();
    let same = begun + rest;
    let whole = |path: &[u8]| path.get(same).is_none_or(|next| *next == b'/');
    match whole(a) && whole(b) {
        true => same,
        false => a[..same].iter().rposition(|b| *b == b'/').unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;
    use crate::upper::round_trip::capture_dir;
    use crate::upper::store::LayerStore;

    #[test]
    fn what_two_paths_share_ends_with_a_name() {
        for (a, b, want) in [
            ("", "", ""),
            ("", "a", ""),
            ("a", "b", ""),
            ("a", "ab", ""),
            ("a/b", "a/b", "a/b"),
            ("a/b", "a/b/c", "a/b"),
            ("a/b/c", "a/b", "a/b"),
            ("a/bc", "a/bd", "a"),
            ("a/bc/d", "a/b/d", "a"),
        ] {
            // By themselves, and below something longer than a piece.
            for above in ["", &"long/".repeat(100)] {
                let below = |path: &str| format!("{above}{path}").trim_end_matches('/').to_owned();
                let (a, b) = (below(a).into_bytes(), below(b).into_bytes());
                let want = below(want);
                assert_eq!(&a[..shared(&a, &b)], want.as_bytes());
                assert_eq!(shared(&a, &b), shared(&b, &a));
            }
        }
    }

    /// Each level's sibling comes after all that is below the level: the order of a capture.
    #[test]
    fn the_way_through_a_deep_tree_is_as_long_as_its_entries_are_many() {
        const DEPTH: usize = 2000;
        let tmp = tempfile::tempdir().unwrap();
        let top = std::fs::File::open(tmp.path()).unwrap();
        let mut place = Place::top(&top).unwrap();
        let chain = |levels: usize| vec!["d"; levels].join("/");
        let mut opened = 0;
        for levels in 0..=DEPTH {
            opened += place.go_to(chain(levels).as_bytes(), true).unwrap();
        }
        for levels in (0..DEPTH).rev() {
            opened += place
                .go_to([&chain(levels), "e"].join("/").trim_matches('/').as_bytes(), true)
                .unwrap();
            assert_eq!(place.path().as_os_str().as_bytes().len(), 2 * levels + 1);
            let here = DirId::of(place.dir()).unwrap();
            opened += place.go_to(chain(levels).as_bytes(), false).unwrap();
            let beside = place.dir().child(std::ffi::OsStr::new("e")).unwrap();
            assert_eq!(DirId::of(&beside).unwrap(), here, "level {levels}");
        }
        assert!(opened <= 5 * DEPTH as u64, "{opened} directories were opened");
        // From one end to another by the top, where that is nearer.
        place.go_to(chain(DEPTH).as_bytes(), false).unwrap();
        assert_eq!(place.go_to(b"e", false).unwrap(), 2);
        crate::upper::remove::remove_tree(&tmp.path().join("d")).unwrap();
    }

    #[test]
    fn a_deep_tree_with_something_at_each_level_goes_through() {
        const DEPTH: usize = 1000;
        let tmp = tempfile::tempdir().unwrap();
        let (source, layers) = (tmp.path().join("source"), tmp.path().join("layers"));
        std::fs::create_dir(&source).unwrap();
        let mut place = Place::top(std::fs::File::open(&source).unwrap()).unwrap();
        for levels in 1..=DEPTH {
            place.go_to(vec!["d"; levels].join("/").as_bytes(), true).unwrap();
            rustix::fs::mkdirat(place.dir(), "e", Mode::from_raw_mode(0o700)).unwrap();
        }
        let store = LayerStore::open(&layers).unwrap();
        let first = capture_dir(&source, &store).unwrap();
        assert_eq!(first.entries, 2 * DEPTH as u64 + 1);
        let tree = store.ensure_tree(first.diff_id, &|| false).unwrap();
        assert_eq!(capture_dir(&tree, &store).unwrap().diff_id, first.diff_id);
        for deep in [source.join("d"), tree] {
            crate::upper::remove::remove_tree(&deep).unwrap();
        }
    }
}
