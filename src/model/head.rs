//! What a workspace holds: an ordered list of layers, named by the digest of their uncompressed
//! tar (OCI "diff id"), lowest first. A new compressor changes no name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::ids::{InvalidId, Version};

/// A sha256 digest, written `sha256:` and 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The hexadecimal digits alone, as used in file names.
    pub fn hex(&self) -> String {
        hex::encode(self.0)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = InvalidId;
    fn from_str(s: &str) -> Result<Self, InvalidId> {
        let fault = |rule| InvalidId { kind: "digest", given: s.to_owned(), rule };
        let digits = s.strip_prefix("sha256:").ok_or_else(|| fault("it starts with `sha256:`"))?;
        if digits.bytes().any(|b| b.is_ascii_uppercase()) {
            return Err(fault("its digits are lower case"));
        }
        let mut raw = [0; 32];
        hex::decode_to_slice(digits, &mut raw)
            .map_err(|_| fault("64 hexadecimal digits follow `sha256:`"))?;
        Ok(Self(raw))
    }
}

impl TryFrom<String> for Digest {
    type Error = InvalidId;
    fn try_from(s: String) -> Result<Self, InvalidId> {
        s.parse()
    }
}

impl From<Digest> for String {
    fn from(d: Digest) -> String {
        d.to_string()
    }
}

/// The layers of a workspace, lowest first.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Head(pub Vec<Digest>);

impl Head {
    /// This head with one more layer on top.
    pub fn with(&self, layer: Digest) -> Self {
        let mut layers = self.0.clone();
        layers.push(layer);
        Self(layers)
    }
}

impl fmt::Display for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.last() {
            None => f.write_str("(empty)"),
            Some(top) => write!(f, "{} layer(s), top {top}", self.0.len()),
        }
    }
}

/// A head and the version that made it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct HeadAt {
    /// Publications so far.
    pub version: Version,
    /// The layers.
    pub head: Head,
}
