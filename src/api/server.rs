//! Connections: who is there, what they may do, and an orderly end.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tower::ServiceExt as _;

use super::peer::{Rights, Roster, caller, groups, rights};
use super::routes::{Peer, router, watched};
use crate::agent::handle::Agent;
use crate::config::Config;

/// How long a peer may take to send a request's head.
const HEAD: Duration = Duration::from_secs(10);

/// How long a peer without rights is listened to, to be told so.
const REFUSAL: Duration = Duration::from_secs(2);

/// How many peers without rights are told so at once; more are hung up on.
const STRANGERS: usize = 16;

/// How long requests under way get at the end.
const FAREWELL: Duration = Duration::from_secs(3);

/// Makes the API's socket anew, open to all: rights are decided from the peer's credentials.
///
/// # Errors
/// The directory does not allow it.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        return Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            "another agent answers there: give this one a socket of its own (`socket` in its \
             configuration; OVERFENCE_SOCKET overrides it)",
        ));
    }
    crate::failpoint::fails("api.bind.before")?;
    match std::fs::remove_file(path) {
        Err(fault) if fault.kind() != io::ErrorKind::NotFound => return Err(fault),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
    crate::failpoint::hit("api.bind.after");
    Ok(listener)
}

/// Answers on `listener` until `shutdown` is ready; requests under way get three seconds more.
pub async fn serve(
    agent: Agent,
    config: &Config,
    listener: UnixListener,
    shutdown: impl Future<Output = ()>,
) {
    let (keys, router) = (Arc::new(config.api.clone()), router(agent));
    let strangers = Arc::new(Semaphore::new(STRANGERS));
    let (end, ended) = watch::channel(false);
    let mut connections = JoinSet::new();
    tokio::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            () = &mut shutdown => break,
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                let (keys, router) = (keys.clone(), router.clone());
                let (strangers, ended) = (strangers.clone(), ended.clone());
                connections.spawn(async move {
                    let Ok(peer) = meet(&stream, &keys).await else { return };
                    if peer.rights > Rights::None {
                        attend(stream, router, peer, ended).await;
                    } else if let Ok(_place) = strangers.try_acquire() {
                        let talk = attend(stream, router, peer, ended);
                        let _ = tokio::time::timeout(REFUSAL, talk).await;
                    }
                });
            }
            Err(fault) => pause(&fault).await,
        }
    }
    let _ = end.send(true);
    let rest = async { while connections.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(FAREWELL, rest).await;
}

/// Answers `/metrics` and `/healthz` on a loopback address until `shutdown` is ready.
///
/// # Errors
/// The listener fails for good.
pub async fn serve_metrics(
    agent: Agent,
    listener: TcpListener,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    axum::serve(listener, watched(agent)).with_graceful_shutdown(shutdown).await
}

/// Out of descriptors, most likely: accepting again at once would only burn time.
pub(super) async fn pause(fault: &io::Error) {
    tracing::warn!(%fault, "a connection could not be accepted");
    tokio::time::sleep(Duration::from_millis(50)).await;
}

async fn meet(stream: &UnixStream, keys: &Arc<crate::config::ApiKeys>) -> io::Result<Peer> {
    let caller = caller(stream)?;
    let (uid, gid) = (caller.uid, caller.gid);
    if uid == 0 {
        return Ok(Peer { caller, rights: Rights::Operate });
    }
    // The group database may be a directory service that is slow; root never waits for it.
    let keys = keys.clone();
    let found = move || rights(uid, &groups(uid, gid), &Roster::of(&keys));
    let rights = tokio::task::spawn_blocking(found).await.map_err(io::Error::other)?;
    Ok(Peer { caller, rights })
}

async fn attend(stream: UnixStream, router: Router, peer: Peer, mut ended: watch::Receiver<bool>) {
    let service = router.map_request(move |mut request: hyper::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(peer.clone());
        request.map(axum::body::Body::new)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service));
    tokio::pin!(connection);
    let talked = tokio::select! {
        talked = connection.as_mut() => talked,
        () = async { drop(ended.wait_for(|&end| end).await) } => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(fault) = talked {
        tracing::debug!(%fault, "a connection ended early");
    }
}
