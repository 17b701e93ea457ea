//! A running agent in a test's own place: state, runtime and cgroups below it.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use overfence::agent::failure::Caller;
use overfence::agent::{self, Agent};
use overfence::config::Config;
use overfence::model::view::{OpenSession, Opened, SessionView};

use crate::host::{Place, paced};

pub const ROOT: Caller = Caller { uid: 0, gid: 0, pid: 0, login_uid: None };

/// The configuration of an agent in `place`.
pub fn config(place: &Place) -> Config {
    let mut config = Config {
        state_dir: place.dir.join("state"),
        runtime_dir: place.dir.join("run"),
        cgroup: Some(
            place.cgroup.strip_prefix(crate::host::cgroup2_root()).unwrap().join("sessions"),
        ),
        ..Config::default()
    };
    if std::env::var_os(crate::host::GATE).is_some_and(|wish| wish == "off") {
        config.fence.gate = overfence::config::GateUse::Off;
    }
    config.socket = config.runtime_dir.join("overfence.sock");
    config.high_water_file = config.state_dir.join("high-water");
    config.evidence_anchor_file = config.state_dir.join("evidence.anchors");
    config.keys_dir = config.state_dir.join("keys");
    config.bundles_dir = config.state_dir.join("bundles");
    config
}

/// Runs `body` with an agent.
pub fn with_agent<F: Future<Output = ()>>(place: &Place, body: impl FnOnce(Agent) -> F) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let (agent, sockets) = agent::start(config(place)).await.unwrap();
        overfence::api::serve_sessions(agent.clone(), sockets).unwrap();
        body(agent.clone()).await;
        agent.stop();
    });
}

/// A wish for a session of `workspace`, made if it is missing. The TTL is that of a host of plain
/// hardware's speed.
pub fn wish(workspace: &str, owner: &str, ttl_ms: u64) -> OpenSession {
    let ttl = paced(Duration::from_millis(ttl_ms));
    serde_json::from_value(serde_json::json!({
        "workspace": workspace, "owner": owner, "ttl_ms": ttl.as_millis(),
        "create": { "id": workspace },
    }))
    .unwrap()
}

/// A shell in the session's cgroup, at its merged directory: a writer without walls, so that a
/// test can do to it what it likes.
pub fn writer(session: &SessionView, script: &str) -> Child {
    let procs = session.cgroup.path().unwrap().join("cgroup.procs");
    Command::new("/bin/sh")
        .arg("-c")
        .arg("echo $$ > \"$1\" && cd \"$2\" && eval \"$3\"")
        .args([
            "sh".as_ref(),
            procs.as_os_str(),
            session.merged.path().unwrap().as_os_str(),
            script.as_ref(),
        ])
        .stdin(Stdio::null())
        .spawn()
        .unwrap()
}

/// The merged directory of a session.
pub fn merged(opened: &Opened) -> PathBuf {
    opened.session.merged.path().unwrap()
}

/// Asks until the answer fits; panics after `limit`.
pub async fn until(
    agent: &Agent,
    id: &str,
    limit: Duration,
    fits: impl Fn(&SessionView) -> bool,
) -> SessionView {
    let (begun, limit) = (Instant::now(), paced(limit));
    let id = id.parse().unwrap();
    loop {
        let view = agent.session(id).await.unwrap();
        if fits(&view) {
            return view;
        }
        assert!(begun.elapsed() < limit, "waited {limit:?} in vain: {view:#?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Whether a view has a fact.
pub fn has(view: &SessionView, fact: &str) -> bool {
    view.facts.iter().any(|f| f.fact.name() == fact)
}
