//! Equivalences: a run of lowest layers, and one layer that shows the same tree. The kernel takes only so
//! many lowers, and each costs on every look-up; heads are never rewritten, so deep ones are mounted
//! through an equivalence. It is a thing of this host: losing one costs the making of another.
//!
//! ```text
//! layers/equal/<digest of the run>    JSON: the run, lowest first, and the layer that equals it
//! ```
//!
//! The run is mounted, for this only; what it shows is captured as a first layer; that is unpacked, and
//! its tree read back against its name; then the file is written. A crash before that leaves a layer
//! which nothing needs.

use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::layer::{self, Source, Writers};
use super::store::{LayerStore, write_durable};
use super::{At as _, Error, Result, Stop, copy_top, remove, sync_dir};
use crate::failpoint;
use crate::kernel::overlay::{self, Spec};
use crate::kernel::walk::Dir;
use crate::model::head::Digest;

/// More lowers than this are not mounted.
pub const DEEP: usize = 64;
/// So many layers stay above a new equivalence, so that the next one is not wanted at once.
const ABOVE: usize = 32;

const EQUAL: &str = "equal";
/// Where a run is mounted, in a scratch directory.
pub(super) const MERGED: &str = "merged";

/// A run and what equals it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Equivalence {
    /// The layers, lowest first.
    pub run: Vec<Digest>,
    /// The one that shows the same tree.
    pub layer: Digest,
}

/// The name of each run that a head begins with, shortest first.
fn names(head: &[Digest]) -> Vec<String> {
    let mut hash = Sha256::new();
    let name = |layer: &Digest| {
        hash.update(layer.0);
        hex::encode(hash.clone().finalize())
    };
    head.iter().map(name).collect()
}

impl LayerStore {
    fn equal_dir(&self) -> PathBuf {
        self.dir().join(EQUAL)
    }

    /// The lower directories of a head, lowest first, at most [`DEEP`]. A deep head goes through an
    /// equivalence, which is made if there is none.
    ///
    /// # Errors
    /// A layer is missing or damaged; an equivalence cannot be made; [`Error::Stopped`].
    pub fn lowers(&self, head: &[Digest], stop: Stop<'_>) -> Result<Vec<PathBuf>> {
        let tree = |layer: &Digest| self.ensure_tree(*layer, stop);
        if head.len() <= DEEP {
            return head.iter().map(tree).collect();
        }
        let known = self.longest(head, stop);
        let (from, lowest) = match known {
            Some((n, layer)) if head.len() - n < DEEP => (n, layer),
            known => {
                let n = head.len() - ABOVE;
                let below = known.map_or(vec![], |(_, layer)| vec![layer]);
                let rest = &head[known.map_or(0, |(n, _)| n)..n];
                let run: Vec<_> = below.into_iter().chain(rest.iter().copied()).collect();
                (n, self.equal(&head[..n], &run, stop)?)
            }
        };
        [lowest].iter().chain(&head[from..]).map(tree).collect()
    }

    /// The longest run of the head that something whole here equals.
    fn longest(&self, head: &[Digest], stop: Stop<'_>) -> Option<(usize, Digest)> {
        let names = names(head);
        let known = names.iter().enumerate().rev().find_map(|(i, name)| {
            let known = self.read_equal(&self.equal_dir().join(name)).ok()?;
            (known.run == head[..=i]).then_some((i + 1, known.layer))
        });
        known.filter(|(_, layer)| self.ensure_tree(*layer, stop).is_ok())
    }

    fn read_equal(&self, path: &Path) -> Result<Equivalence> {
        let text = std::fs::read(path).at("read", path)?;
        serde_json::from_slice(&text).map_err(|e| Error::Corrupt {
            what: path.display().to_string(),
            why: format!("it cannot be read as JSON ({e})"),
        })
    }

    /// Makes the equivalence of `run`, which `shown` shows.
    fn equal(&self, run: &[Digest], shown: &[Digest], stop: Stop<'_>) -> Result<Digest> {
        let begun = std::time::Instant::now();
        let lowers = shown.iter().map(|layer| self.ensure_tree(*layer, stop));
        let lowers = lowers.collect::<Result<_>>()?;
        let scratch = self.scratch()?;
        let made = self.captured(&scratch, lowers, stop);
        // The first error is the one to tell; what stays is taken away by the next sweep.
        let removed = remove::remove_tree(&scratch);
        let layer = made?;
        let known = Equivalence { run: run.to_vec(), layer };
        let kept = removed.map(drop).and_then(|()| self.keep(&known, stop));
        // Its file names it now, or nothing needs it.
        self.settle([layer]);
        kept?;
        let (n, took) = (run.len(), begun.elapsed());
        tracing::info!("layer {layer} equals the lowest {n} of a deep head; made in {took:?}");
        Ok(layer)
    }

    fn captured(&self, scratch: &Path, lowers: Vec<PathBuf>, stop: Stop<'_>) -> Result<Digest> {
        let [upper, work, target] = ["upper", "work", MERGED].map(|name| scratch.join(name));
        for dir in [&upper, &work, &target] {
            std::fs::create_dir(dir).at("make", dir)?;
        }
        if let Some(top) = lowers.last() {
            let (top, upper) = (Dir::open(top)?, Dir::open(&upper)?);
            copy_top(top.as_fd(), upper.as_fd())?;
        }
        let spec = Spec { lowers, upper, work, target, mapped: None };
        let shown = overlay::unattached(&spec)?;
        let source = Source::Directory(shown.as_fd());
        Ok(layer::capture(source, Writers::Running, self, stop)?.diff_id)
    }

    fn keep(&self, known: &Equivalence, stop: Stop<'_>) -> Result<()> {
        self.ensure_tree(known.layer, stop)?;
        self.verify(known.layer, stop)?;
        let dir = self.equal_dir();
        std::fs::create_dir_all(&dir).at("make", &dir)?;
        let name = names(&known.run).pop().unwrap_or_default();
        let (new, place) = (dir.join(format!(".{name}")), dir.join(&name));
        let text = serde_json::to_vec(known).map_err(std::io::Error::from).at("encode", &place)?;
        failpoint::fails("upper.equal.before").at("write", &place)?;
        let _ = std::fs::remove_file(&new);
        write_durable(&new, 0o600, &text)?;
        std::fs::rename(&new, &place).at("rename into place", &place)?;
        sync_dir(&dir)?;
        sync_dir(self.dir())?;
        failpoint::hit("upper.equal.after");
        Ok(())
    }

    /// All equivalences that can be read.
    pub fn equivalences(&self) -> Vec<Equivalence> {
        let entries = std::fs::read_dir(self.equal_dir()).into_iter().flatten().flatten();
        entries.filter_map(|entry| self.read_equal(&entry.path()).ok()).collect()
    }

    /// Forgets an equivalence; its layer stays until it is removed as any other.
    pub fn forget_equivalence(&self, known: &Equivalence) -> Result<()> {
        let path = self.equal_dir().join(names(&known.run).pop().unwrap_or_default());
        failpoint::fails("upper.forget_equal.before").at("remove", &path)?;
        std::fs::remove_file(&path).at("remove", &path)?;
        failpoint::hit("upper.forget_equal.after");
        Ok(())
    }
}
