//! An upper in a file system of its own: a sparse ext4 image on a loop device, so that it has a
//! size, is synced alone, can be stopped as a file system, and goes by one unlink.
//!
//! 1. The image is made by mkfs.ext4 below the session's directory and is mounted there. Upper and
//!    work are inside. The directory is root's (0700), and no workload's tree holds it.
//! 2. The loop device detaches itself when its last user closes it: a crash between any two steps
//!    leaves none, and the mount is its only user.
//! 3. That no loop device is backed by the image is the proof that its superblock died, and with it
//!    that of the overlay, which holds a mount of it.
//! 4. One image never has two loop devices: two superblocks on the same blocks destroy it.
//!
//! ```text
//! <session>/image       the file, 0600, as long as its size and as large on disk as what was written
//! <session>/disk/       where it is mounted: upper/, work/, lost+found/
//! ```
//!
//! Followed: loop(4), mke2fs(8), ext4(5), FIFREEZE and FITHAW of linux/fs.h.

mod device;

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{Mode, Timespec, Timestamps, UTIME_NOW};
use rustix::io::Errno;
use rustix::mount::MountFlags;

pub use device::{Bound, bound, detach};

use super::walk::Dir;
use super::{At as _, Error, Result, clock, mountinfo};
use crate::failpoint;
use crate::model::facts::Proof;
use crate::model::ids::SessionId;
use crate::model::limits::Size;

/// The least that an image is made for, in bytes: below it most is journal and tables.
pub const LEAST: u64 = 16 << 20;
/// ext4 with blocks of 4 KiB, and what host file systems take as one file.
pub const MOST: u64 = 16 << 40;

/// Names of the file and of the mount point in a session's directory.
pub const FILE: &str = "image";
/// See [`FILE`].
pub const DISK: &str = "disk";

impl Image {
    /// The one in a session's directory; touches nothing.
    pub fn below(root: &Path) -> Self {
        Self { file: root.join(FILE), disk: root.join(DISK) }
    }
}

/// Whether an image can be of this size; else why not.
pub fn checked_size(size: Size) -> std::result::Result<Size, String> {
    match (LEAST..=MOST).contains(&size.0) {
        true => Ok(size),
        false => {
            Err(format!("an image of {size} cannot be; choose {} to {}", Size(LEAST), Size(MOST)))
        }
    }
}

/// What mkfs.ext4 is told; `/etc/mke2fs.conf` decides nothing that matters here.
const FEATURES: &str = "none,has_journal,ext_attr,dir_index,filetype,extent,64bit,flex_bg,\
                        sparse_super,large_file,huge_file,dir_nlink,extra_isize,metadata_csum";
/// A new image is a hole: there is nothing to discard and no table to clear.
const EXTENDED: &str = "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0";
/// A journal in which some data cannot be written stops, and says so, as does damage.
const OPTIONS: &str = "noinit_itable,errors=remount-ro,data_err=abort";

/// A file system's file in sysfs by which an error is entered into its count.
const COUNTED: &str = "trigger_fs_error";

/// Where an image is, and where it is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The file.
    pub file: PathBuf,
    /// The directory it is mounted on.
    pub disk: PathBuf,
}

/// Makes an image of `size` bytes with an empty upper and work directory in it, mounted.
///
/// # Errors
/// mkfs.ext4 is missing or refuses, there is no loop device, or the mount is refused.
pub fn make(image: &Image, size: u64) -> Result<()> {
    failpoint::fails("kernel.image.make.before").at("make", &image.file)?;
    let file = std::fs::File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&image.file)
        .at("make", &image.file)?;
    file.set_len(size).at("set the size of", &image.file)?;
    drop(file);
    format(&image.file, size)?;
    failpoint::hit("kernel.image.make.after");
    mount(image)?;
    for (name, mode) in [("upper", 0o755), ("work", 0o700)] {
        let path = image.disk.join(name);
        rustix::fs::mkdir(&path, Mode::from_raw_mode(mode)).at("make", &path)?;
        // The umask must not decide who can enter.
        rustix::fs::chmod(&path, Mode::from_raw_mode(mode)).at("set the mode of", &path)?;
    }
    Ok(())
}

/// MiB of journal: enough for many small files, and a small part of a small image.
fn journal(size: u64) -> &'static str {
    if size >= 512 << 20 { "size=16" } else { "size=4" }
}

fn format(file: &Path, size: u64) -> Result<()> {
    let refused = |reason| Error::Mkfs { path: file.to_owned(), reason };
    let output = mkfs()
        .args(["-q", "-F", "-b", "4096", "-I", "256", "-i", "16384", "-m", "0"])
        .args(["-O", FEATURES, "-E", EXTENDED, "-J", journal(size)])
        .arg(file)
        .output()
        .map_err(|e| refused(format!("mkfs.ext4: {e}; install e2fsprogs")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(refused(format!("mkfs.ext4 ended with {}: {}", output.status, said.trim())))
}

/// The command, without what the environment could tell it.
fn mkfs() -> Command {
    let mut command = Command::new("mkfs.ext4");
    command.env_clear().stdin(Stdio::null());
    command.envs([("PATH", "/usr/sbin:/sbin:/usr/bin:/bin"), ("LC_ALL", "C")]);
    command
}

/// Which mkfs.ext4 there is.
pub fn tool() -> Result<String> {
    let output = mkfs().arg("-V").output().map_err(|e| Error::Mkfs {
        path: "an image".into(),
        reason: format!("mkfs.ext4: {e}; install e2fsprogs"),
    })?;
    let said = String::from_utf8_lossy(&output.stderr);
    Ok(said.lines().next().unwrap_or_default().trim().to_owned())
}

/// Mounts an image, on the loop device it has or else on a new one. What is mounted already stays.
///
/// # Errors
/// There is no loop device, or what is in the file is no file system that can be mounted.
pub fn mount(image: &Image) -> Result<()> {
    if is_mounted(image)? {
        return Ok(());
    }
    failpoint::fails("kernel.image.mount.before").at("mount the image at", &image.disk)?;
    // Held until the mount is its user.
    let device = match device::backed_by(&image.file)? {
        Some(user) => user.device(&image.file)?,
        None => device::attach(&image.file)?,
    };
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
    let options = std::ffi::CString::new(OPTIONS).ok();
    rustix::mount::mount(device.path(), &image.disk, "ext4", flags, options.as_deref())
        .at("mount the image at", &image.disk)?;
    failpoint::hit("kernel.image.mount.after");
    Ok(())
}

/// Whether something is mounted where the image is to be.
pub fn is_mounted(image: &Image) -> Result<bool> {
    let disk = match std::fs::canonicalize(&image.disk) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        answer => answer.at("resolve", &image.disk)?,
    };
    Ok(mountinfo::at(mountinfo::read(None)?, &disk).is_some())
}

/// Whether this is the mount of some session's image: the kernel shows its device as the source, so
/// it is known by where it is.
pub(super) fn is_disk(mount: &mountinfo::Mount) -> bool {
    let mut names = mount.point.iter().rev().map(|name| name.to_str().unwrap_or_default());
    let (last, above) = (names.next(), names.next().unwrap_or_default());
    mount.superblock.is("ext4") && last == Some(DISK) && above.parse::<SessionId>().is_ok()
}

/// The loop device that keeps the image in use, if any does. The kernel lets go of it when the last
/// mount of the image died, wherever that was.
pub fn used_by(image: &Image) -> Result<Option<String>> {
    Ok(device::backed_by(&image.file)?.map(|user| user.bound.name))
}

/// What a freeze of a file system was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frozen {
    /// The answer.
    pub proof: Proof,
    /// It stood frozen before it was asked.
    pub before: bool,
}

/// Stops every writer of the image's file system, in whatever namespace; they wait, uninterruptibly,
/// until [`thaw`]. Syncs it first. One that is frozen already stays so.
pub fn freeze(image: &Image) -> Result<Frozen> {
    let dir = Dir::open(&image.disk)?;
    failpoint::fails("kernel.image.freeze.before").at("freeze the file system at", &image.disk)?;
    let begun = clock::now();
    let before = match device::fifreeze(&dir) {
        Ok(()) => false,
        Err(Errno::BUSY) => true,
        Err(e) => return Err(e).at("freeze the file system at", &image.disk),
    };
    failpoint::hit("kernel.image.freeze.after");
    let proof = Proof {
        asked: "FIFREEZE on the image's file system".to_owned(),
        answer: if before { "EBUSY: it is frozen" } else { "ok" }.to_owned(),
        at: clock::now(),
        took_us: clock::micros_since(begun),
    };
    Ok(Frozen { proof, before })
}

/// Lets writers go on. One that is not frozen is left as it is.
pub fn thaw(image: &Image) -> Result<Proof> {
    let dir = Dir::open(&image.disk)?;
    failpoint::fails("kernel.image.thaw.before").at("thaw the file system at", &image.disk)?;
    let begun = clock::now();
    let answer = match device::fithaw(&dir) {
        Ok(()) => "ok",
        Err(Errno::INVAL) => "EINVAL: it is not frozen",
        Err(e) => return Err(e).at("thaw the file system at", &image.disk),
    };
    failpoint::hit("kernel.image.thaw.after");
    Ok(Proof {
        asked: "FITHAW on the image's file system".to_owned(),
        answer: answer.to_owned(),
        at: clock::now(),
        took_us: clock::micros_since(begun),
    })
}

/// How many errors the image's file system met: what was written before one may be lost.
///
/// Writes a time, since a journal that stopped counts as an error once somebody wants to write, and
/// has everything written out. ext4 counts what it cannot write of its own; of a file's data some
/// kernels (6.1) tell only those who sync, each of them once. That is entered into ext4's count
/// here, which is in the image: no restart and no other mount forgets it. The file system becomes
/// read-only with it.
///
/// # Errors
/// It cannot be asked.
pub fn errors(image: &Image) -> Result<u64> {
    let dir = Dir::open(&image.disk)?;
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let times = Timestamps { last_access: now, last_modification: now };
    match rustix::fs::futimens(&dir, &times) {
        Ok(()) | Err(Errno::ROFS | Errno::IO) => {}
        Err(e) => return Err(e).at("write a time of", &image.disk),
    }
    let Some(user) = device::backed_by(&image.file)? else { return Ok(0) };
    let told = PathBuf::from("/sys/fs/ext4").join(user.bound.name);
    // Before it is asked: an answer that could not be kept would be lost.
    let path = told.join(COUNTED);
    let mut counter = std::fs::File::options().write(true).open(&path).at("open", &path)?;
    let synced =
        rustix::fs::syncfs(&dir).and_then(|()| failpoint::fails("kernel.image.told.before"));
    if let Err(why) = synced {
        counter.write_all(format!("overfence: syncfs: {why}").as_bytes()).at("write", &path)?;
        failpoint::hit("kernel.image.told.after");
    }
    let path = told.join("errors_count");
    let text = std::fs::read_to_string(&path).at("read", &path)?;
    let counted = text.trim().parse::<u64>();
    let counted =
        counted.map_err(|_| Error::Garbled { path, reason: "it is no number".to_owned() })?;
    // The kernel counts an entry a moment later.
    Ok(counted.max(synced.is_err().into()))
}
