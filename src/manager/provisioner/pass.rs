//! Provisioning pass: reads a provider's list and the BMDB, plans, and executes the plan.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::connection::error::BmdbError;
use crate::bmdb::engine::change_machine::Decision;
use crate::bmdb::engine::fact_change::retirement::RetirementChange;
use crate::bmdb::engine::fact_change::{FactChange, HostKeySource};
use crate::bmdb::engine::intent::OpenCreation;
use crate::bmdb::engine::named_lease::NamedLease;
use crate::bmdb::engine::session::{Session, boot_time};
use crate::bmdb::fleet::provider::NewMachine;
use crate::bmdb::orders::loop_pause::PauseCache;
use crate::manager::failpoint;
use crate::manager::provider_breakers::{Admission, ProviderBreaker, ProviderCall};
use crate::manager::provisioner::plan::{ProvisionPlan, is_any_missing, mark_retiring, plan_provisioning};
use crate::manager::provisioner::{LEASE, ProvisionerSettings};
use crate::manager::updater::provider_details;
use crate::model::adoption::{LIMIT_REMEDY, NotAdopted};
use crate::model::circuit_breaker::BreakerOpen;
use crate::model::facts::MachineFacts;
use crate::model::ids::{IntentId, MachineId};
use crate::model::pause::LoopKind;
use crate::providers::provider::{MAX_CALL_TIME, Provider, ProviderError, ProviderMachine};

/// Why a pass ended early.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProvisionerPassError {
    #[error(transparent)]
    Bmdb(#[from] BmdbError),
    #[error("cannot list the machines of provider {provider}: {error}")]
    List { provider: String, error: ProviderError },
    #[error("provider {provider} is not listed: {reason}")]
    ProviderUnavailable { provider: String, reason: String },
}

/// Makes one pass. Returns whether the next pass would find more to create at once.
pub(super) async fn run_pass(
    bmdb: &Bmdb,
    session: &Session,
    lease: &NamedLease,
    provider: &dyn Provider,
    settings: &ProvisionerSettings,
    pauses: &mut PauseCache,
) -> Result<bool, ProvisionerPassError> {
    let (name, kind) = (lease.name.as_str(), provider.kind());
    if is_paused(bmdb, pauses, name).await? {
        return Ok(false);
    }
    // The BMDB is read first. A machine that is recorded between the two reads is then listed and unknown at worst, and
    // recording it again finds it.
    let mut known = bmdb.list_recorded_machines(name).await?;
    let left_alone = |open: BreakerOpen| ProvisionerPassError::ProviderUnavailable {
        provider: name.to_owned(),
        reason: open.reason,
    };
    let listed = settings
        .breaker
        .admit_call()
        .map_err(left_alone)?
        .call_provider(ProviderCall::List, provider.list())
        .await;
    // If this shepherd was frozen meanwhile, the list is old, and another shepherd provisions now.
    if session.remaining().is_zero() {
        return Err(BmdbError::SessionEnded.into());
    }
    let listed = match listed {
        Ok(listed) => listed,
        Err(error) => {
            bmdb.record_provider_list_failure(lease, kind, &error.message).await?;
            let reason = format!("brake: its list cannot be read: {}", error.message);
            record_brake(bmdb, lease, Some(&reason)).await?;
            return Err(ProvisionerPassError::List { provider: name.to_owned(), error });
        }
    };
    bmdb.record_provider_list(lease, kind, listed.len()).await?;
    failpoint::hit(LEASE, "listed");
    if is_any_missing(&listed, &known) {
        mark_retiring(&mut known, &bmdb.list_recorded_machines(name).await?);
    }
    let creations = bmdb.open_creations(name).await?;
    let open: BTreeSet<IntentId> = creations.iter().map(|creation| creation.intent).collect();
    let (_, policy) = bmdb.policy();
    let plan = plan_provisioning(&listed, &known, &open, &policy.provisioner_brake, settings.limits);
    record_brake(bmdb, lease, plan.brake.as_deref()).await?;
    // A number by a list that cannot be right would be wrong too.
    if plan.brake.is_none() {
        record_not_adopted(bmdb, lease, plan.not_adopted).await?;
    }
    resolve_open_creations(
        bmdb,
        lease,
        provider,
        &settings.breaker,
        &creations,
        &plan,
        policy.outward_limit.0,
    )
    .await?;
    for (machine, reason) in &plan.quarantine {
        quarantine_machine(bmdb, lease, *machine, reason).await?;
    }
    for machine in plan.reappeared.iter().copied() {
        clear_quarantine(bmdb, lease, machine).await?;
    }
    for (machine, listed) in plan.retired_listing_changes.iter().copied() {
        record_listed(bmdb, lease, machine, listed).await?;
    }
    for stranger in &plan.strangers {
        let reason = "the provider says it is in use, and it was not created from here";
        let mut new = new_machine(stranger, "found in use at the provider");
        new.changes.push(FactChange::Quarantined(reason.to_owned()));
        bmdb.record_machine(lease, None, &new).await?;
    }
    let full_chunk = plan.create.len() >= settings.limits.chunk;
    let mut made = 0;
    for id in &plan.create {
        if let Some(creation) = &settings.creation {
            creation.ready().await;
        }
        if is_paused(bmdb, pauses, name).await? {
            return Ok(false);
        }
        // Checked before an intent is recorded for an order that would not be sent.
        let admission = settings.breaker.admit_call().map_err(left_alone)?;
        made += usize::from(create_machine(bmdb, session, lease, provider, &admission, id).await?);
    }
    // If the provider made nothing, the next pass comes at the reconciler's pace.
    Ok(full_chunk && made > 0)
}

async fn is_paused(bmdb: &Bmdb, pauses: &mut PauseCache, provider: &str) -> Result<bool, BmdbError> {
    Ok(pauses.unpaused_providers(bmdb, LoopKind::Provisioner, &[provider.to_owned()]).await?.is_empty())
}

async fn record_brake(bmdb: &Bmdb, lease: &NamedLease, brake: Option<&str>) -> Result<(), BmdbError> {
    let provider = &lease.name;
    if bmdb.set_provisioner_brake(lease, brake).await? {
        if let Some(reason) = brake {
            tracing::warn!(provider, reason, "creation is stopped");
        } else {
            tracing::info!(provider, "creation continues");
        }
    }
    Ok(())
}

/// Records how many listed machines the limit leaves out, and logs it when that changes.
async fn record_not_adopted(
    bmdb: &Bmdb,
    lease: &NamedLease,
    not_adopted: Option<NotAdopted>,
) -> Result<(), BmdbError> {
    let provider = &lease.name;
    if bmdb.record_not_adopted(lease, not_adopted).await? {
        if let Some(NotAdopted { machines, limit }) = not_adopted {
            tracing::warn!(provider, machines, limit, "machines of its list are not adopted; {LIMIT_REMEDY}");
        } else {
            tracing::info!(provider, "the limit leaves out no machine of its list any more");
        }
    }
    Ok(())
}

/// Resolves creations whose outcome was never recorded.
///
/// What the provider has not made *yet* it may still make: the order of a shepherd that died can be on its way for as
/// long as an outward call lasts (`limit`). If the intent were resolved before that, the machine would appear under an
/// intent that nobody waits for, and be quarantined as a stranger.
async fn resolve_open_creations(
    bmdb: &Bmdb,
    lease: &NamedLease,
    provider: &dyn Provider,
    breaker: &ProviderBreaker,
    open: &[OpenCreation],
    plan: &ProvisionPlan,
    limit: Duration,
) -> Result<(), BmdbError> {
    for (intent, machine) in &plan.adopt {
        adopt_machine(bmdb, lease, *intent, machine).await?;
    }
    let adopted: BTreeSet<IntentId> = plan.adopt.iter().map(|(intent, _)| *intent).collect();
    let Some(creation) = provider.creation() else { return Ok(()) };
    for OpenCreation { intent, age, .. } in open.iter().filter(|one| !adopted.contains(&one.intent)) {
        // Unknown does not mean "nothing": a later pass queries again.
        let Ok(admission) = breaker.admit_call() else { return Ok(()) };
        match admission.call_provider(ProviderCall::FindByIntent, creation.find_by_intent(*intent)).await {
            Ok(Some(machine)) => adopt_machine(bmdb, lease, *intent, &machine).await?,
            Ok(None) if *age < limit => {}
            Ok(None) => {
                bmdb.resolve_creation(lease, *intent, "nothing was made").await?;
            }
            Err(error) => {
                tracing::warn!(provider = lease.name, %intent, %error, "cannot find out what a creation did");
            }
        }
    }
    Ok(())
}

async fn adopt_machine(
    bmdb: &Bmdb,
    lease: &NamedLease,
    intent: IntentId,
    machine: &ProviderMachine,
) -> Result<(), BmdbError> {
    let id = bmdb.record_machine(lease, Some(intent), &new_machine(machine, "adopted by its intent")).await?;
    tracing::info!(provider = lease.name, provider_id = machine.id, machine = %id, %intent, "adopted");
    Ok(())
}

/// Creates one machine and returns whether it did. A provider's error is logged and skips the machine. The intent stays
/// open, because the machine may have been created all the same.
async fn create_machine(
    bmdb: &Bmdb,
    session: &Session,
    lease: &NamedLease,
    provider: &dyn Provider,
    admission: &Admission,
    id: &str,
) -> Result<bool, BmdbError> {
    let Some(creation) = provider.creation() else { return Ok(false) };
    let begun = boot_time();
    let intent = bmdb.begin_creation(lease, id).await?;
    failpoint::hit(LEASE, "intended");
    let (_, policy) = bmdb.policy();
    let limit =
        creation_time_limit(session.remaining(), boot_time().saturating_sub(begun), policy.outward_limit.0)?;
    let Ok(result) = tokio::time::timeout(
        limit,
        admission.call_provider(ProviderCall::Create, creation.create(intent, Some(id))),
    )
    .await
    else {
        tracing::warn!(
            provider = lease.name,
            provider_id = id,
            "creating a machine was not answered within {limit:?}; the next pass finds out what became of it"
        );
        return Ok(false);
    };
    match result {
        Ok(machine) => {
            failpoint::hit(LEASE, "created");
            let new = new_machine(&machine, "created");
            let recorded = bmdb.record_machine(lease, Some(intent), &new).await?;
            tracing::info!(provider = lease.name, provider_id = machine.id, machine = %recorded, "created");
            failpoint::hit(LEASE, "recorded");
            Ok(true)
        }
        Err(error) => {
            tracing::warn!(provider = lease.name, provider_id = id, %error, "cannot create a machine; going on with the others");
            Ok(false)
        }
    }
}

/// How long the creation of a machine may take whose intent was recorded `age` ago, under a session that lasts for
/// another `remaining`. Fails if it must not start any more.
///
/// The next holder of the lease resolves an intent that is older than the policy's outward limit, if the provider knows
/// nothing of it, as one without result. A machine that is created after that is a stranger. So the order must not be
/// on its way for longer, and must not start late: a process that was frozen right here would send it an hour
/// afterwards.
fn creation_time_limit(
    remaining: Duration,
    age: Duration,
    outward_limit: Duration,
) -> Result<Duration, BmdbError> {
    if remaining.is_zero() {
        return Err(BmdbError::SessionEnded);
    }
    Ok(MAX_CALL_TIME.min(remaining.max(outward_limit.saturating_sub(age))))
}

fn new_machine(machine: &ProviderMachine, detail: &str) -> NewMachine {
    let changes = machine
        .host_keys
        .iter()
        .take(1)
        .map(|key| FactChange::HostKeyPinned {
            algorithm: key.algorithm.clone(),
            public_key: key.key.clone(),
            source: HostKeySource::Provider,
        })
        .collect();
    NewMachine {
        provider_id: machine.id.clone(),
        details: provider_details(machine),
        changes,
        detail: format!("{detail}: {}", machine.id),
    }
}

async fn quarantine_machine(
    bmdb: &Bmdb,
    lease: &NamedLease,
    machine: MachineId,
    reason: &str,
) -> Result<(), BmdbError> {
    let text = reason.to_owned();
    let done = bmdb
        .change_machine_under_lease(lease, machine, move |snapshot| {
            quarantine_decision(&snapshot.facts, &text)
        })
        .await?;
    if done {
        tracing::warn!(%machine, reason, "quarantined");
    }
    Ok(())
}

/// Decides whether to quarantine a machine that its provider lost; the output states whether it was. A machine with
/// a retirement that was ordered since the comparison is left to the retirer, which a quarantine would stop.
fn quarantine_decision(facts: &MachineFacts, reason: &str) -> Decision<bool> {
    if facts.retirement.is_some() {
        return Decision::default();
    }
    // The change of phase is recorded with this reason.
    Decision { changes: vec![FactChange::Quarantined(reason.to_owned())], events: Vec::new(), output: true }
}

async fn clear_quarantine(bmdb: &Bmdb, lease: &NamedLease, machine: MachineId) -> Result<(), BmdbError> {
    tracing::info!(%machine, "its discrepancy has ended");
    bmdb.change_machine_under_lease(lease, machine, |_| Decision {
        changes: vec![FactChange::QuarantineCleared],
        events: vec![("QuarantineCleared".to_owned(), "the provider lists it again".to_owned())],
        output: (),
    })
    .await
}

/// Records whether the provider lists a machine that is retired.
async fn record_listed(
    bmdb: &Bmdb,
    lease: &NamedLease,
    machine: MachineId,
    listed: bool,
) -> Result<(), BmdbError> {
    tracing::info!(%machine, listed, "whether the provider lists a retired machine has changed");
    bmdb.change_machine_under_lease(lease, machine, move |_| Decision {
        changes: vec![FactChange::Retirement(RetirementChange::ListedByProvider(listed))],
        events: Vec::new(),
        output: (),
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::facts::Retirement;
    use crate::model::time::Timestamp;

    #[test]
    fn machine_retired_meanwhile_is_not_quarantined() {
        let at = Timestamp::from_timestamp(1_800_000_000, 0).unwrap();
        let mut facts = MachineFacts::empty(MachineId::generate(), at);
        let decided = quarantine_decision(&facts, "it is not listed");
        assert_eq!(decided.changes, [FactChange::Quarantined("it is not listed".into())]);
        assert!(decided.output);
        facts.retirement = Some(Retirement::new("old".into(), "kim".into(), at));
        let decided = quarantine_decision(&facts, "it is not listed");
        assert!(decided.changes.is_empty() && !decided.output);
    }

    #[test]
    fn creation_call_ends_before_another_pass_may_resolve_its_intent() {
        let seconds = Duration::from_secs;
        for (remaining, age, outward_limit, expected) in [
            // The policy's limit, less the time that has passed.
            (27, 0, 60, Some(60)),
            (27, 20, 60, Some(40)),
            // Nobody else can hold the lease before this session ends.
            (27, 50, 60, Some(27)),
            (27, 500, 60, Some(27)),
            // Never for longer than any call may take.
            (27, 0, 600, Some(60)),
            // Frozen after the intent, for longer than the session: another shepherd may have resolved it.
            (0, 0, 60, None),
            (0, 3600, 60, None),
        ] {
            let granted = creation_time_limit(seconds(remaining), seconds(age), seconds(outward_limit));
            assert_eq!(granted.ok(), expected.map(seconds), "{remaining} {age} {outward_limit}");
        }
    }
}
