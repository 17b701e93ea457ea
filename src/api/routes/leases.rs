//! `/v1/leases`

use axum::Json;
use axum::extract::{Extension, State};

use super::super::problem::{Refused, Segment, Wish};
use super::Peer;
use crate::agent::handle::Agent;
use crate::model::view::{Fenced, LeaseView, RevokeLease};

/// Lists the present lease of each workspace, or else its last one.
#[utoipa::path(get, path = "/v1/leases",
    responses((status = 200, description = "One a workspace that ever had one.", body = Vec<LeaseView>)))]
pub(super) async fn list(State(agent): State<Agent>) -> Result<Json<Vec<LeaseView>>, Refused> {
    Ok(Json(agent.leases().await?))
}

/// Takes a lease away; its writer is fenced.
#[utoipa::path(post, path = "/v1/leases/{id}/revoke", request_body = RevokeLease,
    params(("id" = String, Path, description = "A unique prefix of its id.")),
    responses((status = 200, description = "How far the fence is.", body = Fenced)))]
pub(super) async fn revoke(
    State(agent): State<Agent>,
    Extension(peer): Extension<Peer>,
    Segment(prefix): Segment<String>,
    Wish(wish): Wish<RevokeLease>,
) -> Result<Json<Fenced>, Refused> {
    Ok(Json(agent.revoke(&peer.caller, &prefix, wish).await?))
}
