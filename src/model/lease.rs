//! Leases: who may write now and until when.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ids::{Generation, HostId, LeaseId, Owner, SessionId};
use super::time::{BootInstant, BootNs, millis};

/// Where a lease stands. Only `ACTIVE` and `RELEASING` may publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum LeaseState {
    /// The holder may write and publish.
    Active,
    /// The session is closing: it may still publish.
    Releasing,
    /// Given back.
    Released,
    /// Ran out.
    Expired,
    /// Taken away by an operator or by a forced takeover.
    Revoked,
}

impl LeaseState {
    /// Whether the state itself lets the holder publish (the lease may still have run out).
    pub const fn may_publish(self) -> bool {
        matches!(self, Self::Active | Self::Releasing)
    }
}

/// Whose life the lease follows; never merely the agent's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HolderKind {
    /// The session's command: the session init answers for it while it lives and is not stopped.
    Process,
    /// Whoever calls `lease beat`, through the session socket or with the lease token.
    Beat,
}

/// One lease as the authority keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Lease {
    /// Its id.
    pub id: LeaseId,
    /// The fencing token issued with it.
    pub generation: Generation,
    /// Who holds it.
    pub owner: Owner,
    /// On which host.
    pub host: HostId,
    /// For which session.
    pub session: SessionId,
    /// Where it stands.
    pub state: LeaseState,
    /// Whose life it follows.
    pub holder: HolderKind,
    /// How long one grant lasts.
    #[serde(rename = "ttl_ms", with = "millis")]
    pub ttl: Duration,
    /// When the present grant runs out, on the granting host's boot clock.
    pub expires: BootInstant,
    /// When it ends at the latest, however often renewed.
    pub ends: BootInstant,
    /// Why it ended, when it did.
    pub why_ended: Option<String>,
}

/// Bounds of a time to live: 1 s to 24 h.
pub const TTL_BOUNDS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(86_400));

/// Default time to live.
pub const TTL_DEFAULT: Duration = Duration::from_secs(30);

/// Default longest life of a lease, however often renewed.
pub const MAX_LIFETIME_DEFAULT: Duration = Duration::from_secs(86_400);

/// A time to live that lies outside [`TTL_BOUNDS`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a TTL of {0:?} is out of bounds: choose 1 s to 24 h")]
pub struct TtlOutOfBounds(pub Duration);

/// Checks a time to live.
pub fn checked_ttl(ttl: Duration) -> Result<Duration, TtlOutOfBounds> {
    if ttl < TTL_BOUNDS.0 || ttl > TTL_BOUNDS.1 {
        return Err(TtlOutOfBounds(ttl));
    }
    Ok(ttl)
}

/// The safety margin by which the local deadline comes before the authority's: 10 % of the TTL,
/// at least 100 ms.
pub fn margin(ttl: Duration) -> Duration {
    (ttl / 10).max(Duration::from_millis(100))
}

/// What the local deadline is counted from. All instants are of the present boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signs {
    /// The holder's last sign of life.
    pub holder: BootNs,
    /// When the last successful renewal was *sent*; an answer may be late, what it grants began
    /// when the authority saw the request.
    pub sent: BootNs,
    /// What that renewal granted: the smaller of asked and given.
    pub granted: Duration,
    /// When the lease ends at the latest.
    pub ends: BootNs,
}

/// Which bound ends the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// The holder gave no sign for one TTL.
    Holder,
    /// The authority's grant was not renewed in time.
    Grant,
    /// The longest lifetime is over.
    Lifetime,
}

/// The local deadline and the bound that sets it:
/// `min(holder deadline, renewal sent + granted, end of lifetime) - margin`.
pub fn local_deadline(signs: Signs, ttl: Duration) -> (BootNs, Bound) {
    let bounds = [
        (signs.holder.plus(ttl), Bound::Holder),
        (signs.ends, Bound::Lifetime),
        (signs.sent.plus(signs.granted), Bound::Grant),
    ];
    let (at, bound) = bounds.into_iter().min_by_key(|(at, _)| *at).unwrap_or(bounds[0]);
    (at.minus(margin(ttl)), bound)
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn the_deadline_counts_from_when_the_renewal_was_sent() {
        let ttl = Duration::from_secs(30);
        let signs = Signs {
            holder: BootNs(100 * S),
            sent: BootNs(90 * S),
            granted: ttl,
            ends: BootNs(9999 * S),
        };
        assert_eq!(local_deadline(signs, ttl), (BootNs((120 - 3) * S), Bound::Grant));
        let silent = Signs { holder: BootNs(80 * S), ..signs };
        assert_eq!(local_deadline(silent, ttl), (BootNs((110 - 3) * S), Bound::Holder));
        let old = Signs { ends: BootNs(101 * S), ..signs };
        assert_eq!(local_deadline(old, ttl), (BootNs(98 * S), Bound::Lifetime));
    }

    #[test]
    fn a_smaller_grant_wins_over_what_was_asked() {
        let ttl = Duration::from_secs(30);
        let signs = Signs {
            holder: BootNs(0),
            sent: BootNs(0),
            granted: Duration::from_secs(10),
            ends: BootNs(u64::MAX),
        };
        assert_eq!(local_deadline(signs, ttl).0, BootNs(7 * S));
    }

    #[test]
    fn margins_and_bounds() {
        assert_eq!(margin(Duration::from_secs(30)), Duration::from_secs(3));
        assert_eq!(margin(Duration::from_millis(500)), Duration::from_millis(100));
        assert!(checked_ttl(Duration::from_millis(999)).is_err());
        assert!(checked_ttl(Duration::from_secs(1)).is_ok());
        assert!(checked_ttl(Duration::from_secs(86_401)).is_err());
    }
}
