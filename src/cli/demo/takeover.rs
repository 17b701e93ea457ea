//! The second half of the story: B takes over, a foreign hand thaws A, and A's bytes are kept and
//! given up.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::ask::{Answer, text};
use super::check;
use super::files::{self, Database};
use super::host::Place;
use super::report::{Report, Step, span};
use super::story::{SOON, Session, Stopped, WRITTEN, must, open};

/// How often the foreign administrator tries until A reports.
const TRIES: usize = 5;

/// How long A has each time.
const TURN: Duration = Duration::from_millis(700);

/// Tells it from the takeover on.
pub(super) fn tell(
    place: &Place,
    report: &mut Report,
    database: &Database,
    mut a: Stopped,
    c: &Session,
) -> Result<(), String> {
    let layer = report.step("B takes over and publishes", |report, step| {
        b_publishes(place, report, step, database)
    })?;
    report.step("A foreign administrator thaws A", |_, step| thawed(place, step, &mut a))?;
    report
        .step("A asks to publish", |_, step| refused(place, step, database, &a.session, &layer))?;
    report.step("C, which held its file open", |_, step| held(place, step, c))?;
    report.step("The head is B's", |_, step| head(place, step, database, &layer))?;
    report.step("A's bytes are exported, then given up", |_, step| disposed(place, step, &a))?;
    report.step("The evidence holds together", |_, step| evidence(place, step, database))
}

fn b_publishes(
    place: &Place,
    report: &mut Report,
    step: &mut Step,
    database: &Database,
) -> Result<String, String> {
    let b = open(place, step, &["-w", "demo", "--owner", "b"])?;
    report.name(&b.id, "$B");
    must(place, step, &["session", "exec", &b.id, "--", "/bin/sh", "-c", "echo mine > b.txt"])?;
    let done = must(place, step, &["session", "checkpoint", &b.id])?;
    let layer = done.get("/layer");
    let (outcome, version) = (done.get("/outcome"), done.get("/at/version"));
    step.answered.push_str(&format!("\n{outcome} as version {version}: {layer}"));
    step.check(
        "the authority has B's layer as version 1 of generation 2",
        database.is("demo", |row| {
            (row.generation, row.version) == (2, 1)
                && row.owner == "b"
                && row.head == [layer.as_str()]
        }),
    );
    step.check(
        "the layer holds B's file and nothing of A's",
        files::layer_is(&place.dir.join("state"), &layer, "b.txt", "a.txt"),
    );
    Ok(layer)
}

fn thawed(place: &Place, step: &mut Step, a: &mut Stopped) -> Result<(), String> {
    let cgroup = &a.session.cgroup;
    // It lies in A's pipe until A runs again.
    a.writer.feed("three")?;
    let mut said = Err(String::new());
    let mut tries = 0;
    let mut begun = Instant::now();
    let mut frozen_again = Duration::ZERO;
    while said.is_err() && tries < TRIES {
        place.works()?;
        tries += 1;
        begun = Instant::now();
        check::thaw(cgroup)?;
        frozen_again = place.until("A is frozen again", SOON, || Ok(check::frozen(cgroup)?.0))?;
        said = a.writer.hears("refused", TURN);
    }
    step.asked(
        &format!("kill -CONT to every process of A; echo 0 > cgroup.freeze ({tries} time(s))"),
        begun.elapsed(),
    );
    let reported = said?;
    let errno = a.writer.hears("Read-only file system", TURN);
    step.answered = format!("A: {reported:?}; {}", errno.clone().unwrap_or_else(|e| e));
    step.expect(
        "the kernel refused A's write with EROFS",
        errno.is_ok(),
        errno.unwrap_or_else(|e| e),
    );
    step.check("no byte of it is in the upper", check::unchanged(&a.session.upper, &a.upper));
    step.check("the superblock is still read-only", check::superblock_is("ro", &a.session.merged));
    step.check("A is frozen again", check::frozen(cgroup));
    let mut thaws = 0;
    let recorded = place.until("the foreign thaw is in the evidence", SOON, || {
        let words = ["evidence", "show", "--session", a.session.id.as_str()];
        thaws = events(&place.operator().must(&words)?, "foreign_thaw").len();
        Ok(thaws > 0)
    });
    step.expect(
        "the agent recorded the foreign thaw",
        recorded.is_ok(),
        format!("{thaws} entr(ies) foreign_thaw; frozen again after {}", span(frozen_again)),
    );
    a.ran.extend(check::running(cgroup)?);
    Ok(())
}

/// The events of a kind in an evidence listing.
fn events<'a>(listing: &'a Answer, kind: &str) -> Vec<&'a Value> {
    let entries = listing.json.as_array().map(Vec::as_slice).unwrap_or_default();
    let events = entries.iter().filter_map(|entry| entry.pointer("/detail/event"));
    events.filter(|event| event["event"] == kind).collect()
}

fn refused(
    place: &Place,
    step: &mut Step,
    database: &Database,
    a: &Session,
    layer: &str,
) -> Result<(), String> {
    place.works()?;
    let before = database.workspace("demo")?;
    let answer = place.operator().ask(&["session", "checkpoint", &a.id])?;
    step.asked(&answer.asked, answer.took);
    step.answered = format!("exit code {}: {}", answer.code, answer.said);
    step.expect(
        "the exit code says that it was refused",
        answer.code == 4,
        answer.code.to_string(),
    );
    let reason = answer.said.split(':').next().unwrap_or_default().to_owned();
    step.expect("the reason is stale_generation", reason == "stale_generation", reason);
    let named = answer.said.contains("generation 2, owner b");
    step.expect("the present owner is named", named, if named { "b" } else { "nobody" });
    step.check(
        "the authority changed nothing",
        database.is("demo", |row| *row == before && row.head == [layer]),
    );
    Ok(())
}

fn held(place: &Place, step: &mut Step, c: &Session) -> Result<(), String> {
    // Its lease began a little after A's; on a quick machine it has not run out yet.
    let operator = place.operator();
    place.until("C's lease is lost and its holder is named", place.ttl + SOON, || {
        let view = operator.must(&["session", "inspect", &c.id])?.json;
        Ok(text(&view, "/state") == "PRESERVED")
    })?;
    let view = must(place, step, &["session", "inspect", &c.id])?;
    let listing = must(place, step, &["evidence", "show", "--session", &c.id])?;
    let busy = events(&listing, "busy");
    let answer = busy.first().map(|event| text(event, "/proof/answer")).unwrap_or_default();
    let facts: Vec<String> = view.json["facts"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|fact| text(fact, "/fact"))
        .collect();
    let (facts, missing) = (facts.join(", "), view.get("/missing"));
    let holders = view.json["holders"].as_array().cloned().unwrap_or_default();
    let names = holders.iter().map(|holder| {
        let part = |name: &str| text(holder, &format!("/{name}"));
        format!("pid {} ({}) {} {}", part("pid"), part("command"), part("how"), part("what"))
    });
    let names = names.collect::<Vec<_>>().join("; ");
    step.answered = format!("proved: {facts}; missing: {missing}; held by {names}");
    let gate = view.get("/gate/state");
    let gated = facts.split(", ").any(|fact| fact == "gated");
    let others = facts.split(", ").filter(|fact| *fact != "gated").collect::<Vec<_>>().join(", ");
    step.expect("only frozen is claimed", others == "frozen" && missing == "read-only", facts);
    if gate != "absent" {
        let (refused, seen) = late_write(place, c)?;
        step.expect(
            "the lease gate refuses a write into C's overlay",
            gated && refused,
            format!("gate {gate}: {seen}"),
        );
    }
    step.expect("the kernel refused read-only with EBUSY", answer == "EBUSY", answer);
    let open = check::writer_of(&c.cgroup, "held.txt")?;
    let (pid, seen) = open.unwrap_or((0, "nobody holds held.txt".to_owned()));
    let named = holders.iter().any(|holder| {
        holder["pid"] == pid
            && holder["how"] == "descriptor"
            && holder["inside"] == true
            && text(holder, "/what").ends_with("held.txt")
            && !text(holder, "/command").is_empty()
    });
    step.expect("the holder named is the one that holds it", pid != 0 && named, seen);
    step.check("C's cgroup is frozen", check::frozen(&c.cgroup));
    step.check("C's superblock is still writable", check::superblock_is("rw", &c.merged));
    Ok(())
}

/// A write of ours into C's overlay. Its superblock is writable, so the errno alone does not say who
/// refused: the gate's own evidence does. And what it told.
fn late_write(place: &Place, c: &Session) -> Result<(bool, String), String> {
    let operator = place.operator();
    let gate =
        || Ok::<_, String>(operator.must(&["session", "inspect", &c.id])?.json["gate"].take());
    let before = gate()?;
    let answer = std::fs::File::create(c.merged.join("late.txt")).map(drop);
    let errno = answer.as_ref().err().and_then(std::io::Error::raw_os_error);
    if errno != Some(libc::EROFS) {
        let seen = answer.map_or_else(|e| e.to_string(), |()| "it was let".to_owned());
        return Ok((false, seen));
    }
    // A name is made in the overlay's root.
    let root = std::fs::metadata(&c.merged).map_err(|e| format!("stat {:?}: {e}", c.merged))?;
    let mut seen = String::new();
    let told = place.until("the gate tells of it", SOON, || {
        let now = gate()?;
        let last = &now["last"];
        seen = if now["told"] == true {
            format!("EROFS; told: {} by pid {} ({})", last["op"], last["pid"], last["command"])
        } else {
            // Another agent of this host is told. What the kernel counts is shown to all.
            format!("EROFS; counted: {} name(s)", now["refused"]["names"])
        };
        let fresh = *last != before["last"] && last["op"] == "names" && last["inode"] == root.ino();
        let counted = now["refused"]["names"].as_u64() > before["refused"]["names"].as_u64();
        Ok(counted && (fresh || now["told"] == false))
    });
    let told = told.inspect_err(|why| seen = format!("{seen}; {why}"));
    Ok((told.is_ok(), seen))
}

fn head(place: &Place, step: &mut Step, database: &Database, layer: &str) -> Result<(), String> {
    let view = must(place, step, &["workspace", "status", "demo"])?;
    let (generation, owner) = (view.get("/generation"), view.get("/lease/owner"));
    let head = view.get("/head/0");
    step.answered = format!(
        "version {}, head {head}, generation {generation} of {owner}",
        view.get("/version")
    );
    step.expect(
        "status says head and generation of B",
        head == layer && generation == "2" && owner == "b",
        format!("generation {generation} of {owner}"),
    );
    step.check(
        "the authority's file says the same",
        database.is("demo", |row| row.generation == 2 && row.head == [layer] && row.owner == "b"),
    );
    Ok(())
}

fn disposed(place: &Place, step: &mut Step, a: &Stopped) -> Result<(), String> {
    let id = a.session.id.as_str();
    let done = must(place, step, &["preserved", "export", id, "--dispose", "--yes"])?;
    let bundle = done.get("/path");
    let verified = must(place, step, &["bundle", "verify", &bundle])?;
    step.answered = format!(
        "stable: {}, verified: {}, of generation {}; the session is {}",
        done.get("/stable"),
        verified.get("/verified"),
        verified.get("/provenance/generation"),
        done.get("/session/state"),
    );
    let sound = verified.get("/verified") == "true" && done.get("/stable") == "true";
    step.expect("the bundle is verified and stable", sound, bundle.as_str());
    step.check(
        "A's bytes are in the bundle",
        files::bundle_holds(Path::new(&bundle), "a.txt", WRITTEN),
    );
    step.check(
        "nothing of A is left",
        files::nothing_left(&place.dir, &a.session.cgroup, id, &a.ran),
    );
    Ok(())
}

fn evidence(place: &Place, step: &mut Step, database: &Database) -> Result<(), String> {
    let report = must(place, step, &["evidence", "verify"])?;
    let (entries, anchors) = (report.get("/entries"), report.get("/anchors"));
    step.answered = format!("chain of {entries} entries and {anchors} anchors verified");
    let whole = report.get("/ok") == "true";
    let seen = if whole { report.get("/head") } else { report.get("/fault") };
    step.expect("the chain is whole", whole, seen);
    let rows = database.evidence()?;
    let told = entries.parse::<u64>().unwrap_or(0);
    // What was written since it was asked only adds.
    let seen = format!("{rows} rows in the authority's file");
    step.expect("every row was read", told > 0 && rows >= told, seen);
    let staff = place.staff();
    let working = place.works();
    let seen = working.clone().err().unwrap_or_else(|| format!("{staff:?}"));
    step.expect("agent and keeper ran all the time", working.is_ok() && staff.len() == 2, seen);
    Ok(())
}
