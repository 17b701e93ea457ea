//! The programs and maps as they are pinned: loaded and attached whole or not at all, adopted by the
//! next agent, replaced by other programs on the same maps, and taken away.

use std::ffi::OsString;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use aya::maps::{HashMap, Map, MapData};
use aya::programs::Lsm;
use aya::{Btf, Ebpf, EbpfLoader};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use sha2::Digest as _;

use super::ground::{self, BPFFS};
use super::hooks::{self, Plan, Row};
use super::layout::{LAYOUT, Table};
use super::{Devices, btf, no_gate};
use crate::failpoint;
use crate::kernel::{self, Error, clock};

pub(super) const OURS: &str = "overfence";
const VMLINUX: &str = "/sys/kernel/btf/vmlinux";

/// The programs; empty when they could not be compiled.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/gate.o"));

/// Why there is no gate, in words for an operator.
pub(super) type Why = String;

/// An error with its causes. Of the verifier's pages the first line and the one that says why.
pub(super) fn told(fault: &dyn std::error::Error) -> Why {
    let mut line = String::new();
    let mut next = Some(fault);
    while let Some(fault) = next {
        if !line.is_empty() {
            line.push_str(": ");
        }
        line.push_str(&short(&fault.to_string()));
        next = fault.source();
    }
    line
}

fn short(text: &str) -> String {
    let mut lines = text.lines().map(str::trim).filter(|l| !l.is_empty());
    let cut = |line: &str| line.chars().take(160).collect::<String>();
    let first = cut(lines.next().unwrap_or_default());
    // Its last line counts instructions.
    match lines.rfind(|l| !l.starts_with("processed ")) {
        Some(last) => format!("{first} ... {}", cut(last)),
        None => first,
    }
}

fn at(doing: &'static str, path: &Path) -> impl Fn(std::io::Error) -> Why {
    move |e| format!("cannot {doing} {}: {e}", path.display())
}

/// One at a time on this host: who looks for a free entry, attaches, or takes away.
pub(super) struct Turn {
    _lock: OwnedFd,
}

/// How long a turn is waited for, and how often it is asked for: there is no flock with a deadline.
const PATIENCE: Duration = Duration::from_secs(10);
const ROUND: Duration = Duration::from_millis(5);

impl Turn {
    /// Whoever has it may be stopped: nobody waits for that without end.
    pub(super) fn take() -> kernel::Result<Self> {
        let fault = |e| no_gate(format!("cannot lock {BPFFS}: {e}"));
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let lock = rustix::fs::open(BPFFS, flags, Mode::empty()).map_err(fault)?;
        let until = clock::now().plus(PATIENCE);
        loop {
            match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self { _lock: lock }),
                Err(Errno::WOULDBLOCK) if clock::now() < until => std::thread::sleep(ROUND),
                Err(Errno::WOULDBLOCK) => {
                    return Err(Error::GateBusy { lock: BPFFS.into(), waited: PATIENCE });
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(fault(e)),
            }
        }
    }
}

/// What this host and this binary have that the gate stands on; the reason if they have not.
pub(super) fn ground() -> Result<(), Why> {
    if OBJECT.is_empty() {
        return Err("this overfence was built without clang".to_owned());
    }
    ground::ask()?;
    let known = layout_name();
    match names_in(&ours())?.into_iter().find(|name| *name != *known) {
        None => Ok(()),
        // They guard sessions of an agent that is of it.
        Some(other) => Err(format!(
            "{} is of another version of overfence and stays as it is; drain the host, or go back to \
             that one",
            ours().join(other).display()
        )),
    }
}

/// What there is to work with.
pub(super) struct Pinned {
    /// Where it is pinned.
    pub dir: PathBuf,
    pub table: Table,
    pub devices: Devices,
    /// The kernel's number of the entries' map.
    pub id: u32,
}

fn ours() -> PathBuf {
    Path::new(BPFFS).join(OURS)
}

fn layout_name() -> String {
    format!("layout-{LAYOUT}")
}

pub(super) fn layout_dir() -> PathBuf {
    ours().join(layout_name())
}

/// The name of a set of programs: other programs have another one.
fn set_name() -> String {
    hex::encode(&sha2::Sha256::digest(OBJECT)[..8])
}

fn names_in(dir: &Path) -> Result<Vec<OsString>, Why> {
    match std::fs::read_dir(dir) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(vec![]),
        Err(e) => Err(at("read", dir)(e)),
        Ok(entries) => {
            entries.map(|entry| entry.map(|e| e.file_name()).map_err(at("read", dir))).collect()
        }
    }
}

/// Opens the maps that are pinned, of this layout or another one, whoever's programs are on them and
/// whether others could be attached or not. `None`: there are none.
pub(super) fn adopt() -> Result<Option<Pinned>, Why> {
    if !ground::is_pinnable() {
        return Ok(None);
    }
    let own = layout_dir();
    let mut dirs: Vec<_> = names_in(&ours())?.into_iter().map(|name| ours().join(name)).collect();
    dirs.sort_by_key(|dir| *dir != own);
    let mut fault = None;
    for dir in dirs.into_iter().filter(|dir| dir.join("entries").exists()) {
        match maps(&dir).and_then(signed) {
            Ok(pinned) => return Ok(Some(pinned)),
            Err(why) => fault = fault.or(Some(why)),
        }
    }
    fault.map_or(Ok(None), Err)
}

/// Adopts what is pinned, or loads and attaches it.
pub(super) fn raise(_turn: &Turn) -> Result<Pinned, Why> {
    ground()?;
    let dir = layout_dir();
    let set = dir.join(set_name());
    if !has_maps(&dir) {
        // What is left of them leads nowhere: they are made anew, and entered anew.
        MAPS.iter().try_for_each(|name| remove_file(&dir.join(name)))?;
    }
    let known = if has_maps(&dir) { Some(maps(&dir)?) } else { None };
    let stood = known.as_ref().is_some_and(|known| has_whole_set(&dir, &known.table));
    if set.exists() {
        if let Some(known) = known {
            let pinned = signed(known)?;
            if is_whole(&pinned.table, &set)? {
                remove_others(&dir, &set)?;
                return Ok(pinned);
            }
        }
        // Somebody took a part of it away: what is left goes on until the same is attached again.
        let broken = dir.join("broken");
        remove_tree(&broken)?;
        std::fs::rename(&set, &broken).map_err(at("rename", &set))?;
    }
    let pinned = attach(&dir, &set)?;
    if !stood {
        // Nobody noted the mappings that were made meanwhile.
        pinned.table.used().for_each(|(_, raw)| raw.shared.store(1, Ordering::SeqCst));
    }
    remove_others(&dir, &set)?;
    Ok(pinned)
}

/// The maps that all programs of a layout share, by their pins' names.
const MAPS: [&str; 3] = ["devices", "entries", "refusals"];

fn has_maps(dir: &Path) -> bool {
    MAPS.iter().all(|name| dir.join(name).exists())
}

/// Whether all files are there that were pinned for a set.
fn is_whole(table: &Table, set: &Path) -> Result<bool, Why> {
    let pins = names_in(set)?.len() as u64;
    Ok(table.header().is_some_and(|header| header.pins == pins))
}

/// Sets of another version, on the same maps, or of a load that was cut off, or whose end was.
fn remove_others(dir: &Path, set: &Path) -> Result<(), Why> {
    for other in names_in(dir)? {
        let path = dir.join(&other);
        if path.is_dir() && path != set {
            failpoint::fails("gate.detach.before").map_err(|e| e.to_string())?;
            remove_tree(&path)?;
            failpoint::hit("gate.detach.after");
        }
    }
    Ok(())
}

/// A map of ours.
pub(super) fn pinned(dir: &Path, name: &str) -> Result<MapData, Why> {
    let path = dir.join(name);
    MapData::from_pin(&path).map_err(|e| format!("{}: {}", path.display(), told(&e)))
}

fn maps(dir: &Path) -> Result<Pinned, Why> {
    let path = dir.join("entries");
    let entries = pinned(dir, "entries")?;
    let info = entries.info().map_err(|e| told(&e))?;
    // As an array lays its values out.
    let stride = info.value_size().next_multiple_of(8);
    let table = Table::new(entries.fd().as_fd(), stride, info.max_entries())
        .map_err(|e| format!("cannot map {}: {e}", path.display()))?
        .ok_or_else(|| format!("{} holds no entries of ours", path.display()))?;
    let devices = Map::HashMap(pinned(dir, "devices")?);
    let devices = HashMap::try_from(devices).map_err(|e| told(&e))?;
    Ok(Pinned { dir: dir.to_owned(), table, devices, id: info.id() })
}

fn signed(pinned: Pinned) -> Result<Pinned, Why> {
    match pinned.table.header() {
        Some(_) => Ok(pinned),
        None => Err(format!(
            "{} has no header of ours (nobody here can renew what is entered there: end its sessions, \
             then remove {})",
            pinned.dir.join("entries").display(),
            pinned.dir.display()
        )),
    }
}

/// Held by the only one who may read the refusals; `None`: somebody else does.
pub(super) fn only_reader(dir: &Path) -> Result<Option<OwnedFd>, Why> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fault = |e| format!("cannot lock {}: {e}", dir.display());
    let fd = rustix::fs::open(dir, flags, Mode::empty()).map_err(fault)?;
    match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(fd)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(e) => Err(fault(e)),
    }
}

/// The set has its name only once all of it is attached.
fn attach(dir: &Path, set: &Path) -> Result<Pinned, Why> {
    let unfinished = dir.join("unfinished");
    remove_tree(&unfinished)?;
    for made in [dir, &unfinished] {
        std::fs::create_dir_all(made).map_err(at("make", made))?;
    }
    failpoint::fails("gate.attach.before").map_err(|e| e.to_string())?;
    let (mut programs, plan) = load(Some(dir))?;
    for (name, hook) in &plan.attach {
        let program = lsm(&mut programs, name)?;
        let link = program.attach().and_then(|id| program.take_link(id));
        let link: aya::programs::links::FdLink =
            link.map_err(|e| format!("attach to {hook}: {}", told(&e)))?.into();
        let pin = |fault: &dyn std::error::Error| format!("pin {name}: {}", told(fault));
        program.pin(unfinished.join(format!("{name}_program"))).map_err(|e| pin(&e))?;
        link.pin(unfinished.join(*name)).map_err(|e| pin(&e))?;
    }
    let pinned = maps(dir)?;
    pinned.table.sign(&plan.missing, names_in(&unfinished)?.len() as u64);
    std::fs::rename(&unfinished, set).map_err(at("rename to", set))?;
    failpoint::hit("gate.attach.after");
    Ok(pinned)
}

/// Whether this map is the one that is pinned, with those that belong to it.
pub(super) fn is_pinned(dir: &Path, id: u32) -> bool {
    let entries = pinned(dir, "entries").and_then(|map| map.info().map_err(|e| told(&e)));
    has_maps(dir) && entries.is_ok_and(|info| info.id() == id)
}

/// Whether this map is pinned, and with it a set of programs, whole: another agent's do as well.
pub(super) fn stands(dir: &Path, table: &Table, id: u32) -> bool {
    is_pinned(dir, id) && has_whole_set(dir, table)
}

fn has_whole_set(dir: &Path, table: &Table) -> bool {
    let sets = names_in(dir).unwrap_or_default().into_iter().map(|name| dir.join(name));
    sets.filter(|set| set.is_dir()).any(|set| is_whole(table, &set) == Ok(true))
}

fn lsm<'a>(programs: &'a mut Ebpf, name: &str) -> Result<&'a mut Lsm, Why> {
    let program = programs.program_mut(name).ok_or_else(|| format!("no program {name}"))?;
    program.try_into().map_err(|e: aya::programs::ProgramError| told(&e))
}

/// Has the kernel take the programs that fit it; they are attached to nothing yet.
fn load(maps: Option<&Path>) -> Result<(Ebpf, Plan), Why> {
    let bytes = std::fs::read(VMLINUX).map_err(at("read", Path::new(VMLINUX)))?;
    let types = btf::Types::parse(&bytes);
    let types = types.ok_or_else(|| format!("{VMLINUX} is not understood"))?;
    let plan = hooks::plan(&types);
    let kernel = Btf::parse(&bytes, aya::Endianness::default()).map_err(|e| told(&e))?;
    let mut loader = EbpfLoader::new();
    loader.btf(Some(&kernel));
    if let Some(dir) = maps {
        for name in MAPS {
            loader.map_pin_path(name, dir.join(name));
        }
    }
    let mut programs = loader.load(OBJECT).map_err(|e| told(&e))?;
    for (name, hook) in &plan.attach {
        lsm(&mut programs, name)?
            .load(hook, &kernel)
            .map_err(|e| format!("load {name}: {}", told(&e)))?;
    }
    Ok((programs, plan))
}

/// Whether the kernel takes and attaches the programs, and which rows they leave unchecked: what loads
/// may still not attach (arm64 before 6.4, a hook that has its most). Nothing is pinned, they know no
/// overlay, and all of it ends here.
pub(super) fn try_load() -> Result<Vec<Row>, Why> {
    ground()?;
    let (mut programs, plan) = load(None)?;
    for (name, hook) in &plan.attach {
        let attached = lsm(&mut programs, name)?.attach();
        attached.map_err(|e| format!("attach to {hook}: {}", told(&e)))?;
    }
    Ok(plan.missing)
}

/// Unpins everything of a layout; what no program needs ends with it.
pub(super) fn lower(_turn: &Turn, dir: &Path) -> Result<(), Why> {
    use std::io::ErrorKind::{DirectoryNotEmpty, NotFound};
    failpoint::fails("gate.detach.before").map_err(|e| e.to_string())?;
    remove_tree(dir)?;
    match std::fs::remove_dir(ours()) {
        // Another layout is beside it.
        Err(e) if ![NotFound, DirectoryNotEmpty].contains(&e.kind()) => {
            return Err(at("remove", &ours())(e));
        }
        _ => {}
    }
    failpoint::hit("gate.detach.after");
    Ok(())
}

/// Two levels of directories of our own making, in a file system that only root reaches.
fn remove_tree(dir: &Path) -> Result<(), Why> {
    for name in names_in(dir)? {
        let path = dir.join(name);
        if path.is_dir() { remove_tree(&path)? } else { remove_file(&path)? }
    }
    match std::fs::remove_dir(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(at("remove", dir)(e)),
        _ => Ok(()),
    }
}

fn remove_file(path: &Path) -> Result<(), Why> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(at("remove", path)(e)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_long_answer_the_reason_is_told() {
        let log =
            "refused. Verifier output: 0: R1=ctx()\n1: (79) r1\n\nR1 is null\nprocessed 3 insns\n";
        assert_eq!(short(log), "refused. Verifier output: 0: R1=ctx() ... R1 is null");
        assert_eq!(short("no such hook"), "no such hook");
    }
}
