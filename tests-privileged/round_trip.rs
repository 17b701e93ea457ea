//! The model: what an overlay shows after any operations is what a plain tree shows after the same;
//! and so it is after the upper went into a bundle, out of it into an upper of another session, and
//! under a mount again. On tmpfs, and on ext4, xfs and btrfs of its own.
//!
//! Which sequences are tried, and how many: for a longer search `OVERFENCE_TEST_SEED` and
//! `OVERFENCE_ROUNDS`. A round does some 500 operations on each file system:
//!
//! ```text
//! OVERFENCE_ROUNDS=500 cargo test --release --locked --test privileged -- --nocapture round_trip::
//! ```

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
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
use overfence::upper::print::{self, Printer};
use overfence::upper::store::LayerStore;

use crate::host::{Place, Test};
use crate::reflink::{disk, make};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "an_upper_comes_back_as_the_model_on_tmpfs", run: on_tmpfs },
        Test { name: "an_upper_comes_back_as_the_model_on_ext4", run: |p| on_disk(p, "ext4") },
        Test { name: "an_upper_comes_back_as_the_model_on_xfs", run: |p| on_disk(p, "xfs") },
        Test { name: "an_upper_comes_back_as_the_model_on_btrfs", run: |p| on_disk(p, "btrfs") },
    ]
}

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

fn on_disk(place: &Place, kind: &str) {
    let at = disk(place, "fs", make(kind), 512 << 20);
    rounds(&at);
    nix::mount::umount(&at).unwrap();
}

fn mount(args: &[&str], at: &Path) {
    assert!(Command::new("mount").args(args).arg(at).status().unwrap().success());
}

fn rounds(at: &Path) {
    let from = std::env::var("OVERFENCE_TEST_SEED").map_or(SEED, |text| text.parse().unwrap());
    let mut acts = 0;
    for seed in from..from + crate::host::rounds(ROUNDS) {
        println!("seed {seed}, {acts} operations before it");
        let dir = at.join(seed.to_string());
        std::fs::create_dir(&dir).unwrap();
        acts += round(&dir, seed);
        std::fs::remove_dir_all(&dir).unwrap();
    }
    println!("{acts} operations");
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
    Device(PathBuf, u32),
    Capability(PathBuf),
    Acl(PathBuf, u32),
    RenameDir(PathBuf, PathBuf),
}

pub fn act(random: &mut Random) -> Act {
    let path = random.path();
    match random.below(24) {
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
        19 => Act::Device(path, 1 + random.below(9) as u32),
        20 => Act::Capability(path),
        21 => Act::Acl(path, random.below(8) as u32),
        22 => Act::RenameDir(path, random.path()),
        _ if random.below(2) == 0 => Act::Attribute(path, random.below(3)),
        _ => Act::Time(path, random.below(1 << 31)),
    }
}

/// No operation goes through a symlink, which would mean something else in each tree.
fn real(top: &Path, path: &Path) -> bool {
    path.parent().is_none_or(|above| above.ancestors().all(|part| !top.join(part).is_symlink()))
}

/// Does it; what is not possible there is not done. True if it was.
pub fn done(top: &Path, act: &Act) -> bool {
    let at = |path: &PathBuf| top.join(path);
    let is = |path: &PathBuf, fits: fn(&std::fs::Metadata) -> bool| {
        at(path).symlink_metadata().is_ok_and(|meta| fits(&meta))
    };
    let paths = match act {
        Act::Rename(a, b) | Act::RenameDir(a, b) | Act::Link(a, b) => vec![a, b],
        Act::Device(a, _)
        | Act::Capability(a)
        | Act::Acl(a, _)
        | Act::Dir(a)
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
        | Act::Time(a, _) => vec![a],
    };
    if !paths.into_iter().all(|path| real(top, path)) {
        return false;
    }
    match act {
        Act::Dir(p) => std::fs::create_dir(at(p)).is_ok(),
        Act::Write(p, n) => {
            !at(p).is_symlink()
                && !is(p, |m| !m.is_file() && !m.is_dir())
                && std::fs::write(at(p), vec![b'x'; *n as usize]).is_ok()
        }
        Act::Append(p) => {
            is(p, std::fs::Metadata::is_file)
                && File::options()
                    .append(true)
                    .open(at(p))
                    .is_ok_and(|mut f| std::io::Write::write_all(&mut f, b"more").is_ok())
        }
        Act::Hole(p, n) => {
            (is(p, std::fs::Metadata::is_file) || at(p).symlink_metadata().is_err())
                && File::options().create(true).truncate(false).write(true).open(at(p)).is_ok_and(
                    |f| f.set_len(*n + 9).is_ok() && f.write_all_at(b"somewhere", *n).is_ok(),
                )
        }
        Act::Remove(p) => std::fs::remove_file(at(p)).is_ok(),
        Act::RemoveAll(p) => {
            is(p, std::fs::Metadata::is_dir) && std::fs::remove_dir_all(at(p)).is_ok()
        }
        // A directory of a lower layer is not renamed (redirect_dir=off): EXDEV. It is left out.
        Act::Rename(a, b) => {
            !is(a, std::fs::Metadata::is_dir)
                && !is(b, std::fs::Metadata::is_dir)
                && std::fs::rename(at(a), at(b)).is_ok()
        }
        Act::Link(a, b) => {
            is(a, std::fs::Metadata::is_file) && std::fs::hard_link(at(a), at(b)).is_ok()
        }
        Act::Symlink(p, n) => std::os::unix::fs::symlink(format!("to-{n}"), at(p)).is_ok(),
        Act::Fifo(p) => nix::unistd::mkfifo(&at(p), nix::sys::stat::Mode::S_IRWXU).is_ok(),
        Act::Mode(p, mode) => {
            at(p).symlink_metadata().is_ok_and(|m| !m.is_symlink())
                && std::fs::set_permissions(at(p), std::fs::Permissions::from_mode(*mode)).is_ok()
        }
        Act::Owner(p, id) => std::os::unix::fs::lchown(at(p), Some(*id), Some(id + 1)).is_ok(),
        Act::Attribute(p, n) => {
            let flags = rustix::fs::XattrFlags::empty();
            at(p).symlink_metadata().is_ok_and(|m| m.is_file() || m.is_dir())
                && rustix::fs::lsetxattr(at(p), "user.of", n.to_string().as_bytes(), flags).is_ok()
        }
        Act::Device(p, minor) => {
            // Of the numbers that no driver has.
            let device = nix::sys::stat::makedev(240, u64::from(*minor));
            let kind = nix::sys::stat::SFlag::S_IFCHR;
            nix::sys::stat::mknod(&at(p), kind, nix::sys::stat::Mode::S_IRUSR, device).is_ok()
        }
        Act::Capability(p) => {
            // Revision 2, effective: cap_net_raw permitted.
            let mut value = [0; 20];
            (value[0], value[3], value[5]) = (1, 2, 0x20);
            is(p, std::fs::Metadata::is_file) && set(&at(p), CAPABILITY, &value)
        }
        Act::Acl(p, perm) => {
            let fits = |meta: &std::fs::Metadata| meta.is_file() || meta.is_dir();
            is(p, fits) && set(&at(p), ACL, &acl(*perm as u16))
        }
        Act::RenameDir(a, b) => moved(top, a, b).is_ok(),
        Act::Time(p, s) => {
            let time = UNIX_EPOCH + Duration::new(*s, 123_456_789);
            is(p, std::fs::Metadata::is_file)
                && File::open(at(p)).is_ok_and(|f| f.set_modified(time).is_ok())
        }
    }
}

const CAPABILITY: &str = "security.capability";
const ACL: &str = "system.posix_acl_access";

fn set(path: &Path, name: &str, value: &[u8]) -> bool {
    rustix::fs::lsetxattr(path, name, value, rustix::fs::XattrFlags::empty()).is_ok()
}

/// Two entries more than a mode has: user 7 and the mask. linux/posix_acl_xattr.h, version 2.
fn acl(perm: u16) -> Vec<u8> {
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in [
        (1u16, 6u16, u32::MAX),
        (2, perm, 7),
        (4, 4, u32::MAX),
        (16, 7, u32::MAX),
        (32, 0, u32::MAX),
    ] {
        bytes.extend([tag.to_le_bytes(), perm.to_le_bytes()].concat());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

/// Renames a directory.
fn moved(top: &Path, from: &Path, to: &Path) -> std::io::Result<()> {
    let meta = top.join(from).symlink_metadata()?;
    if !meta.is_dir() || from == to {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    std::fs::rename(top.join(from), top.join(to))
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
            let attributes = ["user.of", CAPABILITY, ACL].map(|name| {
                let mut value = [0; 64];
                let length = rustix::fs::lgetxattr(&full, name, &mut value).unwrap_or(0);
                hex::encode(&value[..length])
            });
            let links = if meta.is_file() { meta.nlink() } else { 1 };
            all.push(format!(
                "{path:?} {:o} {}:{} {} {links} {time} {attributes:?} {content}",
                meta.mode(),
                meta.uid(),
                meta.gid(),
                meta.rdev(),
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

/// Returns how many operations did something.
fn round(dir: &Path, seed: u64) -> usize {
    let mut random = Random(seed);
    // A first layer, and the model's copy of it.
    let (base, model) = (dir.join("base"), dir.join("model"));
    std::fs::create_dir(&base).unwrap();
    for _ in 0..STEPS {
        done(&base, &act(&mut random));
    }
    let layers = LayerStore::open(&dir.join("layers")).unwrap();
    let capture = |path: &Path| {
        let fd = File::open(path).unwrap();
        let source = Source::Upper(fd.as_fd(), Format::Trusted);
        layer::capture(source, Writers::Frozen, &layers, &|| false).unwrap().diff_id
    };
    let lower = layers.ensure_tree(capture(&base), &|| false).unwrap();
    same(&shows(&lower), &shows(&base), seed, "the first layer");
    let copied =
        Command::new("cp").arg("-a").arg("--preserve=all").arg(&lower).arg(&model).status();
    assert!(copied.unwrap().success());

    let first = spec(dir, &lower, "first");
    drop(overlay::mount(&first).unwrap());
    assert_eq!(shows(&first.target), shows(&model), "seed {seed}: before anything was done");
    // Writing to one name of a lower file breaks its link there, and not in a plain tree: names that
    // the first layer links are kept out of the operations by giving the model's a file of its own.
    let (mut acts, mut renamed) = (0, 0);
    for step in 0..STEPS {
        let act = act(&mut random);
        if touches_a_link(&first.target, &lower, &act) {
            continue;
        }
        let one = match &act {
            // A directory that a lower layer has is not renamed (redirect_dir=off); one of the upper's is.
            Act::RenameDir(from, to) if real(&first.target, from) && real(&first.target, to) => {
                match moved(&first.target, from, to) {
                    Err(e) if e.kind() == std::io::ErrorKind::CrossesDevices => continue,
                    answer => answer.is_ok(),
                }
            }
            act => done(&first.target, act),
        };
        let other = done(&model, &act);
        renamed += usize::from(one && matches!(act, Act::RenameDir(..)));
        assert_eq!(one, other, "seed {seed}, step {step}: {act:?}");
        acts += usize::from(one);
    }
    assert!(acts > 60, "seed {seed}: only {acts} operations did anything");
    println!("{acts} operations, {renamed} directories renamed");
    let wanted = shows(&model);
    same(&shows(&first.target), &wanted, seed, "the overlay");
    unmount(&first);

    // Into a bundle, and out of it into another upper.
    let upper = Dir::open(&first.upper).unwrap();
    let source = Source::Upper(upper.as_fd(), Format::Trusted);
    let below = Lowers::new(vec![Dir::open(&lower).unwrap()]);
    let print = print::take(&first.upper, &|| false).unwrap();
    let mut printer = Printer::new(Some(&print));
    let (frozen, on) = (Writers::Frozen, &|| false);
    let captured =
        layer::capture_told(source, Some(below), &mut printer, frozen, &layers, on).unwrap();
    assert_eq!(printer.compared(Some(&print)), None, "seed {seed}: a capture's print is another");
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
    let published = layers.ensure_tree(capture(&second.upper), &|| false).unwrap();
    let mut third = spec(dir, &lower, "third");
    third.lowers.push(published);
    drop(overlay::mount(&third).unwrap());
    same(&shows(&third.target), &wanted, seed, "the bundle published");
    unmount(&third);
    acts
}

/// Whether an operation writes to a file that has several names in the lower layer.
fn touches_a_link(merged: &Path, lower: &Path, act: &Act) -> bool {
    let paths = match act {
        Act::Rename(a, b) | Act::Link(a, b) => vec![a, b],
        Act::Write(a, _)
        | Act::Append(a)
        | Act::Hole(a, _)
        | Act::Mode(a, _)
        | Act::Owner(a, _)
        | Act::Attribute(a, _)
        | Act::Time(a, _)
        | Act::Capability(a)
        | Act::Acl(a, _)
        | Act::Remove(a) => vec![a],
        // What is in it may be linked from outside.
        Act::RemoveAll(a) => {
            return walkdir_links(&merged.join(a));
        }
        // A renamed directory is the upper's own, with all that is in it.
        Act::Dir(_) | Act::Symlink(..) | Act::Fifo(_) | Act::Device(..) | Act::RenameDir(..) => {
            vec![]
        }
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
        read_again: None,
        changed: 0,
        skipped_sockets: 0,
        escaped: Default::default(),
        evidence: serde_json::Value::Null,
    }
}
