//! Stable codes: one list that the API, the exit codes, the evidence and the docs share.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! codes {
    ($($name:ident $text:literal $status:literal $exit:literal $doc:literal;)*) => {
        /// What went wrong or was refused, in a word that scripts may rely on.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum Code {
            $(#[doc = $doc] #[serde(rename = $text)] $name,)*
        }

        impl Code {
            /// Every code, for the documentation table and its test.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The stable word.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// The HTTP status it is sent with.
            pub const fn status(self) -> u16 {
                match self { $(Self::$name => $status,)* }
            }

            /// The exit code of the command line.
            pub const fn exit(self) -> u8 {
                match self { $(Self::$name => $exit,)* }
            }

            /// One sentence for people.
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$name => $doc,)* }
            }
        }
    };
}

codes! {
    StaleGeneration "stale_generation" 409 4 "A newer generation was issued for the workspace; this writer lost its authority.";
    LeaseExpired "lease_expired" 409 4 "The lease ran out.";
    LeaseRevoked "lease_revoked" 409 4 "The lease was revoked.";
    LeaseReleased "lease_released" 409 4 "The lease was given back.";
    LeaseMismatch "lease_mismatch" 409 4 "The workspace's lease is another one.";
    LeaseHeld "lease_held" 409 4 "Somebody else holds a live lease on the workspace.";
    LeaseLost "lease_lost" 409 4 "The session's lease is lost.";
    SessionMismatch "session_mismatch" 409 4 "The lease belongs to another session.";
    VersionMismatch "version_mismatch" 412 4 "The workspace was published to since this session last saw it.";
    HeadMismatch "head_mismatch" 412 4 "The workspace's head is not the one this session expects.";
    HeadMoved "head_moved" 412 4 "The head moved on; a fenced session can come back only through a bundle.";
    Conflict "conflict" 409 4 "The bundle and the head changed the same paths; nothing was applied.";
    WorkspaceHeld "workspace_held" 409 4 "The workspace is on HOLD until an operator repairs it.";
    WorkspaceInUse "workspace_in_use" 409 4 "The workspace has sessions or preserved deltas.";
    WorkspaceExists "workspace_exists" 409 4 "A workspace of this name exists.";
    KeyUsed "key_used" 409 4 "The key was used for other content.";
    KeyBuried "key_buried" 409 4 "The publication key was resolved as not committed and cannot be used again.";
    KeyForgotten "key_forgotten" 409 4 "The key is older than the ledger goes back; what became of it is not known any more.";
    TaskTaken "task_taken" 409 4 "The external task was begun under another key, which may have done it.";
    AlreadySettled "already_settled" 409 4 "Its outcome is recorded already.";
    TooManyOpen "too_many_open" 409 4 "Too many requests of this workspace are open; settle some first.";
    PredecessorUnfenced "predecessor_unfenced" 409 4 "The former writer on this host is not proved frozen yet; wait or use --force.";
    Doubt "doubt" 409 4 "It is not known whether the lease still holds; no new work is started.";
    WrongState "wrong_state" 409 4 "The session's state does not allow this.";
    Busy "busy" 409 4 "Something else is under way for this session.";
    Draining "draining" 409 4 "The host is being drained: no session is opened until its agent is started again.";
    UncommittedBytes "uncommitted_bytes" 409 4 "The session holds bytes that no publication holds; say --checkpoint, --keep or --discard.";
    UnknownPublication "unknown_publication" 409 4 "A publication of this session has no known outcome yet.";
    UnknownWorkspace "unknown_workspace" 404 3 "No workspace of this name; `overfence workspace create` makes one, or --create where it is opened.";
    UnknownSession "unknown_session" 404 3 "No session of this id.";
    UnknownLease "unknown_lease" 404 3 "No lease of this id.";
    NotFound "not_found" 404 3 "There is no such thing.";
    BadRequest "bad_request" 400 2 "The request is not valid.";
    AmbiguousId "ambiguous_id" 400 2 "The id prefix fits more than one.";
    Denied "denied" 403 5 "The caller may not do this.";
    BadToken "bad_token" 403 5 "The lease token is not this session's.";
    AgentUnreachable "agent_unreachable" 503 6 "The agent does not answer.";
    AuthorityUnavailable "authority_unavailable" 503 1 "The authority does not answer or is not believed.";
    TimedOut "timed_out" 504 7 "It did not finish in the time given.";
    Partial "partial" 500 8 "Done in part; the message says which fact is missing.";
    Unsupported "unsupported" 501 1 "This host or build cannot do it.";
    UpperRefused "upper_refused" 422 1 "The directory cannot serve as an upper or lower, or what is in it has no faithful form in a layer.";
    LayerBuried "layer_buried" 409 4 "The layer is being removed, since nothing named it; capture it again.";
    DestinationExists "destination_exists" 409 4 "Something of this name is there already; nothing was overwritten.";
    NoSpace "no_space" 507 1 "The file system of the state directory is full; nothing new is begun until there is room.";
    AboveWatermark "above_watermark" 503 1 "The host is above a watermark of `[open]`, min_free or max_sessions: no session is opened until there is room.";
    MountFailed "mount_failed" 500 1 "The overlay could not be mounted.";
    ImageRefused "image_refused" 422 1 "The image is damaged or hostile, or not in a form that is taken; nothing was imported.";
    LayerDamaged "layer_damaged" 409 4 "A layer is damaged or missing: what needs it is not mounted, reverted to or captured.";
    VersionNotKept "version_not_kept" 409 4 "Layers of that version were removed: a workspace keeps those of its last ten versions.";
    BackupRefused "backup_refused" 422 1 "The backup cannot be made or put back so; nothing in place was changed.";
    BundleInvalid "bundle_invalid" 422 1 "The bundle does not verify.";
    Internal "internal" 500 1 "An unexpected failure; the message says where.";
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_serialise_as_their_word() {
        let words: std::collections::BTreeSet<_> = Code::ALL.iter().map(|c| c.as_str()).collect();
        assert_eq!(words.len(), Code::ALL.len());
        for code in Code::ALL {
            assert_eq!(serde_json::to_string(code).unwrap(), format!("{:?}", code.as_str()));
            assert!((1..=8).contains(&code.exit()), "{code}");
            assert!((400..=599).contains(&code.status()), "{code}");
        }
    }

    #[test]
    fn the_table_in_the_docs_is_this_list() {
        let page = include_str!("../../docs/OPERATIONS.md");
        let rows: Vec<&str> = page
            .lines()
            .filter(|line| line.starts_with("| `") && line.matches('|').count() == 5)
            .filter(|line| line.split('|').nth(2).is_some_and(|s| s.trim().parse::<u16>().is_ok()))
            .collect();
        let wanted: Vec<String> = Code::ALL
            .iter()
            .map(|c| format!("| `{c}` | {} | {} | {} |", c.status(), c.exit(), c.meaning()))
            .collect();
        assert_eq!(rows, wanted);
    }
}
