//! `reboot`, `power on|off|cycle`, `power cancel`.

use crate::bulk_orders::{BulkSelection, give_bulk_order};
use crate::command::{CancelPower, PowerArgs, PowerCommand, RebootArgs};
use crate::error::CliError;
use crate::fleet_client::FleetClient;
use crate::machine_orders::{format_response, reason_or_placeholder};
use crate::order_retry;
use crate::output::Format;
use crate::retire::require_reason;
use bmdb::machine_order::MachineOrder;
use model::power_order::PowerOrderKind;
use model::process::UnknownName;
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

/// Runs `reboot M`: orders a reboot of a machine.
pub async fn reboot_machine(
    client: &FleetClient,
    arguments: &RebootArgs,
    format: Format,
) -> Result<String, CliError> {
    let about = (arguments.machine.as_deref(), &arguments.selection);
    order_power(client, about, PowerOrderKind::Reboot, require_reason(&arguments.reason)?, format).await
}

/// Runs `power ...`: orders a power action, or cancels one.
pub async fn switch_power(
    client: &FleetClient,
    arguments: &PowerArgs,
    format: Format,
) -> Result<String, CliError> {
    if let Some(PowerCommand::Cancel(cancel)) = &arguments.command {
        return cancel_power_order(client, cancel, format).await;
    }
    let action = arguments.action.as_deref().unwrap_or_default();
    let switch = action.parse().map_err(|error: UnknownName| CliError::Invalid(error.to_string()))?;
    let about = (arguments.machine.as_deref(), &arguments.selection);
    order_power(
        client,
        about,
        switch,
        require_reason(arguments.reason.as_deref().unwrap_or_default())?,
        format,
    )
    .await
}

async fn order_power(
    client: &FleetClient,
    (machine, selection): (Option<&str>, &BulkSelection),
    switch: PowerOrderKind,
    reason: &str,
    format: Format,
) -> Result<String, CliError> {
    let Some(machine) = machine else {
        return give_bulk_order(client, selection, MachineOrder::Power(switch), Some(reason), format).await;
    };
    let give = async |service, order| {
        let (mut machines, machine, order) = (MachinesClient::new(service), machine.to_owned(), Some(order));
        if switch == PowerOrderKind::Reboot {
            return machines.reboot(v1::RebootRequest { machine, order }).await;
        }
        machines.power(v1::PowerRequest { machine, order, action: switch.as_str().to_owned() }).await
    };
    format_response(order_retry::send_order(&mut client.clone(), reason, give).await?, format)
}

/// Runs `power cancel M`: cancels a power order.
async fn cancel_power_order(
    client: &FleetClient,
    arguments: &CancelPower,
    format: Format,
) -> Result<String, CliError> {
    let reason = reason_or_placeholder(arguments.reason.as_deref());
    let give = async |service, order| {
        let request = v1::CancelPowerRequest { machine: arguments.machine.clone(), order: Some(order) };
        MachinesClient::new(service).cancel_power(request).await
    };
    format_response(order_retry::send_order(&mut client.clone(), reason, give).await?, format)
}
