//! Reading facts: rows of the view `machine_snapshot` into `MachineFacts`.
//!
//! Decoding tolerates values of a newer release: an unknown hold counts as a hold on everything, the backoff of an
//! unknown process is skipped, an unknown provider status or obstacle is retained as text. An impossible value is an
//! error.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext};
use model::backoff::BackoffFact;
use model::facts::{
    AgentStarted, HeartbeatFact, Hold, HoldScope, InstallationReport, InstallationRequest, MachineFacts,
    NeedsHuman, Postponement, PowerOrder, ProviderRecord, Quarantine, RecordedIntent, Recovery,
    RecoveryAction, ReleaseOrder, Retirement, Waiver,
};
use model::ids::{IntentId, MachineId};
use model::needs_human::Obstacle;
use model::policy::DisruptionKind;
use model::power_order::PowerOrderKind;
use model::priority::Priority;
use model::process::Process;
use model::provider_status::ProviderStatus;
use model::signed_artefact::key_replacement::KeyReplacement;
use model::time::Timestamp;

/// One row of the view `machine_snapshot`, with the clock and the listeners of that moment.
#[derive(Debug, Clone)]
struct FactsRow {
    machine_id: Uuid,
    created_at: Timestamp,
    provider: Option<String>,
    provider_id: Option<String>,
    reservation: Option<String>,
    address: Option<String>,
    ssh_port: Option<i64>,
    ssh_user: Option<String>,
    location: Option<String>,
    status: Option<String>,
    provided_at: Option<Timestamp>,
    looked_at: Option<Timestamp>,
    unchanged: Option<bool>,
    agent_started_at: Option<Timestamp>,
    agent_public_key: Option<Vec<u8>>,
    agent_boot_id: Option<String>,
    agent_fence: Option<i64>,
    heartbeat_at: Option<Timestamp>,
    heartbeat_boot_id: Option<String>,
    heartbeat_incarnation: Option<String>,
    heartbeat_sequence: Option<i64>,
    request_generation: Option<i64>,
    report_generation: Option<i64>,
    report_succeeded: Option<bool>,
    hold_scope: Option<String>,
    hold_reason: Option<String>,
    hold_by: Option<String>,
    hold_until: Option<Timestamp>,
    quarantine_since: Option<Timestamp>,
    quarantine_reason: Option<String>,
    needs_human_since: Option<Timestamp>,
    needs_human_reason: Option<String>,
    needs_human_obstacle: Option<String>,
    needs_human_reporting_since: Option<Timestamp>,
    recovery_started_at: Option<Timestamp>,
    recovery_rung: Option<i64>,
    recovery_tries: Option<i64>,
    recovery_step: Option<String>,
    recovery_acted_at: Option<Timestamp>,
    recovery_deadline: Option<Timestamp>,
    recovery_boot_id_before: Option<String>,
    recovery_next_at: Option<Timestamp>,
    recovery_note: Option<String>,
    recovery_obstacle: Option<String>,
    retirement_reason: Option<String>,
    retirement_requested_at: Option<Timestamp>,
    retirement_finished_at: Option<Timestamp>,
    retirement: Option<serde_json::Value>,
    power_order: Option<serde_json::Value>,
    key_replacement: Option<serde_json::Value>,
    priority: Option<serde_json::Value>,
    backoffs: Option<serde_json::Value>,
    postponements: Option<serde_json::Value>,
    listening_since: Option<Timestamp>,
    now: Timestamp,
    policy_version: i64,
}

/// The facts of a machine at one moment.
#[derive(Clone, Debug)]
pub struct MachineSnapshot {
    /// The machine's facts at `now`.
    pub facts: MachineFacts,
    /// The database's clock when they were read.
    pub now: Timestamp,
    /// Version of the policy in force then.
    pub policy_version: i64,
}

impl Bmdb {
    /// Reads the facts of one machine, without any lock.
    pub async fn read_machine_snapshot(&self, machine: MachineId) -> Result<MachineSnapshot, BmdbError> {
        self.statement("reading facts", move |pool| Box::pin(read_facts_row(pool, machine.0)))
            .await?
            .ok_or_else(|| BmdbError::NoSuchMachine(machine.to_string()))?
            .into_snapshot()
    }

    /// Reads a page of machines in the order of their ids, from the one after `after`.
    pub async fn read_snapshot_page(
        &self,
        after: MachineId,
        limit: i64,
    ) -> Result<Vec<MachineSnapshot>, BmdbError> {
        let Some(first) = after.0.as_u128().checked_add(1).map(Uuid::from_u128) else {
            return Ok(Vec::new());
        };
        self.statement("reading a page of facts", move |pool| {
            Box::pin(read_facts_rows(pool, first, Uuid::max(), limit))
        })
        .await?
        .into_iter()
        .map(FactsRow::into_snapshot)
        .collect()
    }
}

/// Reads one machine's facts on a connection that may hold locks.
pub(crate) async fn read_snapshot(
    connection: &mut PgConnection,
    machine: MachineId,
) -> Result<MachineSnapshot, BmdbError> {
    read_facts_row(connection, machine.0)
        .await
        .context("reading facts")?
        .ok_or_else(|| BmdbError::NoSuchMachine(machine.to_string()))?
        .into_snapshot()
}

async fn read_facts_row(
    connection: &mut PgConnection,
    machine: Uuid,
) -> Result<Option<FactsRow>, sqlx::Error> {
    sqlx::query_file_as!(FactsRow, "../../sql/facts/read_machine.sql", machine)
        .fetch_optional(connection)
        .await
}

async fn read_facts_rows(
    connection: &mut PgConnection,
    first: Uuid,
    last: Uuid,
    limit: i64,
) -> Result<Vec<FactsRow>, sqlx::Error> {
    sqlx::query_file_as!(FactsRow, "../../sql/facts/read_page.sql", first, last, limit)
        .fetch_all(connection)
        .await
}

#[derive(Deserialize)]
struct BackoffRow {
    process: String,
    failures: u32,
    last_interval_ms: u64,
    until: Timestamp,
    cause: String,
}

#[derive(Deserialize)]
struct PostponedRow {
    process: String,
    until: Timestamp,
    reason: String,
    decided_at: String,
}

impl FactsRow {
    fn into_snapshot(self) -> Result<MachineSnapshot, BmdbError> {
        let (now, policy_version) = (self.now, self.policy_version);
        Ok(MachineSnapshot { facts: self.into_facts()?, now, policy_version })
    }

    fn into_facts(self) -> Result<MachineFacts, BmdbError> {
        let machine = MachineId(self.machine_id);
        let mut facts = MachineFacts::empty(machine, self.created_at);
        facts.provider_record = self.provided()?;
        facts.agent_started =
            self.agent_started_at.zip(self.agent_public_key.clone()).map(|(at, public_key)| AgentStarted {
                started_at: at,
                public_key,
                boot_id: self.agent_boot_id.clone(),
                fence: self.agent_fence.unwrap_or_default(),
            });
        facts.heartbeat = self.heartbeat_at.map(|at| HeartbeatFact {
            received_at: at,
            boot_id: self.heartbeat_boot_id.clone().unwrap_or_default(),
            incarnation: self.heartbeat_incarnation.clone().unwrap_or_default(),
            sequence: self.heartbeat_sequence.unwrap_or_default(),
        });
        facts.installation_request =
            self.request_generation.map(|generation| InstallationRequest { generation });
        facts.installation_report = self
            .report_generation
            .zip(self.report_succeeded)
            .map(|(generation, succeeded)| InstallationReport { generation, succeeded });
        facts.hold = self.hold_scope.as_ref().map(|scope| Hold {
            scope: HoldScope::ALL
                .into_iter()
                .find(|known| known.as_str() == scope)
                .unwrap_or(HoldScope::Everything),
            reason: self.hold_reason.clone().unwrap_or_default(),
            by: self.hold_by.clone().unwrap_or_default(),
            until: self.hold_until,
        });
        facts.quarantine = self
            .quarantine_since
            .map(|since| Quarantine { since, reason: self.quarantine_reason.clone().unwrap_or_default() });
        facts.needs_human = self.needs_human_since.map(|since| NeedsHuman {
            since,
            reason: self.needs_human_reason.clone().unwrap_or_default(),
            obstacle: self.needs_human_obstacle.as_deref().map_or(Obstacle::Unknown, Obstacle::from),
            reporting_since: self.needs_human_reporting_since,
        });
        facts.recovery = self.recovery()?;
        facts.retirement = self.retirement()?;
        facts.power_order = self.power_order()?;
        facts.key_replacement = self.key_replacement()?;
        facts.priority = self.priority.and_then(parse_priority);
        facts.backoffs = parse_backoffs(self.backoffs)?;
        facts.postponements = parse_postponements(self.postponements)?;
        facts.listening_since = self.listening_since;
        Ok(facts)
    }

    fn retirement(&self) -> Result<Option<Retirement>, BmdbError> {
        let Some((requested_at, row)) = self.retirement_requested_at.zip(self.retirement.clone()) else {
            return Ok(None);
        };
        let row: RetirementRow = serde_json::from_value(row).map_err(|error| {
            BmdbError::Corrupt(format!(
                "the retirement of {}, which cannot be read: {error}",
                self.machine_id
            ))
        })?;
        let by = row.wipe_waived_by.unwrap_or_default();
        Ok(Some(Retirement {
            reason: self.retirement_reason.clone().unwrap_or_default(),
            by: row.by,
            requested_at,
            wipe: row.wipe,
            wipe_waived: row.wipe_waived_at.map(|at| Waiver { waived_at: at, by }),
            release: row
                .release_intent
                .zip(row.release_ordered_at)
                .map(|(intent, at)| ReleaseOrder { intent, recorded_at: at }),
            finished_at: self.retirement_finished_at,
            outcome: row.outcome,
            listed_since: row.listed_since,
        }))
    }

    fn power_order(&self) -> Result<Option<PowerOrder>, BmdbError> {
        let corrupt = |error: &dyn std::fmt::Display| {
            BmdbError::Corrupt(format!(
                "the power order of {}, which cannot be read: {error}",
                self.machine_id
            ))
        };
        let Some(row) = self.power_order.clone() else { return Ok(None) };
        let row: PowerOrderRow = serde_json::from_value(row).map_err(|error| corrupt(&error))?;
        Ok(Some(PowerOrder {
            kind: row.switch.parse::<PowerOrderKind>().map_err(|error| corrupt(&error))?,
            reason: row.reason,
            by: row.by,
            ordered_at: row.at,
            intent: row
                .intent
                .zip(row.begun_at)
                .map(|(intent, at)| RecordedIntent { intent, recorded_at: at }),
        }))
    }

    fn key_replacement(&self) -> Result<Option<KeyReplacement>, BmdbError> {
        let Some(row) = self.key_replacement.clone() else { return Ok(None) };
        let row: KeyReplacementRow = serde_json::from_value(row).map_err(|error| {
            BmdbError::Corrupt(format!(
                "the order about the signing keys of {}, which cannot be read: {error}",
                self.machine_id
            ))
        })?;
        let KeyReplacementRow { keys, reason, by, at, until } = row;
        let keys = keys.lines().map(str::to_owned).collect();
        Ok(Some(KeyReplacement { keys, reason, by, ordered_at: at, expires_at: until }))
    }

    fn provided(&self) -> Result<Option<ProviderRecord>, BmdbError> {
        let Some((provider, at)) = self.provider.clone().zip(self.provided_at) else { return Ok(None) };
        let ssh_port = self.ssh_port.map(u16::try_from).transpose().map_err(|_| {
            BmdbError::Corrupt(format!("SSH port {:?} of {}", self.ssh_port, self.machine_id))
        })?;
        Ok(Some(ProviderRecord {
            provider,
            provider_id: self.provider_id.clone().unwrap_or_default(),
            reservation: self.reservation.clone(),
            address: self.address.clone(),
            ssh_port,
            ssh_user: self.ssh_user.clone(),
            location: self.location.clone(),
            status: ProviderStatus::from(self.status.as_deref().unwrap_or("Unknown")),
            acquired_at: at,
            polled_at: self.looked_at,
            unchanged: self.unchanged.unwrap_or_default(),
        }))
    }

    fn recovery(&self) -> Result<Option<Recovery>, BmdbError> {
        let Some((started_at, next_at)) = self.recovery_started_at.zip(self.recovery_next_at) else {
            return Ok(None);
        };
        let corrupt = |what: String| BmdbError::Corrupt(format!("{what} of {}", self.machine_id));
        let acted = match (&self.recovery_step, self.recovery_acted_at, self.recovery_deadline) {
            (Some(step), Some(at), Some(deadline)) => Some(RecoveryAction {
                step: step.parse::<DisruptionKind>().map_err(|error| corrupt(error.to_string()))?,
                acted_at: at,
                deadline,
                boot_id_before: self.recovery_boot_id_before.clone(),
            }),
            _ => None,
        };
        let count = |value: Option<i64>| {
            u32::try_from(value.unwrap_or_default())
                .map_err(|_| corrupt("a negative count in the ladder".into()))
        };
        Ok(Some(Recovery {
            started_at,
            rung: count(self.recovery_rung)? as usize,
            last_action: acted,
            attempts: count(self.recovery_tries)?,
            next_check_at: next_at,
            note: self.recovery_note.clone().unwrap_or_default(),
            obstacle: self.recovery_obstacle.as_deref().map(Obstacle::from),
        }))
    }
}

/// The parts of a retirement that the view has no columns for.
#[derive(Deserialize)]
struct RetirementRow {
    by: String,
    wipe: bool,
    wipe_waived_at: Option<Timestamp>,
    wipe_waived_by: Option<String>,
    release_ordered_at: Option<Timestamp>,
    release_intent: Option<IntentId>,
    outcome: Option<String>,
    listed_since: Option<Timestamp>,
}

#[derive(Deserialize)]
struct PowerOrderRow {
    switch: String,
    reason: String,
    by: String,
    at: Timestamp,
    intent: Option<IntentId>,
    begun_at: Option<Timestamp>,
}

#[derive(Deserialize)]
struct KeyReplacementRow {
    keys: String,
    reason: String,
    by: String,
    at: Timestamp,
    until: Timestamp,
}

#[derive(Deserialize)]
struct PriorityRow {
    level: String,
    reason: String,
    by: String,
    since: Timestamp,
    until: Option<Timestamp>,
}

/// `None` for a level that only a newer release knows.
fn parse_priority(json: serde_json::Value) -> Option<Priority> {
    let row: PriorityRow = serde_json::from_value(json).ok()?;
    let PriorityRow { level, reason, by, since, until } = row;
    Some(Priority { level: level.parse().ok()?, reason, by, since, until })
}

fn parse_backoffs(json: Option<serde_json::Value>) -> Result<BTreeMap<Process, BackoffFact>, BmdbError> {
    let rows: Vec<BackoffRow> = parse_json_list(json)?;
    Ok(rows
        .into_iter()
        .filter_map(|row| {
            let fact = BackoffFact {
                failures: row.failures,
                last_interval: Duration::from_millis(row.last_interval_ms),
                until: row.until,
                cause: row.cause,
            };
            Some((row.process.parse().ok()?, fact))
        })
        .collect())
}

fn parse_postponements(
    json: Option<serde_json::Value>,
) -> Result<BTreeMap<Process, Postponement>, BmdbError> {
    let rows: Vec<PostponedRow> = parse_json_list(json)?;
    Ok(rows
        .into_iter()
        .filter_map(|row| {
            let fact = Postponement { until: row.until, reason: row.reason, decided_at: row.decided_at };
            Some((row.process.parse().ok()?, fact))
        })
        .collect())
}

fn parse_json_list<T: serde::de::DeserializeOwned>(
    json: Option<serde_json::Value>,
) -> Result<Vec<T>, BmdbError> {
    json.map_or(Ok(Vec::new()), serde_json::from_value)
        .map_err(|error| BmdbError::Corrupt(format!("a list of waits that cannot be read: {error}")))
}
