//! A checkpoint in two steps, where the upper's file system can clone files into the layer store: the
//! session stands still while its upper is gathered, and runs while the layer is made of that.

use std::os::fd::AsFd as _;

use super::effects::{Answered, text};
use super::host::Host;
use super::slot::Slot;
use crate::kernel::walk::Dir;
use crate::model::ids::PublicationKey;
use crate::model::session::{Session, State};
use crate::model::step::Event;
use crate::progress::{Amount, Counted, What};
use crate::upper::changes::{self, Format};
use crate::upper::gather::{self, gather};
use crate::upper::layer::{Source, Writers};
use crate::upper::{Error, Result, Stop};

impl Host {
    /// Gathers a stopped upper, to be packed once its session runs again. False: it is to be captured in
    /// one step. A closing session does not run again.
    pub(super) fn gather(
        &self,
        slot: &Slot,
        s: &Session,
        key: PublicationKey,
        even_empty: bool,
        stop: Stop<'_>,
    ) -> Result<bool> {
        if s.state != State::Active {
            return Ok(false);
        }
        let dir = Dir::open(&slot.dirs.upper)?;
        if !even_empty && changes::is_empty(dir.as_fd())? {
            return Ok(false);
        }
        let source = Source::Upper(dir.as_fd(), Format::Trusted);
        let gathered = gather(source, Writers::Frozen, &self.layers, stop)?;
        let found = gathered.is_some();
        slot.lock().gathered = gathered.map(|gathered| (key, gathered));
        Ok(found)
    }

    /// Makes the layer of what was gathered.
    pub(super) fn pack(&self, slot: &Slot, key: PublicationKey) -> Answered {
        let gathered = slot.lock().gathered.take_if(|(of, _)| *of == key);
        let Some((_, gathered)) = gathered else {
            return Err("what was gathered is not there any more: ask for it again".to_owned());
        };
        let stop = || self.stopping() || !slot.lock().session.packs(key);
        let total = Amount { bytes: gathered.bytes(), entries: 0 };
        let packed = self.showing(slot, What::Pack, total, |progress| {
            gathered.pack(&self.layers, &Counted { stop, progress })
        });
        slot.lock().capture_code = packed.as_ref().err().map(Error::code);
        match packed {
            Ok(layer) => Ok(vec![Event::Captured { key, layer: Some(layer.diff_id) }]),
            // Nobody waits for it any more.
            Err(Error::Stopped) => Ok(vec![]),
            Err(fault) => Err(text(fault)),
        }
    }

    /// Brings large files of a running session's upper to the disk, so that the checkpoint that is
    /// going to be asked for does not stop it for that. What cannot be done is left to the checkpoint.
    pub(super) fn write_out(&self, slot: &Slot) {
        let stop = || self.stopping() || slot.lock().session.state != State::Active;
        let done = Dir::open(&slot.dirs.upper)
            .map_err(Error::from)
            .and_then(|upper| gather::write_out(upper.as_fd(), &self.layers, &stop));
        if let Err(fault) = done {
            tracing::debug!(OVERFENCE_SESSION = %slot.id, "not written out ahead of a checkpoint: {}", text(fault));
        }
    }
}

/// Drops what was gathered for a checkpoint that was given up. Not under the lock: it may be much.
pub(super) fn forget(slot: &Slot) {
    let useless = {
        let inner = &mut *slot.lock();
        inner.gathered.take_if(|(key, _)| !inner.session.wants_gathered(*key))
    };
    drop(useless);
}
