//! Reads arbitrary bytes as the tar of a layer: PAX records, headers, whiteouts.
#![no_main]

libfuzzer_sys::fuzz_target!(|archive: &[u8]| {
    let _ = overfence::upper::fuzz_entries(archive);
});
