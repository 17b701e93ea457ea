//! Damaged and missing layers: refused under their own code wherever they are needed, told once.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{names, publish, refused, seen, started};
use crate::agent_process::Host;
use crate::host::{Place, Test, paced_ttl};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "damage_is_named_and_never_mounted", run: damaged },
        Test { name: "damage_is_found_before_it_is_needed", run: scrubbed },
        Test { name: "damage_is_told_once_by_whoever_meets_it_first", run: told_once },
    ]
}

/// Evidence of damage, oldest first.
fn told(host: &Host) -> Vec<Value> {
    let all = host.must(&["evidence", "show"]);
    let all = all.as_array().unwrap().iter().filter(|e| e["kind"] == "layer_damaged");
    all.cloned().collect()
}

fn cut(path: &Path) -> Vec<u8> {
    let good = fs::read(path).unwrap();
    fs::write(path, &good[..good.len() - 1]).unwrap();
    good
}

fn until(host: &Host, what: &str, fits: &dyn Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !fits() {
        let limit = crate::host::paced(std::time::Duration::from_secs(30));
        assert!(begun.elapsed() < limit, "{what}: {}", host.log());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

fn told_once(place: &Place) {
    let mut host = started(place, "h");
    publish(&host, "one");
    publish(&host, "two");
    publish(&host, "three");
    let w = publish(&host, "four");
    let layers: Vec<_> =
        w["head"].as_array().unwrap().iter().map(|l| l.as_str().unwrap()[7..].to_owned()).collect();
    let stored = host.dir.join("state/layers");
    let dir = |n: usize| -> PathBuf { stored.join(&layers[n]) };
    let (top, second) = (dir(3), dir(1));
    let open = ["session", "open", "-w", "w", "--ttl", &paced_ttl(60)];
    // Met by an open first, which unpacks it: by then nobody has read it.
    assert!(!top.join("tree").exists());
    let good = cut(&top.join("layer.tar.zst"));
    let said = refused(&host, 4, &open);
    assert!(said.contains("layer_damaged") && said.contains(&layers[3]), "{said}");
    assert!(said.contains("bring its directory"), "it says what to do: {said}");
    let answer = host.http("POST", "/v1/sessions", r#"{"workspace":"w"}"#);
    assert_eq!(answer.status, 409, "{}", answer.body);
    assert!(answer.body.contains("\"layer_damaged\""), "{}", answer.body);
    assert_eq!((told(&host).len(), host.metric("layers_damaged")), (1, 1));
    assert!(told(&host)[0]["detail"]["layer"].as_str().unwrap().contains(&layers[3]));
    assert_eq!(told(&host)[0]["detail"]["heads"], json!(["w"]));
    // And by a verify: both layers are named, the new one is told.
    let changed = second.join("tree/two");
    fs::write(&changed, "TWO").unwrap();
    let verify = ["workspace", "verify", "-w", "w"];
    for _ in 0..2 {
        refused(&host, 1, &verify);
        assert_eq!((told(&host).len(), host.metric("layers_damaged")), (2, 2));
    }
    let said = refused(&host, 4, &["workspace", "revert", "-w", "w", "--to", "3"]);
    assert!(said.contains(&layers[1]) && said.contains("w can be reverted to: 0-1\n"), "{said}");
    assert_eq!(told(&host).len(), 2);
    // The agent's own readings go over it, also after a restart, and say it no more.
    host.kill_agent();
    let text = fs::read_to_string(&host.config).unwrap() + "[preserve]\nscrub = \"1s\"\n";
    fs::write(&host.config, text).unwrap();
    let third = dir(2);
    cut(&third.join("layer.tar.zst"));
    assert!(host.start(None), "{}", host.log());
    until(&host, "it is found", &|| told(&host).len() == 3);
    until(&host, "the metric counts all", &|| host.metric("layers_damaged") == 3);
    assert!(told(&host)[2]["detail"]["layer"].as_str().unwrap().contains(&layers[2]));
    // What was mended and is damaged again is told again.
    fs::write(top.join("layer.tar.zst"), &good).unwrap();
    until(&host, "one is whole again", &|| host.metric("layers_damaged") == 2);
    cut(&top.join("layer.tar.zst"));
    until(&host, "and damaged again", &|| told(&host).len() == 4);
    // A missing one is refused under the same code.
    fs::remove_dir_all(dir(0)).unwrap();
    let said = refused(&host, 4, &open);
    assert!(said.contains("layer_damaged") && said.contains(&layers[0]), "{said}");
    let said = refused(&host, 4, &["workspace", "revert", "-w", "w", "--to", "1"]);
    assert!(said.contains("layer_damaged") && said.contains("w can be reverted to: 0\n"), "{said}");
    assert_eq!(told(&host).len(), 5);
    assert_eq!(host.must(&["evidence", "verify"])["ok"], true);
}

fn scrubbed(place: &Place) {
    let mut host = Host::new(place, "h");
    let text = fs::read_to_string(&host.config).unwrap() + "[preserve]\nscrub = \"1s\"\n";
    fs::write(&host.config, text).unwrap();
    assert!(host.start(None), "{}", host.log());
    publish(&host, "one");
    let w = publish(&host, "two");
    let top = w["head"][1].as_str().unwrap().strip_prefix("sha256:").unwrap().to_owned();
    let blob = host.dir.join("state/layers").join(&top).join("layer.tar.zst");
    let found = || -> Vec<Value> {
        let told = host.must(&["evidence", "show"]);
        let all = told.as_array().unwrap().iter().filter(|e| e["kind"] == "layer_damaged");
        all.cloned().collect()
    };
    let gauge = |n: u32| {
        let line = format!("overfence_layers_damaged {n}");
        host.http("GET", "/metrics", "").body.lines().any(|told| told == line)
    };
    assert!(gauge(0));
    let good = fs::read(&blob).unwrap();
    fs::write(&blob, &good[..good.len() - 1]).unwrap();
    let wait = |what: &str, fits: &dyn Fn() -> bool| {
        let begun = std::time::Instant::now();
        while !fits() {
            let limit = crate::host::paced(std::time::Duration::from_secs(30));
            assert!(begun.elapsed() < limit, "{what}: {}", host.log());
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    };
    wait("it is found", &|| gauge(1));
    wait("it is told", &|| !found().is_empty());
    assert!(found()[0]["detail"]["layer"].as_str().unwrap().contains(&top));
    assert_eq!(found()[0]["detail"]["heads"], json!(["w"]));
    let said = refused(&host, 4, &["session", "open", "-w", "w", "--ttl", &paced_ttl(60)]);
    assert!(said.contains("layer_damaged") && said.contains(&top), "{said}");
    // Brought back, it is found whole by itself; and damage was told once.
    fs::write(&blob, &good).unwrap();
    wait("it is whole again", &|| gauge(0));
    assert_eq!(found().len(), 1);
    assert_eq!(seen(&host, "w"), names(&["one", "two"]));
}

fn damaged(place: &Place) {
    let host = started(place, "h");
    publish(&host, "one");
    let w = publish(&host, "two");
    let verify = ["workspace", "verify", "-w", "w"];
    let report = host.must(&verify);
    assert_eq!(report["ok"], true);
    // The newest was never mounted: only its file is there to read.
    assert_eq!(
        (&report["layers"][0]["unpacked"], &report["layers"][1]["unpacked"]),
        (&true.into(), &false.into())
    );
    assert_eq!(seen(&host, "w"), names(&["one", "two"]));
    assert_eq!(host.must(&verify)["layers"][1]["unpacked"], true);
    let top = w["head"][1].as_str().unwrap().strip_prefix("sha256:").unwrap().to_owned();
    let place = host.dir.join("state/layers").join(&top);
    let flip = |path: &Path| {
        let mut bytes = fs::read(path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    for damaged in [place.join("layer.tar.zst"), place.join("tree/two")] {
        let good = fs::metadata(&damaged).unwrap().modified().unwrap();
        flip(&damaged);
        let out = host.run(&verify);
        let said = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(1), "{said}");
        assert!(said.contains("layer_damaged"), "{said}");
        let report: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert_eq!((&report["ok"], &report["layers"][0]["fault"]), (&false.into(), &Value::Null));
        assert!(report["layers"][1]["layer"].as_str().unwrap().contains(&top), "{report:#}");
        assert!(!report["layers"][1]["fault"].is_null(), "{report:#}");
        let said = refused(&host, 4, &["session", "open", "-w", "w", "--ttl", &paced_ttl(60)]);
        assert!(said.contains("layer_damaged") && said.contains(&top), "{said}");
        let revert = ["workspace", "revert", "-w", "w", "--to", "1"];
        assert_eq!(host.ask(&revert).0, 0, "a version without it can be published again");
        assert_eq!(seen(&host, "w"), names(&["one"]));
        let said = refused(&host, 4, &["workspace", "revert", "-w", "w", "--to", "2"]);
        assert!(said.contains("layer_damaged") && said.contains("reverted to: 0-1"), "{said}");
        // Brought back, time and all, and the mark taken off, as OPERATIONS.md says.
        flip(&damaged);
        let file = fs::File::options().write(true).open(&damaged).unwrap();
        file.set_modified(good).unwrap();
        fs::remove_file(place.join("damaged")).unwrap();
        host.must(&["workspace", "revert", "-w", "w", "--to", "2"]);
        assert_eq!(host.must(&verify)["ok"], true);
        assert_eq!(seen(&host, "w"), names(&["one", "two"]));
    }
    // Something that nobody writes into is not waited for.
    for name in ["layer.tar.zst", "layer.json"] {
        let (file, aside) = (place.join(name), host.dir.join(name));
        fs::rename(&file, &aside).unwrap();
        nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let out = host.run(&verify);
        let said = String::from_utf8(out.stderr).unwrap();
        assert!(out.status.code() == Some(1) && said.contains("layer_damaged"), "{name}: {said}");
        fs::rename(&aside, &file).unwrap();
        fs::remove_file(place.join("damaged")).unwrap();
    }
    assert_eq!(host.must(&verify)["ok"], true);
    assert_eq!(host.metric("layers_damaged"), 0, "what is whole again counts no more");
    fs::remove_dir_all(&place).unwrap();
    let report: Value = serde_json::from_slice(&host.run(&verify).stdout).unwrap();
    assert!(
        report["layers"][1]["fault"].as_str().unwrap().contains("not in this host's layer store")
    );
}
