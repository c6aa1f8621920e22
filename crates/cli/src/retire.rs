//! `retire`, `retire cancel`, `retire waive`: retire (decommission) machines.

use crate::bulk_orders::give_bulk_order;
use crate::command::{CancelRetire, RetireArgs, RetireCommand, WaiveStage};
use crate::error::CliError;
use crate::fleet_client::FleetClient;
use crate::machine_orders::{format_response, reason_or_placeholder};
use crate::order_retry;
use crate::output::Format;
use bmdb::machine_order::MachineOrder;
use model::process::UnknownName;
use model::retirement::RetirementStage;
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

/// Runs `retire` or one of its subcommands.
pub async fn run_retire_command(
    client: &FleetClient,
    arguments: &RetireArgs,
    format: Format,
) -> Result<String, CliError> {
    match &arguments.command {
        Some(RetireCommand::Cancel(cancel)) => cancel_retirement(client, cancel, format).await,
        Some(RetireCommand::Waive(waive)) => waive_stage(client, waive, format).await,
        None => retire_machine(client, arguments, format).await,
    }
}

/// Runs `retire M`: orders the retirement of a machine.
async fn retire_machine(
    client: &FleetClient,
    arguments: &RetireArgs,
    format: Format,
) -> Result<String, CliError> {
    let reason = require_reason(arguments.reason.as_deref().unwrap_or_default())?;
    let wipe = arguments.wipe;
    let Some(machine) = arguments.machine.as_deref() else {
        return give_bulk_order(
            client,
            &arguments.selection,
            MachineOrder::Retire { wipe },
            Some(reason),
            format,
        )
        .await;
    };
    let give = async |service, order| {
        let request = v1::RetireRequest { machine: machine.to_owned(), order: Some(order), wipe };
        MachinesClient::new(service).retire(request).await
    };
    format_response(order_retry::send_order(&mut client.clone(), reason, give).await?, format)
}

/// Runs `retire cancel M`: cancels the retirement of a machine.
async fn cancel_retirement(
    client: &FleetClient,
    arguments: &CancelRetire,
    format: Format,
) -> Result<String, CliError> {
    let reason = reason_or_placeholder(arguments.reason.as_deref());
    let give = async |service, order| {
        let request = v1::CancelRetireRequest { machine: arguments.machine.clone(), order: Some(order) };
        MachinesClient::new(service).cancel_retire(request).await
    };
    format_response(order_retry::send_order(&mut client.clone(), reason, give).await?, format)
}

/// Runs `retire waive M STAGE`: skips a stage of the retirement.
async fn waive_stage(
    client: &FleetClient,
    arguments: &WaiveStage,
    format: Format,
) -> Result<String, CliError> {
    let reason = require_reason(&arguments.reason)?;
    let stage: RetirementStage =
        arguments.stage.parse().map_err(|error: UnknownName| CliError::Invalid(error.to_string()))?;
    let give = async |service, order| {
        let request = v1::WaiveStageRequest {
            machine: arguments.machine.clone(),
            order: Some(order),
            stage: stage.as_str().to_owned(),
            confirmation: arguments.confirm.clone(),
        };
        MachinesClient::new(service).waive_stage(request).await
    };
    format_response(order_retry::send_order(&mut client.clone(), reason, give).await?, format)
}

pub(crate) fn require_reason(reason: &str) -> Result<&str, CliError> {
    if reason.trim().is_empty() {
        return Err(CliError::Invalid(
            "--reason is empty; give one for operators who run `why` later".into(),
        ));
    }
    Ok(reason)
}
