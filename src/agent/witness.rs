//! What this host knows of generations and versions apart from the authority (I2), and what it does
//! when the authority answers below it: the workspace goes on HOLD, here and at the authority.
//!
//! Witnesses are the high-water marks; a note beside each session's directories; the bundles in the
//! configured directory; and, for the database as a whole, the newest anchor of the evidence. They
//! are all asked at the start; what session directories and bundles know goes into the marks then, so
//! that an acquisition has only the marks to ask.
//!
//! ```text
//! sessions/<id>/holds -> "<generation> <workspace>"   a symlink: it comes with its name, whole
//! ```

use std::path::Path;

use super::effects::text;
use super::failure::Failure;
use super::host::Host;
use crate::failpoint;
use crate::model::code::Code;
use crate::model::ids::{Generation, Version, WorkspaceId};
use crate::model::journal::{Draft, Journal};
use crate::model::session::Session;
use crate::model::workspace::{Acquire, Refusal, Seen, Workspace};
use crate::store::Durability;
use crate::upper::bundle;

const HOLDS: &str = "holds";

/// Something outside the authority that saw a generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Witness {
    /// Of which workspace.
    pub workspace: WorkspaceId,
    /// What it saw.
    pub generation: Generation,
    /// Who it is, for people.
    pub who: String,
}

/// Notes beside a session's directories under which generation it writes what.
pub fn note(root: &Path, session: &Session) -> std::io::Result<()> {
    let (place, new) = (root.join(HOLDS), root.join(format!("{HOLDS}.new")));
    let told = format!("{} {}", session.generation, session.workspace);
    match std::fs::remove_file(&new) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    failpoint::hit("agent.witness.before");
    std::os::unix::fs::symlink(told, &new)?;
    std::fs::rename(&new, &place)?;
    failpoint::hit("agent.witness.after");
    Ok(())
}

/// What was noted there: of which workspace, and under which generation.
pub fn read(root: &Path) -> Option<(Generation, WorkspaceId)> {
    let told = std::fs::read_link(root.join(HOLDS)).ok()?;
    let (generation, workspace) = told.to_str()?.split_once(' ')?;
    Some((Generation(generation.parse().ok()?), workspace.parse().ok()?))
}

fn names(dir: &Path) -> Vec<std::path::PathBuf> {
    let Ok(all) = std::fs::read_dir(dir) else { return vec![] };
    all.flatten().map(|entry| entry.path()).collect()
}

impl Host {
    /// The witnesses beside the marks: the sessions' directories, and bundles.
    pub fn witnesses(&self) -> Vec<Witness> {
        let mut all = Vec::new();
        for place in names(&self.paths.sessions).into_iter().chain(names(&self.paths.trash)) {
            if let Some((generation, workspace)) = read(&place) {
                let who = format!("the session directory {}", place.display());
                all.push(Witness { workspace, generation, who });
            }
        }
        for place in names(&self.paths.bundles) {
            // What is no bundle says nothing.
            if let Ok(bundle) = bundle::inspect(&place) {
                let told = bundle.provenance;
                let who = format!("the bundle {}", place.display());
                all.push(Witness { workspace: told.workspace, generation: told.generation, who });
            }
        }
        all
    }

    /// The highest that anybody on this host saw of a workspace, and who saw the generation.
    pub fn highest_seen(&self, id: &WorkspaceId) -> (Seen, String) {
        let mut seen = self.store.marks().highest(id);
        let mut who = format!("the high-water file {}", self.config.high_water_file.display());
        for witness in self.witnesses().into_iter().filter(|w| w.workspace == *id) {
            if witness.generation > seen.generation {
                (seen.generation, who) = (witness.generation, witness.who);
            }
        }
        (seen, who)
    }

    /// At start: whatever the witnesses have against the authority puts workspaces on HOLD. `gap` is
    /// what the newest anchor has against the database, read before anything was appended to it.
    pub fn check_witnesses(&self, gap: Option<String>) -> Result<(), String> {
        for Witness { workspace, generation, .. } in self.witnesses() {
            let seen = Seen { generation, version: Version(0) };
            self.store.note_mark(&workspace, seen).map_err(text)?;
        }
        let known = self.authority.list().map_err(text)?;
        let held = |id: &WorkspaceId| known.iter().any(|w| w.id == *id && w.hold.is_some());
        let unreadable = self.authority.unreadable().map_err(text)?;
        for bad in &unreadable {
            tracing::error!("HOLD: {bad}");
            if let Ok(id) = bad.id.parse::<WorkspaceId>()
                && !self.store.marks().held(&id)
            {
                self.put_on_hold(&id, &bad.to_string(), "agent");
            }
        }
        for below in self.store.marks().check(&known) {
            let as_it_is = unreadable.iter().any(|bad| bad.id == below.workspace.as_str());
            if !held(&below.workspace) && !as_it_is {
                self.put_on_hold(&below.workspace, &below.why, "agent");
            }
        }
        if let Some(gap) = &gap {
            self.record_gap(gap)?;
            for w in known.iter().filter(|w| !w.deleted && w.hold.is_none()) {
                // One that its mark speaks against has that more exact reason.
                if self.authority.get(&w.id).is_ok_and(|w| w.is_some_and(|w| w.hold.is_none())) {
                    self.put_on_hold(&w.id, gap, "agent");
                }
            }
            // From here on the chain as it is now is what is witnessed.
            self.store.anchor().map_err(text)?;
        }
        // Marks that were lost or put back catch up with what is believed.
        for w in &known {
            self.store.note_mark(&w.id, w.seen()).map_err(text)?;
        }
        self.store.marks().flush().map_err(text)
    }

    fn record_gap(&self, gap: &str) -> Result<(), String> {
        let entry = Draft {
            kind: "rollback_noticed".to_owned(),
            workspace: None,
            session: None,
            generation: None,
            actor: "agent".to_owned(),
            detail: serde_json::json!({ "why": gap }),
        };
        let journal = Journal { sessions: vec![], entries: vec![entry] };
        self.store.record(&journal, Durability::Full).map_err(text)
    }

    /// A session whose record does not verify holds the lease of its workspace: nobody knows what it
    /// wrote, so nobody else gets it before somebody looked.
    pub fn hold_for_session(&self, session: &str) {
        let Ok(known) = self.authority.list() else { return };
        let its = |w: &&Workspace| {
            let lease = w.lease.as_ref().filter(|lease| lease.state.may_publish());
            w.hold.is_none() && lease.is_some_and(|lease| lease.session.to_string() == session)
        };
        for w in known.iter().filter(its) {
            let why = format!("the record of its session {session} does not verify");
            self.put_on_hold(&w.id, &why, "agent");
        }
    }

    /// Puts a workspace on HOLD, here first. What fails is told: at the next start the mark that was
    /// set here, or the same witness, does it again.
    fn put_on_hold(&self, id: &WorkspaceId, why: &str, by: &str) {
        tracing::error!(OVERFENCE_WORKSPACE = %id, "HOLD: {why}");
        if let Err(failure) = self.hold(id, why, by) {
            tracing::error!(OVERFENCE_WORKSPACE = %id, "the HOLD is not complete: {failure}");
        }
    }

    /// Puts a workspace on HOLD, here first and then at the authority.
    pub fn hold(&self, id: &WorkspaceId, why: &str, by: &str) -> Result<(), Failure> {
        let failed = |e| Failure::new(Code::AuthorityUnavailable, e);
        self.store.mark_hold(id, true).map_err(|e| failed(text(e)))?;
        let rider = |_: &Result<(), Refusal>| {
            let entry = Draft {
                kind: "hold".to_owned(),
                workspace: Some(id.clone()),
                session: None,
                generation: None,
                actor: by.to_owned(),
                detail: serde_json::json!({ "why": why }),
            };
            Journal { sessions: vec![], entries: vec![entry] }
        };
        self.authority.hold(id, why, Box::new(rider)).map_err(|e| failed(text(e)))
    }

    /// After a refused acquisition: a HOLD that the authority set for what we had seen is set here, too.
    pub fn held_by_acquisition(&self, ask: &Acquire, refusal: &Refusal) {
        let Some(current) = refusal.current.as_ref().filter(|c| c.hold.is_some()) else { return };
        let found = Seen { generation: current.generation, version: current.at.version };
        if ask.seen.against(&found).is_none() || self.store.marks().held(&ask.workspace) {
            return;
        }
        tracing::error!(OVERFENCE_WORKSPACE = %ask.workspace, "{refusal}");
        if let Err(fault) = self.store.mark_hold(&ask.workspace, true) {
            tracing::error!(OVERFENCE_WORKSPACE = %ask.workspace, "{}", text(fault));
        }
    }

    /// A name that the authority knows less of than this host saw is not given out anew.
    pub fn refuse_forgotten(&self, id: &WorkspaceId) -> Result<(), Failure> {
        let Ok(known) = self.authority.get(id) else { return Ok(()) };
        let found = known.as_ref().map(Workspace::seen).unwrap_or_default();
        let held = known.is_some_and(|w| w.hold.is_some());
        let Some(why) = self.store.marks().highest(id).against(&found).filter(|_| !held) else {
            return Ok(());
        };
        self.put_on_hold(id, &why, "agent");
        Err(Failure::new(Code::WorkspaceHeld, format!("workspace {id} is on HOLD: {why}")))
    }

    /// Remembers a version that was published; it is made durable with the next mark or sweep.
    pub fn note_published(&self, id: &WorkspaceId, seen: Seen) {
        if let Err(fault) = self.store.note_mark(id, seen) {
            tracing::error!(OVERFENCE_WORKSPACE = %id, "the high-water mark was not raised: {}", text(fault));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_replaced_whole_and_anything_else_says_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        assert_eq!(read(root), None);
        for told in ["7", "x team/repo", "7 ", "7 a b"] {
            std::os::unix::fs::symlink(told, root.join(HOLDS)).unwrap();
            assert_eq!(read(root), None, "{told}");
            std::fs::remove_file(root.join(HOLDS)).unwrap();
        }
        std::os::unix::fs::symlink("7 team/repo", root.join(HOLDS)).unwrap();
        assert_eq!(read(root), Some((Generation(7), "team/repo".parse().unwrap())));
    }
}
