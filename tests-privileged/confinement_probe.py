# Tries each known way out of the place it runs in and says what came of it, one `name=answer` a
# line: `open`, or the name of the error. Run outside as root first: there each way must be open,
# or the probe proves nothing.
import ctypes, errno, fcntl, json, os, pty, signal, socket, struct, sys, termios

facts = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
arm = os.uname().machine == "aarch64"
if os.uname().machine not in ("x86_64", "aarch64"):
    sys.exit("no system call numbers for this machine")

def call(x86, arm64, *args):
    number = arm64 if arm else x86
    wide = [ctypes.c_void_p(a) if isinstance(a, int) else a for a in args]
    answer = libc.syscall(ctypes.c_long(number), *wide)
    if answer < 0:
        raise OSError(ctypes.get_errno(), "")
    return answer

ways = {}
def way(f):
    ways[f.__name__] = f
    return f

# The session's own storage and other sessions, by their paths on the host.
@way
def upper_by_path(): open(facts["upper"] + "/probe", "w").close()
@way
def work_by_path(): os.listdir(facts["work"])
@way
def other_session(): os.listdir(facts["other"])
@way
def init_record(): open(facts["record"]).close()
@way
def run_dir_written(): open(facts["run_dir"] + "/probe", "w").close()
@way
def usr_written(): open(facts["usr"] + "/overfence-probe", "w").close(); os.unlink(facts["usr"] + "/overfence-probe")
@way
def root_written(): os.mkdir("/overfence-probe"); os.rmdir("/overfence-probe")
@way
def etc_shadow(): open("/etc/shadow").close()
@way
def agent_socket():
    with socket.socket(socket.AF_UNIX) as s: s.connect(facts["socket"])
@way
def abstract_socket():
    with socket.socket(socket.AF_UNIX) as s: s.connect("\0" + facts["abstract"])

@way
def machine_socket():
    # Reaches the hypervisor from any network namespace.
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()

# Devices.
@way
def raw_disk_node():
    major, minor = facts["disk"]
    node = facts["scratch"] + "/disk"
    os.mknod(node, 0o60600, os.makedev(major, minor))
    os.unlink(node)
@way
def memory_device_node():
    node = facts["scratch"] + "/mem"
    os.mknod(node, 0o20600, os.makedev(1, 1))
    os.unlink(node)
@way
def loop_control(): os.close(os.open("/dev/loop-control", os.O_RDWR))

# The kernel's knobs. Opened only, not written.
@way
def core_pattern(): open("/proc/sys/kernel/core_pattern", "r+").close()
@way
def sysrq_trigger(): os.close(os.open("/proc/sysrq-trigger", os.O_WRONLY))

# The cgroup tree and bpffs.
@way
def cgroup_by_path(): open(facts["cgroup"] + "/cgroup.procs", "w").close()
def mounted(kind):
    call(165, 40, b"none", facts["scratch"].encode(), kind, 0, 0)
    libc.umount2(facts["scratch"].encode(), 2)
@way
def mount_cgroup2(): mounted(b"cgroup2")
@way
def mount_bpffs(): mounted(b"bpf")
@way
def mount_proc(): mounted(b"proc")
@way
def fsopen_cgroup2(): os.close(call(430, 430, b"cgroup2", 1))
@way
def bpf_map(): os.close(call(321, 280, 0, struct.pack("IIII", 2, 4, 4, 1) + bytes(112), 128))

# Namespaces and mounts.
@way
def user_namespace_unshare(): call(272, 97, 0x10000000)
@way
def user_namespace_with_others(): call(272, 97, 0x10000000 | 0x20000 | 0x40000000)
def child_of(pid):
    if pid == 0: os._exit(0)
    os.waitpid(pid, 0)
@way
def user_namespace_clone(): child_of(call(56, 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0))
@way
def user_namespace_clone3(): child_of(call(435, 435, struct.pack("QQQQQQQQ", 0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0), 64))
@way
def mount_namespace(): call(272, 97, 0x20000)
@way
def setns_own():
    fd = os.open("/proc/self/ns/uts", os.O_RDONLY)
    call(308, 268, fd, 0)
@way
def workspace_remount(): call(165, 40, b"none", facts["mount"].encode(), b"", 32 | 4096 | 2, 0)
@way
def workspace_mount_setattr(): call(442, 442, -100, facts["mount"].encode(), 0, struct.pack("QQQQ", 2, 0, 0, 0), 32)
@way
def workspace_open_tree(): os.close(call(428, 428, -100, facts["mount"].encode(), 1))
@way
def workspace_umount(): call(166, 39, facts["mount"].encode(), 2)
@way
def pivot_root():
    try: call(155, 41, b"/", b"/")
    # What the kernel says when it was asked at all.
    except OSError as e:
        if e.errno not in (errno.EBUSY, errno.EINVAL): raise
@way
def chroot(): os.chroot("/")
@way
def file_handle():
    scratch = facts["handles"]
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
    mount_id = ctypes.c_int()
    call(303, 264, -100, scratch.encode(), handle, ctypes.byref(mount_id), 0)
    base = os.open(scratch, os.O_RDONLY)
    os.close(call(304, 265, base, handle, os.O_RDONLY))

# Broad kernel surfaces.
@way
def keyring(): call(248, 217, b"user", b"probe", b"x", 1, -2)
@way
def keyctl(): call(250, 219, 0, -2, 1)
@way
def io_uring(): os.close(call(425, 425, 4, ctypes.create_string_buffer(120)))
@way
def perf_event():
    attr = ctypes.create_string_buffer(struct.pack("IIQ", 1, 64, 1) + bytes(112))
    os.close(call(298, 241, attr, 0, -1, -1, 0))
@way
def user_fault_fd(): os.close(call(323, 282, 0))
@way
def odd_personality(): call(135, 92, 0x0400000)
@way
def swap_off():
    try: call(168, 225, facts["scratch"].encode())
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.EISDIR): raise
@way
def process_accounting(): call(163, 89, 0)
@way
def kernel_log(): call(103, 116, 10, 0, 0)

# Other processes, and the terminal.
@way
def ptrace_outside():
    call(101, 117, 16, facts["victim"], 0, 0)
    os.waitpid(facts["victim"], 0)
    call(101, 117, 17, facts["victim"], 0, 0)
@way
def signal_outside(): os.kill(facts["victim"], 0)
@way
def memory_of_init(): open(f"/proc/{facts['init']}/mem", "rb").close()
@way
def root_of_init(): os.listdir(f"/proc/{facts['init']}/root")
def typed_for_another(request):
    master, slave = pty.openpty()
    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    call(16, 29, slave, request, b"x")
@way
def terminal_input(): typed_for_another(0x5412)
@way
def terminal_input_high_bit(): typed_for_another(0x5412 | 1 << 32)

def tried(f):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            f()
            answer = "open"
        except OSError as e:
            answer = errno.errorcode.get(e.errno, str(e.errno))
        except BaseException as e:
            answer = "broken: " + repr(e)
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe: answer = pipe.read() or "died"
    os.waitpid(pid, 0)
    return answer

for name, f in ways.items():
    print(f"{name}={tried(f)}", flush=True)
