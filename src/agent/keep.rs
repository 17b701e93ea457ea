//! Keeping a stopped session stopped against other hands on the host: who moves its processes out,
//! puts a second overlay on its upper, or writes into the upper past the overlay. What can be undone
//! is undone at once; of the rest a fact is withdrawn, or it is shown. [`super::watch`] is the same for
//! thaws and remounts.
//!
//! On disk, beside a stopped upper: `<session>/print`, what the upper is compared with. At run time:
//! `<run>/sessions/<id>/members`, who was in its cgroup when that was proved frozen.

use std::collections::HashMap;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::effects::text;
use super::host::Host;
use super::slot::{Inner, Slot};
use crate::failpoint;
use crate::kernel::cgroup::Cgroup;
use crate::kernel::members::{self, Member, Moved};
use crate::kernel::rivals::{self, Own, Scope};
use crate::kernel::walk::Dir;
use crate::kernel::{blockers, clock};
use crate::model::facts::{Blocker, Fact, Holder, Stray};
use crate::model::ids::{Generation, PublicationKey, SessionId};
use crate::model::session::{Loss, Session, State};
use crate::model::step::{Event, Published};
use crate::model::time::BootNs;
use crate::upper::changes::Format;
use crate::upper::layer::{self, Source};
use crate::upper::print::{self, Print, Printer};
use crate::workload::InitRecord;

/// A look at all uppers, or at all mounts, is followed by none for so many times as long as it took.
pub const REST: u32 = 50;

/// What is known of a session that is to be kept stopped.
#[derive(Debug, Default)]
pub struct Kept {
    /// Who was in its cgroup when that was proved frozen.
    members: Option<Vec<Member>>,
    /// It was proved frozen again since, perhaps with others in it.
    frozen_again: bool,
    /// Who of them is outside, and could not be brought back.
    outside: Vec<Member>,
    /// Second overlays on its upper.
    rivals: Vec<Holder>,
    /// What its upper was like once it was read-only.
    print: Option<Taken>,
    /// It was looked at, whether or not that gave a print.
    looked: bool,
}

impl Kept {
    /// Whether nobody of the session is known to be outside of its cgroup.
    pub fn together(&self) -> bool {
        self.outside.is_empty()
    }

    /// Its cgroup was proved frozen.
    pub fn frozen(&mut self) {
        self.frozen_again = true;
    }

    /// It runs again: its processes come and go, and its upper changes. Who else is mounted on that
    /// stays.
    pub fn forget(&mut self) {
        *self = Self { rivals: std::mem::take(&mut self.rivals), ..Self::default() };
    }
}

/// A print, and what it is one of: a readmission and a seal of ours change the upper.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Taken {
    generation: Generation,
    sealed: bool,
    #[serde(flatten)]
    print: Print,
}

/// Who was in the cgroup, in the file.
#[derive(Serialize, Deserialize)]
struct Roster {
    generation: Generation,
    members: Vec<Member>,
}

fn fenced(s: &Session) -> bool {
    matches!(s.state, State::Fencing | State::Fenced | State::Preserved)
}

/// Whether somebody of it could be frozen outside: it is fenced, and not known to be dead.
fn has_members(s: &Session) -> bool {
    fenced(s) && !s.facts.has(Fact::Killed) && !s.facts.has(Fact::Gone)
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

fn replace(path: &Path, value: &impl Serialize) -> Result<(), String> {
    // The watch and the session's worker may be at it at the same time.
    let new = path.with_extension(format!("new-{}", clock::now().0));
    let bytes = serde_json::to_vec(value).map_err(text)?;
    let may = failpoint::fails("keep.write.before").map_err(std::io::Error::from);
    let done =
        may.and_then(|()| std::fs::write(&new, bytes)).and_then(|()| std::fs::rename(&new, path));
    failpoint::hit("keep.write.after");
    done.map_err(|e| format!("cannot write {}: {e}", path.display()))
}

/// Remembers who is in a cgroup that was proved frozen, each time it was, for a restarted agent too.
pub fn remember(host: &Host, slot: &Slot) {
    let (cgroup, generation) = {
        let mut inner = slot.lock();
        let s = &inner.session;
        let news = inner.kept.members.is_none() || inner.kept.frozen_again;
        let wanted = has_members(s) && s.facts.has(Fact::Frozen) && news;
        let generation = s.generation;
        let Some(cgroup) = inner.cgroup.clone().filter(|_| wanted) else { return };
        inner.kept.frozen_again = false;
        (cgroup, generation)
    };
    let path = host.paths.members_of(slot.id);
    let earlier = read::<Roster>(&path).filter(|roster| roster.generation == generation);
    let earlier = earlier.map(|roster| roster.members).unwrap_or_default();
    let mut members = match members::of(&cgroup) {
        Ok(members) => members,
        Err(fault) => {
            tracing::warn!(OVERFENCE_SESSION = %slot.id, "who is in its cgroup: {}", text(fault));
            vec![]
        }
    };
    members.extend(&earlier);
    members.sort_unstable();
    members.dedup();
    if members != earlier
        && let Err(why) = replace(&path, &Roster { generation, members: members.clone() })
    {
        tracing::warn!(OVERFENCE_SESSION = %slot.id, "{why}");
    }
    let mut inner = slot.lock();
    if inner.session.generation == generation {
        inner.kept.members = Some(members);
    }
}

/// Looks who of a stopped session is outside of its cgroup, brings them back, and tells of it;
/// whether all were where they belong.
pub fn gather(host: &Arc<Host>, slot: &Arc<Slot>) -> bool {
    remember(host, slot);
    let (members, cgroup) = {
        let inner = slot.lock();
        let (Some(members), Some(cgroup)) = (inner.kept.members.clone(), inner.cgroup.clone())
        else {
            return true;
        };
        if !fenced(&inner.session) || members.is_empty() {
            return true;
        }
        (members, cgroup)
    };
    let moved = match members::outside(&members, &cgroup) {
        Ok(moved) => moved,
        Err(fault) => {
            tracing::warn!(OVERFENCE_SESSION = %slot.id, "who is outside of its cgroup: {}", text(fault));
            return false;
        }
    };
    if moved.is_empty() {
        let mut inner = slot.lock();
        inner.kept.outside.clear();
        if inner.session.facts.has(Fact::Killed) {
            // They are dead, all of them.
            inner.kept.members = Some(vec![]);
        }
        return true;
    }
    let why = "it was in the cgroup when that was proved frozen, or is a child of one that was";
    bring_back(host, slot, &cgroup, moved, why);
    false
}

/// Stopping comes first, ahead of its record, as with every freeze.
fn bring_back(
    host: &Arc<Host>,
    slot: &Arc<Slot>,
    cgroup: &Cgroup,
    moved: Vec<Moved>,
    known_by: &str,
) {
    let mut outside = Vec::new();
    let mut strays = Vec::new();
    let may = failpoint::fails("keep.bring_back.before");
    for Moved { member, command, cgroup: found } in moved {
        let taken = may.map_err(text).and_then(|()| cgroup.take_in(member.pid).map_err(text));
        let left_out = taken.err();
        if left_out.is_some() {
            outside.push(member);
        }
        let (known_by, found_in) = (known_by.to_owned(), found.display().to_string());
        strays.push(Stray { pid: member.pid, command, found_in, known_by, left_out });
    }
    failpoint::hit("keep.bring_back.after");
    {
        let mut inner = slot.lock();
        let known = std::mem::replace(&mut inner.kept.outside, outside);
        // Told once: who stays outside is a blocker of the freeze from then on.
        let news = inner.kept.outside != known || strays.iter().any(|s| s.left_out.is_none());
        if strays.is_empty() || !news || !fenced(&inner.session) {
            return;
        }
    }
    for stray in &strays {
        let Stray { pid, command, found_in, left_out, .. } = stray;
        let what = left_out.as_deref().map_or("brought back", |why| why);
        tracing::error!(OVERFENCE_SESSION = %slot.id, OVERFENCE_WORKSPACE = %slot.workspace, "pid {pid} ({command}) of the session was moved to {found_in}: {what}");
    }
    host.apply(slot, Event::MovedOut { strays }, "foreign");
}

/// Who keeps a freeze from being called proved because it is outside of the cgroup.
pub fn left_outside(host: &Arc<Host>, slot: &Arc<Slot>) -> Vec<Blocker> {
    if slot.lock().kept.together() {
        return vec![];
    }
    gather(host, slot);
    let pids: Vec<u32> = slot.lock().kept.outside.iter().map(|m| m.pid).collect();
    blockers::of(&pids)
}

/// Processes in a session's pid namespace that are not in its cgroup, whenever they left it. One look
/// at all processes for all sessions.
pub fn gather_by_namespace(host: &Arc<Host>) {
    let mut namespaces = HashMap::new();
    for slot in host.unsettled() {
        let inner = slot.lock();
        let Some(cgroup) = inner.cgroup.as_ref().filter(|_| has_members(&inner.session)) else {
            continue;
        };
        let init = read::<InitRecord>(&host.paths.init_of(slot.id));
        let init = init.map(|init| Member { pid: init.pid, start: init.start_time });
        if let Some(inode) = init.and_then(members::pid_namespace) {
            namespaces.insert(inode, (slot.id, cgroup.path().to_owned()));
        }
    }
    let strayed = match members::strayed(&namespaces) {
        Ok(strayed) => strayed,
        Err(fault) => {
            tracing::warn!("who is outside of the sealed cgroups: {}", text(fault));
            return;
        }
    };
    for (id, moved) in strayed {
        let Some(slot) = host.slot(id) else { continue };
        let cgroup = slot.lock().cgroup.clone();
        if let Some(cgroup) = cgroup {
            bring_back(host, &slot, &cgroup, moved, "its pid namespace is the session's");
        }
    }
}

fn own(slot: &Slot, inner: &Inner) -> Option<Own<SessionId>> {
    let s_dev = inner.mounted.as_ref()?.s_dev;
    Some(Own { key: slot.id, s_dev, upper: slot.dirs.upper.clone() })
}

/// Looks for second overlays on the uppers of all sessions, and tells those that are called read-only.
pub fn rivals(host: &Arc<Host>, scope: Scope) {
    let slots = host.slots();
    let all: Vec<_> = slots.iter().filter_map(|slot| own(slot, &slot.lock())).collect();
    let mut found = match rivals::of(&all, scope) {
        Ok(found) => found,
        Err(fault) => {
            tracing::warn!("second overlays: {}", text(fault));
            return;
        }
    };
    for slot in slots {
        tell_rivals(host, &slot, found.remove(&slot.id).unwrap_or_default(), scope);
    }
}

/// What was seen here only does not unsay what was seen elsewhere.
fn tell_rivals(host: &Arc<Host>, slot: &Arc<Slot>, found: Vec<Holder>, scope: Scope) {
    let seen = {
        let mut inner = slot.lock();
        if found.is_empty() && scope == Scope::Here {
            return;
        }
        inner.kept.rivals = found;
        let s = &inner.session;
        let told = fenced(s) && s.facts.has(Fact::ReadOnly) && !s.facts.has(Fact::Gone);
        match inner.kept.rivals.first() {
            Some(first) if told => first.to_string(),
            Some(_) | None => return,
        }
    };
    host.apply(slot, Event::ReadOnlyLost { seen }, "foreign");
}

/// Second overlays on this session's upper, if there were any; looked for again.
pub fn rivals_of(slot: &Slot) -> Vec<Holder> {
    let own = {
        let inner = slot.lock();
        if inner.kept.rivals.is_empty() {
            return vec![];
        }
        own(slot, &inner)
    };
    let found = rivals::of(own.as_slice(), Scope::Everywhere).map(|mut all| all.remove(&slot.id));
    // Who could not be looked for again is still there.
    if let Ok(found) = found {
        slot.lock().kept.rivals = found.unwrap_or_default();
    }
    slot.lock().kept.rivals.clone()
}

/// Looks at the uppers of all stopped sessions that lack a print, and at those that have one when a
/// look is due; when the next one is.
pub fn uppers(host: &Arc<Host>, due: BootNs) -> BootNs {
    let begun = clock::now();
    let all = begun >= due;
    for slot in host.unsettled() {
        if host.stopping() {
            break;
        }
        if all || !slot.lock().kept.looked {
            upper(host, &slot);
        }
    }
    match all {
        true => next_look(host, begun),
        false => due,
    }
}

/// When a look at everything that began then may be followed by another.
pub fn next_look(host: &Host, begun: BootNs) -> BootNs {
    let now = clock::now();
    now.plus(host.config.preserve.sweep.max(now.since(begun) * REST))
}

/// What a session hears of a publication. If that held all of its upper when it was closed, and nobody knew
/// what became of it, the upper is read once more before it counts as clean: whoever reached it past the
/// overlay meanwhile has bytes in it that no head has.
pub fn heard(
    host: &Host,
    slot: &Slot,
    s: &Session,
    key: PublicationKey,
    outcome: Published,
) -> Result<Vec<Event>, String> {
    let closing =
        matches!(s.loss, Some(Loss::Closed { offered: Some(offered), .. }) if offered == key);
    let committed = matches!(outcome, Published::Committed { .. });
    let mut events = Vec::new();
    if let Some(layer) = s.unknown.get(&key).filter(|_| closing && committed) {
        let stop = || host.stopping();
        let now = host.with_upper(slot, |upper| {
            let upper = Dir::open(upper)?;
            layer::diff_id(Source::Upper(upper.as_fd(), Format::Trusted), None, &stop)
        })?;
        if now.map_err(text)? != *layer {
            let seen = "it is not what was published any more".to_owned();
            events.push(Event::UpperChanged { seen });
        }
    }
    events.push(Event::Published { key, outcome });
    Ok(events)
}

/// What a look at an upper came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Looked {
    /// It is as it was, or this was the first look.
    Same,
    /// It was changed past the overlay.
    Changed,
    /// It could not be told.
    Failed,
    /// It is no time for one: see [`looking`].
    NotNow,
}

/// Compares a stopped session's upper with its print, or takes one.
pub fn upper(host: &Arc<Host>, slot: &Arc<Slot>) -> Looked {
    let Some(look) = looking(host, slot) else { return Looked::NotNow };
    let stop = || host.stopping() || !look.holds(host, slot);
    match print::look(&slot.dirs.upper, look.printer(), &stop) {
        Ok(printer) => look.ended(host, slot, printer),
        Err(crate::upper::Error::Stopped) => Looked::Failed,
        Err(fault) => {
            tracing::warn!(OVERFENCE_SESSION = %slot.id, "its upper was not looked at: {}", text(fault));
            Looked::Failed
        }
    }
}

/// A look at a stopped session's upper: what it was then, and the print that there is.
pub struct Look {
    generation: Generation,
    sealed: bool,
    known: Option<Taken>,
}

/// Begins a look. `None`: not now; a seal that is under way changes the upper itself.
pub fn looking(host: &Host, slot: &Slot) -> Option<Look> {
    let (generation, sealed, known) = {
        let mut inner = slot.lock();
        let s = &inner.session;
        let stopped = matches!(s.state, State::Fenced | State::Preserved)
            && s.facts.has(Fact::ReadOnly)
            // Then an image is mounted for those alone who read it.
            && !(slot.dirs.image.is_some() && s.facts.has(Fact::Gone))
            && host.under_way.sealing(slot.id).is_none()
            && s.seal == s.facts.has(Fact::Sealed);
        if !stopped {
            return None;
        }
        let (generation, sealed) = (s.generation, s.seal);
        inner.kept.looked = true;
        (generation, sealed, inner.kept.print.clone())
    };
    let known = known.or_else(|| read::<Taken>(&print_of(slot)));
    let known = known.filter(|taken| (taken.generation, taken.sealed) == (generation, sealed));
    Some(Look { generation, sealed, known })
}

fn print_of(slot: &Slot) -> PathBuf {
    slot.dirs.root.join("print")
}

impl Look {
    /// For who goes through the upper.
    pub fn printer(&self) -> Printer {
        Printer::new(self.earlier())
    }

    fn earlier(&self) -> Option<&Print> {
        self.known.as_ref().map(|taken| &taken.print)
    }

    /// Whether the session is still what it was.
    fn holds(&self, host: &Host, slot: &Slot) -> bool {
        let inner = slot.lock();
        let s = &inner.session;
        let sealing = host.under_way.sealing(slot.id).is_some();
        fenced(s) && (s.generation, s.seal) == (self.generation, self.sealed) && !sealing
    }

    /// Ends the look, with what a walk through everything met. What was changed is told, and is in the
    /// evidence when this returns.
    pub fn ended(self, host: &Arc<Host>, slot: &Arc<Slot>, printer: Printer) -> Looked {
        let Some((print, seen)) = printer.compared(self.earlier()) else {
            slot.lock().kept.print = self.known;
            return Looked::Same;
        };
        if !self.holds(host, slot) {
            return Looked::Failed;
        }
        let changed = !seen.is_empty();
        if changed {
            tracing::error!(OVERFENCE_SESSION = %slot.id, OVERFENCE_WORKSPACE = %slot.workspace, "its upper was changed past the overlay: {seen}");
            host.apply_here(slot, Event::UpperChanged { seen }, "foreign");
        }
        let taken = Taken { generation: self.generation, sealed: self.sealed, print };
        if let Err(why) = replace(&print_of(slot), &taken) {
            tracing::warn!(OVERFENCE_SESSION = %slot.id, "{why}");
        }
        slot.lock().kept.print = Some(taken);
        if changed { Looked::Changed } else { Looked::Same }
    }
}
