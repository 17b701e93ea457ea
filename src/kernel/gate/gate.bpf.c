// SPDX-License-Identifier: MIT OR GPL-2.0-only
//
// The lease gate: each call that would change a file of a session's overlay is compared, as it
// starts, with that session's generation and deadline, and refused with EROFS if they do not hold.
// Nothing here decides anything else: overlays that are not entered, and all other file systems, are
// none of its business.
//
// `layout.rs` says the same of `struct entry`; whoever changes one of them raises LAYOUT there, and
// only appends: agents of other versions write into entries of ours.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define SEC(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))

// What is read of the kernel's own types. Where the fields lie in the running kernel is looked up in
// its BTF when the programs are loaded (CO-RE).
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct dentry;
struct super_block {
    u32 s_dev;
    unsigned long s_magic;
    struct dentry *s_root;
};
struct inode {
    u16 i_mode;
    struct super_block *i_sb;
    unsigned long i_ino;
};
struct dentry {
    struct inode *d_inode;
};
struct file {
    u32 f_mode;
    struct inode *f_inode;
};
#pragma clang attribute pop

static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static u64 (*bpf_ktime_get_boot_ns)(void) = (void *)125;
static u64 (*bpf_get_current_pid_tgid)(void) = (void *)14;
static long (*bpf_get_current_comm)(void *to, u32 size) = (void *)16;
static long (*bpf_ringbuf_output)(void *map, void *from, u64 size, u64 flags) = (void *)130;

enum {
    OVERLAY = 0x794c7630,
    EROFS = 30,
    EACCES = 13,
    S_IFMT = 0170000,
    S_IFREG = 0100000,
    S_IFDIR = 0040000,
    S_IFLNK = 0120000,
    MAY_WRITE = 2,
    MAY_ACCESS = 0x10,
    FMODE_WRITE = 2,
    MAP_TYPE = 0x0f,
    MAP_SHARED = 1,
    MAP_SHARED_VALIDATE = 3,
    FS_IOC_SETFLAGS = 0x40086602,
    FS_IOC32_SETFLAGS = 0x40046602,
    FS_IOC_FSSETXATTR = 0x401c5820,
};

// What was refused; the index of its counter.
enum op { WRITE, OPEN, NAMES, ATTRIBUTES, XATTR, ACL, FLAGS, MAPPING, OPS };

// An entry's wishes.
enum { DENY_SHARED = 1 };

// A superblock that nobody has.
enum { DEAD = 1 };

struct entry {
    u64 deadline;    // nanoseconds on CLOCK_BOOTTIME; refused from then on
    u64 generation;  // of the session's lease
    u64 newest;      // the newest generation known; above `generation` it is superseded
    u64 root_ino;    // of the overlay's root
    u32 dev;         // as the kernel counts it; 0 in a free entry
    u32 wishes;
    u32 shared;      // a writable shared mapping was made: it stays 1
    u32 told;        // when a refusal was told last, in units of TELL
    u64 session[2];
    u64 superblock;  // the overlay's, once a call met it; DEAD after its death
    u64 refused[OPS];
};

// A refusal, as it is told. At most one an entry in each TELL (134 ms): a writer at full speed is
// refused a million times a second.
struct refusal {
    u64 at;
    u64 deadline;
    u64 generation;
    u64 session[2];
    u64 ino;
    u32 op;
    u32 pid;
    char command[16];
};

enum { TELL = 27 };

#define ENTRIES 16384

// Where the entry of an overlay's device is.
struct {
    int (*type)[1]; // hash
    int (*max_entries)[ENTRIES];
    u32 *key;
    u32 *value;
} devices SEC(".maps");

// The entries. The agent writes into them in place, by mmap: a deadline that moves is one store.
// The first is the header.
struct {
    int (*type)[2];        // array
    int (*map_flags)[1024]; // BPF_F_MMAPABLE
    int (*max_entries)[ENTRIES];
    u32 *key;
    struct entry *value;
} entries SEC(".maps");

struct {
    int (*type)[27]; // ring buffer
    int (*max_entries)[65536];
} refusals SEC(".maps");

INLINE struct entry *entry_of(struct super_block *sb)
{
    if (sb->s_magic != OVERLAY)
        return 0;
    u32 dev = sb->s_dev;
    u32 *found = bpf_map_lookup_elem(&devices, &dev);
    if (!found)
        return 0;
    u32 at = *found;
    struct entry *entry = bpf_map_lookup_elem(&entries, &at);
    if (!entry || entry->root_ino != sb->s_root->d_inode->i_ino)
        return 0;
    // Device and inode numbers are used again, and an entry may outlive its overlay. The first call
    // that meets it is the probe of who entered it, while the overlay lives.
    u64 own = (u64)sb;
    if (!entry->superblock)
        entry->superblock = own;
    return entry->superblock == own ? entry : 0;
}

INLINE int over(struct entry *entry)
{
    u64 deadline = *(volatile u64 *)&entry->deadline;
    u64 newest = *(volatile u64 *)&entry->newest;
    return newest > *(volatile u64 *)&entry->generation || bpf_ktime_get_boot_ns() >= deadline;
}

INLINE int count(struct entry *entry, enum op op)
{
    __sync_fetch_and_add(&entry->refused[op], 1);
    return -EROFS;
}

// Counted, and told if none of this entry was told a moment ago.
INLINE int refuse(struct entry *entry, struct inode *inode, enum op op)
{
    count(entry, op);
    u64 now = bpf_ktime_get_boot_ns();
    u32 tick = now >> TELL;
    if (entry->told == tick)
        return -EROFS;
    entry->told = tick;
    struct refusal told = {
        .at = now,
        .deadline = entry->deadline,
        .generation = entry->generation,
        .session = {entry->session[0], entry->session[1]},
        .ino = inode->i_ino,
        .op = op,
        .pid = bpf_get_current_pid_tgid() >> 32,
    };
    bpf_get_current_comm(told.command, sizeof(told.command));
    if (bpf_ringbuf_output(&refusals, &told, sizeof(told), 0)) {
        // Nobody takes them, or not fast enough: how many were lost stands in the header.
        u32 first = 0;
        struct entry *header = bpf_map_lookup_elem(&entries, &first);
        if (header)
            __sync_fetch_and_add(&header->refused[0], 1);
    }
    return -EROFS;
}

INLINE int check(struct inode *inode, enum op op)
{
    struct entry *entry = entry_of(inode->i_sb);
    if (!entry || !over(entry))
        return 0;
    return refuse(entry, inode, op);
}

INLINE int check_dentry(u64 dentry, enum op op)
{
    struct inode *inode = ((struct dentry *)dentry)->d_inode;
    // What is changed has one; newer verifiers want to see that it is looked at.
    return inode ? check(inode, op) : 0;
}

// As a read-only file system does: what goes through a fifo, a socket or a device changes no file.
INLINE int is_file(struct inode *inode)
{
    u16 type = inode->i_mode & S_IFMT;
    return type == S_IFREG || type == S_IFDIR || type == S_IFLNK;
}

#define HOOK(name, hook)             \
    SEC("lsm/" #hook) int name(u64 *args)

// write, pwritev2, O_DIRECT, aio, io_uring, sendfile, splice, copy_file_range, remap, fallocate
HOOK(file_permission, file_permission)
{
    struct inode *inode = ((struct file *)args[0])->f_inode;
    if (!((int)args[1] & MAY_WRITE) || !is_file(inode))
        return 0;
    return check(inode, WRITE);
}

HOOK(file_open, file_open)
{
    struct file *file = (void *)args[0];
    if (!(file->f_mode & FMODE_WRITE) || !is_file(file->f_inode))
        return 0;
    return check(file->f_inode, OPEN);
}

// open for writing, O_TRUNC, truncate; and, on the directory, everything that makes, moves or
// removes a name in it
HOOK(inode_permission, inode_permission)
{
    struct inode *inode = (void *)args[0];
    if (!((int)args[1] & MAY_WRITE) || !is_file(inode))
        return 0;
    if (!((int)args[1] & MAY_ACCESS))
        return check(inode, NAMES);
    // access(2) asks and changes nothing: it is answered and counted, but not told. So the agent's own
    // probes, which ask like that, take the place of no writer's refusal.
    struct entry *entry = entry_of(inode->i_sb);
    return entry && over(entry) ? count(entry, NAMES) : 0;
}

// chmod, chown, utimes, truncate, ftruncate
HOOK(inode_setattr_1, inode_setattr)
{
    return check_dentry(args[0], ATTRIBUTES);
}

HOOK(inode_setattr_2, inode_setattr)
{
    return check_dentry(args[1], ATTRIBUTES);
}

HOOK(inode_setxattr, inode_setxattr)
{
    return check_dentry(args[1], XATTR);
}

HOOK(inode_removexattr, inode_removexattr)
{
    return check_dentry(args[1], XATTR);
}

HOOK(inode_set_acl, inode_set_acl)
{
    return check_dentry(args[1], ACL);
}

HOOK(inode_remove_acl, inode_remove_acl)
{
    return check_dentry(args[1], ACL);
}

INLINE int check_ioctl(u64 *args)
{
    u32 cmd = (u32)args[1];
    if (cmd != FS_IOC_SETFLAGS && cmd != FS_IOC32_SETFLAGS && cmd != FS_IOC_FSSETXATTR)
        return 0;
    return check(((struct file *)args[0])->f_inode, FLAGS);
}

HOOK(file_ioctl, file_ioctl)
{
    return check_ioctl(args);
}

HOOK(file_ioctl_compat, file_ioctl_compat)
{
    return check_ioctl(args);
}

HOOK(inode_file_setattr, inode_file_setattr)
{
    return check_dentry(args[0], FLAGS);
}

// A shared mapping of a file that is open for writing can be made writable later (mprotect), where no
// hook sees whose it is: it counts as writable.
HOOK(mmap_file, mmap_file)
{
    struct file *file = (void *)args[0];
    u32 type = args[3] & MAP_TYPE;
    if (!file || (type != MAP_SHARED && type != MAP_SHARED_VALIDATE) || !(file->f_mode & FMODE_WRITE))
        return 0;
    struct entry *entry = entry_of(file->f_inode->i_sb);
    if (!entry)
        return 0;
    if (over(entry))
        return refuse(entry, file->f_inode, MAPPING);
    if (entry->wishes & DENY_SHARED) {
        refuse(entry, file->f_inode, MAPPING);
        return -EACCES;
    }
    // Noted before it is decided, with a full barrier between: who moves the deadline and then reads the
    // note misses none. An exchange is one on every processor, a store or an atomic without an answer
    // is not.
    __sync_lock_test_and_set(&entry->shared, 1);
    return over(entry) ? refuse(entry, file->f_inode, MAPPING) : 0;
}

// A superblock is given up: nobody can call anything on it any more, its number is its own for a moment
// yet, and its address will be another one's.
HOOK(sb_delete, sb_delete)
{
    struct super_block *sb = (void *)args[0];
    if (sb->s_magic != OVERLAY)
        return 0;
    u32 dev = sb->s_dev;
    u32 *found = bpf_map_lookup_elem(&devices, &dev);
    if (!found)
        return 0;
    u32 at = *found;
    struct entry *entry = bpf_map_lookup_elem(&entries, &at);
    // One that no call met is the one that it was entered for.
    if (entry && (!entry->superblock || entry->superblock == (u64)sb))
        entry->superblock = DEAD;
    return 0;
}

// GPL-compatible, as the kernel demands of every LSM program; no helper here is for GPL alone.
char LICENSE[] SEC("license") = "Dual MIT/GPL";
