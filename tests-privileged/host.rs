//! The place in which one test runs, and how it is cleared away afterwards.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use libtest_mimic::Failed;

/// What a test is given.
pub struct Place {
    /// A fresh directory on the host's disk, removed afterwards.
    pub dir: PathBuf,
    /// A fresh, empty cgroup v2 directory; the test's own process is not in it, everything that
    /// is put into it is killed afterwards.
    pub cgroup: PathBuf,
    /// The `overfence` binary under test.
    pub binary: PathBuf,
}

/// One test: it panics if something does not hold.
pub struct Test {
    pub name: &'static str,
    pub run: fn(&Place),
}

/// Longer than any test should take; a hung one is killed through its cgroup.
const LIMIT: Duration = Duration::from_secs(300);
/// How many times slower than plain hardware the host is; an emulated guest says so.
const PACE: &str = "OVERFENCE_TEST_PACE";
/// How often races are run.
const ROUNDS: &str = "OVERFENCE_ROUNDS";
const CHILD: &str = "OVERFENCE_TEST_CHILD";

/// The binary under test: the one that was built with the suite, unless `OVERFENCE_TEST_BIN` names
/// another. A guest and a container have no build directory, and are given the production binary.
pub fn binary() -> PathBuf {
    std::env::var_os("OVERFENCE_TEST_BIN")
        .map_or_else(|| env!("CARGO_BIN_EXE_overfence").into(), PathBuf::from)
}

/// A span that has to be enough, on this host: for a limit of a test's patience, and for a TTL in
/// which something has to happen. What the product promises is not stretched by it.
pub fn paced(span: Duration) -> Duration {
    let pace = std::env::var(PACE).map_or(1, |text| text.parse().expect("a whole number"));
    span * pace
}

/// How often a race is run: `usual` times, or `OVERFENCE_ROUNDS`.
pub fn rounds(usual: u64) -> u64 {
    std::env::var(ROUNDS).map_or(usual, |text| text.parse().expect("a whole number"))
}

/// The same in seconds, as the command line takes them.
pub fn paced_ttl(seconds: u64) -> String {
    format!("{}s", paced(Duration::from_secs(seconds)).as_secs())
}

/// The name of the test that this process was started to run, if it is such a child.
pub fn child_request() -> Option<String> {
    std::env::var(CHILD).ok()
}

/// Runs one test in this process and ends the process.
pub fn run_child(all: &[(&'static str, Vec<Test>)], name: &str) -> ! {
    let test = all
        .iter()
        .flat_map(|(room, tests)| tests.iter().map(move |t| (format!("{room}::{}", t.name), t)))
        .find(|(full, _)| full == name)
        .map(|(_, t)| t)
        .expect("the parent asks only for tests that exist");
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).expect("unshare the mount namespace");
    nix::mount::mount(
        None::<&str>,
        "/",
        None::<&str>,
        nix::mount::MsFlags::MS_REC | nix::mount::MsFlags::MS_PRIVATE,
        None::<&str>,
    )
    .expect("make mounts private");
    // A production agent's sessions must not be held by this copy.
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
    let ours = |l: &&str| {
        let image = l.contains("/sessions/s-") && l.contains("/disk ") && l.contains(" - ext4 ");
        image || l.contains(" - overlay overfence-")
    };
    for line in mounts.lines().filter(ours) {
        let point = line.split(' ').nth(4).expect("a mount point");
        let _ = nix::mount::umount2(point, nix::mount::MntFlags::MNT_DETACH);
    }
    let place = Place {
        dir: std::env::var_os("OVERFENCE_TEST_DIR").expect("set by the parent").into(),
        cgroup: std::env::var_os("OVERFENCE_TEST_CGROUP").expect("set by the parent").into(),
        binary: binary(),
    };
    (test.run)(&place);
    std::process::exit(0);
}

/// The cgroup2 mount, found by type; this reader is the suite's own.
pub fn cgroup2_root() -> PathBuf {
    let text = std::fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
    text.lines()
        .find(|l| l.contains(" - cgroup2 "))
        .and_then(|l| l.split(' ').nth(4))
        .map(PathBuf::from)
        .expect("no cgroup2 mount: boot with a unified or hybrid hierarchy")
}

/// The cgroup that a test's own process is in. Not by /proc: a container may be shown a part of the
/// hierarchy only.
pub fn own_cgroup() -> PathBuf {
    let play = std::env::var_os("OVERFENCE_TEST_CGROUP").expect("set by the parent");
    Path::new(&play).with_file_name("own")
}

static COUNTER: AtomicU64 = AtomicU64::new(0);

/// The variable that switches the lease gate off.
pub const GATE: &str = "OVERFENCE_FENCE_GATE";
/// Rooms whose tests show what a step of the fence stops by itself, and what it does not: where the
/// kernel refuses every write at once there is nothing to be seen of it.
const WITHOUT_GATE: [&str; 6] = [
    "image::",
    "writers::",
    "seal::",
    "sealed::",
    "kept::who_is_moved_out",
    "kept::a_removed_cgroup",
];

/// Runs the named test in a child and clears everything away.
pub fn run_apart(name: &str) -> Result<(), Failed> {
    let n = COUNTER.fetch_add(1, Ordering::SeqCst);
    let unique = format!("overfence-test-{}-{n}", std::process::id());
    let base =
        std::env::var_os("OVERFENCE_TEST_BASE").map_or_else(std::env::temp_dir, PathBuf::from);
    let dir = base.join(&unique);
    // The test process sits in its own cgroup beside the one it plays with, so that its children
    // are found even if it dies.
    let top = cgroup2_root().join(&unique);
    let (own, play) = (top.join("own"), top.join("play"));
    std::fs::create_dir(&dir)?;
    std::fs::create_dir(&top)?;
    std::fs::create_dir(&own)?;
    std::fs::create_dir(&play)?;
    let outcome = run_in(name, &dir, &own, &play);
    let cleared = clear(&dir, &top);
    outcome.and(cleared)
}

fn run_in(name: &str, dir: &Path, own: &Path, play: &Path) -> Result<(), Failed> {
    let log = dir.with_extension("log");
    let out = std::fs::File::create(&log)?;
    let procs = own.join("cgroup.procs");
    // A shell that starts the suite in its background has it ignore SIGINT.
    let mut child = Command::new("/bin/sh")
        .arg("-c")
        .arg("echo $$ > \"$1\" && shift && exec env --default-signal \"$@\"")
        .arg("sh")
        .arg(&procs)
        .arg(std::env::current_exe()?)
        .env(CHILD, name)
        .env("OVERFENCE_TEST_DIR", dir)
        .env("OVERFENCE_TEST_CGROUP", play)
        .env("RUST_BACKTRACE", "0")
        .envs(WITHOUT_GATE.iter().find(|room| name.starts_with(**room)).map(|_| (GATE, "off")))
        .stdin(Stdio::null())
        .stdout(out.try_clone()?)
        .stderr(out)
        .spawn()?;
    let long = if std::env::var_os(ROUNDS).is_some() { 60 } else { 1 };
    let (begun, limit) = (Instant::now(), paced(LIMIT * long));
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if begun.elapsed() > limit {
            let _ = child.kill();
            let _ = child.wait();
            break None;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let mut text = String::new();
    std::fs::File::open(&log)?.read_to_string(&mut text)?;
    std::fs::remove_file(&log)?;
    match status {
        Some(s) if s.success() => {
            if std::env::var_os("OVERFENCE_TEST_SHOW").is_some() {
                eprint!("{text}");
            }
            Ok(())
        }
        Some(s) => Err(format!("{s}\n{text}").into()),
        None => Err(format!("hung for {limit:?}\n{text}").into()),
    }
}

/// Kills what is left, waits for it to be gone, removes cgroups and directory. Anything that
/// cannot be removed is a failure of the test.
fn clear(dir: &Path, top: &Path) -> Result<(), Failed> {
    std::fs::write(top.join("cgroup.kill"), "1")?;
    let begun = Instant::now();
    while std::fs::read_to_string(top.join("cgroup.events"))?.contains("populated 1") {
        if begun.elapsed() > paced(Duration::from_secs(20)) {
            return Err(format!("{} is still populated", top.display()).into());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    remove_cgroups(top)?;
    remove_v1_namesakes(top)?;
    thaw_images(dir)?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    if let Some(line) = mounts.lines().find(|l| l.contains(&*dir.to_string_lossy())) {
        return Err(format!("a mount was left behind: {line}").into());
    }
    if std::fs::remove_dir_all(dir).is_err() {
        // Immutable files of the test's own making.
        let _ = Command::new("chattr").args(["-R", "-f", "-i", "-a"]).arg(dir).status();
        std::fs::remove_dir_all(dir)?;
    }
    Ok(())
}

/// A file system that is frozen as its last mount goes lives on, and its loop device with it: that is
/// how a test ends which fails at an image in a fence.
fn thaw_images(dir: &Path) -> Result<(), Failed> {
    let begun = Instant::now();
    loop {
        let left = crate::image::loops(dir);
        let Some(device) = left.first().and_then(|line| line.split(' ').next()) else {
            return Ok(());
        };
        if begun.elapsed() > paced(Duration::from_secs(10)) {
            return Err(format!("a loop device was left behind: {left:?}").into());
        }
        let at = dir.join("thaw");
        std::fs::create_dir_all(&at)?;
        let run = |program: &str, args: &[&Path]| {
            Command::new(program).args(args).stderr(Stdio::null()).status()
        };
        if run("mount", &[&Path::new("/dev").join(device), &at])?.success() {
            run("fsfreeze", &[Path::new("-u"), &at])?;
            run("umount", &[&at])?;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// On a hybrid host systemd-nspawn makes the same cgroups in version 1's hierarchies.
fn remove_v1_namesakes(top: &Path) -> std::io::Result<()> {
    let mounts = overfence::kernel::mountinfo::read(None).map_err(std::io::Error::other)?;
    for hierarchy in mounts.iter().filter(|m| m.superblock.is("cgroup")) {
        let namesake = hierarchy.point.join(top.file_name().unwrap_or_default());
        if namesake.is_dir() {
            remove_cgroups(&namesake)?;
        }
    }
    Ok(())
}

pub fn remove_cgroups(dir: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_cgroups(&entry.path())?;
        }
    }
    let begun = Instant::now();
    loop {
        match std::fs::remove_dir(dir) {
            Err(e)
                if e.raw_os_error() == Some(libc::EBUSY)
                    && begun.elapsed() < paced(Duration::from_secs(5)) =>
            {
                std::thread::sleep(Duration::from_millis(2));
            }
            other => return other,
        }
    }
}
