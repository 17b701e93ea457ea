//! The operator: this binary's own verbs, run as child processes with `-o json`.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// One verb's answer.
pub(super) struct Answer {
    /// The command line, as an operator types it.
    pub(super) asked: String,
    /// The exit code; -1 for a signal.
    pub(super) code: i32,
    /// What came on standard output.
    pub(super) json: Value,
    /// The complaint on standard error, when there is one.
    pub(super) said: String,
    /// How long it took, the start of the process included.
    pub(super) took: Duration,
}

impl Answer {
    /// A text or number in the answer, by its JSON pointer; empty when it is not there.
    pub(super) fn get(&self, pointer: &str) -> String {
        text(&self.json, pointer)
    }
}

/// A text or number in a document, by its JSON pointer; empty when it is not there.
pub(super) fn text(json: &Value, pointer: &str) -> String {
    match json.pointer(pointer) {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

/// The binary without the caller's own configuration.
pub(super) fn command(binary: &Path) -> Command {
    let mut command = Command::new(binary);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("OVERFENCE_") {
            command.env_remove(name);
        }
    }
    // A ^C is for the demo, which ends its children in their order.
    command.process_group(0);
    // And where it is killed, they are, too: it can end nobody any more.
    crate::kernel::launch::end_with_parent(&mut command);
    command
}

/// Whoever asks the agent.
pub(super) struct Operator<'p> {
    /// The binary.
    pub(super) binary: &'p Path,
    /// The agent's socket.
    pub(super) socket: &'p Path,
}

impl Operator<'_> {
    /// The verb as a child process, not started yet.
    pub(super) fn command(&self, words: &[&str]) -> Command {
        let mut command = command(self.binary);
        command.args(words).env("OVERFENCE_SOCKET", self.socket).env("RUST_LOG", "error");
        command
    }

    /// Runs a verb to its end, whatever that is.
    pub(super) fn ask(&self, words: &[&str]) -> Result<Answer, String> {
        let asked = spelled(words);
        let begun = Instant::now();
        let (verb, rest): (Vec<&str>, Vec<&str>) = match words.iter().position(|w| *w == "--") {
            Some(at) => (words[..at].to_vec(), words[at..].to_vec()),
            None => (words.to_vec(), vec![]),
        };
        let all = [&verb[..], &["-o", "json", "--timeout", "10s"], &rest[..]].concat();
        let out = self
            .command(&all)
            .stdin(Stdio::null())
            .output()
            .map_err(|e| format!("cannot run {}: {e}", self.binary.display()))?;
        let took = begun.elapsed();
        let stderr = String::from_utf8_lossy(&out.stderr);
        let said = stderr.lines().rev().find_map(|line| line.strip_prefix("overfence: "));
        Ok(Answer {
            asked,
            code: out.status.code().unwrap_or(-1),
            json: serde_json::from_slice(&out.stdout).unwrap_or_else(|_| {
                Value::String(String::from_utf8_lossy(&out.stdout).trim().to_owned())
            }),
            said: said.unwrap_or_default().to_owned(),
            took,
        })
    }

    /// Runs a verb that has to succeed.
    pub(super) fn must(&self, words: &[&str]) -> Result<Answer, String> {
        let answer = self.ask(words)?;
        match answer.code {
            0 => Ok(answer),
            code => Err(format!("`{}`: exit code {code}: {}", answer.asked, answer.said)),
        }
    }
}

/// A command line as it is typed.
pub(super) fn spelled(words: &[&str]) -> String {
    let quoted = words.iter().map(|word| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,@+".contains(c);
        match word.chars().all(plain) && !word.is_empty() {
            true => (*word).to_owned(),
            false => format!("'{}'", word.replace('\'', "'\\''")),
        }
    });
    std::iter::once("overfence".to_owned()).chain(quoted).collect::<Vec<_>>().join(" ")
}

/// Whether a program that the demo needs is there.
pub(super) fn installed(program: impl AsRef<OsStr>) -> bool {
    Path::new(program.as_ref()).is_file()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_can_be_typed() {
        let words = ["session", "exec", "s-1", "--", "sh", "-c", "echo 'a b' >f"];
        assert_eq!(spelled(&words), "overfence session exec s-1 -- sh -c 'echo '\\''a b'\\'' >f'");
    }
}
