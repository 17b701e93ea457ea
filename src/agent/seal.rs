//! Sealing an upper, taking the seal off, and looking whether one still holds.

use std::sync::Arc;

use super::effects::{Answered, Try, text};
use super::host::Host;
use super::slot::Slot;
use crate::kernel::seal::{self, Place, Stuck};
use crate::kernel::{clock, overlay};
use crate::model::facts::{Fact, Proof};
use crate::model::session::Session;
use crate::model::step::Event;
use crate::progress::{Amount, What};

impl Host {
    /// What is not on the disk yet is written out first, all at once and in its turn: the flag
    /// would flush file by file.
    pub(super) fn seal(&self, slot: &Slot, s: &Session, tried: Try) -> Answered {
        let place = Place::of(&slot.dirs.root, &slot.dirs.upper);
        seal::sync(&slot.dirs.upper).map_err(text)?;
        drop(tried.turn);
        // Once it was readmitted or disposed of nobody wants it, and a kill does not wait for it; the
        // next tick goes on where it stopped.
        let stop = || {
            let now = slot.lock();
            self.stopping() || now.session.state != s.state || now.session.fence != s.fence
        };
        // How much there is its own record says.
        let unknown = Amount::default();
        let sealed = self.showing(slot, What::Seal, unknown, |p| seal::seal(&place, p, &stop));
        Ok(sealed.map_err(text)?.map(|proof| Event::Sealed { proof }).into_iter().collect())
    }

    /// The flags, then the overlay's copies of them, then the question whether writes work again.
    pub(super) fn unseal(&self, slot: &Slot) -> Answered {
        let Some(mounted) = slot.lock().mounted.clone() else {
            return Err("the overlay is not mounted here".to_owned());
        };
        let begun = clock::now();
        let place = Place::of(&slot.dirs.root, &slot.dirs.upper);
        let stop = || self.stopping() || !slot.lock().session.holds_lease();
        let unknown = Amount::default();
        let done = self.showing(slot, What::Unseal, unknown, |p| seal::unseal(&place, p, &stop));
        let Some(cleared) = done.map_err(text)? else { return Ok(vec![]) };
        // A remount drops what nobody uses: twice, since somebody may have used it just then.
        let mut left = Stuck::default();
        for _ in 0..2 {
            overlay::remount_rw(&mounted.root).map_err(text)?;
            let asked = seal::stuck(&place, &mounted.root, &stop).map_err(text)?;
            let Some(asked) = asked else { return Ok(vec![]) };
            left = asked;
            if left.stuck == 0 {
                break;
            }
        }
        if left.stuck > 0 {
            return Err(left.to_string());
        }
        seal::end(&place).map_err(text)?;
        let proof = Proof {
            asked: "FS_IMMUTABLE cleared and read back, remount rw, then faccessat W_OK through \
                    the overlay on each file and directory of the upper"
                .to_owned(),
            answer: format!("cleared, {cleared} seen; {} asked for, ok", left.asked),
            at: clock::now(),
            took_us: clock::micros_since(begun),
        };
        Ok(vec![Event::Unsealed { proof }])
    }
}

/// A root process may have taken a seal off. What the session's worker is at may lift a flag for a
/// moment; that is none of its business, and the second look tells.
pub(super) fn check(host: &Arc<Host>, slot: &Arc<Slot>) {
    let missing = || {
        let idle = slot.lock().is_idle();
        match seal::holds(&slot.dirs.upper) {
            Ok(false) if idle => Some("the upper's top directory carries no flag".to_owned()),
            Err(fault) if idle => Some(text(fault)),
            Ok(_) | Err(_) => None,
        }
    };
    let facts = slot.session().facts;
    // An image that nothing mounts any more is looked at by nobody.
    let away = slot.dirs.image.is_some() && facts.has(Fact::Gone);
    let expected = facts.has(Fact::Sealed) && !away;
    if expected
        && missing().is_some()
        && let Some(seen) = missing()
    {
        host.apply(slot, Event::SealLost { seen }, "foreign");
    }
}
