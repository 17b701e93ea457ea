//! Who was in a cgroup, and where they are now. Nothing in a frozen cgroup forks or leaves by itself:
//! who was in it and is elsewhere was moved by somebody.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::cgroup::{self, Cgroup};
use super::{Result, blockers};

/// A process that no other is taken for, within one boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Member {
    /// Process id.
    pub pid: u32,
    /// When it was started, clock ticks since the boot (field 22 of `/proc/PID/stat`).
    pub start: u64,
}

/// A process that is not where it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Which.
    pub member: Member,
    /// Its name.
    pub command: String,
    /// Its cgroup now, on the v2 hierarchy.
    pub cgroup: PathBuf,
}

/// Parent and start of a living process.
struct Stat {
    parent: u32,
    start: u64,
    command: String,
}

fn stat(pid: u32) -> Option<Stat> {
    parse_stat(&std::fs::read(format!("/proc/{pid}/stat")).ok()?)
}

/// `None` for one that is dead and waits for its parent.
fn parse_stat(text: &[u8]) -> Option<Stat> {
    let (command, state) = blockers::parse_stat(text)?;
    let close = text.iter().rposition(|b| *b == b')')?;
    let rest = std::str::from_utf8(text.get(close + 2..)?).ok()?;
    let mut fields = rest.split(' ');
    let parent = fields.nth(1)?.parse().ok()?;
    let start = fields.nth(17)?.parse().ok()?;
    (state != "Z" && state != "X").then_some(Stat { parent, start, command })
}

/// The cgroup of a process on the v2 hierarchy.
fn cgroup_of(pid: u32) -> Option<PathBuf> {
    super::holders::parse_cgroup(&std::fs::read(format!("/proc/{pid}/cgroup")).ok()?)
}

/// Where a process is, if it still is this one, lives, and is not in `cgroup` or below.
fn moved(member: Member, cgroup: &Path) -> Option<Moved> {
    let now = stat(member.pid).filter(|now| now.start == member.start)?;
    let found = cgroup_of(member.pid)?;
    let outside = !found.starts_with(cgroup);
    outside.then_some(Moved { member, command: now.command, cgroup: found })
}

/// The processes in a frozen cgroup and below.
pub fn of(cgroup: &Cgroup) -> Result<Vec<Member>> {
    let found = cgroup.procs()?;
    let members: Vec<_> = found
        .into_iter()
        .filter_map(|pid| stat(pid).map(|now| Member { pid, start: now.start }))
        .collect();
    // A pid that was given to another process between the two readings is in here no more.
    let still = cgroup.procs()?;
    Ok(members.into_iter().filter(|m| still.binary_search(&m.pid).is_ok()).collect())
}

/// Of those that were in a cgroup, who lives elsewhere now, and what they started there.
pub fn outside(members: &[Member], cgroup: &Cgroup) -> Result<Vec<Moved>> {
    // Without a cgroup nobody is in it.
    let inside = cgroup.procs().unwrap_or_default();
    if members.iter().all(|m| inside.binary_search(&m.pid).is_ok()) {
        return Ok(vec![]);
    }
    let place = cgroup::named(cgroup.path())?;
    let mut found: Vec<Moved> = members.iter().filter_map(|m| moved(*m, &place)).collect();
    if found.is_empty() {
        return Ok(found);
    }
    // What a process that was moved out has started since is nowhere listed but by its parent.
    let all: BTreeMap<u32, Stat> =
        super::holders::processes().into_iter().filter_map(|p| Some((p, stat(p)?))).collect();
    let mut next = 0;
    while let Some(parent) = found.get(next).map(|m| m.member.pid) {
        next += 1;
        for (pid, now) in all.iter().filter(|(_, now)| now.parent == parent) {
            let member = Member { pid: *pid, start: now.start };
            if found.iter().all(|m| m.member != member) {
                found.extend(moved(member, &place));
            }
        }
    }
    Ok(found)
}

/// The inode of a process's pid namespace, if it still is this one.
pub fn pid_namespace(member: Member) -> Option<u64> {
    let inode = std::fs::metadata(format!("/proc/{}/ns/pid", member.pid)).ok()?.ino();
    stat(member.pid).filter(|now| now.start == member.start).map(|_| inode)
}

/// All processes in these pid namespaces that are not in the cgroup that goes with it, from one look
/// at all processes there are.
pub fn strayed<K: Copy + Eq + Hash>(
    namespaces: &HashMap<u64, (K, PathBuf)>,
) -> Result<HashMap<K, Vec<Moved>>> {
    let mut found: HashMap<K, Vec<Moved>> = HashMap::new();
    if namespaces.is_empty() {
        return Ok(found);
    }
    for pid in super::holders::processes() {
        let Ok(link) = std::fs::metadata(format!("/proc/{pid}/ns/pid")) else { continue };
        let Some((key, place)) = namespaces.get(&link.ino()) else { continue };
        let Some(now) = stat(pid) else { continue };
        if let Some(stray) = moved(Member { pid, start: now.start }, &cgroup::named(place)?) {
            found.entry(*key).or_default().push(stray);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_start_and_the_dead_are_none() {
        let text = "7 (a) b) (c) T 3 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4242 9 10";
        let parsed = parse_stat(text.as_bytes()).unwrap();
        assert_eq!((parsed.parent, parsed.start, &*parsed.command), (3, 4242, "a) b) (c"));
        assert!(parse_stat(text.replace(" T ", " Z ").as_bytes()).is_none());
        assert!(parse_stat(b"7 (a").is_none());
        let own = std::process::id();
        let me = Member { pid: own, start: stat(own).unwrap().start };
        assert!(pid_namespace(me).is_some());
        assert!(pid_namespace(Member { start: me.start + 1, ..me }).is_none());
        assert!(moved(me, Path::new("/no/such/place")).is_some());
        assert!(moved(me, Path::new("/")).is_none());
    }
}
