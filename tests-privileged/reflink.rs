//! Checkpoints where the upper's file system can clone files: the session stands only while its upper is
//! gathered. On disks of the test's own, with agents of their own.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use overfence::upper::changes::Format;
use overfence::upper::gather::gather;
use overfence::upper::layer::{Captured, Source, Writers, capture};
use overfence::upper::store::LayerStore;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use rustix::fs::{IFlags, XattrFlags};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::agent_process::{Host, has, id_of, path_of};
use crate::host::{Place, Test, paced, paced_ttl};

pub fn tests() -> Vec<Test> {
    vec![
        Test {
            name: "on_btrfs_the_session_runs_before_its_layer_is_made",
            run: |p| runs_on(p, "btrfs"),
        },
        Test {
            name: "on_xfs_the_session_runs_before_its_layer_is_made",
            run: |p| runs_on(p, "xfs"),
        },
        Test { name: "on_ext4_the_session_waits_for_its_layer", run: |p| runs_on(p, "ext4") },
        Test {
            name: "on_btrfs_any_tree_gives_the_layer_of_one_step",
            run: |p| same_layer(p, "btrfs"),
        },
        Test { name: "on_xfs_any_tree_gives_the_layer_of_one_step", run: |p| same_layer(p, "xfs") },
        Test { name: "on_btrfs_a_file_that_has_no_clone_is_read", run: one_without },
        Test { name: "where_nothing_can_be_cloned_nothing_is_gathered", run: refused },
        Test { name: "i8_killed_on_the_way_the_session_runs_and_nothing_is_left", run: killed },
        Test { name: "a_fault_on_the_way_is_told_and_the_session_runs", run: faults },
        Test { name: "i1_a_lease_lost_while_it_is_packed_publishes_nothing", run: lost },
    ]
}

fn must(command: &mut Command) {
    let out = command.output().unwrap();
    assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
}

/// Mounts a new file system; the loop device goes with the mount, that with the test's namespace.
pub fn disk(place: &Place, name: &str, make: &[&str], bytes: u64) -> PathBuf {
    let (image, at) = (place.dir.join(format!("{name}.image")), place.dir.join(name));
    File::create(&image).unwrap().set_len(bytes).unwrap();
    must(Command::new(make[0]).args(&make[1..]).arg(&image));
    std::fs::create_dir_all(&at).unwrap();
    must(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&at));
    at
}

/// How one is made.
pub fn make(kind: &str) -> &'static [&'static str] {
    match kind {
        "btrfs" => &["mkfs.btrfs", "-q", "-f"],
        "xfs" => &["mkfs.xfs", "-q", "-f"],
        _ => &["mkfs.ext4", "-q", "-F", "-b", "4096"],
    }
}

/// A host whose state lies on such a disk.
fn host_on(place: &Place, kind: &str, bytes: u64, failpoints: Option<&str>) -> Host {
    host_made(place, make(kind), bytes, failpoints)
}

/// The same, made by this command.
pub fn host_made(place: &Place, make: &[&str], bytes: u64, failpoints: Option<&str>) -> Host {
    let mut host = Host::new(place, "h");
    disk(place, "h/state", make, bytes);
    let text = std::fs::read_to_string(&host.config).unwrap();
    std::fs::write(&host.config, format!("reserve_mib = 8\n{text}")).unwrap();
    assert!(host.start(failpoints), "{}", host.log());
    host
}

/// A shell in the session's cgroup, at its merged directory.
fn writer(view: &Value, script: &str, go: &Path) -> Child {
    Command::new("/bin/sh")
        .arg("-c")
        .arg("echo $$ > \"$1\"/cgroup.procs && cd \"$2\" && go=$3 && eval \"$4\"")
        .arg("sh")
        .args([path_of(view, "cgroup"), path_of(view, "merged"), go.to_owned(), script.into()])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn wait(what: &str, mut fits: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !fits() {
        assert!(begun.elapsed() < paced(Duration::from_secs(30)), "in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn size(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |meta| meta.len())
}

fn runs(view: &Value) -> bool {
    let events = std::fs::read_to_string(path_of(view, "cgroup").join("cgroup.events")).unwrap();
    let wish = std::fs::read_to_string(path_of(view, "cgroup").join("cgroup.freeze")).unwrap();
    events.contains("frozen 0") && wish == "0\n"
}

/// Bytes that nobody can compress, in pieces of 1 MiB.
fn noise(mib: u64) -> impl Iterator<Item = Vec<u8>> {
    let mut x = 0x9e37_79b9_7f4a_7c15_u64;
    (0..mib).map(move |_| {
        let mut piece = Vec::with_capacity(1 << 20);
        while piece.len() < 1 << 20 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            piece.extend(x.to_le_bytes());
        }
        piece
    })
}

fn digest(path: &Path) -> Vec<u8> {
    let (mut file, mut hash, mut piece) =
        (File::open(path).unwrap(), Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut piece).unwrap() {
            0 => return hash.finalize().to_vec(),
            n => hash.update(&piece[..n]),
        }
    }
}

/// Names of what happened to a session, in order.
fn events(host: &Host, id: &str) -> Vec<String> {
    let all = host.must(&["evidence", "show", "--session", id]);
    let name = |e: &Value| e["detail"]["event"]["event"].as_str().map(str::to_owned);
    all.as_array().unwrap().iter().filter_map(name).collect()
}

/// What checkpoints leave beside layers.
fn left(host: &Host) -> Vec<String> {
    let all = std::fs::read_dir(host.dir.join("state/layers")).unwrap();
    let names = all.map(|e| e.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with('.')).collect()
}

const MIB: u64 = 512;
/// Appends as fast as it can; told to, it writes another thing over the file that is being published.
const REWRITES: &str = "while [ ! -e \"$go\" ]; do echo x >> log; done; echo y >> log; \
    dd if=/dev/zero of=big bs=1M count=512 conv=notrunc; while :; do echo y >> log; done";

fn runs_on(place: &Place, kind: &str) {
    let mut host = host_on(place, kind, 3 << 30, None);
    let opened = host.open("w", &paced_ttl(600));
    let (id, session) = (id_of(&opened), &opened["session"]);
    let (merged, upper) = (path_of(session, "merged"), path_of(session, "upper"));
    let mut hash = Sha256::new();
    let mut big = File::create(merged.join("big")).unwrap();
    for piece in noise(MIB) {
        hash.update(&piece);
        big.write_all(&piece).unwrap();
    }
    drop(big);
    let (before, log, go) = (hash.finalize().to_vec(), upper.join("log"), host.dir.join("go"));
    let mut child = writer(session, REWRITES, &go);
    wait("the writer writes", || size(&log) > 0);

    let (from, begun) = (size(&log), Instant::now());
    let mut asked = host.verb(&["session", "checkpoint", &id]);
    let mut asked = asked.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Told once it stands and is read: what it writes next, it writes right after the thaw.
    wait("the upper is read", || !left(&host).is_empty());
    let stood = begun.elapsed();
    File::create(&go).unwrap();
    let (mut head, mut rewritten, mut shown) = ([1; 4096], None, None);
    let answered = loop {
        if asked.try_wait().unwrap().is_some() {
            break begun.elapsed();
        }
        File::open(upper.join("big")).unwrap().read_exact_at(&mut head, 0).unwrap();
        if rewritten.is_none() && head == [0; 4096] {
            rewritten = Some(begun.elapsed());
        }
        if rewritten.is_some() && shown.is_none() {
            let progress = host.must(&["session", "inspect", &id])["progress"].clone();
            shown = Some(progress).filter(|progress| progress["what"] == "pack");
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let out = asked.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{said}\n{}", host.log());
    let done: Value = serde_json::from_slice(&out.stdout).unwrap();
    let frozen = Duration::from_millis(done["frozen_ms"].as_u64().unwrap());
    eprintln!(
        "{kind}: after {stood:?} frozen, for {frozen:?}; {rewritten:?} rewritten; {answered:?} answered"
    );
    assert_eq!(done["outcome"], "committed", "{done:#}");
    let happened = events(&host, &id);
    let place_of = |name: &str| happened.iter().position(|event| event == name);
    if kind == "ext4" {
        assert_eq!(place_of("gathered"), None, "{happened:?}");
        assert!(place_of("captured") < place_of("thawed"), "{happened:?}");
    } else {
        assert!(frozen * 2 < answered, "frozen for {frozen:?} of {answered:?}");
        assert!(rewritten.is_some(), "it did not run before the answer");
        let shown = shown.expect("how far it is was never shown");
        let total = shown["total_bytes"].as_u64().unwrap();
        assert!(total >= MIB << 20 && shown["bytes"].as_u64().unwrap() <= total, "{shown}");
        let order = ["frozen", "gathered", "thawed", "captured", "published"].map(place_of);
        assert!(order.is_sorted() && order[0].is_some(), "{happened:?}");
    }
    let last = || {
        let file = File::open(&log).unwrap();
        let (mut end, at) = ([0; 2], file.metadata().unwrap().len() - 2);
        file.read_exact_at(&mut end, at).map(|()| end)
    };
    wait("it runs", || last().is_ok_and(|end| end == *b"y\n"));
    let to = size(&log);
    assert_eq!(left(&host), Vec::<String>::new());
    host.must(&["session", "close", &id, "--discard", "--yes"]);
    child.wait().unwrap();

    // What was published is what there was when it stood still.
    let next = host.open("w", &paced_ttl(600));
    let merged = path_of(&next["session"], "merged");
    assert!(digest(&merged.join("big")) == before, "it is not the file that stood there");
    let log = std::fs::read(merged.join("log")).unwrap();
    assert!((from..to).contains(&(log.len() as u64)), "{from} {} {to}", log.len());
    assert!(log.chunks(2).all(|line| line == b"x\n"), "it has what was written after the freeze");
    host.must(&["session", "close", &id_of(&next), "--discard", "--yes"]);
    host.stop();
}

/// What a generated file is: kind, MiB before its end, bytes, time.
type Made = (u8, u64, Vec<u8>, i32);

fn plant(top: &Path, made: &[Made]) {
    for (n, (kind, mib, bytes, time)) in made.iter().enumerate() {
        let path = top.join(format!("d{}/f{n}", kind % 3));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let file = File::create(&path).unwrap();
        match kind {
            // Whole, with zeros in it, with holes in it, and all hole.
            0 => noise(*mib).for_each(|piece| (&file).write_all(&piece).unwrap()),
            1 => (0..*mib).for_each(|_| (&file).write_all(&[0; 1 << 20]).unwrap()),
            2 => file.write_all_at(bytes, mib << 20).unwrap(),
            3 => {
                file.write_all_at(&bytes.repeat(4000), 70_000).unwrap();
                file.set_len((mib << 20) + 12_345).unwrap();
            }
            4 => file.set_len(mib << 20).unwrap(),
            _ => noise(2).for_each(|piece| (&file).write_all(&piece).unwrap()),
        }
        file.write_all_at(bytes, file.metadata().unwrap().len()).unwrap();
        rustix::fs::fsetxattr(&file, "user.note", bytes, XattrFlags::empty()).unwrap();
        if n % 3 == 0 {
            std::fs::hard_link(&path, top.join(format!("link{n}"))).unwrap();
        }
        let at = std::time::UNIX_EPOCH + Duration::new(time.unsigned_abs().into(), 7);
        file.set_modified(at).unwrap();
    }
}

fn source(top: &File) -> Source<'_> {
    Source::Upper(top.as_fd(), Format::Trusted)
}

fn whole(top: &File, store: &LayerStore) -> Captured {
    capture(source(top), Writers::Running, store, &|| false).unwrap()
}

/// By clones of the kernel's own, from files that are on no disk yet.
fn same_layer(place: &Place, kind: &str) {
    let at = disk(place, "disk", make(kind), 1 << 30);
    let store = LayerStore::open(&at.join("layers")).unwrap();
    let bytes = prop::collection::vec(any::<u8>(), 1..60);
    let made = prop::collection::vec((0..6_u8, 0..4_u64, bytes, any::<i32>()), 0..6);
    let mut runner =
        TestRunner::new(Config { cases: 24, failure_persistence: None, ..Config::default() });
    let n = std::cell::Cell::new(0);
    runner
        .run(&made, |made| {
            n.set(n.get() + 1);
            let top = at.join(format!("upper{}", n.get()));
            std::fs::create_dir(&top).unwrap();
            plant(&top, &made);
            let fd = File::open(&top).unwrap();
            let gathered = gather(source(&fd), Writers::Frozen, &store, &|| false).unwrap();
            let gathered = gathered.expect("it can be cloned");
            let first = whole(&fd, &store);
            // Nothing that is done to the upper now reaches the layer.
            std::fs::remove_dir_all(&top).unwrap();
            let packed = gathered.pack(&store, &|| false).unwrap();
            prop_assert_eq!(Captured { took: first.took, ..packed }, first);
            Ok(())
        })
        .unwrap();
    // A clone has the blocks of its file: with the noise of one, most would have to be written again.
    std::fs::create_dir(at.join("upper")).unwrap();
    plant(&at.join("upper"), &[(0, 64, vec![1], 1)]);
    let fd = File::open(at.join("upper")).unwrap();
    rustix::fs::syncfs(&fd).unwrap();
    let free = || {
        rustix::fs::syncfs(&fd).unwrap();
        rustix::fs::statvfs(&at).unwrap().f_bfree
    };
    let before = free();
    let gathered = gather(source(&fd), Writers::Frozen, &store, &|| false).unwrap().unwrap();
    let used = (before - free()) * rustix::fs::statvfs(&at).unwrap().f_frsize;
    eprintln!("{used} bytes more are used for a clone of 64 MiB");
    assert!(used < 16 << 20, "{used} bytes were written for a clone of 64 MiB");
    drop(gathered);
    let layers = std::fs::read_dir(at.join("layers")).unwrap();
    assert!(layers.map(|e| e.unwrap()).all(|e| !e.file_name().to_str().unwrap().starts_with('.')));
}

/// One that is never copied on write has no clone beside files that are.
fn one_without(place: &Place) {
    let at = disk(place, "disk", make("btrfs"), 1 << 30);
    let store = LayerStore::open(&at.join("layers")).unwrap();
    let top = at.join("upper");
    std::fs::create_dir(&top).unwrap();
    let own = File::create(top.join("own")).unwrap();
    rustix::fs::ioctl_setflags(&own, IFlags::NOCOW).unwrap();
    for piece in noise(3) {
        (&own).write_all(&piece).unwrap();
    }
    plant(&top, &[(0, 3, vec![1], 1)]);
    let to = File::create(at.join("clone")).unwrap();
    let refused = rustix::fs::ioctl_ficlone(&to, File::open(top.join("own")).unwrap());
    assert_eq!(refused, Err(rustix::io::Errno::INVAL), "nothing was shown");
    let fd = File::open(&top).unwrap();
    let gathered = gather(source(&fd), Writers::Frozen, &store, &|| false).unwrap();
    let gathered = gathered.expect("the others can be cloned");
    let first = whole(&fd, &store);
    let packed = gathered.pack(&store, &|| false).unwrap();
    assert_eq!(Captured { took: first.took, ..packed }, first);
}

/// Where a clone is refused, it is known before anything is done.
fn refused(place: &Place) {
    let tmpfs = place.dir.join("tmpfs");
    std::fs::create_dir(&tmpfs).unwrap();
    must(Command::new("mount").args(["-t", "tmpfs", "tmpfs"]).arg(&tmpfs));
    let without = ["mkfs.xfs", "-q", "-f", "-m", "reflink=0"];
    let (ext4, old) =
        (disk(place, "ext4", make("ext4"), 64 << 20), disk(place, "old", &without, 1 << 30));
    let xfs = disk(place, "xfs", make("xfs"), 1 << 30);
    for at in [&tmpfs, &ext4, &old, &xfs] {
        std::fs::create_dir(at.join("upper")).unwrap();
        std::fs::write(at.join("upper/f"), vec![7; 2 << 20]).unwrap();
    }
    for (upper, layers, works) in [
        (&tmpfs, &tmpfs, false),
        (&ext4, &ext4, false),
        (&old, &old, false),
        (&xfs, &ext4, false),
        (&ext4, &xfs, false),
        (&xfs, &xfs, true),
    ] {
        let store = LayerStore::open(&layers.join("layers")).unwrap();
        let fd = File::open(upper.join("upper")).unwrap();
        let gathered = gather(source(&fd), Writers::Frozen, &store, &|| false).unwrap();
        assert_eq!(gathered.is_some(), works, "{} {}", upper.display(), layers.display());
        drop(gathered);
        assert_eq!(std::fs::read_dir(layers.join("layers")).unwrap().count(), 0);
        assert_eq!(std::fs::read_dir(upper.join("upper")).unwrap().count(), 1);
    }
}

const SMALL: u64 = 1 << 30;
const APPENDS: &str = "while :; do echo x >> log; sleep 0.01; done";

/// A session with a large file, a small one and a writer.
fn furnished(host: &Host, workspace: &str) -> (String, Value, Child) {
    let opened = host.open(workspace, &paced_ttl(120));
    let (id, session) = (id_of(&opened), opened["session"].clone());
    let mut big = File::create(path_of(&session, "merged").join("big")).unwrap();
    noise(4).for_each(|piece| big.write_all(&piece).unwrap());
    let child = writer(&session, APPENDS, Path::new("/"));
    let log = path_of(&session, "upper").join("log");
    wait("the writer writes", || size(&log) > 0);
    (id, session, child)
}

fn goes_on(host: &Host, session: &Value) {
    let log = path_of(session, "upper").join("log");
    wait("it runs", || runs(session));
    let from = size(&log);
    wait("it writes", || size(&log) > from);
    wait("nothing is left", || left(host).is_empty());
}

/// A checkpoint works, and what it publishes is what there is.
fn publishes(host: &Host, id: &str, session: &Value, version: u64) {
    let done = host.must(&["session", "checkpoint", id]);
    assert_eq!((&done["outcome"], &done["at"]["version"]), (&"committed".into(), &version.into()));
    let layer = done["layer"].as_str().unwrap().parse().unwrap();
    let store = LayerStore::open(&host.dir.join("state/layers")).unwrap();
    let tree = store.ensure_tree(layer, &|| false).unwrap();
    assert!(digest(&tree.join("big")) == digest(&path_of(session, "upper").join("big")));
}

fn killed(place: &Place) {
    let mut host = host_on(place, "xfs", SMALL, None);
    let points = [
        "upper.gather.before",
        "upper.clone.before",
        "upper.clone.after",
        "upper.gather.after",
        "effect.capture.after",
        "effect.thaw.before",
        "effect.thaw.after",
        "effect.pack.before",
        "upper.layer.before",
        "upper.layer.rename.before",
        "upper.layer.rename.after",
        "upper.layer.after",
        "effect.pack.after",
    ];
    for (n, point) in points.into_iter().enumerate() {
        host.kill_agent();
        assert!(host.start(Some(&format!("die={point}"))), "{}", host.log());
        let (id, session, mut child) = furnished(&host, &format!("w{n}"));
        let (code, _) = host.ask(&["session", "checkpoint", &id]);
        assert_ne!(code, 0, "{point} was not passed");
        wait(point, || host.dead());
        assert!(host.start(None), "{}", host.log());
        let view = host.until(&id, |view| view["work"].is_null());
        assert_eq!((&view["state"], &view["generation"]), (&"ACTIVE".into(), &1.into()), "{point}");
        goes_on(&host, &session);
        let status = host.must(&["workspace", "status", &format!("w{n}")]);
        assert_eq!(status["version"], 0, "{point}: {status:#}");
        publishes(&host, &id, &session, 1);
        host.must(&["session", "close", &id, "--discard", "--yes"]);
        child.wait().unwrap();
    }
    assert_eq!(host.must(&["evidence", "verify"])["ok"], true);
    host.stop();
}

fn faults(place: &Place) {
    let fault = place.dir.join("fault");
    let mut host = host_on(place, "xfs", SMALL, Some(&format!("fail={}", fault.display())));
    let (id, session, mut child) = furnished(&host, "w");
    let points = [
        "upper.gather.before",
        "effect.capture.before",
        "effect.pack.before",
        "upper.layer.before",
    ];
    for point in points {
        std::fs::write(&fault, format!("{point} {}", libc::EIO)).unwrap();
        let out = host.run(&["session", "checkpoint", &id]);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && said.contains("os error 5"), "{point}: {said}");
        goes_on(&host, &session);
        assert_eq!(host.must(&["session", "inspect", &id])["work"], Value::Null);
    }
    // One file that cannot be cloned is read.
    std::fs::write(&fault, format!("upper.clone.before {}", libc::EIO)).unwrap();
    publishes(&host, &id, &session, 1);
    std::fs::remove_file(&fault).unwrap();
    goes_on(&host, &session);
    publishes(&host, &id, &session, 2);
    host.must(&["session", "close", &id, "--discard", "--yes"]);
    child.wait().unwrap();
    host.stop();
}

fn lost(place: &Place) {
    let mut host = host_on(place, "xfs", SMALL, Some("stall=effect.pack.before"));
    let (id, session, mut child) = furnished(&host, "w");
    let mut asked = host.verb(&["session", "checkpoint", &id]);
    let asked = asked.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // While it is made it is beaten for, shown, and asked for in vain.
    let view = host.until(&id, |view| view["work"]["stage"] == "packing");
    assert!(runs(&session), "{view:#}");
    let again = host.run(&["session", "checkpoint", &id]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("busy"), "{again:?}");
    let fenced = host.must(&["fence", &id, "--reason", "test", "--wait"]);
    assert!(
        has(&fenced["session"], "frozen") && has(&fenced["session"], "read-only"),
        "{fenced:#}"
    );
    let out = asked.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains("lease_lost"), "{said}");
    wait("nothing is left", || left(&host).is_empty());
    std::thread::sleep(overfence::failpoint::STALL);
    let happened = events(&host, &id);
    assert!(!happened.iter().any(|e| e == "captured" || e == "published"), "{happened:?}");
    assert_eq!(host.must(&["workspace", "status", "w"])["version"], 0);
    let layers = std::fs::read_dir(host.dir.join("state/layers")).unwrap();
    assert_eq!(layers.count(), 0, "a layer that nothing names");
    host.must(&["preserved", "discard", &id, "--yes"]);
    child.wait().unwrap();
    host.stop();
}
