//! `plan`: what the loops would do, and when, before they do it.
//!
//! The plan is [`crate::model::plan`]'s; here the fleet is read for it and the answer printed.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::find::id_of;
use crate::cli::command;
use crate::cli::error::CliError;
use crate::cli::get::json;
use crate::cli::machine::find;
use crate::cli::output::{Format, table, width};
use crate::model::ids::MachineId;
use crate::model::layout::wrapped;
use crate::model::machine_view::MachineName;
use crate::model::plan::diff::{Difference, differences};
use crate::model::plan::{ASSUMPTIONS, FleetView, Plan, Row, plan as plan_of};
use crate::model::policy_flags::PolicyFlags;
use crate::model::process::{Lane, Process};
use crate::model::schedule::next_due;
use crate::model::telling::{absolute, relative};
use crate::model::time::Timestamp;

#[derive(Serialize)]
struct PlanAnswer {
    #[serde(flatten)]
    plan: Plan,
    assumptions: [&'static str; 6],
}

#[derive(Serialize)]
struct DiffAnswer {
    at: Timestamp,
    until: Timestamp,
    differences: Vec<Difference>,
    assumptions: [&'static str; 6],
}

/// `plan`.
pub async fn plan(bmdb: &Bmdb, asked: &command::Plan, format: Format) -> Result<String, CliError> {
    let process = asked.process.as_deref().and_then(|process| process.parse::<Process>().ok());
    let new_policy = asked.diff.as_deref().map(policy_flags).transpose()?;
    let machine = match &asked.machine {
        Some(machine) => Some(find(bmdb, machine).await?),
        None => None,
    };
    let fleet = bmdb.fleet_view().await?;
    let only = |plan: Plan| plan.only(machine.as_ref().map(id_of), process);
    let whole = only(plan_of(&fleet, asked.horizon));
    if let Some(flags) = new_policy {
        let mut policy = (*fleet.policy).clone();
        flags.apply(&mut policy);
        let changed = FleetView { policy: Arc::new(policy), ..fleet };
        return diff(&whole, &only(plan_of(&changed, asked.horizon)), asked, format);
    }
    match format {
        Format::Json => json(&PlanAnswer { plan: whole, assumptions: ASSUMPTIONS }),
        Format::Table if whole.rows.is_empty() => {
            Ok(nothing(&fleet, machine.as_ref(), asked) + &pauses(&whole))
        }
        Format::Table => Ok(render(&whole, asked)),
    }
}

/// What a configuration file says of the policy.
fn policy_flags(path: &Path) -> Result<PolicyFlags, CliError> {
    let shown = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| CliError::Wrong(format!("cannot read the configuration file {shown}: {error}")))?;
    PolicyFlags::of_configuration(&text)
        .map_err(|problem| CliError::Wrong(format!("the configuration file {shown}: {problem}")))
}

fn render(plan: &Plan, asked: &command::Plan) -> String {
    let limit = usize::try_from(asked.limit).unwrap_or(usize::MAX);
    let rows: Vec<Vec<String>> = plan.rows.iter().take(limit).map(|row| line(row, plan.at)).collect();
    let mut text = table(&["AT (UTC)", "IN", "MACHINE", "PROCESS", "WHAT"], &rows, width());
    if plan.rows.len() > limit {
        let _ = writeln!(text, "\nthe first {limit} of {}: raise --limit", plan.rows.len());
    }
    if plan.cut {
        let _ = writeln!(text, "\nthere is so much to do that this ends at {}", absolute(plan.until));
    }
    text.push_str(&pauses(plan));
    text.push('\n');
    text.push_str(&assumed());
    text
}

/// What is left out because loops are paused.
fn pauses(plan: &Plan) -> String {
    let mut text = String::new();
    for pause in &plan.paused {
        let sentence = format!("{}; what it would begin is left out", pause.sentence(plan.at));
        let _ = write!(text, "\n{}\n", wrapped(&sentence, width()).join("\n"));
    }
    text
}

fn line(row: &Row, now: Timestamp) -> Vec<String> {
    let when = if row.under_way {
        "under way".to_owned()
    } else {
        relative(row.at, now).trim_start_matches("in ").replace("just now", "now")
    };
    let what = row.what.clone();
    vec![moment(row.at), when, row.name.short(), row.process.to_owned(), what]
}

fn moment(at: Timestamp) -> String {
    at.format("%Y-%m-%d %H:%M:%S").to_string()
}

fn assumed() -> String {
    let sentence = "Assumed: what is tried succeeds, silent agents stay silent until then, and nobody else changes \
                    anything. docs/plan.md says it in full.";
    let mut text = wrapped(sentence, width()).join("\n");
    text.push('\n');
    text
}

/// That nothing is due, and of one machine why.
fn nothing(fleet: &FleetView, machine: Option<&MachineName>, asked: &command::Plan) -> String {
    let horizon = asked.horizon;
    let process = asked.process.as_deref();
    let what = process.map_or_else(|| "nothing".to_owned(), |process| format!("no {process}"));
    let Some(name) = machine else { return format!("{what} is due within {horizon}\n") };
    let mut text = format!("{what} is due on {} within {horizon}\n", name.short());
    let process = process.and_then(|process| process.parse::<Process>().ok());
    let id = MachineId(name.machine);
    if let Some(facts) = fleet.machines.iter().map(|state| &state.facts).find(|facts| facts.machine == id) {
        for lane in Lane::ALL.into_iter().filter(|lane| process.is_none_or(|of| of.lane() == *lane)) {
            let due = next_due(facts, lane, &fleet.policy, fleet.at);
            let _ = writeln!(text, "  {lane}: {}", due.reason);
        }
    }
    text
}

fn diff(before: &Plan, after: &Plan, asked: &command::Plan, format: Format) -> Result<String, CliError> {
    let found = differences(before, after);
    let until = before.until.min(after.until);
    if format == Format::Json {
        return json(&DiffAnswer { at: before.at, until, differences: found, assumptions: ASSUMPTIONS });
    }
    if found.is_empty() {
        return Ok(format!("it would change nothing within {}\n", asked.horizon));
    }
    let limit = usize::try_from(asked.limit).unwrap_or(usize::MAX);
    let shown = |at: Option<Timestamp>| at.map_or_else(|| "-".to_owned(), moment);
    let rows: Vec<Vec<String>> = found
        .iter()
        .take(limit)
        .map(|one| {
            let process = one.process.to_owned();
            vec![shown(one.before), shown(one.after), one.name.short(), process, one.what.clone()]
        })
        .collect();
    let mut text = table(&["AS IT IS (UTC)", "AS IT WOULD BE", "MACHINE", "PROCESS", "WHAT"], &rows, width());
    if found.len() > limit {
        let _ = writeln!(text, "\nthe first {limit} of {} differences: raise --limit", found.len());
    }
    text.push('\n');
    text.push_str(&assumed());
    Ok(text)
}
