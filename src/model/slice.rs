//! The name of a systemd slice: the cgroup of a session whose writer an engine with the systemd
//! cgroup driver starts.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A name that is no slice's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not the name of a slice; write for instance overfence-notes.slice, without a path"
)]
pub struct InvalidSlice(String);

/// The name of a slice, such as `overfence-notes.slice`; not the root's.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Slice(String);

impl Slice {
    /// Its cgroup, relative to the cgroup2 root: each part before a dash is a slice above it
    /// (systemd.slice(5)).
    pub fn path(&self) -> PathBuf {
        let stem = self.stem();
        let ends = stem.match_indices('-').map(|(at, _)| at).chain([stem.len()]);
        ends.map(|end| format!("{}.slice", &stem[..end])).collect()
    }

    /// Whether one is the other, or above it.
    pub fn overlaps(&self, other: &Self) -> bool {
        let (own, other) = (self.path(), other.path());
        own.starts_with(&other) || other.starts_with(&own)
    }

    fn stem(&self) -> &str {
        self.0.strip_suffix(".slice").unwrap_or(&self.0)
    }
}

impl FromStr for Slice {
    type Err = InvalidSlice;

    fn from_str(text: &str) -> Result<Self, InvalidSlice> {
        let slice = Self(text.to_owned());
        let stem = slice.stem();
        let good = |part: &str| {
            let known = |c: char| c.is_ascii_alphanumeric() || "_.:\\".contains(c);
            !part.is_empty() && part.chars().all(known)
        };
        // As long as systemd takes a unit's name.
        let fits = text.len() < 256 && text.len() > stem.len();
        match fits && !stem.starts_with('.') && stem.split('-').all(good) {
            true => Ok(slice),
            false => Err(InvalidSlice(text.to_owned())),
        }
    }
}

impl TryFrom<String> for Slice {
    type Error = InvalidSlice;

    fn try_from(text: String) -> Result<Self, InvalidSlice> {
        text.parse()
    }
}

impl From<Slice> for String {
    fn from(slice: Slice) -> Self {
        slice.0
    }
}

impl fmt::Display for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn each_dash_is_a_slice_above() {
        for (name, path) in [
            ("a.slice", "a.slice"),
            ("a-b.slice", "a.slice/a-b.slice"),
            (r"a-b\x2dc-d.1.slice", r"a.slice/a-b\x2dc.slice/a-b\x2dc-d.1.slice"),
        ] {
            let slice: Slice = name.parse().unwrap();
            assert_eq!((slice.path().as_path(), slice.to_string()), (Path::new(path), name.into()));
        }
    }

    #[test]
    fn slices_overlap_with_those_above_and_below_and_not_beside() {
        let slice = |name: &str| -> Slice { name.parse().unwrap() };
        for (a, b, overlap) in [
            ("a.slice", "a.slice", true),
            ("a-b.slice", "a.slice", true),
            ("a.slice", "a-b-c.slice", true),
            ("a-b.slice", "a-c.slice", false),
            ("a-b.slice", "a-bc.slice", false),
        ] {
            assert_eq!(slice(a).overlaps(&slice(b)), overlap, "{a} {b}");
        }
    }

    #[test]
    fn what_is_no_slice_is_refused() {
        let long = format!("{}.slice", "a".repeat(250));
        for bad in [
            "",
            ".slice",
            "-.slice",
            "a",
            "a.service",
            "a-.slice",
            "-a.slice",
            "a--b.slice",
            "a/b.slice",
            "../a.slice",
            "..slice",
            "a b.slice",
            "a.slice/",
            &long,
        ] {
            assert!(bad.parse::<Slice>().is_err(), "{bad:?} was taken");
        }
    }
}
