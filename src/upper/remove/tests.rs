//! Tests of this room's removal.

use super::*;
use crate::model::facts::Proof;
use crate::model::time::BootNs;
use rustix::fs::{Mode, OFlags};

/// Makes a chain of `levels` directories with a file at its end, by descriptor.
pub(in crate::upper) fn deepen(top: &Path, levels: usize, name: &str) {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let mut fd = rustix::fs::open(top, flags, Mode::empty()).unwrap();
    for _ in 0..levels {
        rustix::fs::mkdirat(&fd, name, Mode::from_raw_mode(0o755)).unwrap();
        fd = rustix::fs::openat(&fd, name, flags, Mode::empty()).unwrap();
    }
    let flags = OFlags::WRONLY | OFlags::CREATE;
    rustix::fs::openat(&fd, "file", flags, Mode::from_raw_mode(0o600)).unwrap();
}

fn gone(id: SessionId) -> ProvedGone {
    let mut facts = Facts::default();
    assert!(ProvedGone::from_facts(id, &facts).is_none(), "no proof, no token");
    let proof = Proof { asked: "watch".into(), answer: "died".into(), at: BootNs(1), took_us: 1 };
    facts.prove(Fact::Killed, proof.clone());
    assert!(ProvedGone::from_facts(id, &facts).is_none(), "killed is not gone");
    facts.prove(Fact::Gone, proof);
    ProvedGone::from_facts(id, &facts).unwrap()
}

struct Place {
    _tmp: tempfile::TempDir,
    sessions: PathBuf,
    trash: PathBuf,
    outside: PathBuf,
}

fn place() -> Place {
    let tmp = tempfile::tempdir().unwrap();
    let at = |name: &str| tmp.path().join(name);
    let place =
        Place { sessions: at("sessions"), trash: at("trash"), outside: at("outside"), _tmp: tmp };
    std::fs::create_dir(&place.sessions).unwrap();
    std::fs::create_dir(&place.outside).unwrap();
    std::fs::write(place.outside.join("precious"), b"kept").unwrap();
    place
}

#[test]
fn a_session_directory_is_made_once() {
    let place = place();
    let id = SessionId::fresh();
    let dirs = create(&place.sessions, id, Backing::Directory).unwrap();
    assert_eq!(dirs, SessionDirs::of(&place.sessions, id, Backing::Directory));
    let mode = |p: &Path| std::os::unix::fs::MetadataExt::mode(&p.metadata().unwrap()) & 0o7777;
    let modes = [&dirs.root, &dirs.upper, &dirs.work, &dirs.merged].map(|p| mode(p));
    assert_eq!(modes, [0o700, 0o755, 0o700, 0o755]);
    assert!(matches!(create(&place.sessions, id, Backing::Directory), Err(Error::Exists { .. })));
}

#[test]
fn one_with_an_image_has_its_upper_in_it_and_goes_as_any_other() {
    let place = place();
    let (id, size) = (SessionId::fresh(), "1G".parse().unwrap());
    let dirs = create(&place.sessions, id, Backing::Image { size }).unwrap();
    let image = dirs.image.clone().unwrap();
    assert!(dirs.upper.starts_with(&image.disk) && dirs.work.starts_with(&image.disk));
    assert!(image.disk.is_dir() && !dirs.upper.exists());
    std::fs::write(&image.file, vec![1; 1 << 20]).unwrap();
    let removed = remove(&place.sessions, &gone(id), &place.trash, &Progress::default()).unwrap();
    // The image, its mount point, merged, the marker, the top.
    assert_eq!(removed.entries, 5);
    assert!(removed.bytes >= 1 << 20, "{removed:?}");
    let new = place.sessions.join(format!("{MAKING}{}", SessionId::fresh()));
    std::fs::create_dir_all(Image::below(&new).disk).unwrap();
    assert_eq!(sweep_unfinished(&place.sessions).unwrap(), 1);
}

#[test]
fn what_a_crash_in_create_left_is_swept_by_rmdir_only() {
    let place = place();
    let new = place.sessions.join(format!("{MAKING}{}", SessionId::fresh()));
    std::fs::create_dir_all(new.join("upper")).unwrap();
    std::fs::write(new.join(MARKER), b"half").unwrap();
    assert_eq!(sweep_unfinished(&place.sessions).unwrap(), 1);
    assert!(!new.exists());
    std::fs::create_dir_all(new.join("upper/somebody's")).unwrap();
    assert!(sweep_unfinished(&place.sessions).is_err());
    assert!(new.join("upper/somebody's").exists());
}

#[test]
fn invariant_i6_deletion_stays_inside() {
    let place = place();
    let id = SessionId::fresh();
    let dirs = create(&place.sessions, id, Backing::Directory).unwrap();
    std::os::unix::fs::symlink(&place.outside, dirs.upper.join("dir")).unwrap();
    std::os::unix::fs::symlink(place.outside.join("precious"), dirs.upper.join("f")).unwrap();
    std::os::unix::fs::symlink("../../..", dirs.work.join("up")).unwrap();
    std::fs::write(dirs.upper.join("a"), vec![1; 10_000]).unwrap();
    std::fs::hard_link(dirs.upper.join("a"), dirs.upper.join("b")).unwrap();
    std::fs::create_dir_all(dirs.upper.join("x/y/z")).unwrap();
    let removed = remove(&place.sessions, &gone(id), &place.trash, &Progress::default()).unwrap();
    // 3 symlinks, 2 names, 3 directories; marker, upper, work, merged, the top.
    assert_eq!(removed.entries, 3 + 2 + 3 + 5);
    assert!(removed.bytes >= 10_000, "{removed:?}");
    assert_eq!(std::fs::read(place.outside.join("precious")).unwrap(), b"kept");
    assert!(std::fs::read_dir(&place.trash).unwrap().next().is_none());
    assert!(std::fs::read_dir(&place.sessions).unwrap().next().is_none());
}

#[test]
fn nothing_without_its_marker_is_removed() {
    let place = place();
    let (id, other) = (SessionId::fresh(), SessionId::fresh());
    let dirs = create(&place.sessions, id, Backing::Directory).unwrap();
    let markers: [&dyn Fn(&Path); 3] = [
        &|m| std::fs::remove_file(m).unwrap(),
        &|m| std::fs::write(m, format!("{other}\n")).unwrap(),
        &|m| {
            std::fs::remove_file(m).unwrap();
            std::os::unix::fs::symlink(other.to_string(), m).unwrap();
        },
    ];
    for spoil in markers {
        spoil(&dirs.root.join(MARKER));
        let error =
            remove(&place.sessions, &gone(id), &place.trash, &Progress::default()).unwrap_err();
        assert!(matches!(error, Error::Unmarked { .. }), "{error}");
        assert!(dirs.upper.exists());
    }
    std::fs::create_dir_all(place.trash.join(id.to_string()).join("upper")).unwrap();
    assert!(matches!(empty_trash(&place.trash), Err(Error::Unmarked { .. })));
    std::fs::remove_dir_all(place.trash.join(id.to_string())).unwrap();
    std::fs::create_dir_all(place.trash.join("somebody's")).unwrap();
    assert!(matches!(empty_trash(&place.trash), Err(Error::Unmarked { .. })));
}

#[test]
fn a_removal_is_done_again_without_harm() {
    let place = place();
    let id = SessionId::fresh();
    let dirs = create(&place.sessions, id, Backing::Directory).unwrap();
    std::fs::create_dir(&place.trash).unwrap();
    std::fs::rename(&dirs.root, place.trash.join(id.to_string())).unwrap();
    assert_eq!(
        remove(&place.sessions, &gone(id), &place.trash, &Progress::default()).unwrap().entries,
        5
    );
    assert_eq!(
        remove(&place.sessions, &gone(id), &place.trash, &Progress::default()).unwrap(),
        Removed::default()
    );
}

#[test]
fn a_removal_cut_off_anywhere_is_finished_at_start() {
    let place = place();
    let whole = SessionId::fresh();
    let dirs = create(&place.sessions, whole, Backing::Directory).unwrap();
    std::fs::write(dirs.upper.join("f"), b"x").unwrap();
    std::fs::create_dir(&place.trash).unwrap();
    std::fs::rename(&dirs.root, place.trash.join(whole.to_string())).unwrap();
    // Another one died between its marker and its directory.
    std::fs::create_dir(place.trash.join(SessionId::fresh().to_string())).unwrap();
    let removed = empty_trash(&place.trash).unwrap();
    assert_eq!(removed.entries, 6 + 1);
    assert!(std::fs::read_dir(&place.trash).unwrap().next().is_none());
    assert_eq!(empty_trash(&place.trash.join("never made")).unwrap(), Removed::default());
}

#[test]
fn ten_thousand_levels_and_a_wide_directory_are_removed() {
    let place = place();
    let id = SessionId::fresh();
    let dirs = create(&place.sessions, id, Backing::Directory).unwrap();
    deepen(&dirs.upper, 10_000, "deep");
    for n in 0..3 * super::super::empty::BATCH {
        std::fs::create_dir_all(dirs.work.join(format!("{n}/full"))).unwrap();
    }
    let removed = remove(&place.sessions, &gone(id), &place.trash, &Progress::default()).unwrap();
    assert_eq!(removed.entries, 10_001 + 6 * super::super::empty::BATCH as u64 + 5);
}

#[test]
fn one_removal_that_several_go_on_with_is_done_and_counted_once() {
    let place = place();
    std::fs::create_dir(&place.trash).unwrap();
    for round in 0..5 {
        let id = SessionId::fresh();
        let dirs = create(&place.sessions, id, Backing::Directory).unwrap();
        for n in 0..50 {
            std::fs::create_dir_all(dirs.upper.join(format!("{n}/d"))).unwrap();
            std::fs::write(dirs.upper.join(format!("{n}/d/f")), b"x").unwrap();
        }
        std::fs::rename(&dirs.root, place.trash.join(id.to_string())).unwrap();
        let name = id.to_string();
        let go_on = || {
            let done = finish_removal(&place.trash, OsStr::new(&name));
            let size = crate::upper::size::size(&place.trash.join(&name));
            assert!(size.is_ok(), "{size:?}");
            done
        };
        let done = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(go_on)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        let removed = done.iter().flatten().map(|removed| removed.entries).sum::<u64>();
        assert_eq!(removed, 150 + 5, "round {round}: {done:?}");
        for fault in done.iter().filter_map(|done| done.as_ref().err()) {
            assert!(matches!(fault, Error::Removing { .. }), "round {round}: {fault}");
        }
        assert!(!place.trash.join(&name).exists());
    }
}

/// Names change under the walk: directories go round, out of the tree and back, and symlinks that lead
/// outside take their places. Whatever it meets, it removes nothing outside, and gets done after that.
#[test]
fn a_removal_beside_renames_stays_inside_and_gets_done() {
    let place = place();
    std::fs::create_dir(&place.trash).unwrap();
    let theirs = place.outside.join("theirs");
    std::fs::create_dir_all(theirs.join("a/b")).unwrap();
    std::fs::write(theirs.join("a/b/precious"), b"kept").unwrap();
    let (mut renames, mut met) = (0, 0);
    for _ in 0..5 {
        let id = SessionId::fresh();
        let name = id.to_string();
        let dirs = create(&place.sessions, id, Backing::Directory).unwrap();
        for n in 0..30 {
            std::fs::create_dir_all(dirs.upper.join(format!("a/{n}/b"))).unwrap();
            std::fs::write(dirs.upper.join(format!("a/{n}/b/f")), b"x").unwrap();
        }
        let trashed = place.trash.join(&name);
        std::fs::rename(&dirs.root, &trashed).unwrap();
        let upper = trashed.join("upper");
        std::thread::scope(|scope| {
            let removal = scope.spawn(|| finish_removal(&place.trash, OsStr::new(&name)));
            let out = place.outside.join("moved");
            for n in (0..30).cycle().take(3000) {
                let at = upper.join(format!("a/{n}"));
                renames += u32::from(std::fs::rename(&at, &out).is_ok());
                let _ = std::os::unix::fs::symlink(&theirs, &at);
                let _ = std::fs::remove_file(&at);
                let _ = std::fs::rename(&out, &at);
                if removal.is_finished() {
                    break;
                }
            }
            // What was outside as its directory went is the mover's.
            let _ = std::fs::remove_dir_all(&out);
            met += u32::from(removal.join().unwrap().is_err());
        });
        finish_removal(&place.trash, OsStr::new(&name)).unwrap();
        assert!(!trashed.exists());
    }
    eprintln!("{renames} renames beside 5 removals, {met} of which met one and were done again");
    assert!(renames > 0, "nothing was raced");
    assert_eq!(std::fs::read(theirs.join("a/b/precious")).unwrap(), b"kept");
    assert_eq!(std::fs::read_dir(&place.outside).unwrap().count(), 2);
}
