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
use crate::bmdb::left_phases;
use crate::bmdb::policy::policy_of_version;
use crate::bmdb::session::guard;
use crate::model::drift::{StoredDecision, drift_of};
use crate::model::facts::MachineFacts;
use crate::model::ids::{MachineId, SessionId};
use crate::model::phase::{Phase, phase_of};
use crate::model::policy::Policy;
use crate::model::process::{Lane, Process};
use crate::model::schedule::{Armed, Due, RULES_VERSION, arm, next_due};
use crate::model::time::{Timestamp, between};

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
    pub(crate) phase_since: Timestamp,
    pub(crate) rules_version: i64,
    pub(crate) policy_version: i64,
    pub(crate) lease_session: Option<Uuid>,
    pub(crate) fence: i64,
}

impl DueRow {
    /// What of it can contradict the facts.
    pub(crate) fn stored(&self) -> StoredDecision<'_> {
        StoredDecision {
            lane: self.lane,
            process: self.armed.process.map(Process::as_str),
            priority: self.priority,
            reason: &self.reason,
            rules_version: self.rules_version,
            policy_version: self.policy_version,
        }
    }
}

/// A due row as it is stored.
#[derive(Debug)]
pub(crate) struct StoredRow {
    pub(crate) machine_id: Uuid,
    lane: String,
    process: Option<String>,
    provider: String,
    priority: i64,
    ready_at: Option<Timestamp>,
    timer: bool,
    reason: String,
    deadline: Option<Timestamp>,
    phase_index: String,
    phase_since: Timestamp,
    rules_version: i64,
    policy_version: i64,
    lease_session: Option<Uuid>,
    fence: i64,
}

impl StoredRow {
    /// Fails when it follows rules newer than ours.
    pub(crate) fn understood(self) -> Result<DueRow, BmdbError> {
        let known = i64::from(RULES_VERSION);
        if self.rules_version > known {
            return Err(BmdbError::NewerRules { found: self.rules_version, known });
        }
        let lane = self.lane.parse().map_err(|error| BmdbError::Corrupt(format!("{error}")))?;
        // A process that only a newer release knows is armed anew by the rules we have.
        let process = self.process.and_then(|process| process.parse::<Process>().ok());
        Ok(DueRow {
            lane,
            armed: Armed { process, ready_at: self.ready_at, timer: self.timer },
            provider: self.provider,
            priority: self.priority,
            reason: self.reason,
            deadline: self.deadline,
            phase_index: self.phase_index,
            phase_since: self.phase_since,
            rules_version: self.rules_version,
            policy_version: self.policy_version,
            lease_session: self.lease_session,
            fence: self.fence,
        })
    }
}

/// The due rows of many machines, without locks.
pub(crate) async fn stored_rows(
    connection: &mut PgConnection,
    machines: &[Uuid],
) -> Result<Vec<StoredRow>, sqlx::Error> {
    sqlx::query_file_as!(StoredRow, "sql/schedule/list_due_rows.sql", machines).fetch_all(connection).await
}

/// Locks a machine's due rows, in lane order. Fails when there is no such machine, or when its
/// schedule follows rules newer than ours.
pub(crate) async fn lock(tx: &mut PgConnection, machine: MachineId) -> Result<Vec<DueRow>, BmdbError> {
    let rows = sqlx::query_file_as!(StoredRow, "sql/schedule/lock_due_rows.sql", machine.0)
        .fetch_all(tx)
        .await
        .doing("locking a machine's schedule")?;
    if rows.is_empty() {
        return Err(BmdbError::NoSuchMachine(machine.to_string()));
    }
    rows.into_iter().map(StoredRow::understood).collect()
}

/// As [`lock`], for a session: its row is locked first, and that it is over is an error.
pub(crate) async fn lock_under(
    tx: &mut PgConnection,
    session: SessionId,
    machine: MachineId,
) -> Result<Vec<DueRow>, BmdbError> {
    let rows =
        sqlx::query_file_as!(StoredRow, "sql/schedule/lock_due_rows_for_session.sql", session.0, machine.0)
            .fetch_all(&mut *tx)
            .await
            .doing("locking a machine's schedule")?;
    if rows.is_empty() {
        guard(tx, session).await?;
        return Err(BmdbError::NoSuchMachine(machine.to_string()));
    }
    rows.into_iter().map(StoredRow::understood).collect()
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

/// Reads the facts as they are now in this transaction, writes what both lanes are due for, and
/// announces what is due now.
pub(crate) async fn reschedule(
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    machine: MachineId,
    rows: &[DueRow],
) -> Result<Rescheduled, BmdbError> {
    let snapshot = read(tx, machine).await?;
    let (result, _) = write_schedule(bmdb, tx, rows, snapshot, None).await?;
    announce(bmdb, tx, &result.armed_now).await?;
    Ok(result)
}

/// What was decided for a machine and written to its lanes, but for the one whose work ends: the
/// statement that ends it writes that one.
#[derive(Debug)]
pub(crate) struct LastLane {
    pub(crate) plan: RowPlan,
    pub(crate) policy_version: i64,
}

/// As [`reschedule`], at the end of a work item of `ended`, from facts read after their changes. What
/// the item's own lane is due for is returned and not written.
///
/// A notification makes a commit wait for every other one that notifies: PostgreSQL holds one lock for
/// the whole server from before such a commit to after its write to disk. Work ends thousands of times a
/// second, and often due again for the same process, whose loop is awake and looks again by itself; that
/// is not announced. That the machine passes on to another process is: it happens a few times in its
/// life, and that process's loop may be asleep for seconds.
pub(crate) async fn reschedule_after(
    ended: Process,
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    rows: &[DueRow],
    snapshot: Snapshot,
) -> Result<LastLane, BmdbError> {
    let (mut result, plan) = write_schedule(bmdb, tx, rows, snapshot, Some(ended.lane())).await?;
    result.armed_now.retain(|process| *process != ended);
    announce(bmdb, tx, &result.armed_now).await?;
    // The lane's row is locked, and was found to be held.
    let plan = plan.ok_or(BmdbError::LeaseLost)?;
    Ok(LastLane { plan, policy_version: result.snapshot.policy_version })
}

async fn announce(bmdb: &Bmdb, tx: &mut PgConnection, armed: &[Process]) -> Result<(), BmdbError> {
    if bmdb.dialect().notifies() {
        for process in armed {
            sqlx::query_file!("sql/schedule/notify.sql", process.as_str())
                .fetch_one(&mut *tx)
                .await
                .doing("announcing due work")?;
        }
    }
    Ok(())
}

/// Writes each lane whose row differs from what the facts demand, and history of a new phase. The plan of
/// the lane `kept_back` is returned instead.
async fn write_schedule(
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    rows: &[DueRow],
    mut snapshot: Snapshot,
    kept_back: Option<Lane>,
) -> Result<(Rescheduled, Option<RowPlan>), BmdbError> {
    let machine = snapshot.facts.machine;
    let policy = policy_of_version(bmdb, tx, snapshot.policy_version).await?;
    if falls_silent(rows, &snapshot, &policy) {
        // A heartbeat that is being stored at this moment is in nobody's facts yet, and its group has
        // seen the machine's row as it was: the two would pass each other.
        sqlx::query_file!("sql/heartbeat/lock_one.sql", machine.0)
            .fetch_optional(&mut *tx)
            .await
            .doing("keeping heartbeats out")?;
        snapshot = read(tx, machine).await?;
    }
    let mut result = Rescheduled { snapshot, phase_change: None, armed_now: Vec::new(), drifted: Vec::new() };
    let mut last = None;
    for row in rows {
        let plan = plan_row(row, &result.snapshot, &policy);
        if !plan.same {
            if row.lane == Lane::Access && row.phase_index != plan.due.phase.as_str() {
                result.phase_change = Some((row.phase_index.clone(), plan.due.phase));
                left_phases::note(&row.phase_index, between(row.phase_since, result.snapshot.now));
            }
            if plan.drifted {
                result.drifted.push(row.lane);
            }
            if plan.ready_at.is_some_and(|ready| ready <= result.snapshot.now)
                && (row.armed.process != plan.due.process || row.armed.ready_at != plan.ready_at)
            {
                result.armed_now.extend(plan.due.process);
            }
        }
        if kept_back == Some(row.lane) {
            last = Some(plan);
        } else if !plan.same {
            write(tx, machine, row.lane, &plan, &result.snapshot).await?;
        }
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
    Ok((result, last))
}

/// Whether these facts make a machine silent that nobody has found so yet.
fn falls_silent(rows: &[DueRow], snapshot: &Snapshot, policy: &Policy) -> bool {
    phase_of(&snapshot.facts, policy, snapshot.now) == Phase::Silent
        && rows.iter().any(|row| row.lane == Lane::Access && row.phase_index != Phase::Silent.as_str())
}

/// What a row has to say.
#[derive(Debug)]
pub(crate) struct RowPlan {
    pub(crate) due: Due,
    pub(crate) ready_at: Option<Timestamp>,
    pub(crate) provider: String,
    /// Whether it says all of it already.
    same: bool,
    drifted: bool,
}

impl RowPlan {
    /// Where in the code it was decided, as it is stored.
    pub(crate) fn decided_at(&self) -> String {
        format!("{}:{}", self.due.decided_at.file(), self.due.decided_at.line())
    }
}

fn plan_row(row: &DueRow, snapshot: &Snapshot, policy: &Policy) -> RowPlan {
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
    let drifted = !same && drift_of(&row.stored(), &due, *policy_version).is_some();
    RowPlan { due, ready_at, provider, same, drifted }
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
    let plan = plan_row(row, &snapshot, policy);
    // A timer that lags behind heartbeats says all it must.
    let lagging = plan.due.timer
        && row.armed.timer
        && row.armed.process == plan.due.process
        && row.armed.ready_at <= plan.ready_at
        && row.priority == i64::from(plan.due.priority)
        && row.phase_index == plan.due.phase.as_str()
        && row.policy_version == policy_version
        && row.rules_version == i64::from(RULES_VERSION);
    !plan.same && !lagging
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
        "sql/schedule/update_due_row.sql",
        machine.0,
        lane.as_str(),
        due.process.map(Process::as_str),
        plan.provider,
        i64::from(due.priority),
        plan.ready_at,
        due.timer,
        due.reason,
        plan.decided_at(),
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
    sqlx::query_file!("sql/history/insert.sql", machine.0, event, detail)
        .execute(tx)
        .await
        .doing("writing history")?;
    Ok(())
}
