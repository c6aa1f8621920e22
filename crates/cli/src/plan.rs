//! `plan`: preview of what the control loops will do, and diff of a new policy.
//!
//! [`model::plan`] computes the plan. The API streams it in chunks, and this module fetches and prints it. As JSON it is
//! the response of the API, with all chunks in one. Of a configuration file, only the policy is read and sent, because the
//! rest may be secret.
//!
//! Routine is folded, so that what happens to a machine is not hidden between queries of its provider. The server folds,
//! so `--limit` counts what is printed.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::NonEmptyStringValueParser;

use crate::client::decode::{
    decode_machine_name, decode_timestamp, missing_field, process_name, require_timestamp,
};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::next_chunk;
use crate::error::CliError;
use crate::object::document::ObjectDocument;
use crate::one_of::one_of;
use crate::output::table::{format_table, terminal_width};
use crate::output::zone::current_zone;
use crate::output::{Format, format_json};
use crate::routine::{decode_routine_fold, folded_note};
use model::humanize::{absolute_time, relative_and_absolute_time, relative_time};
use model::machine_view::MachineName;
use model::pause::Pause;
use model::plan::PlanRow;
use model::plan::diff::PlanDifference;
use model::plan::fold::{PlanLine, RoutineRows};
use model::plan::query::{self, PlanContent, PlanResult};
use model::policy_flags::PolicyFlags;
use model::process::Process;
use model::text_file::decode_text;
use model::text_layout::wrap_text;
use model::time::{Span, Timestamp};
use proto::fleet::v1;
use proto::fleet::v1::plan_client::PlanClient;

pub(crate) const PLAN_EXAMPLES: &str = "\
Examples:
  shepherdctl plan --machine sim-0007           what happens to it; if nothing does, why
  shepherdctl plan --machine sim-0007 --all     each query of its provider, too
  shepherdctl plan --process Recovery --horizon 10m
  shepherdctl plan --diff new.toml              what the policy in that file would change";

/// Most lines of a table, unless a limit was given.
const DEFAULT_LINES: u32 = 100;

/// What the forecast covers: machine, process, horizon and policy.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Only what happens to this machine
    #[arg(long, value_name = "M", value_parser = NonEmptyStringValueParser::new())]
    pub machine: Option<String>,
    /// Only what this process does
    #[arg(
        long,
        value_name = "PROCESS",
        value_parser = one_of(Process::ALL.map(Process::as_str))
    )]
    pub process: Option<String>,
    /// How far to look ahead
    #[arg(long, value_name = "SPAN", default_value = "1h")]
    pub horizon: Span,
    /// Configuration file of a shepherd: show what its policy would change
    #[arg(long, value_name = "NEW_CONFIG")]
    pub diff: Option<PathBuf>,
    /// Print every line, also of routine work that is expected to find nothing new
    #[arg(long)]
    pub all: bool,
    /// Maximum number of lines [default: 100 in a table, otherwise all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub limit: Option<u32>,
}

/// A plan or a diff, as the API returns it.
struct PlanReport {
    /// The machine of the plan; `None` for the whole fleet.
    machine: Option<MachineName>,
    /// The rows or differences to show; may be fewer than `total`.
    result: PlanResult,
    /// Number of rows or differences in total.
    total: usize,
}

/// Runs `plan`: fetches and prints a plan or a diff.
pub async fn show_plan(client: &FleetClient, args: &PlanArgs, format: Format) -> Result<String, CliError> {
    let change = args.diff.as_deref().map(read_policy_config).transpose()?;
    let is_diff = change.is_some();
    if format == Format::Json {
        // Output for programs is complete, unless a limit was given.
        let response = fetch_plan(client, args, change, args.limit.unwrap_or(0)).await?;
        return format_json(&ObjectDocument::of_message(&response).to_json()?);
    }
    let limit = args.limit.unwrap_or(DEFAULT_LINES);
    let report = decode_report(fetch_plan(client, args, change, limit).await?, is_diff)?;
    match &report.result.content {
        PlanContent::Lines(lines) if lines.is_empty() => {
            Ok(render_empty_plan(&report, args) + &format_pauses(&report.result))
        }
        PlanContent::Lines(lines) => Ok(render_plan(&report, lines)),
        PlanContent::Differences(found) => Ok(render_diff(found, report.total, args)),
    }
}

/// The policy of a configuration file; fails if it cannot be read.
fn read_policy_config(path: &Path) -> Result<String, CliError> {
    let shown = path.display();
    let unread = |error: &dyn std::fmt::Display| {
        CliError::Invalid(format!("cannot read the configuration file {shown}: {error}"))
    };
    let content = std::fs::read(path).map_err(|error| unread(&error))?;
    let text = decode_text(&content).map_err(|error| unread(&error))?;
    let part =
        PolicyFlags::from_configuration(text).and_then(|_| PolicyFlags::extract_from_configuration(text));
    part.map_err(|problem| CliError::Invalid(format!("the configuration file {shown}: {problem}")))
}

/// Fetches the plan of the control loops: the first piece, with the rows and differences of all pieces.
async fn fetch_plan(
    client: &FleetClient,
    args: &PlanArgs,
    configuration: Option<String>,
    limit: u32,
) -> Result<v1::GetPlanResponse, CliError> {
    let request = v1::GetPlanRequest {
        machine: args.machine.clone().unwrap_or_default(),
        process: args.process.clone().unwrap_or_default(),
        horizon: args.horizon.to_string(),
        configuration,
        limit: i32::try_from(limit).unwrap_or(i32::MAX),
        without_routine: !args.all,
    };
    let mut pieces =
        PlanClient::new(client.channel()).get(request).await.map_err(status_to_error)?.into_inner();
    let mut whole = v1::GetPlanResponse::default();
    while let Some(mut piece) = next_chunk(&mut pieces, client).await? {
        whole.head = whole.head.or(piece.head);
        whole.rows.append(&mut piece.rows);
        whole.differences.append(&mut piece.differences);
    }
    if whole.head.is_none() { Err(missing_head()) } else { Ok(whole) }
}

fn missing_head() -> CliError {
    missing_field("the subject of its plan")
}

fn decode_report(response: v1::GetPlanResponse, is_diff: bool) -> Result<PlanReport, CliError> {
    let head = response.head.ok_or_else(missing_head)?;
    let waits =
        head.lane_waits.into_iter().map(|wait| query::LaneWait { lane: wait.lane, reason: wait.reason });
    let content = if is_diff {
        let found = response.differences.into_iter().map(decode_difference);
        PlanContent::Differences(found.collect::<Result<_, _>>()?)
    } else {
        PlanContent::Lines(response.rows.into_iter().map(decode_plan_line).collect::<Result<_, _>>()?)
    };
    Ok(PlanReport {
        machine: head.name.map(|name| decode_machine_name(Some(name))).transpose()?,
        result: PlanResult {
            at: require_timestamp(head.at, "its read time")?,
            until: require_timestamp(head.until, "the end of its plan")?,
            truncated: head.truncated,
            content,
            lane_waits: waits.collect(),
            pauses: head.pauses.into_iter().map(decode_paused_loop).collect::<Result<_, _>>()?,
        },
        total: usize::try_from(head.total).unwrap_or_default(),
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

fn decode_plan_line(plan_row: v1::PlanRow) -> Result<PlanLine, CliError> {
    let at = require_timestamp(plan_row.starts_at, "the time when a work item is begun")?;
    let (process, action) = (process_name(&plan_row.process), plan_row.action);
    let Some(routine) = plan_row.routine else {
        let name = decode_machine_name(plan_row.name)?;
        return Ok(PlanLine::Work(PlanRow { at, name, process, action, in_progress: plan_row.in_progress }));
    };
    Ok(PlanLine::Routine(RoutineRows {
        fold: decode_routine_fold(&routine, at)?,
        name: plan_row.name.map(|name| decode_machine_name(Some(name))).transpose()?,
        machines: u64::try_from(routine.machines).unwrap_or_default(),
        process,
        action,
    }))
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

fn render_plan(report: &PlanReport, lines: &[PlanLine]) -> String {
    let rows: Vec<Vec<String>> = lines.iter().map(|line| plan_row(line, report.result.at)).collect();
    let mut text = format_table(&["IN", "AT", "MACHINE", "PROCESS", "WHAT"], &rows, terminal_width());
    if report.total > rows.len() {
        let _ = writeln!(text, "\nthe first {} of {}: raise --limit", rows.len(), report.total);
    }
    text.push_str(&folded_note(lines.iter().filter_map(|line| match line {
        PlanLine::Routine(rows) => Some(rows.fold),
        PlanLine::Work(_) => None,
    })));
    if report.result.truncated {
        let end = relative_and_absolute_time(report.result.until, report.result.at);
        let _ = writeln!(text, "\nthe forecast is too long and ends {end}");
    }
    text.push_str(&format_pauses(&report.result));
    text.push('\n');
    text.push_str(&assumptions_note());
    text
}

/// Lists the pauses because of which rows are left out.
fn format_pauses(forecast: &PlanResult) -> String {
    let mut text = String::new();
    for pause in &forecast.pauses {
        let sentence = format!("{}; the work of a paused loop is left out", pause.describe(forecast.at));
        let _ = write!(text, "\n{}\n", wrap_text(&sentence, terminal_width()).join("\n"));
    }
    text
}

fn plan_row(line: &PlanLine, now: Timestamp) -> Vec<String> {
    let (at, machine, process, what) = match line {
        PlanLine::Work(row) => (row.at, row.name.short_name(), row.process, row.action.clone()),
        PlanLine::Routine(rows) => (
            rows.fold.first_at,
            describe_machines(rows),
            rows.process,
            rows.describe(|at| current_zone().format_time(at)),
        ),
    };
    let when = if matches!(line, PlanLine::Work(row) if row.in_progress) {
        "under way".to_owned()
    } else {
        relative_time(at, now).trim_start_matches("in ").replace("just now", "now")
    };
    vec![when, absolute_time(at), machine, process.to_owned(), what]
}

fn describe_machines(rows: &RoutineRows) -> String {
    rows.name.as_ref().map_or_else(|| format!("{} machines", rows.machines), MachineName::short_name)
}

fn assumptions_note() -> String {
    let sentence = "Assumed: every attempt succeeds, silent agents stay silent until then, and nobody else \
                    changes anything. The full list: shepherdctl explain plan";
    let mut text = wrap_text(sentence, terminal_width()).join("\n");
    text.push('\n');
    text
}

/// Reports that nothing is due, and for one machine why.
fn render_empty_plan(report: &PlanReport, args: &PlanArgs) -> String {
    let horizon = args.horizon;
    let what =
        args.process.as_deref().map_or_else(|| "nothing".to_owned(), |process| format!("no {process}"));
    let Some(name) = &report.machine else { return format!("{what} is due within {horizon}\n") };
    let mut text = format!("{what} is due on {} within {horizon}\n", name.short_name());
    for wait in &report.result.lane_waits {
        let _ = writeln!(text, "  {}: {}", wait.lane, wait.reason);
    }
    text
}

fn render_diff(found: &[PlanDifference], total: usize, args: &PlanArgs) -> String {
    if found.is_empty() {
        return format!("it would change nothing within {}\n", args.horizon);
    }
    let shown = |at: Option<Timestamp>| at.map_or_else(|| "-".to_owned(), absolute_time);
    let rows: Vec<Vec<String>> = found
        .iter()
        .map(|one| {
            let process = one.process.to_owned();
            vec![shown(one.before), shown(one.after), one.name.short_name(), process, one.action.clone()]
        })
        .collect();
    let mut text =
        format_table(&["AS IT IS", "AS IT WOULD BE", "MACHINE", "PROCESS", "WHAT"], &rows, terminal_width());
    if total > rows.len() {
        let _ = writeln!(text, "\nthe first {} of {total} differences: raise --limit", rows.len());
    }
    text.push('\n');
    text.push_str(&assumptions_note());
    text
}
