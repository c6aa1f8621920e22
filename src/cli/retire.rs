//! `retire`, `retire cancel`, `retire waive`: retire (decommission) machines.

use crate::bmdb::action::{OrderOutcome, format_attribution};
use crate::bmdb::connection::Bmdb;
use crate::bmdb::facts::MachineSnapshot;
use crate::bmdb::machine_lookup::machine_id;
use crate::bmdb::machine_order::MachineOrder;
use crate::bmdb::retirement::{self, OrderRejection};
use crate::bmdb::work::Decision;
use crate::cli::backend::Backend;
use crate::cli::bulk_orders::give_bulk_order;
use crate::cli::command::{CancelRetire, RetireArgs, RetireCommand, WaiveStage};
use crate::cli::error::CliError;
use crate::cli::machine_lookup::find_machine;
use crate::cli::machine_orders::{
    current_user, direct_order, format_outcome, format_response, reason_or_placeholder,
};
use crate::cli::order_retry;
use crate::cli::output::Format;
use crate::model::access::AccessRole;
use crate::model::machine_view::MachineName;
use crate::model::process::UnknownName;
use crate::model::retirement::{RetirementStage, check_confirmation};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::machines_client::MachinesClient;

/// Runs `retire` or one of its subcommands.
pub async fn run_retire_command(
    source: &Backend,
    arguments: &RetireArgs,
    format: Format,
) -> Result<String, CliError> {
    match &arguments.command {
        Some(RetireCommand::Cancel(cancel)) => cancel_retirement(source, cancel, format).await,
        Some(RetireCommand::Waive(waive)) => waive_stage(source, waive, format).await,
        None => retire_machine(source, arguments, format).await,
    }
}

/// Runs `retire M`: orders the retirement of a machine.
async fn retire_machine(
    source: &Backend,
    arguments: &RetireArgs,
    format: Format,
) -> Result<String, CliError> {
    let reason = require_reason(arguments.reason.as_deref().unwrap_or_default())?;
    let wipe = arguments.wipe;
    let Some(machine) = arguments.machine.as_deref() else {
        return give_bulk_order(
            source,
            &arguments.selection,
            MachineOrder::Retire { wipe },
            Some(reason),
            format,
        )
        .await;
    };
    let bmdb = match source {
        Backend::Direct(bmdb) => bmdb,
        Backend::Api(remote) => {
            let give = async |service, order| {
                let request = v1::RetireRequest { machine: machine.to_owned(), order: Some(order), wipe };
                MachinesClient::new(service).retire(request).await
            };
            return format_response(
                order_retry::send_order(&mut remote.clone(), reason, give).await?,
                format,
            );
        }
    };
    let name = find_machine(bmdb, machine).await?;
    let (why, who) = (reason.to_owned(), current_user());
    try_execute_on_machine(bmdb, name, "Retire", reason, format, move |snapshot| {
        retirement::retire_machine(snapshot, wipe, &why, &who)
    })
    .await
}

/// Runs `retire cancel M`: cancels the retirement of a machine.
async fn cancel_retirement(
    source: &Backend,
    arguments: &CancelRetire,
    format: Format,
) -> Result<String, CliError> {
    let reason = reason_or_placeholder(arguments.reason.as_deref());
    let bmdb = match source {
        Backend::Direct(bmdb) => bmdb,
        Backend::Api(remote) => {
            let give = async |service, order| {
                let request =
                    v1::CancelRetireRequest { machine: arguments.machine.clone(), order: Some(order) };
                MachinesClient::new(service).cancel_retire(request).await
            };
            return format_response(
                order_retry::send_order(&mut remote.clone(), reason, give).await?,
                format,
            );
        }
    };
    let name = find_machine(bmdb, &arguments.machine).await?;
    let by = format_attribution(&current_user(), arguments.reason.as_deref());
    // An operator with write access to the BMDB counts as an admin.
    try_execute_on_machine(bmdb, name, "CancelRetire", reason, format, move |snapshot| {
        retirement::cancel_retirement(snapshot, &by, AccessRole::Admin)
    })
    .await
}

/// Runs `retire waive M STAGE`: skips a stage of the retirement.
async fn waive_stage(source: &Backend, arguments: &WaiveStage, format: Format) -> Result<String, CliError> {
    let reason = require_reason(&arguments.reason)?;
    let stage: RetirementStage =
        arguments.stage.parse().map_err(|error: UnknownName| CliError::Invalid(error.to_string()))?;
    let bmdb = match source {
        Backend::Direct(bmdb) => bmdb,
        Backend::Api(remote) => {
            let give = async |service, order| {
                let request = v1::WaiveStageRequest {
                    machine: arguments.machine.clone(),
                    order: Some(order),
                    stage: stage.as_str().to_owned(),
                    confirmation: arguments.confirm.clone(),
                };
                MachinesClient::new(service).waive_stage(request).await
            };
            return format_response(
                order_retry::send_order(&mut remote.clone(), reason, give).await?,
                format,
            );
        }
    };
    let name = find_machine(bmdb, &arguments.machine).await?;
    check_confirmation(stage, &name.short_name(), &arguments.confirm).map_err(CliError::Invalid)?;
    bmdb.read_policy().await?;
    let (_, policy) = bmdb.policy();
    let (why, who) = (reason.to_owned(), current_user());
    try_execute_on_machine(bmdb, name, "Waive", reason, format, move |snapshot| {
        retirement::waive_stage(snapshot, &policy, stage, &why, &who)
    })
    .await
}

pub(crate) fn require_reason(reason: &str) -> Result<&str, CliError> {
    if reason.trim().is_empty() {
        return Err(CliError::Invalid(
            "--reason is empty; give one for operators who run `why` later".into(),
        ));
    }
    Ok(reason)
}

/// Executes an order that may be rejected because of the machine's facts, as the API does.
pub(crate) async fn try_execute_on_machine(
    bmdb: &Bmdb,
    name: MachineName,
    rpc: &str,
    reason: &str,
    format: Format,
    decide: impl Fn(&MachineSnapshot) -> Result<Decision<OrderOutcome>, OrderRejection> + Send + Sync + 'static,
) -> Result<String, CliError> {
    let short = name.short_name();
    let order = direct_order(&format!("shepherd.fleet.v1.Machines/{rpc}"), short.clone(), Some(reason));
    let decide = move |snapshot: &MachineSnapshot| {
        decide(snapshot).map_err(|(reason, text)| (reason, format!("{short} {text}")))
    };
    let carried = bmdb.try_execute_on_machine(order, machine_id(&name), decide).await?;
    format_outcome(name, carried.outcome, format)
}
