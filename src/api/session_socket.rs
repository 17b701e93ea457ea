//! The sockets inside the sessions. A workload is on the other end: it gets one short request a
//! connection, few connections at once, and may do two things: say that it lives, and say what it asks
//! of others. All of them are served by one thread, so that a session that shouts delays no operator.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::response::{IntoResponse as _, Response};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::AbortHandle;

use super::problem::{Refused, wish};
use super::server::pause;
use crate::agent::SessionSocket;
use crate::agent::failure::Failure;
use crate::agent::handle::{Agent, Sign};
use crate::model::code::Code;
use crate::model::ids::SessionId;

/// How long one connection lasts at most. A session that keeps its places busy hangs up on itself.
const LONGEST: Duration = Duration::from_secs(10);

/// Bytes of a body.
const MOST: usize = 16 * 1024;

/// How often the thread shows that it is not stuck.
const ROUND: Duration = Duration::from_millis(500);

/// How many at once; more are hung up on.
const PLACES: usize = 8;

/// Starts the thread that serves the sockets that `news` brings, each until its session is gone.
///
/// # Errors
/// No thread, or no descriptors for its runtime.
pub fn serve_sessions(agent: Agent, mut news: UnboundedReceiver<SessionSocket>) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let rounds = agent.clone();
    let serve = async move {
        tokio::spawn(async move {
            loop {
                rounds.sockets_go_round();
                tokio::time::sleep(ROUND).await;
            }
        });
        let mut served: HashMap<SessionId, AbortHandle> = HashMap::new();
        while let Some(told) = news.recv().await {
            let (session, begun) = match told {
                SessionSocket::Made { session, listener } => {
                    match UnixListener::from_std(listener) {
                        Ok(listener) => {
                            let task = serve_session(agent.clone(), session, listener);
                            (session, Some(tokio::spawn(task).abort_handle()))
                        }
                        Err(fault) => {
                            tracing::error!(OVERFENCE_SESSION = %session, "session socket: {fault}");
                            (session, None)
                        }
                    }
                }
                SessionSocket::Gone { session } => (session, None),
            };
            let former = match begun {
                Some(task) => served.insert(session, task),
                None => served.remove(&session),
            };
            former.inspect(AbortHandle::abort);
        }
    };
    std::thread::Builder::new().name("inside".to_owned()).spawn(move || runtime.block_on(serve))?;
    Ok(())
}

/// Answers what is asked for `session`, known by this socket and not by who asks, until the
/// task is dropped.
async fn serve_session(agent: Agent, session: SessionId, listener: UnixListener) {
    let places = Arc::new(Semaphore::new(PLACES));
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let Ok(place) = places.clone().try_acquire_owned() else { continue };
                let agent = agent.clone();
                tokio::spawn(async move {
                    let _place = place;
                    let _ = tokio::time::timeout(LONGEST, attend(agent, session, stream)).await;
                });
            }
            Err(fault) => pause(&fault).await,
        }
    }
}

async fn attend(agent: Agent, session: SessionId, stream: UnixStream) {
    let service = service_fn(|request: Request<Incoming>| {
        let agent = agent.clone();
        async move {
            let answer = answer(&agent, session, request).await;
            Ok::<_, std::convert::Infallible>(answer.unwrap_or_else(Refused::into_response))
        }
    });
    let connection =
        http1::Builder::new().keep_alive(false).serve_connection(TokioIo::new(stream), service);
    if let Err(fault) = connection.await {
        tracing::debug!(%session, %fault, "a connection from inside ended early");
    }
}

/// What can be asked from inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Beat,
    Requests,
    Begin,
    Ack,
}

async fn answer(
    agent: &Agent,
    session: SessionId,
    request: Request<Incoming>,
) -> Result<Response, Refused> {
    let asked = asked(request.method(), request.uri().path())?;
    // Whose word it is, in evidence and settlements.
    let by = session.to_string();
    Ok(match asked {
        Asked::Beat => Json(agent.beat(session, Sign::Socket).await?).into_response(),
        Asked::Requests => Json(agent.requests_of(session).await?).into_response(),
        Asked::Begin => {
            let wish = wish(&body(request).await?)?;
            Json(agent.begin_request(&by, session, wish).await?).into_response()
        }
        Asked::Ack => {
            let wish = wish(&body(request).await?)?;
            let workspace = agent.session(session).await?.workspace;
            Json(agent.ack_request(&by, &workspace, wish).await?).into_response()
        }
    })
}

async fn body(request: Request<Incoming>) -> Result<Bytes, Refused> {
    match Limited::new(request.into_body(), MOST).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(fault) => Err(Refused::bad(format!("the body is not read: {fault}"))),
    }
}

fn asked(method: &Method, path: &str) -> Result<Asked, Refused> {
    match (method, path) {
        (&Method::POST, "/v1/beat") => Ok(Asked::Beat),
        (&Method::GET, "/v1/requests") => Ok(Asked::Requests),
        (&Method::POST, "/v1/requests") => Ok(Asked::Begin),
        (&Method::POST, "/v1/requests/ack") => Ok(Asked::Ack),
        _ => Err(Refused(Failure::new(
            Code::Denied,
            format!(
                "{method} {path}: a session's own socket takes only POST /v1/beat, GET and POST \
                 /v1/requests, and POST /v1/requests/ack"
            ),
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_concerns_itself_is_taken() {
        for (method, path, what) in [
            (Method::POST, "/v1/beat", Asked::Beat),
            (Method::GET, "/v1/requests", Asked::Requests),
            (Method::POST, "/v1/requests", Asked::Begin),
            (Method::POST, "/v1/requests/ack", Asked::Ack),
        ] {
            assert_eq!(asked(&method, path).unwrap(), what);
        }
        for (method, path) in [
            (Method::GET, "/v1/beat"),
            (Method::POST, "/v1/beat/"),
            (Method::POST, "/v1/sessions"),
            (Method::GET, "/v1/status"),
            (Method::POST, "/v1/requests/resolve"),
            (Method::POST, "/v1/requests/assign"),
            (Method::GET, "/v1/publications"),
        ] {
            let Err(Refused(failure)) = asked(&method, path) else { panic!("{method} {path}") };
            assert_eq!(failure.code, Code::Denied);
        }
    }
}
