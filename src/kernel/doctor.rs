//! Asks the running kernel for each feature by using it: versions lie, backports exist, and
//! containers refuse what the kernel has.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use caps::{CapSet, Capability};
use serde::Serialize;

use super::cgroup::{self, Cgroup, Outcome};
use super::gone::{self, Gone, Probe, UnmountWatch};
use super::idmap::{self, IdMap};
use super::image::{self, Image};
use super::limits;
use super::overlay::{self, ReadOnly, Spec, Style};
use super::walk::Dir;
use super::{At as _, Error, Result, clock, mountinfo, ns};
use crate::model::ids::SessionId;

/// What the kernel answered for one feature.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Answer {
    /// Its name; stable.
    pub feature: &'static str,
    /// Whether overfence cannot work without it.
    pub needed: bool,
    /// Whether it is there.
    pub ok: bool,
    /// What was seen, or why not.
    pub detail: String,
}

/// What a session's directories are shown as in the probes.
const MAP: IdMap = IdMap { base: 100_000, count: 65536 };

/// Tries everything. `state` is the directory where sessions will live, `cgroups` one in which a
/// cgroup can be made. What is made is removed again; mounts are made in a namespace apart.
pub fn ask(state: &Path, cgroups: &Path) -> Vec<Answer> {
    let mut report = Report(Vec::new());
    report.fact("kernel", true, Ok(kernel()));
    report.fact("capabilities", true, capabilities());
    report.fact("real-time", false, real_time());
    report.fact("cgroup2", true, told(cgroup2()));
    report.fact("nsdelegate", false, told(nsdelegate()));
    report.fact("cgroup-freeze", true, told(freezer(cgroups)));
    for (feature, controller) in
        [("limit-memory", "memory"), ("limit-pids", "pids"), ("limit-cpu", "cpu")]
    {
        report.fact(feature, false, told(limit(controller)));
    }
    report.fact("openat2", true, told(openat2()));
    report.fact("user-namespace", true, told(user_namespace()));
    report.fact("state-directory", true, told(state_directory(state)));
    // On a thread of its own, whose namespace ends with it: nothing stays mounted.
    std::thread::scope(|scope| {
        let _ = scope.spawn(|| report.mounts(state)).join();
    });
    report.fact("bpf-lsm", false, bpf_lsm());
    report.fact("lease-gate", false, lease_gate());
    report.fact("bubblewrap", true, bubblewrap());
    report.0
}

/// Whether room is held back in the state directory for a full disk: `wanted` bytes, 0 for none.
pub fn reserve(state: &Path, file: &Path, wanted: u64) -> Answer {
    let seen = || -> Seen {
        let why = |e: rustix::io::Errno| e.to_string();
        if wanted == 0 {
            return Err("switched off (reserve_mib = 0): a full disk stops records".to_owned());
        }
        let free = rustix::fs::statvfs(state).map(|s| s.f_bfree * s.f_frsize).map_err(why)?;
        let held = match rustix::fs::lstat(file) {
            Ok(stat) => stat.st_blocks.cast_unsigned() * 512,
            Err(rustix::io::Errno::NOENT) => 0,
            Err(e) => return Err(why(e)),
        };
        let text = format!("{held} of {wanted} bytes held back, {free} free");
        match held >= wanted {
            true => Ok(text),
            false => {
                Err(format!("{text}: no agent ran yet, or the disk was full; free some space"))
            }
        }
    };
    let answer = seen();
    let (ok, detail) = (answer.is_ok(), answer.unwrap_or_else(|why| why));
    Answer { feature: "state-reserve", needed: false, ok, detail }
}

/// What is in force for this process and can refuse what the kernel has, as in a container, and how
/// engines are told to leave it out.
pub fn restraints() -> Vec<String> {
    let mut found = vec![];
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let filter = status.lines().find_map(|line| line.strip_prefix("Seccomp:"));
    if filter.is_some_and(|mode| mode.trim() != "0") {
        found.push("a seccomp filter (docker: --security-opt seccomp=unconfined)".to_owned());
    }
    let profile = std::fs::read_to_string("/proc/self/attr/current").unwrap_or_default();
    if let Some(name) = profile.trim().strip_suffix(" (enforce)") {
        found.push(format!("the AppArmor profile {name} (--security-opt apparmor=unconfined)"));
    }
    let masks = mountinfo::below(mountinfo::read(None).unwrap_or_default(), Path::new("/proc"));
    if masks.iter().any(|mount| mount.point != Path::new("/proc")) {
        let how =
            "podman: --security-opt unmask=ALL, docker: --security-opt systempaths=unconfined";
        found.push(format!("masks over /proc ({how})"));
    }
    found
}

/// What was seen, or what was wrong, in words.
type Seen = std::result::Result<String, String>;

struct Report(Vec<Answer>);

impl Report {
    fn fact(&mut self, feature: &'static str, needed: bool, seen: Seen) {
        let ok = seen.is_ok();
        let detail = seen.unwrap_or_else(|why| why);
        self.0.push(Answer { feature, needed, ok, detail });
    }

    fn mounts(&mut self, state: &Path) {
        let scratch = match ns::unshare_mounts_private().and_then(|()| Scratch::new(state)) {
            Ok(scratch) => scratch,
            Err(e) => return self.fact("overlay", true, told(Err(e))),
        };
        let mut probe = |feature, needed, map, run: &dyn Fn(Spec) -> Result<String>| {
            self.fact(feature, needed, told(scratch.session(feature, map).and_then(run)));
        };
        probe("overlay", true, None, &read_only);
        probe("overlay-descriptors", false, None, &|spec| styled(&spec, Style::Descriptors));
        probe("overlay-lowerdir-append", false, None, &|spec| styled(&spec, Style::Appended));
        probe("superblock-death", true, None, &death);
        probe("index-probe", true, None, &index_probe);
        probe("idmapped-layers", true, Some(MAP), &mapped);
        probe("image-uppers", false, None, &in_an_image);
        if let Err(e) = scratch.remove() {
            self.fact("clean-up", true, told(Err(e)));
        }
    }
}

/// An error of this room with its cause, on one line.
fn told(seen: Result<String>) -> Seen {
    use std::error::Error as _;
    seen.map_err(|e| match e.source() {
        Some(source) => format!("{e}: {source}"),
        None => e.to_string(),
    })
}

fn kernel() -> String {
    let uname = rustix::system::uname();
    format!("{} {}", uname.release().to_string_lossy(), uname.machine().to_string_lossy())
}

/// Capabilities without which some verb fails, each with what it is for. A process that is root on a
/// host has them all; in a container each is asked for by name.
const CAPABILITIES: [(Capability, &str); 15] = [
    (Capability::CAP_SYS_ADMIN, "mounts, namespaces, trusted attributes"),
    (Capability::CAP_SYS_CHROOT, "entering the mount namespace that sessions start from"),
    (Capability::CAP_SYS_PTRACE, "joining a session's namespaces, finding who holds a mount"),
    (Capability::CAP_DAC_OVERRIDE, "uppers of other users"),
    (Capability::CAP_CHOWN, "the owners of what a layer brings"),
    (Capability::CAP_FOWNER, "modes and times of other users' files"),
    (Capability::CAP_FSETID, "set-group-id bits of other groups' files"),
    (Capability::CAP_SETFCAP, "file capabilities that a layer brings"),
    (Capability::CAP_MKNOD, "device nodes that a layer brings"),
    (
        Capability::CAP_LINUX_IMMUTABLE,
        "sealing an upper, and removing what root made immutable in one",
    ),
    (Capability::CAP_SETUID, "becoming the session's user, mapping user ids"),
    (Capability::CAP_SETGID, "becoming the session's group, mapping group ids"),
    (Capability::CAP_SETPCAP, "taking capabilities away from a session"),
    (Capability::CAP_KILL, "signals to a session's processes"),
    (Capability::CAP_NET_ADMIN, "the loopback interface of a session's own network"),
];

fn capabilities() -> Seen {
    let have = caps::read(None, CapSet::Effective).map_err(|e| e.to_string())?;
    let missing: Vec<_> = CAPABILITIES
        .iter()
        .filter(|(capability, _)| !have.contains(capability))
        .map(|(capability, what_for)| format!("{capability} ({what_for})"))
        .collect();
    if missing.is_empty() {
        Ok(format!("uid {}, {} capabilities", rustix::process::geteuid().as_raw(), have.len()))
    } else {
        let how = "run as root; in a container add them (--cap-add)";
        Err(format!("missing {}; {how}", missing.join(", ")))
    }
}

/// What the keeper does to itself, so that a busy host does not make it late.
fn real_time() -> Seen {
    let have = caps::read(None, CapSet::Effective).map_err(|e| e.to_string())?;
    let wanted = [Capability::CAP_SYS_NICE, Capability::CAP_IPC_LOCK];
    let missing: Vec<_> =
        wanted.iter().filter(|c| !have.contains(c)).map(ToString::to_string).collect();
    match missing[..] {
        [] => Ok("the keeper can run in real time, with its memory locked".to_owned()),
        _ => Err(format!("missing {}: a busy host can make the keeper late", missing.join(", "))),
    }
}

/// Whether sessions are mounted where pid 1 sees them: by the agent, if one answered (its own namespace
/// counts, not that of whoever asks), else by one that is started here.
pub fn mount_namespace(agent: Option<&ns::Mounts>) -> Answer {
    judged(agent, &ns::mounts())
}

fn judged(agent: Option<&ns::Mounts>, here: &ns::Mounts) -> Answer {
    let feature = "mount-namespace";
    let (who, mounts, needed) = match agent {
        // Whoever asks from inside the same namespace sees its sessions, if not from the host.
        Some(agent) => ("the agent: ", agent, agent.name != here.name),
        None => ("", here, false),
    };
    match &mounts.trouble {
        None => {
            let detail = format!("{who}mounts are made where pid 1 sees them");
            Answer { feature, needed, ok: true, detail }
        }
        Some(why) => Answer { feature, needed, ok: false, detail: format!("{who}{why}") },
    }
}

fn cgroup2() -> Result<String> {
    cgroup::find_root().map(|root| format!("mounted at {}", root.display()))
}

fn limit(controller: &'static str) -> Result<String> {
    let root = cgroup::find_root()?;
    limits::offered(&root, controller)?;
    Ok(format!("sessions can be bounded by the controller {controller} of {}", root.display()))
}

fn nsdelegate() -> Result<String> {
    let root = cgroup::find_root()?;
    let mount = mountinfo::at(mountinfo::read(None)?, &root);
    let delegates = mount.is_some_and(|m| m.superblock.option("nsdelegate").next().is_some());
    if delegates {
        return Ok("processes cannot leave a cgroup namespace's root".to_owned());
    }
    let reason = "mounted without nsdelegate: workloads must not see a cgroup tree".to_owned();
    Err(Error::WrongMount { path: root, reason })
}

fn freezer(parent: &Path) -> Result<String> {
    let path = parent.join(probe_name());
    let cgroup = Cgroup::create(&path)?;
    let frozen = cgroup.freeze(Duration::from_millis(500));
    let killed = cgroup.kill(Duration::from_millis(500));
    cgroup.remove(Duration::from_secs(1))?;
    match (frozen?, killed?) {
        (Outcome::Proved(proof), Outcome::Proved(_)) => {
            Ok(format!("{} after {} us; cgroup.kill works", proof.answer, proof.took_us))
        }
        _ => Err(Error::Garbled { path, reason: "an empty cgroup does not freeze".to_owned() }),
    }
}

fn openat2() -> Result<String> {
    let root = Dir::open(Path::new("/"))?;
    // Any answer but ENOSYS comes from openat2 itself; /usr is a directory everywhere we run.
    match root.child("usr".as_ref()) {
        Err(e) if e.errno() == Some(rustix::io::Errno::NOSYS) => {
            Err(Error::TooOld { feature: "openat2 (5.6)" })
        }
        answer => answer.map(|_| "RESOLVE_BENEATH, NO_SYMLINKS, NO_XDEV".to_owned()),
    }
}

fn user_namespace() -> Result<String> {
    idmap::user_namespace(&MAP).map(|_| format!("map {:?} taken", MAP.line()))
}

fn state_directory(state: &Path) -> Result<String> {
    overlay::preflight(state, &[]).map(|()| format!("{} can hold uppers", state.display()))
}

fn read_only(spec: Spec) -> Result<String> {
    let mounted = overlay::mount(&spec)?;
    match overlay::remount_ro(&mounted.root)? {
        ReadOnly::Granted(proof) => Ok(format!("mounts; read-only: {}", proof.answer)),
        ReadOnly::Busy(_) | ReadOnly::Refused(_) => Err(Error::WrongMount {
            path: spec.target,
            reason: "nobody uses it and it cannot become read-only".to_owned(),
        }),
    }
}

fn styled(spec: &Spec, style: Style) -> Result<String> {
    overlay::mount_styled(spec, style).map(|_| "layers can be given this way".to_owned())
}

fn death(spec: Spec) -> Result<String> {
    let (watch, key) = (UnmountWatch::new()?, SessionId::fresh());
    watch.watch(&overlay::mount(&spec)?.root, key)?;
    let copy = overlay::clone_tree(&spec.target)?;
    overlay::unmount(&spec.target)?;
    let early = watch.wait_gone(key, Duration::from_millis(1))?;
    drop(copy);
    match (early, watch.wait_gone(key, Duration::from_secs(2))?) {
        (Gone::StillAlive, Gone::Gone(_)) => {
            Ok("IN_UNMOUNT comes when the last copy of a mount ends".to_owned())
        }
        (early, late) => Err(Error::WrongMount {
            path: spec.target,
            reason: format!("with a copy alive: {early:?}, without: {late:?}"),
        }),
    }
}

fn index_probe(spec: Spec) -> Result<String> {
    let scratch = spec.upper.parent().unwrap_or(&spec.upper);
    let mounted = overlay::mount(&spec)?;
    let alive = gone::index_probe(&spec.upper, scratch)?;
    drop(mounted);
    overlay::unmount(&spec.target)?;
    match (alive, gone::index_probe(&spec.upper, scratch)?) {
        (Probe::Alive, Probe::Dead(_)) => Ok("index=on tells a claimed upper".to_owned()),
        (alive, dead) => Err(Error::WrongMount {
            path: spec.target,
            reason: format!("while mounted: {alive:?}, after: {dead:?}"),
        }),
    }
}

fn mapped(spec: Spec) -> Result<String> {
    let _mounted = overlay::mount(&spec)?;
    use std::os::unix::fs::MetadataExt as _;
    let shown = std::fs::metadata(&spec.target).at("stat", &spec.target)?.uid();
    if shown == MAP.base {
        return Ok(format!("root on disk is shown as {shown}"));
    }
    let reason = format!("root on disk is shown as {shown}");
    Err(Error::WrongMount { path: spec.target, reason })
}

/// Made, mounted, stopped, set going, and let go of.
fn in_an_image(spec: Spec) -> Result<String> {
    let place = spec.upper.parent().unwrap_or(&spec.upper);
    let image = Image { disk: spec.target.clone(), ..Image::below(place) };
    image::make(&image, image::LEAST)?;
    let frozen = image::freeze(&image)?;
    image::thaw(&image)?;
    overlay::unmount(&image.disk)?;
    let until = clock::now().plus(Duration::from_secs(2));
    while let Some(device) = image::used_by(&image)? {
        if clock::now() >= until {
            let reason = format!("/dev/{device} keeps it after its mount ended");
            return Err(Error::WrongMount { path: image.file, reason });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(format!("{}; FIFREEZE: {}", image::tool()?, frozen.proof.answer))
}

fn bpf_lsm() -> Seen {
    let path = "/sys/kernel/security/lsm";
    let list = std::fs::read_to_string(path).map_err(|e| format!("cannot read {path}: {e}"))?;
    if list.split(',').any(|lsm| lsm.trim() == "bpf") {
        Ok(format!("in {list}"))
    } else {
        Err(format!("not in {list}: boot with lsm=...,bpf for the lease gate"))
    }
}

/// Whether the kernel takes the gate's programs, and all of them.
fn lease_gate() -> Seen {
    match super::gate::ask() {
        Ok(missing) => whole(&missing),
        Err(fault) => Err(format!("absent: {}", super::gate::why(&fault))),
    }
}

/// Of a gate that the kernel takes, and the ways to change a file that it does not check.
fn whole(missing: &[&str]) -> Seen {
    match missing {
        [] => Ok("complete".to_owned()),
        some => Err(format!("partial: not checked are {}", some.join(", "))),
    }
}

fn bubblewrap() -> Seen {
    let run = |argument: &str| {
        let output = Command::new("bwrap").arg(argument).output();
        let output = output.map_err(|e| format!("bwrap: {e}; install bubblewrap"))?;
        Ok::<_, String>(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let version = run("--version")?;
    if run("--help")?.contains("--bind-fd") {
        Ok(format!("{version}, with --bind-fd"))
    } else {
        Err(format!("{version} has no --bind-fd; Debian 12 and later have it"))
    }
}

fn probe_name() -> String {
    format!(".overfence-probe-{}-{}", std::process::id(), super::clock::now().0)
}

/// A directory for the mounts that are tried.
struct Scratch {
    parent: Dir,
    name: String,
    path: PathBuf,
}

impl Scratch {
    fn new(state: &Path) -> Result<Self> {
        // As mountinfo will show it.
        let state = std::fs::canonicalize(state).at("resolve", state)?;
        let name = probe_name();
        let path = state.join(&name);
        let parent = Dir::open(&state)?;
        rustix::fs::mkdir(&path, rustix::fs::Mode::RWXU).at("make a probe directory", &path)?;
        Ok(Self { parent, name, path })
    }

    fn session(&self, name: &str, mapped: Option<IdMap>) -> Result<Spec> {
        let make = |part: &str| {
            let path = self.path.join(name).join(part);
            std::fs::create_dir_all(&path).at("make a probe directory", &path).map(|()| path)
        };
        Ok(Spec {
            lowers: vec![make("lower")?],
            upper: make("session/upper")?,
            work: make("session/work")?,
            target: make("session/merged")?,
            mapped,
        })
    }

    /// Unmounts what the probes left mounted, then removes the directory.
    fn remove(self) -> Result<()> {
        let mounted = mountinfo::below(mountinfo::read(None)?, &self.path);
        for mount in mounted {
            overlay::unmount(&mount.point)?;
        }
        gone::remove_tree(&self.parent, self.name.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agents_mounts_count_and_not_those_of_who_asks() {
        let mounts = |name: &str, why: Option<&str>| ns::Mounts {
            name: name.to_owned(),
            trouble: why.map(str::to_owned),
        };
        let (host, apart) = (mounts("mnt:[1]", None), mounts("mnt:[2]", Some("apart")));
        let other = mounts("mnt:[3]", Some("apart"));
        let seen = |agent: Option<&ns::Mounts>, here| {
            let Answer { needed, ok, detail, .. } = judged(agent, here);
            (needed && !ok, ok, detail.starts_with("the agent: "))
        };
        assert_eq!(seen(Some(&apart), &host), (true, false, true), "hidden from the host");
        assert_eq!(seen(Some(&apart), &other), (true, false, true), "hidden from everybody");
        assert_eq!(seen(Some(&host), &apart), (false, true, true), "who asks is apart");
        assert_eq!(seen(Some(&apart), &apart), (false, false, true), "both are inside");
        assert_eq!(seen(None, &apart), (false, false, false));
        assert_eq!(seen(None, &host), (false, true, false));
    }

    #[test]
    fn a_partial_gate_is_no_whole_one_and_names_what_it_does_not_check() {
        assert_eq!(whole(&[]).unwrap(), "complete");
        assert_eq!(whole(&["acl", "flags"]).unwrap_err(), "partial: not checked are acl, flags");
    }
}
