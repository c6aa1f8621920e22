//! Intents: recording outward actions before they are taken, under a disruption budget.
//!
//! A worker that finds an open intent later knows what may have happened outside and can look for the proof instead of
//! repeating the action. A disruption is recorded in the same transaction that decides whether it may happen at all:
//! the facts are read once more under the machine's lock, and the budget is counted under a lock of its own, so that
//! two shepherds cannot both use its last unit.

use std::time::Duration;

use sqlx::PgConnection;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext};
use crate::engine::fact_change::{FactChange, apply_fact_change};
use crate::engine::facts::read_snapshot;
use crate::engine::named_lease::NamedLease;
use crate::engine::policy::policy_at_version;
use crate::engine::schedule::reschedule_machine;
use crate::engine::unknown_fence::read_unknown_fence;
use crate::engine::work::Work;
use crate::engine::work::lease::lock_due_rows_leased;
use model::cluster::disruption::ClusterContext;
use model::disruption::{DisruptionContext, DisruptionDenied, may_disrupt};
#[cfg(feature = "sealing")]
use model::facts::MachineFacts;
use model::facts::Recovery;
#[cfg(feature = "sealing")]
use model::ids::SessionId;
use model::ids::{IntentId, MachineId};
use model::policy::DisruptionKind;
use model::recovery::start_step;
use model::time::{Span, Timestamp};

/// A step of the ladder that is about to be taken.
#[derive(Clone, Debug)]
pub struct DisruptionRequest {
    /// Index into the policy's ladder.
    pub rung: usize,
    /// Kind of the disruption.
    pub disruption: DisruptionKind,
    /// Which attempt at this rung, from 1.
    pub attempt: u32,
    /// How long the machine then has to report.
    pub deadline: Span,
    /// When the facts were read that led to it.
    pub facts_read_at: Timestamp,
    /// Why recovery is stopped; `None` without a brake.
    pub brake: Option<String>,
    /// Name of the provider that is called, for the record.
    pub provider: String,
}

/// The answer to a request for a disruption.
#[derive(Clone, Debug)]
pub enum Permission {
    /// Recorded: proceed, at once.
    Granted {
        /// The intent to pass to the provider.
        intent: IntentId,
        /// The ladder as it was recorded.
        recovery: Recovery,
    },
    /// Not allowed now; nothing was recorded.
    Denied(DisruptionDenied),
}

impl Work {
    /// Requests permission for `step`. Records it if it may be taken: the intent, and the state of the ladder.
    pub async fn begin_disruption(&self, step: DisruptionRequest) -> Result<Permission, BmdbError> {
        let (machine, lease) = (self.machine(), self.lease());
        let bmdb = self.bmdb().clone();
        self.bmdb()
            .transact_with("recording an intent", (bmdb, step), move |tx, (bmdb, step)| {
                Box::pin(async move {
                    let rows = lock_due_rows_leased(tx, lease, machine).await?;
                    let snapshot = read_snapshot(tx, machine).await?;
                    let policy = policy_at_version(bmdb, tx, snapshot.policy_version).await?;
                    let window = policy.budgets.get(&step.disruption).map(|budget| budget.window);
                    let (kind, brake) = (step.disruption.as_str(), step.brake.clone());
                    let circumstances =
                        lock_disruption_context(tx, machine, kind, window.unwrap_or_default(), brake).await?;
                    let (facts, now) = (&snapshot.facts, snapshot.now);
                    if let Err(refusal) =
                        may_disrupt(facts, step.disruption, &circumstances, &policy, step.facts_read_at, now)
                    {
                        return Ok(Permission::Denied(refusal));
                    }
                    let recovery =
                        start_step(facts, step.rung, step.disruption, step.deadline, step.attempt, now);
                    apply_fact_change(tx, machine, &FactChange::Recovery(recovery.clone())).await?;
                    reschedule_machine(bmdb, tx, machine, &rows).await?;
                    let intent = IntentId::generate();
                    sqlx::query_file!(
                        "../../sql/intent/insert.sql",
                        intent.0,
                        step.disruption.as_str(),
                        step.provider,
                        machine.0,
                        lease.session.0,
                        lease.fence,
                        recovery.note
                    )
                    .execute(tx)
                    .await
                    .context("recording an intent")?;
                    Ok(Permission::Granted { intent, recovery })
                })
            })
            .await
    }
}

impl Work {
    /// Records how a step of this work ended. Returns whether the intent was still open.
    ///
    /// A session that is over must not resolve anything any more: the outcome of its steps is unknown to the worker
    /// that continues, and its budget and ladder rely on that.
    pub async fn resolve_intent(&self, intent: IntentId, outcome: &str) -> Result<bool, BmdbError> {
        let (machine, lease, outcome) = (self.machine(), self.lease(), outcome.to_owned());
        self.bmdb()
            .transact_with(RESOLVING, outcome, move |tx, outcome| {
                Box::pin(async move {
                    lock_due_rows_leased(tx, lease, machine).await?;
                    resolve_intent_in_tx(tx, intent, outcome).await
                })
            })
            .await
    }
}

/// The disruptions of a machine and its fleet: those of a kind begun within `window`, counted under the lock of that
/// budget.
pub(crate) async fn lock_disruption_context(
    tx: &mut PgConnection,
    machine: MachineId,
    kind: &str,
    window: Span,
    brake: Option<String>,
) -> Result<DisruptionContext, BmdbError> {
    let what = "counting a budget";
    sqlx::query_file!("../../sql/intent/lock_budget.sql", kind)
        .fetch_optional(&mut *tx)
        .await
        .context(what)?;
    let used = sqlx::query_file!("../../sql/intent/count_budget_use.sql", kind, window.float_milliseconds())
        .fetch_one(&mut *tx)
        .await
        .context(what)?;
    Ok(DisruptionContext {
        started_in_window: u32::try_from(used.count).unwrap_or(u32::MAX),
        oldest_in_window: used.oldest,
        brake,
        unknown_fence: read_unknown_fence(tx, machine).await?,
        cluster: lock_cluster_context(tx, machine).await?,
    })
}

/// Records a disruption that begins with an order to the machine, under a lease. It counts against the budget of its
/// kind, and has no outcome that could stay open.
#[cfg(feature = "sealing")]
pub(crate) async fn record_ordered_disruption(
    tx: &mut PgConnection,
    facts: &MachineFacts,
    kind: DisruptionKind,
    machine: MachineId,
    (session, fence): (SessionId, i64),
    detail: &str,
    what: &'static str,
) -> Result<(), BmdbError> {
    let provider = facts.provider_record.as_ref().map(|provided| provided.provider.as_str());
    sqlx::query!(
        "INSERT INTO intent (intent_id, kind, provider, machine_id, session_id, fence, detail, begun_at,
             settled_at, outcome)
         VALUES ($1, $2, $3, $4, $5, $6, $7, clock_timestamp(), clock_timestamp(), 'ordered')",
        uuid::Uuid::now_v7(),
        kind.as_str(),
        provider.unwrap_or_default(),
        machine.0,
        session.0,
        fence,
        detail
    )
    .execute(tx)
    .await
    .context(what)?;
    Ok(())
}

/// The state of a machine's cluster; `None` if it is in none. The cluster's row is locked: of two machines of a cluster
/// that are silent at once, the second one's request is decided when the first one's is recorded.
async fn lock_cluster_context(
    tx: &mut PgConnection,
    machine: MachineId,
) -> Result<Option<ClusterContext>, BmdbError> {
    let what = "reading the state of a machine's cluster";
    // Of two machines of one cluster only one is disrupted. The due rows of the machine are locked before
    // this.
    let locked = sqlx::query!(
        "SELECT k.cluster_id, k.name FROM machine_cluster c JOIN cluster k ON k.cluster_id = c.cluster_id
         WHERE c.machine_id = $1
         FOR UPDATE OF k",
        machine.0
    )
    .fetch_optional(&mut *tx)
    .await
    .context(what)?;
    let Some(cluster) = locked else { return Ok(None) };
    let row = sqlx::query_file!("../../sql/cluster/read_disruption_state.sql", machine.0)
        .fetch_optional(&mut *tx)
        .await
        .context(what)?;
    let Some(row) = row else { return Ok(None) };
    let count = |count: i64| usize::try_from(count).unwrap_or(0);
    Ok(Some(ClusterContext {
        name: cluster.name,
        founded: row.founded,
        leaving: row.deleting || row.leaving.is_some(),
        health: row.health,
        voter: row.voter.unwrap_or(false),
        votes: row.voters.zip(row.voters_reached).map(|(voters, reached)| (count(voters), count(reached))),
        observed_at: row.observed_at,
        other_disrupted: row.disturbed,
    }))
}

/// A creation that was begun and whose outcome is not recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenCreation {
    /// The intent that was passed to the provider.
    pub intent: IntentId,
    /// The provider's id, or the reservation, that was requested.
    pub detail: String,
    /// When the creation was begun.
    pub begun_at: Timestamp,
    /// How long ago that was.
    pub age: Duration,
}

impl Bmdb {
    /// Records that a machine is about to be requested from a provider, under its provisioner's lease.
    pub async fn begin_creation(&self, lease: &NamedLease, detail: &str) -> Result<IntentId, BmdbError> {
        let intent = IntentId::generate();
        let (holder, detail) = (lease.clone(), detail.to_owned());
        self.execute_under_lease("recording an intent", lease, move || {
            sqlx::query_file!(
                "../../sql/intent/insert.sql",
                intent.0,
                "create",
                holder.name,
                None::<uuid::Uuid>,
                holder.session.0,
                holder.fence,
                detail
            )
        })
        .await?;
        Ok(intent)
    }

    /// Creations of a provider that were begun and never resolved, oldest first.
    pub async fn open_creations(&self, provider: &str) -> Result<Vec<OpenCreation>, BmdbError> {
        let rows = self
            .statement_with("reading open intents", provider.to_owned(), move |pool, provider| {
                Box::pin(
                    sqlx::query_file!("../../sql/intent/list_open_creations.sql", provider).fetch_all(pool),
                )
            })
            .await?;
        Ok(rows
            .into_iter()
            .map(|row| OpenCreation {
                intent: IntentId(row.intent_id),
                detail: row.detail,
                begun_at: row.begun_at,
                age: Duration::from_millis(u64::try_from(row.age_ms).unwrap_or(0)),
            })
            .collect())
    }

    /// Records how a creation ended, under its provisioner's lease. Returns whether it was still open.
    ///
    /// The present holder of the lease may be adopting the created machine. A former holder that was away in between
    /// must not record any more that nothing was created.
    pub async fn resolve_creation(
        &self,
        lease: &NamedLease,
        intent: IntentId,
        outcome: &str,
    ) -> Result<bool, BmdbError> {
        self.transact_under_lease(RESOLVING, lease, outcome.to_owned(), move |tx, outcome| {
            Box::pin(resolve_intent_in_tx(tx, intent, outcome))
        })
        .await
    }
}

const RESOLVING: &str = "settling an intent";

/// Records how an intent ended, unless that is recorded already. Returns whether it was still open.
pub(crate) async fn resolve_intent_in_tx(
    tx: &mut PgConnection,
    intent: IntentId,
    outcome: &str,
) -> Result<bool, BmdbError> {
    let settled = sqlx::query!(
        "UPDATE intent SET settled_at = clock_timestamp(), outcome = $2
         WHERE intent_id = $1 AND settled_at IS NULL
         RETURNING intent_id",
        intent.0,
        outcome
    )
    .fetch_optional(tx)
    .await;
    Ok(settled.context(RESOLVING)?.is_some())
}

/// Kind of the intents, and name of the budget.
pub(crate) const RELEASE_KIND: &str = "release";
