//! Exports: a stopped session's upper as a patch bundle, and what speaks against its being all of it.

use std::io::ErrorKind;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{denied, drop_scratch, internal, of_upper};
use crate::agent::failure::Failure;
use crate::agent::host::Host;
use crate::agent::keep::{self, Looked};
use crate::agent::slot::Slot;
use crate::kernel::walk::Dir;
use crate::model::code::Code;
use crate::model::facts::{Fact, Facts};
use crate::model::ids::{Generation, PublicationKey};
use crate::model::journal::Entry;
use crate::model::session::{Session, State};
use crate::model::view::PathText;
use crate::progress::{Amount, Counted, What};
use crate::store::Durability;
use crate::upper::Stop;
use crate::upper::bundle::{self, Provenance, Readers};
use crate::upper::changes::{self, Format};
use crate::upper::layer::{self, Captured, Source, Writers};
use crate::upper::lowers::Lowers;
use crate::upper::print::Printer;
use crate::upper::store::LayerStore;

/// Evidence entries of a session that travel in its bundle.
const EXCERPT: usize = 500;

pub(super) struct MadeBundle {
    pub path: PathBuf,
    pub digest: crate::model::head::Digest,
    pub layer: Option<crate::model::head::Digest>,
    /// Why it may not be what the upper holds, and what to do.
    pub unstable: Option<&'static str>,
    pub generation: Generation,
    /// What was proved when it was begun.
    pub facts: Facts,
}

const NOT_SEEN: &str =
    "its upper could not be looked at again (the journal says why; export again)";

const FROZEN_ONLY: &str = "the session is frozen only and its bytes could still change \
     (`overfence fence --to killed` it and export again)";
const CHANGED: &str = "its upper was changed past the overlay meanwhile (`session inspect` names what was \
     seen; find out who writes there, and export again)";

/// What a look speaks against: that the upper is what it was when it was stopped.
pub(super) const fn of_look(looked: Looked) -> Option<&'static str> {
    match looked {
        Looked::Changed => Some(CHANGED),
        Looked::Failed => Some(NOT_SEEN),
        // What is proved of it decides.
        Looked::Same | Looked::NotNow => None,
    }
}

/// The upper goes into a bundle by way of a layer store of its own, so that bytes which are given up
/// later are in no store that outlives the export.
pub(super) fn made(
    host: &Arc<Host>,
    slot: &Arc<Slot>,
    actor: &str,
    dest: Option<PathBuf>,
) -> Result<MadeBundle, Failure> {
    let s = slot.session();
    if !matches!(s.state, State::Fenced | State::Preserved) || !s.is_stopped() {
        return Err(denied(&s, Code::WrongState));
    }
    if let Some(own) = dest.as_deref().filter(|dest| host.paths.are_own(dest)) {
        let why =
            format!("{} is inside a directory of the agent's own: choose another", own.display());
        return Err(Failure::new(Code::BadRequest, why));
    }
    // Where nobody said where, bundles of all owners lie together, for root alone.
    let to = dest.map_or_else(
        || {
            let name = format!("{}-g{}", s.id, s.generation);
            (host.paths.bundles.join(name), Readers::Owner)
        },
        |dest| (dest, Readers::Usual),
    );
    bundle::refuse_taken(&to.0).map_err(of_upper)?;
    // One walk for both: of millions of files it takes most of the time.
    let look = keep::looking(host, slot);
    let mut printer = look.as_ref().map_or_else(|| Printer::new(None), keep::Look::printer);
    let scratch = host.paths.exports.join(PublicationKey::fresh().to_string());
    // Nobody waits for a bundle of what is being removed, readmitted, or served by no agent.
    let stop = || {
        let now = slot.lock();
        host.stopping()
            || now.session.generation != s.generation
            || !matches!(now.session.state, State::Fenced | State::Preserved)
    };
    let made = LayerStore::open(&scratch).map_err(of_upper).and_then(|layers| {
        let base = || host.shown_by(&s.base.head).ok();
        let captured = host
            .with_upper(slot, |upper| {
                host.showing(slot, What::Capture, slot.measured(), |progress| {
                    let stop = Counted { stop: &stop, progress };
                    capture(&layers, upper, base(), &mut printer, &stop)
                })
            })
            .map_err(|why| Failure::new(Code::MountFailed, why))?;
        // Whoever changed it since the last look is in the bundle's evidence.
        let looked = match look {
            Some(look) if matches!(captured, Ok(Some(_))) => look.ended(host, slot, printer),
            _ => keep::upper(host, slot),
        };
        let captured = captured.map_err(of_upper)?;
        let Some(captured) = captured else {
            let text = format!(
                "session {} changed nothing: there is nothing to export; `preserved discard` \
                 removes it",
                s.id
            );
            return Err(Failure::new(Code::NotFound, text));
        };
        // What held before the capture has to hold after it.
        let now = slot.session();
        if now.generation != s.generation || now.state != s.state {
            return Err(denied(&now, Code::Busy));
        }
        let unstable = match is_stable(&s.facts, &now.facts) {
            false => Some(FROZEN_ONLY),
            true if captured.changed > 0 => Some(CHANGED),
            true => of_look(looked),
        };
        let excerpt = host.store.evidence_of(s.id).map_err(internal)?;
        let mut provenance = provenance(&s, unstable.is_none(), &captured, &excerpt);
        if unstable.is_some() {
            provenance.read_again = host
                .with_upper(slot, |upper| read_again(upper, base(), &stop))
                .map_err(|why| Failure::new(Code::MountFailed, why))?
                .map_err(of_upper)?;
        }
        let made = bundle_of(host, slot, &layers, &captured, &provenance, to, &stop)?;
        Ok(MadeBundle { unstable, facts: s.facts.clone(), ..made })
    });
    drop_scratch(&scratch);
    let made = made?;
    let detail = serde_json::json!({
        "path": PathText::of(&made.path), "manifest": made.digest, "layer": made.layer,
        "stable": made.unstable.is_none(),
    });
    let entry = crate::agent::slot::draft("export", &s, actor, detail);
    let journal = crate::model::journal::Journal { sessions: vec![], entries: vec![entry] };
    host.store.record(&journal, Durability::Full).map_err(internal)?;
    Ok(made)
}

/// Captures a stopped upper for a bundle: each entry says what it is to the base, where that can be
/// read. An empty one gives no layer.
fn capture(
    layers: &LayerStore,
    upper: &Path,
    base: Option<Lowers>,
    printer: &mut Printer,
    stop: Stop<'_>,
) -> crate::upper::Result<Option<Captured>> {
    let dir = Dir::open(upper)?;
    if changes::is_empty(dir.as_fd())? {
        return Ok(None);
    }
    let source = Source::Upper(dir.as_fd(), Format::Trusted);
    layer::capture_told(source, base, printer, Writers::Frozen, layers, stop).map(Some)
}

/// The layer of a capture made once more. `None`: files keep changing under it.
fn read_again(
    upper: &Path,
    base: Option<Lowers>,
    stop: Stop<'_>,
) -> crate::upper::Result<Option<crate::model::head::Digest>> {
    let dir = Dir::open(upper)?;
    match layer::diff_id(Source::Upper(dir.as_fd(), Format::Trusted), base, stop) {
        Err(crate::upper::Error::Changed { .. }) => Ok(None),
        answer => answer.map(Some),
    }
}

/// Whether nothing can have changed the upper from `before` to `now`. From `frozen` alone a system
/// call or a mapping outside may have; and what was lifted and proved again did not hold all the
/// time.
pub(super) fn is_stable(before: &Facts, now: &Facts) -> bool {
    [Fact::ReadOnly, Fact::UpperFrozen, Fact::Gone].iter().any(|fact| {
        let (old, new) = (before.0.get(fact), now.0.get(fact));
        old.is_some() && old == new
    })
}

/// Writes the bundle of a layer that was read back.
fn bundle_of(
    host: &Host,
    slot: &Slot,
    layers: &LayerStore,
    captured: &Captured,
    provenance: &Provenance,
    (path, readers): (PathBuf, Readers),
    stop: &(dyn Fn() -> bool + Sync),
) -> Result<MadeBundle, Failure> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(|fault| {
            let code = match fault.kind() {
                ErrorKind::StorageFull => Code::NoSpace,
                _ => Code::BadRequest,
            };
            let place = parent.display();
            Failure::new(code, format!("cannot make {place}: {fault}; choose another destination"))
        })?;
    }
    let total = Amount { bytes: captured.size_compressed, entries: 0 };
    let made = host.showing(slot, What::Export, total, |progress| {
        let stop = Counted { stop, progress };
        bundle::export(layers, captured.diff_id, provenance, &path, readers, &stop)
    });
    let made = made.map_err(of_upper)?;
    let (digest, layer) = (made.manifest, Some(captured.diff_id));
    let (unstable, generation, facts) = (None, provenance.generation, Facts::default());
    Ok(MadeBundle { path, digest, layer, unstable, generation, facts })
}

/// Whether a lease ended by this entry, for whatever reason.
fn is_end(entry: &Entry) -> bool {
    let held = |when: &str| {
        let state = serde_json::from_value(entry.draft.detail[when].clone()).ok()?;
        Some(matches!(state, State::Opening | State::Active | State::Releasing))
    };
    held("from") == Some(true) && held("to") == Some(false)
}

/// The newest entries that fit: a manifest has a limit.
fn bounded(excerpt: &[Entry]) -> &[Entry] {
    &excerpt[excerpt.len().saturating_sub(EXCERPT)..]
}

fn provenance(s: &Session, stable: bool, captured: &Captured, excerpt: &[Entry]) -> Provenance {
    let now = jiff::Timestamp::now();
    let at = |entry: &Entry| entry.time.parse().unwrap_or(now);
    Provenance {
        workspace: s.workspace.clone(),
        session: s.id,
        lease: s.lease,
        generation: s.generation,
        host: s.host,
        base: s.base.head.clone(),
        expected: s.expected.clone(),
        reason: s.loss.as_ref().map(ToString::to_string).unwrap_or_default(),
        opened_at: excerpt.first().map_or(now, at),
        // One that was readmitted lost others before.
        lease_ended_at: excerpt.iter().rfind(|entry| is_end(entry)).map(at),
        exported_at: now,
        statement: bundle::STATEMENT.to_owned(),
        stable,
        read_again: None,
        changed: captured.changed,
        skipped_sockets: captured.skipped_sockets,
        escaped: captured.escaped.clone(),
        evidence: serde_json::to_value(bounded(excerpt)).unwrap_or_default(),
    }
}
