//! `overfence doctor`

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::context::Context;
use super::table;
use crate::agent::failure::Failure;
use crate::config::Config;
use crate::kernel::cgroup;
use crate::kernel::doctor::{self, Answer};
use crate::kernel::ns::Mounts;
use crate::model::view::StatusView;
use crate::store::reserve;
use crate::workload;

/// `doctor`
#[derive(Debug, Args)]
pub struct Doctor {
    /// The configuration whose directories are tried.
    #[arg(long, value_name = "F", env = "OVERFENCE_CONFIG", hide_env_values = true)]
    config: Option<PathBuf>,
}

/// How long the agent is waited for: the kernel is asked without it, too.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the walls stand on.
const BELOW_WALLS: [&str; 4] = ["capabilities", "cgroup-freeze", "state-directory", "bubblewrap"];

/// Asks the kernel. Exit code 1 when something is missing that overfence cannot do without.
pub(super) fn main(context: &Context, wish: Doctor) -> Result<u8, Failure> {
    let config = Config::load(wish.config.as_deref()).unwrap_or_else(|fault| {
        context.note(&format!("overfence: {fault}; trying the default directories"));
        Config::default()
    });
    let root = cgroup::find_root().unwrap_or_else(|_| "/sys/fs/cgroup".into());
    let parent = root.join(config.cgroup.clone().unwrap_or_default());
    let (state, parent) = (standing(&config.state_dir), standing(&parent));
    let mut answers = doctor::ask(state, parent);
    answers.push(doctor::mount_namespace(agents_mounts(context, &config).as_ref()));
    // Of walls that cannot stand for what is missing already, nothing is to be learned.
    let bare = |answer: &Answer| BELOW_WALLS.contains(&answer.feature) && !answer.ok;
    if !answers.iter().any(bare) {
        answers.push(walls("walls", state, parent, false));
        answers.push(walls("mapped-walls", state, parent, true));
    }
    let (state, wanted) = (&config.state_dir, config.reserve_mib.saturating_mul(1 << 20));
    answers.push(doctor::reserve(standing(state), &state.join(reserve::NAME), wanted));
    let report = Report::of(answers);
    context.show(&report, table)?;
    Ok(u8::from(!report.ok))
}

/// The mount namespace of the agent; `None` if none answers, or one that does not know the question.
fn agents_mounts(context: &Context, config: &Config) -> Option<Mounts> {
    let client = context.client_of(config).ok()?.within(PATIENCE).ok()?;
    let status: StatusView = client.get("/v1/status").ok()?;
    let told = !status.mount_namespace.is_empty();
    told.then_some(Mounts { name: status.mount_namespace, trouble: status.mount_trouble })
}

/// Whether a command can be confined here.
fn walls(feature: &'static str, state: &Path, cgroups: &Path, mapped: bool) -> Answer {
    let (ok, detail) = match workload::try_walls(state, cgroups, mapped) {
        Ok(()) => (true, "`true` was run behind them".to_owned()),
        Err(why) => match doctor::restraints().join(", ") {
            none if none.is_empty() => (false, why),
            some => (false, format!("{why}; in force here: {some}")),
        },
    };
    Answer { feature, needed: true, ok, detail }
}

/// What the kernel answered, and what that comes to.
#[derive(Serialize)]
struct Report {
    /// Whether overfence can run here.
    ok: bool,
    /// The same in words.
    verdict: String,
    /// Names of features that it cannot do without and that are not there.
    missing: Vec<&'static str>,
    /// Every feature.
    features: Vec<Answer>,
}

impl Report {
    fn of(features: Vec<Answer>) -> Self {
        let lacks = features.iter().filter(|answer| answer.needed && !answer.ok);
        let missing: Vec<_> = lacks.map(|answer| answer.feature).collect();
        let verdict = match missing[..] {
            [] => "this host can run overfence".to_owned(),
            _ => format!("this host cannot run overfence: missing {}", missing.join(", ")),
        };
        Self { ok: missing.is_empty(), verdict, missing, features }
    }
}

/// The directory itself, or what it will be made in.
fn standing(path: &Path) -> &Path {
    path.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"))
}

fn table(report: &Report) -> String {
    let rows = table::rows(
        ["FEATURE", "ANSWER", "DETAIL"],
        report.features.iter().map(|answer| {
            let word = match (answer.ok, answer.needed) {
                (true, true) => "yes",
                (true, false) => "yes (optional)",
                (false, true) => "MISSING",
                (false, false) => "no (optional)",
            };
            [answer.feature.into(), word.into(), answer.detail.clone()]
        }),
    );
    format!("{rows}\n{}\n", report.verdict)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_is_that_of_what_is_needed() {
        let answer = |feature, needed, ok| Answer { feature, needed, ok, detail: "seen".into() };
        let good = Report::of(vec![answer("a", true, true), answer("b", false, false)]);
        assert!(good.ok && good.missing.is_empty());
        let shown = table(&good);
        assert!(shown.contains("b        no (optional)  seen"), "{shown}");
        assert!(shown.ends_with("\n\nthis host can run overfence\n"), "{shown}");
        let bad = Report::of(vec![answer("a", true, false), answer("b", true, true)]);
        let json = serde_json::to_value(&bad).unwrap();
        assert_eq!((&json["ok"], &json["missing"]), (&false.into(), &serde_json::json!(["a"])));
        assert!(table(&bad).ends_with("this host cannot run overfence: missing a\n"));
    }

    #[test]
    fn a_directory_to_come_is_tried_where_it_will_be() {
        assert_eq!(standing(Path::new("/proc/no/such/thing")), Path::new("/proc"));
        assert_eq!(standing(Path::new("/proc")), Path::new("/proc"));
    }
}
