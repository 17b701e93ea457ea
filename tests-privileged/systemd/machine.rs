//! A host with a real systemd, booted in a second by systemd-nspawn: a minimal Debian under an
//! overlay of the test's own, with overfence installed in it as `make install` does. It lives in
//! the test's cgroup and mount namespace and goes away with them.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use serde_json::Value;

use crate::host::{Place, paced};

const AGENT: &str = "overfence-agent.service";
const KEEPER: &str = "overfence-keeper.service";
/// What the machine may take to boot, on a busy host.
const BOOT: Duration = Duration::from_secs(40);

pub struct Machine {
    /// The root of its files, as this process sees it.
    pub root: PathBuf,
    /// Its cgroup2 root, as this process sees it.
    pub cgroups: PathBuf,
    /// Its state directory, as this process sees it.
    pub state: PathBuf,
    cgroup: PathBuf,
    console: PathBuf,
    /// A disk: the root is an overlay, which carries no uppers.
    temporary: PathBuf,
    /// What is active once it is up.
    units: &'static [&'static str],
    nspawn: Option<Child>,
}

/// Controllers with which sessions are limited; enabled down to the machine where this host has
/// them on v2.
pub const CONTROLLERS: [&str; 3] = ["memory", "pids", "cpu"];

impl Machine {
    /// Boots one; ready when the agent is.
    pub fn boot(place: &Place) -> Self {
        Self::prepared(place, |_| {}).started()
    }

    /// Makes one without booting it; `change` does what it likes to its files.
    pub fn prepared(place: &Place, change: impl FnOnce(&Path)) -> Self {
        let mut machine = Self::bare(place);
        install(place, &machine.root);
        change(&machine.root);
        machine.units = &[AGENT, KEEPER];
        machine
    }

    /// Makes one without overfence.
    pub fn bare(place: &Place) -> Self {
        let made = Command::new("bash")
            .args(["-c", include_str!("rootfs.sh")])
            .stderr(Stdio::inherit())
            .output()
            .unwrap();
        assert!(made.status.success(), "no root file system to boot; see above");
        let lower = String::from_utf8(made.stdout).unwrap();
        // What nspawn keeps there of this host goes away with the mount namespace.
        let none = None::<&str>;
        fs::create_dir_all("/run/systemd").unwrap();
        mount(Some("tmpfs"), "/run/systemd", Some("tmpfs"), MsFlags::empty(), none).unwrap();
        let dir = |name: &str| {
            let dir = place.dir.join(name);
            fs::create_dir(&dir).unwrap();
            dir
        };
        let (upper, work, root, state) = (dir("upper"), dir("work"), dir("root"), dir("state"));
        let temporary = dir("temporary");
        let options = format!(
            "lowerdir={},upperdir={},workdir={}",
            lower.trim(),
            upper.display(),
            work.display()
        );
        mount(Some("overlay"), &root, Some("overlay"), MsFlags::empty(), Some(&*options)).unwrap();
        like_a_real_host(&root);
        let cgroup = place.cgroup.join("machine");
        fs::create_dir(&cgroup).unwrap();
        enable_controllers(&cgroup);
        Self {
            root,
            state,
            cgroups: cgroup.join("payload"),
            cgroup,
            console: place.dir.join("console"),
            temporary,
            units: &["multi-user.target"],
            nspawn: None,
        }
    }

    /// Boots it.
    pub fn started(mut self) -> Self {
        self.start();
        self
    }

    /// Boots it, for the first time or after [`Machine::cut_power`].
    pub fn start(&mut self) {
        let console = fs::File::create(&self.console).unwrap();
        let child = Command::new("/bin/sh")
            .args(["-c", "echo $$ > \"$1\" && shift && exec \"$@\"", "sh"])
            .arg(self.cgroup.join("cgroup.procs"))
            .args(["systemd-nspawn", "--quiet", "--machine=m", "--private-network"])
            .args(["--register=no", "--keep-unit", "--capability=all", "--boot"])
            .arg(format!("--directory={}", self.root.display()))
            .arg(format!("--bind={}:/var/lib/overfence", self.state.display()))
            .arg(format!("--bind={}:/var/tmp", self.temporary.display()))
            .env("SYSTEMD_NSPAWN_UNIFIED_HIERARCHY", "1")
            .stdin(Stdio::null())
            .stdout(console.try_clone().unwrap())
            .stderr(console)
            .spawn()
            .unwrap();
        self.nspawn = Some(child);
        self.until_up();
    }

    fn until_up(&mut self) {
        let begun = Instant::now();
        while !self.is_up() {
            let ended = self.nspawn.as_mut().is_none_or(|n| n.try_wait().unwrap().is_some());
            assert!(!ended && begun.elapsed() < paced(BOOT), "it does not boot: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn is_up(&self) -> bool {
        self.leader().is_some()
            && self.run(&[&["systemctl", "is-active"], self.units].concat()).status.success()
    }

    /// Its pid 1, as this host counts.
    fn leader(&self) -> Option<u32> {
        let init = self.cgroups.join("init.scope/cgroup.procs");
        fs::read_to_string(init).ok()?.lines().next()?.parse().ok()
    }

    /// A command in the machine, as an operator gives it there.
    pub fn command(&self, args: &[&str]) -> Command {
        let scope = self.cgroups.join("operator.scope");
        let _ = fs::create_dir(&scope);
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", "echo $$ > \"$1\" && shift && exec \"$@\"", "sh"])
            .arg(scope.join("cgroup.procs"))
            .args(["nsenter", "--all", "--target", &self.leader().unwrap_or(0).to_string()])
            .arg("--")
            .args(args)
            .env_clear()
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::null());
        command
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// What a command that has to succeed says.
    pub fn must(&self, args: &[&str]) -> String {
        let out = self.run(args);
        let (said, complained) =
            (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        assert!(
            out.status.success(),
            "{args:?}: {}\n{said}\n{complained}\n{}",
            out.status,
            self.log()
        );
        said.into_owned()
    }

    /// Exit code and JSON answer of a verb.
    pub fn ask(&self, args: &[&str]) -> (i32, Value) {
        let out = self.run(&[&["overfence", "-o", "json", "--timeout", "120s"], args].concat());
        let answer = serde_json::from_slice(&out.stdout).unwrap_or(Value::Null);
        (out.status.code().unwrap_or(-1), answer)
    }

    /// The JSON answer of a verb that has to succeed.
    pub fn tell(&self, args: &[&str]) -> Value {
        let all = [&["overfence", "-o", "json", "--timeout", "120s"], args].concat();
        serde_json::from_str(&self.must(&all)).unwrap_or(Value::Null)
    }

    /// Waits for a session to fit.
    pub fn until(&self, id: &str, fits: impl Fn(&Value) -> bool) -> Value {
        let begun = Instant::now();
        loop {
            let view = self.tell(&["session", "inspect", id]);
            if fits(&view) {
                return view;
            }
            assert!(
                begun.elapsed() < paced(Duration::from_secs(20)),
                "in vain: {view:#}\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// A property of a unit.
    pub fn show(&self, unit: &str, property: &str) -> String {
        self.must(&["systemctl", "show", "--value", "-p", property, unit]).trim().to_owned()
    }

    pub fn main_pid(&self, unit: &str) -> String {
        self.show(unit, "MainPID")
    }

    /// Waits until a property of a unit fits.
    pub fn until_unit(&self, unit: &str, property: &str, fits: impl Fn(&str) -> bool) -> String {
        let begun = Instant::now();
        loop {
            let value = self.show(unit, property);
            if fits(&value) {
                return value;
            }
            assert!(
                begun.elapsed() < paced(Duration::from_secs(30)),
                "{property} of {unit} is {value:?}\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// A session's cgroup, as this process sees it.
    pub fn cgroup_of(&self, id: &str) -> PathBuf {
        self.cgroups.join("system.slice/overfence-sessions.service").join(id)
    }

    /// Enables controllers for the sessions' cgroups, as limits do; which.
    pub fn enable_for_sessions(&self) -> Vec<&'static str> {
        let slice = self.cgroups.join("system.slice");
        let sessions = slice.join("overfence-sessions.service");
        for dir in [&self.cgroup, &self.cgroups, &slice, &sessions] {
            for controller in at_hand() {
                fs::write(dir.join("cgroup.subtree_control"), format!("+{controller}")).unwrap();
            }
        }
        at_hand()
    }

    /// `systemctl reboot`, and up again.
    pub fn reboot(&mut self) {
        self.run(&["systemctl", "reboot"]);
        let mut nspawn = self.nspawn.take().unwrap();
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = nspawn.try_wait().unwrap() {
                break status;
            }
            if begun.elapsed() > paced(BOOT) {
                self.nspawn = Some(nspawn);
                panic!("it does not go down: {}", self.log());
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        // What nspawn says to whoever runs it when the machine wants to be booted again.
        assert_eq!(status.code(), Some(133), "{}", self.log());
        eprintln!("down after {:?}", begun.elapsed());
        self.emptied();
        self.start();
    }

    /// Everything in it ends at once.
    pub fn cut_power(&mut self) {
        fs::write(self.cgroup.join("cgroup.kill"), "1").unwrap();
        self.nspawn.take().unwrap().wait().unwrap();
        self.emptied();
    }

    /// Removes the cgroups of a machine that is down.
    fn emptied(&self) {
        let events = self.cgroup.join("cgroup.events");
        let begun = Instant::now();
        while fs::read_to_string(&events).unwrap().contains("populated 1") {
            assert!(begun.elapsed() < paced(BOOT), "it does not die");
            std::thread::sleep(Duration::from_millis(2));
        }
        for below in fs::read_dir(&self.cgroup).unwrap().flatten() {
            if below.file_type().unwrap().is_dir() {
                crate::host::remove_cgroups(&below.path()).unwrap();
            }
        }
        for controller in at_hand() {
            // With one enabled below, nobody could be put into it to boot again.
            let _ = fs::write(self.cgroup.join("cgroup.subtree_control"), format!("-{controller}"));
        }
    }

    /// What it said, for a failure.
    pub fn log(&self) -> String {
        let console = fs::read_to_string(&self.console).unwrap_or_default();
        let tail: Vec<_> = console.lines().rev().take(15).collect();
        let tail: Vec<_> = tail.into_iter().rev().collect();
        let journal = self.run(&["journalctl", "--no-pager", "-n", "60", "-o", "short-monotonic"]);
        format!("{}\n{}", tail.join("\n"), String::from_utf8_lossy(&journal.stdout))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::write(self.cgroup.join("cgroup.kill"), "1");
        if let Some(mut nspawn) = self.nspawn.take() {
            let _ = nspawn.wait();
        }
    }
}

/// What is installed, as in the tree: a suite that was brought to a guest has no tree beside it.
const PACKAGING: [(&str, &str); 9] = [
    ("install.sh", include_str!("../../packaging/install.sh")),
    ("generate.sh", include_str!("../../packaging/generate.sh")),
    (
        "systemd/overfence-agent.service",
        include_str!("../../packaging/systemd/overfence-agent.service"),
    ),
    (
        "systemd/overfence-keeper.service",
        include_str!("../../packaging/systemd/overfence-keeper.service"),
    ),
    (
        "systemd/overfence-sessions.service",
        include_str!("../../packaging/systemd/overfence-sessions.service"),
    ),
    ("systemd/overfence.socket", include_str!("../../packaging/systemd/overfence.socket")),
    ("systemd/overfence.sysusers", include_str!("../../packaging/systemd/overfence.sysusers")),
    ("systemd/overfence.tmpfiles", include_str!("../../packaging/systemd/overfence.tmpfiles")),
    (
        "prometheus/overfence.rules.yml",
        include_str!("../../packaging/prometheus/overfence.rules.yml"),
    ),
];

/// What `make install` does: the binary, its units and all that goes with it below `root`.
pub fn put(place: &Place, root: &Path, prefix: &str) {
    let packaging = place.dir.join("packaging");
    for (name, text) in PACKAGING {
        let file = packaging.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, text).unwrap();
        let mode = if name.ends_with(".sh") { 0o755 } else { 0o644 };
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
    }
    let done = Command::new("bash")
        .arg(packaging.join("install.sh"))
        .args([&*place.binary, root])
        .arg(prefix)
        .status()
        .unwrap();
    assert!(done.success());
}

/// Installs a version of the binary in a root and enables its agent.
pub fn install(place: &Place, root: &Path) {
    put(place, root, "/usr");
    let root = format!("--root={}", root.display());
    let enabled = Command::new("systemctl").args([&*root, "--quiet", "enable", AGENT]).status();
    assert!(enabled.unwrap().success());
}

/// On a real host all mounts propagate, and some service has a mount namespace of its own that they
/// propagate to. In a container systemd leaves out the first, and no such service is there.
fn like_a_real_host(root: &Path) {
    let units = root.join("etc/systemd/system");
    let other = "[Unit]\nDefaultDependencies=no\n[Service]\nExecStartPre=/bin/mount --make-rshared /\n\
                 ExecStart=+/usr/bin/unshare --mount --propagation slave /bin/sleep infinity\n";
    fs::write(units.join("other-mounts.service"), other).unwrap();
    drop_in(root, KEEPER, "[Unit]\nWants=other-mounts.service\nAfter=other-mounts.service\n");
    drop_in(root, AGENT, "[Unit]\nWants=other-mounts.service\nAfter=other-mounts.service\n");
}

/// A drop-in for a unit, beside those that are there.
pub fn drop_in(root: &Path, unit: &str, text: &str) {
    let dir = root.join(format!("etc/systemd/system/{unit}.d"));
    fs::create_dir_all(&dir).unwrap();
    let n = fs::read_dir(&dir).unwrap().count();
    fs::write(dir.join(format!("{n}.conf")), text).unwrap();
}

/// The controllers of [`CONTROLLERS`] that this host's cgroup v2 offers.
pub fn offered() -> Vec<&'static str> {
    CONTROLLERS.into_iter().filter(|c| offers(c)).collect()
}

fn offers(controller: &str) -> bool {
    let path = crate::host::cgroup2_root().join("cgroup.controllers");
    fs::read_to_string(path).unwrap().split_whitespace().any(|offered| offered == controller)
}

/// Whatever this host has that makes a cgroup refuse processes of its own beside children: on a
/// hybrid host that is left of the controllers, and enough for this.
fn at_hand() -> Vec<&'static str> {
    CONTROLLERS.into_iter().chain(["hugetlb"]).filter(|c| offers(c)).collect()
}

/// Enables what this host offers for `cgroup`; nspawn and systemd pass it on.
fn enable_controllers(cgroup: &Path) {
    let root = crate::host::cgroup2_root();
    let mut above: Vec<_> =
        cgroup.ancestors().skip(1).take_while(|p| p.starts_with(&root)).collect();
    above.reverse();
    for parent in above {
        for controller in at_hand() {
            fs::write(parent.join("cgroup.subtree_control"), format!("+{controller}")).unwrap();
        }
    }
}
