//! `cluster plan`: forecast of the steps for a cluster, without taking any.
//!
//! [`model::cluster::forecast`] computes the forecast. This module fetches and prints it.

use std::fmt::Write as _;

use clap::Args;

use crate::client::decode::require_timestamp;
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::error::CliError;
use crate::machine::selection::parse_selector;
use crate::object::document::format_message;
use crate::output::Format;
use crate::output::table::{format_table, terminal_width};
use model::cluster::forecast::{Forecast, ForecastEnd, ForecastStep};
use model::cluster::spec::check_cluster_selector;
use model::selector::Selector;
use model::text_layout::wrap_text;
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;

pub(crate) const PLAN_EXAMPLES: &str = "\
Examples:
  shepherdctl cluster plan ams                  what will be done to it, and what it waits for then
  shepherdctl cluster plan ams --workers 3      which machines would leave
  shepherdctl cluster plan new --control-plane 3 --workers 5 -l 'location=ams*'
                                                which machines would be chosen for a cluster that does not exist yet";

/// Cluster whose next steps are computed, and the changes to assume.
#[derive(Debug, Args)]
pub struct PlanCluster {
    /// Name of the cluster; with a size it may be one that does not exist yet
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Assume this size of the control plane: 1, 3, 5 or 7
    #[arg(long = "control-plane", value_name = "N")]
    pub control_plane: Option<u32>,
    /// Assume this number of workers
    #[arg(long, value_name = "N")]
    pub workers: Option<u32>,
    /// Assume that every worker has this role; may be given several times
    #[arg(long = "add-role", value_name = "ROLE")]
    pub add_roles: Vec<String>,
    /// Assume that no worker has this role; may be given several times
    #[arg(long = "remove-role", value_name = "ROLE")]
    pub remove_roles: Vec<String>,
    /// Assume that the cluster is deleted
    #[arg(long)]
    pub delete: bool,
    /// Selector of a cluster that does not exist yet, for example 'location=ams*,memory>=64GiB'
    #[arg(short = 'l', long, value_name = "SELECTOR", value_parser = parse_selector)]
    pub selector: Option<Selector>,
}

/// The forecast, and whether the cluster exists yet.
struct ClusterPlanReport {
    exists: bool,
    forecast: Forecast,
}

/// Runs `cluster plan`: fetches and prints the forecast.
pub(super) async fn plan_cluster(
    client: &FleetClient,
    args: &PlanCluster,
    format: Format,
) -> Result<String, CliError> {
    if let Some(selector) = &args.selector {
        check_cluster_selector(selector).map_err(CliError::Invalid)?;
    }
    let request = v1::PlanClusterRequest {
        name: args.name.clone(),
        control_plane: args.control_plane,
        workers: args.workers,
        add_roles: args.add_roles.clone(),
        remove_roles: args.remove_roles.clone(),
        delete: args.delete,
        selector: args.selector.as_ref().map(ToString::to_string).unwrap_or_default(),
    };
    let result = ClustersClient::new(client.channel()).plan(request).await;
    let response = result.map_err(status_to_error)?.into_inner();
    match format {
        Format::Json => format_message(&response),
        Format::Table => Ok(format_plan(&args.name, &decode_plan(response)?)),
    }
}

fn decode_plan(response: v1::PlanClusterResponse) -> Result<ClusterPlanReport, CliError> {
    let end = ForecastEnd::ALL.into_iter().find(|end| end.as_str() == response.end);
    let step =
        |step: v1::ForecastStep| ForecastStep { machine: step.machine, name: step.name, action: step.action };
    let forecast = Forecast {
        at: require_timestamp(response.read_at, "its read time")?,
        steps: response.steps.into_iter().map(step).collect(),
        end: end.ok_or_else(|| {
            CliError::Invalid(format!(
                "the plan ends in {:?}, which this shepherdctl does not know",
                response.end
            ))
        })?,
        wait_reasons: response.wait_reasons,
        machine_waits: response
            .machine_waits
            .into_iter()
            .map(|machine| (machine.name, machine.wait_reason))
            .collect(),
    };
    Ok(ClusterPlanReport { exists: response.exists, forecast })
}

fn format_plan(name: &str, report: &ClusterPlanReport) -> String {
    let Forecast { steps, end, wait_reasons: waits, machine_waits: machines, .. } = &report.forecast;
    let mut text = String::new();
    if !report.exists {
        let _ = writeln!(text, "there is no cluster {name} yet; these would be its steps\n");
    }
    let number = |number: usize| (number + 1).to_string();
    let of = |step: &ForecastStep| step.name.clone().unwrap_or_else(|| "-".to_owned());
    let rows: Vec<Vec<String>> =
        steps.iter().enumerate().map(|(at, step)| vec![number(at), of(step), step.action.clone()]).collect();
    if !rows.is_empty() {
        text.push_str(&format_table(&["STEP", "MACHINE", "WHAT"], &rows, terminal_width()));
        text.push('\n');
    }
    let sentence = match (end, steps.is_empty()) {
        (ForecastEnd::Converged, true) => "the cluster matches its specification; there is nothing to do",
        (ForecastEnd::Converged, false) => "then the cluster matches its specification",
        (ForecastEnd::Waiting, true) => "nothing can be done now; it waits:",
        (ForecastEnd::Waiting, false) => "then it waits:",
        (ForecastEnd::Deleted, _) => "then the cluster is deleted",
        (ForecastEnd::Truncated, _) => "there are more steps than this forecast can show",
    };
    let _ = writeln!(text, "{sentence}");
    let machines = machines.iter().map(|(machine, waits)| format!("{machine}: {waits}"));
    for wait in waits.iter().cloned().chain(machines) {
        let narrower = terminal_width().map(|width| width.saturating_sub(2));
        let _ = writeln!(text, "  {}", wrap_text(&wait, narrower).join("\n  "));
    }
    if !steps.is_empty() {
        let assumed = "Assumed: every request succeeds, silent nodes stay silent, and nobody else changes \
                       anything. The full list: shepherdctl explain forecast";
        let _ = write!(text, "\n{}\n", wrap_text(assumed, terminal_width()).join("\n"));
    }
    text
}
