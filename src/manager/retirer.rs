//! The retirer: gives machines back, one step at a time.
//!
//! What comes next is decided by `model/retirement.rs`; this does it. A machine
//! is given back by an order that is asked for and recorded in one transaction,
//! under the machine's lock ([`Work::begin_release`]), right before it is given.
//! The order's intent stays in the facts: whoever comes after a crash, or after
//! an answer that was lost, gives the same order again under the same intent,
//! which a provider carries out once.
//!
//! The provider is looked at before, so that one that answers nobody is ordered
//! nothing, and the machine may still be told to stay. One that its provider
//! does not know any more has left by itself. That ends it for good, too, so it
//! passes the same questions and uses up the same budget; and it is believed
//! only while the provider's list is: one that is empty for a moment would else
//! leave nothing but tombstones.
//!
//! The tombstone is no step of its own: that nothing more is to be done is
//! written in the commit that ends the work.

use async_trait::async_trait;

use crate::bmdb::change::FactChange;
use crate::bmdb::facts::Snapshot;
use crate::bmdb::retirement::{Leave, RetirementChange};
use crate::bmdb::work::Work;
use crate::manager::breakers::Call;
use crate::manager::control_loop::{ControlLoop, Handled, HandlerError, no_longer_due};
use crate::manager::failpoint;
use crate::manager::provider_set::ProviderSet;
use crate::model::disturb::{Refusal, may_believe_gone};
use crate::model::ids::IntentId;
use crate::model::process::Process;
use crate::model::time::Timestamp;
use crate::providers::provider::{CALL_LIMIT, ErrorClass};

/// See the module.
pub struct Retirer {
    /// The providers whose machines it gives back.
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

    async fn handle(&self, work: &Work) -> Result<Handled, HandlerError> {
        let snapshot = work.snapshot().await?;
        if let Some(over) = no_longer_due(work, &snapshot) {
            return Ok(over);
        }
        self.give_back(work, &snapshot).await
    }
}

impl Retirer {
    async fn give_back(&self, work: &Work, snapshot: &Snapshot) -> Result<Handled, HandlerError> {
        let Some(provided) = &snapshot.facts.provided else {
            return Err(HandlerError::new(
                "no provider has handed the machine over, so none can take it back",
            ));
        };
        let (name, id) = (&provided.provider, &provided.provider_id);
        let (provider, admission) = match self.providers.admit(name) {
            Ok(Some(admitted)) => admitted,
            Ok(None) => return Err(HandlerError::new(format!("provider {name} is not configured here"))),
            Err(open) => return Ok(Handled::left_alone(open, snapshot.now)),
        };
        let looked = work.call_out(CALL_LIMIT, admission.ask(Call::LookAt, provider.look_at(id))).await?;
        let known = looked.map_err(|error| HandlerError::new(error.sentence))?.is_some();
        if known && provider.release().is_none() {
            return Err(HandlerError::new(format!(
                "provider {name} offers no way to give a machine back; give it back there by hand, and waive the \
                 stage release"
            )));
        }
        if !known && let Err(refusal) = believed_gone(work, name, snapshot.now).await? {
            return Ok(put_off(refusal));
        }
        let intent = match work.begin_release(name).await? {
            Leave::Granted(intent) => intent,
            Leave::Refused(refusal) => return Ok(put_off(refusal)),
        };
        let Some(control) = provider.release() else {
            settle(work, intent, "nothing was to be done: the provider does not know it any more").await;
            return Ok(gone(name));
        };
        tracing::info!(provider = name, provider_id = id, %intent, "giving a machine back");
        failpoint::pass(self.name(), "intended");
        let outcome =
            work.call_out(CALL_LIMIT, admission.ask(Call::Release, control.release(id, intent))).await?;
        failpoint::pass(self.name(), "released");
        let told = match &outcome {
            Ok(()) => "done: the provider took it back".to_owned(),
            Err(error) if error.class == ErrorClass::NotFound => {
                format!("nothing was to be done: {}", error.sentence)
            }
            Err(error) => format!("failed: {}", error.sentence),
        };
        settle(work, intent, &told).await;
        failpoint::pass(self.name(), "settled");
        match outcome {
            Ok(()) => Ok(over(format!("provider {name} took it back"))),
            Err(error) if error.class == ErrorClass::NotFound => {
                Ok(believed_gone(work, name, snapshot.now).await?.map_or_else(put_off, |()| gone(name)))
            }
            Err(error) => Err(HandlerError::new(error.sentence)),
        }
    }
}

/// Whether it is to be believed that the provider does not know the machine.
async fn believed_gone(
    work: &Work,
    provider: &str,
    now: Timestamp,
) -> Result<Result<(), Refusal>, HandlerError> {
    let brake = work.bmdb().provisioner_brake(provider).await?;
    Ok(may_believe_gone(brake.as_deref(), now))
}

/// The intent's record is for people and budgets; the facts are what decides.
async fn settle(work: &Work, intent: IntentId, told: &str) {
    if let Err(error) = work.settle_intent(intent, told).await {
        tracing::warn!(%intent, %error, "cannot write down how an intent ended");
    }
}

fn put_off(refusal: Refusal) -> Handled {
    Handled::PutOff { changes: Vec::new(), until: refusal.ask_again, reason: refusal.reason }
}

fn gone(provider: &str) -> Handled {
    over(format!("provider {provider} does not know it any more"))
}

fn over(outcome: String) -> Handled {
    let finished = FactChange::Retirement(RetirementChange::Finished(outcome.clone()));
    Handled::finished(vec![finished], outcome)
}
