//! Showing a diff as it comes: `session diff`, `bundle diff`. Nothing is held but counts.

use std::io::{self, BufWriter, IsTerminal as _, Write as _};

use serde::Serialize;

use super::context::Context;
use super::progress::Line;
use super::{progress, table};
use crate::agent::failure::Failure;
use crate::model::code::Code;
use crate::model::view::{Change, DiffRow, DiffSummary, FileKind, Mark};

/// A diff being written. `-o json`: one object, `{"of": ..., "changes": [...], "summary": {...}}`,
/// a row a line; one that breaks off is no JSON.
pub(super) struct Printer<'c> {
    context: &'c Context,
    out: BufWriter<io::Stdout>,
    summary: DiffSummary,
    rows: u64,
    line: Line,
}

impl<'c> Printer<'c> {
    /// Begins; `of` is what `-o json` says of whose changes these are.
    pub(super) fn new(context: &'c Context, of: &impl Serialize) -> Result<Self, Failure> {
        // Rows that scroll by tell enough.
        let line = if io::stdout().is_terminal() { Line::silent() } else { Line::new(context) };
        let out = BufWriter::new(io::stdout());
        let summary = DiffSummary::default();
        let mut printer = Self { context, out, summary, rows: 0, line };
        if context.json() {
            let of = text(of)?;
            printer.write(&format!("{{\"of\":{of},\"changes\":["))?;
        }
        Ok(printer)
    }

    /// Writes a row; false once nobody reads any more.
    pub(super) fn row(&mut self, row: &DiffRow) -> Result<bool, Failure> {
        self.summary.count(row);
        self.rows += 1;
        let line = match self.context.json() {
            true => format!("{}\n{}", if self.rows > 1 { "," } else { "" }, text(row)?),
            // It is there because of what is below it.
            false if row.told.change == Change::Touched => String::new(),
            false => line(row),
        };
        let rows = self.rows;
        self.line.say(|took, _| format!("{rows} names compared, {}", progress::seconds(took)));
        self.write(&line)
    }

    /// Writes the end.
    pub(super) fn end(mut self) -> Result<(), Failure> {
        self.line.wipe();
        if self.context.json() {
            let summary = text(&self.summary)?;
            self.write(&format!("\n],\"summary\":{summary}}}\n"))?;
        } else {
            self.write(&total(&self.summary))?;
        }
        self.flushed(|out| out.flush()).map(drop)
    }

    /// The end of one that broke off.
    pub(super) fn broken(mut self, failure: Failure) -> Failure {
        self.line.wipe();
        let _ = self.out.flush();
        failure
    }

    fn write(&mut self, text: &str) -> Result<bool, Failure> {
        self.flushed(|out| out.write_all(text.as_bytes()))
    }

    /// A reader that left (`| head`) is no failure.
    fn flushed(
        &mut self,
        act: impl FnOnce(&mut BufWriter<io::Stdout>) -> io::Result<()>,
    ) -> Result<bool, Failure> {
        match act(&mut self.out) {
            Ok(()) => Ok(true),
            Err(fault) if fault.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            Err(fault) => {
                Err(Failure::new(Code::Internal, format!("cannot write to stdout: {fault}")))
            }
        }
    }
}

fn text(value: &impl Serialize) -> Result<String, Failure> {
    serde_json::to_string(value)
        .map_err(|fault| Failure::new(Code::Internal, format!("cannot write the answer: {fault}")))
}

fn word(value: &impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
}

fn line(row: &DiffRow) -> String {
    let told = &row.told;
    let size = if row.bytes > 0 { table::bytes(row.bytes) } else { "-".into() };
    let mut path = match row.path.0.as_str() {
        "" => "/".to_owned(),
        path => table::clean(path),
    };
    if told.kind.or(told.was) == Some(FileKind::Directory) && path != "/" {
        path.push('/');
    }
    let mut notes = Vec::new();
    match (told.kind, told.was) {
        (Some(kind), Some(was)) if kind != was => {
            notes.push(format!("was {}, is {}", word(&was), word(&kind)));
        }
        (Some(kind), _) if !matches!(kind, FileKind::File | FileKind::Directory) => {
            notes.push(word(&kind));
        }
        _ => {}
    }
    for mark in &told.marks {
        notes.push(match mark {
            Mark::Opaque => "opaque: removed and made anew".into(),
            Mark::Replaced => "another file took the name".into(),
            Mark::LinkBroken => "its other names show the old file".into(),
        });
    }
    if told.hides > 0 {
        notes.push(format!("{} names below it are gone", told.hides));
    }
    if told.change == Change::Metadata {
        notes.push(table::joined(told.differs.iter().map(word)));
    }
    let line = format!("{:<9} {size:>10}  {path}", word(&told.change));
    match notes.is_empty() {
        true => format!("{line}\n"),
        false => format!("{line}  ({})\n", notes.join("; ")),
    }
}

fn total(summary: &DiffSummary) -> String {
    let counts = [
        (summary.added, "added"),
        (summary.modified, "modified"),
        (summary.metadata, "changed in metadata alone"),
        (summary.kind, "of another type"),
        (summary.deleted, "deleted"),
        (summary.hidden, "gone below others"),
        (summary.unknown, "added or changed (the bundle does not say which)"),
    ];
    let said = counts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}"));
    match table::joined(said) {
        said if said.is_empty() => "nothing changed\n".into(),
        said => format!("{said}; {} in files\n", table::bytes(summary.bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::view::{Aspect, PathText, Told};

    #[test]
    fn a_row_is_a_line_that_no_name_can_break() {
        let told = Told {
            change: Change::Metadata,
            kind: Some(FileKind::File),
            was: Some(FileKind::File),
            marks: vec![Mark::LinkBroken],
            differs: vec![Aspect::Mode, Aspect::Time],
            hides: 0,
        };
        let path = PathText::of("a\n\\x41".as_ref());
        let shown = line(&DiffRow { path, bytes: 2048, told: told.clone() });
        let want =
            "metadata       2 KiB  a\\n\\\\x41  (its other names show the old file; mode, time)\n";
        assert_eq!(shown, want);
        let gone = Told {
            change: Change::Deleted,
            kind: None,
            was: Some(FileKind::Directory),
            marks: vec![],
            differs: vec![],
            hides: 7,
        };
        let shown = line(&DiffRow { path: PathText("d".into()), bytes: 0, told: gone });
        assert_eq!(shown, "deleted            -  d/  (7 names below it are gone)\n");
        let mut summary = DiffSummary::default();
        assert_eq!(total(&summary), "nothing changed\n");
        summary.count(&DiffRow { path: PathText("f".into()), bytes: 1024, told });
        assert_eq!(total(&summary), "1 changed in metadata alone; 1 KiB in files\n");
    }
}
