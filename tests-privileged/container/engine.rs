//! podman, with everything of its own in the test's place: images, state, cgroups. It lives in the
//! test's cgroup and mount namespace and goes away with them.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use serde_json::Value;

use crate::host::Place;

/// Files of `packaging/container`, as in the tree: a suite that was brought to a guest has no tree
/// beside it.
const PACKAGING: [(&str, &str); 5] = [
    ("Containerfile", include_str!("../../packaging/container/Containerfile")),
    ("entrypoint", include_str!("../../packaging/container/entrypoint")),
    ("flags", FLAGS),
    ("build", include_str!("../../packaging/container/build")),
    ("run", include_str!("../../packaging/container/run")),
];
const FLAGS: &str = include_str!("../../packaging/container/flags");
/// What is the engine's own and no test changes. Limits as they are: a host may not let root raise
/// them.
const CONFIG: &str = "[containers]\npids_limit = 0\n\
    default_ulimits = [\"nofile=20000:20000\", \"nproc=20000:20000\"]\n\
    [engine]\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"none\"\nlock_type = \"file\"\n";

/// One line of `packaging/container/flags`.
#[derive(Clone, Debug)]
pub struct Flag {
    /// `both`, an engine, or `hybrid`.
    pub place: &'static str,
    /// As the engine takes it.
    pub flag: &'static str,
    /// The feature of `overfence doctor` that is missing without it.
    pub doctor: &'static str,
}

/// The whole file.
pub fn flags() -> Vec<Flag> {
    let lines = FLAGS.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let mut words = line.split_whitespace();
            let mut word = || words.next().unwrap_or_else(|| panic!("a word is missing: {line}"));
            let flag = Flag { place: word(), flag: word(), doctor: word() };
            assert!(words.next().is_some(), "no reason is given: {line}");
            flag
        })
        .collect()
}

/// Those for one engine on a host with cgroup v2 alone.
pub fn flags_for(engine: &str) -> Vec<Flag> {
    flags().into_iter().filter(|f| f.place == "both" || f.place == engine).collect()
}

/// Gives this process, and what it starts, a host with cgroup v2 alone: the test's own cgroup is the
/// root of it.
pub fn unified(place: &Place) -> Place {
    let host = place.cgroup.join("host");
    fs::create_dir(&host).unwrap();
    let own = std::process::id().to_string();
    fs::write(host.join("cgroup.procs"), &own).unwrap();
    unshare(CloneFlags::CLONE_NEWCGROUP).unwrap();
    let (cgroup, none) = (PathBuf::from("/sys/fs/cgroup"), None::<&str>);
    umount2(&cgroup, MntFlags::MNT_DETACH).unwrap();
    mount(Some("cgroup2"), &cgroup, Some("cgroup2"), MsFlags::empty(), none).unwrap();
    // Its root passes controllers on only if no process is left in it.
    fs::create_dir(cgroup.join("tests")).unwrap();
    fs::write(cgroup.join("tests/cgroup.procs"), &own).unwrap();
    Place { dir: place.dir.clone(), cgroup, binary: place.binary.clone() }
}

pub struct Engine {
    program: PathBuf,
    packaging: PathBuf,
    lower: String,
}

impl Engine {
    /// What podman keeps outside its own directories goes away with the mount namespace.
    pub fn new(place: &Place) -> Self {
        for dir in ["/run", "/dev/shm"] {
            mount(Some("tmpfs"), dir, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        }
        let (dir, packaging) = (place.dir.join("podman.d"), place.dir.join("packaging"));
        fs::create_dir(&dir).unwrap();
        fs::create_dir(&packaging).unwrap();
        let write = |path: &Path, text: &str| {
            fs::write(path, text).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        };
        for (name, text) in PACKAGING {
            write(&packaging.join(name), text);
        }
        fs::write(dir.join("containers.conf"), CONFIG).unwrap();
        let program = place.dir.join("podman");
        let text = format!(
            "#!/bin/sh\nexport CONTAINERS_CONF={0}/containers.conf TMPDIR={0}\n\
             exec /usr/bin/podman --root {0}/root --runroot {0}/runroot --tmpdir {0}/tmp \
             --storage-driver overlay --runtime runc \"$@\"\n",
            dir.display()
        );
        write(&program, &text);
        let made = Command::new("bash")
            .args(["-c", include_str!("../systemd/rootfs.sh")])
            .stderr(Stdio::inherit())
            .output()
            .unwrap();
        assert!(made.status.success(), "no root file system; see above");
        let lower = String::from_utf8(made.stdout).unwrap().trim().to_owned();
        Self { program, packaging, lower }
    }

    /// The image `overfence`, as `packaging/container/build` makes it, from a base without a registry.
    pub fn with_image(self, place: &Place) -> Self {
        let base = "tar -C \"$1\" -c . | \"$2\" import --quiet - base";
        must(
            Command::new("bash")
                .args(["-o", "pipefail", "-c", base, "bash", &self.lower])
                .arg(&self.program),
        );
        must(
            Command::new(self.packaging.join("build"))
                .args([&self.program, &place.binary])
                .args(["--quiet", "--isolation=chroot", "--network=host"])
                .args(["--build-arg", "BASE=localhost/base"]),
        );
        self
    }

    /// The engine with these arguments.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(args).stdin(Stdio::null());
        command
    }

    /// What the engine says when it has to succeed.
    pub fn must(&self, args: &[&str]) -> String {
        must(&mut self.command(args))
    }

    /// `packaging/container/run`, without a network to set up.
    pub fn documented(&self, flags: &[&str], command: &[&str]) -> Command {
        let mut run = Command::new(self.packaging.join("run"));
        run.arg(&self.program).arg("--network=none").args(flags).arg("--").args(command);
        run.stdin(Stdio::null());
        run
    }

    /// What `overfence doctor` answers in a container with these flags.
    pub fn doctor(&self, flags: &[&str]) -> Value {
        let all = [&["run", "--rm", "--network=none"], flags, &["overfence"]].concat();
        let command = ["overfence", "doctor", "-o", "json"];
        let out = self.command(&[&all[..], &command].concat()).output().unwrap();
        report(&out)
    }

    /// A root file system for containers that have nothing to do with overfence; not written to.
    pub fn rootfs(&self) -> String {
        format!("{}:O", self.lower)
    }
}

/// A report of `overfence doctor`.
pub fn report(out: &Output) -> Value {
    serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {out:?}"))
}

/// What a command says that has to succeed.
pub fn must(command: &mut Command) -> String {
    let out = command.output().unwrap();
    assert!(
        out.status.success(),
        "{command:?}: {}\n{}\n{}",
        out.status,
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
    String::from_utf8(out.stdout).unwrap().trim().to_owned()
}
