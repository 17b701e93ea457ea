//! `overfence gc`

use clap::Args;

use super::context::Context;
use super::table;
use crate::agent::failure::Failure;
use crate::model::code::Code;
use crate::model::view::GcReport;

/// `gc`
#[derive(Debug, Args)]
pub struct Gc {
    /// Only say what would be removed, and why the rest stays.
    #[arg(long)]
    dry_run: bool,
}

/// Does it.
pub(super) fn main(context: &Context, wish: Gc) -> Result<(), Failure> {
    let place = if wish.dry_run { "/v1/gc?dry_run=true" } else { "/v1/gc" };
    let report: GcReport = context.client()?.post(place, &serde_json::json!({}))?;
    context.show(&report, table)?;
    match report.items.iter().find(|item| item.verdict == "failed") {
        None => Ok(()),
        Some(item) => Err(Failure::new(
            Code::Partial,
            format!("{} {} could not be removed: {}", item.kind, item.id, item.reason),
        )),
    }
}

fn table(report: &GcReport) -> String {
    let rows = table::rows(
        ["VERDICT", "KIND", "SIZE", "ID", "WHY"],
        report.items.iter().map(|item| {
            [
                item.verdict.clone(),
                item.kind.clone(),
                table::bytes(item.bytes),
                item.id.clone(),
                item.reason.clone(),
            ]
        }),
    );
    let word = if report.dry_run { "would be freed" } else { "freed" };
    format!("{rows}{} {word}\n", table::bytes(report.bytes_freed))
}
