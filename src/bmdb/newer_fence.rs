//! A fence that this BMDB never gave.
//!
//! A heartbeat says the highest fence that its machine has seen. One beyond what
//! this BMDB has given was given by what it has forgotten: it was restored from
//! a backup, or another database works on the same machines. So was one by which
//! a machine refuses the work that holds its lease.
//!
//! Neither heartbeat nor report is refused for it. But it is told once until a
//! restoration is declared: in the log, in a metric, in the machine's history and
//! by `why`; and as long as that line of history is proof ([`NewerFence::proof`])
//! nothing is ordered of the machine.

use std::collections::HashMap;

use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::connection::{Bmdb, Doing};
use crate::bmdb::error::BmdbError;
#[cfg(feature = "shepherd")]
use crate::bmdb::schedule::lock;
use crate::bmdb::work::Work;
#[cfg(feature = "shepherd")]
use crate::bmdb::work::lock_leased;
use crate::model::ids::MachineId;
#[cfg(feature = "shepherd")]
use crate::model::newer_fence::ANSWERED_BEYOND;
use crate::model::newer_fence::NewerFence;

#[cfg(feature = "shepherd")]
const TELLING: &str = "telling of a newer fence";
const LOOKING: &str = "looking for a newer fence";

#[cfg(feature = "shepherd")]
impl Bmdb {
    /// Tells that a machine's agent knows a fence beyond what this BMDB has given, unless that was told.
    pub(crate) async fn tell_newer_fence(&self, machine: MachineId, fence: i64) -> Result<(), BmdbError> {
        let told = self
            .transact(TELLING, move |tx| {
                Box::pin(async move {
                    lock(tx, machine).await?;
                    newer_fence(tx, machine, fence).await
                })
            })
            .await?;
        if told {
            self.warn_of_newer_fence(machine, fence);
        }
        Ok(())
    }

    /// Says so where people look, once it is written down.
    pub(crate) fn warn_of_newer_fence(&self, machine: MachineId, fence: i64) {
        self.metrics().newer_fences.inc();
        tracing::error!(%machine, fence, "a machine knows a fence that this BMDB never gave: was it restored from a \
            backup? Nothing is ordered of the machine. Stop every shepherd and declare it with `shepherdctl declare \
            restored`");
    }
}

#[cfg(feature = "shepherd")]
impl Work {
    /// Tells that the machine refused this work's fence because it has seen `known`, at least as high and
    /// another's, unless that was told.
    ///
    /// Nobody was given as much here while this work holds the lease. If it holds it no more, whoever does
    /// was, and nothing is wrong but our being late: that is [`BmdbError::LeaseLost`].
    pub async fn tell_refused_fence(&self, known: i64) -> Result<(), BmdbError> {
        let (machine, lease) = (self.machine(), self.lease());
        let told = self
            .bmdb()
            .transact(TELLING, move |tx| {
                Box::pin(async move {
                    lock_leased(tx, lease, machine).await?;
                    newer_fence(tx, machine, known).await
                })
            })
            .await?;
        if told {
            self.bmdb().warn_of_newer_fence(machine, known);
        }
        Ok(())
    }
}

impl Work {
    /// Proof that the machine has seen more than this BMDB has given, while nothing may be ordered of it.
    pub async fn newer_fence(&self) -> Result<Option<NewerFence>, BmdbError> {
        let machine = self.machine();
        let found = self
            .bmdb()
            .statement(LOOKING, move |connection| {
                Box::pin(async move {
                    sqlx::query_file!("sql/inspect/read_unknown_fence.sql", machine.0)
                        .fetch_optional(connection)
                        .await
                })
            })
            .await?;
        Ok(found.and_then(|row| NewerFence::proof(row.at, row.fence, row.given)))
    }
}

impl Bmdb {
    /// As [`Work::newer_fence`], of each of many machines of which there is proof.
    pub(crate) async fn newer_fences(
        &self,
        machines: Vec<Uuid>,
    ) -> Result<HashMap<Uuid, NewerFence>, BmdbError> {
        let found = self
            .statement(LOOKING, move |connection| {
                let machines = machines.clone();
                Box::pin(async move {
                    sqlx::query_file!("sql/inspect/list_unknown_fences.sql", &machines)
                        .fetch_all(connection)
                        .await
                })
            })
            .await?;
        let proven = found
            .into_iter()
            .filter_map(|row| Some((row.machine_id, NewerFence::proof(row.at, row.fence, row.given)?)));
        Ok(proven.collect())
    }
}

/// As [`Work::newer_fence`], of any machine and in a transaction.
pub(crate) async fn newer_fence_of(
    tx: &mut PgConnection,
    machine: MachineId,
) -> Result<Option<NewerFence>, BmdbError> {
    let found = sqlx::query_file!("sql/inspect/read_unknown_fence.sql", machine.0)
        .fetch_optional(tx)
        .await
        .doing(LOOKING)?;
    Ok(found.and_then(|row| NewerFence::proof(row.at, row.fence, row.given)))
}

/// Tells of a fence that was never given; says whether it was told for the first time.
#[cfg(feature = "shepherd")]
pub(crate) async fn newer_fence(
    tx: &mut PgConnection,
    machine: MachineId,
    fence: i64,
) -> Result<bool, BmdbError> {
    let detail = format!(
        "its agent has seen fence {fence} from somebody whom this database does not know: it was restored from a \
         backup, or another database works on the same machine. Nothing is ordered of it until that is settled"
    );
    let told = sqlx::query_file_scalar!(
        "sql/history/insert_unknown_fence.sql",
        machine.0,
        fence,
        detail,
        ANSWERED_BEYOND
    )
    .fetch_optional(tx)
    .await;
    Ok(told.doing(TELLING)?.is_some())
}
