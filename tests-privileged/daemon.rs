//! The agent as a daemon: what its terminal, its limits and what an earlier one left do to it.

use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::agent_process::{Host, id_of};
use crate::host::{Place, Test, paced};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "a_hangup_is_an_orderly_end", run: hangup },
        Test { name: "a_shells_descriptor_limit_does_not_end_it", run: descriptors },
        Test { name: "a_long_runtime_directory_has_session_sockets", run: long_runtime },
        Test { name: "i8_a_start_does_not_wait_for_the_trash", run: trash },
    ]
}

fn wait(what: &str, mut fits: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !fits() {
        assert!(begun.elapsed() < paced(Duration::from_secs(30)), "in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn hangup(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None), "{}", host.log());
    let id = id_of(&host.open("w", "60s"));
    kill(Pid::from_raw(host.agent_pid().cast_signed()), Signal::SIGHUP).unwrap();
    wait("the agent ends", || host.dead());
    // As after SIGTERM: no death by a signal, and the session goes on.
    assert_eq!(host.ended().unwrap().code(), Some(0), "{}", host.log());
    assert!(host.start(None), "{}", host.log());
    assert_eq!(host.must(&["session", "inspect", &id])["state"], "ACTIVE");
    host.must(&["session", "close", &id]);
    host.stop();
}

fn long_runtime(place: &Place) {
    // The agent's own socket fits into what a socket's path may have, those of sessions do not.
    let mut host = Host::new(place, &"l".repeat(40));
    assert!(host.start(None), "{}", host.log());
    let id = id_of(&host.open("w", "60s"));
    let inside = host.dir.join("run/sessions").join(&id).join("inside/session.sock");
    assert!(inside.as_os_str().len() > 107, "{}", inside.display());
    // From inside it is a short path whatever it is here.
    let beat =
        host.run(&["session", "exec", &id, "--", "/run/overfence/overfence", "lease", "beat"]);
    assert!(beat.status.success(), "{beat:?}");
    host.must(&["session", "close", &id]);
    host.stop();
}

fn descriptors(place: &Place) {
    const SOFT: u64 = 128;
    const SESSIONS: usize = 40;
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    assert!(most >= 1024, "this host allows {most} descriptors at most");
    setrlimit(Resource::RLIMIT_NOFILE, SOFT, most).unwrap();
    let mut host = Host::new(place, "h");
    assert!(host.start(None), "{}", host.log());
    for i in 0..SESSIONS {
        host.open(&format!("w{i}"), "10m");
    }
    let fds = format!("/proc/{}/fd", host.agent_pid());
    let open = std::fs::read_dir(fds).unwrap().count();
    assert!(open as u64 > SOFT, "{open} descriptors show nothing");
    host.must(&["drain", "--yes"]);
    host.stop();
}

/// More levels than a stack or a path takes.
fn deep(dir: &Path) {
    let from = std::env::current_dir().unwrap();
    std::env::set_current_dir(dir).unwrap();
    for _ in 0..10_000 {
        std::fs::create_dir("d").unwrap();
        std::env::set_current_dir("d").unwrap();
    }
    std::env::set_current_dir(from).unwrap();
}

fn trash(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None), "{}", host.log());
    let id = id_of(&host.open("w", "10m"));
    host.kill_agent();
    // As a removal leaves it that was cut off.
    let trash = host.dir.join("state/trash");
    let left = trash.join("s-00000000000070008000000000000001");
    std::fs::create_dir_all(left.join("upper")).unwrap();
    std::os::unix::fs::symlink("s-00000000000070008000000000000001", left.join("marker")).unwrap();
    deep(&left.join("upper"));
    // What is removed there takes its time; the start does not: it fails at the first entry.
    assert!(host.start(None), "{}", host.log());
    assert_eq!(host.must(&["session", "inspect", &id])["state"], "ACTIVE");
    wait("the trash is empty", || std::fs::read_dir(&trash).unwrap().count() == 0);
    wait("it is said", || host.log().contains("finished the removal"));
    let said = host.log();
    let finished = said.find("finished the removal").unwrap();
    assert!(said.rfind("ready on").unwrap() < finished, "ready came after the removal: {said}");
    host.must(&["session", "close", &id]);
    host.stop();
}
