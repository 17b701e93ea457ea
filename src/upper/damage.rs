//! Damage of stored layers: how it is found, the mark that keeps a layer from being mounted, and that it
//! is told once.
//!
//! ```text
//! layers/<hex of the diff id>/damaged    what was found; a last line says that somebody told it
//! ```

use std::os::fd::AsFd as _;
use std::sync::PoisonError;

use rustix::io::Errno;

use super::changes::Format;
use super::layer::{self, Source};
use super::store::{COMPLETE, LayerStore, TREE, write_durable};
use super::{At as _, Error, Result, Stop, sync_dir};
use crate::failpoint;
use crate::kernel::walk::Dir;
use crate::model::head::Digest;

const DAMAGED: &str = "damaged";
const NEW: &str = ".damaged";
/// At the end of a mark that was told.
const TOLD: &str = "\n(this is in the evidence)\n";

pub(super) fn damaged(layer: Digest, why: String) -> Error {
    Error::Damaged { layer, why }
}

/// Whether it is the host that lacks something, so that a later reading may find the layer whole.
fn passes(fault: &Error) -> bool {
    matches!(
        fault.errno(),
        Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::INTR | Errno::AGAIN)
    )
}

impl LayerStore {
    /// Whether a reading found a layer damaged, and none has found it whole since.
    pub fn is_damaged(&self, diff_id: Digest) -> bool {
        self.of(diff_id).join(DAMAGED).exists()
    }

    /// What its mark says was found, and whether that was told.
    pub(super) fn mark_of(&self, diff_id: Digest) -> Option<(String, bool)> {
        let text = std::fs::read_to_string(self.of(diff_id).join(DAMAGED)).ok()?;
        Some(match text.strip_suffix(TOLD) {
            Some(why) => (why.to_owned(), true),
            None => (text, false),
        })
    }

    /// Has `tell` say what was found of a damaged layer, unless somebody said it: once for a mark. A
    /// layer that is not here has no place for a mark, and is told once as long as this store is open.
    ///
    /// # Errors
    /// That it was told cannot be noted: it is told again.
    pub fn tell_damage(&self, diff_id: Digest, tell: impl FnOnce(&str) -> bool) -> Result<()> {
        let mut gone = self.marking.lock().unwrap_or_else(PoisonError::into_inner);
        let here = self.of(diff_id).exists();
        if here {
            gone.remove(&diff_id);
        }
        let missing = !here && !gone.contains(&diff_id);
        let why = match self.mark_of(diff_id) {
            Some((why, false)) => why,
            None if missing => "it is not in the layer store".to_owned(),
            _ => return Ok(()),
        };
        if !tell(&why) {
            return Ok(());
        }
        if here {
            return self.mark(diff_id, &(why + TOLD));
        }
        gone.insert(diff_id);
        Ok(())
    }

    /// Marks a layer as damaged; it is that before this returns, and after a power loss.
    fn mark(&self, diff_id: Digest, text: &str) -> Result<()> {
        let (dir, mark) = (self.of(diff_id), self.of(diff_id).join(DAMAGED));
        let new = dir.join(NEW);
        failpoint::fails("upper.damaged.before").at("write", &mark)?;
        let _ = std::fs::remove_file(&new);
        write_durable(&new, 0o600, text.as_bytes())?;
        std::fs::rename(&new, &mark).at("rename to", &mark)?;
        sync_dir(&dir)?;
        failpoint::hit("upper.damaged.after");
        Ok(())
    }

    /// How many are.
    pub fn damaged(&self) -> usize {
        self.list().unwrap_or_default().into_iter().filter(|layer| self.is_damaged(*layer)).count()
    }

    /// Reads a layer whole: its file against both digests, and its tree, if there is one, against the
    /// layer's name. Says whether there is one. A damaged layer is marked, and not mounted until the
    /// mark is gone: with a later reading that finds it whole, or by hand.
    ///
    /// # Errors
    /// [`Error::Stopped`]; else what is wrong with it.
    pub fn verify(&self, diff_id: Digest, stop: Stop<'_>) -> Result<bool> {
        let outcome = self.read_whole(diff_id, stop);
        let _one = self.marking.lock().unwrap_or_else(PoisonError::into_inner);
        let mark = self.of(diff_id).join(DAMAGED);
        let fault = match outcome {
            Ok(unpacked) => {
                if mark.exists() {
                    std::fs::remove_file(&mark).at("remove", &mark)?;
                }
                return Ok(unpacked);
            }
            Err(fault @ (Error::Stopped | Error::NoLayer(_))) => return Err(fault),
            Err(fault) if passes(&fault) => return Err(fault),
            Err(fault) => fault,
        };
        let why = match fault.in_layer(diff_id) {
            Error::Damaged { why, .. } => why,
            other => match std::error::Error::source(&other) {
                Some(source) => format!("{other}: {source}"),
                None => other.to_string(),
            },
        };
        match self.mark_of(diff_id) {
            Some((found, _)) if found == why => {}
            // What was told stays told.
            Some((_, true)) => self.mark(diff_id, &(why.clone() + TOLD))?,
            _ => self.mark(diff_id, &why)?,
        }
        Err(damaged(diff_id, why))
    }

    fn read_whole(&self, diff_id: Digest, stop: Stop<'_>) -> Result<bool> {
        let dir = self.of(diff_id);
        self.check(diff_id, stop)?;
        if !dir.join(COMPLETE).exists() {
            return Ok(false);
        }
        let tree = Dir::open(&dir.join(TREE))?;
        let found = layer::diff_id(Source::Upper(tree.as_fd(), Format::Trusted), None, stop)
            .map_err(|error| if stop.over() { Error::Stopped } else { error })?;
        match found == diff_id {
            true => Ok(true),
            false => Err(Error::Corrupt {
                what: format!("the tree of layer {diff_id}"),
                why: format!("what is in it would be layer {found}"),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::head::Digest;

    #[test]
    fn what_the_host_lacks_is_no_damage() {
        let met = |errno: Errno| -> Error { Err::<(), _>(errno).at("open", "x").unwrap_err() };
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM] {
            assert!(passes(&met(errno)), "{errno}");
        }
        for errno in [Errno::IO, Errno::NOENT, Errno::LOOP, Errno::BADMSG] {
            assert!(!passes(&met(errno)), "{errno}");
        }
        assert!(!passes(&damaged(Digest([1; 32]), "its digest".to_owned())));
    }
}
