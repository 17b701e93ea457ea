//! From root to the command's user: what is given up, in order, and the exec itself. The same for
//! a command of `run` and for one of `exec`.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process;

use caps::{CapSet, Capability, CapsHashSet};
use nix::sys::signal::SigSet;
use nix::unistd::{Gid, Uid, getresgid, getresuid, setgroups, setresgid, setresuid};
use seccompiler::BpfProgram;
use serde::{Deserialize, Serialize};

use super::{Command, Place, User, walls};
use crate::kernel::launch::exit_now;

/// What a mapped uid 0 keeps over its own ids, beside changing them and signalling them.
const MAPPED_ROOT: [Capability; 5] = [
    Capability::CAP_CHOWN,
    Capability::CAP_DAC_OVERRIDE,
    Capability::CAP_FOWNER,
    Capability::CAP_FSETID,
    Capability::CAP_NET_BIND_SERVICE,
];

/// The same as bubblewrap spells them.
pub(super) const MAPPED_ROOT_NAMES: [&str; 5] =
    ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_NET_BIND_SERVICE"];

/// A command with all that its own process must know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Errand {
    user: User,
    mapped: bool,
    command: Command,
}

impl Errand {
    pub(super) fn new(place: &Place, command: &Command) -> Self {
        let mut command = command.clone();
        command.env = environment(place, command.env);
        Self { user: place.user.clone(), mapped: place.mapped, command }
    }

    /// Whether this process may still keep capabilities after it became the user.
    fn kept(&self) -> CapsHashSet {
        if self.mapped && self.user.uid == 0 {
            let own = [Capability::CAP_SETUID, Capability::CAP_SETGID, Capability::CAP_KILL];
            MAPPED_ROOT.into_iter().chain(own).collect()
        } else {
            CapsHashSet::new()
        }
    }

    /// Becomes the command. Ends this process with 126 or 127 when it cannot, as a shell does.
    pub(super) fn become_it(&self, filters: &[BpfProgram]) -> ! {
        let (code, what) = match self.shed() {
            Err(what) => (125, what),
            Ok(()) => self.execute(filters),
        };
        eprintln!("overfence: {what}");
        exit_now(code)
    }

    fn shed(&self) -> Result<(), String> {
        let said = |what: &'static str| move |e: String| format!("cannot {what}: {e}");
        let kept = self.kept();
        limit(&kept).map_err(said("limit capabilities"))?;
        let groups: Vec<Gid> = self.user.groups.iter().copied().map(Gid::from_raw).collect();
        let (uid, gid) = (Uid::from_raw(self.user.uid), Gid::from_raw(self.user.gid));
        setgroups(&groups)
            .and_then(|()| setresgid(gid, gid, gid))
            .and_then(|()| setresuid(uid, uid, uid))
            .map_err(|e| said("become the session's user")(e.to_string()))?;
        // Asked again, for what an id that means something else would have left in place.
        let ids = getresuid().and_then(|u| getresgid().map(|g| (u, g)));
        match ids.map_err(|e| said("see who this is")(e.to_string()))? {
            (u, g)
                if [u.real, u.effective, u.saved] == [uid; 3]
                    && [g.real, g.effective, g.saved] == [gid; 3] => {}
            other => return Err(format!("cannot become uid {uid}, gid {gid}: still {other:?}")),
        }
        hold(&kept).map_err(said("drop capabilities"))?;
        nix::sys::prctl::set_no_new_privs()
            .map_err(|e| said("renounce new privileges")(e.to_string()))
    }

    fn execute(&self, filters: &[BpfProgram]) -> (u8, String) {
        let Some((program, arguments)) = self.command.argv.split_first() else {
            return (127, "nothing to run".to_owned());
        };
        let cwd = self.command.cwd.as_deref().unwrap_or(Path::new(walls::WORKSPACE));
        if let Err(e) = std::env::set_current_dir(cwd) {
            return (126, format!("cannot start in {}: {e}", cwd.display()));
        }
        // Last, so that the lines above need no exception.
        for filter in filters {
            if let Err(e) = seccompiler::apply_filter(filter) {
                return (125, format!("cannot load the system call filter: {e}"));
            }
        }
        // exec() gives SIGPIPE back as it was at birth, but hands our mask on.
        if let Err(e) = SigSet::empty().thread_set_mask() {
            return (125, format!("cannot unblock signals: {e}"));
        }
        let e = process::Command::new(program)
            .args(arguments)
            .env_clear()
            .envs(self.command.env.iter().map(|(k, v)| (k, v)))
            .exec();
        let code = if e.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
        (code, format!("cannot run {}: {e}", program.display()))
    }
}

/// Keeps CAP_KILL alone: what is left to the process that tends a command. Its bounding set goes
/// first.
pub(super) fn keep_kill() -> io::Result<()> {
    let kill = CapsHashSet::from([Capability::CAP_KILL]);
    limit(&kill).and_then(|()| hold(&kill)).map_err(io::Error::other)
}

/// Takes every capability that is not `kept` out of the bounding set: no exec brings it back.
fn limit(kept: &CapsHashSet) -> Result<(), String> {
    for cap in caps::all().difference(kept) {
        // Asking first: an older kernel does not know the newest ones.
        if caps::has_cap(None, CapSet::Bounding, *cap).unwrap_or(false) {
            caps::drop(None, CapSet::Bounding, *cap).map_err(|e| e.to_string())?;
        }
    }
    Ok(())
}

/// Holds `kept` and nothing else.
fn hold(kept: &CapsHashSet) -> Result<(), String> {
    let say = |e: caps::errors::CapsError| e.to_string();
    caps::clear(None, CapSet::Ambient).map_err(say)?;
    caps::clear(None, CapSet::Inheritable).map_err(say)?;
    caps::set(None, CapSet::Effective, kept).map_err(say)?;
    caps::set(None, CapSet::Permitted, kept).map_err(say)
}

/// The session's own few variables, then the given ones; a later one of the same name wins.
fn environment(place: &Place, given: Vec<(OsString, OsString)>) -> Vec<(OsString, OsString)> {
    let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let term = std::env::var_os("TERM").unwrap_or_else(|| "dumb".into());
    let own = [
        ("PATH", path.into()),
        ("HOME", walls::WORKSPACE.into()),
        ("LANG", "C.UTF-8".into()),
        ("TERM", term),
        ("OVERFENCE_SESSION", place.session.to_string().into()),
        ("OVERFENCE_WORKSPACE", place.workspace.to_string().into()),
        ("OVERFENCE_GENERATION", place.generation.to_string().into()),
    ];
    own.into_iter().map(|(name, value)| (OsString::from(name), value)).chain(given).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_of_the_mapped_capabilities_agree() {
        assert_eq!(MAPPED_ROOT.map(|c| c.to_string()), MAPPED_ROOT_NAMES);
    }

    #[test]
    fn only_a_mapped_uid_0_keeps_capabilities_and_none_over_the_host() {
        let command = Command { argv: vec!["x".into()], env: vec![], cwd: None };
        let errand = |uid, mapped| Errand {
            user: User { uid, ..User::default() },
            mapped,
            command: command.clone(),
        };
        assert!(errand(1000, false).kept().is_empty());
        assert!(errand(1000, true).kept().is_empty());
        let kept = errand(0, true).kept();
        for never in [
            Capability::CAP_SYS_ADMIN,
            Capability::CAP_MKNOD,
            Capability::CAP_DAC_READ_SEARCH,
            Capability::CAP_SYS_PTRACE,
            Capability::CAP_SYS_RAWIO,
            Capability::CAP_SYS_MODULE,
            Capability::CAP_LINUX_IMMUTABLE,
            Capability::CAP_BPF,
            Capability::CAP_PERFMON,
            Capability::CAP_CHECKPOINT_RESTORE,
            Capability::CAP_SETPCAP,
        ] {
            assert!(!kept.contains(&never), "{never}");
        }
    }
}
