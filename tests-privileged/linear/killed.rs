//! Clients of a running agent that is killed under them, and of the next one. They ask for all that a
//! session's clients ask for: a lease, a sign of life, a release, a fence, a publication, a request.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use overfence::model::code::Code;
use serde_json::{Value, json};

use super::clients::{Dice, History};
use super::spec::{Op, Ret};
use crate::agent_process::{Host, id_of};
use crate::host::{Place, paced, rounds};

/// A session that a client was given.
#[derive(Clone)]
struct Mine {
    id: String,
    generation: u64,
    token: String,
}

struct Caller<'a> {
    workspace: &'a str,
    history: &'a History,
    dice: Dice,
    name: u32,
    session: Option<Mine>,
    /// What was done for it, by what it had asked.
    done: BTreeMap<&'static str, u64>,
}

fn word(op: Op) -> &'static str {
    match op {
        Op::Acquire { .. } => "acquired",
        Op::Renew { .. } => "renewed",
        Op::Release { .. } => "released",
        Op::Revoke { .. } => "revoked",
        Op::Publish { .. } => "published",
        Op::Begin { .. } => "begun",
        Op::Expire | Op::Known { .. } | Op::Look => "looked",
    }
}

fn ask(host: &Host, method: &str, path: &str, body: &Value) -> Option<(u16, Value)> {
    let answer = host.try_http(method, path, &body.to_string())?;
    Some((answer.status, serde_json::from_str(&answer.body).ok()?))
}

impl Caller<'_> {
    fn choose(&mut self) -> Op {
        let Some(Mine { generation, .. }) = self.session else {
            return match self.dice.below(6) {
                0 => Op::Look,
                n => Op::Acquire { force: n == 1 },
            };
        };
        match self.dice.below(12) {
            0 => Op::Look,
            1 => Op::Acquire { force: true },
            2 | 3 => Op::Renew { generation },
            4 => Op::Release { generation },
            5 => Op::Revoke { generation },
            6..=8 => {
                let key = u128::from(1 + self.dice.below(2));
                Op::Begin { generation, expected: 0, key }
            }
            _ => Op::Publish { generation, expected: 0, key: 0, layer: 0 },
        }
    }

    fn step(&mut self, host: &Host) {
        let op = self.choose();
        self.history.asks(self.name, op);
        match self.perform(host, op) {
            Some(ret) => {
                self.history.told(self.name, ret);
                let done = !matches!(ret, Ret::Refused(_) | Ret::Taken);
                *self.done.entry(word(op)).or_default() += u64::from(done);
                if let Ret::Granted { generation, .. } = ret {
                    self.history.known(self.name, generation);
                }
            }
            None => self.name = self.history.name(),
        }
    }

    /// What was told; none if nobody can say whether anything happened.
    fn perform(&mut self, host: &Host, op: Op) -> Option<Ret> {
        let refused = |body: &Value| {
            let code = body["code"].as_str().unwrap_or_default();
            // Of any other complaint nobody can say that nothing happened: it is a lost answer.
            let nothing = match op {
                Op::Acquire { .. } => code == "lease_held",
                // A sign of life that is refused is none, for whatever reason.
                Op::Renew { .. } => !code.is_empty(),
                _ => matches!(
                    code,
                    "stale_generation"
                        | "lease_expired"
                        | "lease_revoked"
                        | "lease_released"
                        | "version_mismatch"
                        | "head_mismatch"
                ),
            };
            nothing.then_some(Ret::Refused(Code::WrongState))
        };
        let mine = self.session.clone();
        let (id, token) = mine.map(|mine| (mine.id, mine.token)).unwrap_or_default();
        let to = |verb: &str| format!("/v1/sessions/{id}/{verb}");
        match op {
            Op::Acquire { force } => {
                let body =
                    json!({ "workspace": self.workspace, "force": force, "ttl_ms": 600_000 });
                let (status, body) = ask(host, "POST", "/v1/sessions", &body)?;
                if status >= 300 {
                    return refused(&body);
                }
                let generation = body["session"]["generation"].as_u64()?;
                let token = body["token"].as_str()?.to_owned();
                self.session = Some(Mine { id: id_of(&body), generation, token });
                let version = body["session"]["base"]["version"].as_u64()?;
                Some(Ret::Granted { generation, version })
            }
            Op::Renew { generation } => {
                let (status, body) = ask(host, "POST", &to("beat"), &json!({ "token": token }))?;
                if status >= 300 {
                    return refused(&body);
                }
                assert_eq!(body["generation"], generation, "{body:#}");
                Some(Ret::Done)
            }
            Op::Publish { .. } => {
                let merged = host.dir.join("state/sessions").join(&id).join("merged");
                let _ = std::fs::write(merged.join("f"), self.dice.below(u64::MAX).to_string());
                let (status, body) = ask(host, "POST", &to("checkpoint"), &json!({}))?;
                if status >= 300 {
                    return refused(&body);
                }
                Some(Ret::Published { version: body["at"]["version"].as_u64()? })
            }
            Op::Begin { key, .. } => {
                let wish = json!({ "task": "t", "key": format!("k{key}") });
                let (status, body) = ask(host, "POST", &to("requests"), &wish)?;
                match body["result"].as_str() {
                    _ if body["code"] == "task_taken" => Some(Ret::Taken),
                    _ if status >= 300 => refused(&body),
                    Some("begun") => Some(Ret::Begun),
                    Some("repeated") => Some(Ret::Repeated),
                    Some("resumed") => Some(Ret::Resumed),
                    result => panic!("{result:?}: {body:#}"),
                }
            }
            Op::Release { .. } => {
                let (status, body) =
                    ask(host, "POST", &to("close"), &json!({ "mode": "discard" }))?;
                self.session = None;
                if status < 300 { Some(Ret::Done) } else { refused(&body) }
            }
            Op::Revoke { .. } => {
                let wish = json!({ "reason": "test", "wait_ms": 20_000 });
                let (status, body) = ask(host, "POST", &to("fence"), &wish)?;
                if status >= 300 {
                    return refused(&body);
                }
                // One that is still under way is an answer that is still to come.
                (body["result"] == "effective").then_some(Ret::Done)
            }
            Op::Look | Op::Expire | Op::Known { .. } => {
                let path = format!("/v1/workspaces/{}", self.workspace);
                let (_, body) = ask(host, "GET", &path, &json!({}))?;
                let generation = body["generation"].as_u64()?;
                Some(Ret::Seen { generation, version: body["version"].as_u64()? })
            }
        }
    }
}

/// Lets each do some steps at the same time as the others, until it is enough.
fn together(host: &Host, callers: &mut [Caller<'_>], steps: usize, over: &AtomicBool) {
    std::thread::scope(|scope| {
        for caller in callers {
            scope.spawn(move || {
                for _ in 0..steps {
                    caller.step(host);
                    if over.load(Ordering::SeqCst) {
                        break;
                    }
                }
            });
        }
    });
}

/// Kills the agent in the middle of what comes after the first few answers.
fn kill(host: &Host, history: &History, n: u64, over: &AtomicBool) {
    let waited = Instant::now();
    while history.told_so_far() < 8 + (n % 9) as usize
        && waited.elapsed() < paced(Duration::from_secs(10))
    {
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(7 * (n % 9)));
    over.store(true, Ordering::SeqCst);
    let pid = rustix::process::Pid::from_raw(host.agent_pid().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

pub fn killed(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None), "{}", host.log());
    let (begun, rounds) = (Instant::now(), rounds(20).min(200));
    let (mut told, mut done) = (0, BTreeMap::<&str, u64>::new());
    for n in 0..rounds {
        let workspace = &format!("w{n}");
        host.must(&["workspace", "create", workspace]);
        let history = &History::new(true);
        let caller = |client| Caller {
            workspace,
            history,
            dice: Dice::new(n * 3 + client),
            name: history.name(),
            session: None,
            done: BTreeMap::new(),
        };
        let mut callers: Vec<_> = (0..3).map(caller).collect();
        let over = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| kill(&host, history, n, over));
            together(&host, &mut callers, 8, over);
        });
        host.kill_agent();
        assert!(host.start(None), "{}", host.log());
        // What the next agent remembers is part of the history; it knows of every grant, also of one of
        // which nobody was told.
        let mut look = caller(3);
        history.asks(look.name, Op::Look);
        let seen = look.perform(&host, Op::Look).unwrap();
        history.told(look.name, seen);
        let Ret::Seen { generation, .. } = seen else { panic!("{seen:?}") };
        history.known(look.name, generation);
        // They go on under what they hold.
        together(&host, &mut callers, 3, &AtomicBool::new(false));
        history.asks(look.name, Op::Look);
        history.told(look.name, look.perform(&host, Op::Look).unwrap());
        told += history.told_so_far();
        for (word, n) in callers.iter().flat_map(|caller| &caller.done) {
            *done.entry(word).or_default() += n;
        }
        assert!(history.fits(), "round {n} cannot be put into an order:\n{}", history.shown());
        // So many lost leases open the breaker, which would keep their directories.
        host.must(&["breaker", "reset", "--reason", "test"]);
    }
    println!("{rounds} rounds, {told} answers, {done:?}, {:?}", begun.elapsed());
    assert!(told as u64 > rounds * 6, "hardly anything was answered");
    // Of each something, and of all together enough.
    let all = done.len() == 7 && done.values().all(|n| *n > 0);
    assert!(all && done.values().sum::<u64>() >= 4 * rounds, "hardly anything was done: {done:?}");
}

/// Short histories of an agent's answers, in order; one without an answer was lost. The check that a
/// killed agent has to pass takes the first ones and none of the others.
pub fn table(_: &Place) {
    let take = |force, generation| {
        let granted = Ret::Granted { generation, version: 0 };
        [(Op::Acquire { force }, Some(granted)), (Op::Known { generation }, Some(Ret::Known))]
    };
    let done = |op| (op, Some(Ret::Done));
    let (renew, revoke, release) = (
        |generation| done(Op::Renew { generation }),
        |generation| done(Op::Revoke { generation }),
        |generation| done(Op::Release { generation }),
    );
    let publish = |generation, version| {
        let op = Op::Publish { generation, expected: 0, key: 0, layer: 0 };
        (op, Some(Ret::Published { version }))
    };
    let begin = |generation, key, ret| (Op::Begin { generation, expected: 0, key }, Some(ret));
    let look = |generation, version| (Op::Look, Some(Ret::Seen { generation, version }));
    let lost = (Op::Acquire { force: true }, None);
    let (one, two) = (take(false, 1), take(true, 2));
    type Step = (Op, Option<Ret>);
    let fits = |history: &[&[Step]]| {
        let of = History::new(true);
        for (op, ret) in history.concat() {
            let name = of.name();
            of.asks(name, op);
            if let Some(ret) = ret {
                of.told(name, ret);
            }
        }
        of.fits()
    };
    let good: [&[&[Step]]; 5] = [
        &[&one, &[renew(1), publish(1, 1), begin(1, 1, Ret::Begun), release(1), look(1, 1)]],
        &[&one, &two, &[begin(2, 1, Ret::Begun), begin(2, 2, Ret::Taken), revoke(1)]],
        // The former one's sign of life, ahead of the answer to who took over.
        &[&one, &two[..1], &[renew(1)], &two[1..]],
        // Who was granted generation 2 was never told: the agent gave it back.
        &[&one, &[lost], &take(false, 3)],
        &[&one, &[lost, look(1, 0), renew(1), publish(1, 1)]],
    ];
    for history in good {
        assert!(fits(history), "{history:?}");
    }
    let bad: [&[&[Step]]; 10] = [
        &[&one, &two, &[renew(1)]],
        &[&one, &[revoke(1), renew(1)]],
        &[&one, &[revoke(1), publish(1, 1)]],
        &[&one, &[revoke(1), begin(1, 1, Ret::Begun)]],
        &[&one, &[release(1), begin(1, 1, Ret::Begun)]],
        &[&one, &take(false, 2)],
        &[&one, &[release(1)], &take(false, 1)],
        &[&one, &[publish(1, 1), look(1, 0)]],
        &[&one, &[begin(1, 1, Ret::Begun), begin(1, 2, Ret::Begun)]],
        &[&one, &[lost, look(2, 0), publish(1, 1)]],
    ];
    for history in bad {
        assert!(!fits(history), "{history:?}");
    }
}
