//! `overfence lease`

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

use super::context::Context;
use super::fence::{Patience, show};
use super::{parse, table};
use crate::agent::failure::Failure;
use crate::api::client::path;
use crate::model::code::Code;
use crate::model::facts::Fact;
use crate::model::view::{Beat, BeatAnswer, Fenced, LeaseView, RevokeLease};

/// What can be done with leases.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// List the present lease of each workspace, or else its last one. `workspace history` shows
    /// those before.
    List,
    /// Take one away; its writer is fenced.
    Revoke(Revoke),
    /// Give the holder's sign of life. Inside a session without arguments.
    Beat(BeatWish),
}

/// `lease revoke`
#[derive(Debug, Args)]
pub struct Revoke {
    /// The lease, by its id or a unique prefix.
    #[arg(value_parser = parse::name)]
    lease: String,
    /// Why; goes into the evidence.
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
    #[command(flatten)]
    patience: Patience,
}

/// `lease beat`
#[derive(Debug, Args)]
pub struct BeatWish {
    /// The session, by its id or a unique prefix.
    #[arg(requires = "proof", value_parser = parse::name)]
    session: Option<String>,
    #[command(flatten)]
    token: Proof,
}

/// The lease token.
#[derive(Debug, Args)]
#[group(id = "proof", multiple = false, requires = "session")]
struct Proof {
    /// The lease token. Other users can see it in the process list: --token-file is better.
    #[arg(long, value_name = "TOKEN")]
    token: Option<String>,
    /// A file that holds the lease token; - for standard input.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

/// Does it.
pub(super) fn main(context: &Context, verb: Verb) -> Result<(), Failure> {
    match verb {
        Verb::List => {
            let all: Vec<LeaseView> = context.client()?.get(&path(&["leases"]))?;
            context.list(&all, "leases", list)
        }
        Verb::Revoke(wish) => {
            let body =
                RevokeLease { reason: wish.reason, wait_ms: wish.patience.wait.map(parse::ms) };
            let place = path(&["leases", &wish.lease, "revoke"]);
            let answer: Fenced = context.client()?.post(&place, &body)?;
            show(context, &answer)?;
            wish.patience.judge(&answer, Fact::Frozen)
        }
        Verb::Beat(wish) => {
            let answer: BeatAnswer = match (&wish.session, wish.token.read()?) {
                (Some(session), Some(token)) => {
                    let place = path(&["sessions", session, "beat"]);
                    context.client()?.tell(&place, &Beat { token })?
                }
                _ => context.inside()?.tell("/v1/beat", &serde_json::json!({})).map_err(outside)?,
            };
            context.show(&answer, |answer| {
                table::facts([
                    ("state", Some(answer.state.clone())),
                    ("generation", Some(answer.generation.to_string())),
                    ("left", Some(table::left(Some(answer.remaining_ms)))),
                ])
            })
        }
    }
}

fn outside(failure: Failure) -> Failure {
    if failure.code != Code::AgentUnreachable {
        return failure;
    }
    let hint = "inside a session the agent is expected on /run/overfence/session.sock; elsewhere \
                say `overfence lease beat SESSION --token-file FILE`";
    Failure::new(failure.code, format!("no beat was given: {hint}"))
}

impl Proof {
    fn read(&self) -> Result<Option<String>, Failure> {
        let text = match (&self.token, &self.token_file) {
            (Some(token), _) => token.clone(),
            (None, Some(file)) => read_text(file)?,
            (None, None) => return Ok(None),
        };
        Ok(Some(text.trim().to_owned()))
    }
}

/// A small file, or standard input for `-`.
pub(super) fn read_text(file: &Path) -> Result<String, Failure> {
    let text = if file == Path::new("-") {
        std::io::read_to_string(std::io::stdin())
    } else {
        std::fs::read_to_string(file)
    };
    text.map_err(|fault| {
        let code = match fault.kind() {
            std::io::ErrorKind::NotFound => Code::NotFound,
            std::io::ErrorKind::PermissionDenied => Code::Denied,
            _ => Code::BadRequest,
        };
        Failure::new(code, format!("cannot read {}: {fault}", file.display()))
    })
}

fn list(all: &[LeaseView]) -> String {
    table::rows(
        ["LEASE", "WORKSPACE", "STATE", "GENERATION", "LEFT", "OWNER", "SESSION", "ENDED"],
        all.iter().map(|lease| {
            [
                lease.id.clone(),
                lease.workspace.clone(),
                lease.state.clone(),
                lease.generation.to_string(),
                table::left(lease.remaining_ms),
                lease.owner.clone(),
                lease.session.clone(),
                table::or_dash(lease.why_ended.clone()),
            ]
        }),
    )
}
