//! The services `Plan` and `Issues`: what the loops would do next, and what is wrong.
//!
//! Both are decided by [`crate::model`]; here they are asked for and become messages.

use tonic::{Request, Response, Status};

use crate::bmdb::error::BmdbError;
use crate::bmdb::find::id_of;
use crate::model::issues::{Issue, issues};
use crate::model::machine_view::MachineName;
use crate::model::plan::diff::Difference;
use crate::model::plan::foreseen::{Foreseen, Question, What, foresee};
use crate::model::plan::{ASSUMPTIONS, MOST_ROWS, Row};
use crate::model::policy_flags::PolicyFlags;
use crate::model::process::Process;
use crate::model::time::{Span, Timestamp};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::issues_server::Issues;
use crate::proto::fleet::v1::plan_server::Plan;
use crate::server::api::convert::{self, at};
use crate::server::api::door::caller;
use crate::server::api::farewell::Telling;
use crate::server::api::loops;
use crate::server::api::refusal::{away, of_bmdb, wrong};
use crate::server::api::whole::{PIECE, Whole, computed};

/// How often the fleet is looked at before that is given up.
const LOOKS: u32 = 3;
/// Longest configuration, in bytes.
const LONGEST_CONFIGURATION: usize = 16 << 10;

/// Both services.
#[derive(Clone)]
pub struct OutlookService {
    /// What looks at the fleet for them.
    pub whole: Whole,
}

#[tonic::async_trait]
impl Plan for OutlookService {
    type GetStream = Telling<v1::GetPlanResponse>;

    async fn get(&self, request: Request<v1::GetPlanRequest>) -> Result<Response<Self::GetStream>, Status> {
        let caller = caller(&request)?;
        let asked = request.into_inner();
        let (limit, process) = (limit_of(asked.limit)?, process_of(&asked.process)?);
        let (horizon, change) = (horizon_of(&asked.horizon)?, change_of(asked.configuration.as_deref())?);
        let name = match asked.machine.as_str() {
            "" => None,
            text => Some(self.whole.site().find(&caller, text).await?),
        };
        let machine = name.as_ref().map(id_of);
        let question = Question { machine, process, horizon, change, scope: caller.scope().clone() };
        let bmdb = self.whole.site().looks.bmdb().clone();
        let told = self.whole.tell(&caller, async move {
            let fleet = looked(|| bmdb.fleet_view()).await?;
            let foreseen = computed(move || foresee(fleet, &question)).await?;
            Ok(pieces_of_plan(foreseen, name.as_ref(), limit))
        })?;
        Ok(Response::new(told))
    }
}

#[tonic::async_trait]
impl Issues for OutlookService {
    type ListStream = Telling<v1::ListIssuesResponse>;

    async fn list(
        &self,
        request: Request<v1::ListIssuesRequest>,
    ) -> Result<Response<Self::ListStream>, Status> {
        let caller = caller(&request)?;
        let bmdb = self.whole.site().looks.bmdb().clone();
        let told = self.whole.tell(&caller, async move {
            let evidence = looked(|| bmdb.evidence()).await?;
            let (now, found) = computed(move || (evidence.at, issues(&evidence))).await?;
            Ok(pieces_of_issues(now, found))
        })?;
        Ok(Response::new(told))
    }
}

/// Looks at the fleet, and again where the database was away or too busy for one of its pages.
async fn looked<T, F>(look: impl Fn() -> F + Send) -> Result<T, Status>
where
    F: Future<Output = Result<T, BmdbError>> + Send,
{
    let mut tried = 1;
    loop {
        match look().await {
            Err(error) if error.is_transient() && tried < LOOKS => tried += 1,
            // A statement whose answer was lost has changed nothing here.
            Err(BmdbError::UnknownOutcome(_)) => return Err(away()),
            other => return other.map_err(of_bmdb),
        }
    }
}

fn limit_of(said: i32) -> Result<usize, Status> {
    match usize::try_from(said) {
        Ok(0) => Ok(MOST_ROWS),
        Ok(limit) if limit <= MOST_ROWS => Ok(limit),
        _ => Err(wrong("limit", format!("limit is {said}; it goes from 1 to {MOST_ROWS}, and 0 is all"))),
    }
}

fn process_of(said: &str) -> Result<Option<Process>, Status> {
    if said.is_empty() {
        return Ok(None);
    }
    let known = said.parse::<Process>();
    known.map(Some).map_err(|error| wrong("process", error.to_string()))
}

fn horizon_of(said: &str) -> Result<Span, Status> {
    if said.is_empty() {
        return Ok(Span::hours(1));
    }
    said.parse().map_err(|error: crate::model::time::TimeParseError| wrong("horizon", error.to_string()))
}

fn change_of(said: Option<&str>) -> Result<Option<PolicyFlags>, Status> {
    let Some(text) = said else { return Ok(None) };
    if text.len() > LONGEST_CONFIGURATION {
        return Err(wrong(
            "configuration",
            format!(
                "the configuration file is longer than {LONGEST_CONFIGURATION} bytes; send only its keys of the policy"
            ),
        ));
    }
    let flags = PolicyFlags::of_configuration(text);
    flags.map(Some).map_err(|problem| wrong("configuration", format!("the configuration file: {problem}")))
}

fn pieces_of_plan(foreseen: Foreseen, name: Option<&MachineName>, limit: usize) -> Vec<v1::GetPlanResponse> {
    let total = match &foreseen.what {
        What::Rows(rows) => rows.len(),
        What::Differences(found) => found.len(),
    };
    let head = v1::PlanHead {
        at: Some(at(foreseen.at)),
        until: Some(at(foreseen.until)),
        cut: foreseen.cut,
        total: i64::try_from(total).unwrap_or(i64::MAX),
        name: name.map(convert::name),
        waits: foreseen
            .waits
            .into_iter()
            .map(|wait| v1::LaneWait { lane: wait.lane, reason: wait.reason })
            .collect(),
        assumptions: ASSUMPTIONS.map(str::to_owned).to_vec(),
        paused: foreseen
            .paused
            .iter()
            .map(|pause| v1::PausedLoop {
                name: pause.of.as_str().to_owned(),
                pause: Some(loops::told(pause)),
            })
            .collect(),
    };
    let mut pieces = vec![v1::GetPlanResponse { head: Some(head), ..Default::default() }];
    match foreseen.what {
        What::Rows(mut rows) => {
            rows.truncate(limit);
            pieces.extend(rows.chunks(PIECE).map(|some| v1::GetPlanResponse {
                rows: some.iter().map(row).collect(),
                ..Default::default()
            }));
        }
        What::Differences(mut found) => {
            found.truncate(limit);
            pieces.extend(found.chunks(PIECE).map(|some| v1::GetPlanResponse {
                differences: some.iter().map(difference).collect(),
                ..Default::default()
            }));
        }
    }
    pieces
}

fn row(row: &Row) -> v1::PlanRow {
    v1::PlanRow {
        at: Some(at(row.at)),
        name: Some(convert::name(&row.name)),
        process: row.process.to_owned(),
        what: row.what.clone(),
        under_way: row.under_way,
    }
}

fn difference(one: &Difference) -> v1::PlanDifference {
    v1::PlanDifference {
        name: Some(convert::name(&one.name)),
        process: one.process.to_owned(),
        what: one.what.clone(),
        before: one.before.map(at),
        after: one.after.map(at),
    }
}

fn pieces_of_issues(now: Timestamp, found: Vec<Issue>) -> Vec<v1::ListIssuesResponse> {
    let mut issues: Vec<v1::Issue> = found.into_iter().map(issue).collect();
    let mut pieces = Vec::new();
    // One at least: nothing that is wrong was found at a moment, too.
    while !issues.is_empty() || pieces.is_empty() {
        let rest = issues.split_off(issues.len().min(PIECE));
        pieces.push(v1::ListIssuesResponse { at: Some(at(now)), issues });
        issues = rest;
    }
    pieces
}

fn issue(found: Issue) -> v1::Issue {
    v1::Issue {
        id: found.id.to_owned(),
        severity: found.severity.as_str().to_owned(),
        about: found.about,
        machines: found.machines.iter().map(convert::name).collect(),
        evidence: found.evidence,
        since: found.since.map(at),
        remedy: found.remedy,
        page: found.page,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn foreseen(rows: usize) -> Foreseen {
        let now = Timestamp::UNIX_EPOCH;
        let row = |number: usize| Row {
            at: now,
            name: MachineName {
                machine: uuid::Uuid::from_u128(u128::try_from(number).unwrap_or_default()),
                provider: None,
                provider_id: None,
            },
            process: "Update",
            what: "look".to_owned(),
            under_way: false,
        };
        let what = What::Rows((0..rows).map(row).collect());
        Foreseen { at: now, until: now, cut: false, what, waits: Vec::new(), paused: Vec::new() }
    }

    #[test]
    fn pieces_are_all_of_it_up_to_the_limit_and_the_head_counts_the_whole() {
        for (rows, limit, lengths) in [
            (0, 10, &[0][..]),
            (1, 10, &[0, 1]),
            (1200, MOST_ROWS, &[0, 500, 500, 200]),
            (1200, 501, &[0, 500, 1]),
        ] {
            let pieces = pieces_of_plan(foreseen(rows), None, limit);
            let found: Vec<usize> = pieces.iter().map(|piece| piece.rows.len()).collect();
            assert_eq!(found, lengths, "{rows} up to {limit}");
            let totals: Vec<i64> =
                pieces.iter().filter_map(|piece| piece.head.as_ref().map(|head| head.total)).collect();
            assert_eq!(totals, [i64::try_from(rows).unwrap()], "the first piece has the head");
        }
    }

    #[test]
    fn fullest_piece_can_be_decoded() {
        use prost::Message as _;
        for piece in pieces_of_plan(foreseen(PIECE), None, MOST_ROWS) {
            let bytes = bytes::Bytes::from(piece.encode_to_vec());
            crate::proto::codec::decode::<v1::GetPlanResponse>(bytes).unwrap();
        }
        let name = MachineName { machine: uuid::Uuid::nil(), provider: None, provider_id: None };
        let found = Issue {
            id: "needs-human",
            severity: crate::model::issues::Severity::Critical,
            about: "a".to_owned(),
            machines: vec![name; crate::model::issues::NAMED],
            evidence: "e".to_owned(),
            since: Some(Timestamp::UNIX_EPOCH),
            remedy: "r".to_owned(),
            page: "p".to_owned(),
        };
        let pieces = pieces_of_issues(Timestamp::UNIX_EPOCH, vec![found; PIECE + 1]);
        assert_eq!(pieces.len(), 2);
        for piece in pieces {
            let bytes = bytes::Bytes::from(piece.encode_to_vec());
            crate::proto::codec::decode::<v1::ListIssuesResponse>(bytes).unwrap();
        }
        let nothing = pieces_of_issues(Timestamp::UNIX_EPOCH, Vec::new());
        assert!(nothing.len() == 1 && nothing[0].at.is_some(), "nothing was wrong at a moment");
    }

    #[test]
    fn what_cannot_be_asked_is_refused_by_its_field() {
        assert_eq!(limit_of(0).unwrap(), MOST_ROWS);
        assert_eq!(horizon_of("").unwrap(), Span::hours(1));
        assert!(change_of(None).unwrap().is_none() && change_of(Some("")).unwrap().is_some());
        for (refusal, part) in [
            (limit_of(-1).unwrap_err(), "limit is -1"),
            (limit_of(100_001).unwrap_err(), "goes from 1 to 100000"),
            (process_of("Explode").unwrap_err(), "Explode"),
            (horizon_of("soon").unwrap_err(), "is no duration"),
            (change_of(Some(&" ".repeat(LONGEST_CONFIGURATION + 1))).unwrap_err(), "longer than 16384 bytes"),
            (
                change_of(Some("heartbeat_interval = \"0s\"")).unwrap_err(),
                "the configuration file: --heartbeat_interval 0s leaves no time at all",
            ),
        ] {
            assert_eq!(refusal.code(), tonic::Code::InvalidArgument);
            assert!(refusal.message().contains(part), "{refusal}");
        }
    }
}
