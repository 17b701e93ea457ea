//! What a workspace consists of: taken in as its first layers, set back to an earlier version, read
//! through for damage.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::workspaces::{any, create_with, find};
use super::{Agent, holds, of_upper, unavailable, workspace_id};
use crate::agent::effects::text;
use crate::agent::failure::{Caller, Failure};
use crate::agent::host::Host;
use crate::authority::{Error as Unanswered, Happening, Rider, no_rider};
use crate::failpoint;
use crate::kernel::clock;
use crate::model::code::Code;
use crate::model::head::{Digest, Head, HeadAt};
use crate::model::ids::{LeaseId, Owner, PublicationKey, SessionId, Version, WorkspaceId};
use crate::model::lease::{HolderKind, LeaseState};
use crate::model::ledger::{KeyState, Which};
use crate::model::view::{
    ImportWorkspace, LayerReport, RevertWorkspace, WorkspaceReport, WorkspaceView,
};
use crate::model::workspace::{Acquire, Acquired, KEPT, Publish, Refusal, Seen, Workspace};
use crate::upper::image;

/// Layers of an imported image, uncompressed, unless the request says otherwise.
const MAX_BYTES: u64 = 64 << 30;
/// A revert holds a lease for no longer, should the agent die in the middle of it.
const LEASE: std::time::Duration = std::time::Duration::from_secs(30);

impl Agent {
    /// Makes a workspace whose first layers are an image's, or a directory.
    pub async fn import_workspace(
        &self,
        by: &Caller,
        wish: ImportWorkspace,
    ) -> Result<WorkspaceView, Failure> {
        let by = by.clone();
        self.blocking(move |host| import(host, &by, wish).map(|w| host.workspace_view(&w))).await
    }

    /// Publishes the head of an earlier version once more, as a new version, under a lease of its
    /// own.
    pub async fn revert_workspace(
        &self,
        by: &Caller,
        id: &str,
        wish: RevertWorkspace,
    ) -> Result<WorkspaceView, Failure> {
        let id = workspace_id(id)?;
        let by = by.clone();
        self.blocking(move |host| {
            revert(host, &by, &id, Version(wish.to), &wish.reason)?;
            any(host, &id).map(|w| host.workspace_view(&w))
        })
        .await
    }

    /// Reads every layer of a workspace's head: stored file, unpacked tree.
    pub async fn verify_workspace(&self, id: &str) -> Result<WorkspaceReport, Failure> {
        let id = workspace_id(id)?;
        self.blocking(move |host| {
            let known = any(host, &id)?;
            let mut layers = Vec::new();
            for layer in &known.at.head.0 {
                layers.push(verified(host, *layer)?);
            }
            Ok(WorkspaceReport {
                workspace: id.to_string(),
                version: known.at.version.0,
                ok: layers.iter().all(|layer| layer.fault.is_none()),
                layers,
            })
        })
        .await
    }
}

fn verified(host: &Host, layer: Digest) -> Result<LayerReport, Failure> {
    use crate::upper::Error;
    let report = |unpacked, fault| LayerReport { layer: layer.to_string(), unpacked, fault };
    let read = host.layers.verify(layer, &|| host.stopping());
    // What is whole again is marked no more.
    host.metrics.layers_damaged(host.layers.damaged());
    match read {
        Ok(unpacked) => Ok(report(unpacked, None)),
        Err(fault @ (Error::Stopped | Error::Changed { .. })) => Err(of_upper(fault)),
        Err(fault) => {
            host.tell_damage(layer);
            Ok(report(host.layers.lower_path(layer).is_ok(), Some(text(fault))))
        }
    }
}

fn import(host: &Host, by: &Caller, wish: ImportWorkspace) -> Result<Workspace, Failure> {
    let bad = |text: String| Failure::new(Code::BadRequest, text);
    let ImportWorkspace { about, image, max_bytes } = wish;
    let Some(image) = image else {
        if about.lowers.is_empty() {
            return Err(bad("say what is imported: a directory (`lowers`) or an `image`".into()));
        }
        return create_with(host, by, about, vec![]);
    };
    if !about.lowers.is_empty() {
        return Err(bad("an image or directories are imported, not both".into()));
    }
    let path = image.path().filter(|path| path.is_absolute());
    let path = path.ok_or_else(|| bad(format!("{:?} is no absolute path", image.0)))?;
    host.refuse_when_short()?;
    super::workspaces::refuse_existing(host, &workspace_id(&about.id)?)?;
    let layers = layers_of(host, &path, max_bytes.unwrap_or(MAX_BYTES))?;
    create_with(host, by, about, layers)
}

fn layers_of(host: &Host, path: &Path, max: u64) -> Result<Vec<Digest>, Failure> {
    let all =
        image::import(path, &host.layers, max, &|| host.stopping()).map_err(|fault| match fault
            .code()
        {
            Code::Internal => Failure::new(Code::ImageRefused, text(fault)),
            Code::BundleInvalid => Failure::new(Code::ImageRefused, text(fault)),
            _ => of_upper(fault),
        })?;
    Ok(all.into_iter().map(|one| one.layer.diff_id).collect())
}

/// The versions that a workspace had, and the head of each.
struct Versions<'a> {
    id: &'a WorkspaceId,
    heads: BTreeMap<Version, Head>,
}

impl<'a> Versions<'a> {
    fn of(host: &Host, id: &'a WorkspaceId) -> Result<Self, Failure> {
        let rows = host.authority.history(id, usize::MAX).map_err(unavailable)?;
        let told = rows.into_iter().filter_map(|row| match row.what {
            Happening::Created { at, .. }
            | Happening::Published { at, .. }
            | Happening::Repaired { at, .. } => Some((at.version, at.head)),
            _ => None,
        });
        // The newest row comes first, and counts.
        let mut heads = BTreeMap::new();
        for (version, head) in told {
            heads.entry(version).or_insert(head);
        }
        Ok(Self { id, heads })
    }

    fn head(&self, version: Version) -> Result<&Head, Failure> {
        self.heads.get(&version).ok_or_else(|| {
            let text = format!(
                "workspace {id} never had a version {version}; `overfence workspace history {id}` \
                 shows those it had",
                id = self.id
            );
            Failure::new(Code::NotFound, text)
        })
    }

    /// Whether the layers of a version are kept from collection.
    fn keeps(&self, version: Version) -> bool {
        self.heads.keys().rev().take(KEPT).any(|kept| *kept == version)
    }

    /// Which earlier versions have all their layers, none of them known as damaged.
    fn left(&self, host: &Host) -> String {
        let mut there: BTreeSet<_> = host.layers.list().unwrap_or_default().into_iter().collect();
        there.retain(|layer| !host.layers.is_damaged(*layer));
        let whole = |head: &Head| head.0.iter().all(|layer| there.contains(layer));
        let earlier = self.heads.iter().rev().skip(1).rev();
        let left = earlier.filter(|(_, head)| whole(head)).map(|(version, _)| version.0);
        let left = ranges(left);
        match left.is_empty() {
            true => format!("{} can be reverted to no earlier version", self.id),
            false => format!("{} can be reverted to: {left}", self.id),
        }
    }

    /// Why a version whose layers are gone or damaged does not come back.
    fn refuse(&self, host: &Host, version: Version, fault: crate::upper::Error) -> Failure {
        if matches!(fault, crate::upper::Error::NoLayer(_)) && !self.keeps(version) {
            return self.not_kept(host, version);
        }
        let failure = host.of_layers(fault);
        match failure.code {
            Code::LayerDamaged => {
                let message = format!("{}. {}", failure.message, self.left(host));
                Failure { message, ..failure }
            }
            _ => failure,
        }
    }

    fn not_kept(&self, host: &Host, version: Version) -> Failure {
        let gone = |layer: &&Digest| host.layers.info(**layer).is_err();
        let layers = self.heads.get(&version).map_or(&[][..], |head| &head.0);
        let named = match layers.iter().find(gone) {
            Some(layer) => format!("layer {layer} of version {version} was"),
            None => format!("layers of version {version} are being"),
        };
        let text = format!(
            "{named} removed, since only the last {KEPT} versions of a workspace keep theirs. {}",
            self.left(host)
        );
        Failure::new(Code::VersionNotKept, text)
    }
}

/// Runs of versions that are named; the newest ones are.
const RUNS: usize = 16;

/// `3, 5-9`
fn ranges(sorted: impl Iterator<Item = u64>) -> String {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for n in sorted {
        match runs.last_mut() {
            Some((_, end)) if *end + 1 == n => *end = n,
            _ => runs.push((n, n)),
        }
    }
    let unnamed = runs.len().saturating_sub(RUNS);
    let named = runs.into_iter().skip(unnamed).map(|(from, to)| match from == to {
        true => from.to_string(),
        false => format!("{from}-{to}"),
    });
    let named = named.collect::<Vec<_>>().join(", ");
    if unnamed > 0 { format!("{named}, and earlier ones") } else { named }
}

/// Offers a head that no session waits for: its row in the ledger is durable ahead of it.
fn offered(
    host: &Host,
    wish: &Publish,
    owner: &Owner,
    rider: Rider<'_, HeadAt>,
) -> Result<Result<HeadAt, Refusal>, Unanswered> {
    // What was recorded so far is anchored before each move of a head.
    host.store.anchor().map_err(|fault| Unanswered::Unavailable { why: text(fault) })?;
    failpoint::hit("authority.enter.before");
    let entered = host.authority.enter(wish, owner, KeyState::Sent, no_rider());
    failpoint::hit("authority.enter.after");
    if let Err(refusal) = entered? {
        return Ok(Err(refusal));
    }
    // The row keeps its layers from now on; they were looked at before there was one.
    let missing = wish.layers().find(|layer| host.layers.lower_path(*layer).is_err());
    if let Some(layer) = missing {
        tracing::warn!(OVERFENCE_WORKSPACE = %wish.workspace, "layer {layer} went while it was reverted to");
        host.authority.resolve(&wish.workspace, wish.key, no_rider())?;
        return Ok(Err(Refusal { code: Code::VersionNotKept, current: None }));
    }
    let lost = |why| Unanswered::Unknown { why };
    failpoint::lost("authority.publish.before").map_err(lost)?;
    let answer = host.authority.publish(wish, rider)?;
    failpoint::lost("authority.publish.after").map_err(lost)?;
    Ok(answer)
}

impl Host {
    /// Finds out what became of reverts without an answer. No session waits for one; it is asked for
    /// once the revert's lease is over, when nothing can change it any more.
    pub fn resolve_reverts(&self) -> Result<(), String> {
        let open = Which { workspace: None, open: true, limit: usize::MAX };
        let mut waiting = false;
        for row in self.authority.publications(&open).map_err(text)? {
            let Some(asked) = row.asked.as_ref().filter(|asked| asked.whole.is_some()) else {
                continue;
            };
            let (id, key) = (&row.workspace, row.key);
            let known = self.authority.get(id).map_err(text)?;
            let now = self.store.now();
            if known.is_some_and(|w| w.live_lease(&now).is_some_and(|l| l.id == asked.lease)) {
                waiting = true;
                continue;
            }
            let rider = |found: &Result<KeyState, Refusal>| {
                let detail = serde_json::json!({ "key": key, "found": found.as_ref().ok() });
                holds::entry_by("resolve", id, "agent", detail)
            };
            failpoint::lost("authority.resolve.before")?;
            let found = self.authority.resolve(id, key, Box::new(rider)).map_err(text)?;
            failpoint::hit("authority.resolve.after");
            tracing::info!(OVERFENCE_WORKSPACE = %id, "publication {key} of a revert is {}", found.word());
            if let KeyState::Committed { at, .. } = found {
                let seen = Seen { generation: asked.generation, version: at.version };
                self.note_published(id, seen);
            }
        }
        self.shown().lost_revert = waiting;
        Ok(())
    }
}

fn revert(
    host: &Host,
    by: &Caller,
    id: &WorkspaceId,
    to: Version,
    reason: &str,
) -> Result<(), Failure> {
    let known = find(host, id)?;
    let versions = Versions::of(host, id)?;
    let head = versions.head(to)?.clone();
    if known.at.version == to {
        let text = format!("version {to} is the present one of {id}: there is nothing to revert");
        return Err(Failure::new(Code::WrongState, text));
    }
    host.refuse_when_short()?;
    // A head that cannot be mounted is not published.
    for layer in &head.0 {
        let tree = host.layers.ensure_tree(*layer, &|| host.stopping());
        tree.map_err(|fault| versions.refuse(host, to, fault))?;
    }
    let owner: Owner = by
        .owner()
        .parse()
        .map_err(|e: crate::model::ids::InvalidId| Failure::new(Code::BadRequest, e.to_string()))?;
    let (session, lease) = (SessionId::fresh(), LeaseId::fresh());
    let told = |kind: &str, detail| holds::entry(kind, id, by, detail);
    let ask = Acquire {
        workspace: id.clone(),
        lease,
        owner: owner.clone(),
        host: host.id,
        session,
        holder: HolderKind::Beat,
        ttl: LEASE,
        max_lifetime: LEASE,
        force: None,
        only_at: Some(known.at.clone()),
        seen: host.store.marks().highest(id),
    };
    let begun = clock::now();
    let rider = |answer: &Result<Acquired, Refusal>| {
        told("acquire", serde_json::json!({ "asked": ask, "for": "revert", "answer": answer }))
    };
    let acquired = host
        .authority
        .acquire(&ask, Box::new(rider))
        .map_err(unavailable)?
        .inspect_err(|refusal| host.held_by_acquisition(&ask, refusal))?;
    let generation = acquired.lease.generation;
    let seen = |version| Seen { generation, version };
    host.store.raise_mark(id, seen(known.at.version)).map_err(unavailable)?;
    let wish = Publish {
        workspace: id.clone(),
        lease,
        generation,
        session,
        expected: acquired.at.clone(),
        key: PublicationKey::fresh(),
        layer: head.0.last().copied().unwrap_or(Digest([0; 32])),
        whole: Some(head),
        reverts_to: Some(to),
    };
    let rider = |answer: &Result<HeadAt, Refusal>| {
        let detail = serde_json::json!({
            "offered": wish, "answer": answer, "reverts_to": to, "reason": reason,
        });
        told("publication", detail)
    };
    let answer = offered(host, &wish, &owner, Box::new(rider));
    let why = format!("reverted to version {to}");
    let ended = host.authority.end(id, lease, generation, LeaseState::Released, &why, no_rider());
    if let Err(fault) = ended {
        tracing::warn!(OVERFENCE_WORKSPACE = %id, "the lease of a revert runs until its end: {}", text(fault));
    }
    let at = match answer {
        Err(Unanswered::Unknown { why }) => {
            host.shown().lost_revert = true;
            failpoint::hit("authority.doubt.before");
            let told = host.authority.doubt(id, wish.key, &why);
            failpoint::hit("authority.doubt.after");
            if let Err(fault) = told {
                tracing::warn!(OVERFENCE_WORKSPACE = %id, "{}", text(fault));
            }
            let text = format!(
                "publication {} of the revert has no known outcome: {why}. The agent finds it out; \
                 `overfence publication show {}` tells",
                wish.key, wish.key
            );
            return Err(Failure::new(Code::UnknownPublication, text));
        }
        answer => answer.map_err(unavailable)?,
    };
    if let Err(refusal) = &at {
        host.metrics.refused(refusal.code);
    }
    let at = at.map_err(|refusal| match refusal.code {
        // A collection was faster.
        Code::LayerBuried | Code::VersionNotKept => versions.not_kept(host, to),
        _ => refusal.into(),
    })?;
    host.note_published(id, seen(at.version));
    tracing::info!(OVERFENCE_WORKSPACE = %id, "reverted to version {to} in {:?}", clock::now().since(begun));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_named_in_runs() {
        for (all, said) in [
            (vec![], ""),
            (vec![0], "0"),
            (vec![0, 1, 2], "0-2"),
            (vec![0, 2, 3, 5, 7, 8, 9], "0, 2-3, 5, 7-9"),
        ] {
            assert_eq!(ranges(all.into_iter()), said);
        }
        let many = ranges((0..40).step_by(2));
        assert!(many.starts_with("8, 10,") && many.ends_with("38, and earlier ones"), "{many}");
    }
}
