//! A gated overlay beside others: it behaves as one without the gate, and what becomes of its device
//! number is nobody's business.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use overfence::kernel::gate::Gate;
use overfence::kernel::overlay::{self, Spec};
use overfence::model::ids::SessionId;
use overfence::model::time::BootNs;

use super::{LEASE, Scene, spec, write};
use crate::host::{Place, rounds};
use crate::round_trip::{Act, Random, act, done, shows};

/// An overlay that the gate does not know, on the same file system.
pub struct Bare(pub Spec);

impl Bare {
    pub fn new(dir: &Path) -> Self {
        let spec = spec(dir);
        std::fs::write(spec.lowers[0].join("lower-file"), b"lower").unwrap();
        drop(overlay::mount(&spec).unwrap());
        Self(spec)
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        let _ = overlay::unmount(&self.0.target);
    }
}

/// The same operations, drawn by lot, through a gated overlay and one without a gate: the same answers to
/// the errno, the same tree.
pub fn same(place: &Place) {
    const SEED: u64 = 20_261_201;
    const STEPS: usize = 2_800;
    let gated = Scene::new(place);
    gated.open();
    let bare = Bare::new(&place.dir.join("bare"));
    let (mut did, mut refused) = (0, 0);
    for seed in SEED..SEED + rounds(4) {
        let mut random = Random(seed);
        for step in 0..STEPS {
            let act = act(&mut random);
            let (one, other) = (done(gated.merged(), &act), done(&bare.0.target, &act));
            assert_eq!(one, other, "seed {seed}, step {step}: {act:?}");
            did += u64::from(one.is_ok());
            refused += u64::from(matches!(one, Err(Some(_))));
        }
        assert_eq!(shows(gated.merged()), shows(&bare.0.target), "seed {seed}");
    }
    println!("{did} operations done, {refused} not possible, in both");
    assert!(did > 1_000 && refused > 100);
    // And it was the gate that was asked: shut, it does none of them.
    gated.shut();
    let before = shows(gated.merged());
    let (mut random, mut by_gate) = (Random(SEED), 0u64);
    for step in 0..STEPS {
        let act = act(&mut random);
        // From one name of a file to another of its own is nothing to do.
        let nothing = matches!(act, Act::Rename(..) | Act::Exchange(..));
        let done = done(gated.merged(), &act);
        assert!(nothing || done.is_err(), "step {step}: {act:?} was done after the deadline");
        by_gate += u64::from(done == Err(Some(libc::EROFS)));
    }
    println!("{by_gate} of {STEPS} refused by the gate, the others not possible in any case");
    assert!(by_gate > 100);
    assert_eq!(shows(gated.merged()), before);
}

/// Overlays come and go, and each takes the device number that another left: one under a good lease is
/// never refused, one without never accepted, one that the gate does not know never asked.
pub fn raced(place: &Place) {
    let gate = Gate::raise().unwrap();
    let over = AtomicBool::new(false);
    // In the order in which they come: open, shut, unknown to the gate.
    let life = |who: usize, n: u64| {
        let dir = place.dir.join(format!("{who}-{n}"));
        let spec = spec(&dir);
        let mut entry = None;
        let mounted = match who {
            2 => overlay::mount(&spec).unwrap(),
            _ => overlay::mount_with(&spec, |root| {
                let made = gate.enter(root, SessionId::fresh(), LEASE).unwrap();
                if who == 0 {
                    made.open(LEASE, BootNs(u64::MAX));
                }
                entry = Some(made);
            })
            .unwrap(),
        };
        let device = mounted.s_dev;
        for _ in 0..20 {
            let made = File::create(spec.target.join("file"));
            let wrote = made.as_ref().is_ok_and(|file| write(file) == Ok(1));
            assert_eq!(wrote, who != 1, "{who}, round {n}: {made:?}");
        }
        drop(mounted);
        overlay::unmount(&spec.target).unwrap();
        // Its entry is left for a moment: whoever gets the number meanwhile is not meant by it.
        std::thread::yield_now();
        if let Some(entry) = entry {
            gate.leave(&entry).unwrap();
        }
        std::fs::remove_dir_all(dir).unwrap();
        device
    };
    let lives = rounds(150);
    let seen: Vec<Vec<u64>> = std::thread::scope(|scope| {
        let (life, over) = (&life, &over);
        let all: Vec<_> = (0..3)
            .map(|who| {
                scope.spawn(move || {
                    let mut devices = Vec::new();
                    let mut n = 0;
                    // All go on until the last is through, so that none races alone.
                    while n < lives || !over.load(Ordering::SeqCst) {
                        devices.push(life(who, n));
                        n += 1;
                        if n == lives && who == 1 {
                            over.store(true, Ordering::SeqCst);
                        }
                    }
                    devices
                })
            })
            .collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let shared = |a: usize, b: usize| seen[a].iter().filter(|d| seen[b].contains(d)).count();
    let (to_open, to_unknown) = (shared(0, 1), shared(2, 1));
    println!(
        "{lives} lives each; numbers of shut ones used by open ones {to_open} times, by \
              unknown ones {to_unknown} times"
    );
    assert!(to_open > 0 && to_unknown > 0, "no number was used again");
}
