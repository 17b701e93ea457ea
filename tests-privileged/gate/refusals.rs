//! What the gate tells of what it refused, and what it counts of what nobody was told.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::MetadataExt as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use overfence::kernel::clock;
use overfence::kernel::gate::{Gate, Refusal, Refusals};
use overfence::model::ids::SessionId;
use overfence::model::time::BootNs;
use rustix::io::Errno;
use serde_json::Value;

use super::{LEASE, Scene, deadline_of, own_bpffs, session, write};
use crate::agent_process::{Host, has};
use crate::host::{Place, Test, paced, paced_ttl};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "a_refusal_is_told_and_counted", run: told },
        Test { name: "a_question_takes_no_refusals_place", run: asked },
        Test { name: "what_nobody_was_told_is_counted", run: lost },
        Test { name: "refusals_are_told_once_the_gate_is_back", run: back },
    ]
}

/// One refused write of this process, and what `session inspect` says was told of it.
fn one(host: &Host, id: &str, file: &File) -> ([BootNs; 2], Value) {
    let begun = clock::now();
    assert_eq!(write(file), Err(Errno::ROFS));
    let ended = clock::now();
    let view = host.until(id, |v| !v["gate"]["last"].is_null());
    assert_eq!((&view["gate"]["told"], &view["gate"]["lost"]), (&true.into(), &0.into()));
    ([begun, ended], view["gate"]["last"].clone())
}

/// The programs' clock and ours, and how far `shut` goes back.
const APART: Duration = Duration::from_millis(2);

fn within(value: &Value, from: BootNs, to: BootNs) {
    let at = BootNs(value.as_u64().unwrap());
    assert!(from.minus(APART) <= at && at <= to.plus(APART), "{at:?} is not in {from:?}..{to:?}");
}

/// Who, what, when, and which deadline had passed: of a lease that ran out, and of one that was revoked.
fn told(place: &Place) {
    own_bpffs();
    let mut host = Host::new(place, "host");
    assert!(host.start(None));
    let mut follow = host.verb(&["events", "--follow"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(follow.stdout.take().unwrap()).lines();
    // The test is ended by the suite if it does not come.
    let mut next = move || {
        let entries = lines.by_ref().map(|line| serde_json::from_str::<Value>(&line.unwrap()));
        entries.map(Result::unwrap).find(|e| e["kind"] == "write_refused").unwrap()
    };
    let command = std::fs::read_to_string("/proc/self/comm").unwrap();
    let mut judge = |id: &str, file: &File, last: &Value, [begun, ended]: [BootNs; 2]| {
        assert_eq!(last["op"], "write", "{last:#}");
        assert_eq!(last["pid"], std::process::id(), "{last:#}");
        assert_eq!(last["command"], command.trim());
        assert_eq!(last["inode"], file.metadata().unwrap().ino(), "{last:#}");
        assert_eq!(last["generation"], 1);
        within(&last["boot_ns"], begun, ended);
        // The same is in the evidence, once, under the session that it is of.
        let entry = next();
        assert_eq!(entry["session"], id, "{entry:#}");
        assert_eq!(&entry["detail"]["call"], last, "{entry:#}");
        assert_eq!(entry["detail"]["refused"]["write"], 1, "{entry:#}");
    };

    let (id, _, file) = session(&host, &paced_ttl(2));
    let deadline = deadline_of(&host, &id);
    host.until(&id, |v| v["state"] == "PRESERVED" && has(v, "gated"));
    let (when, last) = one(&host, &id, &file);
    assert_eq!(last["deadline"], deadline.0, "the one that passed");
    judge(&id, &file, &last, when);
    drop(file);
    host.must(&["preserved", "discard", &id, "--yes"]);

    let opened = host.must(&["session", "open", "-w", "v", "--create", "--ttl", &paced_ttl(600)]);
    let id = crate::agent_process::id_of(&opened);
    let merged = crate::agent_process::path_of(&opened["session"], "merged");
    let file = File::create(merged.join("file")).unwrap();
    let deadline = deadline_of(&host, &id);
    let (begun, lease) = (clock::now(), opened["session"]["lease"].as_str().unwrap());
    host.must(&["lease", "revoke", lease, "--reason", "test"]);
    host.until(&id, |v| v["state"] == "PRESERVED" && has(v, "gated"));
    let ended = clock::now();
    assert!(ended < deadline, "the lease ran out by itself");
    let (when, last) = one(&host, &id, &file);
    within(&last["deadline"], begun, ended);
    judge(&id, &file, &last, when);

    // Others follow at once: they are counted, and once a minute is enough for the evidence.
    for _ in 0..20 {
        assert_eq!(write(&file), Err(Errno::ROFS));
        std::thread::sleep(Duration::from_millis(20));
    }
    host.until(&id, |v| v["gate"]["last"]["boot_ns"] != last["boot_ns"]);
    let entries = host.must(&["evidence", "show", "--session", &id]);
    let told = |e: &&Value| e["kind"] == "write_refused";
    let told = entries.as_array().unwrap().iter().filter(told).count();
    assert_eq!(told, 1, "{entries:#}");
    assert_eq!(host.metric("writes_refused_total{op=\"write\"}"), 22);
    assert_eq!(host.metric("write_refusals_lost_total"), 0);
    follow.kill().unwrap();
    follow.wait().unwrap();
}

/// What there is to take.
fn all(refusals: &mut Refusals) -> Vec<Refusal> {
    std::iter::from_fn(|| refusals.next(Duration::from_millis(1)).unwrap()).collect()
}

/// The agent's own probe, and everybody's access(2), are answered and counted. They are no writes, and a
/// write just after them is told as ever.
fn asked(place: &Place) {
    own_bpffs();
    let scene = Scene::new(place);
    scene.open();
    let file = File::create(scene.merged().join("file")).unwrap();
    scene.shut();
    let mut refusals = scene.gate.refusals().unwrap().expect("nobody else reads here");
    assert_eq!(all(&mut refusals), [], "the probe of the one who entered it");
    let root = &scene.mounted.as_ref().unwrap().root;
    let tick = || clock::now().0 >> 27;
    // All of it within one of the spans in which one refusal is told at most.
    for _ in 0..100 {
        let first = tick();
        while tick() == first {
            std::hint::spin_loop();
        }
        // The programs' clock may be a little behind.
        std::thread::sleep(Duration::from_millis(2));
        let begun = tick();
        assert!(scene.entry().prove(root).unwrap().is_some());
        let access = rustix::fs::access(scene.merged().join("file"), rustix::fs::Access::WRITE_OK);
        assert_eq!(access, Err(Errno::ROFS));
        assert_eq!((write(&file), write(&file)), (Err(Errno::ROFS), Err(Errno::ROFS)));
        let same = begun == tick();
        let told = all(&mut refusals);
        if same {
            let told: Vec<_> = told.iter().map(|r| (r.op, r.pid, r.generation)).collect();
            assert_eq!(told, [("write", std::process::id(), LEASE)]);
            return;
        }
    }
    panic!("never within one span");
}

/// How many refusals the ring holds: its size but one, by a header and `struct refusal`.
const RING: u64 = (65536 - 1) / (8 + 72);

/// Nobody reads: the ring fills, and what it has no room for is counted. The next agent shows all of it,
/// and what it reads of sessions that are not its own.
fn lost(place: &Place) {
    own_bpffs();
    let scenes: Vec<_> = (0..24)
        .map(|n| {
            let dir = place.dir.join(format!("scene-{n}"));
            std::fs::create_dir(&dir).unwrap();
            let place = Place { dir, cgroup: place.cgroup.clone(), binary: place.binary.clone() };
            let scene = Scene::new(&place);
            scene.open();
            let file = File::create(scene.merged().join("file")).unwrap();
            scene.shut();
            (file, scene)
        })
        .collect();
    let gate = Gate::raise().unwrap();
    let end = clock::now().plus(paced(Duration::from_secs(60)));
    while gate.lost() < 20 {
        assert!(clock::now() < end, "the ring does not fill");
        for (file, _) in &scenes {
            assert_eq!(write(file), Err(Errno::ROFS));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let before = gate.lost();
    let mut host = Host::new(place, "host");
    assert!(host.start(None));
    shows(&host, before + RING);
    assert_eq!(gate.lost(), before + RING);
    let (id, _, file) = session(&host, &paced_ttl(600));
    let view = host.must(&["session", "inspect", &id]);
    assert_eq!(view["gate"]["lost"], before + RING, "{view:#}");
    let plain = Command::new(&host.binary)
        .args(["session", "inspect", &id])
        .env("OVERFENCE_SOCKET", host.dir.join("run/overfence.sock"))
        .output()
        .unwrap();
    let plain = String::from_utf8(plain.stdout).unwrap();
    let line = format!("{} refused call(s) of this host were told to nobody", before + RING);
    assert!(plain.contains(&line), "{plain}");
    assert!(host.log().contains("refusal(s) by the lease gate are counted and not told"));
    // One of its own is no loss.
    host.must(&["fence", &id, "--reason", "test"]);
    host.until(&id, |v| has(v, "gated"));
    assert_eq!(write(&file), Err(Errno::ROFS));
    host.until(&id, |v| v["gate"]["last"]["op"] == "write");
    assert_eq!(host.metric("write_refusals_lost_total"), before + RING);
    // The next agent counts from the same.
    host.kill_agent();
    assert!(host.start(None));
    shows(&host, before + RING);
}

/// Waits for the metric of what nobody was told.
fn shows(host: &Host, n: u64) {
    let end = clock::now().plus(paced(Duration::from_secs(30)));
    loop {
        let shown = host.metric("write_refusals_lost_total");
        if shown == n {
            return;
        }
        assert!(shown < n && clock::now() < end, "{shown}, not {n}: {}", host.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// For a while the gate cannot be put up again. Who tells of refusals waits for it.
fn back(place: &Place) {
    let pins = own_bpffs();
    let mut host = Host::new(place, "host");
    let config = std::fs::read_to_string(&host.config).unwrap();
    std::fs::write(&host.config, format!("{config}[preserve]\nsweep = \"1s\"\n")).unwrap();
    assert!(host.start(None));
    let (id, _, file) = session(&host, &paced_ttl(600));
    let strange = pins.join("layout-99");
    std::fs::create_dir(&strange).unwrap();
    std::fs::remove_dir_all(pins.join("layout-2")).unwrap();
    host.until(&id, |v| v["gate"]["state"] == "absent");
    // Longer than who reads refusals waits for the next.
    std::thread::sleep(Duration::from_secs(3));
    std::fs::remove_dir(&strange).unwrap();
    host.until(&id, |v| v["gate"]["state"] == "complete" && v["gate"]["told"] == true);
    host.must(&["fence", &id, "--reason", "test"]);
    host.until(&id, |v| has(v, "gated"));
    assert_eq!(write(&file), Err(Errno::ROFS));
    let view = host.until(&id, |v| !v["gate"]["last"].is_null());
    assert_eq!(view["gate"]["last"]["pid"], std::process::id(), "{view:#}");
    let gate = Gate::raise().unwrap();
    let entry = gate.find_by_id(id.parse::<SessionId>().unwrap());
    assert!(entry.is_some(), "it was entered anew");
}
