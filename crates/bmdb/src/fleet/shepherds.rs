//! The shepherds that work on the BMDB: their open sessions, grouped by process.
//!
//! A shepherd has a session for each component and each worker of its loops, so a list of sessions has dozens of lines for
//! one of them. The sessions are read in pages, as [`list_sessions`] does: there are as many as workers exist, which does
//! not depend on the number of machines.

use std::collections::BTreeMap;

use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::error::BmdbError;
use crate::fleet::sessions::{SessionSummary, list_sessions};
use model::pause::LoopKind;
use model::time::Timestamp;

/// Sessions that one statement reads at most.
const PAGE_SIZE: i64 = 1000;

/// A process with open sessions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShepherdSummary {
    /// Id of the process.
    pub process: Uuid,
    /// Host that it runs on; `None` if unknown.
    pub host: Option<String>,
    /// Its process id on that host.
    pub pid: Option<i64>,
    /// Release of the program.
    pub version: Option<String>,
    /// Number of open sessions of each component.
    pub components: BTreeMap<String, i64>,
    /// Number of these sessions that belong to workers of control loops.
    pub workers: i64,
    /// When the oldest of the sessions started.
    pub started_at: Timestamp,
    /// When the last of the sessions ends unless it is renewed.
    pub deadline: Timestamp,
    /// Number of work items under the sessions.
    pub work: i64,
}

/// Every process with an open session, by host and process id.
pub async fn list_shepherds(tx: &mut PgConnection) -> Result<Vec<ShepherdSummary>, BmdbError> {
    let (mut sessions, mut after) = (Vec::new(), Uuid::nil());
    loop {
        let page = list_sessions(tx, after, PAGE_SIZE).await?;
        let is_full = i64::try_from(page.len()).is_ok_and(|length| length >= PAGE_SIZE);
        after = page.last().map_or(after, |last| last.session);
        sessions.extend(page);
        if !is_full {
            return Ok(group_sessions(sessions));
        }
    }
}

/// The processes of these sessions.
fn group_sessions(sessions: Vec<SessionSummary>) -> Vec<ShepherdSummary> {
    let mut shepherds: BTreeMap<Uuid, ShepherdSummary> = BTreeMap::new();
    for session in sessions {
        let shepherd = shepherds.entry(session.process).or_insert_with(|| ShepherdSummary {
            process: session.process,
            host: None,
            pid: None,
            version: None,
            components: BTreeMap::new(),
            workers: 0,
            started_at: session.started_at,
            deadline: session.deadline,
            work: 0,
        });
        shepherd.host = shepherd.host.take().or(session.host);
        shepherd.pid = shepherd.pid.or(session.pid);
        shepherd.version = shepherd.version.take().or(session.version);
        shepherd.workers += i64::from(session.component.parse::<LoopKind>().is_ok());
        *shepherd.components.entry(session.component).or_default() += 1;
        shepherd.started_at = shepherd.started_at.min(session.started_at);
        shepherd.deadline = shepherd.deadline.max(session.deadline);
        shepherd.work += session.work;
    }
    let mut shepherds: Vec<ShepherdSummary> = shepherds.into_values().collect();
    // The ids alone would put them into a random order.
    shepherds.sort_by(|a, b| (&a.host, a.pid, a.process).cmp(&(&b.host, b.pid, b.process)));
    shepherds
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(process: u128, host: Option<&str>, component: &str, second: i64, work: i64) -> SessionSummary {
        let at = |second| Timestamp::from_timestamp(second, 0).unwrap();
        SessionSummary {
            session: Uuid::from_u128(100),
            process: Uuid::from_u128(process),
            component: component.to_owned(),
            host: host.map(str::to_owned),
            pid: host.map(|_| 7),
            version: host.map(|_| "1.0".to_owned()),
            started_at: at(second),
            deadline: at(second + 60),
            work,
        }
    }

    #[test]
    fn sessions_of_a_process_are_one_shepherd() {
        let shepherds = group_sessions(vec![
            session(1, Some("rack2"), "api", 5, 0),
            session(2, Some("rack1"), "initializer", 9, 1),
            session(2, None, "initializer", 3, 2),
            session(2, Some("rack1"), "callback", 4, 0),
        ]);
        let hosts: Vec<Option<&str>> = shepherds.iter().map(|one| one.host.as_deref()).collect();
        assert_eq!(hosts, [Some("rack1"), Some("rack2")], "by host");
        let first = &shepherds[0];
        assert_eq!(
            (first.process, first.pid, first.version.as_deref()),
            (Uuid::from_u128(2), Some(7), Some("1.0"))
        );
        let components: Vec<(&str, i64)> =
            first.components.iter().map(|(name, count)| (name.as_str(), *count)).collect();
        assert_eq!(components, [("callback", 1), ("initializer", 2)]);
        assert_eq!((first.workers, first.work), (2, 3), "a callback server is no worker");
        assert_eq!((first.started_at.timestamp(), first.deadline.timestamp()), (3, 69));
        assert!(group_sessions(Vec::new()).is_empty());
    }
}
