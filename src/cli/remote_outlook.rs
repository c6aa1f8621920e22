//! What the API answers about the whole fleet and all of one machine, as the types that answers are printed
//! from: see [`crate::cli::remote_read`]. Plans and lists of issues come in pieces of one answer.

use std::time::Duration;

use serde_json::Value;
use tonic::Streaming;

use crate::bmdb::inspect::{Tag, TagColumn};
use crate::cli::command;
use crate::cli::describe::Described;
use crate::cli::error::CliError;
use crate::cli::plan::Told;
use crate::cli::remote::{Remote, refused};
use crate::cli::remote_read::{at, event, holder, moment, name, odd, phase, process};
use crate::model::issues::{Issue, Kind, Severity};
use crate::model::machine_view::LaneView;
use crate::model::pause::Pause;
use crate::model::plan::Row;
use crate::model::plan::diff::Difference;
use crate::model::plan::foreseen::{self, Foreseen, What};
use crate::model::time::Timestamp;
use crate::model::waits::Wait;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::issues_client::IssuesClient;
use crate::proto::fleet::v1::plan_client::PlanClient;

/// How long a piece may take to come: a shepherd looks at the whole fleet, when it is our turn, before it
/// tells the first one.
const PIECE_LIMIT: Duration = Duration::from_mins(3);

async fn next<T>(pieces: &mut Streaming<T>, remote: &Remote) -> Result<Option<T>, CliError> {
    let waited = tokio::time::timeout(PIECE_LIMIT, pieces.message()).await;
    let late = |_| {
        CliError::Failed(format!(
            "{} began to answer and then said nothing for {} seconds; ask again, or with --direct and --bmdb_url the \
             database itself",
            remote.server(),
            PIECE_LIMIT.as_secs()
        ))
    };
    waited.map_err(late)?.map_err(refused)
}

/// What the loops would do.
pub async fn plan(
    remote: &Remote,
    asked: &command::Plan,
    configuration: Option<String>,
    limit: u32,
) -> Result<Told, CliError> {
    let is_diff = configuration.is_some();
    let request = v1::GetPlanRequest {
        machine: asked.machine.clone().unwrap_or_default(),
        process: asked.process.clone().unwrap_or_default(),
        horizon: asked.horizon.to_string(),
        configuration,
        limit: i32::try_from(limit).unwrap_or(i32::MAX),
    };
    let mut pieces = PlanClient::new(remote.service()).get(request).await.map_err(refused)?.into_inner();
    let (mut head, mut rows, mut differences) = (None, Vec::new(), Vec::new());
    while let Some(piece) = next(&mut pieces, remote).await? {
        head = head.or(piece.head);
        for said in piece.rows {
            rows.push(row(said)?);
        }
        for said in piece.differences {
            differences.push(difference(said)?);
        }
    }
    let head = head.ok_or_else(|| odd("what its plan is of"))?;
    let waits = head.waits.into_iter().map(|wait| foreseen::Wait { lane: wait.lane, reason: wait.reason });
    Ok(Told {
        name: head.name.map(|said| name(Some(said))).transpose()?,
        foreseen: Foreseen {
            at: at(head.at, "its moment")?,
            until: at(head.until, "the end of its plan")?,
            cut: head.cut,
            what: if is_diff { What::Differences(differences) } else { What::Rows(rows) },
            waits: waits.collect(),
            paused: head.paused.into_iter().map(paused).collect::<Result<_, _>>()?,
        },
        total: usize::try_from(head.total).unwrap_or_default(),
        assumptions: head.assumptions,
    })
}

fn paused(said: v1::PausedLoop) -> Result<Pause, CliError> {
    let pause = said.pause.ok_or_else(|| odd("how a loop is paused"))?;
    Ok(Pause {
        of: said.name.parse().map_err(|_| odd("a loop that this release knows"))?,
        provider: pause.provider,
        reason: pause.reason,
        by: pause.by,
        since: at(pause.since, "a pause's beginning")?,
        until: pause.until.and_then(moment),
    })
}

fn row(said: v1::PlanRow) -> Result<Row, CliError> {
    Ok(Row {
        at: at(said.at, "when a work item is begun")?,
        name: name(said.name)?,
        process: process(&said.process),
        what: said.what,
        under_way: said.under_way,
    })
}

fn difference(said: v1::PlanDifference) -> Result<Difference, CliError> {
    Ok(Difference {
        name: name(said.name)?,
        process: process(&said.process),
        what: said.what,
        before: said.before.and_then(moment),
        after: said.after.and_then(moment),
    })
}

/// What is wrong, and at which moment.
pub async fn issues(remote: &Remote) -> Result<(Timestamp, Vec<Issue>), CliError> {
    let request = v1::ListIssuesRequest {};
    let mut pieces = IssuesClient::new(remote.service()).list(request).await.map_err(refused)?.into_inner();
    let (mut now, mut issues) = (None, Vec::new());
    while let Some(piece) = next(&mut pieces, remote).await? {
        now = now.or(piece.at);
        for said in piece.issues {
            issues.push(issue(said)?);
        }
    }
    Ok((at(now, "its moment")?, issues))
}

fn issue(said: v1::Issue) -> Result<Issue, CliError> {
    let id = Kind::ALL.into_iter().map(Kind::id).find(|id| *id == said.id);
    let severities = [Severity::Critical, Severity::Warning, Severity::Notice];
    let severity = severities.into_iter().find(|severity| severity.as_str() == said.severity);
    Ok(Issue {
        id: id.unwrap_or("(of another release)"),
        severity: severity.ok_or_else(|| odd("how urgent an issue is"))?,
        about: said.about,
        machines: said.machines.into_iter().map(|one| name(Some(one))).collect::<Result<_, _>>()?,
        evidence: said.evidence,
        since: said.since.and_then(moment),
        remedy: said.remedy,
        page: said.page,
    })
}

/// Everything that is known of one machine.
pub fn described(said: v1::DescribeMachineResponse) -> Result<Described, CliError> {
    Ok(Described {
        name: name(said.name)?,
        phase: phase(&said.phase),
        created_at: at(said.created_at, "since when a machine is known")?,
        at: at(said.at, "its moment")?,
        tags: said.facts.into_iter().map(tag).collect::<Result<_, _>>()?,
        schedule: said.schedule.into_iter().map(lane).collect::<Result<_, _>>()?,
        backoffs: said.backoffs.into_iter().map(wait).collect::<Result<_, _>>()?,
        postponements: said.postponements.into_iter().map(wait).collect::<Result<_, _>>()?,
        events: said.events.into_iter().map(event).collect::<Result<_, _>>()?,
    })
}

fn tag(said: v1::Fact) -> Result<Tag, CliError> {
    let Ok(Value::Object(row)) = serde_json::from_str(&said.row) else { return Err(odd("a fact's row")) };
    let columns = said.columns.into_iter().map(|one| TagColumn { name: one.name, kind: one.r#type });
    Ok(Tag { table: said.table, columns: columns.collect(), row })
}

fn wait(said: v1::Wait) -> Result<Wait, CliError> {
    Ok(Wait {
        process: process(&said.process),
        active: said.active,
        until: at(said.until, "the end of a wait")?,
        failures: said.failures,
        last_interval_seconds: said.last_interval_seconds,
        reason: said.reason,
    })
}

fn lane(said: v1::Lane) -> Result<LaneView, CliError> {
    Ok(LaneView {
        lane: said.lane,
        process: said.process,
        ready_at: said.ready_at.and_then(moment),
        timer: said.timer,
        reason: said.reason,
        decided_at: said.decided_at,
        deadline: said.deadline.and_then(moment),
        priority: said.priority,
        fence: said.fence,
        losses: said.losses,
        not_before: said.not_before.and_then(moment),
        phase_index: said.phase_index,
        phase_since: at(said.phase_since, "a phase's beginning")?,
        rules_version: said.rules_version,
        policy_version: said.policy_version,
        work: said.work.map(holder).transpose()?,
    })
}
