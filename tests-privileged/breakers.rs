//! What a hostile workload, or a careless root, does to an upper and to the agent's files: the right
//! answer or a clear refusal, and nothing outside touched.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use overfence::model::code::Code;
use overfence::model::view::ExportSession;
use overfence::upper::changes::{Changes, Format};
use overfence::upper::layer::{Captured, Source, Writers, capture};
use overfence::upper::store::LayerStore;
use overfence::upper::{Error, Result};
use rustix::fs::{CWD, RenameFlags, XattrFlags};

use crate::agent_process::{self, has, id_of, path_of};
use crate::host::{Place, Test, paced, paced_ttl};
use crate::rig::{self, ROOT};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "what_is_swapped_during_a_capture_leads_nowhere", run: swapped },
        Test { name: "a_hundred_thousand_files_in_a_directory_go_through", run: wide },
        Test { name: "what_a_workload_can_make_is_published_and_mounted_again", run: lawful },
        Test { name: "what_has_no_form_is_refused_by_path_and_code", run: refused },
        Test { name: "an_export_takes_no_place_that_is_taken", run: taken },
        Test { name: "an_export_ends_when_its_session_is_removed", run: ended },
        Test { name: "paths_far_beyond_path_max_go_through_every_verb", run: deep },
        Test { name: "directories_removed_under_the_agent_stop_nobody_else", run: no_session },
        Test { name: "what_was_moved_away_is_not_called_gone", run: moved_away },
        Test { name: "rubbish_in_the_trash_holds_up_no_start", run: rubbish },
        Test { name: "without_its_run_directory_the_agent_still_freezes", run: no_runtime },
        Test { name: "an_edited_session_record_is_not_believed", run: edited },
    ]
}

fn upper_of(dir: &Path, store: &LayerStore, writers: Writers) -> Result<Captured> {
    let fd = fs::File::open(dir).unwrap();
    let source = Source::Upper(std::os::fd::AsFd::as_fd(&fd), Format::Trusted);
    capture(source, writers, store, &|| false)
}

fn tar_of(store: &LayerStore, captured: &Captured) -> Vec<u8> {
    zstd::decode_all(fs::File::open(store.blob_path(captured.diff_id)).unwrap()).unwrap()
}

const SECRET: &[u8] = b"the secret that lies outside";

/// Files become symlinks, directories are moved out and replaced, all the time.
fn swapped(place: &Place) {
    let at = |name: &str| place.dir.join(name);
    for dir in ["upper/d/e", "outside/e", "out"] {
        fs::create_dir_all(at(dir)).unwrap();
    }
    for file in ["outside/file", "outside/e/file", "out/file", "out/zzz"] {
        fs::write(at(file), SECRET).unwrap();
    }
    for file in ["upper/file", "upper/d/file", "upper/d/e/file", "upper/zzz"] {
        fs::write(at(file), b"own").unwrap();
    }
    symlink(at("outside/file"), at("upper/link")).unwrap();
    symlink(at("outside"), at("upper/other")).unwrap();
    let store = LayerStore::open(&at("layers")).unwrap();
    let over = AtomicBool::new(false);
    let (mut whole, mut noticed) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let swap = |a: &str, b: &str| {
                let flags = RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(CWD, at(a), CWD, at(b), flags).unwrap();
            };
            while !over.load(Ordering::Relaxed) {
                swap("upper/file", "upper/link");
                swap("upper/d", "upper/other");
                swap("upper/d", "upper/other");
                // Moved away from under the walk: `..` leads to where the secret lies.
                fs::rename(at("upper/d/e"), at("out/e")).unwrap();
                fs::rename(at("out/e"), at("upper/d/e")).unwrap();
                swap("upper/file", "upper/link");
            }
        });
        let until = Instant::now() + Duration::from_secs(4);
        while Instant::now() < until {
            for writers in [Writers::Frozen, Writers::Running] {
                match upper_of(&at("upper"), &store, writers) {
                    Ok(captured) => {
                        whole += 1;
                        let tar = tar_of(&store, &captured);
                        let leaked = tar.windows(SECRET.len()).any(|w| w == SECRET);
                        assert!(!leaked, "bytes from outside are in a layer");
                    }
                    Err(Error::Changed { .. } | Error::Call { .. }) => noticed += 1,
                    Err(other) => panic!("{other}"),
                }
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    assert!(noticed > 0, "nothing was swapped in time ({whole} captures)");
    println!("{whole} captures, {noticed} refused");
}

fn wide(place: &Place) {
    let upper = place.dir.join("upper");
    fs::create_dir_all(upper.join("d")).unwrap();
    for n in 0..100_000 {
        fs::File::create(upper.join("d").join(format!("file-{n:06}"))).unwrap();
    }
    let store = LayerStore::open(&place.dir.join("layers")).unwrap();
    let begun = Instant::now();
    let captured = upper_of(&upper, &store, Writers::Running).unwrap();
    println!("captured in {:?}", begun.elapsed());
    assert_eq!(captured.entries, 100_002);
    let fd = fs::File::open(&upper).unwrap();
    let changes = Changes::new(std::os::fd::AsFd::as_fd(&fd), Format::Trusted).unwrap();
    assert_eq!(changes.inspect(|change| assert!(change.is_ok())).count(), 100_002);
    assert_eq!(overfence::upper::size::size(&upper).unwrap().1, 100_001);
    assert!(begun.elapsed() < paced(Duration::from_secs(60)), "{:?}", begun.elapsed());
}

/// Everything odd that a writer without privileges can leave in its workspace.
fn make_odd(top: &Path) {
    let at = |name: &str| top.join(name);
    for byte in (1..=255_u8).filter(|b| !b"/.".contains(b)) {
        fs::write(top.join(std::ffi::OsStr::from_bytes(&[byte])), [byte]).unwrap();
    }
    fs::write(at(".wh.gone"), "a file all the same").unwrap();
    fs::write(at(".wh..wh..opq"), "and another").unwrap();
    fs::create_dir(at(".wh.dir")).unwrap();
    fs::write(at(".wh.dir/inner"), "inner").unwrap();
    fs::hard_link(at(".wh.gone"), at("second name")).unwrap();
    for (name, value) in [("user.overlay.opaque", "y"), ("user.overlay.metacopy", "")] {
        rustix::fs::setxattr(at(".wh.dir"), name, value.as_bytes(), XattrFlags::empty()).unwrap();
    }
    let sparse = fs::File::create(at("sparse")).unwrap();
    sparse.set_len(1 << 40).unwrap();
    sparse.write_at(b"far", 9 << 30).unwrap();
    fs::write(at("tool"), "x").unwrap();
    fs::set_permissions(at("tool"), fs::Permissions::from_mode(0o6755)).unwrap();
    for (name, s, ns) in [("tool", -7, 5), ("second name", -1, 999_999_999)] {
        let time = rustix::fs::Timespec { tv_sec: s, tv_nsec: ns };
        let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
        let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::utimensat(CWD, at(name), &times, flags).unwrap();
    }
    let mode = rustix::fs::Mode::from_raw_mode(0o640);
    for (name, kind) in [
        ("fifo", rustix::fs::FileType::Fifo),
        // Made this way since its path is too long to bind.
        ("socket", rustix::fs::FileType::Socket),
    ] {
        rustix::fs::mknodat(CWD, at(name), kind, mode, 0).unwrap();
    }
}

/// What matters of each name; a socket has no form in a layer.
fn picture(top: &Path) -> BTreeMap<Vec<u8>, String> {
    let mut all = BTreeMap::new();
    let mut waiting = vec![top.to_owned()];
    while let Some(dir) = waiting.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let meta = path.symlink_metadata().unwrap();
            let content = match meta.len() {
                _ if !meta.is_file() => vec![],
                0..=100 => fs::read(&path).unwrap(),
                _ => {
                    let mut bytes = vec![0; 3];
                    let file = fs::File::open(&path).unwrap();
                    file.read_exact_at(&mut bytes, 9 << 30).unwrap();
                    bytes
                }
            };
            if meta.is_dir() {
                waiting.push(path.clone());
            }
            let mut names = vec![0; 4096];
            let len = rustix::fs::llistxattr(&path, &mut names[..]).unwrap();
            let links = if meta.is_dir() { 0 } else { meta.nlink() };
            let name = path.strip_prefix(top).unwrap().as_os_str().as_bytes().to_vec();
            let (s, ns) = (meta.mtime(), meta.mtime_nsec());
            let mut xattrs: Vec<_> =
                names[..len].split(|b| *b == 0).map(String::from_utf8_lossy).collect();
            xattrs.sort();
            let size = if meta.is_dir() { 0 } else { meta.len() };
            let said = format!("{:o} {size} {links} {s}.{ns} {content:?} {xattrs:?}", meta.mode());
            all.insert(name, said);
        }
    }
    all.remove(&b"socket"[..]);
    all
}

fn lawful(place: &Place) {
    rig::with_agent(place, |agent| async move {
        let open = |agent: overfence::agent::Agent| async move {
            agent.open(&ROOT, rig::wish("w", "ann", 60_000)).await.unwrap()
        };
        let first = open(agent.clone()).await;
        let id = first.session.id.parse().unwrap();
        make_odd(&rig::merged(&first));
        let want = picture(&rig::merged(&first));
        let begun = Instant::now();
        assert_eq!(
            agent.checkpoint(&ROOT, id, Default::default()).await.unwrap().outcome,
            "committed"
        );
        println!("checkpoint in {:?}", begun.elapsed());
        let wish = serde_json::from_value(serde_json::json!({ "mode": "checkpoint" })).unwrap();
        agent.close(&ROOT, id, wish).await.unwrap();

        let second = open(agent.clone()).await;
        let id = second.session.id.parse().unwrap();
        assert_eq!(picture(&rig::merged(&second)), want);
        // Deleted again, it is gone in the next session too, and the true deletion stays one.
        for name in [".wh.gone", "tool"] {
            fs::remove_file(rig::merged(&second).join(name)).unwrap();
        }
        fs::remove_dir_all(rig::merged(&second).join(".wh.dir")).unwrap();
        let want = picture(&rig::merged(&second));
        let wish = serde_json::from_value(serde_json::json!({ "mode": "checkpoint" })).unwrap();
        agent.close(&ROOT, id, wish).await.unwrap();
        let third = open(agent.clone()).await;
        assert_eq!(picture(&rig::merged(&third)), want);
        // An export carries them too, and says so.
        fs::write(rig::merged(&third).join(".wh.new"), "n").unwrap();
        let id = third.session.id.parse().unwrap();
        let fence = serde_json::from_value(serde_json::json!({ "wait_ms": 5000 })).unwrap();
        agent.fence(&ROOT, id, fence).await.unwrap();
        let made = agent.export(&ROOT, id, bundle()).await.unwrap();
        let path = made.path.path().unwrap();
        let bundle = overfence::upper::bundle::verify(&path, &|| false).unwrap();
        let listed = [".wh.new".to_owned(), ".overfence-escaped.wh.new".to_owned()];
        assert_eq!(bundle.provenance.escaped.first, [listed]);
    });
}

/// A mark of overlay's that only root can set.
fn refused(place: &Place) {
    rig::with_agent(place, |agent| async move {
        let opened = agent.open(&ROOT, rig::wish("w", "ann", 60_000)).await.unwrap();
        let id = opened.session.id.parse().unwrap();
        fs::write(rig::merged(&opened).join("odd"), "x").unwrap();
        let upper = opened.session.upper.path().unwrap().join("odd");
        rustix::fs::setxattr(&upper, "trusted.overlay.redirect", b"/etc", XattrFlags::empty())
            .unwrap();
        let failure = agent.checkpoint(&ROOT, id, Default::default()).await.unwrap_err();
        assert_eq!(failure.code, Code::UpperRefused, "{failure}");
        assert!(failure.message.contains("odd cannot go into a layer"), "{failure}");
        // An end that was to publish keeps the bytes instead, and says why at once.
        let wish = serde_json::from_value(serde_json::json!({ "mode": "checkpoint" })).unwrap();
        let failure = agent.close(&ROOT, id, wish).await.unwrap_err();
        assert_eq!(failure.code, Code::UpperRefused, "{failure}");
        assert!(failure.message.contains("is PRESERVED"), "{failure}");
        assert!(failure.message.contains("odd cannot go into a layer"), "{failure}");
        assert_eq!(fs::read(&upper).unwrap(), b"x");
        let failure = agent.export(&ROOT, id, bundle()).await.unwrap_err();
        assert_eq!(failure.code, Code::UpperRefused, "{failure}");
        assert_eq!(fs::read_dir(place_exports(&opened)).unwrap().count(), 0);
    });
}

/// An export to the usual place.
fn bundle() -> ExportSession {
    ExportSession { dest: None, dispose: false }
}

fn place_exports(opened: &overfence::model::view::Opened) -> std::path::PathBuf {
    let upper = opened.session.upper.path().unwrap();
    upper.ancestors().nth(3).unwrap().join("exports")
}

fn taken(place: &Place) {
    let mut host = agent_process::Host::new(place, "a");
    assert!(host.start(None), "{}", host.log());
    let opened = host.open("w", "60s");
    let id = id_of(&opened);
    fs::write(path_of(&opened["session"], "merged").join("f"), "bytes").unwrap();
    host.must(&["fence", &id, "--reason", "t", "--wait"]);
    let dest = place.dir.join("mine");
    fs::create_dir(&dest).unwrap();
    fs::write(dest.join("kept"), "k").unwrap();
    let dest = dest.to_str().unwrap();
    let out = host.run(&["preserved", "export", &id, "--dest", dest]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(4), "{said}");
    assert!(said.contains("destination_exists") && said.contains("mine"), "{said}");
    assert_eq!(fs::read_dir(dest).unwrap().count(), 1);
    // Where there is nothing yet it works, and whoever may read there can verify it.
    let free = format!("{dest}/bundle");
    host.must(&["preserved", "export", &id, "--dest", &free]);
    let mode = |path: &Path| path.metadata().unwrap().mode() & 0o777;
    assert_eq!(mode(Path::new(&free)), 0o755);
    let mut waiting = vec![Path::new(&free).to_owned()];
    while let Some(path) = waiting.pop() {
        assert_eq!(mode(&path), if path.is_dir() { 0o755 } else { 0o644 }, "{path:?}");
        if path.is_dir() {
            waiting.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        }
    }
    // An ordinary user, on a copy that is theirs to reach.
    let copy = tempfile::Builder::new().prefix("overfence-copy-").tempdir_in("/tmp").unwrap();
    fs::set_permissions(copy.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let status = std::process::Command::new("cp")
        .arg("-r")
        .args([Path::new(&free), &host.binary])
        .arg(copy.path())
        .status()
        .unwrap();
    assert!(status.success());
    for verb in ["inspect", "verify"] {
        let mut command = std::process::Command::new(copy.path().join("overfence"));
        command.args(["bundle", verb]).arg(copy.path().join("bundle"));
        std::os::unix::process::CommandExt::uid(&mut command, 1000);
        std::os::unix::process::CommandExt::gid(&mut command, 1000);
        let out = command.output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    }
    // Without a place of its own it is for root alone.
    let made = host.must(&["preserved", "export", &id]);
    assert_eq!(mode(&path_of(&made, "path")), 0o700);
    host.stop();
}

/// An export of much is under way when its session is given up.
fn ended(place: &Place) {
    rig::with_agent(place, |agent| async move {
        let opened = agent.open(&ROOT, rig::wish("w", "ann", 60_000)).await.unwrap();
        let id = opened.session.id.parse().unwrap();
        // Long to read, and next to nothing on the disk.
        let file = fs::File::create(rig::merged(&opened).join("much")).unwrap();
        file.set_len(1 << 40).unwrap();
        for n in 0..20_000_u64 {
            file.write_at(b"x", n << 25).unwrap();
        }
        drop(file);
        let fence = serde_json::from_value(serde_json::json!({ "wait_ms": 20000 })).unwrap();
        agent.fence(&ROOT, id, fence).await.unwrap();
        let exporting = agent.clone();
        let export = tokio::spawn(async move { exporting.export(&ROOT, id, bundle()).await });
        let exports = place_exports(&opened);
        let begun = Instant::now();
        while fs::read_dir(&exports).unwrap().count() == 0 {
            let late = begun.elapsed() > paced(Duration::from_secs(10));
            assert!(!late, "the export did not begin");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let begun = Instant::now();
        agent.discard(&ROOT, id).await.unwrap();
        let failure = export.await.unwrap().unwrap_err();
        println!("ended after {:?}", begun.elapsed());
        assert_eq!(failure.code, Code::Busy, "{failure}");
        assert_eq!(fs::read_dir(&exports).unwrap().count(), 0, "something is left");
    });
}

fn deep(place: &Place) {
    rig::with_agent(place, |agent| async move {
        let opened = agent.open(&ROOT, rig::wish("w", "ann", 60_000)).await.unwrap();
        let id = opened.session.id.parse().unwrap();
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY;
        let mode = rustix::fs::Mode::from_raw_mode(0o755);
        let mut fd = rustix::fs::open(rig::merged(&opened), flags, mode).unwrap();
        let name = "d".repeat(255);
        for _ in 0..300 {
            rustix::fs::mkdirat(&fd, &*name, mode).unwrap();
            fd = rustix::fs::openat(&fd, &*name, flags, mode).unwrap();
        }
        drop(fd);
        assert_eq!(
            agent.checkpoint(&ROOT, id, Default::default()).await.unwrap().outcome,
            "committed"
        );
        let upper = fs::File::open(opened.session.upper.path().unwrap()).unwrap();
        let changes = Changes::new(std::os::fd::AsFd::as_fd(&upper), Format::Trusted).unwrap();
        assert_eq!(changes.inspect(|change| assert!(change.is_ok())).count(), 301);
        // Read-only waits for whatever the whole file system has to write.
        let fence = serde_json::from_value(serde_json::json!({ "wait_ms": 60_000 })).unwrap();
        agent.fence(&ROOT, id, fence).await.unwrap();
        let exported = agent.export(&ROOT, id, bundle()).await.unwrap();
        overfence::upper::bundle::verify(&exported.path.path().unwrap(), &|| false).unwrap();
        agent.discard(&ROOT, id).await.unwrap();
        // The published tree is unpacked and mounted for the next one.
        let next = agent.open(&ROOT, rig::wish("w", "ann", 60_000)).await.unwrap();
        assert!(rig::merged(&next).join(&name).join(&name).is_dir());
    });
}

/// Root removes sessions' directories while the agent runs.
fn no_session(place: &Place) {
    let mut host = agent_process::Host::new(place, "a");
    assert!(host.start(None), "{}", host.log());
    let outside = place.dir.join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("precious"), "kept").unwrap();
    let (one, two, good) =
        (host.open("one", "60s"), host.open("two", "60s"), host.open("g", "60s"));
    let root = |opened: &serde_json::Value| {
        path_of(&opened["session"], "merged").parent().unwrap().to_owned()
    };
    // Its marker and upper are gone, and something else stands there.
    fs::remove_file(root(&one).join("marker")).unwrap();
    fs::rename(root(&one).join("upper"), outside.join("upper")).unwrap();
    symlink(&outside, root(&one).join("upper")).unwrap();
    // The whole directory is gone.
    nix::mount::umount2(&root(&two).join("merged"), nix::mount::MntFlags::MNT_DETACH).unwrap();
    fs::remove_dir_all(root(&two)).unwrap();
    for id in [id_of(&one), id_of(&two)] {
        host.run(&["fence", &id, "--reason", "t"]);
        let view = host.until(&id, |view| has(view, "frozen"));
        assert_ne!(view["state"], "ACTIVE");
        let out = host.run(&["preserved", "discard", &id, "--yes"]);
        println!("{}", String::from_utf8_lossy(&out.stderr));
    }
    assert_eq!(fs::read(outside.join("precious")).unwrap(), b"kept");
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 2);
    let view = host.must(&["session", "inspect", &id_of(&one)]);
    assert_ne!(view["state"], "CLOSED", "{view:#}");
    assert!(view["trouble"].is_string(), "{view:#}");
    assert_eq!(host.must(&["session", "inspect", &id_of(&good)])["state"], "ACTIVE");
    host.kill_agent();
    assert!(host.start(None), "{}", host.log());
    assert_eq!(host.must(&["session", "inspect", &id_of(&good)])["state"], "ACTIVE");
    host.stop();
}

/// The deadlines file, the sockets, everything of the boot is gone; no verb reaches the agent.
fn no_runtime(place: &Place) {
    let mut host = agent_process::Host::new(place, "a");
    assert!(host.start(None), "{}", host.log());
    let (short, long) = (host.open("short", &paced_ttl(3)), host.open("long", "60s"));
    let cgroup = |opened: &serde_json::Value| path_of(&opened["session"], "cgroup");
    let frozen = |opened: &serde_json::Value| {
        fs::read_to_string(cgroup(opened).join("cgroup.freeze")).unwrap().trim() == "1"
    };
    let run = host.dir.join("run");
    fs::remove_file(run.join("deadlines")).unwrap();
    fs::remove_file(run.join("overfence.sock")).unwrap();
    fs::remove_dir_all(run.join("sessions")).unwrap();
    assert_eq!(host.run(&["status"]).status.code(), Some(6));
    let begun = Instant::now();
    while !frozen(&short) {
        assert!(begun.elapsed() < paced(Duration::from_secs(6)), "not frozen: {}", host.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(!frozen(&long), "its lease is good");
    host.kill_agent();
    // The next agent knows no deadline any more: nothing that it cannot vouch for runs on.
    assert!(host.start(None), "{}", host.log());
    for opened in [&short, &long] {
        let view = host.until(&id_of(opened), |view| view["state"] == "PRESERVED");
        assert!(has(&view, "frozen"), "{view:#}");
        assert!(frozen(opened));
    }
    host.open("third", "10s");
    host.stop();
}

/// Somebody makes a fenced session ACTIVE in the database while no agent runs.
fn edited(place: &Place) {
    let mut host = agent_process::Host::new(place, "a");
    assert!(host.start(None), "{}", host.log());
    let (bad, good) = (host.open("bad", "60s"), host.open("good", "60s"));
    let cgroup = path_of(&bad["session"], "cgroup");
    host.must(&["fence", &id_of(&bad), "--reason", "t", "--wait"]);
    host.kill_agent();
    let db = rusqlite::Connection::open(host.dir.join("state/overfence.db")).unwrap();
    let changed = db
        .execute(
            "UPDATE sessions SET record = replace(record, '\"PRESERVED\"', '\"ACTIVE\"') \
             WHERE id = ?",
            [id_of(&bad)],
        )
        .unwrap();
    assert_eq!(changed, 1);
    drop(db);
    // Whoever edits it also thaws it.
    fs::write(cgroup.join("cgroup.freeze"), "0").unwrap();
    assert!(host.start(None), "{}", host.log());
    assert!(host.log().contains("is not believed"), "{}", host.log());
    assert_eq!(fs::read_to_string(cgroup.join("cgroup.freeze")).unwrap().trim(), "1");
    assert_eq!(host.must(&["session", "inspect", &id_of(&good)])["state"], "ACTIVE");
    let (code, _) = host.ask(&["preserved", "discard", &id_of(&bad), "--yes"]);
    assert_ne!(code, 0);
    let upper = path_of(&bad["session"], "upper");
    assert!(upper.is_dir(), "its bytes stay");
    host.stop();
}

fn moved_away(place: &Place) {
    let mut host = agent_process::Host::new(place, "h");
    assert!(host.start(None), "{}", host.log());
    let opened = host.open("w", "60s");
    let (id, merged) = (id_of(&opened), path_of(&opened["session"], "merged"));
    std::fs::write(merged.join("precious"), "precious").unwrap();
    let (dir, away) = (merged.parent().unwrap().to_owned(), host.dir.join("state/moved"));
    std::fs::rename(&dir, &away).unwrap();
    host.ask(&["fence", &id, "--wait=1s"]);
    host.ask(&["preserved", "discard", &id, "--yes"]);
    let view = host.until(&id, |view| view["trouble"].is_string() && view["state"] == "DELETING");
    assert!(view["trouble"].as_str().unwrap().contains("bring it back"), "{view:#}");
    assert!(!has(&view, "gone"), "its overlay is still mounted");
    assert_eq!(std::fs::read(away.join("merged/precious")).unwrap(), b"precious");
    std::fs::rename(&away, &dir).unwrap();
    let begun = Instant::now();
    while host.must(&["session", "list"]) != serde_json::json!([]) {
        assert!(begun.elapsed() < paced(Duration::from_secs(30)), "{}", host.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(!dir.exists());
}

fn rubbish(place: &Place) {
    let mut host = agent_process::Host::new(place, "h");
    assert!(host.start(None), "{}", host.log());
    let id = id_of(&host.open("w", "60s"));
    host.kill_agent();
    let strange = host.dir.join("state/trash/strange");
    std::fs::create_dir_all(&strange).unwrap();
    assert!(host.start(None), "{}", host.log());
    assert_eq!(host.must(&["session", "inspect", &id])["state"], "ACTIVE");
    let begun = Instant::now();
    while !host.log().contains("its name is no session id") {
        assert!(begun.elapsed() < paced(Duration::from_secs(15)), "{}", host.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(strange.exists(), "it may be somebody's");
}
