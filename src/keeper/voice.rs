//! What the keeper says, written by a thread of ordinary priority: standard error may be a full disk, a
//! pipe that nobody reads, or a file system that hangs, and no freeze waits for it. Between the two is a
//! pipe that takes a line at once or not at all. Lines that nobody took are counted, and the count is said.

use std::io::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::pipe::{PIPE_BUF, PipeFlags};

/// Room for a line of each session that a table can hold.
const ROOM: usize = 1 << 20;
/// The thread holds one buffer, and all of it is locked in memory.
const STACK: usize = 128 << 10;

/// Takes lines.
pub(super) struct Voice {
    /// `None`: there is no thread, and nothing is said.
    pipe: Option<OwnedFd>,
    lost: Arc<AtomicU64>,
}

impl Voice {
    /// Starts the thread that writes to `out`. To be done before the caller becomes real-time
    /// scheduled: a thread inherits that. Where there can be no thread the keeper keeps its mouth shut.
    pub(super) fn onto(out: impl AsFd + Send + 'static) -> Self {
        let lost = Arc::new(AtomicU64::new(0));
        let pipe = start(out, Arc::clone(&lost)).ok();
        Self { pipe, lost }
    }

    /// Says a line, if there is room for it now.
    pub(super) fn say(&self, text: &str) {
        let mut line = format!("keeper: {text}");
        // So much the pipe takes as a whole or not at all.
        line.truncate(line.floor_char_boundary(PIPE_BUF - 1));
        line.push('\n');
        let Some(pipe) = &self.pipe else { return };
        if rustix::io::write(pipe, line.as_bytes()).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn start(out: impl AsFd + Send + 'static, lost: Arc<AtomicU64>) -> std::io::Result<OwnedFd> {
    let (lines, pipe) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&pipe, true)?;
    // Where it may not be so large it loses lines earlier.
    let _ = rustix::pipe::fcntl_setpipe_size(&pipe, ROOM);
    // The descriptors' flags are the file's: the reader's end is another file, and waits.
    let thread = std::thread::Builder::new().name("voice".to_owned()).stack_size(STACK);
    thread.spawn(move || pass_on(&lines, &out, &lost))?;
    Ok(pipe)
}

/// Until the keeper ends. Takes no memory: an allocator's lock held by this thread would hold up the one
/// that freezes.
fn pass_on(lines: &OwnedFd, out: &impl AsFd, lost: &AtomicU64) {
    let mut buffer = [0; PIPE_BUF];
    loop {
        let len = match rustix::io::read(lines, &mut buffer) {
            Ok(0) => return,
            Ok(len) => len,
            Err(Errno::INTR) => continue,
            Err(_) => return,
        };
        // The count goes where a line ends.
        let end = buffer[..len].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let (whole, begun) = buffer[..len].split_at(end);
        missed(lost, write(out, whole));
        if end > 0 {
            let unsaid = lost.swap(0, Ordering::Relaxed);
            if unsaid > 0 && !told(out, unsaid) {
                lost.fetch_add(unsaid, Ordering::Relaxed);
            }
        }
        missed(lost, write(out, begun));
    }
}

fn missed(lost: &AtomicU64, left: &[u8]) {
    let lines = left.iter().filter(|byte| **byte == b'\n').count();
    lost.fetch_add(u64::try_from(lines).unwrap_or(u64::MAX), Ordering::Relaxed);
}

fn told(out: &impl AsFd, missed: u64) -> bool {
    let mut line = [0; 128];
    let mut room = &mut line[..];
    // It fits.
    let _ = writeln!(room, "keeper: {missed} line(s) could not be written and are lost");
    let left = room.len();
    write(out, &line[..line.len() - left]).is_empty()
}

/// Writes; gives what nobody takes.
fn write<'b>(out: &impl AsFd, mut bytes: &'b [u8]) -> &'b [u8] {
    while !bytes.is_empty() {
        match rustix::io::write(out, bytes) {
            Ok(0) => break,
            Ok(n) => bytes = &bytes[n..],
            Err(Errno::INTR) => {}
            Err(_) => break,
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};

    use super::*;

    #[test]
    fn who_does_not_read_holds_up_nobody_and_hears_how_much_was_lost() {
        let (ours, theirs) = std::io::pipe().unwrap();
        let voice = Voice::onto(theirs);
        // Twice as much as both pipes take.
        let long = "x".repeat(1000);
        let said = 2 * (ROOM + (64 << 10)) / long.len();
        for n in 0..said {
            voice.say(&format!("{n} {long}"));
        }
        let mut lines = BufReader::new(ours).lines().map(Result::unwrap);
        let (mut heard, mut lost) = (0, 0);
        while heard + lost < said {
            let line = lines.next().unwrap();
            match line.strip_suffix(" line(s) could not be written and are lost") {
                Some(count) => lost += count["keeper: ".len()..].parse::<usize>().unwrap(),
                None => {
                    assert!(line.starts_with("keeper: ") && line.ends_with(&long), "{line}");
                    heard += 1;
                }
            }
        }
        assert!(heard > 0 && lost > 0, "{heard} heard, {lost} lost");
        voice.say("last");
        assert_eq!(lines.next().unwrap(), "keeper: last");
    }

    #[test]
    fn a_full_disk_is_no_error_and_what_comes_after_it_is_told() {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let voice = Voice::onto(full);
        for n in 1..=3 {
            voice.say("unheard");
            let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
            while voice.lost.load(Ordering::Relaxed) != n {
                assert!(std::time::Instant::now() < until, "{n} were not counted");
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn a_line_is_never_longer_than_the_pipe_takes_at_once() {
        let (ours, theirs) = std::io::pipe().unwrap();
        let voice = Voice::onto(theirs);
        voice.say(&"\u{e4}".repeat(PIPE_BUF));
        let line = BufReader::new(ours).lines().next().unwrap().unwrap();
        assert!(line.len() < PIPE_BUF && line.len() > PIPE_BUF - 4, "{}", line.len());
    }
}
