//! The provisioner: brings providers' machines into the BMDB.
//!
//! For each provider one pass a minute, under a named lease, so that of any
//! number of shepherds one at a time does it. A pass reads the provider's whole
//! list and what the BMDB knows, decides ([`plan`]), and does it:
//!
//! * Before the provider is asked for a machine, the intent is recorded, and
//!   its id is given to the provider. A crash between the two leaves an open
//!   intent; the next pass asks the provider what was made under it and adopts
//!   that, so that creation is exactly-once.
//! * A list that cannot be read, or cannot be right, engages a brake: nothing is
//!   created until a list looks right again.

pub mod plan;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::bmdb::change::{FactChange, HostKeySource};
use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::intent::OpenCreation;
use crate::bmdb::lease::NamedLease;
use crate::bmdb::provision::NewMachine;
use crate::bmdb::session::{Session, Sessions};
use crate::bmdb::work::Decision;
use crate::manager::limiter::Limiter;
use crate::manager::provisioner::plan::{Limits, ProvisionPlan, plan_provisioning};
use crate::manager::updater::details_of;
use crate::model::ids::{IntentId, MachineId};
use crate::providers::provider::{Creation, Provider, ProviderError, ProviderMachine};

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
}

/// Why a pass ended early.
#[derive(Debug, thiserror::Error)]
enum PassError {
    #[error(transparent)]
    Bmdb(#[from] BmdbError),
    #[error("cannot list the machines of provider {provider}: {error}")]
    List { provider: String, error: ProviderError },
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
        let session = sessions.start("provisioner", details).await;
        match session {
            Ok(session) => {
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
    loop {
        let lease = tokio::select! {
            () = stop.cancelled() => return,
            () = session.lost().cancelled() => return,
            lease = bmdb.take_lease(session, LEASE, name) => lease,
        };
        match lease {
            Ok(Some(lease)) => {
                tracing::info!(provider = name, fence = lease.fence, "provisioning");
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
    loop {
        // A pass is dropped at its next wait when the session is over: what it had begun is an
        // open intent, which whoever holds the lease next looks after.
        let more = tokio::select! {
            () = stop.cancelled() => return,
            () = session.lost().cancelled() => return,
            result = pass(bmdb, lease, provider, settings) => match result {
                Ok(more) => more,
                Err(PassError::Bmdb(BmdbError::SessionOver | BmdbError::LeaseLost)) => return,
                Err(error) => {
                    tracing::warn!(provider = lease.name, %error, "a provisioning pass failed");
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
    lease: &NamedLease,
    provider: &dyn Provider,
    settings: &ProvisionerSettings,
) -> Result<bool, PassError> {
    let (name, kind) = (lease.name.as_str(), provider.kind());
    // The BMDB first: a machine that is recorded between the two readings is then listed and
    // unknown at the worst, and recording it again finds it.
    let known = bmdb.known_machines(name).await?;
    let listed = match provider.list().await {
        Ok(listed) => listed,
        Err(error) => {
            bmdb.provider_list_failed(name, kind, &error.sentence).await?;
            let reason = format!("brake: its list cannot be read: {}", error.sentence);
            engage(bmdb, name, Some(&reason)).await?;
            return Err(PassError::List { provider: name.to_owned(), error });
        }
    };
    bmdb.provider_listed(name, kind, listed.len()).await?;
    let creations = bmdb.open_creations(name).await?;
    let open: BTreeSet<IntentId> = creations.iter().map(|creation| creation.intent).collect();
    let (_, policy) = bmdb.policy();
    let plan = plan_provisioning(&listed, &known, &open, &policy.provisioner_brake, settings.limits);
    engage(bmdb, name, plan.brake.as_deref()).await?;
    settle_open(bmdb, lease, provider, &creations, &plan, policy.outward_limit.0).await?;
    for (machine, reason) in &plan.quarantine {
        quarantine(bmdb, *machine, reason).await?;
    }
    for machine in plan.explained.iter().copied() {
        clear_quarantine(bmdb, machine).await?;
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
    for id in &plan.create {
        settings.creation.ready().await;
        create(bmdb, lease, provider, id).await?;
    }
    Ok(full_chunk)
}

async fn engage(bmdb: &Bmdb, provider: &str, brake: Option<&str>) -> Result<(), BmdbError> {
    if bmdb.set_provisioner_brake(provider, brake).await? {
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
        match creation.find_by_intent(*intent).await {
            Ok(Some(machine)) => adopt(bmdb, lease, *intent, &machine).await?,
            Ok(None) if *age < limit => {}
            Ok(None) => {
                bmdb.settle_intent(*intent, "nothing was made").await?;
            }
            // Unknown is not "nothing": asked again at the next pass.
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

/// Creates one machine. A provider's error skips it and is told; the intent stays open, because
/// the machine may have been made all the same.
async fn create(bmdb: &Bmdb, lease: &NamedLease, provider: &dyn Provider, id: &str) -> Result<(), BmdbError> {
    let Some(creation) = provider.creation() else { return Ok(()) };
    let intent = bmdb.begin_creation(lease, id).await?;
    match create_at(creation, intent, id).await {
        Ok(machine) => {
            let new = new_machine(&machine, "created");
            let recorded = bmdb.record_machine(lease, Some(intent), &new).await?;
            tracing::info!(provider = lease.name, provider_id = machine.id, machine = %recorded, "created");
        }
        Err(error) => {
            tracing::warn!(provider = lease.name, provider_id = id, %error, "cannot create a machine; going on with the others");
        }
    }
    Ok(())
}

async fn create_at(
    creation: &dyn Creation,
    intent: IntentId,
    id: &str,
) -> Result<ProviderMachine, ProviderError> {
    creation.create(intent, Some(id)).await
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

async fn quarantine(bmdb: &Bmdb, machine: MachineId, reason: &str) -> Result<(), BmdbError> {
    let reason = reason.to_owned();
    tracing::warn!(%machine, reason, "quarantined");
    bmdb.change_machine(machine, move |_| Decision {
        changes: vec![FactChange::Quarantined(reason.clone())],
        events: vec![("Quarantined".to_owned(), reason.clone())],
        answer: (),
    })
    .await
}

async fn clear_quarantine(bmdb: &Bmdb, machine: MachineId) -> Result<(), BmdbError> {
    tracing::info!(%machine, "its discrepancy is explained");
    bmdb.change_machine(machine, |_| Decision {
        changes: vec![FactChange::QuarantineCleared],
        events: vec![("QuarantineCleared".to_owned(), "the provider lists it again".to_owned())],
        answer: (),
    })
    .await
}
