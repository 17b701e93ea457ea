//! `overfence`: verbs to rooms, and where the log goes.

use std::io::IsTerminal as _;
use std::os::fd::AsFd as _;
use std::process::ExitCode;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

fn main() -> ExitCode {
    match overfence::cli::read(std::env::args_os()) {
        Ok(cli) => {
            log();
            overfence::cli::main(cli)
        }
        Err(ended) => ended,
    }
}

/// To the journal when standard error is the journal, else to standard error; `RUST_LOG` filters.
fn log() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let registry = tracing_subscriber::registry().with(filter);
    match tracing_journald::layer().ok().filter(|_| stderr_is_journal()) {
        // Fields under their own names, so that `journalctl OVERFENCE_SESSION=...` finds them.
        Some(journal) => registry.with(journal.with_field_prefix(None)).init(),
        None => {
            let layer = tracing_subscriber::fmt::layer()
                .with_writer(std::io::stderr)
                .with_ansi(false)
                .with_target(!std::io::stderr().is_terminal());
            registry.with(layer).init();
        }
    }
}

/// systemd names the device and inode of the stream it gave us.
fn stderr_is_journal() -> bool {
    let Ok(stat) = rustix::fs::fstat(std::io::stderr().as_fd()) else { return false };
    std::env::var("JOURNAL_STREAM")
        .is_ok_and(|told| told == format!("{}:{}", stat.st_dev, stat.st_ino))
}
