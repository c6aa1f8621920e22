//! `retry`: let everything that failed on a machine be tried again at once.

use clap::Args;

use crate::context::CommandContext;
use crate::error::CliError;
use crate::machine::bulk_order::{BULK_GROUPS, BulkSelection, give_bulk_order};
use crate::machine::outcome::format_response;
use crate::order::reason::reason_or_placeholder;
use crate::order::retry::send_order;
use bmdb::orders::machine_order::MachineOrder;
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

pub(crate) const RETRY_EXAMPLES: &str = "\
Example:
  shepherdctl retry sim-0007 --reason 'plugged in again'";

/// Arguments of `retry`: the machines and the reason.
#[derive(Debug, Args)]
pub struct RetryArgs {
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID; omit it to select by filters
    #[arg(value_name = "M", required_unless_present_any = BULK_GROUPS, conflicts_with_all = BULK_GROUPS)]
    pub machine: Option<String>,
    /// Why, for the history
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    /// Filters that select many machines instead of one.
    #[command(flatten)]
    pub selection: BulkSelection,
}

/// Runs `retry M`: lets everything that failed on a machine be tried again at once.
pub async fn retry_machine(context: &CommandContext, arguments: &RetryArgs) -> Result<String, CliError> {
    let Some(machine) = arguments.machine.as_deref() else {
        let reason = arguments.reason.as_deref();
        return give_bulk_order(context, &arguments.selection, MachineOrder::Retry, reason).await;
    };
    let give = async |service, order| {
        let request = v1::RetryRequest { machine: machine.to_owned(), order: Some(order) };
        MachinesClient::new(service).retry(request).await
    };
    let reason = reason_or_placeholder(arguments.reason.as_deref());
    format_response(context, send_order(context, reason, give).await?)
}
