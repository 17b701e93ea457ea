//! `/v1/publications` and `/v1/requests`

use axum::Json;
use axum::extract::{Extension, State};
use serde::Deserialize;
use utoipa::IntoParams;

use super::super::problem::{Query, Refused, Segment, Wish};
use super::Peer;
use crate::agent::handle::{Agent, Listed};
use crate::model::view::{
    AssignPublication, AssignRequest, BeginRequest, BegunRequest, PublicationView, RequestView,
    SettleRequest,
};

/// Which rows.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct Rows {
    /// Of this workspace alone.
    workspace: Option<String>,
    /// `true`: also those whose outcome is known.
    all: Option<bool>,
}

impl From<Rows> for Listed {
    fn from(rows: Rows) -> Self {
        Self { workspace: rows.workspace, all: rows.all.unwrap_or(false) }
    }
}

/// Lists publications whose outcome is still to come.
#[utoipa::path(get, path = "/v1/publications", params(Rows),
    responses((status = 200, description = "Newest first.", body = Vec<PublicationView>)))]
pub(super) async fn publications(
    State(agent): State<Agent>,
    Query(rows): Query<Rows>,
) -> Result<Json<Vec<PublicationView>>, Refused> {
    Ok(Json(agent.publications(rows.into()).await?))
}

/// Shows one publication.
#[utoipa::path(get, path = "/v1/publications/{id}",
    params(("id" = String, Path, description = "A unique prefix of its key.")),
    responses((status = 200, description = "As the ledger has it.", body = PublicationView)))]
pub(super) async fn publication(
    State(agent): State<Agent>,
    Segment(prefix): Segment<String>,
) -> Result<Json<PublicationView>, Refused> {
    Ok(Json(agent.publication(&prefix).await?))
}

/// Finds what became of a publication, or buries its key.
#[utoipa::path(post, path = "/v1/publications/{id}/resolve",
    params(("id" = String, Path, description = "A unique prefix of its key.")),
    responses((status = 200, description = "What became of it, for good.", body = PublicationView)))]
pub(super) async fn resolve_publication(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(prefix): Segment<String>,
) -> Result<Json<PublicationView>, Refused> {
    Ok(Json(agent.resolve_publication(&peer.caller, &prefix).await?))
}

/// Gives an open publication to somebody.
#[utoipa::path(post, path = "/v1/publications/{id}/assign", request_body = AssignPublication,
    params(("id" = String, Path, description = "A unique prefix of its key.")),
    responses((status = 200, description = "As it stands.", body = PublicationView)))]
pub(super) async fn assign_publication(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(prefix): Segment<String>,
    Wish(wish): Wish<AssignPublication>,
) -> Result<Json<PublicationView>, Refused> {
    Ok(Json(agent.assign_publication(&peer.caller, &prefix, wish).await?))
}

/// Lists external requests whose outcome is still to come.
#[utoipa::path(get, path = "/v1/requests", params(Rows),
    responses((status = 200, description = "Latest first.", body = Vec<RequestView>)))]
pub(super) async fn requests(
    State(agent): State<Agent>,
    Query(rows): Query<Rows>,
) -> Result<Json<Vec<RequestView>>, Refused> {
    Ok(Json(agent.requests(rows.into()).await?))
}

/// Records that a session is about to send an external request.
#[utoipa::path(post, path = "/v1/sessions/{id}/requests", request_body = BeginRequest,
    params(("id" = String, Path, description = "A unique prefix of its id.")),
    responses((status = 200, description = "It is durable.", body = BegunRequest)))]
pub(super) async fn begin(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(prefix): Segment<String>,
    Wish(wish): Wish<BeginRequest>,
) -> Result<Json<BegunRequest>, Refused> {
    let id = agent.session_id(&prefix).await?;
    Ok(Json(agent.begin_request(&peer.caller.to_string(), id, wish).await?))
}

/// Records what the far side answered.
#[utoipa::path(post, path = "/v1/workspaces/{id}/requests/ack", request_body = SettleRequest,
    params(("id" = String, Path, description = "The workspace, percent-encoded.")),
    responses((status = 200, description = "It is settled.", body = RequestView)))]
pub(super) async fn ack(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(id): Segment<String>,
    Wish(wish): Wish<SettleRequest>,
) -> Result<Json<RequestView>, Refused> {
    Ok(Json(agent.ack_request(&peer.caller.to_string(), &id, wish).await?))
}

/// Records what a person found out; `note` is wanted.
#[utoipa::path(post, path = "/v1/workspaces/{id}/requests/resolve", request_body = SettleRequest,
    params(("id" = String, Path, description = "The workspace, percent-encoded.")),
    responses((status = 200, description = "It is settled.", body = RequestView)))]
pub(super) async fn resolve(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(id): Segment<String>,
    Wish(wish): Wish<SettleRequest>,
) -> Result<Json<RequestView>, Refused> {
    Ok(Json(agent.resolve_request(&peer.caller, &id, wish).await?))
}

/// Gives an open request to somebody.
#[utoipa::path(post, path = "/v1/workspaces/{id}/requests/assign", request_body = AssignRequest,
    params(("id" = String, Path, description = "The workspace, percent-encoded.")),
    responses((status = 200, description = "As it stands.", body = RequestView)))]
pub(super) async fn assign(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(id): Segment<String>,
    Wish(wish): Wish<AssignRequest>,
) -> Result<Json<RequestView>, Refused> {
    Ok(Json(agent.assign_request(&peer.caller, &id, wish).await?))
}
