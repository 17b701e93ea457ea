//! overfence as systemd units, on a host that systemd-nspawn boots: what restarts, is upgraded,
//! stopped or hangs beside the sessions, and what the sessions notice of it, which is nothing.

mod apart;
mod external;
pub mod machine;

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Output};
use std::time::{Duration, Instant};

use crate::agent_process::{has, id_of};
use crate::host::{Place, Test, paced, paced_ttl};
use machine::{Machine, drop_in, install};

const AGENT: &str = "overfence-agent.service";
const KEEPER: &str = "overfence-keeper.service";
const SESSIONS: &str = "overfence-sessions.service";

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "the_units_start_and_a_command_runs", run: starts },
        Test { name: "an_agent_with_mounts_of_its_own_is_named", run: apart::named },
        Test { name: "i8_ready_comes_after_every_stale_freeze", run: ready_after_freeze },
        Test { name: "i8_restart_and_upgrade_disturb_no_session", run: undisturbed },
        Test { name: "stop_leaves_sessions_and_the_socket_starts_the_agent", run: stopped },
        Test { name: "drain_takes_every_session_down_and_keeps_what_it_wrote", run: drained },
        Test { name: "limits_bound_a_session", run: limited },
        Test { name: "limits_that_cannot_be_had_are_refused", run: refused },
        Test { name: "an_external_slice_is_fenced_and_given_back", run: external::given_back },
        Test {
            name: "an_engine_with_the_systemd_driver_is_fenced_in_its_slice",
            run: external::by_an_engine,
        },
        Test { name: "the_watchdog_restarts_a_stopped_agent", run: watchdog },
        Test { name: "i9_a_reboot_ends_leases_and_keeps_uppers", run: rebooted },
    ]
}

const WRITES: &str = "while :; do echo x >> log; sleep 0.01; done";
/// The same, by somebody who has a last word when asked to end.
const POLITE: &str =
    "trap 'echo bye > bye; exit 0' TERM; while :; do echo x >> log; sleep 0.01; done";

/// A running, a frozen and an empty session.
struct Three {
    running: String,
    frozen: String,
    empty: String,
    log: PathBuf,
    clients: Vec<Child>,
}

fn open(machine: &Machine, workspace: &str, ttl: &str) -> String {
    id_of(&machine.tell(&["session", "open", "-w", workspace, "--create", "--ttl", ttl]))
}

/// `overfence run` in the background: what it started and its session.
fn run(machine: &Machine, workspace: &str, ttl: &str, script: &str) -> (Child, String) {
    let argv =
        ["overfence", "run", "-w", workspace, "--create", "--ttl", ttl, "--", "sh", "-c", script];
    // Its caller waits for it; a panic here ends the test's process and all that is below it.
    #[allow(clippy::zombie_processes)]
    let child = machine.command(&argv).spawn().unwrap();
    let begun = Instant::now();
    loop {
        let all = machine.tell(&["session", "list"]);
        let found = all.as_array().unwrap().iter().find(|s| s["workspace"] == workspace);
        if let Some(session) = found.filter(|s| s["state"] == "ACTIVE") {
            return (child, session["id"].as_str().unwrap().to_owned());
        }
        assert!(
            begun.elapsed() < paced(Duration::from_secs(10)),
            "no session of {workspace}: {all:#}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Three {
    fn open(machine: &Machine) -> Self {
        // A lease that lasts less than the test: it has to be renewed across all of it.
        let (client, running) = run(machine, "running", &paced_ttl(4), POLITE);
        let (mut held, frozen) = run(machine, "frozen", "60s", WRITES);
        let log_of = |id: &str| machine.state.join("sessions").join(id).join("upper/log");
        let log = log_of(&running);
        for log in [&log, &log_of(&frozen)] {
            assert!(grows(log), "nothing is written: {}", machine.log());
        }
        machine.ask(&["fence", &frozen, "--reason", "test", "--wait"]);
        machine.until(&frozen, |v| has(v, "frozen"));
        // What it does as it ends wakes its command for a moment, frozen as that is.
        held.wait().unwrap();
        let empty = open(machine, "empty", "10m");
        Self { running, frozen, empty, log, clients: vec![client, held] }
    }

    /// Whether the running one was asked to end, and had time for it.
    fn was_asked(&self) -> bool {
        self.log.with_file_name("bye").exists()
    }

    /// Directory and processes of each cgroup, and how often those of the frozen one ever stopped to
    /// run: none of it may change. One that was thawed for a moment, and writes in vain, stopped once more.
    fn places(&self, machine: &Machine) -> Vec<(u64, String)> {
        [&self.running, &self.frozen, &self.empty]
            .map(|id| {
                let dir = machine.cgroup_of(id);
                let procs = fs::read_to_string(dir.join("cgroup.procs")).unwrap();
                let seen = match id == &self.frozen {
                    true => procs.lines().map(|pid| format!("{pid}: {} ", stops(pid))).collect(),
                    // The shell's `sleep` comes and goes.
                    false => {
                        procs.lines().min_by_key(|pid| begun(pid)).unwrap_or_default().to_owned()
                    }
                };
                (fs::metadata(&dir).unwrap().ino(), seen)
            })
            .to_vec()
    }

    /// The same, once they stand still: controllers that are enabled for the sessions wake each process
    /// for a moment, frozen as it is.
    fn settled(&self, machine: &Machine) -> Vec<(u64, String)> {
        let (mut known, end) =
            (self.places(machine), Instant::now() + paced(Duration::from_secs(10)));
        loop {
            std::thread::sleep(paced(Duration::from_millis(300)));
            let now = self.places(machine);
            if now == known {
                return now;
            }
            assert!(Instant::now() < end, "they do not come to rest: {known:?}, {now:?}");
            known = now;
        }
    }

    /// Nothing of it noticed what happened.
    fn go_on(&self, machine: &Machine, before: &[(u64, String)], after: &str) {
        assert_eq!(self.places(machine), before, "after {after}");
        assert!(grows(&self.log), "the writer stands still after {after}: {}", machine.log());
        let events = machine.cgroup_of(&self.frozen).join("cgroup.events");
        assert!(fs::read_to_string(events).unwrap().contains("frozen 1"), "thawed by {after}");
        for (id, state) in
            [(&self.running, "ACTIVE"), (&self.frozen, "PRESERVED"), (&self.empty, "ACTIVE")]
        {
            let view = machine.until(id, |v| v["state"] == state);
            assert_eq!(view["generation"], 1, "after {after}: {view:#}");
            assert!(view["doubt"].is_null(), "after {after}: {view:#}");
        }
    }
}

/// When a process began, in ticks since the boot; of one that is gone, last of all.
fn begun(pid: &str) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    after.split(' ').nth(19).map_or(u64::MAX, |ticks| ticks.parse().unwrap())
}

/// How often a process gave its processor away.
fn stops(pid: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let switches = status.lines().filter(|line| line.contains("ctxt_switches:"));
    switches.map(|line| line.split_whitespace().last().unwrap().parse::<u64>().unwrap()).sum()
}

fn grows(path: &Path) -> bool {
    let size = || fs::metadata(path).map(|m| m.len()).unwrap_or(0);
    let (before, begun) = (size(), Instant::now());
    while begun.elapsed() < paced(Duration::from_secs(2)) {
        if size() > before {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

fn freeze_of(machine: &Machine, id: &str) -> String {
    fs::read_to_string(machine.cgroup_of(id).join("cgroup.freeze")).unwrap().trim().to_owned()
}

fn starts(place: &Place) {
    let machine = Machine::boot(place);
    assert_eq!(machine.must(&["systemctl", "--failed", "--no-legend", "--plain"]), "");
    let units = [AGENT, KEEPER, SESSIONS, "overfence.socket"];
    machine.must(&[&["systemd-analyze", "verify", "--man=no"], &units[..]].concat());
    assert_eq!(machine.show(SESSIONS, "SubState"), "exited");
    machine.until_unit(AGENT, "StatusText", |text| text.contains("no session"));
    // One agent may not be able to stop what it is bound to.
    assert!(!machine.run(&["systemctl", "stop", SESSIONS]).status.success());

    let status = machine.tell(&["status"]);
    assert_eq!(status["ready"], true);
    assert_eq!(status["cgroup"], "/sys/fs/cgroup/system.slice/overfence-sessions.service");
    let doctor = machine.ask(&["doctor"]).1;
    assert_eq!(doctor["ok"], true, "{doctor:#}");
    // The agent's mounts are the host's: no setting of its unit gives it a namespace of its own.
    let agent = machine.main_pid(AGENT);
    let spaces = ["mnt", "cgroup", "net"].map(|kind| {
        let of = |pid: &str| machine.must(&["readlink", &format!("/proc/{pid}/ns/{kind}")]);
        (of("1"), of(&agent))
    });
    assert!(spaces.iter().all(|(host, agent)| host == agent), "{spaces:?}");
    let keeper = machine.must(&["chrt", "-p", &machine.main_pid(KEEPER)]);
    assert!(keeper.contains("SCHED_FIFO"), "{keeper}");

    for (path, mode) in [("run/overfence", 0o755), ("var/lib/overfence", 0o700)] {
        let found = machine.must(&["stat", "-c", "%a %U", &format!("/{path}")]);
        assert_eq!(found.trim(), format!("{mode:o} root"), "{path}");
    }
    for group in ["overfence", "overfence-view"] {
        machine.must(&["getent", "group", group]);
    }
    let socket = machine.must(&["stat", "-c", "%a %F", "/run/overfence/overfence.sock"]);
    assert_eq!(socket.trim(), "666 socket");

    machine.must(&["overfence", "run", "-w", "w", "--create", "--", "sh", "-c", "echo hi > f"]);
    assert_eq!(machine.tell(&["workspace", "status", "w"])["version"], 1);
    let opened = machine.tell(&["session", "open", "-w", "w", "--ttl", "60s"]);
    let (id, ticket) = (id_of(&opened), opened["ticket"].as_str().unwrap());
    fs::write(place.dir.join("root/ticket"), ticket).unwrap();
    let shown = machine.must(&["overfence", "ticket", "verify", "/ticket", "-o", "json"]);
    assert!(shown.contains(&format!("/system.slice/{SESSIONS}/{id}")), "{shown}");
    let other = open(&machine, "v", "60s");
    machine.tell(&["session", "close", &id]);

    // What the journal has of one session and of one workspace, by its fields.
    let about = |field: &str| {
        let args = ["journalctl", "-o", "cat", "--no-pager", "-u", AGENT, field];
        machine.must(&args)
    };
    let of_session = about(&format!("OVERFENCE_SESSION={id}"));
    assert!(of_session.contains("OPENING -> ACTIVE"), "{of_session}");
    assert!(of_session.contains("DELETING -> CLOSED"), "{of_session}");
    assert!(!of_session.contains(&other), "{of_session}");
    assert!(about("OVERFENCE_WORKSPACE=v").contains(&other));
    assert!(!about("OVERFENCE_WORKSPACE=v").contains(&id));

    // systemd removes the directory of a unit without a process, once; so may somebody else.
    machine.tell(&["session", "close", &other]);
    let parent = machine.cgroups.join("system.slice").join(SESSIONS);
    fs::remove_dir(&parent).unwrap();
    let again = open(&machine, "again", "60s");
    assert!(machine.cgroup_of(&again).is_dir());
}

/// The agent dies at the last moment before READY: by then every stale session has the wish.
fn ready_after_freeze(place: &Place) {
    let machine = Machine::boot(place);
    let runs: Vec<_> =
        (0..4).map(|n| run(&machine, &format!("w{n}"), &paced_ttl(2), WRITES)).collect();
    let good = open(&machine, "good", "10m");
    machine.must(&["systemctl", "stop", "overfence.socket", AGENT, KEEPER]);
    std::thread::sleep(paced(Duration::from_secs(2)));
    for (_, id) in &runs {
        assert_eq!(freeze_of(&machine, id), "0", "nobody is there to freeze it");
    }
    // The keeper is a want of the agent and must not be what freezes here.
    machine.must(&["systemctl", "mask", "--runtime", KEEPER]);
    let plan = "[Service]\nEnvironment=OVERFENCE_FAILPOINTS=die=agent.ready.before\nRestart=no\n";
    drop_in(&machine.root, AGENT, plan);
    machine.must(&["systemctl", "daemon-reload"]);
    assert!(!machine.run(&["systemctl", "start", AGENT]).status.success());
    // Clients that wait at the socket may start it once more; it dies in the same place.
    let said = machine.must(&["journalctl", "-o", "cat", "--no-pager", "-u", AGENT]);
    assert!(said.contains("status=9/KILL"), "{said}");
    for (_, id) in &runs {
        assert_eq!(freeze_of(&machine, id), "1", "READY would have come before {id} is frozen");
    }
    assert_eq!(freeze_of(&machine, &good), "0");

    fs::remove_file(machine.root.join(format!("etc/systemd/system/{AGENT}.d/1.conf"))).unwrap();
    machine.must(&["systemctl", "unmask", "--runtime", KEEPER]);
    machine.must(&["systemctl", "daemon-reload"]);
    machine.must(&["systemctl", "start", AGENT]);
    assert_eq!(machine.tell(&["session", "inspect", &good])["state"], "ACTIVE");
    for (mut client, id) in runs {
        machine.ask(&["fence", &id, "--to", "killed", "--reason", "test", "--wait"]);
        client.wait().unwrap();
    }
}

fn undisturbed(place: &Place) {
    let machine = Machine::boot(place);
    let mut three = Three::open(&machine);
    // With one of these, a service that kept the sessions below its own cgroup would not start again.
    let enabled = machine.enable_for_sessions();
    let lacking: Vec<_> = machine::offered().into_iter().filter(|c| !enabled.contains(c)).collect();
    assert!(!enabled.is_empty() && lacking.is_empty(), "without {lacking:?}: {enabled:?}");
    eprintln!("with {enabled:?} enabled for the sessions");
    let before = three.settled(&machine);
    let kill = |unit: &str| {
        let pid = machine.main_pid(unit);
        machine.must(&["systemctl", "kill", "--signal=KILL", unit]);
        machine.until_unit(unit, "MainPID", |now| now != "0" && now != pid);
        machine.until_unit(unit, "ActiveState", |state| state == "active");
    };
    kill(AGENT);
    three.go_on(&machine, &before, "kill -9 of the agent");
    kill(KEEPER);
    three.go_on(&machine, &before, "kill -9 of the keeper");
    machine.must(&["systemctl", "restart", AGENT, KEEPER]);
    three.go_on(&machine, &before, "a restart");
    machine.must(&["systemctl", "daemon-reload"]);
    three.go_on(&machine, &before, "daemon-reload");
    machine.must(&["systemctl", "daemon-reexec"]);
    three.go_on(&machine, &before, "daemon-reexec");
    machine.must(&["systemctl", "restart", AGENT]);
    three.go_on(&machine, &before, "a restart after daemon-reexec");

    let binary = machine.root.join("usr/bin/overfence");
    let old = fs::metadata(&binary).unwrap().ino();
    install(place, &machine.root);
    assert_ne!(fs::metadata(&binary).unwrap().ino(), old);
    machine.must(&["systemctl", "daemon-reload"]);
    machine.must(&["systemctl", "restart", AGENT, KEEPER]);
    let runs = machine.must(&["readlink", &format!("/proc/{}/exe", machine.main_pid(AGENT))]);
    assert_eq!(runs.trim(), "/usr/bin/overfence");
    three.go_on(&machine, &before, "an upgrade");
    // The new binary joins what the old one started.
    let said =
        machine.must(&["overfence", "session", "exec", &three.running, "--", "head", "-n1", "log"]);
    assert_eq!(said, "x\n");

    assert_eq!(machine.tell(&["evidence", "verify"])["ok"], true);
    // Nor was either of them stopped and let go between two looks.
    for id in [&three.running, &three.empty] {
        let entries = machine.tell(&["evidence", "show", "--session", id]);
        let entries = entries.as_array().unwrap();
        let events = entries.iter().filter_map(|e| e["detail"]["event"]["event"].as_str());
        assert_eq!(events.collect::<Vec<_>>(), ["opened"], "{entries:#?}");
    }
    // It would have been seen if the frozen one had run for a moment.
    let before = three.places(&machine);
    fs::write(machine.cgroup_of(&three.frozen).join("cgroup.freeze"), "0").unwrap();
    let begun = Instant::now();
    while three.places(&machine)[1] == before[1] {
        assert!(begun.elapsed() < paced(Duration::from_secs(10)), "thawed, and nothing shows it");
        std::thread::sleep(Duration::from_millis(5));
    }
    machine.until(&three.frozen, |v| v["state"] == "PRESERVED" && has(v, "frozen"));
    machine.tell(&["session", "close", &three.running, "--checkpoint"]);
    assert_eq!(machine.tell(&["workspace", "status", "running"])["version"], 1);
    machine.tell(&["preserved", "discard", &three.frozen, "--yes"]);
    machine.tell(&["session", "close", &three.empty]);
    for client in &mut three.clients {
        client.wait().unwrap();
    }
    assert_eq!(left_of_sessions(&machine), Vec::<String>::new());
}

/// Cgroups, directories and mounts of sessions.
fn left_of_sessions(machine: &Machine) -> Vec<String> {
    let dirs = [
        machine.cgroups.join("system.slice").join(SESSIONS),
        machine.state.join("sessions"),
        machine.state.join("trash"),
    ];
    let below = dirs.iter().filter_map(|dir| fs::read_dir(dir).ok()).flatten().flatten();
    let left = below.filter(|e| e.file_type().is_ok_and(|t| t.is_dir()));
    let mut left: Vec<_> = left.map(|e| e.path().display().to_string()).collect();
    let mounts = machine.must(&["cat", "/proc/1/mountinfo"]);
    left.extend(mounts.lines().filter(|l| l.contains(" - overlay overfence-")).map(str::to_owned));
    left
}

fn stopped(place: &Place) {
    let machine = Machine::boot(place);
    let mut three = Three::open(&machine);
    let before = three.places(&machine);
    machine.must(&["systemctl", "stop", "overfence.socket", AGENT]);
    assert_eq!(machine.show(AGENT, "ActiveState"), "inactive");
    assert_eq!(machine.show(AGENT, "Result"), "success");
    assert_eq!(machine.ask(&["status"]).0, 6, "somebody answers");
    assert_eq!(three.places(&machine), before);
    assert!(grows(&three.log), "stopping the agent stopped a writer");
    // Nobody renews now; the keeper is there, and the lease has not run out yet.
    machine.must(&["systemctl", "start", "overfence.socket"]);
    assert_eq!(machine.tell(&["status"])["ready"], true, "the socket did not start the agent");
    three.go_on(&machine, &before, "stop and start by the socket");

    // Without an agent the lease is not renewed, and the keeper freezes at its deadline.
    machine.must(&["systemctl", "stop", "overfence.socket", AGENT]);
    let begun = Instant::now();
    while freeze_of(&machine, &three.running) != "1" {
        assert!(begun.elapsed() < paced(Duration::from_secs(8)), "the keeper did not freeze");
        std::thread::sleep(Duration::from_millis(20));
    }
    let said = machine.must(&["journalctl", "-o", "cat", "--no-pager", "-u", KEEPER]);
    assert!(said.contains(&three.running) && said.contains("frozen"), "{said}");
    machine.must(&["systemctl", "start", "overfence.socket", AGENT]);
    for client in &mut three.clients {
        let _ = client.kill();
        client.wait().unwrap();
    }
}

fn drained(place: &Place) {
    let machine = Machine::boot(place);
    let mut three = Three::open(&machine);
    let before = three.places(&machine);
    assert_eq!(machine.ask(&["drain"]).0, 2, "it wants --yes without a terminal");
    assert_eq!(three.places(&machine), before);
    let drained = machine.tell(&["drain", "--yes"]);
    assert_eq!(drained["closed"], 1, "{drained:#}");
    assert!(drained["left"].as_array().unwrap().is_empty(), "{drained:#}");
    for client in &mut three.clients {
        client.wait().unwrap();
    }
    assert!(three.was_asked(), "the running one was killed without a word");
    let kept = [&three.running, &three.frozen];
    let down = |machine: &Machine| {
        for id in kept {
            let view = machine.tell(&["session", "inspect", id]);
            assert_eq!(view["state"], "PRESERVED", "{view:#}");
            assert!(has(&view, "killed") && has(&view, "gone"), "{view:#}");
            assert!(view["trouble"].is_null(), "{view:#}");
        }
        let mut dirs: Vec<_> = kept
            .iter()
            .map(|id| machine.state.join("sessions").join(id).display().to_string())
            .collect();
        let mut left = left_of_sessions(machine);
        dirs.sort();
        left.sort();
        assert_eq!(left, dirs, "more than the uppers is left");
    };
    down(&machine);
    let refused = machine.run(&["overfence", "session", "open", "-w", "empty"]);
    assert_eq!(refused.status.code(), Some(4));
    assert!(String::from_utf8_lossy(&refused.stderr).starts_with("overfence: draining:"));
    assert_eq!(machine.tell(&["status"])["draining"], true);

    machine.must(&["systemctl", "restart", AGENT, KEEPER]);
    down(&machine);
    for workspace in ["running", "frozen", "empty"] {
        let opened = machine.tell(&["session", "open", "-w", workspace, "--ttl", "10m"]);
        assert_eq!(opened["session"]["generation"], 2, "{opened:#}");
        machine.tell(&["session", "close", &id_of(&opened)]);
    }
    for id in kept {
        let bundle = machine.tell(&["preserved", "export", id]);
        assert!(bundle["entries"].as_u64().is_none_or(|n| n > 0), "{bundle:#}");
        machine.tell(&["preserved", "discard", id, "--yes"]);
    }
    assert_eq!(left_of_sessions(&machine), Vec::<String>::new());
    assert_eq!(machine.tell(&["evidence", "verify"])["ok"], true);
}

/// Each limit where this host has its controller; else the error that names it.
/// A limit by its controller: the value asked for, and the file that it lands in.
const LIMITS: [(&str, &str, &str, &str); 3] = [
    ("memory", "64M", "memory.max", "67108864"),
    ("pids", "20", "pids.max", "20"),
    ("cpu", "0.5", "cpu.max", "50000 100000"),
];

fn open_limited(machine: &Machine, controller: &str, value: &str) -> Output {
    let flag = format!("--{controller}");
    let open = ["overfence", "session", "open", "-w", controller, "--create"];
    machine.run(&[&open[..], &[&flag, value, "-o", "json"]].concat())
}

fn limited(place: &Place) {
    let machine = Machine::boot(place);
    for (controller, value, file, written) in LIMITS {
        let opened = open_limited(&machine, controller, value);
        assert!(opened.status.success(), "{}", String::from_utf8_lossy(&opened.stderr));
        let opened: serde_json::Value = serde_json::from_slice(&opened.stdout).unwrap();
        let id = id_of(&opened);
        assert_eq!(opened["session"]["limits"].as_object().unwrap().len(), 1, "{opened:#}");
        let read = || fs::read_to_string(machine.cgroup_of(&id).join(file)).unwrap();
        assert_eq!(read().trim(), written, "{file}");
        machine.must(&["systemctl", "restart", AGENT]);
        assert_eq!(read().trim(), written, "{file} after a restart");
        machine.tell(&["session", "close", &id]);
    }
    let run = |flag: &str, value: &str, script: &str| {
        let run = ["overfence", "run", "-w", "hog", "--create", flag, value, "--on-exit", "keep"];
        machine.run(&[&run[..], &["--", "sh", "-c", script]].concat())
    };
    let ended = run("--memory", "64M", "head -c 300M /dev/zero | tail");
    assert_ne!(ended.status.code(), Some(0), "300 MiB in 64 MiB of memory");
    let forks = "i=0; while [ $i -lt 40 ]; do sleep 60 & i=$((i+1)); done";
    let ended = run("--pids", "20", forks);
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_ne!(ended.status.code(), Some(0), "40 processes where 20 may be: {said}");
    assert!(said.contains("fork"), "{said}");
    machine.must(&["overfence", "drain", "--yes"]);
}

fn refused(place: &Place) {
    let machine = Machine::boot(place);
    let offered = machine::offered();
    for (controller, value, ..) in LIMITS.iter().filter(|(name, ..)| !offered.contains(name)) {
        let refused = open_limited(&machine, controller, value);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{said}");
        assert!(said.starts_with("overfence: unsupported: "), "{said}");
        assert!(said.contains(&format!("controller `{controller}`")), "{said}");
        let workspace = machine.tell(&["workspace", "status", controller]);
        assert_eq!(workspace["generation"], 0, "a lease was taken: {workspace:#}");
        // A default that cannot be had refuses each open, too.
        let conf = machine.root.join("etc/overfence");
        fs::create_dir_all(&conf).unwrap();
        let value = if *controller == "pids" { "10" } else { &format!("{value:?}") };
        fs::write(conf.join("config.toml"), format!("[limits]\n{controller} = {value}\n")).unwrap();
        machine.must(&["systemctl", "restart", AGENT]);
        assert_eq!(machine.ask(&["session", "open", "-w", "d", "--create"]).0, 1);
        fs::remove_file(conf.join("config.toml")).unwrap();
        machine.must(&["systemctl", "restart", AGENT]);
    }
    assert!(offered.len() < LIMITS.len(), "nothing was refused");
    assert_eq!(left_of_sessions(&machine), Vec::<String>::new());
}

fn watchdog(place: &Place) {
    let machine = Machine::prepared(place, |root| {
        drop_in(root, AGENT, "[Service]\nWatchdogSec=3s\nTimeoutAbortSec=1s\n");
    })
    .started();
    let (mut client, id) = run(&machine, "w", "60s", WRITES);
    let log = machine.state.join("sessions").join(&id).join("upper/log");
    let pid = machine.main_pid(AGENT);
    // It is fed for longer than its limit.
    std::thread::sleep(paced(Duration::from_secs(4)));
    assert_eq!(machine.main_pid(AGENT), pid, "{}", machine.log());
    machine.must(&["systemctl", "kill", "--signal=STOP", AGENT]);
    machine.until_unit(AGENT, "MainPID", |now| now != "0" && now != pid);
    machine.until_unit(AGENT, "ActiveState", |state| state == "active");
    let said = machine.must(&["journalctl", "-o", "cat", "--no-pager", "-u", AGENT]);
    assert!(said.contains("Watchdog timeout"), "{said}");
    assert!(grows(&log));
    let view = machine.tell(&["session", "inspect", &id]);
    assert_eq!((view["state"].as_str(), view["generation"].as_u64()), (Some("ACTIVE"), Some(1)));
    machine.tell(&["session", "close", &id, "--discard", "--yes"]);
    client.wait().unwrap();
}

fn rebooted(place: &Place) {
    let mut machine = Machine::boot(place);
    let mut three = Three::open(&machine);
    let bytes = |id: &str| {
        let log = machine.state.join("sessions").join(id).join("upper/log");
        fs::metadata(log).map_or(0, |m| m.len())
    };
    let (running, frozen) = (bytes(&three.running), bytes(&three.frozen));
    assert!(running > 0 && frozen > 0);
    let kept = |machine: &Machine, three: &Three| {
        for id in [&three.running, &three.frozen] {
            let view = machine.until(id, |v| v["state"] == "PRESERVED");
            let log = machine.state.join("sessions").join(id).join("upper/log");
            let now = fs::metadata(log).unwrap().len();
            assert!(now >= if *id == three.running { running } else { frozen }, "{view:#}");
            assert!(!has(&view, "committed"));
        }
    };
    // As with limits: what systemd runs at the shutdown must not be held up by them.
    machine.enable_for_sessions();
    machine.reboot();
    let said = machine.must(&["journalctl", "-b", "-1", "-o", "cat", "--no-pager", "-u", SESSIONS]);
    assert!(said.contains("ended 3 session(s)"), "{said}");
    assert!(three.was_asked(), "the running one was killed without a word");
    for client in &mut three.clients {
        client.wait().unwrap();
    }
    kept(&machine, &three);
    let view = machine.tell(&["session", "inspect", &three.running]);
    assert!(view["loss"].to_string().contains("started again"), "{view:#}");
    // Nobody holds anything: each workspace can be written again, under a new generation.
    for workspace in ["running", "frozen", "empty"] {
        let opened = machine.tell(&["session", "open", "-w", workspace, "--ttl", "10m"]);
        assert_eq!(opened["session"]["generation"], 2, "{opened:#}");
    }
    machine.cut_power();
    machine.start();
    kept(&machine, &three);
    for workspace in ["running", "empty"] {
        let opened = machine.tell(&["session", "open", "-w", workspace, "--ttl", "10m"]);
        assert_eq!(opened["session"]["generation"], 3, "{opened:#}");
    }
    assert_eq!(machine.tell(&["evidence", "verify"])["ok"], true);
    for id in [&three.running, &three.frozen] {
        machine.tell(&["preserved", "export", id]);
        machine.tell(&["preserved", "discard", id, "--yes"]);
    }
}
