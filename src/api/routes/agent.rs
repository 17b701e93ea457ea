//! The agent itself: evidence, events, status, metrics, health.

use std::collections::VecDeque;

use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures_util::Stream;
use futures_util::stream::try_unfold;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::super::problem::{Query, Refused, Wish};
use super::Peer;
use crate::agent::failure::Failure;
use crate::agent::handle::Agent;
use crate::model::journal::Entry;
use crate::model::view::{
    BackupHost, BackupView, BreakerView, DrainHost, Drained, EvidenceReport, ResetBreaker,
    StatusView,
};

/// Entries read from the chain at a time.
const PAGE: usize = 256;

/// Which part of the chain.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Part {
    /// Entries after this number; from the first if absent.
    #[serde(default)]
    since: u64,
    /// At most so many; 256 if absent.
    limit: Option<usize>,
    /// Only of this session, by a unique prefix of its id.
    session: Option<String>,
    /// Begin with the newest so many; `since` may begin later.
    last: Option<usize>,
}

/// Reads the evidence chain.
#[utoipa::path(get, path = "/v1/evidence", params(Part),
    responses((status = 200, description = "Entries, oldest first.", body = Vec<Object>)))]
pub(super) async fn evidence(
    State(agent): State<Agent>,
    Query(part): Query<Part>,
) -> Result<Json<Vec<Entry>>, Refused> {
    let session = match &part.session {
        Some(prefix) => Some(agent.session_id(prefix).await?),
        None => None,
    };
    let limit = part.limit.unwrap_or(PAGE);
    let since = match (part.last, session) {
        (None, _) => part.since,
        // Entries are numbered without a gap.
        (Some(last), None) => {
            let newest = *agent.evidence_watch().borrow();
            part.since.max(newest.saturating_sub(u64::try_from(last).unwrap_or(u64::MAX)))
        }
        (Some(last), Some(_)) => {
            let mut all = agent.evidence(part.since, usize::MAX, session).await?;
            let mut tail = all.split_off(all.len().saturating_sub(last));
            tail.truncate(limit);
            return Ok(Json(tail));
        }
    };
    Ok(Json(agent.evidence(since, limit, session).await?))
}

/// Checks the evidence chain against its anchors.
#[utoipa::path(get, path = "/v1/evidence/verify",
    responses((status = 200, description = "What was found.", body = EvidenceReport)))]
pub(super) async fn verify(State(agent): State<Agent>) -> Result<Json<EvidenceReport>, Refused> {
    Ok(Json(agent.evidence_verify().await?))
}

/// From where, and for how long.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Tail {
    /// Entries after this number; from the first if absent.
    #[serde(default)]
    since: u64,
    /// Go on as entries come.
    #[serde(default)]
    follow: bool,
}

/// Streams evidence entries, one JSON object a line.
#[utoipa::path(get, path = "/v1/events", params(Tail),
    responses((status = 200, description = "The stream.", body = Object,
        content_type = "application/x-ndjson")))]
pub(super) async fn events(State(agent): State<Agent>, Query(tail): Query<Tail>) -> Response {
    let body = Body::from_stream(lines(agent, tail));
    ([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response()
}

struct Reading {
    agent: Agent,
    last: u64,
    ready: VecDeque<Entry>,
    news: Option<tokio::sync::watch::Receiver<u64>>,
}

fn lines(agent: Agent, tail: Tail) -> impl Stream<Item = Result<Vec<u8>, Failure>> {
    let news = tail.follow.then(|| agent.evidence_watch());
    let start = Reading { agent, last: tail.since, ready: VecDeque::new(), news };
    try_unfold(start, |mut reading| async move {
        loop {
            while let Some(entry) = reading.ready.pop_front() {
                if entry.seq > reading.last {
                    reading.last = entry.seq;
                    let mut line = serde_json::to_vec(&entry).unwrap_or_default();
                    line.push(b'\n');
                    return Ok(Some((line, reading)));
                }
            }
            // Marked as seen before the read: an entry that comes in between wakes the next wait.
            if let Some(news) = &mut reading.news {
                news.borrow_and_update();
            }
            reading.ready = reading.agent.evidence(reading.last, PAGE, None).await?.into();
            if reading.ready.iter().any(|entry| entry.seq > reading.last) {
                continue;
            }
            let Some(news) = &mut reading.news else { return Ok(None) };
            if news.changed().await.is_err() {
                return Ok(None);
            }
        }
    })
}

/// Says how the agent is.
#[utoipa::path(get, path = "/v1/status",
    responses((status = 200, description = "As it stands.", body = StatusView)))]
pub(super) async fn status(State(agent): State<Agent>) -> Result<Json<StatusView>, Refused> {
    Ok(Json(agent.status().await?))
}

/// Takes every session of this host down; new ones are refused until the agent is started again.
#[utoipa::path(post, path = "/v1/drain", request_body = DrainHost,
    responses((status = 200, description = "What became of them.", body = Drained)))]
pub(super) async fn drain(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Wish(wish): Wish<DrainHost>,
) -> Result<Json<Drained>, Refused> {
    Ok(Json(agent.drain(&peer.caller, wish).await?))
}

/// Copies the database as it is at one moment, and the layers it names, while the agent works.
#[utoipa::path(post, path = "/v1/backup", request_body = BackupHost,
    responses((status = 200, description = "It is there, and was read back.", body = BackupView)))]
pub(super) async fn backup(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Wish(wish): Wish<BackupHost>,
) -> Result<Json<BackupView>, Refused> {
    Ok(Json(agent.backup(&peer.caller, wish).await?))
}

/// Says whether killing and deleting stop, and why.
#[utoipa::path(get, path = "/v1/breaker",
    responses((status = 200, description = "As it stands.", body = BreakerView)))]
pub(super) async fn breaker(State(agent): State<Agent>) -> Json<BreakerView> {
    Json(agent.breaker().await)
}

/// Closes the breaker; one that is closed stays so.
#[utoipa::path(post, path = "/v1/breaker/reset", request_body = ResetBreaker,
    responses((status = 200, description = "As it stands now.", body = BreakerView)))]
pub(super) async fn breaker_reset(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Wish(wish): Wish<ResetBreaker>,
) -> Result<Json<BreakerView>, Refused> {
    Ok(Json(agent.breaker_reset(&peer.caller, wish).await?))
}

/// The public key of mount tickets.
#[derive(Serialize, Deserialize, ToSchema)]
pub struct TicketKey {
    /// A line of text, as in the file `ticket.pub`.
    pub key: String,
}

/// Gives the key that mount tickets are verified with.
#[utoipa::path(get, path = "/v1/ticket-key",
    responses((status = 200, description = "The public key.", body = TicketKey)))]
pub(super) async fn ticket_key(State(agent): State<Agent>) -> Json<TicketKey> {
    Json(TicketKey { key: agent.ticket_key() })
}

/// Gives the metrics.
#[utoipa::path(get, path = "/metrics",
    responses((status = 200, description = "OpenMetrics.", body = String,
        content_type = "application/openmetrics-text")))]
pub(super) async fn metrics(State(agent): State<Agent>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], agent.metrics()).into_response()
}

/// Answers 200 once everything stale has been frozen, 503 before.
#[utoipa::path(get, path = "/healthz",
    responses(
        (status = 200, description = "Ready; the last reconcile in a line.", body = String,
            content_type = "text/plain"),
        (status = 503, description = "Not ready: something stale may run still.", body = String,
            content_type = "text/plain")))]
pub(super) async fn healthz(State(agent): State<Agent>) -> Result<Response, Refused> {
    let status = agent.status().await?;
    let code = if status.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    Ok((code, format!("{}\n", status.reconcile)).into_response())
}

/// What a TCP listener on the loopback address answers: metrics and health alone.
pub(in crate::api) fn watched(agent: Agent) -> axum::Router {
    use axum::routing::get;
    let routes =
        axum::Router::new().route("/metrics", get(metrics)).route("/healthz", get(healthz));
    routes.with_state(agent)
}
