//! Reads arbitrary bytes as a mountinfo file.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &[u8]| {
    let _ = overfence::kernel::mountinfo::parse(text);
});
