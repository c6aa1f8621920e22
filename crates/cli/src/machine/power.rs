//! `reboot`, `power on|off|cycle`, `power cancel`: reboots and power switching.

use clap::{Args, Subcommand};

use crate::context::CommandContext;
use crate::error::CliError;
use crate::machine::bulk_order::{BULK_GROUPS, BulkSelection, give_bulk_order};
use crate::machine::outcome::format_response;
use crate::order::reason::{reason_or_placeholder, require_why_reason};
use crate::order::retry::send_order;
use crate::order::wait_flags::WaitFlags;
use bmdb::orders::machine_order::MachineOrder;
use model::power_order::PowerOrderKind;
use model::process::UnknownName;
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

pub(crate) const REBOOT_EXAMPLES: &str = "\
Examples:
  shepherdctl reboot sim-0007 --reason 'a new kernel'
  shepherdctl reboot sim-0007 --reason 'a new kernel' --wait
  shepherdctl reboot --label row=7 --reason 'a new kernel' --dry_run
  shepherdctl why sim-0007";

pub(crate) const POWER_EXAMPLES: &str = "\
Examples:
  shepherdctl power off sim-0007 --reason 'its fan is replaced'
  shepherdctl power on sim-0007 --reason 'the fan is in' && shepherdctl release sim-0007
  shepherdctl power cycle --provider rack-a --phase NeedsHuman --reason 'the switch is back' --dry_run
  shepherdctl power cancel sim-0007";

const POWER_CANCEL_EXAMPLES: &str = "\
Example:
  shepherdctl power cancel sim-0007 --reason 'it came back'";

/// Arguments of `reboot`: the machines and the reason.
#[derive(Debug, Args)]
pub struct RebootArgs {
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID; omit it to select by filters
    #[arg(value_name = "M", required_unless_present_any = BULK_GROUPS, conflicts_with_all = BULK_GROUPS)]
    pub machine: Option<String>,
    /// Why, for the audit and for operators who run `why`
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Whether to wait for the end of the work.
    #[command(flatten)]
    pub waiting: WaitFlags,
    /// Filters that select many machines instead of one.
    #[command(flatten)]
    pub selection: BulkSelection,
}

/// Arguments of `power`: an action and its machines, or a subcommand.
#[derive(Debug, Args)]
pub struct PowerArgs {
    /// What to do with an order that was given
    #[command(subcommand)]
    pub command: Option<PowerCommand>,
    /// What to do: on, off or cycle
    #[arg(value_name = "ACTION", required = true, value_parser = ["on", "off", "cycle"])]
    pub action: Option<String>,
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID; omit it to select by filters
    #[arg(value_name = "M", required_unless_present_any = BULK_GROUPS, conflicts_with_all = BULK_GROUPS)]
    pub machine: Option<String>,
    /// Why, for the audit and for operators who run `why`
    #[arg(long, value_name = "TEXT", required = true)]
    pub reason: Option<String>,
    /// Whether to wait for the end of the work.
    #[command(flatten)]
    pub waiting: WaitFlags,
    /// Filters that select many machines instead of one.
    #[command(flatten)]
    pub selection: BulkSelection,
}

/// Subcommands of `power`, about orders that were given.
#[derive(Debug, Subcommand)]
pub enum PowerCommand {
    /// Cancel a power or reboot order that has not started
    #[command(after_help = POWER_CANCEL_EXAMPLES)]
    Cancel(CancelPower),
}

/// Arguments of `power cancel`: the machine of the order to cancel.
#[derive(Debug, Args)]
pub struct CancelPower {
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID
    #[arg(value_name = "M")]
    pub machine: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// Runs `reboot M`: orders a reboot of a machine.
pub async fn reboot_machine(context: &CommandContext, arguments: &RebootArgs) -> Result<String, CliError> {
    let about = (arguments.machine.as_deref(), &arguments.selection);
    order_power(context, about, PowerOrderKind::Reboot, require_why_reason(&arguments.reason)?).await
}

/// Runs `power ...`: orders a power action, or cancels one.
pub async fn switch_power(context: &CommandContext, arguments: &PowerArgs) -> Result<String, CliError> {
    if let Some(PowerCommand::Cancel(cancel)) = &arguments.command {
        return cancel_power_order(context, cancel).await;
    }
    let action = arguments.action.as_deref().unwrap_or_default();
    let switch = action.parse().map_err(|error: UnknownName| CliError::Invalid(error.to_string()))?;
    let about = (arguments.machine.as_deref(), &arguments.selection);
    order_power(context, about, switch, require_why_reason(arguments.reason.as_deref().unwrap_or_default())?)
        .await
}

async fn order_power(
    context: &CommandContext,
    (machine, selection): (Option<&str>, &BulkSelection),
    switch: PowerOrderKind,
    reason: &str,
) -> Result<String, CliError> {
    let Some(machine) = machine else {
        return give_bulk_order(context, selection, MachineOrder::Power(switch), Some(reason)).await;
    };
    let give = async |service, order| {
        let (mut machines, machine, order) = (MachinesClient::new(service), machine.to_owned(), Some(order));
        if switch == PowerOrderKind::Reboot {
            return machines.reboot(v1::RebootRequest { machine, order }).await;
        }
        machines.power(v1::PowerRequest { machine, order, action: switch.as_str().to_owned() }).await
    };
    format_response(context, send_order(context, reason, give).await?)
}

/// Runs `power cancel M`: cancels a power order.
async fn cancel_power_order(context: &CommandContext, arguments: &CancelPower) -> Result<String, CliError> {
    let reason = reason_or_placeholder(arguments.reason.as_deref());
    let give = async |service, order| {
        let request = v1::CancelPowerRequest { machine: arguments.machine.clone(), order: Some(order) };
        MachinesClient::new(service).cancel_power(request).await
    };
    format_response(context, send_order(context, reason, give).await?)
}
