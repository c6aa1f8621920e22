//! `quarantine`: leave machines alone until an operator releases them.

use clap::Args;

use crate::context::CommandContext;
use crate::error::CliError;
use crate::machine::bulk_order::{BULK_GROUPS, BulkSelection, give_bulk_order};
use crate::machine::outcome::format_response;
use crate::order::reason::require_why_reason;
use crate::order::retry::send_order;
use bmdb::orders::machine_order::MachineOrder;
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

pub(crate) const QUARANTINE_EXAMPLES: &str = "\
Examples:
  shepherdctl quarantine sim-0007 --reason 'its fan rattles'
  shepherdctl quarantine --provider rack-a --fact needs_human --reason 'for the vendor'";

/// Arguments of `quarantine`: the machines and the reason.
#[derive(Debug, Args)]
pub struct QuarantineArgs {
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID; omit it to select by filters
    #[arg(value_name = "M", required_unless_present_any = BULK_GROUPS, conflicts_with_all = BULK_GROUPS)]
    pub machine: Option<String>,
    /// Why, for operators who run `why`
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Filters that select many machines instead of one.
    #[command(flatten)]
    pub selection: BulkSelection,
}

/// Runs `quarantine` for one machine or for many.
pub async fn quarantine_machines(
    context: &CommandContext,
    args: &QuarantineArgs,
) -> Result<String, CliError> {
    let reason = require_why_reason(&args.reason)?;
    let Some(machine) = args.machine.as_deref() else {
        return give_bulk_order(context, &args.selection, MachineOrder::Quarantine, Some(reason)).await;
    };
    let give = async |service, order| {
        let request = v1::QuarantineRequest { machine: machine.to_owned(), order: Some(order) };
        MachinesClient::new(service).quarantine(request).await
    };
    format_response(context, send_order(context, reason, give).await?)
}
