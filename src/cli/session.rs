//! `overfence session`

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Duration;

use super::context::Context;
use super::diff::Printer;
use super::{fence, parse, progress, run, table};
use crate::agent::failure::Failure;
use crate::api::client::{Client, path};
use crate::api::failure_of;
use crate::model::backing::UpperKind;
use crate::model::code::Code;
use crate::model::head::HeadAt;
use crate::model::lease::HolderKind;
use crate::model::limits::{Cpus, Limits, Size};
use crate::model::session::{CloseMode, Seeded};
use crate::model::slice::Slice;
use crate::model::view::{
    CheckpointSession, Checkpointed, CloseSession, CreateWorkspace, DiffLine, GateView,
    OpenSession, Opened, SealingView, SessionView,
};

/// What can be done with sessions.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Acquire the lease, mount the overlay, seal the cgroup; prints the lease token, once.
    Open(Open),
    /// List the sessions of this host.
    List {
        /// Only those with this label; may be repeated.
        #[arg(long, value_name = "K=V", value_parser = parse::pair)]
        selector: Vec<(String, String)>,
    },
    /// Show one: state, lease, proved facts, who holds a fence up.
    Inspect {
        /// Its id, or a unique prefix.
        #[arg(value_parser = parse::name)]
        session: String,
    },
    /// Show what it changed against what it was mounted on: added, modified, deleted, of another
    /// type. Of a running one as it stands now.
    Diff {
        /// Its id, or a unique prefix.
        #[arg(value_parser = parse::name)]
        session: String,
    },
    /// Run a command in an open session (root).
    Exec(run::Exec),
    /// Capture what it wrote and publish it.
    Checkpoint {
        /// Its id, or a unique prefix.
        #[arg(value_parser = parse::name)]
        session: String,
        /// Without freezing it; refused if anything in its upper changes meanwhile.
        #[arg(long)]
        live: bool,
    },
    /// End it. With uncommitted bytes it wants to know what becomes of them.
    Close(Close),
}

/// Under what terms a session is opened.
#[derive(Debug, Args)]
pub(super) struct Terms {
    /// The workspace to write.
    #[arg(short, long, value_name = "WS", value_parser = parse::name)]
    pub(super) workspace: String,
    /// Create the workspace first if there is none.
    #[arg(long)]
    create: bool,
    /// With --create: a host directory captured once as its first layer; may be repeated.
    #[arg(long, value_name = "DIR", requires = "create")]
    lower: Vec<PathBuf>,
    /// Who writes; else the caller.
    #[arg(long, value_name = "NAME")]
    owner: Option<String>,
    /// The user that commands run as, by name or number; 0 is mapped to an unprivileged one.
    #[arg(long, value_name = "U", value_parser = parse::user)]
    user: Option<parse::Who>,
    /// Time to live of the lease: 1s to 24h.
    #[arg(long, value_name = "T", value_parser = parse::span)]
    ttl: Option<Duration>,
    /// Longest life of the lease, however often renewed.
    #[arg(long, value_name = "T", value_parser = parse::span)]
    max_lifetime: Option<Duration>,
    /// A network of its own with nothing but loopback, or the host's.
    #[arg(long, value_name = "WHICH")]
    network: Option<Network>,
    /// Most memory its processes may use, for instance 512M or 2G; needs the controller memory.
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    /// Most processes and threads it may have; needs the controller pids.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pids: Option<u64>,
    /// Most CPU time, in CPUs, for instance 2 or 0.5; needs the controller cpu.
    #[arg(long, value_name = "CPUS")]
    cpu: Option<Cpus>,
    /// What its upper lies in: a directory, or a file system of its own with a size.
    #[arg(long, value_name = "WHAT")]
    upper: Option<Upper>,
    /// What an image holds at most, for instance 2G.
    #[arg(long, value_name = "SIZE")]
    size: Option<Size>,
    /// Revoke a live predecessor, and do not wait for its freeze.
    #[arg(long)]
    force: bool,
    /// When a fenced writer still holds a descriptor: stay frozen, or kill it after a while.
    #[arg(long, value_name = "WHAT")]
    on_busy: Option<fence::Busy>,
    /// A label to select by; may be repeated.
    #[arg(long, value_name = "K=V", value_parser = parse::pair)]
    label: Vec<(String, String)>,
}

/// Whose life the lease follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Holder {
    /// The session's command.
    Process,
    /// Whoever calls `lease beat`.
    Beat,
}

/// What an upper lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Upper {
    /// A directory in the state directory.
    Directory,
    /// A sparse file with an ext4 file system.
    Image,
}

/// Which network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Network {
    /// Its own.
    Own,
    /// The host's.
    Host,
}

/// `session open`
#[derive(Debug, Args)]
pub struct Open {
    #[command(flatten)]
    terms: Terms,
    /// Whose life the lease follows: the command's, or whoever calls `lease beat`.
    #[arg(long, value_name = "WHO", default_value = "beat")]
    holder: Holder,
    /// The started, empty slice that an engine with the systemd cgroup driver uses: it becomes the
    /// session's cgroup. Confinement is then the engine's, and not claimed.
    #[arg(long, value_name = "SLICE")]
    external: Option<Slice>,
}

/// `session close`
#[derive(Debug, Args)]
pub struct Close {
    /// Its id, or a unique prefix.
    #[arg(value_parser = parse::name)]
    session: String,
    /// Publish the uncommitted bytes first.
    #[arg(long, conflicts_with_all = ["keep", "discard"])]
    checkpoint: bool,
    /// Keep them as a preserved delta.
    #[arg(long, conflicts_with = "discard")]
    keep: bool,
    /// Delete them.
    #[arg(long)]
    discard: bool,
    /// Do not ask before deleting.
    #[arg(long)]
    yes: bool,
}

/// Does it.
pub(super) fn main(context: &Context, verb: Verb) -> Result<(), Failure> {
    let client = context.client()?;
    match verb {
        Verb::Open(Open { terms, holder, external }) => {
            context.show(&open(&client, terms, holder, external)?, opened)
        }
        Verb::List { selector } => {
            let mut all: Vec<SessionView> = client.get(&path(&["sessions"]))?;
            all.retain(|session| parse::selected(&session.labels, &selector));
            context.list(&all, "sessions", list)
        }
        Verb::Inspect { session } => context.show(&get(&client, &session)?, one),
        Verb::Diff { session } => diff(context, &client, &session),
        Verb::Exec(wish) => run::exec(context, wish).map(drop),
        Verb::Checkpoint { session, live } => {
            let place = path(&["sessions", &session, "checkpoint"]);
            let (wish, whose) = (CheckpointSession { live }, path(&["sessions", &session]));
            let done: Checkpointed = progress::post(context, &client, &place, &wish, &whose)?;
            context.show(&done, checkpointed)
        }
        Verb::Close(wish) => {
            let closed = close(context, &client, &wish)?;
            context.show(&closed, one)
        }
    }
}

pub(super) fn get(client: &Client, session: &str) -> Result<SessionView, Failure> {
    client.get(&path(&["sessions", session]))
}

/// Opens a session.
pub(super) fn open(
    client: &Client,
    terms: Terms,
    holder: Holder,
    external: Option<Slice>,
) -> Result<Opened, Failure> {
    let wish = wish(terms, holder, external)?;
    let workspace = wish.workspace.clone();
    client.post(&path(&["sessions"]), &wish).map_err(|failure| held(&workspace, failure))
}

/// The terms as the API takes them.
pub(super) fn wish(
    terms: Terms,
    holder: Holder,
    external: Option<Slice>,
) -> Result<OpenSession, Failure> {
    let labels: std::collections::BTreeMap<_, _> = terms.label.into_iter().collect();
    let create = match terms.create {
        false => None,
        true => Some(CreateWorkspace {
            id: terms.workspace.clone(),
            owner: terms.owner.clone(),
            lowers: parse::path_texts(&terms.lower)?,
            labels: labels.clone(),
            ..CreateWorkspace::default()
        }),
    };
    Ok(OpenSession {
        workspace: terms.workspace,
        create,
        owner: terms.owner,
        ttl_ms: terms.ttl.map(parse::ms),
        max_lifetime_ms: terms.max_lifetime.map(parse::ms),
        holder: Some(match holder {
            Holder::Process => HolderKind::Process,
            Holder::Beat => HolderKind::Beat,
        }),
        uid: terms.user.map(|user| user.uid),
        gid: terms.user.map(|user| user.gid),
        host_network: terms.network == Some(Network::Host),
        limits: Limits { memory: terms.memory, pids: terms.pids, cpu: terms.cpu },
        upper: terms.upper.map(|upper| match upper {
            Upper::Directory => UpperKind::Directory,
            Upper::Image => UpperKind::Image,
        }),
        size: terms.size,
        external,
        force: terms.force,
        wait_ms: None,
        on_busy: terms.on_busy.map(Into::into),
        kill_after_ms: None,
        seal_after_ms: None,
        grace_ms: None,
        labels,
    })
}

/// A workspace that somebody else writes: who, and what can be done.
pub(super) fn held(workspace: &str, failure: Failure) -> Failure {
    let (Code::LeaseHeld, Some(now)) = (failure.code, &failure.current) else { return failure };
    let session = now.session.map_or_else(|| "unknown".into(), |session| session.to_string());
    let owner = now.owner.as_ref().map_or("nobody", |owner| owner.as_str());
    let message = format!(
        "session {session} of {owner} writes {workspace} (generation {}); wait until it is \
         closed, or stop it with `overfence fence -w {workspace}`, or take over with --force",
        now.generation
    );
    Failure { message, ..failure }
}

/// Whose changes a diff shows.
#[derive(Serialize)]
struct Of<'v> {
    session: &'v str,
    workspace: &'v str,
    state: &'v str,
    generation: u64,
    /// What it was mounted on.
    base: &'v HeadAt,
}

fn diff(context: &Context, client: &Client, session: &str) -> Result<(), Failure> {
    let view = get(client, session)?;
    let of = Of {
        session: &view.id,
        workspace: &view.workspace,
        state: &view.state,
        generation: view.generation,
        base: &view.base,
    };
    let mut printer = Printer::new(context, &of)?;
    // What ended it other than its summary.
    let mut outcome = Some(Err(Failure::new(
        Code::AgentUnreachable,
        "the agent ended in the middle of the diff; ask again",
    )));
    let streamed = client.lines(&path(&["sessions", &view.id, "diff"]), |raw| {
        let line = serde_json::from_slice(raw).map_err(std::io::Error::from)?;
        let row = match line {
            DiffLine::Row(row) => row,
            DiffLine::End { .. } => {
                outcome = Some(Ok(()));
                return Ok(false);
            }
            DiffLine::Broken { problem } => {
                outcome = Some(Err(failure_of(problem)));
                return Ok(false);
            }
        };
        match printer.row(&row) {
            Ok(true) => Ok(true),
            Ok(false) => {
                outcome = None;
                Ok(false)
            }
            Err(failure) => {
                outcome = Some(Err(failure));
                Ok(false)
            }
        }
    });
    match (streamed, outcome) {
        (Err(failure), _) | (Ok(()), Some(Err(failure))) => Err(printer.broken(failure)),
        (Ok(()), Some(Ok(()))) => printer.end(),
        // Nobody reads any more.
        (Ok(()), None) => Ok(()),
    }
}

fn close(context: &Context, client: &Client, wish: &Close) -> Result<SessionView, Failure> {
    let mode = match wish {
        Close { checkpoint: true, .. } => Some(CloseMode::Checkpoint),
        Close { keep: true, .. } => Some(CloseMode::Keep),
        Close { discard: true, .. } => Some(CloseMode::Discard),
        _ => None,
    };
    let mut session = wish.session.clone();
    if mode == Some(CloseMode::Discard) {
        let view = get(client, &session)?;
        let what = format!(
            "This deletes what session {} of {} (generation {}) wrote since version {}, in {}",
            view.id, view.workspace, view.generation, view.expected.version, view.upper.0
        );
        context.confirm(&what, wish.yes)?;
        session = view.id;
    }
    let (place, whose) = (path(&["sessions", &session, "close"]), path(&["sessions", &session]));
    progress::post(context, client, &place, &CloseSession { mode }, &whose)
}

/// The lease gate in a line.
fn gate(gate: &GateView) -> String {
    let mut line = gate.state.clone();
    if !gate.missing.is_empty() {
        line.push_str(&format!(", without {}", gate.missing.join(", ")));
    }
    if let Some(why) = &gate.why {
        line.push_str(&format!(": {why}"));
    }
    if gate.shared_mappings {
        line.push_str("; stores into writable shared mappings pass it");
    }
    let refused: Vec<_> = gate.refused.iter().map(|(way, n)| format!("{n} {way}")).collect();
    if !refused.is_empty() {
        line.push_str(&format!("; refused {}", refused.join(", ")));
    }
    if gate.lost > 0 {
        line.push_str(&format!("; {} refused call(s) of this host were told to nobody", gate.lost));
    }
    line
}

/// Long work in a line; a seal has one of its own.
fn under_way(session: &SessionView) -> Option<String> {
    session.progress.as_ref().filter(|_| session.sealing.is_none()).map(progress::row)
}

fn sealing(now: &SealingView) -> String {
    match now.total {
        0 => format!("{}: counting", now.what),
        total => format!("{}: {} of {total} files and directories", now.what, now.done),
    }
}

/// Where uncommitted bytes of a session are, in words.
pub(super) fn whereabouts(view: &SessionView) -> String {
    format!(
        "what it wrote is kept in {} (see `overfence preserved list`; `overfence preserved \
         export {}` writes a bundle)",
        view.upper.0, view.id
    )
}

/// The failure of a session whose lease was lost, if it was.
pub(super) fn lost(view: &SessionView) -> Option<Failure> {
    let loss = view.loss.as_ref()?;
    let facts = table::joined(view.facts.iter().map(|fact| fact.fact));
    let facts = if facts.is_empty() { "none yet".into() } else { facts };
    let mut message = format!(
        "session {} of {} (generation {}) lost its lease: {loss}. Proved: {facts}; {}",
        view.id,
        view.workspace,
        view.generation,
        whereabouts(view)
    );
    if let Some(missing) = &view.missing {
        message.push_str(&format!(". Not proved yet: {missing}"));
    }
    if view.may_resume {
        message.push_str(". It comes back by itself unless somebody takes the workspace");
        return Some(Failure::new(Code::Doubt, message));
    }
    Some(Failure::new(Code::LeaseLost, message))
}

/// What former writers left without a known outcome, for the new one to see first.
pub(super) fn unresolved(opened: &Opened) -> Option<String> {
    let told = opened.unresolved.iter().map(|left| {
        let task = left.task.as_ref().map(|task| format!(" of task {task}")).unwrap_or_default();
        let by = left.generation.map(|g| format!(" by generation {g}")).unwrap_or_default();
        let of = left.assignee.as_ref().map(|who| format!(", assigned to {who}"));
        format!("{} {}{task}{by}{}", left.kind, left.key, of.unwrap_or_default())
    });
    Some(told.collect::<Vec<_>>().join("; ")).filter(|told| !told.is_empty())
}

pub(super) fn opened(opened: &Opened) -> String {
    let session = &opened.session;
    let predecessor = opened.predecessor.as_ref();
    table::facts([
        ("session", Some(session.id.clone())),
        ("workspace", Some(session.workspace.clone())),
        ("generation", Some(session.generation.to_string())),
        ("version", Some(session.base.version.to_string())),
        ("merged", Some(session.merged.0.clone())),
        ("lease", Some(format!("{}, {} each time", session.lease, table::ms(session.ttl_ms)))),
        ("token", Some(opened.token.clone())),
        (
            "before",
            predecessor.map(|p| {
                format!(
                    "{} (generation {}, session {}): {}",
                    p.owner, p.generation, p.session, p.why
                )
            }),
        ),
        ("unresolved", unresolved(opened)),
    ])
}

fn limits(limits: &Limits) -> Option<String> {
    let Limits { memory, pids, cpu } = limits;
    let said = [
        memory.map(|size| format!("memory {size}")),
        pids.map(|most| format!("pids {most}")),
        cpu.map(|cpus| format!("cpu {cpus}")),
    ];
    Some(table::joined(said.into_iter().flatten())).filter(|said| !said.is_empty())
}

fn list(all: &[SessionView]) -> String {
    table::rows(
        ["SESSION", "WORKSPACE", "STATE", "CLASS", "GENERATION", "LEFT", "FACTS", "OWNER"],
        all.iter().map(|session| {
            [
                session.id.clone(),
                session.workspace.clone(),
                session.state.clone(),
                session.class.clone(),
                session.generation.to_string(),
                table::left(session.remaining_ms),
                table::or_dash(Some(table::joined(session.facts.iter().map(|f| f.fact)))),
                session.owner.clone(),
            ]
        }),
    )
}

fn upper(session: &SessionView) -> String {
    match session.image {
        Some(size) => format!("{} (in an image of {size})", session.upper.0),
        None => session.upper.0.clone(),
    }
}

/// A session as it stands.
pub(super) fn one(session: &SessionView) -> String {
    let mut text = table::facts([
        ("session", Some(session.id.clone())),
        ("workspace", Some(session.workspace.clone())),
        ("owner", Some(session.owner.clone())),
        ("labels", Some(table::labels(&session.labels))),
        ("state", Some(format!("{} ({})", session.state, session.class))),
        ("generation", Some(session.generation.to_string())),
        ("lease", Some(format!("{}, {} each time", session.lease, table::ms(session.ttl_ms)))),
        ("left", session.remaining_ms.map(|left| table::left(Some(left)))),
        ("limits", limits(&session.limits)),
        ("external", session.external.as_ref().map(|slice| format!("{slice}; I10 is not claimed"))),
        ("may publish", Some(if session.may_publish { "yes" } else { "no" }.into())),
        ("in doubt", session.doubt.clone()),
        ("lost", session.loss.clone()),
        ("missing", session.missing.clone()),
        ("sealing", session.sealing.as_ref().map(sealing)),
        ("under way", under_way(session)),
        ("gate", session.gate.as_ref().map(gate)),
        ("runs on", session.runs_on.then(|| "reading; the gate refuses its writes".to_owned())),
        ("base", Some(format!("version {}, {}", session.base.version, session.base.head))),
        ("expects", Some(format!("version {}", session.expected.version))),
        ("unknown", Some(table::joined(&session.unknown))),
        ("merged", Some(session.merged.0.clone())),
        ("upper", Some(upper(session))),
        ("cgroup", Some(format!("{} ({} processes)", session.cgroup.0, session.processes))),
        ("altered", session.altered.clone()),
        ("trouble", session.trouble.clone()),
        ("began with", session.seeded.as_ref().map(seeded)),
    ]);
    for fact in &session.facts {
        let took = table::span(Duration::from_micros(fact.took_us));
        text.push_str(&format!(
            "proved {}: {} -> {} ({took})\n",
            fact.fact, fact.asked, fact.answer
        ));
    }
    for holder in &session.holders {
        text.push_str(&format!("held by {}\n", table::clean(&holder.to_string())));
    }
    for blocker in &session.blockers {
        text.push_str(&format!(
            "not frozen: pid {} ({}) in state {} {} {}\n",
            blocker.pid, blocker.command, blocker.state, blocker.wchan, blocker.syscall
        ));
    }
    text
}

fn seeded(from: &Seeded) -> String {
    let Seeded { session, generation, bundle, authorised_by, reason } = from;
    let what = bundle.map_or_else(|| "the upper".to_owned(), |digest| format!("bundle {digest}"));
    format!("{what} of session {session} (generation {generation}), by {authorised_by}: {reason}")
}

fn checkpointed(done: &Checkpointed) -> String {
    table::facts([
        ("outcome", Some(done.outcome.clone())),
        ("version", Some(done.at.version.to_string())),
        ("layer", done.layer.map(|layer| layer.to_string())),
        ("key", Some(done.key.clone())),
        ("frozen for", Some(table::ms(done.frozen_ms))),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ids::{Generation, SessionId};
    use crate::model::workspace::Current;

    #[test]
    fn the_gate_is_a_line_that_says_what_it_does_not_check() {
        let view = |state: &str, missing: &[&str]| GateView {
            state: state.to_owned(),
            missing: missing.iter().map(|row| (*row).to_owned()).collect(),
            ..GateView::default()
        };
        assert_eq!(gate(&view("complete", &[])), "complete");
        let partial = GateView {
            shared_mappings: true,
            refused: [("write".to_owned(), 3)].into(),
            ..view("partial", &["acl", "flags"])
        };
        assert_eq!(
            gate(&partial),
            "partial, without acl, flags; stores into writable shared mappings pass it; refused 3 write"
        );
        let absent = GateView { why: Some("no BPF LSM".to_owned()), ..view("absent", &[]) };
        assert_eq!(gate(&absent), "absent: no BPF LSM");
    }

    #[test]
    fn who_finds_a_workspace_held_learns_by_whom_and_what_to_do() {
        let session = SessionId::fresh();
        let current = Current {
            owner: Some("ci".parse().unwrap()),
            session: Some(session),
            lease_state: None,
            generation: Generation(7),
            at: Default::default(),
            hold: None,
        };
        let refused = |code| Failure {
            current: Some(Box::new(current.clone())),
            ..Failure::new(code, "as the agent says")
        };
        let said = held("notes", refused(Code::LeaseHeld)).message;
        for part in
            [&session.to_string(), " ci ", "generation 7", "wait", "fence -w notes", "--force"]
        {
            assert!(said.contains(part), "{part}: {said}");
        }
        assert_eq!(held("notes", refused(Code::WorkspaceHeld)).message, "as the agent says");
        let blind = held("notes", Failure::new(Code::LeaseHeld, "as the agent says"));
        assert_eq!(blind.message, "as the agent says");
    }
}
