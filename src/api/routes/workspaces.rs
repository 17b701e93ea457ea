//! `/v1/workspaces`

use axum::extract::{Extension, State};
use axum::{Json, http::StatusCode};
use serde::Deserialize;
use utoipa::IntoParams;

use super::super::problem::{Query, Refused, Segment, Wish};
use super::Peer;
use crate::agent::handle::Agent;
use crate::model::view::{
    CreateWorkspace, DeleteWorkspace, FenceSession, Fenced, HistoryView, HoldWorkspace,
    ImportWorkspace, RepairWorkspace, RevertWorkspace, WorkspaceReport, WorkspaceView,
};

/// Creates a workspace.
#[utoipa::path(post, path = "/v1/workspaces", request_body = CreateWorkspace,
    responses((status = 201, description = "It was created.", body = WorkspaceView)))]
pub(super) async fn create(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Wish(wish): Wish<CreateWorkspace>,
) -> Result<(StatusCode, Json<WorkspaceView>), Refused> {
    Ok((StatusCode::CREATED, Json(agent.create_workspace(&peer.caller, wish).await?)))
}

/// Lists the workspaces.
#[utoipa::path(get, path = "/v1/workspaces",
    responses((status = 200, description = "All of them.", body = Vec<WorkspaceView>)))]
pub(super) async fn list(State(agent): State<Agent>) -> Result<Json<Vec<WorkspaceView>>, Refused> {
    Ok(Json(agent.workspaces().await?))
}

/// Shows head, version, generation, lease, writer and suspects of a workspace.
#[utoipa::path(get, path = "/v1/workspaces/{id}",
    params(("id" = String, Path, description = "Its name, percent-encoded.")),
    responses((status = 200, description = "As it stands.", body = WorkspaceView)))]
pub(super) async fn status(
    State(agent): State<Agent>,
    Segment(id): Segment<String>,
) -> Result<Json<WorkspaceView>, Refused> {
    Ok(Json(agent.workspace(&id).await?))
}

/// How much of a history.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Length {
    /// At most so many rows, newest last; 100 if absent.
    limit: Option<usize>,
}

/// Shows publications, refusals and takeovers of a workspace.
#[utoipa::path(get, path = "/v1/workspaces/{id}/history",
    params(("id" = String, Path, description = "Its name, percent-encoded."), Length),
    responses((status = 200, description = "The rows.", body = Vec<HistoryView>)))]
pub(super) async fn history(
    State(agent): State<Agent>,
    Segment(id): Segment<String>,
    Query(length): Query<Length>,
) -> Result<Json<Vec<HistoryView>>, Refused> {
    Ok(Json(agent.history(&id, length.limit.unwrap_or(100)).await?))
}

/// Fences the writer of a workspace.
#[utoipa::path(post, path = "/v1/workspaces/{id}/fence", request_body = FenceSession,
    params(("id" = String, Path, description = "Its name, percent-encoded.")),
    responses((status = 200, description = "How far it is.", body = Fenced)))]
pub(super) async fn fence(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(id): Segment<String>,
    Wish(wish): Wish<FenceSession>,
) -> Result<Json<Fenced>, Refused> {
    Ok(Json(agent.fence_workspace(&peer.caller, &id, wish).await?))
}

/// Puts a workspace on HOLD: its writer is frozen, and nothing is granted or published until it is
/// repaired.
#[utoipa::path(post, path = "/v1/workspaces/{id}/hold", request_body = HoldWorkspace,
    params(("id" = String, Path, description = "Its name, percent-encoded.")),
    responses((status = 200, description = "It is on HOLD.", body = WorkspaceView)))]
pub(super) async fn hold(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(id): Segment<String>,
    Wish(wish): Wish<HoldWorkspace>,
) -> Result<Json<WorkspaceView>, Refused> {
    Ok(Json(agent.hold_workspace(&peer.caller, &id, wish).await?))
}

/// Lifts a HOLD above the highest generation that was ever seen.
#[utoipa::path(post, path = "/v1/workspaces/{id}/repair", request_body = RepairWorkspace,
    params(("id" = String, Path, description = "Its name, percent-encoded.")),
    responses((status = 200, description = "It is believed again.", body = WorkspaceView)))]
pub(super) async fn repair(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(id): Segment<String>,
    Wish(wish): Wish<RepairWorkspace>,
) -> Result<Json<WorkspaceView>, Refused> {
    Ok(Json(agent.repair_workspace(&peer.caller, &id, wish).await?))
}

/// Deletes a workspace that has neither sessions nor preserved deltas; its generation lives on.
#[utoipa::path(post, path = "/v1/workspaces/{id}/delete", request_body = DeleteWorkspace,
    params(("id" = String, Path, description = "Its name, percent-encoded.")),
    responses((status = 200, description = "As it was.", body = WorkspaceView)))]
pub(super) async fn delete(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(id): Segment<String>,
    Wish(wish): Wish<DeleteWorkspace>,
) -> Result<Json<WorkspaceView>, Refused> {
    Ok(Json(agent.delete_workspace(&peer.caller, &id, wish).await?))
}

/// Makes a workspace of an OCI image layout or a directory.
#[utoipa::path(post, path = "/v1/import", request_body = ImportWorkspace,
    responses((status = 201, description = "It was created.", body = WorkspaceView)))]
pub(super) async fn import(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Wish(wish): Wish<ImportWorkspace>,
) -> Result<(StatusCode, Json<WorkspaceView>), Refused> {
    Ok((StatusCode::CREATED, Json(agent.import_workspace(&peer.caller, wish).await?)))
}

/// Publishes the layers of an earlier version once more, as a new version.
#[utoipa::path(post, path = "/v1/workspaces/{id}/revert", request_body = RevertWorkspace,
    params(("id" = String, Path, description = "Its name, percent-encoded.")),
    responses((status = 200, description = "It was published.", body = WorkspaceView)))]
pub(super) async fn revert(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(id): Segment<String>,
    Wish(wish): Wish<RevertWorkspace>,
) -> Result<Json<WorkspaceView>, Refused> {
    Ok(Json(agent.revert_workspace(&peer.caller, &id, wish).await?))
}

/// Reads each layer of a workspace's head; a damaged one is marked, and mounted no more.
#[utoipa::path(post, path = "/v1/workspaces/{id}/verify",
    params(("id" = String, Path, description = "Its name, percent-encoded.")),
    responses((status = 200, description = "What was found.", body = WorkspaceReport)))]
pub(super) async fn verify(
    State(agent): State<Agent>,
    Segment(id): Segment<String>,
) -> Result<Json<WorkspaceReport>, Refused> {
    Ok(Json(agent.verify_workspace(&id).await?))
}
