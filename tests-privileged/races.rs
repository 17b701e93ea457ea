//! Foreign hands and races: what others remove, remount or ask for at the same moment.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::agent_process::{Host, has, id_of, path_of};
use crate::host::{Place, Test, cgroup2_root};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "i1_racing_forced_takeovers_leave_one_writer", run: forced_race },
        Test { name: "a_removed_cgroup_is_opened_anew", run: removed_cgroup },
        Test { name: "a_detached_overlay_is_preserved_as_frozen_only", run: detached },
        Test {
            name: "a_second_agent_leaves_the_first_ones_sessions_and_socket",
            run: second_agent,
        },
        Test { name: "control_characters_reach_no_terminal", run: control_characters },
    ]
}

fn writer(view: &Value, script: &str) -> Child {
    let procs = path_of(view, "cgroup").join("cgroup.procs");
    Command::new("/bin/sh")
        .arg("-c")
        .arg("echo $$ > \"$1\" && eval \"$2\"")
        .args(["sh".as_ref(), procs.as_os_str(), script.as_ref()])
        .stdin(Stdio::null())
        .spawn()
        .unwrap()
}

fn forced_race(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    host.must(&["workspace", "create", "w"]);
    for _ in 0..4 {
        let host = &host;
        std::thread::scope(|scope| {
            for owner in ["a", "b", "c", "d"] {
                scope.spawn(move || {
                    host.ask(&["session", "open", "-w", "w", "--force", "--owner", owner])
                });
            }
        });
        let w = host.must(&["workspace", "status", "w"]);
        let sessions = host.must(&["session", "list"]);
        let active: Vec<_> =
            sessions.as_array().unwrap().iter().filter(|s| s["state"] == "ACTIVE").collect();
        assert_eq!(active.len(), 1, "{sessions:#}\n{}", host.log());
        assert_eq!(active[0]["generation"], w["generation"]);
        assert_eq!(w["writer_session"], active[0]["id"]);
    }
    let sessions = host.must(&["session", "list"]);
    for s in sessions.as_array().unwrap() {
        let id = s["id"].as_str().unwrap();
        if s["state"] == "ACTIVE" {
            host.must(&["session", "close", id]);
        } else {
            host.ask(&["preserved", "discard", id, "--yes"]);
        }
    }
    assert_eq!(host.must(&["evidence", "verify"])["ok"], true);
    for dir in [host.dir.join("state/sessions"), host.dir.join("run/sessions")] {
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "{} is not empty", dir.display());
    }
}

fn removed_cgroup(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    for again in [false, true] {
        let opened = host.open(if again { "made" } else { "gone" }, "60s");
        let id = id_of(&opened);
        let cgroup = path_of(&opened["session"], "cgroup");
        std::fs::remove_dir(&cgroup).unwrap();
        let mut child = again.then(|| {
            std::fs::create_dir(&cgroup).unwrap();
            writer(&opened["session"], "sleep 60")
        });
        std::thread::sleep(Duration::from_millis(100));
        host.ask(&["fence", &id, "--reason", "test", "--wait"]);
        host.until(&id, |v| has(v, "frozen"));
        let freeze = std::fs::read_to_string(cgroup.join("cgroup.freeze")).unwrap();
        assert!(freeze.starts_with('1'), "{freeze}");
        host.must(&["preserved", "discard", &id, "--yes"]);
        if let Some(child) = &mut child {
            child.wait().unwrap();
        }
    }
}

fn detached(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let opened = host.open("w", "60s");
    let id = id_of(&opened);
    let merged = path_of(&opened["session"], "merged");
    std::fs::write(merged.join("f"), "bytes").unwrap();
    nix::mount::umount2(&merged, nix::mount::MntFlags::MNT_DETACH).unwrap();
    host.ask(&["fence", &id, "--reason", "test", "--wait"]);
    let view = host.until(&id, |v| v["state"] == "PRESERVED");
    assert!(has(&view, "frozen"), "{view:#}");
    host.must(&["preserved", "export", &id]);
    host.must(&["preserved", "discard", &id, "--yes"]);
}

fn second_agent(place: &Place) {
    let mut first = Host::new(place, "first");
    assert!(first.start(None));
    let opened = first.open("w", "60s");
    let mut second = Host::new(place, "second");
    assert!(second.start(None));
    // One that shares the cgroup of the first one's sessions does not know them, and leaves them alone.
    let mut inside = writer(&opened["session"], "exec sleep 600");
    let shared = Command::new(&second.binary)
        .args(["agent", "--config"])
        .arg(&second.config)
        .env("OVERFENCE_CGROUP", first.cgroup.strip_prefix(cgroup2_root()).unwrap())
        .env("OVERFENCE_RUNTIME_DIR", place.dir.join("other-run"))
        .env("OVERFENCE_STATE_DIR", place.dir.join("other"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&shared.stderr);
    let cgroup = path_of(&opened["session"], "cgroup");
    assert!(!shared.status.success() && said.contains("another agent runs on"), "{shared:?}");
    let wish = std::fs::read_to_string(cgroup.join("cgroup.freeze")).unwrap();
    assert_eq!(wish, "0\n", "it froze a good writer");
    assert!(!place.dir.join("other").exists(), "it made a state directory");
    inside.kill().unwrap();
    inside.wait().unwrap();
    // Its cell holds no copy of the first one's overlay: the close proves it gone.
    first.must(&["session", "close", &id_of(&opened)]);
    let thief = Command::new(&second.binary)
        .args(["agent", "--config"])
        .arg(&second.config)
        .env("OVERFENCE_SOCKET", first.dir.join("run/overfence.sock"))
        .env("OVERFENCE_CGROUP", place.cgroup.strip_prefix(cgroup2_root()).unwrap().join("third"))
        .env("OVERFENCE_STATE_DIR", place.dir.join("third"))
        .env("OVERFENCE_RUNTIME_DIR", place.dir.join("third-run"))
        .env("OVERFENCE_HIGH_WATER_FILE", place.dir.join("third/high-water"))
        .env("OVERFENCE_EVIDENCE_ANCHOR_FILE", place.dir.join("third/anchors"))
        .env("OVERFENCE_KEYS_DIR", place.dir.join("third/keys"))
        .env("OVERFENCE_BUNDLES_DIR", place.dir.join("third/bundles"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(!thief.status.success());
    assert!(
        String::from_utf8_lossy(&thief.stderr).contains("another agent answers there"),
        "{thief:?}"
    );
    assert_eq!(first.must(&["status"])["ready"], true);
}

fn control_characters(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    host.must(&["workspace", "create", "w", "--contact", "\x1b[31mred\nforged   line"]);
    let shown = Command::new(&host.binary)
        .args(["workspace", "status", "w"])
        .env("OVERFENCE_SOCKET", host.dir.join("run/overfence.sock"))
        .output()
        .unwrap();
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(!text.contains('\x1b') && !text.contains("\nforged"), "{text:?}");
}
