//! Leases lost at large: the authority away under two hundred sessions, and the breaker that keeps
//! anything from being killed or deleted meanwhile.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use overfence::api::client::Client;
use overfence::kernel::clock;
use overfence::model::facts::Fact;
use overfence::model::ids::{HostId, LeaseId, SessionId};
use overfence::model::lease::HolderKind;
use overfence::model::time::{BootInstant, BootNs};
use overfence::model::view::{Opened, SessionView};
use overfence::model::workspace::{Acquire, Workspace};
use overfence::store::keys::Keys;
use serde_json::{Value, json};

use crate::agent_process::{Host, has, id_of};
use crate::host::{Place, Test, paced, paced_ttl};
use crate::rig;

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "takeovers_by_force_open_no_breaker", run: forced },
        Test { name: "i9_ten_seconds_without_authority_with_200_sessions", run: away },
        Test { name: "i4_the_breaker_stops_killing_and_deleting_until_reset", run: breaker },
        Test { name: "i8_a_crash_as_the_breaker_opens_leaves_it_open", run: crashed },
    ]
}

fn client(host: &Host) -> Client {
    Client::new(&host.dir.join("run/overfence.sock"), Some(Duration::from_secs(120))).unwrap()
}

/// Opens a session whose lease follows its init's signs, which the test gives.
fn open(client: &Client, workspace: &str, ttl: Duration) -> Opened {
    let wish = json!({
        "workspace": workspace, "holder": "process", "create": { "id": workspace },
        "ttl_ms": u64::try_from(ttl.as_millis()).unwrap(),
    });
    client.post("/v1/sessions", &wish).unwrap()
}

/// Signs of life of many sessions.
#[derive(Default)]
struct Beats {
    files: Mutex<Vec<File>>,
    over: AtomicBool,
}

impl Beats {
    fn add(&self, host: &Host, opened: &Opened) {
        let dir = host.dir.join("run/sessions").join(&opened.session.id);
        let file = File::create(dir.join("init.beat")).unwrap();
        file.write_all_at(&clock::now().0.to_ne_bytes(), 0).unwrap();
        self.files.lock().unwrap().push(file);
    }

    fn give(&self) {
        while !self.over.load(Ordering::Relaxed) {
            for file in &*self.files.lock().unwrap() {
                file.write_all_at(&clock::now().0.to_ne_bytes(), 0).unwrap();
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Ends the beats, also when something panics.
struct EndOf<'b>(&'b Beats);

impl Drop for EndOf<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Relaxed);
    }
}

const SESSIONS: usize = 200;
const CLAIMED: usize = 20;
const AWAY: Duration = Duration::from_secs(10);

fn away(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let beats = Beats::default();
    std::thread::scope(|scope| {
        scope.spawn(|| beats.give());
        let _end = EndOf(&beats);
        under_beats(&host, &beats);
    });
    host.stop();
}

/// The local deadline that a session sees.
fn deadline(host: &Host, id: &str) -> BootNs {
    let path = host.dir.join("run/sessions").join(id).join("inside/session.json");
    let shown: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    BootNs(shown["deadline"].as_u64().unwrap())
}

fn under_beats(host: &Host, beats: &Beats) {
    let client = client(host);
    let ttl = paced(Duration::from_secs(6));
    let mut writers = vec![];
    let fleet: Vec<Opened> = (0..SESSIONS)
        .map(|i| {
            let opened = open(&client, &format!("w{i}"), ttl);
            beats.add(host, &opened);
            // One in ten has something to stop.
            if i % 10 == 0 {
                writers.push(rig::writer(
                    &opened.session,
                    "while :; do echo x >> f; sleep 0.02; done",
                ));
            }
            opened
        })
        .collect();
    let ids: BTreeSet<_> = fleet.iter().map(|o| o.session.id.clone()).collect();
    let all = || -> Vec<SessionView> { client.get("/v1/sessions").unwrap() };
    assert_eq!(all().iter().filter(|v| v.state == "ACTIVE" && v.generation == 1).count(), SESSIONS);

    // Whoever holds the database is the only one that the authority answers.
    let mut db = rusqlite::Connection::open(host.dir.join("state/overfence.db")).unwrap();
    db.busy_timeout(Duration::from_secs(60)).unwrap();
    let hold = db.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).unwrap();
    let gone = Instant::now();
    // What was renewed until now sets each deadline, once its answer was taken in; nothing renews it
    // from here on.
    std::thread::sleep(Duration::from_secs(1));
    let deadlines: Vec<_> = fleet.iter().map(|o| deadline(host, &o.session.id)).collect();
    let last = *deadlines.iter().max().unwrap();
    clock::sleep_until(last.plus(paced(Duration::from_secs(1))));
    let views = all();
    let (mut latest, mut proved) = (Duration::ZERO, 0);
    for (opened, deadline) in fleet.iter().zip(&deadlines) {
        let view = views.iter().find(|v| v.id == opened.session.id).unwrap();
        // One that took more than a moment is proved once its record is written, which the same
        // silence holds up; the kernel says of all of them what it says.
        if let Some(proof) = view.facts.iter().find(|f| f.fact == Fact::Frozen) {
            assert!(BootNs(proof.boot_ns) >= *deadline, "fenced before its deadline: {view:#?}");
            latest = latest.max(BootNs(proof.boot_ns).since(*deadline));
            proved += 1;
        }
        assert!(view.loss.as_deref().unwrap_or_default().contains("doubt"), "{view:#?}");
        let cgroup = view.cgroup.path().unwrap();
        let events = std::fs::read_to_string(cgroup.join("cgroup.events")).unwrap();
        assert!(events.contains("frozen 1") || events.contains("populated 0"), "{events}");
    }
    eprintln!(
        "{SESSIONS} frozen, {proved} proved at once, the latest {latest:?} after its deadline"
    );
    assert!(proved >= SESSIONS / 2, "{proved} proved");
    assert!(latest < paced(Duration::from_secs(1)), "{latest:?}");
    // Half of them go for doubt: the breaker is open, and the authority is what it waits for.
    let shown = host.must(&["breaker", "show"]);
    assert_eq!((&shown["open"], &shown["closes_by_itself"]), (&true.into(), &true.into()));
    assert!(shown["lost"].as_u64().unwrap() > SESSIONS as u64 / 2, "{shown}");

    // Others claim some of the workspaces meanwhile, as the authority would have it of another host.
    let key = Keys::open(&host.dir.join("state/keys"), false).unwrap().record;
    for opened in &fleet[..CLAIMED] {
        claim(&hold, &key, &opened.session);
    }
    std::thread::sleep(AWAY.saturating_sub(gone.elapsed()));
    hold.commit().unwrap();

    let begun = Instant::now();
    let claimed: BTreeSet<_> = fleet[..CLAIMED].iter().map(|o| o.session.id.clone()).collect();
    let back = |v: &SessionView| v.state == "ACTIVE" && v.generation == 2 && v.work.is_none();
    let views = loop {
        let views = all();
        if views.iter().filter(|v| back(v)).count() == SESSIONS - CLAIMED {
            break views;
        }
        let late = begun.elapsed() > paced(Duration::from_secs(60));
        assert!(!late, "{:#?}\n{}", views.iter().find(|v| !back(v)), host.log());
        std::thread::sleep(Duration::from_millis(50));
    };
    eprintln!("{} back {:?} after the authority", SESSIONS - CLAIMED, begun.elapsed());
    let resumed: BTreeSet<_> = views.iter().filter(|v| back(v)).map(|v| v.id.clone()).collect();
    assert_eq!(resumed, &ids - &claimed, "who was claimed is not back");
    // The answers close the breaker; nothing was killed under it, and nobody was asked.
    while host.must(&["breaker", "show"])["open"] == true {
        assert!(begun.elapsed() < paced(Duration::from_secs(60)), "{}", host.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(Duration::from_secs(3));
    for view in all().iter().filter(|v| claimed.contains(&v.id)) {
        assert_eq!((view.state.as_str(), view.generation), ("PRESERVED", 1), "{view:#?}");
        let frozen = view.facts.iter().any(|f| f.fact == Fact::Frozen);
        let freeze = view.cgroup.path().unwrap().join("cgroup.freeze");
        assert!(frozen && std::fs::read_to_string(freeze).unwrap().starts_with('1'), "{view:#?}");
    }
    for child in &mut writers {
        assert!(child.try_wait().unwrap().is_none(), "a writer was ended");
        child.kill().unwrap();
    }
    // The frozen among them end once they may.
    for view in all().iter().filter(|v| claimed.contains(&v.id)) {
        host.must(&["fence", &view.id, "--to", "killed", "--wait=60s"]);
    }
    reap(writers);
    let kinds = breaker_entries(host);
    assert_eq!(kinds.last().map(String::as_str), Some("breaker_closed"), "{kinds:?}");
    assert!(kinds[..kinds.len() - 1].iter().all(|k| k == "breaker_opened"), "{kinds:?}");
}

fn claim(db: &rusqlite::Connection, key: &overfence::store::keys::RecordKey, s: &SessionView) {
    let record: String = db
        .query_row("SELECT record FROM workspaces WHERE id = ?", [&s.workspace], |r| r.get(0))
        .unwrap();
    let known: Workspace = serde_json::from_str(&record).unwrap();
    let wish = Acquire {
        workspace: s.workspace.parse().unwrap(),
        lease: LeaseId::fresh(),
        owner: "other".parse().unwrap(),
        host: HostId::fresh(),
        session: SessionId::fresh(),
        holder: HolderKind::Beat,
        ttl: Duration::from_secs(3600),
        max_lifetime: Duration::from_secs(3600),
        force: Some("claimed".to_owned()),
        only_at: None,
        seen: Default::default(),
    };
    let now = BootInstant { boot: clock::boot_id().unwrap(), ns: clock::now() };
    let (claimed, _) = known.acquire(&wish, &now).unwrap();
    let text = serde_json::to_string(&claimed).unwrap();
    let mac = key.seal("workspaces", &s.workspace, &text);
    let change = "UPDATE workspaces SET record = ?, mac = ? WHERE id = ?";
    assert_eq!(db.execute(change, (&text, mac, &s.workspace)).unwrap(), 1);
}

/// What the evidence has of the breaker, in order.
fn breaker_entries(host: &Host) -> Vec<String> {
    let entries = host.must(&["evidence", "show"]);
    let kinds = entries.as_array().unwrap().iter().map(|e| e["kind"].as_str().unwrap().to_owned());
    kinds.filter(|kind| kind.starts_with("breaker_")).collect()
}

const FEW: usize = 12;

/// A dozen sessions whose holders say nothing, each with a writer; frozen when this returns.
fn silent_dozen(host: &Host) -> (Vec<SessionView>, Vec<std::process::Child>) {
    let client = client(host);
    let ttl = paced(Duration::from_secs(4));
    let fleet: Vec<_> = (0..FEW).map(|i| open(&client, &format!("w{i}"), ttl).session).collect();
    let writers = fleet.iter().map(|s| rig::writer(s, "echo kept > f; exec sleep 1000")).collect();
    (fleet, writers)
}

fn until_open(host: &Host) -> Value {
    let begun = Instant::now();
    loop {
        let shown = host.must(&["breaker", "show"]);
        if shown["open"] == true {
            return shown;
        }
        let views = host.must(&["session", "list"]);
        assert!(begun.elapsed() < paced(Duration::from_secs(30)), "{views:#}\n{}", host.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn reap(writers: Vec<std::process::Child>) {
    for mut child in writers {
        child.wait().unwrap();
    }
}

fn alive(child: &std::process::Child) -> bool {
    Path::new("/proc").join(child.id().to_string()).join("cwd").exists()
}

fn breaker(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    assert_eq!(host.must(&["breaker", "show"])["open"], false);
    let unasked = host.run(&["breaker", "reset"]);
    assert_eq!(unasked.status.code(), Some(2), "a reason is wanted: {unasked:?}");
    let (fleet, writers) = silent_dozen(&host);
    let shown = until_open(&host);
    assert_eq!(shown["closes_by_itself"], false, "silent holders are no doubt: {shown}");
    let (first, second) = (&fleet[0].id, &fleet[1].id);
    for id in [first, second] {
        host.until(id, |v| has(v, "frozen"));
    }
    let status = host.must(&["status"]);
    assert!(status["breaker"].as_str().unwrap().contains("lost their leases"), "{status}");
    let metrics = host.http("GET", "/metrics", "").body;
    for line in ["overfence_breaker_open 1", "overfence_breaker_openings_total 1"] {
        assert!(metrics.lines().any(|l| l == line), "no {line}");
    }
    let upper = fleet[1].merged.path().unwrap().with_file_name("upper");
    assert_eq!(std::fs::read_to_string(upper.join("f")).unwrap(), "kept\n");

    let waits = |host: &Host, writers: &[std::process::Child]| {
        let kill = host.run(&["fence", first, "--to", "killed", "--wait=2s"]);
        let text = String::from_utf8_lossy(&kill.stderr);
        assert_eq!(kill.status.code(), Some(8), "{kill:?}");
        assert!(text.contains("the breaker is open"), "{text}");
        assert!(alive(&writers[0]), "killed");
        let gone = host.run(&["preserved", "discard", second, "--yes"]);
        assert_ne!(gone.status.code(), Some(0), "{gone:?}");
        std::thread::sleep(Duration::from_millis(2500));
        assert!(alive(&writers[1]) && upper.join("f").exists(), "removed");
        assert_eq!(host.must(&["session", "inspect", second])["state"], "DELETING");
    };
    waits(&host, &writers);
    // It stops no freeze and no renewal, and a good lease opens and closes; its removal waits.
    let good = host.open("good", "60s");
    let good = good["session"]["id"].as_str().unwrap().to_owned();
    host.must(&["fence", &good, "--wait=10s"]);
    under_an_open_breaker(&host);
    // It is durable.
    host.kill_agent();
    assert!(host.start(None));
    let again = host.must(&["breaker", "show"]);
    assert_eq!((&again["open"], &again["why"]), (&true.into(), &shown["why"]));
    assert_eq!(host.must(&["session", "inspect", second])["state"], "DELETING");
    assert!(alive(&writers[0]) && alive(&writers[1]) && upper.join("f").exists());

    let closed = host.must(&["breaker", "reset", "--reason", "the network is mended"]);
    assert_eq!(closed["open"], false);
    assert_eq!(host.must(&["breaker", "reset", "--reason", "again"])["open"], false);
    // What a person decided about is not judged again.
    host.kill_agent();
    assert!(host.start(None));
    assert_eq!(host.must(&["breaker", "show"])["open"], false);
    host.until(first, |v| has(v, "killed"));
    let begun = Instant::now();
    while upper.exists() || alive(&writers[1]) {
        assert!(begun.elapsed() < paced(Duration::from_secs(30)), "not removed: {}", host.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    let entries = host.must(&["evidence", "show"]);
    let closing = entries.as_array().unwrap().iter().find(|e| e["kind"] == "breaker_closed");
    let closing = closing.expect("it is in the evidence");
    assert_eq!(closing["detail"]["reason"], "the network is mended");
    assert!(closing["actor"].as_str().unwrap().starts_with("uid 0"), "{closing}");
    assert_eq!(breaker_entries(&host), ["breaker_opened", "breaker_closed"]);
    assert_eq!(host.must(&["evidence", "verify"])["ok"], true);
    // The writers that are left are ended, and reaped by who started them.
    for session in &fleet[2..] {
        host.must(&["fence", &session.id, "--to", "killed", "--wait=30s"]);
    }
    reap(writers);
}

/// What is published is published, and what was never opened is in nobody's way.
fn under_an_open_breaker(host: &Host) {
    let ran =
        host.run(&["run", "-w", "r", "--create", "-o", "json", "--", "sh", "-c", "echo 1 > f"]);
    assert_eq!(ran.status.code(), Some(0), "{ran:?}");
    assert!(String::from_utf8_lossy(&ran.stderr).contains("the breaker is open"), "{ran:?}");
    let told: Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!((&told["outcome"], &told["version"]), (&"published".into(), &1.into()), "{told}");
    let status = host.must(&["workspace", "status", "r"]);
    assert_eq!(status["version"], 1);
    let layer = status["head"][0].as_str().unwrap().trim_start_matches("sha256:");
    let place = host.dir.join("state/layers").join(layer);
    let away = host.dir.join("away");
    std::fs::rename(&place, &away).unwrap();
    let failed = host.run(&["session", "open", "-w", "r"]);
    assert!(!failed.status.success(), "{failed:?}");
    std::fs::rename(&away, &place).unwrap();
    let opened = host.must(&["session", "open", "-w", "r"]);
    let merged = crate::agent_process::path_of(&opened["session"], "merged");
    assert_eq!(std::fs::read_to_string(merged.join("f")).unwrap(), "1\n");
    let sessions = host.must(&["session", "list"]);
    let never = sessions.as_array().unwrap().iter();
    let never: Vec<_> = never.filter(|s| s["disposition"]["by"] == "never_opened").collect();
    assert_eq!(never, Vec::<&Value>::new());
    host.must(&["fence", &id_of(&opened), "--wait=10s"]);
}

/// Killed on either side of the record: the next agent finds the losses, or the record.
fn crashed(place: &Place) {
    for point in ["store.breaker.before", "store.breaker.after"] {
        let mut host = Host::new(place, point.rsplit('.').next().unwrap());
        assert!(host.start(Some(&format!("die={point}"))));
        let (fleet, writers) = silent_dozen(&host);
        let begun = Instant::now();
        while !host.dead() {
            assert!(begun.elapsed() < paced(Duration::from_secs(30)), "{point} was not passed");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(host.start(None));
        let shown = until_open(&host);
        assert!(shown["lost"].as_u64().unwrap() >= 10, "{shown}");
        assert!(writers.iter().all(alive), "{point}: something was killed");
        host.must(&["breaker", "reset", "--reason", "test"]);
        for session in &fleet {
            host.must(&["fence", &session.id, "--to", "killed", "--wait=30s"]);
        }
        reap(writers);
        host.stop();
    }
}

/// Each of them was asked for: nothing is wrong at large, however many there are.
fn forced(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let first = id_of(&host.open("w", &paced_ttl(60)));
    let force = ["session", "open", "-w", "w", "--force", "--ttl", "60s"];
    let opened: Vec<_> = (0..12).map(|_| id_of(&host.must(&force))).collect();
    let view = host.until(&first, |view| view["state"] == "PRESERVED");
    assert!(view["loss"].as_str().unwrap().ends_with(", forced by uid 0"), "{view:#}");
    assert_eq!(host.must(&["breaker", "show"])["open"], false);
    for view in host.must(&["session", "list"]).as_array().unwrap() {
        let id = view["id"].as_str().unwrap();
        match id == opened[11] {
            true => host.must(&["session", "close", id]),
            false => host.must(&["preserved", "discard", id, "--yes"]),
        };
    }
    host.stop();
}
