//! Calls that take their time.

use std::io::IoSlice;
use std::path::Path;

use super::*;

/// How many bytes one call is given: enough to be caught in it, and a quarter of a small guest's
/// memory at most.
pub fn size() -> u64 {
    let memory = rustix::system::sysinfo().totalram as u64;
    (memory / 4).min(1 << 30) & !((1 << 20) - 1)
}

/// All of it in one system call.
fn write_all_at_once(mut file: &File) {
    let part = vec![0xff; (size() / 1024).try_into().unwrap()];
    let parts = [IoSlice::new(&part); 1024];
    let written = file.write_vectored(&parts).unwrap();
    assert_eq!(written as u64, size(), "the call was cut");
}

pub fn write(path: &Path) -> ! {
    let file = open(path);
    ready();
    write_all_at_once(&file);
    sleep()
}

pub fn fsync(path: &Path) -> ! {
    let file = open(path);
    write_all_at_once(&file);
    ready();
    // Again and again, so that it is found in it.
    let part = vec![0xff; 1 << 20];
    loop {
        file.sync_all().unwrap();
        for n in 0..64 {
            file.write_all_at(&part, n << 20).unwrap();
        }
    }
}

/// The open copies a large lower file up.
pub fn copy_up(path: &Path) -> ! {
    ready();
    let file = OpenOptions::new().append(true).open(path).unwrap();
    write_on(&file)
}
