//! Who stands in the way is named, and looking for them waits for nobody.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::*;

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "a_mount_below_merged_is_named_when_it_stops_a_removal", run: nested },
        Test { name: "who_hangs_on_a_dead_server_delays_no_search_for_holders", run: hung },
        Test { name: "a_loop_device_on_a_file_without_a_name_is_named", run: nameless_loop },
        Test { name: "a_kill_beside_a_holder_outside_is_answered_in_time", run: killed },
    ]
}

fn trouble(view: &Value) -> &str {
    view["trouble"].as_str().unwrap_or_default()
}

/// Read-only stays refused, so that the wait would go on for all its time.
fn killed(place: &Place) {
    let mut host = host(place, "10m");
    for (name, fenced_before) in [("running", false), ("fenced", true)] {
        let opened = host.open(name, &paced_ttl(60));
        let (id, session) = (id_of(&opened), &opened["session"]);
        let held = std::fs::File::create(path_of(session, "merged").join("f")).unwrap();
        if fenced_before {
            assert_eq!(host.ask(&["fence", &id, "--reason", "test", "--wait"]).0, 8);
        }
        let begun = Instant::now();
        host.must(&["fence", &id, "--to", "killed", "--reason", "test", "--wait=60s"]);
        let took = begun.elapsed();
        eprintln!("{name}: answered after {took:?}");
        assert!(took < paced(Duration::from_secs(20)), "{name}: answered after {took:?}");
        let view = host.must(&["session", "inspect", &id]);
        assert!(has(&view, "killed") && !has(&view, "read-only"), "{view:#}");
        assert_eq!((&view["state"], &view["missing"]), (&"PRESERVED".into(), &"read-only".into()));
        let pid = std::process::id();
        let holders = view["holders"].as_array().unwrap();
        assert!(holders.iter().any(|h| h["pid"] == pid), "{holders:#?}");
        drop(held);
        host.until(&id, |v| has(v, "read-only"));
        host.must(&["preserved", "discard", &id, "--yes"]);
    }
    host.stop();
}

fn nested(place: &Place) {
    let mut host = host(place, "10m");
    let opened = host.open("w", &paced_ttl(60));
    let (id, session) = (id_of(&opened), &opened["session"]);
    let merged = path_of(session, "merged");
    let below = merged.join("below");
    std::fs::create_dir(&below).unwrap();
    must(Command::new("mount").args(["-t", "tmpfs", "somebody"]).arg(&below));
    fence(&host, &id, "frozen");
    let out = host.run(&["preserved", "discard", &id, "--yes"]);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!out.status.success());
    let want = format!("tmpfs at {}", below.display());
    assert!(said.contains(&want) && said.contains("unmount that first"), "{said}");
    let view = host.until(&id, |v| trouble(v).contains(&want));
    assert_eq!(view["state"], "DELETING");
    assert!(path_of(session, "upper").exists(), "removed below a mount");
    must(Command::new("umount").arg(&below));
    wait("it goes", || host.must(&["session", "list"]).as_array().unwrap().is_empty());

    // A process in it is named, too.
    let opened = host.open("w", &paced_ttl(60));
    let (id, session) = (id_of(&opened), &opened["session"]);
    let merged = path_of(session, "merged");
    let mut sits = Command::new("sleep").arg("600").current_dir(&merged).spawn().unwrap();
    fence(&host, &id, "frozen");
    host.ask(&["preserved", "discard", &id, "--yes"]);
    let named = format!("pid {} (sleep) outside the session, cwd {}", sits.id(), merged.display());
    host.until(&id, |v| trouble(v).contains(&named));
    sits.kill().unwrap();
    sits.wait().unwrap();
    wait("it goes", || host.must(&["session", "list"]).as_array().unwrap().is_empty());
    host.stop();
}

/// A process of somebody else whose working directory, and an open file, are on a FUSE file system
/// whose server stopped.
fn hung(place: &Place) {
    let mut host = host(place, "1s");
    let at = place.dir.join("hung");
    std::fs::create_dir(&at).unwrap();
    let mut server = Command::new(std::env::current_exe().unwrap())
        .arg(&at)
        .env("OVERFENCE_TEST_WRITER", "healthy")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait("it is served", || at.join("bytes").exists());
    let mut caught = Command::new("/bin/sh")
        .args(["-c", "exec 5<bytes && exec sleep 600"])
        .current_dir(&at)
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let opened_it = format!("/proc/{}/fd/5", caught.id());
    wait("it has it open", || std::fs::read_link(&opened_it).is_ok());
    let opened = host.open("w", &paced_ttl(60));
    let (id, session) = (id_of(&opened), &opened["session"]);
    let merged = path_of(session, "merged");
    std::fs::write(merged.join("f"), "bytes").unwrap();
    let mut copy =
        Command::new("unshare").args(["-m", "sleep", "600"]).stdin(Stdio::null()).spawn().unwrap();
    let mounts = format!("/proc/{}/mountinfo", copy.id());
    let comm = format!("/proc/{}/comm", copy.id());
    wait("the mount is copied", || {
        std::fs::read_to_string(&comm).is_ok_and(|c| c == "sleep\n")
            && std::fs::read_to_string(&mounts).is_ok_and(|t| t.contains(&*id))
    });
    kill(Pid::from_raw(server.id().cast_signed()), Signal::SIGSTOP).unwrap();
    std::thread::scope(|scope| {
        let (over, waits) = std::sync::mpsc::channel::<()>();
        // Whatever hangs in it, also a failing test's agent, is let go in the end.
        let server = &mut server;
        scope.spawn(move || {
            let _ = waits.recv_timeout(paced(Duration::from_secs(40)));
            server.kill().unwrap();
            server.wait().unwrap();
        });
        let begun = Instant::now();
        host.must(&["fence", &id, "--reason", "test", "--wait"]);
        host.ask(&["preserved", "discard", &id, "--yes"]);
        let named = format!("pid {} (sleep) outside the session, mount", copy.id());
        host.until(&id, |v| trouble(v).contains(&named));
        eprintln!("named {:?} after the fence", begun.elapsed());
        // Others are stopped and removed as ever.
        let other = host.open("x", &paced_ttl(60));
        host.must(&["session", "close", &id_of(&other)]);
        drop(over);
    });
    for child in [&mut copy, &mut caught] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    wait("it goes", || host.must(&["session", "list"]).as_array().unwrap().is_empty());
    host.stop();
}

fn nameless_loop(place: &Place) {
    let mut host = host(place, "10m");
    let opened = host.open("w", &paced_ttl(60));
    let (id, session) = (id_of(&opened), &opened["session"]);
    let image = path_of(session, "merged").join("image");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let out = Command::new("losetup").args(["-f", "--show"]).arg(&image).output().unwrap();
    assert!(out.status.success(), "{out:?}");
    let device = String::from_utf8(out.stdout).unwrap().trim().to_owned();
    std::fs::remove_file(&image).unwrap();
    // Two more, who hold a file of their own: one of the session, and one of somebody else.
    let (procs, merged) = (path_of(session, "cgroup"), path_of(session, "merged"));
    let hold = |script: &str, file: &str| {
        let script = format!("{script} exec 5>>\"$2/{file}\" && exec sleep 600");
        let mut command = Command::new("/bin/sh");
        command.args(["-c", &script, "sh"]).args([&procs, &merged]).stdin(Stdio::null());
        let child = command.spawn().unwrap();
        let comm = format!("/proc/{}/comm", child.id());
        wait("it holds", || std::fs::read_to_string(&comm).is_ok_and(|c| c == "sleep\n"));
        child
    };
    let mut inside = hold("echo $$ > \"$1\"/cgroup.procs;", "in");
    let mut outside = hold("", "out");
    let fence = ["fence", &id, "--reason", "test", "--wait=1s"];
    host.ask(&fence);
    host.until(&id, |v| v["holders"].as_array().unwrap().len() >= 3);
    let out = host.run(&fence);
    let view = host.must(&["session", "inspect", &id]);
    must(Command::new("losetup").arg("-d").arg(&device));
    outside.kill().unwrap();
    outside.wait().unwrap();
    let holders = view["holders"].as_array().unwrap();
    let holder = holders.iter().find(|h| h["how"] == "loop").expect("the loop device");
    let what = holder["what"].as_str().unwrap();
    assert!(what.contains(device.trim_start_matches("/dev/")) && what.contains("image"), "{what}");
    // Who waited is told the same, in words.
    assert_eq!(out.status.code(), Some(8), "{out:?}");
    let said = String::from_utf8_lossy(&out.stderr);
    let within = format!("pid {} (sleep) inside the session, descriptor", inside.id());
    let without = format!("pid {} (sleep) outside the session, descriptor", outside.id());
    for part in [&*within, &without, &format!("loop device {what}"), "is not proved read-only yet"]
    {
        assert!(said.contains(part), "no {part:?}: {said}");
    }
    inside.kill().unwrap();
    inside.wait().unwrap();
    host.until(&id, |v| has(v, "read-only"));
    host.must(&["preserved", "discard", &id, "--yes"]);
    host.stop();
}
