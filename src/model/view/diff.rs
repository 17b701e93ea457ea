//! What a delta changes, as the API and the command line show it: one row a name, streamed.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{PathText, Problem};

/// What became of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// The base has nothing of this name.
    Added,
    /// Its content is another; of a directory: it hides what the base has in it.
    Modified,
    /// Mode, owner, attributes or time alone.
    Metadata,
    /// It is another kind of file than in the base.
    Type,
    /// It is gone.
    Deleted,
    /// Nothing of it changed: it is there because something below it did, or it was written back as
    /// it was. Of a directory, its time does not count.
    Touched,
    /// Added or changed: the bundle, of an older build or another tool's, does not say which.
    Unknown,
}

/// Kinds of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symlink.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A socket; a layer does not carry it.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

/// How it came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Mark {
    /// A directory that hides what the base has in it: it was removed and made anew.
    Opaque,
    /// Another file took the name: written anew, or renamed over it.
    Replaced,
    /// The base's file has other names, which still show the old file.
    LinkBroken,
}

/// What differs from the base.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Aspect {
    /// Bytes, a symlink's target, a device's number.
    Content,
    /// Permission bits.
    Mode,
    /// User or group.
    Owner,
    /// Extended attributes, ACLs and capabilities among them.
    Attributes,
    /// Time of the last modification.
    Time,
}

/// What is told of a name beside its path and size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Told {
    /// What became of it.
    pub change: Change,
    /// What it is now; absent when it is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<FileKind>,
    /// What it is in the base; absent when that has none, or is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub was: Option<FileKind>,
    /// How it came about.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub marks: Vec<Mark>,
    /// What differs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub differs: Vec<Aspect>,
    /// How many names the base has below this one that are not there any more.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub hides: u64,
}

// The signature is serde's.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// One changed name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiffRow {
    /// Path from the workspace's top, without leading slash; bytes that are not UTF-8 are written
    /// `\xNN` and a backslash `\\`. Empty for the top itself.
    pub path: PathText,
    /// Bytes in it now, of a regular file.
    pub bytes: u64,
    /// The rest.
    #[serde(flatten)]
    pub told: Told,
}

/// The end of a diff: what is not followed by it is not whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiffSummary {
    /// Rows with `added`.
    pub added: u64,
    /// Rows with `modified`.
    pub modified: u64,
    /// Rows with `metadata`.
    pub metadata: u64,
    /// Rows with `type`.
    #[serde(rename = "type")]
    pub kind: u64,
    /// Rows with `deleted`.
    pub deleted: u64,
    /// Rows with `touched`.
    pub touched: u64,
    /// Rows with `unknown`.
    pub unknown: u64,
    /// Names of the base that are gone without a row of their own: below deleted, replaced and
    /// opaque directories.
    pub hidden: u64,
    /// Bytes in added and changed files.
    pub bytes: u64,
}

impl DiffSummary {
    /// Counts a row.
    pub fn count(&mut self, row: &DiffRow) {
        let counter = match row.told.change {
            Change::Added => &mut self.added,
            Change::Modified => &mut self.modified,
            Change::Metadata => &mut self.metadata,
            Change::Type => &mut self.kind,
            Change::Deleted => &mut self.deleted,
            Change::Touched => &mut self.touched,
            Change::Unknown => &mut self.unknown,
        };
        *counter += 1;
        self.hidden = self.hidden.saturating_add(row.told.hides);
        self.bytes = self.bytes.saturating_add(row.bytes);
    }
}

/// A line of the stream: rows, then the summary; or a problem in place of what is left.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum DiffLine {
    /// A changed name.
    Row(DiffRow),
    /// The end.
    End {
        /// All rows, counted.
        summary: DiffSummary,
    },
    /// It broke off here.
    Broken {
        /// Why.
        problem: Problem,
    },
}
