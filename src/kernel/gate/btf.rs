//! What the kernel says of its own functions: the types of their parameters, in the BTF of
//! `/sys/kernel/btf/vmlinux` (Documentation/bpf/btf.rst). Hooks moved their arguments between
//! versions; this tells where they are in the running one.

use std::collections::HashMap;

/// A parameter of a function, as far as the gate cares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Parameter {
    pub name: String,
    /// The name of the structure that it points to, or nothing.
    pub points_to: String,
}

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
    pub(super) fn parameters(&self, function: &str) -> Option<Vec<Parameter>> {
        let found = *self.functions.get(function)?;
        let prototype = self.start(self.word(found + 8)?)?;
        let n = self.members(prototype)?;
        let parameter = |i| {
            let at = prototype + 12 + i * 8;
            let name = self.name(at)?.to_owned();
            Some(Parameter { name, points_to: self.pointed_to(self.word(at + 4)?) })
        };
        (0..n).map(parameter).collect()
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

/// Types as a kernel would have them, of functions that a test names.
#[cfg(test)]
pub(super) mod sample {
    use super::{CONST, FUNC, FUNC_PROTO, MAGIC, PTR, STRUCT};

    /// A function and its parameters: the name of each, and of the structure that it points to (an
    /// integer without one).
    pub(in super::super) type Function = (String, Vec<(&'static str, &'static str)>);

    #[derive(Default)]
    struct Builder {
        strings: Vec<u8>,
        words: Vec<u32>,
        types: u32,
    }

    impl Builder {
        fn string(&mut self, text: &str) -> u32 {
            let at = u32::try_from(self.strings.len()).unwrap();
            self.strings.extend(text.bytes().chain([0]));
            at
        }

        /// The id of a new type: name, kind and members, third word, and what follows.
        fn add(&mut self, name: &str, kind: u32, members: usize, third: u32, rest: &[u32]) -> u32 {
            let name = if name.is_empty() { 0 } else { self.string(name) };
            let info = kind << 24 | u32::try_from(members).unwrap();
            self.words.extend([name, info, third]);
            self.words.extend(rest);
            self.types += 1;
            self.types
        }
    }

    /// The BTF of these functions.
    pub(in super::super) fn of(functions: &[Function]) -> Vec<u8> {
        let mut all = Builder { strings: vec![0], ..Builder::default() };
        let int = all.add("int", 1, 0, 4, &[32]);
        for (name, parameters) in functions {
            let mut list = vec![];
            for (parameter, to) in parameters {
                let kind = match *to {
                    "" => int,
                    to => {
                        let to = all.add(to, STRUCT, 0, 0, &[]);
                        let to = all.add("", CONST, 0, to, &[]);
                        all.add("", PTR, 0, to, &[])
                    }
                };
                list.extend([all.string(parameter), kind]);
            }
            let prototype = all.add("", FUNC_PROTO, parameters.len(), int, &list);
            all.add(name, FUNC, 1, prototype, &[]);
        }
        let length = |n: usize| u32::try_from(n).unwrap();
        let words = length(all.words.len() * 4);
        let mut bytes = MAGIC.to_ne_bytes().to_vec();
        bytes.extend([1, 0]);
        for word in [24, 0, words, words, length(all.strings.len())] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(all.words.into_iter().flat_map(u32::to_ne_bytes));
        bytes.extend(all.strings);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `int bpf_lsm_f(const struct dentry *dentry, int mask)`.
    fn sample() -> Vec<u8> {
        sample::of(&[("bpf_lsm_f".to_owned(), vec![("dentry", "dentry"), ("mask", "")])])
    }

    #[test]
    fn parameters_are_found_by_name() {
        let bytes = sample();
        let types = Types::parse(&bytes).unwrap();
        let parameter =
            |name: &str, to: &str| Parameter { name: name.to_owned(), points_to: to.to_owned() };
        let wanted = vec![parameter("dentry", "dentry"), parameter("mask", "")];
        assert_eq!(types.parameters("bpf_lsm_f"), Some(wanted));
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
