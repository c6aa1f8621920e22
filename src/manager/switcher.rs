//! The switcher: reboots machines and switches their power, as people order.
//!
//! What becomes of an order is decided by `model/power_order.rs`; this does it. The order is asked for once more and
//! recorded in one transaction right before it is given ([`Work::begin_switch`]), with the ladder that watches
//! whether the machine comes back. Whoever comes after a crash, or after an answer that was lost, tells the provider
//! again under the same intent; what may have been run over SSH is not run again.

use std::sync::Arc;

use async_trait::async_trait;

use crate::bmdb::change::FactChange;
use crate::bmdb::facts::Snapshot;
use crate::bmdb::power_order::{Leave, PowerChange};
use crate::bmdb::work::Work;
use crate::manager::access::Access;
use crate::manager::breakers::{Admission, Call};
use crate::manager::control_loop::{ControlLoop, Handled, HandlerError, no_longer_due};
use crate::manager::failpoint;
use crate::manager::provider_set::ProviderSet;
use crate::model::facts::{PowerOrder, Provided, Recovery};
use crate::model::ids::IntentId;
use crate::model::policy::Rung;
use crate::model::power_order::{Next, Switch, Way, lapsed, next, note};
use crate::model::process::Process;
use crate::model::recovery::taken;
use crate::providers::provider::{
    CALL_LIMIT, ErrorClass, PowerAction, PowerSupport, Provider, RebootMethod, Rungs,
};

/// See the module.
pub struct Switcher {
    /// The providers whose machines it switches.
    pub providers: ProviderSet,
    /// How machines are reached.
    pub access: Arc<Access>,
}

#[async_trait]
impl ControlLoop for Switcher {
    fn name(&self) -> &'static str {
        "switcher"
    }

    fn process(&self) -> Process {
        Process::Power
    }

    fn providers(&self) -> Vec<String> {
        self.providers.names()
    }

    async fn handle(&self, work: &Work) -> Result<Handled, HandlerError> {
        let snapshot = work.snapshot().await?;
        if let Some(over) = no_longer_due(work, &snapshot) {
            return Ok(over);
        }
        let (Some(order), Some(provided)) = (&snapshot.facts.power_order, &snapshot.facts.provided) else {
            return Ok(over("cannot be carried out: no provider has handed the machine over"));
        };
        self.switch(work, &snapshot, order, provided).await
    }
}

/// What an order ended as, when it did not fail in a way that trying again may mend.
enum Outcome {
    /// It was given.
    Given(String),
    /// It will never be.
    Refused(String),
}

impl Switcher {
    async fn switch(
        &self,
        work: &Work,
        snapshot: &Snapshot,
        order: &PowerOrder,
        provided: &Provided,
    ) -> Result<Handled, HandlerError> {
        let (_, policy) = work.bmdb().policy();
        // Before anybody is asked: an order lapses even if its provider never answers again.
        if let Some(why) = lapsed(order, &policy, snapshot.now) {
            return Ok(over(format!("to {} {why}", order.switch.phrase())));
        }
        let name = &provided.provider;
        let (provider, admission) = match self.providers.admit(name) {
            Ok(Some(admitted)) => admitted,
            Ok(None) => return Err(HandlerError::new(format!("provider {name} is not configured here"))),
            Err(open) => return Ok(Handled::left_alone(open, snapshot.now)),
        };
        let asked = work
            .call_out(CALL_LIMIT, admission.look_up(Call::Rungs, provider.rungs(&provided.provider_id)))
            .await?;
        let rungs = asked.map_err(|error| HandlerError::new(error.sentence))?;
        match next(order, way(&rungs, order.switch), &policy, snapshot.now) {
            Next::GiveUp(why) => return Ok(over(format!("to {} {why}", order.switch.phrase()))),
            Next::Taken => {
                return Ok(over(format!(
                    "to {} may have been given before the work on it broke off, and is not given again",
                    order.switch.phrase()
                )));
            }
            Next::CarryOut => {}
        }
        let (intent, ladder) = match work.begin_switch(order.switch, name).await? {
            Leave::Granted { intent, ladder } => (intent, ladder),
            Leave::Refused(refusal) => {
                return Ok(Handled::PutOff {
                    changes: Vec::new(),
                    until: refusal.ask_again,
                    reason: refusal.reason,
                });
            }
        };
        tracing::info!(switch = %order.switch, by = order.by, %intent, "switching a machine by order");
        failpoint::pass(self.name(), "intended");
        let outcome =
            self.carry_out(work, snapshot, order.switch, &rungs, (&*provider, &admission), intent).await;
        failpoint::pass(self.name(), "switched");
        let told = match &outcome {
            Ok(Outcome::Given(told)) => format!("done: {told}"),
            Ok(Outcome::Refused(why)) => format!("failed: {why}"),
            Err(error) => format!("failed: {}", error.cause),
        };
        // The intent's record is for people and budgets; the facts are what decides.
        if let Err(error) = work.settle_intent(intent, &told).await {
            tracing::warn!(%intent, %error, "cannot write down how an intent ended");
        }
        failpoint::pass(self.name(), "settled");
        match outcome {
            Ok(Outcome::Given(told)) => {
                let now = work.snapshot().await?.now;
                Ok(given(order, ladder, &told, now))
            }
            // Nothing was done: a machine that reports is not to be watched for another boot.
            Ok(Outcome::Refused(why)) => Ok(ended(
                ladder.map(|_| FactChange::RecoveryCleared).into_iter().collect(),
                &format!("to {} failed: {why}", order.switch.phrase()),
            )),
            Err(error) => Err(error),
        }
    }

    async fn carry_out(
        &self,
        work: &Work,
        snapshot: &Snapshot,
        switch: Switch,
        rungs: &Rungs,
        (provider, admission): (&dyn Provider, &Admission),
        intent: IntentId,
    ) -> Result<Outcome, HandlerError> {
        let id = &snapshot.facts.provided.as_ref().map_or("", |provided| &provided.provider_id);
        let refused = |what: &str| Ok(Outcome::Refused(format!("provider {} {what}", provider.name())));
        let answer = match (action(switch), &rungs.reboot) {
            (Some(action), _) => {
                let Some(control) = provider.power() else { return refused("has no power over machines") };
                work.call_out(CALL_LIMIT, admission.ask(Call::Power, control.power(id, action, intent)))
                    .await?
            }
            (None, RebootMethod::Ssh(argv)) => {
                return match self.access.run(work, snapshot, argv).await {
                    Ok(told) => Ok(Outcome::Given(told)),
                    // Over SSH an order is given once; that it failed is for whoever ordered it to hear.
                    Err(error) => Ok(Outcome::Refused(error.sentence)),
                };
            }
            (None, _) => {
                let Some(control) = provider.reboot() else { return refused("cannot reboot machines") };
                work.call_out(CALL_LIMIT, admission.ask(Call::Reboot, control.reboot(id, intent))).await?
            }
        };
        match answer {
            Ok(()) => Ok(Outcome::Given("the provider took the order".to_owned())),
            Err(error) if error.class == ErrorClass::Transient => Err(HandlerError::new(error.sentence)),
            Err(error) => Ok(Outcome::Refused(error.sentence)),
        }
    }
}

/// How a machine can be switched so.
fn way(rungs: &Rungs, switch: Switch) -> Way<'_> {
    if switch == Switch::Reboot {
        return match &rungs.reboot {
            RebootMethod::Provider => Way::Provider,
            RebootMethod::Ssh(_) => Way::Ssh,
            RebootMethod::Refused { reason } => Way::None(reason),
        };
    }
    match &rungs.power {
        PowerSupport::Available => Way::Provider,
        PowerSupport::Unavailable { reason } => Way::None(reason),
    }
}

/// What a provider is told; `None` for a reboot.
const fn action(switch: Switch) -> Option<PowerAction> {
    match switch {
        Switch::Reboot => None,
        Switch::On => Some(PowerAction::On),
        Switch::Off => Some(PowerAction::Off),
        Switch::Cycle => Some(PowerAction::Cycle),
    }
}

fn given(
    order: &PowerOrder,
    ladder: Option<(Recovery, Rung)>,
    told: &str,
    now: crate::model::time::Timestamp,
) -> Handled {
    let watch = ladder.map(|(begun, rung)| FactChange::Recovery(taken(begun, rung, note(order), now)));
    ended(watch.into_iter().collect(), &format!("to {} was given: {told}", order.switch.phrase()))
}

/// An order is over, and nothing else changes.
fn over(how: impl std::fmt::Display) -> Handled {
    ended(Vec::new(), &how)
}

fn ended(mut changes: Vec<FactChange>, how: &dyn std::fmt::Display) -> Handled {
    changes.push(FactChange::Power(PowerChange::Ended));
    Handled::finished(changes, format!("the order {how}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn way_is_what_the_provider_says_of_that_machine() {
        let refused = || RebootMethod::Refused { reason: "it is this host".to_owned() };
        let ssh = || RebootMethod::Ssh(vec!["reboot".to_owned()]);
        let none = || PowerSupport::Unavailable { reason: "no power command".to_owned() };
        for (switch, reboot, power, expected) in [
            (Switch::Reboot, RebootMethod::Provider, none(), Way::Provider),
            (Switch::Reboot, ssh(), none(), Way::Ssh),
            (Switch::Reboot, refused(), PowerSupport::Available, Way::None("it is this host")),
            (Switch::Cycle, refused(), PowerSupport::Available, Way::Provider),
            (Switch::Off, ssh(), none(), Way::None("no power command")),
            (Switch::On, RebootMethod::Provider, PowerSupport::Available, Way::Provider),
        ] {
            assert_eq!(way(&Rungs { reboot, power }, switch), expected, "{switch}");
        }
    }
}
