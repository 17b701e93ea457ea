//! Kept fenced: what root does to a stopped session, with the agent there and while it is down, is
//! noticed, recorded with what the kernel said, and undone where it can be; where it cannot, no fact
//! says more than holds.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::agent_process::{Host, has, id_of, path_of};
use crate::host::{Place, Test, paced, paced_ttl};

mod holders;
mod slow;
mod upper;

pub fn tests() -> Vec<Test> {
    let here = [
        Test { name: "who_is_moved_out_is_brought_back", run: moved_out },
        Test { name: "who_was_moved_out_before_the_fence_is_brought_back", run: moved_before },
        Test {
            name: "who_cannot_be_brought_back_is_named_and_nothing_is_called_frozen",
            run: left_out,
        },
        Test { name: "a_removed_cgroup_is_made_again_with_its_processes", run: removed },
        Test { name: "a_remount_is_undone", run: remounted },
    ];
    let rest = [upper::tests(), holders::tests(), slow::tests()];
    here.into_iter().chain(rest.into_iter().flatten()).collect()
}

fn host(place: &Place, sweep: &str) -> Host {
    host_with(place, sweep, "")
}

/// With more keys of `[fence]`.
fn host_with(place: &Place, sweep: &str, more: &str) -> Host {
    let mut host = Host::new(place, "h");
    let text = std::fs::read_to_string(&host.config).unwrap();
    let keys =
        format!("[preserve]\nsweep = \"{sweep}\"\n[fence]\nfreeze_deadline = \"200ms\"\n{more}");
    std::fs::write(&host.config, format!("{text}{keys}")).unwrap();
    assert!(host.start(None), "{}", host.log());
    host
}

fn must(command: &mut Command) {
    let out = command.output().unwrap();
    assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
}

fn wait(what: &str, mut fits: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !fits() {
        assert!(begun.elapsed() < paced(Duration::from_secs(20)), "in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A shell in the session's cgroup that appends to a file in the merged tree, by a descriptor that
/// it opens anew each time: read-only is granted while it is frozen, more often than not.
fn writer(session: &Value) -> Child {
    let child = Command::new("/bin/sh")
        .arg("-c")
        .arg("echo $$ > \"$1\"/cgroup.procs && cd \"$2\" && while :; do echo x >> held; sleep 0.01; done")
        .arg("sh")
        .args([path_of(session, "cgroup"), path_of(session, "merged")])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait("the writer writes", || size(session) > 0);
    child
}

fn size(session: &Value) -> u64 {
    std::fs::metadata(path_of(session, "upper").join("held")).map_or(0, |m| m.len())
}

/// How often an event of this name is in the session's evidence; the last of them.
fn told(host: &Host, id: &str, event: &str) -> (usize, Value) {
    let entries = host.must(&["evidence", "show", "--session", id]);
    let entries = entries.as_array().unwrap();
    let them: Vec<_> = entries.iter().filter(|e| e["detail"]["event"]["event"] == event).collect();
    (them.len(), them.last().map_or(Value::Null, |e| e["detail"]["event"].clone()))
}

fn cgroup_of(pid: u32) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("0::"));
    line.unwrap_or_default().to_owned()
}

/// One that has ended meanwhile is nowhere.
fn move_to(cgroup: &Path, pid: u32) {
    match std::fs::write(cgroup.join("cgroup.procs"), pid.to_string()) {
        Err(e) if e.raw_os_error() == Some(libc::ESRCH) => {}
        answer => answer.unwrap(),
    }
}

/// A cgroup beside the sessions', where nobody freezes anybody.
fn elsewhere(place: &Place) -> PathBuf {
    let cgroup = place.cgroup.join("elsewhere");
    std::fs::create_dir(&cgroup).unwrap();
    cgroup
}

/// Nothing is written any more.
fn stands_still(session: &Value) {
    let before = size(session);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(size(session), before, "it writes on");
}

fn fence(host: &Host, id: &str, to: &str) {
    host.ask(&["fence", id, "--to", to, "--reason", "test", "--wait"]);
    host.until(id, |v| has(v, to));
}

fn procs_in(cgroup: &Path) -> Vec<u32> {
    let text = std::fs::read_to_string(cgroup.join("cgroup.procs")).unwrap();
    text.lines().map(|pid| pid.parse().unwrap()).collect()
}

fn moved_out(place: &Place) {
    // The patrol finds it, not the sweep.
    let mut host = host(place, "10m");
    let opened = host.open("w", &paced_ttl(60));
    let (id, session) = (id_of(&opened), &opened["session"]);
    let mut child = writer(session);
    let (cgroup, other) = (path_of(session, "cgroup"), elsewhere(place));
    fence(&host, &id, "frozen");
    stands_still(session);

    // All of it: the cgroup is empty, which the kernel tells. One of two: nothing tells.
    let mut beside = Command::new("sleep").arg("600").spawn().unwrap();
    for (n, keep_one) in [(1, false), (2, true)] {
        if keep_one {
            move_to(&cgroup, beside.id());
        }
        let inside: Vec<u32> = procs_in(&cgroup)
            .into_iter()
            .filter(|pid| !(keep_one && *pid == beside.id()))
            .collect();
        assert!(inside.contains(&child.id()), "{inside:?}");
        for pid in inside {
            move_to(&other, pid);
        }
        let begun = Instant::now();
        wait("it is told", || told(&host, &id, "moved_out").0 >= n);
        eprintln!("noticed and told {:?} after the last move", begun.elapsed());
        let view = host.until(&id, |v| has(v, "frozen"));
        assert!(cgroup_of(child.id()).ends_with(&id), "{}", cgroup_of(child.id()));
        stands_still(session);
        let (_, event) = told(&host, &id, "moved_out");
        let strays = event["strays"].as_array().unwrap();
        let stray = strays.iter().find(|s| s["pid"] == child.id()).expect("it is named");
        assert!(stray["found_in"].as_str().unwrap().ends_with("/elsewhere"), "{event:#}");
        assert_eq!(stray["left_out"], Value::Null, "{event:#}");
        assert_eq!(view["state"], "PRESERVED");
    }

    // And while no agent runs: it runs on, and the next start finds it, with the children it had.
    host.kill_agent();
    for pid in procs_in(&cgroup) {
        move_to(&other, pid);
    }
    let before = size(session);
    wait("it runs on", || size(session) > before);
    assert!(host.start(None), "{}", host.log());
    assert!(cgroup_of(child.id()).ends_with(&id), "{}", host.log());
    assert!(told(&host, &id, "moved_out").0 >= 3, "{}", host.log());
    host.until(&id, |v| has(v, "frozen"));
    stands_still(session);

    // A kill meets it, too.
    move_to(&other, child.id());
    host.must(&["fence", &id, "--to", "killed", "--reason", "test", "--wait"]);
    host.until(&id, |v| has(v, "killed"));
    child.wait().unwrap();
    beside.wait().unwrap();
    host.must(&["preserved", "discard", &id, "--yes"]);
    assert!(!path_of(session, "upper").exists());
    host.stop();
}

fn moved_before(place: &Place) {
    let mut host = host(place, "1s");
    let script = "while :; do echo x >> held; sleep 0.02; done";
    let mut run = Command::new(&host.binary)
        .args(["run", "-w", "w", "--create", "--ttl", &paced_ttl(60), "--", "sh", "-c", script])
        .env("OVERFENCE_SOCKET", host.dir.join("run/overfence.sock"))
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let sessions = || host.must(&["session", "list"]);
    wait("it is there", || sessions()[0]["state"] == "ACTIVE");
    let session = sessions()[0].clone();
    let id = session["id"].as_str().unwrap();
    wait("it writes", || size(&session) > 0);
    // The shell, and whoever else is not the session's init.
    let cgroup = path_of(&session, "cgroup");
    let name = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let shell = procs_in(&cgroup).into_iter().find(|pid| name(*pid) == "sh\n").expect("a shell");
    let other = elsewhere(place);
    move_to(&other, shell);
    host.ask(&["fence", id, "--to", "frozen", "--reason", "test", "--wait"]);
    host.until(id, |_| told(&host, id, "moved_out").0 > 0);
    let (_, event) = told(&host, id, "moved_out");
    assert_eq!(event["strays"][0]["known_by"], "its pid namespace is the session's", "{event:#}");
    assert!(cgroup_of(shell).ends_with(id), "{}", cgroup_of(shell));
    host.until(id, |v| has(v, "frozen"));
    stands_still(&session);
    run.wait().unwrap();
    host.must(&["preserved", "discard", id, "--yes"]);
    host.stop();
}

fn left_out(place: &Place) {
    let mut host = host(place, "1s");
    let opened = host.open("w", &paced_ttl(60));
    let (id, session) = (id_of(&opened), &opened["session"]);
    let mut child = writer(session);
    let (cgroup, other) = (path_of(session, "cgroup"), elsewhere(place));
    fence(&host, &id, "frozen");
    host.kill_agent();
    for pid in procs_in(&cgroup) {
        move_to(&other, pid);
    }
    // Beside a cgroup of threads one of processes takes nobody.
    let beside = cgroup.with_file_name("threads");
    std::fs::create_dir(&beside).unwrap();
    std::fs::write(beside.join("cgroup.type"), "threaded").unwrap();
    assert!(host.start(None), "{}", host.log());
    let view = host.until(&id, |v| !v["blockers"].as_array().unwrap().is_empty());
    assert!(!has(&view, "frozen"), "{view:#}");
    let blockers = view["blockers"].as_array().unwrap();
    assert!(blockers.iter().any(|b| b["pid"] == child.id()), "{view:#}");
    let (_, event) = told(&host, &id, "moved_out");
    let left = event["strays"][0]["left_out"].as_str().unwrap_or_default();
    assert!(left.contains("cgroup.procs"), "{event:#}");
    // Nor is it called killed: nobody outside is.
    host.ask(&["fence", &id, "--to", "killed", "--reason", "test", "--wait=2s"]);
    let view = host.must(&["session", "inspect", &id]);
    assert!(!has(&view, "killed") && !has(&view, "frozen"), "{view:#}");
    assert!(child.try_wait().unwrap().is_none(), "who is outside was killed");
    // Once nobody is left outside, it is.
    child.kill().unwrap();
    child.wait().unwrap();
    host.until(&id, |v| has(v, "killed"));
    host.must(&["preserved", "discard", &id, "--yes"]);
    host.stop();
}

fn removed(place: &Place) {
    let mut host = host(place, "10m");
    let opened = host.open("w", &paced_ttl(60));
    let (id, session) = (id_of(&opened), &opened["session"]);
    let cgroup = path_of(session, "cgroup");
    fence(&host, &id, "frozen");
    let frozen = || std::fs::read_to_string(cgroup.join("cgroup.freeze")).is_ok_and(|t| t == "1\n");
    // An empty one goes at once, and is back, frozen, before anybody could use it.
    for n in 1..=2 {
        std::fs::remove_dir(&cgroup).unwrap();
        wait("it is made again", frozen);
        wait("it is told", || told(&host, &id, "foreign_thaw").0 >= n);
        host.until(&id, |v| has(v, "frozen"));
    }
    // The new one is watched as the old one was: a thaw is noticed though no sweep comes.
    std::fs::write(cgroup.join("cgroup.freeze"), "0").unwrap();
    wait("it is frozen again", frozen);
    wait("it is told", || told(&host, &id, "foreign_thaw").0 >= 3);
    assert!(host.metric("foreign_thaws_total") >= 3);

    // With processes, which have to be moved out first, while no agent runs.
    let opened = host.open("x", &paced_ttl(60));
    let (id, session) = (id_of(&opened), &opened["session"]);
    let mut child = writer(session);
    let (cgroup, other) = (path_of(session, "cgroup"), elsewhere(place));
    fence(&host, &id, "frozen");
    for made in [false, true] {
        host.kill_agent();
        for pid in procs_in(&cgroup) {
            move_to(&other, pid);
        }
        std::fs::remove_dir(&cgroup).unwrap();
        if made {
            std::fs::create_dir(&cgroup).unwrap();
        }
        let before = size(session);
        wait("it runs on", || size(session) > before);
        assert!(host.start(None), "{}", host.log());
        host.until(&id, |v| has(v, "frozen"));
        assert!(cgroup_of(child.id()).ends_with(&id), "{}\n{}", cgroup_of(child.id()), host.log());
        stands_still(session);
        assert!(told(&host, &id, "moved_out").0 > usize::from(made), "{}", host.log());
    }
    host.must(&["preserved", "discard", &id, "--yes"]);
    child.wait().unwrap();
    host.stop();
}

/// Reconfigures as fsconfig(2) does, which wakes nobody who watches the mounts.
fn reconfigure_rw(at: &Path) {
    use rustix::mount::{FsPickFlags, fsconfig_reconfigure, fsconfig_set_flag, fspick};
    let fs = fspick(rustix::fs::CWD, at, FsPickFlags::FSPICK_CLOEXEC).unwrap();
    fsconfig_set_flag(&fs, "rw").unwrap();
    fsconfig_reconfigure(&fs).unwrap();
}

fn remounted(place: &Place) {
    let mut host = host(place, "10m");
    let opened = host.open("w", &paced_ttl(60));
    let (id, session) = (id_of(&opened), &opened["session"]);
    let merged = path_of(session, "merged");
    std::fs::write(merged.join("f"), "bytes").unwrap();
    fence(&host, &id, "read-only");
    let writable = || std::fs::write(merged.join("probe"), "").is_ok();
    assert!(!writable());

    // mount(8): the kernel tells that a mount changed, no sweep is needed.
    must(Command::new("mount").args(["-o", "remount,rw"]).arg(&merged));
    let begun = Instant::now();
    wait("it is told", || told(&host, &id, "read_only_lost").0 >= 1);
    eprintln!("noticed and told {:?} after mount -o remount,rw", begun.elapsed());
    host.until(&id, |v| has(v, "read-only"));
    assert!(!writable());
    let (_, event) = told(&host, &id, "read_only_lost");
    assert_eq!(event["seen"], "the write probe was granted");

    // While no agent runs.
    host.kill_agent();
    must(Command::new("mount").args(["-o", "remount,rw"]).arg(&merged));
    assert!(host.start(None), "{}", host.log());
    assert_eq!(told(&host, &id, "read_only_lost").0, 2, "{}", host.log());
    host.until(&id, |v| has(v, "read-only"));
    assert!(!writable());
    host.kill_agent();

    // fsconfig(2) tells nobody: the next sweep finds it.
    let text = std::fs::read_to_string(&host.config).unwrap();
    std::fs::write(&host.config, text.replace("\"10m\"", "\"1s\"")).unwrap();
    assert!(host.start(None), "{}", host.log());
    reconfigure_rw(&merged);
    wait("it is told", || told(&host, &id, "read_only_lost").0 >= 3);
    host.until(&id, |v| has(v, "read-only"));
    assert!(!writable());
    host.must(&["preserved", "discard", &id, "--yes"]);
    host.stop();
}
