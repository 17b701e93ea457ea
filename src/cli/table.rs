//! Tables for people: plain columns, times from now, sizes in units.

use std::time::Duration;

use comfy_table::{ContentArrangement, Table, presets::NOTHING};
use jiff::Timestamp;

/// Rows under headings, without lines.
pub(super) fn rows<const N: usize>(
    heads: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(heads);
    let mut empty = true;
    for row in rows {
        empty = false;
        table.add_row(row.map(|cell| clean(&cell)));
    }
    if empty { String::new() } else { plain(&table) }
}

/// Names and values, one a line; rows without a value are left out.
pub(super) fn facts<'n>(rows: impl IntoIterator<Item = (&'n str, Option<String>)>) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    for (name, value) in rows {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            table.add_row([name, &clean(&value)]);
        }
    }
    plain(&table)
}

/// What a workload or a caller named may hold anything: control characters do not reach a terminal,
/// and no name makes a line of its own.
pub(super) fn clean(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_control() {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
    shown
}

fn plain(table: &Table) -> String {
    let text = table.to_string();
    text.lines()
        .map(|line| format!("{}\n", line.strip_prefix(' ').unwrap_or(line).trim_end()))
        .collect()
}

/// A span with its two largest units.
pub(super) fn span(span: Duration) -> String {
    let s = span.as_secs();
    match s {
        0 if span.as_millis() == 0 && !span.is_zero() => format!("{}us", span.as_micros()),
        0 => format!("{}ms", span.as_millis()),
        1..60 => format!("{s}s"),
        60..3600 => two(s, 60, "m", 1, "s"),
        3600..86_400 => two(s, 3600, "h", 60, "m"),
        _ => two(s, 86_400, "d", 3600, "h"),
    }
}

fn two(s: u64, big: u64, big_unit: &str, small: u64, small_unit: &str) -> String {
    match s % big / small {
        0 => format!("{}{big_unit}", s / big),
        rest => format!("{}{big_unit} {rest}{small_unit}", s / big),
    }
}

pub(super) fn ms(ms: u64) -> String {
    span(Duration::from_millis(ms))
}

/// Time left: `12s`, or `passed 3s ago`.
pub(super) fn left(ms_left: Option<i64>) -> String {
    match ms_left {
        None => "-".into(),
        Some(left) if left < 0 => format!("passed {} ago", ms(left.unsigned_abs())),
        Some(left) => ms(left.unsigned_abs()),
    }
}

/// An RFC 3339 time from now: `3m 20s ago`; what is none is shown as it is.
pub(super) fn ago(at: &str) -> String {
    ago_from(at, Timestamp::now())
}

fn ago_from(at: &str, now: Timestamp) -> String {
    let Ok(at) = at.parse::<Timestamp>() else { return at.to_owned() };
    match Duration::try_from(now.duration_since(at)) {
        Ok(past) if past < Duration::from_secs(1) => "now".into(),
        Ok(past) => format!("{} ago", span(past)),
        Err(_) => format!("in {}", span(at.duration_since(now).unsigned_abs())),
    }
}

/// An RFC 3339 time to the minute; what is none is shown as it is.
pub(super) fn minute(at: &str) -> String {
    at.parse::<Timestamp>()
        .map_or_else(|_| at.to_owned(), |at| at.strftime("%Y-%m-%d %H:%MZ").to_string())
}

/// An RFC 3339 time to the second; what is none is shown as it is.
pub(super) fn second(at: &str) -> String {
    at.parse::<Timestamp>()
        .map_or_else(|_| at.to_owned(), |at| at.strftime("%Y-%m-%d %H:%M:%SZ").to_string())
}

/// Bytes in binary units.
pub(super) fn bytes(n: u64) -> String {
    let mut size = n;
    let mut rest = 0;
    for unit in ["B", "KiB", "MiB", "GiB", "TiB"] {
        if size < 1024 || unit == "TiB" {
            return match (unit, rest) {
                ("B", _) | (_, 0) => format!("{size} {unit}"),
                (_, tenths) => format!("{size}.{tenths} {unit}"),
            };
        }
        rest = size % 1024 * 10 / 1024;
        size /= 1024;
    }
    format!("{n} B")
}

/// `-` for nothing.
pub(super) fn or_dash(text: Option<String>) -> String {
    text.filter(|text| !text.is_empty()).unwrap_or_else(|| "-".into())
}

/// Labels as `a=b c=d`.
pub(super) fn labels(labels: &std::collections::BTreeMap<String, String>) -> String {
    labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(" ")
}

/// Items with commas.
pub(super) fn joined<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    items.into_iter().map(|item| item.to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_read_times_and_sizes() {
        for (ms_, text) in [
            (0, "0ms"),
            (999, "999ms"),
            (12_000, "12s"),
            (60_000, "1m"),
            (61_000, "1m 1s"),
            (3_600_000, "1h"),
            (90_000_000, "1d 1h"),
        ] {
            assert_eq!(ms(ms_), text);
        }
        assert_eq!(span(Duration::from_micros(40)), "40us");
        assert_eq!(left(Some(-3000)), "passed 3s ago");
        assert_eq!(left(None), "-");
        for (n, text) in [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1_572_864, "1.5 MiB")] {
            assert_eq!(bytes(n), text);
        }
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        assert_eq!(ago_from("2025-12-31T23:58:00Z", now), "2m ago");
        assert_eq!(ago_from("2026-01-01T00:01:00Z", now), "in 1m");
        assert_eq!(ago_from("long ago", now), "long ago");
    }

    #[test]
    fn tables_are_plain() {
        let text = rows(["A", "LONG"], [["x".into(), "1".into()], ["yy".into(), String::new()]]);
        assert_eq!(text, "A   LONG\nx   1\nyy\n");
        assert_eq!(rows(["A"], []), "");
        assert_eq!(
            facts([("a", Some("1".into())), ("b", None), ("cc", Some("2".into()))]),
            "a   1\ncc  2\n"
        );
    }
}
