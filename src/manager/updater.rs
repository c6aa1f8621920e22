//! Updater: refreshes what providers report of machines.
//!
//! An obstacle that was met at an address proves nothing about a machine that has another address since (a DHCP lease
//! that went to another host). The escalation that followed from it is cleared, and the machine is tried again.

use async_trait::async_trait;

use crate::bmdb::engine::fact_change::{FactChange, HostKeySource, ProviderDetails};
use crate::bmdb::engine::work::Work;
use crate::manager::control_loop::{ControlLoop, HandlerError, HandlerOutcome};
use crate::manager::provider_breakers::ProviderCall;
use crate::manager::provider_set::ProviderSet;
use crate::model::backoff::BackoffPolicy;
use crate::model::facts::{MachineFacts, ProviderRecord};
use crate::model::host_key::{HostKey, PinnedHostKey};
use crate::model::process::{Lane, Process};
use crate::model::provider_status::ProviderStatus;
use crate::model::routine::NOTHING_CHANGED;
use crate::providers::provider::{ErrorClass, MAX_CALL_TIME, ProviderMachine};

/// Handler of the process `Update`.
pub struct Updater {
    /// The providers that it queries.
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

    async fn handle(&self, work: &Work) -> Result<HandlerOutcome, HandlerError> {
        let snapshot = work.snapshot().await?;
        let facts = &snapshot.facts;
        let Some(known) = facts.provider_record.clone() else {
            return Ok(HandlerOutcome::finished(Vec::new(), "no provider has handed it over"));
        };
        let (provider, admission) = match self.providers.admit(&known.provider) {
            Ok(Some(admitted)) => admitted,
            Ok(None) => {
                return Err(HandlerError::new(format!("provider {} is not configured here", known.provider)));
            }
            Err(open) => return Ok(HandlerOutcome::provider_unavailable(open, snapshot.now)),
        };
        let call =
            admission.call_provider(ProviderCall::FindMachine, provider.find_machine(&known.provider_id));
        let found = work.run_outward_call(MAX_CALL_TIME, call).await?.map_err(|error| {
            let pause = work.bmdb().policy().1.update_failure_pause;
            let permanent = !matches!(error.class, ErrorClass::Transient);
            HandlerError {
                backoff: permanent.then_some(BackoffPolicy { initial: pause, maximum: pause, exponent: 1.0 }),
                ..HandlerError::new(error.to_string())
            }
        })?;
        let listed = found.as_ref().and_then(|machine| machine.host_keys.first().cloned());
        let (details, unchanged) = compare_details(&known, found);
        let moved = address_changes(facts, &known, &details);
        let mut listed_key = None;
        if listed.is_some() {
            let pinned = work.bmdb().host_key(work.machine()).await?;
            listed_key = pin_listed_key(listed, pinned.as_ref());
        }
        let detail = outcome_detail(unchanged, !moved.is_empty(), listed_key.is_some());
        let mut changes = vec![FactChange::ProviderPolled { details, unchanged }];
        changes.extend(moved);
        changes.extend(listed_key);
        Ok(HandlerOutcome::finished(changes, detail))
    }
}

/// What history records of an answer of the provider: whether it is the stored one, whether it cleared an obstacle, and
/// whether a host key is pinned because of it. Timelines fold what has the detail [`NOTHING_CHANGED`], so nothing that
/// changes a fact may have it.
fn outcome_detail(unchanged: bool, cleared_obstacle: bool, pins_key: bool) -> &'static str {
    match (cleared_obstacle, unchanged, pins_key) {
        (true, ..) => "how it is reached changed; the obstacle that was met before is cleared",
        (false, false, _) => "the provider reports a change",
        (false, true, true) => "the provider lists a host key, which is pinned from now on",
        (false, true, false) => NOTHING_CHANGED,
    }
}

/// Pins the host key that a provider lists, if it counts more than the pinned one. A device list may get the key of a
/// machine later than the machine. A key of a first contact may be that of anybody who answered at the address, and a
/// password may be sent to the host that has the pinned key. What an operator has allowed stays.
fn pin_listed_key(listed: Option<HostKey>, pinned: Option<&PinnedHostKey>) -> Option<FactChange> {
    let counts_more = |key: &HostKey| {
        pinned.is_none_or(|pinned| pinned.source == HostKeySource::FirstUse.as_str() && pinned.key != *key)
    };
    let HostKey { algorithm, key } = listed.filter(counts_more)?;
    Some(FactChange::HostKeyPinned { algorithm, public_key: key, source: HostKeySource::Provider })
}

/// The changes for a machine that is reached in another way from now on.
fn address_changes(facts: &MachineFacts, known: &ProviderRecord, now: &ProviderDetails) -> Vec<FactChange> {
    let same =
        (&known.address, known.ssh_port, &known.ssh_user) == (&now.address, now.ssh_port, &now.ssh_user);
    let stood = facts.needs_human.as_ref().is_some_and(|waiting| waiting.obstacle.depends_on_address());
    if same || now.address.is_none() || !stood {
        return Vec::new();
    }
    let mut changes = vec![FactChange::NeedsHumanCleared];
    changes.extend(facts.recovery.as_ref().map(|_| FactChange::RecoveryCleared));
    let access = facts.backoffs.keys().filter(|process| process.lane() == Lane::Access);
    changes.extend(access.map(|process| FactChange::BackoffCleared(*process)));
    changes
}

/// What to store of a provider's answer, and whether it equals what was stored before. A machine that the provider does
/// not know keeps its stored details and becomes missing.
fn compare_details(known: &ProviderRecord, found: Option<ProviderMachine>) -> (ProviderDetails, bool) {
    let before = ProviderDetails {
        reservation: known.reservation.clone(),
        address: known.address.clone(),
        ssh_port: known.ssh_port,
        ssh_user: known.ssh_user.clone(),
        location: known.location.clone(),
        status: known.status.clone(),
    };
    let now = match found {
        Some(machine) => provider_details(&machine),
        None => ProviderDetails { status: ProviderStatus::Missing, ..before.clone() },
    };
    let unchanged = now == before;
    (now, unchanged)
}

/// The details that are stored of a machine, as its provider reports it.
pub(crate) fn provider_details(machine: &ProviderMachine) -> ProviderDetails {
    let reservation = match &machine.usage {
        crate::model::provider_status::MachineUsage::KnownUnused { reservation } => Some(reservation.clone()),
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
    use crate::model::provider_status::MachineUsage;
    use crate::model::time::Timestamp;

    fn stored_record() -> ProviderRecord {
        ProviderRecord {
            provider: "rack-a".into(),
            provider_id: "1".into(),
            reservation: None,
            address: Some("192.0.2.1".into()),
            ssh_port: None,
            ssh_user: None,
            location: Some("r1".into()),
            status: ProviderStatus::Running,
            acquired_at: Timestamp::UNIX_EPOCH,
            polled_at: None,
            unchanged: false,
        }
    }

    fn provider_machine(address: &str) -> ProviderMachine {
        ProviderMachine {
            id: "1".into(),
            usage: MachineUsage::PossiblyUsed,
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
        assert!(compare_details(&stored_record(), Some(provider_machine("192.0.2.1"))).1);
        let (details, unchanged) = compare_details(&stored_record(), Some(provider_machine("192.0.2.2")));
        assert!(!unchanged);
        assert_eq!(details.address.as_deref(), Some("192.0.2.2"));
    }

    #[test]
    fn obstacle_of_another_address_is_cleared() {
        let forgotten = |obstacle: Option<Obstacle>, address: &str| {
            let mut facts = MachineFacts::empty(MachineId::generate(), Timestamp::UNIX_EPOCH);
            facts.needs_human = obstacle.map(|obstacle| NeedsHuman {
                since: Timestamp::UNIX_EPOCH,
                reason: "x".into(),
                obstacle,
                reporting_since: None,
            });
            let (details, _) = compare_details(&stored_record(), Some(provider_machine(address)));
            address_changes(&facts, &stored_record(), &details)
        };
        let cleared = [FactChange::NeedsHumanCleared];
        assert_eq!(forgotten(Some(Obstacle::HostKeyChanged), "192.0.2.2"), cleared);
        assert_eq!(forgotten(Some(Obstacle::OtherMachine), "192.0.2.2"), cleared);
        assert_eq!(forgotten(Some(Obstacle::HostKeyChanged), "192.0.2.1"), [], "it is where it was");
        assert_eq!(forgotten(Some(Obstacle::LadderExhausted), "192.0.2.2"), [], "it was cut off from power");
        assert_eq!(forgotten(None, "192.0.2.2"), []);
    }

    #[test]
    fn listed_host_key_counts_more_than_that_of_a_first_contact() {
        let key = |byte: u8| HostKey { algorithm: "ssh-ed25519".to_owned(), key: vec![byte] };
        let pinned = |byte: u8, source: HostKeySource| PinnedHostKey {
            key: key(byte),
            source: source.as_str().to_owned(),
            pinned_at: Timestamp::UNIX_EPOCH,
            rejected: None,
        };
        let listed = FactChange::HostKeyPinned {
            algorithm: "ssh-ed25519".to_owned(),
            public_key: vec![1],
            source: HostKeySource::Provider,
        };
        for (known, is_pinned) in [
            (None, true),
            (Some(pinned(2, HostKeySource::FirstUse)), true),
            (Some(pinned(1, HostKeySource::FirstUse)), false),
            (Some(pinned(2, HostKeySource::Provider)), false),
            (Some(pinned(2, HostKeySource::Allowed)), false),
        ] {
            let change = pin_listed_key(Some(key(1)), known.as_ref());
            assert_eq!(change, is_pinned.then(|| listed.clone()), "{known:?}");
            assert_eq!(pin_listed_key(None, known.as_ref()), None);
        }
    }

    #[test]
    fn only_an_answer_that_changes_nothing_is_routine() {
        for (unchanged, cleared_obstacle, pins_key, routine) in [
            (true, false, false, true),
            (true, false, true, false),
            (false, false, false, false),
            (false, false, true, false),
            (false, true, false, false),
            (false, true, true, false),
            (true, true, false, false),
        ] {
            let detail = outcome_detail(unchanged, cleared_obstacle, pins_key);
            assert_eq!(detail == NOTHING_CHANGED, routine, "{detail}");
        }
    }

    #[test]
    fn machine_that_the_provider_lost_keeps_its_address() {
        let (details, unchanged) = compare_details(&stored_record(), None);
        assert!(!unchanged);
        assert_eq!(
            (details.status, details.address.as_deref()),
            (ProviderStatus::Missing, Some("192.0.2.1"))
        );
    }
}
