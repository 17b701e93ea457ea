//! What of this host, and of the namespaces that the agent is in, the gate stands on.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use super::pins::Why;

/// Where the kernel's own file system for programs and maps is mounted, by systemd for one.
pub(super) const BPFFS: &str = "/sys/fs/bpf";
const BPFFS_MAGIC: u64 = 0xcafe_4a11;
const SECURITY: &str = "/sys/kernel/security/lsm";
const OFFSETS: &str = "/proc/self/timens_offsets";

/// The reason why no programs can be put up here.
pub(super) fn ask() -> Result<(), Why> {
    let list =
        std::fs::read_to_string(SECURITY).map_err(|e| format!("cannot read {SECURITY}: {e}"))?;
    if !list.split(',').any(|lsm| lsm.trim() == "bpf") {
        return Err(format!("no BPF LSM: {} (boot with lsm=...,bpf)", list.trim()));
    }
    if !is_pinnable() {
        return Err(format!(
            "no bpf file system at {BPFFS} (mount -t bpf -o mode=0700 bpf {BPFFS})"
        ));
    }
    // Whoever else gets in could keep the lock for ever, or be the first to make what agents pin in.
    are_roots_alone(Path::new(BPFFS))?;
    are_roots_alone(&Path::new(BPFFS).join(super::pins::OURS))?;
    match shifted() {
        false => Ok(()),
        true => {
            Err("CLOCK_BOOTTIME is shifted here, in a time namespace: the programs would compare \
                     with another clock (run the agent outside of it)"
                .to_owned())
        }
    }
}

/// A directory that is not there is nobody's.
fn are_roots_alone(dir: &Path) -> Result<(), Why> {
    let meta = match std::fs::symlink_metadata(dir) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        answer => answer.map_err(|e| format!("cannot stat {}: {e}", dir.display()))?,
    };
    let (uid, mode) = (meta.uid(), meta.mode() & 0o7777);
    match meta.is_dir() && uid == 0 && mode & 0o022 == 0 {
        true => Ok(()),
        false => Err(format!(
            "{path} is not root's alone: uid {uid}, mode {mode:04o} (chown root {path}; chmod 0700 {path})",
            path = dir.display()
        )),
    }
}

/// Whether something can be pinned here, or is.
pub(super) fn is_pinnable() -> bool {
    let bpffs = rustix::fs::statfs(BPFFS).map(|fs| fs.f_type as u64 & 0xffff_ffff);
    bpffs == Ok(BPFFS_MAGIC)
}

/// Whether this agent's CLOCK_BOOTTIME is not the one that the programs read: time_namespaces(7).
pub(super) fn shifted() -> bool {
    std::fs::read_to_string(OFFSETS).is_ok_and(|text| is_shifted(&text))
}

/// A line for each clock: its name, then seconds and nanoseconds.
fn is_shifted(text: &str) -> bool {
    text.lines().any(|line| {
        let mut words = line.split_whitespace();
        words.next() == Some("boottime") && words.any(|word| word.parse::<i64>() != Ok(0))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shifted_boottime_is_seen() {
        assert!(!is_shifted(""));
        assert!(!is_shifted("monotonic           0         0\nboottime            0         0\n"));
        assert!(!is_shifted("monotonic           5         0\nboottime            0         0\n"));
        assert!(is_shifted("monotonic           0         0\nboottime        86400         0\n"));
        assert!(is_shifted("monotonic           0         0\nboottime            0         1\n"));
        assert!(is_shifted("monotonic           0         0\nboottime           -1         0\n"));
    }
}
