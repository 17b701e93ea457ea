//! What holds an overlay from outside of its session, and how it gets there.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use overfence::kernel::{ns, overlay};
use rustix::fs::{Mode, OFlags};

use super::*;

fn post(file: File, socket: &UnixStream) {
    let fds = [file.as_raw_fd()];
    let message = [ControlMessage::ScmRights(&fds)];
    sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(b"f")], &message, MsgFlags::empty(), None)
        .unwrap();
}

fn take(socket: &UnixStream) -> File {
    let mut byte = [0];
    let mut parts = [IoSliceMut::new(&mut byte)];
    let mut room = nix::cmsg_space!(i32);
    let fd = socket.as_raw_fd();
    let got = recvmsg::<()>(fd, &mut parts, Some(&mut room), MsgFlags::empty()).unwrap();
    match got.cmsgs().unwrap().next() {
        // SAFETY: the descriptor came just now and is nobody else's.
        Some(ControlMessageOwned::ScmRights(fds)) => unsafe { File::from_raw_fd(fds[0]) },
        other => panic!("no descriptor came, but {other:?}"),
    }
}

/// Opens a file and sends it away; keeps nothing of it.
pub fn sender(path: &Path, socket: &Path) -> ! {
    let mut file = append(path);
    file.write_all(&stamp()).unwrap();
    let socket = UnixStream::connect(socket).unwrap();
    post(file, &socket);
    ready();
    sleep()
}

/// Writes what it was sent, at once or when it is told to.
pub fn receiver(socket: &Path, at_once: bool) -> ! {
    let listener = UnixListener::bind(socket).unwrap();
    ready();
    let (socket, _) = listener.accept().unwrap();
    if !at_once {
        hear();
    }
    let mut file = take(&socket);
    file.write_all(&stamp()).unwrap();
    if !at_once {
        say(b'w');
    }
    loop {
        file.write_all(&stamp()).unwrap();
        breathe();
    }
}

/// The file is in a socket that nobody reads, and nowhere else.
pub fn in_flight(path: &Path) -> ! {
    let mut file = append(path);
    file.write_all(&stamp()).unwrap();
    let (here, _there) = UnixStream::pair().unwrap();
    post(file, &here);
    ready();
    sleep()
}

fn open_in(tree: &OwnedFd) -> rustix::io::Result<File> {
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::APPEND;
    rustix::fs::openat(tree, "bytes", flags, Mode::RUSR).map(File::from)
}

/// Writes through a copy of the mount that is in no namespace.
pub fn clone_write(merged: &Path) -> ! {
    let tree = overlay::clone_tree(merged).unwrap();
    write_on(&open_in(&tree).unwrap())
}

/// Keeps such a copy; says what a write through it is answered.
pub fn clone_hold(merged: &Path) -> ! {
    let tree = overlay::clone_tree(merged).unwrap();
    ready();
    loop {
        hear();
        say(open_in(&tree).err().map_or(0, |e| e.raw_os_error().try_into().unwrap()));
    }
}

/// Writes in a mount namespace of its own.
pub fn elsewhere_write(path: &Path) -> ! {
    ns::unshare_mounts_private().unwrap();
    write_on(&append(path))
}

/// Keeps such a namespace; says what a write in it is answered.
pub fn elsewhere_hold(path: &Path) -> ! {
    ns::unshare_mounts_private().unwrap();
    ready();
    loop {
        hear();
        let answer = OpenOptions::new().create(true).append(true).open(path);
        say(answer.err().map_or(0, |e| e.raw_os_error().unwrap().try_into().unwrap()));
    }
}

/// Writes to a loop device whose blocks are a file.
pub fn loop_write(image: &Path) -> ! {
    open(image).set_len(64 * 4096).unwrap();
    let device = attach(image);
    ready();
    for n in (0..64).cycle() {
        device.write_all_at(&Page::stamped().0, n * 4096).unwrap();
        breathe();
    }
    unreachable!()
}

/// Keeps such a device.
pub fn loop_hold(image: &Path) -> ! {
    let _device = attach(image);
    ready();
    sleep()
}

/// A loop device that goes when the last one closes it.
fn attach(image: &Path) -> File {
    const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4c82;
    const LOOP_CONFIGURE: libc::c_ulong = 0x4c0a;
    const LO_FLAGS_AUTOCLEAR: u32 = 4;
    let options = || OpenOptions::new().read(true).write(true).clone();
    let file = options().open(image).unwrap();
    let control = options().open("/dev/loop-control").unwrap();
    loop {
        // SAFETY: it takes no argument.
        let n = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
        let path = PathBuf::from(format!("/dev/loop{n}"));
        let device = options().custom_flags(libc::O_DIRECT).open(&path).unwrap();
        // linux/loop.h: struct loop_config, the descriptor first, lo_flags at 60.
        let mut config = [0_u8; 304];
        config[..4].copy_from_slice(&file.as_raw_fd().to_ne_bytes());
        config[60..64].copy_from_slice(&LO_FLAGS_AUTOCLEAR.to_ne_bytes());
        // SAFETY: the structure is as long as the kernel reads.
        let set = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, config.as_ptr()) };
        match (set, std::io::Error::last_os_error()) {
            (0, _) => return device,
            // Somebody else was faster.
            (_, e) if e.raw_os_error() == Some(libc::EBUSY) => {}
            (_, e) => panic!("{}: {e}", path.display()),
        }
    }
}

/// Asks something of a process that is, or is to be, traced; the answer of ptrace(2).
fn trace(request: libc::c_uint, pid: i32) -> libc::c_long {
    // SAFETY: the requests that are asked here read and write no memory.
    unsafe { libc::ptrace(request, pid, 0, 0) }
}

/// Seizes another process; its id.
fn seized(pid: &Path) -> i32 {
    let pid = pid.to_str().unwrap().parse().unwrap();
    assert_eq!(trace(libc::PTRACE_SEIZE, pid), 0, "{}", std::io::Error::last_os_error());
    pid
}

/// Whether it stops when it is asked to.
fn interrupted(pid: i32) -> bool {
    trace(libc::PTRACE_INTERRUPT, pid);
    let mut status = 0;
    // SAFETY: the kernel writes the status.
    let n = unsafe { libc::waitpid(pid, &raw mut status, libc::__WALL) };
    n == pid && libc::WIFSTOPPED(status)
}

/// Stops another process, and leaves it there. Where this one ends, that one goes on.
pub fn stopper(pid: &Path) -> ! {
    assert!(interrupted(seized(pid)));
    ready();
    sleep()
}

/// Stops another process and lets it go on, for ever.
pub fn tracer(pid: &Path) -> ! {
    let pid = seized(pid);
    let ask = |request| trace(request, pid);
    let mut told = false;
    loop {
        if !interrupted(pid) {
            sleep();
        }
        std::thread::sleep(Duration::from_millis(2));
        ask(libc::PTRACE_CONT);
        if !told {
            ready();
            told = true;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
