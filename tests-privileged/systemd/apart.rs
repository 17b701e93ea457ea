//! An agent that a drop-in gave a mount namespace of its own: nobody on the host sees its sessions.

use std::fs;

use super::machine::{Machine, drop_in};
use super::{AGENT, open};
use crate::host::Place;

pub fn named(place: &Place) {
    let machine = Machine::boot(place);
    let doctor = || {
        let (code, report) = machine.ask(&["doctor"]);
        let all = report["features"].as_array().unwrap();
        let about = all.iter().find(|f| f["feature"] == "mount-namespace").unwrap().clone();
        (code, report, about)
    };
    let (code, report, about) = doctor();
    assert_eq!(
        (code, &about["ok"], &about["needed"]),
        (0, &true.into(), &false.into()),
        "{report:#}"
    );
    let status = machine.tell(&["status"]);
    let host = machine.must(&["readlink", "/proc/1/ns/mnt"]);
    assert_eq!(status["mount_namespace"], host.trim(), "{status:#}");
    assert!(status["mount_trouble"].is_null(), "{status:#}");

    drop_in(&machine.root, AGENT, "[Service]\nPrivateTmp=yes\n");
    machine.must(&["systemctl", "daemon-reload"]);
    machine.must(&["systemctl", "restart", AGENT]);
    // What it warns of is so: a session is there, and its mount is not.
    let id = open(&machine, "w", "10m");
    let mounts = machine.must(&["cat", "/proc/1/mountinfo"]);
    assert!(!mounts.contains(&format!("{id}/merged")), "{mounts}");
    let (code, report, about) = doctor();
    assert_eq!(code, 1, "{report:#}");
    assert_eq!(report["missing"], serde_json::json!(["mount-namespace"]), "{report:#}");
    let detail = about["detail"].as_str().unwrap();
    assert!(detail.starts_with("the agent: ") && detail.contains("PrivateTmp="), "{detail}");
    let status = machine.tell(&["status"]);
    assert!(
        status["mount_trouble"].as_str().is_some_and(|why| detail.ends_with(why)),
        "{status:#}"
    );
    let said = machine.must(&["journalctl", "-o", "cat", "--no-pager", "-p", "err", "-u", AGENT]);
    assert!(said.contains("not pid 1's mount namespace"), "{said}");

    // Mended, it is as before.
    machine.tell(&["session", "close", &id]);
    fs::remove_file(machine.root.join(format!("etc/systemd/system/{AGENT}.d/1.conf"))).unwrap();
    machine.must(&["systemctl", "daemon-reload"]);
    machine.must(&["systemctl", "restart", AGENT]);
    assert_eq!(doctor().0, 0);
}
