//! The lease gate: the kernel compares each write with the lease, whoever is alive.
#![allow(unsafe_code)]

mod adopt;
mod behind;
mod beside;
mod calls;
mod cost;
mod deadlines;
mod disks;
mod maps;
mod neighbour;
mod programs;
mod queues;
mod refusals;
mod rounds;
mod stamps;
mod table;
mod units;
mod ways;

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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
        Test { name: "each_way_to_change_a_file", run: disks::on_the_hosts },
        Test { name: "no_write_begins_after_the_deadline", run: deadlines::deadlines },
        Test { name: "a_generation_and_a_death_end_it", run: programs::generations },
        Test { name: "it_holds_with_agent_and_keeper_dead", run: both_dead },
        Test { name: "the_next_agent_adopts_it", run: adopted },
        Test { name: "a_fence_proves_it_and_readmit_opens_it", run: fenced },
        Test { name: "drain_takes_it_away", run: drained },
        Test { name: "a_bpffs_that_others_can_write_to_is_refused", run: open_to_others },
        Test { name: "other_programs_take_over_without_a_gap", run: programs::upgraded },
        Test { name: "what_root_takes_away_is_put_up_again", run: taken_away },
        Test { name: "shared_mappings_can_be_denied", run: denied },
        Test { name: "a_stale_writer_runs_on_reading", run: runs_on },
        Test { name: "it_changes_no_answer_of_a_good_lease", run: beside::same },
        Test { name: "numbers_that_are_used_again_are_nobodys", run: beside::raced },
        Test { name: "a_container_beside_it_is_left_alone", run: neighbour::left_alone },
        Test { name: "what_it_costs", run: cost::told },
        Test { name: "no_write_begins_after_a_deadline_that_nobody_keeps", run: rounds::passed },
        Test { name: "each_way_to_change_a_file_on_xfs", run: disks::on_xfs },
        Test { name: "each_way_to_change_a_file_on_btrfs", run: disks::on_btrfs },
        Test { name: "each_way_to_change_a_file_on_tmpfs", run: disks::on_tmpfs },
        Test { name: "each_way_to_change_a_file_in_an_image", run: disks::on_an_image },
        Test { name: "mprotect_makes_nothing_writable_unnoted", run: maps::protected },
        Test { name: "restart_reload_and_upgrade_refuse_no_good_write", run: units::undisturbed },
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
        Self::below(&place.dir)
    }

    fn below(dir: &Path) -> Self {
        Self::of(spec(&dir.join("s")))
    }

    fn of(spec: Spec) -> Self {
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

fn write(file: &File) -> Result<usize, Errno> {
    file.write_at(b"x", 0).map_err(|e| Errno::from_io_error(&e).unwrap())
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
    nix::mount::mount(
        Some("bpf"),
        at,
        Some("bpf"),
        nix::mount::MsFlags::empty(),
        Some("mode=0700"),
    )
    .unwrap();
    Path::new(at).join("overfence")
}

fn open_to_others(_: &Place) {
    use std::os::unix::fs::PermissionsExt as _;
    let pins = own_bpffs();
    let bpffs = pins.parent().unwrap();
    let set = |dir: &Path, mode| {
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let refused = |dir: &Path| {
        let why = overfence::kernel::gate::why(&Gate::raise().map(drop).unwrap_err());
        let begin = format!("{} is not root's alone: uid 0, mode ", dir.display());
        assert!(why.starts_with(&begin), "{why}");
    };
    // As mount(8) makes it without an option.
    set(bpffs, 0o1777);
    refused(bpffs);
    assert!(!pins.exists(), "nothing is pinned where others can be first");
    set(bpffs, 0o700);
    std::fs::create_dir(&pins).unwrap();
    set(&pins, 0o770);
    refused(&pins);
    set(&pins, 0o700);
    Gate::raise().unwrap();
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
