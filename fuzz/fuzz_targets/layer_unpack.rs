//! Unpacks arbitrary bytes as the tar of a layer. Whatever they say, nothing is made outside the
//! directory that they are unpacked into. As root it makes devices and owners, too.
#![no_main]

mod sums;

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::AsFd as _;
use std::path::Path;

libfuzzer_sys::fuzz_target!(|archive: &[u8]| {
    let archive = sums::fitted(archive);
    let place = tempfile::tempdir_in("/dev/shm").unwrap();
    let (tree, outside) = (place.path().join("tree"), place.path().join("outside"));
    fs::create_dir(&tree).unwrap();
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("precious"), "kept").unwrap();
    let _ = overfence::upper::fuzz_unpack(&archive, fs::File::open(&tree).unwrap().as_fd());
    assert_eq!(names(place.path()), ["outside", "tree"].map(str::to_owned).into());
    assert_eq!(names(&outside), ["precious".to_owned()].into());
    assert_eq!(fs::read(outside.join("precious")).unwrap(), b"kept");
    // Its modes may forbid the usual removal to look into it.
    overfence::upper::remove::remove_scratch(&tree).unwrap();
});

fn names(dir: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}
