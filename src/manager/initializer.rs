//! Initializer: enrols the role server on machines without one.

use std::sync::Arc;

use async_trait::async_trait;

use crate::bmdb::engine::work::Work;
use crate::manager::control_loop::{ControlLoop, HandlerError, HandlerOutcome, no_longer_due};
use crate::manager::failpoint;
use crate::manager::machine_access::MachineAccess;
use crate::manager::provider_set::ProviderSet;
use crate::model::process::Process;

/// Handler of the process `AgentStart`.
pub struct Initializer {
    /// The providers whose machines it serves.
    pub providers: ProviderSet,
    /// How machines are reached.
    pub access: Arc<MachineAccess>,
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

    async fn handle(&self, work: &Work) -> Result<HandlerOutcome, HandlerError> {
        let snapshot = work.snapshot().await?;
        if let Some(over) = no_longer_due(work, &snapshot) {
            return Ok(over);
        }
        let changes = self.access.enroll_agent(work, &snapshot).await?;
        failpoint::hit(self.name(), "enrolled");
        Ok(HandlerOutcome::finished(changes, "the agent was put on the machine"))
    }
}
