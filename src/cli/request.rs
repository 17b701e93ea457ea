//! `overfence request`: outside through the agent's socket, inside a session through its own.

use std::path::Path;

use clap::{Args, Subcommand, ValueEnum};

use super::context::{Context, INSIDE};
use super::publication::Listed;
use super::{parse, table};
use crate::agent::failure::Failure;
use crate::api::client::path;
use crate::model::code::Code;
use crate::model::request::Outcome;
use crate::model::view::{AssignRequest, BeginRequest, BegunRequest, RequestView, SettleRequest};

/// What can be done with external requests.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Record that one is about to be sent. Exit 0 with `begun`: send it. `repeated` and `resumed`:
    /// it may have been sent; ask the far side by its key. Exit 4: do not send it.
    Begin(Begin),
    /// Record what the far side answered.
    Ack(Ack),
    /// Record what a person found out about one that was never answered.
    Resolve(Resolve),
    /// Give an open one to somebody.
    Assign(Assign),
    /// List those whose outcome is still to come, with who sees to each.
    List(Listed),
}

/// `request begin`
#[derive(Debug, Args)]
pub struct Begin {
    /// The session, by its id or a unique prefix; inside a session its own.
    #[arg(value_parser = parse::name)]
    session: Option<String>,
    /// What is to happen outside, once.
    #[arg(long, value_name = "TASK", value_parser = parse::name)]
    task: String,
    /// The key that the far side gets with it.
    #[arg(long, value_name = "KEY", value_parser = parse::name)]
    key: String,
    /// What it is, for people; the same key has to come with the same.
    #[arg(long, value_name = "TEXT", default_value = "")]
    about: String,
    /// Who sees to it while it is open; else the session's owner.
    #[arg(long, value_name = "NAME")]
    assignee: Option<String>,
    /// The generation under which the caller believes to write; refused if it is another one.
    #[arg(long, value_name = "N")]
    generation: Option<u64>,
}

/// What happened outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Happened {
    /// It took place.
    Done,
    /// It did not, and never will by this key.
    NotDone,
}

impl From<Happened> for Outcome {
    fn from(happened: Happened) -> Self {
        match happened {
            Happened::Done => Self::Done,
            Happened::NotDone => Self::NotDone,
        }
    }
}

/// `request ack`
#[derive(Debug, Args)]
pub struct Ack {
    /// The key it was sent with.
    #[arg(value_parser = parse::name)]
    key: String,
    /// What happened.
    outcome: Happened,
    /// The workspace; inside a session its own.
    #[arg(short, long, value_name = "WS", value_parser = parse::name)]
    workspace: Option<String>,
    /// What the far side said, for instance its reference.
    #[arg(long, value_name = "TEXT", default_value = "")]
    note: String,
}

/// `request resolve`
#[derive(Debug, Args)]
pub struct Resolve {
    /// The key it was sent with.
    #[arg(value_parser = parse::name)]
    key: String,
    /// What happened.
    outcome: Happened,
    /// The workspace.
    #[arg(short, long, value_name = "WS", value_parser = parse::name)]
    workspace: String,
    /// How it was found out; goes into the evidence.
    #[arg(long, value_name = "TEXT", value_parser = parse::name)]
    reason: String,
}

/// `request assign`
#[derive(Debug, Args)]
pub struct Assign {
    /// The key it was sent with.
    #[arg(value_parser = parse::name)]
    key: String,
    /// To whom.
    #[arg(value_parser = parse::name)]
    assignee: String,
    /// The workspace.
    #[arg(short, long, value_name = "WS", value_parser = parse::name)]
    workspace: String,
}

/// Whether this process is inside a session: its socket is there, and nowhere else.
fn inside() -> bool {
    Path::new(INSIDE).exists()
}

/// Does it.
pub(super) fn main(context: &Context, verb: Verb) -> Result<(), Failure> {
    match verb {
        Verb::Begin(wish) => begin(context, wish),
        Verb::Ack(wish) => {
            let body =
                SettleRequest { key: wish.key, outcome: wish.outcome.into(), note: wish.note };
            let view: RequestView = match wish.workspace {
                Some(workspace) => context
                    .client()?
                    .post(&path(&["workspaces", &workspace, "requests", "ack"]), &body)?,
                None if inside() => context.inside()?.tell("/v1/requests/ack", &body)?,
                None => return Err(outside("-w WORKSPACE")),
            };
            context.show(&view, one)
        }
        Verb::Resolve(wish) => {
            let body =
                SettleRequest { key: wish.key, outcome: wish.outcome.into(), note: wish.reason };
            let place = path(&["workspaces", &wish.workspace, "requests", "resolve"]);
            let view: RequestView = context.client()?.post(&place, &body)?;
            context.show(&view, one)
        }
        Verb::Assign(wish) => {
            let body = AssignRequest { key: wish.key, assignee: wish.assignee };
            let place = path(&["workspaces", &wish.workspace, "requests", "assign"]);
            let view: RequestView = context.client()?.post(&place, &body)?;
            context.show(&view, one)
        }
        Verb::List(listed) => {
            let mut all: Vec<RequestView> = if listed.workspace.is_none() && inside() {
                context.inside()?.get("/v1/requests")?
            } else {
                context.client()?.get(&listed.path("requests"))?
            };
            all.retain(|row| listed.all || row.outcome.is_none());
            let what = if listed.all { "requests" } else { "requests without an outcome" };
            context.list(&all, what, list)
        }
    }
}

fn outside(what: &str) -> Failure {
    let why = format!("outside a session it wants {what}");
    Failure::new(Code::BadRequest, why)
}

fn begin(context: &Context, wish: Begin) -> Result<(), Failure> {
    let body = BeginRequest {
        task: wish.task,
        key: wish.key,
        about: wish.about,
        assignee: wish.assignee,
        generation: wish.generation,
    };
    // Sent again under the same key it is the same request: no other key is needed.
    let begun: BegunRequest = match wish.session {
        Some(session) => {
            context.client()?.tell(&path(&["sessions", &session, "requests"]), &body)?
        }
        None if inside() => context.inside()?.tell("/v1/requests", &body)?,
        None => return Err(outside("the SESSION")),
    };
    context.show(&begun, |begun| {
        let result = table::facts([("result", Some(begun.result.clone()))]);
        format!("{result}{}", one(&begun.request))
    })
}

fn list(all: &[RequestView]) -> String {
    table::rows(
        [
            "KEY",
            "TASK",
            "WORKSPACE",
            "STATE",
            "OUTCOME",
            "GENERATION",
            "ASSIGNEE",
            "BEGAN",
            "ABOUT",
        ],
        all.iter().map(|row| {
            [
                row.key.clone(),
                row.task.clone(),
                row.workspace.clone(),
                row.state.clone(),
                table::or_dash(row.outcome.clone()),
                row.generation.to_string(),
                row.assignee.clone(),
                table::ago(&row.began_at),
                table::or_dash(Some(row.about.clone())),
            ]
        }),
    )
}

fn one(row: &RequestView) -> String {
    table::facts([
        ("request", Some(row.key.clone())),
        ("task", Some(row.task.clone())),
        ("about", Some(row.about.clone())),
        ("workspace", Some(row.workspace.clone())),
        ("state", Some(row.state.clone())),
        ("outcome", row.outcome.clone()),
        ("told by", row.settled_by.clone()),
        ("note", row.note.clone()),
        ("session", Some(row.session.clone())),
        ("generation", Some(row.generation.to_string())),
        ("resumed by", row.resumed_by.map(|generation| generation.to_string())),
        ("owner", Some(row.owner.clone())),
        ("assignee", Some(row.assignee.clone())),
        ("began", Some(table::second(&row.began_at))),
        ("changed", Some(table::second(&row.changed_at))),
    ])
}
