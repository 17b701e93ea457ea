//! The tar form of a layer: POSIX ustar headers with PAX records for what does not fit them.
//!
//! Written canonically: the same entries give the same bytes, whatever made them. Read strictly:
//! every size is bounded before memory is taken for it, and a path cannot climb.

mod names;
mod read;
mod write;

pub(super) use names::escaped;
pub(super) use read::{Entries, Entry};
pub(super) use write::Writer;

use super::changes::Xattrs;
use crate::model::view::Told;

/// A path in a layer has at most this many bytes; much longer than the kernel takes in one call.
pub(super) const MAX_PATH: usize = 1 << 20;
/// A sparse file has at most this many runs of bytes.
pub(super) const MAX_RUNS: usize = 1 << 20;
/// A name has at most this many bytes, as in the kernel.
const MAX_NAME: usize = 255;
/// The extended records of one entry have at most this many bytes: its path and the path it links
/// to, each also unescaped, and all attributes that the kernel stores.
const MAX_RECORDS: u64 = 16 << 20;

const BLOCK: usize = 512;
const XATTR: &[u8] = b"SCHILY.xattr.";
/// Attributes that another unpacker is not to set: some overlay would take them for marks.
const OWN_XATTR: &[u8] = b"OVERFENCE.xattr.";
/// The path of an entry whose name had to be escaped.
const TRUE_PATH: &[u8] = b"OVERFENCE.path";
/// The same of the file that a hard link is to.
const TRUE_LINK: &[u8] = b"OVERFENCE.linkpath";
/// What an entry is to the base, as JSON (`model::view::Told`): in bundles.
const TOLD: &[u8] = b"OVERFENCE.change";
/// It has at most this many bytes.
const MAX_TOLD: usize = 4096;

/// Bytes of a file that are not zero, or not known to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Offset in the file.
    pub(super) at: u64,
    /// How many.
    pub(super) len: u64,
}

/// What an entry is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Directory,
    /// A regular file; its bytes follow.
    File {
        size: u64,
    },
    /// Another name of an earlier entry.
    HardLink {
        target: Vec<u8>,
    },
    Symlink {
        target: Vec<u8>,
    },
    /// The path was deleted.
    Whiteout,
    /// The directory hides what lies below it.
    Opaque,
    Fifo,
    CharDevice {
        major: u32,
        minor: u32,
    },
    BlockDevice {
        major: u32,
        minor: u32,
    },
}

/// Owner, mode and so on of an entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Meta {
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// Seconds since 1970, rounded down.
    pub(super) mtime_s: i64,
    /// Nanoseconds after them.
    pub(super) mtime_ns: u32,
    pub(super) xattrs: Xattrs,
    /// What it is to the base, in a bundle; said by whoever made that.
    pub(super) told: Option<Told>,
}

/// Reads an archive to its end and drops it: what the fuzz target and `bundle::verify` run.
/// Returns how many entries there were.
pub fn fuzz_entries(archive: &[u8]) -> super::Result<u64> {
    Entries::new(archive).check_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Read as _;

    type Made = (Vec<u8>, Kind, Meta, Vec<u8>);

    fn write_all(entries: &[Made]) -> Vec<u8> {
        let mut writer = Writer::new(Vec::new());
        for (path, kind, meta, bytes) in entries {
            writer.entry(path, kind, meta).unwrap();
            std::io::Write::write_all(&mut writer, bytes).unwrap();
            writer.pad().unwrap();
        }
        writer.finish().unwrap()
    }

    fn read_all(archive: &[u8]) -> Vec<Made> {
        let mut entries = Entries::new(archive);
        let mut all = Vec::new();
        while let Some(Entry { path, kind, meta }) = entries.next_entry().unwrap() {
            let mut bytes = Vec::new();
            entries.content().read_to_end(&mut bytes).unwrap();
            all.push((path, kind, meta, bytes));
        }
        all
    }

    fn name() -> impl Strategy<Value = Vec<u8>> {
        let bytes = prop::collection::vec(
            any::<u8>().prop_filter("no / or NUL", |b| !b"/\0".contains(b)),
            1..200,
        );
        let start = prop_oneof![
            6 => Just(&b""[..]),
            1 => Just(&b".wh."[..]),
            1 => Just(&b".wh..wh."[..]),
            1 => Just(&b".overfence-escaped"[..]),
        ];
        (start, bytes)
            .prop_map(|(start, name)| [start, &name].concat())
            .prop_filter("not . or ..", |n| n != b"." && n != b"..")
    }

    fn path() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(name(), 1..4).prop_map(|parts| parts.join(&b'/'))
    }

    fn meta() -> impl Strategy<Value = Meta> {
        let xattr = (
            name().prop_filter("not overlay's", |n| !n.starts_with(b"trusted.overlay.")),
            prop::collection::vec(any::<u8>(), 0..40),
        );
        (
            0u32..0o10000,
            0..u32::MAX,
            0..u32::MAX,
            -9_000_000_000i64..90_000_000_000,
            0u32..1_000_000_000,
            prop::collection::btree_map(xattr.0, xattr.1, 0..3),
        )
            .prop_map(|(mode, uid, gid, mtime_s, mtime_ns, xattrs)| Meta {
                mode,
                uid,
                gid,
                mtime_s,
                mtime_ns,
                xattrs,
                told: None,
            })
    }

    fn kind() -> impl Strategy<Value = (Kind, Vec<u8>)> {
        prop_oneof![
            Just((Kind::Directory, vec![])),
            Just((Kind::Fifo, vec![])),
            Just((Kind::Whiteout, vec![])),
            Just((Kind::Opaque, vec![])),
            prop::collection::vec(any::<u8>(), 0..1500)
                .prop_map(|b| (Kind::File { size: b.len() as u64 }, b)),
            path().prop_map(|target| (Kind::HardLink { target }, vec![])),
            path().prop_map(|target| (Kind::Symlink { target }, vec![])),
            (0u32..4096, 0u32..1 << 20)
                .prop_filter("not a whiteout", |(a, b)| (*a, *b) != (0, 0))
                .prop_map(|(major, minor)| (Kind::CharDevice { major, minor }, vec![])),
            (0u32..4096, 0u32..1 << 20)
                .prop_map(|(major, minor)| (Kind::BlockDevice { major, minor }, vec![])),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn what_is_written_is_read_back(
            list in prop::collection::vec((path(), kind(), meta()), 0..6)
        ) {
            let list: Vec<Made> =
                list.into_iter().map(|(p, (k, b), m)| (p, k, m, b)).collect();
            prop_assert_eq!(read_all(&write_all(&list)), list);
        }

        #[test]
        fn any_bytes_are_refused_or_read_but_never_a_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..2048)
        ) {
            let _ = fuzz_entries(&bytes);
        }

        #[test]
        fn a_changed_archive_is_refused_or_read_but_never_a_panic(
            list in prop::collection::vec((path(), kind(), meta()), 1..4),
            at in any::<prop::sample::Index>(), to in any::<u8>()
        ) {
            let list: Vec<Made> =
                list.into_iter().map(|(p, (k, b), m)| (p, k, m, b)).collect();
            let mut bytes = write_all(&list);
            let at = at.index(bytes.len());
            bytes[at] = to;
            let _ = fuzz_entries(&bytes);
        }
    }

    #[test]
    fn every_byte_but_slash_and_nul_is_a_name() {
        let list: Vec<Made> = (1..=255u8)
            .filter(|b| *b != b'/' && *b != b'.')
            .map(|b| (vec![b], Kind::Fifo, Meta::default(), vec![]))
            .collect();
        assert_eq!(read_all(&write_all(&list)), list);
    }

    #[test]
    fn what_holds_of_a_sparse_file_is_read_back() {
        let size = 1 << 50;
        let runs = [Run { at: 0, len: 2 }, Run { at: 7 << 30, len: 3 }];
        let mut writer = Writer::new(Vec::new());
        for (name, size) in [(&b"a"[..], size), (b".wh.b", (7 << 30) + 3)] {
            writer.sparse(name, size, &runs, &Meta::default()).unwrap();
            std::io::Write::write_all(&mut writer, b"heart").unwrap();
            writer.pad().unwrap();
        }
        writer.sparse(b"empty", size, &[], &Meta::default()).unwrap();
        writer.pad().unwrap();
        writer.entry(b"next", &Kind::Fifo, &Meta::default()).unwrap();
        let bytes = writer.finish().unwrap();
        let mut entries = Entries::new(&bytes[..]);
        for (name, size) in [(&b"a"[..], size), (b".wh.b", (7 << 30) + 3)] {
            let entry = entries.next_entry().unwrap().unwrap();
            assert_eq!((&entry.path[..], entry.kind), (name, Kind::File { size }));
            assert_eq!(entries.runs(), runs);
            let mut bytes = Vec::new();
            entries.content().read_to_end(&mut bytes).unwrap();
            assert_eq!(bytes, b"heart");
        }
        assert_eq!(entries.next_entry().unwrap().unwrap().kind, Kind::File { size });
        assert_eq!(entries.runs(), []);
        assert_eq!(entries.next_entry().unwrap().unwrap().kind, Kind::Fifo);
    }

    #[test]
    fn a_sparse_map_that_lies_is_refused() {
        let sparse = |map: &[u8], real: u64, stored: u64| {
            let record = |text: String| {
                let n = text.len() + 4;
                format!("{n} {text}\n")
            };
            let mut body = String::new();
            for text in [
                "GNU.sparse.major=1".into(),
                "GNU.sparse.minor=0".into(),
                "GNU.sparse.name=f".into(),
                format!("GNU.sparse.realsize={real}"),
            ] {
                body.push_str(&record(text));
            }
            let mut all = header(b'x', b"p", b"", body.len() as u64);
            all.extend(body.as_bytes());
            all.resize(all.len().next_multiple_of(BLOCK), 0);
            all.extend(header(b'0', b"GNUSparseFile.0/f", b"", stored));
            all.extend(map);
            all.resize(all.len().next_multiple_of(BLOCK) + 1024, 0);
            all
        };
        let map = |text: &str| {
            let mut map = text.as_bytes().to_vec();
            map.resize(BLOCK, 0);
            map
        };
        assert_eq!(fuzz_entries(&sparse(&map("1\n5\n4\n"), 9, 516)).unwrap(), 1);
        for (what, archive) in [
            ("beyond the end", sparse(&map("1\n6\n4\n"), 9, 516)),
            ("beyond all", sparse(&map("1\n18446744073709551615\n4\n"), 9, 516)),
            ("too little stored", sparse(&map("1\n0\n4\n"), 9, 515)),
            ("too much stored", sparse(&map("1\n0\n4\n"), 9, 517)),
            ("overlapping", sparse(&map("2\n0\n2\n1\n2\n"), 9, 516)),
            ("no map", sparse(b"", 9, 4)),
            ("an endless number", sparse(&[b'1'; 512], 9, 516)),
            ("no number", sparse(&map("x\n"), 9, 516)),
            ("too many runs", sparse(&map("1048577\n"), 9, 516)),
            ("a map without end", sparse(&map("200\n0\n0\n"), 9, 512)),
            ("negative", sparse(&map("1\n-1\n4\n"), 9, 516)),
            ("too big", sparse(&map("0\n"), 1 << 63, 512)),
        ] {
            assert!(fuzz_entries(&archive).is_err(), "{what} was taken");
        }
    }

    #[test]
    fn any_time_the_kernel_has_is_kept() {
        for mtime_s in [i64::MIN, i64::MIN + 1, -1, 0, i64::MAX] {
            for mtime_ns in [0, 1, 999_999_999] {
                let meta = Meta { mtime_s, mtime_ns, ..Meta::default() };
                let list = vec![(b"f".to_vec(), Kind::Fifo, meta, vec![])];
                assert_eq!(read_all(&write_all(&list)), list);
            }
        }
    }

    #[test]
    fn a_deleted_name_may_be_as_long_as_names_are() {
        for len in [251, 252, 255] {
            let list = vec![(vec![b'n'; len], Kind::Whiteout, Meta::default(), vec![])];
            assert_eq!(read_all(&write_all(&list)), list);
        }
        let mut file = header(b'L', b"././@LongLink", b"", 256);
        file.extend([b'n'; 256]);
        file.resize(2 * BLOCK, 0);
        file.extend(header(b'6', b"n", b"", 0));
        assert!(fuzz_entries(&file).is_err(), "no file has such a name");
    }

    #[test]
    fn sizes_and_owners_beyond_ustar_are_kept() {
        let meta = Meta { uid: u32::MAX - 1, gid: 3_000_000, ..Meta::default() };
        let mut writer = Writer::new(Vec::new());
        writer.entry(b"big", &Kind::File { size: 9 << 30 }, &meta).unwrap();
        let bytes = writer.into_inner();
        let entry = Entries::new(&bytes[..]).next_entry().unwrap().unwrap();
        assert_eq!((entry.kind, entry.meta), (Kind::File { size: 9 << 30 }, meta));
    }

    /// The header of one plain entry, for tests that then damage it.
    fn header(kind: u8, name: &[u8], link: &[u8], size: u64) -> Vec<u8> {
        let mut h = tar::Header::new_ustar();
        h.as_ustar_mut().unwrap().name[..name.len()].copy_from_slice(name);
        h.as_ustar_mut().unwrap().linkname[..link.len()].copy_from_slice(link);
        h.as_ustar_mut().unwrap().typeflag = [kind];
        h.set_size(size);
        h.set_mode(0o644);
        h.set_uid(0);
        h.set_gid(0);
        h.set_mtime(0);
        h.set_device_major(0).unwrap();
        h.set_device_minor(0).unwrap();
        h.set_cksum();
        h.as_bytes().to_vec()
    }

    #[test]
    fn hostile_headers_are_refused() {
        let pax = |body: &[u8]| {
            let mut all = header(b'x', b"p", b"", body.len() as u64);
            all.extend(body);
            all.resize(all.len().next_multiple_of(BLOCK), 0);
            all.extend(header(b'0', b"f", b"", 0));
            all
        };
        let record = |text: &str| {
            let length =
                (1..200).find(|n: &usize| n.to_string().len() + 1 + text.len() + 1 == *n).unwrap();
            pax(format!("{length} {text}\n").as_bytes())
        };
        for (what, archive) in [
            ("absolute", header(b'0', b"/etc/passwd", b"", 0)),
            ("climbing", header(b'0', b"a/../../x", b"", 0)),
            ("a link to a whiteout", header(b'1', b"a", b".wh.b", 0)),
            ("below a whiteout", header(b'0', b".wh.d/f", b"", 0)),
            ("a whiteout that is a directory", header(b'5', b".wh.d", b"", 0)),
            ("climbing link", header(b'1', b"a", b"../../etc/passwd", 0)),
            ("absolute link", header(b'1', b"a", b"/etc/passwd", 0)),
            ("whiteout device", header(b'3', b"dev", b"", 0)),
            ("no name", header(b'0', b"", b"", 0)),
            ("a file that is the top", header(b'0', b"./", b"", 0)),
            ("gnu sparse", header(b'S', b"f", b"", 0)),
            ("global records", header(b'g', b"f", b"", 0)),
            ("a symlink to nothing", header(b'2', b"f", b"", 0)),
            ("content of a directory", header(b'5', b"d", b"", 512)),
            ("records without end", header(b'x', b"p", b"", u64::MAX >> 8)),
            ("cut content", header(b'0', b"f", b"", 4000)),
            ("cut header", header(b'0', b"f", b"", 0)[..100].to_vec()),
            ("records at the end", header(b'x', b"p", b"", 0)),
            ("overlay mark", record("SCHILY.xattr.trusted.overlay.redirect=/etc")),
            ("user overlay mark", record("SCHILY.xattr.user.overlay.opaque=y")),
            ("overlay mark set apart", record("OVERFENCE.xattr.trusted.overlay.opaque=y")),
            ("plain attribute set apart", record("OVERFENCE.xattr.user.note=y")),
            ("true path of a plain name", record("OVERFENCE.path=.wh.f")),
            ("climbing record", record("path=../abc")),
            ("absolute record", record("path=/etc/")),
            ("record length", pax(b"99999999999999999999 path=a\n")),
            ("record length lies", pax(b"12 path=a\n")),
            ("record without end", pax(b"9 path=ab")),
            ("negative size", record("size=-5")),
            ("uid too big", record("uid=4294967296")),
            ("uid of nobody", record("uid=4294967295")),
            ("gid of nobody", record("gid=4294967295")),
            ("mtime words", record("mtime=today")),
            ("sparse by record", record("GNU.sparse.major=1")),
        ] {
            let outcome = fuzz_entries(&archive);
            assert!(outcome.is_err(), "{what} was taken: {outcome:?}");
        }
        let mut bad_sum = header(b'0', b"f", b"", 0);
        bad_sum[0] = b'g';
        assert!(fuzz_entries(&bad_sum).is_err());
        assert_eq!(fuzz_entries(&header(b'0', b"f", b"", 0)).unwrap(), 1, "the helper is sound");
        for sound in ["path=abcdef", "uid=4294967294", "mtime=-1.5", "SCHILY.xattr.user.a=b"] {
            assert_eq!(fuzz_entries(&record(sound)).unwrap(), 1, "{sound} was refused");
        }
    }

    /// What the writer takes the reader takes, at each limit of the reader and beyond it.
    #[test]
    fn what_no_reader_would_take_is_not_written() {
        let fat = |bytes: usize| {
            let part = |n: usize| (format!("user.{n}").into_bytes(), vec![7; bytes / 64]);
            Meta { xattrs: (0..64).map(part).collect(), ..Meta::default() }
        };
        let whole = MAX_RECORDS as usize;
        // Escaped, each of these names has 24 bytes.
        let deep = |levels: usize| [&b".wh.x/".repeat(levels)[..], b"f"].concat();
        let long = |bytes: usize| [&b"d/".repeat(bytes / 2)[..], b"f"].concat();
        let plain = Meta::default();
        let (fifo, file) = (Kind::Fifo, Kind::File { size: 0 });
        let link = |target: Vec<u8>| Kind::HardLink { target };
        let symlink = |bytes: usize| Kind::Symlink { target: vec![b't'; bytes] };
        let device = |major, minor| Kind::CharDevice { major, minor };
        for (what, path, kind, meta, sound) in [
            ("attributes", b"f".to_vec(), file.clone(), fat(whole - 4096), true),
            ("too many attributes", b"f".to_vec(), file.clone(), fat(whole), false),
            ("an escaped path", deep(40_000), fifo.clone(), plain.clone(), true),
            ("too long when escaped", deep(44_000), file.clone(), plain.clone(), false),
            ("a long path", long(MAX_PATH - 2), file.clone(), plain.clone(), true),
            ("too long a path", long(MAX_PATH), file.clone(), plain.clone(), false),
            ("a link", b"a".to_vec(), link(deep(40_000)), plain.clone(), true),
            ("too long a link", b"a".to_vec(), link(deep(44_000)), plain.clone(), false),
            ("a symlink", b"s".to_vec(), symlink(4095), plain.clone(), true),
            ("too long a symlink", b"s".to_vec(), symlink(4096), plain.clone(), false),
            ("a device", b"c".to_vec(), device(4095, (1 << 20) - 1), plain.clone(), true),
            ("a device beyond all", b"c".to_vec(), device(4096, 0), plain.clone(), false),
            ("a whiteout in disguise", b"c".to_vec(), device(0, 0), plain.clone(), false),
            (
                "an owner",
                b"f".to_vec(),
                fifo.clone(),
                Meta { uid: u32::MAX - 1, ..plain.clone() },
                true,
            ),
            ("nobody's owner", b"f".to_vec(), file, Meta { uid: u32::MAX, ..plain.clone() }, false),
            ("a name", vec![b'n'; 255], fifo.clone(), plain.clone(), true),
            ("too long a name", vec![b'n'; 256], fifo, plain.clone(), false),
            ("a file with such a name", vec![b'n'; 256], Kind::File { size: 0 }, plain, false),
        ] {
            let mut writer = Writer::new(Vec::new());
            match writer.entry(&path, &kind, &meta) {
                Ok(()) => {
                    assert!(sound, "{what} was written");
                    let list = vec![(path, kind, meta, vec![])];
                    assert!(read_all(&writer.finish().unwrap()) == list, "{what}");
                }
                Err(crate::upper::Error::NotPortable { path: told, .. }) => {
                    assert!(!sound, "{what} was refused");
                    assert_eq!(told.to_string(), crate::upper::Shown::bytes(&path).to_string());
                    assert_eq!(writer.finish().unwrap(), [0; 2 * BLOCK], "{what} left something");
                }
                Err(other) => panic!("{what}: {other}"),
            }
        }
    }

    #[test]
    fn gnu_long_names_of_foreign_layers_are_read() {
        let long = b"d/".repeat(80);
        let mut archive = header(b'L', b"././@LongLink", b"", long.len() as u64);
        archive.extend(&long);
        archive.resize(archive.len().next_multiple_of(BLOCK), 0);
        archive.extend(header(b'5', b"d", b"", 0));
        let entry = Entries::new(&archive[..]).next_entry().unwrap().unwrap();
        assert_eq!(entry.path, long[..long.len() - 1]);
    }

    #[test]
    fn another_tar_reads_what_we_write() {
        let meta =
            Meta { mode: 0o640, mtime_s: 1_700_000_000, mtime_ns: 123_456_789, ..Meta::default() };
        let long = vec![b'n'; 180];
        let archive = write_all(&[
            (b"d".to_vec(), Kind::Directory, meta.clone(), vec![]),
            (long.clone(), Kind::File { size: 3 }, meta, b"abc".to_vec()),
        ]);
        let mut other = tar::Archive::new(&archive[..]);
        let names: Vec<_> =
            other.entries().unwrap().map(|e| e.unwrap().path_bytes().into_owned()).collect();
        assert_eq!(names, [b"d/".to_vec(), long]);
    }
}
