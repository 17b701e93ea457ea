//! `/v1/sessions`

use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};

use super::super::problem::{Refused, Segment, Wish, problem_of};
use super::Peer;
use crate::agent::failure::Failure;
use crate::agent::handle::{Agent, Sign, Told};
use crate::model::code::Code;
use crate::model::view::{
    Beat, BeatAnswer, CheckpointSession, Checkpointed, CloseSession, DiffLine, FenceSession,
    Fenced, OpenSession, Opened, ReadmitSession, SessionView,
};

/// Opens a session: acquires the lease, mounts the overlay, seals the cgroup.
#[utoipa::path(post, path = "/v1/sessions", request_body = OpenSession,
    responses((status = 201, description = "It is open.", body = Opened)))]
pub(super) async fn open(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Wish(wish): Wish<OpenSession>,
) -> Result<(StatusCode, Json<Opened>), Refused> {
    Ok((StatusCode::CREATED, Json(agent.open(&peer.caller, wish).await?)))
}

/// Lists the sessions of this host.
#[utoipa::path(get, path = "/v1/sessions",
    responses((status = 200, description = "All of them.", body = Vec<SessionView>)))]
pub(super) async fn list(State(agent): State<Agent>) -> Result<Json<Vec<SessionView>>, Refused> {
    Ok(Json(agent.sessions().await?))
}

/// Shows a session.
#[utoipa::path(get, path = "/v1/sessions/{id}",
    params(("id" = String, Path, description = "A unique prefix of its id.")),
    responses((status = 200, description = "As it stands.", body = SessionView)))]
pub(super) async fn inspect(
    State(agent): State<Agent>,
    Segment(prefix): Segment<String>,
) -> Result<Json<SessionView>, Refused> {
    let id = agent.session_id(&prefix).await?;
    Ok(Json(agent.session(id).await?))
}

/// Streams what a session changes against what it was mounted on: a row a line, then the summary.
#[utoipa::path(get, path = "/v1/sessions/{id}/diff",
    params(("id" = String, Path, description = "A unique prefix of its id.")),
    responses((status = 200, description = "The stream. Without a summary at its end it broke off.",
        body = DiffLine, content_type = "application/x-ndjson")))]
pub(super) async fn diff(
    State(agent): State<Agent>,
    Segment(prefix): Segment<String>,
) -> Result<Response, Refused> {
    let id = agent.session_id(&prefix).await?;
    let rows = agent.diff(id).await?;
    let lines = futures_util::stream::unfold(rows, |mut rows| async {
        let line = match rows.recv().await? {
            Ok(Told::Row(row)) => DiffLine::Row(row),
            Ok(Told::End(summary)) => DiffLine::End { summary },
            Err(failure) => DiffLine::Broken { problem: problem_of(&failure) },
        };
        let mut text = serde_json::to_vec(&line).unwrap_or_default();
        text.push(b'\n');
        Some((Ok::<_, std::convert::Infallible>(text), rows))
    });
    let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
    Ok((kind, Body::from_stream(lines)).into_response())
}

/// Permits root to place a command in a session, and says where.
#[utoipa::path(post, path = "/v1/sessions/{id}/exec",
    params(("id" = String, Path, description = "A unique prefix of its id.")),
    responses((status = 200, description = "The place.", body = Object)))]
pub(super) async fn exec(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(prefix): Segment<String>,
) -> Result<Json<crate::workload::Place>, Refused> {
    if peer.caller.uid != 0 {
        let message = format!("{} is not root: only root places commands", peer.caller);
        return Err(Failure::new(Code::Denied, message).into());
    }
    let id = agent.session_id(&prefix).await?;
    Ok(Json(agent.permit(&peer.caller, id).await?))
}

/// Captures the upper and publishes it.
#[utoipa::path(post, path = "/v1/sessions/{id}/checkpoint", request_body = CheckpointSession,
    params(("id" = String, Path, description = "A unique prefix of its id.")),
    responses((status = 200, description = "It is published.", body = Checkpointed)))]
pub(super) async fn checkpoint(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(prefix): Segment<String>,
    Wish(wish): Wish<CheckpointSession>,
) -> Result<Json<Checkpointed>, Refused> {
    let id = agent.session_id(&prefix).await?;
    Ok(Json(agent.checkpoint(&peer.caller, id, wish).await?))
}

/// Closes a session. One that holds uncommitted bytes wants a mode.
#[utoipa::path(post, path = "/v1/sessions/{id}/close", request_body = CloseSession,
    params(("id" = String, Path, description = "A unique prefix of its id.")),
    responses((status = 200, description = "As it stands.", body = SessionView)))]
pub(super) async fn close(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(prefix): Segment<String>,
    Wish(wish): Wish<CloseSession>,
) -> Result<Json<SessionView>, Refused> {
    let id = agent.session_id(&prefix).await?;
    Ok(Json(agent.close(&peer.caller, id, wish).await?))
}

/// Stops a session's writer.
#[utoipa::path(post, path = "/v1/sessions/{id}/fence", request_body = FenceSession,
    params(("id" = String, Path, description = "A unique prefix of its id.")),
    responses((status = 200, description = "How far it is.", body = Fenced)))]
pub(super) async fn fence(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(prefix): Segment<String>,
    Wish(wish): Wish<FenceSession>,
) -> Result<Json<Fenced>, Refused> {
    let id = agent.session_id(&prefix).await?;
    Ok(Json(agent.fence(&peer.caller, id, wish).await?))
}

/// Gives a fenced session a new lease and generation and lets it run on.
#[utoipa::path(post, path = "/v1/sessions/{id}/readmit", request_body = ReadmitSession,
    params(("id" = String, Path, description = "A unique prefix of its id.")),
    responses((status = 200, description = "As it stands.", body = SessionView)))]
pub(super) async fn readmit(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(prefix): Segment<String>,
    Wish(wish): Wish<ReadmitSession>,
) -> Result<Json<SessionView>, Refused> {
    let id = agent.session_id(&prefix).await?;
    Ok(Json(agent.readmit(&peer.caller, id, wish).await?))
}

/// Gives a sign of life for the holder, with the lease token.
#[utoipa::path(post, path = "/v1/sessions/{id}/beat", request_body = Beat,
    params(("id" = String, Path, description = "A unique prefix of its id.")),
    responses((status = 200, description = "How the lease stands.", body = BeatAnswer)))]
pub(super) async fn beat(
    State(agent): State<Agent>,
    Segment(prefix): Segment<String>,
    Wish(wish): Wish<Beat>,
) -> Result<Json<BeatAnswer>, Refused> {
    let id = agent.session_id(&prefix).await?;
    Ok(Json(agent.beat(id, Sign::Token(wish.token)).await?))
}
