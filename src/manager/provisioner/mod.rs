//! The provisioner: brings providers' machines into the BMDB.
//!
//! For each provider one pass a minute, under a named lease, so that of any
//! number of shepherds one at a time does it. A pass reads the provider's whole
//! list and what the BMDB knows, decides ([`plan`]), and does it:
//!
//! * Before the provider is asked for a machine, the intent is recorded, and
//!   its id is given to the provider. A crash between the two leaves an open
//!   intent; the next pass asks the provider what was made under it and adopts
//!   that, so that creation is exactly-once. A shepherd that was frozen between
//!   the two asks for nothing any more when it wakes: by then somebody else has
//!   looked after its intent.
//! * A list that cannot be read, or cannot be right, engages a brake: nothing is
//!   created until a list looks right again.
//! * A paused provisioner makes no pass, and one that is paused in the middle of a
//!   pass creates nothing more.

pub mod plan;

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use tokio_util::sync::CancellationToken;

use crate::bmdb::change::{FactChange, HostKeySource};
use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::intent::OpenCreation;
use crate::bmdb::lease::NamedLease;
use crate::bmdb::pause::Pauses;
use crate::bmdb::provision::NewMachine;
use crate::bmdb::retirement::RetirementChange;
use crate::bmdb::session::{Session, Sessions, boot_time};
use crate::bmdb::work::Decision;
use crate::manager::breakers::{Admission, Call, ProviderBreaker};
use crate::manager::control_loop::panic_text;
use crate::manager::failpoint;
use crate::manager::limiter::Limiter;
use crate::manager::metrics::ManagerMetrics;
use crate::manager::provisioner::plan::{Limits, ProvisionPlan, lacks_any, note_leaving, plan_provisioning};
use crate::manager::updater::details_of;
use crate::model::breaker::Open;
use crate::model::facts::MachineFacts;
use crate::model::ids::{IntentId, MachineId};
use crate::model::pause::Loop;
use crate::providers::provider::{CALL_LIMIT, Provider, ProviderError, ProviderMachine};

/// Who starts its sessions.
const COMPONENT: &str = "provisioner";
/// Kind of the named lease; its name is the provider's.
const LEASE: &str = "provisioner";

/// How machines are provisioned.
#[derive(Clone)]
pub struct ProvisionerSettings {
    /// Bounds of one pass.
    pub limits: Limits,
    /// How often a provider is compared.
    pub reconciler: Limiter,
    /// How often a provider is asked for a machine.
    pub creation: Limiter,
    /// Whether the provider is asked at all.
    pub breaker: ProviderBreaker,
    /// Where it counts.
    pub metrics: ManagerMetrics,
}

/// Why a pass ended early.
#[derive(Debug, thiserror::Error)]
enum PassError {
    #[error(transparent)]
    Bmdb(#[from] BmdbError),
    #[error("cannot list the machines of provider {provider}: {error}")]
    List { provider: String, error: ProviderError },
    #[error("provider {provider} is not listed: {reason}")]
    LeftAlone { provider: String, reason: String },
}

/// Provisions from one provider until `stop`. The lease is given back before it returns.
pub async fn run(
    sessions: Sessions,
    provider: Arc<dyn Provider>,
    settings: ProvisionerSettings,
    stop: CancellationToken,
) {
    let name = provider.name().as_str().to_owned();
    while !stop.is_cancelled() {
        let details = serde_json::json!({ "provider": name });
        // Never given up half-way: the statement goes on without us, and a session that commits after
        // we have stopped stays open until the reaper finds it.
        let session = sessions.start(COMPONENT, details).await;
        match session {
            Ok(session) => {
                settings.metrics.session_started(COMPONENT);
                passes(sessions.bmdb(), &session, &*provider, &settings, &stop).await;
                if !session.lost().is_cancelled()
                    && let Err(error) = sessions.close(&session, "the provisioner stopped").await
                {
                    tracing::warn!(provider = name, %error, "cannot close a session; the reaper will");
                }
            }
            Err(error) => {
                tracing::warn!(provider = name, %error, "cannot start a session; trying again in a second");
            }
        }
        pause(&stop, Duration::from_secs(1)).await;
    }
}

async fn pause(stop: &CancellationToken, duration: Duration) {
    tokio::select! {
        () = stop.cancelled() => {}
        () = tokio::time::sleep(duration) => {}
    }
}

/// Makes passes under one session, until it is over or `stop`.
async fn passes(
    bmdb: &Bmdb,
    session: &Session,
    provider: &dyn Provider,
    settings: &ProvisionerSettings,
    stop: &CancellationToken,
) {
    let name = provider.name().as_str();
    while !stop.is_cancelled() && !session.lost().is_cancelled() {
        // Never given up half-way either: the statement goes on without us, and a lease that is taken after
        // we have looked away stays taken, by a session that is then closed.
        match bmdb.take_lease(session, LEASE, name).await {
            Ok(Some(lease)) => {
                tracing::info!(provider = name, fence = lease.fence, "provisioning");
                failpoint::pass(LEASE, "leased");
                hold(bmdb, session, &lease, provider, settings, stop).await;
                if let Err(error) = bmdb.give_back_lease(&lease).await {
                    tracing::warn!(provider = name, %error, "cannot give back a lease; the reaper will");
                }
                return;
            }
            Ok(None) => pause(stop, Duration::from_secs(1)).await,
            Err(error) => {
                tracing::warn!(provider = name, %error, "cannot take the provisioner's lease; trying again in a second");
                pause(stop, Duration::from_secs(1)).await;
            }
        }
    }
}

async fn hold(
    bmdb: &Bmdb,
    session: &Session,
    lease: &NamedLease,
    provider: &dyn Provider,
    settings: &ProvisionerSettings,
    stop: &CancellationToken,
) {
    let mut pauses = Pauses::default();
    loop {
        // A pass is dropped at its next wait when the session is over: what it had begun is an
        // open intent, which whoever holds the lease next looks after.
        let more = tokio::select! {
            () = stop.cancelled() => return,
            () = session.lost().cancelled() => return,
            result = AssertUnwindSafe(pass(bmdb, session, lease, provider, settings, &mut pauses)).catch_unwind() => match result {
                Ok(Ok(more)) => more,
                Ok(Err(PassError::Bmdb(BmdbError::SessionOver | BmdbError::LeaseLost))) => return,
                Ok(Err(error)) => {
                    tracing::warn!(provider = lease.name, %error, "a provisioning pass failed");
                    false
                }
                // Ended by it, this task would hold its lease for as long as the process lives, and nobody
                // would provision.
                Err(panic) => {
                    let text = panic_text(&*panic);
                    tracing::error!(provider = lease.name, text, "a provisioning pass panicked; the next one is made");
                    false
                }
            },
        };
        if more {
            continue;
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = session.lost().cancelled() => return,
            () = settings.reconciler.ready() => {}
        }
    }
}

/// One pass. Says whether another one would find more to create at once.
async fn pass(
    bmdb: &Bmdb,
    session: &Session,
    lease: &NamedLease,
    provider: &dyn Provider,
    settings: &ProvisionerSettings,
    pauses: &mut Pauses,
) -> Result<bool, PassError> {
    let (name, kind) = (lease.name.as_str(), provider.kind());
    if is_paused(bmdb, pauses, name).await? {
        return Ok(false);
    }
    // The BMDB first: a machine that is recorded between the two readings is then listed and
    // unknown at the worst, and recording it again finds it.
    let mut known = bmdb.known_machines(name).await?;
    let left_alone = |open: Open| PassError::LeftAlone { provider: name.to_owned(), reason: open.reason };
    let listed = settings.breaker.admit().map_err(left_alone)?.ask(Call::List, provider.list()).await;
    // Frozen meanwhile: what was heard is old, and another shepherd's to say.
    if session.remaining().is_zero() {
        return Err(BmdbError::SessionOver.into());
    }
    let listed = match listed {
        Ok(listed) => listed,
        Err(error) => {
            bmdb.provider_list_failed(lease, kind, &error.sentence).await?;
            let reason = format!("brake: its list cannot be read: {}", error.sentence);
            engage(bmdb, lease, Some(&reason)).await?;
            return Err(PassError::List { provider: name.to_owned(), error });
        }
    };
    bmdb.provider_listed(lease, kind, listed.len()).await?;
    failpoint::pass(LEASE, "listed");
    if lacks_any(&listed, &known) {
        note_leaving(&mut known, &bmdb.known_machines(name).await?);
    }
    let creations = bmdb.open_creations(name).await?;
    let open: BTreeSet<IntentId> = creations.iter().map(|creation| creation.intent).collect();
    let (_, policy) = bmdb.policy();
    let plan = plan_provisioning(&listed, &known, &open, &policy.provisioner_brake, settings.limits);
    engage(bmdb, lease, plan.brake.as_deref()).await?;
    settle_open(bmdb, lease, provider, &settings.breaker, &creations, &plan, policy.outward_limit.0).await?;
    for (machine, reason) in &plan.quarantine {
        quarantine(bmdb, lease, *machine, reason).await?;
    }
    for machine in plan.explained.iter().copied() {
        clear_quarantine(bmdb, lease, machine).await?;
    }
    for (machine, listed) in plan.retired.iter().copied() {
        tell_listed(bmdb, lease, machine, listed).await?;
    }
    for stranger in &plan.strangers {
        let reason = "the provider says it is in use, and it was not created from here";
        let mut new = new_machine(stranger, "found in use at the provider");
        new.changes.push(FactChange::Quarantined(reason.to_owned()));
        bmdb.record_machine(lease, None, &new).await?;
    }
    if let Some(limited) = &plan.limited {
        tracing::debug!(provider = name, limited, "creation is limited");
    }
    let full_chunk = plan.create.len() >= settings.limits.chunk;
    let mut made = 0;
    for id in &plan.create {
        settings.creation.ready().await;
        if is_paused(bmdb, pauses, name).await? {
            return Ok(false);
        }
        // Before an intent is recorded for an order that would not be sent.
        let admission = settings.breaker.admit().map_err(left_alone)?;
        made += usize::from(create(bmdb, session, lease, provider, &admission, id).await?);
    }
    // A provider that makes nothing is asked again at the reconciler's pace.
    Ok(full_chunk && made > 0)
}

async fn is_paused(bmdb: &Bmdb, pauses: &mut Pauses, provider: &str) -> Result<bool, BmdbError> {
    Ok(pauses.left(bmdb, Loop::Provisioner, &[provider.to_owned()]).await?.is_empty())
}

async fn engage(bmdb: &Bmdb, lease: &NamedLease, brake: Option<&str>) -> Result<(), BmdbError> {
    let provider = &lease.name;
    if bmdb.set_provisioner_brake(lease, brake).await? {
        if let Some(reason) = brake {
            tracing::warn!(provider, reason, "creation is stopped");
        } else {
            tracing::info!(provider, "creation goes on");
        }
    }
    Ok(())
}

/// Finds out what became of creations whose outcome was never written down.
///
/// What the provider has not made *yet* it may still make: the order of a shepherd that died can be
/// on its way for as long as an outward call lasts (`limit`). Settled before that, the machine would
/// turn up under an intent that nobody waits for, and be quarantined as a stranger.
async fn settle_open(
    bmdb: &Bmdb,
    lease: &NamedLease,
    provider: &dyn Provider,
    breaker: &ProviderBreaker,
    open: &[OpenCreation],
    plan: &ProvisionPlan,
    limit: Duration,
) -> Result<(), BmdbError> {
    for (intent, machine) in &plan.adopt {
        adopt(bmdb, lease, *intent, machine).await?;
    }
    let adopted: BTreeSet<IntentId> = plan.adopt.iter().map(|(intent, _)| *intent).collect();
    let Some(creation) = provider.creation() else { return Ok(()) };
    for OpenCreation { intent, age, .. } in open.iter().filter(|one| !adopted.contains(&one.intent)) {
        // Unknown is not "nothing": asked again at a later pass.
        let Ok(admission) = breaker.admit() else { return Ok(()) };
        match admission.ask(Call::FindByIntent, creation.find_by_intent(*intent)).await {
            Ok(Some(machine)) => adopt(bmdb, lease, *intent, &machine).await?,
            Ok(None) if *age < limit => {}
            Ok(None) => {
                bmdb.settle_creation(lease, *intent, "nothing was made").await?;
            }
            Err(error) => {
                tracing::warn!(provider = lease.name, %intent, %error, "cannot find out what a creation did");
            }
        }
    }
    Ok(())
}

async fn adopt(
    bmdb: &Bmdb,
    lease: &NamedLease,
    intent: IntentId,
    machine: &ProviderMachine,
) -> Result<(), BmdbError> {
    let id = bmdb.record_machine(lease, Some(intent), &new_machine(machine, "adopted by its intent")).await?;
    tracing::info!(provider = lease.name, provider_id = machine.id, machine = %id, %intent, "adopted");
    Ok(())
}

/// Creates one machine; says whether it did. A provider's error skips it and is told; the intent stays
/// open, because the machine may have been made all the same.
async fn create(
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
    failpoint::pass(LEASE, "intended");
    let (_, policy) = bmdb.policy();
    let limit = may_ask(session.remaining(), boot_time().saturating_sub(begun), policy.outward_limit.0)?;
    let Ok(asked) =
        tokio::time::timeout(limit, admission.ask(Call::Create, creation.create(intent, Some(id)))).await
    else {
        tracing::warn!(
            provider = lease.name,
            provider_id = id,
            "creating a machine was not answered within {limit:?}; the next pass finds out what became of it"
        );
        return Ok(false);
    };
    match asked {
        Ok(machine) => {
            failpoint::pass(LEASE, "created");
            let new = new_machine(&machine, "created");
            let recorded = bmdb.record_machine(lease, Some(intent), &new).await?;
            tracing::info!(provider = lease.name, provider_id = machine.id, machine = %recorded, "created");
            failpoint::pass(LEASE, "recorded");
            Ok(true)
        }
        Err(error) => {
            tracing::warn!(provider = lease.name, provider_id = id, %error, "cannot create a machine; going on with the others");
            Ok(false)
        }
    }
}

/// How long a provider may be asked for a machine whose intent was recorded `age` ago, under a session
/// that lasts for another `remaining`. Fails when it may not be asked any more.
///
/// Whoever holds the lease after us takes an intent that is older than the policy's outward limit, and
/// of which the provider knows nothing, for one that nothing became of. A machine that is made after that
/// is a stranger. So the order must not be on its way for longer, and must not begin late: a process
/// that was frozen right here would send it an hour afterwards.
fn may_ask(remaining: Duration, age: Duration, outward_limit: Duration) -> Result<Duration, BmdbError> {
    if remaining.is_zero() {
        return Err(BmdbError::SessionOver);
    }
    Ok(CALL_LIMIT.min(remaining.max(outward_limit.saturating_sub(age))))
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
        details: details_of(machine),
        changes,
        detail: format!("{detail}: {}", machine.id),
    }
}

async fn quarantine(
    bmdb: &Bmdb,
    lease: &NamedLease,
    machine: MachineId,
    reason: &str,
) -> Result<(), BmdbError> {
    let said = reason.to_owned();
    let done =
        bmdb.change_machine_under(lease, machine, move |snapshot| lost(&snapshot.facts, &said)).await?;
    if done {
        tracing::warn!(%machine, reason, "quarantined");
    }
    Ok(())
}

/// What becomes of a machine that its provider lost, and whether anything does: one that was told to leave since
/// the comparison is looked after by the retirer, whom a quarantine would keep from it.
fn lost(facts: &MachineFacts, reason: &str) -> Decision<bool> {
    if facts.retirement.is_some() {
        return Decision::default();
    }
    // The phase that follows is told with its reason.
    Decision { changes: vec![FactChange::Quarantined(reason.to_owned())], events: Vec::new(), answer: true }
}

async fn clear_quarantine(bmdb: &Bmdb, lease: &NamedLease, machine: MachineId) -> Result<(), BmdbError> {
    tracing::info!(%machine, "its discrepancy is explained");
    bmdb.change_machine_under(lease, machine, |_| Decision {
        changes: vec![FactChange::QuarantineCleared],
        events: vec![("QuarantineCleared".to_owned(), "the provider lists it again".to_owned())],
        answer: (),
    })
    .await
}

/// Writes down whether the provider lists a machine that is retired.
async fn tell_listed(
    bmdb: &Bmdb,
    lease: &NamedLease,
    machine: MachineId,
    listed: bool,
) -> Result<(), BmdbError> {
    tracing::info!(%machine, listed, "whether the provider lists a retired machine has changed");
    bmdb.change_machine_under(lease, machine, move |_| Decision {
        changes: vec![FactChange::Retirement(RetirementChange::Listed(listed))],
        events: Vec::new(),
        answer: (),
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::facts::Retirement;
    use crate::model::time::Timestamp;

    #[test]
    fn machine_that_was_told_to_leave_meanwhile_is_not_quarantined() {
        let at = Timestamp::from_timestamp(1_800_000_000, 0).unwrap();
        let mut facts = MachineFacts::unknown(MachineId::generate(), at);
        let decided = lost(&facts, "it is not listed");
        assert_eq!(decided.changes, [FactChange::Quarantined("it is not listed".into())]);
        assert!(decided.answer);
        facts.retirement = Some(Retirement::new("old".into(), "kim".into(), at));
        let decided = lost(&facts, "it is not listed");
        assert!(decided.changes.is_empty() && !decided.answer);
    }

    #[test]
    fn a_provider_is_asked_for_as_long_as_nobody_else_can_have_looked_after_the_intent() {
        let seconds = Duration::from_secs;
        for (remaining, age, outward_limit, expected) in [
            // The policy's limit, less what has passed of it.
            (27, 0, 60, Some(60)),
            (27, 20, 60, Some(40)),
            // Nobody else can hold the lease before our session is over.
            (27, 50, 60, Some(27)),
            (27, 500, 60, Some(27)),
            // Never for longer than any call may take.
            (27, 0, 600, Some(60)),
            // Frozen after the intent, for longer than the session: somebody else may have settled it.
            (0, 0, 60, None),
            (0, 3600, 60, None),
        ] {
            let granted = may_ask(seconds(remaining), seconds(age), seconds(outward_limit));
            assert_eq!(granted.ok(), expected.map(seconds), "{remaining} {age} {outward_limit}");
        }
    }
}
