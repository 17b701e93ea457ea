//! A further command in a session: a companion outside joins the init's namespaces and forks the
//! command into them. The companion never is a process of the session's own pid namespace.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;

use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::wait::waitpid;
use seccompiler::BpfProgram;

use super::client::Watch;
use super::control::{Word, hear, say};
use super::launch::{become_mapped_root, enter_cgroup, memory, text_of};
use super::leave_the_group;
use super::record::InitRecord;
use super::shed::{Errand, keep_kill};
use super::tend::{Afterwards, Client, Tender};
use super::{Command, Error, Network, Place, Result, filters, io_at};
use crate::kernel::launch::{Fork, close_all_on_exec, exit_now, fork};

/// Starts the companion; what comes back is the line to it.
pub(super) fn companion(
    place: &Place,
    init: InitRecord,
    command: &Command,
    watch: &Watch,
) -> Result<UnixStream> {
    let filters = filters::programs()?;
    let at = || io_at("make ready to join", place.session.to_string());
    let errand = Errand::new(place, command);
    let (ours, theirs) = UnixStream::pair().map_err(at())?;
    let complaints = memory("complaints", &[]).map_err(at())?;
    let companion = match fork().map_err(at())? {
        Fork::Parent(pid) => pid,
        Fork::Child => {
            drop(ours);
            if let Err(e) = accompany(place, init, &errand, &filters, theirs) {
                let _ = writeln!(&complaints, "{e}");
            }
            exit_now(0);
        }
    };
    drop(theirs);
    if let Err(e) = watch.before_start(&ours) {
        let _ = kill(companion, Signal::SIGKILL);
        return Err(e);
    }
    if hear(&ours).map_err(at())? == Some(Word::Ready) {
        return Ok(ours);
    }
    let _ = waitpid(companion, None);
    Err(Error::Join { session: place.session, said: text_of(complaints) })
}

fn accompany(
    place: &Place,
    init: InitRecord,
    errand: &Errand,
    filters: &[BpfProgram],
    client: UnixStream,
) -> io::Result<()> {
    SigSet::all().thread_block()?;
    // Neither we nor the command before its exec may be looked into from inside.
    nix::sys::prctl::set_dumpable(false)?;
    enter_cgroup(place)?;
    enter_namespaces(place, init)?;
    if place.mapped {
        become_mapped_root()?;
        // Changing ids set it back.
        nix::sys::prctl::set_dumpable(false)?;
    }
    close_all_on_exec()?;
    say(&client, Word::Ready)?;
    if hear(&client)? != Some(Word::Go) {
        return Ok(());
    }
    let command = match fork()? {
        Fork::Parent(pid) => {
            leave_the_group()?;
            pid
        }
        Fork::Child => errand.become_it(filters),
    };
    keep_kill()?;
    say(&client, Word::Started)?;
    let client = Client::at(client);
    Tender { command: Some(command), client, beat: None, afterwards: Afterwards::Leave }.tend()
}

/// All of the init's namespaces in one call. The descriptor is taken before the process is looked
/// at: it cannot be another one's afterwards.
fn enter_namespaces(place: &Place, init: InitRecord) -> io::Result<()> {
    let gone = || io::Error::other("its init ended meanwhile");
    let pid = i32::try_from(init.pid).ok().and_then(rustix::process::Pid::from_raw);
    let process =
        rustix::process::pidfd_open(pid.ok_or_else(gone)?, rustix::process::PidfdFlags::empty())?;
    if !init.lives_in(&place.cgroup)? {
        return Err(gone());
    }
    let mut namespaces = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP;
    namespaces.set(CloneFlags::CLONE_NEWNET, place.network == Network::Own);
    namespaces.set(CloneFlags::CLONE_NEWUSER, place.mapped);
    setns(File::from(process), namespaces)?;
    Ok(())
}
