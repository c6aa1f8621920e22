//! What every shepherd does for all of them: reap, sweep, tell about brakes.
//!
//! Any number of shepherds may do it at once. None of it is needed for one
//! shepherd alone to be right; it is what makes the others' deaths, and defects
//! of ours, harmless.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::manager::brakes::Brakes;
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

/// Frees what lost sessions held, until `stop`.
pub async fn reap(bmdb: Bmdb, metrics: HousekeepingMetrics, stop: CancellationToken) {
    while !stopped_after(&stop, REAPER_PERIOD).await {
        match bmdb.reap().await {
            Ok(reaped) => {
                metrics.sessions_expired.inc_by(reaped.sessions as u64);
                metrics.work_freed.inc_by(reaped.work as u64);
            }
            Err(error) => tracing::warn!(%error, "cannot look for lost sessions"),
        }
    }
}

/// Tells which brakes are on, until `stop`.
pub async fn tell_brakes(brakes: Arc<Brakes>, stop: CancellationToken) {
    while !stopped_after(&stop, BRAKE_PERIOD).await {
        if let Err(error) = brakes.tell().await {
            tracing::warn!(%error, "cannot look at the recovery brakes");
        }
    }
}

/// Recomputes everybody's schedule again and again, at once when the policy changes, until `stop`.
pub async fn sweep(bmdb: Bmdb, metrics: HousekeepingMetrics, stop: CancellationToken) {
    let mut policy = bmdb.policy_changes();
    while !stop.is_cancelled() {
        policy.mark_unchanged();
        if let Err(error) = sweep_once(&bmdb, &metrics, &stop).await {
            tracing::warn!(%error, "a sweep ended early");
        }
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
    loop {
        let swept = bmdb.sweep_page(after, SWEEP_PAGE).await?;
        metrics.repaired.inc_by(swept.repaired as u64);
        metrics.drift.inc_by(swept.drifted as u64);
        match swept.continue_after {
            Some(last) => after = last,
            None => return Ok(()),
        }
        if stopped_after(stop, SWEEP_PAUSE).await {
            return Ok(());
        }
    }
}

async fn stopped_after(stop: &CancellationToken, pause: Duration) -> bool {
    tokio::select! {
        () = stop.cancelled() => true,
        () = tokio::time::sleep(pause) => false,
    }
}
