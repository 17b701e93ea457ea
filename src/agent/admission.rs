//! Whether the host takes one more session: by what is free on the state directory's file system, and
//! by how many are mounted. Sessions that are there are never touched by it.

use std::sync::{Arc, MutexGuard, PoisonError};

use super::failure::Failure;
use super::host::Host;
use super::slot::Slot;
use crate::config::OpenKeys;
use crate::kernel::image;
use crate::model::backing::{Backing, UpperKind};
use crate::model::code::Code;
use crate::model::facts::Fact;
use crate::model::limits::Size;
use crate::model::session::State;

/// What the upper of a new session is to lie in.
pub(super) fn upper(
    config: &OpenKeys,
    kind: Option<UpperKind>,
    size: Option<Size>,
) -> Result<Backing, Failure> {
    match (kind.unwrap_or(config.upper), size) {
        (UpperKind::Directory, None) => Ok(Backing::Directory),
        (UpperKind::Directory, Some(size)) => {
            let why =
                format!("size {size}: only an image has a size; ask for `upper` \"image\", too");
            Err(Failure::new(Code::BadRequest, why))
        }
        (UpperKind::Image, size) => image::checked_size(size.unwrap_or(config.size))
            .map(|size| Backing::Image { size })
            .map_err(|why| Failure::new(Code::BadRequest, why)),
    }
}

/// Room for one session that has no slot yet; given back if it comes to none.
pub(super) struct Admitted<'h> {
    host: &'h Host,
}

impl Admitted<'_> {
    /// The session is known from now on, and counts as one.
    pub(super) fn adopt(self, slot: &Arc<Slot>) {
        let mut opening = self.host.opens();
        self.host.adopt(slot);
        *opening -= 1;
        drop(opening);
        std::mem::forget(self);
    }
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        *self.host.opens() -= 1;
    }
}

impl Host {
    fn opens(&self) -> MutexGuard<'_, usize> {
        self.opening.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses above a watermark.
    pub(super) fn admit(&self, upper: Backing) -> Result<Admitted<'_>, Failure> {
        self.refuse_without_room(upper)?;
        let mut opening = self.opens();
        if let Some(most) = self.config.open.max_sessions {
            let mounted = self.slots().iter().filter(|slot| is_mounted(slot)).count();
            let there = mounted + *opening;
            if u64::try_from(there).unwrap_or(u64::MAX) >= most {
                return Err(above(format!(
                    "{there} sessions are mounted and open.max_sessions is {most}: close one, \
                     decide on preserved ones (`overfence preserved list`), or raise the mark"
                )));
            }
        }
        *opening += 1;
        Ok(Admitted { host: self })
    }

    fn refuse_without_room(&self, upper: Backing) -> Result<(), Failure> {
        let state = &self.paths.state;
        // Who cannot say how much is free has no mark.
        let Ok(stat) = rustix::fs::statvfs(state) else { return Ok(()) };
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        let (free, total) = (bytes(stat.f_bavail), bytes(stat.f_blocks));
        let mark = self.config.open.min_free.of(total);
        // Images are sparse: what others may still fill is not kept free for them.
        let size = upper.size().map_or(0, |size| size.0);
        if free >= mark.saturating_add(size) {
            return Ok(());
        }
        let what = match upper.size() {
            None => String::new(),
            Some(size) => format!(" and an image of {size} does not fit above it"),
        };
        Err(above(format!(
            "{free} of {total} bytes are free on the file system of {}, open.min_free is {} ({mark} \
             bytes){what}: decide on preserved sessions (`overfence preserved list` shows sizes), \
             make room, {}or lower the mark",
            state.display(),
            self.config.open.min_free,
            if size > 0 { "ask for a smaller --size, " } else { "" },
        )))
    }
}

fn above(why: String) -> Failure {
    Failure::new(Code::AboveWatermark, why)
}

fn is_mounted(slot: &Slot) -> bool {
    let inner = slot.lock();
    let s = &inner.session;
    !s.facts.has(Fact::Gone) && s.state != State::Closed
}
