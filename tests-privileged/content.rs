//! What a workspace consists of: images taken in as first layers, hostile ones refused, heads set back
//! by a publication, damaged layers named and never mounted. By the real binary.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::agent_process::{Host, id_of, path_of};
use crate::host::{Place, Test, paced_ttl};

mod damage;

pub fn tests() -> Vec<Test> {
    let here = vec![
        Test { name: "an_image_and_a_directory_become_first_layers", run: imported },
        Test { name: "hostile_images_are_refused_and_leave_nothing", run: hostile },
        Test { name: "i1_a_revert_is_a_publication_under_a_lease", run: reverted },
        Test { name: "i8_a_revert_survives_a_kill_at_every_effect", run: killed },
        Test { name: "a_live_checkpoint_freezes_nobody_and_is_of_one_moment", run: live },
        Test { name: "a_version_whose_layers_went_names_those_that_are_left", run: not_kept },
    ];
    here.into_iter().chain(damage::tests()).collect()
}

fn started(place: &Place, name: &str) -> Host {
    let mut host = Host::new(place, name);
    assert!(host.start(None), "{}", host.log());
    host
}

fn refused(host: &Host, code: i32, args: &[&str]) -> String {
    let out = host.run(args);
    let said = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(code), "{args:?}: {said}\n{}", host.log());
    said
}

/// What the workspace's next session sees, by name.
fn seen(host: &Host, workspace: &str) -> BTreeSet<String> {
    let opened = host.open(workspace, &paced_ttl(60));
    let merged = path_of(&opened["session"], "merged");
    let names =
        fs::read_dir(merged).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let names = names.collect();
    host.must(&["session", "close", &id_of(&opened)]);
    names
}

fn publish(host: &Host, file: &str) -> Value {
    let opened = host.open("w", &paced_ttl(60));
    fs::write(path_of(&opened["session"], "merged").join(file), file).unwrap();
    host.must(&["session", "close", &id_of(&opened), "--checkpoint"]);
    host.must(&["workspace", "status", "w"])
}

fn live(place: &Place) {
    let host = started(place, "h");
    let opened = host.open("w", &paced_ttl(60));
    let (id, merged) = (id_of(&opened), path_of(&opened["session"], "merged"));
    let events = path_of(&opened["session"], "cgroup").join("cgroup.events");
    fs::write(merged.join("large"), vec![7; 64 << 20]).unwrap();
    fs::write(merged.join("log"), "").unwrap();
    let version = || host.must(&["workspace", "status", "w"])["version"].clone();
    let before = version();
    // A writer of another file than the one that is being read: each alone would be of one moment.
    let (over, frozen) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut log = fs::File::options().append(true).open(merged.join("log")).unwrap();
            while !over.load(Ordering::Relaxed) {
                log.write_all(b"line\n").unwrap();
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
        });
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let now = fs::read_to_string(&events).unwrap();
                frozen.fetch_or(now.contains("frozen 1"), Ordering::Relaxed);
                std::thread::sleep(std::time::Duration::from_micros(200));
            }
        });
        let said = refused(&host, 4, &["session", "checkpoint", &id, "--live"]);
        over.store(true, Ordering::Relaxed);
        assert!(said.contains("busy") && said.contains("changed while it was read"), "{said}");
    });
    assert!(!frozen.into_inner(), "it was frozen");
    assert_eq!(version(), before);
    assert_eq!(fs::read_dir(host.dir.join("state/layers")).unwrap().count(), 0);
    // Nobody writes: it is published as a checkpoint is, and the session never stood still.
    let done = host.must(&["session", "checkpoint", &id, "--live"]);
    assert_eq!((&done["outcome"], &done["frozen_ms"]), (&json!("committed"), &json!(0)));
    assert_ne!(version(), before);
    host.must(&["session", "close", &id]);
    assert_eq!(seen(&host, "w"), BTreeSet::from(["large", "log"].map(str::to_owned)));
}

fn sha(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// A tar of these entries; what is a link has its target after an arrow, a directory a slash.
fn tar(entries: &[(&str, &str)]) -> Vec<u8> {
    let mut out = tar::Builder::new(Vec::new());
    for (name, content) in entries {
        let mut header = tar::Header::new_ustar();
        header.set_mode(if name.ends_with('/') { 0o755 } else { 0o644 });
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1);
        // Not by `set_path`, which refuses what is hostile.
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        let (kind, link, size) = match content.split_at_checked(2) {
            Some(("->", target)) => (tar::EntryType::Symlink, target, 0),
            Some(("=>", target)) => (tar::EntryType::Link, target, 0),
            _ if name.ends_with('/') => (tar::EntryType::Directory, "", 0),
            _ => (tar::EntryType::Regular, "", content.len() as u64),
        };
        header.as_mut_bytes()[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_size(size);
        header.set_cksum();
        let content = if size == 0 { &b""[..] } else { content.as_bytes() };
        out.append(&header, content).unwrap();
    }
    out.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}

/// A layer as an image has it: type, blob, digest of its tar.
pub type Layer = (&'static str, Vec<u8>, String);

const TYPE: &str = "application/vnd.oci.image.layer.v1.tar";
const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";

pub fn plain(entries: &[(&str, &str)]) -> Layer {
    let tar = tar(entries);
    let digest = sha(&tar);
    (TYPE, tar, digest)
}

/// Writes an OCI image layout.
pub fn image(dir: &Path, layers: &[Layer]) -> PathBuf {
    let blobs = dir.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let put = |kind: &str, bytes: &[u8]| {
        fs::write(blobs.join(sha(bytes)), bytes).unwrap();
        json!({ "mediaType": kind, "digest": format!("sha256:{}", sha(bytes)), "size": bytes.len() })
    };
    let diff_ids: Vec<_> = layers.iter().map(|(_, _, id)| format!("sha256:{id}")).collect();
    let config = json!({ "architecture": "amd64", "os": "linux", "config": {},
        "rootfs": { "type": "layers", "diff_ids": diff_ids } });
    let config = put("application/vnd.oci.image.config.v1+json", config.to_string().as_bytes());
    let layers: Vec<_> = layers.iter().map(|(kind, blob, _)| put(kind, blob)).collect();
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let manifest =
        json!({ "schemaVersion": 2, "mediaType": kind, "config": config, "layers": layers });
    let manifest = put(kind, manifest.to_string().as_bytes());
    let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
    fs::write(dir.join("index.json"), index.to_string()).unwrap();
    fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    dir.to_owned()
}

/// What is done to a good layout.
type Spoil<'a> = &'a dyn Fn(&Path);

fn imported(place: &Place) {
    let host = started(place, "h");
    let first = tar(&[("etc/", ""), ("etc/a", "a"), ("gone", "x"), ("old/", ""), ("old/b", "b")]);
    let third =
        tar(&[("old/", ""), ("old/.wh..wh..opq", ""), ("old/c", "c"), ("link", "->/etc/passwd")]);
    let layers = [
        (GZIP, gzip(&first), sha(&first)),
        plain(&[(".wh.gone", ""), ("two", "2"), ("two-again", "=>two")]),
        (ZSTD, zstd::encode_all(&third[..], 3).unwrap(), sha(&third)),
    ];
    let path = image(&host.dir.join("image"), &layers);
    let path = path.to_str().unwrap();
    let w = host.must(&["workspace", "import", "-w", "w", "--image", path, "--owner", "ann"]);
    assert_eq!((&w["version"], &w["owner"]), (&1.into(), &"ann".into()), "{w:#}");
    assert_eq!(w["head"].as_array().unwrap().len(), 3);
    let opened = host.open("w", &paced_ttl(60));
    let merged = path_of(&opened["session"], "merged");
    let read = |name: &str| fs::read_to_string(merged.join(name)).unwrap();
    assert_eq!(
        (read("etc/a"), read("two-again"), read("old/c")),
        ("a".into(), "2".into(), "c".into())
    );
    assert!(!merged.join("gone").exists() && !merged.join("old/b").exists());
    assert_eq!(fs::read_link(merged.join("link")).unwrap(), Path::new("/etc/passwd"));
    host.must(&["session", "close", &id_of(&opened)]);
    assert_eq!(host.must(&["workspace", "verify", "-w", "w"])["ok"], true);
    // The same content has the same name, however it was packed.
    let again = [(GZIP, gzip(&first), sha(&first))];
    let again = image(&host.dir.join("again"), &again);
    let v = host.must(&["workspace", "import", "-w", "v", "--image", again.to_str().unwrap()]);
    assert_eq!(v["head"][0], w["head"][0]);
    let said = refused(&host, 4, &["workspace", "import", "-w", "w", "--image", path]);
    assert!(said.contains("workspace_exists"), "{said}");
    let tree = host.dir.join("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("f"), "f").unwrap();
    host.must(&["workspace", "import", "-w", "d", "--directory", tree.to_str().unwrap()]);
    assert_eq!(seen(&host, "d"), BTreeSet::from(["f".to_owned()]));
    // What is mounted in it is part of what is seen there, and of no file system that could be read with it.
    let inside = tree.join("mounted");
    fs::create_dir(&inside).unwrap();
    let none = nix::mount::MsFlags::empty();
    nix::mount::mount(Some("x"), &inside, Some("tmpfs"), none, None::<&str>).unwrap();
    let args = ["workspace", "import", "-w", "m", "--directory", tree.to_str().unwrap()];
    let said = refused(&host, 1, &args);
    assert!(said.contains("mounted"), "{said}");
    nix::mount::umount2(&inside, nix::mount::MntFlags::MNT_DETACH).unwrap();
    refused(&host, 2, &["workspace", "import", "-w", "x"]);
    refused(&host, 2, &["workspace", "import", "-w", "x", "--image", path, "--directory", path]);
}

fn hostile(place: &Place) {
    let host = started(place, "h");
    let canary = host.dir.join("canary");
    fs::create_dir(&canary).unwrap();
    fs::write(canary.join("f"), "whole").unwrap();
    let out = canary.join("made").display().to_string();
    let up = format!("{}..{out}", "../".repeat(30));
    let through = format!("->{}", canary.display());
    let to = format!("=>{}", canary.join("f").display());
    let zeros = "\0".repeat(4 << 20);
    let bomb = tar(&[("zeros", &zeros)]);
    let good = tar(&[("f", "f")]);
    let cases: Vec<(&str, Vec<Layer>)> = vec![
        ("its path is absolute", vec![plain(&[(&out, "x")])]),
        ("climbs with `..`", vec![plain(&[(&up, "x")])]),
        ("no directory", vec![plain(&[("l", &through), ("l/made", "x")])]),
        ("absolute", vec![plain(&[("h", &to)])]),
        ("links to no earlier file", vec![plain(&[("h", "=>nothing")])]),
        ("twice", vec![plain(&[("a", "1"), ("b", "2"), ("a", "3")])]),
        ("twice", vec![plain(&[("l", &through), ("l", "x")])]),
        ("deletes no name", vec![plain(&[(".wh..", "")])]),
        ("cannot hide", vec![plain(&[(".wh..wh..opq", "")])]),
        ("longer than what was allowed", vec![(GZIP, gzip(&bomb), sha(&bomb))]),
        ("its content has digest", vec![(TYPE, good.clone(), sha(b"other"))]),
        ("read the archive", vec![(GZIP, good.clone(), sha(&good))]),
        ("is of type", vec![("application/x", good.clone(), sha(&good))]),
        // The first layer is good; the second spoils all.
        ("absolute", vec![plain(&[("f", "f")]), plain(&[(&out, "x")])]),
    ];
    let layers = || {
        let dir = host.dir.join("state/layers");
        fs::read_dir(dir)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect::<Vec<_>>()
    };
    for (n, (why, bad)) in cases.iter().enumerate() {
        let path = image(&host.dir.join(format!("image-{n}")), bad);
        let path = path.to_str().unwrap();
        let ask = ["workspace", "import", "-w", "w", "--image", path, "--max-bytes", "1000000"];
        let said = refused(&host, 1, &ask);
        assert!(said.contains("image_refused") && said.contains(why), "{n} {why:?}: {said}");
        assert!(!layers().iter().any(|name| name.starts_with('.')), "{n} {why}: {:?}", layers());
    }
    // The layout itself: a blob that is somebody else's file, one that was changed, two images.
    let broken: [(&str, Spoil<'_>); 4] = [
        ("open file", &|dir| {
            let blob = dir.join("blobs/sha256").join(sha(&good));
            fs::remove_file(&blob).unwrap();
            std::os::unix::fs::symlink(canary.join("f"), &blob).unwrap();
        }),
        ("digest is not what is said", &|dir| {
            fs::write(dir.join("blobs/sha256").join(sha(&good)), "changed").unwrap();
        }),
        ("2 manifests", &|dir| {
            let text = fs::read_to_string(dir.join("index.json")).unwrap();
            let mut index: Value = serde_json::from_str(&text).unwrap();
            let one = index["manifests"][0].clone();
            index["manifests"] = json!([one, one]);
            fs::write(dir.join("index.json"), index.to_string()).unwrap();
        }),
        ("oci-layout", &|dir| fs::remove_file(dir.join("oci-layout")).unwrap()),
    ];
    for (n, (why, spoil)) in broken.iter().enumerate() {
        let path = image(&host.dir.join(format!("layout-{n}")), &[plain(&[("f", "f")])]);
        spoil(&path);
        let said = refused(
            &host,
            1,
            &["workspace", "import", "-w", "w", "--image", path.to_str().unwrap()],
        );
        assert!(said.contains("image_refused") && said.contains(why), "{n} {why:?}: {said}");
    }
    refused(&host, 3, &["workspace", "status", "w"]);
    assert_eq!(host.must(&["workspace", "list"]), json!([]));
    let left: Vec<_> = fs::read_dir(&canary).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["f"]);
    assert_eq!(fs::read_to_string(canary.join("f")).unwrap(), "whole");
}

fn names(list: &[&str]) -> BTreeSet<String> {
    list.iter().map(|name| (*name).to_owned()).collect()
}

fn reverted(place: &Place) {
    let host = started(place, "h");
    let first = publish(&host, "one");
    publish(&host, "two");
    let third = publish(&host, "three");
    let revert =
        |version| ["workspace", "revert", "-w", "w", "--to", version, "--reason", "a bad build"];
    let refuse = |code, version| refused(&host, code, &revert(version));
    assert!(refuse(3, "9").contains("never had a version 9"));
    assert!(refuse(4, "3").contains("present one"));
    // A live lease is not taken away for it.
    let opened = host.open("w", &paced_ttl(60));
    let id = id_of(&opened);
    assert!(refuse(4, "1").contains("lease_held"));
    fs::write(path_of(&opened["session"], "merged").join("late"), "late").unwrap();
    host.must(&["fence", &id, "--reason", "test", "--wait"]);
    let anchors = || fs::read(host.dir.join("state/evidence-anchors")).unwrap().len();
    let before = anchors();
    let w = host.must(&revert("1"));
    assert!(anchors() > before, "what was recorded is anchored before the head moves");
    assert_eq!((&w["version"], &w["head"]), (&4.into(), &first["head"]), "{w:#}");
    assert_eq!((&w["generation"], &w["may_publish"]), (&5.into(), &false.into()), "{w:#}");
    assert_ne!(third["head"], first["head"]);
    // The history says what it was, in both forms.
    let told = host.must(&["workspace", "history", "w"]);
    let published: Vec<_> =
        told.as_array().unwrap().iter().filter(|row| row["kind"] == "published").collect();
    assert_eq!(published[0]["reverts_to"], 1, "{told:#}");
    assert!(published[1..].iter().all(|row| row["reverts_to"].is_null()), "{told:#}");
    let out = Command::new(&host.binary)
        .args(["workspace", "history", "w"])
        .env("OVERFENCE_SOCKET", host.dir.join("run/overfence.sock"))
        .output();
    let table = String::from_utf8(out.unwrap().stdout).unwrap();
    assert_eq!(table.matches("a revert to version 1").count(), 1, "{table}");
    // Whoever wrote on version 3 does not come back onto another head.
    let said = refused(&host, 4, &["readmit", &id, "--authorised-by", "ann", "--reason", "x"]);
    assert!(said.contains("head_moved"), "{said}");
    let row = host.must(&["workspace", "history", "w", "--limit", "1"])[0].clone();
    assert_eq!((&row["session"], &row["detail"]["verb"]), (&id.clone().into(), &"acquire".into()));
    assert_eq!(row["detail"]["code"], "head_moved");
    assert_eq!(seen(&host, "w"), names(&["one"]));
    let newest = publish(&host, "four");
    assert_eq!(newest["version"], 5);
    assert_eq!(seen(&host, "w"), names(&["one", "four"]));
    // Forward again: nothing was taken away.
    host.must(&revert("3"));
    assert_eq!(seen(&host, "w"), names(&["one", "two", "three"]));
    let told = host.must(&["evidence", "show"]);
    let reasons = told.as_array().unwrap().iter().filter(|e| e["detail"]["reverts_to"] == 1);
    assert_eq!(reasons.count(), 1, "who did it and why is in the evidence");
    host.must(&["preserved", "discard", &id, "--yes"]);
}

fn not_kept(place: &Place) {
    let host = started(place, "h");
    publish(&host, "one");
    let opened = host.open("w", &paced_ttl(60));
    let (id, merged) = (id_of(&opened), path_of(&opened["session"], "merged"));
    // Each of these replaces the session's own layer by another.
    for n in 2..=14 {
        fs::write(merged.join("file"), n.to_string()).unwrap();
        host.must(&["session", "checkpoint", &id]);
    }
    host.must(&["session", "close", &id]);
    assert_eq!(host.must(&["workspace", "status", "w"])["version"], 14);
    let revert = |to| ["workspace", "revert", "-w", "w", "--to", to];
    // Until somebody collects it is there.
    host.must(&revert("2"));
    host.must(&["gc"]);
    let said = refused(&host, 4, &revert("3"));
    assert!(said.contains("version_not_kept") && said.contains("last 10 versions"), "{said}");
    assert!(said.contains("can be reverted to: 0-2, 6-14\n"), "{said}");
    let answer = host.http("POST", "/v1/workspaces/w/revert", r#"{"to":4,"reason":""}"#);
    assert_eq!(answer.status, 409, "{}", answer.body);
    assert!(answer.body.contains("\"version_not_kept\""), "{}", answer.body);
    let told = host.must(&["evidence", "show"]);
    assert!(!told.as_array().unwrap().iter().any(|e| e["kind"] == "layer_damaged"), "{told:#}");
    host.must(&revert("6"));
    let opened = host.open("w", &paced_ttl(60));
    let merged = path_of(&opened["session"], "merged");
    assert_eq!(fs::read_to_string(merged.join("file")).unwrap(), "6");
    host.must(&["session", "close", &id_of(&opened)]);
}

fn killed(place: &Place) {
    let revert = ["workspace", "revert", "-w", "w", "--to", "1"];
    let mut host = started(place, "h");
    publish(&host, "one");
    publish(&host, "two");
    host.kill_agent();
    // Each kill begins from the same state.
    let (state, saved) = (host.dir.join("state"), host.dir.join("saved"));
    let copy = |from: &Path, to: &Path| {
        let done = Command::new("cp").arg("-a").args([from, to]).status();
        assert!(done.unwrap().success());
    };
    copy(&state, &saved);
    let log = host.dir.join("points");
    assert!(host.start(Some(&format!("log={}", log.display()))));
    let before = fs::read_to_string(&log).unwrap().lines().count();
    host.must(&revert);
    let points = fs::read_to_string(&log).unwrap().lines().count();
    assert!(points - before >= 6, "{}", fs::read_to_string(&log).unwrap());
    for hit in before + 1..=points {
        host.kill_agent();
        fs::remove_dir_all(&state).unwrap();
        copy(&saved, &state);
        let done = host.start(Some(&format!("die={hit}"))) && host.ask(&revert).0 == 0;
        host.kill_agent();
        assert!(host.start(None), "{hit}: {}", host.log());
        let w = host.must(&["workspace", "status", "w"]);
        let version = w["version"].as_u64().unwrap();
        assert!(version == 3 || version == 2 && !done, "{hit}: {done} {w:#}");
        assert!(w["hold"].is_null(), "{hit}: {w:#}");
        // Its lease, if it is left, is nobody's: it can be taken.
        let opened = host.must(&["session", "open", "-w", "w", "--force"]);
        let merged = path_of(&opened["session"], "merged");
        assert_eq!(merged.join("two").exists(), version == 2, "{hit}");
        host.must(&["session", "close", &id_of(&opened)]);
        assert_eq!(host.must(&["evidence", "verify"])["ok"], true, "{hit}");
    }
    eprintln!("killed and recovered at {} points", points - before);
}
