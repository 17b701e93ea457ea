//! The model: what an overlay shows after any operations is what a plain tree shows after the same;
//! and so it is after the upper went into a bundle, out of it into an upper of another session, and
//! under a mount again. On the host's disk, on ext4 of its own, and on tmpfs.

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
}

pub fn act(random: &mut Random) -> Act {
    let path = random.path();
    match random.below(20) {
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
        _ if random.below(2) == 0 => Act::Attribute(path, random.below(3)),
        _ => Act::Time(path, random.below(1 << 31)),
    }
}

/// Does it; what is not possible there is not done. True if it was.
pub fn done(top: &Path, act: &Act) -> bool {
    let at = |path: &PathBuf| top.join(path);
    let is = |path: &PathBuf, fits: fn(&std::fs::Metadata) -> bool| {
        at(path).symlink_metadata().is_ok_and(|meta| fits(&meta))
    };
    // No operation goes through a symlink, which would mean something else in each tree.
    let real = |path: &PathBuf| {
        path.parent().is_none_or(|above| above.ancestors().all(|part| !top.join(part).is_symlink()))
    };
    let paths = match act {
        Act::Rename(a, b) | Act::Link(a, b) => vec![a, b],
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
        | Act::Time(a, _) => vec![a],
    };
    if !paths.into_iter().all(real) {
        return false;
    }
    match act {
        Act::Dir(p) => std::fs::create_dir(at(p)).is_ok(),
        Act::Write(p, n) => {
            !at(p).is_symlink()
                && !is(p, |m| std::os::unix::fs::FileTypeExt::is_fifo(&m.file_type()))
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
        Act::Time(p, s) => {
            let time = UNIX_EPOCH + Duration::new(*s, 123_456_789);
            is(p, std::fs::Metadata::is_file)
                && File::open(at(p)).is_ok_and(|f| f.set_modified(time).is_ok())
        }
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
        done(&base, &act(&mut random));
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
        let (one, other) = (done(&first.target, &act), done(&model, &act));
        assert_eq!(one, other, "seed {seed}, step {step}: {act:?}");
        acts += usize::from(one);
    }
    assert!(acts > 60, "seed {seed}: only {acts} operations did anything");
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
        Act::Rename(a, b) | Act::Link(a, b) => vec![a, b],
        Act::Write(a, _)
        | Act::Append(a)
        | Act::Hole(a, _)
        | Act::Mode(a, _)
        | Act::Owner(a, _)
        | Act::Attribute(a, _)
        | Act::Time(a, _)
        | Act::Remove(a) => vec![a],
        // What is in it may be linked from outside.
        Act::RemoveAll(a) => {
            return walkdir_links(&merged.join(a));
        }
        Act::Dir(_) | Act::Symlink(..) | Act::Fifo(_) => vec![],
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
