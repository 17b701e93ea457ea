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

mod acts;

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;

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

pub use acts::{Act, Random, act, done, shows};

use self::acts::paths;
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
        let _ = done(&base, &act(&mut random));
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
        // Why something cannot be done differs here and there between an overlay and a plain tree.
        let one = done(&first.target, &act);
        // A directory that a lower layer has is not renamed (redirect_dir=off); one of the upper's is.
        if matches!(act, Act::RenameDir(..)) && one == Err(Some(libc::EXDEV)) {
            continue;
        }
        let other = done(&model, &act);
        assert_eq!(one.is_ok(), other.is_ok(), "seed {seed}, step {step}: {act:?}");
        acts += usize::from(one.is_ok());
        renamed += usize::from(one.is_ok() && matches!(act, Act::RenameDir(..)));
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
        // What is in it may be linked from outside.
        Act::RemoveAll(a) => return walkdir_links(&merged.join(a)),
        // A renamed directory is the upper's own, with all that is in it.
        Act::Dir(_)
        | Act::Symlink(..)
        | Act::Fifo(_)
        | Act::Nameless(..)
        | Act::Device(..)
        | Act::RenameDir(..) => vec![],
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
        read_again: None,
        changed: 0,
        skipped_sockets: 0,
        escaped: Default::default(),
        evidence: serde_json::Value::Null,
    }
}
