//! Writing the schedule: the second half of every transaction that changes a fact.
//!
//! The order is always the same: lock the machine's due rows, change facts, read
//! them, compute both lanes, write what differs. A fact written by somebody who
//! did not hold the rows could be missed by a computation that had already
//! read; one that waited for the rows and read in the same statement would see
//! the row new and the fact old. Hence separate statements, in this order.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::connection::{Bmdb, Doing};
use crate::bmdb::error::BmdbError;
use crate::bmdb::facts::{Snapshot, read};
use crate::bmdb::policy::policy_of_version;
use crate::model::facts::MachineFacts;
use crate::model::ids::MachineId;
use crate::model::phase::Phase;
use crate::model::policy::Policy;
use crate::model::process::{Lane, Process};
use crate::model::schedule::{Armed, Due, RULES_VERSION, arm, next_due};
use crate::model::time::Timestamp;

/// A due row that this transaction holds.
#[derive(Clone, Debug)]
pub(crate) struct DueRow {
    pub(crate) lane: Lane,
    pub(crate) armed: Armed,
    pub(crate) provider: String,
    pub(crate) priority: i64,
    pub(crate) reason: String,
    pub(crate) deadline: Option<Timestamp>,
    pub(crate) phase_index: String,
    pub(crate) rules_version: i64,
    pub(crate) policy_version: i64,
    pub(crate) lease_session: Option<Uuid>,
    pub(crate) fence: i64,
}

/// Locks a machine's due rows, in lane order. Fails when there is no such machine, or when its
/// schedule follows rules newer than ours.
pub(crate) async fn lock(tx: &mut PgConnection, machine: MachineId) -> Result<Vec<DueRow>, BmdbError> {
    let rows = sqlx::query_file!("sql/schedule/lock.sql", machine.0)
        .fetch_all(tx)
        .await
        .doing("locking a machine's schedule")?;
    if rows.is_empty() {
        return Err(BmdbError::NoSuchMachine(machine.to_string()));
    }
    rows.into_iter()
        .map(|row| {
            let known = i64::from(RULES_VERSION);
            if row.rules_version > known {
                return Err(BmdbError::NewerRules { found: row.rules_version, known });
            }
            let lane: Lane = row.lane.parse().map_err(|error| BmdbError::Corrupt(format!("{error}")))?;
            Ok(DueRow {
                lane,
                // A process that only a newer release knows is armed anew by the rules we have.
                armed: Armed {
                    process: row.process.and_then(|process| process.parse::<Process>().ok()),
                    ready_at: row.ready_at,
                    timer: row.timer,
                },
                provider: row.provider,
                priority: row.priority,
                reason: row.reason,
                deadline: row.deadline,
                phase_index: row.phase_index,
                rules_version: row.rules_version,
                policy_version: row.policy_version,
                lease_session: row.lease_session,
                fence: row.fence,
            })
        })
        .collect()
}

/// What a rescheduling found and wrote.
#[derive(Debug)]
pub(crate) struct Rescheduled {
    /// The facts it was computed from.
    pub(crate) snapshot: Snapshot,
    /// The phase before, as it was indexed, when it is another one now.
    pub(crate) phase_change: Option<(String, Phase)>,
    /// Processes that can be claimed now and could not before.
    pub(crate) armed_now: Vec<Process>,
    /// Lanes whose row was not what the facts demand, policy and rules being the same.
    pub(crate) drifted: Vec<Lane>,
}

/// Reads the facts as they are now in this transaction, and writes what both lanes are due for.
pub(crate) async fn reschedule(
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    machine: MachineId,
    rows: &[DueRow],
) -> Result<Rescheduled, BmdbError> {
    let snapshot = read(tx, machine).await?;
    let policy = policy_of_version(bmdb, tx, snapshot.policy_version).await?;
    let mut result = Rescheduled { snapshot, phase_change: None, armed_now: Vec::new(), drifted: Vec::new() };
    for row in rows {
        let plan = plan_row(row, &result.snapshot, &policy);
        let Some(plan) = plan else { continue };
        if row.lane == Lane::Access && row.phase_index != plan.due.phase.as_str() {
            result.phase_change = Some((row.phase_index.clone(), plan.due.phase));
        }
        if plan.drifted {
            result.drifted.push(row.lane);
        }
        if plan.ready_at.is_some_and(|ready| ready <= result.snapshot.now)
            && (row.armed.process != plan.due.process || row.armed.ready_at != plan.ready_at)
        {
            result.armed_now.extend(plan.due.process);
        }
        write(tx, machine, row.lane, &plan, &result.snapshot).await?;
    }
    if let Some((before, after)) = &result.phase_change {
        tell(
            tx,
            machine,
            after.as_str(),
            &format!("was {before}: {}", phase_reason(&result.snapshot, &policy)),
        )
        .await?;
    }
    if bmdb.dialect().notify {
        for process in &result.armed_now {
            sqlx::query_file!("sql/schedule/notify.sql", process.as_str())
                .fetch_one(&mut *tx)
                .await
                .doing("announcing due work")?;
        }
    }
    Ok(result)
}

struct RowPlan {
    due: Due,
    ready_at: Option<Timestamp>,
    provider: String,
    drifted: bool,
}

/// What to write to a row, or `None` when it says all of it already.
fn plan_row(row: &DueRow, snapshot: &Snapshot, policy: &Policy) -> Option<RowPlan> {
    let Snapshot { facts, now, policy_version } = snapshot;
    let due = next_due(facts, row.lane, policy, *now);
    let ready_at = arm(&row.armed, &due, *now);
    let provider = facts.provided.as_ref().map_or_else(String::new, |provided| provided.provider.clone());
    let same = row.armed.process == due.process
        && row.armed.ready_at == ready_at
        && row.armed.timer == due.timer
        && row.provider == provider
        && row.priority == i64::from(due.priority)
        && row.reason == due.reason
        && row.deadline == due.deadline
        && row.phase_index == due.phase.as_str()
        && row.rules_version == i64::from(RULES_VERSION)
        && row.policy_version == *policy_version;
    if same {
        return None;
    }
    let drifted = drift_of(row, &due, *policy_version);
    Some(RowPlan { due, ready_at, provider, drifted })
}

/// Whether a row contradicts the facts under the same rules and policy. An earlier `ready_at` on a
/// timer row is how timers work; a later one than the facts say was armed late and is no drift
/// while it has come due.
fn drift_of(row: &DueRow, due: &Due, policy_version: i64) -> bool {
    if row.rules_version != i64::from(RULES_VERSION) || row.policy_version != policy_version {
        return false;
    }
    row.armed.process != due.process || row.priority != i64::from(due.priority)
}

/// Whether the schedule of a machine read without locks differs from what its facts demand.
pub(crate) fn differs(
    facts: &MachineFacts,
    row: &DueRow,
    policy: &Policy,
    policy_version: i64,
    now: Timestamp,
) -> bool {
    let snapshot = Snapshot { facts: facts.clone(), now, policy_version };
    plan_row(row, &snapshot, policy).is_some_and(|plan| {
        // A timer that lags behind heartbeats says all it must.
        let lagging = plan.due.timer
            && row.armed.timer
            && row.armed.process == plan.due.process
            && row.armed.ready_at <= plan.ready_at
            && row.priority == i64::from(plan.due.priority)
            && row.phase_index == plan.due.phase.as_str()
            && row.policy_version == policy_version
            && row.rules_version == i64::from(RULES_VERSION);
        !lagging
    })
}

fn phase_reason(snapshot: &Snapshot, policy: &Policy) -> String {
    next_due(&snapshot.facts, Lane::Access, policy, snapshot.now).reason
}

async fn write(
    tx: &mut PgConnection,
    machine: MachineId,
    lane: Lane,
    plan: &RowPlan,
    snapshot: &Snapshot,
) -> Result<(), BmdbError> {
    let due = &plan.due;
    sqlx::query_file!(
        "sql/schedule/write.sql",
        machine.0,
        lane.as_str(),
        due.process.map(Process::as_str),
        plan.provider,
        i64::from(due.priority),
        plan.ready_at,
        due.timer,
        due.reason,
        format!("{}:{}", due.decided_at.file(), due.decided_at.line()),
        due.deadline,
        due.phase.as_str(),
        i64::from(RULES_VERSION),
        snapshot.policy_version,
    )
    .execute(tx)
    .await
    .doing("writing a machine's schedule")?;
    Ok(())
}

/// Writes a line of history that is no edge of a work item.
pub(crate) async fn tell(
    tx: &mut PgConnection,
    machine: MachineId,
    event: &str,
    detail: &str,
) -> Result<(), BmdbError> {
    sqlx::query_file!("sql/history/tell.sql", machine.0, event, detail)
        .execute(tx)
        .await
        .doing("writing history")?;
    Ok(())
}
