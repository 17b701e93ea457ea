//! The breaker: why it is open, and closing it.

use super::{Agent, actor};
use crate::agent::failure::{Caller, Failure};
use crate::agent::host::Host;
use crate::model::code::Code;
use crate::model::view::{BreakerView, ResetBreaker};

impl Agent {
    /// Whether killing and deleting stop, and why.
    pub async fn breaker(&self) -> BreakerView {
        view(&self.0)
    }

    /// Closes the breaker; one that is closed stays so.
    pub async fn breaker_reset(
        &self,
        by: &Caller,
        wish: ResetBreaker,
    ) -> Result<BreakerView, Failure> {
        if wish.reason.trim().is_empty() {
            let why = "a reason is wanted: what was wrong, and why it is over";
            return Err(Failure::new(Code::BadRequest, why));
        }
        let who = actor(by);
        self.blocking(move |host| {
            let unwritten = |why| Failure::new(Code::Internal, why);
            host.shut_breaker(&who, &wish.reason).map_err(unwritten)?;
            Ok(view(host))
        })
        .await
    }
}

fn view(host: &Host) -> BreakerView {
    match host.tripped() {
        None => BreakerView::default(),
        Some(open) => BreakerView {
            open: true,
            since: Some(open.since),
            why: Some(open.why),
            lost: open.lost,
            of: open.of,
            closes_by_itself: open.doubt_alone,
            waiting: open.waiting.iter().map(ToString::to_string).collect(),
        },
    }
}
