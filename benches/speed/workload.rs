//! A workload in a session beside the same one on a bare overlay: the same binary, the same user,
//! the same file system, turn and turn about.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use overfence::config::Config;

use crate::figures::{Samples, heading, ratio, text};
use crate::host::Place;
use crate::open::mount_overlay;
use crate::rig::Rig;

/// The argument by which this binary is the workload itself.
pub const WORD: &str = "workload-in";
const PAIRS: usize = 8;
const FILES: usize = 20_000;
const A_DIRECTORY: usize = 500;
const SMALL: usize = 1024;
const BLOCK: usize = 1 << 20;
const BLOCKS: usize = 512;
const TTL: Duration = Duration::from_secs(3600);

/// What one run took.
#[derive(Clone, Copy)]
struct Took {
    small: Duration,
    sequential: Duration,
    cpu: Duration,
}

/// The workload: writes, reads and unlinks small files, then one large one; prints its times.
pub fn files(dir: &Path) {
    let begun = Instant::now();
    let name = |i: usize| dir.join(format!("d{}/f{i}", i / A_DIRECTORY));
    for i in (0..FILES).step_by(A_DIRECTORY) {
        fs::create_dir(name(i).parent().unwrap()).unwrap();
    }
    for i in 0..FILES {
        fs::write(name(i), [b'x'; SMALL]).unwrap();
    }
    for i in 0..FILES {
        assert_eq!(fs::read(name(i)).unwrap().len(), SMALL);
    }
    for i in 0..FILES {
        fs::remove_file(name(i)).unwrap();
    }
    for i in (0..FILES).step_by(A_DIRECTORY) {
        fs::remove_dir(name(i).parent().unwrap()).unwrap();
    }
    let small = begun.elapsed();
    let begun = Instant::now();
    let large = dir.join("large");
    let mut file = File::create(&large).unwrap();
    let mut block = vec![b'y'; BLOCK];
    for _ in 0..BLOCKS {
        file.write_all(&block).unwrap();
    }
    drop(file);
    let mut file = File::open(&large).unwrap();
    for _ in 0..BLOCKS {
        file.read_exact(&mut block).unwrap();
    }
    fs::remove_file(&large).unwrap();
    let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
    let cpu = [usage.user_time(), usage.system_time()]
        .iter()
        .map(|t| t.tv_sec() * 1_000_000 + t.tv_usec())
        .sum::<i64>();
    println!("{} {} {cpu}", small.as_micros(), begun.elapsed().as_micros());
}

pub fn run(place: &Place) {
    let user = Config::default().workload;
    let rig = Rig::new(place);
    let opened = rig.open("w", TTL, None);
    let merged = opened.session.merged.path().unwrap();
    let own = |path: &Path| chown(path, Some(user.uid), Some(user.gid)).unwrap();
    let ours = prepare(&merged);
    own(&ours);

    let bare = place.dir.join("bare");
    let lower = place.dir.join("lower");
    for dir in [lower.clone(), bare.join("upper"), bare.join("work"), bare.join("merged")] {
        fs::create_dir_all(dir).unwrap();
    }
    mount_overlay(&lower, &bare);
    let theirs = prepare(&bare.join("merged"));
    own(&theirs);

    let in_session = || {
        let inside = format!("/workspace/{WORK}");
        let mut command = Command::new(&place.binary);
        command
            .args(["session", "exec", &opened.session.id, "--"])
            .args([&format!("{inside}/{TOOL}"), WORD, &inside])
            .env("OVERFENCE_SOCKET", rig.host.dir.join("run/overfence.sock"));
        times(&command.output().unwrap())
    };
    let on_bare = || {
        let mut command = Command::new(theirs.join(TOOL));
        command.arg(WORD).arg(&theirs).uid(user.uid).gid(user.gid);
        times(&command.output().unwrap())
    };
    // Once each to warm what can be warm.
    let _ = (in_session(), on_bare());
    let title = format!(
        "workload in a session beside a bare overlay: {FILES} files of {SMALL} B written, read, \
         unlinked; {} MiB written, read",
        (BLOCKS * BLOCK) >> 20
    );
    heading(&title);
    let mut pairs = Vec::new();
    for i in 0..PAIRS {
        let pair = match i % 2 {
            0 => {
                let session = in_session();
                (session, on_bare())
            }
            _ => {
                let bare = on_bare();
                (in_session(), bare)
            }
        };
        pairs.push(pair);
    }
    for (what, of) in [
        ("small files", (|t| t.small) as fn(Took) -> Duration),
        ("sequential", |t| t.sequential),
        ("CPU time of both", |t| t.cpu),
    ] {
        compare(what, &pairs, of);
    }
}

const WORK: &str = "bench";
const TOOL: &str = "tool";

/// A directory for the workload with this binary in it.
fn prepare(root: &Path) -> PathBuf {
    let dir = root.join(WORK);
    fs::create_dir(&dir).unwrap();
    let tool = dir.join(TOOL);
    fs::copy(std::env::current_exe().unwrap(), &tool).unwrap();
    fs::set_permissions(&tool, fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

fn times(output: &Output) -> Took {
    let said = String::from_utf8_lossy(&output.stdout);
    let all: Vec<_> = said.split_whitespace().filter_map(|n| n.parse().ok()).collect();
    let [small, sequential, cpu] = all[..] else {
        panic!("{}: {said}{}", output.status, String::from_utf8_lossy(&output.stderr));
    };
    let us = Duration::from_micros;
    Took { small: us(small), sequential: us(sequential), cpu: us(cpu) }
}

fn compare(what: &str, pairs: &[(Took, Took)], of: fn(Took) -> Duration) {
    let ours = Samples::new(pairs.iter().map(|(session, _)| of(*session)).collect());
    let theirs = Samples::new(pairs.iter().map(|(_, bare)| of(*bare)).collect());
    let mut ratios: Vec<_> = pairs.iter().map(|(s, b)| ratio(of(*s), of(*b))).collect();
    ratios.sort_by(f64::total_cmp);
    let shown: Vec<_> = ratios.iter().map(|r| format!("{r:.3}")).collect();
    println!(
        "  {what}: n={} pairs, session min {} median {}, bare min {} median {}",
        pairs.len(),
        text(ours.p(0)),
        text(ours.p(50)),
        text(theirs.p(0)),
        text(theirs.p(50)),
    );
    println!(
        "    min/min {:.3}, median/median {:.3}, pair by pair {} (target < 1.02)",
        ratio(ours.p(0), theirs.p(0)),
        ratio(ours.p(50), theirs.p(50)),
        shown.join(" "),
    );
}
