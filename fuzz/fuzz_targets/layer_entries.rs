//! Reads arbitrary bytes as the tar of a layer: PAX records, headers, whiteouts.
#![no_main]

mod sums;

libfuzzer_sys::fuzz_target!(|archive: &[u8]| {
    let _ = overfence::upper::fuzz_entries(&sums::fitted(archive));
});
