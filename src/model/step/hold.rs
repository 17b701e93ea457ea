//! A session that holds its lease: checkpoint, close, readmission.

use super::*;

pub(super) fn on_checkpoint_asked(s: &mut Session, key: PublicationKey, live: bool) -> Step {
    if let Err(code) = s.may_start_work() {
        return Step::refuse(code);
    }
    if s.work.is_some() {
        return Step::refuse(Code::Busy);
    }
    s.trouble = None;
    let (stage, effect) = match live {
        false => (Stage::Stopping, Effect::Freeze { purpose: Purpose::Checkpoint }),
        true => (Stage::Packing, Effect::Pack { key, live }),
    };
    s.work = Some(Work::Checkpoint { key, stage, tainted: false });
    Step::go([effect])
}

pub(super) fn on_close_asked(s: &mut Session, mode: CloseMode, key: PublicationKey) -> Step {
    match s.state {
        State::Active => {}
        State::Fencing | State::Fenced | State::Preserved => return Step::refuse(Code::LeaseLost),
        State::Releasing => return Step::refuse(Code::Busy),
        State::Opening | State::Deleting | State::Closed | State::Quarantined => {
            return Step::refuse(Code::WrongState);
        }
    }
    if s.work.is_some() {
        return Step::refuse(Code::Busy);
    }
    if s.doubt.is_some() && mode == CloseMode::Checkpoint {
        return Step::refuse(Code::Doubt);
    }
    s.state = State::Releasing;
    s.trouble = None;
    s.work = Some(Work::Close { mode, key, stage: Stage::Stopping });
    // A capture can take long: others are to see why nobody writes any more.
    let told = (mode == CloseMode::Checkpoint).then_some(Effect::Releasing);
    Step::go(told.into_iter().chain([Effect::Kill]))
}

/// The writers may go on. What somebody thawed while it was read is worth nothing, as ever.
pub(super) fn on_gathered(s: &mut Session, taken_for: PublicationKey) -> Step {
    match (s.state, &s.work) {
        (State::Active, Some(Work::Checkpoint { key, stage: Stage::Capturing, tainted: true }))
            if *key == taken_for =>
        {
            give_up_tainted(s, taken_for)
        }
        (State::Active, Some(Work::Checkpoint { key, stage: Stage::Capturing, .. }))
            if *key == taken_for =>
        {
            let stage = Stage::Gathered;
            s.work = Some(Work::Checkpoint { key: taken_for, stage, tainted: false });
            Step::go([Effect::Thaw])
        }
        // The lease was lost meanwhile, or nobody waits for it any more.
        (
            State::Active
            | State::Releasing
            | State::Opening
            | State::Fencing
            | State::Fenced
            | State::Preserved
            | State::Deleting
            | State::Closed
            | State::Quarantined,
            _,
        ) => Step::quiet([]),
    }
}

fn give_up_tainted(s: &mut Session, key: PublicationKey) -> Step {
    s.trouble = Some(format!("{GIVEN_UP}: the session was thawed by somebody else"));
    thaw_then(s, key, None)
}

pub(super) fn on_captured(
    s: &mut Session,
    taken_for: PublicationKey,
    layer: Option<Digest>,
) -> Step {
    // The top layer of the expected head is replaced by this one, so "nothing changed" means the
    // same layer as before, or an empty upper that never published. While a publication is
    // unknown, the layer before is not known either.
    let unchanged = layer == s.own_layer && s.unknown.is_empty();
    match s.state {
        State::Active => match s.work {
            Some(Work::Checkpoint { key, tainted: true, stage: Stage::Capturing })
                if key == taken_for =>
            {
                give_up_tainted(s, key)
            }
            Some(Work::Checkpoint { key, stage: Stage::Capturing, .. }) if key == taken_for => {
                thaw_then(s, key, layer.filter(|_| !unchanged))
            }
            Some(Work::Checkpoint { key, stage: Stage::Packing, .. }) if key == taken_for => {
                publish_then(s, key, layer.filter(|_| !unchanged))
            }
            Some(Work::Checkpoint { .. } | Work::Close { .. } | Work::Resume) | None => {
                Step::quiet([])
            }
        },
        State::Releasing => match s.work.clone() {
            Some(Work::Close { mode, key, stage: Stage::Capturing }) if key == taken_for => {
                match layer {
                    Some(layer) if !unchanged => {
                        s.work =
                            Some(Work::Close { mode, key, stage: Stage::Publishing { layer } });
                        Step::go([Effect::Publish { key, layer }])
                    }
                    Some(_) | None => {
                        s.work = Some(Work::Close { mode, key, stage: Stage::Ending });
                        end_clean(s);
                        Step::go([Effect::Release])
                    }
                }
            }
            Some(Work::Close { .. } | Work::Checkpoint { .. } | Work::Resume) | None => {
                Step::quiet([])
            }
        },
        // The lease was lost meanwhile: a capture changes nothing.
        State::Opening
        | State::Fencing
        | State::Fenced
        | State::Preserved
        | State::Deleting
        | State::Closed
        | State::Quarantined => Step::quiet([]),
    }
}

/// A checkpoint whose session runs: what it captured is offered, if there is anything.
fn publish_then(s: &mut Session, key: PublicationKey, layer: Option<Digest>) -> Step {
    let Some(layer) = layer else {
        s.work = None;
        return Step::note();
    };
    let stage = Stage::Publishing { layer };
    s.work = Some(Work::Checkpoint { key, stage, tainted: false });
    Step::go([Effect::Publish { key, layer }])
}

/// The bytes stay with the session: a checkpoint is given up, a close keeps them.
pub(super) fn on_capture_refused(s: &mut Session, taken_for: PublicationKey, why: &str) -> Step {
    match (s.state, &mut s.work) {
        (State::Active, Some(Work::Checkpoint { key, stage: Stage::Capturing, .. }))
            if *key == taken_for =>
        {
            s.trouble = Some(why.to_owned());
            thaw_then(s, taken_for, None)
        }
        (State::Active, Some(Work::Checkpoint { key, stage: Stage::Packing, .. }))
            if *key == taken_for =>
        {
            s.trouble = Some(why.to_owned());
            s.work = None;
            Step::note()
        }
        (State::Releasing, Some(Work::Close { mode, key, stage: stage @ Stage::Capturing }))
            if *key == taken_for =>
        {
            *mode = CloseMode::Keep;
            *stage = Stage::Ending;
            s.trouble = Some(why.to_owned());
            Step::go([Effect::Release])
        }
        // The lease was lost meanwhile, or nobody waits for it any more.
        (
            State::Active
            | State::Releasing
            | State::Opening
            | State::Fencing
            | State::Fenced
            | State::Preserved
            | State::Deleting
            | State::Closed
            | State::Quarantined,
            _,
        ) => Step::quiet([]),
    }
}

pub(super) fn on_published(s: &mut Session, key: PublicationKey, outcome: &Published) -> Step {
    let offered = match s.work {
        Some(
            Work::Checkpoint { key: k, stage: Stage::Publishing { layer }, .. }
            | Work::Close { key: k, stage: Stage::Publishing { layer }, .. },
        ) if k == key => Some(layer),
        Some(_) | None => None,
    };
    match outcome {
        // What the authority committed is committed, whatever became of the session meanwhile.
        Published::Committed { at } if at.version <= s.expected.version => {
            s.unknown.remove(&key);
        }
        Published::Committed { at } => {
            s.own_layer = at.head.0.last().copied();
            s.expected = at.clone();
            s.unknown.remove(&key);
        }
        Published::Refused { .. } => {
            s.unknown.remove(&key);
        }
        Published::Unknown { .. } => s.unknown.extend(offered.map(|layer| (key, layer))),
    }
    if offered.is_none() {
        return on_resolved(s, key, outcome);
    }
    match s.state {
        State::Active => {
            s.work = None;
            match outcome {
                Published::Committed { .. } => Step::note(),
                Published::Unknown { why } => {
                    s.trouble = Some(no_outcome(key, why));
                    Step::note()
                }
                Published::Refused { refusal } => match lost_by(refusal) {
                    Some(loss) => lose(s, loss, false),
                    None => {
                        s.trouble = Some(refusal.to_string());
                        Step::note()
                    }
                },
            }
        }
        State::Releasing => {
            let Some(Work::Close { stage, mode, .. }) = &mut s.work else { return Step::note() };
            *stage = Stage::Ending;
            match outcome {
                Published::Committed { .. } => end_clean(s),
                Published::Refused { refusal } => {
                    *mode = CloseMode::Keep;
                    s.trouble = Some(refusal.to_string());
                }
                Published::Unknown { why } => {
                    *mode = CloseMode::Keep;
                    s.trouble = Some(no_outcome(key, why));
                }
            }
            Step::go([Effect::Release])
        }
        State::Opening
        | State::Fencing
        | State::Fenced
        | State::Preserved
        | State::Deleting
        | State::Closed
        | State::Quarantined => Step::note(),
    }
}

/// The outcome of a publication that nobody waits for any more.
fn on_resolved(s: &mut Session, key: PublicationKey, outcome: &Published) -> Step {
    match outcome {
        Published::Committed { .. } if s.unknown.is_empty() => s.trouble = None,
        Published::Refused { refusal } => {
            s.trouble = Some(format!("publication {key} was not committed: {refusal}"));
        }
        Published::Committed { .. } | Published::Unknown { .. } => {}
    }
    let closing =
        matches!(s.loss, Some(Loss::Closed { offered: Some(offered), .. }) if offered == key);
    let committed = matches!(outcome, Published::Committed { .. });
    // All of the upper is in the head after all, and nobody asked for it to be kept.
    let clean =
        closing && committed && writerless(s) && s.altered.is_none() && s.keep_until.is_none();
    match s.state {
        State::Preserved if clean && s.unknown.is_empty() => begin_deleting(s, Disposition::Clean),
        _ => Step::note(),
    }
}

fn no_outcome(key: PublicationKey, why: &str) -> String {
    format!(
        "publication {key} has no known outcome: {why}; it is asked for again, \
         `overfence publication show {key}` tells how it stands"
    )
}

/// A close published everything, or there was nothing to publish: clean, if nobody can have
/// written since.
fn end_clean(s: &mut Session) {
    if writerless(s) {
        s.disposition = Some(Disposition::Clean);
    } else {
        s.trouble = Some("the overlay was made writable during the close".to_owned());
    }
}

/// Which refusals mean that the lease is lost.
pub(super) fn lost_by(refusal: &Refusal) -> Option<Loss> {
    let (generation, owner) = refusal
        .current
        .as_ref()
        .map_or((Generation::NONE, None), |c| (c.generation, c.owner.clone()));
    let code = refusal.code;
    let lost = matches!(
        code,
        Code::StaleGeneration
            | Code::LeaseMismatch
            | Code::LeaseExpired
            | Code::LeaseRevoked
            | Code::LeaseReleased
            | Code::SessionMismatch
            | Code::WorkspaceHeld
            | Code::UnknownWorkspace
    );
    lost.then_some(Loss::Superseded { generation, owner, code, forced_by: None })
}

pub(super) fn on_released(s: &mut Session) -> Step {
    match s.state {
        State::Releasing => match (&s.disposition, &s.work) {
            (_, Some(Work::Close { stage, .. })) if *stage != Stage::Ending => Step::note(),
            (Some(Disposition::Clean), _) => begin_deleting(s, Disposition::Clean),
            (_, Some(Work::Close { mode: CloseMode::Discard, .. })) => {
                let who = s.owner.to_string();
                begin_deleting(s, Disposition::Discard { who })
            }
            (_, _) => {
                let reason =
                    s.trouble.clone().unwrap_or_else(|| "kept on the owner's wish".to_owned());
                let offered = match s.work {
                    Some(Work::Close { key, .. })
                        if s.unknown.contains_key(&key) && writerless(s) =>
                    {
                        Some(key)
                    }
                    Some(_) | None => None,
                };
                s.loss = Some(Loss::Closed { reason, offered });
                Step::go(preserve(s))
            }
        },
        State::Opening
        | State::Active
        | State::Fencing
        | State::Fenced
        | State::Preserved
        | State::Deleting
        | State::Closed
        | State::Quarantined => Step::note(),
    }
}

/// A new lease for a fenced session: it is made writable first, thawed last.
pub(super) fn on_readmitted(
    s: &mut Session,
    lease: LeaseId,
    generation: Generation,
    ends: BootNs,
) -> Step {
    if let Err(code) = s.readmittable() {
        return Step::refuse(code);
    }
    if generation <= s.generation {
        return Step::refuse(Code::StaleGeneration);
    }
    s.lease = lease;
    s.generation = generation;
    s.ends = ends;
    s.state = State::Active;
    s.work = Some(Work::Resume);
    s.loss = None;
    s.doubt = None;
    s.trouble = None;
    s.busy_since = None;
    s.holders.clear();
    s.altered = None;
    s.fence = super::super::session::FenceWish::default();
    s.witnessed = std::time::Duration::ZERO;
    s.keep_until = None;
    s.facts = super::super::facts::Facts::default();
    s.run_on = false;
    Step::go([make_writable(s)])
}

/// The next thing that a resumed session needs to write again.
pub(super) fn make_writable(s: &Session) -> Effect {
    if s.seal { Effect::Unseal } else { Effect::ReadWrite }
}

pub(super) fn on_writable(s: &mut Session) -> Step {
    match (s.state, &s.work) {
        // Nothing runs on a sealed upper.
        (State::Active, Some(Work::Resume)) if s.seal => Step::quiet([]),
        (State::Active, Some(Work::Resume)) => Step::go([Effect::Show, Effect::Thaw]),
        (State::Active, Some(Work::Checkpoint { .. } | Work::Close { .. }) | None) => {
            Step::quiet([])
        }
        // The lease was lost while the remount was under way.
        (State::Fencing | State::Fenced | State::Preserved, _) => writable_again(s),
        (
            State::Opening
            | State::Releasing
            | State::Deleting
            | State::Closed
            | State::Quarantined,
            _,
        ) => Step::quiet([]),
    }
}

pub(super) fn on_thawed(s: &mut Session) -> Step {
    match (s.state, &s.work) {
        (State::Active, Some(Work::Resume)) if s.seal => Step::quiet([]),
        (State::Active, Some(Work::Resume)) => {
            s.work = None;
            Step::note()
        }
        (State::Active, Some(Work::Checkpoint { key, stage: Stage::Thawing { layer }, .. })) => {
            let (key, layer) = (*key, *layer);
            publish_then(s, key, layer)
        }
        (State::Active, Some(Work::Checkpoint { key, stage: Stage::Gathered, .. })) => {
            let (key, stage) = (*key, Stage::Packing);
            s.work = Some(Work::Checkpoint { key, stage, tainted: false });
            Step::go([Effect::Pack { key, live: false }])
        }
        (State::Active, Some(Work::Checkpoint { .. } | Work::Close { .. }) | None) => {
            Step::quiet([])
        }
        // The lease was lost while the thaw was under way.
        (State::Fencing | State::Fenced | State::Preserved, _) => {
            s.facts.drop(Fact::Frozen);
            Step::go([FENCE])
        }
        (
            State::Opening
            | State::Releasing
            | State::Deleting
            | State::Closed
            | State::Quarantined,
            _,
        ) => Step::quiet([]),
    }
}
