//! How far something is that takes long: one line on a terminal, on standard error, written over
//! itself, and wiped before the answer. Who reads no terminal sees nothing of it.

use std::io::{self, IsTerminal as _, Write as _};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::context::Context;
use super::table;
use crate::agent::failure::Failure;
use crate::api::client::{Client, Look};
use crate::model::view::ProgressView;
use crate::progress::{Amount, Progress, Waiting, What};

/// How long something may take before it says how far it is, and between two such words.
const PATIENCE: Duration = Duration::from_secs(1);
const EVERY: Duration = Duration::from_millis(200);

/// To the beginning of the line, and away with what is there.
const WIPE: &str = "\r\x1b[K";

/// The line.
pub(super) struct Line {
    begun: Instant,
    /// When words are due; `None` where nobody would read them.
    due: Option<Instant>,
    said: bool,
}

impl Line {
    pub(super) fn new(context: &Context) -> Self {
        // A dumb terminal cannot take back what it shows.
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let silent = context.quiet() || dumb || !io::stderr().is_terminal();
        let begun = Instant::now();
        Self { begun, due: (!silent).then(|| begun + PATIENCE), said: false }
    }

    /// One that says nothing.
    pub(super) fn silent() -> Self {
        Self { begun: Instant::now(), due: None, said: false }
    }

    /// Says how far it is, if that is due: `text` of the time it took so far and of the columns there
    /// are.
    pub(super) fn say(&mut self, text: impl FnOnce(Duration, usize) -> String) {
        let now = Instant::now();
        if self.due.is_none_or(|due| now < due) {
            return;
        }
        // The last column stays free: some terminals go on to the next line once it is written.
        let columns = columns().saturating_sub(1);
        let text: String = text(now.duration_since(self.begun), columns);
        let text: String = text.chars().take(columns).collect();
        let _ = write!(io::stderr(), "{WIPE}{text}");
        self.due = Some(now + EVERY);
        self.said = true;
    }

    pub(super) fn wipe(&mut self) {
        if std::mem::take(&mut self.said) {
            let _ = write!(io::stderr(), "{WIPE}");
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.wipe();
    }
}

fn columns() -> usize {
    let size = rustix::termios::tcgetwinsize(io::stderr());
    size.ok().map(|size| usize::from(size.ws_col)).filter(|n| *n > 0).unwrap_or(80)
}

/// The part of a session or a workspace that is looked at.
#[derive(Deserialize)]
struct Seen {
    #[serde(default)]
    progress: Option<ProgressView>,
}

/// Asks the agent for something that may take long, and shows how far it is by what the view at
/// `whose` says.
pub(super) fn post<T: DeserializeOwned>(
    context: &Context,
    client: &Client,
    place: &str,
    wish: &impl Serialize,
    whose: &str,
) -> Result<T, Failure> {
    let mut line = Line::new(context);
    if line.due.is_none() {
        return client.post(place, wish);
    }
    let mut each = |seen: Seen| {
        line.say(|took, columns| match &seen.progress {
            Some(view) => words(view, took, columns),
            None => format!("waiting, {}", seconds(took)),
        });
    };
    let look = Look { path: whose, after: PATIENCE, every: EVERY, each: &mut each };
    client.post_looking(place, wish, look)
}

/// Shows how far something is that this process does itself.
pub(super) struct Local {
    what: What,
    progress: Progress,
    line: Mutex<Line>,
}

impl Local {
    pub(super) fn new(context: &Context, what: What, total: Amount) -> Self {
        let progress = Progress::default();
        progress.expect(total);
        Self { what, progress, line: Mutex::new(Line::new(context)) }
    }
}

impl Waiting for Local {
    fn over(&self) -> bool {
        false
    }

    fn did(&self, bytes: u64, entries: u64) {
        self.progress.did(bytes, entries);
        self.line
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .say(|took, columns| words(&self.progress.view(self.what, took), took, columns));
    }
}

/// As a row of a table.
pub(super) fn row(view: &ProgressView) -> String {
    words(view, Duration::from_millis(view.took_ms), usize::MAX)
}

/// A line of at most so many columns, but for one that is cut: `writing the bundle  [#####...............]  27%  1.2 GiB of 4.3 GiB, 310 MiB/s, 4s`.
fn words(view: &ProgressView, took: Duration, columns: usize) -> String {
    let what = match view.what.as_str() {
        "seal" => "sealing",
        "unseal" => "unsealing",
        "capture" => "capturing",
        "pack" => "packing",
        "compare" => "comparing",
        "export" => "writing the bundle",
        "verify" => "verifying the bundle",
        "seed" => "filling the upper",
        "remove" => "removing",
        other => other,
    };
    let of = |total: Option<String>| total.map(|n| format!(" of {n}")).unwrap_or_default();
    let (bytes, entries) = (view.total_bytes, view.total_entries);
    let part = part(view);
    let (bytes, entries) = if part.is_some() { (bytes, entries) } else { (None, None) };
    let mut done = Vec::new();
    if view.bytes > 0 || bytes.is_some() {
        done.push(format!("{}{}", table::bytes(view.bytes), of(bytes.map(table::bytes))));
    }
    if view.entries > 0 || entries.is_some() || done.is_empty() {
        done.push(format!("{}{} entries", view.entries, of(entries.map(|n| n.to_string()))));
    }
    if let Some(speed) = speed(view) {
        done.push(speed);
    }
    done.push(seconds(took));
    let done = done.join(", ");
    let Some(percent) = part else { return format!("{what}  {done}") };
    let bar = bar(percent);
    let whole = format!("{what}  [{bar}] {percent:>3}%  {done}");
    match whole.chars().count() <= columns {
        true => whole,
        false => format!("{what} {percent}%  {done}"),
    }
}

fn bar(percent: u64) -> String {
    (0..20).map(|n| if n < percent / 5 { '#' } else { '.' }).collect()
}

/// To open, read and write an entry costs about as much as so many bytes of content.
const ENTRY: u64 = 16 << 10;

/// Percent of the whole. `None` where that is not known: nobody measured it, or there turned out to be
/// a good deal more.
fn part(view: &ProgressView) -> Option<u64> {
    let work = |bytes: u64, entries: u64| {
        // What has no total says nothing of the part.
        let bytes = view.total_bytes.map_or(0, |_| bytes);
        let entries = view.total_entries.map_or(0, |_| entries);
        u128::from(bytes) + u128::from(entries) * u128::from(ENTRY)
    };
    let done = work(view.bytes, view.entries);
    let total = work(view.total_bytes.unwrap_or(0), view.total_entries.unwrap_or(0));
    if total == 0 || done > total + total / 8 {
        return None;
    }
    u64::try_from(done * 100 / total).ok().map(|percent| percent.min(100))
}

fn speed(view: &ProgressView) -> Option<String> {
    let second = u128::from(view.bytes) * 1000 / u128::from(view.took_ms.max(1));
    let second = u64::try_from(second).unwrap_or(u64::MAX);
    (view.bytes > 0 && view.took_ms >= 100).then(|| format!("{}/s", table::bytes(second)))
}

/// Whole seconds, as people read them.
pub(super) fn seconds(took: Duration) -> String {
    table::span(Duration::from_secs(took.as_secs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(done: (u64, u64), total: (Option<u64>, Option<u64>), took_ms: u64) -> ProgressView {
        ProgressView {
            what: "capture".into(),
            bytes: done.0,
            entries: done.1,
            total_bytes: total.0,
            total_entries: total.1,
            took_ms,
        }
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_line_says_how_far_it_is() {
        let took = Duration::from_millis(4900);
        for (view, line) in [
            (
                view((512 * MIB, 40), (Some(1024 * MIB), Some(80)), 4000),
                "capturing  [##########..........]  50%  512 MiB of 1 GiB, 40 of 80 entries, \
                 128 MiB/s, 4s",
            ),
            (
                view((512 * MIB, 0), (Some(1024 * MIB), None), 4000),
                "capturing  [##########..........]  50%  512 MiB of 1 GiB, 128 MiB/s, 4s",
            ),
            // A seal has no bytes.
            (
                view((0, 30), (None, Some(40)), 4000),
                "capturing  [###############.....]  75%  30 of 40 entries, 4s",
            ),
            // Nobody knows how much there is.
            (view((MIB, 3), (None, None), 1000), "capturing  1 MiB, 3 entries, 1 MiB/s, 4s"),
            // Nothing is done yet, of nothing.
            (view((0, 0), (None, None), 0), "capturing  0 entries, 4s"),
            (view((0, 0), (Some(0), Some(0)), 0), "capturing  0 entries, 4s"),
            (
                view((0, 0), (Some(MIB), Some(4)), 0),
                "capturing  [....................]   0%  0 B of 1 MiB, 0 of 4 entries, 4s",
            ),
            // A little more than was measured is the end of it; much more was never measured.
            (
                view((MIB + 1, 0), (Some(MIB), None), 1000),
                "capturing  [####################] 100%  1 MiB of 1 MiB, 1 MiB/s, 4s",
            ),
            (view((2 * MIB, 0), (Some(MIB), None), 1000), "capturing  2 MiB, 2 MiB/s, 4s"),
        ] {
            assert_eq!(words(&view, took, 120), line);
        }
        let unknown = ProgressView { what: "polish".into(), ..view((1, 0), (None, None), 1) };
        assert_eq!(words(&unknown, took, 120), "polish  1 B, 4s");
    }

    #[test]
    fn a_part_is_between_nothing_and_all_whatever_is_said() {
        let most = u64::MAX;
        for (done, total, percent) in [
            ((0, 0), (Some(1), Some(1)), Some(0)),
            ((1, 1), (Some(1), Some(1)), Some(100)),
            ((most, most), (Some(most), Some(most)), Some(100)),
            ((most / 2, 0), (Some(most), None), Some(49)),
            ((most, most), (Some(1), Some(1)), None),
            ((most, most), (None, None), None),
            ((7, 0), (Some(0), Some(0)), None),
            // Many small files are no less work for having few bytes.
            ((0, 500), (Some(MIB), Some(1000)), Some(46)),
        ] {
            assert_eq!(part(&view(done, total, 0)), percent, "{done:?} of {total:?}");
        }
    }

    #[test]
    fn a_narrow_terminal_has_no_room_for_a_bar() {
        let half = view((512 * MIB, 40), (Some(1024 * MIB), Some(80)), 4000);
        let took = Duration::from_secs(4);
        let narrow = words(&half, took, 70);
        assert_eq!(narrow, "capturing 50%  512 MiB of 1 GiB, 40 of 80 entries, 128 MiB/s, 4s");
        for percent in 0..=100 {
            let bar = bar(percent);
            assert_eq!(bar.len(), 20, "{bar}");
            assert_eq!(bar.matches('#').count() as u64, percent / 5);
        }
    }
}
