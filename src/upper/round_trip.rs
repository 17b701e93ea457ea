//! Tests over several files of this room: capture, store, unpack, bundle. None needs root.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::path::Path;

use proptest::prelude::*;
use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};

use super::layer::{Captured, Source, Writers, capture};
use super::store::LayerStore;
use super::tarfmt::{Kind, Meta, Writer};
use super::{Error, Result, path_of};
use crate::model::head::Digest;

pub(super) fn capture_dir(dir: &Path, store: &LayerStore) -> Result<Captured> {
    let fd = File::open(dir).unwrap();
    capture(Source::Directory(fd.as_fd()), Writers::Running, store)
}

pub(super) fn touch(path: &Path, seconds: i64, nanos: i64) {
    let time = Timespec { tv_sec: seconds, tv_nsec: nanos };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

struct Case {
    _tmp: tempfile::TempDir,
    source: std::path::PathBuf,
    store: LayerStore,
    layers: std::path::PathBuf,
}

fn case() -> Case {
    let tmp = tempfile::tempdir().unwrap();
    let (source, layers) = (tmp.path().join("source"), tmp.path().join("layers"));
    std::fs::create_dir(&source).unwrap();
    Case { source, store: LayerStore::open(&layers).unwrap(), layers, _tmp: tmp }
}

/// A tree with one of everything a plain user can make.
fn furnish(top: &Path) {
    std::fs::create_dir_all(top.join("dir/sub")).unwrap();
    std::fs::write(top.join("dir/file"), b"bytes").unwrap();
    std::fs::hard_link(top.join("dir/file"), top.join("dir/sub/other name")).unwrap();
    std::fs::set_permissions(top.join("dir/file"), PermissionsExt::from_mode(0o4751)).unwrap();
    rustix::fs::setxattr(top.join("dir/file"), "user.a=b%", b"\n\0=", XattrFlags::empty()).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", top.join("link")).unwrap();
    rustix::fs::mknodat(CWD, top.join("pipe"), FileType::Fifo, Mode::from_raw_mode(0o640), 0)
        .unwrap();
    let sparse = File::create(top.join("sparse")).unwrap();
    std::os::unix::fs::FileExt::write_at(&sparse, b"in the middle", 3 << 20).unwrap();
    sparse.set_len(8 << 20).unwrap();
    std::fs::write(top.join("n".repeat(255)), b"").unwrap();
    std::fs::write(top.join(path_of(b"\xff\n\x01")), b"odd").unwrap();
    for (name, s, ns) in [("link", -5, 999_999_999), ("pipe", 1 << 34, 0), ("dir/file", 7, 1)] {
        touch(&top.join(name), s, ns);
    }
    for dir in ["dir/sub", "dir", "."] {
        touch(&top.join(dir), 1_700_000_000, 123_456_789);
    }
}

#[test]
fn a_tree_captured_unpacked_and_captured_again_has_the_same_digest() {
    let case = case();
    furnish(&case.source);
    let first = capture_dir(&case.source, &case.store).unwrap();
    assert_eq!((first.entries, first.skipped_sockets), (10, 0));
    let tree = case.store.ensure_tree(first.diff_id).unwrap();
    assert_eq!(case.store.lower_path(first.diff_id).unwrap(), tree);
    let again = capture_dir(&tree, &case.store).unwrap();
    assert_eq!((again.diff_id, again.blob_digest), (first.diff_id, first.blob_digest));

    let stat = |name: &str| tree.join(name).symlink_metadata().unwrap();
    assert_eq!(stat("dir/file").ino(), stat("dir/sub/other name").ino());
    assert_eq!(stat("dir/file").mode() & 0o7777, 0o4751);
    assert_eq!((stat("link").mtime(), stat("link").mtime_nsec()), (-5, 999_999_999));
    assert_eq!((stat("dir").mtime(), stat("dir").mtime_nsec()), (1_700_000_000, 123_456_789));
    assert_eq!(stat("sparse").len(), 8 << 20);
    assert!(stat("sparse").blocks() * 512 < 1 << 20, "holes stay holes");
    assert_eq!(std::fs::read(tree.join("dir/file")).unwrap(), b"bytes");
    assert_eq!(case.store.list().unwrap(), [first.diff_id]);
}

#[test]
fn plain_tar_unpacks_a_layer_to_the_same_tree() {
    let case = case();
    furnish(&case.source);
    let first = capture_dir(&case.source, &case.store).unwrap();
    let tar = case.layers.join("layer.tar");
    let blob = File::open(case.store.blob_path(first.diff_id)).unwrap();
    zstd::stream::copy_decode(blob, File::create(&tar).unwrap()).unwrap();
    let other = case.layers.join("other");
    std::fs::create_dir(&other).unwrap();
    let status = std::process::Command::new("tar")
        .args(["-x", "-p", "--xattrs", "--xattrs-include=*", "-f"])
        .args([&tar, Path::new("-C"), &other])
        .status()
        .unwrap();
    assert!(status.success());
    assert_eq!(capture_dir(&other, &case.store).unwrap().diff_id, first.diff_id);
}

#[test]
fn the_digest_depends_on_content_alone() {
    let (a, b) = (case(), case());
    furnish(&a.source);
    std::fs::create_dir(b.source.join("dir")).unwrap();
    std::fs::remove_dir(b.source.join("dir")).unwrap();
    furnish(&b.source);
    // What `furnish` leaves to the clock.
    for case in [&a, &b] {
        for name in [&b"sparse"[..], &b"n".repeat(255), b"\xff\n\x01"] {
            touch(&case.source.join(path_of(name)), 1, 2);
        }
    }
    let one = capture_dir(&a.source, &a.store).unwrap().diff_id;
    assert_eq!(capture_dir(&b.source, &b.store).unwrap().diff_id, one);
    touch(&b.source.join("sparse"), 1, 3);
    assert_ne!(capture_dir(&b.source, &b.store).unwrap().diff_id, one, "a nanosecond counts");
}

#[test]
fn names_that_mean_deletions_are_refused() {
    let case = case();
    std::fs::write(case.source.join(".wh.file"), b"").unwrap();
    let error = capture_dir(&case.source, &case.store).unwrap_err();
    assert!(matches!(&error, Error::NotPortable { path, .. } if path.to_string() == ".wh.file"));
    let left: Vec<_> = std::fs::read_dir(&case.layers).unwrap().collect();
    assert!(left.is_empty(), "a refused capture leaves {left:?}");
}

#[test]
fn sockets_are_skipped_and_counted() {
    let case = case();
    let _socket = std::os::unix::net::UnixListener::bind(case.source.join("s")).unwrap();
    let got = capture_dir(&case.source, &case.store).unwrap();
    assert_eq!((got.entries, got.skipped_sockets), (1, 1));
}

#[test]
fn a_tree_deeper_than_path_max_goes_through() {
    let case = case();
    super::remove::tests::deepen(&case.source, 1500, "dddd");
    let first = capture_dir(&case.source, &case.store).unwrap();
    assert_eq!(first.entries, 1502);
    let tree = case.store.ensure_tree(first.diff_id).unwrap();
    assert_eq!(capture_dir(&tree, &case.store).unwrap().diff_id, first.diff_id);
    super::remove::remove_tree(&case.source).unwrap();
    case.store.remove(first.diff_id).unwrap();
    assert!(matches!(case.store.info(first.diff_id), Err(Error::NoLayer(_))));
}

#[test]
fn an_incomplete_tree_is_made_again() {
    let case = case();
    furnish(&case.source);
    let id = capture_dir(&case.source, &case.store).unwrap().diff_id;
    let place = case.layers.join(id.hex());
    std::fs::create_dir_all(place.join("tree/half/made")).unwrap();
    assert!(matches!(case.store.lower_path(id), Err(Error::NotComplete(_))));
    let tree = case.store.ensure_tree(id).unwrap();
    assert!(!tree.join("half").exists());
    std::fs::create_dir_all(case.layers.join(".tmp-0/x")).unwrap();
    assert_eq!(case.store.sweep().unwrap(), 1);
    assert_eq!(case.store.list().unwrap(), [id]);
}

#[test]
fn a_damaged_layer_never_becomes_a_tree() {
    let case = case();
    furnish(&case.source);
    let id = capture_dir(&case.source, &case.store).unwrap().diff_id;
    let blob = case.store.blob_path(id);
    let good = std::fs::read(&blob).unwrap();
    for at in [0, good.len() / 2, good.len() - 1] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        std::fs::write(&blob, &bad).unwrap();
        assert!(case.store.ensure_tree(id).is_err(), "byte {at}");
        assert!(case.store.lower_path(id).is_err());
    }
    std::fs::write(&blob, [&good[..], b"more"].concat()).unwrap();
    assert!(case.store.ensure_tree(id).is_err(), "bytes after the end");
    std::fs::write(&blob, &good).unwrap();
    case.store.ensure_tree(id).unwrap();
}

/// A compressed archive with these entries, and its diff id.
fn archive(entries: &[(&[u8], Kind)]) -> (Vec<u8>, Digest) {
    let mut out = Writer::new(Vec::new());
    let info = std::fs::metadata("/proc/self").unwrap();
    let meta = Meta { mode: 0o755, uid: info.uid(), gid: info.gid(), ..Meta::default() };
    for (path, kind) in entries {
        out.entry(path, kind, &meta).unwrap();
    }
    let tar = out.finish().unwrap();
    use sha2::Digest as _;
    let id = Digest(sha2::Sha256::digest(&tar).into());
    (zstd::encode_all(&tar[..], 1).unwrap(), id)
}

fn file() -> Kind {
    Kind::File { size: 0 }
}

#[test]
fn an_archive_cannot_reach_out_of_its_tree() {
    let case = case();
    let outside = case.source.join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("secret"), b"kept").unwrap();
    let link = || Kind::Symlink { target: outside.to_str().unwrap().into() };
    let hard = |target: &[u8]| Kind::HardLink { target: target.to_vec() };
    type Archive<'a> = Vec<(&'a [u8], Kind)>;
    let list: [(&str, Archive<'_>); 8] = [
        ("a file through a symlink", vec![(b"a", link()), (b"a/new", file())]),
        ("a directory over a symlink's inside", vec![(b"a", link()), (b"a/d/e", file())]),
        ("a hard link through a symlink", vec![(b"a", link()), (b"b", hard(b"a/secret"))]),
        ("a whiteout through a symlink", vec![(b"a", link()), (b"a/.wh.secret", file())]),
        ("an opaque mark through a symlink", vec![(b"a", link()), (b"a/.wh..wh..opq", file())]),
        ("a hard link to nothing", vec![(b"b", hard(b"nothing"))]),
        ("a hard link to a directory", vec![(b"d", Kind::Directory), (b"b", hard(b"d"))]),
        ("a file over a directory", vec![(b"d", Kind::Directory), (b"d", file())]),
    ];
    for (what, entries) in list {
        let (blob, id) = archive(&entries);
        case.store.import(&blob[..], id, 1 << 20).unwrap();
        let outcome = case.store.ensure_tree(id);
        assert!(matches!(outcome, Err(Error::Hostile { .. })), "{what}: {outcome:?}");
        let inside: Vec<_> = std::fs::read_dir(&outside).unwrap().collect();
        assert_eq!(inside.len(), 1, "{what}");
        assert!(!case.layers.join(id.hex()).join("tree").exists(), "{what}");
    }
    assert_eq!(std::fs::read(outside.join("secret")).unwrap(), b"kept");
    // The helper is sound: the same things inside of the tree are taken.
    let (blob, id) = archive(&[(b"d/e", file()), (b"b", hard(b"d/e")), (b"b", link())]);
    case.store.import(&blob[..], id, 1 << 20).unwrap();
    case.store.ensure_tree(id).unwrap();
}

#[test]
fn an_import_is_what_it_was_announced_as() {
    let case = case();
    let (blob, id) = archive(&[(b"f", file())]);
    let other = Digest([7; 32]);
    assert!(matches!(case.store.import(&blob[..], other, 1 << 20), Err(Error::Corrupt { .. })));
    assert!(case.store.import(&blob[..], id, 511).is_err(), "longer than allowed");
    assert!(case.store.import(&blob[..blob.len() - 3], id, 1 << 20).is_err(), "cut");
    assert_eq!(case.store.list().unwrap(), []);
    let reserved: [&[u8]; 5] = [b".wh.", b".wh...", b".wh..wh.plnk", b".wh.d/f", b".wh..wh..opq"];
    for name in reserved {
        let (blob, id) = archive(&[(name, file())]);
        assert!(
            matches!(case.store.import(&blob[..], id, 1 << 20), Err(Error::Hostile { .. })),
            "{}",
            super::Shown::bytes(name)
        );
    }
    assert_eq!(case.store.import(&blob[..], id, 1 << 20).unwrap().diff_id, id);
}

fn odd_name() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>().prop_filter("a name's byte", |b| !b"/\0".contains(b)), 1..40)
        .prop_filter("a name", |n| n != b"." && n != b".." && !n.starts_with(b".wh."))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_tree_survives_the_round_trip(
        nodes in prop::collection::vec(
            (any::<prop::sample::Index>(), odd_name(), 0..5u8,
             prop::collection::vec(any::<u8>(), 1..700), any::<i32>(), 0..1_000_000_000i64),
            0..14,
        )
    ) {
        let case = case();
        let (mut dirs, mut files) = (vec![case.source.clone()], Vec::new());
        let mut stamps = Vec::new();
        for (place, name, kind, bytes, s, ns) in nodes {
            let path = dirs[place.index(dirs.len())].join(path_of(&name));
            if path.symlink_metadata().is_ok() {
                continue;
            }
            match kind {
                0 => {
                    std::fs::create_dir(&path).unwrap();
                    dirs.push(path.clone());
                }
                1 if !files.is_empty() => {
                    std::fs::hard_link(&files[place.index(files.len())], &path).unwrap();
                }
                2 => {
                    let target: Vec<u8> = bytes.iter().copied().filter(|b| *b != 0).collect();
                    if target.is_empty() {
                        continue;
                    }
                    std::os::unix::fs::symlink(path_of(&target), &path).unwrap();
                }
                3 => rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0)
                    .unwrap(),
                _ => {
                    std::fs::write(&path, &bytes).unwrap();
                    let mode = PermissionsExt::from_mode(0o400 | s as u32 & 0o777);
                    std::fs::set_permissions(&path, mode).unwrap();
                    files.push(path.clone());
                }
            }
            stamps.push((path, s, ns));
        }
        for (path, s, ns) in stamps.iter().rev() {
            touch(path, i64::from(*s), *ns);
        }
        let first = capture_dir(&case.source, &case.store).unwrap();
        let tree = case.store.ensure_tree(first.diff_id).unwrap();
        prop_assert_eq!(capture_dir(&tree, &case.store).unwrap().diff_id, first.diff_id);
    }
}
