//! What a session's upper changes, streamed: nothing of it is held in memory but one directory's
//! names.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;

use super::{Agent, internal, of_upper};
use crate::agent::failure::Failure;
use crate::agent::host::Host;
use crate::agent::slot::Slot;
use crate::kernel::walk::Dir;
use crate::model::code::Code;
use crate::model::facts::Fact;
use crate::model::head::{Digest, Head};
use crate::model::ids::SessionId;
use crate::model::session::{Session, State};
use crate::model::view::{DiffRow, DiffSummary};
use crate::upper::diff::Diff;
use crate::upper::lowers::Lowers;

/// Rows on their way to a slow reader.
const AHEAD: usize = 256;

/// How long a reader may read nothing.
const STALLED: Duration = Duration::from_secs(60);

/// One thing of a diff.
#[derive(Debug)]
pub enum Told {
    /// A changed name.
    Row(DiffRow),
    /// All of them, counted: nothing follows.
    End(DiffSummary),
}

impl Agent {
    /// Streams what a session changes against the layers that it was mounted on. A running session's
    /// upper is read as it is; what comes and goes meanwhile may be there or not.
    pub async fn diff(
        &self,
        id: SessionId,
    ) -> Result<mpsc::Receiver<Result<Told, Failure>>, Failure> {
        let slot = self.slot(id)?;
        let turn = Arc::clone(&self.0.diffs).acquire_owned().await.map_err(internal)?;
        let (to, rows) = mpsc::channel(AHEAD);
        let host = Arc::clone(&self.0);
        let diff = self
            .blocking({
                let slot = Arc::clone(&slot);
                move |host| begin(host, &slot)
            })
            .await?;
        tokio::task::spawn_blocking(move || {
            // Given back when the walk ends, however that is.
            let _turn = turn;
            walk(&host, &slot, diff, &to);
        });
        Ok(rows)
    }
}

/// The layers below the upper, and whether it may be written to meanwhile.
struct Begun {
    base: Lowers,
    live: bool,
}

fn begin(host: &Host, slot: &Slot) -> Result<Begun, Failure> {
    let s = slot.session();
    if matches!(s.state, State::Opening | State::Deleting | State::Closed) {
        return Err(super::denied(&s, Code::WrongState));
    }
    let stopped =
        [Fact::ReadOnly, Fact::UpperFrozen, Fact::Gone].iter().any(|fact| s.facts.has(*fact));
    Ok(Begun {
        base: host.shown_by(&s.base.head).map_err(|fault| host.of_layers(fault))?,
        live: !stopped,
    })
}

fn walk(host: &Host, slot: &Slot, begun: Begun, to: &mpsc::Sender<Result<Told, Failure>>) {
    let stop = || to.is_closed() || host.stopping() || is_removed(&slot.lock().session);
    let mut summary = DiffSummary::default();
    let mut left = false;
    let Begun { base, live } = begun;
    let outcome = host.with_upper(slot, |upper| {
        let upper = Dir::open(upper)?;
        for row in Diff::new(upper.as_fd(), base, live, &stop)? {
            let row = row?;
            summary.count(&row);
            if !hand(host, slot, to, Ok(Told::Row(row))) {
                left = true;
                break;
            }
        }
        Ok(())
    });
    // Without its end a diff is not whole; who left needs neither.
    if left {
        return;
    }
    hand(
        host,
        slot,
        to,
        match outcome {
            Ok(Ok(())) => Ok(Told::End(summary)),
            Ok(Err(fault)) => Err(of_upper(fault)),
            Err(why) => Err(Failure::new(Code::MountFailed, why)),
        },
    );
}

/// What is removed is read by nobody any more: its removal waits for whoever has its image open.
fn is_removed(s: &Session) -> bool {
    matches!(s.state, State::Deleting | State::Closed)
}

/// Hands a thing over; false once nobody reads, or not any more: others wait for this turn, and the
/// session's removal for its upper.
fn hand(
    host: &Host,
    slot: &Slot,
    to: &mpsc::Sender<Result<Told, Failure>>,
    told: Result<Told, Failure>,
) -> bool {
    match to.try_send(told) {
        Ok(()) => true,
        Err(mpsc::error::TrySendError::Closed(_)) => false,
        Err(mpsc::error::TrySendError::Full(told)) => host.runtime.block_on(async {
            tokio::select! {
                sent = to.send(told) => sent.is_ok(),
                _ = slot.wait_for(STALLED, |inner| is_removed(&inner.session)) => false,
            }
        }),
    }
}

impl Host {
    /// What the layers of a head show, to be read by descriptor.
    pub(in crate::agent) fn shown_by(&self, head: &Head) -> crate::upper::Result<Lowers> {
        let stop = || self.stopping();
        let tree = |layer: &Digest| Ok(Dir::open(&self.layers.ensure_tree(*layer, &stop)?)?);
        let layers = head.0.iter().map(tree);
        Ok(Lowers::new(layers.collect::<crate::upper::Result<_>>()?))
    }
}
