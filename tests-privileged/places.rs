//! Places that a verb is given: those of the agent's own, and those that are none.

use std::fs;

use nix::mount::{MsFlags, mount, umount};
use serde_json::json;

use crate::agent_process::{Host, id_of, path_of};
use crate::host::{Place, Test, paced_ttl};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "what_is_the_agents_own_is_imported_by_no_way", run: imported },
        Test { name: "an_export_goes_to_a_place_or_says_what_is_wrong_with_it", run: exported },
    ]
}

fn started(place: &Place) -> Host {
    let mut host = Host::new(place, "h");
    assert!(host.start(None), "{}", host.log());
    host
}

fn refused(host: &Host, args: &[&str], why: &str) {
    let out = host.run(args);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.code() == Some(2) && said.contains(why), "{args:?}: {out:?}");
}

fn imported(place: &Place) {
    let host = started(place);
    let state = host.dir.join("state");
    let (bound, link) = (host.dir.join("bound"), host.dir.join("link"));
    fs::create_dir(&bound).unwrap();
    let import = |path: &std::path::Path| {
        let path = path.to_str().unwrap();
        let ask = ["workspace", "import", "-w", "w", "--directory", path];
        refused(&host, &ask, "the agent's own");
    };
    for own in [state.clone(), state.join("keys"), state.join("sessions"), host.dir.join("run")] {
        import(&own);
        import(&own.join("../").join(own.file_name().unwrap()));
        std::os::unix::fs::symlink(&own, &link).unwrap();
        import(&link);
        fs::remove_file(&link).unwrap();
        mount(Some(&own), &bound, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        import(&bound);
        umount(&bound).unwrap();
    }
    // What holds them, too.
    import(&host.dir);
    mount(Some(&host.dir), &bound, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    import(&bound);
    umount(&bound).unwrap();
    assert_eq!(host.must(&["workspace", "list"]), json!([]));
    let layers: Vec<_> = fs::read_dir(state.join("layers")).unwrap().collect();
    assert!(layers.is_empty(), "{layers:?}");
}

fn exported(place: &Place) {
    let host = started(place);
    let opened = host.open("w", &paced_ttl(60));
    let id = id_of(&opened);
    fs::write(path_of(&opened["session"], "merged").join("f"), "x").unwrap();
    host.must(&["fence", &id, "--wait"]);
    let file = host.dir.join("file");
    fs::write(&file, "").unwrap();
    let run = host.dir.join("run/bundle");
    for (dest, why) in [(file.join("bundle"), "choose another"), (run, "the agent's own")] {
        let ask = ["preserved", "export", &id, "--dest", dest.to_str().unwrap()];
        refused(&host, &ask, why);
    }
    let dest = host.dir.join("new/bundle");
    host.must(&[
        "preserved",
        "export",
        &id,
        "--dest",
        dest.to_str().unwrap(),
        "--dispose",
        "--yes",
    ]);
    assert!(dest.join("index.json").exists());
}
