//! `plan`: preview of what the control loops will do, and diff of a new policy.
//!
//! [`model::plan`] computes the plan. The API streams it in chunks, and this module fetches and prints it. Of a
//! configuration file, only the policy is read and sent, because the rest may be secret.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::PossibleValuesParser;
use serde::Serialize;

use crate::client::decode::{
    decode_machine_name, decode_timestamp, missing_field, process_name, require_timestamp,
};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::next_chunk;
use crate::error::CliError;
use crate::output::table::{format_table, terminal_width};
use crate::output::{Format, format_json};
use model::humanize::{absolute_time, relative_time};
use model::machine_view::MachineName;
use model::pause::Pause;
use model::plan::PlanRow;
use model::plan::diff::PlanDifference;
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
  shepherdctl plan --process Recovery --horizon 10m
  shepherdctl plan --diff new.toml              what the policy in that file would change";

/// What the forecast covers: machine, process, horizon and policy.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Only what happens to this machine
    #[arg(long, value_name = "M")]
    pub machine: Option<String>,
    /// Only what this process does
    #[arg(
        long,
        value_name = "PROCESS",
        value_parser = PossibleValuesParser::new(Process::ALL.map(Process::as_str))
    )]
    pub process: Option<String>,
    /// How far to look ahead
    #[arg(long, value_name = "SPAN", default_value = "1h")]
    pub horizon: Span,
    /// Configuration file of a shepherd: show what its policy would change
    #[arg(long, value_name = "NEW_CONFIG")]
    pub diff: Option<PathBuf>,
    /// Maximum number of lines
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub limit: u32,
}

/// A plan or a diff, as the API returns it.
struct PlanReport {
    /// The machine of the plan; `None` for the whole fleet.
    machine: Option<MachineName>,
    /// The rows or differences to show; may be fewer than `total`.
    result: PlanResult,
    /// Number of rows or differences in total.
    total: usize,
    /// The assumptions on which the plan is based.
    assumptions: Vec<String>,
}

#[derive(Serialize)]
struct PlanOutput<'a> {
    at: Timestamp,
    until: Timestamp,
    truncated: bool,
    rows: &'a [PlanRow],
    /// Paused loops; the rows that they would start are left out.
    paused: &'a [Pause],
    assumptions: &'a [String],
}

#[derive(Serialize)]
struct DiffOutput<'a> {
    at: Timestamp,
    until: Timestamp,
    differences: &'a [PlanDifference],
    assumptions: &'a [String],
}

/// Runs `plan`: fetches and prints a plan or a diff.
pub async fn show_plan(client: &FleetClient, args: &PlanArgs, format: Format) -> Result<String, CliError> {
    let change = args.diff.as_deref().map(read_policy_config).transpose()?;
    // A table is limited; output for programs is complete.
    let limit = if format == Format::Table { args.limit } else { 0 };
    let report = fetch_plan(client, args, change, limit).await?;
    let (at, until, assumptions) = (report.result.at, report.result.until, &report.assumptions[..]);
    match (&report.result.content, format) {
        (PlanContent::Rows(rows), Format::Json) => {
            let (cut, paused) = (report.result.truncated, &report.result.pauses[..]);
            format_json(&PlanOutput { at, until, truncated: cut, rows, paused, assumptions })
        }
        (PlanContent::Differences(differences), Format::Json) => {
            format_json(&DiffOutput { at, until, differences, assumptions })
        }
        (PlanContent::Rows(rows), Format::Table) if rows.is_empty() => {
            Ok(render_empty_plan(&report, args) + &format_pauses(&report.result))
        }
        (PlanContent::Rows(rows), Format::Table) => Ok(render_plan(&report, rows, args)),
        (PlanContent::Differences(found), Format::Table) => Ok(render_diff(found, report.total, args)),
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

/// Fetches the plan of the control loops.
async fn fetch_plan(
    client: &FleetClient,
    args: &PlanArgs,
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

fn render_plan(report: &PlanReport, rows: &[PlanRow], args: &PlanArgs) -> String {
    let limit = usize::try_from(args.limit).unwrap_or(usize::MAX);
    let rows: Vec<Vec<String>> = rows.iter().take(limit).map(|row| plan_row(row, report.result.at)).collect();
    let mut text = format_table(&["AT (UTC)", "IN", "MACHINE", "PROCESS", "WHAT"], &rows, terminal_width());
    if report.total > limit {
        let _ = writeln!(text, "\nthe first {limit} of {}: raise --limit", report.total);
    }
    if report.result.truncated {
        let _ =
            writeln!(text, "\nthe forecast is too long and ends at {}", absolute_time(report.result.until));
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

fn plan_row(row: &PlanRow, now: Timestamp) -> Vec<String> {
    let when = if row.in_progress {
        "under way".to_owned()
    } else {
        relative_time(row.at, now).trim_start_matches("in ").replace("just now", "now")
    };
    let what = row.action.clone();
    vec![format_timestamp(row.at), when, row.name.short_name(), row.process.to_owned(), what]
}

fn format_timestamp(at: Timestamp) -> String {
    at.format("%Y-%m-%d %H:%M:%S").to_string()
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
    let limit = usize::try_from(args.limit).unwrap_or(usize::MAX);
    let shown = |at: Option<Timestamp>| at.map_or_else(|| "-".to_owned(), format_timestamp);
    let rows: Vec<Vec<String>> = found
        .iter()
        .take(limit)
        .map(|one| {
            let process = one.process.to_owned();
            vec![shown(one.before), shown(one.after), one.name.short_name(), process, one.action.clone()]
        })
        .collect();
    let mut text = format_table(
        &["AS IT IS (UTC)", "AS IT WOULD BE", "MACHINE", "PROCESS", "WHAT"],
        &rows,
        terminal_width(),
    );
    if total > limit {
        let _ = writeln!(text, "\nthe first {limit} of {total} differences: raise --limit");
    }
    text.push('\n');
    text.push_str(&assumptions_note());
    text
}
