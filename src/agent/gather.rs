//! Checkpoints whose session runs while the layer is made: in two steps, where the upper's file system can
//! clone files into the layer store, so that it stands still while its upper is gathered; and live, where
//! it never does.

use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::Duration;

use super::effects::{Answered, text};
use super::host::Host;
use super::slot::Slot;
use crate::kernel::walk::Dir;
use crate::model::code::Code;
use crate::model::ids::PublicationKey;
use crate::model::session::{Session, State};
use crate::model::step::Event;
use crate::progress::{Amount, Counted, What};
use crate::upper::changes::{self, Format};
use crate::upper::gather::{self, gather};
use crate::upper::layer::{Captured, Source, Writers, capture};
use crate::upper::print;
use crate::upper::store::LayerStore;
use crate::upper::{Error, Result, Shown, Stop};

/// Change times move in steps of 4 ms, before kernel 6.13; of 10 ms where it was built with HZ=100.
const TICK: Duration = Duration::from_millis(11);

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

    /// Makes a layer of the upper of a session that runs on.
    pub(super) fn capture_live(&self, slot: &Slot, s: &Session, key: PublicationKey) -> Answered {
        let stop = || self.stopping() || !slot.lock().session.packs(key);
        if let Some(why) = self.damage(slot)? {
            slot.lock().capture_code = Some(Code::UpperRefused);
            return Ok(vec![Event::CaptureRefused { key, why }]);
        }
        let total = slot.lock().captured.unwrap_or_default();
        let captured = self.showing(slot, What::Capture, total, |progress| {
            let stop = Counted { stop, progress };
            capture_live(&self.layers, &slot.dirs.upper, s.own_layer.is_some(), &stop)
        });
        slot.lock().capture_code = captured.as_ref().err().map(Error::code);
        match captured {
            Ok(layer) => Ok(vec![Event::Captured { key, layer: layer.map(|layer| layer.diff_id) }]),
            Err(Error::Stopped) => Ok(vec![]),
            Err(fault) => Ok(vec![Event::CaptureRefused { key, why: text(fault) }]),
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

/// Captures an upper that is written to; refused if anything of it changed meanwhile: not each file alone
/// has to be of one moment, but all of them together.
fn capture_live(
    layers: &LayerStore,
    upper: &Path,
    even_empty: bool,
    stop: Stop<'_>,
) -> Result<Option<Captured>> {
    let dir = Dir::open(upper)?;
    if !even_empty && changes::is_empty(dir.as_fd())? {
        return Ok(None);
    }
    let vanished = |fault: Error| match fault.errno() {
        Some(rustix::io::Errno::NOENT | rustix::io::Errno::STALE) => changed("something in it"),
        _ => fault,
    };
    let before = print::take(upper, stop).map_err(vanished)?;
    // From here on every change has a later time than those that were seen.
    std::thread::sleep(TICK);
    let source = Source::Upper(dir.as_fd(), Format::Trusted);
    let captured = capture(source, Writers::Running, layers, stop).map_err(vanished)?;
    let seen = print::compare(upper, &before, stop).map_err(vanished);
    match seen {
        Ok(None) => Ok(Some(captured)),
        other => {
            layers.settle([captured.diff_id]);
            let after = other?.map(|(_, words)| words).unwrap_or_default();
            Err(changed(&after))
        }
    }
}

fn changed(what: &str) -> Error {
    Error::Changed { path: Shown::bytes(what.as_bytes()) }
}

/// Drops what was gathered for a checkpoint that was given up. Not under the lock: it may be much.
pub(super) fn forget(slot: &Slot) {
    let useless = {
        let inner = &mut *slot.lock();
        inner.gathered.take_if(|(key, _)| !inner.session.wants_gathered(*key))
    };
    drop(useless);
}
