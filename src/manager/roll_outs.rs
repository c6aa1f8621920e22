//! Roll-outs of releases: one shepherd at a time, under a named lease, asks machines as was planned.
//!
//! A pass reads a roll-out with everything that decides about it, plans ([`crate::model::roll_out`]), and does what was
//! planned. Nothing is remembered between two passes: a shepherd that dies in the middle of one leaves nothing that the
//! next one does not read.

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures::FutureExt as _;
use tokio_util::sync::CancellationToken;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::lease::NamedLease;
use crate::bmdb::roll_out_work::LEASE;
use crate::bmdb::session::{Session, Sessions};
use crate::manager::control_loop::panic_text;
use crate::manager::failpoint;
use crate::manager::metrics::ManagerMetrics;
use crate::model::roll_out::{Step, control_plane_of, disturbed, plan};

/// Who starts its sessions.
pub const COMPONENT: &str = "roll-out";
/// How often roll-outs are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// How often somebody who has no roll-out to see to looks for one.
const IDLE: Duration = Duration::from_secs(2);

/// Sees to every roll-out until `stop`.
pub async fn run(sessions: Sessions, metrics: ManagerMetrics, stop: CancellationToken) {
    while !stop.is_cancelled() {
        match sessions.bmdb().active_roll_outs().await {
            Ok(active) if active.is_empty() => {}
            Ok(_) => see_to_them(&sessions, &metrics, &stop).await,
            Err(error) => tracing::warn!(%error, "cannot look for roll-outs; trying again"),
        }
        stop.run_until_cancelled(tokio::time::sleep(IDLE)).await;
    }
}

/// Sees to roll-outs for as long as there are any, or waits for as long as somebody else does.
async fn see_to_them(sessions: &Sessions, metrics: &ManagerMetrics, stop: &CancellationToken) {
    // Never given up half-way: a session that commits after we have stopped would stay open.
    let session = match sessions.start(COMPONENT, serde_json::json!({})).await {
        Ok(session) => session,
        Err(error) => return tracing::warn!(%error, "cannot start a session to see to roll-outs"),
    };
    metrics.session_started(COMPONENT);
    let bmdb = sessions.bmdb();
    while !stop.is_cancelled() && !session.lost().is_cancelled() {
        match bmdb.take_lease(&session, LEASE.0, LEASE.1).await {
            Ok(Some(lease)) => {
                hold(bmdb, &session, &lease, stop).await;
                if let Err(error) = bmdb.give_back_lease(&lease).await {
                    tracing::warn!(%error, "cannot give back a lease; the reaper will");
                }
                break;
            }
            // Whoever has it sees to them.
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "cannot take the lease of roll-outs; trying again"),
        }
        stop.run_until_cancelled(tokio::time::sleep(IDLE)).await;
        if bmdb.active_roll_outs().await.is_ok_and(|active| active.is_empty()) {
            break;
        }
    }
    if !session.lost().is_cancelled()
        && let Err(error) = sessions.close(&session, "no roll-out is seen to any more").await
    {
        tracing::warn!(%error, "cannot close a session; the reaper will");
    }
}

async fn hold(bmdb: &Bmdb, session: &Session, lease: &NamedLease, stop: &CancellationToken) {
    let lost = session.lost().clone();
    loop {
        let passed = tokio::select! {
            () = stop.cancelled() => return,
            () = lost.cancelled() => return,
            passed = AssertUnwindSafe(passes(bmdb, lease)).catch_unwind() => passed,
        };
        match passed {
            Ok(Ok(true)) => {}
            Ok(Ok(false) | Err(BmdbError::SessionOver | BmdbError::LeaseLost)) => return,
            Ok(Err(error)) => tracing::warn!(%error, "a pass over roll-outs failed"),
            Err(panic) => {
                let text = panic_text(&*panic);
                tracing::error!(text, "a pass over roll-outs panicked; the next one is made");
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = lost.cancelled() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
    }
}

/// One pass over each; says whether there was one.
async fn passes(bmdb: &Bmdb, lease: &NamedLease) -> Result<bool, BmdbError> {
    let active = bmdb.active_roll_outs().await?;
    let mut all = Vec::new();
    for id in &active {
        all.extend(bmdb.found_roll_out(id).await?.map(|found| (id, found)));
    }
    // Of one control plane two roll-outs may each have a machine.
    let mut asked: BTreeSet<(&String, String)> = BTreeSet::new();
    for (id, found) in &all {
        asked.extend(disturbed(&found.members).map(|cluster| (*id, cluster.to_owned())));
    }
    for (id, found) in &all {
        let elsewhere =
            asked.iter().filter(|(other, _)| other != id).map(|(_, cluster)| cluster.clone()).collect();
        let planned = plan(&found.roll_out, &found.members, &elsewhere, found.may_begin, found.now);
        bmdb.said_of_roll_out(lease, id, planned.waits.into_iter().collect()).await?;
        for step in planned.steps {
            failpoint::pass(COMPONENT, "step");
            tracing::info!(update = id, ?step, "a step of a roll-out");
            match step {
                Step::Order(machine) => {
                    let members = found.members.iter().filter(|member| member.machine == machine);
                    asked.extend(
                        members.filter_map(control_plane_of).map(|cluster| (*id, cluster.to_owned())),
                    );
                    bmdb.order_release(lease, (id, found), machine).await?;
                }
                Step::Conclude(machine, state, said) => {
                    bmdb.conclude_release(lease, id, (machine, state), &said).await?;
                }
                Step::Pause(why) => bmdb.stand_still_or_finish(lease, id, Some(&why)).await?,
                Step::Finish => bmdb.stand_still_or_finish(lease, id, None).await?,
            }
        }
    }
    Ok(!active.is_empty())
}
