//! Time in rules. Only `CLOCK_BOOTTIME` nanoseconds together with the boot id are ever compared:
//! it runs on in suspend, and an instant of another boot is simply over. Wall-clock time is shown
//! to people and never decides.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ids::BootId;

/// Nanoseconds on `CLOCK_BOOTTIME`.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct BootNs(pub u64);

impl BootNs {
    /// The instant `span` later; stops at the end of the number range.
    pub fn plus(self, span: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// The instant `span` earlier; stops at the boot.
    pub fn minus(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// Time from `earlier` to here; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// An instant that can be stored: it says of which boot it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BootInstant {
    /// The boot.
    pub boot: BootId,
    /// Nanoseconds in it.
    pub ns: BootNs,
}

impl BootInstant {
    /// Whether this instant has passed at `now`. An instant of another boot has.
    pub fn passed(&self, now: &BootInstant) -> bool {
        self.boot != now.boot || now.ns >= self.ns
    }
}

impl fmt::Display for BootInstant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:09}@{}", self.ns.0 / 1_000_000_000, self.ns.0 % 1_000_000_000, self.boot)
    }
}

/// Serialises a [`Duration`] as whole milliseconds; fields that use it end in `_ms`.
pub mod millis {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    /// Writes milliseconds.
    pub fn serialize<S: Serializer>(span: &Duration, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_u64(u64::try_from(span.as_millis()).unwrap_or(u64::MAX))
    }

    /// Reads milliseconds.
    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Duration, D::Error> {
        u64::deserialize(d).map(Duration::from_millis)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    #[test]
    fn an_instant_of_another_boot_has_passed() {
        let (a, b) = (BootId(Uuid::from_u128(1)), BootId(Uuid::from_u128(2)));
        let then = BootInstant { boot: a, ns: BootNs(100) };
        assert!(!then.passed(&BootInstant { boot: a, ns: BootNs(99) }));
        assert!(then.passed(&BootInstant { boot: a, ns: BootNs(100) }));
        assert!(then.passed(&BootInstant { boot: b, ns: BootNs(0) }));
    }
}
