//! `get budgets`, `get brakes`, `budget set`: disruption budgets and brakes.

use clap::{Args, Subcommand};

use crate::client::decode::{decode_timestamp, missing_field, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::context::CommandContext;
use crate::error::CliError;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use crate::one_of::one_of;
use crate::order::reason::require_audit_reason;
use crate::order::retry::send_order;
use model::budget::{BrakeState, BudgetKind, BudgetStatus};
use model::humanize::{humanize_duration, relative_and_absolute_time};
use model::process::UnknownName;
use model::time::{Span, Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::budgets_client::BudgetsClient;

const BUDGET_COLUMNS: [Column; 5] = [
    Column::always("NAME"),
    Column::always("MAX"),
    Column::always("WINDOW"),
    Column::always("USED"),
    Column::always("NEXT"),
];

const BRAKE_COLUMNS: [Column; 6] = [
    Column::always("BRAKE"),
    Column::always("SCOPE"),
    Column::always("STATE"),
    Column::always("FOR"),
    Column::always("REASON"),
    Column::always("ENGAGED WHEN"),
];

const BUDGET_SET_EXAMPLES: &str = "\
Examples:
  shepherdctl budget set reboot --max-count 50 --reason 'the new kernel is rolled out'
  shepherdctl budget set restart-agent --max-count 0 --reason 'the network is repaired'
  shepherdctl budget set release --max-count 200 --window 1h --reason 'two rows are returned'

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
        value_parser = one_of(BudgetKind::ALL.map(BudgetKind::as_str))
    )]
    pub kind: String,
    /// Maximum number that may start within the window; 0 allows none
    #[arg(long = "max-count", value_name = "N", required_unless_present = "window")]
    pub max_count: Option<u32>,
    /// Length of the window, from 1s to 30d
    #[arg(long, value_name = "SPAN")]
    pub window: Option<Span>,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// Fetches all budgets and brakes, and the time at which they were read.
async fn fetch_budgets(client: &FleetClient) -> Result<(v1::ListBudgetsResponse, Timestamp), CliError> {
    let result = BudgetsClient::new(client.channel()).list(v1::ListBudgetsRequest {}).await;
    let response = result.map_err(status_to_error)?.into_inner();
    let now = require_timestamp(response.read_at, "its read time")?;
    Ok((response, now))
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

/// Lists each budget and its use.
pub(crate) async fn list_budgets(client: &FleetClient) -> Result<ObjectList, CliError> {
    let (mut response, now) = fetch_budgets(client).await?;
    let mut objects = Vec::new();
    for budget in std::mem::take(&mut response.budgets) {
        let document = ObjectDocument::of_message(&budget);
        let line = decode_budget(budget)?;
        let rows = vec![budget_row(&line, now)];
        objects.push(ListedObject { names: ObjectNames::of_name(line.budget), rows, document });
    }
    Ok(ObjectList::of_response(ObjectKind::Budget, &response, &BUDGET_COLUMNS, objects))
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

/// Lists each brake and its state.
pub(crate) async fn list_brakes(client: &FleetClient) -> Result<ObjectList, CliError> {
    let (mut response, now) = fetch_budgets(client).await?;
    let objects = std::mem::take(&mut response.brakes).into_iter().map(|brake| {
        let document = ObjectDocument::of_message(&brake);
        let names = ObjectNames {
            name: format!("{}/{}", brake.kind, brake.scope),
            others: vec![brake.kind.clone()],
            id: None,
        };
        ListedObject { names, rows: vec![brake_row(decode_brake(brake), now)], document }
    });
    let objects = objects.collect();
    Ok(ObjectList::of_response(ObjectKind::Brake, &response, &BRAKE_COLUMNS, objects))
}

fn brake_row(brake: BrakeState, now: Timestamp) -> Vec<String> {
    let dash = || "-".to_owned();
    vec![
        brake.kind,
        if brake.scope == "*" { "all".to_owned() } else { brake.scope },
        if brake.engaged { "holds".to_owned() } else { "off".to_owned() },
        brake.since.map_or_else(dash, |since| humanize_duration(between(since, now))),
        brake.reason.unwrap_or_else(dash),
        brake.engages_when,
    ]
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
    let text = format!("{} {}", kind.audit_target(), response.message);
    context.format_outcome(&response, &text)
}
