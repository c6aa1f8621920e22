//! State transitions of a roll-out, written under the roll-out lease.
//!
//! Every write checks the lease in its own transaction. Changes of a machine are written under that machine's lock and
//! recorded in its history. That transaction also decides again whatever an operator may have objected to since.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext as _};
use crate::engine::facts::read_snapshot;
use crate::engine::intent::{lock_disruption_context, record_ordered_disruption};
use crate::engine::named_lease::NamedLease;
use crate::engine::policy::policy_at_version;
use crate::engine::schedule::record_event;
use crate::fleet::roll_out::row::{end_roll_out, lock_roll_out, set_roll_out_paused};
use model::disruption::{DisruptionContext, may_disrupt};
use model::ids::MachineId;
use model::phase::{Phase, phase_of};
use model::policy::DisruptionKind;
use model::roll_out::{ReleaseReport, RollOut, RollOutMachine, RollOutMachineState, RollOutNode};
use model::time::Timestamp;

/// Kind and name of the named lease.
pub const LEASE: (&str, &str) = ("roll-out", "all");
const READING: &str = "reading a roll-out";
const REQUESTING: &str = "ordering a machine to run a release";

/// A roll-out with everything that decisions need.
#[derive(Clone, Debug)]
pub struct ActiveRollOut {
    /// The roll-out without its machines.
    pub roll_out: RollOut,
    /// Every machine of the roll-out.
    pub members: Vec<RollOutMachine>,
    /// How many more machines the disruption budget allows now.
    pub budget_remaining: usize,
    /// How long each machine may take, in seconds.
    pub deadline_seconds: i64,
    /// Name of the release, for people.
    pub release: String,
    /// The database's clock when this was read.
    pub now: Timestamp,
}

impl Bmdb {
    /// Ids of roll-outs that have not ended, oldest first.
    pub async fn list_active_roll_outs(&self) -> Result<Vec<String>, BmdbError> {
        self.statement("looking for roll-outs", |connection| {
            Box::pin(
                sqlx::query_scalar!(
                    "SELECT roll_out_id FROM roll_out
                     WHERE ended_at IS NULL ORDER BY created_at, roll_out_id"
                )
                .fetch_all(connection),
            )
        })
        .await
    }

    /// Digest of the release that a machine was ordered to change to and did, as its agent reports it; lower-case
    /// hexadecimal.
    pub async fn read_updated_release(&self, machine: MachineId) -> Result<Option<String>, BmdbError> {
        let digest = self
            .statement("looking which release a machine was updated to", move |connection| {
                // Only if the agent reports that it still runs the release that an order updated it to.
                Box::pin(
                    sqlx::query_scalar!(
                        "SELECT sha256 FROM machine_release_report
                         WHERE machine_id = $1 AND updated_to = sha256",
                        machine.0
                    )
                    .fetch_optional(connection),
                )
            })
            .await?;
        Ok(digest.map(hex::encode))
    }

    /// A roll-out under way; `None` when it has ended.
    pub async fn read_active_roll_out(&self, id: &str) -> Result<Option<ActiveRollOut>, BmdbError> {
        self.read_policy().await?;
        let (id, bmdb) = (id.to_owned(), self.clone());
        self.transact_with(READING, (id, bmdb), move |tx, (id, bmdb)| {
            Box::pin(async move {
                let row = sqlx::query_file!("../../sql/roll_out/list.sql", Some(id.as_str()) as Option<&str>)
                    .fetch_optional(&mut *tx)
                    .await
                    .context(READING)?;
                let Some(row) = row.filter(|row| row.ended.is_none()) else { return Ok(None) };
                let count = |count: i64| usize::try_from(count).unwrap_or(1);
                let seconds = u64::try_from(row.deadline_seconds).unwrap_or_default();
                let sha256 =
                    row.sha256.try_into().map_err(|_| BmdbError::Corrupt("a release's digest".to_owned()))?;
                let roll_out = RollOut {
                    sha256,
                    parallelism: count(row.parallelism),
                    deadline: std::time::Duration::from_secs(seconds),
                    pause_reason: row.paused,
                };
                let rows = sqlx::query_file!("../../sql/roll_out/list_machines.sql", id)
                    .fetch_all(&mut *tx)
                    .await
                    .context(READING)?;
                let now = crate::connection::database_now(tx).await?;
                let odd =
                    |error: &dyn std::fmt::Display| BmdbError::Corrupt(format!("roll-out {id}: {error}"));
                let mut members = Vec::with_capacity(rows.len());
                for row in rows {
                    let report = row.reported.zip(row.running).zip(row.reported_at).and_then(
                        |((generation, sha256), at)| {
                            let report = ReleaseReport {
                                generation,
                                sha256: sha256.try_into().ok()?,
                                error: row.error,
                                // A roll-out decides nothing by them.
                                findings: Vec::new(),
                            };
                            Some((report, at))
                        },
                    );
                    let held = row.held_by.zip(row.held_for).map(|(by, why)| format!("{by} holds it: {why}"));
                    let quarantined = row.quarantined.map(|why| format!("it is quarantined: {why}"));
                    let phase: Phase = row.phase.parse().map_err(|error| odd(&error))?;
                    let control_plane = row.part.as_deref() == Some("control-plane");
                    let node = row.cluster.filter(|_| row.founded && row.leaving.is_none()).map(|cluster| {
                        RollOutNode {
                            cluster,
                            control_plane,
                            healthy: row.health.as_deref() == Some("healthy"),
                            observed_at: row.observed_at,
                            all_members_reachable: row.voters.is_some() && row.voters == row.voters_reached,
                            etcd_full_since: row.etcd_full_since,
                        }
                    });
                    members.push(RollOutMachine {
                        machine: MachineId(row.machine_id),
                        name: row.provider_id.unwrap_or_else(|| row.machine_id.to_string()),
                        state: row.state.parse::<RollOutMachineState>().map_err(|error| odd(&error))?,
                        generation: row.generation,
                        state_since: row.changed_at,
                        report,
                        phase,
                        block_reason: held.or(quarantined),
                        is_retiring: row.retiring || matches!(phase, Phase::Retiring | Phase::Retired),
                        node,
                    });
                }
                let (_, policy) = bmdb.policy();
                let budget = policy.budgets.get(&DisruptionKind::RestartAgent).copied();
                let may_begin = match budget {
                    None => usize::MAX,
                    Some(budget) => {
                        let window = budget.window.float_milliseconds();
                        let kind = DisruptionKind::RestartAgent.as_str();
                        let used = sqlx::query_file!("../../sql/intent/count_budget_use.sql", kind, window)
                            .fetch_one(&mut *tx)
                            .await
                            .context(READING)?;
                        usize::try_from(i64::from(budget.count) - used.count).unwrap_or_default()
                    }
                };
                let found = ActiveRollOut {
                    roll_out,
                    members,
                    budget_remaining: may_begin,
                    deadline_seconds: row.deadline_seconds,
                    release: row.release,
                    now,
                };
                Ok(Some(found))
            })
        })
        .await
    }

    /// Orders a machine to change to the release, unless something speaks against it by now.
    pub async fn order_release(
        &self,
        lease: &NamedLease,
        (id, found): (&str, &ActiveRollOut),
        machine: MachineId,
    ) -> Result<(), BmdbError> {
        let (session, fence) = (lease.session, lease.fence);
        let (sha256, deadline) = (found.roll_out.sha256, found.deadline_seconds);
        let detail = format!("{} ({}), in the update {id}", found.release, hex::encode(&sha256[..8]));
        let arguments = (self.clone(), id.to_owned(), detail);
        self.transact_for_machine(REQUESTING, (lease, machine), arguments, move |tx, (bmdb, id, detail)| {
            Box::pin(async move {
                let snapshot = read_snapshot(tx, machine).await?;
                let policy = policy_at_version(bmdb, tx, snapshot.policy_version).await?;
                let phase = phase_of(&snapshot.facts, &policy, snapshot.now);
                let (facts, kind) = (&snapshot.facts, DisruptionKind::RestartAgent);
                let window = policy.budgets.get(&kind).map(|budget| budget.window).unwrap_or_default();
                let now = snapshot.now;
                // The plan has already considered the cluster's objections; a machine in recovery has more.
                let counted = lock_disruption_context(tx, machine, kind.as_str(), window, None).await?;
                let circumstances = DisruptionContext { cluster: None, ..counted };
                let held = facts.hold.as_ref().is_some_and(|hold| hold.is_active_at(now));
                let well = matches!(phase, Phase::Ready | Phase::Installed);
                if held || !well || may_disrupt(facts, kind, &circumstances, &policy, now, now).is_err() {
                    return Ok(());
                }
                let known = lock_roll_out(tx, id, REQUESTING).await?;
                if known.is_none_or(|known| known.ended.is_some() || known.paused.is_some()) {
                    return Ok(());
                }
                let generation = compute_next_generation(tx, machine).await?;
                let ordered = sqlx::query_scalar!(
                    "UPDATE roll_out_machine SET state = 'ordered', generation = $3, message = NULL,
                         changed_at = clock_timestamp() WHERE roll_out_id = $1 AND machine_id = $2
                         AND state = 'waiting' AND active RETURNING generation",
                    id,
                    machine.0,
                    generation
                )
                .fetch_optional(&mut *tx)
                .await
                .context(REQUESTING)?;
                if ordered.is_none() {
                    return Ok(());
                }
                sqlx::query_file!(
                    "../../sql/roll_out/upsert_order.sql",
                    machine.0,
                    generation,
                    sha256.as_slice(),
                    deadline
                )
                .execute(&mut *tx)
                .await
                .context(REQUESTING)?;
                let holder = (session, fence);
                record_ordered_disruption(tx, facts, kind, machine, holder, detail, REQUESTING).await?;
                record_event(tx, machine, "ReleaseOrdered", detail).await
            })
        })
        .await
    }

    /// Records how a machine's change ended.
    pub async fn record_release_result(
        &self,
        lease: &NamedLease,
        id: &str,
        (machine, state): (MachineId, RollOutMachineState),
        text: &str,
    ) -> Result<(), BmdbError> {
        const OPERATION: &str = "recording the result of a release on a machine";
        let arguments = (id.to_owned(), text.to_owned());
        self.transact_for_machine(OPERATION, (lease, machine), arguments, move |tx, (id, text)| {
            Box::pin(async move {
                let changed = sqlx::query_scalar!(
                    "UPDATE roll_out_machine SET state = $3, message = $4, changed_at = clock_timestamp()
                     WHERE roll_out_id = $1 AND machine_id = $2 AND state <> $3 AND active
                     RETURNING state",
                    id,
                    machine.0,
                    state.as_str(),
                    text
                )
                .fetch_optional(&mut *tx)
                .await
                .context(OPERATION)?;
                if matches!(state, RollOutMachineState::Failed | RollOutMachineState::Skipped) {
                    // If the machine reports again later, nothing waits for it any more.
                    sqlx::query!(
                        "UPDATE release_order o SET withdrawn = TRUE FROM roll_out_machine m
                         WHERE m.roll_out_id = $1 AND m.machine_id = $2
                           AND o.machine_id = m.machine_id AND o.generation = m.generation",
                        id,
                        machine.0
                    )
                    .execute(&mut *tx)
                    .await
                    .context(OPERATION)?;
                }
                let event = match state {
                    RollOutMachineState::Done => "ReleaseRuns",
                    RollOutMachineState::Failed => "ReleaseFailed",
                    RollOutMachineState::Waiting
                    | RollOutMachineState::Ordered
                    | RollOutMachineState::Skipped => return Ok(()),
                };
                match changed {
                    Some(_) => record_event(tx, machine, event, &format!("{text} (update {id})")).await,
                    None => Ok(()),
                }
            })
        })
        .await
    }

    /// Pauses a roll-out, or ends it if nothing remains to be done.
    pub async fn pause_or_finish_roll_out(
        &self,
        lease: &NamedLease,
        id: &str,
        paused: Option<&str>,
    ) -> Result<(), BmdbError> {
        const OPERATION: &str = "ending a pass over a roll-out";
        let arguments = (id.to_owned(), paused.map(str::to_owned));
        self.transact_under_lease(OPERATION, lease, arguments, move |tx, (id, paused)| {
            Box::pin(async move {
                let known = lock_roll_out(tx, id, OPERATION).await?;
                if known.is_none_or(|known| known.ended.is_some()) {
                    return Ok(());
                }
                if paused.is_some() {
                    return set_roll_out_paused(tx, id, paused.as_deref(), OPERATION).await;
                }
                end_roll_out(tx, id, "finished", OPERATION).await
            })
        })
        .await
    }

    /// Records what machines wait for.
    pub async fn set_roll_out_wait_reasons(
        &self,
        lease: &NamedLease,
        id: &str,
        waits: Vec<(MachineId, String)>,
    ) -> Result<(), BmdbError> {
        let id = id.to_owned();
        let (machines, messages): (Vec<Uuid>, Vec<String>) =
            waits.into_iter().map(|(machine, text)| (machine.0, text)).unzip();
        self.execute_under_lease("recording what a roll-out waits for", lease, move || {
            sqlx::query!(
                "UPDATE roll_out_machine m SET message = n.message
                 FROM unnest($2::UUID[], $3::TEXT[]) AS n (machine_id, message) WHERE m.roll_out_id = $1
                   AND m.machine_id = n.machine_id AND m.message IS DISTINCT FROM n.message",
                id,
                &machines,
                &messages
            )
        })
        .await
    }
}

/// Computes the next generation of a release order: one more than any order that the machine ever had, as far as this
/// database or the machine knows.
async fn compute_next_generation(tx: &mut PgConnection, machine: MachineId) -> Result<i64, BmdbError> {
    sqlx::query_scalar!(
        r#"SELECT GREATEST(COALESCE((SELECT generation FROM release_order WHERE machine_id = $1), 0),
               COALESCE((SELECT generation FROM machine_release_report WHERE machine_id = $1), 0))
               + 1 AS "generation!""#,
        machine.0
    )
    .fetch_one(tx)
    .await
    .context(REQUESTING)
}
