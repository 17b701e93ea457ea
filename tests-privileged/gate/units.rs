//! The agent as the unit that is shipped, run by the host's own systemd, while writers of many ways write
//! under a good lease: what reloads, restarts and upgrades beside them refuses none of their calls. In a
//! guest, where nobody else needs that systemd; a host that systemd-nspawn boots sees no securityfs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use overfence::kernel::clock;

use super::stamps::timed;
use super::ways::ways;
use super::{beat, deadline_of, gate_of};
use crate::agent_process::{Host, id_of, path_of};
use crate::host::{Place, paced, paced_ttl};

const SHIPPED: &str = include_str!("../../packaging/systemd/overfence-agent.service");
const STARTS: &str = "ExecStart=/usr/bin/overfence agent\n";
const SETS: &str = "/sys/fs/bpf/overfence/layout-2";
/// Of several hooks; none of them leaves more and more behind.
const WAYS: [&str; 8] =
    ["write", "append", "io_uring", "truncate", "unlink", "rename exchange", "chmod", "setxattr"];

fn systemctl(args: &[&str]) {
    let out = Command::new("systemctl").args(args).output().unwrap();
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
}

/// The shipped unit with another command, until it is dropped.
struct Unit {
    name: String,
    file: PathBuf,
    dir: PathBuf,
}

impl Unit {
    fn start(host: &Host, binary: &Path) -> Self {
        assert_eq!(SHIPPED.matches(STARTS).count(), 1, "the unit starts something else");
        let command =
            format!("ExecStart={} agent --config {}\n", binary.display(), host.config.display());
        let name = format!("overfence-test-{}.service", std::process::id());
        let file = Path::new("/run/systemd/system").join(&name);
        fs::create_dir_all("/run/systemd/system").unwrap();
        fs::write(&file, SHIPPED.replace(STARTS, &command)).unwrap();
        let unit = Self { name, file, dir: host.dir.clone() };
        systemctl(&["daemon-reload"]);
        unit.must("start");
        unit
    }

    /// A verb of systemctl that has to succeed.
    fn must(&self, verb: &str) {
        let out = Command::new("systemctl").args([verb, &self.name]).output().unwrap();
        assert!(
            out.status.success(),
            "{verb}: {}\n{}",
            String::from_utf8_lossy(&out.stderr),
            self.log()
        );
    }

    fn log(&self) -> String {
        let args = ["--no-pager", "-o", "cat", "-u", &self.name];
        let said = Command::new("journalctl").args(args).output().unwrap();
        String::from_utf8_lossy(&said.stdout).into_owned()
    }

    fn pid(&self) -> u32 {
        let out = Command::new("systemctl").args(["show", "-P", "MainPID", &self.name]).output();
        String::from_utf8(out.unwrap().stdout).unwrap().trim().parse().unwrap()
    }
}

impl Drop for Unit {
    fn drop(&mut self) {
        let run = |program: &str, args: &[&str]| {
            let _ = Command::new(program).args(args).status();
        };
        run("systemctl", &["stop", &self.name]);
        let _ = fs::remove_file(&self.file);
        run("systemctl", &["daemon-reload"]);
        run("systemctl", &["reset-failed", &self.name]);
        // The agent's mounts are the host's, and not this test's.
        let mounts = fs::read_to_string("/proc/1/mountinfo").unwrap_or_default();
        let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
        for point in points.filter(|point| Path::new(point).starts_with(&self.dir)) {
            run("nsenter", &["--target=1", "--mount", "umount", "--lazy", point]);
        }
    }
}

/// The same program with another object of the gate in it: a byte of it is different that means nothing.
fn other_gate(binary: &Path, to: &Path) {
    const HEADER: usize = 64;
    const EM_BPF: [u8; 2] = 247u16.to_le_bytes();
    /// The last byte of `e_ident`, which is padding.
    const PAD: usize = 15;
    let mut bytes = fs::read(binary).unwrap();
    let is_one = |at: &usize| {
        let header = &bytes[*at..*at + HEADER];
        header.starts_with(b"\x7fELF\x02\x01") && header[18..20] == EM_BPF
    };
    let found: Vec<_> = (0..bytes.len() - HEADER).filter(is_one).collect();
    assert_eq!(found.len(), 1, "objects in {}", binary.display());
    bytes[found[0] + PAD] = 1;
    let new = to.with_extension("new");
    fs::write(&new, bytes).unwrap();
    fs::set_permissions(&new, fs::metadata(binary).unwrap().permissions()).unwrap();
    fs::rename(new, to).unwrap();
}

/// What one writer was answered.
#[derive(Default)]
struct Answers {
    accepted: AtomicU64,
    refused: AtomicU64,
}

fn sets() -> Vec<PathBuf> {
    let all = fs::read_dir(SETS).unwrap().map(|e| e.unwrap().path());
    all.filter(|path| path.is_dir()).collect()
}

pub fn undisturbed(place: &Place) {
    let mut host = Host::new(place, "host");
    let binary = host.dir.join("overfence");
    fs::copy(&host.binary, &binary).unwrap();
    host.start_keeper();
    let unit = Unit::start(&host, &binary);
    let opened = host.open("w", &paced_ttl(25));
    assert_eq!(gate_of(&opened["session"]), ("complete", false), "{}", unit.log());
    let id = id_of(&opened);
    fs::write(host.dir.join("token"), opened["token"].as_str().unwrap()).unwrap();
    // Its overlay is mounted on the host, where its agent is.
    let merged = path_of(&opened["session"], "merged");
    let merged = Path::new("/proc/1/root").join(merged.strip_prefix("/").unwrap());
    let (first, over) = (deadline_of(&host, &id), Arc::new(AtomicBool::new(false)));
    let all = ways();
    let writers: Vec<_> = WAYS
        .iter()
        .map(|name| {
            let way = *all.iter().find(|way| way.name == *name).unwrap();
            let (dir, over) = (merged.join(name), Arc::clone(&over));
            let answers = Arc::new(Answers::default());
            let told = Arc::clone(&answers);
            let thread = std::thread::spawn(move || {
                let mut call = way.begin(&dir);
                while !over.load(Ordering::SeqCst) {
                    let (accepted, ..) = timed(&mut call);
                    let counter = if accepted { &told.accepted } else { &told.refused };
                    counter.fetch_add(1, Ordering::SeqCst);
                }
            });
            (name, answers, thread)
        })
        .collect();
    // Signs of life go on; who asks while the agent starts asks again.
    let beating = {
        let (over, config) = (Arc::clone(&over), host.dir.clone());
        let binary = host.binary.clone();
        std::thread::spawn(move || {
            while !over.load(Ordering::SeqCst) {
                let _ = Command::new(&binary)
                    .args(["lease", "beat"])
                    .arg(&id)
                    .arg("--token-file")
                    .arg(config.join("token"))
                    .env("OVERFENCE_SOCKET", config.join("run/overfence.sock"))
                    .output();
                std::thread::sleep(paced(Duration::from_millis(100)));
            }
        })
    };
    let id = id_of(&opened);
    let go_on = |what: &str| {
        for (name, answers, _) in &writers {
            let before = answers.accepted.load(Ordering::SeqCst);
            let until = clock::now().plus(paced(Duration::from_secs(10)));
            while answers.accepted.load(Ordering::SeqCst) < before + 10 {
                assert!(clock::now() < until, "{what}: {name} stands still\n{}", unit.log());
                std::thread::sleep(Duration::from_millis(5));
            }
            let refused = answers.refused.load(Ordering::SeqCst);
            assert_eq!(refused, 0, "{what}: {name} was refused\n{}", unit.log());
        }
        println!("{what}: nothing was refused");
    };
    let restarted = |what: &str| {
        let before = unit.pid();
        unit.must("restart");
        assert_ne!(unit.pid(), before, "{what}");
        beat(&host, &id);
        go_on(what);
    };
    go_on("the unit as it is shipped");
    systemctl(&["daemon-reload"]);
    go_on("daemon-reload");
    systemctl(&["daemon-reexec"]);
    go_on("daemon-reexec");
    restarted("a restart");
    let own = sets();
    other_gate(&host.binary, &binary);
    restarted("an upgrade");
    let upgraded = sets();
    assert!(own.len() == 1 && upgraded.len() == 1 && own != upgraded, "{own:?}, {upgraded:?}");
    fs::remove_file(&binary).unwrap();
    fs::copy(&host.binary, &binary).unwrap();
    restarted("a way back");
    assert_eq!(sets(), own);
    while clock::now() < first.plus(Duration::from_millis(100)) {
        std::thread::sleep(Duration::from_millis(20));
    }
    go_on("the first deadline");
    let view = host.must(&["session", "inspect", &id]);
    assert_eq!(gate_of(&view), ("complete", false), "{view:#}");
    assert_eq!(view["gate"]["refused"], serde_json::json!({}), "{view:#}");
    over.store(true, Ordering::SeqCst);
    beating.join().unwrap();
    let mut accepted = 0;
    for (name, answers, thread) in writers {
        thread.join().unwrap();
        assert_eq!(answers.refused.load(Ordering::SeqCst), 0, "{name}");
        accepted += answers.accepted.load(Ordering::SeqCst);
    }
    println!("{accepted} calls accepted, none refused");
    host.must(&["drain", "--yes"]);
}
