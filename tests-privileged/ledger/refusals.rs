//! What the agent's own door lets through to the predicate of a publication: each refusal is in the
//! authority's history and in the host's evidence, counts under its reason, and changes nothing.
//!
//! The codes that no caller meets, because the agent fills in what they are about, are said where the
//! authority is asked for them directly: `authority::conformance`, `i1_every_reason`.

use std::collections::BTreeSet;

use overfence::model::code::Code;
use overfence::model::workspace::PUBLISH_REFUSALS;
use serde_json::Value;

use super::{Switch, publications, refused, settled, stored, version, wait, write};
use crate::agent_process::{Host, id_of, path_of};
use crate::host::{Place, paced_ttl};

/// Codes that the predicate has and no caller of the API can ask for.
const NOT_BY_A_CALLER: [Code; 7] = [
    Code::LeaseMismatch,
    Code::SessionMismatch,
    Code::HeadMismatch,
    Code::UnknownWorkspace,
    Code::KeyUsed,
    Code::KeyForgotten,
    Code::LayerBuried,
];

/// A workspace with something published in it, and a session that wrote besides.
struct Writer<'a> {
    host: &'a Host,
    workspace: &'a str,
    opened: Value,
    met: BTreeSet<&'static str>,
}

impl<'a> Writer<'a> {
    fn new(host: &'a Host, workspace: &'a str, ttl: &str) -> Self {
        let first = host.open(workspace, &paced_ttl(60));
        write(&first, "f", "published");
        host.must(&["session", "close", &id_of(&first), "--checkpoint"]);
        let opened = host.open(workspace, ttl);
        write(&opened, "f", "of the writer");
        Self { host, workspace, opened, met: BTreeSet::new() }
    }

    fn id(&self) -> String {
        id_of(&self.opened)
    }

    fn status(&self) -> Value {
        self.host.must(&["workspace", "status", self.workspace])
    }

    /// Tries to publish, and is refused for this.
    fn refused(&mut self, code: &'static str) {
        let (host, id) = (self.host, self.id());
        let count = || host.metric(&format!("publications_refused_total{{reason=\"{code}\"}}"));
        let before = (self.status(), count());
        let (exit, said) = refused(host, &["session", "checkpoint", &id]);
        assert!(exit == 4 && said.contains(code), "{exit}: {said}");
        let after = (self.status(), count());
        for field in ["version", "head", "generation", "writer_session", "hold"] {
            assert_eq!(before.0[field], after.0[field], "{code} changed {field}");
        }
        assert_eq!(after.1, before.1 + 1, "{code}");
        let row = host.must(&["workspace", "history", self.workspace, "--limit", "1"])[0].clone();
        assert_eq!((&row["kind"], &row["detail"]["code"]), (&"refused".into(), &code.into()));
        assert_eq!(
            (&row["detail"]["verb"], &row["session"]),
            (&"publish".into(), &id.clone().into())
        );
        let entries = host.must(&["evidence", "show", "--session", &id]);
        let last = entries.as_array().unwrap().iter().rev().find(|e| e["kind"] == "publication");
        let last = last.unwrap();
        assert_eq!(last["detail"]["answer"]["Err"]["code"], code, "{last:?}");
        // Who lost the lease has nothing to offer any more, and asks all the same.
        let (asked, offered) = (&last["detail"]["asked"], &last["detail"]["offered"]);
        let wish = if asked.is_object() { asked } else { offered };
        assert_eq!(wish["generation"], self.opened["session"]["generation"]);
        let upper = path_of(&self.opened["session"], "upper");
        assert_eq!(std::fs::read_to_string(upper.join("f")).unwrap(), "of the writer");
        self.met.insert(code);
    }

    /// The next session finds what was published; the writer's bytes are where they were.
    fn end(self) -> BTreeSet<&'static str> {
        let next = self.host.must(&["session", "open", "-w", self.workspace]);
        let file = path_of(&next["session"], "merged").join("f");
        assert_eq!(std::fs::read_to_string(file).unwrap(), "published", "{}", self.workspace);
        self.host.must(&["session", "close", &id_of(&next)]);
        assert_eq!(self.status()["version"], 1);
        let upper = path_of(&self.opened["session"], "upper");
        assert_eq!(std::fs::read_to_string(upper.join("f")).unwrap(), "of the writer");
        self.met
    }
}

pub fn run(place: &Place) {
    let mut host = Host::new(place, "h");
    let (sent, resolved) = (Switch::off(&host, "sent"), Switch::off(&host, "resolved"));
    let plan = format!(
        "{};{}",
        sent.plan("authority.publish.after"),
        resolved.plan("authority.resolve.before")
    );
    assert!(host.start(Some(&plan)));
    let mut met = BTreeSet::new();

    let mut fenced = Writer::new(&host, "fenced", &paced_ttl(60));
    host.must(&["fence", &fenced.id(), "--reason", "test", "--wait"]);
    fenced.refused("lease_revoked");
    let next = host.must(&["session", "open", "-w", "fenced", "--ttl", &paced_ttl(60)]);
    fenced.refused("stale_generation");
    host.must(&["session", "close", &id_of(&next)]);
    fenced.refused("stale_generation");
    met.extend(fenced.end());

    let mut silent = Writer::new(&host, "silent", &paced_ttl(2));
    let over = |view: &Value| view["state"] == "PRESERVED";
    host.until(&silent.id(), over);
    silent.refused("lease_expired");
    met.extend(silent.end());

    let mut closed = Writer::new(&host, "closed", &paced_ttl(60));
    host.must(&["session", "close", &closed.id(), "--keep"]);
    host.until(&closed.id(), over);
    closed.refused("lease_released");
    met.extend(closed.end());

    let mut held = Writer::new(&host, "held", &paced_ttl(60));
    host.must(&["workspace", "hold", "-w", "held", "--reason", "test"]);
    host.until(&held.id(), over);
    held.refused("workspace_held");
    let generation = held.status()["generation"].to_string();
    let repair = ["workspace", "repair", "-w", "held", "--accept-generation", &generation];
    host.must(&[&repair[..], &["--reason", "test"]].concat());
    met.extend(held.end());

    met.extend(behind(&host, sent, resolved));
    host.kill_agent();
    met.insert(buried(&mut host));

    let reachable = PUBLISH_REFUSALS.iter().filter(|code| !NOT_BY_A_CALLER.contains(code));
    assert_eq!(met, reachable.map(|code| code.as_str()).collect());
    assert_eq!(host.must(&["evidence", "verify"])["ok"], true);
}

/// Its own publication was committed, the answer was lost, and it goes on as if it had not been.
fn behind(host: &Host, sent: Switch, resolved: Switch) -> BTreeSet<&'static str> {
    let opened = host.open("behind", &paced_ttl(60));
    write(&opened, "f", "published");
    let (sent, resolved) = (sent.on(), resolved.on());
    let (_, said) = refused(host, &["session", "checkpoint", &id_of(&opened)]);
    assert!(said.contains("unknown_publication"), "{said}");
    sent.over();
    write(&opened, "f", "of the writer");
    let mut writer = Writer { host, workspace: "behind", opened, met: BTreeSet::new() };
    writer.refused("version_mismatch");
    resolved.over();
    settled(host, &writer.id());
    host.must(&["session", "close", &writer.id(), "--keep"]);
    writer.end()
}

/// Somebody gives up a revert while it is being offered.
fn buried(host: &mut Host) -> &'static str {
    assert!(host.start(Some("stall=authority.publish.before")), "{}", host.log());
    let host = &*host;
    for text in ["one", "two"] {
        let opened = host.open("w", &paced_ttl(60));
        write(&opened, "f", text);
        host.must(&["session", "close", &id_of(&opened), "--checkpoint"]);
    }
    let count = || host.metric("publications_refused_total{reason=\"key_buried\"}");
    let (head, before) = (host.must(&["workspace", "status", "w"])["head"].clone(), count());
    let said = std::thread::scope(|scope| {
        let revert = ["workspace", "revert", "-w", "w", "--to", "1", "--reason", "a bad build"];
        let revert = scope.spawn(move || refused(host, &revert).1);
        wait(host, "the revert is offered", || !publications(host, false).is_empty());
        let key = publications(host, false)[0]["key"].as_str().unwrap().to_owned();
        let row = host.must(&["publication", "resolve", &key]);
        assert_eq!((&row["state"], &row["why"]), (&"REJECTED".into(), &"key_buried".into()));
        revert.join().unwrap()
    });
    assert!(said.contains("key_buried"), "{said}");
    assert_eq!(count(), before + 1);
    let rows = host.must(&["workspace", "history", "w", "--limit", "1"]);
    let told = (&rows[0]["detail"]["verb"], &rows[0]["detail"]["code"]);
    assert_eq!(told, (&"publish".into(), &"key_buried".into()), "{rows:#}");
    let entries = host.must(&["evidence", "show"]);
    let last = entries.as_array().unwrap().iter().rev().find(|e| e["kind"] == "publication");
    let last = last.unwrap();
    assert_eq!(last["detail"]["answer"]["Err"]["code"], "key_buried", "{last:#}");
    assert_eq!(
        (&last["detail"]["reverts_to"], &last["detail"]["reason"]),
        (&1.into(), &"a bad build".into())
    );
    assert_eq!(host.must(&["workspace", "status", "w"])["head"], head);
    assert_eq!((version(host), stored(host, "f").as_deref()), (2, Some("two")));
    "key_buried"
}
