//! Tests over several files of this room: capture, store, unpack, bundle. None needs root.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;

use proptest::prelude::*;
use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};

use super::changes::Format;
use super::layer::{Captured, Source, Writers, capture};
use super::store::LayerStore;
use super::tarfmt::{Kind, Meta, Writer};
use super::{Error, Result, path_of};
use crate::model::head::Digest;

pub(super) fn capture_dir(dir: &Path, store: &LayerStore) -> Result<Captured> {
    let fd = File::open(dir).unwrap();
    capture(Source::Directory(fd.as_fd()), Writers::Running, store, &|| false)
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
pub(super) fn furnish(top: &Path) {
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
    let tree = case.store.ensure_tree(first.diff_id, &|| false).unwrap();
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

/// Captures as a session's upper, which may hold what a first layer may not.
fn capture_upper(dir: &Path, store: &LayerStore) -> Result<Captured> {
    let fd = File::open(dir).unwrap();
    capture(Source::Upper(fd.as_fd(), Format::Trusted), Writers::Running, store, &|| false)
}

#[test]
fn a_file_whose_name_means_a_deletion_stays_a_file() {
    let case = case();
    let at = |name: &str| case.source.join(name);
    std::fs::create_dir_all(at(".wh.dir/.wh..wh..opq")).unwrap();
    std::fs::write(at(".wh.dir/inner"), b"i").unwrap();
    std::fs::write(at(".wh.file"), b"kept").unwrap();
    std::fs::write(at("file"), b"not deleted").unwrap();
    std::fs::hard_link(at(".wh.file"), at("second")).unwrap();
    std::fs::write(at(".overfence-escaped.wh.file"), b"another").unwrap();
    let long = format!(".wh.{}", "x".repeat(251));
    std::fs::write(at(&long), b"long").unwrap();
    let first = capture_upper(&case.source, &case.store).unwrap();
    assert_eq!(first.escaped.entries, 6, "{:?}", first.escaped);
    let shown = [".wh.file".to_owned(), ".overfence-escaped.wh.file".to_owned()];
    assert!(first.escaped.first.contains(&shown));
    let tree = case.store.ensure_tree(first.diff_id, &|| false).unwrap();
    assert_eq!(capture_upper(&tree, &case.store).unwrap().diff_id, first.diff_id);
    assert_eq!(std::fs::read(tree.join(".wh.file")).unwrap(), b"kept");
    assert_eq!(std::fs::read(tree.join(&long)).unwrap(), b"long");
    let ino = |name: &str| tree.join(name).metadata().unwrap().ino();
    assert_eq!(ino(".wh.file"), ino("second"));

    // Whoever unpacks it by other means finds every byte, and no deletion.
    let tar = case.layers.join("layer.tar");
    let blob = File::open(case.store.blob_path(first.diff_id)).unwrap();
    zstd::stream::copy_decode(blob, File::create(&tar).unwrap()).unwrap();
    let mut names = Vec::new();
    for entry in tar::Archive::new(File::open(&tar).unwrap()).entries().unwrap() {
        let name = entry.unwrap().path_bytes().into_owned();
        assert!(!name.windows(4).any(|w| w == b".wh.") || name.starts_with(b".overfence-"));
        names.push(name);
    }
    assert!(names.contains(&b".overfence-escaped.wh.file".to_vec()));
    assert!(names.contains(&b".overfence-escaped.overfence-escaped.wh.file".to_vec()));
}

#[test]
fn an_attribute_that_looks_like_a_mark_of_overlays_is_carried_apart() {
    let case = case();
    let file = case.source.join("f");
    std::fs::create_dir(&file).unwrap();
    for (name, value) in [("user.overlay.opaque", "y"), ("user.overlay.redirect", "/etc")] {
        rustix::fs::setxattr(&file, name, value.as_bytes(), XattrFlags::empty()).unwrap();
    }
    let error = capture_dir(&case.source, &case.store).unwrap_err();
    assert!(matches!(&error, Error::NotPortable { path, .. } if path.to_string() == "f"));
    let first = capture_upper(&case.source, &case.store).unwrap();
    let tree = case.store.ensure_tree(first.diff_id, &|| false).unwrap();
    let mut value = [0; 16];
    let len = rustix::fs::getxattr(tree.join("f"), "user.overlay.redirect", &mut value).unwrap();
    assert_eq!(&value[..len], b"/etc");
    assert_eq!(capture_upper(&tree, &case.store).unwrap().diff_id, first.diff_id);
    // GNU tar knows no such record, and sets nothing.
    let blob = std::fs::read(case.store.blob_path(first.diff_id)).unwrap();
    let tar = zstd::decode_all(&blob[..]).unwrap();
    let has = |text: &[u8]| tar.windows(text.len()).any(|w| w == text);
    assert!(has(b"OVERFENCE.xattr.user.overlay.opaque=y\n") && !has(b"SCHILY"));
}

#[test]
fn a_terabyte_of_nothing_takes_no_time() {
    use std::os::unix::fs::FileExt as _;
    let case = case();
    let size = 1_u64 << 40;
    let file = File::create(case.source.join("huge")).unwrap();
    file.write_at(b"in the middle", 700 << 30).unwrap();
    file.write_at(b"at the end", size - 10).unwrap();
    file.set_len(size).unwrap();
    File::create(case.source.join("hole")).unwrap().set_len(9 << 30).unwrap();
    let first = capture_dir(&case.source, &case.store).unwrap();
    assert!(first.took < std::time::Duration::from_secs(5), "{:?}", first.took);
    assert!(first.size_uncompressed < 1 << 20, "{}", first.size_uncompressed);
    let tree = case.store.ensure_tree(first.diff_id, &|| false).unwrap();
    assert_eq!(capture_dir(&tree, &case.store).unwrap().diff_id, first.diff_id);
    let mut bytes = [0; 13];
    let copy = File::open(tree.join("huge")).unwrap();
    copy.read_exact_at(&mut bytes, 700 << 30).unwrap();
    assert_eq!((&bytes, copy.metadata().unwrap().len()), (b"in the middle", size));
    assert!(copy.metadata().unwrap().blocks() < 1000);
    assert_eq!(tree.join("hole").metadata().unwrap().len(), 9 << 30);
}

#[test]
fn a_capture_that_is_not_wanted_any_more_ends_and_leaves_nothing() {
    let case = case();
    let file = File::create(case.source.join("f")).unwrap();
    std::os::unix::fs::FileExt::write_at(&file, &[7; 3 << 20], 0).unwrap();
    let fd = File::open(&case.source).unwrap();
    for asked in [0, 1, 5, 30, 60] {
        let left = std::sync::atomic::AtomicU32::new(asked);
        // Once not wanted, never wanted again.
        let stop = || left.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1)).is_err();
        let source = Source::Directory(fd.as_fd());
        let outcome = capture(source, Writers::Running, &case.store, &stop);
        assert!(matches!(outcome, Err(Error::Stopped)), "{asked}: {outcome:?}");
        assert_eq!(std::fs::read_dir(&case.layers).unwrap().count(), 0);
    }
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
    super::remove::tests::deepen(&case.source, 10_000, "d");
    let first = capture_dir(&case.source, &case.store).unwrap();
    assert_eq!(first.entries, 10_002);
    assert_eq!(super::size::size(&case.source).unwrap().1, 10_001);
    let tree = case.store.ensure_tree(first.diff_id, &|| false).unwrap();
    assert_eq!(capture_dir(&tree, &case.store).unwrap().diff_id, first.diff_id);
    super::remove::remove_tree(&case.source).unwrap();
    assert!(case.store.doom(first.diff_id).is_none(), "it is not said yet where it is named");
    case.store.settle([first.diff_id, first.diff_id]);
    case.store.remove(&case.store.doom(first.diff_id).unwrap()).unwrap();
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
    let tree = case.store.ensure_tree(id, &|| false).unwrap();
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
        assert!(case.store.ensure_tree(id, &|| false).is_err(), "byte {at}");
        assert!(case.store.lower_path(id).is_err());
    }
    std::fs::write(&blob, [&good[..], b"more"].concat()).unwrap();
    assert!(case.store.ensure_tree(id, &|| false).is_err(), "bytes after the end");
    std::fs::write(&blob, &good).unwrap();
    case.store.ensure_tree(id, &|| false).unwrap();
}

/// A compressed archive with these entries, and its diff id.
fn archive(entries: &[(&[u8], Kind)]) -> (Vec<u8>, Digest) {
    let mut out = Writer::new(Vec::new());
    let info = std::fs::metadata("/proc/self").unwrap();
    let meta = Meta { mode: 0o755, uid: info.uid(), gid: info.gid(), ..Meta::default() };
    for (path, kind) in entries {
        out.entry(path, kind, &meta).unwrap();
    }
    named(out.finish().unwrap())
}

fn named(tar: Vec<u8>) -> (Vec<u8>, Digest) {
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
        ("a whiteout through a symlink", vec![(b"a", link()), (b"a/secret", Kind::Whiteout)]),
        ("an opaque mark through a symlink", vec![(b"a", link()), (b"a", Kind::Opaque)]),
        ("a hard link to nothing", vec![(b"b", hard(b"nothing"))]),
        ("a hard link to a directory", vec![(b"d", Kind::Directory), (b"b", hard(b"d"))]),
        ("a file over a directory", vec![(b"d", Kind::Directory), (b"d", file())]),
    ];
    for (what, entries) in list {
        let (blob, id) = archive(&entries);
        case.store.import(&blob[..], id, 1 << 20).unwrap();
        let outcome = case.store.ensure_tree(id, &|| false);
        let hostile = matches!(&outcome, Err(Error::Damaged { layer, why }) if *layer == id && why.starts_with("entry "));
        assert!(hostile, "{what}: {outcome:?}");
        let inside: Vec<_> = std::fs::read_dir(&outside).unwrap().collect();
        assert_eq!(inside.len(), 1, "{what}");
        assert!(!case.layers.join(id.hex()).join("tree").exists(), "{what}");
    }
    assert_eq!(std::fs::read(outside.join("secret")).unwrap(), b"kept");
    // The helper is sound: the same things inside of the tree are taken.
    let (blob, id) = archive(&[(b"d/e", file()), (b"b", hard(b"d/e")), (b"b", link())]);
    case.store.import(&blob[..], id, 1 << 20).unwrap();
    case.store.ensure_tree(id, &|| false).unwrap();
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
    // What no writer of ours makes.
    for name in [".wh.", ".wh...", ".wh..wh.plnk", ".wh.d/f", ".wh..wh..opq"] {
        let mut header = tar::Header::new_ustar();
        header.set_path(name).unwrap();
        header.set_size(0);
        for set in [tar::Header::set_mode, |h: &mut tar::Header, _| h.set_mtime(0)] {
            set(&mut header, 0);
        }
        for set in [tar::Header::set_uid, tar::Header::set_gid] {
            set(&mut header, 0);
        }
        header.set_cksum();
        let tar = [header.as_bytes(), &[0; 1024][..]].concat();
        let (blob, id) = named(tar);
        let outcome = case.store.import(&blob[..], id, 1 << 20);
        assert!(matches!(outcome, Err(Error::Hostile { .. })), "{name}: {outcome:?}");
    }
    assert_eq!(case.store.import(&blob[..], id, 1 << 20).unwrap().diff_id, id);
}

fn odd_name() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>().prop_filter("a name's byte", |b| !b"/\0".contains(b)), 1..40)
        .prop_filter("a name", |n| n != b"." && n != b"..")
}

/// What a generated tree is made of: where below, name, kind, bytes, time.
pub(super) type Node = (prop::sample::Index, Vec<u8>, u8, Vec<u8>, i32, i64);

pub(super) fn nodes() -> impl Strategy<Value = Vec<Node>> {
    let bytes = prop::collection::vec(any::<u8>(), 1..700);
    let node = (
        any::<prop::sample::Index>(),
        odd_name(),
        0..5u8,
        bytes,
        any::<i32>(),
        0..1_000_000_000i64,
    );
    prop::collection::vec(node, 0..14)
}

pub(super) fn plant(top: &Path, nodes: Vec<Node>) {
    let (mut dirs, mut files) = (vec![top.to_owned()], Vec::new());
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
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_tree_survives_the_round_trip(nodes in nodes()) {
        let case = case();
        plant(&case.source, nodes);
        let first = capture_dir(&case.source, &case.store).unwrap();
        let tree = case.store.ensure_tree(first.diff_id, &|| false).unwrap();
        prop_assert_eq!(capture_dir(&tree, &case.store).unwrap().diff_id, first.diff_id);
    }
}

#[test]
fn a_capture_counts_what_size_finds() {
    let tmp = tempfile::tempdir().unwrap();
    let (top, store) = (tmp.path().join("upper"), tmp.path().join("layers"));
    std::fs::create_dir_all(top.join("d/e")).unwrap();
    std::fs::write(top.join("d/small"), b"x").unwrap();
    std::fs::write(top.join("d/large"), vec![7; 3_000_000]).unwrap();
    std::fs::hard_link(top.join("d/large"), top.join("d/e/again")).unwrap();
    std::os::unix::fs::symlink("d", top.join("link")).unwrap();
    // Of a hole nothing is on the disk.
    let sparse = File::create(top.join("sparse")).unwrap();
    sparse.set_len(1 << 30).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, &[7; 100_000], 1 << 20).unwrap();
    let dir = File::open(&top).unwrap();
    // What is not written out yet may not have its blocks.
    rustix::fs::syncfs(&dir).unwrap();
    let (bytes, entries) = super::size::size(&top).unwrap();
    let progress = crate::progress::Progress::default();
    let counted = crate::progress::Counted { stop: || false, progress: &progress };
    let store = LayerStore::open(&store).unwrap();
    let source = Source::Directory(dir.as_fd());
    capture(source, Writers::Running, &store, &counted).unwrap();
    let done = progress.done();
    assert_eq!(done.entries, entries);
    // A run begins and ends at grains that the disk does not know.
    assert!(done.bytes.abs_diff(bytes) <= 2 * 65536, "{done:?}, and there are {bytes}");
    assert!(bytes > 6_000_000, "{bytes}");
}
