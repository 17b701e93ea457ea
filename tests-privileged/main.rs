//! The privileged suite: real mounts, cgroups and namespaces of the running kernel.
//!
//! Each test runs in a process of its own, as root, in a private mount namespace, with a fresh
//! directory and a fresh cgroup. Whatever the test does, also when it fails or hangs, its
//! processes are killed through the cgroup, its mounts die with the namespace, and its directory
//! is removed. Without root nothing runs and the suite says so loudly.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod agent_process;
mod at_large;
mod backup;
mod breakers;
mod bring_back;
mod compete;
mod confinement;
mod container;
mod content;
mod contract;
mod daemon;
mod deep;
mod delta;
mod demo;
mod faults;
mod full_disk;
mod gate;
mod gc;
mod host;
mod hostile;
mod image;
mod keeper;
mod keeping;
mod kept;
mod kernel_facts;
mod leases;
mod ledger;
mod linear;
mod main_job;
mod needs;
mod openapi;
mod outside;
mod package;
mod places;
mod progress;
mod races;
mod rebase;
mod reflink;
mod restart;
mod rig;
mod rollback;
mod room;
mod round_trip;
mod runbook;
mod seal;
mod second_line;
mod signals;
mod slow_disk;
mod systemd;
mod upper;
mod workload;
mod writers;

use host::Test;
use libtest_mimic::{Arguments, Trial};
use needs::{Needs, Verdict};

fn all() -> Vec<(&'static str, Vec<Test>)> {
    vec![
        ("main_job", main_job::tests()),
        ("leases", leases::tests()),
        ("at_large", at_large::tests()),
        ("races", races::tests()),
        ("ledger", ledger::tests()),
        ("linear", linear::tests()),
        ("compete", compete::tests()),
        ("kept", kept::tests()),
        ("runbook", runbook::tests()),
        ("signals", signals::tests()),
        ("openapi", openapi::tests()),
        ("contract", contract::tests()),
        ("restart", restart::tests()),
        ("faults", faults::tests()),
        ("rollback", rollback::tests()),
        ("content", content::tests()),
        ("gc", gc::tests()),
        ("deep", deep::tests()),
        ("backup", backup::tests()),
        ("daemon", daemon::tests()),
        ("kernel_facts", kernel_facts::tests()),
        ("delta", delta::tests()),
        ("hostile", hostile::tests()),
        ("keeping", keeping::tests()),
        ("round_trip", round_trip::tests()),
        ("outside", outside::tests()),
        ("bring_back", bring_back::tests()),
        ("rebase", rebase::tests()),
        ("reflink", reflink::tests()),
        ("gate", gate::tests()),
        ("upper", upper::tests()),
        ("seal", seal::tests()),
        ("places", places::tests()),
        ("progress", progress::tests()),
        ("image", image::tests()),
        ("full_disk", full_disk::tests()),
        ("writers", writers::tests()),
        ("sealed", writers::sealed()),
        ("slow_disk", slow_disk::tests()),
        ("breakers", breakers::tests()),
        ("confinement", confinement::tests()),
        ("workload", workload::tests()),
        ("keeper", keeper::tests()),
        ("second_line", second_line::tests()),
        ("demo", demo::tests()),
        ("systemd", systemd::tests()),
        ("container", container::tests()),
        ("package", package::tests()),
    ]
}

fn main() {
    writers::act_if_asked();
    compete::rival_if_asked();
    if let Some(name) = host::child_request() {
        host::run_child(&all(), &name);
    }
    let args = Arguments::from_args();
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("\n*** NOT ROOT: no privileged test is run. Run `make test` as root. ***\n");
    }
    let tests = all();
    let names: Vec<String> = tests
        .iter()
        .flat_map(|(room, tests)| tests.iter().map(move |t| format!("{room}::{}", t.name)))
        .collect();
    let needs = root.then(Needs::of_this_host);
    let mut trials: Vec<Trial> = names.iter().map(|name| trial(name, needs.as_ref())).collect();
    trials.push(Trial::test("needs::the_rule_holds", || {
        needs::the_rule_holds();
        Ok(())
    }));
    trials.push(Trial::test("writers::the_table_is_in_the_docs", || {
        writers::the_table_is_in_the_docs().map_err(Into::into)
    }));
    if let Some(needs) = needs {
        let wrong = needs.wrong(&names);
        trials.push(Trial::test("needs::what_is_listed_is_missing", move || {
            if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n").into()) }
        }));
    }
    libtest_mimic::run(&args, trials).exit();
}

/// One test of the suite. Without root, when there are no needs, it is not run; main said so.
fn trial(name: &str, needs: Option<&Needs>) -> Trial {
    let full = name.to_owned();
    match needs.map(|n| n.verdict(name)) {
        None => Trial::test(name, || Ok(())).with_ignored_flag(true),
        Some(Verdict::Run) => Trial::test(name, move || host::run_apart(&full)),
        Some(Verdict::Skip(reason)) => {
            eprintln!("skipped: {name}: {reason}");
            Trial::test(name, || Ok(())).with_ignored_flag(true)
        }
        Some(Verdict::Fail(why)) => Trial::test(name, move || Err(why.into())),
    }
}
