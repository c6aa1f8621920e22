//! What people ask of the BMDB: lists, one machine in full, what happened.
//!
//! Everything is read in a [`Bmdb::inspect`] transaction: one moment, read-only,
//! no row locks, an end after seconds. A person who looks must not be able to
//! slow down a fleet, so lists go through indexes a page at a time and stop at
//! their limit; nothing here counts machines.
//!
//! Lists show `phase_index`, a copy that may lag behind the truth by a moment;
//! what is said of one machine ([`MachineView`]) is computed from its facts.
//!
//! The types are what `shepherdctl -o json` prints: a field may be added, none
//! changes its name or meaning.

use std::sync::Arc;

use chrono::DateTime;
use futures::future::BoxFuture;
use serde::Serialize;
use sqlx::{Executor, PgConnection};
use uuid::Uuid;

use crate::bmdb::cluster::part_of;
use crate::bmdb::connection::{Bmdb, Doing};
use crate::bmdb::error::BmdbError;
use crate::bmdb::facts::read;
use crate::bmdb::look::Looks;
use crate::bmdb::newer_fence::newer_fence_of;
use crate::bmdb::pause::pauses;
use crate::bmdb::policy::policy_of_version;
use crate::bmdb::roll_out::note_of;
use crate::model::host_key::{HostKey, PinnedHostKey};
use crate::model::ids::MachineId;
use crate::model::label::Labels;
use crate::model::machine_view::{BrakeLine, Holder, LaneView, MachineName, MachineView};
use crate::model::time::Timestamp;

const BEGIN: &str = include_str!("../../sql/inspect/begin_read_only.sql");
const WHAT: &str = "reading what to show";

/// A line of the list of machines.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MachineLine {
    /// Its names.
    #[serde(flatten)]
    pub name: MachineName,
    /// Phase as it is indexed.
    pub phase: String,
    /// Since when.
    pub phase_since: Timestamp,
    /// Host name or IP literal.
    pub address: Option<String>,
    /// Where it stands.
    pub location: Option<String>,
    /// When its agent last reported.
    pub heartbeat_at: Option<Timestamp>,
    /// The process being worked on in the access lane now.
    pub working: Option<String>,
    /// What it is due for next in the access lane; `null` when nothing happens by time alone.
    pub process: Option<String>,
    /// When; for a healthy machine a lower bound.
    pub ready_at: Option<Timestamp>,
    /// Why that and not earlier.
    pub reason: String,
    /// What people say of it.
    pub labels: Labels,
    /// `urgent` or `low`, where a person puts its work before or behind that of others.
    pub priority: Option<String>,
}

/// A line of history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HistoryLine {
    /// When.
    pub at: Timestamp,
    /// What.
    pub event: String,
    /// Lane of the work it is about.
    pub lane: Option<String>,
    /// Fence of that work.
    pub fence: Option<i64>,
    /// Its process.
    pub process: Option<String>,
    /// The session it was done under.
    pub session: Option<Uuid>,
    /// What that session was for.
    pub component: Option<String>,
    /// Host of the process that had it.
    pub host: Option<String>,
    /// More.
    pub detail: Option<String>,
}

/// An open session.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SessionLine {
    /// Its id.
    pub session: Uuid,
    /// The `shepherd` it belongs to.
    pub process: Uuid,
    /// What it is for.
    pub component: String,
    /// Host of that process.
    pub host: Option<String>,
    /// Its process id there.
    pub pid: Option<i64>,
    /// Its release.
    pub version: Option<String>,
    /// Since when.
    pub started_at: Timestamp,
    /// When it ends unless it is renewed.
    pub deadline: Timestamp,
    /// Work items that hang off it.
    pub work: i64,
}

/// A live work item.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorkLine {
    /// On which machine.
    #[serde(flatten)]
    pub name: MachineName,
    /// In which lane.
    pub lane: String,
    /// By whom.
    pub work: Holder,
}

/// A place in the list of live work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkPlace {
    /// When the item there was begun.
    pub since: Timestamp,
    /// On which machine.
    pub machine: Uuid,
    /// In which lane.
    pub lane: String,
}

impl WorkPlace {
    /// Before all of it.
    fn beginning() -> Self {
        Self { since: DateTime::UNIX_EPOCH, machine: Uuid::nil(), lane: String::new() }
    }

    /// The place of an item.
    #[must_use]
    pub fn of(line: &WorkLine) -> Self {
        Self { since: line.work.since, machine: line.name.machine, lane: line.lane.clone() }
    }
}

/// A place in a machine's history. Several things may happen at one moment, and lines have no number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryPlace {
    /// The moment of the line there.
    pub at: Timestamp,
    /// How many lines of that moment are before the place.
    pub told: i64,
}

impl HistoryPlace {
    /// The place after `lines`, which follow `before`; `None` where there are none.
    #[must_use]
    pub fn after(before: Option<Self>, lines: &[HistoryLine]) -> Option<Self> {
        let at = lines.last()?.at;
        let here = lines.iter().rev().take_while(|line| line.at == at).count();
        let of_before = before.filter(|place| place.at == at && here == lines.len());
        let told = i64::try_from(here).unwrap_or(i64::MAX);
        Some(Self { at, told: told.saturating_add(of_before.map_or(0, |place| place.told)) })
    }
}

/// What a provider answered last.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProviderLine {
    /// Its name.
    pub provider: String,
    /// Its kind.
    pub kind: String,
    /// When it last gave a list.
    pub listed_at: Option<Timestamp>,
    /// Machines in that list.
    pub machines: Option<i64>,
    /// Why it gave none since.
    pub error: Option<String>,
    /// When that was.
    pub error_at: Option<Timestamp>,
    /// Why no machine is taken from it.
    pub brake: Option<String>,
    /// Since when.
    pub brake_since: Option<Timestamp>,
}

/// A column of a tag table: its name, its type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TagColumn {
    /// Name.
    pub name: String,
    /// Type as the database writes it.
    pub kind: String,
}

/// One fact about a machine, found by the shape of its table.
#[derive(Clone, Debug, PartialEq)]
pub struct Tag {
    /// The table's name.
    pub table: String,
    /// Its columns in their order, the key left out.
    pub columns: Vec<TagColumn>,
    /// The row.
    pub row: serde_json::Map<String, serde_json::Value>,
}

impl Bmdb {
    /// Runs `body` at one moment of the database: read-only, without locks, ended by the server after
    /// seconds. It may run several times.
    pub async fn inspect<T, F>(&self, body: F) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, BmdbError>> + Send + Sync + 'static,
    {
        if self.settings().brief {
            return Looks::of(self.clone()).look(body).await;
        }
        let body = Arc::new(body);
        self.transact(WHAT, move |tx| {
            let body = body.clone();
            Box::pin(async move {
                tx.execute(sqlx::raw_sql(BEGIN)).await.doing(WHAT)?;
                body(tx).await
            })
        })
        .await
    }

    /// Everything that decides about one machine, at one moment.
    pub async fn machine_view(&self, machine: MachineId) -> Result<MachineView, BmdbError> {
        let bmdb = self.clone();
        self.inspect(move |tx| {
            let bmdb = bmdb.clone();
            Box::pin(async move { view(&bmdb, tx, machine).await })
        })
        .await
    }
}

/// Everything that decides about one machine, at the moment of this transaction.
pub async fn view(bmdb: &Bmdb, tx: &mut PgConnection, machine: MachineId) -> Result<MachineView, BmdbError> {
    let snapshot = read(tx, machine).await?;
    let policy = policy_of_version(bmdb, tx, snapshot.policy_version).await?;
    let lanes = lanes(tx, machine).await?;
    let host_keys = host_keys(tx, machine).await?;
    let brakes = brakes(tx).await?;
    let pauses = pauses(tx).await?;
    let open_sessions = sqlx::query_file_scalar!("sql/inspect/count_open_sessions.sql")
        .fetch_one(&mut *tx)
        .await
        .doing(WHAT)?;
    let newer_fence = newer_fence_of(tx, machine).await?;
    let cluster = part_of(tx, machine).await?;
    let release = note_of(tx, machine).await?;
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
        newer_fence,
        cluster,
        release,
    })
}

/// The database's clock.
pub async fn now(tx: &mut PgConnection) -> Result<Timestamp, BmdbError> {
    sqlx::query_file_scalar!("sql/inspect/read_clock.sql").fetch_one(tx).await.doing(WHAT)
}

/// Machines whose id lies between two, ends included.
pub async fn machines_by_id(
    tx: &mut PgConnection,
    (first, last): (Uuid, Uuid),
    limit: i64,
) -> Result<Vec<MachineName>, BmdbError> {
    let rows = sqlx::query_file!("sql/inspect/list_by_id.sql", first, last, limit)
        .fetch_all(tx)
        .await
        .doing(WHAT)?;
    Ok(rows
        .into_iter()
        .map(|row| MachineName {
            machine: row.machine_id,
            provider: row.provider,
            provider_id: row.provider_id,
        })
        .collect())
}

/// Machines that a provider, or any, calls so.
pub async fn machines_by_provider_id(
    tx: &mut PgConnection,
    provider: Option<&str>,
    id: &str,
    limit: i64,
) -> Result<Vec<MachineName>, BmdbError> {
    let rows = sqlx::query_file!("sql/inspect/list_by_provider_id.sql", provider, id, limit)
        .fetch_all(tx)
        .await
        .doing(WHAT)?;
    Ok(rows
        .into_iter()
        .map(|row| MachineName {
            machine: row.machine_id,
            provider: row.provider,
            provider_id: row.provider_id,
        })
        .collect())
}

/// Machines whose provider's name for them follows a text in the order of names.
pub async fn machines_near(
    tx: &mut PgConnection,
    text: &str,
    limit: i64,
) -> Result<Vec<MachineName>, BmdbError> {
    let rows =
        sqlx::query_file!("sql/inspect/suggest_ids.sql", text, limit).fetch_all(tx).await.doing(WHAT)?;
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
pub async fn sessions(tx: &mut PgConnection, after: Uuid, limit: i64) -> Result<Vec<SessionLine>, BmdbError> {
    let rows =
        sqlx::query_file!("sql/inspect/list_sessions.sql", after, limit).fetch_all(tx).await.doing(WHAT)?;
    Ok(rows
        .into_iter()
        .map(|row| {
            let about = Runtime::of(Some(&row.runtime_info));
            SessionLine {
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

/// Live work after one item, or all, longest running first.
pub async fn work(
    tx: &mut PgConnection,
    after: Option<&WorkPlace>,
    limit: i64,
) -> Result<Vec<WorkLine>, BmdbError> {
    let beginning = WorkPlace::beginning();
    let WorkPlace { since, machine, lane } = after.unwrap_or(&beginning);
    let rows = sqlx::query_file!("sql/inspect/list_work.sql", since, machine, lane, limit)
        .fetch_all(tx)
        .await
        .doing(WHAT)?;
    Ok(rows
        .into_iter()
        .map(|row| {
            let about = Runtime::of(row.runtime_info.as_ref());
            WorkLine {
                name: MachineName {
                    machine: row.machine_id,
                    provider: row.provider,
                    provider_id: row.provider_id,
                },
                lane: row.lane,
                work: Holder {
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

/// What every provider answered last.
pub async fn providers(tx: &mut PgConnection) -> Result<Vec<ProviderLine>, BmdbError> {
    sqlx::query_file_as!(ProviderLine, "sql/inspect/list_providers.sql").fetch_all(tx).await.doing(WHAT)
}

/// Brakes that are on.
pub async fn brakes(tx: &mut PgConnection) -> Result<Vec<BrakeLine>, BmdbError> {
    sqlx::query_file_as!(BrakeLine, "sql/inspect/list_brakes.sql").fetch_all(tx).await.doing(WHAT)
}

/// The newest lines of a machine's history, newest first, or those that follow a place.
pub async fn history(
    tx: &mut PgConnection,
    machine: MachineId,
    after: Option<HistoryPlace>,
    limit: i64,
) -> Result<Vec<HistoryLine>, BmdbError> {
    let (at, told) = (after.map(|place| place.at), after.map_or(0, |place| place.told));
    let rows = sqlx::query_file!("sql/inspect/list_history.sql", machine.0, at, limit, told)
        .fetch_all(tx)
        .await
        .doing(WHAT)?;
    Ok(rows
        .into_iter()
        .map(|row| HistoryLine {
            at: row.at,
            event: row.event,
            lane: row.lane,
            fence: row.fence,
            process: row.process,
            session: row.session_id,
            component: row.component,
            host: Runtime::of(row.runtime_info.as_ref()).host,
            detail: row.detail,
        })
        .collect())
}

async fn lanes(tx: &mut PgConnection, machine: MachineId) -> Result<Vec<LaneView>, BmdbError> {
    let rows = sqlx::query_file!("sql/inspect/list_lanes.sql", machine.0).fetch_all(tx).await.doing(WHAT)?;
    Ok(rows
        .into_iter()
        .map(|row| {
            let about = Runtime::of(row.runtime_info.as_ref());
            let held = row.work_process.zip(row.work_fence).zip(row.work_started_at).zip(row.session_id);
            let work = held.map(|(((process, fence), since), session)| Holder {
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

pub(crate) async fn host_keys(
    tx: &mut PgConnection,
    machine: MachineId,
) -> Result<Option<PinnedHostKey>, BmdbError> {
    let row =
        sqlx::query_file!("sql/facts/read_host_key.sql", machine.0).fetch_optional(tx).await.doing(WHAT)?;
    Ok(row.map(|row| PinnedHostKey {
        key: HostKey { algorithm: row.algorithm, key: row.public_key },
        source: row.source,
        pinned_at: row.pinned_at,
        refused: row
            .refused_key
            .zip(row.refused_at)
            .map(|(key, at)| (HostKey { algorithm: row.refused_algorithm.unwrap_or_default(), key }, at)),
    }))
}

/// What a session says of its process.
#[derive(Default)]
struct Runtime {
    host: Option<String>,
    pid: Option<i64>,
    version: Option<String>,
}

impl Runtime {
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
    fn place_in_a_history_counts_what_happened_at_one_moment() {
        let at = |seconds: i64| DateTime::from_timestamp(1_800_000_000 + seconds, 0).unwrap();
        let lines = |moments: &[i64]| -> Vec<HistoryLine> {
            let line = |&seconds: &i64| HistoryLine {
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
        let place = |seconds, told| Some(HistoryPlace { at: at(seconds), told });
        for (before, moments, expected) in [
            (None, &[][..], None),
            (None, &[5, 4, 3], place(3, 1)),
            (None, &[5, 3, 3], place(3, 2)),
            (place(3, 2), &[3, 3], place(3, 4)),
            (place(3, 2), &[3, 2], place(2, 1)),
            (place(9, 2), &[3, 3], place(3, 2)),
        ] {
            assert_eq!(HistoryPlace::after(before, &lines(moments)), expected, "{before:?} {moments:?}");
        }
    }
}
