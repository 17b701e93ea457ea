//! A copy of the host, taken while it works.

use super::{Agent, actor};
use crate::agent::failure::{Caller, Failure};
use crate::model::code::Code;
use crate::model::view::{BackupHost, BackupView};

impl Agent {
    /// Makes a backup; who took it, and whether with the keys, is in the evidence before it is begun.
    pub async fn backup(&self, by: &Caller, wish: BackupHost) -> Result<BackupView, Failure> {
        let by = actor(by);
        let dest = wish.dest.path().filter(|path| path.is_absolute()).ok_or_else(|| {
            Failure::new(Code::BadRequest, format!("{:?} is no absolute path", wish.dest.0))
        })?;
        self.blocking(move |host| host.backup(&by, &dest, wish.keys)).await
    }
}
