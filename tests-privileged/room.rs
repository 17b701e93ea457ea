//! A session to run commands in, without an agent: a real overlay, a run directory, a cgroup.

use std::path::PathBuf;
use std::time::Duration;

use overfence::model::ids::{Generation, SessionId};
use overfence::workload::{Command, Holder, Network, Place, User};

use crate::host;

/// A session of this test's own: a real overlay, a run directory, the test's cgroup.
pub struct Room {
    pub place: Place,
    pub dir: PathBuf,
}

impl Room {
    pub fn new(host: &host::Place) -> Self {
        Self::with(host, "a", User::default(), false)
    }

    pub fn with(host: &host::Place, name: &str, user: User, mapped: bool) -> Self {
        let dir = host.dir.join(name);
        let cgroup = host.cgroup.join(name);
        std::fs::create_dir(&dir).unwrap();
        std::fs::create_dir(&cgroup).unwrap();
        for part in ["upper", "work", "merged", "run", "state"] {
            std::fs::create_dir(dir.join(part)).unwrap();
        }
        // As on a real host: nobody but root gets here by path.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(&dir, mode).unwrap();
        let owner = if mapped { 100_000 + user.uid } else { user.uid };
        std::os::unix::fs::chown(dir.join("upper"), Some(owner), Some(owner)).unwrap();
        std::fs::create_dir(dir.join("lower")).unwrap();
        let merged = dir.join("merged");
        let options = format!(
            "lowerdir={0}/lower,upperdir={0}/upper,workdir={0}/work,redirect_dir=off,metacopy=off,index=off",
            dir.display()
        );
        nix::mount::mount(
            Some("overlay"),
            &merged,
            Some("overlay"),
            nix::mount::MsFlags::empty(),
            Some(options.as_str()),
        )
        .unwrap();
        let place = Place {
            session: SessionId::fresh(),
            workspace: "team/repo".parse().unwrap(),
            generation: Generation(7),
            cgroup,
            merged,
            run_dir: dir.join("run"),
            record: dir.join("init.json"),
            cell: None,
            state_dir: dir.join("state"),
            user,
            mapped,
            network: Network::Own,
            holder: Holder::Beat,
            ttl: Duration::from_secs(3),
            binary: host.binary.clone(),
        };
        Self { place, dir }
    }

    pub fn out(&self, name: &str) -> String {
        std::fs::read_to_string(self.place.merged.join(name)).unwrap()
    }
}

/// A shell that runs `script` in the session.
pub fn sh(script: &str) -> Command {
    Command {
        argv: ["/bin/sh", "-c", script].map(Into::into).into(),
        env: vec![("EXTRA".into(), "given".into())],
        cwd: None,
    }
}
