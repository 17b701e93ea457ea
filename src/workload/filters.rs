//! The system calls a workload does not get: three seccomp filters, the same for the command of
//! `run` (loaded by bubblewrap) and for each `exec` (loaded by us). A list of what is denied, not
//! of what is allowed: workloads are compilers, interpreters and servers of any kind. What the
//! list leaves is held by capabilities, namespaces and the constructed root.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch, sock_filter,
};

/// The filters could not be built; the architecture is neither x86_64 nor aarch64.
#[derive(Debug, thiserror::Error)]
#[error("no system call filter for this machine; overfence confines on x86_64 and aarch64")]
pub struct Unfilterable(#[from] seccompiler::BackendError);

/// Not in `libc` yet: a mount call of Linux 6.15, the same number on every architecture.
const SYS_OPEN_TREE_ATTR: i64 = 467;

/// Refused with EPERM whatever the arguments.
const REFUSED: &[i64] = &[
    // Namespaces and mounts: the walls themselves. CLONE_NEWUSER is below.
    libc::SYS_setns,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_open_tree,
    SYS_OPEN_TREE_ATTR,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    // A file by its handle, past every directory permission and every wall.
    libc::SYS_open_by_handle_at,
    // Code in the kernel, and broad kernel surfaces that batch and build jobs do without.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_kexec_file_load,
    // Keyrings are not namespaced: the caller's session keyring would be in reach.
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    // The host as a whole.
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_syslog,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_vhangup,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
];

/// Personalities that are let through: Linux and 32-bit Linux with and without the old `uname`,
/// without address randomisation (debuggers), and the question. Others change what mappings mean.
const PERSONALITIES: &[u64] = &[0x0, 0x8, 0x0002_0000, 0x0002_0008, 0x0004_0000, 0xffff_ffff];

/// `clone` and `unshare`: only the bit for a new user namespace is looked at, the rest is refused
/// by missing capabilities, and threads use the same calls.
const NEW_USER: u64 = libc::CLONE_NEWUSER as u64;

/// The three programs, in the order in which they are loaded.
///
/// # Errors
/// The machine is neither x86_64 nor aarch64.
pub fn programs() -> Result<Vec<BpfProgram>, Unfilterable> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    // clone3 hides its flags behind a pointer; ENOSYS makes the C library fall back to clone.
    let hidden = BTreeMap::from([(libc::SYS_clone3, vec![])]);
    let mut programs =
        vec![filter(refused()?, libc::EPERM, arch)?, filter(hidden, libc::ENOSYS, arch)?];
    if cfg!(target_arch = "x86_64") {
        programs.push(no_x32());
    }
    Ok(programs)
}

/// A program's bytes as bubblewrap reads them from a descriptor.
pub fn bytes(program: &BpfProgram) -> Vec<u8> {
    let mut out = Vec::with_capacity(program.len() * 8);
    for step in program {
        out.extend(step.code.to_ne_bytes());
        out.extend([step.jt, step.jf]);
        out.extend(step.k.to_ne_bytes());
    }
    out
}

fn filter(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    errno: i32,
    arch: TargetArch,
) -> Result<BpfProgram, Unfilterable> {
    let answer = SeccompAction::Errno(errno.unsigned_abs());
    Ok(SeccompFilter::new(rules, SeccompAction::Allow, answer, arch)?.try_into()?)
}

fn refused() -> Result<BTreeMap<i64, Vec<SeccompRule>>, Unfilterable> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        REFUSED.iter().map(|&call| (call, vec![])).collect();
    for call in [libc::SYS_clone, libc::SYS_unshare] {
        let new_user = SeccompCondition::new(0, Len::Qword, Op::MaskedEq(NEW_USER), NEW_USER)?;
        rules.insert(call, vec![SeccompRule::new(vec![new_user])?]);
    }
    // The kernel takes an ioctl request as 32 bits: a comparison of 64 would be passed by setting
    // a high bit.
    let request = |n| -> Result<SeccompRule, Unfilterable> {
        Ok(SeccompRule::new(vec![SeccompCondition::new(1, Len::Dword, Op::Eq, n)?])?)
    };
    rules.insert(libc::SYS_ioctl, vec![request(libc::TIOCSTI)?, request(libc::TIOCLINUX)?]);
    // A virtual machine's line to its hypervisor is in no network namespace.
    let family =
        SeccompCondition::new(0, Len::Dword, Op::Eq, u64::from(libc::AF_VSOCK.unsigned_abs()))?;
    rules.insert(libc::SYS_socket, vec![SeccompRule::new(vec![family])?]);
    let odd = PERSONALITIES
        .iter()
        .map(|&known| SeccompCondition::new(0, Len::Dword, Op::Ne, known))
        .collect::<Result<Vec<_>, _>>()?;
    rules.insert(libc::SYS_personality, vec![SeccompRule::new(odd)?]);
    Ok(rules)
}

/// ENOSYS for every number of the x32 interface: it reaches the same calls under other numbers
/// and the same architecture id, so no rule above would see them.
fn no_x32() -> BpfProgram {
    const LOAD_NUMBER: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const IF_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
    const ANSWER: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    const X32: u32 = 0x4000_0000;
    let step = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    vec![
        step(LOAD_NUMBER, 0, 0, 0),
        step(IF_AT_LEAST, 0, 1, X32),
        step(ANSWER, 0, 0, u32::from(SeccompAction::Errno(libc::ENOSYS.unsigned_abs()))),
        step(ANSWER, 0, 0, u32::from(SeccompAction::Allow)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_three_programs_of_whole_steps() {
        let programs = programs().unwrap();
        assert_eq!(programs.len(), if cfg!(target_arch = "x86_64") { 3 } else { 2 });
        for program in &programs {
            assert_eq!(bytes(program).len(), program.len() * 8);
        }
    }

    #[test]
    fn no_call_is_in_the_list_twice() {
        let mut calls = REFUSED.to_vec();
        calls.sort_unstable();
        calls.dedup();
        assert_eq!(calls.len(), REFUSED.len());
    }
}
