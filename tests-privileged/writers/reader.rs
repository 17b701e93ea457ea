//! The independent reader: what lies below the overlay, read without the agent and without merged.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// Up to this size a file is read whole; of a larger one its ends and a page of each MiB.
const WHOLE: u64 = 64 << 20;
const CHUNK: usize = 1 << 20;
/// No stamp is later than this; other bytes are not taken for one.
const LATEST: u64 = 1 << 60;

/// Reads the files of some directories, by name or, once it has seen them, by descriptor.
pub struct Reader {
    dirs: Vec<PathBuf>,
    seen: BTreeMap<PathBuf, File>,
}

/// What was there at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Picture {
    /// Length and digest of each file.
    files: BTreeMap<PathBuf, (u64, u64)>,
    /// The newest stamp in any of them: CLOCK_BOOTTIME, nanoseconds.
    pub newest: u64,
}

impl Picture {
    /// Bytes in all files.
    pub fn bytes(&self) -> u64 {
        self.files.values().map(|(len, _)| len).sum()
    }
}

impl Reader {
    pub fn new(dirs: Vec<PathBuf>) -> Self {
        Self { dirs, seen: BTreeMap::new() }
    }

    /// Looks there, too.
    pub fn add(&mut self, dirs: &[PathBuf]) {
        self.dirs.extend_from_slice(dirs);
    }

    /// Looks at everything.
    pub fn look(&mut self) -> Picture {
        for dir in self.dirs.clone() {
            self.find(&dir);
        }
        let mut picture = Picture::default();
        for (path, file) in &self.seen {
            let (len, digest, newest) = read(file);
            picture.files.insert(path.clone(), (len, digest));
            picture.newest = picture.newest.max(newest);
        }
        picture
    }

    fn find(&mut self, dir: &Path) {
        // What is made and removed meanwhile is looked at the next time.
        let Ok(entries) = std::fs::read_dir(dir) else { return };
        for entry in entries.flatten() {
            let path = entry.path();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => self.find(&path),
                Ok(kind) if kind.is_file() && !self.seen.contains_key(&path) => {
                    if let Ok(file) = File::open(&path) {
                        self.seen.insert(path, file);
                    }
                }
                Ok(_) | Err(_) => {}
            }
        }
    }
}

/// Length, digest and newest stamp.
fn read(file: &File) -> (u64, u64, u64) {
    let len = file.metadata().unwrap().len();
    let (mut digest, mut newest) = (0_u64, 0_u64);
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    while at < len {
        let sampled = len > WHOLE && at > 0 && at + (CHUNK as u64) < len;
        let part = if sampled { &mut buffer[..4096] } else { &mut buffer[..] };
        let n = file.read_at(part, at).unwrap();
        for word in part[..n].as_chunks::<8>().0 {
            let word = u64::from_le_bytes(*word);
            digest = (digest.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            if word < LATEST {
                newest = newest.max(word);
            }
        }
        at += CHUNK as u64;
    }
    (len, digest, newest)
}
