//! The programs and maps as they are pinned: loaded and attached whole or not at all, adopted by the
//! next agent, replaced by other programs on the same maps, and taken away.

use std::ffi::OsString;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use aya::maps::{HashMap, Map, MapData};
use aya::programs::Lsm;
use aya::{Btf, Ebpf, EbpfLoader};
use rustix::fs::{FlockOperation, Mode, OFlags};
use sha2::Digest as _;

use super::hooks::{self, Plan, Row};
use super::layout::{LAYOUT, Table};
use super::{Devices, btf};
use crate::failpoint;

/// Where the kernel's own file system for them is mounted, by systemd for one.
const BPFFS: &str = "/sys/fs/bpf";
const BPFFS_MAGIC: u64 = 0xcafe_4a11;
const OURS: &str = "overfence";
const VMLINUX: &str = "/sys/kernel/btf/vmlinux";
const SECURITY: &str = "/sys/kernel/security/lsm";

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

impl Turn {
    pub(super) fn take() -> Result<Self, Why> {
        let open = || -> rustix::io::Result<OwnedFd> {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let bpffs = rustix::fs::open(BPFFS, flags, Mode::empty())?;
            rustix::fs::flock(&bpffs, FlockOperation::LockExclusive)?;
            Ok(bpffs)
        };
        let lock = open().map_err(|e| format!("cannot lock {BPFFS}: {e}"))?;
        Ok(Self { _lock: lock })
    }
}

/// What this host has that the gate stands on; the reason if it has not.
pub(super) fn ground() -> Result<(), Why> {
    if OBJECT.is_empty() {
        return Err("this overfence was built without clang".to_owned());
    }
    let list =
        std::fs::read_to_string(SECURITY).map_err(|e| format!("cannot read {SECURITY}: {e}"))?;
    if !list.split(',').any(|lsm| lsm.trim() == "bpf") {
        return Err(format!("no BPF LSM: {} (boot with lsm=...,bpf)", list.trim()));
    }
    let bpffs = rustix::fs::statfs(BPFFS).map(|fs| fs.f_type as u64 & 0xffff_ffff);
    match bpffs {
        Ok(BPFFS_MAGIC) => Ok(()),
        Ok(_) => Err(format!("no bpf file system at {BPFFS} (mount -t bpf bpf {BPFFS})")),
        Err(e) => Err(format!("{BPFFS}: {e}")),
    }
}

/// What there is to work with.
pub(super) struct Raised {
    pub table: Table,
    pub devices: Devices,
    pub missing: Vec<Row>,
    /// The kernel's number of the entries' map.
    pub id: u32,
}

fn ours() -> PathBuf {
    Path::new(BPFFS).join(OURS)
}

fn layout_dir() -> PathBuf {
    ours().join(format!("layout-{LAYOUT}"))
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

/// Adopts what is pinned, or loads and attaches it. Programs of a layout that is not ours stay as they
/// are: they guard sessions of an agent that is.
pub(super) fn raise(_turn: &Turn) -> Result<Raised, Why> {
    ground()?;
    let dir = layout_dir();
    let known = dir.file_name().unwrap_or_default();
    if let Some(other) = names_in(&ours())?.into_iter().find(|name| name != known) {
        return Err(format!(
            "{} is of another version of overfence and stays as it is; drain the host with that one, \
             or go back to it",
            ours().join(other).display()
        ));
    }
    let set = dir.join(set_name());
    if set.exists() {
        let (table, devices) = pinned_maps(&dir)?;
        match table.header() {
            Some(header) if header.pins == names_in(&set)?.len() as u64 => {
                let missing = header.missing;
                return Ok(Raised { table, devices, missing, id: map_id()? });
            }
            // Somebody took a part of it away: what is left goes on until the same is attached again.
            Some(_) => {
                let broken = dir.join("broken");
                remove_tree(&broken)?;
                std::fs::rename(&set, &broken).map_err(at("rename", &set))?;
            }
            None => {
                return Err(format!("{} has no header of ours", dir.join("entries").display()));
            }
        }
    }
    let raised = attach(&dir, &set)?;
    for other in names_in(&dir)? {
        let path = dir.join(&other);
        // Of another version, on the same maps, or of a load that was cut off.
        if path.is_dir() && path != set {
            failpoint::fails("gate.detach.before").map_err(|e| e.to_string())?;
            remove_tree(&path)?;
            failpoint::hit("gate.detach.after");
        }
    }
    Ok(raised)
}

/// A map of ours.
pub(super) fn pinned(name: &str) -> Result<MapData, Why> {
    MapData::from_pin(layout_dir().join(name)).map_err(|e| told(&e))
}

/// Held by the only one who may read the refusals; `None`: somebody else does.
pub(super) fn only_reader() -> Result<Option<OwnedFd>, Why> {
    let dir = layout_dir();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fault = |e| format!("cannot lock {}: {e}", dir.display());
    let fd = rustix::fs::open(&dir, flags, Mode::empty()).map_err(fault)?;
    match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(fd)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(e) => Err(fault(e)),
    }
}

fn pinned_maps(dir: &Path) -> Result<(Table, Devices), Why> {
    let entries = pinned("entries")?;
    let table = Table::new(entries.fd().as_fd())
        .map_err(|e| format!("cannot map {}: {e}", dir.join("entries").display()))?;
    let devices = HashMap::try_from(Map::HashMap(pinned("devices")?)).map_err(|e| told(&e))?;
    Ok((table, devices))
}

/// The set has its name only once all of it is attached.
fn attach(dir: &Path, set: &Path) -> Result<Raised, Why> {
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
    let (table, devices) = pinned_maps(dir)?;
    table.sign(&plan.missing, names_in(&unfinished)?.len() as u64);
    std::fs::rename(&unfinished, set).map_err(at("rename to", set))?;
    failpoint::hit("gate.attach.after");
    Ok(Raised { table, devices, missing: plan.missing, id: map_id()? })
}

fn map_id() -> Result<u32, Why> {
    pinned("entries")?.info().map(|info| info.id()).map_err(|e| told(&e))
}

/// Whether the programs are pinned whole, with this map.
pub(super) fn stands(table: &Table, id: u32) -> bool {
    let set = layout_dir().join(set_name());
    let pins = names_in(&set).map_or(0, |names| names.len() as u64);
    map_id() == Ok(id) && table.header().is_some_and(|header| header.pins == pins)
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
        for name in ["devices", "entries", "refusals"] {
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

/// Whether the kernel would take the programs, and which rows they leave unchecked.
pub(super) fn try_load() -> Result<Vec<Row>, Why> {
    ground()?;
    load(None).map(|(_, plan)| plan.missing)
}

/// Unpins everything of ours; what no program needs ends with it.
pub(super) fn lower(_turn: &Turn) -> Result<(), Why> {
    failpoint::fails("gate.detach.before").map_err(|e| e.to_string())?;
    remove_tree(&layout_dir())?;
    match std::fs::remove_dir(ours()) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(at("remove", &ours())(e)),
        _ => {}
    }
    failpoint::hit("gate.detach.after");
    Ok(())
}

/// Two levels of directories of our own making, in a file system that only root reaches.
fn remove_tree(dir: &Path) -> Result<(), Why> {
    for name in names_in(dir)? {
        let path = dir.join(name);
        if path.is_dir() {
            remove_tree(&path)?;
        } else {
            match std::fs::remove_file(&path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    return Err(at("remove", &path)(e));
                }
                _ => {}
            }
        }
    }
    match std::fs::remove_dir(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(at("remove", dir)(e)),
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
