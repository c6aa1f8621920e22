//! `get budgets`, `get brakes`, `budget set`: how much may be disturbed, and what holds.

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use serde_json::json;

use crate::bmdb::budget::{Bounds, bounds};
use crate::cli::again;
use crate::cli::dry_run;
use crate::cli::error::CliError;
use crate::cli::examples;
use crate::cli::get;
use crate::cli::operate::direct;
use crate::cli::output::{Format, table, width};
use crate::cli::remote::refused;
use crate::cli::remote_read::{at, moment, odd};
use crate::cli::source::Source;
use crate::model::budget::{BrakeState, BudgetChange, BudgetKind, BudgetLine};
use crate::model::process::UnknownName;
use crate::model::telling::{both, rough};
use crate::model::time::{Span, Timestamp, between};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::budgets_client::BudgetsClient;

/// What can be done with budgets.
#[derive(Debug, Subcommand)]
pub enum BudgetCommand {
    /// Change how many may begin, in every shepherd, from the next step on
    #[command(after_help = examples::BUDGET_SET)]
    Set(SetBudget),
}

/// A budget to change.
#[derive(Debug, Args)]
pub struct SetBudget {
    /// The budget
    #[arg(
        value_name = "KIND",
        value_parser = PossibleValuesParser::new(BudgetKind::ALL.map(BudgetKind::as_str))
    )]
    pub kind: String,
    /// Most that may begin within the window; 0 lets none begin
    #[arg(long, value_name = "N", required_unless_present = "window")]
    pub most: Option<u32>,
    /// The window, from 1s to 30d
    #[arg(long, value_name = "SPAN")]
    pub window: Option<Span>,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

async fn read(source: &Source) -> Result<Bounds, CliError> {
    match source {
        Source::Direct(bmdb) => {
            bmdb.read_policy().await?;
            let (_, policy) = bmdb.policy();
            let look = bmdb.inspect(move |tx| {
                let policy = policy.clone();
                Box::pin(async move { bounds(tx, &policy).await })
            });
            Ok(look.await?)
        }
        Source::Api(remote) => {
            let said = BudgetsClient::new(remote.service()).list(v1::ListBudgetsRequest {}).await;
            let said = said.map_err(refused)?.into_inner();
            Ok(Bounds {
                budgets: said.budgets.into_iter().map(budget).collect::<Result<_, _>>()?,
                brakes: said.brakes.into_iter().map(brake).collect(),
                at: at(said.at, "its moment")?,
            })
        }
    }
}

fn budget(said: v1::Budget) -> Result<BudgetLine, CliError> {
    let window = said.window.map(|window| window.parse().map_err(|_| odd("a budget's window")));
    Ok(BudgetLine {
        window: window.transpose()?,
        budget: said.kind,
        most: said.most,
        used: said.used,
        free: said.free,
        free_at: said.free_at.and_then(moment),
    })
}

fn brake(said: v1::BrakeState) -> BrakeState {
    BrakeState {
        kind: said.kind,
        scope: said.scope,
        holds: said.holds,
        since: said.since.and_then(moment),
        reason: said.reason,
        engaged_by: said.engaged_by,
    }
}

/// `get budgets`.
pub async fn budgets(source: &Source, format: Format) -> Result<String, CliError> {
    let Bounds { budgets, at, .. } = read(source).await?;
    if format == Format::Json {
        return get::json(&json!({ "budgets": budgets }));
    }
    let rows: Vec<Vec<String>> = budgets.iter().map(|line| row(line, at)).collect();
    Ok(table(&["BUDGET", "MOST", "WINDOW", "USED", "NEXT"], &rows, width()))
}

fn row(line: &BudgetLine, now: Timestamp) -> Vec<String> {
    vec![
        line.budget.clone(),
        line.most.map_or_else(|| "any".to_owned(), |most| most.to_string()),
        line.window.map_or_else(|| "-".to_owned(), |window| window.to_string()),
        line.used.to_string(),
        match line.free_at {
            _ if line.free => "now".to_owned(),
            Some(at) => both(at, now),
            None => "never: it allows none".to_owned(),
        },
    ]
}

/// `get brakes`.
pub async fn brakes(source: &Source, format: Format) -> Result<String, CliError> {
    let Bounds { brakes, at, .. } = read(source).await?;
    if format == Format::Json {
        return get::json(&json!({ "brakes": brakes }));
    }
    let dash = || "-".to_owned();
    let rows: Vec<Vec<String>> = brakes
        .into_iter()
        .map(|brake| {
            vec![
                brake.kind,
                if brake.scope == "*" { "all".to_owned() } else { brake.scope },
                if brake.holds { "holds".to_owned() } else { "off".to_owned() },
                brake.since.map_or_else(dash, |since| rough(between(since, at))),
                brake.reason.unwrap_or_else(dash),
                brake.engaged_by,
            ]
        })
        .collect();
    Ok(table(&["BRAKE", "OF", "STATE", "FOR", "REASON", "ENGAGED WHEN"], &rows, width()))
}

/// `budget set`.
pub async fn set(source: &Source, asked: &SetBudget, format: Format) -> Result<String, CliError> {
    let kind: BudgetKind =
        asked.kind.parse().map_err(|error: UnknownName| CliError::Wrong(error.to_string()))?;
    if asked.reason.trim().is_empty() {
        return Err(CliError::Wrong("--reason is empty; whoever reads the audit will want to know".into()));
    }
    let change = BudgetChange { most: asked.most, window: asked.window };
    let (changed, said) = match source {
        Source::Direct(bmdb) => {
            let order = direct("shepherd.fleet.v1.Budgets/Set", kind.target(), Some(&asked.reason));
            let done = bmdb.set_budget(order, kind, change).await?.done;
            (done.changed, done.said)
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::SetBudgetRequest {
                    kind: kind.as_str().to_owned(),
                    order: Some(order),
                    most: change.most,
                    window: change.window.map(|window| window.to_string()).unwrap_or_default(),
                };
                BudgetsClient::new(service).set(request).await
            };
            let done = again::order(&mut remote.clone(), &asked.reason, give).await?;
            (done.changed, done.said)
        }
    };
    match format {
        Format::Json => {
            let mut answer = json!({ "budget": kind.as_str(), "changed": changed, "said": said });
            dry_run::mark(&mut answer);
            get::json(&answer)
        }
        Format::Table => Ok(format!("{}\n", dry_run::line(&format!("{} {said}", kind.target())))),
    }
}
