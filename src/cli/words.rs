//! Evidence and history for people: what an entry's JSON says, on one line.

use serde_json::{Map, Value};

use super::table;

/// Longest line of details.
const LONGEST: usize = 240;

/// The detail of an entry of this kind; `-o json` has all of it.
pub(super) fn words(kind: &str, detail: &Value) -> String {
    let said = match (kind, detail) {
        ("event", Value::Object(event)) => transition(event),
        _ => plain(detail),
    };
    let said = table::clean(&said);
    match said.char_indices().nth(LONGEST) {
        None => said,
        Some((end, _)) => format!("{}...", &said[..end]),
    }
}

/// `lease_lost ACTIVE -> FENCING, does freeze, loss: expired by holder`
fn transition(detail: &Map<String, Value>) -> String {
    let of = |name: &str| detail.get(name).and_then(Value::as_str).unwrap_or("?");
    let mut event = detail.get("event").and_then(Value::as_object).cloned().unwrap_or_default();
    let name = event.remove("event").map_or_else(|| "?".to_owned(), |name| plain(&name));
    let mut said = match (of("from"), of("to")) {
        (from, to) if from == to => format!("{name} {to}"),
        (from, to) => format!("{name} {from} -> {to}"),
    };
    for (label, value) in [
        (" refused", detail.get("refused")),
        (" does", detail.get("effects")),
        ("", Some(&Value::Object(event))),
    ] {
        let value = value.map(plain).filter(|text| !text.is_empty());
        if let Some(text) = value {
            said.push_str(&format!(",{label} {text}"));
        }
    }
    said
}

/// Names and values without JSON's marks; what is nothing is left out.
fn plain(value: &Value) -> String {
    match value {
        Value::Null | Value::Bool(false) => String::new(),
        Value::Bool(true) => "yes".into(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => short(text),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join("+"),
        // What was asked of the kernel, and its answer.
        Value::Object(fields) if fields.contains_key("asked") && fields.contains_key("answer") => {
            format!("{} -> {}", plain(&fields["asked"]), plain(&fields["answer"]))
        }
        Value::Object(fields) => {
            let pairs = fields.iter().map(|(name, value)| (name, plain(value)));
            let said = pairs.filter(|(_, text)| !text.is_empty()).map(|(name, text)| {
                let nested = fields[name].is_object();
                if nested { format!("{name} ({text})") } else { format!("{name} {text}") }
            });
            said.collect::<Vec<_>>().join(", ")
        }
    }
}

/// A digest by its beginning.
fn short(text: &str) -> String {
    let hex = text.strip_prefix("sha256:").unwrap_or(text);
    match hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        true => format!("{}..", &hex[..12]),
        false => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_entry_is_read_on_one_line() {
        let digest = "ab".repeat(32);
        for (kind, detail, line) in [
            (
                "event",
                json!({ "event": { "event": "lease_lost", "loss": { "expired": { "bound": "holder" } },
                    "revoke": false }, "from": "ACTIVE", "to": "FENCING",
                    "effects": ["freeze", "revoke"], "refused": null }),
                "lease_lost ACTIVE -> FENCING, does freeze+revoke, loss (expired (bound holder))",
            ),
            (
                "event",
                json!({ "event": { "event": "frozen", "proof": { "asked": "cgroup.freeze=1",
                    "answer": "frozen 1", "took_us": 3 } }, "from": "FENCED", "to": "FENCED",
                    "effects": [] }),
                "frozen FENCED, proof (cgroup.freeze=1 -> frozen 1)",
            ),
            (
                "event",
                json!({ "event": { "event": "disposed" }, "from": "ACTIVE", "to": "ACTIVE",
                    "refused": "wrong_state" }),
                "disposed ACTIVE, refused wrong_state",
            ),
            ("gc", json!({ "id": digest, "why": null, "n": 2 }), "id abababababab.., n 2"),
            ("x", json!("a\nb"), "a\\nb"),
            ("x", json!({}), ""),
        ] {
            assert_eq!(words(kind, &detail), line);
        }
        let long = words("x", &json!("\u{e4}".repeat(1000)));
        assert_eq!(long, format!("{}...", "\u{e4}".repeat(LONGEST)));
    }
}
