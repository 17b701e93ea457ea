//! What the programs tell of what they refused: one at most for each entry in 134 ms, the rest is
//! only counted, as are calls that only ask (access). The ring holds 819; what comes while it is full
//! is counted in the header.

use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use aya::maps::{Map, MapData, RingBuf};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::hooks::Row;
use super::pins::{self, Why};
use crate::model::ids::{Generation, SessionId};
use crate::model::time::BootNs;

/// A refused call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Whose overlay it was to change.
    pub session: SessionId,
    /// When it was refused.
    pub at: BootNs,
    /// The deadline that had passed, or the moment, to 1 ms, at which a lease was lost before it; 0 in
    /// an entry that was never open. Ahead of `at` where a mapping is refused under a good lease.
    pub deadline: BootNs,
    /// Of the entry.
    pub generation: Generation,
    /// The way in which a file was to be changed.
    pub op: &'static str,
    /// Process id as pid 1 of the host sees it.
    pub pid: u32,
    /// The command's name.
    pub command: String,
    /// Inode number of the file or directory in the overlay.
    pub inode: u64,
}

/// `struct refusal` of `gate.bpf.c`.
const SIZE: usize = 72;

/// `None`: it is none of ours.
fn parse(bytes: &[u8]) -> Option<Refusal> {
    let bytes: &[u8; SIZE] = bytes.try_into().ok()?;
    let long = |at: usize| {
        bytes[at..at + 8].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
    };
    let short = |at: usize| u32::try_from(long(at) & 0xffff_ffff).unwrap_or(0);
    let row = Row::ALL.get(usize::try_from(short(48)).ok()?)?;
    let command = bytes[56..].split(|byte| *byte == 0).next().unwrap_or_default();
    Some(Refusal {
        session: SessionId::from_u128(u128::from(long(24)) << 64 | u128::from(long(32))),
        at: BootNs(long(0)),
        deadline: BootNs(long(8)),
        generation: Generation(long(16)),
        op: row.name(),
        pid: short(52),
        command: String::from_utf8_lossy(command).into_owned(),
        inode: long(40),
    })
}

/// The only one on this host who takes refusals.
pub struct Refusals {
    ring: RingBuf<MapData>,
    _only: OwnedFd,
}

impl Refusals {
    /// `None`: another agent takes them.
    pub(super) fn open(dir: &Path) -> Result<Option<Self>, Why> {
        let Some(only) = pins::only_reader(dir)? else { return Ok(None) };
        let map = Map::RingBuf(pins::pinned(dir, "refusals")?);
        let ring = RingBuf::try_from(map).map_err(|e| pins::told(&e))?;
        Ok(Some(Self { ring, _only: only }))
    }

    /// Waits for the next; `None`: there was none for so long.
    pub fn next(&mut self, patience: Duration) -> rustix::io::Result<Option<Refusal>> {
        if let Some(refusal) = self.take() {
            return Ok(Some(refusal));
        }
        let timeout = Timespec::try_from(patience).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        // SAFETY: the ring, which the descriptor is of, outlives the call.
        let fd = unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) };
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(self.take()),
            Err(e) => Err(e),
        }
    }

    fn take(&mut self) -> Option<Refusal> {
        loop {
            let item = self.ring.next()?;
            if let Some(refusal) = parse(&item) {
                return Some(refusal);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_read_and_nothing_else() {
        let words: [u64; 6] = [9, 8, 7, 0x1111, 0x2222, 42];
        let mut bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        bytes.extend([3, 0, 0, 0, 77, 1, 0, 0]);
        bytes.extend(b"writer\0rubbish..");
        let refusal = Refusal {
            session: SessionId::from_u128(0x1111 << 64 | 0x2222),
            at: BootNs(9),
            deadline: BootNs(8),
            generation: Generation(7),
            op: "attributes",
            pid: 333,
            command: "writer".into(),
            inode: 42,
        };
        assert_eq!(parse(&bytes), Some(refusal));
        assert_eq!(parse(&bytes[1..]), None);
        bytes[48] = 8;
        assert_eq!(parse(&bytes), None);
    }
}
