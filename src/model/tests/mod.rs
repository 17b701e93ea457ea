//! Tests of the rules: a table of the steps that matter, and properties over random sequences.

mod breaker;
mod classify;
mod foreign;
mod gate;
mod gather;
mod image;
mod properties;
mod seal;
mod table;
mod workspace;

use std::collections::BTreeMap;
use std::time::Duration;

use uuid::Uuid;

use super::facts::{Facts, Holder, Proof};
use super::head::{Digest, HeadAt};
use super::ids::{BootId, Generation, HostId, LeaseId, PublicationKey, SessionId};
use super::lease::HolderKind;
use super::session::{Policy, RunAs, Session, State};
use super::time::BootNs;

fn boot(n: u128) -> BootId {
    BootId(Uuid::from_u128(n))
}

fn key(n: u128) -> PublicationKey {
    PublicationKey::from_u128(n)
}

fn layer(n: u8) -> Digest {
    Digest([n; 32])
}

/// A kernel's answer that names the event it came with.
fn proof(n: u64) -> Proof {
    Proof { asked: "asked".into(), answer: format!("answer {n}"), at: BootNs(n), took_us: 1 }
}

/// The kernel itself holds the overlay, by a loop device on a file in it.
fn loop_device() -> Holder {
    Holder {
        pid: 0,
        command: "kernel".into(),
        how: Holder::LOOP.into(),
        what: "loop7 backed by /merged/disk".into(),
        cgroup: String::new(),
        inside: false,
    }
}

pub(crate) fn session(state: State) -> Session {
    Session {
        id: SessionId::from_u128(1),
        workspace: "w".parse().unwrap(),
        owner: "me".parse().unwrap(),
        host: HostId::from_u128(1),
        boot: boot(1),
        lease: LeaseId::from_u128(1),
        generation: Generation(1),
        holder: HolderKind::Beat,
        token: Digest([7; 32]),
        run_as: RunAs { uid: 1000, gid: 1000, mapped: false, host_network: false },
        limits: Default::default(),
        external: None,
        upper: Default::default(),
        ttl: Duration::from_secs(30),
        ends: BootNs(1 << 60),
        base: HeadAt::default(),
        expected: HeadAt::default(),
        own_layer: None,
        labels: BTreeMap::new(),
        policy: Policy::default(),
        fence: crate::model::session::FenceWish::default(),
        state,
        work: None,
        facts: Facts::default(),
        doubt: None,
        loss: None,
        holders: Vec::new(),
        busy_since: None,
        seal: false,
        upper_freeze: Default::default(),
        run_on: false,
        blockers: Vec::new(),
        altered: None,
        unknown: BTreeMap::new(),
        disposition: None,
        witnessed: Duration::ZERO,
        keep_until: None,
        tries: 0,
        trouble: None,
        seeded: None,
    }
}
