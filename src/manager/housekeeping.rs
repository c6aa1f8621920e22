//! Housekeeping tasks: reaper, sweeper, retention, brake recorder, storage monitor.
//!
//! Any number of shepherds may run them at once. A single shepherd is correct without them. They make the death of
//! other shepherds, and our own defects, harmless.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::connection::error::BmdbError;
use crate::bmdb::fleet::retention::RetainedKind;
use crate::bmdb::metrics::labels::ByTable;
use crate::manager::catch_panic::catch_panic;
use crate::manager::metrics::HousekeepingMetrics;
use crate::manager::recovery_brakes::RecoveryBrakes;
use crate::model::ids::MachineId;
use crate::model::kubernetes::version::ReleaseVersion;
use crate::model::program_versions::postgres_warnings;

/// Time between two searches for lost sessions.
pub const REAPER_PERIOD: Duration = Duration::from_secs(1);
/// Time between two records of the recovery brakes.
const BRAKE_PERIOD: Duration = Duration::from_secs(5);
/// Time between two sweeps of the whole fleet.
const SWEEP_PERIOD: Duration = Duration::from_mins(1);
/// Machines in one statement of a sweep, and the pause after it: a fleet of 100,000 takes a minute and a few per cent
/// of one database core.
const SWEEP_PAGE: i64 = 500;
const SWEEP_PAUSE: Duration = Duration::from_millis(200);
/// Time between two deletions of old rows.
const RETENTION_PERIOD: Duration = Duration::from_mins(10);
/// The pause after a full batch: up to 4,000 rows a second. A fleet of 100,000 machines, each updated every half hour,
/// writes 111 rows of history a second.
const RETENTION_PAUSE: Duration = Duration::from_millis(250);
/// Time between two samples of dead rows, old transactions and the limits of the server.
const STORAGE_PERIOD: Duration = Duration::from_secs(15);

/// Frees the work of lost sessions until `stop`.
pub async fn run_reaper(bmdb: Bmdb, metrics: HousekeepingMetrics, stop: CancellationToken) {
    while !sleep_or_stop(&stop, REAPER_PERIOD).await {
        if let Some(reaped) = run_round("looking for lost sessions", bmdb.reap()).await {
            metrics.sessions_expired.inc_by(reaped.sessions as u64);
            metrics.work_freed.inc_by(reaped.work as u64);
        }
    }
}

/// Records which brakes are engaged until `stop`.
pub async fn run_brake_recorder(brakes: Arc<RecoveryBrakes>, stop: CancellationToken) {
    while !sleep_or_stop(&stop, BRAKE_PERIOD).await {
        run_round("looking at the recovery brakes", brakes.record_brakes()).await;
    }
}

/// Recomputes all schedules periodically, and at once when the policy changes, until `stop`.
pub async fn run_sweeper(bmdb: Bmdb, metrics: HousekeepingMetrics, stop: CancellationToken) {
    let mut policy = bmdb.policy_changes();
    while !stop.is_cancelled() {
        policy.mark_unchanged();
        run_round("sweeping", sweep_once(&bmdb, &metrics, &stop)).await;
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(SWEEP_PERIOD) => {}
            // The sender of this channel is part of `bmdb`, so this cannot fail.
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
        metrics.schedules_repaired.inc_by(swept.repaired as u64);
        metrics.schedule_mismatches.inc_by(swept.mismatches as u64);
        newer += swept.newer_rules;
        match swept.continue_after {
            Some(last) => after = last,
            None => break,
        }
        if sleep_or_stop(stop, SWEEP_PAUSE).await {
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

/// Deletes what is older than the policy's retention, at once and then periodically, until `stop`.
pub async fn run_retention(bmdb: Bmdb, metrics: HousekeepingMetrics, stop: CancellationToken) {
    while !stop.is_cancelled() {
        run_round("deleting what is old", delete_expired_once(&bmdb, &metrics, &stop)).await;
        if sleep_or_stop(&stop, RETENTION_PERIOD).await {
            return;
        }
    }
}

/// Deletes everything that is too old now, in batches with pauses. Returns the number of rows deleted.
pub async fn delete_expired_once(
    bmdb: &Bmdb,
    metrics: &HousekeepingMetrics,
    stop: &CancellationToken,
) -> Result<u64, BmdbError> {
    let mut all = 0;
    for what in RetainedKind::ALL {
        loop {
            let deleted = bmdb.delete_expired(what, what.batch()).await?;
            metrics.rows_deleted.get_or_create(&ByTable { table: what.table() }).inc_by(deleted);
            all += deleted;
            if deleted < what.batch().unsigned_abs() {
                break;
            }
            if sleep_or_stop(stop, RETENTION_PAUSE).await {
                return Ok(all);
            }
        }
    }
    if all > 0 {
        tracing::info!(rows = all, "deleted what was older than history is kept");
    }
    Ok(all)
}

/// Shows how many dead rows exist, what prevents their removal and how close the server is to its limits, until `stop`. On a
/// database without these statistics it logs that once and ends.
pub async fn run_storage_monitor(bmdb: Bmdb, metrics: HousekeepingMetrics, stop: CancellationToken) {
    let (mut limit_failure, mut version) = (None, bmdb.server_version());
    while !stop.is_cancelled() {
        let sampled = run_round("looking at what is stored", async {
            match sample_storage_once(&bmdb, &metrics).await {
                Err(error) if error.is_undefined_object() => Ok(Some(error)),
                other => other.map(|()| None),
            }
        });
        if let Some(Some(error)) = sampled.await {
            tracing::info!(%error, "this database has no statistics of dead rows and old transactions");
            return;
        }
        run_round("reading the limits of the database server", async {
            sample_limits(&bmdb, &metrics, &mut limit_failure, &mut version).await;
            Ok(())
        })
        .await;
        if sleep_or_stop(&stop, STORAGE_PERIOD).await {
            return;
        }
    }
}

/// Samples the limits of the server, and logs the published faults of another version than before. A failure is logged when it begins and when its reason changes, because it lasts where
/// the role lacks a right. It is an issue, too. What was not read has no metric meanwhile.
async fn sample_limits(
    bmdb: &Bmdb,
    metrics: &HousekeepingMetrics,
    failure: &mut Option<String>,
    version: &mut Option<ReleaseVersion>,
) {
    let read = bmdb.read_database_limits().await;
    let other = read.as_ref().ok().and_then(|limits| limits.version).filter(|read| *version != Some(*read));
    if let Some(other) = other {
        *version = Some(other);
        for warning in postgres_warnings(other) {
            tracing::warn!("the database is on a server of another version than before: {warning}");
        }
    }
    metrics.database_limits.record(read.as_ref().ok());
    let reason = match read {
        Ok(limits) => limits.wal_failure,
        Err(error) => Some(error.to_string()),
    };
    if let Some(error) = reason.as_ref().filter(|_| reason != *failure) {
        tracing::warn!(error, "limits of the database server cannot be read");
    }
    *failure = reason;
}

/// Samples the storage once.
pub async fn sample_storage_once(bmdb: &Bmdb, metrics: &HousekeepingMetrics) -> Result<(), BmdbError> {
    let sample = bmdb.read_vacuum_stats().await?;
    for (table, dead) in sample.dead_rows {
        metrics.dead_rows.get_or_create(&ByTable { table }).set(dead);
    }
    metrics.oldest_transaction.set(sample.oldest_transaction.as_secs_f64());
    metrics.oldest_snapshot.set(sample.oldest_snapshot.as_secs_f64());
    Ok(())
}

/// Runs one round. An error or a panic spoils only that round: nobody would notice the end of this task until lost work
/// stays lost.
async fn run_round<T>(what: &str, round: impl Future<Output = Result<T, BmdbError>>) -> Option<T> {
    match catch_panic(round).await {
        Ok(Ok(done)) => Some(done),
        Ok(Err(error)) => {
            tracing::warn!(%error, "{what} ended early");
            None
        }
        Err(text) => {
            tracing::error!(text, "{what} panicked; the next round is made");
            None
        }
    }
}

async fn sleep_or_stop(stop: &CancellationToken, pause: Duration) -> bool {
    tokio::select! {
        () = stop.cancelled() => true,
        () = tokio::time::sleep(pause) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn failed_or_panicked_round_does_not_end_the_task() {
        assert_eq!(run_round("sweeping", async { Ok(7) }).await, Some(7));
        let failed = async { Err::<(), _>(BmdbError::SessionEnded) };
        assert_eq!(run_round("sweeping", failed).await, None);
        assert_eq!(run_round("sweeping", async { blow_up() }).await, None);
    }

    fn blow_up() -> Result<(), BmdbError> {
        panic!("its own words")
    }
}
