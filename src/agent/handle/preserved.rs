//! Preserved deltas: show, export, discard, keep; and what can be removed.

use std::io::ErrorKind;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::{Agent, PATIENCE, actor, denied, drop_scratch, internal, of_upper};
use crate::agent::failure::{Caller, Failure};
use crate::agent::host::Host;
use crate::agent::keep::{self, Looked};
use crate::agent::recover::unknown;
use crate::agent::slot::{Applied, Inner, Slot};
use crate::kernel::walk::Dir;
use crate::model::classify::{Plan, Record};
use crate::model::code::Code;
use crate::model::facts::{Fact, Facts};
use crate::model::ids::{Generation, PublicationKey, SessionId};
use crate::model::journal::Entry;
use crate::model::session::{Disposition, Session, State};
use crate::model::step::Event;
use crate::model::view::{
    ExportSession, Exported, GcItem, GcReport, KeepSession, PathText, PreservedView, SessionView,
};
use crate::progress::{Amount, Counted, What};
use crate::store::Durability;
use crate::upper::bundle::{self, Provenance, Readers};
use crate::upper::changes::{self, Format};
use crate::upper::layer::{self, Captured, Source, Writers};
use crate::upper::lowers::Lowers;
use crate::upper::print::Printer;
use crate::upper::store::LayerStore;
use crate::upper::{Stop, remove};

impl Agent {
    /// Deltas that no publication holds.
    pub async fn preserved(&self) -> Result<Vec<PreservedView>, Failure> {
        self.blocking(|host| {
            let stopped = |slot: &Arc<Slot>| {
                matches!(
                    slot.session().state,
                    State::Fencing | State::Fenced | State::Preserved | State::Quarantined
                )
            };
            let slots = host.slots();
            let known = slots.iter().filter(|slot| stopped(slot));
            let mut all: Vec<_> = known.map(|slot| host.preserved_view(slot)).collect();
            all.extend(host.unbelieved_views()?);
            Ok(all)
        })
        .await
    }

    /// Exports a stopped session's upper as a patch bundle and reads it back. With `dispose` the
    /// verified bundle authorises removal.
    pub async fn export(
        &self,
        by: &Caller,
        id: SessionId,
        wish: ExportSession,
    ) -> Result<Exported, Failure> {
        let slot = self.slot(id)?;
        let (asked, who) = (Arc::clone(&slot), actor(by));
        let dest = wish
            .dest
            .as_ref()
            .map(|text| {
                text.path().ok_or_else(|| {
                    Failure::new(Code::BadRequest, "the destination is not a well-formed path")
                })
            })
            .transpose()?;
        let dispose = wish.dispose;
        let (made, unstable) = self
            .blocking(move |host| {
                let made = export::made(host, &asked, &who, dest)?;
                // What came after the bundle was made is in no bundle.
                let unstable = match made.unstable {
                    None if dispose => export::of_look(keep::upper(host, &asked)),
                    known => known,
                };
                Ok((made, unstable))
            })
            .await?;
        if let Some(why) = unstable.filter(|_| dispose) {
            let place = made.path.display();
            let text = format!("the bundle is at {place}, but {why}: nothing is removed");
            return Err(Failure::new(Code::Partial, text));
        }
        if dispose {
            let disposition = Disposition::Exported { who: actor(by), bundle: made.digest };
            self.dispose(by, &slot, made.generation, Some(&made.facts), disposition).await?;
        }
        Ok(Exported {
            path: PathText::of(&made.path),
            digest: made.digest,
            layer: made.layer,
            verified: true,
            stable: made.unstable.is_none(),
            session: self.session_view(&slot),
        })
    }

    /// Gives a delta up and removes it.
    pub async fn discard(&self, by: &Caller, id: SessionId) -> Result<SessionView, Failure> {
        let slot = self.slot(id)?;
        let generation = slot.session().generation;
        let disposition = Disposition::Discard { who: actor(by) };
        self.dispose(by, &slot, generation, None, disposition).await?;
        Ok(self.session_view(&slot))
    }

    /// Decides on the bytes of `generation`: a session that was readmitted meanwhile has others. With `held`
    /// only if what was proved of it then kept it from being written to until now.
    async fn dispose(
        &self,
        by: &Caller,
        slot: &Arc<Slot>,
        generation: Generation,
        held: Option<&Facts>,
        disposition: Disposition,
    ) -> Result<(), Failure> {
        {
            let mut inner = slot.lock();
            if held.is_some_and(|facts| !export::is_stable(facts, &inner.session.facts)) {
                let text = "the session did not stay stopped while its bundle was made: nothing is \
                            removed; export again";
                return Err(Failure::new(Code::Partial, text.to_owned()));
            }
            if inner.session.generation != generation {
                return Err(denied(&inner.session, Code::Busy));
            }
            let event = Event::Disposed { disposition };
            if let Applied::Refused(code) = self.0.apply_locked(&mut inner, event, &actor(by)) {
                return Err(denied(&inner.session, code));
            }
            self.0.wake_worker(slot, &mut inner);
        }
        let over = |inner: &Inner| {
            matches!(inner.session.state, State::Closed | State::Quarantined)
                || inner.session.trouble.is_some()
        };
        let (s, _) = slot.wait_for(PATIENCE, over).await;
        match s.state {
            State::Closed => Ok(()),
            _ => Err(Failure::new(
                Code::Partial,
                format!(
                    "session {} is {}; its removal is tried again: {}",
                    s.id,
                    s.state,
                    s.trouble.unwrap_or_default()
                ),
            )),
        }
    }

    /// Keeps a delta longer than its grace window.
    pub async fn keep(
        &self,
        by: &Caller,
        id: SessionId,
        wish: KeepSession,
    ) -> Result<PreservedView, Failure> {
        let slot = self.slot(id)?;
        // Witnessed time runs no faster than the wall, so the delta lives at least that long.
        let until = slot.session().witnessed.saturating_add(Duration::from_millis(wish.for_ms));
        let event = Event::Kept {
            until_ms: u64::try_from(until.as_millis()).unwrap_or(u64::MAX),
            by: actor(by),
        };
        if let Applied::Refused(code) = self.0.apply(&slot, event, &actor(by)) {
            return Err(denied(&slot.session(), code));
        }
        self.blocking(move |host| Ok(host.preserved_view(&slot))).await
    }

    /// What may go and what may not, and why; removes the former unless `dry_run`.
    pub async fn gc(&self, by: &Caller, dry_run: bool) -> Result<GcReport, Failure> {
        let who = actor(by);
        self.blocking(move |host| gc(host, &who, dry_run)).await
    }
}

/// Everything on the host that could go: trash, layers that nothing names, directories and cgroups
/// without a record. Sessions are shown with what will happen to them; their own timers remove them.
fn gc(host: &Arc<Host>, actor: &str, dry_run: bool) -> Result<GcReport, Failure> {
    let mut items = Vec::new();
    for slot in host.slots() {
        let s = slot.session();
        if matches!(
            s.state,
            State::Preserved
                | State::Fenced
                | State::Fencing
                | State::Deleting
                | State::Quarantined
        ) {
            let shown = host.preserved_view(&slot);
            let verdict = if s.state == State::Deleting { "remove" } else { "keep" };
            let why = reason(&s, &shown, slot.dirs.root.exists());
            items.push(item("session", &s.id.to_string(), verdict, why, shown.bytes));
        }
    }
    items.extend(host.unbelieved_views()?.into_iter().map(|shown| {
        let why = format!("{}; {}", shown.reason, shown.next);
        item("session", &shown.session, "keep", why, shown.bytes)
    }));
    host.gc_layers(actor, dry_run, &mut items)?;
    orphans(host, &mut items)?;
    loops(host, dry_run, &mut items)?;
    let plan = unknown(Record::Trashed, host.tripped().is_some());
    for name in host.trash_of_nobody().map_err(internal)? {
        let place = host.paths.trash.join(&name);
        let (bytes, _) = crate::upper::size::size(&place).map_err(internal)?;
        let decided = "its removal was decided before".to_owned();
        let (verdict, why) = match (plan == Plan::Remove, dry_run) {
            (false, _) => {
                ("keep", "the breaker is open; `overfence breaker show` says why".to_owned())
            }
            (true, true) => ("remove", decided),
            // What cannot go keeps nothing else from going.
            (true, false) => match remove::finish_removal(&host.paths.trash, &name) {
                Ok(_) => ("removed", decided),
                // As this agent's start goes on with what a crash cut off.
                Err(fault @ crate::upper::Error::Removing { .. }) => {
                    ("remove", crate::agent::effects::text(fault))
                }
                Err(fault) => ("failed", crate::agent::effects::text(fault)),
            },
        };
        items.push(item("trash", &name.to_string_lossy(), verdict, why, bytes));
    }
    let bytes_freed = items.iter().filter(|i| i.verdict == "removed").map(|i| i.bytes).sum();
    let report = GcReport { dry_run, items, bytes_freed };
    if !dry_run {
        let entry = crate::model::journal::Draft {
            kind: "gc".to_owned(),
            workspace: None,
            session: None,
            generation: None,
            actor: actor.to_owned(),
            detail: serde_json::to_value(&report).unwrap_or_default(),
        };
        let journal = crate::model::journal::Journal { sessions: vec![], entries: vec![entry] };
        host.store.record(&journal, Durability::Full).map_err(internal)?;
    }
    Ok(report)
}

/// Why a session's bytes go, or stay and until when.
fn reason(s: &Session, shown: &PreservedView, is_there: bool) -> String {
    if !is_there && s.disposition != Some(Disposition::NeverOpened) {
        return format!(
            "{}: its directory is not there; bring it back, nothing is proved without it",
            shown.next
        );
    }
    let trouble = s.trouble.as_ref().map(|why| format!("; {why}")).unwrap_or_default();
    if s.state == State::Deleting {
        let why = match &s.disposition {
            Some(Disposition::Discard { who }) => format!("discarded by {who}"),
            Some(Disposition::Exported { who, bundle }) => {
                format!("in bundle {bundle}, disposed of by {who}")
            }
            Some(Disposition::Grace) => "its grace is over".to_owned(),
            Some(Disposition::Clean) => "nothing uncommitted is in it".to_owned(),
            Some(Disposition::NeverOpened) => "it was never opened".to_owned(),
            None => "being removed".to_owned(),
        };
        return format!("{why}{trouble}");
    }
    let Some(at) = &shown.not_before else { return format!("{}{trouble}", shown.next) };
    let longer = s.keep_until.is_some_and(|kept| Duration::from_millis(kept) > s.policy.grace);
    let by = if longer { "`preserved keep`" } else { "grace" };
    let left = crate::config::duration::text(Duration::from_secs(shown.grace_left_ms / 1000));
    format!("kept by {by} for {left} of witnessed time, removed not before {at}")
}

/// Directories and cgroups that no record explains: shown and kept, a person decides.
fn orphans(host: &Host, items: &mut Vec<GcItem>) -> Result<(), Failure> {
    let mut found = Vec::new();
    for (kind, parent) in [("directory", &host.paths.sessions), ("cgroup", &host.paths.cgroups)] {
        for entry in std::fs::read_dir(parent).map_err(internal)?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_dir = entry.file_type().is_ok_and(|t| t.is_dir());
            if is_dir && name.starts_with("s-") {
                found.push((kind, name, entry.path()));
            }
        }
    }
    // Read after that: a record comes before its directory, and goes after it.
    let known: std::collections::BTreeSet<_> = host
        .store
        .sessions()
        .map_err(internal)?
        .into_iter()
        .map(|record| match record {
            Ok(s) => s.id.to_string(),
            Err(unreadable) => unreadable.id,
        })
        .collect();
    for (kind, name, path) in found {
        let orphan = !known.contains(&name) && path.exists();
        if orphan && unknown(Record::Absent, false) == Plan::Person {
            let why = "no record explains it: a person looks at it and decides".to_owned();
            let bytes = match kind {
                "directory" => crate::upper::size::size(&path).map_err(internal)?.0,
                _ => 0,
            };
            items.push(item(kind, &name, "keep", why, bytes));
        }
    }
    Ok(())
}

/// Loop devices that no session explains; the sweeps have them let go, too.
fn loops(host: &Host, dry_run: bool, items: &mut Vec<GcItem>) -> Result<(), Failure> {
    let verdict = if dry_run { "remove" } else { "removed" };
    for (bound, _) in host.stray_loops().map_err(internal)? {
        let why = format!("bound to {}, which no session explains", bound.file.display());
        items.push(item("loop", &bound.name, verdict, why, 0));
    }
    if !dry_run {
        host.sweep_loops();
    }
    Ok(())
}

pub(super) fn item(kind: &str, id: &str, verdict: &str, reason: String, bytes: u64) -> GcItem {
    GcItem { kind: kind.to_owned(), id: id.to_owned(), verdict: verdict.to_owned(), reason, bytes }
}
