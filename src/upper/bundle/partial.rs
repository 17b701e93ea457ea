//! A bundle that is not whole yet lies beside where it is to be, under another name. Where that is, is
//! noted in the layer store that it is made from before it is made: a start finds it wherever somebody
//! wanted his bundle.
//!
//! ```text
//! <above the destination>/.overfence-bundle-<random>/    the bundle, until it gets its name
//! <the store>/.overfence-bundle-<random>                 a symlink to it, until then
//! ```

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::super::store::LayerStore;
use super::super::{At as _, Error, Result, remove, sync_dir, unique_name};
use crate::failpoint;
use crate::kernel::walk::Dir;

/// How the name of one begins.
const PARTIAL: &str = ".overfence-bundle-";

/// A bundle that is being made.
pub(super) struct Partial {
    /// Its directory.
    pub path: PathBuf,
    note: PathBuf,
}

impl Partial {
    /// Makes its directory in `above`, with this mode as far as the umask lets it.
    pub(super) fn make(store: &LayerStore, above: &Path, mode: u32) -> Result<Self> {
        let above = above.canonicalize().at("resolve", above)?;
        let path = unique_name(&above, PARTIAL)?;
        let note = store.dir().join(path.file_name().unwrap_or_default());
        failpoint::fails("upper.bundle.note.before").at("make", &note)?;
        std::os::unix::fs::symlink(&path, &note).at("make", &note)?;
        sync_dir(store.dir())?;
        failpoint::hit("upper.bundle.note.after");
        let made = failpoint::fails("upper.bundle.before")
            .at("make", &path)
            .and_then(|()| std::fs::DirBuilder::new().mode(mode).create(&path).at("make", &path));
        let partial = Self { path, note };
        if made.is_err() {
            partial.forget();
        }
        made.map(|()| partial)
    }

    /// It has its name, or is not wanted: nobody looks for it any more. A note that stays leads to
    /// nothing.
    pub(super) fn forget(&self) {
        let _ = std::fs::remove_file(&self.note);
    }

    /// Takes away what there is of it.
    pub(super) fn give_up(&self) {
        // The error before is the one to tell; what stays is the next start's, by its note.
        if take_away(&self.path).is_ok() {
            self.forget();
        }
    }
}

/// Takes away what a crash inside [`super::export`] left in a directory of bundles.
pub fn sweep(bundles: &Path) -> Result<()> {
    named(bundles)?.iter().try_for_each(|path| take_away(path))
}

/// Takes away what a crash left of bundles of layers in the store at `store`, wherever they were to be.
pub fn sweep_noted(store: &Path) -> Result<()> {
    for note in named(store)? {
        let place = match std::fs::read_link(&note) {
            // No note: what it is goes with the store.
            Err(e) if e.kind() == std::io::ErrorKind::InvalidInput => continue,
            answer => answer.at("read", &note)?,
        };
        if place.file_name() == note.file_name() {
            take_away(&place)?;
        }
        std::fs::remove_file(&note).at("remove", &note)?;
    }
    Ok(())
}

fn named(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(dir) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(vec![]),
        answer => answer.at("list", dir)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.at("list", dir)?;
        if entry.file_name().as_encoded_bytes().starts_with(PARTIAL.as_bytes()) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Removes a directory if it is what was made here: one of ours by its name, and by its owner. The
/// directory that it is in may be anybody's, so that both are held open and no path is followed again.
fn take_away(path: &Path) -> Result<()> {
    let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Errno::INVAL).at("remove", path);
    };
    let found = Dir::open(above).and_then(|above| Ok((above.child(name)?, above)));
    let (dir, above) = match found.map_err(Error::from) {
        // It is gone, or another thing has its name.
        Err(e) if matches!(e.errno(), Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP)) => {
            return Ok(());
        }
        answer => answer?,
    };
    if dir.own_stat()?.uid != rustix::process::geteuid().as_raw() {
        tracing::warn!("{} is left: somebody else owns it", path.display());
        return Ok(());
    }
    remove::remove_opened(&above, dir, name).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_noted_goes_and_nothing_that_took_its_place() {
        let tmp = tempfile::tempdir().unwrap();
        let (dest, layers) = (tmp.path().join("dest"), tmp.path().join("layers"));
        std::fs::create_dir(&dest).unwrap();
        let store = LayerStore::open(&layers).unwrap();
        let made = |n: usize| {
            let partial = Partial::make(&store, &dest, 0o700).unwrap();
            std::fs::write(partial.path.join("half"), n.to_string()).unwrap();
            partial.path
        };
        let [left, swapped, gone] = [0, 1, 2].map(made);
        // Somebody has their directory at the place of ours.
        let theirs = tmp.path().join("theirs");
        std::fs::create_dir(&theirs).unwrap();
        std::fs::write(theirs.join("precious"), "x").unwrap();
        std::fs::remove_dir_all(&swapped).unwrap();
        std::os::unix::fs::symlink(&theirs, &swapped).unwrap();
        std::fs::remove_dir_all(&gone).unwrap();
        // A note that names something else is none of ours.
        let forged = layers.join(format!("{PARTIAL}0"));
        std::os::unix::fs::symlink(&theirs, &forged).unwrap();
        let beside = dest.join("beside");
        std::fs::write(&beside, "x").unwrap();
        sweep_noted(&layers).unwrap();
        assert!(!left.exists() && beside.exists());
        assert_eq!(std::fs::read_to_string(theirs.join("precious")).unwrap(), "x");
        assert!(swapped.symlink_metadata().unwrap().is_symlink());
        assert_eq!(std::fs::read_dir(&layers).unwrap().count(), 0, "the notes are gone, too");
        sweep_noted(&layers.join("never made")).unwrap();
    }
}
