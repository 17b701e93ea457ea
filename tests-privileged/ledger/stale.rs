//! A writer whose lease is over, and what is over with it.

use serde_json::Value;

use super::{begin, publications, refused, requests, write};
use crate::agent_process::{Host, id_of};
use crate::host::{Place, paced_ttl};

/// Whatever it asks, it is the authority that refuses: with who owns the workspace
/// now, in the history, and in the evidence with what was really asked and by whom.
pub(super) fn verbs(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let a = host.open("w", &paced_ttl(60));
    let id = id_of(&a);
    write(&a, "f", "of a");
    begin(&host, &id, "t", "k");
    host.must(&["fence", &id, "--reason", "test", "--wait"]);
    // Its writer is gone: nobody knows what became of what it may have sent.
    assert_eq!(requests(&host, false)[0]["state"], "UNKNOWN");
    let b = host.must(&["session", "open", "-w", "w", "--owner", "bob", "--ttl", &paced_ttl(60)]);
    let expected = host.must(&["session", "inspect", &id])["expected"].clone();
    for (verb, kind, args) in [
        ("publish", "publication", &["session", "checkpoint", &id][..]),
        ("publish", "publication", &["session", "close", &id, "--checkpoint"]),
        ("begin", "request_begin", &["request", "begin", &id, "--task", "t2", "--key", "k2"]),
    ] {
        let (code, said) = refused(&host, args);
        assert!(code == 4 && said.contains("stale_generation"), "{args:?}: {code}: {said}");
        for now in ["generation 2", "owner bob", "version 0", "head empty", "preserved export"] {
            assert!(said.contains(now), "{args:?}: no {now:?} in {said}");
        }
        let row = host.must(&["workspace", "history", "w", "--limit", "1"])[0].clone();
        let detail = &row["detail"];
        assert_eq!((&detail["verb"], &detail["code"]), (&verb.into(), &"stale_generation".into()));
        let entries = host.must(&["evidence", "show", "--session", &id]);
        let last = entries.as_array().unwrap().iter().rev().find(|e| e["kind"] == kind).unwrap();
        assert_eq!(last["detail"]["answer"]["Err"]["code"], "stale_generation", "{last:#}");
        assert_eq!(last["detail"]["asked"]["expected"], expected, "{last:#}");
        assert!(last["actor"].as_str().unwrap().starts_with("uid 0"), "{last:#}");
    }
    // Nothing was offered, so nothing stands in the ledger.
    assert_eq!(publications(&host, true), Vec::<Value>::new());
    assert_eq!(requests(&host, true).len(), 1);
    host.must(&["session", "close", &id_of(&b)]);
}

pub(super) fn assigned(place: &Place) {
    let mut host = Host::new(place, "h");
    assert!(host.start(None));
    let opened = host.open("w", &paced_ttl(60));
    let id = id_of(&opened);
    begin(&host, &id, "t", "k");
    host.must(&["request", "ack", "k", "done", "-w", "w"]);
    write(&opened, "f", "x");
    let key = host.must(&["session", "checkpoint", &id])["key"].as_str().unwrap().to_owned();
    let rows = |host: &Host| host.must(&["workspace", "history", "w"]).as_array().unwrap().len();
    let before = (publications(&host, true), requests(&host, true), rows(&host));
    for args in
        [&["request", "assign", "k", "bob", "-w", "w"][..], &["publication", "assign", &key, "bob"]]
    {
        let (code, said) = refused(&host, args);
        assert!(code == 4 && said.contains("already_settled"), "{args:?}: {code}: {said}");
        let entries = host.must(&["evidence", "show"]);
        let last =
            entries.as_array().unwrap().iter().rev().find(|e| e["kind"] == "assign").unwrap();
        assert_eq!(last["detail"]["answer"]["Err"], "already_settled", "{last:#}");
    }
    assert_eq!((publications(&host, true), requests(&host, true), rows(&host)), before);
}
