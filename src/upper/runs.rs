//! Which parts of a file hold something: so that a hole of a terabyte is neither read nor written.
//!
//! Holes are where the content is zero, whether the file system stored that or not: the same content
//! gives the same runs everywhere, and so the same layer.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt as _;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::Stop;
use super::tarfmt::{MAX_RUNS, Run};

/// A hole is at least this long and begins at a multiple of it. Small enough that a file of scattered
/// pages is not blown up, large enough that the list of runs is short.
const GRAIN: u64 = 64 << 10;

/// The parts of a file of `size` bytes that are not zero. A file that is being cut gives runs
/// beyond its end.
pub(super) fn of(file: &File, size: u64, stop: Stop<'_>) -> io::Result<Vec<Run>> {
    // Too short for a hole.
    if size < GRAIN {
        return Ok((size > 0).then_some(Run { at: 0, len: size }).into_iter().collect());
    }
    let mut runs = Runs { all: Vec::new(), grain: GRAIN, size };
    let mut buffer = vec![0; GRAIN as usize];
    let mut at = 0;
    while at < size {
        super::go_on(stop).map_err(io::Error::other)?;
        let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) => data,
            // Nothing but a hole is left.
            Err(Errno::NXIO) => size,
            // A file system without holes: everything may be data.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => at,
            Err(e) => return Err(e.into()),
        };
        // The last block is data unless it is whole: a hole has a length worth it.
        at = data.min(size) / GRAIN * GRAIN;
        if at == size {
            break;
        }
        let len = GRAIN.min(size - at);
        let block = &mut buffer[..len as usize];
        if len < GRAIN || !is_zero(file, at, block)? {
            runs.push(Run { at, len });
        }
        at += len;
    }
    Ok(runs.all)
}

/// Whether the runs are the whole file.
pub(super) fn is_whole(runs: &[Run], size: u64) -> bool {
    size == 0 || matches!(runs, [one] if one.at == 0 && one.len == size)
}

fn is_zero(file: &File, at: u64, block: &mut [u8]) -> io::Result<bool> {
    let mut seen = 0;
    // Most blocks show within their first bytes that they are not.
    let mut want = block.len().min(4096);
    while seen < block.len() {
        match file.read_at(&mut block[seen..want], at + seen as u64) {
            // Cut off: whoever copies it notices.
            Ok(0) => return Ok(false),
            Ok(got) if block[seen..seen + got].iter().any(|b| *b != 0) => return Ok(false),
            Ok(got) => seen += got,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
        want = block.len();
    }
    Ok(true)
}

struct Runs {
    all: Vec<Run>,
    grain: u64,
    size: u64,
}

impl Runs {
    /// Adds a run behind all others. Too many become fewer and longer ones.
    fn push(&mut self, run: Run) {
        let at = run.at / self.grain * self.grain;
        let end = (run.at + run.len).next_multiple_of(self.grain).min(self.size);
        match self.all.last_mut() {
            Some(last) if at <= last.at + last.len => {
                last.len = end.max(last.at + last.len) - last.at
            }
            _ => self.all.push(Run { at, len: end - at }),
        }
        if self.all.len() > MAX_RUNS / 2 {
            self.grain *= 2;
            for run in std::mem::take(&mut self.all) {
                self.push(run);
            }
        }
    }
}

/// Copies the bytes of a run. False if the file has become shorter.
pub(super) fn copy_run(
    file: &File,
    run: Run,
    out: &mut impl Write,
    stop: Stop<'_>,
) -> io::Result<bool> {
    let mut buffer = vec![0; GRAIN.min(run.len) as usize];
    let mut done = 0;
    while done < run.len {
        super::go_on(stop).map_err(io::Error::other)?;
        let want = usize::try_from(run.len - done).unwrap_or(usize::MAX).min(buffer.len());
        match file.read_at(&mut buffer[..want], run.at + done) {
            Ok(0) => return Ok(false),
            Ok(got) => {
                out.write_all(&buffer[..got])?;
                done += got as u64;
                stop.did(got as u64, 0);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs_of(size: u64, writes: &[(u64, &[u8])]) -> Vec<(u64, u64)> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(size).unwrap();
        for (at, bytes) in writes {
            file.write_all_at(bytes, *at).unwrap();
        }
        of(&file, size, &|| false).unwrap().iter().map(|run| (run.at, run.len)).collect()
    }

    #[test]
    fn runs_follow_the_content_and_not_the_disk() {
        let zeros = vec![0; 4 << 20];
        const G: u64 = GRAIN;
        for (size, writes, want) in [
            (0, vec![], vec![]),
            (5, vec![], vec![(0, 5)]),
            (G, vec![], vec![]),
            (G + 1, vec![], vec![(G, 1)]),
            (3 * G, vec![(G + 7, &b"x"[..])], vec![(G, G)]),
            (3 * G, vec![(2 * G - 1, &b"xy"[..])], vec![(G, 2 * G)]),
            // Zeros that were written are a hole too.
            (4 << 20, vec![(0, &zeros[..])], vec![]),
            (4 << 20, vec![(0, &zeros[..]), (9, &b"x"[..])], vec![(0, G)]),
            (1 << 42, vec![((1 << 42) - 1, &b"x"[..])], vec![((1 << 42) - G, G)]),
        ] {
            assert_eq!(runs_of(size, &writes), want, "{size} {:?}", writes.len());
        }
    }

    #[test]
    fn too_many_runs_become_fewer_and_longer() {
        let size = GRAIN * 4 * MAX_RUNS as u64;
        let mut runs = Runs { all: Vec::new(), grain: GRAIN, size };
        for n in 0..2 * MAX_RUNS as u64 {
            runs.push(Run { at: n * 2 * GRAIN, len: GRAIN });
        }
        assert!(runs.all.len() <= MAX_RUNS / 2 && runs.grain > GRAIN, "{}", runs.all.len());
        assert!(runs.all.windows(2).all(|w| w[0].at + w[0].len < w[1].at));
        assert!(runs.all.first().unwrap().at == 0);
        let last = runs.all.last().unwrap();
        assert!(last.at + last.len > size - 2 * GRAIN && last.at + last.len <= size);
    }
}
