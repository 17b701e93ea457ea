//! The checker: looks at the kernel and at the authority's file with readers of its own, apart
//! from the agent's, so that a mistake there is not repeated here. It may be this host's foreign
//! administrator, too.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sha2::{Digest as _, Sha256};

/// Whether it holds and what was seen, or why nothing could be seen.
pub(super) type Look = Result<(bool, String), String>;

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// The superblock options of the overlay at `merged`, from mountinfo: the field after type and
/// source. The options before the dash are of the mount alone and stop nobody elsewhere.
fn superblock(merged: &Path) -> Result<Option<String>, String> {
    let text = fs::read("/proc/self/mountinfo").map_err(|e| e.to_string())?;
    for line in text.split(|b| *b == b'\n') {
        let fields: Vec<&[u8]> = line.split(|b| *b == b' ').collect();
        let Some(dash) = fields.iter().position(|f| *f == b"-") else { continue };
        let at = fields.get(4).map(|f| unescape(f));
        if at.as_deref() == Some(merged) && fields.get(dash + 1) == Some(&&b"overlay"[..]) {
            let options = fields.get(dash + 3).copied().unwrap_or_default();
            return Ok(Some(String::from_utf8_lossy(options).into_owned()));
        }
    }
    Ok(None)
}

/// Octal escapes of mountinfo.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let octal = (first == b'\\' && tail.len() >= 3)
            .then(|| std::str::from_utf8(&tail[..3]).ok())
            .flatten()
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(octal.unwrap_or(first));
        rest = if octal.is_some() { &tail[3..] } else { tail };
    }
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

/// Whether the overlay's superblock is read-only, or `rw`, as `wanted`.
pub(super) fn superblock_is(wanted: &str, merged: &Path) -> Look {
    let options = superblock(merged)?.ok_or("no overlay is mounted there")?;
    let first = options.split(',').next().unwrap_or_default().to_owned();
    Ok((first == wanted, format!("mountinfo: superblock {first}")))
}

/// Whether wish and fact of the freezer both say frozen.
pub(super) fn frozen(cgroup: &Path) -> Look {
    let wish = read(&cgroup.join("cgroup.freeze"))?.trim().to_owned();
    let events = read(&cgroup.join("cgroup.events"))?;
    let fact = events.lines().find_map(|line| line.strip_prefix("frozen ")).unwrap_or("absent");
    let seen = format!("cgroup.freeze {wish}, cgroup.events frozen {fact}");
    Ok((wish == "1" && fact == "1", seen))
}

/// The processes of a cgroup.
pub(super) fn pids(cgroup: &Path) -> Result<Vec<u32>, String> {
    let text = read(&cgroup.join("cgroup.procs"))?;
    Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
}

/// A process as /proc/PID/stat has it.
struct Stat {
    state: char,
    exiting: bool,
    started: u64,
}

/// `None` when it is no more.
fn stat(pid: u32) -> Option<Stat> {
    const PF_EXITING: u64 = 4;
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command's name may hold anything; fields are counted after it.
    let rest: Vec<&str> = text.rsplit_once(") ")?.1.split(' ').collect();
    Some(Stat {
        state: rest.first()?.chars().next()?,
        exiting: rest.get(6)?.parse::<u64>().ok()? & PF_EXITING != 0,
        started: rest.get(19)?.parse().ok()?,
    })
}

/// When a process started, in clock ticks; `None` when it has ended. One that is exiting has left
/// its cgroup and given up memory and files; how long it is listed is up to whoever collects it.
pub(super) fn started(pid: u32) -> Option<u64> {
    stat(pid).filter(|stat| !stat.exiting && stat.state != 'Z').map(|stat| stat.started)
}

/// Who runs in a cgroup, such that a pid that is used again is another one.
pub(super) fn running(cgroup: &Path) -> Result<BTreeMap<u32, u64>, String> {
    Ok(pids(cgroup)?.into_iter().filter_map(|pid| Some((pid, started(pid)?))).collect())
}

/// Whether every process in it stands stopped by SIGSTOP.
pub(super) fn stopped(cgroup: &Path) -> Look {
    let all = pids(cgroup)?;
    let still = all.iter().filter(|pid| stat(**pid).is_some_and(|stat| stat.state == 'T')).count();
    Ok((!all.is_empty() && still == all.len(), format!("{still} of {} in state T", all.len())))
}

/// The foreign administrator stops every process in it, those started meanwhile too.
pub(super) fn stop_all(cgroup: &Path) -> Result<(), String> {
    let until = Instant::now() + Duration::from_secs(2);
    while Instant::now() < until {
        signal_all(cgroup, Signal::SIGSTOP)?;
        if stopped(cgroup)?.0 {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err(format!("not all stopped: {}", stopped(cgroup)?.1))
}

/// The foreign administrator continues and thaws it.
pub(super) fn thaw(cgroup: &Path) -> Result<(), String> {
    // It is to run for a moment before the agent stops it again, also on a busy machine.
    let pids = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    for pid in pids.lines().filter_map(|pid| pid.parse().ok()) {
        let pid = rustix::process::Pid::from_raw(pid);
        // One that ended meanwhile needs no priority.
        let _ = rustix::process::setpriority_process(pid, -20);
    }
    signal_all(cgroup, Signal::SIGCONT)?;
    fs::write(cgroup.join("cgroup.freeze"), "0").map_err(|e| format!("cgroup.freeze: {e}"))
}

fn signal_all(cgroup: &Path, signal: Signal) -> Result<(), String> {
    for pid in pids(cgroup)? {
        let raw = i32::try_from(pid).map_err(|e| e.to_string())?;
        match kill(Pid::from_raw(raw), signal) {
            Ok(()) | Err(nix::errno::Errno::ESRCH) => {}
            Err(e) => return Err(format!("kill {signal} {pid}: {e}")),
        }
    }
    Ok(())
}

/// A descriptor open for writing on a regular file called `name`, in the processes of a cgroup.
pub(super) fn writer_of(cgroup: &Path, name: &str) -> Result<Option<(u32, String)>, String> {
    for pid in pids(cgroup)? {
        let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        for entry in entries.flatten() {
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            if target.file_name() != Some(name.as_ref()) {
                continue;
            }
            let fd = entry.file_name().to_string_lossy().into_owned();
            let info = read(format!("/proc/{pid}/fdinfo/{fd}").as_ref()).unwrap_or_default();
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).map(str::trim);
            let flags = flags.and_then(|text| u32::from_str_radix(text, 8).ok()).unwrap_or(0);
            if flags & 0o3 != 0 {
                return Ok(Some((pid, format!("pid {pid} fd {fd} -> {}", target.display()))));
            }
        }
    }
    Ok(None)
}

/// Every entry below a directory with kind, size and, for files, digest.
pub(super) fn tree(dir: &Path) -> Result<BTreeMap<PathBuf, String>, String> {
    let mut found = BTreeMap::new();
    let mut open = vec![dir.to_owned()];
    while let Some(next) = open.pop() {
        let entries = fs::read_dir(&next).map_err(|e| format!("{}: {e}", next.display()))?;
        for entry in entries {
            let path = entry.map_err(|e| e.to_string())?.path();
            let meta = path.symlink_metadata().map_err(|e| e.to_string())?;
            let name = path.strip_prefix(dir).map_err(|e| e.to_string())?.to_owned();
            let says = if meta.is_dir() {
                open.push(path);
                "directory".to_owned()
            } else if meta.is_file() {
                let bytes = fs::read(&path).map_err(|e| e.to_string())?;
                format!("{} bytes {}", bytes.len(), hex::encode(Sha256::digest(&bytes)))
            } else {
                format!("{:?}", meta.file_type())
            };
            found.insert(name, says);
        }
    }
    Ok(found)
}

/// The same tree as before, to the byte.
pub(super) fn unchanged(dir: &Path, before: &BTreeMap<PathBuf, String>) -> Look {
    let now = tree(dir)?;
    let names = now.iter().map(|(name, says)| {
        format!("{} {}", name.display(), says.chars().take(24).collect::<String>())
    });
    Ok((now == *before, format!("upper: {}", names.collect::<Vec<_>>().join(", "))))
}

/// A file has exactly these bytes.
pub(super) fn holds(file: &Path, bytes: &str) -> Look {
    let found = fs::read(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let shown = String::from_utf8_lossy(&found).into_owned();
    Ok((found == bytes.as_bytes(), format!("{name} holds {shown:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_escapes_are_undone() {
        for (field, path) in [
            ("/a\\040b", "/a b"),
            ("/a\\134040", "/a\\040"),
            ("/plain", "/plain"),
            ("/x\\", "/x\\"),
        ] {
            assert_eq!(unescape(field.as_bytes()), Path::new(path), "{field}");
        }
    }

    #[test]
    fn a_changed_byte_in_a_tree_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("d")).unwrap();
        fs::write(dir.path().join("d/f"), "one").unwrap();
        let before = tree(dir.path()).unwrap();
        assert!(unchanged(dir.path(), &before).unwrap().0);
        fs::write(dir.path().join("d/f"), "two").unwrap();
        assert!(!unchanged(dir.path(), &before).unwrap().0);
    }
}
