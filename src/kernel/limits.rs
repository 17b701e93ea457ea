//! Limits of sealed cgroups: memory, pids, cpu, where cgroup v2 has these controllers. Control files
//! are written by cgroups-rs; which controller is to be had, and where one is missing, is our own:
//! that crate takes the hierarchy's mount point for given.

use std::path::Path;

use cgroups_rs::MaxValue;
use cgroups_rs::cpu::CpuController;
use cgroups_rs::memory::MemController;
use cgroups_rs::pid::PidController;
use rustix::io::Errno;

use super::{At as _, Error, Result};
use crate::failpoint;
use crate::model::limits::Limits;

/// Period of the CPU quota, microseconds; the kernel's default.
const PERIOD: u64 = 100_000;

/// Has the controllers that `limits` needs in the cgroups below `parent`, which is ours. Nothing
/// above it is changed: that belongs to systemd, or to whoever runs the host.
///
/// # Errors
/// A controller is missing; says which, and where it is to be had.
pub fn enable(root: &Path, parent: &Path, limits: &Limits) -> Result<()> {
    for controller in limits.controllers() {
        if lists(&parent.join("cgroup.subtree_control"), controller)? {
            continue;
        }
        if !lists(&parent.join("cgroup.controllers"), controller)? {
            offered(root, controller)?;
            return Err(Error::NoController { controller, reason: why(root, parent, controller)? });
        }
        let path = parent.join("cgroup.subtree_control");
        failpoint::fails("kernel.controller.before").at("enable a controller in", &path)?;
        std::fs::write(&path, format!("+{controller}")).at("enable a controller in", path)?;
        failpoint::hit("kernel.controller.after");
    }
    Ok(())
}

/// Whether this host's cgroup v2 has a controller at all.
///
/// # Errors
/// It has not; says why that may be.
pub fn offered(root: &Path, controller: &'static str) -> Result<()> {
    if lists(&root.join("cgroup.controllers"), controller)? {
        return Ok(());
    }
    let reason = format!(
        "cgroup v2 of this host does not offer it at {} (cgroup v1 may hold it: boot with \
         systemd.unified_cgroup_hierarchy=1)",
        root.display()
    );
    Err(Error::NoController { controller, reason })
}

/// Bounds the processes of a cgroup. Done before any is in it.
///
/// # Errors
/// The kernel refuses a value; says which file.
pub fn apply(cgroup: &Path, limits: &Limits) -> Result<()> {
    let place = || cgroup.to_owned();
    if let Some(memory) = limits.memory {
        let controller = MemController::new(place(), true);
        let bytes = i64::try_from(memory.0).unwrap_or(i64::MAX);
        written("memory.max", cgroup, controller.set_limit(bytes))?;
        // A bound that swap goes around is none; without swap there is no such file.
        if cgroup.join("memory.swap.max").exists() {
            written("memory.swap.max", cgroup, controller.set_memswap_limit(0))?;
        }
    }
    if let Some(pids) = limits.pids {
        let most = MaxValue::Value(i64::try_from(pids).unwrap_or(i64::MAX));
        written("pids.max", cgroup, PidController::new(place(), true).set_pid_max(most))?;
    }
    if let Some(cpu) = limits.cpu {
        let quota = i64::try_from(cpu.0.saturating_mul(PERIOD / 1000)).unwrap_or(i64::MAX);
        let controller = CpuController::new(place(), true);
        let answer = controller.set_cfs_quota_and_period(Some(quota), Some(PERIOD));
        written("cpu.max", cgroup, answer)?;
    }
    Ok(())
}

fn written(file: &'static str, cgroup: &Path, answer: cgroups_rs::error::Result<()>) -> Result<()> {
    answer.map_err(|fault| {
        let cause = std::error::Error::source(&fault);
        let errno = cause.and_then(|cause| cause.downcast_ref::<std::io::Error>());
        Error::Call {
            op: "write the limit",
            path: cgroup.join(file),
            source: errno.and_then(Errno::from_io_error).unwrap_or(Errno::IO),
        }
    })
}

fn lists(file: &Path, controller: &str) -> Result<bool> {
    let text = std::fs::read_to_string(file).at("read", file)?;
    Ok(text.split_whitespace().any(|word| word == controller))
}

/// Where a controller that `parent` does not have ends.
fn why(root: &Path, parent: &Path, controller: &str) -> Result<String> {
    for above in parent.ancestors().skip(1).take_while(|above| above.starts_with(root)) {
        if lists(&above.join("cgroup.controllers"), controller)? {
            return Ok(format!(
                "{} has it and does not pass it on: write +{controller} into its \
                 cgroup.subtree_control, or under systemd start overfence-sessions.service \
                 (Delegate=yes)",
                above.display()
            ));
        }
    }
    Ok(format!("it is not passed on to {}", parent.display()))
}
