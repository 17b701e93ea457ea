//! What the writers do: each runs in a process of its own, a copy of this program, and stamps its
//! bytes with the time at which it asks for them to be written.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use overfence::kernel::clock;

mod hung;
pub mod large;
mod others;
mod queues;

use queues::Ring;

/// Becomes the writer of this name. The arguments are paths.
pub fn act(name: &str) -> ! {
    let args: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let file = || args[0].as_path();
    match name {
        "write" => write_on(&open(file())),
        "append" => write_on(&append(file())),
        "direct" => direct(file()),
        "map" => map(file(), true),
        "map-closed" => map(file(), false),
        "unlinked" => unlinked(file()),
        "splice" => splice(file()),
        "sendfile" => sendfile(file()),
        "fallocate" => fallocate(file()),
        "wrote" => wrote(file()),
        "stopped" => stopped(file()),
        "daemon" => daemon(file()),
        "bomb" => bomb(file()),
        "vfork" => vfork(file()),
        "exec" => exec(file()),
        "nested" => nested(file(), &args[1]),
        "large-write" => large::write(file()),
        "large-fsync" => large::fsync(file()),
        "large-copy-up" => large::copy_up(file()),
        "aio" => queues::aio(file()),
        "ring-sqpoll" => {
            queues::ring(file(), &Ring { sqpoll: true, workers: false, registered: false })
        }
        "ring-workers" => {
            queues::ring(file(), &Ring { sqpoll: false, workers: true, registered: false })
        }
        "ring-registered" => {
            queues::ring(file(), &Ring { sqpoll: false, workers: false, registered: true })
        }
        "sender" => others::sender(file(), &args[1]),
        "receiver" => others::receiver(file(), true),
        "mailbox" => others::receiver(file(), false),
        "in-flight" => others::in_flight(file()),
        "clone-write" => others::clone_write(file()),
        "clone-hold" => others::clone_hold(file()),
        "elsewhere-write" => others::elsewhere_write(file()),
        "elsewhere-hold" => others::elsewhere_hold(file()),
        "loop-write" => others::loop_write(file()),
        "loop-hold" => others::loop_hold(file()),
        "hung-open" => hung::server(file(), Some(hung::OPEN)),
        "hung-read" => hung::server(file(), Some(hung::READ)),
        "healthy" => hung::server(file(), None),
        "caught" => hung::caught(file(), &args[1]),
        "tracer" => others::tracer(file()),
        "stopper" => others::stopper(file()),
        other => panic!("nobody acts {other}"),
    }
}

/// Tells the test that it may begin.
pub fn ready() {
    say(b'r');
}

pub fn say(word: u8) {
    let mut out = std::io::stdout().lock();
    out.write_all(&[word]).unwrap();
    out.flush().unwrap();
}

/// Waits for a word of the test; ends with it.
pub fn hear() -> u8 {
    let mut word = [0];
    if std::io::stdin().read(&mut word).unwrap() == 0 {
        std::process::exit(0);
    }
    word[0]
}

/// Now, as a reader finds it in the file.
pub fn stamp() -> [u8; 8] {
    clock::now().0.to_le_bytes()
}

/// Between two writes, so that the rest of the machine has its share.
pub fn breathe() {
    std::thread::sleep(Duration::from_micros(200));
}

pub fn sleep() -> ! {
    loop {
        nix::unistd::pause();
    }
}

pub fn open(path: &Path) -> File {
    OpenOptions::new().create(true).read(true).write(true).truncate(false).open(path).unwrap()
}

pub fn append(path: &Path) -> File {
    OpenOptions::new().create(true).append(true).open(path).unwrap()
}

/// Writes for ever.
pub fn write_on(mut file: &File) -> ! {
    file.write_all(&stamp()).unwrap();
    ready();
    loop {
        file.write_all(&stamp()).unwrap();
        breathe();
    }
}

/// A page that O_DIRECT accepts.
#[repr(align(4096))]
pub struct Page(pub [u8; 4096]);

impl Page {
    pub fn stamped() -> Self {
        let mut page = Self([0; 4096]);
        page.0[..8].copy_from_slice(&stamp());
        page
    }
}

fn direct(path: &Path) -> ! {
    let file = open_direct(path);
    ready();
    for n in (0..64).cycle() {
        file.write_all_at(&Page::stamped().0, n * 4096).unwrap();
    }
    unreachable!()
}

pub fn open_direct(path: &Path) -> File {
    OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(false)
        .custom_flags(libc::O_DIRECT)
        .open(path)
        .unwrap()
}

fn map(path: &Path, keep: bool) -> ! {
    use rustix::mm::{MapFlags, ProtFlags};
    let file = open(path);
    file.set_len(4096).unwrap();
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping of a file that is as long, at an address of the kernel's choice.
    let page = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), 4096, prot, MapFlags::SHARED, &file, 0).unwrap()
    };
    let _kept = keep.then_some(file);
    ready();
    for n in (0..512).cycle() {
        // SAFETY: within the page, which is never unmapped.
        unsafe { page.cast::<u64>().add(n).write_volatile(clock::now().0) };
        breathe();
    }
    unreachable!()
}

/// The reader looks at the file while it has its name; the writer goes on without it.
fn unlinked(path: &Path) -> ! {
    let mut file = open(path);
    file.write_all(&stamp()).unwrap();
    ready();
    hear();
    std::fs::remove_file(path).unwrap();
    say(b'u');
    write_on(&file)
}

fn splice(path: &Path) -> ! {
    let file = open(path);
    let (from, to) = rustix::pipe::pipe().unwrap();
    ready();
    loop {
        rustix::io::write(&to, &stamp()).unwrap();
        let flags = rustix::pipe::SpliceFlags::empty();
        rustix::pipe::splice(&from, None, &file, None, 8, flags).unwrap();
        breathe();
    }
}

fn sendfile(path: &Path) -> ! {
    let file = open(path);
    let memory = rustix::fs::memfd_create("stamp", rustix::fs::MemfdFlags::empty()).unwrap();
    let memory = File::from(memory);
    ready();
    loop {
        memory.write_all_at(&stamp(), 0).unwrap();
        rustix::fs::sendfile(&file, &memory, Some(&mut 0), 8).unwrap();
        breathe();
    }
}

/// No bytes of its own, but length.
fn fallocate(path: &Path) -> ! {
    let file = open(path);
    ready();
    for n in (0..).step_by(8) {
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), n, 8).unwrap();
        breathe();
    }
    unreachable!()
}

/// Holds nothing any more.
fn wrote(path: &Path) -> ! {
    std::fs::write(path, stamp()).unwrap();
    ready();
    sleep()
}

/// Stops itself, again and again should anybody make it go on.
fn stopped(path: &Path) -> ! {
    let mut file = open(path);
    file.write_all(&stamp()).unwrap();
    ready();
    loop {
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGSTOP).unwrap();
        file.write_all(&stamp()).unwrap();
    }
}

fn fork() -> Option<nix::unistd::Pid> {
    // SAFETY: this process has one thread, so the child may do anything.
    match unsafe { nix::unistd::fork() }.unwrap() {
        nix::unistd::ForkResult::Parent { child } => Some(child),
        nix::unistd::ForkResult::Child => None,
    }
}

fn daemon(path: &Path) -> ! {
    if fork().is_some() {
        std::process::exit(0);
    }
    nix::unistd::setsid().unwrap();
    if fork().is_some() {
        std::process::exit(0);
    }
    write_on(&append(path))
}

const BOMB: usize = 500;

/// Five hundred processes: each writes, forks its successor and ends.
fn bomb(path: &Path) -> ! {
    // Nobody waits for them.
    // SAFETY: no handler is set, the kernel reaps.
    unsafe {
        use nix::sys::signal::{SigHandler, Signal, signal};
        signal(Signal::SIGCHLD, SigHandler::SigIgn).unwrap();
    }
    for _ in 1..BOMB {
        if fork().is_none() {
            fuse(path);
        }
    }
    ready();
    fuse(path)
}

fn fuse(path: &Path) -> ! {
    let mut file = append(path);
    loop {
        for _ in 0..8 {
            file.write_all(&stamp()).unwrap();
            std::thread::sleep(Duration::from_millis(40));
        }
        if fork().is_some() {
            std::process::exit(0);
        }
    }
}

/// The parent waits in the kernel for its child to exec, which it never does.
fn vfork(path: &Path) -> ! {
    let flags = libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: without CLONE_VM this is a fork whose parent waits; this process has one thread.
    let child = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    match child {
        0 => write_on(&append(path)),
        _ => panic!("the parent went on: {child}"),
    }
}

/// Threads write while the first of them executes this program anew. The descriptor stays.
fn exec(path: &Path) -> ! {
    use std::os::fd::{AsRawFd as _, FromRawFd as _};
    use std::os::unix::process::CommandExt as _;
    const KEPT: &str = "OVERFENCE_TEST_DESCRIPTOR";
    let file = match std::env::var(KEPT) {
        // SAFETY: the program before this one left it open, and nobody else here knows of it.
        Ok(number) => unsafe { File::from_raw_fd(number.parse().unwrap()) },
        Err(_) => {
            let file = append(path);
            rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
            ready();
            file
        }
    };
    for _ in 0..8 {
        let mut file = file.try_clone().unwrap();
        std::thread::spawn(move || {
            loop {
                file.write_all(&stamp()).unwrap();
                breathe();
            }
        });
    }
    std::thread::sleep(Duration::from_millis(5));
    let number = file.as_raw_fd().to_string();
    let fault = std::process::Command::new("/proc/self/exe").arg(path).env(KEPT, number).exec();
    panic!("{fault}")
}

/// Makes cgroups of its own below the session's, and goes into them.
fn nested(path: &Path, cgroup: &Path) -> ! {
    for name in ["a", "a/b"] {
        let cgroup = cgroup.join(name);
        std::fs::create_dir(&cgroup).unwrap();
        if fork().is_none() {
            std::fs::write(cgroup.join("cgroup.procs"), "0").unwrap();
            write_on(&append(path));
        }
    }
    sleep()
}
