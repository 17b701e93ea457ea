//! `overfence demo`, run as an operator runs it: it holds, in time, and leaves nothing.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::host::{Place, Test, paced};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "the_story_holds_and_leaves_nothing", run: holds },
        Test { name: "keep_keeps_the_directory_and_says_where", run: keeps },
        Test { name: "an_interrupted_demo_leaves_nothing_and_fails", run: interrupted },
        Test { name: "a_killed_demo_takes_its_agent_along_and_the_next_clears_up", run: killed },
        Test { name: "without_root_it_says_so_in_a_line", run: not_root },
    ]
}

/// Where the host has the gate.
const GATE: &str = "the lease gate refuses a write into C's overlay";

/// The ten steps and what the checker confirms in each.
const STORY: &[(&str, &[&str])] = &[
    (
        "A opens and writes",
        &[
            "the authority issued generation 1 to a",
            "A's overlay is writable",
            "A's bytes are in its upper",
            "A's beats move its deadline",
        ],
    ),
    ("C keeps its file open and never beats", &["C holds a descriptor for writing"]),
    (
        "A is stopped; its beats end; its lease runs out",
        &[
            "A stands stopped",
            "it is between two writes",
            "A's cgroup is frozen",
            "A's superblock is read-only",
            "the upper holds what A wrote",
            "A could read that its lease is lost",
            "frozen at the deadline and not before",
            "A's client is told that the lease is lost",
        ],
    ),
    (
        "B takes over and publishes",
        &[
            "the authority has B's layer as version 1 of generation 2",
            "the layer holds B's file and nothing of A's",
        ],
    ),
    (
        "A foreign administrator thaws A",
        &[
            "the kernel refused A's write with EROFS",
            "no byte of it is in the upper",
            "the superblock is still read-only",
            "A is frozen again",
            "the agent recorded the foreign thaw",
        ],
    ),
    (
        "A asks to publish",
        &[
            "the exit code says that it was refused",
            "the reason is stale_generation",
            "the present owner is named",
            "the authority changed nothing",
        ],
    ),
    (
        "C, which held its file open",
        &[
            "only frozen is claimed",
            GATE,
            "the kernel refused read-only with EBUSY",
            "the holder named is the one that holds it",
            "C's cgroup is frozen",
            "C's superblock is still writable",
        ],
    ),
    (
        "The head is B's",
        &["status says head and generation of B", "the authority's file says the same"],
    ),
    (
        "A's bytes are exported, then given up",
        &[
            "the bundle is verified and stable",
            "A's bytes are in the bundle",
            "nothing of A is left",
        ],
    ),
    (
        "The evidence holds together",
        &["the chain is whole", "every row was read", "agent and keeper ran all the time"],
    ),
];

fn start(place: &Place, words: &[&str]) -> Child {
    Command::new(&place.binary)
        .arg("demo")
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn holds(place: &Place) {
    let gate = overfence::kernel::gate::ask().is_ok();
    if gate {
        // Of its own: no other agent is told what this one's gate refuses.
        crate::gate::own_bpffs();
    }
    let begun = Instant::now();
    let child = start(place, &["-o", "json"]);
    let pid = child.id();
    let out = child.wait_with_output().unwrap();
    let took = begun.elapsed();
    let text = String::from_utf8(out.stdout).unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    let report: Value =
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text} {said}"));
    assert!(out.status.success(), "{}: {text} {said}", out.status);
    assert_eq!(report["ok"], true, "{text}");
    assert_eq!(report["faults"], serde_json::json!([]));
    assert!(took < paced(Duration::from_secs(20)), "it took {took:?}");
    let steps = report["steps"].as_array().unwrap();
    assert_eq!(steps.len(), STORY.len(), "{text}");
    for (n, (step, (title, checks))) in steps.iter().zip(STORY).enumerate() {
        assert_eq!((&step["n"], &step["title"]), (&Value::from(n + 1), &Value::from(*title)));
        assert!(step["took_ms"].as_f64().unwrap() > 0.0, "{step:#}");
        assert!(!step["asked"].as_str().unwrap().is_empty(), "{step:#}");
        assert!(!step["answered"].as_str().unwrap().is_empty(), "{step:#}");
        let made: Vec<_> = step["checks"]
            .as_array()
            .unwrap()
            .iter()
            .map(|c| c["what"].as_str().unwrap())
            .collect();
        let wanted: Vec<_> = checks.iter().copied().filter(|what| gate || *what != GATE).collect();
        assert_eq!(made, wanted, "{title}");
        for check in step["checks"].as_array().unwrap() {
            assert_eq!(check["ok"], true, "{title}: {check:#}");
            if check["what"] == GATE {
                let told = format!("told: \"names\" by pid {pid} (");
                assert!(check["seen"].as_str().unwrap().contains(&told), "{check:#}");
            }
        }
    }
    nothing_left(pid);
}

fn keeps(place: &Place) {
    let child = start(place, &["-o", "json", "--keep"]);
    let pid = child.id();
    let out = child.wait_with_output().unwrap();
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    let kept = PathBuf::from(report["kept"].as_str().unwrap());
    let there = kept.join("state/overfence.db").exists() && kept.join("config.toml").exists();
    let plain = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    std::fs::remove_dir_all(&kept).unwrap();
    assert!(there, "{}", kept.display());
    assert!(!plain.contains(&*kept.to_string_lossy()), "{plain}");
    nothing_left(pid);
}

fn interrupted(place: &Place) {
    let child = start(place, &["-o", "json"]);
    let pid = child.id();
    // While A's lease runs out: a session is open, its writers run.
    let cgroup = own_cgroup(pid).join("sessions");
    let begun = Instant::now();
    while std::fs::read_dir(&cgroup).map_or(0, |d| d.flatten().filter(is_dir).count()) < 2 {
        assert!(begun.elapsed() < paced(Duration::from_secs(20)), "no two sessions in {cgroup:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    let raw = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
    nix::sys::signal::kill(raw, nix::sys::signal::Signal::SIGINT).unwrap();
    let out = child.wait_with_output().unwrap();
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert!(!out.status.success());
    assert_eq!(report["ok"], false);
    assert_eq!(report["faults"], serde_json::json!(["interrupted by SIGINT"]), "{report:#}");
    nothing_left(pid);
}

fn killed(place: &Place) {
    let mut child = start(place, &["-o", "json"]);
    let pid = child.id();
    let cgroup = own_cgroup(pid).join("sessions");
    let begun = Instant::now();
    while std::fs::read_dir(&cgroup).map_or(0, |d| d.flatten().filter(is_dir).count()) < 2 {
        assert!(begun.elapsed() < paced(Duration::from_secs(20)), "no two sessions in {cgroup:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // Agent, keeper and clients die with it: nobody names the directory any more but the writers
    // in its cgroup.
    let inside = || {
        let below = |dir: &std::fs::DirEntry| {
            std::fs::read_to_string(dir.path().join("cgroup.procs")).unwrap_or_default()
        };
        let all = std::fs::read_dir(&cgroup).unwrap().flatten().filter(is_dir);
        all.map(|dir| below(&dir)).collect::<String>()
    };
    let name = format!("/overfence-demo-{pid}/");
    let outside = || {
        let writers = inside();
        std::fs::read_dir("/proc").unwrap().flatten().any(|entry| {
            let text = std::fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default();
            let pid = entry.file_name().to_string_lossy().into_owned();
            text.contains(&name) && !writers.lines().any(|writer| writer == pid)
        })
    };
    let begun = Instant::now();
    while outside() {
        let late = begun.elapsed() > paced(Duration::from_secs(5));
        assert!(!late, "the agent or the keeper is left");
        std::thread::sleep(Duration::from_millis(5));
    }
    holds(place);
    nothing_left(pid);
}

fn is_dir(entry: &std::fs::DirEntry) -> bool {
    entry.file_type().is_ok_and(|kind| kind.is_dir())
}

fn not_root(place: &Place) {
    use std::os::unix::process::CommandExt as _;
    // A copy that this user may run, wherever the binary was built.
    let copy = Path::new("/tmp").join(format!("overfence-test-{}", std::process::id()));
    std::fs::copy(&place.binary, &copy).unwrap();
    let out = Command::new(&copy).arg("demo").uid(65534).gid(65534).output();
    std::fs::remove_file(&copy).unwrap();
    let out = out.unwrap();
    assert_eq!(out.status.code(), Some(5));
    let said = String::from_utf8(out.stderr).unwrap();
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains("needs root"), "{said}");
}

fn own_cgroup(pid: u32) -> PathBuf {
    crate::host::own_cgroup().join(format!("overfence-demo-{pid}"))
}

/// No cgroup, no directory in any process's mounts, no process of the demo's.
fn nothing_left(pid: u32) {
    assert!(!own_cgroup(pid).exists());
    let name = format!("/overfence-demo-{pid}/");
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let mounts = std::fs::read_to_string(entry.path().join("mountinfo")).unwrap_or_default();
        assert!(!mounts.contains(&name), "{:?}: {mounts}", entry.path());
        let command = std::fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default();
        assert!(!command.contains(&name), "{:?}: {command}", entry.path());
    }
    for base in ["/var/tmp", "/tmp", "/var/lib", "/root", "/run"] {
        let dir = Path::new(base).join(format!("overfence-demo-{pid}"));
        assert!(!dir.exists(), "{} is left", dir.display());
    }
}
