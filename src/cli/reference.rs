//! The reference in `docs/CLI.md`, made from the definition of the command line.

use clap::{Command, CommandFactory as _};

use super::Cli;
use crate::model::code::Code;

/// The whole of it.
pub(super) fn reference() -> String {
    let mut text = String::from(
        "# Command line\n\nMade from the program by a test (`UPDATE_GOLDEN=1 cargo test --lib cli` \
         writes it).\n",
    );
    let mut root = Cli::command().term_width(96).mut_args(|arg| arg.hide_env(true));
    root.build();
    chapter(&root, &mut text);
    text.push_str(
        "\n## Codes\n\nEach failure has a stable code: on standard error before the message, in \
         `problem+json` as `code`. `run` and `session exec` exit with 125 for failures of their \
         own.\n\n| code | exit | HTTP | meaning |\n|---|---|---|---|\n",
    );
    for code in Code::ALL {
        let (exit, status, meaning) = (code.exit(), code.status(), code.meaning());
        text.push_str(&format!("| `{code}` | {exit} | {status} | {meaning} |\n"));
    }
    text
}

fn chapter(command: &Command, text: &mut String) {
    let name = command.get_bin_name().unwrap_or("overfence").to_owned();
    // Options that every verb takes are told once, with the program itself.
    let global = |arg: &clap::Arg| arg.is_global_set() && name != "overfence";
    let globals: Vec<_> =
        command.get_arguments().filter(|arg| global(arg)).map(|a| a.get_id().clone()).collect();
    let mut shown = command.clone();
    for id in globals {
        shown = shown.mut_arg(id, |arg| arg.hide(true));
    }
    let help = shown.render_long_help().to_string();
    let help: String = help.lines().map(|line| format!("{}\n", line.trim_end())).collect();
    text.push_str(&format!("\n## {name}\n\n```text\n{}\n```\n", help.trim_end()));
    for verb in command.get_subcommands().filter(|verb| !verb.is_hide_set()) {
        if verb.get_name() != "help" {
            chapter(verb, text);
        }
    }
}
