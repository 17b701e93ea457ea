//! The bytes of a deadline file, without the file: see [`super::deadlines`].
//!
//! ```text
//! header: "OVFDEADL" | version u32 | capacity u32 | boot id, 16 bytes | checksum u64 | zeros
//!         | at byte 64: ever used, u64 | zeros
//! slot:   sequence u64 | generation u64 | deadline u64 | state u32 | path length u32
//!         | session id, 40 bytes | cgroup path, 256 bytes | path checksum u64 | checksum u64 | zeros
//! ```
//!
//! Numbers are in the host's order: the file never leaves the boot. The checksum tells torn writes
//! from whole ones; it is no protection against somebody who can write the file.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use super::{Error, Result};
use crate::model::ids::{BootId, Generation, SessionId};
use crate::model::time::BootNs;

/// Bytes of the header.
pub const HEADER: usize = 4096;
/// Bytes of one slot.
pub const SLOT: usize = 384;
/// Bytes of one entry.
pub const ENTRY: usize = 2 * SLOT;
/// Entries in a file.
pub const CAPACITY: usize = 4096;
/// Where the header tells how many entries, from the first on, were ever used; 0: it does not say.
pub const USED_AT: usize = 64;
/// Bytes of a file.
pub const FILE: usize = HEADER + CAPACITY * ENTRY;

const MAGIC: &[u8; 8] = b"OVFDEADL";
const VERSION: u32 = 1;

const STATE_AT: usize = 24;
const LENGTH_AT: usize = 28;
const SESSION_AT: usize = 32;
const SESSION_MAX: usize = 40;
const PATH_AT: usize = SESSION_AT + SESSION_MAX;
const PATH_MAX: usize = 256;
const PATH_SUM_AT: usize = PATH_AT + PATH_MAX;
const SUM_AT: usize = PATH_SUM_AT + 8;

const FREE: u32 = 0;
const USED: u32 = 1;

/// Until when a session may write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deadline {
    /// Whose.
    pub session: SessionId,
    /// Under which generation.
    pub generation: Generation,
    /// Until when, in the boot that the file's header names.
    pub deadline: BootNs,
    /// The cgroup to freeze then, an absolute path of at most 256 bytes.
    pub cgroup: PathBuf,
}

/// What an entry holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Nothing.
    Free,
    /// A deadline.
    Valid(Deadline),
    /// Bytes that cannot be believed: taken for a deadline that has passed.
    Torn {
        /// Which entry.
        index: usize,
        /// Its cgroup, if that part can be read.
        cgroup: Option<PathBuf>,
    },
}

/// One whole slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Which of two slots is newer.
    pub sequence: u64,
    /// `None` in a freed entry.
    pub deadline: Option<Deadline>,
}

/// What an entry says, by its two slots: the newer whole one wins.
pub fn entry(index: usize, a: &[u8; SLOT], b: &[u8; SLOT]) -> Entry {
    if is_blank(a) && is_blank(b) {
        return Entry::Free;
    }
    let newest = [decode(a), decode(b)].into_iter().flatten().max_by_key(|slot| slot.sequence);
    match newest {
        Some(Slot { deadline: Some(deadline), .. }) => Entry::Valid(deadline),
        Some(Slot { deadline: None, .. }) => Entry::Free,
        None => Entry::Torn { index, cgroup: path(a).or_else(|| path(b)) },
    }
}

/// The bytes of a slot; a freed entry has no deadline.
pub fn encode(sequence: u64, deadline: Option<&Deadline>) -> Result<[u8; SLOT]> {
    let mut bytes = [0; SLOT];
    put(&mut bytes, 0, &sequence.to_ne_bytes());
    let Some(deadline) = deadline else {
        put(&mut bytes, STATE_AT, &FREE.to_ne_bytes());
        seal(&mut bytes);
        return Ok(bytes);
    };
    let cgroup = deadline.cgroup.as_os_str().as_bytes();
    if cgroup.len() > PATH_MAX || !deadline.cgroup.is_absolute() {
        return Err(Error::Limit {
            what: format!("the cgroup path {}", deadline.cgroup.display()),
            reason: format!("a deadline's is absolute and has at most {PATH_MAX} bytes"),
        });
    }
    put(&mut bytes, 8, &deadline.generation.0.to_ne_bytes());
    put(&mut bytes, 16, &deadline.deadline.0.to_ne_bytes());
    put(&mut bytes, STATE_AT, &USED.to_ne_bytes());
    // At most PATH_MAX.
    put(&mut bytes, LENGTH_AT, &(cgroup.len() as u32).to_ne_bytes());
    let session = deadline.session.to_string();
    put(&mut bytes, SESSION_AT, session.as_bytes());
    put(&mut bytes, PATH_AT, cgroup);
    seal(&mut bytes);
    Ok(bytes)
}

fn seal(bytes: &mut [u8; SLOT]) {
    let sum = path_sum(bytes);
    put(bytes, PATH_SUM_AT, &sum.to_ne_bytes());
    let sum = checksum(&bytes[..SUM_AT]);
    put(bytes, SUM_AT, &sum.to_ne_bytes());
}

/// What a slot holds, `None` if it is blank or not whole.
pub fn decode(bytes: &[u8; SLOT]) -> Option<Slot> {
    if checksum(&bytes[..SUM_AT]) != u64_at(bytes, SUM_AT) {
        return None;
    }
    let sequence = u64_at(bytes, 0);
    match u32_at(bytes, STATE_AT) {
        FREE => Some(Slot { sequence, deadline: None }),
        USED => {
            let session = &bytes[SESSION_AT..][..SESSION_MAX];
            let end = session.iter().position(|b| *b == 0).unwrap_or(SESSION_MAX);
            let deadline = Deadline {
                session: std::str::from_utf8(&session[..end]).ok()?.parse().ok()?,
                generation: Generation(u64_at(bytes, 8)),
                deadline: BootNs(u64_at(bytes, 16)),
                cgroup: path(bytes)?,
            };
            Some(Slot { sequence, deadline: Some(deadline) })
        }
        _ => None,
    }
}

/// The cgroup of a slot, which has a checksum of its own, so that it survives a tear elsewhere.
fn path(bytes: &[u8; SLOT]) -> Option<PathBuf> {
    let length = u32_at(bytes, LENGTH_AT) as usize;
    let whole = path_sum(bytes) == u64_at(bytes, PATH_SUM_AT);
    let path = Path::new(OsStr::from_bytes(bytes[PATH_AT..][..PATH_MAX].get(..length)?));
    (whole && path.is_absolute()).then(|| path.to_owned())
}

fn path_sum(bytes: &[u8; SLOT]) -> u64 {
    let length = u64::from(u32_at(bytes, LENGTH_AT));
    checksum(&bytes[PATH_AT..PATH_SUM_AT]) ^ length.wrapping_mul(PRIME)
}

/// The header of a file for one boot.
pub fn encode_header(boot: BootId) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    put(&mut bytes, 0, MAGIC);
    put(&mut bytes, 8, &VERSION.to_ne_bytes());
    put(&mut bytes, 12, &(CAPACITY as u32).to_ne_bytes());
    put(&mut bytes, 16, boot.0.as_bytes());
    let sum = checksum(&bytes[..32]);
    put(&mut bytes, 32, &sum.to_ne_bytes());
    bytes
}

/// The boot that a header names, `None` if it is not one of this version.
pub fn decode_header(bytes: &[u8; HEADER]) -> Option<BootId> {
    let known = bytes.starts_with(MAGIC)
        && u32_at(bytes, 8) == VERSION
        && u32_at(bytes, 12) == CAPACITY as u32
        && u64_at(bytes, 32) == checksum(&bytes[..32]);
    let boot = bytes[16..32].try_into().ok()?;
    known.then(|| BootId(uuid::Uuid::from_bytes(boot)))
}

fn is_blank(bytes: &[u8; SLOT]) -> bool {
    bytes.iter().all(|b| *b == 0)
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut raw = [0; 8];
    raw.copy_from_slice(&bytes[at..at + 8]);
    u64::from_ne_bytes(raw)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut raw = [0; 4];
    raw.copy_from_slice(&bytes[at..at + 4]);
    u32::from_ne_bytes(raw)
}

const PRIME: u64 = 0x0000_0100_0000_01b3;

/// FNV-1a, 64 bits; not zero for zeros.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, b| (sum ^ u64::from(*b)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn deadline(n: u64) -> Deadline {
        Deadline {
            session: SessionId::from_u128(u128::from(n) + 1),
            generation: Generation(n),
            deadline: BootNs(n * 1000),
            cgroup: format!("/sys/fs/cgroup/overfence/{n}").into(),
        }
    }

    #[test]
    fn the_newer_whole_slot_wins() {
        let (old, new) = (deadline(1), deadline(2));
        let (a, b) = (encode(7, Some(&old)).unwrap(), encode(8, Some(&new)).unwrap());
        assert_eq!(entry(0, &a, &b), Entry::Valid(new.clone()));
        assert_eq!(entry(0, &b, &a), Entry::Valid(new.clone()));
        let freed = encode(9, None).unwrap();
        assert_eq!(entry(0, &freed, &b), Entry::Free);
        assert_eq!(entry(0, &a, &[0; SLOT]), Entry::Valid(old));
        assert_eq!(entry(0, &[0; SLOT], &[0; SLOT]), Entry::Free);
    }

    #[test]
    fn paths_that_do_not_fit_are_refused_before_they_are_written() {
        let mut long = deadline(1);
        long.cgroup = format!("/{}", "x".repeat(PATH_MAX)).into();
        assert!(matches!(encode(1, Some(&long)), Err(Error::Limit { .. })));
        long.cgroup = format!("/{}", "x".repeat(PATH_MAX - 1)).into();
        let bytes = encode(1, Some(&long)).unwrap();
        assert_eq!(decode(&bytes).unwrap().deadline, Some(long));
        assert!(encode(1, Some(&Deadline { cgroup: "x".into(), ..deadline(1) })).is_err());
    }

    #[test]
    fn a_header_of_another_version_is_not_believed() {
        let boot = BootId(uuid::Uuid::from_u128(7));
        let header = encode_header(boot);
        assert_eq!(decode_header(&header), Some(boot));
        for at in [0, 8, 12, 16, 31, 32] {
            let mut bad = header;
            bad[at] ^= 1;
            assert_eq!(decode_header(&bad), None, "byte {at}");
        }
    }

    proptest! {
        /// Torn at any word between two whole slots, a slot is either or is noticed.
        #[test]
        fn a_torn_slot_is_never_believed(cut in 0..SLOT / 8, n in 0..1000u64, m in 0..1000u64) {
            let old = encode(2 * n + 1, Some(&deadline(n))).unwrap();
            let new = encode(2 * n + 3, Some(&deadline(m))).unwrap();
            let mut torn = old;
            torn[..cut * 8].copy_from_slice(&new[..cut * 8]);
            let decoded = decode(&torn);
            prop_assert!(torn == old || torn == new || decoded.is_none());
            // With the other slot whole, the entry holds what that one says.
            let whole = encode(2 * n + 2, Some(&deadline(n + 7))).unwrap();
            if decoded.is_none() {
                prop_assert_eq!(entry(3, &torn, &whole), Entry::Valid(deadline(n + 7)));
                let both = entry(3, &torn, &torn);
                prop_assert!(matches!(both, Entry::Torn { index: 3, .. }), "{:?}", both);
            }
        }

        #[test]
        fn any_flipped_bit_is_noticed_and_a_whole_path_survives(bit in 0..(SUM_AT + 8) * 8) {
            let whole = encode(5, Some(&deadline(9))).unwrap();
            let mut bad = whole;
            bad[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(decode(&bad), None);
            let in_path = (LENGTH_AT..LENGTH_AT + 4).contains(&(bit / 8))
                || (PATH_AT..PATH_SUM_AT + 8).contains(&(bit / 8));
            let cgroup = (!in_path).then(|| deadline(9).cgroup);
            prop_assert_eq!(entry(1, &bad, &bad), Entry::Torn { index: 1, cgroup });
        }

        #[test]
        fn any_bytes_are_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), SLOT)) {
            let bytes: [u8; SLOT] = bytes.try_into().unwrap();
            let _ = entry(0, &bytes, &bytes);
        }
    }
}
