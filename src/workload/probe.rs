//! Tries the walls by building them: around `true`, in a cgroup and directories of the probe's own.
//! That a host has all the pieces does not say that it lets them be put together: a container's
//! seccomp profile, AppArmor or masked `/proc` refuse single steps.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::{Command, Exit, Holder, Network, Place, User};
use crate::kernel::cgroup::Cgroup;
use crate::kernel::{gone, walk::Dir};
use crate::model::ids::{Generation, SessionId};

/// What the removal of the probe's cgroup may take.
const PATIENCE: Duration = Duration::from_secs(1);

/// Runs `true` behind walls, as uid 1000 or as a mapped root. Directories are made in `state` and a
/// cgroup in `cgroups`; both are removed again.
///
/// # Errors
/// What refused, in words.
pub fn walls(state: &Path, cgroups: &Path, mapped: bool) -> Result<(), String> {
    let session = SessionId::fresh();
    let name = format!(".overfence-probe-{session}");
    let dir = state.join(&name);
    let made = ["merged", "inside", "state"]
        .iter()
        .try_for_each(|part| fs::create_dir_all(dir.join(part)))
        .map_err(|e| format!("{}: {e}", dir.display()));
    let tried = made.and_then(|()| {
        let cgroup = Cgroup::create(&cgroups.join(&name)).map_err(text)?;
        let place = Place {
            session,
            workspace: "probe".parse().map_err(text)?,
            generation: Generation(1),
            cgroup: cgroup.path().to_owned(),
            merged: dir.join("merged"),
            run_dir: dir.join("inside"),
            record: dir.join("init.json"),
            cell: None,
            state_dir: dir.join("state"),
            user: if mapped { User { uid: 0, gid: 0, groups: vec![] } } else { User::default() },
            mapped,
            network: Network::Own,
            holder: Holder::Beat,
            ttl: PATIENCE,
            binary: super::own_binary(),
        };
        let command = Command { argv: vec!["true".into()], env: vec![], cwd: None };
        let ran = super::run(&place, &command);
        let cleared = cgroup.kill(PATIENCE).and_then(|_| cgroup.remove(PATIENCE)).map_err(text);
        match ran {
            Ok(Exit::Code(0)) => cleared,
            Ok(exit) => Err(format!("`true` ended with {} in it", exit.code())),
            Err(super::Error::Walls { said, .. }) => Err(said),
            Err(e) => Err(text(e)),
        }
    });
    let removed = Dir::open(state).and_then(|parent| gone::remove_tree(&parent, name.as_ref()));
    tried.and(removed.map_err(text))
}

/// An error with its causes, on one line.
fn text(e: impl std::error::Error) -> String {
    let mut said = e.to_string();
    let mut cause = e.source();
    while let Some(e) = cause {
        said.push_str(&format!(": {e}"));
        cause = e.source();
    }
    said
}
