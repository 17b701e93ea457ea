//! Reads arbitrary bytes as the file of deadlines that the agent writes for the keeper.
#![no_main]

use overfence::kernel::deadlines::Reader;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let place = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = place.path().join("deadlines");
    std::fs::write(&path, bytes).unwrap();
    if let Ok(Some(reader)) = Reader::open(&path) {
        let _ = (reader.is_current(), reader.iter().count());
    }
});
