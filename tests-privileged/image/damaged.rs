//! Uppers whose file system met an error. From 6.14 on it refuses the sync that read-only wants; a planted
//! EROFS is the same answer on every kernel. What is asked of such a session ends all the same.

use super::*;

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "a_refused_sync_ends_a_close_and_a_fence", run: refused },
        Test { name: "what_is_asked_of_a_damaged_image_ends", run: damaged },
    ]
}

/// Far below the 30 s that `--wait` waits, and above what a slow host needs.
const SOON: Duration = Duration::from_secs(12);

fn soon<T>(what: &str, ask: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let answer = ask();
    let took = begun.elapsed();
    eprintln!("{what} took {took:?}");
    assert!(took < paced(SOON), "{what} took {took:?}");
    answer
}

fn written(host: &Host, workspace: &str, more: &[&str]) -> String {
    let opened = open(host, workspace, "10m", more);
    std::fs::write(path_of(&opened["session"], "merged").join("f"), "f").unwrap();
    id_of(&opened)
}

fn refused(place: &Place) {
    let mut host = Host::new(place, "h");
    configure(&host, "[preserve]\nsweep = \"1s\"\n");
    let fault = host.dir.join("fault");
    assert!(host.start(Some(&format!("fail={}", fault.display()))), "{}", host.log());
    for (n, upper) in [&[][..], &IMAGE].into_iter().enumerate() {
        let name = |what: &str| format!("{what}{n}");
        let all =
            ["keep", "offer", "throw", "kill", "fence"].map(|w| written(&host, &name(w), upper));
        let [kept, offered, thrown, killed, fenced] = &all;
        std::fs::write(&fault, "kernel.remount-ro.before 30").unwrap();
        let says = |view: &Value, fact: &str| {
            assert_eq!(view["state"], "PRESERVED", "{view:#}");
            assert!(has(view, fact) && !has(view, "read-only"), "{view:#}");
            let holders = view["holders"].as_array().unwrap();
            assert_eq!(holders.len(), 1, "{holders:#?}");
            assert_eq!(holders[0]["how"], "file-system", "{holders:#?}");
        };
        soon("close --keep", || host.must(&["session", "close", kept, "--keep"]));
        says(&host.must(&["session", "inspect", kept]), "killed");
        let out = soon("a close", || host.run(&["session", "close", offered, "--checkpoint"]));
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(8), "{said}");
        assert!(said.contains("stopped after an error"), "{said}");
        assert_eq!(host.must(&["workspace", "status", &name("offer")])["version"], 0);
        says(&host.must(&["session", "inspect", offered]), "killed");
        let throw = ["session", "close", thrown, "--discard", "--yes"];
        soon("close --discard", || host.must(&throw));
        let kill = ["fence", killed, "--to", "killed", "--reason", "test", "--wait"];
        soon("fence --to killed", || host.must(&kill));
        says(&host.until(killed, |v| v["state"] == "PRESERVED"), "killed");
        let out = soon("a fence", || host.run(&["fence", fenced, "--reason", "test", "--wait"]));
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(8), "{said}");
        assert!(said.contains("stopped after an error"), "{said}");
        let view = host.must(&["session", "inspect", fenced]);
        says(&view, "frozen");
        assert!(!has(&view, "upper-frozen"), "{view:#}");
        // Once it answers otherwise, the ticks find that.
        std::fs::remove_file(&fault).unwrap();
        for id in all.iter().filter(|id| *id != thrown) {
            host.until(id, |v| has(v, "read-only") && v["holders"].as_array().unwrap().is_empty());
            host.must(&["preserved", "discard", id, "--yes"]);
        }
    }
    no_loops(&host);
    host.stop();
}

/// By the kernel itself: which answer it gives to a remount is its own, and either way there is an end.
fn damaged(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None), "{}", host.log());
    let [kept, killed] = ["keep", "kill"].map(|name| written(&host, name, &IMAGE));
    for id in [&kept, &killed] {
        let upper = path_of(&host.must(&["session", "inspect", id]), "upper");
        must(Command::new("sync").arg("-f").arg(&upper));
        let image = format!("{id}/image");
        let device = loops(&host.dir).into_iter().find(|shown| shown.ends_with(&image));
        let device = device.unwrap().split(' ').next().unwrap().to_owned();
        std::fs::write(format!("/sys/fs/ext4/{device}/trigger_fs_error"), "test").unwrap();
    }
    soon("close --keep", || host.must(&["session", "close", &kept, "--keep"]));
    let kill = ["fence", &killed, "--to", "killed", "--reason", "test", "--wait"];
    soon("fence --to killed", || host.must(&kill));
    for id in [&kept, &killed] {
        let view = host.until(id, |v| v["state"] == "PRESERVED" && has(v, "killed"));
        eprintln!("{:#}", view["holders"]);
        let bundle = host.dir.join(id);
        host.must(&["preserved", "export", id, "--dest", bundle.to_str().unwrap()]);
        host.must(&["preserved", "discard", id, "--yes"]);
    }
    no_loops(&host);
    host.stop();
}
