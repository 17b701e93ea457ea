//! `Idempotency-Key`: a request that changes something is done once for a key, however often it is
//! sent. Kept in memory alone: a restart of the agent forgets the keys.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;

use super::problem::Refused;
use super::routes::Peer;
use crate::agent::failure::Failure;
use crate::model::code::Code;

/// The header.
pub(super) const HEADER: &str = "idempotency-key";

/// Keys remembered at once; the one answered longest ago makes place.
const KEYS: usize = 1024;

/// How long an answer is remembered.
const REMEMBERED: Duration = Duration::from_secs(600);

/// Longest key, in bytes.
const LONGEST: usize = 128;

/// Largest body of a request.
const BODY: usize = 2 << 20;

/// The keys of an agent; cheap to clone.
#[derive(Clone, Default)]
pub(super) struct Ledger(Arc<Mutex<HashMap<Name, Entry>>>);

/// A key belongs to who sent it: an answer may hold a lease token.
type Name = (u32, String);

struct Entry {
    /// Digest of what was asked.
    asked: [u8; 32],
    /// Comes once; `None` until then.
    answer: watch::Receiver<Option<Answer>>,
    /// When it came, as far as somebody looked.
    answered: Option<Instant>,
}

impl Entry {
    /// Whether it was answered, or never will be.
    fn is_over(&self) -> bool {
        self.answer.borrow().is_some() || self.answer.has_changed().is_err()
    }
}

#[derive(Clone)]
struct Answer {
    status: StatusCode,
    kind: Option<HeaderValue>,
    body: Bytes,
}

/// What a key comes to.
enum Turn {
    /// It is new: do it, and say how it went.
    First(watch::Sender<Option<Answer>>),
    /// It is known: this is or will be the answer.
    Again(watch::Receiver<Option<Answer>>),
}

impl Ledger {
    fn turn(&self, name: Name, asked: [u8; 32], now: Instant) -> Result<Turn, Failure> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for entry in known.values_mut() {
            if entry.answered.is_none() && entry.is_over() {
                entry.answered = Some(now);
            }
        }
        known.retain(|_, entry| {
            entry.answered.is_none_or(|at| now.saturating_duration_since(at) < REMEMBERED)
        });
        match known.get(&name) {
            Some(entry) if entry.asked == asked => return Ok(Turn::Again(entry.answer.clone())),
            Some(_) => {
                let text = format!("the {HEADER} {:?} was used for another request", name.1);
                return Err(Failure::new(Code::KeyUsed, text));
            }
            None => {}
        }
        if known.len() >= KEYS {
            let answered = known.iter().filter_map(|(name, e)| Some((e.answered?, name.clone())));
            let Some((_, oldest)) = answered.min() else {
                let text = format!("{KEYS} requests with an {HEADER} are under way; wait for one");
                return Err(Failure::new(Code::Busy, text));
            };
            known.remove(&oldest);
        }
        let (done, answer) = watch::channel(None);
        known.insert(name, Entry { asked, answer, answered: None });
        Ok(Turn::First(done))
    }
}

/// Does a POST that carries a key once; the same request again gets the first one's answer, also
/// while that is still to come.
pub(super) async fn once(State(ledger): State<Ledger>, request: Request, next: Next) -> Response {
    match settle(&ledger, request, next).await {
        Ok(response) => response,
        Err(failure) => Refused(failure).into_response(),
    }
}

async fn settle(ledger: &Ledger, request: Request, next: Next) -> Result<Response, Failure> {
    let Some(key) = key(&request)? else { return Ok(next.run(request).await) };
    let uid = request.extensions().get::<Peer>().map_or(u32::MAX, |peer| peer.caller.uid);
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, BODY).await.map_err(|fault| {
        Failure::new(Code::BadRequest, format!("the body is not read: {fault}"))
    })?;
    let mut digest = Sha256::new();
    for part in [parts.method.as_str().as_bytes(), parts.uri.to_string().as_bytes()] {
        digest.update(part);
        digest.update(b"\n");
    }
    digest.update(&body);
    let mut answer = match ledger.turn((uid, key), digest.finalize().into(), Instant::now())? {
        Turn::Again(answer) => answer,
        Turn::First(done) => {
            let answer = done.subscribe();
            let request = Request::from_parts(parts, Body::from(body));
            // Apart from the connection: one that breaks does not end the work in the middle.
            tokio::spawn(async move {
                let whole = whole(next.run(request).await).await;
                done.send_replace(Some(whole));
            });
            answer
        }
    };
    let failed = |_| Failure::new(Code::Internal, "the request ended without an answer");
    let answer = answer.wait_for(Option::is_some).await.map_err(failed)?.clone();
    let Some(Answer { status, kind, body }) = answer else {
        return Err(Failure::new(Code::Internal, "the request ended without an answer"));
    };
    let mut response = (status, Body::from(body)).into_response();
    if let Some(kind) = kind {
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
    }
    Ok(response)
}

fn key(request: &Request) -> Result<Option<String>, Failure> {
    let Some(value) = request.headers().get(HEADER) else { return Ok(None) };
    // What may be sent is asked anew each time: an answer of before authorises nothing now, and an
    // external request has a key of its own.
    if request.method() != Method::POST || request.uri().path().ends_with("/requests") {
        return Ok(None);
    }
    let text = value.to_str().unwrap_or_default();
    if text.is_empty() || text.len() > LONGEST {
        let text = format!("{HEADER} wants 1 to {LONGEST} visible ASCII characters");
        return Err(Failure::new(Code::BadRequest, text));
    }
    Ok(Some(text.to_owned()))
}

/// A response with all of its body. Answers to POST are short; one that cannot be read is a failure.
async fn whole(response: Response) -> Answer {
    let (parts, body) = response.into_parts();
    let kind = parts.headers.get(header::CONTENT_TYPE).cloned();
    match to_bytes(body, usize::MAX).await {
        Ok(body) => Answer { status: parts.status, kind, body },
        Err(_) => Answer { status: StatusCode::INTERNAL_SERVER_ERROR, kind, body: Bytes::new() },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use axum::Router;
    use axum::routing::post;
    use tokio::sync::Notify;
    use tower::ServiceExt as _;

    use super::*;
    use crate::agent::failure::Caller;
    use crate::api::peer::Rights;

    /// Counts how often it is really done; each waits for `go`.
    struct Rig {
        router: Router,
        done: Arc<AtomicU32>,
        go: Arc<Notify>,
    }

    fn rig(free: bool) -> Rig {
        let (done, go) = (Arc::new(AtomicU32::new(0)), Arc::new(Notify::new()));
        let (count, gate) = (done.clone(), go.clone());
        let work = move |body: String| async move {
            if !free {
                gate.notified().await;
            }
            let n = count.fetch_add(1, Ordering::SeqCst) + 1;
            match body.as_str() {
                "bad" => Refused(Failure::new(Code::Busy, format!("no {n}"))).into_response(),
                _ => axum::Json(n).into_response(),
            }
        };
        let router = Router::new()
            .route("/a", post(work.clone()).get(work.clone()))
            .route("/b", post(work))
            .layer(axum::middleware::from_fn_with_state(Ledger::default(), once));
        Rig { router, done, go }
    }

    async fn ask(rig: &Rig, uid: u32, path: &str, key: &str, body: &str) -> (u16, String) {
        let caller = Caller { uid, gid: 0, pid: 1, login_uid: None };
        let method = path.strip_prefix("GET ").map_or("POST", |_| "GET");
        let mut request = Request::builder().method(method).uri(path.trim_start_matches("GET "));
        if !key.is_empty() {
            request = request.header(HEADER, key);
        }
        let request = request
            .extension(Peer { caller, rights: Rights::Operate })
            .body(Body::from(body.to_owned()))
            .unwrap();
        let response = rig.router.clone().oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        let body = to_bytes(response.into_body(), 1 << 16).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn the_same_request_is_done_once_for_a_key() {
        let rig = rig(true);
        for (uid, path, key, body, status, answer) in [
            (0, "/a", "k1", "x", 200, "1"),
            (0, "/a", "k1", "x", 200, "1"),
            (0, "/a", "k2", "x", 200, "2"),
            // No key, no memory.
            (0, "/a", "", "x", 200, "3"),
            (0, "/a", "", "x", 200, "4"),
            // Another one's key is another key.
            (7, "/a", "k1", "x", 200, "5"),
            (0, "/a", "k1", "x", 200, "1"),
            (0, "GET /a", "k1", "x", 200, "6"),
        ] {
            assert_eq!(ask(&rig, uid, path, key, body).await, (status, answer.to_owned()), "{key}");
        }
        let refused = ask(&rig, 0, "/a", "k3", "bad").await;
        assert_eq!(refused.0, 409);
        assert!(refused.1.contains("no 7"), "{}", refused.1);
        assert_eq!(ask(&rig, 0, "/a", "k3", "bad").await, refused);
        assert_eq!(rig.done.load(Ordering::SeqCst), 7);
    }

    #[tokio::test]
    async fn a_key_stands_for_one_request() {
        let rig = rig(true);
        assert_eq!(ask(&rig, 0, "/a", "k", "x").await.0, 200);
        for (path, body) in [("/a", "y"), ("/b", "x"), ("/a?z=1", "x")] {
            let (status, text) = ask(&rig, 0, path, "k", body).await;
            assert_eq!(status, 409, "{path} {body}");
            assert!(text.contains("\"code\":\"key_used\""), "{text}");
        }
        let long = "k".repeat(LONGEST + 1);
        assert_eq!(ask(&rig, 0, "/a", &long, "x").await.0, 400);
        assert_eq!(rig.done.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn a_second_asker_waits_for_the_first_ones_answer_and_a_lost_one_ends_nothing() {
        let rig = Arc::new(rig(false));
        let asker = rig.clone();
        let first = tokio::spawn(async move { ask(&asker, 0, "/a", "k", "x").await });
        tokio::task::yield_now().await;
        // Its connection breaks while the work is under way.
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        let asker = rig.clone();
        let second = tokio::spawn(async move { ask(&asker, 0, "/a", "k", "x").await });
        tokio::task::yield_now().await;
        assert!(!second.is_finished());
        assert_eq!(ask(&rig, 0, "/a", "k", "other").await.0, 409);
        rig.go.notify_one();
        assert_eq!(second.await.unwrap(), (200, "1".to_owned()));
        assert_eq!(ask(&rig, 0, "/a", "k", "x").await, (200, "1".to_owned()));
        assert_eq!(rig.done.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn keys_are_bounded_in_number_and_time() {
        let (ledger, now) = (Ledger::default(), Instant::now());
        let at = |s: u64| now + Duration::from_secs(s);
        let begin = |n: usize, s: u64| match ledger.turn((0, n.to_string()), [0; 32], at(s)) {
            Ok(Turn::First(done)) => Some(done),
            Ok(Turn::Again(_)) => None,
            Err(failure) => panic!("{failure}"),
        };
        let answer = || Some(Answer { status: StatusCode::OK, kind: None, body: Bytes::new() });
        let running: Vec<_> = (0..KEYS).map(|n| begin(n, 0).unwrap()).collect();
        // What is under way is never forgotten.
        let full = ledger.turn((0, "more".to_owned()), [0; 32], at(9_999));
        assert!(full.is_err_and(|failure| failure.code == Code::Busy));
        running[5].send_replace(answer());
        assert!(begin(5, 10_000).is_none(), "it is remembered");
        running[6].send_replace(answer());
        assert!(begin(6, 10_001).is_none());
        // The one answered first makes place.
        assert!(begin(KEYS, 10_002).is_some());
        assert!(begin(6, 10_003).is_none());
        assert_eq!(ledger.0.lock().unwrap().len(), KEYS);
        assert!(begin(6, 10_001 + 599).is_none());
        assert!(begin(6, 10_001 + 600).is_some(), "an answer is forgotten after ten minutes");
    }
}
