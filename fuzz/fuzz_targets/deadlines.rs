//! Reads the file of deadlines as the keeper does, with arbitrary bytes laid over what the agent wrote:
//! over its header if the first of them is odd, else over its first entries.
#![no_main]

use std::os::unix::fs::FileExt as _;

use overfence::kernel::deadlines::{Deadline, Snapshot, Table};
use overfence::model::ids::{Generation, SessionId};
use overfence::model::time::BootNs;

const ENTRIES: u64 = 4096;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let place = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = place.path().join("deadlines");
    let mut table = Table::create_or_open(&path).unwrap();
    for n in 1..=4 {
        let deadline = BootNs(n << 30);
        let (session, cgroup) = (SessionId::from_u128(n.into()), format!("/{n}").into());
        table.set(&Deadline { session, generation: Generation(n), deadline, cgroup }).unwrap();
    }
    drop(table);
    let Some((first, rest)) = bytes.split_first() else { return };
    let at = if first % 2 == 1 { 0 } else { ENTRIES };
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let mut there = vec![0; rest.len().min(4096)];
    file.read_exact_at(&mut there, at).unwrap();
    let laid: Vec<u8> = there.iter().zip(rest).map(|(old, new)| old ^ new).collect();
    file.write_all_at(&laid, at).unwrap();
    if let Ok(Some(snapshot)) = Snapshot::open(&path) {
        let entries = snapshot.iter().count();
        assert!(entries <= 4096, "{entries}");
    }
    // The next agent takes the file over, or makes another.
    Table::create_or_open(&path).unwrap();
});
