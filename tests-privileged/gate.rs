//! The lease gate: the kernel compares each write with the lease, whoever is alive.
#![allow(unsafe_code)]

mod adopt;
mod behind;
mod beside;
mod queues;
mod refusals;
mod stamps;
mod ways;

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use overfence::kernel::clock;
use overfence::kernel::gate::{Entry, Gate};
use overfence::kernel::overlay::{self, Mounted, Spec};
use overfence::model::ids::{Generation, SessionId};
use overfence::model::time::BootNs;
use rustix::io::Errno;

use crate::agent_process::{Host, has, id_of, path_of};
use crate::host::{Place, Test, paced, paced_ttl};

pub fn tests() -> Vec<Test> {
    [own(), adopt::tests(), refusals::tests(), behind::tests()].into_iter().flatten().collect()
}

fn own() -> Vec<Test> {
    vec![
        Test { name: "each_way_to_change_a_file", run: |place| ways::each(&Scene::new(place)) },
        Test { name: "no_write_begins_after_the_deadline", run: deadlines },
        Test { name: "a_generation_and_a_death_end_it", run: generations },
        Test { name: "it_holds_with_agent_and_keeper_dead", run: both_dead },
        Test { name: "the_next_agent_adopts_it", run: adopted },
        Test { name: "a_fence_proves_it_and_readmit_opens_it", run: fenced },
        Test { name: "drain_takes_it_away", run: drained },
        Test { name: "other_programs_take_over_without_a_gap", run: upgraded },
        Test { name: "what_root_takes_away_is_put_up_again", run: taken_away },
        Test { name: "shared_mappings_can_be_denied", run: denied },
        Test { name: "a_stale_writer_runs_on_reading", run: runs_on },
        Test { name: "it_changes_no_answer_of_a_good_lease", run: beside::same },
        Test { name: "numbers_that_are_used_again_are_nobodys", run: beside::raced },
        Test { name: "what_it_costs", run: beside::cost },
        Test { name: "no_write_begins_after_a_deadline_that_nobody_keeps", run: kept_by_nobody },
    ]
}

/// One overlay in the gate, without an agent.
pub struct Scene {
    gate: Gate,
    entry: Option<Entry>,
    mounted: Option<Mounted>,
    spec: Spec,
}

const LEASE: Generation = Generation(5);

/// An overlay's directories, made.
pub fn spec(dir: &Path) -> Spec {
    let make = |name: &str| {
        let path = dir.join(name);
        std::fs::create_dir_all(&path).unwrap();
        path
    };
    Spec {
        lowers: vec![make("lower")],
        upper: make("upper"),
        work: make("work"),
        target: make("merged"),
        mapped: None,
    }
}

impl Scene {
    fn new(place: &Place) -> Self {
        let spec = spec(&place.dir.join("s"));
        std::fs::write(spec.lowers[0].join("lower-file"), b"lower").unwrap();
        let gate = Gate::raise().unwrap();
        let mut entry = None;
        let mounted = overlay::mount_with(&spec, |root| {
            entry = Some(gate.enter(root, SessionId::fresh(), LEASE).unwrap());
        })
        .unwrap();
        Self { gate, entry, mounted: Some(mounted), spec }
    }

    fn entry(&self) -> &Entry {
        self.entry.as_ref().unwrap()
    }

    pub fn merged(&self) -> &Path {
        &self.spec.target
    }

    pub fn open(&self) {
        self.entry().open(LEASE, BootNs(u64::MAX));
    }

    pub fn shut(&self) {
        self.entry().shut();
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.mounted = None;
        // A test that failed may hold it busy: its mounts end with its namespace.
        let _ = overlay::unmount(&self.spec.target);
        if let Some(entry) = self.entry.take() {
            let _ = self.gate.leave(&entry);
        }
    }
}

/// Deadlines and writers of the run at full speed: one for each way to change a file, and more that
/// write.
const DEADLINES: u64 = 1_000;
const WRITERS: usize = 64;

fn deadlines(place: &Place) {
    let scene = Scene::new(place);
    let term = Arc::new(stamps::Term::default());
    let mut seen = stamps::Seen::new();
    std::thread::scope(|scope| {
        scene.open();
        let (begun, ways) = (Barrier::new(WRITERS + 1), ways::ways());
        assert!(ways.len() < WRITERS);
        let begun = Arc::new(begun);
        let writers: Vec<_> = (0..WRITERS)
            .map(|n| {
                let (way, dir) =
                    (*ways.get(n).unwrap_or(&ways[0]), scene.merged().join(n.to_string()));
                let (term, begun) = (Arc::clone(&term), Arc::clone(&begun));
                scope.spawn(move || {
                    let call = way.begin(&dir);
                    begun.wait();
                    stamps::call_on(&term, call)
                })
            })
            .collect();
        begun.wait();
        for _ in 0..DEADLINES {
            let deadline = clock::now().plus(paced(Duration::from_millis(5)));
            term.deadline.store(deadline.0, Ordering::SeqCst);
            scene.entry().open(LEASE, deadline);
            term.number.fetch_add(1, Ordering::SeqCst);
            clock::sleep_until(deadline.plus(paced(stamps::AFTER)));
            term.number.fetch_add(1, Ordering::SeqCst);
        }
        term.over.store(true, Ordering::SeqCst);
        scene.open();
        for writer in writers {
            seen.add(&writer.join().unwrap());
        }
    });
    seen.deadlines = DEADLINES;
    seen.judge();
}

fn write(file: &File) -> Result<usize, Errno> {
    file.write_at(b"x", 0).map_err(|e| Errno::from_io_error(&e).unwrap())
}

fn generations(place: &Place) {
    let mut scene = Scene::new(place);
    let never = BootNs(u64::MAX);
    scene.open();
    let file = File::create(scene.merged().join("file")).unwrap();
    assert_eq!(write(&file), Ok(1));
    // Superseded: no deadline helps.
    scene.entry().supersede(Generation(7));
    assert_eq!(write(&file), Err(Errno::ROFS));
    scene.entry().open(LEASE, never);
    assert_eq!(write(&file), Err(Errno::ROFS));
    scene.entry().open(Generation(8), never);
    assert_eq!(write(&file), Ok(1));
    assert!(!scene.entry().shared());
    let (prot, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
    let mapped = File::options().read(true).write(true).open(scene.merged().join("file")).unwrap();
    // SAFETY: a fresh mapping at an address of the kernel's choice, which nobody touches.
    unsafe {
        let at = rustix::mm::mmap(std::ptr::null_mut(), 1, prot, flags, &mapped, 0).unwrap();
        rustix::mm::munmap(at, 1).unwrap();
    }
    drop(mapped);
    assert!(scene.entry().shared(), "a mapping was not noted");
    // Fifos and readers are nobody's business.
    scene.shut();
    rustix::fs::mkfifoat(rustix::fs::CWD, place.dir.join("fifo"), rustix::fs::Mode::RWXU).unwrap();
    assert!(File::open(scene.merged().join("file")).is_ok());
    assert!(std::fs::write(place.dir.join("elsewhere"), b"x").is_ok());
    assert!(std::fs::write(scene.spec.upper.join("below"), b"x").is_ok(), "the agent's own");
    // Another overlay that gets the number of a dead one, and has the same root, is not meant by its
    // entry.
    drop(file);
    let entry = scene.entry.take().unwrap();
    let (dev, root) = (scene.mounted.as_ref().unwrap().s_dev, scene.spec.clone());
    let mut others = vec![];
    drop(scene);
    let reused = (0..64).any(|n| {
        let mounted = overlay::mount(&root).unwrap();
        std::fs::write(root.target.join("file"), b"x").unwrap();
        let same = mounted.s_dev == dev;
        drop(mounted);
        overlay::unmount(&root.target).unwrap();
        // It takes the number that was given instead.
        let spec = spec(&place.dir.join(format!("other-{n}")));
        others.push((overlay::mount(&spec).unwrap(), spec));
        same
    });
    assert!(reused, "no other overlay got device {dev}");
    Gate::raise().unwrap().leave(&entry).unwrap();
    for (mounted, spec) in others {
        drop(mounted);
        overlay::unmount(&spec.target).unwrap();
    }
}

/// What the session has of the gate.
fn gate_of(view: &serde_json::Value) -> (&str, bool) {
    let gate = &view["gate"];
    (gate["state"].as_str().unwrap(), gate["shared_mappings"].as_bool().unwrap())
}

/// A session, and a file that an outsider has open in it: no freeze reaches who writes there.
fn session(host: &Host, ttl: &str) -> (String, PathBuf, File) {
    let opened = host.open("w", ttl);
    assert_eq!(gate_of(&opened["session"]), ("complete", false), "{opened:#}");
    let merged = path_of(&opened["session"], "merged");
    let file = File::create(merged.join("file")).unwrap();
    assert_eq!(write(&file), Ok(1));
    std::fs::write(host.dir.join("token"), opened["token"].as_str().unwrap()).unwrap();
    (id_of(&opened), merged, file)
}

fn beat(host: &Host, id: &str) {
    let token = host.dir.join("token");
    host.must(&["lease", "beat", id, "--token-file", token.to_str().unwrap()]);
}

fn deadline_of(host: &Host, id: &str) -> BootNs {
    let shown = host.dir.join("run/sessions").join(id).join("inside/session.json");
    let shown: serde_json::Value = serde_json::from_slice(&std::fs::read(shown).unwrap()).unwrap();
    BootNs(shown["deadline"].as_u64().unwrap())
}

fn both_dead(place: &Place) {
    let mut host = Host::new(place, "host");
    host.start_keeper();
    assert!(host.start(None));
    let (id, merged, file) = session(&host, &paced_ttl(2));
    let deadline = deadline_of(&host, &id);
    host.stop();
    let mut last = BootNs(0);
    let refused = loop {
        let begun = clock::now();
        match write(&file) {
            Ok(_) => last = begun,
            Err(e) => break (e, clock::now()),
        }
    };
    println!(
        "last accepted {:?} before, first refused {:?} after",
        deadline.since(last),
        refused.1.since(deadline)
    );
    assert_eq!(refused.0, Errno::ROFS);
    assert!(last < deadline && refused.1 >= deadline);
    let create = File::create(merged.join("new")).map(drop).map_err(|e| e.raw_os_error());
    assert_eq!(create, Err(Some(libc::EROFS)));
    assert_eq!(std::fs::read(merged.join("file")).unwrap(), b"x", "reading goes on");
    // The next agent proves it.
    assert!(host.start(None));
    let view = host.until(&id, |v| has(v, "gated") && has(v, "frozen"));
    assert_eq!(gate_of(&view).0, "complete");
    assert!(view["gate"]["refused"]["write"].as_u64().unwrap() >= 1, "{view:#}");
}

fn adopted(place: &Place) {
    let mut host = Host::new(place, "host");
    assert!(host.start(None));
    let (id, merged, file) = session(&host, &paced_ttl(8));
    let first = deadline_of(&host, &id);
    let over = Arc::new(AtomicBool::new(false));
    let busy = hammer(file.try_clone().unwrap(), Arc::clone(&over));
    // A renewal moves the deadline, also of an agent that was not there when it was entered.
    for n in 0..3 {
        host.kill_agent();
        assert_eq!(write(&file), Ok(1), "round {n}: without an agent");
        assert!(host.start(None));
        beat(&host, &id);
        assert_eq!(write(&file), Ok(1), "round {n}");
    }
    while clock::now() < first.plus(Duration::from_millis(100)) {
        beat(&host, &id);
        assert_eq!(write(&file), Ok(1), "refused under a good lease");
    }
    std::fs::write(merged.join("after"), b"x").unwrap();
    over.store(true, Ordering::SeqCst);
    let (accepted, refused) = busy.join().unwrap();
    println!("{accepted} writes accepted over three restarts");
    assert!(accepted > 100 && refused == 0, "{refused} refused under a good lease");
    let view = host.must(&["session", "inspect", &id]);
    assert_eq!(gate_of(&view), ("complete", false), "{view:#}");
    assert!(view["gate"]["refused"]["write"].is_null(), "{view:#}");
}

fn fenced(place: &Place) {
    let mut host = Host::new(place, "host");
    assert!(host.start(None));
    let (id, merged, file) = session(&host, &paced_ttl(60));
    // Held busy by the outsider's descriptor: not read-only, so that the gate alone refuses.
    host.must(&["fence", &id, "--reason", "test"]);
    assert_eq!(write(&file), Err(Errno::ROFS));
    // Once read-only was answered, too: before, something is under way.
    let view = host.until(&id, |v| v["state"] == "PRESERVED");
    assert!(has(&view, "gated") && has(&view, "frozen") && !has(&view, "read-only"), "{view:#}");
    host.must(&["readmit", &id, "--authorised-by", "op", "--reason", "test"]);
    assert_eq!(write(&file), Ok(1), "readmitted");
    let view = host.until(&id, |v| v["state"] == "ACTIVE" && v["work"].is_null());
    assert!(!has(&view, "gated"));
    drop(file);
    // By a revocation, and down to the end.
    host.must(&["lease", "revoke", view["lease"].as_str().unwrap(), "--reason", "test"]);
    let create = File::create(merged.join("new")).map(drop).map_err(|e| e.raw_os_error());
    assert_eq!(create, Err(Some(libc::EROFS)));
    host.until(&id, |v| has(v, "read-only") && has(v, "gated"));
    host.must(&["preserved", "discard", &id, "--yes"]);
    let gate = Gate::raise().unwrap();
    let until = clock::now().plus(paced(Duration::from_secs(20)));
    while gate.find_by_id(id.parse().unwrap()).is_some() {
        assert!(clock::now() < until, "its entry stays");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A bpffs of the test's own: what it does to what is pinned concerns no other test.
pub fn own_bpffs() -> PathBuf {
    let at = "/sys/fs/bpf";
    nix::mount::mount(Some("bpf"), at, Some("bpf"), nix::mount::MsFlags::empty(), None::<&str>)
        .unwrap();
    Path::new(at).join("overfence")
}

fn drained(place: &Place) {
    let pins = own_bpffs();
    let mut host = Host::new(place, "host");
    assert!(host.start(None));
    let (_, _, file) = session(&host, &paced_ttl(60));
    drop(file);
    assert!(pins.exists());
    let other = Scene::new(place);
    host.must(&["drain", "--yes"]);
    assert!(pins.exists(), "another one's session needs it");
    drop(other);
    host.kill_agent();
    assert!(host.start(None));
    host.must(&["drain", "--yes"]);
    assert!(!pins.exists(), "it is left behind");
}

/// Writes as fast as it can, and tells how often it was let and how often not.
fn hammer(file: File, over: Arc<AtomicBool>) -> std::thread::JoinHandle<(u64, u64)> {
    std::thread::spawn(move || {
        let (mut accepted, mut refused) = (0, 0);
        while !over.load(Ordering::SeqCst) {
            match write(&file) {
                Ok(_) => accepted += 1,
                Err(Errno::ROFS) => refused += 1,
                Err(e) => panic!("{e}"),
            }
        }
        (accepted, refused)
    })
}

/// Programs of another version take the place of those that are attached, and programs of an unknown
/// layout stay: meanwhile no write is refused under a good lease, and none accepted after one.
fn upgraded(place: &Place) {
    let pins = own_bpffs();
    let dir = |name: &str| {
        let dir = place.dir.join(name);
        std::fs::create_dir(&dir).unwrap();
        Place { dir, cgroup: place.cgroup.clone(), binary: place.binary.clone() }
    };
    let (good, lost) = (Scene::new(&dir("good")), Scene::new(&dir("lost")));
    let [goes, stops] = [&good, &lost].map(|scene| {
        scene.open();
        File::create(scene.merged().join("file")).unwrap()
    });
    lost.shut();
    let over = Arc::new(AtomicBool::new(false));
    let [goes, stops] = [goes, stops].map(|file| hammer(file, Arc::clone(&over)));
    let sets = || {
        let all = std::fs::read_dir(pins.join("layout-2")).unwrap().map(|e| e.unwrap().path());
        all.filter(|path| path.is_dir()).collect::<Vec<_>>()
    };
    for round in 0..2 {
        let [own] = &sets()[..] else { panic!("{:?}", sets()) };
        // As if an agent of another version had attached it, and one had died while it attached.
        std::fs::rename(own, own.with_file_name(format!("{round:016x}"))).unwrap();
        std::fs::create_dir(own.with_file_name("unfinished")).unwrap();
        let gate = Gate::raise().unwrap();
        assert!(gate.stands() && gate.missing().is_empty());
        assert_eq!(sets().len(), 1, "the old ones are still attached: {:?}", sets());
        assert!(own.exists());
    }
    let own = sets().remove(0);
    std::fs::create_dir(pins.join("layout-99")).unwrap();
    let fault = Gate::raise().map(drop).unwrap_err();
    let why = overfence::kernel::gate::why(&fault);
    assert!(why.contains("layout-99") && why.contains("another version"), "{why}");
    assert!(own.exists());
    std::fs::remove_dir(pins.join("layout-99")).unwrap();
    // A part of it taken away is noticed, and attached again.
    std::fs::remove_file(own.join("mmap_file")).unwrap();
    assert!(!good.gate.stands());
    assert!(Gate::raise().unwrap().stands());
    over.store(true, Ordering::SeqCst);
    let ((accepted, wrongly), (late, refused)) = (goes.join().unwrap(), stops.join().unwrap());
    println!("{accepted} accepted under the lease, {refused} refused after it");
    assert_eq!((wrongly, late), (0, 0), "wrongly refused, and accepted late");
    assert!(accepted > 0 && refused > 0);
}

/// Root takes it away under a running agent: it is put up again, and the session entered anew.
fn taken_away(place: &Place) {
    let pins = own_bpffs();
    let mut host = Host::new(place, "host");
    let config = std::fs::read_to_string(&host.config).unwrap();
    std::fs::write(&host.config, format!("{config}[preserve]\nsweep = \"1s\"\n")).unwrap();
    assert!(host.start(None));
    let (id, _, file) = session(&host, &paced_ttl(600));
    let held = |scale: u64| paced(Duration::from_secs(scale));
    let until = |what: &str, mut fits: Box<dyn FnMut() -> bool + '_>| {
        let end = clock::now().plus(held(30));
        while !fits() {
            assert!(clock::now() < end, "in vain: {what}\n{}", host.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    // The agent may be at it already.
    let _ = std::fs::remove_dir_all(&pins);
    until(
        "it is up again",
        Box::new(|| Gate::raise().is_ok_and(|g| g.find_by_id(id.parse().unwrap()).is_some())),
    );
    // What was mapped meanwhile nobody knows.
    let view = host.until(&id, |v| v["gate"]["shared_mappings"] == true);
    assert_eq!(view["gate"]["state"], "complete", "{view:#}");
    assert_eq!(write(&file), Ok(1), "under a good lease");
    host.must(&["fence", &id, "--reason", "test"]);
    assert_eq!(write(&file), Err(Errno::ROFS));
    host.until(&id, |v| has(v, "gated"));
}

/// With `deny` no shared mapping can be made through which a store could pass.
fn denied(place: &Place) {
    let mut host = Host::new(place, "host");
    let config = std::fs::read_to_string(&host.config).unwrap();
    let deny = "[fence]\nshared_mappings = \"deny\"\n";
    std::fs::write(&host.config, format!("{config}{deny}")).unwrap();
    assert!(host.start(None));
    let (id, merged, written) = session(&host, &paced_ttl(60));
    let file = File::options().read(true).write(true).open(merged.join("file")).unwrap();
    let read = File::open(merged.join("file")).unwrap();
    let map = |file: &File, flags| {
        let prot = rustix::mm::ProtFlags::READ;
        // SAFETY: a fresh mapping at an address of the kernel's choice, which nobody touches.
        unsafe {
            let at = rustix::mm::mmap(std::ptr::null_mut(), 1, prot, flags, file, 0)?;
            rustix::mm::munmap(at, 1)
        }
    };
    use rustix::mm::MapFlags;
    assert_eq!(map(&file, MapFlags::SHARED), Err(Errno::ACCESS));
    assert_eq!(map(&file, MapFlags::PRIVATE), Ok(()));
    assert_eq!(map(&read, MapFlags::SHARED), Ok(()));
    assert_eq!(write(&written), Ok(1));
    let view = host.must(&["session", "inspect", &id]);
    assert_eq!(gate_of(&view), ("complete", false), "{view:#}");
}

/// Writes and reads for as long as it may, and tells of it; ends once it is told to.
const WRITER: &str = r#"
echo $$ > "$1/cgroup.procs" && cd "$2" && exec 5>>file || exit 1
while [ ! -e "$3/end" ]; do
    echo x >&5 && echo wrote >> "$3/told" || echo refused >> "$3/told"
    cat file > /dev/null && echo read >> "$3/told"
    sleep 0.05
done 2>/dev/null
"#;

/// With `read-only-run` a stale writer runs on and reads, refused by the gate, until it ends by itself.
fn runs_on(place: &Place) {
    let mut host = Host::new(place, "host");
    let config = std::fs::read_to_string(&host.config).unwrap();
    let policy = "[fence]\non_fence = \"read-only-run\"\n";
    std::fs::write(&host.config, format!("{config}{policy}")).unwrap();
    host.start_keeper();
    assert!(host.start(None));
    let opened = host.open("w", &paced_ttl(600));
    let id = id_of(&opened);
    let [cgroup, merged] = ["cgroup", "merged"].map(|name| path_of(&opened["session"], name));
    let mut writer = std::process::Command::new("/bin/sh")
        .args(["-c", WRITER, "sh"])
        .args([cgroup.as_os_str(), merged.as_os_str(), place.dir.as_os_str()])
        .spawn()
        .unwrap();
    let told = || std::fs::read_to_string(place.dir.join("told")).unwrap_or_default();
    // What is told from now on, once that is enough to judge by.
    let after = |enough: &str| {
        let (before, until) = (told().len(), clock::now().plus(paced(Duration::from_secs(20))));
        loop {
            let now = told().split_off(before);
            if now.matches(enough).count() > 3 {
                return now;
            }
            assert!(clock::now() < until, "no {enough}: {now}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    after("wrote");
    host.must(&["fence", &id, "--reason", "test"]);
    let view = host.until(&id, |v| v["runs_on"] == true);
    assert!(has(&view, "gated") && !has(&view, "frozen") && !has(&view, "read-only"), "{view:#}");
    let now = after("read");
    assert!(now.contains("refused") && !now.contains("wrote"), "{now}");
    assert_eq!(view["missing"], "read-only", "{view:#}");
    // More than that is asked for: it is frozen, and stays so.
    host.must(&["fence", &id, "--to", "frozen", "--reason", "test", "--wait"]);
    let stands = told();
    std::thread::sleep(paced(Duration::from_millis(300)));
    assert_eq!(told(), stands, "it was not frozen");
    host.must(&["readmit", &id, "--authorised-by", "op", "--reason", "test"]);
    assert!(!after("wrote").contains("refused"), "refused under a good lease");
    // The next agent freezes it first, and then lets it run on again.
    let view = host.must(&["session", "inspect", &id]);
    host.must(&["lease", "revoke", view["lease"].as_str().unwrap(), "--reason", "test"]);
    host.until(&id, |v| v["runs_on"] == true);
    after("read");
    host.kill_agent();
    let now = after("read");
    assert!(!now.contains("wrote"), "{now}");
    assert!(host.start(None));
    host.until(&id, |v| v["runs_on"] == true);
    let now = after("refused");
    assert!(!now.contains("wrote"), "{now}");
    // It ends by itself, and nothing keeps it from being read-only.
    std::fs::write(place.dir.join("end"), "").unwrap();
    assert!(writer.wait().unwrap().success());
    host.until(&id, |v| has(v, "read-only"));

    // Stores into a mapping would pass the gate: who made one stays frozen.
    let opened = host.open("mapped", &paced_ttl(600));
    let id = id_of(&opened);
    let file = path_of(&opened["session"], "merged").join("file");
    let file = File::options().create_new(true).read(true).write(true).open(file).unwrap();
    let (prot, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
    // SAFETY: a fresh mapping at an address of the kernel's choice, which nobody touches.
    unsafe {
        let at = rustix::mm::mmap(std::ptr::null_mut(), 1, prot, flags, &file, 0).unwrap();
        rustix::mm::munmap(at, 1).unwrap();
    }
    host.must(&["fence", &id, "--reason", "test"]);
    let view = host.until(&id, |v| has(v, "gated") && v["state"] == "PRESERVED");
    std::thread::sleep(paced(Duration::from_millis(300)));
    let view_after = host.must(&["session", "inspect", &id]);
    assert!(has(&view, "frozen") && has(&view_after, "frozen"), "{view_after:#}");
    assert_eq!(view_after["runs_on"], false);
}

/// All threads of a process get what nobody else wants of the processors.
fn starve(pid: u32) {
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let id: i32 = thread.unwrap().file_name().to_str().unwrap().parse().unwrap();
        let priority = libc::sched_param { sched_priority: 0 };
        // SAFETY: the structure is read during the call alone.
        let done = unsafe { libc::sched_setscheduler(id, libc::SCHED_IDLE, &raw const priority) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    }
}

/// Sessions whose deadlines nobody keeps: agent and keeper are dead, stopped, or starved by others.
fn kept_by_nobody(place: &Place) {
    const SESSIONS: usize = 6;
    const EACH: usize = 4;
    let mut host = Host::new(place, "host");
    let (mut seen, ways) = (stamps::Seen::new(), ways::ways());
    for round in 0..6 {
        host.start_keeper();
        assert!(host.start(None));
        let terms: Vec<_> = (0..SESSIONS)
            .map(|n| {
                let opened = host.open(&format!("w{round}-{n}"), &paced_ttl(6));
                let term = stamps::Term::default();
                let deadline = deadline_of(&host, &id_of(&opened)).0;
                term.deadline.store(deadline, Ordering::SeqCst);
                term.number.store(1, Ordering::SeqCst);
                let merged = path_of(&opened["session"], "merged");
                // One of the ways is to open it.
                std::fs::write(merged.join("lower-file"), b"lower").unwrap();
                (term, merged)
            })
            .collect();
        let starved = round % 3 == 2;
        let deadlines = terms.iter().map(|(term, _)| BootNs(term.deadline.load(Ordering::SeqCst)));
        let (first, last) = (deadlines.clone().min().unwrap(), deadlines.max().unwrap());
        let begun = Barrier::new(SESSIONS * EACH + 1);
        std::thread::scope(|scope| {
            let (begun, all) = (&begun, terms.iter().flat_map(|t| (0..EACH).map(move |n| (t, n))));
            let writers: Vec<_> = all
                .enumerate()
                .map(|(k, ((term, merged), n))| {
                    let way = &ways[(round * SESSIONS * EACH + k) % ways.len()];
                    scope.spawn(move || {
                        let call = way.begin(&merged.join(n.to_string()));
                        begun.wait();
                        stamps::call_on(term, call)
                    })
                })
                .collect();
            begun.wait();
            match round % 3 {
                0 => host.stop(),
                1 => host.signal(nix::sys::signal::Signal::SIGSTOP),
                _ => host.pids().into_iter().for_each(starve),
            }
            assert!(clock::now() < first, "all of it took too long");
            for _ in 0..if starved { 2 * EACH } else { 0 } {
                scope.spawn(|| {
                    while !terms[0].0.over.load(Ordering::SeqCst) {
                        std::hint::spin_loop();
                    }
                });
            }
            clock::sleep_until(last.plus(paced(Duration::from_millis(50))));
            terms.iter().for_each(|(term, _)| term.over.store(true, Ordering::SeqCst));
            for writer in writers {
                seen.add(&writer.join().unwrap());
            }
        });
        seen.deadlines += SESSIONS as u64;
        host.stop();
    }
    seen.judge();
}
