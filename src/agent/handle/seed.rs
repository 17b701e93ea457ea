//! Sessions that begin with bytes: a bundle that a named person authorised, or the upper of a killed
//! session, or of one from an earlier boot.
//!
//! 1. The bytes are copied into `exports/<key>/upper`, verified on the way; a start takes away what a
//!    crash left there. 2. They are made to fit the head of now, or refused with the names that both
//!    sides changed. 3. The lease is acquired, at that version and head only. 4. The session is opened
//!    as any other, but that the copy takes its empty upper's place by one rename. What fails rolls back
//!    to nothing: the bundle, or the former session's upper, is where the bytes are still.

use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::Arc;

use super::{Agent, denied, drop_scratch, internal, of_upper, unavailable, workspace_id};
use crate::agent::effects::capture_upper;
use crate::agent::failure::{Caller, Failure};
use crate::agent::host::Host;
use crate::agent::open::{Made, Seed, Wish};
use crate::agent::slot::Slot;
use crate::agent::under_way::Whose;
use crate::authority::no_rider;
use crate::failpoint;
use crate::kernel::walk::Dir;
use crate::model::code::Code;
use crate::model::head::{Head, HeadAt};
use crate::model::ids::{LeaseId, PublicationKey, Version, WorkspaceId};
use crate::model::session::{Seeded, Session, State};
use crate::model::view::{ApplyBundle, Opened, ReadmitSession, SessionView};
use crate::model::workspace::Acquire;
use crate::progress::{Amount, Counted, What};
use crate::upper::store::LayerStore;
use crate::upper::{Shown, Stop, bundle, rebase};

impl Agent {
    /// Opens a session whose upper is a verified bundle's, made to fit the present head. It publishes
    /// like any other writer afterwards.
    pub async fn apply(&self, by: &Caller, wish: ApplyBundle) -> Result<Opened, Failure> {
        authorised(&wish.authorised_by, &wish.reason, "a bundle")?;
        let by = by.clone();
        let made = self.blocking(move |host| apply(host, &by, wish)).await?;
        let session = self.session_view(&made.slot);
        let Made { token, ticket, predecessor, unresolved, .. } = made;
        Ok(Opened { session, token, ticket, predecessor, unresolved })
    }

    /// Readmits a session that has no process to run on, as a new one on a copy of its upper. What was
    /// kept of the former stays kept until somebody disposes of it or its grace is over.
    pub(super) async fn readmit_anew(
        &self,
        by: &Caller,
        former: &Arc<Slot>,
        wish: ReadmitSession,
    ) -> Result<SessionView, Failure> {
        let (by, former) = (by.clone(), Arc::clone(former));
        let made = self.blocking(move |host| readmit(host, &by, &former, wish)).await?;
        Ok(self.session_view(&made.slot))
    }
}

/// Refuses what no person stands for.
pub(super) fn authorised(by: &str, reason: &str, what: &str) -> Result<(), Failure> {
    if by.trim().is_empty() || reason.trim().is_empty() {
        let why = format!("{what} wants --authorised-by NAME and --reason TEXT");
        return Err(Failure::new(Code::BadRequest, why));
    }
    Ok(())
}

fn apply(host: &Arc<Host>, by: &Caller, wish: ApplyBundle) -> Result<Made, Failure> {
    host.refuse_when_short()?;
    host.not_draining()?;
    let bad = |why: String| Failure::new(Code::BadRequest, why);
    if wish.open.force {
        return Err(bad(
            "a bundle is applied under a lease that is free: there is no --force".into()
        ));
    }
    let path = wish.bundle.path().ok_or_else(|| bad("the path is not well formed".into()))?;
    let workspace = workspace_id(&wish.open.workspace)?;
    if let Some(create) = wish.open.create.clone() {
        match super::workspaces::create(host, by, create) {
            Err(f) if f.code != Code::WorkspaceExists => return Err(f),
            Ok(_) | Err(_) => {}
        }
    }
    let terms = Wish::check(host, by, wish.open)?;
    let read = bundle::inspect(&path).map_err(|fault| unread(&path, fault))?;
    let from = &read.provenance;
    if from.workspace != workspace {
        let why = format!(
            "the bundle is of workspace {}, not of {workspace}: name that one",
            from.workspace
        );
        return Err(bad(why));
    }
    let free = host.store.reserve().space().free;
    if read.layer.size_uncompressed > free {
        let why = format!(
            "the bundle says that it holds {} bytes, and {free} are free: make room first",
            read.layer.size_uncompressed
        );
        return Err(Failure::new(Code::NoSpace, why));
    }
    let (base, expected) = (from.base.clone(), from.expected.head.clone());
    let stage = Stage::new(host)?;
    let stop = || host.stopping();
    let made = (|| {
        let upper = stage.upper()?;
        let total = Amount { bytes: read.layer.size_compressed, entries: 0 };
        let whose = Whose::Workspace(workspace.clone());
        let unpacked = host.under_way.showing(What::Seed, whose, total, |progress| {
            bundle::unpack_into(&path, upper.as_fd(), &Counted { stop, progress })
        });
        // The bundle may have been exchanged since it was looked at.
        let same = |found: bundle::Bundle| {
            let changed = "the bundle changed while it was read";
            match found.manifest == read.manifest {
                true => Ok(()),
                false => Err(Failure::new(Code::BundleInvalid, changed)),
            }
        };
        unpacked.map_err(|fault| unread(&path, fault)).and_then(same)?;
        let now = head_of(host, &workspace)?;
        fit(host, &upper, &base, &expected, &now.head, &stop)?;
        let record = Seeded {
            session: from.session,
            generation: from.generation,
            bundle: Some(read.manifest),
            authorised_by: wish.authorised_by,
            reason: wish.reason,
        };
        stage.settle(&upper)?;
        let seed = Seed { upper: stage.path(), at: now, token: None, record };
        host.open(by, terms.seeded(seed))
    })();
    drop_scratch(&stage.root);
    made
}

fn readmit(
    host: &Arc<Host>,
    by: &Caller,
    former: &Arc<Slot>,
    wish: ReadmitSession,
) -> Result<Made, Failure> {
    host.refuse_when_short()?;
    host.not_draining()?;
    let s = former.session();
    s.readmittable_anew().map_err(|code| refused(&s, code))?;
    // Before anything is copied; the acquisition asks again.
    let now = head_of(host, &s.workspace)?;
    if now != s.expected {
        return Err(moved(host, &s, &now));
    }
    let stage = Stage::new(host)?;
    let stop = || {
        let state = former.lock().session.state;
        host.stopping() || !matches!(state, State::Fenced | State::Preserved)
    };
    let made = (|| {
        let upper = stage.upper()?;
        let layers = LayerStore::open(&stage.layers()).map_err(of_upper)?;
        let captured = host
            .with_upper(former, |upper| {
                host.showing(former, What::Capture, former.measured(), |progress| {
                    capture_upper(&layers, upper, true, &Counted { stop: &stop, progress })
                })
            })
            .map_err(|why| Failure::new(Code::MountFailed, why))?
            .map_err(of_upper)?;
        if let Some(captured) = captured {
            let total = Amount { bytes: captured.size_compressed, entries: 0 };
            let unpacked = host.showing(former, What::Seed, total, |progress| {
                let stop = Counted { stop: &stop, progress };
                layers.unpack_into(captured.diff_id, upper.as_fd(), &stop)
            });
            unpacked.map_err(of_upper)?;
        }
        fit(host, &upper, &s.base.head, &s.expected.head, &now.head, &stop)?;
        let record = Seeded {
            session: s.id,
            generation: s.generation,
            bundle: None,
            authorised_by: wish.authorised_by,
            reason: wish.reason,
        };
        stage.settle(&upper)?;
        let token = Some(s.token);
        let seed = Seed { upper: stage.path(), at: now, token, record };
        host.open(by, Wish::again(host, &s).seeded(seed))
    })();
    drop_scratch(&stage.root);
    made
}

/// The head moved on since. The refusal is the authority's and stands in the workspace's history, as that
/// of a session which could run on: no workspace has the version that is asked for.
fn moved(host: &Host, s: &Session, now: &HeadAt) -> Failure {
    let never = HeadAt { version: Version(u64::MAX), head: s.expected.head.clone() };
    let ask = Acquire {
        workspace: s.workspace.clone(),
        lease: LeaseId::fresh(),
        owner: s.owner.clone(),
        host: host.id,
        session: s.id,
        holder: s.holder,
        ttl: s.ttl,
        max_lifetime: host.config.lease.max_lifetime,
        force: None,
        only_at: Some(never),
        seen: host.store.marks().highest(&s.workspace),
    };
    match host.authority.acquire(&ask, no_rider()) {
        Err(fault) => unavailable(fault),
        Ok(Err(refusal)) if refusal.code != Code::HeadMoved => {
            host.held_by_acquisition(&ask, &refusal);
            refusal.into()
        }
        Ok(_) => Failure::new(
            Code::HeadMoved,
            format!(
                "session {} last saw version {}, and the workspace is at version {}: export its \
                 bytes, and `overfence bundle apply` the bundle",
                s.id, s.expected.version, now.version
            ),
        ),
    }
}

fn refused(s: &Session, code: Code) -> Failure {
    let why = match code {
        Code::Busy => "somebody outside may still write to its upper",
        _ => return denied(s, code),
    };
    Failure::new(code, format!("session {} cannot be readmitted yet: {why}", s.id))
}

fn unread(path: &std::path::Path, fault: crate::upper::Error) -> Failure {
    let (code, why) = (fault.code(), crate::agent::effects::text(fault));
    let code = match code {
        _ if !path.exists() => Code::NotFound,
        Code::Internal | Code::UpperRefused | Code::LayerDamaged => Code::BundleInvalid,
        code => code,
    };
    Failure::new(code, format!("{}: {why}", path.display()))
}

fn head_of(host: &Host, workspace: &WorkspaceId) -> Result<HeadAt, Failure> {
    let found = host.authority.get(workspace).map_err(unavailable)?;
    found.filter(|w| !w.deleted).map(|w| w.at).ok_or_else(|| Code::UnknownWorkspace.into())
}

/// Makes a copied upper fit the head: see [`rebase`].
fn fit(
    host: &Host,
    upper: &Dir,
    base: &Head,
    expected: &Head,
    head: &Head,
    stop: Stop<'_>,
) -> Result<(), Failure> {
    let missing = |fault: crate::upper::Error| match fault {
        crate::upper::Error::NoLayer(layer) => Failure::new(
            Code::NotFound,
            format!(
                "layer {layer}, on which the bundle was made, is not on this host: without it nobody \
                 can say what both sides changed; apply the bundle on a host that has it"
            ),
        ),
        other => host.of_layers(other),
    };
    // What the bundle was made on may have gone since; the head may not.
    host.shown_by(head).map_err(|fault| host.of_layers(fault))?;
    if base != expected {
        let own = match expected.0.split_last() {
            Some((own, below)) if *below == base.0[..] => own,
            _ => {
                let why = "its session published on another head than it was mounted on";
                return Err(Failure::new(Code::BundleInvalid, why));
            }
        };
        let own = host.layers.ensure_tree(*own, stop).map_err(missing)?;
        let own = Dir::open(&own).map_err(internal)?;
        rebase::hide_given_up(upper.as_fd(), &own, stop).map_err(of_upper)?;
    }
    if expected == head {
        return Ok(());
    }
    let views = || Ok((host.shown_by(expected)?, host.shown_by(head)?));
    let found = rebase::onto(upper.as_fd(), views, stop).map_err(missing)?;
    if found.count == 0 {
        return Ok(());
    }
    let mut message = format!(
        "the head moved on since, and both sides changed {} path(s); nothing was applied. Take what \
         is wanted over by hand, in a session of the workspace:",
        found.count
    );
    for path in &found.paths {
        // A name makes no line of its own.
        message.push_str(&format!("\n  {}", Shown::bytes(path.0.as_bytes())));
    }
    if found.count > found.paths.len() as u64 {
        message.push_str(&format!("\n  and {} more", found.count - found.paths.len() as u64));
    }
    Err(Failure::new(Code::Conflict, message))
}

/// Where the bytes are put together before there is a session.
struct Stage {
    root: PathBuf,
}

impl Stage {
    fn new(host: &Host) -> Result<Self, Failure> {
        let root = host.paths.exports.join(PublicationKey::fresh().to_string());
        failpoint::fails("seed.stage.before").map_err(internal)?;
        let stage = Self { root };
        std::fs::create_dir(&stage.root)
            .and_then(|()| std::fs::create_dir(stage.path()))
            .map_err(internal)?;
        Ok(stage)
    }

    fn path(&self) -> PathBuf {
        self.root.join("upper")
    }

    fn layers(&self) -> PathBuf {
        self.root.join("layers")
    }

    fn upper(&self) -> Result<Dir, Failure> {
        Dir::open(&self.path()).map_err(internal)
    }

    /// Makes the copy durable: from here on nobody needs what it was made of.
    fn settle(&self, upper: &Dir) -> Result<(), Failure> {
        rustix::fs::syncfs(upper).map_err(internal)?;
        failpoint::hit("seed.stage.after");
        Ok(())
    }
}
