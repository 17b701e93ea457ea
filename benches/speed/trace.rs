//! What an agent syncs, as strace sees it.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::host::Place;

/// A call that waits for a disk.
pub struct Call {
    name: String,
    /// What it waits for; empty where a call names nothing.
    pub file: PathBuf,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.file.file_name().unwrap_or_default();
        write!(f, "{} {}", self.name, file.display())
    }
}

/// strace on an agent.
pub struct Trace {
    strace: Child,
    log: PathBuf,
}

impl Trace {
    const CALLS: &str = "trace=fsync,fdatasync,sync_file_range,syncfs,sync,msync";

    pub fn of(pid: u32, place: &Place) -> Option<Self> {
        let log = place.dir.join("strace.log");
        let strace = Command::new("strace")
            .args(["-f", "-q", "-y", "-e", Self::CALLS, "-p", &pid.to_string(), "-o"])
            .arg(&log)
            .stdin(Stdio::null())
            .spawn()
            .ok()?;
        let traced = || {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            !status.contains("TracerPid:\t0")
        };
        while !traced() {
            std::thread::sleep(Duration::from_millis(5));
        }
        // It attaches to one thread after the other.
        std::thread::sleep(Duration::from_millis(300));
        Some(Self { strace, log })
    }

    /// The calls made until now, each with its file.
    pub fn calls(&self) -> Vec<Call> {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let begun = log.lines().filter(|l| l.contains("sync") && !l.contains("resumed>"));
        begun
            .map(|line| {
                let call = line.split_whitespace().nth(1).unwrap_or_default();
                let (_, file) = line.split_once('<').unwrap_or_default();
                let (file, _) = file.rsplit_once('>').unwrap_or_default();
                let name = call.split('(').next().unwrap_or_default().to_owned();
                Call { name, file: file.into() }
            })
            .collect()
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let _ = self.strace.kill();
        let _ = self.strace.wait();
    }
}
