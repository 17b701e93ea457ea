//! The model: what an overlay shows after any operations is what a plain tree shows after the same;
//! and so it is after the upper went into a bundle, out of it into an upper of another session, and
//! under a mount again. On the host's disk, on ext4 of its own, and on tmpfs.

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
use overfence::upper::store::LayerStore;

pub use acts::{Act, Random, act, done, shows};

use self::acts::paths;
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
