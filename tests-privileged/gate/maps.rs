//! mprotect: no hook sees whose mapping it is. What it can make writable was noted when it was mapped.

use std::fs::File;

use overfence::model::time::BootNs;
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

use super::{LEASE, Scene, spec};
use crate::host::Place;

/// One page of a file, mapped shared to be read.
struct Mapping(*mut std::ffi::c_void);

impl Mapping {
    fn new(file: &File) -> Result<Self, Errno> {
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), 4096, ProtFlags::READ, MapFlags::SHARED, file, 0)
        }
        .map(Self)
    }

    fn make_writable(&self) -> Result<(), Errno> {
        // SAFETY: the mapping is ours, and no reference to it is held.
        unsafe { rustix::mm::mprotect(self.0, 4096, MprotectFlags::READ | MprotectFlags::WRITE) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly what mmap gave.
        let _ = unsafe { rustix::mm::munmap(self.0, 4096) };
    }
}

pub fn protected(place: &Place) {
    let scene = Scene::new(place);
    scene.open();
    let path = scene.merged().join("file");
    std::fs::write(&path, [b'o'; 4096]).unwrap();
    let [reads, writes] =
        [false, true].map(|write| File::options().read(true).write(write).open(&path).unwrap());

    // Of a file that is open to be read alone nothing can be made writable, lease or not.
    let read = Mapping::new(&reads).unwrap();
    assert_eq!(read.make_writable(), Err(Errno::ACCESS), "before the deadline");
    assert!(!scene.entry().shared(), "a mapping that is never writable was noted");
    // Of one that is open for writing it can, and the gate does not see it: noted as it was mapped.
    let written = Mapping::new(&writes).unwrap();
    assert!(scene.entry().shared(), "a mapping that can be made writable was not noted");
    scene.shut();
    assert_eq!(read.make_writable(), Err(Errno::ACCESS), "after the deadline");
    assert_eq!(written.make_writable(), Ok(()), "it is what the note is for");
    assert!(scene.entry().shared(), "the note stays");
    assert_eq!(Mapping::new(&writes).map(drop), Err(Errno::ROFS), "after the deadline");
    drop((read, written, reads, writes));
    drop(scene);

    // With `deny` there is nothing that could be made writable, before the deadline either.
    let scene = Scene::of(spec(&place.dir.join("denied")));
    scene.entry().deny_shared(true);
    scene.entry().open(LEASE, BootNs(u64::MAX));
    let path = scene.merged().join("file");
    std::fs::write(&path, [b'o'; 4096]).unwrap();
    let [reads, writes] =
        [false, true].map(|write| File::options().read(true).write(write).open(&path).unwrap());
    assert_eq!(Mapping::new(&writes).map(drop), Err(Errno::ACCESS));
    assert_eq!(Mapping::new(&reads).unwrap().make_writable(), Err(Errno::ACCESS));
    assert!(!scene.entry().shared());
}
