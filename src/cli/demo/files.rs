//! The checker's readers of files: the authority's database, a bundle, what is left of a session.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags, OptionalExtension as _};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::check::Look;

/// The authority's database, opened read-only.
pub(super) struct Database(Connection);

/// What it says of a workspace.
#[derive(Debug, PartialEq)]
pub(super) struct Row {
    /// The highest generation issued.
    pub(super) generation: u64,
    /// Publications so far.
    pub(super) version: u64,
    /// Layers of the head, lowest first.
    pub(super) head: Vec<String>,
    /// Who holds the last lease.
    pub(super) owner: String,
    /// Where that lease stands.
    pub(super) lease: String,
}

impl Database {
    /// Opens the file.
    pub(super) fn open(file: &Path) -> Result<Self, String> {
        Connection::open_with_flags(file, OpenFlags::SQLITE_OPEN_READ_ONLY)
            .and_then(|conn| conn.busy_timeout(std::time::Duration::from_secs(2)).map(|()| conn))
            .map(Self)
            .map_err(|e| format!("{}: {e}", file.display()))
    }

    /// Reads a workspace's record.
    pub(super) fn workspace(&self, id: &str) -> Result<Row, String> {
        let text: Option<String> = self
            .0
            .query_row("SELECT record FROM workspaces WHERE id = ?", [id], |row| row.get(0))
            .optional()
            .map_err(|e| e.to_string())?;
        let text = text.ok_or_else(|| format!("no row of workspace {id}"))?;
        let record: Value = serde_json::from_str(&text).map_err(|e| e.to_string())?;
        let at = |pointer: &str| {
            record.pointer(pointer).ok_or_else(|| format!("no {pointer} in {text}"))
        };
        let number = |pointer| {
            at(pointer)?.as_u64().ok_or_else(|| format!("{pointer} is no number in {text}"))
        };
        let word = |pointer| at(pointer).map(|v| v.as_str().unwrap_or_default().to_owned());
        let layers = at("/at/head")?.as_array().into_iter().flatten();
        Ok(Row {
            generation: number("/generation")?,
            version: number("/at/version")?,
            head: layers.filter_map(|layer| layer.as_str().map(str::to_owned)).collect(),
            owner: word("/lease/owner")?,
            lease: word("/lease/state")?,
        })
    }

    /// Whether a workspace stands as `wanted`.
    pub(super) fn is(&self, id: &str, wanted: impl FnOnce(&Row) -> bool) -> Look {
        let row = self.workspace(id)?;
        let top = row.head.last().map_or("empty", |layer| layer.get(..19).unwrap_or(layer));
        let seen = format!(
            "authority file: generation {}, lease {} of {}, version {}, head {top}",
            row.generation, row.lease, row.owner, row.version
        );
        Ok((wanted(&row), seen))
    }

    /// How many evidence entries there are.
    pub(super) fn evidence(&self) -> Result<u64, String> {
        self.0
            .query_row("SELECT count(*) FROM evidence", [], |row| row.get::<_, i64>(0))
            .map_err(|e| e.to_string())
            .and_then(|n| u64::try_from(n).map_err(|e| e.to_string()))
    }
}

/// A regular file of a bundle's one layer, found through index and manifest, each blob compared
/// with the digest it is named by.
pub(super) fn in_bundle(bundle: &Path, name: &str) -> Result<Vec<u8>, String> {
    let index = fs::read(bundle.join("index.json")).map_err(|e| format!("index.json: {e}"))?;
    let index: Value = serde_json::from_slice(&index).map_err(|e| e.to_string())?;
    let manifest = blob(bundle, &index, "/manifests/0/digest")?;
    let manifest: Value = serde_json::from_slice(&manifest).map_err(|e| e.to_string())?;
    in_layer(blob(bundle, &manifest, "/layers/0/digest")?.as_slice(), name)
}

fn blob(bundle: &Path, from: &Value, pointer: &str) -> Result<Vec<u8>, String> {
    let digest = from.pointer(pointer).and_then(Value::as_str).ok_or(format!("no {pointer}"))?;
    let hex = digest.strip_prefix("sha256:").ok_or(format!("{digest} is no sha256"))?;
    let bytes = fs::read(bundle.join("blobs/sha256").join(hex))
        .map_err(|e| format!("blob {digest}: {e}"))?;
    match hex::encode(Sha256::digest(&bytes)) == hex {
        true => Ok(bytes),
        false => Err(format!("blob {digest} has other bytes than its name says")),
    }
}

/// A regular file of a compressed layer.
pub(super) fn in_layer(compressed: impl std::io::Read, name: &str) -> Result<Vec<u8>, String> {
    let plain = zstd::Decoder::new(compressed).map_err(|e| format!("zstd: {e}"))?;
    let mut archive = tar::Archive::new(plain);
    for entry in archive.entries().map_err(|e| format!("tar: {e}"))? {
        let mut entry = entry.map_err(|e| format!("tar: {e}"))?;
        let path = entry.path().map_err(|e| format!("tar: {e}"))?.into_owned();
        let same = path.strip_prefix("./").unwrap_or(&path) == Path::new(name);
        if same && entry.header().entry_type().is_file() {
            let mut bytes = vec![];
            entry.read_to_end(&mut bytes).map_err(|e| format!("tar: {e}"))?;
            return Ok(bytes);
        }
    }
    Err(format!("no file {name} in the layer"))
}

/// Whether a bundle's layer holds a file with exactly these bytes.
pub(super) fn bundle_holds(bundle: &Path, name: &str, bytes: &str) -> Look {
    let found = in_bundle(bundle, name)?;
    let shown = String::from_utf8_lossy(&found).into_owned();
    Ok((found == bytes.as_bytes(), format!("{name} in the bundle's layer: {shown:?}")))
}

/// A layer of the store is the tar that its name says, and has this file and not that one.
pub(super) fn layer_is(state: &Path, layer: &str, has: &str, lacks: &str) -> Look {
    let hex = layer.strip_prefix("sha256:").ok_or(format!("{layer} is no sha256"))?;
    let file = state.join("layers").join(hex).join("layer.tar.zst");
    let open = || File::open(&file).map_err(|e| format!("{}: {e}", file.display()));
    let plain = zstd::decode_all(open()?).map_err(|e| format!("zstd: {e}"))?;
    let named = hex::encode(Sha256::digest(&plain)) == hex;
    let (has_it, lacks_it) = (in_layer(open()?, has).is_ok(), in_layer(open()?, lacks).is_err());
    let seen = format!(
        "digest {}, {has} {}, {lacks} {}",
        if named { "as named" } else { "WRONG" },
        if has_it { "in it" } else { "MISSING" },
        if lacks_it { "not in it" } else { "IN IT" },
    );
    Ok((named && has_it && lacks_it, seen))
}

/// Whether a session has left nothing: no directory, no cgroup, no mount in any process's
/// namespace, none of the processes that ran in it.
pub(super) fn nothing_left(
    dir: &Path,
    cgroup: &Path,
    session: &str,
    ran: &BTreeMap<u32, u64>,
) -> Look {
    let mut left = vec![];
    for place in ["state/sessions", "run/sessions"] {
        let path = dir.join(place).join(session);
        if path.symlink_metadata().is_ok() {
            left.push(path.display().to_string());
        }
    }
    let trash: Vec<PathBuf> = fs::read_dir(dir.join("state/trash"))
        .map_err(|e| format!("trash: {e}"))?
        .flatten()
        .map(|entry| entry.path())
        .collect();
    left.extend(trash.iter().map(|path| path.display().to_string()));
    if cgroup.exists() {
        left.push(cgroup.display().to_string());
    }
    for entry in fs::read_dir("/proc").map_err(|e| e.to_string())?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Ok(pid) = name.parse::<u32>() else { continue };
        if ran.get(&pid).is_some_and(|begun| super::check::started(pid) == Some(*begun)) {
            let part = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
            let (command, cgroup) = (part("comm"), part("cgroup"));
            let cgroup = cgroup.lines().last().unwrap_or_default();
            left.push(format!("process {pid} ({}) in {cgroup}", command.trim()));
        }
        // A process that ends meanwhile has no mounts any more.
        let mounts = fs::read_to_string(entry.path().join("mountinfo")).unwrap_or_default();
        if let Some(line) = mounts.lines().find(|line| line.contains(session)) {
            left.push(format!("a mount of process {pid}: {line}"));
        }
    }
    let seen = match left.is_empty() {
        true => format!("no directory, cgroup, mount, nor any of its {} processes", ran.len()),
        false => left.join("; "),
    };
    Ok((left.is_empty(), seen))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_read_by_name_and_its_lack_is_seen() {
        let mut tar = tar::Builder::new(vec![]);
        let mut header = tar::Header::new_gnu();
        header.set_size(2);
        header.set_cksum();
        tar.append_data(&mut header, "a.txt", &b"x\n"[..]).unwrap();
        let layer = zstd::encode_all(tar.into_inner().unwrap().as_slice(), 0).unwrap();
        assert_eq!(in_layer(layer.as_slice(), "a.txt").unwrap(), b"x\n");
        assert!(in_layer(layer.as_slice(), "b.txt").is_err());
        assert!(in_layer(&b"no layer"[..], "a.txt").is_err());
    }

    #[test]
    fn the_authority_is_read_by_own_sql() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("x.db");
        let conn = Connection::open(&file).unwrap();
        conn.execute_batch(
            r#"CREATE TABLE workspaces (id TEXT, record TEXT);
            INSERT INTO workspaces VALUES ('w', '{"generation":2,"at":{"version":1,
            "head":["sha256:aa"]},"lease":{"owner":"b","state":"ACTIVE"}}')"#,
        )
        .unwrap();
        let row = Database::open(&file).unwrap().workspace("w").unwrap();
        assert_eq!((row.generation, row.version, row.owner.as_str()), (2, 1, "b"));
        assert_eq!((row.head, row.lease.as_str()), (vec!["sha256:aa".to_owned()], "ACTIVE"));
        assert!(Database::open(&file).unwrap().workspace("v").is_err());
    }
}
