//! Which program goes to which hook of the running kernel, and what then is not checked. By its BTF,
//! never by its version.

use super::btf::Types;

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

/// A program of the object, the hook it is for, and where it takes its argument from.
struct Hook {
    row: Row,
    program: &'static str,
    hook: &'static str,
    argument: (usize, &'static str),
    /// Kernels without the hook ask another one of the same row.
    optional: bool,
}

const fn hook(row: Row, name: &'static str, argument: (usize, &'static str)) -> Hook {
    Hook { row, program: name, hook: name, argument, optional: false }
}

const fn newer(row: Row, name: &'static str, argument: (usize, &'static str)) -> Hook {
    Hook { row, program: name, hook: name, argument, optional: true }
}

const HOOKS: [Hook; 14] = [
    hook(Row::Write, "file_permission", (0, "file")),
    hook(Row::Open, "file_open", (0, "file")),
    hook(Row::Names, "inode_permission", (0, "inode")),
    // Without and with the mount's id map before the dentry: 6.1, and later.
    Hook {
        row: Row::Attributes,
        program: "inode_setattr_1",
        hook: "inode_setattr",
        argument: (0, "dentry"),
        optional: false,
    },
    Hook {
        row: Row::Attributes,
        program: "inode_setattr_2",
        hook: "inode_setattr",
        argument: (1, "dentry"),
        optional: false,
    },
    hook(Row::Xattr, "inode_setxattr", (1, "dentry")),
    hook(Row::Xattr, "inode_removexattr", (1, "dentry")),
    // Before 6.2 a list is set as the attribute it is stored in.
    newer(Row::Acl, "inode_set_acl", (1, "dentry")),
    newer(Row::Acl, "inode_remove_acl", (1, "dentry")),
    hook(Row::Flags, "file_ioctl", (0, "file")),
    newer(Row::Flags, "file_ioctl_compat", (0, "file")),
    // With file_setattr(2), 6.17.
    newer(Row::Flags, "inode_file_setattr", (0, "dentry")),
    hook(Row::Mapping, "mmap_file", (0, "file")),
    // Refuses nothing: it tells that an entry's overlay died.
    newer(Row::Names, "sb_delete", (0, "super_block")),
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
        let (at, wanted) = hook.argument;
        let fits = |p: &Vec<String>| p.get(at).is_some_and(|name| name == wanted);
        let elsewhere = HOOKS.iter().any(|other| {
            let (at, wanted) = other.argument;
            let same = other.hook == hook.hook && other.program != hook.program;
            same && parameters.as_ref().and_then(|p| p.get(at)).is_some_and(|name| name == wanted)
        });
        match &parameters {
            Some(p) if fits(p) => plan.attach.push((hook.program, hook.hook)),
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
