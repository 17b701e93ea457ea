//! The committed table: what each shape is expected to show. docs/WRITERS.md shows the same.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Deserialize;

const TABLE: &str = include_str!("expected.toml");
const PAGE: &str = include_str!("../../docs/WRITERS.md");
const BEGIN: &str = "<!-- The table: tests-privileged/writers/expected.toml -->\n";
const END: &str = "<!-- The table ends -->\n";

/// Whether bytes land in the upper once a fact is proved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lands {
    /// None does.
    Nothing,
    /// What the kernel had begun may still land; nothing that was asked for later does.
    Begun,
    /// Writing goes on.
    GoesOn,
}

impl Lands {
    const fn words(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Begun => "what was begun",
            Self::GoesOn => "**all**",
        }
    }

    /// Whether what was seen is within what is expected. What was begun may be over already.
    pub fn covers(self, seen: Self) -> bool {
        self == seen || self == Self::Begun && seen == Self::Nothing
    }
}

/// When a fact is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum When {
    /// By itself.
    Yes,
    /// Once the system call in progress has run to its end, with all its bytes.
    CallEnds,
    /// Only when a holder outside the session lets go.
    HolderEnds,
}

impl When {
    const fn words(self) -> &'static str {
        match self {
            Self::Yes => "yes",
            Self::CallEnds => "when the call has ended",
            Self::HolderEnds => "when the holder has ended",
        }
    }
}

/// What a fence of one shape shows.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Row {
    pub frozen: When,
    /// Whom the EBUSY names, each kind once; empty: read-only was granted with the session frozen.
    pub busy: Vec<String>,
    /// After `frozen`, until read-only.
    pub after_frozen: Lands,
    /// After `sealed`, which it is by a course of its own; not told of whom read-only is granted.
    #[serde(default)]
    pub sealed: Option<Lands>,
    pub killed: When,
    /// Whom the EBUSY names after the kill; empty: read-only was granted.
    pub busy_after_kill: Vec<String>,
    /// After `killed`, until read-only.
    pub after_killed: Lands,
    pub gone: When,
}

/// Rows of one shape.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Entry {
    name: String,
    what: String,
    #[serde(flatten)]
    everywhere: Row,
    /// Another row on kernels before the given one.
    #[serde(default)]
    before: BTreeMap<String, Row>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    shape: Vec<Entry>,
}

fn table() -> Vec<Entry> {
    toml::from_str::<Table>(TABLE).unwrap_or_else(|e| panic!("expected.toml: {e}")).shape
}

/// Major and minor of a release.
fn version(text: &str) -> (u32, u32) {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor),
        _ => panic!("{text:?} is no release of a kernel"),
    }
}

/// Whether a shape's row says what lands after `sealed`.
pub fn is_sealed(shape: &str) -> bool {
    table().iter().any(|entry| entry.name == shape && entry.everywhere.sealed.is_some())
}

/// The row of a shape on this kernel.
pub fn row(shape: &str) -> Row {
    let uname = rustix::system::uname();
    let here = version(uname.release().to_str().unwrap());
    let entry = table().into_iter().find(|entry| entry.name == shape);
    let entry = entry.unwrap_or_else(|| panic!("expected.toml has no {shape}"));
    let older = entry.before.iter().filter(|(before, _)| here < version(before));
    older.min_by_key(|(before, _)| version(before)).map_or(entry.everywhere, |(_, r)| r.clone())
}

/// The table as docs/WRITERS.md has it.
fn shown() -> String {
    let mut text = String::from(
        "| writer | frozen | read-only while frozen | lands after frozen | lands after sealed | killed | read-only after the kill | lands after killed | gone |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    for Entry { name, what, everywhere, before } in table() {
        line(&mut text, &format!("`{name}`: {what}"), &everywhere);
        for (before, row) in &before {
            line(&mut text, &format!("`{name}` before {before}"), row);
        }
    }
    text
}

fn line(text: &mut String, what: &str, row: &Row) {
    let asked = |busy: &[String]| match busy {
        [] => "granted".to_owned(),
        names => format!("EBUSY: {}", names.join(", ")),
    };
    writeln!(
        text,
        "| {what} | {} | {} | {} | {} | {} | {} | {} | {} |",
        row.frozen.words(),
        asked(&row.busy),
        row.after_frozen.words(),
        row.sealed.map_or("", Lands::words),
        row.killed.words(),
        asked(&row.busy_after_kill),
        row.after_killed.words(),
        row.gone.words(),
    )
    .unwrap();
}

/// The page shows the table, and the table has the suite's shapes. With `UPDATE_GOLDEN=1` the page
/// is written.
pub fn holds(shapes: &[&str]) -> Result<(), String> {
    let (head, rest) =
        PAGE.split_once(BEGIN).ok_or("docs/WRITERS.md has no beginning of a table")?;
    let (old, tail) = rest.split_once(END).ok_or("docs/WRITERS.md has no end of a table")?;
    let new = format!("\n{}\n", shown());
    if old != new && std::env::var_os("UPDATE_GOLDEN").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/WRITERS.md");
        std::fs::write(path, format!("{head}{BEGIN}{new}{END}{tail}"))
            .map_err(|e| e.to_string())?;
    } else if old != new {
        return Err("docs/WRITERS.md is out of date: run this with UPDATE_GOLDEN=1".into());
    }
    let listed: Vec<_> = table().into_iter().map(|entry| entry.name).collect();
    (shapes == listed)
        .then_some(())
        .ok_or(format!("the suite has the shapes {shapes:?}, the table {listed:?}"))
}
