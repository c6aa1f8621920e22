//! `plan`: preview of what the control loops will do, and diff of a new policy.
//!
//! [`model::plan`] computes the plan. This module fetches and prints it. Of a configuration file, only the
//! policy is read and sent, because the rest may be secret.

use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;

use crate::api_streams;
use crate::command;
use crate::error::CliError;
use crate::fleet_client::FleetClient;
use crate::get::format_json;
use crate::output::{Format, format_table, terminal_width};
use model::humanize::{absolute_time, relative_time};
use model::machine_view::MachineName;
use model::pause::Pause;
use model::plan::PlanRow;
use model::plan::diff::PlanDifference;
use model::plan::query::{PlanContent, PlanResult};
use model::policy_flags::PolicyFlags;
use model::text_layout::wrap_text;
use model::time::Timestamp;

/// A plan or a diff, as the API returns it.
pub struct PlanReport {
    /// The machine of the plan; `None` for the whole fleet.
    pub machine: Option<MachineName>,
    /// The rows or differences to show; may be fewer than `total`.
    pub result: PlanResult,
    /// Number of rows or differences in total.
    pub total: usize,
    /// The assumptions on which the plan is based.
    pub assumptions: Vec<String>,
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
pub async fn show_plan(
    client: &FleetClient,
    args: &command::PlanArgs,
    format: Format,
) -> Result<String, CliError> {
    let change = args.diff.as_deref().map(read_policy_config).transpose()?;
    // A table is limited; output for programs is complete.
    let limit = if format == Format::Table { args.limit } else { 0 };
    let report = api_streams::fetch_plan(client, args, change, limit).await?;
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
    let text = std::fs::read_to_string(path)
        .map_err(|error| CliError::Invalid(format!("cannot read the configuration file {shown}: {error}")))?;
    let part =
        PolicyFlags::from_configuration(&text).and_then(|_| PolicyFlags::extract_from_configuration(&text));
    part.map_err(|problem| CliError::Invalid(format!("the configuration file {shown}: {problem}")))
}

fn render_plan(report: &PlanReport, rows: &[PlanRow], args: &command::PlanArgs) -> String {
    let limit = usize::try_from(args.limit).unwrap_or(usize::MAX);
    let rows: Vec<Vec<String>> = rows.iter().take(limit).map(|row| plan_row(row, report.result.at)).collect();
    let mut text = format_table(&["AT (UTC)", "IN", "MACHINE", "PROCESS", "WHAT"], &rows, terminal_width());
    if report.total > limit {
        let _ = writeln!(text, "\nthe first {limit} of {}: raise --limit", report.total);
    }
    if report.result.truncated {
        let _ = writeln!(
            text,
            "\nthere is so much to do that this ends at {}",
            absolute_time(report.result.until)
        );
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
        let sentence = format!("{}; what it would begin is left out", pause.describe(forecast.at));
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
                    changes anything. docs/plan.md has the full list.";
    let mut text = wrap_text(sentence, terminal_width()).join("\n");
    text.push('\n');
    text
}

/// Reports that nothing is due, and for one machine why.
fn render_empty_plan(report: &PlanReport, args: &command::PlanArgs) -> String {
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

fn render_diff(found: &[PlanDifference], total: usize, args: &command::PlanArgs) -> String {
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
