//! I10, the workload is confined: the known ways out, tried from inside.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;

use overfence::workload::{Exit, User, exec, run};

use crate::host;
use crate::room::{Room, sh};

pub fn tests() -> Vec<host::Test> {
    macro_rules! tests {
        ($($name:ident),* $(,)?) => { vec![$(host::Test { name: stringify!($name), run: $name }),*] };
    }
    tests![
        i10_no_way_out_for_a_user,
        i10_no_way_out_for_a_mapped_root,
        i10_unmapped_root_is_refused,
        i10_capabilities_and_filters_are_as_decided,
        i10_nothing_of_the_caller_is_inherited,
        i10_another_session_is_not_held_with_a_cell,
    ]
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
    ("machine_socket", &["EPERM"]),
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
        let mut child = std::process::Command::new("/bin/sleep").arg("100").spawn().unwrap();
        if child.id() > 500 {
            break child;
        }
        child.kill().unwrap();
        child.wait().unwrap();
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

/// One `Name:\tvalue` of a process's status file.
fn field<'a>(status: &'a str, name: &str) -> &'a str {
    let line = status.lines().find(|line| line.split(':').next() == Some(name));
    line.and_then(|l| l.split('\t').nth(1)).unwrap_or_else(|| panic!("no {name} in {status}"))
}

/// Never in reach, whoever the command is: SYS_ADMIN, MKNOD, DAC_READ_SEARCH, SYS_PTRACE,
/// SYS_RAWIO, SYS_MODULE, LINUX_IMMUTABLE, BPF, PERFMON, CHECKPOINT_RESTORE.
const NEVER: u64 = 1 << 21 | 1 << 27 | 1 << 2 | 1 << 19 | 1 << 17 | 1 << 16 | 1 << 9 | 7 << 38;
const CAP_KILL: u64 = 1 << 5;

fn i10_capabilities_and_filters_are_as_decided(host: &host::Place) {
    let filters = if cfg!(target_arch = "x86_64") { "3" } else { "2" };
    let mapped_root = User { uid: 0, gid: 0, groups: vec![] };
    for (name, user, mapped) in [("a", User::default(), false), ("b", mapped_root, true)] {
        let room = Room::with(host, name, user, mapped);
        let command = |out: &str| {
            // Another's files of the same user: the command itself and its init.
            sh(&format!("cat /proc/self/status > {out}; cat /proc/1/status > {out}.init"))
        };
        assert_eq!(run(&room.place, &command("run")).unwrap(), Exit::Code(0));
        assert_eq!(exec(&room.place, &command("exec")).unwrap(), Exit::Code(0));
        for out in ["run", "exec", "run.init", "exec.init"] {
            let status = room.out(out);
            assert_eq!(field(&status, "NoNewPrivs"), "1", "{out}");
            assert_eq!(field(&status, "Seccomp"), "2", "{out}");
            assert_eq!(field(&status, "Seccomp_filters"), filters, "{out}");
            let caps = |set| u64::from_str_radix(field(&status, set), 16).unwrap();
            assert_eq!((caps("CapInh"), caps("CapAmb")), (0, 0), "{out}");
            for set in ["CapBnd", "CapPrm", "CapEff"] {
                assert_eq!(caps(set) & NEVER, 0, "{set} of {out}");
                match (out.ends_with(".init"), mapped) {
                    (true, _) => assert_eq!(caps(set) & !CAP_KILL, 0, "{set} of {out}"),
                    (false, false) => assert_eq!(caps(set), 0, "{set} of {out}"),
                    (false, true) => assert_ne!(caps(set), 0, "{set} of {out}"),
                }
            }
        }
    }
}

fn i10_nothing_of_the_caller_is_inherited(host: &host::Place) {
    let room = Room::new(host);
    // Open across exec, as a careless caller leaves it.
    let _open = rustix::io::dup(std::fs::File::open("/etc/passwd").unwrap()).unwrap();
    assert!(std::env::var_os("OVERFENCE_TEST_DIR").is_some(), "nothing to look for");
    let script = |out| sh(&format!("env > {out}.env; exec ls -l /proc/self/fd > {out}"));
    assert_eq!(run(&room.place, &script("run")).unwrap(), Exit::Code(0));
    assert_eq!(exec(&room.place, &script("exec")).unwrap(), Exit::Code(0));
    for out in ["run", "exec"] {
        let listed = room.out(out);
        let fds: Vec<&str> =
            listed.lines().filter_map(|l| l.split(" -> ").next()?.split(' ').next_back()).collect();
        // The last one is the listed directory itself.
        assert_eq!(fds[1..], ["0", "1", "2", "3"], "{listed}");
        let environment = room.out(&format!("{out}.env"));
        assert!(!environment.contains("OVERFENCE_TEST"), "{environment}");
        for given in [
            "EXTRA=given",
            "HOME=/workspace",
            "OVERFENCE_WORKSPACE=team/repo",
            "OVERFENCE_GENERATION=7",
            &format!("OVERFENCE_SESSION={}", room.place.session),
        ] {
            assert!(environment.lines().any(|line| line == given), "{given} in {environment}");
        }
    }
}

fn i10_another_session_is_not_held_with_a_cell(host: &host::Place) {
    let (go, stay) = std::os::unix::net::UnixStream::pair().unwrap();
    // A mount namespace from before any session, kept by a process.
    let cell = match overfence::kernel::launch::fork().unwrap() {
        overfence::kernel::launch::Fork::Parent(pid) => pid,
        overfence::kernel::launch::Fork::Child => {
            drop(go);
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
            (&stay).write_all(b"x").unwrap();
            let _ = (&stay).read(&mut [0]);
            std::process::exit(0);
        }
    };
    drop(stay);
    (&go).read_exact(&mut [0]).unwrap();
    let other = Room::new(host);
    let mut room = Room::with(host, "b", User::default(), false);
    let seen = |room: &Room| -> Vec<bool> {
        let command = sh("echo here > /workspace/out; (sleep 100 > /dev/null 2>&1 &)");
        assert_eq!(run(&room.place, &command).unwrap(), Exit::Code(0));
        let procs = std::fs::read_to_string(room.place.cgroup.join("cgroup.procs")).unwrap();
        assert!(procs.lines().count() >= 3, "monitor, init and daemon: {procs}");
        let mounts: Vec<String> = procs
            .lines()
            .map(|pid| std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap())
            .collect();
        std::fs::write(room.place.cgroup.join("cgroup.kill"), "1").unwrap();
        let path = other.place.merged.to_str().unwrap();
        mounts.iter().map(|text| text.contains(&format!(" {path} "))).collect()
    };
    assert!(
        seen(&room).contains(&true),
        "without a cell the monitor has it: else this proves nothing"
    );
    room.place.cell = Some(format!("/proc/{cell}/ns/mnt").into());
    room.place.cgroup = host.cgroup.join("c");
    std::fs::create_dir(&room.place.cgroup).unwrap();
    let held = seen(&room);
    assert!(!held.contains(&true), "{held:?}");
    assert_eq!(room.out("out"), "here\n");
    drop(go);
    nix::sys::wait::waitpid(cell, None).unwrap();
}
