//! gRPC services Plan and Issues.
//!
//! [`model`] computes both. This module fetches their inputs and encodes the results.

use tonic::{Request, Response, Status};

use crate::api::api_error::{bmdb_status, database_unavailable, invalid_argument};
use crate::api::caller::caller_of;
use crate::api::closing_stream::ClosingStream;
use crate::api::convert::{self, encode_timestamp};
use crate::api::fleet_stream::{CHUNK_SIZE, FleetQueries, compute_blocking};
use bmdb::connection::error::BmdbError;
use bmdb::machine::lookup::machine_id;
use model::issues::{Issue, find_issues};
use model::machine_view::MachineName;
use model::plan::diff::PlanDifference;
use model::plan::fold::{PlanLine, RoutineRows};
use model::plan::query::{PlanContent, PlanQuery, PlanResult, run_plan_query};
use model::plan::{ASSUMPTIONS, MAX_ROWS, PlanRow};
use model::policy_flags::PolicyFlags;
use model::process::Process;
use model::time::{Span, Timestamp};
use proto::fleet::v1;
use proto::fleet::v1::issues_server::Issues;
use proto::fleet::v1::plan_server::Plan;

/// Most attempts to read the fleet.
const MAX_ATTEMPTS: u32 = 3;
/// Longest configuration, in bytes.
const MAX_CONFIGURATION_BYTES: usize = 16 << 10;

/// Implements the services `Plan` and `Issues`.
#[derive(Clone)]
pub struct PlanService {
    /// Runs the queries over the whole fleet.
    pub fleet_queries: FleetQueries,
}

#[tonic::async_trait]
impl Plan for PlanService {
    type GetStream = ClosingStream<v1::GetPlanResponse>;

    async fn get(&self, request: Request<v1::GetPlanRequest>) -> Result<Response<Self::GetStream>, Status> {
        let caller = caller_of(&request)?;
        let body = request.into_inner();
        let (limit, process) = (parse_limit(body.limit)?, parse_process(&body.process)?);
        let (horizon, change) =
            (parse_horizon(&body.horizon)?, parse_policy_change(body.configuration.as_deref())?);
        let name = match body.machine.as_str() {
            "" => None,
            text => Some(self.fleet_queries.context().find_machine(&caller, text).await?),
        };
        let machine = name.as_ref().map(machine_id);
        let question = PlanQuery {
            machine,
            process,
            horizon,
            change,
            without_routine: body.without_routine,
            scope: caller.scope().clone(),
        };
        let bmdb = self.fleet_queries.context().read_pool.bmdb().clone();
        let stream = self.fleet_queries.stream(&caller, async move {
            let fleet = read_with_retry(|| bmdb.read_fleet_view()).await?;
            let forecast = compute_blocking(move || run_plan_query(fleet, &question)).await?;
            Ok(plan_chunks(forecast, name.as_ref(), limit))
        })?;
        Ok(Response::new(stream))
    }
}

#[tonic::async_trait]
impl Issues for PlanService {
    type ListStream = ClosingStream<v1::ListIssuesResponse>;

    async fn list(
        &self,
        request: Request<v1::ListIssuesRequest>,
    ) -> Result<Response<Self::ListStream>, Status> {
        let caller = caller_of(&request)?;
        let bmdb = self.fleet_queries.context().read_pool.bmdb().clone();
        let stream = self.fleet_queries.stream(&caller, async move {
            let evidence = read_with_retry(|| bmdb.read_issue_inputs()).await?;
            let (now, found) = compute_blocking(move || (evidence.at, find_issues(&evidence))).await?;
            Ok(issue_chunks(now, found))
        })?;
        Ok(Response::new(stream))
    }
}

/// Reads the fleet, and retries if the database was away or too busy for one of the pages.
async fn read_with_retry<T, F>(look: impl Fn() -> F + Send) -> Result<T, Status>
where
    F: Future<Output = Result<T, BmdbError>> + Send,
{
    let mut tried = 1;
    loop {
        match look().await {
            Err(error) if error.is_transient() && tried < MAX_ATTEMPTS => tried += 1,
            // A read-only statement whose response was lost has changed nothing.
            Err(BmdbError::UnknownOutcome(_)) => return Err(database_unavailable()),
            other => return other.map_err(bmdb_status),
        }
    }
}

fn parse_limit(value: i32) -> Result<usize, Status> {
    match usize::try_from(value) {
        Ok(0) => Ok(MAX_ROWS),
        Ok(limit) if limit <= MAX_ROWS => Ok(limit),
        _ => Err(invalid_argument(
            "limit",
            format!("limit is {value}; it goes from 1 to {MAX_ROWS}, and 0 is all"),
        )),
    }
}

fn parse_process(text: &str) -> Result<Option<Process>, Status> {
    if text.is_empty() {
        return Ok(None);
    }
    let known = text.parse::<Process>();
    known.map(Some).map_err(|error| invalid_argument("process", error.to_string()))
}

fn parse_horizon(text: &str) -> Result<Span, Status> {
    if text.is_empty() {
        return Ok(Span::hours(1));
    }
    text.parse().map_err(|error: model::time::TimeParseError| invalid_argument("horizon", error.to_string()))
}

fn parse_policy_change(value: Option<&str>) -> Result<Option<PolicyFlags>, Status> {
    let Some(text) = value else { return Ok(None) };
    if text.len() > MAX_CONFIGURATION_BYTES {
        return Err(invalid_argument(
            "configuration",
            format!(
                "the configuration file is longer than {MAX_CONFIGURATION_BYTES} bytes; send only its keys of the policy"
            ),
        ));
    }
    let flags = PolicyFlags::from_configuration(text);
    flags
        .map(Some)
        .map_err(|problem| invalid_argument("configuration", format!("the configuration file: {problem}")))
}

fn plan_chunks(forecast: PlanResult, name: Option<&MachineName>, limit: usize) -> Vec<v1::GetPlanResponse> {
    let total = match &forecast.content {
        PlanContent::Lines(lines) => lines.len(),
        PlanContent::Differences(found) => found.len(),
    };
    let head = v1::PlanHead {
        at: Some(encode_timestamp(forecast.at)),
        until: Some(encode_timestamp(forecast.until)),
        truncated: forecast.truncated,
        total: i64::try_from(total).unwrap_or(i64::MAX),
        name: name.map(convert::encode_machine_name),
        lane_waits: forecast
            .lane_waits
            .into_iter()
            .map(|wait| v1::LaneWait { lane: wait.lane, reason: wait.reason })
            .collect(),
        assumptions: ASSUMPTIONS.map(str::to_owned).to_vec(),
        pauses: forecast
            .pauses
            .iter()
            .map(|pause| v1::PausedLoop {
                name: pause.loop_kind.as_str().to_owned(),
                pause: Some(convert::encode_pause(pause)),
            })
            .collect(),
    };
    let mut pieces = vec![v1::GetPlanResponse { head: Some(head), ..Default::default() }];
    match forecast.content {
        PlanContent::Lines(mut lines) => {
            lines.truncate(limit);
            pieces.extend(lines.chunks(CHUNK_SIZE).map(|some| v1::GetPlanResponse {
                rows: some.iter().map(encode_plan_line).collect(),
                ..Default::default()
            }));
        }
        PlanContent::Differences(mut found) => {
            found.truncate(limit);
            pieces.extend(found.chunks(CHUNK_SIZE).map(|some| v1::GetPlanResponse {
                differences: some.iter().map(encode_difference).collect(),
                ..Default::default()
            }));
        }
    }
    pieces
}

fn encode_plan_line(line: &PlanLine) -> v1::PlanRow {
    match line {
        PlanLine::Work(row) => encode_plan_row(row),
        PlanLine::Routine(rows) => encode_routine_rows(rows),
    }
}

fn encode_plan_row(row: &PlanRow) -> v1::PlanRow {
    v1::PlanRow {
        starts_at: Some(encode_timestamp(row.at)),
        name: Some(convert::encode_machine_name(&row.name)),
        process: row.process.to_owned(),
        action: row.action.clone(),
        in_progress: row.in_progress,
        routine: None,
    }
}

fn encode_routine_rows(rows: &RoutineRows) -> v1::PlanRow {
    v1::PlanRow {
        starts_at: Some(encode_timestamp(rows.fold.first_at)),
        name: rows.name.as_ref().map(convert::encode_machine_name),
        process: rows.process.to_owned(),
        action: rows.action.clone(),
        in_progress: false,
        routine: Some(convert::encode_routine_fold(rows.fold, rows.machines)),
    }
}

fn encode_difference(one: &PlanDifference) -> v1::PlanDifference {
    v1::PlanDifference {
        name: Some(convert::encode_machine_name(&one.name)),
        process: one.process.to_owned(),
        action: one.action.clone(),
        before: one.before.map(encode_timestamp),
        after: one.after.map(encode_timestamp),
    }
}

fn issue_chunks(now: Timestamp, found: Vec<Issue>) -> Vec<v1::ListIssuesResponse> {
    let mut issues: Vec<v1::Issue> = found.into_iter().map(encode_issue).collect();
    let mut pieces = Vec::new();
    // At least one chunk: it contains the time of the read even if there are no issues.
    while !issues.is_empty() || pieces.is_empty() {
        let rest = issues.split_off(issues.len().min(CHUNK_SIZE));
        pieces.push(v1::ListIssuesResponse { read_at: Some(encode_timestamp(now)), issues });
        issues = rest;
    }
    pieces
}

fn encode_issue(found: Issue) -> v1::Issue {
    v1::Issue {
        id: found.id.to_owned(),
        severity: found.severity.as_str().to_owned(),
        subject: found.subject,
        machines: found.machines.iter().map(convert::encode_machine_name).collect(),
        message: found.message,
        since: found.since.map(encode_timestamp),
        remedy: found.remedy,
        page: found.page,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan_result(rows: usize) -> PlanResult {
        let now = Timestamp::UNIX_EPOCH;
        let row = |number: usize| {
            PlanLine::Work(PlanRow {
                at: now,
                name: MachineName {
                    machine: uuid::Uuid::from_u128(u128::try_from(number).unwrap_or_default()),
                    provider: None,
                    provider_id: None,
                },
                process: "Update",
                action: "look".to_owned(),
                in_progress: false,
            })
        };
        let what = PlanContent::Lines((0..rows).map(row).collect());
        PlanResult {
            at: now,
            until: now,
            truncated: false,
            content: what,
            lane_waits: Vec::new(),
            pauses: Vec::new(),
        }
    }

    #[test]
    fn chunks_hold_rows_up_to_the_limit_and_the_head_counts_all() {
        for (rows, limit, lengths) in [
            (0, 10, &[0][..]),
            (1, 10, &[0, 1]),
            (1200, MAX_ROWS, &[0, 500, 500, 200]),
            (1200, 501, &[0, 500, 1]),
        ] {
            let pieces = plan_chunks(plan_result(rows), None, limit);
            let found: Vec<usize> = pieces.iter().map(|piece| piece.rows.len()).collect();
            assert_eq!(found, lengths, "{rows} up to {limit}");
            let totals: Vec<i64> =
                pieces.iter().filter_map(|piece| piece.head.as_ref().map(|head| head.total)).collect();
            assert_eq!(totals, [i64::try_from(rows).unwrap()], "the first piece has the head");
        }
    }

    #[test]
    fn largest_chunk_can_be_decoded() {
        use prost::Message as _;
        for piece in plan_chunks(plan_result(CHUNK_SIZE), None, MAX_ROWS) {
            let bytes = bytes::Bytes::from(piece.encode_to_vec());
            proto::codec::decode::<v1::GetPlanResponse>(bytes).unwrap();
        }
        let name = MachineName { machine: uuid::Uuid::nil(), provider: None, provider_id: None };
        let found = Issue {
            id: "needs-human",
            severity: model::issues::Severity::Critical,
            subject: "a".to_owned(),
            machines: vec![name; model::issues::MAX_NAMED_MACHINES],
            message: "e".to_owned(),
            since: Some(Timestamp::UNIX_EPOCH),
            remedy: "r".to_owned(),
            page: "p".to_owned(),
        };
        let pieces = issue_chunks(Timestamp::UNIX_EPOCH, vec![found; CHUNK_SIZE + 1]);
        assert_eq!(pieces.len(), 2);
        for piece in pieces {
            let bytes = bytes::Bytes::from(piece.encode_to_vec());
            proto::codec::decode::<v1::ListIssuesResponse>(bytes).unwrap();
        }
        let nothing = issue_chunks(Timestamp::UNIX_EPOCH, Vec::new());
        assert!(nothing.len() == 1 && nothing[0].read_at.is_some(), "nothing was wrong at a moment");
    }

    #[test]
    fn invalid_request_names_its_field() {
        assert_eq!(parse_limit(0).unwrap(), MAX_ROWS);
        assert_eq!(parse_horizon("").unwrap(), Span::hours(1));
        assert!(
            parse_policy_change(None).unwrap().is_none() && parse_policy_change(Some("")).unwrap().is_some()
        );
        for (refusal, part) in [
            (parse_limit(-1).unwrap_err(), "limit is -1"),
            (parse_limit(100_001).unwrap_err(), "goes from 1 to 100000"),
            (parse_process("Explode").unwrap_err(), "Explode"),
            (parse_horizon("soon").unwrap_err(), "is not a duration"),
            (
                parse_policy_change(Some(&" ".repeat(MAX_CONFIGURATION_BYTES + 1))).unwrap_err(),
                "longer than 16384 bytes",
            ),
            (
                parse_policy_change(Some("heartbeat_interval = \"0s\"")).unwrap_err(),
                "the configuration file: --heartbeat_interval 0s leaves no time at all",
            ),
        ] {
            assert_eq!(refusal.code(), tonic::Code::InvalidArgument);
            assert!(refusal.message().contains(part), "{refusal}");
        }
    }
}
