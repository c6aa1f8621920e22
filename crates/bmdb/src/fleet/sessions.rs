//! Open sessions and live work of all processes, in pages.

use chrono::DateTime;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::DbContext;
use crate::connection::error::BmdbError;
use crate::engine::session::RuntimeInfo;
use crate::machine::lookup::machine_name;
use model::machine_view::{MachineName, WorkHolder};
use model::time::Timestamp;

const OPERATION: &str = "reading what to show";

/// An open session, with its owner.
#[derive(Clone, Debug, PartialEq)]
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
#[derive(Clone, Debug, PartialEq)]
pub struct WorkSummary {
    /// Names of its machine.
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
                name: machine_name(row.machine_id, row.provider, row.provider_id),
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
