//! What overfence costs beside the bare system calls, measured in the same run. Prints; judges
//! nothing: whether a target holds on a busy machine is for the reader, who is told the load.
//!
//! ```text
//! make bench                                     all of it (root; some minutes)
//! cargo bench --bench speed -- fence open        some of it
//! ```
//!
//! Each part runs in a process of its own, in a private mount namespace, with a fresh directory
//! and a fresh cgroup, and with an agent of its own; all of that is removed at the end, also after
//! a failure or ^C. `OVERFENCE_BENCH_BASE` says where the directory lies (`/var/tmp`): it decides
//! what an fsync costs.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

// The agent as a process, driven as the privileged suite drives it.
#[allow(dead_code)]
#[path = "../../tests-privileged/agent_process.rs"]
mod agent_process;
mod content;
mod dirty;
mod engines;
mod fence;
mod figures;
mod fleet;
mod host;
mod keeper;
mod open;
mod peers;
mod rig;
mod trace;
mod workload;

use host::Place;

/// A part: its name, and what it does.
type Part = (&'static str, fn(&Place));

const PARTS: [Part; 8] = [
    ("fence", fence::run),
    ("open", open::run),
    ("workload", workload::run),
    ("fleet", fleet::run),
    ("content", content::run),
    ("dirty", dirty::run),
    ("keeper", keeper::run),
    ("peers", peers::run),
];

fn main() {
    let args: Vec<_> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    if let [word, dir] = &args[..]
        && word == workload::WORD
    {
        return workload::files(dir.as_ref());
    }
    if let Some(name) = host::child_request() {
        let part = PARTS.iter().find(|(part, _)| *part == name).expect("asked for by the parent");
        return part.1(&host::enter());
    }
    assert!(
        rustix::process::geteuid().is_root(),
        "this mounts and freezes: run `make bench` as root"
    );
    let wrong = args.iter().find(|a| PARTS.iter().all(|(part, _)| part != a));
    assert!(wrong.is_none(), "no part {wrong:?}; there are {:?}", PARTS.map(|(part, _)| part));
    figures::machine();
    let failed: Vec<_> = PARTS
        .iter()
        .filter(|(part, _)| args.is_empty() || args.iter().any(|a| a == part))
        .filter(|(part, _)| !host::run_apart(part))
        .map(|(part, _)| *part)
        .collect();
    assert!(failed.is_empty(), "these parts did not come to their end: {failed:?}");
}
