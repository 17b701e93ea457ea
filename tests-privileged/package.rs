//! The .deb, on a Debian without Rust that systemd-nspawn boots: what is there after the installation,
//! and what removal and purge leave and refuse.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::agent_process::id_of;
use crate::host::{Place, Test};
use crate::systemd::machine::{self, Machine};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "make_install_stays_below_destdir_and_names_its_prefix", run: below_destdir },
        Test { name: "the_deb_installs_and_the_demo_passes_with_no_edit", run: installs },
        Test { name: "removal_is_refused_with_live_sessions_unless_told", run: removes },
        Test { name: "removal_is_refused_for_who_came_as_it_began", run: came_meanwhile },
        Test { name: "i4_purge_keeps_and_names_what_may_be_somebodys_data", run: purges },
    ]
}

const AGENT: &str = "overfence-agent.service";
const KEEPER: &str = "overfence-keeper.service";
const SOCKET: &str = "overfence.socket";

/// The package of the binary under test: made from the tree by `packaging/deb.sh`, or `OVERFENCE_TEST_DEB`
/// where there is neither tree nor cargo.
fn deb(place: &Place) -> PathBuf {
    if let Some(made) = std::env::var_os("OVERFENCE_TEST_DEB") {
        return made.into();
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/deb.sh");
    let out = place.dir.join("deb");
    let done = Command::new(script)
        .args([&place.binary, &out])
        .arg("--fast")
        .env("TMPDIR", &place.dir)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", text(&done));
    let mut made = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().path());
    made.find(|path| path.extension().is_some_and(|e| e == "deb")).expect("a package")
}

fn text(out: &Output) -> String {
    let [said, complained] = [&out.stdout, &out.stderr].map(|b| String::from_utf8_lossy(b));
    format!("{}\n{said}{complained}", out.status)
}

/// All files below a directory, by their path from there.
fn files(top: &Path) -> Vec<PathBuf> {
    let out = Command::new("find").arg(top).args(["-type", "f", "-printf", "/%P\\n"]).output();
    let list = String::from_utf8(out.unwrap().stdout).unwrap();
    let mut files: Vec<_> = list.lines().map(PathBuf::from).collect();
    files.sort();
    files
}

fn below_destdir(place: &Place) {
    let [at, other] = ["dest dir", "usr"].map(|name| place.dir.join(name));
    // Whoever writes beside it fails.
    for dir in ["/usr", "/etc"] {
        for how in [["--bind", dir], ["-o", "remount,bind,ro"]] {
            assert!(Command::new("mount").args(how).arg(dir).status().unwrap().success());
        }
    }
    machine::put(place, &at, "/usr/local");
    let installed = files(&at);
    for wanted in [
        "/usr/local/bin/overfence",
        "/usr/local/lib/systemd/system/overfence-agent.service",
        "/usr/local/lib/sysusers.d/overfence.conf",
        "/usr/local/lib/tmpfiles.d/overfence.conf",
        "/usr/local/share/man/man1/overfence.1",
        "/usr/local/share/bash-completion/completions/overfence",
    ] {
        assert!(installed.iter().any(|f| f == Path::new(wanted)), "{wanted}: {installed:?}");
    }
    assert!(installed.iter().all(|f| f.starts_with("/usr/local")), "{installed:?}");
    let unit = "lib/systemd/system/overfence-agent.service";
    let text = fs::read_to_string(at.join("usr/local").join(unit)).unwrap();
    assert!(text.contains("ExecStart=/usr/local/bin/overfence "), "{text}");
    assert!(!text.contains("/usr/bin/overfence"), "{text}");
    // Another prefix is the same files in another place.
    machine::put(place, &other, "/usr");
    let moved = |f: &PathBuf| Path::new("/usr/local").join(f.strip_prefix("/usr").unwrap());
    assert_eq!(files(&other).iter().map(moved).collect::<Vec<_>>(), installed);
}

/// A machine with nothing but the package on its disk.
fn machine(place: &Place) -> Machine {
    let machine = Machine::bare(place);
    fs::copy(deb(place), machine.root.join("overfence.deb")).unwrap();
    // The image leaves manual pages out.
    let kept_small = machine.root.join("etc/dpkg/dpkg.cfg.d");
    for file in fs::read_dir(kept_small).unwrap() {
        fs::remove_file(file.unwrap().path()).unwrap();
    }
    machine.started()
}

fn install(machine: &Machine) {
    machine.must(&["dpkg", "--install", "/overfence.deb"]);
    for unit in [AGENT, KEEPER, SOCKET] {
        machine.until_unit(unit, "ActiveState", |state| state == "active");
    }
}

fn installs(place: &Place) {
    let machine = machine(place);
    for tool in ["cargo", "rustc", "gcc"] {
        assert!(!machine.run(&["which", tool]).status.success(), "{tool} is there");
    }
    install(&machine);
    for unit in [AGENT, KEEPER, SOCKET] {
        assert_eq!(machine.must(&["systemctl", "is-enabled", unit]).trim(), "enabled");
    }
    assert_eq!(machine.must(&["systemctl", "--failed", "--no-legend", "--plain"]), "");
    machine.must(&["getent", "group", "overfence", "overfence-view"]);
    machine.must(&["overfence", "doctor"]);
    let demo = machine.must(&["overfence", "demo"]);
    eprintln!("{demo}");
    for file in [
        "usr/share/man/man1/overfence.1.gz",
        "usr/share/man/man1/overfence-session-open.1.gz",
        "usr/share/bash-completion/completions/overfence",
        "usr/share/zsh/vendor-completions/_overfence",
        "usr/share/fish/vendor_completions.d/overfence.fish",
        "usr/share/overfence/prometheus/overfence.rules.yml",
        "usr/share/doc/overfence/copyright",
    ] {
        assert!(machine.root.join(file).is_file(), "no {file}");
    }
    let config = fs::read_to_string(machine.root.join("etc/overfence/config.toml")).unwrap();
    assert_eq!(config, machine.must(&["overfence", "config", "default"]));
    machine.must(&["overfence", "config", "check"]);
    let conffiles = machine.must(&["dpkg-query", "-W", "-f", "${Conffiles}", "overfence"]);
    assert!(conffiles.contains("/etc/overfence/config.toml"), "{conffiles}");
    // The same package once more is an upgrade: the units run on, and the session does not notice.
    let id = id_of(&machine.tell(&["session", "open", "-w", "w", "--create", "--ttl", "10m"]));
    let pid = machine.main_pid(AGENT);
    install(&machine);
    machine.until_unit(AGENT, "MainPID", |now| now != "0" && now != pid);
    let view = machine.until(&id, |view| view["state"] == "ACTIVE");
    assert_eq!(view["generation"], 1, "{view:#}");
    machine.tell(&["session", "close", &id]);
    // What an administrator switched off stays off.
    machine.must(&["systemctl", "disable", KEEPER]);
    machine.must(&["dpkg", "--install", "/overfence.deb"]);
    assert!(!machine.run(&["systemctl", "is-enabled", KEEPER]).status.success());
}

fn removes(place: &Place) {
    let machine = machine(place);
    install(&machine);
    let opened = machine.tell(&["session", "open", "-w", "w", "--create", "--ttl", "10m"]);
    let id = id_of(&opened);
    let upper = machine.state.join("sessions").join(&id).join("upper");
    machine.must(&["touch", &format!("/var/lib/overfence/sessions/{id}/merged/work")]);
    let refused = machine.run(&["dpkg", "--remove", "overfence"]);
    let said = text(&refused);
    assert!(!refused.status.success(), "{said}");
    assert!(said.contains("OVERFENCE_REMOVE=drain") && said.contains(&id), "{said}");
    let installed = machine.must(&["dpkg-query", "-W", "-f", "${db:Status-Status}", "overfence"]);
    assert_eq!(installed, "installed");
    for unit in [AGENT, KEEPER, SOCKET] {
        machine.until_unit(unit, "ActiveState", |state| state == "active");
    }
    let view = machine.tell(&["session", "inspect", &id]);
    assert_eq!((&view["state"], &view["generation"]), (&"ACTIVE".into(), &1.into()), "{view:#}");
    // A stopped agent is asked all the same, and one that cannot be asked is not passed over.
    machine.must(&["systemctl", "stop", SOCKET, AGENT]);
    let refused = machine.run(&["dpkg", "--remove", "overfence"]);
    let said = text(&refused);
    assert!(!refused.status.success() && said.contains("does not answer"), "{said}");
    assert!(said.contains(&format!("sessions/{id}/merged")), "{said}");
    machine.until_unit(AGENT, "ActiveState", |state| state == "active");
    let told = ["env", "OVERFENCE_REMOVE=drain", "dpkg", "--remove", "overfence"];
    machine.must(&told);
    assert!(upper.join("work").exists(), "what was written is gone");
    let mounts = machine.must(&["cat", "/proc/self/mountinfo"]);
    assert!(
        !mounts.contains(" overlay overfence-") && !mounts.contains("/run/overfence"),
        "{mounts}"
    );
    assert!(!machine.cgroup_of(&id).parent().unwrap().exists(), "cgroups are left");
    assert_eq!(machine.show("overfence-sessions.service", "ActiveState"), "inactive");
    assert!(!machine.root.join("usr/bin/overfence").exists());
    assert_eq!(machine.must(&["ls", "/run"]).lines().find(|l| l.contains("overfence")), None);
    let running = machine.must(&["sh", "-c", "cat /proc/[0-9]*/comm"]);
    assert!(!running.contains("overfence"), "{running}");
    assert_eq!(machine.must(&["systemctl", "--failed", "--no-legend", "--plain"]), "");
    // A removal alone takes nothing of the state; installed again, it is all there.
    install(&machine);
    let kept = machine.tell(&["preserved", "list"]);
    assert_eq!(kept[0]["session"], id, "{kept:#}");
    machine.tell(&["preserved", "discard", &id, "--yes"]);
    machine.must(&["dpkg", "--remove", "overfence"]);
}

/// A session that is opened between the list and the end of the agent: here, as the configuration is read.
fn came_meanwhile(place: &Place) {
    let machine = machine(place);
    install(&machine);
    let [program, real] =
        ["overfence", "overfence.real"].map(|n| machine.root.join("usr/bin").join(n));
    fs::rename(&program, &real).unwrap();
    let opens =
        "[ \"$1\" != config ] || overfence.real session open -w late --create --ttl 10m >&2";
    fs::write(&program, format!("#!/bin/sh\n{opens}\nexec overfence.real \"$@\"\n")).unwrap();
    fs::set_permissions(&program, fs::metadata(&real).unwrap().permissions()).unwrap();
    let refused = machine.run(&["dpkg", "--remove", "overfence"]);
    fs::rename(&real, &program).unwrap();
    let said = text(&refused);
    assert!(!refused.status.success() && said.contains("were opened meanwhile"), "{said}");
    let installed = machine.must(&["dpkg-query", "-W", "-f", "${db:Status-Status}", "overfence"]);
    assert_eq!(installed, "installed");
    for unit in [AGENT, KEEPER, SOCKET] {
        machine.until_unit(unit, "ActiveState", |state| state == "active");
    }
    let all = machine.tell(&["session", "list"]);
    let id = all[0]["id"].as_str().unwrap();
    assert!(said.contains(&format!("sessions/{id}/merged")), "{said}");
    let view = machine.until(id, |view| view["state"] == "ACTIVE");
    assert_eq!((&view["workspace"], &view["generation"]), (&"late".into(), &1.into()), "{view:#}");
    machine.must(&["env", "OVERFENCE_REMOVE=drain", "dpkg", "--purge", "overfence"]);
}

fn purges(place: &Place) {
    let machine = machine(place);
    install(&machine);
    let open = || {
        let opened = machine.tell(&["session", "open", "-w", "w", "--create", "--ttl", "10m"]);
        let id = id_of(&opened);
        machine.must(&["touch", &format!("/var/lib/overfence/sessions/{id}/merged/{id}")]);
        id
    };
    // A layer, a bundle, and an upper without a decision; a bundle elsewhere.
    machine.tell(&["session", "close", &open(), "--checkpoint"]);
    let id = open();
    machine.tell(&["session", "close", &id, "--keep"]);
    machine.tell(&["preserved", "export", &id]);
    let conf = machine.root.join("etc/overfence/conf.d");
    fs::create_dir(&conf).unwrap();
    fs::write(conf.join("here.toml"), "bundles_dir = \"/var/tmp/my bundles\"\n").unwrap();
    machine.must(&["systemctl", "restart", AGENT]);
    machine.tell(&["preserved", "export", &id]);
    fs::write(machine.state.join("notes"), "an operator's").unwrap();
    let list = || {
        let mut names: Vec<_> = fs::read_dir(&machine.state)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    let said = machine.must(&["dpkg", "--purge", "overfence"]);
    for name in ["sessions", "bundles"] {
        for entry in fs::read_dir(machine.state.join(name)).unwrap() {
            let path = Path::new("/var/lib/overfence").join(name).join(entry.unwrap().file_name());
            assert!(said.contains(&*path.display().to_string()), "{path:?} is not named: {said}");
        }
    }
    assert!(
        said.contains(&format!("/var/lib/overfence/sessions/{id} (uncommitted bytes")),
        "{said}"
    );
    assert!(said.contains("/var/tmp/my bundles (the configuration named it)"), "{said}");
    assert!(machine.run(&["ls", "/var/tmp/my bundles"]).stdout.starts_with(id.as_bytes()));
    let left = list();
    for name in &left {
        assert!(
            said.contains(&format!("/var/lib/overfence/{name}")),
            "{name} is not named: {said}"
        );
    }
    for name in [
        "bundles",
        "evidence-anchors",
        "high-water",
        "keys",
        "layers",
        "notes",
        "overfence.db",
        "sessions",
    ] {
        assert!(left.iter().any(|there| there == name), "{name} is gone: {left:?}");
    }
    for name in ["reserve", "lock", "etc", "empty", "trash", "elsewhere"] {
        assert!(!left.iter().any(|there| there == name), "{name} is left");
    }
    // But for what the administrator put there.
    let etc = machine.must(&["find", "/etc/overfence", "-type", "f"]);
    assert_eq!(etc, "/etc/overfence/conf.d/here.toml\n");
    let unknown = machine.run(&["dpkg-query", "-W", "overfence"]);
    assert!(!unknown.status.success(), "{}", text(&unknown));
    // It was data: the same bytes, and the authority that knows of them.
    install(&machine);
    assert_eq!(machine.tell(&["preserved", "list"])[0]["session"], id);
    let workspace = machine.tell(&["workspace", "status", "w"]);
    assert_eq!((&workspace["version"], &workspace["generation"]), (&1.into(), &2.into()));
    assert_eq!(machine.tell(&["evidence", "verify"])["ok"], true);
    machine.tell(&["preserved", "discard", &id, "--yes"]);
}
