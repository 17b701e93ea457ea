//! Identities. Each is a type of its own so that a lease is never passed where a generation is
//! meant; the three names that people confuse (lease, generation, task) cannot be folded together.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Why a string is not an identity of the wanted kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind} {given:?} is not valid: {rule}")]
pub struct InvalidId {
    /// What was expected, for instance `workspace id`.
    pub kind: &'static str,
    /// What was given.
    pub given: String,
    /// The rule it breaks.
    pub rule: &'static str,
}

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal, $kind:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Uuid);

        impl $name {
            /// Makes a fresh id; ids of one host sort by creation time (UUID version 7).
            pub fn fresh() -> Self {
                Self(Uuid::now_v7())
            }

            /// Builds an id from a number, for models and tests that need determinism.
            pub const fn from_u128(n: u128) -> Self {
                Self(Uuid::from_u128(n))
            }

            /// The number that it is.
            pub const fn as_u128(self) -> u128 {
                self.0.as_u128()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0.simple())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;
            fn from_str(s: &str) -> Result<Self, InvalidId> {
                let fault = |rule| InvalidId { kind: $kind, given: s.to_owned(), rule };
                let hex = s
                    .strip_prefix($prefix)
                    .ok_or_else(|| fault(concat!("it starts with `", $prefix, "`")))?;
                if hex.len() != 32 || hex.bytes().any(|b| !matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
                    return Err(fault("32 lower-case hexadecimal digits follow the prefix"));
                }
                Uuid::try_parse(hex)
                    .map(Self)
                    .map_err(|_| fault("32 lower-case hexadecimal digits follow the prefix"))
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;
            fn try_from(s: String) -> Result<Self, InvalidId> {
                s.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.to_string()
            }
        }
    };
}

uuid_id!(
    /// One mount session.
    SessionId, "s-", "session id"
);
uuid_id!(
    /// One lease. Never a generation and never an external task id.
    LeaseId, "l-", "lease id"
);
uuid_id!(
    /// One publication attempt; the same key always gets the same answer.
    PublicationKey, "p-", "publication key"
);
impl PublicationKey {
    /// The lowest key that can have been made at a time, milliseconds since 1970: keys sort by when
    /// they were made.
    pub const fn first_at(ms: u64) -> Self {
        Self(Uuid::from_u128((ms as u128) << 80))
    }
}

uuid_id!(
    /// The host on which sessions are mounted; made once and kept in the state directory.
    HostId, "h-", "host id"
);

macro_rules! name_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $max:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The name as given.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;
            fn from_str(s: &str) -> Result<Self, InvalidId> {
                let fault = |rule| InvalidId { kind: $kind, given: s.to_owned(), rule };
                if s.is_empty() || s.len() > $max {
                    return Err(fault(concat!("it has 1 to ", $max, " characters")));
                }
                if !s.starts_with(|c: char| c.is_ascii_alphanumeric()) {
                    return Err(fault("it starts with a letter or a digit"));
                }
                if !s.chars().all(|c| c.is_ascii_alphanumeric() || "._-/@+".contains(c)) {
                    return Err(fault("only letters, digits and . _ - / @ + are allowed"));
                }
                if s.split('/').any(|part| part.is_empty() || part == "." || part == "..") {
                    return Err(fault("no part between slashes is empty, `.` or `..`"));
                }
                Ok(Self(s.to_owned()))
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;
            fn try_from(s: String) -> Result<Self, InvalidId> {
                s.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }
    };
}

name_id!(
    /// A workspace: what is written.
    WorkspaceId, "workspace id", 128
);
name_id!(
    /// What is to happen outside, once: an external task. Never a lease or a generation.
    TaskId, "task", 128
);
name_id!(
    /// The key that an external request is sent with.
    RequestKey, "request key", 128
);
name_id!(
    /// Who asked for a lease, or who decided something. A claimed name: evidence keeps the
    /// peer's uid beside it.
    Owner, "owner", 128
);

/// The fencing token: strictly increasing per workspace, a new one at every acquisition, never
/// reused, also not after delete and re-create.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Generation(pub u64);

impl Generation {
    /// No generation was ever issued.
    pub const NONE: Self = Self(0);

    /// The highest that somebody may say was issued: they are issued one by one, and those that come
    /// after it have to be there for ever. Exact in JSON everywhere.
    pub const CREDIBLE: Self = Self(1 << 52);

    /// The next one, or `None` at the end of the number range, where a workspace is held rather
    /// than wrapped.
    pub fn next(self) -> Option<Self> {
        self.0.checked_add(1).map(Self)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// How many publications a workspace has seen.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Version(pub u64);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The kernel's random id of one boot (`/proc/sys/kernel/random/boot_id`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BootId(pub Uuid);

impl fmt::Display for BootId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_round_trip_and_refuse_what_is_not_theirs() {
        let id = SessionId::fresh();
        assert_eq!(id.to_string().parse::<SessionId>(), Ok(id));
        assert!(id.to_string().parse::<LeaseId>().is_err());
        for bad in ["", "s-", "s-12", "s-ZZ345678901234567890123456789012", "../../etc"] {
            assert!(bad.parse::<SessionId>().is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn workspace_names_cannot_climb_or_hide() {
        for good in ["a", "team/repo", "x.y-z_1", "user@host+1"] {
            assert!(good.parse::<WorkspaceId>().is_ok(), "{good:?} was refused");
        }
        for bad in ["", "/a", "a//b", "a/../b", "a/.", "-a", "a b", "a\n", "ä", &"x".repeat(129)] {
            assert!(bad.parse::<WorkspaceId>().is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn generations_stop_instead_of_wrapping() {
        assert_eq!(Generation(1).next(), Some(Generation(2)));
        assert_eq!(Generation(u64::MAX).next(), None);
    }
}
