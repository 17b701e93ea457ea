//! The store as a whole: opened once by the agent, shared by all who write.

use std::cell::Cell;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FlockOperation, flock};
use tokio::sync::watch;

use super::anchors::Anchors;
use super::backup;
use super::db::{Db, Durability};
use super::error::Error;
use super::files;
use super::keys::Keys;
use super::marks::Marks;
use super::records::{Tx, Unreadable};
use super::reserve::Reserve;
use crate::model::ids::{HostId, WorkspaceId};
use crate::model::journal::Journal;
use crate::model::session::Session;
use crate::model::time::BootInstant;
use crate::model::workspace::Seen;

/// Tells the present instant; injected so that tests decide what time it is.
pub type Clock = Arc<dyn Fn() -> BootInstant + Send + Sync>;

/// Where the store keeps its files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// The state directory: lock and database.
    pub state: PathBuf,
    /// Directory of the keys.
    pub keys: PathBuf,
    /// File of the evidence anchors.
    pub anchors: PathBuf,
    /// File of the high-water marks.
    pub high_water: PathBuf,
    /// Bytes held back in the state directory for a full disk; 0 for none.
    pub reserve: u64,
}

impl Paths {
    /// Everything in its usual place below `state`.
    pub fn under(state: &Path) -> Self {
        Self {
            state: state.to_owned(),
            keys: state.join("keys"),
            anchors: state.join("evidence.anchors"),
            high_water: state.join("high-water"),
            reserve: 0,
        }
    }
}

/// The host's durable state.
pub struct Store {
    db: Db,
    keys: Keys,
    marks: Marks,
    clock: Clock,
    paths: Paths,
    host: HostId,
    reserve: Reserve,
    pub(super) anchors: Anchors,
    pub(super) head: watch::Sender<u64>,
    /// Last entry known to survive a power loss.
    pub(super) durable: AtomicU64,
    _lock: File,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Store({})", self.host)
    }
}

impl Store {
    /// Takes the state directory, which it makes at the first start, and opens everything in it.
    ///
    /// # Errors
    /// Another agent has it; a key or a witness file is missing or wrong; the disk does not
    /// answer.
    pub fn open(paths: &Paths, clock: Clock) -> Result<Self, Error> {
        files::make_dir(&paths.state)?;
        // Before anything that needs room.
        let reserve = Reserve::open(&paths.state, paths.reserve)?;
        let lock = take_lock(&paths.state.join("lock"))?;
        backup::finish(paths)?;
        // Keys and witnesses come before the database, so that "the database is there" means
        // that they were there too.
        let database = paths.state.join("overfence.db");
        let first_start = !database.try_exists().map_err(Error::io("look for", &database))?;
        let keys = Keys::open(&paths.keys, first_start)?;
        let marks = Marks::open(&paths.high_water, first_start)?;
        let anchors = Anchors::open(&paths.anchors, first_start, keys.ticket.public())?;
        let db = reserve.making_room(|| Db::open(&database))?;
        let mut store = Self {
            db,
            keys,
            marks,
            clock,
            paths: paths.clone(),
            host: HostId::from_u128(0),
            reserve,
            anchors,
            head: watch::Sender::new(0),
            durable: AtomicU64::new(0),
            _lock: lock,
        };
        store.host = store.reserve.making_room(|| store.identify(paths))?;
        let head = store.read(|tx| tx.evidence_head())?;
        store.head.send_replace(head.0);
        store.hold_room();
        Ok(store)
    }

    /// Checks that the keys are those of the database; makes the host id once.
    fn identify(&self, paths: &Paths) -> Result<HostId, Error> {
        let keys = [
            ("record_key", self.keys.record.id(), "record.key"),
            ("ticket_key", self.keys.ticket.id(), "ticket.key"),
        ];
        self.once(Durability::Full, |tx| {
            for (name, id, file) in keys {
                match tx.meta(name)? {
                    None => tx.set_meta(name, id)?,
                    Some(known) if known == id => {}
                    Some(known) => {
                        let why = format!("it is key {id}, the database was made with {known}");
                        return Err(Error::Key { path: paths.keys.join(file), why });
                    }
                }
            }
            if let Some(text) = tx.meta("host")? {
                let bad = |e: crate::model::ids::InvalidId| Error::Record {
                    table: "meta",
                    id: "host".to_owned(),
                    why: e.to_string(),
                };
                return text.parse().map_err(bad);
            }
            let host = HostId::fresh();
            tx.set_meta("host", &host.to_string())?;
            Ok(host)
        })
    }

    /// Runs `job` as one unit; see [`Db::call`]. If it fails for want of room, some is made for the
    /// next one.
    ///
    /// # Errors
    /// The job's, or the database's.
    pub fn transact<R>(
        &self,
        durability: Durability,
        job: impl FnOnce(&Tx<'_>) -> Result<R, Error>,
    ) -> Result<R, Error> {
        self.once(durability, job).inspect_err(|error| {
            self.reserve.relieve(error);
        })
    }

    /// [`Store::transact`] without making room.
    pub(super) fn once<R>(
        &self,
        durability: Durability,
        job: impl FnOnce(&Tx<'_>) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let (answer, appended) = self.db.call(durability, |conn| {
            let (now, key) = ((self.clock)(), &self.keys.record);
            let tx = Tx { conn, now, key, appended: Cell::new(0) };
            Ok((job(&tx)?, tx.appended.get()))
        })?;
        if durability == Durability::Full {
            self.durable.fetch_max(appended, Ordering::SeqCst);
        }
        self.head.send_if_modified(|head| {
            let newer = appended > *head;
            *head = appended.max(*head);
            newer
        });
        Ok(answer)
    }

    /// Runs `job`, which changes nothing, on what is committed; see [`Db::read`].
    ///
    /// # Errors
    /// The job's, or the database's.
    pub fn read<R>(&self, job: impl FnOnce(&Tx<'_>) -> Result<R, Error>) -> Result<R, Error> {
        self.db.read(|conn| {
            let (now, key) = ((self.clock)(), &self.keys.record);
            job(&Tx { conn, now, key, appended: Cell::new(0) })
        })
    }

    /// Writes session records and evidence as one unit.
    ///
    /// # Errors
    /// See [`Db::call`].
    pub fn record(&self, journal: &Journal, durability: Durability) -> Result<(), Error> {
        self.reserve.making_room(|| self.once(durability, |tx| tx.journal(journal)))
    }

    /// All session records, also those that are not believed.
    ///
    /// # Errors
    /// The database does not answer.
    pub fn sessions(&self) -> Result<Vec<Result<Session, Unreadable>>, Error> {
        self.read(|tx| tx.sessions())
    }

    /// Takes room for what must not fail on a full disk, as far as there is plenty.
    pub fn hold_room(&self) {
        self.reserve.refill();
        let space = self.reserve.space();
        if space.wanted > 0
            && !space.short()
            && let Err(fault) = self.db.hold_room()
        {
            tracing::warn!("the store's log holds no room: {fault}");
        }
    }

    /// Why this store is not believed until it is opened again, if it is not: a call failed of which
    /// nobody knows what it left on the disk.
    pub fn trouble(&self) -> Option<String> {
        self.db.trouble().or_else(|| self.marks.trouble())
    }

    /// The room held back for a full disk.
    pub fn reserve(&self) -> &Reserve {
        &self.reserve
    }

    /// Raises the high-water mark of a workspace; see [`Marks::raise`].
    ///
    /// # Errors
    /// It is not known to be durable.
    pub fn raise_mark(&self, workspace: &WorkspaceId, seen: Seen) -> Result<(), Error> {
        self.reserve.making_room(|| self.marks.raise(workspace, seen))
    }

    /// Raises it in memory and in the file, not yet for good; see [`Marks::note`].
    ///
    /// # Errors
    /// It could not be written.
    pub fn note_mark(&self, workspace: &WorkspaceId, seen: Seen) -> Result<(), Error> {
        self.reserve.making_room(|| self.marks.note(workspace, seen))
    }

    /// Remembers a HOLD that was set or lifted here; see [`Marks::hold`].
    ///
    /// # Errors
    /// It is not known to be durable.
    pub fn mark_hold(&self, workspace: &WorkspaceId, held: bool) -> Result<(), Error> {
        self.reserve.making_room(|| self.marks.hold(workspace, held))
    }

    /// Where its files are.
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// This host's id.
    pub fn host(&self) -> HostId {
        self.host
    }

    /// The keys; they show no secret.
    pub fn keys(&self) -> &Keys {
        &self.keys
    }

    /// The high-water marks.
    pub fn marks(&self) -> &Marks {
        &self.marks
    }

    /// The database, for its counters.
    pub fn db(&self) -> &Db {
        &self.db
    }

    /// The present instant.
    pub fn now(&self) -> BootInstant {
        (self.clock)()
    }
}

/// How long the former agent may take to be gone.
const LOCK_PATIENCE: std::time::Duration = std::time::Duration::from_secs(2);

pub(super) fn take_lock(path: &Path) -> Result<File, Error> {
    files::touch_private(path)?;
    let file = File::options().write(true).open(path).map_err(Error::io("open", path))?;
    // A killed agent's lock goes with its last thread, which may take a moment.
    let until = std::time::Instant::now() + LOCK_PATIENCE;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) if std::time::Instant::now() < until => {
                std::thread::sleep(LOCK_PATIENCE / 40);
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(Error::Locked { path: path.to_owned() });
            }
            Err(errno) => return Err(Error::io("lock", path)(errno.into())),
        }
    }
}
