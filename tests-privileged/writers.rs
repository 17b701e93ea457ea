//! Shapes of writers, one test each: what a fence reaches, when, and what still lands.
//!
//! Each shape has a row in `writers/expected.toml`, which docs/WRITERS.md shows. Its writer runs as
//! root, without walls, in the session's cgroup: what is asked about is the kernel, not the walls.
//! A reader of its own looks at the upper after each fact; any byte that lands after a fact that
//! excludes it fails the test, whatever the agent says.
#![allow(unsafe_code)]

mod acts;
mod course;
mod expected;
mod lower;
mod neighbour;
mod reader;
mod scene;

use std::time::Duration;

use course::{Bytes, Shape};
use scene::{Bound, Scene};

use crate::host::Test;

/// If this process was started as a writer, it becomes one.
pub fn act_if_asked() {
    if let Ok(name) = std::env::var(scene::ACT) {
        acts::act(&name);
    }
}

/// How many bytes the one large write lands.
pub fn large_write() -> u64 {
    acts::large::size()
}

/// The table, the page that shows it, and the shapes here agree.
pub fn the_table_is_in_the_docs() -> Result<(), String> {
    expected::holds(&SHAPES.map(|shape| shape.name))
}

/// One test a shape, and what only two sessions show.
pub fn tests() -> Vec<Test> {
    [shapes(), neighbour::tests()].into_iter().flatten().collect()
}

/// One test a shape of whose row says what lands after `sealed`; in a room of its own, since each has an
/// ext4 of its own.
pub fn sealed() -> Vec<Test> {
    sealed_shapes().into_iter().filter(|test| expected::is_sealed(test.name)).collect()
}

macro_rules! shapes {
    ($($shape:expr),* $(,)?) => {
        const SHAPES: [Shape; [$(stringify!($shape)),*].len()] = [$($shape),*];
        fn shapes() -> Vec<Test> {
            vec![$({
                const SHAPE: Shape = $shape;
                Test { name: SHAPE.name, run: |place| course::run(place, &SHAPE) }
            }),*]
        }
        fn sealed_shapes() -> Vec<Test> {
            vec![$({
                const SHAPE: Shape = $shape;
                Test { name: SHAPE.name, run: |place| course::run_sealed(place, &SHAPE) }
            }),*]
        }
    };
}

/// Whether the upper lies in memory.
fn in_memory(scene: &Scene) -> bool {
    rustix::fs::statfs(&scene.upper).unwrap().f_type == 0x0102_1994
}

/// The one file that a writer writes.
fn bytes(scene: &Scene) -> std::path::PathBuf {
    scene.merged.join("bytes")
}

/// A writer that hangs in a lower layer whose server does not answer.
fn caught(s: &mut Scene) {
    s.inside("caught", &[&s.merged.join("own"), &bytes(s)]);
    s.inside[0].until_it_hangs();
}

/// Keeps a mount namespace by a file. The kernel pins only one that is newer than the one where the
/// file is, and newer kernels count by CPU, in batches: on the CPU that made this one it is.
fn pin_a_namespace(s: &mut Scene) {
    let all = rustix::thread::sched_getaffinity(None).unwrap();
    for cpu in (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)) {
        let mut only = rustix::thread::CpuSet::new();
        only.set(cpu);
        rustix::thread::sched_setaffinity(None, &only).unwrap();
        s.outside("elsewhere-hold", &[&bytes(s)]);
        let namespace = format!("/proc/{}/ns/mnt", s.outside[0].pid());
        let pinned = Bound::new(namespace.as_ref(), s.dir.join("pin"));
        s.outside.clear();
        rustix::thread::sched_setaffinity(None, &all).unwrap();
        match pinned {
            Ok(pinned) => return s.hold(pinned),
            Err(e) => assert_eq!(e.raw_os_error(), Some(libc::EINVAL), "{e}"),
        }
    }
    panic!("no CPU makes a mount namespace that can be pinned here");
}

shapes![
    Shape::new("write", |s| s.inside("write", &[&bytes(s)])),
    Shape::new("append", |s| s.inside("append", &[&bytes(s)])),
    Shape::new("direct", |s| s.inside("direct", &[&bytes(s)])),
    Shape::new("aio", |s| s.inside("aio", &[&bytes(s)])),
    Shape::new("map", |s| s.inside("map", &[&bytes(s)])),
    Shape::new("map-closed", |s| s.inside("map-closed", &[&bytes(s)])),
    Shape::new("io-uring-sqpoll", |s| s.inside("ring-sqpoll", &[&bytes(s)])),
    Shape::new("io-uring-workers", |s| s.inside("ring-workers", &[&bytes(s)])),
    Shape::new("io-uring-registered", |s| s.inside("ring-registered", &[&bytes(s)])),
    Shape::new("splice", |s| s.inside("splice", &[&bytes(s)])),
    Shape::new("sendfile", |s| s.inside("sendfile", &[&bytes(s)])),
    Shape::new("fallocate", |s| s.inside("fallocate", &[&bytes(s)])),
    Shape::new("closed", |s| s.inside("wrote", &[&bytes(s)])).bytes(Bytes::Before),
    Shape::new("unlinked", |s| s.inside("unlinked", &[&bytes(s)]))
        .when_seen(|s| assert_eq!(s.inside[0].ask(b'u'), b'u')),
    Shape::new("large-write", |s| s.inside("large-write", &[&bytes(s)])).bytes(Bytes::Call),
    Shape::new("large-fsync", |s| s.inside("large-fsync", &[&bytes(s)]))
        .bytes(Bytes::Before)
        // In memory there is nothing to wait for.
        .when_asked(|s| if !in_memory(s) {
            s.inside[0].until_it_calls(libc::SYS_fsync);
        }),
    Shape::new("large-copy-up", |s| {
        s.inside("large-copy-up", &[&bytes(s)]);
        // A tenth of the time it takes.
        std::thread::sleep(Duration::from_millis(50));
    })
    .bytes(Bytes::Copy)
    .open(|place, agent| lower::open_covered(place, agent, lower::cover_large)),
    Shape::new("fork-bomb", |s| s.inside("bomb", &[&bytes(s)])),
    Shape::new("vfork-parent", |s| s.inside("vfork", &[&bytes(s)])),
    Shape::new("daemon", |s| s.inside("daemon", &[&bytes(s)])),
    Shape::new("threads-in-exec", |s| s.inside("exec", &[&bytes(s)])),
    Shape::new("sigstopped", |s| s.inside("stopped", &[&bytes(s)]))
        .bytes(Bytes::Before)
        .when_frozen(|s| nix::sys::signal::kill(
            s.inside[0].pid(),
            nix::sys::signal::Signal::SIGCONT
        )
        .unwrap(),),
    Shape::new("ptraced", |s| {
        s.inside("append", &[&bytes(s)]);
        let pid = s.inside[0].pid().to_string();
        s.outside("tracer", &[pid.as_ref()]);
    }),
    Shape::new("ptrace-stopped", |s| {
        s.inside("append", &[&bytes(s)]);
        let pid = s.inside[0].pid().to_string();
        s.outside("stopper", &[pid.as_ref()]);
    })
    .bytes(Bytes::Before)
    // Its tracer goes, and with it what held it: the freeze has to.
    .when_frozen(|s| s.outside.clear()),
    Shape::new("nested-cgroups", |s| s.inside("nested", &[&bytes(s), &s.cgroup.clone()]))
        // The user's own freeze and thaw below ours.
        .when_frozen(|s| {
            let freeze = s.cgroup.join("a/cgroup.freeze");
            std::fs::write(&freeze, "1").unwrap();
            std::fs::write(&freeze, "0").unwrap();
        }),
    Shape::new("passed-outside", |s| {
        let socket = s.dir.join("socket");
        s.outside("receiver", &[&socket]);
        s.inside("sender", &[&bytes(s), &socket]);
    }),
    Shape::new("in-flight", |s| s.inside("in-flight", &[&bytes(s)])).bytes(Bytes::Before),
    Shape::new("in-flight-to-outside", |s| {
        let socket = s.dir.join("socket");
        s.outside("mailbox", &[&socket]);
        s.inside("sender", &[&bytes(s), &socket]);
    })
    .bytes(Bytes::Before)
    .when_frozen(|s| assert_eq!(s.outside[0].ask(b'w'), b'w')),
    Shape::new("clone-written", |s| s.outside("clone-write", &[&s.merged.clone()])),
    Shape::new("clone-held", |s| {
        s.inside("wrote", &[&bytes(s)]);
        s.outside("clone-hold", &[&s.merged.clone()]);
    })
    .bytes(Bytes::Before)
    .when_read_only(|s| assert_eq!(i32::from(s.outside[0].ask(b'w')), libc::EROFS)),
    Shape::new("namespace-written", |s| s.outside("elsewhere-write", &[&bytes(s)])),
    Shape::new("namespace-held", |s| {
        s.inside("wrote", &[&bytes(s)]);
        s.outside("elsewhere-hold", &[&bytes(s)]);
    })
    .bytes(Bytes::Before)
    .when_read_only(|s| assert_eq!(i32::from(s.outside[0].ask(b'w')), libc::EROFS)),
    Shape::new("namespace-pinned", |s| {
        s.inside("wrote", &[&bytes(s)]);
        pin_a_namespace(s);
    })
    .bytes(Bytes::Before),
    Shape::new("loop-device", |s| s.outside("loop-write", &[&bytes(s)])),
    Shape::new("nested-mount", |s| {
        let nested = s.merged.join("nested");
        std::fs::create_dir(&nested).unwrap();
        s.hold(Bound::tmpfs(nested.clone()));
        s.inside("append", &[&nested.join("bytes")]);
        s.also.push(nested);
    }),
    Shape::new("hung-open", caught).bytes(Bytes::Before).open(|place, agent| lower::open_covered(
        place,
        agent,
        lower::cover_hung_open
    )),
    Shape::new("hung-read", caught).bytes(Bytes::Before).open(|place, agent| lower::open_covered(
        place,
        agent,
        lower::cover_hung_read
    )),
];
