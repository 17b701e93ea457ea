//! Leases, takeover, doubt and grace, through the command line on the real kernel.

use std::os::unix::ffi::OsStrExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::agent_process::{Host, has, id_of, path_of};
use crate::host::{Place, Test, paced, paced_ttl};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "run_ends_with_lease_lost_however_it_is_lost", run: run_lost },
        Test { name: "i9_a_silent_authority_is_doubt_then_frozen_then_resumed", run: doubt },
        Test { name: "i9_a_doubted_session_that_was_claimed_stays_fenced", run: claimed },
        Test { name: "a_readmission_that_fails_gives_its_lease_back", run: half_readmitted },
        Test { name: "ttl_bounds_are_refused", run: bounds },
        Test { name: "i1_competing_takeovers_give_one_owner", run: takeovers },
        Test { name: "force_revokes_and_freezes_the_predecessor", run: forced },
        Test { name: "a_stopped_command_loses_its_process_lease", run: process_holder },
        Test { name: "closed_sessions_leave_the_agent_no_descriptor", run: no_descriptors_left },
        Test { name: "commands_of_exec_hold_a_process_lease_opened_without_one", run: exec_holds },
        Test { name: "i4_grace_removes_and_keep_keeps", run: grace },
        Test { name: "lowers_of_any_bytes_become_the_first_layers", run: lowers },
        Test { name: "a_mapped_root_is_root_in_the_layer", run: mapped_root },
        Test { name: "run_is_the_whole_job", run: whole_job },
    ]
}

/// The session.json that the workload sees.
fn seen_inside(host: &Host, id: &str) -> Value {
    let path = host.dir.join("run/sessions").join(id).join("inside/session.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn wait(limit: Duration, what: &str, fits: impl Fn() -> bool) {
    let begun = Instant::now();
    while !fits() {
        assert!(begun.elapsed() < limit, "waited {limit:?} in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What the workspace's next session finds in `f`, and how many publications made the version.
fn stored(host: &Host) -> (Option<String>, u64) {
    let next = host.must(&["session", "open", "-w", "w", "--ttl", "60s"]);
    let text = std::fs::read_to_string(path_of(&next["session"], "merged").join("f")).ok();
    host.must(&["session", "close", &id_of(&next)]);
    let rows = host.must(&["workspace", "history", "w"]);
    let published = rows.as_array().unwrap().iter().filter(|row| row["kind"] == "published");
    let (version, published) = (&next["session"]["base"]["version"], published.count());
    assert_eq!(version, published, "{rows:#}");
    (text, published as u64)
}

fn write(opened: &Value, text: &str) {
    std::fs::write(path_of(&opened["session"], "merged").join("f"), text).unwrap();
}

/// What a session wrote and did not publish.
fn kept(opened: &Value) -> String {
    std::fs::read_to_string(path_of(&opened["session"], "upper").join("f")).unwrap()
}

/// Beats for a session until the guard is dropped.
struct Beats(std::sync::mpsc::Sender<()>, Option<std::thread::JoinHandle<()>>);

impl Beats {
    fn of(host: &Host, opened: &Value) -> Self {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let (binary, socket) = (host.binary.clone(), host.dir.join("run/overfence.sock"));
        let (id, token) = (id_of(opened), opened["token"].as_str().unwrap().to_owned());
        let thread = std::thread::spawn(move || {
            while stopped
                .recv_timeout(Duration::from_millis(200))
                .is_err_and(|e| e == std::sync::mpsc::RecvTimeoutError::Timeout)
            {
                let _ = Command::new(&binary)
                    .args(["lease", "beat", &id, "--token", &token])
                    .env("OVERFENCE_SOCKET", &socket)
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .status();
            }
        });
        Self(stop, Some(thread))
    }
}

impl Drop for Beats {
    fn drop(&mut self) {
        let _ = self.0.send(());
        if let Some(thread) = self.1.take() {
            let _ = thread.join();
        }
    }
}

/// The authority's file is locked by somebody else: it does not answer.
fn doubt(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let opened = host.open("w", &paced_ttl(3));
    let id = id_of(&opened);
    let beats = Beats::of(&host, &opened);
    write(&opened, "before");
    host.must(&["session", "checkpoint", &id]);
    let lock = rusqlite::Connection::open(host.dir.join("state/overfence.db")).unwrap();
    lock.execute_batch("BEGIN IMMEDIATE").unwrap();
    wait(paced(Duration::from_secs(5)), "doubt is shown inside", || {
        seen_inside(&host, &id)["state"] == "doubt"
    });
    let view = host.must(&["session", "inspect", &id]);
    let doubt = view["doubt"].as_str().unwrap();
    assert!(doubt.contains("generation 1") && doubt.contains("owner"), "{doubt}");
    assert_eq!(view["may_publish"], false);
    write(&opened, "in doubt");
    let out = host.run(&["session", "checkpoint", &id]);
    assert_eq!(out.status.code(), Some(4), "{out:?}");
    assert!(String::from_utf8_lossy(&out.stderr).contains("doubt"), "{out:?}");
    let events = path_of(&view, "cgroup").join("cgroup.freeze");
    wait(paced(Duration::from_secs(5)), "frozen at the deadline", || {
        std::fs::read_to_string(&events).unwrap().starts_with('1')
    });
    assert_eq!(seen_inside(&host, &id)["generation"], 1);
    let w = host.must(&["workspace", "status", "w"]);
    assert_eq!((&w["version"], kept(&opened)), (&1.into(), "in doubt".to_owned()));
    lock.execute_batch("ROLLBACK").unwrap();
    let view =
        host.until(&id, |v| v["state"] == "ACTIVE" && v["generation"] == 2 && v["work"].is_null());
    assert_eq!(view["doubt"], Value::Null);
    wait(paced(Duration::from_secs(5)), "thawed", || {
        std::fs::read_to_string(&events).unwrap().starts_with('0')
    });
    let entries = host.must(&["evidence", "show", "--session", &id]);
    let kinds: Vec<_> =
        entries.as_array().unwrap().iter().map(|e| e["detail"]["event"]["event"].clone()).collect();
    for kind in ["renewal_missed", "lease_lost", "frozen", "readmitted", "thawed"] {
        assert!(kinds.contains(&Value::from(kind)), "{kind} is missing in {kinds:?}");
    }
    // What it wrote in doubt is published under the generation that it got, and that once.
    let closed = host.must(&["session", "close", &id, "--checkpoint"]);
    drop(beats);
    assert_eq!(closed["generation"], 2);
    assert_eq!(stored(&host), (Some("in doubt".to_owned()), 2));
    let entries = host.must(&["evidence", "show", "--session", &id]);
    let offered = entries.as_array().unwrap().iter().filter(|e| e["kind"] == "publication");
    let offered: Vec<_> = offered.map(|e| e["detail"]["offered"]["generation"].clone()).collect();
    assert_eq!(offered, [1, 2]);
    assert_eq!(host.must(&["evidence", "verify"])["ok"], true);
}

fn claimed(place: &Place) {
    let mut host = Host::new(place, "h");
    host.start_keeper();
    assert!(host.start(None));
    let opened = host.open("w", &paced_ttl(2));
    let id = id_of(&opened);
    let freeze = path_of(&opened["session"], "cgroup").join("cgroup.freeze");
    write(&opened, "of the first");
    host.kill_agent();
    wait(paced(Duration::from_secs(5)), "the keeper freezes", || {
        std::fs::read_to_string(&freeze).unwrap().starts_with('1')
    });
    // Somebody else takes the workspace while no agent of this host runs: another session's record
    // at the authority, as another host would leave it.
    let db = rusqlite::Connection::open(host.dir.join("state/overfence.db")).unwrap();
    let held: String = db
        .query_row("SELECT name FROM sqlite_master WHERE name = 'workspaces'", [], |r| r.get(0))
        .unwrap();
    assert_eq!(held, "workspaces");
    drop(db);
    assert!(host.start(None));
    let next = host.ask(&["session", "open", "-w", "w", "--ttl", "60s"]);
    if next.0 == 0 {
        // The new owner was faster than the policy: the old session stays fenced for good.
        let view = host.until(&id, |v| has(v, "frozen"));
        assert_ne!(view["state"], "ACTIVE");
        std::thread::sleep(Duration::from_secs(3));
        assert_eq!(host.must(&["session", "inspect", &id])["generation"], 1);
        write(&next.1, "of the next");
        host.must(&["session", "close", &id_of(&next.1), "--checkpoint"]);
        assert_eq!(stored(&host), (Some("of the next".to_owned()), 1));
        assert_eq!(kept(&opened), "of the first");
    } else {
        // The policy was faster: the workspace has one writer, and it is the resumed one.
        assert_eq!(next.0, 4);
        let resumed = |v: &Value| v["state"] == "ACTIVE" && v["work"].is_null();
        assert_eq!(host.until(&id, resumed)["generation"], 2);
        host.must(&["session", "close", &id, "--checkpoint"]);
        assert_eq!(stored(&host), (Some("of the first".to_owned()), 1));
    }
}

/// The acquisition is committed before the host's own files are: nobody runs under a generation that they do
/// not know.
fn half_readmitted(place: &Place) {
    const BY: [&str; 4] = ["--authorised-by", "op", "--reason", "test"];
    let mut host = Host::new(place, "host");
    let faults = place.dir.join("faults");
    assert!(host.start(Some(&format!("fail={}", faults.display()))));
    let opened = host.open("w", &paced_ttl(600));
    let (id, cgroup) = (id_of(&opened), path_of(&opened["session"], "cgroup"));
    let mut inside = Command::new("/bin/sh")
        .args(["-c", "echo $$ > $0/cgroup.procs && exec sleep 600"])
        .arg(&cgroup)
        .spawn()
        .unwrap();
    host.must(&["fence", &id, "--reason", "first", "--wait"]);
    // ENOSPC.
    std::fs::write(&faults, "store.mark.before 28").unwrap();
    let readmit = [&["readmit", &id][..], &BY].concat();
    let (code, answer) = host.ask(&readmit);
    assert_ne!(code, 0, "{answer:#}");
    std::fs::remove_file(&faults).unwrap();
    let view = host.until(&id, |v| v["state"] == "PRESERVED" && v["work"].is_null());
    assert_eq!((&view["generation"], &view["may_publish"]), (&2.into(), &false.into()), "{view:#}");
    assert!(view["loss"].as_str().unwrap().contains("readmission failed"), "{view:#}");
    let events = std::fs::read_to_string(cgroup.join("cgroup.events")).unwrap();
    assert!(has(&view, "frozen") && events.contains("frozen 1"), "{events}\n{view:#}");
    let leases = host.must(&["lease", "list"]);
    assert!(leases.as_array().unwrap().iter().all(|l| l["state"] == "REVOKED"), "{leases:#}");
    host.must(&readmit);
    host.until(&id, |v| v["state"] == "ACTIVE" && v["generation"] == 3);
    let wish = cgroup.join("cgroup.freeze");
    let runs = || std::fs::read_to_string(&wish).is_ok_and(|text| text == "0\n");
    wait(paced(Duration::from_secs(10)), "it runs", runs);
    // Lost twice, and the bundle tells when the last one was.
    host.must(&["fence", &id, "--reason", "second", "--to", "killed", "--wait"]);
    inside.wait().unwrap();
    std::fs::write(path_of(&view, "upper").join("f"), "bytes").unwrap();
    let shown = host.must(&["evidence", "show", "--session", &id]);
    let ended = |e: &&Value| e["detail"]["from"] == "ACTIVE" && e["detail"]["to"] == "FENCING";
    let lost = shown.as_array().unwrap().iter().filter(ended);
    let lost: Vec<_> = lost.map(|e| e["time"].clone()).collect();
    let bundle = host.must(&["preserved", "export", &id]);
    let told = host.must(&["bundle", "inspect", bundle["path"].as_str().unwrap()]);
    let text = serde_json::to_string(&told).unwrap();
    assert_eq!(lost.len(), 3, "{lost:?}\n{shown:#}");
    let at = told["provenance"]["lease_ended_at"].as_str().unwrap_or_else(|| panic!("{text}"));
    let time = |text: &str| text.parse::<jiff::Timestamp>().unwrap();
    let lost: Vec<_> = lost.iter().map(|at| time(at.as_str().unwrap())).collect();
    assert!(time(at) == lost[2] && lost[2] != lost[0], "{at}: {lost:?}");
}

fn bounds(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    for ttl in ["999ms", "25h", "0s"] {
        let out = host.run(&["session", "open", "-w", "w", "--create", "--ttl", ttl]);
        assert_eq!(out.status.code(), Some(2), "{ttl}: {out:?}");
        assert!(String::from_utf8_lossy(&out.stderr).contains("1 s to 24 h"), "{out:?}");
    }
    let open = ["session", "open", "-w", "w", "--create", "--ttl", "30s", "--max-lifetime", "29s"];
    let out = host.run(&open);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(2) && said.contains("shorter than the TTL"), "{out:?}");
    assert_eq!(host.must(&["session", "list"]), Value::Array(vec![]));
}

fn takeovers(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let first = host.open("w", &paced_ttl(1));
    write(&first, "of the first");
    host.until(&id_of(&first), |v| v["state"] == "PRESERVED");
    let host = &host;
    let outcomes: Vec<(i32, Value)> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| host.ask(&["session", "open", "-w", "w", "--ttl", "60s"])))
            .collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let won: Vec<_> = outcomes.iter().filter(|(code, _)| *code == 0).collect();
    assert_eq!(won.len(), 1, "{outcomes:?}");
    assert!(outcomes.iter().all(|(code, _)| [0, 4].contains(code)), "{outcomes:?}");
    assert_eq!(won[0].1["session"]["generation"], 2);
    let history = host.must(&["workspace", "history", "w"]);
    let taken = history.as_array().unwrap().iter().filter(|h| h["kind"] == "acquired").count();
    assert_eq!(taken, 2, "{history:#}");
    let record = history
        .as_array()
        .unwrap()
        .iter()
        .find(|h| h["generation"] == 2 && h["kind"] == "acquired")
        .unwrap();
    assert_eq!(record["detail"]["predecessor"]["generation"], 1, "{record:#}");
    assert_eq!(record["detail"]["predecessor"]["state"], "EXPIRED");
    let id = id_of(&won[0].1);
    write(&won[0].1, "of the owner");
    host.must(&["session", "close", &id, "--checkpoint"]);
    assert_eq!(host.run(&["session", "checkpoint", &id_of(&first)]).status.code(), Some(4));
    assert_eq!(stored(host), (Some("of the owner".to_owned()), 1));
    assert_eq!(kept(&first), "of the first");
    host.must(&["preserved", "discard", &id_of(&first), "--yes"]);
}

fn forced(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let first = host.open("w", "60s");
    write(&first, "of the first");
    let (code, _) = host.ask(&["session", "open", "-w", "w"]);
    assert_eq!(code, 4, "a live lease was taken without force");
    let second = host.must(&["session", "open", "-w", "w", "--force", "--owner", "b"]);
    assert_eq!(second["predecessor"]["state"], "REVOKED");
    let view = host.until(&id_of(&first), |v| has(v, "read-only"));
    assert!(has(&view, "frozen") && view["class"] != "AUTHORISED", "{view:#}");
    let (code, answer) =
        host.ask(&["readmit", &id_of(&first), "--authorised-by", "ann", "--reason", "mine"]);
    assert_eq!(code, 4, "readmitted beside a live lease: {answer:#}");
    write(&second, "of the second");
    host.must(&["session", "close", &id_of(&second), "--checkpoint"]);
    assert_eq!(stored(&host), (Some("of the second".to_owned()), 1));
    assert_eq!(kept(&first), "of the first");
    host.must(&["preserved", "discard", &id_of(&first), "--yes"]);
}

fn cli(host: &Host, args: &[&str]) -> Command {
    let mut command = Command::new(&host.binary);
    command
        .args(args)
        .env("OVERFENCE_SOCKET", host.dir.join("run/overfence.sock"))
        .stdin(Stdio::null());
    command
}

fn process_holder(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    // A file and no pipe: the frozen command goes on holding what it inherited.
    let words = host.dir.join("run.err");
    let ttl = paced_ttl(2);
    let mut run = cli(&host, &["run", "-w", "w", "--create", "--ttl", &ttl, "--", "sleep", "600"])
        .stderr(std::fs::File::create(&words).unwrap())
        .spawn()
        .unwrap();
    let mut view = Value::Null;
    wait(paced(Duration::from_secs(5)), "a session with a command", || {
        host.must(&["session", "list"])[0]["processes"].as_u64().unwrap_or(0) >= 3
    });
    view.clone_from(&host.must(&["session", "list"])[0]);
    let id = view["id"].as_str().unwrap().to_owned();
    // Alive and running: the lease is renewed well past its TTL.
    std::thread::sleep(paced(Duration::from_millis(2500)));
    assert_eq!(host.must(&["session", "inspect", &id])["state"], "ACTIVE");
    let procs = std::fs::read_to_string(path_of(&view, "cgroup").join("cgroup.procs")).unwrap();
    let sleeper = procs
        .lines()
        .find(|pid| {
            std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim()
                == "sleep"
        })
        .unwrap();
    let pid = nix::unistd::Pid::from_raw(sleeper.parse().unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).unwrap();
    let view = host.until(&id, |v| has(v, "read-only"));
    assert!(view["loss"].as_str().unwrap().contains("no sign of life"), "{view:#}");
    assert_eq!(run.wait().unwrap().code(), Some(125));
    let words = std::fs::read_to_string(&words).unwrap();
    assert!(words.contains("lease_lost"), "{words}");
    // It says what is kept, and where.
    let kept = path_of(&view, "upper").display().to_string();
    assert!(words.contains(&format!("is kept in {kept}")) && words.contains(&id), "{words}");
    // A stopped writer is there still: the end of its client did not hang it up.
    assert!(std::path::Path::new(&format!("/proc/{pid}")).exists());
    let events = std::fs::read_to_string(path_of(&view, "cgroup").join("cgroup.events")).unwrap();
    assert!(events.contains("populated 1") && events.contains("frozen 1"), "{events}");
    host.must(&["preserved", "discard", &id, "--yes"]);
}

fn no_descriptors_left(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let open = || {
        let proc = format!("/proc/{}/fd", host.agent_pid());
        std::fs::read_dir(proc).unwrap().count()
    };
    let cycle = || {
        let opened = host.open("w", "60s");
        host.must(&["session", "close", &id_of(&opened), "--discard", "--yes"]);
    };
    // The first one opens what stays: the database's readers, the runtime's descriptors.
    cycle();
    let before = open();
    for _ in 0..5 {
        cycle();
    }
    wait(Duration::from_secs(5), "the descriptors of closed sessions", || open() <= before);
}

fn exec_holds(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let (ttl, lasts) = (paced_ttl(2), paced_ttl(3));
    let opened = host
        .must(&["session", "open", "-w", "w", "--create", "--ttl", &ttl, "--holder", "process"]);
    let id = id_of(&opened);
    let mut exec = cli(&host, &["session", "exec", &id, "--", "sleep", &lasts]).spawn().unwrap();
    std::thread::sleep(paced(Duration::from_millis(2500)));
    assert_eq!(host.must(&["session", "inspect", &id])["state"], "ACTIVE");
    assert_eq!(exec.wait().unwrap().code(), Some(0));
    let view = host.until(&id, |v| has(v, "read-only"));
    assert!(view["loss"].as_str().unwrap().contains("no sign of life"), "{view:#}");
    host.must(&["preserved", "discard", &id, "--yes"]);
}

fn grace(place: &Place) {
    let mut host = Host::new(place, "h");
    let config = std::fs::read_to_string(&host.config).unwrap();
    let preserve = "[preserve]\ngrace = \"3s\"\nmin_notice = \"1s\"\nsweep = \"1s\"\n";
    std::fs::write(&host.config, format!("{config}{preserve}")).unwrap();
    assert!(host.start(None));
    let (short, long) = (host.open("short", "60s"), host.open("long", "60s"));
    for opened in [&short, &long] {
        std::fs::write(path_of(&opened["session"], "merged").join("f"), "bytes").unwrap();
        host.must(&["session", "close", &id_of(opened), "--keep"]);
    }
    host.must(&["preserved", "keep", &id_of(&long), "--until", "10m"]);
    let listed = host.must(&["preserved", "list"]);
    let left = |id: &str| {
        listed.as_array().unwrap().iter().find(|p| p["session"] == id).unwrap()["grace_left_ms"]
            .as_u64()
            .unwrap()
    };
    assert!(left(&id_of(&short)) <= 3000 && left(&id_of(&long)) > 500_000, "{listed:#}");
    let upper = |opened: &Value| path_of(&opened["session"], "upper");
    assert!(upper(&short).join("f").exists(), "removed before its grace was over");
    wait(paced(Duration::from_secs(20)), "grace removes it", || !upper(&short).exists());
    assert!(upper(&long).join("f").exists());
    let entries = host.must(&["evidence", "show", "--session", &id_of(&short)]);
    assert!(entries.to_string().contains("\"to\":\"DELETING\""), "{entries:#}");
    host.must(&["preserved", "discard", &id_of(&long), "--yes"]);
}

fn lowers(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let names: [&[u8]; 4] = [b"a:b,c", b"back\\slash", b"new\nline and space", b"\xff\xfe"];
    let mut args: Vec<std::ffi::OsString> = ["workspace", "create", "w"].map(Into::into).to_vec();
    for (n, name) in names.iter().enumerate() {
        let dir = place.dir.join(std::ffi::OsStr::from_bytes(name));
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join(format!("file{n}")), *name).unwrap();
        args.extend(["--lower".into(), dir.into()]);
    }
    let status = Command::new(&host.binary)
        .args(&args)
        .env("OVERFENCE_SOCKET", host.dir.join("run/overfence.sock"))
        .status()
        .unwrap();
    assert!(status.success());
    let w = host.must(&["workspace", "status", "w"]);
    assert_eq!((w["version"].as_u64(), w["head"].as_array().unwrap().len()), (Some(1), 4));
    let opened = host.open("w", "60s");
    for (n, name) in names.iter().enumerate() {
        let file = path_of(&opened["session"], "merged").join(format!("file{n}"));
        assert_eq!(std::fs::read(file).unwrap(), *name);
    }
    host.must(&["session", "close", &id_of(&opened)]);
}

fn mapped_root(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let lower = place.dir.join("lower");
    std::fs::create_dir(&lower).unwrap();
    std::fs::write(lower.join("old"), "x").unwrap();
    let made = cli(&host, &["run", "-w", "w", "--create", "--user", "0", "--lower"])
        .arg(&lower)
        .args([
            "--",
            "sh",
            "-c",
            "stat -c %u:%g old && touch new && stat -c %u:%g new && echo y >> old && id -u",
        ])
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    assert_eq!(String::from_utf8_lossy(&made.stdout), "0:0\n0:0\n0\n", "{made:?}");
    let opened = host.open("w", "60s");
    for name in ["new", "old"] {
        let meta = std::fs::metadata(path_of(&opened["session"], "merged").join(name)).unwrap();
        use std::os::unix::fs::MetadataExt as _;
        assert_eq!((meta.uid(), meta.gid()), (0, 0), "{name} is not root's in the layer");
    }
    host.must(&["session", "close", &id_of(&opened)]);
}

fn whole_job(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let run = |args: &[&str]| cli(&host, args).output().unwrap();
    let good = run(&[
        "run",
        "-w",
        "w",
        "--create",
        "--",
        "sh",
        "-c",
        "echo one > f; cat /run/overfence/session.json",
    ]);
    assert!(good.status.success(), "{good:?}");
    assert!(String::from_utf8_lossy(&good.stdout).contains("\"generation\": 1"), "{good:?}");
    assert_eq!(host.must(&["workspace", "status", "w"])["version"], 1);
    let bad = run(&["run", "-w", "w", "--", "sh", "-c", "echo two > g; exit 3"]);
    assert_eq!(bad.status.code(), Some(3), "{bad:?}");
    let kept = host.must(&["preserved", "list"]);
    assert_eq!(kept.as_array().unwrap().len(), 1, "{kept:#}");
    assert_eq!(host.must(&["workspace", "status", "w"])["version"], 1);
    let missing = run(&["run", "-w", "w", "--on-exit", "discard", "--", "no-such-command"]);
    assert_eq!(missing.status.code(), Some(127), "{missing:?}");
    let unknown = run(&["run", "-w", "nowhere", "--", "true"]);
    assert_eq!(unknown.status.code(), Some(125), "{unknown:?}");
    host.must(&["preserved", "discard", kept[0]["session"].as_str().unwrap(), "--yes"]);
    assert_eq!(host.must(&["session", "list"]), Value::Array(vec![]));
}

/// `run` whose lease is taken away, by three ways, while its command runs or just as it ends: 125, the
/// code, and where the bytes are; nothing is published.
fn run_lost(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let ways: [(&str, &[&str]); 3] = [
        ("fence", &["fence", "-w", "w", "--reason", "test", "--wait"]),
        ("takeover", &["session", "open", "-w", "w", "--force", "--owner", "b"]),
        ("hold", &["workspace", "hold", "-w", "w", "--reason", "test"]),
    ];
    for (name, lose) in ways {
        let words = host.dir.join(format!("{name}.err"));
        let script = "echo mine > f; while [ ! -e go ]; do sleep 0.05; done";
        let args = ["run", "-w", "w", "--create", "--owner", name, "--", "sh", "-c", script];
        let mut run =
            cli(&host, &args).stderr(std::fs::File::create(&words).unwrap()).spawn().unwrap();
        let mine = || {
            let all = host.must(&["session", "list"]);
            all.as_array().unwrap().iter().find(|s| s["owner"] == name).cloned()
        };
        wait(paced(Duration::from_secs(20)), "a command that wrote", || {
            mine().is_some_and(|view| path_of(&view, "upper").join("f").exists())
        });
        let view = mine().unwrap();
        let answer = host.must(lose);
        assert_eq!(run.wait().unwrap().code(), Some(125), "{name}");
        let words = std::fs::read_to_string(&words).unwrap();
        let upper = path_of(&view, "upper");
        for part in ["lease_lost", view["id"].as_str().unwrap(), &upper.display().to_string()] {
            assert!(words.contains(part), "{name}: no {part}: {words}");
        }
        assert_eq!(std::fs::read_to_string(upper.join("f")).unwrap(), "mine\n");
        assert_eq!(host.must(&["workspace", "status", "w"])["version"], 0, "{name}");
        if name == "takeover" {
            host.must(&["session", "close", &id_of(&answer)]);
        }
        host.must(&["preserved", "discard", view["id"].as_str().unwrap(), "--yes"]);
    }
}
