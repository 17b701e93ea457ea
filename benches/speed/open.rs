//! `session open` through the API, beside the system calls that it cannot do without.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use overfence::model::view::SessionView;
use serde_json::json;

use crate::figures::{Samples, heading, ratio};
use crate::host::Place;
use crate::rig::Rig;
use crate::trace::Trace;

const N: usize = 100;
/// What an open may sync: acquisition, intent and evidence; high-water mark; ACTIVE.
const FSYNCS: usize = 3;
const TTL: Duration = Duration::from_secs(3600);

pub fn run(place: &Place) {
    let rig = Rig::new(place);
    heading("session open through the API");
    let (mut ours, mut bares, mut no_sync) = (Vec::new(), Vec::new(), Vec::new());
    for i in 0..=N {
        let begun = Instant::now();
        let opened = rig.open("w", TTL, None);
        let took = begun.elapsed();
        close(&rig, &opened.session);
        let calls = bare(place, i, 0);
        let synced = bare(place, i, FSYNCS);
        // The first one also creates the workspace.
        if i > 0 {
            ours.push(took);
            bares.push(synced);
            no_sync.push(calls);
        }
    }
    let (ours, bares, no_sync) = (Samples::new(ours), Samples::new(bares), Samples::new(no_sync));
    no_sync.line("bare: mkdir x 4, mount overlay, mkdir cgroup");
    bares.line(&format!("bare: the same and {FSYNCS} appends with fdatasync"));
    ours.line("session open (target < 2 x)");
    println!("  median {:.2} x the bare calls", ratio(ours.p(50), bares.p(50)));
    fsyncs(place, &rig);
}

fn close(rig: &Rig, session: &SessionView) {
    let _: SessionView = rig.post(&session.id, "close", &json!({}));
}

/// A fresh session's worth of system calls, taken away again after the time was taken.
fn bare(place: &Place, i: usize, fsyncs: usize) -> Duration {
    let (dir, cgroup) = (place.dir.join(format!("bare-{i}")), place.cgroup.join("bare-open"));
    let lower = place.dir.join("bare-lower");
    fs::create_dir_all(&lower).unwrap();
    let log = place.dir.join("bare-log");
    let mut log = File::options().create(true).append(true).open(log).unwrap();
    let part = |name| dir.join(name);
    let begun = Instant::now();
    fs::create_dir(&dir).unwrap();
    for name in ["upper", "work", "merged"] {
        fs::create_dir(part(name)).unwrap();
    }
    mount_overlay(&lower, &dir);
    fs::create_dir(&cgroup).unwrap();
    for _ in 0..fsyncs {
        log.write_all(&[b'x'; 4096]).unwrap();
        log.sync_data().unwrap();
    }
    let took = begun.elapsed();
    umount2(&part("merged"), MntFlags::empty()).unwrap();
    fs::remove_dir(&cgroup).unwrap();
    fs::remove_dir_all(&dir).unwrap();
    took
}

/// An overlay as a session's, with `upper`, `work` and `merged` below `dir`.
pub fn mount_overlay(lower: &Path, dir: &Path) {
    let options = format!(
        "lowerdir={},upperdir={2}/upper,workdir={2}/work,{}",
        lower.display(),
        "redirect_dir=off,metacopy=off,index=off",
        dir.display(),
    );
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("overlay"), &dir.join("merged"), Some("overlay"), flags, Some(&*options)).unwrap();
}

/// Counts what single opens sync.
fn fsyncs(place: &Place, rig: &Rig) {
    let Some(trace) = Trace::of(rig.host.agent_pid(), place) else {
        println!("  fsyncs of one open: NOT counted, strace is missing (apt-get install strace)");
        return;
    };
    let mut counts = Vec::new();
    let mut seen = Vec::new();
    for _ in 0..10 {
        let before = trace.calls().len();
        let opened = rig.open("w", TTL, None);
        // What would come late belongs to the open, too.
        std::thread::sleep(Duration::from_millis(100));
        seen = trace.calls().split_off(before);
        counts.push(seen.len());
        close(rig, &opened.session);
        std::thread::sleep(Duration::from_millis(100));
    }
    println!("  fsyncs of each of {} opens (target <= {FSYNCS}): {counts:?}", counts.len());
    let seen: Vec<_> = seen.iter().map(ToString::to_string).collect();
    println!("  those of the last: {}", seen.join(", "));
    let before = trace.calls().len();
    let opened = rig.open("new", TTL, None);
    std::thread::sleep(Duration::from_millis(100));
    println!("  an open that creates its workspace: {}", trace.calls().len() - before);
    close(rig, &opened.session);
}
