//! `label`, `unlabel`: set and remove labels of machines.

use clap::Args;

use crate::context::CommandContext;
use crate::error::CliError;
use crate::machine::bulk_order::{BULK_GROUPS, BulkSelection, give_bulk_order};
use crate::machine::outcome::format_response;
use crate::order::reason::reason_or_placeholder;
use crate::order::retry::send_order;
use bmdb::orders::machine_order::MachineOrder;
use model::label::{self, Labels};
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

pub(crate) const LABEL_EXAMPLES: &str = "\
Examples:
  shepherdctl label sim-0007 --set row=7 --set owner=kim
  shepherdctl label --provider rack-a --set site=north --confirm_count 40";

pub(crate) const UNLABEL_EXAMPLES: &str = "\
Example:
  shepherdctl unlabel sim-0007 --key owner";

/// Arguments of `label`: the machines and the labels to set.
#[derive(Debug, Args)]
pub struct LabelArgs {
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID; omit it to select by filters
    #[arg(value_name = "M", required_unless_present_any = BULK_GROUPS, conflicts_with_all = BULK_GROUPS)]
    pub machine: Option<String>,
    /// The label; may be given several times
    #[arg(long, value_name = "KEY=VALUE", required = true)]
    pub set: Vec<String>,
    /// Why, for the history
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    /// Filters that select many machines instead of one.
    #[command(flatten)]
    pub selection: BulkSelection,
}

/// Arguments of `unlabel`: the machines and the keys to remove.
#[derive(Debug, Args)]
pub struct UnlabelArgs {
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID; omit it to select by filters
    #[arg(value_name = "M", required_unless_present_any = BULK_GROUPS, conflicts_with_all = BULK_GROUPS)]
    pub machine: Option<String>,
    /// The label's key; may be given several times
    #[arg(long, value_name = "KEY", required = true)]
    pub key: Vec<String>,
    /// Why, for the history
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    /// Filters that select many machines instead of one.
    #[command(flatten)]
    pub selection: BulkSelection,
}

/// Runs `label`: sets labels on one machine or on many.
pub async fn label_machines(context: &CommandContext, args: &LabelArgs) -> Result<String, CliError> {
    let set = args.set.iter().map(|text| label::parse_label(text)).collect::<Result<Labels, _>>();
    let change = (set.map_err(CliError::Invalid)?, Vec::new());
    let machine = args.machine.as_deref();
    change_labels(context, machine, &args.selection, change, args.reason.as_deref()).await
}

/// Runs `unlabel`: removes labels from one machine or from many.
pub async fn unlabel_machines(context: &CommandContext, args: &UnlabelArgs) -> Result<String, CliError> {
    for key in &args.key {
        label::check_label_key(key).map_err(CliError::Invalid)?;
    }
    let change = (Labels::new(), args.key.clone());
    let machine = args.machine.as_deref();
    change_labels(context, machine, &args.selection, change, args.reason.as_deref()).await
}

/// Sets and removes these labels, on one machine or on the selected ones.
async fn change_labels(
    context: &CommandContext,
    machine: Option<&str>,
    selection: &BulkSelection,
    (set, remove): (Labels, Vec<String>),
    reason: Option<&str>,
) -> Result<String, CliError> {
    let Some(machine) = machine else {
        let each = MachineOrder::Label { set, remove };
        return give_bulk_order(context, selection, each, reason).await;
    };
    let give = async |service, order| {
        let request = v1::LabelRequest {
            machine: machine.to_owned(),
            order: Some(order),
            set: set.clone(),
            remove: remove.clone(),
        };
        MachinesClient::new(service).label(request).await
    };
    let reason = reason_or_placeholder(reason);
    format_response(context, send_order(context, reason, give).await?)
}
