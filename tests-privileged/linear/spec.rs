//! What a workspace is to its clients, in a page: one lease at a time with a growing generation, a
//! version, keys with one answer each, a task that is out once. Written apart from the product's rules.

use std::collections::{BTreeMap, BTreeSet};

use overfence::model::code::Code;
use stateright::semantics::SequentialSpec;

/// What a client asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// A lease; by force over a live one.
    Acquire {
        force: bool,
    },
    Renew {
        generation: u64,
    },
    Release {
        generation: u64,
    },
    Revoke {
        generation: u64,
    },
    Publish {
        generation: u64,
        expected: u64,
        key: u128,
        layer: u8,
    },
    /// Of the one task there is.
    Begin {
        generation: u64,
        expected: u64,
        key: u128,
    },
    /// Time goes by, longer than any lease.
    Expire,
    /// Who was granted this generation has been told, or the agent that granted it is gone: from now on
    /// no session of an older one is thought to hold its lease.
    Known {
        generation: u64,
    },
    /// What is current.
    Look,
}

/// What it is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ret {
    Granted { generation: u64, version: u64 },
    Done,
    Known,
    Published { version: u64 },
    Begun,
    Repeated,
    Resumed,
    Taken,
    Seen { generation: u64, version: u64 },
    Refused(Code),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lease {
    Live,
    /// Granted, and nobody was told: an agent that does not finish an opening gives its lease back.
    Untold,
    RanOut,
    Released,
    Revoked,
}

/// A key, and all that was asked under it.
type Asked = (u64, u64, u8);

/// The sequential object.
#[derive(Clone, Debug)]
pub struct Spec {
    /// An agent stands before it, which may refuse for reasons of its own; that changes nothing.
    pub through_an_agent: bool,
    generation: u64,
    lease: Option<Lease>,
    version: u64,
    keys: BTreeMap<u128, (Asked, Ret)>,
    task: Option<(u128, u64)>,
    /// Generations whose sessions an agent may think to hold their lease. A sign of life is answered
    /// from that and not by the authority, whose grant to the next one is there a moment earlier.
    held: BTreeSet<u64>,
}

impl Spec {
    pub fn new(through_an_agent: bool) -> Self {
        let (keys, lease, task) = (BTreeMap::new(), None, None);
        let held = BTreeSet::new();
        Self { through_an_agent, generation: 0, lease, version: 0, keys, task, held }
    }

    fn authorised(&self, generation: u64) -> Result<(), Code> {
        match self.lease {
            _ if generation != self.generation => Err(Code::StaleGeneration),
            Some(Lease::Live | Lease::Untold) => Ok(()),
            Some(Lease::RanOut) => Err(Code::LeaseExpired),
            Some(Lease::Released) => Err(Code::LeaseReleased),
            Some(Lease::Revoked) => Err(Code::LeaseRevoked),
            None => Err(Code::LeaseMismatch),
        }
    }

    fn may_commit(&self, generation: u64, expected: u64) -> Result<(), Code> {
        self.authorised(generation)?;
        (expected == self.version).then_some(()).ok_or(Code::VersionMismatch)
    }

    fn end(&mut self, generation: u64, how: Lease) -> Ret {
        self.held.remove(&generation);
        if generation != self.generation {
            return Ret::Refused(Code::StaleGeneration);
        }
        if matches!(self.lease, Some(Lease::Live | Lease::Untold | Lease::RanOut)) {
            self.lease = Some(how);
        }
        Ret::Done
    }
}

impl SequentialSpec for Spec {
    type Op = Op;
    type Ret = Ret;

    fn invoke(&mut self, op: &Op) -> Ret {
        match *op {
            Op::Acquire { force } => {
                if self.lease == Some(Lease::Live) && !force {
                    return Ret::Refused(Code::LeaseHeld);
                }
                let granted = if self.through_an_agent { Lease::Untold } else { Lease::Live };
                (self.generation, self.lease) = (self.generation + 1, Some(granted));
                self.held.insert(self.generation);
                Ret::Granted { generation: self.generation, version: self.version }
            }
            Op::Renew { generation } if self.through_an_agent => {
                match self.held.contains(&generation) {
                    true => Ret::Done,
                    false => Ret::Refused(Code::LeaseLost),
                }
            }
            Op::Known { generation } => {
                self.held.retain(|held| *held >= generation);
                Ret::Known
            }
            Op::Renew { generation } => {
                self.authorised(generation).map_or_else(Ret::Refused, |()| Ret::Done)
            }
            Op::Release { generation } => self.end(generation, Lease::Released),
            Op::Revoke { generation } => self.end(generation, Lease::Revoked),
            // The session knows what it expects, and its agent makes the key.
            Op::Publish { generation, .. } if self.through_an_agent => {
                match self.authorised(generation) {
                    Err(code) => Ret::Refused(code),
                    Ok(()) => {
                        self.version += 1;
                        Ret::Published { version: self.version }
                    }
                }
            }
            Op::Publish { generation, expected, key, layer } => {
                let asked = (generation, expected, layer);
                if let Some((before, answer)) = self.keys.get(&key) {
                    return if *before == asked { *answer } else { Ret::Refused(Code::KeyUsed) };
                }
                let answer = match self.may_commit(generation, expected) {
                    Err(code) => Ret::Refused(code),
                    Ok(()) => {
                        self.version += 1;
                        Ret::Published { version: self.version }
                    }
                };
                self.keys.insert(key, (asked, answer));
                answer
            }
            Op::Begin { generation, expected, key } => {
                let may = match self.through_an_agent {
                    true => self.authorised(generation),
                    false => self.may_commit(generation, expected),
                };
                if let Err(code) = may {
                    return Ret::Refused(code);
                }
                match self.task {
                    None => {
                        self.task = Some((key, generation));
                        Ret::Begun
                    }
                    Some((first, _)) if first != key => Ret::Taken,
                    Some((_, by)) if by == generation => Ret::Repeated,
                    Some(_) => Ret::Resumed,
                }
            }
            Op::Expire => {
                if self.lease == Some(Lease::Live) {
                    self.lease = Some(Lease::RanOut);
                }
                Ret::Done
            }
            Op::Look => Ret::Seen { generation: self.generation, version: self.version },
        }
    }

    fn is_valid_step(&mut self, op: &Op, ret: &Ret) -> bool {
        match (op, ret) {
            (_, Ret::Refused(_)) if self.through_an_agent => true,
            // To close or to fence a session whose lease is over is done, too.
            (Op::Release { generation }, Ret::Done) if self.through_an_agent => {
                let _ = self.end(*generation, Lease::Released);
                true
            }
            (Op::Revoke { generation }, Ret::Done) if self.through_an_agent => {
                let _ = self.end(*generation, Lease::Revoked);
                true
            }
            (Op::Acquire { .. }, _) => {
                let fits = self.invoke(op) == *ret;
                self.lease = self.lease.map(|l| if l == Lease::Untold { Lease::Live } else { l });
                fits
            }
            _ => self.invoke(op) == *ret,
        }
    }
}
