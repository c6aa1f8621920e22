//! What every shepherd does for all of them: reap, sweep, forget, tell about brakes, watch the storage.
//!
//! Any number of shepherds may do it at once. None of it is needed for one
//! shepherd alone to be right; it is what makes the others' deaths, and defects
//! of ours, harmless.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::metrics::ByTable;
use crate::bmdb::retention::Retained;
use crate::manager::brakes::Brakes;
use crate::manager::control_loop::panic_text;
use crate::manager::metrics::HousekeepingMetrics;
use crate::model::ids::MachineId;

/// How often lost sessions are looked for.
pub const REAPER_PERIOD: Duration = Duration::from_secs(1);
/// How often brakes are told.
const BRAKE_PERIOD: Duration = Duration::from_secs(5);
/// Time between two sweeps of the whole fleet.
const SWEEP_PERIOD: Duration = Duration::from_mins(1);
/// Machines looked at in one statement of a sweep, and the pause after it: a fleet of 100,000
/// takes a minute and a few per cent of one database core.
const SWEEP_PAGE: i64 = 500;
const SWEEP_PAUSE: Duration = Duration::from_millis(200);
/// Time between two looks for what is too old.
const FORGET_PERIOD: Duration = Duration::from_mins(10);
/// The pause after a full batch: up to 4,000 rows a second. A fleet of 100,000 machines that are each
/// looked at every half hour writes 111 lines of history in one.
const FORGET_PAUSE: Duration = Duration::from_millis(250);
/// How often dead rows and old transactions are looked at.
const STORAGE_PERIOD: Duration = Duration::from_secs(15);

/// Frees what lost sessions held, until `stop`.
pub async fn reap(bmdb: Bmdb, metrics: HousekeepingMetrics, stop: CancellationToken) {
    while !stopped_after(&stop, REAPER_PERIOD).await {
        if let Some(reaped) = contained("looking for lost sessions", bmdb.reap()).await {
            metrics.sessions_expired.inc_by(reaped.sessions as u64);
            metrics.work_freed.inc_by(reaped.work as u64);
        }
    }
}

/// Tells which brakes are on, until `stop`.
pub async fn tell_brakes(brakes: Arc<Brakes>, stop: CancellationToken) {
    while !stopped_after(&stop, BRAKE_PERIOD).await {
        contained("looking at the recovery brakes", brakes.tell()).await;
    }
}

/// Recomputes everybody's schedule again and again, at once when the policy changes, until `stop`.
pub async fn sweep(bmdb: Bmdb, metrics: HousekeepingMetrics, stop: CancellationToken) {
    let mut policy = bmdb.policy_changes();
    while !stop.is_cancelled() {
        policy.mark_unchanged();
        contained("sweeping", sweep_once(&bmdb, &metrics, &stop)).await;
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(SWEEP_PERIOD) => {}
            // The handle that sends lives in `bmdb`, so this cannot fail.
            _ = policy.changed() => {}
        }
    }
}

async fn sweep_once(
    bmdb: &Bmdb,
    metrics: &HousekeepingMetrics,
    stop: &CancellationToken,
) -> Result<(), BmdbError> {
    let mut after = MachineId(Uuid::nil());
    let mut newer = 0;
    loop {
        let swept = bmdb.sweep_page(after, SWEEP_PAGE).await?;
        metrics.repaired.inc_by(swept.repaired as u64);
        metrics.drift.inc_by(swept.drifted as u64);
        newer += swept.newer;
        match swept.continue_after {
            Some(last) => after = last,
            None => break,
        }
        if stopped_after(stop, SWEEP_PAUSE).await {
            return Ok(());
        }
    }
    if newer > 0 {
        tracing::warn!(
            machines = newer,
            "a newer release decides for these machines, and they are left to it; upgrade this shepherd"
        );
    }
    Ok(())
}

/// Deletes what is older than the policy keeps, at once and then again and again, until `stop`.
pub async fn forget(bmdb: Bmdb, metrics: HousekeepingMetrics, stop: CancellationToken) {
    while !stop.is_cancelled() {
        contained("deleting what is old", forget_once(&bmdb, &metrics, &stop)).await;
        if stopped_after(&stop, FORGET_PERIOD).await {
            return;
        }
    }
}

/// Deletes all that is too old now, in batches with pauses. Returns how many rows that were.
pub async fn forget_once(
    bmdb: &Bmdb,
    metrics: &HousekeepingMetrics,
    stop: &CancellationToken,
) -> Result<u64, BmdbError> {
    let mut all = 0;
    for what in Retained::ALL {
        loop {
            let deleted = bmdb.forget(what, what.batch()).await?;
            metrics.forgotten.get_or_create(&ByTable { table: what.table() }).inc_by(deleted);
            all += deleted;
            if deleted < what.batch().unsigned_abs() {
                break;
            }
            if stopped_after(stop, FORGET_PAUSE).await {
                return Ok(all);
            }
        }
    }
    if all > 0 {
        tracing::info!(rows = all, "deleted what was older than history is kept");
    }
    Ok(all)
}

/// Shows how many dead rows there are and who keeps them from being removed, until `stop`. On a database
/// that keeps no such books it says so once and ends.
pub async fn watch_storage(bmdb: Bmdb, metrics: HousekeepingMetrics, stop: CancellationToken) {
    while !stop.is_cancelled() {
        let looked = contained("looking at what is stored", async {
            match watch_storage_once(&bmdb, &metrics).await {
                Err(error) if error.is_unknown_to_the_database() => Ok(Some(error)),
                other => other.map(|()| None),
            }
        });
        if let Some(Some(error)) = looked.await {
            tracing::info!(%error, "this database does not tell of dead rows and old transactions");
            return;
        }
        if stopped_after(&stop, STORAGE_PERIOD).await {
            return;
        }
    }
}

/// One look at the storage.
pub async fn watch_storage_once(bmdb: &Bmdb, metrics: &HousekeepingMetrics) -> Result<(), BmdbError> {
    let sample = bmdb.sample_storage().await?;
    for (table, dead) in sample.dead_rows {
        metrics.dead_rows.get_or_create(&ByTable { table }).set(dead);
    }
    metrics.oldest_transaction.set(sample.oldest_transaction.as_secs_f64());
    metrics.oldest_snapshot.set(sample.oldest_snapshot.as_secs_f64());
    Ok(())
}

/// One round. An error or a panic in it spoils that one: a task that ended here would be missed by nobody
/// until lost work stays lost.
async fn contained<T>(what: &str, round: impl Future<Output = Result<T, BmdbError>>) -> Option<T> {
    match AssertUnwindSafe(round).catch_unwind().await {
        Ok(Ok(done)) => Some(done),
        Ok(Err(error)) => {
            tracing::warn!(%error, "{what} ended early");
            None
        }
        Err(panic) => {
            tracing::error!(text = panic_text(&*panic), "{what} panicked; the next round is made");
            None
        }
    }
}

async fn stopped_after(stop: &CancellationToken, pause: Duration) -> bool {
    tokio::select! {
        () = stop.cancelled() => true,
        () = tokio::time::sleep(pause) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_round_that_fails_or_panics_is_not_the_last_one() {
        assert_eq!(contained("sweeping", async { Ok(7) }).await, Some(7));
        let failed = async { Err::<(), _>(BmdbError::SessionOver) };
        assert_eq!(contained("sweeping", failed).await, None);
        assert_eq!(contained("sweeping", async { blow_up() }).await, None);
    }

    fn blow_up() -> Result<(), BmdbError> {
        panic!("its own words")
    }
}
