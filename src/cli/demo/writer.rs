//! A confined writer: `session exec` with a shell that does one thing for each line it is fed.

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use super::ask::{Operator, spelled};

/// A running writer and everything it said.
pub(super) struct Writer {
    /// The command line that started it.
    pub(super) asked: String,
    client: Child,
    stdin: ChildStdin,
    heard: Receiver<String>,
    said: Vec<String>,
}

impl Writer {
    /// Starts `script` in the session.
    pub(super) fn start(operator: &Operator, session: &str, script: &str) -> Result<Self, String> {
        let words = ["session", "exec", session, "--", "/bin/sh", "-c", script];
        let asked = spelled(&words);
        let fault = |what: &str| format!("`{asked}`: {what}");
        let mut client = operator
            .command(&words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| fault(&e.to_string()))?;
        let (Some(stdin), Some(stdout), Some(stderr)) =
            (client.stdin.take(), client.stdout.take(), client.stderr.take())
        else {
            return Err(fault("a pipe is missing"));
        };
        let (tell, heard) = channel();
        listen(stdout, tell.clone());
        listen(stderr, tell);
        Ok(Self { asked, client, stdin, heard, said: vec![] })
    }

    /// Feeds it a line.
    pub(super) fn feed(&mut self, line: &str) -> Result<(), String> {
        writeln!(self.stdin, "{line}").map_err(|e| format!("the writer takes no line: {e}"))
    }

    /// Waits until it said something with `part` in it; the line.
    pub(super) fn hears(&mut self, part: &str, limit: Duration) -> Result<String, String> {
        let until = Instant::now() + limit;
        let mut looked = 0;
        loop {
            if let Some(line) = self.said[looked..].iter().find(|line| line.contains(part)) {
                return Ok(line.clone());
            }
            looked = self.said.len();
            match self.heard.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) => self.said.push(line),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    return Err(format!("no {part:?} within {limit:?}; it said {:?}", self.said));
                }
            }
        }
    }

    /// Waits for the end of `session exec` itself; its exit code.
    pub(super) fn client_ends(&mut self, limit: Duration) -> Result<i32, String> {
        let until = Instant::now() + limit;
        loop {
            match self.client.try_wait() {
                Ok(Some(status)) => return Ok(status.code().unwrap_or(-1)),
                Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
                Ok(None) => return Err(format!("`session exec` did not end within {limit:?}")),
                Err(e) => return Err(e.to_string()),
            }
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // What runs in the session ends with the session's cgroup.
        let _ = self.client.kill();
        let _ = self.client.wait();
    }
}

/// Ends when the last process that holds the pipe does.
fn listen(pipe: impl Read + Send + 'static, tell: Sender<String>) {
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            if tell.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                return;
            }
        }
    });
}
