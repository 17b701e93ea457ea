//! An upper that was copied from elsewhere, held against a head that went on. Directories stand for
//! layers; overlay's own marks are made by hand.

use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use overfence::kernel::walk::Dir;
use overfence::upper::changes::{Changes, Format};
use overfence::upper::lowers::Lowers;
use overfence::upper::rebase;
use rustix::fs::{CWD, FileType, Mode, XattrFlags};

use crate::host::{Place, Test};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "what_was_published_and_taken_away_does_not_come_back", run: given_up },
        Test { name: "only_names_that_both_changed_are_conflicts", run: conflicts },
        Test { name: "what_the_upper_did_not_change_gives_way", run: gives_way },
    ]
}

/// Makes a tree: `name/` a directory, `-name` a whiteout, `name=text` a file, `!name/` opaque.
fn make(top: &Path, names: &str) {
    std::fs::create_dir(top).unwrap();
    for name in names.split_whitespace() {
        if let Some(dir) = name.strip_prefix('!') {
            std::fs::create_dir_all(top.join(dir)).unwrap();
            let dir = top.join(dir);
            rustix::fs::setxattr(&dir, "trusted.overlay.opaque", b"y", XattrFlags::empty())
                .unwrap();
        } else if let Some(gone) = name.strip_prefix('-') {
            let path = top.join(gone);
            let device = rustix::fs::makedev(0, 0);
            let kind = FileType::CharacterDevice;
            rustix::fs::mknodat(CWD, path, kind, Mode::empty(), device).unwrap();
        } else if let Some((file, text)) = name.split_once('=') {
            let path = top.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text).unwrap();
            let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1);
            std::fs::File::open(&path).unwrap().set_modified(time).unwrap();
        } else {
            std::fs::create_dir_all(top.join(name)).unwrap();
        }
    }
}

struct Case {
    dir: PathBuf,
}

impl Case {
    /// Layers `0`, `1`, ... from the lowest, and the upper.
    fn new(place: &Place, layers: &[&str], upper: &str) -> Self {
        let n = std::fs::read_dir(&place.dir).unwrap().count();
        let dir = place.dir.join(format!("case-{n}"));
        std::fs::create_dir(&dir).unwrap();
        for (n, names) in layers.iter().enumerate() {
            make(&dir.join(n.to_string()), names);
        }
        make(&dir.join("upper"), upper);
        Self { dir }
    }

    fn lowers(&self, layers: &[usize]) -> Lowers {
        let open = |n: &usize| Dir::open(&self.dir.join(n.to_string())).unwrap();
        Lowers::new(layers.iter().map(open).collect())
    }

    fn onto(&self, expected: &[usize], head: &[usize]) -> Vec<String> {
        let upper = Dir::open(&self.dir.join("upper")).unwrap();
        let views = || Ok((self.lowers(expected), self.lowers(head)));
        let found = rebase::onto(upper.as_fd(), views, &|| false).unwrap();
        assert_eq!(found.count, found.paths.len() as u64);
        found.paths.into_iter().map(|path| path.0).collect()
    }

    fn upper(&self) -> Vec<String> {
        let upper = Dir::open(&self.dir.join("upper")).unwrap();
        let all = Changes::new(upper.as_fd(), Format::Trusted).unwrap().skip(1);
        all.map(|change| change.unwrap().to_string()).collect()
    }
}

fn given_up(place: &Place) {
    let own = "d/new=1 e/new=2 e/kept=3 !o/ o/x=4 gone/a=5 f=6 -was";
    let case = Case::new(place, &["d/base=0 o/y=9 was=8"], "d/ e/ e/kept=3 !o/ f/inner=7");
    make(&case.dir.join("own"), own);
    let upper = Dir::open(&case.dir.join("upper")).unwrap();
    let own = Dir::open(&case.dir.join("own")).unwrap();
    rebase::hide_given_up(upper.as_fd(), &own, &|| false).unwrap();
    let want =
        ["+ d/", "- d/new", "+ e/", "+ e/kept", "- e/new", "+ f/", "+ f/inner", "- gone", "! o/"];
    assert_eq!(case.upper(), want);
}

fn conflicts(place: &Place) {
    // Expected is layer 0; the head has layer 1 on top.
    let base = "same=0 a=1 b=2 d/x=3 d/y=4 gone/p=5 gone/q=6 t=7 u/v=8";
    for (head, upper, want) in [
        ("a=changed", "b=mine", &[][..]),
        ("a=changed", "a=mine", &["a"]),
        ("a=changed", "-a", &["a"]),
        ("-a", "a=mine", &["a"]),
        ("-a", "-a", &[]),
        ("d/x=changed", "d/y=mine", &[]),
        ("d/x=changed d/y=changed", "d/y=mine", &["d/y"]),
        ("-d", "d/y=mine", &["d", "d/y"]),
        ("new=theirs", "new=mine", &["new"]),
        ("new/a=theirs", "new/b=mine", &[]),
        ("new/a=theirs", "new/a=mine", &["new/a"]),
        ("new/a=theirs", "!new/ new/b=mine", &["new"]),
        ("new=theirs", "new/b=mine", &["new"]),
        ("gone/p=changed", "-gone", &["gone"]),
        ("gone/r=changed", "-gone", &["gone"]),
        ("gone/p=5", "-gone", &[]),
        ("gone/p=changed", "!gone/ gone/n=mine", &["gone"]),
        ("gone/p=changed", "gone=mine", &["gone"]),
        ("u/v=changed", "u/w=mine", &[]),
        // Written back as it was: the head's change stands.
        ("t=changed", "t=7 b=mine", &[]),
        ("new=theirs", "-new", &[]),
    ] {
        let case = Case::new(place, &[base, head], upper);
        let before = case.upper();
        assert_eq!(case.onto(&[0], &[0, 1]), want, "{head} | {upper}");
        if !want.is_empty() {
            assert_eq!(case.upper(), before, "a refusal changes nothing");
        }
    }
}

fn gives_way(place: &Place) {
    let base = "a=1 b=2 d/x=3";
    let case = Case::new(place, &[base, "a=changed d/n=4"], "a=1 b=mine d/x=3 -nothing");
    let dir = case.dir.join("1/d");
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o711)).unwrap();
    assert!(case.onto(&[0], &[0, 1]).is_empty());
    assert_eq!(case.upper(), ["+ b", "+ d/"]);
    let mode = std::fs::metadata(case.dir.join("upper/d")).unwrap();
    assert_eq!(mode.permissions().mode() & 0o777, 0o711);
}
