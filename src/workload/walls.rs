//! The argument list of bubblewrap: **this is the security policy of a session.** One pure
//! function; a test holds its text. What is the session's own is bound from [`STAGE`], which the
//! launcher has set up in a mount namespace of its own: no path of the host's is looked up twice,
//! and none needs to be open to a mapped root.

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::PathBuf;

/// Where Debian puts it; root never looks it up in a `PATH`.
pub(super) const BUBBLEWRAP: &str = "/usr/bin/bwrap";

/// Where the session's own directory is inside.
pub(super) const RUN_DIR: &str = "/run/overfence";

/// Where overfence is inside.
pub(super) const BINARY: &str = "/run/overfence/overfence";

/// Where the overlay is inside.
pub(super) const WORKSPACE: &str = "/workspace";

/// Where the launcher puts the session's own mounts before bubblewrap takes over: in its mount
/// namespace alone, over a directory that every host has.
pub(super) const STAGE: &str = "/run";

/// The names below [`STAGE`]: the overlay, the session's directory, the prepared `/etc`, overfence.
pub(super) const STAGED: [&str; 4] = ["workspace", "session", "etc", "overfence"];

/// What `/tmp` may hold, bytes. `/dev/shm` the same.
const SCRATCH: &str = "268435456";

/// Kernel knobs: a process with uid 0, mapped or not, must not write them. bubblewrap leaves them
/// writable (`/proc/sys/kernel/core_pattern` starts a helper as the host's root).
pub(super) const READ_ONLY_PROC: &[&str] =
    &["sys", "sysrq-trigger", "irq", "bus", "acpi", "scsi", "fs", "tty"];

/// Kernel memory, keys and addresses: not even to be read.
pub(super) const MASKED_PROC: &[&str] = &[
    "kcore",
    "keys",
    "key-users",
    "timer_list",
    "kallsyms",
    "kmsg",
    "kpagecount",
    "kpageflags",
    "kpagecgroup",
    "sched_debug",
    "slabinfo",
    "vmallocinfo",
    "latency_stats",
    "config.gz",
    "iomem",
    "ioports",
    "modules",
];

/// What one of `bin`, `sbin`, `lib*` is on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Top {
    /// A link, for instance `bin -> usr/bin`.
    Link(&'static str, PathBuf),
    /// A directory of its own, on hosts that did not merge `/usr`.
    Directory(&'static str),
}

/// What differs between sessions and hosts.
#[derive(Debug)]
pub(super) struct Walls {
    /// `bin`, `sbin`, `lib*` as found.
    pub(super) tops: Vec<Top>,
    /// Those of [`READ_ONLY_PROC`] that this kernel has.
    pub(super) read_only_proc: Vec<&'static str>,
    /// Those of [`MASKED_PROC`] that this kernel has.
    pub(super) masked_proc: Vec<&'static str>,
    /// Seccomp programs.
    pub(super) filters: Vec<RawFd>,
    /// Where bubblewrap says the init's process id.
    pub(super) status: RawFd,
    /// Whether the session has a network of its own.
    pub(super) own_network: bool,
    /// Whether ids are mapped: the command may then keep capabilities over its own ids.
    pub(super) mapped: bool,
    /// What follows `session-init`.
    pub(super) init: Vec<OsString>,
}

/// The arguments, without the program's name.
pub(super) fn arguments(walls: &Walls) -> Vec<OsString> {
    let mut args = Args(vec![]);
    let [workspace, session, etc, overfence] = STAGED.map(|name| format!("{STAGE}/{name}"));

    // Namespaces of its own. Not the user namespace: when ids are mapped, ours is entered before,
    // since bubblewrap's own maps root to the host's root.
    args.add(["--unshare-pid"]);
    args.add(["--unshare-ipc"]);
    args.add(["--unshare-uts"]);
    // The sealed cgroup becomes the root that /proc/self/cgroup shows; its path says nothing.
    args.add(["--unshare-cgroup"]);
    if walls.own_network {
        // Abstract unix sockets are a matter of the network namespace, too.
        args.add(["--unshare-net"]);
    }

    // A constructed root: empty, then what is named here. The host's tree is detached.
    args.add(["--tmpfs", "/"]);
    args.add(["--ro-bind", "/usr", "/usr"]);
    for top in &walls.tops {
        match top {
            Top::Link(name, target) => {
                args.push(&["--symlink".into(), target.into(), format!("/{name}").into()])
            }
            Top::Directory(name) => {
                args.push(&[
                    "--ro-bind".into(),
                    format!("/{name}").into(),
                    format!("/{name}").into(),
                ]);
            }
        }
    }
    // A copy of chosen files without secrets; never the host's own directory.
    args.add(["--ro-bind", &etc, "/etc"]);

    // Its own processes only.
    args.add(["--proc", "/proc"]);
    for name in &walls.read_only_proc {
        let path = OsString::from(format!("/proc/{name}"));
        args.push(&["--ro-bind".into(), path.clone(), path]);
    }
    // null, zero, full, random, urandom, tty, pts, shm and no other device.
    args.add(["--dev", "/dev"]);
    for name in &walls.masked_proc {
        args.push(&["--ro-bind".into(), "/dev/null".into(), format!("/proc/{name}").into()]);
    }

    // Scratch space in memory, bounded, gone with the session.
    args.add(["--perms", "1777", "--size", SCRATCH, "--tmpfs", "/dev/shm"]);
    args.add(["--perms", "1777", "--size", SCRATCH, "--tmpfs", "/tmp"]);
    args.add(["--dir", "/var", "--symlink", "/tmp", "/var/tmp", "--symlink", "/run", "/var/run"]);

    // Made by name: what bubblewrap makes on the way to a mount point only root can enter.
    args.add(["--dir", "/run"]);
    // The session's own directory: a directory, so that a restarted agent's new socket appears.
    args.add(["--ro-bind", &session, RUN_DIR]);
    args.add(["--ro-bind", &overfence, BINARY]);
    // The one thing that is written: the session's overlay, and no other session's.
    args.add(["--bind", &workspace, WORKSPACE]);

    // Nothing can be added to the root or to /dev.
    args.add(["--remount-ro", "/dev"]);
    args.add(["--remount-ro", "/"]);

    // What the init needs to become the command's user, and nothing else.
    args.add(["--cap-drop", "ALL"]);
    for cap in ["CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL"] {
        args.add(["--cap-add", cap]);
    }
    if walls.mapped {
        // Over the mapped ids alone: these are capabilities in the session's user namespace.
        for cap in super::shed::MAPPED_ROOT_NAMES {
            args.add(["--cap-add", cap]);
        }
    }
    for &fd in &walls.filters {
        args.push(&["--add-seccomp-fd".into(), fd.to_string().into()]);
    }

    // The host's process id of the init, for the record.
    args.push(&["--json-status-fd".into(), walls.status.to_string().into()]);
    // No --new-session: it would take job control away; TIOCSTI is refused by a filter instead.
    // No --die-with-parent: a workload outlives agent and client.
    args.add(["--as-pid-1"]);
    // Nothing of the caller's environment reaches the init, which still has capabilities.
    args.add(["--clearenv"]);
    args.add(["--chdir", "/"]);
    args.add(["--", BINARY, "session-init"]);
    args.push(&walls.init);
    args.0
}

struct Args(Vec<OsString>);

impl Args {
    fn add<const N: usize>(&mut self, words: [&str; N]) {
        self.0.extend(words.map(OsString::from));
    }

    fn push(&mut self, words: &[OsString]) {
        self.0.extend_from_slice(words);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walls() -> Walls {
        Walls {
            tops: vec![Top::Link("bin", "usr/bin".into()), Top::Directory("lib64")],
            read_only_proc: vec!["sys", "irq"],
            masked_proc: vec!["kcore"],
            filters: vec![14, 15],
            status: 16,
            own_network: true,
            mapped: false,
            init: vec!["17".into(), "18".into()],
        }
    }

    fn text(walls: &Walls) -> String {
        let args = arguments(walls);
        let mut out = String::new();
        for arg in args {
            let arg = arg.to_str().unwrap();
            out.push_str(if arg.starts_with("--") { "\n" } else { " " });
            out.push_str(arg);
        }
        out.trim_start().to_owned()
    }

    const POLICY: &str = "\
--unshare-pid
--unshare-ipc
--unshare-uts
--unshare-cgroup
--unshare-net
--tmpfs /
--ro-bind /usr /usr
--symlink usr/bin /bin
--ro-bind /lib64 /lib64
--ro-bind /run/etc /etc
--proc /proc
--ro-bind /proc/sys /proc/sys
--ro-bind /proc/irq /proc/irq
--dev /dev
--ro-bind /dev/null /proc/kcore
--perms 1777
--size 268435456
--tmpfs /dev/shm
--perms 1777
--size 268435456
--tmpfs /tmp
--dir /var
--symlink /tmp /var/tmp
--symlink /run /var/run
--dir /run
--ro-bind /run/session /run/overfence
--ro-bind /run/overfence /run/overfence/overfence
--bind /run/workspace /workspace
--remount-ro /dev
--remount-ro /
--cap-drop ALL
--cap-add CAP_SETUID
--cap-add CAP_SETGID
--cap-add CAP_SETPCAP
--cap-add CAP_KILL
--add-seccomp-fd 14
--add-seccomp-fd 15
--json-status-fd 16
--as-pid-1
--clearenv
--chdir /
-- /run/overfence/overfence session-init 17 18";

    #[test]
    fn the_policy_reads_as_it_was_decided() {
        assert_eq!(text(&walls()), POLICY);
    }

    #[test]
    fn the_hosts_network_and_mapped_ids_change_only_what_they_must() {
        let text = text(&Walls { own_network: false, mapped: true, ..walls() });
        let expected = POLICY.replace("--unshare-net\n", "").replace(
            "--cap-add CAP_KILL\n",
            "--cap-add CAP_KILL\n--cap-add CAP_CHOWN\n--cap-add CAP_DAC_OVERRIDE\n--cap-add CAP_FOWNER\n\
             --cap-add CAP_FSETID\n--cap-add CAP_NET_BIND_SERVICE\n",
        );
        assert_eq!(text, expected);
    }
}
