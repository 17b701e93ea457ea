//! Sessions whose upper lies in an image of its own: its size, what stops its file system, what is
//! left of it, and watermarks. Through the command line, with agents of their own.

mod damaged;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::agent_process::{Host, has, id_of, path_of};
use crate::host::{Place, Test, paced, paced_ttl};

pub fn tests() -> Vec<Test> {
    let mut all = vec![
        Test { name: "a_full_image_stops_its_own_workload_alone", run: full },
        Test { name: "all_verbs_work_as_on_a_directory_and_nothing_is_left", run: verbs },
        Test { name: "an_outside_writer_is_stopped_by_upper_frozen", run: outside },
        Test { name: "upper_frozen_survives_the_agent_and_a_foreign_hand", run: survives },
        Test { name: "what_is_sealed_or_comes_back_goes_first", run: lifted },
        Test { name: "a_drained_image_is_exported_by_a_later_agent", run: drained },
        Test { name: "a_gone_image_is_compared_and_comes_back_in_a_new_one", run: again },
        Test { name: "a_stray_loop_device_is_found_and_let_go", run: stray },
        Test { name: "a_confined_workload_writes_into_its_image", run: confined },
        Test { name: "sync_is_confined_to_the_image", run: sync_confined },
        Test { name: "a_full_disk_below_an_image_publishes_nothing", run: full_below },
        Test { name: "what_a_sync_told_is_not_forgotten", run: told_by_a_sync },
        Test { name: "a_host_without_mkfs_says_so", run: without_mkfs },
        Test { name: "above_a_watermark_no_session_is_opened", run: watermarks },
    ];
    all.extend(damaged::tests());
    all
}

const IMAGE: [&str; 4] = ["--upper", "image", "--size", "256M"];

fn must(command: &mut Command) {
    let out = command.output().unwrap();
    assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
}

fn open(host: &Host, workspace: &str, ttl: &str, more: &[&str]) -> Value {
    host.must(&[&["session", "open", "-w", workspace, "--create", "--ttl", ttl], more].concat())
}

fn configure(host: &Host, keys: &str) {
    let text = std::fs::read_to_string(&host.config).unwrap();
    let head = if text.contains("reserve_mib") { "" } else { "reserve_mib = 0\n" };
    std::fs::write(&host.config, format!("{head}{text}{keys}")).unwrap();
}

fn started(place: &Place) -> Host {
    let mut host = Host::new(place, "h");
    configure(&host, "[fence]\nseal_after = \"1s\"\n[preserve]\nsweep = \"1s\"\n");
    assert!(host.start(None), "{}", host.log());
    host
}

/// Loop devices whose file lies below `dir`.
pub fn loops(dir: &Path) -> Vec<String> {
    let dir = dir.canonicalize().unwrap();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/sys/block").unwrap().flatten() {
        let Ok(file) = std::fs::read_to_string(entry.path().join("loop/backing_file")) else {
            continue;
        };
        if Path::new(file.trim_end()).starts_with(&dir) {
            found.push(format!("{} {}", entry.file_name().display(), file.trim_end()));
        }
    }
    found
}

fn no_loops(host: &Host) {
    wait("no loop device is left", || loops(&host.dir).is_empty());
}

fn wait(what: &str, mut fits: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !fits() {
        assert!(begun.elapsed() < paced(Duration::from_secs(20)), "in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn shell(session: &Value, place: &str, script: &str) -> Child {
    Command::new("/bin/sh")
        .arg("-c")
        .arg(format!("{place} cd \"$2\" && {script}"))
        .arg("sh")
        .args([path_of(session, "cgroup"), path_of(session, "merged")])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

const INSIDE: &str = "echo $$ > \"$1\"/cgroup.procs &&";

/// Appends by one descriptor for ever, in the session's cgroup or out of it.
fn appends(session: &Value, place: &str, name: &str) -> Child {
    let child =
        shell(session, place, &format!("exec 5>>{name} && while echo x >&5; do sleep 0.01; done"));
    let file = path_of(session, "upper").join(name);
    wait("it writes", || std::fs::metadata(&file).is_ok_and(|m| m.len() > 0));
    child
}

/// Whether a file grows within a while.
fn grows(file: &Path) -> bool {
    let size = || std::fs::metadata(file).unwrap().len();
    let (before, begun) = (size(), Instant::now());
    while begun.elapsed() < Duration::from_millis(500) {
        if size() != before {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

fn end(mut child: Child) {
    let _ = child.kill();
    child.wait().unwrap();
}

fn events(host: &Host, id: &str) -> Vec<String> {
    let all = host.must(&["evidence", "show", "--session", id]);
    let name = |e: &Value| e["detail"]["event"]["event"].as_str().map(str::to_owned);
    all.as_array().unwrap().iter().filter_map(name).collect()
}

fn readmit(host: &Host, id: &str) -> (i32, Value) {
    host.ask(&["readmit", id, "--authorised-by", "me", "--reason", "test"])
}

fn full(place: &Place) {
    let mut host = started(place);
    let small = open(&host, "small", "10m", &["--upper", "image", "--size", "32M"]);
    let (id, session) = (id_of(&small), &small["session"]);
    assert_eq!(session["image"], "32M", "{session:#}");
    let other = open(&host, "other", &paced_ttl(60), &IMAGE);
    let plain = open(&host, "plain", &paced_ttl(60), &[]);
    let mut filler = shell(session, INSIDE, "exec cat /dev/zero > fill");
    assert!(!filler.wait().unwrap().success(), "an image of 32M took more");
    let fill = path_of(session, "merged").join("fill");
    let mut file = std::fs::File::options().append(true).open(&fill).unwrap();
    let error = (0..1000).find_map(|_| file.write_all(&[1; 4096]).err()).unwrap();
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    drop(file);
    let held = std::fs::metadata(&fill).unwrap().len();
    assert!((20 << 20..32 << 20).contains(&held), "{held}");
    for view in [&other["session"], &plain["session"]] {
        std::fs::write(path_of(view, "merged").join("f"), vec![1; 40 << 20]).unwrap();
    }
    assert_eq!(host.must(&["status"])["space"]["short"], false);
    // What is full is published, fenced and removed as anything else.
    let done = host.must(&["session", "checkpoint", &id]);
    assert_eq!((&done["outcome"], &done["at"]["version"]), (&"committed".into(), &1.into()));
    host.must(&["fence", &id, "--to", "killed", "--reason", "test", "--wait"]);
    let view = host.until(&id, |v| v["state"] == "PRESERVED" && has(v, "read-only"));
    assert_eq!(view["image"], "32M");
    let shown = host.must(&["preserved", "list"]);
    let bytes = shown[0]["bytes"].as_u64().unwrap();
    assert!((20 << 20..32 << 20).contains(&bytes), "the content counts: {shown:#}");
    host.must(&["preserved", "discard", &id, "--yes"]);
    host.must(&["session", "close", &id_of(&other), "--checkpoint"]);
    host.must(&["session", "close", &id_of(&plain), "--discard", "--yes"]);
    no_loops(&host);
    host.stop();
}

fn verbs(place: &Place) {
    let mut host = started(place);
    let began = Instant::now();
    let opened = open(&host, "w", &paced_ttl(60), &IMAGE);
    eprintln!("opened in {:?}", began.elapsed());
    let (id, session) = (id_of(&opened), &opened["session"]);
    let (upper, merged) = (path_of(session, "upper"), path_of(session, "merged"));
    let root = merged.parent().unwrap().to_owned();
    assert_eq!(loops(&host.dir).len(), 1);
    let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(root.join("disk")).unwrap());
    eprintln!("the image's top has mode {mode:o}, the directory above it is root's");
    let sparse = std::fs::metadata(root.join("image")).unwrap();
    use std::os::unix::fs::MetadataExt as _;
    assert_eq!((sparse.len(), sparse.mode() & 0o777), (256 << 20, 0o600));
    assert!(sparse.blocks() * 512 < 2 << 20, "{} bytes for an empty one", sparse.blocks() * 512);
    std::fs::create_dir(merged.join("dir")).unwrap();
    std::fs::write(merged.join("dir/one"), "one").unwrap();
    let done = host.must(&["session", "checkpoint", &id]);
    assert_eq!(done["outcome"], "committed");
    assert_eq!(host.must(&["session", "checkpoint", &id])["outcome"], "unchanged");
    // The next one starts on what was published; one is kept and one is discarded.
    host.must(&["session", "close", &id]);
    assert!(!upper.exists() && !root.exists());
    no_loops(&host);
    let second = open(&host, "w", &paced_ttl(60), &IMAGE);
    let merged = path_of(&second["session"], "merged");
    assert_eq!(std::fs::read(merged.join("dir/one")).unwrap(), b"one");
    std::fs::write(merged.join("two"), vec![2; 1 << 20]).unwrap();
    let id = id_of(&second);
    let (code, _) = host.ask(&["session", "close", &id]);
    assert_eq!(code, 4, "uncommitted bytes");
    host.must(&["session", "close", &id, "--keep"]);
    let view = host.until(&id, |v| v["state"] == "PRESERVED" && has(v, "read-only"));
    assert!(has(&view, "killed"), "{view:#}");
    let shown = host.must(&["preserved", "list"]);
    assert!(shown[0]["bytes"].as_u64().unwrap() >= 1 << 20, "{shown:#}");
    assert!(shown[0]["bytes"].as_u64().unwrap() < 2 << 20, "content, not image: {shown:#}");
    let report = host.must(&["gc", "--dry-run"]);
    assert!(report["items"].as_array().unwrap().iter().all(|i| i["kind"] != "loop"), "{report:#}");
    let bundle = host.dir.join("bundle");
    let out = host.must(&["preserved", "export", &id, "--dest", bundle.to_str().unwrap()]);
    assert_eq!((&out["stable"], &out["verified"]), (&true.into(), &true.into()));
    host.must(&["preserved", "discard", &id, "--yes"]);
    no_loops(&host);
    // By configuration, too.
    let third = open(&host, "w", &paced_ttl(60), &["--size", "64M", "--upper", "image"]);
    std::fs::write(path_of(&third["session"], "merged").join("x"), "x").unwrap();
    host.must(&["session", "close", &id_of(&third), "--discard", "--yes"]);
    let (code, _) = host.ask(&["session", "open", "-w", "w", "--ttl", "60s", "--size", "64M"]);
    assert_eq!(code, 2, "a directory has no size");
    let tiny = ["session", "open", "-w", "w", "--ttl", "60s", "--upper", "image", "--size", "1M"];
    assert_eq!(host.ask(&tiny).0, 2, "too small");
    host.stop();
    configure(&host, "[open]\nupper = \"image\"\nsize = \"64M\"\n");
    assert!(host.start(None), "{}", host.log());
    let fourth = open(&host, "w", &paced_ttl(60), &[]);
    assert_eq!(fourth["session"]["image"], "64M");
    host.must(&["session", "close", &id_of(&fourth)]);
    no_loops(&host);
    assert_eq!(host.must(&["evidence", "verify"])["ok"], true);
    host.stop();
}

/// Lets who waits for a stopped image go on, should the test fail: nobody else could end them.
struct Lift(PathBuf);

impl Drop for Lift {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").arg("-u").arg(&self.0).stderr(Stdio::null()).status();
    }
}

type Held = (String, Value, [Child; 2], [PathBuf; 2], Lift);

/// A fenced session that a process outside holds open for writing.
fn held(host: &Host, workspace: &str) -> Held {
    let opened = open(host, workspace, "10m", &IMAGE);
    let (id, session) = (id_of(&opened), opened["session"].clone());
    let upper = path_of(&session, "upper");
    let (inside, outside) = (appends(&session, INSIDE, "in"), appends(&session, "", "out"));
    let lift = Lift(upper.parent().unwrap().to_owned());
    let (code, _) = host.ask(&["fence", &id, "--reason", "test", "--wait"]);
    assert_eq!(code, 8, "read-only was granted");
    let view = host.until(&id, |v| has(v, "upper-frozen"));
    assert!(has(&view, "frozen") && !has(&view, "read-only"), "{view:#}");
    assert!(host.metric("fences_total{fact=\"upper-frozen\",result=\"proved\"}") >= 1);
    (id, view, [inside, outside], [upper.join("in"), upper.join("out")], lift)
}

fn outside(place: &Place) {
    let mut host = started(place);
    let (id, view, [inside, outside], files, _lift) = held(&host, "w");
    assert_eq!((&view["state"], &view["missing"]), (&"PRESERVED".into(), &"read-only".into()));
    let holders = view["holders"].as_array().unwrap();
    let pids: Vec<_> = holders.iter().map(|h| h["pid"].as_u64().unwrap()).collect();
    assert!(pids.contains(&u64::from(outside.id())), "{holders:#?}");
    assert!(holders.iter().all(|h| h["how"] != "loop"), "its own loop device: {holders:#?}");
    assert!(!grows(&files[1]), "an outside writer goes on although the upper is frozen");
    let table = Command::new(&host.binary)
        .args(["session", "inspect", &id])
        .env("OVERFENCE_SOCKET", host.dir.join("run/overfence.sock"))
        .output()
        .unwrap();
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(table.contains("proved upper-frozen: FIFREEZE") && table.contains("256M"), "{table}");
    // A tick does not lift it for another try.
    std::thread::sleep(Duration::from_secs(6));
    assert!(!grows(&files[1]) && has(&host.must(&["session", "inspect", &id]), "upper-frozen"));
    let bundle = host.dir.join("bundle");
    let out = host.must(&["preserved", "export", &id, "--dest", bundle.to_str().unwrap()]);
    assert_eq!(out["stable"], true, "{out:#}");
    // It is no aim of a fence.
    let fence = format!("/v1/sessions/{id}/fence");
    let answer = host.http("POST", &fence, r#"{"to":"upper-frozen"}"#);
    assert_eq!(answer.status, 400, "{}", answer.body);
    // Asked again: lifted, refused, and stopped again.
    assert_eq!(host.ask(&["fence", &id, "--reason", "again", "--wait"]).0, 8);
    host.until(&id, |v| has(v, "upper-frozen"));
    let told = events(&host, &id);
    assert_eq!(told.iter().filter(|e| *e == "upper_frozen").count(), 2, "{told:?}");
    assert!(told.contains(&"upper_thawed".to_owned()), "{told:?}");
    // The holder goes: read-only is granted.
    let pid = nix::unistd::Pid::from_raw(i32::try_from(outside.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    host.must(&["fence", &id, "--to", "killed", "--reason", "last", "--wait"]);
    end(outside);
    let view = host.until(&id, |v| has(v, "read-only"));
    assert!(has(&view, "killed") && !has(&view, "upper-frozen"), "{view:#}");
    host.must(&["preserved", "discard", &id, "--yes"]);
    end(inside);
    no_loops(&host);
    host.stop();
}

fn survives(place: &Place) {
    let mut host = started(place);
    let (id, _, [inside, outside], files, _lift) = held(&host, "w");
    host.kill_agent();
    assert!(!grows(&files[1]), "it was lifted by the agent's death");
    assert!(host.start(None), "{}", host.log());
    let view = host.until(&id, |v| has(v, "upper-frozen"));
    assert!(has(&view, "frozen"), "{view:#}");
    // Root lifts it: noticed, and stopped again.
    must(Command::new("fsfreeze").arg("-u").arg(files[1].parent().unwrap().parent().unwrap()));
    wait("a lifted freeze is noticed", || events(&host, &id).contains(&"upper_freeze_lost".into()));
    host.until(&id, |v| has(v, "upper-frozen"));
    assert!(!grows(&files[1]));
    // Root thaws the cgroup: whoever writes then waits for the upper, which is lifted for the freeze.
    let freeze = path_of(&view, "cgroup").join("cgroup.freeze");
    std::fs::write(&freeze, "0").unwrap();
    wait("a foreign thaw is noticed", || events(&host, &id).contains(&"foreign_thaw".into()));
    let view = host.until(&id, |v| has(v, "frozen") && has(v, "upper-frozen"));
    assert_eq!(view["state"], "PRESERVED");
    assert!(!grows(&files[0]) && !grows(&files[1]));
    // Given up while it stands, by a person; the holder outside keeps the superblock until it ends.
    assert_eq!(host.ask(&["preserved", "discard", &id, "--yes"]).0, 8);
    end(outside);
    wait("it is removed", || host.ask(&["session", "inspect", &id]).0 == 3);
    end(inside);
    no_loops(&host);
    host.stop();
}

fn lifted(place: &Place) {
    let mut host = started(place);
    // Sealed at once, by wish; then it stands again.
    let (id, _, [inside, outside], files, _lift) = held(&host, "sealed");
    host.ask(&["fence", &id, "--to", "sealed", "--reason", "test", "--wait"]);
    let view = host.until(&id, |v| has(v, "sealed") && has(v, "upper-frozen"));
    assert_eq!(view["state"], "PRESERVED", "{view:#}");
    assert!(!grows(&files[0]) && !grows(&files[1]));
    end(outside);
    let (code, view) = readmit(&host, &id);
    assert_eq!((code, &view["state"]), (0, &"ACTIVE".into()), "{view:#}\n{}", host.log());
    assert!(!has(&view, "sealed") && grows(&files[0]), "it does not write again");
    host.must(&["session", "close", &id, "--discard", "--yes"]);
    end(inside);
    // Readmitted while it stands.
    let (id, _, [inside, outside], files, _lift) = held(&host, "back");
    let (code, view) = readmit(&host, &id);
    assert_eq!((code, &view["generation"]), (0, &2.into()), "{view:#}\n{}", host.log());
    assert!(grows(&files[0]) && grows(&files[1]));
    end(outside);
    host.must(&["session", "close", &id, "--discard", "--yes"]);
    end(inside);
    no_loops(&host);
    host.stop();
}

fn drained(place: &Place) {
    let mut host = started(place);
    let opened = open(&host, "w", "10m", &IMAGE);
    let (id, session) = (id_of(&opened), &opened["session"]);
    std::fs::write(path_of(session, "merged").join("precious"), vec![7; 3 << 20]).unwrap();
    host.must(&["drain", "--yes"]);
    let view = host.must(&["session", "inspect", &id]);
    assert!(has(&view, "gone"), "{view:#}");
    no_loops(&host);
    assert!(!path_of(session, "upper").exists(), "it is mounted still");
    host.kill_agent();
    assert!(host.start(None), "{}", host.log());
    let shown = host.must(&["preserved", "list"]);
    let bytes = shown[0]["bytes"].as_u64().unwrap();
    assert!((3 << 20..4 << 20).contains(&bytes), "{shown:#}");
    no_loops(&host);
    let bundle = host.dir.join("bundle");
    let out = host.must(&["preserved", "export", &id, "--dest", bundle.to_str().unwrap()]);
    assert_eq!(out["stable"], true, "{out:#}");
    no_loops(&host);
    host.must(&["bundle", "verify", bundle.to_str().unwrap()]);
    // One that was left mounted by an agent that died in the middle of an export.
    let disk = path_of(session, "upper").parent().unwrap().to_owned();
    host.kill_agent();
    must(Command::new("mount").args(["-o", "loop"]).arg(disk.with_file_name("image")).arg(&disk));
    assert!(host.start(None), "{}", host.log());
    no_loops(&host);
    host.must(&["preserved", "discard", &id, "--yes"]);
    assert!(!disk.parent().unwrap().exists());
    host.stop();
}

fn again(place: &Place) {
    let mut host = started(place);
    let opened = open(&host, "w", "10m", &IMAGE);
    let id = id_of(&opened);
    std::fs::write(path_of(&opened["session"], "merged").join("precious"), "bytes").unwrap();
    host.must(&["drain", "--yes"]);
    host.kill_agent();
    assert!(host.start(None), "{}", host.log());
    let diff = host.run(&["session", "diff", &id]);
    let said = String::from_utf8_lossy(&diff.stdout).into_owned();
    assert!(diff.status.success() && said.contains("precious"), "{said}\n{}", host.log());
    no_loops(&host);
    let (code, view) = readmit(&host, &id);
    assert_eq!(code, 0, "{view:#}\n{}", host.log());
    assert_eq!((&view["state"], &view["image"]), (&"ACTIVE".into(), &"256M".into()), "{view:#}");
    let merged = path_of(&view, "merged");
    assert_eq!(std::fs::read(merged.join("precious")).unwrap(), b"bytes");
    let next = view["id"].as_str().unwrap();
    assert_ne!(next, id);
    assert_eq!(host.must(&["session", "checkpoint", next])["outcome"], "committed");
    host.must(&["session", "close", next]);
    no_loops_but_kept(&host);
    host.stop();
}

fn stray(place: &Place) {
    let mut host = started(place);
    let kept = open(&host, "kept", "10m", &IMAGE);
    let nobodys = host.dir.join("state/sessions/s-0192f0c1d2e37a4b8c5d6e7f80910a2b");
    std::fs::create_dir(&nobodys).unwrap();
    let image = nobodys.join("image");
    std::fs::File::create(&image).unwrap().set_len(32 << 20).unwrap();
    host.stop();
    must(Command::new("losetup").arg("-f").arg(&image));
    assert_eq!(loops(&nobodys).len(), 1);
    configure(&host, "");
    assert!(host.start(None), "{}", host.log());
    wait("it is let go", || loops(&nobodys).is_empty());
    // That of a session is left alone.
    assert_eq!(loops(&host.dir).len(), 1);
    std::fs::write(path_of(&kept["session"], "merged").join("f"), "x").unwrap();
    assert!(host.log().contains("which no session explains"), "{}", host.log());
    std::fs::remove_dir_all(&nobodys).unwrap();
    host.must(&["session", "close", &id_of(&kept), "--discard", "--yes"]);
    no_loops(&host);
    host.stop();
}

fn confined(place: &Place) {
    let mut host = started(place);
    let run = |user: &str, script: &str| {
        let args = ["run", "-w", "w", "--create", "--user", user];
        host.run(&[&args[..], &IMAGE, &["--", "/bin/sh", "-c", script]].concat())
    };
    let script = "echo hi > f && cat f && ls / && ls /dev && cat /proc/self/mountinfo";
    for user in ["1000", "0"] {
        let out = run(user, script);
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        // The overlay's own line names its upper; the image itself is nowhere.
        let seen = said.contains("/dev/loop") || said.lines().any(|line| line.starts_with("loop"));
        assert!(said.contains("hi") && !seen, "{said}");
    }
    let out = run("1000", "head -c 1G /dev/zero > big || { rm big; exit 3; }");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.code() == Some(3) && said.contains("No space left"), "{said}");
    no_loops_but_kept(&host);
    host.stop();
}

fn no_loops_but_kept(host: &Host) {
    for view in host.must(&["preserved", "list"]).as_array().unwrap() {
        host.must(&["preserved", "discard", view["session"].as_str().unwrap(), "--yes"]);
    }
    no_loops(host);
}

/// A stalled sync of the uppers in directories keeps no image waiting.
fn sync_confined(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(Some("stall=effect.read_only.before")), "{}", host.log());
    const CROWD: usize = 6;
    let crowd: Vec<String> =
        (0..CROWD).map(|i| id_of(&open(&host, &format!("d{i}"), "10m", &[]))).collect();
    let image = id_of(&open(&host, "image", "10m", &IMAGE));
    for id in &crowd {
        assert_eq!(host.http("POST", &format!("/v1/sessions/{id}/fence"), "{}").status, 200);
    }
    let begun = Instant::now();
    host.must(&["fence", &image, "--reason", "test", "--wait"]);
    let took = begun.elapsed();
    let waiting = crowd
        .iter()
        .filter(|id| !has(&host.must(&["session", "inspect", id]), "read-only"))
        .count();
    eprintln!("read-only after {took:?}, {waiting} of {CROWD} in directories wait still");
    assert!(has(&host.must(&["session", "inspect", &image]), "read-only"));
    assert!(waiting >= 3, "{waiting} wait: nothing was shown");
    host.stop();
}

fn full_below(place: &Place) {
    let mut host = Host::new(place, "h");
    let state = host.dir.join("state");
    std::fs::create_dir(&state).unwrap();
    must(Command::new("mount").args(["-t", "tmpfs", "-o", "size=160m", "tmpfs"]).arg(&state));
    let text = std::fs::read_to_string(&host.config).unwrap();
    std::fs::write(&host.config, format!("reserve_mib = 8\n{text}")).unwrap();
    assert!(host.start(None), "{}", host.log());
    let opened = open(&host, "w", "10m", &["--upper", "image", "--size", "128M"]);
    let other = open(&host, "other", "10m", &["--upper", "image", "--size", "16M"]);
    let (id, session) = (id_of(&opened), &opened["session"]);
    let merged = path_of(session, "merged");
    std::fs::write(merged.join("early"), "early").unwrap();
    // What an image has yet to write of its own needs room, too.
    for view in [session, &other["session"]] {
        must(Command::new("sync").arg("-f").arg(path_of(view, "upper")));
    }
    // Somebody else takes what the image could still grow into.
    let stat = rustix::fs::statvfs(&state).unwrap();
    let free = stat.f_bavail * stat.f_frsize;
    let fill = std::fs::File::create(state.join("fill")).unwrap();
    rustix::fs::fallocate(&fill, rustix::fs::FallocateFlags::empty(), 0, free - (1 << 20)).unwrap();
    let mut file = std::fs::File::create(merged.join("late")).unwrap();
    let wrote = file.write_all(&vec![9; 32 << 20]);
    let synced = file.sync_all();
    eprintln!("write {wrote:?}, fsync {synced:?}");
    let error = wrote.and(synced).unwrap_err();
    let expected = [libc::EIO, libc::ENOSPC, libc::EROFS];
    assert!(expected.contains(&error.raw_os_error().unwrap()), "{error}");
    drop(file);
    // It has lost something: nothing of it is published; others go on.
    drop(fill);
    std::fs::remove_file(state.join("fill")).unwrap();
    let refused = host.run(&["session", "checkpoint", &id]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("error(s)"), "{said}");
    assert_eq!(host.must(&["workspace", "status", "w"])["version"], 0);
    std::fs::write(path_of(&other["session"], "merged").join("f"), "f").unwrap();
    host.must(&["session", "close", &id_of(&other), "--checkpoint"]);
    // What can be read is exported.
    let begun = Instant::now();
    host.must(&["fence", &id, "--to", "killed", "--reason", "test", "--wait"]);
    assert!(begun.elapsed() < paced(Duration::from_secs(12)), "{:?}", begun.elapsed());
    host.until(&id, |v| v["state"] == "PRESERVED");
    let bundle = host.dir.join("bundle");
    host.must(&["preserved", "export", &id, "--dest", bundle.to_str().unwrap()]);
    host.must(&["preserved", "discard", &id, "--yes"]);
    no_loops(&host);
    host.stop();
}

/// Some kernels tell of lost data once, and only who syncs: the image keeps it.
fn told_by_a_sync(place: &Place) {
    let mut host = Host::new(place, "h");
    let fault = host.dir.join("fault");
    assert!(host.start(Some(&format!("fail={}", fault.display()))), "{}", host.log());
    let opened = open(&host, "w", "10m", &IMAGE);
    let id = id_of(&opened);
    std::fs::write(path_of(&opened["session"], "merged").join("f"), "f").unwrap();
    let refused = |host: &Host| {
        let out = host.run(&["session", "checkpoint", &id]);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success() && said.contains("error(s)"), "{said}");
        assert_eq!(host.must(&["workspace", "status", "w"])["version"], 0);
    };
    std::fs::write(&fault, "kernel.image.told.before 5").unwrap();
    refused(&host);
    std::fs::remove_file(&fault).unwrap();
    refused(&host);
    host.kill_agent();
    assert!(host.start(None), "{}", host.log());
    refused(&host);
    // What can be read is exported.
    let begun = Instant::now();
    host.must(&["fence", &id, "--to", "killed", "--reason", "test", "--wait"]);
    assert!(begun.elapsed() < paced(Duration::from_secs(12)), "{:?}", begun.elapsed());
    host.until(&id, |v| v["state"] == "PRESERVED");
    let bundle = host.dir.join("bundle");
    host.must(&["preserved", "export", &id, "--dest", bundle.to_str().unwrap()]);
    host.must(&["preserved", "discard", &id, "--yes"]);
    no_loops(&host);
    host.stop();
}

fn without_mkfs(place: &Place) {
    let mut host = started(place);
    // In this test's own mount namespace.
    for path in ["/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4"] {
        if Path::new(path).exists() {
            let real = std::fs::canonicalize(path).unwrap();
            must(Command::new("mount").args(["--bind", "/dev/null"]).arg(real));
        }
    }
    host.kill_agent();
    assert!(host.start(None));
    let args = ["session", "open", "-w", "w", "--create", "--ttl", "60s"];
    let out = host.run(&[&args[..], &IMAGE].concat());
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(said.contains("unsupported") && said.contains("install e2fsprogs"), "{said}");
    // It was rolled back to nothing, and a directory works.
    wait("it is rolled back", || host.must(&["session", "list"]).as_array().unwrap().is_empty());
    assert_eq!(std::fs::read_dir(host.dir.join("state/sessions")).unwrap().count(), 0);
    let opened = open(&host, "w", &paced_ttl(60), &[]);
    host.must(&["session", "close", &id_of(&opened)]);
    let doctor = Command::new(&host.binary)
        .args(["doctor", "--config", host.config.to_str().unwrap()])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&doctor.stdout).into_owned();
    let row = said.lines().find(|l| l.contains("image-uppers")).unwrap_or_else(|| panic!("{said}"));
    assert!(row.contains("e2fsprogs") || row.contains("mkfs.ext4"), "{row}");
    host.stop();
}

fn watermarks(place: &Place) {
    let mut host = started(place);
    let first = open(&host, "first", "10m", &[]);
    host.stop();
    let refused = |host: &Host, more: &[&str]| {
        let args = ["session", "open", "-w", "next", "--create", "--ttl", "10m"];
        let out = host.run(&[&args[..], more].concat());
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(1), "{said}");
        assert!(said.contains("above_watermark"), "{said}");
        said
    };
    configure(&host, "[open]\nmax_sessions = 2\n");
    assert!(host.start(None), "{}", host.log());
    let second = open(&host, "second", "10m", &[]);
    let said = refused(&host, &[]);
    assert!(said.contains("2 sessions are mounted and open.max_sessions is 2"), "{said}");
    // Those that are there go on, also when the mark is put below them.
    for view in [&first["session"], &second["session"]] {
        let now = host.must(&["session", "inspect", view["id"].as_str().unwrap()]);
        assert_eq!(now["state"], "ACTIVE");
    }
    host.must(&["session", "close", &id_of(&second)]);
    let third = open(&host, "third", "10m", &[]);
    host.must(&["session", "close", &id_of(&third)]);
    host.stop();
    let text = std::fs::read_to_string(&host.config).unwrap();
    std::fs::write(&host.config, text.replace("max_sessions = 2", "min_free = \"99%\"")).unwrap();
    assert!(host.start(None), "{}", host.log());
    let said = refused(&host, &[]);
    assert!(said.contains("open.min_free is 99%") && said.contains("preserved list"), "{said}");
    assert_eq!(host.must(&["session", "inspect", &id_of(&first)])["state"], "ACTIVE");
    std::fs::write(path_of(&first["session"], "merged").join("f"), "f").unwrap();
    host.must(&["session", "checkpoint", &id_of(&first)]);
    host.stop();
    let text = std::fs::read_to_string(&host.config).unwrap();
    std::fs::write(&host.config, text.replace("99%", "0")).unwrap();
    assert!(host.start(None), "{}", host.log());
    let said = refused(&host, &["--upper", "image", "--size", "16T"]);
    assert!(said.contains("an image of 16T does not fit above it"), "{said}");
    let opened = open(&host, "next", "10m", &[]);
    for id in [id_of(&opened), id_of(&first)] {
        host.must(&["session", "close", &id, "--discard", "--yes"]);
    }
    host.stop();
}
