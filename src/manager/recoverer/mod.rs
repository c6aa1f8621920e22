//! Recoverer: executes the recovery ladder for silent machines (restart of the agent, reboot, power cycle).
//!
//! `model/recovery.rs` decides the next step; this module executes it. Right before a step is taken, one transaction
//! reads the facts again, the heartbeat included, checks that the step is allowed, and records it
//! ([`Work::begin_disruption`]). Its outcome is recorded too, because after a crash the next worker must know that the
//! step may have happened.

mod step_outcome;

use std::sync::Arc;

use async_trait::async_trait;

use crate::bmdb::engine::fact_change::FactChange;
use crate::bmdb::engine::facts::MachineSnapshot;
use crate::bmdb::engine::intent::{DisruptionRequest, Permission};
use crate::bmdb::engine::work::Work;
use crate::manager::control_loop::{ControlLoop, HandlerError, HandlerOutcome, no_longer_due};
use crate::manager::failpoint;
use crate::manager::machine_access::{AccessError, MachineAccess};
use crate::manager::provider_breakers::{Admission, ProviderCall};
use crate::manager::provider_set::ProviderSet;
use crate::manager::recoverer::step_outcome::step_outcome;
use crate::manager::recovery_brakes::RecoveryBrakes;
use crate::model::circuit_breaker::BreakerOpen;
use crate::model::facts::{ProviderRecord, Recovery};
use crate::model::ids::IntentId;
use crate::model::needs_human::Obstacle;
use crate::model::policy::{DisruptionKind, Rung};
use crate::model::process::Process;
use crate::model::recent_step::{STEP_DONE, STEP_FAILED};
use crate::model::recovery::{
    AvailableSteps, RecoveryPlan, after_reenroll, block_on_unknown_fence, plan_recovery,
};
use crate::providers::provider::{
    ErrorClass, MAX_CALL_TIME, MachineCapabilities, PowerAction, Provider, RebootMethod,
};

/// Handler of the process `Recovery`.
pub struct Recoverer {
    /// The providers whose machines it serves.
    pub providers: ProviderSet,
    /// How machines are reached.
    pub access: Arc<MachineAccess>,
    /// Brakes that stop new ladders.
    pub brakes: Arc<RecoveryBrakes>,
}

/// What the provider of one machine can do for it.
struct RecoveryMeans {
    provider_record: ProviderRecord,
    /// The provider and permission to call it; `None` if the plan does not depend on it.
    provider: Option<(Arc<dyn Provider>, Admission)>,
    /// The provider's answer; `None` if it was not called or could not answer.
    rungs: Option<MachineCapabilities>,
}

/// The next step, and the means to take it.
struct PlannedRecovery {
    plan: RecoveryPlan,
    means: RecoveryMeans,
    /// Why the provider could not report its capabilities.
    provider_error: Option<String>,
    /// Set if the breaker prevented the call.
    breaker_open: Option<BreakerOpen>,
}

#[async_trait]
impl ControlLoop for Recoverer {
    fn name(&self) -> &'static str {
        "recoverer"
    }

    fn process(&self) -> Process {
        Process::Recovery
    }

    fn providers(&self) -> Vec<String> {
        self.providers.names()
    }

    async fn handle(&self, work: &Work) -> Result<HandlerOutcome, HandlerError> {
        let snapshot = work.snapshot().await?;
        if let Some(over) = no_longer_due(work, &snapshot) {
            return Ok(over);
        }
        let PlannedRecovery { plan, means, provider_error, breaker_open } =
            self.plan_machine(work, &snapshot).await?;
        // This uses up no attempt of the ladder: nothing was done.
        if let Some(open) = breaker_open {
            return Ok(HandlerOutcome::provider_unavailable(open, snapshot.now));
        }
        if let Some(why) = escalation_delay_reason(&plan, provider_error.as_deref()) {
            return Err(HandlerError::new(why));
        }
        match block_on_unknown_fence(plan, work.unknown_fence().await?.as_ref()) {
            RecoveryPlan::Recovered { how } => {
                Ok(HandlerOutcome::finished(vec![FactChange::RecoveryCleared], how))
            }
            RecoveryPlan::CallPerson { obstacle, reason } => Ok(HandlerOutcome::finished(
                vec![
                    FactChange::RecoveryCleared,
                    FactChange::NeedsHuman { obstacle, reason: reason.clone() },
                ],
                reason,
            )),
            RecoveryPlan::Wait { until, reason } => Ok(match snapshot.facts.recovery {
                Some(recovery) => HandlerOutcome::finished(
                    vec![FactChange::Recovery(Recovery { next_check_at: until, ..recovery })],
                    reason,
                ),
                None => HandlerOutcome::Requeue { changes: Vec::new(), until, reason },
            }),
            RecoveryPlan::Reenroll { .. } => self.reenroll_agent(work, &snapshot).await,
            RecoveryPlan::TakeStep { rung, step: what, attempt } => {
                self.take_rung(work, &snapshot, &means, rung, what, attempt).await
            }
        }
    }
}

/// Whether a different answer of the provider could change the plan.
fn depends_on_provider(plan: &RecoveryPlan) -> bool {
    match plan {
        RecoveryPlan::TakeStep { step: what, .. } => what.step.reboots(),
        RecoveryPlan::CallPerson { obstacle, .. } => *obstacle == Obstacle::LadderExhausted,
        RecoveryPlan::Recovered { .. } | RecoveryPlan::Wait { .. } | RecoveryPlan::Reenroll { .. } => false,
    }
}

impl RecoveryMeans {
    /// The steps that can be taken, as far as is known.
    fn available_steps(&self) -> AvailableSteps {
        AvailableSteps {
            restart_agent: self.provider_record.address.is_some(),
            reboot: self.rungs.as_ref().is_some_and(MachineCapabilities::can_reboot),
            power_cycle: self.rungs.as_ref().is_some_and(MachineCapabilities::can_power_cycle),
        }
    }

    /// One of the provider's capabilities, and permission to use it.
    fn capability<'m, C: ?Sized>(
        &'m self,
        of: impl FnOnce(&'m dyn Provider) -> Option<&'m C>,
    ) -> Option<(&'m C, &'m Admission)> {
        let (provider, admission) = self.provider.as_ref()?;
        Some((of(&**provider)?, admission))
    }
}

impl Recoverer {
    /// Decides the next step. The provider is called only if its answer matters: a slow API must not hold up steps that
    /// do not depend on it.
    async fn plan_machine(
        &self,
        work: &Work,
        snapshot: &MachineSnapshot,
    ) -> Result<PlannedRecovery, HandlerError> {
        let (_, policy) = work.bmdb().policy();
        let decide = |steps| plan_recovery(&snapshot.facts, &policy, steps, snapshot.now);
        let provided = snapshot
            .facts
            .provider_record
            .clone()
            .ok_or_else(|| HandlerError::new("no provider has handed the machine over"))?;
        let mut means = RecoveryMeans { provider_record: provided, provider: None, rungs: None };
        let plan = decide(AvailableSteps { reboot: true, power_cycle: true, ..means.available_steps() });
        if !depends_on_provider(&plan) {
            return Ok(PlannedRecovery { plan, means, provider_error: None, breaker_open: None });
        }
        match self.providers.admit(&means.provider_record.provider) {
            Ok(admitted) => means.provider = admitted,
            Err(open) => {
                return Ok(PlannedRecovery { plan, means, provider_error: None, breaker_open: Some(open) });
            }
        }
        let mut provider_error = None;
        if let Some((provider, admission)) = &means.provider {
            let call = admission.call_maybe_cached(
                ProviderCall::Capabilities,
                provider.capabilities(&means.provider_record.provider_id),
            );
            match work.run_outward_call(MAX_CALL_TIME, call).await? {
                Ok(found) => means.rungs = Some(found),
                // The provider itself may be down while SSH still works.
                Err(error) => {
                    tracing::warn!(%error, "cannot ask the provider what it can do for a machine");
                    provider_error = (error.class != ErrorClass::NotFound).then_some(error.message);
                }
            }
        }
        Ok(PlannedRecovery {
            plan: decide(means.available_steps()),
            means,
            provider_error,
            breaker_open: None,
        })
    }

    async fn take_rung(
        &self,
        work: &Work,
        snapshot: &MachineSnapshot,
        means: &RecoveryMeans,
        rung: usize,
        what: Rung,
        attempt: u32,
    ) -> Result<HandlerOutcome, HandlerError> {
        if means.provider_record.address.is_some() {
            self.check_agent_binary(work).await?;
        }
        let step = DisruptionRequest {
            rung,
            disruption: what.step,
            attempt,
            deadline: what.deadline,
            facts_read_at: snapshot.now,
            brake: self.brakes.brake_reason(&means.provider_record.provider).await?,
            provider: means.provider_record.provider.clone(),
        };
        let (intent, recovery) = match work.begin_disruption(step).await? {
            Permission::Granted { intent, recovery } => (intent, recovery),
            Permission::Denied(refusal) => {
                return Ok(HandlerOutcome::Requeue {
                    changes: Vec::new(),
                    until: refusal.retry_at,
                    reason: refusal.reason,
                });
            }
        };
        tracing::info!(step = %what.step, attempt, %intent, "taking a recovery step");
        failpoint::hit(self.name(), "intended");
        let outcome = self.take_step(work, snapshot, means, what.step, intent).await;
        failpoint::hit(self.name(), "step-executed");
        let text = match &outcome {
            Ok((_, text)) => format!("{STEP_DONE}{text}"),
            Err(error) => format!("{STEP_FAILED}{}", error.message),
        };
        // The intent's record is for people and budgets. The ladder below decides.
        if let Err(error) = work.resolve_intent(intent, &text).await {
            tracing::warn!(%intent, %error, "cannot record the outcome of an intent");
        }
        failpoint::hit(self.name(), "resolved");
        match work.snapshot().await {
            Ok(snapshot) => step_outcome(outcome, recovery, what, attempt, snapshot.now),
            // The established facts are stored even if the database cannot return the time. If they were lost, an agent
            // that was started with a key that is not stored would be rejected.
            Err(error) => Err(HandlerError::from(error).with_changes(match outcome {
                Ok((changes, _)) => changes,
                Err(error) => error.fact_changes(),
            })),
        }
    }

    async fn take_step(
        &self,
        work: &Work,
        snapshot: &MachineSnapshot,
        means: &RecoveryMeans,
        step: DisruptionKind,
        intent: IntentId,
    ) -> Result<(Vec<FactChange>, String), AccessError> {
        let id = &means.provider_record.provider_id;
        match step {
            DisruptionKind::RestartAgent => {
                let changes = self.access.enroll_agent(work, snapshot).await?;
                Ok((changes, "the agent was started again".to_owned()))
            }
            DisruptionKind::Reboot => match means.rungs.as_ref().map(|rungs| &rungs.reboot) {
                Some(RebootMethod::Ssh(argv)) => {
                    Ok((Vec::new(), self.access.run_command(work, snapshot, argv).await?))
                }
                Some(RebootMethod::Provider) => {
                    let (control, admission) = means
                        .capability(|provider| provider.reboot())
                        .ok_or_else(|| AccessError::new("the provider cannot reboot it"))?;
                    work.run_outward_call(
                        MAX_CALL_TIME,
                        admission.call_provider(ProviderCall::Reboot, control.reboot(id, intent)),
                    )
                    .await?
                    .map_err(|error| AccessError::new(error.to_string()))?;
                    Ok((Vec::new(), "the provider took the order".to_owned()))
                }
                Some(RebootMethod::Unsupported { reason }) => Err(AccessError::new(reason.clone())),
                None => Err(AccessError::new("its provider could not be queried about how to reboot it")),
            },
            DisruptionKind::PowerCycle => {
                let (control, admission) = means
                    .capability(|provider| provider.power())
                    .ok_or_else(|| AccessError::new("the provider has no power over it"))?;
                work.run_outward_call(
                    MAX_CALL_TIME,
                    admission.call_provider(
                        ProviderCall::Power,
                        control.set_power(id, PowerAction::Cycle, intent),
                    ),
                )
                .await?
                .map_err(|error| AccessError::new(error.to_string()))?;
                Ok((Vec::new(), "the provider took the order".to_owned()))
            }
        }
    }

    /// A role server that is missing on our own host, or that is not trusted, is no failure of the machine. Without this
    /// check it would count as an attempt, and every silent machine would be rebooted. After the reboot no agent could be
    /// installed either, so the machine would be power-cycled as well.
    async fn check_agent_binary(&self, work: &Work) -> Result<(), HandlerError> {
        self.access.load_agent(work).await.map(drop).map_err(|error| HandlerError::new(error.to_string()))
    }

    /// Enrols the agent after a reboot: the machine may be up without a running agent.
    async fn reenroll_agent(
        &self,
        work: &Work,
        snapshot: &MachineSnapshot,
    ) -> Result<HandlerOutcome, HandlerError> {
        let Some((recovery, acted)) = snapshot
            .facts
            .recovery
            .clone()
            .and_then(|recovery| Some((recovery.clone(), recovery.last_action?)))
        else {
            return Ok(HandlerOutcome::finished(Vec::new(), "the ladder was over"));
        };
        self.check_agent_binary(work).await?;
        let (mut changes, note, obstacle) = match self.access.enroll_agent(work, snapshot).await {
            Ok(changes) => {
                (changes, "the agent was put on it after the reboot; waits for its report".to_owned(), None)
            }
            // A machine that is starting may well refuse logins for a while. Nobody is called before its deadline.
            Err(error) => {
                (error.fact_changes(), format!("waits for it to come up: {}", error.message), error.obstacle)
            }
        };
        let recovery = after_reenroll(recovery, &acted, note.clone(), obstacle, snapshot.now);
        changes.push(FactChange::Recovery(recovery));
        Ok(HandlerOutcome::finished(changes, note))
    }
}

/// Why no person may be called yet: the capabilities of the provider are unknown, so the remaining steps are unknown
/// too. Otherwise the outage of a provider would escalate every machine that falls silent meanwhile.
fn escalation_delay_reason(plan: &RecoveryPlan, provider_error: Option<&str>) -> Option<String> {
    match plan {
        RecoveryPlan::CallPerson { obstacle: Obstacle::LadderExhausted, .. } => {
            provider_error.map(|why| format!("cannot ask the provider what is left to try: {why}"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::time::{Span, Timestamp};

    #[test]
    fn provider_is_queried_only_for_what_it_decides() {
        let act = |step| RecoveryPlan::TakeStep {
            rung: 0,
            step: Rung { step, deadline: Span::minutes(1), tries: 1 },
            attempt: 1,
        };
        let call = |obstacle| RecoveryPlan::CallPerson { obstacle, reason: String::new() };
        for (plan, requested) in [
            (act(DisruptionKind::RestartAgent), false),
            (act(DisruptionKind::Reboot), true),
            (act(DisruptionKind::PowerCycle), true),
            (call(Obstacle::LadderExhausted), true),
            (call(Obstacle::LoginRefused), false),
            (RecoveryPlan::Reenroll { deadline: Timestamp::UNIX_EPOCH }, false),
        ] {
            assert_eq!(depends_on_provider(&plan), requested, "{plan:?}");
        }
    }

    #[test]
    fn no_person_is_called_while_the_provider_is_unavailable() {
        let call = |obstacle| RecoveryPlan::CallPerson { obstacle, reason: "tried in vain".to_owned() };
        let exhausted = call(Obstacle::LadderExhausted);
        let recovered = RecoveryPlan::Recovered { how: "it reported".to_owned() };
        assert!(escalation_delay_reason(&exhausted, Some("HTTP 503")).unwrap().ends_with(": HTTP 503"));
        assert_eq!(escalation_delay_reason(&exhausted, None), None);
        assert_eq!(escalation_delay_reason(&call(Obstacle::LoginRefused), Some("HTTP 503")), None);
        assert_eq!(escalation_delay_reason(&recovered, Some("HTTP 503")), None);
    }
}
