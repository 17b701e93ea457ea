//! What a delta changes: `session diff` and `bundle diff` beside a walker of this file's own, which
//! knows nothing of overlay and compares the tree that was there with the tree that is seen.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use overfence::kernel::walk::Dir;
use overfence::model::view::{Change, Mark, PathText};
use overfence::upper::diff::Diff;
use overfence::upper::lowers::Lowers;
use serde_json::Value;

use crate::agent_process::{Host, id_of, path_of};
use crate::host::{Place, Test};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "a_diff_names_every_kind_of_change", run: every_kind },
        Test { name: "a_diff_is_what_an_independent_walker_finds", run: walked },
        Test { name: "a_diff_is_what_podman_says_where_it_answers", run: podman },
        Test { name: "a_bundles_diff_needs_neither_agent_nor_root", run: anywhere },
        Test { name: "a_diff_that_breaks_off_is_no_answer", run: broken },
        Test { name: "a_hundred_thousand_names_pass_through_bounded_memory", run: many },
    ]
}

/// What a walker sees of one name.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Seen {
    kind: u32,
    mode: u32,
    owner: (u32, u32),
    mtime: (i64, i64),
    content: Vec<u8>,
}

pub fn tree(top: &Path) -> BTreeMap<Vec<u8>, (u32, Vec<u8>)> {
    walk(top).into_iter().map(|(path, seen)| (path, (seen.mode, seen.content))).collect()
}

fn walk(top: &Path) -> BTreeMap<Vec<u8>, Seen> {
    let (mut all, mut todo) = (BTreeMap::new(), vec![PathBuf::new()]);
    while let Some(dir) = todo.pop() {
        for entry in std::fs::read_dir(top.join(&dir)).unwrap() {
            let path = dir.join(entry.unwrap().file_name());
            let full = top.join(&path);
            let meta = full.symlink_metadata().unwrap();
            let content = match meta.file_type() {
                t if t.is_dir() => {
                    todo.push(path.clone());
                    vec![]
                }
                t if t.is_file() => std::fs::read(&full).unwrap(),
                t if t.is_symlink() => {
                    std::fs::read_link(&full).unwrap().as_os_str().as_bytes().to_vec()
                }
                _ => meta.rdev().to_string().into_bytes(),
            };
            let seen = Seen {
                kind: meta.mode() & libc::S_IFMT,
                mode: meta.mode() & 0o7777,
                owner: (meta.uid(), meta.gid()),
                mtime: if meta.is_dir() { (0, 0) } else { (meta.mtime(), meta.mtime_nsec()) },
                content,
            };
            all.insert(path.as_os_str().as_bytes().to_vec(), seen);
        }
    }
    all
}

/// Path to change, as two trees compared say.
fn compared(before: &Path, after: &Path) -> BTreeMap<Vec<u8>, &'static str> {
    let (before, after) = (walk(before), walk(after));
    let names: BTreeSet<_> = before.keys().chain(after.keys()).cloned().collect();
    let mut found = BTreeMap::new();
    for name in names {
        let what = match (before.get(&name), after.get(&name)) {
            (None, _) => "added",
            (_, None) => "deleted",
            (Some(a), Some(b)) if a == b => continue,
            (Some(a), Some(b)) if a.kind != b.kind => "type",
            (Some(a), Some(b)) if a.content != b.content => "modified",
            _ => "metadata",
        };
        found.insert(name, what);
    }
    found
}

fn rows(diff: &Value) -> Vec<(Vec<u8>, Value)> {
    let rows = diff["changes"].as_array().expect("changes").iter();
    rows.map(|row| {
        let path = PathText(row["path"].as_str().unwrap().to_owned()).path().unwrap();
        (path.as_os_str().as_bytes().to_vec(), row.clone())
    })
    .collect()
}

/// Holds a diff against what the two trees say. Names that are gone below an opaque, deleted or
/// replaced directory have no rows: their number is told with it.
fn agrees(diff: &Value, before: &Path, after: &Path) {
    let mut wanted = compared(before, after);
    let mut hidden = 0;
    for (path, row) in rows(diff) {
        let change = row["change"].as_str().unwrap();
        let shown = String::from_utf8_lossy(&path).into_owned();
        let hides = row["hides"].as_u64().unwrap_or(0);
        if hides > 0 {
            let below: Vec<_> = wanted
                .iter()
                .filter(|(name, what)| {
                    **what == "deleted" && name.starts_with(&[&path, &b"/"[..]].concat())
                })
                .map(|(name, _)| name.clone())
                .collect();
            assert_eq!(below.len() as u64, hides, "below {shown}: {row}");
            below.iter().for_each(|name| assert!(wanted.remove(name).is_some()));
            hidden += hides;
        }
        let opaque = row["marks"].as_array().is_some_and(|m| m.contains(&"opaque".into()));
        match wanted.remove(&path) {
            // A new directory in a removed one's place may look the same: what is in it does not.
            Some("metadata") | None if opaque => assert_eq!(change, "modified", "{shown}"),
            Some(what) => assert_eq!(change, what, "{shown}: {row}"),
            // The walker does not look at the top.
            None => assert!(change == "touched" || path.is_empty(), "{shown}: {row}"),
        }
    }
    assert_eq!(wanted, BTreeMap::new(), "changes that the diff does not tell");
    assert_eq!(diff["summary"]["hidden"], hidden);
}

fn same_rows(one: &Value, other: &Value) {
    let (one, other) = (rows(one), rows(other));
    for (a, b) in one.iter().zip(&other) {
        assert_eq!(a.1, b.1);
    }
    assert_eq!(one.len(), other.len());
}

fn sh(dir: &Path, script: &str) {
    let status =
        Command::new("bash").args(["-euc", script]).current_dir(dir).stdin(Stdio::null()).status();
    assert!(status.unwrap().success(), "{script}");
}

/// A tree with one of everything, to be a workspace's first layer.
const BASE: &str = "
    mkdir -p d/deep/er gone/a/b anew/x/y plain to-file; echo 1 > d/deep/er/f; echo 2 > d/mod
    echo 3 > gone/a/b/c; echo 4 > anew/x/y/z; echo 5 > anew/kept; echo 6 > anew/lost
    echo 7 > plain/p; echo 8 > to-file/inner; echo 9 > chmod; echo 10 > touch; echo 11 > to-dir
    echo 12 > over; echo 13 > mover; echo 14 > link-1; ln link-1 link-2; ln -s target sym
    mkfifo pipe; echo 15 > deleted; echo 16 > again; touch -d 2020-01-01 chmod touch again
    truncate -s 1M sparse; echo end >> sparse; echo 17 > $'odd\\n\\xff\\\\x41'; mkdir mode";

const CHANGES: &str = "
    echo more >> d/mod; rm -r gone; rm -r anew; mkdir -p anew/x; echo 5 > anew/kept; echo n > anew/new
    rm -r to-file; echo f > to-file; rm to-dir; mkdir to-dir; echo i > to-dir/i; chmod 600 chmod
    touch -d 2021-01-01 touch; mv mover over; echo x >> link-1; ln -sfn elsewhere sym; rm deleted
    echo new > fresh; mkdir -p made/of/dirs; echo 18 > made/of/dirs/f; echo 0 > tmp; mv tmp d/deep/er/f
    echo y >> $'odd\\n\\xff\\\\x41'; chmod 700 mode; chown 7:7 plain/p; exec 3>>again; exec 3>&-
    truncate -s 2M sparse; rm pipe; mkfifo pipe; echo z > $'tab\\there'";

struct Case {
    host: Host,
    lower: PathBuf,
    opened: Value,
}

impl Case {
    fn new(place: &Place, base: &str) -> Self {
        let mut host = Host::new(place, "h");
        assert!(host.start(None), "{}", host.log());
        let lower = host.dir.join("lower");
        std::fs::create_dir(&lower).unwrap();
        sh(&lower, base);
        let opened = host.must(&[
            "session",
            "open",
            "-w",
            "w",
            "--create",
            "--lower",
            lower.to_str().unwrap(),
            "--ttl",
            "1h",
        ]);
        Self { host, lower, opened }
    }

    fn id(&self) -> String {
        id_of(&self.opened)
    }

    fn merged(&self) -> PathBuf {
        path_of(&self.opened["session"], "merged")
    }

    fn diff(&self) -> Value {
        self.host.must(&["session", "diff", &self.id()])
    }

    fn stop(&self) {
        self.host.ask(&["fence", &self.id(), "--reason", "test", "--wait"]);
        self.host.until(&self.id(), |view| view["state"] == "PRESERVED");
    }

    fn export(&self) -> PathBuf {
        let dest = self.host.dir.join("bundle");
        self.host.must(&["preserved", "export", &self.id(), "--dest", dest.to_str().unwrap()]);
        dest
    }
}

fn every_kind(place: &Place) {
    let case = Case::new(place, BASE);
    assert_eq!(case.diff()["changes"], Value::Array(vec![]), "nothing was changed yet");
    sh(&case.merged(), CHANGES);
    let running = case.diff();
    agrees(&running, &case.lower, &case.merged());
    let all: BTreeMap<_, _> = rows(&running).into_iter().collect();
    let of = |path: &[u8]| all.get(path).unwrap_or_else(|| panic!("no row: {running:#}")).clone();
    let marked = |path: &[u8], mark: &str| {
        of(path)["marks"].as_array().is_some_and(|marks| marks.contains(&mark.into()))
    };
    for (path, change, kind, was, hides) in [
        (&b"gone"[..], "deleted", None, Some("directory"), 3),
        (b"deleted", "deleted", None, Some("file"), 0),
        // x/y, x/y/z, lost.
        (b"anew", "modified", Some("directory"), Some("directory"), 3),
        (b"to-file", "type", Some("file"), Some("directory"), 1),
        (b"to-dir", "type", Some("directory"), Some("file"), 0),
        (b"chmod", "metadata", Some("file"), Some("file"), 0),
        (b"mode", "metadata", Some("directory"), Some("directory"), 0),
        (b"sym", "modified", Some("symlink"), Some("symlink"), 0),
        (b"fresh", "added", Some("file"), None, 0),
        (b"d", "touched", Some("directory"), Some("directory"), 0),
        (b"again", "touched", Some("file"), Some("file"), 0),
    ] {
        let row = of(path);
        let shown = String::from_utf8_lossy(path);
        assert_eq!(row["change"], change, "{shown}: {row}");
        assert_eq!((row["kind"].as_str(), row["was"].as_str()), (kind, was), "{shown}: {row}");
        assert_eq!(row["hides"].as_u64().unwrap_or(0), hides, "{shown}: {row}");
    }
    assert!(marked(b"anew", "opaque"));
    assert!(marked(b"over", "replaced"), "renamed over: {}", of(b"over"));
    assert!(marked(b"d/deep/er/f", "replaced"), "written anew and renamed: {}", of(b"d/deep/er/f"));
    assert!(!marked(b"d/mod", "replaced"), "changed in place: {}", of(b"d/mod"));
    assert!(marked(b"link-1", "link_broken") && !all.contains_key(&b"link-2"[..]));
    assert_eq!(of(b"chmod")["differs"], serde_json::json!(["mode"]));
    assert_eq!(of(b"touch")["differs"], serde_json::json!(["time"]));
    assert_eq!(of(b"plain/p")["differs"], serde_json::json!(["owner"]));
    assert!(all.contains_key(&b"odd\n\xff\\x41"[..]), "a path of any bytes comes back");

    // The same when it is stopped, and in the bundle.
    case.stop();
    let stopped = case.diff();
    assert_eq!(stopped["changes"], running["changes"]);
    assert_eq!(stopped["of"]["state"], "PRESERVED");
    let bundle = case.export();
    let told = case.host.must(&["bundle", "diff", bundle.to_str().unwrap()]);
    same_rows(&told, &running);
    assert_eq!(told["summary"], running["summary"]);

    // For people: a line a change, whatever the names.
    let out = Command::new(&case.host.binary)
        .args(["session", "diff", &case.id()])
        .env("OVERFENCE_SOCKET", case.host.dir.join("run/overfence.sock"))
        .output()
        .unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let lines: Vec<_> = text.lines().collect();
    let shown = running["changes"].as_array().unwrap().iter();
    let shown = shown.filter(|row| row["change"] != "touched").count();
    assert_eq!(lines.len(), shown + 1, "{text}");
    assert!(text.contains("gone/  (3 names below it are gone)"), "{text}");
    assert!(text.contains("odd\\n\\xff\\\\x41"), "{text}");
    case.host.must(&["preserved", "discard", &case.id(), "--yes"]);
}

/// Changes that a seed makes up; nothing in them is known to the diff.
fn shake(dir: &Path, seed: u64, steps: usize) {
    let mut state = seed;
    let mut random = move |n: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    for step in 0..steps {
        let path = |random: &mut dyn FnMut(u64) -> u64| {
            let mut path = dir.to_owned();
            for _ in 0..=random(3) {
                path.push(format!("n{}", random(4)));
            }
            path
        };
        let (a, b) = (path(&mut random), path(&mut random));
        // Most fail for what is there; that is as good as any.
        let _ = match random(12) {
            0..=2 => std::fs::create_dir_all(&a),
            3..=5 => std::fs::write(&a, format!("{step}")),
            6 => std::fs::rename(&a, &b),
            7 => std::fs::remove_file(&a),
            8 => std::fs::remove_dir_all(&a),
            9 => std::os::unix::fs::symlink(format!("t{}", random(3)), &a),
            10 => std::fs::hard_link(&a, &b),
            _ => std::fs::set_permissions(
                &a,
                std::fs::Permissions::from_mode(0o700 + u32::try_from(random(64)).unwrap()),
            ),
        };
    }
}

fn walked(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None), "{}", host.log());
    for seed in 1..=12 {
        eprintln!("seed {seed}");
        let lower = host.dir.join(format!("lower-{seed}"));
        std::fs::create_dir(&lower).unwrap();
        shake(&lower, seed, 400);
        let workspace = format!("w{seed}");
        let opened = host.must(&[
            "session",
            "open",
            "-w",
            &workspace,
            "--create",
            "--lower",
            lower.to_str().unwrap(),
        ]);
        let merged = path_of(&opened["session"], "merged");
        shake(&merged, seed + 1000, 150);
        let diff = host.must(&["session", "diff", &id_of(&opened)]);
        agrees(&diff, &lower, &merged);
        // In a second session the changes are a layer, and what is compared with is two of them.
        host.must(&["session", "close", &id_of(&opened), "--checkpoint"]);
        let second = host.must(&["session", "open", "-w", &workspace]);
        let merged = path_of(&second["session"], "merged");
        let before = host.dir.join(format!("before-{seed}"));
        let status = Command::new("cp").arg("-a").arg(&merged).arg(&before).status().unwrap();
        assert!(status.success());
        shake(&merged, seed + 2000, 150);
        let diff = host.must(&["session", "diff", &id_of(&second)]);
        agrees(&diff, &before, &merged);
        host.must(&["session", "close", &id_of(&second), "--discard", "--yes"]);
    }
}

/// What podman 4.3 is not asked: of a directory in a file's place its diff fails ("not a directory"),
/// and a symlink whose target is not there it calls added. An opaque directory it calls deleted.
const FOR_PODMAN: &str = "
    echo more >> d/mod; rm -r gone; rm -r anew; mkdir -p anew/x; echo 5 > anew/kept; echo n > anew/new
    rm -r to-file; echo f > to-file; chmod 600 chmod; touch -d 2021-01-01 touch; mv mover over
    echo x >> link-1; rm deleted; echo new > fresh; mkdir -p made/of/dirs; echo 18 > made/of/dirs/f
    echo 0 > tmp; mv tmp d/deep/er/f; chmod 700 mode; chown 7:7 plain/p; exec 3>>again; exec 3>&-";

const ENGINE: &str = r#"
    export CONTAINERS_CONF=$PWD/containers.conf TMPDIR=$PWD
    printf '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "none"\nlock_type = "file"\n' \
        > containers.conf
    podman() { command podman --root "$PWD/root" --runroot "$PWD/runroot" --tmpdir "$PWD/tmp" \
        --storage-driver overlay "$@"; }
    tar -C base -c . | podman import -q - base >&2
    id=$(podman create localhost/base /bin/true)
    merged=$(podman mount "$id")
    (cd "$merged"; eval "$CHANGES")
    podman diff "$id" > diff
    podman inspect -f '{{.GraphDriver.Data.UpperDir}}' "$id" > upper
    podman inspect -f '{{.GraphDriver.Data.LowerDir}}' "$id" > lower
    podman umount "$id" >&2"#;

fn podman(place: &Place) {
    // On a file system that can be an upper whatever the host's is; and what podman keeps in /run
    // goes away with the mount namespace.
    for dir in [&place.dir, Path::new("/run")] {
        let (kind, flags) = (Some("tmpfs"), nix::mount::MsFlags::empty());
        nix::mount::mount(kind, dir, kind, flags, None::<&str>).unwrap();
    }
    let base = place.dir.join("base");
    std::fs::create_dir(&base).unwrap();
    sh(&base, BASE);
    let out = Command::new("bash")
        .args(["-euc", ENGINE])
        .current_dir(&place.dir)
        .env("CHANGES", FOR_PODMAN)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    let said = |name: &str| std::fs::read_to_string(place.dir.join(name)).unwrap();
    let open = |name: &str| Dir::open(Path::new(said(name).trim())).unwrap();
    let (upper, lower) = (open("upper"), Lowers::new(vec![open("lower")]));
    let rows: Vec<_> = Diff::new(upper.as_fd(), lower, false, &|| false).unwrap().collect();
    let (mut ours, mut touched) = (BTreeSet::new(), BTreeSet::new());
    for row in rows {
        let row = row.unwrap();
        let word = match row.told.change {
            Change::Touched => {
                touched.insert(format!("C /{}", row.path.0));
                continue;
            }
            Change::Added => "A",
            Change::Deleted => "D",
            Change::Modified if row.told.marks.contains(&Mark::Opaque) => "D",
            _ => "C",
        };
        ours.insert(format!("{word} /{}", row.path.0));
    }
    let theirs: BTreeSet<_> = said("diff").lines().map(str::to_owned).collect();
    let missing: Vec<_> = ours.difference(&theirs).collect();
    assert!(missing.is_empty(), "podman does not say {missing:?}");
    // Directories whose time alone changed, and files written back as they were.
    let more: Vec<_> = theirs.difference(&ours).filter(|line| !touched.contains(*line)).collect();
    assert!(more.is_empty(), "only podman says {more:?}");
    assert!(ours.len() > 15, "{ours:?}");
}

/// The command line as nobody, without an agent.
fn as_nobody(host: &Host, args: &[&str]) -> std::process::Output {
    let binary = host.dir.join("overfence");
    if !binary.exists() {
        std::fs::copy(&host.binary, &binary).unwrap();
    }
    Command::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
        .arg(&binary)
        .args(args)
        .env("OVERFENCE_SOCKET", "/nowhere")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// The compressed tar in a bundle.
fn layer_of(bundle: &Path) -> PathBuf {
    let blobs = std::fs::read_dir(bundle.join("blobs/sha256")).unwrap();
    let mut blobs = blobs.map(|blob| blob.unwrap().path());
    blobs.find(|b| std::fs::read(b).unwrap().starts_with(&[0x28, 0xb5, 0x2f, 0xfd])).unwrap()
}

fn anywhere(place: &Place) {
    let mut case = Case::new(place, BASE);
    sh(&case.merged(), CHANGES);
    case.stop();
    let known = case.diff();
    let bundle = case.export();
    case.host.must(&["preserved", "discard", &case.id(), "--yes"]);
    case.host.stop();
    for dir in [&place.dir, &case.host.dir] {
        std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let out = as_nobody(&case.host, &["bundle", "diff", bundle.to_str().unwrap(), "-o", "json"]);
    assert!(out.status.success(), "{out:?}");
    let told: Value = serde_json::from_slice(&out.stdout).unwrap();
    same_rows(&told, &known);
    // Any other tar reader finds the files as they are.
    let place = case.host.dir.join("unpacked");
    std::fs::create_dir(&place).unwrap();
    let layer = layer_of(&bundle);
    let status = Command::new("tar")
        .args([OsStr::new("--zstd"), "-xf".as_ref(), layer.as_os_str(), "-C".as_ref()])
        .arg(&place)
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    assert_eq!(std::fs::read(place.join("fresh")).unwrap(), b"new\n");
}

fn broken(place: &Place) {
    let case = Case::new(place, BASE);
    sh(&case.merged(), CHANGES);
    sh(&case.merged(), "head -c 3M /dev/urandom > zz-last");
    case.stop();
    let bundle = case.export();
    let layer = layer_of(&bundle);
    let mut bytes = std::fs::read(&layer).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&layer, bytes).unwrap();
    let out = case.host.run(&["bundle", "diff", bundle.to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    assert!(!out.stdout.is_empty(), "it was found while it was read");
    assert!(serde_json::from_slice::<Value>(&out.stdout).is_err(), "half an answer is none");
    assert!(String::from_utf8_lossy(&out.stderr).contains("bundle_invalid"), "{out:?}");
    // Not a bundle, and none at all.
    assert_eq!(case.host.ask(&["bundle", "diff", "/etc"]).0, 1);
    assert_eq!(case.host.ask(&["bundle", "diff", "/nowhere/at/all"]).0, 3);
    assert_eq!(case.host.ask(&["session", "diff", "s-00"]).0, 3);
    case.host.must(&["preserved", "discard", &case.id(), "--yes"]);
}

/// The most memory that a process used, in KiB.
fn peak(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn many(place: &Place) {
    let case = Case::new(place, "echo 1 > f");
    // A name of 100 bytes each: 10 MB of names alone, were they held.
    sh(
        &case.merged(),
        "for d in {1..1000}; do mkdir d$d; (cd d$d; p=$(printf 'x%.0s' {1..96}); \
         touch ${p}{100..199}); done",
    );
    let agent = case.host.agent_pid();
    let before = peak(agent);
    let socket = case.host.dir.join("run/overfence.sock");
    let script = r#"ulimit -v 400000; "$BINARY" session diff "$SESSION" -o json > out; grep -c '"change"' out"#;
    let out = Command::new("bash")
        .args(["-euc", script])
        .current_dir(&case.host.dir)
        .env("BINARY", &case.host.binary)
        .env("SESSION", case.id())
        .env("OVERFENCE_SOCKET", &socket)
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    assert_eq!(String::from_utf8_lossy(&out.stdout).trim(), "101000");
    let grown = peak(agent) - before;
    eprintln!("the agent grew by {grown} KiB");
    assert!(grown < 16 << 10, "the agent grew by {grown} KiB");
    let text = std::fs::read(case.host.dir.join("out")).unwrap();
    let diff: Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(diff["summary"]["added"], 101_000);
    case.host.must(&["session", "close", &case.id(), "--discard", "--yes"]);
}
