//! The other end of the API, for the command line: blocking, no thread of its own (a command that
//! places workloads may have only one).

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};

use super::problem::failure_of;
use crate::agent::failure::Failure;
use crate::model::code::Code;

/// A connection's worth of questions to the agent; each opens a connection of its own.
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
    timeout: Option<Duration>,
    runtime: Runtime,
}

/// What is looked at while an answer is awaited.
pub struct Look<'l, V> {
    /// Where.
    pub path: &'l str,
    /// How long nothing is looked at.
    pub after: Duration,
    /// The time between two looks.
    pub every: Duration,
    /// Is shown what was found.
    pub each: &'l mut dyn FnMut(V),
}

/// How long a look may take.
const LOOK: Duration = Duration::from_secs(2);

/// A path below `/v1`, its segments percent-encoded.
pub fn path(segments: &[&str]) -> String {
    let mut path = String::from("/v1");
    for segment in segments {
        path.push('/');
        for byte in segment.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                    path.push(char::from(byte));
                }
                _ => path.push_str(&format!("%{byte:02X}")),
            }
        }
    }
    path
}

impl Client {
    /// A client of the agent behind `socket`. Each answer may take `timeout`; without one it is
    /// waited for as long as it takes.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn new(socket: &Path, timeout: Option<Duration>) -> Result<Self, Failure> {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|fault| Failure::new(Code::Internal, format!("cannot wait: {fault}")))?;
        Ok(Self { socket: socket.into(), timeout, runtime })
    }

    /// The same agent, asked with no more patience than `timeout`.
    ///
    /// # Errors
    /// As [`Client::new`].
    pub fn within(&self, timeout: Duration) -> Result<Self, Failure> {
        let timeout = self.timeout.map_or(timeout, |own| own.min(timeout));
        Self::new(&self.socket, Some(timeout))
    }

    /// Asks for something.
    ///
    /// # Errors
    /// What the agent answers; `agent_unreachable`; `timed_out`.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        self.ask(Method::GET, path, Bytes::new(), None)
    }

    /// Asks that something be done: once, under a fresh key. A connection that breaks before the
    /// answer is tried a second time with the same key.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        wish: &impl Serialize,
    ) -> Result<T, Failure> {
        self.ask(Method::POST, path, written(path, wish)?, Some(uuid::Uuid::now_v7().to_string()))
    }

    /// [`Client::post`] that looks at something else, too, while it waits for its answer.
    ///
    /// # Errors
    /// As [`Client::get`], of what is asked; a look that fails is left out.
    pub fn post_looking<T: DeserializeOwned, V: DeserializeOwned>(
        &self,
        path: &str,
        wish: &impl Serialize,
        look: Look<'_, V>,
    ) -> Result<T, Failure> {
        let key = Some(uuid::Uuid::now_v7().to_string());
        self.ask_beside(Method::POST, path, written(path, wish)?, key, self.looking(look))
    }

    async fn looking<V: DeserializeOwned>(&self, look: Look<'_, V>) -> Infallible {
        let nothing = Bytes::new();
        tokio::time::sleep(look.after).await;
        loop {
            let asked = self.whole(&Method::GET, look.path, &nothing, None);
            if let Ok(Ok(answer)) = tokio::time::timeout(LOOK, asked).await
                && let Ok(seen) = serde_json::from_slice(&answer)
            {
                (look.each)(seen);
            }
            tokio::time::sleep(look.every).await;
        }
    }

    /// Says something that may arrive more than once: without a key, which would only crowd out
    /// those of others.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn tell<T: DeserializeOwned>(
        &self,
        path: &str,
        what: &impl Serialize,
    ) -> Result<T, Failure> {
        self.ask(Method::POST, path, written(path, what)?, None)
    }

    fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        key: Option<String>,
    ) -> Result<T, Failure> {
        self.ask_beside(method, path, body, key, std::future::pending())
    }

    /// Asks, and does something `beside` until the answer is there.
    fn ask_beside<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        key: Option<String>,
        beside: impl Future<Output = Infallible>,
    ) -> Result<T, Failure> {
        let answer = self.runtime.block_on(async {
            let whole = async {
                let once = || self.whole(&method, path, &body, key.as_deref());
                match once().await {
                    // What is asked may be done: only the same key makes asking again safe. When
                    // nobody answers at all now, the first failure is the one that says more.
                    Err(Broken::CutOff(first)) if key.is_some() => match once().await {
                        Err(Broken::Failed(again)) if again.code == Code::AgentUnreachable => {
                            Err(first)
                        }
                        second => second.map_err(Broken::failure),
                    },
                    first => first.map_err(Broken::failure),
                }
            };
            let in_time = async {
                let Some(span) = self.timeout else { return whole.await };
                tokio::time::timeout(span, whole).await.unwrap_or_else(|_| {
                    Err(Failure::new(
                        Code::TimedOut,
                        format!(
                            "the agent did not answer within {}; it may still do what was asked, \
                             see `overfence status`",
                            crate::config::duration::text(span)
                        ),
                    ))
                })
            };
            tokio::select! {
                biased;
                answer = in_time => answer,
                never = beside => match never {},
            }
        })?;
        serde_json::from_slice(&answer).map_err(|fault| {
            let message = format!(
                "the agent's answer to {path} is not understood: {fault}; are \
                                   agent and command of the same build?"
            );
            Failure::new(Code::Internal, message)
        })
    }

    /// Hands each line of a stream to `each` until it ends or `each` says `false`.
    ///
    /// # Errors
    /// As [`Client::get`]; `agent_unreachable` when the agent ends in the middle.
    pub fn lines(
        &self,
        path: &str,
        mut each: impl FnMut(&[u8]) -> io::Result<bool>,
    ) -> Result<(), Failure> {
        self.runtime.block_on(async {
            let sent = self.send(&Method::GET, path, &Bytes::new(), None).await;
            let mut body = sent.map_err(Broken::failure)?.into_body();
            let mut pending = Vec::new();
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|fault| self.cut_off(&fault))?;
                pending.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
                while let Some(end) = pending.iter().position(|&byte| byte == b'\n') {
                    let line: Vec<u8> = pending.drain(..=end).collect();
                    let more = each(&line[..end]).map_err(|fault| {
                        Failure::new(Code::Internal, format!("cannot write: {fault}"))
                    })?;
                    if !more {
                        return Ok(());
                    }
                }
            }
            Ok(())
        })
    }

    /// One request, with all of its answer.
    async fn whole(
        &self,
        method: &Method,
        path: &str,
        body: &Bytes,
        key: Option<&str>,
    ) -> Result<Bytes, Broken> {
        let response = self.send(method, path, body, key).await?;
        let body = response.into_body().collect().await;
        body.map(|body| body.to_bytes()).map_err(|fault| Broken::CutOff(self.cut_off(&fault)))
    }

    async fn send(
        &self,
        method: &Method,
        path: &str,
        body: &Bytes,
        key: Option<&str>,
    ) -> Result<Response<Incoming>, Broken> {
        let cut_off = |fault: hyper::Error| Broken::CutOff(self.cut_off(&fault));
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|fault| Broken::Failed(self.unreachable(&fault)))?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(cut_off)?;
        tokio::spawn(connection);
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "overfence")
            .header("content-type", "application/json");
        if let Some(key) = key {
            request = request.header(super::once::HEADER, key);
        }
        let request = request.body(Full::new(body.clone())).map_err(|fault| {
            Broken::Failed(Failure::new(Code::BadRequest, format!("{path}: {fault}")))
        })?;
        let response = sender.send_request(request).await.map_err(cut_off)?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let body = response.into_body().collect().await.map_err(cut_off)?;
        Err(Broken::Failed(refusal(status, &body.to_bytes())))
    }

    fn unreachable(&self, fault: &io::Error) -> Failure {
        let socket = self.socket.display();
        let message = match fault.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => format!(
                "no agent listens on {socket} ({fault}); start it with \
                 `overfence agent`, or name its socket with --socket"
            ),
            _ => format!("cannot reach the agent on {socket}: {fault}"),
        };
        Failure::new(Code::AgentUnreachable, message)
    }

    fn cut_off(&self, fault: &hyper::Error) -> Failure {
        let message = format!(
            "the agent on {} ended before it answered ({fault}); what was asked may be done, see \
             `overfence status` once it is back",
            self.socket.display()
        );
        Failure::new(Code::AgentUnreachable, message)
    }
}

/// Why there is no answer.
enum Broken {
    /// The connection broke before it came.
    CutOff(Failure),
    /// Anything else.
    Failed(Failure),
}

impl Broken {
    fn failure(self) -> Failure {
        let (Self::CutOff(failure) | Self::Failed(failure)) = self;
        failure
    }
}

fn written(path: &str, what: &impl Serialize) -> Result<Bytes, Failure> {
    serde_json::to_vec(what)
        .map(Bytes::from)
        .map_err(|fault| Failure::new(Code::Internal, format!("cannot write {path}: {fault}")))
}

fn refusal(status: StatusCode, body: &[u8]) -> Failure {
    match serde_json::from_slice(body) {
        Ok(problem) => failure_of(problem),
        Err(_) => {
            let text = String::from_utf8_lossy(body);
            Failure::new(Code::Internal, format!("the agent answered {status}: {}", text.trim()))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Read as _, Write as _};
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Answers as many connections as it is given answers, each after one request; an empty answer
    /// is a connection that breaks. What the requests carried as their key.
    fn agent(
        answers: &'static [&'static str],
    ) -> (tempfile::TempDir, std::thread::JoinHandle<Vec<Option<String>>>) {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        let served = std::thread::spawn(move || {
            let mut keys = vec![];
            for answer in answers {
                let (stream, _) = listener.accept().unwrap();
                let (mut lines, mut key, mut length) = (BufReader::new(&stream), None, 0);
                loop {
                    let mut line = String::new();
                    lines.read_line(&mut line).unwrap();
                    match line.trim().split_once(": ") {
                        Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                            length = value.parse().unwrap();
                        }
                        Some((name, value)) if name.eq_ignore_ascii_case("idempotency-key") => {
                            key = Some(value.to_owned());
                        }
                        _ => {}
                    }
                    if line.trim().is_empty() {
                        break;
                    }
                }
                lines.read_exact(&mut vec![0; length]).unwrap();
                keys.push(key);
                if !answer.is_empty() {
                    let length = answer.len();
                    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
                    (&stream).write_all(format!("{head}{answer}").as_bytes()).unwrap();
                }
            }
            keys
        });
        (dir, served)
    }

    fn client(dir: &tempfile::TempDir) -> Client {
        Client::new(&dir.path().join("s"), Some(Duration::from_secs(10))).unwrap()
    }

    #[test]
    fn a_broken_connection_is_tried_again_with_the_same_key() {
        let (dir, served) = agent(&["", "3", "4"]);
        assert_eq!(client(&dir).post::<u32>("/v1/x", &serde_json::json!({})).unwrap(), 3);
        assert_eq!(client(&dir).post::<u32>("/v1/x", &serde_json::json!({})).unwrap(), 4);
        let keys = served.join().unwrap();
        assert!(keys[0].is_some());
        assert_eq!(keys[0], keys[1]);
        assert_ne!(keys[1], keys[2], "every wish has a key of its own");
    }

    #[test]
    fn what_is_looked_at_delays_no_answer_and_fails_none() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        let served = std::thread::spawn(move || {
            let request = |stream: &std::os::unix::net::UnixStream| {
                let mut first = String::new();
                BufReader::new(stream).read_line(&mut first).unwrap();
                first
            };
            let say = |mut stream: &std::os::unix::net::UnixStream, body: &str| {
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
                stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
            };
            let (asked, _) = listener.accept().unwrap();
            assert!(request(&asked).starts_with("POST /v1/x "));
            // Seen, not understood, cut off, seen again; the last look gets no answer.
            for answer in ["1", "no JSON", "", "2"] {
                let (look, _) = listener.accept().unwrap();
                assert!(request(&look).starts_with("GET /v1/y "));
                if !answer.is_empty() {
                    say(&look, answer);
                }
            }
            let (_look, _) = listener.accept().unwrap();
            say(&asked, "7");
        });
        let mut seen = vec![];
        let look = Look {
            path: "/v1/y",
            after: Duration::from_millis(1),
            every: Duration::from_millis(1),
            each: &mut |n: u32| seen.push(n),
        };
        let begun = std::time::Instant::now();
        let answer = client(&dir).post_looking::<u32, u32>("/v1/x", &serde_json::json!({}), look);
        assert_eq!(answer.unwrap(), 7);
        assert!(begun.elapsed() < LOOK, "the answer waited for a look");
        assert_eq!(seen, [1, 2]);
        served.join().unwrap();
    }

    #[test]
    fn it_is_tried_twice_and_what_has_no_key_once() {
        let (dir, served) = agent(&["", "", "", ""]);
        let client = client(&dir);
        let lost = |answer: Result<u32, Failure>| {
            let failure = answer.unwrap_err();
            assert_eq!(failure.code, Code::AgentUnreachable);
            assert!(failure.message.contains("ended before it answered"), "{failure}");
        };
        lost(client.post("/v1/x", &serde_json::json!({})));
        lost(client.tell("/v1/beat", &serde_json::json!({})));
        lost(client.get("/v1/status"));
        let keys = served.join().unwrap();
        assert_eq!(
            keys.iter().map(Option::is_some).collect::<Vec<_>>(),
            [true, true, false, false]
        );
    }

    #[test]
    fn an_agent_that_is_gone_by_then_leaves_the_first_failure() {
        let (dir, served) = agent(&[""]);
        let failure = client(&dir).post::<u32>("/v1/x", &serde_json::json!({})).unwrap_err();
        served.join().unwrap();
        assert!(failure.message.contains("ended before it answered"), "{failure}");
    }
}
