//! What others make of our layers and bundles: skopeo, umoci and GNU tar show the tree that was there.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::agent_process::{Host, id_of, path_of};
use crate::host::{Place, Test, paced_ttl};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "skopeo_and_umoci_unpack_what_was_mounted", run: unpacked },
        Test { name: "gnu_tar_reads_a_first_layer", run: by_tar },
        Test { name: "skopeo_reads_a_bundle_and_copies_it_whole", run: bundle },
    ]
}

fn started(place: &Place) -> Host {
    let mut host = Host::new(place, "h");
    assert!(host.start(None), "{}", host.log());
    host
}

fn tool(name: &str, args: &[&str]) -> Vec<u8> {
    let out = Command::new(name).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{name} {args:?}: {said}");
    out.stdout
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn sha(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// Everything that a tree shows, a line a name: kind, mode, owner, times, links, attributes, content.
fn shown(top: &Path) -> BTreeMap<PathBuf, String> {
    let (mut all, mut left) = (BTreeMap::new(), vec![PathBuf::new()]);
    let mut first_names = BTreeMap::new();
    while let Some(dir) = left.pop() {
        let mut names: Vec<_> = fs::read_dir(top.join(&dir)).unwrap().map(Result::unwrap).collect();
        names.sort_by_key(fs::DirEntry::file_name);
        for entry in names {
            let (path, at) = (dir.join(entry.file_name()), entry.path());
            let meta = at.symlink_metadata().unwrap();
            let kind = meta.file_type();
            let what = if kind.is_dir() {
                left.push(path.clone());
                "directory".to_owned()
            } else if kind.is_symlink() {
                format!("-> {}", fs::read_link(&at).unwrap().display())
            } else if kind.is_fifo() {
                "fifo".to_owned()
            } else {
                format!("{} bytes {}", meta.len(), sha(&fs::read(&at).unwrap()))
            };
            let linked = (meta.nlink() > 1 && !kind.is_dir()).then(|| {
                first_names.entry(meta.ino()).or_insert_with(|| path.clone()).display().to_string()
            });
            let mut attributes = BTreeMap::new();
            for name in if kind.is_symlink() { vec![] } else { names_of(&at) } {
                attributes.insert(name.clone(), value_of(&at, &name));
            }
            let (mode, owner) = (meta.permissions().mode(), (meta.uid(), meta.gid()));
            let time = (meta.mtime(), meta.mtime_nsec());
            let line = format!("{what} {mode:o} {owner:?} {time:?} {linked:?} {attributes:?}");
            all.insert(path, line);
        }
    }
    all
}

fn names_of(path: &Path) -> Vec<String> {
    let mut list = vec![0; 4096];
    let n = rustix::fs::llistxattr(path, &mut list).unwrap();
    let names = list[..n].split(|b| *b == 0).filter(|name| !name.is_empty());
    names.map(|name| String::from_utf8(name.to_vec()).unwrap()).collect()
}

fn value_of(path: &Path, name: &str) -> Vec<u8> {
    let mut value = vec![0; 4096];
    let n = rustix::fs::lgetxattr(path, name, &mut value).unwrap();
    value.truncate(n);
    value
}

fn set_attribute(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::setxattr(path, name, value, rustix::fs::XattrFlags::empty()).unwrap();
}

/// A file's capability `cap_net_raw+ep`, as the kernel stores it.
const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

fn furnish(top: &Path) {
    let at = |name: &str| top.join(name);
    fs::write(at("new"), "new").unwrap();
    fs::hard_link(at("new"), at("hard")).unwrap();
    symlink("/etc/passwd", at("link")).unwrap();
    tool("mkfifo", &[text(&at("fifo"))]);
    let holes = fs::File::create(at("sparse")).unwrap();
    holes.set_len(3 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&holes, b"end", 2 << 20).unwrap();
    fs::set_permissions(at("new"), fs::Permissions::from_mode(0o4711)).unwrap();
    set_attribute(&at("sparse"), "security.capability", &CAPABILITY);
    set_attribute(&at("new"), "user.k", b"v\n\xff");
    let long = "n".repeat(200);
    fs::create_dir(at(&long)).unwrap();
    fs::write(at(&long).join(&long), "long").unwrap();
    fs::write(at("\u{e4} \n'\"\\"), "odd").unwrap();
    chown(at("link"), Some(0), Some(7)).unwrap();
    chown(at("fifo"), Some(7), Some(8)).unwrap();
    tool("touch", &["-d", "2001-02-03 04:05:06.123456789", text(&at("hard"))]);
}

/// A workspace of two layers, and what a session of it sees.
fn workspace(host: &Host) -> BTreeMap<PathBuf, String> {
    let base = host.dir.join("base");
    for dir in ["d", "gone"] {
        fs::create_dir_all(base.join(dir)).unwrap();
    }
    for (name, what) in [("d/old", "old"), ("d/stays", "stays"), ("gone/x", "x"), ("keep", "keep")]
    {
        fs::write(base.join(name), what).unwrap();
    }
    host.must(&["workspace", "import", "-w", "w", "--directory", text(&base)]);
    let opened = host.open("w", &paced_ttl(60));
    let merged = path_of(&opened["session"], "merged");
    furnish(&merged);
    fs::remove_file(merged.join("d/old")).unwrap();
    fs::remove_dir_all(merged.join("gone")).unwrap();
    fs::create_dir(merged.join("gone")).unwrap();
    fs::write(merged.join("gone/y"), "y").unwrap();
    chown(merged.join("keep"), Some(7), Some(8)).unwrap();
    let seen = shown(&merged);
    host.must(&["session", "close", &id_of(&opened), "--checkpoint"]);
    seen
}

/// The head of a workspace as an image: its layers as they lie in the store.
fn image(host: &Host, dir: &Path) {
    let blobs = dir.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let put = |kind: &str, bytes: &[u8]| {
        fs::write(blobs.join(sha(bytes)), bytes).unwrap();
        json!({ "mediaType": kind, "digest": format!("sha256:{}", sha(bytes)), "size": bytes.len() })
    };
    let head = host.must(&["workspace", "status", "w"])["head"].clone();
    let layers: Vec<Value> = head
        .as_array()
        .unwrap()
        .iter()
        .map(|layer| {
            let hex = layer.as_str().unwrap().trim_start_matches("sha256:");
            let blob = host.dir.join("state/layers").join(hex).join("layer.tar.zst");
            put("application/vnd.oci.image.layer.v1.tar+zstd", &fs::read(blob).unwrap())
        })
        .collect();
    let config = json!({ "architecture": "amd64", "os": "linux", "config": {},
        "rootfs": { "type": "layers", "diff_ids": head } });
    let config = put("application/vnd.oci.image.config.v1+json", config.to_string().as_bytes());
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let manifest =
        json!({ "schemaVersion": 2, "mediaType": kind, "config": config, "layers": layers });
    let manifest = put(kind, manifest.to_string().as_bytes());
    let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
    fs::write(dir.join("index.json"), index.to_string()).unwrap();
    fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
}

fn unpacked(place: &Place) {
    let host = started(place);
    let seen = workspace(&host);
    let (ours, theirs, out) =
        (host.dir.join("image"), host.dir.join("gzip"), host.dir.join("unpacked"));
    image(&host, &ours);
    // umoci takes no zstd: skopeo packs it anew, which says that it read every layer.
    let (from, to) = (format!("oci:{}", text(&ours)), format!("oci:{}:x", text(&theirs)));
    tool(
        "skopeo",
        &["copy", "-q", "--dest-compress", "--dest-compress-format", "gzip", &from, &to],
    );
    tool("umoci", &["unpack", "--image", &format!("{}:x", text(&theirs)), text(&out)]);
    same(&seen, &shown(&out.join("rootfs")));
    // And back: it is the same head, however it was packed.
    let head = |name: &str| host.must(&["workspace", "status", name])["head"].clone();
    host.must(&["workspace", "import", "-w", "v", "--image", text(&theirs)]);
    assert_eq!(head("v"), head("w"));
    // A tree that umoci made is captured as the tree that it is.
    host.must(&["workspace", "import", "-w", "u", "--directory", text(&out.join("rootfs"))]);
    let opened = host.open("u", &paced_ttl(60));
    same(&seen, &shown(&path_of(&opened["session"], "merged")));
    host.must(&["session", "close", &id_of(&opened)]);
}

fn same(seen: &BTreeMap<PathBuf, String>, found: &BTreeMap<PathBuf, String>) {
    for (path, line) in seen {
        assert_eq!(found.get(path), Some(line), "{path:?}");
    }
    assert_eq!(found.len(), seen.len(), "{:?}", found.keys());
}

fn by_tar(place: &Place) {
    let host = started(place);
    let (tree, out) = (host.dir.join("tree"), host.dir.join("out"));
    fs::create_dir(&tree).unwrap();
    furnish(&tree);
    fs::create_dir(&out).unwrap();
    let w = host.must(&["workspace", "import", "-w", "w", "--directory", text(&tree)]);
    let hex = w["head"][0].as_str().unwrap().trim_start_matches("sha256:").to_owned();
    let blob = host.dir.join("state/layers").join(&hex).join("layer.tar.zst");
    let plain = zstd::decode_all(fs::File::open(blob).unwrap()).unwrap();
    assert_eq!(sha(&plain), hex, "the name of a layer is the digest of its tar");
    let archive = host.dir.join("layer.tar");
    fs::write(&archive, plain).unwrap();
    let all = ["--xattrs", "--xattrs-include=*", "--numeric-owner", "--same-owner"];
    tool("tar", &[&all[..], &["-xpf", text(&archive), "-C", text(&out)]].concat());
    same(&shown(&tree), &shown(&out));
}

fn bundle(place: &Place) {
    let host = started(place);
    host.must(&["workspace", "create", "w"]);
    let opened = host.open("w", &paced_ttl(60));
    let id = id_of(&opened);
    furnish(&path_of(&opened["session"], "merged"));
    host.must(&["fence", &id, "--reason", "test", "--wait"]);
    let (made, copy) = (host.dir.join("bundle"), host.dir.join("copy"));
    let told = host.must(&["preserved", "export", &id, "--dest", text(&made)]);
    let (from, to) = (format!("oci:{}", text(&made)), format!("oci:{}:x", text(&copy)));
    let seen: Value = serde_json::from_slice(&tool("skopeo", &["inspect", &from])).unwrap();
    assert_eq!(seen["Digest"], told["digest"], "{seen:#}");
    tool("skopeo", &["copy", "-q", &from, &to]);
    let copied: Value = serde_json::from_slice(&tool("skopeo", &["inspect", &to])).unwrap();
    assert_eq!(copied["Digest"], told["digest"], "{copied:#}");
    // Unpacked on the way, its layer is the tar that it is named after.
    let plain = host.dir.join("plain");
    tool("skopeo", &["copy", "-q", "--dest-decompress", &from, &format!("dir:{}", text(&plain))]);
    let manifest = fs::read(plain.join("manifest.json")).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    assert_eq!(manifest["layers"][0]["digest"], told["layer"], "{manifest:#}");
    host.must(&["preserved", "discard", &id, "--yes"]);
}
