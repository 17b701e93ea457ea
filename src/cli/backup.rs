//! `overfence backup` and `overfence restore`

use std::path::PathBuf;

use clap::Args;

use super::context::Context;
use super::daemons::Daemon;
use super::{parse, table};
use crate::agent::failure::Failure;
use crate::model::code::Code;
use crate::model::view::{BackupHost, BackupView, LeftOut, RestoredView};

/// `backup`
#[derive(Debug, Args)]
pub struct Backup {
    /// The directory to make.
    #[arg(long, value_name = "DIR")]
    dest: PathBuf,
    /// Put both keys in, too: whoever has them can write records that verify.
    #[arg(long)]
    with_keys: bool,
}

/// `restore`
#[derive(Debug, Args)]
pub struct Restore {
    /// The backup.
    #[arg(long, value_name = "DIR")]
    from: PathBuf,
    /// Do not ask first.
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    config: Daemon,
}

pub(super) fn backup(context: &Context, wish: &Backup) -> Result<(), Failure> {
    let body = BackupHost { dest: parse::path_text(&wish.dest)?, keys: wish.with_keys };
    let made: BackupView = context.client()?.post("/v1/backup", &body)?;
    context.show(&made, |made| table::facts(facts("backup", made)))?;
    partial(
        &made.left_out,
        "the backup is whole but for",
        "Bring them back from another copy, or revert to versions without them, and take another",
    )
}

/// Layers that are nowhere, as a failure.
fn partial(lacking: &[LeftOut], what: &str, then: &str) -> Result<(), Failure> {
    if lacking.is_empty() {
        return Ok(());
    }
    let named: Vec<_> = lacking.iter().map(|one| format!("{} ({})", one.layer, one.why)).collect();
    let text = format!(
        "{what} {} layer(s), damaged or missing: {}. {then}; the evidence (`layer_damaged`) names the \
         workspaces",
        named.len(),
        named.join("; ")
    );
    Err(Failure::new(Code::Partial, text))
}

fn facts(what: &'static str, made: &BackupView) -> Vec<(&'static str, Option<String>)> {
    let layers = format!("{}, {}", made.layers, table::bytes(made.bytes));
    vec![
        (what, Some(made.path.0.clone())),
        ("host", Some(made.host.clone())),
        ("taken at", Some(made.time.clone())),
        ("evidence", Some(format!("up to entry {}", made.entries))),
        ("database", Some(made.database.to_string())),
        ("layers", Some(layers)),
        ("left out", (!made.left_out.is_empty()).then(|| made.left_out.len().to_string())),
        ("keys", Some(if made.keys { "in it" } else { "not in it" }.into())),
    ]
}

pub(super) fn restore(context: &Context, wish: &Restore) -> Result<(), Failure> {
    let config = wish.config.load()?;
    let what = format!(
        "This puts the database of {} in the place of the one in {}, which is kept beside it. What was \
         decided since the backup is forgotten, and every workspace is on HOLD until it is repaired",
        wish.from.display(),
        config.state_dir.display()
    );
    context.confirm(&what, wish.yes)?;
    let done: RestoredView = crate::agent::restore(&config, &wish.from)?;
    context.show(&done, |done| {
        let mut all = facts("restored", &done.backup);
        all.extend([
            ("layers added", Some(done.layers_added.to_string())),
            ("replaced", done.replaced.as_ref().map(|path| path.0.clone())),
            ("put on hold", (done.held > 0).then(|| done.held.to_string())),
        ]);
        table::facts(all)
    })?;
    partial(
        &done.missing,
        "the database is put back, and lacks",
        "Workspaces that need them are not mounted: bring them back from another copy, or revert",
    )
}
