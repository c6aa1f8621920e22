//! Fences this BMDB never issued: reporting them and blocking orders until a restore is declared.
//!
//! A heartbeat reports the highest fence that its machine has seen. One beyond what this BMDB has issued comes from a
//! state that it has lost: it was restored from a backup, or another database works on the same machines. The same is
//! true of a fence by which a machine rejects the work that holds its lease.
//!
//! Neither heartbeats nor reports are rejected because of it. But it is reported once, until a restoration is declared:
//! in the log, in a metric, in the machine's history and by `why`. As long as that line of history is proof
//! ([`UnknownFence::from_report`]), the machine gets no orders.

use std::collections::HashMap;

use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext};
#[cfg(feature = "sealing")]
use crate::engine::schedule::lock_due_rows;
use crate::engine::work::Work;
#[cfg(feature = "sealing")]
use crate::engine::work::lease::lock_due_rows_leased;
use model::ids::MachineId;
#[cfg(feature = "sealing")]
use model::unknown_fence::ANSWER_MARGIN;
use model::unknown_fence::UnknownFence;

#[cfg(feature = "sealing")]
const REPORTING: &str = "reporting an unknown fence";
const READING: &str = "looking for a newer fence";

#[cfg(feature = "sealing")]
impl Bmdb {
    /// Reports that a machine's agent knows a fence beyond what this BMDB has issued, unless that is recorded already.
    pub(crate) async fn report_unknown_fence(&self, machine: MachineId, fence: i64) -> Result<(), BmdbError> {
        let notified = self
            .transact(REPORTING, move |tx| {
                Box::pin(async move {
                    lock_due_rows(tx, machine).await?;
                    record_unknown_fence(tx, machine, fence).await
                })
            })
            .await?;
        if notified {
            self.warn_of_unknown_fence(machine, fence);
        }
        Ok(())
    }

    /// Reports it in the metric and the log, once it is recorded.
    pub(crate) fn warn_of_unknown_fence(&self, machine: MachineId, fence: i64) {
        self.metrics().unknown_fences.inc();
        tracing::error!(%machine, fence, "a machine knows a fence that this BMDB never issued: was the BMDB \
                                          restored from a backup? The machine receives no orders. Stop every \
                                          shepherd and declare it with `shepherdctl declare restored`");
    }
}

#[cfg(feature = "sealing")]
impl Work {
    /// Reports that the machine rejected this work's fence because it has seen `known`, which is at least as high and
    /// not this work's own, unless that is recorded already.
    ///
    /// While this work holds the lease, the BMDB has issued no such fence to anybody. If it does not hold the lease any
    /// more, the fence is the new holder's, and nothing is wrong but our being late: that is [`BmdbError::LeaseLost`].
    pub async fn report_rejected_fence(&self, known: i64) -> Result<(), BmdbError> {
        let (machine, lease) = (self.machine(), self.lease());
        let notified = self
            .bmdb()
            .transact(REPORTING, move |tx| {
                Box::pin(async move {
                    lock_due_rows_leased(tx, lease, machine).await?;
                    record_unknown_fence(tx, machine, known).await
                })
            })
            .await?;
        if notified {
            self.bmdb().warn_of_unknown_fence(machine, known);
        }
        Ok(())
    }
}

impl Work {
    /// Proof that the machine has seen a fence beyond what this BMDB has issued, which blocks orders; `None` without
    /// one.
    pub async fn unknown_fence(&self) -> Result<Option<UnknownFence>, BmdbError> {
        let machine = self.machine();
        let bmdb = self.bmdb();
        bmdb.statement(READING, move |connection| Box::pin(select_unknown_fence(connection, machine))).await
    }
}

impl Bmdb {
    /// As [`Work::unknown_fence`], for each of many machines that has proof.
    pub(crate) async fn read_unknown_fences(
        &self,
        machines: Vec<Uuid>,
    ) -> Result<HashMap<Uuid, UnknownFence>, BmdbError> {
        let found = self
            .statement_with(READING, machines, move |connection, machines| {
                Box::pin(
                    sqlx::query_file!("../../sql/inspect/list_unknown_fences.sql", machines)
                        .fetch_all(connection),
                )
            })
            .await?;
        let proven = found.into_iter().filter_map(|row| {
            Some((row.machine_id, UnknownFence::from_report(row.at, row.fence, row.issued_fence)?))
        });
        Ok(proven.collect())
    }
}

/// As [`Work::unknown_fence`], for any machine and in a transaction.
pub(crate) async fn read_unknown_fence(
    tx: &mut PgConnection,
    machine: MachineId,
) -> Result<Option<UnknownFence>, BmdbError> {
    select_unknown_fence(tx, machine).await.context(READING)
}

async fn select_unknown_fence(
    connection: &mut PgConnection,
    machine: MachineId,
) -> Result<Option<UnknownFence>, sqlx::Error> {
    let found = sqlx::query_file!("../../sql/inspect/read_unknown_fence.sql", machine.0)
        .fetch_optional(connection)
        .await?;
    Ok(found.and_then(|row| UnknownFence::from_report(row.at, row.fence, row.issued_fence)))
}

/// Records a fence that was never issued; returns whether it was recorded for the first time.
#[cfg(feature = "sealing")]
pub(crate) async fn record_unknown_fence(
    tx: &mut PgConnection,
    machine: MachineId,
    fence: i64,
) -> Result<bool, BmdbError> {
    let detail = format!(
        "its agent has seen fence {fence}, which this database never issued: the database was restored from a \
         backup, or another database works on the same machine. The machine receives no orders until that is resolved"
    );
    let result = sqlx::query_file_scalar!(
        "../../sql/history/insert_unknown_fence.sql",
        machine.0,
        fence,
        detail,
        ANSWER_MARGIN
    )
    .fetch_optional(tx)
    .await;
    Ok(result.context(REPORTING)?.is_some())
}
