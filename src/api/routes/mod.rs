//! What may be asked. Each handler is one call of the agent's handle; who may call it is decided
//! before, and a query key that the document does not name is refused.

mod agent;
mod leases;
mod ledger;
mod preserved;
mod sessions;
mod workspaces;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use utoipa::openapi::path::{Operation, Parameter, ParameterIn};
use utoipa::openapi::{OpenApi, Ref, RefOr, Response as Described};
use utoipa::{OpenApi as _, PartialSchema as _};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::once::{self, Ledger};
use super::peer::Rights;
use super::problem::Refused;
use crate::agent::failure::{Caller, Failure};
use crate::agent::handle::Agent;
use crate::model::code::Code;
use crate::model::view::Problem;

pub use agent::TicketKey;
pub(super) use agent::watched;

/// Who asks and what they may do; known for the whole connection.
#[derive(Clone)]
pub(super) struct Peer {
    pub(super) caller: Caller,
    pub(super) rights: Rights,
}

#[derive(utoipa::OpenApi)]
#[openapi(
    info(title = "overfence", description = "Over the UNIX socket /run/overfence/overfence.sock."),
    components(schemas(Problem))
)]
struct Document;

fn described() -> OpenApiRouter<Agent> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(workspaces::create, workspaces::list))
        .routes(routes!(workspaces::status))
        .routes(routes!(workspaces::history))
        .routes(routes!(workspaces::fence))
        .routes(routes!(workspaces::hold))
        .routes(routes!(workspaces::repair))
        .routes(routes!(workspaces::delete))
        .routes(routes!(workspaces::import))
        .routes(routes!(workspaces::revert))
        .routes(routes!(workspaces::verify))
        .routes(routes!(sessions::open, sessions::list))
        .routes(routes!(sessions::inspect))
        .routes(routes!(sessions::diff))
        .routes(routes!(sessions::exec))
        .routes(routes!(sessions::checkpoint))
        .routes(routes!(sessions::close))
        .routes(routes!(sessions::fence))
        .routes(routes!(sessions::readmit))
        .routes(routes!(sessions::beat))
        .routes(routes!(leases::list))
        .routes(routes!(leases::revoke))
        .routes(routes!(preserved::list))
        .routes(routes!(preserved::export))
        .routes(routes!(preserved::discard))
        .routes(routes!(preserved::keep))
        .routes(routes!(preserved::apply))
        .routes(routes!(preserved::gc))
        .routes(routes!(ledger::publications))
        .routes(routes!(ledger::publication))
        .routes(routes!(ledger::resolve_publication))
        .routes(routes!(ledger::assign_publication))
        .routes(routes!(ledger::requests))
        .routes(routes!(ledger::begin))
        .routes(routes!(ledger::ack))
        .routes(routes!(ledger::resolve))
        .routes(routes!(ledger::assign))
        .routes(routes!(agent::evidence))
        .routes(routes!(agent::verify))
        .routes(routes!(agent::events))
        .routes(routes!(agent::status))
        .routes(routes!(agent::drain))
        .routes(routes!(agent::backup))
        .routes(routes!(agent::breaker))
        .routes(routes!(agent::breaker_reset))
        .routes(routes!(agent::ticket_key))
        .routes(routes!(agent::metrics))
        .routes(routes!(agent::healthz))
}

/// The document of this API, as committed in `openapi.json`.
pub fn openapi() -> OpenApi {
    let mut document = described().into_openapi();
    for (path, item) in &mut document.paths.paths {
        for operation in [&mut item.get, &mut item.post].into_iter().flatten() {
            operation.responses.responses.insert("default".into(), RefOr::T(problem()));
        }
        // A begin is asked anew each time.
        let takes_key = !path.ends_with("/requests");
        if let Some(operation) = item.post.as_mut().filter(|_| takes_key) {
            operation.parameters.get_or_insert_default().push(RefOr::T(key()));
        }
    }
    document
}

fn key() -> Parameter {
    Parameter::builder()
        .name("Idempotency-Key")
        .parameter_in(ParameterIn::Header)
        .required(utoipa::openapi::Required::False)
        .description(Some(
            "1 to 128 visible ASCII characters. The same request with the same key from the same \
             user is done once and gets the first answer, also while that is still to come; \
             another request with it is refused with `key_used`. 1,024 keys are remembered, each \
             for ten minutes after its answer, in memory: a restart of the agent forgets them.",
        ))
        .schema(Some(String::schema()))
        .build()
}

fn problem() -> Described {
    let schema = RefOr::Ref(Ref::from_schema_name("Problem"));
    Described::builder()
        .description("It did not succeed; `code` says why.")
        .content("application/problem+json", utoipa::openapi::Content::new(Some(schema)))
        .build()
}

/// The query keys each path takes.
type Queries = BTreeMap<String, BTreeSet<String>>;

fn queries(document: &OpenApi) -> Queries {
    let keys = |operation: &Operation| {
        let all = operation.parameters.iter().flatten().filter_map(|parameter| match parameter {
            RefOr::T(parameter) => Some(parameter),
            RefOr::Ref(_) => None,
        });
        let query = all.filter(|parameter| matches!(parameter.parameter_in, ParameterIn::Query));
        query.map(|parameter| parameter.name.clone()).collect::<Vec<_>>()
    };
    let paths = document.paths.paths.iter();
    paths
        .map(|(path, item)| {
            let operations = [&item.get, &item.post].into_iter().flatten();
            (path.clone(), operations.flat_map(keys).collect())
        })
        .collect()
}

/// Everything that may be asked of `agent`. Each request carries a [`Peer`].
pub(super) fn router(agent: Agent) -> Router {
    let (router, document) = described().split_for_parts();
    let queries = Arc::new(queries(&document));
    router
        .route_layer(axum::middleware::from_fn_with_state(queries, only_known_queries))
        .fallback(|request: Request| async move {
            let path = request.uri().path();
            Refused(Failure::new(Code::NotFound, format!("there is no {path} in this API")))
        })
        .method_not_allowed_fallback(|request: Request| async move {
            Refused::bad(format!("{} does not take {}", request.uri().path(), request.method()))
        })
        .layer(axum::middleware::from_fn_with_state(Ledger::default(), once::once))
        .layer(axum::middleware::from_fn(only_the_entitled))
        .with_state(agent)
}

async fn only_the_entitled(request: Request, next: Next) -> Response {
    let peer = request.extensions().get::<Peer>();
    match peer.map(|peer| allowed(peer, request.method())) {
        Some(Ok(())) => next.run(request).await,
        Some(Err(refused)) => refused.into_response(),
        None => Refused(Code::Denied.into()).into_response(),
    }
}

fn allowed(peer: &Peer, method: &Method) -> Result<(), Refused> {
    let message = match (peer.rights, method) {
        (Rights::Operate, _) | (Rights::View, &Method::GET | &Method::HEAD) => return Ok(()),
        (Rights::View, _) => "may only read: ask a member of the operators' group or root",
        (Rights::None, _) => {
            "is not root and not in a group that may use overfence (api.group, api.view_group)"
        }
    };
    Err(Refused(Failure::new(Code::Denied, format!("{} {message}", peer.caller))))
}

async fn only_known_queries(
    State(queries): State<Arc<Queries>>,
    path: MatchedPath,
    request: Request,
    next: Next,
) -> Response {
    let text = request.uri().query().unwrap_or_default();
    let known = queries.get(path.as_str());
    let stranger = text.split('&').filter(|pair| !pair.is_empty()).find_map(|pair| {
        let key = pair.split_once('=').map_or(pair, |(key, _)| key);
        (!known.is_some_and(|known| known.contains(key))).then_some(key)
    });
    match stranger {
        None => next.run(request).await,
        Some(key) => {
            let known = known.into_iter().flatten().cloned().collect::<Vec<_>>().join(", ");
            let known = if known.is_empty() { "none".into() } else { known };
            Refused::bad(format!("unknown query key {key:?}; known here: {known}")).into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_only_read_and_strangers_do_nothing() {
        let caller = Caller { uid: 7, gid: 7, pid: 1, login_uid: None };
        for (rights, method, taken) in [
            (Rights::Operate, Method::POST, true),
            (Rights::Operate, Method::GET, true),
            (Rights::View, Method::GET, true),
            (Rights::View, Method::POST, false),
            (Rights::View, Method::DELETE, false),
            (Rights::None, Method::GET, false),
            (Rights::None, Method::POST, false),
        ] {
            let answer = allowed(&Peer { caller: caller.clone(), rights }, &method);
            match answer {
                Ok(()) => assert!(taken, "{rights:?} {method}"),
                Err(Refused(failure)) => {
                    assert!(!taken, "{rights:?} {method}");
                    assert_eq!(failure.code, Code::Denied);
                    assert!(failure.message.starts_with("uid 7 "), "{}", failure.message);
                }
            }
        }
    }

    #[test]
    fn the_document_names_the_query_keys() {
        let queries = queries(&openapi());
        let of = |path: &str| queries[path].iter().map(String::as_str).collect::<Vec<_>>();
        assert_eq!(of("/v1/events"), ["follow", "since"]);
        assert_eq!(of("/v1/evidence"), ["last", "limit", "session", "since"]);
        assert_eq!(of("/v1/sessions/{id}/close"), [""; 0]);
    }

    #[test]
    fn the_committed_document_is_this_one() {
        let mut text = openapi().to_pretty_json().unwrap();
        text.push('\n');
        crate::golden::check("openapi.json", &text);
    }
}
