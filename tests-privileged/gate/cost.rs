//! What the gate costs: the same work on a gated overlay, on one that it does not know, and on that one
//! while no programs are attached at all. Turn and turn about, medians; said, and judged where that can be.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use overfence::kernel::gate::Gate;
use overfence::kernel::overlay;
use overfence::model::ids::SessionId;
use overfence::model::time::BootNs;

use super::beside::Bare;
use super::{LEASE, own_bpffs, spec};
use crate::host::{Place, paced};

/// How much longer something may take behind the gate.
const TARGET: f64 = 1.03;
/// How much two measurements of the same may differ where that is judged.
const NOISE: f64 = 0.01;
const TURNS: usize = 11;
const FILES: usize = 500;

/// One kind of work on an overlay, and how long it took.
type Work = fn(&Path, &Path) -> Duration;

fn appends(top: &Path, _: &Path) -> Duration {
    let mut file = File::options().append(true).create(true).open(top.join("appends")).unwrap();
    let block = [7; 4096];
    let begun = Instant::now();
    for _ in 0..2_000 {
        file.write_all(&block).unwrap();
    }
    let took = begun.elapsed();
    file.set_len(0).unwrap();
    took
}

fn timed(command: &mut Command) -> Duration {
    let begun = Instant::now();
    let done = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
    let took = begun.elapsed();
    assert!(done.unwrap().success(), "{command:?}");
    took
}

fn untar(top: &Path, archive: &Path) -> Duration {
    let to = top.join("tree");
    std::fs::create_dir(&to).unwrap();
    let took = timed(Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(&to));
    std::fs::remove_dir_all(&to).unwrap();
    took
}

fn git(top: &Path, args: &[&str]) -> Command {
    let mut command = Command::new("git");
    command.arg("-C").arg(top.join("status")).args(args);
    // Neither somebody's settings nor their home.
    command.env("GIT_CONFIG_NOSYSTEM", "1").env("GIT_CONFIG_GLOBAL", "/dev/null");
    command
}

fn git_status(top: &Path, _: &Path) -> Duration {
    let begun = Instant::now();
    for _ in 0..4 {
        timed(&mut git(top, &["status", "--porcelain"]));
    }
    begun.elapsed()
}

/// What `git status` asks of the kernel most: the state of each file.
fn states(top: &Path, _: &Path) -> Duration {
    let begun = Instant::now();
    for _ in 0..4 {
        for n in 0..FILES {
            top.join("status").join(n.to_string()).symlink_metadata().unwrap();
        }
    }
    begun.elapsed()
}

fn median(all: impl Iterator<Item = Duration>) -> f64 {
    let mut all: Vec<_> = all.collect();
    all.sort();
    all[all.len() / 2].as_secs_f64()
}

/// The kernel has programs of ours: another test's, which cost this one something, too.
fn attached() -> bool {
    aya::programs::loaded_programs()
        .filter_map(Result::ok)
        .any(|program| program.name() == b"file_permission")
}

pub fn told(place: &Place) {
    own_bpffs();
    let source = place.dir.join("source");
    std::fs::create_dir(&source).unwrap();
    for n in 0..FILES {
        std::fs::write(source.join(n.to_string()), vec![b'x'; 2048]).unwrap();
    }
    let archive = place.dir.join("archive.tar");
    timed(Command::new("tar").arg("-cf").arg(&archive).arg("-C").arg(&source).arg("."));
    let bare = Bare::new(&place.dir.join("bare"));
    let gated = spec(&place.dir.join("gated"));
    let mounted = overlay::mount(&gated).unwrap();
    let has_git = Command::new("git").arg("--version").stdout(Stdio::null()).status().is_ok();
    for top in [&gated.target, &bare.0.target] {
        timed(Command::new("cp").arg("-r").args([&source, &top.join("status")]));
        if has_git {
            timed(&mut git(top, &["init", "--quiet"]));
            timed(&mut git(top, &["add", "."]));
        }
    }
    let mut all: Vec<(&str, Work)> =
        vec![("appends of 4 KiB", appends), ("untar", untar), ("the state of each file", states)];
    if has_git {
        all.push(("git status", git_status));
    } else {
        println!("no git here: `git status` is not measured, the state of each file stands for it");
    }
    // By work: on the overlay that is gated, on the one that is not, and on that without programs.
    let mut took = vec![[const { vec![] }; 3]; all.len()];
    let mut alone = true;
    for turn in 0..TURNS {
        alone &= !attached();
        for ((_, work), took) in all.iter().zip(&mut took) {
            took[2].push(work(&bare.0.target, &archive));
        }
        let gate = Gate::raise().unwrap();
        let entry = gate.enter(&mounted.root, SessionId::fresh(), LEASE).unwrap();
        entry.open(LEASE, BootNs(u64::MAX));
        assert!(attached(), "its programs are not told from others");
        for ((_, work), took) in all.iter().zip(&mut took) {
            for which in [turn % 2, 1 - turn % 2] {
                let top = [&gated.target, &bare.0.target][which];
                took[which].push(work(top, &archive));
            }
        }
        gate.leave(&entry).unwrap();
        assert!(gate.lower().unwrap());
    }
    let emulated = paced(Duration::from_secs(1)) > Duration::from_secs(1);
    let label = if emulated { " (emulated: the ratios only)" } else { "" };
    for ((what, _), took) in all.iter().zip(&took) {
        let [with, without, none] = [0, 1, 2].map(|which| median(took[which].iter().copied()));
        let half =
            |which: usize, odd: usize| median(took[which].iter().skip(odd).step_by(2).copied());
        let noise = [0, 1].map(|which| (half(which, 0) / half(which, 1) - 1.0).abs());
        let noise = noise.into_iter().fold(0.0, f64::max);
        let (ratio, to_none) = (with / without, with / none);
        let beside = match alone {
            true => format!("{to_none:.3} of without any programs"),
            false => "not measured without any programs: another test has some attached".to_owned(),
        };
        println!(
            "{what}: {ratio:.3} of an overlay beside the gate, {beside}; the same twice differs by \
             {:.1} %{label}",
            noise * 100.0
        );
        if !emulated && what.starts_with("appends") {
            println!("{what}: {:.0} ns more each", (with - without) * 1e9 / 2_000.0);
        }
        match !emulated && noise < NOISE && alone {
            // Without any was measured at another time: it is told, and not judged.
            true => assert!(ratio < TARGET, "{what}: {took:?}"),
            false => assert!(ratio < 2.0, "{what}: {took:?}"),
        }
    }
    drop(mounted);
    overlay::unmount(&gated.target).unwrap();
}
