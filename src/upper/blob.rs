//! The compressed file of a layer: how it is written, and how it is read.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::FileExt as _;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::fs::OFlags;
use sha2::{Digest as _, Sha256};
use zstd::zstd_safe::CParameter;

use super::store::LayerInfo;
use super::tarfmt::Entries;
use super::{At as _, Error, Result, Stop, go_on, path_of};
use crate::kernel;
use crate::model::head::Digest;

/// zstd's own default: about 400 MB/s, and a third of the size for source trees.
const LEVEL: i32 = 3;
/// Threads that compress one layer, at most: reading and hashing leave no work for more.
const WORKERS: usize = 4;
/// Bytes that such a thread takes at a time: with zstd's own 8 MiB each has some 20 MiB of memory.
const JOB: u32 = 1 << 20;
/// How much of the job before each one looks back at: a 16th of the window, 128 KiB. It is read in anew for
/// each, and zstd's own 8th is a quarter of a job of ours.
const OVERLAP: u32 = 5;
const BUFFER: usize = 64 << 10;

/// Hashes and counts what passes through.
pub(super) struct Hashed<T> {
    inner: T,
    hash: Sha256,
    count: u64,
}

impl<T> Hashed<T> {
    pub(super) fn new(inner: T) -> Self {
        Self { inner, hash: Sha256::new(), count: 0 }
    }

    fn note(&mut self, bytes: &[u8]) {
        self.hash.update(bytes);
        self.count += bytes.len() as u64;
    }

    /// What was inside, the digest of what passed, and how many bytes that was.
    pub(super) fn finish(self) -> (T, Digest, u64) {
        (self.inner, Digest(self.hash.finalize().into()), self.count)
    }
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.note(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.note(&buffer[..n]);
        Ok(n)
    }
}

/// Takes tar bytes in, puts a compressed file out, digests both.
pub(super) struct Sink<F: Write> {
    inner: BufWriter<Hashed<zstd::Encoder<'static, Hashed<BufWriter<F>>>>>,
}

impl<F: Write> Sink<F> {
    pub(super) fn new(file: F) -> io::Result<Self> {
        let blob = Hashed::new(BufWriter::with_capacity(BUFFER, file));
        let mut encoder = zstd::Encoder::new(blob, LEVEL)?;
        // What comes out is the same with any number of them.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        encoder.multithread(u32::try_from(cores.min(WORKERS)).unwrap_or(1))?;
        encoder.set_parameter(CParameter::JobSize(JOB))?;
        encoder.set_parameter(CParameter::OverlapSizeLog(OVERLAP))?;
        Ok(Self { inner: BufWriter::with_capacity(BUFFER, Hashed::new(encoder)) })
    }

    /// Ends the file (not fsynced) and says what it is.
    pub(super) fn finish(self, entries: u64) -> io::Result<LayerInfo> {
        let tar = self.inner.into_inner().map_err(|e| e.into_error())?;
        let (encoder, diff_id, size_uncompressed) = tar.finish();
        let (mut file, blob_digest, size_compressed) = encoder.finish()?.finish();
        file.flush()?;
        Ok(LayerInfo { diff_id, blob_digest, size_uncompressed, size_compressed, entries })
    }
}

impl<F: Write> Write for Sink<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.inner.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Reads a compressed layer through `consume`, which sees the tar, and compares everything with
/// what `info` says.
pub(super) fn read_blob(
    blob: impl Read,
    info: &LayerInfo,
    consume: impl FnOnce(&mut dyn Read) -> Result<u64>,
) -> Result<()> {
    let found = read_any(blob, info.size_compressed, info.size_uncompressed, consume)?;
    compare(&found, info)
}

/// What a compressed layer is, of which no more than so many bytes are read.
fn read_any(
    blob: impl Read,
    compressed: u64,
    uncompressed: u64,
    consume: impl FnOnce(&mut dyn Read) -> Result<u64>,
) -> Result<LayerInfo> {
    let at = path_of(b"the layer");
    // One byte more than allowed tells a longer one.
    let blob = Hashed::new(blob.take(compressed.saturating_add(1)));
    let mut decoder = zstd::Decoder::with_buffer(BufReader::new(blob)).at("decompress", at)?;
    let tar = Hashed::new(decoder.by_ref().take(uncompressed.saturating_add(1)));
    // Headers are read one at a time.
    let mut tar = BufReader::with_capacity(BUFFER, tar);
    let entries = consume(&mut tar)?;
    io::copy(&mut tar, &mut io::sink()).at("read", at)?;
    let (_, diff_id, size_uncompressed) = tar.into_inner().finish();
    let mut blob = decoder.finish();
    io::copy(&mut blob, &mut io::sink()).at("read", at)?;
    let (_, blob_digest, size_compressed) = blob.into_inner().finish();
    Ok(LayerInfo { diff_id, blob_digest, size_uncompressed, size_compressed, entries })
}

fn compare(found: &LayerInfo, want: &LayerInfo) -> Result<()> {
    let compare = |name: &str, got: String, want_it: String| match got == want_it {
        true => Ok(()),
        false => Err(Error::Corrupt {
            what: format!("layer {}", want.diff_id),
            why: format!("its {name} is {got}, not {want_it}"),
        }),
    };
    let number = |name, got: u64, want: u64| compare(name, got.to_string(), want.to_string());
    number("length", found.size_uncompressed, want.size_uncompressed)?;
    compare("digest", found.diff_id.to_string(), want.diff_id.to_string())?;
    number("number of entries", found.entries, want.entries)?;
    number("compressed length", found.size_compressed, want.size_compressed)?;
    compare("compressed digest", found.blob_digest.to_string(), want.blob_digest.to_string())
}

/// Checks each entry of a tar, to its end.
pub(super) fn check_entries(tar: &mut dyn Read) -> Result<u64> {
    let mut entries = Entries::new(tar);
    let count = entries.check_all()?;
    entries.drain()?;
    Ok(count)
}

/// Writes a compressed layer by `write`, and reads it back from the file meanwhile, whole: it is what was
/// written, or this is an error.
pub(super) fn read_back<'f>(
    file: &'f File,
    stop: Stop<'_>,
    write: impl FnOnce(Growing<'f, '_>) -> Result<LayerInfo>,
) -> Result<LayerInfo> {
    let at = path_of(b"the layer");
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let again = File::from(kernel::reopen(file, flags).at("open again", at)?);
    let length = Length::default();
    std::thread::scope(|scope| {
        let follower = Follower { file: again, at: 0, length: &length, stop };
        let reader = std::thread::Builder::new()
            .name("read back".to_owned())
            .spawn_scoped(scope, move || {
                read_any(follower, u64::MAX - 1, u64::MAX - 1, check_entries)
            })
            .at("start a thread for", at)?;
        let written = write(Growing { file, length: &length });
        let found = reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let info = written?;
        compare(&found?, &info)?;
        Ok(info)
    })
}

/// How much of a file is written.
#[derive(Default)]
struct Length {
    written: Mutex<Written>,
    more: Condvar,
}

#[derive(Clone, Copy, Default)]
struct Written {
    bytes: u64,
    over: bool,
}

impl Length {
    fn lock(&self) -> MutexGuard<'_, Written> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A file being written; its end is where this is dropped.
pub(super) struct Growing<'f, 'l> {
    file: &'f File,
    length: &'l Length,
}

impl Write for Growing<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.file.write(bytes)?;
        self.length.lock().bytes += n as u64;
        self.length.more.notify_one();
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for Growing<'_, '_> {
    fn drop(&mut self) {
        self.length.lock().over = true;
        self.length.more.notify_one();
    }
}

/// Reads a file behind whoever writes it.
struct Follower<'l> {
    file: File,
    at: u64,
    length: &'l Length,
    stop: Stop<'l>,
}

impl Read for Follower<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        go_on(self.stop).map_err(io::Error::other)?;
        let mut now = self.length.lock();
        while now.bytes == self.at && !now.over {
            now = self.length.more.wait(now).unwrap_or_else(PoisonError::into_inner);
        }
        let there = usize::try_from(now.bytes - self.at).unwrap_or(usize::MAX).min(buffer.len());
        drop(now);
        let n = self.file.read_at(&mut buffer[..there], self.at)?;
        self.at += n as u64;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(file: &File, tar: &[u8], entries: u64) -> Result<LayerInfo> {
        read_back(file, &|| false, |growing| {
            let mut sink = Sink::new(growing).unwrap();
            sink.write_all(tar).unwrap();
            Ok(sink.finish(entries).unwrap())
        })
    }

    #[test]
    fn what_is_written_is_read_back_and_compared() {
        let tmp = tempfile::tempdir().unwrap();
        let file = |name: &str| File::create_new(tmp.path().join(name)).unwrap();
        // More than one job of each thread, and an archive of no entries.
        let tar = vec![0; 9 << 20];
        let info = packed(&file("a"), &tar, 0).unwrap();
        assert_eq!(info.size_uncompressed, 9 << 20);
        assert_eq!(info.diff_id, Digest(Sha256::digest(&tar).into()));
        let written = std::fs::read(tmp.path().join("a")).unwrap();
        assert_eq!(info.blob_digest, Digest(Sha256::digest(&written).into()));
        assert_eq!(zstd::decode_all(&written[..]).unwrap(), tar);
        assert!(matches!(packed(&file("b"), &tar, 1), Err(Error::Corrupt { .. })));
        assert!(packed(&file("c"), &[1; 4096], 0).is_err(), "it is no archive");
        // Bytes that do not arrive: the disk has others than were given.
        let other = file("d");
        let outcome = read_back(&file("e"), &|| false, |_| {
            let mut sink = Sink::new(&other).unwrap();
            sink.write_all(&tar).unwrap();
            Ok(sink.finish(0).unwrap())
        });
        assert!(outcome.is_err(), "{outcome:?}");
    }

    #[test]
    fn a_writer_that_fails_ends_the_reader_and_is_told() {
        let file = tempfile::tempfile().unwrap();
        let outcome = read_back(&file, &|| false, |mut growing| {
            growing.write_all(&[0x28, 0xb5]).unwrap();
            Err(Error::Stopped)
        });
        assert!(matches!(outcome, Err(Error::Stopped)), "{outcome:?}");
    }
}
