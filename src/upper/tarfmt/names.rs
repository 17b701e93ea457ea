//! How names go into an archive in which a name that begins with `.wh.` means a deletion.
//!
//! A file may be called so all the same. Its name is then escaped, so that no reader takes it for a
//! whiteout, and the true path stands in a record of our own (docs/adr/0009). A name that looks
//! escaped is escaped too: no two paths meet in one.

use std::borrow::Cow;

use sha2::{Digest as _, Sha256};

use super::super::{Error, Result};
use super::{MAX_NAME, MAX_PATH};

/// Names in a layer that start like this are whiteouts.
pub(super) const WHITEOUT: &[u8] = b".wh.";
/// The name that makes its directory opaque.
pub(super) const OPAQUE: &[u8] = b".wh..wh..opq";
/// What an escaped name begins with.
const ESCAPE: &[u8] = b".overfence-escaped";

/// The path as an archive has it; itself, unless a name in it has another meaning there.
pub(in crate::upper) fn escaped(path: &[u8]) -> Cow<'_, [u8]> {
    let special = |name: &[u8]| name.starts_with(WHITEOUT) || name.starts_with(ESCAPE);
    if !path.split(|b| *b == b'/').any(special) {
        return Cow::Borrowed(path);
    }
    let escape = |name: &[u8]| match name {
        name if !special(name) => name.to_vec(),
        name if ESCAPE.len() + name.len() <= MAX_NAME => [ESCAPE, name].concat(),
        // No file system takes the longer name: a digest stands for it.
        name => {
            let digest: String =
                Sha256::digest(name).iter().take(16).map(|b| format!("{b:02x}")).collect();
            [ESCAPE, b"-", digest.as_bytes()].concat()
        }
    };
    Cow::Owned(path.split(|b| *b == b'/').map(escape).collect::<Vec<_>>().join(&b'/'))
}

/// Puts something before the last component.
pub(super) fn prefixed(path: &[u8], prefix: &[u8]) -> Vec<u8> {
    let (dir, name) = path.split_at(path.iter().rposition(|b| *b == b'/').map_or(0, |at| at + 1));
    [dir, prefix, name].concat()
}

/// What a name in an archive says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// Itself.
    Plain,
    /// This path was deleted.
    Whiteout(Vec<u8>),
    /// This directory hides what lies below it.
    Opaque(Vec<u8>),
}

impl Meaning {
    /// Reads a path that [`inside`] has checked; refuses reserved names that mean nothing.
    pub(super) fn of(path: &[u8]) -> Result<Self> {
        let refuse = |why: &str| Err(Error::hostile(path, why));
        let (dir, name) = match path.iter().rposition(|b| *b == b'/') {
            Some(at) => (&path[..at], &path[at + 1..]),
            None => (&b""[..], path),
        };
        if dir.split(|b| *b == b'/').any(|part| part.starts_with(WHITEOUT)) {
            return refuse("it lies below a whiteout");
        }
        let Some(gone) = name.strip_prefix(WHITEOUT) else { return Ok(Self::Plain) };
        match gone {
            _ if name == OPAQUE && dir.is_empty() => {
                refuse("the top directory cannot hide what lies below it")
            }
            _ if name == OPAQUE => Ok(Self::Opaque(dir.to_vec())),
            b"" | b"." | b".." => refuse("it deletes no name"),
            _ if gone.starts_with(WHITEOUT) => refuse("its name is reserved"),
            _ if dir.is_empty() => Ok(Self::Whiteout(gone.to_vec())),
            _ => Ok(Self::Whiteout([dir, b"/", gone].concat())),
        }
    }
}

/// The path that a record of ours gives for one that is escaped.
pub(super) fn restored(archived: Vec<u8>, told: Option<&[u8]>) -> Result<Vec<u8>> {
    let Some(told) = told else { return Ok(archived) };
    let path = inside(told)?;
    match *escaped(&path) == archived {
        true => Ok(path),
        false => Err(Error::hostile(&archived, "its true path does not fit the escaped one")),
    }
}

/// Checks a path of an archive and drops `.` components and the trailing slash.
pub(super) fn inside(raw: &[u8]) -> Result<Vec<u8>> {
    let refuse = |why: &str| Err(Error::hostile(raw, why));
    if raw.is_empty() || raw.len() > MAX_PATH {
        return refuse("a path has 1 byte to 1 MiB");
    }
    if raw.starts_with(b"/") {
        return refuse("its path is absolute");
    }
    if raw.contains(&0) {
        return refuse("its path contains NUL");
    }
    let parts: Vec<&[u8]> =
        raw.split(|b| *b == b'/').filter(|part| !part.is_empty() && part != b".").collect();
    if parts.contains(&&b".."[..]) {
        return refuse("its path climbs with `..`");
    }
    // The mark of a deletion comes on top of the deleted name.
    let name = |part: &&[u8]| part.strip_prefix(WHITEOUT).unwrap_or(part).len();
    if parts.iter().any(|part| name(part) > MAX_NAME) {
        return refuse("a name in its path is longer than 255 bytes");
    }
    Ok(parts.join(&b'/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_another_meaning_are_escaped_and_no_two_meet() {
        let long = [WHITEOUT, &[b'x'; 251][..]].concat();
        let other = [WHITEOUT, &[b'x'; 250][..], b"y"].concat();
        let names: Vec<Vec<u8>> = [
            &b".wh.x"[..],
            b".wh.",
            b".wh..wh..opq",
            b".overfence-escaped",
            b".overfence-escaped.wh.x",
            b".overfence-escaped.overfence-escaped.wh.x",
            b"x",
            b"wh.x",
            &long,
            &other,
            &escaped(&long),
        ]
        .map(<[u8]>::to_vec)
        .to_vec();
        let all: Vec<Vec<u8>> = names.iter().map(|n| escaped(n).into_owned()).collect();
        for (name, escaped) in names.iter().zip(&all) {
            assert!(escaped.len() <= MAX_NAME && !escaped.starts_with(WHITEOUT));
            assert_eq!(Meaning::of(escaped).unwrap(), Meaning::Plain);
            assert_eq!(&restored(escaped.clone(), Some(name)).unwrap(), name);
        }
        let apart: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(apart.len(), names.len());
        assert_eq!(*escaped(b"a/.wh.b/c"), *b"a/.overfence-escaped.wh.b/c");
    }

    #[test]
    fn a_true_path_that_does_not_fit_is_refused() {
        for (archived, told) in [
            (&b"a"[..], &b"b"[..]),
            (b".overfence-escaped.wh.a", b".wh.b"),
            (b".overfence-escaped.wh.a", b"../.wh.a"),
            (b".overfence-escaped.wh.a", b"/.wh.a"),
            (b"a", b"../a"),
        ] {
            assert!(restored(archived.to_vec(), Some(told)).is_err());
        }
    }
}
