//! The privileged suite: real mounts, cgroups and namespaces of the running kernel.
//!
//! Each test runs in a process of its own, as root, in a private mount namespace, with a fresh
//! directory and a fresh cgroup. Whatever the test does, also when it fails or hangs, its
//! processes are killed through the cgroup, its mounts die with the namespace, and its directory
//! is removed. Without root nothing runs and the suite says so loudly.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod agent_process;
mod confinement;
mod demo;
mod host;
mod keeper;
mod kernel_facts;
mod leases;
mod main_job;
mod races;
mod restart;
mod rig;
mod room;
mod systemd;
mod upper;
mod workload;

use host::Test;
use libtest_mimic::{Arguments, Trial};

fn all() -> Vec<(&'static str, Vec<Test>)> {
    vec![
        ("main_job", main_job::tests()),
        ("leases", leases::tests()),
        ("races", races::tests()),
        ("restart", restart::tests()),
        ("kernel_facts", kernel_facts::tests()),
        ("upper", upper::tests()),
        ("confinement", confinement::tests()),
        ("workload", workload::tests()),
        ("keeper", keeper::tests()),
        ("demo", demo::tests()),
        ("systemd", systemd::tests()),
    ]
}

fn main() {
    if let Some(name) = host::child_request() {
        host::run_child(&all(), &name);
    }
    let args = Arguments::from_args();
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("\n*** NOT ROOT: no privileged test is run. Run `make test` as root. ***\n");
    }
    if root {
        systemd::say_what_is_not_tested();
    }
    let trials = all()
        .into_iter()
        .flat_map(|(room, tests)| tests.into_iter().map(move |t| (room, t)))
        .map(|(room, test)| {
            let name = format!("{room}::{}", test.name);
            let full = name.clone();
            Trial::test(name, move || host::run_apart(&full)).with_ignored_flag(!root)
        })
        .collect();
    libtest_mimic::run(&args, trials).exit();
}
