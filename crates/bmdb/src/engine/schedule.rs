//! The schedule: locking due rows, recomputing and writing them, recording history.
//!
//! This is the second half of every transaction that changes a fact. The order is always the same: lock the machine's
//! due rows, change facts, read them, compute both lanes, write what differs. A fact written by a transaction that did
//! not hold the rows could be missed by a computation that had already read; one that waited for the rows and read in
//! the same statement would see the row new and the fact old. Hence separate statements, in this order.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::error::BmdbError;
use crate::connection::transaction::record_phase_exit;
use crate::connection::{Bmdb, DbContext};
use crate::engine::facts::{MachineSnapshot, read_snapshot};
use crate::engine::policy::policy_at_version;
use crate::engine::session::guard_session;
use model::facts::MachineFacts;
use model::ids::{MachineId, SessionId};
use model::phase::{Phase, phase_of};
use model::policy::Policy;
use model::process::{Lane, Process};
use model::schedule::{DueWork, RULES_VERSION, StoredDue, armed_ready_at, next_due};
use model::schedule_mismatch::{StoredDecision, describe_mismatch};
use model::time::{Timestamp, between};

/// A due row that this transaction has locked.
#[derive(Clone, Debug)]
pub(crate) struct DueRow {
    pub(crate) lane: Lane,
    pub(crate) armed: StoredDue,
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
    /// The part of the row that can contradict the facts.
    pub(crate) fn stored_decision(&self) -> StoredDecision<'_> {
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
pub(crate) struct StoredDueRow {
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

impl StoredDueRow {
    /// Decodes the row. Fails when it follows rules newer than ours.
    pub(crate) fn into_due_row(self) -> Result<DueRow, BmdbError> {
        let known = i64::from(RULES_VERSION);
        if self.rules_version > known {
            return Err(BmdbError::NewerRules { found: self.rules_version, supported: known });
        }
        let lane = self.lane.parse().map_err(|error| BmdbError::Corrupt(format!("{error}")))?;
        // A process that only a newer release knows is rescheduled by the rules we have.
        let process = self.process.and_then(|process| process.parse::<Process>().ok());
        Ok(DueRow {
            lane,
            armed: StoredDue { process, ready_at: self.ready_at, timer: self.timer },
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
pub(crate) async fn read_due_rows(
    connection: &mut PgConnection,
    machines: &[Uuid],
) -> Result<Vec<StoredDueRow>, sqlx::Error> {
    sqlx::query_file_as!(StoredDueRow, "../../sql/schedule/list_due_rows.sql", machines)
        .fetch_all(connection)
        .await
}

/// Locks a machine's due rows, in lane order. Fails when the machine does not exist, or when its schedule follows rules
/// newer than ours.
pub(crate) async fn lock_due_rows(
    tx: &mut PgConnection,
    machine: MachineId,
) -> Result<Vec<DueRow>, BmdbError> {
    let rows = sqlx::query_file_as!(StoredDueRow, "../../sql/schedule/lock_due_rows.sql", machine.0)
        .fetch_all(tx)
        .await
        .context("locking a machine's schedule")?;
    if rows.is_empty() {
        return Err(BmdbError::NoSuchMachine(machine.to_string()));
    }
    rows.into_iter().map(StoredDueRow::into_due_row).collect()
}

/// As [`lock_due_rows`], for a session: its row is locked first, and a session that is over is an error.
pub(crate) async fn lock_due_rows_for_session(
    tx: &mut PgConnection,
    session: SessionId,
    machine: MachineId,
) -> Result<Vec<DueRow>, BmdbError> {
    let rows = sqlx::query_file_as!(
        StoredDueRow,
        "../../sql/schedule/lock_due_rows_for_session.sql",
        session.0,
        machine.0
    )
    .fetch_all(&mut *tx)
    .await
    .context("locking a machine's schedule")?;
    if rows.is_empty() {
        guard_session(tx, session).await?;
        return Err(BmdbError::NoSuchMachine(machine.to_string()));
    }
    rows.into_iter().map(StoredDueRow::into_due_row).collect()
}

/// The result of recomputing and writing a schedule.
#[derive(Debug)]
pub(crate) struct Rescheduled {
    /// The facts it was computed from.
    pub(crate) snapshot: MachineSnapshot,
    /// The phase that was indexed before, and the new one; `None` if it is the same.
    pub(crate) phase_change: Option<(String, Phase)>,
    /// Processes that can be claimed now and could not before.
    pub(crate) armed_now: Vec<Process>,
    /// Lanes whose row contradicted the facts under the same policy and rules.
    pub(crate) mismatched: Vec<Lane>,
}

/// Reads the facts as they are now in this transaction, writes what both lanes are due for, and
/// announces what is due now.
pub(crate) async fn reschedule_machine(
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    machine: MachineId,
    rows: &[DueRow],
) -> Result<Rescheduled, BmdbError> {
    let snapshot = read_snapshot(tx, machine).await?;
    let (result, _) = write_schedule(bmdb, tx, rows, snapshot, None).await?;
    notify_due(bmdb, tx, &result.armed_now).await?;
    Ok(result)
}

/// The plan of a machine whose lanes were written, except the one whose work ends: the statement that ends the work
/// writes that lane.
#[derive(Debug)]
pub(crate) struct EndedLanePlan {
    pub(crate) plan: LanePlan,
    pub(crate) policy_version: i64,
}

/// As [`reschedule_machine`], at the end of a work item of `ended`, from facts read after their changes. The plan of
/// the item's own lane is returned and not written.
///
/// A notification makes a commit wait for every other one that notifies: PostgreSQL holds one lock for the whole server
/// from before such a commit to after its write to disk. Work ends thousands of times a second, and the machine is
/// often due again for the same process, whose loop is awake and claims again by itself; that is not announced. A
/// transition to another process is announced: it happens a few times in a machine's life, and that process's loop may
/// be asleep for seconds.
pub(crate) async fn reschedule_after_work(
    ended: Process,
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    rows: &[DueRow],
    snapshot: MachineSnapshot,
) -> Result<EndedLanePlan, BmdbError> {
    let (mut result, plan) = write_schedule(bmdb, tx, rows, snapshot, Some(ended.lane())).await?;
    result.armed_now.retain(|process| *process != ended);
    notify_due(bmdb, tx, &result.armed_now).await?;
    // The lane's row is locked, and was found to be leased.
    let plan = plan.ok_or(BmdbError::LeaseLost)?;
    Ok(EndedLanePlan { plan, policy_version: result.snapshot.policy_version })
}

async fn notify_due(bmdb: &Bmdb, tx: &mut PgConnection, armed: &[Process]) -> Result<(), BmdbError> {
    if bmdb.dialect().notifies() {
        for process in armed {
            sqlx::query!("SELECT pg_notify('shepherd_due', $1)", process.as_str())
                .fetch_one(&mut *tx)
                .await
                .context("announcing due work")?;
        }
    }
    Ok(())
}

/// Writes each lane whose row differs from what the facts demand, and history of a new phase. The plan of the lane
/// `kept_back` is returned instead.
async fn write_schedule(
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    rows: &[DueRow],
    mut snapshot: MachineSnapshot,
    kept_back: Option<Lane>,
) -> Result<(Rescheduled, Option<LanePlan>), BmdbError> {
    let machine = snapshot.facts.machine;
    let policy = policy_at_version(bmdb, tx, snapshot.policy_version).await?;
    if falls_silent(rows, &snapshot, &policy) {
        // A heartbeat that is being stored at this moment is not in the facts that were read, and its group has read
        // the machine's row as it was: the two would miss each other.
        // So heartbeats are kept out first, and the facts are read again.
        sqlx::query!(
            "SELECT machine_id FROM machine_agent_heartbeat WHERE machine_id = $1 FOR NO KEY UPDATE",
            machine.0
        )
        .fetch_optional(&mut *tx)
        .await
        .context("keeping heartbeats out")?;
        snapshot = read_snapshot(tx, machine).await?;
    }
    let mut result =
        Rescheduled { snapshot, phase_change: None, armed_now: Vec::new(), mismatched: Vec::new() };
    let mut last = None;
    for row in rows {
        let plan = plan_lane(row, &result.snapshot, &policy);
        if !plan.is_unchanged {
            if row.lane == Lane::Access && row.phase_index != plan.due.phase.as_str() {
                result.phase_change = Some((row.phase_index.clone(), plan.due.phase));
                record_phase_exit(&row.phase_index, between(row.phase_since, result.snapshot.now));
            }
            if plan.is_mismatch {
                result.mismatched.push(row.lane);
            }
            if plan.ready_at.is_some_and(|ready| ready <= result.snapshot.now)
                && (row.armed.process != plan.due.process || row.armed.ready_at != plan.ready_at)
            {
                result.armed_now.extend(plan.due.process);
            }
        }
        if kept_back == Some(row.lane) {
            last = Some(plan);
        } else if !plan.is_unchanged {
            write_lane(tx, machine, row.lane, &plan, &result.snapshot).await?;
        }
    }
    if let Some((before, after)) = &result.phase_change {
        record_event(
            tx,
            machine,
            after.as_str(),
            &format!("was {before}: {}", phase_reason(&result.snapshot, &policy)),
        )
        .await?;
    }
    Ok((result, last))
}

/// Whether these facts make a machine silent whose indexed phase is not Silent yet.
fn falls_silent(rows: &[DueRow], snapshot: &MachineSnapshot, policy: &Policy) -> bool {
    phase_of(&snapshot.facts, policy, snapshot.now) == Phase::Silent
        && rows.iter().any(|row| row.lane == Lane::Access && row.phase_index != Phase::Silent.as_str())
}

/// The planned content of a due row.
#[derive(Debug)]
pub(crate) struct LanePlan {
    pub(crate) due: DueWork,
    pub(crate) ready_at: Option<Timestamp>,
    pub(crate) provider: String,
    /// Whether the stored row has that content already.
    is_unchanged: bool,
    is_mismatch: bool,
}

impl LanePlan {
    /// Where in the code it was decided, as it is stored.
    pub(crate) fn decided_at(&self) -> String {
        format!("{}:{}", self.due.decided_at.file(), self.due.decided_at.line())
    }
}

fn plan_lane(row: &DueRow, snapshot: &MachineSnapshot, policy: &Policy) -> LanePlan {
    let MachineSnapshot { facts, now, policy_version } = snapshot;
    let due = next_due(facts, row.lane, policy, *now);
    let ready_at = armed_ready_at(&row.armed, &due, *now);
    let provider =
        facts.provider_record.as_ref().map_or_else(String::new, |provided| provided.provider.clone());
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
    let is_mismatch = !same && describe_mismatch(&row.stored_decision(), &due, *policy_version).is_some();
    LanePlan { due, ready_at, provider, is_unchanged: same, is_mismatch }
}

/// Whether the schedule of a machine, read without locks, differs from what its facts demand.
pub(crate) fn is_outdated(
    facts: &MachineFacts,
    row: &DueRow,
    policy: &Policy,
    policy_version: i64,
    now: Timestamp,
) -> bool {
    let snapshot = MachineSnapshot { facts: facts.clone(), now, policy_version };
    let plan = plan_lane(row, &snapshot, policy);
    // A timer that lags behind heartbeats is correct as it is.
    let lagging = plan.due.timer
        && row.armed.timer
        && row.armed.process == plan.due.process
        && row.armed.ready_at <= plan.ready_at
        && row.priority == i64::from(plan.due.priority)
        && row.phase_index == plan.due.phase.as_str()
        && row.policy_version == policy_version
        && row.rules_version == i64::from(RULES_VERSION);
    !plan.is_unchanged && !lagging
}

fn phase_reason(snapshot: &MachineSnapshot, policy: &Policy) -> String {
    next_due(&snapshot.facts, Lane::Access, policy, snapshot.now).reason
}

async fn write_lane(
    tx: &mut PgConnection,
    machine: MachineId,
    lane: Lane,
    plan: &LanePlan,
    snapshot: &MachineSnapshot,
) -> Result<(), BmdbError> {
    let due = &plan.due;
    sqlx::query_file!(
        "../../sql/schedule/update_due_row.sql",
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
    .context("writing a machine's schedule")?;
    Ok(())
}

/// Records an event in history that is not the start or end of a work item.
pub(crate) async fn record_event(
    tx: &mut PgConnection,
    machine: MachineId,
    event: &str,
    detail: &str,
) -> Result<(), BmdbError> {
    sqlx::query!(
        "INSERT INTO history (machine_id, at, event, detail) VALUES ($1, clock_timestamp(), $2, $3)",
        machine.0,
        event,
        detail
    )
    .execute(tx)
    .await
    .context("writing history")?;
    Ok(())
}

/// The version of a machine's schedule.
pub async fn read_machine_version(tx: &mut PgConnection, machine: MachineId) -> Result<i64, BmdbError> {
    sqlx::query_scalar!(
        "SELECT version FROM machine_due WHERE machine_id = $1 AND lane = 'access'",
        machine.0
    )
    .fetch_optional(tx)
    .await
    .context("reading a machine's version")?
    .ok_or_else(|| BmdbError::NoSuchMachine(machine.to_string()))
}
