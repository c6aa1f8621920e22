//! The sampler: counts the fleet once a minute, and shows the newest count.
//!
//! Every shepherd looks every few seconds for a newer sample, by one row of the database, and shows it. Where
//! there is none of this minute it takes the lease for counting, counts, writes the count down and gives the lease
//! back; whoever finds the lease taken leaves it to the one who has it. So of any number of shepherds one counts,
//! and when that one dies another does in the next minute, once its session is over.
//!
//! [`is_due`] and [`Tally`] decide; here is only what they need and what follows.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::lease::NamedLease;
use crate::bmdb::sample::{LEASE, before_all};
use crate::bmdb::session::{Session, Sessions};
use crate::manager::failpoint;
use crate::manager::fleet_metrics::FleetMetrics;
use crate::manager::metrics::ManagerMetrics;
use crate::model::fleet_sample::{FleetSample, Tally, is_due};
use crate::model::time::Timestamp;

const COMPONENT: &str = "sampler";
/// How often a newer sample is looked for.
const LOOK: Duration = Duration::from_secs(5);
/// The pause after something failed.
const PAUSE: Duration = Duration::from_secs(1);
/// Machines that one statement reads, and the pause after it: a million machines are counted in less than a
/// minute, and a hundred thousand at a few per cent of one core.
const PAGE: i64 = 1_000;
const PAGE_PAUSE: Duration = Duration::from_millis(20);

/// Counts and shows until `stop`. Its session is closed when it returns.
pub async fn run(sessions: Sessions, metrics: ManagerMetrics, stop: CancellationToken) {
    let mut known = None;
    while !stop.is_cancelled() {
        // Never given up half-way: the statement goes on without us, and a session that commits after we have
        // stopped stays open until the reaper finds it.
        match sessions.start(COMPONENT, serde_json::json!({})).await {
            Ok(session) => {
                metrics.session_started(COMPONENT);
                look_again_and_again(&session, sessions.bmdb(), &metrics.fleet, &mut known, &stop).await;
                if !session.lost().is_cancelled()
                    && let Err(error) = sessions.close(&session, "the sampler stopped").await
                {
                    tracing::warn!(%error, "cannot close a session; the reaper will");
                }
            }
            Err(error) => tracing::warn!(%error, "cannot start a session to count the fleet; trying again"),
        }
        stop.run_until_cancelled(tokio::time::sleep(PAUSE)).await;
    }
}

/// Looks under one session, until it is over or `stop`.
async fn look_again_and_again(
    session: &Session,
    bmdb: &Bmdb,
    fleet: &FleetMetrics,
    known: &mut Option<Timestamp>,
    stop: &CancellationToken,
) {
    while !stop.is_cancelled() && !session.lost().is_cancelled() {
        if let Err(error) = look(session, bmdb, fleet, known, stop).await {
            tracing::warn!(%error, "cannot count the fleet; trying again");
        }
        tokio::select! {
            () = stop.cancelled() => {}
            () = session.lost().cancelled() => {}
            () = tokio::time::sleep(LOOK) => {}
        }
    }
}

/// One look: shows what is new, and counts if it is time.
async fn look(
    session: &Session,
    bmdb: &Bmdb,
    fleet: &FleetMetrics,
    known: &mut Option<Timestamp>,
    stop: &CancellationToken,
) -> Result<(), BmdbError> {
    let latest = show_newest(bmdb, fleet, known).await?;
    if !is_due(*known, latest) {
        return Ok(());
    }
    let (kind, name) = LEASE;
    let Some(lease) = bmdb.take_lease(session, kind, name).await? else { return Ok(()) };
    failpoint::pass(COMPONENT, "leased");
    // Whoever had the lease until now may have counted.
    let now = show_newest(bmdb, fleet, known).await?;
    let counted = if is_due(*known, now) { count_under(bmdb, &lease, now, stop).await } else { Ok(()) };
    bmdb.give_back_lease(&lease).await?;
    match counted {
        Err(BmdbError::SessionOver | BmdbError::LeaseLost) => Ok(()),
        other => other,
    }?;
    show_newest(bmdb, fleet, known).await.map(drop)
}

/// Shows the newest sample if it is another one than was shown. Returns the database's time.
async fn show_newest(
    bmdb: &Bmdb,
    fleet: &FleetMetrics,
    known: &mut Option<Timestamp>,
) -> Result<Timestamp, BmdbError> {
    let latest = bmdb.latest_sample(*known).await?;
    if let (Some((minute, taken_at)), Some(sample)) = (latest.of, latest.sample) {
        fleet.show(taken_at, sample);
        *known = Some(minute);
    }
    Ok(latest.now)
}

async fn count_under(
    bmdb: &Bmdb,
    lease: &NamedLease,
    now: Timestamp,
    stop: &CancellationToken,
) -> Result<(), BmdbError> {
    let Some(sample) = count(bmdb, stop).await? else { return Ok(()) };
    failpoint::pass(COMPONENT, "counted");
    bmdb.store_sample(lease, now, &sample).await.map(drop)
}

/// Counts the fleet; `None` when it was stopped in the middle.
pub async fn count(bmdb: &Bmdb, stop: &CancellationToken) -> Result<Option<FleetSample>, BmdbError> {
    bmdb.read_policy().await?;
    let (_, policy) = bmdb.policy();
    let mut tally = Tally::new((*policy).clone());
    let mut after = before_all();
    loop {
        let (machines, last) = bmdb.seen_page(after, PAGE).await?;
        for machine in &machines {
            tally.add(machine);
        }
        let Some(last) = last else { break };
        after = last;
        if stop.run_until_cancelled(tokio::time::sleep(PAGE_PAUSE)).await.is_none() {
            return Ok(None);
        }
    }
    for cluster in &bmdb.seen_clusters().await? {
        tally.add_cluster(cluster);
    }
    let (work, brakes) = bmdb.seen_beside().await?;
    Ok(Some(tally.finish(work, brakes)))
}
