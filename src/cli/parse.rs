//! Values of flags.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use nix::unistd::{Uid, User};

use crate::agent::failure::Failure;
use crate::config::duration;
use crate::model::code::Code;
use crate::model::session::RunAs;
use crate::model::view::PathText;

/// A span of time with its unit.
pub(super) fn span(text: &str) -> Result<Duration, String> {
    duration::parse(text).map_err(|fault| fault.to_string())
}

/// Whole milliseconds, as the API takes them.
pub(super) fn ms(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

/// A name, an id or the beginning of one: anything but nothing.
pub(super) fn name(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("it is empty; `overfence session list` and the other lists show ids".into()),
        _ => Ok(text.into()),
    }
}

/// `key=value`.
pub(super) fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.into(), value.into())),
        _ => Err("write key=value".into()),
    }
}

/// Whether `labels` hold every wanted pair.
pub(super) fn selected(labels: &BTreeMap<String, String>, wanted: &[(String, String)]) -> bool {
    wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
}

/// How long from now: a span, or a time that lies ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Until(pub(super) Duration);

pub(super) fn until(text: &str) -> Result<Until, String> {
    until_from(text, Timestamp::now())
}

fn until_from(text: &str, now: Timestamp) -> Result<Until, String> {
    if let Ok(span) = duration::parse(text) {
        return Ok(Until(span));
    }
    let then: Timestamp = text.parse().map_err(|_| {
        "write a span such as 48h, or a time with its zone such as 2027-01-31T12:00:00Z".to_owned()
    })?;
    let ahead = then.duration_since(now);
    Duration::try_from(ahead).map(Until).map_err(|_| "that time has passed".to_owned())
}

/// A user by name or number, with the group it has on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Who {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

pub(super) fn user(text: &str) -> Result<Who, String> {
    let number = text.parse::<u32>().ok();
    let found = match number {
        Some(uid) => User::from_uid(Uid::from_raw(uid)),
        None => User::from_name(text),
    };
    match (found.ok().flatten(), number) {
        (Some(user), _) => Ok(Who { uid: user.uid.as_raw(), gid: user.gid.as_raw() }),
        (None, Some(RunAs::NOBODYS)) => Err(format!("{} is no id", RunAs::NOBODYS)),
        (None, Some(id)) => Ok(Who { uid: id, gid: id }),
        (None, None) => Err("this host has no such user; a number is taken as it is".into()),
    }
}

/// A path for the agent, which has another working directory.
pub(super) fn path_text(path: &Path) -> Result<PathText, Failure> {
    match std::path::absolute(path) {
        Ok(path) => Ok(PathText::of(&path)),
        Err(fault) => Err(Failure::new(Code::BadRequest, format!("{}: {fault}", path.display()))),
    }
}

/// Several of them.
pub(super) fn path_texts(paths: &[PathBuf]) -> Result<Vec<PathText>, Failure> {
    paths.iter().map(|path| path_text(path)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_ahead_is_a_span() {
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let hours = |n: u64| Ok(Until(Duration::from_secs(3600 * n)));
        assert_eq!(until_from("48h", now), hours(48));
        assert_eq!(until_from("2026-01-02T00:00:00Z", now), hours(24));
        assert_eq!(until_from("2026-01-02T00:00:00+02:00", now), hours(22));
        assert!(until_from("2025-12-31T00:00:00Z", now).is_err());
        assert!(until_from("tomorrow", now).is_err());
    }

    #[test]
    fn a_name_is_not_nothing() {
        assert_eq!(name("s-1"), Ok("s-1".into()));
        assert!(name("").is_err() && name(" \t").is_err());
    }

    #[test]
    fn users_go_by_name_and_number() {
        assert_eq!(user("root"), Ok(Who { uid: 0, gid: 0 }));
        assert_eq!(user("0"), Ok(Who { uid: 0, gid: 0 }));
        assert_eq!(user("3999999"), Ok(Who { uid: 3_999_999, gid: 3_999_999 }));
        assert!(user("nobody-of-this-name").is_err());
        assert!(user("-1").is_err());
        assert!(user("4294967295").is_err(), "it would leave the host's root in place");
    }

    #[test]
    fn selectors_want_every_pair() {
        let labels = BTreeMap::from([("team".into(), "a".into()), ("env".into(), "x=y".into())]);
        let pairs = |texts: &[&str]| texts.iter().map(|t| pair(t).unwrap()).collect::<Vec<_>>();
        assert!(selected(&labels, &pairs(&[])));
        assert!(selected(&labels, &pairs(&["team=a", "env=x=y"])));
        assert!(!selected(&labels, &pairs(&["team=a", "env=z"])));
        assert!(!selected(&labels, &pairs(&["other="])));
        assert!(pair("team").is_err() && pair("=a").is_err());
    }
}
