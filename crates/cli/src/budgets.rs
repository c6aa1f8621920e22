//! `get budgets`, `get brakes`, `budget set`: disruption budgets and brakes.

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use serde_json::json;

use crate::client::decode::{decode_timestamp, missing_field, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::context::CommandContext;
use crate::error::CliError;
use crate::order::outcome::decode_outcome;
use crate::order::reason::require_audit_reason;
use crate::order::retry::send_order;
use crate::output::table::{format_table, terminal_width};
use crate::output::{Format, format_json};
use bmdb::orders::budget::BudgetsAndBrakes;
use model::budget::{BrakeState, BudgetKind, BudgetStatus};
use model::humanize::{humanize_duration, relative_and_absolute_time};
use model::process::UnknownName;
use model::time::{Span, Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::budgets_client::BudgetsClient;

pub(crate) const GET_BUDGETS_EXAMPLES: &str = "\
Example:
  shepherdctl get budgets -o json | jq -r '.budgets[] | select(.available | not) | .budget'";

pub(crate) const GET_BRAKES_EXAMPLES: &str = "\
Example:
  shepherdctl get brakes                        which are engaged, and what engages each";

const BUDGET_SET_EXAMPLES: &str = "\
Examples:
  shepherdctl budget set reboot --max_count 50 --reason 'the new kernel is rolled out'
  shepherdctl budget set restart-agent --max_count 0 --reason 'the network is repaired'
  shepherdctl budget set release --max_count 200 --window 1h --reason 'two rows are returned'

The budget is stored in the policy, and applies from the next step of every shepherd. No flag
of a shepherd sets a budget, so a restart does not change it. Work that waits for a budget
tries again at its scheduled time.";

/// Subcommands of `budget`, which change budgets.
#[derive(Debug, Subcommand)]
pub enum BudgetCommand {
    /// Change a budget, for every shepherd, from its next step on
    #[command(after_help = BUDGET_SET_EXAMPLES)]
    Set(SetBudget),
}

/// Arguments of `budget set`: the budget and its new limits.
#[derive(Debug, Args)]
pub struct SetBudget {
    /// Kind of the budget to change, for example reboot
    #[arg(
        value_name = "KIND",
        value_parser = PossibleValuesParser::new(BudgetKind::ALL.map(BudgetKind::as_str))
    )]
    pub kind: String,
    /// Maximum number that may start within the window; 0 allows none
    #[arg(long = "max_count", value_name = "N", required_unless_present = "window")]
    pub max_count: Option<u32>,
    /// Length of the window, from 1s to 30d
    #[arg(long, value_name = "SPAN")]
    pub window: Option<Span>,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

async fn fetch_budgets_and_brakes(client: &FleetClient) -> Result<BudgetsAndBrakes, CliError> {
    let result = BudgetsClient::new(client.channel()).list(v1::ListBudgetsRequest {}).await;
    let response = result.map_err(status_to_error)?.into_inner();
    Ok(BudgetsAndBrakes {
        budgets: response.budgets.into_iter().map(decode_budget).collect::<Result<_, _>>()?,
        brakes: response.brakes.into_iter().map(decode_brake).collect(),
        at: require_timestamp(response.read_at, "its read time")?,
    })
}

fn decode_budget(budget: v1::Budget) -> Result<BudgetStatus, CliError> {
    let window = budget.window.map(|window| window.parse().map_err(|_| missing_field("a budget's window")));
    Ok(BudgetStatus {
        window: window.transpose()?,
        budget: budget.kind,
        max_count: budget.max_count,
        used: budget.used,
        available: budget.available,
        available_at: budget.available_at.and_then(decode_timestamp),
    })
}

fn decode_brake(brake_state: v1::BrakeState) -> BrakeState {
    BrakeState {
        kind: brake_state.kind,
        scope: brake_state.scope,
        engaged: brake_state.engaged,
        since: brake_state.since.and_then(decode_timestamp),
        reason: brake_state.reason,
        engages_when: brake_state.engages_when,
    }
}

/// Runs `get budgets`: lists each budget and its use.
pub async fn show_budgets(client: &FleetClient, format: Format) -> Result<String, CliError> {
    let BudgetsAndBrakes { budgets, at, .. } = fetch_budgets_and_brakes(client).await?;
    if format == Format::Json {
        return format_json(&json!({ "budgets": budgets }));
    }
    let rows: Vec<Vec<String>> = budgets.iter().map(|line| budget_row(line, at)).collect();
    Ok(format_table(&["BUDGET", "MAX", "WINDOW", "USED", "NEXT"], &rows, terminal_width()))
}

fn budget_row(line: &BudgetStatus, now: Timestamp) -> Vec<String> {
    vec![
        line.budget.clone(),
        line.max_count.map_or_else(|| "any".to_owned(), |most| most.to_string()),
        line.window.map_or_else(|| "-".to_owned(), |window| window.to_string()),
        line.used.to_string(),
        match line.available_at {
            _ if line.available => "now".to_owned(),
            Some(at) => relative_and_absolute_time(at, now),
            None => "never (limit 0)".to_owned(),
        },
    ]
}

/// Runs `get brakes`: lists each brake and its state.
pub async fn show_brakes(client: &FleetClient, format: Format) -> Result<String, CliError> {
    let BudgetsAndBrakes { brakes, at, .. } = fetch_budgets_and_brakes(client).await?;
    if format == Format::Json {
        return format_json(&json!({ "brakes": brakes }));
    }
    let dash = || "-".to_owned();
    let rows: Vec<Vec<String>> = brakes
        .into_iter()
        .map(|brake| {
            vec![
                brake.kind,
                if brake.scope == "*" { "all".to_owned() } else { brake.scope },
                if brake.engaged { "holds".to_owned() } else { "off".to_owned() },
                brake.since.map_or_else(dash, |since| humanize_duration(between(since, at))),
                brake.reason.unwrap_or_else(dash),
                brake.engages_when,
            ]
        })
        .collect();
    Ok(format_table(&["BRAKE", "SCOPE", "STATE", "FOR", "REASON", "ENGAGED WHEN"], &rows, terminal_width()))
}

/// Runs `budget set`: changes the limits of a budget.
pub async fn set_budget(context: &CommandContext, args: &SetBudget) -> Result<String, CliError> {
    let kind: BudgetKind =
        args.kind.parse().map_err(|error: UnknownName| CliError::Invalid(error.to_string()))?;
    require_audit_reason(&args.reason)?;
    let give = async |service, order| {
        let request = v1::SetBudgetRequest {
            kind: kind.as_str().to_owned(),
            order: Some(order),
            max_count: args.max_count,
            window: args.window.map(|window| window.to_string()).unwrap_or_default(),
        };
        BudgetsClient::new(service).set(request).await
    };
    let response = send_order(context, &args.reason, give).await?;
    let done = decode_outcome(response);
    context.format_outcome(
        json!({
            "budget": kind.as_str(), "changed": done.is_changed(), "outcome": done.kind.as_str(),
            "message": done.message,
        }),
        &format!("{} {}", kind.audit_target(), done.message),
    )
}
