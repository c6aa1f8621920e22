//! The initializer: puts the role server on machines that have none.

use std::sync::Arc;

use async_trait::async_trait;

use crate::bmdb::work::Work;
use crate::manager::access::Access;
use crate::manager::control_loop::{ControlLoop, Handled, HandlerError, no_longer_due};
use crate::manager::failpoint;
use crate::manager::provider_set::ProviderSet;
use crate::model::process::Process;

/// See the module.
pub struct Initializer {
    /// The providers whose machines it serves.
    pub providers: ProviderSet,
    /// How machines are reached.
    pub access: Arc<Access>,
}

#[async_trait]
impl ControlLoop for Initializer {
    fn name(&self) -> &'static str {
        "initializer"
    }

    fn process(&self) -> Process {
        Process::AgentStart
    }

    fn providers(&self) -> Vec<String> {
        self.providers.names()
    }

    async fn handle(&self, work: &Work) -> Result<Handled, HandlerError> {
        let snapshot = work.snapshot().await?;
        if let Some(over) = no_longer_due(work, &snapshot) {
            return Ok(over);
        }
        let changes = self.access.enroll(work, &snapshot).await?;
        failpoint::pass(self.name(), "enrolled");
        Ok(Handled::finished(changes, "the agent was put on the machine"))
    }
}
