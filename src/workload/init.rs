//! `overfence session-init`: pid 1 of a session's namespaces. Started by bubblewrap, with a few
//! capabilities, the filters loaded and a clean environment; all it knows came by descriptor.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::sys::signal::SigSet;
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::beat::Beat;
use super::control::{Word, hear, say};
use super::leave_the_group;
use super::shed::{Errand, keep_kill};
use super::tend::{Afterwards, Client, Tender};
use crate::kernel::launch::{Fork, exit_now, fork, inherited};

/// What an init is told.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Orders {
    /// The command of `run`; none for an init that only keeps a session's namespaces.
    pub(super) errand: Option<Errand>,
    /// The lease's time to live, when its holder is what runs here.
    pub(super) beat_ttl: Option<Duration>,
}

/// Runs the init and ends the process. `args` are what follows `session-init`: numbers of
/// descriptors: orders, control, the record's lock, the file for signs of life and, with a command, its
/// standard streams.
pub fn init_main(args: impl IntoIterator<Item = OsString>) -> ! {
    let code = match serve(args) {
        Ok(()) => 0,
        Err(e) => {
            eprintln!("overfence session-init: {e}");
            125
        }
    };
    exit_now(code)
}

fn serve(args: impl IntoIterator<Item = OsString>) -> io::Result<()> {
    if Pid::this().as_raw() != 1 {
        return Err(io::Error::other("only overfence itself starts this, as pid 1 of a session"));
    }
    nix::sys::prctl::set_dumpable(false)?;
    SigSet::all().thread_block()?;
    let mut fds = args
        .into_iter()
        .map(|arg| {
            let number = arg.to_str().and_then(|text| text.parse().ok());
            inherited(number.ok_or_else(|| io::Error::other("not a descriptor"))?)
        })
        .collect::<io::Result<Vec<OwnedFd>>>()?
        .into_iter();
    let mut next = || fds.next().ok_or_else(|| io::Error::other("a descriptor is missing"));
    let mut text = String::new();
    File::from(next()?).read_to_string(&mut text)?;
    let orders: Orders = serde_json::from_str(&text)?;
    let client = UnixStream::from(next()?);
    let lock = File::from(next()?);
    let signs = File::from(next()?);
    let beat = orders.beat_ttl.map(|ttl| Beat::new(ttl, signs));

    say(&client, Word::Ready)?;
    // Until the record is written nobody would believe our signs of life; a client that died
    // before leaves no command behind.
    if hear(&client)? != Some(Word::Go) {
        return Ok(());
    }
    let tender = match orders.errand {
        None => {
            Tender { command: None, client: Client::default(), beat, afterwards: Afterwards::Stay }
        }
        Some(errand) => {
            let streams = [next()?, next()?, next()?];
            let command = start(&errand, &streams)?;
            say(&client, Word::Started)?;
            Tender {
                command: Some(command),
                client: Client::at(client),
                beat,
                afterwards: Afterwards::StayForOthers(lock),
            }
        }
    };
    keep_kill()?;
    tender.tend()
}

fn start(errand: &Errand, streams: &[OwnedFd; 3]) -> io::Result<Pid> {
    match fork()? {
        Fork::Parent(pid) => {
            leave_the_group()?;
            Ok(pid)
        }
        Fork::Child => {
            let [input, output, errors] = streams;
            let set = rustix::stdio::dup2_stdin(input)
                .and_then(|()| rustix::stdio::dup2_stdout(output))
                .and_then(|()| rustix::stdio::dup2_stderr(errors));
            match set {
                // bubblewrap has loaded the filters for all that descends from us.
                Ok(()) => errand.become_it(&[]),
                Err(_) => exit_now(125),
            }
        }
    }
}
