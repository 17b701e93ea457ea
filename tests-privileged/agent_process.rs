//! The agent as a process of its own, asked through the command line: what an operator has.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::host::Place;

/// Agent, keeper and command line of one place.
pub struct Host {
    pub binary: PathBuf,
    pub config: PathBuf,
    pub dir: PathBuf,
    pub cgroup: PathBuf,
    agent: Option<Child>,
    keeper: Option<Child>,
}

impl Host {
    /// A host whose state lies in `place/<name>`; nothing runs yet.
    pub fn new(place: &Place, name: &str) -> Self {
        let dir = place.dir.join(name);
        std::fs::create_dir(&dir).unwrap();
        let cgroup = place.cgroup.join(name);
        let relative =
            cgroup.strip_prefix(crate::host::cgroup2_root()).unwrap().display().to_string();
        let config = dir.join("config.toml");
        let text = format!(
            "state_dir = {:?}\nruntime_dir = {:?}\ncgroup = {relative:?}\n",
            dir.join("state"),
            dir.join("run"),
        );
        std::fs::write(&config, text).unwrap();
        let binary = place.binary.clone();
        Self { binary, config, dir, cgroup, agent: None, keeper: None }
    }

    fn daemon(&self, verb: &str, failpoints: Option<&str>) -> Child {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.dir.join(format!("{verb}.log")))
            .unwrap();
        let mut command = Command::new(&self.binary);
        command
            .arg(verb)
            .arg("--config")
            .arg(&self.config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        if let Some(plan) = failpoints {
            command.env("OVERFENCE_FAILPOINTS", plan);
        }
        command.spawn().unwrap()
    }

    pub fn start_keeper(&mut self) {
        self.keeper = Some(self.daemon("keeper", None));
    }

    /// Starts the agent; false if it died before it was ready.
    pub fn start(&mut self, failpoints: Option<&str>) -> bool {
        self.agent = Some(self.daemon("agent", failpoints));
        let begun = Instant::now();
        loop {
            if self.dead() {
                eprintln!("the agent ended before it was ready: {:?}", self.ended());
                return false;
            }
            let socket = self.dir.join("run/overfence.sock");
            if UnixStream::connect(&socket).is_ok() && self.ask(&["status"]).0 == 0 {
                return true;
            }
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "the agent is not ready: {}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Whether the agent has ended.
    pub fn dead(&mut self) -> bool {
        self.agent.is_none() || self.ended().is_some()
    }

    /// How the agent ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.agent.as_mut()?.try_wait().unwrap()
    }

    pub fn agent_pid(&self) -> u32 {
        self.agent.as_ref().unwrap().id()
    }

    /// kill -9.
    pub fn kill_agent(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            let _ = agent.kill();
            agent.wait().unwrap();
        }
    }

    /// kill -9.
    pub fn kill_keeper(&mut self) {
        if let Some(mut keeper) = self.keeper.take() {
            let _ = keeper.kill();
            keeper.wait().unwrap();
        }
    }

    /// Of agent and keeper.
    pub fn pids(&self) -> Vec<u32> {
        self.agent.iter().chain(&self.keeper).map(Child::id).collect()
    }

    /// To agent and keeper.
    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        for child in self.agent.iter().chain(&self.keeper) {
            let pid = nix::unistd::Pid::from_raw(child.id().try_into().unwrap());
            nix::sys::signal::kill(pid, signal).unwrap();
        }
    }

    pub fn stop(&mut self) {
        self.kill_agent();
        self.kill_keeper();
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("agent.log")).unwrap_or_default()
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.verb(args).output().unwrap()
    }

    /// A verb, not yet started.
    pub fn verb(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command
            .args(args)
            .args(["-o", "json", "--timeout", "120s"])
            .env("OVERFENCE_SOCKET", self.dir.join("run/overfence.sock"))
            .stdin(Stdio::null());
        command
    }

    /// Exit code and JSON answer of a verb.
    pub fn ask(&self, args: &[&str]) -> (i32, Value) {
        let out = self.run(args);
        let answer = serde_json::from_slice(&out.stdout).unwrap_or(Value::Null);
        (out.status.code().unwrap_or(-1), answer)
    }

    /// The answer of a verb that has to succeed.
    pub fn must(&self, args: &[&str]) -> Value {
        let out = self.run(args);
        assert!(
            out.status.success(),
            "{args:?}: {}\n{}\nagent: {}",
            out.status,
            String::from_utf8_lossy(&out.stderr),
            self.log()
        );
        serde_json::from_slice(&out.stdout).unwrap_or(Value::Null)
    }

    /// Asks the API without the command line.
    pub fn http(&self, method: &str, path: &str, body: &str) -> Answer {
        self.try_http(method, path, body).unwrap()
    }

    /// The same; none if the agent is gone before it has answered whole.
    pub fn try_http(&self, method: &str, path: &str, body: &str) -> Option<Answer> {
        ask_at(&self.dir.join("run/overfence.sock"), method, path, body)
    }

    /// A counter or gauge, by its name with its labels and without the prefix.
    pub fn metric(&self, name: &str) -> u64 {
        let text = self.http("GET", "/metrics", "").body;
        let value = text.lines().find_map(|line| {
            line.strip_prefix("overfence_")?.strip_prefix(name)?.strip_prefix(' ')
        });
        value.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
    }

    /// Waits for a session to fit.
    pub fn until(&self, id: &str, fits: impl Fn(&Value) -> bool) -> Value {
        let begun = Instant::now();
        loop {
            let view = self.must(&["session", "inspect", id]);
            if fits(&view) {
                return view;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "in vain: {view:#}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn open(&self, workspace: &str, ttl: &str) -> Value {
        self.must(&["session", "open", "-w", workspace, "--create", "--ttl", ttl])
    }
}

/// Asks the API that listens there.
pub fn ask_at(socket: &Path, method: &str, path: &str, body: &str) -> Option<Answer> {
    let mut stream = UnixStream::connect(socket).ok()?;
    let length = body.len();
    // At once: a refusal may come, and the connection end, before the body is read.
    let request = format!(
        "{method} {path} HTTP/1.0\r\nHost: overfence\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let field = |name: &str| {
        let lines = head.lines().filter_map(|line| line.split_once(": "));
        let mut values = lines.filter(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v);
        values.next().unwrap_or_default().to_owned()
    };
    Some(Answer {
        status: head.split(' ').nth(1)?.parse().ok()?,
        kind: field("content-type"),
        body: body.to_owned(),
    })
}

/// What the API answered.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// Content type.
    pub kind: String,
    pub body: String,
}

impl Drop for Host {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.stop();
        }
    }
}

/// The id of an opened session.
pub fn id_of(opened: &Value) -> String {
    opened["session"]["id"].as_str().unwrap().to_owned()
}

/// A path in a view.
pub fn path_of(view: &Value, field: &str) -> PathBuf {
    view[field].as_str().unwrap().into()
}

/// Whether a view has a fact.
pub fn has(view: &Value, fact: &str) -> bool {
    view["facts"].as_array().unwrap().iter().any(|f| f["fact"] == fact)
}
