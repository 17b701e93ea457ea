//! Crash points. Each effect passes one before and one after it, so that a test can kill the
//! process between any two effects: a first run counts them (`log=FILE`), further runs die at the
//! Nth (`die=N`) or at a name (`die=NAME`), by SIGKILL, as a real crash would. `stall=NAME` holds
//! whoever comes to that point up for [`STALL`], as a disk does that is busy. `lose=NAME@FILE` loses
//! the authority's answer at that point, as long as the file is there. `fail=FILE` has the effect
//! fail that the file names, with the errno that it names (`kernel.umount.before 5`), as long as it
//! is there.
//!
//! `OVERFENCE_FAILPOINTS=log=/tmp/points;die=12`. Unset, a hit costs one load of a static.

use std::io::Write as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long a stalled point takes.
pub const STALL: Duration = Duration::from_secs(2);

/// The environment variable that arms failpoints.
pub const VARIABLE: &str = "OVERFENCE_FAILPOINTS";

#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    log: Option<std::path::PathBuf>,
    die_at: Option<u64>,
    die_name: Option<String>,
    stall: Option<String>,
    lose: Vec<(String, std::path::PathBuf)>,
    fail: Option<std::path::PathBuf>,
}

fn parse(text: &str) -> Plan {
    let mut plan = Plan::default();
    for part in text.split(';') {
        match part.split_once('=') {
            Some(("log", path)) => plan.log = Some(path.into()),
            Some(("fail", path)) => plan.fail = Some(path.into()),
            Some(("stall", name)) => plan.stall = Some(name.to_owned()),
            Some(("lose", at)) => {
                plan.lose.extend(at.split_once('@').map(|(name, f)| (name.to_owned(), f.into())));
            }
            Some(("die", n)) => match n.parse() {
                Ok(n) => plan.die_at = Some(n),
                Err(_) => plan.die_name = Some(n.to_owned()),
            },
            _ => {}
        }
    }
    plan
}

static PLAN: OnceLock<Option<Plan>> = OnceLock::new();
static HITS: AtomicU64 = AtomicU64::new(0);

/// Marks a point between two effects. The name is `room.effect.before` or `room.effect.after`.
pub fn hit(name: &str) {
    pass(name, "");
}

/// Marks a point before an effect that can fail, and fails in its place if that is asked for.
///
/// # Errors
/// The errno that was asked for.
pub fn fails(name: &str) -> rustix::io::Result<()> {
    pass(name, " can fail");
    let plan = PLAN.get().and_then(Option::as_ref);
    let Some(file) = plan.and_then(|plan| plan.fail.as_ref()) else { return Ok(()) };
    let named = std::fs::read_to_string(file).unwrap_or_default();
    match named.trim().split_once(' ') {
        Some((at, errno)) if at == name => {
            errno.parse().map_or(Ok(()), |errno| Err(rustix::io::Errno::from_raw_os_error(errno)))
        }
        Some(_) | None => Ok(()),
    }
}

fn pass(name: &str, kind: &str) {
    let plan = PLAN.get_or_init(|| std::env::var(VARIABLE).ok().map(|text| parse(&text)));
    let Some(plan) = plan else { return };
    let n = HITS.fetch_add(1, Ordering::SeqCst) + 1;
    if let Some(path) = &plan.log {
        let line = format!("{n} {name}{kind}\n");
        let _ = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .and_then(|mut f| f.write_all(line.as_bytes()));
    }
    if plan.stall.as_deref() == Some(name) {
        std::thread::sleep(STALL);
    }
    if plan.die_at == Some(n) || plan.die_name.as_deref() == Some(name) {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::Signal::SIGKILL);
    }
}

/// Marks a point at which an answer of the authority can be lost.
///
/// # Errors
/// It is lost.
pub fn lost(name: &str) -> Result<(), String> {
    hit(name);
    let plan = PLAN.get().and_then(Option::as_ref);
    let mut lose = plan.iter().flat_map(|plan| &plan.lose);
    match lose.any(|(at, file)| at == name && file.exists()) {
        true => Err(format!("the answer was lost (failpoint {name})")),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_read_from_its_text() {
        let plan = parse("log=/tmp/x;die=7");
        assert_eq!((plan.die_at, plan.die_name), (Some(7), None));
        assert_eq!(
            parse("die=kernel.freeze.after").die_name.as_deref(),
            Some("kernel.freeze.after")
        );
        let lose = parse("lose=a.b.after@/tmp/x;lose=c@/y").lose;
        assert_eq!(lose, [("a.b.after".into(), "/tmp/x".into()), ("c".into(), "/y".into())]);
        assert_eq!(parse("stall=a.b.before").stall.as_deref(), Some("a.b.before"));
    }
}
