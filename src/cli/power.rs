//! `reboot`, `power on|off|cycle`, `power cancel`.

use crate::bmdb::action::format_attribution;
use crate::bmdb::machine_order::MachineOrder;
use crate::bmdb::power_order;
use crate::cli::backend::Backend;
use crate::cli::bulk_orders::{BulkSelection, give_bulk_order};
use crate::cli::command::{CancelPower, PowerArgs, PowerCommand, RebootArgs};
use crate::cli::error::CliError;
use crate::cli::machine_lookup::find_machine;
use crate::cli::machine_orders::{current_user, format_response, reason_or_placeholder};
use crate::cli::order_retry;
use crate::cli::output::Format;
use crate::cli::retire::{require_reason, try_execute_on_machine};
use crate::model::power_order::PowerOrderKind;
use crate::model::process::UnknownName;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::machines_client::MachinesClient;

/// Runs `reboot M`: orders a reboot of a machine.
pub async fn reboot_machine(
    source: &Backend,
    arguments: &RebootArgs,
    format: Format,
) -> Result<String, CliError> {
    let about = (arguments.machine.as_deref(), &arguments.selection);
    order_power(source, about, PowerOrderKind::Reboot, require_reason(&arguments.reason)?, format).await
}

/// Runs `power ...`: orders a power action, or cancels one.
pub async fn switch_power(
    source: &Backend,
    arguments: &PowerArgs,
    format: Format,
) -> Result<String, CliError> {
    if let Some(PowerCommand::Cancel(cancel)) = &arguments.command {
        return cancel_power_order(source, cancel, format).await;
    }
    let action = arguments.action.as_deref().unwrap_or_default();
    let switch = action.parse().map_err(|error: UnknownName| CliError::Invalid(error.to_string()))?;
    let about = (arguments.machine.as_deref(), &arguments.selection);
    order_power(
        source,
        about,
        switch,
        require_reason(arguments.reason.as_deref().unwrap_or_default())?,
        format,
    )
    .await
}

async fn order_power(
    source: &Backend,
    (machine, selection): (Option<&str>, &BulkSelection),
    switch: PowerOrderKind,
    reason: &str,
    format: Format,
) -> Result<String, CliError> {
    let Some(machine) = machine else {
        return give_bulk_order(source, selection, MachineOrder::Power(switch), Some(reason), format).await;
    };
    let bmdb = match source {
        Backend::Direct(bmdb) => bmdb,
        Backend::Api(remote) => {
            let give = async |service, order| {
                let (mut client, machine, order) =
                    (MachinesClient::new(service), machine.to_owned(), Some(order));
                if switch == PowerOrderKind::Reboot {
                    return client.reboot(v1::RebootRequest { machine, order }).await;
                }
                client.power(v1::PowerRequest { machine, order, action: switch.as_str().to_owned() }).await
            };
            return format_response(
                order_retry::send_order(&mut remote.clone(), reason, give).await?,
                format,
            );
        }
    };
    let name = find_machine(bmdb, machine).await?;
    let (why, who) = (reason.to_owned(), current_user());
    let rpc = if switch == PowerOrderKind::Reboot { "Reboot" } else { "Power" };
    try_execute_on_machine(bmdb, name, rpc, reason, format, move |snapshot| {
        power_order::order_switch(snapshot, switch, &why, &who)
    })
    .await
}

/// Runs `power cancel M`: cancels a power order.
async fn cancel_power_order(
    source: &Backend,
    arguments: &CancelPower,
    format: Format,
) -> Result<String, CliError> {
    let reason = reason_or_placeholder(arguments.reason.as_deref());
    let bmdb = match source {
        Backend::Direct(bmdb) => bmdb,
        Backend::Api(remote) => {
            let give = async |service, order| {
                let request =
                    v1::CancelPowerRequest { machine: arguments.machine.clone(), order: Some(order) };
                MachinesClient::new(service).cancel_power(request).await
            };
            return format_response(
                order_retry::send_order(&mut remote.clone(), reason, give).await?,
                format,
            );
        }
    };
    let name = find_machine(bmdb, &arguments.machine).await?;
    let by = format_attribution(&current_user(), arguments.reason.as_deref());
    try_execute_on_machine(bmdb, name, "CancelPower", reason, format, move |snapshot| {
        power_order::cancel_power_order(&snapshot.facts, &by)
    })
    .await
}
