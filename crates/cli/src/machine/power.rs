//! `reboot`, `power on|off|cycle`, `power cancel`: reboots and power switching.

use clap::{Args, Subcommand};

use crate::context::CommandContext;
use crate::error::CliError;
use crate::machine::machine_order::{MachineOrderRequest, give_machine_order};
use crate::machine::order_targets::MachineTargets;
use crate::one_of::one_of;
use crate::order::confirmation::ConfirmFlag;
use crate::order::reason::require_why_reason;
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
  shepherdctl reboot --label row=7 --reason 'a new kernel' --dry-run
  shepherdctl why sim-0007";

pub(crate) const POWER_EXAMPLES: &str = "\
Examples:
  shepherdctl power off sim-0007 --reason 'its fan is replaced'
  shepherdctl power on sim-0007 --reason 'the fan is in' && shepherdctl release sim-0007
  shepherdctl power cycle --provider rack-a --phase NeedsHuman --reason 'the switch is back' --dry-run
  shepherdctl power cancel sim-0007

To switch off a machine with a node that votes in etcd of its cluster, type its name, or give --yes.";

const POWER_CANCEL_EXAMPLES: &str = "\
Example:
  shepherdctl power cancel sim-0007 --reason 'it came back'";

/// Arguments of `reboot`: the machines and the reason.
#[derive(Debug, Args)]
pub struct RebootArgs {
    /// Why, for the audit and for operators who run `why`
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Whether to wait for the end of the work.
    #[command(flatten)]
    pub waiting: WaitFlags,
    /// The machines of the order.
    #[command(flatten)]
    pub targets: MachineTargets,
}

/// Arguments of `power`: an action and its machines, or a subcommand.
#[derive(Debug, Args)]
pub struct PowerArgs {
    /// What to do with an order that was given
    #[command(subcommand)]
    pub command: Option<PowerCommand>,
    /// What to do: on, off or cycle
    #[arg(value_name = "ACTION", required = true, value_parser = one_of(["on", "off", "cycle"]))]
    pub action: Option<String>,
    /// Why, for the audit and for operators who run `why`
    #[arg(long, value_name = "TEXT", required = true)]
    pub reason: Option<String>,
    /// Confirmation without a terminal.
    #[command(flatten)]
    pub confirm: ConfirmFlag,
    /// Whether to wait for the end of the work.
    #[command(flatten)]
    pub waiting: WaitFlags,
    /// The machines of the order.
    #[command(flatten)]
    pub targets: MachineTargets,
}

/// Subcommands of `power`, about orders that were given.
#[derive(Debug, Subcommand)]
pub enum PowerCommand {
    /// Cancel a power or reboot order that has not started
    #[command(after_help = POWER_CANCEL_EXAMPLES)]
    Cancel(CancelPower),
}

/// Arguments of `power cancel`: the machines of the orders to cancel.
#[derive(Debug, Args)]
pub struct CancelPower {
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    /// The machines of the order.
    #[command(flatten)]
    pub targets: MachineTargets,
}

/// Runs `reboot M…`: orders a reboot of machines.
pub async fn reboot_machines(context: &CommandContext, arguments: &RebootArgs) -> Result<String, CliError> {
    let reason = require_why_reason(&arguments.reason)?;
    order_power(context, &arguments.targets, PowerOrderKind::Reboot, (reason, false)).await
}

/// Runs `power ...`: orders a power action, or cancels one.
pub async fn switch_power(context: &CommandContext, arguments: &PowerArgs) -> Result<String, CliError> {
    if let Some(PowerCommand::Cancel(cancel)) = &arguments.command {
        return cancel_power_orders(context, cancel).await;
    }
    let action = arguments.action.as_deref().unwrap_or_default();
    let switch = action.parse().map_err(|error: UnknownName| CliError::Invalid(error.to_string()))?;
    let reason = require_why_reason(arguments.reason.as_deref().unwrap_or_default())?;
    order_power(context, &arguments.targets, switch, (reason, arguments.confirm.yes)).await
}

/// Orders a power action. `reason` comes with whether a flag confirms the order.
async fn order_power(
    context: &CommandContext,
    targets: &MachineTargets,
    switch: PowerOrderKind,
    (reason, is_confirmed): (&str, bool),
) -> Result<String, CliError> {
    let request = MachineOrderRequest {
        names: targets.read_names()?,
        selection: &targets.selection,
        each: MachineOrder::Power(switch),
        reason: Some(reason),
        is_confirmed,
    };
    let give = async |service, machine, order| {
        let (mut machines, order) = (MachinesClient::new(service), Some(order));
        if switch == PowerOrderKind::Reboot {
            return machines.reboot(v1::RebootRequest { machine, order }).await;
        }
        machines.power(v1::PowerRequest { machine, order, action: switch.as_str().to_owned() }).await
    };
    give_machine_order(context, request, give).await
}

/// Runs `power cancel M…`: cancels power orders.
async fn cancel_power_orders(context: &CommandContext, arguments: &CancelPower) -> Result<String, CliError> {
    let request = MachineOrderRequest {
        names: arguments.targets.read_names()?,
        selection: &arguments.targets.selection,
        each: MachineOrder::CancelPower,
        reason: arguments.reason.as_deref(),
        is_confirmed: false,
    };
    let give = async |service, machine, order| {
        let request = v1::CancelPowerRequest { machine, order: Some(order) };
        MachinesClient::new(service).cancel_power(request).await
    };
    give_machine_order(context, request, give).await
}
