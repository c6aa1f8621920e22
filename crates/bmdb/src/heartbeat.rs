//! Classifying and storing a heartbeat: new boot, duplicate, stale, retired, with reports.
//!
//! Nearly every heartbeat reports only that its agent still lives, and changes a time; those are stored in groups, see
//! `group_commit.rs`. This file is about the others, each of which is a transaction under the machine's lock that
//! changes facts and recomputes the schedule: the first heartbeat ever, the first of a boot, one of a machine that was
//! considered silent or waits for a person, one that carries a report, and the ones that are rejected.
//!
//! # Which heartbeat is newer
//!
//! Within a boot, `sequence` (milliseconds since boot) decides. A heartbeat with the number that is stored is the same
//! one sent again, because its answer was lost: it is answered again, and nothing is written.
//!
//! Between boots there is no order: a boot id is a random UUID. So the boot before the present one is stored. A boot
//! ends for good when the next one begins, therefore a heartbeat of the stored boot can only be late, whatever its
//! number, and is rejected. If it were taken for a new boot, a recovery that waits for another boot id as its proof
//! would end with a machine that is down, and the two boots would then replace each other with every heartbeat in
//! flight. One former boot is enough: an agent gives up a call after ten seconds, and no machine boots twice in that
//! time. The same rule separates two machines cloned from one disk, key and all: the machine that reported first is
//! rejected from the moment the other one reports, instead of both being believed in turns. The exception is an agent
//! that we installed since: then we spoke to that boot ourselves, and it is the present one.
//!
//! # Whose it is
//!
//! The machine id must be that of a machine whose agent was started with the key that the connection proved. Whichever
//! of the two is wrong, the answer is the same. If both are right and the machine is retired, its agent is answered so:
//! it concerns nobody else, and nobody else can query it.

use std::sync::Arc;

use sqlx::PgConnection;

use crate::connection::{Bmdb, DbContext};
use crate::error::BmdbError;
use crate::fact_change::{FactChange, NewHardwareReport, NewHeartbeat, apply_fact_change};
use crate::facts::read_snapshot;
use crate::policy::policy_at_version;
use crate::schedule::{lock_due_rows, record_event, reschedule_machine};
use crate::unknown_fence::record_unknown_fence;
use model::cluster::state::MemberReport;
use model::facts::MachineFacts;
use model::healing::{HealingStep, next_healing_step};
use model::ids::MachineId;
use model::phase::{Phase, phase_of};
use model::policy::Policy;
use model::process::{Lane, Process};
use model::release_report::ReleaseReport;
use model::time::Timestamp;

/// A heartbeat whose form is checked, but not yet its identity.
#[derive(Clone, Debug)]
pub struct ReceivedHeartbeat {
    /// The machine it claims to be from.
    pub machine: MachineId,
    /// The Ed25519 key that the connection proved.
    pub public_key: [u8; 32],
    /// Boot, agent process, number and version.
    pub beat: NewHeartbeat,
    /// The hardware report; `None` if it carries none.
    pub hardware: Option<NewHardwareReport>,
    /// The outcome of an installation; `None` if it carries none.
    pub installation: Option<InstallationOutcome>,
    /// The machine's state in its cluster; `None` if it carries none.
    pub cluster: Option<MemberReport>,
    /// The agent's release; `None` if it carries none.
    pub release: Option<ReleaseReport>,
    /// The highest fence of the access lane that its machine has seen; 0 when it does not report one.
    pub access_fence: i64,
}

impl ReceivedHeartbeat {
    /// Whether it carries something that must be durable before the answer.
    #[must_use]
    pub const fn has_report(&self) -> bool {
        self.hardware.is_some()
            || self.installation.is_some()
            || self.cluster.is_some()
            || self.release.is_some()
    }

    /// The same heartbeat without any report.
    #[must_use]
    pub fn without_report(&self) -> Self {
        Self { hardware: None, installation: None, cluster: None, release: None, ..self.clone() }
    }
}

/// The outcome of an installation as the agent reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstallationOutcome {
    /// Generation of the request that it answers.
    pub generation: i64,
    /// Why it failed; `None` when it did not.
    pub error: Option<String>,
}

/// The result of a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeartbeatOutcome {
    /// Stored, with everything it carried.
    Stored(AgentInstructions),
    /// It was stored before; nothing was written.
    Duplicate(AgentInstructions),
    /// A newer one is stored; nothing was written.
    Stale,
    /// No machine of that id has an agent with that key; nothing was written.
    Unauthenticated,
    /// The machine and its key belong together, and it is retired; nothing was written.
    Retired,
}

/// What the agent should do next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentInstructions {
    /// Send a hardware report: none of this agent process is stored.
    pub hardware_report: bool,
    /// Install this artefact; `None` if there is nothing to install.
    pub installation: Option<PendingInstallation>,
    /// Carry out this order about a cluster.
    pub cluster: Option<PendingClusterOrder>,
    /// Change to this release; `None` if there is none to change to.
    pub release: Option<PendingRelease>,
    /// A request for its logs waits ([`Bmdb::deliver_log_requests`]).
    pub logs: bool,
}

/// The reply to a plain heartbeat that was stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlainHeartbeatReply {
    /// What the agent should do next.
    pub instructions: AgentInstructions,
    /// The highest fence of the machine's access lane that this BMDB has issued.
    pub issued_fence: i64,
}

/// A requested installation whose outcome is not reported yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingInstallation {
    /// Generation of the request.
    pub generation: i64,
    /// URL of the artefact.
    pub artefact_url: String,
    /// SHA-256 of the artefact, 32 bytes.
    pub artefact_sha256: Vec<u8>,
}

/// A requested release of the role server whose outcome is not reported yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingRelease {
    /// Generation of the machine's order.
    pub generation: i64,
    /// SHA-256 of the program.
    pub sha256: Vec<u8>,
    /// How long the change may take, in seconds.
    pub deadline_seconds: i64,
}

impl PendingRelease {
    pub(crate) fn from_columns(
        generation: Option<i64>,
        sha256: Option<Vec<u8>>,
        deadline_seconds: Option<i64>,
    ) -> Option<Self> {
        Some(Self { generation: generation?, sha256: sha256?, deadline_seconds: deadline_seconds? })
    }
}

/// An issued order about a cluster whose outcome is not reported yet.
#[derive(Clone, PartialEq, Eq)]
pub struct PendingClusterOrder {
    /// Generation of the machine's order.
    pub generation: i64,
    /// The order, sealed for the machine.
    pub sealed: Vec<u8>,
}

impl std::fmt::Debug for PendingClusterOrder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PendingClusterOrder").field("generation", &self.generation).finish_non_exhaustive()
    }
}

impl PendingClusterOrder {
    pub(crate) fn from_columns(generation: Option<i64>, sealed: Option<Vec<u8>>) -> Option<Self> {
        Some(Self { generation: generation?, sealed: sealed? })
    }
}

impl PendingInstallation {
    pub(crate) fn from_columns(
        generation: Option<i64>,
        artefact_url: Option<String>,
        artefact_sha256: Option<Vec<u8>>,
    ) -> Option<Self> {
        Some(Self { generation: generation?, artefact_url: artefact_url?, artefact_sha256: artefact_sha256? })
    }
}

/// What a heartbeat is classified by besides the facts.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeartbeatContext {
    /// The boot before the one in the facts.
    pub(crate) previous_boot_id: Option<String>,
    /// The agent process whose hardware report is stored.
    pub(crate) report_incarnation: Option<String>,
    /// The machine's state in its cluster as last reported.
    pub(crate) cluster: Option<MemberReport>,
    /// The agent's release as last reported.
    pub(crate) release: Option<ReleaseReport>,
}

impl HeartbeatContext {
    /// Whether this state differs from the stored one. A machine that was never in a cluster repeats that with each
    /// report, and it is not worth storing.
    fn is_new_cluster_report(&self, report: &MemberReport) -> bool {
        match &self.cluster {
            Some(known) => known != report,
            None => *report != MemberReport::default(),
        }
    }
}

/// The class of a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HeartbeatVerdict {
    /// Its machine and key do not belong together.
    Unauthenticated,
    /// Of a machine that is retired.
    Retired,
    /// Older than what is stored, or another one with the same number.
    Stale,
    /// The stored one, sent again.
    Duplicate,
    /// A new heartbeat of the machine's agent.
    Accepted {
        /// The event and detail to record in the machine's history, if any.
        event: Option<(&'static str, String)>,
    },
}

/// Classifies `heartbeat` of a machine with these `facts`, which is in `phase`. Pure.
pub(crate) fn classify_heartbeat(
    facts: &MachineFacts,
    phase: Phase,
    known: &HeartbeatContext,
    heartbeat: &ReceivedHeartbeat,
) -> HeartbeatVerdict {
    let key_is_right =
        facts.agent_started.as_ref().is_some_and(|agent| agent.public_key == heartbeat.public_key);
    if !key_is_right {
        return HeartbeatVerdict::Unauthenticated;
    }
    if phase == Phase::Retired {
        return HeartbeatVerdict::Retired;
    }
    let beat = &heartbeat.beat;
    let Some(stored) = &facts.heartbeat else {
        let detail = format!("agent {} reports from boot {}", beat.version, beat.boot_id);
        return HeartbeatVerdict::Accepted { event: Some(("FirstHeartbeat", detail)) };
    };
    if stored.boot_id != beat.boot_id {
        if known.previous_boot_id.as_ref() == Some(&beat.boot_id)
            && !was_enrolled_in(facts, &beat.boot_id, stored.received_at)
        {
            return HeartbeatVerdict::Stale;
        }
        let detail = format!("boot {}, was {}", beat.boot_id, stored.boot_id);
        return HeartbeatVerdict::Accepted { event: Some(("Booted", detail)) };
    }
    if beat.sequence > stored.sequence {
        let was_lost = matches!(phase, Phase::Silent | Phase::Recovering);
        let event = was_lost.then(|| ("HeardAgain", format!("from the same boot {}", beat.boot_id)));
        return HeartbeatVerdict::Accepted { event };
    }
    if beat.sequence == stored.sequence
        && beat.incarnation == stored.incarnation
        && reports_are_stored(facts, known, heartbeat)
    {
        return HeartbeatVerdict::Duplicate;
    }
    HeartbeatVerdict::Stale
}

/// Whether the agent was enrolled in that boot after the last report, which then is of a boot before.
fn was_enrolled_in(facts: &MachineFacts, boot: &str, reported: Timestamp) -> bool {
    facts
        .agent_started
        .as_ref()
        .is_some_and(|agent| agent.boot_id.as_deref() == Some(boot) && agent.started_at > reported)
}

/// Whether everything that a repeated heartbeat carries was stored the first time. If not, it is no duplicate:
/// answering it as one would call a report durable that was never written.
fn reports_are_stored(facts: &MachineFacts, known: &HeartbeatContext, heartbeat: &ReceivedHeartbeat) -> bool {
    let hardware = heartbeat
        .hardware
        .as_ref()
        .is_none_or(|report| known.report_incarnation.as_ref() == Some(&report.incarnation));
    let installation =
        heartbeat.installation.as_ref().is_none_or(|outcome| !is_new_installation_outcome(facts, outcome));
    let cluster =
        heartbeat.cluster.as_ref().is_none_or(|member_report| !known.is_new_cluster_report(member_report));
    let release = heartbeat
        .release
        .as_ref()
        .is_none_or(|release_report| known.release.as_ref() == Some(release_report));
    hardware && installation && cluster && release
}

/// Whether an outcome answers the present request for the first time. An outcome of an older request is late and
/// ignored: written over the report of the present request, it would start that installation again.
fn is_new_installation_outcome(facts: &MachineFacts, outcome: &InstallationOutcome) -> bool {
    facts.installation_request.is_some_and(|request| request.generation == outcome.generation)
        && facts.installation_report.is_none_or(|report| report.generation != outcome.generation)
}

/// The changes that an accepted heartbeat makes.
fn heartbeat_changes(
    facts: &MachineFacts,
    known: &HeartbeatContext,
    heartbeat: &ReceivedHeartbeat,
) -> Vec<FactChange> {
    let mut changes = vec![FactChange::Heartbeat(heartbeat.beat.clone())];
    changes.extend(heartbeat.hardware.clone().map(FactChange::HardwareReport));
    let news = heartbeat.installation.as_ref().filter(|outcome| is_new_installation_outcome(facts, outcome));
    changes.extend(news.map(|outcome| FactChange::InstallationReport {
        generation: outcome.generation,
        error: outcome.error.clone(),
    }));
    let standing = heartbeat.cluster.clone().filter(|report| known.is_new_cluster_report(report));
    changes.extend(standing.map(FactChange::ClusterReport));
    let release = heartbeat.release.clone().filter(|report| known.release.as_ref() != Some(report));
    changes.extend(release.map(FactChange::ReleaseReport));
    changes
}

/// The changes that an accepted heartbeat makes to a machine that waits for a person, and their line of history.
fn healing_changes(
    facts: &MachineFacts,
    policy: &Policy,
    now: Timestamp,
) -> (Vec<FactChange>, Option<(&'static str, String)>) {
    let limit = policy.recovery_silence_timeout;
    match (next_healing_step(facts, policy, now), &facts.needs_human) {
        (Some(HealingStep::Started), _) => {
            let detail = format!(
                "it waits for a person, and is taken back when it has reported for {limit} without a gap"
            );
            (vec![FactChange::NeedsHumanReporting], Some(("HeardAgain", detail)))
        }
        (Some(HealingStep::Completed), Some(waited)) => {
            let mut changes =
                vec![FactChange::NeedsHumanCleared, FactChange::BackoffCleared(Process::Recovery)];
            changes.extend(facts.recovery.as_ref().map(|_| FactChange::RecoveryCleared));
            let detail = format!(
                "it has reported for {limit} without a gap; it waited for a person because {}",
                waited.reason
            );
            (changes, Some(("Healed", detail)))
        }
        _ => (Vec::new(), None),
    }
}

impl Bmdb {
    /// Classifies one heartbeat under its machine's lock, and stores it with what it carries.
    pub async fn store_heartbeat(
        &self,
        heartbeat: Arc<ReceivedHeartbeat>,
    ) -> Result<HeartbeatOutcome, BmdbError> {
        let bmdb = self.clone();
        let (machine, fence) = (heartbeat.machine, heartbeat.access_fence);
        let stored = self
            .transact("storing a heartbeat", move |tx| {
                let (bmdb, heartbeat) = (bmdb.clone(), heartbeat.clone());
                Box::pin(async move { store_heartbeat_in_tx(&bmdb, tx, &heartbeat).await })
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

    /// Where agents can report: the endpoints of every callback server alive, sorted, each once.
    pub async fn live_callback_endpoints(&self) -> Result<Vec<String>, BmdbError> {
        let found = self
            .statement("looking for callback servers", |pool| {
                Box::pin(async move {
                    sqlx::query_file_scalar!("../../sql/session/list_callback_servers.sql")
                        .fetch_all(pool)
                        .await
                })
            })
            .await?;
        let mut endpoints: Vec<String> = found
            .iter()
            .filter_map(|info| info.get("endpoints")?.as_array())
            .flatten()
            .filter_map(|endpoint| endpoint.as_str().map(str::to_owned))
            .collect();
        endpoints.sort_unstable();
        endpoints.dedup();
        Ok(endpoints)
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
        }),
        release: row.running_generation.zip(row.running_sha256).and_then(|(generation, sha256)| {
            Some(ReleaseReport { generation, sha256: sha256.try_into().ok()?, error: row.running_error })
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

#[cfg(test)]
mod tests {
    use super::*;
    use model::facts::{
        AgentStarted, HeartbeatFact as StoredHeartbeat, InstallationReport, InstallationRequest,
    };

    const KEY: [u8; 32] = [7; 32];

    fn facts_with_heartbeat(boot: &str, sequence: i64) -> MachineFacts {
        let at = Timestamp::UNIX_EPOCH;
        let mut facts = MachineFacts::empty(MachineId::generate(), at);
        facts.agent_started =
            Some(AgentStarted { started_at: at, public_key: KEY.to_vec(), boot_id: None, fence: 1 });
        facts.heartbeat = Some(StoredHeartbeat {
            received_at: at,
            boot_id: boot.to_owned(),
            incarnation: "i".to_owned(),
            sequence,
        });
        facts
    }

    fn received_heartbeat(machine: MachineId, boot: &str, sequence: i64) -> ReceivedHeartbeat {
        ReceivedHeartbeat {
            machine,
            public_key: KEY,
            beat: NewHeartbeat {
                boot_id: boot.to_owned(),
                incarnation: "i".to_owned(),
                sequence,
                version: "1".to_owned(),
            },
            hardware: None,
            installation: None,
            cluster: None,
            release: None,
            access_fence: 1,
        }
    }

    fn verdict_label(verdict: &HeartbeatVerdict) -> &'static str {
        match verdict {
            HeartbeatVerdict::Unauthenticated => "unauthenticated",
            HeartbeatVerdict::Retired => "retired",
            HeartbeatVerdict::Stale => "stale",
            HeartbeatVerdict::Duplicate => "repeated",
            HeartbeatVerdict::Accepted { event: None } => "plain",
            HeartbeatVerdict::Accepted { event: Some((event, _)) } => event,
        }
    }

    #[test]
    fn heartbeats_are_classified() {
        let facts = facts_with_heartbeat("b", 10);
        let machine = facts.machine;
        let mut never = facts.clone();
        never.heartbeat = None;
        let mut no_agent = facts.clone();
        no_agent.agent_started = None;
        let mut other_key = facts.clone();
        other_key.agent_started.as_mut().unwrap().public_key = vec![8; 32];
        let ready = Phase::Ready;
        for (name, facts, phase, boot, sequence, expected) in [
            ("newer", &facts, ready, "b", 11, "plain"),
            ("same", &facts, ready, "b", 10, "repeated"),
            ("older", &facts, ready, "b", 9, "stale"),
            ("first", &never, Phase::AgentStarting, "b", 1, "FirstHeartbeat"),
            ("first of a silent one", &never, Phase::Silent, "b", 1, "FirstHeartbeat"),
            ("another boot, lower number", &facts, ready, "c", 3, "Booted"),
            ("another boot while recovering", &facts, Phase::Recovering, "c", 3, "Booted"),
            ("the boot before", &facts, ready, "a", 99, "stale"),
            ("newer of a silent one", &facts, Phase::Silent, "b", 11, "HeardAgain"),
            ("newer of a recovering one", &facts, Phase::Recovering, "b", 11, "HeardAgain"),
            ("older of a silent one", &facts, Phase::Silent, "b", 9, "stale"),
            ("same of a silent one", &facts, Phase::Silent, "b", 10, "repeated"),
            ("no agent", &no_agent, ready, "b", 11, "unauthenticated"),
            ("another key", &other_key, ready, "b", 11, "unauthenticated"),
            ("retired", &facts, Phase::Retired, "b", 11, "retired"),
            ("retired, another boot", &facts, Phase::Retired, "c", 1, "retired"),
            ("retired, before its first report", &never, Phase::Retired, "b", 1, "retired"),
            ("another key of a retired one", &other_key, Phase::Retired, "b", 11, "unauthenticated"),
            ("on its way out", &facts, Phase::Retiring, "b", 11, "plain"),
            ("another key, same number", &other_key, ready, "b", 10, "unauthenticated"),
        ] {
            let known =
                HeartbeatContext { previous_boot_id: Some("a".to_owned()), ..HeartbeatContext::default() };
            let verdict =
                classify_heartbeat(facts, phase, &known, &received_heartbeat(machine, boot, sequence));
            assert_eq!(verdict_label(&verdict), expected, "{name}");
        }
    }

    #[test]
    fn boot_of_a_later_enrolment_is_not_a_previous_boot() {
        let known =
            HeartbeatContext { previous_boot_id: Some("a".to_owned()), ..HeartbeatContext::default() };
        for (name, enrolled, boot, expected) in [
            ("enrolled in it since", 60, Some("a"), "Booted"),
            ("enrolled in it before the last report", -60, Some("a"), "stale"),
            ("enrolled in another one", 60, Some("b"), "stale"),
            ("enrolled in one that is not known", 60, None, "stale"),
        ] {
            let mut facts = facts_with_heartbeat("b", 10);
            let agent = facts.agent_started.as_mut().unwrap();
            agent.started_at = Timestamp::from_timestamp(enrolled, 0).unwrap();
            agent.boot_id = boot.map(str::to_owned);
            let verdict = classify_heartbeat(
                &facts,
                Phase::Recovering,
                &known,
                &received_heartbeat(facts.machine, "a", 99),
            );
            assert_eq!(verdict_label(&verdict), expected, "{name}");
        }
    }

    #[test]
    fn same_sequence_of_another_process_is_stale() {
        let facts = facts_with_heartbeat("b", 10);
        let mut other = received_heartbeat(facts.machine, "b", 10);
        other.beat.incarnation = "j".to_owned();
        assert_eq!(
            classify_heartbeat(&facts, Phase::Ready, &HeartbeatContext::default(), &other),
            HeartbeatVerdict::Stale
        );
    }

    #[test]
    fn duplicate_with_an_unstored_report_is_stale() {
        let mut facts = facts_with_heartbeat("b", 10);
        facts.installation_request = Some(InstallationRequest { generation: 2 });
        let mut again = received_heartbeat(facts.machine, "b", 10);
        again.installation = Some(InstallationOutcome { generation: 2, error: None });
        assert_eq!(
            classify_heartbeat(&facts, Phase::Ready, &HeartbeatContext::default(), &again),
            HeartbeatVerdict::Stale
        );
        facts.installation_report = Some(InstallationReport { generation: 2, succeeded: true });
        assert_eq!(
            classify_heartbeat(&facts, Phase::Ready, &HeartbeatContext::default(), &again),
            HeartbeatVerdict::Duplicate
        );
    }

    #[test]
    fn late_installation_report_changes_nothing() {
        let mut facts = facts_with_heartbeat("b", 10);
        facts.installation_request = Some(InstallationRequest { generation: 2 });
        let outcome = |generation| InstallationOutcome { generation, error: None };
        let mut with = |stored: Option<i64>, generation| {
            facts.installation_report =
                stored.map(|generation| InstallationReport { generation, succeeded: false });
            let mut beat = received_heartbeat(facts.machine, "b", 11);
            beat.installation = Some(outcome(generation));
            heartbeat_changes(&facts, &HeartbeatContext::default(), &beat).len() == 2
        };
        for (stored, generation, written) in [
            (None, 2, true),
            (Some(1), 2, true),
            (Some(2), 2, false),
            (Some(2), 1, false),
            (None, 1, false),
            (None, 3, false),
        ] {
            assert_eq!(with(stored, generation), written, "{stored:?} {generation}");
        }
    }
}
