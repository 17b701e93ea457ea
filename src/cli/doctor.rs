//! `overfence doctor`

use std::path::{Path, PathBuf};

use clap::Args;

use super::context::Context;
use super::table;
use crate::agent::failure::Failure;
use crate::config::Config;
use crate::kernel::cgroup;
use crate::kernel::doctor::{self, Answer};
use crate::store::reserve;

/// `doctor`
#[derive(Debug, Args)]
pub struct Doctor {
    /// The configuration whose directories are tried.
    #[arg(long, value_name = "F", env = "OVERFENCE_CONFIG", hide_env_values = true)]
    config: Option<PathBuf>,
}

/// Asks the kernel. Exit code 1 when something is missing that overfence cannot do without.
pub(super) fn main(context: &Context, wish: Doctor) -> Result<u8, Failure> {
    let config = Config::load(wish.config.as_deref()).unwrap_or_else(|fault| {
        context.note(&format!("overfence: {fault}; trying the default directories"));
        Config::default()
    });
    let root = cgroup::find_root().unwrap_or_else(|_| "/sys/fs/cgroup".into());
    let parent = root.join(config.cgroup.clone().unwrap_or_default());
    let mut answers = doctor::ask(standing(&config.state_dir), standing(&parent));
    let (state, wanted) = (&config.state_dir, config.reserve_mib.saturating_mul(1 << 20));
    answers.push(doctor::reserve(standing(state), &state.join(reserve::NAME), wanted));
    context.show(&answers, |answers| table(answers))?;
    Ok(u8::from(answers.iter().any(|answer| answer.needed && !answer.ok)))
}

/// The directory itself, or what it will be made in.
fn standing(path: &Path) -> &Path {
    path.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"))
}

fn table(answers: &[Answer]) -> String {
    table::rows(
        ["FEATURE", "ANSWER", "DETAIL"],
        answers.iter().map(|answer| {
            let word = match (answer.ok, answer.needed) {
                (true, _) => "yes",
                (false, true) => "MISSING",
                (false, false) => "no",
            };
            [answer.feature.into(), word.into(), answer.detail.clone()]
        }),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_to_come_is_tried_where_it_will_be() {
        assert_eq!(standing(Path::new("/proc/no/such/thing")), Path::new("/proc"));
        assert_eq!(standing(Path::new("/proc")), Path::new("/proc"));
    }
}
