//! Starting a session's init: from the client's process through the sealed cgroup and a mount
//! namespace that holds no other session, to bubblewrap. The steps are in [`Journey::go`].

use std::ffi::{CString, OsString};
use std::fs::{self, File};
use std::io::{self, IsTerminal as _, Read as _, Seek as _, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use nix::mount::MsFlags;
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{Gid, Pid, Uid, setgroups, setresgid, setresuid};
use rustix::fs::{CWD, MemfdFlags, memfd_create};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use super::beat;
use super::client::Watch;
use super::control::{Word, hear, say};
use super::init::Orders;
use super::record::{self, InitRecord, Lock};
use super::shed::Errand;
use super::walls::{self, Top, Walls};
use super::{Command, Error, Holder, Network, Place, Result, etc, filters, io_at};
use super::{MAPPED_COUNT, MAPPED_FIRST};
use crate::kernel::launch::{Fork, close_all_on_exec, exit_now, fork};

/// Starts the init and writes its record. What comes back is the line to it; it waits for the
/// word to go on.
pub(super) fn init(
    place: &Place,
    command: Option<&Command>,
    lock: &Lock,
    watch: &Watch,
) -> Result<UnixStream> {
    if !Path::new(walls::BUBBLEWRAP).exists() {
        return Err(Error::NoBubblewrap);
    }
    lock.anew(place)?;
    let filters = filters::programs()?;
    let etc = etc::prepare(&place.state_dir)?;
    let stub = place.run_dir.join("overfence");
    File::options().create(true).append(true).open(&stub).map_err(io_at("make", &stub))?;

    let doing = "make ready the start of";
    let at = || io_at(doing, place.session.to_string());
    let (ours, theirs) = UnixStream::pair().map_err(at())?;
    let (status, status_end) =
        nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).map_err(io_at(doing, &place.run_dir))?;
    let complaints = memory("complaints", &[]).map_err(at())?;
    let orders = Orders {
        errand: command.map(|command| Errand::new(place, command)),
        beat_ttl: (place.holder == Holder::Process).then_some(place.ttl),
    };
    let orders = serde_json::to_vec(&orders).map_err(io::Error::other).map_err(at())?;
    let filters = filters
        .iter()
        .map(|program| memory("filter", &filters::bytes(program)))
        .collect::<io::Result<Vec<_>>>()
        .map_err(at())?;
    let journey = Journey {
        place,
        etc,
        filters,
        orders: memory("orders", &orders).map_err(at())?,
        control: theirs.into(),
        lock: record::open_lock(place)?,
        signs: beat::open(place)?,
        status: status_end,
        complaints: complaints.try_clone().map_err(at())?,
        caller_io: command.is_some(),
    };
    let monitor = match fork().map_err(at())? {
        Fork::Parent(pid) => pid,
        Fork::Child => {
            let Err(e) = journey.go();
            let _ = writeln!(&journey.complaints, "{e}");
            exit_now(125);
        }
    };
    // Our copies of the other ends: their closing must be seen.
    drop(journey);
    match begin(place, status, &ours, watch) {
        Ok(Some(init)) => record::write(place, init).map(|()| ours),
        Ok(None) => {
            // Both ends are closed: the monitor ends by itself.
            let _ = waitpid(monitor, None);
            Err(Error::Walls { session: place.session, said: text_of(complaints) })
        }
        Err(e) => {
            // It may be frozen; this reaches it nevertheless. An init that hears nothing from us
            // any more leaves.
            let _ = kill(monitor, Signal::SIGKILL);
            Err(e)
        }
    }
}

/// Waits until the walls stand; `None` when they do not.
fn begin(
    place: &Place,
    status: OwnedFd,
    control: &UnixStream,
    watch: &Watch,
) -> Result<Option<InitRecord>> {
    let at = || io_at("follow the start of", place.session.to_string());
    watch.before_start(&status)?;
    let Some(pid) = child_pid(status).map_err(at())? else { return Ok(None) };
    watch.before_start(control)?;
    if hear(control).map_err(at())? != Some(Word::Ready) {
        return Ok(None);
    }
    let init = InitRecord::of(pid).map_err(at())?;
    if init.lives_in(&place.cgroup).map_err(at())? {
        return Ok(Some(init));
    }
    let said = format!("pid {pid} is not in {}", place.cgroup.display());
    Err(Error::Walls { session: place.session, said })
}

/// Reads the first of bubblewrap's status documents.
fn child_pid(status: OwnedFd) -> io::Result<Option<u32>> {
    #[derive(serde::Deserialize)]
    struct Status {
        #[serde(rename = "child-pid")]
        child_pid: u32,
    }
    let mut text = Vec::new();
    let mut status = File::from(status);
    let mut piece = [0; 256];
    loop {
        let n = status.read(&mut piece)?;
        text.extend_from_slice(&piece[..n]);
        if let Some(Ok(first)) = serde_json::Deserializer::from_slice(&text).into_iter().next() {
            let first: Status = first;
            return Ok(Some(first.child_pid));
        }
        if n == 0 {
            return Ok(None);
        }
    }
}

/// All that goes from the client to the init.
struct Journey<'a> {
    place: &'a Place,
    etc: PathBuf,
    filters: Vec<File>,
    orders: File,
    control: OwnedFd,
    /// The record's lock, opened anew for the init.
    lock: File,
    /// Where it gives its signs of life.
    signs: File,
    status: OwnedFd,
    complaints: File,
    /// Whether the command gets the caller's standard streams. An init without a command gets
    /// none, else a caller that reads to their end would wait for the session's.
    caller_io: bool,
}

/// A step of the journey that failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step}: {source}")]
struct Stumble {
    step: &'static str,
    source: io::Error,
}

fn at<E: Into<io::Error>>(step: &'static str) -> impl FnOnce(E) -> Stumble {
    move |e| Stumble { step, source: e.into() }
}

impl Journey<'_> {
    /// The forked child's way to bubblewrap, in this order.
    fn go(&self) -> Result<std::convert::Infallible, Stumble> {
        let place = self.place;
        // 1. Nothing from the terminal ends the monitor: it would take the exit code along.
        SigSet::all().thread_block().map_err(at("block signals"))?;
        // 2. Into the sealed cgroup, before anything of the session's is touched.
        enter_cgroup(place).map_err(at("enter the sealed cgroup"))?;
        // 3. Into a mount namespace of our own, with this session's mounts alone set up in it.
        self.stage().map_err(at("set up the session's mounts"))?;
        // 4. Mapped ids: last of the steps that want the host's root.
        if place.mapped {
            own_ids().map_err(at("map the session's ids"))?;
        }
        // 5. The caller's streams are for the command, not for the monitor and the init.
        let streams = self.streams().map_err(at("set the standard streams apart"))?;
        // 6. Nothing else that is open here gets in.
        close_all_on_exec().map_err(at("mark descriptors to be closed"))?;
        let mut passed: Vec<BorrowedFd> = vec![self.orders.as_fd(), self.control.as_fd()];
        passed.extend([self.lock.as_fd(), self.signs.as_fd(), self.status.as_fd()]);
        passed.extend(self.filters.iter().chain(&streams).map(AsFd::as_fd));
        for fd in passed {
            fcntl_setfd(fd, FdFlags::empty()).map_err(at("keep a descriptor open"))?;
        }
        // 7. The walls.
        let (orders, control) = (self.orders.as_raw_fd(), self.control.as_raw_fd());
        let told = [orders, control, self.lock.as_raw_fd(), self.signs.as_raw_fd()];
        let init: Vec<RawFd> =
            told.into_iter().chain(streams.iter().map(|s| s.as_raw_fd())).collect();
        let arguments = walls::arguments(&Walls {
            tops: tops(),
            read_only_proc: present(walls::READ_ONLY_PROC),
            masked_proc: present(walls::MASKED_PROC),
            filters: self.filters.iter().map(|f| f.as_raw_fd()).collect(),
            status: self.status.as_raw_fd(),
            own_network: place.network == Network::Own,
            mapped: place.mapped,
            init: init.iter().map(|fd| fd.to_string().into()).collect(),
        });
        let words = std::iter::once(OsString::from(walls::BUBBLEWRAP))
            .chain(arguments)
            .map(|word| CString::new(word.into_vec()))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| at("spell the arguments")(io::Error::other(e)))?;
        crate::failpoint::hit("workload.walls.before");
        nix::unistd::execve(words[0].as_c_str(), &words, &[] as &[&std::ffi::CStr])
            .map_err(at("run bubblewrap"))
    }

    /// Copies of the session's four mounts are taken where we are, then attached below
    /// [`walls::STAGE`] in a copy of the cell (or of our own namespace, when there is none).
    fn stage(&self) -> io::Result<()> {
        let Place { merged, run_dir, binary, cell, .. } = self.place;
        let mut trees = vec![];
        for path in [merged, run_dir, &self.etc, binary] {
            let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
            let tree = open_tree(CWD, path, flags).map_err(|e| {
                let e = io::Error::from(e);
                io::Error::new(e.kind(), format!("{}: {e}", path.display()))
            })?;
            trees.push((tree, path.is_dir()));
        }
        if let Some(cell) = cell {
            setns(File::open(cell)?, CloneFlags::CLONE_NEWNS)?;
        }
        unshare(CloneFlags::CLONE_NEWNS)?;
        receive_only()?;
        let stage = Path::new(walls::STAGE);
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        nix::mount::mount(Some("tmpfs"), stage, Some("tmpfs"), flags, Some("mode=0755"))?;
        for ((tree, is_dir), name) in trees.into_iter().zip(walls::STAGED) {
            let at = stage.join(name);
            if is_dir {
                fs::create_dir(&at)?;
            } else {
                File::create_new(&at)?;
            }
            move_mount(tree, "", CWD, &at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        }
        // The attached ones came with the host's propagation.
        receive_only()
    }

    /// Copies of the caller's streams for the init to hand on; our own become nothing, and errors
    /// go where the client reads them.
    fn streams(&self) -> io::Result<Vec<File>> {
        let null = File::options().read(true).write(true).open("/dev/null")?;
        let mut streams = vec![];
        if self.caller_io {
            let stdio = [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()];
            for stream in stdio {
                streams.push(File::from(fcntl_dupfd_cloexec(stream, 3)?));
            }
        }
        rustix::stdio::dup2_stdin(&null)?;
        // From a terminal on stdout bubblewrap makes /dev/console, by which `tty` finds a name.
        if !(self.caller_io && io::stdout().is_terminal()) {
            rustix::stdio::dup2_stdout(&null)?;
        }
        rustix::stdio::dup2_stderr(&self.complaints)?;
        Ok(streams)
    }
}

/// Moves this process into the sealed cgroup. If that is frozen, so are we.
pub(super) fn enter_cgroup(place: &Place) -> io::Result<()> {
    crate::failpoint::fails("workload.enter.before")?;
    fs::write(place.cgroup.join("cgroup.procs"), "0")?;
    crate::failpoint::hit("workload.enter.after");
    Ok(())
}

/// Mounts and unmounts of the host arrive here, none of ours leave.
fn receive_only() -> io::Result<()> {
    let none = None::<&str>;
    Ok(nix::mount::mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none)?)
}

/// Enters a user namespace in which 0 is [`MAPPED_FIRST`]. A helper makes it, so that the map can
/// be written from outside.
fn own_ids() -> io::Result<()> {
    let (ours, theirs) = UnixStream::pair()?;
    let helper = match fork()? {
        Fork::Parent(pid) => pid,
        Fork::Child => {
            drop(ours);
            if unshare(CloneFlags::CLONE_NEWUSER).is_ok() && say(&theirs, Word::Ready).is_ok() {
                let _ = hear(&theirs);
            }
            exit_now(0);
        }
    };
    drop(theirs);
    let entered = enter_mapped(helper, &ours);
    let _ = kill(helper, Signal::SIGKILL);
    let _ = waitpid(helper, None);
    entered
}

fn enter_mapped(helper: Pid, control: &UnixStream) -> io::Result<()> {
    if hear(control)? != Some(Word::Ready) {
        return Err(io::Error::other(
            "no user namespace can be made; see user.max_user_namespaces",
        ));
    }
    let map = format!("0 {MAPPED_FIRST} {MAPPED_COUNT}\n");
    fs::write(format!("/proc/{helper}/uid_map"), &map)?;
    fs::write(format!("/proc/{helper}/gid_map"), &map)?;
    setns(File::open(format!("/proc/{helper}/ns/user"))?, CloneFlags::CLONE_NEWUSER)?;
    become_mapped_root()
}

/// Leaves the host's ids behind after entering a session's user namespace.
pub(super) fn become_mapped_root() -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(0), Gid::from_raw(0));
    setgroups(&[])?;
    setresgid(gid, gid, gid)?;
    Ok(setresuid(uid, uid, uid)?)
}

/// A file in memory with `content`, to be read from its start.
pub(super) fn memory(name: &str, content: &[u8]) -> io::Result<File> {
    let mut file = File::from(memfd_create(name, MemfdFlags::CLOEXEC)?);
    file.write_all(content)?;
    file.rewind()?;
    Ok(file)
}

/// What was written into a file in memory, on one line.
pub(super) fn text_of(mut file: File) -> String {
    let mut text = String::new();
    let read = file.rewind().and_then(|()| file.read_to_string(&mut text));
    match (read, text.trim()) {
        (Ok(_), "") => "it ended without a word; was the session killed?".to_owned(),
        (Ok(_), said) => said.replace('\n', "; "),
        (Err(e), _) => format!("its words cannot be read: {e}"),
    }
}

fn tops() -> Vec<Top> {
    ["bin", "sbin", "lib", "lib32", "lib64", "libx32"]
        .into_iter()
        .filter_map(|name| {
            let path = Path::new("/").join(name);
            match fs::read_link(&path) {
                Ok(target) => Some(Top::Link(name, target)),
                Err(_) => path.is_dir().then_some(Top::Directory(name)),
            }
        })
        .collect()
}

fn present(names: &[&'static str]) -> Vec<&'static str> {
    names.iter().copied().filter(|name| Path::new("/proc").join(name).exists()).collect()
}
