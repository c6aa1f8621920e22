//! Retirer: releases machines to their providers, one step at a time.
//!
//! `model/retirement.rs` decides the next step; this module executes it. Right before a machine is released, one
//! transaction under the machine's lock checks and records the order ([`Work::begin_release`]). The order's intent
//! stays in the facts: after a crash or a lost answer, the next worker sends the same order again under the same
//! intent, and a provider carries it out once.
//!
//! The provider is queried before the release is recorded. So nothing is ordered of a provider that does not answer,
//! and the retirement can still be cancelled. A machine that its provider does not know any more has left by itself.
//! That ends its retirement for good too, so it passes the same checks and uses the same budget. It is believed only
//! while the provider's list is plausible: a list that is empty for a moment would otherwise leave nothing but
//! tombstones.
//!
//! The tombstone is no step of its own: the commit that ends the work also records that nothing is left to do.

use async_trait::async_trait;

use crate::bmdb::engine::fact_change::FactChange;
use crate::bmdb::engine::fact_change::retirement::RetirementChange;
use crate::bmdb::engine::facts::MachineSnapshot;
use crate::bmdb::engine::work::Work;
use crate::bmdb::orders::retirement::ReleasePermission;
use crate::manager::control_loop::{ControlLoop, HandlerError, HandlerOutcome, no_longer_due};
use crate::manager::failpoint;
use crate::manager::provider_breakers::ProviderCall;
use crate::manager::provider_set::ProviderSet;
use crate::model::disruption::{DisruptionDenied, may_trust_missing};
use crate::model::ids::IntentId;
use crate::model::process::Process;
use crate::model::time::Timestamp;
use crate::providers::provider::{ErrorClass, MAX_CALL_TIME};

/// Handler of the process `Retirement`.
pub struct Retirer {
    /// The providers to which it releases machines.
    pub providers: ProviderSet,
}

#[async_trait]
impl ControlLoop for Retirer {
    fn name(&self) -> &'static str {
        "retirer"
    }

    fn process(&self) -> Process {
        Process::Retirement
    }

    fn providers(&self) -> Vec<String> {
        self.providers.names()
    }

    async fn handle(&self, work: &Work) -> Result<HandlerOutcome, HandlerError> {
        let snapshot = work.snapshot().await?;
        if let Some(over) = no_longer_due(work, &snapshot) {
            return Ok(over);
        }
        self.release_machine(work, &snapshot).await
    }
}

impl Retirer {
    async fn release_machine(
        &self,
        work: &Work,
        snapshot: &MachineSnapshot,
    ) -> Result<HandlerOutcome, HandlerError> {
        let Some(provided) = &snapshot.facts.provider_record else {
            return Err(HandlerError::new(
                "no provider has handed the machine over, so none can take it back",
            ));
        };
        let (name, id) = (&provided.provider, &provided.provider_id);
        let (provider, admission) = match self.providers.admit(name) {
            Ok(Some(admitted)) => admitted,
            Ok(None) => return Err(HandlerError::new(format!("provider {name} is not configured here"))),
            Err(open) => return Ok(HandlerOutcome::provider_unavailable(open, snapshot.now)),
        };
        let found = work
            .run_outward_call(
                MAX_CALL_TIME,
                admission.call_provider(ProviderCall::FindMachine, provider.find_machine(id)),
            )
            .await?;
        let known = found.map_err(|error| HandlerError::new(error.message))?.is_some();
        if known && provider.release().is_none() {
            return Err(HandlerError::new(format!(
                "provider {name} offers no way to give a machine back; give it back there by hand, and waive the \
                 stage release"
            )));
        }
        if !known && let Err(refusal) = check_missing(work, name, snapshot.now).await? {
            return Ok(requeue(refusal));
        }
        let intent = match work.begin_release(name).await? {
            ReleasePermission::Granted(intent) => intent,
            ReleasePermission::Denied(refusal) => return Ok(requeue(refusal)),
        };
        let Some(control) = provider.release() else {
            record_intent_outcome(
                work,
                intent,
                "nothing was to be done: the provider does not know it any more",
            )
            .await;
            return Ok(finished_unknown_to_provider(name));
        };
        tracing::info!(provider = name, provider_id = id, %intent, "releasing a machine to its provider");
        failpoint::hit(self.name(), "intended");
        let outcome = work
            .run_outward_call(
                MAX_CALL_TIME,
                admission.call_provider(ProviderCall::Release, control.release(id, intent)),
            )
            .await?;
        failpoint::hit(self.name(), "released");
        let text = match &outcome {
            Ok(()) => "done: the provider took it back".to_owned(),
            Err(error) if error.class == ErrorClass::NotFound => {
                format!("nothing was to be done: {}", error.message)
            }
            Err(error) => format!("failed: {}", error.message),
        };
        record_intent_outcome(work, intent, &text).await;
        failpoint::hit(self.name(), "resolved");
        match outcome {
            Ok(()) => Ok(finish_retirement(format!("provider {name} took it back"))),
            Err(error) if error.class == ErrorClass::NotFound => Ok(check_missing(work, name, snapshot.now)
                .await?
                .map_or_else(requeue, |()| finished_unknown_to_provider(name))),
            Err(error) => Err(HandlerError::new(error.message)),
        }
    }
}

/// Whether to believe that the provider does not know the machine.
async fn check_missing(
    work: &Work,
    provider: &str,
    now: Timestamp,
) -> Result<Result<(), DisruptionDenied>, HandlerError> {
    let brake = work.bmdb().provisioner_brake(provider).await?;
    Ok(may_trust_missing(brake.as_deref(), now))
}

/// Records the outcome of an intent. The record is for people and budgets; the facts decide.
async fn record_intent_outcome(work: &Work, intent: IntentId, text: &str) {
    if let Err(error) = work.resolve_intent(intent, text).await {
        tracing::warn!(%intent, %error, "cannot record the outcome of an intent");
    }
}

fn requeue(refusal: DisruptionDenied) -> HandlerOutcome {
    HandlerOutcome::Requeue { changes: Vec::new(), until: refusal.retry_at, reason: refusal.reason }
}

fn finished_unknown_to_provider(provider: &str) -> HandlerOutcome {
    finish_retirement(format!("provider {provider} does not know it any more"))
}

fn finish_retirement(outcome: String) -> HandlerOutcome {
    let finished = FactChange::Retirement(RetirementChange::Finished(outcome.clone()));
    HandlerOutcome::finished(vec![finished], outcome)
}
