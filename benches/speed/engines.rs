//! Container engines of this part's own: daemons, images, state and cgroups lie in its place and
//! go away with it. No network, no registry: the image is a busybox.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::host::Place;

const PATIENCE: Duration = Duration::from_secs(30);
/// What is the engine's own; limits as they are, since a host may not let root raise them.
const PODMAN: &str = "[containers]\npids_limit = 0\n\
    default_ulimits = [\"nofile=20000:20000\", \"nproc=20000:20000\"]\n\
    [engine]\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"none\"\nlock_type = \"file\"\n";

/// One engine, ready to run containers.
pub struct Engine {
    /// As in the docs.
    pub name: &'static str,
    /// What it calls itself.
    pub version: String,
    /// Stops several containers by one command.
    pub takes_many: bool,
    program: Vec<String>,
    run: Vec<String>,
    pause: &'static [&'static str],
    resume: &'static [&'static str],
    /// Arguments that print a container's pid, and the column it is in where it is a table.
    inspect: &'static [&'static str],
    /// Its API's socket, where pausing is one HTTP request.
    pub socket: Option<PathBuf>,
}

/// A container that runs.
pub struct Container {
    pub id: String,
    pub cgroup: PathBuf,
}

/// Daemons, ended by pid in the reverse of the order in which they were started.
#[derive(Default)]
pub struct Daemons(Vec<Child>);

impl Drop for Daemons {
    fn drop(&mut self) {
        for daemon in self.0.iter_mut().rev() {
            let pid = Pid::from_raw(i32::try_from(daemon.id()).unwrap());
            let _ = kill(pid, Signal::SIGKILL);
            let _ = daemon.wait();
        }
    }
}

/// Leaves the host's network, and hides its `/run` and `/dev/shm`: what an engine has there is its
/// own. Its root file system.
pub fn prepare(place: &Place) -> Result<PathBuf, String> {
    unshare(CloneFlags::CLONE_NEWNET).map_err(|e| format!("unshare the network: {e}"))?;
    for dir in ["/run", "/dev/shm"] {
        let none = None::<&str>;
        nix::mount::mount(Some("tmpfs"), dir, Some("tmpfs"), nix::mount::MsFlags::empty(), none)
            .map_err(|e| format!("tmpfs on {dir}: {e}"))?;
    }
    let root = place.dir.join("rootfs");
    let made = || -> std::io::Result<()> {
        for dir in ["bin", "proc", "sys", "dev", "tmp", "etc"] {
            fs::create_dir_all(root.join(dir))?;
        }
        fs::copy("/bin/busybox", root.join("bin/busybox"))?;
        for name in ["sh", "sleep"] {
            std::os::unix::fs::symlink("busybox", root.join("bin").join(name))?;
        }
        Ok(())
    };
    made().map_err(|e| format!("{}: {e}; install busybox-static", root.display()))?;
    let tar = Command::new("tar").arg("-C").arg(&root).arg("-cf").arg(tar(place)).arg(".").status();
    match tar {
        Ok(status) if status.success() => Ok(root),
        other => Err(format!("tar: {other:?}")),
    }
}

fn tar(place: &Place) -> PathBuf {
    place.dir.join("rootfs.tar")
}

fn words(all: &[&str]) -> Vec<String> {
    all.iter().map(|word| (*word).to_owned()).collect()
}

fn daemon(program: &str, log: &Path, args: &[String]) -> Result<Child, String> {
    let log = fs::File::create(log).map_err(|e| format!("{}: {e}", log.display()))?;
    let err = log.try_clone().map_err(|e| e.to_string())?;
    Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(err)
        .spawn()
        .map_err(|e| format!("{program}: {e}"))
}

/// Waits until a command succeeds; what it then printed.
fn ready(program: &[String], args: &[&str]) -> Result<String, String> {
    let begun = Instant::now();
    loop {
        match said(program, args) {
            Err(why) if begun.elapsed() > PATIENCE => return Err(why),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
            answer => return answer,
        }
    }
}

fn said(program: &[String], args: &[&str]) -> Result<String, String> {
    let mut command = Command::new(&program[0]);
    let out = command
        .args(&program[1..])
        .args(args)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("{}: {e}", program[0]))?;
    match out.status.success() {
        true => Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned()),
        false => Err(format!(
            "{} {args:?}: {} {}",
            program[0],
            out.status,
            String::from_utf8_lossy(&out.stderr).trim()
        )),
    }
}

/// containerd by its own command line, on a root file system without an image.
pub fn containerd(place: &Place, root: &Path, daemons: &mut Daemons) -> Result<Engine, String> {
    let dir = place.dir.join("c");
    fs::create_dir(&dir).map_err(|e| e.to_string())?;
    let (config, socket) = (dir.join("config.toml"), dir.join("sock"));
    let text = format!(
        "version = 2\nroot = {:?}\nstate = {:?}\n\
         disabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n[grpc]\naddress = {socket:?}\n",
        dir.join("root"),
        dir.join("state"),
    );
    fs::write(&config, text).map_err(|e| e.to_string())?;
    let args = ["--config".to_owned(), config.display().to_string()];
    daemons.0.push(daemon("containerd", &dir.join("log"), &args)?);
    let program = words(&["ctr", "-a", &socket.display().to_string()]);
    ready(&program, &["version"])?;
    let root = root.display().to_string();
    Ok(Engine {
        name: "ctr tasks pause",
        version: said(&words(&["containerd"]), &["--version"])?,
        takes_many: false,
        program,
        // Without shares of the processor: a hybrid host has no controllers on v2.
        run: words(&["run", "-d", "--null-io", "--cpu-shares", "0", "--rootfs", &root]),
        pause: &["tasks", "pause"],
        resume: &["tasks", "resume"],
        inspect: &["tasks", "ls"],
        socket: None,
    })
}

/// Docker, on the containerd that [`containerd`] started.
pub fn docker(place: &Place, daemons: &mut Daemons) -> Result<Engine, String> {
    let dir = place.dir.join("d");
    fs::create_dir(&dir).map_err(|e| e.to_string())?;
    let at = |name: &str| dir.join(name).display().to_string();
    let (host, containerd) = (format!("unix://{}", at("sock")), place.dir.join("c/sock"));
    let mut args = words(&["--containerd", &containerd.display().to_string(), "-H", &host]);
    args.extend(words(&["--data-root", &at("data"), "--exec-root", &at("exec")]));
    args.extend(words(&["--pidfile", &at("pid"), "--storage-driver", "overlay2", "--bridge=none"]));
    args.extend(words(&["--exec-opt", "native.cgroupdriver=cgroupfs", "--iptables=false"]));
    args.extend(words(&["--ip6tables=false"]));
    daemons.0.push(daemon("dockerd", &dir.join("log"), &args)?);
    let program = words(&["docker", "-H", &host]);
    ready(&program, &["version"])?;
    said(&program, &["import", &tar(place).display().to_string(), "base"])?;
    Ok(Engine {
        name: "docker pause",
        version: said(&program, &["--version"])?,
        takes_many: true,
        program,
        run: words(&["run", "-d", "--network", "none", "--name"]),
        pause: &["pause"],
        resume: &["unpause"],
        inspect: &["inspect", "-f", "{{.State.Pid}}"],
        socket: Some(dir.join("sock")),
    })
}

/// podman; it has no daemon.
pub fn podman(place: &Place) -> Result<Engine, String> {
    let dir = place.dir.join("p");
    fs::create_dir(&dir).map_err(|e| e.to_string())?;
    let at = |name: &str| dir.join(name).display().to_string();
    fs::write(at("containers.conf"), PODMAN).map_err(|e| e.to_string())?;
    let (conf, tmp) =
        (format!("CONTAINERS_CONF={}", at("containers.conf")), format!("TMPDIR={}", at("")));
    let (root, runroot, state) = (at("root"), at("runroot"), at("tmp"));
    let program = words(&[
        "env",
        &conf,
        &tmp,
        "podman",
        "--root",
        &root,
        "--runroot",
        &runroot,
        "--tmpdir",
        &state,
        "--storage-driver",
        "overlay",
        "--runtime",
        "runc",
    ]);
    said(&program, &["import", "--quiet", &tar(place).display().to_string(), "base"])?;
    Ok(Engine {
        name: "podman pause",
        version: said(&program, &["--version"])?,
        takes_many: true,
        program,
        run: words(&["run", "-d", "--network", "none", "--name"]),
        pause: &["pause"],
        resume: &["unpause"],
        inspect: &["inspect", "-f", "{{.State.Pid}}"],
        socket: None,
    })
}

impl Engine {
    /// Starts a container of so many processes, all asleep.
    pub fn start(&self, id: &str, processes: usize) -> Result<Container, String> {
        let script = format!(
            "i=1; while [ $i -lt {processes} ]; do sleep 1000000 & i=$((i+1)); done; exec sleep 1000000"
        );
        let image = if self.takes_many { &["localhost/base"][..] } else { &[] };
        let image = if self.socket.is_some() { &["base"][..] } else { image };
        let run: Vec<&str> = self.run.iter().map(String::as_str).collect();
        said(&self.program, &[&run, &[id][..], image, &["/bin/sh", "-c", &script]].concat())?;
        let pid = self.pid(id)?;
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).map_err(|e| e.to_string())?;
        let below = text.lines().find_map(|line| line.strip_prefix("0::/"));
        let cgroup = crate::host::cgroup2_root().join(below.ok_or("it is in no cgroup")?);
        let begun = Instant::now();
        while count(&cgroup) < processes {
            if begun.elapsed() > PATIENCE {
                return Err(format!("{} of {processes} processes came up", count(&cgroup)));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Container { id: id.to_owned(), cgroup })
    }

    fn pid(&self, id: &str) -> Result<String, String> {
        if self.takes_many {
            return said(&self.program, &[self.inspect, &[id]].concat());
        }
        let table = said(&self.program, self.inspect)?;
        let row = table.lines().find(|line| line.split_whitespace().next() == Some(id));
        let pid = row.and_then(|line| line.split_whitespace().nth(1));
        pid.map(str::to_owned).ok_or_else(|| format!("no task {id} in {table}"))
    }

    /// The command that stops these.
    pub fn pause(&self, ids: &[&str]) -> Command {
        let mut command = Command::new(&self.program[0]);
        command.args(&self.program[1..]).args(self.pause).args(ids);
        command
    }

    /// Lets these run again.
    pub fn resume(&self, ids: &[&str]) {
        let at_once = if self.takes_many { ids.len() } else { 1 };
        for ids in ids.chunks(at_once.max(1)) {
            said(&self.program, &[self.resume, ids].concat()).unwrap();
        }
    }
}

/// How many processes are in a cgroup.
pub fn count(cgroup: &Path) -> usize {
    fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default().lines().count()
}
