//! Storing a heartbeat that is not plain, under its machine's lock.

use std::sync::Arc;

use sqlx::PgConnection;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext};
use crate::engine::fact_change::apply_fact_change;
use crate::engine::facts::read_snapshot;
use crate::engine::host_findings::read_findings;
use crate::engine::policy::policy_at_version;
use crate::engine::schedule::{lock_due_rows, record_event, reschedule_machine};
use crate::engine::unknown_fence::record_unknown_fence;
use crate::machine::heartbeat::classification::{
    HeartbeatContext, HeartbeatVerdict, classify_heartbeat, healing_changes, heartbeat_changes,
};
use crate::machine::heartbeat::{
    AgentInstructions, HeartbeatOutcome, PendingClusterOrder, PendingInstallation, PendingRelease,
    ReceivedHeartbeat,
};
use model::cluster::authority_theft::AuthorityStep;
use model::cluster::restore_programs::EtcdPrograms;
use model::cluster::state::MemberReport;
use model::facts::MachineFacts;
use model::phase::phase_of;
use model::process::Lane;
use model::roll_out::ReleaseReport;

impl Bmdb {
    /// Classifies one heartbeat under its machine's lock, and stores it with what it carries.
    pub async fn store_heartbeat(
        &self,
        heartbeat: Arc<ReceivedHeartbeat>,
    ) -> Result<HeartbeatOutcome, BmdbError> {
        let bmdb = self.clone();
        let (machine, fence) = (heartbeat.machine, heartbeat.access_fence);
        let stored = self
            .transact_with("storing a heartbeat", (bmdb, heartbeat), |tx, (bmdb, heartbeat)| {
                Box::pin(store_heartbeat_in_tx(bmdb, tx, heartbeat))
            })
            .await;
        match stored {
            Err(BmdbError::NoSuchMachine(_)) => Ok(HeartbeatOutcome::Unauthenticated),
            Err(error) => Err(error),
            Ok((outcome, newer_fence)) => {
                if newer_fence {
                    self.warn_of_unknown_fence(machine, fence);
                }
                Ok(outcome)
            }
        }
    }
}

/// The result of a heartbeat, and whether it reported for the first time a fence that this BMDB never issued.
async fn store_heartbeat_in_tx(
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    heartbeat: &ReceivedHeartbeat,
) -> Result<(HeartbeatOutcome, bool), BmdbError> {
    let machine = heartbeat.machine;
    let rows = lock_due_rows(tx, machine).await?;
    let snapshot = read_snapshot(tx, machine).await?;
    let row = sqlx::query_file!("../../sql/heartbeat/read_context.sql", machine.0)
        .fetch_one(&mut *tx)
        .await
        .context("reading what a heartbeat is judged by")?;
    let policy = policy_at_version(bmdb, tx, snapshot.policy_version).await?;
    let phase = phase_of(&snapshot.facts, &policy, snapshot.now);
    let pending = PendingInstallation::from_columns(row.generation, row.artefact_url, row.artefact_sha256);
    let order = PendingClusterOrder::from_columns(row.cluster_generation, row.cluster_order);
    let release =
        PendingRelease::from_columns(row.release_generation, row.release_sha256, row.release_deadline);
    let known = HeartbeatContext {
        previous_boot_id: row.previous_boot_id,
        report_incarnation: row.report_incarnation,
        cluster: row.reported_generation.map(|generation| MemberReport {
            generation,
            key: row.reported_key.and_then(|key| key.try_into().ok()),
            ca_certificate: row.reported_ca,
            address: row.reported_address,
            error: row.reported_error,
            epoch: row.reported_epoch.and_then(|epoch| epoch.try_into().ok()).unwrap_or(0),
            next_authority: row.reported_next_authority,
            next_authority_step: row.reported_authority_step.and_then(AuthorityStep::from_number),
            programs: EtcdPrograms { etcd: row.reported_etcd, etcdutl: row.reported_etcdutl },
            secrets: row.reported_secrets.and_then(|value| serde_json::from_value(value).ok()),
        }),
        release: row.running_generation.zip(row.running_sha256).and_then(|(generation, sha256)| {
            Some(ReleaseReport {
                generation,
                sha256: sha256.try_into().ok()?,
                error: row.running_error,
                findings: read_findings(row.running_findings),
            })
        }),
    };
    let pending = (pending, order, release, row.wants_logs);
    let event = match classify_heartbeat(&snapshot.facts, phase, &known, heartbeat) {
        HeartbeatVerdict::Unauthenticated => return Ok((HeartbeatOutcome::Unauthenticated, false)),
        HeartbeatVerdict::Retired => return Ok((HeartbeatOutcome::Retired, false)),
        HeartbeatVerdict::Stale => return Ok((HeartbeatOutcome::Stale, false)),
        HeartbeatVerdict::Duplicate => {
            let wants = agent_instructions(&snapshot.facts, &known, heartbeat, pending);
            return Ok((HeartbeatOutcome::Duplicate(wants), false));
        }
        HeartbeatVerdict::Accepted { event } => event,
    };
    let given = rows.iter().filter(|row| row.lane == Lane::Access).map(|row| row.fence);
    let given = given.chain(snapshot.facts.agent_started.as_ref().map(|agent| agent.fence)).max();
    let newer = Some(heartbeat.access_fence) > given
        && record_unknown_fence(tx, machine, heartbeat.access_fence).await?;
    let (healed, healing_event) = healing_changes(&snapshot.facts, &policy, snapshot.now);
    for change in heartbeat_changes(&snapshot.facts, &known, heartbeat).iter().chain(&healed) {
        apply_fact_change(tx, machine, change).await?;
    }
    let after = reschedule_machine(bmdb, tx, machine, &rows).await?;
    for (event, detail) in event.into_iter().chain(healing_event) {
        record_event(tx, machine, event, &detail).await?;
    }
    if let Some(outcome) = &heartbeat.installation
        && after.snapshot.facts.installation_report.map(|report| report.generation)
            != Some(outcome.generation)
    {
        let detail = format!("of request {}, which is not the present one", outcome.generation);
        record_event(tx, machine, "LateInstallationReport", &detail).await?;
    }
    Ok((
        HeartbeatOutcome::Stored(agent_instructions(&after.snapshot.facts, &known, heartbeat, pending)),
        newer,
    ))
}

fn agent_instructions(
    facts: &MachineFacts,
    known: &HeartbeatContext,
    heartbeat: &ReceivedHeartbeat,
    (pending_installation, about_cluster, release, logs): (
        Option<PendingInstallation>,
        Option<PendingClusterOrder>,
        Option<PendingRelease>,
        bool,
    ),
) -> AgentInstructions {
    let reported = facts.installation_report.map(|report| report.generation);
    let standing = heartbeat.cluster.as_ref().or(known.cluster.as_ref());
    let running = heartbeat.release.as_ref().or(known.release.as_ref());
    AgentInstructions {
        hardware_report: heartbeat.hardware.is_none()
            && known.report_incarnation.as_ref() != Some(&heartbeat.beat.incarnation),
        installation: pending_installation
            .filter(|pending_installation| reported != Some(pending_installation.generation)),
        cluster: about_cluster
            .filter(|order| standing.is_none_or(|standing| standing.generation != order.generation)),
        release: release.filter(|pending_release| {
            running.is_none_or(|running| running.generation != pending_release.generation)
        }),
        logs,
    }
}
