//! "An outcome is unknown" of docs/OPERATIONS.md, as it is written.

use std::process::{Command, Stdio};

use serde_json::Value;

use super::{WORKSPACE, blocks};
use crate::agent_process::{Host, id_of, path_of};
use crate::host::{Place, Test, paced_ttl};

pub fn tests() -> Vec<Test> {
    vec![Test { name: "as_written_for_an_unknown_outcome", run: unknown_outcomes }]
}

const SECTION: &str = "## An outcome is unknown\n";

/// A writer that sent a publication and a request, heard of neither, and lost the workspace.
fn unknown_outcomes(place: &Place) {
    let mut host = Host::new(place, "h");
    let (sent, resolved) = (host.dir.join("sent"), host.dir.join("resolved"));
    // The agent itself cannot resolve it, as one cannot that does not come back.
    let plan = format!(
        "lose=authority.publish.before@{};lose=authority.resolve.before@{}",
        sent.display(),
        resolved.display()
    );
    assert!(host.start(Some(&plan)));
    let opened = host.open(WORKSPACE, &paced_ttl(60));
    let id = id_of(&opened);
    std::fs::write(path_of(&opened["session"], "merged").join("late"), "unpublished").unwrap();
    host.must(&["request", "begin", &id, "--task", "invoice-7", "--key", "7f3a"]);
    std::fs::write(&sent, "").unwrap();
    std::fs::write(&resolved, "").unwrap();
    assert_eq!(host.ask(&["session", "checkpoint", &id]).0, 4);
    host.must(&["fence", &id, "--reason", "a test", "--wait"]);
    let next = host.open(WORKSPACE, &paced_ttl(60));
    assert_eq!(next["unresolved"].as_array().unwrap().len(), 2, "{next:#}");

    let blocks = blocks(SECTION);
    let headings: Vec<_> = blocks.iter().map(|block| &*block.heading).collect();
    assert_eq!(headings, ["See what is open", "Publications", "External requests"]);
    let script: String = blocks.iter().map(|block| &*block.script).collect();
    let path = std::env::var("PATH").unwrap();
    let here = host.binary.parent().unwrap().display();
    let out = Command::new("bash")
        .args(["-euo", "pipefail", "-c", &script])
        .env("PATH", format!("{here}:{path}"))
        .env("OVERFENCE_SOCKET", host.dir.join("run/overfence.sock"))
        .env("WORKSPACE", WORKSPACE)
        .env("KEY", "7f3a")
        .env("WHO", "carol")
        .env("REASON", "asked them: receipt 17")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    let complained = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}\n{complained}\n{}", host.log());
    for part in ["UNKNOWN", "carol", "key_buried", "SETTLED"] {
        assert!(said.contains(part), "no {part} in {said}");
    }
    let nothing = Value::Array(vec![]);
    assert_eq!(host.must(&["publication", "list"]), nothing);
    assert_eq!(host.must(&["request", "list"]), nothing);
    let row = host.must(&["request", "list", "--all"])[0].clone();
    assert_eq!(
        (&row["assignee"], &row["note"]),
        (&"carol".into(), &"asked them: receipt 17".into())
    );
    // The head is what it was, and the bytes are where they were.
    assert_eq!(host.must(&["workspace", "status", WORKSPACE])["version"], 0);
    let view = host.until(&id, |view| view["unknown"].as_array().unwrap().is_empty());
    let late = path_of(&view, "upper").join("late");
    assert_eq!(std::fs::read_to_string(late).unwrap(), "unpublished");
}
