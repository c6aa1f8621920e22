//! Power controller: executes operators' power orders.
//!
//! `model/power_control.rs` decides what happens to an order; this module executes it. Right before the order is sent,
//! it is checked again and recorded in one transaction ([`Work::begin_switch`]), together with the ladder that watches
//! whether the machine comes back. After a crash or a lost answer, the next holder of the work sends the order to the
//! provider again under the same intent. A command that may have been run over SSH is not run again.

use std::sync::Arc;

use async_trait::async_trait;

use crate::bmdb::engine::fact_change::FactChange;
use crate::bmdb::engine::fact_change::power::PowerChange;
use crate::bmdb::engine::facts::MachineSnapshot;
use crate::bmdb::engine::work::Work;
use crate::bmdb::orders::power_order::SwitchPermission;
use crate::manager::control_loop::{ControlLoop, HandlerError, HandlerOutcome, no_longer_due};
use crate::manager::failpoint;
use crate::manager::machine_access::MachineAccess;
use crate::manager::provider_breakers::{Admission, ProviderCall};
use crate::manager::provider_set::ProviderSet;
use crate::model::facts::{PowerOrder, ProviderRecord, Recovery};
use crate::model::ids::IntentId;
use crate::model::policy::Rung;
use crate::model::power_control::{PowerOrderStep, PowerRoute, lapse_reason, next_power_step, recovery_note};
use crate::model::power_order::PowerOrderKind;
use crate::model::process::Process;
use crate::model::recent_step::{STEP_DONE, STEP_FAILED};
use crate::model::recovery::start_report_wait;
use crate::providers::provider::{
    ErrorClass, MAX_CALL_TIME, MachineCapabilities, PowerAction, PowerSupport, Provider, RebootMethod,
};

/// Handler of the process `Power`.
pub struct PowerController {
    /// The providers whose machines it switches.
    pub providers: ProviderSet,
    /// How machines are reached.
    pub access: Arc<MachineAccess>,
}

#[async_trait]
impl ControlLoop for PowerController {
    fn name(&self) -> &'static str {
        "switcher"
    }

    fn process(&self) -> Process {
        Process::Power
    }

    fn providers(&self) -> Vec<String> {
        self.providers.names()
    }

    async fn handle(&self, work: &Work) -> Result<HandlerOutcome, HandlerError> {
        let snapshot = work.snapshot().await?;
        if let Some(over) = no_longer_due(work, &snapshot) {
            return Ok(over);
        }
        let (Some(order), Some(provided)) = (&snapshot.facts.power_order, &snapshot.facts.provider_record)
        else {
            return Ok(give_order_up("cannot be carried out: no provider has handed the machine over"));
        };
        self.execute_order(work, &snapshot, order, provided).await
    }
}

/// How an order ended, unless it failed in a way that a retry may mend.
enum PowerOrderOutcome {
    /// The order was sent; the text describes how.
    Sent(String),
    /// The order can never be carried out; the text is the reason.
    Rejected(String),
}

impl PowerController {
    async fn execute_order(
        &self,
        work: &Work,
        snapshot: &MachineSnapshot,
        order: &PowerOrder,
        provided: &ProviderRecord,
    ) -> Result<HandlerOutcome, HandlerError> {
        let (_, policy) = work.bmdb().policy();
        // Before the provider is called: an order lapses even if its provider never answers again.
        if let Some(why) = lapse_reason(order, &policy, snapshot.now) {
            return Ok(give_order_up(format!("to {} {why}", order.kind.phrase())));
        }
        let name = &provided.provider;
        let (provider, admission) = match self.providers.admit(name) {
            Ok(Some(admitted)) => admitted,
            Ok(None) => return Err(HandlerError::new(format!("provider {name} is not configured here"))),
            Err(open) => return Ok(HandlerOutcome::provider_unavailable(open, snapshot.now)),
        };
        let result = work
            .run_outward_call(
                MAX_CALL_TIME,
                admission.call_maybe_cached(
                    ProviderCall::Capabilities,
                    provider.capabilities(&provided.provider_id),
                ),
            )
            .await?;
        let rungs = result.map_err(|error| HandlerError::new(error.message))?;
        match next_power_step(order, power_route(&rungs, order.kind), &policy, snapshot.now) {
            PowerOrderStep::GiveUp(why) => {
                return Ok(give_order_up(format!("to {} {why}", order.kind.phrase())));
            }
            PowerOrderStep::Watch => {
                return Ok(order_over(format!(
                    "to {} may have been given before the work on it broke off, and is not given again",
                    order.kind.phrase()
                )));
            }
            PowerOrderStep::Execute => {}
        }
        let (intent, ladder) = match work.begin_switch(order.kind, name).await? {
            SwitchPermission::Granted { intent, ladder } => (intent, ladder),
            SwitchPermission::Denied(refusal) => {
                return Ok(HandlerOutcome::Requeue {
                    changes: Vec::new(),
                    until: refusal.retry_at,
                    reason: refusal.reason,
                });
            }
        };
        tracing::info!(power_action = %order.kind, actor = order.by, %intent, "switching a machine by order");
        failpoint::hit(self.name(), "intended");
        let outcome =
            self.send_order(work, snapshot, order.kind, &rungs, (&*provider, &admission), intent).await;
        failpoint::hit(self.name(), "switched");
        let text = match &outcome {
            Ok(PowerOrderOutcome::Sent(text)) => format!("{STEP_DONE}{text}"),
            Ok(PowerOrderOutcome::Rejected(why)) => format!("{STEP_FAILED}{why}"),
            Err(error) => format!("{STEP_FAILED}{}", error.cause),
        };
        // The intent's record is for people and budgets. The facts decide.
        if let Err(error) = work.resolve_intent(intent, &text).await {
            tracing::warn!(%intent, %error, "cannot record the outcome of an intent");
        }
        failpoint::hit(self.name(), "resolved");
        match outcome {
            Ok(PowerOrderOutcome::Sent(text)) => {
                let now = work.snapshot().await?.now;
                Ok(order_sent(order, ladder, &text, now))
            }
            // Nothing was done, so a machine that reports must not be watched for another boot.
            Ok(PowerOrderOutcome::Rejected(why)) => {
                let how = format!("the order to {} failed: {why}", order.kind.phrase());
                let changes = ladder.map(|_| FactChange::RecoveryCleared).into_iter().collect();
                Ok(finish_order(changes, PowerChange::GivenUp(how.clone()), how))
            }
            Err(error) => Err(error),
        }
    }

    async fn send_order(
        &self,
        work: &Work,
        snapshot: &MachineSnapshot,
        switch: PowerOrderKind,
        rungs: &MachineCapabilities,
        (provider, admission): (&dyn Provider, &Admission),
        intent: IntentId,
    ) -> Result<PowerOrderOutcome, HandlerError> {
        let id = &snapshot.facts.provider_record.as_ref().map_or("", |provided| &provided.provider_id);
        let refused =
            |what: &str| Ok(PowerOrderOutcome::Rejected(format!("provider {} {what}", provider.name())));
        let answer = match (provider_action(switch), &rungs.reboot) {
            (Some(action), _) => {
                let Some(control) = provider.power() else { return refused("has no power over machines") };
                work.run_outward_call(
                    MAX_CALL_TIME,
                    admission.call_provider(ProviderCall::Power, control.set_power(id, action, intent)),
                )
                .await?
            }
            (None, RebootMethod::Ssh(argv)) => {
                return match self.access.run_command(work, snapshot, argv).await {
                    Ok(text) => Ok(PowerOrderOutcome::Sent(text)),
                    // Over SSH an order is sent once. The operator who gave it learns of the failure and may repeat it.
                    Err(error) => Ok(PowerOrderOutcome::Rejected(error.message)),
                };
            }
            (None, _) => {
                let Some(control) = provider.reboot() else { return refused("cannot reboot machines") };
                work.run_outward_call(
                    MAX_CALL_TIME,
                    admission.call_provider(ProviderCall::Reboot, control.reboot(id, intent)),
                )
                .await?
            }
        };
        match answer {
            Ok(()) => Ok(PowerOrderOutcome::Sent("the provider took the order".to_owned())),
            Err(error) if error.class == ErrorClass::Transient => Err(HandlerError::new(error.message)),
            Err(error) => Ok(PowerOrderOutcome::Rejected(error.message)),
        }
    }
}

/// By which route a machine can be switched in this way.
fn power_route(rungs: &MachineCapabilities, switch: PowerOrderKind) -> PowerRoute<'_> {
    if switch == PowerOrderKind::Reboot {
        return match &rungs.reboot {
            RebootMethod::Provider => PowerRoute::Provider,
            RebootMethod::Ssh(_) => PowerRoute::Ssh,
            RebootMethod::Unsupported { reason } => PowerRoute::Unavailable(reason),
        };
    }
    match &rungs.power {
        PowerSupport::Available => PowerRoute::Provider,
        PowerSupport::Unavailable { reason } => PowerRoute::Unavailable(reason),
    }
}

/// The action to send to a provider. `None` for a reboot.
const fn provider_action(switch: PowerOrderKind) -> Option<PowerAction> {
    match switch {
        PowerOrderKind::Reboot => None,
        PowerOrderKind::On => Some(PowerAction::On),
        PowerOrderKind::Off => Some(PowerAction::Off),
        PowerOrderKind::Cycle => Some(PowerAction::Cycle),
    }
}

fn order_sent(
    order: &PowerOrder,
    ladder: Option<(Recovery, Rung)>,
    text: &str,
    now: crate::model::time::Timestamp,
) -> HandlerOutcome {
    let watch = ladder
        .map(|(begun, rung)| FactChange::Recovery(start_report_wait(begun, rung, recovery_note(order), now)));
    let how = format!("the order to {} was given: {text}", order.kind.phrase());
    finish_order(watch.into_iter().collect(), PowerChange::Ended, how)
}

/// Ends an order that may have been carried out, without any other change.
fn order_over(how: impl std::fmt::Display) -> HandlerOutcome {
    finish_order(Vec::new(), PowerChange::Ended, format!("the order {how}"))
}

/// Ends an order that was not carried out, without any other change.
fn give_order_up(how: impl std::fmt::Display) -> HandlerOutcome {
    let how = format!("the order {how}");
    finish_order(Vec::new(), PowerChange::GivenUp(how.clone()), how)
}

fn finish_order(mut changes: Vec<FactChange>, end: PowerChange, how: String) -> HandlerOutcome {
    changes.push(FactChange::Power(end));
    HandlerOutcome::finished(changes, how)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn route_follows_the_provider_capabilities() {
        let refused = || RebootMethod::Unsupported { reason: "it is this host".to_owned() };
        let ssh = || RebootMethod::Ssh(vec!["reboot".to_owned()]);
        let none = || PowerSupport::Unavailable { reason: "no power command".to_owned() };
        for (switch, reboot, power, expected) in [
            (PowerOrderKind::Reboot, RebootMethod::Provider, none(), PowerRoute::Provider),
            (PowerOrderKind::Reboot, ssh(), none(), PowerRoute::Ssh),
            (
                PowerOrderKind::Reboot,
                refused(),
                PowerSupport::Available,
                PowerRoute::Unavailable("it is this host"),
            ),
            (PowerOrderKind::Cycle, refused(), PowerSupport::Available, PowerRoute::Provider),
            (PowerOrderKind::Off, ssh(), none(), PowerRoute::Unavailable("no power command")),
            (PowerOrderKind::On, RebootMethod::Provider, PowerSupport::Available, PowerRoute::Provider),
        ] {
            assert_eq!(power_route(&MachineCapabilities { reboot, power }, switch), expected, "{switch}");
        }
    }
}
