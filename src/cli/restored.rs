//! `restored`: this BMDB is a restored backup, and the one that counts from now on.

use serde::Serialize;

use crate::bmdb::action::by;
use crate::bmdb::connection::Bmdb;
use crate::bmdb::restore::LiveSession;
use crate::cli::command::Restored as Arguments;
use crate::cli::error::CliError;
use crate::cli::get::json;
use crate::cli::operate::{direct, who};
use crate::cli::output::Format;
use crate::model::newer_fence::LIFT;

#[derive(Serialize)]
struct Answer {
    machines: usize,
    fences_lifted_by: i64,
    sessions_ended: usize,
    work_freed: usize,
    steps_of_unknown_outcome: usize,
}

/// `restored`.
pub async fn restored(bmdb: &Bmdb, arguments: &Arguments, format: Format) -> Result<String, CliError> {
    if arguments.reason.trim().is_empty() {
        return Err(CliError::Wrong("--reason is empty; say which backup was restored, and why".into()));
    }
    let live = bmdb.live_sessions().await?;
    if !live.is_empty() {
        return Err(CliError::Wrong(still_working(&live)));
    }
    let reason = Some(arguments.reason.as_str());
    let order = direct("declare restored", "the BMDB".to_owned(), reason);
    let restored = bmdb.declare_restored(order, &by(&who(), reason)).await?;
    let answer = Answer {
        machines: restored.machines,
        fences_lifted_by: LIFT,
        sessions_ended: restored.sessions,
        work_freed: restored.work,
        steps_of_unknown_outcome: restored.steps,
    };
    match format {
        Format::Json => json(&answer),
        Format::Table => Ok(format!(
            "The fences of {} machines are lifted by {LIFT}; ended {} sessions of the backup, freed {} work items, \
             and {} steps that were under way have an unknown outcome.\nStart the shepherds now.\n",
            answer.machines, answer.sessions_ended, answer.work_freed, answer.steps_of_unknown_outcome
        )),
    }
}

fn still_working(live: &[LiveSession]) -> String {
    let mut who: Vec<String> = live
        .iter()
        .map(|session| {
            let unknown = || "?".to_owned();
            format!(
                "process {} on {}",
                session.pid.clone().unwrap_or_else(unknown),
                session.host.clone().unwrap_or_else(unknown)
            )
        })
        .collect();
    who.sort();
    who.dedup();
    format!(
        "shepherds are working on this BMDB ({}): stop every one of them, then say this again; nothing was changed",
        who.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_works_is_named_once() {
        let session = |component: &str, pid: &str| LiveSession {
            component: component.to_owned(),
            host: Some("rack1".to_owned()),
            pid: Some(pid.to_owned()),
        };
        let said =
            still_working(&[session("initializer", "7"), session("recoverer", "7"), session("updater", "8")]);
        assert!(
            said.starts_with("shepherds are working on this BMDB (process 7 on rack1, process 8 on rack1):"),
            "{said}"
        );
    }
}
