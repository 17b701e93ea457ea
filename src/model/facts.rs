//! The facts of a fence. A fact is what the kernel confirmed, never what we asked for.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::time::BootNs;

/// One provable step of stopping a stale writer, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fact {
    /// The kernel refuses each write through the overlay as it starts, and refused a probe. No
    /// action: it holds by itself once the deadline passed. See `kernel::gate` for what it does not stop.
    Gated,
    /// `cgroup.freeze` is 1 and `cgroup.events` says frozen 1 or populated 0.
    Frozen,
    /// The overlay's superblock is read-only and a write probe got EROFS.
    ReadOnly,
    /// FS_IMMUTABLE is set on the files and directories of the upper and was read back. What that
    /// stops differs by file system and stands in the proof.
    Sealed,
    /// FIFREEZE holds on the file system of the image that the upper lies in. Writers inside and
    /// outside wait until it is lifted.
    UpperFrozen,
    /// `cgroup.events` says populated 0 after `cgroup.kill`.
    Killed,
    /// The overlay's superblock died.
    Gone,
}

impl Fact {
    /// All facts this build can prove, weakest first.
    pub const ALL: [Self; 7] = [
        Self::Gated,
        Self::Frozen,
        Self::ReadOnly,
        Self::Sealed,
        Self::UpperFrozen,
        Self::Killed,
        Self::Gone,
    ];

    /// Whether a fence can be asked to go for it. `gated` and `upper-frozen` come by themselves, where
    /// they can.
    pub const fn is_aim(self) -> bool {
        !matches!(self, Self::Gated | Self::UpperFrozen | Self::Gone)
    }

    /// The name used in output and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gated => "gated",
            Self::Frozen => "frozen",
            Self::ReadOnly => "read-only",
            Self::Sealed => "sealed",
            Self::UpperFrozen => "upper-frozen",
            Self::Killed => "killed",
            Self::Gone => "gone",
        }
    }

    /// Whether who has this fact has `wanted` as well. A gate, a seal and a stopped upper stand beside
    /// the others: they do not say that the overlay is read-only, and a kill does not say that the
    /// upper is sealed.
    pub const fn covers(self, wanted: Self) -> bool {
        match (self, wanted) {
            (Self::Gone, _)
            | (Self::Gated, Self::Gated)
            | (Self::Sealed, Self::Sealed | Self::Frozen)
            | (Self::UpperFrozen, Self::UpperFrozen | Self::Frozen) => true,
            (Self::Gated | Self::Sealed | Self::UpperFrozen, _)
            | (_, Self::Gated | Self::Sealed | Self::UpperFrozen) => false,
            (_, _) => self as u8 >= wanted as u8,
        }
    }
}

impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What was asked of the kernel and what it said.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Proof {
    /// What was asked, in the kernel's own terms.
    pub asked: String,
    /// Its answer.
    pub answer: String,
    /// When the answer came, nanoseconds on CLOCK_BOOTTIME.
    pub at: BootNs,
    /// From the first request to the answer, microseconds.
    pub took_us: u64,
}

/// The facts of one session that hold now.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Facts(pub BTreeMap<Fact, Proof>);

impl Facts {
    /// Whether `fact` is proved.
    pub fn has(&self, fact: Fact) -> bool {
        self.0.contains_key(&fact)
    }

    /// Adds a proved fact. One that held already keeps its first proof: it says since when.
    pub fn prove(&mut self, fact: Fact, proof: Proof) {
        self.0.entry(fact).or_insert(proof);
    }

    /// Drops a fact that no longer holds, for instance `frozen` after a foreign thaw.
    pub fn drop(&mut self, fact: Fact) {
        self.0.remove(&fact);
    }

    /// The facts' names, weakest first.
    pub fn names(&self) -> Vec<&'static str> {
        self.0.keys().map(|f| f.name()).collect()
    }
}

/// Who keeps an overlay from becoming read-only.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Holder {
    /// Process id as the agent sees it; 0 when the kernel itself holds it.
    pub pid: u32,
    /// The command's name.
    pub command: String,
    /// `descriptor`, `mapping`, `cwd`, `root` or `mount` of a process; `in-flight`: a socket of its
    /// with descriptors in it, of which nobody can say what they are; `loop`: a loop device;
    /// `overlay`: a second overlay on the same upper, and who sees it; `kernel`: nothing that could
    /// be named; `file-system`: nobody, but the upper's file system met an error and refuses the sync that
    /// read-only wants; `others`: how many more there are than are listed.
    pub how: String,
    /// The path or detail.
    pub what: String,
    /// Its cgroup on the v2 hierarchy.
    pub cgroup: String,
    /// Whether it runs inside the session's sealed cgroup.
    pub inside: bool,
}

impl Holder {
    /// [`Holder::how`] of a second overlay on the same upper: it keeps nothing busy, and writes into
    /// the upper past the session's own overlay.
    pub const OVERLAY: &str = "overlay";

    /// [`Holder::how`] of a loop device: the kernel writes into its file past the lease gate.
    pub const LOOP: &str = "loop";

    /// Whether it is a loop device on a file of the overlay.
    pub fn is_loop(&self) -> bool {
        self.how == Self::LOOP
    }

    /// [`Holder::how`] of an upper's file system that met an error: nobody holds the overlay, and it
    /// takes no writes, yet it cannot be proved read-only.
    pub const FILE_SYSTEM: &str = "file-system";

    /// The file system of an upper that met an error and stopped.
    pub fn stopped_file_system() -> Self {
        Self {
            pid: 0,
            command: "kernel".to_owned(),
            how: Self::FILE_SYSTEM.to_owned(),
            what: "the upper's file system stopped after an error and cannot be synced".to_owned(),
            cgroup: String::new(),
            inside: false,
        }
    }

    /// Whether it is the upper's file system, which met an error.
    pub fn is_stopped_file_system(&self) -> bool {
        self.how == Self::FILE_SYSTEM
    }

    /// Whether it is a second overlay on the same upper.
    pub fn is_overlay(&self) -> bool {
        self.how == Self::OVERLAY
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.how.as_str() {
            "kernel" => return write!(f, "held by the kernel, not nameable: {}", self.what),
            Self::LOOP => return write!(f, "loop device {}", self.what),
            "others" => return f.write_str(&self.what),
            Self::FILE_SYSTEM => {
                return write!(f, "{}: `preserved export` saves what can be read", self.what);
            }
            Self::OVERLAY => {
                return write!(
                    f,
                    "a second overlay on the same upper, seen by pid {} ({}): {}",
                    self.pid, self.command, self.what
                );
            }
            "in-flight" => {
                let (pid, command, what) = (self.pid, &self.command, &self.what);
                return write!(f, "perhaps pid {pid} ({command}), {what}");
            }
            _ => {}
        }
        let place = if self.inside { "inside" } else { "outside" };
        write!(
            f,
            "pid {} ({}) {place} the session, {} {}",
            self.pid, self.command, self.how, self.what
        )
    }
}

/// A process that did not freeze in time and what it is doing.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Blocker {
    /// Process id.
    pub pid: u32,
    /// The command's name.
    pub command: String,
    /// One-letter state of /proc/PID/stat.
    pub state: String,
    /// Kernel function it sleeps in, where readable.
    pub wchan: String,
    /// System call line of /proc/PID/syscall, where readable.
    pub syscall: String,
}

/// A process of a session that somebody moved out of the session's cgroup, where no freeze meets it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Stray {
    /// Process id.
    pub pid: u32,
    /// The command's name.
    pub command: String,
    /// The cgroup it was found in, on the v2 hierarchy.
    pub found_in: String,
    /// Why it is known to be the session's.
    pub known_by: String,
    /// Why it could not be brought back; `None`: it was.
    pub left_out: Option<String>,
}
