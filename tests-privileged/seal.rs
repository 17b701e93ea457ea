//! The seal: what it stops on ext4 and tmpfs, what survives it, and what a crash in the middle, a
//! readmission and a removal make of it. Through the command line, with agents of their own.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::IFlags;
use serde_json::Value;

use crate::agent_process::{Host, has, id_of, path_of};
use crate::host::{Place, Test, paced, paced_ttl};

mod trees;

pub fn tests() -> Vec<Test> {
    let here = [
        Test { name: "on_ext4_nothing_is_written_any_more", run: on_ext4 },
        Test { name: "on_tmpfs_an_open_descriptor_goes_on_and_the_proof_says_so", run: on_tmpfs },
        Test {
            name: "on_xfs_an_open_descriptor_goes_on_and_the_proof_says_so",
            run: |p| on_a_disk(p, "xfs", &["mkfs.xfs", "-q", "-f"]),
        },
        Test {
            name: "on_btrfs_an_open_descriptor_goes_on_and_the_proof_says_so",
            run: |p| on_a_disk(p, "btrfs", &["mkfs.btrfs", "-q", "-f"]),
        },
        Test { name: "several_lots_are_sealed_at_the_same_time", run: parallel },
        Test { name: "policy_seals_a_busy_session_after_its_time", run: by_policy },
        Test { name: "what_is_used_from_while_it_was_sealed_is_no_readmission", run: stuck },
        Test { name: "i8_killed_in_the_middle_it_is_done_again", run: crashed },
        Test { name: "a_removal_after_a_restart_leaves_nothing", run: removed },
        Test { name: "a_confined_workload_is_sealed_and_runs_on", run: confined },
        Test { name: "a_drain_proves_gone_and_keeps_the_seal", run: drained },
    ];
    here.into_iter().chain(trees::tests()).collect()
}

fn must(command: &mut Command) {
    let out = command.output().unwrap();
    assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
}

/// A host whose state lies on an ext4 image; the loop device goes with the test's namespace.
fn ext4_host(place: &Place) -> Host {
    let image = place.dir.join("image");
    File::create(&image).unwrap().set_len(512 << 20).unwrap();
    must(Command::new("mkfs.ext4").args(["-q", "-F", "-b", "4096"]).arg(&image));
    host_on(place, |at| {
        must(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(at));
    })
}

fn host_on(place: &Place, mount: impl FnOnce(&Path)) -> Host {
    let mut host = Host::new(place, "h");
    let state = host.dir.join("state");
    std::fs::create_dir(&state).unwrap();
    mount(&state);
    let text = std::fs::read_to_string(&host.config).unwrap();
    let keys = "[fence]\nseal_after = \"1s\"\n[preserve]\nsweep = \"1s\"\n";
    std::fs::write(&host.config, format!("reserve_mib = 8\n{text}{keys}")).unwrap();
    assert!(host.start(None), "{}", host.log());
    host
}

/// A writer in the session's cgroup that holds `held` open and goes on appending.
fn holder(session: &Value) -> Child {
    let child = Command::new("/bin/sh")
        .arg("-c")
        .arg("echo $$ > \"$1\"/cgroup.procs && cd \"$2\" && exec 5>>held && while echo x >&5; do sleep 0.01; done")
        .arg("sh")
        .args([path_of(session, "cgroup"), path_of(session, "merged")])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let held = path_of(session, "upper").join("held");
    wait("the writer writes", || std::fs::metadata(&held).is_ok_and(|m| m.len() > 0));
    child
}

fn wait(what: &str, mut fits: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !fits() {
        assert!(begun.elapsed() < paced(Duration::from_secs(20)), "in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn append(path: &Path) -> std::io::Result<File> {
    File::options().append(true).open(path)
}

fn errno<T: std::fmt::Debug>(answer: std::io::Result<T>) -> Option<i32> {
    answer.unwrap_err().raw_os_error()
}

fn immutable(fd: impl AsFd) -> bool {
    rustix::fs::ioctl_getflags(fd).unwrap().contains(IFlags::IMMUTABLE)
}

/// Regular files and directories at and below `top` by whether they carry the flag.
fn flagged(top: &Path) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let (mut with, mut without) = (Vec::new(), Vec::new());
    let mut todo = vec![top.to_owned()];
    while let Some(path) = todo.pop() {
        let kind = std::fs::symlink_metadata(&path).unwrap().file_type();
        if kind.is_dir() {
            todo.extend(std::fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        } else if !kind.is_file() {
            continue;
        }
        match immutable(File::open(&path).unwrap()) {
            true => with.push(path),
            false => without.push(path),
        }
    }
    (with, without)
}

fn proof_of(view: &Value, fact: &str) -> Value {
    let facts = view["facts"].as_array().unwrap();
    facts.iter().find(|f| f["fact"] == fact).unwrap_or_else(|| panic!("{view:#}")).clone()
}

fn readmit(host: &Host, id: &str) -> (i32, Value) {
    let args = ["--authorised-by", "me", "--reason", "test"];
    host.ask(&[&["readmit", id][..], &args].concat())
}

/// What there is to seal: files, directories, hard links, a symlink, a fifo, a device, a file that
/// somebody made immutable through the overlay and one that root made so in the upper.
fn furnish(session: &Value) {
    let merged = path_of(session, "merged");
    std::fs::create_dir_all(merged.join("a/b")).unwrap();
    for name in ["a/one", "a/b/two", "three", "own", "theirs"] {
        std::fs::write(merged.join(name), name).unwrap();
    }
    std::fs::hard_link(merged.join("three"), merged.join("a/three")).unwrap();
    std::os::unix::fs::symlink("three", merged.join("link")).unwrap();
    must(Command::new("mkfifo").arg(merged.join("fifo")));
    must(Command::new("chattr").arg("+i").arg(merged.join("theirs")));
    must(Command::new("chattr").arg("+i").arg(path_of(session, "upper").join("own")));
}

fn on_ext4(place: &Place) {
    let mut host = ext4_host(place);
    let opened = host.open("w", &paced_ttl(60));
    let (id, session) = (id_of(&opened), &opened["session"]);
    furnish(session);
    let (upper, merged) = (path_of(session, "upper"), path_of(session, "merged"));
    let mut writer = holder(session);
    let mut outside = append(&merged.join("a/one")).unwrap();
    outside.write_all(b"!").unwrap();
    let record = upper.parent().unwrap().join("seal");

    let fenced = host.must(&["fence", &id, "--to", "sealed", "--reason", "test", "--wait"]);
    let view = &fenced["session"];
    assert!(has(view, "frozen") && has(view, "sealed") && !has(view, "read-only"), "{view:#}");
    assert_eq!(host.metric("fences_total{fact=\"sealed\",result=\"proved\"}"), 1);
    let proof = proof_of(view, "sealed");
    let answer = proof["answer"].as_str().unwrap();
    eprintln!("{answer}; {} us", proof["took_us"]);
    // The top, 2 directories, 7 names of files (a hard link counts twice).
    assert!(answer.contains("set on 10 (1 had it before), EPERM"), "{answer}");
    assert!(answer.contains("on ext4, writing by a descriptor opened before is refused"));
    assert!(answer.contains("by a mapping made before faults"), "{answer}");
    assert!(answer.contains("1 symlink(s), 1 fifo(s)"), "{answer}");
    assert_eq!(flagged(&upper).1, Vec::<PathBuf>::new(), "without the flag");
    assert!(record.exists());

    // What the table in docs/OPERATIONS.md says of ext4.
    let eperm = Some(libc::EPERM);
    assert_eq!(errno(outside.write(b"!")), eperm, "a descriptor opened before");
    assert_eq!(errno(append(&merged.join("three"))), eperm, "a new open");
    assert_eq!(errno(File::create(merged.join("new"))), eperm, "a create");
    assert_eq!(errno(std::fs::remove_file(merged.join("a/b/two"))), eperm, "an unlink");
    assert_eq!(errno(std::fs::rename(merged.join("a"), merged.join("z"))), eperm, "a rename");
    assert_eq!(std::fs::read(merged.join("a/one")).unwrap(), b"a/one!");

    // It is exported as it stands, and the bundle's copy carries no flag.
    let bundle = host.dir.join("bundle");
    host.must(&["preserved", "export", &id, "--dest", bundle.to_str().unwrap()]);
    assert_eq!(flagged(&bundle).0, Vec::<PathBuf>::new());

    // A second fence, and an agent's restart, change nothing of it.
    host.must(&["fence", &id, "--to", "sealed", "--reason", "again", "--wait"]);
    host.kill_agent();
    assert!(host.start(None), "{}", host.log());
    let view = host.must(&["session", "inspect", &id]);
    assert_eq!(proof_of(&view, "sealed")["answer"], answer, "{view:#}");

    // Root takes it off: no fact any more, until it is sealed again.
    rustix::fs::ioctl_setflags(File::open(&upper).unwrap(), IFlags::empty()).unwrap();
    let lost = |e: &Value| e["detail"]["event"]["event"] == "seal_lost";
    let evidence = || host.must(&["evidence", "show", "--session", &id]);
    wait("a lost seal is noticed", || evidence().as_array().unwrap().iter().any(lost));
    host.until(&id, |v| has(v, "sealed"));
    assert_eq!(flagged(&upper).1, Vec::<PathBuf>::new());

    // Readmitted, all writes again but what was somebody's own.
    let (code, view) = readmit(&host, &id);
    assert_eq!((code, &view["state"]), (0, &Value::from("ACTIVE")), "{view:#}\n{}", host.log());
    assert_eq!(flagged(&upper).0, [upper.join("own")]);
    assert!(std::fs::read_to_string(&record).unwrap().contains("\"ended\":true"));
    outside.write_all(b"!").unwrap();
    for name in ["a/one", "a/b/two", "three", "a/three"] {
        append(&merged.join(name)).unwrap().write_all(b"?").unwrap();
    }
    File::create(merged.join("new")).unwrap();
    for own in ["own", "theirs"] {
        assert_eq!(errno(append(&merged.join(own))), eperm, "{own}");
    }
    let held = upper.join("held");
    let size = std::fs::metadata(&held).unwrap().len();
    wait("the writer runs on", || std::fs::metadata(&held).unwrap().len() > size);
    must(Command::new("chattr").arg("-i").arg(merged.join("theirs")));
    append(&merged.join("theirs")).unwrap();

    drop(outside);
    host.must(&["session", "close", &id, "--discard", "--yes"]);
    assert!(!upper.exists());
    writer.wait().unwrap();
    host.stop();
}

fn on_tmpfs(place: &Place) {
    goes_on(place, "tmpfs", |at| {
        must(Command::new("mount").args(["-t", "tmpfs", "-o", "size=96m", "tmpfs"]).arg(at));
    });
}

fn on_a_disk(place: &Place, kind: &str, make: &[&str]) {
    let image = place.dir.join("image");
    File::create(&image).unwrap().set_len(512 << 20).unwrap();
    must(Command::new(make[0]).args(&make[1..]).arg(&image));
    goes_on(place, kind, |at| {
        must(Command::new("mount").args(["-t", kind, "-o", "loop"]).arg(&image).arg(at));
    });
}

/// What the flag is worth off ext4: names and new opens are refused, who has it open goes on.
fn goes_on(place: &Place, kind: &str, mount: impl FnOnce(&Path)) {
    let mut host = host_on(place, mount);
    let opened = host.open("w", &paced_ttl(60));
    let (id, session) = (id_of(&opened), &opened["session"]);
    furnish(session);
    let (upper, merged) = (path_of(session, "upper"), path_of(session, "merged"));
    let mut outside = append(&merged.join("a/one")).unwrap();
    outside.write_all(b"!").unwrap();
    let fenced = host.must(&["fence", &id, "--to", "sealed", "--reason", "test", "--wait"]);
    let proof = proof_of(&fenced["session"], "sealed");
    let answer = proof["answer"].as_str().unwrap();
    eprintln!("{answer}; {} us", proof["took_us"]);
    let worth = format!("on {kind}, writing by a descriptor opened before GOES ON");
    assert!(answer.contains(&worth), "{answer}");
    assert!(answer.contains("by a mapping made before GOES ON"), "{answer}");
    assert_eq!(flagged(&upper).1, Vec::<PathBuf>::new(), "without the flag");
    outside.write_all(b"!").unwrap();
    assert_eq!(std::fs::read(upper.join("a/one")).unwrap(), b"a/one!!", "it goes on, as it says");
    let eperm = Some(libc::EPERM);
    assert_eq!(errno(append(&merged.join("three"))), eperm, "a new open");
    assert_eq!(errno(File::create(merged.join("new"))), eperm, "a create");
    let (code, view) = readmit(&host, &id);
    assert_eq!((code, &view["state"]), (0, &Value::from("ACTIVE")), "{view:#}\n{}", host.log());
    assert_eq!(flagged(&upper).0, [upper.join("own")]);
    append(&merged.join("three")).unwrap().write_all(b"?").unwrap();
    drop(outside);
    host.must(&["session", "close", &id, "--discard", "--yes"]);
    host.stop();
}

/// Two lots of files, and each takes as long as a stall: beside each other that is one.
fn parallel(place: &Place) {
    let mut host = ext4_host(place);
    host.kill_agent();
    assert!(host.start(Some("stall=kernel.seal.set.after")), "{}", host.log());
    let opened = host.open("w", &paced_ttl(60));
    let (id, session) = (id_of(&opened), &opened["session"]);
    for lot in ["a", "b"] {
        let dir = path_of(session, "merged").join(lot);
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("file"), "x").unwrap();
    }
    host.must(&["fence", &id, "--to", "sealed", "--reason", "test", "--wait"]);
    let view = host.until(&id, |v| has(v, "sealed"));
    let took = Duration::from_micros(proof_of(&view, "sealed")["took_us"].as_u64().unwrap());
    let threads = std::thread::available_parallelism().unwrap().get().min(2);
    eprintln!("two lots of {:?} in {took:?}", overfence::failpoint::STALL);
    let turns = u32::try_from(3 - threads).unwrap();
    assert!(took >= overfence::failpoint::STALL * turns, "{took:?}: nothing was shown");
    let limit = overfence::failpoint::STALL * turns + overfence::failpoint::STALL * 3 / 4;
    assert!(took < paced(limit), "{took:?}: one after the other");
    host.must(&["preserved", "discard", &id, "--yes"]);
    host.stop();
}

fn by_policy(place: &Place) {
    let mut host = ext4_host(place);
    let open = |name: &str, on_busy: &str| {
        let ttl = paced_ttl(60);
        let args = ["session", "open", "-w", name, "--create", "--ttl", &ttl, "--on-busy", on_busy];
        host.must(&args)
    };
    let (sealing, holding) = (open("s", "seal"), open("h", "hold"));
    let mut writers = [holder(&sealing["session"]), holder(&holding["session"])];
    for id in [id_of(&sealing), id_of(&holding)] {
        let (code, view) = host.ask(&["fence", &id, "--reason", "test", "--wait"]);
        assert_eq!(code, 8, "read-only was asked for and is not there: {view:#}");
        assert!(!has(&view["session"], "sealed"), "before its time");
    }
    let view = host.must(&["session", "inspect", &id_of(&sealing)]);
    assert_eq!(view["state"], "FENCED", "policy has something left to do: {view:#}");
    let view = host.until(&id_of(&sealing), |v| has(v, "sealed"));
    let since = |fact: &str| proof_of(&view, fact)["boot_ns"].as_u64().unwrap();
    assert!(since("sealed") - since("frozen") >= 1_000_000_000, "{view:#}");
    assert_eq!(view["missing"], "read-only");
    let other = host.must(&["session", "inspect", &id_of(&holding)]);
    assert!(!has(&other, "sealed") && other["state"] == "PRESERVED", "{other:#}");
    assert_eq!(flagged(&path_of(&other, "upper")).0, Vec::<PathBuf>::new());
    // Who holds it goes; it becomes read-only and stays sealed.
    host.must(&["fence", &id_of(&sealing), "--to", "killed", "--reason", "enough", "--wait"]);
    let view = host.until(&id_of(&sealing), |v| has(v, "read-only"));
    assert!(has(&view, "sealed") && has(&view, "killed"), "{view:#}");
    for id in [id_of(&sealing), id_of(&holding)] {
        host.must(&["preserved", "discard", &id, "--yes"]);
    }
    for writer in &mut writers {
        writer.wait().unwrap();
    }
    host.stop();
}

/// The overlay copies the flag when it looks a file up; who uses such a file keeps it unwritable.
fn stuck(place: &Place) {
    let mut host = ext4_host(place);
    let opened = host.open("w", &paced_ttl(60));
    let (id, session) = (id_of(&opened), &opened["session"]);
    let merged = path_of(session, "merged");
    std::fs::create_dir(merged.join("d")).unwrap();
    std::fs::write(merged.join("d/used"), "x").unwrap();
    std::fs::write(merged.join("d/seen"), "x").unwrap();
    let mut writer = holder(session);
    host.must(&["fence", &id, "--to", "sealed", "--reason", "test", "--wait"]);
    // Tries for read-only drop what nobody uses, so that these are looked up anew.
    let busy = || host.must(&["fence", &id, "--to", "sealed", "--reason", "test", "--wait"]);
    busy();
    std::thread::sleep(Duration::from_secs(6));
    let used = File::open(merged.join("d/used")).unwrap();
    std::fs::read(merged.join("d/seen")).unwrap();
    let (code, view) = readmit(&host, &id);
    assert_eq!(code, 8, "{view:#}");
    let view = host.until(&id, |v| v["state"] == "PRESERVED");
    let loss = view["loss"].as_str().unwrap();
    eprintln!("{loss}");
    assert!(loss.contains("can still not be written") && loss.contains("/d/used"), "{loss}");
    assert!(!loss.contains("/d/seen"), "a remount drops what nobody uses: {loss}");
    assert_eq!(errno(append(&merged.join("d/used"))), Some(libc::EPERM));
    drop(used);
    let (code, view) = readmit(&host, &id);
    assert_eq!((code, &view["state"]), (0, &Value::from("ACTIVE")), "{view:#}\n{}", host.log());
    append(&merged.join("d/used")).unwrap().write_all(b"y").unwrap();
    append(&merged.join("d/seen")).unwrap().write_all(b"y").unwrap();
    host.must(&["session", "close", &id, "--discard", "--yes"]);
    writer.wait().unwrap();
    host.stop();
}

fn crashed(place: &Place) {
    let mut host = ext4_host(place);
    let opened = host.open("w", "10m");
    let (id, session) = (id_of(&opened), &opened["session"]);
    furnish(session);
    let (upper, merged) = (path_of(session, "upper"), path_of(session, "merged"));
    for n in 0..2000 {
        std::fs::write(merged.join(format!("a/{n}")), "x").unwrap();
    }
    let mut writer = holder(session);
    let all = 2000 + 10;
    // While what carries the flag is counted, and ahead of the first of ours.
    for (point, some) in [
        ("kernel.seal.record.before", false),
        ("kernel.seal.record.after", false),
        ("kernel.seal.set.after", true),
    ] {
        host.kill_agent();
        assert!(host.start(Some(&format!("die={point}"))), "{}", host.log());
        host.ask(&["fence", &id, "--to", "sealed", "--reason", "test", "--wait"]);
        wait("it dies", || host.dead());
        let n = flagged(&upper).0.len();
        eprintln!("{point}: {n} of {all} carry the flag");
        assert_eq!(n > 1, some, "{point}");
        assert!(n < all, "{point}");
    }
    // Taken up by itself, without another wish.
    assert!(host.start(None), "{}", host.log());
    let view = host.until(&id, |v| has(v, "sealed"));
    let answer = proof_of(&view, "sealed")["answer"].clone();
    assert!(answer.as_str().unwrap().starts_with("set on 2010 (1 had it before)"), "{answer}");
    assert_eq!(flagged(&upper).1, Vec::<PathBuf>::new());
    // And off again, with a death in the middle and one ahead of the answer.
    for point in ["kernel.seal.cleared.after", "effect.unseal.after"] {
        host.kill_agent();
        // At the second point it goes on with what the first cut off, perhaps ahead of READY.
        if host.start(Some(&format!("die={point}"))) {
            readmit(&host, &id);
        }
        wait("it dies", || host.dead());
        let n = flagged(&upper).0.len();
        eprintln!("{point}: {n} of {all} carry the flag");
        assert!(n < all, "{point}");
        assert_eq!(n > 1, point.starts_with("kernel"), "{point}");
    }
    assert!(host.start(None), "{}", host.log());
    let view = host.until(&id, |v| v["state"] == "ACTIVE" && v["work"].is_null());
    assert_eq!(view["generation"], 2, "{view:#}");
    assert_eq!(flagged(&upper).0, [upper.join("own")]);
    append(&merged.join("a/7")).unwrap().write_all(b"y").unwrap();
    let size = std::fs::metadata(upper.join("held")).unwrap().len();
    wait("the writer runs on", || std::fs::metadata(upper.join("held")).unwrap().len() > size);
    host.must(&["session", "close", &id, "--discard", "--yes"]);
    writer.wait().unwrap();
    host.stop();
}

/// Without the watch of the agent that mounted it, the proof is a probe mount of a sealed upper.
fn removed(place: &Place) {
    let mut host = ext4_host(place);
    let opened = host.open("w", &paced_ttl(60));
    let (id, session) = (id_of(&opened), &opened["session"]);
    furnish(session);
    let mut writer = holder(session);
    let root = path_of(session, "upper").parent().unwrap().to_owned();
    let outside = append(&path_of(session, "merged").join("three")).unwrap();
    host.must(&["fence", &id, "--to", "sealed", "--reason", "test", "--wait"]);
    host.kill_agent();
    assert!(host.start(None), "{}", host.log());
    // Held from outside it is not gone, sealed or not.
    host.ask(&["preserved", "discard", &id, "--yes"]);
    let view = host.must(&["session", "inspect", &id]);
    assert_eq!(view["state"], "DELETING", "{view:#}");
    assert!(!has(&view, "gone") && root.join("upper/three").exists(), "{view:#}");
    drop(outside);
    wait("it is removed", || !root.exists());
    let trash = || std::fs::read_dir(host.dir.join("state/trash")).unwrap().count();
    wait("the trash is empty", || trash() == 0);
    writer.wait().unwrap();
    host.stop();
}

/// As users have it: behind walls, as a root that is mapped.
fn confined(place: &Place) {
    let mut host = ext4_host(place);
    let script = "mkdir d; echo x > d/f; exec 5>>held; while echo x >&5; do sleep 0.02; done";
    let mut run = Command::new(&host.binary)
        .args(["run", "-w", "w", "--create", "--user", "0", "--ttl", &paced_ttl(60), "--"])
        .args(["sh", "-c", script])
        .env("OVERFENCE_SOCKET", host.dir.join("run/overfence.sock"))
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let sessions = || host.must(&["session", "list"]);
    wait("it is there", || sessions()[0]["state"] == "ACTIVE");
    let session = sessions()[0].clone();
    let (id, upper) = (session["id"].as_str().unwrap(), path_of(&session, "upper"));
    let size = || std::fs::metadata(upper.join("held")).map_or(0, |m| m.len());
    wait("it writes", || size() > 0);
    host.must(&["fence", "-w", "w", "--to", "sealed", "--reason", "test", "--wait"]);
    run.wait().unwrap();
    assert_eq!(flagged(&upper).1, Vec::<PathBuf>::new());
    let (code, view) = readmit(&host, id);
    assert_eq!((code, &view["state"]), (0, &Value::from("ACTIVE")), "{view:#}\n{}", host.log());
    let before = size();
    wait("it writes again", || size() > before);
    host.must(&["session", "close", id, "--discard", "--yes"]);
    assert!(!upper.exists());
    host.stop();
}

fn drained(place: &Place) {
    let mut host = ext4_host(place);
    let opened = host.open("w", &paced_ttl(60));
    let (id, session) = (id_of(&opened), &opened["session"]);
    furnish(session);
    let mut writer = holder(session);
    let upper = path_of(session, "upper");
    host.must(&["fence", &id, "--to", "sealed", "--reason", "test", "--wait"]);
    host.kill_agent();
    // Nobody watches it die: the upper is asked by a probe mount, sealed as it is.
    must(Command::new("umount").arg("-l").arg(path_of(session, "merged")));
    assert!(host.start(None), "{}", host.log());
    host.must(&["drain", "--yes"]);
    let view = host.must(&["session", "inspect", &id]);
    assert!(has(&view, "gone") && has(&view, "sealed"), "{view:#}");
    assert!(proof_of(&view, "gone")["asked"].as_str().unwrap().contains("probe mount"));
    assert_eq!(flagged(&upper).1, Vec::<PathBuf>::new());
    writer.wait().unwrap();
    host.must(&["preserved", "discard", &id, "--yes"]);
    assert!(!upper.exists());
    host.stop();
}
