//! The command line as scripts rely on it: JSON alone on standard output, words on standard error,
//! exit codes, and something to read where a list is empty.

use std::collections::BTreeSet;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::agent_process::{Host, id_of, path_of};
use crate::host::{Place, Test};
use crate::ledger::{losing, with_lost_answer};

pub fn tests() -> Vec<Test> {
    vec![
        Test { name: "every_verb_answers_in_json_alone", run: json_alone },
        Test { name: "an_empty_list_says_so", run: empty_lists },
        Test { name: "exit_codes_tell_what_happened", run: exit_codes },
    ]
}

/// The verbs that do something, by the reference.
fn documented() -> BTreeSet<String> {
    let headings = include_str!("../docs/CLI.md").lines().filter_map(|l| l.strip_prefix("## "));
    let verbs: BTreeSet<String> =
        headings.filter_map(|h| h.strip_prefix("overfence ")).map(str::to_owned).collect();
    let group = |verb: &String| verbs.iter().any(|other| other.starts_with(&format!("{verb} ")));
    verbs.iter().filter(|verb| !group(verb)).cloned().collect()
}

/// What has no answer to give: the daemons, and what writes text for other programs. The demo has a
/// test of its own.
const TEXT: [&str; 6] = ["agent", "keeper", "config default", "completions", "man", "demo"];

struct Asked<'h> {
    host: &'h Host,
    verbs: BTreeSet<String>,
}

impl Asked<'_> {
    /// The answer of a verb, which begins with the words of `verb`.
    fn of(&mut self, verb: &str, rest: &[&str]) -> Value {
        let out = self.lines(verb, rest);
        serde_json::from_slice(&out.stdout).unwrap_or_else(|e| {
            panic!("{verb} {rest:?}: {e}: {:?}", String::from_utf8_lossy(&out.stdout))
        })
    }

    fn lines(&mut self, verb: &str, rest: &[&str]) -> Output {
        self.verbs.insert(verb.to_owned());
        let args: Vec<&str> =
            verb.split(' ').chain(["-o", "json"]).chain(rest.iter().copied()).collect();
        let out = ask(self.host, &args);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{args:?}: {}: {said}\n{}", out.status, self.host.log());
        out
    }
}

fn ask(host: &Host, args: &[&str]) -> Output {
    Command::new(&host.binary)
        .args(args)
        .env("OVERFENCE_SOCKET", host.dir.join("run/overfence.sock"))
        .env("OVERFENCE_CONFIG", &host.config)
        .env("NO_COLOR", "1")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn started(place: &Place) -> Host {
    let mut host = Host::new(place, "h");
    assert!(host.start(Some(&losing(&host))), "{}", host.log());
    host
}

fn json_alone(place: &Place) {
    let host = started(place);
    let mut asked = Asked { host: &host, verbs: BTreeSet::new() };
    let sh = |script| ["--", "/bin/sh", "-c", script];
    let text = |value: &Value| value.as_str().unwrap().to_owned();

    asked.of("workspace create", &["w"]);
    assert_eq!(asked.of("workspace list", &[])[0]["id"], "w");
    // The command's own words come first; the answer is the last line.
    let mut args = vec!["-w", "w"];
    args.extend(sh("echo said; echo bytes > file"));
    let out = asked.lines("run", &args);
    let said = String::from_utf8(out.stdout).unwrap();
    let (first, answer) = said.trim_end().split_once('\n').unwrap();
    let answer: Value = serde_json::from_str(answer).unwrap();
    assert_eq!(
        (first, &answer["outcome"], &answer["exit_code"]),
        ("said", &"published".into(), &0.into())
    );
    assert_eq!(asked.of("workspace status", &["w"])["version"], 1);
    assert!(!asked.of("workspace history", &["w"]).as_array().unwrap().is_empty());

    let opened = asked.of("session open", &["-w", "w", "--ttl", "60s"]);
    let (id, token) = (id_of(&opened), text(&opened["token"]));
    assert_eq!(asked.of("session list", &[])[0]["id"], id.as_str());
    assert_eq!(asked.of("session inspect", &[&id])["state"], "ACTIVE");
    let mut args = vec![id.as_str()];
    args.extend(sh("echo more > more; exit 3"));
    asked.verbs.insert("session exec".to_owned());
    let verb: Vec<&str> = ["session", "exec", "-o", "json"].into_iter().chain(args).collect();
    let out = ask(&host, &verb);
    let answer: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((out.status.code(), &answer["exit_code"]), (Some(3), &3.into()));
    assert_eq!(asked.of("lease beat", &[&id, "--token", &token])["state"], "active");
    let lease = asked.of("lease list", &[])[0].clone();
    assert_eq!(lease["session"], id.as_str());
    let ticket = host.dir.join("ticket");
    std::fs::write(&ticket, text(&opened["ticket"])).unwrap();
    assert_eq!(asked.of("ticket verify", &[ticket.to_str().unwrap()])["session"], id.as_str());
    assert_eq!(asked.of("session checkpoint", &[&id])["at"]["version"], 2);
    let key = text(&asked.of("publication list", &["-w", "w", "--all"])[0]["key"]);
    assert_eq!(asked.of("publication show", &[&key])["state"], "COMMITTED");
    assert_eq!(asked.of("publication resolve", &[&key])["version"], 2);
    with_lost_answer(&host, &opened, |key| {
        assert_eq!(asked.of("publication assign", &[key, "ann"])["assignee"], "ann");
    });
    let task = ["--task", "t", "--key", "k", "--about", "a test"];
    assert_eq!(asked.of("request begin", &[&[&*id], &task[..]].concat())["result"], "begun");
    assert_eq!(asked.of("request assign", &["k", "ann", "-w", "w"])["assignee"], "ann");
    assert_eq!(asked.of("request ack", &["k", "done", "-w", "w"])["state"], "SETTLED");
    let why = ["k", "done", "-w", "w", "--reason", "asked"];
    assert_eq!(asked.of("request resolve", &why)["settled_how"], "ack");
    assert_eq!(asked.of("request list", &["-w", "w", "--all"])[0]["outcome"], "done");
    asked.of("fence", &[&id, "--wait", "--reason", "a test"]);
    asked.of("readmit", &[&id, "--authorised-by", "ann", "--reason", "a test"]);
    asked.of("session close", &[&id, "--checkpoint"]);

    let opened = asked.of("session open", &["-w", "w", "--ttl", "60s"]);
    std::fs::write(path_of(&opened["session"], "merged").join("late"), "late").unwrap();
    let id = id_of(&opened);
    asked.of("lease revoke", &[&text(&opened["session"]["lease"]), "--reason", "a test"]);
    host.until(&id, |view| view["state"] == "PRESERVED");
    assert_eq!(asked.of("preserved list", &[])[0]["session"], id.as_str());
    asked.of("preserved keep", &[&id, "--until", "100h"]);
    let bundle = text(&asked.of("preserved export", &[&id])["path"]);
    asked.of("bundle inspect", &[&bundle]);
    asked.of("bundle verify", &[&bundle]);
    let told = asked.of("session diff", &[&id]);
    assert_eq!(
        (&told["changes"][0]["path"], &told["summary"]["added"]),
        (&"late".into(), &1.into())
    );
    assert_eq!(asked.of("bundle diff", &[&bundle])["changes"], told["changes"]);
    asked.of("preserved discard", &[&id, "--yes"]);
    let by = ["-w", "w", "--authorised-by", "ann", "--reason", "a test"];
    let back = id_of(&asked.of("bundle apply", &[&[&*bundle], &by[..]].concat()));
    asked.of("session close", &[&back, "--checkpoint"]);

    assert_eq!(asked.of("workspace verify", &["-w", "w"])["ok"], true);
    asked.of("workspace revert", &["-w", "w", "--to", "1"]);
    let tree = host.dir.join("tree");
    std::fs::create_dir(&tree).unwrap();
    asked.of("workspace import", &["-w", "y", "--directory", tree.to_str().unwrap()]);
    asked.of("workspace create", &["x"]);
    assert_eq!(asked.of("workspace hold", &["-w", "x", "--reason", "a test"])["hold"], "a test");
    let accept = ["-w", "x", "--accept-generation", "3", "--reason", "a test"];
    assert_eq!(asked.of("workspace repair", &accept)["generation"], 3);
    asked.of("workspace delete", &["-w", "x", "--yes"]);

    asked.of("gc", &["--dry-run"]);
    assert!(asked.of("evidence show", &["--last", "3"]).as_array().unwrap().len() == 3);
    asked.of("evidence verify", &[]);
    let events = asked.lines("events", &["--since", "0"]).stdout;
    for line in String::from_utf8(events).unwrap().lines() {
        assert!(serde_json::from_str::<Value>(line).unwrap().is_object(), "{line}");
    }
    assert_eq!(asked.of("doctor", &[])["ok"], true);
    asked.of("config check", &[]);
    asked.of("config show", &[]);
    asked.of("status", &[]);
    assert_eq!(asked.of("breaker show", &[])["open"], false);
    assert_eq!(asked.of("breaker reset", &["--reason", "a test"])["open"], false);
    let copy = host.dir.join("copy").display().to_string();
    assert_eq!(asked.of("backup", &["--dest", &copy, "--with-keys"])["keys"], true);
    let elsewhere = host.dir.join("elsewhere.toml");
    std::fs::write(&elsewhere, format!("state_dir = {:?}\n", host.dir.join("elsewhere"))).unwrap();
    let args = ["--from", &copy, "--config", elsewhere.to_str().unwrap(), "--yes"];
    assert_eq!(asked.of("restore", &args)["backup"]["keys"], true);
    asked.of("drain", &["--yes"]);

    let known: BTreeSet<String> =
        asked.verbs.iter().cloned().chain(TEXT.map(str::to_owned)).collect();
    assert_eq!(known, documented(), "a verb of docs/CLI.md that is not asked here, or the reverse");
}

fn empty_lists(place: &Place) {
    let host = started(place);
    for (verb, word) in [
        ("workspace list", "workspace"),
        ("session list", "session"),
        ("lease list", "lease"),
        ("preserved list", "preserved"),
        ("publication list", "publication"),
        ("request list", "request"),
    ] {
        let words: Vec<&str> = verb.split(' ').collect();
        let (out, json) = (ask(&host, &words), ask(&host, &[&words[..], &["-o", "json"]].concat()));
        assert_eq!(String::from_utf8_lossy(&json.stdout).trim(), "[]", "{verb}");
        assert_eq!(String::from_utf8_lossy(&json.stderr), "", "{verb}");
        let said = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
        assert!(said.contains(word), "{verb} leaves its reader with {said:?}");
    }
}

fn exit_codes(place: &Place) {
    let mut host = started(place);
    let code = |host: &Host, args: &[&str]| {
        let out = ask(host, args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(said.is_empty(), out.status.success(), "{args:?}: {said:?}");
        out.status.code().unwrap()
    };
    let opened = host.open("w", "60s");
    let id = id_of(&opened);
    std::fs::write(path_of(&opened["session"], "merged").join("bytes"), "bytes").unwrap();
    let held = std::fs::File::create(path_of(&opened["session"], "merged").join("held")).unwrap();

    assert_eq!(code(&host, &["status", "--quiet"]), 0);
    assert_eq!(code(&host, &["session", "inspect"]), 2, "an argument is missing");
    assert_eq!(code(&host, &["session", "inspect", "s-nobody"]), 3);
    // To setresuid(2) it means to stay who one is: root.
    let nobodys = ["session", "open", "-w", "x", "--create", "--user", "4294967295"];
    assert_eq!(code(&host, &nobodys), 2);
    for ids in [r#""uid":4294967295,"gid":1000"#, r#""uid":1000,"gid":4294967295"#] {
        let body = format!(r#"{{"workspace":"x","create":{{"id":"x"}},{ids}}}"#);
        let answer = host.http("POST", "/v1/sessions", &body);
        assert!(answer.status >= 400 && answer.body.contains("no id"), "{answer:?}");
    }
    let keys = host.dir.join("state/keys");
    let keys = keys.to_str().unwrap();
    assert_eq!(code(&host, &["workspace", "create", "k", "--lower", keys]), 2, "keys would get in");
    assert_eq!(code(&host, &["session", "open", "-w", "w"]), 4, "the lease is held");
    assert_eq!(code(&host, &["lease", "beat", &id, "--token", "no"]), 5);
    assert_eq!(code(&host, &["session", "exec", &id, "--", "/no/such/program"]), 127);
    assert_eq!(code(&host, &["run", "-w", "w", "--", "true"]), 125, "overfence's own failure");
    assert_eq!(code(&host, &["run", "--no-such-flag"]), 125);
    // Of the two facts that are asked for, one cannot be had while a descriptor is open for writing.
    let fence = ["fence", &id, "--to", "read-only", "--on-busy", "hold", "--wait=1s"];
    assert_eq!(code(&host, &fence), 8);
    assert_eq!(code(&host, &["session", "checkpoint", &id]), 4, "the stale writer's is refused");
    drop(held);
    assert_eq!(code(&host, &["fence", &id, "--to", "read-only", "--wait=30s"]), 0);

    let agent = nix::unistd::Pid::from_raw(host.agent_pid().cast_signed());
    nix::sys::signal::kill(agent, nix::sys::signal::Signal::SIGSTOP).unwrap();
    assert_eq!(code(&host, &["status", "--timeout", "200ms"]), 7);
    nix::sys::signal::kill(agent, nix::sys::signal::Signal::SIGCONT).unwrap();
    host.stop();
    assert_eq!(code(&host, &["status"]), 6);
}
