//! What a session's upper lies in, and how much of a host sessions may take.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::limits::Size;

/// What an upper lies in, as it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UpperKind {
    /// A directory on the state directory's file system.
    #[default]
    Directory,
    /// A file system of its own, in a sparse file.
    Image,
}

/// What an upper lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(tag = "in", rename_all = "lowercase")]
pub enum Backing {
    /// See [`UpperKind::Directory`].
    #[default]
    Directory,
    /// See [`UpperKind::Image`].
    Image {
        /// What it holds at most, with the file system's own tables.
        size: Size,
    },
}

impl Backing {
    /// The size of the image, if there is one.
    pub const fn size(self) -> Option<Size> {
        match self {
            Self::Directory => None,
            Self::Image { size } => Some(size),
        }
    }
}

/// How much of a file system is to stay free: `10G`, or `5%` of it; 0 for no mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum MinFree {
    /// Bytes.
    Bytes(u64),
    /// Hundredths of the whole.
    Percent(u8),
}

/// A mark that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a mark; write a size, for instance 10G, a part, for instance 5%, or 0")]
pub struct InvalidMark(String);

impl MinFree {
    /// In bytes, of a file system of so many.
    pub fn of(self, total: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(part) => total / 100 * u64::from(part),
        }
    }
}

impl FromStr for MinFree {
    type Err = InvalidMark;
    fn from_str(text: &str) -> Result<Self, InvalidMark> {
        let fault = || InvalidMark(text.to_owned());
        if text == "0" {
            return Ok(Self::Bytes(0));
        }
        match text.strip_suffix('%') {
            Some(part) => match part.parse() {
                Ok(part @ 0..=99) => Ok(Self::Percent(part)),
                Ok(_) | Err(_) => Err(fault()),
            },
            None => text.parse().map(|size: Size| Self::Bytes(size.0)).map_err(|_| fault()),
        }
    }
}

impl fmt::Display for MinFree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(0) => f.write_str("0"),
            Self::Bytes(bytes) => write!(f, "{}", Size(*bytes)),
            Self::Percent(part) => write!(f, "{part}%"),
        }
    }
}

impl TryFrom<String> for MinFree {
    type Error = InvalidMark;
    fn try_from(text: String) -> Result<Self, InvalidMark> {
        text.parse()
    }
}

impl From<MinFree> for String {
    fn from(mark: MinFree) -> Self {
        mark.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_and_written_the_same() {
        for (text, of_1000) in [("0", 0), ("5%", 50), ("99%", 990), ("512", 512), ("1K", 1024)] {
            let mark: MinFree = text.parse().unwrap();
            assert_eq!((mark.to_string(), mark.of(1000)), (text.to_owned(), of_1000));
        }
        for text in ["", "%", "100%", "-1%", "5 %", "5.5%", "much", "1X"] {
            assert!(text.parse::<MinFree>().is_err(), "{text}");
        }
    }
}
