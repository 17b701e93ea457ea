//! A backup of the host: its database as it was at one moment, and the layers which that names; and
//! how it is put back while no agent runs.
//!
//! ```text
//! <dest>/              0700; has this name once it was read back whole, `<dest>.partial` until then
//! ├── backup.json      when, of which host, and what is in it
//! ├── overfence.db     see `store::backup`
//! ├── keys/            only if that was asked for
//! └── layers/          as in the state directory, without trees
//! ```
//!
//! Not in it: high-water marks and anchors, which notice that an old database came back; uncommitted
//! bytes; bundles.

use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags};
use serde::{Deserialize, Serialize};

use super::effects::text;
use super::failure::Failure;
use super::host::Host;
use crate::config::Config;
use crate::failpoint;
use crate::model::code::Code;
use crate::model::head::Digest;
use crate::model::journal::{Draft, Journal};
use crate::model::view::{BackupView, PathText, RestoredView};
use crate::store::{Copied, Durability, Error as Fault, Vacant};
use crate::upper::store::LayerStore;
use crate::upper::{Error as Spoilt, Stop, remove};

const NOTE: &str = "backup.json";
const LAYERS: &str = "layers";

/// What stands in `backup.json`.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    time: String,
    bytes: u64,
    copied: Copied,
}

impl Note {
    fn view(self, path: &Path) -> BackupView {
        BackupView {
            path: PathText::of(path),
            host: self.copied.host,
            time: self.time,
            entries: self.copied.entries,
            database: self.copied.database,
            layers: self.copied.layers.len() as u64,
            bytes: self.bytes,
            keys: self.copied.keys,
        }
    }
}

fn refused(fault: impl std::error::Error) -> Failure {
    Failure::new(Code::BackupRefused, text(fault))
}

fn at<'a>(what: &'a str, path: &'a Path) -> impl FnOnce(std::io::Error) -> Failure + 'a {
    move |fault| Failure::new(Code::BackupRefused, format!("{what} {}: {fault}", path.display()))
}

fn of_upper(fault: Spoilt) -> Failure {
    match fault {
        Spoilt::Stopped => Failure::new(fault.code(), text(fault)),
        _ => refused(fault),
    }
}

fn of_layer(layer: &Digest) -> impl FnOnce(Spoilt) -> Failure {
    move |fault| {
        let failure = of_upper(fault);
        Failure { message: format!("layer {layer}: {}", failure.message), ..failure }
    }
}

impl Host {
    /// Makes a backup at `dest`, which nothing may have the name of. Writers go on meanwhile.
    pub fn backup(&self, by: &str, dest: &Path, keys: bool) -> Result<BackupView, Failure> {
        if self.paths.are_own(dest) {
            let why = format!("{} is inside the agent's own directories", dest.display());
            return Err(Failure::new(Code::BadRequest, why + ": choose another"));
        }
        // Layers that the copy names stay until they are copied, and there is one backup at a time.
        let _keeping = self.keeping();
        if dest.symlink_metadata().is_ok() {
            let why = format!("{} exists already and is left alone", dest.display());
            return Err(Failure::new(Code::DestinationExists, why + ": choose another name"));
        }
        let mut name = dest.as_os_str().to_owned();
        name.push(".partial");
        let partial = PathBuf::from(name);
        // Who took a copy, and whether the keys were in it, is in the copy too.
        let entry = Draft {
            kind: "backup".to_owned(),
            workspace: None,
            session: None,
            generation: None,
            actor: by.to_owned(),
            detail: serde_json::json!({ "dest": PathText::of(dest), "keys": keys }),
        };
        let journal = Journal { sessions: vec![], entries: vec![entry] };
        self.store.record(&journal, Durability::Full).map_err(super::handle::unavailable)?;
        failpoint::fails("agent.backup.before")
            .map_err(std::io::Error::from)
            .map_err(at("make", &partial))?;
        // What a killed agent left of an earlier one.
        remove::remove_scratch(&partial).map_err(of_upper)?;
        std::fs::DirBuilder::new().mode(0o700).create(&partial).map_err(at("make", &partial))?;
        let made = self.backup_into(&partial, keys).and_then(|note| {
            failpoint::fails("agent.backup.rename.before")
                .and_then(|()| {
                    rustix::fs::renameat_with(CWD, &partial, CWD, dest, RenameFlags::NOREPLACE)
                })
                .map_err(std::io::Error::from)
                .and_then(|()| sync_dir(dest.parent().unwrap_or(Path::new("/"))))
                .map_err(at("rename to", dest))?;
            Ok(note)
        });
        if made.is_err() {
            // The first error is the one to tell; the next backup takes away what stays.
            let _ = remove::remove_scratch(&partial);
        }
        failpoint::hit("agent.backup.after");
        let view = made?.view(dest);
        tracing::info!("backup {}: {} layer(s), {} bytes", dest.display(), view.layers, view.bytes);
        Ok(view)
    }

    fn backup_into(&self, dir: &Path, keys: bool) -> Result<Note, Failure> {
        let stop = || self.stopping();
        let copied = self.store.copy_into(dir, keys).map_err(refused)?;
        let layers = LayerStore::open(&dir.join(LAYERS)).map_err(of_upper)?;
        let mut bytes = 0;
        for layer in &copied.layers {
            bytes += layers
                .copy_from(&self.layers, *layer, &stop)
                .map_err(of_layer(layer))?
                .size_compressed;
        }
        let note = Note { time: jiff::Timestamp::now().to_string(), bytes, copied };
        let (path, encoded) = (dir.join(NOTE), serde_json::to_vec_pretty(&note));
        let encoded = encoded.map_err(refused)?;
        let mut options = std::fs::OpenOptions::new();
        let made = options.create_new(true).write(true).mode(0o600).open(&path);
        made.and_then(|mut file| {
            std::io::Write::write_all(&mut file, &encoded)?;
            file.sync_all()?;
            sync_dir(dir)
        })
        .map_err(at("write", &path))?;
        Ok(note)
    }
}

fn sync_dir(dir: &Path) -> std::io::Result<()> {
    std::fs::File::open(dir)?.sync_all()
}

/// Reads a backup whole: the note, the database, every layer that it names.
fn read(from: &Path, stop: Stop<'_>) -> Result<Note, Failure> {
    let path = from.join(NOTE);
    let bytes = std::fs::read(&path).map_err(|fault| match fault.kind() {
        std::io::ErrorKind::NotFound => {
            let why = format!("{} is not there: {} is no whole backup", NOTE, from.display());
            Failure::new(Code::NotFound, why)
        }
        _ => at("read", &path)(fault),
    })?;
    let bad = |why: String| Failure::new(Code::BackupRefused, format!("{}: {why}", path.display()));
    let note: Note =
        serde_json::from_slice(&bytes).map_err(|e| bad(format!("it is no such note: {e}")))?;
    let found = Copied::read(from).map_err(refused)?;
    if found.database != note.copied.database {
        let (is, said) = (found.database, note.copied.database);
        return Err(bad(format!("the database beside it has digest {is}, not {said}")));
    }
    if found != note.copied {
        return Err(bad("it does not say what is in the backup".to_owned()));
    }
    let layers = from.join(LAYERS);
    if !found.layers.is_empty() && !layers.exists() {
        return Err(bad(format!("{} is not there", layers.display())));
    }
    for layer in &found.layers {
        LayerStore::open(&layers)
            .and_then(|all| all.check(*layer, stop))
            .map_err(of_layer(layer))?;
    }
    Ok(note)
}

/// Puts a backup in the place of the database that `config` names, and the layers that are missing
/// beside it. No agent may run. No generation goes down: the next start compares what came back with
/// the marks and anchors that are there.
pub fn restore(config: &Config, from: &Path) -> Result<RestoredView, Failure> {
    let paths = super::paths::of_store(config);
    let never = || false;
    let note = read(from, &never)?;
    let vacant = Vacant::take(&paths).map_err(|fault| match &fault {
        Fault::Locked { .. } => Failure::new(Code::Busy, text(fault)),
        _ => refused(fault),
    })?;
    let layers = LayerStore::open(&paths.state.join(LAYERS)).map_err(of_upper)?;
    let there = LayerStore::open(&from.join(LAYERS)).map_err(of_upper)?;
    let mut layers_added = 0;
    for layer in &note.copied.layers {
        if matches!(layers.info(*layer), Err(Spoilt::NoLayer(_))) {
            layers.copy_from(&there, *layer, &never).map_err(of_layer(layer))?;
            layers_added += 1;
        }
    }
    let done = vacant.restore(from, &note.copied).map_err(refused)?;
    Ok(RestoredView {
        backup: note.view(from),
        replaced: done.replaced.as_deref().map(PathText::of),
        layers_added,
        held: done.held,
    })
}
