//! How much of what people say is kept: it goes into records, evidence and every list, for as long
//! as there is a workspace.

use std::collections::BTreeMap;

use serde::de::Error as _;
use serde::{Deserialize as _, Deserializer};

/// Bytes of a reason.
const REASON: usize = 4096;
/// Bytes of a name, a contact, a key or a value.
const NAME: usize = 256;
/// Labels of one thing.
const LABELS: usize = 64;

fn within<E: serde::de::Error>(what: &str, text: String, most: usize) -> Result<String, E> {
    match text.len() {
        bytes if bytes > most => {
            Err(E::custom(format!("{what} has {bytes} bytes, at most {most} are kept: shorten it")))
        }
        _ => Ok(text),
    }
}

pub(super) fn reason<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    within("a reason", String::deserialize(from)?, REASON)
}

pub(super) fn name<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    within("a name or contact", String::deserialize(from)?, NAME)
}

pub(super) fn labels<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<BTreeMap<String, String>, D::Error> {
    let all = BTreeMap::<String, String>::deserialize(from)?;
    if all.len() > LABELS {
        let why = format!("{} labels, at most {LABELS} are kept: leave some out", all.len());
        return Err(D::Error::custom(why));
    }
    let pairs = all.into_iter().map(|(key, value)| {
        Ok((within("a label's key", key, NAME)?, within("a label's value", value, NAME)?))
    });
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use super::super::{CreateWorkspace, FenceSession};

    #[test]
    fn more_than_is_kept_is_refused_and_not_cut() {
        let create = |contact: usize, labels: usize, value: usize| {
            let labels: serde_json::Map<_, _> =
                (0..labels).map(|n| (n.to_string(), "v".repeat(value).into())).collect();
            let wish =
                serde_json::json!({ "id": "w", "contact": "c".repeat(contact), "labels": labels });
            serde_json::from_value::<CreateWorkspace>(wish).map_err(|e| e.to_string())
        };
        assert_eq!(create(256, 64, 256).unwrap().labels.len(), 64);
        for (wish, said) in [
            (create(257, 1, 1), "a name or contact has 257 bytes, at most 256"),
            (create(1, 65, 1), "65 labels, at most 64"),
            (create(1, 1, 257), "a label's value has 257 bytes, at most 256"),
        ] {
            let refused = wish.unwrap_err();
            assert!(refused.contains(said), "{refused}");
        }
        let fence = |bytes: usize| {
            serde_json::from_value::<FenceSession>(
                serde_json::json!({ "reason": "r".repeat(bytes) }),
            )
        };
        assert!(fence(4096).is_ok() && fence(4097).is_err());
    }
}
