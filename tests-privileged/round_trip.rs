//! The model: what an overlay shows after any operations is what a plain tree shows after the same;
//! and so it is after the upper went into a bundle, out of it into an upper of another session, and
//! under a mount again. On the host's disk, on ext4 of its own, and on tmpfs.

#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{
    FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};

use overfence::kernel::overlay::{self, Spec, Unmount};
use overfence::kernel::walk::Dir;
use overfence::model::head::Head;
use overfence::model::ids::{Generation, HostId, LeaseId, SessionId};
use overfence::upper::bundle::{self, Provenance, Readers};
use overfence::upper::changes::Format;
use overfence::upper::layer::{self, Source, Writers};
use overfence::upper::lowers::Lowers;
use overfence::upper::store::LayerStore;

use rustix::fs::{CWD, FallocateFlags, IFlags, Mode, OFlags};

use crate::host::{Place, Test};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "an_upper_comes_back_as_the_model_on_tmpfs", run: on_tmpfs },
        Test { name: "an_upper_comes_back_as_the_model_on_ext4", run: on_ext4 },
    ]
}

/// Which sequences are tried, and how many; for a longer search `OVERFENCE_TEST_SEED` and
/// `OVERFENCE_TEST_ROUNDS`.
const SEED: u64 = 20_261_130;
const ROUNDS: u64 = 12;
const STEPS: usize = 900;

fn on_tmpfs(place: &Place) {
    let at = place.dir.join("fs");
    std::fs::create_dir(&at).unwrap();
    mount(&["-t", "tmpfs", "-o", "size=256m", "tmpfs"], &at);
    rounds(&at);
    nix::mount::umount(&at).unwrap();
}

fn on_ext4(place: &Place) {
    let (image, at) = (place.dir.join("image"), place.dir.join("fs"));
    File::create(&image).unwrap().set_len(256 << 20).unwrap();
    let made = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image).status().unwrap();
    assert!(made.success());
    std::fs::create_dir(&at).unwrap();
    mount(&["-o", "loop", image.to_str().unwrap()], &at);
    rounds(&at);
    nix::mount::umount(&at).unwrap();
}

fn mount(args: &[&str], at: &Path) {
    assert!(Command::new("mount").args(args).arg(at).status().unwrap().success());
}

fn rounds(at: &Path) {
    let set =
        |name: &str, usual: u64| std::env::var(name).map_or(usual, |text| text.parse().unwrap());
    let from = set("OVERFENCE_TEST_SEED", SEED);
    for seed in from..from + set("OVERFENCE_TEST_ROUNDS", ROUNDS) {
        eprintln!("seed {seed}");
        let dir = at.join(seed.to_string());
        std::fs::create_dir(&dir).unwrap();
        round(&dir, seed);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

/// A small generator of our own: the seed in a message is all that is needed to see it again.
pub struct Random(pub u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }

    /// Few names, so that operations meet.
    fn path(&mut self) -> PathBuf {
        const NAMES: [&str; 5] = ["a", "b", "c", ".wh.x", "n\n\u{e4}"];
        (0..=self.below(3)).map(|_| NAMES[self.below(5) as usize]).collect()
    }
}

/// One operation, to be done to any tree.
#[derive(Clone, Debug)]
pub enum Act {
    Dir(PathBuf),
    Write(PathBuf, u64),
    Append(PathBuf),
    Hole(PathBuf, u64),
    Remove(PathBuf),
    RemoveAll(PathBuf),
    Rename(PathBuf, PathBuf),
    Link(PathBuf, PathBuf),
    Symlink(PathBuf, u64),
    Fifo(PathBuf),
    Mode(PathBuf, u32),
    Owner(PathBuf, u32),
    Attribute(PathBuf, u64),
    Time(PathBuf, u64),
    /// Two files change places.
    Exchange(PathBuf, PathBuf),
    /// Room, to so many bytes and past the end.
    Room(PathBuf, u64),
    /// A hole where the file was.
    Punch(PathBuf, u64),
    /// A file without a name, which is then given one.
    Nameless(PathBuf, u64),
    Bare(PathBuf),
    /// An access control list that lets one more user read, or not.
    List(PathBuf, u8),
    /// A flag of the file's: no time of its last access is kept.
    Flag(PathBuf),
    /// A byte, by a shared mapping.
    Map(PathBuf, u8),
}

pub fn act(random: &mut Random) -> Act {
    let path = random.path();
    match random.below(27) {
        0..=2 => Act::Dir(path),
        3..=6 => Act::Write(path, random.below(20_000)),
        7 => Act::Append(path),
        8 => Act::Hole(path, random.below(1 << 30)),
        9 => Act::Remove(path),
        10..=11 => Act::RemoveAll(path),
        12..=13 => Act::Rename(path, random.path()),
        14 => Act::Link(path, random.path()),
        15 => Act::Symlink(path, random.below(3)),
        16 => Act::Fifo(path),
        17 => Act::Mode(path, 0o600 + random.below(64) as u32),
        18 => Act::Owner(path, random.below(4) as u32),
        20 => Act::Exchange(path, random.path()),
        21 if random.below(2) == 0 => Act::Room(path, 1 + random.below(30_000)),
        21 => Act::Punch(path, 1 + random.below(10_000)),
        22 => Act::Nameless(path, random.below(20_000)),
        23 => Act::Bare(path),
        24 => Act::List(path, random.below(8) as u8),
        25 => Act::Flag(path),
        26 => Act::Map(path, random.below(256) as u8),
        _ if random.below(2) == 0 => Act::Attribute(path, random.below(3)),
        _ => Act::Time(path, random.below(1 << 31)),
    }
}

/// Why something was not done: what the kernel answered, or nothing where it was not asked.
pub type Undone = Option<i32>;

fn errno(e: std::io::Error) -> Undone {
    e.raw_os_error()
}

fn no(e: rustix::io::Errno) -> Undone {
    Some(e.raw_os_error())
}

/// Does it; what would mean something else in another tree is left out.
pub fn done(top: &Path, act: &Act) -> Result<(), Undone> {
    let at = |path: &PathBuf| top.join(path);
    let is = |path: &PathBuf, fits: fn(&std::fs::Metadata) -> bool| {
        at(path).symlink_metadata().is_ok_and(|meta| fits(&meta)).then_some(()).ok_or(None)
    };
    let file = |path: &PathBuf| is(path, std::fs::Metadata::is_file);
    let no_dir =
        |path: &PathBuf| is(path, std::fs::Metadata::is_dir).map_or(Ok(()), |()| Err(None));
    // No operation goes through a symlink, which would mean something else in each tree.
    let real = |path: &PathBuf| {
        path.parent().is_none_or(|above| above.ancestors().all(|part| !top.join(part).is_symlink()))
    };
    if !paths(act).into_iter().all(real) {
        return Err(None);
    }
    match act {
        Act::Dir(p) => std::fs::create_dir(at(p)).map_err(errno),
        Act::Write(p, n) => {
            is(p, |m| m.is_symlink() || m.file_type().is_fifo()).map_or(Ok(()), |()| Err(None))?;
            std::fs::write(at(p), vec![b'x'; *n as usize]).map_err(errno)
        }
        Act::Append(p) => {
            file(p)?;
            let mut file = File::options().append(true).open(at(p)).map_err(errno)?;
            std::io::Write::write_all(&mut file, b"more").map_err(errno)
        }
        Act::Hole(p, n) => {
            file(p).or_else(|_| at(p).symlink_metadata().map_or(Ok(()), |_| Err(None)))?;
            let mut options = File::options();
            let file = options.create(true).truncate(false).write(true).open(at(p));
            let file = file.map_err(errno)?;
            file.set_len(*n + 9).map_err(errno)?;
            file.write_all_at(b"somewhere", *n).map_err(errno)
        }
        Act::Remove(p) => std::fs::remove_file(at(p)).map_err(errno),
        Act::RemoveAll(p) => {
            is(p, std::fs::Metadata::is_dir)?;
            std::fs::remove_dir_all(at(p)).map_err(errno)
        }
        // A directory of a lower layer is not renamed (redirect_dir=off): EXDEV. It is left out.
        Act::Rename(a, b) => {
            no_dir(a)?;
            no_dir(b)?;
            std::fs::rename(at(a), at(b)).map_err(errno)
        }
        Act::Exchange(a, b) => {
            no_dir(a)?;
            no_dir(b)?;
            let flags = rustix::fs::RenameFlags::EXCHANGE;
            rustix::fs::renameat_with(CWD, at(a), CWD, at(b), flags).map_err(no)
        }
        Act::Link(a, b) => {
            file(a)?;
            std::fs::hard_link(at(a), at(b)).map_err(errno)
        }
        Act::Symlink(p, n) => std::os::unix::fs::symlink(format!("to-{n}"), at(p)).map_err(errno),
        Act::Fifo(p) => {
            nix::unistd::mkfifo(&at(p), nix::sys::stat::Mode::S_IRWXU).map_err(|e| Some(e as i32))
        }
        Act::Mode(p, mode) => {
            is(p, |m| !m.is_symlink())?;
            std::fs::set_permissions(at(p), std::fs::Permissions::from_mode(*mode)).map_err(errno)
        }
        Act::Owner(p, id) => {
            std::os::unix::fs::lchown(at(p), Some(*id), Some(id + 1)).map_err(errno)
        }
        Act::Attribute(p, n) => {
            is(p, |m| m.is_file() || m.is_dir())?;
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::lsetxattr(at(p), "user.of", n.to_string().as_bytes(), flags).map_err(no)
        }
        Act::Bare(p) => {
            is(p, |m| m.is_file() || m.is_dir())?;
            rustix::fs::lremovexattr(at(p), "user.of").map_err(no)
        }
        Act::Time(p, s) => {
            file(p)?;
            let time = UNIX_EPOCH + Duration::new(*s, 123_456_789);
            File::open(at(p)).and_then(|f| f.set_modified(time)).map_err(errno)
        }
        Act::Room(p, n) => {
            file(p)?;
            let file = File::options().write(true).open(at(p)).map_err(errno)?;
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, *n).map_err(no)
        }
        Act::Punch(p, n) => {
            file(p)?;
            let file = File::options().write(true).open(at(p)).map_err(errno)?;
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&file, flags, 0, *n).map_err(no)
        }
        Act::Nameless(p, n) => nameless(&at(p), *n),
        Act::List(p, permissions) => {
            is(p, |m| m.is_file() || m.is_dir())?;
            let list = list(*permissions);
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::lsetxattr(at(p), "system.posix_acl_access", &list, flags).map_err(no)
        }
        Act::Flag(p) => {
            file(p)?;
            let file = File::open(at(p)).map_err(errno)?;
            let flags = rustix::fs::ioctl_getflags(&file).map_err(no)?;
            rustix::fs::ioctl_setflags(&file, flags ^ IFlags::NOATIME).map_err(no)
        }
        Act::Map(p, byte) => {
            file(p)?;
            map(&at(p), *byte)
        }
    }
}

/// The names that an operation is about.
fn paths(act: &Act) -> Vec<&PathBuf> {
    match act {
        Act::Rename(a, b) | Act::Link(a, b) | Act::Exchange(a, b) => vec![a, b],
        Act::Dir(a)
        | Act::Write(a, _)
        | Act::Append(a)
        | Act::Hole(a, _)
        | Act::Remove(a)
        | Act::RemoveAll(a)
        | Act::Symlink(a, _)
        | Act::Fifo(a)
        | Act::Mode(a, _)
        | Act::Owner(a, _)
        | Act::Attribute(a, _)
        | Act::Time(a, _)
        | Act::Room(a, _)
        | Act::Punch(a, _)
        | Act::Nameless(a, _)
        | Act::Bare(a)
        | Act::List(a, _)
        | Act::Flag(a)
        | Act::Map(a, _) => vec![a],
    }
}

/// By O_TMPFILE where the overlay has it (not on 6.1), otherwise as any other file.
fn nameless(path: &Path, n: u64) -> Result<(), Undone> {
    let above = path.parent().ok_or(None)?;
    let (flags, mode) = (OFlags::WRONLY | OFlags::TMPFILE, Mode::from_raw_mode(0o640));
    let bytes = vec![b'n'; n as usize];
    match rustix::fs::open(above, flags, mode) {
        Ok(made) => {
            let made = File::from(made);
            made.write_all_at(&bytes, 0).map_err(errno)?;
            let from = format!("/proc/self/fd/{}", made.as_raw_fd());
            let through = rustix::fs::AtFlags::SYMLINK_FOLLOW;
            rustix::fs::linkat(CWD, from, CWD, path, through).map_err(no)
        }
        Err(rustix::io::Errno::OPNOTSUPP) => {
            let mut options = File::options();
            options.write(true).create_new(true).mode(0o640);
            let made = options.open(path).map_err(errno)?;
            made.write_all_at(&bytes, 0).map_err(errno)
        }
        Err(e) => Err(no(e)),
    }
}

/// Owner rw, uid 1 as told, group r, mask rwx, others nothing.
fn list(permissions: u8) -> Vec<u8> {
    let mut list = vec![2, 0, 0, 0];
    let none = u32::MAX;
    for (tag, may, id) in
        [(1u16, 6u16, none), (2, permissions.into(), 1), (4, 4, none), (16, 7, none), (32, 0, none)]
    {
        list.extend(tag.to_le_bytes());
        list.extend(may.to_le_bytes());
        list.extend(id.to_le_bytes());
    }
    list
}

/// Stores a byte at the file's beginning through a shared mapping.
fn map(path: &Path, byte: u8) -> Result<(), Undone> {
    use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};
    let file = File::options().read(true).write(true).open(path).map_err(errno)?;
    // A store behind its end would end us.
    if file.metadata().map_err(errno)?.len() == 0 {
        return Err(None);
    }
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping of a page that the file has; nobody else writes to the file meanwhile.
    unsafe {
        let at = rustix::mm::mmap(std::ptr::null_mut(), 1, prot, MapFlags::SHARED, &file, 0);
        let at = at.map_err(no)?;
        at.cast::<u8>().write_volatile(byte);
        let synced = rustix::mm::msync(at, 1, MsyncFlags::SYNC);
        rustix::mm::munmap(at, 1).map_err(no)?;
        synced.map_err(no)
    }
}

/// What a tree shows: every name with all that a user of it can see, but for what the kernel alone
/// decides. Times of what no operation set are the clock's.
pub fn shows(top: &Path) -> Vec<String> {
    let (mut all, mut todo) = (Vec::new(), vec![PathBuf::new()]);
    while let Some(dir) = todo.pop() {
        for entry in std::fs::read_dir(top.join(&dir)).unwrap() {
            let path = dir.join(entry.unwrap().file_name());
            let full = top.join(&path);
            let meta = full.symlink_metadata().unwrap();
            let set = meta.mtime_nsec() == 123_456_789;
            let time = if meta.is_file() && set { meta.mtime() } else { 0 };
            let content = if meta.is_dir() {
                todo.push(path.clone());
                String::new()
            } else if meta.is_file() {
                // One byte in a gigabyte: its end tells it.
                let file = File::open(&full).unwrap();
                let mut end = [0; 16];
                let tail = meta.len().min(16);
                file.read_exact_at(&mut end[..tail as usize], meta.len() - tail).unwrap();
                let small = (meta.len() < 1 << 16).then(|| std::fs::read(&full).unwrap());
                format!(
                    "{} {end:?} {}",
                    meta.len(),
                    small.map_or(0, |b| b.iter().map(|b| u64::from(*b)).sum())
                )
            } else if meta.is_symlink() {
                std::fs::read_link(&full).unwrap().display().to_string()
            } else {
                String::new()
            };
            let mut value = [0; 8];
            let attribute = rustix::fs::lgetxattr(&full, "user.of", &mut value).unwrap_or(0);
            let links = if meta.is_file() { meta.nlink() } else { 1 };
            all.push(format!(
                "{path:?} {:o} {}:{} {links} {time} {:?} {content}",
                meta.mode(),
                meta.uid(),
                meta.gid(),
                &value[..attribute],
            ));
        }
    }
    all.sort();
    all
}

fn spec(dir: &Path, lower: &Path, name: &str) -> Spec {
    let at = |part: &str| dir.join(format!("{name}-{part}"));
    for part in ["upper", "work", "merged"] {
        std::fs::create_dir(at(part)).unwrap();
    }
    let (upper, work, target) = (at("upper"), at("work"), at("merged"));
    Spec { lowers: vec![lower.to_owned()], upper, work, target, mapped: None }
}

fn unmount(spec: &Spec) {
    assert!(matches!(overlay::unmount(&spec.target).unwrap(), Unmount::Done));
}

fn round(dir: &Path, seed: u64) {
    let mut random = Random(seed);
    // A first layer, and the model's copy of it.
    let (base, model) = (dir.join("base"), dir.join("model"));
    std::fs::create_dir(&base).unwrap();
    for _ in 0..STEPS {
        let _ = done(&base, &act(&mut random));
    }
    let layers = LayerStore::open(&dir.join("layers")).unwrap();
    let capture = |path: &Path| {
        let fd = File::open(path).unwrap();
        let source = Source::Upper(fd.as_fd(), Format::Trusted);
        layer::capture(source, Writers::Frozen, &layers, &|| false).unwrap().diff_id
    };
    let lower = layers.ensure_tree(capture(&base)).unwrap();
    let copied =
        Command::new("cp").arg("-a").arg("--preserve=all").arg(&lower).arg(&model).status();
    assert!(copied.unwrap().success());

    let first = spec(dir, &lower, "first");
    drop(overlay::mount(&first).unwrap());
    assert_eq!(shows(&first.target), shows(&model), "seed {seed}: before anything was done");
    // Writing to one name of a lower file breaks its link there, and not in a plain tree: names that
    // the first layer links are kept out of the operations by giving the model's a file of its own.
    let mut acts = 0;
    for step in 0..STEPS {
        let act = act(&mut random);
        if touches_a_link(&first.target, &lower, &act) {
            continue;
        }
        // Why something cannot be done differs here and there between an overlay and a plain tree.
        let (one, other) = (done(&first.target, &act), done(&model, &act));
        assert_eq!(one.is_ok(), other.is_ok(), "seed {seed}, step {step}: {act:?}");
        acts += usize::from(one.is_ok());
    }
    assert!(acts > 60, "seed {seed}: only {acts} operations did anything");
    let wanted = shows(&model);
    same(&shows(&first.target), &wanted, seed, "the overlay");
    unmount(&first);

    // Into a bundle, and out of it into another upper.
    let upper = Dir::open(&first.upper).unwrap();
    let source = Source::Upper(upper.as_fd(), Format::Trusted);
    let below = Lowers::new(vec![Dir::open(&lower).unwrap()]);
    let captured =
        layer::capture_told(source, Some(below), Writers::Frozen, &layers, &|| false).unwrap();
    let path = dir.join("bundle");
    bundle::export(&layers, captured.diff_id, &provenance(), &path, Readers::Owner, &|| false)
        .unwrap();
    bundle::verify(&path, &|| false).unwrap();
    let second = spec(dir, &lower, "second");
    let seeded = Dir::open(&second.upper).unwrap();
    bundle::unpack_into(&path, seeded.as_fd(), &|| false).unwrap();
    drop(overlay::mount(&second).unwrap());
    same(&shows(&second.target), &wanted, seed, "the bundle applied");
    unmount(&second);

    // As a layer of its own on top of the first.
    let published = layers.ensure_tree(capture(&second.upper)).unwrap();
    let mut third = spec(dir, &lower, "third");
    third.lowers.push(published);
    drop(overlay::mount(&third).unwrap());
    same(&shows(&third.target), &wanted, seed, "the bundle published");
    unmount(&third);
}

/// Whether an operation writes to a file that has several names in the lower layer.
fn touches_a_link(merged: &Path, lower: &Path, act: &Act) -> bool {
    let paths = match act {
        // What is in it may be linked from outside.
        Act::RemoveAll(a) => return walkdir_links(&merged.join(a)),
        Act::Dir(_) | Act::Symlink(..) | Act::Fifo(_) | Act::Nameless(..) => vec![],
        other => paths(other),
    };
    paths.into_iter().any(|path| {
        let links = |top: &Path| {
            let meta = top.join(path).symlink_metadata();
            meta.is_ok_and(|meta| meta.is_file() && meta.nlink() > 1)
        };
        links(lower) || links(merged) && lower.join(path).symlink_metadata().is_ok()
    })
}

fn walkdir_links(top: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(top) else { return false };
    entries.flatten().any(|entry| {
        let meta = entry.path().symlink_metadata();
        meta.is_ok_and(|meta| match meta.is_dir() {
            true => walkdir_links(&entry.path()),
            false => meta.is_file() && meta.nlink() > 1,
        })
    })
}

fn same(seen: &[String], wanted: &[String], seed: u64, what: &str) {
    for line in seen.iter().filter(|line| !wanted.contains(line)) {
        eprintln!("{what} shows        {line}");
    }
    for line in wanted.iter().filter(|line| !seen.contains(line)) {
        eprintln!("the model shows {line}");
    }
    assert!(seen == wanted, "seed {seed}: {what} is not the model");
}

fn provenance() -> Provenance {
    Provenance {
        workspace: "w".parse().unwrap(),
        session: SessionId::from_u128(1),
        lease: LeaseId::from_u128(2),
        generation: Generation(1),
        host: HostId::from_u128(3),
        base: Head(vec![]),
        expected: Default::default(),
        reason: "test".to_owned(),
        opened_at: jiff::Timestamp::UNIX_EPOCH,
        lease_ended_at: None,
        exported_at: jiff::Timestamp::UNIX_EPOCH,
        statement: bundle::STATEMENT.to_owned(),
        stable: true,
        escaped: Default::default(),
        evidence: serde_json::Value::Null,
    }
}
