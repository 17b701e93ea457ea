//! Who runs on behind the gate (`read-only-run`) does so only as long as the gate stops its writes now.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use overfence::kernel::clock;
use serde_json::Value;

use super::{WRITER, own_bpffs};
use crate::agent_process::{Host, has, id_of, path_of};
use crate::host::{Place, Test, paced, paced_ttl};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "nobody_is_thawed_behind_a_gate_that_is_gone", run: gone },
        Test { name: "who_runs_on_behind_no_gate_is_frozen_before_the_next", run: next },
        Test { name: "who_ran_on_while_the_gate_was_away_is_frozen", run: replaced },
        Test { name: "who_has_a_loop_device_stays_frozen", run: looped },
    ]
}

/// A host with that policy, on which no sweep notices anything while a test lasts.
fn host(place: &Place) -> Host {
    sweeping(place, "1h")
}

fn sweeping(place: &Place, sweep: &str) -> Host {
    let mut host = Host::new(place, "host");
    let config = std::fs::read_to_string(&host.config).unwrap();
    let policy =
        format!("[fence]\non_fence = \"read-only-run\"\n[preserve]\nsweep = \"{sweep}\"\n");
    std::fs::write(&host.config, format!("{config}{policy}")).unwrap();
    assert!(host.start(None));
    host
}

/// A session's writer that tells what became of each write.
struct Writer {
    id: String,
    cgroup: PathBuf,
    merged: PathBuf,
    dir: PathBuf,
    child: Child,
}

impl Writer {
    fn start(host: &Host, place: &Place) -> Self {
        let opened = host.open("w", &paced_ttl(600));
        let [cgroup, merged] = ["cgroup", "merged"].map(|name| path_of(&opened["session"], name));
        let child = Command::new("/bin/sh")
            .args(["-c", WRITER, "sh"])
            .args([&cgroup, &merged, &place.dir])
            .spawn()
            .unwrap();
        let writer = Self { id: id_of(&opened), cgroup, merged, dir: place.dir.clone(), child };
        writer.until("wrote");
        writer
    }

    fn told(&self) -> String {
        std::fs::read_to_string(self.dir.join("told")).unwrap_or_default()
    }

    /// Until it tells so a few times more.
    fn until(&self, word: &str) {
        let (before, end) = (self.told().len(), clock::now().plus(paced(Duration::from_secs(20))));
        while self.told()[before..].matches(word).count() <= 3 {
            assert!(clock::now() < end, "no {word}: {}", self.told());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn wrote(&self) -> usize {
        self.told().matches("wrote").count()
    }

    /// It has lost its lease, and runs on.
    fn runs_on(&self, host: &Host) {
        host.must(&["fence", &self.id, "--reason", "test"]);
        host.until(&self.id, |v| v["runs_on"] == true);
        self.until("refused");
    }

    fn end(mut self, host: &Host) {
        std::fs::write(self.dir.join("end"), "").unwrap();
        host.must(&["fence", &self.id, "--to", "killed", "--reason", "test", "--wait"]);
        self.child.wait().unwrap();
    }
}

/// Whether it stands still: frozen, and not about to run on.
fn stands(view: &Value) -> bool {
    has(view, "frozen") && view["runs_on"] == false
}

/// What was refused once says nothing of now: the kernel is asked before the thaw.
fn gone(place: &Place) {
    let pins = own_bpffs();
    let host = host(place);
    let writer = Writer::start(&host, place);
    writer.runs_on(&host);
    // A freeze by another hand, which is lifted as a rule; and nobody notices what root does meanwhile.
    let agent = Pid::from_raw(host.agent_pid().try_into().unwrap());
    kill(agent, Signal::SIGSTOP).unwrap();
    std::fs::write(writer.cgroup.join("cgroup.freeze"), "1").unwrap();
    let events = || std::fs::read_to_string(writer.cgroup.join("cgroup.events")).unwrap();
    let end = clock::now().plus(paced(Duration::from_secs(20)));
    while !events().contains("frozen 1") {
        assert!(clock::now() < end, "it does not freeze");
        std::thread::sleep(Duration::from_millis(5));
    }
    let wrote = writer.wrote();
    std::fs::remove_dir_all(&pins).unwrap();
    kill(agent, Signal::SIGCONT).unwrap();
    let view = host.until(&writer.id, |v| stands(v) && !has(v, "gated"));
    std::thread::sleep(paced(Duration::from_millis(500)));
    let later = host.must(&["session", "inspect", &writer.id]);
    assert!(stands(&later) && events().contains("frozen 1"), "{view:#}\n{later:#}");
    assert_eq!(writer.wrote(), wrote, "it was thawed and wrote");
    let entries = host.must(&["evidence", "show", "--session", &writer.id]);
    let lost = |e: &&Value| e["detail"]["event"]["event"] == "gate_lost";
    assert_eq!(entries.as_array().unwrap().iter().filter(lost).count(), 1, "{entries:#}");
    writer.end(&host);
}

/// The next writer of the workspace does not start on the word of a gate that is gone.
fn next(place: &Place) {
    let pins = own_bpffs();
    let host = host(place);
    let writer = Writer::start(&host, place);
    writer.runs_on(&host);
    std::fs::remove_dir_all(&pins).unwrap();
    let opened = host.open("w", &paced_ttl(600));
    // As it was when the open was answered.
    let view = host.must(&["session", "inspect", &writer.id]);
    assert!(stands(&view) && !has(&view, "gated"), "{view:#}");
    let frozen = std::fs::read_to_string(writer.cgroup.join("cgroup.events")).unwrap();
    assert!(frozen.contains("frozen 1"), "{frozen}");
    assert_ne!(id_of(&opened), writer.id);
    writer.end(&host);
}

/// The gate that is put up again does not know what was mapped while there was none.
fn replaced(place: &Place) {
    let pins = own_bpffs();
    let host = sweeping(place, "1s");
    let writer = Writer::start(&host, place);
    writer.runs_on(&host);
    std::fs::remove_dir_all(&pins).unwrap();
    let again =
        |v: &Value| v["gate"]["state"] == "complete" && v["gate"]["shared_mappings"] == true;
    let view = host.until(&writer.id, |v| stands(v) && again(v) && has(v, "gated"));
    let frozen = std::fs::read_to_string(writer.cgroup.join("cgroup.events")).unwrap();
    assert!(frozen.contains("frozen 1"), "{frozen}\n{view:#}");
    let entries = host.must(&["evidence", "show", "--session", &writer.id]);
    let lost = |e: &&Value| e["detail"]["event"]["event"] == "gate_lost";
    assert_eq!(entries.as_array().unwrap().iter().filter(lost).count(), 1, "{entries:#}");
    // Nor is the next writer held up by it.
    host.open("w", &paced_ttl(600));
    writer.end(&host);
}

/// A loop device on a file; it goes when it is dropped.
struct Device(String);

impl Device {
    fn attach(file: &Path) -> Self {
        let out = Command::new("losetup").args(["-f", "--show"]).arg(file).output().unwrap();
        assert!(out.status.success(), "{out:?}");
        Self(String::from_utf8(out.stdout).unwrap().trim().to_owned())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

/// What a session writes into a device on a file of its overlay, the kernel writes into the file.
fn looped(place: &Place) {
    let host = host(place);
    let writer = Writer::start(&host, place);
    let image = writer.merged.join("image");
    File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let device = Device::attach(&image);
    host.must(&["fence", &writer.id, "--reason", "test"]);
    let holds = |view: &Value| {
        view["holders"].as_array().unwrap().iter().any(|holder| holder["how"] == "loop")
    };
    let view = host.until(&writer.id, |v| v["state"] == "PRESERVED" && holds(v));
    assert!(has(&view, "gated") && stands(&view), "{view:#}");
    let told = writer.told();
    // Read-only is tried again meanwhile, by the agent's ticks.
    let busy = || host.metric("fences_total{fact=\"read-only\",result=\"busy\"}");
    let (before, end) = (busy(), clock::now().plus(paced(Duration::from_secs(60))));
    while busy() < before + 2 {
        assert!(clock::now() < end, "read-only is not tried again");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(stands(&host.must(&["session", "inspect", &writer.id])));
    assert_eq!(writer.told(), told, "it ran");
    // Without the device nothing speaks against it.
    drop(device);
    host.until(&writer.id, |v| v["runs_on"] == true);
    writer.until("refused");
    writer.end(&host);
}
