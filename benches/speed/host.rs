//! The place in which one part runs, and how it is cleared away.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{SigSet, Signal};

/// What a part is given.
pub struct Place {
    /// A fresh directory on the host's disk.
    pub dir: PathBuf,
    /// A fresh, empty cgroup.
    pub cgroup: PathBuf,
    /// The `overfence` binary.
    pub binary: PathBuf,
}

const PART: &str = "OVERFENCE_BENCH_PART";
const DIR: &str = "OVERFENCE_BENCH_DIR";
const CGROUP: &str = "OVERFENCE_BENCH_CGROUP";

/// The part that this process was started to run, if it is such a child.
pub fn child_request() -> Option<String> {
    std::env::var(PART).ok()
}

/// In the child: leaves the host's mount namespace.
pub fn enter() -> Place {
    unshare(CloneFlags::CLONE_NEWNS).expect("unshare the mount namespace");
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>).expect("make mounts private");
    let path = |name| PathBuf::from(std::env::var_os(name).expect("set by the parent"));
    Place { dir: path(DIR), cgroup: path(CGROUP), binary: env!("CARGO_BIN_EXE_overfence").into() }
}

/// Gives this process, and what it starts, a host with cgroup v2 alone, as engines want it: the
/// part's own cgroup is the root of it.
pub fn unified(place: &Place) -> Place {
    let host = place.cgroup.join("host");
    fs::create_dir(&host).expect("make a cgroup");
    let own = std::process::id().to_string();
    fs::write(host.join("cgroup.procs"), &own).expect("join a cgroup");
    unshare(CloneFlags::CLONE_NEWCGROUP).expect("unshare the cgroup namespace");
    let (cgroup, none) = (PathBuf::from("/sys/fs/cgroup"), None::<&str>);
    umount2(&cgroup, MntFlags::MNT_DETACH).expect("unmount the host's cgroups");
    let flags = MsFlags::empty();
    mount(Some("cgroup2"), &cgroup, Some("cgroup2"), flags, none).expect("mount cgroup2");
    fs::create_dir(cgroup.join("bench")).expect("make a cgroup");
    fs::write(cgroup.join("bench/cgroup.procs"), &own).expect("join a cgroup");
    Place { dir: place.dir.clone(), cgroup, binary: place.binary.clone() }
}

/// Where the cgroup2 hierarchy is mounted.
pub fn cgroup2_root() -> PathBuf {
    overfence::kernel::cgroup::find_root().expect("no cgroup2 mount")
}

/// Runs a part in a child and clears everything away; whether the part came to its end.
pub fn run_apart(part: &str) -> bool {
    // Short: below it lie UNIX sockets, whose paths end at 107 bytes.
    let name = format!("of-bench-{}", std::process::id());
    let base = std::env::var_os("OVERFENCE_BENCH_BASE").unwrap_or_else(|| "/var/tmp".into());
    let (dir, top) = (Path::new(&base).join(&name), cgroup2_root().join(&name));
    // ^C ends the child, not the clearing: a child starts with nothing blocked.
    let mut interrupts = SigSet::empty();
    interrupts.add(Signal::SIGINT);
    interrupts.thread_block().expect("block SIGINT");
    let outcome = run_in(part, &dir, &top);
    let cleared = clear(&dir, &top);
    for fault in [outcome.as_ref().err(), cleared.as_ref().err()].into_iter().flatten() {
        eprintln!("{part}: {fault}");
    }
    outcome.unwrap_or(false) && cleared.is_ok()
}

fn run_in(part: &str, dir: &Path, top: &Path) -> io::Result<bool> {
    // The child sits beside the cgroup it plays with, so that whatever it starts is found.
    let (own, play) = (top.join("own"), top.join("play"));
    fs::create_dir(dir)?;
    for cgroup in [top, &own, &play] {
        fs::create_dir(cgroup)?;
    }
    let status = Command::new("/bin/sh")
        .args(["-c", "echo $$ > \"$1\" && shift && exec \"$@\"", "sh"])
        .arg(own.join("cgroup.procs"))
        .arg(std::env::current_exe()?)
        .env(PART, part)
        .env(DIR, dir)
        .env(CGROUP, play)
        .stdin(Stdio::null())
        .status()?;
    Ok(status.success())
}

/// Kills what is left and removes cgroups and directory; the mounts died with the namespace.
fn clear(dir: &Path, top: &Path) -> io::Result<()> {
    let begun = Instant::now();
    let patient = || begun.elapsed() < Duration::from_secs(60);
    fs::write(top.join("cgroup.kill"), "1")?;
    while fs::read_to_string(top.join("cgroup.events"))?.contains("populated 1") && patient() {
        std::thread::sleep(Duration::from_millis(2));
    }
    remove_cgroups(top, &patient)?;
    // An overlay's superblock dies a moment after its namespace.
    loop {
        match fs::remove_dir_all(dir) {
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy && patient() => {
                std::thread::sleep(Duration::from_millis(10));
            }
            other => return other,
        }
    }
}

fn remove_cgroups(dir: &Path, patient: &impl Fn() -> bool) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_cgroups(&entry.path(), patient)?;
        }
    }
    loop {
        match fs::remove_dir(dir) {
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy && patient() => {
                std::thread::sleep(Duration::from_millis(2));
            }
            other => return other,
        }
    }
}
