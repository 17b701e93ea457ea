//! Taking every session of the host down, before it goes out of service: writers are asked to end,
//! then killed; cgroups and mounts go; what was written and not published stays as preserved deltas.

use std::sync::Arc;
use std::time::Duration;

use super::{Agent, PATIENCE, actor, unavailable};
use crate::agent::failure::{Caller, Failure};
use crate::agent::host::Host;
use crate::agent::slot::{Applied, Slot};
use crate::kernel::clock;
use crate::model::code::Code;
use crate::model::facts::Fact;
use crate::model::ids::PublicationKey;
use crate::model::journal::{Draft, Journal};
use crate::model::session::{CloseMode, FenceWish, State};
use crate::model::step::Event;
use crate::model::view::{DrainHost, Drained};
use crate::store::Durability;

/// Between two looks at what is left.
const ROUND: Duration = Duration::from_millis(50);

impl Agent {
    /// Takes all sessions down and refuses new ones until the agent is started again. Answers when
    /// all are down, or what is left when the time is over; that goes on by itself.
    pub async fn drain(&self, by: &Caller, wish: DrainHost) -> Result<Drained, Failure> {
        let who = actor(by);
        let entry = Draft {
            kind: "drain".to_owned(),
            workspace: None,
            session: None,
            generation: None,
            actor: who.clone(),
            detail: serde_json::json!({ "sessions": self.0.slots().len() }),
        };
        let journal = Journal { sessions: vec![], entries: vec![entry] };
        // From here on no open gets through: one under way is seen below, a later one sees this.
        self.0.start_draining();
        self.blocking(move |host| {
            host.store.record(&journal, Durability::Full).map_err(unavailable)
        })
        .await?;
        let wait = wish.wait_ms.map_or(PATIENCE, Duration::from_millis);
        let until = clock::now().plus(wait);
        let all = self.0.slots();
        loop {
            let mut left = false;
            for slot in self.0.slots() {
                left |= !self.0.take_down(&slot, &who);
            }
            if !left || clock::now() >= until {
                break;
            }
            tokio::time::sleep(ROUND).await;
        }
        let mut drained = Drained { closed: 0, preserved: vec![], left: vec![] };
        for slot in &all {
            let s = slot.session();
            match (s.state, s.facts.has(Fact::Gone)) {
                (State::Closed, _) => drained.closed += 1,
                (State::Preserved, true) => drained.preserved.push(self.session_view(slot)),
                (_, _) => drained.left.push(self.session_view(slot)),
            }
        }
        // Not by what is left: a quarantined session may need none. It stays while an entry does, and
        // goes as the last one leaves.
        self.blocking(|host| {
            host.gate_lower();
            Ok(())
        })
        .await?;
        Ok(drained)
    }
}

impl Host {
    /// Does what brings a session nearer to its end; whether it is there.
    fn take_down(self: &Arc<Self>, slot: &Arc<Slot>, by: &str) -> bool {
        let s = slot.session();
        let fence = || Event::FenceAsked {
            wish: FenceWish { to: Fact::Gone, on_busy: None },
            by: by.to_owned(),
            reason: "the host is drained".to_owned(),
            now: clock::now(),
        };
        match s.state {
            State::Active => {
                let close =
                    Event::CloseAsked { mode: CloseMode::Keep, key: PublicationKey::fresh() };
                // Something may be under way that a close would wait for.
                if let Applied::Refused(_) = self.apply(slot, close, by) {
                    self.apply(slot, fence(), by);
                }
                false
            }
            State::Fencing | State::Fenced | State::Preserved if s.facts.has(Fact::Gone) => true,
            State::Fencing | State::Fenced | State::Preserved => {
                // Once: what fails is tried again at the reconciler's ticks.
                if s.fence.to != Fact::Gone {
                    self.apply(slot, fence(), by);
                }
                false
            }
            State::Opening | State::Releasing | State::Deleting => false,
            // A person has to look at a quarantined one; waiting changes nothing.
            State::Closed | State::Quarantined => true,
        }
    }

    /// Refuses what would start a writer on a host that is being drained.
    pub fn not_draining(&self) -> Result<(), Failure> {
        match self.draining() {
            false => Ok(()),
            true => Err(Code::Draining.into()),
        }
    }
}
