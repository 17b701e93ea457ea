//! The words between a client and the process that tends its command (session init, or the
//! companion of an `exec`): two bytes each, over a socket pair that nobody else has.
//!
//! ```text
//! tender -> client   Ready                    the walls stand
//! client -> tender   Go                       the record is written: start the command
//! tender -> client   Started                  the command is a process of the session
//! client -> tender   Signal n                 pass this signal to the command
//! tender -> client   Stopped                  the command was stopped: the client stops too
//! tender -> client   Exited n | Killed n      the command ended
//! ```
//!
//! The end of the stream says that the other side is gone: a tender goes on, a client without an
//! answer knows that its command was killed with everything around it.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;

/// One word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// The walls stand and the orders were read.
    Ready,
    /// Start the command.
    Go,
    /// The command is a process of the session.
    Started,
    /// Pass this signal number on.
    Signal(u8),
    /// The command was stopped by a job control signal.
    Stopped,
    /// The command ended with this code.
    Exited(u8),
    /// The command was ended by this signal number.
    Killed(u8),
}

impl Word {
    const fn bytes(self) -> [u8; 2] {
        match self {
            Self::Ready => [b'R', 0],
            Self::Go => [b'G', 0],
            Self::Started => [b'P', 0],
            Self::Signal(n) => [b'S', n],
            Self::Stopped => [b'T', 0],
            Self::Exited(n) => [b'E', n],
            Self::Killed(n) => [b'K', n],
        }
    }

    const fn from_bytes(bytes: [u8; 2]) -> Option<Self> {
        match bytes {
            [b'R', 0] => Some(Self::Ready),
            [b'G', 0] => Some(Self::Go),
            [b'P', 0] => Some(Self::Started),
            [b'S', n] => Some(Self::Signal(n)),
            [b'T', 0] => Some(Self::Stopped),
            [b'E', n] => Some(Self::Exited(n)),
            [b'K', n] => Some(Self::Killed(n)),
            _ => None,
        }
    }
}

/// Says a word.
///
/// # Errors
/// The other side is gone.
pub fn say(mut stream: &UnixStream, word: Word) -> io::Result<()> {
    stream.write_all(&word.bytes())
}

/// Waits for a word; `None` when the other side is gone.
///
/// # Errors
/// What came is no word, or reading failed.
pub fn hear(mut stream: &UnixStream) -> io::Result<Option<Word>> {
    let mut bytes = [0; 2];
    match stream.read_exact(&mut bytes) {
        Ok(()) => Word::from_bytes(bytes)
            .map(Some)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "not a word")),
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(e) if e.kind() == io::ErrorKind::ConnectionReset => Ok(None),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_arrive_as_they_were_said_and_then_the_end() {
        let (a, b) = UnixStream::pair().unwrap();
        let words = [
            Word::Ready,
            Word::Go,
            Word::Started,
            Word::Signal(15),
            Word::Stopped,
            Word::Exited(255),
            Word::Killed(9),
        ];
        for word in words {
            say(&a, word).unwrap();
            assert_eq!(hear(&b).unwrap(), Some(word));
        }
        drop(a);
        assert_eq!(hear(&b).unwrap(), None);
    }

    #[test]
    fn noise_is_not_taken_for_a_word() {
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(b"R1").unwrap();
        assert_eq!(hear(&b).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
