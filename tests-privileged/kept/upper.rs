//! A stopped session's upper: written past the overlay, and mounted a second time.

use super::*;

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "an_upper_written_from_outside_is_noticed_and_shown", run: written },
        Test { name: "a_second_overlay_takes_read_only_away_while_it_is_there", run: second },
        Test { name: "a_second_overlay_elsewhere_is_found_by_what_it_is", run: elsewhere },
        Test { name: "reading_and_sealing_is_no_change", run: unchanged },
        Test { name: "i4_what_is_written_during_an_export_is_not_removed", run: late },
        Test { name: "i4_what_was_writable_during_an_export_is_not_removed", run: lifted },
        Test { name: "i4_an_export_of_what_is_frozen_only_removes_nothing", run: frozen_only },
    ]
}

fn altered(view: &Value) -> &str {
    view["altered"].as_str().unwrap_or_default()
}

fn print_of(session: &Value) -> PathBuf {
    path_of(session, "upper").with_file_name("print")
}

/// A fenced session with a few files, whose print is taken.
fn stopped(host: &Host, workspace: &str) -> (String, Value) {
    let opened = host.open(workspace, &paced_ttl(60));
    let (id, session) = (id_of(&opened), opened["session"].clone());
    let merged = path_of(&session, "merged");
    std::fs::create_dir_all(merged.join("a/b")).unwrap();
    for name in ["a/b/f", "g", "h"] {
        std::fs::write(merged.join(name), "bytes").unwrap();
    }
    fence(host, &id, "read-only");
    wait("its print is taken", || print_of(&session).exists());
    // A clock's tick, on kernels whose change times are that coarse.
    std::thread::sleep(Duration::from_millis(15));
    (id, session)
}

fn written(place: &Place) {
    let mut host = host(place, "1s");
    let (id, session) = stopped(&host, "w");
    let upper = path_of(&session, "upper");

    // In place, with its times put back.
    let file = std::fs::File::options().write(true).open(upper.join("a/b/f")).unwrap();
    let mtime = file.metadata().unwrap().modified().unwrap();
    std::fs::write(upper.join("a/b/f"), "other").unwrap();
    file.set_modified(mtime).unwrap();
    let view = host.until(&id, |v| !altered(v).is_empty());
    assert_eq!(altered(&view), "changed: a/b/f");
    assert!(has(&view, "read-only") && has(&view, "frozen"), "what they say holds: {view:#}");
    assert_eq!(told(&host, &id, "upper_changed").1["seen"], "changed: a/b/f");
    let shown = Command::new(&host.binary)
        .args(["session", "inspect", &id])
        .env("OVERFENCE_SOCKET", host.dir.join("run/overfence.sock"))
        .output()
        .unwrap();
    assert!(String::from_utf8(shown.stdout).unwrap().contains("changed: a/b/f"));

    // Told once for each change, and not again and again.
    std::thread::sleep(paced(Duration::from_secs(3)));
    assert_eq!(told(&host, &id, "upper_changed").0, 1);

    // While no agent runs.
    host.kill_agent();
    std::fs::remove_file(upper.join("h")).unwrap();
    assert!(host.start(None), "{}", host.log());
    host.until(&id, |v| altered(v).contains("names"));
    assert_eq!(told(&host, &id, "upper_changed").0, 2);

    // An export looks itself, and takes what it found along.
    std::fs::write(upper.join("new"), "new").unwrap();
    let bundle = host.dir.join("bundle");
    host.must(&["preserved", "export", &id, "--dest", bundle.to_str().unwrap()]);
    let view = host.must(&["session", "inspect", &id]);
    assert!(altered(&view).contains("new"), "{view:#}");
    let inside = host.must(&["bundle", "inspect", bundle.to_str().unwrap()]).to_string();
    assert!(inside.contains("changed: new"), "{inside}");

    // A person lets it run on; from then on what is in the upper is its own.
    let args = ["readmit", &id, "--authorised-by", "me", "--reason", "test"];
    let view = host.must(&args);
    assert_eq!((&view["state"], altered(&view)), (&Value::from("ACTIVE"), ""), "{view:#}");
    let merged = path_of(&session, "merged");
    std::fs::write(merged.join("mine"), "mine").unwrap();
    let told_then = told(&host, &id, "upper_changed").0;
    fence(&host, &id, "read-only");
    std::thread::sleep(paced(Duration::from_secs(3)));
    assert_eq!(told(&host, &id, "upper_changed").0, told_then, "its own writing is no change");
    host.must(&["preserved", "discard", &id, "--yes"]);
    assert!(!upper.exists());
    host.stop();
}

/// What the agent does itself with a stopped upper changes nothing in it.
fn unchanged(place: &Place) {
    let mut host = host(place, "1s");
    let (id, session) = stopped(&host, "w");
    let bundle = host.dir.join("bundle");
    host.must(&["preserved", "export", &id, "--dest", bundle.to_str().unwrap()]);
    host.ask(&["fence", &id, "--to", "sealed", "--reason", "test", "--wait"]);
    host.until(&id, |v| has(v, "sealed"));
    host.kill_agent();
    assert!(host.start(None), "{}", host.log());
    std::thread::sleep(paced(Duration::from_secs(3)));
    let view = host.must(&["session", "inspect", &id]);
    assert_eq!(altered(&view), "", "{view:#}");
    // The print is one of the sealed upper now: a flag that is taken off anywhere is a change.
    let file = path_of(&session, "upper").join("a/b/f");
    must(Command::new("chattr").arg("-i").arg(&file));
    let view = host.until(&id, |v| !altered(v).is_empty());
    assert_eq!(altered(&view), "changed: a/b/f");
    host.must(&["preserved", "discard", &id, "--yes"]);
    host.stop();
}

/// Mounts a second overlay on a session's upper.
fn overlay_on(upper: &Path, dir: &Path) -> PathBuf {
    for name in ["lower", "work", "at"] {
        std::fs::create_dir_all(dir.join(name)).unwrap();
    }
    let options = format!(
        "lowerdir={0}/lower,upperdir={1},workdir={0}/work,index=off",
        dir.display(),
        upper.display()
    );
    let at = dir.join("at");
    must(Command::new("mount").args(["-t", "overlay", "-o", &options, "second"]).arg(&at));
    at
}

fn second(place: &Place) {
    // No sweep: that a mount came the kernel tells.
    let mut host = host(place, "10m");
    let (id, session) = stopped(&host, "w");
    let upper = path_of(&session, "upper");
    let at = overlay_on(&upper, &host.dir.join("second"));
    let begun = Instant::now();
    wait("it is told", || told(&host, &id, "read_only_lost").0 >= 1);
    eprintln!("noticed and told {:?} after the mount", begun.elapsed());
    let named = |v: &Value| v["holders"][0]["how"] == "overlay";
    let view = host.until(&id, named);
    assert!(!has(&view, "read-only") && has(&view, "frozen"), "{view:#}");
    let what = view["holders"][0]["what"].as_str().unwrap();
    assert!(
        what.contains(at.to_str().unwrap()) && what.contains(upper.to_str().unwrap()),
        "{what}"
    );
    let (_, event) = told(&host, &id, "read_only_lost");
    assert!(event["seen"].as_str().unwrap().contains(at.to_str().unwrap()), "{event:#}");
    // The fence says so, and does not call it done.
    let out = host.run(&["fence", &id, "--reason", "test", "--wait=1s"]);
    assert_eq!(out.status.code(), Some(8), "{out:?}");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(said.contains("a second overlay on the same upper"), "{said}");
    // A restarted agent knows it, too.
    host.kill_agent();
    assert!(host.start(None), "{}", host.log());
    let view = host.until(&id, named);
    assert!(!has(&view, "read-only"), "{view:#}");
    // What it wrote is told once it is gone, with the fact back.
    std::fs::write(at.join("foreign"), "bytes").unwrap();
    must(Command::new("umount").arg(&at));
    let view = host.until(&id, |v| has(v, "read-only") && !altered(v).is_empty());
    assert!(altered(&view).contains("foreign"), "{view:#}");
    assert_eq!(view["holders"], serde_json::json!([]));

    // One that was there before the fence keeps it from being called read-only at all.
    let opened = host.open("x", &paced_ttl(60));
    let (other, session) = (id_of(&opened), &opened["session"]);
    let at = overlay_on(&path_of(session, "upper"), &host.dir.join("third"));
    std::thread::sleep(paced(Duration::from_secs(1)));
    host.ask(&["fence", &other, "--reason", "test"]);
    let view = host.until(&other, named);
    assert!(!has(&view, "read-only"), "{view:#}");
    assert_eq!(told(&host, &other, "read_only").0, 0);
    must(Command::new("umount").arg(&at));
    host.until(&other, |v| has(v, "read-only"));
    for id in [id, other] {
        host.must(&["preserved", "discard", &id, "--yes"]);
    }
    host.stop();
}

/// In another mount namespace, by another path to the same directory, and while no agent runs.
fn elsewhere(place: &Place) {
    let mut host = host(place, "1s");
    let (id, session) = stopped(&host, "w");
    let upper = path_of(&session, "upper");
    let dir = host.dir.join("second");
    for name in ["lower", "work", "at", "alias"] {
        std::fs::create_dir_all(dir.join(name)).unwrap();
    }
    let script = "mount --bind \"$1\" \"$2\"/alias && mkdir \"$2\"/alias/../made && \
                  mount -t overlay -o \"lowerdir=$2/lower,upperdir=$2/alias/upper,workdir=$2/work,index=off\" \
                  second \"$2\"/at && exec sleep 600";
    for down in [false, true] {
        if down {
            host.kill_agent();
        }
        let _ = std::fs::remove_dir(dir.join("made"));
        // The work directory has to lie on the upper's mount.
        let script = script
            .replace("$2/work", "$2/alias/second-work")
            .replace("mount -t overlay", "mkdir -p \"$2\"/alias/second-work && mount -t overlay");
        let mut holder = Command::new("unshare")
            .args(["-m", "sh", "-c", &script, "sh"])
            .args([upper.parent().unwrap(), &dir])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let mounts = format!("/proc/{}/mountinfo", holder.id());
        wait("it is mounted there", || {
            std::fs::read_to_string(&mounts).is_ok_and(|t| t.contains("alias/upper"))
        });
        if down {
            assert!(host.start(None), "{}", host.log());
        }
        // One look may still meet the `mount` that it called, in the same namespace.
        let view = host.until(&id, |v| {
            v["holders"][0]["how"] == "overlay" && v["holders"][0]["pid"] == holder.id()
        });
        assert!(!has(&view, "read-only"), "{view:#}");
        assert!(view["holders"][0]["what"].as_str().unwrap().contains("alias/upper"), "{view:#}");
        holder.kill().unwrap();
        holder.wait().unwrap();
        host.until(&id, |v| has(v, "read-only"));
    }
    host.must(&["preserved", "discard", &id, "--yes"]);
    host.stop();
}

/// Somebody writes past the overlay after the upper was captured, and before it is removed.
fn late(place: &Place) {
    let mut host = host(place, "1h");
    host.stop();
    assert!(host.start(Some("stall=upper.layer.rename.before")), "{}", host.log());
    let (id, session) = stopped(&host, "w");
    let upper = path_of(&session, "upper");
    let export = |to: &Path| {
        let mut verb = host.verb(&["preserved", "export", &id, "--dispose", "--yes"]);
        verb.arg("--dest").arg(to).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let exports = path_of(&session, "upper").ancestors().nth(3).unwrap().join("exports");
    let captured = || std::fs::read_dir(&exports).unwrap().next().is_some();
    let bundle = host.dir.join("bundle");
    let asked = export(&bundle);
    wait("it is being captured", captured);
    // Nobody is faster than a second of the two that it stalls.
    std::thread::sleep(Duration::from_secs(1));
    std::fs::write(upper.join("late"), "late").unwrap();
    std::fs::write(upper.join("g"), "other").unwrap();
    let out = asked.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(8), "{said}");
    assert!(said.contains("changed past the overlay meanwhile") && bundle.exists(), "{said}");
    let view = host.must(&["session", "inspect", &id]);
    assert_eq!(altered(&view), "changed: g, late; 6 names, there were 5", "{view:#}");
    assert_eq!(std::fs::read_to_string(upper.join("late")).unwrap(), "late");

    // The next one holds all of it, and what it holds may go.
    let again = host.dir.join("again");
    let out = export(&again).wait_with_output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let made: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(made["stable"], true, "{made:#}");
    assert!(!upper.exists());
    let rows = host.run(&["bundle", "diff", again.to_str().unwrap()]);
    assert!(String::from_utf8_lossy(&rows.stdout).contains("late"), "{rows:?}");
    host.stop();
}

/// Somebody takes read-only away after the capture; the agent wins it back before the bundle has its name.
fn lifted(place: &Place) {
    let mut host = host(place, "1h");
    host.stop();
    assert!(host.start(Some("stall=upper.bundle.rename.before")), "{}", host.log());
    let (id, session) = stopped(&host, "w");
    let bundle = host.dir.join("bundle");
    let mut export = host.verb(&["preserved", "export", &id, "--dispose", "--yes"]);
    export.arg("--dest").arg(&bundle).stdout(Stdio::piped()).stderr(Stdio::piped());
    let asked = export.spawn().unwrap();
    let made = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.unwrap().file_name().as_encoded_bytes().starts_with(b".overfence-bundle-")
    };
    wait("the bundle is made", || std::fs::read_dir(&host.dir).unwrap().any(made));
    must(Command::new("mount").args(["-o", "remount,rw"]).arg(path_of(&session, "merged")));
    wait("it is told", || told(&host, &id, "read_only_lost").0 == 1);
    assert!(!bundle.exists(), "the export was faster");
    let out = asked.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(8), "{said}");
    assert!(said.contains("nothing is removed") && bundle.exists(), "{said}");
    assert!(path_of(&session, "upper").join("g").exists());
    host.until(&id, |v| has(v, "read-only"));
    host.must(&["preserved", "discard", &id, "--yes"]);
    host.stop();
}

fn frozen_only(place: &Place) {
    let mut host = host(place, "1h");
    let opened = host.open("w", &paced_ttl(60));
    let (id, session) = (id_of(&opened), &opened["session"]);
    // Whoever has it open keeps the superblock writable.
    let held = std::fs::File::create(path_of(session, "merged").join("held")).unwrap();
    host.must(&["fence", &id, "--to", "read-only", "--reason", "test"]);
    let view = host.until(&id, |v| has(v, "frozen") && v["state"] == "PRESERVED");
    assert!(!has(&view, "read-only"), "{view:#}");
    let export = |name: &str, more: &[&str]| {
        let to = host.dir.join(name);
        let mut args = vec!["preserved", "export", &id, "--dest", to.to_str().unwrap()];
        args.extend(more);
        (host.ask(&args), host.must(&["bundle", "inspect", to.to_str().unwrap()]))
    };
    let ((code, made), bundle) = export("one", &[]);
    assert_eq!((code, &made["stable"]), (0, &false.into()), "{made:#}");
    let from = &bundle["provenance"];
    assert_eq!((&from["stable"], &from["read_again"]), (&false.into(), &bundle["layer"]));
    let ((code, _), _) = export("two", &["--dispose", "--yes"]);
    assert_eq!(code, 8);
    assert!(path_of(session, "upper").join("held").exists());
    drop(held);
    host.stop();
}
