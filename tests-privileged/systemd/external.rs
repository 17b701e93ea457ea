//! A session whose cgroup is a slice of systemd's.

use std::fs;

use serde_json::Value;

use super::machine::Machine;
use super::{AGENT, grows, left_of_sessions};
use crate::agent_process::{has, id_of};
use crate::host::Place;

/// podman in the machine: what it keeps lies on a disk, since the machine's root is an overlay.
const PODMAN: [&str; 9] = [
    "podman",
    "--root=/var/tmp/podman",
    "--runroot=/run/podman",
    "--tmpdir=/run/podman/tmp",
    "--storage-driver=overlay",
    "--events-backend=none",
    "--cgroup-manager=systemd",
    "--runtime=runc",
    "run",
];

/// Limits as they are: a host may not let root raise them.
const CONFIG: &str = "[containers]\npids_limit = 0\n\
    default_ulimits = [\"nofile=20000:20000\", \"nproc=20000:20000\"]\n";

/// A real engine with the systemd driver, by the line that OPERATIONS.md gives.
pub fn by_an_engine(place: &Place) {
    let machine = Machine::boot(place);
    const SLICE: &str = "engine-notes.slice";
    machine.must(&["systemctl", "start", SLICE]);
    fs::create_dir_all(machine.root.join("etc/containers")).unwrap();
    fs::write(machine.root.join("etc/containers/containers.conf"), CONFIG).unwrap();
    let open = |workspace: &str| {
        let wish = ["session", "open", "-w", workspace, "--create", "--user", "1000", "--ttl"];
        machine.tell(&[&wish[..], &["60s", "--external", SLICE]].concat())
    };
    let run = |opened: &Value, name: &str, script: &str| {
        let shown = crate::container::documented_line(&format!(
            "podman run --detach --cgroups=no-conmon --cgroup-parent={SLICE}"
        ));
        let merged = opened["session"]["merged"].as_str().unwrap();
        let shown: Vec<_> = shown
            .iter()
            .map(|f| f.replace("--name=writer", name).replace("$MERGED", merged))
            .collect();
        let shown: Vec<_> = shown.iter().map(String::as_str).collect();
        // No network to set up, and no registry to take an image from.
        let rest = ["--network=none", "--rootfs", "/:O", "sh", "-c", script];
        machine.command(&[&PODMAN[..], &shown, &rest].concat())
    };
    let opened = open("notes");
    let id = id_of(&opened);
    let writes = "cd /workspace; exec 3>>log; while :; do echo x >&3; sleep 0.02; done";
    crate::container::must(&mut run(&opened, "--name=writer", writes));
    let log = machine.state.join("sessions").join(&id).join("upper/log");
    assert!(grows(&log), "{}", machine.log());
    let slice = machine.cgroups.join("engine.slice").join(SLICE);
    let scopes = || {
        let below = fs::read_dir(&slice).unwrap().flatten();
        below.filter(|e| e.file_name().to_string_lossy().ends_with(".scope")).count()
    };
    assert!(scopes() > 0, "systemd did not place the container in the slice");

    // The lease is lost: the slice freezes with all that the engine has in it.
    let lease = opened["session"]["lease"].as_str().unwrap();
    let revoked = machine.ask(&["lease", "revoke", lease, "--reason", "test", "--wait"]);
    let view =
        machine.until(&id, |v| has(v, "frozen") && !v["holders"].as_array().unwrap().is_empty());
    assert_eq!(
        (&view["external"], &view["holders"][0]["inside"]),
        (&SLICE.into(), &true.into()),
        "{revoked:?}"
    );
    let size = || fs::metadata(&log).unwrap().len();
    let stands = size();
    // The engine's own thaw is below the freeze, and undoes nothing of it.
    for verb in ["pause", "unpause"] {
        machine.run(&[&PODMAN[..8], &[verb, "writer"]].concat());
    }
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(size(), stands, "it writes while it is fenced");

    machine.tell(&["readmit", &id, "--authorised-by", "me", "--reason", "test"]);
    assert!(grows(&log), "readmitted: {}", machine.log());
    machine.tell(&["session", "close", &id, "--checkpoint"]);
    assert_eq!(machine.tell(&["workspace", "status", "notes"])["version"], 1);
    assert_eq!(left_of_sessions(&machine), Vec::<String>::new());

    // Given back: the next session takes the slice, and the engine sees the old one's end.
    let status = ["ps", "--all", "--format={{.Status}}", "--filter=name=writer"];
    let status = machine.must(&[&PODMAN[..8], &status].concat());
    assert!(status.starts_with("Exited"), "{status}");
    let opened = open("next");
    let wrote = "echo done > /workspace/result; exec sleep infinity";
    crate::container::must(&mut run(&opened, "--name=second", wrote));
    let result = machine.state.join("sessions").join(id_of(&opened)).join("upper/result");
    assert_eq!(fs::read_to_string(result).unwrap(), "done\n");
    let closed = machine.tell(&["session", "close", &id_of(&opened), "--discard", "--yes"]);
    assert_eq!(closed["state"], "CLOSED", "{closed:#}");
}

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
