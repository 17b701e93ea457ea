//! Who stands in the way of a removal, in words.

use super::host::Host;
use super::slot::Slot;
use crate::kernel::{holders, mountinfo};
use crate::model::facts::Holder;

/// How many are named in a line.
const NAMED: usize = 3;

impl Host {
    /// Who keeps a superblock alive that was unmounted here.
    pub(super) fn who_keeps_it(&self, slot: &Slot) -> String {
        match self.users(slot, |_| true) {
            None => "the superblock lives, and nobody who holds it can be named".to_owned(),
            Some(names) => format!("the superblock lives: {names}"),
        }
    }

    /// Who keeps an overlay from being unmounted: what is mounted below it, or who is in it.
    pub(super) fn who_uses_it(&self, slot: &Slot) -> String {
        let merged = &slot.dirs.merged;
        let below = mountinfo::below(mountinfo::read(None).unwrap_or_default(), merged);
        let nested: Vec<_> = below
            .iter()
            .filter(|mount| mount.point != *merged)
            .take(NAMED)
            .map(|m| format!("{} at {}", m.superblock.fs_type.display(), m.point.display()))
            .collect();
        if !nested.is_empty() {
            return format!(
                "umount: EBUSY, something is mounted below it ({}): unmount that first",
                nested.join(", ")
            );
        }
        match self.users(slot, |holder| holder.how != "mount") {
            None => "umount: EBUSY, somebody in this namespace uses it".to_owned(),
            Some(names) => format!("umount: EBUSY: {names}"),
        }
    }

    fn users(&self, slot: &Slot, which: impl Fn(&Holder) -> bool) -> Option<String> {
        let place = self.paths.cgroup(&slot.session());
        let s_dev = slot.lock().s_dev?;
        let found = holders::all(s_dev, &slot.dirs.upper, &place).ok()?;
        let names: Vec<_> =
            found.iter().filter(|h| which(h)).take(NAMED).map(ToString::to_string).collect();
        (!names.is_empty()).then(|| names.join("; "))
    }
}
