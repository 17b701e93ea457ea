//! What becomes of entries whose agent, programs or pins went away: a good lease is refused nothing,
//! and a lost one everything.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use overfence::kernel::clock;
use overfence::kernel::gate::{self, Gate};
use overfence::kernel::overlay;
use overfence::model::ids::SessionId;
use overfence::model::time::BootNs;
use rustix::fs::{Access, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::{LEASE, beat, deadline_of, gate_of, hammer, own_bpffs, session, spec, write};
use crate::agent_process::{Host, has, id_of, path_of};
use crate::host::{Place, Test, paced, paced_ttl};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "adopt::switched_off_it_refuses_no_good_lease", run: |p| goes_on(p, &OFF) },
        Test { name: "adopt::of_another_layout_it_goes_on", run: |p| goes_on(p, &OTHER_LAYOUT) },
        Test { name: "adopt::with_older_programs_it_goes_on", run: |p| goes_on(p, &NO_PROGRAMS) },
        Test { name: "adopt::behind_a_stopped_agent_it_goes_on", run: locked },
        Test { name: "adopt::an_open_moves_all_to_the_new_one", run: moved },
        Test { name: "adopt::a_map_that_is_gone_is_made_anew", run: unmapped },
        Test { name: "adopt::programs_that_were_away_saw_no_mapping", run: away },
        Test { name: "adopt::an_overlay_in_use_is_entered_unseen", run: live },
        Test { name: "adopt::a_changed_wish_reaches_who_is_entered", run: wishes },
        Test { name: "adopt::a_crash_leaves_one_set_of_programs", run: crashed },
    ]
}

/// Why the next agent puts up no programs of its own.
struct Loss {
    /// Before it starts; what it is started with.
    make: fn(&Host, &Path) -> Option<String>,
    /// Of the session that was entered before.
    state: &'static str,
    /// Part of the reason that is shown.
    why: &'static str,
    /// A new session's.
    new: &'static str,
}

const OFF: Loss = Loss {
    make: |host, _| {
        configure(host, "[fence]\ngate = \"off\"\n");
        None
    },
    state: "absent",
    why: "switched off",
    new: "absent",
};

const OTHER_LAYOUT: Loss = Loss {
    make: |_, pins| {
        std::fs::rename(pins.join("layout-2"), pins.join("layout-99")).unwrap();
        let fault = gate::ask().unwrap_err();
        assert!(gate::why(&fault).contains("layout-99"), "what doctor says: {}", gate::why(&fault));
        None
    },
    state: "complete",
    why: "layout-99",
    new: "absent",
};

const NO_PROGRAMS: Loss = Loss {
    make: |host, pins| {
        rename_set(pins, "0000000000000000");
        let file = host.dir.join("fail");
        std::fs::write(&file, "gate.attach.before 5").unwrap();
        Some(format!("fail={}", file.display()))
    },
    state: "complete",
    why: "Input/output error",
    new: "complete",
};

/// Adds to the configuration as a new host has it.
fn configure(host: &Host, more: &str) {
    let text = std::fs::read_to_string(&host.config).unwrap();
    let begin = text.split_inclusive('\n').take_while(|line| !line.starts_with('['));
    std::fs::write(&host.config, begin.collect::<String>() + more).unwrap();
}

fn sets(pins: &Path) -> Vec<PathBuf> {
    let all = std::fs::read_dir(pins.join("layout-2")).unwrap().map(|e| e.unwrap().path());
    all.filter(|path| path.is_dir()).collect()
}

/// As if an agent of another build had attached it.
fn rename_set(pins: &Path, name: &str) {
    let [own] = &sets(pins)[..] else { panic!("{:?}", sets(pins)) };
    std::fs::rename(own, own.with_file_name(name)).unwrap();
}

/// At one stroke, and returns once nobody refuses any more what was refused of this file: links end a
/// little later than their pins. How often it still was.
fn take_away(pins: &Path, dir: &Path, refused: &File) -> u64 {
    let gone = pins.with_file_name("gone");
    std::fs::rename(pins, &gone).unwrap();
    std::fs::remove_dir_all(&gone).unwrap();
    let (end, mut times) = (clock::now().plus(paced(Duration::from_secs(20))), 0);
    loop {
        let probed = rustix::fs::access(dir, Access::WRITE_OK);
        match write(refused) {
            Ok(_) if probed == Ok(()) => return times,
            Ok(_) => {}
            Err(_) => times += 1,
        }
        assert!(clock::now() < end, "the programs stay");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The programs go on comparing: somebody moves their deadlines, or takes the entries out.
fn goes_on(place: &Place, loss: &Loss) {
    let pins = own_bpffs();
    let mut host = Host::new(place, "host");
    assert!(host.start(None));
    let (id, _, file) = session(&host, &paced_ttl(10));
    let (over, first) = (Arc::new(AtomicBool::new(false)), deadline_of(&host, &id));
    let busy = hammer(file.try_clone().unwrap(), Arc::clone(&over));
    host.kill_agent();
    let failpoints = (loss.make)(&host, &pins);
    assert!(host.start(failpoints.as_deref()));
    while clock::now() < first.plus(Duration::from_millis(500)) {
        beat(&host, &id);
        assert_eq!(write(&file), Ok(1), "refused under a good lease\n{}", host.log());
    }
    over.store(true, Ordering::SeqCst);
    let (accepted, refused) = busy.join().unwrap();
    assert!(accepted > 100 && refused == 0, "{refused} refused under a good lease");
    let view = host.must(&["session", "inspect", &id]);
    assert_eq!(gate_of(&view).0, loss.state, "{view:#}");
    assert!(view["gate"]["why"].as_str().unwrap().contains(loss.why), "{view:#}");
    let other = host.open("other", &paced_ttl(600));
    assert_eq!(gate_of(&other["session"]).0, loss.new, "{other:#}");
    // The fence is what it was; with the gate it refuses an outsider, too.
    host.must(&["fence", &id, "--reason", "test"]);
    let gated = loss.state != "absent";
    assert_eq!(write(&file), if gated { Err(Errno::ROFS) } else { Ok(1) });
    let view = host.until(&id, |v| has(v, "frozen") && v["state"] == "PRESERVED");
    assert_eq!(has(&view, "gated"), gated, "{view:#}");
    drop(file);
    host.must(&["drain", "--yes"]);
    assert!(!pins.exists(), "it is left behind");
}

fn lock(bpffs: &Path) -> OwnedFd {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let turn = rustix::fs::open(bpffs, flags, Mode::empty()).unwrap();
    rustix::fs::flock(&turn, FlockOperation::LockExclusive).unwrap();
    turn
}

/// An agent that was stopped in its turn keeps no other one from starting, nor from renewing; and once
/// it ends the turn the other has its gate.
fn locked(place: &Place) {
    let pins = own_bpffs();
    let bpffs = pins.parent().unwrap();
    let mut host = Host::new(place, "host");
    let turn = lock(bpffs);
    assert!(host.start(None));
    let opened = host.open("first", &paced_ttl(600));
    assert_eq!(gate_of(&opened["session"]).0, "absent", "{opened:#}");
    drop(turn);
    host.until(&id_of(&opened), |view| gate_of(view).0 == "complete");
    let (id, _, file) = session(&host, &paced_ttl(20));
    let first = deadline_of(&host, &id);
    host.kill_agent();
    let turn = lock(bpffs);
    assert!(host.start(None));
    while clock::now() < first.plus(Duration::from_millis(500)) {
        beat(&host, &id);
        assert_eq!(write(&file), Ok(1), "refused under a good lease\n{}", host.log());
    }
    let view = host.must(&["session", "inspect", &id]);
    assert_eq!(gate_of(&view), ("complete", false), "{view:#}");
    assert!(view["gate"]["why"].as_str().unwrap().contains("lslocks"), "{view:#}");
    let other = host.open("other", &paced_ttl(600));
    assert_eq!(gate_of(&other["session"]).0, "absent", "{other:#}");
    drop(turn);
    host.until(&id_of(&other), |view| gate_of(view).0 == "complete");
    host.until(&id, |view| view["gate"]["why"].is_null());
}

/// Root takes it away, and an open comes ahead of every sweep: who was entered before is entered in
/// what that put up, and counts go on.
fn moved(place: &Place) {
    let pins = own_bpffs();
    let mut host = Host::new(place, "host");
    configure(&host, "[preserve]\nsweep = \"1h\"\n");
    assert!(host.start(None));
    let (good, _, writes) = session(&host, &paced_ttl(600));
    let opened = host.open("lost", &paced_ttl(600));
    let lost = id_of(&opened);
    let dir = path_of(&opened["session"], "merged");
    let stale = File::create(dir.join("file")).unwrap();
    host.must(&["fence", &lost, "--reason", "test"]);
    host.until(&lost, |v| v["state"] == "PRESERVED" && v["work"].is_null());
    let refused = || host.metric("writes_refused_total{op=\"write\"}");
    for _ in 0..20 {
        assert_eq!(write(&stale), Err(Errno::ROFS));
    }
    assert_eq!(refused(), 20);

    let over = Arc::new(AtomicBool::new(false));
    let busy = hammer(writes.try_clone().unwrap(), Arc::clone(&over));
    let late = take_away(&pins, &dir, &stale);
    let between = host.open("between", &paced_ttl(600));
    assert_eq!(gate_of(&between["session"]), ("complete", false), "{between:#}");
    let view = host.must(&["session", "inspect", &good]);
    // What was mapped meanwhile nobody knows.
    assert_eq!(gate_of(&view), ("complete", true), "{view:#}");
    over.store(true, Ordering::SeqCst);
    let (accepted, wrongly) = busy.join().unwrap();
    assert!(accepted > 0 && wrongly == 0, "{wrongly} refused under a good lease");
    for _ in 0..3 {
        assert_eq!(write(&stale), Err(Errno::ROFS), "of a lost lease");
    }
    assert_eq!(refused(), 20 + late + 3, "the count does not go on");
    let gate = Gate::raise().unwrap();
    assert!(gate.find_by_id(good.parse().unwrap()).is_some());
    host.must(&["fence", &good, "--reason", "test"]);
    assert_eq!(write(&writes), Err(Errno::ROFS));
    host.until(&good, |v| has(v, "gated"));
}

/// A map without its pin is no map of the next agent: all are made anew, and who is open moves there.
fn unmapped(place: &Place) {
    let pins = own_bpffs();
    let mut host = Host::new(place, "host");
    configure(&host, "[preserve]\nsweep = \"1s\"\n");
    assert!(host.start(None));
    let (id, _, file) = session(&host, &paced_ttl(600));
    let over = Arc::new(AtomicBool::new(false));
    let busy = hammer(file.try_clone().unwrap(), Arc::clone(&over));
    for map in ["entries", "devices", "refusals"] {
        std::fs::remove_file(pins.join("layout-2").join(map)).unwrap();
        // Nothing is put up by who looks.
        let entered = |gate: Gate| gate.stands() && gate.find_by_id(id.parse().unwrap()).is_some();
        let whole = || Gate::adopt().is_ok_and(|gate| gate.is_some_and(entered));
        host.until(&id, |v| gate_of(v) == ("complete", true) && whole() && sets(&pins).len() == 1);
    }
    over.store(true, Ordering::SeqCst);
    let (accepted, wrongly) = busy.join().unwrap();
    assert!(accepted > 0 && wrongly == 0, "{wrongly} refused under a good lease");
    host.must(&["fence", &id, "--reason", "test"]);
    assert_eq!(write(&file), Err(Errno::ROFS));
    host.until(&id, |v| has(v, "gated"));
}

/// The programs go and come while no agent is there, and the maps stay.
fn away(place: &Place) {
    let pins = own_bpffs();
    let mut host = Host::new(place, "host");
    assert!(host.start(None));
    let (id, _, file) = session(&host, &paced_ttl(600));
    host.kill_agent();
    let [set] = &sets(&pins)[..] else { panic!("{:?}", sets(&pins)) };
    std::fs::remove_dir_all(set).unwrap();
    assert!(host.start(None));
    let view = host.must(&["session", "inspect", &id]);
    assert_eq!(gate_of(&view), ("complete", true), "{view:#}");
    assert_eq!(write(&file), Ok(1));
    host.must(&["fence", &id, "--reason", "test"]);
    assert_eq!(write(&file), Err(Errno::ROFS));
}

/// No write is refused while its overlay is entered under a good lease.
fn live(place: &Place) {
    let pins = own_bpffs();
    let spec = spec(&place.dir.join("s"));
    let mounted = overlay::mount(&spec).unwrap();
    let gate = Gate::raise().unwrap();
    let file = File::create(spec.target.join("file")).unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let busy = hammer(file.try_clone().unwrap(), Arc::clone(&over));
    let enter = |deadline| gate.enter_live(&mounted.root, SessionId::fresh(), LEASE, || deadline);
    for _ in 0..200 {
        let entry = enter(BootNs(u64::MAX)).unwrap();
        assert!(entry.shared(), "what was mapped before is not known");
        gate.leave(&entry).unwrap();
    }
    over.store(true, Ordering::SeqCst);
    let (accepted, refused) = busy.join().unwrap();
    println!("{accepted} accepted while it was entered 200 times");
    assert!(accepted > 100 && refused == 0, "{refused} refused under a good lease");
    // It is entered: its deadline decides, also if that has passed.
    let entry = enter(BootNs(u64::MAX)).unwrap();
    assert_eq!(write(&file), Ok(1));
    entry.shut();
    assert_eq!(write(&file), Err(Errno::ROFS));
    assert!(entry.prove(&mounted.root).unwrap().is_some());
    gate.leave(&entry).unwrap();
    let entry = enter(clock::now()).unwrap();
    assert_eq!(write(&file), Err(Errno::ROFS));
    gate.leave(&entry).unwrap();
    assert_eq!(write(&file), Ok(1), "it was left");
    // An entry that was left moves nobody's deadline.
    let next = enter(BootNs(u64::MAX)).unwrap();
    entry.shut();
    assert_eq!(write(&file), Ok(1), "it shut another one's entry");
    gate.leave(&next).unwrap();
    // Nobody is entered where no programs are.
    let last = enter(BootNs(0)).unwrap();
    take_away(&pins, &spec.target, &file);
    gate.leave(&last).unwrap();
    let why = gate::why(&enter(BootNs(u64::MAX)).unwrap_err());
    assert!(why.contains("do not know the overlay"), "{why}");
    drop((file, mounted));
    overlay::unmount(&spec.target).unwrap();
}

/// `shared_mappings` is the agent's wish of now, for each session that it has.
fn wishes(place: &Place) {
    let pins = own_bpffs();
    let deny = "[fence]\nshared_mappings = \"deny\"\n[preserve]\nsweep = \"1s\"\n";
    let mut host = Host::new(place, "host");
    assert!(host.start(None));
    let (id, merged, _file) = session(&host, &paced_ttl(600));
    let file = File::options().read(true).write(true).open(merged.join("file")).unwrap();
    let map = || {
        // SAFETY: a fresh mapping at an address of the kernel's choice, which nobody touches.
        unsafe {
            let (null, flags) = (std::ptr::null_mut(), MapFlags::SHARED);
            let at = rustix::mm::mmap(null, 1, ProtFlags::READ, flags, &file, 0)?;
            rustix::mm::munmap(at, 1)
        }
    };
    host.kill_agent();
    configure(&host, deny);
    assert!(host.start(None));
    assert_eq!(map(), Err(Errno::ACCESS), "a wish of a later agent");
    // In what is put up again, too.
    let gone = pins.with_file_name("gone");
    std::fs::rename(&pins, &gone).unwrap();
    std::fs::remove_dir_all(&gone).unwrap();
    host.until(&id, |v| gate_of(v) == ("complete", true));
    assert_eq!(map(), Err(Errno::ACCESS), "a wish in a new gate");
    host.kill_agent();
    configure(&host, "");
    assert!(host.start(None));
    assert_eq!(map(), Ok(()), "a wish that nobody has any more");
}

/// An agent dies after it has attached its programs beside others: the next one unpins those.
fn crashed(place: &Place) {
    let pins = own_bpffs();
    let mut host = Host::new(place, "host");
    assert!(host.start(None));
    host.kill_agent();
    let gate = Gate::raise().unwrap();
    rename_set(&pins, "0000000000000000");
    assert!(gate.stands(), "an agent of another build keeps it up as well");
    assert!(!host.start(Some("die=gate.attach.after")));
    assert_eq!(sets(&pins).len(), 2, "{:?}", sets(&pins));
    assert!(host.start(None));
    assert_eq!(sets(&pins).len(), 1, "{:?}", sets(&pins));
    assert!(gate.stands() && gate.missing().is_empty());
}
