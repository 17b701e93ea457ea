//! Writes entries in one canonical form.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, Write};

use tar::EntryType;

use super::super::changes::is_foreign_mark;
use super::super::{At as _, Error, Result, Shown, path_of};
use super::names::{OPAQUE, WHITEOUT, escaped, prefixed};
use super::read::{Entries, Entry};
use super::{BLOCK, Kind, MAX_NAME, Meta, OWN_XATTR, Run, TOLD, TRUE_LINK, TRUE_PATH, XATTR};

/// The name every PAX header carries; readers do not use it.
const PAX_NAME: &[u8] = b"PaxHeaders/overfence";
/// Octal fields of 7 and 11 digits.
const MAX_OWNER: u32 = (1 << 21) - 1;
const MAX_SIZE: u64 = (1 << 33) - 1;
/// A shorter path is against no limit.
const PLAIN_PATH: usize = 4096;

/// A tar stream being written. A file's bytes follow its [`Writer::entry`] by [`Write`], then
/// [`Writer::pad`].
pub(in crate::upper) struct Writer<W> {
    out: W,
    written: u64,
    /// Of the entry that is put together.
    head: Vec<u8>,
}

impl<W: Write> Writer<W> {
    pub(in crate::upper) fn new(out: W) -> Self {
        Self { out, written: 0, head: Vec::new() }
    }

    /// How many bytes of the archive there are.
    pub(in crate::upper) fn written(&self) -> u64 {
        self.written
    }

    /// Writes the header of an entry; an empty path is the top directory.
    ///
    /// # Errors
    /// [`Error::NotPortable`] if a reader would refuse it.
    pub(in crate::upper) fn entry(&mut self, path: &[u8], kind: &Kind, meta: &Meta) -> Result<()> {
        self.head.clear();
        let plain = self.described(path, kind, meta, BTreeMap::new());
        if !plain.at("describe", path_of(path))? {
            self.check(path, kind, meta)?;
        }
        self.put()
    }

    /// Writes the header of a file of which only these runs follow, in ascending order; the rest
    /// are zeros. GNU tar's sparse form 1.0, which the other readers of layers know.
    ///
    /// # Errors
    /// As [`Writer::entry`].
    pub(in crate::upper) fn sparse(
        &mut self,
        path: &[u8],
        size: u64,
        runs: &[Run],
        meta: &Meta,
    ) -> Result<()> {
        // A hole at the end is told by an empty run.
        let tail = runs.last().is_none_or(|last| last.at + last.len < size);
        let tail = tail.then_some(Run { at: size, len: 0 });
        let mut map = format!("{}\n", runs.len() + usize::from(tail.is_some()));
        for run in runs.iter().chain(&tail) {
            map.push_str(&format!("{}\n{}\n", run.at, run.len));
        }
        let mut map = map.into_bytes();
        map.resize(map.len().next_multiple_of(BLOCK), 0);
        let stored = map.len() as u64 + runs.iter().map(|run| run.len).sum::<u64>();
        let record = |key: &str, value: Vec<u8>| (key.as_bytes().to_vec(), value);
        let records = BTreeMap::from([
            record("GNU.sparse.major", b"1".to_vec()),
            record("GNU.sparse.minor", b"0".to_vec()),
            record("GNU.sparse.name", escaped(path).into_owned()),
            record("GNU.sparse.realsize", size.to_string().into_bytes()),
        ]);
        self.head.clear();
        let stored = Kind::File { size: stored };
        self.described(path, &stored, meta, records).at("describe", path_of(path))?;
        self.head.extend(map);
        self.check(path, &Kind::File { size }, meta)?;
        self.put()
    }

    /// A layer that nobody can read again is no copy of anything: an entry that may be against a rule is
    /// read before it is written.
    fn check(&self, path: &[u8], kind: &Kind, meta: &Meta) -> Result<()> {
        let refuse = |why: &str| Error::NotPortable {
            path: Shown::bytes(path),
            why: format!("{why}; shorten its path, remove attributes of it, or remove it"),
        };
        match Entries::new(&self.head[..]).next_entry() {
            Ok(Some(Entry { path: p, kind: k, meta: m }))
                if p == path && k == *kind && m == *meta =>
            {
                Ok(())
            }
            Ok(_) => Err(refuse("it would be read back as something else")),
            Err(Error::Hostile { why, .. }) => Err(refuse(&why)),
            Err(other) => Err(other),
        }
    }

    fn put(&mut self) -> Result<()> {
        let head = std::mem::take(&mut self.head);
        let written = self.write_all(&head);
        self.head = head;
        written.at("write", path_of(b"the layer"))
    }

    /// Puts the header together. Whether there is nothing about the entry that a rule could be against.
    fn described(
        &mut self,
        path: &[u8],
        kind: &Kind,
        meta: &Meta,
        mut records: BTreeMap<Vec<u8>, Vec<u8>>,
    ) -> io::Result<bool> {
        let mut header = tar::Header::new_ustar();
        // A reader that does not know the form is not to take what is stored for the file.
        let sparse = !records.is_empty();
        let mut record = |key: &[u8], value: Vec<u8>| {
            records.insert(key.into(), value);
        };

        let archived = escaped(path);
        let plain = matches!(archived, Cow::Borrowed(_))
            && path.len() < PLAIN_PATH
            && path.rsplit(|b| *b == b'/').next().is_none_or(|name| name.len() <= MAX_NAME)
            && matches!(kind, Kind::File { .. } | Kind::Directory)
            && meta.xattrs.is_empty()
            && meta.uid.max(meta.gid) <= MAX_OWNER;
        if *archived != *path {
            record(TRUE_PATH, path.to_vec());
        }
        let mut path = match kind {
            Kind::Whiteout => prefixed(&archived, WHITEOUT),
            Kind::Opaque => [&archived, &b"/"[..], OPAQUE].concat(),
            Kind::File { .. } if sparse => prefixed(&archived, b"GNUSparseFile.0/"),
            _ => archived.into_owned(),
        };
        if path.is_empty() {
            path.extend(b"./");
        } else if *kind == Kind::Directory {
            path.push(b'/');
        }
        let target;
        let (mut size, mut link, mut device) = (0, &b""[..], (0, 0));
        header.set_entry_type(match kind {
            Kind::Directory => EntryType::Directory,
            Kind::File { size: bytes } => {
                size = *bytes;
                EntryType::Regular
            }
            Kind::HardLink { target: file } => {
                target = escaped(file);
                if *target != **file {
                    record(TRUE_LINK, file.clone());
                }
                link = &target;
                EntryType::Link
            }
            Kind::Symlink { target } => {
                link = target;
                EntryType::Symlink
            }
            Kind::Whiteout | Kind::Opaque => EntryType::Regular,
            Kind::Fifo => EntryType::Fifo,
            Kind::CharDevice { major, minor } => {
                device = (*major, *minor);
                EntryType::Char
            }
            Kind::BlockDevice { major, minor } => {
                device = (*major, *minor);
                EntryType::Block
            }
        });
        if let Some(ustar) = header.as_ustar_mut() {
            for (field, key, value) in [
                (&mut ustar.name, &b"path"[..], &path[..]),
                (&mut ustar.linkname, b"linkpath", link),
            ] {
                let fits = value.len().min(field.len());
                field[..fits].copy_from_slice(&value[..fits]);
                if value.len() > field.len() {
                    record(key, value.to_vec());
                }
            }
        }
        for (id, key) in [(meta.uid, &b"uid"[..]), (meta.gid, b"gid")] {
            if id > MAX_OWNER {
                record(key, id.to_string().into_bytes());
            }
        }
        if size > MAX_SIZE {
            record(b"size", size.to_string().into_bytes());
        }
        let plain_mtime = u64::try_from(meta.mtime_s).ok().filter(|s| *s <= MAX_SIZE);
        if meta.mtime_ns != 0 || plain_mtime.is_none() {
            record(b"mtime", decimal_time(meta.mtime_s, meta.mtime_ns).into_bytes());
        }
        if let Some(told) = &meta.told {
            record(TOLD, serde_json::to_vec(told)?);
        }
        for (name, value) in &meta.xattrs {
            let key = if is_foreign_mark(name) { OWN_XATTR } else { XATTR };
            records.insert([key, &encode_name(name)].concat(), value.clone());
        }

        header.set_mode(meta.mode);
        header.set_uid(within(meta.uid, MAX_OWNER).into());
        header.set_gid(within(meta.gid, MAX_OWNER).into());
        header.set_size(if size > MAX_SIZE { 0 } else { size });
        header.set_mtime(plain_mtime.unwrap_or(0));
        header.set_device_major(device.0)?;
        header.set_device_minor(device.1)?;
        header.set_cksum();
        if !records.is_empty() {
            self.records(&records)?;
        }
        self.head.extend(header.as_bytes());
        Ok(plain)
    }

    fn records(&mut self, records: &BTreeMap<Vec<u8>, Vec<u8>>) -> io::Result<()> {
        // Its header is known once the body is.
        let start = self.head.len();
        self.head.resize(start + BLOCK, 0);
        for (key, value) in records {
            // The length counts its own digits: grow the guess until it holds.
            let rest = key.len() + value.len() + 3;
            let mut length = rest + 1;
            while rest + digits(length) != length {
                length = rest + digits(length);
            }
            write!(self.head, "{length} ")?;
            self.head.extend(key);
            self.head.push(b'=');
            self.head.extend(value);
            self.head.push(b'\n');
        }
        let size = self.head.len() - start - BLOCK;
        self.head.resize(start + BLOCK + size.next_multiple_of(BLOCK), 0);
        let mut header = tar::Header::new_ustar();
        if let Some(ustar) = header.as_ustar_mut() {
            ustar.name[..PAX_NAME.len()].copy_from_slice(PAX_NAME);
        }
        header.set_entry_type(EntryType::XHeader);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(size as u64);
        header.set_device_major(0)?;
        header.set_device_minor(0)?;
        header.set_cksum();
        self.head[start..start + BLOCK].copy_from_slice(header.as_bytes());
        Ok(())
    }

    /// Fills up the block after a file's bytes.
    pub(in crate::upper) fn pad(&mut self) -> io::Result<()> {
        let over = (self.written % BLOCK as u64) as usize;
        if over == 0 { Ok(()) } else { self.write_all(&[0; BLOCK][over..]) }
    }

    /// Writes the end of the archive and gives the sink back.
    pub(in crate::upper) fn finish(mut self) -> io::Result<W> {
        self.write_all(&[0; 2 * BLOCK])?;
        Ok(self.out)
    }

    #[cfg(test)]
    pub(super) fn into_inner(self) -> W {
        self.out
    }
}

impl<W: Write> Write for Writer<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.written += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

fn digits(number: usize) -> usize {
    number.checked_ilog10().map_or(1, |log| log as usize + 1)
}

fn within(id: u32, max: u32) -> u32 {
    if id > max { 0 } else { id }
}

/// A decimal number of seconds; before 1970 the fraction counts down from the next second.
fn decimal_time(seconds: i64, nanos: u32) -> String {
    let (sign, whole, fraction) = match (seconds < 0, nanos) {
        (true, 0) => ("-", seconds.unsigned_abs(), 0),
        (true, _) => ("-", seconds.unsigned_abs() - 1, 1_000_000_000 - nanos),
        (false, _) => ("", seconds.unsigned_abs(), nanos),
    };
    match fraction {
        0 => format!("{sign}{whole}"),
        _ => format!("{sign}{whole}.{}", format!("{fraction:09}").trim_end_matches('0')),
    }
}

/// A record's key ends at the first `=`: GNU tar's escape keeps names that have one.
fn encode_name(name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len());
    for byte in name {
        match byte {
            b'%' => out.extend(b"%25"),
            b'=' => out.extend(b"%3D"),
            _ => out.push(*byte),
        }
    }
    out
}
