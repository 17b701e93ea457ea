//! The course of one test: the writer starts, is fenced, killed and removed through the agent, and
//! after each fact the reader looks whether anything lands that the fact excludes.

use std::process::Command;
use std::time::Duration;

use overfence::agent::Agent;
use overfence::kernel::clock;
use overfence::model::facts::Fact;
use overfence::model::view::{FenceSession, Opened, SessionView};

use super::acts::large;
use super::expected::{self, Lands, Row, When};
use super::reader::{Picture, Reader};
use super::scene::{Actor, Scene};
use crate::host::{Place, paced};
use crate::rig::{ROOT, has, until, wish, with_agent};

/// A shape of writer.
pub struct Shape {
    pub name: &'static str,
    /// Makes the writer's processes; they are ready to be fenced when it returns.
    pub start: fn(&mut Scene),
    pub bytes: Bytes,
    /// What is tried once the reader has seen the writer's file.
    pub when_seen: fn(&mut Scene),
    /// What is made sure of right before the fence is asked for.
    pub when_asked: fn(&mut Scene),
    /// What is tried once `frozen` is proved.
    pub when_frozen: fn(&mut Scene),
    /// What is tried once the overlay is read-only.
    pub when_read_only: fn(&mut Scene),
    /// Opens the session; with it comes who else is needed, and is not in it.
    pub open: fn(&Place, &Agent) -> (Opened, Vec<Actor>),
}

/// What is looked for in the files of the upper and of the work directory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Bytes {
    /// The writer goes on and on.
    Steady,
    /// It wrote, and then does something else.
    Before,
    /// One call that lands [`large::size`] bytes in one file.
    Call,
    /// The same, in a file that has no name before it is whole.
    Copy,
}

impl Shape {
    pub const fn new(name: &'static str, start: fn(&mut Scene)) -> Self {
        Self {
            name,
            start,
            bytes: Bytes::Steady,
            when_seen: |_| {},
            when_asked: |_| {},
            when_frozen: |_| {},
            when_read_only: |_| {},
            open: |_, agent| (open(agent, wish("w", "a", 60_000)), vec![]),
        }
    }

    pub const fn bytes(self, bytes: Bytes) -> Self {
        Self { bytes, ..self }
    }

    pub const fn when_seen(self, hook: fn(&mut Scene)) -> Self {
        Self { when_seen: hook, ..self }
    }

    pub const fn when_asked(self, hook: fn(&mut Scene)) -> Self {
        Self { when_asked: hook, ..self }
    }

    pub const fn when_frozen(self, hook: fn(&mut Scene)) -> Self {
        Self { when_frozen: hook, ..self }
    }

    pub const fn when_read_only(self, hook: fn(&mut Scene)) -> Self {
        Self { when_read_only: hook, ..self }
    }

    pub const fn open(self, open: fn(&Place, &Agent) -> (Opened, Vec<Actor>)) -> Self {
        Self { open, ..self }
    }
}

/// Opens a session from a place that waits.
pub fn open(agent: &Agent, wish: overfence::model::view::OpenSession) -> Opened {
    tokio::task::block_in_place(|| {
        tokio::runtime::Handle::current().block_on(agent.open(&ROOT, wish)).unwrap()
    })
}

/// How long the reader waits for bytes that must not come.
const STILL: Duration = Duration::from_millis(250);
/// How long a fact may take that has to come.
const SOON: Duration = Duration::from_secs(30);
/// How long the agent asks for read-only after a kill: io_uring and sockets lag behind.
const TEARDOWN: Duration = Duration::from_secs(7);

/// Plays a shape and compares what was seen with its row.
pub fn run(place: &Place, shape: &Shape) {
    let want = expected::row(shape.name);
    with_agent(place, |agent| async move {
        let (opened, outside) = (shape.open)(place, &agent);
        let mut scene = Scene::new(place, &opened, outside);
        let mut course = Course {
            agent: &agent,
            id: opened.session.id.clone(),
            reader: Reader::new(vec![scene.upper.clone(), scene.work.clone()]),
            shape,
        };
        let seen = course.play(&mut scene, &want).await;
        println!("{}: {seen:?}", shape.name);
        // Whether what was begun is over already is a matter of microseconds.
        let within = |want: Lands, seen: &mut Lands| {
            if want.covers(*seen) {
                *seen = want;
            }
        };
        let mut compared = seen.clone();
        // That is `run_sealed`'s.
        compared.sealed = want.sealed;
        within(want.after_frozen, &mut compared.after_frozen);
        within(want.after_killed, &mut compared.after_killed);
        // Somebody else on this host may have descriptors in flight, too.
        compared.busy.retain(|kind| kind != "in-flight outside" || want.busy.contains(kind));
        assert_eq!(compared, want, "{} is not as the table has it", shape.name);
    });
    for dir in ["state/sessions", "state/trash", "run/sessions"] {
        assert_eq!(std::fs::read_dir(place.dir.join(dir)).unwrap().count(), 0, "{dir}");
    }
    let cgroups = std::fs::read_dir(place.cgroup.join("sessions")).unwrap();
    assert_eq!(cgroups.flatten().filter(|e| e.path().is_dir()).count(), 0, "a cgroup is left");
}

/// Plays a shape up to `sealed`, on an ext4 of its own, and compares what landed after that with its row.
pub fn run_sealed(place: &Place, shape: &Shape) {
    let want = expected::row(shape.name).sealed.expect("only such shapes are asked");
    let image = place.dir.join("image");
    std::fs::File::create(&image).unwrap().set_len(1 << 30).unwrap();
    let must = |command: &mut Command| {
        let out = command.output().unwrap();
        assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
    };
    must(Command::new("mkfs.ext4").args(["-q", "-F", "-b", "4096"]).arg(&image));
    // The mount goes with the test's namespace, and its loop device with the mount.
    must(Command::new("mount").args(["-o", "loop"]).args([&image, &place.dir]));
    with_agent(place, |agent| async move {
        let (opened, outside) = (shape.open)(place, &agent);
        let mut scene = Scene::new(place, &opened, outside);
        let mut course = Course {
            agent: &agent,
            id: opened.session.id.clone(),
            reader: Reader::new(vec![scene.upper.clone(), scene.work.clone()]),
            shape,
        };
        let seen = course.seal(&mut scene).await;
        println!("{}: {seen:?} after sealed", shape.name);
        assert!(want.covers(seen), "{} is not as the table has it: {seen:?}", shape.name);
    });
}

struct Course<'a> {
    agent: &'a Agent,
    id: String,
    reader: Reader,
    shape: &'a Shape,
}

impl Course<'_> {
    /// The writer writes, and the fence is about to be asked for.
    fn begin(&mut self, scene: &mut Scene) -> Picture {
        (self.shape.start)(scene);
        self.reader.add(&scene.also);
        self.reader.look();
        (self.shape.when_seen)(scene);
        let before = self.see_it_write();
        (self.shape.when_asked)(scene);
        before
    }

    /// To `sealed`, past an EBUSY; then everything ends.
    async fn seal(&mut self, scene: &mut Scene) -> Lands {
        self.begin(scene);
        self.fence(Fact::ReadOnly, Duration::ZERO).await;
        let view = self.until(|v| has(v, "frozen") && !v.holders.is_empty()).await;
        assert!(!has(&view, "read-only"), "{view:#?}");
        (self.shape.when_frozen)(scene);
        self.fence(Fact::Sealed, Duration::ZERO).await;
        let view = self.until(|v| has(v, "sealed")).await;
        let shown = self.reader.look();
        let lands = self.lands(&shown, proved(&view, Fact::Sealed).0);
        if !scene.outside.is_empty() {
            scene.release();
        }
        self.fence(Fact::Killed, TEARDOWN).await;
        self.until(|v| has(v, "killed") && has(v, "read-only")).await;
        self.discard(scene).await;
        lands
    }

    async fn play(&mut self, scene: &mut Scene, want: &Row) -> Row {
        let before = self.begin(scene);
        let asked = clock::now();
        self.fence(Fact::ReadOnly, Duration::ZERO).await;
        let frozen = self.freeze(scene, want.frozen).await;
        let view = self.until(|v| has(v, "frozen")).await;
        let at = proved(&view, Fact::Frozen);
        let shown = self.reader.look();
        println!("frozen after {:?}", at.since(asked));
        let answered = |v: &SessionView| has(v, "read-only") || !v.holders.is_empty();
        let view = self.until(answered).await;
        let busy = holders(&view);
        (self.shape.when_frozen)(scene);
        if busy.is_empty() {
            self.read_only(scene, &view);
        }
        let after_frozen = self.lands(&shown, at.0);
        let frozen = match (self.shape.bytes, frozen) {
            (Bytes::Call | Bytes::Copy, When::Yes) if before.bytes() < large::size() => {
                if shown.bytes() < large::size() { When::Yes } else { When::CallEnds }
            }
            (Bytes::Call | Bytes::Copy, When::Yes) => {
                panic!("the call was over before the fence began")
            }
            (_, frozen) => frozen,
        };

        self.fence(Fact::Killed, TEARDOWN).await;
        let killed = self.kill(scene, want.killed).await;
        let view = self.until(|v| has(v, "killed")).await;
        let at = proved(&view, Fact::Killed);
        let shown = self.reader.look();
        let after_killed = self.lands(&shown, at.0);
        let view = self.view().await;
        let busy_after_kill = holders(&view);
        if !has(&view, "read-only") {
            scene.release();
            self.fence(Fact::Killed, TEARDOWN).await;
            let view = self.until(|v| has(v, "read-only")).await;
            self.read_only(scene, &view);
        } else if !busy.is_empty() {
            self.read_only(scene, &view);
        }
        let gone = self.discard(scene).await;
        let sealed = None;
        Row { frozen, busy, after_frozen, sealed, killed, busy_after_kill, after_killed, gone }
    }

    /// Bytes land before the fence begins, or the test shows nothing.
    fn see_it_write(&mut self) -> Picture {
        let limit = clock::now().plus(paced(SOON));
        let mut pictures: Vec<Picture> = vec![];
        loop {
            let picture = self.reader.look();
            if pictures.last() != Some(&picture) {
                pictures.push(picture);
            }
            let last = pictures.last().unwrap();
            match self.shape.bytes {
                Bytes::Steady if pictures.len() > 3 => return last.clone(),
                Bytes::Before if last.bytes() > 0 => return last.clone(),
                Bytes::Call if last.bytes() > 0 => return last.clone(),
                Bytes::Copy => return last.clone(),
                _ => assert!(clock::now() < limit, "it does not write"),
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits for the freeze; where it needs a holder to end, sees that it does not come before.
    async fn freeze(&mut self, scene: &mut Scene, want: When) -> When {
        if want != When::HolderEnds {
            self.until(|v| has(v, "frozen")).await;
            return When::Yes;
        }
        let view = self.until(|v| !v.blockers.is_empty()).await;
        println!("held up by {:?}", view.blockers);
        tokio::time::sleep(Duration::from_secs(1)).await;
        if has(&self.view().await, "frozen") {
            return When::Yes;
        }
        scene.release();
        When::HolderEnds
    }

    async fn kill(&mut self, scene: &mut Scene, want: When) -> When {
        if want != When::HolderEnds {
            self.until(|v| has(v, "killed")).await;
            return When::Yes;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        if has(&self.view().await, "killed") {
            return When::Yes;
        }
        scene.release();
        When::HolderEnds
    }

    /// Nothing lands after read-only was proved, whatever the shape.
    fn read_only(&mut self, scene: &mut Scene, view: &SessionView) {
        let at = proved(view, Fact::ReadOnly);
        let shown = self.reader.look();
        (self.shape.when_read_only)(scene);
        let lands = self.lands(&shown, at.0);
        assert_eq!(lands, Lands::Nothing, "bytes landed after read-only was proved");
    }

    /// What lands from `shown`, a look after the fact, on; a stamp tells when it was asked for.
    fn lands(&mut self, shown: &Picture, fact: u64) -> Lands {
        std::thread::sleep(STILL);
        let later = self.reader.look();
        if later.newest > fact {
            let late = later.newest - fact;
            println!("asked for {late} ns after the fact, and landed");
            Lands::GoesOn
        } else if later != *shown {
            // Without stamps nobody knows when it was asked for.
            if self.shape.bytes == Bytes::Steady { Lands::Begun } else { Lands::GoesOn }
        } else {
            Lands::Nothing
        }
    }

    /// Discards; where the superblock is held, sees that it is not called gone before.
    async fn discard(&mut self, scene: &mut Scene) -> When {
        let answer = self.agent.discard(&ROOT, self.id.parse().unwrap()).await;
        let when = match answer {
            Ok(_) => When::Yes,
            Err(failure) => {
                println!("not gone: {failure}");
                assert!(scene.upper.exists(), "removed before it was proved gone");
                scene.release();
                When::HolderEnds
            }
        };
        let limit = clock::now().plus(paced(SOON));
        while !self.agent.sessions().await.unwrap().is_empty() {
            assert!(clock::now() < limit, "{:#?}", self.view().await);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        when
    }

    async fn fence(&self, to: Fact, wait: Duration) {
        let wait_ms = u64::try_from(paced(wait).as_millis()).unwrap();
        let wish = FenceSession {
            to: Some(to),
            reason: self.shape.name.into(),
            wait_ms: Some(wait_ms),
            ..FenceSession::default()
        };
        self.agent.fence(&ROOT, self.id.parse().unwrap(), wish).await.unwrap();
    }

    async fn until(&self, fits: impl Fn(&SessionView) -> bool) -> SessionView {
        until(self.agent, &self.id, SOON, fits).await
    }

    async fn view(&self) -> SessionView {
        self.agent.session(self.id.parse().unwrap()).await.unwrap()
    }
}

fn proved(view: &SessionView, fact: Fact) -> overfence::model::time::BootNs {
    let shown = view.facts.iter().find(|f| f.fact == fact).expect("the fact is proved");
    overfence::model::time::BootNs(shown.boot_ns)
}

/// The kinds of holders that are named, each once; none once read-only is proved.
fn holders(view: &SessionView) -> Vec<String> {
    if has(view, "read-only") {
        return vec![];
    }
    let kind = |h: &overfence::model::facts::Holder| match h.pid {
        0 => h.how.clone(),
        _ if h.inside => format!("{} inside", h.how),
        _ => format!("{} outside", h.how),
    };
    let mut kinds: Vec<_> = view.holders.iter().filter(|h| h.how != "others").map(kind).collect();
    kinds.sort();
    kinds.dedup();
    kinds
}
