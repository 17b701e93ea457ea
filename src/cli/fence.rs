//! `overfence fence` and `overfence readmit`

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::context::Context;
use super::{parse, progress, session, table};
use crate::agent::failure::Failure;
use crate::api::client::path;
use crate::model::code::Code;
use crate::model::facts::Fact;
use crate::model::session::OnBusy;
use crate::model::view::{FenceSession, Fenced, ReadmitSession, SessionView};

/// `fence`
#[derive(Debug, Args)]
pub struct Fence {
    /// The session, by its id or a unique prefix.
    #[arg(required_unless_present = "workspace", conflicts_with = "workspace", value_parser = parse::name)]
    session: Option<String>,
    /// The writer of this workspace.
    #[arg(short, long, value_name = "WS", value_parser = parse::name)]
    workspace: Option<String>,
    /// How far to go.
    #[arg(long, value_name = "FACT")]
    to: Option<Strength>,
    /// When the frozen writer still holds a descriptor: stay frozen, seal its upper or kill it
    /// after a while.
    #[arg(long, value_name = "WHAT")]
    on_busy: Option<Busy>,
    /// Why; goes into the evidence.
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
    #[command(flatten)]
    patience: Patience,
}

/// How long to wait for the kernel's word.
#[derive(Debug, Args)]
pub(super) struct Patience {
    /// Wait for the fact, at most 30s or `--wait=T`; else the answer may be `pending`.
    #[arg(long, value_name = "T", num_args = 0..=1, require_equals = true,
        default_missing_value = "30s", value_parser = parse::span)]
    pub(super) wait: Option<Duration>,
}

/// Facts a fence can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Strength {
    /// Nothing in it runs.
    Frozen,
    /// And the overlay refuses every write.
    ReadOnly,
    /// And nothing in its upper can be changed, as far as its file system goes; see
    /// docs/OPERATIONS.md.
    Sealed,
    /// And its processes are gone.
    Killed,
}

/// What to do on EBUSY.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Busy {
    /// Stay frozen and go on trying.
    Hold,
    /// Set the immutable flag on what is in the upper, after `fence.seal_after`.
    Seal,
    /// Kill after `fence.kill_after`.
    Kill,
}

impl From<Busy> for OnBusy {
    fn from(busy: Busy) -> Self {
        match busy {
            Busy::Hold => Self::Hold,
            Busy::Seal => Self::Seal,
            Busy::Kill => Self::Kill,
        }
    }
}

/// `readmit`
#[derive(Debug, Args)]
pub struct Readmit {
    /// The session, by its id or a unique prefix.
    #[arg(value_parser = parse::name)]
    session: String,
    /// The person who takes the responsibility.
    #[arg(long, value_name = "NAME")]
    authorised_by: String,
    /// Why; goes into the evidence.
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

/// Fences.
pub(super) fn fence(context: &Context, wish: Fence) -> Result<(), Failure> {
    let to = wish.to.map(|strength| match strength {
        Strength::Frozen => Fact::Frozen,
        Strength::ReadOnly => Fact::ReadOnly,
        Strength::Sealed => Fact::Sealed,
        Strength::Killed => Fact::Killed,
    });
    let body = FenceSession {
        to,
        on_busy: wish.on_busy.map(Into::into),
        reason: wish.reason,
        wait_ms: wish.patience.wait.map(parse::ms),
    };
    let client = context.client()?;
    let answer: Fenced = match (&wish.session, &wish.workspace) {
        (Some(session), _) => {
            let (place, whose) =
                (path(&["sessions", session, "fence"]), path(&["sessions", session]));
            progress::post(context, &client, &place, &body, &whose)?
        }
        (None, workspace) => {
            let workspace = workspace.as_deref().unwrap_or_default();
            client.post(&path(&["workspaces", workspace, "fence"]), &body)?
        }
    };
    show(context, &answer)?;
    wish.patience.judge(&answer, to.unwrap_or(Fact::ReadOnly))
}

impl Patience {
    /// Who waited wanted the fact: without it the answer is a partial one.
    pub(super) fn judge(&self, answer: &Fenced, wanted: Fact) -> Result<(), Failure> {
        let session = &answer.session;
        if self.wait.is_none() || session.facts.iter().any(|proved| proved.fact.covers(wanted)) {
            return Ok(());
        }
        let mut message = format!("session {} is not proved {wanted} yet", session.id);
        for holder in &session.holders {
            message.push_str(&format!("; {holder}"));
        }
        for blocker in &session.blockers {
            message
                .push_str(&format!("; pid {} ({}) does not freeze", blocker.pid, blocker.command));
        }
        if let Some(trouble) = &session.trouble {
            message.push_str(&format!("; {trouble}"));
        }
        message.push_str("; overfence goes on trying");
        Err(Failure::new(Code::Partial, message))
    }
}

/// Shows how far a fence is.
pub(super) fn show(context: &Context, answer: &Fenced) -> Result<(), Failure> {
    context.show(answer, |answer| {
        let head = table::facts([("fence", Some(answer.result.clone()))]);
        format!("{head}{}", session::one(&answer.session))
    })
}

/// Readmits.
pub(super) fn readmit(context: &Context, wish: Readmit) -> Result<(), Failure> {
    let body = ReadmitSession { authorised_by: wish.authorised_by, reason: wish.reason };
    let place = path(&["sessions", &wish.session, "readmit"]);
    let whose = path(&["sessions", &wish.session]);
    let view: SessionView = progress::post(context, &context.client()?, &place, &body, &whose)?;
    context.show(&view, session::one)
}
