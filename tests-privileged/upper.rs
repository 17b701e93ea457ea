//! Uppers that a real overlay made: captured, unpacked, mounted again, removed.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount, umount};
use overfence::kernel::overlay::{self, Spec};
use overfence::model::backing::Backing;
use overfence::model::facts::{Fact, Facts, Proof};
use overfence::model::head::{Digest, Head, HeadAt};
use overfence::model::ids::{Generation, HostId, LeaseId, SessionId};
use overfence::model::time::BootNs;
use overfence::progress::Progress;
use overfence::upper::bundle::{self, Provenance, Readers};
use overfence::upper::changes::{Changes, Format, is_empty};
use overfence::upper::layer::{Captured, Source, Writers, capture};
use overfence::upper::remove::{self, ProvedGone, SessionDirs};
use overfence::upper::store::LayerStore;
use overfence::upper::{Error, Result};
use rustix::fs::{CWD, FileType, IFlags, Mode, OFlags, XattrFlags};
use rustix::io::Errno;

use crate::host::{Place, Test};

macro_rules! tests {
    ($($name:ident),* $(,)?) => { vec![$(Test { name: stringify!($name), run: $name }),*] };
}

pub fn tests() -> Vec<Test> {
    tests![
        what_an_overlay_recorded_is_listed,
        a_captured_upper_mounted_as_a_lower_shows_the_same_tree,
        owners_capabilities_and_acls_survive,
        the_merged_top_keeps_its_owner_and_mode,
        a_plain_directory_with_overlay_marks_is_refused,
        deleted_and_made_anew_in_one_layer_is_opaque,
        hostile_uppers_are_removed_whole,
        a_mount_below_stops_removal_before_it_begins,
        the_walk_itself_crosses_no_mount,
        a_full_disk_leaves_no_bundle_behind,
        a_full_disk_leaves_no_layer_behind,
    ]
}

/// A layer store, a base layer, and the sessions on it.
struct Host {
    store: LayerStore,
    sessions: PathBuf,
    trash: PathBuf,
    base: Digest,
}

impl Host {
    fn new(place: &Place, furnish: impl FnOnce(&Path)) -> Self {
        let at = |name: &str| place.dir.join(name);
        fs::create_dir(at("source")).unwrap();
        fs::create_dir(at("sessions")).unwrap();
        furnish(&at("source"));
        let store = LayerStore::open(&at("layers")).unwrap();
        let fd = File::open(at("source")).unwrap();
        let captured =
            capture(Source::Directory(fd.as_fd()), Writers::Running, &store, &|| false).unwrap();
        Self { store, sessions: at("sessions"), trash: at("trash"), base: captured.diff_id }
    }

    /// Runs `work` in the merged directory of a new session on these layers.
    fn session<T>(
        &self,
        layers: &[Digest],
        work: impl FnOnce(&Path) -> T,
    ) -> (SessionId, SessionDirs, T) {
        let id = SessionId::fresh();
        let dirs = remove::create(&self.sessions, id, Backing::Directory).unwrap();
        let spec = Spec {
            lowers: layers.iter().map(|l| self.store.ensure_tree(*l, &|| false).unwrap()).collect(),
            upper: dirs.upper.clone(),
            work: dirs.work.clone(),
            target: dirs.merged.clone(),
            mapped: None,
        };
        let mounted = overlay::mount(&spec).unwrap();
        let outcome = work(&dirs.merged);
        drop(mounted);
        assert_eq!(overlay::unmount(&dirs.merged).unwrap(), overlay::Unmount::Done);
        (id, dirs, outcome)
    }

    fn capture(&self, upper: &Path) -> Result<Captured> {
        let fd = File::open(upper).unwrap();
        let source = Source::Upper(fd.as_fd(), Format::Trusted);
        capture(source, Writers::Running, &self.store, &|| false)
    }
}

fn gone(id: SessionId) -> ProvedGone {
    let proof = Proof {
        asked: "umount".into(),
        answer: "the test's own mount, unmounted".into(),
        at: BootNs(0),
        took_us: 0,
    };
    let mut facts = Facts::default();
    facts.prove(Fact::Gone, proof);
    ProvedGone::from_facts(id, &facts).unwrap()
}

fn lower(top: &Path) {
    fs::create_dir_all(top.join("dir/sub")).unwrap();
    fs::create_dir_all(top.join("replaced/old")).unwrap();
    fs::create_dir_all(top.join("moved/inner")).unwrap();
    for (name, text) in [
        ("keep", "kept"),
        ("modify", "before"),
        ("delete", "x"),
        ("rename-me", "renamed"),
        ("chmod", "c"),
        ("xattr", "x"),
        ("append", "head "),
        ("dir/gone", "x"),
        ("dir/sub/gone", "x"),
        ("replaced/old/file", "x"),
        ("moved/inner/file", "m"),
        ("linked", "two names"),
    ] {
        fs::write(top.join(name), text).unwrap();
    }
    fs::hard_link(top.join("linked"), top.join("linked-2")).unwrap();
}

fn change(merged: &Path) {
    let at = |name: &str| merged.join(name);
    fs::write(at("new"), "new").unwrap();
    fs::write(at("modify"), "after").unwrap();
    fs::remove_file(at("delete")).unwrap();
    fs::rename(at("rename-me"), at("renamed")).unwrap();
    fs::set_permissions(at("chmod"), fs::Permissions::from_mode(0o4711)).unwrap();
    set(&at("xattr"), "user.note", b"set \n here");
    fs::OpenOptions::new()
        .append(true)
        .open(at("append"))
        .and_then(|mut f| std::io::Write::write_all(&mut f, b"tail"))
        .unwrap();
    fs::remove_dir_all(at("dir/sub")).unwrap();
    fs::remove_file(at("dir/gone")).unwrap();
    fs::remove_dir_all(at("replaced")).unwrap();
    fs::create_dir(at("replaced")).unwrap();
    fs::write(at("replaced/fresh"), "f").unwrap();
    // redirect_dir=off: a lower directory is moved by copying, as mv does after EXDEV.
    let moved = fs::rename(at("moved"), at("moved-away")).unwrap_err();
    assert_eq!(moved.raw_os_error(), Some(libc::EXDEV));
    fs::write(at("linked"), "one name now").unwrap();
    fs::hard_link(at("new"), at("new-2")).unwrap();
    symlink("/etc/passwd", at("link")).unwrap();
    for (name, kind, device) in [
        ("pipe", FileType::Fifo, 0),
        ("device", FileType::CharacterDevice, rustix::fs::makedev(1, 3)),
    ] {
        rustix::fs::mknodat(CWD, at(name), kind, Mode::from_raw_mode(0o640), device).unwrap();
    }
    fs::write(merged.join(std::ffi::OsStr::from_bytes(b"odd \xff\n")), "odd").unwrap();
}

fn set(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::lsetxattr(path, name, value, XattrFlags::empty()).unwrap();
}

fn get(path: &Path, name: &str) -> Vec<u8> {
    let mut buffer = vec![0; 4096];
    let len = rustix::fs::lgetxattr(path, name, &mut buffer[..]).unwrap();
    buffer.truncate(len);
    buffer
}

/// Everything that can be seen of a tree, by path; the top directory's own metadata left out.
fn picture(top: &Path) -> BTreeMap<Vec<u8>, String> {
    let mut all = BTreeMap::new();
    let mut waiting = vec![top.to_owned()];
    while let Some(dir) = waiting.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let meta = path.symlink_metadata().unwrap();
            let content = match meta.file_type() {
                t if t.is_file() => format!("{:?}", fs::read(&path).unwrap()),
                t if t.is_symlink() => format!("-> {:?}", fs::read_link(&path).unwrap()),
                t if t.is_char_device() => format!("device {}", meta.rdev()),
                _ => String::new(),
            };
            if meta.is_dir() {
                waiting.push(path.clone());
            }
            let mut names = vec![0; 4096];
            let len = rustix::fs::llistxattr(&path, &mut names[..]).unwrap();
            let xattrs: Vec<_> = names[..len]
                .split(|b| *b == 0)
                .filter(|n| !n.is_empty())
                .map(|n| {
                    let name = std::str::from_utf8(n).unwrap();
                    (name.to_owned(), get(&path, name))
                })
                .collect();
            let links = if meta.is_dir() { 0 } else { meta.nlink() };
            all.insert(
                path.strip_prefix(top).unwrap().as_os_str().as_bytes().to_vec(),
                format!(
                    "{:o} {}:{} {}.{} links {links} {xattrs:?} {content}",
                    meta.mode(),
                    meta.uid(),
                    meta.gid(),
                    meta.mtime(),
                    meta.mtime_nsec()
                ),
            );
        }
    }
    all
}

fn what_an_overlay_recorded_is_listed(place: &Place) {
    let host = Host::new(place, lower);
    let (_, dirs, empty) = host.session(&[host.base], |merged| {
        let upper = File::open(merged.parent().unwrap().join("upper")).unwrap();
        let empty = is_empty(upper.as_fd()).unwrap();
        change(merged);
        assert!(!is_empty(upper.as_fd()).unwrap());
        empty
    });
    assert!(empty, "a mount alone puts nothing into the upper");
    let upper = File::open(&dirs.upper).unwrap();
    let list: Vec<_> = Changes::new(upper.as_fd(), Format::Trusted)
        .unwrap()
        .map(|c| c.unwrap().to_string())
        .collect();
    let want = [
        "+ (top directory)/",
        "+ append",
        "+ chmod",
        "- delete",
        "+ device",
        "+ dir/",
        "- dir/gone",
        "- dir/sub",
        "+ link",
        "+ linked",
        "+ modify",
        "+ new",
        "+ new-2",
        "+ odd \\xff\\n",
        "+ pipe",
        "- rename-me",
        "+ renamed",
        "! replaced/",
        "+ replaced/fresh",
        "+ xattr",
    ];
    assert_eq!(list, want);
}

fn a_captured_upper_mounted_as_a_lower_shows_the_same_tree(place: &Place) {
    let host = Host::new(place, lower);
    let (_, dirs, before) = host.session(&[host.base], |merged| {
        change(merged);
        // A socket cannot be captured; it must not disturb the rest.
        drop(std::os::unix::net::UnixListener::bind(merged.join("socket")).unwrap());
        let mut seen = picture(merged);
        seen.remove(&b"socket"[..]).unwrap();
        seen
    });
    let first = host.capture(&dirs.upper).unwrap();
    let again = host.capture(&dirs.upper).unwrap();
    assert_eq!((first.diff_id, first.skipped_sockets), (again.diff_id, 1), "same upper, same name");
    // 19 changes below the top, the top itself, one opaque marker; the socket is not there.
    assert_eq!(first.entries, 21);

    let tree = host.store.ensure_tree(first.diff_id, &|| false).unwrap();
    assert_eq!(host.capture(&tree).unwrap().diff_id, first.diff_id, "a tree is an upper again");
    let (_, next, after) = host.session(&[host.base, first.diff_id], picture);
    assert_eq!(before, after);
    assert!(is_empty(File::open(&next.upper).unwrap().as_fd()).unwrap());
}

fn owners_capabilities_and_acls_survive(place: &Place) {
    // cap_net_raw=ep, version 2; and user::rw-,user:1000:r--,group::r--,mask::r--,other::---.
    let caps = [1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut acl = vec![2, 0, 0, 0];
    for (tag, perm, id) in [
        (1u16, 6u16, u32::MAX),
        (2, 4, 1000),
        (4, 4, u32::MAX),
        (16, 4, u32::MAX),
        (32, 0, u32::MAX),
    ] {
        acl.extend(tag.to_le_bytes());
        acl.extend(perm.to_le_bytes());
        acl.extend(id.to_le_bytes());
    }
    let host = Host::new(place, |top| fs::write(top.join("tool"), "t").unwrap());
    let (_, dirs, ()) = host.session(&[host.base], |merged| {
        let (tool, secret) = (merged.join("tool"), merged.join("secret"));
        chown(&tool, Some(1000), Some(4_000_000_000)).unwrap();
        fs::set_permissions(&tool, fs::Permissions::from_mode(0o6755)).unwrap();
        set(&tool, "security.capability", &caps);
        fs::write(&secret, "s").unwrap();
        set(&secret, "system.posix_acl_access", &acl);
        set(&secret, "trusted.ours", b"\0\n=");
    });
    let layer = host.capture(&dirs.upper).unwrap().diff_id;
    host.session(&[host.base, layer], |merged| {
        let (tool, secret) = (merged.join("tool"), merged.join("secret"));
        let meta = tool.metadata().unwrap();
        assert_eq!((meta.uid(), meta.gid()), (1000, 4_000_000_000));
        assert_eq!(meta.mode() & 0o7777, 0o6755, "a change of owner drops setuid");
        assert_eq!(get(&tool, "security.capability"), caps, "and capabilities");
        assert_eq!(get(&secret, "system.posix_acl_access"), acl);
        assert_eq!(get(&secret, "trusted.ours"), b"\0\n=");
    });
}

fn the_merged_top_keeps_its_owner_and_mode(place: &Place) {
    let host = Host::new(place, |top| fs::write(top.join("f"), "f").unwrap());
    let (_, dirs, ()) = host.session(&[host.base], |merged| {
        chown(merged, Some(1000), Some(1001)).unwrap();
        fs::set_permissions(merged, fs::Permissions::from_mode(0o2770)).unwrap();
        set(merged, "user.note", b"top");
    });
    let layer = host.capture(&dirs.upper).unwrap().diff_id;
    let top = File::open(host.store.ensure_tree(layer, &|| false).unwrap()).unwrap();
    host.session(&[host.base, layer], |merged| {
        let upper = File::open(merged.parent().unwrap().join("upper")).unwrap();
        overfence::upper::copy_top(top.as_fd(), upper.as_fd()).unwrap();
        let meta = merged.metadata().unwrap();
        assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (1000, 1001, 0o2770));
        assert_eq!(get(merged, "user.note"), b"top");
        assert!(is_empty(upper.as_fd()).unwrap());
    });
}

fn a_plain_directory_with_overlay_marks_is_refused(place: &Place) {
    let host = Host::new(place, |_| ());
    let plain = place.dir.join("plain");
    let spoil: [&dyn Fn(); 2] = [
        &|| {
            let path = plain.join("wh");
            rustix::fs::mknodat(CWD, path, FileType::CharacterDevice, Mode::empty(), 0).unwrap();
        },
        &|| {
            fs::create_dir(plain.join("opaque")).unwrap();
            set(&plain.join("opaque"), "trusted.overlay.opaque", b"y");
        },
    ];
    for spoil in spoil {
        fs::create_dir(&plain).unwrap();
        spoil();
        let fd = File::open(&plain).unwrap();
        let outcome =
            capture(Source::Directory(fd.as_fd()), Writers::Running, &host.store, &|| false);
        assert!(matches!(outcome, Err(Error::NotPortable { .. })), "{outcome:?}");
        fs::remove_dir_all(&plain).unwrap();
    }
}

fn deleted_and_made_anew_in_one_layer_is_opaque(place: &Place) {
    use sha2::Digest as _;
    let host = Host::new(place, |top| {
        for dir in ["a", "b"] {
            fs::create_dir(top.join(dir)).unwrap();
            fs::write(top.join(dir).join("old"), "x").unwrap();
        }
    });
    // Other tools write a whiteout beside what is made anew, in either order.
    let mut tar = tar::Builder::new(Vec::new());
    for name in [".wh.a", "a/", "a/new", "b/", "b/new", ".wh.b"] {
        let mut header = tar::Header::new_ustar();
        let dir = name.ends_with('/');
        header.set_entry_type(if dir {
            tar::EntryType::Directory
        } else {
            tar::EntryType::Regular
        });
        header.set_mode(0o755);
        header.set_size(0);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        tar.append_data(&mut header, name, std::io::empty()).unwrap();
    }
    let tar = tar.into_inner().unwrap();
    let id = Digest(sha2::Sha256::digest(&tar).into());
    let blob = zstd::encode_all(&tar[..], 1).unwrap();
    host.store.import(&blob[..], id, 1 << 20).unwrap();
    let (_, _, seen) = host.session(&[host.base, id], picture);
    let names: Vec<_> = seen.keys().map(|k| std::str::from_utf8(k).unwrap()).collect();
    assert_eq!(names, ["a", "a/new", "b", "b/new"]);
}

fn flag(path: &Path, flags: IFlags) {
    let fd = File::open(path).unwrap();
    let now = rustix::fs::ioctl_getflags(&fd).unwrap();
    rustix::fs::ioctl_setflags(&fd, now | flags).unwrap();
}

fn hostile_uppers_are_removed_whole(place: &Place) {
    let outside = place.dir.join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("precious"), "kept").unwrap();
    let host = Host::new(place, lower);
    let (id, dirs, ()) = host.session(&[host.base], |merged| {
        change(merged);
        symlink(&outside, merged.join("out")).unwrap();
        symlink("../../../../outside/precious", merged.join("up")).unwrap();
    });
    let work = dirs.work.join("work");
    assert_eq!(work.metadata().unwrap().mode() & 0o7777, 0, "overlay leaves work/work closed");

    let upper = |name: &str| dirs.upper.join(name);
    fs::create_dir_all(upper("sealed/in")).unwrap();
    fs::write(upper("sealed/in/file"), "x").unwrap();
    fs::write(upper("log"), "x").unwrap();
    flag(&upper("log"), IFlags::APPEND);
    for path in ["sealed/in/file", "sealed/in", "sealed"] {
        flag(&upper(path), IFlags::IMMUTABLE);
    }
    flag(&dirs.upper, IFlags::IMMUTABLE);
    assert_eq!(
        rustix::fs::unlink(upper("log")),
        Err(Errno::PERM),
        "the flags hold before the removal"
    );
    // Paths in it are longer than the kernel takes.
    let open = OFlags::RDONLY | OFlags::DIRECTORY;
    let mut fd = rustix::fs::open(&dirs.work, open, Mode::empty()).unwrap();
    let name = "d".repeat(200);
    for _ in 0..500 {
        rustix::fs::mkdirat(&fd, &*name, Mode::empty()).unwrap();
        fd = rustix::fs::openat(&fd, &*name, open, Mode::empty()).unwrap();
    }
    drop(fd);

    let removed =
        remove::remove(&host.sessions, &gone(id), &host.trash, &Progress::default()).unwrap();
    assert!(removed.entries > 500, "{removed:?}");
    assert!(!dirs.root.exists());
    assert_eq!(fs::read_dir(&host.trash).unwrap().count(), 0);
    assert_eq!(host.trash.metadata().unwrap().mode() & 0o7777, 0o700);
    assert_eq!(fs::read(outside.join("precious")).unwrap(), b"kept");
}

fn a_mount_below_stops_removal_before_it_begins(place: &Place) {
    let outside = place.dir.join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("precious"), "kept").unwrap();
    let sessions = place.dir.join("sessions");
    let trash = place.dir.join("trash");
    fs::create_dir(&sessions).unwrap();
    let id = SessionId::fresh();
    let dirs = remove::create(&sessions, id, Backing::Directory).unwrap();
    fs::write(dirs.upper.join("file"), "x").unwrap();
    fs::create_dir(dirs.upper.join("mnt")).unwrap();
    let bind = |at: &Path| {
        mount(Some(&outside), at, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    };
    bind(&dirs.upper.join("mnt"));
    let error = remove::remove(&sessions, &gone(id), &trash, &Progress::default()).unwrap_err();
    assert!(matches!(&error, Error::Mounted { mounts, .. } if mounts.ends_with("upper/mnt")));
    assert!(dirs.upper.join("file").exists(), "nothing was removed");
    umount(&dirs.upper.join("mnt")).unwrap();

    remove::remove(&sessions, &gone(id), &trash, &Progress::default()).unwrap();
    assert_eq!(fs::read(outside.join("precious")).unwrap(), b"kept");
}

/// Layers are removed without a look at mountinfo: the walk itself must not cross.
fn the_walk_itself_crosses_no_mount(place: &Place) {
    let outside = place.dir.join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("precious"), "kept").unwrap();
    let host = Host::new(place, |top| fs::create_dir_all(top.join("a/mnt")).unwrap());
    let point = host.store.ensure_tree(host.base, &|| false).unwrap().join("a/mnt");
    mount(Some(&outside), &point, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    host.store.settle([host.base]);
    let error = host.store.remove(&host.store.doom(host.base).unwrap()).unwrap_err();
    assert_eq!(error.errno(), Some(Errno::BUSY), "{error}");
    assert_eq!(fs::read(outside.join("precious")).unwrap(), b"kept");
    // The store forgot the layer by then; the sweep at the next start finishes once it can.
    assert_eq!(host.store.list().unwrap(), []);
    let moved = fs::read_dir(place.dir.join("layers")).unwrap().next().unwrap().unwrap().path();
    umount(&moved.join("tree/a/mnt")).unwrap();
    assert_eq!(host.store.sweep().unwrap(), 1);
    assert!(!moved.exists());
}

fn provenance(id: SessionId) -> Provenance {
    Provenance {
        workspace: "w".parse().unwrap(),
        session: id,
        lease: LeaseId::from_u128(1),
        generation: Generation(1),
        host: HostId::from_u128(1),
        base: Head::default(),
        expected: HeadAt::default(),
        reason: "test".into(),
        opened_at: jiff::Timestamp::UNIX_EPOCH,
        lease_ended_at: None,
        exported_at: jiff::Timestamp::UNIX_EPOCH,
        statement: bundle::STATEMENT.into(),
        stable: true,
        read_again: None,
        changed: 0,
        skipped_sockets: 0,
        escaped: Default::default(),
        evidence: serde_json::Value::Null,
    }
}

fn export(host: &Host, layer: Digest, id: SessionId, dest: &Path) -> Result<bundle::Bundle> {
    bundle::export(&host.store, layer, &provenance(id), dest, Readers::Owner, &|| false)
}

/// Bytes that do not compress.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 1u64;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    })
    .take(len)
    .collect()
}

/// Mounts a tmpfs of one MiB.
fn tiny(place: &Place) -> PathBuf {
    let dir = place.dir.join("tiny");
    fs::create_dir(&dir).unwrap();
    mount(Some("tiny"), &dir, Some("tmpfs"), MsFlags::empty(), Some("size=1m")).unwrap();
    dir
}

fn a_full_disk_leaves_no_bundle_behind(place: &Place) {
    let host = Host::new(place, |_| ());
    let (id, dirs, ()) = host.session(&[host.base], |merged| {
        fs::write(merged.join("big"), noise(3 << 20)).unwrap();
        fs::write(merged.join("small"), "s").unwrap();
    });
    let layer = host.capture(&dirs.upper).unwrap().diff_id;
    let tiny = tiny(place);
    let error = export(&host, layer, id, &tiny.join("b")).unwrap_err();
    assert_eq!(error.errno(), Some(Errno::NOSPC), "{error}");
    assert_eq!(fs::read_dir(&tiny).unwrap().count(), 0, "something was left");
    umount(&tiny).unwrap();
    // Where there is room the same export works, and can be read without root's store.
    let made = export(&host, layer, id, &place.dir.join("b")).unwrap();
    assert_eq!(bundle::verify(&place.dir.join("b"), &|| false).unwrap(), made);
}

fn a_full_disk_leaves_no_layer_behind(place: &Place) {
    let tiny = tiny(place);
    let store = LayerStore::open(&tiny.join("layers")).unwrap();
    let source = place.dir.join("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("big"), noise(3 << 20)).unwrap();
    let fd = File::open(&source).unwrap();
    let outcome = capture(Source::Directory(fd.as_fd()), Writers::Running, &store, &|| false);
    assert_eq!(outcome.unwrap_err().errno(), Some(Errno::NOSPC));
    // Zeros compress into the store but are sparse in the tree; data that does not fit the tree
    // leaves the layer, without a tree.
    fs::write(source.join("big"), [&noise(4096)[..]; 400].concat()).unwrap();
    let layer = capture(Source::Directory(fd.as_fd()), Writers::Running, &store, &|| false)
        .unwrap()
        .diff_id;
    assert_eq!(store.ensure_tree(layer, &|| false).unwrap_err().errno(), Some(Errno::NOSPC));
    assert!(matches!(store.lower_path(layer), Err(Error::NotComplete(_))));
    assert_eq!(fs::read_dir(tiny.join("layers")).unwrap().count(), 1);
    umount(&tiny).unwrap();
}
