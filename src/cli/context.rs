//! Where a verb asks and where it speaks: answers on standard output, words on standard error.

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};
use std::path::PathBuf;

use serde::Serialize;

use super::{Common, Output};
use crate::agent::failure::Failure;
use crate::api::client::Client;
use crate::config::Config;
use crate::model::code::Code;

/// A session's own socket, as its processes see it.
pub(super) const INSIDE: &str = "/run/overfence/session.sock";

/// What every verb gets.
pub(super) struct Context {
    common: Common,
}

impl Context {
    pub(super) fn new(common: Common) -> Self {
        Self { common }
    }

    /// The agent. Its socket is the flag's, the environment's or the configured one; a broken
    /// configuration does not keep an operator from fencing.
    pub(super) fn client(&self) -> Result<Client, Failure> {
        self.client_or(|| self.configured_socket())
    }

    /// The agent of a configuration, if no flag and no variable names another socket.
    pub(super) fn client_of(&self, config: &Config) -> Result<Client, Failure> {
        self.client_or(|| config.socket.clone())
    }

    fn client_or(&self, socket: impl FnOnce() -> PathBuf) -> Result<Client, Failure> {
        let socket = self.common.socket.clone().unwrap_or_else(socket);
        Client::new(&socket, self.common.timeout)
    }

    fn configured_socket(&self) -> PathBuf {
        let named = std::env::var_os("OVERFENCE_CONFIG").map(PathBuf::from);
        match Config::load(named.as_deref()) {
            Ok(config) => config.socket,
            Err(fault) => {
                let socket = Config::default().socket;
                self.note(&format!("overfence: {fault}; asking {}", socket.display()));
                socket
            }
        }
    }

    /// A client of the socket inside a session.
    pub(super) fn inside(&self) -> Result<Client, Failure> {
        Client::new(INSIDE.as_ref(), self.common.timeout)
    }

    pub(super) fn quiet(&self) -> bool {
        self.common.quiet
    }

    pub(super) fn json(&self) -> bool {
        self.common.output == Output::Json
    }

    /// Writes an answer in the form asked for.
    pub(super) fn show<T: Serialize>(
        &self,
        answer: &T,
        table: impl FnOnce(&T) -> String,
    ) -> Result<(), Failure> {
        if self.json() {
            let text = serde_json::to_string_pretty(answer).map_err(|fault| {
                Failure::new(Code::Internal, format!("cannot write the answer: {fault}"))
            })?;
            self.print(&format!("{text}\n"))
        } else {
            self.print(&table(answer))
        }
    }

    /// As [`Context::show`] for a list; that it is empty is said on standard error, so that nobody
    /// waits for a table that does not come.
    pub(super) fn list<T: Serialize>(
        &self,
        all: &[T],
        what: &str,
        table: impl FnOnce(&[T]) -> String,
    ) -> Result<(), Failure> {
        if all.is_empty() && !self.json() {
            self.note(&format!("no {what}"));
            return Ok(());
        }
        self.show(&all, |all| table(all))
    }

    /// Writes to standard output. A reader that left (`| head`) is no failure.
    pub(super) fn print(&self, text: &str) -> Result<(), Failure> {
        let mut out = io::stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(fault) if fault.kind() != io::ErrorKind::BrokenPipe => {
                Err(Failure::new(Code::Internal, format!("cannot write to stdout: {fault}")))
            }
            _ => Ok(()),
        }
    }

    /// A word to people.
    pub(super) fn note(&self, text: &str) {
        if !self.common.quiet {
            let _ = writeln!(io::stderr(), "{text}");
        }
    }

    /// A failure: the stable code, then what to do.
    pub(super) fn complain(&self, failure: &Failure) {
        let message = &failure.message;
        let prefix = format!("{}: ", failure.code);
        let message = message.strip_prefix(&prefix).unwrap_or(message);
        let _ = writeln!(io::stderr(), "overfence: {prefix}{message}");
    }

    /// Names what will be deleted and asks; without a terminal only `--yes` agrees.
    pub(super) fn confirm(&self, what: &str, yes: bool) -> Result<(), Failure> {
        if yes {
            self.note(what);
            return Ok(());
        }
        let refused = |message: String| Failure::new(Code::BadRequest, message);
        if !io::stdin().is_terminal() {
            return Err(refused(format!("{what}. Nothing was done: say --yes if that is meant")));
        }
        let _ = write!(io::stderr(), "{what}. Go on? [y/N] ");
        let mut answer = String::new();
        let read = io::stdin().lock().read_line(&mut answer);
        match (read, answer.trim()) {
            (Ok(_), "y" | "Y" | "yes") => Ok(()),
            _ => Err(refused("nothing was done".into())),
        }
    }
}
