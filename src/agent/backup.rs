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
//! A layer that is damaged on the host, or missing, is left out: the note names it, and so does whoever
//! restores it.
//!
//! Not in it: high-water marks and anchors, which notice that an old database came back; uncommitted
//! bytes; bundles.

use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags};
use serde::{Deserialize, Serialize};

use super::effects::text;
use super::failure::{Caller, Failure};
use super::host::Host;
use crate::config::Config;
use crate::failpoint;
use crate::kernel::clock;
use crate::model::code::Code;
use crate::model::head::Digest;
use crate::model::journal::{Draft, Journal};
use crate::model::view::{BackupView, LeftOut, PathText, RestoredView};
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
    /// Of the layers that the copy names, those that are not in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    left_out: Vec<LeftOut>,
}

impl Note {
    /// The layers that are in it.
    fn layers(&self) -> impl Iterator<Item = &Digest> {
        self.copied.layers.iter().filter(|layer| self.lacks(**layer).is_none())
    }

    fn lacks(&self, layer: Digest) -> Option<&LeftOut> {
        self.left_out.iter().find(|one| one.layer == layer)
    }

    fn view(self, path: &Path) -> BackupView {
        BackupView {
            path: PathText::of(path),
            host: self.copied.host,
            time: self.time,
            entries: self.copied.entries,
            database: self.copied.database,
            layers: (self.copied.layers.len() - self.left_out.len()) as u64,
            bytes: self.bytes,
            keys: self.copied.keys,
            left_out: self.left_out,
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
        let (mut bytes, mut left_out) = (0, Vec::new());
        for layer in &copied.layers {
            match layers.copy_from(&self.layers, *layer, &stop) {
                Ok(info) => bytes += info.size_compressed,
                Err(fault) => left_out.push(self.spoilt(*layer, fault)?),
            }
        }
        let note = Note { time: jiff::Timestamp::now().to_string(), bytes, copied, left_out };
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

impl Host {
    /// A layer that could not be copied: if it is not whole here it is left out, else the copy failed.
    fn spoilt(&self, layer: Digest, fault: Spoilt) -> Result<LeftOut, Failure> {
        if matches!(fault, Spoilt::Stopped) {
            return Err(of_upper(fault));
        }
        match self.layers.check(layer, &|| self.stopping()) {
            Ok(_) => Err(of_layer(&layer)(fault)),
            Err(found @ (Spoilt::Damaged { .. } | Spoilt::NoLayer(_))) => {
                let why = match &found {
                    Spoilt::Damaged { why, .. } => why.clone(),
                    _ => "it is not in the layer store".to_owned(),
                };
                self.of_layers(found);
                tracing::warn!("the backup lacks layer {layer}: {why}");
                Ok(LeftOut { layer, why })
            }
            Err(found) => Err(of_layer(&layer)(found)),
        }
    }
}

fn sync_dir(dir: &Path) -> std::io::Result<()> {
    std::fs::File::open(dir)?.sync_all()
}

/// Refuses what is no file and no directory in a backup: to open a fifo is to wait for ever.
fn refuse_odd(dir: &Path) -> Result<(), Failure> {
    for entry in std::fs::read_dir(dir).map_err(at("list", dir))? {
        let entry = entry.map_err(at("list", dir))?;
        let path = entry.path();
        let kind = entry.file_type().map_err(at("look at", &path))?;
        if kind.is_dir() {
            refuse_odd(&path)?;
        } else if !kind.is_file() {
            let why = format!("{} is neither a file nor a directory", path.display());
            return Err(Failure::new(Code::BackupRefused, why));
        }
    }
    Ok(())
}

/// Reads a backup whole: the note, the database, every layer that it names.
fn read(from: &Path, stop: Stop<'_>) -> Result<Note, Failure> {
    let path = from.join(NOTE);
    if path.exists() {
        refuse_odd(from)?;
    }
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
    if let Some(strange) = note.left_out.iter().find(|one| !found.layers.contains(&one.layer)) {
        return Err(bad(format!("layer {}, which it lacks, is none of its own", strange.layer)));
    }
    let layers = from.join(LAYERS);
    if note.layers().next().is_some() && !layers.exists() {
        return Err(bad(format!("{} is not there", layers.display())));
    }
    for layer in note.layers() {
        LayerStore::open(&layers)
            .and_then(|all| all.check(*layer, stop))
            .map_err(of_layer(layer))?;
    }
    Ok(note)
}

/// Puts a backup in the place of the database that `config` names, and the layers that are missing
/// beside it. No agent may run. No generation goes down: the next start compares what came back with
/// the marks and anchors that are there. Who did it is the last entry of its evidence.
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
    let (mut layers_added, mut missing) = (0, Vec::new());
    for layer in &note.copied.layers {
        if let Some(left_out) = note.lacks(*layer) {
            if layers.check(*layer, &never).is_err() {
                missing.push(left_out.clone());
            }
        } else if matches!(layers.info(*layer), Err(Spoilt::NoLayer(_))) {
            layers.copy_from(&there, *layer, &never).map_err(of_layer(layer))?;
            layers_added += 1;
        }
    }
    let told = Draft {
        kind: "restore".to_owned(),
        workspace: None,
        session: None,
        generation: None,
        actor: Caller::own().to_string(),
        detail: serde_json::json!({
            "from": PathText::of(from),
            "taken_at": note.time,
            "host": note.copied.host,
            "entries": note.copied.entries,
            "missing": missing.iter().map(|one| one.layer).collect::<Vec<_>>(),
        }),
    };
    let now = clock::instant().map_err(refused)?;
    let done = vacant.restore(from, &note.copied, &told, now).map_err(refused)?;
    Ok(RestoredView {
        backup: note.view(from),
        replaced: done.replaced.as_deref().map(PathText::of),
        layers_added,
        held: done.held,
        missing,
    })
}
