//! I10, the workload is confined: the known ways out, tried from inside; and what a command may
//! expect of the place it runs in.

use std::path::{Path, PathBuf};
use std::time::Duration;

use overfence::model::ids::{Generation, SessionId};
use overfence::workload::{Command, Exit, Holder, Network, Place, User, exec, run};

use crate::host;

pub fn tests() -> Vec<host::Test> {
    macro_rules! tests {
        ($($name:ident),* $(,)?) => { vec![$(host::Test { name: stringify!($name), run: $name }),*] };
    }
    tests![codes_are_passed_on, exec_joins_one_init]
}

/// A session of this test's own: a real overlay, a run directory, the test's cgroup.
struct Room {
    place: Place,
    dir: PathBuf,
}

impl Room {
    fn new(host: &host::Place) -> Self {
        Self::with(host, "a", User::default(), false)
    }

    fn with(host: &host::Place, name: &str, user: User, mapped: bool) -> Self {
        let dir = host.dir.join(name);
        let cgroup = host.cgroup.join(name);
        std::fs::create_dir(&dir).unwrap();
        std::fs::create_dir(&cgroup).unwrap();
        for part in ["upper", "work", "merged", "run", "state"] {
            std::fs::create_dir(dir.join(part)).unwrap();
        }
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

    fn sh(&self, script: &str) -> Exit {
        run(&self.place, &sh(script)).unwrap()
    }

    fn sh_again(&self, script: &str) -> Exit {
        exec(&self.place, &sh(script)).unwrap()
    }

    fn out(&self, name: &str) -> String {
        std::fs::read_to_string(self.place.merged.join(name)).unwrap()
    }
}

fn sh(script: &str) -> Command {
    Command {
        argv: ["/bin/sh", "-c", script].map(Into::into).into(),
        env: vec![("EXTRA".into(), "given".into())],
        cwd: None,
    }
}

fn codes_are_passed_on(host: &host::Place) {
    let room = Room::new(host);
    assert_eq!(room.sh("id > out; env >> out; pwd >> out; cat /proc/self/status >> out; ls -la / /dev /etc /run/overfence >> out; cat /proc/mounts >> out; exit 37"), Exit::Code(37));
    println!("{}", room.out("out"));
}

fn exec_joins_one_init(host: &host::Place) {
    let room = Room::new(host);
    assert_eq!(room.sh_again("ps -ef > out; cat /proc/self/status >> out; exit 5"), Exit::Code(5));
    println!("{}", room.out("out"));
    assert_eq!(room.sh_again("kill -9 $$"), Exit::Signal(9));
}
