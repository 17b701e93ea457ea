//! What is shown: lines as the steps are done, or one JSON document at the end.

use std::io::IsTerminal as _;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::check::Look;
use super::host::Place;
use crate::agent::failure::Failure;
use crate::cli::context::Context;
use crate::model::view::PathText;

/// What the checker was asked and what it saw.
#[derive(Debug, Serialize)]
pub(super) struct Check {
    /// What should hold.
    what: String,
    /// What was read.
    seen: String,
    /// Whether it holds.
    ok: bool,
}

/// One step of the story.
#[derive(Debug, Serialize)]
pub(super) struct Step {
    n: usize,
    title: String,
    /// The command lines, or what was done to the kernel, one a line.
    pub(super) asked: String,
    /// What the kernel or the authority said.
    pub(super) answered: String,
    /// From question to answer, milliseconds.
    took_ms: f64,
    checks: Vec<Check>,
    #[serde(skip)]
    took: Duration,
}

impl Step {
    fn new(n: usize, title: &str) -> Self {
        let (title, asked, answered) = (title.to_owned(), String::new(), String::new());
        Self { n, title, asked, answered, took_ms: 0.0, checks: vec![], took: Duration::ZERO }
    }

    /// Adds a question and the time its answer took.
    pub(super) fn asked(&mut self, question: &str, took: Duration) {
        if !self.asked.is_empty() {
            self.asked.push('\n');
        }
        self.asked.push_str(question);
        self.took += took;
    }

    /// Adds what the checker saw.
    pub(super) fn check(&mut self, what: &str, look: Look) {
        let (ok, seen) = look.unwrap_or_else(|why| (false, format!("cannot look: {why}")));
        self.checks.push(Check { what: what.to_owned(), seen, ok });
    }

    /// Adds what something else than the checker must have answered.
    pub(super) fn expect(&mut self, what: &str, ok: bool, seen: impl Into<String>) {
        self.check(what, Ok((ok, seen.into())));
    }

    fn holds(&self) -> bool {
        self.checks.iter().all(|check| check.ok)
    }
}

/// The whole story.
#[derive(Serialize)]
pub(super) struct Report<'c> {
    ok: bool,
    took_ms: f64,
    steps: Vec<Step>,
    /// What kept the story from its end, or could not be cleared away.
    faults: Vec<String>,
    /// The directory, when it was kept.
    kept: Option<PathText>,
    /// Session ids and the letters of their writers, for people.
    #[serde(skip)]
    names: Vec<(String, &'static str)>,
    #[serde(skip)]
    begun: Instant,
    #[serde(skip)]
    paint: bool,
    #[serde(skip)]
    context: &'c Context,
}

const BOLD: &str = "1";
const DIM: &str = "2";
const GREEN: &str = "32";
const RED: &str = "31";

impl<'c> Report<'c> {
    pub(super) fn new(context: &'c Context) -> Self {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty())
            || std::env::var_os("TERM").is_some_and(|term| term == "dumb")
            || !std::io::stdout().is_terminal();
        Self {
            ok: true,
            took_ms: 0.0,
            steps: vec![],
            faults: vec![],
            kept: None,
            names: vec![],
            begun: Instant::now(),
            paint: !plain,
            context,
        }
    }

    /// Says where it happens.
    pub(super) fn begin(&self, place: &Place) -> Result<(), Failure> {
        let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
        self.line(&format!(
            "A writer loses its lease and is stopped by the kernel; nobody gives a command.\n\
             Kernel {kernel}. Everything below is asked of a throwaway agent by\n  \
             export OVERFENCE_SOCKET={}\n",
            place.socket().display()
        ))
    }

    /// Lets people read a letter instead of a session's id.
    pub(super) fn name(&mut self, session: &str, letter: &'static str) {
        self.names.push((session.to_owned(), letter));
    }

    /// Does one step and shows it. `Err`: the story cannot go on.
    pub(super) fn step<T>(
        &mut self,
        title: &str,
        body: impl FnOnce(&mut Self, &mut Step) -> Result<T, String>,
    ) -> Result<T, String> {
        let mut step = Step::new(self.steps.len() + 1, title);
        let done = body(self, &mut step);
        if let Err(why) = &done {
            step.expect("the step can be carried through", false, why.as_str());
        }
        step.took_ms = millis(step.took);
        self.ok &= step.holds();
        let shown = self.line(&self.shown(&step)).map_err(|failure| failure.message);
        self.steps.push(step);
        shown.and(done)
    }

    /// Notes what went wrong apart from the steps.
    pub(super) fn fault(&mut self, why: String) {
        self.ok = false;
        self.faults.push(why);
    }

    /// Says how it ended; answers the exit code.
    pub(super) fn end(mut self, kept: Option<&Path>) -> Result<u8, Failure> {
        self.took_ms = millis(self.begun.elapsed());
        self.kept = kept.map(PathText::of);
        if self.context.json() {
            self.context.show(&self, |_| String::new())?;
            return Ok(u8::from(!self.ok));
        }
        let checks: Vec<_> = self.steps.iter().flat_map(|step| &step.checks).collect();
        let held = checks.iter().filter(|check| check.ok).count();
        let mut text = String::new();
        for fault in &self.faults {
            text.push_str(&format!("{} {fault}\n", self.mark(false)));
        }
        text.push_str(&format!(
            "{} {held} of {} checks held in {} steps, {:.1} s.",
            self.mark(self.ok),
            checks.len(),
            self.steps.len(),
            self.took_ms / 1000.0
        ));
        match kept {
            Some(dir) => text.push_str(&format!(" Kept: {}", dir.display())),
            None if self.faults.is_empty() => text.push_str(" Nothing is left of it on this host."),
            None => {}
        }
        self.line(&text)?;
        Ok(u8::from(!self.ok))
    }

    fn line(&self, text: &str) -> Result<(), Failure> {
        if self.context.json() { Ok(()) } else { self.context.print(&format!("{text}\n")) }
    }

    fn shown(&self, step: &Step) -> String {
        let mut text = format!(
            "{:>2} {} {}  {}\n",
            step.n,
            self.mark(step.holds()),
            self.paint(BOLD, &step.title),
            self.paint(DIM, &span(step.took)),
        );
        for (label, said) in [("asked", &step.asked), ("answered", &step.answered)] {
            for (n, line) in said.lines().enumerate() {
                let label = if n == 0 { label } else { "" };
                text.push_str(&format!(
                    "     {} {line}\n",
                    self.paint(DIM, &format!("{label:<8}"))
                ));
            }
        }
        for check in &step.checks {
            let seen = check.seen.replace('\n', " ");
            let line = format!("     {} {}: {}\n", self.mark(check.ok), check.what, seen);
            text.push_str(&line);
        }
        self.names.iter().fold(text, |text, (id, letter)| text.replace(id, letter))
    }

    fn mark(&self, ok: bool) -> String {
        if ok { self.paint(GREEN, "✓") } else { self.paint(RED, "✗") }
    }

    fn paint(&self, colour: &str, text: &str) -> String {
        if self.paint { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Milliseconds with one decimal.
fn millis(span: Duration) -> f64 {
    (span.as_secs_f64() * 10_000.0).round() / 10.0
}

/// A time for people.
pub(super) fn span(span: Duration) -> String {
    match span.as_micros() {
        us @ 0..1000 => format!("{us} us"),
        1000..10_000 => format!("{:.1} ms", span.as_secs_f64() * 1e3),
        10_000..1_000_000 => format!("{} ms", span.as_millis()),
        _ => format!("{:.1} s", span.as_secs_f64()),
    }
}
