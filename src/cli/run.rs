//! `overfence run` and `overfence session exec`: the two verbs that place a command themselves,
//! so that terminal and signals are simply the command's.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::context::Context;
use super::session::{Holder, Terms, get, lost, open, whereabouts};
use super::{parse, progress, table};
use crate::agent::failure::Failure;
use crate::api::client::{Client, path};
use crate::model::code::Code;
use crate::model::head::Digest;
use crate::model::session::CloseMode;
use crate::model::view::{CloseSession, SessionView};
use crate::workload::{self, Command, Exit, Place, Standing};

/// The exit code for a failure of overfence's own, as opposed to the command's.
pub(super) const OWN_FAILURE: u8 = 125;

/// How long what is told of a loss waits for the proofs that usually follow at once.
const MOMENT: Duration = Duration::from_secs(2);

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
    let opened = open(&client, wish.terms, wish.holder, None)?;
    if let Some(left) = super::session::unresolved(&opened) {
        context.note(&format!("overfence: without a known outcome: {left}"));
    }
    let session = opened.session;
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
        Ok(code) => {
            let closed = close(context, &client, &session.id, mode(wish.on_exit, code))?;
            result(context, &Ended::of(&closed, code))?;
            Ok(code)
        }
        Err(failure) if matches!(failure.code, Code::LeaseLost | Code::Doubt) => Err(failure),
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

/// What `-o json` says of a command that ran, on one line after all that the command said.
#[derive(Serialize)]
struct Ended {
    session: String,
    workspace: String,
    generation: u64,
    exit_code: u8,
    /// `published`, `unchanged`, `kept` or `discarded`; absent for `session exec`.
    outcome: Option<&'static str>,
    /// What the session saw committed last.
    version: u64,
    head: Vec<Digest>,
}

impl Ended {
    fn in_session(view: &SessionView, exit_code: u8) -> Self {
        Self {
            session: view.id.clone(),
            workspace: view.workspace.clone(),
            generation: view.generation,
            exit_code,
            outcome: None,
            version: view.expected.version.0,
            head: view.expected.head.0.clone(),
        }
    }

    fn of((mode, view): &(CloseMode, SessionView), exit_code: u8) -> Self {
        let outcome = match (mode, view.loss.is_some()) {
            (_, true) => "kept",
            (CloseMode::Checkpoint, _) if view.expected != view.base => "published",
            (CloseMode::Discard, _) => "discarded",
            (CloseMode::Checkpoint | CloseMode::Keep, _) => "unchanged",
        };
        Self { outcome: Some(outcome), ..Self::in_session(view, exit_code) }
    }
}

fn result(context: &Context, ended: &Ended) -> Result<(), Failure> {
    if !context.json() {
        return Ok(());
    }
    let text = serde_json::to_string(ended)
        .map_err(|fault| Failure::new(Code::Internal, format!("cannot write it: {fault}")))?;
    context.print(&format!("{text}\n"))
}

/// Runs a command in an open session; answers its code.
pub(super) fn exec(context: &Context, wish: Exec) -> Result<u8, Failure> {
    only_root("session exec")?;
    let client = context.client()?;
    let view = get(&client, &wish.session)?;
    let place = permit(&client, &view.id)?;
    let code = place_in(&client, &view.id, |ask| {
        workload::exec_until(&place, &command(wish.command), ask)
    })?;
    result(context, &Ended::in_session(&view, code))?;
    Ok(code)
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

/// What a frozen session is to its client. An agent that does not answer just then is not a loss,
/// and neither is a session that comes back by policy.
fn standing(view: Option<&SessionView>) -> Standing {
    match view {
        None => Standing::Stopped,
        Some(view) if view.loss.is_none() => Standing::Passing,
        Some(view) if view.may_resume => Standing::Stopped,
        Some(_) => Standing::Lost,
    }
}

/// Runs `run` with a question that it asks whenever the session stands frozen: is that for good?
fn place_in(
    client: &Client,
    session: &str,
    run: impl FnOnce(&mut dyn FnMut() -> Standing) -> workload::Result<Exit>,
) -> Result<u8, Failure> {
    // Signals to the command wait while the question is asked.
    let brief = client.within(Duration::from_secs(2))?;
    let mut ask = || standing(get(&brief, session).ok().as_ref());
    let exit = run(&mut ask).map_err(|fault| unplaced(&fault))?;
    match settled(client, session).map(|view| lost(&view)) {
        Ok(Some(failure)) => Err(failure),
        Ok(None) => Ok(exit.code()),
        // Whoever only ran a command in the session has its code all the same.
        Err(_) if exit != Exit::Lost => Ok(exit.code()),
        Err(failure) => Err(failure),
    }
}

/// A session as it is, or, when it was lost, once its fence went as far as it was to, or after a moment.
fn settled(client: &Client, session: &str) -> Result<SessionView, Failure> {
    let until = Instant::now() + MOMENT;
    loop {
        let view = get(client, session)?;
        if view.loss.is_none() || view.missing.is_none() || Instant::now() >= until {
            return Ok(view);
        }
        std::thread::sleep(MOMENT / 100);
    }
}

fn unplaced(fault: &workload::Error) -> Failure {
    use std::error::Error as _;
    let code = match fault {
        workload::Error::NoCommand
        | workload::Error::UnmappedRoot
        | workload::Error::NoId { .. }
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

fn close(
    context: &Context,
    client: &Client,
    id: &str,
    mode: CloseMode,
) -> Result<(CloseMode, SessionView), Failure> {
    let (place, whose) = (path(&["sessions", id, "close"]), path(&["sessions", id]));
    let wish = CloseSession { mode: Some(mode) };
    let closed: SessionView = match progress::post(context, client, &place, &wish, &whose) {
        Ok(closed) => closed,
        Err(failure) => {
            let Ok(view) = get(client, id) else { return Err(failure) };
            // What it wrote is where it belongs: to run the command again would do it twice.
            if view.state == "DELETING" && view.loss.is_none() {
                context.note(&format!("overfence: session {id} is still to be removed: {failure}"));
                return Ok((mode, view));
            }
            let message = match view.loss {
                Some(_) => format!("{}; {}", failure.message, whereabouts(&view)),
                None => format!("{}; session {id} is {} still", failure.message, view.state),
            };
            let code = lost_code(failure.code);
            return Err(Failure { code, message, ..failure });
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
    Ok((mode, closed))
}

/// What `run` calls a refusal by which the authority says that the lease is over: its exit may come
/// in between the loss and its notice.
fn lost_code(code: Code) -> Code {
    match code {
        Code::StaleGeneration
        | Code::LeaseExpired
        | Code::LeaseRevoked
        | Code::LeaseReleased
        | Code::LeaseMismatch => Code::LeaseLost,
        other => other,
    }
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
