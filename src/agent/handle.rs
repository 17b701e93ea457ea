//! The only door to the agent.
use crate::agent::failure::{Caller, Failure};
use crate::model::ids::SessionId;
use crate::model::journal::Entry;
use crate::model::view::*;

/// A handle to the running agent; cheap to clone.
#[derive(Clone)]
pub struct Agent(pub std::sync::Arc<()>);

/// How a sign of life is vouched for.
pub enum Sign {
    /// The lease token.
    Token(String),
    /// The session's own socket; the peer's pid as the kernel says.
    Socket { pid: u32 },
}

/// Everything the client needs to place a command.
pub type Permit = serde_json::Value; // becomes workload::Place

#[allow(missing_docs, unused_variables)]
impl Agent {
    pub async fn create_workspace(
        &self,
        by: &Caller,
        wish: CreateWorkspace,
    ) -> Result<WorkspaceView, Failure> {
        todo!()
    }
    pub async fn workspaces(&self) -> Result<Vec<WorkspaceView>, Failure> {
        todo!()
    }
    pub async fn workspace(&self, id: &str) -> Result<WorkspaceView, Failure> {
        todo!()
    }
    pub async fn history(&self, id: &str, limit: usize) -> Result<Vec<HistoryView>, Failure> {
        todo!()
    }
    pub async fn open(&self, by: &Caller, wish: OpenSession) -> Result<Opened, Failure> {
        todo!()
    }
    pub async fn sessions(&self) -> Result<Vec<SessionView>, Failure> {
        todo!()
    }
    /// Resolves a unique id prefix.
    pub async fn session_id(&self, prefix: &str) -> Result<SessionId, Failure> {
        todo!()
    }
    pub async fn session(&self, id: SessionId) -> Result<SessionView, Failure> {
        todo!()
    }
    pub async fn checkpoint(&self, by: &Caller, id: SessionId) -> Result<Checkpointed, Failure> {
        todo!()
    }
    pub async fn close(
        &self,
        by: &Caller,
        id: SessionId,
        wish: CloseSession,
    ) -> Result<SessionView, Failure> {
        todo!()
    }
    pub async fn permit(&self, by: &Caller, id: SessionId) -> Result<Permit, Failure> {
        todo!()
    }
    pub async fn fence(
        &self,
        by: &Caller,
        id: SessionId,
        wish: FenceSession,
    ) -> Result<Fenced, Failure> {
        todo!()
    }
    pub async fn fence_workspace(
        &self,
        by: &Caller,
        workspace: &str,
        wish: FenceSession,
    ) -> Result<Fenced, Failure> {
        todo!()
    }
    pub async fn readmit(
        &self,
        by: &Caller,
        id: SessionId,
        wish: ReadmitSession,
    ) -> Result<SessionView, Failure> {
        todo!()
    }
    pub async fn leases(&self) -> Result<Vec<LeaseView>, Failure> {
        todo!()
    }
    /// `lease` is a unique prefix of a lease id.
    pub async fn revoke(
        &self,
        by: &Caller,
        lease: &str,
        wish: RevokeLease,
    ) -> Result<Fenced, Failure> {
        todo!()
    }
    pub async fn beat(&self, id: SessionId, sign: Sign) -> Result<BeatAnswer, Failure> {
        todo!()
    }
    pub async fn preserved(&self) -> Result<Vec<PreservedView>, Failure> {
        todo!()
    }
    pub async fn export(
        &self,
        by: &Caller,
        id: SessionId,
        wish: ExportSession,
    ) -> Result<Exported, Failure> {
        todo!()
    }
    pub async fn discard(&self, by: &Caller, id: SessionId) -> Result<SessionView, Failure> {
        todo!()
    }
    pub async fn keep(
        &self,
        by: &Caller,
        id: SessionId,
        wish: KeepSession,
    ) -> Result<SessionView, Failure> {
        todo!()
    }
    pub async fn gc(&self, by: &Caller, dry_run: bool) -> Result<GcReport, Failure> {
        todo!()
    }
    pub async fn evidence(
        &self,
        since: u64,
        limit: usize,
        session: Option<SessionId>,
    ) -> Result<Vec<Entry>, Failure> {
        todo!()
    }
    pub async fn evidence_verify(&self) -> Result<EvidenceReport, Failure> {
        todo!()
    }
    /// Wakes at each committed evidence entry; the value is its sequence number.
    pub fn evidence_watch(&self) -> tokio::sync::watch::Receiver<u64> {
        todo!()
    }
    pub async fn status(&self) -> Result<StatusView, Failure> {
        todo!()
    }
    /// OpenMetrics text.
    pub fn metrics(&self) -> String {
        todo!()
    }
    /// The public key of mount tickets.
    pub fn ticket_key(&self) -> String {
        todo!()
    }
}
