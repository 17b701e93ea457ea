//! What the kernel says of its own functions: the types of their parameters, in the BTF of
//! `/sys/kernel/btf/vmlinux` (Documentation/bpf/btf.rst). Hooks moved their arguments between
//! versions; this tells where they are in the running one.

use std::collections::HashMap;

/// The parameters of a function, as far as the gate cares: the name of the structure that each points
/// to, or nothing.
pub(super) type Parameters = Vec<String>;

/// How the names of functions begin that may be asked for: a kernel has fifty thousand.
const ASKED: [&str; 2] = ["bpf_lsm_", "__bpf_prog_enter"];

const MAGIC: u16 = 0xeb9f;
const HEADER: usize = 24;

const ARRAY: u32 = 3;
const FUNC: u32 = 12;
const FUNC_PROTO: u32 = 13;
const PTR: u32 = 2;
const CONST: u32 = 10;
const STRUCT: u32 = 4;

/// A kernel's types.
pub(super) struct Types<'a> {
    bytes: &'a [u8],
    strings: &'a [u8],
    /// Where each type begins; the first has id 1.
    starts: Vec<usize>,
    /// Where the functions that may be asked for begin.
    functions: HashMap<&'a str, usize>,
}

impl<'a> Types<'a> {
    /// `None`: it is no BTF, or one with a kind of type that is not known.
    pub(super) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let u32_at = |at: usize| -> Option<usize> {
            let raw: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
            usize::try_from(u32::from_ne_bytes(raw)).ok()
        };
        let magic: [u8; 2] = bytes.get(..2)?.try_into().ok()?;
        let header = u32_at(4)?;
        if u16::from_ne_bytes(magic) != MAGIC || header < HEADER {
            return None;
        }
        let part = |offset: usize, len: usize| {
            let start = header.checked_add(offset)?;
            bytes.get(start..start.checked_add(len)?)
        };
        let mut types = Self {
            bytes: part(u32_at(8)?, u32_at(12)?)?,
            strings: part(u32_at(16)?, u32_at(20)?)?,
            starts: Vec::new(),
            functions: HashMap::new(),
        };
        let mut at = 0;
        while at < types.bytes.len() {
            types.starts.push(at);
            if types.kind(at)? == FUNC {
                let name = types.name(at)?;
                if ASKED.iter().any(|prefix| name.starts_with(prefix)) {
                    types.functions.insert(name, at);
                }
            }
            at += 12 + types.rest_of(at)?;
        }
        Some(types)
    }

    fn word(&self, at: usize) -> Option<u32> {
        let raw: [u8; 4] = self.bytes.get(at..at + 4)?.try_into().ok()?;
        Some(u32::from_ne_bytes(raw))
    }

    fn kind(&self, at: usize) -> Option<u32> {
        Some((self.word(at + 4)? >> 24) & 0x1f)
    }

    /// How many members it has, in the words of the format.
    fn members(&self, at: usize) -> Option<usize> {
        usize::try_from(self.word(at + 4)? & 0xffff).ok()
    }

    /// Bytes after the first twelve.
    fn rest_of(&self, at: usize) -> Option<usize> {
        let n = self.members(at)?;
        Some(match self.kind(at)? {
            // Pointers, forward declarations, typedefs, qualifiers, functions, floats, type tags.
            PTR | 7..=FUNC | 16 | 18 => 0,
            // Integers, variables, declaration tags.
            1 | 14 | 17 => 4,
            ARRAY => 12,
            // Enumerations, function prototypes.
            6 | FUNC_PROTO => n * 8,
            // Structures, unions, sections, 64-bit enumerations.
            STRUCT | 5 | 15 | 19 => n * 12,
            _ => return None,
        })
    }

    fn name(&self, at: usize) -> Option<&'a str> {
        let from = self.strings.get(usize::try_from(self.word(at)?).ok()?..)?;
        std::str::from_utf8(from.split(|b| *b == 0).next()?).ok()
    }

    fn start(&self, id: u32) -> Option<usize> {
        self.starts.get(usize::try_from(id).ok()?.checked_sub(1)?).copied()
    }

    /// The parameters of the function of this name; `None` if the kernel has none.
    pub(super) fn parameters(&self, function: &str) -> Option<Parameters> {
        let found = *self.functions.get(function)?;
        let prototype = self.start(self.word(found + 8)?)?;
        let n = self.members(prototype)?;
        (0..n).map(|i| Some(self.pointed_to(self.word(prototype + 12 + i * 8 + 4)?))).collect()
    }

    /// Whether the kernel has a function of this name.
    pub(super) fn has(&self, function: &str) -> bool {
        self.parameters(function).is_some()
    }

    fn pointed_to(&self, id: u32) -> String {
        let target = || -> Option<&str> {
            let mut at = self.start(id)?;
            if self.kind(at)? != PTR {
                return None;
            }
            loop {
                at = self.start(self.word(at + 8)?)?;
                if self.kind(at)? != CONST {
                    break;
                }
            }
            (self.kind(at)? == STRUCT).then(|| self.name(at)).flatten()
        };
        target().unwrap_or_default().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `struct dentry; int bpf_lsm_f(const struct dentry *, int)`.
    fn sample() -> Vec<u8> {
        let strings = b"\0dentry\0int\0bpf_lsm_f\0";
        let (dentry, f, int) = (1, 12, 8);
        let info = |kind: u32, n: u32| kind << 24 | n;
        let words = [
            [int, info(1, 0), 4].as_slice(),
            &[32],
            &[dentry, info(STRUCT, 0), 0],
            &[0, info(CONST, 0), 2],
            &[0, info(PTR, 0), 3],
            &[0, info(FUNC_PROTO, 2), 1, 0, 4, 0, 1],
            &[f, info(FUNC, 1), 5],
        ]
        .concat();
        let length = u32::try_from(words.len() * 4).unwrap();
        let mut bytes = MAGIC.to_ne_bytes().to_vec();
        bytes.extend([1, 0]);
        for word in [24, 0, length, length, strings.len() as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(words.into_iter().flat_map(u32::to_ne_bytes));
        bytes.extend(strings);
        bytes
    }

    #[test]
    fn parameters_are_found_by_name() {
        let bytes = sample();
        let types = Types::parse(&bytes).unwrap();
        assert_eq!(types.parameters("bpf_lsm_f"), Some(vec!["dentry".to_owned(), String::new()]));
        assert_eq!(types.parameters("bpf_lsm_g"), None);
        assert!(!types.has("dentry"), "a structure is no function");
    }

    #[test]
    fn what_is_cut_off_or_unknown_is_not_believed() {
        let bytes = sample();
        for len in 0..bytes.len() {
            assert!(Types::parse(&bytes[..len]).is_none(), "{len} bytes");
        }
        let mut unknown = bytes;
        unknown[24 + 4 + 3] = 31;
        assert!(Types::parse(&unknown).is_none());
    }
}
