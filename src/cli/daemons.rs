//! The two long-running verbs: the agent with its API, and the keeper.

use std::path::PathBuf;

use clap::Args;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::agent::failure::Failure;
use crate::agent::manager;
use crate::config::{Config, Loaded};
use crate::kernel::unit;
use crate::model::code::Code;

/// Run the agent: it serves the API, renews leases, and stops stale writers.
#[derive(Debug, Args)]
pub struct Daemon {
    /// Configuration file, instead of /etc/overfence/config.toml.
    #[arg(long, value_name = "F", env = "OVERFENCE_CONFIG", hide_env_values = true)]
    config: Option<PathBuf>,
}

impl Daemon {
    pub(super) fn load(&self) -> Result<Config, Failure> {
        let loaded = Loaded::read(self.config.as_deref(), std::env::vars_os())
            .map_err(|e| Failure::new(Code::BadRequest, with_causes(&e)))?;
        if !loaded.strangers.is_empty() {
            tracing::warn!("{}", super::config::strange(&loaded));
        }
        Ok(loaded.config)
    }
}

/// Runs the agent until SIGTERM, SIGINT or SIGHUP. Sessions, their mounts and their cgroups go on.
pub fn agent(wish: &Daemon) -> Result<(), Failure> {
    let config = wish.load()?;
    raise_descriptor_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(256)
        .enable_all()
        .build()
        .map_err(|e| internal(&e))?;
    let outcome = runtime.block_on(serve(config));
    // A blocked call (a sync of gigabytes) must not hold up the end.
    runtime.shutdown_background();
    outcome
}

/// A session takes some six descriptors: what a shell allows by itself ends at 170 sessions.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    if let Err(fault) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!("{limit:?} descriptors at most: {fault}");
    }
}

async fn serve(config: Config) -> Result<(), Failure> {
    let mut term = signal(SignalKind::terminate()).map_err(|e| internal(&e))?;
    let mut int = signal(SignalKind::interrupt()).map_err(|e| internal(&e))?;
    // The terminal that it was started from went away.
    let mut hangup = signal(SignalKind::hangup()).map_err(|e| internal(&e))?;
    let given = unit::listener().map_err(|e| at(&"the socket that systemd passed", &e))?;
    manager(NotifyState::Status("freezing what is stale"));
    let (agent, sockets) = crate::agent::start(config.clone())
        .await
        .map_err(|e| Failure::new(e.code(), with_causes(&e)))?;
    let listener = match given {
        Some(given) => UnixListener::from_std(given),
        None => crate::api::bind(&config.socket),
    };
    let listener = listener.map_err(|e| at(&config.socket, &e))?;
    crate::api::serve_sessions(agent.clone(), sockets).map_err(|e| internal(&e))?;
    if let Some(address) = config.api.metrics_listen {
        let tcp = tokio::net::TcpListener::bind(address).await.map_err(|e| at(&address, &e))?;
        tokio::spawn(crate::api::serve_metrics(agent.clone(), tcp, std::future::pending()));
    }
    crate::failpoint::hit("agent.ready.before");
    manager(NotifyState::Ready);
    let place = listener.local_addr().ok();
    let place = place.as_ref().and_then(|place| place.as_pathname()).unwrap_or(&config.socket);
    tracing::info!("ready on {}", place.display());
    let end = async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
            _ = hangup.recv() => {}
        }
        manager(NotifyState::Stopping);
    };
    crate::api::serve(agent.clone(), &config, listener, end).await;
    agent.stop();
    Ok(())
}

/// Runs the keeper until it is killed.
pub fn keeper(wish: &Daemon) -> Result<(), Failure> {
    let deadlines = wish.load()?.runtime_dir.join("deadlines");
    raise_descriptor_limit();
    match crate::keeper::run(&deadlines) {
        Ok(never) => match never {},
        Err(fault) => Err(Failure::new(Code::Internal, with_causes(&fault))),
    }
}

/// Ends all sessions as the host goes down.
pub fn end_sessions(wish: &Daemon) -> Result<(), Failure> {
    let ended = crate::agent::end_sessions(&wish.load()?.runtime_dir)
        .map_err(|e| Failure::new(Code::Internal, with_causes(&e)))?;
    eprintln!("ended {ended} session(s); what they wrote is kept");
    Ok(())
}

fn at(what: &dyn std::fmt::Debug, fault: &dyn std::error::Error) -> Failure {
    Failure::new(Code::Internal, format!("{what:?}: {fault}"))
}

fn internal(fault: &dyn std::error::Error) -> Failure {
    Failure::new(Code::Internal, with_causes(fault))
}

fn with_causes(fault: &dyn std::error::Error) -> String {
    match fault.source() {
        None => fault.to_string(),
        Some(cause) => format!("{fault}: {}", with_causes(cause)),
    }
}
