//! Where the agent keeps what.
//!
//! ```text
//! <state>/                       0700, durable
//!   overfence.db                 authority and store
//!   sessions/<id>/{upper,work,merged,marker}  holds -> "<generation> <workspace>"
//!   layers/  bundles/  exports/  trash/  etc/  empty/
//! <runtime>/                     0755, of this boot
//!   overfence.sock  deadlines  cell
//!   sessions/<id>/init.json      who the session's init is; not seen inside
//!   sessions/<id>/init.beat      when it last gave a sign of life
//!   sessions/<id>/inside/        /run/overfence of the workload: ticket, session.json, session.sock
//! <cgroup2>/<parent>/<id>/       the sealed cgroup; <parent> is made again if it was removed
//! ```

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::config::Config;
use crate::model::ids::SessionId;
use crate::model::session::Session;

/// Where the store keeps its files.
pub fn of_store(config: &Config) -> crate::store::Paths {
    crate::store::Paths {
        state: config.state_dir.clone(),
        keys: config.keys_dir.clone(),
        anchors: config.evidence_anchor_file.clone(),
        high_water: config.high_water_file.clone(),
        reserve: config.reserve_mib.saturating_mul(1 << 20),
    }
}

/// All paths that are not a session's own.
#[derive(Clone, Debug)]
pub struct Paths {
    /// `<state>`.
    pub state: PathBuf,
    /// Session directories.
    pub sessions: PathBuf,
    /// Captured layers.
    pub layers: PathBuf,
    /// Exports without a destination of their own.
    pub bundles: PathBuf,
    /// Captures on their way into a bundle, and copies on their way into a session; nothing stays here.
    pub exports: PathBuf,
    /// What is being removed.
    pub trash: PathBuf,
    /// An empty directory, the lower of an empty head.
    pub empty: PathBuf,
    /// The keeper's table.
    pub deadlines: PathBuf,
    /// The pinned mount namespace that never holds sessions.
    pub cell: PathBuf,
    /// Run-time session directories.
    pub runtime: PathBuf,
    /// Parent of the sealed cgroups.
    pub cgroups: PathBuf,
    /// Where the cgroup2 hierarchy is.
    pub hierarchy: PathBuf,
    /// Directories in which nobody else has business.
    own: [PathBuf; 3],
}

fn are_same(one: &Path, other: &Path) -> bool {
    let id = |path: &Path| path.metadata().map(|info| (info.dev(), info.ino()));
    matches!((id(one), id(other)), (Ok(one), Ok(other)) if one == other)
}

impl Paths {
    /// From the configuration, the cgroup2 root, and the parent of the sealed cgroups below it.
    pub fn new(config: &Config, cgroup_root: &Path, parent: &Path) -> Self {
        let (state, run) = (&config.state_dir, &config.runtime_dir);
        Self {
            sessions: state.join("sessions"),
            layers: state.join("layers"),
            bundles: config.bundles_dir.clone(),
            exports: state.join("exports"),
            trash: state.join("trash"),
            empty: state.join("empty"),
            deadlines: run.join("deadlines"),
            cell: run.join("cell"),
            runtime: run.join("sessions"),
            cgroups: cgroup_root.join(parent),
            hierarchy: cgroup_root.to_owned(),
            state: state.clone(),
            own: [state.clone(), run.clone(), config.keys_dir.clone()],
        }
    }

    /// The cgroup of a session: a sealed one, or the slice that it was opened with.
    pub fn cgroup(&self, s: &Session) -> PathBuf {
        match &s.external {
            Some(slice) => self.hierarchy.join(slice.path()),
            None => self.sealed(s.id),
        }
    }

    /// Where a session's sealed cgroup is, if it has one.
    pub fn sealed(&self, id: SessionId) -> PathBuf {
        self.cgroups.join(id.to_string())
    }

    /// Whether a place is the agent's own: in its state, run-time or key directories, through whatever
    /// links or binds, but not where bundles go. Keys and sessions' uppers are there.
    pub fn are_own(&self, place: &Path) -> bool {
        let real = |path: &Path| {
            // What is to be made lies where the part of its path does that is there.
            let there = path.ancestors().find_map(|above| above.canonicalize().ok());
            there.unwrap_or_else(|| path.to_owned())
        };
        let (place, bundles) = (real(place), real(&self.bundles));
        if place.starts_with(&bundles) {
            return false;
        }
        // A directory that is bound elsewhere has another path and is the same.
        let below = |dir: &PathBuf| std::fs::read_dir(dir).into_iter().flatten().flatten();
        let bound = || {
            let inner = self.own.iter().flat_map(below).map(|entry| entry.path());
            let mut all = self.own.iter().cloned().chain(inner).filter(|dir| real(dir) != bundles);
            all.any(|dir| are_same(&dir, &place))
        };
        self.own.iter().any(|dir| place.starts_with(real(dir))) || bound()
    }

    /// Whether a directory is, or holds, one of the agent's own.
    pub fn hold_own(&self, tree: &Path) -> bool {
        let above = |dir: &PathBuf| {
            let real = dir.canonicalize().unwrap_or_else(|_| dir.clone());
            real.ancestors().any(|above| are_same(above, tree))
        };
        self.are_own(tree) || self.own.iter().any(above)
    }

    /// Run-time directory of a session, not seen inside.
    pub fn runtime_of(&self, id: SessionId) -> PathBuf {
        self.runtime.join(id.to_string())
    }

    /// What the workload sees as `/run/overfence`.
    pub fn inside_of(&self, id: SessionId) -> PathBuf {
        self.runtime_of(id).join("inside")
    }

    /// Who was in the session's cgroup when that was proved frozen.
    pub fn members_of(&self, id: SessionId) -> PathBuf {
        self.runtime_of(id).join("members")
    }

    /// Who the session's init is.
    pub fn init_of(&self, id: SessionId) -> PathBuf {
        self.runtime_of(id).join("init.json")
    }
}
