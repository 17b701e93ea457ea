//! "Handle a stale writer" of docs/OPERATIONS.md: what is written there is what is run here, word by
//! word, against a real agent. The tests bring about the incident and set the variables that the
//! document names.

mod outcomes;

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::agent_process::{Host, has, id_of, path_of};
use crate::host::{Place, Test, paced, paced_ttl};

pub fn tests() -> Vec<Test> {
    let mut all = vec![
        Test { name: "every_command_of_it_is_run", run: all_are_run },
        Test { name: "as_written_for_a_silent_writer", run: silent },
        Test { name: "as_written_for_a_writer_whose_lease_is_good", run: revoked },
        Test { name: "as_written_for_a_writer_that_goes_on", run: readmitted },
        Test { name: "its_verification_notices_what_is_wrong", run: verification_can_fail },
    ];
    all.extend(outcomes::tests());
    all
}

const DOCUMENT: &str = include_str!("../docs/OPERATIONS.md");
const SECTION: &str = "## Handle a stale writer\n";

/// A fenced code block, and the heading that it stands below.
#[derive(Debug)]
pub struct Block {
    pub heading: String,
    pub script: String,
}

/// The shell blocks of a section, in order. What is an example and not run is marked as text.
pub fn blocks(section: &str) -> Vec<Block> {
    let (_, section) = DOCUMENT.split_once(section).expect("the section is there");
    let (mut heading, mut open, mut found) = (String::new(), false, Vec::<Block>::new());
    let mut example = false;
    for line in section.lines().take_while(|line| !line.starts_with("## ")) {
        match (line.trim_start(), open) {
            (fence, _) if example => example = !fence.starts_with("```"),
            ("```text", false) => example = true,
            (fence, true) if fence.starts_with("```") => open = false,
            (code, true) => {
                let block = found.last_mut().expect("an open one");
                block.script.push_str(code);
                block.script.push('\n');
            }
            (fence, false) if fence.starts_with("```") => {
                assert_eq!(fence, "```sh", "a block that would not be run");
                open = true;
                found.push(Block { heading: heading.clone(), script: String::new() });
            }
            (text, false) => {
                if let Some(title) = text.strip_prefix("### ") {
                    heading = title.to_owned();
                }
            }
        }
    }
    assert!(!open && !example, "a block without an end");
    found
}

/// The headings of what is only for some incidents.
const GOOD_LEASE: &str = "Stop a writer whose lease is good";
const GO_ON: &str = "Let it go on instead";

/// A workspace with one publication, and a session with bytes that no publication holds.
struct Incident {
    host: Host,
    session: String,
    published: Value,
    /// Who waits for the command in the session.
    client: Child,
}

const WORKSPACE: &str = "team/repo";

impl Incident {
    /// Its writer lives for `ttl` without a sign of life.
    fn new(place: &Place, ttl: &str) -> Self {
        let mut host = Host::new(place, "h");
        host.start_keeper();
        assert!(host.start(None));
        let first = host.open(WORKSPACE, "60s");
        std::fs::write(path_of(&first["session"], "merged").join("good"), "published").unwrap();
        host.must(&["session", "close", &id_of(&first), "--checkpoint"]);
        let published = host.must(&["workspace", "status", WORKSPACE]);
        let opened = host.open(WORKSPACE, ttl);
        let session = id_of(&opened);
        let client = Command::new(&host.binary)
            .args(["session", "exec", &session, "--"])
            .args(["sh", "-c", "echo unpublished > late; exec sleep 600"])
            .env("OVERFENCE_SOCKET", host.dir.join("run/overfence.sock"))
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let late = path_of(&opened["session"], "upper").join("late");
        let begun = Instant::now();
        while !std::fs::read_to_string(&late).is_ok_and(|said| said == "unpublished\n") {
            assert!(begun.elapsed() < paced(Duration::from_secs(5)), "no writer: {}", host.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        std::fs::create_dir(host.dir.join("place")).unwrap();
        Self { host, session, published, client }
    }

    /// One whose writer was silent for too long.
    fn stale(place: &Place) -> Self {
        let incident = Self::new(place, &paced_ttl(2));
        incident.host.until(&incident.session, |view| has(view, "read-only"));
        incident
    }

    /// Runs a script as the document says: in one shell that ends at the first failure.
    fn shell(&self, script: &str) -> Output {
        let path = std::env::var("PATH").unwrap();
        let here = self.host.binary.parent().unwrap().display();
        Command::new("bash")
            .args(["-euc", script])
            .env("PATH", format!("{here}:{path}"))
            .env("OVERFENCE_SOCKET", self.host.dir.join("run/overfence.sock"))
            .env("WORKSPACE", WORKSPACE)
            .env("OWNER", "next")
            .env("REASON", "the runbook's test")
            .env("PLACE", self.place())
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    /// Whether the command in the session runs, stands frozen, or is gone.
    fn writer(&self) -> &'static str {
        let view = self.host.must(&["session", "inspect", &self.session]);
        let events = path_of(&view, "cgroup").join("cgroup.events");
        let events = std::fs::read_to_string(events).unwrap_or_default();
        match (events.contains("populated 1"), events.contains("frozen 1")) {
            (true, true) => "frozen",
            (true, false) => "running",
            (false, _) => "gone",
        }
    }

    fn place(&self) -> PathBuf {
        self.host.dir.join("place")
    }

    /// Runs the blocks below these headings, in the document's order; what each said.
    fn follow(&self, headings: &[&str]) -> Vec<String> {
        let wanted: Vec<_> =
            blocks(SECTION).into_iter().filter(|b| headings.contains(&&*b.heading)).collect();
        let script: Vec<_> =
            wanted.iter().map(|block| format!("{}echo '{NEXT}'\n", block.script)).collect();
        let out = self.shell(&script.concat());
        let said = String::from_utf8(out.stdout).unwrap();
        let complained = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{}\n{said}\n{complained}\n{}", out.status, self.host.log());
        let said: Vec<_> = said.split_terminator(&format!("{NEXT}\n")).map(str::to_owned).collect();
        assert_eq!(said.len(), wanted.len());
        said
    }
}

/// Between the blocks, so that each one's output can be told from the others'.
const NEXT: &str = "--- next block ---";

fn all_are_run(_: &Place) {
    let blocks = blocks(SECTION);
    let headings: Vec<_> = blocks.iter().map(|block| &*block.heading).collect();
    let (detect, verify) = ("Detect", "Verify");
    let (procedure, decide, impact) = ("Procedure", "Decide", "Impact if nobody decides");
    assert_eq!(
        headings,
        [
            GOOD_LEASE, detect, procedure, procedure, procedure, verify, decide, decide, GO_ON,
            impact
        ],
        "what the tests below run is no longer the whole document"
    );
    // A command in the text is one that is run, too.
    let (_, section) = DOCUMENT.split_once(SECTION).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let spans = section.split("```").step_by(2).flat_map(|text| text.split('`').skip(1).step_by(2));
    let commands: Vec<_> = spans.filter(|span| span.starts_with("overfence ")).collect();
    assert!(!commands.is_empty());
    for command in commands {
        assert!(blocks.iter().any(|block| block.script.contains(command)), "{command} is not run");
    }
}

/// The way of a session whose bytes are given up in the end.
const WHOLE: [&str; 5] = ["Detect", "Procedure", "Verify", "Decide", "Impact if nobody decides"];

fn silent(place: &Place) {
    let mut incident = Incident::stale(place);
    assert_eq!(incident.writer(), "frozen");
    let said = incident.follow(&WHOLE);
    assert!(said[0].contains("no sign of life"), "{}", said[0]);
    handled(&mut incident, &said);
}

fn revoked(place: &Place) {
    let mut incident = Incident::new(place, "10m");
    assert_eq!(incident.writer(), "running");
    let said = incident.follow(&[&[GOOD_LEASE][..], &WHOLE].concat());
    assert!(said[0].contains("effective"), "{}", said[0]);
    assert!(said[1].contains("the runbook's test"), "{}", said[1]);
    handled(&mut incident, &said[1..]);
}

/// What the document promises, asked by other means.
fn handled(incident: &mut Incident, said: &[String]) {
    let [detect, stop, save, opened, verify, keep, give_up, impact] = said else {
        panic!("{said:#?}")
    };
    let stale = &*incident.session;
    let bundle = incident.place().join("bundle").display().to_string();
    for (part, wanted) in [
        (detect, "reconciled "),
        (detect, stale),
        (detect, "PRESERVED"),
        (stop, "read-only"),
        (save, &*bundle),
        (verify, "overfence: stale_generation: "),
        (verify, "whole"),
        (keep, stale),
        (give_up, "true"),
    ] {
        assert!(part.contains(wanted), "no {wanted:?} in {part}");
    }
    assert_eq!(opened, "", "the lease token is shown");
    assert!(!impact.contains(stale), "{impact}");
    let host = &incident.host;
    let now = host.must(&["workspace", "status", WORKSPACE]);
    assert_eq!((&now["version"], &now["head"]), (&Value::from(1), &incident.published["head"]));
    assert_eq!(now["generation"], 3);
    let writer = std::fs::read(incident.place().join("writer.json")).unwrap();
    let writer: Value = serde_json::from_slice(&writer).unwrap();
    assert_eq!(now["writer_session"], writer["session"]["id"]);
    let history = host.must(&["workspace", "history", WORKSPACE]);
    let refused = &history[0];
    assert_eq!(
        (&refused["kind"], &refused["session"], &refused["detail"]["code"]),
        (&"refused".into(), &stale.into(), &"stale_generation".into()),
        "{history:#}"
    );
    // Writer and bytes are gone; the bytes are in the bundle, and only there.
    incident.client.wait().unwrap();
    assert!(!host.dir.join("state/sessions").join(stale).exists());
    let bundle = host.must(&["bundle", "inspect", &bundle]);
    assert!(bundle.to_string().contains("late"), "{bundle:#}");
    host.must(&["session", "close", &id_of(&writer)]);
}

fn readmitted(place: &Place) {
    let mut incident = Incident::stale(place);
    incident.follow(&["Detect", GO_ON]);
    assert_eq!(incident.writer(), "running");
    let view = incident.host.must(&["session", "inspect", &incident.session]);
    assert_eq!((&view["state"], &view["generation"]), (&"ACTIVE".into(), &3.into()), "{view:#}");
    incident.host.must(&["session", "close", &incident.session, "--discard", "--yes"]);
    incident.client.wait().unwrap();
}

/// Its lines fail where nobody writes, where the session that is called stale is not, and where
/// nothing shows who moved the head.
fn verification_can_fail(place: &Place) {
    let mut incident = Incident::stale(place);
    let verify =
        blocks(SECTION).into_iter().find(|block| block.heading == "Verify").unwrap().script;
    let run = |stale: &str, script: &str| {
        let out = incident.shell(&format!("STALE={stale}\nset -x\n{script}"));
        (out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let (ok, trace) = run(&incident.session, &verify);
    assert!(!ok && trace.contains(".may_publish") && !trace.contains(".expected"), "{trace}");
    let writer = incident.host.open(WORKSPACE, "10m");
    let (ok, trace) = run(&incident.session, &verify);
    assert!(ok, "{trace}");
    let blind = verify.replace("overfence workspace history \"$WORKSPACE\" -o json", "echo '[]'");
    let (ok, trace) = run(&incident.session, &blind);
    assert!(!ok && trace.contains(".detail.at") && !trace.contains("checkpoint"), "{trace}");
    std::fs::write(path_of(&writer["session"], "merged").join("new"), "x").unwrap();
    let (ok, trace) = run(&id_of(&writer), &verify);
    assert!(!ok && trace.contains("test 0 = 4"), "{trace}");
    incident.host.must(&["session", "close", &id_of(&writer), "--checkpoint"]);
    incident.host.must(&["preserved", "discard", &incident.session, "--yes"]);
    incident.client.wait().unwrap();
}
