//! `overfence completions` and `overfence man`

use std::path::{Path, PathBuf};

use clap::{Args, Command, CommandFactory as _};
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
    /// Write the pages of all verbs into this directory, which exists.
    #[arg(long, value_name = "DIR", conflicts_with = "verb")]
    dir: Option<PathBuf>,
}

/// Prints a completion script.
pub(super) fn completions(context: &Context, wish: Completions) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(wish.shell, &mut Cli::command(), "overfence", &mut script);
    context.print(&String::from_utf8_lossy(&script))
}

/// Prints a manual page, or writes all of them.
pub(super) fn man(context: &Context, wish: &Man) -> Result<(), Failure> {
    let mut root = Cli::command();
    root.build();
    if let Some(dir) = &wish.dir {
        return write_all(&root, dir);
    }
    let mut command = root;
    for word in &wish.verb {
        command = command.find_subcommand(word).cloned().ok_or_else(|| {
            let verb = wish.verb.join(" ");
            let message = format!("there is no verb {verb:?}; `overfence --help` lists them");
            Failure::new(Code::NotFound, message)
        })?;
    }
    let (_, page) = page(&command)?;
    context.print(&page)
}

/// Name and text of a page.
fn page(command: &Command) -> Result<(String, String), Failure> {
    let name = command.get_bin_name().unwrap_or("overfence").replace(' ', "-");
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone())
        .title(&name)
        .source(concat!("overfence ", env!("CARGO_PKG_VERSION")))
        .render(&mut page)
        .map_err(|fault| Failure::new(Code::Internal, format!("cannot write the page: {fault}")))?;
    Ok((name, String::from_utf8_lossy(&page).into_owned()))
}

fn write_all(command: &Command, dir: &Path) -> Result<(), Failure> {
    let (name, text) = page(command)?;
    let file = dir.join(name).with_extension("1");
    std::fs::write(&file, text).map_err(|fault| {
        Failure::new(Code::Internal, format!("cannot write {}: {fault}", file.display()))
    })?;
    let verbs = command.get_subcommands().filter(|verb| !verb.is_hide_set());
    verbs.filter(|verb| verb.get_name() != "help").try_for_each(|verb| write_all(verb, dir))
}
