//! The command line: one file a noun. Asks the agent over its socket and shows the answer; what
//! it does itself it does without the agent: placing commands (`run`, `session exec`), verifying
//! tickets and bundles, asking the kernel. Uses `api::client`, `workload`, and the readers of
//! `store`, `upper` and `kernel`. Keeps nothing on disk.

mod backup;
mod breaker;
mod bundle;
mod config;
mod content;
mod context;
mod daemons;
mod demo;
mod diff;
mod docs;
mod doctor;
mod drain;
mod evidence;
mod fence;
mod gc;
mod hold;
mod lease;
mod parse;
mod preserved;
mod progress;
mod publication;
#[cfg(test)]
mod reference;
mod request;
mod run;
mod session;
mod status;
mod table;
mod ticket;
mod words;
mod workspace;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};

use crate::agent::failure::Failure;
use crate::model::code::Code;
use context::Context;

/// Lease-fenced overlay workspaces: stops a stale writer in the kernel, proves it, keeps its bytes.
#[derive(Debug, Parser)]
#[command(name = "overfence", version, propagate_version = false, max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 ok, 1 failure, 2 usage, 3 not found, 4 stale or conflict, 5 denied, \
    6 agent not reachable, 7 timed out, 8 done in part. `run` and `session exec` pass the \
    command's own code on; 125 is overfence's own failure (also a wrong command line), 126 and 127 \
    as in a shell."
)]
pub struct Cli {
    /// What every verb takes.
    #[command(flatten)]
    pub common: Common,
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// What every verb takes.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Everywhere")]
pub struct Common {
    /// The agent's socket; else as configured.
    #[arg(
        long,
        global = true,
        env = "OVERFENCE_SOCKET",
        value_name = "PATH",
        hide_env_values = true
    )]
    pub socket: Option<PathBuf>,
    /// How long each answer may take, for instance 10s; else as long as it takes.
    #[arg(long, global = true, value_name = "T", value_parser = parse::span)]
    pub timeout: Option<Duration>,
    /// A table for people, or JSON alone on standard output. `run` and `session exec`: one line of
    /// it, after the command's own output.
    #[arg(short, long, global = true, value_name = "FORM", default_value = "table")]
    pub output: Output,
    /// Say nothing on standard error but failures.
    #[arg(short, long, global = true)]
    pub quiet: bool,
}

/// How answers are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    #[default]
    Table,
    /// For programs; the fields are those of the API.
    Json,
}

/// What can be done.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Run the agent: it serves the API, renews leases, and stops stale writers.
    Agent(daemons::Daemon),
    /// Run the keeper: it freezes sessions whose deadline passed, agent or no agent.
    Keeper(daemons::Daemon),
    /// Open a session, run a command in it, publish or keep what it wrote: the whole job (root).
    Run(run::Run),
    /// Workspaces: what is written.
    #[command(subcommand)]
    Workspace(workspace::Verb),
    /// Mount sessions: one writer's overlay, cgroup and lease.
    #[command(subcommand)]
    Session(session::Verb),
    /// Stop a session's writer in the kernel and prove it.
    Fence(fence::Fence),
    /// Give a fenced session a new lease and generation and let it run on; one that has no process
    /// any more comes back as a new session on a copy of its upper.
    Readmit(fence::Readmit),
    /// Leases: who may write, and until when.
    #[command(subcommand)]
    Lease(lease::Verb),
    /// Mount tickets: the signed statement of who writes where.
    #[command(subcommand)]
    Ticket(ticket::Verb),
    /// Preserved deltas: what stale writers left that no publication holds.
    #[command(subcommand)]
    Preserved(preserved::Verb),
    /// Patch bundles: exported deltas. All but `apply` needs neither agent nor root.
    #[command(subcommand)]
    Bundle(bundle::Verb),
    /// Publications: what was offered to the authority, and what it answered.
    #[command(subcommand)]
    Publication(publication::Verb),
    /// External requests: what a writer asks of others, once, and what became of it.
    #[command(subcommand)]
    Request(request::Verb),
    /// Remove what is safe to delete.
    Gc(gc::Gc),
    /// The chained record of what was decided and what the kernel answered.
    #[command(subcommand)]
    Evidence(evidence::Verb),
    /// Take every session of this host down and refuse new ones; what they wrote is kept.
    Drain(drain::Drain),
    /// The breaker: whether killing and deleting stop, since leases were lost at large.
    #[command(subcommand)]
    Breaker(breaker::Verb),
    /// Copy the host's database and layers, as they are at one moment, while the agent works.
    Backup(backup::Backup),
    /// Put a backup in the place of the database; no agent runs meanwhile (root).
    Restore(backup::Restore),
    /// Say how the agent is.
    Status,
    /// Show the evidence as it is written.
    Events(evidence::Events),
    /// Ask this host's kernel for everything overfence needs. Works without the agent.
    Doctor(doctor::Doctor),
    /// The configuration.
    #[command(subcommand)]
    Config(config::Verb),
    /// Print a completion script.
    Completions(docs::Completions),
    /// Print a manual page.
    Man(docs::Man),
    /// Tell the story of a stale writer on this kernel, in a throwaway place (root).
    Demo(demo::Demo),
    /// End all sessions as the host goes down; started by systemd after agent and keeper ended.
    #[command(hide = true)]
    EndSessions(daemons::Daemon),
    /// Pid 1 of a session; started by `run` and `session exec`.
    #[command(skip)]
    SessionInit {
        /// Numbers of descriptors.
        fds: Vec<OsString>,
    },
}

/// The command line; or the exit code, once help, version or what is wrong with it was printed.
///
/// # Errors
/// There is nothing to do.
pub fn read(args: impl IntoIterator<Item = OsString>) -> Result<Cli, ExitCode> {
    let args: Vec<OsString> = args.into_iter().collect();
    parsed(&args).map_err(|fault| {
        // A reader that left (`| head`) is no failure.
        let _ = fault.print();
        ExitCode::from(usage_code(&args, &fault))
    })
}

/// The name by which bubblewrap starts pid 1 of a session. No verb: nobody is to be offered it.
const INIT: &str = "session-init";

fn parsed(args: &[OsString]) -> Result<Cli, clap::Error> {
    match args {
        [_, init, fds @ ..] if init == INIT => {
            let verb = Verb::SessionInit { fds: fds.to_vec() };
            Ok(Cli { common: Common::default(), verb })
        }
        _ => Cli::try_parse_from(args),
    }
}

/// 0 after help and version. 2, but for the verbs that pass on a command's own code: there 2 is the
/// command's.
fn usage_code(args: &[OsString], fault: &clap::Error) -> u8 {
    if !fault.use_stderr() {
        return 0;
    }
    let known = Cli::command().ignore_errors(true).try_get_matches_from(args);
    let verb = known.as_ref().ok().and_then(clap::ArgMatches::subcommand);
    match verb {
        Some(("run", _)) => run::OWN_FAILURE,
        Some(("session", noun)) if noun.subcommand_name() == Some("exec") => run::OWN_FAILURE,
        _ => Code::BadRequest.exit(),
    }
}

/// Does what the command line says.
pub fn main(cli: Cli) -> ExitCode {
    let own = match &cli.verb {
        Verb::Run(_) | Verb::Session(session::Verb::Exec(_)) => Some(run::OWN_FAILURE),
        _ => None,
    };
    let context = Context::new(cli.common);
    match dispatch(&context, cli.verb) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            context.complain(&failure);
            ExitCode::from(own.unwrap_or_else(|| failure.code.exit()))
        }
    }
}

fn dispatch(context: &Context, verb: Verb) -> Result<u8, Failure> {
    match verb {
        Verb::Agent(wish) => daemons::agent(&wish),
        Verb::Keeper(wish) => daemons::keeper(&wish),
        Verb::EndSessions(wish) => daemons::end_sessions(&wish),
        Verb::Run(wish) => return run::run(context, wish),
        Verb::Session(session::Verb::Exec(wish)) => return run::exec(context, wish),
        Verb::Evidence(verb) => return evidence::main(context, verb),
        Verb::Workspace(verb) => return workspace::main(context, verb),
        Verb::Doctor(wish) => return doctor::main(context, wish),
        Verb::Demo(wish) => return demo::main(context, &wish),
        Verb::Fence(wish) => fence::fence(context, wish),
        Verb::Readmit(wish) => fence::readmit(context, wish),
        Verb::Session(verb) => session::main(context, verb),
        Verb::Lease(verb) => lease::main(context, verb),
        Verb::Ticket(verb) => ticket::main(context, verb),
        Verb::Preserved(verb) => preserved::main(context, verb),
        Verb::Bundle(verb) => bundle::main(context, verb),
        Verb::Publication(verb) => publication::main(context, verb),
        Verb::Request(verb) => request::main(context, verb),
        Verb::Gc(wish) => gc::main(context, wish),
        Verb::Drain(wish) => drain::main(context, &wish),
        Verb::Breaker(verb) => breaker::main(context, verb),
        Verb::Backup(wish) => backup::backup(context, &wish),
        Verb::Restore(wish) => backup::restore(context, &wish),
        Verb::Status => status::main(context),
        Verb::Events(wish) => evidence::events(context, &wish),
        Verb::Config(verb) => config::main(context, verb),
        Verb::Completions(wish) => docs::completions(context, wish),
        Verb::Man(wish) => docs::man(context, &wish),
        Verb::SessionInit { fds } => crate::workload::init_main(fds),
    }?;
    Ok(0)
}

#[cfg(test)]
mod tests;
