//! `overfence config`

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::context::Context;
use crate::agent::failure::Failure;
use crate::config::{self, Loaded};
use crate::model::code::Code;

/// What can be done with the configuration.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Print every key with its meaning, unit and default.
    Default,
    /// Check file, drop-ins and environment.
    Check(Which),
    /// Print what is in effect and where it comes from.
    Show(Which),
}

/// Which configuration.
#[derive(Debug, Args)]
pub struct Which {
    /// The file; its drop-ins are in conf.d beside it.
    #[arg(long, value_name = "F", env = "OVERFENCE_CONFIG", hide_env_values = true)]
    config: Option<PathBuf>,
}

impl Which {
    fn load(&self) -> Result<Loaded, Failure> {
        Loaded::read(self.config.as_deref(), std::env::vars_os()).map_err(|fault| refused(&fault))
    }
}

/// Variables that set nothing, in words.
pub(super) fn strange(loaded: &Loaded) -> String {
    format!(
        "no key is set by {} (lease.ttl is OVERFENCE_LEASE_TTL; `overfence config default` shows \
         every key)",
        loaded.strangers.join(", ")
    )
}

/// A configuration that is not taken, with the system's answer.
fn refused(fault: &config::Error) -> Failure {
    use std::error::Error as _;
    let source = fault.source().map(|source| format!(" ({source})")).unwrap_or_default();
    Failure::new(Code::BadRequest, format!("{fault}{source}"))
}

/// Does it.
pub(super) fn main(context: &Context, verb: Verb) -> Result<(), Failure> {
    match verb {
        Verb::Default => context.print(&config::default_toml()),
        Verb::Check(which) => {
            let loaded = which.load()?;
            if !loaded.strangers.is_empty() {
                let message = format!("{}; correct or unset it", strange(&loaded));
                return Err(Failure::new(Code::BadRequest, message));
            }
            let policy = format!("policy:{}", loaded.config.digest());
            if context.json() {
                return context
                    .show(&serde_json::json!({ "ok": true, "policy": policy }), |_| String::new());
            }
            context.note(&format!("the configuration is good: {policy}"));
            Ok(())
        }
        Verb::Show(which) => {
            let loaded = which.load()?;
            context.show(&loaded.config, |_| config::show(&loaded))
        }
    }
}
