//! Read-only queries for people: machine view, history, sessions, work, providers.
//!
//! Everything is read in a [`Bmdb::transact_read_only`] transaction: one moment, read-only, no row locks, a limit of
//! seconds. A person who reads must not be able to slow down a fleet, so lists go through indexes a page at a time and
//! stop at their limit; nothing here counts machines.
//!
//! Lists show `phase_index`, a copy that may lag behind the truth by a moment; the view of one machine
//! ([`MachineView`]) is computed from its facts.
//!
//! The types are what `shepherdctl -o json` prints: a field may be added, none
//! changes its name or meaning.

use std::sync::Arc;

use chrono::DateTime;
use futures::future::BoxFuture;
use serde::Serialize;
use sqlx::{Executor, PgConnection};
use uuid::Uuid;

use crate::cluster::membership_of_machine;
use crate::connection::{Bmdb, DbContext};
use crate::error::BmdbError;
use crate::facts::read_snapshot;
use crate::loop_pause::list_pauses;
use crate::policy::policy_at_version;
use crate::read_pool::ReadPool;
use crate::roll_out::read_roll_out_note;
use crate::unknown_fence::read_unknown_fence;
use model::host_key::{HostKey, PinnedHostKey};
use model::ids::MachineId;
use model::label::Labels;
use model::machine_view::{EngagedBrake, LaneView, MachineName, MachineView, WorkHolder};
use model::time::Timestamp;

const BEGIN: &str = include_str!("../../../sql/inspect/begin_read_only.sql");
const OPERATION: &str = "reading what to show";

/// A machine in the list of machines.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MachineSummary {
    /// Names of the machine.
    #[serde(flatten)]
    pub name: MachineName,
    /// Phase as it is indexed.
    pub phase: String,
    /// Since when it is in that phase.
    pub phase_since: Timestamp,
    /// Host name or IP literal.
    pub address: Option<String>,
    /// Location as its provider names it; `None` if unknown.
    pub location: Option<String>,
    /// When its agent last reported.
    pub heartbeat_at: Option<Timestamp>,
    /// The process being worked on in the access lane now.
    pub working: Option<String>,
    /// The process it is due for next in the access lane; `null` when nothing happens by time alone.
    pub process: Option<String>,
    /// When that process is due; for a healthy machine a lower bound.
    pub ready_at: Option<Timestamp>,
    /// Why that process, and why not earlier.
    pub reason: String,
    /// Labels that operators set.
    pub labels: Labels,
    /// `urgent` or `low`, where an operator put its work before or behind that of others.
    pub priority: Option<String>,
}

/// A line of history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HistoryEntry {
    /// When the event happened.
    pub at: Timestamp,
    /// Name of the event.
    pub event: String,
    /// Lane of the work item it is about.
    pub lane: Option<String>,
    /// Fence of that work item.
    pub fence: Option<i64>,
    /// Process of that work item.
    pub process: Option<String>,
    /// The session it was done under.
    pub session: Option<Uuid>,
    /// Component that the session was started for.
    pub component: Option<String>,
    /// Host of the process that owned the session.
    pub host: Option<String>,
    /// Details of the event.
    pub detail: Option<String>,
}

/// An open session, with its owner.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SessionSummary {
    /// Id of the session.
    pub session: Uuid,
    /// The `shepherd` it belongs to.
    pub process: Uuid,
    /// Component that it was started for.
    pub component: String,
    /// Host of that process.
    pub host: Option<String>,
    /// Its process id there.
    pub pid: Option<i64>,
    /// Release of that process.
    pub version: Option<String>,
    /// When the session started.
    pub started_at: Timestamp,
    /// When it ends unless it is renewed.
    pub deadline: Timestamp,
    /// Number of work items under it.
    pub work: i64,
}

/// A live work item.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorkSummary {
    /// Names of its machine.
    #[serde(flatten)]
    pub name: MachineName,
    /// Name of its lane.
    pub lane: String,
    /// Its process, session and age.
    pub work: WorkHolder,
}

/// A position in the list of live work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkCursor {
    /// When the item there was claimed.
    pub since: Timestamp,
    /// The item's machine id.
    pub machine: Uuid,
    /// Name of the item's lane.
    pub lane: String,
}

impl WorkCursor {
    /// The position before all items.
    fn start() -> Self {
        Self { since: DateTime::UNIX_EPOCH, machine: Uuid::nil(), lane: String::new() }
    }

    /// The position of an item.
    #[must_use]
    pub fn of(line: &WorkSummary) -> Self {
        Self { since: line.work.since, machine: line.name.machine, lane: line.lane.clone() }
    }
}

/// A position in a machine's history. Several events may happen at one moment, and lines have no number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryCursor {
    /// The moment of the line there.
    pub at: Timestamp,
    /// How many lines of that moment are before the position.
    pub offset: i64,
}

impl HistoryCursor {
    /// The position after `lines`, which follow `before`; `None` for no lines.
    #[must_use]
    pub fn after(before: Option<Self>, lines: &[HistoryEntry]) -> Option<Self> {
        let at = lines.last()?.at;
        let here = lines.iter().rev().take_while(|line| line.at == at).count();
        let of_before = before.filter(|place| place.at == at && here == lines.len());
        let number = i64::try_from(here).unwrap_or(i64::MAX);
        Some(Self { at, offset: number.saturating_add(of_before.map_or(0, |place| place.offset)) })
    }
}

/// The last answers of a provider.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProviderSummary {
    /// Name of the provider.
    pub provider: String,
    /// Kind of the provider.
    pub kind: String,
    /// When it last returned a list.
    pub listed_at: Option<Timestamp>,
    /// Machines in that list.
    pub machines: Option<i64>,
    /// The error of its last failed list, if that is newer.
    pub error: Option<String>,
    /// When that error occurred.
    pub error_at: Option<Timestamp>,
    /// Why no machine is created at it; `None` without a brake.
    pub brake: Option<String>,
    /// Since when the brake is engaged.
    pub brake_since: Option<Timestamp>,
}

/// A column of a tag table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TagColumn {
    /// Name of the column.
    pub name: String,
    /// Type as the database writes it.
    pub kind: String,
}

/// One fact about a machine, found by the shape of its table.
#[derive(Clone, Debug, PartialEq)]
pub struct Tag {
    /// Name of the fact's table.
    pub table: String,
    /// Its columns in order, without the key.
    pub columns: Vec<TagColumn>,
    /// Values of the row by column.
    pub row: serde_json::Map<String, serde_json::Value>,
}

impl Bmdb {
    /// Runs `body` at one moment of the database: read-only, without locks, ended by the server after seconds. It may
    /// run several times.
    pub async fn transact_read_only<T, F>(&self, body: F) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, BmdbError>> + Send + Sync + 'static,
    {
        if self.settings().short_reads {
            return ReadPool::from_handle(self.clone()).read(body).await;
        }
        let body = Arc::new(body);
        self.transact(OPERATION, move |tx| {
            let body = body.clone();
            Box::pin(async move {
                tx.execute(sqlx::raw_sql(BEGIN)).await.context(OPERATION)?;
                body(tx).await
            })
        })
        .await
    }

    /// Everything that decides about one machine, at one moment.
    pub async fn machine_view(&self, machine: MachineId) -> Result<MachineView, BmdbError> {
        let bmdb = self.clone();
        self.transact_read_only(move |tx| {
            let bmdb = bmdb.clone();
            Box::pin(async move { read_machine_view(&bmdb, tx, machine).await })
        })
        .await
    }
}

/// Everything that decides about one machine, at the moment of this transaction.
pub async fn read_machine_view(
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    machine: MachineId,
) -> Result<MachineView, BmdbError> {
    let snapshot = read_snapshot(tx, machine).await?;
    let policy = policy_at_version(bmdb, tx, snapshot.policy_version).await?;
    let lanes = list_lanes(tx, machine).await?;
    let host_keys = read_host_keys(tx, machine).await?;
    let brakes = list_brakes(tx).await?;
    let pauses = list_pauses(tx).await?;
    let open_sessions = sqlx::query_file_scalar!("../../sql/inspect/count_open_sessions.sql")
        .fetch_one(&mut *tx)
        .await
        .context(OPERATION)?;
    let newer_fence = read_unknown_fence(tx, machine).await?;
    let cluster = membership_of_machine(tx, machine).await?;
    let release = read_roll_out_note(tx, machine).await?;
    Ok(MachineView {
        facts: snapshot.facts,
        at: snapshot.now,
        policy,
        policy_version: snapshot.policy_version,
        lanes,
        host_keys,
        brakes,
        pauses,
        open_sessions,
        unknown_fence: newer_fence,
        cluster,
        roll_out_note: release,
    })
}

/// Reads the database's clock in a transaction.
pub async fn database_now(tx: &mut PgConnection) -> Result<Timestamp, BmdbError> {
    sqlx::query_file_scalar!("../../sql/inspect/read_clock.sql").fetch_one(tx).await.context(OPERATION)
}

/// Machines whose id is between two, inclusive.
pub async fn machines_by_id(
    tx: &mut PgConnection,
    (first, last): (Uuid, Uuid),
    limit: i64,
) -> Result<Vec<MachineName>, BmdbError> {
    let rows = sqlx::query_file!("../../sql/inspect/list_by_id.sql", first, last, limit)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    Ok(rows
        .into_iter()
        .map(|row| MachineName {
            machine: row.machine_id,
            provider: row.provider,
            provider_id: row.provider_id,
        })
        .collect())
}

/// Machines with that provider id, at one provider or at any.
pub async fn machines_by_provider_id(
    tx: &mut PgConnection,
    provider: Option<&str>,
    id: &str,
    limit: i64,
) -> Result<Vec<MachineName>, BmdbError> {
    let rows = sqlx::query_file!("../../sql/inspect/list_by_provider_id.sql", provider, id, limit)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    Ok(rows
        .into_iter()
        .map(|row| MachineName {
            machine: row.machine_id,
            provider: row.provider,
            provider_id: row.provider_id,
        })
        .collect())
}

/// Machines whose provider id follows a text in the order of names.
pub async fn suggest_machines(
    tx: &mut PgConnection,
    text: &str,
    limit: i64,
) -> Result<Vec<MachineName>, BmdbError> {
    let rows = sqlx::query_file!("../../sql/inspect/suggest_ids.sql", text, limit)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    Ok(rows
        .into_iter()
        .map(|row| MachineName {
            machine: row.machine_id,
            provider: row.provider,
            provider_id: row.provider_id,
        })
        .collect())
}

/// Open sessions after one, oldest first; all of them follow the nil UUID.
pub async fn list_sessions(
    tx: &mut PgConnection,
    after: Uuid,
    limit: i64,
) -> Result<Vec<SessionSummary>, BmdbError> {
    let rows = sqlx::query_file!("../../sql/inspect/list_sessions.sql", after, limit)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    Ok(rows
        .into_iter()
        .map(|row| {
            let about = RuntimeInfo::of(Some(&row.runtime_info));
            SessionSummary {
                session: row.session_id,
                process: row.process_id,
                component: row.component,
                host: about.host,
                pid: about.pid,
                version: about.version,
                started_at: row.started_at,
                deadline: row.deadline,
                work: row.work,
            }
        })
        .collect())
}

/// Live work after one item, or from the beginning, longest running first.
pub async fn list_work(
    tx: &mut PgConnection,
    after: Option<&WorkCursor>,
    limit: i64,
) -> Result<Vec<WorkSummary>, BmdbError> {
    let beginning = WorkCursor::start();
    let WorkCursor { since, machine, lane } = after.unwrap_or(&beginning);
    let rows = sqlx::query_file!("../../sql/inspect/list_work.sql", since, machine, lane, limit)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    Ok(rows
        .into_iter()
        .map(|row| {
            let about = RuntimeInfo::of(row.runtime_info.as_ref());
            WorkSummary {
                name: MachineName {
                    machine: row.machine_id,
                    provider: row.provider,
                    provider_id: row.provider_id,
                },
                lane: row.lane,
                work: WorkHolder {
                    process: row.process,
                    fence: row.fence,
                    since: row.started_at,
                    session: row.session_id,
                    component: row.component,
                    host: about.host,
                    pid: about.pid,
                    session_deadline: row.session_deadline,
                    session_closed_at: row.session_closed_at,
                },
            }
        })
        .collect())
}

/// The last answers of every provider.
pub async fn list_providers(tx: &mut PgConnection) -> Result<Vec<ProviderSummary>, BmdbError> {
    sqlx::query_file_as!(ProviderSummary, "../../sql/inspect/list_providers.sql")
        .fetch_all(tx)
        .await
        .context(OPERATION)
}

/// Brakes that are engaged.
pub async fn list_brakes(tx: &mut PgConnection) -> Result<Vec<EngagedBrake>, BmdbError> {
    sqlx::query_file_as!(EngagedBrake, "../../sql/inspect/list_brakes.sql")
        .fetch_all(tx)
        .await
        .context(OPERATION)
}

/// The newest lines of a machine's history, newest first, or those that follow a position.
pub async fn list_history(
    tx: &mut PgConnection,
    machine: MachineId,
    after: Option<HistoryCursor>,
    limit: i64,
) -> Result<Vec<HistoryEntry>, BmdbError> {
    let (at, number) = (after.map(|place| place.at), after.map_or(0, |place| place.offset));
    let rows = sqlx::query_file!("../../sql/inspect/list_history.sql", machine.0, at, limit, number)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    Ok(rows
        .into_iter()
        .map(|row| HistoryEntry {
            at: row.at,
            event: row.event,
            lane: row.lane,
            fence: row.fence,
            process: row.process,
            session: row.session_id,
            component: row.component,
            host: RuntimeInfo::of(row.runtime_info.as_ref()).host,
            detail: row.detail,
        })
        .collect())
}

async fn list_lanes(tx: &mut PgConnection, machine: MachineId) -> Result<Vec<LaneView>, BmdbError> {
    let rows = sqlx::query_file!("../../sql/inspect/list_lanes.sql", machine.0)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    Ok(rows
        .into_iter()
        .map(|row| {
            let about = RuntimeInfo::of(row.runtime_info.as_ref());
            let held = row.work_process.zip(row.work_fence).zip(row.work_started_at).zip(row.session_id);
            let work = held.map(|(((process, fence), since), session)| WorkHolder {
                process,
                fence,
                since,
                session,
                component: row.component,
                host: about.host,
                pid: about.pid,
                session_deadline: row.session_deadline,
                session_closed_at: row.session_closed_at,
            });
            LaneView {
                lane: row.lane,
                process: row.process,
                ready_at: row.ready_at,
                timer: row.timer,
                reason: row.reason,
                decided_at: row.decided_at,
                deadline: row.deadline,
                priority: row.priority,
                fence: row.fence,
                losses: row.losses,
                not_before: row.not_before,
                phase_index: row.phase_index,
                phase_since: row.phase_since,
                rules_version: row.rules_version,
                policy_version: row.policy_version,
                work,
            }
        })
        .collect())
}

pub(crate) async fn read_host_keys(
    tx: &mut PgConnection,
    machine: MachineId,
) -> Result<Option<PinnedHostKey>, BmdbError> {
    let row = sqlx::query_file!("../../sql/facts/read_host_key.sql", machine.0)
        .fetch_optional(tx)
        .await
        .context(OPERATION)?;
    Ok(row.map(|row| PinnedHostKey {
        key: HostKey { algorithm: row.algorithm, key: row.public_key },
        source: row.source,
        pinned_at: row.pinned_at,
        rejected: row
            .refused_key
            .zip(row.refused_at)
            .map(|(key, at)| (HostKey { algorithm: row.refused_algorithm.unwrap_or_default(), key }, at)),
    }))
}

/// The runtime information that a session stores about its process.
#[derive(Default)]
struct RuntimeInfo {
    host: Option<String>,
    pid: Option<i64>,
    version: Option<String>,
}

impl RuntimeInfo {
    fn of(info: Option<&serde_json::Value>) -> Self {
        let Some(info) = info else { return Self::default() };
        let text = |key: &str| info.get(key).and_then(serde_json::Value::as_str).map(str::to_owned);
        Self {
            host: text("host"),
            pid: info.get("pid").and_then(serde_json::Value::as_i64),
            version: text("version"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_cursor_counts_entries_of_one_moment() {
        let at = |seconds: i64| DateTime::from_timestamp(1_800_000_000 + seconds, 0).unwrap();
        let lines = |moments: &[i64]| -> Vec<HistoryEntry> {
            let line = |&seconds: &i64| HistoryEntry {
                at: at(seconds),
                event: "held".to_owned(),
                lane: None,
                fence: None,
                process: None,
                session: None,
                component: None,
                host: None,
                detail: None,
            };
            moments.iter().map(line).collect()
        };
        let place = |seconds, number| Some(HistoryCursor { at: at(seconds), offset: number });
        for (before, moments, expected) in [
            (None, &[][..], None),
            (None, &[5, 4, 3], place(3, 1)),
            (None, &[5, 3, 3], place(3, 2)),
            (place(3, 2), &[3, 3], place(3, 4)),
            (place(3, 2), &[3, 2], place(2, 1)),
            (place(9, 2), &[3, 3], place(3, 2)),
        ] {
            assert_eq!(HistoryCursor::after(before, &lines(moments)), expected, "{before:?} {moments:?}");
        }
    }
}
