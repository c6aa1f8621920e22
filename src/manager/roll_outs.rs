//! Roll-out task: orders and evaluates releases under a named lease, in one shepherd at a time.
//!
//! A pass reads a roll-out with everything that affects its plan, plans ([`crate::model::roll_out`]), and executes the
//! plan. Nothing is kept between two passes: the next pass reads everything that a shepherd which died in the middle of
//! one has left.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::connection::error::BmdbError;
use crate::bmdb::engine::named_lease::NamedLease;
use crate::bmdb::engine::session::{Session, Sessions};
use crate::bmdb::fleet::roll_out::transitions::LEASE;
use crate::manager::catch_panic::catch_panic;
use crate::manager::failpoint;
use crate::manager::metrics::ManagerMetrics;
use crate::model::roll_out::{RollOutStep, control_plane_cluster, disrupted_clusters, plan_roll_out};

/// Component name of its sessions.
pub const COMPONENT: &str = "roll-out";
/// Time between two passes over all roll-outs.
const PASS_INTERVAL: Duration = Duration::from_secs(1);
/// Time between two searches for roll-outs, for a shepherd that works on none.
const IDLE_INTERVAL: Duration = Duration::from_secs(2);

/// Works on every roll-out until `stop`.
pub async fn run_roll_outs(sessions: Sessions, metrics: ManagerMetrics, stop: CancellationToken) {
    while !stop.is_cancelled() {
        match sessions.bmdb().list_active_roll_outs().await {
            Ok(active) if active.is_empty() => {}
            Ok(_) => run_under_session(&sessions, &metrics, &stop).await,
            Err(error) => tracing::warn!(%error, "cannot look for roll-outs; trying again"),
        }
        stop.run_until_cancelled(tokio::time::sleep(IDLE_INTERVAL)).await;
    }
}

/// Works on roll-outs as long as any are active, or waits while another shepherd holds the lease.
async fn run_under_session(sessions: &Sessions, metrics: &ManagerMetrics, stop: &CancellationToken) {
    // Never cancelled half-way: a session that commits after this task has stopped would stay open.
    let session = match sessions.start(COMPONENT, serde_json::json!({})).await {
        Ok(session) => session,
        Err(error) => return tracing::warn!(%error, "cannot start a session for roll-outs"),
    };
    metrics.record_session_start(COMPONENT);
    let bmdb = sessions.bmdb();
    while !stop.is_cancelled() && !session.lost().is_cancelled() {
        match bmdb.acquire_named_lease(&session, LEASE.0, LEASE.1).await {
            Ok(Some(lease)) => {
                run_passes(bmdb, &session, &lease, stop).await;
                if let Err(error) = bmdb.release_named_lease(&lease).await {
                    tracing::warn!(%error, "cannot release a lease; the reaper will");
                }
                break;
            }
            // Another shepherd holds the lease and works on the roll-outs.
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "cannot take the lease of roll-outs; trying again"),
        }
        stop.run_until_cancelled(tokio::time::sleep(IDLE_INTERVAL)).await;
        if bmdb.list_active_roll_outs().await.is_ok_and(|active| active.is_empty()) {
            break;
        }
    }
    if !session.lost().is_cancelled()
        && let Err(error) =
            sessions.close(&session, "this shepherd does not work on roll-outs any more").await
    {
        tracing::warn!(%error, "cannot close a session; the reaper will");
    }
}

async fn run_passes(bmdb: &Bmdb, session: &Session, lease: &NamedLease, stop: &CancellationToken) {
    let lost = session.lost().clone();
    loop {
        let passed = tokio::select! {
            () = stop.cancelled() => return,
            () = lost.cancelled() => return,
            passed = catch_panic(run_pass(bmdb, lease)) => passed,
        };
        match passed {
            Ok(Ok(true)) => {}
            Ok(Ok(false) | Err(BmdbError::SessionEnded | BmdbError::LeaseLost)) => return,
            Ok(Err(error)) => tracing::warn!(%error, "a pass over roll-outs failed"),
            Err(text) => tracing::error!(text, "a pass over roll-outs panicked; the next one is made"),
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = lost.cancelled() => return,
            () = tokio::time::sleep(PASS_INTERVAL) => {}
        }
    }
}

/// Makes one pass over each roll-out. Returns whether any is active.
async fn run_pass(bmdb: &Bmdb, lease: &NamedLease) -> Result<bool, BmdbError> {
    let active = bmdb.list_active_roll_outs().await?;
    let mut all = Vec::new();
    for id in &active {
        all.extend(bmdb.read_active_roll_out(id).await?.map(|found| (id, found)));
    }
    // Two roll-outs may each have a machine of the same control plane.
    let mut requested: BTreeSet<(&String, String)> = BTreeSet::new();
    for (id, found) in &all {
        requested.extend(disrupted_clusters(&found.members).map(|cluster| (*id, cluster.to_owned())));
    }
    for (id, found) in &all {
        let elsewhere =
            requested.iter().filter(|(other, _)| other != id).map(|(_, cluster)| cluster.clone()).collect();
        let planned =
            plan_roll_out(&found.roll_out, &found.members, &elsewhere, found.budget_remaining, found.now);
        bmdb.set_roll_out_wait_reasons(lease, id, planned.wait_reasons.into_iter().collect()).await?;
        for step in planned.steps {
            failpoint::hit(COMPONENT, "step-started");
            tracing::info!(update = id, ?step, "a step of a roll-out");
            match step {
                RollOutStep::Order(machine) => {
                    let members = found.members.iter().filter(|member| member.machine == machine);
                    requested.extend(
                        members.filter_map(control_plane_cluster).map(|cluster| (*id, cluster.to_owned())),
                    );
                    bmdb.order_release(lease, (id, found), machine).await?;
                }
                RollOutStep::Conclude(machine, state, text) => {
                    bmdb.record_release_result(lease, id, (machine, state), &text).await?;
                }
                RollOutStep::Pause(why) => bmdb.pause_or_finish_roll_out(lease, id, Some(&why)).await?,
                RollOutStep::Finish => bmdb.pause_or_finish_roll_out(lease, id, None).await?,
            }
        }
    }
    Ok(!active.is_empty())
}
