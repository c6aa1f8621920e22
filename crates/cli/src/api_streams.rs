//! Fetch plans and issues, which the API streams in chunks.
//!
//! The results are the types that commands print, as in [`crate::api_decode`]. The description of one machine is
//! decoded here too.

use std::time::Duration;

use serde_json::Value;
use tonic::Streaming;

use crate::api_decode::{
    decode_event, decode_holder, decode_machine_name, decode_timestamp, missing_field, phase_name,
    process_name, require_timestamp,
};
use crate::command;
use crate::describe::MachineDescription;
use crate::error::CliError;
use crate::fleet_client::{FleetClient, status_to_error};
use crate::plan::PlanReport;
use bmdb::inspect::{Tag, TagColumn};
use model::issues::{Issue, IssueKind, Severity};
use model::machine_view::LaneView;
use model::pause::Pause;
use model::plan::PlanRow;
use model::plan::diff::PlanDifference;
use model::plan::query::{self, PlanContent, PlanResult};
use model::time::Timestamp;
use model::waits::ProcessWait;
use proto::fleet::v1;
use proto::fleet::v1::issues_client::IssuesClient;
use proto::fleet::v1::plan_client::PlanClient;

/// Longest wait for a chunk. Before it sends the first one, the service waits for a free slot and reads the whole
/// fleet.
const CHUNK_TIMEOUT: Duration = Duration::from_mins(3);

async fn next_chunk<T>(pieces: &mut Streaming<T>, client: &FleetClient) -> Result<Option<T>, CliError> {
    let waited = tokio::time::timeout(CHUNK_TIMEOUT, pieces.message()).await;
    let late = |_| {
        let alternative = if client.is_in_process() {
            ""
        } else {
            ", or use --direct and --bmdb_url to query the database itself"
        };
        CliError::Failed(format!(
            "{} began to answer and then sent nothing for {} seconds; try again{alternative}",
            client.current_server(),
            CHUNK_TIMEOUT.as_secs()
        ))
    };
    waited.map_err(late)?.map_err(status_to_error)
}

/// Fetches the plan of the control loops.
pub async fn fetch_plan(
    client: &FleetClient,
    args: &command::PlanArgs,
    configuration: Option<String>,
    limit: u32,
) -> Result<PlanReport, CliError> {
    let is_diff = configuration.is_some();
    let request = v1::GetPlanRequest {
        machine: args.machine.clone().unwrap_or_default(),
        process: args.process.clone().unwrap_or_default(),
        horizon: args.horizon.to_string(),
        configuration,
        limit: i32::try_from(limit).unwrap_or(i32::MAX),
    };
    let mut pieces =
        PlanClient::new(client.channel()).get(request).await.map_err(status_to_error)?.into_inner();
    let (mut head, mut rows, mut differences) = (None, Vec::new(), Vec::new());
    while let Some(piece) = next_chunk(&mut pieces, client).await? {
        head = head.or(piece.head);
        for plan_row in piece.rows {
            rows.push(decode_plan_row(plan_row)?);
        }
        for difference in piece.differences {
            differences.push(decode_difference(difference)?);
        }
    }
    let head = head.ok_or_else(|| missing_field("the subject of its plan"))?;
    let waits =
        head.lane_waits.into_iter().map(|wait| query::LaneWait { lane: wait.lane, reason: wait.reason });
    Ok(PlanReport {
        machine: head.name.map(|name| decode_machine_name(Some(name))).transpose()?,
        result: PlanResult {
            at: require_timestamp(head.at, "its read time")?,
            until: require_timestamp(head.until, "the end of its plan")?,
            truncated: head.truncated,
            content: if is_diff { PlanContent::Differences(differences) } else { PlanContent::Rows(rows) },
            lane_waits: waits.collect(),
            pauses: head.pauses.into_iter().map(decode_paused_loop).collect::<Result<_, _>>()?,
        },
        total: usize::try_from(head.total).unwrap_or_default(),
        assumptions: head.assumptions,
    })
}

fn decode_paused_loop(paused_loop: v1::PausedLoop) -> Result<Pause, CliError> {
    let pause = paused_loop.pause.ok_or_else(|| missing_field("the pause of a loop"))?;
    Ok(Pause {
        loop_kind: paused_loop.name.parse().map_err(|_| missing_field("a loop that this release knows"))?,
        provider: pause.provider,
        reason: pause.reason,
        by: pause.paused_by,
        since: require_timestamp(pause.since, "the start time of a pause")?,
        until: pause.until.and_then(decode_timestamp),
    })
}

fn decode_plan_row(plan_row: v1::PlanRow) -> Result<PlanRow, CliError> {
    Ok(PlanRow {
        at: require_timestamp(plan_row.starts_at, "the time when a work item is begun")?,
        name: decode_machine_name(plan_row.name)?,
        process: process_name(&plan_row.process),
        action: plan_row.action,
        in_progress: plan_row.in_progress,
    })
}

fn decode_difference(difference: v1::PlanDifference) -> Result<PlanDifference, CliError> {
    Ok(PlanDifference {
        name: decode_machine_name(difference.name)?,
        process: process_name(&difference.process),
        action: difference.action,
        before: difference.before.and_then(decode_timestamp),
        after: difference.after.and_then(decode_timestamp),
    })
}

/// Fetches the current issues, and the moment at which they were read.
pub async fn fetch_issues(client: &FleetClient) -> Result<(Timestamp, Vec<Issue>), CliError> {
    let request = v1::ListIssuesRequest {};
    let mut pieces =
        IssuesClient::new(client.channel()).list(request).await.map_err(status_to_error)?.into_inner();
    let (mut now, mut issues) = (None, Vec::new());
    while let Some(piece) = next_chunk(&mut pieces, client).await? {
        now = now.or(piece.read_at);
        for issue in piece.issues {
            issues.push(decode_issue(issue)?);
        }
    }
    Ok((require_timestamp(now, "its read time")?, issues))
}

fn decode_issue(issue: v1::Issue) -> Result<Issue, CliError> {
    let id = IssueKind::ALL.into_iter().map(IssueKind::id).find(|id| *id == issue.id);
    let severities = [Severity::Critical, Severity::Warning, Severity::Notice];
    let severity = severities.into_iter().find(|severity| severity.as_str() == issue.severity);
    Ok(Issue {
        id: id.unwrap_or("(of another release)"),
        severity: severity.ok_or_else(|| missing_field("the severity of an issue"))?,
        subject: issue.subject,
        machines: issue
            .machines
            .into_iter()
            .map(|one| decode_machine_name(Some(one)))
            .collect::<Result<_, _>>()?,
        message: issue.message,
        since: issue.since.and_then(decode_timestamp),
        remedy: issue.remedy,
        page: issue.page,
    })
}

/// Decodes the full description of one machine.
pub fn decode_description(response: v1::DescribeMachineResponse) -> Result<MachineDescription, CliError> {
    Ok(MachineDescription {
        name: decode_machine_name(response.name)?,
        phase: phase_name(&response.phase),
        created_at: require_timestamp(response.created_at, "the time since which a machine is known")?,
        at: require_timestamp(response.read_at, "its read time")?,
        tags: response.facts.into_iter().map(decode_fact).collect::<Result<_, _>>()?,
        schedule: response.schedule.into_iter().map(decode_lane).collect::<Result<_, _>>()?,
        backoffs: response.backoffs.into_iter().map(decode_wait).collect::<Result<_, _>>()?,
        postponements: response.postponements.into_iter().map(decode_wait).collect::<Result<_, _>>()?,
        events: response.events.into_iter().map(decode_event).collect::<Result<_, _>>()?,
    })
}

fn decode_fact(fact: v1::Fact) -> Result<Tag, CliError> {
    let Ok(Value::Object(row)) = serde_json::from_str(&fact.row) else {
        return Err(missing_field("a fact's row"));
    };
    let columns = fact.columns.into_iter().map(|one| TagColumn { name: one.name, kind: one.r#type });
    Ok(Tag { table: fact.table, columns: columns.collect(), row })
}

fn decode_wait(wait: v1::ProcessWait) -> Result<ProcessWait, CliError> {
    Ok(ProcessWait {
        process: process_name(&wait.process),
        active: wait.active,
        until: require_timestamp(wait.until, "the end of a wait")?,
        failures: wait.failures,
        last_interval_seconds: wait.last_interval_seconds,
        reason: wait.reason,
    })
}

fn decode_lane(lane: v1::Lane) -> Result<LaneView, CliError> {
    Ok(LaneView {
        lane: lane.lane,
        process: lane.process,
        ready_at: lane.ready_at.and_then(decode_timestamp),
        timer: lane.timer,
        reason: lane.reason,
        decided_at: lane.decided_at,
        deadline: lane.deadline.and_then(decode_timestamp),
        priority: lane.priority,
        fence: lane.fence,
        losses: lane.losses,
        not_before: lane.not_before.and_then(decode_timestamp),
        phase_index: lane.phase_index,
        phase_since: require_timestamp(lane.phase_since, "the time since which a machine is in its state")?,
        rules_version: lane.rules_version,
        policy_version: lane.policy_version,
        work: lane.holder.map(decode_holder).transpose()?,
    })
}
