//! Intents: the record of an outward action, made before it is taken.
//!
//! Whoever finds an open intent later knows what may have happened outside and
//! can look for the proof instead of doing it again. A disturbance is recorded
//! in the same transaction that asks whether it may be done at all: the facts
//! are read once more under the machine's lock, and the budget is counted under
//! a lock of its own, so that two shepherds cannot both use its last unit.

use std::time::Duration;

use sqlx::PgConnection;

use crate::bmdb::change::{FactChange, apply};
use crate::bmdb::connection::{Bmdb, Doing};
use crate::bmdb::error::BmdbError;
use crate::bmdb::facts::read;
use crate::bmdb::lease::{NamedLease, lock_lease};
use crate::bmdb::newer_fence::newer_fence_of;
use crate::bmdb::policy::policy_of_version;
use crate::bmdb::schedule::reschedule;
use crate::bmdb::work::{Work, lock_leased};
use crate::model::cluster::disturb::InCluster;
use crate::model::disturb::{Circumstances, Refusal, may_disturb};
use crate::model::facts::Recovery;
use crate::model::ids::{IntentId, MachineId};
use crate::model::policy::Disturbance;
use crate::model::recovery::begun;
use crate::model::time::{Span, Timestamp};

/// A step of the ladder that is about to be taken.
#[derive(Clone, Debug)]
pub struct Step {
    /// Index into the policy's ladder.
    pub rung: usize,
    /// What.
    pub step: Disturbance,
    /// Which try of this rung, from 1.
    pub attempt: u32,
    /// How long the machine then has to report.
    pub deadline: Span,
    /// When the facts were read that led to it.
    pub decided_on: Timestamp,
    /// Why recovery is held, if it is.
    pub brake: Option<String>,
    /// Whom the provider is asked through, for the record.
    pub provider: String,
}

/// The answer to a request to disturb.
#[derive(Clone, Debug)]
pub enum Permission {
    /// Recorded: go on, at once.
    Granted {
        /// The intent to name to the provider.
        intent: IntentId,
        /// The ladder as it was recorded.
        recovery: Recovery,
    },
    /// Nothing was recorded.
    Refused(Refusal),
}

impl Work {
    /// Asks to take `step`, and records it when it may be taken: the intent, and where the ladder
    /// stands.
    pub async fn begin_disturbance(&self, step: Step) -> Result<Permission, BmdbError> {
        let (machine, lease) = (self.machine(), self.lease());
        let bmdb = self.bmdb().clone();
        self.bmdb()
            .transact("recording an intent", move |tx| {
                let (bmdb, step) = (bmdb.clone(), step.clone());
                Box::pin(async move {
                    let rows = lock_leased(tx, lease, machine).await?;
                    let snapshot = read(tx, machine).await?;
                    let policy = policy_of_version(&bmdb, tx, snapshot.policy_version).await?;
                    let window = policy.budgets.get(&step.step).map(|budget| budget.window);
                    let (kind, brake) = (step.step.as_str(), step.brake.clone());
                    let circumstances =
                        count_budget(tx, machine, kind, window.unwrap_or_default(), brake).await?;
                    let (facts, now) = (&snapshot.facts, snapshot.now);
                    if let Err(refusal) =
                        may_disturb(facts, step.step, &circumstances, &policy, step.decided_on, now)
                    {
                        return Ok(Permission::Refused(refusal));
                    }
                    let recovery = begun(facts, step.rung, step.step, step.deadline, step.attempt, now);
                    apply(tx, machine, &FactChange::Recovery(recovery.clone())).await?;
                    reschedule(&bmdb, tx, machine, &rows).await?;
                    let intent = IntentId::generate();
                    sqlx::query_file!(
                        "sql/intent/insert.sql",
                        intent.0,
                        step.step.as_str(),
                        step.provider,
                        machine.0,
                        lease.session.0,
                        lease.fence,
                        recovery.note
                    )
                    .execute(tx)
                    .await
                    .doing("recording an intent")?;
                    Ok(Permission::Granted { intent, recovery })
                })
            })
            .await
    }
}

impl Work {
    /// Writes down how a step of this work ended. Says whether that was still open.
    ///
    /// A session that is over has nothing to say any more: what became of its steps is unknown to
    /// whoever goes on, and the budget and the ladder of these count on it.
    pub async fn settle_intent(&self, intent: IntentId, outcome: &str) -> Result<bool, BmdbError> {
        let (machine, lease, outcome) = (self.machine(), self.lease(), outcome.to_owned());
        self.bmdb()
            .transact(SETTLING, move |tx| {
                let outcome = outcome.clone();
                Box::pin(async move {
                    lock_leased(tx, lease, machine).await?;
                    settle(tx, intent, &outcome).await
                })
            })
            .await
    }
}

/// What a machine and its fleet go through: what was begun of a kind within `window`, counted under the lock of that
/// budget.
pub(crate) async fn count_budget(
    tx: &mut PgConnection,
    machine: MachineId,
    kind: &str,
    window: Span,
    brake: Option<String>,
) -> Result<Circumstances, BmdbError> {
    let what = "counting a budget";
    sqlx::query_file!("sql/intent/lock_budget.sql", kind).fetch_optional(&mut *tx).await.doing(what)?;
    let used = sqlx::query_file!("sql/intent/count_budget_use.sql", kind, window.float_milliseconds())
        .fetch_one(&mut *tx)
        .await
        .doing(what)?;
    Ok(Circumstances {
        begun_in_window: u32::try_from(used.count).unwrap_or(u32::MAX),
        oldest_in_window: used.oldest,
        brake,
        newer_fence: newer_fence_of(tx, machine).await?,
        cluster: cluster_of(tx, machine).await?,
    })
}

/// What the cluster of a machine goes through, if it is a part of one. Its row is locked: of two machines of a cluster
/// that are silent at once, the second is asked about when the first is recorded.
async fn cluster_of(tx: &mut PgConnection, machine: MachineId) -> Result<Option<InCluster>, BmdbError> {
    let what = "asking what a machine's cluster goes through";
    let locked = sqlx::query_file!("sql/cluster/lock_cluster_of_machine.sql", machine.0)
        .fetch_optional(&mut *tx)
        .await
        .doing(what)?;
    let Some(cluster) = locked else { return Ok(None) };
    let row = sqlx::query_file!("sql/cluster/read_disruption_state.sql", machine.0)
        .fetch_optional(&mut *tx)
        .await
        .doing(what)?;
    let Some(row) = row else { return Ok(None) };
    let count = |count: i64| usize::try_from(count).unwrap_or(0);
    Ok(Some(InCluster {
        name: cluster.name,
        founded: row.founded,
        leaving: row.deleting || row.leaving.is_some(),
        health: row.health,
        voter: row.voter.unwrap_or(false),
        votes: row.voters.zip(row.voters_reached).map(|(voters, reached)| (count(voters), count(reached))),
        seen_at: row.seen_at,
        disturbed: row.disturbed,
    }))
}

/// A creation that was begun and whose outcome nobody wrote down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenCreation {
    /// The intent, which the provider was given.
    pub intent: IntentId,
    /// The provider's id or reservation that was asked for.
    pub detail: String,
    /// When.
    pub begun_at: Timestamp,
    /// How long ago that was.
    pub age: Duration,
}

impl Bmdb {
    /// Records that a provider is about to be asked for a machine, under its provisioner's lease.
    pub async fn begin_creation(&self, lease: &NamedLease, detail: &str) -> Result<IntentId, BmdbError> {
        let intent = IntentId::generate();
        let (lease, detail) = (lease.clone(), detail.to_owned());
        self.transact("recording an intent", move |tx| {
            let (lease, detail) = (lease.clone(), detail.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                sqlx::query_file!(
                    "sql/intent/insert.sql",
                    intent.0,
                    "create",
                    lease.name,
                    None::<uuid::Uuid>,
                    lease.session.0,
                    lease.fence,
                    detail
                )
                .execute(tx)
                .await
                .doing("recording an intent")?;
                Ok(())
            })
        })
        .await?;
        Ok(intent)
    }

    /// Creations of a provider that were begun and never settled, oldest first.
    pub async fn open_creations(&self, provider: &str) -> Result<Vec<OpenCreation>, BmdbError> {
        let provider = provider.to_owned();
        let rows = self
            .statement("reading open intents", move |pool| {
                let provider = provider.clone();
                Box::pin(async move {
                    sqlx::query_file!("sql/intent/list_open_creations.sql", provider).fetch_all(pool).await
                })
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

    /// Writes down how a creation ended, under its provisioner's lease. Says whether it was still open.
    ///
    /// Whoever holds the lease now may be adopting what was made; that nothing was is no more for one to
    /// say who was away in between.
    pub async fn settle_creation(
        &self,
        lease: &NamedLease,
        intent: IntentId,
        outcome: &str,
    ) -> Result<bool, BmdbError> {
        let (lease, outcome) = (lease.clone(), outcome.to_owned());
        self.transact(SETTLING, move |tx| {
            let (lease, outcome) = (lease.clone(), outcome.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                settle(tx, intent, &outcome).await
            })
        })
        .await
    }
}

const SETTLING: &str = "settling an intent";

/// Writes down how an intent ended, unless somebody has. Says whether it was still open.
pub(crate) async fn settle(
    tx: &mut PgConnection,
    intent: IntentId,
    outcome: &str,
) -> Result<bool, BmdbError> {
    let settled = sqlx::query_file!("sql/intent/resolve.sql", intent.0, outcome).fetch_optional(tx).await;
    Ok(settled.doing(SETTLING)?.is_some())
}
