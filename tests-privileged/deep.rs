//! Heads of more layers than are mounted: seen whole through an equivalence, and never rewritten.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::agent_process::{Host, id_of, path_of};
use crate::content::{image, plain};
use crate::host::{Place, Test, paced_ttl};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "a_deep_head_is_mounted_whole", run: whole },
        Test { name: "i8_an_equivalence_survives_a_kill_at_every_effect", run: killed },
    ]
}

const LAYERS: usize = 90;

fn started(place: &Place, name: &str) -> Host {
    let mut host = Host::new(place, name);
    assert!(host.start(None), "{}", host.log());
    host
}

/// An image of many layers that write, change, delete and hide each other's files, and what is left.
fn deep(host: &Host) -> (String, BTreeMap<String, String>) {
    let mut left = BTreeMap::new();
    let mut layers = Vec::new();
    for n in 0..LAYERS {
        let mut put: Vec<(String, String)> = vec![
            (format!("f{n}"), n.to_string()),
            ("same".to_owned(), n.to_string()),
            ("d/".to_owned(), String::new()),
            (format!("d/g{n}"), n.to_string()),
        ];
        if n % 7 == 3 {
            put.push((format!(".wh.f{}", n - 1), String::new()));
            left.remove(&format!("f{}", n - 1));
        }
        if n % 31 == 30 {
            put.insert(3, ("d/.wh..wh..opq".to_owned(), String::new()));
            left.retain(|name: &String, _: &mut String| !name.starts_with("d/"));
        }
        let entries: Vec<_> = put.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        layers.push(plain(&entries));
        let files =
            put.into_iter().filter(|(name, _)| !name.ends_with('/') && !name.contains(".wh."));
        left.extend(files);
    }
    let path = image(&host.dir.join("image"), &layers);
    (path.display().to_string(), left)
}

fn tree(top: &Path) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for dir in ["", "d/"] {
        for entry in fs::read_dir(top.join(dir)).unwrap().map(Result::unwrap) {
            if entry.file_type().unwrap().is_file() {
                let name = format!("{dir}{}", entry.file_name().to_str().unwrap());
                all.insert(name, fs::read_to_string(entry.path()).unwrap());
            }
        }
    }
    all
}

/// How many lowers a session's overlay has, as the kernel says.
fn lowers(opened: &Value) -> usize {
    let merged = path_of(&opened["session"], "merged").display().to_string();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = mounts.lines().find(|line| line.split(' ').nth(4) == Some(&merged)).unwrap();
    let options = line.rsplit(' ').next().unwrap();
    let each = options.matches("lowerdir+=").count();
    let joined = options.split(',').find_map(|o| o.strip_prefix("lowerdir="));
    each + joined.map_or(0, |list| list.split(':').count())
}

fn equivalences(host: &Host) -> usize {
    fs::read_dir(host.dir.join("state/layers/equal")).map_or(0, Iterator::count)
}

fn whole(place: &Place) {
    let mut host = started(place, "h");
    let (path, mut left) = deep(&host);
    let w = host.must(&["workspace", "import", "-w", "w", "--image", &path]);
    let head = w["head"].clone();
    assert_eq!(head.as_array().unwrap().len(), LAYERS);
    assert_eq!(equivalences(&host), 0, "made when it is wanted");
    let opened = host.open("w", &paced_ttl(60));
    assert_eq!(tree(&path_of(&opened["session"], "merged")), left);
    assert!(lowers(&opened) <= 64, "{}", lowers(&opened));
    assert_eq!((equivalences(&host), &opened["session"]["base"]["head"]), (1, &head));
    let merged = path_of(&opened["session"], "merged");
    fs::write(merged.join("new"), "new").unwrap();
    fs::remove_file(merged.join("f0")).unwrap();
    left.insert("new".to_owned(), "new".to_owned());
    left.remove("f0");
    host.must(&["session", "close", &id_of(&opened), "--checkpoint"]);
    // What is published is one layer more, on the head as it was.
    let w = host.must(&["workspace", "status", "w"]);
    assert_eq!(w["head"].as_array().unwrap()[..LAYERS], head.as_array().unwrap()[..]);
    assert_eq!(w["head"].as_array().unwrap().len(), LAYERS + 1);
    host.kill_agent();
    assert!(host.start(None));
    let opened = host.open("w", &paced_ttl(60));
    assert_eq!(tree(&path_of(&opened["session"], "merged")), left);
    assert_eq!(equivalences(&host), 1, "the one that there is serves the next head, too");
    host.must(&["session", "close", &id_of(&opened)]);
    // A collection keeps what a head is mounted through, and takes it when the head is gone.
    let layers = || fs::read_dir(host.dir.join("state/layers")).unwrap().count();
    let before = layers();
    host.must(&["gc"]);
    assert_eq!((layers(), equivalences(&host)), (before, 1));
    // One that is damaged, or lost, is made again: it is of this host alone.
    fs::remove_dir_all(host.dir.join("state/layers/equal")).unwrap();
    let opened = host.open("w", &paced_ttl(60));
    assert_eq!(tree(&path_of(&opened["session"], "merged")), left);
    host.must(&["session", "close", &id_of(&opened)]);
    assert_eq!(layers(), before + 1, "of the present head, which is one layer deeper");
    host.must(&["gc"]);
    assert_eq!((layers(), equivalences(&host)), (before, 1));
    host.must(&["workspace", "delete", "-w", "w", "--yes"]);
    host.must(&["gc"]);
    host.must(&["gc"]);
    assert_eq!(
        (layers(), equivalences(&host)),
        (1, 0),
        "nothing but the directory of equivalences"
    );
}

fn killed(place: &Place) {
    let prepared = |name: &str| {
        let mut host = started(place, name);
        let (path, left) = deep(&host);
        host.must(&["workspace", "import", "-w", "w", "--image", &path]);
        host.kill_agent();
        (host, left)
    };
    let (mut counting, _) = prepared("count");
    let log = counting.dir.join("points");
    assert!(counting.start(Some(&format!("log={}", log.display()))));
    let open = ["session", "open", "-w", "w"];
    counting.must(&open);
    let told = fs::read_to_string(&log).unwrap();
    let lines: Vec<_> = told.lines().map(|line| line.trim_end_matches(" can fail")).collect();
    // From the first tree of the run to the file that names what equals it.
    let last = lines.iter().position(|line| line.ends_with("upper.equal.after")).unwrap();
    let first = lines[..last].iter().rposition(|l| l.ends_with("kernel.mount.before")).unwrap();
    counting.stop();
    for hit in first + 1..=last + 1 {
        let (mut host, left) = prepared(&format!("k{hit}"));
        if host.start(Some(&format!("die={hit}"))) {
            host.ask(&open);
        }
        host.kill_agent();
        assert!(host.start(None), "{hit}: {}", host.log());
        let opened = host.must(&[&open[..], &["--force"]].concat());
        assert_eq!(tree(&path_of(&opened["session"], "merged")), left, "{hit}");
        let rubbish = fs::read_dir(host.dir.join("state/layers")).unwrap().map(Result::unwrap);
        let rubbish = rubbish.filter(|e| e.file_name().to_str().unwrap().starts_with(".tmp-"));
        assert_eq!(rubbish.count(), 0, "{hit}");
        host.stop();
    }
}
