//! `overfence completions` and `overfence man`

use clap::{Args, CommandFactory as _};
use clap_complete::Shell;

use super::Cli;
use super::context::Context;
use crate::agent::failure::Failure;
use crate::model::code::Code;

/// `completions`
#[derive(Debug, Args)]
pub struct Completions {
    /// For which shell.
    shell: Shell,
}

/// `man`
#[derive(Debug, Args)]
pub struct Man {
    /// The verb, for instance `session open`; else overfence itself.
    verb: Vec<String>,
}

/// Prints a completion script.
pub(super) fn completions(context: &Context, wish: Completions) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(wish.shell, &mut Cli::command(), "overfence", &mut script);
    context.print(&String::from_utf8_lossy(&script))
}

/// Prints a manual page.
pub(super) fn man(context: &Context, wish: &Man) -> Result<(), Failure> {
    let mut root = Cli::command();
    root.build();
    let mut command = root;
    for word in &wish.verb {
        command = command.find_subcommand(word).cloned().ok_or_else(|| {
            let verb = wish.verb.join(" ");
            let message = format!("there is no verb {verb:?}; `overfence --help` lists them");
            Failure::new(Code::NotFound, message)
        })?;
    }
    let name = command.get_bin_name().unwrap_or("overfence").replace(' ', "-");
    let mut page = Vec::new();
    clap_mangen::Man::new(command)
        .title(name)
        .source(concat!("overfence ", env!("CARGO_PKG_VERSION")))
        .render(&mut page)
        .map_err(|fault| Failure::new(Code::Internal, format!("cannot write the page: {fault}")))?;
    context.print(&String::from_utf8_lossy(&page))
}
