//! Starting: adopt what runs, freeze what is stale, finish or roll back what was half done.
//!
//! 1. store, keys, witnesses: an authority that answers below one puts the workspace on HOLD; 2. each session's cgroup, overlay and deadline entry are looked at; 3. every session is
//!    stepped with what was found: everything stale has `freeze=1` written when this returns, and
//!    READY may be said; proofs and removals follow by the sessions' workers.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::effects::text;
use super::host::Host;
use super::slot::{LeaseClock, Slot};
use crate::kernel::cgroup::Cgroup;
use crate::kernel::clock;
use crate::kernel::deadlines::Entry;
use crate::kernel::overlay;
use crate::model::classify::{self, Answer, Observed, Plan, Record, classify};
use crate::model::facts::Fact;
use crate::model::ids::SessionId;
use crate::model::journal::{Draft, Journal};
use crate::model::session::{Loss, Session, State};
use crate::model::step::{Event, Found, Purpose};
use crate::model::time::{BootInstant, BootNs};
use crate::store::{Durability, Unreadable};
use crate::upper::bundle;
use crate::upper::remove::{self, SessionDirs};

/// What a start found, for the log and for health.
#[derive(Clone, Copy, Debug, Default)]
pub struct Started {
    /// Sessions that go on under their lease.
    pub adopted: usize,
    /// Sessions found stale.
    pub stale: usize,
    /// Records that could not be believed.
    pub unreadable: usize,
}

/// What the authority said of a session's lease.
#[derive(Debug)]
pub(super) struct Heard {
    /// Its answer.
    pub answer: Answer,
    /// Why the lease is over, where it says so.
    loss: Option<Loss>,
    /// Why it gave no answer, if it gave none.
    cause: Option<String>,
}

/// What nobody has a record of, or one that is not believed, is stopped and left to a person: whatever
/// the host shows of it and whatever the authority says.
pub(super) fn unknown(record: Record, held: bool) -> Plan {
    let seen = Observed { record, rebooted: false, in_time: false, fence_stamped: false, held };
    classify(seen, Answer::Silent).1
}

impl Host {
    /// Everything up to READY.
    pub fn recover(self: &Arc<Self>) -> Result<Started, String> {
        // Before anything is appended to the chain that is to be compared.
        let gap = self.store.against_anchor().map_err(text)?;
        if let Err(fault) = self.record_start() {
            // A disk that is full to the last byte is no reason to leave what runs without an agent.
            if !self.store.reserve().space().short() {
                return Err(fault);
            }
            tracing::error!("the start is not recorded: {fault}");
        }
        if let Err(fault) = self.check_witnesses(gap) {
            if !self.store.reserve().space().short() {
                return Err(fault);
            }
            tracing::error!("the witnesses were not all heard: {fault}");
        }
        // Before any session's worker does the same.
        let told = |fault| tracing::error!("{}", text(fault));
        // No start fails for what is nobody's, or has something mounted in it.
        let swept = remove::sweep_unfinished(&self.paths.sessions).map_err(told).unwrap_or(0);
        let _ = self.layers.sweep().map_err(told);
        let _ = bundle::sweep(&self.paths.bundles).map_err(told);
        if swept > 0 {
            tracing::info!("finished {swept} unfinished open(s)");
        }
        let entries: Vec<_> = self.table().entries().collect();
        let mut started = Started::default();
        let records = self.store.sessions().map_err(text)?;
        self.recall_breaker(&records.iter().flatten().collect::<Vec<_>>())?;
        self.stop_orphans(&records, &entries);
        for record in records {
            match record {
                Ok(s) if s.state == State::Closed => {}
                Ok(s) => {
                    let slot = self.recover_one(s, &entries);
                    if slot.lock().session.holds_lease() {
                        started.adopted += 1;
                    } else {
                        started.stale += 1;
                    }
                }
                Err(unreadable) => {
                    started.unreadable += 1;
                    tracing::error!(
                        "session record {} is not believed: {}",
                        unreadable.id,
                        unreadable.why
                    );
                    self.freeze_unknown(&unreadable.id, &entries);
                    self.hold_for_session(&unreadable.id);
                }
            }
        }
        self.judge_breaker();
        if let Err(why) = self.finish_burials() {
            tracing::error!("layers that were being removed: {why}");
        }
        self.finish_removals()?;
        self.table().clear_torn().map_err(text)?;
        Ok(started)
    }

    /// What lies in the trash and no session's worker removes.
    pub fn trash_of_nobody(&self) -> crate::upper::Result<Vec<std::ffi::OsString>> {
        let mut left = remove::trashed(&self.paths.trash)?;
        left.retain(|name| {
            let id = name.to_str().and_then(|name| name.parse().ok());
            id.is_none_or(|id| self.slot(id).is_none())
        });
        Ok(left)
    }

    /// What lies in the trash may take minutes, by a workload's doing: nobody waits for it. Removals
    /// of sessions that have a record are their workers' to finish.
    fn finish_removals(self: &Arc<Self>) -> Result<(), String> {
        let mut left = self.trash_of_nobody().map_err(text)?;
        let plan = unknown(Record::Trashed, self.tripped().is_some());
        if plan != Plan::Remove && !left.is_empty() {
            let n = left.len();
            tracing::warn!("the breaker is open: {n} unfinished removal(s) wait for `gc`");
            left.clear();
        }
        // Captures and copies that were cut off; new ones have names of their own.
        let exports = std::fs::read_dir(&self.paths.exports).map_err(text)?;
        let cut_off: Vec<_> = exports.flatten().map(|entry| entry.path()).collect();
        let host = Arc::clone(self);
        self.runtime.spawn_blocking(move || {
            for path in cut_off {
                // What lies elsewhere is noted here, so that first.
                let done = bundle::sweep_noted(&path).and_then(|()| remove::remove_scratch(&path));
                if let Err(fault) = done {
                    tracing::error!("{}", text(fault));
                }
            }
            for name in left {
                match remove::finish_removal(&host.paths.trash, &name) {
                    Ok(removed) => {
                        let n = removed.entries;
                        tracing::info!("finished the removal of {}: {n} entries", name.display());
                    }
                    Err(fault) => tracing::error!("{}", text(fault)),
                }
            }
        });
        Ok(())
    }

    fn record_start(&self) -> Result<(), String> {
        let detail = serde_json::json!({
            "version": env!("CARGO_PKG_VERSION"), "host": self.id, "boot": self.boot,
            "config": self.config.digest(),
        });
        let entry = Draft {
            kind: "agent_start".to_owned(),
            workspace: None,
            session: None,
            generation: None,
            actor: "agent".to_owned(),
            detail,
        };
        self.store
            .record(&Journal { sessions: vec![], entries: vec![entry] }, Durability::Full)
            .map_err(text)
    }

    fn recover_one(self: &Arc<Self>, s: Session, entries: &[Entry]) -> Arc<Slot> {
        let deadline = entries.iter().find_map(|entry| match entry {
            Entry::Valid(d) if d.session == s.id && d.generation == s.generation => {
                Some(d.deadline)
            }
            Entry::Valid(_) | Entry::Torn { .. } | Entry::Free => None,
        });
        let same_boot = s.boot == self.boot;
        let dirs = SessionDirs::of(&self.paths.sessions, s.id, s.upper);
        let clock = LeaseClock::from_deadline(deadline.unwrap_or(BootNs(0)), s.ttl, s.ends);
        let slot = Slot::new(s, clock, dirs, true);
        if same_boot {
            self.reopen(&slot);
        }
        // An export or a count may have been cut off.
        if slot.session().facts.has(Fact::Gone) {
            self.unmount_left_image(&slot);
        }
        self.adopt(&slot);
        // What somebody else undid while no agent looked is noticed before anything is decided.
        super::watch::look(self, &slot);
        super::sweep::check_read_only(self, &slot);
        super::seal::check(self, &slot);
        let in_time = deadline.is_some_and(|at| at > clock::now());
        self.decide(&slot, in_time);
        let inner = slot.lock();
        if inner.session.holds_lease() {
            self.refresh_deadline(&inner);
        }
        drop(inner);
        super::gate::check(self, &slot);
        slot
    }

    /// A freeze comes ahead of its record: the stamp may know of a fence that the record does not.
    fn fence_stamped(&self, slot: &Slot) -> bool {
        let inner = slot.lock();
        let stamp = inner.cgroup.as_ref().and_then(|c| c.read_stamp().ok().flatten());
        stamp.is_some_and(|stamp| {
            stamp.purpose == Purpose::Fence && stamp.generation == inner.session.generation
        })
    }

    /// What it is and what is to be done, by the reconciler's table; and that, as events.
    fn decide(self: &Arc<Self>, slot: &Arc<Slot>, in_time: bool) {
        let s = slot.session();
        let seen = Observed {
            record: Record::of(&s, Duration::ZERO, true),
            rebooted: s.boot != self.boot,
            in_time,
            fence_stamped: self.fence_stamped(slot),
            held: self.tripped().is_some(),
        };
        // The others are stopped already, whatever it says.
        let heard = match s.holds_lease() {
            true => self.authority_says(&s),
            false => Heard { answer: Answer::recorded(&s), loss: None, cause: None },
        };
        let (_, plan) = classify(seen, heard.answer);
        if plan == Plan::Stop
            && !seen.fence_stamped
            && let Some(loss) = heard.loss
        {
            self.apply(slot, Event::LeaseLost { loss, revoke: false }, "authority");
        }
        let lease_good = matches!(plan, Plan::Run | Plan::Wait);
        let found = Found { boot: self.boot, lease_good, fence_stamped: seen.fence_stamped };
        self.apply(slot, Event::Recovered(found), "agent");
        if plan == Plan::Wait
            && let Some(cause) = heard.cause
        {
            self.apply(slot, Event::RenewalMissed { cause }, "authority");
        }
    }

    /// What the authority says of a session's lease. A silent one does not stop the start: the local
    /// deadline decides, and the first renewal will tell.
    pub(super) fn authority_says(&self, s: &Session) -> Heard {
        let now = BootInstant { boot: self.boot, ns: clock::now() };
        match self.authority.get(&s.workspace) {
            Ok(w) => {
                let answer = Answer::of(w.as_ref(), s, &now);
                Heard { answer, loss: classify::loss(answer, w.as_ref()), cause: None }
            }
            // It does not verify: the workspace is on HOLD.
            Err(crate::authority::Error::NotBelieved { .. }) => {
                Heard { answer: Answer::NotBelieved, loss: None, cause: None }
            }
            Err(fault) => {
                let cause = text(fault);
                self.authority_answers(Some(&cause));
                Heard { answer: Answer::Silent, loss: None, cause: Some(cause) }
            }
        }
    }

    /// Opens again what the former agent held: cgroup, overlay root, watches, socket.
    fn reopen(&self, slot: &Arc<Slot>) {
        let warn = |what: &str, why: String| tracing::warn!(OVERFENCE_SESSION = %slot.id, OVERFENCE_WORKSPACE = %slot.workspace, "{what}: {why}");
        match Cgroup::open(&self.paths.cgroup(&slot.session())) {
            Ok(cgroup) => slot.lock().cgroup = cgroup.map(Arc::new),
            Err(fault) => warn("cgroup", text(fault)),
        }
        let s = slot.session();
        let had_one = s.state != State::Opening && !s.facts.has(Fact::Gone);
        if slot.lock().cgroup.is_none() && had_one {
            self.remake_cgroup(slot);
        }
        let mounted = if slot.dirs.merged.exists() {
            overlay::open_mounted(&slot.dirs.merged, &slot.dirs.upper)
        } else {
            Ok(None)
        };
        match mounted {
            Ok(Some(mounted)) => {
                self.gate_adopt(slot, &mounted.root);
                if let Err(why) = self.hold_descriptors(slot, mounted) {
                    warn("watch", why);
                }
            }
            Ok(None) => {}
            Err(fault) => warn("overlay", text(fault)),
        }
        if slot.session().holds_lease()
            && self.paths.inside_of(slot.id).exists()
            && let Err(fault) = self.listen(slot.id)
        {
            warn("session socket", fault.to_string());
        }
    }

    /// A missing cgroup with a good record is made again; a fenced one is frozen as recorded by
    /// the step that follows.
    fn remake_cgroup(&self, slot: &Arc<Slot>) {
        match self.make_cgroup(&slot.session()) {
            Ok(cgroup) => {
                self.watch_cgroup(slot.id, &cgroup);
                slot.lock().cgroup = Some(Arc::new(cgroup));
            }
            Err(fault) => {
                tracing::error!(OVERFENCE_SESSION = %slot.id, OVERFENCE_WORKSPACE = %slot.workspace, "the cgroup could not be made again: {}", text(fault))
            }
        }
    }

    /// Cgroups that no record explains, as after a database was put back to before their sessions
    /// were opened. Nobody would ever freeze them once the keeper's table is gone.
    fn stop_orphans(&self, records: &[Result<Session, Unreadable>], entries: &[Entry]) {
        let known: BTreeSet<_> = records
            .iter()
            .map(|record| match record {
                Ok(s) => s.id.to_string(),
                Err(unreadable) => unreadable.id.clone(),
            })
            .collect();
        let Ok(cgroups) = std::fs::read_dir(&self.paths.cgroups) else { return };
        for name in cgroups.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
            let ours = name.parse::<SessionId>().is_ok() && !known.contains(&name);
            if ours && unknown(Record::Absent, false) == Plan::Person {
                tracing::error!(
                    "no record explains the cgroup {name}: it is frozen, and `overfence gc --dry-run` shows it"
                );
                self.freeze_unknown(&name, entries);
            }
        }
    }

    /// Nothing is known of it, so it may not write.
    fn freeze_unknown(&self, id: &str, entries: &[Entry]) {
        let Ok(id) = id.parse::<SessionId>() else { return };
        // The keeper's table still says which cgroup it has.
        let entered = entries.iter().find_map(|entry| match entry {
            Entry::Valid(d) if d.session == id => Some(d.cgroup.clone()),
            Entry::Valid(_) | Entry::Torn { .. } | Entry::Free => None,
        });
        let path = entered.unwrap_or_else(|| self.paths.sealed(id));
        if let Ok(Some(cgroup)) = Cgroup::open(&path)
            && let Err(fault) = cgroup.write_freeze(true)
        {
            tracing::error!("{}", text(fault));
        }
    }
}
