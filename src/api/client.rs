//! The other end of the API, for the command line: blocking, no thread of its own (a command that
//! places workloads may have only one).

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
        self.ask(Method::GET, path, Bytes::new())
    }

    /// Asks that something be done.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        wish: &impl Serialize,
    ) -> Result<T, Failure> {
        let body = serde_json::to_vec(wish).map_err(|fault| {
            Failure::new(Code::Internal, format!("cannot write {path}: {fault}"))
        })?;
        self.ask(Method::POST, path, body.into())
    }

    fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<T, Failure> {
        let answer = self.runtime.block_on(async {
            let whole = async {
                let response = self.send(method, path, body).await?;
                let body = response.into_body().collect().await;
                body.map(|body| body.to_bytes()).map_err(|fault| self.cut_off(&fault))
            };
            match self.timeout {
                None => whole.await,
                Some(span) => tokio::time::timeout(span, whole).await.unwrap_or_else(|_| {
                    Err(Failure::new(
                        Code::TimedOut,
                        format!(
                            "the agent did not answer within {}; it may still do what was asked, \
                             see `overfence status`",
                            crate::config::duration::text(span)
                        ),
                    ))
                }),
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
            let mut body = self.send(Method::GET, path, Bytes::new()).await?.into_body();
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

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response<Incoming>, Failure> {
        let stream = UnixStream::connect(&self.socket).await.map_err(|f| self.unreachable(&f))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|fault| self.cut_off(&fault))?;
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "overfence")
            .header("content-type", "application/json")
            .body(Full::new(body))
            .map_err(|fault| Failure::new(Code::BadRequest, format!("{path}: {fault}")))?;
        let response = sender.send_request(request).await.map_err(|fault| self.cut_off(&fault))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let body = response.into_body().collect().await.map_err(|fault| self.cut_off(&fault))?;
        Err(refusal(status, &body.to_bytes()))
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

fn refusal(status: StatusCode, body: &[u8]) -> Failure {
    match serde_json::from_slice(body) {
        Ok(problem) => failure_of(problem),
        Err(_) => {
            let text = String::from_utf8_lossy(body);
            Failure::new(Code::Internal, format!("the agent answered {status}: {}", text.trim()))
        }
    }
}
