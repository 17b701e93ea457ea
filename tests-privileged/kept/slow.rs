//! A freeze that takes long: one large write is under way as the lease is lost.

use super::*;

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "a_slow_freeze_names_who_holds_it_up_and_delays_nobody", run: waited },
        Test { name: "a_slow_freeze_is_cut_where_policy_says_kill", run: killed },
    ]
}

/// Starts one `writev` of up to 1 GiB in the session's cgroup, and sees it begin.
fn one_large_write(session: &Value) -> Child {
    let child = Command::new("/bin/sh")
        .args(["-c", "echo $$ > \"$1\"/cgroup.procs && shift && exec \"$@\"", "sh"])
        .arg(path_of(session, "cgroup"))
        .arg(std::env::current_exe().unwrap())
        .arg(path_of(session, "merged").join("held"))
        .env("OVERFENCE_TEST_WRITER", "large-write")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait("the write begins", || size(session) > 0);
    child
}

/// As `host_with` has it.
const FREEZE_DEADLINE: Duration = Duration::from_millis(200);

fn whole() -> u64 {
    crate::writers::large_write()
}

fn waited(place: &Place) {
    let mut host = host(place, "10m");
    let slow = host.open("slow", &paced_ttl(60));
    let (id, session) = (id_of(&slow), &slow["session"]);
    let other = host.open("other", &paced_ttl(60));
    let mut beside = writer(&other["session"]);
    let mut child = one_large_write(session);
    host.must(&["lease", "revoke", session["lease"].as_str().unwrap(), "--reason", "test"]);
    let revoked = Instant::now();

    // Another session is stopped meanwhile as ever.
    let fenced =
        host.must(&["fence", &id_of(&other), "--to", "frozen", "--reason", "test", "--wait"]);
    let facts = fenced["session"]["facts"].as_array().unwrap();
    let took = facts.iter().find(|f| f["fact"] == "frozen").unwrap()["took_us"].as_u64().unwrap();
    assert!(took < paced(Duration::from_millis(200)).as_micros() as u64, "{took} us");
    assert!(size(session) < whole(), "the call was over before anything was shown");

    // Who holds it up is named, with what it is at.
    let view = host.until(&id, |v| !v["blockers"].as_array().unwrap().is_empty());
    eprintln!("named {:?} after the loss; the other froze in {took} us", revoked.elapsed());
    assert!(!has(&view, "frozen") && view["state"] == "FENCING", "{view:#}");
    let blocker = &view["blockers"][0];
    assert_eq!(blocker["pid"], child.id(), "{view:#}");
    assert!(["R", "D", "S"].contains(&blocker["state"].as_str().unwrap()), "{blocker:#}");
    let call = blocker["syscall"].as_str().unwrap();
    eprintln!("{blocker}");
    // One that runs at this moment is not told its number.
    let writev = format!("{} ", libc::SYS_writev);
    assert!(call.starts_with(&writev) || call == "running", "{blocker:#}");
    // Who sleeps does so somewhere; who was woken meanwhile has no such place.
    let (state, place) = (&blocker["state"], blocker["wchan"].as_str().unwrap());
    let awake = *state == "R" || call == "running";
    assert!(awake || !["", "0"].contains(&place), "{blocker:#}");
    // Not before `freeze_deadline`, and not long after it.
    let entries = host.must(&["evidence", "show", "--session", &id]);
    let at = |event: &str| {
        let entries = entries.as_array().unwrap().iter();
        let entry = entries.clone().find(|e| e["detail"]["event"]["event"] == event).expect(event);
        Duration::from_nanos(entry["boot_ns"].as_u64().unwrap())
    };
    let late = at("freeze_late") - at("lease_lost");
    eprintln!("told as late {late:?} after the loss");
    assert!(late >= FREEZE_DEADLINE, "{late:?}");
    assert!(late < FREEZE_DEADLINE + paced(Duration::from_secs(1)), "{late:?}");
    assert!(host.metric("fences_total{fact=\"frozen\",result=\"late\"}") >= 1);

    // By itself it freezes when the call has ended, and all of that landed before.
    let view = host.until(&id, |v| has(v, "frozen"));
    eprintln!("frozen {:?} after the loss", revoked.elapsed());
    assert_eq!(size(session), whole());
    assert_eq!(view["blockers"], serde_json::json!([]));
    assert!(told(&host, &id, "freeze_late").0 >= 1);
    // Read-only syncs what the call wrote.
    host.until(&id, |v| v["state"] != "FENCING");
    for id in [id, id_of(&other)] {
        host.must(&["preserved", "discard", &id, "--yes"]);
    }
    child.wait().unwrap();
    beside.wait().unwrap();
    host.stop();
}

fn killed(place: &Place) {
    let mut host = host_with(place, "10m", "on_slow_freeze = \"kill\"\n");
    let slow = host.open("slow", &paced_ttl(60));
    let (id, session) = (id_of(&slow), &slow["session"]);
    let mut child = one_large_write(session);
    host.must(&["lease", "revoke", session["lease"].as_str().unwrap(), "--reason", "test"]);
    let revoked = Instant::now();
    let view = host.until(&id, |v| has(v, "killed"));
    let took = revoked.elapsed();
    child.wait().unwrap();
    let landed = size(session);
    eprintln!("killed {took:?} after the loss, {landed} of {} bytes landed", whole());
    assert!(landed < whole(), "the call ran to its end");
    assert!(!has(&view, "frozen"), "it never froze: {view:#}");
    assert_eq!(told(&host, &id, "freeze_late").0, 1);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(size(session), landed, "it lands on");
    host.must(&["preserved", "discard", &id, "--yes"]);
    host.stop();
}
