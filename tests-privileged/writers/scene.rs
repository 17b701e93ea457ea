//! Where one shape plays: a session, and processes inside and outside of it.

use std::any::Any;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use overfence::model::view::Opened;

use crate::host::{Place, paced};

/// Says to a copy of this program which writer it is to be.
pub const ACT: &str = "OVERFENCE_TEST_WRITER";

/// One session with its writers. What is dropped with it ends.
pub struct Scene {
    pub dir: PathBuf,
    pub merged: PathBuf,
    pub upper: PathBuf,
    pub work: PathBuf,
    pub cgroup: PathBuf,
    /// Where else bytes of the writer land.
    pub also: Vec<PathBuf>,
    /// What holds the overlay from outside of the session. It goes first: others may hang in it.
    pub outside: Vec<Actor>,
    pub inside: Vec<Actor>,
    holds: Vec<Box<dyn Any>>,
}

impl Scene {
    pub fn new(place: &Place, opened: &Opened, outside: Vec<Actor>) -> Self {
        let s = &opened.session;
        let upper = s.upper.path().unwrap();
        Self {
            dir: place.dir.clone(),
            merged: s.merged.path().unwrap(),
            work: upper.with_file_name("work"),
            upper,
            cgroup: s.cgroup.path().unwrap(),
            also: vec![],
            inside: vec![],
            outside,
            holds: vec![],
        }
    }

    /// Starts a writer in the session's cgroup, and waits until it says that it is ready.
    pub fn inside(&mut self, act: &str, args: &[&Path]) {
        let procs = self.cgroup.join("cgroup.procs");
        self.inside.push(Actor::start(act, Some(&procs), args));
    }

    /// Starts a process that is not in the session's cgroup, and waits until it is ready.
    pub fn outside(&mut self, act: &str, args: &[&Path]) {
        self.outside.push(Actor::start(act, None, args));
    }

    /// Keeps something that holds the overlay.
    pub fn hold(&mut self, what: impl Any) {
        self.holds.push(Box::new(what));
    }

    /// Lets go of all that holds the overlay from outside. A scene without such a thing is wrong.
    pub fn release(&mut self) {
        assert!(
            !self.outside.is_empty() || !self.holds.is_empty(),
            "nobody outside holds the overlay, and yet it is held"
        );
        self.outside.clear();
        self.holds.clear();
    }
}

/// A copy of this program as a writer; killed when it is dropped.
pub struct Actor(Child);

impl Actor {
    pub fn start(act: &str, procs: Option<&Path>, args: &[&Path]) -> Self {
        let script = match procs {
            Some(_) => "echo $$ > \"$1\" && shift && exec \"$@\"",
            None => "shift && exec \"$@\"",
        };
        let mut child = Command::new("/bin/sh")
            .args(["-c", script, "sh"])
            .arg(procs.unwrap_or(Path::new("")))
            .arg(std::env::current_exe().unwrap())
            .args(args)
            .env(ACT, act)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let word = hear(&mut child, act);
        assert_eq!(word, b'r', "{act} is not ready");
        Self(child)
    }

    pub fn pid(&self) -> nix::unistd::Pid {
        nix::unistd::Pid::from_raw(self.0.id().try_into().unwrap())
    }

    /// Waits until it stays in one open or read: a short sleep in one that is answered is none.
    pub fn until_it_hangs(&self) {
        let of = |name: &str| {
            std::fs::read_to_string(format!("/proc/{}/{name}", self.0.id())).unwrap_or_default()
        };
        let calls = [libc::SYS_openat, libc::SYS_read].map(|call| format!("{call} "));
        let sleeps_in = || {
            let (stat, call) = (of("stat"), of("syscall"));
            let asleep = stat.contains(") S ") || stat.contains(") D ");
            (asleep && calls.iter().any(|c| call.starts_with(c))).then_some(call)
        };
        let begun = Instant::now();
        let mut since = (None, begun);
        while since.0.is_none() || since.1.elapsed() < paced(Duration::from_millis(300)) {
            assert!(begun.elapsed() < paced(Duration::from_secs(10)), "it does not hang");
            let now = sleeps_in();
            if now != since.0 {
                since = (now, Instant::now());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until it is in a system call, of which it may come out at any time.
    pub fn until_it_calls(&self, call: libc::c_long) {
        let begun = Instant::now();
        let in_it = || {
            std::fs::read_to_string(format!("/proc/{}/syscall", self.0.id()))
                .is_ok_and(|text| text.starts_with(&format!("{call} ")))
        };
        while !in_it() {
            assert!(begun.elapsed() < paced(Duration::from_secs(20)), "it does not call {call}");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Says one byte to it, and hears its answer.
    pub fn ask(&mut self, word: u8) -> u8 {
        self.0.stdin.as_mut().unwrap().write_all(&[word]).unwrap();
        hear(&mut self.0, "an actor")
    }
}

/// One byte; a test that waits in vain for it is ended by the suite.
fn hear(child: &mut Child, act: &str) -> u8 {
    let mut word = [0];
    let heard = child.stdout.as_mut().unwrap().read(&mut word).unwrap();
    assert_eq!(heard, 1, "{act} ended before it spoke");
    word[0]
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A mount that goes when it is dropped.
pub struct Bound(PathBuf);

impl Bound {
    /// What a link leads to, at a file that is made for it.
    pub fn new(from: &Path, at: PathBuf) -> std::io::Result<Self> {
        std::fs::write(&at, "")?;
        rustix::mount::mount_bind(from, &at)?;
        Ok(Self(at))
    }

    pub fn tmpfs(at: PathBuf) -> Self {
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("writers", &at, "tmpfs", flags, None).unwrap();
        Self(at)
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}
