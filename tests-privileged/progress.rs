//! How far long work is: on a terminal of who waits for it, in the views, and nowhere else.

use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::agent_process::{Host, id_of, path_of};
use crate::host::{Place, Test};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "a_terminal_is_told_how_far_a_checkpoint_is", run: checkpoint },
        Test { name: "what_run_publishes_at_its_end_is_shown", run: run_end },
        Test {
            name: "an_export_and_a_removal_are_shown_with_their_whole",
            run: export_and_removal,
        },
        Test { name: "a_bundle_that_is_applied_is_counted", run: apply },
    ]
}

/// What a line begins with that takes the place of another.
const WIPE: &str = "\r\x1b[K";

/// A command whose standard error is a terminal of 100 columns: its answer, and the screen's bytes.
fn on_terminal(command: Command) -> (Output, String) {
    on_terminal_beside(command, |_| ())
}

/// The same, with something done `beside` it, which is told its process id.
fn on_terminal_beside(mut command: Command, beside: impl FnOnce(Pid)) -> (Output, String) {
    let size = nix::pty::Winsize { ws_row: 24, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 };
    let terminal = nix::pty::openpty(Some(&size), None).unwrap();
    let mut screen = std::fs::File::from(terminal.master);
    command.stdout(Stdio::piped()).stderr(Stdio::from(terminal.slave));
    let child = command.spawn().unwrap();
    // With it goes this process's own end.
    drop(command);
    let reader = std::thread::spawn(move || {
        let (mut seen, mut piece) = (Vec::new(), [0; 4096]);
        // A terminal that nobody has open any more is read with EIO.
        while let Ok(n @ 1..) = screen.read(&mut piece) {
            seen.extend_from_slice(&piece[..n]);
        }
        String::from_utf8(seen).unwrap()
    });
    beside(Pid::from_raw(child.id().try_into().unwrap()));
    let output = child.wait_with_output().unwrap();
    (output, reader.join().unwrap())
}

fn verb(host: &Host, args: &[&str]) -> Command {
    let mut command = host.verb(args);
    command.env("TERM", "xterm").env_remove("NO_COLOR");
    command
}

/// What was written over each other, in turn, without what stands at the very end.
fn lines(screen: &str) -> Vec<&str> {
    let mut all: Vec<_> = screen.split(WIPE).collect();
    assert_eq!(all.first(), Some(&""), "something stands before the first line: {screen:?}");
    assert_eq!(all.pop(), Some(""), "something is left of it: {screen:?}");
    all.remove(0);
    all
}

/// So many bytes that no packing makes fewer.
fn noise(file: &Path, bytes: u64) {
    let mut from = std::fs::File::open("/dev/urandom").unwrap().take(bytes);
    std::io::copy(&mut from, &mut std::fs::File::create(file).unwrap()).unwrap();
}

const BIG: u64 = 16 << 20;

/// A directory, a big file and three small ones in it: five entries.
fn fill(merged: &Path) {
    let dir = merged.join("d");
    std::fs::create_dir(&dir).unwrap();
    noise(&dir.join("big"), BIG);
    for n in 0..3 {
        std::fs::write(dir.join(n.to_string()), "small").unwrap();
    }
}

/// Each progress that a view shows while `work` goes on.
fn watched<T: Send>(host: &Host, path: &str, work: impl FnOnce() -> T + Send) -> (T, Vec<Value>) {
    std::thread::scope(|scope| {
        let work = scope.spawn(work);
        let mut seen = Vec::new();
        while !work.is_finished() {
            let answer = host.http("GET", path, "").body;
            let view: Value = serde_json::from_str(&answer).unwrap();
            seen.extend(view.get("progress").cloned());
            std::thread::sleep(Duration::from_millis(1));
        }
        (work.join().unwrap(), seen)
    })
}

fn checkpoint(place: &Place) {
    let mut host = Host::new(place, "h");
    // The layer is written whole, and not yet there.
    assert!(host.start(Some("stall=upper.layer.rename.before")), "{}", host.log());
    let opened = host.open("w", "10m");
    let id = id_of(&opened);
    let merged = path_of(&opened["session"], "merged");
    fill(&merged);

    let first = verb(&host, &["session", "checkpoint", &id]);
    let view = format!("/v1/sessions/{id}");
    let ((output, screen), seen) = watched(&host, &view, || on_terminal(first));
    assert!(output.status.success(), "{screen}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["outcome"], "committed");
    let last = seen.last().expect("it was never shown");
    assert_eq!((&last["what"], &last["entries"]), (&"capture".into(), &5.into()), "{last}");
    assert!(last["bytes"].as_u64().unwrap() >= BIG, "{last}");
    // Nobody has measured it yet.
    assert!(last["total_bytes"].is_null() && last["total_entries"].is_null(), "{last}");
    let told = lines(&screen);
    eprintln!("{told:?}");
    assert!(told.len() >= 2, "it was not written over: {told:?}");
    let capture = told.iter().rfind(|line| line.starts_with("capturing  16")).unwrap();
    assert!(capture.contains(" MiB, 5 entries, ") && capture.ends_with('s'), "{capture}");
    assert!(!screen.contains('%'), "of how much?");

    // From now on it is known how much there was.
    std::fs::write(merged.join("more"), "small").unwrap();
    let (output, screen) = on_terminal(verb(&host, &["session", "checkpoint", &id]));
    assert!(output.status.success(), "{screen}");
    let told = lines(&screen);
    let whole = "capturing  [####################] 100%  16";
    let capture = told.iter().rfind(|line| line.starts_with(whole)).unwrap();
    assert!(capture.contains(", 6 of 5 entries, "), "{capture}");
    assert!(told.iter().all(|line| line.chars().count() < 100), "{told:?}");

    // As slow, and nobody who would read it.
    let long = Duration::from_millis(1500);
    let silent = |what: &str, ask: &dyn Fn() -> (Output, String)| {
        std::fs::write(merged.join(what), "small").unwrap();
        let begun = Instant::now();
        let (output, screen) = ask();
        assert!(output.status.success(), "{what}: {screen}");
        assert!(begun.elapsed() > long, "{what}: it was too fast to show anything");
        assert_eq!(screen, "", "{what}");
        assert!(output.stderr.is_empty(), "{what}: {output:?}");
    };
    let args = ["session", "checkpoint", &id];
    silent("no terminal", &|| (verb(&host, &args).output().unwrap(), String::new()));
    silent("quiet", &|| on_terminal(verb(&host, &[&args[..], &["-q"]].concat())));
    silent("dumb", &|| {
        let mut command = verb(&host, &args);
        command.env("TERM", "dumb");
        on_terminal(command)
    });
    let view = host.must(&["session", "inspect", &id]);
    assert!(view.get("progress").is_none(), "it is over: {view:#}");
    host.must(&["session", "close", &id]);
    host.stop();
}

fn run_end(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(Some("stall=upper.layer.rename.before")), "{}", host.log());
    let script = "head -c 3000000 /dev/urandom > f";
    let args = ["run", "-w", "w", "--create", "--on-exit", "checkpoint"];
    let mut command = verb(&host, &args);
    command.args(["--", "sh", "-c", script]);
    let (output, screen) = on_terminal(command);
    assert!(output.status.success(), "{screen}\n{}", host.log());
    let ended: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(ended["outcome"], "published");
    let (before, after) = screen.split_once(WIPE).expect("nothing was shown");
    assert!(before.contains("generation 1") && !before.contains("closed"), "{screen}");
    let (shown, said) = after.rsplit_once(WIPE).expect("it was not wiped");
    assert!(shown.contains("capturing  2.8 MiB, 1 entries, "), "{screen}");
    assert!(said.contains("closed, published: version 1"), "{screen}");
    host.stop();
}

fn export_and_removal(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(Some("stall=upper.bundle.rename.before")), "{}", host.log());
    let opened = host.open("w", "10m");
    let id = id_of(&opened);
    fill(&path_of(&opened["session"], "merged"));
    host.must(&["fence", &id, "--to", "killed", "--reason", "test", "--wait"]);

    let view = format!("/v1/sessions/{id}");
    let bundle = place.dir.join("bundle");
    let args = ["preserved", "export", &id, "--dest", bundle.to_str().unwrap()];
    let export = verb(&host, &args);
    let ((output, screen), seen) = watched(&host, &view, || on_terminal(export));
    assert!(output.status.success(), "{screen}");
    let blob = seen.iter().rfind(|progress| progress["what"] == "export");
    let blob = blob.expect("the export was never shown");
    assert!(blob["total_bytes"].as_u64().unwrap() > BIG, "{blob}");
    assert_eq!(blob["bytes"], blob["total_bytes"]);
    let whole = "writing the bundle  [####################] 100%  16 MiB of 16 MiB, ";
    let told = lines(&screen);
    assert!(told.iter().any(|line| line.starts_with(whole)), "{told:?}");

    verified(&host, bundle.to_str().unwrap());

    // The other agent stalls where nothing is removed yet.
    host.stop();
    assert!(host.start(Some("stall=upper.remove.before")), "{}", host.log());
    let mut discard = host.verb(&["preserved", "discard", &id, "--yes"]);
    discard.env("TERM", "xterm");
    let ((output, screen), seen) = watched(&host, &view, || on_terminal(discard));
    assert!(output.status.success(), "{screen}");
    let first = seen.iter().find(|progress| progress["what"] == "remove");
    let first = first.expect("the removal was never shown");
    assert_eq!((&first["entries"], &first["total_entries"]), (&0.into(), &5.into()), "{first}");
    assert!(first["total_bytes"].as_u64().unwrap() >= BIG, "{first}");
    let none = "removing  [....................]   0%  0 B of 16";
    let (before, after) = screen.split_once(WIPE).expect("nothing was shown");
    assert!(before.contains("This deletes"), "{screen}");
    assert!(after.contains(none) && after.contains(", 0 of 5 entries, "), "{screen}");
    assert!(after.ends_with(WIPE), "it was not wiped: {screen:?}");
    host.stop();
}

/// Who verifies a bundle needs no agent: it is held up while it reads.
fn verified(host: &Host, bundle: &str) {
    let reads = |pid: Pid| {
        let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let mut files = fds.filter_map(|fd| std::fs::metadata(fd.path()).ok());
        files.any(|file| file.is_file() && file.len() > BIG && file.len() < 2 * BIG)
    };
    let (output, screen) = on_terminal_beside(verb(host, &["bundle", "verify", bundle]), |pid| {
        let begun = Instant::now();
        while !reads(pid) {
            assert!(begun.elapsed() < Duration::from_secs(20), "it never read the layer");
        }
        kill(pid, Signal::SIGSTOP).unwrap();
        std::thread::sleep(Duration::from_millis(1200));
        kill(pid, Signal::SIGCONT).unwrap();
    });
    assert!(output.status.success(), "{screen}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["verified"], true);
    let told = lines(&screen);
    assert!(told[0].starts_with("verifying the bundle  [") && told[0].contains("%  "), "{told:?}");
    assert!(told[0].contains(" of 16 MiB, "), "{told:?}");
}

fn apply(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None), "{}", host.log());
    let opened = host.open("w", "10m");
    let id = id_of(&opened);
    let merged = path_of(&opened["session"], "merged");
    for dir in 0..100 {
        std::fs::create_dir(merged.join(dir.to_string())).unwrap();
        for n in 0..100 {
            noise(&merged.join(format!("{dir}/{n}")), 1000);
        }
    }
    host.must(&["fence", &id, "--to", "killed", "--reason", "test", "--wait"]);
    let bundle = place.dir.join("bundle");
    let bundle = bundle.to_str().unwrap();
    host.must(&["preserved", "export", &id, "--dest", bundle]);
    let args =
        ["bundle", "apply", bundle, "-w", "w", "--authorised-by", "ann", "--reason", "wanted"];
    let command = verb(&host, &args);
    let ((output, screen), seen) = watched(&host, "/v1/workspaces/w", || on_terminal(command));
    assert!(output.status.success(), "{screen}");
    let seeds = seen;
    assert!(!seeds.is_empty() && seeds.iter().all(|seed| seed["what"] == "seed"), "{seeds:?}");
    let bytes = |seed: &Value| seed["bytes"].as_u64().unwrap();
    assert!(seeds.is_sorted_by_key(bytes), "{seeds:?}");
    let total = seeds[0]["total_bytes"].as_u64().unwrap();
    assert!(total > 10_000_000, "10,000 files of 1,000 bytes: {total}");
    assert!(seeds.iter().any(|seed| (1..total).contains(&bytes(seed))), "{seeds:?}");
    assert!(seeds.iter().all(|seed| bytes(seed) <= total), "{seeds:?}");
    let opened: Value = serde_json::from_slice(&output.stdout).unwrap();
    host.must(&["session", "close", &id_of(&opened), "--discard", "--yes"]);
    host.stop();
}
