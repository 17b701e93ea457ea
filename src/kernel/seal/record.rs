//! The record beside a sealed upper: made durable before the first flag is set.

use std::collections::BTreeSet;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::super::{At as _, Error, Result};

/// What is known of an upper from before its seal.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    /// Files and directories, for the progress.
    pub(super) entries: u64,
    /// Inode numbers that had the flag.
    pub(super) own: BTreeSet<u64>,
    /// The seal was taken off.
    pub(super) ended: bool,
}

impl Record {
    /// `None` if there is none: then it was never sealed.
    pub(super) fn read(path: &Path) -> Result<Option<Self>> {
        let bytes = match std::fs::read(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            answer => answer.at("read", path)?,
        };
        serde_json::from_slice(&bytes).map(Some).map_err(|e| Error::Garbled {
            path: path.to_owned(),
            reason: format!("it is no record of a seal ({e})"),
        })
    }

    /// Whole or not at all, and durable.
    pub(super) fn write(&self, path: &Path) -> Result<()> {
        let new = path.with_extension("new");
        let text = serde_json::to_vec(self)
            .map_err(|e| Error::Garbled { path: path.to_owned(), reason: e.to_string() })?;
        std::fs::write(&new, text).at("write", &new)?;
        std::fs::File::open(&new).and_then(|file| file.sync_all()).at("fsync", &new)?;
        std::fs::rename(&new, path).at("rename into place", path)?;
        let above = path.parent().unwrap_or(Path::new("/"));
        std::fs::File::open(above).and_then(|dir| dir.sync_all()).at("fsync", above)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_written_or_refused() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("seal");
        assert_eq!(Record::read(&path).unwrap(), None);
        let record = Record { entries: 7, own: [3, u64::MAX].into(), ended: false };
        record.write(&path).unwrap();
        assert_eq!(Record::read(&path).unwrap(), Some(record));
        std::fs::write(&path, b"{\"entries\":7").unwrap();
        assert!(matches!(Record::read(&path), Err(Error::Garbled { .. })));
        assert_eq!(std::fs::read_dir(tmp.path()).unwrap().count(), 1);
    }
}
