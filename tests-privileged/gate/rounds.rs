//! One agent and its keeper, and sessions with a writer each, whose deadlines pass time and again while
//! agent and keeper are killed, stopped and starved in turn. A deadline is judged by its last value: what
//! the keeper's table said when nobody was left to move it.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use overfence::kernel::clock;
use overfence::kernel::deadlines::{Entry, Snapshot};
use overfence::model::ids::SessionId;
use overfence::model::time::BootNs;
use serde_json::{Value, json};

use super::stamps::{Seen, timed};
use super::ways::{Call, Way, ways};
use crate::agent_process::{Host, has, id_of, path_of};
use crate::host::{Place, paced, rounds};

const SESSIONS: usize = 64;
/// Emulated by one processor a round takes more than a minute, and a quarter of them is what there is time
/// for unless `OVERFENCE_ROUNDS` says more; so are the writers that do not rest.
const ROUNDS: u64 = 16;
const EMULATED: u64 = 4;
/// Emulated, a renewal of all of them takes its time.
const TTL: Duration = Duration::from_secs(5);
/// Those of the writers that do not rest before a deadline: their files do not grow by it.
const RESTLESS: [&str; SESSIONS / 8] = [
    "write",
    "pwritev2",
    "open for writing",
    "rename exchange",
    "chmod",
    "utimes",
    "setxattr",
    "file flags",
];
/// As many calls are kept on either side of a deadline: more than a millisecond takes.
const KEPT: usize = 4096;
const MS: u64 = 1_000_000;

/// A session, and until when its writer may write.
struct Session {
    id: SessionId,
    token: String,
    merged: PathBuf,
    /// The latest that the table showed in this round.
    deadline: AtomicU64,
    /// How often it moved in this round.
    moved: AtomicU64,
    /// Held by an outsider: the superblock stays writable, so that the gate alone refuses.
    _held: File,
}

/// What the writers know: the round, odd while it is judged.
#[derive(Default)]
struct Course {
    round: AtomicU64,
    over: AtomicBool,
}

/// A session's in one round.
#[derive(Clone, Copy)]
struct Deadlines {
    /// What the table showed in the end.
    last: u64,
    /// What the gate has at least. It is moved after the table: an agent that is killed in between moves
    /// one alone.
    gate: u64,
}

/// A writer's calls in one round.
#[derive(Default)]
struct Calls {
    /// When the last ones that were accepted began, and how many came before them.
    accepted: VecDeque<u64>,
    before: u64,
    /// When the first ones that were refused had ended, and how many came after them.
    refused: Vec<u64>,
    after: u64,
}

impl Calls {
    fn add(&mut self, accepted: bool, begun: u64, ended: u64) {
        if accepted {
            self.accepted.push_back(begun);
            if self.accepted.len() > KEPT {
                self.accepted.pop_front();
                self.before += 1;
            }
        } else if self.refused.len() < KEPT {
            self.refused.push(ended);
        } else {
            self.after += 1;
        }
    }

    fn judge(&self, what: &str, deadlines: Deadlines, seen: &mut Seen) {
        let Deadlines { last: deadline, gate } = deadlines;
        let early = self.refused.iter().filter(|ended| **ended < gate);
        if let Some(first) = early.clone().next() {
            let last = self.accepted.back().map(|begun| (deadline - begun) / MS);
            println!(
                "{what}: {} refused early, the first {} ms before its deadline, the last accepted \
                 {last:?} ms before",
                early.count(),
                (deadline - first) / MS
            );
        }
        self.accepted.iter().for_each(|begun| seen.count(true, *begun, *begun, deadline));
        self.refused.iter().for_each(|ended| seen.count(false, *ended, *ended, gate));
        seen.accepted += self.before;
        seen.refused += self.after;
    }
}

/// Calls until all is over, in each round by its own list.
fn calls(course: &Course, session: &Session, restless: bool, mut call: Call) -> Vec<Calls> {
    let mut all = vec![];
    while !course.over.load(Ordering::SeqCst) {
        let number = course.round.load(Ordering::SeqCst);
        if number.is_multiple_of(2) {
            // Many of them: who fences and readmits wants the processor.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        }
        let round = usize::try_from(number / 2).unwrap();
        all.resize_with((round + 1).max(all.len()), Calls::default);
        let (deadline, now) = (session.deadline.load(Ordering::SeqCst), clock::now().0);
        if !restless && deadline > now + 40 * MS {
            // It wakes at each deadline that was, and finds that it was moved.
            clock::sleep_until(BootNs(deadline - 30 * MS));
        } else if now > deadline + 60 * MS {
            std::thread::sleep(Duration::from_millis(20));
        }
        let (accepted, begun, ended) = timed(&mut call);
        // One that saw the round end says nothing.
        if course.round.load(Ordering::SeqCst) == number {
            all[round].add(accepted, begun, ended);
        }
    }
    all
}

fn open(host: &Host, n: usize) -> Session {
    let ttl = u64::try_from(paced(TTL).as_millis()).unwrap();
    let name = format!("w{n}");
    let wish = json!({ "workspace": name, "create": { "id": name }, "ttl_ms": ttl });
    let answer = host.http("POST", "/v1/sessions", &wish.to_string());
    let opened: Value = serde_json::from_str(&answer.body).unwrap();
    assert_eq!(answer.status, 201, "{opened:#}");
    assert_eq!(super::gate_of(&opened["session"]), ("complete", false), "{opened:#}");
    let merged = path_of(&opened["session"], "merged");
    // One of the ways is to open it.
    std::fs::write(merged.join("lower-file"), b"lower").unwrap();
    Session {
        id: id_of(&opened).parse().unwrap(),
        token: opened["token"].as_str().unwrap().to_owned(),
        _held: File::create(merged.join("held")).unwrap(),
        merged,
        deadline: AtomicU64::new(0),
        moved: AtomicU64::new(0),
    }
}

/// Gives a sign of life for all, again and again, until it is told to end.
fn beats(host: &Host, sessions: &[Session], enough: &AtomicBool) {
    while !enough.load(Ordering::SeqCst) {
        for session in sessions {
            let body = json!({ "token": session.token }).to_string();
            // One that is not readmitted yet is refused.
            host.http("POST", &format!("/v1/sessions/{}/beat", session.id), &body);
        }
        std::thread::sleep(paced(Duration::from_millis(20)));
    }
}

/// Takes in what the keeper's table says.
fn look(table: &Snapshot, sessions: &HashMap<SessionId, &Session>) {
    for entry in table.iter() {
        let Entry::Valid(entry) = entry else { panic!("{entry:?}") };
        let Some(session) = sessions.get(&entry.session) else { continue };
        let before = session.deadline.fetch_max(entry.deadline.0, Ordering::SeqCst);
        if before < entry.deadline.0 {
            session.moved.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// Waits for all sessions to be so.
fn all(host: &Host, what: &str, fits: impl Fn(&Value) -> bool) {
    until(host, what, || {
        let list = host.http("GET", "/v1/sessions", "").body;
        let views: Vec<Value> = serde_json::from_str(&list).unwrap();
        assert_eq!(views.len(), SESSIONS);
        views.iter().all(&fits)
    });
}

fn readmit(host: &Host, sessions: &[Session]) {
    let wish = json!({ "authorised_by": "op", "reason": "test" }).to_string();
    let wish = &wish;
    std::thread::scope(|scope| {
        for some in sessions.chunks(SESSIONS / 4) {
            scope.spawn(move || {
                for session in some {
                    let place = format!("/v1/sessions/{}/readmit", session.id);
                    let answer = host.http("POST", &place, wish);
                    assert_eq!(answer.status, 200, "{}\n{}", answer.body, host.log());
                }
            });
        }
    });
}

/// All threads of a process get what nobody else wants of the processors.
fn starve(pid: u32) {
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let id: i32 = thread.unwrap().file_name().to_str().unwrap().parse().unwrap();
        let priority = libc::sched_param { sched_priority: 0 };
        // SAFETY: the structure is read during the call alone.
        let done = unsafe { libc::sched_setscheduler(id, libc::SCHED_IDLE, &raw const priority) };
        let fault = std::io::Error::last_os_error();
        // Some come and go.
        assert!(done == 0 || fault.raw_os_error() == Some(libc::ESRCH), "{fault}");
    }
}

/// From the last sign of life to the last deadline and a little longer.
fn pass(host: &mut Host, how: usize, look: &dyn Fn(), last: &dyn Fn() -> u64) {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        match how {
            0 => host.stop(),
            1 => host.signal(Signal::SIGSTOP),
            _ => {
                host.pids().into_iter().for_each(starve);
                for _ in 0..4 {
                    scope.spawn(|| {
                        while !over.load(Ordering::SeqCst) {
                            std::hint::spin_loop();
                        }
                    });
                }
            }
        }
        // Starved, it may yet move one of which it had a sign.
        while clock::now().0 < last() + 50 * MS {
            look();
            std::thread::sleep(Duration::from_millis(20));
        }
        over.store(true, Ordering::SeqCst);
    });
}

/// Agent and keeper act again.
fn again(host: &mut Host, how: usize) {
    if how == 1 {
        return host.signal(Signal::SIGCONT);
    }
    host.stop();
    host.start_keeper();
    assert!(host.start(None));
}

/// A writer's way, and whether it rests.
fn way_of(ways: &[Way], n: usize) -> (Way, bool) {
    let resting = SESSIONS - RESTLESS.len();
    match n.checked_sub(resting) {
        None => (*ways.get(n).unwrap_or(&ways[0]), false),
        Some(n) => (*ways.iter().find(|way| way.name == RESTLESS[n]).unwrap(), true),
    }
}

/// Ends threads also where the test fails: whoever waits for them would wait for ever.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn until(host: &Host, what: &str, mut fits: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !fits() {
        let late = begun.elapsed() > paced(Duration::from_secs(30));
        assert!(!late, "in vain: {what}\n{}", host.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Readmits all, and gives signs of life until each lease was renewed twice. `begin` is called once all
/// may write.
fn live(host: &Host, sessions: &[Session], look: &dyn Fn(), begin: &dyn Fn()) {
    let enough = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = Ends(&enough);
        scope.spawn(|| beats(host, sessions, &enough));
        readmit(host, sessions);
        all(host, "active", |view| view["state"] == "ACTIVE");
        begin();
        // What the table says now is the first that is seen.
        let renewed = |session: &Session| session.moved.load(Ordering::SeqCst) > 2;
        until(host, "each is renewed twice", || {
            look();
            sessions.iter().all(renewed)
        });
    });
}

pub fn passed(place: &Place) {
    let mut host = Host::new(place, "host");
    let config = std::fs::read_to_string(&host.config).unwrap();
    // Only who asks for it here is readmitted.
    std::fs::write(&host.config, format!("{config}[fence]\nafter_doubt = \"hold\"\n")).unwrap();
    host.start_keeper();
    assert!(host.start(None));
    let ways = ways();
    assert!(ways.len() <= SESSIONS - RESTLESS.len(), "not every way has a writer");
    // Those that were opened first may lose their leases meanwhile: let all of them do so.
    let sessions: Vec<_> = (0..SESSIONS).map(|n| open(&host, n)).collect();
    let fenced = |view: &Value| view["state"] == "PRESERVED" && has(view, "gated");
    all(&host, "fenced", fenced);
    let table = Snapshot::open(&host.dir.join("run/deadlines")).unwrap().unwrap();
    let by_id: HashMap<_, _> = sessions.iter().map(|session| (session.id, session)).collect();
    let look = || look(&table, &by_id);
    let (course, ready) = (Course::default(), AtomicUsize::new(0));
    let (mut finals, mut seen) = (vec![], Seen::new());
    let emulated = paced(Duration::from_secs(1)) > Duration::from_secs(1);
    let rounds = rounds(if emulated { EMULATED } else { ROUNDS }) as usize;
    std::thread::scope(|scope| {
        let ends = Ends(&course.over);
        let writers = RefCell::new(vec![]);
        for round in 0..rounds {
            let since = Instant::now();
            live(&host, &sessions, &look, &|| {
                // With the first leases, since each way begins with a call.
                let (mut writers, course, ready) = (writers.borrow_mut(), &course, &ready);
                for (n, session) in sessions.iter().enumerate().skip(writers.len()) {
                    let (way, restless) = way_of(&ways, n);
                    let restless = restless && n.is_multiple_of(if emulated { 4 } else { 1 });
                    writers.push(scope.spawn(move || {
                        let call = way.begin(&session.merged.join("of-the-writer"));
                        ready.fetch_add(1, Ordering::SeqCst);
                        calls(course, session, restless, call)
                    }));
                }
                until(&host, "the writers begin", || ready.load(Ordering::SeqCst) == SESSIONS);
                for session in &sessions {
                    session.deadline.store(0, Ordering::SeqCst);
                    session.moved.store(0, Ordering::SeqCst);
                }
                look();
                course.round.fetch_add(1, Ordering::SeqCst);
            });
            let renewed = since.elapsed();
            let latest = || sessions.iter().map(|s| s.deadline.load(Ordering::SeqCst));
            look();
            let before: Vec<_> = latest().collect();
            pass(&mut host, round % 3, &look, &|| latest().max().unwrap());
            course.round.fetch_add(1, Ordering::SeqCst);
            let starved = round % 3 == 2;
            let gate = |(last, before): (u64, u64)| if starved { last } else { before };
            let both = latest().zip(before);
            finals.push(both.map(|d| Deadlines { last: d.0, gate: gate(d) }).collect::<Vec<_>>());
            let passed = since.elapsed();
            again(&mut host, round % 3);
            all(&host, "fenced", fenced);
            println!(
                "round {round}: renewed after {renewed:.1?}, passed after {passed:.1?}, fenced after \
                 {:.1?}",
                since.elapsed()
            );
        }
        drop(ends);
        for (n, writer) in writers.into_inner().into_iter().enumerate() {
            let by_round = writer.join().unwrap();
            assert_eq!(by_round.len(), rounds, "writer {n} slept a round");
            for (round, (calls, finals)) in by_round.iter().zip(&finals).enumerate() {
                calls.judge(
                    &format!("round {round}, {}", way_of(&ways, n).0.name),
                    finals[n],
                    &mut seen,
                );
            }
        }
    });
    seen.deadlines = finals.iter().map(|finals| finals.len() as u64).sum();
    seen.judge();
    assert_eq!(seen.deadlines, (rounds * SESSIONS) as u64);
}
