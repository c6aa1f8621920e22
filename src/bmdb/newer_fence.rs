//! A fence that this BMDB never gave.
//!
//! A heartbeat says the highest fence that its machine has seen. One beyond what
//! this BMDB has given was given by what it has forgotten: it was restored from
//! a backup, or another database works on the same machines. Nothing is refused
//! for it, the machine does that itself; but it is told once, in the log, in a
//! metric, in the machine's history and by `why`, before anybody sends the
//! machine an order in vain.

use sqlx::PgConnection;

use crate::bmdb::connection::{Bmdb, Doing};
use crate::bmdb::error::BmdbError;
use crate::bmdb::schedule::lock;
use crate::model::ids::MachineId;

const TELLING: &str = "telling of a newer fence";

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
            backup? Stop every shepherd and declare it with `shepherdctl declare restored`");
    }
}

/// Tells of a fence that was never given; says whether it was told for the first time.
pub(crate) async fn newer_fence(
    tx: &mut PgConnection,
    machine: MachineId,
    fence: i64,
) -> Result<bool, BmdbError> {
    let detail = format!(
        "its agent was enrolled under fence {fence}, which this database never gave: it was restored from a backup, or \
         another database works on the same machine"
    );
    let told = sqlx::query_file_scalar!("sql/heartbeat/newer_fence.sql", machine.0, fence, detail)
        .fetch_optional(tx)
        .await;
    Ok(told.doing(TELLING)?.is_some())
}
