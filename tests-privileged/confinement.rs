//! I10, the workload is confined: the known ways out, tried from inside; and what a command may
//! expect of the place it runs in.

use std::collections::BTreeMap;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use overfence::model::ids::{Generation, SessionId};
use overfence::workload::{Command, Exit, Holder, Network, Place, User, exec, run};

use crate::host;

pub fn tests() -> Vec<host::Test> {
    macro_rules! tests {
        ($($name:ident),* $(,)?) => { vec![$(host::Test { name: stringify!($name), run: $name }),*] };
    }
    tests![
        i10_no_way_out_for_a_user,
        i10_no_way_out_for_a_mapped_root,
        i10_unmapped_root_is_refused,
    ]
}

/// A session of this test's own: a real overlay, a run directory, the test's cgroup.
struct Room {
    place: Place,
    dir: PathBuf,
}

impl Room {
    fn new(host: &host::Place) -> Self {
        Self::with(host, "a", User::default(), false)
    }

    fn with(host: &host::Place, name: &str, user: User, mapped: bool) -> Self {
        let dir = host.dir.join(name);
        let cgroup = host.cgroup.join(name);
        std::fs::create_dir(&dir).unwrap();
        std::fs::create_dir(&cgroup).unwrap();
        for part in ["upper", "work", "merged", "run", "state"] {
            std::fs::create_dir(dir.join(part)).unwrap();
        }
        let owner = if mapped { 100_000 + user.uid } else { user.uid };
        std::os::unix::fs::chown(dir.join("upper"), Some(owner), Some(owner)).unwrap();
        std::fs::create_dir(dir.join("lower")).unwrap();
        let merged = dir.join("merged");
        let options = format!(
            "lowerdir={0}/lower,upperdir={0}/upper,workdir={0}/work,redirect_dir=off,metacopy=off,index=off",
            dir.display()
        );
        nix::mount::mount(
            Some("overlay"),
            &merged,
            Some("overlay"),
            nix::mount::MsFlags::empty(),
            Some(options.as_str()),
        )
        .unwrap();
        let place = Place {
            session: SessionId::fresh(),
            workspace: "team/repo".parse().unwrap(),
            generation: Generation(7),
            cgroup,
            merged,
            run_dir: dir.join("run"),
            record: dir.join("init.json"),
            cell: None,
            state_dir: dir.join("state"),
            user,
            mapped,
            network: Network::Own,
            holder: Holder::Beat,
            ttl: Duration::from_secs(3),
            binary: host.binary.clone(),
        };
        Self { place, dir }
    }

    fn sh(&self, script: &str) -> Exit {
        run(&self.place, &sh(script)).unwrap()
    }

    fn sh_again(&self, script: &str) -> Exit {
        exec(&self.place, &sh(script)).unwrap()
    }

    fn out(&self, name: &str) -> String {
        std::fs::read_to_string(self.place.merged.join(name)).unwrap()
    }
}

fn sh(script: &str) -> Command {
    Command {
        argv: ["/bin/sh", "-c", script].map(Into::into).into(),
        env: vec![("EXTRA".into(), "given".into())],
        cwd: None,
    }
}

const PROBE: &str = include_str!("confinement_probe.py");

/// The ways that the probe knows, and what each must come to inside. Where two answers are
/// possible, both are refusals: a user is stopped before the wall that stops a mapped root.
const WAYS: &[(&str, &[&str])] = &[
    ("upper_by_path", &["ENOENT"]),
    ("work_by_path", &["ENOENT"]),
    ("other_session", &["ENOENT"]),
    ("init_record", &["ENOENT"]),
    ("run_dir_written", &["EROFS", "EACCES"]),
    ("usr_written", &["EROFS", "EACCES"]),
    ("root_written", &["EROFS", "EACCES"]),
    ("etc_shadow", &["ENOENT"]),
    ("agent_socket", &["ENOENT"]),
    ("abstract_socket", &["ECONNREFUSED"]),
    ("raw_disk_node", &["EPERM"]),
    ("memory_device_node", &["EPERM"]),
    ("loop_control", &["ENOENT"]),
    ("core_pattern", &["EROFS", "EACCES"]),
    ("sysrq_trigger", &["EROFS", "EACCES"]),
    ("cgroup_by_path", &["ENOENT"]),
    ("mount_cgroup2", &["EPERM"]),
    ("mount_bpffs", &["EPERM"]),
    ("mount_proc", &["EPERM"]),
    ("fsopen_cgroup2", &["EPERM"]),
    ("bpf_map", &["EPERM"]),
    ("user_namespace_unshare", &["EPERM"]),
    ("user_namespace_with_others", &["EPERM"]),
    ("user_namespace_clone", &["EPERM"]),
    ("user_namespace_clone3", &["ENOSYS"]),
    ("mount_namespace", &["EPERM"]),
    ("setns_own", &["EPERM"]),
    ("workspace_remount", &["EPERM"]),
    ("workspace_mount_setattr", &["EPERM"]),
    ("workspace_open_tree", &["EPERM"]),
    ("workspace_umount", &["EPERM"]),
    ("pivot_root", &["EPERM"]),
    ("chroot", &["EPERM"]),
    ("file_handle", &["EPERM"]),
    ("keyring", &["EPERM"]),
    ("keyctl", &["EPERM"]),
    ("io_uring", &["EPERM"]),
    ("perf_event", &["EPERM"]),
    ("user_fault_fd", &["EPERM"]),
    ("odd_personality", &["EPERM"]),
    ("swap_off", &["EPERM"]),
    ("process_accounting", &["EPERM"]),
    ("kernel_log", &["EPERM"]),
    ("ptrace_outside", &["ESRCH"]),
    ("signal_outside", &["ESRCH"]),
    ("memory_of_init", &["EACCES"]),
    ("root_of_init", &["EACCES"]),
    ("terminal_input", &["EPERM"]),
    ("terminal_input_high_bit", &["EPERM"]),
];

fn answers(text: &str) -> BTreeMap<String, String> {
    text.lines()
        .map(|line| line.split_once('=').unwrap_or_else(|| panic!("not an answer: {line}")))
        .map(|(name, answer)| (name.to_owned(), answer.to_owned()))
        .collect()
}

/// Runs the probe outside, where each way must be open, then inside by `run` and by `exec`.
fn no_way_out(host: &host::Place, user: User, mapped: bool) {
    let room = Room::with(host, "a", user.clone(), mapped);
    let other = Room::with(host, "b", user, mapped);
    let _agent = UnixListener::bind(host.dir.join("agent.sock")).unwrap();
    let name = format!("overfence-test-{}", std::process::id());
    let address =
        <std::os::unix::net::SocketAddr as std::os::linux::net::SocketAddrExt>::from_abstract_name(
            &name,
        );
    let _abstract = UnixListener::bind_addr(&address.unwrap()).unwrap();
    // Far above what the session's own process ids reach.
    let mut victim = loop {
        let child = std::process::Command::new("/bin/sleep").arg("100").spawn().unwrap();
        if child.id() > 500 {
            break child;
        }
    };
    let disk = std::fs::read_to_string("/proc/partitions").unwrap();
    let disk: Vec<u32> = disk
        .lines()
        .nth(2)
        .expect("no block device to try")
        .split_whitespace()
        .take(2)
        .map(|n| n.parse().unwrap())
        .collect();
    let probe = room.place.merged.join("probe.py");
    std::fs::write(&probe, PROBE).unwrap();
    let scratch = host.dir.join("scratch");
    std::fs::create_dir(&scratch).unwrap();
    // A mount that the control may spoil in the workspace's stead.
    nix::mount::mount(
        Some("none"),
        &scratch,
        Some("tmpfs"),
        nix::mount::MsFlags::empty(),
        None::<&str>,
    )
    .unwrap();
    let mut facts = serde_json::json!({
        "upper": room.dir.join("upper"), "work": room.dir.join("work"),
        "other": other.place.merged, "record": room.place.record, "cgroup": room.place.cgroup,
        "socket": host.dir.join("agent.sock"), "abstract": name, "disk": disk,
        "victim": victim.id(), "init": victim.id(),
        "run_dir": room.place.run_dir, "usr": host.dir, "scratch": host.dir,
        "mount": scratch, "handles": "/dev/shm",
    });
    std::fs::write(&room.place.record, "{}").unwrap();
    let control = std::process::Command::new("/usr/bin/python3")
        .arg(&probe)
        .arg(facts.to_string())
        .output()
        .unwrap();
    std::fs::remove_file(&room.place.record).unwrap();
    let control = answers(&String::from_utf8(control.stdout).unwrap());
    let known: Vec<&str> = WAYS.iter().map(|(name, _)| *name).collect();
    assert_eq!(control.len(), known.len(), "the probe did not try them all: {control:?}");
    // Kernels without magic SysRq have nothing to try there.
    let absent = !std::path::Path::new("/proc/sysrq-trigger").exists();
    let shut: Vec<_> = control
        .iter()
        .filter(|(name, answer)| *answer != "open" && !(absent && *name == "sysrq_trigger"))
        .collect();
    assert!(shut.is_empty(), "not open outside either, so proves nothing: {shut:?}");

    for (key, value) in [("run_dir", "/run/overfence"), ("usr", "/usr"), ("scratch", "/tmp")] {
        facts[key] = value.into();
    }
    for (key, value) in [("mount", "/workspace"), ("handles", "/tmp")] {
        facts[key] = value.into();
    }
    facts["init"] = 1.into();
    let command = |out: &str| {
        sh(&format!(
            "id -u; exec /usr/bin/python3 /workspace/probe.py '{facts}' > /workspace/{out}"
        ))
    };
    let ended = run(&room.place, &command("run")).unwrap();
    assert_eq!(ended, Exit::Code(0));
    let ended = exec(&room.place, &command("exec")).unwrap();
    assert_eq!(ended, Exit::Code(0));
    victim.kill().unwrap();
    victim.wait().unwrap();
    let mut wrong = vec![];
    for how in ["run", "exec"] {
        let inside = answers(&room.out(how));
        for (name, refusals) in WAYS {
            let answer = inside.get(*name).map_or("not tried", String::as_str);
            let nothing = absent && *name == "sysrq_trigger" && answer == "ENOENT";
            if !refusals.contains(&answer) && !nothing {
                wrong.push(format!("{how}: {name} is {answer}, not {refusals:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn i10_no_way_out_for_a_user(host: &host::Place) {
    no_way_out(host, User::default(), false);
}

fn i10_no_way_out_for_a_mapped_root(host: &host::Place) {
    no_way_out(host, User { uid: 0, gid: 0, groups: vec![] }, true);
}

fn i10_unmapped_root_is_refused(host: &host::Place) {
    let ids = |uid, gid, groups: &[u32]| User { uid, gid, groups: groups.into() };
    let mut room = Room::new(host);
    for user in [ids(0, 1000, &[]), ids(1000, 0, &[]), ids(1000, 1000, &[27, 0])] {
        room.place.user = user.clone();
        for start in [run, exec] {
            let refused = start(&room.place, &sh("echo ran > /workspace/out"));
            assert!(matches!(refused, Err(overfence::workload::Error::UnmappedRoot)), "{user:?}");
        }
    }
    assert!(!room.place.merged.join("out").exists());
}
