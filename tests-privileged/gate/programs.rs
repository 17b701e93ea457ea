//! The programs by themselves, without an agent: whom they mean, and how others take their place.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use overfence::kernel::gate::Gate;
use overfence::kernel::overlay;
use overfence::model::ids::Generation;
use overfence::model::time::BootNs;
use rustix::io::Errno;

use super::{LEASE, Scene, hammer, own_bpffs, spec, write};
use crate::host::Place;

pub fn generations(place: &Place) {
    let mut scene = Scene::new(place);
    let never = BootNs(u64::MAX);
    scene.open();
    let file = File::create(scene.merged().join("file")).unwrap();
    assert_eq!(write(&file), Ok(1));
    // Superseded: no deadline helps.
    scene.entry().supersede(Generation(7));
    assert_eq!(write(&file), Err(Errno::ROFS));
    scene.entry().open(LEASE, never);
    assert_eq!(write(&file), Err(Errno::ROFS));
    scene.entry().open(Generation(8), never);
    assert_eq!(write(&file), Ok(1));
    assert!(!scene.entry().shared());
    let (prot, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
    let mapped = File::options().read(true).write(true).open(scene.merged().join("file")).unwrap();
    // SAFETY: a fresh mapping at an address of the kernel's choice, which nobody touches.
    unsafe {
        let at = rustix::mm::mmap(std::ptr::null_mut(), 1, prot, flags, &mapped, 0).unwrap();
        rustix::mm::munmap(at, 1).unwrap();
    }
    drop(mapped);
    assert!(scene.entry().shared(), "a mapping was not noted");
    // Fifos and readers are nobody's business.
    scene.shut();
    rustix::fs::mkfifoat(rustix::fs::CWD, place.dir.join("fifo"), rustix::fs::Mode::RWXU).unwrap();
    assert!(File::open(scene.merged().join("file")).is_ok());
    assert!(std::fs::write(place.dir.join("elsewhere"), b"x").is_ok());
    assert!(std::fs::write(scene.spec.upper.join("below"), b"x").is_ok(), "the agent's own");
    // Another overlay that gets the number of a dead one, and has the same root, is not meant by its
    // entry.
    drop(file);
    let entry = scene.entry.take().unwrap();
    let (dev, root) = (scene.mounted.as_ref().unwrap().s_dev, scene.spec.clone());
    let mut others = vec![];
    drop(scene);
    let reused = (0..64).any(|n| {
        let mounted = overlay::mount(&root).unwrap();
        std::fs::write(root.target.join("file"), b"x").unwrap();
        let same = mounted.s_dev == dev;
        drop(mounted);
        overlay::unmount(&root.target).unwrap();
        // It takes the number that was given instead.
        let spec = spec(&place.dir.join(format!("other-{n}")));
        others.push((overlay::mount(&spec).unwrap(), spec));
        same
    });
    assert!(reused, "no other overlay got device {dev}");
    Gate::raise().unwrap().leave(&entry).unwrap();
    for (mounted, spec) in others {
        drop(mounted);
        overlay::unmount(&spec.target).unwrap();
    }
}

/// Programs of another version take the place of those that are attached, and programs of an unknown
/// layout stay: meanwhile no write is refused under a good lease, and none accepted after one.
pub fn upgraded(place: &Place) {
    let pins = own_bpffs();
    let (good, lost) =
        (Scene::below(&place.dir.join("good")), Scene::below(&place.dir.join("lost")));
    let [goes, stops] = [&good, &lost].map(|scene| {
        scene.open();
        File::create(scene.merged().join("file")).unwrap()
    });
    lost.shut();
    let over = Arc::new(AtomicBool::new(false));
    let [goes, stops] = [goes, stops].map(|file| hammer(file, Arc::clone(&over)));
    let sets = || {
        let all = std::fs::read_dir(pins.join("layout-2")).unwrap().map(|e| e.unwrap().path());
        all.filter(|path| path.is_dir()).collect::<Vec<_>>()
    };
    for round in 0..2 {
        let [own] = &sets()[..] else { panic!("{:?}", sets()) };
        // As if an agent of another version had attached it, and one had died while it attached.
        std::fs::rename(own, own.with_file_name(format!("{round:016x}"))).unwrap();
        std::fs::create_dir(own.with_file_name("unfinished")).unwrap();
        let gate = Gate::raise().unwrap();
        assert!(gate.stands() && gate.missing().is_empty());
        assert_eq!(sets().len(), 1, "the old ones are still attached: {:?}", sets());
        assert!(own.exists());
    }
    let own = sets().remove(0);
    std::fs::create_dir(pins.join("layout-99")).unwrap();
    let fault = Gate::raise().map(drop).unwrap_err();
    let why = overfence::kernel::gate::why(&fault);
    assert!(why.contains("layout-99") && why.contains("another version"), "{why}");
    assert!(own.exists());
    std::fs::remove_dir(pins.join("layout-99")).unwrap();
    // A part of it taken away is noticed, and attached again; who mapped what meanwhile nobody knows.
    assert!(!good.entry().shared());
    std::fs::remove_file(own.join("mmap_file")).unwrap();
    assert!(!good.gate.stands());
    assert!(Gate::raise().unwrap().stands());
    assert!(good.entry().shared());
    over.store(true, Ordering::SeqCst);
    let ((accepted, wrongly), (late, refused)) = (goes.join().unwrap(), stops.join().unwrap());
    println!("{accepted} accepted under the lease, {refused} refused after it");
    assert_eq!((wrongly, late), (0, 0), "wrongly refused, and accepted late");
    assert!(accepted > 0 && refused > 0);
}
