//! What is kept, for how long, and what `gc` says of it: what would go and why, what may not and why.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::agent_process::{Host, id_of, path_of};
use crate::host::{Place, Test, paced};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "gc_says_what_goes_and_what_stays_and_why", run: says },
        Test { name: "orphans_both_ways_are_found_and_kept", run: orphans },
        Test { name: "what_has_something_mounted_in_it_holds_up_nothing", run: mounted },
        Test { name: "a_deletion_is_announced_before_it_comes", run: announced },
        Test { name: "a_shorter_grace_is_for_who_is_opened_after_it", run: shorter },
        Test { name: "an_export_cut_off_leaves_no_bundle_and_is_done_again", run: cut_off },
        Test { name: "an_export_cut_off_leaves_nothing_beside_its_destination", run: beside },
        Test { name: "a_notice_that_a_crash_cut_off_is_given_again", run: noticed_again },
        Test {
            name: "a_session_that_does_not_verify_is_shown_and_needs_its_layers",
            run: unbelieved,
        },
    ]
}

fn started(place: &Place, config: &str) -> Host {
    let mut host = Host::new(place, "h");
    let text = std::fs::read_to_string(&host.config).unwrap();
    std::fs::write(&host.config, format!("{text}{config}")).unwrap();
    assert!(host.start(None), "{}", host.log());
    host
}

/// A stopped session with bytes that no publication holds.
fn kept(host: &Host, workspace: &str) -> String {
    let opened = host.open(workspace, "1h");
    std::fs::write(path_of(&opened["session"], "merged").join("f"), "precious").unwrap();
    let id = id_of(&opened);
    host.ask(&["fence", &id, "--reason", "test", "--wait"]);
    host.until(&id, |view| view["state"] == "PRESERVED");
    id
}

fn item(report: &Value, id: &str) -> Value {
    let items = report["items"].as_array().unwrap().iter();
    let found: Vec<_> = items.filter(|item| item["id"] == id).collect();
    assert_eq!(found.len(), 1, "{report:#}");
    found[0].clone()
}

fn says(place: &Place) {
    let host = started(place, "");
    let (graced, longer) = (kept(&host, "a"), kept(&host, "b"));
    host.must(&["preserved", "keep", &longer, "--until", "400h"]);
    let row = |id: &str| {
        let all = host.must(&["preserved", "list"]);
        all.as_array().unwrap().iter().find(|row| row["session"] == id).unwrap().clone()
    };
    let shown = row(&graced);
    assert_eq!((&shown["workspace"], &shown["entries"]), (&"a".into(), &1.into()));
    assert!(shown["bytes"].as_u64() > Some(0) && shown["next"] == "removed", "{shown:#}");
    assert!(shown["reason"].as_str().unwrap().contains("test"), "{shown:#}");
    // Something that was decided before, and cut off.
    let cut_off = "s-00000000000070008000000000000001";
    let trash = host.dir.join("state/trash").join(cut_off);
    std::fs::create_dir_all(trash.join("upper")).unwrap();
    std::os::unix::fs::symlink(cut_off, trash.join("marker")).unwrap();
    let report = host.must(&["gc", "--dry-run"]);
    let why = |id: &str| item(&report, id)["reason"].as_str().unwrap().to_owned();
    assert!(why(&graced).starts_with("kept by grace for 7"), "{}", why(&graced));
    assert!(why(&longer).starts_with("kept by `preserved keep` for "), "{}", why(&longer));
    assert!(
        why(&graced).contains(&shown["not_before"].as_str().unwrap()[..10]),
        "{}",
        why(&graced)
    );
    assert_eq!(item(&report, &graced)["verdict"], "keep");
    assert_eq!(item(&report, cut_off)["verdict"], "remove");
    assert!(trash.exists(), "a rehearsal touches nothing");
    let report = host.must(&["gc"]);
    assert_eq!(item(&report, cut_off)["verdict"], "removed");
    assert!(!trash.exists());
    assert_eq!(host.must(&["session", "inspect", &graced])["state"], "PRESERVED");
}

fn orphans(place: &Place) {
    let mut host = started(place, "");
    let id = kept(&host, "w");
    let upper = host.dir.join("state/sessions").join(&id);
    host.kill_agent();
    // A directory and a cgroup without a record, and a record without its directory.
    let stray = "s-00000000000070008000000000000002";
    let dir = host.dir.join("state/sessions").join(stray);
    std::fs::create_dir_all(dir.join("upper")).unwrap();
    std::fs::write(dir.join("upper/somebody's"), vec![1; 100_000]).unwrap();
    std::fs::create_dir(host.cgroup.join(stray)).unwrap();
    // As an older copy of the database leaves it: its overlay is there still.
    let theirs = dir.join("merged");
    std::fs::create_dir(&theirs).unwrap();
    let none = nix::mount::MsFlags::empty();
    nix::mount::mount(Some("theirs"), &theirs, Some("tmpfs"), none, None::<&str>).unwrap();
    let merged = upper.join("merged");
    nix::mount::umount(&merged).unwrap();
    let away = host.dir.join("away");
    std::fs::rename(&upper, &away).unwrap();
    assert!(host.start(None), "{}", host.log());
    for args in [&["gc", "--dry-run"][..], &["gc"]] {
        let report = host.must(args);
        let items = report["items"].as_array().unwrap().iter();
        let found: Vec<_> = items.filter(|item| item["id"] == stray).collect();
        assert_eq!(found.len(), 2, "{report:#}");
        assert!(found.iter().all(|item| item["verdict"] == "keep"), "{report:#}");
        assert!(found.iter().any(|item| item["bytes"].as_u64() >= Some(100_000)), "{report:#}");
        let lost = item(&report, &id);
        assert_eq!(lost["verdict"], "keep");
        assert!(lost["reason"].as_str().unwrap().contains("bring it back"), "{lost:#}");
    }
    assert!(dir.join("upper/somebody's").exists());
    // It is brought back, and is what it was.
    std::fs::rename(&away, &upper).unwrap();
    let report = host.must(&["gc", "--dry-run"]);
    assert!(!item(&report, &id)["reason"].as_str().unwrap().contains("bring it back"));
    std::fs::remove_dir(host.cgroup.join(stray)).unwrap();
    nix::mount::umount(&theirs).unwrap();
}

/// Half of a layer and half of a removal, with somebody's mount in each.
fn mounted(place: &Place) {
    let mut host = started(place, "");
    let id = kept(&host, "w");
    host.kill_agent();
    let (half, stray) = (".tmp-0011223344556677", "s-00000000000070008000000000000003");
    let inside =
        [host.dir.join("state/layers").join(half), host.dir.join("state/trash").join(stray)]
            .map(|dir| dir.join("inside"));
    for dir in &inside {
        std::fs::create_dir_all(dir).unwrap();
        let none = nix::mount::MsFlags::empty();
        nix::mount::mount(Some("theirs"), dir, Some("tmpfs"), none, None::<&str>).unwrap();
        std::fs::write(dir.join("f"), "theirs").unwrap();
    }
    let other = host.dir.join("state/layers/.tmp-8899aabbccddeeff");
    std::fs::create_dir(&other).unwrap();
    assert!(host.start(None), "{}", host.log());
    assert!(!other.exists(), "the one keeps the other from being removed");
    host.must(&["preserved", "discard", &id, "--yes"]);
    let (code, report) = host.ask(&["gc"]);
    assert_eq!(code, 8, "{report:#}");
    let told = item(&report, stray);
    assert_eq!(told["verdict"], "failed", "{told:#}");
    assert!(told["reason"].as_str().unwrap().contains("mounted"), "{told:#}");
    for dir in &inside {
        assert_eq!(std::fs::read_to_string(dir.join("f")).unwrap(), "theirs");
        nix::mount::umount(dir).unwrap();
    }
}

fn ahead(host: &Host, id: &str) -> Vec<Value> {
    let entries = host.must(&["evidence", "show", "--session", id]);
    let all = entries.as_array().unwrap().iter();
    all.filter(|entry| entry["kind"] == "deletion_ahead").cloned().collect()
}

fn announced(place: &Place) {
    let host = started(place, "[preserve]\ngrace = \"6s\"\nmin_notice = \"1s\"\nsweep = \"1s\"\n");
    let id = kept(&host, "w");
    let upper = host.dir.join("state/sessions").join(&id).join("upper/f");
    let begun = Instant::now();
    while ahead(&host, &id).is_empty() {
        assert!(begun.elapsed() < paced(Duration::from_secs(10)), "{}", host.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(upper.exists(), "it is said before it is done");
    let told = ahead(&host, &id)[0].clone();
    assert_eq!((&told["detail"]["owner"], &told["detail"]["entries"]), (&"root".into(), &1.into()));
    assert!(told["detail"]["not_before"].is_string(), "{told:#}");
    gone(&upper);
    let told = ahead(&host, &id);
    assert_eq!(told.len(), 1, "said once: {told:#?}");
}

fn shorter(place: &Place) {
    let mut host = started(place, "");
    let before = kept(&host, "before");
    let old = host.dir.join("state/sessions").join(&before).join("upper/f");
    host.kill_agent();
    let text = std::fs::read_to_string(&host.config).unwrap();
    let shorter = "[preserve]\ngrace = \"2s\"\nmin_notice = \"1s\"\nsweep = \"1s\"\n";
    std::fs::write(&host.config, format!("{text}{shorter}")).unwrap();
    assert!(host.start(None), "{}", host.log());
    let after = kept(&host, "after");
    gone(&host.dir.join("state/sessions").join(&after).join("upper/f"));
    assert_eq!(host.must(&["session", "inspect", &before])["state"], "PRESERVED");
    assert_eq!(std::fs::read_to_string(old).unwrap(), "precious");
}

fn gone(path: &Path) {
    let begun = Instant::now();
    while path.exists() {
        assert!(begun.elapsed() < paced(Duration::from_secs(30)), "grace does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn cut_off(place: &Place) {
    let mut host = started(place, "");
    let id = kept(&host, "w");
    let bundles = host.dir.join("state/bundles");
    for point in ["upper.bundle.rename.before", "upper.layer.rename.before", "upper.bundle.before"]
    {
        host.kill_agent();
        assert!(host.start(Some(&format!("die={point}"))), "{}", host.log());
        assert_eq!(host.ask(&["preserved", "export", &id]).0, 6, "{point}");
        let named = |host: &Host| {
            let entries = std::fs::read_dir(host.dir.join("state/bundles")).unwrap().flatten();
            entries.map(|e| e.file_name().into_string().unwrap()).collect::<Vec<_>>()
        };
        assert!(named(&host).iter().all(|n| n.starts_with('.')), "{point}: {:?}", named(&host));
        host.kill_agent();
        assert!(host.start(None), "{}", host.log());
        assert_eq!(named(&host), Vec::<String>::new(), "{point}: half a bundle stays");
        let begun = Instant::now();
        while std::fs::read_dir(host.dir.join("state/exports")).unwrap().count() > 0 {
            assert!(begun.elapsed() < paced(Duration::from_secs(10)), "{point}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    let made = host.must(&["preserved", "export", &id]);
    assert_eq!(made["verified"], true);
    assert_eq!(std::fs::read_dir(&bundles).unwrap().count(), 1);
    host.must(&["preserved", "discard", &id, "--yes"]);
}

/// The directory that it is wanted in is somebody's own, with a name of theirs in it that looks like ours.
fn beside(place: &Place) {
    let mut host = started(place, "");
    let id = kept(&host, "w");
    let dest = place.dir.join("somebody's");
    let theirs = dest.join(".overfence-bundle-0011223344556677");
    std::fs::create_dir_all(&theirs).unwrap();
    for point in [
        "upper.bundle.note.before",
        "upper.bundle.note.after",
        "upper.bundle.before",
        "upper.bundle.rename.before",
        "upper.bundle.after",
    ] {
        host.kill_agent();
        assert!(host.start(Some(&format!("die={point}"))), "{}", host.log());
        let bundle = dest.join(point);
        let ask = ["preserved", "export", &id, "--dest", bundle.to_str().unwrap()];
        assert_eq!(host.ask(&ask).0, 6, "{point}");
        host.kill_agent();
        assert!(host.start(None), "{}", host.log());
        let begun = Instant::now();
        while std::fs::read_dir(host.dir.join("state/exports")).unwrap().count() > 0 {
            assert!(begun.elapsed() < paced(Duration::from_secs(10)), "{point}: {}", host.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        // After its rename it is whole, and whoever asked finds it.
        let whole = usize::from(point == "upper.bundle.after");
        assert_eq!(usize::from(bundle.exists()), whole, "{point}");
        let left = std::fs::read_dir(&dest).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(left.count(), 1 + whole, "{point}");
        assert!(theirs.exists(), "{point}: what nobody noted is not ours");
    }
    host.must(&["preserved", "discard", &id, "--yes"]);
}

/// However often the agent dies as it says so, it is said before the bytes go.
fn noticed_again(place: &Place) {
    let config = "[preserve]\ngrace = \"4s\"\nmin_notice = \"1s\"\nsweep = \"1s\"\n";
    let mut host = started(place, config);
    let opened = host.open("w", "1h");
    let id = id_of(&opened);
    let upper = path_of(&opened["session"], "upper").join("f");
    std::fs::write(path_of(&opened["session"], "merged").join("f"), "precious").unwrap();
    for point in ["agent.notice.before", "agent.notice.after"] {
        host.kill_agent();
        assert!(host.start(Some(&format!("die={point}"))), "{}", host.log());
        // It is preserved by the first of them, which may die while it is asked.
        host.ask(&["fence", &id, "--reason", "test"]);
        let begun = Instant::now();
        while !host.dead() {
            assert!(begun.elapsed() < paced(Duration::from_secs(30)), "{point}: {}", host.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    assert!(upper.exists(), "nothing counted that was not said");
    assert!(host.start(None), "{}", host.log());
    gone(&upper);
    // The one that was cut off after it was recorded, and the one that was counted.
    assert_eq!(ahead(&host, &id).len(), 2);
}

fn unbelieved(place: &Place) {
    let mut host = started(place, "");
    let opened = host.open("w", "1h");
    let publish = |id: &str, merged: &Path, text: String| {
        std::fs::write(merged.join("f"), text).unwrap();
        host.must(&["session", "checkpoint", id]);
    };
    let (first, merged) = (id_of(&opened), path_of(&opened["session"], "merged"));
    publish(&first, &merged, "kept".to_owned());
    publish(&first, &merged, "mounted".to_owned());
    host.must(&["session", "close", &first]);
    // It is mounted on a layer that nothing else needs once there are ten versions without it.
    let id = kept(&host, "w");
    host.must(&["workspace", "revert", "-w", "w", "--to", "1"]);
    let opened = host.open("w", "1h");
    let (next, merged) = (id_of(&opened), path_of(&opened["session"], "merged"));
    (0..12).for_each(|n| publish(&next, &merged, n.to_string()));
    host.must(&["session", "close", &next]);
    let layers = |report: &Value| -> Vec<Value> {
        let items = report["items"].as_array().unwrap().iter();
        items.filter(|item| item["kind"] == "layer").cloned().collect()
    };
    let report = host.must(&["gc"]);
    let needed = format!("session {id} needs it");
    let base = layers(&report).into_iter().find(|layer| layer["reason"] == needed.as_str());
    let base = base.unwrap_or_else(|| panic!("{report:#}"))["id"].as_str().unwrap().to_owned();
    host.kill_agent();
    let db = rusqlite::Connection::open(host.dir.join("state/overfence.db")).unwrap();
    let edit = "UPDATE sessions SET record = replace(record, ?1, ?2) WHERE id = ?3";
    let edited = |from: &str, to: &str| db.execute(edit, [from, to, &id]).unwrap();
    assert_eq!(edited("\"root\"", "\"toor\""), 1);
    assert!(host.start(None), "{}", host.log());
    let listed = host.must(&["preserved", "list"]);
    let row = listed.as_array().unwrap().iter().find(|row| row["session"] == id.as_str());
    let row = row.unwrap_or_else(|| panic!("{listed:#}"));
    assert_eq!((&row["workspace"], &row["generation"]), (&"w".into(), &2.into()), "{row:#}");
    assert!(row["reason"].as_str().unwrap().contains("does not verify"), "{row:#}");
    assert!(row["bytes"].as_u64() > Some(0) && row["not_before"].is_null(), "{row:#}");
    for args in [&["gc", "--dry-run"][..], &["gc"]] {
        let report = host.must(args);
        let session = item(&report, &id);
        assert_eq!((&session["kind"], &session["verdict"]), (&"session".into(), &"keep".into()));
        assert!(session["reason"].as_str().unwrap().contains("does not verify"), "{session:#}");
        assert!(layers(&report).iter().all(|layer| layer["verdict"] == "keep"), "{report:#}");
        let told = item(&report, &base);
        assert!(told["reason"].as_str().unwrap().contains(&id), "{told:#}");
    }
    let (code, _) = host.ask(&["workspace", "delete", "-w", "w", "--yes"]);
    assert_eq!(code, 4, "its bytes are there still");
    // It is put back as it was, and is what it was.
    host.kill_agent();
    assert_eq!(edited("\"toor\"", "\"root\""), 1);
    assert!(host.start(None), "{}", host.log());
    assert_eq!(host.must(&["session", "inspect", &id])["state"], "PRESERVED");
    host.must(&["preserved", "discard", &id, "--yes"]);
    assert_eq!(item(&host.must(&["gc"]), &base)["verdict"], "removed");
}
