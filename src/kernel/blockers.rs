//! Who holds up a freeze or a kill, as far as /proc says.

use crate::model::facts::Blocker;

/// How many are named at most.
const MOST: usize = 32;

/// Of these processes, the threads that are not frozen, at most 32. Threads that end meanwhile are
/// left out.
pub fn of(pids: &[u32]) -> Vec<Blocker> {
    pids.iter().flat_map(|pid| threads(*pid)).filter(|b| !is_frozen(b)).take(MOST).collect()
}

fn threads(pid: u32) -> Vec<Blocker> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    tasks
        .flatten()
        .filter_map(|task| {
            let read = |name: &str| std::fs::read(task.path().join(name)).ok();
            let text = |name| {
                read(name)
                    .map(|t| String::from_utf8_lossy(&t).trim().to_owned())
                    .unwrap_or_default()
            };
            let (command, state) = parse_stat(&read("stat")?)?;
            Some(Blocker { pid, command, state, wchan: text("wchan"), syscall: text("syscall") })
        })
        .collect()
}

/// A frozen task sleeps in the freezer's trap, which compilers fold into get_signal; a stopped or
/// traced one is in state T or t there. Where wchan is not readable ("0"), nobody is taken for frozen.
fn is_frozen(blocker: &Blocker) -> bool {
    blocker.state == "S" && ["do_freezer_trap", "get_signal"].contains(&&*blocker.wchan)
}

/// Name and state of /proc/PID/stat; the name may hold spaces and parentheses.
pub(crate) fn parse_stat(stat: &[u8]) -> Option<(String, String)> {
    let open = stat.iter().position(|b| *b == b'(')?;
    let close = stat.iter().rposition(|b| *b == b')')?;
    let name = String::from_utf8_lossy(stat.get(open + 1..close)?).into_owned();
    let state = char::from(*stat.get(close + 2)?).to_string();
    Some((name, state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_hide_the_state() {
        let parsed = parse_stat(b"7 (a) R (b)) D 1 7").unwrap();
        assert_eq!(parsed, ("a) R (b)".to_owned(), "D".to_owned()));
        assert_eq!(parse_stat(b"7 (a"), None);
        assert_eq!(parse_stat(b"7 (a)"), None);
    }

    #[test]
    fn a_running_process_is_named() {
        let found = of(&[std::process::id()]);
        assert!(!found.is_empty());
        assert!(found.iter().all(|b| b.pid == std::process::id() && !b.state.is_empty()));
    }
}
