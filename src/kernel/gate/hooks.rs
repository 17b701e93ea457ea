//! Which program goes to which hook of the running kernel, and what then is not checked. By its BTF,
//! never by its version.

use super::btf::{Parameter, Types};

/// One way to change a file, as it is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Row {
    /// write, append, O_DIRECT, aio, io_uring, sendfile, splice, copy, remap, fallocate
    Write,
    /// open for writing
    Open,
    /// O_TRUNC, create, link, symlink, mknod, mkdir, unlink, rmdir, rename
    Names,
    /// chmod, chown, utimes, truncate
    Attributes,
    /// extended attributes
    Xattr,
    /// access control lists
    Acl,
    /// file flags
    Flags,
    /// shared writable mappings
    Mapping,
}

impl Row {
    pub(super) const ALL: [Self; 8] = [
        Self::Write,
        Self::Open,
        Self::Names,
        Self::Attributes,
        Self::Xattr,
        Self::Acl,
        Self::Flags,
        Self::Mapping,
    ];

    /// Its name in output, metrics and labels. The order is that of the programs' counters.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Open => "open",
            Self::Names => "names",
            Self::Attributes => "attributes",
            Self::Xattr => "xattr",
            Self::Acl => "acl",
            Self::Flags => "flags",
            Self::Mapping => "mapping",
        }
    }
}

/// What a program takes an argument for.
#[derive(Clone, Copy)]
enum Wanted {
    /// A pointer to this structure.
    To(&'static str),
    /// A number of this name: its type says nothing.
    Number(&'static str),
}

impl Wanted {
    fn is(self, parameter: &Parameter) -> bool {
        match self {
            Self::To(structure) => parameter.points_to == structure,
            Self::Number(name) => parameter.points_to.is_empty() && parameter.name == name,
        }
    }
}

/// A program of the object, the hook it is for, and where it takes its arguments from.
struct Hook {
    row: Row,
    program: &'static str,
    hook: &'static str,
    arguments: &'static [(usize, Wanted)],
    /// Kernels without the hook ask another one of the same row.
    optional: bool,
}

impl Hook {
    fn fits(&self, parameters: &[Parameter]) -> bool {
        let is = |(at, wanted): &(usize, Wanted)| parameters.get(*at).is_some_and(|p| wanted.is(p));
        self.arguments.iter().all(is)
    }
}

type Arguments = &'static [(usize, Wanted)];

const fn hook(row: Row, name: &'static str, arguments: Arguments) -> Hook {
    Hook { row, program: name, hook: name, arguments, optional: false }
}

const fn newer(row: Row, name: &'static str, arguments: Arguments) -> Hook {
    Hook { row, program: name, hook: name, arguments, optional: true }
}

const fn setattr(program: &'static str, arguments: Arguments) -> Hook {
    Hook { row: Row::Attributes, program, hook: "inode_setattr", arguments, optional: false }
}

use Wanted::{Number, To};

const IOCTL: Arguments = &[(0, To("file")), (1, Number("cmd"))];
const SECOND_DENTRY: Arguments = &[(1, To("dentry"))];

const HOOKS: [Hook; 14] = [
    hook(Row::Write, "file_permission", &[(0, To("file")), (1, Number("mask"))]),
    hook(Row::Open, "file_open", &[(0, To("file"))]),
    hook(Row::Names, "inode_permission", &[(0, To("inode")), (1, Number("mask"))]),
    // Without and with the mount's id map before the dentry: 6.1, and later.
    setattr("inode_setattr_1", &[(0, To("dentry"))]),
    setattr("inode_setattr_2", SECOND_DENTRY),
    hook(Row::Xattr, "inode_setxattr", SECOND_DENTRY),
    hook(Row::Xattr, "inode_removexattr", SECOND_DENTRY),
    // Before 6.2 a list is set as the attribute it is stored in.
    newer(Row::Acl, "inode_set_acl", SECOND_DENTRY),
    newer(Row::Acl, "inode_remove_acl", SECOND_DENTRY),
    hook(Row::Flags, "file_ioctl", IOCTL),
    newer(Row::Flags, "file_ioctl_compat", IOCTL),
    // With file_setattr(2), 6.17.
    newer(Row::Flags, "inode_file_setattr", &[(0, To("dentry"))]),
    hook(Row::Mapping, "mmap_file", &[(0, To("file")), (3, Number("flags"))]),
    // Refuses nothing: it tells that an entry's overlay died.
    newer(Row::Names, "sb_delete", &[(0, To("super_block"))]),
];

/// What is to be attached, and what cannot be.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(super) struct Plan {
    /// Program and hook.
    pub attach: Vec<(&'static str, &'static str)>,
    /// Rows that would not be checked whole.
    pub missing: Vec<Row>,
}

/// Decides by the kernel's types.
pub(super) fn plan(types: &Types<'_>) -> Plan {
    let mut plan = Plan::default();
    for hook in &HOOKS {
        let parameters = types.parameters(&format!("bpf_lsm_{}", hook.hook));
        let elsewhere = HOOKS.iter().any(|other| {
            let same = other.hook == hook.hook && other.program != hook.program;
            same && parameters.as_ref().is_some_and(|p| other.fits(p))
        });
        match &parameters {
            Some(p) if hook.fits(p) => plan.attach.push((hook.program, hook.hook)),
            None if hook.optional => {}
            _ if elsewhere => {}
            Some(_) | None => plan.missing.push(hook.row),
        }
    }
    // Before that a program of ours is left out where a task was interrupted in it on the same
    // processor: every row may miss a call then.
    if !types.has("__bpf_prog_enter_recur") {
        plan.missing.extend(Row::ALL);
    }
    plan.missing.sort_unstable();
    plan.missing.dedup();
    plan
}

#[cfg(test)]
mod tests {
    use super::super::btf::sample::{self, Function};
    use super::*;

    /// As 6.18 has them.
    fn kernel() -> Vec<Function> {
        let idmap = ("idmap", "mnt_idmap");
        let (file, dentry) = (("file", "file"), ("dentry", "dentry"));
        let hooks: [(&str, Vec<(&str, &str)>); 13] = [
            ("file_permission", vec![file, ("mask", "")]),
            ("file_open", vec![file]),
            ("inode_permission", vec![("inode", "inode"), ("mask", "")]),
            ("inode_setattr", vec![idmap, dentry, ("attr", "iattr")]),
            ("inode_setxattr", vec![idmap, dentry, ("name", ""), ("value", ""), ("size", "")]),
            ("inode_removexattr", vec![idmap, dentry, ("name", "")]),
            ("inode_set_acl", vec![idmap, dentry, ("acl_name", ""), ("kacl", "posix_acl")]),
            ("inode_remove_acl", vec![idmap, dentry, ("acl_name", "")]),
            ("file_ioctl", vec![file, ("cmd", ""), ("arg", "")]),
            ("file_ioctl_compat", vec![file, ("cmd", ""), ("arg", "")]),
            ("inode_file_setattr", vec![dentry, ("fa", "file_kattr")]),
            ("mmap_file", vec![file, ("reqprot", ""), ("prot", ""), ("flags", "")]),
            ("sb_delete", vec![("sb", "super_block")]),
        ];
        let mut all: Vec<_> = hooks.map(|(name, p)| (format!("bpf_lsm_{name}"), p)).into();
        all.push(("__bpf_prog_enter_recur".to_owned(), vec![]));
        all
    }

    fn planned(functions: &[Function]) -> Plan {
        plan(&Types::parse(&sample::of(functions)).unwrap())
    }

    fn without(name: &str) -> Vec<Function> {
        let all = kernel();
        let left: Vec<_> = all.iter().filter(|(n, _)| n != name).cloned().collect();
        assert_eq!(left.len() + 1, all.len(), "no {name}");
        left
    }

    #[test]
    fn a_kernel_with_every_hook_leaves_nothing_unchecked() {
        let plan = planned(&kernel());
        assert_eq!(plan.missing, []);
        // Of the two for one hook the one that fits.
        assert_eq!(plan.attach.len(), HOOKS.len() - 1);
        assert!(plan.attach.contains(&("inode_setattr_2", "inode_setattr")), "{plan:?}");
        assert!(plan.attach.contains(&("mmap_file", "mmap_file")), "{plan:?}");
    }

    #[test]
    fn a_hook_that_is_not_there_leaves_its_row_unchecked() {
        for (name, row) in [
            ("file_permission", Some(Row::Write)),
            ("file_open", Some(Row::Open)),
            ("inode_permission", Some(Row::Names)),
            ("inode_setattr", Some(Row::Attributes)),
            ("inode_setxattr", Some(Row::Xattr)),
            ("inode_removexattr", Some(Row::Xattr)),
            ("file_ioctl", Some(Row::Flags)),
            ("mmap_file", Some(Row::Mapping)),
            // Kernels without these ask another hook.
            ("inode_set_acl", None),
            ("inode_remove_acl", None),
            ("file_ioctl_compat", None),
            ("inode_file_setattr", None),
            ("sb_delete", None),
        ] {
            let plan = planned(&without(&format!("bpf_lsm_{name}")));
            assert_eq!(plan.missing, Vec::from_iter(row), "without {name}");
            assert!(plan.attach.iter().all(|(_, hook)| *hook != name), "{plan:?}");
        }
    }

    #[test]
    fn an_argument_that_moved_leaves_its_row_unchecked() {
        for hook in &HOOKS {
            for (at, wanted) in hook.arguments {
                let mut all = kernel();
                let name = format!("bpf_lsm_{}", hook.hook);
                let (_, parameters) = all.iter_mut().find(|(n, _)| *n == name).unwrap();
                if hook.program == "inode_setattr_1" {
                    continue;
                }
                assert!(*at < parameters.len(), "{name}");
                parameters.insert(*at, ("something", "else"));
                let plan = planned(&all);
                assert_eq!(plan.missing, [hook.row], "{name}: argument {at} moved");
                assert!(plan.attach.iter().all(|(program, _)| *program != hook.program));
                // And one that is something else now.
                let (_, parameters) = all.iter_mut().find(|(n, _)| *n == name).unwrap();
                parameters.remove(*at);
                parameters[*at] = match wanted {
                    Wanted::To(_) => ("same", "another"),
                    Wanted::Number(_) => ("another", ""),
                };
                assert_eq!(planned(&all).missing, [hook.row], "{name}: argument {at} changed");
            }
        }
    }

    #[test]
    fn where_setattr_has_no_id_map_the_other_program_is_attached() {
        let mut all = kernel();
        let (_, parameters) = all.iter_mut().find(|(n, _)| n == "bpf_lsm_inode_setattr").unwrap();
        parameters.remove(0);
        let plan = planned(&all);
        assert_eq!(plan.missing, []);
        assert!(plan.attach.contains(&("inode_setattr_1", "inode_setattr")), "{plan:?}");
    }

    #[test]
    fn where_an_interrupted_program_is_left_out_every_row_may_miss_a_call() {
        let plan = planned(&without("__bpf_prog_enter_recur"));
        assert_eq!(plan.missing, Row::ALL);
        assert_eq!(plan.attach.len(), HOOKS.len() - 1, "they are attached nevertheless");
    }
}
