//! Sampler: counts the fleet once a minute under a named lease, and shows the newest count.
//!
//! Every shepherd looks every few seconds for a newer sample, by reading one row, and shows it. If no sample of this
//! minute exists, it takes the lease for counting, counts, stores the sample and releases the lease. A shepherd that
//! finds the lease taken leaves the count to the holder. So only one of any number of shepherds counts, and if that one
//! dies, another counts in the next minute, once its session has ended.
//!
//! [`is_sample_due`] and [`FleetTally`] decide. This module has only their inputs and effects.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::connection::error::BmdbError;
use crate::bmdb::engine::named_lease::NamedLease;
use crate::bmdb::engine::session::{Session, Sessions};
use crate::bmdb::fleet::sample::{LEASE, first_cursor};
use crate::manager::failpoint;
use crate::manager::fleet_metrics::FleetMetrics;
use crate::manager::metrics::ManagerMetrics;
use crate::manager::process_resources::{ProcessSignals, publish_signals};
use crate::model::fleet_sample::{FleetSample, FleetTally, is_sample_due};
use crate::model::time::Timestamp;

const COMPONENT: &str = "sampler";
/// Time between two searches for a newer sample.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// The pause after a failure.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Machines that one statement reads, and the pause after it: a million machines are counted in less than a minute, and
/// a hundred thousand at a few per cent of one core.
const PAGE_SIZE: i64 = 1_000;
const PAGE_PAUSE: Duration = Duration::from_millis(20);

/// Counts and shows samples until `stop`. Closes its session before it returns.
///
/// Its session also carries the signals of this process, because every shepherd has exactly one such session.
pub async fn run_sampler(
    sessions: Sessions,
    metrics: ManagerMetrics,
    signals: ProcessSignals,
    stop: CancellationToken,
) {
    let mut known = None;
    while !stop.is_cancelled() {
        // Never cancelled half-way: the statement would continue, and a session that commits after this task has
        // stopped would stay open until the reaper finds it.
        match sessions.start(COMPONENT, serde_json::json!({})).await {
            Ok(session) => {
                metrics.record_session_start(COMPONENT);
                let published = publish_signals(&session, &sessions, signals.clone());
                tokio::select! {
                    () = run_under_session(&session, sessions.bmdb(), &metrics.fleet, &mut known, &stop) => {}
                    never = published => match never {},
                }
                if !session.lost().is_cancelled()
                    && let Err(error) = sessions.close(&session, "the sampler stopped").await
                {
                    tracing::warn!(%error, "cannot close a session; the reaper will");
                }
            }
            Err(error) => tracing::warn!(%error, "cannot start a session to count the fleet; trying again"),
        }
        stop.run_until_cancelled(tokio::time::sleep(RETRY_PAUSE)).await;
    }
}

/// Checks periodically under one session, until the session ends or until `stop`.
async fn run_under_session(
    session: &Session,
    bmdb: &Bmdb,
    fleet: &FleetMetrics,
    known: &mut Option<Timestamp>,
    stop: &CancellationToken,
) {
    while !stop.is_cancelled() && !session.lost().is_cancelled() {
        if let Err(error) = sample_if_due(session, bmdb, fleet, known, stop).await {
            tracing::warn!(%error, "cannot count the fleet; trying again");
        }
        tokio::select! {
            () = stop.cancelled() => {}
            () = session.lost().cancelled() => {}
            () = tokio::time::sleep(CHECK_INTERVAL) => {}
        }
    }
}

/// Checks once: shows a newer sample, and counts if one is due.
async fn sample_if_due(
    session: &Session,
    bmdb: &Bmdb,
    fleet: &FleetMetrics,
    known: &mut Option<Timestamp>,
    stop: &CancellationToken,
) -> Result<(), BmdbError> {
    let latest = publish_newest(bmdb, fleet, known).await?;
    if !is_sample_due(*known, latest) {
        return Ok(());
    }
    let (kind, name) = LEASE;
    let Some(lease) = bmdb.acquire_named_lease(session, kind, name).await? else { return Ok(()) };
    failpoint::hit(COMPONENT, "leased");
    // The previous holder of the lease may have counted already.
    let now = publish_newest(bmdb, fleet, known).await?;
    let counted =
        if is_sample_due(*known, now) { count_and_store(bmdb, &lease, now, stop).await } else { Ok(()) };
    bmdb.release_named_lease(&lease).await?;
    match counted {
        Err(BmdbError::SessionEnded | BmdbError::LeaseLost) => Ok(()),
        other => other,
    }?;
    publish_newest(bmdb, fleet, known).await.map(drop)
}

/// Shows the newest sample if it has not been shown yet. Returns the database's time.
async fn publish_newest(
    bmdb: &Bmdb,
    fleet: &FleetMetrics,
    known: &mut Option<Timestamp>,
) -> Result<Timestamp, BmdbError> {
    let latest = bmdb.read_latest_sample(*known).await?;
    if let (Some((minute, taken_at)), Some(sample)) = (latest.minute_and_taken_at, latest.sample) {
        fleet.set_sample(taken_at, sample);
        *known = Some(minute);
    }
    Ok(latest.now)
}

async fn count_and_store(
    bmdb: &Bmdb,
    lease: &NamedLease,
    now: Timestamp,
    stop: &CancellationToken,
) -> Result<(), BmdbError> {
    let Some(sample) = count_fleet(bmdb, stop).await? else { return Ok(()) };
    failpoint::hit(COMPONENT, "sampled");
    bmdb.store_sample(lease, now, &sample).await.map(drop)
}

/// Counts the fleet. `None` if it was stopped in the middle.
pub async fn count_fleet(bmdb: &Bmdb, stop: &CancellationToken) -> Result<Option<FleetSample>, BmdbError> {
    bmdb.read_policy().await?;
    let (_, policy) = bmdb.policy();
    let mut tally = FleetTally::new((*policy).clone());
    let mut after = first_cursor();
    loop {
        let (machines, last) = bmdb.read_machine_sample_page(after, PAGE_SIZE).await?;
        for machine in &machines {
            tally.add_machine(machine);
        }
        let Some(last) = last else { break };
        after = last;
        if stop.run_until_cancelled(tokio::time::sleep(PAGE_PAUSE)).await.is_none() {
            return Ok(None);
        }
    }
    for cluster in &bmdb.read_cluster_samples().await? {
        tally.add_cluster(cluster);
    }
    let (work, brakes) = bmdb.read_work_and_brakes().await?;
    Ok(Some(tally.into_sample(work, brakes)))
}
