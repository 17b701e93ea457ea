//! Spans of time as people write them: `30s`, `1h 30m`, `72h`, `500ms`. A bare number is refused:
//! nobody remembers its unit.

use std::time::Duration;

use jiff::fmt::friendly::{SpanParser, SpanPrinter};
use serde::{Deserialize, Deserializer, Serializer};

/// A text that is no span of time.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a span of time; write a number with its unit, for instance 30s, 500ms or 72h"
)]
pub struct Invalid(pub String);

/// Reads a span.
///
/// # Errors
/// The text has no unit, is negative or is something else altogether.
pub fn parse(text: &str) -> Result<Duration, Invalid> {
    SpanParser::new().parse_unsigned_duration(text).map_err(|_| Invalid(text.to_owned()))
}

/// Writes a span so that [`parse`] reads it.
pub fn text(span: Duration) -> String {
    SpanPrinter::new().unsigned_duration_to_string(&span)
}

/// For serde.
pub fn serialize<S: Serializer>(span: &Duration, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(&text(*span))
}

/// For serde.
pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Duration, D::Error> {
    parse(&String::deserialize(d)?).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_have_units() {
        for (written, ms) in
            [("30s", 30_000), ("72h", 259_200_000), ("500ms", 500), ("1m30s", 90_000)]
        {
            assert_eq!(parse(written), Ok(Duration::from_millis(ms)), "{written}");
            assert_eq!(parse(&text(Duration::from_millis(ms))), Ok(Duration::from_millis(ms)));
        }
        for bad in ["", "30", "-3s", "soon", "3 s s", "1e3s"] {
            assert_eq!(parse(bad), Err(Invalid(bad.into())), "{bad:?}");
        }
    }
}
