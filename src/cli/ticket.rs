//! `overfence ticket`

use std::path::PathBuf;

use clap::Subcommand;

use super::context::Context;
use super::lease::read_text;
use super::table;
use crate::agent::failure::Failure;
use crate::api::TicketKey;
use crate::model::code::Code;
use crate::model::ticket::Ticket;
use crate::store::keys::PublicKey;

/// What can be done with tickets.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Check a ticket's signature and print what it states.
    Verify {
        /// The ticket's file; - for standard input.
        file: PathBuf,
        /// The public key's file; else the agent is asked.
        #[arg(long, value_name = "FILE")]
        key: Option<PathBuf>,
    },
}

/// Does it.
pub(super) fn main(context: &Context, verb: Verb) -> Result<(), Failure> {
    let Verb::Verify { file, key } = verb;
    let key = match key {
        Some(key) => read_text(&key)?,
        None => context.client()?.get::<TicketKey>("/v1/ticket-key")?.key,
    };
    let bad = |what: &str, fault: crate::store::Error| {
        Failure::new(Code::Denied, format!("the {what} is not valid: {fault}"))
    };
    let key = PublicKey::parse(&key).map_err(|fault| bad("public key", fault))?;
    let ticket = key.verify_ticket(&read_text(&file)?).map_err(|fault| bad("ticket", fault))?;
    context.show(&ticket, stated)
}

fn stated(ticket: &Ticket) -> String {
    table::facts([
        ("workspace", Some(ticket.workspace.to_string())),
        ("session", Some(ticket.session.to_string())),
        ("generation", Some(ticket.generation.to_string())),
        ("lease", Some(ticket.lease.to_string())),
        ("host", Some(ticket.host.to_string())),
        ("boot", Some(ticket.boot.to_string())),
        ("base", Some(format!("version {}, {}", ticket.base.version, ticket.base.head))),
        ("cgroup", Some(ticket.cgroup.clone())),
        ("issued", Some(format!("{} ({})", ticket.issued, table::ago(&ticket.issued)))),
    ])
}
