//! Answers that are lost on the way, on either side of the commit.

use serde_json::Value;

use super::{
    Switch, history, outcomes, publications, refused, settled, stored, version, wait, write,
};
use crate::agent_process::{Host, id_of, path_of};
use crate::host::{Place, paced_ttl};

pub(super) fn before(place: &Place) {
    let mut host = Host::new(place, "h");
    let (sent, resolved) = (Switch::off(&host, "sent"), Switch::off(&host, "resolved"));
    let plan = format!(
        "{};{}",
        sent.plan("authority.publish.before"),
        resolved.plan("authority.resolve.before")
    );
    assert!(host.start(Some(&plan)));
    let opened = host.open("w", &paced_ttl(60));
    let id = id_of(&opened);
    write(&opened, "f", "lost");
    let (sent, resolved) = (sent.on(), resolved.on());
    let (code, said) = refused(&host, &["session", "checkpoint", &id]);
    assert!(code == 4 && said.contains("unknown_publication"), "{code}: {said}");
    // In a queue of its own, with who sees to it; nothing else says that it failed.
    let queue = publications(&host, false);
    assert_eq!(queue.len(), 1, "{queue:#?}");
    assert_eq!((&queue[0]["state"], &queue[0]["session"]), (&"UNKNOWN".into(), &id.clone().into()));
    assert_eq!(queue[0]["assignee"], host.must(&["workspace", "status", "w"])["owner"]);
    let key = queue[0]["key"].as_str().unwrap().to_owned();
    host.must(&["publication", "assign", &key, "ann"]);
    assert_eq!(host.must(&["publication", "show", &key[..12]])["assignee"], "ann");
    assert_eq!(version(&host), 0);
    // It keeps no other publication from going through.
    sent.over();
    write(&opened, "f", "kept");
    assert_eq!(host.must(&["session", "checkpoint", &id])["at"]["version"], 1);
    assert_eq!(publications(&host, false).len(), 1);
    // Once the authority answers, the key is buried: it can never be committed late.
    resolved.over();
    settled(&host, &id);
    assert_eq!(publications(&host, false), Vec::<Value>::new());
    let row = host.must(&["publication", "resolve", &key]);
    assert_eq!((&row["state"], &row["why"]), (&"REJECTED".into(), &"key_buried".into()));
    host.must(&["session", "close", &id, "--checkpoint"]);
    assert_eq!((version(&host), history(&host, "published")), (1, 1));
    assert_eq!(history(&host, "buried"), 1);
    let told = outcomes(&host, &id);
    let of_it: Vec<_> = told.iter().filter(|(of, _)| *of == key).map(|(_, word)| &**word).collect();
    assert_eq!(of_it, ["unknown", "refused"], "{told:?}");
    assert_eq!(told.iter().filter(|(_, word)| word == "committed").count(), 1, "{told:?}");
    assert_eq!(stored(&host, "f").as_deref(), Some("kept"));
    assert_eq!(host.must(&["evidence", "verify"])["ok"], true);
}

pub(super) fn after(place: &Place) {
    let mut host = Host::new(place, "h");
    let (sent, resolved) = (Switch::off(&host, "sent"), Switch::off(&host, "resolved"));
    let plan = format!(
        "{};{}",
        sent.plan("authority.publish.after"),
        resolved.plan("authority.resolve.before")
    );
    assert!(host.start(Some(&plan)));
    let opened = host.open("w", &paced_ttl(60));
    let id = id_of(&opened);
    write(&opened, "f", "first");
    let (sent, resolved) = (sent.on(), resolved.on());
    let (code, said) = refused(&host, &["session", "checkpoint", &id]);
    assert!(code == 4 && said.contains("unknown_publication"), "{code}: {said}");
    // It is committed, though nobody was told: unknown is not failed.
    assert_eq!(version(&host), 1);
    let view = host.must(&["session", "inspect", &id]);
    let key = view["unknown"][0].as_str().unwrap().to_owned();
    assert_eq!(view["expected"]["version"], 0);
    // Nor is it done again under another key: the authority sees that this writer is behind.
    sent.over();
    write(&opened, "f", "second");
    let (code, said) = refused(&host, &["session", "checkpoint", &id]);
    assert!(code == 4 && said.contains("version_mismatch"), "{code}: {said}");
    assert_eq!((version(&host), history(&host, "published")), (1, 1));
    resolved.over();
    let view = settled(&host, &id);
    assert_eq!(view["expected"]["version"], 1);
    assert_eq!(host.must(&["publication", "show", &key])["state"], "COMMITTED");
    assert_eq!(host.must(&["session", "checkpoint", &id])["at"]["version"], 2);
    host.must(&["session", "close", &id, "--checkpoint"]);
    assert_eq!((version(&host), history(&host, "published")), (2, 2));
    assert_eq!(history(&host, "buried"), 0);
    let told = outcomes(&host, &id);
    let of_it: Vec<_> = told.iter().filter(|(of, _)| *of == key).map(|(_, word)| &**word).collect();
    assert_eq!(of_it, ["unknown", "committed"], "{told:?}");
    assert_eq!(told.iter().filter(|(_, word)| word == "committed").count(), 2, "{told:?}");
    assert_eq!(stored(&host, "f").as_deref(), Some("second"));
    // What was committed first was not overwritten: it is the version before.
    host.must(&["workspace", "revert", "-w", "w", "--to", "1"]);
    assert_eq!((stored(&host, "f").as_deref(), version(&host)), (Some("first"), 3));
}

/// A close is neither done nor failed while nobody knows. Once it turns out that everything was
/// published, nothing is kept; if not, all of it is.
pub(super) fn close(place: &Place) {
    for (n, point, happened, reached) in [
        (0, "authority.publish.before", false, false),
        (1, "authority.publish.after", true, false),
        (2, "authority.publish.after", true, true),
    ] {
        let mut host = Host::new(place, &format!("h{n}"));
        let (sent, resolved) = (Switch::off(&host, "sent"), Switch::off(&host, "resolved"));
        let plan = format!("{};{}", sent.plan(point), resolved.plan("authority.resolve.before"));
        assert!(host.start(Some(&plan)));
        let opened = host.open("w", &paced_ttl(60));
        let id = id_of(&opened);
        write(&opened, "f", "at the end");
        let (sent, resolved) = (sent.on(), resolved.on());
        let (code, said) = refused(&host, &["session", "close", &id, "--checkpoint"]);
        assert!(code == 4 && said.contains("unknown_publication"), "{code}: {said}");
        let view = host.must(&["session", "inspect", &id]);
        let key = view["unknown"][0].as_str().unwrap();
        assert!(said.contains(&format!("overfence publication show {key}")), "{said}");
        assert!(view["trouble"].as_str().unwrap().contains(key), "{view:#}");
        let late = path_of(&view, "upper").join("late");
        if reached {
            std::fs::write(&late, "past the overlay").unwrap();
        }
        sent.over();
        resolved.over();
        if reached {
            // Not all of it is in the head.
            let view = settled(&host, &id);
            assert_eq!((&view["state"], view["altered"].is_string()), (&"PRESERVED".into(), true));
            assert_eq!(std::fs::read_to_string(&late).unwrap(), "past the overlay");
            assert_eq!(stored(&host, "f").as_deref(), Some("at the end"));
        } else if happened {
            wait(&host, "it ends clean", || {
                host.must(&["session", "list"]) == Value::Array(vec![])
            });
            assert_eq!(stored(&host, "f").as_deref(), Some("at the end"));
        } else {
            let view = settled(&host, &id);
            assert_eq!(view["state"], "PRESERVED", "{view:#}");
            let kept = std::fs::read_to_string(path_of(&view, "upper").join("f")).unwrap();
            assert_eq!(kept, "at the end");
            assert!(view["trouble"].as_str().unwrap().contains("was not committed"), "{view:#}");
            assert_eq!(stored(&host, "f"), None);
        }
        assert_eq!(version(&host), u64::from(happened));
        assert_eq!(history(&host, "published"), usize::from(happened));
    }
}

/// kill -9 on either side of the commit: the next agent asks before anything else is offered.
pub(super) fn killed(place: &Place) {
    for (point, committed) in
        [("authority.publish.before", 0_u64), ("authority.publish.after", 1_u64)]
    {
        let mut host = Host::new(place, point.rsplit('.').next().unwrap());
        assert!(host.start(Some(&format!("die={point}"))));
        let opened = host.open("w", &paced_ttl(60));
        let id = id_of(&opened);
        write(&opened, "f", "first");
        let (code, _) = refused(&host, &["session", "checkpoint", &id]);
        assert_eq!(code, 6, "{point}");
        host.kill_agent();
        assert!(host.start(None), "{}", host.log());
        let view =
            host.until(&id, |v| v["work"].is_null() && v["unknown"].as_array().unwrap().is_empty());
        assert_eq!(view["expected"]["version"], committed, "{point}");
        assert_eq!(version(&host), committed, "{point}");
        assert_eq!(publications(&host, false), Vec::<Value>::new());
        let states: Vec<_> =
            publications(&host, true).iter().map(|row| row["state"].clone()).collect();
        let wanted = if committed == 1 { "COMMITTED" } else { "REJECTED" };
        assert_eq!(states, [wanted], "{point}");
        host.must(&["session", "close", &id, "--checkpoint"]);
        assert_eq!((version(&host), history(&host, "published")), (1, 1), "{point}");
        assert_eq!(stored(&host, "f").as_deref(), Some("first"), "{point}");
        host.stop();
    }
}

pub(super) fn revert(place: &Place) {
    for (n, point, happened) in
        [(0, "authority.publish.before", false), (1, "authority.publish.after", true)]
    {
        let mut host = Host::new(place, &format!("h{n}"));
        let (sent, resolved) =
            (Switch::off(&host, "sent").on(), Switch::off(&host, "resolved").on());
        assert!(host.start(None));
        for text in ["one", "two"] {
            let opened = host.open("w", &paced_ttl(60));
            write(&opened, "f", text);
            host.must(&["session", "close", &id_of(&opened), "--checkpoint"]);
        }
        host.kill_agent();
        let plan = format!("{};{}", sent.plan(point), resolved.plan("authority.resolve.before"));
        assert!(host.start(Some(&plan)));
        let ask = ["workspace", "revert", "-w", "w", "--to", "1", "--reason", "a bad build"];
        let (code, said) = refused(&host, &ask);
        assert_eq!(code, 4, "{said}");
        assert!(said.contains("unknown_publication"), "{said}");
        // It is in the ledger as any other, with somebody to see to it: open, unless the authority's
        // own row says already what became of it.
        let row = publications(&host, true).remove(0);
        let key = row["key"].as_str().unwrap();
        assert!(said.contains(key), "{said}: {row:#}");
        let state = if happened { "COMMITTED" } else { "UNKNOWN" };
        assert_eq!((&row["state"], row["assignee"].is_string()), (&state.into(), true), "{row:#}");
        // The next writer learns of what is open before its first publication.
        let next = host.open("w", &paced_ttl(60));
        let told = next["unresolved"].as_array().map_or(0, Vec::len);
        assert_eq!(told, usize::from(!happened), "{next:#}");
        host.must(&["session", "close", &id_of(&next)]);
        resolved.over();
        wait(&host, "the revert is resolved", || publications(&host, false).is_empty());
        sent.over();
        let row = host.must(&["publication", "show", key]);
        let expected = if happened { ("COMMITTED", 3, "one") } else { ("REJECTED", 2, "two") };
        assert_eq!(row["state"], expected.0, "{row:#}");
        assert_eq!((version(&host), stored(&host, "f").unwrap()), (expected.1, expected.2.into()));
        assert_eq!(history(&host, "published") as u64, expected.1);
        let told = host.must(&["evidence", "show"]);
        let resolved = told.as_array().unwrap().iter().filter(|e| e["kind"] == "resolve");
        assert_eq!(resolved.count(), usize::from(!happened), "{told:#}");
        // What is buried stays so, and another revert goes through.
        host.must(&["workspace", "revert", "-w", "w", "--to", if happened { "2" } else { "1" }]);
        let all = publications(&host, true);
        assert_eq!(all.len(), 4, "{all:?}");
        assert_eq!(all[0]["state"], "COMMITTED");
    }
}
