//! The updater: asks providers what became of their machines.

use async_trait::async_trait;

use crate::bmdb::change::{FactChange, ProviderDetails};
use crate::bmdb::work::Work;
use crate::manager::control_loop::{ControlLoop, Handled, HandlerError};
use crate::manager::provider_set::ProviderSet;
use crate::model::backoff::Backoff;
use crate::model::facts::Provided;
use crate::model::process::Process;
use crate::model::provider_status::ProviderStatus;
use crate::providers::provider::{ErrorClass, ProviderMachine};

/// See the module.
pub struct Updater {
    /// The providers it asks.
    pub providers: ProviderSet,
}

#[async_trait]
impl ControlLoop for Updater {
    fn name(&self) -> &'static str {
        "updater"
    }

    fn process(&self) -> Process {
        Process::Update
    }

    fn providers(&self) -> Vec<String> {
        self.providers.names()
    }

    async fn handle(&self, work: &Work) -> Result<Handled, HandlerError> {
        let snapshot = work.snapshot().await?;
        let Some(known) = snapshot.facts.provided else {
            return Ok(Handled::finished(Vec::new(), "no provider has handed it over"));
        };
        let Some(provider) = self.providers.get(&known.provider) else {
            return Err(HandlerError::new(format!("provider {} is not configured here", known.provider)));
        };
        work.may_call_out()?;
        let found = provider.look_at(&known.provider_id).await.map_err(|error| {
            let pause = work.bmdb().policy().1.update_failure_pause;
            let permanent = !matches!(error.class, ErrorClass::Transient);
            HandlerError {
                backoff: permanent.then_some(Backoff { initial: pause, maximum: pause, exponent: 1.0 }),
                ..HandlerError::new(error.to_string())
            }
        })?;
        let (details, unchanged) = compare(&known, found);
        let detail = if unchanged { "nothing changed" } else { "the provider says something new" };
        Ok(Handled::finished(vec![FactChange::ProviderLooked { details, unchanged }], detail))
    }
}

/// What to store of a provider's answer, and whether it is what was stored before. A machine that
/// the provider does not know keeps what was known of it, as missing.
fn compare(known: &Provided, found: Option<ProviderMachine>) -> (ProviderDetails, bool) {
    let before = ProviderDetails {
        reservation: known.reservation.clone(),
        address: known.address.clone(),
        ssh_port: known.ssh_port,
        ssh_user: known.ssh_user.clone(),
        location: known.location.clone(),
        status: known.status.clone(),
    };
    let now = match found {
        Some(machine) => details_of(&machine),
        None => ProviderDetails { status: ProviderStatus::Missing, ..before.clone() },
    };
    let unchanged = now == before;
    (now, unchanged)
}

/// What is stored of a machine as its provider tells it.
pub(crate) fn details_of(machine: &ProviderMachine) -> ProviderDetails {
    let reservation = match &machine.usage {
        crate::model::provider_status::Usage::KnownUnused { reservation } => Some(reservation.clone()),
        _ => None,
    };
    ProviderDetails {
        reservation,
        address: machine.address.clone(),
        ssh_port: machine.ssh_port,
        ssh_user: machine.ssh_user.clone(),
        location: machine.location.clone(),
        status: machine.status.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::provider_status::Usage;
    use crate::model::time::Timestamp;

    fn known() -> Provided {
        Provided {
            provider: "rack-a".into(),
            provider_id: "1".into(),
            reservation: None,
            address: Some("192.0.2.1".into()),
            ssh_port: None,
            ssh_user: None,
            location: Some("r1".into()),
            status: ProviderStatus::Running,
            at: Timestamp::UNIX_EPOCH,
            looked_at: None,
            unchanged: false,
        }
    }

    fn found(address: &str) -> ProviderMachine {
        ProviderMachine {
            id: "1".into(),
            usage: Usage::PossiblyUsed,
            address: Some(address.into()),
            ssh_port: None,
            ssh_user: None,
            location: Some("r1".into()),
            status: ProviderStatus::Running,
            host_keys: Vec::new(),
            intent: None,
        }
    }

    #[test]
    fn same_answer_changes_nothing_and_another_one_does() {
        assert!(compare(&known(), Some(found("192.0.2.1"))).1);
        let (details, unchanged) = compare(&known(), Some(found("192.0.2.2")));
        assert!(!unchanged);
        assert_eq!(details.address.as_deref(), Some("192.0.2.2"));
    }

    #[test]
    fn machine_that_the_provider_lost_keeps_its_address() {
        let (details, unchanged) = compare(&known(), None);
        assert!(!unchanged);
        assert_eq!(
            (details.status, details.address.as_deref()),
            (ProviderStatus::Missing, Some("192.0.2.1"))
        );
    }
}
