//! Properties of the authority's rules.

use std::time::Duration;

use proptest::prelude::*;

use super::super::ids::{Generation, HostId, LeaseId, SessionId, Version};
use super::super::lease::{HolderKind, LeaseState};
use super::super::time::{BootInstant, BootNs};
use super::super::workspace::{Acquire, KeyState, PUBLISH_REFUSALS, Publish, Workspace};
use super::{boot, key, layer};

/// A request with every field drawn apart, so that each condition is missed at times.
#[derive(Clone, Debug)]
enum Ask {
    Acquire { lease: u128, session: u128, force: bool, at_head: Option<bool> },
    Renew { lease: u128, generation: u64 },
    Releasing { lease: u128, generation: u64 },
    End { lease: u128, generation: u64, state: LeaseState },
    Publish { lease: u128, generation: u64, session: u128, version: u64, head: bool, key: usize },
    Enter { key: usize, sent: bool },
    Bury { key: usize },
    Hold,
    Repair,
    Recreate,
    Wait(u64),
    Reboot,
}

fn asks() -> impl Strategy<Value = Ask> {
    let ids = || (1u128..4, 0u64..5);
    let ends = prop_oneof![
        Just(LeaseState::Released),
        Just(LeaseState::Revoked),
        Just(LeaseState::Active)
    ];
    prop_oneof![
        4 => (1u128..4, 1u128..3, any::<bool>(), proptest::option::of(any::<bool>())).prop_map(
            |(lease, session, force, at_head)| Ask::Acquire { lease, session, force, at_head }
        ),
        2 => ids().prop_map(|(lease, generation)| Ask::Renew { lease, generation }),
        1 => ids().prop_map(|(lease, generation)| Ask::Releasing { lease, generation }),
        2 => (ids(), ends).prop_map(|((lease, generation), state)| Ask::End {
            lease, generation, state
        }),
        8 => (ids(), 1u128..3, 0u64..3, any::<bool>(), 0usize..4).prop_map(
            |((lease, generation), session, version, head, key)| Ask::Publish {
                lease, generation, session, version, head, key
            }
        ),
        1 => (0usize..4).prop_map(|key| Ask::Bury { key }),
        1 => Just(Ask::Hold),
        2 => Just(Ask::Repair),
        1 => Just(Ask::Recreate),
        3 => (0u64..7).prop_map(Ask::Wait),
        1 => Just(Ask::Reboot),
        2 => (0..4_usize, any::<bool>()).prop_map(|(key, sent)| Ask::Enter { key, sent }),
    ]
}

struct Bench {
    w: Workspace,
    keys: Vec<KeyState>,
    now: BootInstant,
    boots: u128,
}

impl Bench {
    fn new() -> Self {
        let w = Workspace::new("w".parse().unwrap(), "o".parse().unwrap(), None);
        let now = BootInstant { boot: boot(1), ns: BootNs(0) };
        Self { w, keys: vec![KeyState::Unused; 4], now, boots: 1 }
    }

    /// The conditions of I1, written down apart from the product.
    fn may_publish(&self, wish: &Publish, key: usize) -> bool {
        let Some(l) = &self.w.lease else { return false };
        self.w.hold.is_none()
            && !self.w.deleted
            && matches!(
                self.keys[key],
                KeyState::Unused | KeyState::Prepared | KeyState::Sent | KeyState::Unknown { .. }
            )
            && (l.id, l.session) == (wish.lease, wish.session)
            && l.generation == wish.generation
            && self.w.generation == wish.generation
            && matches!(l.state, LeaseState::Active | LeaseState::Releasing)
            && l.expires.boot == self.now.boot
            && self.now.ns < l.expires.ns
            && wish.expected == self.w.at
    }

    fn play(&mut self, ask: Ask) -> Result<(), TestCaseError> {
        let (before, was_live) = (self.w.clone(), self.w.live_lease(&self.now).cloned());
        let mut granted = false;
        let mut published = false;
        match ask {
            Ask::Acquire { lease, session, force, at_head } => {
                let wish = acquire(&self.w, lease, session, force, at_head);
                if let Ok((next, got)) = self.w.acquire(&wish, &self.now) {
                    let forced = wish.force.is_some() && wish.only_at.is_none();
                    // A readmitted session takes over from itself.
                    let own = wish.only_at.is_some()
                        && was_live.as_ref().is_some_and(|l| l.session == wish.session);
                    prop_assert!(was_live.is_none() || forced || own, "a live lease was taken");
                    prop_assert!(wish.only_at.is_none_or(|at| at == before.at));
                    prop_assert_eq!(got.lease.generation.0, before.generation.0 + 1);
                    prop_assert!(got.lease.expires.ns <= got.lease.ends.ns, "it outlives its end");
                    granted = true;
                    self.w = next;
                }
            }
            Ask::Renew { lease, generation } => {
                let id = LeaseId::from_u128(lease);
                if let Ok((next, l)) = self.w.renew(id, Generation(generation), &self.now) {
                    let live = was_live.clone().expect("a lease that ran out was revived");
                    prop_assert_eq!((live.id, live.generation), (id, Generation(generation)));
                    prop_assert!(live.expires.ns <= l.expires.ns && l.expires.ns <= l.ends.ns);
                    self.w = next;
                }
            }
            Ask::Releasing { lease, generation } => {
                let id = LeaseId::from_u128(lease);
                if let Ok((next, ())) = self.w.releasing(id, Generation(generation), &self.now) {
                    prop_assert!(was_live.is_some());
                    self.w = next;
                }
            }
            Ask::End { lease, generation, state } => {
                let id = LeaseId::from_u128(lease);
                if let Ok((next, ())) = self.w.end(id, Generation(generation), state, "why") {
                    self.w = next;
                }
            }
            Ask::Publish { lease, generation, session, version, head, key: k } => {
                let mut expected = before.at.clone();
                expected.version = Version(version);
                if !head {
                    expected.head = expected.head.with(layer(9));
                }
                let wish = Publish {
                    workspace: before.id.clone(),
                    lease: LeaseId::from_u128(lease),
                    generation: Generation(generation),
                    session: SessionId::from_u128(session),
                    expected,
                    key: key(k as u128),
                    layer: layer(k as u8),
                    whole: None,
                    reverts_to: None,
                };
                let may = self.may_publish(&wish, k);
                match self.w.publish(&wish, &self.keys[k], &self.now) {
                    Ok((next, at)) if !matches!(self.keys[k], KeyState::Committed { .. }) => {
                        prop_assert!(may, "published against a condition");
                        prop_assert_eq!(at.version.0, before.at.version.0 + 1);
                        prop_assert_eq!(at.head.0.last(), Some(&wish.layer));
                        prop_assert_eq!(&next.at, &at);
                        self.keys[k] = KeyState::Committed { layer: wish.layer, at };
                        published = true;
                        self.w = next;
                    }
                    Ok((next, at)) => {
                        let same = KeyState::Committed { layer: wish.layer, at };
                        prop_assert_eq!(&self.keys[k], &same, "a key changed its answer");
                        prop_assert_eq!(&next, &before);
                    }
                    Err(refusal) => {
                        prop_assert!(!may, "refused although every condition holds");
                        prop_assert!(PUBLISH_REFUSALS.contains(&refusal.code), "{:?}", refusal);
                        if let KeyState::Rejected { code } = self.keys[k] {
                            prop_assert_eq!(refusal.code, code, "a key changed its answer");
                        } else if self.keys[k].is_open() {
                            self.keys[k] = KeyState::Rejected { code: refusal.code };
                        }
                    }
                }
            }
            Ask::Bury { key } => {
                if self.keys[key] == KeyState::Unused || self.keys[key].is_open() {
                    self.keys[key] = KeyState::Buried;
                }
            }
            Ask::Enter { key, sent } if self.keys[key] == KeyState::Unused => {
                self.keys[key] = if sent { KeyState::Sent } else { KeyState::Prepared };
            }
            Ask::Enter { .. } => {}
            Ask::Hold => self.w = self.w.held("odd"),
            Ask::Repair => self.w = self.w.repaired(&self.w.seen()),
            Ask::Recreate => {
                self.w = Workspace::new(before.id.clone(), before.owner.clone(), Some(&before));
                prop_assert_eq!(self.w.generation, before.generation);
                return Ok(());
            }
            Ask::Wait(n) => self.now.ns.0 += n,
            Ask::Reboot => {
                self.boots += 1;
                self.now = BootInstant { boot: boot(self.boots), ns: BootNs(0) };
            }
        }
        prop_assert!(granted || self.w.generation == before.generation);
        prop_assert!(published || self.w.at == before.at, "the head moved without a publication");
        let revived = was_live.is_none() && self.w.live_lease(&self.now).is_some();
        let held_back = before.hold.is_some() && self.w.hold.is_none();
        prop_assert!(!revived || granted || held_back, "a dead lease lives");
        Ok(())
    }
}

fn acquire(w: &Workspace, lease: u128, session: u128, force: bool, at: Option<bool>) -> Acquire {
    let other = super::super::head::HeadAt { version: Version(99), ..w.at.clone() };
    Acquire {
        workspace: w.id.clone(),
        lease: LeaseId::from_u128(lease),
        owner: "o".parse().unwrap(),
        host: HostId::from_u128(1),
        session: SessionId::from_u128(session),
        holder: HolderKind::Beat,
        ttl: Duration::from_nanos(5),
        max_lifetime: Duration::from_nanos(if force { 3 } else { 12 }),
        force: force.then(|| "now".to_owned()),
        only_at: at.map(|right| if right { w.at.clone() } else { other }),
        seen: w.seen(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn the_authority_keeps_its_rules(asks in proptest::collection::vec(asks(), 1..40)) {
        let mut bench = Bench::new();
        for ask in asks {
            bench.play(ask)?;
        }
    }
}
