//! Trees that are deep, hostile, or have many files.

use overfence::progress::Progress;

use super::*;

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test { name: "a_hostile_tree_is_sealed_and_nothing_outside_it", run: hostile },
        Test { name: "ten_thousand_files_are_sealed_and_shown", run: many },
    ]
}

/// Deeper than there are descriptors, with names and links that lead elsewhere.
fn hostile(place: &Place) {
    use overfence::kernel::seal;
    let (root, outside) = (place.dir.join("s"), place.dir.join("outside"));
    let upper = root.join("upper");
    std::fs::create_dir_all(&upper).unwrap();
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("precious"), "x").unwrap();
    std::os::unix::fs::symlink(&outside, upper.join("dir")).unwrap();
    std::os::unix::fs::symlink("../../outside/precious", upper.join("file")).unwrap();
    std::fs::write(upper.join("a\nb"), "x").unwrap();
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY;
    let mut here = rustix::fs::open(&upper, flags, rustix::fs::Mode::empty()).unwrap();
    let levels = 3000;
    for _ in 0..levels {
        rustix::fs::mkdirat(&here, "deep", rustix::fs::Mode::RWXU).unwrap();
        here = rustix::fs::openat(&here, "deep", flags, rustix::fs::Mode::empty()).unwrap();
    }
    let limit = nix::sys::resource::Resource::RLIMIT_NOFILE;
    nix::sys::resource::setrlimit(limit, 256, 256).unwrap();

    let at = seal::Place::of(&root, &upper);
    let _end = Unsealed(&at);
    let (progress, never) = (Progress::default(), || false);
    // A mount in it is another file system's business: refused by name, and taken up again.
    // Of several names some are met before the deep one and some after it, where its path is whole again.
    for n in 0..4 {
        let mount = upper.join(format!("mount{n}"));
        std::fs::create_dir(&mount).unwrap();
        must(Command::new("mount").args(["-t", "tmpfs", "tmpfs"]).arg(&mount));
        let refused = seal::seal(&at, &progress, &never).unwrap_err();
        assert!(refused.to_string().contains(&format!("upper/mount{n}")), "{refused}");
        must(Command::new("umount").arg(&mount));
        std::fs::remove_dir(&mount).unwrap();
    }

    let progress = Progress::default();
    let proof = seal::seal(&at, &progress, &never).unwrap().unwrap();
    eprintln!("{}; {} us", proof.answer, proof.took_us);
    assert!(proof.answer.contains(&format!("set on {},", levels + 2)), "{}", proof.answer);
    assert!(immutable(&here), "the deepest one");
    assert!(!immutable(File::open(outside.join("precious")).unwrap()));
    assert!(!immutable(File::open(&outside).unwrap()));
    // Stopped at once it has changed nothing, and says that it is not done.
    assert_eq!(seal::unseal(&at, &Progress::default(), &|| true).unwrap(), None);
    assert!(immutable(&here));
    let cleared = seal::unseal(&at, &Progress::default(), &never).unwrap();
    assert_eq!(cleared, Some(levels + 2));
    assert!(!immutable(&here) && !immutable(File::open(&upper).unwrap()));
    seal::end(&at).unwrap();
    assert_eq!(seal::unseal(&at, &Progress::default(), &never).unwrap(), Some(0));
    drop(here);
    must(Command::new("rm").arg("-rf").arg(&upper));
}

fn many(place: &Place) {
    let mut host = ext4_host(place);
    let opened = host.open("w", "10m");
    let (id, session) = (id_of(&opened), &opened["session"]);
    let (upper, merged) = (path_of(session, "upper"), path_of(session, "merged"));
    for dir in 0..100 {
        std::fs::create_dir(merged.join(dir.to_string())).unwrap();
        for n in 0..100 {
            std::fs::write(merged.join(format!("{dir}/{n}")), "freshly written").unwrap();
        }
    }
    let mut writer = holder(session);
    host.must(&["fence", &id, "--reason", "test", "--to", "frozen", "--wait"]);
    host.must(&["fence", &id, "--reason", "test", "--to", "sealed"]);
    let mut seen = Vec::new();
    wait("it is sealed", || {
        let text = host.http("GET", &format!("/v1/sessions/{id}"), "").body;
        let view: Value = serde_json::from_str(&text).unwrap();
        if view["sealing"].is_object() {
            let n = |field: &str| view["sealing"][field].as_u64().unwrap();
            seen.push((n("done"), n("total")));
        }
        has(&view, "sealed")
    });
    assert!(seen.iter().any(|(done, total)| *total == 10_102 && done < total), "{seen:?}");
    let view = host.must(&["session", "inspect", &id]);
    assert!(view["sealing"].is_null());
    let proof = proof_of(&view, "sealed");
    eprintln!("sealed: {}; {} us; seen {seen:?}", proof["answer"], proof["took_us"]);
    assert_eq!(flagged(&upper).1, Vec::<PathBuf>::new());
    let begun = Instant::now();
    let (code, view) = readmit(&host, &id);
    assert_eq!((code, &view["state"]), (0, &Value::from("ACTIVE")), "{view:#}\n{}", host.log());
    eprintln!("readmitted in {:?}", begun.elapsed());
    let entries = host.must(&["evidence", "show", "--session", &id]);
    let event = |e: &Value| e["detail"]["event"].clone();
    let mut events = entries.as_array().unwrap().iter().map(event);
    let unsealed = events.find(|e| e["event"] == "unsealed").unwrap();
    eprintln!("{}; {} us", unsealed["proof"]["answer"], unsealed["proof"]["took_us"]);
    assert_eq!(flagged(&upper).0, Vec::<PathBuf>::new());
    host.must(&["session", "close", &id, "--discard", "--yes"]);
    writer.wait().unwrap();
    host.stop();
}

/// Takes the seal off whatever happens: chattr does not get as deep.
struct Unsealed<'a>(&'a overfence::kernel::seal::Place);

impl Drop for Unsealed<'_> {
    fn drop(&mut self) {
        use overfence::kernel::seal;
        let _ = seal::unseal(self.0, &Progress::default(), &|| false);
    }
}
