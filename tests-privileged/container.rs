//! Containers, by a real engine: overfence in one, and one as the writer of a session.

mod engine;

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::agent_process::{Host, has, id_of, path_of};
use crate::host::{Place, Test, paced};
pub use engine::must;
use engine::{Engine, Flag, flags, flags_for, report, unified};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "the_documented_container_is_a_host", run: is_a_host },
        Test { name: "a_container_without_keeper_or_agent_ends", run: half_a_host },
        Test { name: "doctor_names_each_flag_that_is_left_out", run: left_out },
        Test { name: "an_engines_container_is_fenced_like_a_command", run: as_a_writer },
        Test { name: "a_hybrid_host_gives_a_part_of_the_hierarchy", run: hybrid },
    ]
}

/// The lines in the documentation that begin with `start`, joined where the shell joins them.
pub fn documented_line(start: &str) -> Vec<String> {
    let text = include_str!("../docs/OPERATIONS.md").replace("\\\n", " ");
    let line = text.lines().map(str::trim).find(|line| line.starts_with(start));
    let line = line.unwrap_or_else(|| panic!("OPERATIONS.md has no line {start}"));
    line.split_whitespace().filter(|word| word.starts_with("--")).map(str::to_owned).collect()
}

fn is_a_host(place: &Place) {
    for engine in ["podman", "docker"] {
        let mut shown = documented_line(&format!("{engine} run --detach --name=overfence"));
        let mut wanted: Vec<_> = flags_for(engine).iter().map(|f| f.flag.to_owned()).collect();
        wanted.extend(["--detach", "--name=overfence"].map(str::to_owned));
        shown.sort();
        wanted.sort();
        assert_eq!(shown, wanted, "OPERATIONS.md shows another line for {engine}");
    }

    let place = unified(place);
    let engine = Engine::new(&place).with_image(&place);
    let doctor = engine.documented(&["--rm"], &["overfence", "doctor", "-o", "json"]).output();
    let doctor = report(&doctor.unwrap());
    assert_eq!(doctor["ok"], true, "{doctor:#}");
    assert!(answer(&doctor, "real-time").0, "{doctor:#}");
    let said = must(&mut engine.documented(&["--rm"], &["overfence", "demo"]));
    assert!(said.contains("Nothing is left of it on this host."), "{said}");

    // Keeper and agent, and a writer in a session of theirs.
    must(&mut engine.documented(&["--detach", "--name=host"], &[]));
    let tell = |args: &[&str]| -> Value {
        let all = [&["exec", "host", "overfence", "-o", "json", "--timeout", "60s"], args].concat();
        serde_json::from_str(&engine.must(&all)).unwrap_or(Value::Null)
    };
    let ready = || {
        let begun = Instant::now();
        let ask = ["exec", "host", "overfence", "status"];
        while !engine.command(&ask).output().unwrap().status.success() {
            assert!(
                begun.elapsed() < paced(Duration::from_secs(20)),
                "no agent: {}",
                engine.must(&["logs", "host"])
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    ready();
    for user in ["1000", "0"] {
        let wish = ["run", "-w", user, "--create", "--user", user, "--", "sh", "-c", "id -u > id"];
        tell(&wish);
        assert_eq!(tell(&["workspace", "status", user])["version"], 1, "as {user}");
    }
    let open = |workspace: &str| {
        let id = id_of(&tell(&["session", "open", "-w", workspace, "--create", "--ttl", "10m"]));
        let writes = "(while :; do echo x >> log; sleep 0.05; done) >/dev/null 2>&1 &";
        engine.must(&[
            "exec",
            "host",
            "overfence",
            "session",
            "exec",
            &id,
            "--",
            "sh",
            "-c",
            writes,
        ]);
        id
    };

    // The end of a container is a reboot to its sessions: nothing of them can be left.
    let killed = open("killed");
    engine.must(&["kill", "host"]);
    engine.must(&["start", "host"]);
    ready();
    let view = tell(&["session", "inspect", &killed]);
    assert_eq!(view["state"], "PRESERVED", "{view:#}");
    assert_eq!(view["loss"], "the host started again", "{view:#}");
    assert!(has(&view, "killed") && has(&view, "gone"), "{view:#}");

    // Stopped in order, it takes its sessions down and keeps what they wrote.
    let stopped = open("stopped");
    engine.must(&["stop", "host"]);
    assert_eq!(engine.must(&["inspect", "--format", "{{.State.ExitCode}}", "host"]), "0");
    engine.must(&["start", "host"]);
    ready();
    let view = tell(&["session", "inspect", &stopped]);
    assert_eq!(view["state"], "PRESERVED", "{view:#}");
    assert_ne!(view["loss"], "the host started again", "{view:#}");
    for id in [&killed, &stopped] {
        tell(&["preserved", "discard", id, "--yes"]);
    }
    assert_eq!(tell(&["evidence", "verify"])["ok"], true);
    engine.must(&["rm", "--force", "--time=0", "host"]);
}

/// One that ran on without a keeper would hold its deadlines by the agent alone, and nobody would know.
fn half_a_host(place: &Place) {
    let place = unified(place);
    let engine = Engine::new(&place).with_image(&place);
    for part in ["keeper", "agent"] {
        must(&mut engine.documented(&["--detach", "--name=host"], &[]));
        until("the agent answers", || {
            let ask = ["exec", "host", "overfence", "status"];
            engine.command(&ask).output().unwrap().status.success()
        });
        // The image has no pgrep.
        let find = format!(
            "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline | grep -qx 'overfence {part} ' && \
             kill -KILL ${{p#/proc/}}; done; :"
        );
        engine.must(&["exec", "host", "sh", "-c", &find]);
        let state = ["inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", "host"];
        until("the container ends", || engine.must(&state).starts_with("exited "));
        assert_eq!(engine.must(&state), "exited 1", "without its {part}");
        engine.must(&["rm", "host"]);
    }
}

/// Whether a feature is there, and the details.
fn answer(doctor: &Value, feature: &str) -> (bool, String) {
    let all = doctor["features"].as_array().unwrap();
    let found = all.iter().find(|f| f["feature"] == feature);
    let found = found.unwrap_or_else(|| panic!("doctor says nothing of {feature}: {doctor:#}"));
    (found["ok"].as_bool().unwrap(), found["detail"].as_str().unwrap().to_owned())
}

fn left_out(place: &Place) {
    let place = unified(place);
    let engine = Engine::new(&place).with_image(&place);
    let all = flags_for("podman");
    let without = |out: &str| -> Vec<&str> {
        all.iter().map(|f| f.flag).filter(|flag| *flag != out).collect()
    };
    let capabilities: Vec<_> = all
        .iter()
        .filter_map(|f| f.flag.strip_prefix("--cap-add=").map(|name| (name, f)))
        .collect();
    for (name, flag) in &capabilities {
        let doctor = engine.doctor(&without(flag.flag));
        let (ok, said) = answer(&doctor, flag.doctor);
        assert!(!ok, "nothing is missing without {name}: {doctor:#}");
        for (other, beside) in &capabilities {
            let named = said.contains(&format!("CAP_{other}"));
            // Both features look at a list of their own.
            assert!(named == (other == name), "without {name}, {}: {said}", beside.doctor);
        }
        let optional = flag.doctor == "real-time";
        assert_eq!(doctor["ok"], optional, "without {name}: {doctor:#}");
        // What cannot work without it may be named beside it, and comes after it.
        let first = &doctor["missing"][0];
        assert!(optional || first == flag.doctor, "without {name}: {doctor:#}");
    }
    for (flag, hint) in [
        ("--security-opt=unmask=ALL", "masks over /proc (podman: --security-opt unmask=ALL"),
        ("--volume=overfence:/var/lib/overfence", "it is on overlay"),
    ] {
        let feature = all.iter().find(|f| f.flag == flag).unwrap().doctor;
        let doctor = engine.doctor(&without(flag));
        assert_eq!(doctor["missing"][0], feature, "without {flag}: {doctor:#}");
        assert!(answer(&doctor, feature).1.contains(hint), "without {flag}: {doctor:#}");
    }

    // docker's seccomp profile refuses a step that podman's allows.
    let profile = place.dir.join("seccomp.json");
    let refuses = r#"{ "defaultAction": "SCMP_ACT_ALLOW", "syscalls":
        [{ "names": ["pivot_root"], "action": "SCMP_ACT_ERRNO" }] }"#;
    fs::write(&profile, refuses).unwrap();
    let strict = format!("--security-opt=seccomp={}", profile.display());
    let doctor = engine.doctor(&[&without("")[..], &[&*strict]].concat());
    assert_eq!(doctor["missing"][0], "walls", "{doctor:#}");
    let (_, said) = answer(&doctor, "walls");
    assert!(said.contains("pivot_root") && said.contains("a seccomp filter"), "{said}");

    // Without the entrypoint cgroup2 is as the engine mounts it where nothing is unmasked.
    let bare = [&without("--security-opt=unmask=ALL")[..], &["--entrypoint=env"]].concat();
    let doctor = engine.doctor(&bare);
    assert_eq!(doctor["missing"][0], "cgroup-freeze", "{doctor:#}");
    assert!(answer(&doctor, "cgroup-freeze").1.contains("Read-only file system"), "{doctor:#}");
}

/// Version 1 beside version 2: the engine shows a container version 1 alone, so it is given a part of
/// version 2.
fn hybrid(place: &Place) {
    let engine = Engine::new(place).with_image(place);
    let part = place.cgroup.join("overfence");
    fs::create_dir(&part).unwrap();
    // Where version 1 has the engine's cgroups, the suite removes those of the test's name.
    let root = crate::host::cgroup2_root();
    let parent = PathBuf::from("/").join(place.cgroup.strip_prefix(root).unwrap());
    let parent = format!("--cgroup-parent={}", parent.join("containers").display());
    let all: Vec<Flag> = flags();
    let documented = all.iter().find(|f| f.place == "hybrid").unwrap();
    let inside = documented.flag.rsplit_once(':').unwrap().1;
    let bind = format!("--volume={}:{inside}", part.display());
    let mut given: Vec<_> = flags_for("podman").iter().map(|f| f.flag).collect();
    given.extend([&*parent, &*bind]);
    let doctor = engine.doctor(&given);
    assert_eq!(doctor["ok"], true, "{doctor:#}");
    let demo =
        [&["run", "--rm", "--network=none"], &given[..], &["overfence", "overfence", "demo"]];
    engine.must(&demo.concat());
    given.pop();
    let doctor = engine.doctor(&given);
    assert_eq!(doctor["missing"][0], documented.doctor, "{doctor:#}");
}

/// A container below a session's cgroup, with its workspace at `/workspace`: as documented.
struct Writer<'a> {
    engine: &'a Engine,
    cgroup: PathBuf,
    merged: PathBuf,
}

impl<'a> Writer<'a> {
    fn of(engine: &'a Engine, opened: &Value) -> Self {
        let session = &opened["session"];
        Self { engine, cgroup: path_of(session, "cgroup"), merged: path_of(session, "merged") }
    }

    fn run(&self, name: &str, script: &str) -> Command {
        let below = self.cgroup.strip_prefix("/sys/fs/cgroup").unwrap();
        let shown = documented_line("podman run --detach --name=writer").into_iter().map(|flag| {
            flag.replace("--name=writer", &format!("--name={name}"))
                .replace("${CGROUP#/sys/fs/cgroup}", &format!("/{}", below.display()))
                .replace("$MERGED", &self.merged.display().to_string())
        });
        let mut run = self.engine.command(&["run", "--network=none"]);
        run.args(shown).args(["--rootfs", &self.engine.rootfs(), "sh", "-c", script]);
        run
    }
}

fn until(what: &str, fits: impl Fn() -> bool) {
    let begun = Instant::now();
    while !fits() {
        assert!(begun.elapsed() < paced(Duration::from_secs(10)), "in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn as_a_writer(place: &Place) {
    let place = unified(place);
    let engine = Engine::new(&place);
    let mut host = Host::new(&place, "host");
    host.start_keeper();
    assert!(host.start(None), "{}", host.log());

    let opened = host.open("w", "60s");
    let (id, token) = (id_of(&opened), opened["token"].as_str().unwrap().to_owned());
    let writer = Writer::of(&engine, &opened);
    // It holds its file open: what a fence of a command meets, too.
    let writes = "cd /workspace; exec 3>>log; while :; do echo x >&3; sleep 0.02; done";
    must(&mut writer.run("writer", writes));
    let log = writer.merged.join("log");
    let size = || fs::metadata(&log).map_or(0, |m| m.len());
    let grows = |when: &str| {
        let before = size();
        until(when, || size() > before);
    };
    grows("the container writes");
    let view = host.must(&["session", "inspect", &id]);
    assert!(view["processes"].as_u64().unwrap() > 0, "not in the session's cgroup: {view:#}");

    // Frozen through the cgroup above its own, whatever the engine does to its own.
    let fenced = host.ask(&["fence", &id, "--reason", "test", "--wait"]);
    assert_eq!(fenced.0, 8, "frozen, and not read-only while it holds its file: {fenced:?}");
    let held =
        |v: &Value| has(v, "frozen") && v["holders"].as_array().is_some_and(|h| !h.is_empty());
    let view = host.until(&id, held);
    assert_eq!(view["holders"][0]["inside"], true, "{view:#}");
    engine.must(&["pause", "writer"]);
    engine.must(&["unpause", "writer"]);
    let stands = size();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(size(), stands, "it writes while it is fenced");
    let events = fs::read_to_string(writer.cgroup.join("cgroup.events")).unwrap();
    assert!(events.contains("frozen 1"), "{events}");
    // One that is started there now stands still before its first instruction.
    let mut late = writer.run("late", "echo late > /workspace/late").spawn().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert!(!writer.merged.join("late").exists(), "a container ran in a fenced session");

    // A new generation, and it runs on; so does the one that came late.
    let view = host.must(&["readmit", &id, "--authorised-by", "me", "--reason", "test"]);
    assert_eq!(view["generation"], 2, "{view:#}");
    grows("readmitted");
    until("the late one runs", || writer.merged.join("late").exists());
    assert!(late.wait().unwrap().success());
    host.must(&["lease", "beat", &id, "--token", &token]);
    host.must(&["session", "checkpoint", &id]);
    grows("after the checkpoint");

    // Fenced to the end, and what it wrote is a preserved delta like any other.
    host.must(&["fence", &id, "--to", "killed", "--reason", "test", "--wait"]);
    let view = host.until(&id, |v| has(v, "killed") && has(v, "read-only"));
    assert_eq!(view["processes"], 0, "{view:#}");
    let status = ["ps", "--all", "--format={{.Status}}", "--filter=name=writer"];
    until("the engine sees its end", || engine.must(&status).starts_with("Exited (137)"));
    host.must(&["preserved", "discard", &id, "--yes"]);
    until("nothing is left of it", || !writer.cgroup.exists() && !writer.merged.exists());

    // Released: closing ends what is left, and publishes all of it.
    let opened = host.open("v", "60s");
    let writer = Writer::of(&engine, &opened);
    must(&mut writer.run("second", "echo done > /workspace/result; exec sleep infinity"));
    until("it has written", || writer.merged.join("result").exists());
    host.must(&["session", "close", &id_of(&opened), "--checkpoint"]);
    until("nothing is left of it", || !writer.cgroup.exists() && !writer.merged.exists());
    assert_eq!(host.must(&["workspace", "status", "v"])["version"], 1);
    engine.must(&["rm", "--force", "--all", "--time=0"]);
    assert_eq!(host.must(&["evidence", "verify"])["ok"], true);
    host.stop();
}
