//! `retry`: let everything that failed on machines be tried again at once.

use clap::Args;

use crate::context::CommandContext;
use crate::error::CliError;
use crate::machine::machine_order::{MachineOrderRequest, give_machine_order};
use crate::machine::order_targets::MachineTargets;
use bmdb::orders::machine_order::MachineOrder;
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

pub(crate) const RETRY_EXAMPLES: &str = "\
Example:
  shepherdctl retry sim-0007 --reason 'plugged in again'";

/// Arguments of `retry`: the machines and the reason.
#[derive(Debug, Args)]
pub struct RetryArgs {
    /// Why, for the history
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    /// The machines of the order.
    #[command(flatten)]
    pub targets: MachineTargets,
}

/// Runs `retry M…`: lets everything that failed on machines be tried again at once.
pub async fn retry_machines(context: &CommandContext, arguments: &RetryArgs) -> Result<String, CliError> {
    let request = MachineOrderRequest {
        names: arguments.targets.read_names()?,
        selection: &arguments.targets.selection,
        each: MachineOrder::Retry,
        reason: arguments.reason.as_deref(),
        is_confirmed: false,
    };
    let give = async |service, machine, order| {
        MachinesClient::new(service).retry(v1::RetryRequest { machine, order: Some(order) }).await
    };
    give_machine_order(context, request, give).await
}
