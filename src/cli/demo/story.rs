//! The first half of the story: three writers, of whom two fall silent and are stopped. The second
//! half is [`super::takeover`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::ask::{Answer, text};
use super::check;
use super::files::Database;
use super::host::Place;
use super::report::{Report, Step, span};
use super::takeover;
use super::writer::Writer;

/// How long anything that should happen at once may take on a loaded machine.
pub(super) const SOON: Duration = Duration::from_secs(5);

/// One write a line; its file is open only while it writes. The beats come from beside it. When
/// its client leaves while it stands stopped, the kernel hangs up on it, as on any job: it lives on.
const A: &str = "while :; do /run/overfence/overfence lease beat >/dev/null; sleep 0.4; done & \
    while read -r x; do if echo \"$x\" >> a.txt; then echo \"wrote $x\"; else echo refused; fi; done";

/// Keeps its file open and never beats.
const C: &str = "exec 3>held.txt; echo x >&3; echo holding; while read -r x; do :; done";

/// What A has written when it is stopped.
pub(super) const WRITTEN: &str = "one\ntwo\n";

/// An open session, as its opening told.
pub(super) struct Session {
    pub(super) id: String,
    pub(super) merged: PathBuf,
    pub(super) upper: PathBuf,
    pub(super) cgroup: PathBuf,
}

/// A writer that was stopped.
pub(super) struct Stopped {
    pub(super) session: Session,
    pub(super) writer: Writer,
    /// Its upper when read-only was proved.
    pub(super) upper: BTreeMap<PathBuf, String>,
    /// Everything that ran in it.
    pub(super) ran: BTreeMap<u32, u64>,
}

/// Tells it. `Err`: why it could not go on.
pub(super) fn tell(place: &Place, report: &mut Report) -> Result<(), String> {
    let database = Database::open(&place.dir.join("state/overfence.db"))?;
    let (a, writer) = report
        .step("A opens and writes", |report, step| a_writes(place, report, step, &database))?;
    let (c, _holder) = report.step("C keeps its file open and never beats", |report, step| {
        c_holds(place, report, step)
    })?;
    let title = "A is stopped; its beats end; its lease runs out";
    let a = report.step(title, |_, step| a_stops(place, step, a, writer))?;
    takeover::tell(place, report, &database, a, &c)
}

/// Asks a verb that has to succeed and enters it into the step.
pub(super) fn must(place: &Place, step: &mut Step, words: &[&str]) -> Result<Answer, String> {
    place.works()?;
    let answer = place.operator().must(words)?;
    step.asked(&answer.asked, answer.took);
    Ok(answer)
}

/// Opens a session and learns where it is.
pub(super) fn open(place: &Place, step: &mut Step, words: &[&str]) -> Result<Session, String> {
    let answer = must(place, step, &[&["session", "open"], words].concat())?;
    let path = |pointer: &str| PathBuf::from(answer.get(pointer));
    let generation = answer.get("/session/generation");
    step.answered = format!("session {}, generation {generation}", answer.get("/session/id"));
    Ok(Session {
        id: answer.get("/session/id"),
        merged: path("/session/merged"),
        upper: path("/session/upper"),
        cgroup: path("/session/cgroup"),
    })
}

fn a_writes(
    place: &Place,
    report: &mut Report,
    step: &mut Step,
    database: &Database,
) -> Result<(Session, Writer), String> {
    let ttl = place.ttl_words();
    let a = open(place, step, &["-w", "demo", "--create", "--owner", "a", "--ttl", &ttl])?;
    report.name(&a.id, "$A");
    step.check(
        "the authority issued generation 1 to a",
        database.is("demo", |row| {
            row.generation == 1 && row.owner == "a" && row.lease == "ACTIVE" && row.version == 0
        }),
    );
    step.check("A's overlay is writable", check::superblock_is("rw", &a.merged));
    let begun = Instant::now();
    let mut writer = Writer::start(&place.operator(), &a.id, A)?;
    for line in WRITTEN.lines() {
        writer.feed(line)?;
        let said = writer.hears(&format!("wrote {line}"), place.ttl + SOON)?;
        step.answered.push_str(&format!("; A: {said:?}"));
    }
    step.asked(&writer.asked, begun.elapsed());
    step.check("A's bytes are in its upper", check::holds(&a.upper.join("a.txt"), WRITTEN));
    let granted = shown(&place.dir, &a.id)?.1;
    let mut renewed = granted;
    let waited = place.until("A's lease is renewed", place.ttl + SOON, || {
        renewed = shown(&place.dir, &a.id)?.1;
        Ok(renewed > granted)
    });
    let seen = format!("session.json: deadline moved by {}", span(nanos(renewed - granted)));
    step.expect("A's beats move its deadline", waited.is_ok(), seen);
    Ok((a, writer))
}

fn c_holds(
    place: &Place,
    report: &mut Report,
    step: &mut Step,
) -> Result<(Session, Writer), String> {
    let ttl = place.ttl_words();
    let c = open(place, step, &["-w", "demo-held", "--create", "--owner", "c", "--ttl", &ttl])?;
    report.name(&c.id, "$C");
    let begun = Instant::now();
    let mut writer = Writer::start(&place.operator(), &c.id, C)?;
    let said = writer.hears("holding", place.ttl + SOON)?;
    step.asked(&writer.asked, begun.elapsed());
    step.answered.push_str(&format!("; C: {said:?}"));
    let open = check::writer_of(&c.cgroup, "held.txt")?;
    let seen = open.map(|(_, seen)| seen);
    step.expect("C holds a descriptor for writing", seen.is_some(), seen.unwrap_or_default());
    Ok((c, writer))
}

fn a_stops(
    place: &Place,
    step: &mut Step,
    a: Session,
    mut writer: Writer,
) -> Result<Stopped, String> {
    check::stop_all(&a.cgroup)?;
    let begun = Instant::now();
    let ran = check::running(&a.cgroup)?;
    step.check("A stands stopped", check::stopped(&a.cgroup));
    let open = check::writer_of(&a.cgroup, "a.txt")?;
    let seen = open.map_or("nothing of A has a.txt open".to_owned(), |(_, seen)| seen);
    step.expect("it is between two writes", seen.starts_with("nothing"), seen.as_str());
    let is = |look: check::Look| look.map(|(ok, _)| ok);
    place.until("A's cgroup is frozen", place.ttl + SOON, || is(check::frozen(&a.cgroup)))?;
    place.until("A's overlay is read-only", SOON, || is(check::superblock_is("ro", &a.merged)))?;
    step.asked("kill -STOP to every process of A, then nothing", begun.elapsed());
    step.check("A's cgroup is frozen", check::frozen(&a.cgroup));
    step.check("A's superblock is read-only", check::superblock_is("ro", &a.merged));
    let upper = check::tree(&a.upper)?;
    step.check("the upper holds what A wrote", check::holds(&a.upper.join("a.txt"), WRITTEN));

    let operator = place.operator();
    let mut view = Value::Null;
    place.until("the agent says PRESERVED", SOON, || {
        view = operator.must(&["session", "inspect", &a.id])?.json;
        Ok(text(&view, "/state") == "PRESERVED")
    })?;
    let frozen = fact(&view, "frozen")?;
    let read_only = fact(&view, "read-only")?;
    let (state, deadline) = shown(&place.dir, &a.id)?;
    step.expect(
        "A could read that its lease is lost",
        state == "lost",
        format!("session.json: {state}"),
    );
    let late = |at: u64| nanos(at.saturating_sub(deadline));
    step.answered = format!(
        "{}\nfrozen {} after the deadline ({} -> {})\nread-only {} after it ({} -> {})",
        text(&view, "/loss"),
        span(late(frozen.at)),
        frozen.asked,
        frozen.answer,
        span(late(read_only.at)),
        read_only.asked,
        read_only.answer,
    );
    step.expect(
        "frozen at the deadline and not before",
        frozen.at >= deadline && late(frozen.at) < Duration::from_millis(500),
        format!("{} after it; the kernel's answer took {} us", span(late(frozen.at)), frozen.took),
    );
    let code = writer.client_ends(SOON)?;
    let told = writer.hears("lease_lost", SOON);
    let seen = told.clone().unwrap_or_else(|e| e);
    let seen = format!("exit code {code}: {}", seen.chars().take(90).collect::<String>());
    step.expect("A's client is told that the lease is lost", code == 125 && told.is_ok(), seen);
    Ok(Stopped { session: a, writer, upper, ran })
}

/// A proved fact, as the agent tells it.
struct Fact {
    asked: String,
    answer: String,
    at: u64,
    took: u64,
}

fn fact(view: &Value, name: &str) -> Result<Fact, String> {
    let facts = view["facts"].as_array().map(Vec::as_slice).unwrap_or_default();
    let fact = facts.iter().find(|fact| fact["fact"] == name);
    let fact = fact.ok_or_else(|| format!("{name} is not among the facts: {facts:?}"))?;
    Ok(Fact {
        asked: text(fact, "/asked"),
        answer: text(fact, "/answer"),
        at: fact["boot_ns"].as_u64().unwrap_or(0),
        took: fact["took_us"].as_u64().unwrap_or(0),
    })
}

fn nanos(n: u64) -> Duration {
    Duration::from_nanos(n)
}

/// What a session's workload is shown: whether its lease is good, and the local deadline in boot
/// clock nanoseconds.
fn shown(dir: &Path, session: &str) -> Result<(String, u64), String> {
    let file = dir.join("run/sessions").join(session).join("inside/session.json");
    let raw = std::fs::read(&file).map_err(|e| format!("{}: {e}", file.display()))?;
    let shown: Value = serde_json::from_slice(&raw).map_err(|e| e.to_string())?;
    let deadline = shown["deadline"].as_u64().ok_or_else(|| format!("no deadline in {shown}"))?;
    Ok((text(&shown, "/state"), deadline))
}
