//! `overfence run` and `overfence session exec`: the two verbs that place a command themselves,
//! so that terminal and signals are simply the command's.

use std::ffi::OsString;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::context::Context;
use super::session::{Holder, Terms, get, lost, open, whereabouts};
use super::{parse, table};
use crate::agent::failure::Failure;
use crate::api::client::{Client, path};
use crate::model::code::Code;
use crate::model::session::CloseMode;
use crate::model::view::{CloseSession, SessionView};
use crate::workload::{self, Command, Exit, Place};

/// The exit code for a failure of overfence's own, as opposed to the command's.
pub(super) const OWN_FAILURE: u8 = 125;

/// `run`
#[derive(Debug, Args)]
pub struct Run {
    #[command(flatten)]
    terms: Terms,
    /// Whose life the lease follows: the command's, or whoever calls `lease beat`.
    #[arg(long, value_name = "WHO", default_value = "process")]
    holder: Holder,
    /// What becomes of what it wrote; else checkpoint after exit code 0, keep after another.
    #[arg(long, value_name = "WHAT")]
    on_exit: Option<OnExit>,
    /// The command; else a shell.
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// What becomes of what a command wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnExit {
    /// It is published.
    Checkpoint,
    /// It is kept as a preserved delta.
    Keep,
    /// It is deleted.
    Discard,
}

/// `session exec`
#[derive(Debug, Args)]
pub struct Exec {
    /// The session, by its id or a unique prefix.
    #[arg(value_parser = parse::name)]
    session: String,
    /// The command; else a shell.
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

fn command(argv: Vec<OsString>) -> Command {
    let argv = if argv.is_empty() { vec!["/bin/sh".into()] } else { argv };
    Command { argv, env: Vec::new(), cwd: None }
}

/// Opens, runs, closes; answers the command's code.
pub(super) fn run(context: &Context, wish: Run) -> Result<u8, Failure> {
    only_root("run")?;
    let client = context.client()?;
    let session = open(&client, wish.terms, wish.holder)?.session;
    context.note(&format!(
        "overfence: session {} of {}, generation {}, on version {}",
        session.id, session.workspace, session.generation, session.base.version
    ));
    let ended = permit(&client, &session.id).and_then(|place| {
        place_in(&client, &session.id, |lost| {
            workload::run_until(&place, &command(wish.command), lost)
        })
    });
    match ended {
        Ok(code) => close(context, &client, &session.id, mode(wish.on_exit, code)).map(|()| code),
        Err(failure) if failure.code == Code::LeaseLost => Err(failure),
        Err(failure) => {
            // Nothing ran, so that nothing is lost with it; a refusal leaves the session to its
            // lease, and the failure that matters is the first.
            let wish = CloseSession { mode: None };
            let place = path(&["sessions", &session.id, "close"]);
            if let Err(second) = client.post::<SessionView>(&place, &wish) {
                context.note(&format!("overfence: session {} is not closed: {second}", session.id));
            }
            Err(failure)
        }
    }
}

/// Runs a command in an open session; answers its code.
pub(super) fn exec(context: &Context, wish: Exec) -> Result<u8, Failure> {
    only_root("session exec")?;
    let client = context.client()?;
    let session = get(&client, &wish.session)?.id;
    let place = permit(&client, &session)?;
    place_in(&client, &session, |lost| workload::exec_until(&place, &command(wish.command), lost))
}

fn only_root(verb: &str) -> Result<(), Failure> {
    if nix::unistd::geteuid().is_root() {
        return Ok(());
    }
    let message = format!("`overfence {verb}` places the command itself and needs root: use sudo");
    Err(Failure::new(Code::Denied, message))
}

fn permit(client: &Client, session: &str) -> Result<Place, Failure> {
    client.post(&path(&["sessions", session, "exec"]), &serde_json::json!({}))
}

/// Runs `run` with a question that it asks whenever the session stands frozen: is the lease lost?
/// An agent that does not answer just then is not a loss.
fn place_in(
    client: &Client,
    session: &str,
    run: impl FnOnce(&mut dyn FnMut() -> bool) -> workload::Result<Exit>,
) -> Result<u8, Failure> {
    // Signals to the command wait while the question is asked.
    let brief = client.within(Duration::from_secs(2))?;
    let mut ask = || get(&brief, session).is_ok_and(|view| view.loss.is_some());
    let exit = run(&mut ask).map_err(|fault| unplaced(&fault))?;
    match get(client, session).map(|view| lost(&view)) {
        Ok(Some(failure)) => Err(failure),
        Ok(None) => Ok(exit.code()),
        // Whoever only ran a command in the session has its code all the same.
        Err(_) if exit != Exit::Lost => Ok(exit.code()),
        Err(failure) => Err(failure),
    }
}

fn unplaced(fault: &workload::Error) -> Failure {
    use std::error::Error as _;
    let code = match fault {
        workload::Error::NoCommand
        | workload::Error::UnmappedRoot
        | workload::Error::Unmapped { .. } => Code::BadRequest,
        workload::Error::NoBubblewrap => Code::Unsupported,
        workload::Error::Running { .. } => Code::Busy,
        _ => Code::Internal,
    };
    let source = fault.source().map(|source| format!(": {source}")).unwrap_or_default();
    Failure::new(code, format!("{fault}{source}"))
}

fn mode(wish: Option<OnExit>, code: u8) -> CloseMode {
    match (wish, code) {
        (Some(OnExit::Checkpoint), _) | (None, 0) => CloseMode::Checkpoint,
        (Some(OnExit::Keep), _) | (None, _) => CloseMode::Keep,
        (Some(OnExit::Discard), _) => CloseMode::Discard,
    }
}

fn close(context: &Context, client: &Client, id: &str, mode: CloseMode) -> Result<(), Failure> {
    let place = path(&["sessions", id, "close"]);
    let closed: SessionView = match client.post(&place, &CloseSession { mode: Some(mode) }) {
        Ok(closed) => closed,
        Err(failure) => {
            let Ok(view) = get(client, id) else { return Err(failure) };
            let message = match view.loss {
                Some(_) => format!("{}; {}", failure.message, whereabouts(&view)),
                None => format!("{}; session {id} is {} still", failure.message, view.state),
            };
            return Err(Failure { message, ..failure });
        }
    };
    let word = match (mode, closed.loss.is_some()) {
        (CloseMode::Checkpoint, false) if closed.expected == closed.base => {
            "it changed nothing".into()
        }
        (CloseMode::Checkpoint, false) => format!("published: version {}", closed.expected.version),
        (CloseMode::Discard, false) => "discarded what it wrote".into(),
        (CloseMode::Keep, false) => "it left nothing to keep".into(),
        (_, true) => whereabouts(&closed),
    };
    let facts = table::joined(closed.facts.iter().map(|fact| fact.fact));
    let facts = if facts.is_empty() { facts } else { format!(" ({facts})") };
    context.note(&format!("overfence: session {id} closed, {word}{facts}"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_command_wrote_is_published_only_after_success() {
        for (wish, code, expected) in [
            (None, 0, CloseMode::Checkpoint),
            (None, 1, CloseMode::Keep),
            (None, 137, CloseMode::Keep),
            (Some(OnExit::Checkpoint), 1, CloseMode::Checkpoint),
            (Some(OnExit::Keep), 0, CloseMode::Keep),
            (Some(OnExit::Discard), 0, CloseMode::Discard),
        ] {
            assert_eq!(mode(wish, code), expected, "{wish:?} {code}");
        }
    }

    #[test]
    fn without_a_command_there_is_a_shell() {
        assert_eq!(command(vec![]).argv, ["/bin/sh"]);
        assert_eq!(command(vec!["a".into(), "-b".into()]).argv, ["a", "-b"]);
    }
}
