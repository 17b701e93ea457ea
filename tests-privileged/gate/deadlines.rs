//! A thousand deadlines, set one after the other without an agent, and writers at full speed around each.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use overfence::kernel::clock;

use super::{LEASE, Scene, stamps, ways};
use crate::host::{Place, paced};

/// Deadlines and writers of the run at full speed: one for each way to change a file, and more that
/// write.
const DEADLINES: u64 = 1_000;
const WRITERS: usize = 64;

pub fn deadlines(place: &Place) {
    let scene = Scene::new(place);
    let term = Arc::new(stamps::Term::default());
    let mut seen = stamps::Seen::new();
    std::thread::scope(|scope| {
        scene.open();
        let (begun, ways) = (Barrier::new(WRITERS + 1), ways::ways());
        assert!(ways.len() < WRITERS);
        let begun = Arc::new(begun);
        let writers: Vec<_> = (0..WRITERS)
            .map(|n| {
                let (way, dir) =
                    (*ways.get(n).unwrap_or(&ways[0]), scene.merged().join(n.to_string()));
                let (term, begun) = (Arc::clone(&term), Arc::clone(&begun));
                scope.spawn(move || {
                    let call = way.begin(&dir);
                    begun.wait();
                    stamps::call_on(&term, call)
                })
            })
            .collect();
        begun.wait();
        for _ in 0..DEADLINES {
            let deadline = clock::now().plus(paced(Duration::from_millis(5)));
            term.deadline.store(deadline.0, Ordering::SeqCst);
            scene.entry().open(LEASE, deadline);
            term.number.fetch_add(1, Ordering::SeqCst);
            clock::sleep_until(deadline.plus(paced(stamps::AFTER)));
            term.number.fetch_add(1, Ordering::SeqCst);
        }
        term.over.store(true, Ordering::SeqCst);
        scene.open();
        for writer in writers {
            seen.add(&writer.join().unwrap());
        }
    });
    seen.deadlines = DEADLINES;
    seen.judge();
}
