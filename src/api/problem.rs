//! Failures as `application/problem+json` (RFC 9457), both ways, and bodies read strictly.

use axum::body::{Body, Bytes};
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::{StatusCode, header, request::Parts};
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;

use crate::agent::failure::Failure;
use crate::model::code::Code;
use crate::model::view::Problem;

const TYPE: &str = "application/problem+json";

/// How a failure is sent.
pub fn problem_of(failure: &Failure) -> Problem {
    Problem {
        kind: format!("about:overfence:{}", failure.code),
        status: failure.code.status(),
        code: failure.code.to_string(),
        title: failure.code.meaning().into(),
        detail: failure.message.clone(),
        current: failure.current.as_deref().cloned(),
        request: failure.request.as_deref().cloned(),
    }
}

/// What a problem says. A code that this build does not know becomes `internal`, with the word
/// in the message.
pub fn failure_of(problem: Problem) -> Failure {
    let known = Code::ALL.iter().find(|code| code.as_str() == problem.code);
    let (code, message) = match known {
        Some(&code) => (code, problem.detail),
        None => (Code::Internal, format!("{}: {}", problem.code, problem.detail)),
    };
    let (current, request) = (problem.current.map(Box::new), problem.request.map(Box::new));
    Failure { code, message, current, request }
}

/// A failure on its way out.
#[derive(Debug)]
pub(super) struct Refused(pub(super) Failure);

impl From<Failure> for Refused {
    fn from(failure: Failure) -> Self {
        Self(failure)
    }
}

impl Refused {
    pub(super) fn bad(message: impl Into<String>) -> Self {
        Self(Failure::new(Code::BadRequest, message))
    }
}

impl From<PathRejection> for Refused {
    fn from(fault: PathRejection) -> Self {
        Self::bad(format!("the path is not valid: {}", fault.body_text()))
    }
}

impl From<QueryRejection> for Refused {
    fn from(fault: QueryRejection) -> Self {
        Self::bad(fault.body_text())
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let problem = problem_of(&self.0);
        let status =
            StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let text = serde_json::to_vec(&problem).unwrap_or_default();
        (status, [(header::CONTENT_TYPE, TYPE)], Body::from(text)).into_response()
    }
}

/// A JSON body; none at all is an empty object.
pub(super) struct Wish<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Wish<T> {
    type Rejection = Refused;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refused> {
        let body = Bytes::from_request(request, state).await.map_err(|fault| {
            Refused::bad(format!("the body is not read: {}", fault.body_text()))
        })?;
        wish(&body).map(Self)
    }
}

pub(super) fn wish<T: DeserializeOwned>(body: &[u8]) -> Result<T, Refused> {
    let body = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(body)
        .map_err(|fault| Refused::bad(format!("the body is not what is expected here: {fault}")))
}

/// As axum's `Path` and `Query`, with our problems.
macro_rules! extractor {
    ($name:ident, $of:ty) => {
        pub(super) struct $name<T>(pub(super) T);

        impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for $name<T> {
            type Rejection = Refused;

            async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refused> {
                Ok(Self(<$of>::from_request_parts(parts, state).await?.0))
            }
        }
    };
}

extractor!(Segment, axum::extract::Path<T>);
extractor!(Query, axum::extract::Query<T>);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ids::Generation;
    use crate::model::view::{CloseSession, CreateWorkspace};
    use crate::model::workspace::Current;

    fn request() -> crate::model::view::RequestView {
        crate::model::view::RequestView {
            workspace: "w".into(),
            task: "t".into(),
            key: "k".into(),
            about: String::new(),
            state: "OPEN".into(),
            outcome: None,
            settled_by: None,
            settled_how: None,
            note: None,
            session: "s".into(),
            generation: 1,
            resumed_by: None,
            host: "h".into(),
            owner: "o".into(),
            assignee: "o".into(),
            began_at: String::new(),
            changed_at: String::new(),
        }
    }

    #[tokio::test]
    async fn every_code_goes_there_and_back() {
        for &code in Code::ALL {
            let current = Current {
                owner: None,
                session: None,
                lease_state: None,
                generation: Generation(7),
                at: Default::default(),
                hold: Some("why".into()),
            };
            let sent = Failure {
                current: Some(Box::new(current)),
                request: Some(Box::new(request())),
                ..Failure::new(code, "why")
            };
            let response = Refused(sent.clone()).into_response();
            assert_eq!(response.status().as_u16(), code.status());
            assert_eq!(response.headers()["content-type"], TYPE);
            let body = axum::body::to_bytes(response.into_body(), 1 << 16).await.unwrap();
            let problem: Problem = serde_json::from_slice(&body).unwrap();
            assert_eq!(problem.kind, format!("about:overfence:{code}"));
            assert_eq!(problem.title, code.meaning());
            let back = failure_of(problem);
            assert_eq!((back.code, back.message), (code, sent.message));
            assert_eq!((back.current, back.request), (sent.current, sent.request));
        }
    }

    #[test]
    fn a_code_of_another_build_is_not_lost() {
        let mut problem = problem_of(&Failure::new(Code::Busy, "why"));
        problem.code = "brand_new".into();
        let failure = failure_of(problem);
        assert_eq!((failure.code, failure.message.as_str()), (Code::Internal, "brand_new: why"));
    }

    #[test]
    fn bodies_are_read_strictly() {
        assert!(wish::<CloseSession>(b"").unwrap().mode.is_none());
        for (body, part) in [
            (&b"{\"mdoe\":\"keep\"}"[..], "unknown field `mdoe`"),
            (b"{\"mode\":\"burn\"}", "unknown variant `burn`"),
            (b"{", "EOF"),
            (b"3", "invalid type"),
        ] {
            let Err(Refused(failure)) = wish::<CloseSession>(body) else { panic!("it was taken") };
            assert_eq!(failure.code, Code::BadRequest);
            assert!(failure.message.contains(part), "{}", failure.message);
        }
        let Err(Refused(failure)) = wish::<CreateWorkspace>(b"") else { panic!("it was taken") };
        assert!(failure.message.contains("missing field `id`"), "{}", failure.message);
    }
}
