//! Bundles and uppers that somebody hostile made, at diff and apply: a right answer or a clear
//! refusal, and nothing outside is touched.

use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::XattrFlags;
use serde_json::{Value, json};
use sha2::Digest as _;

use crate::agent_process::{Host, id_of, path_of};
use crate::host::{Place, Test, paced_ttl};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "a_hostile_bundle_touches_nothing_outside", run: bundles },
        Test { name: "a_diff_of_a_hostile_upper_comes_to_its_end", run: upper },
        Test { name: "a_diff_beside_a_writer_is_whole_or_says_so", run: beside },
        Test {
            name: "attributes_that_no_layer_can_have_lose_nothing",
            run: |p| fat(p, &["mkfs.xfs", "-q", "-f", "-m", "reflink=0"]),
        },
        Test {
            name: "attributes_that_no_layer_can_have_lose_nothing_beside_clones",
            run: |p| fat(p, &["mkfs.xfs", "-q", "-f"]),
        },
    ]
}

/// The owner of a file on xfs may give it hundreds of MiB of attributes. What was committed could not be
/// read again, and its upper went with the session.
fn fat(place: &Place, make: &[&str]) {
    let mut host = crate::reflink::host_made(place, make, 1 << 30, None);
    let opened = host.open("w", &paced_ttl(60));
    let (id, merged) = (id_of(&opened), path_of(&opened["session"], "merged"));
    std::fs::write(merged.join("kept"), "bytes").unwrap();
    let fat = merged.join("fat");
    std::fs::write(&fat, "").unwrap();
    let name = |n: usize| format!("user.{n}");
    for n in 0..300 {
        rustix::fs::setxattr(&fat, name(n), &[n as u8; 65_536], XattrFlags::CREATE).unwrap();
    }
    let refused = |args: &[&str]| {
        let out = host.run(args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(1), "{args:?}: {said}");
        let clear = said.contains("upper_refused") && said.contains("fat cannot go into a layer");
        assert!(clear && said.contains("more than 4 MiB; remove some"), "{said}");
    };
    refused(&["session", "checkpoint", &id]);
    assert_eq!(host.must(&["workspace", "status", "w"])["version"], 0);
    let peak = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", host.agent_pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    assert!(peak() < 200 << 10, "{} KiB", peak());
    for n in 60..300 {
        rustix::fs::removexattr(&fat, name(n)).unwrap();
    }
    host.must(&["session", "checkpoint", &id]);
    host.must(&["session", "close", &id]);
    let opened = host.open("w", &paced_ttl(60));
    let (id, merged) = (id_of(&opened), path_of(&opened["session"], "merged"));
    let fat = merged.join("fat");
    let mut value = vec![0; 70_000];
    for n in 0..60 {
        let bytes = rustix::fs::getxattr(&fat, name(n), &mut value[..]).unwrap();
        assert!(bytes == 65_536 && value[..bytes].iter().all(|b| *b == n as u8));
    }
    assert_eq!(std::fs::read_to_string(merged.join("kept")).unwrap(), "bytes");

    // A stale one keeps its bytes until somebody can say what is to become of them.
    for n in 60..70 {
        rustix::fs::setxattr(&fat, name(n), &[n as u8; 65_536], XattrFlags::CREATE).unwrap();
    }
    host.must(&["fence", &id, "--to", "read-only", "--reason", "test", "--wait"]);
    let bundle = host.dir.join("bundle");
    refused(&[
        "preserved",
        "export",
        &id,
        "--dest",
        bundle.to_str().unwrap(),
        "--dispose",
        "--yes",
    ]);
    assert!(!bundle.exists());
    assert!(path_of(&opened["session"], "upper").join("fat").exists());
    host.stop();
}

const BY: [&str; 4] = ["--authorised-by", "ann", "--reason", "a test"];

fn started(place: &Place) -> Host {
    let mut host = Host::new(place, "h");
    assert!(host.start(None), "{}", host.log());
    host
}

fn sha256(bytes: &[u8]) -> String {
    hex::encode(sha2::Sha256::digest(bytes))
}

/// Puts another layer into a bundle, with every digest and size made to fit: as whoever makes bundles
/// can.
fn forged(good: &Path, to: &Path, tar: &[u8], entries: u64, size: Option<u64>) {
    let read = |name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(good.join(name)).unwrap()).unwrap()
    };
    let blob = |value: &Value| {
        let digest = value["digest"].as_str().unwrap();
        read(&format!("blobs/sha256/{}", digest.strip_prefix("sha256:").unwrap()))
    };
    let mut index = read("index.json");
    let mut manifest = blob(&index["manifests"][0]);
    let mut config = blob(&manifest["config"]);
    let blobs = to.join("blobs/sha256");
    std::fs::create_dir_all(&blobs).unwrap();
    let put = |bytes: &[u8]| {
        std::fs::write(blobs.join(sha256(bytes)), bytes).unwrap();
        (json!(format!("sha256:{}", sha256(bytes))), json!(bytes.len()))
    };
    let (digest, length) = put(&zstd::encode_all(tar, 1).unwrap());
    let layer = &mut manifest["layers"][0];
    layer["digest"] = digest;
    layer["size"] = length;
    let said = size.unwrap_or(tar.len() as u64);
    layer["annotations"]["overfence.layer.uncompressed-bytes"] = json!(said.to_string());
    layer["annotations"]["overfence.layer.entries"] = json!(entries.to_string());
    config["rootfs"]["diff_ids"][0] = json!(format!("sha256:{}", sha256(tar)));
    let (digest, length) = put(&serde_json::to_vec(&config).unwrap());
    manifest["config"]["digest"] = digest;
    manifest["config"]["size"] = length;
    let (digest, length) = put(&serde_json::to_vec(&manifest).unwrap());
    index["manifests"][0]["digest"] = digest;
    index["manifests"][0]["size"] = length;
    std::fs::write(to.join("index.json"), serde_json::to_vec(&index).unwrap()).unwrap();
    std::fs::copy(good.join("oci-layout"), to.join("oci-layout")).unwrap();
}

/// One entry of a tar: kind, name, link target, bytes.
type Made<'m> = (tar::EntryType, &'m [u8], &'m str, &'m [u8]);

fn archive(entries: &[Made<'_>]) -> Vec<u8> {
    let mut out = Vec::new();
    for (kind, name, link, bytes) in entries {
        let mut header = tar::Header::new_ustar();
        let fields = header.as_ustar_mut().unwrap();
        fields.name[..name.len()].copy_from_slice(name);
        fields.linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(*kind);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(bytes.len() as u64);
        header.set_device_major(0).unwrap();
        header.set_device_minor(0).unwrap();
        header.set_cksum();
        out.extend(header.as_bytes());
        out.extend(*bytes);
        out.resize(out.len().next_multiple_of(512), 0);
    }
    out.resize(out.len() + 1024, 0);
    out
}

fn bundles(place: &Place) {
    use tar::EntryType as Kind;
    let host = started(place);
    let opened = host.open("w", "1h");
    std::fs::write(path_of(&opened["session"], "merged").join("f"), "x").unwrap();
    host.ask(&["fence", &id_of(&opened), "--reason", "test", "--wait"]);
    host.until(&id_of(&opened), |view| view["state"] == "PRESERVED");
    let good = host.dir.join("good");
    host.must(&["preserved", "export", &id_of(&opened), "--dest", good.to_str().unwrap()]);
    host.must(&["preserved", "discard", &id_of(&opened), "--yes"]);

    let outside = host.dir.join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("secret"), "kept").unwrap();
    let out = outside.to_str().unwrap();
    let (file, link, hard, dir) = (Kind::Regular, Kind::Symlink, Kind::Link, Kind::Directory);
    let told = b"30 OVERFENCE.change={\"x\":\"y\"}\n";
    let cases: [(&str, Vec<Made<'_>>); 9] = [
        ("a way up", vec![(file, b"../evil", "", b"x")]),
        ("a way up in the middle", vec![(dir, b"a/", "", b""), (file, b"a/../../evil", "", b"x")]),
        ("a file through a symlink", vec![(link, b"a", out, b""), (file, b"a/evil", "", b"x")]),
        ("a directory through a symlink", vec![(link, b"a", out, b""), (dir, b"a/evil/", "", b"")]),
        (
            "a hard link through a symlink",
            vec![(link, b"a", out, b""), (hard, b"b", "a/secret", b"")],
        ),
        (
            "a deletion through a symlink",
            vec![(link, b"a", out, b""), (file, b"a/.wh.secret", "", b"")],
        ),
        ("a hard link out", vec![(hard, b"b", "../../outside/secret", b"")]),
        ("a whiteout as a device", vec![(Kind::Char, b"w", "", b"")]),
        ("a story that is none", vec![(Kind::XHeader, b"x", "", told), (file, b"f", "", b"x")]),
    ];
    let before = host.must(&["workspace", "status", "w"]);
    for (n, (what, entries)) in cases.iter().enumerate() {
        let bundle = host.dir.join(format!("forged-{n}"));
        let count = entries.iter().filter(|e| e.0 != Kind::XHeader).count() as u64;
        forged(&good, &bundle, &archive(entries), count, None);
        refused(&host, &bundle, what, &[1]);
    }
    // A bundle may lie about its layer's length both ways, and be larger than the disk.
    let tar = archive(&[(file, b"f", "", &[7; 100_000])]);
    for (n, said, codes) in [(0, 5000, &[1]), (1, 200_000, &[1]), (2, 1 << 60, &[1])] {
        let bundle = host.dir.join(format!("length-{n}"));
        forged(&good, &bundle, &tar, 1, Some(said));
        refused(&host, &bundle, &format!("a length of {said}"), codes);
    }
    // The forger's hand is good enough: what breaks no rule is taken.
    let fine = host.dir.join("fine");
    forged(&good, &fine, &archive(&[(dir, b"d/", "", b""), (file, b"d/f", "", b"y")]), 2, None);
    let args = [&["bundle", "apply", fine.to_str().unwrap(), "-w", "w"], &BY[..]].concat();
    let back = host.must(&args);
    assert_eq!(std::fs::read(path_of(&back["session"], "merged").join("d/f")).unwrap(), b"y");
    host.must(&["session", "close", &id_of(&back), "--discard", "--yes"]);

    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1);
    assert_eq!(std::fs::read(outside.join("secret")).unwrap(), b"kept");
    assert_eq!(std::fs::metadata(outside.join("secret")).map(|m| links(&m)).unwrap(), 1);
    for dir in ["state/exports", "state/sessions"] {
        assert_eq!(std::fs::read_dir(host.dir.join(dir)).unwrap().count(), 0, "{dir}");
    }
    let after = host.must(&["workspace", "status", "w"]);
    let generation = |w: &Value| w["generation"].as_u64().unwrap();
    assert_eq!(generation(&after), generation(&before) + 1, "a refusal costs no generation");
}

fn links(meta: &std::fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::nlink(meta)
}

fn refused(host: &Host, bundle: &Path, what: &str, codes: &[i32]) {
    let path = bundle.to_str().unwrap();
    let out = host.run(&[&["bundle", "apply", path, "-w", "w"], &BY[..]].concat());
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(codes.contains(&out.status.code().unwrap()), "{what}: {out:?}");
    assert!(said.contains("bundle_invalid") || said.contains("no_space"), "{what}: {said}");
    assert_eq!(host.must(&["session", "list"]), json!([]), "{what}");
    let left = std::fs::read_dir(host.dir.join("state/exports")).unwrap().count();
    assert_eq!(left, 0, "{what}: {said}");
}

fn sh(dir: &Path, script: &str) {
    let status =
        Command::new("bash").args(["-euc", script]).current_dir(dir).stdin(Stdio::null()).status();
    assert!(status.unwrap().success(), "{script}");
}

fn upper(place: &Place) {
    let host = started(place);
    let opened = host.open("w", "1h");
    let merged = path_of(&opened["session"], "merged");
    // Deeper than any path; every byte a name can have; what must not be opened.
    let from = std::env::current_dir().unwrap();
    std::env::set_current_dir(&merged).unwrap();
    for _ in 0..1500 {
        std::fs::create_dir("ddd").unwrap();
        std::env::set_current_dir("ddd").unwrap();
    }
    std::fs::write("f", "end").unwrap();
    std::env::set_current_dir(from).unwrap();
    sh(
        &merged,
        "mkfifo fifo; ln -s /etc/passwd link; ln -s / root; truncate -s 1T sparse; echo x > .wh.f
         for i in {1..255}; do [ $i = 47 ] || touch \"$(printf \"b\\\\x$(printf %02x $i)e\")\"; done
         mkdir immutable; touch immutable/f; chattr +i immutable/f || true",
    );
    let diff = host.must(&["session", "diff", &id_of(&opened)]);
    let rows = diff["changes"].as_array().unwrap();
    let deepest = rows.iter().map(|row| row["path"].as_str().unwrap().len()).max().unwrap();
    assert_eq!(deepest, 1500 * 4 + 1, "the file at its end");
    let names = rows.iter().filter(|row| row["path"].as_str().unwrap().starts_with('b'));
    assert_eq!(names.count(), 254);
    let kind = |path: &str| rows.iter().find(|row| row["path"] == path).unwrap()["kind"].clone();
    assert_eq!(
        (kind("fifo"), kind("link"), kind("root")),
        ("fifo".into(), "symlink".into(), "symlink".into())
    );
    assert!(rows.iter().all(|row| row["change"] == "added"), "{:?}", rows[0]);
    host.must(&["session", "close", &id_of(&opened), "--discard", "--yes"]);
}

fn beside(place: &Place) {
    let host = started(place);
    let opened = host.open("w", "1h");
    let merged = path_of(&opened["session"], "merged");
    sh(
        &merged,
        "mkdir -p a/b c; echo still > a/still; for i in {1..300}; do echo $i > a/b/$i; done",
    );
    let mut writer = Command::new("bash")
        .args([
            "-c",
            "while :; do for i in {1..300}; do rm -f a/b/$i; echo x > a/b/$i; done
             rm -rf c; mkdir c; touch c/x; mv c/x c/y; ln -s y c/x; rm c/x; mkdir c/x; done",
        ])
        .current_dir(&merged)
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let mut whole = 0;
    for _ in 0..25 {
        let (code, diff) = host.ask(&["session", "diff", &id_of(&opened)]);
        match code {
            0 => {
                whole += 1;
                let rows = diff["changes"].as_array().unwrap();
                assert!(rows.iter().any(|row| row["path"] == "a/still"), "{diff:#}");
            }
            // A directory went away under the walk: said, and no half answer.
            4 => assert!(diff.is_null()),
            other => panic!("{other}: {}", host.log()),
        }
    }
    writer.kill().unwrap();
    writer.wait().unwrap();
    eprintln!("{whole} of 25 whole");
    assert!(whole > 0);
    host.must(&["session", "close", &id_of(&opened), "--discard", "--yes"]);
}
