//! What a session may use at most. Written as people do: `512M`, `2G`, `1.5` CPUs.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A limit that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidLimit {
    /// No size.
    #[error(
        "{0:?} is not a size; write bytes, or a number with K, M, G or T (of 1024), for instance 512M"
    )]
    Size(String),
    /// No number of CPUs.
    #[error("{0:?} is not a number of CPUs; write for instance 2, 0.5 or 1.25")]
    Cpus(String),
}

/// Bytes; not 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Size(pub u64);

/// Thousandths of a CPU; not 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cpus(pub u64);

/// What a session may use at most; what is absent has no bound of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Memory of all its processes, with the page cache they fill.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Size>,
    /// Processes and threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pids: Option<u64>,
    /// CPU time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Cpus>,
}

impl Limits {
    /// These, and for what they do not say, `others`.
    pub fn or(self, others: Self) -> Self {
        Self {
            memory: self.memory.or(others.memory),
            pids: self.pids.or(others.pids),
            cpu: self.cpu.or(others.cpu),
        }
    }

    /// The cgroup controllers that these limits need.
    pub fn controllers(&self) -> impl Iterator<Item = &'static str> {
        let wanted = [
            ("memory", self.memory.is_some()),
            ("pids", self.pids.is_some()),
            ("cpu", self.cpu.is_some()),
        ];
        wanted.into_iter().filter_map(|(name, wanted)| wanted.then_some(name))
    }
}

const UNITS: [(char, u32); 4] = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];

impl FromStr for Size {
    type Err = InvalidLimit;
    fn from_str(text: &str) -> Result<Self, InvalidLimit> {
        let unit = UNITS.iter().find(|(unit, _)| text.ends_with(*unit));
        let (digits, shift) = match unit {
            Some((_, shift)) => (&text[..text.len() - 1], *shift),
            None => (text, 0),
        };
        digits
            .parse::<u64>()
            .ok()
            .and_then(|n| n.checked_mul(1 << shift))
            // The kernel's own interface counts in signed numbers.
            .filter(|n| (1..=i64::MAX.unsigned_abs()).contains(n))
            .filter(|_| digits.bytes().all(|b| b.is_ascii_digit()))
            .map(Self)
            .ok_or_else(|| InvalidLimit::Size(text.to_owned()))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS.iter().rev().find(|(_, shift)| self.0.is_multiple_of(1 << shift));
        match unit {
            Some((unit, shift)) => write!(f, "{}{unit}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

impl FromStr for Cpus {
    type Err = InvalidLimit;
    fn from_str(text: &str) -> Result<Self, InvalidLimit> {
        let fault = || InvalidLimit::Cpus(text.to_owned());
        let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
        let plain = |t: &str| !t.is_empty() && t.bytes().all(|b| b.is_ascii_digit());
        if !plain(whole) || !plain(part) || part.len() > 3 {
            return Err(fault());
        }
        let (whole, part): (u64, u64) = (
            whole.parse().map_err(|_| fault())?,
            format!("{part:0<3}").parse().map_err(|_| fault())?,
        );
        let millis = whole.checked_mul(1000).and_then(|n| n.checked_add(part)).ok_or_else(fault)?;
        // The kernel takes a quota of 1 ms in 100 ms at least, and no more than fits its clock.
        if (10..=1_000_000_000).contains(&millis) { Ok(Self(millis)) } else { Err(fault()) }
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, part) = (self.0 / 1000, self.0 % 1000);
        match part {
            0 => write!(f, "{whole}"),
            _ => f.write_str(format!("{whole}.{part:03}").trim_end_matches('0')),
        }
    }
}

impl TryFrom<String> for Size {
    type Error = InvalidLimit;
    fn try_from(text: String) -> Result<Self, InvalidLimit> {
        text.parse()
    }
}

impl From<Size> for String {
    fn from(size: Size) -> Self {
        size.to_string()
    }
}

impl TryFrom<String> for Cpus {
    type Error = InvalidLimit;
    fn try_from(text: String) -> Result<Self, InvalidLimit> {
        text.parse()
    }
}

impl From<Cpus> for String {
    fn from(cpus: Cpus) -> Self {
        cpus.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_cpus_are_read_as_they_are_written() {
        for (text, bytes, again) in [
            ("512M", 512 << 20, "512M"),
            ("1024K", 1 << 20, "1M"),
            ("2G", 2 << 30, "2G"),
            ("1T", 1 << 40, "1T"),
            ("4097", 4097, "4097"),
        ] {
            let size: Size = text.parse().unwrap();
            assert_eq!((size, &*size.to_string()), (Size(bytes), again), "{text}");
        }
        for bad in ["", "0", "M", "1.5G", "-1", "+1", "512MB", "1 G", "9999999999T", "x"] {
            assert!(bad.parse::<Size>().is_err(), "{bad:?}");
        }
        for (text, millis, again) in
            [("2", 2000, "2"), ("0.5", 500, "0.5"), ("1.25", 1250, "1.25"), ("0.010", 10, "0.01")]
        {
            let cpus: Cpus = text.parse().unwrap();
            assert_eq!((cpus, &*cpus.to_string()), (Cpus(millis), again), "{text}");
        }
        for bad in ["", "0", "0.001", ".5", "1.", "1.2345", "-1", "two", "1e3", "99999999"] {
            assert!(bad.parse::<Cpus>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn what_is_not_said_is_taken_from_the_defaults() {
        let own = Limits { pids: Some(7), ..Limits::default() };
        let defaults = Limits { pids: Some(9), memory: Some(Size(1)), cpu: None };
        let both = own.or(defaults);
        assert_eq!(both, Limits { pids: Some(7), memory: Some(Size(1)), cpu: None });
        assert_eq!(both.controllers().collect::<Vec<_>>(), ["memory", "pids"]);
        let text = serde_json::to_string(&both).unwrap();
        assert_eq!(text, r#"{"memory":"1","pids":7}"#);
        assert_eq!(serde_json::from_str::<Limits>(&text).unwrap(), both);
        assert_eq!(serde_json::from_str::<Limits>("{}").unwrap(), Limits::default());
    }
}
