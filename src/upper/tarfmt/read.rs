//! Reads entries of an archive that somebody hostile may have written.

use std::io::{self, Read};

use super::super::changes::{is_foreign_mark, is_overlay_mark};
use super::super::{At as _, Error, Result, path_of};
use super::names::{Meaning, inside, restored};
use super::{
    BLOCK, Kind, MAX_NAME, MAX_RECORDS, MAX_RUNS, MAX_TOLD, Meta, OWN_XATTR, Run, TOLD, TRUE_LINK,
    TRUE_PATH, XATTR,
};

/// One entry, its path without leading `./` and trailing slash; empty for the top directory. Of a
/// whiteout it is the path that was deleted, of an opaque marker the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::upper) struct Entry {
    pub(in crate::upper) path: Vec<u8>,
    pub(in crate::upper) kind: Kind,
    pub(in crate::upper) meta: Meta,
}

/// The entries of an archive, read once and forward.
pub(in crate::upper) struct Entries<R> {
    input: R,
    /// Bytes of the current entry's content not read yet.
    left: u64,
    /// Bytes that fill up its last block.
    padding: u64,
    /// Where the current file's bytes belong.
    runs: Vec<Run>,
}

/// What extended headers said about the next entry.
#[derive(Default)]
struct Extended {
    seen: bool,
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u32>,
    gid: Option<u32>,
    mtime: Option<(i64, u32)>,
    xattrs: super::Xattrs,
    true_path: Option<Vec<u8>>,
    true_link: Option<Vec<u8>>,
    told: Option<crate::model::view::Told>,
    sparse: Sparse,
}

/// What the records of GNU tar's sparse form 1.0 say.
#[derive(Default)]
struct Sparse {
    form: (Option<u64>, Option<u64>),
    name: Option<Vec<u8>>,
    size: Option<u64>,
}

impl<R: Read> Entries<R> {
    pub(in crate::upper) fn new(input: R) -> Self {
        Self { input, left: 0, padding: 0, runs: Vec::new() }
    }

    /// Where the bytes of [`Entries::content`] belong in the current file, in ascending order; all
    /// else in it is zero.
    pub(in crate::upper) fn runs(&mut self) -> Vec<Run> {
        std::mem::take(&mut self.runs)
    }

    /// The current file's bytes, run by run.
    pub(in crate::upper) fn content(&mut self) -> Content<'_, R> {
        Content(self)
    }

    /// The next entry; what is left of the current one is skipped.
    pub(in crate::upper) fn next_entry(&mut self) -> Result<Option<Entry>> {
        let mut extended = Extended::default();
        loop {
            self.skip()?;
            let Some(header) = self.header()? else {
                if extended.seen {
                    return Err(Error::hostile(b"", "extended records describe no entry"));
                }
                return Ok(None);
            };
            let name = header.path_bytes().into_owned();
            let refuse = |why: String| Error::hostile(&name, why);
            let size = header.entry_size().map_err(|_| refuse("its size is no number".into()))?;
            let kind = header.entry_type().as_byte();
            match kind {
                b'x' | b'L' | b'K' => {
                    extended.seen = true;
                    let body = self.records(size, &name)?;
                    match kind {
                        b'x' => parse_records(&body, &mut extended)?,
                        b'L' => extended.path = Some(until_nul(&body).to_vec()),
                        _ => extended.link = Some(until_nul(&body).to_vec()),
                    }
                }
                _ => return self.plain(&header, name, size, extended).map(Some),
            }
        }
    }

    fn plain(
        &mut self,
        header: &tar::Header,
        name: Vec<u8>,
        size: u64,
        extended: Extended,
    ) -> Result<Entry> {
        let name = extended.sparse.name.or(extended.path).unwrap_or(name);
        let refuse = |why: &str| Error::hostile(&name, why);
        let link = extended
            .link
            .unwrap_or_else(|| header.link_name_bytes().unwrap_or_default().into_owned());
        let size = extended.size.unwrap_or(size);
        let archived = inside(&name)?;
        let device = || -> Option<(u32, u32)> {
            Some((header.device_major().ok()??, header.device_minor().ok()??))
        };
        let number = device().filter(|(a, b)| *a < 1 << 12 && *b < 1 << 20);
        let kind = match header.entry_type().as_byte() {
            0 if name.ends_with(b"/") => Kind::Directory,
            0 | b'0' | b'7' => Kind::File { size },
            b'1' => {
                let target = inside(&link)?;
                if target.is_empty() {
                    return Err(refuse("it links to the top directory"));
                }
                if Meaning::of(&target)? != Meaning::Plain {
                    return Err(refuse("it links to a whiteout"));
                }
                Kind::HardLink { target: restored(target, extended.true_link.as_deref())? }
            }
            b'2' if link.is_empty() || link.len() >= 4096 || link.contains(&0) => {
                return Err(refuse("a symlink's target has 1 to 4095 bytes and no NUL"));
            }
            b'2' => Kind::Symlink { target: link },
            b'3' => match number.ok_or_else(|| refuse("its device number is out of range"))? {
                (0, 0) => return Err(refuse("device 0:0 is an overlay whiteout in disguise")),
                (major, minor) => Kind::CharDevice { major, minor },
            },
            b'4' => {
                let (major, minor) =
                    number.ok_or_else(|| refuse("its device number is out of range"))?;
                Kind::BlockDevice { major, minor }
            }
            b'5' => Kind::Directory,
            b'6' => Kind::Fifo,
            _ => return Err(refuse("a layer has no entries of this type")),
        };
        if archived.is_empty() && kind != Kind::Directory {
            return Err(refuse("only a directory can be the top"));
        }
        // Some writers give a size with hard links; no bytes follow one.
        let has_content = matches!(kind, Kind::File { .. });
        if size != 0 && !has_content && !matches!(kind, Kind::HardLink { .. }) {
            return Err(refuse("only files have content"));
        }
        let number = |field: io::Result<u64>| {
            field
                .ok()
                .and_then(|n| u32::try_from(n).ok())
                .ok_or_else(|| refuse("owner or mode is out of range"))
        };
        let (mtime_s, mtime_ns) = match extended.mtime {
            Some(time) => time,
            None => {
                let seconds = header.mtime().ok().and_then(|s| i64::try_from(s).ok());
                (seconds.ok_or_else(|| refuse("its time is out of range"))?, 0)
            }
        };
        let uid = extended.uid.map_or_else(|| number(header.uid()), Ok)?;
        let gid = extended.gid.map_or_else(|| number(header.gid()), Ok)?;
        // To chown that is "as it was": the file would be root's.
        if [uid, gid].contains(&u32::MAX) {
            return Err(refuse("its owner is 4294967295, which is nobody's id"));
        }
        let meta = Meta {
            mode: number(header.mode().map(u64::from))? & 0o7777,
            uid,
            gid,
            mtime_s,
            mtime_ns,
            xattrs: extended.xattrs,
            told: extended.told,
        };
        self.left = if has_content { size } else { 0 };
        self.padding = self.left.wrapping_neg() % BLOCK as u64;
        self.runs = if self.left > 0 { vec![Run { at: 0, len: size }] } else { vec![] };
        let mut kind = kind;
        match (extended.sparse.form, extended.sparse.size, &mut kind) {
            ((None, None), None, _) => {}
            ((Some(1), Some(0)), Some(real), Kind::File { size }) => {
                *size = real;
                self.sparse_map(real, &name)?;
            }
            _ => return Err(refuse("a sparse form is used that layers do not have")),
        }
        let (archived, kind) = match Meaning::of(&archived)? {
            Meaning::Plain => (archived, kind),
            _ if !has_content => return Err(refuse("a whiteout is an empty file")),
            Meaning::Whiteout(gone) => (gone, Kind::Whiteout),
            Meaning::Opaque(dir) => (dir, Kind::Opaque),
        };
        let path = restored(archived, extended.true_path.as_deref())?;
        Ok(Entry { path, kind, meta })
    }

    /// Reads the map that a sparse file's bytes begin with: decimal lines, filled up to a block.
    fn sparse_map(&mut self, real: u64, name: &[u8]) -> Result<()> {
        let refuse = |why: &str| Error::hostile(name, format!("in its sparse map, {why}"));
        let mut lines = MapLines { block: [0; BLOCK], at: BLOCK };
        let count = lines.number(self, name)?;
        if count > MAX_RUNS as u64 {
            return Err(refuse("there are too many runs"));
        }
        let mut runs = Vec::new();
        let (mut end, mut bytes) = (0_u64, 0_u64);
        for _ in 0..count {
            let run = Run { at: lines.number(self, name)?, len: lines.number(self, name)? };
            let after = run.at.checked_add(run.len).filter(|after| *after <= real);
            if run.at < end || after.is_none() {
                return Err(refuse("the runs overlap or go beyond the file's end"));
            }
            end = after.unwrap_or(end);
            bytes += run.len;
            if run.len > 0 {
                runs.push(run);
            }
        }
        if bytes != self.left || i64::try_from(real).is_err() {
            return Err(refuse("the sizes do not add up"));
        }
        self.runs = runs;
        Ok(())
    }

    /// Reads and checks one header; `None` at the end of the archive.
    fn header(&mut self) -> Result<Option<tar::Header>> {
        let mut block = [0; BLOCK];
        let got = read_full(&mut self.input, &mut block).at("read", path_of(b"the archive"))?;
        if got == 0 || (got == BLOCK && block.iter().all(|b| *b == 0)) {
            return Ok(None);
        }
        if got < BLOCK {
            return Err(Error::hostile(b"", "the archive ends inside a header"));
        }
        let mut header = tar::Header::new_ustar();
        header.as_mut_bytes().copy_from_slice(&block);
        // The sum is over the header with eight blanks in the sum's place.
        let sum: u32 = (block[..148].iter().chain(&block[156..])).map(|b| u32::from(*b)).sum();
        match header.cksum() {
            Ok(told) if told == sum + 8 * u32::from(b' ') => Ok(Some(header)),
            _ => Err(Error::hostile(&header.path_bytes(), "its header's checksum is wrong")),
        }
    }

    /// Reads the bytes of an extended header.
    fn records(&mut self, size: u64, name: &[u8]) -> Result<Vec<u8>> {
        if size > MAX_RECORDS {
            return Err(Error::hostile(name, format!("its records have {size} bytes")));
        }
        self.left = size;
        self.padding = size.wrapping_neg() % BLOCK as u64;
        let mut body = Vec::new();
        self.content().read_to_end(&mut body).at("read", path_of(b"the archive"))?;
        Ok(body)
    }

    fn skip(&mut self) -> Result<()> {
        io::copy(&mut self.content(), &mut io::sink()).at("read", path_of(b"the archive"))?;
        let padding = std::mem::take(&mut self.padding);
        let got = io::copy(&mut self.input.by_ref().take(padding), &mut io::sink())
            .at("read", path_of(b"the archive"))?;
        if got < padding {
            return Err(Error::hostile(b"", "the archive ends inside an entry"));
        }
        Ok(())
    }

    /// Reads everything to the end of the archive, checks every entry and keeps none. Returns the
    /// number of entries.
    pub(in crate::upper) fn check_all(&mut self) -> Result<u64> {
        let mut count = 0;
        while self.next_entry()?.is_some() {
            count += 1;
        }
        Ok(count)
    }

    /// Reads to the end of the input; what follows the archive's end must be zeros.
    pub(in crate::upper) fn drain(mut self) -> Result<()> {
        let mut buffer = [0; 8192];
        loop {
            let got = self.input.read(&mut buffer).at("read", path_of(b"the archive"))?;
            match &buffer[..got] {
                [] => return Ok(()),
                bytes if bytes.iter().any(|b| *b != 0) => {
                    return Err(Error::hostile(b"", "bytes follow the end of the archive"));
                }
                _ => {}
            }
        }
    }
}

/// The bytes of an entry. An archive that ends too early is an error, not a short file.
pub(in crate::upper) struct Content<'a, R>(&'a mut Entries<R>);

impl<R: Read> Read for Content<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let want = buffer.len().min(usize::try_from(self.0.left).unwrap_or(usize::MAX));
        if want == 0 {
            return Ok(0);
        }
        let got = self.0.input.read(&mut buffer[..want])?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.0.left -= got as u64;
        Ok(got)
    }
}

fn read_full(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match input.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(filled)
}

fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes.split(|b| *b == 0).next().unwrap_or(bytes)
}

/// The lines of a sparse map, read a block at a time.
struct MapLines {
    block: [u8; BLOCK],
    at: usize,
}

impl MapLines {
    fn number<R: Read>(&mut self, from: &mut Entries<R>, name: &[u8]) -> Result<u64> {
        let mut digits = Vec::new();
        loop {
            if self.at == BLOCK {
                from.content().read_exact(&mut self.block).at("read", path_of(b"the archive"))?;
                self.at = 0;
            }
            let byte = self.block[self.at];
            self.at += 1;
            if byte == b'\n' {
                let wrong = || Error::hostile(name, "in its sparse map, a number is wrong");
                return number(&digits).ok_or_else(wrong);
            }
            digits.push(byte);
            if digits.len() > 20 {
                return Err(Error::hostile(name, "in its sparse map, a number is too long"));
            }
        }
    }
}

fn parse_records(mut body: &[u8], into: &mut Extended) -> Result<()> {
    let refuse = |why: &str| Error::hostile(b"", format!("in extended records, {why}"));
    while !body.is_empty() {
        let space = body.iter().take(8).position(|b| *b == b' ');
        let space = space.ok_or_else(|| refuse("a length is missing"))?;
        let length: usize = number(&body[..space]).ok_or_else(|| refuse("a length is wrong"))?;
        let (record, rest) =
            body.split_at_checked(length).ok_or_else(|| refuse("a length is wrong"))?;
        body = rest;
        let record = record
            .get(space + 1..)
            .and_then(|r| r.strip_suffix(b"\n"))
            .ok_or_else(|| refuse("a record has no end"))?;
        let equals = record.iter().position(|b| *b == b'=');
        let (key, value) = record.split_at(equals.ok_or_else(|| refuse("`=` is missing"))?);
        let value = &value[1..];
        let bad = || refuse(&format!("{} is out of range", String::from_utf8_lossy(key)));
        match key {
            b"path" => into.path = Some(value.to_vec()),
            b"linkpath" => into.link = Some(value.to_vec()),
            b"size" => into.size = Some(number(value).ok_or_else(bad)?),
            b"uid" => into.uid = Some(number(value).ok_or_else(bad)?),
            b"gid" => into.gid = Some(number(value).ok_or_else(bad)?),
            b"mtime" => into.mtime = Some(parse_time(value).ok_or_else(bad)?),
            b"GNU.sparse.major" => into.sparse.form.0 = Some(number(value).ok_or_else(bad)?),
            b"GNU.sparse.minor" => into.sparse.form.1 = Some(number(value).ok_or_else(bad)?),
            b"GNU.sparse.realsize" => into.sparse.size = Some(number(value).ok_or_else(bad)?),
            b"GNU.sparse.name" => into.sparse.name = Some(value.to_vec()),
            _ if key.starts_with(b"GNU.sparse.") => {
                return Err(refuse("a sparse form is used that layers do not have"));
            }
            _ if key == TRUE_PATH => into.true_path = Some(value.to_vec()),
            _ if key == TRUE_LINK => into.true_link = Some(value.to_vec()),
            _ if key == TOLD => {
                let told = Some(value).filter(|value| value.len() <= MAX_TOLD);
                let told = told.and_then(|value| serde_json::from_slice(value).ok());
                into.told = Some(told.ok_or_else(bad)?);
            }
            _ => {
                if let Some(name) = key.strip_prefix(OWN_XATTR) {
                    let name = decode_name(name);
                    if !is_foreign_mark(&name) || name.len() > MAX_NAME || name.contains(&0) {
                        return Err(refuse("an attribute is set apart without need"));
                    }
                    into.xattrs.insert(name, value.to_vec());
                    continue;
                }
                let Some(name) = key.strip_prefix(XATTR) else { continue };
                let name = decode_name(name);
                if name.is_empty() || name.len() > MAX_NAME || name.contains(&0) {
                    return Err(refuse("an attribute's name has 1 to 255 bytes and no NUL"));
                }
                if is_overlay_mark(&name) {
                    return Err(refuse("a mark of overlay's own is set as an attribute"));
                }
                into.xattrs.insert(name, value.to_vec());
            }
        }
    }
    into.seen = true;
    Ok(())
}

/// Reads decimal digits alone, without sign.
fn number<N: std::str::FromStr>(digits: &[u8]) -> Option<N> {
    let text = std::str::from_utf8(digits).ok()?;
    (text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().ok()).flatten()
}

/// Reads decimal seconds, with a fraction of which nine digits count.
fn parse_time(text: &[u8]) -> Option<(i64, u32)> {
    let (negative, text) = match text.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let mut parts = text.splitn(2, |b| *b == b'.');
    let whole: i128 = number(parts.next()?)?;
    let mut nanos = 0u32;
    let fraction = parts.next().unwrap_or_default();
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    for place in 0..9 {
        nanos = nanos * 10 + fraction.get(place).map_or(0, |d| u32::from(d - b'0'));
    }
    let (whole, nanos) = match (negative, nanos) {
        (false, _) => (whole, nanos),
        (true, 0) => (-whole, 0),
        (true, _) => (-whole - 1, 1_000_000_000 - nanos),
    };
    Some((i64::try_from(whole).ok()?, nanos))
}

fn decode_name(name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len());
    let mut rest = name;
    while let [first, tail @ ..] = rest {
        let (byte, tail) = match rest {
            [b'%', b'2', b'5', tail @ ..] => (b'%', tail),
            [b'%', b'3', b'D', tail @ ..] => (b'=', tail),
            _ => (*first, tail),
        };
        out.push(byte);
        rest = tail;
    }
    out
}
