//! The place the story happens in: a directory, a cgroup, a mount namespace, an agent and a
//! keeper. Whatever happens, ^C and a panic too, it is cleared away.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops::RangeInclusive;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags};
use nix::sched::CloneFlags;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::signal::unix::{SignalKind, signal};

use super::ask::{Operator, command, installed};
use super::leftover;
use crate::agent::failure::Failure;
use crate::kernel::{cgroup, mountinfo, overlay};
use crate::model::code::Code;

/// Where throwaway directories may be made; the first whose file system carries uppers is taken. In
/// a container that is the volume alone.
pub(super) const BASES: [&str; 6] =
    ["/var/tmp", "/tmp", "/var/lib", "/root", "/run", "/var/lib/overfence"];
pub(super) const NAME: &str = "overfence-demo-";
const BUBBLEWRAP: &str = "/usr/bin/bwrap";
const PAUSE: Duration = Duration::from_millis(2);
const START: Duration = Duration::from_secs(20);
const END: Duration = Duration::from_secs(3);

/// See the module.
pub(super) struct Place {
    /// The throwaway directory.
    pub(super) dir: PathBuf,
    /// The demo's own cgroup.
    pub(super) cgroup: PathBuf,
    /// This binary.
    pub(super) binary: PathBuf,
    socket: PathBuf,
    staff: Vec<(&'static str, Child)>,
    interrupted: Arc<Mutex<Option<Signal>>>,
    /// The writers' TTL. A writer has to start and beat within it, so a host on which the agent took
    /// long to be ready (an emulated one) has a longer one.
    pub(super) ttl: Duration,
    cleared: bool,
    /// Locked: says that the owner of the directory lives.
    _owner: File,
    /// What a killed demo had left, and what became of it.
    pub(super) found: Vec<String>,
}

/// Starting a writer is given ten times as long as the agent took to be ready.
const STARTS: u32 = 10;
const TTL: RangeInclusive<Duration> = Duration::from_secs(2)..=Duration::from_secs(8);

impl Place {
    /// Makes directory, cgroup and mount namespace.
    pub(super) fn make() -> Result<Self, Failure> {
        if !nix::unistd::geteuid().is_root() {
            let message = "the demo mounts, freezes and thaws for real and needs root: use sudo";
            return Err(Failure::new(Code::Denied, message));
        }
        let unsupported = |why: String| Failure::new(Code::Unsupported, why);
        if !installed(BUBBLEWRAP) {
            let message = format!("{BUBBLEWRAP} is missing: install the package bubblewrap");
            return Err(unsupported(message));
        }
        let binary = std::env::current_exe()
            .map_err(|e| unsupported(format!("cannot find this binary: {e}")))?;
        own_mounts().map_err(|e| unsupported(format!("cannot make a mount namespace: {e}")))?;
        let interrupted = listen().map_err(|e| unsupported(format!("cannot watch ^C: {e}")))?;
        let cgroup = own_cgroup().map_err(unsupported)?;
        let found = leftover::clear_all(cgroup.parent().unwrap_or(Path::new("/")));
        let (dir, owner) = own_dir().map_err(unsupported)?;
        let socket = dir.join("run/overfence.sock");
        let (staff, ttl) = (vec![], *TTL.start());
        let place = Self {
            dir,
            cgroup,
            binary,
            socket,
            staff,
            interrupted,
            ttl,
            cleared: false,
            _owner: owner,
            found,
        };
        // From here on the place is cleared by its drop, also when this fails.
        fs::create_dir(&place.cgroup).map_err(|e| {
            unsupported(format!("cannot make the cgroup {}: {e}", place.cgroup.display()))
        })?;
        Ok(place)
    }

    /// Starts agent and keeper; returns when the agent is ready.
    pub(super) fn start(&mut self) -> Result<(), String> {
        let root = cgroup::find_root().map_err(|e| e.to_string())?;
        let below = self.cgroup.strip_prefix(&root).map_err(|e| e.to_string())?;
        let path = |path: PathBuf| match path.into_os_string().into_string() {
            Ok(text) => Ok(toml::Value::String(text)),
            Err(raw) => Err(format!("{} is not UTF-8", Path::new(&raw).display())),
        };
        let config = toml::Table::from_iter([
            ("state_dir".to_owned(), path(self.dir.join("state"))?),
            ("runtime_dir".to_owned(), path(self.dir.join("run"))?),
            ("cgroup".to_owned(), path(below.join("sessions"))?),
        ]);
        let file = self.dir.join("config.toml");
        fs::write(&file, config.to_string())
            .map_err(|e| format!("cannot write {}: {e}", file.display()))?;
        self.hire("agent")?;
        let took = self.until("the agent is ready", START, || {
            Ok(self.operator().ask(&["status"])?.json["ready"].as_bool() == Some(true))
        })?;
        self.ttl = (took * STARTS).clamp(*TTL.start(), *TTL.end());
        self.hire("keeper")
    }

    fn hire(&mut self, verb: &'static str) -> Result<(), String> {
        let log = self.dir.join(verb).with_extension("log");
        let fault = |e: std::io::Error| format!("cannot start `overfence {verb}`: {e}");
        let out = File::create(&log).map_err(fault)?;
        let child = command(&self.binary)
            .arg(verb)
            .arg("--config")
            .arg(self.dir.join("config.toml"))
            .stdin(Stdio::null())
            .stdout(out.try_clone().map_err(fault)?)
            .stderr(out)
            .spawn()
            .map_err(fault)?;
        self.staff.push((verb, child));
        Ok(())
    }

    /// The writers' TTL, as the command line takes it.
    pub(super) fn ttl_words(&self) -> String {
        format!("{}s", self.ttl.as_secs())
    }

    /// The agent's socket.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Whoever asks the agent.
    pub(super) fn operator(&self) -> Operator<'_> {
        Operator { binary: &self.binary, socket: &self.socket }
    }

    /// Waits until `done`; how long that took.
    pub(super) fn until(
        &self,
        what: &str,
        limit: Duration,
        mut done: impl FnMut() -> Result<bool, String>,
    ) -> Result<Duration, String> {
        let begun = Instant::now();
        while !done()? {
            self.works()?;
            if begun.elapsed() > limit {
                return Err(format!("waited {limit:?} in vain until {what}"));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(begun.elapsed())
    }

    /// `Err` when the story was interrupted, or agent or keeper ended.
    pub(super) fn works(&self) -> Result<(), String> {
        if let Some(why) = self.interrupted() {
            return Err(why);
        }
        match self.staff.iter().find(|(_, child)| !alive(child)) {
            None => Ok(()),
            Some((verb, _)) => {
                let log = fs::read_to_string(self.dir.join(verb).with_extension("log"));
                let last = log.unwrap_or_default();
                let last = last.lines().last().unwrap_or("it said nothing").to_owned();
                Err(format!("`overfence {verb}` ended: {last}"))
            }
        }
    }

    /// The signal that came, if one did.
    pub(super) fn interrupted(&self) -> Option<String> {
        let signal = *self.interrupted.lock().unwrap_or_else(PoisonError::into_inner);
        signal.map(|signal| format!("interrupted by {signal}"))
    }

    /// Process ids of agent and keeper.
    pub(super) fn staff(&self) -> BTreeMap<&'static str, u32> {
        self.staff.iter().map(|(verb, child)| (*verb, child.id())).collect()
    }

    /// Ends and removes everything; what could not be.
    pub(super) fn clear(&mut self, keep: bool) -> Vec<String> {
        self.cleared = true;
        let mut left = vec![];
        let mut note = |what: &str, done: Result<(), String>| {
            if let Err(why) = done {
                left.push(format!("{what}: {why}"));
            }
        };
        for (verb, mut child) in self.staff.drain(..) {
            note(&format!("cannot stop the {verb}"), stop(&mut child));
        }
        let name = self.cgroup.display().to_string();
        note(&format!("the cgroup {name} is left"), clear_cgroup(&self.cgroup));
        note("a mount is left", unmount_below(&self.dir));
        if !keep {
            let removed = fs::remove_dir_all(&self.dir).map_err(|e| e.to_string());
            note(&format!("{} is left", self.dir.display()), removed);
        }
        left
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !self.cleared {
            for left in self.clear(false) {
                eprintln!("overfence: {left}");
            }
        }
    }
}

/// Notes the first signal that asks to end. By handlers and not by a mask, which the children
/// would inherit.
fn listen() -> std::io::Result<Arc<Mutex<Option<Signal>>>> {
    let noted = Arc::new(Mutex::new(None));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let within = runtime.enter();
    let mut int = signal(SignalKind::interrupt())?;
    let mut term = signal(SignalKind::terminate())?;
    let mut hup = signal(SignalKind::hangup())?;
    drop(within);
    let note = Arc::clone(&noted);
    std::thread::spawn(move || {
        loop {
            let came = runtime.block_on(async {
                tokio::select! {
                    _ = int.recv() => Signal::SIGINT,
                    _ = term.recv() => Signal::SIGTERM,
                    _ = hup.recv() => Signal::SIGHUP,
                }
            });
            note.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(came);
        }
    });
    Ok(noted)
}

/// Apart from the host's, in both directions: a production agent's sessions must not be held by
/// this copy.
fn own_mounts() -> Result<(), String> {
    let said = |e: nix::Error| e.to_string();
    nix::sched::unshare(CloneFlags::CLONE_NEWNS).map_err(said)?;
    let (none, flags) = (None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE);
    nix::mount::mount(none, "/", none, flags, none).map_err(said)?;
    crate::kernel::ns::drop_sessions().map_err(|e| e.to_string())
}

/// Below the cgroup the demo runs in, so that whatever bounds or ends that reaches the writers.
fn own_cgroup() -> Result<PathBuf, String> {
    let own = cgroup::own().map_err(|e| e.to_string())?;
    Ok(own.join(format!("{NAME}{}", std::process::id())))
}

fn own_dir() -> Result<(PathBuf, File), String> {
    let mut refused = vec![];
    for base in BASES {
        let dir = Path::new(base).join(format!("{NAME}{}", std::process::id()));
        if let Err(e) = fs::DirBuilder::new().mode(0o700).create(&dir) {
            refused.push(format!("{}: {e}", dir.display()));
            continue;
        }
        let owned = leftover::own(&dir).map_err(|e| format!("{}: {e}", dir.display()));
        match overlay::preflight(&dir, &[]).map_err(|e| e.to_string()).and(owned) {
            Ok(owner) => return Ok((dir, owner)),
            Err(why) => refused.push(why),
        }
        let _ = fs::remove_dir_all(&dir);
    }
    Err(format!("no directory here can carry uppers: {}", refused.join("; ")))
}

fn alive(child: &Child) -> bool {
    // A child that ended stays a zombie until it is waited for, which `clear` does.
    let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

fn stop(child: &mut Child) -> Result<(), String> {
    let pid = i32::try_from(child.id()).map_err(|e| e.to_string())?;
    let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
    let until = Instant::now() + END;
    while child.try_wait().map_err(|e| e.to_string())?.is_none() {
        if Instant::now() > until {
            child.kill().and_then(|()| child.wait()).map_err(|e| e.to_string())?;
            return Err("it did not end on SIGTERM and was killed".to_owned());
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

pub(super) fn clear_cgroup(cgroup: &Path) -> Result<(), String> {
    if !cgroup.exists() {
        return Ok(());
    }
    fs::write(cgroup.join("cgroup.kill"), "1").map_err(|e| e.to_string())?;
    let until = Instant::now() + END;
    loop {
        match remove_cgroups(cgroup) {
            // The killed are still on their way out.
            Err(_) if Instant::now() < until => std::thread::sleep(PAUSE),
            done => return done.map_err(|e| e.to_string()),
        }
    }
}

fn remove_cgroups(dir: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_cgroups(&entry.path())?;
        }
    }
    fs::remove_dir(dir)
}

/// Overlays and the pinned namespace; nothing runs any more that could mount another.
fn unmount_below(dir: &Path) -> Result<(), String> {
    let mounts = mountinfo::read(None).map_err(|e| e.to_string())?;
    for mount in mounts.iter().rev().filter(|mount| mount.point.starts_with(dir)) {
        nix::mount::umount2(&mount.point, MntFlags::MNT_DETACH)
            .map_err(|e| format!("{}: {e}", mount.point.display()))?;
    }
    Ok(())
}
