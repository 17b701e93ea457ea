//! A workload fills the file system of the state directory: others are stopped, recorded and
//! removed all the same, and an agent starts on it.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::agent_process::{Host, has, id_of, path_of};
use crate::host::{Place, Test, paced, paced_ttl};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "a_filler_on_tmpfs_stops_nobody_else", run: on_tmpfs },
        Test { name: "a_filler_on_ext4_stops_nobody_else", run: on_ext4 },
    ]
}

fn must(command: &mut Command) {
    let out = command.output().unwrap();
    assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
}

fn on_tmpfs(place: &Place) {
    story(place, |at| {
        must(Command::new("mount").args(["-t", "tmpfs", "-o", "size=48m", "tmpfs"]).arg(at));
    });
}

fn on_ext4(place: &Place) {
    let image = place.dir.join("image");
    std::fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
    let make = |block: &str| {
        must(Command::new("mkfs.ext4").args(["-q", "-F", "-b", block]).arg(&image));
    };
    // Where a mapped file can run out of disk in the middle of a page, the store's index would.
    make("1024");
    let mut host = Host::new(place, "small");
    let state = host.dir.join("state");
    std::fs::create_dir(&state).unwrap();
    must(Command::new("mount").args(["-o", "loop"]).args([&image, &state]));
    assert!(!host.start(None) && host.log().contains("mkfs.ext4 -b 4096"), "{}", host.log());
    must(Command::new("umount").arg(&state));
    make("4096");
    // The loop device goes with the mount, and the mount with the test's namespace.
    story(place, |at| {
        must(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(at));
    });
}

/// Writes whenever there is room, as fast as it can.
fn filler(opened: &Value) -> Child {
    let session = &opened["session"];
    Command::new("/bin/sh")
        .arg("-c")
        .arg("echo $$ > \"$1\"/cgroup.procs && cd \"$2\" && while :; do cat /dev/zero >>fill; done")
        .arg("sh")
        .args([path_of(session, "cgroup"), path_of(session, "merged")])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// What a writer finds free; ext4 keeps some for itself.
fn free(at: &Path) -> u64 {
    let stat = rustix::fs::statvfs(at).unwrap();
    stat.f_bavail * stat.f_frsize
}

fn wait(what: &str, limit: u64, mut fits: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !fits() {
        assert!(begun.elapsed() < paced(Duration::from_secs(limit)), "in vain: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn story(place: &Place, mount: impl FnOnce(&Path)) {
    let mut host = Host::new(place, "a");
    let state = host.dir.join("state");
    std::fs::create_dir(&state).unwrap();
    mount(&state);
    let text = std::fs::read_to_string(&host.config).unwrap();
    std::fs::write(&host.config, format!("reserve_mib = 8\n{text}")).unwrap();
    assert!(host.start(None), "{}", host.log());
    let space = |host: &Host| host.must(&["status"])["space"].clone();
    assert_eq!(space(&host)["reserve"], 8 << 20, "{}", host.log());

    let greedy = host.open("greedy", "10m");
    let lost = id_of(&host.open("lost", &paced_ttl(3)));
    let lasting = id_of(&host.open("lasting", "10m"));
    let mut child = filler(&greedy);
    wait("the disk is full", 60, || free(&state) < 64 << 10);

    // The lease of another runs out on the full disk: stopped, and stopped in the record.
    let view = host.until(&lost, |view| view["state"] == "PRESERVED");
    assert!(has(&view, "frozen") && has(&view, "read-only"), "{view:#}");
    let shown = space(&host);
    assert_eq!(shown["short"], true, "{shown}");
    let answer = host.run(&["session", "open", "-w", "new", "--create", "--ttl", "10s"]);
    let said = String::from_utf8_lossy(&answer.stderr);
    assert!(!answer.status.success() && said.contains("no_space"), "{said}");

    // An agent that is killed here starts again, and knows what was decided: also if the filler took
    // all that was held back.
    host.kill_agent();
    std::fs::File::create(state.join("reserve")).unwrap();
    wait("the disk is full again", 60, || free(&state) < 64 << 10);
    assert!(host.start(None), "{}", host.log());
    let again = host.must(&["session", "inspect", &lost]);
    assert_eq!((&again["state"], &again["loss"]), (&view["state"], &view["loss"]));
    assert_eq!(host.must(&["session", "inspect", &lasting])["state"], "ACTIVE");

    // The filler is stopped and removed by the ordinary verbs.
    let greedy = id_of(&greedy);
    host.must(&["fence", &greedy, "--to", "killed", "--reason", "it fills the disk", "--wait"]);
    child.wait().unwrap();
    let closed = host.must(&["preserved", "discard", &greedy, "--yes"]);
    assert_eq!(closed["state"], "CLOSED", "{closed:#}");
    wait("the reserve is made again", 10, || {
        let shown = space(&host);
        shown["short"] == false && shown["reserve"] == 8 << 20
    });
    host.open("new", "10s");
    let report = host.must(&["evidence", "verify"]);
    assert_eq!(report["ok"], true, "{report:#}");
    host.stop();
}
