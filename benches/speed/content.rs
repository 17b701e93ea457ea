//! Content: what a commit costs beside a bare transaction, and captures, exports and removals beside
//! the tools that people use for that, on the same trees in the same run.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use overfence::authority::{Authority as _, NewWorkspace, SqliteAuthority, no_rider};
use overfence::kernel::clock;
use overfence::model::head::Digest;
use overfence::model::ids::{HostId, LeaseId, PublicationKey, SessionId};
use overfence::model::lease::HolderKind;
use overfence::model::time::BootInstant;
use overfence::model::view::{Checkpointed, Exported, Fenced, SessionView};
use overfence::model::workspace::{Acquire, Publish};
use overfence::store::{Paths, Store};
use serde_json::json;

use crate::figures::{Samples, heading, ratio, text};
use crate::host::Place;
use crate::rig::Rig;
use crate::trace::Trace;

const LONG: Duration = Duration::from_secs(24 * 3600);
const COMMITS: usize = 200;
const SMALL: usize = 100_000;
const LARGE: u64 = 4 << 30;
const MANY: usize = 1_000_000;
const BESIDE: usize = 300_000;
const A_DIRECTORY: usize = 1_000;

pub fn run(place: &Place) {
    commit(&place.dir.join("commit"));
    let rig = Rig::named(place, "h");
    fsyncs(&rig, place);
    heading(&format!("{SMALL} files of 1 KiB"));
    for n in 0..3 {
        carried(&rig, place, &format!("small-{n}"), |top| files(top, SMALL, 1024));
    }
    heading("one file of 4 GiB");
    for n in 0..2 {
        carried(&rig, place, &format!("large-{n}"), large);
    }
    removed(&rig, place);
}

/// A conditional commit, and a bare transaction of one row in a database as durable.
fn commit(dir: &Path) {
    heading("a conditional commit");
    fs::create_dir(dir).unwrap();
    let boot = clock::boot_id().unwrap();
    let now: overfence::store::Clock =
        std::sync::Arc::new(move || BootInstant { boot, ns: clock::now() });
    let store = std::sync::Arc::new(Store::open(&Paths::under(&dir.join("store")), now).unwrap());
    let authority = SqliteAuthority::new(store);
    let id: overfence::model::ids::WorkspaceId = "w".parse().unwrap();
    let new = NewWorkspace {
        id: id.clone(),
        owner: "ann".parse().unwrap(),
        contact: String::new(),
        labels: BTreeMap::new(),
        layers: vec![],
    };
    authority.create(&new, no_rider()).unwrap().unwrap();
    let wish = Acquire {
        workspace: id.clone(),
        lease: LeaseId::fresh(),
        owner: "ann".parse().unwrap(),
        host: HostId::from_u128(1),
        session: SessionId::fresh(),
        holder: HolderKind::Beat,
        ttl: LONG,
        max_lifetime: LONG,
        force: None,
        only_at: None,
        seen: Default::default(),
    };
    let acquired = authority.acquire(&wish, no_rider()).unwrap().unwrap();
    let bare = rusqlite::Connection::open(dir.join("bare.db")).unwrap();
    bare.pragma_update(None, "journal_mode", "WAL").unwrap();
    bare.pragma_update(None, "synchronous", "FULL").unwrap();
    bare.execute_batch(
        "CREATE TABLE t (k INTEGER PRIMARY KEY, v BLOB);
         CREATE TABLE workspaces (id TEXT PRIMARY KEY, record TEXT, mac BLOB);
         CREATE TABLE publications (workspace TEXT, key TEXT, record TEXT, mac BLOB, PRIMARY KEY (workspace, key));
         CREATE TABLE history (seq INTEGER PRIMARY KEY, workspace TEXT, record TEXT, mac BLOB);
         INSERT INTO workspaces VALUES ('w', '', '')",
    )
    .unwrap();
    let (mut at, mut ours, mut theirs, mut rows) = (acquired.at, vec![], vec![], vec![]);
    for n in 0..COMMITS {
        let wish = Publish {
            workspace: id.clone(),
            lease: acquired.lease.id,
            generation: acquired.lease.generation,
            session: acquired.lease.session,
            expected: at,
            key: PublicationKey::fresh(),
            // The same few, as a session replaces its own.
            layer: Digest([u8::try_from(n % 200).unwrap(); 32]),
            whole: None,
            reverts_to: None,
        };
        let begun = Instant::now();
        at = authority.publish(&wish, no_rider()).unwrap().unwrap();
        ours.push(begun.elapsed());
        let begun = Instant::now();
        bare.execute("INSERT INTO t (v) VALUES (zeroblob(1000))", []).unwrap();
        theirs.push(begun.elapsed());
        let begun = Instant::now();
        let all = bare.unchecked_transaction().unwrap();
        for statement in [
            "SELECT record, mac FROM workspaces WHERE id = 'w' OR ?1 = ''",
            "SELECT record, mac FROM publications WHERE workspace = 'w' AND key = ?1",
        ] {
            let mut asked = all.prepare_cached(statement).unwrap();
            let mut found = asked.query([wish.key.to_string()]).unwrap();
            while found.next().unwrap().is_some() {}
        }
        for statement in [
            "UPDATE workspaces SET record = hex(zeroblob(350)), mac = zeroblob(32) WHERE id <> ?1",
            "INSERT INTO publications VALUES ('w', ?1, hex(zeroblob(200)), zeroblob(32))",
            "INSERT INTO history VALUES (NULL, ?1, hex(zeroblob(200)), zeroblob(32))",
        ] {
            all.prepare_cached(statement).unwrap().execute([wish.key.to_string()]).unwrap();
        }
        all.commit().unwrap();
        rows.push(begun.elapsed());
    }
    let (ours, theirs, rows) = (Samples::new(ours), Samples::new(theirs), Samples::new(rows));
    ours.line("a publication at the authority");
    theirs.line("bare: one row of 1,000 bytes, as durable");
    rows.line("bare: its two questions and three rows, as durable");
    let (one, three) = (ratio(ours.p(50), theirs.p(50)), ratio(ours.p(50), rows.p(50)));
    println!("  {one:.2} x the median of one row, {three:.2} x that of the same rows");
}

fn files(top: &Path, count: usize, size: usize) {
    let bytes: Vec<u8> = (0..size).map(|i| (i * 31 % 251) as u8).collect();
    for n in 0..count {
        let dir = top.join(format!("d{}", n / A_DIRECTORY));
        if n % A_DIRECTORY == 0 {
            fs::create_dir(&dir).unwrap();
        }
        let mut file = File::create(dir.join(format!("f{n}"))).unwrap();
        if size > 0 {
            file.write_all(&bytes).unwrap();
            // No two of them are the same.
            file.write_all_at(&n.to_ne_bytes(), 0).unwrap();
        }
    }
}

/// Counts what a checkpoint and its publication sync, and what of that is their layer's.
fn fsyncs(rig: &Rig, place: &Place) {
    let Some(trace) = Trace::of(rig.host.agent_pid(), place) else {
        println!(
            "  fsyncs of a publication: NOT counted, strace is missing (apt-get install strace)"
        );
        return;
    };
    let opened = rig.open("synced", LONG, None);
    let (id, merged) = (&opened.session.id, opened.session.merged.path().unwrap());
    let (mut counts, mut last) = (Vec::new(), Vec::new());
    for n in 0..10u64 {
        fs::write(merged.join("file"), n.to_ne_bytes()).unwrap();
        let before = trace.calls().len();
        let _: Checkpointed = rig.post(id, "checkpoint", &json!({}));
        // What would come late belongs to it, too.
        std::thread::sleep(Duration::from_millis(100));
        let mut seen = trace.calls().split_off(before);
        let all = seen.len();
        seen.retain(|call| !call.file.components().any(|part| part.as_os_str() == "layers"));
        counts.push((seen.len(), all - seen.len()));
        last = seen.iter().map(ToString::to_string).collect();
    }
    println!("  fsyncs of a publication (target <= 4) and of its layer: {counts:?}");
    println!("  those of the last without its layer: {}", last.join(", "));
    let _: SessionView = rig.post(id, "close", &json!({}));
}

/// Half of each MiB is random, the other half is easy.
fn large(top: &Path) {
    let mut block = vec![0; 1 << 20];
    rustix::rand::getrandom(&mut block[..1 << 19], rustix::rand::GetRandomFlags::empty()).unwrap();
    let mut file = File::create(top.join("large")).unwrap();
    for _ in 0..LARGE >> 20 {
        // No two of them are the same, or a window of 2 MiB would find them.
        let mut seed = u64::from_ne_bytes(block[..8].try_into().unwrap()) | 1;
        for word in block[..1 << 19].chunks_exact_mut(8) {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            word.copy_from_slice(&seed.to_ne_bytes());
        }
        file.write_all(&block).unwrap();
    }
}

/// The most memory that the agent had since it was last asked, bytes.
fn peak(rig: &Rig) -> u64 {
    let (pid, key) = (rig.host.agent_pid(), "VmHWM:");
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(key)).unwrap();
    // Its next peak counts from here.
    fs::write(format!("/proc/{pid}/clear_refs"), "5").unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

fn timed<T>(what: impl FnOnce() -> T) -> (T, Duration) {
    let begun = Instant::now();
    let answer = what();
    (answer, begun.elapsed())
}

/// What is usual: an archive of the tree, compressed by all processors, on the disk.
fn tar(upper: &Path, to: &Path) -> Duration {
    let script = "tar -C \"$1\" -cf - . | zstd -q -T0 -o \"$2\" && sync \"$2\"";
    let (done, took) =
        timed(|| Command::new("sh").args(["-c", script, "sh"]).args([upper, to]).status());
    assert!(done.unwrap().success(), "tar and zstd are needed");
    fs::remove_file(to).unwrap();
    took
}

/// A tree that is published, and exported once its session is fenced.
fn carried(rig: &Rig, place: &Place, name: &str, make: impl FnOnce(&Path)) {
    let opened = rig.open(name, LONG, None);
    let id = &opened.session.id;
    make(&opened.session.merged.path().unwrap());
    let upper = opened.session.upper.path().unwrap();
    rustix::fs::sync();
    // Whoever reads it first fills the cache for the others.
    let archive = place.dir.join("archive.tar.zst");
    tar(&upper, &archive);
    peak(rig);
    let (done, capture) = timed(|| rig.post::<Checkpointed>(id, "checkpoint", &json!({})));
    let frozen = Duration::from_millis(done.frozen_ms);
    let memory = peak(rig) >> 20;
    let usual = tar(&upper, &archive);
    println!(
        "  checkpoint {}, {:.2} x `tar | zstd -T0` ({}); frozen {}; the agent had {memory} MiB",
        text(capture),
        ratio(capture, usual),
        text(usual),
        text(frozen)
    );
    let _: Fenced =
        rig.post(id, "fence", &json!({ "to": "read-only", "wait_ms": 60_000, "reason": "bench" }));
    let (made, export) = timed(|| rig.post::<Exported>(id, "export", &json!({})));
    let memory = peak(rig) >> 20;
    let usual = tar(&upper, &archive);
    println!(
        "  export, read back and verified, {}, {:.2} x `tar | zstd -T0` ({}); the agent had {memory} MiB",
        text(export),
        ratio(export, usual),
        text(usual)
    );
    fs::remove_dir_all(made.path.path().unwrap()).unwrap();
    let _: SessionView = rig.post(id, "discard", &json!({}));
    wait_gone(rig, id);
}

fn wait_gone(rig: &Rig, id: &str) {
    // A closed session is soon unknown.
    let place = overfence::api::client::path(&["sessions", id]);
    while rig.client.get::<SessionView>(&place).is_ok_and(|view| view.state != "CLOSED") {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Two trees alike, one in a session's upper: removed one after the other with nothing beside, then two
/// more beside a session that writes.
fn removed(rig: &Rig, place: &Place) {
    heading(&format!("removal of {MANY} empty files"));
    let mut memory = 0;
    let mut discard = |id: &str| {
        peak(rig);
        let (_, took) = timed(|| {
            let _: SessionView = rig.post(id, "discard", &json!({}));
            wait_gone(rig, id);
        });
        memory = peak(rig) >> 20;
        took
    };
    let usual = |plain: &Path| {
        let (done, took) = timed(|| Command::new("rm").arg("-rf").arg(plain).status());
        assert!(done.unwrap().success());
        took
    };
    let (id, plain) = alike(rig, place, "many", MANY);
    let took = discard(&id);
    rustix::fs::sync();
    let rm = usual(&plain);
    let over = ratio(took, rm);
    println!("  discard to CLOSED {}, {over:.2} x `rm -rf` ({})", text(took), text(rm));

    heading(&format!("the same of {BESIDE}, and 4 KiB written and synced in another session"));
    let (id, plain) = alike(rig, place, "some", BESIDE);
    let beside = rig.open("beside", LONG, None).session.merged.path().unwrap();
    let alone = disk_of(&beside, || std::thread::sleep(Duration::from_secs(5)));
    alone.line("nothing removed meanwhile");
    let during = |what: &str, work: &mut dyn FnMut() -> Duration| {
        rustix::fs::sync();
        let mut took = Duration::ZERO;
        let samples = disk_of(&beside, || took = work());
        samples.line(&format!("{what}, {}", text(took)));
        println!("  {:.2} x the median alone", ratio(samples.p(50), alone.p(50)));
    };
    during("during a discard", &mut || discard(&id));
    during("during `rm -rf`", &mut || usual(&plain));
    println!("  the agent had {memory} MiB");
}

/// `count` empty files in the upper of a session that was killed, and in a directory.
fn alike(rig: &Rig, place: &Place, name: &str, count: usize) -> (String, PathBuf) {
    let opened = rig.open(name, LONG, None);
    let id = opened.session.id;
    let plain = place.dir.join(format!("plain-{name}"));
    fs::create_dir(&plain).unwrap();
    files(&opened.session.merged.path().unwrap(), count, 0);
    files(&plain, count, 0);
    let _: Fenced =
        rig.post(&id, "fence", &json!({ "to": "killed", "wait_ms": 60_000, "reason": "bench" }));
    rustix::fs::sync();
    (id, plain)
}

/// Writes that a running session waits for, for as long as something else goes on.
fn disk_of(merged: &Path, meanwhile: impl FnOnce()) -> Samples {
    let over = AtomicBool::new(false);
    let path: PathBuf = merged.join("synced");
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let file = File::create(&path).unwrap();
            let mut all = Vec::new();
            while !over.load(Ordering::Relaxed) || all.is_empty() {
                let begun = Instant::now();
                file.write_all_at(&[7; 4096], 0).unwrap();
                file.sync_data().unwrap();
                all.push(begun.elapsed());
                std::thread::sleep(Duration::from_millis(2));
            }
            all
        });
        meanwhile();
        over.store(true, Ordering::Relaxed);
        Samples::new(writer.join().unwrap())
    })
}
