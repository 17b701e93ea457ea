//! An authority with one fault in it, as a backend could have it: the tester has to find each by what
//! careful clients are told.

use std::convert::Infallible;
use std::sync::Mutex;
use std::time::Duration;

use overfence::authority::memory::{MemoryAuthority, State};
use overfence::authority::{
    Answer, Authority, Error, HistoryRow, Layers, Ledger, NewWorkspace, Pins, Renewal, Rider,
    no_rider,
};
use overfence::model::code::Code;
use overfence::model::head::{Digest, HeadAt};
use overfence::model::ids::{Generation, LeaseId, Owner, PublicationKey, RequestKey, WorkspaceId};
use overfence::model::lease::{Lease, LeaseState};
use overfence::model::ledger::{Publication, Which};
use overfence::model::request::{Begin, Begun, Request, Settlement};
use overfence::model::workspace::{
    Acquire, Acquired, KeyState, Publish, Refusal, Seen, Workspace, Writer,
};
use overfence::store::{Clock, Unreadable};

use super::clients::lock;

/// What is wrong with it. Each must be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Reads are answered from what the read before saw.
    ReadsStale,
    /// Every third publication is acknowledged and not kept.
    LosesCommits,
    /// Whether a lease is live, and the grant, are two transactions.
    GrantsTwice,
    /// A revocation is acknowledged and not kept.
    ForgetsRevocations,
    /// A request is begun whatever became of its lease.
    BeginsWithoutALease,
    /// A lease that is over gives its generation to the next one.
    RepeatsGenerations,
    /// A renewal extends a lease that ran out.
    RevivesLeases,
    /// The last to publish wins, whatever they had seen.
    IgnoresWhatIsExpected,
    /// The answer to a key is not kept: the same publication again is committed again.
    ForgetsKeys,
}

pub const FAULTS: [Fault; 9] = [
    Fault::ReadsStale,
    Fault::LosesCommits,
    Fault::GrantsTwice,
    Fault::ForgetsRevocations,
    Fault::BeginsWithoutALease,
    Fault::RepeatsGenerations,
    Fault::RevivesLeases,
    Fault::IgnoresWhatIsExpected,
    Fault::ForgetsKeys,
];

/// See the module. Without a fault it is the authority in it.
pub struct Faulty {
    inner: Mutex<MemoryAuthority>,
    clock: Clock,
    fault: Option<Fault>,
    read: Mutex<Option<Workspace>>,
    published: Mutex<u64>,
}

impl Faulty {
    pub fn new(clock: Clock, fault: Option<Fault>) -> Self {
        let inner = Mutex::new(MemoryAuthority::new(State::default(), clock.clone()));
        Self { inner, clock, fault, read: Mutex::default(), published: Mutex::default() }
    }

    fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    /// The same with other records, for what is not to be kept.
    fn aside(&self, change: impl FnOnce(&mut State)) -> MemoryAuthority {
        let mut state = lock(&self.inner).state();
        change(&mut state);
        MemoryAuthority::new(state, self.clock.clone())
    }

    /// Changes the records for good.
    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut inner = lock(&self.inner);
        let mut state = inner.state();
        change(&mut state);
        *inner = MemoryAuthority::new(state, self.clock.clone());
    }
}

fn workspace<'a>(state: &'a mut State, id: &WorkspaceId) -> &'a mut Workspace {
    state.workspaces.get_mut(id).unwrap()
}

/// Its lease, as if it were good.
fn revived(state: &mut State, id: &WorkspaceId) -> Option<Lease> {
    let lease = workspace(state, id).lease.as_mut()?;
    lease.state = LeaseState::Active;
    lease.expires.ns = lease.ends.ns.plus(Duration::from_secs(1_000_000));
    Some(lease.clone())
}

impl Authority for Faulty {
    fn create(&self, new: &NewWorkspace, rider: Rider<'_, Workspace>) -> Answer<Workspace> {
        lock(&self.inner).create(new, rider)
    }

    fn delete(&self, id: &WorkspaceId, why: &str, rider: Rider<'_, ()>) -> Answer<()> {
        lock(&self.inner).delete(id, why, rider)
    }

    fn get(&self, id: &WorkspaceId) -> Result<Option<Workspace>, Error> {
        let now = lock(&self.inner).get(id)?;
        if !self.has(Fault::ReadsStale) {
            return Ok(now);
        }
        let before = std::mem::replace(&mut *lock(&self.read), now.clone());
        Ok(before.or(now))
    }

    fn list(&self) -> Result<Vec<Workspace>, Error> {
        lock(&self.inner).list()
    }

    fn unreadable(&self) -> Result<Vec<Unreadable>, Error> {
        lock(&self.inner).unreadable()
    }

    fn history(&self, id: &WorkspaceId, limit: usize) -> Result<Vec<HistoryRow>, Error> {
        lock(&self.inner).history(id, limit)
    }

    fn acquire(&self, wish: &Acquire, rider: Rider<'_, Acquired>) -> Answer<Acquired> {
        if self.has(Fault::RepeatsGenerations) {
            let mut inner = lock(&self.inner);
            let mut state = inner.state();
            let of = workspace(&mut state, &wish.workspace);
            if of.live_lease(&(self.clock)()).is_none() {
                of.generation = Generation(of.generation.0.saturating_sub(1));
            }
            *inner = MemoryAuthority::new(state, self.clock.clone());
            return inner.acquire(wish, rider);
        }
        if !self.has(Fault::GrantsTwice) || wish.force.is_some() {
            return lock(&self.inner).acquire(wish, rider);
        }
        let held = self.get(&wish.workspace)?.and_then(|w| w.live_lease(&(self.clock)()).cloned());
        // Others get in between.
        std::thread::sleep(Duration::from_micros(200));
        let force = held.is_none().then(|| "it looked free".to_owned());
        lock(&self.inner).acquire(&Acquire { force, ..wish.clone() }, rider)
    }

    fn renew(&self, batch: &[Renewal]) -> Result<Vec<Result<Lease, Refusal>>, Error> {
        let answers = lock(&self.inner).renew(batch)?;
        if !self.has(Fault::RevivesLeases) {
            return Ok(answers);
        }
        let answers = batch.iter().zip(answers).map(|(one, answer)| match answer {
            Err(refusal) if refusal.code == Code::LeaseExpired => {
                let mut lease = None;
                self.change(|state| lease = revived(state, &one.workspace));
                lease.ok_or(refusal)
            }
            answer => answer,
        });
        Ok(answers.collect())
    }

    fn releasing(&self, id: &WorkspaceId, lease: LeaseId, generation: Generation) -> Answer<()> {
        lock(&self.inner).releasing(id, lease, generation)
    }

    fn end(
        &self,
        id: &WorkspaceId,
        lease: LeaseId,
        generation: Generation,
        state: LeaseState,
        why: &str,
        rider: Rider<'_, ()>,
    ) -> Answer<()> {
        if self.has(Fault::ForgetsRevocations) && state == LeaseState::Revoked {
            return self.aside(|_| ()).end(id, lease, generation, state, why, rider);
        }
        lock(&self.inner).end(id, lease, generation, state, why, rider)
    }

    fn publish(&self, wish: &Publish, rider: Rider<'_, HeadAt>) -> Answer<HeadAt> {
        *lock(&self.published) += 1;
        if self.has(Fault::LosesCommits) && lock(&self.published).is_multiple_of(3) {
            return self.aside(|_| ()).publish(wish, rider);
        }
        if self.has(Fault::IgnoresWhatIsExpected) {
            let inner = lock(&self.inner);
            let expected = inner.get(&wish.workspace)?.unwrap().at;
            return inner.publish(&Publish { expected, ..wish.clone() }, rider);
        }
        if self.has(Fault::ForgetsKeys) {
            let answer = lock(&self.inner).publish(wish, rider);
            self.change(|state| state.publications.clear());
            return answer;
        }
        lock(&self.inner).publish(wish, rider)
    }

    fn resolve(
        &self,
        id: &WorkspaceId,
        key: PublicationKey,
        rider: Rider<'_, KeyState>,
    ) -> Result<KeyState, Error> {
        lock(&self.inner).resolve(id, key, rider)
    }

    fn hold(&self, id: &WorkspaceId, why: &str, rider: Rider<'_, ()>) -> Result<(), Error> {
        lock(&self.inner).hold(id, why, rider)
    }

    fn repair(
        &self,
        id: &WorkspaceId,
        seen: &Seen,
        why: &str,
        rider: Rider<'_, Workspace>,
    ) -> Answer<Workspace> {
        lock(&self.inner).repair(id, seen, why, rider)
    }
}

impl Ledger for Faulty {
    fn enter(
        &self,
        wish: &Publish,
        owner: &Owner,
        stage: KeyState,
        rider: Rider<'_, ()>,
    ) -> Answer<()> {
        lock(&self.inner).enter(wish, owner, stage, rider)
    }

    fn doubt(&self, id: &WorkspaceId, key: PublicationKey, why: &str) -> Result<(), Error> {
        lock(&self.inner).doubt(id, key, why)
    }

    fn publications(&self, which: &Which) -> Result<Vec<Publication>, Error> {
        lock(&self.inner).publications(which)
    }

    fn assign(
        &self,
        id: &WorkspaceId,
        key: PublicationKey,
        to: &Owner,
        rider: Rider<'_, Publication>,
    ) -> Answer<Publication> {
        lock(&self.inner).assign(id, key, to, rider)
    }

    fn refuse(&self, who: &Writer, verb: &str, rider: Rider<'_, Infallible>) -> Answer<Infallible> {
        lock(&self.inner).refuse(who, verb, rider)
    }

    fn begin(&self, wish: &Begin, rider: Rider<'_, Begun>) -> Answer<Begun> {
        let answer = lock(&self.inner).begin(wish, rider)?;
        let ended = [Code::LeaseExpired, Code::LeaseRevoked, Code::LeaseReleased];
        match answer {
            Err(refusal)
                if self.has(Fault::BeginsWithoutALease) && ended.contains(&refusal.code) =>
            {
                self.aside(|state| drop(revived(state, &wish.workspace))).begin(wish, no_rider())
            }
            answer => Ok(answer),
        }
    }

    fn settle(
        &self,
        id: &WorkspaceId,
        key: &RequestKey,
        told: &Settlement,
        rider: Rider<'_, Request>,
    ) -> Answer<Request> {
        lock(&self.inner).settle(id, key, told, rider)
    }

    fn reassign(
        &self,
        id: &WorkspaceId,
        key: &RequestKey,
        to: &Owner,
        rider: Rider<'_, Request>,
    ) -> Answer<Request> {
        lock(&self.inner).reassign(id, key, to, rider)
    }

    fn requests(&self, which: &Which) -> Result<Vec<Request>, Error> {
        lock(&self.inner).requests(which)
    }

    fn prune(&self, before_ms: u64) -> Result<usize, Error> {
        lock(&self.inner).prune(before_ms)
    }
}

impl Layers for Faulty {
    fn pins(&self) -> Result<Pins, Error> {
        lock(&self.inner).pins()
    }

    fn bury(
        &self,
        candidates: &[Digest],
        pins: &Pins,
        rider: Rider<'_, Vec<Digest>>,
    ) -> Result<Vec<Digest>, Error> {
        lock(&self.inner).bury(candidates, pins, rider)
    }

    fn buried(&self) -> Result<Vec<Digest>, Error> {
        lock(&self.inner).buried()
    }

    fn exhume(&self, layers: &[Digest]) -> Result<(), Error> {
        lock(&self.inner).exhume(layers)
    }
}
