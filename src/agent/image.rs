//! Sessions whose upper lies in an image of its own: stopping and lifting its file system, mounting it
//! for who reads it, proving it gone, and loop devices that no session explains.

use std::path::Path;
use std::sync::PoisonError;

use super::effects::{AGAIN, Answered, TEARDOWN, text};
use super::failure::Failure;
use super::host::Host;
use super::slot::Slot;
use crate::kernel::image::{self, Bound, Image};
use crate::kernel::overlay::{self, Unmount};
use crate::kernel::{Error, clock};
use crate::model::code::Code;
use crate::model::facts::{Fact, Proof};
use crate::model::ids::SessionId;
use crate::model::session::{Disposition, UpperFreeze};
use crate::model::step::Event;

/// Who reads an image that no session keeps mounted.
#[derive(Debug, Default)]
pub struct Readers {
    count: usize,
    /// Mounted for them, and to be unmounted after the last.
    ours: bool,
}

impl Host {
    /// Makes the image of a session that is being opened, and mounts it.
    pub(super) fn make_image(&self, image: &Image, size: u64) -> Result<(), Failure> {
        image::make(image, size).map_err(|fault| {
            let code = match &fault {
                Error::Mkfs { .. } => Code::Unsupported,
                _ => Code::MountFailed,
            };
            Failure::new(code, text(fault))
        })
    }

    /// Stops the image's file system, if that is still wanted: it may have been readmitted since.
    pub(super) fn freeze_upper(&self, slot: &Slot) -> Answered {
        let Some(image) = &slot.dirs.image else { return Ok(vec![]) };
        let s = slot.session();
        if s.holds_lease() || s.upper_freeze != UpperFreeze::On {
            return Ok(vec![]);
        }
        let frozen = image::freeze(image).map_err(text)?;
        let lost = (s.facts.has(Fact::UpperFrozen) && !frozen.before).then(|| {
            Event::UpperFreezeLost { seen: "FIFREEZE was granted a second time".to_owned() }
        });
        let proved = Event::UpperFrozen { proof: frozen.proof };
        Ok(lost.into_iter().chain([proved]).collect())
    }

    pub(super) fn thaw_upper(&self, slot: &Slot) -> Answered {
        let Some(image) = &slot.dirs.image else { return Ok(vec![]) };
        let proof = image::thaw(image).map_err(text)?;
        Ok(vec![Event::UpperThawed { proof }])
    }

    /// Runs `read` on the upper, whose image is mounted for it if no session keeps it so.
    pub fn with_upper<T>(&self, slot: &Slot, read: impl FnOnce(&Path) -> T) -> Result<T, String> {
        let Some(image) = &slot.dirs.image else { return Ok(read(&slot.dirs.upper)) };
        {
            let mut readers = slot.readers.lock().unwrap_or_else(PoisonError::into_inner);
            if readers.count == 0 {
                readers.ours = !image::is_mounted(image).map_err(text)?;
                image::mount(image).map_err(text)?;
            }
            readers.count += 1;
        }
        let answer = read(&slot.dirs.upper);
        let mut readers = slot.readers.lock().unwrap_or_else(PoisonError::into_inner);
        readers.count -= 1;
        if readers.count == 0
            && readers.ours
            && let Err(why) = unmount(image)
        {
            // A removal tries again, and so does the next start.
            tracing::warn!(OVERFENCE_SESSION = %slot.id, OVERFENCE_WORKSPACE = %slot.workspace, "{why}");
        }
        Ok(answer)
    }

    /// A reader that died with an agent left the image of a session without an overlay mounted.
    pub(super) fn unmount_left_image(&self, slot: &Slot) {
        let Some(image) = &slot.dirs.image else { return };
        if let Err(why) = unmount(image) {
            tracing::warn!(OVERFENCE_SESSION = %slot.id, OVERFENCE_WORKSPACE = %slot.workspace, "{why}");
        }
    }

    /// The image of a session that is removed is in nobody's use any more. Those who read it end once
    /// they see that it goes; if they have not soon, it says so, which is no failure of the removal's.
    pub(super) fn put_image_away(&self, slot: &Slot) -> Result<Option<String>, String> {
        let Some(image) = &slot.dirs.image else { return Ok(None) };
        let until = clock::now().plus(TEARDOWN);
        let _none = loop {
            let readers = slot.readers.lock().unwrap_or_else(PoisonError::into_inner);
            if readers.count == 0 {
                break readers;
            }
            drop(readers);
            if clock::now() >= until {
                return Ok(Some(format!("{} is being read", image.file.display())));
            }
            std::thread::sleep(AGAIN);
        };
        unmount(image)?;
        match unused(image)? {
            None => Ok(None),
            Some(device) => Err(in_use(image, &device)),
        }
    }

    /// Overlay and image go together: the overlay holds a mount of the image, the image's superblock
    /// its loop device. That no loop device is left says that both are dead, in every namespace.
    ///
    /// The image stays mounted while the overlay is known to live: its bytes can be exported.
    pub(super) fn prove_image_gone(&self, slot: &Slot, image: &Image, last: bool) -> Answered {
        let begun = clock::now();
        let s = slot.session();
        if self.gone.is_alive(slot.id, TEARDOWN).map_err(text)? {
            return Err(self.who_keeps_it(slot));
        }
        let there = image.file.symlink_metadata().is_ok();
        if !there && s.disposition != Some(Disposition::NeverOpened) && !s.facts.has(Fact::Gone) {
            return Err(format!(
                "{} is not there any more, so nothing is proved of its overlay: bring it back",
                image.file.display()
            ));
        }
        // What is kept is counted while it can be without mounting it anew.
        if s.disposition.is_none() {
            self.size_of(slot);
        }
        match overlay::unmount(&image.disk).map_err(text)? {
            Unmount::Done | Unmount::NotMounted => {}
            Unmount::Busy if !last => return Ok(vec![]),
            Unmount::Busy => return Err(format!("umount of {}: EBUSY", image.disk.display())),
        }
        if let Some(device) = unused(image)? {
            return Err(in_use(image, &device));
        }
        self.gone.forget(slot.id);
        self.vacate(slot)?;
        let proof = Proof {
            asked: "loop devices by backing file, after umount of overlay and image".to_owned(),
            answer: "none has the image: no superblock of it or above it lives".to_owned(),
            at: clock::now(),
            took_us: clock::micros_since(begun),
        };
        Ok(vec![Event::Gone { proof }])
    }

    /// Why nothing of an image is to be published: after write errors it may not show what was
    /// written.
    pub(super) fn damage(&self, slot: &Slot) -> Result<Option<String>, String> {
        let Some(image) = &slot.dirs.image else { return Ok(None) };
        Ok(match image::errors(image).map_err(text)? {
            0 => None,
            n => Some(format!(
                "the file system of {} met {n} error(s): the host's disk was full or failed, and \
                 some of what was written is lost; nothing is published of it. `preserved export` \
                 saves what can be read",
                image.file.display()
            )),
        })
    }

    /// Loop devices that are bound to an image of this agent's and that no session explains.
    pub(super) fn stray_loops(&self) -> crate::kernel::Result<Vec<(Bound, SessionId)>> {
        let places = [&self.paths.sessions, &self.paths.trash].map(|place| {
            // As the kernel shows it.
            std::fs::canonicalize(place).unwrap_or_else(|_| place.clone())
        });
        let mut stray = image::bound()?;
        stray.retain(|bound| places.iter().any(|place| bound.file.starts_with(place)));
        let mut found = Vec::new();
        for bound in stray {
            let place = places.iter().find_map(|place| bound.file.strip_prefix(place).ok());
            let name = place.and_then(|inside| inside.components().next());
            let id = name.and_then(|name| name.as_os_str().to_str()?.parse().ok());
            if let Some(id) = id.filter(|id| self.slot(*id).is_none()) {
                found.push((bound, id));
            }
        }
        Ok(found)
    }

    /// Has them let go, if nobody uses them, or as soon as nobody does.
    pub(super) fn sweep_loops(&self) {
        let stray = self.stray_loops().unwrap_or_else(|fault| {
            tracing::warn!("loop devices were not looked at: {}", text(fault));
            Vec::new()
        });
        for (Bound { name, file }, id) in stray {
            tracing::warn!(OVERFENCE_SESSION = %id, "{name} is bound to {}, which no session explains: detached", file.display());
            let left = Image::below(&self.paths.sessions.join(id.to_string()));
            let answer = overlay::unmount(&left.disk).and_then(|_| image::detach(&name));
            if let Err(fault) = answer {
                tracing::warn!(OVERFENCE_SESSION = %id, "{}", text(fault));
            }
        }
    }
}

fn unmount(image: &Image) -> Result<(), String> {
    match overlay::unmount(&image.disk).map_err(text)? {
        Unmount::Done | Unmount::NotMounted => Ok(()),
        Unmount::Busy => Err(format!("umount of {}: EBUSY", image.disk.display())),
    }
}

fn in_use(image: &Image, device: &str) -> String {
    format!(
        "/dev/{device} is bound to {}: something keeps its overlay or it mounted, perhaps in \
         another mount namespace, or somebody bound it (`losetup -d /dev/{device}`)",
        image.file.display()
    )
}

/// Waits for the kernel to let go of the loop device; gives it if that took too long.
fn unused(image: &Image) -> Result<Option<String>, String> {
    let until = clock::now().plus(TEARDOWN);
    loop {
        let user = image::used_by(image).map_err(text)?;
        if user.is_none() || clock::now() >= until {
            return Ok(user);
        }
        std::thread::sleep(AGAIN);
    }
}
