//! `quarantine`: leave machines alone until an operator releases them.

use clap::Args;

use crate::context::CommandContext;
use crate::error::CliError;
use crate::machine::machine_order::{MachineOrderRequest, give_machine_order};
use crate::machine::order_targets::MachineTargets;
use crate::order::reason::require_why_reason;
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
    /// Why, for operators who run `why`
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// The machines of the order.
    #[command(flatten)]
    pub targets: MachineTargets,
}

/// Runs `quarantine M…`: leaves machines alone.
pub async fn quarantine_machines(
    context: &CommandContext,
    args: &QuarantineArgs,
) -> Result<String, CliError> {
    let request = MachineOrderRequest {
        names: args.targets.read_names()?,
        selection: &args.targets.selection,
        each: MachineOrder::Quarantine,
        reason: Some(require_why_reason(&args.reason)?),
        is_confirmed: false,
    };
    let give = async |service, machine, order| {
        MachinesClient::new(service).quarantine(v1::QuarantineRequest { machine, order: Some(order) }).await
    };
    give_machine_order(context, request, give).await
}
