//! The updater: asks providers what became of their machines.
//!
//! What stood in our way at an address says nothing of a machine that has
//! another one since (a DHCP lease that went to somebody else): what was decided
//! by it is forgotten, and the machine is tried again.

use async_trait::async_trait;

use crate::bmdb::change::{FactChange, ProviderDetails};
use crate::bmdb::work::Work;
use crate::manager::breakers::Call;
use crate::manager::control_loop::{ControlLoop, Handled, HandlerError};
use crate::manager::provider_set::ProviderSet;
use crate::model::backoff::Backoff;
use crate::model::facts::{MachineFacts, Provided};
use crate::model::process::{Lane, Process};
use crate::model::provider_status::ProviderStatus;
use crate::providers::provider::{CALL_LIMIT, ErrorClass, ProviderMachine};

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
        let facts = &snapshot.facts;
        let Some(known) = facts.provided.clone() else {
            return Ok(Handled::finished(Vec::new(), "no provider has handed it over"));
        };
        let (provider, admission) = match self.providers.admit(&known.provider) {
            Ok(Some(admitted)) => admitted,
            Ok(None) => {
                return Err(HandlerError::new(format!("provider {} is not configured here", known.provider)));
            }
            Err(open) => return Ok(Handled::left_alone(open, snapshot.now)),
        };
        let call = admission.ask(Call::LookAt, provider.look_at(&known.provider_id));
        let found = work.call_out(CALL_LIMIT, call).await?.map_err(|error| {
            let pause = work.bmdb().policy().1.update_failure_pause;
            let permanent = !matches!(error.class, ErrorClass::Transient);
            HandlerError {
                backoff: permanent.then_some(Backoff { initial: pause, maximum: pause, exponent: 1.0 }),
                ..HandlerError::new(error.to_string())
            }
        })?;
        let (details, unchanged) = compare(&known, found);
        let mut detail = if unchanged { "nothing changed" } else { "the provider says something new" };
        let moved = moved(facts, &known, &details);
        if !moved.is_empty() {
            detail = "it is reached another way now; what stood in the way before is forgotten";
        }
        let mut changes = vec![FactChange::ProviderLooked { details, unchanged }];
        changes.extend(moved);
        Ok(Handled::finished(changes, detail))
    }
}

/// What is forgotten of a machine that is reached another way from now on.
fn moved(facts: &MachineFacts, known: &Provided, now: &ProviderDetails) -> Vec<FactChange> {
    let same =
        (&known.address, known.ssh_port, &known.ssh_user) == (&now.address, now.ssh_port, &now.ssh_user);
    let stood = facts.needs_human.as_ref().is_some_and(|waiting| waiting.obstacle.is_of_the_address());
    if same || now.address.is_none() || !stood {
        return Vec::new();
    }
    let mut changes = vec![FactChange::NeedsHumanCleared];
    changes.extend(facts.recovery.as_ref().map(|_| FactChange::RecoveryCleared));
    let access = facts.backoffs.keys().filter(|process| process.lane() == Lane::Access);
    changes.extend(access.map(|process| FactChange::BackoffCleared(*process)));
    changes
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
    use crate::model::facts::NeedsHuman;
    use crate::model::ids::MachineId;
    use crate::model::needs_human::Obstacle;
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
    fn what_stood_in_the_way_at_another_address_is_forgotten() {
        let forgotten = |obstacle: Option<Obstacle>, address: &str| {
            let mut facts = MachineFacts::unknown(MachineId::generate(), Timestamp::UNIX_EPOCH);
            facts.needs_human = obstacle.map(|obstacle| NeedsHuman {
                since: Timestamp::UNIX_EPOCH,
                reason: "x".into(),
                obstacle,
                heard_since: None,
            });
            let (details, _) = compare(&known(), Some(found(address)));
            moved(&facts, &known(), &details)
        };
        let cleared = [FactChange::NeedsHumanCleared];
        assert_eq!(forgotten(Some(Obstacle::HostKeyChanged), "192.0.2.2"), cleared);
        assert_eq!(forgotten(Some(Obstacle::OtherMachine), "192.0.2.2"), cleared);
        assert_eq!(forgotten(Some(Obstacle::HostKeyChanged), "192.0.2.1"), [], "it is where it was");
        assert_eq!(forgotten(Some(Obstacle::LadderExhausted), "192.0.2.2"), [], "it was cut off from power");
        assert_eq!(forgotten(None, "192.0.2.2"), []);
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
