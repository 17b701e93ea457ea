//! Preserved deltas and what is removed in the end.

use axum::Json;
use axum::extract::{Extension, State};
use axum::http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;

use super::super::problem::{Query, Refused, Segment, Wish};
use super::Peer;
use crate::agent::handle::Agent;
use crate::model::view::{
    ApplyBundle, ExportSession, Exported, GcReport, KeepSession, Opened, PreservedView, SessionView,
};

/// Lists the preserved deltas.
#[utoipa::path(get, path = "/v1/preserved",
    responses((status = 200, description = "All of them.", body = Vec<PreservedView>)))]
pub(super) async fn list(State(agent): State<Agent>) -> Result<Json<Vec<PreservedView>>, Refused> {
    Ok(Json(agent.preserved().await?))
}

/// Writes a preserved delta as a patch bundle; with `dispose` it may be removed afterwards.
#[utoipa::path(post, path = "/v1/sessions/{id}/export", request_body = ExportSession,
    params(("id" = String, Path, description = "A unique prefix of its id.")),
    responses((status = 200, description = "The bundle.", body = Exported)))]
pub(super) async fn export(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(prefix): Segment<String>,
    Wish(wish): Wish<ExportSession>,
) -> Result<Json<Exported>, Refused> {
    let id = agent.session_id(&prefix).await?;
    Ok(Json(agent.export(&peer.caller, id, wish).await?))
}

/// Opens a session whose upper is a bundle's, made to fit the present head.
#[utoipa::path(post, path = "/v1/bundles/apply", request_body = ApplyBundle,
    responses((status = 201, description = "It is open.", body = Opened)))]
pub(super) async fn apply(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Wish(wish): Wish<ApplyBundle>,
) -> Result<(StatusCode, Json<Opened>), Refused> {
    Ok((StatusCode::CREATED, Json(agent.apply(&peer.caller, wish).await?)))
}

/// Gives the bytes of a preserved delta up.
#[utoipa::path(post, path = "/v1/sessions/{id}/discard",
    params(("id" = String, Path, description = "A unique prefix of its id.")),
    responses((status = 200, description = "As it stands.", body = SessionView)))]
pub(super) async fn discard(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(prefix): Segment<String>,
) -> Result<Json<SessionView>, Refused> {
    let id = agent.session_id(&prefix).await?;
    Ok(Json(agent.discard(&peer.caller, id).await?))
}

/// Keeps a preserved delta longer.
#[utoipa::path(post, path = "/v1/sessions/{id}/keep", request_body = KeepSession,
    params(("id" = String, Path, description = "A unique prefix of its id.")),
    responses((status = 200, description = "How long it is kept.", body = PreservedView)))]
pub(super) async fn keep(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(prefix): Segment<String>,
    Wish(wish): Wish<KeepSession>,
) -> Result<Json<PreservedView>, Refused> {
    let id = agent.session_id(&prefix).await?;
    Ok(Json(agent.keep(&peer.caller, id, wish).await?))
}

/// Whether to touch anything.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Rehearsal {
    /// Only say what would be removed.
    #[serde(default)]
    dry_run: bool,
}

/// Removes what is safe to delete.
#[utoipa::path(post, path = "/v1/gc", params(Rehearsal),
    responses((status = 200, description = "What was done.", body = GcReport)))]
pub(super) async fn gc(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Query(rehearsal): Query<Rehearsal>,
) -> Result<Json<GcReport>, Refused> {
    Ok(Json(agent.gc(&peer.caller, rehearsal.dry_run).await?))
}
