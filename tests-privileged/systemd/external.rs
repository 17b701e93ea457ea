//! A session whose cgroup is a slice of systemd's.

use std::fs;

use super::machine::Machine;
use super::{AGENT, grows, left_of_sessions};
use crate::agent_process::{has, id_of};
use crate::host::Place;

/// What an engine with the systemd driver does: it has systemd start processes below a slice.
pub fn given_back(place: &Place) {
    let machine = Machine::boot(place);
    const SLICE: &str = "engine-w.slice";
    let open = |slice: &str, more: &[&str]| {
        let wish = ["session", "open", "-w", "w", "--create", "--ttl", "60s", "--external", slice];
        machine.run(&[&["overfence", "-o", "json"], &wish[..], more].concat())
    };
    let refused = |slice: &str, more: &[&str], why: &str| {
        let out = open(slice, more);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success() && said.contains(why), "{slice} {more:?}: {said}");
    };
    refused(SLICE, &[], "systemctl start engine-w.slice");
    refused("system.slice", &[], "something runs in it");
    machine.must(&["systemctl", "start", SLICE]);
    refused(SLICE, &["--pids", "5"], "systemctl set-property");
    refused(SLICE, &["--holder", "process"], "holder beat");

    let out = open(SLICE, &[]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let opened: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let id = id_of(&opened);
    assert_eq!(opened["session"]["external"], SLICE);
    assert_eq!(opened["session"]["cgroup"], "/sys/fs/cgroup/engine.slice/engine-w.slice");
    let other = ["session", "open", "-w", "v", "--create", "--external", "engine.slice"];
    let other = machine.run(&[&["overfence"], &other[..]].concat());
    assert!(String::from_utf8_lossy(&other.stderr).contains(&id), "{other:?}");
    let exec = machine.run(&["overfence", "session", "exec", &id, "--", "true"]);
    assert!(String::from_utf8_lossy(&exec.stderr).contains("is external"), "{exec:?}");
    let evidence = machine.must(&["overfence", "evidence", "show", "-o", "json"]);
    assert!(evidence.contains("not_claimed"), "{evidence}");

    let bind = format!("BindPaths={}:/workspace", opened["session"]["merged"].as_str().unwrap());
    let writes = "cd /workspace; exec 3>>log; while :; do echo x >&3; sleep 0.02; done";
    machine.must(&[
        "systemd-run",
        "--quiet",
        "--unit=writer",
        "--slice",
        SLICE,
        "-p",
        &bind,
        "setpriv",
        "--reuid=1000",
        "--regid=1000",
        "--clear-groups",
        "sh",
        "-c",
        writes,
    ]);
    let log = machine.state.join("sessions").join(&id).join("upper/log");
    assert!(grows(&log), "{}", machine.log());
    let slice = machine.cgroups.join("engine.slice/engine-w.slice");
    let frozen = || fs::read_to_string(slice.join("cgroup.events")).unwrap().contains("frozen 1");

    machine.ask(&["fence", &id, "--reason", "test", "--wait"]);
    let view =
        machine.until(&id, |v| has(v, "frozen") && !v["holders"].as_array().unwrap().is_empty());
    assert_eq!((&view["external"], &view["holders"][0]["inside"]), (&SLICE.into(), &true.into()));
    // What systemd does to its units undoes nothing of it, and the agent finds it again.
    machine.must(&["systemctl", "daemon-reload"]);
    machine.must(&["systemctl", "restart", AGENT]);
    assert!(frozen());
    machine.tell(&["readmit", &id, "--authorised-by", "me", "--reason", "test"]);
    assert!(grows(&log), "readmitted: {}", machine.log());
    machine.tell(&["session", "close", &id, "--checkpoint"]);
    assert_eq!(machine.tell(&["workspace", "status", "w"])["version"], 1);
    machine.until_unit("writer.service", "ActiveState", |state| state != "active");
    assert_eq!(left_of_sessions(&machine), Vec::<String>::new());

    // The slice is as it was: systemd's, and the next session's.
    assert!(slice.is_dir() && !frozen());
    assert_eq!(machine.show(SLICE, "ActiveState"), "active");
    let out = open(SLICE, &[]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let again: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    machine.tell(&["session", "close", &id_of(&again)]);
}
